"""What becomes of a plan's lists before flash-attn-4 walks them; kernels in the interpreter."""

import pytest
import torch
from attention_cases import random_plan
from tiny import qkv

from cab_hf.ops.attention import flash


@pytest.mark.parametrize("length", [300, 1000, 1024])
def test_lists_of_wide_blocks_are_split_to_tiles_that_exist(length):
    q, k, _ = qkv(q_length=length)
    plan = random_plan(q, k, (128, 128), share=0.6, heads=1)
    tiles = -(-length // 64)
    for part in (plan.partial, plan.full):
        meant = part.to_dense(plan.kv_blocks).repeat_interleave(2, -1)[..., :tiles]
        actual = flash.finer_columns(part, 2, tiles)
        assert actual.width <= tiles
        assert torch.equal(actual.counts, meant.sum(-1))
        assert torch.equal(actual.to_dense(tiles), meant)
        turned = flash.by_tile(part, 128, 64, length)
        assert torch.equal(turned.to_dense(plan.q_blocks), meant.transpose(2, 3))


def test_heads_of_a_group_become_a_batch_without_a_copy():
    x = torch.randn(1, 50, 6, 8)
    folded = flash._heads_as_batch(x, 2)
    assert folded.shape == (2, 50, 3, 8)
    assert folded.data_ptr() == x.data_ptr()
    assert torch.equal(folded[1, :, 2], x[0, :, 5])


def test_registered_op_has_the_layout_that_models_hand_over():
    """Shapes and strides that torch.compile plans with."""
    q, k, v = qkv(q_length=40)
    plan = random_plan(q, k, (128, 64))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        out, lse = flash.attention(q, k, v, plan, 0.2, return_lse=True)
    assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
