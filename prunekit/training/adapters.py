"""Adapters of peft beside the layers of a model: they alone are trained, and are merged into the layers afterwards."""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from prunekit.errors import ModelError, UsageError
from prunekit.settings.train import AdapterSettings, TrainSettings
from prunekit.utils.availability import ADAPTERS, missing_packages
from prunekit.utils.context import seeded
from prunekit.utils.globs import matching

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ABLE = "layers of Linear, convolutions without groups and dilation, and transformers' Conv1D, with weights of their own"


@contextmanager
def adapted(model: nn.Module, settings: AdapterSettings, *, seed: int) -> Iterator[None]:
    """Put adapters beside a model's layers, in place, while the context is active, and merge them when it ends.

    Inside, only the adapters require gradients. Calls and paths of modules stay as they are; the parameters of an
    adapted layer are in its `base_layer`. An adapter adds `alpha / rank * B A x` to what a layer computes of x, and B
    begins as zero (Hu et al. 2022, "LoRA"); merged, `alpha / rank * B A` is added to the layer's weight. After an error
    they are taken out, and the model is as it was before.

    Args:
        model: in which layers that the settings' globs do not match, and globs without layers, are left out, because
            pruning may have removed some.
        seed: of the random matrices A.

    Raises:
        ModelError: no layer is left to adapt.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    able = adaptable(model)
    if settings.modules is not None:
        able = [path for path in able if any(path == one or fnmatchcase(path, one) for one in settings.modules)]
    if not able:
        raise ModelError(f"adapter: {type(model).__name__} has none of the layers that it is for; leave it out")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # it is only divided by the rank
        lora_dropout=settings.dropout,
        target_modules="|".join(map(re.escape, able)),  # paths in a list would match ends of other paths too
    )
    merge = False
    with seeded(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Conv1D has its weight the other way round, which peft respects
        adapters = LoraModel(model, config, "default")
    try:
        yield
        merge = True
    finally:
        with torch.no_grad():
            (adapters.merge_and_unload if merge else adapters.unload)()
        for parameter in trained:
            parameter.requires_grad_(True)


def adaptable(model: nn.Module) -> list[str]:
    """Return the paths of layers that adapters can be merged into: those within blocks that repeat, or else all.

    A layer whose weight another one shares is none of them: the merged weight would act there too.
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found = [
        path
        for path, module in model.named_modules()
        if path
        and _is_able(module)
        and owners[id(module.weight)] == 1
        # attention reads the weight of its projection, and does not call it
        and not isinstance(model.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention)
    ]
    return [path for path in found if any(part.isdigit() for part in path.split("."))] or found


def _is_able(module: nn.Module) -> bool:
    """Return whether peft adapts a layer, and its merged weight computes the same."""
    transposed = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
    kind = next((kind for kind in (nn.Linear, transposed, *CONVOLUTIONS) if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward or is_parametrized(module):
        return False
    plain = not isinstance(module, CONVOLUTIONS) or (
        module.groups == 1 and {*module.dilation} == {1} and module.padding_mode == "zeros"
    )
    return plain and isinstance(module.weight, nn.Parameter) and module.weight.numel() > 0


def require_adaptable(model: nn.Module, settings: AdapterSettings) -> None:
    """Raise, before anything runs, if peft is not installed, or a dense model has no layers that can be adapted."""
    if missing := missing_packages(["peft"], ADAPTERS):
        raise UsageError(f"finetune.adapter {missing}")
    able = adaptable(model)
    if not able:
        raise ModelError(f"finetune.adapter: expected {ABLE}, and {type(model).__name__} has none; leave it out")
    for pattern in settings.modules or ():
        matching(pattern, able, "finetune.adapter.modules", what=f"layer that can be adapted ({ABLE})")


def require_adapted(model: nn.Module, settings: TrainSettings) -> None:
    """Raise if settings ask for adapters and a model has none."""
    kind = getattr(sys.modules.get("peft.tuners.lora"), "LoraLayer", ())
    if settings.adapter is not None and not any(isinstance(module, kind) for module in model.modules()):
        raise UsageError("adapter is set, and the model has none: train it within prunekit.training.adapters.adapted")
