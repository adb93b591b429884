"""Plans: which channels stay, by scores and budgets."""
