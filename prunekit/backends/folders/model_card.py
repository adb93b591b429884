"""Model cards: the README of a Hugging Face repository, with YAML in front, written from the figures of a run.

The figures are read from the files beside the model folder.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from prunekit.errors import ArtifactError
from prunekit.models.interface import ModelInterface
from prunekit.reading.text_files import read_json
from prunekit.reading.yaml_files import read_yaml
from prunekit.settings.deployment import is_elsewhere
from prunekit.utils.display import count, is_number, percent, size

RUN = "run"
"""Name of the facts of a run among the facts of an export."""
MODELS = ("dense", "control", "pruned", "deployed")
_COPIED = ("name", "task", "sparsity", "latency", "speedup", "delivered", "shortfalls", "fine_tuned", "repair")
_MACHINE = ("python", "platform", "cpu", "torch", "torchvision", "prunekit")
_PIPELINES = {
    "image_classification": "image-classification",
    "segmentation": "image-segmentation",
    "detection": "object-detection",
}
_RUNS = re.compile("`+")
_MARKS = re.compile(r"([\\`*_{}\[\]()#+!|<>~$&])")
_CLASSES = 50
"""How many classes a card lists."""


@dataclass(frozen=True)
class Loading:
    """A way to load the model, as a section of the card."""

    heading: str  # of the section
    code: str = ""  # Python; empty if it cannot be done
    text: str = ""  # what to know, in Markdown


@dataclass(frozen=True)
class CardFacts:
    """Facts that a card says."""

    title: str  # name of the model, any text
    library: str  # that loads it, such as `transformers`
    interface: ModelInterface  # of the model
    parameters: int  # number of parameters
    stored: int  # bytes of the file of weights
    run: Mapping[str, Any] = field(default_factory=dict)  # from `run_facts`; empty without a run
    loading: Sequence[Loading] = ()  # ways to load it
    notes: Sequence[str] = ()  # sentences, in plain text

    @property
    def figures(self) -> Mapping[str, Mapping[str, Any]]:
        """The figures of each model of the run."""
        return self.run.get("figures") or {}

    @property
    def own_figures(self) -> Mapping[str, Any]:
        """The figures of the model itself."""
        return self.figures.get(str(self.run.get("model")), {})

    @property
    def scores(self) -> list[tuple[str, str, str]]:
        """Name, label and unit of each score of the task, the main one first."""
        known = (self.run.get("task") or {}).get("scores") or ({"name": "top1", "label": "top-1"},)
        return [(str(one["name"]), str(one["label"]), str(one.get("unit", "%"))) for one in known]


def plain(text: Any) -> str:
    r"""Return Markdown of one line that shows a text as it is: `a\|b \<c\>` for `a|b <c>`."""
    return _MARKS.sub(r"\\\1", _one_line(text))


def code(text: Any) -> str:
    """Return any text as inline code, which may stand in a table."""
    said = _one_line(text).replace("|", "\\|")
    longest = max((len(run) for run in _RUNS.findall(said)), default=0)
    fence, space = "`" * (longest + 1), " " if said[:1] == "`" or said[-1:] == "`" or not said else ""
    return f"{fence}{space}{said}{space}{fence}"


def block(text: str, language: str = "python") -> str:
    """Return text as a block of code."""
    longest = max((len(run) for run in _RUNS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _one_line(text: Any) -> str:
    return " ".join("".join(character if character.isprintable() else " " for character in str(text)).split())


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already, the first column to the left and numbers to the right."""
    line = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, line, *rows))


def card(facts: CardFacts) -> str:
    """Return the text of a model card."""
    parts = [f"---\n{_front_matter(facts)}---", f"# {plain(facts.title)}", *_body(facts)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _front_matter(facts: CardFacts) -> str:
    pipeline = _PIPELINES.get(str(facts.interface.task), "")
    known: dict[str, Any] = {"library_name": facts.library}
    if pipeline and facts.interface.preprocessing is not None:
        known["pipeline_tag"] = pipeline
    known["tags"] = [*dict.fromkeys(["prunekit", "pruning", *([facts.library] if facts.library != "prunekit" else [])])]
    results = _results(facts, pipeline or "other")
    if results:
        known["metrics"] = ["accuracy"] if pipeline == "image-classification" else ["other"]
        known["model-index"] = [{"name": _one_line(facts.title), "results": results}]
    writer, stream = YAML(typ="safe"), StringIO()
    writer.default_flow_style = False
    writer.dump(known, stream)
    return f"# license: left to the owner of the model, see hf.co/docs/hub/repositories-licenses\n{stream.getvalue()}"


def _results(facts: CardFacts, pipeline: str) -> list[dict[str, Any]]:
    own = facts.own_figures
    metrics = [
        {
            "type": "accuracy" if name == "top1" else _one_line(name),
            "name": f"{_one_line(label)}, {'percent' if unit == '%' else _one_line(unit)}",
            "value": round(float(own[name]), 4),
        }
        for name, label, unit in facts.scores
        if is_number(own.get(name))
    ]
    if not metrics:
        return []
    named = _one_line((facts.run.get("data") or {}).get("name") or "test images")
    kind = re.sub(r"[^A-Za-z0-9_.-]+", "-", named).strip("-") or "data"
    return [{"task": {"type": pipeline}, "dataset": {"type": kind, "name": named}, "metrics": metrics}]


def _body(facts: CardFacts) -> Iterator[str]:
    yield _summary(facts)
    if facts.figures:
        yield "## Figures"
        yield _figures_table(facts)
        yield from _remarks(facts)
        yield _latency(facts)
    yield "## How to load it"
    for way in facts.loading:
        yield f"### {way.heading}"
        yield way.text
        yield block(way.code) if way.code else ""
    yield from _interface(facts.interface)
    for note in facts.notes:
        yield f"- {plain(note)}"
    yield "## License"
    yield "Left to the owner of the model: `license:` in the first lines of this file."


def _summary(facts: CardFacts) -> str:
    run = facts.run
    dense = run.get("dense") or {}
    subject = code(dense["name"]) if dense.get("name") else "A model"
    if not run:
        return f"{count(facts.parameters)} parameters, {size(facts.stored)}. Written by prunekit."
    budgets = [
        f"{plain(name)} {value['asked']:g}"
        for name, value in (run.get("budgets") or {}).items()
        if isinstance(value, Mapping) and is_number(value.get("asked"))
    ]
    share = (run.get("sparsity") or {}).get("channels")
    taken = f": {percent(100 * share)} of its channels are removed" if is_number(share) else ""
    within = f", for a budget of {', '.join(budgets)}" if budgets else ""
    data = (run.get("data") or {}).get("name")
    on = f" on {code(data)}" if data else ""
    return f"{subject}, pruned by prunekit{on}{taken}{within}. Removed channels are gone, not masked."


def _figures_table(facts: CardFacts) -> str:
    headings = ["model", *(plain(label) for _, label, _ in facts.scores), "MACs", "parameters", "size"]
    rows = []
    for name, row in facts.figures.items():
        cells = [_score(row, key, unit, index == 0) for index, (key, _, unit) in enumerate(facts.scores)]
        shown = f"**{name}**" if name == facts.run.get("model") else name
        rows.append([shown, *cells, count(row.get("macs")), count(row.get("params")), size(row.get("size_bytes"))])
    return markdown_table(headings, rows)


def _score(row: Mapping[str, Any], name: str, unit: str, main: bool) -> str:
    if not is_number(row.get(name)):
        return "–"
    low, high = row.get("low"), row.get("high")
    within = f" ({low:.2f} to {high:.2f})" if main and is_number(low) and is_number(high) else ""
    return f"{row[name]:.2f} {plain(unit)}{within}"


def _remarks(facts: CardFacts) -> Iterator[str]:
    own, said = facts.own_figures, []
    if is_number(own.get("n_test")):
        samples = (facts.run.get("task") or {}).get("samples", "samples")
        said.append(f"Scores of {own['n_test']} test {plain(samples)}, with 95 % intervals.")
    if "control" in facts.figures:
        said.append("The control is the dense model after as much training as the pruned one had.")
    said += [f"Shortfall: {plain(text)}." for text in facts.run.get("shortfalls") or ()]
    yield "\n".join(said)


def _latency(facts: CardFacts) -> str:
    rows = []
    key = ("device", "batch", "runtime", "threads", "dtype")
    for row in facts.run.get("latency") or ():
        if row.get("model") not in ("dense", facts.run.get("model")):
            continue
        same = [
            one
            for one in facts.run.get("speedup") or ()
            if one.get("model", "pruned") == row["model"] and all(one.get(k) == row.get(k) for k in key)
        ]
        settled, sure = ("" if one.get("stable", True) else ", unstable" for one in (row, same[0] if same else {}))
        ratio = f"{same[0]['median']:.2f}× ({same[0]['low']:.2f} to {same[0]['high']:.2f}){sure}" if same else "–"
        setting = [plain(row.get(k, "–")) for k in key]
        rows.append([plain(row["model"]), *setting, f"{row['median_ms']:.3g} ms{settled}", ratio])
    found, elsewhere = facts.run.get("delivered") or {}, ""
    if found and is_elsewhere(str(found["target"]["device"])):
        final, where = found["final"], ", ".join(f"{k} {plain(found['target'].get(k, '–'))}" for k in key)
        ratio = f"{final['speedup']:.2f}× ({final['speedup_low']:.2f} to {final['speedup_high']:.2f})"
        settled = "" if final["stable"] else ", unstable"
        elsewhere = f"Measured on another machine ({where}): {final['ms']:.3g} ms{settled}, {ratio}."
    if not rows:
        return elsewhere
    environment = facts.run.get("environment") or {}
    on = plain(environment.get("cpu") or "")
    headings = ["model", "device", "batch", "runtime", "threads", "dtype", "median", "speedup"]
    measured = f"Latency, measured on {on} with torch {plain(environment.get('torch', '–'))}:" if on else "Latency:"
    return "\n\n".join([measured, markdown_table(headings, rows), *filter(None, [elsewhere])])


def _interface(interface: ModelInterface) -> Iterator[str]:
    yield "## Inputs and outputs"
    yield "\n".join(
        f"- {kind} {code(one)}"
        for kind, specs in (("input", interface.inputs), ("output", interface.outputs))
        for one in specs
    )
    if interface.preprocessing is not None:
        yield "Images become the input as `preprocessor_config.json` and `preprocess` of `model.py` say:"
        rows = [[plain(name), code(value)] for name, value in interface.preprocessing.as_dict().items()]
        yield markdown_table(["preprocessing", "value"], rows)
    if interface.classes:
        shown = [plain(name) for name in interface.classes[:_CLASSES]]
        more = f", and {len(interface.classes) - _CLASSES} more" if len(interface.classes) > _CLASSES else ""
        yield f"{len(interface.classes)} classes: {', '.join(shown)}{more}."


def run_facts(folder: Path) -> dict[str, Any]:
    """Return under `run` what is known of the run that a model is from; nothing if there is no run.

    That is `figures` of each model (scores in percent with their interval, MACs, parameters, bytes), `model`, which of
    these it is, `budgets`, `environment`, names of the dense model and the data, and entries of `metrics.json`.
    """
    home = next((place for place in (folder, folder.absolute().parent) if (place / "metrics.json").is_file()), None)
    if home is None:
        return {}
    metrics = read_json(home / "metrics.json")
    if not isinstance(metrics, dict) or not isinstance(metrics.get("pruned"), dict):
        raise ArtifactError(f"{home / 'metrics.json'}: expected an object with figures of the pruned model")
    figures = {
        name: {**_mapping(metrics[name]), **_mapping(_mapping(metrics.get("accuracy")).get(name))}
        for name in MODELS
        if isinstance(metrics.get(name), dict)
    }
    plan, recipe = _mapping(metrics.get("plan")), _recipe(home / "recipe.yaml")
    environment = _mapping(metrics.get("environment"))
    facts = {
        **{name: metrics[name] for name in _COPIED if metrics.get(name) is not None},
        "figures": figures,
        "model": "deployed" if folder.name == "deployed" and "deployed" in figures else "pruned",
        "budgets": _mapping(plan.get("budgets")),
        "environment": {name: environment[name] for name in _MACHINE if name in environment},
        **recipe,
    }
    return {RUN: facts}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _recipe(path: Path) -> dict[str, Any]:
    """Return the names of the dense model and of the data in the recipe of a run, without paths of the machine."""
    if not path.is_file():
        return {}
    recipe = _mapping(read_yaml(path, "a recipe", ArtifactError))
    model, data = _mapping(recipe.get("model")), _mapping(recipe.get("data"))
    found = {}
    if model.get("name"):
        found["dense"] = {"name": _without_folders(model["name"]), "zoo": model.get("zoo")}
    if data.get("source"):
        found["data"] = {"source": data["source"], "name": _without_folders(data.get("name") or data["source"])}
    return found


def _without_folders(text: Any) -> str:
    return str(text).replace("\\", "/").rpartition("/")[2]
