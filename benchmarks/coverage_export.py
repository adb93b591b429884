"""Exports of a model and of its compact one: whether ONNX Runtime computes what eager does."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from coverage_least import read_by_user
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from zoo_cases import Case

from prunekit.utils.inputs import Keywords, as_example, call, split

TOLERANCE = 1e-4
LONGEST = 160
"""Letters of a reason in the table."""
READ_ALONE = "yes, without state"


class OfOutputs(nn.Module):
    """A model that returns what is read of its outputs, and no state."""

    def __init__(self, model: nn.Module, outputs: Any) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        given = as_example(self.model, (*args, Keywords(kwargs)))
        return tree_leaves(read_by_user(self.model, given, output, self.outputs))


def exports(case: Case, compact: nn.Module, example: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Columns of the dense and of the compact model, each as soon as it is known, with the seconds of the latter."""
    dense = onnx(case.model, example, case.outputs)
    yield {"onnx_dense": dense}
    start = time.perf_counter()
    yield {"onnx_compact": onnx(compact, example, case.outputs), "onnx_seconds": round(time.perf_counter() - start, 1)}


def onnx(model: nn.Module, example: tuple[Any, ...], outputs: Any) -> str:
    """`yes`, where ONNX Runtime agrees with eager to 1e-4 of the largest value; else what is wrong, in short.

    Where the exporter does not take all of a model's outputs, as caches, those that are read are exported alone.
    """
    said = _exported(model.eval(), example)
    if said == "yes":
        return said
    return f"{READ_ALONE}" if _exported(OfOutputs(model, outputs).eval(), example) == "yes" else said


def _exported(model: nn.Module, example: tuple[Any, ...]) -> str:
    try:
        with torch.no_grad(), _silent(), tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            positional, named = split(deepcopy(example))
            torch.onnx.export(model, positional, str(path), kwargs=dict(named), dynamo=True, verbose=False)
            return differing(run_onnx(path, example), call(model, example))
    except Exception as error:  # whatever the exporter, the runtime or the model's code does
        return in_short(error)


def differing(got: list[np.ndarray[Any, Any]], wanted: Any) -> str:
    """`yes`, where what a runtime returns is equal to what eager does; else how far it is off."""
    want = [one.numpy() for one in tree_leaves(wanted) if isinstance(one, Tensor)]
    if len(got) != len(want):
        return f"{len(got)} outputs for {len(want)}"
    worst = 0.0
    for one, other in zip(got, want, strict=True):
        if one.shape != other.shape:
            return f"shape {one.shape} for {other.shape}"
        scale = max(float(np.abs(other).max(initial=0)), 1e-12)
        worst = max(worst, float(np.abs(one.astype(np.float64) - other).max(initial=0)) / scale)
    return "yes" if worst <= TOLERANCE else f"differs by {worst:.2g}"


def in_short(error: BaseException) -> str:
    """The innermost cause of an error, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0]}"[:LONGEST]


def run_onnx(path: Path, example: tuple[Any, ...]) -> list[np.ndarray[Any, Any]]:
    """What ONNX Runtime returns for an example."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    positional, named = split(example)
    tensors = [one for one in tree_leaves((positional, dict(named))) if isinstance(one, Tensor)]
    by_name = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    wanted = [one.name for one in session.get_inputs()]
    order = dict(zip(wanted, tensors, strict=False))
    return list(session.run(None, {name: by_name.get(name, order[name]).numpy() for name in wanted}))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The exporter reports its progress, which is no row of a table."""
    logging.disable(logging.CRITICAL)
    try:
        nothing = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
