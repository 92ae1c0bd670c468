"""Kernels of a sparse decode step. Their definition is `cab_hf.ops.decode.reference`.

Writing the index of a new key takes one launch. A decode step takes six launches: four select keys,
one attends to the selected keys, one merges partial results. No launch synchronises with the
device, and no shape depends on the sequence length. Therefore a CUDA graph can capture a step.
"""

from __future__ import annotations

from torch import Tensor

from cab_hf.capability import NO_CAPABILITY, capability
from cab_hf.ops import launch
from cab_hf.ops.decode.attend_kernels import attend
from cab_hf.ops.decode.choose_kernels import choose
from cab_hf.ops.decode.index_kernel import index_keys, write_index

__all__ = ["attend", "choose", "index_keys", "unavailable", "write_index"]


def unavailable(x: Tensor) -> str | None:
    """Return why the decode kernels do not support ``x``; None if ``x`` is supported.

    The reason continues a sentence that starts with the name of the engine, e.g. "supports float32,
    not float64".
    """
    if NO_CAPABILITY < capability(x.device) < (8, 0):
        return "runs on GPUs of compute capability 8.0 and newer"
    return launch.unavailable(x)
