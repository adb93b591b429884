"""The proof must fail when anything is wrong, and say where."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from equivalence import Net, assert_unchanged, image, masked_double, random_keep, randomized, settled_plan, snapshot
from torch import Tensor, nn

from prunekit.channels.cut.slicing import narrow
from prunekit.channels.rewrite.source_rewriter import attribute_values
from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.errors import UsageError, VerificationError
from prunekit.hooks.hook import count_hooks
from prunekit.measure.verification import verify
from prunekit.planning.plan import Plan, load_plan


@cache
def prepared(name: str) -> tuple[nn.Module, Plan, tuple[Tensor]]:
    """A masked model of a family, its plan, and an input."""
    arguments = {"init_weights": False} if name == "googlenet" else {}
    model = randomized(torchvision.models.get_model(name, num_classes=7, **arguments)).eval()
    example = (torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)),)
    chart = trace(model, example)
    plan = Plan(chart, random_keep(chart))
    return masked_double(model, plan).float(), plan, example


def small_net() -> tuple[nn.Module, Plan, tuple[Tensor]]:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(96, 4))
    model = randomized(nn.Sequential(*layers)).eval()
    plan = settled_plan(model, image())
    return masked_double(model, plan).float(), plan, image()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_a_right_compact_model_passes(name: str) -> None:
    masked, plan, example = prepared(name)
    small = compact(masked, plan)
    before = snapshot(masked), snapshot(small)
    proof = verify(masked, small, plan, [example, (example[0][:1] + 1,)])
    assert 0 < proof.max_relative_difference <= 1e-9
    assert (proof.inputs, proof.dtype) == (3, "float64")
    assert_unchanged(masked, before[0])
    assert_unchanged(small, before[1])
    assert count_hooks(masked) == count_hooks(small) == 0


def test_padded_batches_of_an_encoder() -> None:
    """Torch makes nested tensors of them where a model has no hooks, and masked norms have."""
    layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True)
    net = Net(lambda net, x, hidden: net.encoder(net.a(x), src_key_padding_mask=hidden),
              a=nn.Linear(6, 8), encoder=nn.TransformerEncoder(layer, 1))  # fmt: skip
    hidden = torch.tensor([[False, False, False, False], [False, False, True, True]])
    inputs = (torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)), hidden)
    model = randomized(net).eval()
    plan = settled_plan(model, inputs)
    masked = masked_double(model, plan).float()
    assert verify(masked, compact(masked, plan), plan, [inputs]).max_relative_difference <= 1e-9
    assert masked.get_submodule("encoder").use_nested_tensor is True


def test_modes_and_half_precision_are_left_alone() -> None:
    masked, plan, example = small_net()
    masked.half().train()
    masked[1].eval()  # type: ignore[index]
    small = compact(masked, plan).train()
    assert verify(masked, small, plan, [(example[0].half(),)]).max_relative_difference <= 1e-9
    assert masked.training
    assert small.training
    assert not masked[1].training  # type: ignore[index]
    assert {parameter.dtype for parameter in small.parameters()} == {torch.float16}


def flipped(plan: Plan, name: str, axis: int, position: int) -> dict[str, tuple[Any, ...]]:
    """The kept indices of a plan with one index of one axis exchanged for one that was removed."""
    kept = dict(plan.kept_indices)
    index = kept[name][axis]
    assert index is not None
    size = plan.channel_map.shapes[name][axis]
    gone = np.setdiff1d(np.arange(size), index)
    changed = index.copy()
    changed[position % index.size] = gone[position % gone.size]
    kept[name] = tuple(np.sort(changed) if i == axis else old for i, old in enumerate(kept[name]))
    return kept


FLIPS = [
    ("resnet18", "conv1.weight", 0, "conv1", "aten.convolution"),
    ("resnet18", "layer1.0.conv2.weight", 0, "layer1.0.conv2", "aten.convolution"),
    ("resnet18", "layer3.0.conv1.weight", 1, "layer3.0.conv1", "aten.convolution"),
    ("resnet18", "bn1.weight", 0, "bn1", "batch_norm"),
    ("resnet18", "layer2.0.bn2.bias", 0, "layer2.0.bn2", "batch_norm"),
    ("resnet18", "layer2.1.bn1.running_mean", 0, "layer2.1.bn1", "batch_norm"),
    ("resnet18", "layer2.0.downsample.0.weight", 1, "layer2.0.downsample.0", "aten.convolution"),
    ("resnet18", "fc.weight", 1, "fc", "aten.addmm"),
    ("mobilenet_v3_small", "features.4.block.1.0.weight", 0, "features.4.block.1.0", "aten.convolution"),
    ("mobilenet_v3_small", "features.4.block.2.fc1.weight", 1, "features.4.block.2.fc1", "aten.convolution"),
    ("mobilenet_v3_small", "features.4.block.2.fc2.bias", 0, "features.4.block.2.fc2", "aten.convolution"),
    ("mobilenet_v3_small", "classifier.3.weight", 1, "classifier.3", "aten.addmm"),
    ("shufflenet_v2_x0_5", "stage3.1.branch2.0.weight", 0, "stage3.1.branch2.0", "aten.convolution"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "axis", "module", "operator"), FLIPS)
def test_one_wrong_index_is_found_where_it_is(family: str, name: str, axis: int, module: str, operator: str) -> None:
    masked, plan, example = prepared(family)
    sizes = attribute_values(masked, plan.channel_map, plan.keep)
    wrong = narrow(masked, flipped(plan, name, axis, position=1), attributes=sizes)
    with pytest.raises(VerificationError) as caught:
        verify(masked, wrong, plan, [example])
    assert f" in {module}: values differ" in str(caught.value)
    assert operator in str(caught.value)


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("slot", [("0.weight", 0), ("0.bias", 0), ("3.weight", 0), ("3.weight", 1), ("5.weight", 1)])
def test_any_wrong_index_is_found(slot: tuple[str, int], position: int) -> None:
    masked, plan, example = small_net()
    wrong = narrow(masked, flipped(plan, *slot, position=position))
    with pytest.raises(VerificationError, match=rf"first at aten\.\w+ in {slot[0][0]}: values differ"):
        verify(masked, wrong, plan, [example])


def test_a_swap_of_two_channels_is_found() -> None:
    masked, plan, example = small_net()
    small: Any = compact(masked, plan)
    with torch.no_grad():
        small[0].weight[[0, 1]] = small[0].weight[[1, 0]].clone()
    with pytest.raises(VerificationError, match=r"first at aten\.convolution in 0"):
        verify(masked, small, plan, [example])


def test_one_weight_that_moved_is_found() -> None:
    masked, plan, example = small_net()
    small: Any = compact(masked, plan)
    with torch.no_grad():
        small[5].weight[0, 0] += 1e-6
    with pytest.raises(VerificationError, match=r"first at aten\.addmm in 5: values differ by"):
        verify(masked, small, plan, [example])


def test_a_wrong_index_of_a_dead_channel_is_found() -> None:
    """The outputs are the same on every input; the norm before the ReLU is not."""
    masked, plan, example = small_net()
    with torch.no_grad():
        masked[1].bias -= 100  # type: ignore[index, union-attr, operator]
    zeroed = masked_double(masked, plan).float()
    wrong = narrow(zeroed, flipped(plan, "1.bias", 0, position=2))
    with torch.no_grad():
        assert torch.equal(zeroed(*example), compact(zeroed, plan)(*example))
        wrong[1].bias -= 100  # type: ignore[index, union-attr, operator]
    with pytest.raises(VerificationError, match=r"first at aten\.\w*batch_norm\w* in 1: values differ"):
        verify(zeroed, wrong, plan, [example])


def test_a_wrong_index_that_no_operator_shows_is_found() -> None:
    model = randomized(Net(lambda net, x: net.b(net.a(x) * 0), a=nn.Linear(4, 8), b=nn.Linear(8, 3)))
    example = (torch.randn(1, 4),)
    plan = settled_plan(model, example)
    masked = masked_double(model, plan)
    wrong = narrow(masked, flipped(plan, "b.weight", 1, position=0))
    with pytest.raises(VerificationError, match=r"b\.weight of the compact model is not what the plan keeps"):
        verify(masked, wrong, plan, [example])


def test_a_difference_that_only_the_second_input_shows_is_found() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y * net.gain if float(x.sum()) > 0 else y)

    model = Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3))
    object.__setattr__(model, "gain", 1.0)
    negative, positive = (torch.tensor([[-1.0, -2, 0, 1]]),), (torch.tensor([[1.0, 2, 0, -1]]),)
    plan = settled_plan(randomized(model), negative)
    masked = masked_double(model, plan)
    small: Any = compact(masked, plan)
    small.gain = 2.0
    assert verify(masked, small, plan, [negative]).max_relative_difference <= 1e-9
    with pytest.raises(VerificationError, match=r"(outputs|values) differ"):
        verify(masked, small, plan, [negative, positive])


def test_a_masked_model_that_is_not_masked_is_found() -> None:
    masked, plan, example = small_net()
    dense = randomized(masked).eval()
    small = compact(dense, plan)
    with pytest.raises(VerificationError, match="masked and compact model differ") as error:
        verify(dense, small, plan, [example], strict=True)
    assert "of the masked model is not 0 where the plan prunes" in str(error.value)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    assert verify(dense, small, plan, [example]).max_relative_difference <= 1e-12  # masked by the plan itself
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["compact", "masked", "both"])
def test_what_is_not_a_number_never_passes(value: float, where: str) -> None:
    masked, plan, example = small_net()
    small: Any = compact(masked, plan)
    with torch.no_grad():
        for net, names in ((small, ("compact", "both")), (masked, ("masked", "both"))):
            if where in names:
                net[5].weight[0] = value  # type: ignore[index]
    with pytest.raises(VerificationError):
        verify(masked, small, plan, [example])


def test_a_model_that_raises_is_found() -> None:
    masked, plan, example = small_net()
    small: Any = compact(masked, plan)
    small[3] = nn.Conv2d(4, 6, 3)
    with pytest.raises(VerificationError, match="in 3: RuntimeError: Given groups=1"):
        verify(masked, small, plan, [example])


@pytest.mark.parametrize("error", [ValueError, AssertionError, KeyError, IndexError])
def test_a_model_that_raises_anything_is_found(error: type[Exception]) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        if y.shape[1] < 8:
            raise error("too narrow")
        return net.b(y)

    model = randomized(Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3)))
    example = (torch.ones(1, 4),)
    chart = trace(model, example)
    plan = Plan(chart, random_keep(chart))
    masked = masked_double(model, plan)
    with pytest.raises(VerificationError, match=rf"{error.__name__}: .?too narrow"):
        verify(masked, compact(masked, plan), plan, [example])


def branching(net: Any, x: Tensor) -> Tensor:
    y = nn.functional.linear(x, net.a)
    if y.shape[1] < 8:
        y = y * 2
    return nn.functional.linear(y, net.b)


def test_a_path_that_only_the_narrow_model_takes_is_found() -> None:
    weights = {"a": nn.Parameter(torch.zeros(8, 4)), "b": nn.Parameter(torch.zeros(3, 8))}
    model, example = randomized(Net(branching, **weights)), (torch.randn(2, 4),)
    chart = trace(model, example)
    plan = Plan(chart, random_keep(chart))
    masked = masked_double(model, plan)
    with pytest.raises(VerificationError, match="masked and compact model differ"):
        verify(masked, compact(masked, plan), plan, [example])


def with_outputs(wrap: Any) -> tuple[nn.Module, nn.Module, Plan, tuple[Tensor]]:
    model = Net(lambda net, x: wrap(net, net.b(net.a(x).relu())), a=nn.Linear(4, 8), b=nn.Linear(8, 3))
    example = (torch.randn(5, 4, generator=torch.Generator().manual_seed(0)),)
    chart = trace(randomized(model), example)
    plan = Plan(chart, random_keep(chart))
    masked = masked_double(model, plan)
    return masked, compact(masked, plan), plan, example


class Sealed(dict[str, Any]):
    """Refuses what transformers' outputs refuse."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("no update")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net, y: {"logits": y, "best": y.argmax(1), "sure": y > 0},
        lambda net, y: (y, [y[:0], None]),
        lambda net, y: y.masked_fill(torch.eye(5, 3, dtype=torch.bool), float("-inf")),
        lambda net, y: torch.complex(y, y * 2),
        lambda net, y: y * 0,
        lambda net, y: Sealed(logits=y, hidden=(y + 1,)),
    ],
)
def test_outputs_of_many_kinds_pass(wrap: Any) -> None:
    masked, small, plan, example = with_outputs(wrap)
    assert verify(masked, small, plan, [example]).max_relative_difference <= 1e-9


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda net, y: (y, net.a.out_features), "nothing"),
        (
            lambda net, y: (y, y > (0 if net.a.out_features == 8 else 1e9)),
            "integer or boolean values",
        ),
        (lambda net, y: [y] * net.a.out_features, r"\d tensors in the output, expected 8"),
        (lambda net, y: y[: net.a.out_features - 4], "in the output, shape"),
        (lambda net, y: y.masked_fill(y == y.max(), float("inf") if net.a.out_features < 8 else 1.0), "Inf|values"),
    ],
)
def test_outputs_that_differ_in_kind_are_found(wrap: Any, message: str) -> None:
    """The trial would lock these; here the plan is taken as it is."""
    model = randomized(Net(lambda net, x: wrap(net, net.b(net.a(x).relu())), a=nn.Linear(4, 8), b=nn.Linear(8, 3)))
    example = (torch.randn(5, 4, generator=torch.Generator().manual_seed(0)),)
    chart = trace(model, example)
    plan = Plan(chart, random_keep(chart))
    masked = masked_double(model, plan)
    if message == "nothing":
        assert verify(masked, compact(masked, plan), plan, [example]).inputs == 5
        return
    with pytest.raises(VerificationError, match="masked and compact model differ"):
        verify(masked, compact(masked, plan), plan, [example])


def test_nothing_compared_is_no_proof() -> None:
    masked, plan, _ = small_net()
    with pytest.raises(UsageError, match="expected at least one input"):
        verify(masked, compact(masked, plan), plan, [])
    masked, small, plan, example = with_outputs(lambda net, y: y.shape[0])
    with pytest.raises(UsageError, match=r"no tensor in the model's output \(int\)"):
        verify(masked, small, plan, [example])


def test_a_looser_tolerance_is_used() -> None:
    masked, plan, example = small_net()
    small: Any = compact(masked, plan)
    with torch.no_grad():
        small[5].weight *= 1 + 1e-5
    assert 1e-9 < verify(masked, small, plan, [example], tolerance=1e-3).max_relative_difference < 1e-3


def test_a_plan_from_a_file_proves_too_but_cannot_name_the_operator(tmp_path: Any) -> None:
    masked, plan, example = small_net()
    plan.save(tmp_path)
    read = load_plan(tmp_path)
    assert verify(masked, compact(masked, read), read, [example]).max_relative_difference <= 1e-9
    with pytest.raises(VerificationError, match="the plan was read from a file: trace the model again"):
        verify(masked, narrow(masked, flipped(plan, "3.weight", 1, 0)), read, [example])


def test_counters_in_buffers_stay() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.calls += 1
        return net.b(net.a(x))

    calls = torch.zeros((), dtype=torch.long)
    model = randomized(Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3), calls=calls))
    chart = trace(model, (torch.ones(1, 4),))
    plan = Plan(chart, random_keep(chart))
    masked = masked_double(model, plan)
    small: Any = compact(masked, plan)
    verify(masked, small, plan, [(torch.ones(1, 4),)])
    assert (int(masked.calls), int(small.calls)) == (0, 0)


class Projected(nn.Linear):
    """A layer whose forward writes its own weight: rows of at most norm 1, as of max-norm layers."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=1.0)
        self.weight.data *= (self.weight.data > -0.3).to(self.weight.dtype)
        return super().forward(x)


class Rolling(nn.Module):
    """A layer that adds what it read in the call before, from a buffer that it writes or puts another in place of."""

    def __init__(self, width: int, *, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("last", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        out, new = x + 0.5 * self.last, x.mean(0).detach()
        if self.replaces:
            self.last = new
        else:
            self.last.data.copy_(new)
        return out


def test_a_weight_that_forward_writes_is_compared_once_both_ran() -> None:
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), Projected(12, 12), nn.ReLU(), nn.Linear(12, 3))
    example = (torch.randn(5, 4),)
    plan = settled_plan(model, example)
    masked = masked_double(model, plan).float()
    small: Any = compact(masked, plan)
    with torch.no_grad():
        masked[2].weight += 2 * masked[2].weight.sign()  # type: ignore[index, union-attr, operator]
        small = compact(masked, plan)
        masked(*example)
    assert verify(masked, small, plan, [example], strict=True).max_relative_difference <= 1e-9
    with torch.no_grad():
        small[2].weight[0, 0] += 0.1
    with pytest.raises(VerificationError, match="masked and compact model differ"):
        verify(masked, small, plan, [example])


@pytest.mark.parametrize("replaces", [False, True])
def test_state_in_a_buffer_is_that_of_the_masked_model_in_both(replaces: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 12), Rolling(12, replaces=replaces), nn.BatchNorm1d(12), nn.Linear(12, 3)).eval()
    example = (torch.randn(5, 4),)
    plan = settled_plan(model, example)
    masked = masked_double(model, plan).float()
    small: Any = compact(masked, plan)
    with torch.no_grad():
        masked(*example)
    state = masked.state_dict()["1.last"].clone()
    assert verify(masked, small, plan, [example, (torch.randn(2, 4),)]).max_relative_difference <= 1e-9
    assert torch.equal(masked.state_dict()["1.last"], state)
    small[2].running_mean[0] += 1.0
    with pytest.raises(VerificationError, match="in 2: values differ"):
        verify(masked, small, plan, [example])
