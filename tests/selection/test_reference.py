"""The reference of block selection: hand-computed cases, and properties in every layout."""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import make_block_layout
from selecting import draw_peaked_qk, plan_by_reference
from torch.nn import functional as F

from cab_hf import CabConfig
from cab_hf.ops import reference as ops_reference
from cab_hf.plan import KeyRanges, block_visibility
from cab_hf.selection import reference
from cab_hf.selection.reference import ScoreOptions

SMALL_BLOCKS_CONFIG = CabConfig(
    32, 16, predictor="rows", outlier_queries=4, typical_queries=4,
    typical_key_stride=1, mass_threshold=0.08, share_threshold=0.3,
)  # fmt: skip


def compute_head_shares(q, k, config, channels=()):
    """Return (mean_share, max_share), [M_q, M_k] each, of a single head."""
    key_ranges = KeyRanges.causal(1, q.shape[2], q.shape[2], "cpu")
    block_shares = reference.compute_block_shares(
        q, k, key_ranges=key_ranges, config=config, score_options=ScoreOptions(1.0, channels)
    )
    return [block_share[0, 0] for block_share in block_shares]


def test_typical_queries_are_in_the_middle_of_equal_steps():
    key_ranges = KeyRanges.causal(1, 80, 80, "cpu")
    query_positions = reference.sample_typical_queries(key_ranges, 32, 4)
    assert query_positions.tolist() == [[[4, 12, 20, 28], [36, 44, 52, 60], [68, 76, -1, -1]]]


def test_outliers_have_weight_one_and_typical_queries_the_remaining_weight():
    """Four of 32 queries attend to the second key block; one of these queries is an outlier."""
    q = torch.zeros(1, 1, 64, 2)
    q[..., 0] = 1.0
    q[0, 0, [33, 40, 47, 55]] = torch.tensor([0.0, 1.0])
    k = torch.full((1, 1, 64, 2), -40.0)
    k[0, 0, 3], k[0, 0, 20] = torch.tensor([40.0, -40.0]), torch.tensor([-40.0, 40.0])
    mean_share, max_share = compute_head_shares(q, k, SMALL_BLOCKS_CONFIG)
    torch.testing.assert_close(mean_share[1], torch.tensor([31 / 32, 1 / 32, 0.0, 0.0]))
    torch.testing.assert_close(max_share[1], torch.tensor([1.0, 1.0, 0.0, 0.0]))


def test_outliers_are_a_farthest_point_sample():
    """Use queries in four directions, at 0, 90, 100 and 180 degrees.

    Each direction must be sampled once before any direction is sampled twice.
    """
    angles = torch.zeros(32)
    angles[[5, 6, 20]] = torch.tensor([180.0, 90.0, 100.0])
    angles = angles.deg2rad()
    q = torch.stack((angles.cos(), angles.sin()), -1)[None, None]
    query_positions = reference.sample_outlier_queries(q, KeyRanges.causal(1, 32, 32, "cpu"), 32, 8)
    # 180 is farthest from the mean, then 0 is farthest from 180, and 90 is farthest from both.
    # Then 100 follows, and the remaining queries, all at 0, in order of their index
    assert query_positions.flatten().tolist() == [5, 0, 6, 20, 1, 2, 3, 4]


def test_query_blocks_with_many_visible_keys_have_half_of_the_sample(monkeypatch):
    """The first four query blocks have at most 128 visible keys, and the others have more."""
    q, k = draw_peaked_qk(q_length=256, heads=2, kv_heads=1)
    full_sample_blocks = plan_by_reference(SMALL_BLOCKS_CONFIG, q, k).to_dense()
    half_sample_config = replace(SMALL_BLOCKS_CONFIG, outlier_queries=2, typical_key_stride=2)
    half_sample_blocks = plan_by_reference(half_sample_config, q, k).to_dense()
    monkeypatch.setattr(reference, "MAX_KEYS_AT_FULL_SAMPLE", 128)
    actual = plan_by_reference(SMALL_BLOCKS_CONFIG, q, k).to_dense()
    assert torch.equal(actual[:, :, :4], full_sample_blocks[:, :, :4])
    assert torch.equal(actual[:, :, 4:], half_sample_blocks[:, :, 4:])
    assert not torch.equal(full_sample_blocks[:, :, 4:], half_sample_blocks[:, :, 4:])


def test_half_of_a_sample_is_part_of_the_sample():
    q, _ = draw_peaked_qk(q_length=256, heads=2, kv_heads=1)
    key_ranges = KeyRanges.causal(1, 256, 256, "cpu")
    sample, half_sample = (
        reference.sample_outlier_queries(q, key_ranges, 32, num_samples) for num_samples in (8, 4)
    )
    assert torch.equal(sample[..., :4], half_sample)


@pytest.mark.parametrize(
    ("config_fields", "expected"),
    [
        ({}, (8, 8)),
        ({"outlier_queries": 1}, (1, 8)),
        ({"outlier_queries": 0}, (0, 8)),
        ({"typical_key_stride": 64}, (8, 64)),
    ],
)
def test_small_sample_keeps_one_outlier_and_one_key_per_block(config_fields, expected):
    config = reference.shrink_sample(CabConfig(**config_fields))
    assert (config.outlier_queries, config.typical_key_stride) == expected


def test_block_with_fewer_queries_than_outliers_samples_each_once():
    q, _ = draw_peaked_qk(q_length=37, heads=1, kv_heads=1)
    query_positions = reference.sample_outlier_queries(q, KeyRanges.causal(1, 37, 37, "cpu"), 32, 8)
    assert sorted(query_positions[0, 0, 1].tolist()) == [-1, -1, -1, 32, 33, 34, 35, 36]


def test_key_stride_scores_the_middle_key_of_each_stride():
    """Stride 4 in blocks of 16 scores keys 2, 6, 10 and 14: key 6 counts, and key 21 does not."""
    q = torch.ones(1, 1, 64, 2)
    k = torch.full((1, 1, 64, 2), -20.0)
    k[0, 0, 6], k[0, 0, 21] = 20.0, 20.0
    config = replace(SMALL_BLOCKS_CONFIG, outlier_queries=0, typical_key_stride=4)
    mean_share, max_share = compute_head_shares(q, k, config)
    torch.testing.assert_close(mean_share[1], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    mean_share, max_share = compute_head_shares(q, k, replace(config, typical_key_stride=1))
    torch.testing.assert_close(mean_share[1], torch.tensor([0.5, 0.5, 0.0, 0.0]))


def test_sample_without_visible_sampled_key_has_no_weight():
    """Queries that see no scored key, as at the start of a document, must not enter the mean."""
    q, k = draw_peaked_qk(q_length=32, heads=1, kv_heads=1)
    range_end = torch.arange(32, dtype=torch.int32)[None]
    range_start = (range_end >= 19).int() * 19
    key_ranges = KeyRanges(range_start, range_end, torch.ones(1, 32, dtype=torch.bool))
    config = replace(
        SMALL_BLOCKS_CONFIG, outlier_queries=0, typical_queries=32, typical_key_stride=8
    )
    mean_share, _ = reference.compute_block_shares(
        q, k, key_ranges=key_ranges, config=config, score_options=ScoreOptions(1.0)
    )
    # keys 4, 12, 20, 28 are scored: queries 0 to 3 and 19 see none of them
    torch.testing.assert_close(mean_share.sum(), torch.tensor(1.0))


def test_sampling_every_query_gives_the_exact_mean_share():
    q, k = draw_peaked_qk(q_length=96, heads=1, kv_heads=1)
    config = replace(SMALL_BLOCKS_CONFIG, outlier_queries=0, typical_queries=32)
    logits = (q @ k.transpose(-1, -2))[0, 0].masked_fill(torch.ones(96, 96).triu(1).bool(), -1e9)
    block_shares = logits.unflatten(-1, (6, 16)).amax(-1).softmax(-1)
    expected = block_shares.unflatten(0, (3, 32)).mean(1)
    torch.testing.assert_close(compute_head_shares(q, k, config)[0], expected)


def test_sink_takes_share_from_every_block():
    q, k = draw_peaked_qk(q_length=96, heads=2, kv_heads=1)
    config = replace(SMALL_BLOCKS_CONFIG, outlier_queries=0, typical_queries=32)
    key_ranges = KeyRanges.causal(1, 96, 96, "cpu")
    mean_share_without_sinks, _ = reference.compute_block_shares(
        q, k, key_ranges=key_ranges, config=config, score_options=ScoreOptions(1.0)
    )
    sinks = torch.tensor([2.0, -torch.inf])
    actual, _ = reference.compute_block_shares(
        q, k, key_ranges=key_ranges, config=config, score_options=ScoreOptions(1.0, sinks=sinks)
    )
    torch.testing.assert_close(actual[:, 1], mean_share_without_sinks[:, 1])
    logits = (q @ k.transpose(-1, -2))[0, 0].masked_fill(torch.ones(96, 96).triu(1).bool(), -1e9)
    block_max = F.pad(logits.unflatten(-1, (6, 16)).amax(-1), (0, 1), value=2.0 - math.log(16))
    expected = block_max.softmax(-1)[:, :6].unflatten(0, (3, 32)).mean(1)
    torch.testing.assert_close(actual[0, 0], expected)


def test_channels_apply_to_outliers_only():
    q, k = draw_peaked_qk(q_length=96, heads=1, kv_heads=1)
    k_without_first_half = k.clone()
    k_without_first_half[..., :8] = 0.0
    typical_config = replace(SMALL_BLOCKS_CONFIG, outlier_queries=0)
    assert torch.equal(
        *(
            compute_head_shares(q, k, typical_config, channels)[0]
            for channels in ((), (8, 9, 10, 11))
        )
    )
    outlier_config = replace(SMALL_BLOCKS_CONFIG, outlier_queries=32)
    expected, actual = (
        compute_head_shares(q, keys, outlier_config, tuple(range(8, 16)))[0]
        for keys in (k, k_without_first_half)
    )
    # if every query is an outlier, no query is typical, so that channels 0 to 7 have no effect
    torch.testing.assert_close(actual, expected)


def test_selection_compares_shares_with_both_thresholds():
    q, k = draw_peaked_qk(q_length=640)
    key_ranges = KeyRanges.causal(1, 640, 640, "cpu")
    config = replace(SMALL_BLOCKS_CONFIG, dense_tail_blocks=0)
    mean_share, max_share = reference.compute_block_shares(
        q, k, key_ranges=key_ranges, config=config, score_options=ScoreOptions(0.25)
    )
    is_visible = block_visibility(key_ranges, 32, 16)
    is_forced = ops_reference.forced_blocks(is_visible, key_ranges, config)
    expected = is_visible & (is_forced | (mean_share >= 0.08) | (max_share >= 0.3))
    actual = plan_by_reference(config, q, k, key_ranges).to_dense()
    assert torch.equal(actual, expected)
    assert 0.2 < actual.float().mean() / is_visible.float().mean() < 0.8


def test_outliers_find_a_key_that_one_query_attends():
    q = torch.zeros(1, 1, 512, 8)
    q[..., 0] = 4.0
    q[..., 490, 0], q[..., 490, 1] = 0.0, 8.0
    k = torch.zeros(1, 1, 512, 8)
    k[..., :96, 0], k[..., 200, 1] = 1.0, 4.0
    config = replace(SMALL_BLOCKS_CONFIG, dense_tail_blocks=0, mass_threshold=0.2)
    key_ranges = KeyRanges.causal(1, 512, 512, "cpu")
    for num_outliers, is_found in ((4, True), (0, False)):
        sampling_config = replace(config, outlier_queries=num_outliers)
        plan = plan_by_reference(sampling_config, q, k, ranges=key_ranges, scale=1.0)
        assert bool(plan.to_dense()[0, 0, 15, 200 // 16]) == is_found
        assert plan.density() < 0.7


@pytest.mark.parametrize("max_density", [0.2, 0.5])
def test_max_density_caps_rows_to_best_blocks(max_density):
    q, k = draw_peaked_qk(q_length=900)
    key_ranges, config = (
        KeyRanges.causal(1, 900, 900, "cpu"),
        replace(SMALL_BLOCKS_CONFIG, dense_tail_blocks=0),
    )
    is_selected_uncapped = plan_by_reference(config, q, k, key_ranges).to_dense()
    is_selected_capped = plan_by_reference(
        replace(config, max_density=max_density), q, k, key_ranges
    ).to_dense()
    is_visible = block_visibility(key_ranges, 32, 16)
    is_forced = ops_reference.forced_blocks(is_visible, key_ranges, config)
    max_selected = (
        ops_reference.share_of_row(is_visible, max_density).squeeze(-1).maximum(is_forced.sum(-1))
    )
    assert torch.equal(
        is_selected_capped.sum(-1), is_selected_uncapped.sum(-1).minimum(max_selected)
    )
    assert (is_selected_uncapped | ~is_selected_capped).all()
    # every unselected block has a lower score than every selected block
    mean_share, max_share = reference.compute_block_shares(
        q, k, key_ranges=key_ranges, config=config, score_options=ScoreOptions(0.25)
    )
    score = torch.where(max_share >= 0.3, 1 + max_share, mean_share)
    score = score.masked_fill(is_forced, torch.inf)
    min_selected_score = score.masked_fill(~is_selected_capped, torch.inf).amin(-1)
    assert (
        score.masked_fill(is_selected_capped | ~is_selected_uncapped, -1).amax(-1)
        <= min_selected_score
    ).all()


def test_zero_threshold_with_max_density_fills_every_row():
    q, k = draw_peaked_qk(q_length=640)
    config = replace(SMALL_BLOCKS_CONFIG, mass_threshold=0.0, max_density=0.25, dense_tail_blocks=0)
    plan = plan_by_reference(config, q, k, KeyRanges.causal(1, 640, 640, "cpu"))
    num_selected, num_visible = plan.to_dense().sum(-1), 2 * torch.arange(1, 21)
    assert torch.equal(
        num_selected,
        (num_visible / 4).ceil().long().maximum(num_visible.clamp(max=4)).expand_as(num_selected),
    )


def test_later_tokens_change_no_earlier_row():
    q, k = draw_peaked_qk(q_length=256)
    key_ranges = KeyRanges.causal(1, 256, 256, "cpu")
    config = replace(SMALL_BLOCKS_CONFIG, dense_tail_blocks=0)
    expected = plan_by_reference(config, q, k, key_ranges).to_dense()[:, :, :4]
    for x in (q, k):
        x[:, :, 128:] = -3 * x[:, :, 128:]
    assert torch.equal(plan_by_reference(config, q, k, key_ranges).to_dense()[:, :, :4], expected)


def test_chunks_of_whole_query_blocks_give_the_rows_of_one_call():
    q, k = draw_peaked_qk(q_length=320)
    config = replace(SMALL_BLOCKS_CONFIG, dense_tail_blocks=0)
    blocks_of_one_call = plan_by_reference(
        config, q, k, KeyRanges.causal(1, 320, 320, "cpu")
    ).to_dense()
    for start, stop in ((0, 96), (96, 224), (224, 320)):
        key_ranges = KeyRanges.causal(1, stop - start, stop, "cpu")
        actual = plan_by_reference(
            config, q[:, :, start:stop], k[:, :, :stop], key_ranges
        ).to_dense()
        expected = blocks_of_one_call[:, :, start // 32 : -(-stop // 32), : stop // 16]
        assert torch.equal(actual, expected)


def test_left_padding_gives_the_plan_without_padding():
    q, k = draw_peaked_qk(q_length=200, batch=2)
    layout = make_block_layout("padded", batch=2, length=200, kv_length=200, align=32, device="cpu")
    ranges_without_padding = KeyRanges.causal(1, 160, 160, "cpu")
    expected = plan_by_reference(
        SMALL_BLOCKS_CONFIG, q[:1, :, 40:], k[:1, :, 40:], ranges_without_padding
    ).token_mask()
    actual = plan_by_reference(
        SMALL_BLOCKS_CONFIG, layout.queries(q), layout.keys(k), layout.ranges
    ).token_mask()[:1]
    is_real_query, is_real_key = layout.ranges.end[0] >= 0, layout.ranges.key_valid[0]
    assert torch.equal(actual[:, :, is_real_query][..., is_real_key], expected)


def test_packed_documents_give_the_plans_of_single_documents():
    q, k = draw_peaked_qk(q_length=192)
    layout = make_block_layout("packed", batch=1, length=192, kv_length=192, align=32, device="cpu")
    packed_mask = plan_by_reference(
        SMALL_BLOCKS_CONFIG, layout.queries(q), layout.keys(k), layout.ranges
    ).token_mask()
    is_real_query, is_real_key = layout.ranges.end[0] >= 0, layout.ranges.key_valid[0]
    mask_of_real_tokens = packed_mask[:, :, is_real_query][..., is_real_key]
    for start, stop in ((0, 64), (64, 192)):
        document_ranges = KeyRanges.causal(1, stop - start, stop - start, "cpu")
        expected = plan_by_reference(
            SMALL_BLOCKS_CONFIG, q[:, :, start:stop], k[:, :, start:stop], document_ranges
        ).token_mask()
        assert torch.equal(mask_of_real_tokens[:, :, start:stop, start:stop], expected)


def test_heads_of_a_group_score_the_keys_of_their_kv_head():
    q, k = draw_peaked_qk(q_length=160, heads=4, kv_heads=2)
    key_ranges = KeyRanges.causal(1, 160, 160, "cpu")
    blocks_of_all_heads = reference.select_blocks(
        q, k, ranges=key_ranges, config=SMALL_BLOCKS_CONFIG, score_options=ScoreOptions(1.0)
    )
    for head in range(4):
        head_q, head_k = q[:, [head]], k[:, [head // 2]]
        blocks_of_head = reference.select_blocks(
            head_q,
            head_k,
            ranges=key_ranges,
            config=SMALL_BLOCKS_CONFIG,
            score_options=ScoreOptions(1.0),
        )
        assert torch.equal(blocks_of_all_heads[:, [head]], blocks_of_head)
