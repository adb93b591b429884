"""The memory and time that pruning a language model takes, by its layers and its width.

Llama's shape with random weights and tokens, float32, four parameters of five left, repaired and proven; 8,192 words
in the vocabulary. Each model is a process of its own. Memory is counted every 20 ms, beyond what the process had with
the model loaded: what it needs (anonymous), and with the pages of temporary files that it used last, which the system
takes back where memory is short (resident).

    python benchmarks/language_memory.py [--json] [--layers A,B] [--widths A,B] [--windows N] [--tokens N] [--keep]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from typing import Any

from common import RESULTS, Rows, keep, show

LAYERS, WIDTHS = (4, 8, 16), (288, 576, 1152)
VOCABULARY = 8192


def resident() -> tuple[int, int]:
    """Anonymous and all resident bytes of this process, on Linux."""
    found = dict[str, int]()
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("RssAnon", "VmRSS"):
                found[name] = 1024 * int(value.split()[0])
    return found["RssAnon"], found["VmRSS"]


def once(layers: int, width: int, windows: int, tokens: int) -> dict[str, Any]:
    """One model, in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import prunekit

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 8 * width // 3, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=9, num_key_value_heads=3, **sizes)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, VOCABULARY, (windows, tokens))
    calibration = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    before, most, ended = resident(), [0, 0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most[:] = [max(a, b) for a, b in zip(most, resident(), strict=True)]

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    try:
        result = prunekit.prune(model, calibration=calibration, params=0.8, outputs="logits", progress=False)
    finally:
        ended.set()
        watcher.join()
    model_mb = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    return {
        "layers": layers, "width": width, "windows": windows, "tokens": tokens, "model_mb": model_mb,
        "anonymous_mb": (most[0] - before[0]) / 1e6, "resident_mb": (most[1] - before[1]) / 1e6,
        "times_the_model": (most[0] - before[0]) / 1e6 / model_mb, "seconds": time.perf_counter() - start,
        "difference": result.max_relative_difference,
    }  # fmt: skip


def draw(rows: list[dict[str, Any]]) -> None:
    """Write a picture: memory over the layers at one width, and over the width at one depth."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for panel, key, other in zip(panels, ("layers", "width"), ("width", "layers"), strict=True):
        usual = max({row[other] for row in rows}, key=lambda value: sum(row[other] == value for row in rows))
        some = sorted((row for row in rows if row[other] == usual), key=lambda row: row[key])
        for name, label in (("resident_mb", "resident"), ("anonymous_mb", "anonymous"), ("model_mb", "the model")):
            panel.plot([row[key] for row in some], [row[name] / 1e3 for row in some], marker="o", label=label)
        panel.set(xlabel=key, title=f"{other} {usual}", ylim=(0, None))
    panels[0].set_ylabel("GB beside the loaded model")
    panels[0].legend(frameon=False)
    figure.savefig(RESULTS / "language_memory.svg", metadata={"Date": None})


def main() -> None:
    """Measures all models, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--layers", default=",".join(map(str, LAYERS)))
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/language_memory.json and .svg")
    parser.add_argument("--once", nargs=4, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(*options.once)))
        return
    layers, widths = ([int(part) for part in given.split(",")] for given in (options.layers, options.widths))
    middle = layers[len(layers) // 2], widths[len(widths) // 2]
    pairs = dict.fromkeys([*((depth, middle[1]) for depth in layers), *((middle[0], width) for width in widths)])
    found = Rows(None, ("layers", "width"), as_json=options.json)
    for depth, width in pairs:
        asked = [depth, width, options.windows, options.tokens]
        done = subprocess.run(
            [sys.executable, __file__, "--once", *map(str, asked)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{depth} layers of width {width}: {done.stderr.strip() or 'the process was killed'}")
        found.add(json.loads(done.stdout.splitlines()[-1]))
    if not options.json:
        show(found, as_json=False)
    if options.keep:
        keep(
            "language_memory", list(found), {"dtype": "float32", "threads": 1, "vocabulary": VOCABULARY, "params": 0.8}
        )
        draw(list(found))


if __name__ == "__main__":
    main()
