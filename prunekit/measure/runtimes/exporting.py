"""Models as ONNX files, for the runtimes that take these."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from prunekit.export import export_onnx
from prunekit.measure.runtimes.setting import Inputs, Source


def exported(model: nn.Module, inputs: Inputs, batches: Iterable[int], folder: Path) -> Source:
    """A model as ONNX files, one for each batch, in a folder that is made for them.

    Raises:
        RunError: the exporter cannot follow the model.
    """
    folder.mkdir()
    with torch.inference_mode(False), torch.no_grad():  # export traces, which needs version counters
        return Source(
            files={
                batch: export_onnx(model, inputs.sample(batch), folder / f"{batch}.onnx")
                for batch in sorted(set(batches))
            }
        )
