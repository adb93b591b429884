"""Plans: which channels are kept, by scores and budgets."""
