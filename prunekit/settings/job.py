"""Settings of a whole job, and their text as a recipe.

`prunekit.recipe` reads them from YAML, and reports violated annotations with line and column.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from annotated_types import Ge
from ruamel.yaml import YAML

from prunekit.errors import UsageError
from prunekit.known_names import TASKS, FormatName
from prunekit.settings.calibration import CalibrationSettings, RepairSettings
from prunekit.settings.deployment import DeploySettings, LatencySettings, QuantizeSettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.pruning import PruneSettings
from prunekit.settings.train import ActivationSettings, CheckpointSettings, TrainSettings, WatchSettings
from prunekit.settings.validation import Checked
from prunekit.utils.registry import Registered

WITHOUT_EFFECT = ("output", "checkpoint", "watch")
"""Keys that do not change the results of a job."""


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
    """What the data is for: loss, metrics, and how a batch is unpacked. `segmentation` (masks, in which 255 is ignored;
    mean IoU), `text_classification` (token ids; top-1), `token_classification`, `seq2seq` and your own,
    `file.py:object`, need data of your own. `causal_lm` and `masked_lm` (perplexity) and `embedding` (cosine to the
    dense model; no labels) take texts, `data.source: text`."""
    data: DataSettings = field(default_factory=DataSettings)
    """Which images, how they are split, and how they become inputs."""
    baseline: TrainSettings | None = None
    """How to train the dense model first, if `model.weights` is not given."""
    sparsify: TrainSettings | None = None
    """How to train the dense model further, so that channels become small before they are removed; null: not at all.
    This is before the plan for `group_lasso` and `bn_l1`, so that the plan removes what became small, and after it for
    `growing`, which shrinks what the plan removes."""
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    """How activation statistics and BatchNorm recalibration are made, and from how many training images."""
    prune: PruneSettings = field(default_factory=PruneSettings)
    """Which channels are removed, and how many."""
    repair: RepairSettings | None = None
    """How kept weights are fitted to the dense model, from calibration images without labels; null: not at all."""
    finetune: TrainSettings = field(default_factory=TrainSettings)
    """How the pruned model is trained under its masks."""
    control: bool = True
    """Whether the dense model is also trained further, as long and in the same way, for a fair comparison. That takes
    longer than fine-tuning itself; without it the pruned model is compared with the original dense one."""
    checkpoint: CheckpointSettings | None = field(default_factory=CheckpointSettings)
    """When checkpoints of each training are written, from which a killed run is resumed; null: none."""
    gradient_flow: bool = False
    """Whether to record the size of each layer's gradients during training, for `gradients.csv` and the report."""
    watch: WatchSettings | None = field(default_factory=WatchSettings)
    """What is logged of each training while it runs; null: only the run's own tables."""
    activations: ActivationSettings | None = None
    """Activation masks in fine-tuning; the result is measured with and without them."""
    deploy: DeploySettings = field(default_factory=DeploySettings)
    """Changes to a second copy of the compact model, for its deployment."""
    compress: bool = False
    """Whether zeros take one bit each in the weights files of the run's folders `model` and `deployed`: a bitmask and
    the other values, in each tensor that it makes smaller. Every command reads them; exports are not compressed."""
    latency: LatencySettings = field(default_factory=LatencySettings)
    """What is timed at the end of the run."""
    export: tuple[FormatName, ...] = ()
    """Formats that the finished model is exported to, in the run's folder `exports`; each file is checked against the
    model, scored on the test data and timed."""
    quantize: Literal["int8"] | QuantizeSettings | None = None
    """Whether exports to `onnx` and `openvino` are also quantized to int8, as files of their own; null: not."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of all random numbers."""
    device: str = "auto"
    """Where to train: auto, cpu, cuda, cuda:n or mps; auto takes CUDA where there is a device."""
    threads: Annotated[int, Ge(1)] | None = None
    """Intra-op CPU threads for training; null leaves torch's choice."""
    output: Path = Path("runs")
    """Folder that runs are written to."""

    @property
    def known_data(self) -> DataSettings:
        """The settings of the data, with the tokenizer of the model's folder if they name none."""
        textual = self.data.source in ("text", "huggingface") and self.data.tokenizer is None
        return replace(self.data, tokenizer=self.model.folder) if textual else self.data


def dump(job: JobSettings, *, defaults: bool = True) -> str:
    """Return a job as a recipe; `prunekit.recipe.loading.load` of this text returns an equal job.

    Without `defaults`, keys are left out whose values are the defaults.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    values = asdict(job)
    if not defaults:
        values = _changed(job)
    if budget := values.get("prune", {}).get("budget"):
        budget |= budget.pop("others", {})  # all budgets stand beside each other
    yaml.dump(yaml_value(values, ""), stream)
    return stream.getvalue()


def _changed(value: Any, default: Any = None) -> Any:
    """Return the fields of settings that differ from their defaults; of an optional section, from its own."""
    if isinstance(value, tuple):
        return [_changed(item) for item in value]
    if not is_dataclass(value):
        return value
    known = default if isinstance(default, type(value)) else SimpleNamespace(**_defaults(value))
    pairs = ((name, getattr(value, name), getattr(known, name, known)) for name in (one.name for one in fields(value)))
    return {name: _changed(now, then) for name, now, then in pairs if now != then}


def _defaults(settings: Any) -> dict[str, Any]:
    made = {one.name: one.default_factory() for one in fields(settings) if one.default_factory is not MISSING}
    return made | {one.name: one.default for one in fields(settings) if one.default is not MISSING}


def yaml_value(value: Any, path: str) -> Any:
    """Return a value for YAML, without tuples, paths, and NumPy's subclasses of Python's numbers."""
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
