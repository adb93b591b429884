"""Engines of a sweep: its commands run in processes of this machine or on Ray, or are written as a script for SLURM."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from prunekit.errors import RunError, UsageError, reason_of
from prunekit.jobs.run.run_folder import object_in
from prunekit.measure.latency.machine import cores
from prunekit.utils.availability import import_of_extra
from prunekit.utils.display import PREFIXES, size
from prunekit.utils.files import write_text
from prunekit.utils.progress import Log

ENDING_S, POLL_S = 20.0, 0.2
"""How long a command may take to end once it is asked to, and how often commands are looked at."""
SAID, UNEXPECTED = "prunekit: error: ", "\nThis was not expected"
WRONG = 2
"""Exit code for wrong usage, which a second try would not change."""
START = """
import ctypes, sys
if sys.platform == "linux": ctypes.CDLL(None).prctl(1, 9)
from prunekit.cli import main
main()
"""
"""The program of a command: it is killed (9) when the process that started it ends (1 is PR_SET_PDEATHSIG)."""


@dataclass(frozen=True)
class Command:
    """A command of a sweep; what it prints is in `path`.json, and what it logs in `path`.log."""

    name: str  # for people
    path: Path  # without an ending
    arguments: tuple[str, ...]  # of `prunekit`
    threads: int | None = None  # that it computes with; None: torch's choice
    gpu: bool = False  # whether it takes one, if there is any

    @property
    def log(self) -> Path:
        """The file of its log."""
        return self.path.with_suffix(".log")

    @property
    def problem(self) -> str | None:
        """The last line of its error, why it has no result; None if it has one."""
        if object_in(self.path.with_suffix(".json")) is not None:
            return None
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else "it has not run"
        said = text.rpartition(SAID)[2].partition(UNEXPECTED)[0].strip()
        return (said or "it ended without a word").splitlines()[-1]

    def note(self, why: str) -> None:
        """Write why it was ended into its log."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"\n{SAID}{why}\n")

    def start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the command; if it was started before, its run goes on."""
        again = ("--resume", "auto") if self.resumable and self.log.exists() else ()
        line = [sys.executable, "-c", START, *self.arguments, *again]
        with self.path.with_suffix(".json").open("wb") as printed, self.log.open("wb") as said:
            return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=printed, stderr=said, env=environment)

    @property
    def resumable(self) -> bool:
        """True if it can go on with an unfinished run."""
        return self.arguments[0] in ("finetune", "prune")


@dataclass(frozen=True)
class Limits:
    """Limits of an engine."""

    at_once: int | None = None  # commands; None: as many as there are cores, or as the cluster takes
    memory: int | None = None  # bytes of each command with all its processes
    retries: int = 1  # further tries of a command that fails


def bytes_of(text: str | None) -> int | None:
    """Return the bytes of a text such as 4GB or 500MB; None of None."""
    found = re.fullmatch(r"(\d*\.?\d+) ?([kMGT])B", text or "")
    if text is not None and (found is None or not float(found[1])):
        raise UsageError(f"memory: expected a size such as 4GB or 500MB, got {text!r}")
    return found and int(float(found[1]) * next(factor for factor, prefix in PREFIXES if prefix == found[2]))


def run_processes(commands: Sequence[Command], limits: Limits, log: Log) -> None:
    """Run commands in processes of this machine, at most some at once; one that fails is tried again."""
    waiting = deque((command, limits.retries) for command in commands)
    running = dict[int, tuple[Command, int, subprocess.Popen[bytes]]]()
    most = limits.at_once or max(1, cores() // max((command.threads or cores() for command in commands), default=1))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [*map(str, range(torch.cuda.device_count()))]
    try:
        while waiting or running:
            for slot in sorted({*range(most)} - running.keys())[: len(waiting)]:
                command, tries = waiting.popleft()
                gpu = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if command.gpu and len(gpus) > 1 else {}
                log(f"{command.name}: starts")
                running[slot] = command, tries, command.start(os.environ | gpu)
            time.sleep(POLL_S)
            for slot, (command, tries, process) in [*running.items()]:
                used = sum(map(_memory, _family(process))) if limits.memory else 0
                if limits.memory and used > limits.memory:
                    _end(process)
                    command.note(f"out of memory: {size(used)} in use, --memory allows {size(limits.memory)}")
                elif (code := process.poll()) is None:
                    continue
                elif code < 0:
                    command.note(f"killed by signal {-code}, which may be the system's for want of memory")
                del running[slot]
                log(f"{command.name}: {command.problem or 'done'}")
                if command.problem is not None and tries and process.returncode != WRONG:
                    waiting.appendleft((command, tries - 1))
    finally:
        for _, _, process in running.values():
            process.terminate()
        for _, _, process in running.values():
            _end(process, ENDING_S)


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return a process with all that it started."""
    with suppress(psutil.Error):
        first = psutil.Process(process.pid)
        return [first, *first.children(recursive=True)]
    return []


def _memory(process: psutil.Process) -> int:
    """Return the memory of a process; of what it shares with others its part, where the system tells it."""
    with suppress(psutil.Error):  # it has just ended
        found = process.memory_full_info()
        return int(getattr(found, "pss", found.uss))
    return 0


def _end(process: subprocess.Popen[bytes], wait_s: float = 0.0) -> None:
    """Kill a process with all that it started, unless it ends by itself first."""
    family = _family(process)
    with suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    for each in family:
        with suppress(psutil.Error):
            each.kill()
    process.wait()


def run_ray(commands: Sequence[Command], limits: Limits, log: Log) -> None:
    """Run commands on the Ray cluster that is there, or on one that is started here; they wait for free CPUs.

    All nodes see the same files. A command whose worker is killed is tried again, and its run goes on.
    """
    ray = import_of_extra("ray", "ray", "--engine ray", UsageError)
    if started := not ray.is_initialized():
        ray.init(log_to_driver=False)
    given, nodes = Limits(1, limits.memory, limits.retries), [one["Resources"] for one in ray.nodes() if one["Alive"]]
    need = {"CPU": max((one.threads or 1 for one in commands), default=1), "memory": limits.memory or 0}
    if not any(all(node.get(name, 0) >= least for name, least in need.items()) for node in nodes):
        raise RunError(f"Ray: a trial needs a node with {need['CPU']} CPUs and {size(need['memory'])}, got {nodes}")
    gpus = any(node.get("GPU") for node in nodes)
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "PRUNEKIT_CACHE") if name in os.environ}
    run = ray.remote(max_retries=limits.retries)(_run_on_node)
    asked = [
        run.options(num_cpus=one.threads or 1, num_gpus=int(gpus and one.gpu), memory=limits.memory).remote(
            one, given, os.getcwd(), environment
        )
        for one in commands
    ]
    try:
        for command, reference in zip(commands, asked, strict=True):
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                command.note(f"Ray: {reason_of(error)}")
            log(f"{command.name}: {command.problem or 'done'}")
    finally:
        for reference in asked:
            ray.cancel(reference)
        if started:
            ray.shutdown()


def _run_on_node(command: Command, limits: Limits, folder: str, environment: Mapping[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    if command.problem is not None:  # as Ray may start it again
        run_processes([command], limits, print)


ENGINES: Mapping[str, Callable[[Sequence[Command], Limits, Log], None] | None]
ENGINES = {"processes": run_processes, "ray": run_ray, "slurm": None, "collect": None}
"""Engines by name: `slurm` only writes a script, and `collect` only compares what is there."""


def write_slurm(
    script: Path, shared: Sequence[Command], trials: Sequence[Command], compare: Sequence[str], limits: Limits
) -> None:
    """Write a script that submits a job for what trials share, an array of trials, and a job that compares them."""

    def line(arguments: Sequence[str]) -> str:
        return shlex.join([sys.executable, "-m", "prunekit", *arguments])

    def tried(one: Command) -> str:
        return f"tried {shlex.quote(str(one.path))} {'yes' if one.resumable else 'no'} {line(one.arguments)}"

    memory = [f"--mem={-(-limits.memory // 2**20)}M"] if limits.memory else []
    threads = max((one.threads or 1 for one in trials), default=1)
    text = [
        f"#!/bin/bash\n# Submits a sweep: bash {script.name} [OPTION OF sbatch]...",
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        f"script={shlex.quote(str(script))} retries={limits.retries}",
        f"array=0-{len(trials) - 1}{f'%{limits.at_once}' if limits.at_once else ''}",
        f"options=({shlex.join([f'--cpus-per-task={threads}', *memory])})",
        *("shared() {", *(f"    {tried(one)} || return 1" for one in shared), "    :\n}"),
        *("trial() {\n    case $1 in", *(f"    {number}) {tried(one)} ;;" for number, one in enumerate(trials))),
        f"    esac\n}}\ncompare() {{\n    {line(compare)}\n}}",
        Path(__file__).with_name("sweep.sh").read_text(encoding="utf-8"),
    ]
    write_text(script, "\n".join(text))
