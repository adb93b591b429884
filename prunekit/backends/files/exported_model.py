"""Exported files as models: a module that runs a file in its own runtime, fed as its interface says."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.backends.files.export_source import Run, beside
from prunekit.errors import ArtifactError, UsageError
from prunekit.known_names import FORMATS, is_export_name
from prunekit.models.interface import ModelInterface
from prunekit.utils.inputs import Keywords, concatenate, is_batched, sample_count, select_samples, to_device
from prunekit.utils.tensors import gather, map_tensors


class NamedOutputs(dict[str, Tensor]):
    """Outputs by name, each an attribute too, such as `.logits`."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def formats_of(path: Path) -> list[str]:
    """Return the names of the formats whose files end most like this path; none for a folder or another file."""
    suffixes = {name: str(facts.get("suffix", "")) for name, facts in FORMATS.facts().items()}
    fitting = {name: suffix for name, suffix in suffixes.items() if suffix and path.name.endswith(suffix)}
    longest = max(map(len, fitting.values()), default=0)  # .aoti.pt2 is no .pt2
    return [name for name, suffix in fitting.items() if len(suffix) == longest]


def is_exported(path: Path) -> bool:
    """Return whether a path is a file of a format of exports."""
    return is_export_name(path.name) and not path.is_dir()


def open_exported(path: Path, *, allow_code: bool = False) -> ExportedModel:
    """Return the model in an exported file; its runtime loads it when it is first run.

    With `allow_code`, a file may be loaded though it could run code: a program that calls more than operators which
    compute tensors, or a compiled one.

    Raises:
        UsageError: what its format needs is not installed.
        ArtifactError: it is missing or damaged, or could run code when its interface is read.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: expected an exported file, and there is none")
    problems = []
    for name in formats_of(path):
        form = FORMATS.get(name)
        if missing := form.missing():
            raise UsageError(f"{path}: {name} {missing}")
        try:
            if form.runs_for_interface and not allow_code:
                form.require_no_code(path)
            return ExportedModel(path, name, form.interface(path), allow_code=allow_code)
        except ArtifactError as error:
            problems.append(error)
    raise problems[0] if problems else ArtifactError(f"{path}: expected a file of {', '.join(FORMATS.names)}")


class ExportedModel(nn.Module):
    """A model in an exported file. It has no parameters, computes on the CPU, and cannot be trained.

    It takes the inputs of its interface by position or name, and returns its output: a tensor if there is one, else
    `NamedOutputs`, or a tuple if they are only numbered. A file with a fixed batch gets batches of that size, the last
    one filled up.
    """

    def __init__(
        self,
        path: Path,
        form: str,  # name of its format
        interface: ModelInterface,
        opened: Run | None = None,  # what runs the file, if it was opened already
        *,
        allow_code: bool = False,  # whether the file may be opened though it could run code
    ) -> None:
        super().__init__()
        self.path, self.form, self.interface = path, form, interface
        self.opened, self.allow_code = opened, allow_code

    def extra_repr(self) -> str:
        """Return what the module shows of itself."""
        return f"{self.path}, {self.form}"

    @property
    def file_bytes(self) -> int:
        """Bytes of the file and of those beside it that begin with its name, or its name without the suffix."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def files(self) -> list[Path]:
        """The file, and those beside it that belong to it: weights of OpenVINO, ncnn and ONNX, and an interface."""
        weights = [self.path.with_suffix(".bin")] if self.path.suffix in (".xml", ".param") else []
        others = [*weights, self.path.with_name(f"{self.path.name}.data"), beside(self.path)]
        return [self.path, *(file for file in others if file.is_file())]

    @property
    def fixed_batch(self) -> int | None:
        """The only number of samples that the file takes; None if it takes any."""
        first = next((spec.shape[0] for spec in self.interface.inputs if spec.shape), None)
        return first if isinstance(first, int) else None

    def run(self, threads: int | None = None) -> Run:
        """Return the function that runs the file; None: with as many threads as torch has."""
        if self.opened is not None:
            return self.opened
        state = self.path.stat()
        known = (state.st_mtime_ns, state.st_size)
        return _opened(str(self.path), self.form, known, threads or torch.get_num_threads(), self.allow_code)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of a batch, on the device of its inputs."""
        example = (*inputs, Keywords(named)) if named else inputs
        device = next((tensor.device for tensor in gather(example)), torch.device("cpu"))
        example, count, fixed = to_device(example, torch.device("cpu")), sample_count(example), self.fixed_batch
        example = map_tensors(example, lambda tensor: tensor.detach())
        run, most = self.run(), FORMATS.get(self.form).most_samples
        if fixed is not None and count != fixed:
            # the last sample is repeated past the end
            some = (torch.arange(at, at + fixed).clamp(max=count - 1) for at in range(0, count, fixed))
            parts = [tuple(run(select_samples(example, chosen))) for chosen in some]
            outputs = [one[:count] for one in concatenate(parts)]
        elif fixed is None and most is not None and count > most and is_batched(example):
            parts = [tuple(run(select_samples(example, slice(at, at + most)))) for at in range(0, count, most)]
            outputs = [*concatenate(parts)]
        else:
            outputs = run(example)
        tensors = [tensor.to(device) for tensor in outputs]
        names = [spec.name for spec in self.interface.outputs]
        if len(tensors) == 1 and names[0].startswith("output"):
            return tensors[0]
        numbered = names == [f"output_{at}" for at in range(len(names))]
        return tuple(tensors) if numbered else NamedOutputs(zip(names, tensors, strict=True))


@lru_cache(maxsize=8)
def _opened(path: str, form: str, state: tuple[int, int], threads: int, allow_code: bool) -> Run:
    backend = FORMATS.get(form)
    run: Run = (backend.open_trusted if allow_code else backend.open)(Path(path), threads=threads)
    return run
