"""The fine-tuning stage: under masks, and where the job says so with the compact model once its plan is final."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import nn

from prunekit.channels import trace
from prunekit.compaction import compact, spread_
from prunekit.data import batches
from prunekit.distributed.exchange import from_main
from prunekit.distributed.shards import is_sharded
from prunekit.inputs import arguments
from prunekit.masking import ActivationThresholds, masked, sparsity
from prunekit.measure.verify import verify
from prunekit.planning import Plan
from prunekit.training import LeftRun, Part, Training, Within, transfer_run
from prunekit.workflow.activations import find_thresholds, masks
from prunekit.workflow.prepared import Prepared
from prunekit.workflow.runs import RunFolder
from prunekit.workflow.scheduling import JobSchedule
from prunekit.workflow.trainings import Trainings

PROOF_IMAGES = 64
"""Held-out images on which masked and compact model are compared when training goes over to the latter."""


class Finetuning:
    """Fine-tunes a job's pruned model.

    Args:
        prepared: what the job works on.
        run: where it writes.
        trainings: makes the training, and keeps its tables.
        schedule: prunes while the model is trained; None: all is pruned before.
    """

    def __init__(self, prepared: Prepared, run: RunFolder, trainings: Trainings, schedule: JobSchedule | None) -> None:
        self._prepared, self._run, self._trainings, self._schedule = prepared, run, trainings, schedule
        self._job, self._log = prepared.job, run.log

    def tune(self, model: nn.Module, plan: Plan) -> tuple[nn.Module, dict[str, Any] | None]:
        """The masked model in its dense size, trained in place, on the CPU; and what became of `prune.compact_early`.

        Args:
            plan: of a schedule the one that was tried before it.
        """
        schedule, early = self._schedule, self._job.prune.compact_early
        model = model.to(self._prepared.device)
        first = plan if schedule is None else schedule.start
        thresholds = from_main(lambda: self._thresholds(compact(model, first)))
        share, epochs = sparsity(model, first), self._job.finetune.epochs
        if schedule is not None:
            self._log(f"fine-tune: channels go while training, {schedule.settings.kind}, epochs: {epochs}")
            activations = Within(lambda _: masks(model, thresholds))
            parts = [schedule.part, *self._trainings.rewinding(), activations]
            until: Callable[[], bool] = schedule.part.settled if early else lambda: False
            model = self._train(model, *parts, masks=schedule.in_force, chart=plan.channel_map, until=until)
            left = self._trainings.left
            return (model, None) if left is None else self._go_on(model, schedule.part.plan, thresholds, left)
        self._log(f"fine-tune: {share.channels:.1%} of the channels masked, epochs: {epochs}")
        if early:
            with masked(model, plan, restore=False):
                pass
            return self._go_on(model.cpu(), plan, thresholds, None)

        trained = model

        @contextmanager
        def under_masks(training: Training) -> Iterator[None]:
            nonlocal trained
            trained = training.model  # the model, or a sharded copy of it
            with masked(trained, plan, training.optimizer, restore=False), masks(trained, thresholds):
                yield

        def figures() -> dict[str, str]:  # the main process asks alone
            return {} if is_sharded(trained) else {"sparsity": f"{sparsity(trained, plan).weights:.1%}"}

        shown = Within(under_masks, figures)
        return self._train(model, shown, masks=lambda: plan, chart=plan.channel_map), None

    def _train(self, model: nn.Module, *parts: Part, **more: Any) -> nn.Module:
        return self._trainings.train("pruned", model, self._job.finetune, *parts, **more)

    def _go_on(
        self, model: nn.Module, plan: Plan, thresholds: ActivationThresholds | None, left: LeftRun | None
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Trains the compact model in the place of the masked one, and brings its weights back to their places.

        Args:
            model: masked, on the CPU.
            plan: final.
            left: the training so far; None: it has not begun.
        """
        small = compact(model, plan)
        found = from_main(lambda: self._proof(model, small, plan))
        at = 0.0 if left is None else left.state["position"]["step"] / self._steps()
        self._log(f"compact early: epoch {at:.2f}: masked == compact to {found:.1e}; training goes on with the latter")
        chart = None if self._job.finetune.regularize is None else trace(small, self._prepared.example_inputs)
        activations = Within(lambda training: masks(training.model, thresholds))
        begin = None if left is None else transfer_run(left, plan)
        small = self._train(small, *self._trainings.rewinding(), activations, chart=chart, cut=plan, begin=begin)
        spread_(model, small, plan)
        return model, {"epoch": at, "max_relative_difference": found}

    def _steps(self) -> int:
        assert self._schedule is not None
        return self._schedule.part.timeline.steps

    def _proof(self, model: nn.Module, small: nn.Module, plan: Plan) -> float:
        """The largest relative difference of outputs in float64, and of what is in the models."""
        some = batches(self._prepared.splits.validation, 32, shuffle_seed=None)
        held_out = (arguments(model, inputs) for inputs, _ in islice(some, PROOF_IMAGES // 32))
        return verify(model, small, plan, held_out, strict=True).max_relative_difference

    def _thresholds(self, small: nn.Module) -> ActivationThresholds | None:
        """Those to train under, found once in a run."""
        path = self._run.resume / "activation_thresholds.json"
        if path.exists():
            return ActivationThresholds.load(path)
        thresholds = find_thresholds(self._prepared, small, log=self._log)
        if thresholds is not None:
            thresholds.save(path)
        return thresholds
