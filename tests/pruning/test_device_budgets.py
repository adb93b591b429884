"""Budgets of time on another machine: kits are written, measured there, and what comes back decides."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import simulated_device
import torch
from click.testing import CliRunner
from simulated_device import measure
from torch import Tensor, nn

import prunekit as pk
from prunekit.cli import cli
from prunekit.errors import (
    ArtifactError,
    NotMeasuredError,
    PlanError,
    RecipeError,
    RunError,
    TimesNeededError,
    UsageError,
)
from prunekit.known_names import FORMATS, RUNTIMES
from prunekit.pruning.latency import profiling
from prunekit.pruning.latency.device_clock import accept_times, device_rows
from prunekit.recipe.loading import load
from prunekit.report.headline import on_time

COMMAND = f"{shlex.quote(sys.executable)} {shlex.quote(simulated_device.__file__)} {{kit}}"


class Net(nn.Module):
    """A network as a tutorial has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 96, 3), nn.Conv2d(96, 128, 3, 2)
        self.head = nn.Linear(128 * 5 * 5, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x).relu()).relu()).relu()
        out: Tensor = self.head(x.view(x.size(0), -1))
        return out


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache of its own, and no clock of this machine; the runtime is forgotten afterwards."""
    simulated_device.register()
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path / "cache"))

    def timed(*_: Any, **__: Any) -> None:
        raise AssertionError("this machine timed something")

    monkeypatch.setattr(profiling, "time_networks", timed)
    yield
    for registry in (RUNTIMES, FORMATS):
        del registry._items["weights"]


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.zeros(1, 3, 16, 16)


def by_hand(**changed: Any) -> pk.Target:
    given: dict[str, Any] = {"runtime": "weights", "device": "pi5", "block": 4}
    return pk.Target(**given | changed)


def prune(target: pk.Target | None = None, **budget: Any) -> pk.Pruned:
    target = target or by_hand(command=COMMAND)
    return pk.prune(net(), X, target=target, progress=False, **budget or {"speedup": 2.0})


def needed(call: Callable[[], Any]) -> Path:
    """Return the folder of the kit that a call cannot go on without."""
    with pytest.raises(TimesNeededError, match="copy that folder to pi5") as raised:
        call()
    found = re.search(r"kit for it is in (\S+):", str(raised.value))
    assert found is not None
    return Path(found[1])


def test_a_call_goes_on_once_the_device_has_measured_its_kits() -> None:
    table = needed(prune_by_hand)
    assert needed(prune_by_hand) == table
    names = [row["name"] for row in json.loads((table / "kit.json").read_text())["networks"]]
    assert names == ["dense", *(f"network-{number:02}" for number in range(1, 16))]
    measure(table)
    candidates = needed(prune_by_hand)
    measure(candidates)
    found = prune_by_hand()
    assert found.delivered is not None
    assert abs(found.delivered.excess - 1) <= 0.03
    assert not found.delivered.shortfalls
    (said,) = on_time({"delivered": found.delivered.summary(), "plan": found.plan.provenance})
    assert re.search(r"2\.0\d× \[\d\.\d\d, \d\.\d\d\] and .* ms delivered.* \(weights on pi5, batch 1", said)
    assert found.plan.provenance["timed"]["device"] == "pi5"
    assert found.plan.provenance["timed"]["speedup"] == found.delivered.final.speedup
    by_command = prune()
    assert by_command.delivered is not None
    said = json.dumps([by_command.plan.provenance, by_command.delivered.summary()])
    assert simulated_device.__file__ not in said
    assert (by_command.plan.keep == found.plan.keep).all()
    assert [row["measured"] for row in device_rows()] == ["made up, 4 cores, weights 0"] * 2
    with pytest.raises(TimesNeededError, match=r"of Net it knows runtime weights, batch 1, threads 1, dtype float32\)"):
        prune(by_hand(batch=2))


def prune_by_hand() -> pk.Pruned:
    return prune(by_hand())


@pytest.mark.parametrize(
    ("budget", "asked"), [({"speedup": 1.5}, 1.5), ({"latency_ms": 2.5}, None), ({"speedup": 3}, 3)]
)
def test_a_command_does_both_trips(budget: dict[str, Any], asked: float | None) -> None:
    found = prune(**budget)
    assert found.delivered is not None
    assert abs(found.delivered.excess - 1) <= 0.03
    final = found.delivered.final
    assert abs((final.speedup / asked if asked else final.ms / 2.5) - 1) <= 0.03
    assert len(list(device_rows())) == 2


def test_a_score_decides_and_the_device_times_what_is_delivered() -> None:
    images = torch.randn(300, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"calibration": images, "max_drop": 0.5, "repair": False, "progress": False}
    found = pk.prune(net(), target=by_hand(command=COMMAND), **given)
    assert found.score is not None
    assert found.delivered is not None
    assert found.delivered.final.speedup > 1.05


def test_the_points_of_a_frontier_are_timed_in_one_kit() -> None:
    images = torch.randn(300, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    target = by_hand(command=COMMAND)
    found = pk.frontier(net(), calibration=images, points=[0.8, 0.5], repair=False, target=target, progress=False)
    assert [point.speedup is not None and point.speedup[0] > 1.05 for point in found.points] == [True, True]
    assert sorted(row["networks"] for row in device_rows()) == [3, 16]


def test_weights_are_packed_and_change_no_kit(tmp_path: Path) -> None:
    folder = pk.kit(net(), X, target=by_hand(), output=tmp_path / "kit", networks=10, progress=False)
    manifest = json.loads((folder / "kit.json").read_text())
    assert (folder / "measure.py").is_file()
    with zipfile.ZipFile(tmp_path / "kit.zip") as archive:
        assert "kit/kit.json" in archive.namelist()
    dense = (folder / "files" / "dense.npz.gz").stat().st_size
    assert dense < 0.25 * 4 * sum(one.numel() for one in net().parameters())
    other = net()
    with torch.no_grad():
        other.first.weight.normal_()
    again = pk.kit(other, X, target=by_hand(), output=tmp_path / "again", networks=10, progress=False)
    assert json.loads((again / "kit.json").read_text())["kit"] == manifest["kit"]
    with pytest.raises(UsageError, match="something is there"):
        pk.kit(net(), X, target=by_hand(), output=tmp_path / "kit", progress=False)


def damaged(times: Path, change: str) -> None:
    values = json.loads(times.read_text())
    if change == "by hand":
        values["networks"]["network-01"]["ms"][0][0] /= 3
        times.write_text(json.dumps(values))
    elif change == "cut off":
        times.write_text(times.read_text()[:-300])
    else:
        kit = times.parent
        changed: dict[str, Any] = {
            "another kit": {"kit": "0" * 64},
            "not to its end": {"complete": False},
            "not a time": {"networks": {"network-01": {"ms": [[1.0, -1.0]] * 9}}},
            "without a checksum": {},
            "beyond all bounds": {"networks": {"network-01": {"ms": [[1e300, 1e-300]] * 9}}},
            "a network of its own": {"networks": {"../x": {"ms": [[1.0, 1.0]] * 9}}},
        }[change]
        measure(kit, **changed)
    if change == "without a checksum":
        values.pop("checksum")
        times.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ("by hand", ArtifactError, "something in it was changed"),
        ("cut off", ArtifactError, "the file is damaged"),
        ("another kit", ArtifactError, r"expected the times of the kit \w{8} \(Net for weights on pi5\), got those of"),
        ("not to its end", RunError, "goes on where it was stopped"),
        ("not a time", ArtifactError, "expected at least 5 pairs of milliseconds"),
        ("without a checksum", ArtifactError, "something in it was changed"),
        ("beyond all bounds", ArtifactError, "expected at least 5 pairs of milliseconds"),
        ("a network of its own", ArtifactError, "the kit has no such network"),
    ],
)
def test_times_of_a_stranger_are_checked(change: str, kind: type[Exception], said: str) -> None:
    times = measure(needed(prune_by_hand))
    damaged(times, change)
    with pytest.raises(kind, match=said):
        prune_by_hand()


def test_a_network_that_the_device_cannot_run_is_left_out() -> None:
    table = needed(prune_by_hand)
    measure(table, fails="network-03")
    found = pk.profile(net(), X, target=by_hand(), progress=False)
    assert len(found.samples) == 15
    assert any("measured on pi5: made up" in note for note in found.notes)
    measure(table, fails="dense")
    with pytest.raises(RunError, match="the dense network failed on made up"):
        prune_by_hand()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo no route to host; exit 3; {kit}", r"exit code 3; the kit .* stays.*\n  no route to host"),
        ("true {kit}", "it left no times.json in"),
        ("echo '{{}}' > {kit}/times.json", "what it brought cannot be used: "),
        ("sleep 30; {kit}", "it took more than target.limit_s, 1 s"),
    ],
)
def test_a_command_that_fails_is_told_with_what_it_printed(command: str, said: str) -> None:
    with pytest.raises(RunError, match=said):
        prune(by_hand(command=command, limit_s=1.0))
    assert prune(by_hand(command=COMMAND)).delivered is not None


def test_a_budget_that_the_device_cannot_meet_is_refused() -> None:
    with pytest.raises(PlanError, match=r"budget speedup 60.00×: the plan predicted to be fastest takes"):
        prune(speedup=60.0)


def test_kits_depend_on_no_values_of_inputs_and_no_addresses() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.wide, self.head = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 5)

        def extra_repr(self) -> str:
            return repr(lambda: 0)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.wide(self.table(ids)).relu().mean(1))
            return out

    def ask() -> Path:
        return needed(lambda: pk.profile(Tokens().eval(), torch.randint(50, (2, 7)), target=by_hand(), progress=False))

    assert ask() == ask()


def test_a_kit_of_fewer_networks_serves_budgets_once_it_is_measured(tmp_path: Path) -> None:
    folder = pk.kit(net(), X, target=by_hand(), output=tmp_path / "kit", networks=12, progress=False)
    kept = accept_times(measure(folder), "pi5")
    needed(prune_by_hand)
    (candidates,) = [row["networks"] for row in device_rows() if row["kit"] != str(kept)]
    assert candidates < 10
    with pytest.raises(UsageError, match=r"run there: python3 \S+/measure.py --again; copy its times.json into"):
        pk.profile(net(), X, target=by_hand(), again=True, progress=False)
    (tmp_path / "other.zip").write_text("mine")
    with pytest.raises(UsageError, match=r"other.zip: expected nothing"):
        pk.kit(net(), X, target=by_hand(), output=tmp_path / "other", progress=False)


def test_what_a_device_says_of_itself_is_shown_without_control_codes() -> None:
    measure(needed(prune_by_hand), device={"cpu": "\x1b[2Jowned\nline" + "x" * 900, "cores": 1, "runtime": "r"})
    ((said,),) = [[row["measured"] for row in device_rows()]]
    assert said.isprintable()
    assert len(said) < 400


@pytest.mark.slow
def test_both_trips_by_the_script_itself(tmp_path: Path) -> None:
    """A folder for a device, cp for scp, and ONNX Runtime: what the guide says, word for word but for these."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).eval()
    there, python = tmp_path / "there", shlex.quote(sys.executable)
    there.mkdir()
    command = (
        f"cd {there} && rm -rf k && cp -r {{kit}} k && {python} k/measure.py --minutes 0.05 && cp k/times.json {{kit}}"
    )
    found = pk.prune(
        model,
        torch.randn(1, 64),
        speedup=1.5,
        target=pk.Target("onnxruntime", device="there", command=command, batch=16),
        progress=False,
    )
    assert found.delivered is not None
    assert found.delivered.final.ms > 0
    for row in device_rows():
        assert row["measured"].endswith(f", onnxruntime {version('onnxruntime')}")


def test_what_cannot_be_measured_elsewhere_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"runtime 'eager' runs the model itself.* give one of .*onnxruntime"):
        prune(by_hand(runtime="eager"))
    with pytest.raises(UsageError, match="expected fp32 or int8, got bfloat16"):
        prune(by_hand(dtype="bf16"))
    with pytest.raises(UsageError, match="memory_format on 'pi5': expected contiguous"):
        prune(by_hand(memory_format="channels_last"))
    with pytest.raises(NotMeasuredError, match="pi5 has not timed networks of its widths yet"):
        pk.profile(net(), X, target=by_hand(), measure=False, progress=False)
    for device in ("../pi5", "cuda5", "GPU", "xpu", "pi5.", "a b", ""):
        with pytest.raises(UsageError, match="device: expected cpu, cuda, cuda:n, or the name of another machine"):
            pk.Target("weights", device=device)
    with pytest.raises(UsageError, match="expected none for cpu"):
        prune(pk.Target(command="x {kit}"))
    with pytest.raises(UsageError, match=r"expected \{kit\} in it"):
        pk.Target(device="pi5", command="x")
    with pytest.raises(UsageError, match="no kit was written for 'pi5' yet"):
        accept_times(tmp_path / "times.json", "pi5")


RECIPE = """
name: small
model: {{name: {name}, zoo: {zoo}}}
data: {{source: digits, image_size: 16}}
baseline: {{epochs: 1}}
prune:
  budget: {{speedup: 2}}
  target: {{runtime: weights, device: pi5{command}}}
"""


def test_a_recipe_runs_no_command_unless_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(name="resnet20", zoo="cifar", command=f", command: '{COMMAND}'"))
    with pytest.raises(RecipeError, match=r"recipe.yaml:8:\d+: .*prune.target.command.* is code"):
        load(path)
    kept = load(path, runs_code=False)
    with pytest.raises(UsageError, match="is code"):
        pk.prune(net(), X, settings=kept.prune, progress=False)
    assert load(path, allow_code=True).prune.target.command == COMMAND
    assert load(path, ["prune.target.command=x {kit}"]).prune.target.command == "x {kit}"


def test_a_recipe_is_profiled_by_times_that_are_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tests = str(Path(__file__).parents[1])
    Path("mine.py").write_text(
        f"import sys, torch\nsys.path.insert(0, {tests!r})\nfrom pruning.test_device_budgets import Net\n"
        "def net():\n    return Net(), torch.zeros(1, 3, 16, 16)\n"
    )
    Path("recipe.yaml").write_text(RECIPE.format(name="mine.py:net", zoo="own", command=""))
    run = CliRunner()
    wrote = run.invoke(cli, ["kit", "recipe.yaml", "--model", "mine.py:net", "--networks", "10", "--output", "there"])
    assert wrote.exit_code == 0, wrote.output
    assert "on pi5: python3 measure.py" in wrote.output
    times = measure(Path("there"))
    profile = ["profile", "recipe.yaml", "--model", "mine.py:net", "--networks", "10", "--times", str(times)]
    found = run.invoke(cli, profile)
    assert found.exit_code == 0, found.output
    assert "weights, pi5, batch 1" in found.output
    listed = run.invoke(cli, ["list", "devices", "--json"])
    assert json.loads(listed.output)["devices"][0]["measured"] == "made up, 4 cores, weights 0"
    local = run.invoke(cli, [*profile, "prune.target.device=cpu"])
    assert local.exit_code == 2
    assert "expected the machine that measured" in local.output
    nameless = run.invoke(cli, ["kit", "resnet20", "--runtime", "weights", "--input-shape", "1x3x32x32"])
    assert nameless.exit_code == 2
    assert "--name: expected a name for the other machine" in nameless.output


def test_kits_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Names of what is kept do not depend on the order of sets, or on where things lie in memory."""
    code = (
        "import sys; sys.path[:0] = {!r}\nimport simulated_device; simulated_device.register()\n"
        "import prunekit as pk\nfrom pruning.test_device_budgets import X, by_hand, net\n"
        "pk.kit(net(), X, target=by_hand(), output={!r}, networks=10, progress=False)\n"
    ).format([str(Path(__file__).parents[1])], str(tmp_path / "other"))
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    pk.kit(net(), X, target=by_hand(), output=tmp_path / "own", networks=10, progress=False)
    own, other = (json.loads((tmp_path / name / "kit.json").read_text()) for name in ("own", "other"))
    assert own == other
