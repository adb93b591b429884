"""Names that settings of several floors and the command line share; imports nothing that is slow to import."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge

from prunekit.registries import RUNTIMES
from prunekit.registry import Registered

PositiveInt = Annotated[int, Ge(1)]
RuntimeName = Annotated[str, Registered(RUNTIMES)]
DtypeName = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[DtypeName, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Torch's names, which rows of results have, by those of settings."""
MemoryFormat = Literal["contiguous", "channels_last"]
