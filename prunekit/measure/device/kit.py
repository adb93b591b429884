"""Kits: a folder with networks as files, their inputs and expected outputs, and a script that times them on a device.

The script, `measure.py`, needs neither torch nor prunekit. Networks are packed by gzip. As times do not depend on the
values of weights, only their signs and powers of two are kept, which packs them to a fifth; the outputs to expect are
those of these weights.
"""

import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.backends.backend import FORMATS, RUNTIMES, Backend
from prunekit.backends.session import INT8, MODULE, Inputs, Setting
from prunekit.errors import RunError, UsageError, cut_short, printable
from prunekit.hooks.model_copy import copied
from prunekit.measure.latency.timing_job import file_source, output_tensors
from prunekit.measure.latency_profile.network_timing import Network, structure_hash
from prunekit.utils.context import set_mode, without_gradients
from prunekit.utils.display import plural
from prunekit.utils.files import atomic_folder, sha256, write_json, write_text
from prunekit.utils.inputs import call, described
from prunekit.utils.progress import Log, tracked
from prunekit.utils.tensors import gather

FORMAT = 1
MANIFEST, SCRIPT, TIMES = "kit.json", "measure.py", "times.json"
DENSE = "dense"
"""The name of the dense network, which every other one is timed beside."""
ROUNDS = 30
"""Rounds in which a network and the dense one take turns, if they fit into the time."""
TOLERANCES = {INT8: 1.0}
"""Largest difference of an output, over its largest value, that counts as rounding; else `TOLERANCE`."""
TOLERANCE = 0.05
"""A device may compute in float16 where it is asked for float32."""
MEAN = 0.7
"""About the mean of what weights are multiples of, by powers of two, so that outputs keep their magnitude."""
README = """A kit of prunekit: networks to time on the device that they are for.

On the device, with Python 3.8 or newer and {package}:

    python3 measure.py

It takes some minutes, goes on where it was stopped, and writes times.json: copy that back into this folder on the
machine that wrote the kit, and run the same command there again.
"""


@dataclass(frozen=True, eq=False)
class Kit:
    """The networks of a kit, before they are built: the dense one first."""

    model: str  # name of the dense model
    networks: Sequence[Network]
    inputs: Inputs
    setting: Setting  # its device is the name of a machine elsewhere

    @cached_property
    def key(self) -> str:
        """64 hexadecimal digits that are the same for the same networks, inputs and setting, in any process."""
        structures = [structure_hash(network.outline) for network in self.networks]
        known = [FORMAT, structures, asdict(self.setting), described(self.inputs.one)]  # whatever their values
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    @property
    def names(self) -> list[str]:
        """The names of the networks in the kit."""
        return [DENSE, *(f"network-{number:02}" for number in range(1, len(self.networks)))]

    @property
    def folder_name(self) -> str:
        """A name that tells kits apart for people, and for programs."""
        return f"{re.sub(r'[^a-z0-9]+', '-', self.model.lower())}-{self.setting.runtime}-{self.key[:8]}"

    def write(self, folder: Path, log: Log = lambda text: None) -> None:
        """Write the kit to a folder, whole or not at all."""
        backend = kit_backend(self.setting)
        log(f"kit: writing {len(self.networks)} networks for {self.setting.runtime} on {self.setting.device}")
        with atomic_folder(folder) as place, TemporaryDirectory(prefix="prunekit-") as scratch:
            for part in ("files", "inputs", "outputs"):
                (place / part).mkdir()
            rows, inputs = [], list[dict[str, Any]]()
            pairs = zip(self.names, self.networks, strict=True)
            for name, network in tracked(pairs, "kit", total=len(self.networks), unit="network"):
                row, inputs = self._written(backend, name, network, place, Path(scratch))
                rows.append(row)
            facts = {key: value for key, value in asdict(self.setting).items() if key != "memory_format"}
            tolerance = TOLERANCES.get(self.setting.dtype, TOLERANCE)
            manifest = {
                "format": FORMAT,
                "kit": self.key,
                "prunekit": version("prunekit"),
                "model": self.model,
                **facts,
                "script": script_sum(),
                "tolerance": tolerance,
                "rounds": ROUNDS,
                "inputs": inputs,
                "networks": rows,
            }
            write_json(place / MANIFEST, manifest)
            shutil.copyfile(Path(__file__).with_name(SCRIPT), place / SCRIPT)
            write_text(place / "README.txt", README.format(package=f"the package of {self.setting.runtime}"))

    def _written(
        self, backend: Backend, name: str, network: Network, place: Path, scratch: Path
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Write a network with its outputs, and return its entry in the manifest, and that of the inputs."""
        model, key = _rounded(network.build()), backend.file_key(self.setting)
        folder = scratch / name
        try:
            main = file_source(backend, model, self.inputs, [key], folder).files[key]
        except RunError as error:
            raise RunError(f"{network.name}: cannot be written for {self.setting.runtime}: {error}") from error
        sample = self.inputs.sample(self.setting.batch)
        interface, files = FORMATS.get(backend.carrier).interface(main), dict[str, str]()
        for file in filter(Path.is_file, sorted(main.parent.glob(f"{main.stem}.*"))):
            called = name + file.name.removeprefix(main.stem)
            files[called] = sha256(file)
            with file.open("rb") as plain, gzip.open(place / "files" / f"{called}.gz", "wb", 6) as packed:
                shutil.copyfileobj(plain, packed)
        outputs = output_tensors(without_gradients(lambda: call(model, sample)))
        shutil.rmtree(folder)
        taken = _arrays([spec.name for spec in interface.inputs], gather(sample), place / "inputs", "")
        returned = _arrays([spec.name for spec in interface.outputs], outputs, place / "outputs", f"{name}.")
        return {"name": name, "files": files, "main": f"{name}{main.suffix}", "outputs": returned}, taken


def _arrays(names: Sequence[str], tensors: Sequence[Tensor], folder: Path, before: str) -> list[dict[str, Any]]:
    """Write tensors as raw files, and return their entries in the manifest."""
    found = []
    for number, tensor in enumerate(tensors):
        name = names[number] if number < len(names) else f"output_{number}"
        array = tensor.contiguous().numpy()
        (folder / f"{before}{number}.bin").write_bytes(array.tobytes())
        found.append({"name": name, "dtype": str(array.dtype), "shape": list(array.shape)})
    return found


def _rounded(model: nn.Module) -> nn.Module:
    """Return a copy of a model in eval mode whose weights are `MEAN` times powers of two."""
    model = set_mode(copied(model, "cpu", torch.float32), False)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                weight.copy_(torch.ldexp(MEAN * weight.sign(), torch.frexp(weight).exponent))
    return model


def script_sum() -> str:
    """Return the SHA-256 of the script, which kits of older versions differ in."""
    return sha256(Path(__file__).with_name(SCRIPT))


def kit_backend(setting: Setting) -> Backend:
    """Return the backend of a kit's runtime.

    Raises:
        UsageError: it runs no files, has none in this dtype, or what writes them is not installed here.
    """
    backend = RUNTIMES.get(setting.runtime)
    if backend.carrier == MODULE:
        able = [name for name, facts in RUNTIMES.facts().items() if facts.get("format") or facts.get("carrier")]
        raise UsageError(
            f"runtime {setting.runtime!r} runs the model itself, by torch, and on {setting.device!r} files are timed; "
            f"give one of {', '.join(able)}"
        )
    carrier = FORMATS.get(backend.carrier)
    if missing := carrier.missing():
        raise UsageError(f"format {carrier.format!r} {missing}")
    if setting.memory_format != "contiguous":
        raise UsageError(
            f"memory_format on {setting.device!r}: expected contiguous, as runtimes of files choose layouts"
        )
    if setting.dtype not in ("float32", INT8):
        raise UsageError(f"dtype on {setting.device!r}: expected fp32 or int8, got {setting.dtype}")
    if setting.dtype == INT8 and (refused := backend.refusal(setting)):
        raise UsageError(f"runtime {setting.runtime!r}: {refused}")
    return backend


def described_device(facts: Mapping[str, Any]) -> str:
    """Return what a device is, from its `times.json`, in a few words."""
    cores = facts.get("cores")
    many = plural(cores, "core") if isinstance(cores, int) else ""
    parts = [facts.get("cpu") or facts.get("machine"), many, facts.get("runtime")]
    return ", ".join(from_device(str(part)) for part in parts if part)


def from_device(text: str) -> str:
    """Return text of another machine as a terminal can show it, cut to some hundred signs."""
    return cut_short(printable(text))
