"""Lightning: pruning by a callback of its `Trainer`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from prunekit.errors import UsageError, nearest
from prunekit.integrations.prune_callback import PrunesInTrainer
from prunekit.utils.availability import require_library

OLD_NAME = find_spec("lightning") is None if "pytorch_lightning" not in sys.modules else "lightning" not in sys.modules
"""True if Lightning is used as `pytorch_lightning`, its package of before."""
if find_spec("pytorch_lightning") is None or not OLD_NAME:
    require_library("lightning", "lightning")

    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
else:
    from pytorch_lightning import Callback, LightningModule  # type: ignore[assignment, unused-ignore]
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint  # type: ignore[assignment, unused-ignore]


class PruneCallback(PrunesInTrainer, Callback):  # type: ignore[misc, unused-ignore]  # where Lightning is not there
    """A callback of Lightning's `Trainer` that prunes while it trains, over `prunekit.Pruner`.

    Automatic and manual optimization, accumulated gradients, mixed precision and DDP work as in `Pruner`. Checkpoints
    have its state: `fit(ckpt_path=...)` goes on to the bit. The average of a `WeightAveraging` callback is masked too.
    Each pruning step makes `ModelCheckpoint` and `EarlyStopping` forget the best so far, because scores of models with
    more channels don't compare: the best checkpoint is one under the plan in force at the end, and files of earlier
    ones stay. `sparsity`, `macs_left` and the like are logged at each step.

    Args:
        example: what the pruned module is called with, as for `prunekit.Pruner`; None: the LightningModule's
            `example_input_array`, where the whole of it is pruned.
        module: path of the submodule that is pruned, such as `"model"`; None: the LightningModule itself, which then
            needs a `forward`. The optimizer that trains it may have no other parameters.
        steps: of the optimizer until the budgets are met; a float is a share of the training, in 0..1; None: halfway
            from `begin` to the end of the training, unless the schedule has an end or is `oneshot`.
        begin: steps before the schedule begins; a float is a share of the training.
        arguments: further ones of `prunekit.Pruner`, such as `macs`, `criterion` and `on_change`.

    Raises:
        UsageError: a share is not in 0..1, or an argument is one that the callback takes from its trainer.

    Example:
        >>> import torch, lightning.pytorch as pl
        >>> from prunekit.integrations.lightning import PruneCallback
        >>> class Net(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        ...     def forward(self, x):
        ...         return self.net(x)
        ...     def training_step(self, batch, index):
        ...         return self(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> prune = PruneCallback(torch.randn(1, 4), macs=0.5)
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        >>> trainer = pl.Trainer(max_epochs=1, callbacks=[prune], enable_checkpointing=False, **quiet)
        >>> trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(64, 4), 8))
        >>> prune.finish().net[0].out_features
        8
    """

    def __init__(
        self,
        example: Any = None,
        *,
        module: str | None = None,
        steps: float | None = None,
        begin: float = 0,
        **arguments: Any,
    ) -> None:
        super().__init__(example, steps=steps, begin=begin, **arguments)
        self.module = module

    @property
    def state_key(self) -> str:
        """The key of this callback's state in checkpoints: one for each pruned module."""
        key: str = self._generate_state_key(module=self.module)
        return key

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that there is something to prune, and leave the masks of a training before until weights are loaded."""
        if stage == "fit":
            self._pruned(pl_module)
            if self.is_open:
                self._pause()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the pruner, once optimizers and checkpoint are there."""
        model = self._pruned(pl_module)
        example = self.example
        if example is None and model is pl_module and "calibration" not in self.arguments:
            example = pl_module.example_input_array
        if example is not None:
            example = trainer.strategy.precision_plugin.convert_input(example)
        optimizer = _optimizer_of(model, trainer.optimizers)
        self._begin(model, optimizer, trainer.estimated_stepping_batches, example, self._average(trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Put the next plan in force if its step is reached, and log what is left."""
        if not self.is_open:
            return
        if self._step():
            _forget_best(trainer)
        pl_module.log_dict(self.figures(), on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the pruner's state, for a checkpoint."""
        return self._state() if self.is_open else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint for the training that goes on from it."""
        self._saved = state_dict if "pruner" in state_dict else None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Raise unless a checkpoint that a training goes on from has a state of this callback."""
        going_on = trainer.state.fn == "fit" and self._small is None
        if going_on and self.state_key not in checkpoint.get("callbacks", {}):
            raise UsageError(
                f"this checkpoint, of step {checkpoint.get('global_step')}, has no state of {self.state_key}: it was "
                "written by a training without this callback; load its weights alone, and train without ckpt_path"
            )

    def finish(self, *, early: bool = False) -> nn.Module:
        """Return the compact LightningModule, or the compact submodule where one was named; see `Pruner.finish`.

        After a training with `WeightAveraging` its weights are the averaged ones, as Lightning leaves them. Train it
        further with a new `Trainer` or `fit`, and save it with `prunekit.save(small, folder, callback.plan)`.

        Args:
            early: whether to apply the final plan now if the schedule isn't over.

        Raises:
            UsageError: there was no training, the schedule isn't over and not `early`, or it is finished already.
            VerificationError: masked and compact model differ; nothing was changed.
        """
        return self._finish(early)

    def _pruned(self, pl_module: Any) -> nn.Module:
        """Return the module that is pruned."""
        paths = [path for path, module in pl_module.named_modules() if path and any(True for _ in module.parameters())]
        tops = [path for path in paths if "." not in path]
        kind = type(pl_module).__name__
        if self.module is None and type(pl_module).forward is LightningModule.forward:
            raise UsageError(
                f"{kind} has no forward that could be traced: name the submodule that is pruned, module="
                + " or module=".join(map(repr, tops[:3] or ["..."]))
            )
        if self.module is not None and self.module not in paths:
            raise UsageError(
                f"module: expected the path of a submodule of {kind} with parameters, got {self.module!r}; "
                f"{nearest(self.module, paths)}"
            )
        found: nn.Module = pl_module.get_submodule(self.module or "")
        return found

    def _average(self, trainer: Any) -> AveragedModel | None:
        """Return the average of the pruned module that a `WeightAveraging` callback keeps."""
        for callback in trainer.callbacks:
            found = getattr(callback, "_average_model", None)
            if isinstance(found, AveragedModel):
                if self.module is None:
                    return found
                part = AveragedModel(nn.Module())
                part.module = found.module.get_submodule(self.module)
                return part
        return None


def _optimizer_of(model: nn.Module, optimizers: list[Optimizer]) -> Optimizer:
    """Return the optimizer that trains a module."""
    own = {id(parameter) for parameter in model.parameters()}
    found = []
    for optimizer in optimizers:
        if not own.isdisjoint(id(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            found.append(optimizer)
    if len(found) != 1:
        raise UsageError(
            f"configure_optimizers: expected one optimizer with the parameters of {type(model).__name__}, got "
            f"{len(found)} among {len(optimizers)}; name the module that a single one trains: module=..."
        )
    return found[0]


def _forget_best(trainer: Any) -> None:
    """Make callbacks forget the best score so far: that of a model with more channels."""
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            callback.best_k_models = {}
            callback.best_model_score = callback.current_score = None
            callback.best_model_path = callback.kth_best_model_path = ""
        elif isinstance(callback, EarlyStopping):
            worst = torch.tensor(torch.inf if callback.mode == "min" else -torch.inf)
            callback.wait_count, callback.best_score = 0, worst
