"""`prunekit list`: what there is to choose from."""

from __future__ import annotations

import click

from prunekit.catalog import CRITERIA
from prunekit.cli.options import common_options
from prunekit.cli.output import Console, table


@click.command("list", short_help="Show the criteria, and what each needs.")
@click.argument("what", type=click.Choice(["criteria"]))
@common_options
def list_command(what: str, as_json: bool) -> None:
    """Importance scores for `prune.criterion`: what each measures, what it needs, and whose it is.

    Those without labels among their needs work on any images. A job collects by itself what its criterion needs.
    """
    criteria = [
        {
            "name": facts.name,
            "needs": list(facts.needs),
            "label_free": "labels" not in facts.needs,
            "comparable": facts.comparable,
            "measures": facts.measures,
            "paper": facts.paper,
        }
        for facts in CRITERIA.values()
    ]
    headings = ("criterion", "labels", "needs", "measures", "paper")
    rows = [
        (
            facts.name,
            "needed" if "labels" in facts.needs else "no",
            ", ".join(need for need in facts.needs if need != "labels") or "nothing",
            facts.measures,
            facts.paper,
        )
        for facts in CRITERIA.values()
    ]
    Console(as_json).result({"criteria": criteria}, table(headings, rows, text=headings))
