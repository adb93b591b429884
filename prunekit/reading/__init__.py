"""Readers of files that a stranger may have written: text, JSON, YAML and arrays, bounded before they allocate."""
