"""One model through all of it: traced, planned at half of the channels, tried, compacted, trained, saved and loaded."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from coverage_reasons import costly, held
from torch import nn
from zoo_cases import Case, randomize

import prunekit
from prunekit.channels.channel_map import ChannelMap
from prunekit.channels.labels import MacTerm
from prunekit.channels.trial.tolerance import TOLERANCE
from prunekit.errors import PrunekitError
from prunekit.utils.tensors import gather

FREE_PARAMETERS = 0.95
MACS_LEFT = 0.32


def check(case: Case) -> dict[str, Any]:
    """The row of a model: what it passed, how far pruning reaches, and what stops it."""
    randomize(case.model)
    example = case.inputs(1)
    start = time.perf_counter()
    try:
        pruned = prunekit.prune(case.model, example, channels=0.5)
    except Exception as error:  # the engine failed: a row of the table, not the end of it
        return failed(where_from(error))
    row: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 2)}
    chart, plan = pruned.plan.channel_map, pruned.plan
    row |= {
        "max_relative_difference": pruned.max_relative_difference,
        "free_parameter_share": round(chart.free_share([name for name, _ in case.model.named_parameters()]), 5),
        "free_macs_share": round(_free_macs(chart), 5),
        "macs_left": round(chart.macs(plan.keep) / max(chart.macs(), 1), 4),
    }
    problems = [*_equality(case, pruned, example), *_running(case, pruned.model), *_folder(case, pruned, example)]
    if problems:
        return failed("; ".join(problems), row)
    reasons = []
    if row["macs_left"] > MACS_LEFT:
        reasons.append("MACs beyond a quarter: " + ", ".join(costly(chart, plan.keep)))
    if row["free_parameter_share"] < FREE_PARAMETERS:
        reasons.append("parameters: " + ", ".join(held(chart)))
    return {"passed": not reasons, "verdict": "partly" if reasons else "passed", **row, "reason": "; ".join(reasons)}


def failed(reason: str, row: dict[str, Any] | None = None) -> dict[str, Any]:
    """The row of a model that did not get through."""
    return {"passed": False, "verdict": "failed", **(row or {}), "reason": reason}


def where_from(error: Exception) -> str:
    """An error with the line that raised it; our own say it themselves."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if isinstance(error, PrunekitError):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno})"


def _free_macs(chart: ChannelMap) -> float:
    """Share of the multiply-accumulates that lie on at least one free axis."""

    def locked(term: MacTerm) -> float:
        share = [float(np.count_nonzero(factor == 0)) / factor.size for factor in term.factors]
        return term.constant * float(np.prod([factor.size for factor in term.factors])) * float(np.prod(share))

    return 1 - sum(map(locked, chart.mac_terms)) / max(chart.macs(), 1)


def _equality(case: Case, pruned: Any, example: tuple[Any, ...]) -> Iterator[str]:
    """Masked == compact, in float64, from the outside."""
    if pruned.max_relative_difference > TOLERANCE:
        yield f"masked and compact differ by {pruned.max_relative_difference:.3g} in the trial"
    try:
        with prunekit.masked(case.model, pruned.plan, restore=True) as masked:
            prunekit.verify(masked, pruned.model, pruned.plan, [example])
    except Exception as error:  # whatever the model's code does
        yield f"verify: {where_from(error)}"


def _running(case: Case, compact: nn.Module) -> Iterator[str]:
    """Forward and backward in both modes; a failure that the dense model shares is the model's own."""
    inputs = case.inputs(2)
    for training in (False, True):
        mode = "train" if training else "eval"
        problem = _forward_backward(compact, inputs, training)
        if problem and not _forward_backward(case.model, inputs, training):
            yield f"{mode} mode: {problem}"


def _forward_backward(model: nn.Module, inputs: tuple[Any, ...], training: bool) -> str:
    model.train(training)
    try:
        output = model(*inputs)
        losses = [tensor.float().square().mean() for tensor in gather(output) if tensor.requires_grad]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the model's code does
        return where_from(error)
    finally:
        model.zero_grad()
    return ""


def _folder(case: Case, pruned: Any, example: tuple[Any, ...]) -> Iterator[str]:
    """Saved and loaded again, equal bit for bit in what it holds and in what it computes."""
    compact, folder = pruned.model.eval(), ""
    try:
        with tempfile.TemporaryDirectory() as folder:
            prunekit.save(compact, Path(folder) / "model", pruned.plan)
            loaded = prunekit.load(Path(folder) / "model", case.model)
        differing = [
            name for name, value in compact.state_dict().items() if not _same(value, loaded.state_dict()[name])
        ]
        with torch.no_grad():
            want, got = (gather(_seeded(model, example)) for model in (compact, loaded))
    except Exception as error:  # a folder that cannot be written or read is a row of the table
        yield f"folder: {where_from(error)}".replace(folder + "/", "")
        return
    if differing:
        yield f"folder: {differing[0]} of the loaded model differs"
    if len(want) != len(got) or not all(map(_same, want, got)):
        yield "folder: the loaded model computes something else"


def _seeded(model: nn.Module, example: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    return model(*example)


def _same(left: Any, right: Any) -> bool:
    return not isinstance(left, torch.Tensor) or torch.equal(left.nan_to_num(), right.nan_to_num())
