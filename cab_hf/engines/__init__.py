"""Computing: the engines that run attention under a plan, and which of them runs what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.capability import HOPPER, NONE, capability
from cab_hf.ops import HAS_TRITON, Workload, reference
from cab_hf.ops.attention import complete, ffpa, gather, traced

# SDPA's fast kernels end here; beyond, all it has is memory-efficient attention
SDPA_HEAD_DIM = 256
# queries times keys of blocks from which a CPU gathers what they list: smaller ones are many calls
GATHERED_FROM = 64 * 64


class Engine(NamedTuple):
    """One way to compute attention under a plan.

    Attributes:
        name: as `CabConfig.engine` has it. Engines of one name are its backends.
        load: imports what computes it, which models that never need it do not; see `attention`.
        unavailable: why it cannot run some work, as half a sentence; None when it can.
        label: its name for people, with the kernels that run some work where the name leaves it
            open.
    """

    name: str
    load: Callable[[], Callable[..., Any]]
    unavailable: Callable[[Workload], str | None]
    label: Callable[[Workload], str]

    @property
    def attention(self) -> Callable[..., Any]:
        """Attention under a plan, as `reference.attention` defines it.

        (q [B, H, N_q, D], k [B, H_kv, N_k, D], v [B, H_kv, N_k, D_v], plan, scale, return_lse) to
        [B, H, N_q, D_v]; with ``return_lse`` also the log-sum-exp, float32 [B, H, N_q].
        """
        return self.load()

    def capped(self, softcap: float | None) -> Engine:
        """The same of soft-capped logits, or this one for None."""
        if softcap is None:
            return self
        return self._replace(load=lambda: partial(self.load(), softcap=softcap))


def _reference() -> Callable[..., Any]:
    return traced.attention if torch.compiler.is_compiling() else reference.attention


def _gather_unavailable(work: Workload) -> str | None:
    if work.device != "cpu":
        return f"runs on a CPU, not on {work.device}"
    if torch.compiler.is_compiling():
        return "is not traced by torch.compile"
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
    # FlexAttention is a heavy import
    from cab_hf.ops.attention import flex

    return partial(complete.attention, flex.attention)


def _flex_unavailable(work: Workload) -> str | None:
    from cab_hf.ops.attention import flex

    if work.sinks and work.device == "cpu":
        return "returns no log-sum-exp on a CPU, which sinks need"
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
        return "does not cap logits"
    return _flex_unavailable(work) or _flash_unavailable_here(
        work.device, work.head_dim, work.dtype, *work.blocks
    )


def _flash_label(work: Workload) -> str:
    from cab_hf.ops.attention import flash

    if not work.training or flash.own_backward(work.head_dim, *work.blocks):
        return "flex (FLASH)"
    return "flex (FLASH, gradients by triton)"


# plain PyTorch: everywhere, as the definition of a plan, and over the listed keys alone on a CPU
REFERENCE = Engine("reference", _reference, lambda _: None, lambda _: "reference")
GATHER = Engine(
    "gather",
    lambda: partial(complete.attention, gather.attention),
    _gather_unavailable,
    lambda _: "gather",
)
# our own kernels
TRITON = Engine("triton", _triton, _triton_unavailable, lambda _: "triton")
# FlexAttention: its TRITON backend on CUDA or its CPU one, and flash-attn-4's kernels
FLEX = Engine("flex", _flex, _flex_unavailable, _flex_label)
FLASH = Engine("flex", _flash, _flash_unavailable, _flash_label)


class DenseKernel(NamedTuple):
    """One way to compute exact causal attention: of a text, or of the last of its queries.

    Attributes:
        name: for people.
        attention: (q [B, H, N_q, D], k and v [B, H_kv, N_k, D], scale) to [B, H, N_q, D].
    """

    name: str
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    causal, grouped = q.shape[2] > 1, q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
    )


# PyTorch's own, and ffpa-attn's for large heads of texts that have no cache
SDPA, FFPA = DenseKernel("sdpa", _sdpa), DenseKernel("ffpa", ffpa.attention)
# engines by name, the preferred first
ENGINES: dict[str, tuple[Engine, ...]] = {
    "reference": (REFERENCE,),
    "gather": (GATHER,),
    "flex": (FLASH, FLEX),
    "triton": (TRITON,),
}
# the fastest first; tests hold the order to what was measured, in eval/results/speed-attention and
# eval/results/speed-attention-without-flash
FASTEST = (FLASH, TRITON, FLEX, REFERENCE)
# on GPUs before Hopper nothing was measured
UNMEASURED = (FLASH, FLEX, TRITON, REFERENCE)


def choose(name: str, work: Workload) -> Engine:
    """The engine that runs ``work``: one of that name, or for ``"auto"`` the fastest that can.

    Raises:
        ValueError: for an unknown name, or a named engine that cannot run this.
    """
    if name == "auto":
        # a compiled kernel is compiled on CPU for every new length
        if work.device == "cpu":
            large = work.query_block * work.key_block >= GATHERED_FROM
            return GATHER if large and GATHER.unavailable(work) is None else REFERENCE
        candidates = FASTEST if _measured_here() else UNMEASURED
    elif name in ENGINES:
        candidates = ENGINES[name]
    else:
        known = ", ".join(map(repr, ("auto", *ENGINES)))
        raise ValueError(f"CabConfig.engine must be one of {known}, got {name!r}.")
    for engine in candidates:
        reason = engine.unavailable(work)
        if reason is None:
            return engine
    raise ValueError(
        f"CabConfig.engine is {name!r}, which {reason}; use engine='auto' or 'reference'."
    )


def exact(work: Workload, length: int | None) -> Engine | DenseKernel:
    """What computes exact attention: SDPA, FFPA, or an engine under a plan that keeps everything.

    ``length`` is that of queries and keys where nothing but causality masks them, else None. SDPA's
    fast kernels take neither masks nor head dims above `SDPA_HEAD_DIM`.
    """
    if length is not None and work.head_dim <= SDPA_HEAD_DIM:
        return SDPA
    if TRITON.unavailable(work) or not _measured_here():
        return SDPA
    if length is not None and not ffpa.unavailable(
        work.device, work.head_dim, work.dtype, work.training, length
    ):
        return FFPA
    return TRITON


# constants where a model is compiled: lookups of packages and of the device are not traced
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
