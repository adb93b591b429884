"""A decoder in a folder, pruned block by block: its weights, widths and hidden states."""
