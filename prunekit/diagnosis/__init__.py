"""What is wrong with a model and its data, found by running it forward and backward on a few batches."""

from prunekit.diagnosis.diagnosing import diagnose, require_kinds
from prunekit.diagnosis.findings import CHECKS, Diagnosis, Finding
from prunekit.diagnosis.images import Pool

__all__ = ["CHECKS", "Diagnosis", "Finding", "Pool", "diagnose", "require_kinds"]
