"""Models of transformers: by type or folder, with the head of a task, built again from their configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language import bert, llama, write_model

import prunekit as pk
from prunekit.errors import ModelError
from prunekit.models.hugging_face import CLASSES, head_of, model_types, own_fields, structure_of
from prunekit.models.zoo import as_build, build_model, from_build, has_weights, missing_weights, with_head
from prunekit.settings.inputs import Head, ModelSettings

TINY = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30,
}  # fmt: skip


@pytest.mark.parametrize(
    ("head", "name", "kind", "classes"),
    [
        ("text_classification", "bert", "BertForSequenceClassification", 3),
        ("token_classification", "bert", "BertForTokenClassification", 3),
        ("causal_lm", "llama", "LlamaForCausalLM", None),
        ("masked_lm", "bert", "BertForMaskedLM", None),
        ("embedding", "bert", "BertModel", None),
    ],
)
def test_a_model_type_gets_the_head_of_the_task(head: Head, name: str, kind: str, classes: int | None) -> None:
    settings = with_head(ModelSettings(name, "hf", arguments=TINY), head)
    assert settings.head == head
    model = build_model(settings, num_classes=3)
    assert type(model).__name__ == kind
    assert classes is None or model.config.num_labels == classes  # type: ignore[union-attr]
    assert name in model_types(head)
    build = json.loads(json.dumps(as_build(settings)))
    assert build["head"] == head
    again = from_build(build)
    assert again == settings


def test_a_decoder_of_an_encoder() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 30}
    model = build_model(with_head(ModelSettings("t5", "hf", arguments=sizes), "seq2seq"), num_classes=None)
    assert type(model).__name__ == "T5ForConditionalGeneration"


def test_a_head_that_a_type_has_not_and_tasks_without_heads() -> None:
    with pytest.raises(ModelError, match=r"no model 'vit' in hf with the head causal_lm"):
        build_model(ModelSettings("vit", "hf", head="causal_lm"), num_classes=None)
    assert with_head(ModelSettings("vit", "hf"), "segmentation").head is None
    assert with_head(ModelSettings("bert", "hf", head="embedding"), "causal_lm").head == "embedding"
    assert with_head(ModelSettings("resnet18"), "causal_lm").head is None
    assert from_build({"name": "bert", "zoo": "hf", "arguments": {}, "head": "odd"}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_has_weights_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    dense = llama().to(dtype)
    folder = write_model(tmp_path / "tiny", dense)
    settings = with_head(ModelSettings(str(folder), "hf"), "causal_lm")
    assert has_weights(settings)
    assert missing_weights(settings) is None
    model = build_model(settings, num_classes=None)
    assert model.training
    assert model.lm_head.weight is model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    known = dense.state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, known[name].float())
    assert head_of(folder) == "causal_lm"


@pytest.mark.slow
@pytest.mark.parametrize("head", ["causal_lm", "masked_lm", "text_classification", "embedding"])
def test_pruned_models_load_again_without_the_folder(tmp_path: Path, head: Head) -> None:
    dense = llama(rms_norm_eps=1e-5) if head == "causal_lm" else bert(layer_norm_eps=1e-5)
    folder = write_model(tmp_path / "tiny", dense)
    classes = {"num_classes": 4} if head == "text_classification" else {}
    settings = with_head(ModelSettings(str(folder), "hf", arguments=classes), head)
    model = build_model(settings, num_classes=None).eval()
    example = {"input_ids": torch.randint(0, 45, (2, 8)), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    result = pk.prune(model, example, macs=0.7)
    saved = pk.save(result, tmp_path / "small", build=settings)
    build = json.loads((saved / "prunekit.json").read_text())["build"]
    assert str(tmp_path) not in json.dumps(build)
    assert build["arguments"]["hidden_size"] == 32
    for path in folder.iterdir():
        path.unlink()
    loaded = pk.load(saved)
    with torch.no_grad():
        found, wanted = loaded(**example), result.model(**example)
    name = "last_hidden_state" if head == "embedding" else "logits"
    assert torch.equal(found[name], wanted[name])


def test_structure_is_the_configuration_without_the_path(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", llama(tie_word_embeddings=False))
    found = structure_of(ModelSettings(str(folder), "hf", head="causal_lm"))
    assert (found.name, found.folder, found.head) == ("llama", None, "causal_lm")
    assert found.arguments["num_key_value_heads"] == 2
    assert "tie_word_embeddings" not in found.arguments  # as it is by default
    built = [
        build_model(one, num_classes=None).config for one in (found, ModelSettings(str(folder), "hf", head="causal_lm"))
    ]
    assert all(getattr(built[0], key, None) == getattr(built[1], key, None) for key in own_fields("llama"))  # type: ignore[arg-type]


def test_a_language_model_needs_all_its_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", bert("BertModel"))
    with pytest.raises(
        ModelError, match=r"expected the weights of a model with the head masked_lm, .*cls\.predictions"
    ):
        build_model(ModelSettings(str(folder), "hf", head="masked_lm"), num_classes=None)
    tagger = build_model(ModelSettings(str(folder), "hf", head="token_classification"), num_classes=5)
    assert tagger.classifier.out_features == 5  # type: ignore[union-attr]  # to be trained


def pickled(folder: Path) -> None:
    torch.save(llama().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def foreign(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    (folder / "mine.py").write_text("raise SystemExit('code of the folder was run')")


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def other_folders(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": "../others/model.safetensors"}})
    )


def kernels(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"text_config": {"attn_implementation": "someone/kernel"}}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_folders, r"weight_map: expected the names of files in this folder, got '\.\./others"),
        (kernels, r"config\.json: attn_implementation: expected a name such as 'sdpa', got 'someone/kernel'"),
        (pickled, r"AutoModelForCausalLM of transformers cannot load it: .*with safetensors"),
        (
            foreign,
            r"expected the configuration of a model that transformers knows: .*code of a folder's own is not run",
        ),
        (without_config, r"model\.name: .*there is no config\.json in it; expected one that `save_pretrained` wrote"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, change: Any, message: str) -> None:
    folder = write_model(tmp_path / "tiny", llama())
    change(folder)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        build_model(ModelSettings(str(folder), "hf", head="causal_lm"), num_classes=None)


def test_arguments_of_a_folder_are_fields_of_its_configuration(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", llama())
    wrong = ModelSettings(str(folder), "hf", arguments={"hidden_sizes": 3}, head="causal_lm")
    with pytest.raises(
        ModelError, match=r"no 'hidden_sizes' in the configuration of llama; did you mean 'hidden_size'"
    ):
        build_model(wrong, num_classes=None)
    changed = ModelSettings(str(folder), "hf", arguments={"attention_dropout": 0.1}, head="causal_lm")
    assert build_model(changed, num_classes=None).config.attention_dropout == 0.1  # type: ignore[union-attr]


def test_a_missing_folder_is_said_with_how_to_get_it() -> None:
    settings = ModelSettings("HuggingFaceTB/SmolLM2-135M", "hf", origin="ask the team")
    message = str(missing_weights(settings))
    assert "there is no such folder" in message
    assert "nothing is downloaded: hf download NAME --local-dir FOLDER" in message
    assert message.endswith("; ask the team")
    assert set(CLASSES) == set(Head.__args__)  # type: ignore[attr-defined]
