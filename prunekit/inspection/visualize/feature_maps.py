"""Feature maps: the outputs of layers for one image, with pruned channels in the places of the dense model."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prunekit.errors import UsageError
from prunekit.hooks.hook import never_called
from prunekit.hooks.owner import HookOwner
from prunekit.utils.context import training_mode
from prunekit.utils.display import plural
from prunekit.utils.globs import globs, matching
from prunekit.utils.inputs import running
from prunekit.utils.tensors import gather

View = Literal["maps", "tokens", "bars"]
KeptChannels = Callable[[str, int], NDArray[np.bool_] | None]
"""A function of a module's path and the number of its call that returns which channels are kept, (C,), or None."""
PRUNED = "pruned"
MOST_PREFIXES = 16
"""Limit of tokens without a place: a class token, one for distillation, registers (Darcet et al. 2024)."""


@dataclass(frozen=True, eq=False)
class LayerFeatures:
    """The output of one call of a layer for an image, in one or two models."""

    # path, call: path of the module, and number of its call in a forward pass
    path: str
    call: int
    view: View  # how the output is shown
    what: str  # description of the output of the first model
    sides: Mapping[str, Tensor]  # name of a model -> (C, h, w), with NaN for pruned channels
    kept: NDArray[np.bool_] | None  # which channels are kept, (C,); None if unknown, or if nothing was pruned
    note: str = ""  # a remark for the reader

    @property
    def channels(self) -> int:
        """Number of channels to show."""
        return max(len(values) for values in self.sides.values())

    @property
    def name(self) -> str:
        """The path, with the number of the call if it is not the first."""
        return f"{self.path}, call {self.call + 1}" if self.call else self.path

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the least and greatest finite value of each channel in all models, (C,)."""
        sides = [values for values in self.sides.values() if len(values) == self.channels]
        every = torch.cat([values.flatten(1) for values in sides], 1)
        finite = every.isfinite()
        return torch.where(finite, every, torch.inf).amin(1), torch.where(finite, every, -torch.inf).amax(1)


def feature_maps(
    models: Mapping[str, nn.Module],
    image: Tensor,
    layers: str | Iterable[str] | None = None,
    *,
    kept: KeptChannels | None = None,
) -> list[LayerFeatures]:
    """Run models on an image and return the outputs of layers, in the order in which the first model runs them.

    Args:
        layers: globs over paths of modules in the first model; None: its children, as far as they can be shown, and
            those in lists and dictionaries of modules.
    """
    first = next(iter(models.values()))
    wanted = list(_children(first)) if layers is None else layers
    every = first.named_modules(remove_duplicate=False)  # by every path that they have
    called = {path: module for path, module in every if path and not never_called(module)}
    chosen = {path for pattern in globs(wanted, "layers") for path in matching(pattern, called, "layers")}
    paths = list({id(called[path]): path for path in reversed(called) if path in chosen}.values())[::-1]
    taken = {name: _taken(name, model, image, paths) for name, model in models.items()}
    found = []
    for key in next(iter(taken.values())):
        try:
            found.append(_features(key, taken, tuple(image.shape), kept))
        except UsageError:
            if layers is not None:
                raise
    if not found:
        names = ", ".join(paths[:3])
        raise UsageError(f"layers: none of {names} runs and returns what can be shown; choose others")
    return found


def _children(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the paths of the children that are called themselves."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _taken(name: str, model: nn.Module, image: Tensor, paths: Iterable[str]) -> dict[tuple[str, int], Tensor]:
    """Return a copy of the first floating-point tensor that each call returned."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found, calls = dict[tuple[str, int], Tensor](), Counter[str]()

    def note(path: str, module: nn.Module, given: Any, by_name: Any, result: Any) -> None:
        values = next(filter(Tensor.is_floating_point, gather(result)), None)
        if values is not None:  # copied at once: what runs next may write into it
            found[path, calls[path]] = values.detach().clone()
        calls[path] += 1

    def hooks(owner: HookOwner) -> None:
        for path in paths:
            if path in modules:  # the other model may have folded norms
                owner.own_forward(modules[path], partial(note, path))

    ready = running(model, image, called=f"the {name} model")
    with ready, training_mode(model, False), torch.no_grad(), HookOwner(hooks):
        model(image)
    return found


def _features(
    key: tuple[str, int],
    taken: Mapping[str, Mapping[tuple[str, int], Tensor]],
    image: tuple[int, ...],
    kept: KeptChannels | None,
) -> LayerFeatures:
    path, call = key
    views = {name: view_of(calls[key], image, path) for name, calls in taken.items() if key in calls}
    first = next(iter(views.values()))
    mask = kept(path, call) if kept is not None and PRUNED in views else None
    sides, mask, note = aligned({name: one.values for name, one in views.items()}, mask, "channels")
    return LayerFeatures(path, call, first.view, first.what, sides, mask, note)


def aligned(
    sides: dict[str, Tensor], mask: NDArray[np.bool_] | None, what: str
) -> tuple[dict[str, Tensor], NDArray[np.bool_] | None, str]:
    """Put the rows of the pruned model, (N, ...), into their places in the dense one, with NaN in the others.

    `sides` has both by name.
    """
    if PRUNED not in sides:
        return sides, None, ""
    left, dense = len(sides[PRUNED]), [len(values) for name, values in sides.items() if name != PRUNED]
    if mask is not None and int(mask.sum()) == left and all(count == len(mask) for count in dense):
        placed = sides[PRUNED].new_full((len(mask), *sides[PRUNED].shape[1:]), math.nan)
        placed[torch.from_numpy(np.array(mask))] = sides[PRUNED]
        return {**sides, PRUNED: placed}, mask, ""
    if mask is None and dense == [left]:
        return sides, None, ""  # nothing was pruned
    return sides, None, f"which of the {what} the {left} are is not known: they stand in their own order"


@dataclass(frozen=True)
class Layout:
    """The layout of a layer's output that is an image."""

    # `channels_first` (B, C, h, w), `channels_last` (B, h, w, C), or `tokens` (B, prefix + h w, C)
    order: Literal["channels_first", "channels_last", "tokens"]
    # height, width: h and w
    height: int
    width: int
    prefix: int = 0  # tokens before those of the image

    def maps(self, values: Tensor) -> Tensor:
        """Return an output in this layout as (B, C, h, w)."""
        if self.order == "channels_first":
            return values
        if self.order == "tokens":
            values = values[:, self.prefix :].reshape(len(values), self.height, self.width, -1)
        return values.movedim(-1, 1)


def layout_of(shape: Sequence[int], image: Sequence[int]) -> Layout | None:
    """Return the layout of an output by its shape, for a model that reads an image (B, C, H, W).

    Its height and width are those of the image over a stride. Four axes that fit no stride are taken for (B, C, h, w),
    as convolutions without padding return them.
    """
    if shape[:1] != image[:1]:
        return None
    size = image[2], image[3]
    if len(shape) == 4:
        first, last = _fits(shape[2:], size), _fits(shape[1:3], size)
        if last and not first:
            return Layout("channels_last", shape[1], shape[2])
        return Layout("channels_first", shape[2], shape[3]) if shape[2] * shape[3] > 1 else None
    grid = _grid(shape[1], size) if len(shape) == 3 else None
    return None if grid is None else Layout("tokens", *grid, prefix=shape[1] - grid[0] * grid[1])


@lru_cache(maxsize=8)
def _grids(size: tuple[int, int]) -> frozenset[tuple[int, int]]:
    """Return all heights and widths of an image over a stride, with patches at its edges dropped or padded."""
    found = {(size[0] // stride, size[1] // stride) for stride in range(1, max(size) + 1)}
    found |= {(math.ceil(size[0] / stride), math.ceil(size[1] / stride)) for stride in range(1, max(size) + 1)}
    return frozenset((height, width) for height, width in found if height * width > 1)


def _fits(shape: Sequence[int], size: tuple[int, int]) -> bool:
    return (shape[0], shape[1]) in _grids(size)


def _grid(tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the height and width that so many tokens have, with as few as possible left over."""
    found = [grid for grid in _grids(size) if 0 <= tokens - grid[0] * grid[1] <= MOST_PREFIXES]
    # A handful of tokens would fit nearly any grid.
    found = [grid for grid in found if grid[0] * grid[1] > tokens - grid[0] * grid[1]]
    return max(found, key=lambda grid: (grid[0] * grid[1], -abs(grid[0] * size[1] - grid[1] * size[0])), default=None)


@dataclass(frozen=True, eq=False)
class OutputView:
    """The output of a layer for one image, in a view."""

    view: View  # how it is shown
    values: Tensor  # (C, h, w); (C, 1, 1) as bars
    what: str  # description of the output


def view_of(values: Tensor, image: Sequence[int], layer: str) -> OutputView:
    """Return an output in the view that fits it, for a model that reads an image of shape (1, C, H, W)."""
    values = values.float() if not values.is_complex() else values.abs()
    layout = layout_of(values.shape, image)
    if layout is not None:
        maps = layout.maps(values)[0]
        if layout.order != "tokens":
            return OutputView("maps", maps, f"{plural(len(maps), 'map')} of {_sizes(maps)}")
        more = f" and {layout.prefix} more" if layout.prefix else ""
        return OutputView("tokens", maps, f"{values.shape[1]} tokens of {len(maps)} channels ({_sizes(maps)}{more})")
    one = values[0] if values.dim() and values.shape[0] == 1 else values
    if one.dim() >= 1 and one.shape[0] > 0 and math.prod(one.shape[1:]) == 1:
        return OutputView("bars", one.reshape(-1, 1, 1), f"a vector of {plural(len(one), 'value')}")
    sizes = " x ".join(map(str, values.shape)) or "a single number"
    raise UsageError(
        f"{layer}: its output, {sizes}, is neither maps of an image, nor tokens that fill one, nor a vector: no "
        "view fits; choose the module around it, or one before or after it"
    )


def _sizes(maps: Tensor) -> str:
    return f"{maps.shape[1]} x {maps.shape[2]}"
