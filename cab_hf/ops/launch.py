"""Helpers for launching kernels: checks of inputs, properties of the device, launch options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from cab_hf.capability import CAPABILITY_OVERRIDE, NO_CAPABILITY, capability

# initial value of a running maximum; not -inf, because the difference of two infinities is NaN
LOWEST_LOGIT = tl.constexpr(-1.0e30)
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256


def unavailable(x: Tensor) -> str | None:
    """Return why the kernels that select blocks or keys do not support ``x``; None if they do.

    The reason continues a sentence that starts with the name of the engine, e.g. "supports float32,
    not float64".
    """
    if not x.is_cuda:
        return f"runs on CUDA devices only, not {x.device.type}"
    if x.dtype not in SUPPORTED_DTYPES:
        return f"supports float16, bfloat16 and float32, not {x.dtype}"
    if x.shape[-1] > LARGEST_HEAD_DIM:
        return f"supports head dims up to {LARGEST_HEAD_DIM}, not {x.shape[-1]}"
    return None


def on_device_of(x: Tensor) -> torch.cuda.device | nullcontext:
    """Return a context in which the device of ``x`` is current: Triton uses the current device."""
    is_on_other_device = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if is_on_other_device else nullcontext()


@contextmanager
def fork_streams(x: Tensor, num_streams: int) -> Iterator[list[AbstractContextManager]]:
    """Run kernels on several streams of the device of ``x`` at the same time.

    Kernels that are launched in one of the yielded contexts run in order. Kernels of different
    contexts can run at the same time. All start after the earlier kernels of the current stream,
    and the later kernels of the current stream start after all of them. Tensors that these kernels
    use must be allocated outside of the yielded contexts, on the current stream.

    Args:
        x: Tensor on the device.
        num_streams: Number of streams, including the current stream.

    Yields:
        A context manager per stream, which makes the stream current. On a CPU, it does nothing.
    """
    if not x.is_cuda or num_streams == 1:
        yield [nullcontext()] * num_streams
        return
    current_stream = torch.cuda.current_stream(x.device)
    side_streams = _create_side_streams(x.device, current_stream.cuda_stream, num_streams - 1)
    for side_stream in side_streams:
        side_stream.wait_stream(current_stream)
    try:
        yield [torch.cuda.stream(stream) for stream in (current_stream, *side_streams)]
    finally:
        for side_stream in side_streams:
            current_stream.wait_stream(side_stream)


@cache
def _create_side_streams(
    device: torch.device, stream_handle: int, num_streams: int
) -> tuple[torch.cuda.Stream, ...]:
    """Create the side streams of the stream ``stream_handle``, once per process.

    Every stream has side streams of its own, because a stream that captures a CUDA graph must not
    share them.
    """
    return tuple(torch.cuda.Stream(device) for _ in range(num_streams))


def make_pdl_options(x: Tensor) -> dict[str, bool]:
    """Return the options of a kernel launch with programmatic dependent launch (PDL).

    With PDL, a kernel starts before the previous kernel ends. If ``USE_PDL`` is True, the kernel
    must call ``gdc_wait`` before it reads results of the previous kernel. ``USE_PDL`` is False on
    GPUs below compute capability 9.0, which do not support PDL.
    """
    has_pdl = capability(x.device) >= (9, 0)
    return {"USE_PDL": True, "launch_pdl": True} if has_pdl else {"USE_PDL": False}


def limit_registers(x: Tensor, max_registers: int) -> dict[str, int]:
    """Return the launch option that limits registers per thread; {} on AMD's GPUs."""
    return {"maxnreg": max_registers} if has_ptx(x) else {}


def has_ptx(x: Tensor) -> bool:
    """Return True if ``x`` is on an NVIDIA GPU, where kernels may use PTX instructions."""
    return capability(x.device) > NO_CAPABILITY


def reads_by_descriptor(device: torch.device | str) -> bool:
    """Return True if kernels access tiles on ``device`` by tensor descriptors, not by pointers.

    Descriptors are faster where tensor cores read shared memory: on Hopper and on data-centre
    Blackwell GPUs. For older GPUs and AMD's, Triton compiles a descriptor to one load per number.
    On compute capability 12.0, tiles that descriptors load are copied to registers, which spill.
    Triton's interpreter on a CPU uses descriptors.
    """
    is_interpreted = CAPABILITY_OVERRIDE is None and torch.device(device).type == "cpu"
    return is_interpreted or (9, 0) <= capability(device) < (12, 0)


def make_padding_arguments(padding_mask: Tensor | None) -> tuple[Tensor | None, int, Tensor | None]:
    """Return the arguments that pass a padding mask to a decode kernel.

    Args:
        padding_mask: bool [B, N_k], False for padding; None without padding.

    Returns:
        mask: ``padding_mask`` with contiguous rows; None without padding.
        batch_stride: Elements between two rows of the mask; 0 without padding.
        first: int32 [B], the index of the first token of each row that is not padding; None without
            padding.
    """
    if padding_mask is None:
        return None, 0, None
    padding_mask = padding_mask if padding_mask.stride(-1) == 1 else padding_mask.contiguous()
    return padding_mask, padding_mask.stride(0), padding_mask.int().argmax(-1).int()
