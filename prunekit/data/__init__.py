"""Images with labels, split once and for all into training, validation and test."""

from prunekit.data.datasets import FolderImages, ImageDataset, Subset, TensorImages
from prunekit.data.loading import Batches, batches
from prunekit.data.settings import DataSettings
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits

__all__ = [
    "Batches",
    "DataSettings",
    "FolderImages",
    "ImageDataset",
    "Splits",
    "Subset",
    "TensorImages",
    "batches",
    "load_splits",
]
