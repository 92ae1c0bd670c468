"""Sparse decode: one query per head attends to selected keys of a long KV cache.

`reference` defines the functions of this module in plain PyTorch. On GPUs that the Triton kernels
support, this module calls the kernels instead.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from cab_hf.ops import HAS_TRITON
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.reference import Choice, Index


def index_keys(k: Tensor, channels: tuple[int, ...]) -> Index:
    """Compress keys to an index for selecting keys; see `reference.index_keys`."""
    return _choose_implementation(k).index_keys(k, channels)


def write_index(index: Index, k: Tensor, channels: tuple[int, ...], start: Tensor) -> None:
    """Compress new keys, and write them to the index of a cache; see `reference.write_index`."""
    _choose_implementation(k).write_index(index, k, channels, start)


def choose(
    q: Tensor,
    index: Index,
    scale: float,
    length: Tensor,
    num_keys: Tensor,
    channels: tuple[int, ...] = (),
    padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Choice:
    """Select the keys that a decode step attends to; see `reference.choose`."""
    with without_autocast(q):
        return _choose_implementation(q).choose(
            q,
            index,
            scale=scale,
            length=length,
            num_keys=num_keys,
            channels=channels,
            padding_mask=padding_mask,
            sinks=sinks,
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    scale: float,
    length: Tensor | None = None,
    padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute attention over the selected keys; see `reference.attend`.

    The kernels support neither gradients nor soft caps; `reference` computes calls with gradients
    or soft caps.
    """
    shared_arguments = {
        "scale": scale,
        "length": length,
        "padding_mask": padding_mask,
        "sinks": sinks,
    }
    with without_autocast(q):
        if softcap is not None or not has_kernels(q, k, v):
            return reference.attend(q, k, v, choice, softcap=softcap, **shared_arguments)
        return _choose_implementation(q).attend(q, k, v, choice, **shared_arguments)


def without_autocast(x: Tensor) -> torch.autocast:
    """Return a context that disables autocast on the device of ``x``.

    Autocast would round products that `reference` computes exactly in float32, and would fail to
    concatenate tensors of different dtypes.
    """
    return torch.autocast(x.device.type, enabled=False)


def has_kernels(*tensors: Tensor) -> bool:
    """Return True if `attend` uses kernels for its inputs ``tensors``.

    The kernels have no gradients. Therefore the result is False if a tensor requires a gradient.
    """
    records_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not records_gradients and _choose_implementation(tensors[0]) is not reference


def _choose_implementation(x: Tensor) -> ModuleType:
    """Return the module that implements the functions on the device of ``x``.

    The module is `kernels` if the kernels support ``x``, else `reference`.
    """
    if not x.is_cuda or not HAS_TRITON:
        return reference
    # `kernels` imports Triton, so that models on a CPU must not import `kernels`
    from cab_hf.ops.decode import kernels

    return kernels if kernels.unavailable(x) is None else reference
