"""How recipes name tasks; imports nothing that is slow to import."""

from __future__ import annotations

from typing import Literal

TaskName = Literal["image_classification", "segmentation", "text_classification", "own"]
