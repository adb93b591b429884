"""Models by name or from the user's own factory, and state dicts from files."""
