"""A model's modules as a table: text, CSV, and a self-contained HTML page."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.errors import ModelError
from prunekit.hooks.model_copy import named_tensors
from prunekit.hooks.wrappers import unwrapped
from prunekit.known_names import FLOAT_DTYPES
from prunekit.measure.model_size import ModuleRow, Shapes, count_bytes, count_memory, module_table
from prunekit.modes.public_call import public_call
from prunekit.utils.display import Displayed, Table, count, share, size
from prunekit.utils.files import StrPath, write_csv
from prunekit.utils.inputs import as_example, to_device

NAMES = {getattr(torch, torch_name): name for name, torch_name in FLOAT_DTYPES.items()}


@dataclass(frozen=True, repr=False)
class ModelSummary(Displayed):
    """A table of a model's modules in order of execution, with totals.

    Attributes:
        name: name of the model.
        modules: see `ModuleRow`; parameters that several modules share count in the first.
        batch: batch size of the example, to which shapes and bytes belong.
        params, trainable: elements of all parameters; `trainable` of those with `requires_grad`.
        macs: multiply-accumulates for one sample, as `FlopCounterMode` counts them.
        activation_bytes: bytes of all rows, about what a backward pass needs.
        weight_bytes: bytes of parameters and buffers.
        peak_bytes: most bytes alive at once in a forward pass without gradients, see
            `prunekit.measure.model_size.count_memory`; None if that cannot be counted, as in float64.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> print(pk.summary(model, x, name="small"))
          module  type    input  output  parameters  MACs   share  activations  calls
          0       Linear  4x8    4x16           144   128  80.0 %        256 B      1
          1       ReLU    4x16   4x16             0     0   0.0 %        256 B      1
          2       Linear  4x16   4x2             34    32  20.0 %         32 B      1
        <BLANKLINE>
        small: 178 parameters, 160 MACs for one sample, 712 B of weights; batch 4: 544 B
          of activations, 1.35 kB at the peak of a forward pass
    """

    name: str
    modules: tuple[ModuleRow, ...]
    batch: int
    params: int
    trainable: int
    macs: int
    activation_bytes: int
    weight_bytes: int
    peak_bytes: int | None

    def _parts(self) -> Iterator[str | Table]:
        total = self.macs or 1
        rows = [
            (
                row.path or "(root)",
                row.kind,
                shapes_text(row.inputs),
                shapes_text(row.outputs),
                count(row.params) + (f" (+{count(row.shared_params)} shared)" if row.shared_params else ""),
                count(row.macs),
                share(row.macs / total),
                size(row.activation_bytes),
                row.calls,
            )
            for row in self.modules
        ]
        headings = ("module", "type", "input", "output", "parameters", "MACs", "share", "activations", "calls")
        yield Table(headings, rows, text=("type", "input", "output"))
        yield self._headline()

    def _headline(self) -> str:
        frozen = f" ({count(self.params - self.trainable)} frozen)" if self.params > self.trainable else ""
        peak = "" if self.peak_bytes is None else f", {size(self.peak_bytes)} at the peak of a forward pass"
        return (
            f"{self.name}: {count(self.params)} parameters{frozen}, {count(self.macs)} MACs for one sample, "
            f"{size(self.weight_bytes)} of weights; batch {self.batch}: {size(self.activation_bytes)} of activations"
            f"{peak}"
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as plain values; shapes as text, such as `1x3x224x224`."""
        return [
            {**asdict(row), "inputs": shapes_text(row.inputs), "outputs": shapes_text(row.outputs)}
            for row in self.modules
        ]

    def to_csv(self, path: StrPath) -> Path:
        """Write the rows as a CSV file, atomically."""
        write_csv(Path(path), self.rows())
        return Path(path)

    def to_html(self) -> str:
        """Return a page that needs no other file."""
        from prunekit.report.rendering import rendered

        totals = self._headline().partition(": ")[2]
        return rendered("summary.html", summary=self, totals=totals, records=self.rows())


@public_call
def summary(model: nn.Module, example: Any, *, name: str | None = None) -> ModelSummary:
    """Return shapes, parameters, MACs and activation memory of each module, by one forward pass in eval mode.

    For dense, masked and compact models of any kind; modes, random state and hooks are afterwards what they were.

    Args:
        model: the model, which is not changed.
        example: a tensor, a tuple of positional arguments or a mapping of arguments by name; batch first.
        name: name of the model; None: its class.

    Raises:
        UsageError: the example is none of these.
        ModelError: the model is compiled, or does not run on the inputs.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> print(pk.summary(model, torch.zeros(1, 4)))
          module  type    input  output  parameters  MACs   share  activations  calls
          0       Linear  1x4    1x16            80    64  66.7 %         64 B      1
          1       ReLU    1x16   1x16             0     0   0.0 %         64 B      1
          2       Linear  1x16   1x2             34    32  33.3 %          8 B      1
        ...
        Sequential: 114 parameters, 96 MACs for one sample, 456 B of weights; batch 1:
          136 B of activations, 600 B at the peak of a forward pass
    """
    model = unwrapped(model, offloaded=True)
    given = as_example(model, example)
    if all(tensor.is_meta for _, tensor in named_tensors(model)):
        given = to_device(given, torch.device("meta"))  # shapes need no values
    found = module_table(model, given)
    parameters = list(model.parameters())
    return ModelSummary(
        name or type(model).__name__,
        found.rows,
        found.batch,
        params=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        macs=found.macs,
        activation_bytes=sum(row.activation_bytes for row in found.rows),
        weight_bytes=count_bytes(model),
        peak_bytes=_peak(model, given, found.batch),
    )


def _peak(model: nn.Module, given: tuple[Any, ...], batch: int) -> int | None:
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if len(kinds) != 1 or not kinds <= NAMES.keys():
        return None
    try:
        return count_memory(model, given, batch, NAMES[kinds.pop()])
    except ModelError:  # it runs where it is, but not as a copy on the CPU
        return None


def shapes_text(shapes: Shapes) -> str:
    """Return shapes as text, such as `1x64x8x8, 1x10`; of more than three only two and their number."""
    texts = ["x".join(map(str, shape)) or "scalar" for shape in shapes]
    return ", ".join(texts) if len(texts) <= 3 else f"{', '.join(texts[:2])}, ... ({len(texts)})"
