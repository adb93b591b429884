"""Importance by chance: the baseline that every criterion has to beat."""

from __future__ import annotations

import numpy as np

from prunekit.criteria.registry import Evidence, Scores, register_criterion


@register_criterion("random", needs=(), measures="nothing: the baseline")
def random(evidence: Evidence) -> Scores:
    """Uniform in [0, 1), from the seed alone."""
    return np.random.default_rng(evidence.seed).random(evidence.channel_map.n_labels)
