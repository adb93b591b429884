"""The plan: which labels are kept. It is immutable; masks, gradient masks and compaction all read it."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import nn

from prunekit.channels.cut.model_match import require_model
from prunekit.channels.cut.slicing import blank, is_variance, kept_indices, masked_indices
from prunekit.channels.labels.branch import Branch
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.tracing.channel_norms import ChannelNorm
from prunekit.errors import ArtifactError, PlanError, UsageError
from prunekit.hooks.model_copy import named_tensors
from prunekit.models.bitmask import pack_bits
from prunekit.modes.public_call import public_call
from prunekit.planning.stored_plan import FORMAT, PACKED_FORMAT, from_files
from prunekit.reading.array_files import openable
from prunekit.reading.text_files import read_json
from prunekit.settings.pruning import facts_from
from prunekit.utils.display import Displayed, Table, changes, count, listed, plural, resource, share
from prunekit.utils.files import StrPath, atomic_file, folder_at, require_checksum, sha256, with_checksum, write_text

SHOWN = 10
"""Blocks that are gone, of which the names are shown."""


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Displayed):
    """The channels of a model that are kept.

    Attributes:
        channel_map: how the model's channels are coupled.
        keep: bool (n_labels,), read-only; `keep[0]` is True because label 0 is locked. For joint labels the given
            values must be True: whether they are kept follows from the others.
        provenance: where the plan came from: criterion, budget, scope, seed, versions.
        element_masks: masks of single weights, by parameter name, bool in the dense shape.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> plan = pk.plan(model, x, macs=0.5)
        >>> print(plan)
        Plan: MACs 160 -> 80 (50.0 %), parameters 178 -> 90 (50.6 %), channels 16 -> 8
          (50.0 %); criterion l2, scope uniform, round_to by width
        <BLANKLINE>
          budget    dense  asked for    left
          MACs    100.0 %     50.0 %  50.0 %  binds
        <BLANKLINE>
          layer   inputs  outputs  MACs  left   share
          0            –  16 -> 8   128    64  50.0 %
          2      16 -> 8        2    32    16  50.0 %
        >>> plan.widths()
        {'0': (8, 16)}
    """

    channel_map: ChannelMap
    keep: Keep
    provenance: Mapping[str, Any] = field(default_factory=dict)
    element_masks: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keep = np.array(self.keep, dtype=bool)
        if keep.shape != (self.channel_map.n_labels,):
            raise PlanError(f"keep: expected shape ({self.channel_map.n_labels},), got {keep.shape}")
        if not keep[0]:
            raise PlanError("keep[0] stands for every locked channel and must be True")
        given, keep = keep, self.channel_map.completed(keep)
        if (keep & ~given).any():
            raise PlanError(
                "keep: a joint label is removed with its whole head, with its position in all heads, or with its query "
                "head of all heads of keys; remove one of these (ChannelMap.joint) instead"
            )
        keep.flags.writeable = False
        object.__setattr__(self, "keep", keep)

    @cached_property
    def kept_indices(self) -> dict[str, tuple[Labels | None, ...]]:
        """Kept indices of every axis of each tensor that shrinks; None for an axis that stays whole."""
        return kept_indices(self.channel_map, self.keep)

    @cached_property
    def masked_indices(self) -> dict[str, tuple[Labels | None, ...]]:
        """The same for each tensor with zeros in the masked model; None also for axes whose norm a layer divides by."""
        return masked_indices(self.channel_map, self.keep)

    def kept(self, name: str, axis: int) -> Labels:
        """Return indices kept along one axis of a parameter or buffer, ascending."""
        labels = self.channel_map.labels[name][axis]
        size = self.channel_map.shapes[name][axis]
        return np.arange(size) if labels is None else np.flatnonzero(self.keep[labels])

    def mask(self, name: str) -> torch.Tensor | None:
        """Return a bool tensor that broadcasts to the parameter, False where it is pruned; None if it is not pruned."""
        result = self.element_masks.get(name)
        if name in self.lost:
            none = torch.zeros((1,) * len(self.channel_map.shapes[name]), dtype=torch.bool)
            return none if name in self.masked_indices else None
        axes = self.kept_indices.get(name, ())
        for axis, index in enumerate(axes):
            if index is not None and (name, axis) not in self.channel_map.divided:
                labels = self.channel_map.labels[name][axis]
                assert labels is not None
                shape = [-1 if a == axis else 1 for a in range(len(axes))]
                on_axis = torch.from_numpy(self.keep[labels]).reshape(shape)
                result = on_axis if result is None else result & on_axis
        return result

    def zero(self, model: nn.Module) -> None:
        """Set pruned weights of a model of dense size to zero, in place.

        Running variances stay as they are, and so do axes whose norm a layer divides by.
        """
        with torch.no_grad():
            for name, tensor in named_tensors(model):
                if name in self.masked_indices and not is_variance(name):
                    blank(tensor, self.masked_indices[name])
                if name in self.element_masks:
                    tensor.masked_fill_(~self.element_masks[name].to(tensor.device), 0)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of which entries of which tensors are kept: equal if two plans do the same to a model."""
        result = hashlib.sha256(self.keep.tobytes())
        for name, axes in sorted(self.channel_map.labels.items()):
            result.update(f"{name}{self.channel_map.shapes[name]}".encode())
            for labels in axes:
                result.update(b"whole" if labels is None else np.ascontiguousarray(labels, np.int64).tobytes())
        for name, mask in sorted(self.element_masks.items()):
            result.update(name.encode() + mask.numpy().tobytes())
        return result.hexdigest()

    def require_model(self, model: nn.Module) -> None:
        """Raise if a model is not the one that the plan was made for, in its dense size; no values are read.

        Raises:
            PlanError: it is another model; names the first tensor or module that differs, and what to do.
        """
        require_model(self.channel_map, model, narrow=self.narrow_shapes)
        for name, mask in self.element_masks.items():
            shape = self.channel_map.shapes.get(name)
            pairs = zip(reversed(mask.shape), reversed(shape or ()), strict=False)
            if shape is None or mask.ndim > len(shape) or any(size not in (1, whole) for size, whole in pairs):
                raise PlanError(f"element_masks: {name!r} of shape {tuple(mask.shape)}, expected {shape}")

    @cached_property
    def gone(self) -> tuple[Branch, ...]:
        """The branches of which no channel is kept: they are not run."""
        return self.channel_map.branches.gone(self.keep)

    @cached_property
    def lost(self) -> frozenset[str]:
        """Names of the tensors of branches that are gone, which the compact model does not have."""
        return frozenset(self.channel_map.gone_tensors(self.keep))

    @cached_property
    def constants(self) -> dict[str, str]:
        """Name of the last layer's weight of each branch that is gone -> name of the tensor that is left of it."""
        return {branch.layers[-1]: branch.constant for branch in self.gone if branch.layers and branch.constant}

    @cached_property
    def narrow_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor after pruning, without those of branches that are gone."""
        whole = {name: shape for name, shape in self.channel_map.shapes.items() if name not in self.lost}
        kept = {name: self.kept_indices.get(name, (None,) * len(shape)) for name, shape in whole.items()}
        return {
            name: tuple(n if index is None else len(index) for n, index in zip(whole[name], axes, strict=True))
            for name, axes in kept.items()
        }

    @property
    def removed(self) -> int:
        """Number of labels in groups that are removed."""
        return sum(dense - kept for kept, dense in self.widths().values())

    @cached_property
    def zeros(self) -> int:
        """Number of single weights that are zero in what the channels leave."""
        found = 0
        for name, mask in self.element_masks.items():
            zero = (~mask).expand(self.channel_map.shapes[name])
            for axis, index in enumerate(self.kept_indices.get(name, ())):
                if index is not None:
                    zero = zero.index_select(axis, torch.from_numpy(index))
            found += int(zero.sum())
        return found

    def widths(self) -> dict[str, tuple[int, int]]:
        """Return the kept and the dense number of labels of each channel group, by its name."""
        return {
            group.name: (int(np.count_nonzero(self.keep[group.labels])), group.labels.size)
            for group in self.channel_map.groups
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return dense and kept channels and MACs for one sample of every layer, in order of execution.

        `in_dense`, `in_kept`, `out_dense` and `out_kept` are None where the channels are not the model's, as of images.
        A layer of a block that is gone keeps none.
        """
        chart = self.channel_map
        dense, kept = chart.layer_macs(), chart.layer_macs(self.keep)
        rows = []
        for layer, macs in dense.items():
            row: dict[str, Any] = {"layer": layer}
            present = chart.is_present(layer, self.keep)
            for side in ("input", "output"):
                labels = chart.activations.get((layer, side, 0))
                name = side.removesuffix("put")
                row[f"{name}_dense"] = None if labels is None else labels.size
                row[f"{name}_kept"] = None if labels is None else int(np.count_nonzero(self.keep[labels] & present))
            rows.append(row | {"macs_dense": macs, "macs_kept": kept[layer]})
        return rows

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return MACs for one sample, parameters, and channels of the groups, dense and kept.

        Also parameters that are not zero, if single weights are masked, and blocks, if some are gone.
        """
        chart = self.channel_map
        parameters = [name for name, stored in chart.stored.items() if stored.parameter]
        held = sum(prod(chart.shapes[name]) for name in parameters)
        channels, kept = sum(group.labels.size for group in chart.groups), chart.parameters_kept(self.keep, parameters)
        return {
            "MACs": (chart.macs(), chart.macs(self.keep)),
            "parameters": (held, kept),
            **({"nonzero": (held, kept - self.zeros)} if self.element_masks else {}),
            "channels": (channels, channels - self.removed),
            **(
                {"blocks": (len(chart.branches.found), len(chart.branches.found) - len(self.gone))} if self.gone else {}
            ),
        }

    def _headline(self) -> str:
        asked = self.provenance.get("prune", {})
        left = [
            f"{name} {count(dense)} -> {count(kept)} ({share(kept / (dense or 1))})"
            for name, (dense, kept) in self.totals().items()
        ]
        told = {**asked, "round_to": "by width"} if asked.get("round_to", 1) is None else asked
        how = ", ".join(f"{key} {told[key]}" for key in ("criterion", "scope", "round_to") if key in told)
        return ", ".join(left) + (f"; {how}" if how else "")

    def _parts(self) -> Iterator[str | Table]:
        masks = plural(len(self.element_masks), "tensor")
        yield f"Plan: {self._headline()}" + (f"; single weights of {masks} masked" if self.element_masks else "")
        if self.gone:
            named = listed((branch.name for branch in self.gone), SHOWN)
            yield f"blocks: {len(self.gone)} of {len(self.channel_map.branches.found)} gone: {named}"
        yield from self.budgets()
        rows = self.rows()
        columns = (
            [row["layer"] or "(root)" for row in rows],
            changes((row["in_dense"], row["in_kept"]) for row in rows),
            changes((row["out_dense"], row["out_kept"]) for row in rows),
            [count(row["macs_dense"]) for row in rows],
            [count(row["macs_kept"]) for row in rows],
            [share(row["macs_kept"] / (row["macs_dense"] or 1)) for row in rows],
        )
        headings = ("layer", "inputs", "outputs", "MACs", "left", "share")
        yield Table(headings, list(zip(*columns, strict=True)))

    def budgets(self) -> Iterator[Table]:
        """Yield a table of what is left of every budget, and which binds; nothing if there are no budgets."""
        names = self.provenance.get("budgets", {})
        if names:
            yield Table(("budget", "dense", "asked for", "left", ""), [self._budget(name) for name in names])

    def _budget(self, name: str) -> tuple[str, ...]:
        """Return the row of a budget."""
        found, binds = self.provenance["budgets"][name], name == self.provenance.get("binding")
        facts = facts_from(name, found)
        said = [word for word, holds in (("predicted", facts.measured), ("binds", binds)) if holds]
        dense, asked, left = (facts.shown(found[key]) for key in ("dense", "asked", "left"))
        lost = self.provenance.get("max_drop")
        by_score = lost and lost.get("narrows", self.provenance.get("binding")) == name
        return resource(name), dense, "by max_drop" if by_score else asked, left, ", ".join(said)

    def save(self, folder: StrPath) -> None:
        """Write `plan.json` (text) and `plan.safetensors` (labels and masks) into a folder."""
        folder = Path(folder)
        chart = self.channel_map
        tensors: dict[str, np.ndarray[Any, Any]] = {"keep": self.keep.copy(), "joint": chart.joint}
        for name, axes in chart.labels.items():
            tensors |= {f"labels/{name}/{i}": np.ascontiguousarray(a) for i, a in enumerate(axes) if a is not None}
        activations = list(chart.activations.items())
        tensors |= {f"activation/{i}": np.ascontiguousarray(labels) for i, (_, labels) in enumerate(activations)}
        for i, norm in enumerate(chart.norms.values()):
            tensors |= {f"norm/{i}/{j}": np.ascontiguousarray(labels) for j, (_, labels) in enumerate(norm.axes)}
        for i, block in enumerate(chart.blocks.values()):
            tensors |= {f"block/{i}/{j}": np.ascontiguousarray(labels) for j, (_, labels) in enumerate(block.axes)}
            tensors[f"block/{i}"] = np.ascontiguousarray(block.positions)
        for i, term in enumerate(chart.mac_terms):
            tensors |= {f"macs/{i}/{j}": np.ascontiguousarray(factor) for j, factor in enumerate(term.factors)}
        tensors |= {f"size/{i}": np.ascontiguousarray(size.labels) for i, size in enumerate(chart.sizes)}
        tensors |= {f"multiple/{i}": np.ascontiguousarray(one.labels) for i, one in enumerate(chart.multiples)}
        state = list(chart.state.labels.items())
        tensors |= {f"state/{i}/{j}": np.ascontiguousarray(one) for i, (_, axes) in enumerate(state)
                    for j, one in enumerate(axes) if one is not None}  # fmt: skip
        tensors |= {f"order/{i}": size.order for i, size in enumerate(chart.sizes) if size.order is not None}
        for i, branch in enumerate(chart.branches.found):
            tensors |= {f"branch/{i}/last": branch.last}
            tensors |= {f"branch/{i}/{j}": np.ascontiguousarray(part) for j, part in enumerate(branch.parts)}
        tensors |= {f"bits/{name}": pack_bits(mask.cpu().numpy()) for name, mask in self.element_masks.items()}
        with atomic_file(folder / "plan.safetensors") as temporary:
            save_file(tensors, temporary)
        text = {
            "format": PACKED_FORMAT if self.element_masks else FORMAT,
            "element_masks": {name: list(mask.shape) for name, mask in self.element_masks.items()},
            "provenance": dict(self.provenance),
            "widths": {name: list(width) for name, width in self.widths().items()},
            "shapes": {name: list(shape) for name, shape in chart.shapes.items()},
            "stored": {name: [how.element_bytes, how.parameter] for name, how in chart.stored.items()},
            "locks": [[lock.reason, lock.module, lock.operator, lock.channels] for lock in chart.locks],
            "activations": [list(key) for key, _ in activations],
            "sizes": [[size.module, size.name, size.position, *[True] * size.whole] for size in chart.sizes],
            "macs": [[term.module, term.operator, term.constant, len(term.factors)] for term in chart.mac_terms],
            "norms": [_written_norm(path, norm) for path, norm in chart.norms.items()],
            "blocks": [_written_norm(path, block) for path, block in chart.blocks.items()],
            "divided": [list(slot) for slot in sorted(chart.divided)],
            "multiples": [[one.number, one.least] for one in chart.multiples],
            "branches": [branch.as_json() for branch in chart.branches.found],
            "bodies": [body.as_json() for body in chart.branches.bodies.values()],
            "branches_stay": [[lock.name, lock.reason] for lock in chart.branches.locks],
            "state": [[*place, len(axes)] for place, axes in state],
            "remade": [list(one) for one in sorted(chart.state.remade)],
            "inputs": [[list(one.shape), one.dtype, one.name] for one in chart.inputs],
            "outputs": chart.read.as_text(),
            "sha256": sha256(folder / "plan.safetensors"),
        }
        write_text(folder / "plan.json", json.dumps(with_checksum(text), indent=1) + "\n")


def _written_norm(path: str, norm: ChannelNorm) -> list[Any]:
    return [path, [axis for axis, _ in norm.inputs], [axis for axis, _ in norm.outputs]]


def require_plan(plan: Any, model: nn.Module | None = None) -> None:
    """Raise if a function was given something else than a plan, or the plan of another model; no values are read."""
    if not isinstance(plan, Plan):
        raise UsageError(f"plan: expected a prunekit.Plan, got {_described(plan)}")
    if model is not None:
        plan.require_model(model)


def _described(given: Any) -> str:
    """Return what was given instead of a plan, and what to do about it."""
    make = "prunekit.plan(model, x, macs=0.5), or the .plan of what prunekit.prune returns"
    if isinstance(given, (str, PathLike)):
        path = str(given)
        return f"the path {path!r}; read the folder that plan.save wrote: prunekit.load_plan({path!r})"
    if isinstance(given, ChannelMap):
        return f"a ChannelMap, which says which channels are coupled, not which are removed; give {make}"
    if isinstance(getattr(given, "plan", None), Plan):
        return f"{type(given).__name__}; give its .plan"
    return f"{'None' if given is None else type(given).__name__}; give {make}"


@public_call
def load_plan(folder: StrPath) -> Plan:
    """Read a plan that `Plan.save` wrote, or that `prunekit.save` put beside a compact model.

    Args:
        folder: of the plan, or of the model.

    Raises:
        ArtifactError: a file is missing, damaged, of another format, or the two do not belong together.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> pk.plan(model, torch.randn(1, 4), macs=0.5).save("plan")
        >>> plan = pk.load_plan("plan")
        >>> plan.widths(), pk.compact(model, plan)[0].out_features
        ({'0': (8, 16)}, 8)
    """
    folder = folder_at(folder)
    if not (folder / "plan.json").is_file():
        raise ArtifactError(
            f"{folder}: expected a folder with plan.json and plan.safetensors, as plan.save(folder) and "
            "prunekit.save(result, folder) write them; plan.json is not there"
        )
    text = read_json(folder / "plan.json", finite=False)
    if not isinstance(text, dict) or text.get("format") not in (FORMAT, PACKED_FORMAT):
        found = text.get("format") if isinstance(text, dict) else None
        raise ArtifactError(
            f"{folder / 'plan.json'}: format {found}, expected {FORMAT} or {PACKED_FORMAT}: a newer prunekit wrote it, "
            "or another program; load it with the version that wrote it or a later one"
        )
    require_checksum(folder / "plan.json", text)
    path = folder / "plan.safetensors"
    if not path.is_file() or sha256(path) != text.get("sha256"):
        raise ArtifactError(f"{path}: missing, or not the file that plan.json was written with (checksum differs)")
    try:
        with openable(path) as name:
            plan = Plan(*from_files(text, load_file(name)))
        plan.channel_map.layer_macs(plan.keep)
    except SafetensorError as error:
        raise ArtifactError(f"{path}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, PlanError) as error:
        told = str(error) if isinstance(error, (ValueError, PlanError)) else f"{type(error).__name__}: {error}"
        text_file = folder / "plan.json"
        raise ArtifactError(f"{text_file}: not as prunekit writes it ({told}); make the plan again") from error
    return plan
