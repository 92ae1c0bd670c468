"""The kernels of a sparse decode step; `reference` of this package defines them.

The index of a new key is one launch, a step six: four choose the keys that are read, one attends
them, one merges. Nothing waits for the device and no shape depends on the length of the text, so
that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from torch import Tensor

from cab_hf.capability import NONE, capability
from cab_hf.ops import launch
from cab_hf.ops.decode.attend_kernels import attend
from cab_hf.ops.decode.choose_kernels import choose
from cab_hf.ops.decode.index_kernel import index_keys, write_index

__all__ = ["attend", "choose", "index_keys", "unavailable", "write_index"]


def unavailable(x: Tensor) -> str | None:
    """Why q or k is not for the kernels, as half a sentence; None when it is."""
    if NONE < capability(x.device) < (8, 0):
        return "runs on GPUs of compute capability 8.0 and newer"
    return launch.unavailable(x)
