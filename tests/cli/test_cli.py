"""What every command shares: help, options, errors, exit codes, and where output goes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from prunekit.cli import cli
from prunekit.cli.output import plain, table
from prunekit.errors import ModelError, PrunekitError, RunError

COMMANDS = ("finetune", "calibrate", "evaluate", "bench", "inspect")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes `prunekit inspect` raise."""

    def install(error: BaseException) -> None:
        def callback(**arguments: Any) -> None:
            raise error

        monkeypatch.setattr(cli.commands["inspect"], "callback", callback)

    return install


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_shows_its_shared_options(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    for option in ("--json", "--debug", "--output", "--seed"):
        assert option in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["finetune", "--help"], ["--version"]])
def test_help_imports_neither_torch_nor_anything_as_large(arguments: list[str]) -> None:
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from prunekit.cli import cli\n"
        f"cli({arguments!r}, prog_name='prunekit', standalone_mode=False)\n"
        "print(f'{time.perf_counter() - start:.3f} s', file=sys.stderr)\n"
        "large = {'torch', 'numpy', 'pandas', 'matplotlib', 'pydantic', 'ruamel'} & set(sys.modules)\n"
        "sys.exit(f'imported {large}' if large else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    assert "prunekit" in done.stdout


def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "prunekit", "-h"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.split("Commands:\n")[1].splitlines()] == list(COMMANDS)


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (ModelError("no such model"), 2, "prunekit: error: no such model\n"),
        (RunError("the disk is full"), 1, "prunekit: error: the disk is full\n"),
        (PrunekitError("other"), 1, "prunekit: error: other\n"),
        (ZeroDivisionError("oh"), 1, "prunekit: error: ZeroDivisionError: oh\nThis was not expected; --debug"),
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
        (["bench", "--batch", "1,x"], "expected positive whole numbers with commas between them, got '1,x'"),
        (["bench", "--threads", "0"], "got '0'"),
        (["bench", "--repeats", "2"], "2 is not in the range"),
        (["bench", "--max-latency-ms", "0"], "not in the range"),
        (["inspect", "--input-shape", "1x3x"], "expected sizes with the batch first, such as 1x3x224x224, got '1x3x'"),
        (["inspect", "--seed", "-1"], "not in the range"),
        (["finetune"], "Missing argument 'RECIPE.yaml'"),
        (["finetune", "nowhere.yaml"], "nowhere.yaml: expected a recipe (a YAML file), but there is no such file"),
        (["inspect"], "expected a model: a recipe, a model folder, a torchvision name, or --model"),
        (["inspect", "resnet18", "resnet34"], "expected one model, got 2: resnet18, resnet34"),
        (["inspect", "resnet18", "seed=3"], "'seed=3' changes a recipe, and no recipe was given"),
        (["bench", "resnet18", "seed=3"], "'seed=3' changes a recipe, and no recipe was given"),
        (["evaluate", "resnet18", "seed=3"], "'seed=3' changes a recipe, and no recipe was given"),
        (["evaluate", "a.yaml", "--recipe", "b.yaml"], "a.yaml has images of its own"),
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
    assert tuple(cli.list_commands(click.Context(cli))) == COMMANDS
