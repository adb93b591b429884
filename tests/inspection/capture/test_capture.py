from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.models.feature_extraction import create_feature_extractor

import prunekit
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import HookWarning, count_hooks
from prunekit.hooks.owner import HookOwner
from prunekit.inspection.capture.layer_hooks import LayerHooks

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def features(model: nn.Module, paths: list[str]) -> dict[str, Tensor]:
    """Outputs of modules as torchvision's own forward that returns them gives them."""
    nodes = {path: path for path in paths}
    return create_feature_extractor(model, nodes)(IMAGES)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Writes in place, reads one tensor twice, calls a layer twice, returns a nested value."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu, self.conv2 = nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv1(x)))
        y = self.conv2(self.conv2(x))
        y += x
        one, more = self.pair(x, other=y)
        return (one + more["two"]).mean((2, 3))


class Pair(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * other, {"two": x + other}


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet34(num_classes=4).eval()


def test_all_convolutions_of_a_resnet_as_a_forward_that_returns_them(resnet: nn.Module) -> None:
    paths = [path for path, module in resnet.named_modules() if isinstance(module, nn.Conv2d)]
    with torch.no_grad():
        expected = features(resnet, paths)
        with prunekit.capture(resnet, nn.Conv2d) as record:
            output = resnet(IMAGES)
        assert torch.equal(output, resnet(IMAGES))
    assert len(record) == 36
    assert [entry.path for entry in record] == list(expected)  # in the order of execution
    assert all(torch.equal(entry.value, expected[entry.path]) for entry in record)
    assert {(entry.what, entry.batch, entry.call, entry.position) for entry in record} == {("output", 0, 0, 0)}
    assert count_hooks(resnet) == 0
    assert record.bytes == sum(entry.value.nbytes for entry in record)


def test_what_is_written_in_place_later_does_not_change_what_was_captured() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU6(), nn.Hardswish()]
    plain = nn.Sequential(*layers).eval()
    model = copy.deepcopy(plain)
    for module in model:
        if hasattr(module, "inplace"):
            module.inplace = True
    with torch.no_grad(), prunekit.capture(model, "*", what=("input", "output")) as record:
        model(IMAGES)
        expected = features(plain, [str(number) for number in range(len(layers))])
    outputs = record.find(what="output")
    assert [entry.path for entry in outputs] == list(expected)
    assert all(torch.equal(entry.value, expected[entry.path]) for entry in outputs)
    assert all(torch.equal(a.value, b.value) for a, b in zip(outputs, record.find(what="input")[1:], strict=False))


def test_inputs_outputs_and_gradients_of_every_call_in_order() -> None:
    torch.manual_seed(0)
    model = Net()
    with prunekit.capture(model, ["conv*", "pair"], ("input", "output", "grad_input", "grad_output")) as record:
        model(IMAGES).square().sum().backward()
    assert count_hooks(model) == 0
    forward = [(e.path, e.what, e.call, e.position) for e in record if e.what in ("input", "output")]
    assert forward == [
        ("conv1", "input", 0, 0), ("conv1", "output", 0, 0),
        ("conv2", "input", 0, 0), ("conv2", "output", 0, 0), ("conv2", "input", 1, 0), ("conv2", "output", 1, 0),
        ("pair", "input", 0, 0), ("pair", "input", 0, 1), ("pair", "output", 0, 0), ("pair", "output", 0, 1),
    ]  # fmt: skip
    backward = [(e.path, e.what, e.call, e.position) for e in record if e.what.startswith("grad")]
    assert sorted(backward) == sorted(
        [("conv1", "grad_output", 0, 0)]  # the images need no gradient
        + [("conv2", f"grad_{side}", call, 0) for side in ("input", "output") for call in (0, 1)]
        + [("pair", f"grad_{side}", 0, position) for side in ("input", "output") for position in (0, 1)]
    )
    order = [entry[0:3] for entry in backward]
    assert order.index(("conv2", "grad_output", 1)) < order.index(("conv2", "grad_output", 0))


def test_gradients_are_those_that_autograd_gives() -> None:
    torch.manual_seed(0)
    model = Net().double()
    images = IMAGES.double().requires_grad_()
    x = F.relu(model.norm(first := model.conv1(images)))
    middle = model.conv2(x)
    last = model.conv2(middle)
    y = last + x
    one, two = x * y, x + y
    loss = (one + two).mean((2, 3)).square().sum()
    expected = torch.autograd.grad(loss, [images, first, middle, last, one, two], retain_graph=True)
    (through,) = torch.autograd.grad(middle, x, expected[2], retain_graph=True)  # without the other two readers
    model.norm.running_mean.zero_()
    with prunekit.capture(model, ["conv*", "pair"], ("grad_input", "grad_output")) as record:
        model(images).square().sum().backward()
    found = {(e.path, e.what, e.call, e.position): e.value for e in record}
    for key, value in {
        ("conv1", "grad_input", 0, 0): expected[0],
        ("conv1", "grad_output", 0, 0): expected[1],
        ("conv2", "grad_input", 0, 0): through,
        ("conv2", "grad_output", 0, 0): expected[2],
        ("conv2", "grad_input", 1, 0): expected[2],
        ("conv2", "grad_output", 1, 0): expected[3],
        ("pair", "grad_output", 0, 0): expected[4],
        ("pair", "grad_output", 0, 1): expected[5],
        ("pair", "grad_input", 0, 1): expected[3],
    }.items():
        torch.testing.assert_close(found[key], value, msg=str(key))


def test_reducers_every_other_batch_and_calls_outside_of_the_model() -> None:
    model = Net().eval()
    with (
        torch.no_grad(),
        prunekit.capture(model, "conv2", every=2) as whole,
        prunekit.capture(model, "conv2", reduce="moments", every=2) as moments,
        prunekit.capture(model, "conv2", reduce="extremes", every=2) as extremes,
        prunekit.capture(model, "conv2", reduce=lambda t: (t[:1], {"norm": float(t.norm())}), every=2) as own,
    ):
        for batch in [IMAGES, IMAGES + 1, IMAGES + 2]:
            model(batch)
        model.conv2(torch.ones(1, 4, 8, 8))
    assert [(entry.batch, entry.call) for entry in whole] == [(0, 0), (0, 1), (2, 0), (2, 1), (None, 2)]
    for full, two, ends, mine in zip(whole, moments, extremes, own, strict=True):
        values = full.value.transpose(0, 1).flatten(1)
        torch.testing.assert_close(two.value, torch.stack((values.mean(1), values.square().mean(1).sqrt())))
        assert torch.equal(ends.value, torch.stack((values.amin(1), values.amax(1))))
        assert torch.equal(mine.value[0], full.value[:1])
        assert mine.value[1]["norm"] == float(full.value.norm())
        assert mine.shape == full.shape == tuple(full.value.shape)
        assert mine.value[0].untyped_storage().nbytes() == mine.value[0].nbytes  # a view would keep the whole
    assert torch.equal(whole.values("conv2")[0], whole["conv2"][0].value)
    with pytest.raises(KeyError, match="did you mean 'conv2'"):
        whole["conv1"]


def test_what_is_beyond_the_limit_is_stated_with_the_reducer_that_avoids_it() -> None:
    model = Net().eval()
    with prunekit.capture(model, "conv*", limit_mib=0.05, reduce="mean") as record:
        model(IMAGES)
    assert (len(record), record.bytes) == (3, 48)
    message = (
        "output 0 of conv2, call 0 takes 32 KiB more, after 1 tensor of 1 forward pass that take 32 KiB, and the limit "
        r"of memory is 51.2 KiB; use reduce='mean' \(32 B instead of 64 KiB\), every=, to=FOLDER or limit_mib=1"
    )
    with pytest.raises(UsageError, match=message), prunekit.capture(model, "conv*", limit_mib=0.05) as record:
        model(IMAGES)
    assert (len(record), count_hooks(model)) == (1, 0)


def test_files(tmp_path: Path) -> None:
    model = Net().eval()
    folder = tmp_path / "captured"
    with prunekit.capture(model, "conv*") as kept, prunekit.capture(model, "conv*", to=folder) as record:
        model(IMAGES)
    names = ["000000_conv1_output", "000001_conv2_output", "000002_conv2_output"]
    assert sorted(path.stem for path in folder.iterdir()) == names
    assert all(torch.equal(a.value, b.value) for a, b in zip(kept, record, strict=True))
    with pytest.raises(UsageError, match="a new or empty folder"):
        prunekit.capture(model, "conv*", to=folder)


def test_owners_run_in_the_order_in_which_they_were_registered() -> None:
    model, order = Net().eval(), []

    class First(HookOwner):
        def register(self) -> None:
            self.own_forward(model.conv1, lambda *_: order.append("first"))

    second = prunekit.capture(model, "conv1", reduce=lambda t: order.append("second"))
    third = prunekit.capture(model, "conv1", reduce=lambda t: order.append("third"))
    with First(), second, third:
        model(IMAGES)
    assert order == ["first", "second", "third"]


def test_an_exception_leaves_no_hook_and_what_came_before_it() -> None:
    model = Net()
    model.conv2 = nn.Conv2d(5, 4, 3)
    with pytest.raises(RuntimeError), prunekit.capture(model, "conv*", ("output", "grad_output")) as record:
        model(IMAGES)
    assert [entry.path for entry in record] == ["conv1"]
    assert count_hooks(model) == 0


def test_a_container_that_runs_gives_each_tensor_of_its_nested_result() -> None:
    class Both(nn.ModuleDict):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {name: module(x) for name, module in self.items()}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.never = Both({"one": nn.Linear(3, 2), "two": nn.Linear(3, 4)}), nn.ModuleList()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return self.both(x)  # type: ignore[no-any-return]

    model = Outer()
    with prunekit.capture(model, "both") as record:
        result = model(torch.ones(1, 3))
    assert [(entry.path, entry.position) for entry in record] == [("both", 0), ("both", 1)]
    assert all(torch.equal(entry.value, result[name]) for entry, name in zip(record, ("one", "two"), strict=True))
    with pytest.raises(UsageError, match="'never' matches no module path"):
        prunekit.capture(model, "never")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_is_captured_once(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    images = torch.randn(2, 3, requires_grad=True)
    with prunekit.capture(model, nn.Linear, ("output", "grad_output")) as plain:
        model(images).sum().backward()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    with prunekit.capture(Checkpointed(), nn.Linear, ("output", "grad_output")) as record:
        record_model = record._model
        record_model(images).sum().backward()
    for what in ("output", "grad_output"):
        found, expected = record.find(what=what), plain.find(what=what)
        assert [entry.path for entry in found] == [f"inner.{entry.path}" for entry in expected]
        assert all(torch.equal(a.value, b.value) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("layer*.cnv", r"capture: 'layer\*.cnv' matches no module path; "),
        ("conv3", "capture: 'conv3' matches no module path; did you mean 'conv"),
        (nn.Conv3d, "capture: the model has no Conv3d; did you mean 'Conv2d'"),
        ([], "capture: expected a glob"),
        (None, "capture: expected a glob .* got NoneType"),
        (nn.Conv2d(1, 1, 1), "capture: expected a glob .* a class of modules or a channel group, got Conv2d"),
        (["conv1", 3], "capture: expected a glob .* got int"),
    ],
)
def test_a_layer_that_is_not_there(layers: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prunekit.capture(Net(), layers)  # type: ignore[arg-type]


def test_places_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="expected 'cpu', 'device', where the tensors are, or a folder, got 'cuda:0'"):
        prunekit.capture(Net(), "conv1", to="cuda:0")
    with pytest.raises(UsageError, match="below: cannot be made: Not a directory"):
        prunekit.capture(Net(), "conv1", to=tmp_path / "file" / "below")


def test_a_pass_without_gradients_and_a_compiled_model_are_named_as_such() -> None:
    model = Net().eval()
    with (
        pytest.warns(HookWarning, match="capture: no gradient came by conv1: run the model with gradients enabled"),
        torch.no_grad(),
        prunekit.capture(model, "conv1", "grad_output"),
    ):
        model(IMAGES)
    with pytest.raises(ModelError, match="capture: the model is compiled"):
        prunekit.capture(torch.compile(model, backend="eager"), "conv1")  # type: ignore[arg-type]


def test_a_tensor_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="'outputs' is no tensor of a layer; did you mean 'output'"):
        prunekit.capture(Net(), "conv1", "outputs")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reduce: expected a function, or the name of one; did you mean 'moments'"):
        prunekit.capture(Net(), "conv1", reduce="moment")  # type: ignore[arg-type]
    assert issubclass(prunekit.capture(Net(), "conv1").__class__, LayerHooks)
