"""The command group: commands by name, and errors that end one with a line and an exit code, in one process or several.

Several processes are started by `torchrun` or `accelerate launch`. Tracebacks are printed only with --debug.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from prunekit.distributed.launcher import launched, leads
from prunekit.errors import PeerError, PrunekitError, UsageError, is_shortage, shortage_message
from prunekit.known_names import COMMANDS
from prunekit.utils.user_code import place_in_user_code

LAST = 1000
"""Place of commands that name none in `prunekit --help`."""


def register_command(
    name: str, *, about: str, place: int = LAST, together: bool = False
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a function a command; a file of `cli/commands` with one is found by itself.

    Args:
        name: as it is typed.
        about: a line for `prunekit --help`, which imports no command; `place` orders the lines.
        together: whether several processes of a launcher may run it together.
    """

    def register(function: Callable[..., Any]) -> click.Command:
        command = function if isinstance(function, click.Command) else click.command()(function)
        command.name, command.short_help = name, about
        COMMANDS.add(name, command, function)
        return command

    return register


def accept(reference: str, found: Any) -> click.Command:
    """Return the command that another package declares."""
    if not isinstance(found, click.Command):
        raise UsageError(f"{reference}: expected a command of click, got {type(found).__name__}")
    return found


def require_alone(command: str | None) -> None:
    """Raise UsageError if this is one of several processes, and the command is for a single one."""
    facts = COMMANDS.facts()
    if not facts.get(str(command), {}).get("together") and launched():
        together = [name for name in _in_order(facts) if facts[name].get("together")]
        raise UsageError(
            f"{command}: expected a single process, but a launcher started several; run `prunekit {command}` without "
            f"it. Those that run in several are {', '.join(together)}"
        )


def _in_order(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of commands in the order of a user's journey."""
    return sorted(facts, key=lambda name: facts[name].get("place", LAST))


@contextmanager
def as_one() -> Iterator[None]:
    """Run a command in the process group that the environment describes; if one process fails, all do."""
    if not launched():
        yield
        return
    from prunekit.distributed.process_group import join_group, one_for_all

    with join_group(), one_for_all(click.exceptions.Exit):
        yield


INTERRUPTED = 130
FAILED = 1


class ErrorGroup(click.Group):
    """The group of all commands, each imported when it is run; it reports any error of theirs."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands, in the order of a user's journey."""
        return _in_order(COMMANDS.facts())

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return a command, imported now; None if there is none of this name."""
        return COMMANDS.get(name) if name in COMMANDS.names else None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each command into the help, as its registration says; none is imported."""
        facts = COMMANDS.facts()
        with formatter.section("Commands"):
            formatter.write_dl([(name, str(facts[name].get("about", ""))) for name in _in_order(facts)])

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; raise if it is for a single process and there are several."""
        self.commands = dict.fromkeys(COMMANDS.names, click.Command(None))  # click suggests the nearest of these
        name, command, rest = super().resolve_command(context, args)
        require_alone(name)
        return name, command, rest

    def invoke(self, context: click.Context) -> Any:
        """Run the command; errors end it with their exit code."""
        try:
            with as_one():
                return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            if leads():
                click.echo("prunekit: interrupted", err=True)
            context.exit(INTERRUPTED)
        except PeerError as error:  # the process that failed prints why
            context.exit(error.exit_code)
        except PrunekitError as error:
            _report(context, str(error))
            context.exit(error.exit_code)
        except Exception as error:
            if (message := _refused(error)) is None:
                hint = "" if _debugging(context) else "\nThis was not expected; --debug shows where it comes from."
                place = place_in_user_code(error)
                message = f"{type(error).__name__}: {error}{'' if place is None else f' ({place})'}{hint}"
            _report(context, message)
            context.exit(FAILED)


def _refused(error: Exception) -> str | None:
    """Return the message for want of memory, or for a file that cannot be read or written; None for other errors."""
    if is_shortage(error):
        return shortage_message(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'output'}: cannot be read or written: {error.strerror}"
    # safetensors has an exception of its own, which is looked up only if safetensors was imported.
    safetensors = sys.modules.get("safetensors")
    if safetensors is not None and isinstance(error, safetensors.SafetensorError):
        return f"a file of tensors cannot be read or written: {str(error).rpartition('I/O error: ')[2]}"
    return None


def _report(context: click.Context, message: str) -> None:
    if _debugging(context):
        click.echo(traceback.format_exc(), err=True, nl=False)
    click.echo(f"prunekit: error: {message}", err=True)


def _debugging(context: click.Context) -> bool:
    return bool(context.find_root().meta.get("prunekit.debug"))
