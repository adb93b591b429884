"""Slicing: a model's narrow copy, with tensors cut to the kept entries and sizes of modules set to match."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from prunekit.channels.cut.shorter_model import shorten_
from prunekit.channels.labels.branch import WHOLE, Shortening, is_inside
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rewrite.source_rewriter import Values, attribute_values, set_attributes
from prunekit.channels.rules.convolution import whole_groups
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.tracing.kept_state import cut_state_
from prunekit.channels.tracing.substitutes import SizedAttention, heads_left, set_heads
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.utils.context import training_mode

KeptIndices = Mapping[str, tuple[Labels | None, ...]]


def kept_indices(channel_map: ChannelMap, keep: Keep) -> dict[str, tuple[Labels | None, ...]]:
    """Return, for every tensor that shrinks, the kept indices of every axis; None for an axis that stays whole.

    Of a tensor that goes, as it is in a branch that does, no index along the first axis is kept.
    """
    kept: dict[str, tuple[Labels | None, ...]] = {}
    gone = channel_map.gone_tensors(keep)
    for name, axes in channel_map.labels.items():
        if name in gone:
            kept[name] = tuple(None if index else np.zeros(0, dtype=np.int64) for index in range(len(axes)))
            continue
        chosen = [None if axis is None or keep[axis].all() else np.flatnonzero(keep[axis]) for axis in axes]
        if any(axis is not None for axis in chosen):
            kept[name] = tuple(chosen)
    return kept


def masked_indices(channel_map: ChannelMap, keep: Keep) -> dict[str, tuple[Labels | None, ...]]:
    """Return the kept indices in a masked model, which leaves axes alone that it divides by the norm of.

    Tensors without labels, such as whole numbers, stay as they are even where they go.
    """
    kept = {
        name: tuple(None if (name, axis) in channel_map.divided else index for axis, index in enumerate(axes))
        for name, axes in kept_indices(channel_map, keep).items()
        if any(labels is not None for labels in channel_map.labels[name])
    }
    return {name: axes for name, axes in kept.items() if any(index is not None for index in axes)}


def cut(tensor: torch.Tensor, kept: tuple[Labels | None, ...]) -> torch.Tensor:
    """Return the entries of a tensor at the indices of each axis, detached; contiguous if there are any indices."""
    result = tensor.detach()
    for axis, index in enumerate(kept):
        if index is not None:
            result = take(result, axis, torch.from_numpy(index).to(tensor.device))
    return result


def take(tensor: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
    """Return entries of an axis, by `gather` along a contiguous one, where `index_select` is ten times slower."""
    if tensor.stride(axis) != 1:
        return tensor.index_select(axis, index)
    shape = [index.numel() if a == axis % tensor.dim() else size for a, size in enumerate(tensor.shape)]
    along = [-1 if a == axis % tensor.dim() else 1 for a in range(tensor.dim())]
    return tensor.gather(axis, index.view(along).expand(shape))


def is_variance(name: str) -> bool:
    """Return whether a tensor is the running variance of a norm, which masks leave as it is.

    A variance of zero would not remove a channel, only make its statistics degenerate.
    """
    return name.endswith("running_var")


def blank(tensor: torch.Tensor, kept: tuple[Labels | None, ...]) -> torch.Tensor:
    """Set removed entries of a floating-point tensor to 0 in place, and return it."""
    with torch.no_grad():
        for axis, index in enumerate(kept):
            if index is not None:
                removed = np.delete(np.arange(tensor.shape[axis]), index)
                tensor.index_fill_(axis, torch.from_numpy(removed).to(tensor.device), 0)
    return tensor


def bare_widths(model: nn.Module, channel_map: ChannelMap, keep: Keep) -> dict[str, int]:
    """Return, by module path, the widths of norms without tensors of their own, which only the trace knows."""
    bare = {path: _width_of_bare(path, norm, channel_map) for path, norm in model.named_modules() if _is_bare(norm)}
    widths = {path: int(np.count_nonzero(keep[labels])) for path, labels in bare.items() if labels is not None}
    return channel_map.without_gone(keep, widths)


def _width_of_bare(path: str, norm: nn.Module, channel_map: ChannelMap) -> Labels | None:
    """Return the labels of the channels that a norm without tensors normalizes; None if none are free."""
    last = _remembers_shape(norm)
    if path in channel_map.norms:
        inputs = channel_map.norms[path].inputs
        return dict(inputs).get(-1 if last else 1, inputs[0][1])  # or the only one: a norm may permute its axes first
    return None if last else channel_map.activations.get((path, "input", 0))


_NORMS = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def _remembers_shape(module: nn.Module) -> bool:
    """Return whether a module keeps its size in `normalized_shape`, as LayerNorm does, hand-written norms too."""
    return isinstance(vars(module).get("normalized_shape"), tuple)


def _is_bare(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return (isinstance(module, _NORMS) or _remembers_shape(module)) and all(tensor is None for tensor in own)


def set_bare_widths(model: nn.Module, widths: Mapping[str, int]) -> None:
    """Set the size attributes of norms without tensors, in place."""
    modules = dict(model.named_modules())
    for path, width in widths.items():
        if path not in modules or not _is_bare(modules[path]):
            raise KeyError(path)
        _set_width(modules[path], width)


def _set_width(norm: nn.Module, width: int) -> None:
    if isinstance(norm, nn.GroupNorm):
        _set_groups(norm, width)
    elif _remembers_shape(norm):
        norm.normalized_shape = (*norm.normalized_shape[:-1], width)  # type: ignore[index, assignment]
    elif isinstance(norm, _NormBase):
        norm.num_features = width


def _set_groups(norm: nn.GroupNorm, width: int) -> None:
    """Set the number of channels; the number of groups stays, unless every channel was a group of its own."""
    if norm.num_groups == norm.num_channels:
        norm.num_groups = width
    norm.num_channels = width


def narrow(
    model: nn.Module,
    kept: KeptIndices,
    widths: Mapping[str, int] | None = None,
    attributes: Values | None = None,
    shorter: Shortening = WHOLE,
) -> nn.Module:
    """Return a new model with only the kept entries; the given model is not changed.

    Its modules have the same classes, except for attention whose sizes its own class cannot express.
    """
    source = {name: tensor.detach() for name, tensor in named_tensors(model)}
    everything = {name: cut(t, kept[name]) if name in kept else t.clone() for name, t in source.items()}
    compact = with_tensors(model, everything)
    if shorter:
        shorten_(compact, shorter)
    if heads := heads_left(model, kept):
        set_heads(compact, {path: left for path, left in heads.items() if not is_inside(path, shorter.modules)})
    resize(compact)
    if widths:
        set_bare_widths(compact, widths)
    if attributes:
        set_attributes(compact, attributes)
    return compact


def narrowed(model: nn.Module, channel_map: ChannelMap, keep: Keep, kept: KeptIndices) -> nn.Module:
    """Return the narrow copy of a model under a plan, with the sizes that its trial found; `kept` as for `narrow`."""
    attributes = attribute_values(model, channel_map, keep) if channel_map.sizes else None
    shorter = channel_map.branches.shortening(keep) if channel_map.branches.found else WHOLE
    compact = narrow(model, kept, bare_widths(model, channel_map, keep), attributes, shorter)
    if channel_map.state:
        cut_state_(compact, channel_map.state, keep)
    return compact


def resize(model: nn.Module) -> None:
    """Set every known module's size attributes from its tensors, in place.

    In eval mode, because reading a computed weight may otherwise change buffers, as spectral norm does.
    """
    with training_mode(model, False), torch.no_grad():
        for module in model.modules():
            known = next((RESIZERS[cls] for cls in type(module).__mro__ if cls in RESIZERS), _resize_other_norm)
            known(module)


def _resize_other_norm(module: Any) -> None:
    """Set the size of a hand-written norm that keeps its weight's shape under torch's name, as ConvNeXt's does."""
    weight = dict(module._parameters.items()).get("weight")
    shape = vars(module).get("normalized_shape")
    if weight is not None and isinstance(shape, tuple) and len(shape) == weight.dim():
        module.normalized_shape = tuple(weight.shape)


def _shape(module: nn.Module) -> tuple[int, ...]:
    """Return the shape of a layer's weight; an empty one if it has no weight."""
    weight = module.weight
    if not isinstance(weight, torch.Tensor):
        return ()
    # a weight that a hook computes, as weight norm does, still has the dense sizes, but what it is made from is narrow
    tensors = [tensor for tensor in module._parameters.values() if tensor is not None and tensor.dim() == weight.dim()]
    if "weight" not in vars(module) or not tensors:
        return tuple(weight.shape)
    return tuple([max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)])


def _conv(module: _ConvNd) -> None:
    transposed = isinstance(module, _ConvTransposeNd)
    rows, columns = _shape(module)[:2]
    outer = module.in_channels if transposed else module.out_channels
    if module.groups > 1 and whole_groups(module.groups, module.in_channels // module.groups):
        module.groups = module.groups * rows // outer
    inner = columns * module.groups
    module.in_channels, module.out_channels = (rows, inner) if transposed else (inner, rows)


def _batch_norm(module: _NormBase) -> None:
    shape = _shape(module) or ([] if module.running_mean is None else module.running_mean.shape)
    if shape:
        module.num_features = shape[0]


def _layer_norm(module: nn.LayerNorm) -> None:
    module.normalized_shape = _shape(module) or module.normalized_shape


def _group_norm(module: nn.GroupNorm) -> None:
    if shape := _shape(module):
        _set_groups(module, shape[0])


def _encoder(module: nn.TransformerEncoder) -> None:
    # Its nested tensors are for the fast path of torch's own attention.
    if any(isinstance(part, SizedAttention) for part in module.modules()):
        module.use_nested_tensor = False


def _recurrent(module: nn.RNNBase | nn.RNNCellBase) -> None:
    suffix = "_l0" if isinstance(module, nn.RNNBase) else ""
    module.input_size = module.get_parameter(f"weight_ih{suffix}").shape[1]
    state = module.get_parameter(f"weight_hh{suffix}").shape[1]
    if isinstance(module, nn.RNNBase) and module.proj_size:
        module.proj_size, state = state, module.get_parameter(f"weight_hr{suffix}").shape[1]
    module.hidden_size = state


def _by_axis(*names: str) -> Callable[[Any], None]:
    """Return what sets the attributes that hold the size of each axis of a layer's weight."""

    def set_sizes(module: Any) -> None:
        for name, size in zip(names, _shape(module), strict=True):
            setattr(module, name, size)

    return set_sizes


RESIZERS: dict[type[nn.Module], Callable[[Any], None]] = {
    _ConvNd: _conv,
    nn.Linear: _by_axis("out_features", "in_features"),
    _NormBase: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.TransformerEncoder: _encoder,
    nn.PReLU: _by_axis("num_parameters"),
    nn.Embedding: _by_axis("num_embeddings", "embedding_dim"),
    nn.EmbeddingBag: _by_axis("num_embeddings", "embedding_dim"),
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _recurrent,
}
"""Class of modules, with its subclasses -> a function that sets a module's sizes from its tensors."""
