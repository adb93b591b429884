"""Parameters that do not learn."""

from __future__ import annotations

from collections.abc import Iterator

from prunekit.channels.copying import has_gradients
from prunekit.diagnosis.findings import NAMED, Finding, check
from prunekit.diagnosis.observation import Observation
from prunekit.numbers import listed


@check("unused_parameter", "gradients")
def unused_parameter(seen: Observation) -> Iterator[Finding]:
    """Trainable parameters on which the loss depends in no batch."""
    assert seen.gradients is not None
    unused = [name for name, norm in seen.gradients.parameters.items() if norm is None]
    if unused:
        never = [name for name in unused if _owner(name) not in seen.order]
        why = (
            "its module never runs" if _owner(unused[0]) not in seen.order else "what it makes does not reach the loss"
        )
        yield Finding(
            "unused_parameter",
            _owner(unused[0]),
            seen.place(_owner(unused[0])),
            "a loss that depends on every trainable parameter",
            f"{len(unused)} parameters get no gradient: {listed(unused, NAMED)}; {why}",
            "use the module in forward, look for detach() and no_grad(), or remove it",
            {"parameters": unused, "never_ran": len(never)},
        )


@check("frozen_parameter", "model")
def frozen_parameter(seen: Observation) -> Iterator[Finding]:
    """Parameters that do not require a gradient."""
    named = [(name, parameter) for name, parameter in seen.model.named_parameters() if has_gradients(parameter)]
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    if frozen:
        share = sum(parameter.numel() for _, parameter in named if not parameter.requires_grad)
        total = sum(parameter.numel() for _, parameter in named)
        yield Finding(
            "frozen_parameter",
            _owner(frozen[0]),
            seen.place(_owner(frozen[0])),
            "parameters that require gradients",
            f"{len(frozen)} of {len(named)} are frozen, {share / total:.1%} of all values: {listed(frozen, NAMED)}",
            "set requires_grad_(True) on what is to learn; if they are frozen on purpose, ignore frozen_parameter",
            {"parameters": frozen, "share": share / total},
        )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
