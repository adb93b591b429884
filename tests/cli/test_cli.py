"""What every command shares: help, options, errors, exit codes, and where output goes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from killing import forked
from safetensors import SafetensorError

from prunekit.cli import cli, main
from prunekit.cli.output import Console, check_folder, plain, writable
from prunekit.errors import ModelError, PrunekitError, RunError, UsageError
from prunekit.known_names import COMMANDS as REGISTERED
from prunekit.utils.display import table
from prunekit.utils.user_code import load_object

COMMANDS = (
    "finetune", "prune", "calibrate", "frontier", "sensitivity", "sweep", "evaluate", "predict", "profile", "bench",
    "kit", "explain", "export", "inspect",
)  # fmt: skip
LISTED = ["init", *COMMANDS[:-1], "report", "inspect", "list", "recipe"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes `prunekit inspect` raise."""

    def install(error: BaseException) -> None:
        def callback(**arguments: Any) -> None:
            raise error

        monkeypatch.setattr(REGISTERED.get("inspect"), "callback", callback)

    return install


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_shows_its_shared_options(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    for option in ("--json", "--debug", "--output", "--seed"):
        assert option in result.stdout


LIGHT = {
    ("--help",): "prunekit",
    ("finetune", "--help"): "prunekit",
    ("--version",): "prunekit",
    ("list", "criteria"): "elimination",
    ("list", "formats"): "openvino",
    ("list", "runtimes"): "onnxruntime",
}
"""Commands that import nothing large, and a word of what each prints."""


def test_help_imports_neither_torch_nor_anything_as_large() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from prunekit.cli import cli\n"
        f"for arguments, word in {LIGHT!r}.items():\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as shown:\n"
        "        cli(list(arguments), prog_name='prunekit', standalone_mode=False)\n"
        "    assert word in shown.getvalue(), (arguments, shown.getvalue())\n"
        "    large = {'torch', 'numpy', 'pandas', 'matplotlib', 'pydantic', 'ruamel'} & set(sys.modules)\n"
        "    assert not large, (arguments, large)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_wrong_recipe_is_refused_without_what_runs_a_job(tmp_path: Path) -> None:
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("modle: {name: resnet18}\nprune: {budget: {macs: 3}}\n")
    commands = ("finetune", "calibrate", "bench", "inspect", "evaluate", "explain")
    code = (
        "import sys\nfrom prunekit.cli import main\n"
        f"for command in {commands!r}:\n"
        f"    sys.argv = ['prunekit', command, {str(recipe)!r}]\n"
        "    try:\n        main()\n    except SystemExit as end:\n        code = end.code\n"
        "    heavy = {'torch', 'torchvision', 'pandas', 'matplotlib', 'accelerate', 'tensorboard'} & set(sys.modules)\n"
        "    print(code, sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["2 []"] * len(commands)
    assert done.stderr.count("wrong.yaml:1:1: modle: unknown key; did you mean 'model'?") == len(commands)
    assert done.stderr.count("prune.budget.macs: expected") == len(commands)


def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "prunekit", "-h"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.split("Commands:\n")[1].splitlines()] == LISTED


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (ModelError("no such model"), 2, "prunekit: error: no such model\n"),
        (RunError("the disk is full"), 1, "prunekit: error: the disk is full\n"),
        (PrunekitError("other"), 1, "prunekit: error: other\n"),
        (ZeroDivisionError("oh"), 1, "prunekit: error: ZeroDivisionError: oh\nThis was not expected; --debug"),
        (
            OSError(28, "No space left", "a.csv"),
            1,
            "prunekit: error: a.csv: cannot be read or written: No space left\n",
        ),
        (
            SafetensorError("x: I/O error: full"),
            1,
            "prunekit: error: a file of tensors cannot be read or written: full\n",
        ),
        (KeyboardInterrupt(), 130, "prunekit: interrupted\n"),
    ],
)
def test_an_error_is_one_message_and_an_exit_code(
    failing: Callable[[BaseException], None], error: BaseException, code: int, expected: str
) -> None:
    failing(error)
    result = run("inspect", "resnet18")
    assert result.exit_code == code
    assert result.stderr.startswith(expected)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_an_error_of_user_code_names_its_line(failing: Callable[[BaseException], None], tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def largest(evidence):\n    return 1 / evidence\n")
    largest = load_object(f"{tmp_path / 'score.py'}:largest", UsageError)
    with pytest.raises(ZeroDivisionError) as raised:
        largest(0)
    failing(raised.value)
    result = run("inspect", "resnet18")
    assert result.exit_code == 1
    assert result.stderr.startswith("prunekit: error: ZeroDivisionError: division by zero (score.py, line 2)\nThis was")


@pytest.mark.parametrize("arguments", [["--debug", "inspect"], ["inspect", "--debug"]])
@pytest.mark.parametrize(("error", "code"), [(ModelError("no such model"), 2), (ZeroDivisionError("oh"), 1)])
def test_debug_shows_the_traceback_on_either_side_of_the_command(
    failing: Callable[[BaseException], None], arguments: list[str], error: Exception, code: int
) -> None:
    failing(error)
    result = run(*arguments)
    assert result.exit_code == code
    assert "Traceback (most recent call last)" in result.stderr
    assert "in callback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("prunekit: error: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["bench", "--batch", "1,x"], "expected positive whole numbers with commas between them, got 'x'"),
        (["bench", "--threads", "0"], "got '0'"),
        (["bench", "--repeats", "2"], "2 is not in the range"),
        (["bench", "--max-latency-ms", "0"], "not in the range"),
        (["inspect", "--input-shape", "1x3x"], "expected sizes such as 1x3x224x224, got '1x3x'"),
        (["inspect", "--seed", "-1"], "not in the range"),
        (["finetune"], "Missing argument 'RECIPE'"),
        (["finetune", "nowhere.yaml"], "nowhere.yaml: expected a recipe (a YAML file), but there is no such file"),
        (["inspect"], "expected a model: a recipe, a model folder, a torchvision or CIFAR name, or --model"),
        (["inspect", "resnet18", "resnet34"], "expected one model, got 2: resnet18, resnet34"),
        (
            ["inspect", "resnet18", "--model", "own.py:build"],
            "expected one model, got two: resnet18 and --model own.py",
        ),
        (["inspect", "runs/typo/model"], "there is no such file, folder or model"),
        (["inspect", "resnet18", "seed=3"], "'seed=3' changes a recipe, and no recipe was given"),
        (["bench", "resnet18", "seed=3"], "'seed=3' changes a recipe, and no recipe was given"),
        (["evaluate", "resnet18", "seed=3"], "'seed=3' changes a recipe, and no recipe was given"),
        (["evaluate", "a.yaml", "--recipe", "b.yaml"], "a.yaml has images of its own"),
        (["bench", "resnet18", "--device", "cpu,gpu"], "device: expected auto, cpu, cuda, cuda:n or mps, got 'gpu'"),
        (
            ["bench", "resnet18", "--runtime", "eager,onnx"],
            "got 'onnx'; did you mean 'onnxruntime' or 'openvino' or 'ncnn'?",
        ),
        (["bench", "resnet18", "--dtype", "fp64"], "'fp64': did you mean"),
        (["bench", "resnet18", "--runtime", "onnxruntime", "--dtype", "bf16"], "nothing was measured"),
        (["bench", "resnet18", "--device", "gpu"], "device: expected auto, cpu, cuda, cuda:n or mps, got 'gpu'"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_was_expected(arguments: list[str], expected: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_json_has_no_numbers_that_json_does_not_know() -> None:
    import numpy as np

    value = {"a": float("nan"), "b": np.float32(0.5), "c": np.arange(2), "d": (1, None, True), 3: float("inf")}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {
        "a": None, "b": 0.5, "c": [0, 1], "d": [1, None, True], "3": None
    }  # fmt: skip


def test_table_puts_text_to_the_left_and_numbers_to_the_right() -> None:
    rows = [("conv1", 64, "a"), ("fc", 1000, "longer")]
    assert table(("layer", "width", "why"), rows, text=("why",)).splitlines() == [
        "  layer  width  why",
        "  conv1     64  a",
        "  fc      1000  longer",
    ]
    assert table(("layer",), []) == "  (none)"


def test_every_command_is_registered() -> None:
    assert list(cli.list_commands(click.Context(cli))) == LISTED


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", "−3 %, 2×, é"), ("latin-1", "-3 %, 2x, é"), ("ascii", "-3 %, 2x, ?")]
)
def test_a_terminal_without_a_minus_sign_gets_another(encoding: str, shown: str) -> None:
    assert writable("−3 %, 2×, é", encoding) == shown


def test_a_program_without_stderr_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    console = Console(as_json=False)
    with console.running():
        console.log("nobody reads this")
    console.result({}, "done")
    assert not console.progress
    assert capsys.readouterr().out == "done\n"


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder(None)
    check_folder(tmp_path / "new" / "deep")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"expected a folder, but .*file is a file"):
        check_folder(tmp_path / "file" / "below")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
    with pytest.raises(UsageError, match="cannot be written to; choose another folder with --output"):
        check_folder(tmp_path / "new")


@pytest.mark.parametrize("command", ["finetune", "calibrate"])
def test_nothing_is_trained_for_an_output_that_is_no_folder(command: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: small\nmodel: {name: squeezenet1_1}\nbaseline: {epochs: 1}\n")
    result = run(command, str(recipe), "--output", str(recipe / "runs"))
    assert result.exit_code == 2
    assert "recipe.yaml is a file; choose another with --output" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_help_that_cannot_be_written_is_one_message() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "prunekit", "-h"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("prunekit: error: stdout cannot be written: ")
    assert "Traceback" not in done.stderr


class Deadly(io.StringIO):
    """Stderr that has the process terminated as soon as training begins."""

    def write(self, text: str) -> int:
        if "dense: training" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def terminated(recipe: Path, runs: Path) -> None:
    """Trains until the process is terminated, which ends as an interrupt does."""
    sys.argv = ["prunekit", "finetune", str(recipe), "--output", str(runs)]
    sys.stderr = Deadly()
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert sys.stderr.getvalue().endswith("prunekit: interrupted\n")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_killed_run_is_marked_interrupted(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: long\nmodel: {name: resnet18}\nbaseline: {epochs: 50}\ndevice: cpu\nthreads: 1\n")

    assert forked(partial(terminated, recipe, tmp_path / "runs")) == 0
    status = next((tmp_path / "runs" / "long").glob("*/status.json"))
    assert json.loads(status.read_text())["state"] == "interrupted"
