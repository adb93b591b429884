"""`prunekit prune`: the job of a recipe without fine-tuning."""

from __future__ import annotations

from typing import Any

import click

from prunekit.cli.finetune import job_options, run_recipe


@click.command("prune", short_help="Prune, repair, compact, verify and measure: no training.")
@job_options
def prune_command(**arguments: Any) -> None:
    """Run the job of a recipe without fine-tuning: load the dense model (or train it, where it has no weights), collect
    what the criterion needs, prune, repair what stays as `repair` says, compact, verify, measure, and write a report.

    RECIPE is a file, or the name of a recipe that comes with the package (prunekit recipe list).

    KEY=VALUE changes the recipe, for example: prune.budget.macs=0.4. With --model the recipe's model, with --data its
    images are yours; model.weights still counts, and so do the other data settings, unless --data gives Splits.

    Exits with 1 when the run fell short of what the recipe asks.
    """
    run_recipe(training=False, **arguments)
