"""The linear layers of a running model, the patches that they read, and how errors reach the output."""
