"""State dicts from files: read without running code in them, and loaded as a whole or not at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.errors import ModelError, first_line, raised_as
from prunekit.hooks.model_copy import named_tensors
from prunekit.models.bitmask import read_tensors
from prunekit.models.names import SUFFIXES
from prunekit.utils.display import listed
from prunekit.utils.files import StrPath
from prunekit.utils.tensors import is_finite

PREFIXES = ("module.", "_orig_mod.")  # left by DistributedDataParallel and torch.compile
NAMED = 8
"""The most names in a message."""
CONTAINERS = ("state_dict", "model_state_dict", "model")


def load_weights(model: nn.Module, path: StrPath) -> None:
    """Load a state dict into a model, in place.

    The file is `.safetensors`, compressed by `prunekit.save` or not, or `.pt`/`.pth`/`.th` read with
    `weights_only=True`: a state dict, or a dict that holds one as `state_dict`, `model_state_dict` or `model`. Prefixes
    of DistributedDataParallel and torch.compile are removed. A `ModelError` lists all names, shapes and values that are
    not the model's.
    """
    path = Path(path)
    content = _read(path)
    for key in CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if (
        not isinstance(content, dict)
        or not content
        or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())
    ):
        keys = f" with the keys {listed(map(str, content), NAMED) or '(none)'}" if isinstance(content, dict) else ""
        raise ModelError(f"{path}: expected a state dict (names to tensors), got a {type(content).__name__}{keys}")
    load_state(model, content, path)


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Load a state dict that was read from a file into a model, in place, see `load_weights`."""
    for prefix in PREFIXES * 2:  # either may be around the other
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    own = model.state_dict()
    # Files written before BatchNorm counted its batches lack this number; torch itself fills it in as well.
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in own]
    wrong = [
        f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    tensors = dict(named_tensors(model))
    strange = [
        f"{name}: {problem}"
        for name in own
        if name in state and (problem := tensor_problem(state[name], tensors.get(name, own[name]))) is not None
    ]
    problems = [
        f"{len(names)} {kind}: {listed(names, NAMED)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", wrong),
            ("with other values", strange),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"{path}: these are not the weights of this {type(model).__name__}; "
            + "; ".join(problems)
            + "; check the model's name and arguments (num_classes too)"
        )
    model.load_state_dict(dict(state), strict=False)  # strict in all but num_batches_tracked: checked above


def tensor_problem(given: Tensor, own: Tensor) -> str | None:
    """Return why a tensor of a file cannot take the place of a model's, whatever its shape; None if it can.

    Floating-point numbers may have another precision; others may have another dtype that has the same values. No tensor
    may have NaN, and no trained one infinite numbers.
    """
    if given.layout != torch.strided or given.is_quantized:
        kind = "quantized" if given.is_quantized else f"of layout {str(given.layout).removeprefix('torch.')}"
        return f"it is {kind}, expected a plain tensor"
    dtypes = f"{given.dtype} for {own.dtype}".replace("torch.", "")
    if own.is_floating_point() or own.is_complex():
        if own.is_complex() != given.is_complex() or own.is_floating_point() != given.is_floating_point():
            return dtypes
        cast = given.to(own.dtype)
        if cast.dtype.itemsize == 1:  # not all of these types know whether they are finite
            cast = cast.float()
        if is_finite(cast):
            return None
        if cast.isnan().any():
            return "there are NaN among its values"
        return "there are infinite numbers among its values" if own.requires_grad else None
    return None if not given.is_complex() and torch.equal(given.to(own.dtype).to(given.dtype), given) else dtypes


def _read(path: Path) -> Any:
    if path.suffix not in SUFFIXES:
        raise ModelError(f"{path}: expected weights in a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file of weights")
    advice = "; pickled objects are never loaded: save model.state_dict()"
    with raised_as(ModelError, f"{path}: expected a state dict of tensors, but ", advice, first_line):
        plain = path.suffix == ".safetensors"
        return read_tensors(path) if plain else torch.load(path, map_location="cpu", weights_only=True)
