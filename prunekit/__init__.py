"""prunekit: prune a trained PyTorch model to a budget, and prove what came out.

Public names are imported on first use (PEP 562), so that `import prunekit` does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunekit.channels.channel_map import ChannelMap
    from prunekit.channels.rules.rule import register_rule
    from prunekit.channels.trace import trace
    from prunekit.compaction.compact_model import compact  # likewise
    from prunekit.compaction.model_folder import load, save
    from prunekit.criteria.criterion import Evidence, register_criterion
    from prunekit.deploy.batchnorm_folding import fold_batchnorm
    from prunekit.deploy.subnormals import flush_subnormals
    from prunekit.deploy.transform import channels_last
    from prunekit.errors import PrunekitError
    from prunekit.inspection.capture.intervention import intervene
    from prunekit.inspection.capture.recorder import (
        Capture,
        capture,  # not through the package: there mypy finds the module first
    )
    from prunekit.inspection.diagnosis.diagnose_model import diagnose
    from prunekit.inspection.diagnosis.findings import Diagnosis
    from prunekit.inspection.visualize.class_maps import class_activation_map, saliency
    from prunekit.jobs.bench import Benchmark, bench
    from prunekit.jobs.explain import Explanation, explain
    from prunekit.jobs.profile import profile
    from prunekit.jobs.prune.latency_profile import Profile
    from prunekit.jobs.prune.one_shot import Pruned, plan, prune
    from prunekit.jobs.prune.pruner import Pruner
    from prunekit.jobs.run.job_inputs import Own
    from prunekit.jobs.run.results import RunResult
    from prunekit.jobs.sensitivity import Sensitivity, sensitivity
    from prunekit.masks.activation_masks import ActivationMasks
    from prunekit.masks.gradient_clamps import clamp_activation_grad, clamp_weight_grad
    from prunekit.masks.masked_model import ChangingMasks, masked
    from prunekit.masks.thresholds import ActivationThresholds, calibrate_thresholds
    from prunekit.measure.runtimes.runtime import register_runtime
    from prunekit.measure.runtimes.session import Session
    from prunekit.measure.verification import Verification, verify
    from prunekit.planning.budgets.budget import register_budget
    from prunekit.planning.costs import Term
    from prunekit.planning.plan import Plan, load_plan
    from prunekit.recipe_jobs import finetune
    from prunekit.repair.repair_report import RepairReport
    from prunekit.report.pages.model_summary import ModelSummary, summary
    from prunekit.report.sections.section import register_section
    from prunekit.settings.calibration import CalibrationSettings, RepairSettings
    from prunekit.settings.deployment import DeploySettings, LatencySettings
    from prunekit.settings.inputs import (
        AugmentSettings,
        ColorJitterSettings,
        DataSettings,
        ModelSettings,
        RandAugmentSettings,
    )
    from prunekit.settings.job import JobSettings
    from prunekit.settings.prune import BudgetSettings, PruneSettings, ScheduleSettings, Target
    from prunekit.settings.train import (
        ActivationSettings,
        AverageSettings,
        CheckpointSettings,
        ClampSettings,
        DistillSettings,
        FeatureSettings,
        RegularizerSettings,
        TrainSettings,
        WatchSettings,
    )
    from prunekit.statistics.channel_stats import ChannelStats
    from prunekit.statistics.collection import StatsCollector
    from prunekit.statistics.collection import collect as calibrate
    from prunekit.statistics.taylor_terms import collect_gradients
    from prunekit.tasks.task import register_task
    from prunekit.training.batchnorm_statistics import recalibrate_batchnorm
    from prunekit.training.callbacks.gradient_flow import GradientFlow
    from prunekit.training.optimizers import (
        transfer,  # likewise
        transfer_average,
    )
    from prunekit.utils.inputs import Keywords

__version__ = version("prunekit")

_PLACES = {
    "ActivationMasks": "prunekit.masks.activation_masks:ActivationMasks",
    "ActivationSettings": "prunekit.settings.train:ActivationSettings",
    "ActivationThresholds": "prunekit.masks.thresholds:ActivationThresholds",
    "AugmentSettings": "prunekit.settings.inputs:AugmentSettings",
    "AverageSettings": "prunekit.settings.train:AverageSettings",
    "Benchmark": "prunekit.jobs.bench:Benchmark",
    "BudgetSettings": "prunekit.settings.prune:BudgetSettings",
    "CalibrationSettings": "prunekit.settings.calibration:CalibrationSettings",
    "Capture": "prunekit.inspection.capture.recorder:Capture",
    "ChangingMasks": "prunekit.masks.masked_model:ChangingMasks",
    "ChannelMap": "prunekit.channels.channel_map:ChannelMap",
    "ChannelStats": "prunekit.statistics.channel_stats:ChannelStats",
    "CheckpointSettings": "prunekit.settings.train:CheckpointSettings",
    "ClampSettings": "prunekit.settings.train:ClampSettings",
    "ColorJitterSettings": "prunekit.settings.inputs:ColorJitterSettings",
    "DataSettings": "prunekit.settings.inputs:DataSettings",
    "DeploySettings": "prunekit.settings.deployment:DeploySettings",
    "Diagnosis": "prunekit.inspection.diagnosis.findings:Diagnosis",
    "DistillSettings": "prunekit.settings.train:DistillSettings",
    "Evidence": "prunekit.criteria.criterion:Evidence",
    "Explanation": "prunekit.jobs.explain:Explanation",
    "FeatureSettings": "prunekit.settings.train:FeatureSettings",
    "GradientFlow": "prunekit.training.callbacks.gradient_flow:GradientFlow",
    "JobSettings": "prunekit.settings.job:JobSettings",
    "Keywords": "prunekit.utils.inputs:Keywords",
    "LatencySettings": "prunekit.settings.deployment:LatencySettings",
    "ModelSettings": "prunekit.settings.inputs:ModelSettings",
    "ModelSummary": "prunekit.report.pages.model_summary:ModelSummary",
    "Own": "prunekit.jobs.run.job_inputs:Own",
    "Plan": "prunekit.planning.plan:Plan",
    "Profile": "prunekit.jobs.prune.latency_profile:Profile",
    "PruneSettings": "prunekit.settings.prune:PruneSettings",
    "Pruned": "prunekit.jobs.prune.one_shot:Pruned",
    "PrunekitError": "prunekit.errors:PrunekitError",
    "Pruner": "prunekit.jobs.prune.pruner:Pruner",
    "RandAugmentSettings": "prunekit.settings.inputs:RandAugmentSettings",
    "RegularizerSettings": "prunekit.settings.train:RegularizerSettings",
    "RepairReport": "prunekit.repair.repair_report:RepairReport",
    "RepairSettings": "prunekit.settings.calibration:RepairSettings",
    "RunResult": "prunekit.jobs.run.results:RunResult",
    "ScheduleSettings": "prunekit.settings.prune:ScheduleSettings",
    "Sensitivity": "prunekit.jobs.sensitivity:Sensitivity",
    "Session": "prunekit.measure.runtimes.session:Session",
    "StatsCollector": "prunekit.statistics.collection:StatsCollector",
    "Target": "prunekit.settings.prune:Target",
    "Term": "prunekit.planning.costs:Term",
    "TrainSettings": "prunekit.settings.train:TrainSettings",
    "Verification": "prunekit.measure.verification:Verification",
    "WatchSettings": "prunekit.settings.train:WatchSettings",
    "bench": "prunekit.jobs.bench:bench",
    "calibrate": "prunekit.statistics.collection:collect",  # with torchvision's attention registered, as for trace
    "calibrate_thresholds": "prunekit.masks.thresholds:calibrate_thresholds",
    "capture": "prunekit.inspection.capture.recorder:capture",
    "channels_last": "prunekit.deploy.transform:channels_last",
    "clamp_activation_grad": "prunekit.masks.gradient_clamps:clamp_activation_grad",
    "clamp_weight_grad": "prunekit.masks.gradient_clamps:clamp_weight_grad",
    "class_activation_map": "prunekit.inspection.visualize.class_maps:class_activation_map",
    "collect_gradients": "prunekit.statistics.taylor_terms:collect_gradients",
    "compact": "prunekit.compaction.compact_model:compact",
    "diagnose": "prunekit.inspection.diagnosis.diagnose_model:diagnose",
    "explain": "prunekit.jobs.explain:explain",
    "finetune": "prunekit.recipe_jobs:finetune",
    "flush_subnormals": "prunekit.deploy.subnormals:flush_subnormals",
    "fold_batchnorm": "prunekit.deploy.batchnorm_folding:fold_batchnorm",
    "intervene": "prunekit.inspection.capture.intervention:intervene",
    "load": "prunekit.compaction.model_folder:load",
    "load_plan": "prunekit.planning.plan:load_plan",
    "masked": "prunekit.masks.masked_model:masked",
    "plan": "prunekit.jobs.prune.one_shot:plan",
    "profile": "prunekit.jobs.profile:profile",
    "prune": "prunekit.jobs.prune.one_shot:prune",
    "recalibrate_batchnorm": "prunekit.training.batchnorm_statistics:recalibrate_batchnorm",
    "register_budget": "prunekit.planning.budgets.budget:register_budget",
    "register_criterion": "prunekit.criteria.criterion:register_criterion",
    "register_rule": "prunekit.channels.rules.rule:register_rule",
    "register_runtime": "prunekit.measure.runtimes.runtime:register_runtime",
    "register_section": "prunekit.report.sections.section:register_section",
    "register_task": "prunekit.tasks.task:register_task",
    "saliency": "prunekit.inspection.visualize.class_maps:saliency",
    "save": "prunekit.compaction.model_folder:save",
    "sensitivity": "prunekit.jobs.sensitivity:sensitivity",
    "summary": "prunekit.report.pages.model_summary:summary",
    "trace": "prunekit.channels.trace:trace",  # with the equivalents of torchvision's attention registered
    "transfer": "prunekit.training.optimizers:transfer",
    "transfer_average": "prunekit.training.optimizers:transfer_average",
    "verify": "prunekit.measure.verification:verify",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'prunekit' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])


__all__ = [
    "ActivationMasks",
    "ActivationSettings",
    "ActivationThresholds",
    "AugmentSettings",
    "AverageSettings",
    "Benchmark",
    "BudgetSettings",
    "CalibrationSettings",
    "Capture",
    "ChangingMasks",
    "ChannelMap",
    "ChannelStats",
    "CheckpointSettings",
    "ClampSettings",
    "ColorJitterSettings",
    "DataSettings",
    "DeploySettings",
    "Diagnosis",
    "DistillSettings",
    "Evidence",
    "Explanation",
    "FeatureSettings",
    "GradientFlow",
    "JobSettings",
    "Keywords",
    "LatencySettings",
    "ModelSettings",
    "ModelSummary",
    "Own",
    "Plan",
    "Profile",
    "PruneSettings",
    "Pruned",
    "PrunekitError",
    "Pruner",
    "RandAugmentSettings",
    "RegularizerSettings",
    "RepairReport",
    "RepairSettings",
    "RunResult",
    "ScheduleSettings",
    "Sensitivity",
    "Session",
    "StatsCollector",
    "Target",
    "Term",
    "TrainSettings",
    "Verification",
    "WatchSettings",
    "bench",
    "calibrate",
    "calibrate_thresholds",
    "capture",
    "channels_last",
    "clamp_activation_grad",
    "clamp_weight_grad",
    "class_activation_map",
    "collect_gradients",
    "compact",
    "diagnose",
    "explain",
    "finetune",
    "flush_subnormals",
    "fold_batchnorm",
    "intervene",
    "load",
    "load_plan",
    "masked",
    "plan",
    "profile",
    "prune",
    "recalibrate_batchnorm",
    "register_budget",
    "register_criterion",
    "register_rule",
    "register_runtime",
    "register_section",
    "register_task",
    "saliency",
    "save",
    "sensitivity",
    "summary",
    "trace",
    "transfer",
    "transfer_average",
    "verify",
]
