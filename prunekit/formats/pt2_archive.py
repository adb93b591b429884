"""Archives of `torch.export`: what is in them, read without running code, and what could run code on loading them.

`torch.export.load` is not safe for files of unknown origin: it reads pickles (of examples, of tensors of classes of
their own, of script objects), gives expressions of sizes to `sympy.sympify` and conditions to `exec`, which run what
stands in them, resolves functions by any dotted name, and loads compiled libraries. A file without any of these is
numbers, text and a graph of torch's own operators.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from prunekit.errors import ArtifactError, reason_of, reraise_shortage
from prunekit.models.interface import ModelInterface, TensorSpec

PROGRAM = "models/model.json"
COMPILED = "data/aotinductor/"
"""Folder of compiled libraries."""
SAMPLES = re.compile(r"data/sample_inputs/[\w.]+\.pt")
"""Pickles with examples, which are read as numbers alone."""
CONFIG = re.compile(r"data/(weights|constants)/[\w.]+_config\.json")
PLAIN = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|extra/.*|\.data/.*|archive_format|archive_version|byteorder|"
    r"\.format_version|\.storage_alignment"
)
"""Files that hold numbers, or text that nothing reads."""
TARGET = re.compile(
    r"torch\.ops\.\w+\.\w+(\.\w+)?|torch\._?sym_\w+|math\.\w+|"
    r"_operator\.(add|and_|eq|floordiv|ge|getitem|gt|le|lt|mod|mul|ne|neg|not_|or_|pos|pow|sub|truediv)"
)
"""Functions that a node may call: operators, and arithmetic on sizes."""
FUNCTIONS = frozenset({
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "FloorDiv", "CleanDiv", "CeilDiv", "CeilToInt",
    "FloorToInt", "TruncToInt", "TruncToFloat", "Mod", "PythonMod", "ModularIndexing", "Where", "Max", "Min", "Eq",
    "Ne", "Lt", "Le", "Gt", "Ge", "Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan",
    "GreaterThan", "And", "Or", "Not", "Abs", "floor", "ceiling", "ToFloat", "IntTrueDiv", "FloatTrueDiv",
    "FloatPow", "PowByNatural", "RoundToInt", "RoundDecimal", "Identity",
})  # fmt: skip
"""Functions in expressions of sizes."""
METHODS = frozenset({"size", "stride", "storage_offset"})
NODES = (
    ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop, ast.boolop,
    ast.Constant, ast.Name, ast.Load, ast.Call, ast.keyword, ast.Subscript, ast.Attribute,
)  # fmt: skip
DTYPES = (
    "unknown", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "bfloat16",
)  # fmt: skip
"""Names of dtypes by their numbers in the schema of torch's serialization."""


class Archive:
    """A file of `torch.export.save`, as a ZIP archive.

    Args:
        path: of the file.

    Raises:
        ArtifactError: it is missing or no such archive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as file:
                names = file.namelist()
        except (OSError, zipfile.BadZipFile) as error:
            raise self.damaged(reason_of(error)) from error
        tops = {name.partition("/")[0] for name in names}
        if len(tops) != 1 or not all("/" in name for name in names) or max(Counter(names).values()) > 1:
            raise self.damaged("its files are not in one folder, each once")
        (self._top,) = tops
        self.names = [name.partition("/")[2] for name in names]
        if self.text("archive_format") != "pt2":
            raise self.damaged("it is another kind of archive, or of an old version of torch")

    def damaged(self, problem: str) -> ArtifactError:
        """Return the error about a file that cannot be used."""
        return ArtifactError(f"{self.path}: expected a .pt2 file of torch.export.save, but {problem}")

    def data(self, name: str) -> bytes | None:
        """Return the bytes of a file in the archive; None if there is none of this name."""
        if name not in self.names:
            return None
        try:
            with zipfile.ZipFile(self.path) as file:
                return file.read(f"{self._top}/{name}")
        except (OSError, zipfile.BadZipFile, RuntimeError) as error:
            reraise_shortage(error)
            raise self.damaged(reason_of(error)) from error

    def text(self, name: str) -> str | None:
        """Return the text of a file in the archive; None if there is none of this name."""
        data = self.data(name)
        return None if data is None else data.decode("utf-8", "replace")

    def json(self, name: str) -> Any:
        """Return the JSON of a file in the archive."""
        try:
            return json.loads(self.text(name) or "")
        except ValueError as error:
            raise self.damaged(f"{name} is no JSON: {error}") from error

    def require_plain(self) -> None:
        """Raise if loading the file could run code.

        Raises:
            ArtifactError: it could; the message has the part that would.
        """
        for problem in self._code():
            raise ArtifactError(
                f"{self.path}: loading it could run code that is in the file: {problem}; prunekit loads programs of "
                "torch's operators and plain tensors alone. If you trust the file, load it by torch.export.load"
            )

    def _code(self) -> Iterator[str]:
        """Yield what could run code."""
        for name in self.names:
            if SAMPLES.fullmatch(name):
                if not _is_of_tensors(self.data(name) or b""):
                    yield f"{name} is a pickle of more than tensors"
            elif CONFIG.fullmatch(name):
                if any(entry.get("use_pickle") for entry in _mappings(self.json(name))):
                    yield f"{name} names pickled tensors"
            elif name.startswith("models/") and name.endswith(".json"):
                yield from _code_of(self.json(name))
            elif name.startswith(COMPILED):
                yield f"{name} is compiled by AOTInductor (it is opened as aoti)"
            elif not PLAIN.fullmatch(name):
                yield f"{name} is not of numbers or text"

    def interface(self, program: str) -> ModelInterface:
        """Return the names, dtypes and shapes of a program's inputs and outputs, from its JSON."""
        try:
            graph = json.loads(program)["graph_module"]
            values, signature = graph["graph"]["tensor_values"], graph["signature"]
            inputs = [entry["user_input"]["arg"] for entry in signature["input_specs"] if "user_input" in entry]
            outputs = [entry["user_output"]["arg"] for entry in signature["output_specs"] if "user_output" in entry]
            taken = [entry["as_tensor"]["name"] for entry in inputs if "as_tensor" in entry]
            given = [entry["as_tensor"]["name"] for entry in outputs if "as_tensor" in entry]
            called = ["output"] if len(given) == 1 else [f"output_{index}" for index in range(len(given))]
            return ModelInterface(
                tuple(_spec(name, values[name]) for name in taken),
                tuple(_spec(shown, values[name]) for shown, name in zip(called, given, strict=True)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise self.damaged(f"its program is damaged: {reason_of(error)}") from error


def _spec(name: str, value: Any) -> TensorSpec:
    shape = tuple(
        size["as_int"] if "as_int" in size else re.sub(r"Symbol\('(\w+)'[^)]*\)", r"\1", size["as_expr"]["expr_str"])
        for size in value["sizes"]
    )
    return TensorSpec(name, DTYPES[value["dtype"]], shape)


def _is_of_tensors(data: bytes) -> bool:
    if not data:
        return True
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception:  # of the unpickler, or of zip files
        return False
    return True


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping in nested JSON."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def _code_of(program: Any) -> Iterator[str]:
    """Yield what a program, as JSON, would run besides torch's operators."""
    for entry in _mappings(program):
        targets = [entry[key] for key in ("as_operator",) if key in entry]
        targets += [entry["target"]] if "target" in entry and "inputs" in entry else []
        yield from (f"it calls {target!r}" for target in targets if not TARGET.fullmatch(str(target)))
        texts = [entry["expr_str"]] if "expr_str" in entry else []
        texts += entry.get("guards_code") or []
        yield from (f"it has the expression {text!r}" for text in texts if not is_arithmetic(str(text)))
        for key in ("in_spec", "out_spec"):
            if re.search("__enum__|defaultdict", str(entry.get(key))):
                yield "the classes of its arguments name code to import"


def is_arithmetic(text: str) -> bool:
    """Return whether an expression only computes with numbers, symbols and sizes of tensors."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    named: set[int] = set()  # text that is a symbol's name, or an argument's
    for node in ast.walk(tree):
        if not isinstance(node, NODES):
            return False
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return False
        if isinstance(node, ast.Attribute) and not (
            node.attr in METHODS or re.fullmatch(r"torch\.sym_\w+|math\.[a-z]\w*", ast.unparse(node))
        ):
            return False
        if isinstance(node, ast.Call):
            function = node.func
            if not (
                isinstance(function, ast.Attribute) or (isinstance(function, ast.Name) and function.id in FUNCTIONS)
            ):
                return False
            if isinstance(function, ast.Name) and function.id == "Symbol":
                named |= {id(argument) for argument in node.args}
        if isinstance(node, ast.Subscript):
            named.add(id(node.slice))
        value = node.value if isinstance(node, ast.Constant) else 0
        if not isinstance(value, int | float) and not (id(node) in named and str(value).isidentifier()):
            return False
    return True
