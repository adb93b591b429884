"""Instructions for int8, from descriptions of processors as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunekit.utils.availability import int8_instructions, int8_note


@pytest.mark.parametrize(
    ("text", "expected", "said"),
    [
        ("model name: Xeon\nflags\t\t: fpu avx2 avx512_vnni amx_int8 avx_vnni\n", ("VNNI", "AMX"), "VNNI and AMX"),
        ("flags: fpu avx2 avx512f\n", (), "no instructions for int8 (VNNI or AMX on x86)"),
        ("Features\t: fp asimd asimddp i8mm\n", ("dot product", "int8 matrix multiplication"), "dot product and int8"),
        ("processor: 0\n", None, "is unknown"),
        (None, None, "is unknown"),
    ],
)
def test_what_a_cpu_has_is_said(text: str | None, expected: object, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert int8_instructions(tmp_path / "cpuinfo") == expected
    assert said in int8_note(tmp_path / "cpuinfo")
