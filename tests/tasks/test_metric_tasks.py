"""Tasks whose scores a metric measures, and whose models compute their loss themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import together
from torch import Tensor, nn

import prunekit as pk
from prunekit.data.user_data import sample_splits
from prunekit.errors import UsageError
from prunekit.measure.accuracy import evaluate
from prunekit.settings.train import TrainSettings
from prunekit.tasks.task import Score, Task
from prunekit.training import rate_search
from prunekit.training.loop import fit

CPU = torch.device("cpu")


class Median:
    """The median error of all samples: it does not add up over batches."""

    def __init__(self) -> None:
        self.errors: list[Tensor] = []

    def update(self, output: Tensor, targets: list[dict[str, Tensor]]) -> None:
        self.errors += [(row - each["value"]).abs().mean() for row, each in zip(output, targets, strict=True)]

    def compute(self) -> Tensor:
        return torch.stack(self.errors).median()


class Regressor(nn.Module):
    """Returns its loss in train mode, as torchvision's detectors do, and a result that has to be decoded in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))

    def forward(self, x: Tensor, targets: list[dict[str, Tensor]] | None = None) -> Any:
        found = self.body(x)
        if not self.training:
            return {"doubled": 2 * found}
        assert targets is not None, "training needs targets"
        return {"square": (found - torch.stack([each["value"] for each in targets])).square().mean()}


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    return torch.stack([x for x, _ in samples]), [{"value": y} for _, y in samples]


TASK = Task(
    "median",
    lambda output, targets: output["square"],
    None,
    (Score("near", "nearness", lambda found: 100 / (1 + float(found)), lambda found: (0.0, 100.0)),),
    collate=collate,
    metric=Median,
    loss_inputs=lambda model, example, targets: (*example, targets),
    predictions=lambda model, example, output: output["doubled"] / 2,
    loss_in_train_mode=True,
)


def samples(count: int = 24) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=draw)
    return [(x, x[:2] * 0.5) for x in inputs]


def batches(size: int) -> list[Any]:
    found = samples()
    return [collate(found[start : start + size]) for start in range(0, len(found), size)]


def model() -> Regressor:
    torch.manual_seed(0)
    return Regressor()


def test_a_metric_measures_all_batches_together() -> None:
    net = model().eval()
    with torch.no_grad():
        errors = [(net.body(x[None])[0] - y).abs().mean() for x, y in samples()]
    found = evaluate(net, batches(5), TASK, CPU)
    want = 100 / (1 + float(torch.stack(errors).median()))
    assert found.values["near"] == pytest.approx(want, rel=1e-6)
    assert found.n_test == 24
    assert found.counts == ()
    assert found.interval == (0.0, 100.0)
    assert found.figures().keys() == {"near", "n_test", "low", "high"}


def _shared() -> float:
    rank = torch.distributed.get_rank()
    mine = batches(5)[rank::3] if rank < 2 else []
    return evaluate(model(), mine + (batches(5)[2::3] if rank == 0 else []), TASK, CPU, together=True).values["near"]


def test_processes_measure_a_metric_over_the_samples_of_all(tmp_path: Path) -> None:
    assert set(together(3, tmp_path, _shared)) == {evaluate(model(), batches(5), TASK, CPU).values["near"]}


@pytest.mark.parametrize("lr", [0.1, "auto"])
def test_a_model_that_computes_its_own_loss_is_trained(lr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_search, "SHARE", 1.0)
    monkeypatch.setattr(rate_search, "STEPS", 2)
    splits = sample_splits({"train": samples(), "test": samples(6), "validation": samples(9)}, TASK)
    settings = TrainSettings(epochs=12, lr=lr)
    net = model()
    history = fit(net, splits, settings, device=CPU, seed=0, batch=6)
    first, last = history.rows[0], history.rows[-1]
    assert last.train_loss < first.train_loss
    assert history.rows[history.best_epoch - 1].validation_score > 60
    losses = [row.held_out_loss for row in history.rates]
    assert len(losses) == (6 + 1 if lr == "auto" else 0)
    assert None not in losses
    assert first.train_score is None
    assert first.validation_loss is None
    assert first.figures()["validation_near"] == first.validation_score


def test_gradients_of_a_loss_in_train_mode_leave_buffers_and_modes() -> None:
    net = model().eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    gradients = pk.collect_gradients(net, batches(6), task=TASK)
    assert not any(module.training for module in net.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    inputs, targets = batches(6)[0]
    wanted = torch.stack([each["value"] for each in targets])
    net.zero_grad()
    (net.body(inputs) - wanted).square().mean().backward()  # in eval mode: neither dropout nor batch statistics
    term = (net.body[0].weight * net.body[0].weight.grad).sum(1).detach().double()
    assert torch.allclose(torch.from_numpy(gradients.terms["body.0.weight", 0][0]), term, rtol=1e-5, atol=1e-9)
    small = pk.prune(net, batches(6)[0][0], macs=0.6, criterion="taylor", gradients=gradients).model
    assert small.body[0].out_features < 16


def test_a_task_has_counts_or_a_metric() -> None:
    with pytest.raises(UsageError, match="expected either counts, which add up over batches, or a metric, got neither"):
        Task("none", TASK.loss, None, TASK.scores)
    with pytest.raises(UsageError, match="got both"):
        Task("both", TASK.loss, lambda output, targets: torch.zeros(1), TASK.scores, metric=Median)
