"""Pruning with fewer tokens: the model without the others is pruned, on budgets of the one that has them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from prunekit.errors import ModelError, PlanError, UsageError
from prunekit.measure.model_size import count_macs, count_parameters
from prunekit.models.vocabulary import NOTE, Vocabulary, tokens_in
from prunekit.pruning.collected_statistics import Collected
from prunekit.pruning.library_layout import is_close, outputs_of
from prunekit.pruning.pruned import Pruned
from prunekit.pruning.sample_statistics import samples_for
from prunekit.settings.pruning import BudgetSettings, facts_of
from prunekit.utils.display import share
from prunekit.utils.files import json_values
from prunekit.utils.inputs import as_example, inputs_as_example, select_samples
from prunekit.utils.progress import stage

FIGURES = {"params": "parameters", "macs": "MACs"}
"""Budgets that are shares, of which the tokens take some, and what results call them."""


def with_fewer_tokens(request: Any, vocabulary: Any, tokenizer: Any) -> tuple[Any, Callable[[Pruned], Pruned]]:
    """Return the `Request` for the model without some tokens, and what notes in its result which and how much they are.

    Samples and examples are translated. Budgets of the whole model become those of the smaller one.
    """
    model, asked, sampled = request.model, request.settings, request.calibration is not None
    if vocabulary != "used" and not isinstance(vocabulary, Vocabulary):
        raise UsageError(f"vocabulary: expected 'used', or a prunekit.Vocabulary; got {vocabulary!r:.99}")
    if vocabulary == "used" and (tokenizer is None or not sampled):
        raise UsageError(
            "vocabulary: 'used' needs calibration=..., samples whose tokens stay, and tokenizer=..., the model's, as "
            f"what they are merged of stays too; got {'no tokenizer' if sampled else 'no calibration data'}"
        )
    others = {"stats": request.stats, "gradients": request.gradients, "max_drop": asked.budget.max_drop}
    beside = [name for name, value in others.items() if value is not None]
    beside += [name for name in asked.budget.given if facts_of(name).share and name not in (*FIGURES, "channels")]
    if beside := beside + ["what collect found"] * isinstance(request.calibration, Collected):
        raise UsageError(
            f"vocabulary: expected no {', '.join(beside)} beside it, which is of the model with all tokens: prune "
            "vocabulary.cut(model) instead, with vocabulary = prunekit.Vocabulary.used(model, tokenizer, ids)"
        )
    examples = [as_example(model, one) for one in (request.example, *request.more_examples) if one is not None]
    if sampled:
        stage("read the samples")
        read = samples_for(model, request.calibration, request.images, request.task)
        examples = [inputs_as_example(model, one) for one in (read, select_samples(read, slice(2)))] + examples
    if vocabulary == "used":
        vocabulary = Vocabulary.used(model, tokenizer, [[*tokens_in(model, one).values()] for one in examples])
    small = vocabulary.cut(model)
    translated = [vocabulary.example(model, one) for one in examples]
    runs = [(model, examples[sampled]), (small, as_example(small, translated[sampled]))]
    for old, new in zip(*(outputs_of(*run) for run in runs), strict=True):
        axis = next((axis for axis, size in enumerate(old.shape) if size != new.shape[axis]), None)
        if not is_close(old if axis is None else old.index_select(axis, vocabulary.kept.to(old.device)), new):
            raise ModelError(
                "vocabulary: with fewer tokens the model computes something else: it reads ids in a way that its "
                "configuration does not say; keep all tokens"
            )
    dense, fewer = ({"params": count_parameters(one), "macs": count_macs(one, given)} for one, given in runs)
    left = {name: fewer[name] / whole for name, whole in dense.items()}
    budgets = {name: value / left.get(name, 1.0) for name, value in asked.budget.given.items()}
    met = {name for name, value in budgets.items() if value >= 1 and name in left}
    if met and met == budgets.keys():
        raise PlanError(
            f"vocabulary: without the other tokens {' and '.join(f'{share(left[name])} of {name}' for name in met)} "
            "are left, within the budget: give a smaller one, or take prunekit.Vocabulary.used(...).cut(model)"
        )

    def noted(result: Pruned) -> Pruned:
        origin = result.plan.provenance
        found = {name: dict(one) for name, one in origin.get("budgets", {}).items()}
        for name in found.keys() & left.keys():
            found[name] |= {"asked": asked.budget.given[name], "left": found[name]["left"] * left[name]}
        whole = {figure: dense[name] for name, figure in FIGURES.items()}
        note = {"kept": vocabulary.kept.tolist(), "size": vocabulary.size, "dense": whole}
        provenance = {**origin, "prune": json_values(asked.noted), "budgets": found, NOTE: note}
        said = f"{len(vocabulary.kept):,} of {vocabulary.size:,} tokens stay"
        return replace(result, plan=replace(result.plan, provenance=provenance), notes=(said, *result.notes))

    given = translated[2 * sampled :]
    smaller = replace(
        request,
        model=small,
        example=None if request.example is None else given[0],
        calibration=translated[0] if sampled else None,
        more_examples=given[request.example is not None :],
        settings=replace(asked, budget=BudgetSettings(**budgets | dict.fromkeys(met, 1.0))),
        task=None,
    )
    return smaller, noted
