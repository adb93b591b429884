"""One thread for every test: two OpenMP threads beside a busy process are many times slower than one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
