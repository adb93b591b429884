"""Pictures of what a model computes: feature maps, gradients, class activation maps."""

from prunekit.visualise.cam import class_activation_map, correlation
from prunekit.visualise.images import Pixels, Preprocessing, Transform, coloured, read_image, write_png
from prunekit.visualise.saliency import Smoothing, saliency
from prunekit.visualise.scores import ClassMap

__all__ = [
    "ClassMap",
    "Pixels",
    "Preprocessing",
    "Smoothing",
    "Transform",
    "class_activation_map",
    "coloured",
    "correlation",
    "read_image",
    "saliency",
    "write_png",
]
