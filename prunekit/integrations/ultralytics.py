"""Pruning of ultralytics' models: YOLO of all versions and tasks, RT-DETR, YOLO-World and YOLOE.

`prune_yolo` returns an object of the same class around the pruned model, with `train`, `val`, `predict`, `save` and
`export`. `load_yolo` loads such a model from a file to train it on. `PruneWhileTraining` prunes during a training of
ultralytics' own. Needs `pip install 'prunekit[ultralytics]'`; nothing else in prunekit imports ultralytics.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from prunekit.errors import ArtifactError, PlanError, UsageError
from prunekit.modes.public_call import public_call
from prunekit.utils.availability import require_library

require_library("ultralytics", "ultralytics")

from ultralytics import RTDETR, YOLO  # noqa: E402  # after the check, whose message says what to install
from ultralytics.engine.model import Model  # noqa: E402
from ultralytics.utils.nms import non_max_suppression  # noqa: E402

from prunekit.backends.session import Timer  # noqa: E402
from prunekit.integrations.yolo.calibration_images import calibration_images  # noqa: E402
from prunekit.integrations.yolo.prune_while_training import (  # noqa: E402
    PruneWhileTraining as PruneWhileTraining,  # public here
)
from prunekit.integrations.yolo.pruned_trainer import keep_structure  # noqa: E402
from prunekit.integrations.yolo.pruned_yolo import (  # noqa: E402
    PrunedYOLO,
    channels_of,
    configuration,
    forget_image_size,
    is_marked,
    left_by,
    marked,
    predictions,
    settings_of,
    training_examples,
)
from prunekit.jobs.analyses.bench import bench  # noqa: E402
from prunekit.planning.keywords import PruneKeywords, shows_keywords  # noqa: E402
from prunekit.pruning.prune import prune  # noqa: E402
from prunekit.settings.deployment import Target  # noqa: E402
from prunekit.tasks.task import Task  # noqa: E402
from prunekit.utils.context import device_of, threads, training_mode  # noqa: E402

keep_structure()

IMAGES = 128
"""Images for calibration; each has thousands of positions that a layer is fitted on."""
CONFIDENCE, OVERLAP = 0.001, 0.7
"""Thresholds of suppression in ultralytics' `val`."""
ROUNDS = 5
"""Times that the suppression of each batch is timed."""


@public_call
@shows_keywords(PruneKeywords)
def prune_yolo(
    yolo: Model | str | Path,
    data: Any = None,
    *,
    imgsz: int | tuple[int, int] | None = None,
    images: int = IMAGES,
    suppression: bool = False,
    seed: int = 0,
    **arguments: Unpack[PruneKeywords],
) -> PrunedYOLO:
    """Prune a model of ultralytics, and repair it from images without labels.

    With `data`, channels are removed where the error is least, and the kept weights are fitted to what the dense model
    computes, as `prunekit.prune` does with calibration data; without, filters of least norm are removed, and the model
    needs fine-tuning. All modules keep ultralytics' classes, so what comes out is saved, loaded, exported and run where
    prunekit is not installed. Plain `YOLO(path).train(...)` is refused there, as it would rebuild the dense model.

    The decoded predictions and those that losses read keep their sizes. The feature maps that heads return beside them
    do not. Of models with two heads (v10, 26), the share of MACs counts the one that `fuse` and exports keep.

    Args:
        yolo: object of ultralytics (`YOLO`, `RTDETR`, `YOLOWorld`, `YOLOE`) or a path of one (.pt, or .yaml for random
            weights); not changed.
        data: images to calibrate on, without labels: a data set's YAML file or its dictionary, of which the training
            images are read; a folder, paths, arrays (H, W, 3) in BGR, a tensor (B, 3, H, W) in 0..1, or a loader, also
            ultralytics' own. Files and arrays are preprocessed as ultralytics' predictors do.
        imgsz: side of the images in pixels, or height and width; None: the size that the model was trained at.
        images: how many images are taken, at random; at least 8.
        suppression: whether budgets of time include ultralytics' non-maximum suppression. Its time is measured on
            `data`, in torch on the target's device with the thresholds of `val`, and taken off the budget, as pruning
            does not change it.
        seed: of the sample of images, and of the random criterion.
        arguments: of `prunekit.prune`: at least one budget, such as `macs`, and `criterion`, `scope`, `ignore`,
            `target`, `repair` and the others. Budgets of time are of a forward pass up to the decoded predictions,
            measured without the suppression of overlapping boxes that follows, unless `suppression` is set. Blocks do
            not go as a whole (`depth`): modules of other classes would stand in their place. A function `evaluate`
            gets an object of ultralytics: `evaluate=lambda yolo: yolo.val(data="coco8.yaml").box.map, max_drop=0.01`.

    Returns:
        An object of a subclass of the given one's class. `print` shows what is left, and the error of the output before
        and after the repair; `.pruned` is the result of `prunekit.prune`, with `.plan`.

    Raises:
        UsageError: no model of ultralytics, an argument that is decided here, or as `prunekit.prune`.
        DataError: images cannot be read, are too few, or do not fit the model; a `UsageError`.
        PlanError: the budget cannot be met, or a budget of time is less than the suppression alone takes.

    Example:
        >>> import torch
        >>> from ultralytics import YOLO
        >>> from prunekit.integrations.ultralytics import prune_yolo
        >>> small = prune_yolo(YOLO("yolov8n.yaml"), macs=0.5, imgsz=64)  # with data="coco8.yaml" repaired too
        >>> small
        PrunedYOLO (detect) with MACs 50.0 %, parameters ...
        >>> small.predict(torch.rand(1, 3, 96, 96), verbose=False)[0].boxes.shape[1]
        6
    """
    for name in ("plain_classes", "outputs", "calibration", "example", "more_examples"):
        if name in arguments:
            raise UsageError(f"{name}: prune_yolo decides this itself; leave it out, and give images as data=")
    arguments["plain_classes"] = True
    given = _opened(yolo)
    dense = given.model
    size = _size(dense, imgsz)
    samples = None if data is None else calibration_images(given, data, size, images, seed)
    notes: tuple[str, ...] = ()
    if suppression:
        arguments["latency_ms"], arguments["speedup"], notes = without_suppression(
            given, samples, arguments.get("latency_ms"), arguments.get("speedup"), arguments.get("target") or Target()
        )
    judge = arguments.get("evaluate")
    if judge is not None and not isinstance(judge, (str, Task)) and callable(judge):  # on a copy, as `val` fuses
        arguments["evaluate"] = lambda network: judge(PrunedYOLO.around(given, deepcopy(network)))
    generator = torch.Generator().manual_seed(seed)
    example = torch.rand(2, channels_of(dense), *size, generator=generator).to(device_of(dense))
    source = deepcopy(dense).requires_grad_(True)  # files of ultralytics hold frozen models
    forget_image_size(source)
    found = prune(
        source,
        example if samples is None else None,
        calibration=samples,
        images=images,
        seed=seed,
        outputs=predictions,
        more_examples=training_examples(source, example),
        **arguments,
    )
    made = PrunedYOLO.around(given, marked(dense, found.model, left_by(found.plan, dense)), found)
    made.notes = notes
    return made


@public_call
def load_yolo(path: str | Path | Model) -> PrunedYOLO:
    """Load a pruned model from a file that ultralytics wrote, to train it on in its structure.

    Args:
        path: of `.pt`, as `save` and the trainer write it (`best.pt`, and `last.pt` for `train(resume=True)`). Or an
            object of ultralytics whose `.model` was pruned by hand, with `prunekit.prune(yolo.model, ...)`.

    Returns:
        An object of a subclass of `YOLO`, `RTDETR`, `YOLOWorld` or `YOLOE`, with `pruned` None.

    Raises:
        UsageError: there is no such file, or it is no file of weights.
        ArtifactError: the model in it is not pruned.

    Example:
        >>> from ultralytics import YOLO
        >>> from prunekit.integrations.ultralytics import load_yolo, prune_yolo
        >>> prune_yolo(YOLO("yolov8n.yaml"), macs=0.5, imgsz=64).save("small.pt")
        >>> load_yolo("small.pt")
        PrunedYOLO (detect) with MACs 50.0 %, parameters ...
    """
    yolo = _opened(path)
    if isinstance(path, Model) and not is_marked(yolo.model):
        config, parameters = configuration(yolo.model), sum(one.numel() for one in yolo.model.parameters())
        built = type(yolo.model)(dict(config), verbose=False)
        whole = sum(one.numel() for one in built.parameters())
        if parameters != whole:
            marked(yolo.model, yolo.model, {"parameters": (whole, parameters)})
    if not is_marked(yolo.model):
        named = f"this {type(path).__name__}" if isinstance(path, Model) else str(path)
        raise ArtifactError(
            f"{named}: expected a pruned model, as prune_yolo(...).save(path) writes it, got a dense one; train it by "
            "YOLO(path), or prune it by prune_yolo(path, ...)"
        )
    return PrunedYOLO.around(yolo)


def _opened(yolo: Any) -> Model:
    """Return the object of a path, or the given one."""
    if isinstance(yolo, (str, Path)):
        path = Path(yolo)
        if path.suffix == ".pt" and path.parent != Path() and not path.exists():
            raise UsageError(f"there is no file {path}")
        yolo = (RTDETR if "rtdetr" in path.stem and path.suffix in {".yaml", ".yml"} else YOLO)(str(yolo))
    if not isinstance(yolo, Model):
        where = "; give the object of ultralytics, not its .model" if isinstance(yolo, nn.Module) else ""
        raise UsageError(
            f"expected an object of ultralytics, such as YOLO('yolo11n.pt'), got {type(yolo).__name__}{where}"
        )
    if not isinstance(yolo.model, nn.Module):
        raise UsageError(f"expected a model in torch (.pt), got {yolo.model}; exported models cannot be pruned")
    return yolo


def _size(model: nn.Module, given: int | tuple[int, int] | None) -> tuple[int, int]:
    """Return height and width, as multiples of the model's stride."""
    asked: Any = settings_of(model).get("imgsz", 640) if given is None else given
    height, width = asked if isinstance(asked, (tuple, list)) else (asked, asked)
    stride = max(int(max(getattr(model, "stride", [1]))), 1)
    if not all(isinstance(side, int) and side > 0 and side % stride == 0 for side in (height, width)):
        raise UsageError(f"imgsz: expected multiples of {stride} pixels, the model's stride, got {asked!r}")
    return height, width


def without_suppression(
    yolo: Model, samples: Tensor | None, latency_ms: float | None, speedup: float | None, target: Target
) -> tuple[float | None, float | None, tuple[str, ...]]:
    """Return budgets of time for the model alone, from those for model and suppression together, and a note on both.

    Suppression takes longer the more boxes there are in the images `samples` (B, C, H, W).
    """
    if latency_ms is None and speedup is None:
        raise UsageError("suppression: expected a budget of time with it, speedup=... or latency_ms=...")
    if target.elsewhere:
        raise UsageError(f"suppression: expected a target on this machine, got {target.device!r}; leave it out")
    if samples is None:
        raise UsageError("suppression: expected images as data=, whose boxes are suppressed, got none")
    head = type(yolo.model.model[-1]).__name__
    overlapping = yolo.task in {"detect", "segment", "pose", "obb"} and "RTDETR" not in head
    if not overlapping or getattr(yolo.model.model[-1], "end2end", False):
        raise UsageError(f"suppression: {type(yolo.model).__name__} returns its boxes without one; leave it out")
    batch = samples[: target.batch].repeat(-(-target.batch // len(samples)), 1, 1, 1)[: target.batch]
    alone = suppression_ms(yolo, samples, target)
    said = f"suppression takes {alone:.3g} ms for {target.batch} images, and is no part of the model's time"
    if latency_ms is not None:
        latency_ms = _left_for_model(latency_ms, alone)
    if speedup is not None:
        measured = bench(
            {"dense": yolo.model},
            batch,
            runtimes=target.runtime,
            batch=target.batch,
            threads=target.threads,
            dtypes=target.dtype,
            memory_formats=target.memory_format,
            device=target.device,
        )
        whole = float(measured.latency[0]["median_ms"])
        of_model = whole / _left_for_model((whole + alone) / speedup, alone)
        said += f", {whole:.3g} ms; {of_model:.3g}x of the model alone are {speedup:g}x of both"
        speedup = of_model
    return latency_ms, speedup, (said,)


def suppression_ms(yolo: Model, samples: Tensor, target: Target) -> float:
    """Return the median milliseconds that suppression takes on the predictions for a batch of images."""
    model, times, device = yolo.model, list[float](), torch.device(target.device)
    settings = {"nc": model.model[-1].nc, "multi_label": True, "rotated": yolo.task == "obb"}
    with threads(target.threads), training_mode(model, False), torch.no_grad():
        for start in range(0, min(len(samples), 8 * target.batch), target.batch):
            batch = samples[start : start + target.batch].to(next(model.parameters()).device)
            predicted = model(batch)
            while not isinstance(predicted, Tensor):
                predicted = predicted[0]
            for _ in range(ROUNDS):
                again = predicted.to(device, copy=True)  # it is overwritten
                times.append(Timer(partial(non_max_suppression, again, CONFIDENCE, OVERLAP, **settings), device)())
    return sorted(times)[len(times) // 2]


def _left_for_model(both: float, alone: float) -> float:
    if both <= alone:
        raise PlanError(
            f"suppression alone takes {alone:.3g} ms, and model and suppression together are to take {both:.3g} ms; "
            "ask for less, or raise its confidence threshold where the model runs and leave out suppression=True"
        )
    return both - alone
