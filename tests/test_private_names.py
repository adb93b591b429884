"""Private names of torch and Accelerate stand in one module, and are there in the installed versions."""

from __future__ import annotations

import ast
import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

import prunekit
from prunekit.utils import private_torch

ROOT = Path(prunekit.__file__).parent
PRIVATE = re.compile(r"torch(?:\.\w+)*\._[a-z]\w*(?:\.\w+)*|torch\._C(?:\.\w+)*")
DOCUMENTED = (
    "torch._dynamo.config", "torch._dynamo.graph_break", "torch._dynamo.lookup_backend", "torch._inductor.config",
    "torch._inductor.aoti_compile_and_package", "torch._inductor.aoti_load_package", "torch.cuda._sleep",
    "torch.ops.", "torch.utils._python_dispatch", "torch.utils._pytree",
)  # fmt: skip
"""Names with an underscore that torch documents, or teaches in its notes on modes, operators and timing."""
TYPES = ("torch._C._distributed_c10d",)
"""Modules that are imported for type checkers alone."""


def used(path: Path) -> set[str]:
    """Dotted private names in a file's code; those in texts and comments are not code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    dotted |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name for name in dotted if PRIVATE.fullmatch(name)}


def test_no_other_module_uses_private_names() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        if path.name != "private_torch.py"
        for name in used(path)
        if not name.startswith((*DOCUMENTED, *TYPES)) and name not in ("torch._dynamo", "torch._inductor")
    }
    assert found == set()


@pytest.mark.parametrize("name", sorted(used(Path(private_torch.__file__))))
def test_this_version_of_torch_has_the_name(name: str) -> None:
    place: object = torch
    for part in name.split(".")[1:]:
        if not hasattr(place, part) and isinstance(place, type(torch)):
            found = importlib.util.find_spec(f"{place.__name__}.{part}")
            assert found is not None, f"torch {torch.__version__} has no {name}: see private_torch.py"
            place = importlib.import_module(f"{place.__name__}.{part}")
            continue
        assert hasattr(place, part), f"torch {torch.__version__} has no {name}: see private_torch.py"
        place = getattr(place, part)


def test_the_names_do_what_they_say() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(private_torch.in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not private_torch.in_backward()
    inside: list[tuple[bool, bool]] = []

    def function(value: torch.Tensor) -> torch.Tensor:
        inside.append((private_torch.in_function_transform(), private_torch.is_functorch_wrapper(value)))
        return value

    torch.vmap(function)(torch.ones(2))
    assert inside == [(True, True)]
    assert (private_torch.in_function_transform(), private_torch.is_functorch_wrapper(x)) == (False, False)
    assert private_torch.has_storage(x)
    assert not private_torch.dispatches(x)
    assert private_torch.is_composite("aten::matmul")
    assert not private_torch.is_composite("aten::mm")


def test_onnx_operators_are_read_once_where_that_is_asked_for() -> None:
    pytest.importorskip("onnxscript")
    apis = importlib.import_module("torch.onnx._internal._lazy_import").onnxscript_apis
    with private_torch.onnx_operators_read_once():
        assert apis.get_torchlib_ops() is apis.get_torchlib_ops()
    assert "get_torchlib_ops" not in vars(apis)


def test_accelerate_leaves_the_attributes_that_are_looked_for() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    module = hooks.add_hook_to_module(nn.Linear(1, 1), hooks.ModelHook())
    assert hasattr(module, private_torch.ACCELERATE_HOOK), f"Accelerate {version('accelerate')}"
    source = Path(hooks.__file__).with_name("accelerator.py").read_text(encoding="utf-8")
    assert private_torch.ACCELERATE_PREPARED in source, f"Accelerate {version('accelerate')}"


OURS = {
    name
    for path in ROOT.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and re.match("_[A-Za-z]", name := node.name)
}
"""Private functions, methods and classes of the package."""


def patched(path: Path) -> set[str]:
    """Names that a test replaces by `setattr(owner, "name", value)` or `setattr("place.name", value)`."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    named = [
        argument.value.rsplit(".", 1)[-1]
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "setattr"
        for argument in call.args[:2]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    return set(named)


def test_tests_patch_no_private_function_of_the_package() -> None:
    tests = sorted(Path(__file__).parent.rglob("*.py"))
    assert {f"{path.name}: {name}" for path in tests for name in patched(path) & OURS} == set()
