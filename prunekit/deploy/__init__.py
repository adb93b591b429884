"""Changes that make a finished model faster and leave its outputs alone, each on a copy, each verified."""
