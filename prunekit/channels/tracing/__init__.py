"""One run of a model while labels flow through every operator."""
