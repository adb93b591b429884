"""The environment that a launcher such as `torchrun` sets, read without torch."""

import os

from prunekit.errors import UsageError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torch reads (`init_method="env://"`); `torchrun`, `accelerate launch` and PyTorchJob set them."""
SHARDING = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
"""Variables that `accelerate launch` sets to split the model itself."""


def launched() -> bool:
    """Return whether this is one of several processes that a launcher started."""
    if not ("RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"):
        return False
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ.get(name, "0").isdecimal():
            raise UsageError(f"environment: expected a number in {name}, got {os.environ[name]!r}")
    split = [name for name in SHARDING if os.environ.get(name, "false").lower() in ("1", "true")]
    if split:
        raise UsageError(
            f"environment: {split[0]} asks for a model split over the processes (FSDP, DeepSpeed), which prunekit does "
            "itself where a recipe says `finetune.sharding: full`; start with torchrun, or with `accelerate launch "
            "--multi_gpu`"
        )
    if missing := [name for name in NEEDED if not os.environ.get(name)]:
        raise UsageError(
            f"environment: expected {', '.join(NEEDED)} of a process among several, but {' and '.join(missing)} is "
            "not set; start with torchrun or `accelerate launch`, or unset RANK for a single process"
        )
    return True


def leads() -> bool:
    """Return whether this process writes to the console: it is the first that was started, or the only one."""
    return os.environ.get("RANK", "0") == "0" or not launched()


def local_rank() -> int:
    """Return the number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))
