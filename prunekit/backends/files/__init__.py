"""Contents of exported files: programs, their operators and expressions, interfaces, and the modules of nodes."""
