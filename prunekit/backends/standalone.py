"""Standalone folders: weights, a manifest, and one Python file that rebuilds the model without prunekit."""

import platform
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256 as sha256_of
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from prunekit.backends.backend import FileBackend, register_backend
from prunekit.backends.files.export_source import ExportSource, Run
from prunekit.backends.folders.builders import Builder, builders
from prunekit.backends.folders.differences import Differences, DiffersError, differences, explicit_sizes
from prunekit.backends.folders.model_file import ATTRIBUTES, CODE, MANIFEST, WEIGHTS, FileContents, text_of_file
from prunekit.channels.float64 import relative_difference
from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.channels.tracing.execution import first_outputs
from prunekit.channels.tracing.storages import parts_of
from prunekit.compaction.model_folder import checked_manifest, read_manifest, stored_tensors
from prunekit.errors import ArtifactError, RunError, UsageError, raised_as, reason_of
from prunekit.hooks.model_copy import copied
from prunekit.hooks.wrappers import require_values
from prunekit.models.bitmask import write_tensors
from prunekit.models.interface import ModelInterface
from prunekit.models.zoo import from_build
from prunekit.utils.context import set_mode, without_gradients
from prunekit.utils.context import threads as with_threads
from prunekit.utils.files import sha256, with_checksum, write_json, write_text
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather, lies_channels_last

FORMAT = 1
BUILD, DENSE = "build", "dense"
"""Names of facts: how the dense model is built (name, zoo, arguments), and that model, or a function that builds it."""
BUILDER = "the code that builds the dense model as --model file.py:factory"


class FolderBackend(FileBackend):
    """A backend that writes folders with weights and what rebuilds the model, which then runs in torch."""

    @abstractmethod
    def load(self, path: Path) -> nn.Module:
        """Return the model of a folder, in eval mode; the folder's own Python may run."""

    def open(self, path: Path, *, threads: int = 1) -> Run:
        """Load the model of a folder, and return a function that runs it."""
        model = self.load(path)

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            with with_threads(threads):
                return [tensor.detach() for tensor in gather(without_gradients(lambda: call(model, example)))]

        return run

    def parts(self, path: Path, example: tuple[Any, ...], expected: Mapping[str, Tensor]) -> str:
        """Return the first module whose output differs from the model's; empty if none does."""
        return first_difference(self.load(path), example, expected, self.tolerance)


@register_backend(
    format="standalone", about="a folder with safetensors and a Python file that needs torch, not prunekit"
)
class Standalone(FolderBackend):
    """A folder with `model.safetensors`, `manifest.json` and `model.py`, which rebuilds the model with torch alone.

    Besides torch, the file imports the package that the dense model is from: torchvision, timm, transformers,
    ultralytics, or the user's own module. Where nobody can say how the dense model is built, `load` takes it.
    """

    def __init__(self) -> None:
        self._dense: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """Dense models that `load` of files without a builder was given, by the checksum of the file."""

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a folder, rebuild the model from it, and compare tensors and outputs, which must be the same."""
        path.mkdir()
        notes = write_files(source, path)
        require_same(source, self.load(path, source.facts.get(DENSE) or source.model), CODE)
        return notes

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface in `manifest.json`."""
        return ModelInterface.from_dict(manifest_of(path)["interface"], str(path / MANIFEST))

    def dense(self, source: ExportSource) -> nn.Module | None:
        """Return the dense model that a model is from, without its values; None if nobody knows how it is built."""
        builder, dense, *_ = _built(source)
        return None if builder is None else dense

    def load(self, path: Path, dense: nn.Module | Callable[[], nn.Module] | None = None) -> nn.Module:
        """Import `model.py` of a folder, and return its model: load only what you trust."""
        manifest = manifest_of(path)
        text = (path / CODE).read_text(encoding="utf-8")
        if manifest["sha256"].get(CODE) != _digest(text):
            raise ArtifactError(f"{path / CODE}: its checksum is not the one in {MANIFEST}; it was changed")
        given: tuple[Any, ...] = ()
        if "def build(" not in text:
            if dense is not None:
                self._dense[_digest(text)] = dense
            given_dense = self._dense.get(_digest(text))
            if given_dense is None:
                raise UsageError(
                    f"{path}: this model was built by its owner's code, and {CODE} needs it: from model import load; "
                    "load(dense); or export it again with --model file.py:factory"
                )
            given = (copied(given_dense) if isinstance(given_dense, nn.Module) else given_dense,)
        with raised_as(ArtifactError, f"{path / CODE}: cannot be loaded: "):
            model: nn.Module = imported(path / CODE).load(*given)
        return model


def write_files(source: ExportSource, path: Path, *, weights: bool = True) -> list[str]:
    """Write `model.py`, `manifest.json` and the files of tensors into a folder that is there, and return notes."""
    model = source.model
    require_values(model, "a file")
    builder, dense, empty, changes, notes = _built(source)
    own, sparse = stored_tensors(model)
    if weights:
        write_tensors(own, path / WEIGHTS)
    tensors = {
        f"{place}.{name}".lstrip("."): tensor.contiguous().clone()
        for place, named in changes.tensors.items()
        for name, tensor in named.items()
    }
    if tensors:
        write_tensors(tensors, path / ATTRIBUTES)
    files = [WEIGHTS, *([ATTRIBUTES] if tensors else [])]
    checksums = {name: sha256(path / name) for name in files}
    written = f"Written by prunekit {version('prunekit')}."
    contents = FileContents(
        model, dense, builder, empty, changes, source.interface, checksums, lies_channels_last(model), sparse, written
    )
    text = text_of_file(contents)
    write_text(path / CODE, text)
    package = builder.package if builder is not None else ""
    manifest = {
        "format": FORMAT,
        "kind": "prunekit-standalone",
        "class": original_of(type(model)).__name__,
        "build": None if builder is None else builder.code,
        "interface": source.interface.as_dict(),
        "sha256": {**checksums, CODE: _digest(text)},
        "versions": {"python": platform.python_version(), **_versions("torch", "safetensors", package)},
    }
    write_json(path / MANIFEST, with_checksum(manifest))
    if package:
        notes.append(f"{CODE} needs {package}; it was written with {version(package)}")
    return notes


def _built(source: ExportSource) -> tuple[Builder | None, nn.Module, bool, Differences, list[str]]:
    """Return the builder whose model takes the fewest changes, that model, and the changes; notes too."""
    known = build_of(source)
    found: list[tuple[Differences, Builder, nn.Module, bool]] = []
    reasons = []
    for builder in builders(source.model, known, source.facts.get(DENSE)):
        try:
            dense, empty = builder.skeleton()
            found.append((differences(set_mode(dense, False), source.model), builder, dense, empty))
        except DiffersError as error:
            reasons.append(f"{builder.code}: {error}")
        except Exception as error:  # a constructor that refuses what was guessed
            reasons.append(f"{builder.code}: {reason_of(error)}")
        if found and known is not None:
            break
    if found:
        changes, builder, dense, empty = min(found, key=lambda item: item[0].count)
        imports = ", ".join(f"{name} from {module}.py" for name, module in (builder.names or {}).items())
        notes = [f"{CODE} imports {imports}, which must be importable"] if builder.own else []
        return builder, dense, empty, changes, notes
    if known is not None:
        raise RunError(
            f"{type(source.model).__name__}: what builds the dense model does not make this one: {reasons[0]}; give "
            "the code that builds it as --model file.py:factory"
        )
    given = source.facts.get(DENSE)
    dense, changes = source.model, explicit_sizes(source.model)
    if given is not None:
        dense = given if isinstance(given, nn.Module) else given()
        try:
            changes = differences(dense, source.model)
        except DiffersError as error:
            raise RunError(
                f"{type(source.model).__name__}: it is not made from the dense model that was given: {error}"
            ) from None
    said = f" ({reasons[0]})" if reasons else ""
    note = (
        f"nobody said how the dense model is built{said}: `load(dense)` of {CODE} takes it, or the function that "
        "builds it; --model file.py:factory names that"
    )
    return None, dense, False, changes, [note]


def build_of(source: ExportSource) -> Mapping[str, Any] | None:
    """Return how the dense model is built: as the caller says, or by a zoo's name in the model folder, never code."""
    given = source.facts.get(BUILD)
    if isinstance(given, Mapping):
        return given
    build = read_manifest(source.folder).get("build") if source.folder is not None else None
    return build if from_build(build) is not None else None


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError, ValueError):
            found[package] = version(package)
    return found


def manifest_of(path: Path) -> dict[str, Any]:
    """Return the manifest of a standalone folder."""
    for name in (MANIFEST, CODE, WEIGHTS):
        if not (path / name).is_file():
            raise ArtifactError(f"{path}: expected a standalone folder with {name}, which is not there")
    return checked_manifest(path / MANIFEST, {"format": int, "interface": dict, "sha256": dict}, (FORMAT,))


def imported(path: Path) -> ModuleType:
    """Run a Python file as a module of its own name, and return it; no bytecode is left beside it."""
    name = f"prunekit_standalone_{sha256_of(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[name] = module  # classes look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.dont_write_bytecode = before
    return module


def _digest(text: str) -> str:
    return sha256_of(text.encode()).hexdigest()


def require_same(source: ExportSource, loaded: nn.Module, file: str) -> None:
    """Raise unless a model that was rebuilt from a file has the same tensors, and computes the same, bit for bit."""
    own, new, name = source.model.state_dict(), loaded.state_dict(), type(source.model).__name__
    wrong = sorted(own.keys() ^ new.keys())
    wrong += [key for key in own if key in new and not _same(own[key], new[key])]
    if wrong:
        raise RunError(
            f"{wrong[0]}: this tensor of the {name} is another one in the model that {file} rebuilds; give {BUILDER}"
        )
    expected = gather(without_gradients(lambda: call(source.model, source.example)))
    with raised_as(RunError, f"{name}: the model that {file} rebuilds does not run: ", f"; give {BUILDER}"):
        found = gather(without_gradients(lambda: call(loaded, source.example)))
    if len(expected) != len(found) or not all(map(_same, expected, found)):
        outputs = first_outputs(source.model, source.example)
        where = first_difference(loaded, source.example, outputs, 0.0) or "its output"
        raise RunError(
            f"{where}: the model that {file} rebuilds computes something else than the {name}; its constructor leaves "
            f"something in it that no tensor or number holds. Give {BUILDER}"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    return all(_equal(x, y) for x, y in zip(parts_of(a), parts_of(b), strict=True))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same values, NaN among them."""
    return bool(torch.equal(a, b)) or (a.is_floating_point() and bool(torch.equal(a.nan_to_num(), b.nan_to_num())))


def first_difference(
    model: nn.Module, example: tuple[Any, ...], expected: Mapping[str, Tensor], tolerance: float
) -> str:
    """Return the path of the first module whose output differs by more than a share of its largest value."""
    found = first_outputs(model, example)
    for path, tensor in expected.items():
        if path not in found:
            return path
        want, got = (one.double() if one.is_floating_point() else one for one in (tensor, found[path]))
        if not relative_difference(want, got, 0.0)[0] <= tolerance:
            return path
    return ""
