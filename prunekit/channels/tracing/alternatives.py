"""Alternatives: members of a list of modules that no example runs, such as experts that no token of it takes.

They run on what another member is given, so that their channels are known and both models compute with them in the
trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from torch import nn

from prunekit.channels.labels import Labels, LabelUnion
from prunekit.hooks.model_copy import named_tensors

Alternatives = Mapping[str, tuple[str, ...]]
"""Path of a module that runs -> paths of others that did not, which run after the first of those that have them."""


def alternatives_of(
    model: nn.Module, ran: set[str], activations: Mapping[tuple[str, str, int], Labels], union: LabelUnion
) -> Alternatives:
    """Return the members of lists that did not run, for those that did and are built like them.

    Several must have run, all on the same channels and with the same channels as results: then so would the others.
    """
    found: dict[str, tuple[str, ...]] = {}
    for alike in _built_alike(model):
        taken = [path for path in alike if path in ran]
        others = tuple(path for path in alike if not any(f"{one}.".startswith(f"{path}.") for one in ran))
        if others and len(taken) > 1 and _on_same_channels(taken, activations, union):
            found.update(dict.fromkeys(taken, others))
    return found


def _built_alike(model: nn.Module) -> Iterator[list[str]]:
    """Yield paths of the members of each list or dictionary of modules with one class and tensors of the same sizes."""
    for path, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.ModuleDict)):
            kinds: dict[object, list[str]] = {}
            for name, member in container.named_children():
                sizes = tuple((key, tuple(tensor.shape)) for key, tensor in named_tensors(member))
                kinds.setdefault((type(member), sizes), []).append(f"{path}.{name}" if path else name)
            yield from (paths for paths in kinds.values() if len(paths) > 1)


def _on_same_channels(
    paths: Iterable[str], activations: Mapping[tuple[str, str, int], Labels], union: LabelUnion
) -> bool:
    """Return whether modules have the same labels on their inputs, and the same on their outputs."""
    none = np.zeros(0, dtype=np.int64)
    sides = [[activations.get((path, side, 0), none) for path in paths] for side in ("input", "output")]
    return all(union.equal(labels[0], other) for labels in sides for other in labels[1:])
