"""Contents of exported folders: Python that rebuilds a model, configurations of its library, and a model card."""
