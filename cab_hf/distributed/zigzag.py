"""Attention over a text that many ranks hold, without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cab_hf import engines
from cab_hf.call.layout import everything
from cab_hf.call.refusals import DTYPES
from cab_hf.checks import is_whole, require
from cab_hf.distributed.exchange import group_of, require_equal
from cab_hf.distributed.kv_gather import KV_HEADS_TOGETHER
from cab_hf.distributed.sharded import ShardedLayout
from cab_hf.distributed.sharding import Sharding, ShardMap, sharding_between
from cab_hf.engines import Engine, Workload
from cab_hf.plan import EXACT_BLOCK, BlockPlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def zigzag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    plan: BlockPlan | None = None,
    heads_k_stride: int = KV_HEADS_TOGETHER,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    engine: str = "auto",
    block: int = EXACT_BLOCK,
    regather_kv: bool = True,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks of ``group``, exact.

    Every document of the text is padded to 2 W chunks of whole blocks, of which rank r holds chunks
    r and 2 W - 1 - r, one behind the other, document by document; `shard` deals a batch out so.
    K and V travel a slice of KV heads at a time, the next while this one is attended; both chunks
    are one launch. Backward sums the gradients of K and V over the ranks, in their dtype.

    Args:
        q: [B, H, n, D], this rank's queries after RoPE of their positions in the document.
        k, v: [B, H_kv, n, D] and [B, H_kv, n, D_v], this rank's.
        group: the ranks that hold one text; None for all.
        plan: which key blocks are attended, of this rank's query blocks: `predict` makes one. All
            by default.
        heads_k_stride: KV heads that travel together, at least 1: fewer take less memory.
        cu_seqlens: int [documents + 1], where documents of the whole text begin and end, padding
            left out, on every rank. By default one document without padding, of W n tokens.
        causal: whether queries see no key behind them.
        scale: what logits are multiplied by, 1 / sqrt(D) by default.
        engine: as in `CabConfig`.
        block: tokens of which chunks are whole multiples, on every rank.
        regather_kv: gather K and V once more for the backward pass, instead of keeping the whole
            text's of every layer; False under gradient checkpointing, which gathers again by
            itself.
        check: whether ranks compare what they were given first: one small all-gather and a wait.
            False is for loops whose first turn was compared.

    Returns:
        out [B, H, n, D_v], and the log-sum-exp of each query's logits, float32 [B, H, n], through
        which no gradient flows. Padding queries get zeros and -inf.

    Raises:
        ValueError: for shapes that do not fit each other, ``cu_seqlens`` or the plan; on every rank
            where ranks differ.
        RankLost: where another rank has stopped.
    """
    fields = {name: value for name, value in locals().items() if name not in ("q", "k", "v")}
    layout, engine, plan, scale = checked(q, k, v, **fields)
    return layout.attention(engine, q, k, v, plan, scale)


def refuse_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError for tensors that are not q, k and v of one rank."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.dtype not in DTYPES or x.dtype != q.dtype:
            raise ValueError(
                "q, k and v must be [B, heads, n, D] of one floating dtype, got "
                f"{name} {x.dtype} {tuple(x.shape)}."
            )
    same = all(x.shape[::2] == q.shape[::2] for x in (k, v)) and k.shape[1] == v.shape[1]
    if not same or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; a rank has queries "
            "and keys of the same tokens, q and k have one D, and the heads of q are a multiple of "
            "those of k and v."
        )


def require_sizes(heads_k_stride: int, block: int) -> None:
    """Raises ValueError for numbers that are not those of `zigzag_attention`."""
    require(is_whole(heads_k_stride), "heads_k_stride", heads_k_stride, "a whole number >= 1")
    require(is_whole(block) and block % 16 == 0, "block", block, "a multiple of 16")


def rank_facts(q: Tensor, k: Tensor, v: Tensor, sharding: Sharding | None) -> dict[str, int]:
    """What the ranks of one text must have in common."""
    lengths = () if sharding is None else sharding.lengths
    return {
        "batch rows": q.shape[0],
        "heads": q.shape[1],
        "KV heads": k.shape[1],
        "tokens of a rank": q.shape[2],
        "head dims": q.shape[3],
        "channels of v": v.shape[3],
        "dtypes": DTYPES.index(q.dtype) if q.dtype in DTYPES else -1,
        "documents": len(lengths),
        "tokens of the text": sum(lengths),
        # lengths of documents in one number; Python's hash of whole numbers is the same everywhere
        "document lengths (their hash)": hash(lengths),
        "blocks": 0 if sharding is None else sharding.block,
    }


def checked(
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
    """(the layout, what attends, under which plan, scale) of the arguments of `zigzag_attention`.

    Raises what that documents.
    """
    group = group_of(group)
    refuse_shapes(q, k, v)
    require_sizes(heads_k_stride, block)
    world, tokens = group.size(), q.shape[2]
    sharding = sharding_between(cu_seqlens, tokens, world, block)
    if check:
        require_equal(rank_facts(q, k, v, sharding), group, q.device)
    if sharding.tokens != tokens:
        raise ValueError(
            f"q has {tokens} tokens and each of {world} ranks holds {sharding.tokens} of "
            f"documents of {list(sharding.lengths[:8])} tokens padded to {2 * world} chunks of "
            f"whole blocks of {block}; cab_hf.distributed.shard deals them out so."
        )
    align = sharding.exact_block if plan is None else max(plan.blocks)
    shard_map = sharding.shard_map(align, q.device)
    if plan is None:
        spans = shard_map.kept_spans(group.rank(), q.shape[0], causal)
        plan = everything(spans, align)
    else:
        _refuse_plan(plan, q, shard_map, causal)
    how = {"heads_k_stride": heads_k_stride, "regather_kv": regather_kv}
    layout = ShardedLayout(shard_map, group, plan.spans, **how)
    runs = engines.choose(engine, Workload.of(q, k, v, plan.blocks))
    return layout, runs, plan, q.shape[-1] ** -0.5 if scale is None else scale


def _refuse_plan(plan: BlockPlan, q: Tensor, shard_map: ShardMap, causal: bool) -> None:
    result = plan.batch, plan.q_length, plan.kv_length
    expected = q.shape[0], q.shape[2], shard_map.length
    if result != expected or not causal:
        raise ValueError(
            f"plan must be causal, of {expected} (batch, queries of this rank, keys of the whole "
            f"sequence), got {result} with causal={causal}."
        )
