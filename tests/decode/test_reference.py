"""The reference of a sparse decode step, compared with plain softmax and sort."""

import math

import pytest
import torch
from tiny import draw_qkv
from torch.nn import functional as F

from cab_hf.ops.decode import attend, choose, index_keys, reference
from cab_hf.ops.decode.reference import (
    LEVELS_PER_OCTAVE,
    LOCAL_TOKENS,
    SINK_TOKENS,
    UNREAD_WEIGHT_FACTOR,
    select_scored_channels,
)

SCALE = 0.25


def choose_keys(q, k, length, num_keys, channels=(), padding_mask=None):
    """Return the `Choice` of about ``num_keys`` of the first ``length`` keys."""
    return choose(
        q,
        index_keys(k, channels),
        scale=SCALE,
        length=torch.tensor([length]),
        num_keys=torch.tensor([num_keys], dtype=torch.int32),
        channels=channels,
        padding_mask=padding_mask,
    )


def select_key_mask(q, k, length, num_keys, channels=(), padding_mask=None):
    """Return bool [B, H_kv, N]: True for keys that `choose_keys` selects."""
    return choose_keys(
        q, k, length, num_keys, channels=channels, padding_mask=padding_mask
    ).to_mask()


def quantise_vectors(x, max_code):
    """Round each vector to integer multiples of its quantisation scale, as `choose` does.

    Args:
        max_code: largest integer: 7 for 4-bit keys, 127 for 8-bit queries.
    """
    is_key = max_code == 7
    scale = x.abs().amax(-1, keepdim=True) / max_code
    scale = scale.half().float() if is_key else scale
    return (x / scale + 0.5).floor().clamp(-8 if is_key else -128, max_code) * scale


def compute_attention_shares(q, k, length):
    """Return the maximum attention weight of each key over its query heads, [B, H_kv, N]."""
    group_size = q.shape[1] // k.shape[1]
    q, k = quantise_vectors(q, 127), quantise_vectors(k, 7)
    logits = q @ k[:, :, :length].repeat_interleave(group_size, dim=1).mT * SCALE
    return logits.softmax(-1).squeeze(2).unflatten(1, (k.shape[1], group_size)).amax(2)


def require_largest_shares_selected(attention_shares, is_selected):
    """Assert that no unselected key has a larger attention weight than a selected key of its head.

    Args:
        attention_shares: attention weights, float [B, H_kv, N].
        is_selected: bool [B, H_kv, N]; sinks and local keys, which are always selected, are left
            out.
    """
    smallest_selected = attention_shares.masked_fill(~is_selected, 2).amin(-1)
    largest_unselected = attention_shares.masked_fill(is_selected, 0).amax(-1)
    # `choose` rounds the logarithms of attention weights to integers: allow for 1.5 steps
    assert (smallest_selected * 2 ** (1.5 / LEVELS_PER_OCTAVE) >= largest_unselected).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (8, 2)])
@pytest.mark.parametrize("num_keys", [128, 200])
def test_step_reads_keys_with_largest_attention_share(heads, kv_heads, num_keys):
    q, k, _ = draw_qkv(2, heads, kv_heads, q_length=1, kv_length=500)
    is_selected = select_key_mask(q, k, 450, num_keys)
    assert not is_selected[..., 450:].any()
    assert is_selected[..., :SINK_TOKENS].all() and is_selected[..., 450 - LOCAL_TOKENS : 450].all()
    middle_slots = slice(SINK_TOKENS, 450 - LOCAL_TOKENS)
    require_largest_shares_selected(
        compute_attention_shares(q, k, 450)[..., middle_slots], is_selected[..., middle_slots]
    )
    num_selected = is_selected.sum(-1)
    assert (num_selected <= num_keys).all() and (num_selected > num_keys - 20).all()


@pytest.mark.parametrize("channels", [(), (2, 3, 4, 10, 11, 12)])
def test_index_rounds_keys_within_half_a_quantisation_step(channels):
    _, k, _ = draw_qkv(2, q_length=1, kv_length=50)
    k[0, 0, 0] = 0
    key_index = index_keys(k, channels)
    scored_k = select_scored_channels(k, channels)
    assert key_index.codes.shape == (*k.shape[:3], scored_k.shape[-1] // 2)
    codes = torch.cat((key_index.codes & 15, key_index.codes >> 4), -1).float() - 8
    decoded_k = codes * key_index.scales.float().unsqueeze(-1)
    quantisation_step = scored_k.abs().amax(-1, keepdim=True) / 7
    # rounding error: half a quantisation step, and the error of the scale in float16 (11 bits)
    assert ((decoded_k - scored_k).abs() <= quantisation_step * 0.505).all()
    torch.testing.assert_close(decoded_k, quantise_vectors(scored_k, 7).nan_to_num())


@pytest.mark.parametrize("channels", [(), (0, 3, 5, 6, 9, 15)])
def test_sparse_step_equals_attention_masked_to_selected_keys(channels):
    q, k, v = draw_qkv(2, q_length=1, kv_length=500)
    choice = choose_keys(q, k, 450, 150, channels=channels).map_to_layer(q.device)
    mask = choice.to_mask().repeat_interleave(3, dim=1).unsqueeze(2)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)
    actual = attend(q, k, v, choice, scale=SCALE, length=torch.tensor([450]))
    torch.testing.assert_close(actual, expected)


def test_unread_keys_contribute_as_one_key_with_mean_value():
    q, k, v = draw_qkv(2, 6, 2, q_length=1, kv_length=500)
    length = torch.tensor([450])
    choice = choose_keys(q, k, 450, 150)
    is_unread = ~choice.to_mask()[:, :, :450].repeat_interleave(3, dim=1)
    q_8_bit = quantise_vectors(q, 127)
    k_4_bit = quantise_vectors(k, 7)[:, :, :450].repeat_interleave(3, dim=1)
    weights = (q_8_bit @ k_4_bit.mT * SCALE).exp().squeeze(2) * is_unread
    # `choose` rounds logits, hence the tolerance of 2%
    expected = weights.sum(-1) * UNREAD_WEIGHT_FACTOR
    torch.testing.assert_close(choice.unread_logit.exp2(), expected, rtol=2e-2, atol=0)
    # unselected keys count as one more key: its logit is ``unread``, and its value is the mean of
    # 256 equidistant values
    mean_value = v[:, :, torch.arange(256) * 450 // 256].mean(2, keepdim=True)
    keys = torch.cat([k, torch.zeros_like(k[:, :, :1])], dim=2).repeat_interleave(3, dim=1)
    values = torch.cat([v, mean_value], dim=2).repeat_interleave(3, dim=1)
    logits = q @ keys.mT * SCALE
    logits[..., 450:500] = float("-inf")
    logits[..., :450].masked_fill_(is_unread.unsqueeze(2), float("-inf"))
    logits[..., -1] = choice.unread_logit.unsqueeze(-1) * math.log(2)
    actual = attend(q, k, v, choice, scale=SCALE, length=length)
    torch.testing.assert_close(actual, logits.softmax(-1) @ values)
    # with the additional key, the output is closer to dense attention than without
    dense_out = F.scaled_dot_product_attention(
        q, k[:, :, :450], v[:, :, :450], scale=SCALE, enable_gqa=True
    )
    out_without_unread = attend(q, k, v, choice.map_to_layer(q.device), scale=SCALE, length=length)
    assert (actual - dense_out).norm() < 0.8 * (out_without_unread - dense_out).norm()


def test_scores_use_index_channels_only():
    q, k, _ = draw_qkv(q_length=1, kv_length=500)
    changed_k = torch.cat([k[..., :8], torch.randn_like(k[..., 8:])], dim=-1)
    channels = tuple(range(8))
    expected = select_key_mask(q, k, 500, 128, channels=channels)
    assert torch.equal(select_key_mask(q, changed_k, 500, 128, channels=channels), expected)


def test_padding_is_not_selected_and_sinks_follow_it():
    q, k, _ = draw_qkv(q_length=1, kv_length=500)
    padding_mask = torch.ones(1, 500, dtype=torch.bool)
    padding_mask[:, :100] = False
    is_selected = select_key_mask(q, k, 500, 128, padding_mask=padding_mask)
    assert not is_selected[..., :100].any() and is_selected[..., 100 : 100 + SINK_TOKENS].all()
    expected = select_key_mask(q, k[:, :, 100:], 400, 128)
    assert torch.equal(is_selected[..., 100:], expected)


def test_keys_with_equal_shares_are_selected_together():
    q, k, _ = draw_qkv(q_length=1, kv_length=500)
    k[:, :, 100:150] = k[:, :, 100:101]
    num_selected = select_key_mask(q, k, 500, 140)[..., 100:150].sum(-1)
    assert ((num_selected == 0) | (num_selected == 50)).all()


@pytest.mark.parametrize("num_keys", [300, 450, 1000])
def test_sequence_within_budget_is_read_completely(num_keys):
    q, k, v = draw_qkv(q_length=1, kv_length=500)
    choice = choose_keys(q, k, 300, num_keys)
    is_selected = choice.to_mask()
    assert is_selected[..., :300].all() and not is_selected[..., 300:].any()
    expected = F.scaled_dot_product_attention(
        q, k[:, :, :300], v[:, :, :300], scale=SCALE, enable_gqa=True
    )
    actual = attend(q, k, v, choice, scale=SCALE, length=torch.tensor([300]))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_long_cache_threshold_comes_from_a_sample(kv_heads):
    q, k, _ = draw_qkv(1, 6, kv_heads, q_length=1, kv_length=40_000)
    assert (
        reference.compute_sample_stride(40_000) == 8 and reference.compute_sample_stride(8192) == 1
    )
    is_selected = select_key_mask(3 * q, k, 39_000, 4000)
    assert not is_selected[..., 39_000:].any()
    num_selected = is_selected.sum(-1)
    assert ((num_selected - 4000).abs() < 400).all() and (num_selected != 4000).any()
    attention_shares = compute_attention_shares(3 * q, k, 39_000)
    largest_share_sum = attention_shares.topk(4000, dim=-1).values.sum(-1)
    # leave out sinks and local keys, which are always selected
    middle_slots = slice(SINK_TOKENS, 39_000 - LOCAL_TOKENS)
    selected_share_sum = (is_selected[..., middle_slots] * attention_shares[..., middle_slots]).sum(
        -1
    )
    assert (selected_share_sum > 0.95 * largest_share_sum).all()
    if kv_heads == 6:
        # without groups, each KV head selects for a single query head, so that the order is exact
        require_largest_shares_selected(
            attention_shares[..., middle_slots], is_selected[..., middle_slots]
        )
