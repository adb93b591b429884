"""Whole jobs: from the settings of a recipe to a smaller, faster, verified model and its report.

`finetune` sets a run up, checks that every stage gets what it needs, and carries the stages out in the order of
`stages_of`; `FinetuneRun` does their work. The report is written when the run's folder is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.compaction.compact_model import compact, remarks
from prunekit.compaction.model_folder import load
from prunekit.data.datasets import describe_corrupt
from prunekit.data.loader import batches
from prunekit.deploy.deployment_transform import without_subnormals
from prunekit.distributed.process_group import (
    computed_by_main,
    from_main,
    gather_values,
    is_main,
    main_has,
    main_process_only,
    one_for_all,
    rank,
    size,
    wait_for_all,
)
from prunekit.errors import ArtifactError, RunError
from prunekit.hooks.model_copy import copied
from prunekit.jobs.analyses.sensitivity import CURVE_COLUMNS, curve_rows
from prunekit.jobs.run.baseline_cache import save_weights, train_baseline
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own
from prunekit.jobs.run.dense_model import load_dense
from prunekit.jobs.run.early_checks import left_out
from prunekit.jobs.run.job_subject import JobSubject, prepare, require_optimizer, share_model
from prunekit.jobs.run.resume import IDENTITY, StageClock, cache_plan, cached_plan, find_run, identity_of, run_recipe
from prunekit.jobs.run.run_folder import Attempts, Finish, RunFolder, as_raised, run_folder, write_report
from prunekit.jobs.stages.calibration_stage import criterion_inputs
from prunekit.jobs.stages.deployment_stage import (
    DEPLOYED,
    Deployed,
    deploy,
    export_models,
    require_deployable,
    require_formats,
)
from prunekit.jobs.stages.job_schedule import JobSchedule, require_schedule
from prunekit.jobs.stages.measurement_stage import layer_rows, measure_models, metrics_of, write_detections, write_plan
from prunekit.jobs.stages.repair_stage import repair_masked, repair_summary, within_max_drop
from prunekit.jobs.stages.training_stage import (
    Finetuning,
    OnEpoch,
    Trainings,
    checkpoints_of,
    find_thresholds,
    measure_masks,
    require_trainable,
    told,
    watching,
)
from prunekit.masks.masked_model import sparsity
from prunekit.measure.latency.comparison import devices
from prunekit.measure.verification import Verification, verify
from prunekit.models.zoo import load_factory
from prunekit.planning.plan import Plan, load_plan
from prunekit.pruning.latency_budget_search import with_profile
from prunekit.pruning.plan_search import CriterionInputs, Planned, PlanSearch
from prunekit.pruning.schedule_planner import require_same_plan, share_plan
from prunekit.pruning.score_budget import require_limit, with_axis
from prunekit.repair.repair_report import RepairReport
from prunekit.report.headline import comparison, models, tiles
from prunekit.settings.job import JobSettings
from prunekit.training.callbacks.selection import needs_plan, on_labels
from prunekit.utils.context import threads
from prunekit.utils.display import Displayed, Table, listed, plural, shares_left
from prunekit.utils.files import StrPath, write_csv, write_json
from prunekit.utils.inputs import inputs_as_example
from prunekit.utils.progress import Log, StageCounter, stage, wanted

PROOF_IMAGES = 512
"""Held-out images that masked and compact model are compared on at the end, in float64."""


@dataclass(frozen=True)
class Stage:
    """A stage of a job."""

    name: str  # as the terminal counts it
    # carries it out: takes the run of the job, and by name what the stage needs; returns what it gives
    work: Callable[..., Any]
    needs: tuple[str, ...] = ()  # names of results of stages before it
    # names of its results; one that a stage before it gave is replaced. `work` returns a tuple of several.
    gives: tuple[str, ...] = ()
    counted: bool = True  # whether the terminal counts it
    # raises for what this stage would fail of, before hours of work
    require: Callable[[JobSubject], object] = lambda subject: None


def require_stages(stages: Sequence[Stage], subject: JobSubject) -> None:
    """Raise if a stage needs what none before it gives, or if a job's subject is not one for it; nothing runs."""
    given: set[str] = set()
    for each in stages:
        if missing := [name for name in each.needs if name not in given]:
            raise RunError(f"stage {each.name!r} needs {' and '.join(missing)}, which no stage before it gives")
        given |= {*each.gives}
        each.require(subject)


def carry_out(stages: Sequence[Stage], run: object) -> Mapping[str, Any]:
    """Carry out stages in order, each with what it needs, and return what the last one gives, by name.

    A result is dropped once no later stage needs it, as statistics of layers may fill the memory.
    """
    made: dict[str, Any] = {}
    for number, each in enumerate(stages, 1):
        found = each.work(run, **{name: made[name] for name in each.needs})
        made |= zip(each.gives, found if len(each.gives) > 1 else (found,), strict=True)
        wanted = {name for later in stages[number:] for name in later.needs} or {*each.gives}
        made = {name: value for name, value in made.items() if name in wanted}
        del found
    return made


@as_raised()
def finetune(
    job: JobSettings,
    *,
    log: Log = stage,
    progress: bool | None = None,
    finish: Finish | None = write_report,
    own: Own = RECIPE_ONLY,
    resume: StrPath | None = None,
    on_epoch: OnEpoch | None = None,
    training: bool = True,
) -> RunResult:
    """Train or load the dense model, calibrate, plan, repair, fine-tune under masks, compact, verify and measure.

    Where `prune.schedule` is given, channels are removed while the model is fine-tuned. All processes of a group
    (`prunekit.distributed`) call this: they calibrate and train together; the main one does the rest, and alone writes.
    Without `training`, the pruned model is repaired as the job's `repair` says, and that is all; the dense model is
    trained only if it has no weights and the job has a `baseline`. Labels are read to measure scores, and by criteria
    that need them. A run that is resumed on the CPU, with the same threads and number of processes, ends with the same
    weights as one without a break.
    """
    devices("auto", job.latency)  # raises if a runtime is missing, before hours of work
    require_optimizer(job, own)
    text = run_recipe(job, own)
    prepared = prepare(job, own)
    require_stages(stages_of(job, training=training), prepared)
    identity = identity_of(prepared, training=training)
    pruning = job.prune
    if job.prune.budget.max_drop is not None:
        validation, main = prepared.splits.validation, prepared.splits.task.main
        require_limit(job.prune.budget.max_drop, main, len(validation))
        pruning = with_axis(job.prune)
    search = PlanSearch.trace(prepared.model, prepared.example_inputs, pruning, log=log)
    resumed = None
    with one_for_all():
        if resume is not None:
            resumed = main_process_only(find_run)(resume, job.output / job.name, identity, log)
        if is_main():
            search = with_profile(search, job.deploy)
            search.require_reachable()
        wait_for_all()
        with run_folder(job.output, job.name, log, text, finish, resumed) as run, one_for_all(), threads(job.threads):
            write_json(run.resume / IDENTITY, identity)
            for line in prepared.splits.notes:
                run.log(f"data: {line}")
            if lacking := left_out(job):
                run.log(lacking)
            work = FinetuneRun(prepared, search, run, progress=wanted(progress), training=training, on_epoch=on_epoch)
            metrics = carry_out(work.stages, work)["metrics"]
            folder = from_main(lambda: run.path)
        wait_for_all()  # until the report is written
    return RunResult(folder, metrics, own)


prune_job = partial(finetune, training=False)
"""`finetune` without fine-tuning."""


class FinetuneRun:
    """The work of the stages of one run, and what they keep for each other besides the results that they declare."""

    trainings: Trainings
    schedule: JobSchedule | None = None
    repaired: RepairReport | None = None
    compacted_early: dict[str, Any] | None = None

    def __init__(
        self,
        prepared: JobSubject,
        search: PlanSearch,
        run: RunFolder,
        *,
        progress: bool,
        training: bool,
        on_epoch: OnEpoch | None,
    ) -> None:
        self.prepared, self.search, self.folder = prepared, replace(search, log=run.log), run
        self.progress, self.training, self.on_epoch = progress, training, on_epoch
        self.job, self.log = prepared.job, run.log
        self.clock = StageClock(run.resume / "seconds.json")
        self.stages = stages_of(self.job, training=training)
        self.counter = StageCounter([each.name for each in self.stages if each.counted], run.log)

    @contextmanager
    def _stage(self, name: str, clock: str | None = None) -> Iterator[None]:
        """Announce a stage, and add the seconds that it takes to the clock, under its name or another one."""
        self.counter.begin(name)
        with self.clock.stage(clock or name):
            yield

    def baseline(self) -> tuple[nn.Module, nn.Module]:
        """Return the dense model, which is trained first if it has no weights, twice: it is also the model to prune."""
        with self._stage("dense model", "baseline"):
            baseline = train_baseline(
                self.prepared,
                log=self.log,
                progress=self.progress,
                checkpoints=checkpoints_of(self.folder, self.job, "baseline"),
                watch=watching(self.folder, self.job, "baseline"),
                on_epoch=told(self.on_epoch, "baseline", self.job.baseline),
            )
        if self.job.sparsify is not None and not self.training:
            self.log("sparsify: left out, because it is training")
        if self.job.prune.compact_early and not self.training:
            self.log("compact early: without effect, because nothing is fine-tuned")
        self.trainings = Trainings(self.prepared, self.folder, baseline, progress=self.progress, on_epoch=self.on_epoch)
        return baseline.model, baseline.model

    def sparsify(self, model: nn.Module, plan: Plan | None = None) -> nn.Module:
        """Return the dense model after the job's `sparsify`, which runs before there is a plan, or with it."""
        assert self.job.sparsify is not None
        settings = on_labels(self.job.sparsify)
        chart = self.search.channel_map if plan is None else plan.channel_map
        self.log(f"sparsify: {settings.regularize and settings.regularize.method}, epochs: {settings.epochs}")
        with self._stage("sparsify"):
            return self.trainings.train("sparsified", copied(model), settings=settings, chart=chart, removed=plan)

    def calibrate(self, model: nn.Module) -> tuple[Planned | None, CriterionInputs | None]:
        """Return what the criterion reads, collected by all processes; or the plan of the run that is resumed."""
        self.search = self.search.with_weights(model)
        known = cached_plan(self.folder, model)
        if main_has(known):
            return known, None
        chart = self.search.channel_map
        with self._stage("calibrate"):
            return None, criterion_inputs(self.prepared, model, chart, with_stats=self.training, log=self.log)

    def plan(self, known_plan: Planned | None, inputs: CriterionInputs | None) -> tuple[Planned | None, Plan]:
        """Return the plan within the budgets, in every process, and in the main one how it was found."""
        planned = known_plan
        if is_main() and inputs is not None:
            planned = self._search_plan(inputs)
        return planned, share_plan(None if planned is None else planned.plan)

    def _search_plan(self, inputs: CriterionInputs) -> Planned:
        with self._stage("plan"):
            if inputs.stats is not None:
                inputs.stats.save(self.folder.path / "statistics")
            limit = self.job.prune.budget.max_drop
            if limit is None:
                planned = self.search.find(inputs)
            else:
                planned = within_max_drop(self.prepared, self.search, inputs, limit, self.log, training=self.training)
            write_plan(self.folder.path, planned)
            self._log_plan(planned)
            if inputs.patches is not None:
                rows = curve_rows(planned.plan.channel_map, planned.curves(inputs.patches))
                write_csv(self.folder.path / "sensitivity.csv", rows, CURVE_COLUMNS)
            cache_plan(self.folder, planned)
        return planned

    def _log_plan(self, planned: Planned) -> None:
        chart = planned.plan.channel_map
        left = shares_left({"macs": chart.macs_left(planned.plan.keep)})
        self.log(
            f"plan: {left}, {planned.plan.removed} of {chart.n_labels - 1} channels removed; "
            f"masked == compact in the trial to {planned.max_relative_difference:.1e}"
        )
        if gone := [branch.name for branch in planned.plan.gone]:
            self.log(f"plan: {len(gone)} of {plural(len(chart.branches.found), 'block')} gone: {listed(gone, 10)}")
        for text in (*(f"locked after the trial: {lock}" for lock in planned.locked_by_trial), *planned.unseen):
            self.log(f"plan: {text}")

    def repair(self, model: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
        """Return the masked model, repaired as the job says, and the plan, with masks of single weights if wanted."""
        with self._stage("repair"):
            model, self.repaired, plan = repair_masked(self.prepared, model, plan, self.folder, training=self.training)
        return model, plan

    def begin_schedule(self, model: nn.Module, planned: Planned | None, plan: Plan) -> nn.Module:
        """Return a copy of the model that nothing is masked in yet, and make the schedule that prunes it."""
        scores = None if planned is None else planned.scores
        self.schedule = JobSchedule(self.prepared, plan, scores, self.folder)
        return copied(model)

    def finetune(self, model: nn.Module, plan: Plan) -> nn.Module:
        """Return the masked model after its fine-tuning."""
        with self._stage("fine-tune"):
            finetuning = Finetuning(self.prepared, self.folder, self.trainings, self.schedule)
            model, self.compacted_early = finetuning.tune(model, plan)
        return model

    def final_plan(self, planned: Planned | None, plan: Plan) -> tuple[Planned | None, Plan]:
        """Return the plan after training, which a schedule has changed, and check that all processes have the same."""
        if self.schedule is not None:
            plan = self.schedule.in_force()
            if planned is not None:
                planned = self.schedule.finished(planned)
                write_plan(self.folder.path, planned)
        elif planned is not None and plan.element_masks:
            planned = replace(planned, plan=plan)
            write_plan(self.folder.path, planned)
        require_same_plan(plan, "after training")
        return planned, plan

    def compact(self, model: nn.Module, dense: nn.Module, plan: Plan) -> tuple[nn.Module, Verification] | None:
        """Return the compact model, saved in the run's folder, and the proof that it equals the masked one.

        Processes share the samples of the proof; the main one has the result.
        """
        if is_main():
            self.counter.begin("compact")
        share_model(model, "the model under masks")
        cut = compact(model, plan)
        validation = self.prepared.splits.validation
        spread = torch.linspace(0, len(validation) - 1, min(PROOF_IMAGES, len(validation))).long()
        held_out = batches(validation, 32, shuffle_seed=None, indices=spread).dealt(rank(), size())
        examples = (inputs_as_example(model, inputs) for inputs, _ in held_out)
        parts = gather_values(verify(model, cut, plan, examples, strict=True) if len(held_out) else None)
        if not is_main():
            return None
        proofs = [part for part in parts if part is not None]
        proof = max(proofs, key=lambda part: part.max_relative_difference)
        proof = replace(proof, inputs=sum(part.inputs for part in proofs))
        self.log(
            f"verify: masked == compact to {proof.max_relative_difference:.1e} on {proof.inputs} "
            f"{self.prepared.splits.task.samples} ({proof.dtype})"
        )
        flushed = without_subnormals(cut, self.prepared.example_inputs)
        small = flushed.model
        for remark in (*flushed.notes, *remarks(small)):
            self.log(f"compact: {remark}")
        self.prepared.save_model(small, self.folder.path / "model", plan)
        write_csv(self.folder.path / "layers.csv", layer_rows(dense, small, plan))
        return small, proof

    def control(self, dense: nn.Module) -> nn.Module | None:
        """Return the dense model after as much training as the pruned one had, if the job wants one."""
        if not self.job.controlled:
            why = "as it could learn from labels alone" if self.job.control else "as the recipe asks"
            self.log(f"control: left out, {why}; scores are compared with the dense model as it was")
            return None
        with self._stage("control"):
            return self.trainings.control(dense)

    @main_process_only
    def deploy(self, dense: nn.Module, plan: Plan) -> Deployed | None:
        """Return the deployed model, if the job wants one."""
        save_weights(self.folder.path / "checkpoints" / "dense.safetensors", dense)
        with self._stage("deploy"):
            return deploy(self.prepared, self.folder, dense, plan)

    @main_process_only
    def measure(
        self,
        dense: nn.Module,
        control: nn.Module | None,
        model: nn.Module,
        planned: Planned,
        compacted: tuple[nn.Module, Verification],
        deployed: Deployed | None,
    ) -> dict[str, Any]:
        """Measure the models, and return the metrics, written into the run's folder."""
        (small, proof), plan, folder = compacted, planned.plan, self.folder
        with self._stage("measure"):
            share, attempt, target = sparsity(model, plan), Attempts(self.log), self.search.latency
            final = None
            if target is not None:
                final = attempt("time", lambda: self.search.deliver(planned, self._final(dense, deployed)[1]))
            models = dense, control, None if deployed is None else deployed.model
            measured = measure_models(self.prepared, folder, *models, attempt=attempt, final=final)
            masks = attempt("activation masks", lambda: self._measure_activations(small))
            shown = {"dense": dense, "pruned": small if deployed is None else deployed.model}
            attempt("pictures of detections", lambda: write_detections(self.prepared, shown, folder.path))
            measured = replace(measured, activations=masks, failures=tuple(attempt.failures))
        metrics = metrics_of(measured, planned, proof, share, self.prepared, self.clock.stages)
        metrics |= self.trainings.summary()
        metrics |= {
            "corrupt_images": self.prepared.splits.corrupt,
            "fine_tuned": self.training,
            "repair": repair_summary(self.repaired),
            "resumed": len(self.folder.resumed),
            "compacted_early": self.compacted_early,
            "schedule": None if self.schedule is None else self.schedule.summary(),
            "deployment": None if deployed is None else deployed.figures(),
        }
        if target is not None and final is not None:
            metrics |= {"profile": target.profile.summary(), "delivered": final.summary()}
            metrics["shortfalls"] += final.shortfalls
        write_json(folder.path / "metrics.json", metrics)
        return metrics

    @main_process_only
    def export(self, dense: nn.Module, deployed: Deployed | None, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics with the rows of exported files, and their shortfalls."""
        attempt, (folder, model) = Attempts(self.log, done="made"), self._final(dense, deployed)
        with self._stage("export"):
            rows = export_models(self.prepared, self.folder, folder, model, attempt=attempt, dense=dense)
        metrics |= {"exports": rows, "shortfalls": [*metrics["shortfalls"], *attempt.failures]}
        write_json(self.folder.path / "metrics.json", metrics)
        return metrics

    @computed_by_main
    def conclude(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics in every process, once the log says what fell short."""
        if metrics["corrupt_images"]:
            self.log(f"data: {describe_corrupt(metrics['corrupt_images'])}")
        for shortfall in metrics["shortfalls"]:
            self.log(f"shortfall: {shortfall}")
        return metrics

    def _final(self, dense: nn.Module, deployed: Deployed | None) -> tuple[str, nn.Module]:
        """Return the folder of the final model, the deployed one if there is one, and the model loaded from it."""
        folder = "model" if deployed is None else DEPLOYED
        return folder, self.prepared.load_model(self.folder.path / folder, dense)

    def _measure_activations(self, small: nn.Module) -> dict[str, Any] | None:
        """Return figures of the activation masks, with thresholds found again, because training has changed them."""
        thresholds = find_thresholds(self.prepared, small, log=self.log)
        if thresholds is None:
            return None
        thresholds.save(self.folder.path / "activation_thresholds.json")
        return measure_masks(self.prepared, small, thresholds, log=self.log)


def stages_of(job: JobSettings, *, training: bool) -> list[Stage]:
    """Return the stages of a job in the order in which they run.

    `model` is the model that is worked on: the dense one, which `sparsify` trains, `repair` masks and `fine-tune`
    trains again.
    """
    work = FinetuneRun
    sparsify = job.sparsify if training else None
    late = sparsify is not None and needs_plan(sparsify)
    scheduled = job.prune.schedule is not None
    schedules = partial(require_schedule, training=training)
    stages = (
        (True, Stage("dense model", work.baseline, (), ("dense", "model"))),
        (sparsify is not None and not late, Stage("sparsify", work.sparsify, ("model",), ("model",))),
        (True, Stage("calibrate", work.calibrate, ("model",), ("known_plan", "inputs"))),
        (True, Stage("plan", work.plan, ("known_plan", "inputs"), ("planned", "plan"), require=schedules)),
        (late, Stage("sparsify", work.sparsify, ("model", "plan"), ("model",))),
        (not scheduled, Stage("repair", work.repair, ("model", "plan"), ("model", "plan"))),
        (scheduled, Stage("schedule", work.begin_schedule, ("model", "planned", "plan"), ("model",), counted=False)),
        (training, Stage("fine-tune", work.finetune, ("model", "plan"), ("model",), require=require_trainable)),
        (True, Stage("final plan", work.final_plan, ("planned", "plan"), ("planned", "plan"), counted=False)),
        (True, Stage("compact", work.compact, ("model", "dense", "plan"), ("compacted",))),
        (training, Stage("control", work.control, ("dense",), ("control",), counted=job.controlled)),
        (not training, Stage("control", lambda run: None, (), ("control",), counted=False)),
        (True, Stage("deploy", work.deploy, ("dense", "plan"), ("deployed",), job.deploy.wanted, require_deployable)),
        (True, Stage("measure", work.measure, MEASURED, ("metrics",))),
        (bool(job.export), Stage("export", work.export, EXPORTED, ("metrics",), require=require_formats)),
        (True, Stage("conclude", work.conclude, ("metrics",), ("metrics",), counted=False)),
    )
    return [each for runs, each in stages if runs]


MEASURED = ("dense", "control", "model", "planned", "compacted", "deployed")
EXPORTED = ("dense", "deployed", "metrics")


@dataclass(frozen=True, eq=False, repr=False)
class RunResult(Displayed):
    """A finished run.

    Attributes:
        folder: everything it wrote, as the command leaves it: `report.html`, `metrics.json`, the plan, tables.
        metrics: what `metrics.json` holds.
        own: the user's own code of the job.

    Example:
        >>> import prunekit as pk
        >>> from pathlib import Path
        >>> _ = Path("mine.py").write_text('''
        ... from torch import nn
        ... def net():
        ...     return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))
        ... ''')
        >>> settings, data = pk.ModelSettings("mine.py:net", zoo="own"), pk.DataSettings(image_size=8)
        >>> job = pk.JobSettings("mine", settings, data=data, finetune=pk.TrainSettings(epochs=0), control=False)
        >>> shorter, own = ["latency.batches=[1]", "latency.explain=false", "watch=null"], pk.Own("mine.py:net")
        >>> result = pk.finetune(job, shorter, own=own, log=lambda line: None)
        >>> result
        <RunResult: runs/mine/...: MACs −50.0 %, ...>
        >>> result.plan.widths()
        {'1': (8, 16)}
        >>> print(result.report)
        runs/mine/.../report.html
    """

    folder: Path
    metrics: dict[str, Any]
    own: Own = RECIPE_ONLY

    @property
    def shortfalls(self) -> list[str]:
        """Shortfalls, in sentences; empty if there are none."""
        return list(self.metrics["shortfalls"])

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every epoch of every training of the run, as `history.csv` has them; empty where nothing was trained."""
        import pandas as pd

        path = self.folder / "history.csv"
        return pd.read_csv(path).to_dict("records") if path.is_file() else []

    @property
    def validation(self) -> float | None:
        """The pruned model's score on the validation images, percent, in its best epoch; None if not fine-tuned.

        A search over settings compares this, and leaves the test images alone. Scores of some tasks have another unit,
        and of a perplexity less is better: minimize that.
        """
        trained: dict[str, Any] = self.metrics["trainings"].get("pruned", {})
        return trained.get("validation")

    @property
    def plan(self) -> Plan:
        """The plan: which channels of the dense model are kept."""
        return load_plan(self.folder)

    @property
    def report(self) -> Path:
        """The page of the run."""
        return self.folder / "report.html"

    def model(self) -> nn.Module:
        """Load the pruned model, in eval mode on the CPU.

        Raises:
            ArtifactError: the folder is missing or damaged.
        """
        return load(self.folder / "model", None if self.own.model is None else load_factory(self.own.model))

    def dense(self) -> nn.Module:
        """Load the dense model with the weights that it was pruned from, in eval mode on the CPU.

        Raises:
            ArtifactError: the folder is missing or damaged.
        """
        if (found := load_dense(self.folder, self.own.model)) is None:
            raise ArtifactError(f"{self.folder}: expected the dense weights, but the run has not kept them")
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each model: scores in percent, MACs of one sample, parameters, bytes."""
        return [{"model": name, **self.metrics[name]} for name in models(self.metrics)]

    def _headline(self) -> str:
        figures = (f"{tile.label} {tile.value}" for tile in tiles(self.metrics))
        return f"{self.folder}: {', '.join(figures)}"

    def _parts(self) -> Iterable[str | Table]:
        from prunekit.report.pages.run_page import lines  # pandas takes most of a second to import

        yield comparison(self.metrics)
        yield "\n".join(lines(self.metrics, self.folder))
