"""Pictures of what a model computes: feature maps, gradients, class activation maps."""

from prunekit.visualise.images import Pixels, Preprocessing, Transform, coloured, read_image, write_png

__all__ = ["Pixels", "Preprocessing", "Transform", "coloured", "read_image", "write_png"]
