"""Runtimes that run a model: eager, compiled, CUDA graphs, ONNX Runtime, OpenVINO, TensorRT."""
