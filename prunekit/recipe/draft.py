"""The draft of a recipe for a model and a data set, with a comment at each key: `prunekit init`."""

import re
import shlex
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from torch import nn

from prunekit.channels.trace import trace
from prunekit.data.local_files import has_classes, read_npz, scan_folder, scan_unlabeled
from prunekit.data.roots import SETS, missing_data
from prunekit.data.texts import SUFFIXES
from prunekit.errors import DataError, ModelError, UsageError, reraise_shortage
from prunekit.jobs.run.command_subject import Own
from prunekit.jobs.run.job_subject import JobSubject, prepare
from prunekit.models.hugging_face import head_of
from prunekit.models.names import CONFIG, ZOOS
from prunekit.models.zoo import has_weights, image_shape, missing_weights, zoo_names
from prunekit.planning.solver import feasible_plan
from prunekit.recipe.draft_request import DraftRequest, is_hub_name, unknown_data, unknown_model
from prunekit.recipe.loading import apply_override, load
from prunekit.recipe.reference import find, flow
from prunekit.recipe.yaml_positions import Document, Origin
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.inputs import TEXTUAL, DataSettings, Head, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.training.rate_search import FEWEST
from prunekit.utils.files import require_writable, write_text
from prunekit.utils.user_code import is_reference, require_object

SIDES = (32, 64, 96, 128, 160, 192, 224)
HEADS_OF_TEXTS: tuple[Head, ...] = ("causal_lm", "masked_lm", "embedding")
"""Heads that a model type may get for a text, the first that it has."""
SIZED_IMAGES = 32
"""Images whose size is read."""


@dataclass(frozen=True)
class RecipeDraft:
    """A recipe that was written."""

    command: list[str]  # runs the recipe, as a list of arguments
    notes: tuple[str, ...]  # what was found, and what is missing


def write_draft(path: Path, request: DraftRequest) -> RecipeDraft:
    """Write a recipe after it has passed every check that a run makes before it computes."""
    require_writable(path)
    values, notes = _proposed(path, request)
    command = ["prunekit", "finetune", str(path)]
    for option, reference in zip(("--model", "--data"), request.own, strict=True):
        command += [option, reference] if reference else []
    missing = _missing(values)
    if missing:
        values["finetune"]["lr"] = "auto"
        _checked(_text(values, command, ()), request.changes)
    else:
        prepared = _prepared(values, request, command)
        if not prepared.job.prune.budget.measured:  # which only measuring tells
            feasible_plan(trace(prepared.model, prepared.example_inputs), prepared.job.prune)
        values, notes = _fitted(values, prepared), [*notes, *_found(prepared)]
    document = reduce(apply_override, request.changes, Document(values, places={(): Origin(str(path))}))
    text = _text(document.values, command, notes)
    _checked(text)
    write_text(path, text)
    return RecipeDraft(command, (*notes, *missing))


def _checked(text: str, changes: Sequence[str] = ()) -> JobSettings:
    """Return the job of a recipe's text."""
    with TemporaryDirectory(prefix="prunekit-") as folder:
        written = Path(folder, "recipe.yaml")
        written.write_text(text, encoding="utf-8")
        return load(written, changes)


def _prepared(values: dict[str, Any], request: DraftRequest, command: list[str]) -> JobSubject:
    """Read the data and build the model, with the first image size that the model takes, which is set."""
    data = values["data"]
    sizes = [None] if "image_size" not in data else list(dict.fromkeys([data["image_size"], 224, 299]))
    refused: list[ModelError] = []
    for size in sizes:
        if size is not None:
            data["image_size"] = size
        try:
            return prepare(_checked(_text(values, command, ()), request.changes), Own(*request.own))
        except ModelError as error:
            refused.append(error)
    raise refused[0]  # the error at the size of the images


def _proposed(path: Path, request: DraftRequest) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe as far as it is known before data is read and a model built, and notes."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "mine"
    model = _model(path, request)
    data, notes = _data(path, request.data)
    labeled = data.get("labels", True)
    if not labeled and request.own[0] is None and not has_weights(ModelSettings(**model)):
        raise UsageError(
            f"--weights: expected trained weights of {request.model}, because the images in {request.data} have no "
            "labels to train on, got none; or put the images of each class into a folder"
        )
    if request.own[0] is not None and request.weights is None and labeled:
        notes.append(f"{request.model} is pruned as it is built; without its #, `baseline` below trains it")
    if "image_size" in data and model.get("zoo") == "cifar":
        data["image_size"] = 32
    textual = data["source"] == "text"
    values: dict[str, Any] = {"name": name} | ({"task": _text_task(model)} if textual else {})
    values |= {"model": model, "data": data}
    if request.own[0] is None and not has_weights(ModelSettings(**model)):
        values["baseline"] = {"epochs": 20, "lr": 0.05}
    if textual:
        values["prune"] = {"budget": {"macs": 0.8}, "criterion": "elimination", "scope": "per_mac"}
        values["repair"] = {"fit": "patch", "sequential": True}
    else:
        values["prune"] = {"budget": {"macs": 0.5}, "criterion": "l2", "scope": "uniform"}
        values["repair"] = {}
    values |= {
        "finetune": {"epochs": 8, "lr": 0.02},
        "latency": {"batches": [1] if textual else [1, 16], "threads": [1]},
        "device": "auto",
        "output": "runs",
    }
    return values, notes


def _text_task(model: Mapping[str, Any]) -> str:
    """Return which of the tasks that take texts a model is for, by the head that it has, or can have."""
    settings = ModelSettings(**model)
    if settings.folder is not None:
        found = head_of(settings.folder)
        if found not in TEXTUAL:
            raise UsageError(
                f"--data: a text is for task {', '.join(TEXTUAL)}, and the model in {settings.folder} is for "
                f"{found or 'another'}; give data of that: --data file.py:factory"
            )
        return found
    if settings.zoo != "hf":
        return "causal_lm"  # of a model of the user's own, which a run checks
    return next(head for head in HEADS_OF_TEXTS if settings.name in zoo_names("hf", head))


def _model(path: Path, request: DraftRequest) -> dict[str, Any]:
    weights = {} if request.weights is None else {"weights": request.weights}
    if is_reference(request.model):
        require_object(request.model, ModelError)
        return {"name": request.model, "zoo": "own"} | weights
    if (Path(request.model) / CONFIG).is_file() and request.zoo in (None, "hf"):
        there = _shown(path, Path(request.model))
        return {"name": there if "/" in there else f"./{there}", "zoo": "hf"} | weights
    if Path(request.model).is_dir():
        raise UsageError(
            f"--model {request.model}: expected the name of a zoo's model, or file.py:factory, got a folder; a recipe "
            "prunes a dense model: name that, and its state dict with --weights FILE"
        )
    zoos = ZOOS if request.zoo is None else (request.zoo,)
    textual = request.zoo == "hf" and _is_text(request.data)
    known = [name for head in HEADS_OF_TEXTS for name in zoo_names("hf", head)] if textual else []
    zoo = next((zoo for zoo in zoos if request.model in known or request.model in zoo_names(zoo)), None)
    if zoo is None:
        raise unknown_model(request, zoos, [name for zoo in zoos for name in zoo_names(zoo)])
    return {"name": request.model, "zoo": zoo} | weights


def _data(path: Path, asked: str) -> tuple[dict[str, Any], list[str]]:
    """Return the section on data, and notes on what was found."""
    if asked == "digits":
        return {"source": "digits", "image_size": 32, "batch": 32, "augment": "shift", "split_seed": 0}, []
    if is_reference(asked):
        require_object(asked, DataError)
        return {"source": "own", "batch": 32}, []
    there = Path(asked)
    root = _shown(path, there)
    if _is_text(asked):
        files = [there] if there.is_file() else [file for file in there.rglob("*") if file.suffix in SUFFIXES]
        seen = f"{there}: {sum(file.stat().st_size for file in files) / 1e6:.3g} MB of text"
        return {"source": "text", "root": root, "window": 128, "batch": 8}, [seen]
    if there.is_dir() and any((there / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        return {"source": "huggingface", "root": root, "image_size": 32, "batch": 64, "augment": "crop_flip"}, []
    if there.is_dir():
        return _folder(there, root)
    if there.is_file():
        archive = read_npz(there)
        side = min(archive.rest.pixels.shape[2:])
        seen = f"{there}: {len(archive.rest.labels)} images of {tuple(archive.rest.pixels.shape[1:])}"
        section = {"source": "npz", "root": root, "image_size": _side(side), "batch": 64, "augment": "crop_flip"}
        return section | ({} if archive.test else {"test_share": 0.3}), [seen]
    if asked in SETS:
        section = {"source": "torchvision", "name": asked, "root": "data", "download": True}
        return section | {"image_size": 32, "batch": 128, "augment": "crop_flip"}, []
    if is_hub_name(asked):
        section = {"source": "huggingface", "name": asked, "download": True}
        return section | {"image_size": 32, "batch": 128, "augment": "crop_flip"}, []
    raise unknown_data(asked)


def _shown(recipe: Path, path: Path) -> str:
    """Return a path as a recipe names it: absolute if the recipe is in another folder than this one."""
    here = recipe.absolute().parent == Path().absolute()
    return str(path if here or path.is_absolute() else path.absolute())


def _is_text(asked: str) -> bool:
    """Return whether data is a file of text, or a folder with such files at its top."""
    path = Path(asked)
    files = path.glob("*") if path.is_dir() else [path] if path.is_file() else []
    return any(file.suffix in SUFFIXES for file in files)


def _folder(folder: Path, root: str) -> tuple[dict[str, Any], list[str]]:
    labeled = has_classes(folder)
    found = scan_folder(folder) if labeled else scan_unlabeled(folder)
    some = [file for file, _ in found.rest[:: max(1, len(found.rest) // SIZED_IMAGES)]][:SIZED_IMAGES]
    sizes = [size for size in map(_size_of, some) if size is not None]
    if not sizes:
        raise DataError(f"{folder}: none of the {len(some)} images that were tried can be read, such as {some[0]}")
    width, height = (int(statistics.median(size[axis] for size in sizes)) for axis in (0, 1))
    side = _side(min(width, height))
    classes = f"{len(found.classes)} classes" if labeled else "no folders of classes, so that no labels are read"
    seen = f"{folder}: {classes}, {len(found.rest)} images, of about {width}x{height} pixels"
    section: dict[str, Any] = {"source": "imagefolder", "root": root} | ({} if labeled else {"labels": False})
    section |= {"image_size": side, "batch": 32}
    section |= {
        "augment": "crop_flip" if side <= 64 else "resized_crop_flip",
        "workers": 0 if len(found.rest) < 5000 else 4,
    }
    return section | ({} if found.test else {"test_share": 0.3}), [seen]


def _size_of(file: Path) -> tuple[int, int] | None:
    """Return the width and height of an image; None if it cannot be read."""
    try:
        with Image.open(file) as image:
            return image.size
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, EOFError and more
        reraise_shortage(error)
        return None


def _side(pixels: int) -> int:
    """Return the largest usual input size that images of this size fill."""
    return max((side for side in SIDES if side <= pixels), default=SIDES[0])


def _missing(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is missing, so that the recipe cannot be tried."""
    data = {name: value for name, value in values["data"].items() if name in ("source", "root", "name", "download")}
    if data.get("download"):
        return (f"the data is fetched when the recipe is run; {data['name']} was not looked at",)
    settings = DataSettings(**(data | ({"root": Path(data["root"])} if "root" in data else {})))
    weights = missing_weights(ModelSettings(**values["model"]))
    return tuple(text for text in (missing_data(settings), weights) if text is not None)


def _fitted(values: dict[str, Any], prepared: JobSubject) -> dict[str, Any]:
    """Return the recipe with epochs and learning rates for the number of images and the kind of model."""
    images, batch = len(prepared.splits.train), values["data"]["batch"]
    steps = max(1, images // batch)
    kinds = {type(module) for module in prepared.model.modules()}
    normed = not any(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds)
    textual, boxes = prepared.splits.task.texts is not None, prepared.splits.task.heads is not None
    adaptive = textual or boxes or (normed and nn.LayerNorm in kinds)
    rates = {"optimizer": "adamw", "weight_decay": 0.05} if adaptive else {}
    most = 5e-4 if rates else 0.05
    most = 5e-5 if textual and has_weights(prepared.job.model) else most
    epochs = min(90, max(3, 600 // steps))
    rate = "auto" if len(prepared.splits.validation) >= FEWEST else most / 2.5
    made = values | {"finetune": {"epochs": max(2, epochs // 3), **rates, "lr": rate}}
    if "baseline" in values:
        made["baseline"] = {"epochs": epochs, **rates, "lr": most}
    if images < CalibrationSettings.images:
        made["calibration"] = {"images": images}
    return made


def _found(prepared: JobSubject) -> Iterator[str]:
    splits, model = prepared.splits, prepared.model
    counts = ", ".join(f"{len(getattr(splits, part))} for {part}" for part in ("train", "validation", "test"))
    if splits.task.texts is not None:
        yield f"texts: {counts}; the first has {splits.sample_shape[0]} tokens of {splits.vocabulary:,}"
        return
    yield f"images: {counts}; {len(splits.classes)} classes; an input is {tuple(splits.sample_shape)}"
    made_for = image_shape(model)
    if made_for is not None and tuple(made_for) != tuple(splits.sample_shape):
        yield f"{prepared.job.model.name} was made for inputs of {tuple(made_for)}"


def _text(values: Mapping[str, Any], command: list[str], notes: Sequence[str]) -> str:
    """Return the text of the recipe: notes, and each key below a comment that says what it means."""
    head = ["Written by `prunekit init`, to be changed. What else a recipe may hold: prunekit recipe reference"]
    lines = [f"# {line}" for text in (*head, *notes) for line in textwrap.wrap(text, 116)]
    lines += [f"#   {shlex.join(command)} --dry-run   # shows the plan; trains nothing", f"#   {shlex.join(command)}"]
    for key, value in values.items():
        lines += ["", *_entry((key,), value)]
        untrained = key == "model" and value.get("zoo") == "own" and "weights" not in value and "baseline" not in values
        if untrained and values["data"].get("labels", True):
            rates = {"epochs": 2} | (values.get("finetune") or {})
            trained = rates | {"epochs": 3 * rates["epochs"], "lr": 5e-4 if "optimizer" in rates else 0.05}
            lines += ["", *(f"# {line}" for line in _entry(("baseline",), trained))]  # to be uncommented
    return "\n".join(lines) + "\n"


def _entry(path: tuple[str, ...], value: Any) -> Iterator[str]:
    indent = "  " * (len(path) - 1)
    meaning = find(".".join(path))[0].meaning
    first = re.split(r"(?<=\.) (?=[A-Z`])", meaning)[0]
    yield from textwrap.wrap(first, 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    if isinstance(value, dict) and value:
        yield f"{indent}{path[-1]}:"
        for key, inner in value.items():
            yield from _entry((*path, key), inner)
    else:
        yield f"{indent}{path[-1]}: {flow(value)}"
