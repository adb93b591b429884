"""ncnn: networks for phones and small devices are written by pnnx, opened, and timed on the CPU."""

import json
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunekit.backends.backend import DeviceBackend, Loaded, register_backend
from prunekit.backends.files.export_source import ExportSource, beside, fed, read_beside, require_own_file
from prunekit.backends.files.program import Program, exporting, forward_of_tensors, place_of_node, program_of, tracing
from prunekit.channels.tracing.execution import without_fast_path
from prunekit.errors import ArtifactError, RunError
from prunekit.models.interface import BATCH, ModelInterface
from prunekit.utils.inputs import is_batched, select_samples
from prunekit.utils.private_torch import OpOverload
from prunekit.utils.tensors import gather

BATCHED = re.compile(r'\.input\("(\w+)", .*(?:batch_index=0\b|squeeze\(0\))')
"""The line of pnnx's example for an input whose first axis is the batch: ncnn's tensors have none."""
FOREIGN = re.compile(r"\w+(?:\.|::)\S+")
"""Types of operators that pnnx left as they were in torch; those of ncnn are single words."""
ADVICE = "compute it there with operators that ncnn has, or use another format, such as onnx"


@register_backend(
    format="ncnn",
    runtime="ncnn",
    about="ncnn network, .ncnn.param and .ncnn.bin, for phones and small devices",
    runs="ncnn in float32, sample after sample, on the exported file",
    suffix=".ncnn.param",
    packages=("ncnn", "pnnx"),
    install="pip install 'prunekit[ncnn]'",
)
class Ncnn(DeviceBackend):
    """Networks that pnnx converts from a trace of the model, with a JSON of the interface beside them.

    They take one sample without an axis for the batch, and a batch is run sample after sample.
    """

    loader = "ncnn"

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a network, its weights in `NAME.ncnn.bin` beside it, and its interface in `NAME.ncnn.param.json`."""
        self.require_writable(source, "an ncnn network stores weights")
        self.require_sizes(source, BATCH)
        program = program_of(source, flat=True)
        shapes = [spec.shape for spec in (*program.interface.inputs, *program.interface.outputs)]
        whole = all(isinstance(size, int) for shape in shapes for size in shape[1:])
        if not is_batched(program.example) or len({shape[:1] for shape in shapes}) != 1 or not whole:
            raise RunError(
                f"{type(source.model).__name__} cannot be exported to ncnn, which runs sample after sample: expected "
                "the batch on the first axis of every input and output; use another format, such as onnx"
            )
        with TemporaryDirectory() as folder:
            traced = Path(folder, "model.pt")
            one = select_samples(program.example, slice(1))
            with (
                tracing(),
                without_fast_path(),  # one operator that computes a layer of a transformer
                exporting(source.model, "traced for ncnn", "make it run on one sample, or use another format"),
                forward_of_tensors(source.model, one),
            ):
                torch.jit.trace(source.model, tuple(gather(one)), check_trace=False).save(str(traced))  # type: ignore[no-untyped-call]
            text, batched = _converted(source, program, traced)
            path.write_text(text, encoding="utf-8")
            path.with_suffix(".bin").write_bytes(traced.with_suffix(".ncnn.bin").read_bytes())
        known = {"interface": program.interface.as_dict(), "batched": batched}
        beside(path).write_text(json.dumps(known), encoding="utf-8")
        return [*program.notes, "ncnn takes one sample at a time: a batch is run sample after sample"]

    def code_in(self, path: Path) -> str:
        """Return that a network is not checked by what runs it."""
        return "it is a network of ncnn, whose loader takes the sizes in it on trust"

    def load(self, path: Path, threads: int) -> Loaded:
        """Load a network, which computes in float32 on this number of threads."""
        import ncnn

        interface, batched = self.interface(path), read_beside(path).get("batched")
        require_own_file(path, path.with_suffix(".bin").name, "the file of its weights")
        net = ncnn.Net()
        for name in dir(net.opt):
            if name.startswith(("use_fp16", "use_bf16", "use_int8", "use_vulkan")):
                setattr(net.opt, name, False)
        net.opt.num_threads = threads
        if net.load_param(str(path)) or net.load_model(str(path.with_suffix(".bin"))):
            raise ArtifactError(f"{path}: expected an ncnn network with its weights beside it, but ncnn cannot load it")
        taken = {name: int(name.removeprefix("in")) for name in net.input_names()}

        def feed(example: tuple[Any, ...]) -> list[dict[str, Any]]:
            tensors = [
                one.float() if one.is_floating_point() else one.int() for one in fed(example, interface).values()
            ]

            def one_of(name: str, at: int, sample: int) -> Any:
                part = tensors[at][sample : sample + 1]
                return ncnn.Mat((part[0] if name in batched else part).contiguous().numpy()).clone()

            samples = range(len(tensors[0]))
            return [{name: one_of(name, at, sample) for name, at in taken.items()} for sample in samples]

        def forward(samples: list[dict[str, Any]]) -> list[list[Any]]:
            return [one_forward(mats) for mats in samples]

        def one_forward(mats: dict[str, Any]) -> list[Any]:
            extractor, found = net.create_extractor(), []
            for name, mat in mats.items():
                extractor.input(name, mat)
            for at in range(len(interface.outputs)):
                failed, mat = extractor.extract(f"out{at}")
                if failed:
                    raise RunError(f"it computes no output {interface.outputs[at].name}")
                found.append(mat)
            return found

        def tensors(found: list[list[Any]]) -> list[Tensor]:
            each = zip(interface.outputs, zip(*found, strict=True), strict=True)
            arrays = ((spec, np.stack([np.array(mat) for mat in mats])) for spec, mats in each)
            return [
                torch.from_numpy(array).reshape(len(array), *map(int, spec.shape[1:])).to(getattr(torch, spec.dtype))
                for spec, array in arrays
            ]

        return Loaded(feed, forward, tensors)

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface in the JSON beside a network."""
        return ModelInterface.from_dict(read_beside(path).get("interface"), str(beside(path)))


def _converted(source: ExportSource, program: Program, traced: Path) -> tuple[str, list[str]]:
    """Let pnnx write a network beside a trace; return its text, and the inputs whose first axis is the batch.

    Of what else pnnx writes, an example in Python is read as text and never run.
    """
    import pnnx

    done = subprocess.run([pnnx.EXEC_PATH, str(traced), "fp16=0"], capture_output=True, check=False, cwd=traced.parent)
    called, written = type(source.model).__name__, traced.with_suffix(".ncnn.param")
    if done.returncode or not written.is_file():
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        raise RunError(f"{called} cannot be exported to ncnn: pnnx fails: {said[-1] if said else ''}; {ADVICE}")
    text = written.read_text(encoding="utf-8")
    foreign = [line.split()[0] for line in text.splitlines() if FOREIGN.match(line)]
    if foreign:
        name = min(foreign, key=lambda one: one.startswith("pnnx."))  # parts of others, and nothing of torch
        place = _place_of(name, program)
        raise RunError(
            f"{called} cannot be exported to ncnn, which has no operator {name}"
            + (f", at {place}" if place else "")
            + f"; {ADVICE}"
        )
    example = traced.with_name(f"{traced.stem}_ncnn.py").read_text(encoding="utf-8")
    return text, BATCHED.findall(example)


def _place_of(operator: str, program: Program) -> str:
    """Return the place in a model's code of the first operator of this name, as pnnx has it; empty if none is found."""
    wanted = re.sub(r"^(?:aten::|torch\.|F\.|nn\.|Tensor\.)", "", operator).replace(".", "_")
    for node in program.exported.graph.nodes:
        name = node.target.name() if isinstance(node.target, OpOverload) else ""  # type: ignore[no-untyped-call]
        if name.partition("::")[2].partition(".")[0] == wanted:
            return place_of_node(node)
    return ""
