"""Every stage on a device that only says it is CUDA: nothing is made elsewhere, and training seldom waits for it.

Values are compared with those of the CPU, which are computed by the same kernels: they have to be equal to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from claimed_device import CUDA, Device, claimed_cuda
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit as pk
from prunekit.criteria.scoring import score
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.jobs.dry_run import dry_run
from prunekit.measure.accuracy import evaluate
from prunekit.planning.solver import make_plan
from prunekit.pruning.sample_statistics import share_check
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import ClampSettings, TrainSettings
from prunekit.tasks.task import get_task
from prunekit.training.loop import fit

SAMPLES = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.second(self.norm(self.first(x)).relu())).relu()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.head = nn.Conv2d(3, 8, 3, padding=1), Block(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.one(self.stem(x).relu()).mean((2, 3)))  # type: ignore[no-any-return]


def build() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 3, 8, 8, generator=generator), torch.arange(SAMPLES) % 5


@pytest.fixture
def device() -> Iterator[Device]:
    with claimed_cuda() as found:
        yield found


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def on_both(work: Callable[[nn.Module, Tensor, Tensor], Any]) -> tuple[Any, Any, Device]:
    """What some work returns on the CPU, and on the claimed device, whose tensors are moved to the CPU."""
    expected = work(build(), *data())
    with claimed_cuda() as device:
        x, y = data()
        found = work(build().cuda(), x.cuda(), y.cuda())
        if isinstance(found, nn.Module):
            assert {tensor.device for tensor in found.state_dict().values()} == {CUDA}
            found.cpu()
    return expected, found, device


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    there = weights(b)
    return all(torch.equal(tensor, there[name]) for name, tensor in weights(a).items())


def close_weights(a: nn.Module, b: nn.Module) -> bool:
    """Moments are summed in another type on a device, so that fitted weights differ by rounding."""
    there = weights(b)
    return all(torch.allclose(tensor, there[name], 1e-3, 1e-5) for name, tensor in weights(a).items())


def trained(
    model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, device: Device | None
) -> list[int]:
    """Three steps; what the package waited for in each."""
    waits = []
    for _ in range(3):
        before = 0 if device is None else len(device.ours())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        waits.append(0 if device is None else len(device.ours()) - before)
    return waits


def test_the_device_is_held_to_what_it_claims(device: Device) -> None:
    model, x = build().cuda(), data()[0]
    assert {tensor.device for tensor in model.state_dict().values()} == {CUDA}
    assert copy.deepcopy(model).stem.weight.device == CUDA
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        model(x)
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        x.cuda().numpy()
    there = x.cuda()
    model(there).sum().backward()
    assert model.stem.weight.grad.device == CUDA
    assert (there * torch.tensor(2.0) + there.new_zeros(8)).device == CUDA  # numbers of the CPU may take part
    assert torch.zeros_like(there, device="cpu").device.type == torch.zeros(2).device.type == "cpu"
    assert torch.tensor([1], device="cuda").device == torch.zeros(1, device="cuda").device == CUDA
    assert torch.equal(there.cpu(), x)
    assert not torch.equal(there.to("cpu", torch.float64), x + 1)
    assert torch.linalg.matrix_rank(there[0, 0]).device == CUDA  # which makes tensors by itself


def test_waits_are_counted(device: Device) -> None:
    there = torch.arange(6, device="cuda")
    for wait in (
        there.sum().item,
        there.cpu,
        there.tolist,
        lambda: there[there > 2],
        there.nonzero,
        lambda: bool(there.any()),
    ):
        before = len(device.waits)
        wait()
        assert len(device.waits) == before + 1
    before = len(device.waits)
    there.sum().add(1).where(there > 2, 0).clamp(min=1)
    assert len(device.waits) == before
    assert {wait.path for wait in device.waits} == {__file__}
    assert device.ours() == []


@pytest.mark.parametrize("criterion", ["fpgm", "wanda", "elimination"])
def test_plans_are_those_of_the_cpu(criterion: str) -> None:
    def work(model: nn.Module, x: Tensor, y: Tensor) -> pk.Plan:
        return pk.plan(model, x, macs=0.5, criterion=criterion, calibration=x)

    expected, found, _ = on_both(work)
    np.testing.assert_array_equal(expected.keep, found.keep)


def test_labeled_criteria_and_statistics() -> None:
    def work(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Any, Any]:
        gradients = pk.collect_gradients(model, [(x, y)], task="image_classification")
        return pk.calibrate(model, [x, x]), pk.plan(model, x, macs=0.5, criterion="taylor", gradients=gradients)

    (stats, plan), (found, again), device = on_both(work)
    np.testing.assert_array_equal(plan.keep, again.keep)
    assert stats.frame().equals(found.frame())
    # One decision for each activation: whether the variance needs a second pass.
    assert sum("reductions" in wait for wait in device.ours()) <= 2 * len(stats)


def test_masked_training_never_waits_and_the_compact_model_is_there_too(tmp_path: Path) -> None:
    def work(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
        plan = pk.plan(model, x, macs=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with pk.masked(model, plan, optimizer):
            trained(model, x, y, optimizer, None)
            small = pk.compact(model, plan)
            assert pk.verify(model, small, plan, x).max_relative_difference < 1e-9
        pk.transfer(optimizer, model, small, plan)
        pk.save(small, tmp_path / str(x.device.type), plan)
        loaded = pk.load(tmp_path / str(x.device.type), model=build).to(x.device)
        assert torch.equal(loaded.eval()(x), small.eval()(x))
        return small

    expected, found, _ = on_both(work)
    assert same_weights(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masks", "weight clamps", "activation clamps", "activation masks", "sparsity"])
def test_hooks_do_not_wait_in_a_step(kind: str, device: Device) -> None:
    model, (x, y) = build().cuda(), (tensor.cuda() for tensor in data())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = pk.plan(model, x, macs=0.5)
    context: Any = {
        "masks": lambda: pk.masked(model, plan, optimizer),
        "weight clamps": lambda: pk.clamp_weight_grad(model, optimizer, {"*": 0.01}, by="norm"),
        "activation clamps": lambda: pk.clamp_activation_grad(model, {"*": 0.01}),
        "activation masks": lambda: pk.ActivationMasks(model, {"one.*": 0.1}),
        "sparsity": lambda: pk.masked(model, pk.prune(model, calibration=x, pattern="2:4").plan, optimizer),
    }[kind]()
    with context:
        trained(model, x, y, optimizer, device)
        assert trained(model, x, y, optimizer, device) == [0, 0, 0]


def test_a_pruner_looks_at_values_only_where_it_changes_a_plan(device: Device) -> None:
    model, (x, y) = build().cuda(), (tensor.cuda() for tensor in data())
    optimizer, waits = torch.optim.SGD(model.parameters(), lr=0.01), []
    pruner = pk.Pruner(model, optimizer, x, macs=0.5, steps=4)
    for _ in range(7):
        before = len(device.ours())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        pruner.step()
        waits.append(len(device.ours()) - before)
    assert sum(waits[:5]) > 0
    assert waits[5:] == [0, 0]
    assert next(pruner.finish()[0].parameters()).device == CUDA


def test_repair_fits_what_it_does_on_the_cpu() -> None:
    def work(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
        return pk.prune(model.eval(), calibration=x, macs=0.6, criterion="l2").model

    expected, found, _ = on_both(work)
    assert close_weights(expected, found)


@pytest.mark.slow
def test_single_weights_and_recalibrated_norms() -> None:
    def work(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
        small = pk.prune(model, calibration=x, sparsity=0.5).model
        pk.recalibrate_batchnorm(small, [x, x])
        return small

    expected, found, _ = on_both(work)
    assert close_weights(expected, found)


@pytest.mark.parametrize("name", ["image_classification", "segmentation", "token_classification", "causal_lm"])
def test_counting_right_answers_does_not_wait(name: str, device: Device) -> None:
    task = get_task(name)
    output = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))  # (B, tokens, classes)
    labels = torch.arange(20).reshape(4, 5) % 6
    if name == "image_classification":
        output, labels = output[:, 0], labels[:, 0]
    elif name == "segmentation":
        output, labels = output.movedim(-1, 1).unsqueeze(-1).repeat(1, 1, 1, 2), labels.unsqueeze(-1).repeat(1, 1, 2)
    expected = task.counts(output, labels)
    there = output.cuda(), labels.cuda()
    before = len(device.waits)
    found = task.counts(*there)
    checked = name in ("token_classification", "causal_lm")  # whether all labels are tokens: one number
    assert len(device.waits) == before + checked
    assert torch.equal(found.cpu(), expected)


def digits() -> Splits:
    return load_splits(DataSettings(source="digits", image_size=8, batch=128))


@pytest.mark.slow
def test_training_waits_once_a_step(device: Device) -> None:
    splits, place = digits(), torch.device("cuda")
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    settings = TrainSettings(epochs=2, clamp_weight_grad=ClampSettings(limit=1.0, by="norm"))
    history = fit(model, splits, settings, device=place, seed=0, batch=128, progress=False)
    assert len(history.rows) == 2
    steps = 2 * (len(splits.train) // 128)
    assert sum("training/nonfinite" in wait for wait in device.ours()) == steps
    every_batch = {wait for wait in device.ours() if device.ours().count(wait) >= steps}
    assert {wait.rpartition(" in ")[2] for wait in every_batch} <= {
        "finite_step",
        "BestWeights.keep",
        "is_finite",
    }
    scores = evaluate(model, [(torch.randn(4, 3, 8, 8), torch.arange(4))] * 3, "image_classification", place)
    assert scores.n_test == 12


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_found_before_its_step(device: Device) -> None:
    splits, model = digits(), nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.Linear(10, 10))
    with torch.no_grad():
        model[1].weight.fill_(1e38)
    before = weights(model)
    with pytest.raises(pk.PrunekitError, match=r"the loss is (nan|inf) in epoch 1, step 1; first not finite: .*1"):
        fit(model, splits, TrainSettings(epochs=1), device=torch.device("cuda"), seed=0, batch=128)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


def of_elimination(**budget: float) -> PruneSettings:
    return PruneSettings(budget=BudgetSettings(**budget), criterion="elimination", scope="per_mac")


def planned_macs(tmp_path: Path, device: str) -> int:
    settings = JobSettings(
        name="plan",
        model=ModelSettings("resnet8", zoo="cifar"),
        baseline=TrainSettings(epochs=0),
        calibration=CalibrationSettings(images=16),
        prune=of_elimination(macs=0.5),
        finetune=TrainSettings(epochs=0),
        device=device,
        threads=1,
        output=tmp_path,
    )
    return int(dry_run(settings, log=lambda line: None)["macs_after"])


@pytest.mark.slow
def test_a_job_plans_by_statistics_on_the_device_with_its_model_on_the_cpu(tmp_path: Path) -> None:
    expected = planned_macs(tmp_path, "cpu")
    with claimed_cuda():
        assert planned_macs(tmp_path, "cuda") == pytest.approx(expected, rel=0.02)


def test_samples_on_the_device_choose_how_layers_of_a_model_on_the_cpu_share() -> None:
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))

    model = nn.Sequential(nn.Linear(8, 8), *(block() for _ in range(3)), nn.Linear(8, 2)).eval()
    found = pk.collect(model, torch.randn(8, 8))
    scores, settings = elimination_scores(found), of_elimination(params=0.7)

    def chosen(samples: Tensor) -> tuple[float | None, Any]:
        check = share_check(model, samples, found.channel_map, found.patches, settings)
        assert check is not None
        plan = check.best(scores, found.channel_map, lambda some: make_plan(found.channel_map, some, settings))
        return check.share, plan.keep

    share, keep = chosen(found.samples)
    with claimed_cuda():
        again, there = chosen(found.samples.cuda())
    assert again == share
    np.testing.assert_array_equal(keep, there)


def elimination_scores(found: Any) -> Any:
    return score("elimination", found.model, found.channel_map, patches=found.patches)
