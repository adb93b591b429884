"""More threads than cores that are free, or than the model has work for."""

from __future__ import annotations

from collections.abc import Mapping

from prunekit.measure.beside import Beside
from prunekit.measure.causes.cause import LEAST, Cause, plural


def crowded(threads: int, cores: int, load: float) -> bool:
    """Whether threads had to wait for a core.

    Args:
        threads: that a model ran with.
        cores: logical cores that this process may use.
        load: the system's load average over the last minute: threads that run or want a core, this process's too.
    """
    return threads > cores or load > cores


def too_many_threads(threads: int, cores: int, load: float, fewer: Mapping[int, Beside]) -> Cause | None:
    """The pruned model is faster with fewer threads.

    Args:
        threads, cores, load: as for `crowded`.
        fewer: thread count -> the model with the threads it has, and with that count.
    """
    better = {count: found for count, found in fewer.items() if found.saved_ms >= LEAST * found.now_ms}
    if not better:
        return None
    count, found = max(better.items(), key=lambda item: item[1].saved_ms)
    waited = crowded(threads, cores, load)
    void = "; what else is measured with these threads is void, and no other cause was looked for" if waited else ""
    return Cause(
        name="threads oversubscribed" if waited else "more threads than it has work for",
        ms=found.saved_ms,
        evidence=(
            f"{found.now_ms:.3g} ms with {plural(threads, 'thread')}, {found.other_ms:.3g} ms with {count}: "
            f"{found.gain.median:.2f}× [{found.gain.low:.2f}, {found.gain.high:.2f}]; {plural(cores, 'core')}, load "
            f"average {load:.1f}{void}"
        ),
        fix=f"torch.set_num_threads({count}) or OMP_NUM_THREADS={count}, or stop what else keeps the cores busy; then "
        f"explain again with {plural(count, 'thread')}",
    )
