"""What blocks take by the layer clock, and what a network saves without them, in time that is measured as a whole.

For each number of blocks, that many branches are removed, evenly spread over the depth. `share` is what their modules
take of the dense network by the layer clock; `saved` what the compact network takes less, of the dense one, both
alternated in one process; `ratio` is saved / share: 1 where what is gone takes no time any more.

    python benchmarks/block_times.py [--model vit_b_16,llama,...] [--runtimes eager,onnxruntime] [--batch 1]
        [--threads 1] [--repeats 15] [--json] [--keep]

`llama` is a decoder of the shape of SmolLM2-135M with random weights on 128 tokens, others are torchvision's networks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torchvision
from common import keep, show
from latency_networks import log, names, where
from torch import nn

import prunekit
from prunekit.backends.session import Inputs, Setting, inputs_like
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact
from prunekit.measure.latency_profile.network_timing import Network, time_networks
from prunekit.planning.plan import Plan
from prunekit.utils.context import seeded

COLUMNS = ("model", "runtime", "batch", "threads", "blocks", "gone", "dense_ms", "share", "saved", "ratio", "doubts")
SHARES = (1 / 12, 1 / 4, 1 / 2)
"""Of the branches, that are removed."""


def built(name: str) -> tuple[nn.Module, Inputs]:
    """A network with random weights and its inputs."""
    with seeded(0):
        if name != "llama":
            return torchvision.models.get_model(name, weights=None).eval(), inputs_like((torch.randn(1, 3, 224, 224),))
        from transformers import LlamaConfig, LlamaForCausalLM

        shape: dict[str, Any] = {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "vocab_size": 49152,
        }
        heads: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False))
        return model.eval(), inputs_like((torch.randint(0, 49152, (1, 128)),))


def plan_without(chart: ChannelMap, share: float) -> Plan:
    """The plan without some of the branches, evenly spread."""
    found = chart.branches.found
    count = max(1, round(share * len(found)))
    kept = np.ones(chart.n_labels, dtype=bool)
    for index in np.linspace(0, len(found) - 1, count + 2)[1:-1].round().astype(int):
        kept[found[index].labels] = False
    return Plan(chart, chart.completed(kept))


def returned(model: nn.Module) -> nn.Module:
    """The model itself."""
    return model


def rows(name: str, runtime: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A network on a runtime."""
    model, inputs = built(name)
    chart = prunekit.trace(model, inputs.one)
    plans = [plan_without(chart, share) for share in SHARES]
    setting = Setting(runtime, options.device, options.batch, options.threads)
    networks = [Network("dense", model, partial(returned, model))]
    for plan in plans:
        small = compact(model, plan)
        networks.append(Network(f"without {len(plan.gone)}", small, partial(returned, small)))
    dense, *others = time_networks(model, networks, inputs, setting, repeats=options.repeats, cache=None, log=log)
    clocked = sum(dense.modules_ms.values()) + dense.rest_ms
    for plan, found in zip(plans, others, strict=True):
        gone = [path for path in dense.modules_ms if not chart.is_present(path, plan.keep)]
        share = sum(dense.modules_ms[path] for path in gone) / clocked
        saved = 1 - found.whole_ms / found.dense_ms
        yield {
            "model": name, "runtime": runtime, "batch": options.batch, "threads": options.threads,
            "blocks": len(chart.branches.found), "gone": len(plan.gone), "dense_ms": found.dense_ms,
            "share": share, "saved": saved, "ratio": saved / share, "doubts": "; ".join(found.doubts),
        }  # fmt: skip


def main() -> None:
    """Measures networks and prints a row for each number of blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=names, default="vit_b_16,llama", metavar="A,B")
    parser.add_argument("--runtimes", type=names, default="eager,onnxruntime", metavar="A,B")
    parser.add_argument("--repeats", type=int, default=15, help="how often each network is run")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/block_times.json")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = [row for name in options.model for runtime in options.runtimes for row in rows(name, runtime, options)]
    show([{column: row[column] for column in COLUMNS} for row in found], as_json=options.json)
    if options.keep:
        print(keep("block_times", found, {"repeats": options.repeats}, where()))


if __name__ == "__main__":
    main()
