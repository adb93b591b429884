"""What is measured on the way, what is refused, and what is said where something cannot be looked at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.errors import DataError, ModelError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.inspection.diagnosis.data_checks import Pool
from prunekit.inspection.diagnosis.diagnose_model import diagnose
from prunekit.inspection.diagnosis.findings import CHECKS, StepSize, check
from prunekit.inspection.diagnosis.gradient_checks import TRIAL, largest_eigenvalue, recovers, try_steps


class Functions(nn.Module):
    """Nonlinearities that are no modules, on tokens (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = torch.tanh(self.second(x) * 1e4)
        return self.third(x.mean(1))  # type: ignore[no-any-return]


def tokens(count: int = 32) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(count, 5, 4, generator=draw), torch.arange(count) % 3)]


@pytest.mark.parametrize("eigenvalues", [(9.0, 1.0, -3.0), (2.0, 1.0, -50.0)])
def test_sharpness_is_the_largest_eigenvalue(eigenvalues: tuple[float, ...]) -> None:
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))[0].double()
    hessian = rotation @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ rotation.T
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        return 0.5 * weight @ hessian @ weight

    found = largest_eigenvalue(loss, [weight], enough=1e9)
    assert found is not None
    assert 0.5 * eigenvalues[0] < found <= eigenvalues[0] + 1e-6


@pytest.mark.parametrize(("share", "grows"), [(0.9, False), (1.1, True)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_quadratic_diverges_just_beyond_the_stable_rate(share: float, grows: bool, momentum: float) -> None:
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    step = StepSize(share * 2 * (1 + momentum) / 10, momentum)
    losses = try_steps(lambda: 5 * weight.square().sum(), [weight], step)
    assert recovers(losses) != grows
    assert (len(losses) == TRIAL) == grows


def test_functions_are_seen_as_modules_are() -> None:
    torch.manual_seed(0)
    model = Functions()
    with torch.no_grad():
        model.first.bias[:6] = -100
    found = diagnose(model, tokens())
    assert [(each.kind, each.evidence.get("dead")) for each in found.findings] == [
        ("dead_relu", 6),
    ]
    assert [each.kind for each in found.findings[0].consequences] == ["saturated_sigmoid"]
    assert found.skipped == {"learning_rate": "no learning rate is known: give the optimizer, SGD, Adam or AdamW"}
    assert count_hooks(model) == 0


def test_without_labels_gradients_are_not_looked_at() -> None:
    found = diagnose(nn.Linear(4, 3), [torch.randn(16, 4)])
    assert found.healthy
    assert set(found.skipped) == {"vanishing_gradient", "exploding_gradient", "unused_parameter", "learning_rate"}
    assert found.skipped["unused_parameter"] == "the batches have no targets, which the loss needs"


def test_a_loss_of_ones_own_and_outputs_of_any_kind() -> None:
    class Box(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"box": self.head(self.body(x)).detach() * 0 + self.head.bias}

    batch = [(torch.randn(16, 4), torch.randn(16, 2))]
    without = diagnose(Box(), batch)
    assert "or give the loss" in without.skipped["unused_parameter"]
    found = diagnose(Box(), batch, loss=lambda output, target: F.mse_loss(output["box"], target))
    (unused,) = (each for each in found.findings if each.kind == "unused_parameter")
    assert unused.evidence["parameters"] == ["body.weight", "body.bias", "head.weight"]
    assert "does not reach the loss" in unused.came


def test_what_raises_is_named_with_its_line() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.missing  # type: ignore[no-any-return]

    (found,) = diagnose(Raises(), [(torch.randn(8, 4), torch.arange(8) % 3)]).findings
    assert (found.kind, found.module) == ("run_error", "")
    assert "return self.inner(x) + self.missing" in found.came
    assert "has no attribute 'missing'" in found.came
    (scores,) = diagnose(nn.Flatten(0), [(torch.randn(8, 4), torch.arange(8) % 3)], loss=F.cross_entropy).findings
    assert scores.kind == "shape_mismatch"
    assert "in the loss" in scores.came


def test_adam_that_would_replace_the_weights() -> None:
    model = Functions()
    kinds = [
        each.kind for each in diagnose(model, tokens(), optimizer=torch.optim.Adam(model.parameters(), 5)).findings
    ]
    assert "learning_rate" in kinds


def test_the_curvature_needs_weights_with_enough_digits() -> None:
    model, batch = nn.Linear(4, 3).bfloat16(), [(torch.randn(16, 4).bfloat16(), torch.arange(16) % 3)]
    found = diagnose(model, batch, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert found.healthy
    assert list(found.skipped) == ["learning_rate"]
    assert "diagnose the model in float32" in found.skipped["learning_rate"]


def test_held_out_images_that_are_trained_on() -> None:
    batch = tokens(64)
    (leak,) = diagnose(
        nn.Sequential(nn.Flatten(), nn.Linear(20, 3)), batch, pool=Pool(held_out=batch, total=64)
    ).findings
    assert (leak.kind, leak.evidence["leaked"]) == ("duplicated_data", 64)


def test_frozen_norms_and_ignored_kinds() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[2].eval().requires_grad_(False)
    assert [each.kind for each in diagnose(model, tokens()).findings] == ["frozen_parameter"]
    assert diagnose(model, tokens(), ignore=["frozen_parameter"]).healthy


def test_checks_are_registered_once() -> None:
    with pytest.raises(ValueError, match="there is a check 'dead_relu' already"):
        check("dead_relu", "forward")(lambda seen: ())


@pytest.mark.parametrize(
    ("batches", "error", "says"),
    [
        ([], DataError, "expected at least one batch with an input in it"),
        (
            [({"image": 1}, 2)],
            DataError,
            r"batches, batch 1: expected tensors by the names of the model's arguments, got dict {image: int}",
        ),
        ([*tokens(), torch.zeros(4, 4)], DataError, "targets with every batch or with none, got some of each"),
        ([(torch.zeros(4, 4), torch.zeros(3))], DataError, r"as many labels as inputs, got \w+ \(3,\) for \(4, 4\)"),
    ],
)
def test_bad_batches_are_refused(batches: list[object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        diagnose(nn.Linear(4, 3), batches)


def test_unknown_kinds_and_compiled_models_are_refused() -> None:
    with pytest.raises(UsageError, match="no check 'dead_relus'; did you mean 'dead_relu'"):
        diagnose(nn.Linear(4, 3), tokens(), ignore=["dead_relus"])
    model = nn.Linear(4, 3)
    model._compiled_call_impl = model.forward  # what `model.compile()` sets, without its seconds of imports
    with pytest.raises(ModelError, match="is compiled"):
        diagnose(model, tokens())
    assert len(CHECKS) == 16
