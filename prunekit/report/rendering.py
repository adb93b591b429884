"""The rendering of templates to pages: filters, scripts, contents lists, links between pages, and notes.

Notes say in a sentence how a figure was measured: shown on hover, on focus and on a tap.
"""

import base64
import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from prunekit.measure.latency import row_text
from prunekit.utils import display as numbers
from prunekit.utils.availability import REPORT, missing_packages
from prunekit.utils.files import write_text

SCRIPTS = ("contents.js", "copy.js", "sort.js", "scroll.js")
FILTERS = (
    "count", "difference", "digits", "duration", "factor", "in_unit", "interval", "moment", "percent", "scientific",
    "share", "size",
)  # fmt: skip
MISSING = Markup('<p class="soft">This run has no {}.</p>')
"""Text of a section for a file that a run did not write."""
UNDRAWN = Markup(
    '<p class="soft">Matplotlib, which draws the figures, is not installed: '
    f"<code>{REPORT}</code>, then write this page again.</p>"
)
"""Text of a page without figures."""
FEWEST = 5
"""Sections from which on a page has a list of contents."""
SECTION = re.compile(r"<section(?P<attributes>[^>]*)>(?P<space>\s*)<h2[^>]*>(?P<title>.*?)</h2>", re.DOTALL)
ANCHOR = re.compile(r'\bid="([^"]*)"')


def write(page: Path, template: str, **values: Any) -> Path:
    """Write a page atomically, and return its path."""
    write_text(page, rendered(template, **values))
    return page


def rendered(template: str, **values: Any) -> Markup:
    """Return a template with its values filled in, which are escaped."""
    return Markup(environment().get_template(template).render(**values))


@cache
def environment() -> Environment:
    """Return the environment of the templates, with the filters that format numbers."""
    found = Environment(
        loader=PackageLoader("prunekit.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update({name: getattr(numbers, name) for name in FILTERS})
    found.filters.update({"doubtful": row_text.unstable_mark, "computed": row_text.dtype_text, "how": how})
    found.filters["outlined"] = outlined
    found.globals["missing"] = lambda what: MISSING.format(what)
    found.globals["undrawn"] = undrawn
    # The policy of a page allows only this script, by its hash.
    script = "".join(
        files("prunekit.report").joinpath("templates", name).read_text(encoding="utf-8") for name in SCRIPTS
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    found.globals.update({"script": Markup(script), "script_source": f"sha256-{digest}"})
    return found


def undrawn(what: str = "") -> Markup:
    """Return why a figure of something is not there; of nothing in particular, whether figures are drawn at all."""
    if missing_packages(["matplotlib"]):
        return Markup() if what else UNDRAWN
    return MISSING.format(what) if what else Markup()


def linked(target: Path, page: Path) -> str:
    """Return the address of a file relative to the page's folder, so that both can be moved together."""
    try:
        return quote(os.path.relpath(target.resolve(), page.resolve().parent).replace(os.sep, "/"))
    except ValueError:  # on another drive
        return target.resolve().as_uri()


@dataclass(frozen=True)
class Entry:
    """A line of the contents list: the id of a section, and its heading as text."""

    anchor: str
    title: str


@dataclass(frozen=True)
class Outline:
    """The HTML of a page whose sections all have ids, and the lines of its contents list; none for a short page."""

    content: Markup
    entries: tuple[Entry, ...]


class _Text(HTMLParser):
    """The text of a piece of HTML, whatever its attributes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        """Take text between tags."""
        self.parts.append(data)


def _text_of(html: str) -> str:
    parser = _Text()
    parser.feed(html)
    parser.close()
    return " ".join("".join(parser.parts).split())


def outlined(content: Markup) -> Outline:
    """Return a page with an id for each section that begins with a heading, and its contents list."""
    entries: list[Entry] = []

    def with_anchor(found: re.Match[str]) -> str:
        named = ANCHOR.search(found["attributes"])
        anchor = str(Markup(named[1]).unescape()) if named else f"section-{len(entries) + 1}"
        entries.append(Entry(anchor, _text_of(found["title"])))
        start = len("<section")
        return found[0] if named else f'{found[0][:start]} id="{anchor}"{found[0][start:]}'

    marked = Markup(SECTION.sub(with_anchor, str(content)))
    return Outline(marked, tuple(entries) if len(entries) >= FEWEST else ())


_SCORE = (
    "Share of the test images that are right. Nothing was trained, calibrated or chosen on them. In brackets: the 95 % "
    "Wilson interval."
)
_TIMED = (
    "ms of forward passes in inference mode on random input, after warm-up. Each runtime has a process of its own; "
    "every round times each model once, in an order that is turned round each time."
)
_INTERVAL = "95 % percentile bootstrap interval of the median (Efron 1979). Unstable: it supports no claim."
_SPEEDUP = f"Dense over pruned time: the median over pairs that were timed side by side. Interval: {_INTERVAL}"
_MACS = (
    "Multiply-accumulates of a forward pass of one sample, counted operator by operator while the model runs; FLOPs "
    "are twice as many."
)
_PARITY = (
    "Masked and compact model on the same inputs in float64: the largest absolute difference of any output over the "
    "largest absolute value. Rounding alone leaves about 1e-15."
)
_PARAMETERS = "Numbers in the model's parameters; one that several modules share counts once."
_SIZE = "Bytes of the file that the weights are saved in."
_ERROR = (
    "Mean squared error of the layer's output against the dense model's on held-out images, as a share of the dense "
    "output's variance"
)
_PRECISION = (
    "Mean over classes of the area under precision against recall, as COCO's evaluation computes it (Lin et al. 2014), "
    "{}; in brackets the 95 % percentile bootstrap interval over test images (Efron 1979)."
)
_DROP = (
    "Dense and pruned model on the same held-out samples; ends of the 95 % interval of the difference by a "
    "delete-a-group jackknife (Wolter 1985), Student's quantiles, and the rule of three where no sample differs."
)
METHODS = {
    "mAP@50:95": _PRECISION.format("averaged over thresholds of the intersection over union from 0.5 to 0.95"),
    "mAP@50": _PRECISION.split(";")[0].format("at an intersection over union of 0.5") + ".",
    "Top-1": _SCORE,
    "top-1": _SCORE,
    "MACs": _MACS,
    "MACs, one sample": _MACS,
    "Parameters": _PARAMETERS,
    "parameters": _PARAMETERS,
    "Speedup": _SPEEDUP,
    "speedup": _SPEEDUP,
    "Masked against compact": _PARITY,
    "verified": _PARITY,
    "Size of the weights file": _SIZE,
    "size": _SIZE,
    "Memory of a forward pass, counted": (
        "Peak of parameters, buffers, inputs and what operators return until nothing reads it; what a process takes is "
        "more."
    ),
    "Channels removed": "Share of the channels that can be removed: locked ones are not counted.",
    "Zero weights under the masks": "Share of the dense model's weights that the masks hold at exactly zero.",
    "median, ms": f"Median. {_TIMED}",
    "latency, ms": f"Median. {_TIMED}",
    "dense, ms": f"Median of the dense model in the same run, beside this one. {_TIMED}",
    "95 % interval": _INTERVAL,
    "p10": f"Tenth percentile. {_TIMED}",
    "p90": f"Ninetieth percentile. {_TIMED}",
    "p99": f"Ninety-ninth percentile. {_TIMED}",
    "samples/s": "Batch over median latency.",
    "peak memory": (
        "Most that a forward pass and the model took: on CUDA what the allocator handed out, on the CPU the growth of "
        "the process's resident memory."
    ),
    "predicted, ms": (
        "By the latency table: the sum of what the layers take by their widths, fitted to networks that were timed."
    ),
    "error before": f"{_ERROR}, before its weights were fitted.",
    "after": f"{_ERROR}, with its weights fitted to the kept channels.",
    "rank": "Rank of the Gram matrix of the layer's inputs, and the number of its columns.",
    "ridge": "Added to the diagonal of the Gram matrix, as a share of its mean.",
    "zeros, calibration images": "Share of exact zeros on the images that the threshold was found on.",
    "zeros, test images": "Share of exact zeros on the test images, which the threshold has not seen.",
    "weight in the budget": "Share of all that zeros can save, as MACs of the layers that read them, or as values.",
    "kept": "Output channels after over before.",
    "Score against size and time": _DROP,
    "at least": _DROP,
    "at most": _DROP,
    "in int8": "Score of the model's file in int8, calibrated on training samples, on the same held-out samples.",
    "blocks gone": "Number of blocks of which the plan keeps no channel.",
    "parameters left": _PARAMETERS,
    "MACs left": "Multiply-accumulates of the plan's compact model, as a share of the dense model's.",
    "measured, ms": "Median of the compact model, timed in turn with the dense one, as often as its interval needed.",
    "of the time asked for": "Measured time over the time that the budget allows; more than 100 % is a shortfall.",
    "|x| is zeroed below": (
        "Threshold of the absolute value: the target's quantile on the calibration images, from a sketch of all values."
    ),
    "limit": "Largest size of a value, or norm of a gradient, that the clamp allows.",
    "share clamped": "Share of values (by norm: of gradients) that were beyond the limit in this training run.",
    "locked channels": "Number of channels that are locked for this reason.",
    "out": "Output channels of the layer, before and after.",
    "in": "Input channels of the layer, before and after.",
    "left": "Share of the dense model that is kept.",
    "dense": _SCORE,
    "points": "Difference in percentage points: the pruned model less the one that it is compared with.",
    "dense ms": "Median time of the operator in forward passes of the dense model.",
    "pruned ms": "Median time of the operator in forward passes of the pruned model, timed in turn with the dense one.",
    "pruned": _MACS,
    "share of the time": "Share of the pruned model's time.",
    "gain, ms": "Time that the fix saves in a forward pass of the pruned model, measured with and without it in turn.",
    "ms": "Time in the dense model, measured layer by layer.",
    "share": "Share of the whole model.",
    "constant, ms": "Time that does not depend on any width, by the fit.",
    "widths step by": "Block of channels that kernels work in: a width counts as the next multiple of it.",
    "kernel changes at": "Widths from which on the fit has other coefficients, because another kernel is chosen there.",
    "fit error": "Median relative error over the networks that the fit was made from.",
    "activations": "Bytes of the outputs; in-place operations and views take none.",
    "calls": "How often the module ran in one forward pass.",
    "total": "Sum over the layers that read the group, each weighted by its effect on the model's output.",
    "fast": "From calibration statistics, with the readers' weights fitted to the kept channels.",
    "measured": "With the group masked in the running model, nothing fitted.",
    "Ideal": "Ratio of the models' multiply-accumulates, dense over pruned: the speedup if time followed them.",
    "Outside operators": "Time of a forward pass outside of operators: Python, and the framework.",
    "Median error of the prediction": "Of predicted over measured time, on networks that the table was not fitted to.",
    "Largest error": "Of predicted over measured time, on networks that the table was not fitted to.",
    "Dense model": "Median of whole forward passes.",
    "Costliest layer": "Share of the dense model's time, measured in place.",
    "Profiled in": "Wall time of building, exporting and timing the networks.",
    "Channel groups": "Channels that can only be kept or removed together, found by running the model once.",
    "Most sensitive": "Error as a share of the variance when only this group is pruned, to half of its channels.",
    "Fast against measured": "Spearman's rank correlation of the two errors at half of the channels, over the groups.",
    "Latency": f"Median. {_TIMED}",
    "each dot": f"Each dot is a forward pass, or a few of them: {_TIMED}",
    "Time by module": "Medians of operators in forward passes of both models, timed in turn, by innermost module.",
    "Training": "Loss and score after each epoch; validation images are held out of the training images.",
    "Pruning schedule": "Share of the dense model that each plan leaves, counted when the plan was made.",
    "Layers before and after": "Output channels of the dense and the compact model, as their weights have them.",
    "Where the models look": (
        "Class activation maps: activations of a layer, weighted by the class's gradient (Grad-CAM, Selvaraju et al. "
        "2017); saliency: the gradient of every pixel."
    ),
    "Feature maps": "Outputs of layers for one image, copied while the models ran in eval mode.",
    "Importance scores": "A score for each channel by prune.criterion of the recipe; see prunekit list criteria.",
    "Error against kept channels": "Error of the layers that read a group, fitted to the kept channels, by statistics.",
    "Coupled channels": "Found by running the model once with labeled channels, operator by operator.",
    "Weights": "Histograms of 48 equal bins from the least to the greatest weight.",
    "Activations": "Histograms of 48 equal bins of what layers return on the calibration images, in eval mode.",
    "Predicted against measured": "Whole forward passes of networks of random widths, alternated with the dense model.",
    "Layers against their widths": "Layers timed in place, in networks of random widths.",
    "Filters of the first layer": "Weights of the layer, zero as gray, up to their 99.5th percentile in size.",
    "ideal": "Ratio of the operator's multiply-accumulates, dense over pruned.",
    "faster": "Dense over pruned milliseconds of this operator; medians of forward passes timed in turn.",
    "file size": "Bytes on disk, of all files of the export.",
    "that, ms": f"Median of what the file is timed beside, in turn with the file. {_TIMED}",
    "file, ms": f"Median of the file in its own runtime, in turn with the other. {_TIMED}",
    "speedup of the file": "Median of the ratios of pairs of forward passes, the other over the file.",
    "MACs/byte": "Arithmetic intensity: multiply-accumulates for each byte that the pruned operator reads or writes.",
}
"""Notes by the labels of tiles, rows and headings."""


def how(label: str, method: str | None = None) -> Markup:
    """Return a label with the note of its own or another label; as plain text if there is none."""
    found = METHODS["Top-1"] if label.startswith("Top-1 on the test ") else METHODS.get(method or label)
    text = escape(label)
    return text if found is None else Markup('<abbr tabindex="0" title="{}">{}</abbr>').format(found, text)
