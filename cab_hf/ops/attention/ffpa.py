"""Dense causal attention by the CuTe kernels of ffpa-attn, for head dims where they are fastest."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from cab_hf.capability import HOPPER, capability

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16)
# head dims where, on Hopper, the forward pass of ffpa-attn is faster than that of `block` under a
# plan of all blocks; measured in eval/results/speed-attention-wide
FASTER_HEAD_DIMS = (512,)
# smallest number of tokens for which ffpa-attn runs its kernels; it passes shorter inputs to SDPA
MIN_LENGTH = 512


def unavailable(
    device: str, head_dim: int, dtype: torch.dtype, training: bool, length: int
) -> str | None:
    """Return why ffpa-attn should not compute a workload; None if ffpa-attn should compute it.

    The reason continues a sentence that starts with "ffpa-attn", e.g. "was only measured on Hopper
    GPUs".

    Args:
        device: Torch device type.
        head_dim: Channels of q, k and v.
        dtype: Dtype of q.
        training: True if q, k or v requires a gradient.
        length: Number of queries and of keys.
    """
    if device != "cuda" or capability()[0] != HOPPER:
        return "was only measured on Hopper GPUs"
    if training or head_dim not in FASTER_HEAD_DIMS or dtype not in SUPPORTED_DTYPES:
        return f"is only faster in forward passes with head dims {FASTER_HEAD_DIMS} and 16 bits"
    if length < MIN_LENGTH:
        return f"passes inputs of fewer than {MIN_LENGTH} tokens to SDPA"
    return _why_not_installed()


@cache
def _why_not_installed() -> str | None:
    """Return a reason for `unavailable` if a package is missing; None if all are installed."""
    if any(find_spec(package_name) is None for package_name in ("ffpa_attn", "cutlass")):
        return "needs the packages ffpa-attn and nvidia-cutlass-dsl, which are not installed"
    return None


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute dense causal attention, [B, H, N, D].

    Args:
        q: [B, H, N, D].
        k, v: [B, H_kv, N, D].
        scale: Factor of the products q · k.
    """
    from ffpa_attn import ffpa_attn_func

    return ffpa_attn_func(q, k, v, is_causal=True, scale=scale, enable_gqa=True, backend="cutedsl")
