"""The rows of a plan that ranks compute together equal the rows of a plan of one process."""

import contextlib
from dataclasses import replace

import pytest
import torch
from shards import BLOCK_TOKENS, CUMULATIVE_LENGTHS, make_layout, make_sharding, take_shard
from tiny import draw_qkv
from torch.nn import functional as F
from valid_plan import assert_valid_plan

from cab_hf import CabConfig, distributed
from cab_hf.call.layout import make_plan_of_visible_blocks
from cab_hf.distributed import sharded
from cab_hf.distributed.sharded import ShardedLayout
from cab_hf.eval import methods  # noqa: F401  registers predictors of other methods
from cab_hf.ops import reference
from cab_hf.plan import BlockPlan, block_visibility
from cab_hf.predictors import (
    LayerContext,
    Predictor,
    RowsPredictor,
    make_predictor,
    register_predictor,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
# the half of 64 channels with the lowest rotary frequencies in LLaMA
SLOW_CHANNELS = (*range(16, 32), *range(48, 64))
SMALL_BLOCKS_CONFIG = CabConfig(
    32, 16, mass_threshold=0.05, share_threshold=0.3, min_length=0, outlier_queries=8
)
CONFIGS = {
    "exact": SMALL_BLOCKS_CONFIG,
    "exact-every-query": replace(SMALL_BLOCKS_CONFIG, outlier_queries=32),
    "typical": replace(SMALL_BLOCKS_CONFIG, outlier_queries=0),
    "wide-keys": replace(SMALL_BLOCKS_CONFIG, query_block=16, key_block=32),
    "no-tail": replace(SMALL_BLOCKS_CONFIG, dense_tail_blocks=0),
    "long-tail": replace(SMALL_BLOCKS_CONFIG, dense_tail_blocks=3),
    "capped": replace(SMALL_BLOCKS_CONFIG, max_density=0.4),
    "everything": replace(SMALL_BLOCKS_CONFIG, mass_threshold=0.0),
    "published": CabConfig.published(0.6, query_block=32, key_block=32, min_length=0),
    "additive": CabConfig.published(0.6, "additive", query_block=32, key_block=16, min_length=0),
    "streaming": SMALL_BLOCKS_CONFIG.changed(predictor="streaming"),
    "random": SMALL_BLOCKS_CONFIG.changed(predictor="random", sparsity=0.6),
    "cascade": replace(SMALL_BLOCKS_CONFIG, predictor="cascade", anchors=(0,)),
    "antidiagonal": SMALL_BLOCKS_CONFIG.changed(predictor="antidiagonal", sparsity=0.6),
    "own-summaries": SMALL_BLOCKS_CONFIG.changed(predictor="large-norm-blocks"),
    "own-of-cab": SMALL_BLOCKS_CONFIG.changed(predictor="halved-mass"),
}


class LargeNormPredictor(Predictor):
    """Predictor that selects blocks with large key norms, and gathers one norm per block."""

    def encode_keys(self, k, valid=None):
        norms = k.norm(dim=-1)
        if valid is not None:
            norms = norms * valid.unsqueeze(1)
        key_block = self.config.key_block
        return (
            F.pad(norms, (0, -norms.shape[-1] % key_block)).unflatten(-1, (-1, key_block)).amax(-1)
        )

    def required_inputs(self, layer_context, head_counts):
        return ("summaries",)

    def choose(self, q, summary, layer_context):
        block_sizes = {"query_block": self.config.query_block, "key_block": self.config.key_block}
        has_large_norm = (summary > 11).repeat_interleave(q.shape[1] // summary.shape[1], dim=1)
        is_selected = has_large_norm.unsqueeze(2) & block_visibility(
            layer_context.ranges, **block_sizes
        ).unsqueeze(1)
        return BlockPlan.from_dense(is_selected, layer_context.ranges, **block_sizes)


class HalvedMassPredictor(RowsPredictor):
    """Subclass of `RowsPredictor` with half of the mass threshold and the same gathered inputs."""

    def choose(self, q, summary, layer_context):
        halved_config = replace(self.config, mass_threshold=self.config.mass_threshold / 2)
        return RowsPredictor(halved_config).choose(q, summary, layer_context)


register_predictor("large-norm-blocks", LargeNormPredictor)
register_predictor("halved-mass", HalvedMassPredictor)


def make_full_sequence(sharding, head_dim=HEAD_DIM):
    """Return q, k and v of the whole sequence; q and k are doubled, so that masses differ."""
    q, k, v = draw_qkv(1, NUM_HEADS, NUM_KV_HEADS, sharding.num_tokens, dim=head_dim)
    return 2 * q, 2 * k, v


def predict_plan_of_rank(process_group, config, cu_seqlens):
    """Predict the plan of this rank and return its `extract_rows_of_plan`."""
    sharding, rank = make_sharding(process_group.size(), cu_seqlens), process_group.rank()
    q, k, _ = (take_shard(x, sharding, rank) for x in make_full_sequence(sharding))
    plan = distributed.predict(
        q, k, group=process_group, config=config, layer=0, cu_seqlens=cu_seqlens, block=BLOCK_TOKENS
    )
    return extract_rows_of_plan(plan)


def extract_rows_of_plan(plan):
    """Return (selected blocks, dense rows, index of each row in the sequence) of a rank's plan.

    The index is -1 for rows that have padding only.
    """
    assert_valid_plan(plan)
    return (
        plan.to_dense(),
        plan.is_dense(),
        plan.ranges.sequence_row_indices(plan.query_block),
    )


def predict_plan_in_one_process(config, sharding, head_dim=HEAD_DIM, scored_channels=()):
    q, k, _ = make_full_sequence(sharding, head_dim)
    layout = make_layout(sharding, max(config.query_block, config.key_block))
    layer_context = LayerContext(layout.ranges, HEAD_DIM**-0.5, 0, channels=scored_channels)
    return make_predictor(config)(layout.queries(q), layout.keys(k), layer_context)


def assert_rows_equal_plan(rows_of_ranks, plan):
    """Assert that each row of ``plan`` equals the row of exactly one rank.

    Args:
        rows_of_ranks: result of `extract_rows_of_plan` for the plan of each rank.
        plan: plan of a single process.
    """
    num_ranks_of_row = torch.zeros(plan.q_blocks, dtype=torch.int64)
    for selected_blocks, is_dense_row, sequence_rows in rows_of_ranks:
        is_real_row = sequence_rows >= 0
        assert torch.equal(
            selected_blocks[:, :, is_real_row], plan.to_dense()[:, :, sequence_rows[is_real_row]]
        )
        assert not selected_blocks[:, :, ~is_real_row].any()
        if plan.is_dense() is not None:
            assert torch.equal(
                is_dense_row[:, :, is_real_row], plan.is_dense()[:, :, sequence_rows[is_real_row]]
            )
        num_ranks_of_row[sequence_rows[is_real_row]] += 1
    # exactly one rank has each row with queries; no rank has rows of padding between documents
    has_queries = plan.ranges.rows(plan.query_block).queries[0] > 0
    assert torch.equal(num_ranks_of_row, has_queries.long())


@pytest.mark.parametrize("cu_seqlens_name", CUMULATIVE_LENGTHS)
@pytest.mark.parametrize("config_name", CONFIGS)
def test_rank_plans_are_rows_of_single_process_plan(ranks, config_name, cu_seqlens_name):
    config, cu_seqlens = CONFIGS[config_name], CUMULATIVE_LENGTHS[cu_seqlens_name]
    actual = ranks.run(4, predict_plan_of_rank, config, cu_seqlens)
    assert_rows_equal_plan(
        actual, predict_plan_in_one_process(config, make_sharding(4, cu_seqlens))
    )


def count_gathered_elements(process_group, config, layer_index):
    """Return a sorted list with the number of elements that each all-gather of selection sends."""
    sharding, rank = make_sharding(process_group.size(), None), process_group.rank()
    q, k, _ = (take_shard(x, sharding, rank) for x in make_full_sequence(sharding))
    element_counts = []
    with pytest.MonkeyPatch.context() as patch_context:
        all_gather = sharded.all_gather
        patch_context.setattr(
            sharded, "all_gather", lambda x, g: element_counts.append(x.numel()) or all_gather(x, g)
        )
        with contextlib.suppress(ValueError):
            # layer 1 of a cascade raises ValueError, because its anchor layer 0 was not called
            distributed.predict(
                q, k, group=process_group, config=config, layer=layer_index, block=BLOCK_TOKENS
            )
    return sorted(element_counts)


# elements of the shards of q and k of one rank, which has 128 tokens
NUM_Q_ELEMENTS, NUM_K_ELEMENTS = 4 * 128 * 16, 2 * 128 * 16


@pytest.mark.parametrize(
    ("config_name", "layer_index", "element_counts"),
    [
        ("antidiagonal", 0, [NUM_K_ELEMENTS, NUM_Q_ELEMENTS]),
        ("own-of-cab", 0, [NUM_K_ELEMENTS]),
        ("own-summaries", 0, [2 * 8]),
        ("streaming", 0, []),
        ("exact", 0, [NUM_K_ELEMENTS]),
        ("cascade", 0, [NUM_K_ELEMENTS]),
        ("cascade", 1, []),
    ],
)
def test_ranks_gather_inputs_declared_by_predictor(ranks, config_name, layer_index, element_counts):
    assert (
        ranks.run(2, count_gathered_elements, CONFIGS[config_name], layer_index)
        == [element_counts] * 2
    )


def predict_plan_by_slow_channels(process_group, config, cu_seqlens):
    sharding, rank = make_sharding(process_group.size(), cu_seqlens), process_group.rank()
    q, k, _ = (take_shard(x, sharding, rank) for x in make_full_sequence(sharding, 64))
    shard_map = sharding.shard_map(max(config.query_block, config.key_block), q.device)
    layout = ShardedLayout(shard_map, process_group, shard_map.ranges(rank, 1))
    layer_context = LayerContext(layout.ranges, HEAD_DIM**-0.5, 0, channels=SLOW_CHANNELS)
    return extract_rows_of_plan(layout.select_plan(make_predictor(config), q, k, layer_context))


@pytest.mark.parametrize("cu_seqlens_name", CUMULATIVE_LENGTHS)
@pytest.mark.parametrize("config_name", ["exact", "cascade"])
def test_slow_channels_select_rows_of_single_process_plan(ranks, config_name, cu_seqlens_name):
    config = CONFIGS[config_name]
    actual = ranks.run(
        4, predict_plan_by_slow_channels, config, CUMULATIVE_LENGTHS[cu_seqlens_name]
    )
    sharding = make_sharding(4, CUMULATIVE_LENGTHS[cu_seqlens_name])
    plan = predict_plan_in_one_process(config, sharding, 64, SLOW_CHANNELS)
    assert_rows_equal_plan(actual, plan)
    # scores of all channels select other blocks than scores of the slow channels
    plan_of_all_channels = predict_plan_in_one_process(config, sharding, 64)
    assert not torch.equal(plan.to_dense(), plan_of_all_channels.to_dense())


def test_one_rank_equals_single_process(ranks):
    actual = ranks.run(1, predict_plan_of_rank, SMALL_BLOCKS_CONFIG, CUMULATIVE_LENGTHS["packed"])
    assert_rows_equal_plan(
        actual,
        predict_plan_in_one_process(
            SMALL_BLOCKS_CONFIG, make_sharding(1, CUMULATIVE_LENGTHS["packed"])
        ),
    )


def compute_attention_of_rank(process_group, config, cu_seqlens):
    """Return (output, log-sum-exp, dq, dk, dv) of sparse attention on a rank."""
    sharding, rank = make_sharding(process_group.size(), cu_seqlens), process_group.rank()
    q, k, v = (take_shard(x, sharding, rank).requires_grad_() for x in make_full_sequence(sharding))
    common_arguments = {"group": process_group, "cu_seqlens": cu_seqlens, "block": BLOCK_TOKENS}
    plan = distributed.predict(q, k, config=config, layer=0, **common_arguments)
    out, lse = distributed.zigzag_attention(
        q, k, v, plan=plan, engine="reference", **common_arguments
    )
    loss = (out * sharding.is_real[rank][:, None]).square().sum()
    return out.detach(), lse, *torch.autograd.grad(loss, (q, k, v))


@pytest.mark.parametrize("cu_seqlens_name", CUMULATIVE_LENGTHS)
@pytest.mark.parametrize("config_name", ["typical", "exact"])
def test_sparse_attention_equals_single_process(ranks, config_name, cu_seqlens_name):
    config, cu_seqlens = CONFIGS[config_name], CUMULATIVE_LENGTHS[cu_seqlens_name]
    sharding = make_sharding(4, cu_seqlens)
    actual = ranks.run(4, compute_attention_of_rank, config, cu_seqlens)
    layout = make_layout(sharding, 32)
    q, k, v = (x.requires_grad_() for x in make_full_sequence(sharding))
    out, lse = reference.attention(
        layout.queries(q),
        layout.keys(k),
        layout.keys(v),
        plan=predict_plan_in_one_process(config, sharding),
        scale=HEAD_DIM**-0.5,
        return_lse=True,
    )
    out = layout.restore(out)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    if layout.query_order is not None:
        lse = lse[:, :, layout.query_order.position_indices]
    for tensor_index, expected in enumerate((out, lse, *gradients)):
        shards = [tensors_of_rank[tensor_index] for tensors_of_rank in actual]
        joined_tensor = torch.cat(shards, dim=2)[:, :, sharding.shard_index]
        assert (joined_tensor - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_union_contains_blocks_of_all_queries_of_a_rank(ranks):
    config = replace(SMALL_BLOCKS_CONFIG, mass_threshold=0.08, dense_tail_blocks=0, local_blocks=1)
    sharding = make_sharding(4, None)
    for rank, attended_blocks in enumerate(ranks.run(4, compute_union_of_rank, config)):
        selected_blocks = predict_plan_in_one_process(config, sharding).to_dense()
        expected = selected_blocks[:, :, sharding.sequence_index[rank][::32] // 32].any(2)
        assert torch.equal(attended_blocks, expected.unflatten(1, (NUM_KV_HEADS, -1)).any(2))
        assert 0 < attended_blocks.float().mean() < 1


def compute_union_of_rank(process_group, config):
    sharding = make_sharding(process_group.size(), None)
    q, k, _ = (take_shard(x, sharding, process_group.rank()) for x in make_full_sequence(sharding))
    plan = distributed.predict(q, k, group=process_group, config=config, block=BLOCK_TOKENS)
    return distributed.union(plan, NUM_KV_HEADS)


def test_ranges_of_earlier_plan_are_reused_for_same_documents_only(ranks):
    for is_same_plan, error_message in ranks.run(2, predict_plan_with_earlier_ranges):
        assert is_same_plan and error_message.startswith("ranges must belong to the sequence of q")


def predict_plan_with_earlier_ranges(process_group):
    """Predict with the key ranges of an earlier prediction, for the same and for other documents.

    Returns:
        (True if ranges and plan are the same, message of the error for other documents).
    """
    sharding = make_sharding(2, CUMULATIVE_LENGTHS["packed"])
    q, k, _ = (take_shard(x, sharding, process_group.rank()) for x in make_full_sequence(sharding))
    predict_arguments = {
        "group": process_group,
        "config": SMALL_BLOCKS_CONFIG,
        "block": BLOCK_TOKENS,
    }
    boundary_arguments = {"cu_seqlens": CUMULATIVE_LENGTHS["packed"]}
    first_plan = distributed.predict(q, k, **predict_arguments, **boundary_arguments)
    second_plan = distributed.predict(
        q, k, **predict_arguments, **boundary_arguments, ranges=first_plan.ranges
    )
    is_same_plan = second_plan.ranges is first_plan.ranges and torch.equal(
        second_plan.to_dense(), first_plan.to_dense()
    )
    try:
        distributed.predict(q, k, **predict_arguments, ranges=first_plan.ranges)
    except ValueError as error:
        return is_same_plan, str(error)
    return is_same_plan, ""


def test_old_names_of_local_ranges_warn():
    key_ranges = make_sharding(2, None).shard_map(BLOCK_TOKENS, "cpu").ranges(rank=0, batch=1)
    plan = make_plan_of_visible_blocks(key_ranges.sequence_ranges, BLOCK_TOKENS)
    with pytest.warns(FutureWarning, match=r"Use ranges\.sequence_ranges"):
        assert key_ranges.text is key_ranges.sequence_ranges
    with pytest.warns(FutureWarning, match=r"Use ranges\.local_plan"):
        local_plan = key_ranges.own(plan)
    assert torch.equal(local_plan.to_dense(), key_ranges.local_plan(plan).to_dense())
