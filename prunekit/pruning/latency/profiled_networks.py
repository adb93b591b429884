"""The networks that a profile is fitted to, of all widths, cut out of a model; written as a kit for another machine."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from prunekit.backends.session import Inputs, Setting, inputs_like
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.deploy.deployment_transform import AS_IT_IS, Transform
from prunekit.errors import UsageError
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.hooks.wrappers import unwrapped
from prunekit.measure.device.kit import TIMES, Kit
from prunekit.measure.latency.comparison import choose_settings, devices
from prunekit.measure.latency_profile.network_timing import Network, has_layer_clock, sample_widths
from prunekit.measure.latency_profile.whole_fit import informative
from prunekit.measure.measurement_effort import current_effort
from prunekit.modes.public_call import public_call
from prunekit.planning.budgets.cost_model import GroupPart
from prunekit.planning.candidates import free_parts
from prunekit.planning.depth_search import all_that_may_go, blocks_of
from prunekit.planning.plan import Plan
from prunekit.pruning.latency.device_clock import DeviceClock, device_setting, measured_numbers
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import PruneSettings
from prunekit.utils.context import paused_garbage_collection
from prunekit.utils.display import shares_left
from prunekit.utils.files import StrPath, atomic_folder, require_writable
from prunekit.utils.inputs import as_examples
from prunekit.utils.progress import Log, reporting, stage

KIT_NETWORKS, DRAWN = 16, 10
"""Networks of a kit, if no number is given, and how many times as many they are chosen from."""


@dataclass(frozen=True, eq=False)
class AskedNetworks:
    """The networks of a profile, before any is measured."""

    model: nn.Module  # dense
    channel_map: ChannelMap
    keeps: list[Keep]
    networks: Iterable[Network]  # cut out one after the other
    inputs: Inputs
    setting: Setting
    notes: tuple[str, ...]

    @cached_property
    def kit(self) -> Kit:
        """The kit of the networks, for another machine."""
        return Kit(type(self.model).__name__, list(self.networks), self.inputs, self.setting)


def asked_networks(
    model: nn.Module,
    example: Any,
    target: Target,
    settings: PruneSettings | None,
    channel_map: ChannelMap | None,
    more_examples: Sequence[Any],
    networks: int | None,
    transform: Transform,
) -> AskedNetworks:
    """Return the networks of a profile, whose arguments these are."""
    model = unwrapped(model)
    setting, notes = layer_setting(target)
    notes += [f"every network, the dense one too, is timed as it is deployed: {transform}"] if str(transform) else []
    wanted = replace(settings or PruneSettings(), target=target, ratios={}).in_blocks
    given = list(as_examples(model, [example, *more_examples]))
    inputs = inputs_like(given[0])
    channel_map = _tried(model, channel_map or trace(model, *given), wanted, given)
    parts = _parts(channel_map, wanted)
    blocks = blocks_of(channel_map, parts, np.zeros(channel_map.n_labels), wanted)

    def asked(keeps: list[Keep]) -> AskedNetworks:
        made = _networks(model, channel_map, keeps, transform)
        return AskedNetworks(model, channel_map, keeps, made, inputs, setting, tuple(notes))

    if not target.elsewhere:
        return asked(list(sample_widths(channel_map, parts, networks or current_effort().networks, blocks=blocks)))
    for number in [networks] if networks else [*measured_numbers(target), KIT_NETWORKS]:
        drawn = list(sample_widths(channel_map, parts, DRAWN * number, blocks=blocks))
        distinct = list({keep.tobytes(): keep for keep in drawn}.values())
        drawn = drawn if len(distinct) < number else distinct  # a small model has few widths
        found = asked([drawn[index] for index in informative(channel_map, drawn, number)])
        if DeviceClock(target).knows(found.kit):
            break
    return found


def layer_setting(target: Target) -> tuple[Setting, list[str]]:
    """Return the setting in which a target's layers are timed, and notes on it; raise if the runtime lacks it."""
    if target.elsewhere:
        return device_setting(target), []
    if target.command:
        raise UsageError(f"target.command: expected none for {target.device}, which is of this machine; name a device")
    settings = target.as_latency
    (wanted,), _ = choose_settings(settings, devices(target.device, settings))
    if has_layer_clock(target.runtime):
        return wanted, []
    note = f"{target.runtime} cannot tell how long each layer takes: the table is of eager, and plans are measured"
    return replace(wanted, runtime="eager"), [note]


def _parts(channel_map: ChannelMap, wanted: PruneSettings) -> list[GroupPart]:
    return free_parts(channel_map, np.zeros(channel_map.n_labels), wanted)


def _tried(
    model: nn.Module, channel_map: ChannelMap, wanted: PruneSettings, examples: Sequence[tuple[Any, ...]]
) -> ChannelMap:
    """Return the channel map with what only a trial finds: locks, and sizes in the model's Python attributes."""

    def choose(chart: ChannelMap) -> Keep:
        parts = _parts(chart, wanted)
        _, narrow = sample_widths(chart, parts, 2)
        blocks = blocks_of(chart, parts, np.zeros(chart.n_labels), wanted)
        for block in all_that_may_go(parts, blocks, wanted) if shallow else []:
            for index in block.parts:
                narrow[parts[index].labels] = False
        return chart.completed(narrow)

    for shallow in (False, True):  # at last with all blocks gone that may go
        if not shallow or (wanted.blocks_may_go and channel_map.branches.found):
            with paused_garbage_collection():
                tried = run_trial(model, channel_map, choose, list(examples), plain=wanted.plain_classes)
                channel_map = tried.channel_map
    return channel_map


def _networks(
    model: nn.Module, channel_map: ChannelMap, keeps: Sequence[Keep], transform: Transform
) -> Iterator[Network]:
    """Yield networks that are cut out of the model on demand; their outlines on the meta device copy no weights."""
    outline = with_tensors(model, {name: tensor.detach().to("meta") for name, tensor in named_tensors(model)})

    def cut(whole: nn.Module, keep: Keep) -> nn.Module:
        return transform(compact(whole, Plan(channel_map, keep, {})))

    for index, keep in enumerate(keeps):
        name = f"profile: network {index + 1} of {len(keeps)}, {shares_left({'macs': channel_map.macs_left(keep)})}"
        yield Network(name, cut(outline, keep), partial(cut, model, keep))


@public_call
def kit(
    model: nn.Module,
    example: Any,
    *,
    output: StrPath,
    target: Target,
    settings: PruneSettings | None = None,
    channel_map: ChannelMap | None = None,
    more_examples: Sequence[Any] = (),
    networks: int | None = None,
    transform: Transform = AS_IT_IS,
    log: Log = stage,
    progress: bool | None = None,
) -> Path:
    """Write the networks that a profile of another machine is fitted to, with a script that times them there.

    The script `measure.py` needs Python 3.8 or newer and the runtime's own package, and writes `times.json`. With that
    file in the kit's folder in the cache, where `prunekit profile RECIPE --times times.json` puts it, `profile` and
    budgets of time on this target go on. Beside the folder a .zip of it is written.

    Args:
        output: the folder to write, which may not be there yet.
        target: its `device` is the name of the machine, such as "pi5"; its `runtime` one that runs files.
        networks: how many to measure, at least 10, the dense one among them; None: 16, or as many as the largest kit of
            this model that was measured has, which is what budgets of time go by.
        model, example, settings, channel_map, more_examples, transform, log, progress: as of `profile`.

    Returns:
        The folder.

    Raises:
        UsageError: the target is this machine, or the runtime runs no files; or there is something at `output`.
        RunError: a network cannot be written for the runtime.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        >>> target = pk.Target("onnxruntime", device="pi5")
        >>> folder = pk.kit(model, torch.randn(1, 64), target=target, networks=10, output="kit")
        >>> sorted(path.name for path in folder.iterdir())
        ['README.txt', 'files', 'inputs', 'kit.json', 'measure.py', 'outputs']
    """
    if not target.elsewhere:
        raise UsageError(f"target: device: expected the name of another machine, such as 'pi5', got {target.device!r}")
    place = Path(output)
    packed = place.with_name(f"{place.name}.zip")
    for there in filter(Path.exists, (place, packed)):
        raise UsageError(f"{there}: expected nothing, and something is there; give another output")
    require_writable(place, folder=True)
    asked = asked_networks(model, example, target, settings, channel_map, more_examples, networks, transform)
    with reporting(progress, "kit"):
        folder = DeviceClock(target, log).written(asked.kit)
    with atomic_folder(place) as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True, ignore=shutil.ignore_patterns(TIMES))
    with TemporaryDirectory(dir=place.parent, prefix=".kit-") as aside:
        os.replace(shutil.make_archive(str(Path(aside, "kit")), "zip", place.parent, place.name), packed)
    return place
