"""A library that an integration is for is not installed."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from prunekit.errors import UsageError
from prunekit.utils.availability import require_library


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ultralytics", None)  # as if it were not there
    monkeypatch.delitem(sys.modules, "prunekit.integrations.ultralytics", raising=False)
    with pytest.raises(ImportError, match=r"needs ultralytics, .* pip install 'prunekit\[ultralytics\]'") as error:
        import_module("prunekit.integrations.ultralytics")
    assert isinstance(error.value, UsageError)
    require_library("torch", "none")
