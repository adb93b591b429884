"""Predictions: what a model says about image files, or about inputs that are ready."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from prunekit.backends.files.exported_model import ExportedModel
from prunekit.data.local_files import image_files
from prunekit.errors import DataError, ModelError, UsageError, nearest
from prunekit.hooks.wrappers import unwrapped
from prunekit.jobs.run.command_subject import Subject
from prunekit.jobs.run.early_checks import TENSOR_FILES, require_images, require_trained
from prunekit.jobs.run.subject_sources import resolve
from prunekit.models.interface import ModelInterface, TensorSpec, attached, logits, named_tensors_of
from prunekit.models.preprocessing import Pixels, Preprocessing, opened
from prunekit.modes.public_call import public_call
from prunekit.reading.array_files import read_arrays, read_tensors
from prunekit.reading.text_files import shown
from prunekit.tasks.task import Task, get_task
from prunekit.utils.context import device_of, training_mode
from prunekit.utils.display import Displayed, Table, digits, plural, share
from prunekit.utils.files import StrPath, atomic_file
from prunekit.utils.inputs import (
    Keywords,
    as_example,
    call,
    parameter_names,
    running,
    sample_count,
    select_samples,
    to_device,
)
from prunekit.utils.tensors import gather

Runs = Iterator[tuple[tuple[Any, ...], Any]]
FEW = 10
"""Values of an output that are shown one by one; of more, their range."""


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(Displayed):
    """A prediction: what a model returns for some samples.

    Attributes:
        model: its name.
        samples: names of the samples.
        classes: names of the labels; empty for tasks other than classification.
        probabilities: (samples, classes) float64, the softmax of the scores; None for other tasks.
        outputs: tensors by name, samples first; `name_0`, `name_1`, ... if those of samples differ in shape.
        top: number of classes, or of detections, that are shown for each sample.
        detections: of a detector, for each sample `boxes` (n, 4), `scores` and `labels`, the most confident first;
            left, top, right and bottom in pixels of the image, or of an input that is ready; None for other tasks.

    Example:
        >>> import numpy as np
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 2))
        >>> small = pk.prune(model, torch.randn(1, 3, 8, 8), macs=0.5)
        >>> feed = pk.Preprocessing(height=8, width=8)
        >>> folder = pk.save(small, "small", preprocessing=feed, classes=["cat", "dog"], task="image_classification")
        >>> found = pk.predict(pk.load(folder, model=model), np.zeros((20, 20, 3), dtype=np.uint8), top=1)
        >>> found.probabilities.shape
        torch.Size([1, 2])
        >>> found.rows()[0]["class"] in ("cat", "dog")
        True
    """

    model: str
    samples: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities: Tensor | None
    outputs: Mapping[str, Tensor]
    top: int = 5
    detections: tuple[Mapping[str, Tensor], ...] | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Return the most probable classes or detections of each sample, or the values of each output."""
        if self.detections is not None:
            return [row for pair in zip(self.samples, self.detections, strict=True) for row in self._boxes(*pair)]
        if self.probabilities is None:
            return [row for name, tensor in self.outputs.items() for row in self._output_rows(name, tensor)]
        values, labels = self.probabilities.topk(min(self.top, self.probabilities.shape[1]))
        return [
            {
                "sample": sample,
                "rank": rank + 1,
                "class": self.classes[label] if self.classes else str(label),
                "label": label,
                "probability": value,
            }
            for sample, row, chosen in zip(self.samples, values.tolist(), labels.tolist(), strict=True)
            for rank, (value, label) in enumerate(zip(row, chosen, strict=True))
        ]

    def _boxes(self, sample: str, found: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
        parts = (found[name][: self.top].tolist() for name in ("labels", "scores", "boxes"))
        for rank, (label, score, box) in enumerate(zip(*parts, strict=True), 1):
            known = self.classes[label] if label < len(self.classes) else str(label)
            yield {"sample": sample, "rank": rank, "class": known, "label": label, "score": score, "box": box}

    def _output_rows(self, name: str, tensor: Tensor) -> Iterator[dict[str, Any]]:
        of_samples = len(tensor) == len(self.samples) if tensor.dim() else False
        parts = list(zip(self.samples, tensor, strict=True)) if of_samples else [("", tensor)]
        for sample, part in parts:
            row: dict[str, Any] = {"sample": sample, "output": name, "dtype": str(part.dtype).removeprefix("torch.")}
            row |= {"shape": list(part.shape), "values": part.flatten().tolist() if part.numel() <= FEW else None}
            numbers = part.double() if part.numel() and not part.is_complex() else torch.full((1,), torch.nan).double()
            yield row | {"min": float(numbers.min()), "mean": float(numbers.mean()), "max": float(numbers.max())}

    def figures(self) -> dict[str, Any]:
        """Return the prediction as plain data, without large outputs."""
        kind = "outputs" if self.probabilities is None else "top"
        kind = kind if self.detections is None else "detections"
        return {"model": self.model, "samples": list(self.samples), kind: self.rows()}

    def save(self, path: StrPath) -> Path:
        """Write all outputs, and the probabilities if there are any, as a `.safetensors` file."""
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.outputs.items()}
        if self.probabilities is not None:
            tensors["probabilities" if "probabilities" not in tensors else "class_probabilities"] = self.probabilities
        with atomic_file(Path(path)) as temporary:
            save_file(tensors, temporary)
        return Path(path)

    def _headline(self) -> str:
        rows = self.rows()
        if self.detections is not None:
            count = sum(len(found["labels"]) for found in self.detections)
            return f"{self.model}: {plural(len(self.samples), 'sample')}, {plural(count, 'detection')}"
        if self.probabilities is None or not rows:
            return f"{self.model}: {plural(len(self.samples), 'sample')}, outputs {', '.join(self.outputs)}"
        first = f"{rows[0]['sample']} is {rows[0]['class']}, {share(rows[0]['probability'])}"
        return f"{self.model}: {plural(len(self.samples), 'sample')}; {first}"

    def _parts(self) -> Iterator[str | Table]:
        rows = self.rows()
        if self.detections is not None:
            corners = "left, top, right, bottom"
            boxes = [(*_ranked(row, "score"), " ".join(f"{side:.1f}" for side in row["box"])) for row in rows]
            yield Table(("sample", "class", "score", corners), boxes, text=("class", corners), most=50)
        elif self.probabilities is not None:
            shown = [_ranked(row, "probability") for row in rows]
            yield Table(("sample", "class", "probability"), shown, text=("class",), most=50)
        else:
            keys = ("sample", "output", "dtype")
            shapes = ("x".join(map(str, row["shape"])) or "1" for row in rows)
            listed = [(*map(row.get, keys), shape, _values(row)) for row, shape in zip(rows, shapes, strict=True)]
            yield Table((*keys, "shape", "values"), listed, text=("output", "dtype", "values"), most=50)


def _ranked(row: Mapping[str, Any], value: str) -> tuple[str, str, str]:
    """Return the cells of a class or detection: its sample where that begins, its name, and its score."""
    return row["sample"] if row["rank"] == 1 else "", row["class"], share(row[value], 2)


def _values(row: Mapping[str, Any]) -> str:
    if row["values"] is not None:
        return " ".join(digits(value) if isinstance(value, float) else str(value) for value in row["values"])
    return f"{digits(row['min'])} to {digits(row['max'])}, mean {digits(row['mean'])}"


@public_call
def predict(
    model: nn.Module | StrPath,
    images: Any,
    *,
    top: int = 5,
    preprocessing: Preprocessing | None = None,
    classes: Sequence[str] = (),
    task: str | None = None,
    batch: int = 32,
    allow_code: bool = False,
) -> Prediction:
    """Return what a model says about images: the most probable classes, or the outputs of other tasks.

    Args:
        model: that `prunekit.load` returned, or any whose preprocessing is given; or the path of a model folder of a
            known zoo, or of an exported file.
        images: the path of an image file, of a folder of images or of a file of inputs (.npy, .npz, .safetensors),
            a Pillow image, uint8 pixels (H, W) or (H, W, 3), or a list of these; or inputs that are ready, samples
            first: a tensor, a tuple of positional arguments, or a mapping of arguments by name.
        top: number of classes to show for each sample.
        preprocessing: the way from an image to the input; None: the model's own.
        classes: name of each label; empty: the model's own.
        task: its name; None: the model's own.
        batch: samples that the model is given at once.
        allow_code: whether an exported file may be loaded though it could run code: a compiled one, or a program of
            more than operators that compute tensors.

    Raises:
        DataError: an image or a file of inputs cannot be read.
        UsageError: the model does not say how images become its input.
        ModelError: the model does not run on them, or has not as many scores as there are classes.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> small = pk.prune(model, torch.randn(1, 4), macs=0.5).model
        >>> found = pk.predict(small, torch.randn(2, 4), classes=["cat", "dog", "ox"])
        >>> [row["sample"] for row in found.rows() if row["rank"] == 1]
        ['0', '1']
    """
    if isinstance(model, (str, PathLike)):
        target = resolve(Path(model), allow_code=allow_code)
    elif isinstance(model, nn.Module):
        own = unwrapped(model)
        target = Subject(model, type(own).__name__, (), interface=attached(own))
    else:
        raise UsageError(f"expected a model, or the path of a folder or a file, got {type(model).__name__}")
    known = target.interface or ModelInterface((), ())
    known = replace(
        known,
        preprocessing=preprocessing or known.preprocessing,
        classes=tuple(classes) or known.classes,
        task=task or known.task,
    )
    return predict_target(replace(target, interface=known), images, top=top, batch=batch)


def predict_target(
    target: Subject, given: Any, *, top: int = 5, batch: int = 32, device: torch.device | None = None
) -> Prediction:
    """Return what a model with an interface says about images or inputs; see `predict`.

    With a device the model is moved there; else it runs where it is.
    """
    if top < 1 or batch < 1:
        raise UsageError(f"top, batch: expected at least 1, got {top} and {batch}")
    require_trained(target.name, target.trained)
    interface = target.interface or ModelInterface((), ())
    task = None if interface.task is None else get_task(interface.task)
    sizes: list[tuple[int, int]] = []
    names, parts = _samples(target, given, batch, sizes)
    parts = _without_nan(parts, names)
    place, classes = device or device_of(target.model), interface.classes
    if (task is not None and task.logits is not None) or (task is None and classes):
        every, shares = _class_scores(target, task, names, _run(target, parts, place))
        return Prediction(target.name, names, classes, shares, {"scores": every.float()}, top)
    if task is not None and task.predictions is not None and not isinstance(target.model, ExportedModel):
        found = list(_detected(target, task, _run(target, parts, place)))
        outputs = {f"{key}_{at}": tensor for at, each in enumerate(found) for key, tensor in each.items()}
        feed = interface.preprocessing
        if feed is not None and feed.padding is not None and sizes:
            pairs = zip(found, sizes, strict=True)
            found = [{**one, "boxes": feed.in_image(one["boxes"], size)} for one, size in pairs]
        return Prediction(target.name, names, classes, None, outputs, top, tuple(found))
    singles = (select_samples(part, slice(at, at + 1)) for part in parts for at in range(sample_count(part, 1)))
    return Prediction(target.name, names, classes, None, _outputs(_run(target, singles, place)), top)


def _without_nan(parts: Iterator[tuple[Any, ...]], names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield batches of samples as they are, and raise at NaN, from which a model computes an order without meaning."""
    first = 0
    for part in parts:
        for tensor in gather(part):
            if tensor.is_floating_point() and tensor.isnan().any():
                rows = tensor.isnan().reshape(len(tensor), -1).any(1) if tensor.dim() else tensor.isnan()[None]
                sample = first + int(rows.nonzero()[0])
                name = names[sample] if sample < len(names) else str(sample)
                raise DataError(f"sample {name}: expected numbers, got NaN among its values")
        yield part
        first += sample_count(part, 1)


def _detected(target: Subject, task: Task, runs: Runs) -> Iterator[dict[str, Tensor]]:
    """Yield what a detector finds in each sample, with boxes in pixels of its input."""
    for part, output in runs:
        for each in task.scored(target.model, part, output):
            order = each["scores"].argsort(descending=True, stable=True)
            yield {name: each[name][order].detach().cpu() for name in ("boxes", "scores", "labels")}


def _class_scores(target: Subject, task: Task | None, names: tuple[str, ...], runs: Runs) -> tuple[Tensor, Tensor]:
    """Return the scores of classes, and their probabilities, which are finite: (samples, classes) float64 each."""
    scores = []
    for part, output in runs:
        try:
            found = (task.logits if task is not None and task.logits is not None else logits)(output)
        except ModelError as error:
            raise ModelError(f"{target.name}: {error}") from error
        if found.dim() != 2 or len(found) != sample_count(part):
            raise ModelError(
                f"{target.name}: expected scores of classes, (samples, classes), got shape {tuple(found.shape)}"
            )
        scores.append(found.detach().cpu().double())
    every = torch.cat(scores)
    shares = every.softmax(1)
    classes = () if target.interface is None else target.interface.classes
    if classes and len(classes) != every.shape[1]:
        raise ModelError(
            f"{target.name}: expected a score for each of its {len(classes)} classes, got {every.shape[1]} scores"
        )
    if (wrong := shares.isnan().any(1)).any():
        sample = names[int(wrong.nonzero()[0])]
        raise ModelError(
            f"{target.name}: its scores of {sample} are NaN or infinite, which put no class first; were its weights, "
            "or what it was trained on, finite?"
        )
    return every, shares


def _outputs(runs: Runs) -> dict[str, Tensor]:
    """Return the outputs of samples that ran one by one, because not every model returns a batch as it was given."""
    found: dict[str, list[Tensor]] = {}
    for _, output in runs:
        for name, tensor in named_tensors_of(output, "output"):
            found.setdefault(name, []).append(tensor.detach().cpu())
    joined: dict[str, Tensor] = {}
    for name, tensors in found.items():
        if len({tensor.shape for tensor in tensors}) == 1 and tensors[0].dim() and len(tensors[0]) == 1:
            joined[name] = torch.cat(tensors)
        else:
            joined |= {f"{name}_{at}" if tensors[1:] else name: tensor for at, tensor in enumerate(tensors)}
    return joined


def _run(target: Subject, parts: Iterator[tuple[Any, ...]], device: torch.device) -> Runs:
    """Yield batches on a device, each with what the model returns for it."""
    model = target.model.to(device)
    for part in parts:
        there = to_device(part, device)
        with training_mode(model, False), torch.inference_mode(), running(model, part, called=target.name):
            output = call(model, there)
        yield there, output


def _samples(
    target: Subject, given: Any, batch: int, sizes: list[tuple[int, int]]
) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
    """Return the names of the samples, and batches of them as examples."""
    if isinstance(given, (Tensor, tuple, Mapping)):
        return _ready(target, as_example(target.model, given), batch, "")
    if isinstance(given, (str, PathLike)) or not isinstance(given, Sequence):
        given = [given]
    files = [Path(one) for one in given if isinstance(one, (str, PathLike))]
    inputs = [path for path in files if path.suffix in TENSOR_FILES]
    if inputs:
        if len(given) > 1:
            raise UsageError(f"{inputs[0]}: expected images, or one file of inputs, got {len(given)} together")
        return _ready(target, _read_inputs(target, inputs[0]), batch, inputs[0].name)
    if len(files) < len(given) and any(isinstance(one, Tensor) for one in given):
        raise UsageError("expected images, or inputs as one tensor with samples first, got a list of tensors")
    images: list[Pixels] = []
    names: list[str] = []
    for at, one in enumerate(given):
        if not isinstance(one, (str, PathLike)):
            images, names = [*images, one], [*names, str(at)]
            continue
        found = image_files(Path(one)) if Path(one).is_dir() else [Path(one)]
        images, names = [*images, *found], [*names, *map(str, found)]
    if not images:
        raise UsageError("expected at least one image, got none")
    feed = target.preprocessing
    require_images(one for one in images if isinstance(one, Path))
    return tuple(names), _read_images(feed, images, batch, sizes)


def _read_images(
    feed: Preprocessing, images: Sequence[Pixels], batch: int, sizes: list[tuple[int, int]]
) -> Iterator[tuple[Any, ...]]:
    for at in range(0, len(images), batch):
        read = [opened(image) for image in images[at : at + batch]]
        sizes += [image.size for image in read]
        yield (feed(read),)


def _ready(
    target: Subject, example: tuple[Any, ...], batch: int, where: str
) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
    count = sample_count(example)
    if not count:
        raise DataError(f"{where or target.name}: expected inputs with samples on the first axis, got none")
    parts = (select_samples(example, slice(at, at + batch)) for at in range(0, count, batch))
    return tuple(f"{where}[{at}]" if where else str(at) for at in range(count)), parts


def _read_inputs(target: Subject, path: Path) -> tuple[Any, ...]:
    """Return the inputs in a file as an example: by the names of the model's inputs, or its only input."""
    arrays = _tensors_in(path)
    flat = next((name for name, tensor in arrays.items() if not tensor.dim()), None)
    if flat is not None:
        raise DataError(f"{shown(path)}: {shown(flat)}: expected samples on the first axis, got one number")
    known = {spec.name: spec for spec in target.interface.inputs} if target.interface else {}
    names = list(known) or parameter_names(target.model)
    if len(arrays) == 1 and (len(known) == 1 or next(iter(arrays)) not in names):
        (only,) = arrays.values()
        spec = next(iter(known.values()), None) if len(known) == 1 else None
        return (_typed(only, spec, f"{path}"),)
    for name in arrays:
        if name not in names:
            raise DataError(f"{path}: the model has no input {name!r}; {nearest(name, names)}")
    missing = [name for name in known if name not in arrays]
    if missing:
        raise DataError(f"{path}: expected {', '.join(map(str, known.values()))}; {', '.join(missing)} is missing")
    named = {name: _typed(tensor, known.get(name), f"{path}: {name}") for name, tensor in arrays.items()}
    return as_example(target.model, (Keywords(named),))


def _tensors_in(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DataError(f"{shown(path)}: expected a file of inputs, and there is none")
    if path.suffix == ".safetensors":
        return read_tensors(path, "tensors, no objects", DataError)[0]
    found = {}
    for name, array in read_arrays(path, "tensors, no objects", DataError).items():
        if array.dtype.kind not in "biufc":
            raise DataError(f"{shown(path)}: {shown(name)}: expected numbers, got {array.dtype} {array.shape}")
        native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(array.shape)
        try:
            found[name] = torch.from_numpy(native)
        except TypeError as error:  # of numbers of 80 bits and the like
            raise DataError(f"{shown(path)}: {shown(name)}: torch has no numbers of {array.dtype}") from error
    return found


def _typed(tensor: Tensor, spec: TensorSpec | None, where: str) -> Tensor:
    """Return an input in the dtype of the model, with a batch of one sample if it has no batch."""
    if spec is None:
        return tensor.float() if tensor.dtype == torch.float64 else tensor
    kind = getattr(torch, spec.dtype, tensor.dtype)
    if kind.is_floating_point != tensor.is_floating_point():
        raise DataError(f"{where}: expected {spec}, got {str(tensor.dtype).removeprefix('torch.')}")
    shape = tuple(tensor.shape)
    shape = (1, *shape) if len(shape) == len(spec.shape) - 1 else shape
    fits = len(shape) == len(spec.shape) and all(
        type(wanted) is str or wanted == size for wanted, size in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        raise DataError(f"{where}: expected {spec}, got shape {tuple(tensor.shape)}")
    return tensor.to(kind).reshape(shape)
