"""Engines that compute attention under a plan, and the choice of an engine for a workload."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.capability import HOPPER, NONE, capability
from cab_hf.ops import HAS_TRITON, Workload, reference
from cab_hf.ops.attention import complete, ffpa, flash_dense, gather, traced

# head dims above this have no fast kernel in SDPA, only memory-efficient attention
SDPA_HEAD_DIM = 256
# a CPU gathers the listed keys from this many (query, key) pairs per block on; smaller blocks need
# too many calls
GATHERED_FROM = 64 * 64


class Engine(NamedTuple):
    """Implementation of attention under a plan.

    Attributes:
        name: Value of `CabConfig.engine`. Engines of the same name are its backends.
        load: Imports the implementation and returns it, see `attention`. Models that never use the
            engine do not import it.
        unavailable: Returns why the engine cannot run a workload, as half a sentence; None if it
            can.
        label: Returns a readable name; it includes the kernels if the name alone leaves them open.
    """

    name: str
    load: Callable[[], Callable[..., Any]]
    unavailable: Callable[[Workload], str | None]
    label: Callable[[Workload], str]

    @property
    def attention(self) -> Callable[..., Any]:
        """Attention under a plan, as `reference.attention` defines it.

        The arguments are q [B, H, N_q, D], k [B, H_kv, N_k, D], v [B, H_kv, N_k, D_v], plan, scale,
        return_lse and softcap. Returns [B, H, N_q, D_v]; with ``return_lse`` also the log-sum-exp,
        float32 [B, H, N_q].
        """
        return self.load()


def _reference() -> Callable[..., Any]:
    return traced.attention if torch.compiler.is_compiling() else reference.attention


def _gather_unavailable(work: Workload) -> str | None:
    if work.device != "cpu":
        return f"runs on a CPU, not on {work.device}"
    if torch.compiler.is_compiling():
        return "cannot be traced by torch.compile"
    return "has no backward" if work.training else None


def _triton() -> Callable[..., Any]:
    from cab_hf.ops.attention import block

    return partial(complete.attention, block.attention)


def _triton_unavailable(work: Workload) -> str | None:
    if not HAS_TRITON:
        return "needs the package triton, which is not installed"
    from cab_hf.ops.attention import block

    return block.unavailable(work.device, work.head_dim, work.dtype)


def _flex() -> Callable[..., Any]:
    # imported late, because FlexAttention is a heavy import
    from cab_hf.ops.attention import flex

    return partial(complete.attention, flex.attention)


def _flex_unavailable(work: Workload) -> str | None:
    from cab_hf.ops.attention import flex

    if work.sinks and work.device == "cpu":
        return "returns no log-sum-exp on CPU, which sinks need"
    return flex.unavailable(work.device, work.head_dim, work.dtype, work.training, *work.blocks)


def _flex_label(work: Workload) -> str:
    from cab_hf.ops.attention import flex

    if work.device == "cpu":
        return "flex (CPU)"
    trained = flex.merged_blocks(*work.blocks)
    if not work.training or trained == work.blocks:
        return "flex (TRITON)"
    return "flex (TRITON, blocks merged to {} x {})".format(*trained)


def _flash() -> Callable[..., Any]:
    from cab_hf.ops.attention import flash

    return partial(complete.attention, flash.attention)


def _flash_unavailable(work: Workload) -> str | None:
    if work.softcap:
        return "does not support soft caps"
    return _flex_unavailable(work) or _flash_unavailable_here(
        work.device, work.head_dim, work.dtype, *work.blocks
    )


def _flash_label(work: Workload) -> str:
    from cab_hf.ops.attention import flash

    if not work.training or flash.own_backward(work.head_dim, *work.blocks):
        return "flex (FLASH)"
    return "flex (FLASH, gradients by triton)"


# plain PyTorch: the reference runs everywhere; gather reads only the listed keys, on a CPU
REFERENCE = Engine("reference", _reference, lambda _: None, lambda _: "reference")
GATHER = Engine(
    "gather",
    lambda: partial(complete.attention, gather.attention),
    _gather_unavailable,
    lambda _: "gather",
)
# Triton kernels of this package
TRITON = Engine("triton", _triton, _triton_unavailable, lambda _: "triton")
# FlexAttention with its TRITON or CPU backend, and the kernels of flash-attn-4
FLEX = Engine("flex", _flex, _flex_unavailable, _flex_label)
FLASH = Engine("flex", _flash, _flash_unavailable, _flash_label)


class DenseKernel(NamedTuple):
    """Implementation of exact causal attention for a whole sequence, or for its last queries.

    Attributes:
        name: Readable name.
        attention: Maps q [B, H, N_q, D], k and v [B, H_kv, N_k, D] and scale to [B, H, N_q, D].
    """

    name: str
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    causal, grouped = q.shape[2] > 1, q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
    )


# PyTorch's own kernels; and those of ffpa-attn for large heads, without a cache
SDPA, FFPA = DenseKernel("sdpa", _sdpa), DenseKernel("ffpa", ffpa.attention)
# flash-attn-3 or flash-attn-4
FLASH_ATTN = DenseKernel("flash-attn", flash_dense.attention)
# engines by name, the preferred backend first
ENGINES: dict[str, tuple[Engine, ...]] = {
    "reference": (REFERENCE,),
    "gather": (GATHER,),
    "flex": (FLASH, FLEX),
    "triton": (TRITON,),
}
# fastest first; tests compare the order with the measurements in eval/results/speed-attention and
# eval/results/speed-attention-without-flash
FASTEST = (FLASH, TRITON, FLEX, REFERENCE)
# order on GPUs before Hopper, where nothing was measured
UNMEASURED = (FLASH, FLEX, TRITON, REFERENCE)


def choose(name: str, work: Workload) -> Engine:
    """Return the engine for ``work``: a backend of that name, or for ``"auto"`` the fastest one.

    Raises:
        ValueError: If the name is unknown, or if no backend of that name can run ``work``.
    """
    if name == "auto":
        # no compiled kernel: on CPU it would be compiled for every new length
        if work.device == "cpu":
            large = work.query_block * work.key_block >= GATHERED_FROM
            return GATHER if large and GATHER.unavailable(work) is None else REFERENCE
        candidates = FASTEST if _measured_here() else UNMEASURED
    elif name in ENGINES:
        candidates = ENGINES[name]
    else:
        names = ", ".join(map(repr, ("auto", *ENGINES)))
        raise ValueError(f"CabConfig.engine must be one of {names}, got {name!r}.")
    for engine in candidates:
        reason = engine.unavailable(work)
        if reason is None:
            return engine
    raise ValueError(
        f"CabConfig.engine is {name!r}, which {reason}. Use engine='auto' or 'reference'."
    )


def exact(
    work: Workload, length: int | None, last_queries: int | None = None
) -> Engine | DenseKernel:
    """Return the dense kernel, or the engine under a plan of all blocks, for exact attention.

    SDPA's fast kernels support neither masks nor head dims above `SDPA_HEAD_DIM`.

    Args:
        length: Number of queries and of keys if causality is the only mask, else None.
        last_queries: Number of queries, the last tokens of the keys, if causality is the only
            mask; else None.
    """
    if last_queries is not None and flash_dense.unavailable(work, last_queries) is None:
        return FLASH_ATTN
    if length is not None and work.head_dim <= SDPA_HEAD_DIM:
        return SDPA
    if TRITON.unavailable(work) or not _measured_here():
        return SDPA
    if length is not None and not ffpa.unavailable(
        work.device, work.head_dim, work.dtype, work.training, length
    ):
        return FFPA
    return TRITON


# constants in a compiled graph: torch.compile cannot trace lookups of packages and devices
@torch.compiler.assume_constant_result
def _measured_here() -> bool:
    return torch.cuda.is_available() and capability()[0] >= HOPPER


@torch.compiler.assume_constant_result
def _flash_unavailable_here(
    device: str, head_dim: int, dtype: torch.dtype, query_block: int, key_block: int
) -> str | None:
    if device == "cpu" or not torch.cuda.is_available() or capability() == NONE:
        return "runs on NVIDIA GPUs only"
    from cab_hf.ops.attention import flash

    return flash.unavailable(head_dim, dtype, query_block, key_block)
