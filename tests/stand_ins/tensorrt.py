"""Parts of TensorRT that building and running engines uses, with its names.

An engine that is built is the flags that it was built with, as text. An engine that is run is an ONNX file, which ONNX
Runtime computes at the addresses of tensors in the memory of the process.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from typing import Any

import numpy as np


class NetworkDefinitionCreationFlag(int, Enum):
    STRONGLY_TYPED = 1


class BuilderFlag(Enum):
    TF32 = 6
    SPARSE_WEIGHTS = 7


class _Config:
    def __init__(self) -> None:
        self.flags = {BuilderFlag.TF32}

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)


class Builder:
    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def create_network(self, flags: int) -> object:
        return object()

    def create_builder_config(self) -> _Config:
        return _Config()

    def build_serialized_network(self, network: object, config: _Config) -> bytes:
        return " ".join(sorted(flag.name for flag in config.flags)).encode()


class OnnxParser:
    num_errors = 0

    def __init__(self, network: object, logger: Any) -> None: ...

    def parse_from_file(self, path: str) -> Any:
        return True


class ILogger:
    ERROR, INTERNAL_ERROR = "error", "internal error"


float32, float16, bfloat16, int64, int32, int8, uint8, bool = (
    f"tensor({name})" for name in ("float", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
)
NUMPY = {float32: np.float32, int64: np.int64}


class Runtime:
    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, built: bytes) -> _Engine | None:
        import onnxruntime

        try:
            session = onnxruntime.InferenceSession(built, providers=["CPUExecutionProvider"])
        except Exception as error:  # of its own classes
            self.logger.log(ILogger.ERROR, str(error).partition("\n")[0])
            return None
        return _Engine(session)


class _Engine:
    def __init__(self, session: Any) -> None:
        self.session = session
        self.tensors = {one.name: one for one in (*session.get_inputs(), *session.get_outputs())}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return str([*self.tensors][index])

    def get_tensor_dtype(self, name: str) -> Any:
        return self.tensors[name].type

    def create_execution_context(self) -> _Context:
        return _Context(self)


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> Any:
        built = self.engine.tensors[name].shape
        fits = len(built) == len(shape) and all(
            size == given for size, given in zip(built, shape, strict=True) if isinstance(size, int)
        )
        self.shapes |= {name: shape} if fits else {}
        return fits

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name] if name in self.shapes else self._computed(zeros=True)[name].shape

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> Any:
        for name, values in self._computed().items():
            ctypes.memmove(self.addresses[name], np.ascontiguousarray(values).ctypes.data, values.nbytes)
        return True

    def _computed(self, *, zeros: Any = False) -> dict[str, Any]:
        feed = {}
        for one in self.engine.session.get_inputs():
            feed[one.name] = np.zeros(self.shapes[one.name], NUMPY[one.type])
            if not zeros:
                ctypes.memmove(feed[one.name].ctypes.data, self.addresses[one.name], feed[one.name].nbytes)
        names = [one.name for one in self.engine.session.get_outputs()]
        return dict(zip(names, self.engine.session.run(names, feed), strict=True))
