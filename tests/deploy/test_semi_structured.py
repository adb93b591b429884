"""2:4 layers: which are packed and what the packed weight holds; kernels themselves need a GPU."""

from __future__ import annotations

import pytest
import torch
from equivalence import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

import prunekit
from prunekit.compaction.zero_patterns import zero_patterns
from prunekit.deploy.semi_structured import pack, packable
from prunekit.errors import VerificationError


def two_of_four(weight: Tensor) -> Tensor:
    """Return a weight with the two smallest of four neighbors in each row set to 0."""
    order = weight.detach().abs().unflatten(1, (-1, 4)).argsort(2).argsort(2)
    return torch.where((order >= 2).flatten(1), weight.detach(), 0)


def net(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    torch.manual_seed(0)
    sparse, narrow, unstructured = nn.Linear(128, 64), nn.Linear(64, 24), nn.Linear(24, 64)
    for layer in (sparse, narrow):
        layer.weight.data = two_of_four(layer.weight)
    unstructured.weight.data[:, :3] = 0
    kernel = nn.Conv2d(64, 64, 1)
    kernel.weight.data[:, ::2] = 0
    return nn.Sequential(sparse, narrow, unstructured, nn.Unflatten(1, (64, 1, 1)), kernel, nn.Linear(1, 8)).to(dtype)


@pytest.fixture
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights on the CPU be packed, which torch does in Python, though nothing there computes with them."""
    monkeypatch.setattr(SparseSemiStructuredTensorCUTLASS, "_validate_device_dim_dtype_shape", lambda weight: None)
    monkeypatch.setattr(SparseSemiStructuredTensorCUTLASS, "_PROTOTYPE_WARNING_SHOWN", True)
    SparseSemiStructuredTensorCUTLASS._load_dispatch_table()


def test_layers_that_cannot_be_packed_say_why() -> None:
    fitting, dense = packable(net(), SparseSemiStructuredTensorCUTLASS)
    assert fitting == ("0",)
    assert dense == {
        "1": "24 outputs and 64 inputs, expected multiples of 32 and 64 (cutlass): prune channels with round_to=64",
        "2": "not 2:4: 4 of some 4 weights in a row are not zero",
        "4": "a convolution: torch has 2:4 kernels for linear layers alone, TensorRT for both",
    }
    _, smaller = packable(net(), SparseSemiStructuredTensorCUSPARSELT)
    assert smaller["1"].startswith("24 outputs and 64 inputs, expected multiples of 16 and 16 (cusparselt)")
    fitting, dense = packable(net(torch.float32), SparseSemiStructuredTensorCUSPARSELT)
    assert fitting == ()
    assert dense["0"] == "its weight is in float32, expected float16 or bfloat16"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_values_and_positions_are_the_weight(dtype: torch.dtype) -> None:
    weight = two_of_four(torch.randn(64, 128)).to(dtype)
    values, positions = sparse_semi_structured_from_dense_cutlass(weight)
    assert values.shape == (64, 64)
    assert positions.shape == (64, 128 // 16)
    assert positions.dtype == torch.int16
    assert torch.equal(values.float().sum(1), weight.float().sum(1)) or torch.allclose(
        values.float().sum(1), weight.float().sum(1), atol=1e-3
    )
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(values, positions), weight)


@pytest.mark.usefixtures("_on_cpu")
def test_a_packed_layer_unpacks_to_its_weight() -> None:
    model = net()
    want = model[0].weight.detach().clone()
    pack(model, ("0",), SparseSemiStructuredTensorCUTLASS)
    packed = model[0].weight
    assert isinstance(packed, SparseSemiStructuredTensorCUTLASS)
    assert packed.shape == want.shape
    assert not packed.requires_grad
    assert torch.equal(packed.to_dense(), want)
    assert list(zero_patterns(model).layers) == ["1.weight", "2.weight", "4.weight", "5.weight"]


@pytest.mark.usefixtures("_on_cpu")
def test_a_weight_that_is_packed_wrongly_is_found_out() -> None:
    model = net()
    with pytest.raises(VerificationError, match="1: the weight that cutlass packed is another one when unpacked"):
        pack(nn.Sequential(model[0], nn.Linear(128, 64).half()), ("1",), SparseSemiStructuredTensorCUTLASS)


def test_on_a_cpu_all_layers_stay_dense_and_that_is_said() -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 8)).to(torch.bfloat16)
    model[0].weight.data = two_of_four(model[0].weight)
    before = snapshot(model)
    found = prunekit.semi_structured(model, torch.randn(4, 128).bfloat16())
    assert found.model is model
    assert_unchanged(model, before)
    assert (found.packed, found.backend, found.max_relative_difference) == ((), "", 0.0)
    assert found.dense == {"0": "on cpu: 2:4 kernels are those of NVIDIA GPUs from compute capability 8.0 on"}
    assert str(found).startswith("2:4: 0 layers packed; 0 dense: on cpu")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="no sparse tensor cores"
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_layers_compute_the_same_on_a_gpu(dtype: torch.dtype) -> None:
    model = net(dtype)[:1].cuda().eval()
    example = torch.randn(16, 128, device="cuda", dtype=dtype)
    found = prunekit.semi_structured(model, example)
    assert found.packed == ("0",)
    assert found.backend in ("cusparselt", "cutlass")
    with torch.no_grad():
        want, got = model(example), found.model(example)
    assert (want - got).abs().max() <= 0.02 * want.abs().max()
