"""Compaction, and the folder a compact model lives in."""

from prunekit.compaction.compact import compact, remarks
from prunekit.compaction.folder import load, read_manifest, save
from prunekit.compaction.spreading import spread_

__all__ = ["compact", "load", "read_manifest", "remarks", "save", "spread_"]
