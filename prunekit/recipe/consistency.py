"""The consistency of a recipe: checks of several keys together, on plain values, so that all problems are reported."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from prunekit.known_names import CRITERIA, FORMATS, RUNTIMES, TASKS
from prunekit.recipe.keys import show
from prunekit.recipe.yaml_positions import KeyPath
from prunekit.settings.calibration import FEWEST_IMAGES
from prunekit.settings.inputs import BOXED, TEXTUAL, DataSettings, ModelSettings
from prunekit.settings.job import unlabeled_contradictions
from prunekit.settings.pruning import WITH_REPAIR, budget_names, facts_without_code, other_budgets, prune_contradictions
from prunekit.settings.train import OWN_RATES, RANDOM_RATES, REWOUND_RATES, TrainSettings, finetune_contradictions
from prunekit.settings.weight_pattern import pattern_problems
from prunekit.utils.availability import UNKNOWN_DEVICE

Finding = tuple[KeyPath, str]
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
ROOTS = {
    "imagefolder": "a folder of images",
    "npz": "an .npz file",
    "torchvision": "the folder of torchvision's data sets",
    "coco": "the folder of a data set in the format of COCO",
    "yolo": "the folder of a data set of ultralytics",
    "text": "a file of text, or a folder of them",
}
GOES_WITH = {
    "name": ("torchvision", "huggingface", "coco"),
    "download": ("torchvision", "huggingface"),
    "columns": ("huggingface",),
    "images": ("shapes",),
    "targets": BOXED,
    "category_ids": ("coco",),
    "tokenizer": ("text", "huggingface"),
    "window": ("text", "huggingface"),
    "stride": ("text", "huggingface"),
}
ROOTLESS = {"digits": "come with the package", "own": "are given as --data file.py:factory"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def consistency(values: Mapping[str, Any], *, typed: bool = True) -> Iterator[Finding]:
    """Yield every key path whose value contradicts the rest of the recipe, with what was expected."""
    yield from _finite(values, ())
    for check in CHECKS:
        try:
            yield from list(check(values))
        except (TypeError, ValueError, LookupError, AttributeError):
            if typed:
                raise


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of the recipe: {} if it is left out, or no mapping, which is reported elsewhere."""
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _root(data: Mapping[str, Any], source: Any) -> Iterator[Finding]:
    because = f"because data.source is {source!r}"
    if source in ROOTS and data.get("root") is None:
        yield ("data", "root"), f"expected the path of {ROOTS[source]}, {because}, got nothing"
    if source in ROOTLESS and data.get("root") is not None:
        text = f"expected nothing, {because}, which {ROOTLESS[source]}, got {show(data['root'])}"
        yield ("data", "root"), f"{text}; set data.source to {' or '.join(map(repr, ROOTS))}"
    if source == "torchvision" and data.get("name") is None:
        yield ("data", "name"), f"expected a data set of torchvision, such as CIFAR10, {because}, got nothing"
    if source == "huggingface":
        yield from _exactly_one(data, ("data",), ("root", "name"))
        if data.get("name") is not None and data.get("download", False) is False:
            text = "expected true, because data.name is given, got false"
            yield ("data", "download"), f"{text}; or save the data set with its `save_to_disk` and give data.root"
    for key, sources in GOES_WITH.items():
        if source not in sources and data.get(key):
            text = f"expected nothing, {because}, got {show(data[key])}"
            yield ("data", key), f"{text}; it goes with data.source {' or '.join(map(repr, sources))}"


def _task(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that data is of the kind that the task takes: images with boxes, texts, or images with a label each."""
    task, data = values.get("task", "image_classification"), _section(values, "data")
    source = data.get("source", "digits")
    if source in BOXED and task != "detection":
        yield ("task",), f"expected 'detection', because data.source is {source!r}, which has boxes, got {show(task)}"
    elif task == "detection" and source not in (*BOXED, "own") and source in ("huggingface", *ROOTS, *ROOTLESS):
        text = f"expected {', '.join(map(repr, BOXED))} or 'own', because task is 'detection', got {show(source)}"
        yield ("data", "source"), text
    textual = ("text", "huggingface", "own")
    if source == "text" and task not in TEXTUAL and task in TASKS.declared:
        text = f"expected {', '.join(map(repr, TEXTUAL))}, because data.source is 'text', got {show(task)}"
        yield ("task",), text
    elif task in TEXTUAL and source not in textual and source in (*ROOTS, *ROOTLESS):
        text = f"expected {', '.join(map(repr, textual))}, because task is {show(task)}, got {show(source)}"
        yield ("data", "source"), text


def _augment(augment: Any) -> Iterator[Finding]:
    if not isinstance(augment, Mapping):
        return
    scale, crop = augment.get("scale"), augment.get("crop", "none")
    if scale is not None and crop in ("none", "shift", "padded"):
        text = f"expected nothing, because data.augment.crop is {show(crop)}, got {show(scale)}"
        yield ("data", "augment", "scale"), f"{text}; it goes with 'resized'"
    shares = scale if isinstance(scale, list) and all(isinstance(one, int | float) for one in scale) else []
    if shares != sorted(shares):
        yield ("data", "augment", "scale"), f"expected the smaller share first, got {', '.join(map(str, shares))}"
    if augment.get("trivial_augment") is True and augment.get("rand_augment") is not None:
        text = "expected false, because data.augment.rand_augment is given, got true"
        yield ("data", "augment", "trivial_augment"), f"{text}; remove one of them"


def _finite(value: Any, path: KeyPath) -> Iterator[Finding]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"expected a finite number, got {show(value)}"
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _finite(item, (*path, key))


def _names(values: Mapping[str, Any]) -> Iterator[Finding]:
    name, device = values.get("name", "unnamed"), values.get("device", "auto")
    if isinstance(name, str) and not NAME.fullmatch(name):
        expected = "a name for a folder (letters, digits, '.', '_' and '-', a letter or digit first)"
        yield ("name",), f"expected {expected}, got {show(name)}"
    if isinstance(device, str) and not DEVICE.fullmatch(device):
        yield ("device",), f"{UNKNOWN_DEVICE}, got {show(device)}"


def _budget(values: Mapping[str, Any]) -> Iterator[Finding]:
    prune = _section(values, "prune")
    budget = prune.get("budget")
    if not isinstance(budget, Mapping):
        return
    names = [*budget_names(), "max_drop"]
    others = other_budgets(budget)
    if not others and prune.get("pattern") is None and all(budget.get(name) is None for name in names):
        yield ("prune", "budget"), f"expected at least one of {', '.join(map(repr, names))}, got none"
    for name, value in others.items():
        if (problem := facts_without_code(name).problem(value)) is not None:
            yield ("prune", "budget", name), problem


def _activations(values: Mapping[str, Any]) -> Iterator[Finding]:
    activations = values.get("activations")
    if isinstance(activations, Mapping):
        yield from _exactly_one(activations, ("activations",), ("threshold", "target", "overall"))


def _images(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the number of images: statistics of patches, and repair, need some to fit on and others to judge by."""
    calibration, prune = _section(values, "calibration"), _section(values, "prune")
    images = calibration.get("images", FEWEST_IMAGES)
    criterion = str(prune.get("criterion"))
    known = CRITERIA.declared.get(criterion)
    reasons = {
        "repair is given": isinstance(values.get("repair"), Mapping),
        f"prune.criterion is {criterion!r}": known is not None and "patches" in known.facts["needs"],
    }
    because = " and ".join(reason for reason, holds in reasons.items() if holds)
    if because and isinstance(images, int) and 0 < images < FEWEST_IMAGES:
        text = f"expected at least {FEWEST_IMAGES}, because {because}, got {images}"
        yield ("calibration", "images"), f"{text}; a thousand is a good number"


def _deploy(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that channels last has an effect on what is timed, and is compared with models without it."""
    deploy, latency = _section(values, "deploy"), _section(values, "latency")
    if deploy.get("channels_last") is not True:
        return
    runtimes, formats = latency.get("runtimes", ["eager"]), latency.get("memory_formats", [])
    laid_out = [
        name for name, declared in RUNTIMES.declared.items() if {"format", "carrier"}.isdisjoint(declared.facts)
    ]
    if isinstance(runtimes, list) and set(map(str, runtimes)) <= RUNTIMES.declared.keys() - set(laid_out):
        text = f"expected one of {', '.join(map(repr, laid_out))} among them, because deploy.channels_last is true"
        yield ("latency", "runtimes"), f"{text}, and other runtimes choose layouts themselves"
    if isinstance(formats, list) and "channels_last" in formats:
        text = "expected contiguous alone, because deploy.channels_last is true: that model is timed with channels last"
        yield ("latency", "memory_formats"), f"{text}, beside others that are not"


def _schedule(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the pattern and the schedule, and that nothing is repaired before it prunes first."""
    prune = _section(values, "prune")
    if isinstance(pattern := prune.get("pattern"), Mapping):
        yield from ((("prune", "pattern", *key), text) for key, text in pattern_problems(pattern))
    yield from ((("prune", *path), text) for path, text in prune_contradictions(prune))
    if isinstance(prune.get("schedule"), Mapping) and isinstance(values.get("repair"), Mapping):
        yield ("repair",), WITH_REPAIR


def _exactly_one(section: Mapping[str, Any], path: KeyPath, keys: tuple[str, ...]) -> Iterator[Finding]:
    expected = f"expected exactly one of {', '.join(map(repr, keys[:-1]))} and {keys[-1]!r}"
    given = [key for key in keys if section.get(key) is not None]
    if not given:
        yield path, f"{expected}, got {'neither' if len(keys) == 2 else 'none'}"
    elif len(given) > 1:
        got = "both" if len(keys) == 2 else " and ".join(map(repr, given))
        remedy = "remove one or set it to null" if len(given) == 2 else "remove all but one or set them to null"
        yield (*path, given[-1]), f"{expected}, got {got}; {remedy}"


def _baseline(values: Mapping[str, Any]) -> Iterator[Finding]:
    model = _section(values, "model")
    if not model or model.get("zoo") == "own":  # whose factory may load weights itself
        return
    name = model.get("name")
    if model.get("zoo") == "hf" and isinstance(name, str) and ModelSettings(name, "hf").folder is not None:
        return  # a folder of transformers has its weights
    bare = model.get("weights") is None and values.get("baseline") is None
    if bare and _section(values, "data").get("labels") is False:
        yield ("model", "weights"), "expected trained weights, because data.labels is false, got nothing"
    elif bare:
        text = "expected a mapping that says how to train the dense model, because model.weights is not given, got {}"
        yield ("baseline",), text.format("null" if "baseline" in values else "nothing")


def _head(values: Mapping[str, Any]) -> Iterator[Finding]:
    model = _section(values, "model")
    zoo = model.get("zoo", "torchvision")
    if model.get("head") is not None and zoo != "hf":
        text = f"expected nothing, because model.zoo is {show(zoo)}, got {show(model['head'])}; it goes with 'hf'"
        yield ("model", "head"), text


def _training(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the three sections that train."""
    sparsify = values.get("sparsify")
    if isinstance(sparsify, Mapping) and sparsify.get("regularize") is None:
        text = "expected a mapping, because making channels small is what sparsify is for, got nothing"
        yield ("sparsify", "regularize"), f"{text}; for example {{method: group_lasso}}"
    for name in ("baseline", "sparsify", "finetune"):
        section = _section(values, name)
        optimizer, momentum = section.get("optimizer", "sgd"), section.get("momentum", TrainSettings.momentum)
        if section.get("nesterov") is True and (optimizer != "sgd" or momentum == 0):
            given = f"optimizer is {show(optimizer)}" if optimizer != "sgd" else "momentum is 0"
            yield (name, "nesterov"), f"expected false, because {name}.{given}, got true"
        if section.get("lr") == "auto":
            schedule = _section(values, "prune").get("schedule")
            rewinds = isinstance(schedule, Mapping) and schedule.get("rewind_lr") is True
            if optimizer == "own":
                yield (name, "lr"), OWN_RATES
            elif name == "baseline" and _section(values, "model").get("weights") is None:
                yield (name, "lr"), RANDOM_RATES
            elif name == "finetune" and rewinds:
                yield (name, "lr"), REWOUND_RATES
        if name == "baseline" and section.get("distill") not in (None, "auto"):
            text = f"expected null, because the dense model is the teacher, got {show(section['distill'])}"
            yield (name, "distill"), f"{text}; set finetune.distill"
        elif isinstance(section.get("distill"), Mapping) and values.get("task") == "embedding":
            text = "expected nothing, because task is 'embedding', which learns the dense model's outputs already"
            yield (name, "distill"), f"{text}, got {show(section['distill'])}"
        elif isinstance(taught := section.get("distill"), Mapping) and taught.get("blend") is True:
            mixes = next((key for key in ("mixup", "cutmix") if section.get(key)), None)
            if mixes is not None:
                yield (name, "distill", "blend"), f"expected false, because {name}.{mixes} blends images too, got true"
        regularize = section.get("regularize")
        if name != "sparsify" and isinstance(regularize, Mapping) and regularize.get("method") == "growing":
            text = "expected 'group_lasso' or 'bn_l1', got 'growing', which shrinks what a plan removes before it goes"
            yield (name, "regularize", "method"), f"{text}; use it in sparsify"


def _sharding(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that nothing needs the whole weights in each process under `sharding: full`."""
    prune = _section(values, "prune")
    for name in ("baseline", "sparsify", "finetune"):
        section = _section(values, name)
        if section.get("sharding") != "full":
            continue
        because = f"because {name}.sharding is 'full'"
        for key in ("average", "regularize"):
            if section.get(key) is not None:
                yield (name, key), f"expected null, {because}, got {show(section[key])}"
        if section.get("precision") == "fp16":
            yield (name, "precision"), f"expected 'fp32' or 'bf16', {because}, got 'fp16'"
        if name == "finetune" and prune.get("schedule") is not None:
            yield ("prune", "schedule"), f"expected null, {because}, got {show(prune['schedule'])}"


def _data(values: Mapping[str, Any]) -> Iterator[Finding]:
    data = _section(values, "data")
    yield from _root(data, data.get("source", "digits"))
    yield from _augment(data.get("augment"))
    shares = [data.get(key, getattr(DataSettings, key)) for key in ("test_share", "validation_share")]
    if all(isinstance(share, int | float) and 0 < share < 1 for share in shares) and sum(shares) >= 1:
        text = f"expected test_share and validation_share to sum to less than 1, got {shares[0]} + {shares[1]}"
        yield ("data", "test_share"), f"{text}; nothing would be left to train on"


def _quantize(values: Mapping[str, Any]) -> Iterator[Finding]:
    wanted, formats = values.get("quantize"), values.get("export", ())
    able = [name for name, facts in FORMATS.facts().items() if facts.get("quantizer")]
    if wanted is not None and isinstance(formats, (list, tuple)) and {*map(str, formats)}.isdisjoint(able):
        text = f"expected null, or {' or '.join(able)} among the formats of export, got {show(wanted)}"
        yield ("quantize",), f"{text} with export {show(list(formats))}"


CHECKS = (
    _names, _task, unlabeled_contradictions, _budget, _activations, _head, _baseline, _training,
    finetune_contradictions, _sharding, _data, _images, _deploy, _schedule, _quantize,
)  # fmt: skip
