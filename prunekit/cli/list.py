"""`prunekit list`: what there is to choose from."""

from __future__ import annotations

import click

from prunekit.cli.options import common_options
from prunekit.cli.output import Console, table
from prunekit.registries import CRITERIA


@click.command("list", short_help="Show the criteria, and what each needs.")
@click.argument("what", type=click.Choice(["criteria"]))
@common_options
def list_command(what: str, as_json: bool) -> None:
    """Importance scores for `prune.criterion`: what each measures, what it needs, and whose it is.

    Those without labels among their needs work on any images. A job collects by itself what its criterion needs.
    """
    criteria = [
        {
            "name": name,
            "needs": list(facts.get("needs", ())),
            "label_free": "labels" not in facts.get("needs", ()),
            "comparable": facts.get("comparable", False),
            "measures": facts.get("measures", ""),
            "paper": facts.get("paper", ""),
        }
        for name, facts in CRITERIA.facts().items()
    ]
    headings = ("criterion", "labels", "needs", "measures", "paper")
    rows = [
        (
            row["name"],
            "no" if row["label_free"] else "needed",
            ", ".join(need for need in row["needs"] if need != "labels") or "nothing",
            row["measures"],
            row["paper"],
        )
        for row in criteria
    ]
    Console(as_json).result({"criteria": criteria}, table(headings, rows, text=headings))
