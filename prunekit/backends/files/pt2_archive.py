"""Archives of `torch.export`: what is in them, read without running code, and what could run code on loading them.

`torch.export.load` is not safe for files of unknown origin: it reads pickles (of examples, of tensors of classes of
their own, of script objects), gives expressions of sizes to `sympy.sympify` and conditions to `exec`, which run what
stands in them, writes the names of nodes and inputs into Python that it runs, resolves functions by any dotted name,
and loads compiled libraries. Operators may read and write files themselves. A file without any of these is numbers,
names and a graph of operators that only compute tensors. So nothing is looked for; what is not known is refused.
"""

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from prunekit.backends.files.symbolic_sizes import is_arithmetic
from prunekit.backends.files.tensor_operators import why_refused
from prunekit.errors import ArtifactError, raised_as, reason_of, reraise_shortage
from prunekit.models.interface import ModelInterface, TensorSpec
from prunekit.utils.private_torch import archive_reader

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
    r"math\.trunc|torch\.(_sym_sqrt|sym_(float|int|ite|max|min|not|sqrt|sum))|"
    r"_operator\.(add|and_|eq|floordiv|ge|getitem|gt|le|lt|mod|mul|ne|neg|not_|or_|pos|pow|sub|truediv)"
)
"""Arithmetic on sizes, which a node may call besides operators."""
PATHS = frozenset({"buffer_name", "fqn", "parameter_name", "tensor_constant_name"})
"""Keys of texts that are paths of modules and their tensors."""
UNREAD = frozenset({"metadata", "torch_version", "treespec_namedtuple_fields"})
"""Keys of what torch shows at most: places in the code that a program was made from."""
NAME = re.compile(r"\w*", re.ASCII)
"""Names of nodes, arguments and inputs: torch writes them into code that it runs."""
PATH = re.compile(r"(?!__)[\w +:<>@/-]*(\.(?!__)[\w +:<>@/-]*)*", re.ASCII)
"""Paths of tensors, which it writes there too, some between quotes."""
DEVICE = re.compile(r"[a-z]+(:\d+)?")
INFINITE = ("Infinity", "-Infinity", "NaN")
LONGEST_TEXT = 1000
"""Characters of a text that an operator takes."""
DEEPEST = 200
"""Nesting of a program's JSON, of which graphs in graphs are a part."""
CONTAINERS = frozenset({
    "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", "collections.deque",
})  # fmt: skip
"""Classes that arguments and outputs may be nested in: those of others import what a file names."""
DTYPES = (
    "unknown", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "bfloat16",
)  # fmt: skip
"""Names of dtypes by their numbers in the schema of torch's serialization."""


class Archive:
    """A file of `torch.export.save`, as a ZIP archive; an `ArtifactError` if it is missing or none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.reading():  # torch's reader says such things as "stoull" of its version
            with zipfile.ZipFile(path) as file:
                entries = file.infolist()
            self._reader = archive_reader(path)
            records = set(self._reader.get_all_records())
        names = [entry.filename for entry in entries]
        tops = {name.partition("/")[0] for name in names}
        if len(tops) != 1 or not all("/" in name for name in names) or max(Counter(names).values()) > 1:
            raise self.damaged("its files are not in one folder, each once")
        self.names = [name.partition("/")[2] for name in names]
        if records != set(self.names) or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise self.damaged("it is not as torch writes them: other programs would read something else in it")
        if self.text("archive_format") != "pt2":
            raise self.damaged("it is another kind of archive, or of an old version of torch")

    def damaged(self, problem: str) -> ArtifactError:
        """Return the error about a file that cannot be used."""
        return ArtifactError(f"{self._expected}{problem}")

    def reading(self) -> AbstractContextManager[None]:
        """Raise what goes wrong inside as an error about the file."""
        return raised_as(ArtifactError, self._expected)

    @property
    def _expected(self) -> str:
        return f"{self.path}: expected a .pt2 file of torch.export.save, but "

    def data(self, name: str) -> bytes | None:
        """Return the bytes of a file in the archive; None if there is none of this name."""
        if name not in self.names:
            return None
        with self.reading():
            found: bytes = self._reader.get_record(name)  # as torch itself will read it
        return found

    def text(self, name: str) -> str | None:
        """Return the text of a file in the archive; None if there is none of this name."""
        data = self.data(name)
        return None if data is None else data.decode("utf-8", "replace")

    def json(self, name: str) -> Any:
        """Return the JSON of a file in the archive."""
        try:
            return json.loads(self.text(name) or "")
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"{name} is no JSON: {reason_of(error)}") from error

    def code(self) -> Iterator[str]:
        """Yield what could do more than compute tensors: run code, or read and write files."""
        for name in self.names:
            if SAMPLES.fullmatch(name):
                if not _is_of_tensors(self.data(name) or b""):
                    yield f"{name} is a pickle of more than tensors"
            elif CONFIG.fullmatch(name):
                config = self.json(name)
                if any(entry.get("use_pickle") for entry in _mappings(config)):
                    yield f"{name} names pickled tensors"
                tensors = config.get("config") if isinstance(config, dict) else None
                if not isinstance(tensors, dict) or not all(map(PATH.fullmatch, tensors)):
                    yield f"{name} names tensors by more than paths"
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
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
            raise self.damaged(f"its program is damaged: {reason_of(error)}") from error


@contextmanager
def archive_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file for torch's writer of archives to write to.

    The writer ends the process if it cannot write, as on a full disk, so that what goes wrong is raised at the end.
    """
    with path.open("wb") as file:
        stream = _PatientFile(file)
        yield stream
        if stream.problem is not None:
            raise stream.problem


class _PatientFile(io.BytesIO):
    """A file that takes what is written to it, and raises nothing."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.file, self.problem = file, None

    problem: BaseException | None  # the first thing that went wrong; nothing was written from there on

    def write(self, data: Any) -> int:
        if self.problem is None:
            try:
                self.file.write(data)
            except BaseException as error:  # also of the keyboard
                self.problem = error
        return len(data)


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
        found = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # of the unpickler, or of zip files
        reraise_shortage(error)
        return False
    return all(PATH.fullmatch(key) for key in _keys(found))


def _keys(value: Any) -> Iterator[str]:
    """Yield the keys of nested examples, which torch writes into code."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield key if isinstance(key, str) else ("" if isinstance(key, int) else "?")
            yield from _keys(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _keys(one)


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


def _code_of(value: Any, key: str = "", depth: int = DEEPEST) -> Iterator[str]:
    """Yield what a program, as JSON, would do besides computing tensors by torch's operators."""
    if depth == 0:
        yield "it is nested too deeply to be looked through"
    elif isinstance(value, dict):
        is_node = "target" in value and "inputs" in value
        for name, one in value.items():
            if not NAME.fullmatch(name):
                yield f"it has the name {name!r}, which torch would write into code"
            if name not in UNREAD and not (is_node and name == "inputs"):
                yield from _code_of(one, name, depth - 1)
        if is_node:
            yield from _code_of_arguments(value["inputs"], depth - 1)
    elif isinstance(value, list):
        for one in value:
            yield from _code_of(one, key, depth - 1)
    elif isinstance(value, str) and (problem := _code_of_text(value, key)):
        yield problem


def _code_of_arguments(inputs: Any, depth: int) -> Iterator[str]:
    """Yield what the arguments of a node would do; a text among them stays text, whatever it says."""
    for entry in inputs if isinstance(inputs, list) else [inputs]:
        argument = entry.get("arg") if isinstance(entry, dict) else None
        texts = [argument["as_string"]] if isinstance(argument, dict) and list(argument) == ["as_string"] else []
        if texts and isinstance(texts[0], str) and len(texts[0]) <= LONGEST_TEXT and texts[0].isprintable():
            yield from _code_of({**entry, "arg": None}, "inputs", depth)
        else:
            yield from _code_of(entry, "inputs", depth)


def _code_of_text(text: str, key: str) -> str:
    """Return what a text of a program would do; empty if nothing."""
    if key in ("target", "as_operator") and not TARGET.fullmatch(text):
        reason = why_refused(text)
        return reason and f"it calls {text!r}: {reason}"
    if key in ("expr_str", "guards_code"):
        return "" if is_arithmetic(text) else f"it has the expression {text[:LONGEST_TEXT]!r}"
    if key in ("in_spec", "out_spec"):
        return (
            ""
            if _is_nesting(text)
            else f"its arguments are nested in more than tuples, lists and dictionaries: {text[:200]}"
        )
    known = {"target": TARGET, "as_operator": TARGET, "type": DEVICE}.get(key, PATH if key in PATHS else NAME)
    if known.fullmatch(text) or (key == "as_float" and text in INFINITE):
        return ""
    return f"it has the {key} {text[:LONGEST_TEXT]!r}, which torch would write into code"


def _is_nesting(text: str) -> bool:
    """Return whether a description of nested arguments names only containers and plain keys."""
    try:
        version, root = json.loads(text) if text else (1, None)
        stack = [] if root is None else [root]
        while stack:
            one = stack.pop()
            stack += one["children_spec"]
            if one["type"] is None:
                continue
            context = one["context"] if one["context"] is None else json.loads(one["context"])
            if one["type"] not in CONTAINERS or not all(PATH.fullmatch(str(key)) for key in _leaves(context)):
                return False
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return False
    return version == 1


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield "?"  # an object that JSON would make
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    else:
        yield value
