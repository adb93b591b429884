"""Numbers by module path: given for all modules alike or by glob, or counted while a model runs."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from prunekit.errors import UsageError
from prunekit.utils.globs import globs, matching
from prunekit.utils.tensors import as_it_lies


def module_paths(model: nn.Module) -> list[str]:
    """Return the paths of all modules but the model itself, in the order of `named_modules()`."""
    return [path for path, _ in model.named_modules() if path]


def one_of(value: str, choices: tuple[str, ...], key: str) -> None:
    """Raise if a value is not one of the choices."""
    if value not in choices:
        raise UsageError(f"{key}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def paths_matching(model: nn.Module, patterns: Iterable[str], key: str) -> list[str]:
    """Return the module paths that one of the globs matches, in the order of `named_modules()`."""
    paths = module_paths(model)
    found = {path for pattern in globs(patterns, key, model) for path in matching(pattern, paths, key)}
    return [path for path in paths if path in found]


def numbers_by_path(
    numbers: float | Mapping[str, float], key: str, *, paths: Iterable[str], alike: Iterable[str]
) -> dict[str, float]:
    """Return numbers by module path, in the order of `paths`."""
    if not isinstance(numbers, Mapping):
        return dict.fromkeys(alike, _checked(numbers, key))
    paths = list(paths)
    chosen: dict[str, float] = {}
    for pattern, number in numbers.items():
        chosen |= dict.fromkeys(matching(pattern, paths, key), _checked(number, f"{key} of {pattern!r}"))
    return {path: chosen[path] for path in paths if path in chosen}


def _checked(number: float, key: str) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:
        raise UsageError(f"{key}: expected a number of at least 0, got {number!r}")
    return float(number)


Count = Tensor | int
"""A number of values; on another device than the CPU a tensor without axes, so that nothing waits for the device."""
BLOCK = 2**18
"""Values counted at a time on the CPU: they stay in the cache, and the count is exact in float32."""


class Tally:
    """Counts by module path: how many values meet a condition, and how many there are."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}
        self._totals: dict[str, int] = {}

    def add(self, path: str, count: Count, total: int) -> None:
        """Add `count` of `total`."""
        self._counts[path] = self._counts.get(path, 0) + count
        self._totals[path] = self._totals.get(path, 0) + total

    def counts(self) -> dict[str, int]:
        """Return the counts so far."""
        return {path: int(count) for path, count in self._counts.items()}

    def totals(self) -> dict[str, int]:
        """Return how many values there were."""
        return dict(self._totals)

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Return counts and totals."""
        return {"counts": self.counts(), "totals": self.totals()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Continue from counts and totals."""
        self._counts, self._totals = dict(state["counts"]), dict(state["totals"])

    def shares(self) -> dict[str, float]:
        """Return each count divided by its total, 0..1; without paths whose total is 0."""
        return {path: count / self._totals[path] for path, count in self.counts().items() if self._totals[path]}


def scratch_for(values: Tensor) -> Tensor:
    """Return memory for one block's comparisons; made once, because that takes longer than comparing."""
    return torch.empty(min(BLOCK, values.numel()), dtype=torch.promote_types(values.dtype, torch.float32))


def count_zeros(tensor: Tensor) -> Count:
    """Return how many values are exactly 0."""
    if tensor.device.type != "cpu":
        return tensor.numel() - torch.count_nonzero(tensor.detach())
    flat = as_it_lies(tensor)
    scratch = scratch_for(flat)
    # Comparing to float32 and summing is several times faster than with bools, or than count_nonzero.
    return sum([int(torch.eq(block, 0, out=scratch[: len(block)]).sum()) for block in torch.split(flat, BLOCK)])


def count_beyond(values: Tensor, limit: float, scratch: Tensor) -> int:
    """Return how many of a block's values, (n,) up to `BLOCK`, are above `limit` or below `-limit`; NaN is neither."""
    room = scratch[: len(values)]
    magnitudes = torch.abs(values, out=room) if values.dtype == room.dtype else room.copy_(values).abs_()
    return int(torch.gt(magnitudes, limit, out=room).sum())
