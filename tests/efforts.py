"""Efforts of measurements for tests, whose figures of time mean nothing."""

from __future__ import annotations

from prunekit.measure.measurement_effort import Effort

HERE = Effort(own_process=False, figures=False, heeds_doubts=False, load_s=0.0)
"""In this process, without figures on pages: either takes longer than all else of a small job."""
DRAWN = Effort(own_process=False, heeds_doubts=False, load_s=0.0)
"""The same with figures."""
LITTLE = Effort(
    own_process=False,
    figures=False,
    warm_up_calls=10,
    networks=10,
    network_ms=0.0,
    attempts=2,
    processes=1,
    tries=1,
    rounds=5,
    rounds_ms=0.0,
    heeds_doubts=False,
    load_s=0.0,
)
"""In this process, once, and no longer than it takes to make rows."""
