"""Repair of a masked model from unlabeled images: layers are fitted again, without gradients or training."""
