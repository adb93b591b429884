"""The journey as plain functions over dataclasses: what the recipe and the Python API both call."""

from prunekit.settings.job import JobSettings
from prunekit.workflow.batch_size import LargestBatch, find_batch_size
from prunekit.workflow.calibrate import CalibrationResult, calibrate
from prunekit.workflow.dry_run import dry_run
from prunekit.workflow.explain import Explanation, explain
from prunekit.workflow.finetune import finetune, prune_job
from prunekit.workflow.oneshot import Pruned, plan, prune
from prunekit.workflow.own import Own
from prunekit.workflow.plan_search import Planned, PlanSearch
from prunekit.workflow.profile_run import ProfileRun, profile_job
from prunekit.workflow.profiled import Profile
from prunekit.workflow.profiling import profile
from prunekit.workflow.run_result import RunResult
from prunekit.workflow.sensitivity import Sensitivity, sensitivity
from prunekit.workflow.sensitivity_run import SensitivityRun, analyze

__all__ = [
    "CalibrationResult",
    "Explanation",
    "JobSettings",
    "LargestBatch",
    "Own",
    "PlanSearch",
    "Planned",
    "Profile",
    "ProfileRun",
    "Pruned",
    "RunResult",
    "Sensitivity",
    "SensitivityRun",
    "analyze",
    "calibrate",
    "dry_run",
    "explain",
    "find_batch_size",
    "finetune",
    "plan",
    "profile",
    "profile_job",
    "prune",
    "prune_job",
    "sensitivity",
]
