"""Statistics, orders of removal and repair by one process and by several that share them, timed in turn.

    python benchmarks/shared_work.py --resnet56 WEIGHTS --data cifar10.npz [--processes 1,2] [--repeats 3]
    python benchmarks/shared_work.py --smollm2 FOLDER --text FILE [--processes 1,2] [--repeats 1]
    python benchmarks/shared_work.py --decoder 8x512 [--processes 1,2,4]

Each process has one thread, and joins a gloo group of processes on this machine. Seconds are those of the slowest, by
the clock, from one barrier to the next, and `processor` its processor time; `difference` is the largest of any weight
of the repaired model from those of one process, relative to its largest. The plan is made by the first run and given to
all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import keep, rows_before, show

STAGES = ("statistics", "order", "repair")
VOCABULARY = 8192
"""Of decoders of random weights."""


def subject(options: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """Return a model, its calibration samples, and budgets."""
    import torch

    if options.resnet56:
        from oneshot_cifar10 import drawn

        from prunekit.data.local_files import read_npz
        from prunekit.models.zoo import build_model
        from prunekit.settings.inputs import ModelSettings

        build = ModelSettings("resnet56", "cifar", weights=str(options.resnet56))
        return build_model(build, num_classes=10).eval(), drawn(read_npz(options.data).rest, 1024, 0)[0], {"macs": 0.5}
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if options.decoder:
        layers, width = map(int, options.decoder.split("x"))
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=layers,
            num_attention_heads=width // 64, num_key_value_heads=width // 64, tie_word_embeddings=True,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config)
        windows = torch.randint(0, VOCABULARY, (options.windows, 128))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.smollm2, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(options.smollm2)(options.text.read_text())["input_ids"]
        windows = torch.tensor(ids[: options.windows * 128]).view(-1, 128)
    model.config.use_cache = False
    return model.eval(), (windows,), {"params": 0.8}


def work(options: argparse.Namespace) -> dict[str, float]:
    """Share the work with the other processes of the group, and return the seconds of each stage."""
    import torch

    import prunekit
    from prunekit.criteria.elimination import eliminations
    from prunekit.distributed.process_group import is_main, join_group, wait_for_all
    from prunekit.distributed.shared_work import shared_values, sharing_work
    from prunekit.planning.keywords import prune_settings
    from prunekit.planning.plan import load_plan
    from prunekit.planning.solver import make_plan
    from prunekit.pruning.plan_search import CriterionInputs, importance
    from prunekit.pruning.sample_statistics import patch_statistics
    from prunekit.repair.repair_model import repair
    from prunekit.settings.calibration import RepairSettings

    torch.set_num_threads(1)
    model, samples, budgets = subject(options)
    example = samples[:1] if isinstance(samples, torch.Tensor) else (samples[0][:2],)
    chart = prunekit.trace(model, example, outputs=None if options.resnet56 else "logits")
    found, processor = dict[str, float](), dict[str, float]()
    with join_group(), sharing_work(), torch.no_grad():

        def timed(stage: str, call: Any) -> Any:
            wait_for_all()
            start, used = time.perf_counter(), time.process_time()
            value = call()
            processor[stage] = time.process_time() - used
            wait_for_all()
            found[stage] = time.perf_counter() - start
            return value

        settings = RepairSettings()
        patches = timed(
            "statistics", lambda: patch_statistics(model, samples, chart, settings, held_out=bool(options.resnet56))
        )
        timed("order", lambda: eliminations(model, chart, patches))
        if not options.plan.exists():  # by the first run, which is of one process
            settings_of_plan = prune_settings(model, True, **budgets)
            scores = importance(model, chart, settings_of_plan, CriterionInputs(patches=patches))
            make_plan(chart, scores, settings_of_plan).save(options.plan)
        plan = load_plan(options.plan)
        repaired, report = timed("repair", lambda: repair(model, plan, samples, settings))
        used = {stage: max(one[stage] for one in shared_values(processor)) for stage in STAGES}
        if is_main():
            torch.save(repaired.state_dict(), options.weights)
            found["after"] = report.after
            print(json.dumps({**found, "processor": used}), flush=True)
    return found


def run(options: argparse.Namespace, folder: Path, processes: int) -> dict[str, Any]:
    """Return the row of one run of some processes."""
    import torch

    first = folder / "one.pt"
    weights = folder / f"{processes}.pt" if first.exists() else first
    own = [sys.executable, __file__, *sys.argv[1:], "--once", "--plan", str(folder / "plan"), "--weights", str(weights)]
    port = 29500 + os.getpid() % 1000
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    group = [
        {**common, "WORLD_SIZE": str(processes), "RANK": str(number), "LOCAL_RANK": str(number)}
        for number in range(processes)
    ]
    started = [
        subprocess.Popen(own, env=env if processes > 1 else common, stdout=subprocess.PIPE, text=True) for env in group
    ]
    told = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(1)
    row = json.loads(told[0].strip().splitlines()[-1])
    one, other = (torch.load(path, weights_only=True) for path in (first, weights))
    apart = max(
        float((one[name].double() - other[name].double()).abs().max() / one[name].double().abs().max().clamp(min=1e-30))
        for name in one
        if one[name].is_floating_point() and one[name].numel()
    )
    return {"processes": processes, **row, "all": sum(row[stage] for stage in STAGES), "difference": apart}


def main() -> None:
    """Run all numbers of processes in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resnet56", type=Path, metavar="FILE", help="a state dict of the dense model")
    parser.add_argument("--data", type=Path, metavar="FILE", help="an .npz of CIFAR-10")
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER", help="as transformers saves it")
    parser.add_argument("--text", type=Path, metavar="FILE")
    parser.add_argument("--decoder", metavar="LAYERSxWIDTH", help="Llama's shape with random weights")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--processes", default="1,2", metavar="A,B")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        work(options)
        return
    name = "resnet56" if options.resnet56 else options.decoder or "smollm2"
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repeats):
            for processes in map(int, options.processes.split(",")):
                rows.append({"network": name, "windows": options.windows, **run(options, Path(folder), processes)})
                print(json.dumps(rows[-1]), flush=True)
    single = [row["all"] for row in rows if row["processes"] == 1]
    for processes in map(int, options.processes.split(",")):
        times = [row["all"] for row in rows if row["processes"] == processes]
        ratio = statistics.median(one / other for one, other in zip(single, times, strict=False)) if single else None
        row = {"network": name, "processes": processes, "seconds": statistics.median(times), "faster": ratio}
        show([row], as_json=False)
    if options.keep:
        rows += rows_before("shared_work", rows, ("network", "processes"))
        print(keep("shared_work", rows, {"threads": 1, "dtype": "float32", "windows": 32}), file=sys.stderr)


if __name__ == "__main__":
    main()
