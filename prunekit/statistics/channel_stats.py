"""Channel statistics of a whole model: per-channel arrays by activation, saved as safetensors and CSV."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from prunekit.errors import ArtifactError, NonFiniteError, UsageError
from prunekit.reading.array_files import openable
from prunekit.reading.text_files import parse_json, require_file
from prunekit.statistics.layer_stats import ARRAYS, LayerStats, StatsKey, combine
from prunekit.statistics.observers import Consumer
from prunekit.utils.display import Displayed, Table, count, digits, plural, share
from prunekit.utils.files import StrPath, atomic_file, write_columns

if TYPE_CHECKING:
    import pandas as pd


FILE_NAME = "channel_stats.safetensors"
FORMAT = "prunekit.channel_stats"
VERSION = 3
FRAME_COLUMNS = ("count", "mean", "variance", "mean_abs", "rms", "min", "max", "zero_fraction", "non_finite")
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class NonFinite:
    """NaN or Inf in one activation."""

    key: StatsKey
    count: int  # values, over all channels
    batch: int  # the first forward pass, from 1, that showed one
    channel: int  # the first channel, from 0, that showed one in that pass

    def __str__(self) -> str:
        first = f"first in batch {self.batch}, channel {self.channel}"
        return f"{self.count} values are NaN or Inf in the {self.key} ({first})"


@dataclass(frozen=True, eq=False, repr=False)
class ChannelStats(Displayed, Mapping[StatsKey, LayerStats]):
    """Per-channel statistics of a model's activations, by (module path, "input" or "output", call ordinal).

    Immutable. Keys are in the order in which the activations were first met, which is the order of execution.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> stats = pk.calibrate(model, torch.randn(64, 8))
        >>> stats
        <ChannelStats: 6 activations, 74 channels, ... of them dead>
        >>> [(row["module"], row["channels"]) for row in stats.rows() if row["side"] == "output"]
        [('0', 16), ('1', 16), ('2', 2)]
        >>> plan = pk.plan(model, x, channels=0.5, criterion="activation_rms", stats=stats)
    """

    layers: Mapping[StatsKey, LayerStats]
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Where the statistics came from (model, data, settings); saved and loaded with them."""
    reads: Mapping[str, Consumer] = field(default_factory=dict)
    """The layers that read channels through a weight, by the path under which their statistics are."""

    def __getitem__(self, key: tuple[str, str, int]) -> LayerStats:
        return self.layers[key]  # type: ignore[index]  # a plain tuple equals the named one

    def __iter__(self) -> Iterator[StatsKey]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def non_finite(self) -> list[NonFinite]:
        """Activations in which NaN or Inf was met, in order of execution: how many values, and where first."""
        return [_first_non_finite(key, layer) for key, layer in self.items() if layer.non_finite.any()]

    def require_finite(self) -> None:
        """Raise if NaN or Inf was met.

        Raises:
            NonFiniteError: names the first such activation in order of execution, and the batch and channel in which
                NaN or Inf first appeared; activations after it inherit them.
        """
        found = self.non_finite
        if found:
            first = found[0]
            raise NonFiniteError(
                f"{first}, and there are some in {len(found) - 1} activations after it; expected finite activations: "
                f"check the images of that batch and the weights up to {first.key.module!r}"
            )

    def dead(self) -> dict[StatsKey, npt.NDArray[np.int64]]:
        """Return the indices of output channels that never changed (most are always zero), where there are any."""
        found = {key: np.flatnonzero(layer.constant) for key, layer in self.items() if key.side == "output"}
        return {key: channels for key, channels in found.items() if len(channels)}

    def merge(self, other: ChannelStats) -> ChannelStats:
        """Return the statistics of both together, up to rounding as if one pass had seen the data of both.

        The provenance keeps the entries on which both agree.

        Raises:
            UsageError: an activation has another number of channels in `other`.
        """
        merged = dict(self.layers)
        for key, theirs in other.items():
            ours = merged.get(key)
            if ours is not None and ours.channels != theirs.channels:
                raise UsageError(f"{key}: {ours.channels} channels here, {theirs.channels} there: not the same model")
            merged[key] = theirs if ours is None else combine((ours, theirs))
        agreed = dict(self.provenance.items() & other.provenance.items())
        return ChannelStats(merged, agreed, {**self.reads, **other.reads})

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every activation in order of execution; `channel_frame` has one for every channel."""
        return [
            {
                **key._asdict(),
                "channels": layer.channels,
                "count": int(layer.count.sum()),
                "mean": _over(layer.mean, layer),
                "rms": float(np.sqrt(_over(layer.rms**2, layer))),
                "zero_fraction": _over(layer.zero_fraction, layer),
                "dead": int(np.count_nonzero(layer.constant)) if key.side == "output" else 0,
                "non_finite": int(layer.non_finite.sum()),
            }
            for key, layer in self.items()
        ]

    def _headline(self) -> str:
        channels = sum(layer.channels for layer in self.values())
        dead, spoiled = sum(map(len, self.dead().values())), self.non_finite
        more = [f"NaN or Inf in {plural(len(spoiled), 'activation')}"] if spoiled else []
        about = f"{plural(len(self), 'activation')}, {plural(channels, 'channel')}, {dead:,} of them dead"
        return ", ".join((about, *more))

    def _parts(self) -> Iterator[str | Table]:
        origin = "".join(f"\n{name}: {value}" for name, value in self.provenance.items())
        yield f"Channel statistics: {self._headline()}{origin}"
        cells = [
            (
                row["module"] or "(root)",
                row["side"] + (f" {row['call']}" if row["call"] else ""),
                row["channels"],
                count(row["count"]),
                digits(row["mean"]),
                digits(row["rms"]),
                share(row["zero_fraction"]),
                row["dead"],
                row["non_finite"],
            )
            for row in self.rows()
        ]
        headings = ("module", "side", "channels", "values", "mean", "rms", "zeros", "dead", "NaN or Inf")
        yield Table(headings, cells, text=("side",))

    def channel_frame(self) -> pd.DataFrame:
        """Return a row per channel: its `StatsKey`, its number, `FRAME_COLUMNS`, and whether it is dead."""
        import pandas as pd

        return pd.DataFrame(self._channel_columns())

    def _channel_columns(self) -> dict[str, npt.NDArray[Any]]:
        tables = [_columns(key, layer) for key, layer in self.items()]
        tables = tables or [_columns(StatsKey("", "output", 0), LayerStats.empty(0))]
        return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

    def save(self, path: StrPath) -> Path:
        """Write the statistics exactly, as safetensors with a checksum, and a CSV table beside them.

        Arrays are named `module/side/call/array`; the metadata holds the order of the keys and all that is no array.

        Args:
            path: a `.safetensors` file, or a folder that gets `channel_stats.safetensors`.

        Returns:
            The safetensors file; the CSV has the same name with `.csv`.
        """
        arrays = {f"{_name(key)}/{name}": getattr(layer, name) for key, layer in self.items() for name in ARRAYS}
        content = json.dumps(
            {
                "keys": [list(key) for key in self],
                "provenance": dict(self.provenance),
                "reads": [asdict(consumer) for consumer in self.reads.values()],
            }
        )
        header = {"version": VERSION, "sha256": _checksum(content, arrays), "content": content}
        metadata = {FORMAT: json.dumps(header)}  # one entry, because safetensors writes several in any order
        file = _stats_file(path)
        with atomic_file(file) as temporary:
            save_file(arrays, temporary, metadata=metadata)
        columns = {name: column.tolist() for name, column in self._channel_columns().items()}
        write_columns(file.with_suffix(".csv"), columns)
        return file

    @classmethod
    def load(cls, path: StrPath) -> ChannelStats:
        """Read what `save` wrote; ranks of feature maps, which older files may hold, are left out.

        Raises:
            ArtifactError: the file is missing, damaged, or not channel statistics.
        """
        file = _stats_file(path)
        require_file(file, "channel statistics (.safetensors)")
        try:
            with openable(file) as name, safe_open(name, framework="numpy") as opened:
                metadata: dict[str, str] = opened.metadata() or {}
                arrays: Arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{file}: cannot be read as channel statistics ({error}); calibrate again") from error
        if FORMAT not in metadata:
            found = f"expected {FORMAT!r} in its metadata, found {sorted(metadata)}"
            raise ArtifactError(f"{file}: {found}; calibrate again")
        try:
            return cls._from_arrays(metadata[FORMAT], arrays)
        except (AttributeError, LookupError, ValueError, TypeError, ArithmeticError, ArtifactError) as error:
            raise ArtifactError(f"{file}: not usable as channel statistics ({error}); calibrate again") from error

    @classmethod
    def _from_arrays(cls, header_text: str, arrays: Arrays) -> ChannelStats:
        header = parse_json(header_text, FORMAT, finite=False)
        if header["version"] != VERSION:
            raise ValueError(f"expected version {VERSION}, got {header['version']!r}")
        if header["sha256"] != _checksum(header["content"], arrays):
            raise ValueError("the checksum does not fit the content")
        content = parse_json(header["content"], FORMAT, finite=False)
        keys = [StatsKey(*key) for key in content["keys"]]
        layers = {key: LayerStats(**{name: arrays[f"{_name(key)}/{name}"] for name in ARRAYS}) for key in keys}
        reads = {consumer.path: consumer for consumer in (Consumer(**each) for each in content["reads"])}
        return cls(layers, dict(content["provenance"]), reads)


def _over(values: npt.NDArray[np.float64], layer: LayerStats) -> float:
    """Return the mean of a figure over all values of an activation; NaN where there are none."""
    total = layer.count.sum()
    return float((values * layer.count).sum() / total) if total else math.nan


def _first_non_finite(key: StatsKey, layer: LayerStats) -> NonFinite:
    passes = layer.first_non_finite
    batch = passes[passes > 0].min()
    return NonFinite(key, int(layer.non_finite.sum()), int(batch), int(np.argmax(passes == batch)))


def _columns(key: StatsKey, layer: LayerStats) -> dict[str, npt.NDArray[Any]]:
    place = {name: np.full(layer.channels, value) for name, value in zip(StatsKey._fields, key, strict=True)}
    values = {column: getattr(layer, column) for column in FRAME_COLUMNS}
    return {**place, "channel": np.arange(layer.channels), **values, "dead": layer.constant & (key.side == "output")}


def _stats_file(path: StrPath) -> Path:
    """Return the safetensors file that a path names: itself, or the one inside a folder."""
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / FILE_NAME


def _name(key: StatsKey) -> str:
    return "/".join(map(str, key))


def _checksum(content: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(content.encode())
    for name in sorted(arrays):
        digest.update(name.encode() + b"\0" + arrays[name].tobytes())
    return digest.hexdigest()
