"""Model folders that a stranger may have written: refused when they are loaded, or usable; never a raw error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutants import changed_arrays, changed_values, damaged_bytes, unclean
from safetensors.torch import load_file, save_file

import prunekit as pk
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings
from prunekit.utils.files import sha256, with_checksum

PIXELS = np.full((8, 8, 3), 128, np.uint8)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders") / "small"
    settings = ModelSettings("resnet8", "cifar", arguments={"num_classes": 5})
    result = pk.prune(build_model(settings, num_classes=5), torch.randn(1, 3, 8, 8), macs=0.5)
    feed = pk.Preprocessing(height=8, width=8)
    return pk.save(
        result, folder, build=settings, preprocessing=feed, classes=list("abcde"), task="image_classification"
    )


def use(folder: Path) -> None:
    found = pk.predict(folder, PIXELS)
    str(found), found.rows()


def test_the_sound_folder_is_used(sound: Path) -> None:
    use(sound)


@pytest.mark.slow
def test_damaged_manifests_are_refused_or_usable(sound: Path) -> None:
    text = json.loads((sound / "prunekit.json").read_text())

    def read(mutant: Any) -> None:
        mutant = with_checksum(mutant) if isinstance(mutant, dict) else mutant
        (sound / "prunekit.json").write_text(json.dumps(mutant))
        use(sound)

    def read_bytes(mutant: bytes) -> None:
        (sound / "prunekit.json").write_bytes(mutant)
        use(sound)

    try:
        assert unclean(read, changed_values(text, 150, seed=0)) == []
        assert unclean(read_bytes, damaged_bytes(json.dumps(text).encode(), 50, seed=0)) == []
    finally:
        (sound / "prunekit.json").write_text(json.dumps(text))


@pytest.mark.slow
def test_damaged_weights_are_refused_or_usable(sound: Path) -> None:
    text = json.loads((sound / "prunekit.json").read_text())
    path = sound / "model.safetensors"
    content = path.read_bytes()
    arrays = {name: tensor.numpy() for name, tensor in load_file(path).items()}

    def with_sum() -> None:
        checked = with_checksum({**text, "sha256": {path.name: sha256(path)}})
        (sound / "prunekit.json").write_text(json.dumps(checked))
        use(sound)

    def read(mutant: dict[str, np.ndarray[Any, Any]]) -> None:
        native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in mutant.items()}
        save_file({name: torch.from_numpy(array.copy()) for name, array in native.items()}, path)
        with_sum()

    def read_bytes(mutant: bytes) -> None:
        path.write_bytes(mutant)
        with_sum()

    try:
        assert unclean(read, changed_arrays(arrays, 100, seed=0)) == []
        assert unclean(read_bytes, damaged_bytes(content, 60, seed=0)) == []
    finally:
        path.write_bytes(content)
        (sound / "prunekit.json").write_text(json.dumps(text))
