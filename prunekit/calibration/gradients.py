"""What the loss would change by, to first and second order, if slices of the weights were gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.calibration.layer_stats import FloatArray
from prunekit.channels.running import plain_attention
from prunekit.context import device_of, gradients_of, taking_gradients, training_mode
from prunekit.errors import NonFiniteError, UsageError
from prunekit.inputs import call, described, moved, running
from prunekit.nested import gather
from prunekit.progress import reporting, tracked
from prunekit.tasks import Pairs, Task, get_task
from prunekit.tasks.batches import Pair
from prunekit.wrappers import unwrapped

Loss = Callable[[Any, Any], Tensor]
"""From what the model returned and the targets to one number, the mean over the batch."""
Axis = tuple[str, int]
"""A parameter's name and one of its axes."""
Factors = Sequence[tuple[Tensor, Tensor | None]]
"""For each parameter two tensors of its shape whose products are summed; None stands for zeros."""


@dataclass(frozen=True, eq=False)
class TaylorTerms:
    """Weight times gradient, summed over everything but one axis: float64 (batches, size) for each axis."""

    terms: Mapping[Axis, FloatArray]
    curvature: Mapping[Axis, FloatArray] | None = None
    """The same of weight times (Hessian times all weights); None where it was not asked for."""
    diagonal: Mapping[Axis, FloatArray] | None = None
    """The same of weight squared times the Hessian's diagonal, estimated without bias."""

    def merge(self, other: TaylorTerms) -> TaylorTerms:
        """Terms of the batches of both; second-order ones where both have them."""
        return TaylorTerms(
            _joined(self.terms, other.terms),
            None if self.curvature is None or other.curvature is None else _joined(self.curvature, other.curvature),
            None if self.diagonal is None or other.diagonal is None else _joined(self.diagonal, other.diagonal),
        )


def _joined(ours: Mapping[Axis, FloatArray], theirs: Mapping[Axis, FloatArray]) -> dict[Axis, FloatArray]:
    return {axis: np.concatenate((rows, theirs[axis])) for axis, rows in ours.items()}


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
    """Taylor terms of every axis of every parameter, batch by batch, in eval mode.

    Batches are kept apart because the square of their sum is not the sum of their squares: `criteria.taylor` needs
    both. Frozen parameters count like the others; those that the loss does not depend on have terms of 0.

    Second derivatives are products of the Hessian H with two vectors, each about as dear as a backward pass: with the
    weights w, and with z * w, z random signs. The mean of z_k w_k (H (z * w))_k is H_kk w_k^2 (Hutchinson 1989; Bekas
    et al. 2007): its noise falls with the number of batches, and with the size of a slice.

    Args:
        model: modes, `requires_grad` and `grad` are afterwards what they were.
        batches: inputs, as `calibrate` takes them, and targets, such as images and labels.
        loss: such as `torch.nn.functional.cross_entropy`, where the model returns its logits; None: the task's.
        device: where the batches go; None: where the model's parameters are.
        second_order: whether to collect `curvature` and `diagonal` too.
        seed: of the random signs.
        dealt: number, from 0, of the first batch and the step to the next, where they are a share of a data set's.
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
    place = device_of(model, device)
    if loss is None and task is None:
        raise UsageError(
            "gradients: expected a loss, such as torch.nn.functional.cross_entropy, or a task; got neither"
        )
    wanted = get_task(task).loss if loss is None and task is not None else loss
    assert wanted is not None
    rows: tuple[dict[Axis, list[FloatArray]], ...] = ({}, {}, {})
    plain = plain_attention() if second_order else nullcontext()  # fused kernels have no second derivative
    shown = reporting(progress, "collect_gradients")
    parameters = {name: weight for name, weight in model.named_parameters() if weight.is_floating_point()}
    weights = list(parameters.values())
    with training_mode(model, False), torch.enable_grad(), plain, shown, taking_gradients(weights, True):
        for index, pair in enumerate(tracked(Pairs(model, batches, task), "gradients")):
            number = 1 + dealt[0] + dealt[1] * index
            _require_targets(pair, number)
            inputs, targets = moved(pair, place)
            with running(model, inputs):
                output = call(model, inputs)
            value = _checked(wanted(output, targets))
            gradients = gradients_of(value, weights, create_graph=second_order)
            found: list[Factors] = [list(zip(weights, gradients, strict=True))]
            if second_order:
                signs = torch.Generator().manual_seed(int(np.random.default_rng((seed, number)).integers(2**63)))
                found += curvature_factors(weights, gradients, signs)  # drawn for the batch, whoever looks at it
            for kind, factors in zip(rows, found, strict=False):
                _add(kind, parameters, factors, number)
    if not rows[0]:
        raise UsageError("no batch was given: gradients need inputs with targets, such as images with labels")
    terms, *second = ({axis: np.stack(sums) for axis, sums in kind.items()} for kind in rows)
    return TaylorTerms(terms, *second) if second_order else TaylorTerms(terms)


def _require_targets(pair: Pair, number: int) -> None:
    inputs, targets = pair
    if targets is None or not gather(targets):
        shown = described(inputs[0] if len(inputs) == 1 else inputs)
        came = "alone" if targets is None else f"and {described(targets)}"
        raise UsageError(
            f"batch {number}: expected inputs and the targets that the loss needs, got {shown} {came}; without targets "
            "score by a criterion that needs none: `prunekit list criteria` shows them"
        )


def _add(rows: dict[Axis, list[FloatArray]], names: Iterable[str], factors: Factors, batch: int) -> None:
    for name, (weight, gradient) in zip(names, factors, strict=True):
        for axis, sums in enumerate(_sums(weight, gradient)):
            _require_finite(sums, name, batch)
            rows.setdefault((name, axis), []).append(sums)


def _checked(loss: Tensor) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise UsageError(f"loss: expected one number that depends on the model's parameters, got {shown}")


def _sums(weight: Tensor, gradient: Tensor | None) -> Iterator[FloatArray]:
    """Weight times gradient summed over all axes but one, (size,), for each axis."""
    if gradient is None:
        yield from (np.zeros(size) for size in weight.shape)
    else:
        wide = torch.float32 if weight.device.type == "mps" else torch.float64
        yield from (sums.cpu().double().numpy() for sums in axis_sums(weight, gradient, wide))


def axis_sums(weight: Tensor, gradient: Tensor, wide: torch.dtype) -> Iterator[Tensor]:
    """Weight times gradient summed in a type over all axes but one, (size,), for each axis."""
    rest = weight.detach() * gradient.detach()
    for _ in weight.shape:
        yield rest.unsqueeze(-1).flatten(1).sum(1, dtype=wide)
        rest = rest.sum(0, dtype=wide)  # what is left for the axes behind is small


def _require_finite(sums: FloatArray, name: str, batch: int) -> None:
    if not np.isfinite(sums).all():
        raise NonFiniteError(
            f"the gradient of parameter {name!r} times its weight is NaN or Inf in batch {batch}; check the images, "
            "the weights and the loss"
        )


def curvature_factors(
    weights: Sequence[Tensor], gradients: Sequence[Tensor | None], draw: torch.Generator
) -> list[Factors]:
    """Vectors and the Hessian times them: the weights, and the weights with random signs.

    Args:
        gradients: of the loss for each weight, with a graph; None where the loss does not depend on it.
        draw: of the signs, on the CPU.

    Raises:
        UsageError: an operator has no second derivative.
    """
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
        raise UsageError(
            f"second_order: an operator of the model has no second derivative ({str(error).splitlines()[0]}); score by "
            "'taylor', which needs none"
        ) from error
