"""Engines that compute attention under a plan, and the choice of an engine for a workload."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.capability import HOPPER, NO_CAPABILITY, capability
from cab_hf.ops import HAS_TRITON, Workload, reference
from cab_hf.ops.attention import complete, ffpa, flash_dense, gather, traced

# largest head dim with a fast kernel in SDPA, which computes larger head dims by memory-efficient
# attention
MAX_SDPA_HEAD_DIM = 256


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


def _load_reference() -> Callable[..., Any]:
    return traced.attention if torch.compiler.is_compiling() else reference.attention


def _why_no_gather(workload: Workload) -> str | None:
    if workload.device != "cpu":
        return f"runs on a CPU, not on {workload.device}"
    if torch.compiler.is_compiling():
        return "cannot be traced by torch.compile"
    return "has no backward" if workload.training else None


def _load_triton() -> Callable[..., Any]:
    # imported late, because Triton may not be installed
    from cab_hf.ops.attention import block

    return partial(complete.attention, block.attention)


def _why_no_triton(workload: Workload) -> str | None:
    if not HAS_TRITON:
        return "needs the package triton, which is not installed"
    from cab_hf.ops.attention import block

    return block.unavailable(
        device=workload.device, head_dim=workload.head_dim, dtype=workload.dtype
    )


def _load_flex() -> Callable[..., Any]:
    # imported late, because FlexAttention is a heavy import
    from cab_hf.ops.attention import flex

    return partial(complete.attention, flex.attention)


def _why_no_flex(workload: Workload) -> str | None:
    from cab_hf.ops.attention import flex

    if workload.sinks and workload.device == "cpu":
        return "returns no log-sum-exp on CPU, which sinks need"
    return flex.unavailable(
        device=workload.device,
        head_dim=workload.head_dim,
        dtype=workload.dtype,
        training=workload.training,
        query_block=workload.query_block,
        key_block=workload.key_block,
    )


def _label_flex(workload: Workload) -> str:
    from cab_hf.ops.attention import flex

    if workload.device == "cpu":
        return "flex (CPU)"
    query_block, key_block = flex.choose_merged_block_sizes(
        workload.query_block, workload.key_block
    )
    if not workload.training or (query_block, key_block) == workload.block_sizes:
        return "flex (TRITON)"
    return f"flex (TRITON, blocks merged to {query_block} x {key_block})"


def _load_flash() -> Callable[..., Any]:
    from cab_hf.ops.attention import flash

    return partial(complete.attention, flash.attention)


def _why_no_flash(workload: Workload) -> str | None:
    if workload.softcap:
        return "does not support soft caps"
    return _why_no_flex(workload) or _why_no_flash_here(
        device=workload.device,
        head_dim=workload.head_dim,
        dtype=workload.dtype,
        query_block=workload.query_block,
        key_block=workload.key_block,
    )


def _label_flash(workload: Workload) -> str:
    from cab_hf.ops.attention import flash

    if not workload.training or flash.has_flash_backward(
        workload.head_dim, workload.query_block, workload.key_block
    ):
        return "flex (FLASH)"
    return "flex (FLASH, gradients by triton)"


# plain PyTorch on any device
REFERENCE = Engine(
    name="reference",
    load=_load_reference,
    unavailable=lambda workload: None,
    label=lambda workload: "reference",
)
# plain PyTorch on a CPU, which reads only the listed keys
GATHER = Engine(
    name="gather",
    load=lambda: partial(complete.attention, gather.attention),
    unavailable=_why_no_gather,
    label=lambda workload: "gather",
)
# Triton kernels of this package
TRITON = Engine(
    name="triton",
    load=_load_triton,
    unavailable=_why_no_triton,
    label=lambda workload: "triton",
)
# FlexAttention with its TRITON or CPU backend
FLEX = Engine(name="flex", load=_load_flex, unavailable=_why_no_flex, label=_label_flex)
# FlexAttention with the kernels of flash-attn-4
FLASH = Engine(name="flex", load=_load_flash, unavailable=_why_no_flash, label=_label_flash)


class DenseKernel(NamedTuple):
    """Implementation of exact causal attention for all queries of a sequence, or the last queries.

    Attributes:
        name: Readable name.
        attention: Maps q [B, H, N_q, D], k and v [B, H_kv, N_k, D] and scale to [B, H, N_q, D].
    """

    name: str
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _attend_by_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    is_causal, is_grouped = q.shape[2] > 1, q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )


# kernels of PyTorch
SDPA = DenseKernel("sdpa", _attend_by_sdpa)
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
ENGINES_OF_UNMEASURED_GPUS = (FLASH, FLEX, TRITON, REFERENCE)


def choose(engine_name: str, workload: Workload) -> Engine:
    """Return the engine that computes a workload.

    Args:
        engine_name: Value of `CabConfig.engine`; "auto" for the fastest engine that can run
            ``workload``.
        workload: Requirements of the call.

    Raises:
        ValueError: If the name is unknown, or if no backend of that name can run ``workload``.
    """
    if engine_name == "auto":
        # on a CPU, flex would be compiled for every new length
        if workload.device == "cpu":
            return REFERENCE if GATHER.unavailable(workload) else GATHER
        candidates = FASTEST if _is_measured_gpu() else ENGINES_OF_UNMEASURED_GPUS
    elif engine_name in ENGINES:
        candidates = ENGINES[engine_name]
    else:
        known_names = ", ".join(map(repr, ("auto", *ENGINES)))
        raise ValueError(f"CabConfig.engine must be one of {known_names}, got {engine_name!r}.")
    for engine in candidates:
        unavailable_reason = engine.unavailable(workload)
        if unavailable_reason is None:
            return engine
    raise ValueError(
        f"CabConfig.engine is {engine_name!r}, which {unavailable_reason}. "
        "Use engine='auto' or 'reference'."
    )


def choose_exact_attention(
    workload: Workload, num_causal_tokens: int | None, num_last_queries: int | None = None
) -> Engine | DenseKernel:
    """Return the dense kernel or the engine that computes exact attention.

    The fast kernels of SDPA support neither masks nor head dims above `MAX_SDPA_HEAD_DIM`. In these
    cases, an engine computes exact attention under a plan of all blocks.

    Args:
        workload: Requirements of the call.
        num_causal_tokens: Number of queries and of keys; None unless both numbers are equal and
            causality is the only mask.
        num_last_queries: Number of queries; None unless the queries are the last tokens of the keys
            and causality is the only mask.
    """
    if num_last_queries is not None and flash_dense.unavailable(workload, num_last_queries) is None:
        return FLASH_ATTN
    if num_causal_tokens is not None and workload.head_dim <= MAX_SDPA_HEAD_DIM:
        return SDPA
    if TRITON.unavailable(workload) or not _is_measured_gpu():
        return SDPA
    if num_causal_tokens is not None and not ffpa.unavailable(
        device=workload.device,
        head_dim=workload.head_dim,
        dtype=workload.dtype,
        training=workload.training,
        length=num_causal_tokens,
    ):
        return FFPA
    return TRITON


# results are constants in a compiled graph: torch.compile cannot trace lookups of packages and
# devices
@torch.compiler.assume_constant_result
def _is_measured_gpu() -> bool:
    """Return True on GPUs from Hopper on, where the engines were measured."""
    return torch.cuda.is_available() and capability()[0] >= HOPPER


@torch.compiler.assume_constant_result
def _why_no_flash_here(
    device: str, head_dim: int, dtype: torch.dtype, query_block: int, key_block: int
) -> str | None:
    """Return why flash-attn-4 cannot run on this machine, as a clause; None if it can."""
    if device == "cpu" or not torch.cuda.is_available() or capability() == NO_CAPABILITY:
        return "runs on NVIDIA GPUs only"
    from cab_hf.ops.attention import flash

    return flash.unavailable(
        head_dim=head_dim, dtype=dtype, query_block=query_block, key_block=key_block
    )
