"""Pictures of what a model computes: feature maps, gradients, class activation maps."""

from prunekit.visualise.cam import class_activation_map, correlation
from prunekit.visualise.distributions import Distribution, activation_distributions, weight_distributions
from prunekit.visualise.features import LayerFeatures, feature_maps
from prunekit.visualise.filters import Filters, draw_filters, first_filters
from prunekit.visualise.grids import GridSettings, draw
from prunekit.visualise.images import Pixels, Preprocessing, Transform, coloured, read_image, write_png
from prunekit.visualise.saliency_maps import Smoothing, saliency
from prunekit.visualise.scores import ClassMap
from prunekit.visualise.views import View

__all__ = [
    "ClassMap",
    "Distribution",
    "Filters",
    "GridSettings",
    "LayerFeatures",
    "Pixels",
    "Preprocessing",
    "Smoothing",
    "Transform",
    "View",
    "activation_distributions",
    "class_activation_map",
    "coloured",
    "correlation",
    "draw",
    "draw_filters",
    "feature_maps",
    "first_filters",
    "read_image",
    "saliency",
    "weight_distributions",
    "write_png",
]
