"""What the latency benchmarks share: torchvision's networks, targets, and where it was measured."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

import prunekit
from prunekit.backends.session import inputs_like
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.jobs.run.run_folder import environment
from prunekit.measure.latency.machine import describe_machine
from prunekit.pruning.latency.latency_target import LatencyTarget
from prunekit.pruning.latency.profiling import Profile, profile
from prunekit.pruning.latency_budget_search import TimedPlanSearch
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import PruneSettings
from prunekit.utils.context import seeded

TOOLS = ("onnxruntime", "openvino", "onnx", "torch-pruning")


def numbers(text: str) -> list[float]:
    """Speedups: numbers above 1 with commas between them."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if not all(1 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers above 1, got {text}")
    return values


def names(text: str) -> list[str]:
    """Names with commas between them."""
    return text.split(",")


def log(text: str) -> None:
    """A line on standard error, with the time of day."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def built(name: str, size: int, weights: Path | None) -> tuple[nn.Module, str]:
    """A network in eval mode, and where its weights are from: `MODEL.pth` in a folder, or random.

    With random weights BatchNorm's statistics are those of random images, and a layer that begins as zeros is random:
    so values have the size that they have in a trained network, where none are too small for full precision, which is
    slow, and outputs that can be compared.
    """
    with seeded(0):
        model = torchvision.models.get_model(name, weights=None).eval()
        file = weights / f"{name}.pth" if weights is not None else None
        if file is not None and file.exists():
            model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
            return model, file.name
        for module in model.modules():
            if isinstance(module, nn.Linear) and not module.weight.any():
                nn.init.normal_(module.weight, std=0.02)
        images = torch.randn(8, 3, size, size)
        if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
            prunekit.recalibrate_batchnorm(model, [(images, torch.zeros(len(images)))])
    return model.eval(), "random"


@dataclass(frozen=True, eq=False)
class Case:
    """A network on a target, with its profile and what to report of it."""

    model: nn.Module
    example: torch.Tensor
    channel_map: ChannelMap
    profiled: Profile
    facts: dict[str, Any]

    def search(self, settings: PruneSettings) -> TimedPlanSearch:
        """The search for a plan within budgets of time."""
        inputs, examples = inputs_like((self.example,)), ((self.example,),)
        target = LatencyTarget(self.model, self.channel_map, inputs, settings, self.profiled)
        return TimedPlanSearch(self.model, examples, settings, self.channel_map, latency=target, log=log)


def profiled(model: nn.Module, example: torch.Tensor, settings: PruneSettings, networks: int) -> Case:
    """A network's profile, made once."""
    channel_map, lines = trace(model, (example,)), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        log(line)

    found = profile(model, example, settings=settings, channel_map=channel_map, networks=networks, log=say)
    log(f"profile: {found}")
    facts = {
        "profile_error": found.error,
        "profile_worst": max(abs(check.error) for check in found.checks),
        "profile_seconds": found.seconds,
        "profile_networks": len(found.samples),
        "profile_cached": sum(line.endswith("measured before") for line in lines),
        "profile_notes": list(found.notes),
        "versions": versions(settings.target.runtime),
    }
    return Case(model, example, channel_map, found, facts)


def target_of(runtime: str, options: argparse.Namespace) -> Target:
    """What figures are meant on."""
    return Target(runtime, options.device, options.batch, options.threads, options.dtype, options.memory_format)


def add_target(parser: argparse.ArgumentParser) -> None:
    """The options of a target but for its runtime."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--memory-format", choices=("contiguous", "channels_last"), default="contiguous")


def versions(runtime: str) -> str:
    """What a row was measured with: rows of one file may be of different days."""
    return ", ".join(f"{name} {_version(name)}" for name in ("torch", runtime) if _version(name))


def where() -> dict[str, Any]:
    """Versions and hardware, with the machine's clock and load."""
    installed = {name: _version(name) for name in TOOLS}
    facts = {key: value for key, value in describe_machine().items() if key not in ("cpu", "cores", "busy_processes")}
    return {**environment(), **installed, **facts}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
