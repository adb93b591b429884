"""Processes that hold a decoder in shards prune it block by block, and none of them ever has all of it."""

from __future__ import annotations

import platform
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_group import together
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import prunekit as pk
from prunekit.distributed.process_group import is_main, is_sharded, rank
from prunekit.errors import PeerError, RunError, UsageError

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


def pruned(out: Path, tied: bool, machines: int) -> tuple[bool, Any, int]:
    model = sharded(tied)
    with pytest.MonkeyPatch.context() as monkeypatch:
        held, own = gathered_bytes(monkeypatch), f"machine {rank() % machines}"
        monkeypatch.setattr(platform, "node", lambda: own)
        result = pk.prune_folder(model, TOKENS, params=0.8, out=out)
    assert is_sharded(model)
    return is_main(), (str(result.folder), dict(result.config), result.parameters, result.rows()), held.most


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "machines"), [(False, 2), (True, 2), (True, 1)])
def test_shards_give_the_files_that_their_folder_gives(tmp_path: Path, tied: bool, machines: int) -> None:
    dense = decoder(tied)
    dense.save_pretrained(tmp_path / "dense")
    wanted = pk.prune_folder(tmp_path / "dense", TOKENS, params=0.8, out=tmp_path / "wanted")
    found = together(2, tmp_path / "group", pruned, tmp_path / "out", tied, machines)
    assert found[0][1] == found[1][1]
    assert found[0][1][1:3] == (dict(wanted.config), wanted.parameters)
    if machines == 2:
        assert found[0][1][3] == wanted.rows()
    require_same_files(tmp_path / "out", tmp_path / "wanted", equal=machines == 2)
    block = sum(parameter.nbytes for parameter in dense.model.layers[0].parameters())
    outside = 40 * 32 * 4 * (1 if tied else 2) + 32 * 4
    for main, _, most in found:
        works = main or machines == 1
        assert most <= (max(block, outside) if works else 2 * 64 * 32 * 4)  # the others have a tensor or two


def require_same_files(out: Path, wanted: Path, *, equal: bool) -> None:
    """Two folders have the same bytes; or the same weights up to the order of sums."""
    names = {path.name for path in wanted.iterdir()} - {"generation_config.json"}
    assert {path.name for path in out.iterdir()} - {"generation_config.json"} == names
    for name in names:
        if equal or not name.endswith(".safetensors"):
            assert (out / name).read_bytes() == (wanted / name).read_bytes(), name
        else:
            found, tensors = load_file(out / name), load_file(wanted / name)
            assert found.keys() == tensors.keys()
            for each, tensor in tensors.items():
                torch.testing.assert_close(found[each], tensor, rtol=1e-4, atol=1e-5)


def from_a_folder(dense: Path, out: Path, apart: int = 0) -> Any:
    try:
        return pk.prune_folder(dense, TOKENS.roll(apart * rank(), 0), params=0.8, out=out).rows()
    except (PeerError, RunError, UsageError) as error:
        return type(error).__name__, str(error)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_write_what_one_writes_and_fail_together(tmp_path: Path, processes: int) -> None:
    decoder().save_pretrained(tmp_path / "dense")
    alone = from_a_folder(tmp_path / "dense", tmp_path / "alone")
    for found in together(processes, tmp_path / "group", from_a_folder, tmp_path / "dense", tmp_path / "out"):
        for one, wanted in zip(found, alone, strict=True):
            assert one["difference"] < 1e-9
            assert one["after"] == pytest.approx(wanted["after"], rel=1e-4)
    require_same_files(tmp_path / "out", tmp_path / "alone", equal=False)
    main, _ = together(2, tmp_path / "apart", from_a_folder, tmp_path / "dense", tmp_path / "new", 1)
    assert "prune_folder: tokens: expected the same in all 2 processes" in main[1]
    assert not (tmp_path / "new").exists()
    main, other = together(2, tmp_path / "again", from_a_folder, tmp_path / "dense", tmp_path / "out")
    assert main[0] == "UsageError"
    assert other[0] == "PeerError"
    assert "process 0 of 2 failed" in other[1]
    assert "expected a new or empty folder" in other[1]


def of_its_own(out: Path) -> str:
    config = decoder().config
    torch.manual_seed(rank())
    try:
        pk.prune_folder(transformers.LlamaForCausalLM(config), TOKENS, params=0.8, out=out)
    except (PeerError, RunError) as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_processes_with_other_weights_are_refused(tmp_path: Path) -> None:
    for said in together(2, tmp_path / "group", of_its_own, tmp_path / "out"):
        assert "weights that each process holds whole: expected the same in all 2 processes" in said
    assert not (tmp_path / "out").exists()


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
