"""The picture of the README: a network before and after the main job, from the rows that `main_job.py` measured.

    python benchmarks/before_after.py [--rows results/main_job.json] [--output results/before_after.svg]

Bars are shares of the dense model's figure; figures are means over the seeds, times relative to the dense model's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PARAMETERS, MACS = 21_289_802, 74_765_312
"""Of torchvision's resnet34 with 10 classes, at 32 x 32 pixels."""
WIDTH, LEFT, BAR, STEP = 760, 190, 13, 58
"""Of the picture, of the names, the height of a bar, and from one pair of bars to the next, in pixels."""
STYLE = """\
text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;fill:#24292f}
.small{font-size:12px;fill:#57606a}.dense{fill:#b6bec7}.pruned{fill:#0f8a7e}.value{font-weight:600}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.dense{fill:#59636e}.pruned{fill:#2fbfae}}"""


def pairs(row: dict[str, Any]) -> list[tuple[str, str, str, str, float]]:
    """Returns for each pair of bars its name, what is below that, the texts of both figures, and the second's share."""
    dense, pruned = row["dense_top1"], row["pruned_top1"]
    found = [("Accuracy", f"{row['n_test']:.0f} test images", f"{dense:.1f} %", f"{pruned:.1f} %", pruned / dense)]
    for name, whole, share in (("Parameters", PARAMETERS, row["params_left"]), ("MACs", MACS, row["macs_left"])):
        found.append((name, "", f"{whole / 1e6:.1f} M", f"{share * whole / 1e6:.1f} M", share))
    for batch in (1, 16):
        speedup = row[f"speedup_cpu_b{batch}_t1"]
        found.append((f"Time, batch {batch}", "measured, one thread", "1x", f"{speedup:.2f}x as fast", 1 / speedup))
    return found


def picture(rows: list[dict[str, Any]]) -> str:
    """Returns the picture as SVG, which follows the reader's light or dark theme."""
    (mean,) = (row for row in rows if row["seed"] == "mean")
    found, most = pairs(mean), WIDTH - LEFT - 130
    height = 44 + STEP * len(found)
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>resnet34, dense and pruned, mean of {len(rows) - 1} seeds</title><style>{STYLE}</style>",
        f'<rect class="dense" x="{LEFT}" y="12" width="{BAR}" height="{BAR}"/>',
        f'<text class="small" x="{LEFT + 20}" y="23">dense</text>',
        f'<rect class="pruned" x="{LEFT + 74}" y="12" width="{BAR}" height="{BAR}"/>',
        f'<text class="small" x="{LEFT + 94}" y="23">pruned: resnet34, handwritten digits</text>',
    ]
    for number, (name, below, dense, pruned, share) in enumerate(found):
        top = 44 + STEP * number
        text.append(f'<text x="{LEFT - 16}" y="{top + (12 if below else 20)}" text-anchor="end">{name}</text>')
        if below:
            text.append(f'<text class="small" x="{LEFT - 16}" y="{top + 29}" text-anchor="end">{below}</text>')
        for kind, value, part, y in (("dense", dense, 1.0, top), ("pruned", pruned, share, top + BAR + 5)):
            long = most * part
            text.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR}" rx="2"/>')
            look = "value" if kind == "pruned" else "small"
            text.append(f'<text class="{look}" x="{LEFT + long + 8:.1f}" y="{y + 12}">{value}</text>')
    return "\n".join([*text, "</svg>"]) + "\n"


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=RESULTS / "main_job.json")
    parser.add_argument("--output", type=Path, default=RESULTS / "before_after.svg")
    options = parser.parse_args()
    options.output.write_text(picture(json.loads(options.rows.read_text())["rows"]), encoding="utf-8")


if __name__ == "__main__":
    main()
