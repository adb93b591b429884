"""`prunekit visualize`: pictures of what a model computes, a subcommand for each kind."""

from __future__ import annotations

import click

from prunekit.cli.visualize_cam import cam_command, saliency_command
from prunekit.cli.visualize_features import features_command
from prunekit.cli.visualize_filters import filters_command
from prunekit.cli.visualize_gradients import gradients_command
from prunekit.cli.visualize_histograms import histograms_command
from prunekit.report import require_report


@click.group("visualize", short_help="Show what a model computes, as pictures.")
def visualize_group() -> None:
    """Pictures of what a model computes, the dense model's beside the pruned one's."""
    require_report()


SUBCOMMANDS = (features_command, cam_command, saliency_command, gradients_command, filters_command, histograms_command)
for command in SUBCOMMANDS:
    visualize_group.add_command(command)
