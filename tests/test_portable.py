"""What only POSIX systems have is not needed: imports and a small prune run without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MISSING = ("fcntl", "grp", "pwd", "resource", "termios", "pty", "tty", "posix_spawn", "_posixshmem", "syslog")
EXTRAS = (
    "ultralytics", "lightning", "pytorch_lightning", "transformers", "tokenizers", "accelerate", "datasets", "onnx",
    "onnx_ir", "onnxruntime", "onnxscript", "openvino", "tensorrt", "nncf", "executorch", "pycocotools",
    "timm", "diffusers", "matplotlib", "tensorboard", "zstandard", "lm_eval", "ray",
)  # fmt: skip
"""What need not be installed, and may need those modules itself."""
RUN = f"""
import os, sys
from importlib.abc import MetaPathFinder

MISSING = {MISSING!r}
EXTRAS = {EXTRAS!r}

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MISSING or name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

import torch, torchvision, pandas, psutil  # theirs may look for other systems' modules
for name in MISSING:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for name in ("fork", "sched_getaffinity", "getuid", "geteuid", "killpg", "setsid", "nice", "sysconf", "uname"):
    if hasattr(os, name):
        delattr(os, name)
import signal
for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "setitimer", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)
import io, pathlib
opened = io.open
def refuse(file, *more, **named):
    if str(file).startswith(("/proc", "/sys")):
        raise FileNotFoundError(file)
    return opened(file, *more, **named)
io.open = refuse

import pkgutil, importlib, prunekit
count = 0
for found in pkgutil.walk_packages(prunekit.__path__, "prunekit."):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
        count += 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
    except prunekit.PrunekitError:  # an integration says which extra it needs
        pass
assert count > 300, count

from torch import nn
import prunekit as pk
from prunekit.measure.latency.machine import cores, cpu_name, cpu_quota
from prunekit.utils.availability import CPUINFO
model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(4, 8)
result = pk.prune(model, x, macs=0.5)
pk.save(result, "small")
assert pk.load("small", model=model)[0].out_features == 8
assert cores() == os.cpu_count() and cpu_name() is not None and cpu_quota() is None
print("done")
"""


@pytest.mark.slow
def test_nothing_needs_what_only_posix_systems_have(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.endswith("done\n"), done.stderr


@pytest.mark.skipif(os.name != "posix", reason="the others have no such modules")
def test_the_modules_are_those_of_this_system() -> None:
    assert {"fcntl", "grp", "pwd", "resource", "termios"} <= set(sys.stdlib_module_names)
