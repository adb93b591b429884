"""Images with labels, and data of other tasks, split once and for all into training, validation and test."""

from prunekit.data.corrupt import CorruptImages, describe_corrupt
from prunekit.data.datasets import ImageDataset, SampleDataset, Subset, TensorImages
from prunekit.data.decoded import FolderImages, MappedImages
from prunekit.data.feed import Feed
from prunekit.data.loading import Batches, batches
from prunekit.data.mixing import Mixing
from prunekit.data.own import load_own
from prunekit.data.samples import Samples, sample_splits
from prunekit.data.sources import feed_of, load_splits, missing_data
from prunekit.data.splits import Splits
from prunekit.settings.data import AugmentSettings, DataSettings, Workers

__all__ = [
    "AugmentSettings",
    "Batches",
    "CorruptImages",
    "DataSettings",
    "Feed",
    "FolderImages",
    "ImageDataset",
    "MappedImages",
    "Mixing",
    "SampleDataset",
    "Samples",
    "Splits",
    "Subset",
    "TensorImages",
    "Workers",
    "batches",
    "describe_corrupt",
    "feed_of",
    "load_own",
    "load_splits",
    "missing_data",
    "sample_splits",
]
