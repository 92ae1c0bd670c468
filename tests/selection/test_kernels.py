"""The selection kernels select the blocks of the reference, in every layout of sequences."""

from dataclasses import replace

import pytest
import torch
from marks import slow_but
from selecting import laid_in, loud, plan_by_reference, rows_plan_by_kernels

from cab_hf import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.selection import compact, gather, tiles

SMALL = CabConfig(
    32, 16, predictor="rows", outlier_queries=4, typical_queries=4,
    typical_key_stride=1, mass_threshold=0.08, share_threshold=0.3,
)  # fmt: skip
SHAPE = {"q_length": 300, "heads": 4, "kv_heads": 2, "dim": 32}
# two query heads and one KV head, for tests that run the kernels twice
ONE_GROUP = {**SHAPE, "heads": 2, "kv_heads": 1}
# channels by which outlier queries are scored: the second half of 32 channels
HALF = tuple(range(16, 32))


def assert_same(actual, expected):
    """Assert that two plans have the same blocks in the same lists."""
    for lists_of in ("full", "partial"):
        one, other = (getattr(plan, lists_of) for plan in (actual, expected))
        assert torch.equal(one.counts, other.counts)
        columns = -(-expected.kv_length // expected.key_block)
        assert torch.equal(one.to_dense(columns), other.to_dense(columns))


@pytest.mark.parametrize(
    ("fields", "shape", "layout", "channels"),
    slow_but(
        [
            pytest.param({}, {}, "causal", HALF, id="causal"),
            pytest.param({}, {"batch": 2}, "padded", HALF, id="padded"),
            pytest.param({}, {}, "packed", HALF, id="packed"),
            pytest.param({}, {"q_length": 100, "kv_length": 300}, "chunk", HALF, id="chunk"),
            pytest.param({}, {"batch": 2, "q_length": 140}, "in-place", HALF, id="in-place"),
            pytest.param({}, {}, "causal", (), id="all-channels"),
            pytest.param({}, {"dim": 24}, "causal", (1, 3, 4, 20, 23), id="some-channels"),
            pytest.param({"outlier_queries": 0}, {}, "causal", HALF, id="typical-alone"),
            pytest.param({"outlier_queries": 16}, {}, "causal", HALF, id="many-outliers"),
            pytest.param({"typical_queries": 32}, {}, "causal", HALF, id="every-query"),
            pytest.param({"mass_threshold": 0.0}, {}, "packed", HALF, id="everything"),
            pytest.param({"max_density": 0.4}, {"batch": 2}, "padded", HALF, id="capped"),
            pytest.param({"max_density": 0.3}, {"batch": 2}, "in-place", HALF, id="capped-listed"),
            pytest.param({"typical_key_stride": 4}, {}, "causal", HALF, id="every-4th-key"),
            pytest.param({"typical_key_stride": 4}, {"batch": 2}, "padded", HALF, id="4th-padded"),
            pytest.param({"typical_key_stride": 8}, {}, "packed", HALF, id="every-8th-packed"),
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
            pytest.param({"key_block": 64}, {}, "causal", HALF, id="wide-keys"),
            pytest.param({"key_block": 128}, {}, "packed", HALF, id="keys-of-several-tiles"),
            pytest.param({"query_block": 48, "key_block": 48}, {}, "causal", HALF, id="48"),
            pytest.param({"sink_blocks": 0, "local_blocks": 0}, {}, "causal", HALF, id="unforced"),
            pytest.param({"dense_tail_blocks": 2}, {"batch": 2}, "padded", HALF, id="two-tails"),
            pytest.param({"dense_tail_blocks": 0}, {"q_length": 7}, "causal", HALF, id="7-tokens"),
        ],
        *(0, 1, 3, 11, 12, 13, 14, 15),
    ),
)
def test_any_setting_gives_lists_of_the_reference(
    fields, shape, layout, channels, uninitialised_is_nan
):
    config = replace(SMALL, **fields)
    q, k = loud(**{**SHAPE, **shape})
    q, k, ranges = laid_in(layout, q, k, config.query_block)
    expected = plan_by_reference(config, q, k, ranges, channels=channels)
    assert_same(rows_plan_by_kernels(config, q, k, ranges, channels=channels), expected)


@pytest.mark.parametrize(
    ("fields", "layout", "channels"),
    slow_but(
        [
            pytest.param({}, "padded", HALF, id="padded"),
            pytest.param({"key_block": 128}, "packed", HALF, id="keys-of-several-tiles"),
            pytest.param({"query_block": 48, "key_block": 48}, "causal", (), id="48"),
        ],
        0,
    ),
)
def test_keys_read_by_pointers_give_lists_of_the_reference(fields, layout, channels, by_pointers):
    config = replace(SMALL, **fields)
    q, k, ranges = laid_in(layout, *loud(**SHAPE, batch=2), config.query_block)
    expected = plan_by_reference(config, q, k, ranges, channels=channels)
    assert_same(rows_plan_by_kernels(config, q, k, ranges, channels=channels), expected)


LOGITS = {
    "sinks": {"sinks": torch.tensor([-3.0, 4.0, 12.0, 90.0])},
    "softcap": {"softcap": 4.0},
}


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_sinks_and_softcap_give_lists_of_the_reference(logits):
    q, k = loud(**SHAPE)
    ranges = KeyRanges.causal(1, q.shape[2], q.shape[2], "cpu")
    expected = plan_by_reference(SMALL, q, k, ranges, channels=HALF, **logits)
    actual = rows_plan_by_kernels(SMALL, q, k, ranges, channels=HALF, **logits)
    assert_same(actual, expected)
    without = plan_by_reference(SMALL, q, k, ranges, channels=HALF)
    assert abs(expected.density() - without.density()) > 0.02


def test_transposed_views_give_the_same_lists():
    q, k = loud(**ONE_GROUP)
    ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = rows_plan_by_kernels(SMALL, q, k, ranges)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    assert_same(rows_plan_by_kernels(SMALL, q, k, ranges), expected)


def test_many_chunks_with_small_scratch_give_the_same_lists(monkeypatch):
    q, k = loud(**ONE_GROUP)
    ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = rows_plan_by_kernels(SMALL, q, k, ranges)
    monkeypatch.setattr(tiles, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(tiles, "MIN_ROWS_FLOAT32", 8)
    assert_same(rows_plan_by_kernels(SMALL, q, k, ranges), expected)


def test_small_score_memory_gives_the_same_capped_lists(monkeypatch):
    q, k = loud(**ONE_GROUP)
    ranges, config = KeyRanges.causal(1, 300, 300, "cpu"), replace(SMALL, max_density=0.3)
    expected = rows_plan_by_kernels(config, q, k, ranges)
    monkeypatch.setattr(compact, "SCORE_BYTES", 1)
    assert_same(rows_plan_by_kernels(config, q, k, ranges), expected)


def test_lists_over_the_memory_bound_get_the_width_of_the_longest_row(monkeypatch):
    q, k = loud(**ONE_GROUP)
    ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = rows_plan_by_kernels(SMALL, q, k, ranges)
    monkeypatch.setattr(compact, "LIST_BYTES", 1)
    actual = rows_plan_by_kernels(SMALL, q, k, ranges)
    assert_same(actual, expected)
    longest = (expected.full.counts + expected.partial.counts).max()
    assert actual.full.width == longest < expected.full.width


def with_one_large_key(k):
    """Return keys of which key 50 is scaled by 2^12, so that its FP8 exponent differs."""
    k = k.clone()
    k[:, :, 50] *= 2.0**12
    return k


def with_many_magnitudes(k):
    """Return keys with odd keys scaled by 2^-12, and every third block of 16 keys by 2^-9."""
    token = torch.arange(k.shape[2])
    return k * 2.0 ** -(12.0 * (token % 2) + 9.0 * (token // 16 % 3 == 1))[:, None]


def dequantized(k):
    """Return the keys after quantisation to FP8 and dequantisation."""
    values, exponents = gather.quantize(k, (), tiles.FP8)
    return values.float()[..., : k.shape[3]] * 2.0**exponents


@pytest.mark.parametrize(
    "change", slow_but([torch.clone, with_one_large_key, with_many_magnitudes], 0, 2)
)
def test_8_bit_keys_select_nearly_the_blocks_of_the_reference(change, uninitialised_is_nan):
    q, k = loud(**SHAPE)
    k, ranges = change(k), KeyRanges.causal(1, 300, 300, "cpu")
    expected = plan_by_reference(SMALL, q, dequantized(k), ranges).to_dense()
    actual = rows_plan_by_kernels(SMALL, q, k, ranges, dtype=tiles.FP8).to_dense()
    # allow for 6% differences: the kernels also quantise queries, and the reference does not
    assert (actual != expected).sum() <= 0.06 * expected.sum()


@pytest.mark.parametrize("change", slow_but([torch.clone, with_many_magnitudes], 1))
@pytest.mark.parametrize("power", [-20, 13])
def test_8_bit_selection_does_not_depend_on_the_magnitude_of_keys(power, change):
    q, k = loud(**ONE_GROUP)
    ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = rows_plan_by_kernels(SMALL, q, change(k), ranges, dtype=tiles.FP8)
    q, k = q * 2.0**-power, change(k) * 2.0**power
    assert_same(rows_plan_by_kernels(SMALL, q, k, ranges, dtype=tiles.FP8), expected)


def test_later_8_bit_key_of_another_magnitude_changes_no_earlier_row():
    q, k = loud(**ONE_GROUP)
    ranges, config = KeyRanges.causal(1, 300, 300, "cpu"), replace(SMALL, dense_tail_blocks=0)
    before = rows_plan_by_kernels(config, q, k, ranges, dtype=tiles.FP8).to_dense()
    k[:, :, 260:] *= 2.0**11
    after = rows_plan_by_kernels(config, q, k, ranges, dtype=tiles.FP8).to_dense()
    assert torch.equal(after[:, :, :8], before[:, :, :8])
    assert not torch.equal(after[:, :, 8:], before[:, :, 8:])
