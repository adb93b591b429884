"""`prunekit calibrate`: activation statistics of the dense model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prunekit.cli.groups import register_command
from prunekit.cli.options import recipe_command
from prunekit.cli.output import Console
from prunekit.utils.display import digits, numbered, share, table

if TYPE_CHECKING:
    from prunekit.jobs.run.command_subject import Own
    from prunekit.settings.job import JobSettings
    from prunekit.statistics.channel_stats import ChannelStats


@register_command("calibrate", about="Collect activation statistics of the dense model.", place=4, together=True)
@recipe_command()
def calibrate_command(console: Console, job: JobSettings, own: Own) -> None:
    """Run the dense model of a recipe on its calibration images and write the statistics of every channel.

    They are written as safetensors and CSV, and used by `finetune` if model, weights, data and settings are the same.

    The table averages over the channels of each layer's output; dead channels never change.
    """
    from prunekit.jobs.stages.calibration_stage import calibrate as run

    with console.running():
        result = run(job, log=console.log, progress=console.progress, own=own)
    layers = list(summary(result.stats))
    payload = {"path": str(result.path), "csv": str(result.csv), "reused": result.reused, "layers": layers}
    reused = " (from an earlier run)" if result.reused else ""
    console.result(payload, f"{_text(layers)}\nStatistics{reused}: {result.path}\nAs a table: {result.csv}")


def summary(stats: ChannelStats) -> Iterator[dict[str, Any]]:
    """Yield one row per activation: means over its channels, the range, and dead channels."""
    dead = stats.dead()
    for key, layer in stats.items():
        yield {
            "module": key.module,
            "side": key.side,
            "call": key.call,
            "channels": layer.channels,
            **{name: float(getattr(layer, name).mean()) for name in ("mean", "mean_abs", "rms")},
            "min": float(layer.min.min()),
            "max": float(layer.max.max()),
            "zero_fraction": float(layer.zero_fraction.mean()),
            "non_finite": int(layer.non_finite.sum()),
            "dead": [int(channel) for channel in dead.get(key, ())],
        }


def _text(layers: list[dict[str, Any]]) -> str:
    rows = [
        (
            row["module"] + (f" (call {row['call']})" if row["call"] else ""),
            row["channels"],
            *(digits(row[name]) for name in ("mean", "mean_abs", "rms", "min", "max")),
            share(row["zero_fraction"]),
            f"DEAD {numbered(row['dead'], 8)}" if row["dead"] else "",
        )
        for row in layers
        if row["side"] == "output"
    ]
    headings = ("output of", "channels", "mean", "mean |x|", "rms", "min", "max", "zeros", "dead channels")
    return table(headings, rows, text=("dead channels",))
