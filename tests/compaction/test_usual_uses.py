"""Compact models do what dense models do: copied, pickled, traced, scripted, compiled, exported, run in parallel."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import randomized, settled_plan
from process_group import together
from torch import Tensor, nn
from torchvision.models import SwinTransformer, VisionTransformer
from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
from torchvision.models.swin_transformer import SwinTransformerBlockV2
from torchvision.models.video import SwinTransformer3d

from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.channels.tracing.substitutes import SizedAttention
from prunekit.compaction.compact_model import compact
from prunekit.compaction.folded_norms import FoldedNorm
from prunekit.compaction.model_folder import load, save
from prunekit.deploy.batchnorm_folding import fold_batchnorm
from prunekit.pruning.prune import prune
from prunekit.utils.context import seeded


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=generator())


def sequences(batch: int) -> Tensor:
    return torch.randn(batch, 5, 6, generator=generator())


class Quotient(nn.Module):
    """Attention as most write it: the width of a head is a quotient, that of all heads the input's."""

    def __init__(self, width: int = 12, heads: int = 4) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, width), nn.Linear(width, 4)
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        n, length, width = x.shape
        qkv = self.qkv(x).reshape(n, length, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.head(self.proj(mixed.reshape(n, length, width)))


class Ordered(nn.Module):
    """Channels that meet a table, and are put in the order of an index."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 5)
        self.register_buffer("order", torch.randperm(width, generator=generator()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + torch.linspace(0, 1, 12) * torch.arange(x.shape[1])[:, None]
        y = y.index_select(-1, self.order)
        return self.c(y + self.b(y).relu())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    return nn.Sequential(nn.Linear(6, 12), layer, nn.Linear(12, 4))


def narrow_norms() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(1, 12), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(12, 8, 3, 2), nn.InstanceNorm2d(8, affine=True), nn.ReLU())
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 4))


def norms() -> nn.Module:
    parts = [nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


class Experts(nn.Module):
    """A sparse mixture of experts between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.head = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 5)
        self.up, self.down = nn.Parameter(torch.randn(4, 12, 8)), nn.Parameter(torch.randn(4, 8, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).flatten(0, 1)
        shares, chosen = self.router(x).softmax(-1).topk(2)
        inner = F.silu(torch.einsum("td,tkfd->tkf", x, self.up[chosen]))
        return self.head(x + torch.einsum("tkf,tkdf,tk->td", inner, self.down[chosen], shares))


def swin(**options: Any) -> nn.Module:
    return SwinTransformer([4, 4], 12, [2], [3], [4, 4], num_classes=5, **options)


def vit() -> nn.Module:
    return VisionTransformer(32, 8, num_layers=1, num_heads=3, hidden_dim=12, mlp_dim=24, num_classes=5)


def video() -> nn.Module:
    return SwinTransformer3d([2, 4, 4], 12, [2], [3], [4, 4, 4], num_classes=5)


class Grids(nn.Module):
    """MaxViT's attention, within groups of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 12), nn.Linear(12, 4)
        self.attention = RelativePositionalMultiHeadAttention(12, 4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.first(x)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "rewritten method": (Quotient, sequences),
    "taken channels": (Ordered, sequences),
    "attention of torch": (encoder, sequences),
    "window attention": (swin, images),
    "cosine attention": (partial(swin, block=SwinTransformerBlockV2), images),
    "attention within groups": (Grids, lambda batch: torch.randn(batch, 2, 16, 6, generator=generator())),
    "attention in video": (video, lambda batch: torch.randn(batch, 3, 4, 16, 16, generator=generator())),
    "vision transformer": (vit, images),
    "narrow norms": (narrow_norms, images),
    "folded norms": (norms, images),
    "experts": (Experts, sequences),
}
"""Kinds of compact models that are more than the dense model with smaller tensors, and what they are called with."""

OF_ONE_FUNCTION = sorted(MODELS.keys() - {"cosine attention", "attention in video", "vision transformer"})
"""Without those that run the functions of others once more: compilers take seconds for each."""


def is_changed(module: nn.Module) -> bool:
    return isinstance(module, (SizedAttention, FoldedNorm)) or original_of(type(module)) is not type(module)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    make, inputs = MODELS[request.param]
    with seeded(0):
        dense = randomized(make()).eval()
    plan = settled_plan(dense, (inputs(2),), share=0.4)
    small = compact(dense, plan)
    if request.param == "folded norms":
        dense, small = (fold_batchnorm(model, inputs(2)).model for model in (dense, small))
    folder = save(small, tmp_path_factory.mktemp("folder") / "model", plan)
    with seeded(0):
        loaded = load(folder, make)
    assert sum(one.numel() for one in small.parameters()) < sum(one.numel() for one in dense.parameters())
    changed = any(map(is_changed, small.modules()))
    assert changed or request.param in ("narrow norms", "experts")
    return {"name": request.param, "dense": dense, "compact": small, "loaded": loaded, "inputs": inputs}


def assert_same(model: nn.Module, other: Callable[..., Any], x: Tensor, tolerance: float = 0.0) -> None:
    with torch.no_grad():
        want, got = model(x), other(x)
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())


@pytest.mark.slow
def test_copies_and_files(case: dict[str, Any]) -> None:
    x = case["inputs"](2)
    for which in ("compact", "loaded"):
        model = case[which]
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        ways = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
        for other in ways:
            assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
            assert_same(model, other, x)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = copy.deepcopy(model)
        for tensor in other.parameters():
            tensor.data.fill_(0.5)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert_same(model, other, x)


class Hooked(nn.Module):
    """Adds a hook at its first call, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not self.a._forward_hooks:
            self.a.register_forward_hook(lambda module, args, output: None)
        return self.b(self.a(x).relu())


def test_what_a_first_call_adds_is_not_in_a_model_that_was_pruned_and_saved(tmp_path: Path) -> None:
    pruned = prune(Hooked(), sequences(2), macs=0.5)
    save(pruned, tmp_path / "model")
    for model in (pruned.model, load(tmp_path / "model", Hooked())):
        assert_same(model, pickle.loads(pickle.dumps(model)), sequences(2))


def does(use: Callable[[nn.Module], Callable[..., Any]], case: dict[str, Any], x: Tensor) -> None:
    """Holds that the compact model does what the dense one does, with its own outputs."""
    for which in ("dense", "compact", "loaded"):
        assert_same(case[which], use(case[which]), x, 1e-5)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="TorchScript does not support this version of Python")
def test_torchscript(case: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and traces warn of what they fix
        does(torch.jit.script, case, case["inputs"](3))
        does(lambda model: torch.jit.trace(model, case["inputs"](3)), case, case["inputs"](3) + 1)


def test_fx(case: dict[str, Any]) -> None:
    does(torch.fx.symbolic_trace, case, case["inputs"](3))


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_ONE_FUNCTION, indirect=True)
def test_compiled_in_one_graph(case: dict[str, Any]) -> None:
    def compiled(model: nn.Module) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager", fullgraph=True)

    does(compiled, case, case["inputs"](2))


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_ONE_FUNCTION, indirect=True)
def test_exported_for_any_batch(case: dict[str, Any]) -> None:
    def exported(model: nn.Module) -> Callable[..., Any]:
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        program: Callable[..., Any] = torch.export.export(model, (case["inputs"](2),), dynamic_shapes=shapes).module()
        return program

    does(exported, case, case["inputs"](5))


def test_data_parallel(case: dict[str, Any]) -> None:
    model, x = case["loaded"], case["inputs"](2)
    assert_same(model, nn.DataParallel(model), x)
    for module in model.modules():
        replica = module._replicate_for_data_parallel()
        assert type(replica) is type(module)
        assert vars(module).keys() <= vars(replica).keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rewritten method", "attention of torch"])
def test_compiled_by_inductor(name: str) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    make, inputs = MODELS[name]
    dense = randomized(make()).eval()
    small = compact(dense, settled_plan(dense, (inputs(2),), share=0.4))
    torch._dynamo.reset()
    assert_same(small, torch.compile(small), inputs(2), 1e-5)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    dense = randomized(swin()).eval()
    small = compact(dense, settled_plan(dense, (images(2),), share=0.4))
    alone = copy.deepcopy(small)
    step(alone, images(4))
    for found in together(2, tmp_path, trained_together, small):
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def step(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()


def trained_together(model: nn.Module) -> dict[str, Tensor]:
    half = slice(2 * torch.distributed.get_rank(), 2 * torch.distributed.get_rank() + 2)
    model = copy.deepcopy(model)  # its tensors came in memory that the processes share
    step(nn.parallel.DistributedDataParallel(model), images(4)[half])
    return model.state_dict()
