"""Configurations of transformers that say the widths of a pruned model, found by trying what its class makes of them.

Nothing is known of single classes: a configuration fits if the class builds tensors of the wanted shapes from it, and
is right if what it builds then computes the same.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import import_module
from itertools import combinations, islice, product
from typing import Any

import torch
from torch import nn

from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.hooks.model_copy import named_tensors
from prunekit.utils.context import seeded

Shapes = Mapping[str, tuple[int, ...]]
Changes = dict[str, int]
"""Entries of a configuration that differ from the dense model's, those of one inside it by a dotted path."""
LIBRARY_CONFIG = "library_config"
"""Key in a plan's provenance and a folder's manifest: the entries of a configuration that say the widths."""
TRIED = 256
"""The most configurations that are built for one choice of widths."""
KEYS = 5
"""The most entries that differ at once."""
HEAD_DIM = "head_dim"
"""The width of a head, which many classes read from their configuration where it is there, and else compute."""


def library_model(model: nn.Module) -> tuple[str, Any] | None:
    """Return the path and the module of a model of transformers that is all or a part of a model; None without one.

    Of several, such as two encoders side by side, there is none: one configuration cannot say the widths of both.
    """
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if base is None:
        return None
    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        if isinstance(module, base) and not any(path.startswith(f"{outer}." if outer else "") for outer, _ in found):
            found.append((path, module))
    return found[0] if len(found) == 1 else None


class ConfigSearch:
    """The search for a configuration of a model's class by the shapes of its tensors.

    Args:
        model: of transformers, dense or compact; not changed.
        config: of the dense model.
    """

    def __init__(self, model: Any, config: Any) -> None:
        self.cls = original_of(type(model))
        self.config = config
        self._attributes = whole_numbers(model)
        self._names = {name for name, _ in named_tensors(model)}
        self._buffer_dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
        self._built: dict[tuple[tuple[str, int], ...], dict[str, tuple[int, ...]] | None] = {}
        self._pinned: Changes = {}
        self._pinned = self._head_dim()

    @cached_property
    def keys(self) -> dict[str, int | None]:
        """The whole numbers of the configuration that may say a width, by dotted path; None where none is given."""
        return dict(_numbers(self.config.to_dict())) | dict(self._pinned)

    @cached_property
    def dense(self) -> Shapes:
        """Shapes of the dense model's tensors."""
        found = self.shapes({})
        return {} if found is None else found

    def made(self, changes: Mapping[str, int]) -> Any:
        """Return the configuration with other entries."""
        return changed_config(self.config, {**self._pinned, **changes})

    def noted(self, changes: Mapping[str, int]) -> dict[str, list[int | None]]:
        """Return the entries of the dense and of the other configuration by dotted path, as plans and folders do."""
        known = dict(_numbers(self.config.to_dict()))
        return {path: [known.get(path), value] for path, value in {**self._pinned, **changes}.items()}

    def shapes(self, changes: Mapping[str, int]) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the model's tensors as the class builds them, without values; None if it refuses.

        The class may build more, such as a pooling layer that the model was loaded without.
        """
        key = tuple(sorted({**self._pinned, **changes}.items()))
        if key not in self._built:
            self._built[key] = None
            with suppress(Exception), quiet_library(), seeded(0), torch.device("meta"):
                built = shapes_of(self.cls(self.made(changes)))
                self._built[key] = {name: shape for name, shape in built.items() if name in self._names}
        return self._built[key]

    def touched(self, changes: Mapping[str, int]) -> set[tuple[str, int]] | None:
        """Return the axes whose size a configuration changes; None if the class refuses it."""
        found = self.shapes(changes)
        return None if found is None else _changed_axes(self.dense, found)

    def fitting(self, wanted: Shapes, counts: Iterable[tuple[int, int]] = ()) -> Iterator[Changes]:
        """Yield entries that make the wanted shapes, those with the fewest changes first.

        Several may fit: the number of heads changes no shape where their width follows from it.

        Args:
            wanted: shapes by name.
        """
        changed = _changed_axes(self.dense, wanted)
        sizes = {(self.dense[name][axis], wanted[name][axis]) for name, axis in changed} | {*counts}
        options: dict[str, list[int]] = {}
        for key, value in self.keys.items():
            useful = [one for one in _candidates(value, sizes) if self._useful(key, one, changed)]
            if useful:
                options[key] = useful
        for chosen in islice(_choices(options), TRIED):
            if self.shapes(chosen) == wanted:
                yield chosen

    def take_rounded(self, built: nn.Module, model: nn.Module) -> None:
        """Give a model that the class built the buffers of another, where its own are these but for rounding.

        They are in no state dict, such as the frequencies of rotary embeddings, and a dense model that was cast to half
        precision has them rounded to that, while a class may build them wider.
        """
        saved = model.state_dict().keys()
        theirs = {name: buffer for name, buffer in model.named_buffers() if name not in saved}
        for name, own in [*built.named_buffers()]:
            other, dtype = theirs.get(name), self._buffer_dtypes.get(name)
            if other is not None and own.shape == other.shape and torch.equal(own.to(dtype), other.to(dtype)):
                path, _, leaf = name.rpartition(".")
                built.get_submodule(path)._buffers[leaf] = other.clone()

    def _useful(self, key: str, value: int, changed: set[tuple[str, int]]) -> bool:
        """Return whether an entry may be one of those that are changed: by itself it touches nothing else."""
        touched = self.touched({key: value})
        if touched is None:
            return True  # the class refuses it alone
        return touched <= changed if touched else key.rpartition(".")[2] in self._attributes

    def _head_dim(self) -> Changes:
        """Return the width of a head, where the class reads it though the configuration does not give it."""
        widths = self._attributes.get(HEAD_DIM, set())
        paths = [f"{outer}{HEAD_DIM}" for outer in _levels(self.config.to_dict())]
        known = dict(_numbers(self.config.to_dict()))
        found: Changes = {}
        for path in paths:
            if len(widths) == 1 and known.get(path) is None:
                (width,) = widths
                if self.shapes({path: width}) == self.dense and self.touched({path: 2 * width}):
                    found[path] = width
        return found


def changed_config(config: Any, changes: Mapping[str, int | None]) -> Any:
    """Return a configuration with other entries, by dotted path; None removes one."""
    entries = config.to_dict()
    for path, value in changes.items():
        *outer, key = path.split(".")
        inner = entries
        for name in outer:
            inner = inner[name]
        inner[key] = value
        if value is None:
            del inner[key]
    made = type(config).from_dict(entries)
    with suppress(AttributeError):
        made._attn_implementation = config._attn_implementation
    return made


def set_noted_config(model: nn.Module, note: Mapping[str, Any] | None) -> None:
    """Give the model of transformers in a compact model the configuration that a plan or a folder notes, if it does."""
    if note:
        for path, (_, value) in note["config"].items():
            if not (value is None or type(value) is int):
                raise ValueError(f"{LIBRARY_CONFIG}: {path}: expected a whole number, got {value!r:.99}")
        inner: Any = model.get_submodule(note["module"])
        set_config(inner, changed_config(inner.config, {path: pair[1] for path, pair in note["config"].items()}))


def unsayable(model: nn.Module) -> str | None:
    """Return the name of the class of transformers in a model whose configuration says other widths; None if none."""
    found = library_model(model)
    if found is None:
        return None
    _, inner = found
    said = ConfigSearch(inner, inner.config).dense  # nothing where the class cannot be built without values
    return original_of(type(inner)).__name__ if said and said != shapes_of(inner) else None


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters and buffers."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}


@contextmanager
def quiet_library() -> Iterator[None]:
    """Keep transformers from logging, warning and showing bars in this context."""
    logging: Any = import_module("transformers.utils.logging")

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def set_config(model: Any, made: Any) -> None:
    """Give a model of transformers, and all modules in it that have the same one, another configuration."""
    others = {id(old): new for old, new in _both(model.config, made)}
    for module in model.modules():
        new = others.get(id(vars(module).get("config")))
        if new is not None:
            module.config = new


def _both(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Yield two configurations, and those that both have inside, by the same names."""
    yield old, new
    for name, inner in vars(old).items():
        other = vars(new).get(name)
        if hasattr(inner, "to_dict") and type(other) is type(inner):
            yield from _both(inner, other)


def _changed_axes(dense: Shapes, other: Shapes) -> set[tuple[str, int]]:
    return {
        (name, axis)
        for name, shape in dense.items()
        for axis, (before, after) in enumerate(zip(shape, other.get(name, shape), strict=False))
        if before != after
    }


def _candidates(value: int | None, sizes: set[tuple[int, int]]) -> list[int]:
    """Return values that an entry may have, given dense and wanted sizes of axes that change."""
    found = {after for before, after in sizes if value is None or before == value}
    if value is not None:
        found |= {value * after // before for before, after in sizes if value * after % before == 0}
    return sorted(found - {value, 0})


def _choices(options: Mapping[str, list[int]]) -> Iterator[Changes]:
    for count in range(1, min(KEYS, len(options)) + 1):
        for keys in combinations(options, count):
            for values in product(*(options[key] for key in keys)):
                yield dict(zip(keys, values, strict=True))


def _levels(entries: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield the dotted paths, each with a dot at its end, of a configuration and those inside it."""
    yield at
    for key, value in entries.items():
        if isinstance(value, Mapping) and "model_type" in value:
            yield from _levels(value, f"{at}{key}.")


def _numbers(entries: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, int | None]]:
    for key, value in entries.items():
        if isinstance(value, Mapping) and "model_type" in value:
            yield from _numbers(value, f"{at}{key}.")
        elif (type(value) is int and value > 1) or (value is None and _may_be_number(key)):
            yield f"{at}{key}", value


def _may_be_number(key: str) -> bool:
    """Return whether an entry that is not given may be a width, as GPT-2's `n_inner`: none of tokens or classes."""
    return not key.endswith(("_token_id", "_ids", "label", "id2label", "dtype", "_name_or_path", "version"))


def whole_numbers(model: nn.Module) -> dict[str, set[int]]:
    """Return the whole numbers that are attributes of modules, by name."""
    found: dict[str, set[int]] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is int:
                found.setdefault(name, set()).add(value)
    return found
