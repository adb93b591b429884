"""Worker processes: the same batches whether they stay or not, and none is left behind."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from torch import Tensor

from prunekit.data.augmentation import Draw
from prunekit.data.datasets import ImageTransform, TensorImages
from prunekit.data.loader import Batches, batches
from prunekit.settings.inputs import Workers

STAYING, LEAVING = Workers(1), Workers(1, persistent=False)


@dataclass(frozen=True, eq=False)
class Probing(TensorImages):
    """An image holds the number of the process that read it, and what Python, NumPy and torch draw there."""

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        drawn = torch.tensor([os.getpid(), random.random(), np.random.rand(), float(torch.rand(()))])
        return drawn.expand(len(indices), 4), self.labels[indices]


def probing(workers: int | Workers, seed: int = 3) -> Batches:
    plain = TensorImages(torch.zeros(12, 3, 4, 4, dtype=torch.uint8), torch.arange(12), ImageTransform(4))
    return batches(Probing(plain.pixels, plain.labels, plain.transform), 4, shuffle_seed=seed, workers=workers)


def processes(loaded: Batches) -> set[int]:
    return {int(images[0, 0]) for images, _ in loaded}


def labels_of(loaded: Batches | Iterator[tuple[Tensor, Tensor]]) -> list[list[int]]:
    return [labels.tolist() for _, labels in loaded]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()  # the traceback of an error that was caught holds what read
    assert not active_children()


def test_workers_stay_from_epoch_to_epoch_unless_told_otherwise() -> None:
    staying, leaving = probing(STAYING), probing(LEAVING)
    assert processes(staying) == processes(staying.at_epoch(1)) == processes(staying.at_epoch(7))
    assert len(processes(leaving) | processes(leaving.at_epoch(1))) == 2
    assert os.getpid() not in processes(staying)


@pytest.mark.parametrize("workers", [LEAVING, STAYING, Workers(2, prefetch=1), Workers(2, prefetch=4)])
def test_batches_are_the_same_however_they_are_read(workers: Workers) -> None:
    loaded = probing(workers)
    for epoch in (0, 1, 0):
        assert labels_of(loaded.at_epoch(epoch)) == labels_of(probing(0).at_epoch(epoch))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, LEAVING])
def test_what_a_data_set_draws_itself_depends_on_seed_epoch_and_batch_alone(workers: int | Workers) -> None:
    def drawn(loaded: Batches) -> list[list[float]]:
        return [images[0, 1:].tolist() for images, _ in loaded]

    here, there = probing(0), probing(workers)
    found = [drawn(here.at_epoch(epoch)) for epoch in (0, 1)]
    assert [drawn(there.at_epoch(epoch)) for epoch in (0, 1)] == found
    assert drawn(there) == found[0]
    assert len({value for epoch in found for batch in epoch for value in batch}) == 18
    assert drawn(probing(workers, seed=4)) != found[0]


def test_reading_here_leaves_every_random_state_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    list(probing(0))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_a_pass_may_be_left_and_another_begun() -> None:
    loaded = probing(STAYING)
    expected = labels_of(probing(0).at_epoch(1))
    (process,) = processes(loaded)
    next(iter(loaded))
    assert labels_of(loaded.at_epoch(1)) == expected
    assert processes(loaded) == {process}


def test_two_passes_at_once_do_not_disturb_each_other() -> None:
    loaded = probing(STAYING)
    pairs = list(zip(loaded, loaded.at_epoch(1), strict=True))
    assert [one[1].tolist() for one, _ in pairs] == labels_of(probing(0))
    assert [other[1].tolist() for _, other in pairs] == labels_of(probing(0).at_epoch(1))


@dataclass(frozen=True, eq=False)
class Failing(TensorImages):
    """Cannot read its last image."""

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        if 11 in indices:
            raise ValueError("image 11 is special")
        return super().fetch(indices, draw)


@pytest.mark.slow
def test_after_an_error_reading_begins_anew() -> None:
    plain = TensorImages(torch.zeros(12, 3, 4, 4, dtype=torch.uint8), torch.arange(12), ImageTransform(4))
    loaded = batches(Failing(plain.pixels, plain.labels, plain.transform), 4, shuffle_seed=None, workers=STAYING)
    for _ in range(2):
        read = iter(loaded)
        assert [next(read)[1].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(ValueError, match="image 11 is special"):
            next(read)


def test_memory_is_pinned_for_cuda_alone() -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without CUDA")
    images = torch.zeros(12, 3, 4, 4, dtype=torch.uint8)
    dataset = TensorImages(images, torch.arange(12), ImageTransform(4))
    loaded = batches(dataset, 4, shuffle_seed=None, workers=1, device=torch.device("cpu"))
    assert not any(images.is_pinned() for images, _ in loaded)


@pytest.mark.gpu
def test_memory_is_pinned_where_batches_go_to_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    dataset = TensorImages(torch.zeros(12, 3, 4, 4, dtype=torch.uint8), torch.arange(12), ImageTransform(4))
    for pin in (True, False):
        loaded = batches(dataset, 4, shuffle_seed=0, workers=Workers(1, pin_memory=pin), device=torch.device("cuda"))
        for epoch in range(2):
            assert {images.is_pinned() and labels.is_pinned() for images, labels in loaded.at_epoch(epoch)} == {pin}
