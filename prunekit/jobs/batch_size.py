"""The search for the largest batch that fits into memory, by two real steps of every training of a job."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil
import torch

from prunekit.channels.trace import trace
from prunekit.data.datasets import ImageDataset, SampleDataset, Subset
from prunekit.data.splits import Splits
from prunekit.data.user_data import TaskSamples
from prunekit.distributed.process_group import size
from prunekit.errors import PrunekitError, RunError, UsageError, is_shortage
from prunekit.hooks.model_copy import copied
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own
from prunekit.jobs.run.job_subject import JobSubject, prepare, require_optimizer, training_sections
from prunekit.jobs.stages.training_stage import masks
from prunekit.masks.masked_model import ChangingMasks, masked
from prunekit.masks.thresholds import ActivationThresholds, chosen_paths
from prunekit.measure.latency.machine import RESOLUTION, PeakMemory
from prunekit.measure.latency.worker_process import WorkerDied, WorkerProcess
from prunekit.planning.plan import Plan
from prunekit.planning.solver import feasible_plan
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.callback import Callback, ContextCallback, TrainingRun
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks, on_labels, with_teacher
from prunekit.training.loop import fit
from prunekit.utils.context import resolve_device, threads
from prunekit.utils.progress import Log

STEPS = 2
"""In the second one the optimizer's state and activations are in memory together."""
SMALL = 1e-3
"""A threshold for masks of activations, whose memory does not depend on it."""
SMALLEST = 2
"""Images; BatchNorm cannot train on one."""
LEFT = 0.1
"""Share of the free memory that is left free."""
CLEAR = 2**26
"""Bytes: batches that differ by less do not tell what an image takes."""
CLOSE = 1 / 32
"""Share of the batch or of the memory by which two runs of the same batch differ on the CPU."""
STRIDE = 8
"""At most so many times the last batch that fits is tried next: a line is less reliable the further it goes."""
ROUNDS = 16
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with a container's limit and use of memory, in the second and the first version of cgroups."""


@dataclass(frozen=True)
class TriedBatch:
    """A batch that was trained on."""

    batch: int  # its size
    bytes: int | None  # at the peak, of the training alone; None if memory ran out

    def __str__(self) -> str:
        return f"{self.batch} images: {'does not fit' if self.bytes is None else f'{self.bytes / 1e6:.0f} MB'}"


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits."""

    batch: int  # images, for `data.batch`
    bytes: int  # measured at the peak, of the training alone
    device: str  # that trains
    available: int  # bytes of memory that were free
    by: str  # what limits the batch: "memory", or "images", the number of which it has reached
    tried: tuple[TriedBatch, ...]  # every batch that was trained on, in order


def find_batch_size(job: JobSettings, *, log: Log, own: Own = RECIPE_ONLY) -> LargestBatch:
    """Return the largest `data.batch` with which all training of a job fits into memory.

    Every training of the job, with its masks, teacher and average, makes two steps on real images in the job's
    precision. On CUDA batches are doubled until one runs out of memory, and bisected from there: the result is exact.
    On the CPU, where the system kills a process that takes too much, they are tried in a process of their own whose
    memory is watched. Each is chosen by the line through two that were measured, until one fits that is within 3 % of
    one that does not, or of the free memory. A tenth of the free memory is left to others; a container's limit counts.
    """
    if size() > 1:
        raise UsageError(f"--find-batch-size: expected a single process, got {size()}; start without torchrun")
    require_optimizer(job, own)
    device, prepared = resolve_device(job.device), prepare(job, own)
    rehearsal = Rehearsal(prepared)
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
        search = BatchSizeSearch(
            rehearsal.most, available, lambda batch: _on_cuda(rehearsal, device, batch), log, exact=True
        )
        batch = search.run()
    elif device.type == "cpu":
        available = int((1 - LEFT) * free_memory())
        with MeasuringProcess(job, own) as measure:
            search = BatchSizeSearch(rehearsal.most, available, measure, log)
            batch = search.run()
    else:
        raise UsageError(f"--find-batch-size: expected device cpu or cuda, got {device.type}, which tells no memory")
    if not batch:
        raise RunError(
            f"--find-batch-size: not even {SMALLEST} images fit into the {available / 1e6:.0f} MB that are free on "
            f"{device}; a smaller data.image_size, or `precision: bf16`, takes less"
        )
    taken = next(each.bytes for each in search.tried if each.batch == batch)
    assert taken is not None
    by = "images" if batch == rehearsal.most else "memory"
    return LargestBatch(batch, taken, str(device), available, by, tuple(search.tried))


def _on_cuda(rehearsal: Rehearsal, device: torch.device, batch: int) -> int | None:
    """Return the bytes at the peak, None if memory ran out, and free the memory."""
    try:
        return PeakMemory(str(device)).of(lambda: rehearsal.train(batch))
    except Exception as error:
        if not is_shortage(error):
            raise
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def free_memory() -> int:
    """Return the bytes of main memory that the machine and its container leave to a process."""
    free = int(psutil.virtual_memory().available)
    for limit, used in CGROUPS:
        with suppress(OSError, ValueError):  # not there, or "max"
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, free)


@dataclass
class BatchSizeSearch:
    """The search for the largest batch that fits."""

    most: int  # the largest that is tried
    available: int  # bytes
    measure: Callable[[int], int | None]  # returns the bytes that a batch takes; None if memory ran out
    log: Log  # gets a line for each batch
    # whether to go on until the next larger batch is known not to fit, by running out of memory and not by its bytes;
    # else until the batch is `CLOSE`
    exact: bool = False
    tried: list[TriedBatch] = field(default_factory=list)

    def run(self) -> int:
        """Return the batch; 0 if not even the smallest fits."""
        low, high = 0, self.most + 1
        batch = min(SMALLEST, self.most)
        while self.exact or len(self.tried) < ROUNDS:
            taken = self.measure(batch)
            self.tried.append(TriedBatch(batch, taken))
            fits = taken is not None and (self.exact or taken <= self.available)
            self.log(f"batch size: {self.tried[-1]}{'' if fits or taken is None else ', too much'}")
            low, high = (batch, high) if fits else (low, batch)
            most = max((each.bytes or 0 for each in self.tried if each.batch <= low), default=0)
            close = high - low <= CLOSE * low or most >= (1 - CLOSE) * self.available
            if not low or high - low <= 1 or (close and not self.exact):
                break
            batch = self._next(low, high)
        return low

    def _next(self, low: int, high: int) -> int:
        """Return the next batch to try: double the last, the middle of a bracket, or the prediction of a line."""
        known = {each.batch: each.bytes for each in self.tried if each.bytes is not None}
        there_is_more = high > self.most
        guess = 2 * low if there_is_more else (low + high) // 2
        other = max((batch for batch in known if 2 * batch <= low), default=0) if there_is_more else high
        if not self.exact and other in known:
            more = abs(known[other] - known[low])
            if more >= CLEAR or not there_is_more:
                guess = low + (self.available - known[low]) * abs(other - low) // max(1, more)
        aside = 0 if there_is_more else (high - low) // 8  # a line may creep up on one of the two
        return min(max(guess, low + 1 + aside), high - 1 - aside, STRIDE * low)


class Rehearsal:
    """The trainings of a job for two steps each, on training images that are repeated if there are too few.

    The plan is one of equal scores for the job's budget, or for half of the MACs if a budget is one of time, which
    would have to be measured. A dense model that has weights counts as trained.
    """

    def __init__(self, prepared: JobSubject) -> None:
        job = prepared.job
        self._prepared = prepared
        given = {"baseline"} if job.model.weights is not None else set[str]()
        sections = training_sections(job).items()
        self._sections = {name: found for name, found in sections if found.epochs and name not in given}
        if not self._sections:
            raise UsageError(
                "--find-batch-size: expected a job that trains, and this one has no epochs; set finetune.epochs"
            )
        self._chart = trace(prepared.model, prepared.example_inputs)
        budget = job.prune.budget
        if budget.measured or budget.max_drop is not None:
            budget = BudgetSettings(macs=0.5)
        self._plan = feasible_plan(self._chart, replace(job.prune, budget=budget))

    @property
    def most(self) -> int:
        """The number of training images, which no batch exceeds."""
        return len(self._prepared.splits.train)

    def train(self, batch: int) -> None:
        """Make two steps of each training in turn."""
        job, prepared = self._prepared.job, self._prepared
        task, dense = prepared.splits.task, prepared.model
        for name, section in self._sections.items():
            section = with_teacher(section, task, dense) if name == "finetune" else on_labels(section)
            settings = replace(section, epochs=1, accumulate=min(section.accumulate, 2), warmup=0.0)
            given, count = prepared.splits, batch * STEPS * settings.accumulate
            held_out = _some(given.validation, min(batch, len(given.validation)))  # at most one batch
            splits = replace(given, train=_some(given.train, count), validation=held_out)
            with threads(job.threads):
                fit(
                    copied(prepared.model),
                    splits,
                    settings,
                    device=prepared.device,
                    seed=job.seed,
                    batch=batch,
                    callbacks=self._callbacks(name, settings, splits, batch),
                    own_optimizer=prepared.optimizer_for(settings),
                    label=name,
                )

    def _callbacks(self, name: str, settings: TrainSettings, splits: Splits, batch: int) -> list[Callback]:
        finetune = name == "finetune"
        plan: Plan | None = self._plan if finetune else None
        inputs = CallbackInputs(splits, batch, self._prepared.model, self._chart, self._plan, lambda: plan)
        return [*([ContextCallback(self._masks)] if finetune else []), *build_callbacks(settings, inputs)]

    @contextmanager
    def _masks(self, training: TrainingRun) -> Iterator[None]:
        changing = self._prepared.job.prune.schedule is not None  # such masks hold what is pruned
        kind = ChangingMasks if changing else partial(masked)
        thresholds: ActivationThresholds | None = None
        if (settings := self._prepared.job.activations) is not None:
            chosen = dict.fromkeys(chosen_paths(training.model, settings), SMALL)
            thresholds = ActivationThresholds(chosen, {}, None, settings.side, 0)
        with kind(training.model, self._plan, training.optimizer), masks(training.model, thresholds):
            yield


def _some(dataset: SampleDataset, count: int) -> SampleDataset:
    chosen = torch.arange(count) % len(dataset)
    if isinstance(dataset, TaskSamples):
        return replace(dataset, indices=chosen if dataset.indices is None else dataset.indices[chosen])
    assert isinstance(dataset, ImageDataset)
    return Subset(dataset, chosen)


class MeasuringProcess(ExitStack):
    """A process that measures batches; a new one is started when it was killed."""

    def __init__(self, job: JobSettings, own: Own) -> None:
        super().__init__()
        self._trying = BatchMeasurement(job, own)
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        self._process: WorkerProcess | None = None

    def __call__(self, batch: int) -> int | None:
        """Return the bytes that a batch takes; None if the process was killed."""
        if self._process is None:
            self._process = self.enter_context(WorkerProcess(self._trying, self._folder))
        try:
            found: int | PrunekitError | None = self._process.ask(batch)
        except WorkerDied:
            self._process = None
            return None
        if isinstance(found, PrunekitError):
            raise found
        return found


class BatchMeasurement:
    """The function that the measuring process runs."""

    def __init__(self, job: JobSettings, own: Own) -> None:
        self._job, self._own = job, own
        self._made: Rehearsal | None = None

    def __call__(self, batch: int) -> int | PrunekitError | None:
        """Return the bytes by which the process grows while it trains, None if memory ran out, or an error."""
        try:
            rehearsal = self._made = self._made or Rehearsal(prepare(self._job, self._own))
            memory = PeakMemory("cpu")
            if memory.before is None:
                return UsageError(
                    "--find-batch-size: expected Linux, which tells what a process takes; on the CPU alone"
                )
            return memory.of(lambda: rehearsal.train(batch)) or RESOLUTION
        except PrunekitError as error:
            return None if is_shortage(error) else error
