"""Parts that every run has: its folder, its inputs, its cached stages, its results."""
