"""Callbacks of a training run: masks, distillation, averages of weights, regularizers, TensorBoard."""
