"""A device that is not there: files of weights, which it takes a time for that their sizes give.

`python simulated_device.py KIT` writes the times of a kit, as `measure.py` would.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from prunekit.utils.files import with_checksum


def register() -> None:
    """Register the runtime `weights`, whose files hold the weights of a model and its interface alone."""
    from prunekit.backends.backend import RUNTIMES, FileBackend, register_backend
    from prunekit.models.interface import ModelInterface

    if "weights" in RUNTIMES.names:
        return

    @register_backend(format="weights", runtime="weights", about="weights alone", suffix=".npz")
    class Weights(FileBackend):
        """Weights, which nothing runs."""

        def write(self, source: Any, path: Path) -> list[str]:
            arrays = {name: one.numpy() for name, one in source.model.state_dict().items()}
            np.savez(path, interface=json.dumps(source.interface.as_dict()), **arrays)
            return []

        def open(self, path: Path, *, threads: int = 1) -> Any:
            raise AssertionError("no kit's file is run where it was written")

        def interface(self, path: Path) -> ModelInterface:
            return ModelInterface.from_dict(json.loads(str(np.load(path)["interface"])), str(path))


def milliseconds(file: Path) -> float:
    """A fixed cost, and products of widths in steps of eight, more for the first layers, as their maps are large."""
    arrays = np.load(io.BytesIO(gzip.decompress(file.read_bytes())))
    shapes = [arrays[name].shape for name in arrays.files if arrays[name].ndim > 1]
    steps = [[-(-size // 8) * 8 for size in shape[:2]] for shape in shapes]
    return 0.3 + sum(3e-4 * first * second / (1 + place) for place, (first, second) in enumerate(steps))


def measure(folder: Path, *, noise: float = 0.01, fails: str = "", **changed: Any) -> Path:
    """Write `times.json` into a kit, with other values where they are given."""
    manifest = json.loads((folder / "kit.json").read_text())
    generator = np.random.default_rng(0)
    times = {row["name"]: milliseconds(folder / "files" / f"{row['main']}.gz") for row in manifest["networks"]}
    networks = {}
    for name, ms in times.items():
        drawn = np.exp(generator.normal(0, noise, (12, 2))) * (ms, times["dense"])
        networks[name] = {"ms": drawn.tolist(), "difference": 1e-6}
    networks.pop(fails, None)
    found = {
        "format": 1, "kit": manifest["kit"], "seconds": 1.0, "complete": True, "networks": networks, "doubts": [],
        "device": {"cpu": "made up", "cores": 4, "runtime": "weights 0"}, "failed": {fails: "no"} if fails else {},
    }  # fmt: skip
    path = folder / "times.json"
    path.write_text(json.dumps(with_checksum(found | changed)))
    return path


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
