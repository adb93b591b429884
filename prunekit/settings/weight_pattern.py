"""Settings of zeros among single weights: which pattern they have, how many there are, and how they are chosen."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt, MaxLen, MinLen

from prunekit.errors import SettingsError
from prunekit.known_names import PositiveInt
from prunekit.settings.validation import Checked

Zeros = Annotated[float, Gt(0), Lt(1)]
"""A share of zeros."""
PatternMethod = Literal["obs", "sparsegpt", "wanda", "magnitude"]
PatternScope = Literal["error", "global", "uniform"]
UNSTRUCTURED, BLOCK, KERNEL = "unstructured", "block", "kernel"
KINDS = (UNSTRUCTURED, "2:4", "N:M", BLOCK, KERNEL)
N_OF_M = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True)
class PatternSettings(Checked):
    """Zeros among single weights, beside the channels that a plan removes.

    Example:
        >>> import prunekit as pk
        >>> pk.PatternSettings("2:4").zeros
        0.5
        >>> pk.PatternSettings("block", block=(4, 1), sparsity=0.5).block
        (4, 1)
        >>> pk.PatternSettings("5:4")
        Traceback (most recent call last):
        prunekit.errors.SettingsError: PatternSettings: kind: expected N:M with 0 < N < M, such as 2:4, got '5:4'
    """

    kind: str
    """Weights that are zero together. `unstructured`: each by itself. `N:M`, such as `2:4` or `4:8`: at most N of M
    neighbors along a layer's inputs are kept, at each position of a kernel. `block`: blocks of outputs and inputs.
    `kernel`: whole kernels of convolutions."""
    sparsity: Zeros | None = None
    """Share of zeros among all weights of convolutions and linear layers, also dense ones; null for `N:M`."""
    block: Annotated[tuple[PositiveInt, ...], MinLen(2), MaxLen(2)] | None = None
    """Outputs and inputs of a `block`, such as [4, 1], [1, 4] or [16, 16]."""
    method: PatternMethod = "obs"
    """How zeros are chosen. `obs`: one by one, by the error left once the others have taken over; kept weights are
    fitted to the dense outputs (Hassibi & Stork 1993; Frantar & Alistarh 2022, Optimal Brain Compression). `sparsegpt`:
    by the same error, column by column (Frantar & Alistarh 2023). `wanda`: by weight times norm of its input (Sun et
    al. 2023). `magnitude`: by size; always used without calibration data and in schedules."""
    scope: PatternScope = "error"
    """How zeros are spread over layers. `error`: where they add least to the output's error, as measured; in schedules
    by LAMP, a weight's size over that of all left in its layer (Lee et al. 2021). `global`: by one threshold on all
    scores. `uniform`: the same share in each, as N:M always has."""
    layers: dict[str, Annotated[float, Ge(0), Lt(1)]] = field(default_factory=dict)
    """Globs over module paths, each with its share of zeros; 0: dense."""
    ignore: tuple[str, ...] = ()
    """Globs over module paths whose weights stay dense."""
    first_and_last: bool = False
    """Sets weights to zero also in layers that read the model's input or make its output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if problems := [f"{'.'.join(key)}: {text}" for key, text in pattern_problems(asdict(self))]:
            raise SettingsError(f"PatternSettings: {'; '.join(problems)}")

    @property
    def kept_of(self) -> tuple[int, int] | None:
        """N and M of an N:M pattern; None of others."""
        return _kept_of(self.kind)

    @property
    def zeros(self) -> float:
        """The share of zeros that is asked for; of N:M in each layer."""
        if self.kept_of is not None:
            return 1 - self.kept_of[0] / self.kept_of[1]
        assert self.sparsity is not None
        return self.sparsity

    @property
    def multiple(self) -> int:
        """A number that widths are multiples of, so that the pattern fits along outputs and inputs."""
        return self.kept_of[1] if self.kept_of is not None else math.lcm(*(self.block or (1,)))

    @property
    def in_words(self) -> str:
        """The pattern's name, such as `2:4` or `block 4x1`."""
        return f"block {self.block[0]}x{self.block[1]}" if self.block is not None else self.kind


def pattern_problems(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys of a `PatternSettings`, as plain values, that do not fit each other, with what was expected."""
    kind, sparsity, block = (values.get(key, default) for key, default in _DEFAULTS.items())
    found = _kept_of(kind)
    if kind not in (UNSTRUCTURED, BLOCK, KERNEL) and found is None:
        yield ("kind",), f"expected one of {', '.join(KINDS)}, got {kind!r}"
        return
    if found is not None and not 0 < found[0] < found[1]:
        yield ("kind",), f"expected N:M with 0 < N < M, such as 2:4, got {kind!r}"
    elif found is not None and sparsity is not None and abs(sparsity - 1 + found[0] / found[1]) > 1e-9:
        yield ("sparsity",), f"expected nothing, because {kind} says how many zeros there are, got {sparsity}"
    elif found is None and sparsity is None:
        yield ("sparsity",), f"expected a share of zeros, such as 0.8, because {kind!r} has any, got none"
    if kind == BLOCK and block is None:
        yield ("block",), "expected outputs and inputs, such as [4, 1], because kind is 'block', got none"
    if kind != BLOCK and block is not None:
        yield ("block",), f"expected nothing, because kind is {kind!r} and only 'block' has one, got {list(block)}"


_DEFAULTS: dict[str, Any] = {"kind": None, "sparsity": None, "block": None}


def _kept_of(kind: object) -> tuple[int, int] | None:
    found = N_OF_M.fullmatch(kind) if isinstance(kind, str) else None
    return None if found is None else (int(found[1]), int(found[2]))
