"""Benchmarks: the latency of models that are timed alternately."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.backends.files.exported_model import ExportedModel
from prunekit.compaction.zero_patterns import unused_zeros_notes, zero_patterns
from prunekit.errors import UsageError
from prunekit.hooks.wrappers import unwrapped
from prunekit.jobs.run.command_subject import Subject
from prunekit.jobs.run.subject_sources import exported_target
from prunekit.measure.latency import row_text
from prunekit.measure.latency.comparison import devices, measure_latency
from prunekit.modes.public_call import public_call
from prunekit.settings.deployment import LatencySettings
from prunekit.utils.context import device_of
from prunekit.utils.display import Displayed, Table, digits, factor, interval, plural, size
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import as_example, input_specs
from prunekit.utils.progress import Log, reporting, stage
from prunekit.utils.tensors import gather

WHERE = ("device", "runtime", "batch", "threads")
HEADINGS = ["speedup", "its 95 %", "median ms", "95 % interval", "p10", "p90", "p99", "samples/s", "peak memory"]


@dataclass(frozen=True, eq=False, repr=False)
class Benchmark(Displayed):
    """The latency of models that were timed alternately.

    Attributes:
        models: by name `params` and `macs`, for one sample; of exported files None, and `file_bytes`.
        latency: a row for each model and setting, in ms for the whole batch; see `LatencyReport`.
        speedup: the same, of each model over the first, paired.
        notes: what to know about the figures.
        failures: settings that were not measured, with the reason.
        machine: what was measured on.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> small = pk.prune(model, x, macs=0.5).model
        >>> timed = pk.bench({"dense": model, "pruned": small}, x, repeats=5, device="cpu")
        >>> timed
        <Benchmark: 2 models in 1 setting; ...>
        >>> timed.models["pruned"]
        {'params': 90, 'macs': 80}
    """

    models: Mapping[str, Mapping[str, int | None]]
    latency: tuple[dict[str, Any], ...]
    speedup: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    failures: tuple[dict[str, Any], ...]
    machine: Mapping[str, Any]

    def figures(self) -> dict[str, Any]:
        """Return the benchmark as plain data."""
        return {name: list(value) if isinstance(value, tuple) else dict(value) for name, value in vars(self).items()}

    def rows(self) -> list[dict[str, Any]]:
        """Return latency, in ms for the whole batch, and speedup over the first model, of each model and setting."""
        names = (*WHERE, "dtype", "memory_format", "median_ms", "low_ms", "high_ms", "p90_ms", "p99_ms", "stable")
        return [
            {name: row[name] for name in ("model", *names)}
            | {f"speedup_{name}".removesuffix("_median"): beside and beside[name] for name in ("median", "low", "high")}
            for row, beside in row_text.paired(self.latency, self.speedup)
        ]

    def _headline(self) -> str:
        first = next(iter(self.models), "")
        stable = [row for row in self.speedup if row["stable"]]
        fastest = max(stable, key=lambda row: float(row["median"]), default=None)
        unstable = "; speedups are unstable" if self.speedup else ""
        best = unstable if fastest is None else f"; {fastest['model']} {factor(fastest['median'])} as fast as {first}"
        place = "" if fastest is None else f" ({row_text.setting_text(fastest)})"
        failed = f"; {len(self.failures)} not measured" if self.failures else ""
        settings = len({row_text.setting_text(row) for row in self.latency})
        return f"{plural(len(self.models), 'model')} in {plural(settings, 'setting')}{best}{place}{failed}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Benchmark: {self._headline()}"
        rows = [
            (
                *(row[key] for key in ("model", *WHERE)),
                row_text.dtype_text(row),
                factor(beside["median"]) if beside else "",
                interval(beside["low"], beside["high"]) + row_text.unstable_mark(beside) if beside else "",
                digits(row["median_ms"]),
                interval(row["low_ms"], row["high_ms"]) + row_text.unstable_mark(row),
                *(digits(row[key]) for key in ("p10_ms", "p90_ms", "p99_ms", "samples_per_s")),
                size(row["peak_memory_bytes"]),
            )
            for row, beside in row_text.paired(self.latency, self.speedup)
        ]
        text = ("device", "runtime", "dtype", "its 95 %", "95 % interval")
        if rows:
            yield Table(("model", *WHERE, "dtype", *HEADINGS), rows, text=text, most=20)
        if self.speedup:
            yield "A speedup is the median of ratios of calls one after the other; that of two medians is less exact."
        machine = row_text.machine_text(self.machine, self.latency)
        failures = [f"not measured: {line}" for line in row_text.failure_lines(self.failures)]
        remarks = [*row_text.unstable_lines(self.latency, self.speedup), *self.notes, *failures, machine]
        yield "\n".join(remarks)


@public_call
@reporting(None, "bench")
def bench(
    models: Mapping[str, nn.Module | StrPath],
    example: Any,
    *,
    runtimes: str | Sequence[str] = "eager",
    batch: int | Sequence[int] = 1,
    threads: int | Sequence[int] = 1,
    dtypes: str | Sequence[str] = "fp32",
    memory_formats: str | Sequence[str] = "contiguous",
    device: torch.device | str | None = None,
    repeats: int = 30,
    allow_code: bool = False,
    log: Log = stage,
) -> Benchmark:
    """Time models alternately; the speedup of each is relative to the first.

    So other load on the machine affects all of them alike. Every runtime is first compared with eager float32; if its
    outputs differ, it is not timed. A figure that the samples do not support is marked unstable, with a remedy.

    Args:
        models: one or more by name, which take the same input; not changed. The path of an exported file stands for
            the model in it, which is timed in its own runtime where `runtimes` says eager.
        example: one input of all of them: a tensor, a tuple of positional arguments, or a mapping of arguments by
            name; samples on the first axis of every tensor.
        runtimes: what runs the models, each in a process of its own, as `prunekit list runtimes` shows them.
        batch: sizes, in samples.
        threads: of the CPU.
        dtypes: what the models compute in.
        memory_formats: layouts in torch's own runtimes.
        device: where they are timed: a device, several with commas between them, or `auto`: the CPU, and CUDA where
            there is one. None: where the first model is.
        repeats: timed runs of each, at least 5.
        allow_code: whether exported files may be loaded though they could run code: compiled ones, and programs of
            more than operators that compute tensors.
        log: gets a line on what is exported and timed next.

    Raises:
        UsageError: there are no models, a device does not exist, or a runtime is not installed or cannot do what is
            asked; nothing was measured.
        ModelError: a model does not run on the example.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> small = pk.prune(model, torch.randn(1, 4), macs=0.5).model
        >>> found = pk.bench({"dense": model, "small": small}, torch.randn(1, 4), device="cpu", repeats=5)
        >>> print(found)
        Benchmark: 2 models in 1 setting; ...
        ...
          model  device  runtime  batch  threads  dtype    speedup  its 95 % ...
          dense  cpu     eager        1        1  float32  ...
          small  cpu     eager        1        1  float32  ...
        ...
        >>> [row["model"] for row in found.speedup]  # relative to the first
        ['small']
    """
    if not isinstance(models, Mapping) or not models:
        given = "none" if isinstance(models, Mapping) else type(models).__name__
        raise UsageError(f"models: expected models by name, such as {{'dense': model, 'pruned': small}}, got {given}")
    settings = LatencySettings(
        batches=_several(batch),
        threads=_several(threads),
        repeats=repeats,
        runtimes=_several(runtimes),
        dtypes=_several(dtypes),
        memory_formats=_several(memory_formats),
    )
    targets = [_target(name, model, example, allow_code) for name, model in models.items()]
    places = device_of(targets[0].model) if device is None else device
    return bench_targets(targets, settings, str(places), log=log)


def _several(given: Any) -> Any:
    """Return one value or several as a tuple."""
    return (given,) if isinstance(given, (str, int)) else tuple(given)


def _target(name: str, model: nn.Module | StrPath, given: Any, allow_code: bool) -> Subject:
    if not isinstance(model, nn.Module):
        model = exported_target(Path(model), allow_code=allow_code).model
    model = unwrapped(model)
    inputs = as_example(model, given)
    shape = next((tuple(tensor.shape[1:]) for tensor in gather(inputs)), ())
    return Subject(model, name, shape, inputs=inputs)


def bench_targets(
    targets: Sequence[Subject], settings: LatencySettings, device: str = "auto", *, log: Log
) -> Benchmark:
    """Time models alternately; the speedup of each is relative to the first."""
    files = [target for target in targets if isinstance(target.model, ExportedModel)]
    places = devices("cpu" if files and device == "auto" else device, settings)
    targets = _with_inputs(targets)
    taken = {target.name: _taken(target, named=not files) for target in targets}
    if len(set(taken.values())) > 1:
        found = ", ".join(f"{name} takes {inputs}" for name, inputs in taken.items())
        raise UsageError(f"expected models that take the same input, but {found}; give --input-shape for all of them")
    names = [target.name for target in targets]
    twice = [f" ({names[:i].count(name) + 1})" * (names.count(name) > 1) for i, name in enumerate(names)]
    models = {f"{name}{number}": target for name, number, target in zip(names, twice, targets, strict=True)}
    for target in targets:
        target.probe()
    measured = {name: target.model for name, target in models.items()}
    report = measure_latency(measured, targets[0].timing_inputs, settings, places, log=log)
    zeros = {name: zero_patterns(model) for name, model in measured.items() if isinstance(model, nn.Module)}
    runtimes = dict.fromkeys(str(row["runtime"]) for row in report.rows)
    return Benchmark(
        models={name: target.figures() for name, target in models.items()},
        latency=tuple(dict(row) for row in report.rows),
        speedup=tuple(dict(row) for row in report.speedup),
        notes=(*report.notes, *_mixed(report.rows), *unused_zeros_notes(zeros, tuple(runtimes))),
        failures=tuple(dict(row) for row in report.failures),
        machine=dict(report.machine),
    )


def gated(latency: Sequence[dict[str, Any]], max_latency_ms: float) -> list[tuple[dict[str, Any], bool]]:
    """Return the rows of the last model, and whether each is within a limit, in ms for the whole batch.

    A stable row is compared by its median, an unstable one by the upper end of its 95 % interval: noise makes models
    slower, so one that is fast enough in spite of it is fast enough.
    """
    rows = [row for row in latency if row["model"] == latency[-1]["model"]]
    return [(row, row["median_ms" if row["stable"] else "high_ms"] <= max_latency_ms) for row in rows]


def _mixed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note if models of one setting ran in different runtimes, as exported files do in their own."""
    first = rows[0]["model"] if rows else ""
    own = {row["model"]: row["runtime"] for row in reversed(rows)}
    if len(set(own.values())) < 2:
        return []
    shown = ", ".join(f"{model} in {own[model]}" for model in dict.fromkeys(row["model"] for row in rows))
    return [f"{shown}: speedups over {first} are of the runtimes too"]


def _with_inputs(targets: Sequence[Subject]) -> list[Subject]:
    """Return targets whose inputs have sizes: files that take inputs of any size get those of the others."""
    known = next((target for target in targets if target.knows_inputs), None)
    if known is None:
        specs = " and ".join(map(str, targets[0].interface.inputs)) if targets[0].interface else "any input"
        raise UsageError(
            f"{targets[0].name}: it takes {specs}: expected sizes to time it at: --input-shape, or a model folder "
            "beside it"
        )
    given = {"inputs": known.inputs, "sample_shape": known.sample_shape}
    return [one if one.knows_inputs else replace(one, **given) for one in targets]  # type: ignore[arg-type]


def _taken(target: Subject, named: bool) -> str:
    """Return shapes of all inputs of a sample in words, and dtypes of those that are not floating-point."""
    found = list(input_specs(target.example_inputs))
    found = sorted(found, key=lambda spec: spec.name or "") if named else found
    return " and ".join(
        (f"{spec.name} " if spec.name and named else "")
        + ("" if spec.dtype.startswith(("float", "bfloat")) else f"{spec.dtype} ")
        + "x".join(map(str, spec.shape[1:]))
        for spec in found
    )
