"""Processes that hold a decoder in shards prune it block by block, and none of them ever has all of it."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_group import together
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import prunekit as pk
from prunekit.distributed.process_group import is_main, is_sharded
from prunekit.errors import PeerError, UsageError

transformers = pytest.importorskip("transformers")
TOKENS = torch.randint(0, 40, (12, 12), generator=torch.Generator().manual_seed(0))


def decoder(tied: bool = True) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))
    return model.eval()


def sharded(tied: bool = True) -> Any:
    model = decoder(tied)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert is_sharded(model)
    return model


def gathered_bytes(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Counts the bytes of whole tensors that are alive, and the most of them."""
    found, gather = SimpleNamespace(now=0, most=0), DTensor.full_tensor

    def counted(self: DTensor, **given: Any) -> Tensor:
        whole = gather(self, **given)
        found.now += whole.nbytes
        found.most = max(found.most, found.now)
        weakref.finalize(whole.untyped_storage(), lambda size=whole.nbytes: setattr(found, "now", found.now - size))
        return whole

    monkeypatch.setattr(DTensor, "full_tensor", counted)
    return found


def pruned(out: Path, tied: bool) -> tuple[bool, Any, int]:
    model = sharded(tied)
    with pytest.MonkeyPatch.context() as monkeypatch:
        held = gathered_bytes(monkeypatch)
        result = pk.prune_folder(model, TOKENS, params=0.8, out=out)
    assert is_sharded(model)
    return is_main(), (str(result.folder), dict(result.config), result.parameters, result.rows()), held.most


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_shards_give_the_files_that_their_folder_gives(tmp_path: Path, tied: bool) -> None:
    dense = decoder(tied)
    dense.save_pretrained(tmp_path / "dense")
    wanted = pk.prune_folder(tmp_path / "dense", TOKENS, params=0.8, out=tmp_path / "wanted")
    found = together(2, tmp_path / "group", pruned, tmp_path / "out", tied)
    assert found[0][1] == found[1][1]
    assert found[0][1][1:] == (dict(wanted.config), wanted.parameters, wanted.rows())
    names = {path.name for path in (tmp_path / "wanted").iterdir()} - {"generation_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes(), name
    block = sum(parameter.nbytes for parameter in dense.model.layers[0].parameters())
    outside = 40 * 32 * 4 * (1 if tied else 2) + 32 * 4
    for main, _, most in found:
        assert most <= (max(block, outside) if main else 2 * 64 * 32 * 4)  # the others have a tensor or two


def from_a_folder(dense: Path, out: Path, params: float) -> Any:
    try:
        return pk.prune_folder(dense, TOKENS, params=params, out=out).rows()
    except (PeerError, UsageError) as error:
        return type(error).__name__, str(error)


@pytest.mark.slow
def test_several_processes_write_what_one_writes_and_fail_together(tmp_path: Path) -> None:
    decoder().save_pretrained(tmp_path / "dense")
    alone = from_a_folder(tmp_path / "dense", tmp_path / "alone", 0.8)
    found = together(2, tmp_path / "group", from_a_folder, tmp_path / "dense", tmp_path / "out", 0.8)
    assert found == [alone, alone]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()
    }
    main, other = together(2, tmp_path / "again", from_a_folder, tmp_path / "dense", tmp_path / "out", 0.8)
    assert main[0] == "UsageError"
    assert other[0] == "PeerError"
    assert "process 0 of 2 failed" in other[1]
    assert "expected a new or empty folder" in other[1]


@pytest.mark.slow
def test_a_model_in_memory_is_pruned_as_its_folder_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = decoder()
    dense.save_pretrained(tmp_path / "dense")
    pk.prune_folder(tmp_path / "dense", TOKENS, params=0.8, out=tmp_path / "wanted")
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    pk.prune_folder(dense, TOKENS, params=0.8, out=tmp_path / "out")
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "wanted" / path.name).read_bytes(), path.name


def test_a_model_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    dense = decoder()
    dense.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 65, bias=False)
    with pytest.raises(pk.PrunekitError, match=r"layers.1.mlp.up_proj.weight: expected the shape \(64, 32\)"):
        pk.prune_folder(dense, TOKENS, params=0.8, out=tmp_path / "out")
    with pytest.raises(pk.PrunekitError, match="expected a causal decoder"):
        pk.prune_folder(torch.nn.Linear(2, 2), TOKENS, params=0.8, out=tmp_path / "out")
