"""Checks of the invariants that engines rely on."""

from cab_hf.plan import BlockPlan, visibility


def require_valid(plan: BlockPlan) -> None:
    """Check dtypes, shapes, bounds and order of every list, and the visibility of its blocks."""
    rows, columns = plan.ranges.rows(plan.query_block), plan.kv_blocks
    shape = (plan.batch, plan.heads, plan.q_blocks)
    for name, part in plan.lists.items():
        for x, expected in ((part.counts, shape), (part.indices, (*shape, part.width))):
            assert str(x.dtype) == "torch.int32" and tuple(x.shape) == expected, name
        counts, indices, listed = part.counts, part.indices, part.listed()
        assert ((counts >= 0) & (counts <= part.width)).all(), f"counts of {name}"
        outside = listed & ((indices < 0) | (indices >= columns))
        assert not outside.any(), f"indices of {name} are no key blocks"
        falling = listed[..., 1:] & (indices[..., 1:] <= indices[..., :-1])
        assert not falling.any(), f"indices of {name} are not ascending"
    dense = {name: part.to_dense(columns) for name, part in plan.lists.items()}
    visible, complete = (x.unsqueeze(1) for x in visibility(rows, plan.key_block, plan.kv_length))
    assert not (dense["full"] & dense["partial"]).any(), "a block is full and partial"
    assert not (dense["partial"] & ~visible).any(), "a partial block that no query may see"
    for name in dense.keys() - {"partial"}:
        assert not (dense[name] & ~complete).any(), f"{name} lists what some query may not see"
    if plan.sampled is not None:
        assert not (dense["full"] & dense["sampled"]).any(), "a block is listed and sampled"
    if plan.dense_rows is not None:
        named = plan.dense_rows
        assert str(named.dtype) == "torch.int64" and named.shape[0] == plan.batch
        assert ((named >= -1) & (named < plan.q_blocks)).all(), "dense_rows are no query blocks"
        ordered = named.sort(-1).values
        again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        assert not again.any(), "dense_rows name a query block twice"
        listed = sum(part.counts for part in plan.lists.values()) > 0
        assert not (plan.is_dense() & listed).any(), "a dense row lists blocks"
