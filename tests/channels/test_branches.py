"""Branches that may go as a whole: found by no class name, gone in masked and compact model alike."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from equivalence import Net, image, parity, random_keep, randomized
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from prunekit.channels.cut.shorter_model import shorten_
from prunekit.channels.labels.branch import Shortening
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact, spread_
from prunekit.compaction.model_folder import load, save
from prunekit.errors import ArtifactError
from prunekit.measure.model_size import count_macs
from prunekit.measure.verification import verify
from prunekit.planning.plan import Plan, load_plan
from prunekit.utils.files import with_checksum

Example = tuple[Any, ...]


class ResidualBlock(nn.Module):
    """A block as ResNets have them, its shortcut a convolution where the width changes; the ReLU is a function."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


def residual(*widths: int) -> nn.Sequential:
    blocks = [ResidualBlock(one, other) for one, other in pairwise(widths)]
    stem, head = nn.Conv2d(3, widths[0], 3, padding=1), nn.Linear(widths[-1], 4)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def without(chart: ChannelMap, names: list[str], keep: Keep | None = None) -> Plan:
    """The plan without some branches."""
    keep = np.ones(chart.n_labels, dtype=bool) if keep is None else keep.copy()
    for branch in chart.branches.found:
        if branch.name in names:
            keep[branch.labels] = False
    assert {branch.name for branch in chart.branches.found} >= set(names)
    return Plan(chart, keep)


def random_choice(chart: ChannelMap) -> Keep:
    """A third of the channels, and every other branch by its name."""
    keep = random_keep(chart)
    for branch in chart.branches.found[::2]:
        keep[branch.labels] = False
    return keep


def names_of(chart: ChannelMap) -> list[str]:
    return [branch.name for branch in chart.branches.found]


def reasons_of(chart: ChannelMap) -> dict[str, str]:
    return {lock.name: lock.reason for lock in chart.branches.locks}


def torchvisions(name: str, size: int = 64) -> tuple[nn.Module, Example]:
    return torchvision.models.get_model(name, weights=None), image(size=size)


def transformers_model(kind: str) -> tuple[nn.Module, Example]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = (torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0)),)
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50)
        return transformers.LlamaForCausalLM(config), tokens
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50)), tokens
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config), tokens


def encoder(norm_first: bool) -> tuple[nn.Module, Example]:
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return model, (torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)),)


FAMILIES: dict[str, tuple[Callable[[], tuple[nn.Module, Example]], int]] = {
    "residual": (lambda: (residual(8, 8, 8, 12, 12), image()), 4),
    "resnet18": (lambda: torchvisions("resnet18"), 8),
    "mobilenet_v2": (lambda: torchvisions("mobilenet_v2"), 10),
    "convnext_tiny": (lambda: torchvisions("convnext_tiny"), 18),
    "swin_t": (lambda: torchvisions("swin_t"), 24),
    "densenet121": (lambda: torchvisions("densenet121"), 58),
    "encoder, norms first": (lambda: encoder(True), 4),
    "encoder, norms last": (lambda: encoder(False), 4),
    "llama": (lambda: transformers_model("llama"), 4),
    "bert": (lambda: transformers_model("bert"), 4),
    "gpt2": (lambda: transformers_model("gpt2"), 4),
}
"""How to build a model of each family with an example, and how many branches may go."""
FIRST_CACHE = {"llama": {"model.layers.0.self_attn"}, "gpt2": {"transformer.h.0.attn"}}
"""Branches that the trial keeps: these models ask the cache of their first layer how many tokens there were."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_masked_equals_compact_without_random_branches_and_channels(family: str) -> None:
    build, count = FAMILIES[family]
    torch.manual_seed(0)
    model, example = build()
    model = randomized(model).eval()
    chart = trace(model, example)
    assert len(chart.branches.found) == count
    settled = run_trial(model, chart, random_choice, [example])
    plan = Plan(settled.channel_map, settled.keep)
    assert plan.gone
    stay = reasons_of(settled.channel_map).keys() - reasons_of(chart).keys()
    assert stay == FIRST_CACHE.get(family, set())
    assert verify(model, settled.compact, plan, example).max_relative_difference < 1e-9
    if family not in ("llama", "gpt2"):  # they return objects that are not compared by tensors alone
        assert parity(model, plan, example) < 1e-9
    parameters = sum(parameter.numel() for parameter in settled.compact.parameters())
    assert plan.totals()["parameters"][1] == parameters


@pytest.mark.slow
def test_both_halves_of_a_layer_are_branches_of_their_own() -> None:
    model, example = torchvisions("vit_b_16", size=224)
    chart = trace(model, example)
    assert names_of(chart)[:2] == [
        "encoder.layers.encoder_layer_0.self_attention",
        "encoder.layers.encoder_layer_0.mlp",
    ]
    assert len(names_of(chart)) == 24
    attention = chart.branches.found[0]
    assert attention.modules == ("encoder.layers.encoder_layer_0.ln_1", attention.name)
    assert attention.constant == f"{attention.name}.out_proj.bias"


def test_a_convolution_on_the_shortcut_stays_where_its_block_goes() -> None:
    model, example = randomized(residual(8, 12)).eval(), image()
    chart = trace(model, example)
    plan = without(chart, ["1"])
    small = compact(model, plan)
    assert names_of(chart) == ["1"]
    assert isinstance(small.get_submodule("1.shortcut"), nn.Conv2d)
    constant = model.get_submodule("1").bn2.bias
    stream = model[1].shortcut(model[0](*example))
    assert torch.allclose(small[1](small[0](*example)), F.relu(stream + constant[:, None, None]), atol=1e-6)


def test_what_is_gone_does_not_run_and_has_no_weights() -> None:
    model, example = randomized(residual(8, 8, 8)).eval(), image()
    chart = trace(model, example)
    plan = without(chart, ["1"])
    small = compact(model, plan)

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    found = {}
    for name, one in (("dense", model), ("compact", small)):
        seen = Counter[str]()
        with Operators(), torch.no_grad():
            one(*example)
        found[name] = seen
    for operator in ("aten::convolution", "aten::native_batch_norm"):
        assert found["dense"][operator] - found["compact"][operator] == 2
    assert [name for name in small.state_dict() if name.startswith("1.")] == ["1.bn2.bias"]
    assert count_macs(small, example) == chart.macs(plan.keep)


def test_a_branch_that_is_read_elsewhere_stays() -> None:
    def both(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x)
        inner = net.second(F.relu(net.first(x)))
        return net.head(torch.cat([x + inner, inner], 1))

    convs = {"stem": nn.Conv2d(3, 6, 1), "first": nn.Conv2d(6, 5, 1), "second": nn.Conv2d(5, 6, 1)}
    chart = trace(Net(both, **convs, head=nn.Conv2d(12, 2, 1)), image())
    assert not names_of(chart)


def test_padding_of_a_constant_is_no_constant() -> None:
    def padded(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x)
        inner = net.third(net.fixed(net.second(F.relu(net.first(x)))))
        return net.head(x + inner)

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.ones(4, 1, 1)  # a size that no parameter decides: these channels stay

    convs = {"stem": nn.Conv2d(3, 6, 1), "first": nn.Conv2d(6, 5, 1), "second": nn.Conv2d(5, 4, 1), "fixed": Fixed()}
    net = Net(padded, **convs, third=nn.Conv2d(4, 6, 3, padding=1), head=nn.Conv2d(6, 2, 1))
    chart = trace(net, image())
    assert not names_of(chart)
    assert len(reasons_of(chart)) == 1


def test_weights_that_another_layer_shares_keep_their_branch() -> None:
    def shared(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x)
        x = x + net.second(F.relu(net.first(x)))
        return net.head(net.second(F.relu(net.other(x))))

    layers = {"stem": nn.Linear(3, 6), "first": nn.Linear(6, 5), "other": nn.Linear(6, 5), "second": nn.Linear(5, 6)}
    chart = trace(Net(shared, **layers, head=nn.Linear(6, 2)), (torch.randn(4, 3),))
    assert not names_of(chart)
    assert reasons_of(chart)


def test_a_group_without_channels_empties_its_whole_branch() -> None:
    chart = trace(torchvision.models.resnet50(weights=None), image(size=64))
    branch = chart.branches.found[0]
    assert len(branch.parts) == 2
    keep = np.ones(chart.n_labels, dtype=bool)
    keep[branch.parts[1]] = False
    plan = Plan(chart, keep)
    assert plan.gone == (branch,)
    assert not plan.keep[branch.labels].any()


def test_files_hold_what_is_left(tmp_path: Any) -> None:
    model, example = randomized(residual(8, 8, 12, 12)).eval(), image()
    chart = trace(model, example)
    plan = without(chart, ["1", "3"], random_keep(chart))
    small = compact(model, plan).eval()
    folder = save(small, tmp_path / "small", plan)
    loaded = load(folder, model=lambda: residual(8, 8, 12, 12))
    assert torch.equal(loaded(*example), small(*example))
    again = load_plan(folder)
    assert again.digest == plan.digest
    assert [branch.name for branch in again.gone] == ["1", "3"]
    assert torch.equal(compact(model, again)(*example), small(*example))


@pytest.mark.parametrize(
    "step", [["function", "aten.system", [], 0], ["run", "os.system"], ["call", "nothing", 0], ["function"]]
)
def test_steps_of_a_file_are_among_those_known(tmp_path: Any, step: list[Any]) -> None:
    model, example = randomized(residual(8, 8, 8)).eval(), image()
    plan = without(trace(model, example), ["1"])
    folder = save(compact(model, plan), tmp_path / "small", plan)
    file = next(path for path in folder.glob("*.json") if "shorter" in json.loads(path.read_text()))
    manifest = json.loads(file.read_text())
    manifest["shorter"]["bodies"][0][1][0] = step
    file.write_text(json.dumps(with_checksum(manifest)))
    with pytest.raises(ArtifactError):
        load(folder, model=lambda: residual(8, 8, 8))


def test_a_compact_model_is_written_back_into_the_dense_one() -> None:
    model, example = randomized(residual(8, 8, 8)).eval(), image()
    plan = without(trace(model, example), ["2"])
    small = compact(model, plan)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(0.1)
    spread_(model, small, plan)
    assert torch.equal(compact(model, plan)(*example), small(*example))
    assert parity(model, plan, example) < 1e-9


def test_exports_run_what_is_left() -> None:
    model, example = randomized(residual(8, 8, 8)).eval(), image()
    small = compact(model, without(trace(model, example), ["1"])).eval()
    exported = torch.export.export(small, example)
    assert torch.equal(exported.module()(*example), small(*example))
    assert not Shortening()
    shorten_(small, Shortening())


def test_it_trains_on_without_what_is_gone() -> None:
    model, example = randomized(residual(8, 8, 8)).train(), image()
    plan = without(trace(model, example), ["1"])
    small = compact(model, plan).train()
    small(*example).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in small.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    assert bool(gradients["1.bn2.bias"].abs().sum() > 0)  # type: ignore[union-attr]
