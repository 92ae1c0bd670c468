"""Quantised keys and sampled queries: kernels equal the reference; 8-bit rounding by hand."""

from dataclasses import replace

import pytest
import torch
from attention_cases import make_block_layout
from selecting import draw_peaked_qk

from cab_hf import CabConfig
from cab_hf.selection import reference
from cab_hf.selection.gather import ChannelOrder, quantize, sample_outlier_positions, sample_queries
from cab_hf.selection.tiles import FP8, HeadRange, compute_channel_widths

SMALL_BLOCKS_CONFIG = CabConfig(32, 16, predictor="rows", outlier_queries=4, typical_queries=4,
    typical_key_stride=1)  # fmt: skip
QK_SHAPE = {"q_length": 300, "heads": 4, "kv_heads": 2, "dim": 32}
UPPER_HALF_CHANNELS = tuple(range(16, 32))
# 8 heads in total: 2 batch rows of 4 heads
ALL_HEADS_RANGE = HeadRange(first_head=0, num_heads=8, heads_per_row=4)
CPU_DEVICE = torch.device("cpu")


def test_channels_are_padded_to_powers_of_two():
    channel_order = ChannelOrder.create((2, 3, 5), 8, CPU_DEVICE)
    assert (
        (channel_order.num_first_channels, channel_order.num_other_channels)
        == (32, 32)
        == compute_channel_widths((2, 3, 5), 8)
    )
    assert channel_order.channel_table[:4].tolist() == [2, 3, 5, -1]
    assert channel_order.channel_table[32:38].tolist() == [0, 1, 4, 6, 7, -1]
    order_of_all_channels = ChannelOrder.create((), 80, CPU_DEVICE)
    assert (
        (order_of_all_channels.num_first_channels, order_of_all_channels.num_other_channels)
        == (128, 0)
        == compute_channel_widths((), 80)
    )
    assert order_of_all_channels.channel_table[:80].tolist() == list(range(80))


def test_stored_keys_follow_the_order_of_channels():
    _, k = draw_peaked_qk(**QK_SHAPE)
    stored_keys, exponents = quantize(k, UPPER_HALF_CHANNELS, k.dtype)
    assert not exponents.any()
    assert torch.equal(stored_keys[..., :32], torch.nn.functional.pad(k[..., 16:], (0, 16)))
    assert torch.equal(stored_keys[..., 32:48], k[..., :16])


def test_padded_rows_give_outliers_of_the_reference():
    q, _ = draw_peaked_qk(batch=2, **QK_SHAPE)
    layout = make_block_layout("padded", batch=2, length=300, kv_length=300, align=32, device="cpu")
    q, key_ranges = layout.queries(q), layout.ranges
    for samples_per_block in (1, 8, 32):
        actual = sample_outlier_positions(
            q,
            key_ranges,
            head_range=ALL_HEADS_RANGE,
            query_block=32,
            samples_per_block=samples_per_block,
        )
        expected = reference.sample_outlier_queries(q, key_ranges, 32, samples_per_block)
        assert torch.equal(actual, expected.int().flatten(2).flatten(0, 1))


def test_padded_rows_give_typical_queries_of_the_reference():
    q, _ = draw_peaked_qk(batch=2, **QK_SHAPE)
    layout = make_block_layout("padded", batch=2, length=300, kv_length=300, align=32, device="cpu")
    q, key_ranges = layout.queries(q), layout.ranges
    config = replace(SMALL_BLOCKS_CONFIG, outlier_queries=0)
    (sample,) = sample_queries(
        q,
        key_ranges=key_ranges,
        config=config,
        head_range=ALL_HEADS_RANGE,
        scale=1.0,
        channels=(),
        dtype=q.dtype,
    )
    query_positions = reference.sample_typical_queries(key_ranges, 32, 4).flatten(1)
    is_real_sample = query_positions >= 0
    query_positions = query_positions.clamp(min=0)
    last_visible_key = key_ranges.end.gather(1, query_positions).masked_fill(~is_real_sample, -1)
    assert torch.equal(sample.last_key, last_visible_key.repeat_interleave(4, 0))
    # ``vectors`` has batch rows and heads in one dimension: row 1, head 2 is index 6
    expected = q[1, 2, query_positions[1]] * is_real_sample[1][:, None]
    assert torch.equal(sample.vectors[6], expected)


def quantize_and_dequantize(k):
    """Quantise keys to FP8; return (dequantised keys, exponent of each key)."""
    quantized_keys, exponents = quantize(k, (), FP8)
    assert quantized_keys.dtype == FP8 and exponents.dtype == torch.int8
    return quantized_keys.float()[..., : k.shape[3]] * 2.0**exponents, exponents


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        # FP8 E4M3 has four significant bits; the step near 0 is 2^-7 times the power of two below
        # the largest channel
        pytest.param([1.0, 0.53, 2**-7, 2**-9, 0.0], [1.0, 0.5, 2**-7, 0.0, 0.0], id="ones"),
        pytest.param([1e4, -17.2, 320.0], [10240.0, 0.0, 320.0], id="one-channel-alone"),
        pytest.param([0.0] * 3, [0.0] * 3, id="nothing"),
        pytest.param([3e38, -3e38, 1e30], [2.0**56, -(2.0**56), 2.0**56], id="never-infinite"),
        pytest.param([torch.inf, 1.0], [0.0, 0.0], id="zeros-for-infinity"),
    ],
)
def test_8_bit_keys_round_to_four_bits_of_the_largest_channel(key, expected):
    actual, _ = quantize_and_dequantize(torch.tensor(key).reshape(1, 1, 1, -1))
    assert torch.equal(actual.flatten(), torch.tensor(expected))


@pytest.mark.parametrize("scale_exponent", [-45, -14, -3, 1, 14, 45])
def test_8_bit_keys_scaled_by_a_power_of_two_round_alike(scale_exponent):
    _, k = draw_peaked_qk(**QK_SHAPE)
    expected, exponents = quantize_and_dequantize(k)
    assert torch.equal(
        quantize_and_dequantize(k * 2.0**scale_exponent)[0], expected * 2.0**scale_exponent
    )
    # the keys of `draw_peaked_qk` all have the same exponent
    assert exponents.unique().tolist() == [-1]


@pytest.mark.parametrize("channels", [(), (2, 3, 10, 11)], ids=["all", "some"])
def test_8_bit_key_does_not_depend_on_other_keys(channels):
    _, k = draw_peaked_qk(**QK_SHAPE)
    quantized_single_key = quantize(k[:, :, 42:43], channels, FP8)
    k_with_large_keys = k * 3000.0
    k_with_large_keys[:, :, 42] = k[:, :, 42]
    for keys, key_index in ((k, 42), (k_with_large_keys, 42), (k[:, :, 42:90], 0)):
        for tensor, expected in zip(
            quantize(keys, channels, FP8), quantized_single_key, strict=True
        ):
            actual = tensor[:, :, key_index : key_index + 1].contiguous()
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
