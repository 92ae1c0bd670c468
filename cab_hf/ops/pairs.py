"""Kernel that counts the (query, key) pairs of a plan. The definition is `BlockPlan.pairs`.

The count takes one launch. `BlockPlan.pairs` takes about fifty.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops.launch import on_device_of
from cab_hf.plan import BlockPlan

# plan heads whose lists a program reads per loop iteration
MAX_HEADS_PER_ITERATION = 16


def count_query_key_pairs(plan: BlockPlan, earlier_sums: Tensor | None = None) -> Tensor:
    """Count the (query, key) pairs of ``plan``, and return the counts plus ``earlier_sums``.

    Args:
        plan: The plan whose pairs are counted, over all heads of the plan.
        earlier_sums: int64 [2], sums of earlier calls, not changed in place; None for zeros.

    Returns:
        int64 [2], the number of pairs that the plan attends to, and the number of causal pairs.
    """
    full_lists, partial_lists, sampled_lists = plan.full, plan.partial, plan.sampled
    key_ranges, dense_rows = plan.ranges, plan.dense_rows
    if earlier_sums is None:
        pair_sums = full_lists.counts.new_zeros(2, dtype=torch.int64)
    else:
        pair_sums = earlier_sums.to(full_lists.counts.device, copy=True)
    batch, heads, num_q_blocks = full_lists.counts.shape
    stride_first_keys_batch, stride_first_keys_token = key_ranges.start.stride()
    stride_last_keys_batch, stride_last_keys_token = key_ranges.end.stride()
    with on_device_of(full_lists.counts):
        _pairs_kernel[(num_q_blocks, batch)](
            pair_sums=pair_sums,
            full_counts=full_lists.counts,
            sampled_counts=None if sampled_lists is None else sampled_lists.counts,
            partial_counts=partial_lists.counts,
            partial_indices=partial_lists.indices,
            first_keys=key_ranges.start,
            stride_first_keys_batch=stride_first_keys_batch,
            stride_first_keys_token=stride_first_keys_token,
            last_keys=key_ranges.end,
            stride_last_keys_batch=stride_last_keys_batch,
            stride_last_keys_token=stride_last_keys_token,
            dense_rows=dense_rows,
            num_dense_rows=0 if dense_rows is None else dense_rows.shape[1],
            heads=heads,
            q_length=key_ranges.q_length,
            num_q_blocks=num_q_blocks,
            list_width=partial_lists.width,
            QUERY_BLOCK=plan.query_block,
            KEY_BLOCK=plan.key_block,
            BLOCK_HEADS=min(MAX_HEADS_PER_ITERATION, triton.next_power_of_2(heads)),
            BLOCK_QUERIES=triton.next_power_of_2(plan.query_block),
        )
    return pair_sums


# numbers that depend on the sequence length must not cause another compilation
@triton.jit(
    do_not_specialize=[
        "stride_first_keys_batch",
        "stride_last_keys_batch",
        "num_dense_rows",
        "q_length",
        "num_q_blocks",
        "list_width",
    ]
)
def _pairs_kernel(
    pair_sums,
    full_counts,
    sampled_counts,
    partial_counts,
    partial_indices,
    first_keys,
    stride_first_keys_batch,
    stride_first_keys_token,
    last_keys,
    stride_last_keys_batch,
    stride_last_keys_token,
    dense_rows,
    num_dense_rows,
    heads,
    q_length,
    num_q_blocks,
    list_width,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
):
    """Add the attended and the causal pairs of one query block, over all heads, to ``pair_sums``.

    ``pair_sums`` is int64 [2].
    """
    q_block = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)

    # ranges of visible keys, [QUERIES] each; a padding query has an empty range
    query_index = tl.arange(0, BLOCK_QUERIES)
    query_position = q_block * QUERY_BLOCK + query_index
    is_in_bounds = (query_index < QUERY_BLOCK) & (query_position < q_length)
    first_key = tl.load(
        first_keys + batch * stride_first_keys_batch + query_position * stride_first_keys_token,
        mask=is_in_bounds,
        other=0,
    )
    last_key = tl.load(
        last_keys + batch * stride_last_keys_batch + query_position * stride_last_keys_token,
        mask=is_in_bounds,
        other=-1,
    )
    num_queries = tl.sum((last_key >= 0).to(tl.int64), 0)
    num_causal_keys = tl.sum(tl.maximum(last_key - first_key + 1, 0).to(tl.int64), 0)

    # query blocks in ``dense_rows`` have empty lists, and attend to all visible keys in every head
    num_dense_heads = tl.zeros([], tl.int64)
    if dense_rows is not None:
        for dense_row_index in range(num_dense_rows):
            is_dense = tl.load(dense_rows + batch * num_dense_rows + dense_row_index) == q_block
            num_dense_heads = tl.where(is_dense, heads, num_dense_heads)
    num_attended = num_causal_keys * num_dense_heads

    for first_head in range(0, heads, BLOCK_HEADS):
        # full and sampled blocks, [HEADS]: all KEY_BLOCK keys count for every query except padding
        head = first_head + tl.arange(0, BLOCK_HEADS)
        is_real_head = head < heads
        list_row = (batch * heads + head) * num_q_blocks + q_block
        num_full_blocks = tl.load(full_counts + list_row, mask=is_real_head, other=0).to(tl.int64)
        if sampled_counts is not None:
            num_full_blocks += tl.load(sampled_counts + list_row, mask=is_real_head, other=0)
        num_attended += tl.sum(num_full_blocks, 0) * num_queries * KEY_BLOCK
        # partial blocks: the part of each block inside the range of each query
        num_partial_blocks = tl.load(partial_counts + list_row, mask=is_real_head, other=0)
        for list_slot in range(tl.max(num_partial_blocks, 0)):
            listed_block = tl.load(
                partial_indices + list_row * list_width + list_slot,
                mask=list_slot < num_partial_blocks,
                other=0,
            )
            block_start = listed_block[:, None] * KEY_BLOCK
            # [HEADS, QUERIES]
            first_attended_key = tl.maximum(block_start, first_key[None, :])
            last_attended_key = tl.minimum(block_start + (KEY_BLOCK - 1), last_key[None, :])
            num_attended_keys = tl.where(
                (list_slot < num_partial_blocks)[:, None],
                tl.maximum(last_attended_key - first_attended_key + 1, 0),
                0,
            )
            num_attended += tl.sum(tl.sum(num_attended_keys, 1).to(tl.int64), 0)
    tl.atomic_add(pair_sums, num_attended)
    tl.atomic_add(pair_sums + 1, num_causal_keys * heads)
