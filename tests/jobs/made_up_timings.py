"""Made-up timings of a model beside a dense one."""

from __future__ import annotations

from prunekit.jobs.prune.latency_target import Timing

DENSE_MS = 10.0


def took(speedup: float) -> Timing:
    ms = DENSE_MS / speedup
    return Timing(ms, ms * 0.99, ms * 1.01, speedup, speedup * 0.99, speedup * 1.01, True, ())
