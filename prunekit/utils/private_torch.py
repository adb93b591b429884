"""Private names of torch and Accelerate that this package needs: no other module uses any; a test tells what is gone.

What is public in all supported versions is not here, nor are documented functions in modules with an underscore
(`torch._dynamo.reset`, `torch._inductor.aoti_compile_and_package`).
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils import _device, _python_dispatch

ACCELERATE_HOOK = "_hf_hook"
"""The attribute of a module in which Accelerate keeps what moves its weights."""
ACCELERATE_PREPARED = "_is_accelerate_prepared"
"""The attribute of what Accelerate has prepared, and would not prepare again."""


without_torch_function = torch._C.DisableTorchFunction
"""A context in which no mode and no subclass sees calls of torch's functions."""
without_torch_dispatch = torch._C._DisableTorchDispatch
"""A context in which no mode and no subclass sees operators at the dispatcher."""
is_functorch_wrapper = torch._C._functorch.is_functorch_wrapped_tensor
"""Returns whether a tensor is the wrapper of a transform of functions."""
has_storage = torch._C._has_storage
"""Returns whether a tensor has memory of its own, or of what it is a view of."""
operator_names = torch._C._dispatch_get_all_op_names
"""Returns the names of all operators that torch's dispatcher has, such as `aten::add.Tensor`."""


def in_backward() -> bool:
    """Return whether a backward pass is running in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_function_transform() -> bool:
    """Return whether a transform of functions, such as `torch.vmap`, is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def dispatches(tensor: Tensor) -> bool:
    """Return whether a tensor's class handles operators itself."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def is_composite(name: str) -> bool:
    """Return whether an operator is computed by others, whose gradients are its only ones."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, DispatchKey.CompositeImplicitAutograd))


def explicit_kernel(operator: HigherOrderOperator) -> Any:
    """Return the function that computes a higher-order operator by others; None if there is none."""
    return operator.py_kernels.get(DispatchKey.CompositeExplicitAutograd)


def backward_compiled_at_once() -> AbstractContextManager[Any]:
    """Return a context in which `torch.compile` compiles a backward pass together with its forward pass."""
    return torch._functorch.config.patch(force_non_lazy_backward_lowering=True)  # type: ignore[no-any-return]


def has_compiled(code: CodeType) -> bool:
    """Return whether `torch.compile` has compiled a function."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return bool(_debug_get_cache_entry_list(code))


def operator_schema(name: str, overload: str) -> Any:
    """Return the schema of an operator that torch's dispatcher has; None if there is none of this name."""
    overload = "" if overload == "default" else overload
    try:
        if not torch._C._dispatch_has_kernel(f"{name}.{overload}" if overload else name):
            return None  # such as those of TorchScript alone: aten::save
    except RuntimeError:  # of a name that no operator may have
        return None
    found = torch._C._jit_get_schemas_for_operator(name)
    return next((schema for schema in found if schema.overload_name == overload), None)


def archive_reader(path: Path) -> Any:
    """Return torch's own reader of the ZIP archives that it writes; it raises RuntimeError for a damaged one."""
    return torch._C.PyTorchFileReader(str(path))


def function_modes() -> list[Any]:
    """Return the modes that see calls of torch's functions, the innermost last; the default device is one of them."""
    return [torch._C._get_function_stack_at(depth) for depth in range(torch._C._len_torch_function_stack())]


def set_function_modes(modes: list[Any]) -> None:
    """Put modes in the place of those that see calls of torch's functions."""
    if function_modes() != modes:
        for _ in range(torch._C._len_torch_function_stack()):
            torch._C._pop_torch_function_stack()
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)
    _device.CURRENT_DEVICE = next((one.device for one in modes if isinstance(one, _device.DeviceContext)), None)


def dispatch_modes() -> tuple[int, dict[str, bool]]:
    """Return how many modes see operators at the dispatcher, and what torch notes of them."""
    noted = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    return torch._C._len_torch_dispatch_stack(), noted


def leave_dispatch_modes(state: tuple[int, dict[str, bool]]) -> None:
    """Leave the innermost modes that see operators at the dispatcher, until those of `dispatch_modes` are left."""
    count, noted = state
    while torch._C._len_torch_dispatch_stack() > count:
        torch._C._pop_torch_dispatch_stack(None)
    vars(_python_dispatch).update(noted)
    told = noted.get("_is_in_any_mode_without_ignore_compile_internals")  # which older versions don't note
    if told is not None:
        torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals(told)


def global_hooks() -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Return the tables of hooks on all modules and all optimizers, each with a copy."""
    places = vars(torch.nn.modules.module), vars(sys.modules["torch.optim.optimizer"])
    tables = [
        table for place in places for name, table in place.items() if name.startswith("_global_") and "_hooks" in name
    ]
    return [(table, dict(table)) for table in tables if isinstance(table, dict)]


def set_global_hooks(tables: list[tuple[dict[int, Any], dict[int, Any]]]) -> None:
    """Let the tables hold what they held when `global_hooks` returned them."""
    for table, content in tables:
        if table.keys() != content.keys():
            table.clear()
            table.update(content)


def compile_stance() -> Any:
    """Return how compiled functions run; None if nothing has imported the compiler."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return None if frames is None else frames._stance


def set_compile_stance(stance: Any) -> None:
    """Set how compiled functions run, to what `compile_stance` returned."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None and frames._stance is not stance:
        frames._set_stance(frames.DynamoStance() if stance is None else stance)


@contextmanager
def onnx_operators_read_once() -> Iterator[None]:
    """Let torch's exporter keep what it reads of ONNX operators: it parses the source of all 500 for each export."""
    from torch.onnx._internal import _lazy_import

    apis: Any = vars(_lazy_import).get("onnxscript_apis")  # a stand-in for a module, which other versions may not have
    if apis is None:
        yield
        return
    try:
        vars(apis)["get_torchlib_ops"] = functools.partial(_onnx_operators, apis)
        yield
    finally:
        vars(apis).pop("get_torchlib_ops", None)


@functools.cache
def _onnx_operators(apis: Any) -> Any:
    return type(apis).__getattr__(apis, "get_torchlib_ops")()  # of the module behind it
