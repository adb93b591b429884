"""Two steps of every training of a job, on a batch of any size: what takes as much memory as the training itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from prunekit.channels import trace
from prunekit.channels.copying import copied
from prunekit.context import threads
from prunekit.data import Splits
from prunekit.data.datasets import ImageDataset, SampleDataset, Subset
from prunekit.data.samples import Samples
from prunekit.errors import UsageError
from prunekit.masking import ActivationThresholds, ChangingMasks, masked
from prunekit.masking.thresholds import chosen_paths
from prunekit.planning import BudgetSettings, Plan
from prunekit.planning.solve import feasible_plan
from prunekit.training import Part, Sources, Training, TrainSettings, Within, asked_parts, fit
from prunekit.workflow.activations import masks
from prunekit.workflow.prepared import Prepared

STEPS = 2
"""Of the second one the optimizer's state is there already while activations are."""
SMALL = 1e-3
"""A threshold for masks of activations: what they take does not depend on it."""


class Rehearsal:
    """Trains as a job would, but for two steps, on training images that are taken again where there are too few.

    The plan is one of equal scores for the job's budget; for budgets of time, which would have to be measured, one of
    half of the MACs. A dense model that has its weights already, or that an earlier run has left, counts as trained.

    Raises:
        UsageError: the job trains nothing.
    """

    def __init__(self, prepared: Prepared) -> None:
        job = prepared.job
        self._prepared = prepared
        given = job.model.weights is not None
        sections = {"baseline": None if given else job.baseline, "sparsify": job.sparsify, "finetune": job.finetune}
        self._sections = {name: found for name, found in sections.items() if found is not None and found.epochs}
        if not self._sections:
            raise UsageError(
                "--find-batch-size: expected a job that trains, and this one has no epochs; set finetune.epochs"
            )
        self._chart = trace(prepared.model, prepared.example_inputs)
        budget = BudgetSettings(macs=0.5) if job.prune.budget.measured else job.prune.budget
        self._plan = feasible_plan(self._chart, replace(job.prune, budget=budget))

    @property
    def most(self) -> int:
        """Training images: no batch has more."""
        return len(self._prepared.splits.train)

    def train(self, batch: int) -> None:
        """Makes the steps of each training, one after the other; models are on the CPU or gone afterwards.

        Raises:
            MemoryShortageError: a batch of this size does not fit.
        """
        job, prepared = self._prepared.job, self._prepared
        for name, section in self._sections.items():
            settings = replace(section, epochs=1, accumulate=min(section.accumulate, 2), warmup=0.0)
            splits = _sized(prepared.splits, batch, STEPS * settings.accumulate)
            with threads(job.threads):
                fit(
                    copied(prepared.model),
                    splits,
                    settings,
                    device=prepared.device,
                    seed=job.seed,
                    batch=batch,
                    parts=self._parts(name, settings, splits, batch),
                    own_optimizer=prepared.optimizer_for(settings),
                    label=name,
                )

    def _parts(self, name: str, settings: TrainSettings, splits: Splits, batch: int) -> list[Part]:
        finetune = name == "finetune"
        plan: Plan | None = self._plan if finetune else None
        sources = Sources(splits, batch, self._prepared.model, self._chart, self._plan, lambda: plan)
        return [*([Within(self._masks)] if finetune else []), *asked_parts(settings, sources)]

    @contextmanager
    def _masks(self, training: Training) -> Iterator[None]:
        changing = self._prepared.job.prune.schedule is not None  # such masks hold what is pruned
        kind = ChangingMasks if changing else partial(masked)
        with (
            kind(training.model, self._plan, training.optimizer),
            masks(training.model, self._thresholds(training.model)),
        ):
            yield

    def _thresholds(self, model: nn.Module) -> ActivationThresholds | None:
        settings = self._prepared.job.activations
        if settings is None:
            return None
        return ActivationThresholds(dict.fromkeys(chosen_paths(model, settings), SMALL), {}, None, settings.side, 0)


def _sized(splits: Splits, batch: int, steps: int) -> Splits:
    """As many training images as there are in so many batches, and one batch to validate on at most."""
    train, validation = splits.train, splits.validation
    return replace(splits, train=_some(train, batch * steps), validation=_some(validation, min(batch, len(validation))))


def _some(dataset: SampleDataset, count: int) -> SampleDataset:
    chosen = torch.arange(count) % len(dataset)
    if isinstance(dataset, Samples):
        return replace(dataset, indices=chosen if dataset.indices is None else dataset.indices[chosen])
    assert isinstance(dataset, ImageDataset)
    return Subset(dataset, chosen)
