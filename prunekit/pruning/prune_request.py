"""The request of a one-shot pruning: its arguments, its samples, and the search for its plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.channels.tracing.tracer import HALF
from prunekit.errors import ModelError, UsageError, require_kind, reraise_shortage
from prunekit.pruning.plan_search import CriterionInputs, Planned, PlanSearch
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.pruning import PruneSettings
from prunekit.utils.context import is_large, release_memory, training_mode
from prunekit.utils.inputs import as_example, call, inputs_as_example, sample_count, select_samples
from prunekit.utils.outputs import Outputs
from prunekit.utils.progress import stage
from prunekit.utils.tensors import map_tensors

if TYPE_CHECKING:
    from prunekit.pruning.collected_statistics import Collected
    from prunekit.statistics.channel_stats import ChannelStats
    from prunekit.statistics.taylor_terms import TaylorTerms
    from prunekit.tasks.task import Task

Calibration: TypeAlias = "Tensor | Mapping[str, Any] | Iterable[Any] | Collected"
"""Samples: tensors that hold all of them, a list of images, a data set, a generator, or a loader; or of `collect`."""


@dataclass(eq=False)
class Request:
    """The arguments of `prune` or `plan`, and the search for the plan."""

    model: nn.Module
    example: Any
    calibration: Calibration | None
    settings: PruneSettings
    images: int
    stats: ChannelStats | None
    gradients: TaylorTerms | None
    seed: int
    more_examples: Sequence[Any]
    task: Task | str | None
    outputs: Outputs | None = None
    # of the calibration data, on the model's device; None without them, and before `find_plan`
    samples: Any = field(default=None, init=False)
    search: PlanSearch = field(init=False)  # for the plan
    notes: tuple[str, ...] = field(default=(), init=False)  # what the calibration was short of

    def __post_init__(self) -> None:
        if self.stats is not None or self.gradients is not None:
            from prunekit.statistics.channel_stats import ChannelStats
            from prunekit.statistics.taylor_terms import TaylorTerms

            require_kind(
                "stats", self.stats, ChannelStats, "channel statistics, from prunekit.calibrate(model, loader)"
            )
            made = "gradients of a loss, from prunekit.collect_gradients(model, loader, loss=...)"
            require_kind("gradients", self.gradients, TaylorTerms, made)
        require_kind("more_examples", self.more_examples, (list, tuple), "a list of examples, such as [x, y]")

    def find_plan(self, repair: RepairSettings | None = None, channel_map: ChannelMap | None = None) -> Planned:
        """Read the samples, trace, collect what the criterion needs, and plan within the budgets."""
        collected = self._collected()
        if collected is not None:
            self.samples = collected.samples
            channel_map = channel_map or collected.channel_map
        elif self.calibration is not None:
            from prunekit.pruning.sample_statistics import samples_for

            stage("read the samples")
            self.samples = samples_for(self.model, self.calibration, self.images, self.task)
        example = self._example()
        more = tuple(as_example(self.model, one) for one in self.more_examples)
        if self.samples is not None:
            _require_running(self.model, self.first_samples(2))
        if channel_map is None:
            stage("trace")
        search = PlanSearch.trace(
            self.model,
            example,
            self.settings,
            more_examples=more,
            channel_map=channel_map,
            outputs=self.outputs,
            log_plans=True,
        )
        release_memory(self.model)
        inputs = self._criterion_inputs(search.channel_map, repair, collected)
        release_memory(self.model)
        if self.settings.budget.measured:
            from prunekit.pruning.latency_budget_search import with_profile  # with all runtimes

            search = with_profile(search)
        self.search = search
        planned = self.search.find(inputs)
        if inputs.check is not None and inputs.check.note:
            self.notes += (inputs.check.note,)
        release_memory(self.model)
        return planned

    def _collected(self) -> Collected | None:
        """Return the evidence of `collect`, if that is the calibration."""
        if self.calibration is None:
            return None
        from prunekit.pruning.collected_statistics import Collected

        if not isinstance(self.calibration, Collected):
            return None
        self.calibration.require_unchanged(self.model)
        given = {"example": self.example, "more_examples": self.more_examples, "outputs": self.outputs}
        for name, value in given.items():
            if value is not None and len(value if isinstance(value, (list, tuple)) else (0,)):
                raise UsageError(f"{name}: the model was traced by collect; give {name} to none, or outputs to collect")
        return self.calibration

    def first_samples(self, count: int) -> tuple[Any, ...]:
        """Return the first samples as one batch, as the model takes it."""
        return inputs_as_example(self.model, select_samples(self.samples, slice(count)))

    def proof_examples(self) -> list[tuple[Any, ...]]:
        """Return the first samples, on which the result is compared: a few at a time for a large model."""
        each = 2 if is_large(self.model) else 8
        count = min(8, sample_count(self.samples))
        parts = (select_samples(self.samples, slice(start, start + each)) for start in range(0, count, each))
        return [inputs_as_example(self.model, part) for part in parts]

    def _example(self) -> tuple[Any, ...]:
        if self.example is None and self.samples is None:
            raise UsageError(
                "expected an example to trace, as in prune(model, x, macs=0.5), or samples to calibrate on, as in "
                "prune(model, calibration=loader, macs=0.5); got neither"
            )
        if self.example is None:
            return self.first_samples(2)
        try:
            return as_example(self.model, self.example)
        except ModelError:
            raise
        except UsageError as error:
            raise UsageError(
                f"{error}; samples to calibrate on are given by name: prune(model, calibration=data, macs=0.5)"
            ) from None

    def _criterion_inputs(
        self, channel_map: ChannelMap, repair: RepairSettings | None, collected: Collected | None
    ) -> CriterionInputs:
        """Collect what the criterion needs from the samples, and note what they are short of."""
        model, samples, settings = self.model, self.samples, self.settings
        if samples is None or settings.channels_stay:
            return CriterionInputs(self.stats, self.gradients, None, self.seed)
        from prunekit.pruning.sample_statistics import evidence_of_samples

        given = CriterionInputs(self.stats, self.gradients, None if collected is None else collected.patches, self.seed)
        inputs, self.notes = evidence_of_samples(model, samples, channel_map, settings, repair, given)
        return inputs


def _require_running(model: nn.Module, example: tuple[Any, ...]) -> None:
    """Raise if a model in half precision cannot run on its device, which tracing it does not need."""
    kind = next((tensor.dtype for tensor in model.parameters() if tensor.dtype in HALF), None)
    if kind is None:
        return
    try:
        with training_mode(model, False), torch.no_grad():
            call(model, map_tensors(example, torch.clone))
    except Exception as error:
        reraise_shortage(error)
        raise ModelError(
            f"{type(model).__name__} does not run on the images in {str(kind).removeprefix('torch.')} on "
            f"{next(model.parameters()).device}: {error}; expected a device that has its operators in this precision; "
            "or prune it in full precision, prune(model.float(), calibration=images.float(), ...), and call .half() on "
            "the result"
        ) from error
