"""Graphs of models: nodes in the order of execution, edges where tensors go."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import prunekit
from prunekit.jobs.stages.tensorboard_log import model_graph


class Shortcut(nn.Module):
    """A pre-activation block: the shortcut begins before the ReLU, whose channels are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 8, 1), nn.ReLU()
        self.body, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.body(self.act(x))
        return self.head(self.act(x).mean((2, 3)))  # type: ignore[no-any-return]


def test_edges_are_the_tensors_that_operators_read() -> None:
    model, example = Shortcut().eval(), (torch.zeros(2, 3, 4, 4),)
    plan = prunekit.plan(model, example, channels=0.5)
    graph = model_graph(prunekit.trace(model, example), plan)
    assert {node.name: list(node.input) for node in graph.node} == {
        "input": [],
        "stem/convolution": ["input"],
        "act/relu": ["stem/convolution"],
        "body/convolution": ["act/relu"],
        "add": ["stem/convolution", "body/convolution"],
        "act/relu_1": ["add"],
        "mean": ["act/relu_1"],
        "head/addmm": ["mean"],
    }
    nodes = {node.name: node for node in graph.node}
    assert nodes["stem/convolution"].attr["weight"].s == b"8x3x1x1 -> 4x3x1x1"
    assert nodes["stem/convolution"].attr["macs"].s == b"384 -> 192"
    assert nodes["head/addmm"].attr["weight"].s == b"4x8 -> 4x4"
    sizes = [dim.size for dim in nodes["add"].attr["_output_shapes"].list.shape[0].dim]
    assert sizes == [2, 8, 4, 4]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out((q @ k.transpose(-1, -2) * scale).softmax(-1) @ v) + x  # type: ignore[no-any-return]


def test_every_operator_hangs_together_with_the_inputs_and_keeps_their_order() -> None:
    model, example = Branches().eval(), (torch.zeros(1, 5, 8), torch.ones(1))
    plan = prunekit.plan(model, example, channels=0.5)
    graph = model_graph(prunekit.trace(model, example), plan)
    known = {"input"}
    for node in graph.node[1:]:
        assert node.input
        assert set(node.input) <= known, "what is read comes before"
        assert node.name not in known
        known.add(node.name)
    (last,) = [name for name in known if not any(name in node.input for node in graph.node)]
    assert next(node for node in graph.node if node.name == last).op == "add"
    assert "input" in next(node for node in graph.node if node.name == last).input
