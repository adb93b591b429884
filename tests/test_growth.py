"""Memory of a process that prunes again and again: classes and modules of what is gone are gone too."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import prunekit as pk
from prunekit.channels.tracing.call_sites import weak_cache
from prunekit.measure.latency_profile.network_timing import structure_hash

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def made() -> type[nn.Module]:
    """A class that is defined anew, as in a notebook's cell that runs again; its size is fixed in its Python."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
            self.last = nn.Linear(8 * 6 * 6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.two(self.norm(self.one(x)).relu())
            return self.last(x.view(x.shape[0], 8 * 6 * 6))  # type: ignore[no-any-return]

    return Own


def pruned(cls: type[nn.Module], folder: Path) -> None:
    pk.prune(cls(), X, macs=0.5)


def calibrated(cls: type[nn.Module], folder: Path) -> None:
    pk.prune(cls(), calibration=torch.randn(16, 3, 8, 8), macs=0.5)


def saved(cls: type[nn.Module], folder: Path) -> None:
    result = pk.prune(cls(), X, macs=0.5)
    pk.save(result, folder / "small")
    copy.deepcopy(pk.load(folder / "small", model=cls()))
    structure_hash(result.model)


def masked(cls: type[nn.Module], folder: Path) -> None:
    model = cls()
    plan = pk.plan(model, X, macs=0.5)
    with pk.masked(model, plan):
        model(X)
    pk.compact(model, plan)


@pytest.mark.slow
@pytest.mark.parametrize("use", [pruned, calibrated, saved, masked], ids=lambda use: use.__name__)
def test_what_is_pruned_and_dropped_is_gone(use: Callable[[type[nn.Module], Path], None], tmp_path: Path) -> None:
    classes = []
    for _ in range(3):
        cls = made()
        use(cls, tmp_path)
        classes.append(weakref.ref(cls))
        del cls
    gc.collect()
    assert [one() for one in classes] == [None] * 3


@pytest.mark.slow
def test_repeated_prunes_leave_no_modules_and_no_classes() -> None:
    cls = made()
    pruned(cls, Path())
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is nn.Conv2d}
    for _ in range(3):
        pruned(cls, Path())
    gc.collect()
    assert [each for each in gc.get_objects() if type(each) is nn.Conv2d and id(each) not in before] == []
    assert cls.__subclasses__() == []


def test_a_class_with_sizes_is_made_once_while_it_lives() -> None:
    cls = made()
    model = cls()
    one, other = (pk.prune(model, X, macs=0.5).model for _ in range(2))
    assert type(one) is type(other) is not cls


def test_a_weak_cache_computes_once_while_its_key_lives() -> None:
    called = list[tuple[type, int]]()

    @weak_cache
    def name_of(cls: type, number: int) -> str:
        called.append((cls, number))
        return f"{cls.__name__}{number}"

    cls = type("Made", (), {})
    assert [name_of(cls, number) for number in (1, 2, 1)] == ["Made1", "Made2", "Made1"]
    assert called == [(cls, 1), (cls, 2)]
    called.clear()
    there = weakref.ref(cls)
    del cls
    gc.collect()
    assert there() is None
