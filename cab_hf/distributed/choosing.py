"""Plans of a text that many ranks hold, the same as one process would make.

A rank summarises its own keys, and summaries travel, not keys. What else a row's choice depends on
travels too, and nothing else:

* two-hop paths run through the rows of the whole text: where curvature takes part, every rank gets
  the coarsened queries of all, chooses for all rows, and keeps its own. That part of choosing is
  not divided by the ranks.
* heads whose outlier queries are scored exactly need keys: the scored channels of theirs are
  gathered, in 8 bits where they are scored so. Every rank scores the queries that it holds.
* the layers behind an anchor of a cascade need nothing.
* which rows end a text (``dense_tail``) is told by the layout.

Any other predictor that is not CAB itself is handed the whole q and k, gathered, by every rank:
always right, and as slow as on one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cab_hf.budgets import Budgets, budgets_of
from cab_hf.config import CabConfig
from cab_hf.distributed.exchange import gathered, group_of
from cab_hf.distributed.layout import Places, Shard, layout_of, lengths_between
from cab_hf.ops.reference import KeySummary
from cab_hf.plan import EXACT_BLOCK, BlockLists, BlockPlan, Spans, named_rows, once_per_spans
from cab_hf.predictors import (
    Call,
    CascadePredictor,
    CurvaturePredictor,
    Predictor,
    make_predictor,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def predict(
    q: Tensor,
    k: Tensor,
    *,
    group: ProcessGroup | None,
    config: CabConfig,
    layer: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    block: int = EXACT_BLOCK,
    spans: Spans | None = None,
) -> BlockPlan:
    """The plan of this rank's queries for `zigzag_attention`, rows of the plan of one process.

    Args:
        q, k, group, scale, cu_seqlens, block: as in `zigzag_attention`; every rank calls this.
        config: whose predictor decides; its blocks divide ``block``.
        layer: whose budgets count, where they are a table.
        spans: those of the plan of another layer of the same text: what is made of them is then
            made once for both.

    Returns:
        A plan of [B, H, n / query_block] rows, in key blocks of the frame of the whole text.

    Raises:
        ValueError: for ``spans`` of another text.
    """
    group = group_of(group)
    world, tokens = group.size(), q.shape[2]
    lengths = (world * tokens,) if cu_seqlens is None else lengths_between(cu_seqlens)
    places = layout_of(lengths, world, block).places(
        max(config.query_block, config.key_block), q.device
    )
    if spans is None:
        spans = places.spans(group.rank(), q.shape[0])
    elif getattr(spans, "places", None) is not places or spans.first.shape[0] != q.shape[0]:
        raise ValueError(
            "spans is of another text than q; give those of a plan that predict made of this text "
            "on this rank, or None."
        )
    call = Call(spans, q.shape[-1] ** -0.5 if scale is None else scale, layer)
    return choose(make_predictor(config), q, k, places, group, call)


@torch.no_grad()
def choose(
    predictor: Predictor, q: Tensor, k: Tensor, places: Places, group: ProcessGroup, call: Call
) -> BlockPlan:
    """`predict` by a predictor, ``call.spans`` being a `Shard` of ``places``."""
    if isinstance(predictor, CascadePredictor):
        # an anchor hands on the rows of this rank
        heads, anchor = (q.shape[1], k.shape[1]), predictor.anchor
        return predictor.handed_on(heads, call, lambda: choose(anchor, q, k, places, group, call))
    if type(predictor) is not CurvaturePredictor:
        return _by_all_of_it(predictor, q, k, places, group, call)
    config = predictor.config
    budgets = budgets_of(config, call.layer, q.shape[1])
    real = places.layout.real[group.rank()].to(k.device).expand(k.shape[0], -1)
    mine = predictor.summarise(k, real, call.channels)
    summary = _everyones_summary(mine, places, group, config.key_block)
    exact = budgets.exact(q.shape[1])
    if exact:
        sharing = q.shape[1] // k.shape[1]
        summary = replace(summary, keys=_keys_of(exact, mine.keys, sharing, places, group))
    if not _hops(config, budgets):
        return predictor.choose(q, summary, call)
    plan = _for_all_rows(config, q, summary, places, group, call)
    if exact:
        # exact scores know no paths: the rows at hand are all they need
        plain = CurvaturePredictor(replace(config, redundancy=0))
        plan = _with_heads(plan, plain.choose(q, summary, call), exact)
    return plan


def union(plan: BlockPlan, kv_heads: int) -> Tensor:
    """bool [B, H_kv, M_k]: the key blocks that any query of a rank attends.

    Its mean is the share of the text's K and V that a rank could do with.
    """
    needed = plan.to_dense().any(2)
    if plan.heads < kv_heads:
        return needed.repeat_interleave(kv_heads // plan.heads, dim=1)
    return needed.unflatten(1, (kv_heads, -1)).any(2)


def _hops(config: CabConfig, budgets: Budgets) -> bool:
    """Whether any head's choice depends on two-hop paths or column sums."""
    bridged = config.select == "topk" or any(budgets.bridges)
    return config.curved and bridged


def _for_all_rows(
    config: CabConfig,
    q: Tensor,
    summary: KeySummary,
    places: Places,
    group: ProcessGroup,
    call: Call,
) -> BlockPlan:
    """The estimated plan of all rows of the text, of which this rank keeps its own."""
    predictor = CurvaturePredictor(replace(config, exact_queries=0))
    spans, size = call.spans, config.query_block
    mine = predictor.vectors(q, spans).permute(2, 0, 1, 3)
    vectors = _blocks(mine, places, group, size).permute(1, 2, 0, 3)
    # who brings vectors is asked for shapes alone
    shape = q.shape[0], q.shape[1], spans.text.q_length, q.shape[3]
    everyone = q.new_zeros(1).expand(shape)
    plan = predictor.choose(everyone, summary, replace(call, spans=spans.text), vectors)
    return plan.take_rows(_text_rows(spans, size), spans)


def _by_all_of_it(
    predictor: Predictor, q: Tensor, k: Tensor, places: Places, group: ProcessGroup, call: Call
) -> BlockPlan:
    q, k = (_tokens(x, places, group) for x in (q, k))
    plan = predictor(q, k, replace(call, spans=call.spans.text))
    if plan.query_block % places.align and places.align % plan.query_block:
        raise ValueError(
            f"predictor {predictor.config.predictor!r} makes query blocks of {plan.query_block}, "
            f"which the ranks' chunks of {places.layout.block} tokens cut; give block="
            f"{plan.query_block} to what shards and to what attends."
        )
    return plan.take_rows(_text_rows(call.spans, plan.query_block), call.spans)


@once_per_spans
def _text_rows(spans: Shard, query_block: int) -> Tensor:
    return spans.text_rows(query_block)


def _everyones_summary(
    summary: KeySummary, places: Places, group: ProcessGroup, key_block: int
) -> KeySummary:
    """The summaries of all ranks' keys, in the order of the frame."""
    mine = summary.planes.permute(3, 0, 1, 2, 4)
    return KeySummary(_blocks(mine, places, group, key_block).permute(1, 2, 3, 0, 4).contiguous())


def _blocks(mine: Tensor, places: Places, group: ProcessGroup, size: int) -> Tensor:
    """What all ranks know of their blocks of ``size`` tokens, [m, ...], put together: [M, ...].

    Zeros for a block of the frame in which no token stands.
    """
    source, filled = places.blocks(size)
    everyone = gathered(mine, group)[source]
    return everyone.masked_fill(~filled.view(-1, *[1] * (mine.ndim - 1)), 0.0)


def _tokens(x: Tensor, places: Places, group: ProcessGroup) -> Tensor:
    """x [B, H, n, D] of all ranks in the order of the frame, [B, H, N', D]."""
    return gathered(x.permute(2, 0, 1, 3), group)[places.source].permute(1, 2, 0, 3)


def _keys_of(
    heads: tuple[int, ...], keys: Tensor, group_size: int, places: Places, group: ProcessGroup
) -> Tensor:
    """[B, H_kv, N', C]: the scored keys that these heads of q need, of others anything."""
    needed = sorted({head // group_size for head in heads})
    # bytes travel where backends know no floats of 8 bits
    bits = keys.view(torch.uint8) if keys.element_size() == 1 else keys
    everyone = bits.new_empty(*bits.shape[:2], places.length, bits.shape[3])
    everyone[:, needed] = _tokens(bits[:, needed], places, group)
    return everyone.view(keys.dtype)


def _with_heads(plan: BlockPlan, other: BlockPlan, heads: tuple[int, ...]) -> BlockPlan:
    """``plan`` with some heads of another plan of the same rows."""

    def merged(mine: BlockLists, theirs: BlockLists) -> BlockLists:
        width = max(mine.width, theirs.width)
        mine, theirs = mine.widened(width), theirs.widened(width)
        index = torch.tensor(heads, device=mine.counts.device)
        return BlockLists(
            mine.counts.index_copy(1, index, theirs.counts[:, index]),
            mine.indices.index_copy(1, index, theirs.indices[:, index]),
        )

    full, partial = merged(plan.full, other.full), merged(plan.partial, other.partial)
    return replace(plan, full=full, partial=partial)


def short_rows(places: Places, spans: Shard, queries: int, tokens: int, size: int) -> Any:
    """`Frame.short` of the whole text, as rows of this rank: int64 [B, R], or None for none."""
    short = places.frame.short(queries, tokens, size)
    return None if short is None else _short_rows(spans, short, size)


@once_per_spans
def _short_rows(spans: Shard, short: Tensor, size: int) -> Tensor:
    blocks = -(-spans.text.q_length // size)
    named = torch.zeros(1, blocks + 1, device=short.device, dtype=torch.bool)
    named = named.scatter(1, short.where(short >= 0, blocks), True)[:, :-1]
    rows = spans.taken(named, size)
    return named_rows(rows, rows.shape[1]).expand(spans.first.shape[0], -1)
