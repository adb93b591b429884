"""`Pruner`: pruning in the user's own training loop, by masks whose plan changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from prunekit.compaction.compact_model import compact
from prunekit.compaction.optimizer_transfer import transfer, transfer_average
from prunekit.distributed.process_group import is_main, is_sharded, main_process_only
from prunekit.errors import ArtifactError, ModelError, PlanError, UsageError
from prunekit.hooks.hook import OwnedHook
from prunekit.hooks.step_hooks import optimizer_of
from prunekit.hooks.wrappers import require_trainable, unwrapped, unwrapped_for_hooks
from prunekit.masks.gradient_clamps import GradientClamp
from prunekit.masks.gradient_clamps import clamp_activation_grad as clamp_activations
from prunekit.masks.gradient_clamps import clamp_weight_grad as clamp_weights
from prunekit.masks.masked_model import Sparsity, sparsity
from prunekit.masks.scheduled_masks import PlanChange, ScheduledMasks, straight_through
from prunekit.masks.weight_masks import WeightMasks
from prunekit.measure.verification import Verification, verify
from prunekit.modes.public_call import public_call
from prunekit.planning.keywords import PlanKeywords, prune_settings, shows_keywords
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import schedule_in_steps
from prunekit.pruning.pattern_zeros import schedule_planner
from prunekit.pruning.prune import Calibration, Request
from prunekit.pruning.schedule_planner import ChannelPlanner, rescored, share_plan
from prunekit.pruning.user_loop import LoopStatistics, StepCounter, check_calibration, labeled_batches
from prunekit.settings.calibration import IMAGES
from prunekit.settings.pruning import ScheduleKind, ScheduleSettings
from prunekit.settings.train import ClampSettings
from prunekit.tasks.task import Loss, Task, get_task
from prunekit.utils.display import Displayed, Table, resource, share, shares_left
from prunekit.utils.inputs import to_device
from prunekit.utils.outputs import Outputs
from prunekit.utils.progress import reporting

Clamp = float | Mapping[str, float] | ClampSettings
STATE = {"steps", "asked", "masks", "average", "clamps"}


class Pruner(Displayed, AbstractContextManager["Pruner"]):
    """Pruning of a model while the user's own training loop trains it, with the compact model at the end.

    The model is under masks until `finish` or `close`: after every step of the optimizer, channels that the plan in
    force prunes are exactly zero. `step()`, called in the loop after `optimizer.step()`, puts the next plan in force
    when its step is reached. The last one meets the budgets, is verified at once (masked == compact), and holds until
    the loop ends. `finish()` returns the compact model, verified, and the same optimizer, which now trains that model
    with its momentum; learning-rate schedulers and gradient scalers go on.

    Steps are counted where the optimizer makes them, so it does no harm to call `step()` after each micro-batch, and
    steps that a GradScaler skips don't count. Criteria that look at gradients (`taylor`) see those of the loop's own
    steps since the pruning step before, of at most 64 steps evenly spread, without the loss scale; so the first comes
    after at least one step. Weights are scored as they are at each pruning step, and activations (`apoz`, `wanda`, ...)
    on `calibration` samples; the criterion `elimination` scores the dense model once.

    Models and optimizers that Accelerate has prepared are taken as they are, as are those in DistributedDataParallel,
    where every process makes a pruner and all follow the main one's plan. `torch.compile` comes before, but the
    compiled model may not have run yet; each pruning step then compiles again.

    Args:
        model: trained in place, in its dense size.
        optimizer: of the model's parameters, and of those alone; or a wrapper that keeps it in `.optimizer`.
        example: what the model is called with: a tensor, a tuple of positional arguments, or a mapping of arguments by
            name. May be left out where `calibration` is given.
        schedule: how the model gets there: `cubic`, `linear` or `exponential`, in 10 pruning steps; `iterative`, in 3;
            or `oneshot`, all at `begin`. Or `ScheduleSettings`, which also say in how many (`rounds`, `every`),
            whether channels may come back (`regrow`, `freeze`), and whether `movement` scores them; counted in steps.
        steps: of the optimizer, until the budgets are met; none for `oneshot`.
        begin: how many steps come before the schedule begins.
        calibration: samples, as for `prunekit.prune`: for criteria that look at activations. For those of second
            derivatives (`taylor2`, `obd`) batches of inputs and targets.
        loss: for these: from what the model returns and the targets to one number, the mean over the batch.
        images: how many samples of `calibration` are taken.
        task: whose `unpack` takes its batches apart, where they come in another form; itself or its name.
        average: of the model's weights (EMA, SWA), which the loop updates: an `AveragedModel`, or another module of the
            model's structure. What is pruned is zero in it too.
        clamp_weight_grad, clamp_activation_grad: limits as for the functions of these names, in force until the end.
        scaler: what scales the loss, for `clamp_activation_grad`.
        gradient_masks: whether gradients of what is pruned are set to zero too, so that they count nowhere: not in
            momentum, not where gradients are clipped by norm, and no NaN or Inf spreads from there.
        seed: of the random criterion.
        more_examples: further examples, for branches of the model that the first does not take.
        outputs: which of the model's outputs are read, see `prunekit.prune`.
        removed: what may go: the keywords of `prunekit.prune` from `macs` to `settings`, and further budgets by name. A
            budget of time is measured when the pruner is made, for the final plan; those before it have budgets of
            MACs. Blocks that go, and zeros of a `pattern` in what the channels of each step leave, are masked until
            `finish`, whose compact model does not run the blocks and has the zeros. See `ScheduleSettings` for how
            single weights come back (`regrow`), and how they learn meanwhile (`gradients`).
        on_change: called after each pruning step, for loggers, with a dictionary of numbers: its row as `rows` has it,
            and `sparsity`, the share of weights that are zero; of several processes in the main one alone.
        progress: whether to show what happens while the pruner is made, on stderr; None: on a terminal and in a
            notebook.

    Attributes:
        plan: the one in force.
        changes: the pruning steps that were carried out.
        done: whether the plan is the final one.
        average: the one that was given; after `finish` that of the compact model.
        verification: of masked and compact model, once the plan is final.

    Raises:
        UsageError: arguments don't fit each other, the criterion can't be had from what is given, or the optimizer is
            that of another model.
        PlanError: the budget cannot be met or removes nothing, or a glob matches no module.
        ModelError: the model can't be traced, is sharded, or a compiled form of it has run already.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> pruner = pk.Pruner(model, optimizer, torch.randn(1, 4), macs=0.5, steps=20, criterion="taylor")
        >>> for _ in range(30):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     pruner.step()
        >>> small, optimizer = pruner.finish()
        >>> small[0].out_features
        8
    """

    @public_call
    @shows_keywords(PlanKeywords)
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example: Any = None,
        *,
        schedule: ScheduleKind | ScheduleSettings = "cubic",
        steps: int | None = None,
        begin: int = 0,
        calibration: Calibration | None = None,
        loss: Loss | None = None,
        images: int = IMAGES,
        task: Task | str | None = None,
        average: nn.Module | None = None,
        clamp_weight_grad: Clamp | None = None,
        clamp_activation_grad: Clamp | None = None,
        scaler: torch.amp.GradScaler | None = None,
        gradient_masks: bool = True,
        seed: int = 0,
        more_examples: Sequence[Any] = (),
        outputs: Outputs | None = None,
        on_change: Callable[[dict[str, Any]], None] | None = None,
        progress: bool | None = None,
        **removed: Unpack[PlanKeywords],
    ) -> None:
        inner = unwrapped_for_hooks(model, "Pruner")
        require_trainable(inner, "Pruner")
        if is_sharded(inner):
            raise ModelError(
                "Pruner: the model is sharded, and a schedule holds the values of what it prunes, which no process has "
                "whole; use DistributedDataParallel, or prune at once: prunekit.masked(model, plan, optimizer)"
            )
        self._model, self._given, self._optimizer = inner, optimizer, _own_optimizer(inner, optimizer)
        laid, pruning_steps = schedule_in_steps(schedule, steps, begin)
        asked = prune_settings(inner, calibration is not None, **removed)
        if asked.schedule is not None:
            raise UsageError("settings.schedule: expected None beside a pruner's own; give it as schedule=")
        self.settings = replace(asked, schedule=laid)
        labeled = check_calibration(self.settings, pruning_steps, calibration, loss, task)
        # The trial of a first plan finds the locks. That plan is random if the criterion scores again at each change,
        # so that a pruner that goes on from a state finds the same locks with other weights.
        once = asked.budget.measured or not rescored(self.settings)
        tried = self.settings if once else replace(self.settings, criterion="random")
        example = None if example is None else to_device(example, next(inner.parameters()).device)
        request = Request(
            inner, example, calibration, tried, images, None, None, seed, tuple(more_examples), task, outputs
        )
        with reporting(progress, "pruner"):
            request.prepare()
            planned = request.search.find(request.inputs)
            self._example = request.search.examples[0]
            plan = share_plan(planned.plan)
            pairs = labeled_batches(inner, calibration, task, images) if labeled else []
            loss = get_task(task).loss if loss is None and task is not None else loss
        statistics = LoopStatistics(self.settings, plan.channel_map, request.samples, pairs, loss, seed=seed)
        of_channels = ChannelPlanner(
            self.settings, plan, planned.scores, statistics, seed=seed, library=request.search.library
        )
        planner = schedule_planner(self.settings, of_channels, inner, self._example, plan)
        self._dense = dense = Plan(plan.channel_map, np.ones(plan.channel_map.n_labels, dtype=bool))
        self._masks = ScheduledMasks(
            inner,
            self._optimizer,
            pruning_steps,
            dense,
            planner,
            self._changed,
            gradients=gradient_masks,
            straight_through=straight_through(laid),
        )
        self._steps = StepCounter(self._optimizer, pruning_steps[-1].step)
        self.average = average
        self._averaged = None if average is None else _average_masks(average, inner, dense)
        self._clamps: dict[str, GradientClamp] = {}
        if clamp_weight_grad is not None:
            limits, by = _limits(clamp_weight_grad)
            self._clamps["clamp_weight_grad"] = clamp_weights(inner, self._optimizer, limits, by=by)
        if clamp_activation_grad is not None:
            limits, by = _limits(clamp_activation_grad)
            self._clamps["clamp_activation_grad"] = clamp_activations(inner, limits, by=by, loss_scale=scaler)
        self.verification: Verification | None = None
        self._over, self._on_change = "", on_change
        with ExitStack() as entered:
            owners: tuple[AbstractContextManager[Any], ...] = (self._masks, self._steps, *self._clamps.values())
            for owner in (*owners, self._averaged or nullcontext()):
                entered.enter_context(owner)
            self._masks.reach(0)
            self._entered = entered.pop_all()

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._masks.plan

    @property
    def changes(self) -> list[PlanChange]:
        """The pruning steps that were carried out."""
        return list(self._masks.changes)

    @property
    def done(self) -> bool:
        """True if the plan is the final one."""
        return self._masks.is_final

    @property
    def sparsity(self) -> Sparsity:
        """The shares of weights and channels that are pruned now."""
        return sparsity(self._model, self.plan)

    @property
    def step_count(self) -> int:
        """The number of steps that the optimizer has made, without those that a GradScaler skipped."""
        return self._steps.made

    @property
    def clamped(self) -> dict[str, dict[str, float]]:
        """The share of values (by norm: of gradients) beyond each clamp's limit so far, 0..1, by module path."""
        return {name: clamp.shares() for name, clamp in self._clamps.items()}

    @public_call
    def step(self) -> None:
        """Put the next plan in force if its step is reached; to be called after each step of the optimizer.

        Raises:
            UsageError: the pruner has finished or is closed.
            NonFiniteError: weights or gradients are NaN or Inf; names the parameter.
            VerificationError: masked and compact model differ under the final plan.
        """
        self._require_open("step")
        self._steps.told = True
        due = self._masks.next
        if due is not None and self._steps.tried >= due.step:  # else this does not wait for the device
            self._masks.reach(self._steps.made)  # and zero the average, where means of zeros stay zeros
        else:
            self._masks.get_ready(self._steps.tried)

    @public_call
    def finish(self, *, early: bool = False) -> tuple[nn.Module, Optimizer]:
        """Return the compact model and its optimizer, and remove all hooks from the given model.

        The given model is not changed further, with zeros for pruned channels. `average` becomes that of the compact
        model. Wrappers such as DistributedDataParallel, `torch.compile` or Accelerate's autocast have to be put around
        the compact model again. Zeros of a pattern are in the compact model, but nothing keeps them there in training.

        Args:
            early: whether to apply the final plan now if the schedule isn't over, without training under it.

        Returns:
            The compact model, and the given optimizer, which now has that model's parameters.

        Raises:
            UsageError: the schedule isn't over, and not `early`; or the pruner has finished or is closed.
            VerificationError: masked and compact model differ; nothing was changed.
            PlanError: the shape of an optimizer state does not fit a parameter; nothing was changed.
        """
        self._require_open("finish")
        if not self.done:
            if not early:
                raise UsageError(f"finish: {self._unfinished()}")
            self._masks.reach(self._masks.pruning_steps[-1].step)
        plan = self.plan
        small = compact(self._model, plan)
        self.verification = verify(self._model, small, plan, [self._fitting_example()], strict=True)
        average = self.average
        if isinstance(average, AveragedModel):
            average = transfer_average(average, plan)
        elif average is not None:
            average = compact(average, plan)
        transfer(self._optimizer, self._model, small, plan)
        self._leave("has finished: go on with the compact model that it returned")
        self.average = average
        return small, self._given

    @public_call
    def close(self, *, restore: bool = True) -> None:
        """Remove all hooks from the model, and restore the values that its pruned weights had.

        What was trained since is kept. Nothing happens if this is called again, or after `finish`.

        Args:
            restore: False: the weights stay as they are, for another pruner that goes on from this one's state.
        """
        if self._over:
            return
        held = [self._masks.held, *([] if self._averaged is None else [self._averaged.held])]
        self._leave("is closed")
        for values in held if restore else ():
            values.write_back()

    def __exit__(self, *_: object) -> None:
        self.close()

    @public_call
    def state_dict(self) -> dict[str, Any]:
        """Return the state that a loop needs to go on, besides those of model, optimizer and average.

        Tensors, numbers, text, and lists and dictionaries of them: `torch.load(..., weights_only=True)` reads it.
        """
        self._require_open("state_dict")
        averaged = {} if self._averaged is None else self._averaged.held.values
        return {
            "steps": self.step_count,
            "asked": self._asked(),
            "masks": self._masks.state_dict(),
            "average": {name: values.clone() for name, values in averaged.items()},
            "clamps": {name: clamp.state_dict() for name, clamp in self._clamps.items()},
        }

    @public_call
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, to the bit as without a break.

        Call it on a new pruner with the same arguments, before or after model, optimizer and average get their states.

        Raises:
            ArtifactError: the state is of another model, other budgets or another schedule.
        """
        self._require_open("load_state_dict")
        if not isinstance(state, Mapping) or not state.keys() >= STATE:
            raise ArtifactError(
                "state of a pruner: expected what its state_dict() returned, got "
                + (
                    f"one with {', '.join(map(repr, list(state)[:3]))}"
                    if isinstance(state, Mapping)
                    else type(state).__name__
                )
            )
        if state["asked"] != self._asked():
            raise ArtifactError(
                f"state of a pruner: of other {_differing(state['asked'], self._asked())} than this one; make this "
                "one of the same model with the same arguments"
            )
        self._masks.load_state_dict(state["masks"])
        self._masks.get_ready(int(state["steps"]))
        if self._averaged is not None:
            self._averaged.update(self.plan)
            self._averaged.held.load(state["average"])
        for name, clamp in self._clamps.items():
            clamp.load_state_dict(state["clamps"][name])
        self._steps.begin_at(int(state["steps"]))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each pruning step so far: step, channels pruned and regrown, and the shares that are left.

        With a pattern also the single weights that were masked and came back.
        """
        rows = []
        for change in self.changes:
            row: dict[str, Any] = {"step": change.step, "pruned": change.pruned, "regrown": change.regrown}
            if self.settings.pattern is not None:
                row |= {"weights_pruned": change.weights_pruned, "weights_regrown": change.weights_regrown}
            rows.append(row | {f"{name}_left": left for name, (_, left) in change.shares.items()})
        return rows

    def _headline(self) -> str:
        at = "final plan" if self.done else f"step {self.step_count} of {self._masks.pruning_steps[-1].step}"
        shares = self.changes[-1].shares if self.changes else {}
        kept = shares_left({name: now for name, (_, now) in shares.items()})
        return f"{at}, {kept}{f', {self._over.partition(chr(58))[0]}' if self._over else ''}"

    def _parts(self) -> Iterator[str | Table]:
        yield self._headline()
        names = list(dict.fromkeys(name for change in self.changes for name in change.shares))
        pruned, regrown = (
            ("weights_pruned", "weights_regrown") if self.settings.channels_stay else ("pruned", "regrown")
        )
        rows = [
            [one.step, getattr(one, pruned), getattr(one, regrown), *(share(one.shares[name][1]) for name in names)]
            for one in self.changes
        ]
        yield Table(
            ["step", "pruned", "came back", *(f"{resource(name)} left" for name in names)],
            rows,
            title="pruning steps so far",
        )

    def _changed(self) -> None:
        if self._averaged is not None:
            self._averaged.update(self.plan, from_zero=self._masks.planner.from_zero)
        if self.done:  # before anything is trained under it
            self.verification = self._verified()
        if self._on_change is not None and is_main():
            self._on_change(self.rows()[-1] | {"sparsity": self.sparsity.weights})

    @main_process_only
    def _verified(self) -> Verification:
        small = compact(self._model, self.plan)
        return verify(self._model, small, self.plan, [self._fitting_example()], strict=True)

    def _fitting_example(self) -> Any:
        """Return the example on the model's device, which a trainer may change once it has trained."""
        return to_device(self._example, next(self._model.parameters()).device)

    def _asked(self) -> str:
        """Return what a state must have in common with the pruner that loads it."""
        stages = [[each.step, each.progress] for each in self._masks.pruning_steps]
        return json.dumps({"channels": self._dense.digest, "stages": stages, "settings": asdict(self.settings)})

    def _require_open(self, what: str) -> None:
        if self._over:
            raise UsageError(f"{what}: this pruner {self._over}")

    def _leave(self, state: str) -> None:
        self._entered.close()
        self._over = state

    def _unfinished(self) -> str:
        """Return why the plan isn't final, and what to do about it."""
        made, last = self.step_count, self._masks.pruning_steps[-1].step
        if not self._steps.told:
            return (
                f"the optimizer made {made} steps, and pruner.step() was never called; call it after optimizer.step()"
            )
        if not self._steps.tried:
            return (
                f"this {type(self._optimizer).__name__} has made no step, so no plan came into force; give the "
                "optimizer whose step() the loop runs"
            )
        if made >= last:
            return "the schedule's last pruning step is due; call pruner.step() after optimizer.step()"
        return (
            f"the optimizer made {made} of the schedule's {last} steps, so the budget isn't met yet; train on, or come "
            "to the final plan now with finish(early=True), or take what has gone so far: "
            "prunekit.compact(model, pruner.plan)"
        )


def _own_optimizer(model: nn.Module, optimizer: Any) -> Optimizer:
    """Return the optimizer inside a wrapper."""
    inner = optimizer_of(model, optimizer)
    own = {id(parameter) for parameter in model.parameters()}
    theirs = [parameter for group in inner.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in theirs if id(parameter) not in own]
    if foreign:
        raise UsageError(
            f"optimizer: expected one of this {type(model).__name__}'s parameters alone, but it has {len(foreign)} "
            f"others, the first of shape {tuple(foreign[0].shape)}; give those an optimizer of their own"
        )
    hooks = inner._optimizer_step_pre_hooks.values()
    if any(isinstance(hook, OwnedHook) and hook.acts_for(StepCounter) for hook in hooks):
        raise UsageError(
            "optimizer: a Pruner counts its steps already; call that one's finish() or close() first, also where a "
            "notebook cell that makes it is run again"
        )
    return inner


def _average_masks(average: Any, model: nn.Module, plan: Plan) -> WeightMasks:
    """Return masks of an average of weights."""
    expected = "average: expected a module of the model's structure with weights of its own, such as an AveragedModel"
    if not isinstance(average, nn.Module):
        raise UsageError(f"{expected}; got {type(average).__name__}")
    inner = unwrapped(average)
    if inner is model:
        raise UsageError(f"{expected}; got the model itself")
    try:
        plan.require_model(inner)
    except PlanError as error:
        raise UsageError(f"{expected}; got {type(inner).__name__}: {error}") from error
    return WeightMasks(inner, plan, changing=True)


def _limits(given: Clamp) -> tuple[float | Mapping[str, float], Any]:
    if not isinstance(given, ClampSettings):
        return given, "value"
    limits = given.limit if given.modules is None else dict.fromkeys(given.modules, given.limit)
    return limits, given.by


def _differing(theirs: str, ours: str) -> str:
    """Return in words how two pruners differ."""
    first, second = json.loads(theirs), json.loads(ours)
    if first["settings"] != second["settings"]:
        pairs = ((key, first["settings"].get(key), value) for key, value in second["settings"].items())
        return "settings (" + ", ".join(f"{key} {was!r}, not {now!r}" for key, was, now in pairs if was != now) + ")"
    return " and ".join(key for key in second if first.get(key) != second[key])
