"""Budgets by name: what each counts, what widths cost of it, and whether they meet it."""
