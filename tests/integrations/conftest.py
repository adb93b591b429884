"""ultralytics writes its settings into a folder of the suite, installs and shows nothing, and leaves no mode behind."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp(prefix="ultralytics-"))
os.environ["YOLO_AUTOINSTALL"] = os.environ["YOLO_VERBOSE"] = "false"


@pytest.fixture(autouse=True)
def _runs_in_a_folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `project=` ultralytics writes beside its own package while pytest runs."""
    settings = sys.modules.get("ultralytics.cfg")
    if settings is not None:
        monkeypatch.setattr(settings, "TESTS_RUNNING", False)
        monkeypatch.setitem(settings.SETTINGS, "runs_dir", str(tmp_path / "runs"))


@pytest.fixture(autouse=True)
def _algorithms_of_other_tests_are_any() -> Iterator[None]:
    """ultralytics' trainers make torch's algorithms deterministic for the rest of the process."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
