"""Ordinary networks go through the whole journey; `benchmarks/ordinary.py` takes all of them through all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from journey import STEPS, Journey
from network_registry import every_network

NETWORKS = every_network()
WITHOUT_EXPORT = [name for name in STEPS if name != "ONNX"]
FAST = (
    "LeNet", "ImageMLP", "VGG", "SpatialTransformer", "MobileNetV1", "ShuffleNetV1", "SENet", "SKNet", "Autoencoder",
    "VAE", "DCGANDiscriminator", "UNetInLists", "ESPCN", "GatedPixelCNN", "MADE", "SimpleDiffusionUnet", "NeRF",
    "GRUClassifier", "CharRNN", "TextCNN", "Seq2Seq", "WaveNet", "BERT", "ViT", "TransformerTutorial", "AtariDQN",
    "DuelingDQN", "ActorCritic", "SiameseNetwork", "MatrixFactorization", "DeepFM", "DLRM", "PointNet", "GCN",
    "CapsNet", "MultiTaskNet", "LayersByName", "FromConfig", "SizesFromDummyInput", "TinyYolo",
)  # fmt: skip
"""One or two of each kind, and what once failed."""
EXPORTED = ("LeNet", "UNetInLists", "TextCNN")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_networks_go_through_the_journey(name: str, tmp_path: Path) -> None:
    journey = Journey(NETWORKS[name], tmp_path)
    for step in WITHOUT_EXPORT:
        STEPS[step](journey)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_pruned_networks_are_exported(name: str, tmp_path: Path) -> None:
    journey = Journey(NETWORKS[name], tmp_path)
    journey.by_data()
    found = journey.to_onnx()
    assert max(parity.max_relative_difference for parity in found.parities) < 1e-4


def test_networks_are_of_many_kinds() -> None:
    assert len(NETWORKS) > 100
    assert {network.kind for network in NETWORKS.values()} == {
        "attention", "compact", "control", "generative", "graphs", "images", "pictures", "python", "sequences"
    }  # fmt: skip
