"""A model in a wrapper is worked on as the model itself; what is no model is refused with what to give."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from equivalence import randomized
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import prunekit
from prunekit.errors import ModelError, PlanError, UsageError
from prunekit.hooks.wrappers import unwrapped
from prunekit.measure.latency.comparison import measure_latency
from prunekit.settings.deployment import LatencySettings
from prunekit.utils.context import training_mode

CPU = torch.device("cpu")
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


class Mixer(nn.Module):
    """Two layers and a norm over channels, which runs narrowed under masks."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(5, 16), nn.LayerNorm(16)
        self.inner, self.head = nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(self.norm(self.into(x)))))  # type: ignore[no-any-return]


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process, which DistributedDataParallel asks for; compiled code is forgotten."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [
        DataParallel,
        DistributedDataParallel,
        AveragedModel,
        compiled,
        lambda model: DistributedDataParallel(compiled(model)),
        lambda model: AveragedModel(DataParallel(model)),
    ],
    ids=["DataParallel", "DistributedDataParallel", "AveragedModel", "compile", "DDP of compiled", "average of DP"],
)
@pytest.mark.usefixtures("alone")
def test_a_wrapped_model_is_worked_on_as_the_model_itself(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = randomized(Mixer()).eval()
    wrapped = wrap(model)
    inner = unwrapped(wrapped)  # AveragedModel's is a copy
    pruned = prunekit.prune(wrapped, (X,), macs=0.5)
    assert type(pruned.model) is Mixer
    assert pruned.plan.digest == prunekit.prune(model, (X,), macs=0.5).plan.digest
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    with prunekit.masked(wrapped, pruned.plan, optimizer) as given:
        assert given is wrapped
        small = prunekit.compact(wrapped, pruned.plan)
        torch.testing.assert_close(wrapped(X), small(X))
        wrapped(X).square().sum().backward()
        optimizer.step()
        small = prunekit.compact(wrapped, pruned.plan)
        assert prunekit.verify(wrapped, small, pruned.plan, [(X,)]).max_relative_difference <= 1e-12
    folder = prunekit.save(DataParallel(small), tmp_path / "small", pruned.plan)
    assert torch.equal(prunekit.load(folder, model=Mixer())(X), small.eval()(X))
    stats = prunekit.calibrate(wrapped, [X])
    assert {key.module for key in stats.layers} <= dict(inner.named_modules()).keys()
    assert prunekit.summary(wrapped, X).macs == prunekit.summary(model, X).macs


@pytest.mark.usefixtures("alone")
def test_a_sharded_model_is_refused_and_a_wrapped_part_is_not() -> None:
    model = Mixer()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ModelError, match=r"has only its shards; trace and prune the whole model, and call fully_shard"):
        prunekit.prune(model, (X,), macs=0.5)
    parts = nn.Sequential(DistributedDataParallel(Mixer()), nn.Linear(3, 2))
    assert prunekit.prune(parts, (X,), macs=0.5).max_relative_difference <= 1e-12


@pytest.mark.slow
def test_masks_that_a_compiled_model_would_leave_out_are_refused() -> None:
    torch._dynamo.reset()
    model = randomized(Mixer()).eval()
    plan = prunekit.prune(model, (X,), macs=0.5).plan
    ready = compiled(model)
    ready(X)
    refused = pytest.raises(ModelError, match=r"compiled .* already.*torch\._dynamo\.reset\(\)")
    with refused, prunekit.masked(ready, plan):
        pass
    torch._dynamo.reset()
    with prunekit.masked(ready, plan):
        torch.testing.assert_close(ready(X), prunekit.compact(model, plan)(X))
    torch._dynamo.reset()


class Holder:
    """Has a model, and is none."""

    def __init__(self) -> None:
        self.network = Mixer()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("vit_b_16", "got 'vit_b_16' (str); build the model"),
        (Path("net.pth"), "got 'net.pth' (PosixPath); build the model"),
        (Mixer, "got the class Mixer; make one: Mixer(...)"),
        (compiled, "got the function compiled; call it: compiled(...)"),
        (Mixer().state_dict(), "got a mapping, as a state dict is; build the model"),
        (Holder(), "got Holder, whose network is one: give .network"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_model_is_refused_with_what_to_give(given: Any, says: str) -> None:
    for call in (
        lambda: prunekit.prune(given, (X,), macs=0.5),
        lambda: prunekit.trace(given, (X,)),
        lambda: prunekit.summary(given, X),
        lambda: prunekit.calibrate(given, [X]),
    ):
        with pytest.raises(UsageError, match=re.escape(f"model: expected a torch.nn.Module, {says}")):
            call()


def test_models_that_cannot_be_worked_on_yet_say_what_makes_them_ready() -> None:
    lazy = nn.Sequential(nn.Linear(5, 4), nn.LazyBatchNorm1d())
    with pytest.raises(ModelError, match=r"1\.weight is not initialized yet; run the model once on an example first"):
        prunekit.prune(lazy, (X,), macs=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have none made
        program = torch.jit.script(nn.Linear(5, 4))  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match="TorchScript program, which cannot be followed; give the module it was made"):
        prunekit.trace(program, (X,))
    offloaded = accelerate.cpu_offload(randomized(Mixer()), execution_device=CPU)
    with pytest.raises(ModelError, match=r"offloads the weights of into; .*remove_hook_from_submodules\(model\)"):
        prunekit.Pruner(offloaded, (X,), macs=0.5)
    assert prunekit.calibrate(offloaded, [X]).layers  # which runs it, and no more


class Tied(nn.Module):
    """Two modules that share a weight, between layers that may become narrower."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.embed, self.inner, self.out = nn.Embedding(12, 16), nn.Linear(16, 16), nn.Linear(16, 12, bias=False)
        if shared:
            self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.inner(self.embed(ids)).relu())
        return found


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_weights_that_accelerate_offloads_are_pruned_where_they_are(place: str, tmp_path: Path) -> None:
    ids = torch.randint(0, 12, (32, 5), generator=torch.Generator().manual_seed(0))
    in_memory = place == "memory"  # of files, nothing says which weights were one
    model = randomized(Tied(shared=in_memory))
    expected = prunekit.prune(model, calibration=ids, params=0.7)
    if in_memory:
        model = accelerate.cpu_offload(model, execution_device=CPU)
    else:
        model = accelerate.disk_offload(model, tmp_path, execution_device=CPU)
    model(ids)  # after which tied weights have no tensor in common
    found = prunekit.prune(model, calibration=ids, params=0.7)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert (found.model.out.weight is found.model.embed.weight) == in_memory
    for (name, one), (_, other) in zip(expected.model.named_parameters(), found.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert prunekit.trace(model, ids).n_labels == expected.plan.channel_map.n_labels


def test_a_model_without_values_is_traced_and_counted_and_not_pruned() -> None:
    with torch.device("meta"):
        model = Mixer()
    assert prunekit.trace(model, (X,)).groups
    assert prunekit.summary(model, X).macs == prunekit.summary(Mixer(), X).macs
    with pytest.raises(ModelError, match=r"into\.weight is on the meta device, and prune needs values"):
        prunekit.prune(model, (X,), macs=0.5)


@pytest.mark.slow
def test_globs_come_alone_or_several_and_modules_as_they_are() -> None:
    model = randomized(Mixer())
    one, several = (prunekit.prune(model, (X,), macs=0.6, ignore=given) for given in ("inn*", ["inn*"]))
    assert one.plan.digest == several.plan.digest
    assert prunekit.plan(torch.compile(model), X, macs=0.6, ignore=model.inner).digest == one.plan.digest
    with pytest.raises(UsageError, match=r"ratios: expected shares by globs .*, got str 'inner'"):
        prunekit.prune(model, (X,), macs=0.6, ratios="inner")  # type: ignore[arg-type]


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Mixer()

    def forward(self, *, pixels: Tensor, scale: float = 1.0) -> Tensor:
        return self.net(pixels) * scale  # type: ignore[no-any-return]


@pytest.mark.slow
def test_an_exported_module_is_worked_on_in_the_mode_it_has() -> None:
    """It refuses `train()` and `eval()`, which whatever runs a model calls."""
    model = randomized(Mixer()).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (X,), dynamic_shapes=({0: batch},)).module()
    images = torch.randn(24, 5)
    assert prunekit.calibrate(exported, [X]).layers
    assert prunekit.summary(exported, (X,)).macs == prunekit.summary(model, (X,)).macs
    done = prunekit.prune(exported, calibration=images, macs=0.6)
    assert done.max_relative_difference < 1e-9
    assert sum(p.numel() for p in done.model.parameters()) < sum(p.numel() for p in model.parameters())
    assert measure_latency({"exported": done.model}, (5,), LatencySettings(batches=(2,), repeats=5), [CPU]).rows
    says = r"cannot be put into train mode: .* give the module that it was exp"
    with pytest.raises(ModelError, match=says), training_mode(exported, True):
        pass


class Predictor(nn.Module):
    """Makes a copy of the model that it holds when it first runs, hooks and all, and returns what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.ready = Mixer(), list[nn.Module]()

    def forward(self, x: Tensor) -> list[Any]:
        self.ready = self.ready or [copy.deepcopy(self.network)]
        with torch.inference_mode():
            return self.ready[0](x).tolist()  # type: ignore[no-any-return]


class Detour(nn.Module):
    """Runs a model that it does not hold, as a predictor does that makes its own copy."""

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self.network, self.copies = Mixer(), copies
        self.other = [Mixer()]

    def forward(self, x: Tensor) -> Tensor:
        if self.copies:
            self.other[0].load_state_dict(self.network.state_dict())
        return self.other[0](x)  # type: ignore[no-any-return]


def test_examples_that_do_not_fit_say_what_would() -> None:
    with pytest.raises(ModelError, match=r'takes pixels only by name: give a mapping, \{"pixels": pixels\}'):
        prunekit.prune(ByName(), (X,), macs=0.5)
    with pytest.raises(UsageError, match=r"got NumPy arrays \(ndarray\); give torch\.from_numpy\(array\)"):
        prunekit.prune(Mixer(), (X.numpy(),), macs=0.5)
    with pytest.raises(UsageError, match=r"got ndarray; give tensors: torch\.from_numpy\(array\)"):
        prunekit.prune(Mixer(), calibration=X.repeat(3, 1).numpy(), macs=0.5)
    with pytest.raises(UsageError, match=r"an example is given by itself, prune\(model, x, macs=0\.5\)"):
        prunekit.prune(Mixer(), calibration=X, macs=0.5)
    with pytest.raises(PlanError, match=r"Detour calls no module of its own .* its \.network \(Mixer\) has them all"):
        prunekit.prune(Detour(copies=True), (X,), macs=0.5)
    with pytest.raises(PlanError, match=r"Predictor calls no module of its own .* its \.network \(Mixer\) has them"):
        prunekit.prune(Predictor(), (X,), macs=0.5)
    with pytest.raises(ModelError, match=r"without using any of its parameters; its \.network \(Mixer\) has them all"):
        prunekit.prune(Detour(), (X,), macs=0.5)
