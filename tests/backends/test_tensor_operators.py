"""Programs of unknown origin may call operators that compute tensors, of all that torch and torchvision have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
import torchvision  # noqa: F401  # registers operators, some of which read and write files

from prunekit.backends.files.tensor_operators import why_refused
from prunekit.utils.private_torch import operator_names, operator_schema


def targets() -> Iterator[tuple[str, str]]:
    """Names of all operators that are registered, and how programs name them."""
    for name in operator_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        yield name, f"torch.ops.{namespace}.{base}.{overload or 'default'}"


@cache
def allowed() -> frozenset[str]:
    return frozenset(name for name, target in targets() if not why_refused(target))


def test_operators_are_of_tensor_namespaces_alone() -> None:
    assert {name.partition("::")[0] for name in allowed()} - {"quantized_decomposed", "transformers"} == {
        "aten",
        "torchvision",
    }
    registered = {name.partition("::")[0] for name in operator_names()}
    assert {"image", "c10d", "prims", "inductor", "profiler", "symm_mem"} <= registered, "there is something to refuse"
    assert len(allowed()) > 1000


EFFECTS = re.compile(
    r"file|save|load|read|write|print|debug|pointer|ptr|address|storage(?!_offset$)|pin_memory|record_stream|seed|"
    r"cache(?!mask)|unsafe_(?!index|masked_index$|view|chunk|split)|_unsafe$|plan|profil|stream|wait|send|recv|barrier|"
    r"reduce_scatter|all_gather|set_data|(^|_)set_?$|shallow_copy|resize|backend|pack_gemm|prepack|_test_|foobar"
)
"""Names that say what tensors are not made by."""


def test_no_name_speaks_of_effects() -> None:
    names = {name.partition("::")[2].partition(".")[0] for name in allowed()}
    assert {name for name in names if EFFECTS.search(name)} == set()
    refused = {name.partition("::")[2].partition(".")[0] for name in operator_names()} - names
    assert {"from_file", "read_file", "write_file", "set_", "set_data", "_index_put_impl_"} <= refused
    assert {"_sparse_coo_tensor_unsafe", "fbgemm_linear_int8_weight", "_print", "_cufft_clear_plan_cache"} <= refused


def test_texts_are_names_of_modes() -> None:
    """Every argument that is text, of every operator that is allowed: none is a file, a code or a group."""
    texts, types = set(), set()
    for name in allowed():
        base, _, overload = name.partition(".")
        schema = operator_schema(base, overload)
        for value in (*schema.arguments, *schema.returns):
            types.add(re.sub(r"Optional|List|[\[\]]", "", str(value.type)))
            if "str" in str(value.type):
                texts.add(value.name)
    assert types <= {
        "Tensor", "int", "float", "bool", "complex", "number", "ScalarType", "Layout", "Device", "MemoryFormat",
        "Generator", "str",
    }  # fmt: skip
    assert texts <= {
        "UPLO", "approximate", "assert_msg", "driver", "equation", "indexing", "interpolation", "mode", "norm", "ord",
        "p", "pad_mode", "padding", "padding_side", "reduce", "rounding_mode", "side",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("torch.ops.image.write_file.default", "image is no namespace"),
        ("torch.ops.image.decode_image.default", "image is no namespace"),
        ("torch.ops.debugprims.load_tensor.default", "debugprims is no namespace"),
        ("torch.ops.c10d.broadcast_.default", "c10d is no namespace"),
        ("torch.ops.aten.save.default", "torch has no such operator"),
        ("torch.ops.aten.warn.default", "torch has no such operator"),
        ("torch.ops.aten.from_file.default", "it takes or returns filename"),
        ("torch.ops.aten.from_file.out", "the output out"),
        ("torch.ops.aten.set_.source_Tensor", "more than compute"),
        ("torch.ops.aten.add.out", "the output out"),
        ("torch.ops.aten.add.__init__", "torch has no such operator"),
        ("torch.ops.aten.add", "torch has no such operator"),
        ("torch.ops.aten.relu", "torch has no such operator"),
        ("torch.ops.aten._foobar.default", "more than compute"),
        ("torch.ops.mine.count.default", "mine is no namespace"),
        ("torch.ops.higher_order.aoti_call_delegate", "not known to run only graphs"),
        ("torch.ops.higher_order.inline_asm_elementwise", "not known to run only graphs"),
        ("torch.ops.higher_order.print", "not known to run only graphs"),
        ("torch.ops.higher_order.cond.default", "not known to run only graphs"),
        ("torch.ops.load_library", "no operator"),
        ("torch.ops.aten.relu.default.__class__", "no operator"),
        ("os.system", "no operator"),
    ],
)
def test_others_are_refused_by_name(target: str, reason: str) -> None:
    assert reason in why_refused(target)


@pytest.mark.parametrize(
    "target",
    [
        "aten.conv2d.default", "aten.conv2d.padding", "aten.relu_.default", "aten.einsum.default", "aten.gelu.default",
        "aten.div.Tensor_mode", "aten.lstm.input", "aten._softmax.default", "aten._assert_scalar.default",
        "aten._to_copy.default", "aten.scaled_dot_product_attention.default", "aten.index_put_.default",
        "aten.dropout.default", "aten.bernoulli.p", "aten.unbind.int", "aten.sym_size.int", "aten.item.default",
        "aten.__and__.Tensor", "aten.meshgrid.indexing", "aten.empty.memory_format", "aten.upsample_bicubic2d.vec",
        "torchvision.nms.default", "torchvision.deform_conv2d.default", "torchvision.roi_align.default",
        "higher_order.cond", "higher_order.wrap_with_autocast",
    ],
)  # fmt: skip
def test_operators_of_usual_programs_are_allowed(target: str) -> None:
    assert why_refused(f"torch.ops.{target}") == ""
