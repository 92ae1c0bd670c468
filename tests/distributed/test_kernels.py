"""Kernels in Triton's interpreter with the queries of one rank: an early and a late chunk."""

import pytest
import torch
from attention_cases import assert_engine_within_budget, make_random_plan
from selecting import draw_peaked_qk, plan_by_kernels, plan_by_reference
from shards import make_sharding, take_shard
from tiny import draw_qkv

from cab_hf import CabConfig
from cab_hf.ops.attention import block

SMALL_BLOCKS_CONFIG = CabConfig(
    query_block=32, key_block=16, mass_threshold=0.08, share_threshold=0.5
)
QKV_SHAPE = {"heads": 2, "kv_heads": 1, "dim": 16}


def make_sharded_sequence(cu_seqlens, rank):
    """Return (sharding over two ranks, shard map, key ranges of the queries of ``rank``)."""
    sharding = make_sharding(2, cu_seqlens)
    shard_map = sharding.shard_map(32, "cpu")
    return sharding, shard_map, shard_map.ranges(rank, 1)


def test_kernel_attention_with_shard_ranges_equals_reference():
    sharding, shard_map, key_ranges = make_sharded_sequence([0, 33, 150], 1)
    q, k, v = draw_qkv(q_length=sharding.num_tokens, **QKV_SHAPE)
    q, grad = take_shard(q, sharding, 1), take_shard(q.flip(2), sharding, 1)
    k, v = shard_map.layout.keys(k), shard_map.layout.keys(v)
    plan = make_random_plan(q, k, (32, 16), ranges=key_ranges)
    assert_engine_within_budget(block.attention, q, k, v, grad, plan, 0.25)


@pytest.mark.parametrize("cu_seqlens", [[0, 221], [0, 33, 210]], ids=["one-document", "packed"])
def test_kernel_selection_with_shard_ranges_equals_reference(cu_seqlens):
    sharding, shard_map, key_ranges = make_sharded_sequence(cu_seqlens, 0)
    q, k = draw_peaked_qk(q_length=sharding.num_tokens, **QKV_SHAPE)
    q, k = take_shard(q, sharding, 0), shard_map.layout.keys(k)
    actual, expected = (
        plan_function(SMALL_BLOCKS_CONFIG, q, k, key_ranges)
        for plan_function in (plan_by_kernels, plan_by_reference)
    )
    assert torch.equal(actual.to_dense(), expected.to_dense())
