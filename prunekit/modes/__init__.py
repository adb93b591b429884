"""Modes of the process: public calls run in torch's usual ones, and leave everything as it was if they fail."""
