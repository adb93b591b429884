"""What a launcher says in the environment."""

from __future__ import annotations

import pytest

from prunekit.cli.groups import require_alone
from prunekit.cli.output import Console
from prunekit.distributed.launcher import launched, leads, local_rank
from prunekit.errors import UsageError
from prunekit.utils.context import resolve_device

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def set_all(environment: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in (TORCHRUN | changes).items():
        environment.setenv(name, value)


def test_one_of_several(environment: pytest.MonkeyPatch) -> None:
    set_all(environment)
    assert (launched(), leads(), local_rank()) == (True, False, 1)
    set_all(environment, RANK="0")
    assert (launched(), leads()) == (True, True)


def test_a_single_process(environment: pytest.MonkeyPatch) -> None:
    assert (launched(), leads(), local_rank()) == (False, True, 0)
    set_all(environment, WORLD_SIZE="1", RANK="0")
    assert (launched(), leads()) == (False, True)
    environment.delenv("RANK")
    environment.setenv("WORLD_SIZE", "4")  # what others than launchers leave there
    assert not launched()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set; start with torchrun"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_PORT"),
        ({"ACCELERATE_USE_FSDP": "true"}, "split over the processes .*; start with torchrun"),
        ({"WORLD_SIZE": "four"}, "expected a number in WORLD_SIZE, got 'four'"),
    ],
)
def test_half_an_environment_is_refused(changes: dict[str, str], said: str, environment: pytest.MonkeyPatch) -> None:
    set_all(environment, **changes)
    with pytest.raises(UsageError, match=said):
        launched()


def test_only_the_first_speaks(environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_all(environment)
    console = Console(True)
    console.log("a line")
    console.result({"a": 1}, "a")
    assert not console.progress
    assert capsys.readouterr() == ("", "")


def test_commands_for_one_process_are_refused_to_several(environment: pytest.MonkeyPatch) -> None:
    require_alone("bench")
    set_all(environment)
    require_alone("finetune")
    with pytest.raises(UsageError, match="bench: expected a single process, but a launcher started several"):
        require_alone("bench")


@pytest.mark.parametrize("name", ["cuda:0", "mps"])
def test_processes_do_not_share_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prunekit.utils.context.size", lambda: 2)
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(UsageError, match=f"expected auto, cpu or cuda for 2 processes.* got '{name}'"):
        resolve_device(name)
