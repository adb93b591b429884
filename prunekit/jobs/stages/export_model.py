"""Exports: a model in the format of another runtime, checked against the model before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.backends.backend import FORMATS
from prunekit.backends.files.export_source import ExportOptions, ExportSource, Run
from prunekit.backends.files.exported_model import ExportedModel
from prunekit.backends.folders.model_card import RUN, run_facts
from prunekit.backends.standalone import BUILD
from prunekit.compaction.zero_patterns import exported_zeros_notes, zero_patterns
from prunekit.data.datasets import SampleDataset
from prunekit.data.loader import Batches, batches
from prunekit.errors import ModelError, UsageError, nearest, reason_of, reraise_shortage
from prunekit.hooks.model_copy import copied, named_tensors, with_tensors
from prunekit.hooks.wrappers import unwrapped
from prunekit.jobs.run.command_subject import Subject
from prunekit.measure.accuracy import Scores, evaluate
from prunekit.measure.latency.timing import PairedTiming, time_paired
from prunekit.measure.verification import Parity, check_export
from prunekit.models.interface import ModelInterface, TensorSpec, interface_of, with_batch
from prunekit.settings.deployment import QuantizeSettings
from prunekit.utils.context import on_device, set_mode
from prunekit.utils.context import threads as with_threads
from prunekit.utils.display import Displayed, Table, digits, factor, in_unit, interval, scientific, share, size
from prunekit.utils.files import folder_beside, replace_folder, require_writable, set_permissions
from prunekit.utils.inputs import call, inputs_as_example, is_batched, sample_count, select_samples
from prunekit.utils.progress import Log
from prunekit.utils.tensors import map_tensors

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False, repr=False)
class Exported(Displayed):
    """An exported model: a file or folder that was checked against the model.

    Attributes:
        path: of the file or folder.
        format: its name.
        size_bytes: of the file, or of all files of the folder.
        parities: how far outputs differ from the model's, for each batch that was compared.
        real_inputs: whether these were samples of data, and not random numbers.
        scores: of the file itself on the test data; None without data.
        latency: for each batch size, milliseconds of the model in eager and of the file, timed alternately.
        interface: inputs, outputs, task, classes and preprocessing.
        notes: what to know.
        quantized: figures of the quantization of an int8 file: the layers in float with the reasons, what each layer
            costs, scores on validation data before and after, and its speedup over the file in float and the dense
            model's (`over`); None for files in float.
        int8: the quantized file that was written beside this one; None without.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).eval()
        >>> found = pk.export(model, torch.randn(8, 4), to="pt2", path="small.pt2", log=lambda line: None)
        >>> found
        <Exported: small.pt2 (pt2, ... differs from eager by ...>
        >>> [parity.batch for parity in found.parities]
        [2, 5]
    """

    path: Path
    format: str
    size_bytes: int
    parities: tuple[Parity, ...]
    real_inputs: bool
    scores: Scores | None
    latency: tuple[tuple[int, PairedTiming], ...]
    interface: ModelInterface
    notes: tuple[str, ...] = ()
    quantized: Mapping[str, Any] | None = None
    int8: Exported | None = None

    def figures(self) -> dict[str, Any]:
        """Return the export as plain data."""
        return {
            "path": str(self.path),
            "format": self.format,
            "size_bytes": self.size_bytes,
            "max_relative_difference": self.max_relative_difference,
            "parities": self.rows(),
            "real_inputs": self.real_inputs,
            "scores": None if self.scores is None else self.scores.figures(),
            "latency": self.latency_rows(),
            "interface": self.interface.as_dict(),
            "notes": list(self.notes),
            "quantized": None if self.quantized is None else dict(self.quantized),
        }

    @property
    def max_relative_difference(self) -> float:
        """The largest of all batches."""
        return max((parity.max_relative_difference for parity in self.parities), default=0.0)

    def latency_rows(self) -> list[dict[str, Any]]:
        """Return milliseconds of the model in eager and of the file, and their ratio, for each batch size."""
        return [latency_row(batch, timed, "eager") for batch, timed in self.latency]

    def rows(self) -> list[dict[str, Any]]:
        """Return the differences, one row for each batch that was compared."""
        return [asdict(parity) for parity in self.parities]

    @property
    def agreement(self) -> str:
        """The agreement with the model, in words."""
        if self.quantized is not None:
            return f"int8, output error {share(self.quantized['error'])} on calibration data"
        return f"differs from eager by {scientific(self.max_relative_difference)}"

    def _headline(self) -> str:
        return f"{self.path} ({self.format}, {size(self.size_bytes)}), {self.agreement}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Exported: {self._headline()}"
        if self.parities:
            on = f"outputs on {'real inputs' if self.real_inputs else 'random inputs, as there is no data'}"
            rows = [(one.inputs, scientific(one.max_relative_difference)) for one in self.parities]
            yield Table((on, "relative difference"), rows, text=(on,))
        if self.scores is not None:
            (name, value), *_ = self.scores.values.items()
            ends = "" if self.scores.interval is None else " " + interval(*self.scores.interval)
            reached = in_unit(value, self.scores.unit)
            yield f"{name} of the file itself: {reached}{ends} of {self.scores.n_test} test samples"
        if self.latency:
            times = [(batch, digits(one.now_ms), digits(one.other_ms), one.gain.factor) for batch, one in self.latency]
            yield Table(("batch", "eager ms", "file ms", "speedup"), times, text=("speedup",))
        if self.quantized is not None:
            yield from self._quantized_parts(self.quantized)
        yield "\n".join(
            [f"takes {one}" for one in self.interface.inputs]
            + [f"returns {one}" for one in self.interface.outputs]
            + list(self.notes)
        )
        if self.int8 is not None:
            yield str(self.int8)

    def _quantized_parts(self, found: Mapping[str, Any]) -> Iterator[str | Table]:
        """Yield what int8 costs and gains."""
        if found["drop"] is not None:
            said = "%" if self.scores is None else self.scores.unit
            whole, rounded = (in_unit(found[key], said) for key in ("float_score", "score"))
            lost = in_unit(found["drop"], "points" if said == "%" else said)
            yield f"on validation data {whole} in float, {rounded} in int8: {lost} lost"
        floats = [(name or "the model's own code", reason) for name, reason in found["float_layers"].items()]
        if floats:
            yield Table(("in float", "reason"), floats, text=("reason",))
        over = [
            (f"the {row['over']} file", row["batch"], factor(row["median"]), interval(row["low"], row["high"]))
            for row in found["speedup"]
        ]
        if over:
            yield Table(("speed over", "batch", "speedup", "95 % interval"), over, text=("95 % interval",))


@dataclass(frozen=True)
class ExportRequest:
    """A request for an export."""

    to: str = "onnx"  # name of the format
    path: Path | None = None  # of the file or folder; None: named after the model, in the working directory
    options: ExportOptions = field(default_factory=ExportOptions)  # of the format
    # axes of any size besides the batch: `image` (height and width), `sequence`, or `INPUT:AXIS`
    dynamic: tuple[str, ...] = ()
    batch: int | None = None  # the only batch size that the export takes; None: any
    force: bool = False  # whether an existing file or folder is replaced
    timed: tuple[int, ...] = (1, 16)  # batch sizes to time beside eager; empty: none
    threads: int = 1  # of the CPU, for timing
    quantize: QuantizeSettings | None = None  # how the file is quantized after it was checked; None: not
    scored: bool = True  # whether files are scored on the test data


def require_exportable(request: ExportRequest, name: str) -> Path:
    """Return the path of an export, and raise for what is wrong with the request before anything is computed."""
    kind = FORMATS.get(request.to)
    if missing := kind.unusable():
        raise UsageError(f"export to {kind.format} {missing}")
    path = request.path or Path(f"{Path(name).resolve().name if name else 'model'}{kind.suffix}")
    if not path.name.endswith(kind.suffix):
        better = f"{path.name.partition('.')[0]}{kind.suffix}"
        raise UsageError(f"{path}: expected a name with {kind.suffix} for {kind.format}, such as {better}")
    for made in (path, *([] if request.quantize is None else [int8_path(path)])):
        if made.exists() and not request.force:
            raise UsageError(f"{made}: exists already; name another path, or replace it with --force (force=True)")
    if path.exists() and path.is_dir() == bool(kind.suffix):
        there = "folder" if path.is_dir() else "file"
        raise UsageError(f"{path}: a {there} of this name is there, which would be lost; choose another name")
    require_writable(path)
    return path


def int8_path(path: Path) -> Path:
    """Return the path of the quantized file beside a file."""
    return path.with_name(f"{path.stem}-int8{path.suffix}")


def export_float(
    target: Subject,
    request: ExportRequest,
    *,
    folder: Path | None = None,
    facts: Mapping[str, Any] | None = None,
    log: Log,
) -> Exported:
    """Export a model, check the file against it, and measure it.

    The file is written aside, and gets its name once its outputs agree with the model's.
    """
    path, kind = require_exportable(request, target.name), FORMATS.get(request.to)
    model = one_copy(target.model)
    reference = with_half_weights(model) if request.options.half else model
    samples, real = real_samples(target)
    fixed = kind.fixes_batch and request.batch is None and is_batched(samples)
    request = replace(request, batch=1) if fixed else request
    examples = list(checked_batches(samples, request.batch))
    interface = described_interface(model, examples[0], target, request.dynamic, request.batch)
    known = {**({} if target.build is None else {BUILD: target.build}), **(facts or {})}
    if folder is not None and RUN not in known:
        known = {**run_facts(folder), **known}
    source = ExportSource(copied(model), examples[0], interface, request.options, folder, known)
    log(f"export: writing {path} ({kind.format})")
    with folder_beside(path) as aside:
        written = aside / path.name
        notes = kind.write(source, written)
        run = kind.open_trusted(written, threads=request.threads)
        resized = other_sizes(examples[0], interface, request.dynamic)
        usable = [one for one in resized if runs(model, one)]
        parities = [check_export(kind, written, run, reference, interface, one) for one in (*examples, *usable)]
        if reference is not model:
            notes.append("compared with the model with weights rounded to float16, as the file stores them")
        if len(usable) < len(resized):
            notes.append("other sizes were not checked, because the model itself does not run on half of this one")
        if fixed:
            notes.append(f"{kind.format} files take one batch size, 1 here; for another, give --batch (batch=)")
        notes += exported_zeros_notes(zero_patterns(model), kind.format)
        for parity in parities:
            log(f"export: {parity.inputs}: differs from eager by {parity.max_relative_difference:.1e}")
        scores = score_export(ExportedModel(written, kind.format, interface, run), target, request, log)
        latency = tuple(time_export(partial(call, model), run, samples, request))
        bytes_written = size_of(aside)
        del run
        move_into_place(aside, path)
    return Exported(path, kind.format, bytes_written, tuple(parities), real, scores, latency, interface, tuple(notes))


def one_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model in eval mode and float32 on the CPU."""
    return set_mode(copied(unwrapped(model), "cpu", torch.float32), False)


def with_half_weights(model: nn.Module) -> nn.Module:
    """Return a copy whose weights were rounded to float16, as a file that stores them so computes."""
    rounded = {
        name: tensor.detach().half().float() if tensor.dtype == torch.float32 else tensor
        for name, tensor in named_tensors(model)
    }
    return with_tensors(model, rounded)


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def score_export(model: ExportedModel, target: Subject, request: ExportRequest, log: Log) -> Scores | None:
    """Return the scores of a file on the test data; None without data, or if the request asks for none."""
    splits = target.splits
    if splits is None or splits.unmeasured or not request.scored:
        return None
    found = evaluate(model, batches(splits.test, READ, shuffle_seed=None), splits.task, CPU)
    reached = in_unit(next(iter(found.values.values())), splits.task.main.unit)
    log(f"export: {model.path.name} itself reaches {splits.task.main.label} {reached}")
    return found


def time_export(
    now: Callable[[tuple[Any, ...]], object], run: Run, samples: tuple[Any, ...], request: ExportRequest
) -> Iterator[tuple[int, PairedTiming]]:
    """Yield the times of what runs now and of a file, alternately, for each batch size of the request."""
    count, sizes = sample_count(samples), request.timed if is_batched(samples) else ()
    if sizes and request.batch is not None:
        sizes = (request.batch,)
    most = FORMATS.get(request.to).most_samples
    sizes = tuple(one for one in sizes if most is None or one <= most)
    for batch in sizes:
        example = select_samples(samples, torch.arange(batch) % count)
        with with_threads(request.threads), on_device("cpu"), torch.inference_mode():
            yield batch, time_paired(partial(now, example), partial(run, example), CPU)


def latency_row(batch: int, timed: PairedTiming, reference: str) -> dict[str, Any]:
    """Return a row: milliseconds of the reference and of a file, and their ratio with its interval."""
    found = {"batch": batch, f"{reference}_ms": timed.now_ms, "ms": timed.other_ms}
    return found | {"median": timed.gain.median, "low": timed.gain.low, "high": timed.gain.high}


def move_into_place(aside: Path, path: Path) -> None:
    """Move everything that was written to its final name; an old folder is removed once the new one is there."""
    for written in sorted(aside.iterdir(), key=lambda one: one.name == path.name):  # what the file refers to first
        final = path.parent / written.name
        for one in (written, *written.rglob("*")):
            set_permissions(one)
        if written.is_dir():
            replace_folder(written, final)
        else:
            os.replace(written, final)


SAMPLES = 32
"""Real samples that exports are checked on, at most."""
TRACED, OTHER = 2, 5
"""Batch sizes: that a model is exported at, and the other one that its file is checked at."""
READ = 32
"""Samples of a batch that files are scored and calibrated with."""
PRESETS = ("image", "sequence")
"""Names of axes of any size: height and width of images, and the length of token sequences."""


def real_samples(target: Subject) -> tuple[tuple[Any, ...], bool]:
    """Return up to 32 samples as one example, and whether they are real.

    They are test samples if the model has data, else those of its example if it has several that differ, else random
    numbers in the example's shapes.
    """
    if target.splits is not None:
        test = target.splits.test
        inputs, _ = next(iter(batches(test, min(SAMPLES, len(test)), shuffle_seed=None)))
        return inputs_as_example(target.model, inputs), True
    example = target.example_inputs
    if target.inputs is not None and sample_count(example) > 1:
        return example, True
    generator = torch.Generator().manual_seed(0)

    def drawn(tensor: Tensor) -> Tensor:
        shape = (OTHER + TRACED, *tensor.shape[1:])
        if tensor.is_floating_point():
            return torch.randn(shape, generator=generator)
        return tensor[:1].expand(shape).clone()

    return (map_tensors(example, drawn) if is_batched(example) else example), False


def file_batches(data: SampleDataset, interface: ModelInterface, indices: Tensor | None = None) -> Batches:
    """Return batches of a data set as a file takes them; of a fixed size, the samples that are left over are not in."""
    chosen, fixed = torch.arange(len(data)) if indices is None else indices, fixed_batch(interface)
    if fixed is not None:
        chosen = chosen[: len(chosen) // fixed * fixed]
    return batches(data, fixed or READ, shuffle_seed=None, indices=chosen)


def samples_in_batches(samples: tuple[Any, ...], size: int) -> Iterator[tuple[Any, ...]]:
    """Yield the samples of an example in whole batches, or all of them if there are fewer."""
    count = sample_count(samples)
    for start in range(0, max(count - size, 0) + 1, size):
        yield select_samples(samples, slice(start, start + size))


def fixed_batch(interface: ModelInterface) -> int | None:
    """Return the only batch size that a file takes; None if it takes any."""
    sizes = [one.shape[0] for one in interface.inputs if one.shape]
    return sizes[0] if sizes and isinstance(sizes[0], int) else None


def checked_batches(samples: tuple[Any, ...], batch: int | None) -> Iterator[tuple[Any, ...]]:
    """Yield the examples that a file is checked on, first the one that it is exported with.

    They are two batches of different sizes, of different samples as far as there are any; one if the batch is fixed, or
    if samples are not on the first axis of every tensor.
    """
    count = sample_count(samples)
    if not is_batched(samples):
        yield samples
        return
    sizes = (batch,) if batch is not None else (TRACED, OTHER)
    start = 0
    for wanted in sizes:
        index = (torch.arange(wanted) + start) % count
        yield select_samples(samples, index)
        start += wanted


def described_interface(
    model: nn.Module, example: tuple[Any, ...], target: Subject, dynamic: Sequence[str] = (), batch: int | None = None
) -> ModelInterface:
    """Return the interface of an export: what is known of the model, with axes as they are asked for."""
    try:
        found = interface_of(model, example)
    except Exception as error:  # a model's own code may raise anything
        reraise_shortage(error)
        name, samples = target.name or type(model).__name__, real_samples(target)[0]
        given, tried = sample_count(samples), sample_count(example)
        if batch is None and is_batched(samples) and given != tried and runs(model, samples):
            raise ModelError(
                f"{name}: the model runs on {given} samples and not on {tried}, so its code fixes the batch "
                f"({reason_of(error)}); export it for that batch alone: --batch {given} (batch={given})"
            ) from error
        raise ModelError(f"{name}: the model does not run on its example: {reason_of(error)}") from error
    if target.interface is not None:
        known = target.interface
        found = replace(found, task=known.task, classes=known.classes, preprocessing=known.preprocessing)
    splits = target.splits
    if splits is not None:
        feed = found.preprocessing or splits.preprocessing
        found = replace(
            found, task=splits.task.name, classes=tuple(splits.classes) or found.classes, preprocessing=feed
        )
    if batch is not None:
        found = with_batch(found, batch)
    return replace(found, inputs=tuple(dynamic_inputs(found.inputs, dynamic)))


def runs(model: nn.Module, example: tuple[Any, ...]) -> bool:
    """Return whether a model runs on an example."""
    try:
        with torch.inference_mode():
            call(model, example)
    except Exception as error:  # a model's own code may raise anything
        reraise_shortage(error)
        return False
    return True


def dynamic_inputs(inputs: Sequence[TensorSpec], asked: Iterable[str]) -> Iterator[TensorSpec]:
    """Yield the inputs with names for the axes that may have any size."""
    axes: dict[tuple[str, int], str] = {}
    for text in asked:
        if text == "image":
            images = [one for one in inputs if len(one.shape) == 4 and one.dtype.startswith(("float", "bfloat"))]
            found = {(one.name, axis): name for one in images for axis, name in ((2, "height"), (3, "width"))}
        elif text == "sequence":
            tokens = [one for one in inputs if len(one.shape) == 2 and not one.dtype.startswith(("float", "bfloat"))]
            found = {(one.name, 1): "sequence" for one in tokens}
        else:
            name, _, axis = text.rpartition(":")
            known = {one.name: one for one in inputs}
            if name not in known or not axis.isdigit() or not 0 < int(axis) < len(known[name].shape):
                raise UsageError(
                    f"dynamic {text!r}: expected {', '.join(PRESETS)}, or INPUT:AXIS with an axis after the first of "
                    f"{'; '.join(map(str, inputs))}{'' if name in known else '; ' + nearest(name, list(known))}"
                )
            found = {(name, int(axis)): f"{name}_{axis}"}
        if not found:
            raise UsageError(f"dynamic {text!r}: the model takes none, but {'; '.join(map(str, inputs))}")
        axes |= found
    for one in inputs:
        shape = tuple(axes.get((one.name, axis), size) for axis, size in enumerate(one.shape))
        yield replace(one, shape=shape)


def other_sizes(example: tuple[Any, ...], interface: ModelInterface, asked: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the example with half of each axis that may have any size, to check a file on; empty without such axes."""
    if not asked:
        return []
    specs = iter(interface.inputs)

    def halved(tensor: Tensor) -> Tensor:
        for axis, length in enumerate(next(specs).shape):
            if axis and isinstance(length, str):
                tensor = tensor.narrow(axis, 0, max(1, tensor.shape[axis] // 2))
        return tensor.contiguous()

    return [map_tensors(example, halved)]
