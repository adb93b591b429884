"""Commands, those that belong together in one file."""
