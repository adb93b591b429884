"""Images in every form that people have: lists of any sizes, batches of tuples, samples one by one, other packages'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import prunekit
from prunekit.errors import DataError, ModelError
from prunekit.tasks.batches import IMAGES, ModelBatches, joined_inputs

SIZES = ((12, 16), (16, 12), (16, 16), (20, 8))
DRAWN = torch.Generator().manual_seed(0)
UNEVEN = [torch.rand(3, *SIZES[i % 4], generator=DRAWN, dtype=torch.float64) for i in range(12)]
EVEN = [torch.rand(3, 12, 12, generator=DRAWN, dtype=torch.float64) for _ in range(12)]
TARGETS = [{"boxes": torch.rand(1 + i % 3, 4, generator=DRAWN), "labels": torch.ones(1 + i % 3)} for i in range(12)]


class Dense(nn.Module):
    """Takes images as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stem, self.middle, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 4, 1)
        self.double().eval()

    def forward(self, images: Tensor) -> Any:
        return self.head(self.middle(self.stem(images).relu()).relu())


class Listed(Dense):
    """Takes a list of images of any sizes, and says so."""

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        return [Dense.forward(self, image[None])[0].mean((1, 2)) for image in images]


class Silent(Dense):
    """Takes a list of images, and has no annotations."""

    def forward(self, images, targets=None):  # type: ignore[no-untyped-def,override]
        if not isinstance(images, list):
            raise TypeError("expected a list")
        return Listed.forward(self, images)  # type: ignore[arg-type]


class Pairs(Dataset[Any]):
    """Images with their targets."""

    def __init__(self, images: list[Tensor]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], TARGETS[index]


class Stream(IterableDataset[Any]):
    """Samples, as webdataset yields them."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def zipped(samples: Any) -> Any:
    """What torchvision's references have as `collate_fn`."""
    return tuple(zip(*samples, strict=True))


FORMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "a list": list,
    "a tuple": tuple,
    "lists with targets": lambda images: [(images[:6], TARGETS[:6]), (images[6:], TARGETS[6:])],
    "tuples with targets": lambda images: DataLoader(Pairs(images), 5, collate_fn=zipped),
    "lists alone": lambda images: DataLoader(images, 2, collate_fn=list),  # type: ignore[arg-type]
    "a data set": Pairs,
    "a generator of samples": lambda images: (pair for pair in zip(images, TARGETS, strict=True)),
    "a generator of images": lambda images: (image for image in images),
    "an iterable data set": lambda images: Stream([{"jpg": image, "cls": 1, "__key__": "a"} for image in images]),
    "samples by name": lambda images: [{"image": image, "label": 1} for image in images],
}


@pytest.mark.parametrize("kind", [Dense, Listed, Silent])
@pytest.mark.parametrize("form", FORMS)
def test_images_come_in_every_form(form: str, kind: type[Dense]) -> None:
    images = EVEN if kind is Dense else UNEVEN
    model = kind()
    if form == "a data set" and kind is Dense:
        pytest.skip("of targets with several sizes torch makes no batch")
    (found,) = joined_inputs(model, [inputs for inputs, _ in ModelBatches(model, FORMS[form](images))])
    assert isinstance(found, Tensor if kind is Dense else list)
    assert len(found) == len(images)
    assert all(torch.equal(one, image) for one, image in zip(found, images, strict=True))


@pytest.mark.parametrize("kind", [Listed, Silent])
def test_tuples_of_two_images_are_a_batch_where_the_model_takes_a_list(kind: type[Dense]) -> None:
    model = kind()
    found = [inputs[0] for inputs, _ in ModelBatches(model, DataLoader(UNEVEN, 2, collate_fn=tuple))]  # type: ignore[arg-type]
    assert [len(images) for images in found] == [2] * 6
    pairs = [*ModelBatches(Dense(), [(EVEN[0], EVEN[1]), (EVEN[2], EVEN[3])])]
    assert torch.equal(pairs[0][0][0], torch.stack([EVEN[0], EVEN[2]]))  # an image, and one to compare with
    assert torch.equal(pairs[0][1], torch.stack([EVEN[1], EVEN[3]]))


def test_long_lists_run_a_few_images_at_a_time() -> None:
    sizes = [len(inputs[0]) for inputs, _ in ModelBatches(Listed(), UNEVEN * 3)]
    assert sizes == [IMAGES, IMAGES, 36 - 2 * IMAGES]


def test_a_list_of_equal_images_gives_what_the_tensor_gives() -> None:
    class Both(Dense):
        def forward(self, images: Any) -> Any:
            return super().forward(torch.stack([*images])).mean((2, 3))

    results = [
        prunekit.prune(Both(), calibration=given, macs=0.5, progress=False) for given in (EVEN, torch.stack(EVEN))
    ]
    one, other = (result.repair for result in results)
    assert one is not None
    assert other is not None
    assert one.before == other.before > one.after == other.after
    for (_, left), (_, right) in zip(*(result.model.state_dict().items() for result in results), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", [Listed, Silent])
def test_every_function_takes_lists_of_images(kind: type[Dense]) -> None:
    model = kind()
    result = prunekit.prune(model, calibration=UNEVEN, macs=0.5, progress=False)
    assert result.repair is not None
    assert result.repair.kept
    assert result.repair.after < result.repair.before
    stats = prunekit.calibrate(model, UNEVEN, modules=["stem"], inputs=False, progress=False)
    assert sum(float(layer.count[0]) for layer in stats.layers.values()) == 6 * 8 * 6 + 8 * 8 * 3 + 10 * 4 * 3
    plan = prunekit.plan(model, UNEVEN[:2], macs=0.5)
    assert prunekit.verify(model, prunekit.compact(model, plan), plan, UNEVEN).inputs == 12
    thresholds = prunekit.calibrate_thresholds(model, UNEVEN, ["stem"], target=0.5, progress=False)
    assert thresholds.reached["stem"] == pytest.approx(0.5, abs=0.02)
    again = prunekit.StatsCollector(model, modules=["stem"], inputs=False).run(UNEVEN)
    assert {key: value.count.tolist() for key, value in again.layers.items()} == {
        key: value.count.tolist() for key, value in stats.layers.items()
    }
    assert prunekit.prune(model, UNEVEN[:2], macs=0.5).plan.channel_map.macs() == 8 * 12 * 16 // 4 * 27 + (
        8 * 12 * 16 // 4 * 72 + 4 * 12 * 16 // 4 * 8
    )


def test_batches_of_ultralytics_are_scaled_and_padded() -> None:
    model = Dense().float()
    model.__class__ = type("Detector", (Dense,), {"__module__": "ultralytics.nn.tasks"})
    wide, high = (torch.randint(256, (5, 3, *size), dtype=torch.uint8, generator=DRAWN) for size in ((8, 16), (16, 12)))
    batches = [{"img": img, "cls": torch.zeros(2, 1), "im_file": ["a"] * 5} for img in (wide, high)]
    (found,) = joined_inputs(model, [inputs for inputs, _ in ModelBatches(model, batches)])
    assert found.shape == (10, 3, 16, 16)
    assert torch.equal(found[:5, :, :8], wide / 255)
    assert torch.equal(found[5:, ..., :12], high / 255)
    assert torch.equal(found[0, :, 8:], torch.full((3, 8, 16), 114 / 255))
    assert prunekit.prune(model, batches[0], macs=0.5).model.head.out_channels == 4


@pytest.mark.parametrize(
    ("kind", "data", "says"),
    [
        (Dense, UNEVEN, "images of one size as one tensor.*annotate its first argument: list"),
        (Dense, [(image.numpy(), 0) for image in EVEN], r"torch.from_numpy\(array\)"),
        (Listed, [image.numpy() for image in UNEVEN], r"torch.from_numpy\(array\)"),
        (Listed, UNEVEN[:5], "at least 8 samples.*got a list of 5"),
        (Listed, [*UNEVEN[:9], UNEVEN[9] / 0], "sample 9 holds NaN or Inf"),
    ],
)
def test_what_cannot_be_used_is_named(kind: type[Dense], data: Any, says: str) -> None:
    with pytest.raises(DataError, match=f"(?s){says}"):
        prunekit.prune(kind(), calibration=data, macs=0.5, progress=False)


def test_pictures_of_pillow_are_refused_with_what_to_do() -> None:
    image = pytest.importorskip("PIL.Image").fromarray(np.zeros((12, 12, 3), np.uint8))
    for data in ([image] * 8, [(image, 0)] * 8, Stream([image] * 8)):
        with pytest.raises(DataError, match="pil_to_tensor"):
            [*ModelBatches(Dense(), data)]


def test_integers_of_unknown_origin_are_not_scaled() -> None:
    with pytest.raises(ModelError, match="does not run on"):
        prunekit.prune(Dense(), calibration=(torch.stack(EVEN) * 255).byte(), macs=0.5, progress=False)
