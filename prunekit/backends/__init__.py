"""Backends, one for each runtime: each writes models to files, opens, times and quantizes them."""
