"""What a training step costs with prunekit in it: resnet34 masked, hooked, averaged, distilled, regularized, and plain.

Each row is a step of training with something in it beside the same step of the same model without, the two timed
alternately in one run. `ratio` is the median over rounds of the one over the other; `low` and `high` are the 10th and
90th percentile. `masked` is what fine-tuning runs under: weight masks and gradient masks. `torch/prune` are the same
zeros by torch.nn.utils.prune. `compiled` is the plain step through torch.compile, beside eager; `compiled/masked` the
masked one, beside the plain one compiled too. Weights are random, and pruned ones zero in both models.

`grown_bytes`: by how much the live tensors of the process are more after the timed steps than before; it must be 0.

    python benchmarks/training.py [--json] [--only PREFIX] [--rounds N] [--threads N] [--batch N] [--size PX]
                                  [--dtype fp32|bf16] [--device cpu|cuda] [--cpu-time] [--keep]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from common import keep, ratio, shown_as_made
from mask_cases import random_plan, torch_prune
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torchvision import models

from prunekit.backends.session import Timer
from prunekit.data.datasets import ImageTransform, TensorImages
from prunekit.data.splits import Splits
from prunekit.known_names import DtypeName
from prunekit.masks.gradient_clamps import clamp_activation_grad, clamp_weight_grad
from prunekit.masks.masked_model import masked
from prunekit.masks.weight_masks import WeightMasks
from prunekit.measure.latency.timing import alternate, warm_up
from prunekit.planning.plan import Plan
from prunekit.settings.train import (
    AverageSettings,
    DistillSettings,
    FeatureSettings,
    RegularizerSettings,
    TrainSettings,
)
from prunekit.training.callbacks.callback import Callback, CallbackList, ContextCallback, TrainingRun
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.execution import CompiledForward, autocast

STEPS = 1_000_000
"""Length that schedules of parts are laid out for; growing regularization is at 1e-5 of it and does all its work."""
OFTEN = 0.01


@dataclass(frozen=True)
class Setting:
    """What is the same for all rows."""

    batch: int
    size: int
    precision: DtypeName
    device: torch.device
    rounds: int
    cpu_time: bool


@dataclass(frozen=True)
class Case:
    """What a step has beside the plain one: parts for a student, whose teacher is another model of its kind."""

    name: str
    parts: Callable[[nn.Module], list[Callback]] = lambda model: []
    own_parameters: bool = False  # whether it puts others in the place of the model's
    compiled: tuple[bool, bool] = (False, False)  # the plain step, and the one with something in it


def cases(plan: Plan, setting: Setting) -> Iterator[Case]:
    """What is timed."""

    def around(enter: Callable[[TrainingRun], AbstractContextManager[Any]]) -> list[Callback]:
        return [ContextCallback(enter)]

    def asked(settings: TrainSettings) -> Callable[[nn.Module], list[Callback]]:
        def made(model: nn.Module) -> list[Callback]:
            teacher = None if settings.distill is None else models.resnet34()
            return build_callbacks(settings, CallbackInputs(_splits(), 2, teacher, plan.channel_map, plan))

        return made

    def clamps(training: TrainingRun) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(clamp_activation_grad(training.model, OFTEN))
        stack.enter_context(clamp_weight_grad(training.model, training.optimizer, OFTEN))
        return stack

    in_force = ContextCallback(lambda run: masked(run.model, plan, run.optimizer))
    average, lasso = TrainSettings(average=AverageSettings()), RegularizerSettings("group_lasso", 1e-6)
    logits, features = DistillSettings(), DistillSettings(features=FeatureSettings(("layer[1-4]",)))
    yield Case("plain")  # how far two like steps are apart
    yield Case("masked", lambda model: [in_force])
    yield Case("masks/weights", lambda model: around(lambda run: WeightMasks(run.model, plan, run.optimizer)))
    yield Case("compiled", compiled=(False, True))
    yield Case("compiled/masked", lambda model: [in_force], compiled=(True, True))
    yield Case("masked+clamps", lambda model: [in_force, ContextCallback(clamps)])
    yield Case("torch/prune", own_parameters=True)
    yield Case("average/ema", asked(average))
    yield Case(
        "masked+ema",
        lambda model: [in_force, *build_callbacks(average, CallbackInputs(_splits(), 2, masks=lambda: plan))],
    )
    yield Case("regularize/group_lasso", asked(TrainSettings(regularize=lasso)))
    yield Case("regularize/bn_l1", asked(TrainSettings(regularize=RegularizerSettings("bn_l1", 1e-6))))
    yield Case("regularize/growing", asked(TrainSettings(regularize=RegularizerSettings("growing", 1e-6))))
    yield Case("distill/logits", asked(TrainSettings(distill=logits)))
    yield Case("distill/features", asked(TrainSettings(distill=features)))


def _splits() -> Splits:
    """Images that no row looks at; an average is given some in case it takes statistics anew."""
    images = TensorImages(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4).long(), ImageTransform(8))
    return Splits(images, images, images, ("a",), (3, 8, 8), "none")


def row(case: Case, plan: Plan, setting: Setting) -> dict[str, Any]:
    """Times a case, and looks at its memory."""
    torch.manual_seed(0)
    shape = setting.batch, 3, setting.size, setting.size
    images, labels = torch.randn(shape), torch.randint(0, 1000, (setting.batch,))
    images, labels = images.to(setting.device), labels.to(setting.device)
    plain, student = (_model(plan, setting.device) for _ in range(2))
    if case.own_parameters:
        torch_prune(student, plan)
    with ExitStack() as stack:
        steps = [
            stack.enter_context(_step(model, parts, images, labels, setting, compiled))
            for model, parts, compiled in zip((plain, student), ([], case.parts(student)), case.compiled, strict=True)
        ]
        runs = [_cpu_time(step) if setting.cpu_time else Timer(step, setting.device) for step in steps]
        for run in runs:
            warm_up(run)
        before = _live_bytes()
        times = alternate(runs, setting.rounds)  # (2, rounds)
        grown = _live_bytes() - before
    return {
        "name": f"{case.name}/resnet34",
        **ratio(times[1].tolist(), times[0].tolist()),
        "grown_bytes": grown,
        "device": str(setting.device),
        "threads": torch.get_num_threads(),
        "batch": setting.batch,
        "size": setting.size,
        "dtype": setting.precision,
        "rounds": times.shape[1],
        "clock": "processor" if setting.cpu_time else "wall",
    }


def _model(plan: Plan, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = models.resnet34().train()
    with WeightMasks(model, plan):
        return model.to(device)


@contextmanager
def _step(
    model: nn.Module, parts: list[Callback], images: Tensor, labels: Tensor, setting: Setting, compiled: bool
) -> Iterator[Callable[[], None]]:
    """One step as the training loop makes it, but for what is the same with and without parts."""
    optimizer = SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
    taking, done = CallbackList(parts), 0
    called = CompiledForward(model) if compiled else model

    def step() -> None:
        nonlocal done
        done += 1
        with autocast(setting.precision, setting.device):
            output = called(images)
            loss = taking.total_loss(F.cross_entropy(output, labels), images, output, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for part in parts:
            part.before_step(done)
        optimizer.step()
        for part in parts:
            part.after_step(done, True)
        optimizer.zero_grad()

    with taking.active(TrainingRun(model, optimizer, setting.device, STEPS, 1)):
        yield step
        if isinstance(called, CompiledForward) and called.compilation.fallback is not None:
            raise RuntimeError(called.compilation)


def _cpu_time(step: Callable[[], None]) -> Callable[[], float]:
    """Milliseconds of processor time: what waiting for other processes takes does not count."""

    def run() -> float:
        start = time.process_time_ns()
        step()
        return (time.process_time_ns() - start) / 1e6

    return run


def _live_bytes() -> int:
    """Bytes of all tensors but those on meta, which have none and one address; on CUDA, of allocated memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())
    found = (one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter))  # torch.compile's are fake
    tensors = [tensor for tensor in found if not tensor.is_meta]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def main() -> None:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--only", default="", metavar="PREFIX", help="cases whose names begin so")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, metavar="PX")
    parser.add_argument("--dtype", choices=get_args(DtypeName)[:2], default="fp32")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--cpu-time", action="store_true", help="processor time, on a machine that is not idle")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/training.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    setting = Setting(options.batch, options.size, options.dtype, options.device, options.rounds, options.cpu_time)
    torch.manual_seed(0)
    plan = random_plan(models.resnet34())
    chosen = (case for case in cases(plan, setting) if case.name.startswith(options.only))
    rows = shown_as_made((row(case, plan, setting) for case in chosen), options, parser, "case")
    if options.keep:
        what = {"ratio": "median; low and high: 10th and 90th percentile", "grown_bytes": "over the rounds"}
        print(keep("training", rows, what), file=sys.stderr)


if __name__ == "__main__":
    main()
