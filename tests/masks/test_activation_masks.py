"""Activation masks: exact, differentiable, on any nesting, gone afterwards; thresholds that meet a target."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_nets import SmallNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from prunekit.errors import ArtifactError, DataError, ModelError, NonFiniteError, UsageError
from prunekit.hooks.hook import HookWarning, count_hooks
from prunekit.masks.activation_masks import ActivationMasks
from prunekit.masks.thresholds import ActivationThresholds, calibrate_thresholds
from prunekit.utils.tensors import gather

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def masked_identity(x: Tensor, threshold: float) -> Tensor:
    """What a mask makes of x."""
    net = nn.Sequential(nn.Identity())
    with ActivationMasks(net, {"0": threshold}):
        result: Tensor = net(x)
    return result


@settings(max_examples=80)
@given(
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=16), min_size=1, max_size=40),
    threshold=st.one_of(st.floats(0, 1e6), st.floats(0, 1e-4), st.sampled_from([0.0, 0.5, 1.0, 65504.0, math.inf])),
    dtype=st.sampled_from(DTYPES),
)
def test_a_mask_zeroes_what_is_strictly_below(values: list[float], threshold: float, dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype)
    before = x.clone()
    found = masked_identity(x, threshold)
    below = x.double().abs() < threshold
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found.nan_to_num(7.0), x.masked_fill(below, 0).nan_to_num(7.0))
    assert found.dtype == dtype
    assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0))


@settings(max_examples=50)
@given(threshold=st.floats(1e-3, 3), dtype=st.sampled_from(DTYPES))
def test_a_value_at_the_threshold_stays_and_its_neighbor_goes(threshold: float, dtype: torch.dtype) -> None:
    at = torch.tensor([threshold], dtype=torch.float64).to(dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    around = torch.cat([(at.view(bits) + step).view(dtype) for step in (-1, 0, 1)])
    exact = float(at)
    assert (masked_identity(around, exact) != 0).tolist() == [False, True, True]
    assert (masked_identity(-around, exact) != 0).tolist() == [False, True, True]


def reference(model: SmallNet, thresholds: dict[str, float]) -> list[Any]:
    """Hooks that mask the plain way."""
    return [
        model.get_submodule(path).register_forward_hook(
            lambda m, i, o, t=threshold: torch.where(o.abs() >= t, o, torch.zeros((), dtype=o.dtype))
        )
        for path, threshold in thresholds.items()
    ]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values_and_gradients_equal_the_plain_form(layout: torch.memory_format) -> None:
    """A module that runs twice, in-place ReLU and addition, a residual: results and all gradients in float64."""
    torch.manual_seed(0)
    model = SmallNet().double()
    thresholds = {"bn1": 0.4, "twice": 0.2, "relu": 0.3, "conv2": 0.1}
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64).to(memory_format=layout).requires_grad_()

    def run() -> tuple[Tensor, ...]:
        result = model(x)
        return (result, *torch.autograd.grad(result.square().sum(), [x, *model.parameters()]))

    dense = run()
    handles = reference(model, thresholds)
    expected = run()
    for handle in handles:
        handle.remove()
    with ActivationMasks(model, thresholds) as masks:
        found = run()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(found[0], dense[0])
    assert all(0 < share < 1 for share in masks.sparsity().layers.values())
    assert masks.sparsity().values["twice"] == 2 * masks.sparsity().values["bn1"]
    assert count_hooks(model) == 0


def test_inputs_are_masked_where_they_are_read_and_the_caller_keeps_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    x = torch.randn(5, 8)
    before = x.clone()
    expected = model[1](torch.where(before.relu().abs() >= 0.5, before.relu(), torch.zeros(())))
    with ActivationMasks(model, {"1": 0.5}, side="input") as masks:
        assert torch.equal(model(x.clone()), expected)
        with ActivationMasks(model, {"0": 0.7}, side="input"):
            given = x.clone()
            model(given)
            assert torch.equal(given, before)
    zeros = (before < 0.5).double().mean() / 2 + (before < 0.7).double().mean() / 2  # of one pass each
    assert masks.sparsity().overall == pytest.approx(zeros.item(), abs=1e-12)


class Pair(NamedTuple):
    first: Tensor
    count: Tensor


@dataclass
class Output:
    logits: Tensor
    states: list[Tensor]


class Wrapped(nn.Module):
    """Returns its input in some nesting."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        return self.wrap(x if scale is None else x * scale)


NESTED = {
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [x, [x * 2]],
    "dict": lambda x: {"out": x, "count": torch.arange(3)},
    "ordered": lambda x: OrderedDict(out=x, aux=(x, None, "text")),
    "named": lambda x: Pair(x, torch.tensor(4)),
    "dataclass": lambda x: Output(x, [x, x - 1]),
}


@pytest.mark.parametrize("kind", NESTED)
def test_every_floating_tensor_of_a_nested_result_is_masked(kind: str) -> None:
    net = nn.Sequential(Wrapped(NESTED[kind]))
    x = torch.randn(64)
    plain = net(x)
    with ActivationMasks(net, 0.6) as masks:
        found = net(x)
    assert type(found) is type(plain)
    floating = 0
    for one, other in zip(gather(found), gather(plain), strict=True):
        expected = torch.where(other.abs() >= 0.6, other, torch.zeros(())) if other.is_floating_point() else other
        assert torch.equal(one, expected)
        floating += other.numel() * other.is_floating_point()
    assert masks.sparsity().values == {"0": floating}


def test_named_arguments_are_masked_too() -> None:
    net = Wrapped(lambda x: x)
    outer = nn.ModuleDict({"inner": net})
    with ActivationMasks(outer, 0.5, side="input"):
        found = net(torch.tensor([0.4, 1.0]), scale=torch.tensor([3.0, 0.3]))
    assert torch.equal(found, torch.tensor([0.0, 0.0]))


@pytest.mark.parametrize(
    ("wrap", "came"),
    [
        (lambda x: x.argmax(), r"Tensor with a tensor of torch\.int64"),
        (lambda x: "text", "str with no tensor"),
        (lambda x: None, "NoneType with no tensor"),
    ],
)
def test_a_result_without_floating_tensors_is_named(wrap: Any, came: str) -> None:
    net = nn.Sequential(nn.Sequential(Wrapped(wrap)))
    with (
        pytest.raises(ModelError, match=rf"output of 0\.0: expected floating-point tensors.*got {came}"),
        ActivationMasks(net, {"0.0": 0.1}),
    ):
        net(torch.randn(3))
    assert count_hooks(net) == 0


def test_one_threshold_for_all_passes_over_modules_without_activations() -> None:
    """Such as an optional norm that is given None, or a hook's module that hands on token ids."""
    for wrap in (lambda x: None, lambda x: torch.zeros(2, dtype=torch.long), lambda x: {"ids": [3]}):
        net = nn.ModuleList([Wrapped(wrap), nn.Linear(3, 3)])
        for side in ("output", "input"):
            with ActivationMasks(net, 0.1, side=side) as masks:  # type: ignore[arg-type]
                net[0](None if side == "input" else torch.ones(3))
                net[1](torch.ones(3))
            assert masks.sparsity().values.keys() >= {"1"}


def test_bad_thresholds_and_globs_are_refused() -> None:
    net = SmallNet()
    with pytest.raises(UsageError, match=r"'conv3' matches no module path; did you mean 'conv2' or 'conv1'\?"):
        ActivationMasks(net, {"conv3": 0.1})
    for bad in (-0.1, math.nan, True, "0.5"):
        with pytest.raises(UsageError, match=r"thresholds of 'conv1': expected a number of at least 0"):
            ActivationMasks(net, {"conv1": bad})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="no activation was counted"):
        ActivationMasks(net, 0.1).sparsity()


def test_the_last_glob_decides_and_masks_nest() -> None:
    net, x = SmallNet().eval(), torch.randn(2, 3, 8, 8)
    with ActivationMasks(net, {"conv*": 1e9, "conv1": 0.0}) as masks:
        net(x)
        shares = masks.sparsity().layers
        assert shares["conv2"] == 1.0
        assert shares["conv1"] < 0.01
        with ActivationMasks(net, {"conv1": 1e9}) as inner:
            net(x)
        assert inner.sparsity().overall == 1.0
        net(x)
    assert masks.sparsity().layers["conv1"] == pytest.approx(shares["conv1"])
    assert count_hooks(net) == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_masked_again_and_counted_once(reentrant: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with ActivationMasks(net, {"0": 0.3, "2": 0.2}) as masks:
        plain = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
    with ActivationMasks(net, {"0": 0.3, "2": 0.2}) as again:
        checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in net.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))  # type: ignore[arg-type]
    assert again.sparsity() == masks.sparsity()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_masks_act_in_half_precision(dtype: torch.dtype) -> None:
    net, x = SmallNet().eval(), torch.randn(2, 3, 8, 8)
    seen: list[Tensor] = []
    with ActivationMasks(net, {"conv1": 0.25}) as masks, torch.autocast("cpu", dtype=dtype):
        net.bn1.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
        net(x).sum().backward()
    assert seen[0].dtype == dtype
    assert not ((seen[0] != 0) & (seen[0].abs() < 0.25)).any()
    assert masks.sparsity().overall == pytest.approx(float((seen[0] == 0).double().mean()))


def test_a_module_that_never_runs_is_warned_of() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 16)
    with pytest.warns(HookWarning, match="out_proj never run"), ActivationMasks(net, {"self_attn.out_proj": 0.1}):
        pass


def trained_like(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 9)
    )


def images(count: int, seed: int) -> list[Tensor]:
    return list(torch.randn(count, 16, 3, 8, 8, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("target", [0.65, 0.8])
def test_a_target_is_met_on_unseen_data_with_all_masks_in_force(target: float, side: Any) -> None:
    net = trained_like()
    found = calibrate_thresholds(net, images(24, 1), ["0", "3", "6"], target=target, side=side)
    assert found.off_target(0.001) == {}
    with ActivationMasks(net.eval(), found, side=side) as masks, torch.no_grad():
        for batch in images(24, 2):
            net(batch)
    assert masks.sparsity().layers == pytest.approx(dict.fromkeys(("0", "3", "6"), target), abs=0.01)
    assert net[1].num_batches_tracked == 0
    assert count_hooks(net) == 0


def test_where_zeros_exceed_the_target_the_threshold_is_zero_and_it_is_said() -> None:
    found = calibrate_thresholds(trained_like(), images(4, 1), ["2"], target=0.2)
    assert dict(found) == {"2": 0.0}
    assert found.off_target() == {"2": pytest.approx(0.5, abs=0.1)}
    assert found.rounds == 1


def test_thresholds_are_saved_and_loaded(tmp_path: Path) -> None:
    found = calibrate_thresholds(trained_like(), images(2, 1), "*", target=0.9)
    found.save(tmp_path / "thresholds.json")
    again = ActivationThresholds.load(tmp_path / "thresholds.json")
    assert vars(again) == vars(found)
    for other, message in (
        ([1], "Input should be an object"),
        ({"thresholds": {}}, "reached: Field required"),
        ({**json.loads((tmp_path / "thresholds.json").read_text()), "more": 1}, "more: Unexpected keyword"),
    ):
        (tmp_path / "other.json").write_text(json.dumps(other))
        with pytest.raises(ArtifactError, match=message):
            ActivationThresholds.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("thresholds", [0.1], r": Input should be an object, got \[0\.1\]"),
        ("thresholds", {"0": "a"}, r"\.0: Input should be a valid number, got 'a'"),
        ("thresholds", {"0": -1.0}, r"\.0: Input should be greater than or equal to 0, got -1\.0"),
        ("reached", {"0": True}, r"\.0: Input should be a valid number, got True"),
        ("target", "0.9", ": Input should be a valid number, got '0.9'"),
        ("side", ["input"], ": Input should be 'input' or 'output', got"),
        ("rounds", 1.5, r": Input should be a valid integer, got 1\.5"),
    ],
)
def test_damaged_thresholds_are_refused(name: str, wrong: Any, message: str, tmp_path: Path) -> None:
    ActivationThresholds({"0": 0.5}, {"0": 0.9}, None, "output", 0).save(tmp_path / "thresholds.json")
    found = json.loads((tmp_path / "thresholds.json").read_text())
    (tmp_path / "thresholds.json").write_text(json.dumps({**found, name: wrong}))
    with pytest.raises(ArtifactError, match=rf"thresholds\.json\.{name}{message}"):
        ActivationThresholds.load(tmp_path / "thresholds.json")


def test_a_search_on_finite_data_looks_at_no_value_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "isfinite")
    assert len(calibrate_thresholds(trained_like(), images(1, 1), ["0", "3"], target=0.5)) == 2


def test_a_search_that_cannot_work_says_why() -> None:
    net, data = trained_like(), images(2, 1)
    for target in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(UsageError, match="target: expected a share of zeros above 0 and below 1"):
            calibrate_thresholds(net, data, ["3"], target=target)
    with pytest.raises(DataError, match="expected at least one batch"):
        calibrate_thresholds(net, [], ["3"], target=0.5)
    with pytest.raises(UsageError, match="got an iterator"):
        calibrate_thresholds(net, iter(data), ["3"], target=0.5)
    with pytest.raises(UsageError, match="modules: 'conv' matches no module path"):
        calibrate_thresholds(net, data, ["conv"], target=0.5)
    net.unused = nn.ReLU()
    net.forward = lambda x: net[0](x)  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="unused was not called"):
        calibrate_thresholds(net, data, ["0", "unused"], target=0.5)


def test_non_finite_activations_name_layer_batch_and_channel() -> None:
    net, data = trained_like(), images(3, 1)
    with torch.no_grad():
        net[3].bias[5] = math.inf
    with pytest.raises(NonFiniteError, match="NaN or Inf in the output of 3, batch 1, channel 5"):
        calibrate_thresholds(net, data, ["0", "3"], target=0.5)
    data[1][3, 2] = math.nan
    with pytest.raises(NonFiniteError, match="NaN or Inf in the input of 0, batch 2, channel 2"):
        calibrate_thresholds(trained_like(), data, ["0"], target=0.5, side="input")
    assert count_hooks(net) == 0
