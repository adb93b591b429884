"""Pictures of what a model computes: feature maps, gradients, class activation maps."""

from prunekit.visualise.cam import class_activation_map, correlation
from prunekit.visualise.features import LayerFeatures, feature_maps
from prunekit.visualise.grids import GridSettings, draw
from prunekit.visualise.images import Pixels, Preprocessing, Transform, coloured, read_image, write_png
from prunekit.visualise.saliency_maps import Smoothing, saliency
from prunekit.visualise.scores import ClassMap
from prunekit.visualise.views import View

__all__ = [
    "ClassMap",
    "GridSettings",
    "LayerFeatures",
    "Pixels",
    "Preprocessing",
    "Smoothing",
    "Transform",
    "View",
    "class_activation_map",
    "coloured",
    "correlation",
    "draw",
    "feature_maps",
    "read_image",
    "saliency",
    "write_png",
]
