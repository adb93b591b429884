"""Hooks of every kind behind one owner: registered on enter, removed on exit, also on an error."""

from prunekit.hooks.checks import (
    HOOK_TABLES,
    HookWarning,
    called_leaves,
    compiled_code,
    count_hooks,
    is_compiled,
    is_ours,
    never_called,
    not_traced,
    recomputing,
    refuse_compiled,
    refuse_nested,
)
from prunekit.hooks.gradients import GradientChange
from prunekit.hooks.owned import OwnedHook
from prunekit.hooks.owner import HookOwner, Removable, after_forward, before_forward

__all__ = [
    "HOOK_TABLES",
    "GradientChange",
    "HookOwner",
    "HookWarning",
    "OwnedHook",
    "Removable",
    "after_forward",
    "before_forward",
    "called_leaves",
    "compiled_code",
    "count_hooks",
    "is_compiled",
    "is_ours",
    "never_called",
    "not_traced",
    "recomputing",
    "refuse_compiled",
    "refuse_nested",
]
