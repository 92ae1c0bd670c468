"""What becomes of a plan's lists before flash-attn-4 walks them; kernels in the interpreter."""

import pytest
import torch
from test_engines import random_plan
from tiny import qkv

from cab_hf import BlockPlan
from cab_hf.ops import flash
from cab_hf.plan import BlockLists, Spans


def lists_of(*rows, width=None):
    """[1, 1, rows, width] of Python lists."""
    width = width or max(map(len, rows))
    counts = torch.tensor([[list(map(len, rows))]], dtype=torch.int32)
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return BlockLists(counts, torch.tensor([[padded]], dtype=torch.int32))


def rows_of(lists):
    counts, indices = lists.counts[0, 0].tolist(), lists.indices[0, 0].tolist()
    return [row[:count] for row, count in zip(indices, counts, strict=True)]


def test_neighbours_pair_from_an_even_block_on():
    pairs, rest = flash.in_pairs(lists_of([0, 1, 3, 4, 5, 6], [1, 2], [], [2, 3, 6]), 7)
    assert rows_of(pairs) == [[0, 2], [], [], [1]]
    assert rows_of(rest) == [[3, 6], [1, 2], [], [6]]


@pytest.mark.parametrize(("columns", "expected"), [(7, [[0, 3]]), (8, [[0]])])
def test_the_last_of_an_odd_number_pairs_with_nothing(columns, expected):
    pairs, _ = flash.in_pairs(lists_of([0, 1, 6]), columns, odd=True)
    assert rows_of(pairs) == expected


@pytest.mark.parametrize("chunk", [2, 128])
def test_pairs_and_rest_are_the_blocks_that_were_listed(monkeypatch, chunk):
    """Also where a pair stands on both sides of a kernel's chunk."""
    monkeypatch.setattr(flash, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(1, 2, 3, 21, generator=generator) < 0.6
    pairs, rest = flash.in_pairs(BlockLists.from_dense(chosen), 21)
    wide = pairs.to_dense(11).repeat_interleave(2, dim=-1)[..., :21]
    narrow = rest.to_dense(21)
    assert torch.equal(wide | narrow, chosen) and not (wide & narrow).any()
    both = chosen[..., :20].unflatten(-1, (10, 2)).all(-1)
    assert torch.equal(pairs.to_dense(11)[..., :10], both)
    assert torch.equal(pairs.to_dense(11).sum(-1), pairs.counts)


@pytest.mark.parametrize("length", [700, 960, 63])
@pytest.mark.parametrize("fewest", [0, 1e9], ids=["pairs", "as-they-are"])
@pytest.mark.parametrize("share", [0.5, 1.0], ids=["half", "all"])
def test_walks_attend_what_the_plan_attends(monkeypatch, length, fewest, share):
    monkeypatch.setattr(flash, "PAIRS_A_ROW", fewest)
    q, k, _ = qkv(q_length=length)
    plan = random_plan(q, k, (128, 64), share=share, heads=2)
    walks = flash.walks(flash.Walk(plan.partial, plan.full, 64), length, 128)
    seen = torch.zeros_like(plan.token_mask(), dtype=torch.int32)
    for walk in walks:
        part = BlockPlan(walk.full, walk.partial, plan.spans, 128, walk.key_block)
        part.validate()
        seen += part.token_mask()
    assert torch.equal(seen, plan.token_mask().int())
    everything = share == 1 or length < 64
    sizes = [walk.key_block for walk in walks]
    assert sizes == ([128] if everything else [64] if fewest else [128, 64])


def test_wide_heads_walk_key_blocks_of_64_as_they_are():
    q, k, _ = qkv(q_length=300)
    plan = random_plan(q, k, (128, 64), share=1.0)
    whole = flash.Walk(plan.partial, plan.full, 64)
    assert flash.walks(whole, 300, 256) == [whole]


@pytest.mark.parametrize("length", [300, 1000, 1024])
def test_lists_of_wide_blocks_are_split_to_tiles_that_exist(length):
    q, k, _ = qkv(q_length=length)
    plan = random_plan(q, k, (128, 128), share=0.6, heads=1)
    tiles = -(-length // 64)
    for part in (plan.partial, plan.full):
        meant = part.to_dense(plan.kv_blocks).repeat_interleave(2, -1)[..., :tiles]
        found = flash.finer_columns(part, 2, tiles)
        assert found.width <= tiles
        assert torch.equal(found.counts, meant.sum(-1))
        assert torch.equal(found.to_dense(tiles), meant)
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
    spans = Spans.causal(1, 40, 40, "cpu")
    lists = (plan.full.counts, plan.full.indices, plan.partial.counts, plan.partial.indices)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        out, lse = flash._forward_op(q, k, v, *lists, spans.first, spans.last, 128, 64, 0.2)
    assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
