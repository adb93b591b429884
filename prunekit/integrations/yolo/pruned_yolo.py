"""Pruned models of ultralytics: what their heads return, the mark that keeps them from being rebuilt, their object.

ultralytics' trainers build a model from its `yaml`, and copy weights whose shapes fit into it. Of a pruned model hardly
any do, so that the pruned one is thrown away without a word. Nothing else builds from `yaml`: loading, validation,
prediction, export and fusing read single entries of it. So the first layer of a pruned model's `yaml` is named by a
sentence, which the builder repeats as the name that it does not know, also where prunekit is not installed.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from ultralytics.engine.model import Model

from prunekit.errors import ModelError
from prunekit.planning.plan import Plan
from prunekit.pruning.pruned import Pruned
from prunekit.utils.display import count, share

KEY = "pruned"
ADVICE = "from prunekit.integrations.ultralytics import load_yolo; load_yolo('file.pt').train(...)"
SENTENCE = (
    "This model is pruned, and train() would rebuild it in its dense size. Add `import "
    f"prunekit.integrations.ultralytics` before, or train it by: {ADVICE}"
)


Left = dict[str, tuple[float, float]]
"""By figure, such as MACs, that of the dense and that of the pruned model."""


def is_marked(model: nn.Module) -> bool:
    """Return whether a model was marked as pruned."""
    return KEY in configuration(model)


def what_is_left(model: nn.Module) -> Left:
    """Return the figures that `marked` noted."""
    return {name: (both[0], both[1]) for name, both in configuration(model).get(KEY, {}).items()}


def left_by(plan: Plan, model: nn.Module) -> Left:
    """Return the figures of a plan; where the model that it prunes was pruned before, beside those of its dense one."""
    before = what_is_left(model) if is_marked(model) else {}
    return {name: (before.get(name, (was,))[0], now) for name, (was, now) in plan.totals().items()}


def channels_of(model: nn.Module) -> int:
    """Return the number of channels of the images that a model reads."""
    return int(configuration(model).get("channels", 3))


def settings_of(model: Any) -> dict[str, Any]:
    """Return the settings that a model of ultralytics was trained with, such as `imgsz`."""
    return dict(model.args if isinstance(model.args, Mapping) else vars(model.args))


def configuration(model: nn.Module) -> dict[str, Any]:
    """Return the configuration that a model was built from; raise if it is no model of ultralytics."""
    config = getattr(model, "yaml", None)
    if not isinstance(config, dict) or not config.get("backbone"):
        raise ModelError(
            "expected a model of ultralytics, with the configuration that it was built from; got "
            f"{type(model).__name__}"
        )
    return config


FEATURES = "feats"
KEPT = ("shape", "shapes", "anchors", "strides", "valid_mask")
"""Attributes of heads that follow from the image size, and are computed again where it changes."""


def predictions(output: Any) -> Any:
    """Return what is read of a model's output: all but the feature maps that its head passes on.

    Users read the decoded predictions, and losses the raw ones, in the train mode alone or beside the decoded ones. Of
    the feature maps, losses read the heights and widths only, so their channels may be pruned.
    """
    if isinstance(output, Mapping):
        return {key: predictions(value) for key, value in output.items() if key != FEATURES}
    return [predictions(value) for value in output] if isinstance(output, (tuple, list)) else output


def training_examples(model: Any, images: Tensor) -> tuple[dict[str, Any], ...]:
    """Return examples of what training calls a model with, where it runs parts that no prediction does.

    Decoders of RT-DETR learn to denoise true boxes, whose classes they embed. Of images (B, C, H, W) two are taken.
    """
    if not hasattr(model.model[-1], "denoising_class_embed"):
        return ()
    targets = {
        "cls": torch.tensor([0, min(1, model.model[-1].nc - 1)], device=images.device),
        "bboxes": torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.3, 0.2, 0.2]], device=images.device),
        "batch_idx": torch.tensor([0, 1], device=images.device),
        "gt_groups": [1, 1],
    }
    return ({"x": images[:2], "batch": targets},)


def forget_image_size(model: nn.Module) -> None:
    """Make the heads of a model compute their anchors and strides for the next image again.

    The shape of the feature maps that they were computed for has the channels of the dense model.
    """
    for module in model.modules():
        if any(hasattr(type(module), name) for name in ("anchors", "valid_mask")):
            for name in KEPT:
                module.__dict__.pop(name, None)


OF_A_RUN = ("model", "ema", "optimizer", "best_fitness", "stopper", "updates", "scaler", "modelopt", "train_results")
"""Entries of a checkpoint that belong to the model or the run that it was saved in."""


class PrunedYOLO(Model):  # type: ignore[misc]  # ultralytics has no types
    """Model object of ultralytics around a pruned model, whose trainer keeps the pruned structure.

    A mixin in front of the class that was pruned (`YOLO`, `RTDETR`, `YOLOWorld`, `YOLOE`), so that all else is that
    class's: `val`, `predict`, `save`, `export`, `track`. What it saves is loaded by ultralytics alone: `YOLO(path)`.
    """

    pruned: Pruned | None = None  # what `prunekit.prune` returned; None where the model was loaded from a file
    plan: Plan | None = None  # that it was pruned by; None where the model was loaded from a file
    notes: tuple[str, ...] = ()  # remarks of the integration, besides those in `pruned`

    @classmethod
    def around(cls, yolo: Model, model: nn.Module | None = None, pruned: Pruned | None = None) -> Self:
        """Return such an object, with the class, task, settings and callbacks of another, which is left as it is.

        Its model is a pruned one, already marked; without one that of `yolo`.
        """
        given: Any = type(yolo)
        kind = pruned_class(given)
        made = kind.__new__(kind)
        made.__dict__ = {**yolo.__dict__, "_modules": dict(yolo.__dict__["_modules"])}
        made.callbacks = {event: list(all_of) for event, all_of in yolo.callbacks.items()}
        made.overrides = dict(yolo.overrides)
        if model is not None:
            made.model = model
            made.ckpt = {"epoch": -1} | {key: value for key, value in (yolo.ckpt or {}).items() if key not in OF_A_RUN}
            made.ckpt.setdefault("train_args", settings_of(model))
            made.ckpt_path = None
        made.predictor = made.trainer = made.metrics = None
        made.pruned, made.plan = pruned, None if pruned is None else pruned.plan
        return made

    def __repr__(self) -> str:
        figures = what_is_left(self.model).items()
        left = ", ".join(f"{name} {share(kept / (dense or 1))}" for name, (dense, kept) in figures)
        return f"{type(self).__name__} ({self.task}) with {left} left"

    def __str__(self) -> str:
        """Return what is left, and the result of `prunekit.prune` where the model comes from one."""
        if self.pruned is not None:
            return "\n".join((repr(self), "", str(self.pruned), *self.notes))
        figures = what_is_left(self.model).items()
        return "\n".join((repr(self), *(f"{name}: {count(dense)} -> {count(kept)}" for name, (dense, kept) in figures)))


@cache
def pruned_class(base: Any) -> type[PrunedYOLO]:
    """Return a class of ultralytics with `PrunedYOLO` in front."""
    return base if issubclass(base, PrunedYOLO) else type(f"Pruned{base.__name__}", (PrunedYOLO, base), {})


def marked(dense: Any, small: Any, left: Left) -> nn.Module:
    """Mark the pruned model of a dense one, make it ready for any image size and for training, and return it."""
    config: dict[str, Any] = deepcopy(configuration(small))
    config["backbone"][0][2] = SENTENCE
    config[KEY] = {name: list(both) for name, both in left.items()}
    if hasattr(small, "set_classes"):  # open vocabularies are built from the file that the configuration names
        stem = Path(config.get("yaml_file", "")).stem
        config["yaml_file"] = f"{stem} (this model is pruned, and train would rebuild it, see {ADVICE}).yaml"
    small.yaml = config
    forget_image_size(small)
    small.args = dict(dense.args) if isinstance(dense.args, dict) else dense.args
    ready: nn.Module = small.eval()
    return ready
