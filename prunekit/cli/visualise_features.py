"""`prunekit visualise features`: what layers make of an image."""

from __future__ import annotations

import click


@click.command("features", short_help="Show the feature maps of layers.")
def features_command() -> None:
    """Feature maps."""
