"""What a finished run leaves: its figures, its tables, and the models of its folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.compaction import load
from prunekit.display import Displayed, Table
from prunekit.models import load_factory
from prunekit.planning import Plan, load_plan
from prunekit.report.headline import comparison, models, tiles
from prunekit.workflow.own import RECIPE_ONLY, Own
from prunekit.workflow.sides import DENSE, both_sides


@dataclass(frozen=True, eq=False, repr=False)
class RunResult(Displayed):
    """A finished run.

    Attributes:
        folder: everything it wrote, as the command leaves it: `report.html`, `metrics.json`, the plan, tables.
        metrics: what `metrics.json` holds.
        own: the user's own code that the run was made with.

    Example:
        >>> import prunekit as pk
        >>> from pathlib import Path
        >>> _ = Path("mine.py").write_text('''
        ... from torch import nn
        ... def net():
        ...     return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))
        ... ''')
        >>> settings, data = pk.ModelSettings("mine.py:net", zoo="own"), pk.DataSettings(image_size=8)
        >>> job = pk.JobSettings("mine", settings, data=data, finetune=pk.TrainSettings(epochs=0), control=False)
        >>> shorter, own = ["latency.batches=[1]", "latency.explain=false", "watch=null"], pk.Own("mine.py:net")
        >>> result = pk.finetune(job, shorter, own=own, log=lambda line: None)
        >>> result
        <RunResult: runs/mine/...: MACs −50.0 %, ...>
        >>> result.plan.widths()
        {'1': (8, 16)}
        >>> print(result.report)
        runs/mine/.../report.html
    """

    folder: Path
    metrics: dict[str, Any]
    own: Own = field(default=RECIPE_ONLY)

    @property
    def shortfalls(self) -> list[str]:
        """Where the run fell short of what was asked, in words; empty when it did not."""
        return list(self.metrics["shortfalls"])

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every epoch of every training of the run, as `history.csv` has them; empty where nothing was trained."""
        import pandas as pd

        path = self.folder / "history.csv"
        return pd.read_csv(path).to_dict("records") if path.is_file() else []

    @property
    def validation(self) -> float | None:
        """Score of the pruned model on the validation images, percent, in the epoch whose weights were taken: what a
        search goes by, which leaves the test images alone. None where nothing was fine-tuned."""
        trained: dict[str, Any] = self.metrics["trainings"].get("pruned", {})
        return trained.get("validation")

    @property
    def plan(self) -> Plan:
        """What was kept of the dense model."""
        return load_plan(self.folder)

    @property
    def report(self) -> Path:
        """The page that shows all of it."""
        return self.folder / "report.html"

    def model(self) -> nn.Module:
        """Loads the pruned model, in eval mode on the CPU.

        Raises:
            ArtifactError: the folder has gone, or is damaged.
        """
        return load(self.folder / "model", None if self.own.model is None else load_factory(self.own.model))

    def dense(self) -> nn.Module:
        """Loads the dense model with the weights that it was pruned from, in eval mode on the CPU.

        Raises:
            ArtifactError: the folder has gone, or is damaged.
        """
        return both_sides(self.folder, factory=self.own.model).models[DENSE]

    def rows(self) -> list[dict[str, Any]]:
        """The figures of each model: scores in percent, MACs of one sample, parameters, bytes."""
        return [{"model": name, **self.metrics[name]} for name in models(self.metrics)]

    def _headline(self) -> str:
        figures = (f"{tile.label} {tile.value}" for tile in tiles(self.metrics))
        return f"{self.folder}: {', '.join(figures)}"

    def _parts(self) -> Iterable[str | Table]:
        from prunekit.report.page import lines  # pandas and matplotlib take most of a second to import

        yield comparison(self.metrics)
        yield "\n".join(lines(self.metrics, self.folder))
