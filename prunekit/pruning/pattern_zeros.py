"""Zeros among single weights: by size or from samples in one call, and step by step in a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.errors import ArtifactError
from prunekit.hooks.step_hooks import StepHook, unscaled
from prunekit.masks.masked_model import ChangingMasks
from prunekit.masks.scheduled_masks import Planner
from prunekit.planning.candidates import Scores
from prunekit.planning.patterns.gradual_masks import StepWeights, masks_at_step, share_at
from prunekit.planning.patterns.pattern import PatternLayer, PatternLayers, pattern_layers
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import ScheduleStep
from prunekit.pruning.schedule_planner import ChannelPlanner, share_step
from prunekit.repair.patterns.prune_weights import PrunedWeights, prune_weights
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.pruning import PruneSettings, ScheduleSettings
from prunekit.settings.weight_pattern import PatternSettings
from prunekit.statistics.layer_graph import LayerGraph, find_layer_graph
from prunekit.utils.context import training_mode
from prunekit.utils.inputs import inputs_as_example


@torch.no_grad()
def zeros_by_size(
    model: nn.Module, plan: Plan, example: tuple[Any, ...], settings: PatternSettings
) -> tuple[Plan, PatternLayers]:
    """Return a plan with masks of the smallest weights, and which layers have zeros."""
    layers = _layers(model, plan, example, settings)
    tensors, weights = dict(model.named_parameters()), list[StepWeights]()
    for layer in layers.layers:
        size = layer.matrix(tensors[layer.weight].detach()).double().square()
        weights.append(StepWeights(layer, size, size, torch.ones_like(size, dtype=torch.bool)))
        weights[-1].require_finite()
    masks = masks_at_step(layers, weights, settings, "oneshot", ScheduleStep(0, 1.0))
    return replace(plan, element_masks={**plan.element_masks, **layers.element_masks(plan, masks)}), layers


def _layers(model: nn.Module, plan: Plan, example: tuple[Any, ...], settings: PatternSettings) -> PatternLayers:
    """Return the layers of a model that get zeros, see `pattern_layers`."""
    with training_mode(model, False):
        return pattern_layers(find_layer_graph(model, example, plan.channel_map.norms), plan, settings)


def zeros_from_samples(
    model: nn.Module,
    plan: Plan,
    samples: Any,
    settings: PatternSettings,
    repair: RepairSettings | None,
    *,
    log: Callable[[str], None],
) -> PrunedWeights:
    """Return the masked model of `prune_weights`, fitted to the dense one unless `repair` is None."""
    inputs = inputs_as_example(model, samples)
    return prune_weights(model, plan, inputs, settings, repair, fitted=repair is not None, log=log, progress=False)


RESOURCE = "weights"
"""Name of what a pattern leaves, beside the budgets of channels: weights of convolutions and linear layers."""


def schedule_planner(
    settings: PruneSettings, channels: ChannelPlanner, model: nn.Module, example: tuple[Any, ...], plan: Plan
) -> ChannelPlanner | PatternPlanner:
    """Return the planner of a schedule: that of its channels, or one with the pattern of zeros in what they leave."""
    if settings.pattern is None:
        return channels
    with training_mode(model, False), torch.no_grad():
        graph = find_layer_graph(model, example, plan.channel_map.norms)
    pattern_layers(graph, plan, settings.pattern)
    return PatternPlanner(settings, channels, graph)


class WeightGradients(StepHook):
    """A reader of single weights' gradients before each step: how the weights move, or where the loss would gain."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, masks: ChangingMasks, names: frozenset[str], *, movement: bool
    ) -> None:
        super().__init__(optimizer)
        self._model, self._masks, self._names, self._movement = model, masks, sorted(names), movement
        self.wanted = False  # whether the next step's gradients are kept, those of masked weights too
        # the sums of -w * dL/dw over the steps; of masked weights, of the values behind them with the gradients of the
        # zeros in their place (Sanh et al. 2020, straight-through). Empty unless `movement`.
        self.moved = dict[str, Tensor]()
        self.last = dict[str, Tensor]()  # the gradients that were kept
        self._behind: dict[str, Tensor] | None = None

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Read the gradients, and mask those that were spared for it."""
        for name in self._names:
            weight = self._model.get_parameter(name)
            if weight.grad is None:
                continue
            if self._movement:
                moved = unscaled(optimizer, -(self._value(name, weight) * weight.grad).float())
                self.moved[name] = self.moved[name].add_(moved) if name in self.moved else moved
            elif self.wanted:
                self.last[name] = unscaled(optimizer, weight.grad).clone()
        if self.wanted:
            self._masks.mask_gradients()

    def _value(self, name: str, weight: Tensor) -> Tensor:
        if not self.wanted:
            return weight
        if self._behind is None:  # the same until the next pruning step
            found = {one: self._masks.held.whole(one) for one in self._names}
            self._behind = {one: values for one, values in found.items() if values is not None}
        return weight + self._behind[name] if name in self._behind else weight

    def begin_step(self) -> None:
        """Forget what belongs to the masks before."""
        self.last.clear()
        self._behind = None

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return movement and gradients so far."""
        return {
            "moved": {name: values.clone() for name, values in self.moved.items()},
            "last": {name: values.clone() for name, values in self.last.items()},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `state_dict` returned."""
        parameters = dict(self._model.named_parameters())
        for key, found in (("moved", self.moved), ("last", self.last)):
            found.clear()
            for name, values in state[key].items():
                if name not in parameters or values.shape != parameters[name].shape:
                    raise ArtifactError(f"gradients of single weights: {name} is of another model")
                found[name] = values.to(parameters[name].device)
        self._behind = None


class PatternPlanner(Planner):
    """The plans of a schedule with a pattern: first the channels of a step, then zeros in what they leave.

    Weights are scored by their size as they are then, or by movement. See `masks_at_step` for how many of them are
    zero, and which come back.
    """

    def __init__(self, settings: PruneSettings, channels: ChannelPlanner, graph: LayerGraph) -> None:
        assert settings.schedule is not None
        assert settings.pattern is not None
        self._schedule: ScheduleSettings = settings.schedule
        self._pattern, self._channels, self._graph = settings.pattern, channels, graph
        self._moves = self._schedule.score == "movement"
        self._learns = self._schedule.gradients == "straight_through"
        self._by_gradient = self._schedule.regrow and not self._moves and not self._learns
        self.from_zero = self._by_gradient
        self._gradients: WeightGradients | None = None

    @property
    def scores(self) -> Scores:
        """Scores of the channels, at the last pruning step."""
        return self._channels.scores

    @property
    def final(self) -> dict[str, float]:
        """The share that is left of each resource at the end, of single weights among what the channels leave."""
        return {**self._channels.final, RESOURCE: 1 - self._pattern.zeros}

    @contextmanager
    def active(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Collect what the channels need, and gradients of single weights."""
        names = frozenset(layer.weight for layer in self._graph.layers)
        with self._channels.active(model, optimizer):
            if not (self._moves or self._by_gradient):
                yield
                return
            with WeightGradients(model, optimizer, self.masks, names, movement=self._moves) as self._gradients:
                yield

    def reads_gradients(self, step: int, due: ScheduleStep) -> bool:
        """Return whether masked weights may come back by the gradients, and the plan changes after the next step."""
        wanted = self._schedule.regrow and (self._moves or (self._by_gradient and step + 1 >= due.step))
        if self._gradients is not None:
            self._gradients.wanted = wanted
        return wanted

    def plan(self, model: nn.Module, step: ScheduleStep, before: Plan) -> Plan:
        """Return the plan of a pruning step: its channels, and masks of single weights in what they leave."""
        plan = self._channels.plan(model, step, before)
        made = share_step(lambda: self._with_masks(model, step, plan, before), plan)
        if self._gradients is not None:
            self._gradients.begin_step()
        return made

    @torch.no_grad()
    def _with_masks(self, model: nn.Module, step: ScheduleStep, plan: Plan, before: Plan) -> Plan:
        layers = pattern_layers(self._graph, plan, self._pattern, unfinished=step.progress < 1)
        weights = [self._weights(model, layer, before) for layer in layers.layers]
        masks = masks_at_step(layers, weights, self._pattern, self._schedule.kind, step)
        return replace(plan, element_masks=layers.element_masks(plan, masks))

    def _weights(self, model: nn.Module, layer: PatternLayer, before: Plan) -> StepWeights:
        weight = model.get_parameter(layer.weight).detach()
        behind = self.masks.held.whole(layer.weight) if self._learns else None
        size = _matrix(layer, weight if behind is None else weight + behind).square()
        mask = before.element_masks.get(layer.weight)
        alive = torch.ones_like(size, dtype=torch.bool) if mask is None else layer.matrix(mask)
        read = self._gradients
        gradient = read.last.get(layer.weight) if read is not None and self._by_gradient else None
        score = size
        if self._moves:
            moved = None if read is None else read.moved.get(layer.weight)
            score = torch.zeros_like(size) if moved is None else _matrix(layer, moved)
        return StepWeights(
            layer,
            size,
            score,
            alive,
            returning=self._learns or (self._moves and self._schedule.regrow),
            gradient=None if gradient is None else _matrix(layer, gradient).square(),
        )

    def shares(self, step: ScheduleStep, plan: Plan) -> dict[str, tuple[float, float]]:
        """Return the shares of the channels' budgets, and of weights, that a pruning step aims to leave, and leaves."""
        planned = 1 - share_at(self._schedule.kind, step, self._pattern.zeros)
        size = pattern_layers(self._graph, plan, self._pattern, unfinished=True).size
        zeros = sum(mask.numel() - int(mask.sum()) for mask in plan.element_masks.values())
        return {**self._channels.shares(step, plan), RESOURCE: (planned, 1 - zeros / size)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the channels' planner, movement, and gradients."""
        read = self._gradients
        return {
            "channels": self._channels.state_dict(),
            "single_weights": {"moved": {}, "last": {}} if read is None else read.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._channels.load_state_dict(state["channels"])
        if self._gradients is not None:
            self._gradients.load_state_dict(state["single_weights"])


def _matrix(layer: PatternLayer, values: Tensor) -> Tensor:
    """Return a layer's kept entries of a tensor in the weight's shape, (o, i, t) on the CPU, in at least float32."""
    found = layer.matrix(values).cpu()
    return found if found.dtype == torch.float64 else found.float()
