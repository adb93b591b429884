"""The search for a plan that meets the budgets, in one call, in a job, or in a training loop."""
