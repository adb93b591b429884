"""Models of transformers: by their type in its default configuration, or from a folder with their weights.

Nothing is downloaded, no code of a folder is run, and weights are read from safetensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.errors import ModelError, nearest, reraise_shortage
from prunekit.reading.text_files import read_json
from prunekit.settings.inputs import Head, ModelSettings
from prunekit.utils.display import listed

CONFIG = "config.json"
IMAGES: Head = "image_classification"
"""The head that models of transformers get unless something else is said."""
CLASSES: dict[Head, tuple[str, str]] = {
    IMAGES: ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "text_classification": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "token_classification": ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "causal_lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked_lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "embedding": ("AutoModel", "MODEL_MAPPING_NAMES"),
}
"""By the head the class of transformers, and the mapping with the model types that it knows."""
CLASSIFIERS: tuple[Head, ...] = (IMAGES, "text_classification", "token_classification")
"""Heads with a score for each class of the data."""
OF_TEXTS = frozenset({"decoder_start_token_id", "tie_word_embeddings"})
"""Entries of configurations of texts that some model types take without naming them as their own."""
WHOLE: tuple[Head, ...] = ("causal_lm", "masked_lm", "seq2seq")
"""Heads that a folder must have weights of; others may be new, and be trained."""


def model_types(head: Head | None = None) -> tuple[str, ...]:
    """Return the model types that have a head; None: a classifier of images."""
    _library()
    known = getattr(import_module("transformers.models.auto.modeling_auto"), CLASSES[head or IMAGES][1])
    return tuple(sorted(set(known) - {"timm_wrapper"}))  # which is a model of timm's by another name


def missing_folder(settings: ModelSettings) -> str | None:
    """Return why a model's folder cannot be used, where it was looked for and how to get it.

    None if it is there, or the model is not named by one.
    """
    folder, origin = settings.folder, f"; {settings.origin}" if settings.origin else ""
    if folder is None or (folder / CONFIG).is_file():
        return None
    reason = f"there is no {CONFIG} in it" if folder.is_dir() else "there is no such folder"
    beside = "" if folder.is_absolute() or folder.is_dir() else ", nor beside the recipe that names it"
    return (
        f"model.name: {folder.absolute()}: {reason}{beside}; expected one that `save_pretrained` wrote, with "
        f"{CONFIG} and model.safetensors; nothing is downloaded: hf download NAME --local-dir FOLDER, and give its "
        f"path as model.name=FOLDER{origin}"
    )


def builder(settings: ModelSettings) -> Callable[..., nn.Module]:
    """Return what builds a model: of a folder with its weights, of a model type with random ones.

    The weights of a folder become float32, whatever they are in its files: training and repair on a CPU are exact and
    fast in that, and `finetune.precision` chooses what is computed in.
    """
    head = settings.head or IMAGES
    return _of_type(settings.name, head) if settings.folder is None else _of_folder(settings.folder, head)


def _of_type(name: str, head: Head) -> Callable[..., nn.Module]:
    def build(num_classes: int | None = None, **arguments: Any) -> nn.Module:
        library = _library()
        _require_known(name, arguments)
        try:
            config = library.AutoConfig.for_model(name, **arguments, **_labels(head, num_classes))
        except Exception as error:  # its validation has a family of errors of its own
            reraise_shortage(error)
            raise ValueError(str(error)) from error
        model: nn.Module = getattr(library, CLASSES[head][0]).from_config(config)
        return model

    return build


def _of_folder(folder: Path, head: Head) -> Callable[..., nn.Module]:
    def build(num_classes: int | None = None, **arguments: Any) -> nn.Module:
        library = _library()
        config = _config(folder)
        _require_known(config.model_type, arguments)
        try:
            with _without_bars():
                model, found = getattr(library, CLASSES[head][0]).from_pretrained(
                    str(folder),
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=False,
                    dtype=torch.float32,
                    output_loading_info=True,
                    **arguments,
                    **_labels(head, num_classes),
                )
        except Exception as error:  # OSError, ValueError, RuntimeError, errors of safetensors
            reraise_shortage(error)
            raise ModelError(
                f"{folder}: {CLASSES[head][0]} of transformers cannot load it: {error}; expected the files that "
                "`save_pretrained` writes, with safetensors, of a model that needs no code of its own and has such a "
                "head and as many classes as the data"
            ) from error
        missing = sorted(found["missing_keys"])
        if missing and head in WHOLE:
            raise ModelError(
                f"{folder}: expected the weights of a model with the head {head}, and {len(missing)} are not there: "
                f"{listed(missing, 3)}; set model.head, or the recipe's task, to what the model was trained for"
            )
        made: nn.Module = model.train()
        return made

    return build


def structure_of(settings: ModelSettings) -> ModelSettings:
    """Return the settings that build the model of a folder without it: its type and what its configuration changes."""
    if settings.folder is None:
        return settings
    return _of_config(_config(settings.folder), settings.head, settings.arguments)


def _of_config(config: Any, head: Head | None, arguments: Mapping[str, Any]) -> ModelSettings:
    """Return the settings that build a model of a configuration: its type, and what it changes of the usual one."""
    usual, own = type(config)().to_dict(), own_fields(config.model_type)
    changed = {key: value for key, value in config.to_dict().items() if key in own and value != usual.get(key)}
    classes = {"num_classes": config.num_labels} if (head or IMAGES) in CLASSIFIERS else {}
    return ModelSettings(config.model_type, "hf", arguments={**changed, **classes, **arguments}, head=head)


def settings_of(model: Any, cls: type) -> ModelSettings | None:
    """Return the settings that build a model of a class of transformers; None if no type and head has this class."""
    kind = getattr(model.config, "model_type", None)
    auto = import_module("transformers.models.auto.modeling_auto")
    for head, (_, mapping) in CLASSES.items():
        known = getattr(auto, mapping).get(kind)
        if cls.__name__ in ((known,) if isinstance(known, str) else known or ()):
            return _of_config(model.config, head, {})
    return None


def own_fields(model_type: str) -> frozenset[str]:
    """Return the entries of a configuration that are a model type's own: its sizes.

    Those of every configuration, and unknown ones, may name code to fetch; `OF_TEXTS` are plain values.
    """
    library = _library()
    own = {field.name for field in fields(library.CONFIG_MAPPING[model_type])}
    return frozenset(own - {field.name for field in fields(library.PreTrainedConfig)}) | OF_TEXTS


def head_of(folder: Path) -> Head | None:
    """Return the head of the model in a folder, by the class that its configuration names; None if it is another."""
    _library()
    auto = import_module("transformers.models.auto.modeling_auto")
    named = read_json(folder / CONFIG, finite=False).get("architectures") or [""]
    for head, (_, mapping) in CLASSES.items():
        names: Mapping[str, Any] = getattr(auto, mapping)
        if any(named[0] == name or named[0] in name for name in names.values() if isinstance(name, (str, tuple))):
            return head
    return None


def _require_own_files(folder: Path) -> None:
    """Raise unless what a folder's files name is inside it: parts of its weights, and no kernels to be fetched."""
    for index in folder.glob("*.index.json"):
        parts = (read_json(index) or {}).get("weight_map")
        for part in set(parts.values()) if isinstance(parts, dict) else ():
            if not isinstance(part, str) or Path(part).name != part or "\\" in part:
                raise ModelError(f"{index}: weight_map: expected the names of files in this folder, got {part!r:.99}")
    stack = [read_json(folder / CONFIG)]
    while stack:
        entries = stack.pop()
        if isinstance(entries, dict):
            for key, value in entries.items():
                if key.endswith("_implementation") and not (value is None or str(value).isidentifier()):
                    raise ModelError(
                        f"{folder / CONFIG}: {key}: expected a name such as 'sdpa', got {value!r:.99}: code is not "
                        "fetched for a folder"
                    )
            stack += entries.values()
        elif isinstance(entries, list):
            stack += entries


def _config(folder: Path) -> Any:
    _require_own_files(folder)
    try:
        return _library().AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder / CONFIG}: expected the configuration of a model that transformers knows: {error}; code of a "
            "folder's own is not run"
        ) from error


def _labels(head: Head, num_classes: int | None) -> dict[str, int]:
    return {} if num_classes is None or head not in CLASSIFIERS else {"num_labels": num_classes}


def _require_known(name: str, arguments: Mapping[str, Any]) -> None:
    known = own_fields(name)
    for key in arguments:
        if key not in known:
            raise ValueError(f"there is no {key!r} in the configuration of {name}; {nearest(key, sorted(known))}")


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars in this context."""
    logging = import_module("transformers.utils.logging")
    drawn = logging.is_progress_bar_enabled()
    try:
        logging.disable_progress_bar()
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _library() -> Any:
    try:
        return import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModelError(
            "model.zoo=hf needs the package transformers, which is not installed: pip install prunekit[hf]"
        ) from error
