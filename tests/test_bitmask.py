"""Zeros as bits in a file: every tensor returns bit for bit, no file grows, and damage says what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prunekit.models.bitmask import is_compressed, pack_bits, read_tensors, unpack_bits, with_bitmasks, write_tensors

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.bool,
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
]  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def drawn(dtype: torch.dtype, *shape: int, zeros: float = 0.5) -> torch.Tensor:
    """A tensor of random bits, NaN of every kind among them, and zeros."""
    torch.manual_seed(0)
    count = int(np.prod(shape))
    if dtype == torch.bool:
        return (torch.rand(shape) >= zeros).to(dtype)
    raw = torch.randint(0, 256, (count, dtype.itemsize), dtype=torch.uint8)
    raw[torch.rand(count) < zeros] = 0
    return raw.view(-1).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def sizes(tensors: dict[str, torch.Tensor], folder: Path) -> tuple[int, int]:
    """The sizes of the plain and of the compressed file, which must both return the tensors."""
    found = []
    for compress in (False, True):
        path = folder / f"{compress}.safetensors"
        assert write_tensors(tensors, path, compress=compress) == is_compressed(path)
        assert_same(read_tensors(path), tensors)
        found.append(path.stat().st_size)
    return found[0], found[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_takes_its_values_and_a_bit_for_each_entry(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = drawn(dtype, 64, 100)
    whole = tensor.view(BITS[dtype.itemsize]) if dtype != torch.bool else tensor
    kept = int((whole != 0).sum())
    plain, compressed = sizes({"w": tensor}, tmp_path)
    assert 6400 * dtype.itemsize < plain < 6400 * dtype.itemsize + 128
    assert 0 < compressed - (kept * dtype.itemsize + 800) < 400
    assert load_file(tmp_path / "True.safetensors")["w:values"].dtype == dtype


def test_only_bits_of_zero_are_zeros(tmp_path: Path) -> None:
    odd = [-0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 1.0]
    tensors = {
        str(dtype): torch.cat(
            [torch.zeros(5000, dtype=dtype), torch.tensor(odd, dtype=dtype), torch.zeros(9, dtype=dtype)]
        )
        for dtype in (torch.float32, torch.float64)
    }
    tensors["quiet and signalling"] = torch.zeros(1000, dtype=torch.int32)
    tensors["quiet and signalling"][:4] = torch.tensor([0x7FC00001, 0x7F800001, -0x3FFFFF, 0x7FFFFFFF])
    tensors["quiet and signalling"] = tensors["quiet and signalling"].view(torch.float32)
    sizes(tensors, tmp_path)
    found = load_file(tmp_path / "True.safetensors")
    assert found["torch.float32:values"].shape == found["torch.float64:values"].shape == (7,)
    assert torch.signbit(read_tensors(tmp_path / "True.safetensors")["torch.float32"][5000])


def test_layouts_in_memory(tmp_path: Path) -> None:
    kernel = drawn(torch.float32, 16, 8, 3, 3)
    tensors = {
        "channels last": kernel.contiguous(memory_format=torch.channels_last),
        "transposed": drawn(torch.float32, 40, 30).T,
        "strided": drawn(torch.float32, 40, 60)[:, ::2],
        "conjugate": drawn(torch.complex64, 40, 30).conj(),
        "expanded": torch.zeros(1, 50).expand(40, 50),
        "shape []": torch.tensor(0.0),
        "empty": torch.zeros(3, 0, 5),
        "odd": drawn(torch.float32, 1001),
    }
    plain, compressed = sizes(tensors, tmp_path)
    assert compressed < 0.7 * plain


def test_what_would_not_become_smaller_stays_plain(tmp_path: Path) -> None:
    """Also by the header: without zeros, the two files are the same, and none is ever larger."""
    dense = {"w": drawn(torch.float32, 64, 64, zeros=0), "b": torch.zeros(8)}
    sizes(dense, tmp_path)
    assert (tmp_path / "True.safetensors").read_bytes() == (tmp_path / "False.safetensors").read_bytes()
    assert not is_compressed(tmp_path / "True.safetensors")
    mixed = {**dense, "z": torch.zeros(64, 64)}
    plain, compressed = sizes(mixed, tmp_path)
    assert load_file(tmp_path / "True.safetensors").keys() == {"w", "b", "z:bitmask", "z:values"}
    assert compressed < plain


@pytest.mark.slow
@settings(max_examples=30, deadline=None, database=None)
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from(DTYPES), st.sampled_from([0, 0.1, 0.9, 1])), max_size=5
    ),
    name=st.text(min_size=1, max_size=60),
)
def test_no_file_grows(parts: list[tuple[int, torch.dtype, float]], name: str, tmp_path_factory: Any) -> None:
    tensors = {f"{name}{i}": drawn(dtype, size, zeros=zeros) for i, (size, dtype, zeros) in enumerate(parts)}
    plain, compressed = sizes(tensors, tmp_path_factory.mktemp("files"))
    assert compressed <= plain


def test_names_that_are_taken_leave_a_tensor_plain(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(900), "w:values": torch.ones(3), "v": torch.zeros(900)}
    sizes(tensors, tmp_path)
    assert load_file(tmp_path / "True.safetensors").keys() == {"w", "w:values", "v:bitmask", "v:values"}


def test_bits_are_in_the_documented_order() -> None:
    mask = np.array([[1, 0, 0, 0, 1], [1, 0, 0, 0, 1]], dtype=bool)
    assert pack_bits(mask).tolist() == [0b00110001, 0b10]
    assert np.array_equal(unpack_bits(pack_bits(mask), (2, 5)), mask)
    assert np.array_equal(unpack_bits(pack_bits(mask.T), (5, 2)), mask.T)
    for shape in ((), (0,), (3, 0), (8,), (1, 1, 17)):
        some = np.random.default_rng(0).random(shape) > 0.5
        assert np.array_equal(unpack_bits(pack_bits(np.asarray(some)), shape), some)


@pytest.mark.parametrize(
    ("packed", "shape"),
    [
        (np.zeros(2, np.uint8), (17,)),
        (np.zeros(2, np.uint8), (8,)),
        (np.zeros(2, np.int8), (16,)),
        (np.zeros((1, 2), np.uint8), (16,)),
        (np.array([0b100000], np.uint8), (5,)),
        (np.zeros(0, np.uint8), (2**70,)),
        (np.zeros(0, np.uint8), (0, 2**70)),
    ],
)
def test_bits_of_another_mask_are_refused(packed: np.ndarray[Any, Any], shape: tuple[int, ...]) -> None:
    with pytest.raises((ValueError, OverflowError)):
        unpack_bits(packed, shape)


# Damage

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]


def about(**values: Any) -> Change:
    return lambda tensors, metadata: metadata.update(values)


def shapes(value: Any) -> Change:
    return about(dense_shapes=value)


def parts(**changed: torch.Tensor | None) -> Change:
    """Sets the tensors `w:bitmask` and `w:values`, or removes them."""

    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
        for name, value in changed.items():
            del tensors[f"w:{name}"]
            if value is not None:
                tensors[f"w:{name}"] = value

    return change


ALL = torch.full((100,), 255, dtype=torch.uint8)
SHORT = torch.zeros(99, dtype=torch.uint8)
DAMAGE: dict[str, tuple[Change, str]] = {
    "another version": (about(version=2), r"of version 1, got 'bitmask' of version 2; use the prunekit"),
    "no version": (lambda _, metadata: metadata.pop("version"), r"got 'bitmask' of version None"),
    "another compression": (about(format="gzip"), r"got 'gzip' of version 1; use the prunekit"),
    "no shapes": (lambda _, metadata: metadata.pop("dense_shapes"), "dense_shapes: expected a shape for each"),
    "shapes in a list": (shapes([[3]]), "dense_shapes: expected a shape"),
    "a shape that is a number": (shapes({"w": 800}), "dense_shapes: expected a shape"),
    "a shape of text": (shapes({"w": ["800"]}), "dense_shapes: expected a shape"),
    "a shape of fractions": (shapes({"w": [800.0]}), "dense_shapes: expected a shape"),
    "a shape below 0": (shapes({"w": [-800]}), "dense_shapes: expected a shape"),
    "a shape of true": (shapes({"w": [True, 800]}), "dense_shapes: expected a shape"),
    "a shape that no memory has": (shapes({"w": [2**62, 2**62]}), r"w: expected \d+ bytes of uint8"),
    "another shape": (
        shapes({"w": [801]}),
        r"w: expected 101 bytes of uint8 for the bits of shape \(801,\), got uint8",
    ),
    "a name that is not there": (shapes({"w": [800], "v": [3]}), "v: expected also v:bitmask and v:values"),
    "no values": (parts(values=None), "w: expected also w:values in the file"),
    "no bitmask": (parts(bitmask=None), "w: expected also w:bitmask in the file"),
    "a value too few": (
        parts(values=torch.ones(9)),
        r"w: expected 10 values, as many as bits of 1, got shape \(9,\)",
    ),
    "a value too many": (
        parts(values=torch.ones(11)),
        r"w: expected 10 values.*got shape \(11,\); the file is damaged",
    ),
    "values in rows": (parts(values=torch.ones(5, 2)), r"got shape \(5, 2\)"),
    "a bit too many": (parts(bitmask=ALL), "expected 800 values"),
    "a bitmask of a dtype of its own": (parts(bitmask=torch.zeros(100)), "for the bits of shape .*got float32"),
    "a bitmask that is cut off": (parts(bitmask=SHORT), r"expected 100 bytes"),
    "both plain and compressed": (lambda t, _: t.update(w=torch.zeros(800)), "w: stored both plain and compressed"),
}


def damaged(path: Path, change: Change) -> Path:
    tensor = torch.zeros(800)
    tensor[:10] = 1
    write_tensors({"w": tensor}, path, compress=True)
    stored = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["compression"])
    change(stored, metadata)
    save_file(stored, path, {"compression": json.dumps(metadata)})
    return path


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    change, message = DAMAGE[name]
    with pytest.raises(ValueError, match=message):
        read_tensors(damaged(tmp_path / "x.safetensors", change))


def test_a_padding_bit_is_damage(tmp_path: Path) -> None:
    stored, shapes = with_bitmasks({"w": torch.zeros(801)})
    stored["w:bitmask"][-1] = 0b10
    text = json.dumps({"format": "bitmask", "version": 1, "dense_shapes": shapes})
    save_file(stored, tmp_path / "x.safetensors", {"compression": text})
    with pytest.raises(ValueError, match=r"w: expected zeros in the last 7 bits, which no entry of \(801,\) has"):
        read_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("text", ["", "{", "3", "null", '["bitmask"]', "[" * 100_000])
def test_metadata_that_is_no_object(text: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors", {"compression": text})
    assert is_compressed(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="metadata: compression: expected a JSON object"):
        read_tensors(tmp_path / "x.safetensors")


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    tensors = {str(i): drawn(torch.float32, 40, 40) for i in range(8)}
    for name in ("a", "b"):
        write_tensors(tensors, tmp_path / name, compress=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
