"""Settings of training: optimizer, distillation, averages, checkpoints, activation masks and gradient clamps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from prunekit.known_names import Count, FloatName
from prunekit.settings.validation import Checked

Sharding = Literal["replicas", "full"]
OWN_RATES = (
    "expected a number, because the optimizer is your own, whose rates have a scale of their own, got 'auto'; the "
    "number is passed on as `lr=`"
)
REWOUND_RATES = (
    "expected a number, because the pruning schedule rewinds the learning rate in rounds that each begin in another "
    "state, got 'auto'; or set rewind_lr to false"
)
RANDOM_RATES = (
    "expected a number, because a search from random weights says nothing of their training, got 'auto'; for example "
    "0.05 with sgd, or 0.0005 with adamw"
)
"""Reasons for which there is no search for a learning rate."""


@dataclass(frozen=True)
class ActivationSettings(Checked):
    """Activation masks, while fine-tuning and when the result is measured.

    Exactly one of `threshold`, `target` and `overall` is given.

    Example:
        >>> import prunekit as pk
        >>> masks = pk.ActivationSettings(modules=("layer1.*",), target=0.5)
        >>> pk.JobSettings("mine", pk.ModelSettings("resnet18"), activations=masks).activations.side
        'output'
    """

    modules: Annotated[tuple[str, ...], MinLen(1)]
    """Globs over paths of modules whose activations are masked."""
    side: Literal["input", "output"] = "output"
    """Masks the `input` or the `output` of a module."""
    threshold: Annotated[float, Ge(0)] | None = None
    """Activations of a smaller absolute value are set to zero."""
    target: Annotated[float, Gt(0), Lt(1)] | None = None
    """Share of zeros after each mask; calibration images give the thresholds."""
    overall: Annotated[float, Gt(0), Lt(1)] | None = None
    """Share of zeros after all masks, spread so that the model's output changes least."""
    by: Literal["macs", "values"] = "macs"
    """Weight of a mask in `overall`: `macs` of the layers that read its values, or number of `values`."""


@dataclass(frozen=True)
class ClampSettings(Checked):
    """A gradient clamp: see `prunekit.clamp_activation_grad` and `prunekit.clamp_weight_grad`.

    Example:
        >>> import prunekit as pk
        >>> pk.TrainSettings(clamp_weight_grad=pk.ClampSettings(limit=1.0, by="norm")).clamp_weight_grad.limit
        1.0
    """

    limit: Annotated[float, Gt(0)]
    """Largest absolute value of an entry, or norm of the gradient."""
    by: Literal["value", "norm"] = "value"
    """What is limited: each entry (`value`), or the norm of the whole gradient (`norm`)."""
    modules: Annotated[tuple[str, ...], MinLen(1)] | None = None
    """Globs over module paths; null: every module that can be clamped."""


@dataclass(frozen=True)
class FeatureSettings(Checked):
    """A loss on the difference of features of student and teacher.

    Example:
        >>> import prunekit as pk
        >>> features = pk.FeatureSettings(modules=("layer3", "layer4"), weight=0.5)
        >>> pk.TrainSettings(distill=pk.DistillSettings(features=features)).distill.features.modules
        ('layer3', 'layer4')
    """

    modules: Annotated[tuple[str, ...], MinLen(1)]
    """Globs over paths of modules whose outputs are compared."""
    weight: Annotated[float, Gt(0)] = 1.0
    """Weight of the feature loss."""


@dataclass(frozen=True)
class DistillSettings(Checked):
    """Knowledge distillation from the dense model: see `prunekit.training.callbacks.distillation.Distillation`.

    What is null suits the task. Images with a label each are learnt by matching functions (Beyer et al. 2022,
    "Knowledge distillation: a good teacher is patient and consistent"): teacher and student see the same blends of two
    images, and the student learns the teacher's answers alone. Elsewhere it learns from labels too.

    Example:
        >>> import prunekit as pk
        >>> pk.TrainSettings(distill=pk.DistillSettings(temperature=2.0)).distill.weight
        1.0
    """

    weight: Annotated[float, Ge(0)] = 1.0
    """Weight of the loss on what the teacher answers."""
    temperature: Annotated[float, Gt(0)] | None = None
    """Divisor of logits before they are compared; higher counts small ones more. null: 1 for images with a label each
    and for heads of detectors, else 2."""
    features: FeatureSettings | None = None
    """Loss on features of the teacher."""
    labels: Annotated[float, Ge(0)] | None = None
    """Weight of the task's own loss, on labels. null: 0 for images with a label each, else 1."""
    blend: bool | None = None
    """Blends pairs of images before teacher and student see them: each batch by mixup or by CutMix. null: true for
    images with a label each, unless the training has mixup or CutMix of its own."""


@dataclass(frozen=True)
class RegularizerSettings(Checked):
    """A regularizer that makes whole channels small in training.

    Example:
        >>> import prunekit as pk
        >>> pk.TrainSettings(regularize=pk.RegularizerSettings("group_lasso", strength=1e-3)).regularize.method
        'group_lasso'
    """

    method: Literal["group_lasso", "bn_l1", "growing"]
    """Penalty: on norms of whole channels (`group_lasso`), on scales of BatchNorm (`bn_l1`), or growing, on what a plan
    removes (`growing`, only in `sparsify`)."""
    strength: Annotated[float, Gt(0)] | None = None
    """Factor of the penalty; null: 1e-4. For `growing`: its ceiling; null: 1."""
    rise: Annotated[float, Gt(0), Lt(1)] = 0.75
    """Share of the steps after which `growing` is at its ceiling."""
    every: Annotated[int, Ge(1)] = 10
    """Steps between increases of `growing`."""


@dataclass(frozen=True)
class AverageSettings(Checked):
    """An average of weights that is evaluated and kept in their place.

    Example:
        >>> import prunekit as pk
        >>> pk.TrainSettings(average=pk.AverageSettings("swa", start=0.5)).average.method
        'swa'
    """

    method: Literal["ema", "swa"] = "ema"
    """Exponential moving average (`ema`), or plain mean (`swa`, stochastic weight averaging)."""
    decay: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay of `ema`; at most (1 + n) / (10 + n) at the n-th update."""
    start: Annotated[float, Ge(0), Lt(1)] | None = None
    """Share of the steps after which averaging begins; null: 0 for `ema`, 0.75 for `swa`."""
    every: Annotated[int, Ge(1)] | None = None
    """Steps between updates; null: 1 for `ema`, an epoch for `swa`."""
    lr: Annotated[float, Gt(0)] | None = None
    """Constant learning rate while averaging, as in the SWA paper; null: the schedule goes on."""
    statistics: Literal["averaged", "recalibrated"] | None = None
    """BatchNorm's statistics: `averaged` like the weights, or `recalibrated` on training images at each evaluation;
    null: the former for `ema`, the latter for `swa`."""


@dataclass(frozen=True)
class AdapterSettings(Checked):
    """Small matrices beside the layers of the compact model, which alone are trained, and merged into them at the end.

    Example:
        >>> import prunekit as pk
        >>> pk.TrainSettings(optimizer="adamw", lr=2e-4, adapter=pk.AdapterSettings(rank=8)).adapter.alpha
        32.0
    """

    method: Literal["lora"] = "lora"
    """Kind: `lora`, products of two matrices of low rank (Hu et al. 2022)."""
    rank: Annotated[int, Ge(1)] = 16
    """Rank of each product."""
    alpha: Annotated[float, Gt(0)] = 32.0
    """Factor of each product, times the rank."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout of what adapters read."""
    modules: Annotated[tuple[str, ...], MinLen(1)] | None = None
    """Globs over paths of layers; null: all Linear layers and convolutions within blocks, but none with shared
    weights."""


@dataclass(frozen=True)
class TrainSettings(Checked):
    """One training run: `baseline`, `sparsify` and `finetune` all have this form.

    Example:
        >>> import prunekit as pk
        >>> settings = pk.TrainSettings(epochs=30, optimizer="adamw", lr=1e-3, weight_decay=0.05)
        >>> job = pk.JobSettings("mine", pk.ModelSettings("resnet18"), finetune=settings)
        >>> job.finetune.epochs
        30
        >>> pk.TrainSettings(epochs=-1, momentum=1.5)
        Traceback (most recent call last):
        prunekit.errors.SettingsError: TrainSettings: epochs: expected a whole number of ...; momentum: ...
    """

    epochs: Count = 5
    """Passes over the training images; 0 leaves the model as it is."""
    optimizer: Literal["sgd", "adam", "adamw", "own"] = "sgd"
    """Optimizer; `own`: given as `--optimizer file.py:factory`."""
    lr: Annotated[float, Gt(0)] | Literal["auto"] = 0.05
    """Largest learning rate. `auto`: of three to six rates that are tried before the first step, in at most 5 % of the
    steps, the one of lowest loss on validation samples."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Momentum of `sgd`."""
    nesterov: bool = False
    """Makes the momentum of `sgd` Nesterov's."""
    weight_decay: Annotated[float, Ge(0)] = 5e-4
    """Weight decay."""
    warmup: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of the steps with a linear warm-up, before a cosine to zero (Loshchilov & Hutter 2017); skipped steps do
    not advance it."""
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the target spread over all classes (Szegedy et al. 2016)."""
    mixup: Annotated[float, Ge(0)] = 0.0
    """Blends images of a batch, and their labels, in shares from Beta(mixup, mixup) (Zhang et al. 2018)."""
    cutmix: Annotated[float, Ge(0)] = 0.0
    """Replaces a rectangle of each image by another's, of an area from Beta(cutmix, cutmix) (Yun et al. 2019). With
    mixup too, each image draws one of them."""
    norms: Literal["batch", "running"] | None = None
    """Statistics by which BatchNorm normalizes in training: those of each `batch`, or the `running` ones, which stay as
    they are and hold at low rates only, best with `adamw`. Null: `running` of detectors that were trained before, whose
    batches are small, else `batch`."""
    precision: FloatName = "fp32"
    """Dtype of the forward pass (mixed precision, Micikevicius et al. 2018; fp16 with a loss scale)."""
    accumulate: Annotated[int, Ge(1)] = 1
    """Batches whose gradients make one optimizer step."""
    sharding: Sharding = "replicas"
    """What each process has: the whole model (`replicas`, DDP), or a part of every parameter, gradient and momentum
    (`full`, FSDP2)."""
    compile: bool = False
    """Compiles training steps by `torch.compile`; where that fails, they run in eager mode, and the log says so."""
    gradient_checkpointing: bool = False
    """Computes activations inside blocks again for the backward pass: less memory, more time. Models of transformers
    and timm offer it."""
    clamp_activation_grad: ClampSettings | None = None
    """Clamp of the gradients of activations while they flow back."""
    clamp_weight_grad: ClampSettings | None = None
    """Clamp of the gradients of weights before each step."""
    distill: DistillSettings | Literal["auto"] | None = "auto"
    """Knowledge distillation from the dense model. `auto`: in `finetune`, where the task has what a teacher can tell;
    null: labels alone."""
    regularize: RegularizerSettings | None = None
    """Penalty that makes whole channels small."""
    average: AverageSettings | None = None
    """Average of weights, evaluated and kept in their place."""
    adapter: Literal["lora"] | AdapterSettings | None = None
    """Trains adapters alone, beside the layers of the compact model (only in `finetune`; needs peft)."""
    fake_quantize: Literal["int8"] | None = None
    """Quantization-aware training: convolutions and Linear layers see weights and inputs as int8 would hold them, in
    training and where epochs are compared (only in `finetune`; needs torchao). The result is in float; `quantize`
    writes int8."""

    @property
    def adapters(self) -> AdapterSettings | None:
        """The settings of the adapter, with those that the word `lora` stands for."""
        return AdapterSettings() if self.adapter == "lora" else self.adapter


@dataclass(frozen=True)
class CheckpointSettings(Checked):
    """Checkpoints of a training: when they are written, and how many are kept.

    Example:
        >>> import prunekit as pk
        >>> pk.CheckpointSettings(every_steps=500).keep
        2
    """

    every_seconds: Annotated[float, Gt(0)] | None = 60.0
    """Seconds between checkpoints, or more where writing takes over a twentieth of the time. The end of a training is
    always saved. null: only `every_steps` counts."""
    every_steps: Annotated[int, Ge(1)] | None = None
    """Optimizer steps between checkpoints, at any cost; null: only `every_seconds` counts."""
    keep: Annotated[int, Ge(1)] = 2
    """Checkpoints to keep; each has the best weights."""


@dataclass(frozen=True)
class WatchSettings(Checked):
    """Logs of each training while it runs; none of them changes the training.

    Example:
        >>> import prunekit as pk
        >>> job = pk.JobSettings("mine", pk.ModelSettings("resnet18"), watch=pk.WatchSettings())
        >>> job.watch == pk.JobSettings("mine", pk.ModelSettings("resnet18")).watch
        True
    """

    tensorboard: bool = True
    """Writes TensorBoard's events; else only `scalars/<training>.csv`."""


def finetune_contradictions(job: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys of a `JobSettings`, as plain values, that do not go with adapters or int8, with what was expected.

    Both are for the pruned model alone.
    """
    sections = {
        name: found if isinstance(found := job.get(name), Mapping) else {}
        for name in ("baseline", "sparsify", "finetune", "prune")
    }
    for name in ("baseline", "sparsify"):
        if sections[name].get("adapter") is not None:
            text = "expected null, because all weights of the dense model are trained, got an adapter"
            yield (name, "adapter"), f"{text}; set finetune.adapter"
        if (dtype := sections[name].get("fake_quantize")) is not None:
            text = f"expected null, because the dense model is trained in float, got {dtype!r}"
            yield (name, "fake_quantize"), f"{text}; set finetune.fake_quantize"
    finetune, prune, because = sections["finetune"], sections["prune"], "because finetune.adapter is given"
    if finetune.get("adapter") is None:
        return
    if finetune.get("fake_quantize") is not None:
        text = f"expected null, {because}: int8 holds the sum of a weight and its adapter, which is made after training"
        yield ("finetune", "fake_quantize"), text
    if finetune.get("regularize") is not None:
        yield ("finetune", "regularize"), f"expected null, {because}: the weights that it shrinks are not trained"
    if finetune.get("sharding") == "full":
        yield ("finetune", "sharding"), f"expected 'replicas', {because}, got 'full'"
    clamp = finetune.get("clamp_weight_grad")
    if isinstance(clamp, Mapping) and clamp.get("modules") is not None:
        text = f"expected null, {because}: only gradients of adapters are clamped"
        yield ("finetune", "clamp_weight_grad", "modules"), text
    if prune.get("schedule") is not None:
        text = f"expected null, {because}: adapters are trained on the compact model, whose widths are final"
        yield ("prune", "schedule"), text
    if prune.get("pattern") is not None:
        yield ("prune", "pattern"), f"expected null, {because}: merged adapters would fill its zeros"
