"""Attention modules and their equivalents with explicit sizes, against narrow attention written by hand."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import (
    TOLERANCE,
    Net,
    difference,
    doubled,
    heads_and_positions,
    masked_double,
    parity,
    randomized,
    settled_plan,
)
from torch import Tensor, nn
from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2
from torchvision.models.video.swin_transformer import ShiftedWindowAttention3d

from prunekit.channels.trace import trace
from prunekit.channels.tracing.substitutes import (
    SizedMultiheadAttention,
    heads_of,
    register_substitute,
    set_heads,
    substitute_all,
    substitute_of,
)
from prunekit.compaction.compact_model import compact
from prunekit.known_names import SUBSTITUTES
from prunekit.models.window_attention import (
    SizedRelativeAttention,
    SizedWindowAttention,
    SizedWindowAttention3d,
    SizedWindowAttentionV2,
)
from prunekit.planning.plan import Plan

HEADS, DEPTH = 4, 3
WIDTH = HEADS * DEPTH


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator())


def hidden(*shape: int) -> Tensor:
    """A boolean mask that hides about a third of all positions, and never the first."""
    mask = torch.rand(*shape, generator=generator()) < 1 / 3
    mask[..., 0] = False
    return mask


CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "self": ({}, {}),
    "no_bias": ({"bias": False}, {}),
    "sequence_first": ({"batch_first": False}, {}),
    "weights_that_nobody_reads": ({}, {"need_weights": True}),
    "boolean_mask": ({}, {"attn_mask": hidden(5, 5)}),
    "float_mask": ({}, {"attn_mask": normal(5, 5)}),
    "padding": ({}, {"key_padding_mask": hidden(2, 5)}),
    "mask_and_padding": ({}, {"attn_mask": hidden(5, 5), "key_padding_mask": hidden(2, 5), "need_weights": True}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "causal_with_padding": ({}, {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": hidden(2, 5)}),
    "learned_key": ({"add_bias_kv": True}, {"attn_mask": hidden(5, 5)}),
    "zero_key": ({"add_zero_attn": True}, {"key_padding_mask": hidden(2, 5)}),
}
"""Arguments of the module and of its call."""


def self_attention(options: dict[str, Any], call: dict[str, Any]) -> Net:
    def forward(net: Any, x: Tensor) -> Any:
        y = net.i(x)
        return net.o(net.m(y, y, y, **{"need_weights": False, **doubled_like(call, y)})[0])

    module = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})
    return randomized(Net(forward, i=nn.Linear(6, WIDTH), m=module, o=nn.Linear(WIDTH, 4))).eval()  # type: ignore[return-value]


def doubled_like(call: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """Masks in the precision and on the device of a tensor, as a caller would make them."""
    as_x = {True: x.dtype, False: None}
    return {
        key: value.to(x.device, as_x[value.is_floating_point()]) if isinstance(value, Tensor) else value
        for key, value in call.items()
    }


@pytest.mark.parametrize("name", CALLS)
def test_self_attention(name: str) -> None:
    options, call = CALLS[name]
    net, example = self_attention(options, call), (normal(2, 5, 6) if options.get("batch_first", True) else
                                                   normal(5, 2, 6),)  # fmt: skip
    plan = settled_plan(net, example, share=0.4)
    heads, positions = heads_and_positions(plan.kept("m.out_proj.weight", 1), DEPTH)
    assert (len(heads), len(positions)) == (HEADS // 2, DEPTH - 1)
    assert plan.kept("m.out_proj.weight", 0).size < WIDTH
    assert plan.kept("i.weight", 0).size < WIDTH
    assert parity(net, plan, example) <= TOLERANCE
    small: Any = compact(net, plan)
    assert list(small.state_dict()) == list(net.state_dict())
    assert type(small.m) is SizedMultiheadAttention
    assert (small.m.num_heads, small.m.head_dim, small.m.value_dim) == (HEADS // 2, DEPTH - 1, DEPTH - 1)
    assert small.m.scale == DEPTH**-0.5


def by_hand(
    dense: nn.MultiheadAttention, inputs: list[Any], heads: list[int], positions: list[list[int]], call: dict[str, Any]
) -> Tensor:
    """Attention of some heads of a module, from slices of its weights: (N, L, E) of queries, keys and values.

    Args:
        positions: that are left in each head of queries, keys and values.
    """
    weights = (dense.q_proj_weight, dense.k_proj_weight, dense.v_proj_weight)
    if dense.in_proj_weight is not None:
        weights = dense.in_proj_weight.chunk(3)
    parts = []
    for (x, columns), weight, bias, own in zip(inputs, weights, dense.in_proj_bias.chunk(3), positions, strict=True):
        rows = [head * DEPTH + i for head in heads for i in own]
        y = x @ weight[rows][:, columns].T + bias[rows]
        parts.append(y.reshape(*y.shape[:2], len(heads), len(own)))
    q, k, v = parts
    scores = torch.einsum("nlhd,nshd->nhls", q, k) / DEPTH**0.5
    if "key_padding_mask" in call:
        scores[call["key_padding_mask"][:, None, None].expand_as(scores)] = -torch.inf
    mixed = torch.einsum("nhls,nshd->nlhd", scores.softmax(-1), v).flatten(2)
    return mixed @ dense.out_proj.weight[:, rows].T + dense.out_proj.bias


@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 8}])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_against_a_narrow_one_by_hand(widths: dict[str, int], padded: bool) -> None:
    call = {"key_padding_mask": hidden(2, 7)} if padded else {}

    def forward(net: Any, x: Tensor, memory: Tensor) -> Any:
        keys, values = net.k(memory), net.v(memory)
        return net.o(net.m(net.q(x), keys, values, need_weights=False, **call)[0])

    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **widths)
    sizes = [WIDTH, widths.get("kdim", WIDTH), widths.get("vdim", WIDTH)]
    layers: dict[str, nn.Module] = {name: nn.Linear(6, size) for name, size in zip("qkv", sizes, strict=True)}
    net: Any = randomized(Net(forward, m=module, o=nn.Linear(WIDTH, 4), **layers)).eval()
    example = (normal(2, 5, 6), normal(2, 7, 6))
    plan = settled_plan(net, example, share=0.4)
    assert parity(net, plan, example) <= TOLERANCE
    net = net.double()
    x, memory = doubled(example)
    columns = {name: plan.kept(f"{name}.weight", 0) for name in "qkv"}
    assert all(columns[name].size < size for name, size in zip("qkv", sizes, strict=True))
    heads, of_values = heads_and_positions(plan.kept("m.out_proj.weight", 1), DEPTH)
    rows = plan.kept("m.in_proj_bias", 0)
    same, of_queries = heads_and_positions(rows[rows < WIDTH], DEPTH)
    assert same == heads
    assert (len(heads), len(of_queries), len(of_values)) == (HEADS // 2, DEPTH - 1, DEPTH - 1)
    with torch.no_grad():
        inputs = [(net.get_submodule(n)(x if n == "q" else memory)[..., columns[n]], columns[n]) for n in "qkv"]
        out = plan.kept("m.out_proj.weight", 0)
        mixed = by_hand(module, inputs, heads, [of_queries, of_queries, of_values], call)
        want = mixed[..., out] @ net.o.weight[:, out].T + net.o.bias
        assert difference(want, compact(net, plan)(x, memory)) <= 1e-12


@pytest.mark.parametrize("original", [True, False])
def test_the_original_stays_where_it_can_express_the_sizes(original: bool) -> None:
    net, example = self_attention({}, {}), (normal(2, 5, 6),)
    chart = trace(net, example)
    keep = np.ones(chart.n_labels, dtype=bool)
    for name, axis, count in (("i.weight", 0, 6), ("m.out_proj.weight", 0, 6 if original else 5)):
        keep[chart.labels[name][axis][:count]] = False  # type: ignore[index]
    entries = chart.labels["m.out_proj.weight"][1]
    assert entries is not None
    keep[chart.deciding(entries)[0][: 2 * DEPTH]] = False
    plan = Plan(chart, keep)
    small: Any = compact(net, plan)
    assert type(small.m) is (nn.MultiheadAttention if original else SizedMultiheadAttention)
    assert (small.m.num_heads, small.m.head_dim) == (2, DEPTH)
    assert parity(net, plan, example) <= TOLERANCE
    if original:
        assert (small.m.embed_dim, small.m.kdim, small.m.vdim) == (6, 6, 6)
        assert not hasattr(small.m, "scale")
        with torch.no_grad():
            torch.testing.assert_close(small(*example), small.train()(*example))


def test_an_equivalent_is_narrowed_again() -> None:
    net, example = self_attention({}, {}), (normal(2, 5, 6),)
    once: Any = compact(net, settled_plan(net, example))
    assert type(once.m) is SizedMultiheadAttention
    plan = settled_plan(once, example, seed=4, share=0.4)
    twice: Any = compact(once, plan)
    assert twice.m.num_heads < once.m.num_heads < HEADS
    assert twice.m.scale == DEPTH**-0.5
    assert parity(once, plan, example) <= TOLERANCE


def test_a_subclass_is_not_substituted() -> None:
    class Own(nn.MultiheadAttention):
        pass

    class Other(SizedMultiheadAttention):
        pass

    module = Own(WIDTH, HEADS)
    assert substitute_all(module) == set()
    assert heads_of(module) == {}
    with pytest.raises(ValueError, match="is registered already"):
        register_substitute("torch.nn.modules.activation.MultiheadAttention")(Other)


def test_heads_that_do_not_fit_are_refused() -> None:
    module = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS))
    for heads in ({"0": ("MultiheadAttention", 5)}, {"0": ("MultiheadAttention", 0)}):
        with pytest.raises(ValueError, match="columns of out_proj"):
            set_heads(module, heads)
    for heads in ({"1": ("MultiheadAttention", 2)}, {"0": ("Linear", 2)}, {"": ("MultiheadAttention", 2)}):
        with pytest.raises(KeyError):
            set_heads(module, heads)


@pytest.mark.parametrize("average", [True, False])
def test_weights_that_are_returned_lock_the_heads(average: bool) -> None:
    """The average over the heads that are left is not that over all; and their number is seen without it."""

    def forward(net: Any, x: Tensor) -> Any:
        y = net.i(x)
        out, weights = net.m(y, y, y, average_attn_weights=average)
        return net.o(out), weights * 2

    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    net = randomized(Net(forward, i=nn.Linear(6, WIDTH), m=module, o=nn.Linear(WIDTH, 4))).eval()
    example = (normal(2, 5, 6),)
    plan = settled_plan(net, example)
    heads, positions = heads_and_positions(plan.kept("m.out_proj.weight", 1), DEPTH)
    assert (len(heads), len(positions)) == (HEADS, DEPTH - 1)
    assert plan.kept("i.weight", 0).size < WIDTH
    where = ("m", "aten.mean") if average else ("", "")
    assert where in {(lock.module, lock.operator) for lock in plan.channel_map.locks}
    assert parity(net, plan, example) <= TOLERANCE


def test_a_mask_for_every_head_locks_the_heads() -> None:
    net, example = self_attention({}, {"attn_mask": normal(2 * HEADS, 5, 5)}), (normal(2, 5, 6),)
    plan = settled_plan(net, example)
    heads, positions = heads_and_positions(plan.kept("m.out_proj.weight", 1), DEPTH)
    assert (len(heads), len(positions)) == (HEADS, DEPTH - 1)
    assert plan.kept("i.weight", 0).size < WIDTH
    assert parity(net, plan, example) <= TOLERANCE


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("average", [False, True])
@torch.no_grad()
def test_the_equivalent_returns_what_the_original_does(unbatched: bool, average: bool) -> None:
    options = [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 10, "vdim": 8}, {"batch_first": True}]
    for option in options:
        original: Any = randomized(nn.MultiheadAttention(WIDTH, HEADS, **option)).double().eval()  # type: ignore[arg-type]
        ours = copy.deepcopy(original)
        assert substitute_all(ours) == {""}
        lead = () if unbatched else (2,)
        shapes = [(*lead, n, w) for n, w in ((5, WIDTH), (7, original.kdim), (7, original.vdim))]
        inputs = [normal(*shape).double() for shape in shapes]
        if lead and not original.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        mask = normal(HEADS * (1 if unbatched else 2), 5, 7).double()
        for call in ({}, {"attn_mask": mask}, {"key_padding_mask": hidden(*lead, 7)}):
            want = original(*inputs, average_attn_weights=average, **call)
            got = ours(*inputs, average_attn_weights=average, **call)
            assert difference(want, got) <= 1e-12
    with pytest.raises(RuntimeError, match="attn_mask"):
        ours(*inputs, is_causal=True)


WINDOWED = {
    "shifted": (ShiftedWindowAttention, ([4, 4], [2, 2]), SizedWindowAttention),
    "shifted_one_way": (ShiftedWindowAttention, ([3, 4], [0, 2]), SizedWindowAttention),
    "plain": (ShiftedWindowAttention, ([4, 4], [0, 0]), SizedWindowAttention),
    "larger_than_the_image": (ShiftedWindowAttention, ([9, 9], [4, 4]), SizedWindowAttention),
    "second_version": (ShiftedWindowAttentionV2, ([4, 4], [2, 2]), SizedWindowAttentionV2),
    "video": (ShiftedWindowAttention3d, ([2, 4, 4], [1, 2, 2]), SizedWindowAttention3d),
    "video_in_larger_windows": (ShiftedWindowAttention3d, ([8, 4, 7], [4, 2, 3]), SizedWindowAttention3d),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", WINDOWED)
def test_window_attention(name: str, bias: bool) -> None:
    cls, (window, shift), ours = WINDOWED[name]
    module = cls(WIDTH, window, shift, HEADS, qkv_bias=bias)
    net: Any = randomized(nn.Sequential(nn.Linear(6, WIDTH), module, nn.Linear(WIDTH, 4))).eval()
    example = (normal(2, *((3,) if ours is SizedWindowAttention3d else ()), 7, 6, 6),)  # not a multiple of the windows
    equivalent = copy.deepcopy(net).double()
    assert substitute_all(equivalent) == {"1"}
    with torch.no_grad():
        assert difference(copy.deepcopy(net).double()(*doubled(example)), equivalent(*doubled(example))) <= 1e-12
    plan = settled_plan(net, example, share=0.4)
    small: Any = compact(net, plan)
    assert type(small[1]) is ours
    assert small[1].num_heads == HEADS // 2
    keys = DEPTH if name == "second_version" else DEPTH - 1  # its queries and keys are normalized over all positions
    assert small[1].qkv.weight.shape[0] == (2 * keys + DEPTH - 1) * HEADS // 2
    if name != "second_version":
        assert small[1].relative_position_bias_table.shape[1] == HEADS // 2
    else:
        assert small[1].logit_scale.shape[0] == small[1].cpb_mlp[2].weight.shape[0] == HEADS // 2
    assert parity(net, plan, example) <= TOLERANCE


def test_relative_attention() -> None:
    module = RelativePositionalMultiHeadAttention(WIDTH, DEPTH, 16)
    net: Any = randomized(nn.Sequential(nn.Linear(6, WIDTH), module, nn.Linear(WIDTH, 4))).eval()
    example = (normal(2, 3, 16, 6),)
    plan = settled_plan(net, example, share=0.4)
    small: Any = compact(net, plan)
    assert type(small[1]) is SizedRelativeAttention
    assert (small[1].n_heads, small[1].head_dim, small[1].scale) == (HEADS // 2, DEPTH - 1, WIDTH**-0.5)
    assert parity(net, plan, example) <= TOLERANCE


def test_all_equivalents_are_tested_here() -> None:
    assert {ours for _, ours in SUBSTITUTES.items()} == {
        SizedMultiheadAttention, SizedWindowAttention, SizedWindowAttention3d, SizedWindowAttentionV2,
        SizedRelativeAttention,
    }  # fmt: skip
    assert substitute_of(nn.MultiheadAttention) is SizedMultiheadAttention


def encoder_and_decoder() -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 2, 2, dim_feedforward=16, batch_first=True, dropout=0.0)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, dim_feedforward=16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("make", [encoder, encoder_and_decoder])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_transformers(make: Any) -> None:
    model: Any = randomized(make()).eval()
    inputs = (normal(2, 5, WIDTH),) if make is encoder else (normal(2, 5, WIDTH), normal(2, 6, WIDTH))
    plan = settled_plan(model, inputs, share=0.4)
    small: Any = compact(model, plan)
    attention = [module for module in small.modules() if isinstance(module, nn.MultiheadAttention)]
    assert attention
    assert all(type(module) is SizedMultiheadAttention and module.num_heads == 2 for module in attention)
    masked = masked_double(model, plan).eval()
    small = small.double()
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():  # nothing keeps torch from its fast path here
        names = ["src_key_padding_mask", *(["memory_key_padding_mask"] if make is encoder_and_decoder else [])]
        for call in ({}, dict.fromkeys(names, padding)):
            want, got = masked(*doubled(inputs), **call), small(*doubled(inputs), **call)
            if call and make is encoder:
                want, got = want[~padding], got[~padding]
            assert difference(want, got) <= TOLERANCE


def trained(model: nn.Module, example: tuple[Any, ...]) -> None:
    model.train()
    model(*example).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()
        assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("module", [
    nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dropout=0.1),
    ShiftedWindowAttention(WIDTH, [4, 4], [2, 2], HEADS, dropout=0.1),
    ShiftedWindowAttentionV2(WIDTH, [4, 4], [2, 2], HEADS),
    ShiftedWindowAttention3d(WIDTH, [2, 4, 4], [1, 2, 2], HEADS),
    RelativePositionalMultiHeadAttention(WIDTH, DEPTH, 16),
], ids=lambda module: type(module).__name__)  # fmt: skip
def test_compact_attention_trains_copies_and_exports(module: nn.Module) -> None:
    def forward(net: Any, x: Tensor) -> Any:
        y = net.i(x)
        out = net.m(y, y, y)[0] if isinstance(net.m, nn.MultiheadAttention) else net.m(y)
        return net.o(out)

    shape = {nn.MultiheadAttention: (2, 5, 6), RelativePositionalMultiHeadAttention: (2, 3, 16, 6)}
    shape |= {ShiftedWindowAttention3d: (2, 4, 8, 8, 6)}
    example = (normal(*shape.get(type(module), (2, 8, 8, 6))),)
    net = randomized(Net(forward, i=nn.Linear(6, WIDTH), m=module, o=nn.Linear(WIDTH, 4))).eval()
    small = compact(net, settled_plan(net, example, share=0.4))
    with torch.no_grad():
        want = small(*example)
        assert torch.equal(copy.deepcopy(small)(*example), want)
        assert difference(want, torch.export.export(small, example).module()(*example)) <= 1e-5
    trained(small, example)
