"""A progress bar on stderr for a whole training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from prunekit.progress import make_bar


class Progress:
    """Shows epoch, loss, score and img/s, and whatever `describe` adds (asked once an epoch: it may be slow)."""

    def __init__(
        self, label: str, steps: int, describe: Callable[[], Mapping[str, Any]], shown: bool, score: str = "top1"
    ) -> None:
        self.label, self.describe, self.score = label, describe if shown else dict, score
        self.bar = make_bar(shown, total=steps, desc=label, unit="batch")
        self.extra: Mapping[str, Any] = {}

    def epoch(self, number: int, epochs: int) -> None:
        """Says which epoch begins."""
        self.bar.set_description(f"{self.label} {number}/{epochs}", refresh=False)
        self.extra = self.describe()

    def begin(self, done: int) -> None:
        """So many batches were done before this run went on."""
        self.bar.update(done)

    def step(self, loss: float, score: Callable[[], float], images_per_s: float) -> None:
        """One batch is done; the figures are the epoch's so far."""
        if not self.bar.disable:
            shown = {"loss": f"{loss:.3f}", self.score: f"{score():.1f}%", "img/s": f"{images_per_s:.0f}", **self.extra}
            self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
