"""Select on the GPU: forced blocks, clusters and the top k of every row, without a sort.

The definition is `reference.select_blocks`. One program selects for one row of the plan:

1. It reads which key blocks the row sees, and forces the sinks and the local blocks.
2. It finds the score above which the row's blocks hold ``top_p`` of the estimated mass, by
   bisection (`threshold`), and from there the score above which ``top_k_share`` of the others lie,
   by their largest exact share or their curvature.
3. It walks the row once more and appends each block above its threshold to the row's lists, which
   are ascending because the walk is: full blocks, which need no mask, and partial ones.

Two passes over a row that fits the L2 cache cost less than a sort, and need no memory beside it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.budgets import Budgets
from cab_hf.config import TOP_P_BY_KEYS, CabConfig
from cab_hf.ops.curvature import curvature_score
from cab_hf.ops.reference import TOP_P_TOLERANCE
from cab_hf.ops.score import (
    HeadChunk,
    Scores,
    number_of,
    odd,
    row_chunk,
    unpacked,
    visible_range,
)
from cab_hf.ops.threshold import (
    count_kept,
    is_kept,
    just_below,
    threshold_by_count,
    threshold_by_top_p,
)
from cab_hf.plan import BlockLists

# shares of a row travel as whole multiples of 2^-40: a float32 argument would turn 5 % of 20 into 2
SHARE_ONE = tl.constexpr(1 << 40)
TOLERANCE = tl.constexpr(TOP_P_TOLERANCE)
(SHORT, TOP_P_SHORT), (LONG, TOP_P_LONG) = [map(tl.constexpr, known) for known in TOP_P_BY_KEYS]
# layers whose masses stay on a device
COPIES = 1024


class Lists(NamedTuple):
    """`BlockLists` as the kernels take them; ``room`` is how many blocks a row can list, `odd`."""

    counts: Tensor
    indices: Tensor
    room: int

    @classmethod
    def of(cls, lists: BlockLists) -> Lists:
        return cls(lists.counts, lists.indices, odd(lists.width))


class Tail(NamedTuple):
    """The rows that keep everything.

    Attributes:
        rows: bool [B, M_q], contiguous; None where there are none.
        listed: whether they list it; otherwise they list nothing, and the plan names them.
    """

    rows: Tensor | None
    listed: bool


class HeadBudget(NamedTuple):
    """Budgets of all heads, each its own.

    Attributes:
        top_p: float32 [H], -1 for heads that list nothing.
        share: int64 [H], of a row's blocks, as `SHARE_ONE` has it: the top k that clusters add, or
            (top-k) what is kept.
    """

    top_p: Tensor
    share: Tensor

    @classmethod
    @lru_cache(COPIES)
    def of(
        cls, budgets: Budgets, clusters: bool, heads: int, device: torch.device, exact: bool
    ) -> HeadBudget | None:
        """For heads that choose by exact scores, or for those left to the estimate.

        None where all heads do, and all alike. Made once: the copy to the device is a wait.
        """
        scored = budgets.exact(heads)
        if budgets.alike and (len(scored) == heads) == exact:
            return None
        chosen = [head for head in range(heads) if (head in scored) == exact]
        listed = {head for head in chosen if head not in budgets.dense_heads}
        numbers = [budgets.of_head(head) for head in range(heads)]
        masses = [top_p if h in listed else -1.0 for h, (top_p, *_) in enumerate(numbers)]
        shares = [_share(x[1] if clusters else 1 - x[2]) for x in numbers]
        return cls(torch.tensor(masses, device=device), torch.tensor(shares, device=device))


def select_blocks(
    turn: HeadChunk,
    scores: Scores,
    config: CabConfig,
    budgets: Budgets,
    own: HeadBudget | None,
    full: BlockLists,
    partial: BlockLists,
    bits: Tensor | None,
    tail: Tail,
) -> None:
    """Select for the heads of ``turn`` by their scores, and write the result.

    The scores are used up: their memory holds other values afterwards.

    Args:
        own: where heads have budgets of their own.
        full, partial: lists of all heads with room for what a row may keep, filled for these.
        bits: None, or int32 [B, H, M_q, ceil(M_k / 32)]: then only the counts of the lists are
            written, and bit j % 32 of word j // 32 says that block j is kept; see `fill_lists`.
            They stay as they are for rows that list nothing.
        tail: the rows that keep everything.
    """
    clusters = config.select == "clusters"
    (top_p, *_), (top_k_share, *_), (sparsity, *_) = budgets[:3]
    exact = budgets.top_p == (1,)
    _select_kernel[(turn.count * turn.q_blocks,)](
        turn.packed,
        scores,
        full.counts if bits is None else bits,
        full.counts if tail.rows is None else tail.rows,
        HeadBudget(full.counts, full.counts) if own is None else own,
        Lists.of(full),
        Lists.of(partial),
        top_p,
        config.redundancy,
        _share(top_k_share if clusters else 1 - sparsity),
        _share(config.max_density),
        0 if bits is None else bits.shape[-1],
        config.sink_blocks,
        config.local_blocks,
        QUERY_BLOCK=config.query_block,
        KEY_BLOCK=config.key_block,
        CLUSTERS=clusters,
        OWN=own is not None,
        BY_KEYS=clusters and config.top_p is None,
        EXACT=exact,
        CURVATURE=config.curvature if config.curved else "none",
        TOP_K=not clusters or (any(budgets.top_k_share) and not exact),
        CAPPED=config.max_density < 1,
        SHARED=scores.shares is not None,
        TAIL="none" if tail.rows is None else "listed" if tail.listed else "named",
        LISTS=bits is None,
        CHUNK=row_chunk(turn.kv_blocks),
        num_warps=1,
    )


def fill_lists(
    turn: HeadChunk, bits: Tensor, full: BlockLists, partial: BlockLists, config: CabConfig
) -> None:
    """Write the lists of all heads whose counts `select_blocks` left beside ``bits``."""
    _block_lists_kernel[(full.counts.numel(),)](
        turn.packed,
        bits,
        Lists.of(full),
        Lists.of(partial),
        bits.shape[-1],
        KEY_BLOCK=config.key_block,
        CHUNK=row_chunk(turn.kv_blocks),
        num_warps=1,
    )


def _share(share: float) -> int:
    return round(share * SHARE_ONE.value)


@triton.jit(do_not_specialize=["share", "max_density", "word_count"])
def _select_kernel(
    turn,
    scores,
    bits,
    tail_rows,
    own,
    full,
    partial,
    top_p,
    redundancy,
    share,
    max_density,
    word_count,
    sink_blocks,
    local_blocks,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CLUSTERS: tl.constexpr,
    OWN: tl.constexpr,
    BY_KEYS: tl.constexpr,
    EXACT: tl.constexpr,
    CURVATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    CAPPED: tl.constexpr,
    SHARED: tl.constexpr,
    TAIL: tl.constexpr,
    LISTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    turn = unpacked(turn)
    q_blocks, kv_blocks, width = turn.q_blocks, turn.kv_blocks, turn.width
    rows_plane = turn.rows_plane
    # the longest rows first
    i = q_blocks - 1 - tl.program_id(0) // turn.count
    mine = (tl.program_id(0) % turn.count).to(tl.int64)
    row = mine * q_blocks + i
    place = (turn.start + mine) // turn.heads * q_blocks + i
    # where this row stands among those of all heads
    lists_row = (turn.start + mine) * q_blocks + i
    if OWN:
        head = (turn.start + mine) % turn.heads
        top_p = tl.load(own.top_p + head)
        share = tl.load(own.share + head)
    if OWN or TAIL == "named":
        all_dense = False
        if OWN:
            all_dense = top_p < 0
        if TAIL == "named":
            all_dense = all_dense | tl.load(tail_rows + place)
        if all_dense:
            tl.store(full.counts + lists_row, 0)
            tl.store(partial.counts + lists_row, 0)
            return
    rows = turn.rows + place
    low, high = visible_range(rows, rows_plane, True, KEY_BLOCK)
    diagonal = tl.load(rows + 2 * rows_plane) // KEY_BLOCK
    if BY_KEYS:
        # `reference.top_p_by_keys`
        seen = tl.load(rows + 3 * rows_plane) - tl.load(rows) + 1
        way = (seen - SHORT).to(tl.float32) / (LONG - SHORT)
        top_p += (TOP_P_LONG - TOP_P_SHORT) * tl.clamp(way, 0.0, 1.0)
    # forced are the blocks left of `sinks` and from `tail` on
    blocks = tl.maximum(high - low + 1, 0)
    sinks = tl.minimum(low + sink_blocks, high + 1)
    tail = tl.maximum(tl.minimum(high + 1 - local_blocks, diagonal), low)
    if TAIL == "listed":
        tail = tl.where(tl.load(tail_rows + place), low, tail)
    forced = blocks - tl.maximum(tail - sinks, 0)
    cap = blocks
    if CAPPED:
        cap = tl.maximum(_share_of(blocks, max_density), forced)
    begin = low // CHUNK * CHUNK
    span = (low, high, sinks, tail)

    # what is not there stands as 0: a None cannot pass through a branch
    weights = 0
    nothing = float("inf")
    weight_low = nothing
    weight_high = nothing
    weight_cut = 0
    spare = tl.minimum(_share_of(blocks, share), cap)
    if CLUSTERS:
        weights = scores.estimate + row * width
        if high >= 0:
            shares = 0
            if SHARED:
                shares = scores.shares + row * width
            weight_low, weight_high, weight_cut = _clusters(
                (weights, shares),
                span,
                (top_p - TOLERANCE, forced, cap),
                begin,
                EXACT,
                CAPPED,
                SHARED,
                CHUNK,
            )

    values = scores.direct + row * width
    score_low = nothing
    score_high = nothing
    score_cut = 0
    if TOP_K:
        log_sum = 0.0
        hops = 0
        strength = 0
        if CURVATURE != "none":
            hops = scores.hops + row * turn.coarse_width
        if CURVATURE == "forman":
            strength = scores.strength + row * width
            log_sum = tl.load(scores.log_sum + row)
        if high >= 0:
            left, lowest, highest = curvature_score(
                values,
                (log_sum, hops, strength),
                weights,
                span,
                (weight_low, weight_high, weight_cut),
                kv_blocks,
                redundancy,
                begin,
                QUERY_BLOCK,
                KEY_BLOCK,
                CLUSTERS,
                CURVATURE,
                CHUNK,
            )
            if CLUSTERS:
                spare = tl.minimum(spare, cap - (blocks - left))
            else:
                spare -= forced
            score_low, score_high, score_cut = threshold_by_count(
                values, just_below(lowest), highest, left, spare, begin, high + 1, CHUNK
            )

    whole_low, whole_high = _whole_range(rows, rows_plane, KEY_BLOCK)
    bits += lists_row * word_count
    full_indices = full.indices + lists_row * number_of(full.room)
    partial_indices = partial.indices + lists_row * number_of(partial.room)
    full_count = 0
    partial_count = 0
    column = begin + tl.arange(0, CHUNK)
    if CLUSTERS:
        weight_source = weights + column
    score_source = values + column
    for first in range(begin, high + 1, CHUNK):
        kept = (column < sinks) | (column >= tail)
        if CLUSTERS:
            weight = tl.load(weight_source)
            kept = kept | is_kept(weight, column, weight_low, weight_high, weight_cut)
            weight_source += CHUNK
        if TOP_K:
            score = tl.load(score_source)
            kept = kept | is_kept(score, column, score_low, score_high, score_cut)
            score_source += CHUNK
        kept = kept & (column >= low) & (column <= high)
        if LISTS:
            full_count, partial_count = _append(
                kept,
                column,
                first,
                full_indices,
                partial_indices,
                full_count,
                partial_count,
                whole_low,
                whole_high,
                CHUNK,
            )
        else:
            # [CHUNK / 32, 32]: one bit a block
            word = tl.reshape(kept.to(tl.int32), [CHUNK // 32, 32]) << tl.arange(0, 32)[None, :]
            words = first // 32 + tl.arange(0, CHUNK // 32)
            tl.store(bits + words, tl.sum(word, 1), mask=words < word_count)
            all_seen = kept & (column >= whole_low) & (column <= whole_high)
            full_here = tl.sum(all_seen.to(tl.int32), 0)
            full_count += full_here
            partial_count += tl.sum(kept.to(tl.int32), 0) - full_here
        column += CHUNK
    tl.store(full.counts + lists_row, full_count)
    tl.store(partial.counts + lists_row, partial_count)


@triton.jit(do_not_specialize=["word_count"])
def _block_lists_kernel(
    turn,
    bits,
    full,
    partial,
    word_count,
    KEY_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    turn = unpacked(turn)
    q_blocks, rows_plane = turn.q_blocks, turn.rows_plane
    row = tl.program_id(0).to(tl.int64)
    rows = turn.rows + (row // (turn.heads * q_blocks) * q_blocks + row % q_blocks)
    low, high = visible_range(rows, rows_plane, True, KEY_BLOCK)
    whole_low, whole_high = _whole_range(rows, rows_plane, KEY_BLOCK)
    bits += row * word_count
    full_indices = full.indices + row * number_of(full.room)
    partial_indices = partial.indices + row * number_of(partial.room)
    full_count = 0
    partial_count = 0
    for first in range(low // CHUNK * CHUNK, high + 1, CHUNK):
        column = first + tl.arange(0, CHUNK)
        there = (column >= low) & (column <= high)
        word = tl.load(bits + column // 32, mask=there, other=0)
        kept = there & (((word >> (column % 32)) & 1) != 0)
        full_count, partial_count = _append(
            kept,
            column,
            first,
            full_indices,
            partial_indices,
            full_count,
            partial_count,
            whole_low,
            whole_high,
            CHUNK,
        )


@triton.jit
def _clusters(
    rows,
    span,
    bounds,
    begin,
    EXACT: tl.constexpr,
    CAPPED: tl.constexpr,
    SHARED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Turn a row of logits into weights; (low, high, cut) of those that `reference.top_p_blocks`
    keeps.

    Args:
        rows: logits and, where ``SHARED``, what outlier queries give.
        span: of the row, which sees some block: first and last block that it sees, first that is no
            sink, first of its tail.
        bounds: mass; in blocks those that are forced, and the most that are kept.
    """
    weights, shares = rows
    top_p, forced, cap = bounds
    held, total, largest = _weigh(weights, shares, span, begin, SHARED, CHUNK)
    low, high, _, _ = span
    blocks = high - low + 1
    if EXACT:
        weight_low = -0.5
        weight_high = -0.5
        weight_cut = 0
    else:
        missing = top_p * (held + total) - held
        weight_low, weight_high, weight_cut = threshold_by_top_p(
            weights, largest, total, missing, blocks, begin, high + 1, CHUNK
        )
    if CAPPED:
        room = cap - forced
        taken = count_kept(weights, weight_low, weight_high, weight_cut, begin, high + 1, CHUNK)
        if taken > room:
            under = tl.full([], -0.5, tl.float32)
            weight_low, weight_high, weight_cut = threshold_by_count(
                weights, under, largest, blocks - forced, room, begin, high + 1, CHUNK
            )
    return weight_low, weight_high, weight_cut


@triton.jit
def _weigh(estimate, shares, span, begin, SHARED: tl.constexpr, CHUNK: tl.constexpr):
    """Replace a row of logits by multiples of its softmax, -1 where a block is forced or unseen.

    Where ``SHARED``, by the sum of that softmax and of the ``shares`` as a part of theirs. Returns
    (sum over the forced, sum over the others, the largest of these).
    """
    low, high, sinks, tail = span
    # pointers and columns move on apart: a column that also is an address is compared as 64 bits
    column = begin + tl.arange(0, CHUNK)
    source = estimate + column
    peak = tl.full([CHUNK], -1e30, tl.float32)
    summed = tl.zeros([CHUNK], tl.float32)
    given = tl.zeros([CHUNK], tl.float32)
    for _ in range(begin, high + 1, CHUNK):
        visible = (column >= low) & (column <= high)
        # a row has room for whole chunks: what lies beyond is read, fast, and dropped
        logit = tl.where(visible, tl.load(source), float("-inf"))
        new_peak = tl.maximum(peak, logit)
        if SHARED:
            summed = summed * tl.exp(peak - new_peak) + tl.exp(logit - new_peak)
            given += tl.where(visible, tl.load(shares + column), 0.0)
        peak = new_peak
        column += CHUNK
        source += CHUNK
    top = tl.max(peak, 0)
    part = 1.0
    given_part = 0.0
    if SHARED:
        # so that either sums to 1
        part = 1 / tl.sum(summed * tl.exp(peak - top), 0)
        given_part = 1 / tl.maximum(tl.sum(given, 0), 1e-30)
    column = begin + tl.arange(0, CHUNK)
    source = estimate + column
    held = tl.zeros([CHUNK], tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    largest = tl.zeros([CHUNK], tl.float32)
    for _ in range(begin, high + 1, CHUNK):
        visible = (column >= low) & (column <= high)
        free = (column >= sinks) & (column < tail)
        weight = tl.exp(tl.where(visible, tl.load(source), float("-inf")) - top)
        if SHARED:
            share = tl.where(visible, tl.load(shares + column), 0.0)
            weight = weight * part + share * given_part
        held += tl.where(free, 0.0, weight)
        weight = tl.where(free, weight, 0.0)
        total += weight
        largest = tl.maximum(largest, weight)
        tl.store(source, tl.where(free, weight, -1.0))
        column += CHUNK
        source += CHUNK
    tl.debug_barrier()
    return tl.sum(held, 0), tl.sum(total, 0), tl.max(largest, 0)


@triton.jit
def _share_of(blocks, share):
    """ceil(blocks * share), where a product within rounding of a whole number is that number."""
    multiples = blocks * share.to(tl.int64)
    return ((multiples - blocks + SHARE_ONE - 1) // SHARE_ONE).to(tl.int32)


@triton.jit
def _whole_range(rows, rows_plane, KEY_BLOCK: tl.constexpr):
    """First and last key block that every query of the row sees wholly."""
    low = tl.cdiv(tl.load(rows + rows_plane), KEY_BLOCK)
    return low, (tl.load(rows + 2 * rows_plane) + 1) // KEY_BLOCK - 1


@triton.jit
def _append(
    kept,
    column,
    first,
    full_indices,
    partial_indices,
    full,
    partial,
    whole_low,
    whole_high,
    CHUNK: tl.constexpr,
):
    """Add columns, the lowest of which is ``first``, to the lists of a row: their new lengths."""
    if (first >= whole_low) & (first + CHUNK - 1 <= whole_high):
        rank = tl.cumsum(kept.to(tl.int32), 0)
        tl.store(full_indices + (full - 1 + rank), column, mask=kept)
        full += tl.sum(kept.to(tl.int32), 0)
    else:
        all_seen = (column >= whole_low) & (column <= whole_high)
        # both ranks in one scan: full in the lower half, partial in the upper
        step = tl.where(kept, tl.where(all_seen, 1, 65536), 0)
        rank = tl.cumsum(step, 0)
        tl.store(full_indices + (full - 1 + (rank & 65535)), column, mask=kept & all_seen)
        tl.store(
            partial_indices + (partial - 1 + (rank >> 16)), column, mask=kept & (all_seen == 0)
        )
        added = tl.sum(step, 0)
        full += added & 65535
        partial += added >> 16
    return full, partial
