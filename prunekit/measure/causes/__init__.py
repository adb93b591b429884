"""Why a pruned model is not as fast as its multiply-accumulates say: one function per cause, over measured figures.

Each returns None where the figures do not show its cause.
"""

from prunekit.measure.causes.batches import small_batch
from prunekit.measure.causes.cause import Cause
from prunekit.measure.causes.kernels import KernelTimes, slower_kernels
from prunekit.measure.causes.launches import launch_bound
from prunekit.measure.causes.layouts import copying, other_layout
from prunekit.measure.causes.masks import masks_attached
from prunekit.measure.causes.memory import memory_bound
from prunekit.measure.causes.norms import unfused_norms
from prunekit.measure.causes.others import without_macs
from prunekit.measure.causes.small_numbers import subnormal_numbers
from prunekit.measure.causes.threads import too_many_threads
from prunekit.measure.causes.widths import WidthTimes, off_step_widths

__all__ = [
    "Cause",
    "KernelTimes",
    "WidthTimes",
    "copying",
    "launch_bound",
    "masks_attached",
    "memory_bound",
    "off_step_widths",
    "other_layout",
    "slower_kernels",
    "small_batch",
    "subnormal_numbers",
    "too_many_threads",
    "unfused_norms",
    "without_macs",
]
