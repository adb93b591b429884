"""Narrow copies of a model: tensors cut to what is kept, and norms over what is kept."""
