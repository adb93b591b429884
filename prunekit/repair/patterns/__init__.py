"""Zeros among single weights: chosen by the error that is left, layer by layer, and the kept weights fitted again."""
