"""Post-training quantization of a model to int8 for torch's own compiler on x86, by torchao: PT2E, and AOTInductor."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.errors import RunError, UsageError, reason_of, reraise_shortage
from prunekit.formats.pt2_archive import archive_file
from prunekit.hooks.model_copy import copied
from prunekit.quantization.accuracy_limit import (
    AccuracyLimit,
    Array,
    Batch,
    Log,
    Quantizer,
    Score,
    calibration_batches,
    sensitivity_batches,
)
from prunekit.quantization.quantized import LayerError, Quantized
from prunekit.settings.deployment import QuantizeSettings
from prunekit.utils.availability import int8_note
from prunekit.utils.context import set_mode
from prunekit.utils.display import share
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import arguments_by_name, as_example, split
from prunekit.utils.tensors import gather

LAYERS = (nn.Conv2d, nn.Linear)
"""Classes of layers that Inductor has int8 kernels for."""


def missing() -> str:
    """Return why nothing can be quantized for Inductor here, and what would help; empty if it can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"runs on x86 alone, and this is {platform.machine()}"
    return "" if find_spec("torchao") else "needs torchao, not installed here: pip install 'prunekit[int8]'"


def quantize_inductor(
    model: nn.Module,
    path: StrPath,
    example: Any,
    batches: Iterable[Batch],
    *,
    settings: QuantizeSettings | None = None,
    score: Score | None = None,
    log: Log = lambda text: None,
) -> Quantized:
    """Write an AOTInductor package of a model in int8, quantized by torchao's `X86InductorQuantizer`.

    The package takes inputs of exactly the shapes of the example. Making it takes a C++ compiler, and a minute or so.

    Args:
        batches: calibration data, arrays by the name of the argument, in the shapes of the example.
        score: returns the main score, in percent, of a program that `torch.export.load` reads: the same model,
            quantized and not compiled. Where it falls by more than `settings.max_drop`, layers are returned to float.
            None: there is no limit.
    """
    path, chosen = Path(path), settings or QuantizeSettings()
    if reason := missing():
        raise UsageError(f"int8 for Inductor {reason}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent) as place:
        quantizer = InductorQuantizer(model, Path(place), as_example(model, example), batches, chosen.images)
        if not quantizer.layers:
            names = " and ".join(kind.__name__ for kind in LAYERS)
            raise RunError(f"{type(model).__name__}: expected layers that can be quantized ({names}), and it has none")
        found = AccuracyLimit(quantizer, chosen, score, log).choose()
        layers, floats = quantizer.described(found.restored)
        quantizer.compile(found.file, Path(place) / "package.pt2")
        os.replace(Path(place) / "package.pt2", path)
    return Quantized(
        path, layers, floats, found.error, found.sensitivity, found.float_score, found.score, (int8_note(),)
    )


class InductorQuantizer(Quantizer):
    """Quantizes programs of `torch.export`; its files are such programs.

    Args:
        model: in float32; not changed.
        folder: for files, which are left there.
        example: positional and named arguments of `forward`.
        batches: calibration data.
        images: number of samples to take of them.
    """

    ways = ("X86InductorQuantizer",)

    def __init__(
        self, model: nn.Module, folder: Path, example: tuple[Any, ...], batches: Iterable[Batch], images: int
    ) -> None:
        self._model, self._folder, self._number = set_mode(copied(model), False), folder, 0
        self._example = example
        names = [str(name) for name in arguments_by_name(model, example)]
        inputs: dict[str, tuple[Any, tuple[int | None, ...]]] = {
            name: (one.numpy().dtype, tuple(one.shape)) for name, one in zip(names, gather(example), strict=True)
        }
        self.batches = calibration_batches(batches, inputs, images, type(model).__name__)
        self.layers = tuple(path for path, one in self._model.named_modules() if isinstance(one, LAYERS))
        self.file = self._save(self._program(self._model))

    def _program(self, module: nn.Module) -> Any:
        positional, named = split(self._example)
        with _quietly():
            try:
                return torch.export.export(module, positional, dict(named))
            except Exception as error:  # of the exporter, or of the model's own code
                reraise_shortage(error)
                raise RunError(f"{type(self._model).__name__} cannot be exported: {reason_of(error)}") from error

    def _save(self, program: Any) -> Path:
        self._number += 1
        path = self._folder / f"{self._number}.pt2"
        with _quietly(), archive_file(path) as stream:
            torch.export.save(program, stream)
        return path

    def quantize(self, way: str, layers: frozenset[str]) -> Path:
        """Quantize some of the layers, and return the new program's file."""
        with _quietly():
            from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
            from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

            config, quantizer = x86.get_default_x86_inductor_quantization_config(), x86.X86InductorQuantizer()
            if len(layers) > 1 or len(self.layers) == 1:
                quantizer.set_global(config)
            for layer in self.layers:
                quantizer.set_module_name_qconfig(layer, config if layer in layers else None)
            try:
                prepared = prepare_pt2e(self._program(self._model).module(), quantizer)
                for batch in self.batches:
                    self._run(prepared, batch)
                return self._save(self._program(convert_pt2e(prepared)))
            except RunError:
                raise
            except Exception as error:  # operators that torchao does not expect
                reraise_shortage(error)
                name = type(self._model).__name__
                raise RunError(f"{name}: torchao cannot quantize it: {reason_of(error)}; stay in float") from error

    def _run(self, module: Any, batch: Batch) -> list[Tensor]:
        positional, named = split(self._example)
        tensors = [torch.from_numpy(array) for array in batch.values()]
        count = len(positional)
        with torch.no_grad():
            return gather(module(*tensors[:count], **dict(zip(named, tensors[count:], strict=True))))

    def outputs(self, file: Path) -> list[Array]:
        """Return what a program computes from the first calibration data."""
        with _quietly():
            module = torch.export.load(file).module()
            found = [one for batch in sensitivity_batches(self.batches) for one in self._run(module, batch)]
        return [np.asarray(one) for one in found]

    def described(self, restored: Sequence[LayerError]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the layers in int8, and those in float with the reason."""
        errors = {one.layer: one.error for one in restored}
        floats = {
            name: f"returned to float: alone in int8 it changes the output by {share(error)}"
            for name, error in errors.items()
        }
        return tuple(name for name in self.layers if name not in errors), floats

    def compile(self, file: Path, package: Path) -> None:
        """Write the AOTInductor package of a program; weights are constants, which int8 kernels need."""
        freezing = torch._inductor.config.patch(freezing=True)
        with _quietly(), torch.no_grad(), freezing, archive_file(package) as stream:
            try:
                torch._inductor.aoti_compile_and_package(torch.export.load(file), package_path=stream)
            except Exception as error:  # of the compilers
                reraise_shortage(error)
                name = type(self._model).__name__
                raise RunError(f"{name}: AOTInductor cannot compile it in int8: {reason_of(error)}") from error


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations in torch and torchao themselves
        yield
