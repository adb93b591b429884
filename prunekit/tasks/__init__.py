"""Tasks: how a batch is split into inputs and targets, the loss, and the scores."""
