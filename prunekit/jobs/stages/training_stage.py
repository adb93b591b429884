"""The trainings of a job, and its fine-tuning under masks or with the compact model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact, spread_
from prunekit.data.loader import batches
from prunekit.distributed.process_group import computed_by_main, is_main, is_sharded
from prunekit.hooks.model_copy import copied
from prunekit.jobs.run.baseline_cache import Baseline, save_weights
from prunekit.jobs.run.job_subject import JobSubject
from prunekit.jobs.run.run_folder import RunFolder, StoppedByCaller
from prunekit.jobs.stages.job_schedule import JobSchedule
from prunekit.masks.activation_masks import ActivationMasks
from prunekit.masks.masked_model import masked, sparsity
from prunekit.masks.thresholds import ActivationThresholds, calibrate_thresholds, chosen_paths
from prunekit.measure.verification import verify
from prunekit.planning.plan import Plan
from prunekit.report.headline import fake_quantized, searched, unbeaten
from prunekit.settings.job import JobSettings
from prunekit.settings.train import TrainSettings
from prunekit.tasks.task import described_task
from prunekit.training.adapters import adapted, require_adaptable
from prunekit.training.callbacks.callback import (
    Callback,
    ContextCallback,
    CurrentPlan,
    EpochRow,
    History,
    PausedRun,
    TrainingRun,
    columns,
)
from prunekit.training.callbacks.fake_quantization import FakeQuantization, require_quantizable
from prunekit.training.callbacks.pruning_schedule import LearningRateRewinding
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks, with_teacher
from prunekit.training.callbacks.tensorboard import TensorBoardLogger
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit
from prunekit.training.optimizers import transfer_run
from prunekit.utils.display import in_unit, share, training_name
from prunekit.utils.files import write_csv
from prunekit.utils.inputs import inputs_as_example
from prunekit.utils.progress import Log


def watching(run: RunFolder, job: JobSettings, name: str, plan: CurrentPlan = lambda: None) -> list[Callback]:
    """Return the callbacks that write `tensorboard/<name>` and `scalars/<name>.csv` of a training, if asked for."""
    if job.watch is None:
        return []
    events, table = _places(run.path, name)
    return [TensorBoardLogger(job.watch, events, table, plan, lambda message: run.log(f"{name}: {message}"))]


def watched_before(run: RunFolder, job: JobSettings, name: str, rows: Iterable[EpochRow]) -> None:
    """Write the scalars of a training that another run has made, unless they are there."""
    events, table = _places(run.path, name)
    if job.watch is None or table.exists():
        return
    again = TensorBoardLogger(job.watch, events, table)
    for row in rows:
        again.scalars(row)
    again.close()


def _places(run: Path, name: str) -> tuple[Path, Path]:
    return run / "tensorboard" / name, run / "scalars" / f"{name}.csv"


def checkpoints_of(run: RunFolder, job: JobSettings, name: str, **facts: str) -> Checkpoints | None:
    """Return the checkpoints of one of a job's trainings; None if the job wants none."""
    if job.checkpoint is None:
        return None
    return Checkpoints(run.resume / name, job.checkpoint, facts=facts, log=lambda line: run.log(f"{name}: {line}"))


OnEpoch = Callable[[dict[str, Any]], object]
"""Called after an epoch with a row of `history.csv` as plain values, and `epochs`, the number of this training's."""


def told(on_epoch: OnEpoch | None, name: str, settings: TrainSettings | None) -> Callable[[EpochRow], None] | None:
    """Return a function that calls `on_epoch` after each epoch of a training; None without one, or in others."""
    if on_epoch is None or settings is None or not is_main():
        return None

    def tell(row: EpochRow) -> None:
        try:
            on_epoch({"run": name, "epochs": settings.epochs, **row.figures()})
        except Exception as error:
            raise StoppedByCaller(error) from error

    return tell


class Trainings:
    """The trainings of a job, with the tables of all of them; the baseline is the teacher of those with `distill`."""

    def __init__(
        self,
        prepared: JobSubject,
        run: RunFolder,
        baseline: Baseline,
        *,
        progress: bool,
        on_epoch: OnEpoch | None = None,
    ) -> None:
        self._prepared, self._run, self._progress, self._on_epoch = prepared, run, progress, on_epoch
        self._job, self._log, self._teacher = prepared.job, run.log, baseline.model
        self._history: list[dict[str, Any]] = []
        self._clamps: list[dict[str, Any]] = []
        self._compiled: dict[str, dict[str, Any]] = {}
        self._chosen: dict[str, dict[str, Any]] = {}
        self._rates: list[dict[str, Any]] = []
        self.paused: PausedRun | None = None
        self._note("baseline", baseline)
        if baseline.reused:
            watched_before(run, prepared.job, "baseline", baseline.rows)

    def summary(self) -> dict[str, Any]:
        """Return what `metrics.json` holds of the trainings."""
        return {
            "clamps": clamp_summary(self._clamps),
            "compiled": self._compiled or None,
            "trainings": self._chosen,
        }

    def control(self, dense: nn.Module) -> nn.Module:
        """Return the dense model after the training of the pruned one, with the same settings but no regularizer."""
        model = copied(dense)
        if self._job.sparsify is not None:
            before = replace(self._job.sparsify, regularize=None, distill=None)
            model = self.train("control_before", model, settings=before)
        settings = replace(self._job.finetune, regularize=None, distill=None)  # of a teacher it could learn nothing
        return self.train("control", model, *self.rewinding(), settings=settings)

    def rewinding(self) -> list[Callback]:
        """Return the callbacks of a schedule that the pruned model and its control share."""
        schedule = self._job.prune.schedule
        return [] if schedule is None else [LearningRateRewinding(schedule)]

    def train(
        self,
        name: str,
        model: nn.Module,
        *callbacks: Callback,
        settings: TrainSettings,
        masks: CurrentPlan = lambda: None,
        chart: ChannelMap | None = None,
        removed: Plan | None = None,
        cut: Plan | None = None,
        until: Callable[[], bool] | None = None,
        begin: PausedRun | None = None,
    ) -> nn.Module:
        """Train a model in place; it is on the CPU afterwards."""
        settings = with_teacher(settings, self._prepared.splits.task, model)
        inputs = CallbackInputs(self._prepared.splits, self._job.data.batch, self._teacher, chart, removed, masks, cut)
        asked = build_callbacks(settings, inputs)
        plan = cut or (masks() if removed is None else removed)
        facts = {} if plan is None else {"plan": plan.digest}
        adapter, seed = settings.adapters, self._job.seed
        checkpoint = self._run.path / "checkpoints" / f"{name}.safetensors"
        with nullcontext() if adapter is None else adapted(model, adapter, seed=seed):
            history = fit(
                model,
                self._prepared.splits,
                settings,
                device=self._prepared.device,
                seed=seed,
                batch=self._job.data.batch,
                workers=self._job.data.reading,
                callbacks=[*watching(self._run, self._job, name, lambda: cut or masks()), *callbacks, *asked],
                own_optimizer=self._prepared.optimizer_for(settings),
                progress=self._progress,
                label=name,
                on_epoch=told(self._on_epoch, name, settings),
                checkpoint=None if adapter else checkpoint,
                checkpoints=checkpoints_of(self._run, self._job, name if begin is None else f"{name}-compact", **facts),
                until=until,
                begin=begin,
            )
        if adapter is not None and is_main():  # `fit` would save layers and adapters apart
            save_weights(checkpoint, model)
        self.paused = history.paused
        if self.paused is not None:
            return model.cpu()
        self._note(name, history)
        self._chosen[name] = history.chosen()
        for part in asked:
            if isinstance(part, FakeQuantization):
                self._chosen[name]["fake_quantize"] = {"dtype": settings.fake_quantize, "layers": part.layers}
        said = {"trainings": {name: self._chosen[name]}, "task": described_task(self._prepared.splits.task)}
        for line in (*searched(said), *fake_quantized(said), *unbeaten(said)):
            self._log(line)
        self._rates += [{"run": name, **asdict(row)} for row in history.rates]
        if self._rates:
            write_csv(self._run.path / "rates.csv", self._rates)
        return model.cpu()

    def _note(self, name: str, made: Baseline | History) -> None:
        if made.compilation is not None:
            self._compiled[name] = asdict(made.compilation)
            self._log(f"{training_name(name)}: {made.compilation}")
        skipped = sum(row.skipped for row in made.rows)
        if skipped:
            why = "overflowing float16 gradients, or batches without images"
            self._log(f"{training_name(name)}: steps skipped: {skipped} ({why})")
        self._clamps += [{"run": name, **asdict(row)} for row in made.clamps]
        if self._clamps:
            write_csv(self._run.path / "clamps.csv", self._clamps)
        self._history += [{"run": name, **row.figures()} for row in made.rows]
        score = self._prepared.splits.task.main.name
        write_csv(self._run.path / "history.csv", self._history, ("run", *columns(score)))


def require_trainable(prepared: JobSubject) -> None:
    """Raise if a job's fine-tuning wants adapters or int8, and its model has no layers for it, or a package lacks."""
    if (adapter := prepared.job.finetune.adapters) is not None:
        require_adaptable(prepared.model, adapter)
    if prepared.job.finetune.fake_quantize is not None:
        require_quantizable(prepared.model)


PROOF_IMAGES = 64
"""Held-out images on which masked and compact model are compared before the latter is trained."""


class Finetuning:
    """The fine-tuning of a job's model, which is pruned before, or by a schedule in the meantime."""

    def __init__(
        self, prepared: JobSubject, run: RunFolder, trainings: Trainings, schedule: JobSchedule | None
    ) -> None:
        self._prepared, self._run, self._trainings, self._schedule = prepared, run, trainings, schedule
        self._job, self._log = prepared.job, run.log
        self._train = partial(trainings.train, "pruned", settings=prepared.job.finetune)

    def tune(self, model: nn.Module, plan: Plan) -> tuple[nn.Module, dict[str, Any] | None]:
        """Train the masked model in place, and return it on the CPU, with figures of `prune.compact_early`."""
        schedule = self._schedule
        early = self._job.prune.compact_early or self._job.finetune.adapter is not None
        model = model.to(self._prepared.device)
        first = plan if schedule is None else schedule.start
        thresholds = self._thresholds(model, first)
        zeros, epochs = sparsity(model, first), self._job.finetune.epochs
        if schedule is not None:
            self._log(f"fine-tune: channels go while training, {schedule.settings.kind}, epochs: {epochs}")
            activations = ContextCallback(lambda _: masks(model, thresholds))
            callbacks = [schedule.part, *self._trainings.rewinding(), activations]
            until: Callable[[], bool] = (lambda: schedule.part.masks.is_final) if early else lambda: False
            model = self._train(model, *callbacks, masks=schedule.in_force, chart=plan.channel_map, until=until)
            left = self._trainings.paused
            return (model, None) if left is None else self._train_compact(model, schedule.part.plan, thresholds, left)
        self._log(f"fine-tune: {share(zeros.channels)} of the channels masked, epochs: {epochs}")
        if early:
            with masked(model, plan, restore=False):
                pass
            return self._train_compact(model.cpu(), plan, thresholds, None)

        trained = model

        @contextmanager
        def under_masks(training: TrainingRun) -> Iterator[None]:
            nonlocal trained
            trained = training.model  # the model, or a sharded copy of it
            with masked(trained, plan, training.optimizer, restore=False), masks(trained, thresholds):
                yield

        def figures() -> dict[str, str]:  # called in the main process alone
            return {} if is_sharded(trained) else {"sparsity": share(sparsity(trained, plan).weights)}

        shown = ContextCallback(under_masks, figures)
        return self._train(model, shown, masks=lambda: plan, chart=plan.channel_map), None

    def _train_compact(
        self, model: nn.Module, plan: Plan, thresholds: ActivationThresholds | None, left: PausedRun | None
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Train the compact model in place of the masked one, and copy its weights back."""
        small = compact(model, plan)
        found = self._proof(model, small, plan)
        at = 0.0
        if left is not None and self._schedule is not None:
            at = left.state["position"]["step"] / self._schedule.part.timeline.steps
        self._log(f"compact early: epoch {at:.2f}: masked == compact to {found:.1e}; training goes on with the latter")
        chart = None if self._job.finetune.regularize is None else trace(small, self._prepared.example_inputs)
        activations = ContextCallback(lambda training: masks(training.model, thresholds))
        begin = None if left is None else transfer_run(left, plan)
        small = self._train(small, *self._trainings.rewinding(), activations, chart=chart, cut=plan, begin=begin)
        spread_(model, small, plan)
        return model, {"epoch": at, "max_relative_difference": found}

    @computed_by_main
    def _proof(self, model: nn.Module, small: nn.Module, plan: Plan) -> float:
        """Return the largest relative difference of the outputs of both models in float64."""
        some = batches(self._prepared.splits.validation, 32, shuffle_seed=None)
        held_out = (inputs_as_example(model, inputs) for inputs, _ in islice(some, PROOF_IMAGES // 32))
        return verify(model, small, plan, held_out, strict=True).max_relative_difference

    @computed_by_main
    def _thresholds(self, model: nn.Module, plan: Plan) -> ActivationThresholds | None:
        """Return the activation thresholds to train under, found once in a run."""
        path = self._run.resume / "activation_thresholds.json"
        if path.exists():
            return ActivationThresholds.load(path)
        thresholds = find_thresholds(self._prepared, compact(model, plan), log=self._log)
        if thresholds is not None:
            thresholds.save(path)
        return thresholds


TOLERANCE = 0.01
"""How far from its target a layer's share of zeros may be."""


def find_thresholds(prepared: JobSubject, compact: nn.Module, *, log: Log) -> ActivationThresholds | None:
    """Return the thresholds of the recipe, or those that meet its target on calibration images; None without masks."""
    settings = prepared.job.activations
    if settings is None:
        return None
    if settings.threshold is not None:
        paths = chosen_paths(compact, settings)
        return ActivationThresholds(dict.fromkeys(paths, settings.threshold), {}, None, settings.side, 0)
    found = calibrate_thresholds(
        compact,
        prepared.calibration_batches(),
        settings.modules,
        device=prepared.device,
        target=settings.target,
        overall=settings.overall,
        by=settings.by,
        side=settings.side,
        progress=False,
    )
    asked, where = (settings.target, "") if found.budget is None else (found.budget.overall, " overall")
    log(f"activations: thresholds of {len(found)} layers for {share(asked)} zeros{where}, passes: {found.rounds}")
    if found.budget is not None:
        log(f"activations: {found.budget.compared}")
    for path, zeros in found.off_target().items():
        log(f"activations: {path} has {share(zeros)} zeros at threshold {found[path]:.3g}")
    return found


def masks(model: nn.Module, thresholds: ActivationThresholds | None) -> AbstractContextManager[Any]:
    """Return the masks for a training, a context that does nothing without thresholds."""
    if thresholds is None:
        return nullcontext()
    return ActivationMasks(model, thresholds, side=thresholds.side, count=False)


def measure_masks(
    prepared: JobSubject, compact: nn.Module, thresholds: ActivationThresholds, *, log: Log
) -> dict[str, Any]:
    """Return sparsity and accuracy under the masks on the test images, which nothing has seen before."""
    task, budget = prepared.splits.task, thresholds.budget
    with ActivationMasks(compact, thresholds, side=thresholds.side) as active:
        found = prepared.tested(compact)
    sparsity = active.sparsity()
    overall = sparsity.overall if budget is None else thresholds.budget_share(sparsity.layers)
    weighted = "" if budget is None or budget.by == "values" else ", weighted by MACs"
    log(
        f"test: {share(overall)} of the masked activations are zero{weighted}; "
        f"{task.main.label} under the masks {in_unit(found.values[task.main.name], task.main.unit)}"
    )
    layers = [
        {
            "module": path,
            "threshold": threshold,
            "calibrated": thresholds.reached.get(path),
            "sparsity": sparsity.layers[path],
            **({} if budget is None else {"weight": budget.weights[path]}),
        }
        for path, threshold in thresholds.items()
    ]
    asked: dict[str, Any] = {"side": thresholds.side, "target": thresholds.target}
    if budget is not None:
        asked |= {"overall": budget.overall, "by": budget.by, "way": budget.way, "errors": dict(budget.errors)}
    return {**asked, "sparsity": overall, **found.figures(), "layers": layers}


def missed_targets(measured: Mapping[str, Any] | None) -> list[str]:
    """Return what is more than a point off its target on the test images: layers, or the overall share of zeros."""
    if measured is None:
        return []
    overall, target = measured.get("overall"), measured["target"]
    if overall is not None and abs(measured["sparsity"] - overall) > TOLERANCE:
        return [f"activations overall {share(overall)}: {share(measured['sparsity'])} zeros on the test images"]
    return [
        f"activations target {share(target)}: {row['module']} has {share(row['sparsity'])} zeros on the test images"
        for row in measured["layers"]
        if target is not None and abs(row["sparsity"] - target) > TOLERANCE
    ]


def clamp_summary(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each training and clamp, the row of the module whose gradients were clamped most."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["run"], row["clamp"]), []).append(row)
    return [max(group, key=lambda row: float(row["share"])) for group in groups.values()]
