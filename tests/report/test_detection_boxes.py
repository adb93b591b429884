"""Pictures of boxes: what is drawn where, and that the names of classes can be read."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor, ImageDraw, ImageFont
from synthetic_run import write_run

from prunekit.errors import ArtifactError
from prunekit.report.figures.detection_boxes import (
    COLORS,
    CONFIDENCE,
    LINE,
    TEXT,
    Pixels,
    boxes_side_by_side,
    with_boxes,
    write_png,
)
from prunekit.report.run_data import read_run
from prunekit.report.sections.detections import detections

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


def test_a_file_has_every_pixel_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    path = write_png(tmp_path / "new" / "boxes.png", pixels)
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(image), pixels)
    assert [file.name for file in path.parent.iterdir()] == ["boxes.png"]


def test_a_page_has_as_many_pictures_as_fit_and_names_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", groups=2)
    assert detections(read_run(run)) is None
    paths = [
        write_png(run / "detections" / f"0{number}.png", np.full((4, 4, 3), number, np.uint8)) for number in (0, 1)
    ]
    rows = [{"image": number, "picture": path.name, "boxes": {}} for number, path in enumerate(paths)]
    (run / "detections" / "detections.json").write_text(json.dumps({"models": ["dense"], "images": rows}))
    contents = [path.read_bytes() for path in paths]
    monkeypatch.setattr("prunekit.report.sections.detections.LARGEST", len(contents[0]))
    found = detections(read_run(run))
    assert found is not None
    first, second = found["detections"]["images"]
    assert first["data"] == "data:image/png;base64," + base64.b64encode(contents[0]).decode()
    assert (second["data"], second["file"]) == (None, "detections/01.png")
    paths[0].unlink()
    with pytest.raises(ArtifactError, match=r"00\.png: cannot be read"):
        detections(read_run(run))


def test_a_page_shows_no_file_of_another_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", groups=2)
    secret = write_png(tmp_path / "secret.png", np.zeros((4, 4, 3), np.uint8))
    (run / "detections").mkdir()
    for named in ("../../secret.png", str(secret)):
        rows = [{"image": 0, "picture": named, "boxes": {}}]
        (run / "detections" / "detections.json").write_text(json.dumps({"models": ["dense"], "images": rows}))
        with pytest.raises(ArtifactError, match=r"detections/secret\.png: cannot be read"):
            detections(read_run(run))
