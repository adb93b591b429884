"""Pruning of a decoder in a folder, one block in memory at a time: `prune_folder`."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.criteria.elimination import eliminations
from prunekit.distributed.process_group import (
    from_main,
    is_main,
    join_group,
    main_process_only,
    on_one_machine,
    one_for_all,
    require_equal,
)
from prunekit.distributed.shared_work import sharing_work, wait_for_workers, workers
from prunekit.errors import PlanError, ResumeError, UsageError, VerificationError, require_kind
from prunekit.hooks.model_copy import named_tensors
from prunekit.measure.verification import verify
from prunekit.models.hugging_face import Changes, quiet_library
from prunekit.models.names import CONFIG
from prunekit.modes.public_call import public_call
from prunekit.planning.plan import Plan
from prunekit.pruning.blocks.block_widths import BlockLayout, Widths, kept_by
from prunekit.pruning.blocks.decoder import AT_ONCE, INDEX, SHORT, WHOLE, Decoder, run
from prunekit.pruning.sample_statistics import patch_statistics
from prunekit.reading.array_files import read_arrays
from prunekit.reading.text_files import read_json
from prunekit.repair.repair_model import repair as repair_masked
from prunekit.settings.calibration import RepairSettings
from prunekit.utils.context import release_freed, release_memory
from prunekit.utils.display import Displayed, Table, count, plural, scientific, share, size
from prunekit.utils.files import StrPath, atomic_file, folder_at, remove_leftovers, require_writable, write_json
from prunekit.utils.progress import reporting, stage

ASKED = "asked.json"
"""File of the arguments of an unfinished call."""
WORK = "unfinished"
"""Folder inside the result with hidden states and orders of removal, until the last block is written."""
COPIED = (".json", ".txt", ".model", ".jinja")
"""Ends of the names of files beside the weights, such as those of a tokenizer, that the result has too."""
LIMIT = 2**30
"""Bytes that a repair may take beside copies of a block, unless its settings say otherwise."""


Figures = Mapping[str, float]


@dataclass(frozen=True, eq=False, repr=False)
class PrunedFolder(Displayed):
    """The result of `prune_folder`.

    Attributes:
        folder: with configuration and weights, which `from_pretrained` loads.
        config: entries of the configuration that differ, each with the dense and the new value.
        parameters: of the dense and of the pruned decoder, tied ones once.
        blocks: of each block the error of its output on held-out samples `before` and `after` its repair, as a share of
            the output's variance, and the largest relative `difference` of masked and compact block in float64.

    Example:
        >>> import prunekit as pk, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).save_pretrained("dense")
        >>> pk.prune_folder("dense", torch.randint(0, 32, (8, 16)), params=0.8, out="pruned")
        <PrunedFolder: 7... % of 6... k parameters, 2 blocks, in pruned>
    """

    folder: Path
    config: Mapping[str, Any]
    parameters: tuple[int, int]
    blocks: tuple[Figures, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each block."""
        return [{"block": index, **found} for index, found in enumerate(self.blocks)]

    def _headline(self) -> str:
        (dense, left), blocks = self.parameters, plural(len(self.blocks), "block")
        return f"{share(left / dense)} of {count(dense)} parameters, {blocks}, in {self.folder}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Pruned: {self._headline()}"
        yield Table(("entry", "dense", "pruned"), [(name, *map(str, pair)) for name, pair in self.config.items()])
        figures = (
            (share(one["before"], 2), share(one["after"], 2), scientific(one["difference"])) for one in self.blocks
        )
        rows = [(str(index), *each) for index, each in enumerate(figures)]
        yield Table(("block", "error", "repaired", "masked against compact"), rows)


@public_call
def prune_folder(
    folder: StrPath | nn.Module,
    tokens: Any,
    *,
    params: float,
    out: StrPath,
    repair: RepairSettings | None = None,
    progress: bool | None = None,
) -> PrunedFolder:
    """Prune a decoder of transformers whose weights lie in a folder, with one block at a time in memory.

    A first pass over the blocks finds the order in which key-value heads, query heads and MLP channels of each would
    go, and its errors (`elimination`). The widths, the same in all blocks, are those with the lowest sum of errors
    within the budget. A second pass prunes each block, fits its weights to what the dense block returns, on the hidden
    states that the pruned blocks before it make, proves in float64 that masked and compact block agree, and writes it.
    Embeddings, head and hidden size stay. Where the decoder fits into memory twice, `prune` loses less: it weighs
    errors by their effect on the logits, and makes the hidden states fewer.

    The processes of one machine share the work on each block, and the main one writes; each needs memory for a block
    and its repair. On several machines it works alone, and the others wait for the result. After an error their group
    cannot be used again. A model of which each has shards (`fully_shard`) is gathered a block at a time, and what is in
    no block, such as embeddings: no process ever holds more than its shards and that. A call that goes on needs as many
    processes as before.

    Hidden states of the samples lie in mapped files in the folder `unfinished` of the result. A call with the same
    arguments goes on behind the last block that an interrupted one has finished, and gives the same files.

    Args:
        folder: `config.json` and `model.safetensors`, or its index with several files, as `save_pretrained` writes
            them, in half or full precision; not changed. Or a model of transformers, sharded or not.
        tokens: windows of text of one length without padding, at least 8: integers (B, T), a list of such windows, or
            what a tokenizer returns for them.
        params: share of the parameters, embeddings included and tied ones counted once, that may be left.
        out: the new folder, which `AutoModelForCausalLM.from_pretrained` loads. Weights keep their precision.
        repair: how layers are fitted again; None: `RepairSettings` with 1 GiB of memory beside copies of a block.
        progress: whether to show stages and bars.

    Raises:
        ModelError: a file is missing or differs from its index or the configuration, or no blocks repeat.
        DataError: the tokens have padding, or are not the model's.
        PlanError: the budget cannot be met.
        ResumeError: `out` holds an unfinished result of other arguments.
        UsageError: `out` holds something else, or the disk is too small.
        VerificationError: masked and compact block differ, or the block that the class builds.

    Example:
        >>> import prunekit as pk, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).save_pretrained("dense")
        >>> result = pk.prune_folder("dense", torch.randint(0, 32, (8, 16)), params=0.8, out="pruned")
        >>> LlamaForCausalLM.from_pretrained("pruned").num_parameters() == result.parameters[1]
        True
    """
    if not (isinstance(params, (int, float)) and 0 < params < 1):
        raise UsageError(f"params: expected the share of the parameters that may be left, in (0, 1), got {params!r}")
    settings = RepairSettings(memory_bytes=LIMIT) if repair is None else repair
    require_kind("repair", settings, RepairSettings, "prunekit.RepairSettings()")
    with join_group(), one_for_all(), reporting(progress, "prune_folder"), sharing_work(on_one_machine()):
        decoder = Decoder.of(folder if isinstance(folder, nn.Module) else folder_at(folder))
        if workers() == 1 and not is_main():
            served: PrunedFolder = decoder.weights.serve()
            return served
        job = _Job(decoder, decoder.require_tokens(tokens), folder_at(out), settings)
        job.begin(params)
        found = job.write(*job.plan(params * decoder.parameters))
        return found if workers() > 1 else from_main(lambda: found)


@dataclass(frozen=True, eq=False)
class _Job:
    """A run of `prune_folder`. What it has done is in files: an order or a record of each block that is finished.

    Processes that share the work read and write the same hidden states, and the main one writes all other files.
    """

    decoder: Decoder
    tokens: Tensor  # (B, T)
    out: Path
    settings: RepairSettings

    def begin(self, params: float) -> None:
        """Begin or go on; nothing is written before it is known that there is room for all of it."""
        wanted = {
            "files": self.decoder.weights.identity,
            "tokens": [*self.tokens.shape, sha256(self.tokens.numpy().tobytes()).hexdigest()],
            "params": params,
            "repair": asdict(self.settings),
            "processes": workers(),
            "versions": [version(name) for name in ("prunekit", "torch", "transformers")],
        }
        if workers() > 1:
            for name, given in {"out": self.out.absolute(), **wanted}.items():
                require_equal(str(given), f"prune_folder: {name}")
        self._begin(wanted)
        wait_for_workers()

    @main_process_only
    def _begin(self, wanted: Mapping[str, Any]) -> None:
        require_writable(self.out, folder=True)
        source, asked = self.decoder.weights, self.out / WORK / ASKED
        for folder in (self.out, asked.parent) if asked.parent.is_dir() else ():
            remove_leftovers(folder)
        there = [path for path in self.out.rglob("*") if path.is_file()]
        if there and not asked.is_file():
            raise UsageError(f"{self.out}: expected a new or empty folder, got one with {there[0].name!r}")
        finished = [path for path in there if path.suffix != ".bin" and path != asked]
        if finished and read_json(asked) != wanted:
            raise ResumeError(f"{self.out}: holds an unfinished result of other arguments; remove it, or name another")
        need = source.nbytes + 5 * 4 * self.tokens.numel() * self.decoder.width
        need -= sum(path.stat().st_size for path in there)
        free = shutil.disk_usage(next(path for path in (self.out, *self.out.absolute().parents) if path.exists())).free
        if free < need:
            raise UsageError(
                f"{self.out}: expected {size(need)} of free disk for weights and hidden states, got {size(free)}; name "
                "a folder on another disk, or give fewer tokens"
            )
        asked.parent.mkdir(parents=True, exist_ok=True)
        write_json(asked, wanted)

    def plan(self, budget: float) -> tuple[BlockLayout, Widths, Changes, list[Keep]]:
        """Pass over the dense blocks: find the widths of all, their configuration, and the channels of each."""
        stage("hidden states, and widths that a configuration can say")
        self.decoder.embed(self.tokens, self._hidden("dense", 0))
        short = self._hidden("dense", 0)[:2, :SHORT].clone()
        layout = BlockLayout.of(self.decoder, short)
        most = layout.most_gone(budget)
        batch = max(1, AT_ONCE // self.tokens.shape[1])
        orders, errors, finished = list[dict[str, Any]](), list[dict[str, Any]](), self._finished()
        for index in range(self.decoder.count):
            file = self.out / WORK / f"order-{index:05}.npz"
            if file not in finished:
                stage(f"block {index + 1} of {self.decoder.count}: order of removal")
                block, hidden, found = self.decoder.block(index), self._hidden("dense", index), dict[str, Any]()
                chart, groups = layout.channel_map, layout.groups
                patches = patch_statistics(block, hidden, chart, self.settings, groups=groups, batch=batch)
                release_memory(block)
                ranked = eliminations(block, chart, patches, groups, most)
                del patches
                for i, group in enumerate(layout.groups):
                    found[f"{i}.order"] = np.searchsorted(group.labels, ranked[group.name].labels)
                    found[f"{i}.errors"] = ranked[group.name].errors
                run(block, hidden, self._hidden("dense", index + 1))
                del block, ranked
                _forget()
                if is_main():
                    with atomic_file(file) as temporary, temporary.open("wb") as opened:
                        np.savez(opened, **found)
                wait_for_workers()
            arrays = read_arrays(file)
            orders.append({group.name: arrays[f"{i}.order"] for i, group in enumerate(layout.groups)})
            errors.append({group.name: arrays[f"{i}.errors"] for i, group in enumerate(layout.groups)})
        block = self.decoder.block(0)
        for widths in layout.within(budget, errors):
            keeps = [kept_by(layout.channel_map, widths, order) for order in orders]
            if changes := layout.changes(block, Plan(layout.channel_map, keeps[0]), short):
                return layout, widths, changes, keeps
        raise PlanError(f"params: no configuration says widths within {count(int(budget))} parameters{WHOLE}")

    def write(self, layout: BlockLayout, widths: Widths, changes: Changes, keeps: list[Keep]) -> PrunedFolder:
        """Pass over the blocks again: prune, fit, prove and write each, and at last what makes the folder a model."""
        built, decoder, number = layout.built(changes), self.decoder, len(keeps)
        places, records, finished = dict[str, str](), list[Figures](), self._finished()
        for index in range(number + 1):
            record, names = self.out / WORK / f"block-{index:05}.json", decoder.names(index if index < number else None)
            shard = self.out / f"model-{index + 1:05}-of-{number + 1:05}.safetensors"
            if record not in finished:
                stage(
                    f"block {index + 1} of {number}: prune, fit and prove" if index < number else "what is in no block"
                )
                tensors, figures = (
                    self._block(layout, keeps[index], index, built)
                    if index < number
                    else (decoder.weights.read(names), {})
                )
                stored = {decoder.weights.places[names[own]][1]: one.contiguous() for own, one in tensors.items()}
                if is_main():
                    with atomic_file(shard) as temporary:
                        save_file(stored, temporary, {"format": "pt"})
                    write_json(record, figures)
                wait_for_workers()
                del tensors, stored
                _forget()
            places |= {decoder.weights.places[name][1]: shard.name for name in names.values()}
            records.append(read_json(record))
        wait_for_workers()  # all have read the records
        self._finish(places, layout, changes)
        wait_for_workers()
        sizes = decoder.parameters, layout.parameters(widths)
        return PrunedFolder(self.out, layout.search.noted(changes), sizes, tuple(records[:number]))

    def _finished(self) -> set[Path]:
        """Return the files of what an earlier call has done, the same ones in each process."""
        found = {*(self.out / WORK).iterdir()}
        wait_for_workers()  # none is written before all have looked
        return found

    @main_process_only
    def _finish(self, places: Mapping[str, str], layout: BlockLayout, changes: Changes) -> None:
        """Write what makes the shards a model, by the file of each tensor, and remove what a later call would read."""
        total = sum((self.out / shard).stat().st_size for shard in {*places.values()})
        write_json(self.out / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        source = self.decoder.weights.folder
        for path in () if source is None else source.iterdir():
            if path.is_file() and path.suffix in COPIED and path.name != CONFIG and ".index" not in path.suffixes:
                shutil.copyfile(path, self.out / path.name)
        with quiet_library():
            layout.search.made(changes).save_pretrained(self.out)
        (self.out / WORK / ASKED).unlink()  # first: what is half removed must not be gone on with
        shutil.rmtree(self.out / WORK)

    def _block(self, layout: BlockLayout, keep: Keep, index: int, built: Any) -> tuple[dict[str, Tensor], Figures]:
        """Return the tensors of a block that is pruned, fitted and proven, with its figures; hidden states pass it."""
        stored, where = self.decoder.stored(index), f"{self.decoder.path}.{index}"
        block, kinds = self.decoder.block(index, tensors=stored), {own: one.dtype for own, one in stored.items()}
        del stored
        dense, running = self._hidden("dense", index), self._hidden("pruned", index)
        short = dense[:2, :SHORT].clone()

        def choose(chart: ChannelMap) -> Keep:
            if len(chart.locks) > len(layout.channel_map.locks):
                raise PlanError(f"{where}: more channels stay than in the first block: {chart.locks[-1].reason}{WHOLE}")
            return keep

        trial = run_trial(block, layout.channel_map, choose, [(short,)])
        plan, most = Plan(trial.channel_map, keep), trial.difference
        del trial
        release_memory(block)
        masked, report = repair_masked(block, plan, dense, self.settings, running=running)
        release_memory(block)
        with torch.no_grad():
            for own, tensor in named_tensors(masked):
                tensor.copy_(tensor.to(kinds.get(own, tensor.dtype)))  # as it will be read from the file
        small = compact(masked, plan)
        proof = verify(masked, small, plan, [(short,), (running[:1],)], strict=True)
        if not layout.agrees(built, index, small, short):
            raise VerificationError(f"{where}: what its class builds of the new configuration computes something else")
        del masked
        run(block, dense, self._hidden("dense", index + 1))
        run(small, running, self._hidden("pruned", index + 1))
        figures = {"before": report.before, "after": report.after}
        tensors = {own: tensor.detach().to(kinds[own]) for own, tensor in named_tensors(small) if own in kinds}
        return tensors, {**figures, "difference": max(most, proof.max_relative_difference)}

    def _hidden(self, kind: str, index: int) -> Tensor:
        """Return the hidden states (B, T, D) in front of a block, mapped; those two blocks before are overwritten."""
        shape = *self.tokens.shape, self.decoder.width
        name = f"{kind}-{index % 2}.bin" if index else "embedded.bin"
        return torch.from_file(str(self.out / WORK / name), shared=True, size=int(np.prod(shape))).view(shape)


def _forget() -> None:
    """Free what is left of a block, however small, before the next one is read: there may be a hundred."""
    gc.collect()
    release_freed()
