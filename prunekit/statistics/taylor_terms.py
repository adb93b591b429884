"""Taylor terms: how the loss would change, to first and second order, without slices of the weights.

They come from a loss on labeled batches, or from the gradients of the optimizer's steps in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.channels.tracing.execution import plain_attention
from prunekit.errors import NonFiniteError, UsageError, reraise_shortage
from prunekit.hooks.model_copy import has_gradients
from prunekit.hooks.step_hooks import StepHook, by_axis, unscaled
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.modes.public_call import public_call
from prunekit.statistics.layer_stats import FloatArray
from prunekit.tasks.batches import InputsAndTargets, ModelBatches
from prunekit.tasks.task import Loss, Task, get_task
from prunekit.utils.context import device_of, gradients_of, taking_gradients, training_mode
from prunekit.utils.inputs import call, described, running, to_device
from prunekit.utils.progress import reporting, tracked
from prunekit.utils.tensors import accumulation_dtype, as_real, gather

Axis = tuple[str, int]
"""A parameter's name and one of its axes."""
Factors = Sequence[tuple[Tensor, Tensor | None]]
"""For each parameter two tensors of its shape whose products are summed; None stands for zeros."""


@dataclass(frozen=True, eq=False)
class TaylorTerms:
    """Weight times gradient, summed over all axes but one: float64 (batches, size) for each axis."""

    terms: Mapping[Axis, FloatArray]
    curvature: Mapping[Axis, FloatArray] | None = None
    """The same of weight times (Hessian times all weights); None if it was not collected."""
    diagonal: Mapping[Axis, FloatArray] | None = None
    """The same of weight squared times the Hessian's diagonal, estimated without bias."""

    def merge(self, other: TaylorTerms) -> TaylorTerms:
        """Return the terms of the batches of both; second-order ones where both have them."""
        return TaylorTerms(
            _joined(self.terms, other.terms),
            None if self.curvature is None or other.curvature is None else _joined(self.curvature, other.curvature),
            None if self.diagonal is None or other.diagonal is None else _joined(self.diagonal, other.diagonal),
        )


def _joined(ours: Mapping[Axis, FloatArray], theirs: Mapping[Axis, FloatArray]) -> dict[Axis, FloatArray]:
    return {axis: np.concatenate((rows, theirs[axis])) for axis, rows in ours.items()}


@public_call
def collect_gradients(
    model: nn.Module,
    batches: Any,
    loss: Loss | None = None,
    *,
    device: torch.device | str | None = None,
    second_order: bool = False,
    seed: int = 0,
    dealt: tuple[int, int] = (0, 1),
    task: Task | str | None = None,
    progress: bool | None = None,
) -> TaylorTerms:
    """Return Taylor terms of every axis of every parameter, batch by batch, in eval mode.

    Batches are kept apart because the square of their sum is not the sum of their squares: `criteria.taylor` needs
    both. Frozen parameters count like the others; those that the loss does not depend on have terms of 0.

    Second derivatives are products of the Hessian H with two vectors, each about as costly as a backward pass: with the
    weights w, and with z * w, z random signs. The mean of z_k w_k (H (z * w))_k is H_kk w_k^2 (Hutchinson 1989; Bekas
    et al. 2007): its noise falls with the number of batches, and with the size of a slice.

    Args:
        model: modes, `requires_grad` and `grad` are afterwards what they were.
        batches: inputs, as `calibrate` takes them, and targets, such as images and labels.
        loss: such as `torch.nn.functional.cross_entropy`, where the model returns its logits; None: the task's.
        device: where the batches go; None: where the model's parameters are.
        second_order: whether to collect `curvature` and `diagonal` too.
        seed: of the random signs.
        dealt: number, from 0, of the first batch and the step to the next, if they are a share of a data set's.
        task: takes batches apart that come in another form; itself or its name.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Raises:
        UsageError: there are no batches, one has no targets, neither loss nor task is given, or the loss is not one
            number with a gradient; or an operator of the model has no second derivative.
        NonFiniteError: a gradient or a weight is NaN or Inf; names the parameter and the batch.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(3)]
        >>> gradients = pk.collect_gradients(model, batches, torch.nn.functional.cross_entropy)
        >>> small = pk.prune(model, torch.randn(1, 4), macs=0.5, criterion="taylor", gradients=gradients).model
        >>> small[0].out_features
        8
    """
    model = unwrapped(model, offloaded=True)
    require_trainable(model, "collect_gradients")
    place = device_of(model, device)
    if loss is None and task is None:
        raise UsageError(
            "gradients: expected a loss, such as torch.nn.functional.cross_entropy, or a task; got neither"
        )
    known = None if task is None else get_task(task)
    wanted = known.loss if loss is None and known is not None else loss
    assert wanted is not None
    mode = training_mode(model, False) if known is None else known.mode_for_loss(model)
    rows: tuple[dict[Axis, list[FloatArray]], ...] = ({}, {}, {})
    plain = plain_attention() if second_order else nullcontext()  # fused kernels have no second derivative
    report = reporting(progress, "collect_gradients")
    # Second derivatives of complex weights have four parts.
    wanted_kind = torch.Tensor.is_floating_point if second_order else has_gradients
    parameters = {name: weight for name, weight in model.named_parameters() if wanted_kind(weight)}
    weights = list(parameters.values())
    with mode, torch.enable_grad(), plain, report, taking_gradients(weights):
        for index, pair in enumerate(tracked(ModelBatches(model, batches, task), "gradients")):
            number = 1 + dealt[0] + dealt[1] * index
            _require_targets(pair, number)
            inputs, targets = to_device(pair, place)
            given = inputs if known is None else known.example_for_loss(model, inputs, targets)
            with running(model, given):
                output = call(model, given)
            value = _checked(wanted(output, targets))
            gradients = gradients_of(value, weights, create_graph=second_order)
            found: list[Factors] = [list(zip(weights, gradients, strict=True))]
            if second_order:
                signs = torch.Generator().manual_seed(int(np.random.default_rng((seed, number)).integers(2**63)))
                found += curvature_factors(weights, gradients, signs)  # the same for a batch on any process
            for kind, factors in zip(rows, found, strict=False):
                _add(kind, parameters, factors, number)
    if not rows[0]:
        raise UsageError("no batch was given: gradients need inputs with targets, such as images with labels")
    terms, *second = ({axis: np.stack(sums) for axis, sums in kind.items()} for kind in rows)
    return TaylorTerms(terms, *second) if second_order else TaylorTerms(terms)


def _require_targets(pair: InputsAndTargets, number: int) -> None:
    inputs, targets = pair
    if targets is None or not gather(targets):
        given = described(inputs[0] if len(inputs) == 1 else inputs)
        rest = "alone" if targets is None else f"and {described(targets)}"
        raise UsageError(
            f"batch {number}: expected inputs and the targets that the loss needs, got {given} {rest}; without targets "
            "score by a criterion that needs none: `prunekit list criteria` shows them"
        )


def _add(rows: dict[Axis, list[FloatArray]], names: Iterable[str], factors: Factors, batch: int) -> None:
    """Add weight times gradient, summed over all axes but one, for each axis of each parameter."""
    for name, (weight, gradient) in zip(names, factors, strict=True):
        wide = accumulation_dtype(weight.device)
        parts = map(torch.zeros, weight.shape) if gradient is None else axis_sums(weight, gradient, wide)
        for axis, values in enumerate(parts):
            sums = values.cpu().double().numpy()
            if not np.isfinite(sums).all():
                raise NonFiniteError(
                    f"the gradient of parameter {name!r} times its weight is NaN or Inf in batch {batch}; check the "
                    "images, the weights and the loss"
                )
            rows.setdefault((name, axis), []).append(sums)


def _checked(loss: Tensor) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise UsageError(f"loss: expected one number that depends on the model's parameters, got {found}")


def axis_sums(weight: Tensor, gradient: Tensor, wide: torch.dtype) -> Iterator[Tensor]:
    """Yield weight times gradient summed in a type over all axes but one, (size,), for each axis."""
    rest = as_real(weight.detach()) * as_real(gradient.detach())
    for _ in weight.shape:
        yield rest.unsqueeze(-1).flatten(1).sum(1, dtype=wide)
        rest = rest.sum(0, dtype=wide)  # little is left for the axes behind


def curvature_factors(
    weights: Sequence[Tensor], gradients: Sequence[Tensor | None], draw: torch.Generator
) -> list[Factors]:
    """Return vectors and the Hessian times them: the weights, and the weights with random signs."""
    plain = [weight.detach() for weight in weights]
    signed = [weight * (2 * torch.randint(0, 2, weight.shape, generator=draw) - 1).to(weight) for weight in plain]
    return [list(zip(each, _hessian_times(each, weights, gradients), strict=True)) for each in (plain, signed)]


def _hessian_times(
    vectors: Sequence[Tensor], weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    curved = [(g, v) for g, v in zip(gradients, vectors, strict=True) if g is not None and g.requires_grad]
    if not curved:  # the loss is linear in every weight
        return [None] * len(weights)
    outputs, directions = zip(*curved, strict=True)
    try:
        return torch.autograd.grad(outputs, weights, directions, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        reraise_shortage(error)
        raise UsageError(
            f"second_order: an operator of the model has no second derivative ({str(error).splitlines()[0]}); score by "
            "'taylor', which needs none"
        ) from error


STEPS = 64
"""The most steps whose terms are stored; of more, as many evenly spread ones."""


class StepGradients(StepHook):
    """Stores weight times gradient of an optimizer's steps, as a context manager.

    Each step counts as one batch of `collect_gradients`: the gradient is that of all its micro-batches and processes,
    clipped where the loop clips it before the step, and without the loss scale. Of more than `STEPS` steps every
    second one is left out, and so on, so that memory stays bounded and the terms cover the whole time since `terms` was
    last called. Frozen parameters have no gradient and count as 0; axes without free labels are left out.
    """

    def __init__(self, model: nn.Module, channel_map: ChannelMap, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._model, self._map = model, channel_map
        self._axes = {
            name: [axis for axis, labels in enumerate(axes) if labels is not None and labels.any()]
            for name, axes in channel_map.labels.items()
        }
        self._rows: list[dict[Axis, Tensor]] = []
        self._steps, self._stride, self._used = 0, 1, False

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Add the terms of a step."""
        if self._used:  # a plan was made from the terms so far
            self._rows, self._steps, self._stride, self._used = [], 0, 1, False
        self._steps += 1
        if (self._steps - 1) % self._stride:
            return
        if len(self._rows) == STEPS:
            self._rows, self._stride = self._rows[::2], 2 * self._stride
            if (self._steps - 1) % self._stride:
                return
        row: dict[Axis, Tensor] = {}
        for name, weight in self._model.named_parameters():
            if weight.grad is not None and (axes := self._axes.get(name)):
                gradient = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
                sums = axis_sums(weight, gradient, torch.float32)  # half the time of float64
                found = enumerate(islice(sums, axes[-1] + 1))
                row |= {(name, axis): unscaled(optimizer, each) for axis, each in found if axis in axes}
        self._rows.append(row)

    def terms(self) -> TaylorTerms:
        """Return the terms since the last call; the same again if no step was made since."""
        if not self._rows:
            raise UsageError(
                "expected at least one optimizer step before channels are scored by its gradients, got none; let the "
                "schedule begin later: begin=1 or more"
            )
        self._used = True
        stacked = {axis: values.cpu().double().numpy() for axis, values in self._stacked().items()}
        self._require_gradients({name for name, _ in stacked})
        for (name, _), values in stacked.items():
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"the gradient of parameter {name!r} times its weight was NaN or Inf in a step; check the loss, "
                    "the data and the learning rate"
                )
        rows = len(self._rows)
        shapes = self._map.shapes
        wanted = {(name, axis): shapes[name][axis] for name, axes in self._axes.items() for axis in axes}
        return TaylorTerms({key: stacked.get(key, np.zeros((rows, size))) for key, size in wanted.items()})

    def _stacked(self) -> dict[Axis, Tensor]:
        """Return the terms (steps, size) of each axis that had a gradient in any step."""
        like = {axis: values for row in self._rows for axis, values in row.items()}
        return {
            axis: torch.stack([row.get(axis, torch.zeros_like(values)) for row in self._rows])
            for axis, values in like.items()
        }

    def _require_gradients(self, names: set[str]) -> None:
        for group in self._map.groups:
            if not any(name in names for name, _ in group.slots):
                raise UsageError(
                    f"no parameter on which the channels of group {group.name!r} lie had a gradient since the last "
                    "stage; train them, leave them whole with ignore=, or score by a criterion of weights, such as "
                    "'l2'"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the terms by parameter and axis, {"name:axis": (steps, size)}, and the count of the steps."""
        return {
            "rows": {f"{name}:{axis}": values for (name, axis), values in self._stacked().items()},
            "kept": len(self._rows),
            "steps": self._steps,
            "stride": self._stride,
            "used": self._used,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        stacked = by_axis(state["rows"], self._model, "gradients of steps")
        self._rows = [{axis: values[at] for axis, values in stacked.items()} for at in range(int(state["kept"]))]
        self._steps, self._stride = int(state["steps"]), int(state["stride"])
        self._used = bool(state["used"])
