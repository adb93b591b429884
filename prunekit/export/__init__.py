"""Models in the formats of other runtimes."""

from prunekit.export.onnx import export_onnx

__all__ = ["export_onnx"]
