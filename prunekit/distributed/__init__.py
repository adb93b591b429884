"""Several processes that work on one job: who is here, what they exchange, and how they fail together."""
