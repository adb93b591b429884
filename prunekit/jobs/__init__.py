"""Jobs, in a file each: fine-tuning, benchmarks, explanations, profiles, sensitivity and the others."""
