"""The user's own model: what a function in a Python file returns."""

from __future__ import annotations

from torch import nn

from prunekit.errors import ModelError
from prunekit.user_code import run_factory


def load_factory(reference: str) -> nn.Module:
    """Runs `file.py:factory` and returns the model it builds. The file's code is run: name only files you trust.

    Args:
        reference: path of a Python file, a colon, and the name of a function or class that takes no arguments; it
            must build a new model at each call, because the file is run once.

    Raises:
        ModelError: no such file or name, the code raises, or what it returns is no `nn.Module`.
    """
    model = run_factory(reference, ModelError)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{reference}: expected the factory to return an nn.Module, got {type(model).__name__}")
    return model
