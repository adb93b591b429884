"""EleutherAI's lm-eval: pruned language models of any layout as models of its harness."""

from typing import Any

from torch import nn

from prunekit.jobs.analyses.language_tasks import harness_model as wrapped
from prunekit.modes.public_call import public_call
from prunekit.utils.availability import require_library

require_library("lm_eval", "language")


@public_call
def harness_model(model: nn.Module, tokenizer: Any, *, batch: int | str = 1, **more: Any) -> Any:
    """Return a language model as the `HFLM` that `lm_eval.simple_evaluate(model=...)` takes.

    It runs where the model is, in eval mode. In layouts other than `huggingface` lm-eval cannot open a folder itself.

    Args:
        model: of transformers, dense or pruned in any layout.
        tokenizer: of transformers, the one that the model was trained with.
        batch: requests computed at once; `auto` tries how many fit into memory.
        more: further arguments of `HFLM`, such as `max_length`.

    Raises:
        ModelError: it is no model of transformers, or does not embed all ids of the tokenizer.

    Example:
        >>> import lm_eval, prunekit as pk
        >>> from transformers import AutoTokenizer
        >>> from prunekit.integrations.lm_eval import harness_model
        >>> tokenizer = AutoTokenizer.from_pretrained("smollm2")  # doctest: +SKIP
        >>> small = harness_model(pk.load("runs/half/model"), tokenizer, batch=8)  # doctest: +SKIP
        >>> lm_eval.simple_evaluate(small, tasks=["arc_easy"])["results"]  # doctest: +SKIP
    """
    return wrapped(model, tokenizer, batch, **more)
