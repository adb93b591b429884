"""What is done with models in PyTorch: copied, pickled, saved, traced, scripted, compiled, exported, run in parallel.

A use takes a model in eval mode and a `Sample`; it returns `yes`, `yes` with what is missing, or what is wrong, or it
raises. Whatever comes out has to compute what the model does.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from coverage_export import OfOutputs
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import prunekit
from prunekit.errors import PrunekitError
from prunekit.utils.inputs import as_example, call, concatenate, is_batched, split
from prunekit.utils.tensors import gather

TOLERANCE = 1e-4
HALF_TOLERANCE = 0.3
"""What bfloat16 may be off by, which leaves 8 bits to each number; what is wrong is off by more than all of it."""
FOR_ONE = ", for one batch size"
ALONE = ", of what is read alone"


@dataclass(frozen=True)
class Sample:
    """Inputs of a model, in eval mode, and what is read of its outputs.

    Attributes:
        first: of two samples.
        second: other values of the same shapes.
        more: of three samples.
        training: two samples as they are in training, with targets where the model computes its own losses.
        outputs: as `prunekit.prune` takes it.
    """

    first: tuple[Any, ...]
    second: tuple[Any, ...]
    more: tuple[Any, ...]
    training: tuple[Any, ...]
    outputs: Any


Use = Callable[[nn.Module, Sample], str]


def sample_of(model: nn.Module, inputs: Callable[[int], Any], outputs: Any) -> Sample:
    """Samples of a zoo's inputs; detectors read no targets in eval mode."""
    first, second, more = (as_example(model, inputs(count)) for count in (2, 2, 3))
    return Sample(*map(_without_targets, (first, second, more)), first, outputs)


def _without_targets(example: tuple[Any, ...]) -> tuple[Any, ...]:
    targets = len(example) == 2 and isinstance(example[1], list) and all("boxes" in one for one in example[1])
    return example[:1] if targets else example


def _run(model: Callable[..., Any], example: tuple[Any, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return gather(call(model, copy.deepcopy(example)))


def equal(model: nn.Module, other: Callable[..., Any], example: tuple[Any, ...]) -> str:
    """`yes` where both compute the same, bit for bit."""
    want, got = _run(model, example), _run(other, example)
    same = len(want) == len(got) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(want, got, strict=True)
    )
    return "yes" if same else "computes something else"


def close(model: nn.Module, other: Callable[..., Any], example: tuple[Any, ...], most: float = TOLERANCE) -> str:
    """`yes` where both compute the same, up to the order of sums."""
    want, got = _run(model, example), _run(other, example)
    if len(want) != len(got):
        return f"{len(got)} outputs for {len(want)}"
    worst = 0.0
    for a, b in zip(want, got, strict=True):
        if a.shape != b.shape:
            return f"shape {tuple(b.shape)} for {tuple(a.shape)}"
        if a.numel():
            a, b = a.to(torch.complex128).nan_to_num(), b.to(torch.complex128).nan_to_num()
            worst = max(worst, float((a - b).abs().max()) / max(float(a.abs().max()), 1e-12))
    return "yes" if worst <= most else f"differs by {worst:.2g}"


def copies(model: nn.Module, sample: Sample) -> str:
    """`copy.deepcopy`: the same, with tensors of its own."""
    twin = copy.deepcopy(model)
    own = {one.data_ptr() for one in model.state_dict().values() if one.numel()}
    if any(one.data_ptr() in own for one in twin.state_dict().values() if one.numel()):
        return "shares tensors"
    return equal(model, twin, sample.first)


def pickles(model: nn.Module, sample: Sample) -> str:
    """`pickle.dumps` of the whole model."""
    return equal(model, pickle.loads(pickle.dumps(model)), sample.first)


def saves(model: nn.Module, sample: Sample) -> str:
    """`torch.save` of the whole model."""
    return equal(model, _from_file(model, weights_only=False), sample.first)


def saves_state(model: nn.Module, sample: Sample) -> str:
    """`torch.save` of the state dict, read with `weights_only` into a copy whose weights are others."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in twin.state_dict().values():
            if tensor.is_floating_point():
                tensor.fill_(0.5)
    twin.load_state_dict(_from_file(model.state_dict(), weights_only=True))
    return equal(model, twin, sample.first)


def _from_file(value: Any, *, weights_only: bool) -> Any:
    memory = io.BytesIO()
    torch.save(value, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=weights_only)


def in_half(model: nn.Module, sample: Sample) -> str:
    """A copy in bfloat16, with inputs in it."""
    twin = copy.deepcopy(model).to(torch.bfloat16)
    inputs = tree_map(
        lambda one: one.bfloat16() if isinstance(one, Tensor) and one.is_floating_point() else one, sample.first
    )
    found = _run(twin, inputs)
    return "yes" if all(bool(one.isfinite().all()) for one in found) else "not finite"


def autocast(model: nn.Module, sample: Sample) -> str:
    """A forward pass under `torch.autocast` in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        found = _run(model, sample.first)
    return "yes" if all(bool(one.isfinite().all()) for one in found) else "not finite"


def _alone_too(use: Callable[[nn.Module, Sample], str]) -> Use:
    """The use of the model, or else of one that returns what is read of its outputs, as a list of tensors."""

    def tried(model: nn.Module, sample: Sample) -> str:
        try:
            said = use(model, sample)
            if said.startswith("yes"):
                return said
        except Exception as error:  # whatever the model's code does
            with contextlib.suppress(Exception):
                said = use(OfOutputs(model, sample.outputs).eval(), sample)
                if said.startswith("yes"):
                    return f"{said}{ALONE}"
            raise error
        return said

    return tried


def _traced(model: nn.Module, sample: Sample) -> str:
    positional, named = split(copy.deepcopy(sample.first))
    given: dict[str, Any] = {"example_kwarg_inputs": dict(named)} if named else {"example_inputs": positional}
    with torch.no_grad(), quiet():
        traced = torch.jit.trace(model, strict=False, check_trace=False, **given)
        memory = io.BytesIO()
        torch.jit.save(traced, memory)
        memory.seek(0)
        traced = torch.jit.load(memory)
        said = close(model, traced, sample.second)
    return said


def scripts(model: nn.Module, sample: Sample) -> str:
    """`torch.jit.script`, which compiles the source of the model's Python."""
    with quiet():
        scripted = torch.jit.script(model)
        return close(model, scripted, sample.second)


def fx_traces(model: nn.Module, sample: Sample) -> str:
    """`torch.fx.symbolic_trace`, by which torchvision extracts features and quantizes."""
    return close(model, torch.fx.symbolic_trace(model), sample.second)


def compiles(model: nn.Module, sample: Sample) -> str:
    """`torch.compile` with `backend="eager"`, which follows the model's Python; in one graph, or in several."""
    graphs = 0

    def counting(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    torch._dynamo.reset()
    with quiet():
        said = close(model, torch.compile(model, backend=counting), sample.first)
    torch._dynamo.reset()
    return said if said != "yes" or graphs == 1 else f"yes, in {graphs} graphs"


def compiles_training(model: nn.Module, sample: Sample) -> str:
    """`torch.compile` with `backend="aot_eager"` in training: gradients are those of the model itself."""
    torch._dynamo.reset()
    with quiet():
        want = _gradients(model, model, sample.training)
        got = _gradients(model, torch.compile(model, backend="aot_eager"), sample.training)
    torch._dynamo.reset()
    return _same_gradients(want, got)


def _gradients(model: nn.Module, run: Callable[..., Any], example: tuple[Any, ...]) -> dict[str, Tensor | None]:
    """Gradients of each parameter, of a mean over all outputs; buffers are put back."""
    state = {name: one.clone() for name, one in model.named_buffers()}
    model.train()
    try:
        for part in model.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.eval()
        torch.manual_seed(0)
        output = call(run, copy.deepcopy(example))
        losses = [one.float().square().mean() for one in gather(output) if one.requires_grad]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        return {name: one.grad for name, one in model.named_parameters()}
    finally:
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            for name, one in model.named_buffers():
                one.copy_(state[name])


def _same_gradients(want: dict[str, Tensor | None], got: dict[str, Tensor | None]) -> str:
    scale = max((float(one.abs().max()) for one in want.values() if one is not None and one.numel()), default=1.0)
    for name, one in want.items():
        other = got[name]
        if one is None and (other is None or not other.any()):
            continue
        if one is None or other is None or float((one - other).abs().max()) > 1e-3 * max(scale, 1e-12):
            return f"other gradients at {name}"
    return "yes"


def _exported(model: nn.Module, sample: Sample) -> str:
    """A program for any batch, else for one; saved and loaded."""
    try:
        said = _program(model, sample, dynamic=True)
        if said.startswith("yes"):
            return said
    except Exception:  # whatever the model's code does
        pass
    said = _program(model, sample, dynamic=False)
    return f"{said}{FOR_ONE}" if said == "yes" else said


def _program(model: nn.Module, sample: Sample, *, dynamic: bool) -> str:
    positional, named = split(copy.deepcopy(sample.first))
    shapes = None
    if dynamic:
        any_size = torch.export.Dim.DYNAMIC
        spec = tree_map(lambda one: {0: any_size} if isinstance(one, Tensor) and one.dim() and len(one) == 2 else None,
                        (positional, dict(named)))  # fmt: skip
        shapes = {"args": spec[0], "kwargs": spec[1]} if isinstance(model, OfOutputs) else (*spec[0], *spec[1].values())
    with torch.no_grad(), quiet():
        program = torch.export.export(model, positional, dict(named), dynamic_shapes=shapes)
        memory = io.BytesIO()
        torch.export.save(program, memory)
        memory.seek(0)
        run = torch.export.load(memory).module()
        return close(model, run, sample.more if dynamic else sample.second)


def exports_strictly(model: nn.Module, sample: Sample) -> str:
    """`torch.export.export(strict=True)`, which follows the Python by dynamo."""
    positional, named = split(copy.deepcopy(sample.first))
    torch._dynamo.reset()
    with torch.no_grad(), quiet():
        program = torch.export.export(model, positional, dict(named), strict=True)
        said = close(model, program.module(), sample.second)
    torch._dynamo.reset()
    return said


def distributed(model: nn.Module, sample: Sample) -> str:
    """`DistributedDataParallel` on gloo in one process: gradients are those of the model itself, and a step is made."""
    group = torch.distributed
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    try:
        twin = copy.deepcopy(model).eval()
        unused = any(one is None for one in _gradients(model, model, sample.training).values())
        parallel = nn.parallel.DistributedDataParallel(twin, find_unused_parameters=unused)
        with quiet():
            said = _same_gradients(
                _gradients(model, model, sample.training), _gradients(twin, parallel, sample.training)
            )
        if said == "yes":
            torch.optim.SGD(parallel.parameters(), lr=1e-3).step()
            parallel(*copy.deepcopy(split(sample.first)[0]), **copy.deepcopy(split(sample.first)[1]))
        return said
    finally:
        group.destroy_process_group()


def replicates(model: nn.Module, sample: Sample) -> str:
    """`nn.DataParallel`: around the model, and the copies without parameters that it makes of each module."""
    said = equal(model, nn.DataParallel(model), sample.first)
    for part in model.modules():
        twin = part._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        if (
            type(twin) is not type(part)
            or vars(twin).keys() - {"_former_parameters", "_is_replica"} != vars(part).keys()
        ):
            return f"replica of {type(part).__name__} is another"
    return said


def exports_to_onnx(model: nn.Module, sample: Sample) -> str:
    """`prunekit.export`: ONNX for any batch, else for one; ONNX Runtime agrees with eager to 1e-4."""
    samples = _joined(sample.first, sample.more)
    with tempfile.TemporaryDirectory() as folder:
        path, quietly = Path(folder) / "model.onnx", {"timed": (), "log": lambda line: None}
        try:
            prunekit.export(model, samples, to="onnx", path=path, **quietly)
        except PrunekitError as error:
            with contextlib.suppress(PrunekitError):
                prunekit.export(model, sample.first, to="onnx", path=path, batch=2, **quietly)
                return f"yes{FOR_ONE}"
            raise error
    return "yes"


def _joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    """Samples of both, where they are on the first axis of every tensor; else the first."""
    return concatenate([first, second]) if is_batched(first) else first


USES: dict[str, Use] = {
    "deepcopy": copies,
    "pickle": pickles,
    "torch.save": saves,
    "state_dict": saves_state,
    "bfloat16": in_half,
    "autocast": autocast,
    "DataParallel": replicates,
    "DDP": distributed,
    "fx": fx_traces,
    "jit.trace": _alone_too(_traced),
    "jit.script": scripts,
    "compile": compiles,
    "compile in training": compiles_training,
    "export": _alone_too(_exported),
    "strict export": _alone_too(exports_strictly),
    "ONNX": _alone_too(exports_to_onnx),
}
"""By the column of the table."""
FOR_BOTH = frozenset({"deepcopy", "pickle", "torch.save", "state_dict", "jit.trace"})
"""Uses that are tried on the compact model and on the one from its folder; others on the one from its folder."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Tracers and exporters report their progress, which is no row of a table."""
    logging.disable(logging.CRITICAL)
    try:
        nothing = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
