"""Expressions of sizes in programs of `torch.export`: told from code, and their numbers kept small.

They are text, which torch gives to `sympy.sympify` and to `exec`, and those run what stands in it. An expression that
is arithmetic may still name a number that takes years and all memory to compute (`9**9**9**9`), or a product of sums
that has millions of terms once it is multiplied out.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

FUNCTIONS = frozenset({
    "Integer", "Float", "Rational", "Add", "FloorDiv", "CleanDiv", "CeilDiv", "CeilToInt",
    "FloorToInt", "TruncToInt", "TruncToFloat", "Mod", "PythonMod", "ModularIndexing", "Where", "Max", "Min", "Eq",
    "Ne", "Lt", "Le", "Gt", "Ge", "Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan",
    "GreaterThan", "And", "Or", "Not", "Abs", "floor", "ceiling", "ToFloat", "IntTrueDiv", "FloatTrueDiv",
    "RoundToInt", "RoundDecimal", "Identity", "abs", "max", "min", "int", "float", "round",
})  # fmt: skip
"""Functions of an expression whose value is no larger than the sum of their arguments."""
PAIRWISE = frozenset({"Max", "Min", "max", "min", "And", "Or"})
"""Functions that sympy compares all arguments of with each other for."""
ROUNDING = frozenset({"round", "RoundDecimal"})
PRODUCTS = frozenset({"Mul"})
POWERS = frozenset({"Pow", "FloatPow", "PowByNatural"})
METHODS = frozenset({"size", "stride", "storage_offset"})
"""Methods of a tensor in conditions."""
MODULES = re.compile(r"torch\.sym_(max|min|not|int|float|ite|sqrt)|math\.(ceil|floor|trunc|sqrt|isnan|inf)")
"""Functions of modules in conditions."""
OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.UAdd, ast.USub, ast.Not, ast.And, ast.Or,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.BitAnd, ast.BitOr, ast.Invert,
)  # fmt: skip
LONGEST = 20_000
"""Characters of one expression."""
MOST_BITS = 1024
"""Bits of the largest number that an expression may have; a size has 63."""
MOST_TERMS = 1000
"""Terms that an expression may have once it is multiplied out."""
MOST_COMPARED = 64
"""Terms of the arguments of a function that compares them."""
DEEPEST = 60
"""Nesting of an expression."""
NUMBER = re.compile(r"\d[\d_]*(\.\d*)?(e[+-]?\d{1,3})?|\.\d+(e[+-]?\d{1,3})?", re.IGNORECASE)
"""Numbers: sympy computes an exponent of ten exactly."""
WORD = re.compile(r"[A-Za-z]\w*", re.ASCII)
SIZE_BITS = 64


class _Size(NamedTuple):
    """Bounds of a part of an expression: the bits of its numbers, and its terms once multiplied out."""

    bits: int
    terms: int


class _NotArithmetic(Exception):
    """An expression is more than arithmetic, or its numbers are too large."""


def is_arithmetic(text: str) -> bool:
    """Return whether an expression only computes with numbers, symbols and sizes of tensors, and small ones at that."""
    if len(text) > LONGEST or not text.isascii() or any(mark in text for mark in '\n\r"\\#'):
        return False
    try:
        _bounds(ast.parse(text.strip(), mode="eval").body, text.strip(), DEEPEST)
    except (_NotArithmetic, SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _bounds(node: ast.expr, text: str, depth: int) -> _Size:
    if depth == 0:
        raise _NotArithmetic
    found = _unchecked(node, text, depth - 1)
    if found.bits > MOST_BITS or found.terms > MOST_TERMS:
        raise _NotArithmetic
    return found


def _unchecked(node: ast.expr, text: str, depth: int) -> _Size:
    match node:
        case ast.Constant(value=bool()):
            return _Size(1, 1)
        case ast.Constant(value=int() | float() as value):
            if not NUMBER.fullmatch(ast.get_source_segment(text, node) or ""):
                raise _NotArithmetic
            return _number(value)
        case ast.Name(id=name) if WORD.fullmatch(name):
            return _Size(SIZE_BITS, 1)
        case ast.Attribute() if MODULES.fullmatch(ast.unparse(node)):
            return _Size(SIZE_BITS, 1)
        case ast.UnaryOp(op=op, operand=operand) if isinstance(op, OPERATORS):
            return _bounds(operand, text, depth)
        case ast.BoolOp(values=values):
            return _sum([_bounds(one, text, depth) for one in values])
        case ast.Compare(left=left, ops=ops, comparators=others) if all(isinstance(one, OPERATORS) for one in ops):
            return _sum([_bounds(one, text, depth) for one in (left, *others)])
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_bounds(left, text, depth), right, text)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, OPERATORS):
            parts = [_bounds(left, text, depth), _bounds(right, text, depth)]
            return _product(parts) if isinstance(op, ast.Mult | ast.Div) else _sum(parts)
        case ast.Subscript(value=value, slice=ast.Constant(value=int() | str() as key)):
            if isinstance(key, str) and not WORD.fullmatch(key):
                raise _NotArithmetic
            return _bounds(value, text, depth)
        case ast.Call():
            return _call(node, text, depth)
    raise _NotArithmetic


def _call(node: ast.Call, text: str, depth: int) -> _Size:
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and not node.args and not node.keywords:
        return _bounds(node.func.value, text, depth)
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    if any(not isinstance(one.value, ast.Constant) or not isinstance(one.value.value, bool) for one in node.keywords):
        raise _NotArithmetic
    match name, node.args:
        case "Symbol", [ast.Constant(value=str() as symbol)] if WORD.fullmatch(symbol):
            return _Size(SIZE_BITS, 1)
        case _, [base, exponent] if name in POWERS:
            return _power(_bounds(base, text, depth), exponent, text)
        case _, [_, digits] if name in ROUNDING and not (
            isinstance(digits, ast.Constant) and digits.value in range(20)
        ):
            raise _NotArithmetic  # of -10**9 digits, it computes a power
    if name not in FUNCTIONS | PRODUCTS and not MODULES.fullmatch(name):
        raise _NotArithmetic
    parts = [_bounds(one, text, depth) for one in node.args]
    found = _product(parts) if name in PRODUCTS else _sum(parts)
    if name in PAIRWISE and found.terms > MOST_COMPARED:
        raise _NotArithmetic
    return found


def _power(base: _Size, exponent: ast.expr, text: str) -> _Size:
    """Return the bounds of a power, whose exponent has to be a number."""
    while isinstance(exponent, ast.Call) and len(exponent.args) == 1 and ast.unparse(exponent.func) == "Integer":
        exponent = exponent.args[0]
    if isinstance(exponent, ast.UnaryOp) and isinstance(exponent.op, ast.USub):
        exponent = exponent.operand
    if not isinstance(exponent, ast.Constant) or not isinstance(exponent.value, int | float):
        raise _NotArithmetic
    if not 0 <= exponent.value <= MOST_BITS:
        raise _NotArithmetic
    times = max(1, int(exponent.value))
    if base.terms > 1 and times > 10:  # 2**11 terms are too many already, and the power would be slow itself
        raise _NotArithmetic
    return _Size(base.bits * times, base.terms**times)


def _number(value: float) -> _Size:
    if isinstance(value, int):
        return _Size(value.bit_length(), 1)
    return _Size(MOST_BITS if value in (float("inf"), float("-inf")) else SIZE_BITS, 1)


def _sum(parts: list[_Size]) -> _Size:
    return _Size(max((one.bits for one in parts), default=0) + len(parts).bit_length(), sum(one.terms for one in parts))


def _product(parts: list[_Size]) -> _Size:
    terms = 1
    for one in parts:
        terms = min(terms * max(1, one.terms), MOST_TERMS + 1)
    return _Size(sum(one.bits for one in parts), terms)


def multiplied(left: Any, right: Any) -> Any:
    """Return the product of two numbers of a program."""
    if isinstance(left, int) and isinstance(right, int):
        _require_small(left.bit_length() + right.bit_length())
    return left * right


def raised(base: Any, exponent: Any) -> Any:
    """Return the power of two numbers of a program."""
    if isinstance(base, int) and isinstance(exponent, int):
        _require_small(base.bit_length() * abs(exponent))
    return base**exponent


def _require_small(bits: int) -> None:
    if bits > MOST_BITS:
        raise OverflowError(f"it computes a number of about {bits} bits, and sizes have {SIZE_BITS} at most")


BOUNDED: Mapping[Any, Callable[[Any, Any], Any]] = {operator.mul: multiplied, operator.pow: raised}
"""Arithmetic of programs that may give numbers of any size, each with what to compute instead."""
