"""Every public name shows itself in an example that runs, and has a line on the page of the API."""

from __future__ import annotations

import doctest
import inspect
import pydoc
import re
from pathlib import Path

import pytest
import torch

import prunekit

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "prunekit" / "guide" / "reference" / "api.md").read_text(encoding="utf-8")


def docstring(name: str) -> str:
    return inspect.getdoc(getattr(prunekit, name)) or ""


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize("name", prunekit.__all__)
def test_every_public_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = docstring(name)
    assert "Example:\n" in text, f"prunekit.{name}: its docstring has no section `Example:` with >>> code"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    said: list[str] = []
    done = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert done.attempted
    assert not done.failed, "".join(said)


def test_the_page_of_the_api_has_every_public_name_and_no_other() -> None:
    assert {*re.findall(r"\bpk\.(\w+)", PAGE)} == {*prunekit.__all__}
    lines = re.findall(r"^- (`pk\..*)", PAGE, re.M)
    assert {name for line in lines for name in re.findall(r"`pk\.(\w+)", line)} == {*prunekit.__all__}


@pytest.mark.parametrize("name", ["Pruner", "plan", "prune"])
def test_help_shows_a_parameter_on_each_line(name: str) -> None:
    text = pydoc.plaintext.document(getattr(prunekit, name))
    assert "    macs: float | None = None,\n" in text
    assert max(map(len, text.splitlines())) <= 130


def test_public_names_are_in_order_and_found_in_the_package() -> None:
    assert [*prunekit.__all__] == sorted(prunekit.__all__)
    assert prunekit.Pruner in vars(prunekit).values()  # used, which leaves modules in the package
    assert [name for name in dir(prunekit) if not name.startswith("_")] == [*prunekit.__all__]
