"""Every public name shows itself in an example that runs, and stands in the README or a guide."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from little_time import time_little

import prunekit

ROOT = Path(__file__).parent.parent
PAGES = "\n".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "prunekit" / "guide").glob("*.md"))
)
WITHOUT_EXAMPLE: set[str] = {
    "finetune",
    "profile",
}
"""Names whose example is still to come; it only shrinks."""
WITHOUT_PAGE: set[str] = {
    "ActivationThresholds",
    "Benchmark",
    "BudgetSettings",
    "CalibrationSettings",
    "Capture",
    "ChangingMasks",
    "ChannelMap",
    "ChannelStats",
    "DataSettings",
    "Diagnosis",
    "Evidence",
    "Explanation",
    "GradientFlow",
    "JobSettings",
    "Keywords",
    "ModelSettings",
    "ModelSummary",
    "Own",
    "Plan",
    "Profile",
    "PruneSettings",
    "Pruned",
    "PrunekitError",
    "RepairReport",
    "RepairSettings",
    "RunResult",
    "Sensitivity",
    "StatsCollector",
    "TrainSettings",
    "Verification",
    "bench",
    "calibrate",
    "channels_last",
    "clamp_activation_grad",
    "explain",
    "flush_subnormals",
    "fold_batchnorm",
    "profile",
    "recalibrate_batchnorm",
    "sensitivity",
    "summary",
    "transfer_average",
}
"""Names that no page shows yet; it only shrinks."""


def docstring(name: str) -> str:
    return inspect.getdoc(getattr(prunekit, name)) or ""


@pytest.mark.parametrize("name", sorted({*prunekit.__all__} - WITHOUT_EXAMPLE))
def test_every_public_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = docstring(name)
    assert "Example:\n" in text, f"prunekit.{name}: its docstring has no section `Example:` with >>> code"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path / "cache"))
    time_little(monkeypatch, attempts=1)
    torch.manual_seed(0)
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    said: list[str] = []
    done = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert done.attempted
    assert not done.failed, "".join(said)


@pytest.mark.parametrize("name", sorted({*prunekit.__all__} - WITHOUT_PAGE))
def test_every_public_name_stands_in_the_readme_or_a_guide(name: str) -> None:
    assert re.search(rf"\b(pk|prunekit)\.{name}\b", PAGES), f"prunekit.{name} is shown in neither README nor guides"


def test_lists_of_names_to_come_hold_no_others() -> None:
    assert not [name for name in WITHOUT_EXAMPLE if ">>>" in docstring(name)]
    assert not [name for name in WITHOUT_PAGE if re.search(rf"\b(pk|prunekit)\.{name}\b", PAGES)]
    assert {*WITHOUT_EXAMPLE, *WITHOUT_PAGE} <= {*prunekit.__all__}
    assert [*prunekit.__all__] == sorted(prunekit.__all__)
    assert all(importlib.import_module("prunekit").__dir__().count(name) for name in prunekit.__all__)
