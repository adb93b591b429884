"""Evaluation of a model on test data, which training has not seen."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prunekit.backends.files.exported_model import ExportedModel
from prunekit.data.datasets import describe_corrupt
from prunekit.data.loader import batches
from prunekit.data.splits import Splits
from prunekit.distributed.process_group import in_turn, rank, require_equal, size
from prunekit.errors import ModelError, UsageError
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own, Subject, bound_splits
from prunekit.jobs.run.early_checks import require_trained
from prunekit.jobs.run.job_subject import share_model
from prunekit.measure.accuracy import Scores
from prunekit.measure.accuracy import evaluate as measure
from prunekit.report.headline import capital
from prunekit.settings.inputs import DataSettings
from prunekit.tasks.language import PERPLEXITY
from prunekit.tasks.task import Task, described_task
from prunekit.training.compatibility import require_class_count, require_text
from prunekit.training.parallel import share_corrupt
from prunekit.utils.display import Displayed, count, in_unit, interval
from prunekit.utils.display import size as bytes_text


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Displayed):
    """The scores of a model on test data."""

    model: str  # its name
    task: Task  # whose scores they are
    scores: Scores  # of the task, on the test split
    costs: dict[str, Any]  # parameters and MACs, or the bytes of an exported file
    device: str  # where the model ran
    corrupt: dict[str, Any]  # images that could not be read
    text: tuple[int, int] | None = None  # tokens and bytes of the test text, of a model that predicts the next token

    def by_bytes(self) -> dict[str, Any]:
        """Return how many tokens were predicted, and figures that do not depend on the tokenizer.

        Bits per byte are those per token times the text's tokens per byte (Gao et al. 2020, The Pile).
        """
        if self.text is None or not all(self.text) or PERPLEXITY not in self.task.scores or not self.scores.counts[1]:
            return {}
        tokens, size = self.text
        bits = self.scores.counts[0] / self.scores.counts[1] / math.log(2) * tokens / size
        text = {"predicted_tokens": int(self.scores.counts[1]), "text_tokens": tokens, "text_bytes": size}
        return {**text, "bits_per_byte": bits, "byte_perplexity": 2 ** min(bits, 1000.0)}

    def figures(self) -> dict[str, Any]:
        """Return scores and costs as plain data."""
        figures = {"task": described_task(self.task), **self.scores.figures(), **self.by_bytes(), **self.costs}
        return {"model": self.model, **figures, "device": self.device, "corrupt_images": self.corrupt}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each score."""
        return [
            {"score": score.name, "value": self.scores.values[score.name], "unit": score.unit}
            for score in self.task.scores
        ]

    def _headline(self) -> str:
        found = self.figures()
        scores = ", ".join(f"{score.label} {in_unit(found[score.name], score.unit)}" for score in self.task.scores)
        if "correct" in found:
            scores += f" {interval(found['low'], found['high'])} ({found['correct']:,} of"
        elif "low" in found:
            scores += f", the first {interval(found['low'], found['high'])} (of"
        else:
            scores += " (of"
        if "file_bytes" in found:
            cost = f"a file of {bytes_text(found['file_bytes'])}"
        else:
            cost = f"{count(found['params'])} parameters, {count(found['macs'])} MACs"
        return f"{self.model}: {scores} {found['n_test']:,} test {self.task.samples}), {cost}"

    def _parts(self) -> Iterator[str]:
        lines = [self._headline(), *([describe_corrupt(self.corrupt)] if self.corrupt else [])]
        if self.scores.at_chance:
            chance = in_unit(self.scores.chance, self.task.main.unit)
            lines.append(f"Not shown to be better than chance, {chance}: one answer for all")
        if found := self.by_bytes():
            lines.append(
                f"Per byte, whatever the tokenizer: {found['bits_per_byte']:.4f} bits, perplexity "
                f"{found['byte_perplexity']:.4f} ({found['text_tokens']:,} tokens, {found['text_bytes']:,} bytes)"
            )
        if self.task.main.note:
            lines.append(capital(self.task.main.note))
        yield "\n".join(lines)


def evaluate(
    target: Subject,
    data: DataSettings | None,
    device: torch.device,
    own: Own = RECIPE_ONLY,
    task: str | None = None,
    dense: Callable[[], nn.Module] | None = None,
) -> Evaluation:
    """Measure the scores of the task on the test split, whose batches the processes of a group share."""
    with in_turn():
        splits = target.data(data, own, "test on", task)
    require_equal(splits.fingerprint, "the images (their fingerprint)")
    share_model(target.model, "the model")
    splits = _bound(splits, target, dense, device)
    target = target.fed_by(splits)
    _check(target, splits)
    settings = data or DataSettings()
    test = batches(splits.test, settings.batch, shuffle_seed=None, workers=settings.reading)
    costs = target.figures()
    found = measure(target.model, test.dealt(rank(), size()), splits.task, device, together=True)
    share_corrupt(test)
    text = splits.spelled() if splits.spelled is not None else None
    return Evaluation(target.name, splits.task, found, costs, str(device), splits.corrupt, text)


def _bound(splits: Splits, target: Subject, dense: Callable[[], nn.Module] | None, device: torch.device) -> Splits:
    """Return the data with a task that has got from the dense model what only that knows; see `Task.bound`."""
    if not splits.task.from_dense:
        return bound_splits(splits, target.model)
    if not splits.unmeasured:
        return splits
    if dense is None:
        raise UsageError(
            f"{target.name}: the targets of task {splits.task.name!r} are the dense model's outputs: give the recipe "
            "that has it, --recipe PATH"
        )
    return bound_splits(splits, dense(), device)


def _check(target: Subject, splits: Splits) -> None:
    require_trained(target.name, target.trained)
    output, classes = target.probe(), len(splits.classes)
    if not isinstance(target.model, ExportedModel):
        require_class_count(target.model, splits.task, classes)
        require_text(target.model, splits)
    if splits.task.logits is None or not classes:
        return
    try:
        found = splits.task.logits(output).shape[-1]
    except ModelError as error:
        raise ModelError(f"{target.name}: {error}") from error
    if found != classes:
        raise ModelError(f"{target.name}: expected {classes} scores, one for each class of the data, got {found}")
