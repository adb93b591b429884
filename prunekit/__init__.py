"""prunekit: prune a trained PyTorch model to a budget, and prove what came out.

Public names are imported on first use (PEP 562), so that `import prunekit` does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunekit.calibration import ChannelStats, StatsCollector, collect_gradients
    from prunekit.calibration import collect as calibrate
    from prunekit.capturing import Capture
    from prunekit.capturing.capture import capture  # not through the package: there mypy finds the module first
    from prunekit.capturing.intervene import intervene
    from prunekit.channels import ChannelMap, register_rule, trace
    from prunekit.compaction import load, save
    from prunekit.compaction.compact import compact  # likewise
    from prunekit.criteria import Evidence, register_criterion
    from prunekit.deploy import channels_last, flush_subnormals, fold_batchnorm
    from prunekit.diagnosis import Diagnosis, diagnose
    from prunekit.errors import PrunekitError
    from prunekit.inputs import Keywords
    from prunekit.jobs import finetune
    from prunekit.masking import (
        ActivationMasks,
        ActivationThresholds,
        ChangingMasks,
        calibrate_thresholds,
        clamp_activation_grad,
        clamp_weight_grad,
        masked,
    )
    from prunekit.measure.runtimes import Session, register_runtime
    from prunekit.measure.verify import Verification, verify
    from prunekit.models import ModelSettings
    from prunekit.planning import BudgetSettings, Plan, PruneSettings, ScheduleSettings, load_plan
    from prunekit.planning.budgets import Term, register_budget
    from prunekit.repair import RepairReport, RepairSettings
    from prunekit.report.model_summary import ModelSummary, summary
    from prunekit.report.sections import register_section
    from prunekit.settings.calibration import CalibrationSettings
    from prunekit.settings.data import AugmentSettings, ColorJitterSettings, DataSettings, RandAugmentSettings
    from prunekit.settings.deploy import DeploySettings
    from prunekit.settings.job import JobSettings
    from prunekit.settings.latency import LatencySettings
    from prunekit.settings.masking import ActivationSettings, ClampSettings
    from prunekit.settings.pruning import Target
    from prunekit.settings.training import (
        AverageSettings,
        CheckpointSettings,
        DistillSettings,
        FeatureSettings,
        RegularizerSettings,
        TrainSettings,
        WatchSettings,
    )
    from prunekit.tasks.named import register_task
    from prunekit.training import GradientFlow, recalibrate_batchnorm, transfer_average
    from prunekit.training.transfer import transfer  # likewise
    from prunekit.visualize import class_activation_map, saliency
    from prunekit.workflow import Own, RunResult, plan, profile, prune
    from prunekit.workflow.bench import Benchmark, bench
    from prunekit.workflow.explain import (
        Explanation,
        explain,  # not through the package: there mypy finds the module first
    )
    from prunekit.workflow.oneshot import Pruned
    from prunekit.workflow.profiled import Profile
    from prunekit.workflow.pruner import Pruner
    from prunekit.workflow.sensitivity import Sensitivity, sensitivity

__version__ = version("prunekit")

_PLACES = {
    "ActivationMasks": "prunekit.masking:ActivationMasks",
    "ActivationSettings": "prunekit.settings.masking:ActivationSettings",
    "ActivationThresholds": "prunekit.masking:ActivationThresholds",
    "AugmentSettings": "prunekit.settings.data:AugmentSettings",
    "AverageSettings": "prunekit.settings.training:AverageSettings",
    "Benchmark": "prunekit.workflow.bench:Benchmark",
    "BudgetSettings": "prunekit.planning:BudgetSettings",
    "CalibrationSettings": "prunekit.settings.calibration:CalibrationSettings",
    "Capture": "prunekit.capturing:Capture",
    "ChangingMasks": "prunekit.masking:ChangingMasks",
    "ChannelMap": "prunekit.channels:ChannelMap",
    "ChannelStats": "prunekit.calibration:ChannelStats",
    "CheckpointSettings": "prunekit.settings.training:CheckpointSettings",
    "ClampSettings": "prunekit.settings.masking:ClampSettings",
    "ColorJitterSettings": "prunekit.settings.data:ColorJitterSettings",
    "DataSettings": "prunekit.settings.data:DataSettings",
    "DeploySettings": "prunekit.settings.deploy:DeploySettings",
    "Diagnosis": "prunekit.diagnosis:Diagnosis",
    "DistillSettings": "prunekit.settings.training:DistillSettings",
    "Evidence": "prunekit.criteria:Evidence",
    "Explanation": "prunekit.workflow.explain:Explanation",
    "FeatureSettings": "prunekit.settings.training:FeatureSettings",
    "GradientFlow": "prunekit.training:GradientFlow",
    "JobSettings": "prunekit.settings.job:JobSettings",
    "Keywords": "prunekit.inputs:Keywords",
    "LatencySettings": "prunekit.settings.latency:LatencySettings",
    "ModelSettings": "prunekit.models:ModelSettings",
    "ModelSummary": "prunekit.report.model_summary:ModelSummary",
    "Own": "prunekit.workflow:Own",
    "Plan": "prunekit.planning:Plan",
    "Profile": "prunekit.workflow.profiled:Profile",
    "PruneSettings": "prunekit.planning:PruneSettings",
    "Pruned": "prunekit.workflow.oneshot:Pruned",
    "PrunekitError": "prunekit.errors:PrunekitError",
    "Pruner": "prunekit.workflow.pruner:Pruner",
    "RandAugmentSettings": "prunekit.settings.data:RandAugmentSettings",
    "RegularizerSettings": "prunekit.settings.training:RegularizerSettings",
    "RepairReport": "prunekit.repair:RepairReport",
    "RepairSettings": "prunekit.repair:RepairSettings",
    "RunResult": "prunekit.workflow:RunResult",
    "ScheduleSettings": "prunekit.planning:ScheduleSettings",
    "Sensitivity": "prunekit.workflow.sensitivity:Sensitivity",
    "Session": "prunekit.measure.runtimes:Session",
    "StatsCollector": "prunekit.calibration:StatsCollector",
    "Target": "prunekit.settings.pruning:Target",
    "Term": "prunekit.planning.budgets:Term",
    "TrainSettings": "prunekit.settings.training:TrainSettings",
    "Verification": "prunekit.measure.verify:Verification",
    "WatchSettings": "prunekit.settings.training:WatchSettings",
    "bench": "prunekit.workflow.bench:bench",
    "calibrate": "prunekit.workflow.calibrate:collect",  # with torchvision's attention registered, as for trace
    "calibrate_thresholds": "prunekit.masking:calibrate_thresholds",
    "capture": "prunekit.capturing:capture",
    "channels_last": "prunekit.deploy:channels_last",
    "clamp_activation_grad": "prunekit.masking:clamp_activation_grad",
    "clamp_weight_grad": "prunekit.masking:clamp_weight_grad",
    "class_activation_map": "prunekit.visualize:class_activation_map",
    "collect_gradients": "prunekit.calibration:collect_gradients",
    "compact": "prunekit.compaction:compact",
    "diagnose": "prunekit.diagnosis:diagnose",
    "explain": "prunekit.workflow:explain",
    "finetune": "prunekit.jobs:finetune",
    "flush_subnormals": "prunekit.deploy:flush_subnormals",
    "fold_batchnorm": "prunekit.deploy:fold_batchnorm",
    "intervene": "prunekit.capturing:intervene",
    "load": "prunekit.compaction:load",
    "load_plan": "prunekit.planning:load_plan",
    "masked": "prunekit.masking:masked",
    "plan": "prunekit.workflow:plan",
    "profile": "prunekit.workflow:profile",
    "prune": "prunekit.workflow:prune",
    "recalibrate_batchnorm": "prunekit.training:recalibrate_batchnorm",
    "register_budget": "prunekit.planning.budgets:register_budget",
    "register_criterion": "prunekit.criteria:register_criterion",
    "register_rule": "prunekit.channels:register_rule",
    "register_runtime": "prunekit.measure.runtimes:register_runtime",
    "register_section": "prunekit.report.sections:register_section",
    "register_task": "prunekit.tasks:register_task",
    "saliency": "prunekit.visualize:saliency",
    "save": "prunekit.compaction:save",
    "sensitivity": "prunekit.workflow:sensitivity",
    "summary": "prunekit.report.model_summary:summary",
    "trace": "prunekit.workflow.plan_search:trace",  # with the equivalents of torchvision's attention registered
    "transfer": "prunekit.training:transfer",
    "transfer_average": "prunekit.training:transfer_average",
    "verify": "prunekit.measure.verify:verify",
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
