"""Arrays and tensors of strangers: whole, or refused by their headers before memory is taken."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mutants import damaged_bytes, unclean
from safetensors.torch import save_file

from prunekit.errors import ArtifactError, DataError
from prunekit.reading.array_files import read_arrays, read_tensors

SOUND = {
    "images": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "names": np.array(["a", "bcd"]),
    "empty": np.zeros((0, 3), np.float32),
    "one": np.array(1.5, ">f4"),
}


def npy(shape: object, descr: object = "<f4", values: bytes = b"", version: int = 1) -> bytes:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + values


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_archives_are_read_as_numpy_reads_them(write: object, tmp_path: Path) -> None:
    write(tmp_path / "x.npz", **SOUND)  # type: ignore[operator]
    found = read_arrays(tmp_path / "x.npz")
    assert list(found) == list(SOUND)
    for name, array in SOUND.items():
        assert found[name].dtype == array.dtype
        assert found[name].flags.f_contiguous or name != "f"
        np.testing.assert_array_equal(found[name], array)
    np.save(tmp_path / "x.npy", SOUND["f"])
    np.testing.assert_array_equal(read_arrays(tmp_path / "x.npy")[""], SOUND["f"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy((10**12,)), r"shape \(1000000000000,\) of float32 takes 4,000,000,000,000 bytes, and 0 are there"),
        (npy((-1,)), r"shape \(-1,\)"),
        (npy((2,), values=b"\0" * 9), r"takes 8 bytes, and 9 are there"),
        (npy((10**12,), "<U0"), "of no bytes"),
        (npy((1,), "|O", b"\0" * 8), "objects are never loaded"),
        (npy("x"), "shape is not valid"),
        (npy((1,), "nothing", b"\0" * 4), "dtype"),
        (npy((1,), version=7), "expected version 1 or 2"),
        (b"\x80\x04K\x01.", "it is no zip file"),
        (b"", "it is no zip file"),
    ],
)
def test_headers_are_checked_first(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(DataError, match=rf"x\.npy: expected NumPy arrays .*, but: .*{message}"):
        read_arrays(tmp_path / "x.npy", raises=DataError)


def test_what_needs_more_memory_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(2**20), b=np.zeros(2**20))
    assert (tmp_path / "x.npz").stat().st_size < 2**17
    with pytest.raises(ArtifactError, match=r"its arrays take 16,777,\d+ bytes, and 1,000,000 of memory are free"):
        read_arrays(tmp_path / "x.npz", most=10**6)
    assert len(read_arrays(tmp_path / "x.npz")) == 2


def test_names_are_there_once(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in ("a.npy", "b.npy", "note.txt"):
            archive.writestr(name, npy((1,), values=b"\0" * 4))
    (tmp_path / "x.npz").write_bytes(stream.getvalue())
    assert list(read_arrays(tmp_path / "x.npz")) == ["a", "b"]
    (tmp_path / "x.npz").write_bytes(stream.getvalue().replace(b"b.npy", b"a.npy"))
    with pytest.raises(ArtifactError, match="the array 'a' is there twice"):
        read_arrays(tmp_path / "x.npz")


def test_tensors_and_their_metadata(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bool)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    found, metadata = read_tensors(tmp_path / "x.safetensors")
    assert metadata == {"format": "pt"}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(DataError, match="no such file"):
        read_tensors(tmp_path / "missing", raises=DataError)
    with pytest.raises(DataError, match="it is a folder"):
        read_tensors(tmp_path, raises=DataError)


@pytest.mark.slow
def test_damaged_arrays_are_read_or_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", **SOUND)  # type: ignore[arg-type]
    np.save(tmp_path / "x.npy", SOUND["images"])
    save_file({"a": torch.ones(2, 3)}, tmp_path / "x.safetensors", {"format": "pt"})
    for number, name in enumerate(("x.npz", "x.npy", "x.safetensors")):
        sound = (tmp_path / name).read_bytes()
        path = tmp_path / f"mutant_{name}"

        def read(mutant: bytes, path: Path = path) -> None:
            path.write_bytes(mutant)
            if path.suffix == ".safetensors":
                read_tensors(path)
            else:
                read_arrays(path, most=10**8)

        assert unclean(read, damaged_bytes(sound, 200, seed=number)) == []
