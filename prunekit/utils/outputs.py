"""Outputs of models: the names of their parts, and which of them anybody reads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

from torch import Tensor

from prunekit.errors import UsageError
from prunekit.utils.display import listed
from prunekit.utils.tensors import gather

Outputs = str | int | Sequence[str | int] | Callable[[Any], Any]
"""Names or positions of outputs, such as `"logits"`, `0` or `"1.boxes"`; or a function that returns those to read."""

SHOWN = 12
"""How many names of outputs a message lists."""


@dataclass(frozen=True)
class ReadOutputs:
    """The parts of a model's output that are read, and so must stay as they are."""

    names: tuple[str, ...] = ()  # paths such as `logits` or `1.boxes`; empty: all of them
    function: Callable[[Any], Any] | None = None  # returns the parts from an output, in place of names
    state: tuple[str, ...] = ()  # names of parts that only the model's next call reads, such as cached keys and values

    @classmethod
    def given(cls, outputs: Outputs | None) -> Self:
        """Return what the user gave as `outputs=`."""
        if outputs is None:
            return cls()
        if callable(outputs):
            return cls(function=outputs)
        every = [outputs] if isinstance(outputs, (str, int)) else outputs
        if not isinstance(every, Sequence) or not every or not all(type(one) in (str, int) for one in every):
            raise UsageError(
                "outputs: expected names or positions of outputs, such as 'logits' or [0, '1.boxes'], or a function of "
                f"the model's output; got {outputs!r}"
            )
        return cls(names=tuple(map(str, every)))

    @classmethod
    def from_text(cls, text: Mapping[str, Any]) -> Self:
        """Return what `as_text` returned; a function is not kept, and raises `UsageError` where outputs are read."""
        function = _not_kept if text.get("function") else None
        return cls(tuple(text.get("names", ())), function, tuple(text.get("state", ())))

    def as_text(self) -> dict[str, Any]:
        """Return names, and whether there is a function, for a JSON file."""
        return {"names": list(self.names), "state": list(self.state), "function": self.function is not None}

    def of(self, output: Any) -> Any:
        """Return the parts of an output that are read, in a nesting of their own; raise if it has no such part."""
        if self.function is not None:
            return self.function(output)
        if self.names:
            return [_at(output, name) for name in self.names]
        own = named_parts(output) if self.state else {}
        return [part for name, part in own.items() if name not in self.state] if own else output

    def tensors(self, output: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are read, each with its name; the name is empty where there is but one output."""
        if self.function is not None:
            yield from (("", tensor) for tensor in gather(self.function(output)))
        elif self.names:
            yield from ((name, tensor) for name in self.names for tensor in gather(_at(output, name)))
        else:
            named = _named(output, "")
            yield from ((name, tensor) for name, tensor in named if name.partition(".")[0] not in self.state)


ALL_READ = ReadOutputs()


def named_parts(output: Any) -> dict[str, Any]:
    """Return the parts of an output by name: of a mapping, a named tuple or a dataclass; empty for anything else."""
    if isinstance(output, Mapping):
        return {str(key): value for key, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        return dict(output._asdict())
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return {}


def _not_kept(output: Any) -> Any:
    raise UsageError(
        "outputs: the plan was made for the outputs that a function returns, and a file does not keep a function; give "
        "it again, as in verify(masked, compact, plan, x, outputs=function)"
    )


def _parts(output: Any) -> dict[str, Any]:
    """Return the parts of an output by name, or by position."""
    if isinstance(output, (tuple, list)) and not hasattr(output, "_asdict"):
        return {str(position): part for position, part in enumerate(output)}
    return named_parts(output)


def _named(output: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its name; items of a list that is itself a part share the name of that part."""
    for key, part in _parts(output).items():
        inside = name if name and key.isdecimal() and not named_parts(part) else f"{name}.{key}" if name else key
        if isinstance(part, Tensor) or not _parts(part):
            yield from ((inside, tensor) for tensor in gather(part))
        else:
            yield from _named(part, inside)
    if not _parts(output):
        yield from ((name, tensor) for tensor in gather(output))


def _at(output: Any, name: str) -> Any:
    part = output
    for key in name.split("."):
        own = _parts(part)
        if key in own:
            part = own[key]
            continue
        known = [known for known in dict.fromkeys(known for known, _ in _named(output, "")) if known]
        if known:
            raise UsageError(f"outputs: the model returns no {name!r}; it returns {listed(known, SHOWN)}")
        raise UsageError(
            f"outputs: expected a name or a function of the output, got {name!r}; the model returns one tensor alone"
        )
    return part
