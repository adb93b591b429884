"""Latency of devices that tell only the time of whole networks, on simulated ones: how well few networks do.

`--what table`: a row is a network on a device, a number of networks and a way to make a table of them. `median` and
`worst` are the absolute relative errors at networks that the table was not fitted to: every group at the same share of
its channels, as plans with one ratio have it, and random shares of all, of blocks too; `uniform` and `random` are the
medians of either. `expected` is what the fit itself says of its median error, by leaving out one network at a time.
Ways: `macs`, the time of the dense network times the share of its multiply-accumulates; `first`, the fit with the
first networks that a profile makes; `chosen`, with those that say the most about it.

`--what budget`: a row is a request for a speedup on a device, which `target.command` reaches: kits are written, timed
by the simulator with noise, and read back. `delivered` is the speedup by the device's own clock without noise, `off`
how far it is from what was asked, `trips` the kits that were measured, `said` what a result says of its shortfall.

`--what here`: the same of the runtimes of devices, measured by `measure.py` under a bare Python of another environment,
on one core of this machine; `clock` is what it measured, `low` and `high` its interval.

    python benchmarks/device_latency.py [--what table|budget|here] [--python FILE] [--runtimes A,B]
        [--models A,B] [--devices A,B] [--networks 12,16,24]
        [--speedups 1.5,2,3] [--size 224] [--out FILE] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import ceil, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torchvision
from common import RESULTS, Rows, as_items, as_markdown, keep, show
from latency_networks import log, names, where
from numpy.typing import NDArray
from torch import Tensor, nn

import prunekit as pk
from prunekit.backends.backend import FileBackend, register_backend
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.measure.latency_profile.network_timing import LayerTimes, sample_widths
from prunekit.measure.latency_profile.staircase_fit import TimedNetwork
from prunekit.measure.latency_profile.whole_fit import check_whole_fit, fit_whole_table, informative
from prunekit.models.interface import ModelInterface
from prunekit.planning.budgets.cost_model import GroupPart
from prunekit.planning.candidates import free_parts
from prunekit.planning.depth_search import Block, blocks_of
from prunekit.settings.pruning import PruneSettings
from prunekit.utils.files import with_checksum

MODELS = "resnet18,mobilenet_v3_small,vgg11_bn,resnet34,densenet121"
POOL, TESTS, NOISE, ROUNDS = 96, 24, 0.02, 30
"""Networks to choose from, those that a table is tested with, the usual deviation of a measured time, and rounds."""
WAYS = ("macs", "first", "chosen")
KEYS = ("model", "size", "device", "networks", "way")
COLUMNS = ("model", "device", "networks", "way", "median", "worst", "uniform", "random", "expected", "seconds", "says")


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer as it runs: all that its time depends on."""

    inputs: int
    outputs: int
    kernel: int  # weights of a filter for each input channel: 9 of 3 x 3
    groups: int
    read: int  # positions of the input: height x width, tokens; times the batch
    positions: int  # of the output

    @property
    def kind(self) -> str:
        """What devices have kernels for."""
        if self.groups > 1:
            return "depthwise"
        return "linear" if self.positions == 1 else "1x1" if self.kernel == 1 else "kxk"


@dataclass(frozen=True)
class SimulatedDevice:
    """Times of layers by a roofline: the slower of computing, in blocks of channels and positions, and moving data.

    Kernels reach a share of the peak that is a power of the channels, up to `full` of them; wide 3 x 3 ones without a
    stride are another algorithm; and weights that exceed the cache are read more slowly. So no sum of products of
    widths, which prunekit fits, is the time of a layer.
    """

    step: int  # channels in a block
    tile: int  # positions in a block
    gmacs: dict[str, float]  # peak of each kind in 1e9 multiply-accumulates a second
    full: int  # channels with which a kernel reaches its peak
    power: float  # by which it falls short of it with fewer
    winograd: float  # how many times faster wide 3 x 3 kernels are
    gbytes: float  # moved in a second, in 1e9
    cache: int  # bytes
    beyond: float  # how many times slower weights are read that exceed it
    launch_us: float  # for every layer
    fixed_ms: float  # for every network

    def layer_ms(self, layer: Layer) -> float:
        """The milliseconds of a layer."""
        inputs, channels = layer.inputs // layer.groups, min(layer.inputs, layer.outputs)
        macs = float(_up(layer.outputs, self.step) * layer.kernel * _up(layer.positions, self.tile))
        macs *= _up(inputs, self.step) if layer.groups == 1 else inputs
        peak: float = self.gmacs[layer.kind] * min(1.0, channels / self.full) ** self.power
        if layer.kernel == 9 and layer.groups == 1 and layer.read == layer.positions and channels >= self.full / 2:
            peak *= self.winograd
        weights = 4 * inputs * layer.outputs * layer.kernel
        moved: float = 4 * (layer.inputs * layer.read + layer.outputs * layer.positions)
        moved += weights * (self.beyond if weights > self.cache else 1)
        return max(macs / peak, moved / self.gbytes) / 1e6 + self.launch_us / 1e3

    def network_ms(self, layers: Sequence[Layer]) -> float:
        """The milliseconds of a network, without noise."""
        return self.fixed_ms + sum(map(self.layer_ms, layers))


def _up(width: int, step: int) -> int:
    return ceil(width / step) * step


DEVICES = {
    "phone": SimulatedDevice(
        8, 8, {"kxk": 22, "1x1": 14, "depthwise": 4, "linear": 8}, 64, 0.4, 1.5, 6, 1 << 20, 1.8, 9, 0.4
    ),
    "board": SimulatedDevice(
        12, 4, {"kxk": 5, "1x1": 4.5, "depthwise": 0.9, "linear": 2.5}, 32, 0.3, 1.0, 2.2, 1 << 19, 1.4, 25, 1.5
    ),
    "accelerator": SimulatedDevice(
        16, 32, {"kxk": 150, "1x1": 110, "depthwise": 8, "linear": 30}, 256, 0.6, 1.3, 15, 1 << 21, 2.5, 20, 0.3
    ),
}


def layers_of(model: nn.Module, example: Tensor) -> dict[str, Layer]:
    """The layers that a network runs, by their paths in the order in which they run first; on any device, also meta."""
    found: dict[str, Layer] = {}

    def noting(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if isinstance(module, nn.Conv2d):
                sizes, kernel, groups = module.weight.shape, prod(module.kernel_size), module.groups
                read, positions = (tensor.shape[0] * prod(tensor.shape[2:]) for tensor in (inputs[0], output))
                found[path] = Layer(sizes[1] * groups, sizes[0], kernel, groups, read, positions)
            else:
                positions = prod(output.shape[:-1])
                found[path] = Layer(inputs[0].shape[-1], output.shape[-1], 1, 1, positions, positions)

        return note

    hooks = [
        module.register_forward_hook(noting(path))
        for path, module in model.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear))
    ]
    with torch.no_grad():
        model(example)
    for hook in hooks:
        hook.remove()
    return found


def narrowed(dense: dict[str, Layer], channel_map: ChannelMap, kept: Keep) -> list[Layer]:
    """The layers of the network that keeps some labels: those that its compact model has, without making it."""
    found = []
    for path, layer in dense.items():
        if channel_map.is_present(path, kept):
            outputs, inputs = (
                whole if axis is None else int(np.count_nonzero(kept[axis]))
                for axis, whole in zip(
                    channel_map.labels[f"{path}.weight"][:2], (layer.outputs, layer.inputs), strict=True
                )
            )
            groups = outputs if layer.groups > 1 else 1  # depthwise
            found.append(replace(layer, outputs=outputs, inputs=groups if groups > 1 else inputs, groups=groups))
    return found


@dataclass(frozen=True, eq=False)
class Subject:
    """A network, and which labels narrower ones keep."""

    channel_map: ChannelMap
    layers: dict[str, Layer]
    parts: list[GroupPart]
    blocks: list[Block]

    def drawn(self, number: int, seed: int) -> list[Keep]:
        """Networks as a profile draws them, the dense one first."""
        return list(sample_widths(self.channel_map, self.parts, number, blocks=self.blocks, seed=seed))

    def uniform(self, share: float) -> Keep:
        """The network with one share of the channels of every group."""
        kept = np.ones(self.channel_map.n_labels, dtype=bool)
        for part in self.parts:
            kept[part.labels[part.at_most(share * part.labels.size) :]] = False
        return self.channel_map.completed(kept)

    def times(self, device: SimulatedDevice, keeps: Sequence[Keep]) -> NDArray[np.float64]:
        """Milliseconds of networks, without noise."""
        return np.array([device.network_ms(narrowed(self.layers, self.channel_map, kept)) for kept in keeps])


def subject(name: str, size: int) -> Subject:
    """A network of torchvision whose widths a profile may change, and its blocks."""
    model, example = torchvision.models.get_model(name, weights=None).eval(), torch.zeros(1, 3, size, size)
    settings = PruneSettings().in_blocks
    channel_map = trace(model, (example,))
    nothing = np.zeros(channel_map.n_labels)
    parts = free_parts(channel_map, nothing, settings)
    blocks = blocks_of(channel_map, parts, nothing, settings)
    return Subject(channel_map, layers_of(model, example), parts, blocks)


def timed(keeps: Sequence[Keep], times_ms: NDArray[np.float64]) -> list[TimedNetwork]:
    """Networks with their times and 2 % of noise; the dense one is first."""
    noisy = times_ms * np.exp(NOISE * np.random.default_rng(0).standard_normal(len(times_ms)))
    return [
        TimedNetwork(kept, LayerTimes(ms, times_ms[0], {}, 0.0)) for kept, ms in zip(keeps, noisy.tolist(), strict=True)
    ]


def tables(options: argparse.Namespace, rows: Rows) -> Iterator[dict[str, Any]]:
    """The rows of `--what table`, those of `rows` first where they are there already."""
    for name in options.models:
        wanted = [(device, number) for device in options.devices for number in options.networks]
        common = [
            {"model": name, "size": options.size, "device": device, "networks": number} for device, number in wanted
        ]
        missing = [row for row in common if any(rows.get(**row, way=way) is None for way in WAYS)]
        if missing:
            one = subject(name, options.size)
            pool = one.drawn(POOL, seed=1)
            tests = [one.uniform(share) for share in np.linspace(0.3, 0.97, TESTS // 2)]
            tests += one.drawn(TESTS // 2 + 1, seed=2)[1:]
            order = informative(one.channel_map, pool, max(options.networks))
        for row in missing:
            log(f"{name} on {row['device']}, {row['networks']} networks")
            device, number = DEVICES[row["device"]], row["networks"]
            wanted_ms, dense_ms = one.times(device, tests), float(one.times(device, pool[:1])[0])
            left = [one.channel_map.macs_left(kept) for kept in tests]
            rows.add({**row, "way": "macs", "dense_ms": dense_ms, **errors(dense_ms * np.array(left), wanted_ms)})
            for way, keeps in (("first", one.drawn(number, seed=0)), ("chosen", [pool[at] for at in order[:number]])):
                samples = timed(keeps, one.times(device, keeps))
                start = time.perf_counter()
                table = fit_whole_table(one.channel_map, samples, {})
                facts: dict[str, Any] = {"seconds": time.perf_counter() - start}
                if way == "chosen":
                    check = check_whole_fit(one.channel_map, samples)
                    facts |= {"expected": check.error, "says": check.more_would_help}
                found_ms = np.array([table.at(one.channel_map, kept) for kept in tests])
                rows.add({**row, "way": way, "dense_ms": dense_ms, **errors(found_ms, wanted_ms), **facts})
        for row in common:
            for way in WAYS:
                found = rows.get(**row, way=way)
                assert found is not None
                yield found


def register_layers() -> None:
    """Register the runtime `layers`, whose files hold the layers of a network, which is all that a simulator needs."""

    @register_backend(format="layers", runtime="layers", about="layers of a network", suffix=".json")
    class Layers(FileBackend):
        """Files with the layers of a network."""

        def write(self, source: Any, path: Path) -> list[str]:
            """Write the layers, and the interface."""
            found = [asdict(one) for one in layers_of(source.model, source.example[0]).values()]
            path.write_text(json.dumps({"layers": found, "interface": source.interface.as_dict()}))
            return []

        def open(self, path: Path, *, threads: int = 1) -> Any:
            """Raise, as layers cannot be run."""
            raise NotImplementedError

        def interface(self, path: Path) -> ModelInterface:
            """Return the interface."""
            return ModelInterface.from_dict(json.loads(path.read_text())["interface"], str(path))


def measure(kit: Path, device: SimulatedDevice) -> None:
    """Write the `times.json` that a device would: rounds of passes, each with noise of its own."""
    manifest = json.loads((kit / "kit.json").read_text())
    generator, networks, dense_ms = np.random.default_rng(int(manifest["kit"][:8], 16)), {}, 0.0
    for row in manifest["networks"]:
        found = json.loads(gzip.decompress((kit / "files" / f"{row['main']}.gz").read_bytes()))
        ms = device.network_ms([Layer(**one) for one in found["layers"]])
        dense_ms = dense_ms or ms
        drawn = np.exp(NOISE * generator.standard_normal((ROUNDS, 2)) + NOISE / 2 * generator.standard_normal((1, 2)))
        networks[row["name"]] = {"ms": (drawn * (ms, dense_ms)).tolist(), "difference": 0.0}
    times = {"format": 1, "kit": manifest["kit"], "complete": True, "networks": networks, "failed": {}, "doubts": []}
    times |= {"device": {"cpu": "simulated", "runtime": "layers"}}
    (kit / "times.json").write_text(json.dumps(with_checksum(times)))


def budgets(options: argparse.Namespace, rows: Rows) -> Iterator[dict[str, Any]]:
    """The rows of `--what budget`."""
    here = options.what == "here"
    if not here:
        register_layers()
    for name, where_, asked in product(options.models, options.runtimes if here else options.devices, options.speedups):
        row = {"model": name, "size": options.size, "device": where_, "asked": asked}
        if (known := rows.get(**row)) is None:
            log(f"{name} on {where_}, {asked} times")
            alone = f"taskset -c {options.core} {options.python} {{kit}}/measure.py --minutes {options.minutes:g}"
            simulated = f"{sys.executable} {Path(__file__).resolve()} --devices {where_} --measure {{kit}}"
            target = (
                pk.Target(where_, "bare", command=alone) if here else pk.Target("layers", where_, command=simulated)
            )
            known = {**row, **request(name, options.size, target, asked)}
            rows.add(known)
        yield known


def request(name: str, size: int, target: pk.Target, asked: float) -> dict[str, Any]:
    """Ask for a speedup on a device, and return what was delivered."""
    torch.manual_seed(0)
    model, example = torchvision.models.get_model(name, weights=None).eval(), torch.zeros(1, 3, size, size)
    start = time.perf_counter()
    with TemporaryDirectory() as cache:
        os.environ["PRUNEKIT_CACHE"] = cache
        try:
            found = pk.prune(model, example, speedup=asked, target=target, progress=False)
        except pk.PrunekitError as error:
            return {"delivered": None, "said": str(error)[:200], "seconds": time.perf_counter() - start}
        trips = len(list(Path(cache).glob("devices/*/*/times.json")))
    assert found.delivered is not None
    final, device = found.delivered.final, DEVICES.get(target.device)
    delivered = final.speedup
    if device is not None:
        each = [list(layers_of(one, example).values()) for one in (model, found.model)]
        delivered = device.network_ms(each[0]) / device.network_ms(each[1])
    return {
        "delivered": delivered,
        "off": delivered / asked - 1,
        "clock": final.speedup,
        "low": final.speedup_low,
        "high": final.speedup_high,
        "stable": final.stable,
        "trips": trips,
        "macs": found.plan.channel_map.macs_left(found.plan.keep),
        "expected": found.delivered.target.profile.error,
        "said": "; ".join(found.delivered.shortfalls),
        "seconds": time.perf_counter() - start,
    }


def of_budgets(options: argparse.Namespace) -> None:
    """Makes the rows of budgets, prints them, and how many are within 3 %."""
    keys, columns = (
        ("model", "size", "device", "asked"),
        ("model", "device", "asked", "delivered", "off", "clock", "low", "high", "trips"),
    )
    found = list(budgets(options, Rows(options.out, keys, as_json=options.json)))
    near = [row for row in found if row["delivered"] is not None and abs(row["off"]) <= 0.03]
    twice = [row for row in near if row["trips"] <= 2]
    said = f"{len(near)} of {len(found)} within 3 %, {len(twice)} of them in two trips"
    if not options.json:
        show(
            [{column: row.get(column) for column in (*columns, "macs", "expected", "said")} for row in found],
            as_json=False,
        )
    print(said, file=sys.stderr)
    if options.keep:
        setting = {"size": options.size, "noise": NOISE, "rounds": ROUNDS}
        called = "device_runtimes" if options.what == "here" else "device_budgets"
        print(keep(called, found, setting, where()), file=sys.stderr)


def errors(found_ms: NDArray[np.float64], wanted_ms: NDArray[np.float64]) -> dict[str, float]:
    """Errors at networks of uniform and, behind them, of random shares."""
    off, half = np.abs(found_ms / wanted_ms - 1), len(wanted_ms) // 2
    return {
        "median": float(np.median(off)),
        "worst": float(off.max()),
        "uniform": float(np.median(off[:half])),
        "random": float(np.median(off[half:])),
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over networks and devices, of every number of networks and way."""
    found = []
    for networks, way in dict.fromkeys((row["networks"], row["way"]) for row in rows):
        alike = [row for row in rows if (row["networks"], row["way"]) == (networks, way)]
        means = {key: float(np.mean([row[key] for row in alike])) for key in ("median", "uniform", "random", "worst")}
        found.append({"networks": networks, "way": way, "cases": len(alike), **means})
    return found


def main() -> None:
    """Makes the rows, prints them, and their means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("table", "budget", "here"), default="table")
    parser.add_argument("--speedups", type=lambda text: [float(one) for one in names(text)], default="1.5,2,3")
    parser.add_argument(
        "--measure", type=Path, metavar="KIT", help="write the times of a kit on the first device, and end"
    )
    parser.add_argument("--models", type=names, default=MODELS, metavar="A,B", help=f"of torchvision  [{MODELS}]")
    parser.add_argument("--devices", type=names, default=",".join(DEVICES), metavar="A,B", help="simulated")
    parser.add_argument("--networks", type=lambda text: [int(one) for one in names(text)], default="12,16,24")
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--runtimes", type=names, default="onnxruntime,openvino,litert,ncnn,executorch", metavar="A,B")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="that has the runtimes, for `here`")
    parser.add_argument("--core", type=int, default=0, help="that it is pinned to")
    parser.add_argument("--minutes", type=float, default=2.0, help="that it may take for a kit")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows, one a line; those in it are not made again")
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/device_latency.json and .md")
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure, DEVICES[options.devices[0]])
        return
    if options.what != "table":
        of_budgets(options)
        return
    found = list(tables(options, Rows(options.out, KEYS, as_json=options.json)))
    means = summary(found)
    if not options.json:
        show([{column: row.get(column) for column in COLUMNS} for row in found], as_json=False)
        show(means, as_json=False)
    if options.keep:
        setting = {"size": options.size, "noise": NOISE, "pool": POOL, "tests": TESTS}
        print(keep("device_latency", found, setting, where()), file=sys.stderr)
        text = (
            f"# Tables from the times of whole networks, on simulated devices\n\n{as_markdown(means, tuple(means[0]))}"
        )
        text += f"\n{as_markdown(found, COLUMNS)}\n{as_items(setting)}"
        (RESULTS / "device_latency.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
