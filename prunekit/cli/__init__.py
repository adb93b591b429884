"""The command line: `prunekit --help`. Commands import torch only once they run."""

import signal
import sys

import click

from prunekit.cli.groups import FAILED, INTERRUPTED, ErrorGroup
from prunekit.cli.options import debug_option


@click.group(cls=ErrorGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="prunekit")
@debug_option
def cli() -> None:
    """Prune a trained PyTorch model to a budget, fine-tune it, and prove what came out.

    Start with: prunekit finetune resnet34, a recipe that comes with the package, or with prunekit init.
    """


def main() -> None:
    """Run the command line and exit: 0 done, 1 a run or a gate that failed, 2 wrong usage, 130 interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's kill leaves a marked folder like Ctrl-C
    try:
        cli(prog_name="prunekit")
    except KeyboardInterrupt:
        # Outside of any command, such as while modules are imported.
        sys.exit(INTERRUPTED)
    except OSError as error:
        # Help and version are written before any command is invoked.
        click.echo(f"prunekit: error: stdout cannot be written: {error.strerror or error}", err=True)
        sys.exit(FAILED)


__all__ = ["cli", "main"]
