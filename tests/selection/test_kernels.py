"""The selection kernels select the blocks of the reference, in every layout of sequences."""

from dataclasses import replace

import pytest
import torch
from marks import mark_slow_except
from selecting import arrange_in_layout, draw_peaked_qk, plan_by_reference, plan_rows_by_kernels

from cab_hf import CabConfig
from cab_hf.ops import launch
from cab_hf.plan import KeyRanges
from cab_hf.selection import compact, gather, reference, tiles

SMALL_BLOCKS_CONFIG = CabConfig(
    32, 16, predictor="rows", outlier_queries=4, typical_queries=4,
    typical_key_stride=1, mass_threshold=0.08, share_threshold=0.3,
)  # fmt: skip
QK_SHAPE = {"q_length": 300, "heads": 4, "kv_heads": 2, "dim": 32}
# two query heads and one KV head, for tests that run the kernels twice
ONE_KV_HEAD_SHAPE = {**QK_SHAPE, "heads": 2, "kv_heads": 1}
# channels by which outlier queries are scored: the second half of 32 channels
UPPER_HALF_CHANNELS = tuple(range(16, 32))


def assert_same_lists(actual, expected):
    """Assert that two plans have the same blocks in the same lists."""
    for list_name in ("full", "partial"):
        actual_lists, expected_lists = (getattr(plan, list_name) for plan in (actual, expected))
        assert torch.equal(actual_lists.counts, expected_lists.counts)
        kv_blocks = -(-expected.kv_length // expected.key_block)
        assert torch.equal(actual_lists.to_dense(kv_blocks), expected_lists.to_dense(kv_blocks))


@pytest.mark.parametrize(
    ("config_fields", "shape", "layout", "channels"),
    mark_slow_except(
        [
            pytest.param({}, {}, "causal", UPPER_HALF_CHANNELS, id="causal"),
            pytest.param({}, {"batch": 2}, "padded", UPPER_HALF_CHANNELS, id="padded"),
            pytest.param({}, {}, "packed", UPPER_HALF_CHANNELS, id="packed"),
            pytest.param(
                {}, {"q_length": 100, "kv_length": 300}, "chunk", UPPER_HALF_CHANNELS, id="chunk"
            ),
            pytest.param(
                {}, {"batch": 2, "q_length": 140}, "in-place", UPPER_HALF_CHANNELS, id="in-place"
            ),
            pytest.param({}, {}, "causal", (), id="all-channels"),
            pytest.param({}, {"dim": 24}, "causal", (1, 3, 4, 20, 23), id="some-channels"),
            pytest.param(
                {"outlier_queries": 0}, {}, "causal", UPPER_HALF_CHANNELS, id="typical-alone"
            ),
            pytest.param(
                {"outlier_queries": 16}, {}, "causal", UPPER_HALF_CHANNELS, id="many-outliers"
            ),
            pytest.param(
                {"typical_queries": 32}, {}, "causal", UPPER_HALF_CHANNELS, id="every-query"
            ),
            pytest.param(
                {"mass_threshold": 0.0}, {}, "packed", UPPER_HALF_CHANNELS, id="everything"
            ),
            pytest.param(
                {"max_density": 0.4}, {"batch": 2}, "padded", UPPER_HALF_CHANNELS, id="capped"
            ),
            pytest.param(
                {"max_density": 0.3},
                {"batch": 2},
                "in-place",
                UPPER_HALF_CHANNELS,
                id="capped-listed",
            ),
            pytest.param(
                {"typical_key_stride": 4}, {}, "causal", UPPER_HALF_CHANNELS, id="every-4th-key"
            ),
            pytest.param(
                {"typical_key_stride": 4},
                {"batch": 2},
                "padded",
                UPPER_HALF_CHANNELS,
                id="4th-padded",
            ),
            pytest.param(
                {"typical_key_stride": 8}, {}, "packed", UPPER_HALF_CHANNELS, id="every-8th-packed"
            ),
            pytest.param(
                {"typical_key_stride": 16, "outlier_queries": 0}, {}, "in-place", (), id="16th"
            ),
            pytest.param(
                {"typical_key_stride": 2, "key_block": 64, "typical_queries": 16},
                {"dim": 24},
                "causal",
                (1, 3, 4, 20, 23),
                id="2nd-of-64-some-channels",
            ),
            pytest.param({"key_block": 64}, {}, "causal", UPPER_HALF_CHANNELS, id="wide-keys"),
            pytest.param(
                {"key_block": 128}, {}, "packed", UPPER_HALF_CHANNELS, id="keys-of-several-tiles"
            ),
            pytest.param(
                {"query_block": 48, "key_block": 48}, {}, "causal", UPPER_HALF_CHANNELS, id="48"
            ),
            pytest.param(
                {"sink_blocks": 0, "local_blocks": 0},
                {},
                "causal",
                UPPER_HALF_CHANNELS,
                id="unforced",
            ),
            pytest.param(
                {"dense_tail_blocks": 2},
                {"batch": 2},
                "padded",
                UPPER_HALF_CHANNELS,
                id="two-tails",
            ),
            pytest.param(
                {"dense_tail_blocks": 0},
                {"q_length": 7},
                "causal",
                UPPER_HALF_CHANNELS,
                id="7-tokens",
            ),
        ],
        *(0, 1, 3, 11, 12, 13, 14, 15),
    ),
)
def test_kernels_give_lists_of_reference_for_every_setting(
    config_fields, shape, layout, channels, fill_uninitialised_with_nan
):
    config = replace(SMALL_BLOCKS_CONFIG, **config_fields)
    q, k = draw_peaked_qk(**{**QK_SHAPE, **shape})
    q, k, key_ranges = arrange_in_layout(layout, q, k, config.query_block)
    expected = plan_by_reference(config, q, k, key_ranges, channels=channels)
    assert_same_lists(plan_rows_by_kernels(config, q, k, key_ranges, channels=channels), expected)


@pytest.mark.parametrize(
    ("config_fields", "layout", "channels"),
    mark_slow_except(
        [
            pytest.param({}, "padded", UPPER_HALF_CHANNELS, id="padded"),
            pytest.param(
                {"key_block": 128}, "packed", UPPER_HALF_CHANNELS, id="keys-of-several-tiles"
            ),
            pytest.param({"query_block": 48, "key_block": 48}, "causal", (), id="48"),
        ],
        0,
    ),
)
def test_keys_read_by_pointers_give_lists_of_the_reference(
    config_fields, layout, channels, force_pointer_loads
):
    config = replace(SMALL_BLOCKS_CONFIG, **config_fields)
    q, k, key_ranges = arrange_in_layout(
        layout, *draw_peaked_qk(**QK_SHAPE, batch=2), config.query_block
    )
    expected = plan_by_reference(config, q, k, key_ranges, channels=channels)
    assert_same_lists(plan_rows_by_kernels(config, q, k, key_ranges, channels=channels), expected)


@pytest.mark.parametrize(
    ("config_fields", "shape", "layout"),
    mark_slow_except(
        [
            pytest.param({}, {}, "causal", id="causal"),
            pytest.param({}, {"batch": 2}, "padded", id="padded"),
            pytest.param({}, {}, "packed", id="packed"),
            pytest.param({}, {"q_length": 60, "kv_length": 240}, "chunk", id="chunk"),
            pytest.param({}, {"batch": 2}, "in-place", id="in-place"),
            pytest.param({"max_density": 0.4}, {"batch": 2}, "padded", id="capped"),
            pytest.param({"outlier_queries": 0}, {}, "causal", id="typical-alone"),
            pytest.param({"outlier_queries": 1}, {}, "causal", id="one-outlier"),
            pytest.param({"typical_key_stride": 16}, {}, "causal", id="one-key-per-block"),
        ],
        *(0, 5),
    ),
)
def test_small_sample_of_many_keys_gives_lists_of_reference(
    monkeypatch, config_fields, shape, layout, fill_uninitialised_with_nan
):
    config = replace(SMALL_BLOCKS_CONFIG, dense_tail_blocks=0, **config_fields)
    q, k = draw_peaked_qk(**{**ONE_KV_HEAD_SHAPE, "q_length": 240, **shape})
    q, k, key_ranges = arrange_in_layout(layout, q, k, config.query_block)
    full_sample_plan = plan_by_reference(config, q, k, key_ranges)
    monkeypatch.setattr(reference, "MAX_KEYS_AT_FULL_SAMPLE", 64)
    expected = plan_by_reference(config, q, k, key_ranges)
    assert not torch.equal(expected.to_dense(), full_sample_plan.to_dense())
    assert_same_lists(plan_rows_by_kernels(config, q, k, key_ranges), expected)


LOGIT_OPTIONS = {
    "sinks": {"sinks": torch.tensor([-3.0, 4.0, 12.0, 90.0])},
    "softcap": {"softcap": 4.0},
}


@pytest.mark.parametrize("logit_options", LOGIT_OPTIONS.values(), ids=LOGIT_OPTIONS)
def test_sinks_and_softcap_give_lists_of_the_reference(logit_options):
    q, k = draw_peaked_qk(**QK_SHAPE)
    key_ranges = KeyRanges.causal(1, q.shape[2], q.shape[2], "cpu")
    expected = plan_by_reference(
        SMALL_BLOCKS_CONFIG, q, k, key_ranges, channels=UPPER_HALF_CHANNELS, **logit_options
    )
    actual = plan_rows_by_kernels(
        SMALL_BLOCKS_CONFIG, q, k, key_ranges, channels=UPPER_HALF_CHANNELS, **logit_options
    )
    assert_same_lists(actual, expected)
    plan_without_logit_options = plan_by_reference(
        SMALL_BLOCKS_CONFIG, q, k, key_ranges, channels=UPPER_HALF_CHANNELS
    )
    assert abs(expected.density() - plan_without_logit_options.density()) > 0.02


def test_transposed_views_give_the_same_lists():
    q, k = draw_peaked_qk(**ONE_KV_HEAD_SHAPE)
    key_ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = plan_rows_by_kernels(SMALL_BLOCKS_CONFIG, q, k, key_ranges)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    assert_same_lists(plan_rows_by_kernels(SMALL_BLOCKS_CONFIG, q, k, key_ranges), expected)


@pytest.mark.parametrize(("scratch_bytes", "expected_chunks_in_flight"), [(1, 1), (6000, 2)])
def test_many_chunks_with_small_scratch_give_the_same_lists(
    scratch_bytes, expected_chunks_in_flight, monkeypatch
):
    q, k = draw_peaked_qk(**ONE_KV_HEAD_SHAPE)
    key_ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = plan_rows_by_kernels(SMALL_BLOCKS_CONFIG, q, k, key_ranges)
    monkeypatch.setattr(tiles, "MAX_SCRATCH_BYTES", scratch_bytes)
    monkeypatch.setattr(tiles, "MIN_PROGRAMS_IN_FLIGHT", 1)
    monkeypatch.setattr(tiles, "MIN_SAMPLES_PER_PROGRAM_FLOAT32", 8)
    stream_counts, fork_streams = [], launch.fork_streams

    def record_stream_count(x, num_streams):
        stream_counts.append(num_streams)
        return fork_streams(x, num_streams)

    monkeypatch.setattr(launch, "fork_streams", record_stream_count)
    assert_same_lists(plan_rows_by_kernels(SMALL_BLOCKS_CONFIG, q, k, key_ranges), expected)
    assert stream_counts == [expected_chunks_in_flight]


def test_small_score_memory_gives_the_same_capped_lists(monkeypatch):
    q, k = draw_peaked_qk(**ONE_KV_HEAD_SHAPE)
    key_ranges, config = (
        KeyRanges.causal(1, 300, 300, "cpu"),
        replace(SMALL_BLOCKS_CONFIG, max_density=0.3),
    )
    expected = plan_rows_by_kernels(config, q, k, key_ranges)
    monkeypatch.setattr(compact, "MAX_SCORE_BYTES", 1)
    assert_same_lists(plan_rows_by_kernels(config, q, k, key_ranges), expected)


def test_lists_over_the_memory_bound_get_the_width_of_the_longest_row(monkeypatch):
    q, k = draw_peaked_qk(**ONE_KV_HEAD_SHAPE)
    key_ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = plan_rows_by_kernels(SMALL_BLOCKS_CONFIG, q, k, key_ranges)
    monkeypatch.setattr(compact, "MAX_LIST_BYTES", 1)
    actual = plan_rows_by_kernels(SMALL_BLOCKS_CONFIG, q, k, key_ranges)
    assert_same_lists(actual, expected)
    max_count = (expected.full.counts + expected.partial.counts).max()
    assert actual.full.width == max_count < expected.full.width


def scale_one_key(k):
    """Return keys of which key 50 is scaled by 2^12, so that its FP8 exponent differs."""
    k = k.clone()
    k[:, :, 50] *= 2.0**12
    return k


def scale_keys_differently(k):
    """Return keys with odd keys scaled by 2^-12, and every third block of 16 keys by 2^-9."""
    token_indices = torch.arange(k.shape[2])
    return k * 2.0 ** -(12.0 * (token_indices % 2) + 9.0 * (token_indices // 16 % 3 == 1))[:, None]


def quantize_and_dequantize(k):
    """Return the keys after quantisation to FP8 and dequantisation."""
    quantized_keys, exponents = gather.quantize(k, (), tiles.FP8)
    return quantized_keys.float()[..., : k.shape[3]] * 2.0**exponents


@pytest.mark.parametrize(
    "change_keys", mark_slow_except([torch.clone, scale_one_key, scale_keys_differently], 0, 2)
)
def test_8_bit_keys_select_nearly_the_blocks_of_the_reference(
    change_keys, fill_uninitialised_with_nan
):
    q, k = draw_peaked_qk(**QK_SHAPE)
    k, key_ranges = change_keys(k), KeyRanges.causal(1, 300, 300, "cpu")
    expected = plan_by_reference(
        SMALL_BLOCKS_CONFIG, q, quantize_and_dequantize(k), key_ranges
    ).to_dense()
    actual = plan_rows_by_kernels(
        SMALL_BLOCKS_CONFIG, q, k, key_ranges, quantized_dtype=tiles.FP8
    ).to_dense()
    # allow for 6% differences: the kernels also quantise queries, and the reference does not
    assert (actual != expected).sum() <= 0.06 * expected.sum()


@pytest.mark.parametrize("change_keys", mark_slow_except([torch.clone, scale_keys_differently], 1))
@pytest.mark.parametrize("scale_exponent", [-20, 13])
def test_8_bit_selection_does_not_depend_on_the_magnitude_of_keys(scale_exponent, change_keys):
    q, k = draw_peaked_qk(**ONE_KV_HEAD_SHAPE)
    key_ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = plan_rows_by_kernels(
        SMALL_BLOCKS_CONFIG, q, change_keys(k), key_ranges, quantized_dtype=tiles.FP8
    )
    q, k = q * 2.0**-scale_exponent, change_keys(k) * 2.0**scale_exponent
    assert_same_lists(
        plan_rows_by_kernels(SMALL_BLOCKS_CONFIG, q, k, key_ranges, quantized_dtype=tiles.FP8),
        expected,
    )


def test_later_8_bit_key_of_another_magnitude_changes_no_earlier_row():
    q, k = draw_peaked_qk(**ONE_KV_HEAD_SHAPE)
    key_ranges, config = (
        KeyRanges.causal(1, 300, 300, "cpu"),
        replace(SMALL_BLOCKS_CONFIG, dense_tail_blocks=0),
    )
    blocks_before_change = plan_rows_by_kernels(
        config, q, k, key_ranges, quantized_dtype=tiles.FP8
    ).to_dense()
    k[:, :, 260:] *= 2.0**11
    blocks_after_change = plan_rows_by_kernels(
        config, q, k, key_ranges, quantized_dtype=tiles.FP8
    ).to_dense()
    assert torch.equal(blocks_after_change[:, :, :8], blocks_before_change[:, :, :8])
    assert not torch.equal(blocks_after_change[:, :, 8:], blocks_before_change[:, :, 8:])
