"""Hugging Face repositories: weights, manifest, configurations, a Python file and a model card in one folder."""

import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.backends.backend import register_backend
from prunekit.backends.files.export_source import ExportSource
from prunekit.backends.folders.library_configs import CONFIG, LibraryLoading, library_loading, processor_config
from prunekit.backends.folders.model_card import RUN, CardFacts, Loading, card
from prunekit.backends.folders.model_file import CODE
from prunekit.backends.standalone import DENSE, FolderBackend, Standalone, build_of, require_same, write_files
from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.compaction.folded_norms import folds_of
from prunekit.compaction.model_folder import (
    FORMAT,
    MANIFEST,
    WEIGHTS,
    facts_of_model,
    load,
    read_manifest,
    stored_tensors,
)
from prunekit.errors import ArtifactError, RunError, UsageError
from prunekit.hooks.model_copy import named_tensors
from prunekit.hooks.wrappers import require_values
from prunekit.models.bitmask import write_tensors
from prunekit.models.interface import ModelInterface
from prunekit.models.zoo import load_factory
from prunekit.utils.files import sha256, with_checksum, write_json, write_text
from prunekit.utils.inputs import input_specs
from prunekit.utils.tensors import lies_channels_last

PROCESSOR = "preprocessor_config.json"
CARD = "README.md"
_PLAN = ("plan.json", "plan.safetensors")
_FOLDER = "OWNER/NAME"


@register_backend(format="hub", about="a Hugging Face repository with a model card, which prunekit loads again")
class Hub(FolderBackend):
    """A folder for a repository of the Hugging Face Hub.

    `prunekit.load` reads `model.safetensors` and `prunekit.json`; `model.py` rebuilds the model without prunekit;
    timm or transformers load it themselves where a configuration has its widths, which is tried; `README.md` is the
    model card, with the figures of the run under `facts["run"]` of the source (`run_facts`).
    """

    reads_folder = True

    def __init__(self) -> None:
        self._standalone = Standalone()

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a folder, load the model from it again, and compare tensors and outputs, which must be the same."""
        require_values(source.model, "a file")
        build = build_of(source)
        path.mkdir()
        tensors, sparse = stored_tensors(source.model)
        write_tensors(tensors, path / WEIGHTS)
        manifest = _manifest(source, build)
        # other libraries read these weights too: they are plain, also where those of the folder are compressed
        manifest |= {"format": FORMAT, "compression": None}
        manifest |= {"sparse": sparse, "sha256": {WEIGHTS: sha256(path / WEIGHTS)}}
        write_json(path / MANIFEST, with_checksum(manifest))
        for name in _PLAN if source.folder is not None else ():
            if (source.folder / name).is_file():  # type: ignore[operator]
                shutil.copyfile(source.folder / name, path / name)  # type: ignore[operator]
        loaded = _loaded(source, path, build)
        if loaded is not None:
            require_same(source, loaded, MANIFEST)
        notes, alone = _write_code(source, path)
        if loaded is None and alone.code:
            require_same(source, self._standalone.load(path, source.facts.get(DENSE) or source.model), CODE)
        known = library_loading(source.model, source.example, source.interface, build, path / WEIGHTS)
        _write_configs(source, path, build, known)
        ways = [_with_prunekit(manifest), alone, *([_with_library(known)] if known is not None else [])]
        library = known.library if known is not None and known.config is not None else "prunekit"
        write_text(path / CARD, card(_card_facts(source, path, library, ways, notes)))
        if known is not None and known.reason:
            notes.append(f"{known.library} cannot load it by itself: {known.reason}")
        return notes

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface in `prunekit.json`."""
        manifest = read_manifest(path)
        return ModelInterface.from_dict(manifest.get("interface"), str(path / MANIFEST))

    def load(self, path: Path) -> nn.Module:
        """Load a folder by `prunekit.load`, or by its `model.py` where the user's code builds the dense model."""
        if read_manifest(path).get("build"):
            return load(path)
        if not (path / CODE).is_file():
            raise ArtifactError(f"{path}: prunekit.load({str(path)!r}, model=...) needs the code that builds the model")
        return self._standalone.load(path)


def _manifest(source: ExportSource, build: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the manifest of the model's folder, or of a dense model."""
    own = {"interface": source.interface.as_dict(), "classes": list(source.interface.classes)}
    if source.folder is not None:
        return {**read_manifest(source.folder), **own, "channels_last": lies_channels_last(source.model)}
    zoo = build if build is not None and build.get("zoo") != "own" else None
    model = source.model
    _require_dense(source, build)
    return {
        **facts_of_model(model, input_specs(source.example)),
        "build": None if zoo is None else {key: zoo.get(key) for key in ("name", "zoo", "arguments")},
        "kept": {},
        "attention_heads": {},
        "attributes": {},
        "widths_of_bare_norms": {},
        "dense_shapes": {},
        "provenance": {},
        **own,
    }


def _require_dense(source: ExportSource, build: Mapping[str, Any] | None) -> None:
    """Raise if a model without a folder is pruned: a pruned model is loaded with its plan, which only a folder has."""
    dense = Standalone().dense(source)
    if dense is None:
        raise UsageError(
            f"{type(source.model).__name__}: expected a model folder, or a model that a library or --model "
            "file.py:factory builds: write prunekit.save(result, 'small'), and export that folder"
        )
    theirs = {name: tensor.shape for name, tensor in named_tensors(dense)}
    folded = {f"{layer}.bias" for layer in folds_of(source.model).values()}
    for name, tensor in named_tensors(source.model):
        if name not in folded and theirs.get(name) != tensor.shape:
            raise UsageError(
                f"{type(source.model).__name__}: {name} is narrower than its library makes it, so the model is pruned, "
                "and only a model folder says how: write prunekit.save(result, 'small'), and export that folder"
            )


def _loaded(source: ExportSource, path: Path, build: Mapping[str, Any] | None) -> nn.Module | None:
    """Return the model that `prunekit.load` reads; None if it takes code that nobody named."""
    if read_manifest(path).get("build"):
        return load(path)
    if build is not None and build.get("zoo") == "own":
        return load(path, lambda: load_factory(str(build["name"])))
    dense = source.facts.get(DENSE)
    return None if dense is None else load(path, dense)


def _write_code(source: ExportSource, path: Path) -> tuple[list[str], Loading]:
    """Write `model.py`, and return notes and a section for the card."""
    heading = "Without prunekit"
    try:
        notes = write_files(source, path, weights=False)
    except RunError as error:
        reason = f"{CODE} cannot be written: {error}"
        return [reason], Loading(
            heading, text="Only prunekit loads this model: its structure cannot be written as source."
        )
    given = "" if "def build(" in (path / CODE).read_text(encoding="utf-8") else "dense"
    shell = "\n\n# or, in a shell: python model.py image.jpg" if source.interface.preprocessing is not None else ""
    lines = f"from model import load\n\nmodel = load({given}){shell}"
    text = f"`{CODE}` rebuilds the model with torch and the package of the original, in source that can be read."
    return notes, Loading(heading, lines, text)


def _with_prunekit(manifest: Mapping[str, Any]) -> Loading:
    own = manifest.get("build") is None
    given = ", model=build" if own else ""
    text = "`build` is the function of the model's owner that builds the dense model." if own else ""
    lines = [
        "from huggingface_hub import snapshot_download",
        "import prunekit",
        "",
        f'model = prunekit.load(snapshot_download("{_FOLDER}"){given})',
    ]
    return Loading("With prunekit", "\n".join(lines), text)


def _with_library(known: LibraryLoading) -> Loading:
    heading = f"With {known.library}"
    if known.config is None:
        return Loading(heading, text=f"{known.library} cannot load it by itself: {known.reason}.")
    where = f'from huggingface_hub import snapshot_download\n\nFOLDER = snapshot_download("{_FOLDER}")\n'
    return Loading(heading, where + known.code)


def _write_configs(
    source: ExportSource, path: Path, build: Mapping[str, Any] | None, known: LibraryLoading | None
) -> None:
    config: dict[str, Any] = dict(known.config or {}) if known is not None else {}
    if not config:
        classes = source.interface.classes
        config = {
            "library_name": "prunekit",
            "class": original_of(type(source.model)).__name__,
            "num_parameters": sum(parameter.numel() for parameter in source.model.parameters()),
            **({"build": dict(build)} if build is not None and build.get("zoo") != "own" else {}),
            **({"id2label": {str(i): name for i, name in enumerate(classes)}} if classes else {}),
        }
    write_json(path / CONFIG, config)
    preprocessing = source.interface.preprocessing
    if preprocessing is not None:
        write_json(path / PROCESSOR, processor_config(preprocessing) or preprocessing.as_dict())


def _card_facts(source: ExportSource, path: Path, library: str, ways: list[Loading], notes: list[str]) -> CardFacts:
    run = source.facts.get(RUN) or {}
    name = (run.get("dense") or {}).get("name") or original_of(type(source.model)).__name__
    parameters = sum(parameter.numel() for parameter in source.model.parameters())
    title = f"{name}, pruned" if run or source.folder is not None else str(name)
    made = f"Written by prunekit {version('prunekit')} with torch {torch.__version__}."
    stored = (path / WEIGHTS).stat().st_size
    return CardFacts(title, library, source.interface, parameters, stored, run, tuple(ways), (*notes, made))
