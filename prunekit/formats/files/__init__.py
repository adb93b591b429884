"""Contents of exported files: operators and expressions that a program may have, and the modules of nodes."""
