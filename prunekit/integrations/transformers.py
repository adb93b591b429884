"""Transformers: pruning by a callback of its `Trainer`, and folders of pruned models that know their class."""

from __future__ import annotations

import copy
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.compaction.model_folder import FILES, MANIFEST, ModelWithPlan, load, read_manifest, save
from prunekit.errors import ArtifactError, ModelError, UsageError, raised_as
from prunekit.hooks.wrappers import unwrapped
from prunekit.integrations.prune_callback import PrunesInTrainer
from prunekit.models.hugging_face import changed_config
from prunekit.models.vocabulary import NOTE, noted_vocabulary
from prunekit.modes.public_call import public_call
from prunekit.planning.plan import Plan
from prunekit.planning.stored_plan import LIBRARY_CONFIG
from prunekit.utils.availability import require_library
from prunekit.utils.files import StrPath, atomic_file, atomic_folder, folder_at, require_replaceable

require_library("transformers", "hf")

import transformers  # noqa: E402  # after the check, whose message says what to install
from transformers import PreTrainedModel, Trainer, TrainerCallback  # noqa: E402

STATE = "pruner.pt"
"""The pruner's state in a checkpoint."""
ENTRY = "transformers"
"""Key in a model folder's manifest: what the files beside the model say."""
_RUN = "prunekit"
"""Key in `TrainerState.stateful_callbacks`: which run a checkpoint is of."""
CONFIG = "config.json"
ATTENTION = frozenset({"eager", "sdpa", "flex_attention"})
"""Implementations of attention that come back as they were; the others are kernels, which may be fetched from a hub."""


class PruneCallback(PrunesInTrainer, TrainerCallback):
    """A callback of transformers' `Trainer` that prunes while it trains, over `prunekit.Pruner`.

    Accumulated gradients, mixed precision and DDP work as in `Pruner`. Each checkpoint has its state in `pruner.pt`:
    `train(resume_from_checkpoint=...)` goes on to the bit. Each pruning step makes the trainer forget the best score so
    far, because scores of models with more channels don't compare: what `load_best_model_at_end` loads is the best
    under the plan in force at the end, and `EarlyStoppingCallback` begins to wait anew. `sparsity`, `macs_left` and the
    like are added to what is logged. Reporters that come before this callback don't see that: give them behind it,
    `report_to="none"` and `callbacks=[prune, WandbCallback()]`.

    Args:
        example: what the model is called with, as for `prunekit.Pruner`, such as what its tokenizer returns.
        steps: of the optimizer until the budgets are met; a float is a share of the training, in 0..1; None: halfway
            from `begin` to the end of the training, unless the schedule has an end or is `oneshot`.
        begin: steps before the schedule begins; a float is a share of the training.
        arguments: further ones of `prunekit.Pruner`, such as `macs`, `criterion` and `on_change`.

    Raises:
        UsageError: a share is not in 0..1, or an argument is one that the callback takes from its trainer.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> from prunekit.integrations.transformers import PruneCallback
        >>> sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(BertConfig(intermediate_size=32, max_position_embeddings=8, **sizes))
        >>> data = [{"input_ids": [1, 2, 3, 4], "labels": 0}, {"input_ids": [5, 6, 7, 8], "labels": 1}] * 8
        >>> prune = PruneCallback({"input_ids": torch.tensor([[1, 2, 3, 4]])}, macs=0.5)
        >>> quiet = dict(use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True)
        >>> trainer = Trainer(model, TrainingArguments("out", **quiet), train_dataset=data, callbacks=[prune])
        >>> result = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...
        >>> small = prune.finish(trainer)
        >>> prune.plan.channel_map.macs(prune.plan.keep) <= 0.5 * prune.plan.channel_map.macs()
        True
    """

    _run = ""  # which run a checkpoint is of

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **given: Any
    ) -> None:
        """Make the pruner, once the optimizer and the weights of a checkpoint are there."""
        if state.global_step > 0 and self._small is None:
            self._saved = self._read(args, state)
        self._run = uuid.uuid4().hex
        state.stateful_callbacks[_RUN] = {"args": {}, "attributes": {"run": self._run}}
        self._begin(model, optimizer, state.max_steps, self.example, anew=state.is_hyper_param_search)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Put the next plan in force if its step is reached; the best score so far is then forgotten."""
        if self.is_open and self._step():
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Add what is left of the model to what is logged."""
        if self.is_open and logs is not None:
            logs.update(self.figures())
            if state.log_history:
                state.log_history[-1].update(self.figures())

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write the pruner's state into the checkpoint that was just written."""
        if not self.is_open or args.save_only_model or state.is_hyper_param_search:
            return
        saved = {"run": self._run, "step": state.global_step, **self._state()}
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.should_save and folder.is_dir():
            with atomic_file(folder / STATE) as temporary:
                torch.save(saved, temporary)

    def finish(self, trainer: Trainer | None = None, *, early: bool = False) -> nn.Module:
        """Return the compact model, see `Pruner.finish`; the trainer then has it in place of the dense one.

        `save_pretrained(small, folder, callback.plan)` of this module writes it.

        Args:
            trainer: that trained the model; its `evaluate`, `predict` and `train` go on with the compact one.
            early: whether to apply the final plan now if the schedule isn't over.

        Raises:
            UsageError: there was no training, the schedule isn't over and not `early`, it is finished already, or the
                trainer has another model.
            VerificationError: masked and compact model differ; nothing was changed.
        """
        if trainer is not None and self.is_open and unwrapped(trainer.model) is not self._model:
            raise UsageError(
                f"finish: expected the trainer whose {type(self._model).__name__} was pruned, got one of another "
                f"{type(trainer.model).__name__}"
            )
        small = self._finish(early)
        if trainer is not None:
            trainer.model = trainer.model_wrapped = trainer.callback_handler.model = small
        return small

    def _read(self, args: Any, state: Any) -> dict[str, Any]:
        """Return the state of the checkpoint that a training goes on from."""
        run = (state.stateful_callbacks.get(_RUN) or {}).get("attributes", {}).get("run")
        if run is None:
            raise ArtifactError(
                f"this training goes on from a checkpoint, of step {state.global_step}, that was written without "
                "PruneCallback; begin with its weights instead: from_pretrained(checkpoint), and train without "
                "resume_from_checkpoint"
            )
        # A callback is not told where the trainer's checkpoint is.
        given = [args.resume_from_checkpoint] if isinstance(args.resume_from_checkpoint, str) else []
        usual = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        places = [folder / STATE for folder in (*map(Path, given), usual)]
        for path in filter(Path.is_file, places):
            with raised_as(ArtifactError, f"{path}: expected the state of a pruner: ", reason=str):
                saved = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(saved, dict) and saved.get("run") == run and saved.get("step") == state.global_step:
                return saved
        raise ArtifactError(
            f"this training goes on from a checkpoint of step {state.global_step}, and the pruner's state of that run "
            f"is not in {' or '.join(map(str, places))}; if the checkpoint is elsewhere, name it in "
            "TrainingArguments(resume_from_checkpoint=...) too"
        )


@public_call
def save_pretrained(
    result: nn.Module | ModelWithPlan, folder: StrPath, plan: Plan | None = None, *, processor: Any = None
) -> Path:
    """Write a pruned model of transformers as a folder that `from_pretrained` of this module reads, or nothing.

    It is the folder that `prunekit.save` writes, with `config.json`, and the processor's files. The library's own
    `from_pretrained` reads it too where the model was pruned with `layout="huggingface"`; else it can't, because its
    configurations know one width for all layers.

    Args:
        result: the compact model, or the result of `prunekit.prune`, which has its plan.
        folder: made, or replaced if it has no other files than such a folder has.
        plan: that the model was compacted with, such as `callback.plan`.
        processor: a tokenizer, an image processor or the like, saved beside the model. The dense model's tokenizer is
            written for the tokens that are kept, where `prune` removed others.

    Raises:
        UsageError: it is no model of transformers, there is no plan, or the folder has other files.
        PlanError: the model is not the one that the plan makes; nothing is written.

    Example:
        >>> import torch, prunekit as pk
        >>> from transformers import BertConfig, BertModel
        >>> from prunekit.integrations.transformers import from_pretrained, save_pretrained
        >>> sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertModel(BertConfig(intermediate_size=32, max_position_embeddings=8, **sizes))
        >>> result = pk.prune(model, {"input_ids": torch.tensor([[1, 2, 3, 4]])}, macs=0.5)
        >>> folder = save_pretrained(result, "small")
        >>> type(from_pretrained(folder)).__name__
        'BertModel'
    """
    inner = unwrapped(result if isinstance(result, nn.Module) else result.model)
    if not isinstance(inner, PreTrainedModel):
        raise UsageError(
            f"save_pretrained: expected a pruned model of transformers, got {type(inner).__name__}; prunekit.save "
            "writes any model"
        )
    path = folder_at(folder)
    require_replaceable(path, FILES | _written_before(path))
    model: Any = inner
    known: Any = plan or getattr(result, "plan", None)
    vocabulary = None if known is None else noted_vocabulary(known.provenance.get(NOTE))
    tokens = processor.get_vocab() if hasattr(processor, "backend_tokenizer") else {}
    if vocabulary is not None and max(tokens.values(), default=-1) >= len(vocabulary.kept):  # it has all tokens
        processor = vocabulary.tokenizer(processor)
    cls = original_of(type(model))
    config = copy.deepcopy(model.config)
    config.architectures = [cls.__name__]
    with atomic_folder(path) as temporary:
        beside = temporary / "beside"
        config.save_pretrained(beside)
        for part in (getattr(model, "generation_config", None), processor):
            if part is not None:
                part.save_pretrained(beside)
        files = sorted(str(file.relative_to(beside)) for file in beside.rglob("*") if file.is_file())
        entry = {
            "class": cls.__name__,
            "module": cls.__module__,
            "attention": getattr(model.config, "_attn_implementation", None),
            "files": files,
        }
        save(result, temporary / "model", plan, extra={ENTRY: entry})
        for made in (beside, temporary / "model"):
            for file in made.iterdir():
                file.rename(temporary / file.name)
            made.rmdir()
    return path


@public_call
def from_pretrained(folder: StrPath, cls: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """Load a model that `save_pretrained` of this module wrote, in eval mode on the CPU.

    No weights or kernels are downloaded, no pickle is read, and no code runs that the folder names, except the
    constructor of a class of transformers.

    Args:
        folder: written by `save_pretrained`.
        cls: the model's class, where it is not one of transformers' own.

    Raises:
        ArtifactError: the folder is missing, damaged, or of another kind.
        ModelError: the class is not one of transformers', and none was given, or another one.
    """
    path = folder_at(folder)
    match read_manifest(path).get(ENTRY):
        case {"class": str(name), "attention": str() | None as attention}:
            pass
        case _:
            raise ArtifactError(
                f"{path / MANIFEST}: expected an entry {ENTRY!r}, as save_pretrained of prunekit.integrations."
                f"transformers writes it; prunekit.load({str(path)!r}, model=...) reads folders of prunekit.save"
            )
    found = getattr(transformers, name, None) if cls is None else cls
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ModelError(
            f"{path}: its model is of {name}, which is no model of transformers {transformers.__version__}; give the "
            f"class: from_pretrained({str(path)!r}, cls={name})"
        )
    if found.__name__ != name:
        raise ModelError(f"cls: expected {name}, of which the model in {path} is, got {found.__name__}")
    try:
        config = found.config_class.from_pretrained(path, local_files_only=True)  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path / CONFIG}: expected the configuration of a {name}: {error}") from error
    config._attn_implementation = attention if attention in ATTENTION else None  # of the configurations inside it too
    if noted := (read_manifest(path).get("provenance") or {}).get(LIBRARY_CONFIG):
        config = changed_config(config, {key: dense for key, (dense, _) in noted["config"].items()})
    model: Any = load(path, lambda: found(config))
    if (path / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    return model  # type: ignore[no-any-return]


def _written_before(folder: Path) -> frozenset[str]:
    """Return the names of files beside the model in a folder that `save_pretrained` wrote."""
    if not (folder / MANIFEST).is_file():
        return frozenset()
    entry = read_manifest(folder).get(ENTRY)
    files = entry.get("files") if isinstance(entry, dict) else None
    return frozenset(str(name).partition("/")[0] for name in files) if isinstance(files, list) else frozenset()
