"""Plans: which channels stay, and how a budget decides it."""

from prunekit.planning.curves import MeasuredPoint, SensitivityCurve, cumulated
from prunekit.planning.plan import Plan, load_plan, require_plan
from prunekit.planning.select import free_parts, labels_matching
from prunekit.planning.solve import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings

__all__ = [
    "BudgetSettings",
    "MeasuredPoint",
    "Plan",
    "PruneSettings",
    "ScheduleSettings",
    "SensitivityCurve",
    "cumulated",
    "free_parts",
    "labels_matching",
    "load_plan",
    "make_plan",
    "require_plan",
]
