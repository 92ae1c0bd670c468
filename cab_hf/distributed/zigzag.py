"""Attention over a sequence that is sharded over ranks, without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cab_hf import engines
from cab_hf.call.layout import make_plan_of_visible_blocks
from cab_hf.call.validate import SUPPORTED_DTYPES
from cab_hf.checks import is_whole_number, require
from cab_hf.distributed.exchange import require_equal_values, resolve_group
from cab_hf.distributed.kv_gather import KV_HEADS_PER_GATHER
from cab_hf.distributed.sharded import ShardedLayout
from cab_hf.distributed.sharding import Sharding, ShardMap, sharding_from_boundaries
from cab_hf.engines import Engine, Workload
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def zigzag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    plan: BlockPlan | None = None,
    heads_k_stride: int = KV_HEADS_PER_GATHER,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    engine: str = "auto",
    block: int = DENSE_BLOCK_SIZE,
    regather_kv: bool = True,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute exact attention of this rank's queries over the selected keys of all ranks.

    With W ranks, every document is padded to 2 W chunks of a multiple of ``block`` tokens. Rank r
    has chunks r and 2 W - 1 - r of every document, in this order, document by document. `shard`
    distributes a batch in this order.

    K and V are gathered in slices of KV heads. The all-gather of the next slice overlaps with
    attention over the current slice, and one kernel launch computes both chunks of the rank. The
    backward pass sums the gradients of K and V over the ranks, in the dtype of K and V.

    Args:
        q: this rank's queries, [B, H, n, D], after RoPE with their positions in the document.
        k: this rank's keys, [B, H_kv, n, D], after RoPE.
        v: this rank's values, [B, H_kv, n, D_v].
        group: the ranks that share the sequence. None means all ranks.
        plan: key blocks of this rank's query blocks, such as the result of `predict`. None means
            all visible blocks.
        heads_k_stride: number of KV heads per all-gather, at least 1. Fewer heads need less memory.
        cu_seqlens: boundaries of the documents of the whole sequence without padding, int
            [documents + 1]; equal on all ranks. None means one document of W * n tokens.
        causal: True if queries do not attend to later keys.
        scale: factor of the logits. None means 1 / sqrt(D).
        engine: see `CabConfig`.
        block: every chunk is a multiple of ``block`` tokens; equal on all ranks.
        regather_kv: True to gather K and V again in the backward pass instead of saving both. Set
            False under gradient checkpointing, which gathers K and V again anyway.
        check: True to compare the arguments of all ranks first, with one small all-gather, which
            synchronises with the device. Set False in a loop after its first iteration.

    Returns:
        Output [B, H, n, D_v], and log-sum-exp of the logits of each query, float32 [B, H, n],
        without gradient. Padding queries have output 0 and log-sum-exp -inf.

    Raises:
        ValueError: shapes do not fit each other, ``cu_seqlens`` or the plan, or arguments differ
            between ranks. All ranks raise if arguments differ.
        RankLost: another rank stopped.
    """
    layout, chosen_engine, plan, scale = check_arguments(
        q,
        k,
        v,
        group=group,
        plan=plan,
        heads_k_stride=heads_k_stride,
        cu_seqlens=cu_seqlens,
        causal=causal,
        scale=scale,
        engine=engine,
        block=block,
        regather_kv=regather_kv,
        check=check,
    )
    return layout.attention(chosen_engine, q, k, v, plan=plan, scale=scale)


def require_matching_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise a ValueError if the shapes or dtypes of q, k and v do not fit together."""
    for tensor_name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 or tensor.dtype not in SUPPORTED_DTYPES or tensor.dtype != q.dtype:
            raise ValueError(
                f"{tensor_name} must be [B, heads, n, D] in the floating dtype of q, got "
                f"{tensor.dtype} {tuple(tensor.shape)}. Give q, k and v in one of "
                f"{', '.join(map(str, SUPPORTED_DTYPES))}."
            )
    have_same_tokens = all(tensor.shape[::2] == q.shape[::2] for tensor in (k, v))
    if (
        not have_same_tokens
        or k.shape[1] != v.shape[1]
        or q.shape[1] % k.shape[1]
        or q.shape[3] != k.shape[3]
    ):
        raise ValueError(
            "q, k, v must be [B, H, n, D], [B, H_kv, n, D], [B, H_kv, n, D_v], got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}. Give q, k and v of the same "
            "tokens, with H a multiple of H_kv."
        )


def require_stride_and_block(heads_k_stride: int, block: int) -> None:
    """Raise a ValueError unless ``heads_k_stride`` is at least 1 and ``block`` a multiple of 16."""
    require(
        is_whole_number(heads_k_stride), "heads_k_stride", heads_k_stride, "a whole number >= 1"
    )
    require(is_whole_number(block) and block % 16 == 0, "block", block, "a multiple of 16")


def collect_compared_values(
    q: Tensor, k: Tensor, v: Tensor, sharding: Sharding | None
) -> dict[str, int]:
    """Return the sizes, dtypes and documents that must be equal on all ranks, as numbers by name.

    Args:
        q, k, v: tensors of this rank, [B, heads, n, D].
        sharding: the sharding of the sequence; None if the boundaries of documents are unknown.
    """
    document_lengths = () if sharding is None else sharding.document_lengths
    return {
        "batch rows": q.shape[0],
        "heads": q.shape[1],
        "KV heads": k.shape[1],
        "tokens of a rank": q.shape[2],
        "head dims": q.shape[3],
        "channels of v": v.shape[3],
        "dtypes": SUPPORTED_DTYPES.index(q.dtype) if q.dtype in SUPPORTED_DTYPES else -1,
        "documents": len(document_lengths),
        "tokens of the sequence": sum(document_lengths),
        # unlike the hash of a string, Python's hash of a tuple of ints is equal in every process
        "document lengths (hash)": hash(document_lengths),
        "blocks": 0 if sharding is None else sharding.block,
    }


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    plan: BlockPlan | None,
    heads_k_stride: int,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    engine: str,
    block: int,
    regather_kv: bool,
    check: bool,
) -> tuple[ShardedLayout, Engine, BlockPlan, float]:
    """Check the arguments of `zigzag_attention`, and replace None and "auto" by their values.

    Returns:
        layout: the layout of the sharded sequence.
        engine: the engine that computes attention.
        plan: ``plan``, or the plan of all visible blocks if ``plan`` is None.
        scale: ``scale``, or 1 / sqrt(D) if ``scale`` is None.

    Raises:
        ValueError: see `zigzag_attention`.
    """
    group = resolve_group(group)
    require_matching_shapes(q, k, v)
    require_stride_and_block(heads_k_stride, block)
    world_size, num_tokens = group.size(), q.shape[2]
    sharding = sharding_from_boundaries(cu_seqlens, num_tokens, world_size, block)
    if check:
        require_equal_values(collect_compared_values(q, k, v, sharding), group, q.device)
    if sharding.tokens_per_rank != num_tokens:
        raise ValueError(
            f"q must have {sharding.tokens_per_rank} tokens, got {num_tokens}: documents of "
            f"{list(sharding.document_lengths[:8])} tokens are sharded over {world_size} ranks as "
            f"{2 * world_size} chunks, multiples of {block} tokens. Shard the batch with "
            "cab_hf.distributed.shard."
        )
    align = sharding.dense_block_size if plan is None else max(plan.blocks)
    shard_map = sharding.shard_map(align, q.device)
    if plan is None:
        ranges = shard_map.cached_ranges(group.rank(), q.shape[0], causal)
        plan = make_plan_of_visible_blocks(ranges, align)
    else:
        _refuse_unfit_plan(plan, q, shard_map, causal)
    layout = ShardedLayout(
        shard_map=shard_map,
        group=group,
        ranges=plan.ranges,
        heads_k_stride=heads_k_stride,
        regather_kv=regather_kv,
    )
    chosen_engine = engines.choose(engine, Workload.from_tensors(q, k, v, plan.blocks))
    return layout, chosen_engine, plan, q.shape[-1] ** -0.5 if scale is None else scale


def _refuse_unfit_plan(plan: BlockPlan, q: Tensor, shard_map: ShardMap, causal: bool) -> None:
    """Raise a ValueError if a plan does not fit q and the sequence, or if ``causal`` is False.

    Args:
        plan: the plan of the caller.
        q: this rank's queries, [B, H, n, D].
        shard_map: the slots of the sequence.
        causal: argument of `zigzag_attention`.
    """
    plan_shape = plan.batch, plan.q_length, plan.kv_length
    expected_shape = q.shape[0], q.shape[2], shard_map.num_slots
    if plan_shape != expected_shape or not causal:
        raise ValueError(
            f"plan must have {expected_shape} (batch, this rank's queries, keys of the whole "
            f"sequence) with causal=True, got {plan_shape} with causal={causal}. Make a plan with "
            "predict."
        )
