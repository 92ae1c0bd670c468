"""Exact causal attention by the kernels of flash-attn-3 or flash-attn-4, if one is installed.

PyTorch has no kernel that is as fast on a Hopper GPU, and none for the last queries of a sequence.
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

DTYPES = (torch.float16, torch.bfloat16)
# the fastest first, by eval/results/speed-attention; the wheel of flash-attn-3 without a backward
# pass has a module of its own
MODULES = ("flash_attn_interface", "fa3_fwd_interface", "flash_attn.cute")
MAX_HEAD_DIM = 256
# with fewer queries, SDPA and sparse decode kernels are as fast
LEAST_QUERIES = 128


def unavailable(work: Workload, q_length: int) -> str | None:
    """Return why these kernels should not run, as half a sentence; None if they should.

    Args:
        work: the call, without sinks and soft caps.
        q_length: number of queries.
    """
    if work.training or torch.compiler.is_compiling():
        return "are only used in forward passes that are not compiled"
    if work.device != "cuda" or capability()[0] != HOPPER:
        return "were only measured on Hopper GPUs"
    if work.dtype not in DTYPES or work.head_dim > MAX_HEAD_DIM or work.head_dim % 8:
        return f"support 16 bits and head dims up to {MAX_HEAD_DIM} that are multiples of 8"
    if work.value_dim is not None:
        return "need values with the head dim of the queries"
    if q_length < LEAST_QUERIES:
        return f"are only used from {LEAST_QUERIES} queries on"
    return (
        "need flash-attn-3 or flash-attn-4, which are not installed" if _kernel() is None else None
    )


@cache
def _kernel() -> Callable[..., Any] | None:
    """Return the function of the first module that can be imported; None if there is none."""
    for name in MODULES:
        # flash-attn-2 contains flash_attn.cute without the packages that it imports
        with suppress(ImportError, AttributeError, OSError):
            return import_module(name).flash_attn_func
    return None


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return causal attention [B, H, N_q, D] of the last N_q positions.

    Args:
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D] with N_k >= N_q.
        scale: factor of the logits.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = _kernel()(q, k, v, softmax_scale=scale, causal=True)
    # some versions return the log-sum-exp too
    out = out[0] if isinstance(out, tuple) else out
    return out.transpose(1, 2)
