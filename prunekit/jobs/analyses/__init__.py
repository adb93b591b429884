"""Analyses, in a file each: what is computed, its rows and its text; some run a job's dense model for it."""
