"""ONNX Runtime on the CPU.

Models as ONNX files, for the runtimes that take these.

Which module an operator of an ONNX file belongs to, and what runtimes made of these operators.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.cut.model_copy import copied
from prunekit.export.onnx import export_onnx
from prunekit.measure.runtimes.runtime import register_runtime
from prunekit.measure.runtimes.session import FileKey, Inputs, LayerClock, Sample, Session, Setting, Source, in_dtype
from prunekit.utils.tensors import gather


def exported(model: nn.Module, inputs: Inputs, keys: Iterable[FileKey], folder: Path) -> Source:
    """Return a model as ONNX files, for each batch and dtype, in a folder that is made where it is not there.

    Raises:
        RunError: the exporter cannot follow the model.
    """
    folder.mkdir(exist_ok=True)
    with torch.inference_mode(False), torch.no_grad():  # export traces, which needs version counters
        return Source(files={key: _file(model, inputs, *key, folder) for key in sorted(set(keys))})


def _file(model: nn.Module, inputs: Inputs, batch: int, dtype: str, folder: Path) -> Path:
    sample, path = inputs.sample(batch), folder / f"{batch}-{dtype}.onnx"
    if dtype == "float32":
        return export_onnx(model, sample, path)
    kind: torch.dtype = getattr(torch, dtype)
    return export_onnx(copied(model, dtype=kind), in_dtype(sample, kind), path)


SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata by torch's exporter: the paths of the modules around a node, from the root on, and its own name."""
RULES = "pkg.onnxscript.rewriter.rule_name"
"""Metadata by the exporter's optimizer: by which rules it made a node of others."""
NORM_FUSED = "FuseBatchNormInto"
"""Begins the rules whose result is named for the norm, and reads the weight of the layer before it."""
RENAMED = re.compile(r"(?:fused )?(?P<name>.+?)(?:_nchwc(?:_token_\d+)?|/.*)?")
"""How runtimes name what they make of a node: by its name, or that of its result, and what was done."""


class Places:
    """The modules of an ONNX file that torch's exporter wrote.

    Attributes:
        of_nodes: name of each node -> path of the innermost module; "" is the model's own code.
    """

    def __init__(self, file: Path) -> None:
        import onnx

        graph = onnx.load(file, load_external_data=False).graph
        self._made_by = {output: node for node in graph.node for output in node.output}
        self._nodes = {node.name: node for node in graph.node}
        found = {node.name: _place(node) for node in graph.node}
        self.of_nodes: Mapping[str, str] = {name: place for name, place in found.items() if place is not None}

    def of(self, name: str, *, convolution: bool = False) -> str | None:
        """Return the module of an operator by its name in a runtime; None for one that the runtime has added.

        Args:
            convolution: whether the operator convolves: one fused with its activation may be named for the latter.
        """
        match = RENAMED.fullmatch(name)
        assert match is not None
        node = self._nodes.get(match["name"]) or self._made_by.get(match["name"])
        if convolution and node is not None and node.op_type != "Conv" and node.input:
            before = self._made_by.get(node.input[0])
            node = before if before is not None and before.op_type == "Conv" else node
        return None if node is None else self.of_nodes.get(node.name)


def _place(node: Any) -> str | None:
    known = {entry.key: entry.value for entry in node.metadata_props}
    if NORM_FUSED in known.get(RULES, ""):
        return str(node.input[1]).rpartition(".")[0]
    if SCOPES not in known:
        return None
    *modules, _ = ast.literal_eval(known[SCOPES])
    return str(modules[-1]) if modules else ""


KERNEL, FORWARD = "_kernel_time", "model_run"
"""How the profiler names the time of a node, and that of all of them, which it writes after them."""
CUT_OFF_US = 0.5
"""The profiler cuts off fractions of microseconds."""


def _refuse(setting: Setting) -> str:
    if setting.dtype != "float32":
        return f"its CPU kernels compute in float32, and {setting.dtype} models run on casts"
    return "" if setting.memory_format == "contiguous" else "it chooses layouts itself"


@register_runtime(
    "onnxruntime",
    about="ONNX Runtime's CPU provider, on the exported file",
    carrier="onnx",
    devices=("cpu",),
    packages=("onnx", "onnxscript", "onnxruntime"),
    install="pip install 'prunekit[export]'",
    refuse=_refuse,
    times_layers=True,
)
def onnx_runtime(source: Source, sample: Sample, setting: Setting) -> Session:
    """Open a session that has one pool of `threads` threads."""
    import onnxruntime

    file = source.files[setting.batch, "float32"]
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(one.numpy()) for one in gather(sample)]
    run = _run_of(open_session(file, setting.threads), values)
    return Session(
        run, lambda found: [_tensor(value) for value in found], lambda: _layers(file, values, setting.threads)
    )


def _run_of(session: Any, values: Sequence[Any]) -> Callable[[], Any]:
    names = [output.name for output in session.get_outputs()]
    feed = {entry.name: value for entry, value in zip(session.get_inputs(), values, strict=True)}
    return lambda: session.run_with_ort_values(names, feed)


def _layers(file: Path, values: Sequence[Any], threads: int) -> LayerClock:
    """Return the profiler of ONNX Runtime, in a session of its own; it writes a file beside the model's."""
    session, places = open_session(file, threads, profile=file.with_suffix(".profile")), Places(file)

    def passes(count: int) -> list[dict[str | None, float]]:
        written = Path(session.end_profiling())
        events = json.loads(written.read_text(encoding="utf-8"))
        written.unlink()
        return by_module(events, places)[-count:]

    return LayerClock(_run_of(session, values), passes)


def by_module(events: Sequence[Mapping[str, Any]], places: Places) -> list[dict[str | None, float]]:
    """Return the milliseconds of each forward by module, from what the profiler wrote, in its order."""
    found: list[dict[str | None, float]] = []
    times: dict[str | None, float] = defaultdict(float)
    for event in events:
        if event["name"].endswith(KERNEL):
            kind = event["args"]["op_name"].removeprefix("Fused")
            place = places.of(event["name"].removesuffix(KERNEL), convolution=kind == "Conv")
            times[place] += (event["dur"] + CUT_OFF_US) / 1000
        elif event["name"] == FORWARD:
            found.append(dict(times))
            times.clear()
    return found


def open_session(file: Path, threads: int, profile: Path | None = None) -> Any:
    """Return a session on the CPU with this many threads; with its profiler on where it is told how its file's name
    begins.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    # Models take turns in one process: the threads of one must not spin while another is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(value.numpy().copy())
