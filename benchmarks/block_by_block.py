"""Memory and time of pruning a decoder block by block from its folder; and its perplexity beside that of whole models.

    python benchmarks/block_by_block.py --layers 4,8,16
    python benchmarks/block_by_block.py --weights smollm2 --text quotes.txt --held-out docs.txt

The first writes decoders of random weights in bfloat16 shard by shard, prunes each to 0.8 of its parameters in a
process of its own, and samples its anonymous memory and its pages of files. The second prunes real weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

RESULT = Path(__file__).parent / "results" / "block_by_block.json"
WINDOWS, TOKENS, SHARE = 8, 256, 0.8


def write_decoder(folder: Path, layers: int, width: int, vocabulary: int) -> int:
    """Write a Llama of random weights in bfloat16, a shard for each layer, and return its number of parameters."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = width // 64
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4, max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    shards: dict[str, list[str]] = {}
    for name in state:
        shards.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
    index: dict[str, str] = {}
    for shard, names in shards.items():
        file = f"model-{shard}.safetensors"
        tensors = {
            name: torch.ones(state[name].shape, dtype=torch.bfloat16)
            if name.endswith("norm.weight")
            else (torch.randn(state[name].shape) * 0.02).bfloat16()
            for name in names
        }
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(folder)
    return sum(tensor.numel() for tensor in state.values())


@contextmanager
def peaks() -> Iterator[dict[str, int]]:
    """Sample this process's memory until the end: MiB of anonymous memory, of pages of files, and of both."""
    found, done = {"RssAnon": 0, "RssFile": 0, "VmRSS": 0}, threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in found:
                    found[name] = max(found[name], int(value.split()[0]) // 1024)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def measure(folder: Path, out: Path, vocabulary: int) -> dict[str, Any]:
    """Prune a folder in this process, and return seconds and peaks."""
    import prunekit as pk

    torch.set_num_threads(1)
    tokens = torch.randint(0, vocabulary, (WINDOWS, TOKENS), generator=torch.Generator().manual_seed(0))
    cpu, wall = time.process_time(), time.perf_counter()
    with peaks() as found:
        result = pk.prune_folder(folder, tokens, params=SHARE, out=out)
    seconds = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    return {**seconds, **found, "parameters": result.parameters, "config": dict(result.config)}


def random_decoders(layers: list[int], width: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    """Measure decoders of several depths, each in a process of its own."""
    for count in layers:
        with tempfile.TemporaryDirectory() as place:
            folder, out = Path(place, "dense"), Path(place, "pruned")
            folder.mkdir()
            write_decoder(folder, count, width, vocabulary)
            command = [sys.executable, __file__, "--measure", str(folder), str(out), "--vocabulary", str(vocabulary)]
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        yield {"layers": count, "width": width, **json.loads(found)}


def real_weights(weights: Path, text: Path, held_out: Path) -> dict[str, Any]:
    """Prune real weights block by block, and return perplexities of text from the domain and from outside of it."""
    from language_models import SUBJECTS, Source
    from transformers import AutoModelForCausalLM

    import prunekit as pk

    torch.set_num_threads(1)
    subject = SUBJECTS["smollm2"](Source(weights, text, held_out, 32, 64, 128))
    tokens = torch.cat([batch["input_ids"] for batch in subject.calibration])
    with tempfile.TemporaryDirectory() as place:
        cpu = time.process_time()
        result = pk.prune_folder(weights, tokens, params=SHARE, out=Path(place, "pruned"))
        seconds = time.process_time() - cpu
        small = AutoModelForCausalLM.from_pretrained(Path(place, "pruned"), dtype=torch.float32)
    judged = {name: round(value, 3) for name, value in subject.judge(small.train(False)).items()}
    return {"share": SHARE, "cpu_s": seconds, **judged, "config": dict(result.config)}


def main() -> None:
    """Measure what is asked for, and write it beside what was measured before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", default="4,8,16")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--measure", nargs=2, type=Path)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure[0], given.measure[1], given.vocabulary)))
        return
    results = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    if given.weights:
        results["weights"] = {given.weights.name: real_weights(given.weights, given.text, given.held_out)}
        print(json.dumps(results["weights"], indent=1))
    else:
        results["random"] = []
        for row in random_decoders([int(one) for one in given.layers.split(",")], given.width, given.vocabulary):
            results["random"].append(row)
            print(
                f"{row['layers']:3} layers, {row['parameters'][0] / 1e6:,.0f} M: {row['cpu_s']:,.0f} CPU s, "
                f"{row['RssAnon']:,} MiB anonymous, {row['RssFile']:,} MiB of files, {row['VmRSS']:,} MiB both",
                flush=True,
            )
    RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
