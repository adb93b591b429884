"""One model through all of it: traced, planned at half of the channels, tried, compacted, trained, saved and loaded."""

from __future__ import annotations

import io
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from coverage_export import exports
from coverage_least import Least, least_left
from coverage_reasons import Stops
from torch import nn
from zoo_cases import OWN, Case, Check, randomize

import prunekit
from prunekit.channels.float64 import TOLERANCE
from prunekit.errors import PrunekitError
from prunekit.planning.plan import Plan
from prunekit.utils.inputs import as_example, call
from prunekit.utils.tensors import gather

BEYOND = 0.05
"""How much more of its inner weights a model may keep than halving every width would, as a share of that."""


def check(case: Case, *, export: bool = True) -> Iterator[dict[str, Any]]:
    """The row of a model: what it passed, how far pruning reaches, and what stops it; then what exports say."""
    randomize(case.model)
    example = as_example(case.model, case.inputs(1))
    start = time.perf_counter()
    try:
        pruned = prunekit.prune(case.model, example, channels=0.5, **case.wanted)
    except Exception as error:  # the engine failed: a row of the table, not the end of it
        yield failed(where_from(error))
        return
    row: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 2)}
    try:
        least = least_left(deepcopy(case.model), example, case.outputs)
    except Exception as error:  # of the measure itself
        yield failed(f"least: {where_from(error)}", row)
        return
    row |= _figures(pruned, least, [name for name, _ in case.model.named_parameters()])
    uses = _said_of_each({"pickles": _pickles}, case, pruned, example)  # before anything else runs either
    problems = [*_equality(case, pruned, example), *_running(case, pruned.model), *_folder(case, pruned, example)]
    uses |= _said_of_each(case.checks, case, pruned, example)
    problems += [f"{use}: {what}" for use, what in uses.items() if what != "yes" and not what.startswith(OWN)]
    reasons = [] if row["beyond"] <= BEYOND else Stops(pruned.plan.channel_map, pruned.plan.keep, least).sentences()
    verdict = "failed" if problems else "partly" if reasons else "passed"
    yield {"passed": verdict == "passed", "verdict": verdict, **row, **uses, "reason": "; ".join([*problems, *reasons])}
    if export and not problems:
        yield from exports(case, pruned.model, example)
        yield _said_of_each(case.exports, case, pruned, example)


def failed(reason: str, row: dict[str, Any] | None = None) -> dict[str, Any]:
    """The row of a model that did not get through."""
    return {"passed": False, "verdict": "failed", **(row or {}), "reason": reason}


def where_from(error: Exception) -> str:
    """An error with the line that raised it; our own say it themselves."""
    text = f"{type(error).__name__}: {([line for line in str(error).splitlines() if line] or [''])[0]}"
    if isinstance(error, PrunekitError):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno})"


def said(checked: Any) -> str:
    """What a check says, or the error that it raised."""
    try:
        return str(checked())
    except Exception as error:  # whatever the model's code does
        return where_from(error)


def _said_of_each(checks: Mapping[str, Check], case: Case, pruned: Any, example: tuple[Any, ...]) -> dict[str, str]:
    """What some checks say, by their columns."""
    return {column: said(partial(one, case, pruned, example)) for column, one in checks.items()}


def _figures(pruned: Any, least: Least, names: list[str]) -> dict[str, Any]:
    """How far pruning reaches."""
    plan: Plan = pruned.plan
    chart = plan.channel_map
    kept = {name: chart.parameters_kept(plan.keep, [name]) for name in least.widths}
    beyond = sum(max(0, kept[name] - least.widths[name]) for name in kept)
    return {
        "max_relative_difference": pruned.max_relative_difference,
        "weights_left": round(sum(kept.values()) / max(least.entries, 1), 4),
        "least": round(least.share, 4),
        "beyond": round(beyond / max(least.left, 1), 4),
        "free_parameter_share": round(chart.free_share(names), 5),
        "macs_left": round(chart.macs(plan.keep) / max(chart.macs(), 1), 4),
    }


def _equality(case: Case, pruned: Any, example: tuple[Any, ...]) -> Iterator[str]:
    """Masked == compact, in float64, from the outside."""
    if pruned.max_relative_difference > TOLERANCE:
        yield f"masked and compact differ by {pruned.max_relative_difference:.3g} in the trial"
    try:
        with prunekit.masked(case.model, pruned.plan, restore=True) as masked:
            prunekit.verify(masked, pruned.model, pruned.plan, [example], **case.wanted)
    except Exception as error:  # whatever the model's code does
        yield f"verify: {where_from(error)}"


def _running(case: Case, compact: nn.Module) -> Iterator[str]:
    """Forward and backward in both modes; a failure that the dense model shares is the model's own."""
    inputs = as_example(case.model, case.inputs(2))
    for training in (False, True):
        mode = "train" if training else "eval"
        problem = _forward_backward(compact, inputs, training)
        if problem and not _forward_backward(case.model, inputs, training):
            yield f"{mode} mode: {problem}"


def _forward_backward(model: nn.Module, inputs: tuple[Any, ...], training: bool) -> str:
    model.train(training)
    try:
        output = call(model, inputs)
        losses = [tensor.float().square().mean() for tensor in gather(output) if tensor.requires_grad]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the model's code does
        return where_from(error)
    finally:
        model.zero_grad()
        model.eval()
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
        equal = _equal(compact, loaded, example)
    except Exception as error:  # a folder that cannot be written or read is a row of the table
        yield f"folder: {where_from(error)}".replace(folder + "/", "")
        return
    if differing:
        yield f"folder: {differing[0]} of the loaded model differs"
    if not equal:
        yield "folder: the loaded model computes something else"


def _pickles(case: Case, pruned: Any, example: tuple[Any, ...]) -> str:
    """Whether the whole compact model comes back from `torch.save`, equal bit for bit in what it computes."""
    compact = said(partial(_comes_back, pruned.model, example))
    dense = compact if compact == "yes" else said(partial(_comes_back, case.model, example))
    return compact if dense == "yes" else f"{OWN}: {dense}"


def _comes_back(model: nn.Module, example: tuple[Any, ...]) -> str:
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    twin = torch.load(memory, weights_only=False)
    return "yes" if _equal(model.eval(), twin.eval(), example) else "computes something else"


def _equal(left: nn.Module, right: nn.Module, example: tuple[Any, ...]) -> bool:
    with torch.no_grad():
        want, got = (gather(_seeded(model, example)) for model in (left, right))
    return len(want) == len(got) and all(map(_same, want, got))


def _seeded(model: nn.Module, example: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    return call(model, example)


def _same(left: Any, right: Any) -> bool:
    return not isinstance(left, torch.Tensor) or torch.equal(left.nan_to_num(), right.nan_to_num())
