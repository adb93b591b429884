"""Repair of pruned models from calibration data alone: no labels, no gradients, no training."""

from prunekit.repair.repairing import repair, require_images
from prunekit.repair.report import LayerRepair, RepairReport
from prunekit.settings.repair import RepairSettings

__all__ = ["LayerRepair", "RepairReport", "RepairSettings", "repair", "require_images"]
