from __future__ import annotations

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit
from prunekit.hooks.hook import HookWarning, count_hooks

TOKENS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)
        self.own = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(self.attention(x, x, x, need_weights=False)[0], self.own))  # type: ignore[no-any-return]


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def reference(block: Block, x: Tensor) -> dict[str, Tensor]:
    """A forward that returns its intermediates."""
    attention = block.attention
    qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = (part.view(2, 5, 2, 4).transpose(1, 2) for part in qkv.chunk(3, -1))
    heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    projected = attention.out_proj(heads)
    return {"qkv": qkv, "heads": heads, "projected": projected, "own": F.linear(projected, block.own)}


def test_functional_projections_are_captured_as_they_are_computed(block: Block) -> None:
    expected = reference(block, TOKENS)
    kind, before = type(block.attention), block(TOKENS)
    names = ["*.in_proj_weight", "*.out_proj", "own", "out"]
    with prunekit.capture(block, names, ("input", "output")) as record:
        output = block(TOKENS)
    torch.testing.assert_close(output, before)
    found = {(entry.path, entry.what): entry.value for entry in record}
    assert list(found) == [
        (path, what)
        for path in ("attention.in_proj_weight", "attention.out_proj", "own", "out")
        for what in ("input", "output")
    ]
    assert torch.equal(found["attention.in_proj_weight", "input"], TOKENS)
    assert torch.equal(found["attention.in_proj_weight", "output"], expected["qkv"])
    assert torch.equal(found["attention.out_proj", "input"], expected["heads"])
    assert torch.equal(found["attention.out_proj", "output"], expected["projected"])
    assert torch.equal(found["own", "output"], expected["own"])
    assert (type(block.attention), count_hooks(block)) == (kind, 0)


def test_gradients_of_functional_projections(block: Block) -> None:
    block.double()
    tokens = TOKENS.double().requires_grad_()
    parts = reference(block, tokens)
    loss = block.out(parts["own"]).square().sum()
    keys = {"qkv": ("attention.in_proj_weight", "grad_output"), "heads": ("attention.out_proj", "grad_input"),
            "projected": ("attention.out_proj", "grad_output")}  # fmt: skip
    expected = torch.autograd.grad(loss, [tokens, *(parts[key] for key in keys)])
    with prunekit.capture(block, "attention.*", ("grad_input", "grad_output")) as record:
        block(tokens).square().sum().backward()
    found = {(entry.path, entry.what): entry.value for entry in record}
    wanted = [("attention.in_proj_weight", "grad_input"), *keys.values()]
    assert set(found) == set(wanted)
    for key, value in zip(wanted, expected, strict=True):
        torch.testing.assert_close(found[key], value, msg=str(key))


def test_queries_keys_and_values_of_cross_attention_are_three_calls(block: Block) -> None:
    attention, memory = block.attention, TOKENS.flip(1)[:, :4]
    with prunekit.capture(block, "*.in_proj_weight", ("input", "output")) as record:
        block.attention(TOKENS, memory, memory)  # outside of a forward pass of the model nothing is watched
        assert not len(record)
        block.forward = lambda query: attention(query, memory, memory, need_weights=False)[0]  # type: ignore[method-assign]
        block(TOKENS)
    outputs = record.find(what="output")
    assert [entry.call for entry in outputs] == [0, 1, 2]
    parts = zip(
        (TOKENS, memory, memory), attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True
    )
    for entry, (read, weight, bias) in zip(outputs, parts, strict=True):
        assert torch.equal(entry.value, F.linear(read, weight, bias))


def test_projections_of_a_swin_block_without_calls_of_their_modules() -> None:
    torch.manual_seed(0)
    model = torchvision.models.swin_transformer.SwinTransformerBlock(8, 2, [2, 2], [0, 0]).eval()
    x = torch.randn(1, 4, 4, 8)
    with prunekit.capture(model, ["attn.qkv", "attn.proj", "mlp.0"], reduce=lambda t: tuple(t.shape)) as record:
        model(x)
    assert [(entry.path, entry.value) for entry in record] == [
        ("attn.qkv", (4, 4, 24)), ("attn.proj", (4, 4, 8)), ("mlp.0", (1, 4, 4, 32))
    ]  # fmt: skip


def test_a_weight_that_is_used_without_its_module() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.table.weight)

    model, x = Tied(), torch.randn(2, 4)
    with prunekit.capture(model, "table.weight") as record:
        output = model(x)
    assert torch.equal(record["table"][0].value, output)
    message = r"none of table ran while the model did; .* choose the weight: 'path.weight'"
    with pytest.warns(HookWarning, match=message), prunekit.capture(model, "table"):
        model(x)
