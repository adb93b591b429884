"""What a trace knows while labels flow: the fields of every tensor, merges and locks, constraints and costs."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn

from prunekit.channels.constraints import Constraint, LockRecord
from prunekit.channels.costs import MacTerm
from prunekit.channels.labels import LOCKED, Field, Labels, LabelUnion
from prunekit.channels.running import ModuleCall


class FlowState:
    """State of one trace, handed to every rule.

    Fields are kept on the tensors themselves, so they live exactly as long as the tensor does.

    Attributes:
        owner: what marks fields of this trace.
        model: the one that is traced, with the sizes that its modules remember.
        first_made: labels from here on are of tensors that the forward pass made, not of parameters.
        substituted: paths of modules whose equivalents are followed: the operators of the model's own are others.
        divided: of axes of parameters that are divided by the norm of what lies on each of their labels: it must not
            be zero, and need not, because a factor beside it is.
        module, operator: what runs now.
        call: which of the calls of that module it is.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model
        self.owner = object()
        self.union = LabelUnion()
        self.first_made: int | None = None
        self.locks: list[LockRecord] = []
        self.constraints: list[Constraint] = []
        self.statistics: dict[str, list[LockRecord]] = {}
        self.macs: list[MacTerm] = []
        self.count_macs = True
        self.batch = 1
        self.substituted: set[str] = set()
        self.divided: list[Labels] = []
        self.module = ""
        self.operator = ""
        self.call: ModuleCall | None = None

    def fields(self, tensor: Any) -> tuple[Field, ...]:
        """The fields of a tensor; none for anything else, and none that another trace left on a tensor that stayed."""
        owner, found = getattr(tensor, "_prunekit_fields", (None, ()))
        return found if owner is self.owner else ()

    def set(self, tensor: torch.Tensor, fields: Iterable[Field]) -> None:
        """Gives a tensor its fields; those without any span are dropped."""
        kept = tuple([field for field in fields if field.labels.size > 1])
        tensor._prunekit_fields = self.owner, kept  # type: ignore[attr-defined]

    def lock(self, fields: Iterable[Field | Labels | None], reason: str) -> None:
        """Locks every label of some fields and remembers why and where."""
        for field in fields:
            labels = field.labels if isinstance(field, Field) else field
            if labels is not None and labels.size:
                if not self._only_made(labels):
                    self.locks.append(self.record(labels, reason))
                self.union.lock(labels)

    def _only_made(self, labels: Labels) -> bool:
        """Whether no parameter has any of these labels: their lock means nothing to a user."""
        if self.first_made is None or labels.min() < self.first_made:
            return False
        roots = self.union.find(labels)
        return bool(((roots >= self.first_made) | (roots == LOCKED)).all())

    def is_made(self, field: Field) -> bool:
        """Whether a field has only labels of tensors that the forward pass made: it takes on any other axis."""
        return self.first_made is not None and bool(field.labels.min() >= self.first_made)

    def record(self, labels: Labels, reason: str) -> LockRecord:
        """A lock at the running operator."""
        return LockRecord(reason, self.module, self.operator, labels.reshape(-1), call=self.call)

    def lock_if_read(self, tensor: torch.Tensor, labels: Labels, reason: str) -> None:
        """Locks labels once an operator or the model's output takes a tensor, which few callers of attention do."""
        tensor._prunekit_unread = self.record(labels, reason)  # type: ignore[attr-defined]

    def read(self, tensor: torch.Tensor) -> None:
        """Notes that something takes a tensor."""
        record = getattr(tensor, "_prunekit_unread", None)
        if record is not None:
            self.union.lock(record.labels)
            self.locks.append(record)

    def take_statistics(self, field: Field, reason: str | None) -> None:
        """Notes that the running module reduces over all of a labeled axis: its end decides, see `NormWatch`.

        Args:
            reason: for the lock if the module is not a norm; None where removed zeros do no harm then.
        """
        taken = self.statistics.setdefault(self.module, [])
        if reason is not None:
            taken.append(self.record(field.labels, reason))

    def fix(self, labels: Labels | None) -> None:
        """Locks labels that no user would expect to prune, such as a kernel's height: not reported."""
        if labels is not None:
            self.union.lock(labels)

    def on_axis(
        self, tensor: Any, axis: int, reason: str, *, beside: Container[tuple[int, ...]] = ()
    ) -> tuple[Labels | None, bool]:
        """The labels along one axis as a vector with their zero flag; fields that mix it with other axes are locked.

        Args:
            beside: spans of fields that the caller follows itself.
        """
        found: Labels | None = None
        zero = False
        for field in self.fields(tensor):
            if field.span == (axis,):
                labels = field.labels.reshape(-1)
                if found is not None:
                    self.union.merge(found, labels)
                found, zero = labels, zero or field.zero
            elif axis in field.span and field.span not in beside:
                self.lock([field], reason)
        return found, zero

    def alike_along(self, axis: int, fields: Iterable[Field], reason: str) -> list[Field]:
        """Lock the fields that lie along an axis alone, and tie along it those that lie on others too."""
        every = list(fields)
        self.lock([field for field in every if field.span == (axis,)], reason)
        rest = [field for field in every if field.span != (axis,)]
        return [f.with_labels(self.union.tie(f.labels, [axis])) if axis in f.span else f for f in rest]

    def join(self, left: Labels | None, right: Labels | None, reason: str) -> Labels | None:
        """Merges two label vectors of one axis; where only one side is labeled, it is locked."""
        if left is None or right is None:
            self.lock([left, right], reason)
            return None
        if left.shape == right.shape:
            self.union.merge(left, right)
            return left
        self.lock([left, right], reason)
        return None

    def add_macs(self, constant: float, factors: Iterable[Labels | None]) -> None:
        """Counts an operator's multiply-accumulates, given for the whole batch."""
        if self.count_macs:
            labels = tuple(factor for factor in factors if factor is not None)
            self.macs.append(MacTerm(self.module, self.operator, constant / self.batch, labels))
