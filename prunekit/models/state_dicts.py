"""State dicts from files: read without running code in them, and loaded as a whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.errors import ModelError, reraise_shortage
from prunekit.models.bitmask import read_tensors
from prunekit.utils.display import listed
from prunekit.utils.files import StrPath

SUFFIXES = (".safetensors", ".pt", ".pth", ".th")
PREFIXES = ("module.", "_orig_mod.")  # left by DistributedDataParallel and torch.compile
NAMED = 8
"""The most names in a message."""
CONTAINERS = ("state_dict", "model_state_dict", "model")


def load_weights(model: nn.Module, path: StrPath) -> None:
    """Load a state dict into a model, in place.

    Args:
        model: receives every weight.
        path: `.safetensors`, compressed by `prunekit.save` or not, or `.pt`/`.pth`/`.th` read with
            `weights_only=True`: a state dict, or a dict that holds one as `state_dict`, `model_state_dict` or `model`.
            Prefixes of DistributedDataParallel and torch.compile are removed.

    Raises:
        ModelError: the file is missing or unreadable, or its names and shapes are not the model's; all are listed.
    """
    path = Path(path)
    load_state(model, _unwrap(_read(path), path), path)


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Load a state dict that was read from a file into a model, in place, see `load_weights`.

    Raises:
        ModelError: its names and shapes are not the model's; all are listed.
    """
    state = _strip(dict(state))
    own = model.state_dict()
    # Files written before BatchNorm counted its batches lack this number; torch itself fills it in as well.
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in own]
    wrong = [
        f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    problems = [
        f"{len(names)} {kind}: {listed(names, NAMED)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
        if names
    ]
    if problems:
        raise ModelError(
            f"{path}: these are not the weights of this {type(model).__name__}; "
            + "; ".join(problems)
            + "; check the model's name and arguments (num_classes too)"
        )
    model.load_state_dict(dict(state), strict=False)  # strict in all but num_batches_tracked: checked above


def _read(path: Path) -> Any:
    if path.suffix not in SUFFIXES:
        raise ModelError(f"{path}: expected weights in a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file of weights")
    try:
        if path.suffix == ".safetensors":
            return read_tensors(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # UnpicklingError, RuntimeError, EOFError, SafetensorError: a file that cannot be used
        reraise_shortage(error)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{path}: expected a state dict of tensors, but {reason}; pickled objects are never loaded: "
            "save model.state_dict()"
        ) from error


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    for key in CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        keys = f" with the keys {listed(map(str, content), NAMED) or '(none)'}" if isinstance(content, dict) else ""
        raise ModelError(f"{path}: expected a state dict (names to tensors), got a {type(content).__name__}{keys}")
    return dict(content)


def _strip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in PREFIXES * 2:  # either may be around the other
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state
