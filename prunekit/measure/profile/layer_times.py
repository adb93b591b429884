"""What one measured network gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerTimes:
    """One network, measured beside the dense one, alternately; all times are lower quartiles over the rounds.

    Attributes:
        whole_ms: of a forward of the batch, nothing attached.
        dense_ms: the dense network's, alternated with it in the same process: what slows the machine slows both.
        modules_ms: path of the innermost module -> what its operators took together; "" is the model's own
            code. A module that the runtime fuses into another has none.
        rest_ms: what the runtime does that belongs to no module, such as changes of layout; 0 in eager.
        doubts: why `whole_ms` over `dense_ms` supports no claim; empty where it does.
    """

    whole_ms: float
    dense_ms: float
    modules_ms: Mapping[str, float]
    rest_ms: float
    doubts: tuple[str, ...] = ()
