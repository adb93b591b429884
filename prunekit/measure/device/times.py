"""Times that a device measured with a kit: `times.json` of a stranger, checked against the kit before it is used."""

import gzip
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
from pydantic import Field

from prunekit.backends.files.onnx_program import NodeModules
from prunekit.errors import ArtifactError, RunError
from prunekit.measure.device.kit import FORMAT, MANIFEST, TIMES, described_device, from_device
from prunekit.measure.latency.timing import Times, doubts
from prunekit.measure.latency_profile.network_timing import LayerTimes
from prunekit.reading.text_files import as_record, read_json
from prunekit.utils.files import with_checksum

MOST_BYTES = 2**24
"""The largest `times.json`, and the largest list of a kit, that are read."""
LONGEST = 500
"""The longest name of an operator, in signs."""
FEWEST = 5
"""Rounds, at least, that a network was timed in."""
AGAIN = "measure the kit again (python3 measure.py --again), and copy its times.json here"


@dataclass(frozen=True)
class TimedFile:
    """The entry of a network in `times.json`."""

    ms: list[tuple[float, float]]  # of each round: its own milliseconds, and those of the dense network
    difference: float = 0.0  # of its outputs, over the largest value
    layers_us: Mapping[str, float] = Field(default_factory=dict)  # by the runtime's own names of operators

    @property
    def array(self) -> Times:
        """Milliseconds, (2, rounds): of the network and of the dense one."""
        return np.array(self.ms, dtype=np.float64).T

    @property
    def doubts(self) -> list[str]:
        """Why the ratio of the two supports no claim."""
        own, dense = self.array
        return doubts(dense / own, None)

    def layer_times(self, file: Path | None) -> LayerTimes:
        """Return the times that a table is fitted to, lower quartiles; of layers too by the packed ONNX file."""
        own, dense = np.percentile(self.array, 25, axis=1).tolist()
        modules = {} if file is None else _modules_ms(file, self.layers_us)
        rest_ms = modules.pop(None, 0.0)
        return LayerTimes(own, dense, cast("dict[str, float]", modules), rest_ms, tuple(self.doubts))


def _modules_ms(file: Path, layers_us: Mapping[str, float]) -> dict[str | None, float]:
    """Return milliseconds by module of an ONNX file that is packed; None is for operators that a runtime adds."""
    with TemporaryDirectory(prefix="prunekit-") as folder:
        plain = Path(folder, file.stem)
        plain.write_bytes(gzip.decompress(file.read_bytes()))
        modules = NodeModules(plain)
    found: dict[str | None, float] = defaultdict(float)
    for key, us in layers_us.items():
        kind, _, name = key.rpartition(" ")
        path = modules.of(name, convolution=kind.removeprefix("Fused").removeprefix("QLinear") == "Conv")
        found[path] += us / 1000
    return found


@dataclass(frozen=True)
class DeviceTimes:
    """The content of `times.json`."""

    format: int
    kit: str
    device: Mapping[str, str | int | float | None]
    networks: Mapping[str, TimedFile]
    failed: Mapping[str, str]
    doubts: list[str]
    complete: bool

    @property
    def described(self) -> str:
        """The device in a few words."""
        return described_device(self.device)


def read_kit(folder: Path) -> dict[str, Any]:
    """Return the manifest of a kit: its `kit`, `model`, `device` and `networks`, checked as far as they are used."""
    path = folder / MANIFEST
    found = read_json(path, "the list of a kit", most=MOST_BYTES)
    texts = ("kit", "model", "device", "runtime")
    if not isinstance(found, Mapping) or not all(isinstance(found.get(key), str) for key in texts):
        raise ArtifactError(f"{path}: expected the list of a kit; the file is damaged")
    rows = found.get("networks")
    if not isinstance(rows, list) or not all(
        isinstance(row, Mapping) and isinstance(row.get("name"), str) for row in rows
    ):
        raise ArtifactError(f"{path}: networks: expected a list of networks with names; the file is damaged")
    return dict(found)


def read_times(path: Path, kit: Mapping[str, Any]) -> DeviceTimes:
    """Return what a device measured with a kit, whose manifest is given.

    Raises:
        ArtifactError: the file is damaged, was changed, is of another kit, or has times that cannot be.
        RunError: the kit was not measured to its end, or its dense network failed.
    """
    values = read_json(path, "the times of a kit", most=MOST_BYTES)
    found = as_record(DeviceTimes, values, str(path))
    if with_checksum(values) != values:
        raise ArtifactError(f"{path}: something in it was changed after the device wrote it (its checksum); {AGAIN}")
    if found.format != FORMAT:
        raise ArtifactError(f"{path}: expected format {FORMAT}, got {found.format}; write the kit and measure it again")
    if found.kit != kit["kit"]:
        raise ArtifactError(
            f"{path}: expected the times of the kit {kit['kit'][:8]} ({kit['model']} for {kit['runtime']} on "
            f"{kit['device']}), got those of another kit, {found.kit[:8]}; {AGAIN}"
        )
    names = [row["name"] for row in kit["networks"]]
    for name, timed in found.networks.items():
        if name not in names:
            raise ArtifactError(f"{path}: networks.{name[:40]}: the kit has no such network; {AGAIN}")
        if len(timed.ms) < FEWEST or not all(1e-6 < ms < 1e9 for pair in timed.ms for ms in pair):
            raise ArtifactError(
                f"{path}: networks.{name}.ms: expected at least {FEWEST} pairs of milliseconds; {AGAIN}"
            )
        names_of = timed.layers_us
        if not all(0 <= us < np.inf and 0 < len(key) < LONGEST and key.isprintable() for key, us in names_of.items()):
            raise ArtifactError(f"{path}: networks.{name}.layers_us: expected microseconds by operator; {AGAIN}")
    missing = [name for name in names if name not in found.networks and name not in found.failed]
    if missing or not found.complete:
        raise RunError(
            f"{path}: {len(found.networks)} of {len(names)} networks were measured; run python3 measure.py on the "
            f"device once more, which goes on where it was stopped, and copy {TIMES} here again"
        )
    if names[0] not in found.networks:
        raise RunError(f"{path}: the dense network failed on {found.described}: {from_device(found.failed[names[0]])}")
    return found
