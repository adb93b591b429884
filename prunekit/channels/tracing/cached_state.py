"""Cached state: what a model returns for its own next call, such as the keys and values of a decoder.

A model that returns something under the name of one of its optional arguments, which the example leaves out, returns
its state: transformers' `past_key_values`, Mamba's `cache_params`. Nobody reads it but the model, so it may shrink with
its layers. To know that both calls agree, a trace and its trial call the model twice: on the example, and once more
with the state that it returned.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.execution import as_in_trace
from prunekit.errors import reason_of
from prunekit.hooks.model_copy import with_tensors
from prunekit.utils.inputs import Keywords, arguments_by_name, call, parameters_of
from prunekit.utils.outputs import ALL_READ, ReadOutputs, named_parts
from prunekit.utils.tensors import gather, map_tensors

Arguments = dict[str | int, Any]


@dataclass(frozen=True)
class ModelCalls:
    """The calls of a model on one example: one, or two where it returns state, the second with that state."""

    read: ReadOutputs = ALL_READ  # which outputs are read
    # makes the arguments of the second call, with the state, of those of the first; None: there is none
    following: Callable[[Arguments], Arguments] | None = None
    refused: str = ""  # why there is no second call though the model returns state; empty otherwise
    refused_state: tuple[str, ...] = ()  # names of that state

    def outputs(self, model: nn.Module, example: tuple[Any, ...]) -> Iterator[Any]:
        """Yield what a model returns in each call."""
        output = call(model, example)
        yield output
        if self.following is not None:
            parts = named_parts(output)
            state = {name: parts[name] for name in self.read.state if parts.get(name) is not None}
            if state:
                yield call(model, _with(self.following(arguments_by_name(model, example)), state))

    def advice_on(self, name: str) -> str:
        """Return what can be done about an output that need not be read, to be added to its name; empty for others."""
        if name.partition(".")[0] in self.refused_state:
            return f", cached state: {self.refused}; if nothing but the model reads it, name the others in outputs="
        return "" if self.read.names or self.read.function else "; if nothing reads it, name the others in outputs="


ONE_CALL = ModelCalls()


def model_calls(model: nn.Module, example: tuple[Any, ...], read: ReadOutputs = ALL_READ) -> ModelCalls:
    """Return the calls of a model on an example.

    Whether it returns state, and how it takes it back, is tried on a copy without gradients; a model whose forward has
    no optional arguments is not run.
    """
    arguments = arguments_by_name(model, example)
    free = {one.name for one in parameters_of(model) if one.default is None and arguments.get(one.name) is None}
    if not free or not all(isinstance(name, str) for name in arguments):
        return ModelCalls(read)
    twin = with_tensors(model, {})
    try:
        with as_in_trace(twin, False):
            parts = named_parts(call(twin, example))
            state = {name: part for name, part in parts.items() if name in free and gather(part)}
            return _with_state(twin, arguments, state, read) if state else ModelCalls(read)
    except Exception:  # the trace will say why the model does not run
        return ModelCalls(read)


def _with_state(model: nn.Module, arguments: Arguments, state: dict[str, Any], read: ReadOutputs) -> ModelCalls:
    """Return two calls, the second in the first way that a model takes its state back."""
    failures = []
    for following in (next_position, Arguments):  # one position further, or the same again
        try:
            call(model, _with(following(arguments), map_tensors(state, torch.clone)))
        except Exception as error:  # whatever the model's code makes of these arguments
            failures.append(reason_of(error))
        else:
            return ModelCalls(replace(read, state=tuple(state)), following)
    refused = f"no second call with it runs on this example ({failures[-1]})"
    return ModelCalls(read, refused=refused, refused_state=tuple(state))


def _with(arguments: Arguments, state: dict[str, Any]) -> tuple[Any, ...]:
    """Return an example of arguments by name and the state."""
    return (Keywords({str(name): value for name, value in arguments.items()} | state),)


def next_position(arguments: Arguments) -> Arguments:
    """Return arguments for one more position of a sequence: its last token again, with its mask one longer.

    Only what the decoder reads grows, where the model also has an encoder: arguments named `decoder_...`.
    """
    decoder = any(str(name).startswith("decoder_") for name in arguments)
    own = {name: value for name, value in arguments.items() if str(name).startswith("decoder_") == decoder}
    length = next((value.shape[1] for value in own.values() if isinstance(value, Tensor) and value.dim() > 1), 0)
    if length == 0:
        raise ValueError("no argument is a sequence")
    return {**arguments, **{name: _one_more(str(name), value, length) for name, value in own.items()}}


def _one_more(name: str, value: Any, length: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != length:
        return value
    last = value[:, -1:]
    if "mask" in name:
        return torch.cat([value, torch.ones_like(last)], 1)
    return last + 1 if "position_ids" in name else last
