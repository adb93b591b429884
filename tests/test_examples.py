"""An example is a tensor, a tuple of positional arguments or a mapping of arguments by name, wherever one is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import prunekit as pk
from prunekit.backends.backend import RUNTIMES
from prunekit.backends.session import Setting, Source, inputs_like
from prunekit.cli import cli
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.model_copy import copied
from prunekit.measure.latency.timing_job import file_source
from prunekit.repair.repair_model import repair
from prunekit.utils.inputs import as_example, call
from prunekit.utils.tensors import gather
from prunekit.utils.user_code import run_factory

WIDTH = 32
torch.manual_seed(0)
X, SCALE, SHIFT = torch.randn(4, 6), torch.rand(4, 1) + 0.5, torch.randn(4, 1)


class ByName(nn.Module):
    """Takes everything by name alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, *, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.last(hidden if scale is None else hidden * scale)  # type: ignore[no-any-return]


class InBetween(ByName):
    """Has an optional argument before one that is given by name, and one that is taken by name alone."""

    def forward(  # type: ignore[override]
        self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None, *, again: Tensor | None = None
    ) -> Tensor:
        output = super().forward(x=x, scale=scale)
        output = output if shift is None else output + shift
        return output if again is None else output * again


class OfOneMapping(ByName):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x=batch["image"])


GIVEN: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "keyword-only": (ByName, {"x": X}),
    "two keywords": (ByName, {"scale": SCALE, "x": X}),
    "tensor": (InBetween, X),
    "tuple": (InBetween, (X, SHIFT)),
    "optional in the middle left out": (InBetween, {"x": X, "scale": SCALE}),
    "tuple and keywords": (InBetween, (X, pk.Keywords(again=SCALE))),
    "one mapping by position": (OfOneMapping, ({"image": X},)),
}
given = pytest.mark.parametrize(("build", "given"), GIVEN.values(), ids=list(GIVEN))


@given
def test_from_the_trace_to_the_folder(build: Callable[[], nn.Module], given: Any, tmp_path: Path) -> None:
    model = build().eval()
    chart = pk.trace(model, given)
    assert [group.labels.size for group in chart.groups] == [WIDTH]
    plan = pk.plan(model, given, macs=0.5)
    small = pk.compact(model, plan)
    assert pk.verify(model, small, plan, given).max_relative_difference < 1e-12
    assert pk.verify(model, small, plan, [given, given]).inputs == 2 * len(X)
    masked, narrow = copied(model, dtype=torch.float64), copied(small, dtype=torch.float64)
    plan.zero(masked)
    double = tuple(_double(one) for one in as_example(model, given))
    torch.testing.assert_close(call(narrow.eval(), double), call(masked.eval(), double), rtol=1e-12, atol=1e-12)
    result = pk.prune(model, given, macs=0.5)
    again = pk.load(pk.save(result, tmp_path / "small"), model=build)
    assert torch.equal(call(again, as_example(again, given)), call(result.model.eval(), as_example(again, given)))


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double()
    return type(value)((name, item.double()) for name, item in value.items())


@given
def test_what_else_takes_an_example(build: Callable[[], nn.Module], given: Any) -> None:
    model = build().eval()
    wanted = call(model, as_example(model, given))
    assert pk.summary(model, given).macs == 6 * WIDTH + 3 * WIDTH
    folded = pk.fold_batchnorm(model, given)
    assert list(folded.norms) == ["norm"]
    torch.testing.assert_close(call(folded.model, as_example(model, given)), wanted)
    torch.testing.assert_close(call(pk.channels_last(model, given), as_example(model, given)), wanted)
    assert pk.flush_subnormals(model, given).counts == {}


def test_calibration_data_by_name() -> None:
    model, data = ByName().eval(), {"x": torch.randn(64, 6), "scale": torch.rand(64, 1) + 0.5}
    whole = pk.calibrate(model, data)
    parts = [{name: part[i : i + 16] for name, part in data.items()} for i in range(0, 64, 16)]
    for key, layer in pk.calibrate(model, parts, device="cpu").layers.items():
        np.testing.assert_allclose(layer.rows, whole.layers[key].rows)
    result = pk.prune(model, calibration=parts, macs=0.5)
    assert result.max_relative_difference < 1e-12
    assert result.repair is not None
    assert result.repair.after < result.repair.before
    labeled = [(part, torch.arange(16) % 3) for part in parts]
    terms = pk.collect_gradients(model, labeled, nn.functional.cross_entropy).terms
    assert terms["first.weight", 0].shape == (4, WIDTH)
    masked, report = repair(model, result.plan, data)
    assert report.after < report.before
    assert torch.equal(masked.first.weight != 0, result.masked.first.weight != 0)
    assert pk.sensitivity(model, data, measured_on=labeled, more_examples=[{"x": X}]).measured


def test_batches_of_one_sequence_each_need_no_targets_and_no_device() -> None:
    model, images = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), torch.randn(32, 6)
    assert pk.recalibrate_batchnorm(model, [(images,)]) == ("1",)
    hidden = model[0](images)
    torch.testing.assert_close(model[1].running_mean, hidden.mean(0))
    torch.testing.assert_close(model[1].running_var, hidden.var(0))
    found = pk.calibrate_thresholds(model, [(images,)], ["1"], target=0.5)
    assert found.reached["1"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_a_transformer_on_what_its_tokenizer_gives() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=40, max_position_embeddings=12, **sizes)).eval()
    mask = torch.ones(2, 12).long()
    mask[1, 8:] = 0
    batch = {"attention_mask": mask, "input_ids": torch.randint(0, 40, (2, 12))}
    result = pk.prune(model, batch, macs=0.6)
    assert result.max_relative_difference < 1e-12
    assert pk.verify(model, pk.compact(model, result.plan), result.plan, batch).max_relative_difference < 1e-12
    assert result.model(**batch).last_hidden_state.shape == (2, 12, 16)


@pytest.mark.slow
def test_runtimes_run_what_is_given_by_name(tmp_path: Path) -> None:
    model = InBetween().eval()
    inputs = inputs_like(as_example(model, (X, pk.Keywords(scale=SCALE, again=SCALE))))
    assert list(inputs.one[-1]) == ["scale", "again"]
    sample = inputs.sample(2)
    assert [type(entry) for entry in sample] == [Tensor, pk.Keywords]
    wanted = call(model, sample)
    for name in ("eager", "onnxruntime"):
        runtime, setting = RUNTIMES.get(name), Setting(name, "cpu", 2, 1)
        files = name == "onnxruntime"
        source = file_source(runtime, model, inputs, [(2, "float32")], tmp_path / "files") if files else Source(model)
        with torch.inference_mode():
            session = runtime.session(source, sample, setting)
            (got,) = gather(session.tensors(session.run()))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_models_are_timed_on_what_is_given_by_name_alone() -> None:
    found = pk.bench({"a": ByName(), "b": ByName()}, {"scale": SCALE, "x": X}, batch=[1, 3], repeats=5)
    assert [(row["model"], row["batch"]) for row in found.latency] == [("a", 1), ("b", 1), ("a", 3), ("b", 3)]
    assert found.failures == ()


FACTORY = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
    def forward(self, *, x, scale):
        return self.last(self.first(x).relu() * scale)
def build():
    return Net(), {"scale": torch.ones(1, 1), "x": torch.zeros(1, 6)}
def array():
    return Net(), torch.zeros(1, 6).numpy()
def other():
    return Net(), {"y": torch.zeros(1, 6)}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_factory_may_bring_its_example(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FACTORY)
    own = f"{tmp_path / 'own.py'}:build"
    result = CliRunner().invoke(cli, ["inspect", "--model", own, "--json"])
    assert result.exit_code == 0, result.output
    payload = json.loads(result.stdout)
    assert (payload["macs"], [group["channels"] for group in payload["groups"]]) == (6 * 8 + 8 * 2, [8])
    arguments = ["--model", own, "--device", "cpu", "--repeats", "5", "--threads", "1", "--batch", "2", "--json"]
    result = CliRunner().invoke(cli, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    assert [(row["model"], row["batch"]) for row in json.loads(result.stdout)["latency"]] == [("build", 2)]
    model, given = run_factory(own, ModelError)
    folder = pk.save(pk.prune(model, given, macs=0.5), tmp_path / "small")
    result = CliRunner().invoke(cli, ["inspect", str(folder), "--model", own, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["macs"] == payload["macs"] // 2
    for name, why in (("array", "give torch.from_numpy(array)"), ("other", "forward takes x, scale")):
        result = CliRunner().invoke(cli, ["inspect", "--model", own.replace("build", name)])
        assert (result.exit_code, why in result.stderr) == (2, True)


PLAN = pk.plan(InBetween(), X, macs=0.5)
TAKES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "trace": pk.trace,
    "more examples": lambda model, given: pk.trace(model, X, given),
    "plan": lambda model, given: pk.plan(model, given, macs=0.5),
    "prune": lambda model, given: pk.prune(model, given, macs=0.5),
    "verify": lambda model, given: pk.verify(model, pk.compact(model, PLAN), PLAN, [given]),
    "summary": pk.summary,
    "explain": lambda model, given: pk.explain(model, model, given),
    "fold": pk.fold_batchnorm,
    "channels_last": pk.channels_last,
    "flush": pk.flush_subnormals,
    "profile": pk.profile,
}


@pytest.mark.parametrize("take", TAKES.values(), ids=list(TAKES))
def test_what_is_no_example_is_refused_everywhere(take: Callable[[nn.Module, Any], Any]) -> None:
    model = InBetween().eval()
    for given, why in (
        (X.numpy(), "got ndarray; give torch.from_numpy(array)"),
        ([X], "give tuple(list) for several positional arguments"),
        (3, "got int; give (value,)"),
    ):
        with pytest.raises(UsageError, match=re.escape(why)):
            take(model, given)
    with pytest.raises(ModelError, match="got y, and forward takes x, shift, scale, again: "):
        take(model, {"y": X})


def test_a_mapping_that_is_itself_the_argument_and_one_of_names_alone_say_what_to_write() -> None:
    with pytest.raises(ModelError, match=re.escape("where batch is this mapping itself, put it in a tuple: ({...},)")):
        pk.trace(OfOneMapping(), {"image": X})
    with pytest.raises(ModelError, match=re.escape('takes x only by name: give a mapping, {"x": x}')):
        pk.trace(Alone(), ({"x": X},))


@pytest.mark.parametrize(
    ("example", "advice"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "got uint8; give example.to(torch.float32) / 255"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.float64), "got float64; give example.to(torch.float32)"),
    ],
)
def test_an_example_of_another_precision_says_what_to_write(example: Tensor, advice: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"expected float32, which its weights are, {advice}")):
        pk.trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)), example)


def test_no_other_precision_is_advised_where_another_thing_is_wrong() -> None:
    ids = torch.zeros(2, 4, dtype=torch.uint8)
    with pytest.raises(ModelError, match="expected the arguments of its forward"):
        pk.trace(nn.Sequential(nn.Embedding(256, 8), nn.Linear(9, 4)), ids)


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, *, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


SMALL = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4))
GRAY = torch.zeros(8, 1, 8, 8)
ON_OTHERS: dict[str, Callable[[], object]] = {
    "calibrate": lambda: pk.calibrate(SMALL, GRAY),
    "prune": lambda: pk.prune(SMALL, calibration=GRAY, macs=0.5),
    "calibrate_thresholds": lambda: pk.calibrate_thresholds(SMALL, GRAY, ["1"], target=0.5),
    "recalibrate_batchnorm": lambda: pk.recalibrate_batchnorm(nn.Sequential(SMALL, nn.BatchNorm1d(4)), GRAY),
    "collect_gradients": lambda: pk.collect_gradients(
        SMALL, [(GRAY, torch.zeros(8, dtype=torch.int64))], nn.functional.cross_entropy
    ),
    "summary": lambda: pk.summary(SMALL, GRAY),
}


@pytest.mark.parametrize("name", ON_OTHERS)
def test_samples_that_a_model_does_not_take_are_said_with_their_shape(name: str) -> None:
    with pytest.raises(ModelError, match=r"does not run on .*expected input\[\d, 1, 8, 8\] to have 3 channels"):
        ON_OTHERS[name]()


def test_a_shape_is_no_example() -> None:
    with pytest.raises(ModelError, match=r"expected tensors, got a shape; give torch\.randn\(2, 3, 8, 8\)"):
        pk.trace(SMALL, (2, 3, 8, 8))


def test_a_tensor_is_no_place() -> None:
    with pytest.raises(UsageError, match=r"ignore: expected globs .* got Parameter float32 \(16, 3, 3, 3\)$"):
        pk.plan(SMALL, torch.zeros(2, 3, 8, 8), macs=0.5, ignore=[SMALL[0].weight])
