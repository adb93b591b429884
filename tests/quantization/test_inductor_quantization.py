"""Quantization by torchao for torch's own compiler: programs, and one package."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_nets import Array, Residual, agreement, drawn, made

from prunekit.errors import DataError, RunError, UsageError
from prunekit.quantization import inductor_quantization
from prunekit.quantization.accuracy_limit import relative_error
from prunekit.quantization.inductor_quantization import InductorQuantizer, missing, quantize_inductor
from prunekit.settings.deployment import QuantizeSettings

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SHAPE = (3, 10, 10)
EXAMPLE = (torch.zeros(16, *SHAPE),)
CALIBRATION = [{"x": drawn(16, SHAPE, seed)} for seed in (1, 2)]


def run(file: Path, samples: Array) -> Array:
    module = torch.export.load(file).module()
    with torch.no_grad():
        found = [module(torch.from_numpy(samples[at : at + 16])).numpy() for at in range(0, len(samples), 16)]
    return np.concatenate(found)


@pytest.mark.slow
def test_layers_that_cost_more_than_allowed_are_returned_to_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[Path] = []

    def kept(self: InductorQuantizer, file: Path, package: Path) -> None:
        programs.append(file.rename(tmp_path / "program.pt2"))
        package.write_bytes(b"")

    monkeypatch.setattr(InductorQuantizer, "compile", kept)  # which takes most of a minute
    model = made(partial(Residual, True))
    score = agreement(model, drawn(320, SHAPE, 3), run)
    settings = QuantizeSettings(max_drop=2.0)
    found = quantize_inductor(model, tmp_path / "int8.pt2", EXAMPLE, CALIBRATION, settings=settings, score=score)
    assert found.drop is not None
    assert found.drop <= 2.0
    assert found.float_layers
    assert set(found.float_layers) <= {"first", "second"}
    assert score(programs[0]) == found.score


@pytest.mark.slow
def test_a_package_computes_in_int8(tmp_path: Path) -> None:
    model = made(lambda: torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
    samples = drawn(16, (32,))
    found = quantize_inductor(model, tmp_path / "int8.pt2", torch.zeros(16, 32), [{"input": samples}])
    assert found.layers == ("0", "2")
    package = torch._inductor.aoti_load_package(str(found.path))
    with torch.no_grad():
        wanted, got = model(torch.from_numpy(samples)).numpy(), package(torch.from_numpy(samples)).numpy()
    assert 0 < relative_error([wanted], [got]) < 0.1
    assert [one.name for one in tmp_path.iterdir()] == ["int8.pt2"]


def test_what_cannot_be_quantized_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(Residual)
    with pytest.raises(DataError, match="expected arrays named x, got y"):
        quantize_inductor(model, tmp_path / "int8.pt2", EXAMPLE, [{"y": CALIBRATION[0]["x"]}])
    with pytest.raises(RunError, match="ReLU: expected layers that can be quantized"):
        quantize_inductor(torch.nn.ReLU(), tmp_path / "int8.pt2", torch.zeros(2, 4), [{"input": drawn(2, (4,))}])
    monkeypatch.setattr(inductor_quantization, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="int8 for Inductor needs torchao"):
        quantize_inductor(model, tmp_path / "int8.pt2", EXAMPLE, CALIBRATION)
    assert not list(tmp_path.iterdir())
