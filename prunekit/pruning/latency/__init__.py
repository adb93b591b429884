"""Budgets of time: profiles of this machine and of others, and what is asked of a time and was measured."""
