"""Check the invariants of plans that engines rely on."""

from cab_hf.plan import BlockPlan, visibility


def require_valid(plan: BlockPlan) -> None:
    """Assert dtypes, shapes, bounds, order and visibility of the key blocks in all lists."""
    rows, columns = plan.ranges.rows(plan.query_block), plan.kv_blocks
    shape = (plan.batch, plan.heads, plan.q_blocks)
    for name, lists in plan.lists.items():
        for x, expected in ((lists.counts, shape), (lists.indices, (*shape, lists.width))):
            assert str(x.dtype) == "torch.int32" and tuple(x.shape) == expected, name
        counts, indices, listed = lists.counts, lists.indices, lists.listed()
        assert ((counts >= 0) & (counts <= lists.width)).all(), f"counts of {name}"
        outside = listed & ((indices < 0) | (indices >= columns))
        assert not outside.any(), f"indices of {name} are no key blocks"
        falling = listed[..., 1:] & (indices[..., 1:] <= indices[..., :-1])
        assert not falling.any(), f"indices of {name} are not ascending"
    dense = {name: lists.to_dense(columns) for name, lists in plan.lists.items()}
    visible, complete = (x.unsqueeze(1) for x in visibility(rows, plan.key_block, plan.kv_length))
    assert not (dense["full"] & dense["partial"]).any(), "a block is full and partial"
    assert not (dense["partial"] & ~visible).any(), "a partial block is masked for all queries"
    for name in dense.keys() - {"partial"}:
        assert not (dense[name] & ~complete).any(), f"a block of {name} is masked for some query"
    if plan.sampled is not None:
        assert not (dense["full"] & dense["sampled"]).any(), "a block is listed and sampled"
    if plan.dense_rows is not None:
        dense_rows = plan.dense_rows
        assert str(dense_rows.dtype) == "torch.int64" and dense_rows.shape[0] == plan.batch
        is_query_block = (dense_rows >= -1) & (dense_rows < plan.q_blocks)
        assert is_query_block.all(), "dense_rows are no query blocks"
        ordered = dense_rows.sort(-1).values
        is_repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        assert not is_repeated.any(), "dense_rows name a query block twice"
        has_blocks = sum(lists.counts for lists in plan.lists.values()) > 0
        assert not (plan.is_dense() & has_blocks).any(), "a dense row lists blocks"
