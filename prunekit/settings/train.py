"""Settings of training: optimizer, distillation, averages, checkpoints, activation masks and gradient clamps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from prunekit.known_names import Count, FloatName
from prunekit.settings.validation import Checked

Sharding = Literal["replicas", "full"]


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
    """Globs over the paths of modules whose activations are masked."""
    side: Literal["input", "output"] = "output"
    """Whether the inputs of a module are masked, or its outputs."""
    threshold: Annotated[float, Ge(0)] | None = None
    """Activations whose absolute value is below it are set to zero."""
    target: Annotated[float, Gt(0), Lt(1)] | None = None
    """Share of zeros after each mask; thresholds for it are found on the calibration images."""
    overall: Annotated[float, Gt(0), Lt(1)] | None = None
    """Share of zeros after all masks together, spread over them so that the model's output changes least."""
    by: Literal["macs", "values"] = "macs"
    """How an overall share weighs masks: by MACs of the layers that read the masked values, or by number of values."""


@dataclass(frozen=True)
class ClampSettings(Checked):
    """A gradient clamp: see `prunekit.clamp_activation_grad` and `prunekit.clamp_weight_grad`.

    Example:
        >>> import prunekit as pk
        >>> pk.TrainSettings(clamp_weight_grad=pk.ClampSettings(limit=1.0, by="norm")).clamp_weight_grad.limit
        1.0
    """

    limit: Annotated[float, Gt(0)]
    """The largest absolute value of a gradient's entry, or with `by: norm` of the norm of the whole gradient."""
    by: Literal["value", "norm"] = "value"
    """Whether each entry is clamped, or the whole gradient is scaled down to a norm."""
    modules: Annotated[tuple[str, ...], MinLen(1)] | None = None
    """Globs over module paths; null: every module that can be clamped."""


@dataclass(frozen=True)
class FeatureSettings(Checked):
    """A loss on the difference of features of student and teacher.

    See `prunekit.training.callbacks.distillation.Distillation`.

    Example:
        >>> import prunekit as pk
        >>> features = pk.FeatureSettings(modules=("layer3", "layer4"), weight=0.5)
        >>> pk.TrainSettings(distill=pk.DistillSettings(features=features)).distill.features.modules
        ('layer3', 'layer4')
    """

    modules: Annotated[tuple[str, ...], MinLen(1)]
    """Globs over the paths of modules whose outputs are compared."""
    weight: Annotated[float, Gt(0)] = 1.0
    """Weight of the loss on features, beside the cross entropy's 1."""


@dataclass(frozen=True)
class DistillSettings(Checked):
    """Knowledge distillation from the dense model: see `prunekit.training.callbacks.distillation.Distillation`.

    Example:
        >>> import prunekit as pk
        >>> pk.TrainSettings(distill=pk.DistillSettings(temperature=2.0)).distill.weight
        1.0
    """

    weight: Annotated[float, Ge(0)] = 1.0
    """Weight of the loss on logits, beside the cross entropy's 1."""
    temperature: Annotated[float, Gt(0)] = 4.0
    """Logits are divided by this before they are compared: the higher it is, the more small ones count."""
    features: FeatureSettings | None = None
    """Loss on features of the teacher; null: none."""


@dataclass(frozen=True)
class RegularizerSettings(Checked):
    """A regularizer that makes whole channels small in training.

    Example:
        >>> import prunekit as pk
        >>> pk.TrainSettings(regularize=pk.RegularizerSettings("group_lasso", strength=1e-3)).regularize.method
        'group_lasso'
    """

    method: Literal["group_lasso", "bn_l1", "growing"]
    """Which regularizer: the norms of whole channels (`group_lasso`), the scales of BatchNorm (`bn_l1`), or a growing
    penalty on what a plan removes (`growing`, only in `sparsify`)."""
    strength: Annotated[float, Gt(0)] | None = None
    """Factor of the penalty of `group_lasso` and `bn_l1` (null: 1e-4); the ceiling of `growing` (null: 1)."""
    rise: Annotated[float, Gt(0), Lt(1)] = 0.75
    """Share of the steps after which `growing` is at its ceiling."""
    every: Annotated[int, Ge(1)] = 10
    """Steps between increases of `growing`."""


@dataclass(frozen=True)
class AverageSettings(Checked):
    """An average of weights that is evaluated and kept in their place.

    See `prunekit.training.callbacks.averaging.Average`.

    Example:
        >>> import prunekit as pk
        >>> pk.TrainSettings(average=pk.AverageSettings("swa", start=0.5)).average.method
        'swa'
    """

    method: Literal["ema", "swa"] = "ema"
    """Exponential moving average (`ema`) or the plain mean of stochastic weight averaging (`swa`)."""
    decay: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay of `ema`; the n-th update uses at most (1 + n) / (10 + n), or a short run would keep its first weights."""
    start: Annotated[float, Ge(0), Lt(1)] | None = None
    """Share of the steps after which averaging begins; null: 0 for `ema`, 0.75 for `swa`."""
    every: Annotated[int, Ge(1)] | None = None
    """Steps between updates; null: 1 for `ema`, those of an epoch for `swa`."""
    lr: Annotated[float, Gt(0)] | None = None
    """Constant learning rate while averaging, as SWA was published with; null: the schedule goes on."""
    statistics: Literal["averaged", "recalibrated"] | None = None
    """Whether BatchNorm's statistics are averaged like the weights, or recalibrated on training images whenever the
    average is evaluated; null: averaged for `ema`, recalibrated for `swa`."""


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
    """Number of passes over the training images; 0 leaves the model as it is."""
    optimizer: Literal["sgd", "adam", "adamw", "own"] = "sgd"
    """Optimizer; `own` is the user's own, given as `--optimizer file.py:factory`."""
    lr: Annotated[float, Gt(0)] = 0.05
    """Largest learning rate."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Momentum of `sgd`."""
    nesterov: bool = False
    """Whether the momentum of `sgd` is Nesterov's."""
    weight_decay: Annotated[float, Ge(0)] = 5e-4
    """Weight decay."""
    warmup: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of the steps with a linear warm-up, before a cosine to zero (Loshchilov & Hutter 2017); skipped steps do
    not advance the schedule."""
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the target that is spread over all classes (Szegedy et al. 2016)."""
    mixup: Annotated[float, Ge(0)] = 0.0
    """Images of a batch are blended in shares drawn from Beta(mixup, mixup), and labels likewise (Zhang et al. 2018);
    0: they are not."""
    cutmix: Annotated[float, Ge(0)] = 0.0
    """A rectangle of each image is from another, its area drawn by Beta(cutmix, cutmix) (Yun et al. 2019); 0: none is.
    With mixup too, each batch draws one of them."""
    precision: FloatName = "fp32"
    """Dtype of the forward pass in training: mixed precision (Micikevicius et al. 2018), with a loss scale for fp16."""
    accumulate: Annotated[int, Ge(1)] = 1
    """Number of batches whose gradients are accumulated for one optimizer step."""
    sharding: Sharding = "replicas"
    """Whether each of several processes has the whole model (DDP), or a part of every parameter, gradient and momentum
    (FSDP2), which are gathered module by module."""
    compile: bool = False
    """Whether training steps are compiled by `torch.compile`; if that is not possible, the log says so and they run in
    eager mode."""
    gradient_checkpointing: bool = False
    """Whether activations inside the model's blocks are computed again for the backward pass, in place of being stored:
    less memory, more time, the same gradients. For models that offer it, as those of transformers and timm do."""
    clamp_activation_grad: ClampSettings | None = None
    """Clamp of the gradients of activations, while they flow back; null: none."""
    clamp_weight_grad: ClampSettings | None = None
    """Clamp of the gradients of weights, before each step; null: none."""
    distill: DistillSettings | None = None
    """Knowledge distillation from the dense model; null: none."""
    regularize: RegularizerSettings | None = None
    """What makes whole channels small while training; null: nothing."""
    average: AverageSettings | None = None
    """An average of weights that is evaluated and kept in their place; null: none."""


@dataclass(frozen=True)
class CheckpointSettings(Checked):
    """Checkpoints of a training: when they are written, and how many are kept.

    Example:
        >>> import prunekit as pk
        >>> pk.CheckpointSettings(every_steps=500).keep
        2
    """

    every_seconds: Annotated[float, Gt(0)] | None = 60.0
    """Seconds between checkpoints; more if writing would take over a twentieth of the time. The end of a training is
    always saved. null: only `every_steps` counts."""
    every_steps: Annotated[int, Ge(1)] | None = None
    """Optimizer steps between checkpoints, at any cost; null: only `every_seconds` counts."""
    keep: Annotated[int, Ge(1)] = 2
    """Number of checkpoints that are kept; each has the best weights."""


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
    """Whether events of TensorBoard are written; without them there is only `scalars/<training>.csv`."""
    histograms: bool = False
    """Whether histograms of every parameter are written: its values, its mask, and its gradient in the first step of
    the epoch."""
    images: bool = False
    """Whether images of the first convolution's filters and of every layer's sparsity are written."""
    every: Annotated[int, Ge(1)] = 1
    """Epochs between histograms or images; scalars are written in each epoch."""
