"""Hashes of settings and of models: by these results are found again."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from prunekit.channels.copying import named_tensors


def digest(value: Any) -> str:
    """A short hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names, shapes and bytes of all parameters and buffers."""
    result = hashlib.sha256()
    for name, tensor in named_tensors(model):
        result.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        result.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
