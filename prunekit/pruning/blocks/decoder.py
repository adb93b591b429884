"""A decoder in a folder, without its weights, and one block of it at a time as a model of hidden states.

Files are checked before they are read: one file of weights or several with an index, as transformers writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.distributed.process_group import (
    from_main,
    full_tensor,
    gather_values,
    is_shard,
    local_part,
    require_equal,
)
from prunekit.distributed.shared_work import dealt, wait_for_workers, workers
from prunekit.errors import DataError, ModelError, first_line, raised_as
from prunekit.hooks.model_copy import named_tensors, with_tensors, without_values
from prunekit.models.hugging_face import folder_config, quiet_library
from prunekit.models.names import CONFIG
from prunekit.reading.array_files import read_tensors, tensor_headers
from prunekit.reading.text_files import read_json
from prunekit.settings.calibration import FEWEST_IMAGES
from prunekit.utils.availability import import_of_extra
from prunekit.utils.context import seeded, set_mode
from prunekit.utils.display import listed
from prunekit.utils.tensors import gather, map_tensors, tensors_digest

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types of weights that can be pruned; others are quantized."""
SHORT = 16
"""Tokens on which a block is traced and its plan tried."""
AT_ONCE = 1024
"""Tokens, about, that run through a block at a time."""
WHOLE = "; prune it as a whole, prunekit.prune(model, calibration=...)"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class WeightFolder:
    """The tensors of a model in a folder, whose values are read when they are asked for."""

    folder: Path
    places: Mapping[str, tuple[str, str]]  # of each of the model's tensors the file, and the name there
    nbytes: int  # of all files

    def serve(self) -> Any:
        """Return what the main process has made at last, which reads the files alone."""
        return from_main(lambda: None)

    @property
    def identity(self) -> Any:
        """Size and time of each file, by which a later call knows that these are the same weights."""
        files = [self.folder / name for name in sorted({CONFIG, *(file for file, _ in self.places.values())})]
        return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}

    @classmethod
    def of(cls, folder: Path, model: Any) -> WeightFolder:
        """Read the headers of all files, and compare them with the tensors of a model that has no values yet.

        Raises:
            ModelError: a file, or a tensor in it, is missing or of another shape or type; the message names it.
        """
        headers, prefix, state = _headers(folder), f"{model.base_model_prefix}.", model.state_dict(keep_vars=True)
        tensors = {name: tensor for name, tensor in named_tensors(model) if name in state}
        places = dict[str, str]()
        for name, tensor in tensors.items():
            alike = [name, *(other for other, its in state.items() if its is tensor and other != name)]
            stored = [one for each in alike for one in (each, each.removeprefix(prefix)) if one in headers]
            places[name], *more = dict.fromkeys(stored or [name])
            for other in more:
                files = [(folder / headers[at][0], at) for at in (places[name], other)]
                if not torch.equal(*(read_tensors(file, raises=ModelError, names=[at])[0][at] for file, at in files)):
                    raise ModelError(
                        f"{folder}: {places[name]} and {other} differ, and the configuration says that they are one "
                        "tensor; set tie_word_embeddings to false in it"
                    )
        if missing := [name for name, there in places.items() if there not in headers]:
            raise ModelError(
                f"{folder}: expected all weights of a {type(model).__name__}, and {len(missing)} are in no file: "
                f"{listed(missing, 3)}; download the folder again; a model whose files have names of an older version "
                "of transformers is loaded and pruned as a whole, prunekit.prune(model, calibration=...)"
            )
        for name, there in places.items():
            (file, (kind, shape)), wanted = headers[there], tuple(tensors[name].shape)
            if shape != wanted or (tensors[name].is_floating_point() and kind not in FLOATS):
                raise ModelError(
                    f"{folder / file}: {there}: expected the shape {wanted} of the configuration, in half, single or "
                    f"double precision, got {shape} in {kind}; weights that are quantized cannot be pruned in files"
                )
        found = {name: (headers[there][0], there) for name, there in places.items()}
        return cls(folder, found, sum((folder / file).stat().st_size for file in {file for file, _ in found.values()}))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors by their names in the model, mapped from the files: no memory is taken until they are used."""
        found = dict[str, Tensor]()
        for name in names:
            file, there = self.places[name]
            found[name] = read_tensors(self.folder / file, raises=ModelError, names=[there])[0][there]
        return found


@dataclass(frozen=True)
class ModelWeights:
    """The tensors of a model in memory: those that processes hold in shards are gathered when they are asked for.

    All processes ask, if they share the work; else the main one, and the others are in `serve` until it is done.
    """

    tensors: Mapping[str, Tensor]
    places: Mapping[str, tuple[str, str]]  # of each tensor no file, and its name
    nbytes: int  # of all tensors
    identity: Any  # checksums of whole tensors, and of each process's shards
    folder: Path | None = None

    @classmethod
    def of(cls, given: Any, model: Any) -> ModelWeights:
        """Compare the tensors of a model with those of the model that has no values; all processes call this.

        Raises:
            ModelError: a tensor is missing, or of another shape or type; the message names it.
        """
        state, own = given.state_dict(), model.state_dict(keep_vars=True)
        tensors = {name: state.get(name) for name, _ in named_tensors(model) if name in own}
        for name, tensor in tensors.items():
            got = None if tensor is None else (tuple(tensor.shape), tensor.is_floating_point())
            if got != (wanted := (tuple(own[name].shape), own[name].is_floating_point())):
                raise ModelError(
                    f"{name}: expected the shape {wanted[0]} of the configuration, not quantized, got {got}"
                )
        whole, shards = (
            tensors_digest((name, local_part(one)) for name, one in tensors.items() if is_shard(one) is sharded)
            for sharded in (False, True)
        )
        require_equal(whole, "weights that each process holds whole")
        names = {name: ("", name) for name in tensors}
        return cls(tensors, names, sum(one.nbytes for one in tensors.values()), [whole, *gather_values(shards)])

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors by their names, in each process that works."""
        asked = [*names] if workers() > 1 else from_main(lambda: [*names])
        return {name: full_tensor(self.tensors[name]).detach().cpu() for name in asked}

    def serve(self) -> Any:
        """Give the main process the shards that it asks for, and return what it has made at last."""
        while isinstance(asked := from_main(lambda: None), list):
            for name in asked:
                full_tensor(self.tensors[name])
        return asked


class DecoderBlock(nn.Module):
    """One block of a decoder as a model of its hidden states (B, T, D), with its other arguments given for each T."""

    def __init__(self, block: nn.Module, given: Mapping[int, Arguments]) -> None:
        super().__init__()
        self.block, self._given = block, given

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states for the next block as its norm sees them: a few tokens have far larger ones."""
        found = self.stream(hidden_states)
        return F.rms_norm(found, found.shape[-1:])

    def stream(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states for the next block."""
        hidden_states = hidden_states.clone()  # a call makes it, so that a repair knows it as the summand of a branch
        given = self._given[hidden_states.shape[1]]
        args, kwargs = map_tensors(given, lambda one: one.to(hidden_states.dtype) if one.is_floating_point() else one)
        found = self.block(hidden_states, *args, **kwargs)
        returned: Tensor = found[0] if isinstance(found, tuple) else found
        return returned


@dataclass(eq=False)
class Decoder:
    """A causal decoder of transformers whose weights lie in a folder, or in a model of which processes have shards."""

    model: Any  # its parameters have no values
    config: Any
    weights: WeightFolder | ModelWeights
    path: str  # of the list of blocks
    count: int  # of blocks
    width: int  # number of hidden states of a token
    parameters: int  # tied ones once
    given: list[dict[int, Arguments]] = field(default_factory=list)  # of each block, by the number of tokens

    @classmethod
    def of(cls, source: Any) -> Decoder:
        """Build the model without values, and read the headers of its weights; or of those in another model."""
        library = import_of_extra("transformers", "hf", "prune_folder", ModelError)

        def config() -> Any:
            return folder_config(source) if isinstance(source, Path) else deepcopy(source.config)

        where = source if isinstance(source, Path) else type(source).__name__
        with raised_as(ModelError, f"{where}: expected a causal decoder of transformers: ", "", first_line):
            model = without_weights(lambda: library.AutoModelForCausalLM.from_config(config(), dtype=torch.float32))
        weights = WeightFolder.of(source, model) if isinstance(source, Path) else ModelWeights.of(source, model)
        path, given = repeated_blocks(model), config()
        if isinstance(weights, ModelWeights):
            given.architectures, given.dtype = [type(model).__name__], source.dtype
        numbers = len(model.get_submodule(path)), given.get_text_config().hidden_size, _size(model)
        return cls(model, given, weights, path, *numbers)

    def names(self, index: int | None = None) -> dict[str, str]:
        """Return the names in the model of the tensors of a block by those in `block(index)`; or of all in no block."""
        if index is None:
            return {name: name for name in self.weights.places if not name.startswith(f"{self.path}.")}
        path = f"{self.path}.{index}."
        return {f"block.{name[len(path) :]}": name for name in self.weights.places if name.startswith(path)}

    def stored(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of a block as they are in the files, by their names in `block(index)`."""
        names = self.names(index)
        found = self.weights.read(names.values())
        return {own: found[name] for own, name in names.items()}

    def block(self, index: int, model: Any = None, tensors: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return a block in float32, of the files; or of another model of the class, with tensors that are given."""
        block = DecoderBlock((model or self.model).get_submodule(f"{self.path}.{index}"), self.given[index])
        tensors = self.stored(index) if tensors is None else tensors
        return with_tensors(block, {name: _widened(tensor) for name, tensor in tensors.items()})

    def embed(self, tokens: Tensor, hidden: Tensor) -> None:
        """Learn what blocks are called with for windows of tokens (B, T), and write what the first reads, (B, T, D).

        The model runs with blocks that do nothing, as neither masks nor positions depend on hidden states. Tables of
        embeddings stay in their files, and a head is not read.
        """
        tables = {id(one.weight) for one in self.model.modules() if isinstance(one, nn.Embedding)}
        head = self.model.get_output_embeddings()
        own, skipped = dict(named_tensors(self.model)), {*map(id, () if head is None else head.parameters())} - tables
        found = self.weights.read(name for name in self.names() if id(own[name]) not in skipped)
        tensors = {name: one if id(own[name]) in tables else _widened(one) for name, one in found.items()}
        model: Any = with_tensors(self.model, tensors)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(lambda _module, _inputs, output: _widened(output))
        blocks = [*model.get_submodule(self.path)]
        calls, others = dict[int, list[Arguments]](), (tokens[:1] + 1) % self.config.get_text_config().vocab_size
        for n in {min(SHORT, tokens.shape[1]), tokens.shape[1]}:
            calls[n], again = (_calls(model, blocks, some[:, :n])[1] for some in (tokens[:1], others))
            if not all(map(torch.equal, gather(calls[n]), gather(again))):
                raise ModelError(
                    f"{self.path}: expected blocks that are given nothing of each token but hidden states{WHOLE}"
                )
        self.given = [{length: given[index] for length, given in calls.items()} for index in range(len(blocks))]
        for some in dealt(_windows(tokens)):
            hidden[some] = _calls(model, blocks, tokens[some])[0]
        wait_for_workers()

    def require_tokens(self, given: Any) -> Tensor:
        """Return windows of text as token numbers, int64 (B, T)."""
        mask, given = (given.get("attention_mask"), given["input_ids"]) if isinstance(given, Mapping) else (None, given)
        if not isinstance(given, Tensor):
            given = nn.utils.rnn.pad_sequence([torch.as_tensor(one) for one in given], True, -1)
        text, (least, most) = self.config.get_text_config(), map(int, given.aminmax()) if given.numel() else (0, 0)
        longest = getattr(text, "max_position_embeddings", None) or given.shape[-1]
        padded = least < 0 or not (mask is None or bool(torch.as_tensor(mask).all()))
        fits = given.dim() == 2 and len(given) >= FEWEST_IMAGES and 2 <= given.shape[1] <= longest
        if padded or not fits or given.is_floating_point() or most >= text.vocab_size:
            raise DataError(
                f"tokens: expected at least {FEWEST_IMAGES} windows (B, T) of one length of at most {longest}, without "
                f"padding, of token numbers below {text.vocab_size}; got {given.dtype} of shape {tuple(given.shape)}, "
                f"{least} to {most}{', with padding' * padded}: join the texts, and cut them into windows, "
                "ids[: len(ids) // 256 * 256].view(-1, 256)"
            )
        tokens: Tensor = given.long().cpu()
        return tokens


@torch.no_grad()
def run(block: Any, hidden: Tensor, into: Tensor) -> None:
    """Write what a block makes of hidden states (B, T, D), some windows at a time; processes write their own."""
    for some in dealt(_windows(hidden)):
        into[some] = block.stream(hidden[some])
    wait_for_workers()


def _windows(tokens: Tensor) -> list[slice]:
    size = max(1, min(AT_ONCE // tokens.shape[1], len(tokens) // workers()))
    return [slice(start, start + size) for start in range(0, len(tokens), size)]


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def without_weights(build: Callable[[], nn.Module]) -> Any:
    """Return what builds a model of transformers, with parameters that take no memory."""
    with quiet_library(), seeded(0), without_values():
        return set_mode(build(), False)


def repeated_blocks(model: nn.Module) -> str:
    """Return the path of the list of modules of one class and shape that holds most of a model's parameters.

    Raises:
        ModelError: there is none.
    """

    def form(module: nn.Module) -> tuple[Any, ...]:
        return type(module), *((name, tensor.shape) for name, tensor in module.state_dict().items())

    found: list[tuple[int, str]] = [
        (_size(module), path)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({form(block) for block in module}) == 1 < len(module)
    ]
    if not found:
        name = type(model).__name__
        raise ModelError(f"{name}: expected at least two blocks of one class and shape, as a decoder is made of{WHOLE}")
    return max(found)[1]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class _ReachedError(Exception):
    """The last block is reached."""


def _calls(model: Any, blocks: Sequence[nn.Module], ids: Tensor) -> tuple[Tensor, list[Arguments]]:
    """Return the hidden states that reach the first block, and the other arguments of all blocks.

    Some models take a block's result as it is, others the first entry of a tuple.
    """
    for as_tuple in (False, True):
        seen: list[tuple[Tensor, Arguments]] = []

        def stand_in(*args: Any, seen: Any = seen, as_tuple: bool = as_tuple, **kwargs: Any) -> Any:
            hidden, *rest = args or [kwargs.pop("hidden_states")]
            seen.append((hidden, (tuple(rest), kwargs)))
            if len(seen) == len(blocks):
                raise _ReachedError
            return (hidden,) if as_tuple else hidden

        for block in blocks:
            block.forward = stand_in
        with suppress(_ReachedError), torch.no_grad():
            model(input_ids=ids, use_cache=False)
        first = seen[0][0] if seen else ids
        if len(seen) == len(blocks) and all(torch.equal(hidden, first) for hidden, _ in seen):
            return seen[0][0], [arguments for _, arguments in seen]
    raise ModelError(f"{type(model).__name__}: expected blocks that are called once each, one after the other{WHOLE}")


def _headers(folder: Path) -> dict[str, tuple[str, tuple[str, tuple[int, ...]]]]:
    """Return the file, type and shape of every tensor by its name in the files."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / WEIGHTS).is_file():
            raise ModelError(f"{folder}: expected {WEIGHTS}, or {INDEX} with the files it names; neither is there")
        return {name: (WEIGHTS, header) for name, header in tensor_headers(folder / WEIGHTS, ModelError).items()}
    names = (read_json(index, raises=ModelError) or {}).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{index}: weight_map: expected the file of each tensor, got {names!r:.99}")
    found = dict[str, tuple[str, tuple[str, tuple[int, ...]]]]()
    for file in sorted({*names.values()}):
        own = [name for name, its in names.items() if its == file]
        headers = tensor_headers(folder / file, ModelError)
        if lost := [name for name in own if name not in headers]:
            raise ModelError(
                f"{folder / file}: expected the tensors that {INDEX} names, and {len(lost)} are not in it: "
                f"{listed(lost, 3)}; download the folder again"
            )
        found |= {name: (file, headers[name]) for name in own}
    return found
