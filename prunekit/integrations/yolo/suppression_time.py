"""The time of non-maximum suppression, which budgets of time may include."""

from functools import partial

import torch
from torch import Tensor
from ultralytics.engine.model import Model
from ultralytics.utils.nms import non_max_suppression

from prunekit.backends.session import Timer
from prunekit.errors import PlanError, UsageError
from prunekit.jobs.analyses.bench import bench
from prunekit.settings.deployment import Target
from prunekit.utils.context import threads, training_mode

CONFIDENCE, OVERLAP = 0.001, 0.7
"""Thresholds of ultralytics' `val`."""
ROUNDS = 5


def without_suppression(
    yolo: Model, samples: Tensor | None, latency_ms: float | None, speedup: float | None, target: Target
) -> tuple[float | None, float | None, tuple[str, ...]]:
    """Return budgets of time for the model alone, from those for model and suppression together, and a note on both.

    Suppression takes longer the more boxes there are in the images `samples` (B, C, H, W).
    """
    if latency_ms is None and speedup is None:
        raise UsageError("suppression: expected a budget of time with it, speedup=... or latency_ms=...")
    if target.elsewhere:
        raise UsageError(f"suppression: expected a target on this machine, got {target.device!r}; leave it out")
    if samples is None:
        raise UsageError("suppression: expected images as data=, whose boxes are suppressed, got none")
    head = type(yolo.model.model[-1]).__name__
    overlapping = yolo.task in {"detect", "segment", "pose", "obb"} and "RTDETR" not in head
    if not overlapping or getattr(yolo.model.model[-1], "end2end", False):
        raise UsageError(f"suppression: {type(yolo.model).__name__} returns its boxes without one; leave it out")
    batch = samples[: target.batch].repeat(-(-target.batch // len(samples)), 1, 1, 1)[: target.batch]
    alone = suppression_ms(yolo, samples, target)
    said = f"suppression takes {alone:.3g} ms for {target.batch} images, and is no part of the model's time"
    if latency_ms is not None:
        latency_ms = _left_for_model(latency_ms, alone)
    if speedup is not None:
        measured = bench(
            {"dense": yolo.model},
            batch,
            runtimes=target.runtime,
            batch=target.batch,
            threads=target.threads,
            dtypes=target.dtype,
            memory_formats=target.memory_format,
            device=target.device,
        )
        whole = float(measured.latency[0]["median_ms"])
        of_model = whole / _left_for_model((whole + alone) / speedup, alone)
        said += f", {whole:.3g} ms; {of_model:.3g}x of the model alone are {speedup:g}x of both"
        speedup = of_model
    return latency_ms, speedup, (said,)


def suppression_ms(yolo: Model, samples: Tensor, target: Target) -> float:
    """Return the median milliseconds that suppression takes on the predictions for a batch of images."""
    model, times, device = yolo.model, list[float](), torch.device(target.device)
    settings = {"nc": model.model[-1].nc, "multi_label": True, "rotated": yolo.task == "obb"}
    with threads(target.threads), training_mode(model, False), torch.no_grad():
        for start in range(0, min(len(samples), 8 * target.batch), target.batch):
            batch = samples[start : start + target.batch].to(next(model.parameters()).device)
            predicted = model(batch)
            while not isinstance(predicted, Tensor):
                predicted = predicted[0]
            for _ in range(ROUNDS):
                again = predicted.to(device, copy=True)  # it is overwritten
                times.append(Timer(partial(non_max_suppression, again, CONFIDENCE, OVERLAP, **settings), device)())
    return sorted(times)[len(times) // 2]


def _left_for_model(both: float, alone: float) -> float:
    if both <= alone:
        raise PlanError(
            f"suppression alone takes {alone:.3g} ms, and model and suppression together are to take {both:.3g} ms; "
            "ask for less, or raise its confidence threshold where the model runs and leave out suppression=True"
        )
    return both - alone
