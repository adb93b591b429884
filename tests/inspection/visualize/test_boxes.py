"""Pictures of boxes: what is drawn where, and that the names of classes can be read."""

from __future__ import annotations

import pytest
import torch
from PIL import ImageColor, ImageDraw, ImageFont

from prunekit.inspection.visualize.image_grids import (
    COLORS,
    CONFIDENCE,
    LINE,
    TEXT,
    Pixels,
    boxes_side_by_side,
    with_boxes,
)

IMAGE = torch.full((3, 80, 80), 0.5)
CLASSES = ("circle", "square")
FACTOR = 4
"""How much an image of 80 pixels is enlarged."""


def found(boxes: list[list[float]], labels: list[int], scores: list[float] | None = None) -> dict[str, torch.Tensor]:
    made = {"boxes": torch.tensor(boxes).reshape(-1, 4), "labels": torch.tensor(labels, dtype=torch.int64)}
    return made if scores is None else made | {"scores": torch.tensor(scores)}


def colored(picture: Pixels, label: int) -> torch.Tensor:
    """Where a picture has the color of a class."""
    return (torch.from_numpy(picture.copy()) == torch.tensor(ImageColor.getrgb(COLORS[label]))).all(-1)


def test_a_box_is_drawn_on_its_edge_with_its_name_above() -> None:
    picture = with_boxes(IMAGE, found([[20, 30, 60, 70]], [1]), CLASSES)
    assert picture.shape == (80 * FACTOR, 80 * FACTOR, 3)
    marked = colored(picture, 1)
    left, top, right, bottom = (FACTOR * side for side in (20, 30, 60, 70))
    assert marked[top : bottom + 1, left : left + LINE].all()
    assert marked[bottom - LINE + 1 : bottom + 1, left : right + 1].all()
    assert not marked[top + LINE : bottom - LINE, left + LINE : right - LINE].any()
    assert not marked[bottom + 1 :].any()
    assert marked[top - TEXT : top, left].all()
    assert not marked[: top - 2 * TEXT].any()


def test_names_stay_within_the_picture() -> None:
    corner = with_boxes(IMAGE, found([[70, 0, 80, 10]], [0]), CLASSES)
    pen_width = round(1.2 * ImageFont.load_default(TEXT).getlength("circle"))
    marked = colored(corner, 0)
    assert marked[:TEXT, -pen_width:].float().mean() > 0.4
    nowhere = with_boxes(IMAGE, found([[-50, -50, -20, -20], [100, 100, 120, 130]], [0, 1]), CLASSES)
    assert nowhere.shape == corner.shape


@pytest.mark.parametrize("scores", [[CONFIDENCE, 0.9], [CONFIDENCE / 2, 0.9], [float("nan"), 0.9], [0.0, 0.0]])
def test_detections_of_low_scores_are_left_out(scores: list[float]) -> None:
    picture = with_boxes(IMAGE, found([[5, 30, 30, 60], [40, 30, 70, 60]], [0, 1], scores), CLASSES)
    assert [bool(colored(picture, label).any()) for label in (0, 1)] == [score >= CONFIDENCE for score in scores]


def test_no_boxes_leave_the_image_as_it_is() -> None:
    picture = with_boxes(IMAGE, found([], []), CLASSES)
    assert (picture == 128).all()


def test_names_have_scores_in_percent_and_ink_that_differs_from_their_color(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    text = ImageDraw.ImageDraw.text

    def spy(self: ImageDraw.ImageDraw, place: tuple[float, float], name: str, **how: object) -> None:
        written.append((name, how["fill"]))
        text(self, place, name, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", spy)
    with_boxes(IMAGE, found([[5, 30, 30, 60], [40, 30, 70, 60], [0, 0, 9, 9]], [1, 4, 0], [0.876, 0.5, 0.1]), CLASSES)
    assert written == [("square 88", "white"), ("4 50", "black")]


def test_panels_stand_side_by_side() -> None:
    side = found([[20, 30, 60, 70]], [0], [0.8])
    picture = boxes_side_by_side(IMAGE, {"labeled": side, "dense": side, "pruned": side}, CLASSES, ("Image 1", "boxes"))
    columns = colored(picture, 0).any(0).nonzero().flatten()
    assert columns.max() > 2.4 * 80 * FACTOR
    assert picture.shape[1] > 3 * 80 * FACTOR
