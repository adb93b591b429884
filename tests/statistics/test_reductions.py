from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from prunekit.statistics import reductions
from prunekit.statistics.channel_stats_collector import StatsCollector, calibrate
from prunekit.statistics.reductions import measure_eagerly, summarize

COMPILER = os.environ.get("CXX", "g++")
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not there")
SHAPES = [(16, 64, 100), (3, 5, 7), (8, 8, 8), (1, 6, 50), (4, 1, 30), (5, 4, 1), (1, 1, 1)]
FLAT = [(100, 64), (8, 8), (1, 6), (6, 1), (1, 1)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("shapes", [SHAPES, FLAT], ids=["planes", "flat"])
def test_one_kernel_serves_every_shape(shapes: list[tuple[int, ...]]) -> None:
    reducer = reductions.Reducer(True)
    reducer(torch.randn(shapes[0]))
    before = {name: dict(counter) for name, counter in counters.items()}
    for shape in shapes:
        values = torch.randn(shape)
        torch.testing.assert_close(reducer(values), measure_eagerly(values), rtol=1e-12, atol=1e-12)
    assert {name: dict(counter) for name, counter in counters.items()} == before  # nothing was compiled for them
    assert len(reducer._kernels) == 1
    assert reducer.form == "fused"
    assert reducer.compile_seconds > 0


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("guard", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_kernel_does_not_depend_on_the_state_it_runs_in(guard: type) -> None:
    images = torch.randn(3, 3, 8, 8)
    model = net().eval()
    expected = calibrate(model, [images], fused=False)
    torch._dynamo.reset()
    with guard(), torch.autocast("cpu", enabled=False), StatsCollector(model, fused=True) as collector:
        model(images)
    stats = collector.stats()
    assert stats.provenance == {"reduction": "fused"}
    for key, layer in expected.items():
        np.testing.assert_allclose(stats[key].rows, layer.rows, rtol=1e-10, atol=1e-13)


@pytest.mark.slow
@needs_compiler
def test_compiling_waits_until_it_pays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "PAYS_OFF", 100)
    eagerly = []
    monkeypatch.setattr(
        reductions, "measure_eagerly", lambda values: eagerly.append(values.shape) or measure_eagerly(values)
    )
    reducer = reductions.Reducer(None)
    for values in (torch.randn(2, 3, 10), torch.randn(4, 10), torch.randn(2, 2, 10), torch.randn(1, 1, 2)):
        reducer(values)
    assert reducer.form == "eager, then fused"
    assert eagerly == [(2, 3, 10), (4, 10), (2, 2, 10)]
    few = reductions.Reducer(None)
    few(torch.randn(4, 10))
    assert few.form == "eager (too few values for compiling to pay off)"


def test_turned_off() -> None:
    stats = calibrate(net(), [torch.randn(2, 3, 8, 8)], fused=False)
    assert stats.provenance == {"reduction": "eager"}


def test_what_no_kernel_is_for_is_measured_eagerly() -> None:
    class Wrapped(torch.Tensor):
        pass

    assert reductions.kind_of(torch.randn(2, 3).as_subclass(Wrapped)) is None
    assert reductions.kind_of(torch.empty(2, 3, device="meta")) is None
    assert reductions.kind_of(torch.zeros(1).expand(2, 2**30)) is None


WITHOUT = """
import torch
from prunekit.statistics import reductions
from prunekit.statistics.channel_stats_collector import calibrate
model, images = torch.nn.Conv2d(3, 4, 3), [torch.randn(2, 3, 8, 8)]
found = [calibrate(model, images, fused=form) for form in (True, False, True)]
assert all((stats[key].rows == found[1][key].rows).all() for stats in found for key in stats)
assert reductions.compiled.cache_info().misses == 1, reductions.compiled.cache_info()
print(found[2].provenance["reduction"])
"""


@pytest.mark.slow
def test_without_a_compiler_the_eager_form_stays(tmp_path: Path) -> None:
    nowhere = {"CXX": "/nonexistent/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **nowhere}
    command = [sys.executable, "-W", "error", "-c", WITHOUT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("eager (compiling failed: ")
    assert "CxxCompiler" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda(dtype: torch.dtype) -> None:
    reducer = reductions.Reducer(True)
    for shape in [(16, 64, 28, 28), (1, 6, 5, 10), (4, 1, 6, 5), (16, 512), (3, 7, 1, 1)]:
        activation = torch.randn(shape).to(dtype)
        expected = summarize(activation, 1)
        np.testing.assert_allclose(summarize(activation.cuda(), 1, reducer), expected, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(summarize(activation.cuda(), 1), expected, rtol=1e-11, atol=1e-12)
    assert reducer.form == "fused"
