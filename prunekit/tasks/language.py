"""Language tasks: tokens are predicted or classified, and what counts is counted token by token.

Perplexity is the exponential of the mean negative log likelihood of the tokens that count, in nats, over all batches
together (Jelinek et al. 1977, J. Acoust. Soc. Am. 62:S63).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.errors import DataError, ModelError
from prunekit.hooks.wrappers import unwrapped
from prunekit.models.interface import logits
from prunekit.tasks.classification import most_frequent, top1
from prunekit.tasks.task import Score, Task, register_task, with_smoothing
from prunekit.tasks.texts import IGNORED, PaddedTexts, counted_tokens, named_inputs, token_labels
from prunekit.utils.inputs import DECODER
from prunekit.utils.tensors import accumulation_dtype, occurrences

MOST = 1e300
"""Perplexity of a model that is worse than any number can say, and where no token counts."""
NAMES_OF_SHIFTS = ("prepare_decoder_input_ids_from_labels", "_shift_right")
"""Methods by which models of transformers make the decoder's input of the labels."""


def token_scores(output: Any) -> Tensor:
    """Return the class scores of tokens, (B, T, classes): a tensor, those in `.logits`, or the first of several.

    Exported files return all outputs as a tuple, of which scores are the first, as of transformers' own tuples.
    """
    found = logits(output[0] if isinstance(output, (tuple, list)) and output else output)
    if found.ndim != 3:
        raise ModelError(f"expected scores of tokens (B, T, classes), got shape {tuple(found.shape)}")
    return found


def _rows(output: Any) -> Tensor:
    return token_scores(output).flatten(0, 1)  # (B * T, classes)


def wide(scores: Tensor) -> Tensor:
    """Return values in float32, or as they are if they are wider."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _checked(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores (B * T, classes) and labels (B * T,) of all tokens, those that do not count included."""
    scores = token_scores(output)
    if scores.shape[:2] != labels.shape:
        raise ModelError(
            f"expected scores for each of the tokens {tuple(labels.shape)}, got shape {tuple(scores.shape)}"
        )
    largest, classes = int(labels.max()) if labels.numel() else 0, scores.shape[2]
    if largest >= classes:
        raise DataError(f"expected labels 0..{classes - 1}, as many as the model has scores, the largest is {largest}")
    return scores.flatten(0, 1), labels.flatten()


def cross_entropy(output: Any, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy over the tokens that count, in nats; 0 if none does.

    The output is scores (B, T, classes), or has them in `.logits`; labels are (B, T) int64, -100 where a token does not
    count.
    """
    scores, wanted = _checked(output, labels)
    known = {"ignore_index": IGNORED, "label_smoothing": label_smoothing}
    total: Tensor = F.cross_entropy(wide(scores), wanted, reduction="sum", **known)  # type: ignore[arg-type]
    return total / max(count(labels), 1)


def count(labels: Tensor) -> int:
    """Return the number of tokens that count."""
    return int((labels != IGNORED).sum())


def predictions(output: Any, labels: Tensor) -> Tensor:
    """Return the sum of the negative log likelihoods in nats, and the numbers of tokens and of right ones, (3,)."""
    scores, wanted = _checked(output, labels)
    lost = F.cross_entropy(wide(scores.detach()), wanted, reduction="none", ignore_index=IGNORED)
    sums = accumulation_dtype(lost.device)
    right = (scores.argmax(1) == wanted).sum()  # -100 is no class
    return torch.stack([lost.to(sums).sum(), (wanted != IGNORED).sum().to(sums), right.to(sums)])


def perplexity(sums: Tensor) -> float:
    """Return the perplexity, of the sums of `predictions`."""
    tokens = float(sums[1])
    mean = float(sums[0]) / tokens if tokens else math.inf
    return math.exp(mean) if mean < math.log(MOST) else MOST


def accuracy(sums: Tensor) -> float:
    """Return the percent of tokens that are right, of the sums of `predictions`."""
    return 100 * float(sums[2]) / max(float(sums[1]), 1.0)


def following_tokens(batch: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs, and the token that follows each, (B, T) int64: -100 at the last, and where it does not count.

    Without labels all tokens count that the `attention_mask` does not leave out. A token that follows padding, at the
    beginning of a text that is padded on the left, does not count: nothing precedes it. The labels of a batch (B, T)
    are those of the tokens themselves, and are shifted here.
    """
    inputs, labels, counted = named_inputs(batch), token_labels(batch), counted_tokens(batch)
    labels = inputs["input_ids"].long() if labels is None else labels
    if labels.shape != inputs["input_ids"].shape:
        raise DataError(f"expected a label for each of the tokens {tuple(inputs['input_ids'].shape)}")
    following = torch.full_like(labels, IGNORED)
    following[:, :-1] = labels[:, 1:]
    if counted is not None:
        following[:, :-1].masked_fill_(~(counted[:, 1:] & counted[:, :-1]), IGNORED)
    return inputs, following


def labeled_tokens(batch: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs, and the label of each token, (B, T) int64, -100 where it does not count.

    A `DataCollatorForLanguageModeling`, or `data.source: text`, masks tokens and makes labels of them.
    """
    inputs, labels = named_inputs(batch), token_labels(batch)
    if labels is None or labels.shape != inputs["input_ids"].shape:
        raise DataError("expected input_ids with labels (B, T), one for each token, -100 where it does not count")
    return inputs, labels


def decoded_tokens(batch: Any, shift: Callable[[Tensor], Tensor] | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of encoder and decoder, and the tokens that the decoder shall write, (B, T) int64."""
    inputs, labels = named_inputs(batch), token_labels(batch)
    if labels is None:
        raise DataError("expected input_ids (B, S) with labels (B, T), the tokens to write")
    if DECODER in inputs:
        return inputs, labels
    if shift is None:
        raise DataError(
            "expected decoder_input_ids: bind the task to the model, task.bound(model), or let "
            "DataCollatorForSeq2Seq(tokenizer, model=model) make them"
        )
    return inputs | {DECODER: shift(labels)}, labels


def _with_shift(task: Task, model: nn.Module) -> Task:
    """Return the task with the model's own way of making the decoder's input of labels."""
    inner = unwrapped(model)
    shift = next((found for name in NAMES_OF_SHIFTS if callable(found := getattr(inner, name, None))), None)
    if shift is None:
        return task  # batches with `decoder_input_ids` need none
    return replace(task, unpack=partial(decoded_tokens, shift=shift))


def _tags(output: Any, labels: Tensor) -> Tensor:
    """Return the numbers of right answers, of tokens, and of those of each class, (2 + classes,)."""
    scores, wanted = _checked(output, labels)
    right, counted = (scores.argmax(1) == wanted).sum(), (wanted != IGNORED).sum()  # -100 is no class
    return torch.cat([torch.stack([right, counted]), occurrences(wanted, scores.shape[1])])


def _of_tokens(read: Callable[[Tensor], float], sums: Tensor) -> float:
    """Return a score, which is 0 where no token counts."""
    return read(sums) if float(sums[1]) else 0.0


PERPLEXITY = Score("perplexity", "perplexity", perplexity, unit="", lower_is_better=True)
TOKEN_ACCURACY = Score("token_accuracy", "token accuracy", accuracy)


def _task(name: str, unpack: Callable[[Any], tuple[Mapping[str, Tensor], Tensor]]) -> Task:
    return Task(
        name,
        cross_entropy,
        predictions,
        (PERPLEXITY, TOKEN_ACCURACY),
        unpack,
        logits=_rows,
        smoothed=partial(with_smoothing, cross_entropy),
        samples="texts",
        collate=PaddedTexts(),
        weight=count,
    )


CAUSAL_LM = register_task(
    "causal_lm", data="token ids, by name", measures="cross entropy of the next token; perplexity, token accuracy"
)(replace(_task("causal_lm", following_tokens), texts="windows"))
"""Token ids, whose next one a model predicts; labels (B, T) may leave some out."""
MASKED_LM = register_task(
    "masked_lm",
    data="token ids, some of them masked, with labels of these",
    measures="cross entropy of masked tokens; perplexity, token accuracy",
)(replace(_task("masked_lm", labeled_tokens), texts="masked"))
"""Token ids of which some are masked, with labels (B, T), -100 at the others (Devlin et al. 2019)."""
TOKEN_CLASSIFICATION = register_task(
    "token_classification", data="token ids with a label each, by name", measures="cross entropy; token accuracy"
)(
    replace(
        _task("token_classification", labeled_tokens),
        counts=_tags,
        scores=(replace(TOKEN_ACCURACY, of=partial(_of_tokens, top1), chance=partial(_of_tokens, most_frequent)),),
    )
)
"""Token ids with a label (B, T) each, -100 where a token does not count."""
SEQ2SEQ = register_task(
    "seq2seq",
    data="token ids with those to write as labels, by name",
    measures="cross entropy; perplexity, token accuracy",
)(replace(_task("seq2seq", decoded_tokens), binding=_with_shift))
"""Token ids (B, S) with labels (B, T), the tokens to write; the decoder reads them shifted as the model does it."""
