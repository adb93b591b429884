"""The guide's page on YOLO: its blocks run as written, on a small model and drawn shapes, but for budgets of time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drawn_shapes import draw_shapes

pytest.importorskip("ultralytics")
from small_yolos import small_yolo
from ultralytics import YOLO

import prunekit

ROOT = Path(__file__).parents[2]
PAGE = (Path(prunekit.__file__).parent / "guide" / "how_to" / "yolo.md").read_text(encoding="utf-8")
SHORTER = (
    ("epochs=50", "epochs=2, batch=4, nbs=4, workers=0, plots=False"),
    ("epochs=10", "epochs=1, batch=4, nbs=4, workers=0, plots=False"),
    ("epochs=20", "epochs=1"),
    ("imgsz=640, ", ""),
    ('"coco8.yaml"', '"shapes/data.yaml"'),
    ('export(format="onnx")', 'export(format="onnx", simplify=False)'),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the library's exporter
def test_the_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw_shapes(tmp_path / "shapes", images=12)
    for name in ("yolo11n.pt", "yolov8n.pt"):
        dense = small_yolo(tmp_path)
        dense.model.args["imgsz"] = 64
        dense.ckpt = {"train_args": dict(dense.model.args)}
        dense.save(name)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S)[:3])
    for old, new in SHORTER:
        assert old in code, old
        code = code.replace(old, new)
    exec(compile(code, "yolo.md", "exec"), names := {"__name__": "__main__"})
    assert isinstance(names["small"], YOLO)
    assert (tmp_path / "small.pt").exists()
