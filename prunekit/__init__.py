"""prunekit: prune a trained PyTorch model to a budget, and prove what came out.

Public names stand in `__init__.pyi`, and are imported on first use (PEP 562): `import prunekit` does not load torch.
"""

import ast
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

__version__ = version("prunekit")


@cache
def _places() -> dict[str, tuple[str, str]]:
    """Return the module of each public name, and its name there."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_places())
    if name not in _places():
        raise AttributeError(f"module 'prunekit' has no attribute {name!r}")
    module, attribute = _places()[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_places(), "__all__", "__doc__", "__name__", "__version__"])
