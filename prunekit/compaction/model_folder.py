"""The model folder: `model.safetensors` and `prunekit.json`; tensors and text, no pickle, no code."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from safetensors import SafetensorError
from torch import nn

from prunekit.channels.cut.model_match import own_buffers, require_compact
from prunekit.channels.cut.shorter_model import shorten_
from prunekit.channels.cut.slicing import bare_widths, resize, set_bare_widths
from prunekit.channels.labels.branch import WHOLE, Shortening, is_inside
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rewrite.source_rewriter import attribute_values, set_attributes
from prunekit.channels.tracing.storages import from_parts, is_plain, parts_of
from prunekit.channels.tracing.substitutes import Heads, heads_of, set_heads
from prunekit.compaction.folded_norms import folds_of, with_folded_biases, with_folds
from prunekit.errors import ArtifactError, ModelError, UsageError
from prunekit.hooks.model_copy import foreign_methods, hidden_parameters, named_tensors, with_tensors, without_values
from prunekit.hooks.wrappers import require_values, unwrapped
from prunekit.known_names import is_export_name
from prunekit.models.bitmask import COMPRESSION, is_compressed, read_tensors, write_tensors
from prunekit.models.hugging_face import set_noted_config
from prunekit.models.interface import ENTRY, ModelInterface, attach, read_interface, saved_interface
from prunekit.models.names import SUFFIXES
from prunekit.models.preprocessing import Preprocessing
from prunekit.models.state_dicts import tensor_problem
from prunekit.models.vocabulary import NOTE as VOCABULARY
from prunekit.models.vocabulary import without_removed
from prunekit.models.zoo import as_build, build_model, found_build, from_build
from prunekit.modes.public_call import public_call
from prunekit.planning.plan import Plan, require_plan
from prunekit.planning.stored_plan import LIBRARY_CONFIG
from prunekit.reading.text_files import read_json
from prunekit.settings.inputs import ModelSettings
from prunekit.utils import files
from prunekit.utils.context import seeded, set_mode
from prunekit.utils.inputs import InputSpec
from prunekit.utils.tensors import lies_channels_last, with_channels_last

FORMAT, COMPRESSED_FORMAT = 1, 2
"""Formats of the manifest: the second is for compressed weights, which older versions must not read as the first."""
SLOW_TO_START = {("torchvision", "googlenet"), ("torchvision", "inception_v3")}
"""Models whose own initialization takes seconds, for weights that are replaced at once."""
WEIGHTS = "model.safetensors"
MANIFEST = "prunekit.json"
FILES = frozenset({WEIGHTS, MANIFEST, "plan.json", "plan.safetensors"})


class ModelWithPlan(Protocol):
    """A compact model with its plan, such as `prunekit.prune` returns."""

    @property
    def model(self) -> nn.Module:
        """The compact model."""

    @property
    def plan(self) -> Plan:
        """The plan that it was made by."""


@public_call
def save(
    result: nn.Module | ModelWithPlan,
    folder: files.StrPath,
    plan: Plan | None = None,
    *,
    build: ModelSettings | None = None,
    extra: Mapping[str, Any] | None = None,
    preprocessing: Preprocessing | None = None,
    classes: Sequence[str] = (),
    task: str | None = None,
    example: Any = None,
    compress: bool = False,
) -> Path:
    """Write a compact model and its plan as a folder, complete or not at all.

    The folder says how to feed the model: its inputs and outputs, which one run on the example shows, and what is given
    of preprocessing, classes and task. A model that was loaded from a folder keeps what that one said.

    Args:
        result: the compact model, its norms folded or not; or the result of `prunekit.prune`, which has its plan.
        folder: made, or replaced once the new one is complete, unless it has other files, which would be lost;
            `prunekit.load` reads the model from it, and `prunekit.load_plan` the plan.
        plan: that the model was compacted with.
        build: how the dense model is built; of a folder of transformers its configuration is kept, not the path. None
            if only the caller's own code can do it, and gives the dense model to `load`.
        extra: further facts for readers of the manifest, as JSON values.
        preprocessing: the way from an image to the model's input.
        classes: name of each label.
        task: its name, as in a recipe.
        example: that names, dtypes and shapes are taken from; None: zeros like the example that the plan was made with.
        compress: whether zeros take one bit each in `model.safetensors`, as a bitmask beside the values that are not
            zero, in each tensor that it makes smaller. `load` gives the same tensors, bit for bit. Other programs
            read such a file by a few lines of NumPy, which are in the guide's page on the model folder.

    Raises:
        UsageError: it is no compact model with its plan, or the folder has other files; the message says what to give.
        PlanError: the model is not the one that the plan makes; nothing is written.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> result = pk.prune(model, torch.randn(1, 4), macs=0.5)
        >>> folder = pk.save(result, "small")
        >>> pk.load(folder, model=model)[0].out_features
        8
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
        >>> result = pk.prune(net, torch.randn(1, 64), macs=0.5)
        >>> with torch.no_grad():
        ...     _ = result.model[0].weight[:, ::2].zero_()
        >>> folders = pk.save(result, "plain"), pk.save(result, "zeros_as_bits", compress=True)
        >>> plain, small = ((folder / "model.safetensors").stat().st_size for folder in folders)
        >>> small < 0.6 * plain
        True
    """
    model, plan = _parts(result, plan)
    folder = files.folder_at(folder)
    files.require_replaceable(folder, FILES)
    require_values(model, "a file")
    folds = folds_of(model)
    indices = with_folded_biases(plan.kept_indices, folds)
    kept = {
        name: [None if index is None else index.tolist() for index in axes]
        for name, axes in indices.items()
        if name not in plan.lost
    }
    shorter = plan.channel_map.branches.shortening(plan.keep)
    shapes = with_folded_biases(plan.channel_map.shapes, folds)
    require_compact(plan.channel_map, model, with_folded_biases(plan.narrow_shapes, folds))
    specs = plan.channel_map.inputs
    interface = saved_interface(model, specs, example=example, preprocessing=preprocessing, classes=classes, task=task)
    with files.atomic_folder(folder) as temporary:
        tensors, sparse = stored_tensors(model)
        compressed = write_tensors(tensors, temporary / WEIGHTS, compress=compress)
        manifest = {
            **facts_of_model(model, specs),
            "format": COMPRESSED_FORMAT if compressed else FORMAT,
            "compression": COMPRESSION if compressed else None,
            "build": None if build is None else as_build(build),
            "kept": kept,
            "attention_heads": {path: list(entry) for path, entry in heads_of(model).items()},
            "attributes": attribute_values(model, plan.channel_map, plan.keep),
            "widths_of_bare_norms": bare_widths(model, plan.channel_map, plan.keep),
            "dense_shapes": {name: list(shapes[name]) for name in kept},
            **({"shorter": shorter.as_json()} if shorter else {}),
            "sparse": sparse,
            ENTRY: interface.as_dict(),
            "provenance": dict(plan.provenance),
            "sha256": {WEIGHTS: files.sha256(temporary / WEIGHTS)},
            **(extra or {}),
        }
        if manifest["build"] is None:
            manifest["build"] = found_build(
                model,
                plan.channel_map.shapes,
                specs,
                lambda known: _assembled(
                    folder, {**manifest, "build": known}, _with_sparse(dict(tensors), sparse), None
                ),
            )
        files.write_json(temporary / MANIFEST, files.with_checksum(manifest))
        plan.save(temporary)
    return folder


def stored_tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """Return the tensors that a model's weights file holds, and layout and shape of those that are in parts: sparse."""
    own = {name: tensor.detach().cpu() for name, tensor in named_tensors(model)}
    sparse = {name: tensor for name, tensor in own.items() if not is_plain(tensor)}
    tensors = {name: tensor for name, tensor in own.items() if name not in sparse}
    for name, tensor in sparse.items():
        tensors |= {f"{name}:{i}": part for i, part in enumerate(parts_of(tensor))}
    layouts = {name: str(tensor.layout).removeprefix("torch.") for name, tensor in sparse.items()}
    return tensors, {name: [layouts[name], list(tensor.shape)] for name, tensor in sparse.items()}


def _parts(result: Any, plan: Any) -> tuple[nn.Module, Plan]:
    """Return the compact model and its plan."""
    if isinstance(result, (str, PathLike)):
        raise UsageError(
            f"save: expected the model first, got the path {str(result)!r}: prunekit.save(small, {str(result)!r}, plan)"
        )
    if isinstance(result, Plan):
        raise UsageError(
            "save: expected a compact model, got a Plan: prunekit.save(prunekit.compact(model, plan), folder, plan) "
            "writes both, and plan.save(folder) the plan alone"
        )
    own = None if isinstance(result, nn.Module) else getattr(result, "plan", None)
    if isinstance(own, Plan):
        if plan is not None:
            raise UsageError(f"save: expected no plan beside a {type(result).__name__}, which has its own")
        return unwrapped(result.model), own
    model = unwrapped(result)
    require_plan(plan)
    return model, plan


def facts_of_model(model: nn.Module, inputs: Sequence[InputSpec]) -> dict[str, Any]:
    """Return the manifest's entries that tell of a model by itself, pruned or not."""
    return {
        "format": FORMAT,
        "class": type(model).__name__,
        "folded_norms": folds_of(model),
        "foreign_methods": foreign_methods(model),
        "channels_last": lies_channels_last(model),
        "example": _example(inputs),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }


def _example(inputs: Sequence[InputSpec]) -> dict[str, Any]:
    """Return the manifest's entry for the example; for one positional float32 tensor the shape alone."""
    known: dict[str, Any] = {"shapes": [list(one.shape) for one in inputs]}
    if [(one.dtype, one.name) for one in inputs] != [("float32", None)]:
        known["dtypes"] = [one.dtype for one in inputs]
    if any(one.name for one in inputs):
        known["names"] = [one.name for one in inputs]
    return known


def _read_by(file: Path) -> str:
    """Return what reads a file that was given in place of a model folder."""
    if (file.parent / MANIFEST).is_file():
        return f"give the folder that it is in: prunekit.load({str(file.parent)!r})"
    if file.suffix in SUFFIXES:
        read = "safetensors.torch.load_file" if file.suffix == ".safetensors" else "torch.load"
        return f"build its model, and give it its weights by model.load_state_dict({read}(path))"
    if is_export_name(file.name):
        return "which a runtime runs: prunekit.predict(path, images), and `prunekit evaluate`, `bench` and `inspect`"
    if file.suffix in (".yaml", ".yml"):
        return "a recipe by its name, which prunekit.finetune(path) runs"
    return "no model folder"


def read_manifest(folder: files.StrPath) -> dict[str, Any]:
    """Return the manifest of a model folder."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        alone = (Path(folder) / "plan.json").is_file()
        hint = f"; this is a plan, which prunekit.load_plan({str(folder)!r}) reads" if alone else ""
        if path.parent.is_file():
            hint = f"; this is a file, {_read_by(path.parent)}"
        if left := files.replaced(Path(folder)):
            hint = f"; a process that was killed while it replaced it left it as {left[0].name!r}: rename that"
        raise ArtifactError(
            f"{folder}: expected a model folder with {MANIFEST} and {WEIGHTS}; {MANIFEST} is not there{hint}"
        )
    wanted = {"format": int, "kept": dict, "dense_shapes": dict, "example": dict, "sha256": dict}
    return checked_manifest(path, wanted, (FORMAT, COMPRESSED_FORMAT))


def checked_manifest(path: Path, wanted: Mapping[str, type], formats: Sequence[int]) -> dict[str, Any]:
    """Return the manifest in a file, which has some entries, is of a known format, and was not changed."""
    manifest = read_json(path)
    if not isinstance(manifest, dict) or any(not isinstance(manifest.get(k), t) for k, t in wanted.items()):
        raise ArtifactError(f"{path}: expected an object with {', '.join(wanted)}; the manifest is damaged")
    if manifest["format"] not in formats:
        raise ArtifactError(
            f"{path}: format {manifest['format']}, expected {' or '.join(map(str, formats))}: a newer prunekit wrote "
            "it; load it with that version or a later one"
        )
    files.require_checksum(path, manifest)
    return manifest


def folder_interface(folder: files.StrPath) -> ModelInterface:
    """Return the interface in a model folder, without its model."""
    return read_interface(read_manifest(folder), str(Path(folder) / MANIFEST))


@public_call
def load(folder: files.StrPath, model: nn.Module | Callable[[], nn.Module] | None = None) -> nn.Module:
    """Load a compact model from its folder, in eval mode on the CPU.

    The dense model is built without allocating its weights, and gets the folder's structure and weights. No code that
    the folder names is imported or executed, except a constructor from a known zoo.

    If the folder holds preprocessing, the model has it as `model.preprocessing`, unless that is a name of its own: a
    function of image files, Pillow images or pixels that returns the model's input.

    Args:
        folder: written by prunekit.
        model: the dense model or a function that builds it, for models that are not from a known zoo; not changed.

    Raises:
        ArtifactError: the folder is missing, damaged, or does not belong to that dense model.
        ModelError: the folder does not say how to build the model and none was given.

    Example:
        >>> import prunekit as pk, torch
        >>> def build():
        ...     return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> folder = pk.save(pk.prune(build(), torch.randn(1, 4), macs=0.5), "small")
        >>> pk.load(folder, model=build)[2].in_features
        8
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 2))
        >>> feed = pk.Preprocessing(height=8, width=8)
        >>> folder = pk.save(pk.prune(net, torch.randn(1, 3, 8, 8), macs=0.5), "photos", preprocessing=feed)
        >>> loaded = pk.load(folder, model=net)
        >>> photo = torch.zeros(40, 50, 3, dtype=torch.uint8).numpy()
        >>> loaded(loaded.preprocessing(photo)).shape
        torch.Size([1, 2])
    """
    folder = files.folder_at(folder)
    if not (model is None or callable(model)):
        raise ModelError(
            f"model: expected the dense model or a function that builds it, got {type(model).__name__}: "
            f"prunekit.load({str(folder)!r}, model=lambda: MyModel())"
        )
    manifest = read_manifest(folder)
    interface = read_interface(manifest, str(folder / MANIFEST))
    loaded = _assembled(folder, manifest, _weights(folder, manifest), model)
    attach(loaded, interface)
    return loaded


def _assembled(
    folder: Path,
    manifest: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    model: nn.Module | Callable[[], nn.Module] | None,
) -> nn.Module:
    """Return the compact model of a manifest and its tensors, in eval mode; see `load`."""
    with _blaming(folder, "shorter: not as prunekit writes it"):
        shorter = Shortening.from_json(manifest["shorter"]) if "shorter" in manifest else WHOLE
    dense = _dense(folder, manifest, model, tensors.keys(), shorter)
    later = tensors.keys() & _unmade(dense)
    _check(folder, manifest, dense, {name: tensor for name, tensor in tensors.items() if name not in later}, shorter)
    loaded = with_tensors(dense, tensors)
    for name in later:
        path, _, own = name.rpartition(".")
        setattr(loaded.get_submodule(path), own, tensors[name])
    entries = "shorter, attention_heads, widths_of_bare_norms, attributes or provenance"
    with _blaming(folder, f"{entries}: does not fit the model"):
        shorten_(loaded, shorter)
        set_heads(loaded, _heads(manifest))
        resize(loaded)
        set_bare_widths(loaded, _widths(manifest))
        set_attributes(loaded, manifest.get("attributes", {}))
        set_noted_config(loaded, manifest.get("provenance", {}).get(LIBRARY_CONFIG))
    if not isinstance(model, nn.Module):
        _require_placed(folder, loaded)
    return set_mode(loaded, False)


def _unmade(model: nn.Module) -> set[str]:
    """Return the names of buffers that are None until forward makes them."""
    own = [(f"{path}.{name}".lstrip("."), one) for path, m in model.named_modules() for name, one in m._buffers.items()]
    return {name for name, one in own if one is None}


def _require_placed(folder: Path, model: nn.Module) -> None:
    """Raise if a model that was built anew has parameters that no folder can fill: those of no registered module."""
    known = {id(tensor) for _, tensor in named_tensors(model)}
    stray = next((name for name, value in hidden_parameters(model) if id(value) not in known), None)
    if stray is not None:
        raise ArtifactError(
            f"{folder}: {stray} is a parameter that the model does not register, as in a plain list of modules, so the "
            "folder has no values for it: use nn.ModuleList or nn.ModuleDict in its class, or load the folder into the "
            "trained dense model itself, model=INSTANCE"
        )


@contextmanager
def _blaming(folder: Path, what: str) -> Iterator[None]:
    """Say what in a folder's manifest is wrong if reading it, or applying it to a model, raises in this context."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder / MANIFEST}: {what}: {error}") from error


def _heads(manifest: dict[str, Any]) -> Heads:
    found = manifest.get("attention_heads", {})
    entries = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(entry, list) and [type(item) for item in entry] == [str, int] for entry in entries):
        raise ValueError("expected module paths with a class name and a whole number")
    return {path: (name, count) for path, (name, count) in found.items()}


def _widths(manifest: dict[str, Any]) -> dict[str, int]:
    widths = manifest.get("widths_of_bare_norms", {})
    if not isinstance(widths, dict) or any(not isinstance(width, int) or width < 1 for width in widths.values()):
        raise ValueError("expected module paths with whole numbers of at least 1")
    return widths


def _dense(
    folder: Path,
    manifest: dict[str, Any],
    model: nn.Module | Callable[[], nn.Module] | None,
    names: Set[str],
    shorter: Shortening,
) -> nn.Module:
    if isinstance(model, nn.Module):
        return _folded(folder, manifest, model)
    if model is None and not manifest.get("build"):
        raise ModelError(
            f"{folder}: this model ({manifest.get('class')}) was built by its owner's code; "
            f"load it with prunekit.load({str(folder)!r}, model=...), that code or the dense model that it builds"
        )
    with seeded(0):
        with suppress(Exception), without_values():
            empty = _folded(folder, manifest, _construct(folder, manifest, model))
            own = {name for name, _ in named_tensors(empty) if name in names or not _is_gone(name, shorter)}
            if own == names - _unmade(empty):
                return empty
        # a constructor that looks at its weights, or ties them: empty ones do not stay tied
        return _folded(folder, manifest, _construct(folder, manifest, model))


def _folded(folder: Path, manifest: dict[str, Any], dense: nn.Module) -> nn.Module:
    """Return the dense model with its norms folded, and without the tokens that are removed, as in the folder."""
    with _blaming(folder, "vocabulary: does not fit the model"):
        whole = without_removed(unwrapped(dense, offloaded=True), manifest.get("provenance", {}).get(VOCABULARY))
    with _blaming(folder, "folded_norms: does not fit the model"):
        return with_folds(whole, manifest.get("folded_norms"))


def _construct(folder: Path, manifest: dict[str, Any], model: Callable[[], nn.Module] | None) -> nn.Module:
    if model is not None:
        built = _called(model)
        if not isinstance(built, nn.Module):
            got = "None" if built is None else f"a {type(built).__name__}"
            raise ModelError(f"model: expected a function that returns the dense model, got {got} from it")
        return built
    settings = from_build(manifest["build"])
    if settings is None:
        raise ArtifactError(f"{folder / MANIFEST}: build: expected name, zoo and arguments, got {manifest['build']!r}")
    quiet = {"init_weights": False} if (settings.zoo, settings.name) in SLOW_TO_START else {}
    settings = replace(settings, arguments={**settings.arguments, **quiet})
    _require_room(folder, settings)
    try:
        return build_model(settings, num_classes=None)
    except ModelError as error:
        raise ArtifactError(f"{folder / MANIFEST}: build: {error}") from error


def _require_room(folder: Path, settings: ModelSettings) -> None:
    """Raise unless the model that a folder's build names fits into memory, before any of it is allocated."""
    size, free = 0, psutil.virtual_memory().available
    with suppress(Exception), torch.device("meta"):  # a constructor that looks at its weights is not judged
        size = sum(tensor.nbytes for _, tensor in named_tensors(build_model(settings, num_classes=None)))
    if size > free:
        raise ArtifactError(
            f"{folder / MANIFEST}: build: the {settings.name} that it asks for takes {size:,} bytes, and {free:,} of "
            f"memory are free: {settings.arguments!r:.200}"
        )


def _called(factory: Callable[[], Any]) -> Any:
    """Call a user's function without arguments."""
    try:
        signature(factory).bind()
    except TypeError as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise ModelError(
            f"model: expected a function without arguments, and {name} needs some ({error}): model=lambda: {name}(...)"
        ) from None
    except ValueError:  # it has no signature that Python can read
        pass
    return factory()


def folder_tensors(folder: Path, manifest: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder's weights file, row-major and uncompressed, sparse ones in parts."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise ArtifactError(f"{path}: missing; the model folder is incomplete")
    if files.sha256(path) != manifest["sha256"].get(WEIGHTS):
        raise ArtifactError(f"{path}: its checksum is not the one in {MANIFEST}; the file is damaged or was exchanged")
    try:
        found, noted = COMPRESSION if is_compressed(path) else None, manifest.get("compression")
        if found != noted:
            raise ArtifactError(
                f"{path}: its compression is {found}, and in {MANIFEST} {noted}: they do not belong together"
            )
        return read_tensors(path)
    except (SafetensorError, ValueError) as error:
        raise ArtifactError(f"{path}: {error}") from error


def _weights(folder: Path, manifest: dict[str, Any]) -> dict[str, torch.Tensor]:
    # copies: the file's own layout is not aligned, which changes the last bit of results of CPU kernels
    copied = with_channels_last if manifest.get("channels_last") is True else torch.clone
    tensors = {name: copied(tensor) for name, tensor in folder_tensors(folder, manifest).items()}
    with _blaming(folder, "sparse: does not fit the tensors"):
        return _with_sparse(tensors, manifest.get("sparse", {}))


def _with_sparse(tensors: dict[str, torch.Tensor], sparse: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, sparse ones put together from their indices and values."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in sparse}
    for key in sorted(tensors):
        if key.rpartition(":")[0] in parts:
            parts[key.rpartition(":")[0]].append(tensors.pop(key))
    made = {name: from_parts(layout, shape, parts[name]) for name, (layout, shape) in sparse.items()}
    return {**tensors, **made}


def _is_gone(name: str, shorter: Shortening) -> bool:
    """Return whether a tensor may be missing, as its module is gone."""
    return is_inside(name.rpartition(".")[0], shorter.modules)


def _check(
    folder: Path, manifest: dict[str, Any], dense: nn.Module, tensors: dict[str, torch.Tensor], shorter: Shortening
) -> None:
    """Raise unless every tensor of the dense model is there, as are its replaced methods, and has the kept shape."""
    problems = [
        f"{name} was set on the saved model itself and is not in its class, nor set on this one"
        for name in sorted({*manifest.get("foreign_methods", [])} - {*foreign_methods(dense)})
    ]
    # unpruned buffers of the model's own classes may differ: `forward` may make them for the size of its input
    remade = own_buffers(dense) - manifest["kept"].keys()
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(dense)
              if name in tensors or not _is_gone(name, shorter)}  # fmt: skip
    for name in sorted(shapes.keys() ^ tensors.keys()):
        problems.append(f"{name} is {'missing in the folder' if name in shapes else 'not in the dense model'}")
    for name, shape in shapes.items():
        if name in remade:
            continue
        kept = manifest["kept"].get(name, [None] * len(shape))
        if not isinstance(kept, list):
            raise ArtifactError(f"{folder / MANIFEST}: kept[{name}]: expected a list with an entry for each axis")
        expected = tuple(size if index is None else len(_indices(folder, name, index, size))
                         for size, index in zip(shape, kept, strict=False))  # fmt: skip
        if name in tensors and (len(kept) != len(shape) or tuple(tensors[name].shape) != expected):
            problems.append(f"{name}: shape {tuple(tensors[name].shape)}, expected {expected} of dense {shape}")
    problems += [f"{name}: {problem}" for name, own in named_tensors(dense) if name in tensors and name not in remade
                 and tensors[name].layout == torch.strided
                 and (problem := tensor_problem(tensors[name], own)) is not None]  # fmt: skip
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ArtifactError(f"{folder}: does not belong to this dense model: {shown}")


def _indices(folder: Path, name: str, index: Any, size: int) -> Labels:
    try:
        array = np.asarray(index, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0, dtype=np.int64)
    if array.ndim != 1 or not array.size or array[0] < 0 or array[-1] >= size or (np.diff(array) <= 0).any():
        raise ArtifactError(f"{folder / MANIFEST}: kept[{name}]: expected ascending indices below {size}")
    return array
