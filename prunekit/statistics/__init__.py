"""Statistics of activations and gradients per channel, and second moments of what layers read."""
