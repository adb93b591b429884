"""Settings of a whole job, and their text as a recipe, which `prunekit.recipe` reads from YAML."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from ruamel.yaml import YAML

from prunekit.errors import UsageError
from prunekit.known_names import CRITERIA, TASKS, FormatName
from prunekit.settings.calibration import CalibrationSettings, RepairSettings
from prunekit.settings.deployment import DeploySettings, LatencySettings, QuantizeSettings
from prunekit.settings.inputs import BOXED, DataSettings, ModelSettings
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
    """Name of the job, and of the folder of its runs."""
    model: ModelSettings
    """Model to prune, and its weights."""
    task: Annotated[str, Registered(TASKS)] = "image_classification"
    """Purpose of the data: loss, scores, and how a batch is split. `image_classification` (top-1); `detection` (mAP).
    Texts, `data.source: text`: `causal_lm` and `masked_lm` (perplexity), `embedding` (cosine to the dense model, no
    labels). Your own data: `segmentation` (mean IoU; 255 in a mask is ignored), `text_classification` (token ids;
    top-1), `token_classification`, `seq2seq`, and your own task."""
    data: DataSettings = field(default_factory=DataSettings)
    """Data, its split, and how it becomes inputs."""
    baseline: TrainSettings | None = None
    """Training of the dense model, without `model.weights`."""
    sparsify: TrainSettings | None = None
    """Further training of the dense model, to make channels small before they are removed. `group_lasso` and `bn_l1`
    train before the plan is made; `growing` after it, and shrinks what the plan removes."""
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    """Images for statistics of activations and of BatchNorm."""
    prune: PruneSettings = field(default_factory=PruneSettings)
    """Channels to remove, and how many."""
    repair: RepairSettings | None = None
    """Fit of the kept weights to the dense model, from unlabeled calibration images."""
    finetune: TrainSettings = field(default_factory=TrainSettings)
    """Training of the pruned model under its masks."""
    control: bool = True
    """Trains the dense model equally long too, for a fair comparison; this takes longer than fine-tuning."""
    checkpoint: CheckpointSettings | None = field(default_factory=CheckpointSettings)
    """Checkpoints of each training, to resume a killed run."""
    watch: WatchSettings | None = field(default_factory=WatchSettings)
    """Logs of each training while it runs; null: only the run's own tables."""
    activations: ActivationSettings | None = None
    """Activation masks in fine-tuning; the result is measured with and without them."""
    deploy: DeploySettings = field(default_factory=DeploySettings)
    """Changes to a second copy of the compact model, for deployment."""
    compress: bool = False
    """Stores zeros as single bits in the folders `model` and `deployed`, in tensors that become smaller by it. Exports
    are not compressed."""
    latency: LatencySettings = field(default_factory=LatencySettings)
    """Timing at the end of the run."""
    export: tuple[FormatName, ...] = ()
    """Formats to export to, in the run's folder `exports`; each file is checked, scored and timed."""
    quantize: Literal["int8"] | QuantizeSettings | None = None
    """Also writes exports to `onnx` and `openvino` in int8."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of all random numbers."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:n or mps; auto takes CUDA where there is one."""
    threads: Annotated[int, Ge(1)] | None = None
    """Intra-op CPU threads; null: torch's choice."""
    output: Path = Path("runs")
    """Folder of all runs."""

    @property
    def controlled(self) -> bool:
        """True if a dense control is trained: it learns from labels, as it has no teacher but itself."""
        return self.control and self.data.labels

    @property
    def quantized(self) -> QuantizeSettings | None:
        """The settings of exports in int8; None without any."""
        return QuantizeSettings() if self.quantize == "int8" else self.quantize

    @property
    def known_data(self) -> DataSettings:
        """The settings of the data, with the tokenizer of the model's folder if they name none."""
        textual = self.data.source in ("text", "huggingface") and self.data.tokenizer is None
        return replace(self.data, tokenizer=self.model.folder) if textual else self.data


def unlabeled_contradictions(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys of a job, as plain values, that need labels where `data.labels` is false, with what was expected.

    Mixup and CutMix do not: the dense model answers the mixed images.
    """
    data, task = values.get("data") or {}, values.get("task", "image_classification")
    if data.get("labels", True) is not False:
        return
    because, source = "because data.labels is false", data.get("source", "digits")
    if task != "image_classification" or source in (*BOXED, "text"):
        which = f"data.source is {source!r}" if task == "image_classification" else f"task is {task!r}"
        yield ("data", "labels"), f"expected true, because {which}, got false; it goes with images of one class each"
    if values.get("baseline") is not None and (values.get("model") or {}).get("weights") is None:
        text = f"expected null, {because}, and random weights have nothing to teach; give model.weights"
        yield ("baseline",), text
    criterion = (values.get("prune") or {}).get("criterion", PruneSettings.criterion)
    declared = CRITERIA.declared.get(str(criterion))
    if declared is not None and "gradients" in declared.facts["needs"] and "curvature" not in declared.facts["needs"]:
        text = (
            f"expected one without gradients of the loss, {because}: at the dense model's own answers they say nothing"
        )
        yield ("prune", "criterion"), f"{text}, got {criterion!r}; take elimination"
    for name in ("sparsify", "finetune"):
        section = values.get(name)
        if section is None or not section.get("epochs", TrainSettings.epochs):
            continue
        distill = section.get("distill", TrainSettings.distill)
        if distill is None or (distill == "auto" and name == "sparsify"):  # where `auto` means labels alone
            text = f"expected a mapping such as {{}}, {because}, so that only the dense model can be learned from"
            yield (name, "distill"), f"{text}, got {distill or 'null'}"
        elif isinstance(distill, Mapping) and distill.get("labels"):
            yield (name, "distill", "labels"), f"expected 0, {because}, got {distill['labels']}"
        if section.get("label_smoothing"):
            yield (name, "label_smoothing"), f"expected 0, {because}, got {section['label_smoothing']}"


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
        values = changed_values(job)
    if budget := values.get("prune", {}).get("budget"):
        budget |= budget.pop("others", {})  # all budgets stand beside each other
    yaml.dump(yaml_value(values, ""), stream)
    return stream.getvalue()


def changed_values(value: Any, default: Any = None) -> Any:
    """Return the fields of settings that differ from their defaults; of an optional section, from its own."""
    if isinstance(value, tuple):
        return [changed_values(item) for item in value]
    if not is_dataclass(value):
        return value
    changed = {}
    for one in fields(value):
        made = one.default if one.default_factory is MISSING else one.default_factory()
        then = getattr(default, one.name) if isinstance(default, type(value)) else made
        if (now := getattr(value, one.name)) != then:
            changed[one.name] = changed_values(now, then)
    return changed


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
