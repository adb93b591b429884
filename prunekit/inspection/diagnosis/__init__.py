"""Diagnosis of a model and its data, from a few batches run forward and backward."""
