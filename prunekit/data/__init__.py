"""Data sets and their batches: split once, augmented and shuffled from the seed alone."""
