"""Training and fine-tuning on one device, deterministic from a seed; BatchNorm recalibration."""

from prunekit.settings.training import (
    AverageSettings,
    CheckpointSettings,
    DistillSettings,
    FeatureSettings,
    RegularizerSettings,
    TrainSettings,
    WatchSettings,
)
from prunekit.training.asked import Sources, asked_parts, needs_plan, task_loss
from prunekit.training.averaging import Average
from prunekit.training.checkpoints import Checkpoints, CheckpointWarning
from prunekit.training.checks import check_fits
from prunekit.training.clamping import check_clamps
from prunekit.training.compiling import CompiledForward
from prunekit.training.distillation import Distillation, TeacherCost
from prunekit.training.features import PlanInForce, feature_paths
from prunekit.training.gradient_flow import FlowRow, GradientFlow
from prunekit.training.history import ClampRow, Compilation, EpochRow, History, LeftRun
from prunekit.training.loop import fit
from prunekit.training.optimizers import MakeOptimizer
from prunekit.training.parts import Part, Training, Within
from prunekit.training.pruning import (
    LearningRateRewinding,
    PlanChange,
    Planner,
    PruningSchedule,
    ScheduledMasks,
    steps_per_epoch,
)
from prunekit.training.recalibrate import recalibrate_batchnorm
from prunekit.training.regularizers import Sparsifying
from prunekit.training.replicas import share_buffers, share_corrupt
from prunekit.training.transfer import transfer, transfer_average, transfer_run
from prunekit.training.watching import Watching

__all__ = [
    "Average",
    "AverageSettings",
    "CheckpointSettings",
    "CheckpointWarning",
    "Checkpoints",
    "ClampRow",
    "Compilation",
    "CompiledForward",
    "DistillSettings",
    "Distillation",
    "EpochRow",
    "FeatureSettings",
    "FlowRow",
    "GradientFlow",
    "History",
    "LearningRateRewinding",
    "LeftRun",
    "MakeOptimizer",
    "Part",
    "PlanChange",
    "PlanInForce",
    "Planner",
    "PruningSchedule",
    "RegularizerSettings",
    "ScheduledMasks",
    "Sources",
    "Sparsifying",
    "TeacherCost",
    "TrainSettings",
    "Training",
    "WatchSettings",
    "Watching",
    "Within",
    "asked_parts",
    "check_clamps",
    "check_fits",
    "feature_paths",
    "fit",
    "needs_plan",
    "recalibrate_batchnorm",
    "share_buffers",
    "share_corrupt",
    "steps_per_epoch",
    "task_loss",
    "transfer",
    "transfer_average",
    "transfer_run",
]
