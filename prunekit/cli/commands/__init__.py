"""Commands, in a file each."""
