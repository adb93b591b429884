"""The public names of prunekit, each once: `__init__.py` imports them from here on first use."""

from prunekit.backends.backend import register_runtime as register_runtime
from prunekit.backends.session import Session as Session
from prunekit.channels.rules.rule import register_rule as register_rule
from prunekit.channels.trace import trace as trace
from prunekit.channels.tracing.channel_map import ChannelMap as ChannelMap
from prunekit.compaction.compact_model import compact as compact
from prunekit.compaction.model_folder import load as load
from prunekit.compaction.model_folder import save as save
from prunekit.compaction.optimizer_transfer import transfer as transfer
from prunekit.compaction.optimizer_transfer import transfer_average as transfer_average
from prunekit.criteria.criterion import Evidence as Evidence
from prunekit.criteria.criterion import register_criterion as register_criterion
from prunekit.deploy.batchnorm_folding import fold_batchnorm as fold_batchnorm
from prunekit.deploy.deployment_transform import channels_last as channels_last
from prunekit.deploy.deployment_transform import flush_subnormals as flush_subnormals
from prunekit.deploy.semi_structured import semi_structured as semi_structured
from prunekit.distributed.shared_work import sharing_work as sharing_work
from prunekit.errors import PrunekitError as PrunekitError
from prunekit.jobs.analyses.bench import Benchmark as Benchmark
from prunekit.jobs.analyses.bench import bench as bench
from prunekit.jobs.analyses.explain import Explanation as Explanation
from prunekit.jobs.analyses.explain import explain as explain
from prunekit.jobs.analyses.frontier import Frontier as Frontier
from prunekit.jobs.analyses.inspect import interface as interface
from prunekit.jobs.analyses.predict import Prediction as Prediction
from prunekit.jobs.analyses.predict import predict as predict
from prunekit.jobs.analyses.sensitivity import Sensitivity as Sensitivity
from prunekit.jobs.analyses.sensitivity import sensitivity as sensitivity
from prunekit.jobs.finetune import RunResult as RunResult
from prunekit.jobs.frontier import frontier as frontier
from prunekit.jobs.run.command_subject import Own as Own
from prunekit.jobs.stages.export_model import Exported as Exported
from prunekit.masks.activation_masks import ActivationMasks as ActivationMasks
from prunekit.masks.gradient_clamps import (
    clamp_activation_grad as clamp_activation_grad,
)
from prunekit.masks.gradient_clamps import (
    clamp_weight_grad as clamp_weight_grad,
)
from prunekit.masks.masked_model import ChangingMasks as ChangingMasks
from prunekit.masks.masked_model import masked as masked
from prunekit.masks.thresholds import (
    ActivationThresholds as ActivationThresholds,
)
from prunekit.masks.thresholds import (
    calibrate_thresholds as calibrate_thresholds,
)
from prunekit.measure.model_size import stored_sizes as stored_sizes
from prunekit.measure.verification import Verification as Verification
from prunekit.measure.verification import verify as verify
from prunekit.models.preprocessing import Preprocessing as Preprocessing
from prunekit.models.vocabulary import Vocabulary as Vocabulary
from prunekit.planning.budgets.budget import register_budget as register_budget
from prunekit.planning.budgets.cost_model import Term as Term
from prunekit.planning.plan import Plan as Plan
from prunekit.planning.plan import load_plan as load_plan
from prunekit.pruning.blocks.prune_folder import PrunedFolder as PrunedFolder
from prunekit.pruning.blocks.prune_folder import prune_folder as prune_folder
from prunekit.pruning.collected_statistics import Collected as Collected
from prunekit.pruning.collected_statistics import collect as collect
from prunekit.pruning.latency.profiled_networks import kit as kit
from prunekit.pruning.latency.profiling import Profile as Profile
from prunekit.pruning.latency.profiling import profile as profile
from prunekit.pruning.prune import plan as plan
from prunekit.pruning.prune import prune as prune
from prunekit.pruning.pruned import Pruned as Pruned
from prunekit.pruning.pruner import Pruner as Pruner
from prunekit.recipe_jobs import export as export
from prunekit.recipe_jobs import finetune as finetune
from prunekit.repair.batchnorm_statistics import recalibrate_batchnorm as recalibrate_batchnorm
from prunekit.repair.repair_report import RepairReport as RepairReport
from prunekit.report.pages.model_summary import ModelSummary as ModelSummary
from prunekit.report.pages.model_summary import summary as summary
from prunekit.report.sections.section import register_section as register_section
from prunekit.settings.calibration import CalibrationSettings as CalibrationSettings
from prunekit.settings.calibration import RepairSettings as RepairSettings
from prunekit.settings.deployment import DeploySettings as DeploySettings
from prunekit.settings.deployment import LatencySettings as LatencySettings
from prunekit.settings.deployment import QuantizeSettings as QuantizeSettings
from prunekit.settings.deployment import Target as Target
from prunekit.settings.inputs import (
    AugmentSettings as AugmentSettings,
)
from prunekit.settings.inputs import (
    ColorJitterSettings as ColorJitterSettings,
)
from prunekit.settings.inputs import (
    DataSettings as DataSettings,
)
from prunekit.settings.inputs import (
    ModelSettings as ModelSettings,
)
from prunekit.settings.inputs import (
    RandAugmentSettings as RandAugmentSettings,
)
from prunekit.settings.job import JobSettings as JobSettings
from prunekit.settings.pruning import (
    BudgetSettings as BudgetSettings,
)
from prunekit.settings.pruning import (
    PruneSettings as PruneSettings,
)
from prunekit.settings.pruning import (
    ScheduleSettings as ScheduleSettings,
)
from prunekit.settings.train import (
    ActivationSettings as ActivationSettings,
)
from prunekit.settings.train import (
    AdapterSettings as AdapterSettings,
)
from prunekit.settings.train import (
    AverageSettings as AverageSettings,
)
from prunekit.settings.train import (
    CheckpointSettings as CheckpointSettings,
)
from prunekit.settings.train import (
    ClampSettings as ClampSettings,
)
from prunekit.settings.train import (
    DistillSettings as DistillSettings,
)
from prunekit.settings.train import (
    FeatureSettings as FeatureSettings,
)
from prunekit.settings.train import (
    RegularizerSettings as RegularizerSettings,
)
from prunekit.settings.train import (
    TrainSettings as TrainSettings,
)
from prunekit.settings.train import (
    WatchSettings as WatchSettings,
)
from prunekit.settings.weight_pattern import PatternSettings as PatternSettings
from prunekit.statistics.channel_stats import ChannelStats as ChannelStats
from prunekit.statistics.channel_stats_collector import StatsCollector as StatsCollector
from prunekit.statistics.channel_stats_collector import calibrate as calibrate
from prunekit.statistics.taylor_terms import collect_gradients as collect_gradients
from prunekit.tasks.task import register_task as register_task
from prunekit.utils.inputs import Keywords as Keywords

__version__: str
