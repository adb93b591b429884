"""A mark on pruned models of ultralytics: a trainer that would rebuild them in their dense size fails before it starts.

ultralytics' trainers build a model from its `yaml`, and copy weights whose shapes fit into it. Of a pruned model hardly
any do, so that the pruned one is thrown away without a word. Nothing else builds from `yaml`: loading, validation,
prediction, export and fusing read single entries of it. So the first layer of a pruned model's `yaml` is named by a
sentence, which the builder repeats as the name that it does not know, also where prunekit is not installed.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.errors import ModelError

KEY = "pruned"
ADVICE = "from prunekit.integrations.ultralytics import load_yolo; load_yolo('file.pt').train(...)"
SENTENCE = (
    "This model is pruned, and train() would rebuild it in its dense size. Add `import "
    f"prunekit.integrations.ultralytics` before, or train it by: {ADVICE}"
)


Left = dict[str, tuple[float, float]]
"""By figure, such as MACs, that of the dense and that of the pruned model."""


def mark(model: Any, left: Left) -> None:
    """Mark a pruned model, in place.

    Args:
        model: of ultralytics, with a `yaml`; it gets one of its own.
        left: of it.
    """
    config: dict[str, Any] = deepcopy(configuration(model))
    config["backbone"][0][2] = SENTENCE
    config[KEY] = {name: list(both) for name, both in left.items()}
    if hasattr(model, "set_classes"):  # open vocabularies are built from the file that the configuration names
        stem = Path(config.get("yaml_file", "")).stem
        config["yaml_file"] = f"{stem} (this model is pruned, and train would rebuild it, see {ADVICE}).yaml"
    model.yaml = config


def is_marked(model: nn.Module) -> bool:
    """Return whether a model was marked as pruned."""
    return KEY in configuration(model)


def what_is_left(model: nn.Module) -> Left:
    """Return the figures that `mark` noted."""
    return {name: (both[0], both[1]) for name, both in configuration(model)[KEY].items()}


def configuration(model: nn.Module) -> dict[str, Any]:
    """Return the configuration that a model was built from.

    Raises:
        ModelError: it has none, so it is no model of ultralytics.
    """
    config = getattr(model, "yaml", None)
    if not isinstance(config, dict) or not config.get("backbone"):
        raise ModelError(
            "expected a model of ultralytics, with the configuration that it was built from; got "
            f"{type(model).__name__}"
        )
    return config
