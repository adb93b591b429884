"""Methods that prune without training: ours from calibration images, and torch-pruning's importances.

Widths may be any number, as they may in torch-pruning: what is compared is accuracy at equal multiply-accumulates.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit
from prunekit.errors import PlanError
from prunekit.measure.model_size import count_macs

BATCH = 128
STREAM = ("conv1",)
"""What makes the residual stream: excluded, only channels inside the blocks go."""
PEERS = {
    "tp-l2": ("MagnitudeImportance", {"p": 2}),
    "tp-bn": ("BNScaleImportance", {}),
    "tp-fpgm": ("FPGMImportance", {}),
    "tp-lamp": ("LAMPImportance", {}),
    "tp-taylor": ("TaylorImportance", {}),
    "tp-hessian": ("HessianImportance", {}),
}
"""Importances of torch-pruning (https://github.com/VainF/Torch-Pruning), each ranked over the whole model."""
SAMPLES = 128
"""Images whose gradients are squared one by one."""
HALVINGS = 12
"""Of the interval in which the smallest ratio of channels that meets the budget is searched."""


@dataclass(frozen=True, eq=False)
class Case:
    """What every method is given.

    Attributes:
        dense: in eval mode; not changed.
        build: how its structure is built.
        images: (N, 3, H, W) calibration images.
        labels: (N,) their classes: for torch-pruning's Taylor and Hessian importances, which are of a labeled loss,
            and for no other method.
        share: of the dense model's MACs that may be left.
    """

    dense: nn.Module
    build: prunekit.ModelSettings
    images: Tensor
    labels: Tensor
    share: float

    @property
    def example(self) -> tuple[Tensor]:
        """The inputs that models are traced with."""
        return (self.images[:2],)


@dataclass(frozen=True, eq=False)
class Result:
    """A pruned model; the plan is None where another tool made it, which has no folder to load it from."""

    model: nn.Module
    plan: prunekit.Plan | None = None

    def loaded(self, case: Case) -> nn.Module:
        """The model as it comes back from its folder."""
        if self.plan is None:
            return self.model
        with tempfile.TemporaryDirectory() as folder:
            prunekit.save(self.model, Path(folder) / "model", self.plan, build=case.build)
            return prunekit.load(Path(folder) / "model")


Method = Callable[[Case], Result]


def methods() -> dict[str, Method]:
    """All methods by name, torch-pruning's where it is installed."""
    ours: dict[str, Method] = {
        "oneshot": partial(oneshot, ignore=STREAM),
        "oneshot-stream": oneshot,
        "oneshot-uniform": uniform,
        "l2-repaired": repaired,
    }
    plain: dict[str, Method] = {"l2": magnitude}
    if find_spec("torch_pruning"):
        plain |= {name: partial(torch_pruning, name=name) for name in PEERS}
    both = {
        key: value
        for name, method in plain.items()
        for key, value in ((name, method), (f"{name}-recalibrated", partial(recalibrated, method=method)))
    }
    return {**ours, **both}


def peer_names() -> list[str]:
    """The methods that need torch-pruning."""
    return [name + suffix for name in PEERS for suffix in ("", "-recalibrated")]


def oneshot(case: Case, ignore: Iterable[str] = ()) -> Result:
    """Order and budget by what each layer reads, then repair."""
    done = prunekit.prune(case.dense, calibration=case.images, macs=case.share, ignore=tuple(ignore), round_to=1)
    return Result(done.model, done.plan)


def magnitude(case: Case) -> Result:
    """The filters of least L2 norm go, ranked over the whole model (Li et al. 2017)."""
    settings = {"macs": case.share, "criterion": "l2", "scope": "global", "ignore": STREAM, "round_to": 1}
    done = prunekit.prune(case.dense, case.example, **settings)
    return Result(done.model, done.plan)


def repaired(case: Case) -> Result:
    """The channels of `magnitude`, and what stays repaired: what a plain global ranking is worth with our repair."""
    done = prunekit.prune(
        case.dense, calibration=case.images, macs=case.share, criterion="l2", scope="global", ignore=STREAM, round_to=1
    )
    return Result(done.model, done.plan)


def uniform(case: Case) -> Result:
    """Our order and our repair, with the same share of every group: what the allocation is worth."""
    settings = {"macs": case.share, "criterion": "elimination", "scope": "uniform", "ignore": STREAM, "round_to": 1}
    done = prunekit.prune(case.dense, calibration=case.images, **settings)
    return Result(done.model, done.plan)


def recalibrated(case: Case, method: Method) -> Result:
    """A method, and BatchNorm statistics taken anew on the calibration images."""
    result = method(case)
    model = deepcopy(result.model)
    batches = [(images, torch.zeros(len(images))) for images in case.images.split(BATCH)]  # the labels are not used
    prunekit.recalibrate_batchnorm(model, batches)
    return replace(result, model=model)


def torch_pruning(case: Case, name: str) -> Result:
    """One of torch-pruning's importances, at the smallest ratio of channels found that meets the budget.

    Raises:
        PlanError: no ratio meets it.
    """
    limit, gradients = case.share * count_macs(case.dense, case.example), _GRADIENTS.get(name, _none)(case)
    best, low, high = None, 0.0, 1.0
    for _ in range(HALVINGS):
        ratio = (low + high) / 2
        model = cut(case, name, ratio, gradients)
        if count_macs(model, case.example) <= limit:
            best, high = model, ratio
        else:
            low = ratio
    if best is None:
        raise PlanError(f"{name}: no ratio of channels leaves {case.share:.1%} of the MACs")
    return Result(best)


def _none(case: Case) -> dict[str, Tensor]:
    return {}


def _gradients(case: Case) -> dict[str, Tensor]:
    """Gradients of the mean cross-entropy over all images."""
    model = deepcopy(case.dense)
    for images, labels in zip(case.images.split(BATCH), case.labels.split(BATCH), strict=True):
        (F.cross_entropy(model(images), labels, reduction="sum") / len(case.images)).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def _squared_gradients(case: Case) -> dict[str, Tensor]:
    """Mean over samples of the squared gradient of each: torch-pruning's own `accumulate_grad` keeps only the last."""
    model, total = deepcopy(case.dense), dict[str, Tensor]()
    for image, label in zip(case.images[:SAMPLES].split(1), case.labels[:SAMPLES].split(1), strict=True):
        model.zero_grad()
        F.cross_entropy(model(image), label).backward()
        for name, value in model.named_parameters():
            assert value.grad is not None
            total[name] = total.get(name, 0) + value.grad.square() / min(SAMPLES, len(case.images))
    return total


_GRADIENTS = {"tp-taylor": _gradients, "tp-hessian": _squared_gradients}


def cut(case: Case, name: str, ratio: float, gradients: dict[str, Tensor]) -> nn.Module:
    """What torch-pruning leaves of a model at a ratio of channels, the residual stream whole."""
    import torch_pruning as peer

    model = deepcopy(case.dense)
    for path, value in model.named_parameters():
        value.grad = gradients[path].clone() if gradients else None
    kind, arguments = PEERS[name]
    stream = [module for path, module in model.named_modules() if path in STREAM or path.endswith("conv2")]
    classes = [module for module in model.modules() if isinstance(module, nn.Linear)]
    pruner = peer.pruner.BasePruner(
        model,
        case.example,
        importance=getattr(peer.importance, kind)(**arguments),
        global_pruning=True,
        pruning_ratio=ratio,
        ignored_layers=[*stream, *classes],
    )
    pruner.step()
    return model
