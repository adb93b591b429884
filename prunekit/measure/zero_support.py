"""Zeros of single weights in runtimes: which compute fewer of them, on which hardware, and what to call."""

from __future__ import annotations

from collections.abc import Mapping

from prunekit.compaction.zero_patterns import ModelZeros
from prunekit.utils.display import listed

CSR_FROM = 0.95
"""Share of zeros from which torch's CSR was faster for a linear layer: 3.1x on one vector, 1.2x at batch 64.

On one AMD EPYC, see `benchmarks/results/sparse_runtimes.json`.
"""
IGNORED = "no runtime on a CPU skips them in dense tensors, and no runtime of a GPU skips zeros without 2:4"


def users(zeros: ModelZeros) -> str:
    """Return what computes less for the zeros of a model, on which hardware, and how it is called, as one sentence.

    Example:
        >>> import torch
        >>> from prunekit.compaction.zero_patterns import zero_patterns
        >>> from prunekit.measure.zero_support import users
        >>> model = torch.nn.Linear(16, 16)
        >>> model.weight.data[:, ::2] = 0
        >>> print(users(zero_patterns(model)))
        1 of 1 layers are 2:4, which NVIDIA GPUs from Ampere on compute in fp16 and bf16: ...
    """
    found = zeros.two_of_four
    if found:
        return (
            f"{len(found)} of {len(zeros.layers)} layers are 2:4, which NVIDIA GPUs from Ampere on compute in fp16 and "
            "bf16: prunekit.semi_structured(model, example) for linear layers, --to tensorrt for convolutions too; no "
            "runtime on a CPU does"
        )
    sparse = [name for name, one in zeros.layers.items() if one.share >= CSR_FROM]
    csr = f"; weight.to_sparse_csr() may pay for single linear layers from {100 * CSR_FROM:.0f} % on" if sparse else ""
    return (
        f"nothing computes less for {zeros.pattern} zeros: {IGNORED}{csr}; they make files smaller, and whole channels "
        "(prunekit.prune, prunekit.compact) make models faster"
    )


def unused_zeros_notes(models: Mapping[str, ModelZeros], runtimes: tuple[str, ...]) -> list[str]:
    """Return a note for each model with many zeros of single weights that is timed in runtimes that do not use them."""
    notes = []
    for name, zeros in models.items():
        idle = [one for one in runtimes if one != "tensorrt" or not zeros.two_of_four]
        verb = "multiplies" if len(idle) == 1 else "multiply"
        if zeros.many and idle:
            notes.append(
                f"{name}: {zeros}, and {listed(idle, 3)} {verb} by them as by any other number; {users(zeros)}"
            )
    return notes


def exported_zeros_notes(zeros: ModelZeros, form: str) -> list[str]:
    """Return a note on a file with many zeros of single weights that its runtime does not use."""
    used = form == "tensorrt" and zeros.two_of_four
    return [f"{zeros}, and the file computes them; {users(zeros)}"] if zeros.many and not used else []
