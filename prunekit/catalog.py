"""The criteria by name: what each measures, what it needs, and whose it is. Readable without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Need = Literal["weights", "stats", "moments", "patches", "ranks", "gradients", "curvature", "labels"]
"""What an importance score looks at: the weights; statistics of activations; Gram matrices of layers' inputs, of
channels or of patches; ranks of feature maps; gradients of a loss; products of its Hessian; and labels, without which
there is no loss."""


@dataclass(frozen=True)
class CriterionFacts:
    """What is known of an importance score without computing it.

    Attributes:
        name: as recipes and functions call it.
        needs: what it looks at; label-free without "labels".
        measures: in a few words.
        paper: whose it is; empty for a baseline.
        comparable: whether scores of different channel groups can be ranked together as they are; others are
            normalized first.
    """

    name: str
    needs: tuple[Need, ...]
    measures: str
    paper: str = ""
    comparable: bool = False


_LI = "Li et al. 2017, Pruning filters for efficient ConvNets"
_MOLCHANOV = "Molchanov et al. 2017, Pruning CNNs"
_LOSS: tuple[Need, ...] = ("weights", "gradients", "labels")
_SECOND: tuple[Need, ...] = ("weights", "gradients", "curvature", "labels")
_FACTS = (
    CriterionFacts("l1", ("weights",), "mean |w|", _LI),
    CriterionFacts(
        "l2", ("weights",), "root mean square of w", "Li et al. 2017, Pruning filters for efficient ConvNets"
    ),
    CriterionFacts("lamp", ("weights",), "w^2 over what ranks above it", "Lee et al. 2021, LAMP", comparable=True),
    CriterionFacts("fpgm", ("weights",), "distance to the layer's other filters", "He et al. 2019, FPGM"),
    CriterionFacts("bn_scale", ("weights",), "|scale| of norms", "Liu et al. 2017, Network slimming"),
    CriterionFacts("activation", ("stats",), "mean |activation|", _MOLCHANOV),
    CriterionFacts("activation_rms", ("stats",), "root mean square of activations", _MOLCHANOV),
    CriterionFacts("apoz", ("stats",), "share of activations that are not zero", "Hu et al. 2016, Network trimming"),
    CriterionFacts("wanda", ("weights", "stats"), "|w| times the norm of what it reads", "Sun et al. 2024, Wanda"),
    CriterionFacts(
        "obs",
        ("weights", "moments"),
        "output error once the other channels make up for it",
        "Frantar & Alistarh 2023, SparseGPT; Hassibi & Stork 1993, OBS",
    ),
    CriterionFacts(
        "elimination",
        ("weights", "patches"),
        "output error that it adds, with all that stays fitted anew, as channels go one after another",
        "Hassibi & Stork 1993, OBS, by channels; Frantar & Alistarh 2023, SparseGPT",
        comparable=True,
    ),
    CriterionFacts("chip", ("moments",), "nuclear norm lost with the channel", "Sui et al. 2021, CHIP"),
    CriterionFacts("hrank", ("ranks",), "mean rank of feature maps", "Lin et al. 2020, HRank"),
    CriterionFacts("taylor", _LOSS, "(w dL/dw)^2", "Molchanov et al. 2019, order 1", comparable=True),
    CriterionFacts("taylor2", _SECOND, "(w dL/dw - w H w / 2)^2", "Molchanov et al. 2019, order 2", comparable=True),
    CriterionFacts("obd", _SECOND, "H_ii w^2 / 2", "LeCun et al. 1990, Optimal brain damage", comparable=True),
    CriterionFacts("random", (), "nothing: the baseline"),
)
CRITERIA = {facts.name: facts for facts in _FACTS}
"""Every criterion of prunekit, by name."""
