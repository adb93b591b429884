"""Adapters: trained alone, merged into the layers, and gone afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import together
from tiny_language import bert, llama
from torch import nn
from training_models import CPU, Ends, EndsAfter, net, splits

from prunekit.errors import ModelError, UsageError
from prunekit.settings.train import AdapterSettings, CheckpointSettings, TrainSettings
from prunekit.training import adapters
from prunekit.training.adapters import adaptable, adapted, require_adaptable
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit

pytest.importorskip("peft")
LORA = AdapterSettings(rank=2)
IDS = torch.arange(24).view(2, 12)


class Odd(nn.Module):
    """Layers that adapters may not touch, beside two that they may."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(3, 6, 3, padding=1, groups=3)
        self.dilated = nn.Conv2d(6, 6, 3, padding=2, dilation=2)
        self.mirrored = nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect")
        self.plain = nn.Conv2d(6, 8, 3, padding=1, stride=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.tied, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again = self.shared
        self.other = nn.Linear(8, 8)
        self.other.weight = self.tied.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.plain_head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(self.mirrored(self.dilated(self.grouped(x)))).flatten(2).transpose(1, 2)
        x = self.attention(x, x, x)[0]
        x = self.again(self.shared(self.other(self.tied(x))))
        found: torch.Tensor = self.plain_head(self.normed(x)).mean(1)
        return found


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=45, n_positions=16, n_embd=32, n_layer=2, n_head=4)).eval()


def scores(model: nn.Module) -> torch.Tensor:
    if isinstance(model, (Odd, nn.Sequential)):
        return model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double())  # type: ignore[no-any-return]
    return model(input_ids=IDS).logits  # type: ignore[no-any-return]


MODELS = {
    "llama": (llama, 14, "model.layers.0.self_attn.q_proj"),
    "gpt2": (gpt2, 8, "transformer.h.0.attn.c_attn"),
    "bert": (bert, 12, "bert.encoder.layer.0.attention.self.query"),
    "net": (net, 2, "0"),
    "odd": (Odd, 2, "plain"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_merged_computes_what_was_trained(name: str) -> None:
    make, count, first = MODELS[name]
    torch.manual_seed(0)
    model = make().double().eval()
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    paths = adaptable(model)
    assert (len(paths), paths[0]) == (count, first)
    with adapted(model, LORA, seed=0):
        trained = {key: one for key, one in model.named_parameters() if one.requires_grad}
        assert {key.partition(".lora_")[0] for key in trained} == set(paths)
        with torch.no_grad():
            for parameter in trained.values():
                parameter.normal_(0, 0.2)
            wanted = scores(model)
    torch.testing.assert_close(scores(model), wanted, rtol=1e-9, atol=1e-9)
    assert [type(module) for module in model.modules()] == kinds
    assert not hasattr(model, "peft_config")
    assert all(parameter.requires_grad for parameter in model.parameters())
    after = model.state_dict()
    assert after.keys() == before.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {f"{path}.weight" for path in paths}


def test_after_an_error_the_model_is_as_it_was() -> None:
    model, settings = net(), TrainSettings(epochs=1, adapter=LORA)
    model[0].weight.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(Ends), adapted(model, LORA, seed=0):
        fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=[EndsAfter(2)])
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [name for name, one in after.items() if not one.requires_grad] == ["0.weight"]


def trained(settings: TrainSettings, **options: Any) -> nn.Module:
    model = net()
    assert settings.adapters is not None
    with adapted(model, settings.adapters, seed=1):
        fit(model, splits(), settings, **{"device": CPU, "seed": 1, "batch": 16} | options)
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training_goes_on_where_it_was_interrupted(tmp_path: Path, optimizer: Any) -> None:
    settings = TrainSettings(epochs=3, lr=0.02, optimizer=optimizer, adapter=AdapterSettings(rank=2, dropout=0.1))
    whole = trained(settings)
    kept = CheckpointSettings(every_steps=1)
    with pytest.raises(Ends):
        trained(settings, checkpoints=Checkpoints(tmp_path, kept, facts={}), callbacks=[EndsAfter(6)])
    resumed = trained(settings, checkpoints=Checkpoints(tmp_path, kept, facts={}), callbacks=[EndsAfter(10**9)])
    assert not torch.equal(whole[5].weight, net()[5].weight)
    assert all(
        torch.equal(one, other)
        for one, other in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


def shared(_: Any = None) -> dict[str, torch.Tensor]:
    """The end of a run of 22 images a step, without BatchNorm and dropout, which look at a process's share alone."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
    with adapted(model, LORA, seed=1):
        fit(model, splits(), TrainSettings(epochs=2, lr=0.1, adapter=LORA), device=CPU, seed=1, batch=22)
    return model.state_dict()


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    alone, both = shared(), together(2, tmp_path, shared, None)
    assert all(torch.equal(both[0][name], both[1][name]) for name in alone)
    for name, wanted in alone.items():
        torch.testing.assert_close(both[0][name], wanted, rtol=1e-4, atol=1e-5)


def test_activations_may_be_computed_again() -> None:
    found = []
    for switch in (nullcontext, checkpointed):
        model = llama().train()
        with adapted(model, LORA, seed=0), switch(model):
            model(input_ids=IDS, labels=IDS).loss.backward()
            found.append({key: one.grad for key, one in model.named_parameters() if one.requires_grad})
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert any(one.any() for one in found[0].values())


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    from prunekit.training.execution import gradient_checkpointing

    with gradient_checkpointing(model):
        yield


def test_training_without_adapters_is_refused() -> None:
    with pytest.raises(UsageError, match=r"adapter is set, and the model has none: train it within"):
        fit(net(), splits(), TrainSettings(epochs=1, adapter="lora"), device=CPU, seed=0, batch=16)


def test_layers_that_cannot_be_adapted_are_said_early(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"finetune\.adapter\.modules: 'tied' matches no layer that can be adapted"):
        require_adaptable(Odd(), AdapterSettings(modules=("tied",)))
    with pytest.raises(ModelError, match=r"expected layers of Linear, .* and Embedding has none; leave it out"):
        require_adaptable(nn.Embedding(3, 4), LORA)
    with (
        pytest.raises(ModelError, match=r"adapter: Sequential has none of the layers"),
        adapted(net(), AdapterSettings(modules=("gone",)), seed=0),
    ):
        pass
    monkeypatch.setattr(adapters, "missing_packages", lambda packages, install: f"needs {packages[0]}: {install}")
    with pytest.raises(UsageError, match=r'finetune\.adapter needs peft: pip install "prunekit\[hf-train\]"'):
        require_adaptable(net(), LORA)
