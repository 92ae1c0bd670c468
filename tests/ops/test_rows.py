"""The kernels that choose by rows are the reference, in every layout and of every number."""

from dataclasses import replace

import pytest
import torch
from attention_cases import laid_out
from marks import slow_but
from selecting import laid_in, loud, on_the_cpu, rows_by_kernels

from cab_hf import CabConfig
from cab_hf.ops import lists, reference, sweep
from cab_hf.ops.rows import FP8, Channels, outliers, scored_keys, scored_rows
from cab_hf.plan import KeyRanges

SMALL = CabConfig(
    32, 16, predictor="rows", outlier_queries=4, typical_queries=4,
    typical_key_stride=1, mass_threshold=0.08, share_threshold=0.3,
)  # fmt: skip
SHAPE = {"q_length": 300, "heads": 4, "kv_heads": 2, "dim": 32}
# where what is compared is computed by kernels twice
ONE_GROUP = {**SHAPE, "heads": 2, "kv_heads": 1}
HALF = tuple(range(16, 32))
CPU = torch.device("cpu")


def assert_same(actual, expected):
    """The same blocks, in the same lists."""
    for lists_of in ("full", "partial"):
        one, other = (getattr(plan, lists_of) for plan in (actual, expected))
        assert torch.equal(one.counts, other.counts)
        columns = -(-expected.kv_length // expected.key_block)
        assert torch.equal(one.to_dense(columns), other.to_dense(columns))


# --- lists


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
def test_lists_are_those_of_the_reference(fields, shape, layout, channels, uninitialised_is_nan):
    config = replace(SMALL, **fields)
    q, k = loud(**{**SHAPE, **shape})
    q, k, ranges = laid_in(layout, q, k, config.query_block)
    expected = on_the_cpu(config, q, k, ranges, channels=channels)
    assert_same(rows_by_kernels(config, q, k, ranges, channels=channels), expected)


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
def test_keys_read_by_pointers_are_chosen_alike(fields, layout, channels, by_pointers):
    config = replace(SMALL, **fields)
    q, k, ranges = laid_in(layout, *loud(**SHAPE, batch=2), config.query_block)
    expected = on_the_cpu(config, q, k, ranges, channels=channels)
    assert_same(rows_by_kernels(config, q, k, ranges, channels=channels), expected)


LOGITS = {
    "sinks": {"sinks": torch.tensor([-3.0, 4.0, 12.0, 90.0])},
    "softcap": {"softcap": 4.0},
}


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_logits_are_those_of_the_reference(logits):
    q, k = loud(**SHAPE)
    ranges = KeyRanges.causal(1, q.shape[2], q.shape[2], "cpu")
    given = {"channels": HALF, **logits}
    expected = on_the_cpu(SMALL, q, k, ranges, **given)
    assert_same(rows_by_kernels(SMALL, q, k, ranges, **given), expected)
    plain = on_the_cpu(SMALL, q, k, ranges, channels=HALF)
    assert abs(expected.density() - plain.density()) > 0.02


def test_views_are_read_as_they_are():
    q, k = loud(**ONE_GROUP)
    ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = rows_by_kernels(SMALL, q, k, ranges)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    assert_same(rows_by_kernels(SMALL, q, k, ranges), expected)


def test_scratch_that_does_not_fit_is_used_in_turns(monkeypatch):
    q, k = loud(**ONE_GROUP)
    ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = rows_by_kernels(SMALL, q, k, ranges)
    monkeypatch.setattr(sweep, "SCRATCH_AT_A_TIME", 1)
    monkeypatch.setattr(sweep, "LEAST_ROWS_FLOAT32", 8)
    assert_same(rows_by_kernels(SMALL, q, k, ranges), expected)


def test_heads_whose_rows_are_capped_take_turns(monkeypatch):
    q, k = loud(**ONE_GROUP)
    ranges, config = KeyRanges.causal(1, 300, 300, "cpu"), replace(SMALL, max_density=0.3)
    expected = rows_by_kernels(config, q, k, ranges)
    monkeypatch.setattr(lists, "SCORE_BYTES_AT_A_TIME", 1)
    assert_same(rows_by_kernels(config, q, k, ranges), expected)


def test_lists_too_large_are_as_wide_as_the_longest(monkeypatch):
    q, k = loud(**ONE_GROUP)
    ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = rows_by_kernels(SMALL, q, k, ranges)
    monkeypatch.setattr(lists, "LISTS_AT_MOST", 1)
    actual = rows_by_kernels(SMALL, q, k, ranges)
    assert_same(actual, expected)
    kept = (expected.full.counts + expected.partial.counts).max()
    assert actual.full.width == kept < expected.full.width


# --- what is scored


def test_channels_come_in_an_order_that_products_take():
    order = Channels.of((2, 3, 5), 8, CPU)
    assert order.first == 32 and order.width == 64 == Channels.widths((2, 3, 5), 8)
    assert order.table[:4].tolist() == [2, 3, 5, -1]
    assert order.table[32:38].tolist() == [0, 1, 4, 6, 7, -1]
    everything = Channels.of((), 80, CPU)
    assert everything.first == everything.width == 128 == Channels.widths((), 80)
    assert everything.table[:80].tolist() == list(range(80))


def test_keys_stand_in_the_order_of_channels():
    _, k = loud(**SHAPE)
    keys, exponents = scored_keys(k, HALF, k.dtype)
    assert not exponents.any()
    assert torch.equal(keys[..., :32], torch.nn.functional.pad(k[..., 16:], (0, 16)))
    assert torch.equal(keys[..., 32:48], k[..., :16])


def test_outliers_are_those_of_the_reference():
    q, _ = loud(batch=2, **SHAPE)
    layout = laid_out("padded", 2, 300, 300, 32, "cpu")
    q, ranges = layout.queries(q), layout.ranges
    for count in (1, 8, 32):
        actual = outliers(q, ranges, (0, 8), 32, count)
        expected = reference.outlier_queries(q, ranges, 32, count)
        assert torch.equal(actual, expected.int().flatten(2).flatten(0, 1))


def test_typical_queries_are_those_of_the_reference():
    q, _ = loud(batch=2, **SHAPE)
    layout = laid_out("padded", 2, 300, 300, 32, "cpu")
    q, ranges = layout.queries(q), layout.ranges
    rows = scored_rows(q, ranges, (0, 8), 1.0, 32, 4, (), q.dtype)
    at = reference.typical_queries(ranges, 32, 4).flatten(1)
    there = at >= 0
    last = ranges.end.gather(1, at.clamp(min=0)).masked_fill(~there, -1)
    assert torch.equal(rows.last, last.repeat_interleave(4, 0))
    expected = q[1, 2, at[1].clamp(min=0)] * there[1][:, None]
    assert torch.equal(rows.vectors[6], expected)


# --- 8 bits


def held(k):
    """Return dequantised 8-bit keys and their exponents."""
    keys, exponents = scored_keys(k, (), FP8)
    assert keys.dtype == FP8 and exponents.dtype == torch.int8
    return keys.float()[..., : k.shape[3]] * 2.0**exponents, exponents


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        # four significant bits, and steps of 2^-7 of the power of two below the largest channel
        pytest.param([1.0, 0.53, 2**-7, 2**-9, 0.0], [1.0, 0.5, 2**-7, 0.0, 0.0], id="ones"),
        pytest.param([1e4, -17.2, 320.0], [10240.0, 0.0, 320.0], id="one-channel-alone"),
        pytest.param([0.0] * 3, [0.0] * 3, id="nothing"),
        pytest.param([3e38, -3e38, 1e30], [2.0**56, -(2.0**56), 2.0**56], id="never-infinite"),
        pytest.param([torch.inf, 1.0], [0.0, 0.0], id="zeros-for-infinity"),
    ],
)
def test_keys_of_eight_bits_by_hand(key, meant):
    actual, _ = held(torch.tensor(key).reshape(1, 1, 1, -1))
    assert torch.equal(actual.flatten(), torch.tensor(meant))


@pytest.mark.parametrize("power", [-45, -14, -3, 1, 14, 45])
def test_keys_of_any_magnitude_are_rounded_alike(power):
    _, k = loud(**SHAPE)
    alike, exponents = held(k)
    assert torch.equal(held(k * 2.0**power)[0], alike * 2.0**power)
    # and keys that are as large as those of a model share a unit
    assert exponents.unique().tolist() == [-1]


@pytest.mark.parametrize("channels", [(), (2, 3, 10, 11)], ids=["all", "some"])
def test_bits_of_a_key_are_its_own(channels):
    """So that chunks, caches and ranks hold what the whole text alone would."""
    _, k = loud(**SHAPE)
    alone = scored_keys(k[:, :, 42:43], channels, FP8)
    among = k * 3000.0
    among[:, :, 42] = k[:, :, 42]
    for x in (k, among, k[:, :, 42:90]):
        at = 0 if x.shape[2] == 48 else 42
        for one, other in zip(scored_keys(x, channels, FP8), alone, strict=True):
            own = one[:, :, at : at + 1].contiguous()
            assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))


def one_key_apart(k):
    """Two units in one block."""
    k = k.clone()
    k[:, :, 50] *= 2.0**12
    return k


def every_magnitude(k):
    """Every second key small, a third of the blocks smaller."""
    token = torch.arange(k.shape[2])
    return k * 2.0 ** -(12.0 * (token % 2) + 9.0 * (token // 16 % 3 == 1))[:, None]


@pytest.mark.parametrize("change", slow_but([torch.clone, one_key_apart, every_magnitude], 0, 2))
def test_eight_bits_keep_nearly_what_the_reference_keeps_of_them(change, uninitialised_is_nan):
    q, k = loud(**SHAPE)
    k, ranges = change(k), KeyRanges.causal(1, 300, 300, "cpu")
    expected = on_the_cpu(SMALL, q, held(k)[0], ranges).to_dense()
    actual = rows_by_kernels(SMALL, q, k, ranges, dtype=FP8).to_dense()
    # queries are rounded as well
    assert (actual != expected).sum() <= 0.06 * expected.sum()


@pytest.mark.parametrize("change", slow_but([torch.clone, every_magnitude], 1))
@pytest.mark.parametrize("power", [-20, 13])
def test_eight_bits_keep_the_same_whatever_the_magnitude(power, change):
    q, k = loud(**ONE_GROUP)
    ranges = KeyRanges.causal(1, 300, 300, "cpu")
    expected = rows_by_kernels(SMALL, q, change(k), ranges, dtype=FP8)
    given = q * 2.0**-power, change(k) * 2.0**power, ranges
    assert_same(rows_by_kernels(SMALL, *given, dtype=FP8), expected)


def test_a_later_key_of_another_magnitude_changes_no_earlier_row():
    """Not even one of the same block."""
    q, k = loud(**ONE_GROUP)
    ranges, config = KeyRanges.causal(1, 300, 300, "cpu"), replace(SMALL, dense_tail_blocks=0)
    before = rows_by_kernels(config, q, k, ranges, dtype=FP8).to_dense()
    k[:, :, 260:] *= 2.0**11
    after = rows_by_kernels(config, q, k, ranges, dtype=FP8).to_dense()
    assert torch.equal(after[:, :, :8], before[:, :, :8])
    assert not torch.equal(after[:, :, 8:], before[:, :, 8:])
