"""Looking into networks, which pruning itself does not need: pictures."""
