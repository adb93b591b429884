"""Expressions of sizes are told from code, and those that would compute for years from those of programs."""

from __future__ import annotations

import time
from functools import reduce

import pytest

from prunekit.backends.files.symbolic_sizes import is_arithmetic, multiplied, raised

ARITHMETIC = [
    "Symbol('s0', positive=True, integer=True)", "2*Symbol('s0') + 1", "FloorDiv(Symbol('s1'), 2)", "Max(1, 3)",
    "L['x'].size()[0] % 2 == 0", "L['a'][0].size()[1] != L['b'].stride()[0]", "torch.sym_max(1, 2) <= 3",
    "Mul(Integer(9), Pow(Symbol('s77', positive=True, integer=True), Integer(2)))", "Pow(Symbol('s0'), Integer(-1))",
    "Add(Integer(3), Mul(Integer(-1), Min(Integer(3), Symbol('u0', integer=True))))", "(s0 - 1)//2 + 1", "1.5e-3*s0",
    "Not(Eq(Symbol('s0'), 1))", "GreaterThan(Symbol('u0', integer=True), Integer(0))", "round(s0, 2)", "9**9",
]  # fmt: skip
CODE = [
    "Symbol(__import__('os'))", "().__class__", "Integer('1 and print(1)')", "eval('1')", "[1 for _ in 'a']", "1 +",
    "L['x'].data_ptr()", "L['x'].__class__", "torch.load('x')", "lambda: 1", "Symbol('s0').sys", "f'{1}'", "'a' * 9",
    "L[print(1)]", "(yield)", "torch.sym_max.__globals__", "(lambda: 1)()", "L['x'].size(print(1))", "Symbol('a b')",
    "L[\"x\"].size()[0] == 1", "s0 == 1\nprint(1)", "s0 == 1 # yes", "Max(*s0)", "Integer(1, **s0)", "s0 if s1 else s2",
    "Symbol('s0', key=print(1))", "Symbol('s0', 'x')", "L['x' 'y z']", "s0 := 1", "...", "1j", "b'1'", "None",
]  # fmt: skip
ENDLESS = [
    "9**9**9**9", "Pow(Integer(9), Pow(Integer(9), Integer(9)))", "Pow(9, 10**9)", "((((2**60)**60)**60)**60)",
    "PowByNatural(10, 10**9)", "s0**s1", "(s0 + s1)**50", "*".join(["(s0 + s1 + s2)"] * 12), "1 << 10**10",
    "1e999999999", "Float(1e99999)", "math.factorial(10**6)", "math.comb(10**6, 10**5)", "RoundDecimal(1, -10**9)",
    "round(5, -10**9)", "Mul(" + ", ".join(["10**300"] * 9) + ")", "9" * 4000, "-" * 3000 + "1",
    "Max(" + ", ".join(f"s{index}" for index in range(2000)) + ")", " + ".join(["s0"] * 5000),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "plain"), [(ARITHMETIC, True), (CODE, False), (ENDLESS, False)])
def test_small_arithmetic_is_told_from_code_and_from_what_never_ends(texts: list[str], plain: bool) -> None:
    start = time.perf_counter()
    assert {text: is_arithmetic(text) for text in texts} == dict.fromkeys(texts, plain)
    assert time.perf_counter() - start < 2


def test_numbers_that_a_program_computes_stay_small() -> None:
    assert (multiplied(2**40, 3), multiplied(0.5, 3), raised(7, 3), raised(2, -1)) == (3 * 2**40, 1.5, 343, 0.5)
    with pytest.raises(OverflowError, match=r"a number of about \d+ bits, and sizes have 64 at most"):
        reduce(lambda value, _: multiplied(value, value), range(40), 10)  # squares of squares: of 10^12 digits
    with pytest.raises(OverflowError, match="sizes have 64"):
        raised(9, 9**9)
