"""Changes that make a finished model faster and keep its outputs, each on a copy and verified."""
