"""Helpers of functions that launch kernels: supported inputs, and properties of the device."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton.language as tl
from torch import Tensor

from cab_hf.capability import NAMED, NONE, capability

# maximum over no entries; finite, because the difference of two infinities is NaN
LOWEST = tl.constexpr(-1.0e30)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256


def unavailable(x: Tensor) -> str | None:
    """Return why the selection kernels do not support ``x``; None if ``x`` is supported.

    The reason is a predicate without a subject, e.g. "supports float32, not float64".
    """
    if not x.is_cuda:
        return f"runs on CUDA devices only, not {x.device.type}"
    if x.dtype not in DTYPES:
        return f"supports float16, bfloat16 and float32, not {x.dtype}"
    if x.shape[-1] > LARGEST_HEAD_DIM:
        return f"supports head dims up to {LARGEST_HEAD_DIM}, not {x.shape[-1]}"
    return None


def on_device_of(x: Tensor) -> torch.cuda.device | nullcontext:
    """Return a context that makes the device of ``x`` current, because Triton launches there."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()


def early(x: Tensor) -> dict[str, bool]:
    """Return the launch options for programmatic dependent launch on the device of ``x``.

    The kernel then starts before the previous kernel ends. With ``EARLY``, a kernel must wait for
    the previous kernel before it reads that kernel's results. GPUs below compute capability 9.0 do
    not support this launch, so ``EARLY`` is False.
    """
    ahead = capability(x.device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if ahead else {"EARLY": False}


def registers(x: Tensor, most: int) -> dict[str, int]:
    """Return the launch option that limits registers per thread to ``most``; {} on AMD's GPUs."""
    return {"maxnreg": most} if packed(x) else {}


def packed(x: Tensor) -> bool:
    """Return True if ``x`` is on an NVIDIA GPU, so that kernels may use PTX instructions."""
    return capability(x.device) > NONE


def reads_by_descriptor(device: torch.device | str) -> bool:
    """Return True if kernels read tiles by tensor descriptors on ``device``.

    Descriptors are faster where tensor cores read shared memory: on Hopper, and on Blackwell for
    data centres. For older GPUs and AMD's, Triton compiles a descriptor to one load per number.
    On compute capability 12.0, tiles are copied to registers and spill. Triton's interpreter on a
    CPU reads by descriptors.
    """
    interpreted = NAMED is None and torch.device(device).type == "cpu"
    return interpreted or (9, 0) <= capability(device) < (12, 0)


def padding(valid: Tensor | None) -> tuple[Tensor | None, int, Tensor | None]:
    """Return the arguments that describe padding to a decode kernel.

    Args:
        valid: bool [B, N_k], False for padding; None without padding.

    Returns:
        mask: ``valid`` with contiguous rows; None without padding.
        batch_stride: Elements between two rows of the mask; 0 without padding.
        first: int32 [B], the first real token of each row; None without padding.
    """
    if valid is None:
        return None, 0, None
    valid = valid if valid.stride(-1) == 1 else valid.contiguous()
    return valid, valid.stride(0), valid.int().argmax(-1).int()
