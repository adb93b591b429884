"""Small nets written by hand, each with one thing in it that is easily pruned wrong; importing them registers all."""

from __future__ import annotations

import nets_attention
import nets_calls
import nets_convolutions
import nets_experts
import nets_fixed
import nets_graphs
import nets_grouped
import nets_images
import nets_joins
import nets_maps
import nets_modes
import nets_norms
import nets_python
import nets_recurrent
import nets_spectral
import nets_tables
import nets_taken
import nets_weights
from net_registry import CASES

__all__ = [
    "CASES",
    "nets_attention",
    "nets_calls",
    "nets_convolutions",
    "nets_experts",
    "nets_fixed",
    "nets_graphs",
    "nets_grouped",
    "nets_images",
    "nets_joins",
    "nets_maps",
    "nets_modes",
    "nets_norms",
    "nets_python",
    "nets_recurrent",
    "nets_spectral",
    "nets_tables",
    "nets_taken",
    "nets_weights",
]
