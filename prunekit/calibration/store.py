"""Channel statistics as a file: safetensors with a checksum, and a CSV table for people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from prunekit.artifacts import StrPath, atomic_file
from prunekit.calibration.consumers import Consumer
from prunekit.calibration.layer_stats import ARRAYS, LayerStats, StatsKey
from prunekit.calibration.moments import InputMoments
from prunekit.calibration.ranks import MapRanks
from prunekit.errors import ArtifactError

FILE_NAME = "channel_stats.safetensors"
FORMAT = "prunekit.channel_stats"
VERSION = 3
MOMENTS = ("total", "blocks")

Arrays = dict[str, np.ndarray[Any, Any]]


class Contents(NamedTuple):
    """What a file holds: the fields of `ChannelStats` in their order."""

    layers: Mapping[StatsKey, LayerStats]
    provenance: Mapping[str, str]
    moments: Mapping[str, InputMoments]
    ranks: Mapping[StatsKey, MapRanks]
    reads: Mapping[str, Consumer]


def locate(path: StrPath) -> Path:
    """The safetensors file that a path means: itself, or the one inside a folder."""
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / FILE_NAME


def write(path: Path, contents: Contents) -> None:
    """Writes every array as `module/side/call/array`, and those of a layer's input as `moments/module/array`, and
    `ranks/module/side/call/total`; the metadata holds the keys' order, counts and a checksum."""
    layers, provenance, moments, ranks, reads = contents
    arrays = {f"{_name(key)}/{name}": getattr(layer, name) for key, layer in layers.items() for name in ARRAYS}
    arrays |= {f"moments/{module}/{name}": getattr(m, name) for module, m in moments.items() for name in MOMENTS}
    arrays |= {f"ranks/{_name(key)}/total": rank.total for key, rank in ranks.items()}
    content = json.dumps(
        {
            "keys": [list(key) for key in layers],
            "provenance": dict(provenance),
            "moments": {module: m.count for module, m in moments.items()},
            "ranks": [[*key, rank.count] for key, rank in ranks.items()],
            "reads": [asdict(consumer) for consumer in reads.values()],
        }
    )
    header = {"version": VERSION, "sha256": _checksum(content, arrays), "content": content}
    metadata = {FORMAT: json.dumps(header)}  # one entry, because safetensors writes several in any order
    with atomic_file(path) as temporary:
        save_file(arrays, temporary, metadata=metadata)


def read(path: Path) -> Contents:
    """Reads what `write` wrote.

    Raises:
        ArtifactError: the file is missing, damaged, or something else.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            arrays: Arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path}: cannot be read as channel statistics ({error}); calibrate again") from error
    if FORMAT not in metadata:
        raise ArtifactError(f"{path}: expected {FORMAT!r} in its metadata, found {sorted(metadata)}; calibrate again")
    return _parse(path, metadata[FORMAT], arrays)


def _parse(path: Path, text: str, arrays: Arrays) -> Contents:
    try:
        header = json.loads(text)
        if header["version"] != VERSION:
            raise ValueError(f"expected version {VERSION}, got {header['version']!r}")
        if header["sha256"] != _checksum(header["content"], arrays):
            raise ValueError("the checksum does not fit the content")
        content = json.loads(header["content"])
        keys = [StatsKey(*key) for key in content["keys"]]
        layers = {key: LayerStats(**{name: arrays[f"{_name(key)}/{name}"] for name in ARRAYS}) for key in keys}
        moments = {
            module: InputMoments(count, *(arrays[f"moments/{module}/{name}"] for name in MOMENTS))
            for module, count in content.get("moments", {}).items()
        }
        counts = {StatsKey(*key): count for *key, count in content.get("ranks", [])}
        ranks = {key: MapRanks(count, arrays[f"ranks/{_name(key)}/total"]) for key, count in counts.items()}
        reads = {consumer.path: consumer for consumer in (Consumer(**each) for each in content["reads"])}
        return Contents(layers, dict(content["provenance"]), moments, ranks, reads)
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise ArtifactError(f"{path}: not usable as channel statistics ({error}); calibrate again") from error


def _name(key: StatsKey) -> str:
    return "/".join(map(str, key))


def _checksum(content: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(content.encode())
    for name in sorted(arrays):
        digest.update(name.encode() + b"\0" + arrays[name].tobytes())
    return digest.hexdigest()
