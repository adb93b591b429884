"""What becomes of an error: one line on stderr and an exit code; a traceback only with --debug."""

from __future__ import annotations

import traceback
from typing import Any

import click

from prunekit.errors import PrunekitError

INTERRUPTED = 130
FAILED = 1


class ErrorGroup(click.Group):
    """A group whose commands may raise anything."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Commands in the order of a user's journey."""
        return list(self.commands)

    def invoke(self, context: click.Context) -> Any:
        """Runs the command; errors end it with their exit code."""
        try:
            return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            click.echo("prunekit: interrupted", err=True)
            context.exit(INTERRUPTED)
        except PrunekitError as error:
            _report(context, str(error))
            context.exit(error.exit_code)
        except Exception as error:
            hint = "" if _debugging(context) else "\nThis was not expected; --debug shows where it comes from."
            _report(context, f"{type(error).__name__}: {error}{hint}")
            context.exit(FAILED)


def _report(context: click.Context, message: str) -> None:
    if _debugging(context):
        click.echo(traceback.format_exc(), err=True, nl=False)
    click.echo(f"prunekit: error: {message}", err=True)


def _debugging(context: click.Context) -> bool:
    return bool(context.find_root().meta.get("prunekit.debug"))
