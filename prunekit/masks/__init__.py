"""A plan in force on the dense model: weights, gradients and activations masked by hooks, and gradients clamped."""
