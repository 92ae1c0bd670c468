"""Transforms of PyTorch that 'cab' cannot run under, refused in one sentence each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad


def refuse_tracing(*tensors: Any) -> None:
    """Refuse tracers that record one call, and tensors without numbers.

    Args:
        tensors: what the call was given; anything else than tensors is ignored.

    Raises:
        NotImplementedError: naming the transform.
    """
    if torch.compiler.is_compiling():
        return
    tensors = [x for x in tensors if isinstance(x, Tensor)]
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace records the operations of one input, and those of 'cab' and "
            "'cab_dense' depend on the input. Use torch.export.export or torch.compile."
        )
    # looking for a mode takes longer than the rest of this function
    is_plain = len(tensors) > 0 and all(type(x) is Tensor for x in tensors)
    if not is_plain and detect_fake_mode(tensors) is not None:
        raise NotImplementedError(
            "the call has fake tensors (FakeTensorMode), and 'cab' reads numbers of tensors. Use "
            "torch.export.export or torch.compile, or set attn_implementation='sdpa'."
        )
    if any(map(_is_functional, tensors)):
        raise NotImplementedError(
            "torch.func.functionalize is active, and 'cab' reads numbers of tensors. Use "
            "torch.export.export or torch.compile, or set attn_implementation='sdpa'."
        )


def refuse_vmap(what: str, *tensors: Any) -> None:
    """Refuse tensors that are batched by `torch.vmap`.

    Args:
        what: the name of the tensors, for the error.

    Raises:
        NotImplementedError: naming vmap.
    """
    if torch.compiler.is_compiling():
        return
    if any(isinstance(x, Tensor) and _is_batched(x) for x in tensors):
        raise NotImplementedError(
            f"torch.vmap batches {what}, and 'cab' reads its numbers. Loop over the samples, or "
            "set attn_implementation='sdpa'."
        )


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Refuse forward-mode differentiation of CUDA kernels, which would lose the tangents.

    Raises:
        NotImplementedError: naming forward-mode differentiation.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x.is_cuda for x in tensors):
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp) is active, and the kernels of 'cab' "
            "have gradients in reverse mode alone. Use torch.func.vjp or backward, or set "
            "attn_implementation='eager'."
        )


def _is_batched(x: Tensor) -> bool:
    """Return whether vmap batches ``x`` at any level of nested transforms."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def _is_functional(x: Tensor) -> bool:
    """Return whether functionalize wraps ``x`` at any level of nested transforms."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_functionaltensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False
