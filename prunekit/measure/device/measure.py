#!/usr/bin/env python3
"""Measurement of the networks in a kit, on the device that this runs on: `python measure.py` in the kit's folder.

It needs Python 3.8 or newer and the runtime that kit.json names, and nothing of the machine that wrote the kit. Every
network is checked against the outputs that are expected of it, and timed in turns with the dense one. The times go to
times.json in the same folder. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import gzip
import hashlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shutil
import statistics
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FEWEST_ROUNDS, MOST_TIMES = 5, 8  # rounds at least, and at most so many times those of the kit
WINDOW, STEADY, WARM_CALLS, WARM_S = 5, 0.05, 100, 3.0  # the warm-up
WIDTH, DRIFT = 0.10, 0.05  # widest interval of a stable figure, and largest change of a steady device
COLD, PASSES, LAYERS_MS = 3, 10, 5000  # passes before layers are timed, passes that count, and how long they may take
ROUNDING_US = 0.5  # the mean of what profilers cut off, which write whole microseconds
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CODES = {"float32": "f", "float64": "d", "float16": "e", "bool": "?", "int8": "b", "uint8": "B", "int32": "i",
         "int64": "q"}  # fmt: skip
TRTEXEC = shutil.which("trtexec") or shutil.which("/usr/src/tensorrt/bin/trtexec") or ""
say = functools.partial(print, flush=True)
ADVICE = "copy the whole kit to this machine again"


class KitError(BaseException):
    """A reason to stop, beyond any `except Exception` for one network; and its exit code, if that is not 2."""


class Job(NamedTuple):
    """A network to load: its file, and the kit's inputs and this network's outputs (name, dtype, shape) in order."""

    path: Path
    inputs: list[dict[str, Any]]
    data: list[Path]  # the files of the inputs
    outputs: list[dict[str, Any]]
    threads: int
    dtype: str

    def arrays(self) -> dict[str, Any]:
        """Return the inputs as NumPy arrays by name."""
        read, pairs = importlib.import_module("numpy").frombuffer, zip(self.inputs, self.data)
        return {spec["name"]: read(file.read_bytes(), spec["dtype"]).reshape(spec["shape"]) for spec, file in pairs}


class Loaded(NamedTuple):
    """A network that a runtime has loaded."""

    run: Callable[[], Any]  # one pass
    outputs: Callable[[Any], Iterable[Any]]  # arrays or flat lists, from what a pass returned
    layers: Callable[[int], dict[str, float]] | None = None  # mean microseconds by operator, from so many passes
    clock: Callable[[], float] | None = None  # runs, and returns milliseconds; None: a pass is timed from here

    def ms(self) -> float:
        """Run once and return the milliseconds."""
        if self.clock:
            return self.clock()
        start = time.perf_counter_ns()
        self.run()
        return (time.perf_counter_ns() - start) / 1e6


def open_onnxruntime(job: Job) -> Loaded:
    """Load an ONNX file in ONNX Runtime's CPU provider."""
    ort = importlib.import_module("onnxruntime")

    def session(profile: str = "") -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = job.threads, 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")  # networks take turns
        if profile:
            options.enable_profiling, options.profile_file_prefix = True, profile
        return ort.InferenceSession(str(job.path), options, providers=["CPUExecutionProvider"])

    def layers(passes: int) -> dict[str, float]:
        profiled = session(f"{job.path}.profile")
        for _ in range(COLD + passes):
            profiled.run_with_ort_values(names, feed)
        return onnxruntime_layers(json.loads(Path(profiled.end_profiling()).read_text(encoding="utf-8")), passes)

    plain = session()
    names, arrays = [spec["name"] for spec in job.outputs], job.arrays()
    taken = [entry.name for entry in plain.get_inputs()]  # exporters drop unused inputs
    feed = {name: ort.OrtValue.ortvalue_from_numpy(arrays[name]) for name in taken}
    return Loaded(lambda: plain.run_with_ort_values(names, feed), lambda found: [one.numpy() for one in found], layers)


def onnxruntime_layers(events: Iterable[dict[str, Any]], passes: int) -> dict[str, float]:
    """Return the mean microseconds of each node, its kind before its name, by the events of ONNX Runtime's profiler."""
    each: list[dict[str, float]] = []
    now: dict[str, float] = {}
    for event in events:
        if event["name"].endswith("_kernel_time"):
            name = "{} {}".format(event["args"]["op_name"], event["name"][: -len("_kernel_time")])
            now[name] = now.get(name, 0.0) + event["dur"] + ROUNDING_US
        elif event["name"] == "model_run":  # the last event of a pass
            each.append(now)
            now = {}
    kept = each[-passes:]
    return {name: sum(one.get(name, 0.0) for one in kept) / len(kept) for name in (kept[-1] if kept else {})}


def open_openvino(job: Job) -> Loaded:
    """Load an IR or ONNX file in OpenVINO's CPU plug-in."""
    core = importlib.import_module("openvino").Core()
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": job.threads}
    hint = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(job.dtype)
    options.update({"INFERENCE_PRECISION_HINT": hint} if hint else {})
    model = core.read_model(job.path)
    compiled = core.compile_model(model, "CPU", options)
    used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if hint and used != hint:
        raise ValueError(f"OpenVINO was asked for kernels in {hint}, and computes in {used}")
    arrays, request = job.arrays(), compiled.create_infer_request()
    feed = {name: array for name, array in arrays.items() if any(name in one.get_names() for one in compiled.inputs)}

    def layers(passes: int) -> dict[str, float]:
        counting = core.compile_model(model, "CPU", {**options, "PERF_COUNT": True})
        known = {}  # the first node of the file that an operator was made from
        for one in counting.get_runtime_model().get_ordered_ops():
            info = one.get_rt_info()
            names = info["originalLayersNames"].astype(str) if "originalLayersNames" in info else ""
            known[one.get_friendly_name()] = names.split(",")[0]
        counted = counting.create_infer_request()

        def sums(more: int, total: int) -> list[float]:  # the counters are means over all passes so far
            for _ in range(more):
                counted.infer(feed, share_inputs=True, share_outputs=True)
            return [total * (one.real_time.total_seconds() * 1e6 + ROUNDING_US) for one in counted.profiling_info]

        before, after = sums(COLD, COLD), sums(passes, COLD + passes)
        found: dict[str, float] = {}
        for one, early, late in zip(counted.profiling_info, before, after):
            if one.status == one.Status.EXECUTED:
                name = known.get(one.node_name) or one.node_name
                found[name] = found.get(name, 0.0) + max(0.0, late - early) / passes
        return found

    run = functools.partial(request.infer, feed, share_inputs=True, share_outputs=True)
    return Loaded(run, lambda found: [found[spec["name"]] for spec in job.outputs], layers)


def open_litert(job: Job) -> Loaded:
    """Load a file of LiteRT, formerly TensorFlow Lite."""
    interpreter = importlib.import_module(f"{module_of('litert')}.interpreter").Interpreter(
        model_path=str(job.path), num_threads=job.threads
    )
    interpreter.allocate_tensors()
    for entry, array in zip(in_order(interpreter.get_input_details()), job.arrays().values()):
        interpreter.set_tensor(entry["index"], array)
    results = in_order(interpreter.get_output_details())
    return Loaded(interpreter.invoke, lambda _: [interpreter.get_tensor(entry["index"]) for entry in results])


def in_order(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tensors of a LiteRT file by the numbers in their names: serving_default_args_0, ..._args_1, ..."""
    return sorted(entries, key=lambda entry: [int(part) for part in re.findall(r"\d+", entry["name"])])


def open_ncnn(job: Job) -> Loaded:
    """Load a network of ncnn, which has no axis for batches: it runs the images of a batch one after the other."""
    ncnn, numpy = importlib.import_module("ncnn"), importlib.import_module("numpy")
    net = ncnn.Net()
    net.opt.num_threads = job.threads
    if net.load_param(str(job.path)) or net.load_model(str(job.path.with_suffix(".bin"))):
        raise ValueError("ncnn cannot load it")
    mats = [[ncnn.Mat(numpy.ascontiguousarray(one)).clone() for one in array] for array in job.arrays().values()]

    def run() -> list[list[Any]]:
        found = []
        for image in zip(*mats):
            extractor = net.create_extractor()
            for at, mat in enumerate(image):
                extractor.input(f"in{at}", mat)
            found.append([extractor.extract(f"out{at}")[1] for at in range(len(job.outputs))])
        return found

    return Loaded(run, lambda found: [numpy.stack([numpy.array(mat) for mat in each]) for each in zip(*found)])


def open_executorch(job: Job) -> Loaded:
    """Load a program of ExecuTorch, whose Python package takes tensors of torch, which it brings along."""
    runtime, torch = importlib.import_module("executorch.runtime"), importlib.import_module("torch")
    bindings = importlib.import_module("executorch.extension.pybindings.portable_lib")
    getattr(bindings, "_unsafe_reset_threadpool", lambda threads: None)(job.threads)
    program = runtime.Runtime.get().load_program(str(job.path))
    method, tensors = program.load_method("forward"), [torch.from_numpy(one.copy()) for one in job.arrays().values()]
    return Loaded(lambda: method.execute(tensors), lambda found: [one.detach().numpy() for one in found])


def open_tensorrt(job: Job) -> Loaded:
    """Build an engine by trtexec; each run is a process of it, whose milliseconds are those on the GPU."""
    engine, times, made = (f"{job.path}.{end}" for end in ("engine", "times.json", "outputs.json"))
    feed = ",".join(f"{spec['name']}:{file}" for spec, file in zip(job.inputs, job.data))

    def call(*options: str) -> str:
        done = subprocess.run([TRTEXEC, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        text = done.stdout.decode(errors="replace")
        if done.returncode and "--help" not in options:
            wrong = [row for row in text.splitlines() if "[E]" in row]
            raise ValueError(f"trtexec failed: {wrong[0] if wrong else text[-200:]}")
        return text

    def run() -> dict[str, list[float]]:
        call(f"--loadEngine={engine}", f"--loadInputs={feed}", "--iterations=10", "--duration=0", "--warmUp=200",
             f"--exportTimes={times}", f"--exportOutput={made}")  # fmt: skip
        return {one["name"]: one["values"] for one in json.loads(Path(made).read_text(encoding="utf-8"))}

    def clock() -> float:
        run()
        return trtexec_ms(Path(times).read_text(encoding="utf-8"))

    weak = {"float16": "--fp16", "int8": "--int8"}.get(job.dtype, "--noTF32")  # for TensorRT before 9
    typed = "--stronglyTyped" if "--stronglyTyped" in call("--help") else weak
    call(f"--onnx={job.path}", f"--saveEngine={engine}", typed, "--iterations=1", "--duration=0")
    return Loaded(run, lambda found: [found[spec["name"]] for spec in job.outputs], clock=clock)


def trtexec_ms(text: str) -> float:
    """Return the median of the GPU's milliseconds in what trtexec exports by --exportTimes."""
    return statistics.median(float(one["computeMs"]) for one in json.loads(text))


OPENERS: dict[str, Callable[[Job], Loaded]] = {
    "onnxruntime": open_onnxruntime, "openvino": open_openvino, "litert": open_litert, "ncnn": open_ncnn,
    "executorch": open_executorch, "tensorrt": open_tensorrt,
}  # fmt: skip


def module_of(runtime: str) -> str:
    """Return the module of a runtime: of several names that it had, the first that is installed."""
    names = {"litert": ("ai_edge_litert", "tflite_runtime")}.get(runtime, (runtime,))
    return next((name for name in names if importlib.util.find_spec(name)), names[0])


def require_runtime(name: str) -> str:
    """Return the runtime and its version; an error says how to install it on this machine."""
    if name == "tensorrt":
        if not TRTEXEC:
            raise KitError("the kit needs trtexec in PATH: install TensorRT's package libnvinfer-bin, which has it")
        return f"tensorrt ({TRTEXEC})"
    module = module_of(name)
    package = module.replace("_", "-")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        how = f"{sys.executable} -m pip install {package}"
        if sys.prefix == sys.base_prefix and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists():
            how = f"{sys.executable} -m venv ~/measure && ~/measure/bin/pip install {package}\n"  # a rule of Debian's
            how += f"~/measure/bin/python {Path(__file__).resolve()}"
        raise KitError(f"this Python cannot import {module}, which the kit needs ({line(error)}); do:\n{how}") from None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{name} {importlib.metadata.version(package)}"
    return f"{name} {getattr(found, '__version__', 'of an unknown version')}"


def inside(folder: Path, *parts: str) -> Path:
    """Return a file of the kit: neither its name nor a link leads out of the folder."""
    path = folder
    for part in parts:
        path = path / part
        if not NAME.fullmatch(part) or path.is_symlink():
            raise KitError(f"{part!r}: leads, or may lead, out of the kit's folder; such a kit is not to be trusted")
    if not path.is_file():
        raise KitError(f"{path}: expected a file of the kit, and there is none; {ADVICE}")
    return path


def read_kit(folder: Path) -> dict[str, Any]:
    """Return what is in kit.json, once all that is used of it is right and the files that it names are there."""
    file = inside(folder, "kit.json")
    try:
        kit: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if kit["format"] != 1 or kit["runtime"] not in OPENERS:
            raise KitError(f"{file}: format {kit['format']!r} for {kit['runtime']!r}; this measure.py reads format 1")
        names, numbers = [one["name"] for one in kit["networks"]], (kit["threads"], kit["rounds"], kit["tolerance"])
        if not min(numbers) > 0:
            raise ValueError("threads, rounds or tolerance")
        plain = all(map(NAME.fullmatch, names)) and len({*names}) == len(names) and names[0] == "dense"
        if not plain or not re.fullmatch("[0-9a-f]{64}", kit["kit"]):
            raise ValueError("names of networks, or its id")
        for at, spec in enumerate(kit["inputs"]):
            read_array(inside(folder, "inputs", f"{at}.bin"), spec)
        for one in kit["networks"]:
            for name in one["files"]:
                inside(folder, "files", f"{name}.gz")
            for at, spec in enumerate(one["outputs"]):
                read_array(inside(folder, "outputs", f"{one['name']}.{at}.bin"), spec)
            one["files"][one["main"]]
        return kit
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise KitError(f"{file}: damaged ({type(error).__name__}: {line(error)}); {ADVICE}") from None


def read_array(file: Path, spec: dict[str, Any]) -> list[float]:
    """Return the numbers of an array, which are as many as its shape says."""
    data, form = file.read_bytes(), f"<{math.prod(spec['shape'])}{CODES[spec['dtype']]}"
    if len(data) != struct.calcsize(form):
        raise KitError(f"{file}: expected {struct.calcsize(form)} bytes, got {len(data)}; {ADVICE}")
    return list(struct.unpack(form, data))


def unpack(folder: Path, network: dict[str, Any], into: Path) -> Path:
    """Unpack the files of a network, check their sums, and return the main one."""
    into.mkdir()
    for name, expected in network["files"].items():
        source, digest = inside(folder, "files", f"{name}.gz"), hashlib.sha256()
        try:
            with gzip.open(source) as packed, open(into / name, "xb") as file:
                for block in iter(lambda: packed.read(1 << 20), b""):
                    digest.update(block)
                    file.write(block)
        except (OSError, EOFError, zlib.error) as error:
            raise KitError(f"{source}: cannot be unpacked to {into} ({line(error)}); free space, or {ADVICE}") from None
        if digest.hexdigest() != expected:
            raise KitError(f"{source}: damaged, its SHA-256 is not the one in kit.json; {ADVICE}")
    return into / str(network["main"])


def load(folder: Path, kit: dict[str, Any], network: dict[str, Any], into: Path) -> tuple[Loaded, float]:
    """Load a network and run it; return it and how far its outputs are off, as a share of the largest expected."""
    data = [inside(folder, "inputs", f"{at}.bin") for at in range(len(kit["inputs"]))]
    job = Job(unpack(folder, network, into), kit["inputs"], data, network["outputs"], kit["threads"], kit["dtype"])
    loaded, apart = OPENERS[kit["runtime"]](job), 0.0
    found = [one if isinstance(one, list) else one.ravel().tolist() for one in loaded.outputs(loaded.run())]
    if len(found) != len(network["outputs"]):
        raise ValueError(f"{len(found)} outputs came, {len(network['outputs'])} were expected")
    for at, (one, spec) in enumerate(zip(found, network["outputs"])):
        file = inside(folder, "outputs", f"{network['name']}.{at}.bin")
        apart = max(apart, difference(one, read_array(file, spec)))
    if not apart <= kit["tolerance"]:
        raise ValueError(f"its outputs are off by {apart:.2g} of the largest expected, {kit['tolerance']:g} is allowed")
    return loaded, apart


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference as a share of the largest expected number; infinite for a NaN that is only here."""
    if len(found) != len(expected):
        raise ValueError(f"an output of {len(expected)} numbers was expected, {len(found)} came")
    largest = max((abs(one) for one in expected if math.isfinite(one)), default=0.0) or 1.0
    gaps = (abs(a - b) for a, b in zip(found, expected) if not (a == b or (a != a and b != b)))
    return max((math.inf if gap != gap else gap for gap in gaps), default=0.0) / largest


def warm_up(ms: Callable[[], float]) -> None:
    """Run until the median of five calls is within 5 % of the five before, at most 100 calls or 3 seconds."""
    times: list[float] = []
    until = time.monotonic() + WARM_S
    while len(times) < WARM_CALLS and time.monotonic() < until:
        times.append(ms())
        before, now = times[-2 * WINDOW : -WINDOW], times[-WINDOW:]
        if len(before) == WINDOW and abs(statistics.median(now) / statistics.median(before) - 1) <= STEADY:
            return


def take_turns(network: Loaded, dense: Loaded, rounds: int, until: float) -> list[list[float]]:
    """Return milliseconds (network, dense) of rounds in turns, reversed every other round; more rounds if they vary."""
    pairs: list[list[float]] = []
    gc.collect()  # it is off otherwise
    while len(pairs) < FEWEST_ROUNDS or (time.monotonic() < until and len(pairs) < MOST_TIMES * rounds):
        if len(pairs) >= FEWEST_ROUNDS and len(pairs) % rounds == 0 and not wide(pairs):
            break
        pair = [0.0, 0.0]
        for at in (0, 1) if len(pairs) % 2 == 0 else (1, 0):
            pair[at] = (network, dense)[at].ms()
        pairs.append(pair)
    return pairs


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the ends of its 95 % interval, by order statistics; of five values, their range."""
    ordered, count = sorted(values), len(values)
    below = itertools.accumulate(math.comb(count, rank) for rank in range(count // 2))  # of 2**count ways
    end = max(0, sum(40 * ways <= 2**count for ways in below) - 1)
    return statistics.median(ordered), ordered[end], ordered[-1 - end]


def faster(pairs: Iterable[Sequence[float]]) -> tuple[float, float, float]:
    """Return how many times as fast as the dense network a network is, and the interval of that."""
    return interval([dense / network for network, dense in pairs])


def wide(pairs: Iterable[Sequence[float]]) -> bool:
    """Return whether the interval of a network is too wide for a stable figure."""
    usual, low, high = faster(pairs)
    return high - low > WIDTH * usual


def readings(pattern: str) -> float | None:
    """Return a thousandth of the largest of some readings of the system; None where none can be read."""
    found = []
    for file in Path("/sys").glob(pattern):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(file.read_text()) / 1000)
    return max((one for one in found if one > 0), default=None)


def watch(times: dict[str, Any]) -> None:
    """Note temperature and clock: the first and the latest."""
    speed = readings("devices/system/cpu/cpu*/cpufreq/scaling_cur_freq")
    for name, value in (("temperature_c", readings("class/thermal/*/temp")), ("frequency_mhz", speed)):
        times["watched"][name] = [times["watched"].get(name, [value])[0], value]


def describe_device(kit: dict[str, Any], runtime: str) -> dict[str, Any]:
    """Return what the times depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if os.access(cpuinfo, os.R_OK) else ""
    cpus = re.findall(r"^(?:model name|Model|Hardware)\s*: *(.+)$", text, re.MULTILINE)
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = " + ".join(dict.fromkeys(cpus)) or platform.processor() or "unknown"
    return {
        "system": f"{platform.system()} {platform.release()}", "machine": platform.machine(), "cpu": cpu,
        "cores": cores, "governor": governor.read_text().strip() if os.access(governor, os.R_OK) else None,
        "python": platform.python_version(), "runtime": runtime, "threads": kit["threads"],
    }  # fmt: skip


def doubts(times: dict[str, Any]) -> dict[str, str]:
    """Return what is unstable about the times, in sentences, and what helps against each."""
    found, device, measured = {}, times["device"], times["networks"]
    if device["threads"] > (device["cores"] or math.inf):
        found[f"the {device['threads']} threads had to share {device['cores']} cores"] = "a kit with fewer threads"
    clocks, heat = (times["watched"].get(name, [None, None]) for name in ("frequency_mhz", "temperature_c"))
    if None not in clocks and clocks[1] < (1 - DRIFT) * clocks[0]:
        at = f" at {heat[1]:.0f} C" if heat[1] else ""
        found[f"the clock fell from {clocks[0]:.0f} to {clocks[1]:.0f} MHz{at}"] = "cooling"
    ends = [interval([pair[1] for pair in one["ms"]]) for one in measured.values()]
    (first, *early), (last, *late) = (ends[0], ends[-1]) if ends else ((1.0, 0.0, 0.0),) * 2
    if abs(last / first - 1) > DRIFT and (early[1] < late[0] or late[1] < early[0]):
        found[f"the dense network took {first:.3g} ms at first and {last:.3g} ms at last"] = "cooling and mains power"
    names = [name for name, one in measured.items() if wide(one["ms"])]
    if names:
        fixed = "" if device["governor"] in (None, "performance") else ", the governor `performance`"
        sentence = f"the 95 % interval is wider than {WIDTH:.0%} of the median for {', '.join(names)}"
        found[sentence] = f"closing other programs{fixed} and more --minutes"
    return found


def sum_of(times: dict[str, Any]) -> str:
    """Return the checksum of all but the checksum."""
    rest = {name: value for name, value in times.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_times(file: Path, kit: dict[str, Any], device: dict[str, Any], again: bool) -> dict[str, Any]:
    """Return the times that an earlier run left, if they are of this kit, device and runtime; else none yet."""
    if again or not os.path.lexists(file):
        return {"format": 1, "kit": kit["kit"], "seconds": 0.0, "complete": False, "device": device, "networks": {},
                "failed": {}, "watched": {}, "doubts": []}  # fmt: skip
    try:
        times: dict[str, Any] = json.loads(inside(file.parent, file.name).read_text(encoding="utf-8"))
        then = {"kit": times["kit"], **times["device"]}
        now = {"kit": kit["kit"], **device}
        differ = [name for name in ("kit", "machine", "cpu", "runtime") if then.get(name) != now[name]]
        wrong = f"of another {differ[0]} ({then.get(differ[0])}, now {now[differ[0]]})" if differ else ""
        wrong = wrong if times["checksum"] == sum_of(times) else "damaged"
    except (ValueError, KeyError, TypeError):
        wrong = "damaged"
    if wrong:
        raise KitError(f"{file}: {wrong}; --again replaces it, or move it to another folder")
    return times


def write_times(file: Path, times: dict[str, Any]) -> None:
    """Write times.json at once: what was there stays until the new one is whole."""
    times["doubts"] = list(doubts(times))
    times["checksum"] = sum_of(times)
    handle, name = tempfile.mkstemp(dir=str(file.parent), prefix=file.name)
    with os.fdopen(handle, "w", encoding="utf-8") as new:
        json.dump(times, new, indent=1)
    os.replace(name, file)


def line(error: BaseException) -> str:
    """Return what an error says in one line that a terminal can show."""
    words = " ".join(str(error).split()) or type(error).__name__
    words = words if len(words) <= 400 else f"{words[:150]} ... {words[-250:]}"
    return "".join(one if one.isprintable() else "?" for one in words)


def measure(folder: Path, minutes: float, only: Sequence[str], again: bool) -> int:
    """Measure what is left of a kit, and return the exit code."""
    kit, file = read_kit(folder), folder / "times.json"
    networks = {network["name"]: network for network in kit["networks"]}
    if unknown := [name for name in only if name not in networks]:
        raise KitError(f"--only: the kit has no network {unknown[0]!r}; it has {', '.join(networks)}")
    times = read_times(file, kit, describe_device(kit, require_runtime(kit["runtime"])), again)
    left = [name for name in networks if (name in only or not only) and name not in times["networks"]]
    left.sort(key=lambda name: name in times["failed"])  # one that ends the process would do so again
    start, before = time.monotonic(), times["seconds"]
    end = start + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="measure-") as work:
        if left:
            try:
                dense, _ = load(folder, kit, networks["dense"], Path(work, ".dense"))
            except Exception as error:  # runtimes raise errors of all kinds
                raise KitError(f"the dense network, which all others need, failed: {line(error)}", 1) from None
            warm_up(dense.ms)
            watch(times)
        for done, name in enumerate(left):
            now = time.monotonic()
            until = now + max(0.0, end - now) / (len(left) - done)
            times["failed"][name] = "the process ended while it was measured"
            times["complete"] = {*times["networks"], *times["failed"]} == {*networks}
            write_times(file, times)
            try:
                loaded, apart = load(folder, kit, networks[name], Path(work, name))
                warm_up(loaded.ms)
                pairs = take_turns(loaded, dense, kit["rounds"], until)
                times["networks"][name] = entry = {"ms": pairs, "difference": apart}
                del times["failed"][name]
                own, dense_ms = (statistics.median(column) for column in zip(*pairs))
                ratio = "{:.2f}x [{:.2f}, {:.2f}]".format(*faster(pairs))
                text = f"{name}   {own:.3g} ms  dense {dense_ms:.3g} ms  {ratio}"
                if loaded.layers:
                    with contextlib.suppress(Exception):  # a profiler that fails costs no times
                        entry["layers_us"] = loaded.layers(max(2, min(PASSES, int(LAYERS_MS / own))))
            except Exception as error:
                times["failed"][name] = line(error)
                text = f"{name}   failed: {line(error)}"
            shutil.rmtree(Path(work, name), ignore_errors=True)
            watch(times)
            now = time.monotonic()
            times["seconds"] = before + now - start
            write_times(file, times)
            ahead = max(0.0, min(end - now, (now - start) / (done + 1) * (len(left) - done - 1))) / 60
            place = f"[{len(times['networks']) + len(times['failed']):2}/{len(networks)}]"
            say(f"{place} {text}   {ahead:.1f} min left")
    return conclude(file, times, networks)


def conclude(file: Path, times: dict[str, Any], networks: Iterable[str]) -> int:
    """Say what is unstable and what to do next, and return the exit code."""
    if unstable := doubts(times):
        say(f"Unstable: {'; '.join(unstable)}. What helps: {', '.join(dict.fromkeys(unstable.values()))}.")
    if times["failed"]:
        say(f"Failed: {', '.join(times['failed'])}; the same command tries them again.")
    if missing := [name for name in networks if name not in times["networks"] and name not in times["failed"]]:
        say(f"Not measured yet: {', '.join(missing)}; measure.py without --only goes on with them.")
    say(f"The times are in {file}: copy it to the machine that wrote the kit.")
    return 0 if "dense" in times["networks"] else 1


def main(given: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="measure.py",
        description="Measure the networks of a kit on this device (plugged in, cool, other programs closed).",
        epilog="Exit code: 0 measured, 1 the dense network failed, 2 wrong usage, a damaged kit or no runtime.",
    )
    add, here = parser.add_argument, Path(__file__).resolve().parent
    add("--kit", type=Path, default=here, metavar="FOLDER", help="the kit (default: the folder of this file)")
    add("--minutes", type=float, default=4.0, metavar="M", help="about how long it may take (default: 4)")
    add("--only", nargs="+", default=[], metavar="NAME", help="measure only these networks of the kit")
    add("--again", action="store_true", help="start anew, and do not go on with the times.json that is there")
    options = parser.parse_args(given)
    if not options.minutes > 0:
        parser.error(f"--minutes: expected a number above 0, got {options.minutes:g}")
    try:
        return measure(options.kit, options.minutes, options.only, options.again)
    except KitError as error:
        sys.stderr.write(f"{error.args[0]}\n")
        return 2 if len(error.args) == 1 else 1
    except KeyboardInterrupt:
        say("\nStopped. What is measured is kept in times.json: the same command, without --again, goes on from there.")
        return 130


if __name__ == "__main__":
    gc.disable()
    sys.exit(main())
