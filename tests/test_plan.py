"""`BlockPlan` and `BlockLayout` in small cases with handwritten results."""

import dataclasses

import pytest
import torch
from valid_plan import assert_valid_plan

from cab_hf.call.layout import BlockLayout
from cab_hf.plan import BlockIndices, BlockPlan, KeyRanges, block_visibility


@pytest.fixture
def handwritten_plan():
    """Return a causal plan of 3 x 3 blocks of 2 tokens; the last query block skips block 1."""
    is_selected = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)[None, None]
    key_ranges = KeyRanges.causal(1, 6, 6, "cpu")
    return BlockPlan.from_dense(is_selected, key_ranges, query_block=2, key_block=2)


def test_block_indices_of_handwritten_plan(handwritten_plan):
    assert handwritten_plan.full.counts.tolist() == [[[0, 1, 1]]]
    assert handwritten_plan.full.indices.tolist() == [[[[0, 0, 0], [0, 0, 0], [0, 0, 0]]]]
    assert handwritten_plan.partial.counts.tolist() == [[[1, 1, 1]]]
    assert handwritten_plan.partial.indices[0, 0, :, 0].tolist() == [0, 1, 2]
    assert_valid_plan(handwritten_plan)


def test_token_mask_of_handwritten_plan(handwritten_plan):
    assert handwritten_plan.token_mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]
    assert torch.equal(handwritten_plan.token_mask(3, 5), handwritten_plan.token_mask()[:, :, 3:5])


def test_density_of_handwritten_plan(handwritten_plan):
    num_attended, num_causal = handwritten_plan.pairs()
    assert (int(num_attended), int(num_causal)) == (17, 21)
    assert handwritten_plan.density() == 17 / 21


def test_derived_range_tensors_are_cached_across_layers(handwritten_plan):
    key_ranges = handwritten_plan.ranges
    first_tensors = key_ranges.rows(2), key_ranges.blocked(2), key_ranges.pairs()
    density = handwritten_plan.density()
    # another plan with the same `KeyRanges` reads the same cache
    dataclasses.replace(handwritten_plan).density()
    second_tensors = key_ranges.rows(2), key_ranges.blocked(2), key_ranges.pairs()
    assert all(
        first_tensor is second_tensor
        for first_tensor, second_tensor in zip(first_tensors, second_tensors, strict=True)
    )
    assert handwritten_plan.density() == density
    # each block size has its own cache entry
    assert key_ranges.rows(3).queries.tolist() == [[3, 3]] and key_ranges.rows(
        2
    ).queries.tolist() == [[2] * 3]


def test_transpose_of_handwritten_plan(handwritten_plan):
    transposed_full, transposed_partial = (
        block_lists.transpose(handwritten_plan.kv_blocks)
        for block_lists in (handwritten_plan.full, handwritten_plan.partial)
    )
    assert transposed_full.counts.tolist() == [[[2, 0, 0]]]
    assert transposed_full.indices[0, 0, 0, :2].tolist() == [1, 2]
    assert transposed_partial.to_dense(3)[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("list_width", [None, 7])
def test_from_dense_and_to_dense_are_inverse(list_width):
    is_selected = torch.rand(2, 3, 5, 11, generator=torch.Generator().manual_seed(0)) < 0.4
    block_lists = BlockIndices.from_dense(
        is_selected, list_width and int(is_selected.sum(-1).max())
    )
    assert torch.equal(block_lists.to_dense(11), is_selected)
    assert not block_lists.indices[~block_lists.listed()].any()


@pytest.mark.parametrize(("query_block", "key_block"), [(32, 16), (16, 32), (16, 16)])
@pytest.mark.parametrize(
    ("q_length", "kv_length"), [(1, 1), (15, 15), (16, 16), (17, 17), (205, 205), (40, 131)]
)
def test_density_equals_token_mask_count(q_length, kv_length, query_block, key_block):
    key_ranges = KeyRanges.causal(2, q_length, kv_length, "cpu")
    dense_plan = BlockPlan.causal(key_ranges, 3, query_block, key_block)
    generator = torch.Generator().manual_seed(1)
    is_selected = torch.rand(dense_plan.to_dense().shape, generator=generator) < 0.5
    plan = BlockPlan.from_dense(
        is_selected, key_ranges, query_block=query_block, key_block=key_block
    )
    assert_valid_plan(plan)
    assert int(plan.pairs()[0]) == int(plan.token_mask().sum())
    assert dense_plan.density() == 1
    assert int(dense_plan.pairs()[1]) == int(dense_plan.token_mask().sum())


def test_from_dense_drops_invisible_blocks():
    key_ranges = KeyRanges.causal(1, 64, 64, "cpu")
    is_selected = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    plan = BlockPlan.from_dense(is_selected, key_ranges, query_block=16, key_block=16)
    assert torch.equal(plan.to_dense(), block_visibility(key_ranges, 16, 16).unsqueeze(1))


def test_from_dense_with_wrong_shape_raises():
    with pytest.raises(ValueError, match=r"bool \[B, H, 3, 3\]"):
        BlockPlan.from_dense(
            torch.ones(1, 1, 2, 3, dtype=torch.bool),
            KeyRanges.causal(1, 6, 6, "cpu"),
            query_block=2,
            key_block=2,
        )


@pytest.mark.parametrize(
    ("dense_rows_before", "added_dense_rows", "dense_rows_after"),
    [
        pytest.param(None, [[2, 0]], {0, 2}, id="none-before"),
        pytest.param([[1, 2]], [[2, 0]], {0, 1, 2}, id="some-before"),
        pytest.param([[-1, 3]], [[-1, 0]], {0, 3}, id="gaps"),
    ],
)
def test_complete_rows_attend_all_blocks(dense_rows_before, added_dense_rows, dense_rows_after):
    key_ranges = KeyRanges.causal(1, 16, 16, "cpu")
    is_selected = torch.eye(4, dtype=torch.bool)[None, None].expand(1, 2, -1, -1)
    dense_rows_before = None if dense_rows_before is None else torch.tensor(dense_rows_before)
    plan = BlockPlan.from_dense(
        is_selected, key_ranges, query_block=4, key_block=4, dense_rows=dense_rows_before
    )
    completed_plan = plan.with_dense_rows(torch.tensor(added_dense_rows))
    assert_valid_plan(completed_plan)
    is_dense_row = torch.tensor([row in dense_rows_after for row in range(4)])
    is_visible = block_visibility(key_ranges, 4, 4)[0]
    expected = torch.where(is_dense_row[:, None], is_visible, is_selected[0, 0])
    assert torch.equal(completed_plan.to_dense(), expected.expand(1, 2, -1, -1))
    assert torch.equal(completed_plan.is_dense(), is_dense_row.expand(1, 1, -1))


def make_layout(padding_mask=None, doc_ids=None, q_length=None, align=4):
    """Return the `BlockLayout` of a padding mask [B, N], of document ids [B, N], or of both."""
    batch, length = (padding_mask if padding_mask is not None else doc_ids).shape
    q_length = q_length or length
    return BlockLayout.build(
        batch=batch,
        q_length=q_length,
        kv_length=length,
        q_offset=length - q_length,
        padding_mask=padding_mask,
        doc_ids=doc_ids,
        align=align,
        device=torch.device("cpu"),
    )


def test_layout_removes_padding():
    block_layout = make_layout(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 0, 0, 1]]).bool())
    assert block_layout.ranges.end.tolist() == [[0, 1, -1, -1], [0, 1, 2, -1], [0, 1, -1, -1]]
    token_values = torch.arange(1.0, 5)[None, None, :, None].expand(3, 1, 4, 1)
    assert block_layout.keys(token_values)[..., 0].tolist()[0][0][:2] == [3, 4]
    assert block_layout.restore(block_layout.queries(token_values))[:, 0, :, 0].tolist() == [
        [0, 0, 3, 4],
        [1, 2, 3, 0],
        [1, 0, 0, 4],
    ]


def test_chunk_after_padding_keeps_block_alignment():
    block_layout = make_layout(
        torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool(), q_length=2
    )
    assert block_layout.ranges.end.tolist() == [[1, 2], [4, 5]]


def test_layout_aligns_documents_to_blocks():
    block_layout = make_layout(doc_ids=torch.tensor([[0, 0, 1, 1, 1, 2]]))
    assert block_layout.ranges.end.tolist() == [[0, 1, -1, -1, 4, 5, 6, -1, 8]]
    assert block_layout.ranges.start.tolist()[0][4:7] == [4, 4, 4]
    assert block_layout.ranges.key_valid.int().tolist() == [[1, 1, 0, 0, 1, 1, 1, 0, 1]]
    token_values = torch.arange(1.0, 7)[None, None, :, None]
    assert block_layout.restore(block_layout.queries(token_values)).flatten().tolist() == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
