"""A whole job as a frozen dataclass: the recipe fills it from YAML, the Python API by hand.

The constraints in the annotations are what `prunekit.recipe` checks and reports with line and column.

A job's settings as the text of a recipe.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from ruamel.yaml import YAML

from prunekit.errors import UsageError
from prunekit.registries import TASKS
from prunekit.settings.calibration import CalibrationSettings, RepairSettings
from prunekit.settings.deployment import DeploySettings, LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.prune import PruneSettings
from prunekit.settings.train import ActivationSettings, CheckpointSettings, TrainSettings, WatchSettings
from prunekit.settings.validation import Checked
from prunekit.utils.registry import Registered

WITHOUT_EFFECT = ("output", "checkpoint", "watch")
"""Keys that change nothing in what comes out of a job."""


@dataclass(frozen=True)
class JobSettings(Checked):
    """A whole job: the resolved recipe.

    Example:
        >>> import prunekit as pk
        >>> job = pk.JobSettings(
        ...     "half",
        ...     pk.ModelSettings("resnet18", weights="IMAGENET1K_V1"),
        ...     data=pk.DataSettings("imagefolder", root="photos", image_size=224),
        ...     prune=pk.PruneSettings(pk.BudgetSettings(macs=0.5), criterion="taylor", scope="per_mac"),
        ...     finetune=pk.TrainSettings(epochs=20, lr=0.01),
        ... )
        >>> job.prune.budget.given, job.device, job.baseline
        ({'macs': 0.5}, 'auto', None)
    """

    name: str
    """Name of the job, and of the folder that its runs are in."""
    model: ModelSettings
    """Which model is pruned, and where its weights are from."""
    task: Annotated[str, Registered(TASKS)] = "image_classification"
    """What the data is for: loss, metrics, and how a batch comes apart. `segmentation` (masks, 255 counts for nothing;
    mean IoU), `text_classification` (token ids; top-1) and your own, `file.py:object`, need data of your own."""
    data: DataSettings = field(default_factory=DataSettings)
    """Which images, how they are split, and how they are fed."""
    baseline: TrainSettings | None = None
    """How to train the dense model first, when `model.weights` is not given."""
    sparsify: TrainSettings | None = None
    """How to train the dense model on, so that channels become small before they go; null: not at all. Before the plan
    is made for `group_lasso` and `bn_l1`, which let the plan find what became small; after it for `growing`, which
    shrinks what the plan removes."""
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    """How many training images the activation statistics and the BatchNorm recalibration see, and how they are made."""
    prune: PruneSettings = field(default_factory=PruneSettings)
    """Which channels go, and how many."""
    repair: RepairSettings | None = None
    """How what is left is fitted to the dense model, from calibration images without labels; null: not at all."""
    finetune: TrainSettings = field(default_factory=TrainSettings)
    """How the pruned model is trained under its masks."""
    control: bool = True
    """Whether the dense model is trained on as well, as long and in the same way, for a fair comparison. That takes
    longer than fine-tuning itself; without it the pruned model is compared with the dense one as it was."""
    checkpoint: CheckpointSettings | None = field(default_factory=CheckpointSettings)
    """When each training is written down, so that a run which was killed goes on where it was; null: each training
    starts anew."""
    gradient_flow: bool = False
    """Whether to record how large the gradients of each layer are while a run trains, for `gradients.csv` and the
    report."""
    watch: WatchSettings | None = field(default_factory=WatchSettings)
    """What is written down of each training while it runs; null: nothing but the run's own tables."""
    activations: ActivationSettings | None = None
    """Masks in force while fine-tuning; the result is measured with and without them."""
    deploy: DeploySettings = field(default_factory=DeploySettings)
    """What is done to a second copy of the compact model, for running it."""
    latency: LatencySettings = field(default_factory=LatencySettings)
    """What is timed when the run is over."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of everything that is random."""
    device: str = "auto"
    """Where to train: auto, cpu, cuda, cuda:n or mps; auto takes CUDA where there is a device."""
    threads: Annotated[int, Ge(1)] | None = None
    """Intra-op CPU threads for training; null leaves torch's choice."""
    output: Path = Path("runs")
    """Folder that runs are written to."""


def dump(job: JobSettings) -> str:
    """Return a job as a recipe, every default written out; `prunekit.recipe.loading.load` of this text gives an equal
    job.

    Raises:
        UsageError: a setting holds what YAML has no form for; names it.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    values = asdict(job)
    values["prune"]["budget"] |= values["prune"]["budget"].pop("others")  # all budgets stand beside each other
    yaml.dump(yaml_value(values, ""), stream)
    return stream.getvalue()


def yaml_value(value: Any, path: str) -> Any:
    """Return a value as YAML has it: no tuples, paths, or numbers of NumPy's that only look like Python's."""
    if isinstance(value, Mapping):
        return {str(key): yaml_value(item, f"{path}.{key}".strip(".")) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [yaml_value(item, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    text = "expected a number, text, true, false, null, or a list or mapping of them, as a recipe holds it"
    hint = "; a model that needs more is built by a factory of your own" if path.startswith("model.") else ""
    raise UsageError(f"{path}: {text}, got {type(value).__name__}{hint}")
