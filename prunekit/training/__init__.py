"""Training and fine-tuning: the loop, its state and checkpoints, on one device or several."""
