"""The user's own model: what a function in a Python file returns."""

from __future__ import annotations

from typing import Any

from torch import nn

from prunekit.errors import ModelError, UsageError
from prunekit.inputs import example
from prunekit.user_code import run_factory


def load_factory(reference: str) -> nn.Module:
    """Runs `file.py:factory` and returns the model it builds. The file's code is run: name only files you trust.

    Args:
        reference: path of a Python file, a colon, and the name of a function or class that takes no arguments; it
            must build a new model at each call, because the file is run once. It may return (model, example), see
            `load_with_example`.

    Raises:
        ModelError: no such file or name, the code raises, or what it returns is no `nn.Module`.
    """
    return load_with_example(reference)[0]


def load_with_example(reference: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """As `load_factory`, with the example that the factory returns beside the model; None where it returns none.

    Raises:
        ModelError: as for `load_factory`; or the example is none, or not one of this model.
    """
    found = run_factory(reference, ModelError)
    model, given = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{reference}: expected the factory to return an nn.Module, or (module, example), got "
            f"{type(found).__name__}"
        )
    try:
        return model, None if given is None else example(model, given)
    except UsageError as error:
        raise ModelError(f"{reference}: {error}") from None
