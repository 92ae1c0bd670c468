"""Dense causal attention by the kernels of flash-attn-3 or flash-attn-4, if one is installed.

On a Hopper GPU, these kernels are faster than PyTorch's. Unlike PyTorch's fast kernels, these
kernels also support fewer queries than keys, where the queries are the last tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cab_hf.capability import HOPPER, capability
from cab_hf.ops import Workload

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16)
# modules with `flash_attn_func`, the fastest first, by eval/results/speed-attention: flash-attn-3,
# flash-attn-3 without a backward pass (a separate wheel), and flash-attn-4
MODULE_NAMES = ("flash_attn_interface", "fa3_fwd_interface", "flash_attn.cute")
MAX_HEAD_DIM = 256
# smallest number of queries; with fewer queries, SDPA and sparse decode kernels are as fast
MIN_QUERIES = 128


def unavailable(workload: Workload, q_length: int) -> str | None:
    """Return why flash-attn should not compute a workload; None if flash-attn should compute it.

    The reason continues a sentence that starts with "the kernels of flash-attn", e.g. "were only
    measured on Hopper GPUs".

    Args:
        workload: The workload, which must have neither sinks nor soft caps.
        q_length: Number of queries.
    """
    if workload.training or torch.compiler.is_compiling():
        return "are only used in forward passes that are not compiled"
    if workload.device != "cuda" or capability()[0] != HOPPER:
        return "were only measured on Hopper GPUs"
    if (
        workload.dtype not in SUPPORTED_DTYPES
        or workload.head_dim > MAX_HEAD_DIM
        or workload.head_dim % 8
    ):
        return f"support 16 bits and head dims up to {MAX_HEAD_DIM} that are multiples of 8"
    if workload.value_dim is not None:
        return "need values with the head dim of the queries"
    if q_length < MIN_QUERIES:
        return f"are only used from {MIN_QUERIES} queries on"
    if _import_flash_attn_func() is None:
        return "need flash-attn-3 or flash-attn-4, which are not installed"
    return None


@cache
def _import_flash_attn_func() -> Callable[..., Any] | None:
    """Return `flash_attn_func` of the first of `MODULE_NAMES` that can be imported, else None."""
    for module_name in MODULE_NAMES:
        # flash-attn-2 contains flash_attn.cute, but not the packages that flash_attn.cute imports
        with suppress(ImportError, AttributeError, OSError):
            return import_module(module_name).flash_attn_func
    return None


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention of queries that are the last N_q of N_k tokens, [B, H, N_q, D].

    Args:
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D] with N_k >= N_q.
        scale: Factor of the products q · k.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = _import_flash_attn_func()(q, k, v, softmax_scale=scale, causal=True)
    # some versions also return the log-sum-exp
    out = out[0] if isinstance(out, tuple) else out
    return out.transpose(1, 2)
