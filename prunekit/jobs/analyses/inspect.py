"""Inspection of a model: channels that are coupled or locked, blocks that may go, MACs by layer, and how it is fed."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.backends.files.exported_model import ExportedModel, is_exported, open_exported
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.model_folder import folder_interface
from prunekit.errors import UsageError
from prunekit.hooks.wrappers import unwrapped
from prunekit.jobs.run.command_subject import Subject
from prunekit.measure.model_size import count_macs, count_parameters
from prunekit.models.interface import ModelInterface, attached, interface_of
from prunekit.modes.public_call import public_call
from prunekit.utils.display import Displayed, Table, count, listed, plural, share, size
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import as_example, running

WHOLE = 10_000
"""The most characters of a cell: reasons are shown whole."""


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Displayed):
    """An inspection of a model."""

    target: Subject  # the model
    channel_map: ChannelMap  # of it

    def figures(self) -> dict[str, Any]:
        """Return channel groups, locks, blocks and layers as plain data."""
        target, chart = self.target, self.channel_map
        return {
            "model": target.name,
            "architecture": type(target.model).__name__,
            "input_shape": [1, *target.sample_shape],
            "params": count_parameters(target.model),
            "macs": count_macs(target.model, target.example_inputs),
            "free_share": chart.free_share(name for name, _ in target.model.named_parameters()),
            "groups": [
                {"name": group.name, "channels": len(group.labels), "axes": len(group.slots)} for group in chart.groups
            ],
            "locks": [asdict(lock) for lock in chart.locks],
            "blocks": chart.block_rows(),
            "block_locks": [{"block": lock.name, "reason": lock.reason} for lock in chart.branches.locks],
            "layers": self.rows(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each layer: its kind, its multiply-accumulates and its own parameters."""
        modules = dict(self.target.model.named_modules())
        return [
            {
                "module": path,
                "kind": type(modules[path]).__name__,
                "macs": macs,
                "params": sum(parameter.numel() for parameter in modules[path].parameters(recurse=False)),
            }
            for path, macs in self.channel_map.layer_macs().items()
        ]

    def _headline(self) -> str:
        found = self.figures()
        return (
            f"{found['model']} ({found['architecture']}), input {'x'.join(map(str, found['input_shape']))}: "
            f"{count(found['params'])} parameters, {count(found['macs'])} MACs, {share(found['free_share'])} of the "
            "parameters can be pruned"
        )

    def _parts(self) -> Iterator[str | Table]:
        found = self.figures()
        total = found["macs"] or 1
        yield self._headline()
        rows: list[tuple[Any, ...]] = [(row["name"], row["channels"], row["axes"]) for row in found["groups"]]
        title = f"{plural(len(rows), 'channel group')} (channels that are kept or removed together)"
        yield Table(("group", "channels", "axes"), rows, title=title)
        rows = [(row["module"] or "(root)", row["operator"], row["channels"], row["reason"]) for row in found["locks"]]
        heads, title = ("module", "operator", "channels", "reason"), f"{plural(len(rows), 'lock')} (channels that are"
        yield Table(heads, rows, ("operator", "reason"), f"{title} kept, and why)", widest=WHOLE)
        rows = [
            (row["block"], len(row["layers"]), row["channels"], count(row["macs"]), share(row["share"]))
            for row in found["blocks"]
        ]
        title = f"{plural(len(rows), 'block')} (residual branches and parts of concatenations that may go as a whole)"
        yield Table(("block", "layers", "channels", "MACs", "share"), rows, title=title)
        if staying := [(row["block"] or "(root)", row["reason"]) for row in found["block_locks"]]:
            title = f"{plural(len(staying), 'block')} that stay{'s'[: len(staying) == 1]}, and why"
            yield Table(("block", "reason"), staying, ("reason",), title, widest=WHOLE)
        costs = ((count(row["macs"]), share(row["macs"] / total), count(row["params"])) for row in found["layers"])
        rows = [
            (row["module"] or "(root)", row["kind"], *each) for row, each in zip(found["layers"], costs, strict=True)
        ]
        yield Table(("module", "kind", "MACs", "share", "parameters"), rows, ("kind",), "MACs by layer")


@dataclass(frozen=True, eq=False, repr=False)
class FileInspection(Displayed):
    """The contents of an exported file, as it states them."""

    model: ExportedModel  # the file

    def figures(self) -> dict[str, Any]:
        """Return the sizes of its files, and its interface, as plain data."""
        sizes = {file.name: file.stat().st_size for file in self.model.files}
        known = {"model": str(self.model.path), "format": self.model.form}
        return {**known, "files": sizes, "bytes": sum(sizes.values()), **self.model.interface.as_dict()}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each input and output, and for the task, the classes and the preprocessing."""
        known = self.model.interface
        shown = [("input", str(spec)) for spec in known.inputs] + [("output", str(spec)) for spec in known.outputs]
        shown += [("task", known.task)] if known.task else []
        shown += [("classes", f"{len(known.classes)}: {listed(known.classes, 10)}")] if known.classes else []
        if known.preprocessing is not None:
            given = known.preprocessing.as_dict().items()
            shown.append(("preprocessing", ", ".join(f"{name} {value}" for name, value in given)))
        return [{"what": what, "is": said} for what, said in shown]

    def _headline(self) -> str:
        files = plural(len(self.model.files), "file")
        return f"{self.model.path} ({self.model.form}): {size(self.figures()['bytes'])} in {files}"

    def _parts(self) -> Iterator[str | Table]:
        cells = [(row["what"], row["is"]) for row in self.rows()]
        yield Table(("what", "is"), cells, ("is",), self._headline(), widest=WHOLE)


def inspect(target: Subject) -> Inspection | FileInspection:
    """Trace a model, and return what can be pruned of it; of an exported file, what it says of itself."""
    if isinstance(target.model, ExportedModel):
        return FileInspection(target.model)
    target.probe()
    return Inspection(target, trace(target.model, target.example_inputs))


@public_call
def interface(model: nn.Module | StrPath, example: Any = None, *, allow_code: bool = False) -> ModelInterface:
    """Return how a model is fed: inputs and outputs by name, task, classes, and the preprocessing of images.

    Args:
        model: that `prunekit.load` returned, or any with an example; or the path of a model folder or an exported file.
        example: of its inputs: a tensor, a tuple of positional arguments, or a mapping by name; the model is run once.
        allow_code: whether an exported file may be loaded though it could run code, as a program of ExecuTorch is to
            read its interface.

    Raises:
        ArtifactError: there is no such folder or file, or its interface is damaged.
        UsageError: it is none of these, or an example is needed.
        ModelError: the model does not run on the example.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 2))
        >>> small = pk.prune(model, torch.randn(1, 3, 8, 8), macs=0.5)
        >>> folder = pk.save(small, "small", preprocessing=pk.Preprocessing(8, 8), classes=["cat", "dog"])
        >>> found = pk.interface(folder)
        >>> print(found.inputs[0], "->", found.outputs[0])
        input: float32 (batch, 3, 8, 8) -> output: float32 (batch, 2)
        >>> found.classes
        ('cat', 'dog')
        >>> pk.interface(pk.load(folder, model=model)) == found
        True
    """
    if not isinstance(model, nn.Module):
        if not isinstance(model, (str, PathLike)):
            raise UsageError(f"expected a model, or the path of a folder or a file, got {type(model).__name__}")
        path = Path(model)
        return open_exported(path, allow_code=allow_code).interface if is_exported(path) else folder_interface(path)
    own = unwrapped(model)
    known = own.interface if isinstance(own, ExportedModel) else attached(own)
    if example is None and known is not None:
        return known
    if example is None:
        raise UsageError(
            f"{type(own).__name__}: expected an example of its inputs too, or a model that prunekit.load returned"
        )
    given = as_example(own, example)
    with running(own, given):
        found = interface_of(own, given)
    if known is None:
        return found
    return ModelInterface(found.inputs, found.outputs, known.task, known.classes, known.preprocessing)
