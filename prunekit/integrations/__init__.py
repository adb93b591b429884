"""Pruning inside the training loops of other libraries, in a file for each library."""
