"""Count of the (query, key) pairs of a plan on the GPU, in one launch instead of some fifty.

The definition is `BlockPlan.pairs`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.launch import on_device_of
from cab_hf.plan import BlockPlan

# heads whose lists a program reads at a time
HEADS_AT_A_TIME = 16


def add_pairs(plan: BlockPlan, before: Tensor | None = None) -> Tensor:
    """Return `BlockPlan.pairs` plus ``before``: attended and causal pairs, int64 [2]."""
    counts = plan.full.counts
    if before is None:
        sums = counts.new_zeros(2, dtype=torch.int64)
    else:
        sums = before.to(counts.device, copy=True)
    batch, heads, rows = counts.shape
    ranges, partial, sampled, named = plan.ranges, plan.partial, plan.sampled, plan.dense_rows
    with on_device_of(counts):
        _pairs_kernel[(rows, batch)](
            sums,
            counts,
            None if sampled is None else sampled.counts,
            partial.counts,
            partial.indices,
            ranges.start,
            *ranges.start.stride(),
            ranges.end,
            *ranges.end.stride(),
            named,
            0 if named is None else named.shape[1],
            heads,
            ranges.q_length,
            rows,
            partial.width,
            QUERY_BLOCK=plan.query_block,
            KEY_BLOCK=plan.key_block,
            HEADS=min(HEADS_AT_A_TIME, triton.next_power_of_2(heads)),
            QUERIES=triton.next_power_of_2(plan.query_block),
        )
    return sums


# numbers that depend on the sequence length must not cause another compilation
@triton.jit(
    do_not_specialize=["first_batch", "last_batch", "named_count", "q_length", "rows", "width"]
)
def _pairs_kernel(
    sums,
    full_counts,
    sampled_counts,
    partial_counts,
    partial_indices,
    first,
    first_batch,
    first_token,
    last,
    last_batch,
    last_token,
    named,
    named_count,
    heads,
    q_length,
    rows,
    width,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Add the pairs of one row of the plan, over all heads."""
    row = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, QUERIES)
    query = row * QUERY_BLOCK + place
    exists = (place < QUERY_BLOCK) & (query < q_length)
    begin = tl.load(first + batch * first_batch + query * first_token, mask=exists, other=0)
    end = tl.load(last + batch * last_batch + query * last_token, mask=exists, other=-1)
    queries = tl.sum((end >= 0).to(tl.int64), 0)
    causal = tl.sum(tl.maximum(end - begin + 1, 0).to(tl.int64), 0)

    # rows of ``dense_rows`` attend to everything and list nothing
    everything = tl.zeros([], tl.int64)
    if named is not None:
        for at in range(named_count):
            here = tl.load(named + batch * named_count + at) == row
            everything = tl.where(here, heads, everything)
    attended = causal * everything
    for head_begin in range(0, heads, HEADS):
        head = head_begin + tl.arange(0, HEADS)
        inside = head < heads
        line = (batch * heads + head) * rows + row
        blocks = tl.load(full_counts + line, mask=inside, other=0).to(tl.int64)
        if sampled_counts is not None:
            blocks += tl.load(sampled_counts + line, mask=inside, other=0)
        attended += tl.sum(blocks, 0) * queries * KEY_BLOCK
        count = tl.load(partial_counts + line, mask=inside, other=0)
        for slot in range(tl.max(count, 0)):
            block = tl.load(partial_indices + line * width + slot, mask=slot < count, other=0)
            start = block[:, None] * KEY_BLOCK
            # [HEADS, QUERIES]
            low = tl.maximum(start, begin[None, :])
            high = tl.minimum(start + (KEY_BLOCK - 1), end[None, :])
            seen = tl.where((slot < count)[:, None], tl.maximum(high - low + 1, 0), 0)
            attended += tl.sum(tl.sum(seen, 1).to(tl.int64), 0)
    tl.atomic_add(sums, attended)
    tl.atomic_add(sums + 1, causal * heads)
