"""Pictures of what a model computes: feature maps, gradients, class activation maps."""

from prunekit.visualize.cam import class_activation_map, correlation
from prunekit.visualize.distributions import Distribution, activation_distributions, weight_distributions
from prunekit.visualize.features import LayerFeatures, feature_maps
from prunekit.visualize.filters import Filters, draw_filters, first_filters
from prunekit.visualize.grids import GridSettings, draw
from prunekit.visualize.images import Pixels, Preprocessing, Transform, colored, read_image, write_png
from prunekit.visualize.saliency_maps import Smoothing, saliency
from prunekit.visualize.scores import ClassMap
from prunekit.visualize.views import View

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
    "colored",
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
