"""Operators that a program of unknown origin may call: those that compute tensors from tensors, and do nothing else.

An operator is in the list by what its schema says, as torch has it loaded: it is of a namespace of tensor operators,
it takes and returns tensors, numbers, dtypes, layouts and devices alone, and the only texts that it takes are modes
such as `rounding_mode`. Files, streams, storages, script objects and process groups cannot be among its arguments,
then. Names that begin with an underscore are torch's own, and many of them trust their arguments with addresses or
indices that they don't check: of them, only those are in the list that `torch.export` gives.
"""

import re
from typing import Any

from prunekit.utils.private_torch import operator_schema

OPERATOR = re.compile(r"torch\.ops\.(?P<namespace>[a-z]\w*)\.(?P<name>\w+)(\.(?P<overload>\w+))?", re.ASCII)
NAMESPACES = frozenset({"aten", "torchvision", "quantized_decomposed", "transformers"})
"""Namespaces of tensor operators. Operators of others are refused, whatever they take."""
HIGHER_ORDER = frozenset({
    "associative_scan", "cond", "map_impl", "scan", "tag_activation_checkpoint", "while_loop", "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
})  # fmt: skip
"""Operators that run graphs of the same program, whose operators are judged like all others of the program."""
TYPES = frozenset({
    "Tensor", "int", "float", "bool", "complex", "number", "ScalarType", "Layout", "Device", "MemoryFormat",
})  # fmt: skip
"""Types of arguments and results, also optional ones and lists of them."""
ABSENT = "Optional[Generator]"
"""A type of which a program can only hold None."""
TEXTS = frozenset({
    "UPLO", "approximate", "assert_msg", "driver", "equation", "indexing", "interpolation", "mode", "norm", "ord", "p",
    "pad_mode", "padding", "padding_side", "reduce", "reduction", "rounding_mode", "side",
})  # fmt: skip
"""Arguments that are text: names of ways to compute, and messages of assertions."""
OWN = re.compile(
    r"__i?(and|or|xor|lshift|rshift)__|_adaptive_avg_pool[23]d|_aminmax|_assert_(async|scalar|tensor_metadata)|"
    r"_batch_norm_(no_update|with_update_functional)|_cdist_forward|_conj(_copy|_physical)?|_convolution(_mode)?|"
    r"_cum(max|min)_helper|_dim_arange|_embedding_bag(_forward_only)?|_euclidean_dist|_fft_(c2c|c2r|r2c)|"
    r"_functional_(assert_(async|scalar)|sym_constrain_range(_for_size)?)|_fused_rms_norm|_int_mm|_is_(all|any)_true|"
    r"_linalg_(det|eigh|eigvals|slogdet|solve_ex|svd)|_local_scalar_dense|_log_softmax|_logcumsumexp|_masked_softmax|"
    r"_native_batch_norm_legit(_functional|_no_training)?|_native_multi_head_attention|_neg_view(_copy)?|"
    r"_pack_padded_sequence|_pad_(circular|enum|packed_sequence)|_pdist_forward|_prelu_kernel|"
    r"_reshape_(alias|copy|from_tensor)|_safe_softmax|_scaled_dot_product_(attention_math|cudnn_attention|"
    r"efficient_attention|flash_attention(_for_cpu)?|fused_attention_overrideable)|_shape_as_tensor|_softmax|_stack|"
    r"_to_copy|_transform_bias_rescale_qkv|_transformer_encoder_layer_fwd|_trilinear|_unique2?|"
    r"_unsafe_(index(_put)?|masked_index|view)|_upsample_(bicubic2d_aa|bilinear2d_aa|nearest_exact[123]d)|"
    r"_weight_norm(_interface)?"
)
"""Names with an underscore that programs of `torch.export` have."""
NOT_PURE = re.compile(
    # gradients, which a program for inference has none of
    r".*_backward.*|retains?_grad|requires_grad_|"
    # storages and memory of other tensors
    r"set_?|set_data|data|shallow_copy_data_|resize.*|pin_memory|"
    # layouts of indices that are taken on trust
    r"sparse_.*tensor.*|sparse_resize.*|"
    # kernels of one library, which take packed weights: addresses in a tensor
    r"(cudnn|fbgemm|miopen|mps|quantized)_.*|.*mkldnn.*|lstm_mps.*|.*_overrideable|"
    r"batch_norm_(elemt|gather_stats|stats|update_stats).*"
)
"""Names without one that do more than compute a tensor, or that trust their arguments."""


def why_refused(target: str) -> str:
    """Return why a program may not call an operator; empty if it may."""
    match = OPERATOR.fullmatch(target)
    if match is None:
        return "it is no operator"
    namespace, name, overload = match["namespace"], match["name"], match["overload"]
    if namespace == "higher_order":
        known = name in HIGHER_ORDER and overload is None
        return "" if known else "it is not known to run only graphs of the program"
    if namespace not in NAMESPACES:
        return f"{namespace} is no namespace of operators that only compute tensors"
    schema = None if overload is None else operator_schema(f"{namespace}::{name}", overload)
    if schema is None:
        return "torch has no such operator loaded here"
    if (name.startswith("_") and not OWN.fullmatch(name)) or NOT_PURE.fullmatch(name):
        return "it may do more than compute a tensor"
    return next((f"it takes or returns {what}" for what in _unknown_types(schema)), "")


def _unknown_types(schema: Any) -> list[str]:
    """Return what an operator takes or returns besides tensors, numbers and modes."""
    values = [*schema.arguments, *schema.returns]
    written = [f"the output {one.name}" for one in schema.arguments if one.is_out]
    return written + [f"{one.name or 'a result'} ({one.type})" for one in values if not _is_plain(one)]


def _is_plain(value: Any) -> bool:
    kind = str(value.type)
    if kind == ABSENT:
        return True
    while match := re.fullmatch(r"(?:Optional|List)\[(.*)\]", kind):
        kind = match[1]
    return kind in TYPES or (kind == "str" and value.name in TEXTS)
