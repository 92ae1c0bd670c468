"""Check the invariants of plans that engines rely on."""

from cab_hf.plan import BlockPlan, visibility


def assert_valid_plan(plan: BlockPlan) -> None:
    """Assert dtypes, shapes, bounds, order and visibility of the key blocks in all lists."""
    row_ranges, num_key_blocks = plan.ranges.rows(plan.query_block), plan.kv_blocks
    shape = (plan.batch, plan.heads, plan.q_blocks)
    for list_name, block_lists in plan.lists.items():
        for x, expected in (
            (block_lists.counts, shape),
            (block_lists.indices, (*shape, block_lists.width)),
        ):
            assert str(x.dtype) == "torch.int32" and tuple(x.shape) == expected, list_name
        counts, indices, is_listed = block_lists.counts, block_lists.indices, block_lists.listed()
        assert ((counts >= 0) & (counts <= block_lists.width)).all(), f"counts of {list_name}"
        is_outside = is_listed & ((indices < 0) | (indices >= num_key_blocks))
        assert not is_outside.any(), f"indices of {list_name} are no key blocks"
        is_not_ascending = is_listed[..., 1:] & (indices[..., 1:] <= indices[..., :-1])
        assert not is_not_ascending.any(), f"indices of {list_name} are not ascending"
    block_masks = {
        list_name: block_lists.to_dense(num_key_blocks)
        for list_name, block_lists in plan.lists.items()
    }
    is_visible, is_unmasked = (
        x.unsqueeze(1) for x in visibility(row_ranges, plan.key_block, plan.kv_length)
    )
    assert not (block_masks["full"] & block_masks["partial"]).any(), "a block is full and partial"
    assert not (block_masks["partial"] & ~is_visible).any(), (
        "a partial block is masked for all queries"
    )
    for list_name in block_masks.keys() - {"partial"}:
        assert not (block_masks[list_name] & ~is_unmasked).any(), (
            f"a block of {list_name} is masked for some query"
        )
    if plan.sampled is not None:
        assert not (block_masks["full"] & block_masks["sampled"]).any(), (
            "a block is listed and sampled"
        )
    if plan.dense_rows is not None:
        dense_rows = plan.dense_rows
        assert str(dense_rows.dtype) == "torch.int64" and dense_rows.shape[0] == plan.batch
        is_query_block = (dense_rows >= -1) & (dense_rows < plan.q_blocks)
        assert is_query_block.all(), "dense_rows are no query blocks"
        sorted_rows = dense_rows.sort(-1).values
        is_repeated = (sorted_rows[:, 1:] == sorted_rows[:, :-1]) & (sorted_rows[:, 1:] >= 0)
        assert not is_repeated.any(), "dense_rows name a query block twice"
        has_blocks = sum(block_lists.counts for block_lists in plan.lists.values()) > 0
        assert not (plan.is_dense() & has_blocks).any(), "a dense row lists blocks"
