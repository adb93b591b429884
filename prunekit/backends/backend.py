"""Backends: one object for each runtime writes files, opens them, times them and quantizes them.

A backend has the name of the format that it writes, the name of the runtime that it is timed as, or both. A new one is
one file in this folder, or anywhere else: whatever registers here is exported to, timed and quantized everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from prunekit import known_names
from prunekit.backends.files.export_source import ExportSource, Run
from prunekit.backends.files.program import with_axes
from prunekit.backends.int8.quantizer import Batch, Log, Quantized, Quantizer, Score, quantized_file
from prunekit.backends.session import INT8, MODULE, FileKey, Sample, Session, Setting, Source
from prunekit.errors import ArtifactError, RunError, UsageError, raised_as
from prunekit.hooks.model_copy import copied
from prunekit.models.interface import ModelInterface, interface_of, with_batch
from prunekit.settings.deployment import QuantizeSettings
from prunekit.utils.availability import missing_packages, unusable
from prunekit.utils.context import set_mode
from prunekit.utils.inputs import sample_count
from prunekit.utils.registry import Registry

FORMATS: Registry[FileBackend] = known_names.FORMATS
"""Backends by the format that they write, as recipes and commands have it."""
RUNTIMES: Registry[Backend] = known_names.RUNTIMES
"""Backends by the runtime that they are timed as, as recipes and rows of results have it."""
Open = Callable[[Source, Sample, Setting], Session]
INSTALL_INT8 = "pip install 'prunekit[int8]'"


class Backend(ABC):
    """A runtime that models are timed in. Its attributes are the arguments of `register_backend`.

    Backends are pickled for the process that measures, which imports their classes and functions from their modules.
    """

    format: str = ""  # name of what it writes, for recipes and commands; empty if it writes nothing
    # name of what is timed, for `--runtime` and rows of results; empty if only files are timed, as `format`
    runtime: str = ""
    about: str = ""  # a description in one line
    runs: str = ""  # what the runtime is, in one line; empty: as `about`
    suffix: str = ""  # of the file's name, such as `.onnx`; empty for a folder
    packages: tuple[str, ...] = ()  # those that it imports, besides torch
    install: str = ""  # the command that installs them; empty: `pip install` with their names
    compiler: bool = False  # whether it needs a C++ compiler
    carrier: str = MODULE  # the format of the files that its sessions are made from; or the module itself
    devices: tuple[str, ...] = ("cpu",)  # types of device that it runs on: "cpu", "cuda", "mps"
    reads: tuple[str, ...] = ()  # formats besides its own whose files it takes
    quantizer: str = ""  # the package that makes its files in int8; empty if it is never asked for int8
    times_layers: bool = False  # whether its sessions have a layer clock; plans for others are made from eager's layers
    # whether the growth of the process is the model's memory: not if building leaves more behind
    measures_memory: bool = True
    typed_files: bool = False  # whether it computes in the dtype of its file; the others take files in float32
    chooses_dtype: bool = False  # whether it computes a file in float32 in the dtype of the setting

    @abstractmethod
    def session(self, source: Source, sample: Sample, setting: Setting) -> Session:
        """Return a model that is ready to run on a sample: what is timed."""

    def refuse(self, setting: Setting) -> str:
        """Return why this backend cannot run a setting on its devices; empty if it can."""
        return ""

    def moves_weights(self, setting: Setting) -> bool:
        """Return whether its sessions in a setting have a `move`."""
        return False

    def forget(self) -> None:  # noqa: B027
        """Drop what is cached of sessions, once a setting is done."""

    @property
    def defined(self) -> Any:
        """The object it was registered by: its class, or the function of a runtime."""
        return type(self)

    @property
    def name(self) -> str:
        """The name that its times are listed under: of the runtime, or of the format where it has no runtime."""
        return self.runtime or self.format

    def file_key(self, setting: Setting) -> FileKey:
        """Return the key of the file that a session in this setting is made from."""
        if setting.dtype == INT8:
            return setting.batch, f"{INT8} by {self.quantizer}"
        return setting.batch, setting.dtype if self.typed_files else "float32"

    def refusal(self, setting: Setting) -> str:
        """Return why this backend cannot run a setting on its devices, and which ones can; empty if it can."""
        if setting.dtype != INT8:
            return self.refuse(setting)
        if not self.quantizer:
            able = [name for name, facts in RUNTIMES.facts().items() if facts.get("quantizer")]
            return f"it runs no quantized files; {' and '.join(able)} do"
        if missing := missing_packages([self.quantizer], INSTALL_INT8):
            return f"int8 {missing}"
        return self.refuse(setting)

    def missing(self) -> str:
        """Return which packages of the backend are not installed, and how to install them; empty if all are."""
        return missing_packages(self.packages, self.install)

    def unusable(self) -> str:
        """Return why the backend cannot be used at all on this machine, and what would help; empty if it can."""
        known = ("packages", "install", "devices", "compiler")
        return unusable({name: getattr(self, name) for name in known})


class FileBackend(Backend):
    """A backend that writes models to a file or folder, and runs what is there."""

    tolerance: ClassVar[float] = 1e-4  # largest relative difference of a correct file's outputs from the model's
    most_samples: ClassVar[int | None] = None  # largest batch that every file takes; None if there is no limit
    fixes_batch: ClassVar[bool] = False  # whether a file takes one batch size alone
    reads_folder: ClassVar[bool] = False  # whether a pruned model is written from its model folder
    runs_for_interface: ClassVar[bool] = False  # whether files are loaded to read their interface, too
    loader: ClassVar[str] = ""  # what loads its files, for messages

    @abstractmethod
    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a model to a path where nothing is yet, and return notes for the user.

        A file may have others beside it, whose names begin with its own.
        """

    @abstractmethod
    def open(self, path: Path, *, threads: int = 1) -> Run:
        """Load what was written, and return a function that runs it."""

    @abstractmethod
    def interface(self, path: Path) -> ModelInterface:
        """Return the interface that a file or folder carries, without running it."""

    def open_trusted(self, path: Path, *, threads: int = 1) -> Run:
        """Do what `open` does, also for a file that may run code: one just written, or one that the user trusts."""
        return self.open(path, threads=threads)

    def code_in(self, path: Path) -> str:
        """Return what in a file could do more than compute, for which `open` refuses it; empty if there is nothing."""
        return ""

    def require_no_code(self, path: Path) -> None:
        """Raise if a file could do more than compute when it is loaded and run."""
        if code := self.code_in(path):
            raise ArtifactError(
                f"{path}: loading it could run code that is in the file: {code}; if you trust it, add --allow-code "
                f"(from Python: allow_code=True), and it is loaded by {self.loader}"
            )

    def parts(self, path: Path, example: tuple[Any, ...], expected: Mapping[str, Tensor]) -> str:
        """Return the first module whose output differs from the model's; empty if the format cannot tell."""
        return ""

    def write_fixed(self, model: nn.Module, sample: Sample, path: Path) -> Path:
        """Write a model, which is not changed, for inputs of exactly this shape: a file that is timed."""
        plain = set_mode(copied(model), False)
        self.write(ExportSource(plain, sample, with_batch(interface_of(plain, sample), sample_count(sample))), path)
        return path

    def session(self, source: Source, sample: Sample, setting: Setting) -> Session:
        """Open the file that was written for a setting."""
        file = source.files[self.file_key(setting)]
        return self.file_session(file, self.interface(file), sample, setting, trusted=True)

    def file_session(
        self, path: Path, interface: ModelInterface, sample: Sample, setting: Setting, *, trusted: bool
    ) -> Session:
        """Open a file to be timed: of the backend's own format, or of one that the backend `reads`."""
        run = (self.open_trusted if trusted else self.open)(path, threads=setting.threads)
        return Session(partial(run, sample))

    def quantizer_of(
        self, file: Path, folder: Path, batches: Iterable[Batch], images: int, *, only_timed: bool = False
    ) -> Quantizer:
        """Return what quantizes a file, in a folder of its own; for a backend that is registered with a `quantizer`.

        What changes no time may be left out where files are `only_timed`.
        """
        raise NotImplementedError(f"{self.name}: a backend with a quantizer defines quantizer_of")

    def unquantizable(self) -> str:
        """Return why its files cannot be quantized here, and what would help; empty if they can."""
        if not self.quantizer:
            able = [name for name, facts in FORMATS.facts().items() if facts.get("quantizer")]
            return f"int8: expected the format {' or '.join(able)}, got {self.format}"
        missing = missing_packages([*dict.fromkeys((*self.packages, self.quantizer))], INSTALL_INT8)
        return f"int8 for {self.format} {missing}" if missing else ""

    def quantize(
        self,
        file: Path,
        path: Path,
        batches: Iterable[Batch],
        *,
        settings: QuantizeSettings | None = None,
        score: Score | None = None,
        log: Log = lambda text: None,
    ) -> Quantized:
        """Write a file in int8, with the inputs, outputs, axes of any size and metadata of the file in float.

        As many batches are taken as `settings.images` needs. Where the main score on validation data, in percent, falls
        by more than `settings.max_drop`, layers are returned to float; without `score` there is no limit.

        Raises:
            UsageError: a package is not installed, or the path does not end as the format's files do.
            ArtifactError: the file is damaged, or of another format.
            DataError: calibration data do not fit the file's inputs.
            RunError: no layer can be quantized, or int8 costs more than allowed; names the layers.
        """
        if reason := self.unquantizable():
            raise UsageError(reason)
        if not path.name.endswith(self.suffix):
            raise UsageError(f"{path}: expected a path that ends with {self.suffix}, as files of {self.format} do")
        chosen = settings or QuantizeSettings()
        return quantized_file(
            lambda folder: self.quantizer_of(file, folder, batches, chosen.images), path, chosen, score, log
        )


class ProgramBackend(FileBackend):
    """A backend whose files may hold code, which runs when they are loaded: `open` refuses those that do."""

    @abstractmethod
    def code_in(self, path: Path) -> str:
        """Return what in a file could do more than compute, and where; empty if there is nothing."""

    @abstractmethod
    def open_trusted(self, path: Path, *, threads: int = 1) -> Run:
        """Load a file whatever is in it, and return a function that runs it."""

    def require_writable(self, source: ExportSource, stores: str) -> None:
        """Raise if a file cannot be written here, or not with weights in float16."""
        if source.options.half:
            raise UsageError(f"half: {stores} in the dtype of its model; use onnx or openvino")
        if problem := self.unusable():
            raise UsageError(f"{self.format}: {problem}")

    def open(self, path: Path, *, threads: int = 1) -> Run:
        """Load a file that has no code in it, and return a function that runs it."""
        self.require_no_code(path)
        return self.open_trusted(path, threads=threads)


@dataclass(frozen=True)
class Loaded:
    """A file that its runtime has loaded, as the three steps of a run."""

    feed: Callable[[tuple[Any, ...]], Any]  # from an example to what the runtime takes
    forward: Callable[[Any], Any]  # runs one forward: what is timed
    tensors: Callable[[Any], list[Tensor]]  # copies of what the last forward returned, as the interface has them


class DeviceBackend(ProgramBackend):
    """A backend whose runtime computes in float32 on the CPU, and is given its number of threads when it loads."""

    advice = ""  # for errors of a run, from "; " on

    @abstractmethod
    def load(self, path: Path, threads: int) -> Loaded:
        """Load a file whatever is in it."""

    def open_trusted(self, path: Path, *, threads: int = 1) -> Run:
        """Load a file whatever is in it, and return a function that runs it."""
        loaded = self.load(path, threads)

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            given = loaded.feed(example)
            with raised_as(RunError, f"{path}: {self.loader} cannot run it: ", self.advice):
                return loaded.tensors(loaded.forward(given))

        return run

    def file_session(
        self, path: Path, interface: ModelInterface, sample: Sample, setting: Setting, *, trusted: bool
    ) -> Session:
        """Open a file to be timed without the steps before and after a forward."""
        if not trusted:
            self.require_no_code(path)
        loaded = self.load(path, setting.threads)
        return Session(partial(loaded.forward, loaded.feed(sample)), loaded.tensors)

    def refuse(self, setting: Setting) -> str:
        """Return why it cannot run a setting."""
        if setting.dtype != "float32":
            return "its files are written and computed in float32"
        return "" if setting.memory_format == "contiguous" else "it chooses layouts itself"

    def require_sizes(self, source: ExportSource, *besides: str) -> None:
        """Raise if an axis is to be of any size, but those whose names are given."""
        for spec in with_axes(source.interface, source.options).inputs:
            for axis, name in enumerate(spec.shape):
                if isinstance(name, str) and name not in besides:
                    raise UsageError(
                        f"{self.format}: expected inputs of fixed sizes, got {name} of any size (axis {axis} of "
                        f"{spec.name}); leave out --dynamic, and give the batch: --batch 1 (batch=1)"
                    )


class FunctionBackend(Backend):
    """A runtime that is one function, from `register_runtime`."""

    def __init__(self, runtime: str, function: Open, **facts: Any) -> None:
        self.runtime, self.function = runtime, function
        vars(self).update(facts)  # functions that were given take the places of methods

    @property
    def defined(self) -> Any:
        """The function."""
        return self.function

    def session(self, source: Source, sample: Sample, setting: Setting) -> Session:
        """Call the function."""
        return self.function(source, sample, setting)


Kind = TypeVar("Kind", bound=type[Backend])


def register_backend(*, about: str, **facts: Any) -> Callable[[Kind], Kind]:
    """Register a backend: a class of which one object, made without arguments, writes, opens, times and quantizes.

    With a format, models are exported to it, its files are scored, opened and timed, and with a quantizer written in
    int8; with a runtime, models are timed by `bench`, in recipes and as the target of plans. All arguments are
    literals: they are known to recipes and lists before the file is imported.

    Args:
        about: a description in one line.
        facts: further attributes of `Backend` by name, such as `format`, `runtime` and `suffix`. Left out, they have
            its values, but for `carrier`: the format, if there is one.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        TypeError: an argument is no attribute of `Backend`.
    """
    usual = {name: getattr(Backend, name) for name in Backend.__annotations__}
    if unknown := sorted(facts.keys() - usual.keys()):
        raise TypeError(f"register_backend: expected arguments among {', '.join(usual)}, got {', '.join(unknown)}")
    known = SimpleNamespace(**usual | {"about": about, "carrier": facts.get("format") or MODULE} | facts)

    def register(kind: Kind) -> Kind:
        for name, value in vars(known).items():
            setattr(kind, name, value)
        kind.facts = known  # type: ignore[attr-defined]
        backend = kind()
        if known.format:
            FORMATS.add(known.format, backend, kind)  # type: ignore[arg-type]
        if known.runtime:
            RUNTIMES.add(known.runtime, backend, kind)
        return kind

    return register


def register_runtime(
    name: str,
    *,
    about: str,
    carrier: str = MODULE,
    devices: tuple[str, ...] = ("cpu",),
    packages: tuple[str, ...] = (),
    install: str = "",
    refuse: Callable[[Setting], str] | None = None,
    times_layers: bool = False,
    moves_weights: Callable[[Setting], bool] | None = None,
    measures_memory: bool = True,
    typed_files: bool = False,
    forget: Callable[[], object] | None = None,
    quantizer: str = "",
) -> Callable[[Open], Open]:
    """Register a runtime: something that runs models and is timed, by `bench`, in recipes and as the target of plans.

    The decorated function makes a session from a source, a sample and a setting. It is called, and its sessions run,
    with the setting's number of torch threads, in inference mode, with its device as the current one, in a process of
    its own. The outputs of sessions are checked against the model in eager float32 before anything is timed.

    Args:
        name: for recipes, `--runtime` and rows of results.
        about: a description in one line.
        carrier: what it makes sessions from: the module itself, or files of a format, such as "onnx".
        devices: types of device that it runs on: "cpu", "cuda", "mps".
        packages: those that it imports, besides torch.
        install: the command that installs them; by default `pip install` with their names.
        refuse: returns why it cannot run a setting on these devices, empty if it can; None: it runs all.
        times_layers: whether its sessions have a layer clock; plans for the others are made from eager's layers.
        moves_weights: returns whether its sessions in a setting have a `move`; None: they have none.
        measures_memory: whether the growth of the process is the model's memory: not if building leaves more behind.
        typed_files: whether it computes in the dtype of its file; the others take files in float32.
        forget: called once a setting is done, to drop what is cached of its sessions.
        quantizer: the package that makes its files in int8: "onnxruntime" (ONNX files), "nncf" (OpenVINO's), or that of
            another backend; empty if it runs none, and is never asked for int8.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ValueError: the name is taken.

    Example:
        >>> import torch
        >>> import prunekit as pk
        >>> from prunekit.utils.inputs import call
        >>> from prunekit.backends.eager import placed
        >>> @pk.register_runtime("fx", about="the graph of operators that torch.fx finds")
        ... def fx(source, sample, setting):
        ...     module, sample = placed(source, sample, setting)
        ...     graph = torch.fx.symbolic_trace(module)
        ...     return pk.Session(lambda: call(graph, sample))
        >>> pk.Target("fx").runtime
        'fx'
    """
    facts = dict(locals())

    def register(function: Open) -> Open:
        given = {key: value for key, value in facts.items() if key != "name" and value is not None}
        RUNTIMES.add(name, FunctionBackend(name, function, **given), function)
        return function

    return register


def accept_runtime(reference: str, found: Any) -> Backend:
    """Return the backend for an object that `file.py:object` refers to: registered there, or made of a function."""
    if isinstance(found, Backend):
        return found
    registered = next((each for each in RUNTIMES.imported if each.defined is found), None)
    if registered is None and not callable(found):
        raise UsageError(
            f"{reference}: expected a function that is decorated by prunekit.register_runtime and takes a source, a "
            f"sample and a setting, got {type(found).__name__}"
        )
    return registered or FunctionBackend(reference, found)


def accept_format(reference: str, found: Any) -> FileBackend:
    """Return the backend for an object that `file.py:object` refers to."""
    made = found() if isinstance(found, type) and issubclass(found, FileBackend) else found
    if not isinstance(made, FileBackend):
        raise UsageError(
            f"{reference}: expected a subclass of prunekit.backends.backend.FileBackend, got {type(found).__name__}"
        )
    return made
