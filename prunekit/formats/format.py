"""Formats of exports by name: what each needs, how it is written, read and run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from prunekit import known_names
from prunekit.errors import ArtifactError, UsageError
from prunekit.models.interface import ModelInterface
from prunekit.utils.availability import missing_compiler, missing_packages
from prunekit.utils.registry import Registry

FORMATS: Registry[ExportFormat] = known_names.FORMATS
"""Formats by the name that recipes and commands have."""
Run = Callable[[tuple[Any, ...]], list[Tensor]]
"""From an example (float32, on the CPU) to the tensors of the output on the CPU, in the order of the interface."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        opset: version of ONNX's operators; None: the one that prunekit is tested with.
        half: whether weights are stored in float16, where the format can; computations stay in float32.
        dynamic: names of axes of any size by input and axis, besides the batch: `{"image": {2: "height"}}`.
    """

    opset: int | None = None
    half: bool = False
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ExportSource:
    """A model to export.

    Attributes:
        model: a copy in eval mode on the CPU, in float32; free to be changed.
        example: positional and named arguments of `forward`, with at least two samples on the first axis, real ones
            where there are any.
        interface: names, dtypes and axes of inputs and outputs; task, classes and preprocessing. Axes that are not
            numbers are of any size in the export.
        options: of the export.
        folder: the model folder that the model was loaded from; None for others.
        facts: further facts by name, such as the figures of the run that the model is from, for a model card.
    """

    model: nn.Module
    example: tuple[Any, ...]
    interface: ModelInterface
    options: ExportOptions = field(default_factory=ExportOptions)
    folder: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class ExportFormat(ABC):
    """A format that models are exported to. One without arguments is made when it is registered.

    Attributes:
        name: as in recipes and commands.
        about: a description in one line.
        suffix: of the file's name, such as `.onnx`; empty for a folder.
        packages: those that it imports, besides torch.
        install: the command that installs them; by default `pip install` with their names.
        compiler: whether it needs a C++ compiler.
        tolerance: largest relative difference of a correct file's outputs from the model's.
        most_samples: largest batch that every file takes; None if there is no limit.
        reads_folder: whether a pruned model is written from its model folder.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    suffix: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    install: ClassVar[str]
    compiler: ClassVar[bool] = False
    tolerance: ClassVar[float] = 1e-4
    most_samples: ClassVar[int | None] = None
    reads_folder: ClassVar[bool] = False

    @abstractmethod
    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a model.

        Args:
            path: of the file or folder, which does not exist yet; it may have files beside it whose names begin with
                its own.
        """

    @abstractmethod
    def open(self, path: Path, *, threads: int = 1) -> Run:
        """Load what was written, and return a function that runs it."""

    @abstractmethod
    def interface(self, path: Path) -> ModelInterface:
        """Return the interface that a file or folder carries, without running it."""

    def open_trusted(self, path: Path, *, threads: int = 1) -> Run:
        """Do what `open` does, also for a file that may run code: one that was just written, or that the user trusts."""
        return self.open(path, threads=threads)

    def code_in(self, path: Path) -> str:
        """Return what in a file could do more than compute, for which `open` refuses it; empty if there is nothing."""
        return ""

    def missing(self) -> str:
        """Return which of its packages are not installed, and how to install them; empty if all are."""
        return missing_packages(self.packages, self.install)

    def unusable(self) -> str:
        """Return why nothing can be exported here, and what would help; empty if it can."""
        return self.missing() or (missing_compiler() if self.compiler else "")

    def parts(self, path: Path, example: tuple[Any, ...], expected: Mapping[str, Tensor]) -> str:
        """Return the first module whose output differs from the model's; empty if the format cannot tell."""
        return ""


class ProgramFormat(ExportFormat):
    """A format whose files may hold code, which runs when they are loaded: `open` refuses those that do.

    Attributes:
        loader: what loads its files.
        runs_for_interface: whether its files are loaded to read their interface, too.
    """

    loader: ClassVar[str]
    runs_for_interface: ClassVar[bool] = False

    @abstractmethod
    def code_in(self, path: Path) -> str:
        """Return what in a file could do more than compute, and where; empty if there is nothing."""

    @abstractmethod
    def open_trusted(self, path: Path, *, threads: int = 1) -> Run:
        """Load a file whatever is in it, and return a function that runs it."""

    def open(self, path: Path, *, threads: int = 1) -> Run:
        """Load a file that has no code in it, and return a function that runs it."""
        self.require_no_code(path)
        return self.open_trusted(path, threads=threads)

    def require_no_code(self, path: Path) -> None:
        """Raise if a file could do more than compute when it is loaded and run."""
        if code := self.code_in(path):
            raise ArtifactError(
                f"{path}: loading it could run code that is in the file: {code}; if you trust it, add --allow-code "
                f"(from Python: allow_code=True), and it is loaded by {self.loader}"
            )


Kind = TypeVar("Kind", bound=type[ExportFormat])


def register_format(
    name: str,
    *,
    about: str,
    suffix: str = "",
    packages: Sequence[str] = (),
    install: str = "",
    compiler: bool = False,
) -> Callable[[Kind], Kind]:
    """Register a format: something that models are exported to, by `export` and in recipes."""

    def register(kind: Kind) -> Kind:
        kind.name, kind.about, kind.suffix = name, about, suffix
        kind.packages, kind.install, kind.compiler = tuple(packages), install, compiler
        FORMATS.add(name, kind(), kind)
        return kind

    return register


def accept(reference: str, found: Any) -> ExportFormat:
    """Return the format for an object that `file.py:object` refers to."""
    made = found() if isinstance(found, type) and issubclass(found, ExportFormat) else found
    if not isinstance(made, ExportFormat):
        raise UsageError(
            f"{reference}: expected a subclass of prunekit.formats.format.ExportFormat, got {type(found).__name__}"
        )
    return made
