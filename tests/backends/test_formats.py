"""Files of every format compute what the model computes, at several batch sizes, and say how they are fed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from exporting import Convolutions, Named, of_size, require_same, source_of, write
from torch import nn

import prunekit as pk
from prunekit.backends.backend import FORMATS
from prunekit.backends.files.export_source import ExportOptions
from prunekit.errors import ArtifactError, RunError, UsageError
from prunekit.models.interface import TensorSpec, interface_of

HERE = ["onnx", "openvino", "pt2", "executorch", "aoti"]


def usable(name: str) -> str:
    if problem := FORMATS.get(name).unusable():
        pytest.skip(problem)
    return name


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_inputs_and_outputs_of_every_kind_keep_their_names_and_order(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = Named().eval(), Named.example()
    file = write(usable(name), source_of(model, example, task="regression", classes=("one", "two")), tmp_path)
    interface = FORMATS.get(name).interface(file)
    assert [spec.name for spec in interface.inputs] == ["weight", "unused", "a"]
    assert [spec.name for spec in interface.outputs] == ["linear", "relu", "again", "output_weight"]
    assert {spec.shape for spec in (*interface.inputs, *interface.outputs)} == {("batch", 3)}
    assert (interface.task, interface.classes) == ("regression", ("one", "two"))
    run = FORMATS.get(name).open_trusted(file)
    for samples in (2, 5, 1):
        require_same(model, run, Named.example(samples))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onnx", "openvino", "pt2"])
def test_axes_besides_the_batch_may_be_of_any_size(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = Convolutions().eval(), (torch.randn(2, 3, 20, 20),)
    options = ExportOptions(dynamic={"image": {2: "height", 3: "width"}})
    file = write(usable(name), source_of(model, example, options=options), tmp_path)
    assert FORMATS.get(name).interface(file).inputs == (
        TensorSpec("image", "float32", ("batch", 3, "height", "width")),
    )
    run = FORMATS.get(name).open(file)
    for shape in ((2, 3, 20, 20), (3, 3, 31, 14)):
        require_same(model, run, (torch.randn(shape),))


def tokens(samples: int, length: int) -> tuple[pk.Keywords]:
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return (pk.Keywords(input_ids=torch.randint(0, 40, (samples, length)), attention_mask=mask),)


@pytest.fixture(scope="module")
def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    return pk.prune(model, tokens(2, 9), macs=0.7).model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onnx", "pt2"])
def test_a_transformer_with_named_inputs_takes_sequences_of_any_length(
    name: str, language_model: nn.Module, tmp_path: Path
) -> None:
    axes = {1: "sequence"}
    options = ExportOptions(dynamic={"input_ids": axes, "attention_mask": axes})
    file = write(usable(name), source_of(language_model, tokens(2, 9), options=options), tmp_path)
    assert [str(spec) for spec in FORMATS.get(name).interface(file).inputs] == [
        "input_ids: int64 (batch, sequence)",
        "attention_mask: int64 (batch, sequence)",
    ]
    run = FORMATS.get(name).open(file)
    for shape in ((2, 9), (5, 9), (3, 17)):
        require_same(language_model, run, tokens(*shape))


@pytest.mark.slow
def test_pruned_shifted_windows_take_a_batch_of_any_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    from torchvision.models.swin_transformer import SwinTransformer

    model = SwinTransformer([2, 2], 8, [2], [2], [4, 4], num_classes=3).eval()
    example = (torch.randn(2, 3, 24, 24),)
    pruned = pk.prune(model, example, macs=0.6).model.eval()
    file = write("pt2", source_of(pruned, example), tmp_path)
    run = FORMATS.get("pt2").open(file)
    for samples in (2, 5):
        require_same(pruned, run, of_size(example, samples))


@pytest.mark.slow
def test_an_interface_with_a_number_of_samples_is_exported_with_it(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(3, -1) * 2

    model, example = Fixed(), (torch.randn(3, 4),)
    found = interface_of(model, example)
    fixed = replace(found, inputs=tuple(replace(spec, shape=(3, *spec.shape[1:])) for spec in found.inputs))
    source = replace(source_of(model, example), interface=fixed, example=(example[0][:2],))  # samples are repeated
    file = write("onnx", source, tmp_path)
    assert FORMATS.get("onnx").interface(file).inputs[0].shape == (3, 4)
    require_same(model, FORMATS.get("onnx").open(file), example)


@pytest.mark.parametrize("name", ["pt2", "aoti", "executorch", "litert", "ncnn", "tensorrt"])
def test_half_is_refused_where_the_format_has_none(name: str, tmp_path: Path) -> None:
    source = source_of(nn.Linear(3, 2), (torch.randn(2, 3),), options=ExportOptions(half=True))
    with pytest.raises(UsageError, match=r"half: .* use onnx or openvino"):
        FORMATS.get(name).write(source, tmp_path / "model")


def test_what_is_needed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("prunekit.utils.availability.find_spec", lambda name: None)
    for name in ("onnx", "openvino", "executorch", "litert", "ncnn", "tensorrt"):
        assert "pip install" in FORMATS.get(name).unusable()
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}):
        assert "C++ compiler" in FORMATS.get("aoti").unusable()


@pytest.mark.parametrize("name", HERE)
def test_a_file_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    if problem := FORMATS.get(name).missing():
        pytest.skip(problem)
    file = tmp_path / f"model{FORMATS.get(name).suffix}"
    with pytest.raises(ArtifactError, match=str(file)):
        FORMATS.get(name).open(file)
    file.write_bytes(b"something else" * 100)
    for read in (FORMATS.get(name).open, FORMATS.get(name).interface):
        with pytest.raises(ArtifactError, match=str(file)):
            read(file)


def test_examples_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = source_of(Convolutions(), (torch.randn(2, 3, 20, 20),))
    for dynamic, message in (({"x": {2: "height"}}, "'image'"), ({"image": {4: "depth"}}, "4 axes")):
        wrong = replace(source, options=ExportOptions(dynamic=dynamic))
        with pytest.raises(UsageError, match=message):
            FORMATS.get("pt2").write(wrong, tmp_path / "model.pt2")
    with pytest.raises(UsageError, match=r"expected image: float32 \(batch, 3, 20, 20\), got \(2, 3, 9, 9\)"):
        FORMATS.get("pt2").write(replace(source, example=(torch.randn(2, 3, 9, 9),)), tmp_path / "model.pt2")
    with pytest.raises(UsageError, match="got 2 tensors"):
        FORMATS.get("pt2").write(replace(source, example=source.example * 2), tmp_path / "model.pt2")
    dynamic = replace(source, options=ExportOptions(dynamic={"image": {2: "height"}}))
    with pytest.raises(UsageError, match=r"height \(axis 2 of image\) is 1 in it; expected 2 or more"):
        FORMATS.get("pt2").write(replace(dynamic, example=(torch.randn(2, 3, 1, 20),)), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_one_sample_is_enough_for_a_batch_of_any_size(tmp_path: Path) -> None:
    model, example = Convolutions().eval(), (torch.randn(2, 3, 20, 20),)
    source = replace(source_of(model, example), example=(example[0][:1],))
    run = FORMATS.get("pt2").open(write("pt2", source, tmp_path))
    for samples in (1, 4):
        require_same(model, run, of_size(example, samples))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "called"), [("onnx", "ONNX"), ("executorch", "ExecuTorch")])
def test_an_operator_that_a_format_lacks_is_named_with_its_line(name: str, called: str, tmp_path: Path) -> None:
    if problem := FORMATS.get(name).missing():
        pytest.skip(problem)

    class Bessel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(x)  # the line

    model = nn.Sequential(nn.Linear(6, 6), Bessel())
    message = rf"Sequential cannot be exported to {called}: .*bessel_j0.* at 1 \(test_formats.py:\d+: .*# the line\)"
    with pytest.raises(RunError, match=message):
        FORMATS.get(name).write(source_of(model, (torch.randn(2, 6),)), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
