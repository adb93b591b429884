"""Compaction: masked channels are taken out for good."""

from __future__ import annotations

from torch import nn

from prunekit.channels.rewriting import original_of
from prunekit.channels.slicing import narrowed
from prunekit.channels.substitutes import SizedAttention
from prunekit.models import is_frozen
from prunekit.planning import Plan, require_plan
from prunekit.wrappers import unwrapped


def compact(model: nn.Module, plan: Plan) -> nn.Module:
    """A new, smaller model of the same class without the channels that a plan removes.

    Args:
        model: the masked model, in its dense size; not changed. What it holds at removed places is not looked at:
            `prunekit.measure.verify` tells whether it was zero.
        plan: made for this model.

    Returns:
        A model of the same class, in the same train or eval mode and on the same device, each of its parameters
        trainable or frozen as in the model given. What Accelerate or torch put around a method of an instance, such as
        autocast, is left behind: prepare the compact model anew.

    Raises:
        UsageError: the plan is none.
        PlanError: the plan is that of another model; names the first tensor that does not fit.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> plan = pk.plan(model, torch.randn(1, 4), macs=0.5)
        >>> [tuple(parameter.shape) for parameter in pk.compact(model, plan).parameters()]
        [(8, 4), (8,), (2, 8), (2,)]
    """
    model = unwrapped(model)
    require_plan(plan, model)
    return narrowed(model, plan.channel_map, plan.keep, plan.kept_indices)


def remarks(small: nn.Module) -> tuple[str, ...]:
    """What to say of a compact model as it is handed over: its classes that are not the user's, and if it is frozen."""
    classes = {type(module) for module in small.modules()}
    again = sorted({original_of(cls).__name__ for cls in classes if original_of(cls) is not cls})
    ours = sorted(cls.__name__ for cls in classes if issubclass(cls, SizedAttention))
    said = []
    if again or ours:
        parts = [f"methods compiled again with explicit sizes: {', '.join(again)}"] if again else []
        parts += (
            [f"modules with explicit sizes in place of torch's or the model's own: {', '.join(ours)}"] if ours else []
        )
        said.append(
            f"{'; '.join(parts)}. Pickled, as by torch.save(model), it loads where prunekit is installed; "
            "plain_classes=True keeps all classes as they are, and prunes less"
        )
    count = sum(1 for _ in small.parameters())
    if count and is_frozen(small):
        said.append(
            f"all {count} parameters are frozen (requires_grad=False), as in the model that was given; call "
            "model.requires_grad_(True) before fine-tuning"
        )
    return tuple(said)
