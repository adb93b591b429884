"""Repositories for the Hugging Face Hub: they load again, by prunekit, by their own library, and without either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import prunekit as pk
from prunekit.backends.files.export_source import ExportSource
from prunekit.backends.folders.library_configs import library_loading, processor_config
from prunekit.backends.folders.model_card import CardFacts, Loading, block, card, code, plain, run_facts
from prunekit.backends.hub import Hub
from prunekit.backends.standalone import imported
from prunekit.errors import ArtifactError, UsageError
from prunekit.hooks.model_copy import copied
from prunekit.models.interface import interface_of
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings
from prunekit.utils.inputs import as_example
from tests.synthetic_run import write_run

AWKWARD = ["plain", "a|b", "c`d``e", "two\nlines", "<script>", "[link](x)", "# head", "---", "ünï*code*", ""]


def source_of(model: nn.Module, x: Any, folder: Path | None = None, **facts: Any) -> ExportSource:
    model = copied(model).eval()
    example = as_example(model, x)
    size = x.shape[-1]
    preprocessing = pk.Preprocessing(height=size, width=size, shorter_side=size + 8)
    classes = AWKWARD if facts.pop("named", True) else ()
    interface = interface_of(model, example, task="image_classification", classes=classes, preprocessing=preprocessing)
    return ExportSource(model, example, interface, folder=folder, facts=facts)


def pruned(folder: Path, settings: ModelSettings, x: torch.Tensor, **wanted: Any) -> ExportSource:
    torch.manual_seed(0)
    model = build_model(settings, num_classes=None)
    pk.save(pk.prune(model, x, **wanted), folder, build=settings)
    return source_of(pk.load(folder), x, folder)


def front_matter(text: str) -> dict[str, Any]:
    from ruamel.yaml import YAML

    _, header, _ = text.split("---\n", 2)
    found: dict[str, Any] = YAML(typ="safe").load(header)
    return found


def test_a_pruned_model_loads_again_from_its_repository(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=())
    settings = ModelSettings("resnet8", "cifar")
    source = pruned(run / "model", settings, torch.rand(2, 3, 32, 32), macs=0.5)
    source = ExportSource(
        source.model, source.example, source.interface, folder=source.folder, facts=run_facts(run / "model")
    )
    out = tmp_path / "out"
    assert Hub().write(source, out) == []
    names = {path.name for path in out.iterdir()}
    assert names == {
        "README.md", "config.json", "manifest.json", "model.py", "model.safetensors", "plan.json", "plan.safetensors",
        "preprocessor_config.json", "prunekit.json",
    }  # fmt: skip
    with torch.no_grad():
        expected = source.model(*source.example)
    assert torch.equal(Hub().open(out)(source.example)[0], expected)
    assert torch.equal(imported(out / "model.py").load()(*source.example), expected)
    assert Hub().interface(out) == source.interface
    assert pk.load_plan(out).widths() == pk.load_plan(run / "model").widths()
    text = (out / "README.md").read_text(encoding="utf-8")
    header = front_matter(text)
    assert header["library_name"] == "prunekit"
    assert "license" not in header
    assert "# license: left to the owner" in text
    (result,) = header["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "accuracy", "name": "top-1, percent", "value": 98.52}]
    assert "| **pruned** | 98.52 % (97.10 to 99.25) | 33.7 M | 9.41 M | 37.7 MB |" in text
    assert "| pruned | cpu | 16 | eager | 1 | float32 | 18.3 ms | 2.21× (2.16 to 2.27) |" in text
    assert 'prunekit.load(snapshot_download("OWNER/NAME"))' in text
    assert str(tmp_path) not in text


def test_a_card_says_what_another_machine_measured(tmp_path: Path) -> None:
    facts = run_facts(write_run(tmp_path / "run", only=()))["run"]
    target = {"device": "pi|5", "batch": 1, "runtime": "ncnn", "threads": 4, "dtype": "fp32"}
    final = {"ms": 3.3162, "speedup": 2.0084, "speedup_low": 1.953, "speedup_high": 2.075, "stable": True}
    interface = source_of(nn.Linear(2, 2), torch.rand(2, 2)).interface
    text = card(
        CardFacts("net", "prunekit", interface, 1, 1, facts | {"delivered": {"target": target, "final": final}}, [], [])
    )
    where = "device pi\\|5, batch 1, runtime ncnn, threads 4, dtype fp32"
    assert f"Measured on another machine ({where}): 3.32 ms, 2.01× (1.95 to 2.08)." in text


def test_cards_are_well_formed_for_the_hub(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    run = write_run(tmp_path / "run", only=())
    facts = run_facts(run)
    facts["run"] |= {"dense": {"name": "net`|work\n---\nx: y"}, "data": {"name": 'a: "b"\n- c', "source": "own"}}
    model = build_model(ModelSettings("resnet8", "cifar"), num_classes=None)
    source = source_of(model, torch.rand(2, 3, 32, 32))
    loading = [Loading("With code", "print('```')", "text")]
    title = "odd | `title`\n---\nx: {y}"
    text = card(CardFacts(title, "prunekit", source.interface, 10, 10, facts["run"], loading, ["a | note\n# not"]))
    parsed = hub.ModelCard(text)
    assert parsed.data.library_name == "prunekit"
    assert parsed.data.pipeline_tag == "image-classification"
    (result,) = parsed.data.eval_results
    assert (result.metric_value, result.dataset_type) == (98.52, "a-b---c")
    lines = text.splitlines()
    tables = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} == {3, 6, 9}
    assert [line for line in lines if line.startswith("# ")][1:] == ["# odd \\| \\`title\\` --- x: \\{y\\}"]
    assert "10 classes: plain, a\\|b, c\\`d\\`\\`e, two lines, \\<script\\>, \\[link\\]\\(x\\), \\# head" in text


@pytest.mark.parametrize("text", AWKWARD)
def test_any_text_stays_on_its_line(text: str) -> None:
    assert "\n" not in plain(text) + code(text)
    assert not plain(text).replace("\\|", "").count("|")
    inner = code(text).replace("\\|", "|")
    fence = inner[: len(inner) - len(inner.lstrip("`"))]
    assert inner.endswith(fence)
    assert fence not in inner[len(fence) : -len(fence)].strip()
    assert block(text).splitlines()[0].rstrip("python") == block(text).splitlines()[-1]


@pytest.mark.slow
def test_timm_loads_widths_that_a_configuration_has(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    settings = ModelSettings("test_vit", "timm", arguments={"num_classes": 10})
    x = torch.rand(2, 3, 160, 160)
    source = pruned(tmp_path / "small", settings, x, macs=0.95, ignore=["*proj*", "*qkv*"], ratios={"*fc1": 0.5})
    widths = {name: shape[0] for name, shape in shapes(source.model).items() if name.endswith("fc1.weight")}
    out = tmp_path / "out"
    notes = Hub().write(source, out)
    assert len({*widths.values()}) == 1
    assert not [note for note in notes if "cannot load it" in note]
    loaded = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(*source.example), source.model(*source.example))
    assert "timm.create_model" in (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [3, 160, 160]
    assert "license" not in config["pretrained_cfg"]
    assert front_matter((out / "README.md").read_text())["library_name"] == "timm"


@pytest.mark.slow
def test_timm_says_which_widths_no_configuration_has(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    source = pruned(tmp_path / "small", ModelSettings("test_resnet", "timm"), torch.rand(2, 3, 64, 64), macs=0.5)
    (*_, note) = Hub().write(source, tmp_path / "out")
    assert note.startswith("timm cannot load it by itself: no configuration that was tried has the widths")
    assert "timm cannot load it by itself" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["library_name"] == "prunekit"


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


@pytest.mark.slow
def test_transformers_loads_widths_that_a_configuration_has(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    settings = ModelSettings("vit", "hf", arguments={**arguments, "image_size": 32, "num_classes": 10})
    x = torch.rand(2, 3, 32, 32)
    source = pruned(tmp_path / "small", settings, x, macs=0.95, ignore=["*proj*"], ratios={"*fc1": 0.5})
    out = tmp_path / "out"
    notes = Hub().write(source, out)
    assert not [note for note in notes if "cannot load it" in note]
    loaded = transformers.ViTForImageClassification.from_pretrained(out).eval()
    assert loaded.config.intermediate_size < 64
    with torch.no_grad():
        torch.testing.assert_close(loaded(*source.example).logits, source.model(*source.example).logits)


def test_processors_do_what_the_preprocessing_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pixels = np.random.default_rng(0).integers(0, 256, (60, 48, 3), dtype=np.uint8)
    for given in ({"shorter_side": 40}, {}, {"shorter_side": 40, "interpolation": "bicubic", "white": 127.5}):
        preprocessing = pk.Preprocessing(height=32, width=32, **given)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor_config(preprocessing)))
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
        found = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
        # resized in 8 bits by one, and in floating point by the other
        assert (found - preprocessing(pixels)).abs().mean() < 0.02
    assert processor_config(pk.Preprocessing(height=32, width=32, channel_order="bgr")) is None


def test_dense_models_need_no_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    build = {"name": "resnet8", "zoo": "cifar", "arguments": {"num_classes": 10}}
    model = build_model(ModelSettings("resnet8", "cifar"), num_classes=None)
    source = source_of(model, torch.rand(2, 3, 32, 32), build=build)
    assert Hub().write(source, tmp_path / "out") == []
    loaded = pk.load(tmp_path / "out")
    assert torch.equal(loaded(*source.example), source.model(*source.example))


def test_a_pruned_model_without_its_folder_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(ModelSettings("resnet8", "cifar"), num_classes=None)
    x = torch.rand(2, 3, 32, 32)
    small = pk.prune(model, x, macs=0.5).model
    with pytest.raises(UsageError, match=r"narrower than its library makes it.*prunekit\.save"):
        Hub().write(source_of(small, x), tmp_path / "out")
    sequential = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10))
    sequential(x)
    with pytest.raises(UsageError, match="expected a model folder"):
        Hub().write(source_of(sequential, x), tmp_path / "other")


def test_models_of_a_users_own_code(tmp_path: Path) -> None:
    (tmp_path / "own_net_of_hub.py").write_text(
        "from torch import nn\n\n\ndef net():\n"
        "    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))\n"
    )
    build = {"name": f"{tmp_path / 'own_net_of_hub.py'}:net", "zoo": "own", "arguments": {}}
    torch.manual_seed(0)
    from prunekit.models.zoo import load_factory

    x = torch.rand(2, 3, 8, 8)
    folder = pk.save(pk.prune(load_factory(build["name"]), x, macs=0.5), tmp_path / "small")
    source = source_of(pk.load(folder, load_factory(build["name"])), x, folder, build=build)
    (note,) = Hub().write(source, tmp_path / "out")
    assert "own_net_of_hub" in note
    assert torch.equal(Hub().open(tmp_path / "out")(source.example)[0], source.model(*source.example))
    text = (tmp_path / "out" / "README.md").read_text()
    assert "model=build" in text
    assert str(tmp_path) not in text + (tmp_path / "out" / "model.py").read_text()


def test_facts_of_a_run_without_metrics(tmp_path: Path) -> None:
    assert run_facts(tmp_path) == {}
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"metrics\.json: expected an object with figures of the pruned model"):
        run_facts(tmp_path)


def test_other_libraries_have_no_configuration(tmp_path: Path) -> None:
    model = build_model(ModelSettings("resnet8", "cifar"), num_classes=None)
    source = source_of(model, torch.rand(2, 3, 32, 32))
    assert library_loading(model, source.example, source.interface, None, tmp_path / "model.safetensors") is None
