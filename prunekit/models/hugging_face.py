"""Models of transformers: built by type or from a folder, and configurations that say the widths of a pruned one.

Nothing is downloaded, no code of a folder is run, and weights are read from safetensors alone. Of a pruned model's
class nothing is known: a configuration fits if the class builds tensors of the wanted shapes from it, and is right if
what it builds then computes the same.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cached_property, partial
from importlib import import_module
from itertools import combinations, islice, product
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.errors import ModelError, nearest, raised_as, reraise_shortage
from prunekit.hooks.model_copy import named_tensors
from prunekit.models.names import CONFIG
from prunekit.reading.text_files import read_json
from prunekit.settings.inputs import Head, ModelSettings
from prunekit.utils.availability import import_of_extra
from prunekit.utils.context import seeded
from prunekit.utils.display import listed

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
    return tuple(sorted(set(_types(head or IMAGES)) - {"timm_wrapper"}))  # which is a model of timm's by another name


def _types(head: Head) -> Mapping[Any, Any]:
    """Return the names of the classes that have a head, by model type."""
    _library()
    found: Mapping[Any, Any] = getattr(import_module("transformers.models.auto.modeling_auto"), CLASSES[head][1])
    return found


def builder(settings: ModelSettings) -> Callable[..., nn.Module]:
    """Return what builds a model: of a folder with its weights, of a model type with random ones.

    The weights of a folder become float32, whatever they are in its files: training and repair on a CPU are exact and
    fast in that, and `finetune.precision` chooses what is computed in.
    """
    head = settings.head or IMAGES
    if settings.folder is None:
        return partial(_of_type, settings.name, head)
    return partial(_of_folder, settings.folder, head)


def _of_type(name: str, head: Head, /, num_classes: int | None = None, **arguments: Any) -> nn.Module:
    library = _library()
    _require_known(name, arguments)
    try:
        config = library.AutoConfig.for_model(name, **arguments, **_labels(head, num_classes))
    except Exception as error:  # its validation has a family of errors of its own
        reraise_shortage(error)
        raise ValueError(str(error)) from error
    model: nn.Module = getattr(library, CLASSES[head][0]).from_config(config)
    return model


def _of_folder(folder: Path, head: Head, /, num_classes: int | None = None, **arguments: Any) -> nn.Module:
    library = _library()
    config = folder_config(folder)
    _require_known(config.model_type, arguments)
    expected = (
        "; expected the files that `save_pretrained` writes, with safetensors, of a model without code of its own, "
        "with such a head and as many classes as the data"
    )
    failed = f"{folder}: {CLASSES[head][0]} of transformers cannot load it: "
    with raised_as(ModelError, failed, expected, str), _without_bars():
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
    missing = sorted(found["missing_keys"])
    if missing and head in WHOLE:
        raise ModelError(
            f"{folder}: expected the weights of a model with the head {head}, and {len(missing)} are not there: "
            f"{listed(missing, 3)}; set model.head, or the recipe's task, to what the model was trained for"
        )
    made: nn.Module = model.train()
    return made


def structure_of(settings: ModelSettings) -> ModelSettings:
    """Return the settings that build the model of a folder without it: its type and what its configuration changes."""
    if settings.folder is None:
        return settings
    return _of_config(folder_config(settings.folder), settings.head, settings.arguments)


def _of_config(config: Any, head: Head | None, arguments: Mapping[str, Any]) -> ModelSettings:
    """Return the settings that build a model of a configuration: its type, and what it changes of the usual one."""
    usual, own = type(config)().to_dict(), own_fields(config.model_type)
    changed = {key: value for key, value in config.to_dict().items() if key in own and value != usual.get(key)}
    classes = {"num_classes": config.num_labels} if (head or IMAGES) in CLASSIFIERS else {}
    return ModelSettings(config.model_type, "hf", arguments={**changed, **classes, **arguments}, head=head)


def settings_of(model: Any, cls: type) -> ModelSettings | None:
    """Return the settings that build a model of a class of transformers; None if no head of its type has the class."""
    kind = getattr(model.config, "model_type", None)
    for head in CLASSES:
        known = _types(head).get(kind)
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
    named = read_json(folder / CONFIG, finite=False).get("architectures") or [""]
    for head in CLASSES:
        names = [name for name in _types(head).values() if isinstance(name, (str, tuple))]
        if any(named[0] == name or named[0] in name for name in names):
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


def folder_config(folder: Path) -> Any:
    """Return the configuration in a folder, none of whose files name anything outside it."""
    _require_own_files(folder)
    library, expected = _library(), "expected the configuration of a model that transformers knows"
    with raised_as(ModelError, f"{folder / CONFIG}: {expected}: ", "; code of a folder's own is not run", str):
        return library.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


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
    return import_of_extra("transformers", "hf", "model.zoo=hf", ModelError)


Shapes = Mapping[str, tuple[int, ...]]
Changes = dict[str, int]
"""Entries of a configuration that differ from the dense model's, those of one inside it by a dotted path."""
TRIED = 256
"""The most configurations that are built for one choice of widths."""
KEYS = 5
"""The most entries that differ at once."""
NO_WIDTHS = ("_token_id", "_ids", "label", "id2label", "dtype", "_name_or_path", "version")
"""Ends of entries that are no width where they are not given; others may be one, as GPT-2's `n_inner`."""
HEAD_DIM = "head_dim"
"""The width of a head, which many classes read from their configuration where it is there, and else compute."""


def library_model(model: nn.Module) -> tuple[str, Any] | None:
    """Return the path and the module of a model of transformers that is all or a part of a model; None without one.

    Of several models, such as two encoders side by side, none is returned: one configuration cannot say both's widths.
    """
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if base is None:
        return None
    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        if isinstance(module, base) and not any(path.startswith(f"{outer}." if outer else "") for outer, _ in found):
            found.append((path, module))
    return found[0] if len(found) == 1 else None


class ConfigSearch:
    """The search for a configuration of a model's class by the shapes of its tensors.

    The model is dense or compact, and not changed; the configuration is that of the dense one.
    """

    def __init__(self, model: Any, config: Any) -> None:
        self.cls = original_of(type(model))
        self.config = config
        self._attributes = whole_numbers(model)
        self._names = {name for name, _ in named_tensors(model)}
        self._buffer_dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
        self._built: dict[tuple[tuple[str, int], ...], dict[str, tuple[int, ...]] | None] = {}
        self._pinned: Changes = {}
        self._pinned = self._head_dim()

    @cached_property
    def keys(self) -> dict[str, int | None]:
        """The whole numbers of the configuration that may say a width, by dotted path; None where none is given."""
        return dict(_numbers(self.config.to_dict())) | dict(self._pinned)

    @cached_property
    def dense(self) -> Shapes:
        """Shapes of the dense model's tensors."""
        found = self.shapes({})
        return {} if found is None else found

    def made(self, changes: Mapping[str, int]) -> Any:
        """Return the configuration with other entries."""
        return changed_config(self.config, {**self._pinned, **changes})

    def noted(self, changes: Mapping[str, int]) -> dict[str, list[int | None]]:
        """Return the entries of the dense and of the other configuration by dotted path, as plans and folders do."""
        known = dict(_numbers(self.config.to_dict()))
        return {path: [known.get(path), value] for path, value in {**self._pinned, **changes}.items()}

    def shapes(self, changes: Mapping[str, int]) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the model's tensors as the class builds them, without values; None if it refuses.

        The class may build more, such as a pooling layer that the model was loaded without.
        """
        key = tuple(sorted({**self._pinned, **changes}.items()))
        if key not in self._built:
            self._built[key] = None
            with suppress(Exception), quiet_library(), seeded(0), torch.device("meta"):
                built = shapes_of(self.cls(self.made(changes)))
                self._built[key] = {name: shape for name, shape in built.items() if name in self._names}
        return self._built[key]

    def touched(self, changes: Mapping[str, int]) -> set[tuple[str, int]] | None:
        """Return the axes whose size a configuration changes; None if the class refuses it."""
        found = self.shapes(changes)
        return None if found is None else _changed_axes(self.dense, found)

    def fitting(self, wanted: Shapes, counts: Iterable[tuple[int, int]] = ()) -> Iterator[Changes]:
        """Yield entries that make the wanted shapes, those with the fewest changes first.

        Several may fit: the number of heads changes no shape where their width follows from it.
        """
        changed = _changed_axes(self.dense, wanted)
        sizes = {(self.dense[name][axis], wanted[name][axis]) for name, axis in changed} | {*counts}
        options: dict[str, list[int]] = {}
        for key, value in self.keys.items():
            if useful := [one for one in _candidates(value, sizes) if self._useful(key, one, changed)]:
                options[key] = useful
        for chosen in islice(_choices(options), TRIED):
            if self.shapes(chosen) == wanted:
                yield chosen

    def take_rounded(self, built: nn.Module, model: nn.Module) -> None:
        """Give a model that the class built the buffers of another, where the two differ by rounding alone.

        Only buffers in no state dict are taken, such as the frequencies of rotary embeddings: a dense model that was
        cast to half precision has them rounded, while a class may build them wider.
        """
        saved = model.state_dict().keys()
        theirs = {name: buffer for name, buffer in model.named_buffers() if name not in saved}
        for name, own in [*built.named_buffers()]:
            other, dtype = theirs.get(name), self._buffer_dtypes.get(name)
            if other is not None and own.shape == other.shape and torch.equal(own.to(dtype), other.to(dtype)):
                path, _, leaf = name.rpartition(".")
                built.get_submodule(path)._buffers[leaf] = other.clone()

    def _useful(self, key: str, value: int, changed: set[tuple[str, int]]) -> bool:
        """Return whether an entry may be among the changed ones: alone, it changes no axis that should stay."""
        touched = self.touched({key: value})
        if touched is None:
            return True  # the class refuses it alone
        return touched <= changed if touched else key.rpartition(".")[2] in self._attributes

    def _head_dim(self) -> Changes:
        """Return the width of a head, where the class reads it though the configuration does not give it."""
        widths, entries = self._attributes.get(HEAD_DIM, set()), self.config.to_dict()
        if len(widths) != 1:
            return {}
        (width,), known = widths, dict(_numbers(entries))
        paths = [f"{outer}{HEAD_DIM}" for outer in _levels(entries)]
        return {
            path: width
            for path in paths
            if known.get(path) is None and self.shapes({path: width}) == self.dense and self.touched({path: 2 * width})
        }


def changed_config(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a configuration with other entries, by dotted path; None removes one."""
    entries = config.to_dict()
    for path, value in changes.items():
        *outer, key = path.split(".")
        inner = entries
        for name in outer:
            inner = inner[name]
        inner[key] = value
        if value is None:
            del inner[key]
    made = type(config).from_dict(entries)
    with suppress(AttributeError):
        made._attn_implementation = config._attn_implementation
    return made


def set_noted_config(model: nn.Module, note: Mapping[str, Any] | None) -> None:
    """Give the model of transformers in a compact model the configuration that is noted, or else a save that warns."""
    if not note and (found := library_model(model)) is not None:
        vars(found[1])["save_pretrained"] = MethodType(save_pretrained, found[1])  # pickled as the class's own method
    elif note:
        for path, (_, value) in note["config"].items():
            if not (value is None or type(value) is int):
                raise ValueError(f"library_config: {path}: expected a whole number, got {value!r:.99}")
        inner: Any = model.get_submodule(note["module"])
        set_config(inner, changed_config(inner.config, {path: pair[1] for path, pair in note["config"].items()}))


def set_config(model: Any, config: Any) -> None:
    """Give a model of transformers, and all modules in it, another configuration in place of its own."""
    others = {id(old): new for old, new in _both(model.config, config)}
    for module in model.modules():  # several may have the same configuration
        new = others.get(id(vars(module).get("config")))
        if new is not None:
            module.config = new


def save_pretrained(model: Any, *given: Any, **by_name: Any) -> Any:
    """Save a model as its class does, with a warning where the class cannot load that."""
    if (said := unsayable(model)) is not None:
        warnings.warn(said, UserWarning, stacklevel=2)
    return type(model).save_pretrained(model, *given, **by_name)


def unsayable(model: nn.Module) -> str | None:
    """Return a remark on a model of transformers whose configuration says other widths; None if there is none."""
    if (found := library_model(model)) is None:
        return None
    _, inner = found
    said = ConfigSearch(inner, inner.config).dense  # nothing where the class cannot be built without values
    return (
        f"no configuration of transformers says the widths of this {original_of(type(inner)).__name__}: what its own "
        "save_pretrained writes, from_pretrained refuses. Save it by prunekit.save, or by save_pretrained of "
        "prunekit.integrations.transformers; with layout='huggingface' the library's own works"
        if said and said != shapes_of(inner)
        else None
    )


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters and buffers."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}


@contextmanager
def quiet_library() -> Iterator[None]:
    """Keep transformers from logging, warning and showing bars in this context."""
    logging: Any = import_module("transformers.utils.logging")
    level = logging.get_verbosity()
    try:
        logging.set_verbosity_error()
        with _without_bars(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def _both(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Yield two configurations, and the pairs of those that both have inside under the same names."""
    yield old, new
    for name, inner in vars(old).items():
        other = vars(new).get(name)
        if hasattr(inner, "to_dict") and type(other) is type(inner):
            yield from _both(inner, other)


def _changed_axes(dense: Shapes, other: Shapes) -> set[tuple[str, int]]:
    return {
        (name, axis)
        for name, shape in dense.items()
        for axis, (before, after) in enumerate(zip(shape, other.get(name, shape), strict=False))
        if before != after
    }


def _candidates(value: int | None, sizes: set[tuple[int, int]]) -> list[int]:
    """Return values that an entry may have, given dense and wanted sizes of axes that change."""
    found = {after for before, after in sizes if value is None or before == value}
    if value is not None:
        found |= {value * after // before for before, after in sizes if value * after % before == 0}
    return sorted(found - {value, 0})


def _choices(options: Mapping[str, list[int]]) -> Iterator[Changes]:
    for count in range(1, min(KEYS, len(options)) + 1):
        for keys in combinations(options, count):
            for values in product(*(options[key] for key in keys)):
                yield dict(zip(keys, values, strict=True))


def _levels(entries: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield the dotted paths, each with a dot at its end, of a configuration and those inside it."""
    yield at
    for key, value in entries.items():
        if isinstance(value, Mapping) and "model_type" in value:
            yield from _levels(value, f"{at}{key}.")


def _numbers(entries: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, int | None]]:
    for key, value in entries.items():
        if isinstance(value, Mapping) and "model_type" in value:
            yield from _numbers(value, f"{at}{key}.")
        elif (type(value) is int and value > 1) or (value is None and not key.endswith(NO_WIDTHS)):
            yield f"{at}{key}", value


def whole_numbers(model: nn.Module) -> dict[str, set[int]]:
    """Return the whole numbers that are attributes of modules, by name."""
    found: dict[str, set[int]] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is int:
                found.setdefault(name, set()).add(value)
    return found


def embedded_tokens(model: Any) -> int | None:
    """Return how many tokens a model says that it embeds; None if it does not."""
    find, known = getattr(model, "get_input_embeddings", None), None
    with suppress(NotImplementedError):  # of models that embed no tokens, as wav2vec 2.0
        known = find() if callable(find) else None
    return getattr(known, "num_embeddings", None)
