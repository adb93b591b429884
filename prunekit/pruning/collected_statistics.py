"""Collected evidence that several plans of one model share: samples, the channel map, and statistics."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.errors import UsageError
from prunekit.hooks.model_copy import named_tensors, with_weights
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.modes.public_call import public_call
from prunekit.pruning.sample_statistics import patch_statistics, samples_for
from prunekit.settings.calibration import IMAGES, RepairSettings
from prunekit.statistics.gram_matrices import PatchStats, shortfalls
from prunekit.tasks.task import Task
from prunekit.utils.context import paused_garbage_collection, release_memory
from prunekit.utils.display import Displayed, plural
from prunekit.utils.inputs import inputs_as_example, sample_count, select_samples
from prunekit.utils.outputs import Outputs
from prunekit.utils.progress import reporting, stage
from prunekit.utils.tensors import write_count


@dataclass(frozen=True, eq=False, repr=False)
class Collected(Displayed):
    """Samples, channel map and statistics of a model, from `collect`; `prune` and `plan` take it as `calibration`.

    Attributes:
        model: the dense model.
        samples: of the calibration data, on the model's device.
        channel_map: of the model.
        patches: moments of what its layers read, with the orders of removal that plans found so far.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> collected = pk.collect(model, torch.randn(64, 4))
        >>> [(row["layer"], row["positions"]) for row in collected.rows()]
        [('2.weight', 64)]
    """

    model: nn.Module
    samples: Any
    channel_map: ChannelMap
    patches: PatchStats
    _versions: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the samples are short of."""
        return tuple(shortfalls(self.patches))

    def require_unchanged(self, model: nn.Module) -> None:
        """Raise if a model is not the one that this was collected of, with the same weights.

        Raises:
            UsageError: it is another model, or its weights were changed.
        """
        if unwrapped(model) is not self.model:
            raise UsageError(
                f"calibration: collected of another {type(self.model).__name__}; give the model of collect"
            )
        known = _versions(self.model)
        changed = next((name for name, version in self._versions.items() if known.get(name) != version), None)
        if changed is not None:
            raise UsageError(f"calibration: {changed!r} of the model was changed since collect; call collect again")

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each layer: its weight, the positions that were sampled, and its gain."""
        return [
            {"layer": each.layer.weight, "positions": each.rows, "gain": each.output_gain}
            for each in self.patches.layers
        ]

    def _headline(self) -> str:
        samples = plural(sample_count(self.samples), "sample")
        layers = plural(len(self.patches.layers), "layer")
        return f"{samples} of {type(self.model).__name__}, moments of {layers}, {self.patches.nbytes / 2**20:,.0f} MiB"

    def _parts(self) -> Iterator[str]:
        yield f"Collected: {self._headline()}"


@public_call
def collect(
    model: nn.Module,
    calibration: Any,
    *,
    images: int = IMAGES,
    outputs: Outputs | None = None,
    task: Task | str | None = None,
    repair: RepairSettings | None = None,
    progress: bool | None = None,
) -> Collected:
    """Trace a model and collect the statistics of the default criterion, for several plans.

    Plans take the longest for what does not depend on the budget: the trace, the statistics, and the order in which
    channels would go. All of that is done once. The model's weights must not change meanwhile.

    Args:
        model: any module that runs on the samples; not changed.
        calibration: samples as for `prune`.
        images: how many samples are taken from a loader or a data set.
        outputs: which outputs are read, as for `prune`.
        task: whose `unpack` takes batches in another form apart.
        repair: settings of the repairs that follow, with the limits of rows and memory.
        progress: whether to show stages and bars.

    Raises:
        DataError: fewer than 8 samples, or no tensors, or the task cannot unpack a batch.
        NonFiniteError: a layer reads NaN or Inf on the samples; names the layer.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> collected = pk.collect(model, torch.randn(64, 4))
        >>> collected
        <Collected: 64 samples of Sequential, moments of 1 layer, 0 MiB>
        >>> [pk.prune(model, calibration=collected, macs=macs).model[0].out_features for macs in (0.5, 0.25)]
        [8, 4]
    """
    model = with_weights(unwrapped(model, offloaded=True))
    require_trainable(model, "collect")
    with reporting(progress, "collect"):
        stage("read the samples")
        samples = samples_for(model, calibration, images, task)
        stage("trace")
        few = inputs_as_example(model, select_samples(samples, slice(2)))
        with paused_garbage_collection():
            channel_map = trace(model, few, outputs=outputs)
        release_memory(model)
        stage(f"patch statistics of {sample_count(samples)} samples")
        patches = patch_statistics(model, samples, channel_map, repair, log=stage, held_out=True)
        release_memory(model)
    return Collected(model, samples, channel_map, patches, _versions(model))


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the identity of each tensor of a model, and how often it was written to."""
    return {name: (id(tensor), write_count(tensor)) for name, tensor in named_tensors(model)}
