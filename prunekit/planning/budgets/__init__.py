"""Budgets by name: what each counts, and whether a choice of widths meets them."""
