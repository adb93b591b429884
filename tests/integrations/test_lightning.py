"""Pruning in Lightning's Trainer: checkpoints, averages, accumulation, and manual optimization."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit as pk
from prunekit.errors import ArtifactError, UsageError
from prunekit.hooks.hook import count_hooks

pl = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint  # noqa: E402

from prunekit.integrations import lightning as integration  # noqa: E402
from prunekit.integrations.lightning import PruneCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning",  # of Lightning, by torch
    "ignore:.*does not have many workers",
    "ignore:.*isinstance.treespec",
    "ignore:Be aware that when using .ckpt_path.:UserWarning",  # callbacks of the checkpoint that are left out
    "ignore:.*exists and is not empty",
)
X = torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(32) % 4


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Two convolutions and a linear layer, in a submodule."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Flatten()
        )
        self.model.append(nn.Linear(96, 4))
        self.example_input_array = X[:2]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Worse(Net):
    """One whose score falls from epoch to epoch."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("score", 1.0 - 0.1 * self.current_epoch)


class Inner(Net):
    """One whose loss is all that it computes itself."""

    forward = pl.LightningModule.forward

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])


class Manual(Net):
    """One that steps by itself, after every second batch."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        if index % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 4)  # 8 batches


def trainer(*callbacks: Any, **given: Any) -> Any:
    usual: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(**{**usual, **given}, callbacks=list(callbacks))


def require_zeros(model: nn.Module, plan: pk.Plan) -> None:
    for name, tensor in model.named_parameters():
        mask = plan.mask(name)
        if mask is not None:
            assert (tensor[~mask.expand(tensor.shape)] == 0).all(), name


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(integration)
    assert done.attempted
    assert not done.failed


KINDS: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any], int]] = {
    "whole": (Net, {}, {}, 16),
    "submodule": (Inner, {"example": X[:2], "module": "model"}, {}, 16),
    "accumulated, bf16": (Net, {}, {"accumulate_grad_batches": 4, "precision": "bf16-mixed"}, 4),
    "manual": (Manual, {"steps": 6}, {}, 8),
    "true bf16": (Net, {}, {"precision": "bf16-true"}, 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_training_ends_with_the_compact_model(name: str, tmp_path: Path) -> None:
    cls, arguments, given, steps = KINDS[name]
    rows: list[dict[str, Any]] = []
    prune = PruneCallback(**{"macs": 0.5, "criterion": "taylor", "on_change": rows.append} | arguments)
    averages = [EMAWeightAveraging(decay=0.9)] if name == "submodule" else []
    running, net = trainer(prune, *averages, **given), cls()
    running.fit(net, loader())  # the average takes the place of the weights at the end
    pruned = net.model if prune.module else net
    require_zeros(pruned, prune.plan)
    assert prune.pruner.step_count == steps
    assert rows[-1]["step"] == (6 if name == "manual" else steps // 2)
    assert prune.pruner.done
    assert rows[-1]["macs_left"] <= 0.5
    assert float(running.callback_metrics["macs_left"]) == pytest.approx(rows[-1]["macs_left"])
    masked = net.model(X.to(net.dtype))
    small = prune.finish()
    assert type(small) is type(pruned)
    torch.testing.assert_close(small(X.to(net.dtype)), masked)
    assert count_hooks(net) == 0
    folder = pk.save(small, tmp_path / "small", prune.plan)
    again = pk.load(folder, model=(lambda: cls().model) if prune.module else cls)
    assert torch.equal(again(X.to(net.dtype)), small.eval()(X.to(net.dtype)))
    if not prune.module:
        before = [parameter.shape for parameter in small.parameters()]
        trainer(max_epochs=1, **given).fit(small.train(), loader())
        assert [parameter.shape for parameter in small.parameters()] == before


@pytest.mark.slow
@pytest.mark.parametrize("average", [False, True])
def test_resumed_is_uninterrupted(average: bool, tmp_path: Path) -> None:
    def begun(seed: int) -> tuple[Net, PruneCallback, list[Any]]:
        prune = PruneCallback(macs=0.5, steps=0.7, criterion="taylor")
        every = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        return Net(seed), prune, [prune, every, *([EMAWeightAveraging(decay=0.8)] if average else [])]

    def loader() -> Any:  # of 4 batches
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 8)

    net, whole, callbacks = begun(0)
    running = trainer(*callbacks, enable_checkpointing=True, max_epochs=4)
    running.fit(net, loader())
    wanted = {name: value.clone() for name, value in net.state_dict().items()}
    require_zeros(net, whole.plan)
    for at in (0, 2):
        other, again, callbacks = begun(3)
        trainer(again, *callbacks[2:], max_epochs=4).fit(other, loader(), ckpt_path=tmp_path / f"epoch={at}.ckpt")
        found = other.state_dict()
        assert all(torch.equal(value, found[name]) for name, value in wanted.items()), at
        assert again.pruner.changes == whole.pruner.changes
    # In the same process, from before later pruning steps.
    running.fit(net, loader(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in wanted.items())
    small, other_small = whole.finish(), again.finish()
    for one, two in zip(small.parameters(), other_small.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
def test_only_models_under_the_final_plan_are_the_best(tmp_path: Path) -> None:
    prune = PruneCallback(macs=0.5, steps=20, schedule=pk.ScheduleSettings("linear", rounds=2))
    best = ModelCheckpoint(tmp_path, filename="{step}", monitor="score", mode="max", save_top_k=1)
    stop = EarlyStopping("score", mode="max", patience=2)
    running = trainer(prune, best, stop, max_epochs=8, enable_checkpointing=True)
    running.fit(Worse(), loader(), loader())
    assert prune.pruner.changes[-1].pruned
    assert best.best_model_path == str(tmp_path / "step=24.ckpt")  # scores fall, and the first epoch scores best
    assert running.global_step == 40  # the third and the fifth epoch without a better one, counted from the final plan
    checkpoint = torch.load(best.best_model_path, weights_only=True)
    (state,) = (value for key, value in checkpoint["callbacks"].items() if key.startswith("PruneCallback"))
    assert state["pruner"]["masks"]["keep"].tolist() == prune.plan.keep.tolist()
    again = PruneCallback(macs=0.6, steps=20, schedule=prune.arguments["schedule"])
    with pytest.raises(ArtifactError, match="of other settings"):
        trainer(again, max_epochs=9).fit(Net(), loader(), ckpt_path=best.best_model_path)
    prune = PruneCallback(X[:2], module="model", macs=0.5)
    with pytest.raises(UsageError, match=r"has no state of PruneCallback\{'module': 'model'\}"):
        trainer(prune, max_epochs=9).fit(Net(), loader(), ckpt_path=best.best_model_path)


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model[:3].parameters(), lr=0.1), torch.optim.SGD(self.model[3:].parameters())]


def test_bad_input() -> None:
    def fit(net: Net, *arguments: Any, **given: Any) -> PruneCallback:
        prune = PruneCallback(*arguments, **given)
        trainer(prune, max_steps=2).fit(net, loader())
        return prune

    with pytest.raises(UsageError, match=r"Inner has no forward that could be traced: .*module='model'"):
        fit(Inner(), X[:2], macs=0.5)
    with pytest.raises(UsageError, match=r"submodule of Net with parameters, got 'modle'; did you mean 'model'"):
        fit(Net(), X[:2], module="modle", macs=0.5)
    with pytest.raises(UsageError, match="expected one optimizer with the parameters of TwoOptimizers, got 2 among 2"):
        fit(TwoOptimizers(), macs=0.5)
    with pytest.raises(UsageError, match="expected a training that has begun"):
        PruneCallback(macs=0.5).finish()
    prune = PruneCallback(macs=0.5)
    with pytest.raises(UsageError, match="because nobody knows the length of this training"):
        trainer(prune, max_epochs=-1).fit(Net(), loader())
    prune = fit(Net(), macs=0.5, steps=4)
    with pytest.raises(UsageError, match="this one prunes another Net"):
        trainer(prune).fit(Net(), loader())
