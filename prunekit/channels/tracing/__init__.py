"""One run of a model while labels flow through every operator, and the map of channels that it leaves."""
