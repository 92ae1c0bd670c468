"""Conversion of block lists for flash-attn-4, in Triton's interpreter."""

import pytest
import torch
from attention_cases import make_random_plan
from tiny import draw_qkv

from cab_hf.ops.attention import flash


@pytest.mark.parametrize("length", [300, 1000, 1024])
def test_wide_blocks_are_split_into_existing_tiles(length):
    q, k, _ = draw_qkv(q_length=length)
    plan = make_random_plan(q, k, (128, 128), selection_probability=0.6, num_plan_heads=1)
    num_tiles = -(-length // 64)
    for block_lists in (plan.partial, plan.full):
        expected = block_lists.to_dense(plan.kv_blocks).repeat_interleave(2, -1)[..., :num_tiles]
        actual = flash.split_key_blocks(block_lists, 2, num_tiles)
        assert actual.width <= num_tiles
        assert torch.equal(actual.counts, expected.sum(-1))
        assert torch.equal(actual.to_dense(num_tiles), expected)
        tile_lists = flash.transpose_to_tiles(block_lists, 128, 64, length)
        assert torch.equal(tile_lists.to_dense(plan.q_blocks), expected.transpose(2, 3))


def test_folding_head_groups_into_batch_is_a_view():
    head_vectors = torch.randn(1, 50, 6, 8)
    folded_vectors = flash._fold_heads_into_batch(head_vectors, 2)
    assert folded_vectors.shape == (2, 50, 3, 8)
    assert folded_vectors.data_ptr() == head_vectors.data_ptr()
    assert torch.equal(folded_vectors[1, :, 2], head_vectors[0, :, 5])


def test_fake_op_returns_strides_of_transformers():
    """Check the fake (meta) implementation of the op, which torch.compile uses for shapes."""
    q, k, v = draw_qkv(q_length=40)
    plan = make_random_plan(q, k, (128, 64))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        out, lse = flash.attention(q, k, v, plan, scale=0.2, return_lse=True)
    assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
