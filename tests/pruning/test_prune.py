"""One-shot pruning and repair beat plain pruning at the same budget, on a model that has learnt something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import randomized
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import prunekit
from prunekit.errors import DataError, PlanError, UsageError
from prunekit.measure.model_size import count_memory
from prunekit.planning.sensitivity_curves import cumulative_curves
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import BudgetSettings, PruneSettings


class Net(nn.Module):
    """A residual block between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv1, self.bn1 = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Conditioned(nn.Module):
    """Takes a number a sample beside the image: the time of a diffusion step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.time = Net(), nn.Linear(1, 3)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return self.net(x + self.time(step[:, None])[:, :, None, None])  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["tuple", "loader", "list"])
def test_a_second_input_of_one_number_a_sample(form: str) -> None:
    model, draw = randomized(Conditioned()).eval(), torch.Generator().manual_seed(0)
    images, steps = torch.randn(64, 3, 8, 8, generator=draw), torch.rand(64, generator=draw)
    if form == "tuple":
        pruned = prunekit.prune(model, (images[:4], steps[:4]), macs=0.5)
    else:
        batches = [((images[i : i + 16], steps[i : i + 16]), None) for i in range(0, 64, 16)]
        pruned = prunekit.prune(model, calibration=batches if form == "list" else iter(batches), macs=0.5)
        assert pruned.repair is not None
        assert pruned.repair.after < pruned.repair.before
    assert pruned.max_relative_difference <= 1e-9


def test_a_budget_is_met_with_less_damage_than_by_magnitude() -> None:
    model = randomized(Net()).eval()
    images = torch.randn(128, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    others = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    done = prunekit.prune(model, calibration=images, macs=0.6, repair=RepairSettings(rows=4096))
    plain = prunekit.prune(model, (images[:2],), macs=0.6, criterion="l2", scope="global")
    chart = done.plan.channel_map
    assert chart.macs(done.plan.keep) <= 0.6 * chart.macs()
    assert done.repair is not None
    assert done.repair.kept
    assert done.plan.provenance["prune"]["criterion"] == "elimination"
    assert done.max_relative_difference < 1e-9
    with torch.no_grad():
        want = model(others)
        ours, theirs = ((small.eval()(others) - want).square().mean() for small in (done.model, plain.model))
    assert ours < 0.25 * theirs
    assert set(cumulative_curves(chart, done.scores)) == {group.name for group in chart.groups}


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.randn(7, 3, 8, 8), r"expected at least 8 images .* got a tensor of shape \(7, 3, 8, 8\)"),
        (torch.zeros(0, 3, 8, 8), r"got a tensor of shape \(0, 3, 8, 8\)"),
        (torch.tensor(1.0), r"a data set, or batches, such as a DataLoader; got float32 \(\)"),
        ([torch.randn(4, 3, 8, 8), (torch.randn(3, 3, 8, 8), 1)], r"got a tensor of shape \(7, 3, 8, 8\)"),
        ([], r"got a tensor of shape \(0, 0\)"),
        ([{"image": 1}], r"batch 1: expected tensors by the names of the model's arguments, got dict {image: int}"),
        ([torch.zeros(8)], r"got a tensor of shape \(8,\)"),
        ([torch.zeros(4, 3, 8, 8), torch.zeros(4, 3, 9, 8)], r"images of one size, got batches of \(3, 8, 8\) and"),
        (7, "a data set, or batches, such as a DataLoader; got int"),
    ],
)
def test_images_that_are_too_few_or_none(images: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        prunekit.prune(Net().eval(), calibration=images, macs=0.5)
    assert isinstance(caught.value, UsageError)


def test_several_budgets_are_met_together() -> None:
    model = randomized(Net()).eval()
    done = prunekit.prune(model, (torch.zeros(1, 3, 8, 8),), macs=0.7, params=0.6, size_mb=0.006, scope="per_mac")
    tensors = [*done.model.parameters(), *done.model.buffers()]
    assert sum(p.numel() for p in done.model.parameters()) <= 0.6 * sum(p.numel() for p in model.parameters())
    assert 0.005 < sum(tensor.nbytes for tensor in tensors) / 1e6 <= 0.006
    assert done.plan.provenance["binding"] == "size_mb"


@pytest.mark.slow
def test_memory_is_that_of_the_model_that_is_returned() -> None:
    model, example = randomized(Net()).eval(), (torch.zeros(1, 3, 8, 8),)
    target = Target(batch=16, dtype="bf16")
    dense = count_memory(model, example, 16, "bf16") / 1e6
    done = prunekit.prune(model, example, memory_mb=0.5 * dense, params=0.9, scope="per_mac", target=target)
    taken = count_memory(done.model, example, 16, "bf16") / 1e6
    assert 0.45 * dense < taken <= 0.5 * dense
    assert done.plan.provenance["budgets"]["memory_mb"] == {"asked": 0.5 * dense, "left": taken, "dense": dense}
    with pytest.raises(PlanError, match=r"budget memory_mb: at most 1e-05 MB was asked for, but .* leave no less than"):
        prunekit.prune(model, example, memory_mb=1e-5, target=target)


def test_a_budget_out_of_reach_and_a_glob_of_nothing() -> None:
    model, images = randomized(Net()).eval(), torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(PlanError):
        prunekit.prune(model, calibration=images, macs=1e-6)
    with pytest.raises(PlanError, match="conv9"):
        prunekit.prune(model, calibration=images, macs=0.5, ignore=("conv9",))


def test_the_model_given_stays_as_it_is() -> None:
    model, images = randomized(Net()).train(), torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = prunekit.prune(model, calibration=images, macs=0.6, ignore=["stem"])
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert done.plan.widths()["stem"] == (8, 8)
    assert done.model.conv1.out_channels < 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("images", [False, True])
def test_models_of_any_precision(dtype: torch.dtype, images: bool) -> None:
    """Small weights are weights: in float16 half of these are below what it calls its smallest normal number."""
    model = randomized(Net()).to(dtype).eval()
    with torch.no_grad():
        model.conv1.weight.mul_(1e-4)  # type: ignore[union-attr, operator]
        model.bn1.running_var.mul_(1e-6)  # type: ignore[union-attr, operator]
    data = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    done = prunekit.prune(model, None if images else data, calibration=data if images else None, macs=0.6)
    assert done.max_relative_difference <= 1e-9
    assert {parameter.dtype for parameter in done.model.parameters()} == {dtype}
    assert not any("set to 0" in note for note in done.notes)


def test_a_bias_of_subnormal_numbers_alone_is_proven_before_it_goes() -> None:
    model = randomized(Net()).eval()
    with torch.no_grad():
        model.bn1.bias.fill_(1e-41)  # type: ignore[union-attr, operator]
    images = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    done = prunekit.prune(model, calibration=images, macs=0.6)
    assert done.max_relative_difference <= 1e-9
    assert any(note.endswith("in 1 tensors set to 0; outputs change by 0.0e+00") for note in done.notes)


def test_subnormal_weights_of_the_compact_model_are_set_to_zero_and_said() -> None:
    model = randomized(Net()).eval()
    with torch.no_grad():
        model.head.weight[2] = 1e-40  # 8 inputs, of which as many are left as `stem` has
    done = prunekit.prune(model, (torch.zeros(1, 3, 8, 8),), macs=0.6)
    left = done.plan.widths()["stem"][0]
    assert done.model.head.weight[2].tolist() == [0.0] * left
    assert done.notes == (f"{left} subnormal numbers in 1 tensors set to 0; outputs change by {0:.1e}",)
    assert model.head.weight[2, 0] > 0


def test_dead_channels_are_said_and_go_first() -> None:
    model, images = randomized(Net()).eval(), torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.bn1.weight[3], model.bn1.bias[3] = 0.0, -1.0
        read = F.relu(model.bn1(model.conv1(F.relu(model.bn(model.stem(images))))))
    dead = (read == 0).all(3).all(2).all(0)
    done = prunekit.prune(model, calibration=images, macs=0.8, ignore=["stem"])
    assert dead[3]
    assert done.notes == (
        "channels that are zero on all calibration images, so that they are removed first and cost nothing: "
        f"{int(dead.sum())} of 16 that conv2 reads",
    )
    assert not done.plan.mask("conv1.weight")[dead].any()


def test_layers_that_the_repair_cannot_fit_are_said() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 16, 3), nn.ReLU(), nn.ConvTranspose1d(16, 12, 3), nn.ReLU(), nn.Conv1d(12, 4, 3))
    pruned = prunekit.prune(model, calibration=torch.randn(32, 3, 12), channels=0.6, criterion="l2")
    assert "repair: 2 not refitted: read by conv_transpose1d, not by a convolution or linear layer" in pruned.notes


def test_a_loader_is_the_same_as_its_images() -> None:
    model, images = randomized(Net()).eval(), torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(images, torch.zeros(48)), batch_size=10)
    one, other = (prunekit.prune(model, calibration=data, macs=0.6, images=40) for data in (images[:40], loader))
    assert (one.plan.keep == other.plan.keep).all()
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


@pytest.mark.parametrize("criterion", ["l2", "wanda", "random"])
def test_images_serve_every_criterion_that_needs_no_labels(criterion: Any) -> None:
    model, images = randomized(Net()).eval(), torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = prunekit.prune(model, calibration=images, macs=0.6, criterion=criterion, repair=False)
    done = prunekit.prune(model, calibration=images, macs=0.6, criterion=criterion)
    assert plain.repair is None
    assert plain.masked is None
    assert done.repair is not None
    assert done.repair.after < done.repair.before
    assert (plain.plan.keep == done.plan.keep).all()
    assert done.max_relative_difference < 1e-9


def test_what_only_labels_give_and_repair_without_images_are_refused() -> None:
    model, images = randomized(Net()).eval(), torch.randn(16, 3, 8, 8)
    with pytest.raises(UsageError, match="'taylor' needs gradients of the loss on labeled calibration images"):
        prunekit.prune(model, calibration=images, macs=0.6, criterion="taylor")
    with pytest.raises(UsageError, match="'elimination' needs Gram matrices of the patches"):
        prunekit.prune(model, (images,), macs=0.6, criterion="elimination")
    with pytest.raises(DataError, match=r"repair: expected samples to repair from, got none: .*calibration=images"):
        prunekit.prune(model, images, macs=0.6, repair=RepairSettings())


def test_what_is_traced_and_what_is_calibrated_on_are_told_apart_by_name_alone() -> None:
    model, images = randomized(Net()).eval(), torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    alone = prunekit.prune(model, images, macs=0.6)
    assert alone.repair is None
    assert alone.plan.provenance["prune"]["criterion"] == "l2"
    both = prunekit.prune(model, images[:1], calibration=images, macs=0.6)
    assert both.repair is not None
    assert both.plan.digest == prunekit.prune(model, calibration=images, macs=0.6).plan.digest
    loader = DataLoader(TensorDataset(images), batch_size=8)
    for call in (prunekit.prune, prunekit.plan):
        with pytest.raises(UsageError, match=r"prune\(model, x, macs=0\.5\), .*calibration=loader.*; got neither"):
            call(model, macs=0.6)
        with pytest.raises(UsageError, match=r"expected an example: .* got DataLoader; .*calibration=data"):
            call(model, loader, macs=0.6)


def plan_of(*given: Any, **named: Any) -> str:
    return prunekit.plan(*given, **named).digest


def pruned_of(*given: Any, **named: Any) -> str:
    return prunekit.prune(*given, **named, repair=False).plan.digest


def test_a_plan_is_that_of_the_same_words_to_prune() -> None:
    model, images = randomized(Net()).eval(), torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for how in ({"calibration": images}, {"calibration": images, "criterion": "wanda", "scope": "global"}):
        assert plan_of(model, macs=0.6, **how) == pruned_of(model, macs=0.6, **how)
    assert plan_of(model, images, macs=0.6) == pruned_of(model, images, macs=0.6)
    settings = PruneSettings(BudgetSettings(macs=0.6), round_to=4)
    assert plan_of(model, images, settings=settings) == plan_of(model, images, macs=0.6, round_to=4)
    with pytest.raises(UsageError, match=r"settings: expected no macs, round_to beside them"):
        prunekit.plan(model, images, settings=settings, macs=0.6, round_to=8)
    with pytest.raises(UsageError, match=r"mac: there is no such argument and no such budget; did you mean 'macs'"):
        prunekit.plan(model, images, mac=0.6)
    with pytest.raises(UsageError, match=r"budget: expected at least one of channels, macs, .* got none"):
        prunekit.plan(model, images)


def test_what_stays_is_given_as_globs_modules_or_classes() -> None:
    model, images = randomized(Net()).eval(), torch.randn(2, 3, 8, 8)
    for ignore in ("conv1", ["conv1"], model.conv1, [model.conv1, nn.Embedding], ("conv1", nn.BatchNorm3d)):
        widths = prunekit.plan(model, images, channels=0.6, ignore=ignore).widths()  # type: ignore[arg-type]
        assert widths["conv1"] == (16, 16), ignore
        assert widths["stem"][0] < widths["stem"][1]
    with pytest.raises(PlanError, match="all are locked or excluded"):
        prunekit.plan(model, images, channels=0.6, ignore=model)  # all that is in it
    half = prunekit.plan(model, images, channels=0.9, ratios={model.conv1: 0.5}).widths()
    assert half["conv1"] == (8, 16)
    for wrong, said in (
        (
            nn.Linear(2, 2),
            "ignore: expected modules of the Net that is pruned, got a Linear that is none of its",
        ),
        ([3], "ignore: expected globs over module paths, .* or classes of modules; got int 3"),
        (int, "got the class int"),
    ):
        with pytest.raises(UsageError, match=said):
            prunekit.plan(model, images, channels=0.6, ignore=wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"ignore: 'conv9\*' matches no module path; did you mean"):
        prunekit.plan(model, images, channels=0.6, ignore="conv9*")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pruning_ratio": 0.5}, "pruning_ratio: there is no such argument .*: channels=0.5, macs=0.5"),
        ({"example_inputs": torch.zeros(1)}, "example_inputs: .* give the example as the second argument"),
        ({"ignored_layers": []}, r"ignored_layers: .* give ignore=\["),
        ({"importance": "l2"}, "importance: .* give criterion='l2'"),
        ({"rount_to": 8}, "rount_to: .* did you mean 'round_to'"),
        (
            {"criterion": "elimination"},
            r"needs Gram matrices of the patches .*; prunekit.plan .* from calibration=loader",
        ),
        ({"settings": {"macs": 0.5}}, r"settings: expected prunekit.PruneSettings, such as .*; got dict"),
        ({"stats": "statistics"}, r"stats: expected channel statistics, from prunekit.calibrate\(.*; got str"),
        ({"gradients": []}, r"gradients: expected .* prunekit.collect_gradients\(.*; got list"),
        ({"more_examples": 3}, r"more_examples: expected a list of examples, such as \[x, y\]; got int"),
    ],
)
def test_an_argument_of_another_library_or_type_says_what_to_give(given: dict[str, Any], message: str) -> None:
    budget = {} if "settings" in given else {"macs": 0.5}
    for function in (prunekit.plan, prunekit.prune):
        with pytest.raises(UsageError, match=message):
            function(Net(), torch.zeros(1, 3, 8, 8), **budget, **given)  # type: ignore[operator]


def test_a_repair_that_is_no_settings_is_refused() -> None:
    repair: Any = "yes"
    with pytest.raises(UsageError, match=r"repair: expected prunekit.RepairSettings\(\), or False for none; got str"):
        prunekit.prune(Net(), calibration=torch.zeros(8, 3, 8, 8), macs=0.5, repair=repair)


def deviation(x: Tensor) -> float:
    return float(x.shape[1] ** 0.5)


class Averaged(nn.Module):
    """Divides by a width that a function reads as a number, which a trace does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(torch.relu(self.second(x / deviation(x)))) / 2  # type: ignore[no-any-return]


SAMPLES = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("size_mb", "noted"), [(0.0012, True), (0.05, False)])
def test_an_amount_that_leaves_next_to_nothing_is_noted(size_mb: float, noted: bool) -> None:
    """As where megabytes were meant to be another unit."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 16, 2))
    notes = prunekit.prune(model, torch.zeros(1, 3, 8, 8), size_mb=size_mb).notes
    assert (
        any(note.startswith("size_mb=0.0012 is 0.") and "MB: next to nothing stays" in note for note in notes) == noted
    )


@pytest.mark.parametrize("given", [{"example": torch.zeros(2, 8)}, {"calibration": SAMPLES}])
def test_notes_say_what_stays_because_of_the_trial(given: dict[str, Any]) -> None:
    model = randomized(Averaged()).eval()
    result = prunekit.prune(model, **given, macs=0.7)
    assert result.model.first.out_features == 16
    (said,) = [note for note in result.notes if "than the trace locks" in note]
    assert said.startswith("more channels stay than the trace locks: (aten.div): the trial found a difference")
    assert not prunekit.prune(randomized(Net()).eval(), torch.zeros(1, 3, 8, 8), macs=0.7).notes


class Factors(nn.Module):
    """A recommender: factors of users and items, and no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 16), nn.Embedding(7, 16)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(1)


def test_models_without_macs_have_other_budgets() -> None:
    model, inputs = Factors(), (torch.arange(8), torch.arange(7).repeat(2)[:8])
    with pytest.raises(PlanError, match=r"the model has no macs.*params=0.5"):
        prunekit.prune(model, inputs, macs=0.5)
    assert prunekit.prune(model, inputs, params=0.5).model.users.weight.shape == (9, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with prunekit.Pruner(model, optimizer, inputs, params=0.5, schedule="oneshot") as pruner:
        model(*inputs).square().mean().backward()
        optimizer.step()
        pruner.step()
        small, _ = pruner.finish()
    assert small.users.weight.shape == (9, 8)


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_masks_of_single_weights_fit_the_dense_model(method: Any) -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model, x = nn.Sequential(*layers, nn.Linear(16, 4)).eval(), torch.randn(40, 16)
    pattern = prunekit.PatternSettings("2:4", method=method)
    result = prunekit.prune(model, calibration=x, pattern=pattern, repair=False)
    assert result.plan.element_masks
    with torch.no_grad(), prunekit.masked(model, result.plan):
        torch.testing.assert_close(result.model(x), model(x))
