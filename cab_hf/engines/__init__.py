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

# largest head dim with a fast kernel in SDPA, which computes larger head dims by memory-efficient
# attention
SDPA_HEAD_DIM = 256
# fewest (query, key) pairs per block for `GATHER` in `choose`; smaller blocks need too many small
# operations
GATHERED_FROM = 64 * 64


class Engine(NamedTuple):
    """Implementation of attention under a plan.

    Attributes:
        name: Value of `CabConfig.engine`. Several engines may have the same name, as its backends.
        load: Imports the implementation and returns it, see `attention`. Models that never use the
            engine do not import it.
        unavailable: Returns why the engine cannot run a workload, as a clause; None if the engine
            can.
        label: Returns a readable name for a workload, with the backend if the name has several.
    """

    name: str
    load: Callable[[], Callable[..., Any]]
    unavailable: Callable[[Workload], str | None]
    label: Callable[[Workload], str]

    @property
    def attention(self) -> Callable[..., Any]:
        """Function that computes attention under a plan, defined by `reference.attention`.

        The function receives q [B, H, N_q, D], k [B, H_kv, N_k, D], v [B, H_kv, N_k, D_v], plan,
        scale, return_lse and softcap. It returns [B, H, N_q, D_v]; with ``return_lse`` also the
        log-sum-exp, float32 [B, H, N_q].
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
    # imported late, because Triton may not be installed
    from cab_hf.ops.attention import block

    return partial(complete.attention, block.attention)


def _triton_unavailable(work: Workload) -> str | None:
    if not HAS_TRITON:
        return "needs the package triton, which is not installed"
    from cab_hf.ops.attention import block

    return block.unavailable(device=work.device, head_dim=work.head_dim, dtype=work.dtype)


def _flex() -> Callable[..., Any]:
    # imported late, because FlexAttention is a heavy import
    from cab_hf.ops.attention import flex

    return partial(complete.attention, flex.attention)


def _flex_unavailable(work: Workload) -> str | None:
    from cab_hf.ops.attention import flex

    if work.sinks and work.device == "cpu":
        return "returns no log-sum-exp on CPU, which sinks need"
    return flex.unavailable(
        device=work.device,
        head_dim=work.head_dim,
        dtype=work.dtype,
        training=work.training,
        query_block=work.query_block,
        key_block=work.key_block,
    )


def _flex_label(work: Workload) -> str:
    from cab_hf.ops.attention import flex

    if work.device == "cpu":
        return "flex (CPU)"
    query_block, key_block = flex.merged_blocks(work.query_block, work.key_block)
    if not work.training or (query_block, key_block) == work.blocks:
        return "flex (TRITON)"
    return f"flex (TRITON, blocks merged to {query_block} x {key_block})"


def _flash() -> Callable[..., Any]:
    from cab_hf.ops.attention import flash

    return partial(complete.attention, flash.attention)


def _flash_unavailable(work: Workload) -> str | None:
    if work.softcap:
        return "does not support soft caps"
    return _flex_unavailable(work) or _flash_unavailable_here(
        device=work.device,
        head_dim=work.head_dim,
        dtype=work.dtype,
        query_block=work.query_block,
        key_block=work.key_block,
    )


def _flash_label(work: Workload) -> str:
    from cab_hf.ops.attention import flash

    if not work.training or flash.own_backward(work.head_dim, work.query_block, work.key_block):
        return "flex (FLASH)"
    return "flex (FLASH, gradients by triton)"


# plain PyTorch on any device
REFERENCE = Engine(
    name="reference",
    load=_reference,
    unavailable=lambda work: None,
    label=lambda work: "reference",
)
# plain PyTorch on a CPU, which reads only the listed keys
GATHER = Engine(
    name="gather",
    load=lambda: partial(complete.attention, gather.attention),
    unavailable=_gather_unavailable,
    label=lambda work: "gather",
)
# Triton kernels of this package
TRITON = Engine(
    name="triton",
    load=_triton,
    unavailable=_triton_unavailable,
    label=lambda work: "triton",
)
# FlexAttention with its TRITON or CPU backend
FLEX = Engine(name="flex", load=_flex, unavailable=_flex_unavailable, label=_flex_label)
# FlexAttention with the kernels of flash-attn-4
FLASH = Engine(name="flex", load=_flash, unavailable=_flash_unavailable, label=_flash_label)


class DenseKernel(NamedTuple):
    """Implementation of exact causal attention for all queries of a sequence, or the last queries.

    Attributes:
        name: Readable name.
        attention: Maps q [B, H, N_q, D], k and v [B, H_kv, N_k, D] and scale to [B, H, N_q, D].
    """

    name: str
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    is_causal, is_grouped = q.shape[2] > 1, q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )


# kernels of PyTorch
SDPA = DenseKernel("sdpa", _sdpa)
# kernels of ffpa-attn for large head dims, without a cache
FFPA = DenseKernel("ffpa", ffpa.attention)
# kernels of flash-attn-3 or flash-attn-4
FLASH_ATTN = DenseKernel("flash-attn", flash_dense.attention)
# backends of each engine name, the preferred backend first
ENGINES: dict[str, tuple[Engine, ...]] = {
    "reference": (REFERENCE,),
    "gather": (GATHER,),
    "flex": (FLASH, FLEX),
    "triton": (TRITON,),
}
# engines of "auto", fastest first; tests compare the order with the measurements in
# eval/results/speed-attention and eval/results/speed-attention-without-flash
FASTEST = (FLASH, TRITON, FLEX, REFERENCE)
# engines of "auto" on GPUs before Hopper, where no engine was measured
UNMEASURED = (FLASH, FLEX, TRITON, REFERENCE)


def choose(name: str, work: Workload) -> Engine:
    """Return the engine that computes a workload.

    Args:
        name: Value of `CabConfig.engine`; "auto" for the fastest engine that can run ``work``.
        work: Requirements of the call.

    Raises:
        ValueError: If the name is unknown, or if no backend of that name can run ``work``.
    """
    if name == "auto":
        # on a CPU, flex would be compiled for every new length
        if work.device == "cpu":
            is_large = work.query_block * work.key_block >= GATHERED_FROM
            return GATHER if is_large and GATHER.unavailable(work) is None else REFERENCE
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
    """Return the dense kernel or the engine that computes exact attention.

    The fast kernels of SDPA support neither masks nor head dims above `SDPA_HEAD_DIM`. In these
    cases, an engine computes exact attention under a plan of all blocks.

    Args:
        work: Requirements of the call.
        length: Number of queries and of keys; None unless both numbers are equal and causality is
            the only mask.
        last_queries: Number of queries; None unless the queries are the last tokens of the keys and
            causality is the only mask.
    """
    if last_queries is not None and flash_dense.unavailable(work, last_queries) is None:
        return FLASH_ATTN
    if length is not None and work.head_dim <= SDPA_HEAD_DIM:
        return SDPA
    if TRITON.unavailable(work) or not _measured_here():
        return SDPA
    if length is not None and not ffpa.unavailable(
        device=work.device,
        head_dim=work.head_dim,
        dtype=work.dtype,
        training=work.training,
        length=length,
    ):
        return FFPA
    return TRITON


# results are constants in a compiled graph: torch.compile cannot trace lookups of packages and
# devices
@torch.compiler.assume_constant_result
def _measured_here() -> bool:
    """Return True on GPUs from Hopper on, where the engines were measured."""
    return torch.cuda.is_available() and capability()[0] >= HOPPER


@torch.compiler.assume_constant_result
def _flash_unavailable_here(
    device: str, head_dim: int, dtype: torch.dtype, query_block: int, key_block: int
) -> str | None:
    """Return why flash-attn-4 cannot run on this machine, as a clause; None if it can."""
    if device == "cpu" or not torch.cuda.is_available() or capability() == NONE:
        return "runs on NVIDIA GPUs only"
    from cab_hf.ops.attention import flash

    return flash.unavailable(
        head_dim=head_dim, dtype=dtype, query_block=query_block, key_block=key_block
    )
