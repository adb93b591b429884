"""Runtimes by name: what each needs and runs on, and the function that registers one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from prunekit import known_names
from prunekit.errors import UsageError
from prunekit.measure.runtimes.session import INT8, FileKey, Sample, Session, Setting, Source
from prunekit.utils.availability import missing_device, missing_packages
from prunekit.utils.registry import Registry

RUNTIMES: Registry[Runtime] = known_names.RUNTIMES
"""Runtimes by the name that recipes and rows of results have."""

Open = Callable[[Source, Sample, Setting], Session]


def _takes_all(setting: Setting) -> str:
    return ""


def _moves_none(setting: Setting) -> bool:
    return False


def _keeps_nothing() -> None:
    pass


@dataclass(frozen=True)
class Runtime:
    """A runtime of models; `register_runtime` describes the attributes.

    It is pickled for the process that measures, where its functions are imported from their modules.
    """

    name: str
    open: Open
    about: str = ""
    carrier: Literal["module", "onnx"] = "module"
    devices: tuple[str, ...] = ("cpu",)
    packages: tuple[str, ...] = ()
    install: str = ""
    refuse: Callable[[Setting], str] = _takes_all
    times_layers: bool = False
    moves_weights: Callable[[Setting], bool] = _moves_none
    measures_memory: bool = True
    typed_files: bool = False
    forget: Callable[[], object] = _keeps_nothing
    quantizer: Literal["", "onnxruntime", "nncf"] = ""

    def file_key(self, setting: Setting) -> FileKey:
        """Return the key of the file that a session in this setting is made from."""
        if setting.dtype == INT8:
            return setting.batch, f"{INT8} by {self.quantizer}"
        return setting.batch, setting.dtype if self.typed_files else "float32"

    def refusal(self, setting: Setting) -> str:
        """Return why it cannot run a setting on its devices, and what can; empty if it can."""
        if setting.dtype != INT8:
            return self.refuse(setting)
        if not self.quantizer:
            able = [name for name, runtime in RUNTIMES.items() if runtime.quantizer]
            return f"it runs no quantized files; {' and '.join(able)} do"
        if self.quantizer == "nncf" and find_spec("nncf") is None:
            return "int8 needs nncf, not installed here: pip install 'prunekit[int8]'"
        return self.refuse(setting)

    def missing(self) -> str:
        """Return which of its packages are not installed, and how to install them; empty if all are."""
        return missing_packages(self.packages, self.install)

    def unusable(self) -> str:
        """Return why it runs nothing at all on this machine, and what would help; empty if it is usable."""
        return self.missing() or missing_device(self.devices)


def register_runtime(
    name: str,
    *,
    about: str,
    carrier: Literal["module", "onnx"] = "module",
    devices: tuple[str, ...] = ("cpu",),
    packages: tuple[str, ...] = (),
    install: str = "",
    refuse: Callable[[Setting], str] = _takes_all,
    times_layers: bool = False,
    moves_weights: Callable[[Setting], bool] = _moves_none,
    measures_memory: bool = True,
    typed_files: bool = False,
    forget: Callable[[], object] = _keeps_nothing,
    quantizer: Literal["", "onnxruntime", "nncf"] = "",
) -> Callable[[Open], Open]:
    """Register a runtime: something that runs models and is timed, by `bench`, in recipes and as the target of plans.

    The decorated function makes a session from a source, a sample and a setting. It is called, and its sessions run,
    with the setting's number of torch threads, in inference mode, with its device as the current one, in a process of
    its own. The outputs of sessions are checked against the model in eager float32 before anything is timed.

    Args:
        name: for recipes, `--runtime` and rows of results.
        about: a description in one line.
        carrier: what it makes sessions from: the module itself, or the ONNX file that it is exported to.
        devices: types of device that it runs on: "cpu", "cuda", "mps".
        packages: those that it imports, besides torch.
        install: the command that installs them; by default `pip install` with their names.
        refuse: returns why it cannot run a setting on these devices; empty if it can.
        times_layers: whether its sessions have a layer clock; plans for the others are made from eager's layers.
        moves_weights: whether its sessions in a setting have a `move`.
        measures_memory: whether the growth of the process is the model's memory: not if building leaves more behind.
        typed_files: whether it computes in the dtype of its file; the others take files in float32.
        forget: called once a setting is done, to drop what is cached of its sessions.
        quantizer: what makes its files in int8, "onnxruntime" (ONNX files) or "nncf" (OpenVINO's); empty if it runs
            none, and is never asked for int8.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ValueError: the name is taken.

    Example:
        >>> import torch
        >>> import prunekit as pk
        >>> from prunekit.utils.inputs import call
        >>> from prunekit.measure.runtimes.eager import placed
        >>> @pk.register_runtime("fx", about="the graph of operators that torch.fx finds")
        ... def fx(source, sample, setting):
        ...     module, sample = placed(source, sample, setting)
        ...     graph = torch.fx.symbolic_trace(module)
        ...     return pk.Session(lambda: call(graph, sample))
        >>> pk.Target("fx").runtime
        'fx'
    """

    def register(function: Open) -> Open:
        how = (carrier, devices, packages, install, refuse, times_layers, moves_weights, measures_memory, typed_files)
        RUNTIMES.add(name, Runtime(name, function, about, *how, forget, quantizer), function)
        return function

    return register


def accept(reference: str, found: Any) -> Runtime:
    """Return the runtime for an object that `file.py:object` refers to: registered there, or made of a function."""
    if isinstance(found, Runtime):
        return found
    registered = next((each for each in RUNTIMES.imported if each.open is found), None)
    if registered is None and not callable(found):
        raise UsageError(
            f"{reference}: expected a function that is decorated by prunekit.register_runtime and takes a source, a "
            f"sample and a setting, got {type(found).__name__}"
        )
    return registered or Runtime(reference, found)
