"""What building an engine uses of TensorRT, with its names; the engine is the flags that it was built with, as text."""

from __future__ import annotations

from enum import Enum
from typing import Any


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

    def parse_from_file(self, path: str) -> bool:
        return True
