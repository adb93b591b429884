"""Budgets: what each of them counts, a file each, and whether a choice of widths meets those of a job."""

from prunekit.planning.budgets.limits import Budgets, budgets_of
from prunekit.planning.budgets.registry import Budget, Countable, register_budget
from prunekit.planning.terms import Term

__all__ = ["Budget", "Budgets", "Countable", "Term", "budgets_of", "register_budget"]
