"""More threads than cores that are free, or than the model has work for."""

from __future__ import annotations

from collections.abc import Mapping

from prunekit.measure.beside import Beside
from prunekit.measure.causes.cause import LEAST, Cause
from prunekit.measure.evidence import Contention
from prunekit.numbers import plural


def too_many_threads(contention: Contention, fewer: Mapping[int, Beside]) -> Cause | None:
    """The pruned model is faster with fewer threads.

    Args:
        contention: while it was timed with those that it has.
        fewer: thread count -> the model with the threads it has, and with that count.
    """
    better = {count: found for count, found in fewer.items() if found.saved_ms >= LEAST * found.now_ms}
    if not better:
        return None
    count, found = max(better.items(), key=lambda item: item[1].saved_ms)
    waited = contention.oversubscribed
    void = "; what else is measured with these threads is void, and no other cause was looked for" if waited else ""
    return Cause(
        name="threads oversubscribed" if waited else "more threads than it has work for",
        ms=found.saved_ms,
        evidence=(
            f"{found.now_ms:.3g} ms with {plural(contention.threads, 'thread')}, {found.other_ms:.3g} ms with {count}: "
            f"{found.gain.median:.2f}× [{found.gain.low:.2f}, {found.gain.high:.2f}]; {contention}"
            f"{void}"
        ),
        fix=f"torch.set_num_threads({count}) or OMP_NUM_THREADS={count}, or stop what else keeps the cores busy; then "
        f"explain again with {plural(count, 'thread')}",
    )
