"""Errors for want of memory: whatever the code around them takes errors for, they are said to be that."""

from __future__ import annotations

import ast
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor, nn

import prunekit
import prunekit as pk
from prunekit import errors
from prunekit.cli import cli
from prunekit.data.datasets import FolderImages, TensorImages
from prunekit.data.library_datasets import mapped
from prunekit.data.sources import load_splits
from prunekit.data.splits import image_transform_of
from prunekit.data.user_data import sample_splits
from prunekit.errors import MemoryShortageError, ModelError, is_shortage
from prunekit.models.preprocessing import opened
from prunekit.settings.inputs import DataSettings
from prunekit.settings.train import TrainSettings
from prunekit.tasks.task import get_task
from prunekit.training.compatibility import check_fits
from prunekit.training.loop import fit

ROOT = Path(prunekit.__file__).parent
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."
OF_OTHERS = {"distributed/process_group.py", "utils/context.py"}
"""Files whose handlers catch errors of a connection, and of a text that names a device."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 8. TiB for an array"),
        RuntimeError(ALLOCATOR),
        RuntimeError("could not create a primitive"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("/lib/period.so: failed to map segment from shared object"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryShortageError("a batch does not fit"),
    ],
    ids=str,
)
def test_want_of_memory_is_recognized(error: Exception) -> None:
    assert is_shortage(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("could not create a primitive descriptor for a convolution"),
        OSError("out of memory error when reading image file"),  # Pillow, of a damaged file
        OSError(errno.ENOSPC, "No space left on device"),
        ImportError("/tmp/x.so: failed to map segment from shared object: Operation not permitted"),
        ModelError("it runs out of memory"),
        KeyboardInterrupt(),
    ],
    ids=str,
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_shortage(error)


class _Starved(nn.Module):
    """A classifier of images that finds no memory for more of them than it takes."""

    def __init__(self, error: Exception, takes: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(192, 10)
        self.error, self.takes = error, takes

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.takes:
            raise self.error
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("could not create a primitive")], ids=repr)
def test_a_model_without_memory_is_not_told_to_take_other_sizes(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        check_fits(_Starved(error), load_splits(DataSettings(image_size=8)), torch.device("cpu"))
    assert caught.value is error
    with pytest.raises(type(error)):
        pk.predict(_Starved(error), torch.randn(2, 192))


def test_a_batch_that_does_not_fit_is_named_with_what_takes_less() -> None:
    starved, splits = _Starved(RuntimeError("std::bad_alloc"), takes=5), load_splits(DataSettings(image_size=8))
    with pytest.raises(MemoryShortageError) as caught:
        fit(starved, splits, TrainSettings(epochs=1), device=torch.device("cpu"), seed=0, batch=6)
    message = str(caught.value)
    assert message.startswith(
        "out of memory on cpu in epoch 1, step 1: a batch of 6 images of 3x8x8 does not fit (Runtime"
    )
    assert "`accumulate: 2` with half of data.batch" in message
    assert is_shortage(caught.value)


def test_images_for_which_memory_is_short_are_not_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    transform = image_transform_of(DataSettings(source="imagefolder", image_size=8))
    folder = FolderImages((tmp_path / "a.png",), torch.zeros(1, dtype=torch.int64), transform)

    def starved(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", starved)
    with pytest.raises(MemoryError):
        folder.fetch(torch.zeros(1, dtype=torch.int64))
    assert not folder.corrupt.found
    with pytest.raises(MemoryError):
        opened(tmp_path / "a.png")


class _Rows:
    """A data set that finds no memory for its second sample."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index:
            raise RuntimeError(ALLOCATOR)
        return torch.zeros(3, 8, 8), index % 2


def test_own_data_for_which_memory_is_short_is_not_called_wrong() -> None:
    settings = DataSettings("own", image_size=8)
    transform = image_transform_of(settings)
    corrupt = TensorImages(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1), transform).corrupt
    with pytest.raises(RuntimeError, match="can't allocate"):
        mapped(_Rows(), settings, transform, "train", corrupt)
    with pytest.raises(RuntimeError, match="can't allocate"):
        sample_splits({"train": _Rows(), "test": _Rows()}, get_task("segmentation"))


def test_a_command_says_that_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 8, 8), np.float32))

    def starved(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("prunekit.jobs.analyses.predict.predict_target", starved)
    monkeypatch.setattr("prunekit.jobs.run.subject_sources.resolve", starved)
    result = CliRunner().invoke(cli, ["predict", "resnet8", "--zoo", "cifar", str(tmp_path / "x.npy")])
    assert result.exit_code == 1
    assert "out of memory (MemoryError)" in result.stderr
    assert "not expected" not in result.stderr
    assert "Traceback" not in result.stderr


FAMILY = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
WIDE = {"Exception", "BaseException", "RuntimeError", "MemoryError"}


def _handlers(tree: ast.AST) -> Iterator[tuple[int, set[str], list[str]]]:
    """Yield the line of each handler that would take an allocator's error, what it raises, and what it calls first."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler) or node.type is None:
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if WIDE.isdisjoint(ast.unparse(kind) for kind in kinds):
            continue
        inside = [part for statement in node.body for part in ast.walk(statement)]
        raised = {
            part.exc.func.id
            for part in inside
            if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call) and isinstance(part.exc.func, ast.Name)
        }
        called = [part.func.id for part in inside if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)]
        yield node.lineno, raised & FAMILY, called


def test_no_handler_gives_another_cause_for_want_of_memory() -> None:
    """Who takes any error for one cause, and says so, lets want of memory through first."""
    wrong, seen = [], 0
    for path in sorted(ROOT.rglob("*.py")):
        place = str(path.relative_to(ROOT))
        for line, raised, called in _handlers(ast.parse(path.read_text(encoding="utf-8"))):
            seen += bool(raised)
            if raised and place not in OF_OTHERS and {"reraise_shortage", "is_shortage"}.isdisjoint(called):
                wrong.append(f"{place}:{line} raises {', '.join(sorted(raised))}")
    assert seen > 15
    assert not wrong, "\n".join(wrong)
