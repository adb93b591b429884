"""The Python file that rebuilds one model with torch and the model's own package: `model.py` of a standalone folder."""

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from prunekit.backends.folders import included_parts
from prunekit.backends.folders.builders import Builder
from prunekit.backends.folders.bundled_source import (
    Bundle,
    importable_module,
    is_name,
    lines_of,
    module_at,
    text_of,
    without,
    wrapped,
)
from prunekit.backends.folders.differences import Differences
from prunekit.channels.rewrite.source_rewriter import ORDERED, SizedMethod, original_of, sized_methods
from prunekit.channels.tracing.substitutes import SizedAttention
from prunekit.errors import RunError
from prunekit.hooks.model_copy import named_tensors
from prunekit.models.interface import ModelInterface
from prunekit.utils.display import listed

WEIGHTS = "model.safetensors"
ATTRIBUTES = "attributes.safetensors"
MANIFEST = "manifest.json"
CODE = "model.py"
_PARTS = included_parts.__name__
_FOR_PRUNING = ("dense_scale", "take_sizes", "fits_original", "heads", "projection")
"""Members of substitutes that only pruning needs."""


@dataclass(frozen=True, eq=False)
class FileContents:
    """Contents of a file: what it is written from."""

    model: nn.Module  # the model; paths of its modules are those of the dense one where it has them
    dense: nn.Module  # that its builder makes; the model itself if there is no builder
    builder: Builder | None  # of the dense model; None if only the reader can build it
    empty: bool  # whether it can be built without values
    changes: Differences  # that the dense model needs
    interface: ModelInterface  # of the model
    checksums: Mapping[str, str]  # SHA-256 of the files of tensors by name
    channels_last: bool  # whether kernels are channels last
    sparse: Mapping[str, list[Any]]  # layout and shape of sparse tensors, by name
    written: str  # by what, and from what, in words


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters and buffers, each with the name that its tensor is stored under."""
    first = {id(tensor): name for name, tensor in named_tensors(model)}
    names = [
        (f"{path}.{name}".lstrip("."), tensor)
        for path, module in model.named_modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    return {name: first[id(tensor)] for name, tensor in names if first[id(tensor)] != name}


def text_of_file(contents: FileContents) -> str:
    """Return the text of the file."""
    bundle = Bundle()
    for name in ("load", "build", "change", "preprocess", "main", "model", "HERE", "TIES", "FROZEN"):
        bundle.take_name(name)
    for name in ("Path", "nn", "read_tensors", "set_tensors"):
        bundle.include(_PARTS, name)
    if contents.channels_last:
        bundle.include("prunekit.utils.tensors", "with_channels_last")
    if contents.sparse:
        bundle.include("prunekit.channels.tracing.storages", "from_parts")
    built = _build(contents, bundle)
    changed = _change(contents, bundle)
    images = _preprocess(contents.interface, bundle)
    parts = [
        _opening(contents),
        "from __future__ import annotations\n\n",
        bundle.text(),
        "\n\n" + _constants(contents),
        *(f"\n\n{part}" for part in (built, changed, _load(contents), images) if part),
    ]
    if images:
        parts.append('\n\nif __name__ == "__main__":\n    main(sys.argv[1:])\n')
    text = "".join(parts)
    ast.parse(text)
    return text


def _opening(contents: FileContents) -> str:
    name = original_of(type(contents.model)).__name__
    needs = ["torch", "safetensors"] + (["numpy", "pillow"] if contents.interface.preprocessing else [])
    builder = contents.builder
    if builder is not None and builder.package:
        needs.append(builder.package)
    given = "" if builder is not None else "dense"
    use = ["", f"    from model import load; model = load({given})", ""]
    if contents.interface.preprocessing:
        use = ["", "    python model.py image.jpg", *use]
    lines = [
        f'"""{name}: one trained model, rebuilt without prunekit. {contents.written}',
        *use,
        f"Needs {', '.join(needs)}. `build` makes the dense structure, `change` states what is different in",
        f"this model, and `load` puts in the tensors of {WEIGHTS}, whose checksum is checked.",
        '"""',
    ]
    return "\n".join(lines) + "\n\n"


def _constants(contents: FileContents) -> str:
    frozen = [name for name, parameter in contents.model.named_parameters() if not parameter.requires_grad]
    text = "HERE = Path(__file__).parent\n" + lines_of(contents.checksums, "SHA256")
    text += lines_of(ties_of(contents.model), "TIES") + '"""Further names of tensors that several modules share."""\n'
    if len(frozen) > 2:
        text += "FROZEN = (\n" + "".join(f"    {name!r},\n" for name in frozen) + ")\n"
    else:
        text += f"FROZEN: tuple[str, ...] = {tuple(frozen)!r}\n"
    return text + '"""Parameters without gradients."""\n'


def _build(contents: FileContents, bundle: Bundle) -> str:
    builder = contents.builder
    if builder is None:
        return ""
    for module in builder.modules:
        bundle.module(module)
    for module, name in builder.included:
        bundle.include(module, name)
    code = ast.parse(builder.code, mode="eval")
    for name, module in (builder.names or {}).items():
        bound = bundle.bind(name, lambda alias, m=module, n=name: _import(m, n, alias))  # type: ignore[misc]
        for node in ast.walk(code):
            if isinstance(node, ast.Name) and node.id == name:
                node.id = bound
    comment = "    # the code of the model's owner\n" if builder.own else ""
    body = f"    return {wrapped(ast.unparse(code), 4)}\n"
    if builder.own:
        body = f"    built = {ast.unparse(code)}\n    return built[0] if isinstance(built, tuple) else built\n"
    return f'def build() -> nn.Module:\n    """Build the dense model, whose values are replaced."""\n{comment}{body}'


def _import(module: str, name: str, alias: str) -> str:
    return f"from {module} import {name}" + ("" if alias == name else f" as {alias}")


def _load(contents: FileContents) -> str:
    dense = "dense: nn.Module | Callable[[], nn.Module], " if contents.builder is None else ""
    made = ["    model = build()"]
    if contents.builder is None:
        made = ["    model = copy.deepcopy(dense) if isinstance(dense, nn.Module) else dense()"]
    elif contents.empty:
        made = ["    with without_values():", "        model = build()"]
    reading = [f'    tensors = read_tensors(Path(folder) / "{WEIGHTS}", SHA256["{WEIGHTS}"])']
    if contents.channels_last:
        reading.append("    tensors = {name: with_channels_last(tensor) for name, tensor in tensors.items()}")
    if contents.sparse:
        reading.append("    for name, (layout, shape) in SPARSE.items():")
        reading.append('        keys = sorted(key for key in tensors if key.rpartition(":")[0] == name)')
        reading.append("        tensors[name] = from_parts(layout, shape, [tensors.pop(key) for key in keys])")
    if contents.changes.tensors:
        reading.append(f'    attributes = read_tensors(Path(folder) / "{ATTRIBUTES}", SHA256["{ATTRIBUTES}"])')
    about = "Return the model, in eval mode on the CPU"
    about += "; `dense` is the dense model, which is not changed, or builds it." if dense else "."
    lines = [
        f"def load({dense}folder: str | Path = HERE) -> nn.Module:",
        f'    """{about}"""',
        *reading,
        *made,
        f"    change(model{', attributes' if contents.changes.tensors else ''})",
        "    set_tensors(model, tensors, TIES, FROZEN)",
        "    return model.eval()",
    ]
    sparse = ""
    if contents.sparse:
        sparse = f"SPARSE = {json.dumps(dict(contents.sparse))}\n\n\n"
    return sparse + "\n".join(lines) + "\n"


def _change(contents: FileContents, bundle: Bundle) -> str:
    changes, dense = contents.changes, contents.dense
    if contents.builder is None:
        bundle.imports["copy"] = "import copy"
        bundle.imports["Callable"] = "from collections.abc import Callable"
    elif contents.empty:
        bundle.include("prunekit.hooks.model_copy", "without_values")
    if changes.folded:
        bundle.imports["OrderedDict"] = "from collections import OrderedDict"
    if any("torch." in text for named in changes.attributes.values() for text in named.values()):
        bundle.module("torch")
    lines: list[str] = []
    if changes.shorter:
        bundle.include("prunekit.channels.cut.shorter_model", "shorten_")
        bundle.include("prunekit.channels.labels.branch", "Shortening")
        lines.append("# blocks that are gone, and the constants in their place")
        lines.append(f"shorten_(model, Shortening.from_json({wrapped(repr(changes.shorter.as_json()), 4, 42)}))")
    for path, has_place in changes.gone.items():
        place = _place(dense, path)
        lines.append(f"{place} = None" if has_place else f"del {place}")
    if changes.folded:
        lines.append("# norms that the layers before them do the work of; what they ran after it stays")
    for path in _all_paths(contents.model, changes.folded):
        inside = f"OrderedDict({module_at(dense, path)}.named_children())"
        lines.append(f"{_place(dense, path)} = nn.Sequential({inside})")
    names = _classes(contents, bundle)
    for path, cls in changes.classes.items():
        lines.append(f"{module_at(dense, path)}.__class__ = {names[cls]}")
    order = {path: index for index, (path, _) in enumerate(contents.model.named_modules())}
    changed = {*changes.attributes, *changes.methods, *changes.tensors}
    for path in sorted(changed, key=lambda path: order.get(path, len(order))):
        owner = module_at(dense, path)
        for name, text in changes.attributes.get(path, {}).items():
            lines.append(_assignment(owner, name, text))
        for name, method in changes.methods.get(path, {}).items():
            lines.append(_assignment(owner, name, f"{owner}.{method}"))
        for name in changes.tensors.get(path, {}):
            lines.append(_assignment(owner, name, f"attributes[{f'{path}.{name}'.lstrip('.')!r}]"))
    extra = ", attributes: dict[str, Tensor]" if changes.tensors else ""
    if changes.tensors:
        bundle.include(_PARTS, "Tensor")
    body = "".join(f"    {line}\n" for line in lines)
    return (
        f'def change(model: nn.Module{extra}) -> None:\n    """Set what is different from the dense model."""\n{body}'
    )


def _all_paths(model: nn.Module, paths: list[str]) -> list[str]:
    """Return all paths of modules that may be at several places."""
    if not paths:
        return []
    wanted = {id(model.get_submodule(path)) for path in paths}
    return [path for path, module in model.named_modules(remove_duplicate=False) if id(module) in wanted]


def _place(model: nn.Module, path: str) -> str:
    """Return what a module at a path is assigned to."""
    place = module_at(model, path)
    if ".get_submodule(" not in place:
        return place
    parent, _, name = path.rpartition(".")
    return f"{module_at(model, parent)}._modules[{name!r}]"


def _assignment(owner: str, name: str, value: str) -> str:
    if is_name(name):
        return f"{owner}.{name} = {wrapped(value, 4, len(owner) + len(name) + 4)}"
    return f"setattr({owner}, {name!r}, {value})"


def _classes(contents: FileContents, bundle: Bundle) -> dict[type, str]:
    """Include the source of classes that the model has in place of its own, and return their names."""
    names: dict[type, str] = {}
    for cls in dict.fromkeys(contents.changes.classes.values()):
        if issubclass(cls, SizedAttention):
            names[cls] = bundle.include(cls.__module__, cls.__name__, _for_running)
        else:
            names[cls] = _sized_class(cls, bundle)
    return names


def _for_running(statement: ast.stmt, source: str) -> str:
    """Return the source of a substitute without what only pruning needs."""
    if not isinstance(statement, ast.ClassDef):
        return text_of(statement, source)
    text = without(statement, source, _FOR_PRUNING)
    base = SizedAttention.__name__
    return text.replace(f"({base}, ", "(", 1).replace(f"({base})", "(nn.Module)", 1)


def _sized_class(cls: type, bundle: Bundle) -> str:
    """Define a subclass whose methods have explicit sizes, and return its name."""
    original = original_of(cls)
    try:
        base = bundle.class_in_library(original)
        name = bundle.take_name(original.__name__)
        methods = [_method(method, bundle) for method in sized_methods(cls)]
    except LookupError as error:
        raise RunError(
            f"{original.__name__}: its methods were compiled again with explicit sizes, and {error}; prune with "
            "plain_classes=True, which keeps all classes as they are, or define the class at the top of a module"
        ) from None
    about = [f'    """`{base}` with explicit sizes, which `change` sets, in these expressions:', ""]
    for method in sized_methods(cls):
        about += [f"    {place.attribute}: {' '.join(place.text.split())}" for place in method.places]
    about = [line.replace("\\", "\\\\").replace('"""', "'''") if number else line for number, line in enumerate(about)]
    bodies = ["".join(f"    {line}".rstrip() + "\n" for line in text.splitlines()) for text in methods]
    bundle.define(name, "\n".join([f"class {name}({base}):", *about, '    """', "", *bodies]))
    return name


def _method(method: SizedMethod, bundle: Bundle) -> str:
    if method.enclosing():
        raise LookupError(f"{method.function.__qualname__} reads {listed(method.enclosing(), 3)} of a function around")
    base = bundle.class_in_library(method.base)
    other: dict[str, str] = {}
    for name, value in method.globals().items():
        if isinstance(value, ModuleType):
            bound = bundle.bind(name, lambda alias, v=value.__name__: _import_module(v, alias))  # type: ignore[misc]
        else:
            module = _home_of(name, value, method.base)
            bound = bundle.bind(name, lambda alias, m=module, n=name: _import(m, n, alias))  # type: ignore[misc]
        if bound != name:
            other[name] = bound
    text = method.text(base, other)
    if ORDERED in text:
        bundle.include("prunekit.channels.tracing.call_sites", "ordered")
        text = text.replace(ORDERED, "ordered")
    return text


def _home_of(name: str, value: Any, base: type) -> str:
    """Return the module that a global is imported from: the one that defines it, or the one that reads it."""
    with suppress(AttributeError, ImportError, LookupError, TypeError):
        if value.__qualname__ == name:
            return importable_module(value)
    return importable_module(base)


def _import_module(module: str, alias: str) -> str:
    parent, _, last = module.rpartition(".")
    if module == alias:
        return f"import {module}"
    if parent and last == alias:
        return f"from {parent} import {last}"
    return f"import {module} as {alias}"


def _preprocess(interface: ModelInterface, bundle: Bundle) -> str:
    """Return the functions that turn images into the input, and print the best classes; empty without preprocessing."""
    if interface.preprocessing is None:
        return ""
    for name in ("image_input", "scores_of", "best_classes"):
        bundle.include(_PARTS, name)
    for module in ("json", "sys", "torch"):
        bundle.module(module)
    for name in ("PathLike", "Image", "Tensor"):
        bundle.include(_PARTS, name)
    table = interface.preprocessing.as_dict()
    lines = [f"        {name}={tuple(value) if isinstance(value, list) else value!r}," for name, value in table.items()]
    settings = "\n".join(lines)
    return f'''def preprocess(image: str | PathLike[str] | Image.Image) -> Tensor:
    """Return the model's input (channels, height, width) of an image, or of the path of one."""
    return image_input(
        image,
{settings}
    )


def main(images: list[str]) -> None:
    """Print the best classes of each image file."""
    classes = json.loads((HERE / "{MANIFEST}").read_text(encoding="utf-8"))["interface"]["classes"]
    if not images:
        sys.exit("usage: python model.py image.jpg ...")
    model = load()
    with torch.inference_mode():
        for image in images:
            print(image)
            scores = scores_of(model(preprocess(image)[None]))
            if scores.dim() == 2:
                print("\\n".join(best_classes(scores[0], classes)))
            else:
                print(f"output: {{tuple(scores.shape)}}")
'''
