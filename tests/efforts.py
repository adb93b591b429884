"""Efforts of measurements for tests, whose figures of time mean nothing."""

from __future__ import annotations

from prunekit.measure.effort import Effort

HERE = Effort(own_process=False)
"""In this process: to start another takes longer than what it measures."""
LITTLE = Effort(
    own_process=False,
    warm_up_calls=10,
    networks=10,
    network_ms=0.0,
    attempts=2,
    processes=1,
    tries=1,
    rounds=5,
    rounds_ms=0.0,
)
"""In this process, once, and no longer than it takes to make rows."""
