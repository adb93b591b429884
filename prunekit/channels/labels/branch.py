"""Branches: parts of a model beside a stream, which compute a constant once their own channels are gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.labels.label_union import Labels

MOST_RESULTS = 1000
"""Entries of a tuple that a module returns."""
Step = tuple[Any, ...]
"""One step of a module's own code: a kind, what it runs, and the numbers of the values that it reads.

`("call", path, value)` calls a child, `("add" | "mul", value, value)` combines two values, `("parameter", name)` reads
one of the module's own, and `("function", name, arguments, value)` applies a function of one tensor. `("other", name)`
is anything else.
"""


@dataclass(frozen=True)
class Replacement:
    """The stand-in for a module that goes."""

    module: str  # its path
    # whether it returns the constant of its branch; else it returns its input, which nothing reads
    constant: bool = False
    bias: str | None = None  # the name, in the module, of the tensor that is the constant; None for zeros
    # of the constant, so that it broadcasts to the module's output; -1 where its entries lie
    shape: tuple[int, ...] = ()
    # where the tensor is in a tuple that the module returns, and how many entries that has; None if it returns the
    # tensor itself
    place: tuple[int, int] | None = None
    # the axis along which it returns nothing, where the module computed a part of a concatenation
    empty: int | None = None
    as_input: bool = False  # whether the module returned a tensor of the shape of its first argument

    def as_json(self) -> list[Any]:
        """Return the replacement as JSON values."""
        place = None if self.place is None else list(self.place)
        return [self.module, self.constant, self.bias, list(self.shape), place, self.empty, self.as_input]

    @classmethod
    def from_json(cls, found: Any) -> Replacement:
        """Return the replacement of JSON values; raises ValueError or TypeError if they are none."""
        module, constant, bias, shape, place, empty, as_input = found
        if not isinstance(bias, str | None):
            raise TypeError(f"expected the name of a tensor, got {bias!r}")
        place = None if place is None else (int(place[0]), int(place[1]))
        if place is not None and not 0 <= place[0] < place[1] <= MOST_RESULTS:
            raise ValueError(f"expected a place among at most {MOST_RESULTS} results, got {place}")
        empty = None if empty is None else int(empty)
        return cls(str(module), bool(constant), bias, tuple(map(int, shape)), place, empty, bool(as_input))


@dataclass(frozen=True)
class ModuleBody:
    """The code of a module that loses a branch of its own, as steps."""

    module: str  # its path
    steps: tuple[Step, ...]  # value 0 is its input, value i + 1 what step i computes
    result: int  # the number of the value that it returns

    def as_json(self) -> list[Any]:
        """Return the code as JSON values."""
        return [self.module, [list(step) for step in self.steps], self.result]

    @classmethod
    def from_json(cls, found: Any) -> ModuleBody:
        """Return the code of JSON values; raises ValueError or TypeError if they are none."""
        module, steps, result = found
        body = cls(str(module), tuple(_step(step) for step in steps), int(result))
        values = [(value, index) for index, step in enumerate(body.steps) for value in read_by(step)]
        for value, last in (*values, (body.result, len(body.steps))):
            if type(value) is not int or not 0 <= value <= last:
                raise ValueError(f"expected the number of a value that is there, up to {last}, got {value!r:.50}")
        return body


@dataclass(frozen=True, eq=False)
class Branch:
    """A part of a model whose result is added to a stream, and which may go.

    It goes if all channels inside it do: its result is then a constant, one number for each channel of the stream. It
    stays if one of them does. In a masked model all weights of a branch that is gone are zero, but for that constant.
    """

    name: str  # the path of the module that computes it, or of the one around all of its modules
    parts: tuple[Labels, ...]  # the labels of each of its groups, in the numbering of the map
    last: Labels  # labels of the channels that its last layer reads
    replacements: tuple[Replacement, ...]  # for every module that goes with it
    layers: tuple[str, ...] = ()  # names of the weights of its layers
    body: str | None = None  # path of the module around it whose own code is replaced too; None if that runs as it is
    steps: tuple[int, ...] = ()  # numbers of the steps of that code which go
    # paths of the modules whose own code runs on the constant, which is smaller than what it stands for
    small: tuple[str, ...] = ()

    @cached_property
    def labels(self) -> Labels:
        """Labels of all channels inside it."""
        return np.concatenate(self.parts)

    @cached_property
    def presence(self) -> Labels:
        """Those of its smallest group, of which one is kept as long as the branch is there."""
        return min(self.parts, key=len)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that go."""
        return tuple(one.module for one in self.replacements)

    @cached_property
    def constant(self) -> str | None:
        """The name of the tensor that stays as the constant; None if that is zero."""
        return next((f"{one.module}.{one.bias}" for one in self.replacements if one.bias is not None), None)

    def as_json(self) -> dict[str, Any]:
        """Return all but the labels as JSON values, and the number of groups."""
        return {
            "name": self.name,
            "parts": len(self.parts),
            "replacements": [one.as_json() for one in self.replacements],
            "layers": list(self.layers),
            "body": self.body,
            "steps": list(self.steps),
            "small": list(self.small),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any], parts: tuple[Labels, ...], last: Labels) -> Branch:
        """Return the branch of JSON values and labels."""
        replacements = tuple(map(Replacement.from_json, found["replacements"]))
        rest = {key: tuple(found[key]) for key in ("layers", "steps", "small")}
        name, body = found["name"], found["body"]
        texts = (name, *rest["layers"], *rest["small"], *(() if body is None else (body,)))
        if not all(isinstance(text, str) for text in texts) or not all(type(step) is int for step in rest["steps"]):
            raise TypeError(f"expected names of modules and tensors, and numbers of steps, got {texts!r:.99}")
        return cls(name, parts, last, replacements, body=body, **rest)

    def loses(self, name: str) -> bool:
        """Return whether a tensor of the model goes with it."""
        return name != self.constant and is_inside(name.rpartition(".")[0], self.modules)


@dataclass(frozen=True)
class BranchLock:
    """A branch that stays, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Shortening:
    """All that a compact model has in place of the branches that are gone."""

    replacements: tuple[Replacement, ...] = ()  # for every module that goes
    bodies: tuple[ModuleBody, ...] = ()  # for every module whose own code is replaced, the steps that are left

    def __bool__(self) -> bool:
        return bool(self.replacements)

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that go."""
        return tuple(one.module for one in self.replacements)

    def as_json(self) -> dict[str, Any]:
        """Return the shortening as JSON values."""
        return {
            "replacements": [one.as_json() for one in self.replacements],
            "bodies": [one.as_json() for one in self.bodies],
        }

    @classmethod
    def from_json(cls, found: Any) -> Shortening:
        """Return the shortening of JSON values."""
        if not isinstance(found, dict):
            raise ValueError("expected an object with replacements and bodies")
        replacements = tuple(map(Replacement.from_json, found["replacements"]))
        return cls(replacements, tuple(map(ModuleBody.from_json, found["bodies"])))


WHOLE = Shortening()
"""Of a model that keeps all branches."""


ARITY = {"call": 3, "add": 3, "mul": 3, "parameter": 2, "function": 4, "other": 2}
"""Entries of each kind of step."""


def _step(step: Any) -> Step:
    """Return a step of JSON values, whose lists are tuples."""
    if (
        not isinstance(step, (list, tuple))
        or not step
        or not isinstance(step[0], str)
        or ARITY.get(step[0]) != len(step)
        or (step[0] not in ("add", "mul") and not isinstance(step[1], str))
        or (step[0] == "function" and not isinstance(step[2], (list, tuple)))
    ):
        raise ValueError(f"expected a step, got {step!r}")
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in step)


def _without(body: ModuleBody, gone: set[int]) -> ModuleBody:
    """Return the code without some steps, and without those that nothing reads then, numbered again."""
    used = {body.result}
    for index in reversed(range(len(body.steps))):
        if index + 1 in used and index not in gone:
            used.update(read_by(body.steps[index]))
    number, steps = {0: 0}, list[Step]()
    for index, step in enumerate(body.steps):
        if index not in gone and index + 1 in used:
            steps.append(_renumbered(step, number))
            number[index + 1] = len(steps)
    return replace(body, steps=tuple(steps), result=number[body.result])


def read_by(step: Step) -> tuple[int, ...]:
    """Return the numbers of the values that a step reads."""
    kind, *rest = step
    if kind in ("add", "mul"):
        return tuple(rest)
    return (rest[-1],) if kind in ("call", "function") and rest[-1] is not None else ()


def _renumbered(step: Step, number: Mapping[int, int]) -> Step:
    """Return a step that reads values by other numbers; a call that reads what is gone is that of a constant."""
    kind, *rest = step
    if kind in ("add", "mul"):
        return (kind, *(number[value] for value in rest))
    if kind in ("call", "function"):
        return (kind, *rest[:-1], number.get(rest[-1]))
    return step


@dataclass(frozen=True, eq=False)
class Branches:
    """All branches of a model: those that may go, the code around them, and those that stay.

    A branch goes under a plan if the plan keeps none of its channels.
    """

    found: tuple[Branch, ...] = ()  # that may go
    # the whole code of the modules that may lose branches of their own
    bodies: Mapping[str, ModuleBody] = field(default_factory=dict)
    locks: tuple[BranchLock, ...] = ()  # of those that stay

    def gone(self, keep: NDArray[np.bool_]) -> tuple[Branch, ...]:
        """Return the branches that go under a plan, bool (n_labels,)."""
        return tuple(branch for branch in self.found if not keep[branch.presence].any())

    def tied(self, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return a choice in which a branch without channels in one of its groups has none in the others."""
        keep = keep.copy()
        for branch in self.found:
            if not all(keep[part].any() for part in branch.parts):
                keep[branch.labels] = False
        return keep

    def shortening(self, keep: NDArray[np.bool_]) -> Shortening:
        """Return what a compact model has in place of the branches that are gone."""
        branches, steps = self.gone(keep), dict[str, set[int]]()
        for branch in branches:
            if branch.body is not None:
                steps.setdefault(branch.body, set()).update(branch.steps)
        left = tuple(_without(self.bodies[path], gone) for path, gone in steps.items())
        return Shortening(tuple(one for branch in branches for one in branch.replacements), left)


NO_BRANCHES = Branches()


def is_inside(path: str, parts: Iterable[str]) -> bool:
    """Return whether a module is one of some parts, or inside one of them."""
    return any(path == part or path.startswith(f"{part}.") for part in parts)
