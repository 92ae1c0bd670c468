"""The reference of a sparse decode step, against plain softmax and sort."""

import math

import pytest
import torch
from tiny import qkv
from torch.nn import functional as F

from cab_hf.ops.decode import attend, choose, index_keys, reference
from cab_hf.ops.decode.reference import (
    LEVELS_PER_OCTAVE,
    LOCAL_TOKENS,
    SINK_TOKENS,
    UNREAD_WEIGHT,
    scored_channels,
)

SCALE = 0.25


def choice_of(q, k, length, wanted, **kwargs):
    numbers = torch.tensor([length]), torch.tensor([wanted], dtype=torch.int32)
    channels = kwargs.get("channels", ())
    return choose(q, index_keys(k, channels), SCALE, *numbers, **kwargs)


def chosen(*args, **kwargs):
    return choice_of(*args, **kwargs).to_mask()


def in_bits(x, largest):
    """Quantise vectors to whole multiples of a unit per vector, as scoring does."""
    unit = x.abs().amax(-1, keepdim=True) / largest
    unit = unit.half().float() if largest == 7 else unit
    return (x / unit + 0.5).floor().clamp(-8 if largest == 7 else -128, largest) * unit


def shares(q, k, length):
    """Return the maximum attention share of each key over the heads of its group, [B, H_kv, N]."""
    groups = q.shape[1] // k.shape[1]
    q, k = in_bits(q, 127), in_bits(k, 7)
    logits = q @ k[:, :, :length].repeat_interleave(groups, dim=1).mT * SCALE
    return logits.softmax(-1).squeeze(2).unflatten(1, (k.shape[1], groups)).amax(2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (8, 2)])
@pytest.mark.parametrize("wanted", [128, 200])
def test_step_reads_keys_with_largest_attention_share(heads, kv_heads, wanted):
    q, k, _ = qkv(2, heads, kv_heads, q_length=1, kv_length=500)
    kept = chosen(q, k, 450, wanted)
    assert not kept[..., 450:].any()
    assert kept[..., :SINK_TOKENS].all() and kept[..., 450 - LOCAL_TOKENS : 450].all()
    share = shares(q, k, 450)
    middle = slice(SINK_TOKENS, 450 - LOCAL_TOKENS)
    least = share[..., middle].masked_fill(~kept[..., middle], 2).amin(-1)
    most = share[..., middle].masked_fill(kept[..., middle], 0).amax(-1)
    # equal within a step
    assert (least * 2 ** (1.5 / LEVELS_PER_OCTAVE) >= most).all()
    count = kept.sum(-1)
    assert (count <= wanted).all() and (count > wanted - 20).all()


@pytest.mark.parametrize("channels", [(), (2, 3, 4, 10, 11, 12)])
def test_index_rounds_keys_within_half_a_unit(channels):
    _, k, _ = qkv(2, q_length=1, kv_length=50)
    k[0, 0, 0] = 0
    index = index_keys(k, channels)
    x = scored_channels(k, channels)
    assert index.codes.shape == (*k.shape[:3], x.shape[-1] // 2)
    held = (
        torch.cat((index.codes & 15, index.codes >> 4), -1).float() - 8
    ) * index.scales.float().unsqueeze(-1)
    unit = x.abs().amax(-1, keepdim=True) / 7
    # the scale itself has eleven bits
    assert ((held - x).abs() <= unit * 0.505).all()
    torch.testing.assert_close(held, in_bits(x, 7).nan_to_num())


@pytest.mark.parametrize("channels", [(), (0, 3, 5, 6, 9, 15)])
def test_sparse_step_equals_attention_masked_to_selected_keys(channels):
    q, k, v = qkv(2, q_length=1, kv_length=500)
    choice = choice_of(q, k, 450, 150, channels=channels).for_layer(q.device)
    mask = choice.to_mask().repeat_interleave(3, dim=1).unsqueeze(2)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)
    actual = attend(q, k, v, choice, SCALE, torch.tensor([450]))
    torch.testing.assert_close(actual, expected)


def test_unread_keys_contribute_as_one_key_with_mean_value():
    q, k, v = qkv(2, 6, 2, q_length=1, kv_length=500)
    length = torch.tensor([450])
    choice = choice_of(q, k, 450, 150)
    unread, gone = choice.unread, ~choice.to_mask()[:, :, :450]
    q4, k4 = in_bits(q, 127), in_bits(k, 7)[:, :, :450].repeat_interleave(3, dim=1)
    weights = (q4 @ k4.mT * SCALE).exp().squeeze(2) * gone.repeat_interleave(3, dim=1)
    # logits are rounded to steps
    expected = weights.sum(-1) * UNREAD_WEIGHT
    torch.testing.assert_close(unread.exp2(), expected, rtol=2e-2, atol=0)
    mean = v[:, :, torch.arange(256) * 450 // 256].mean(2, keepdim=True)
    key = torch.cat([k, torch.zeros_like(k[:, :, :1])], dim=2)
    value = torch.cat([v, mean], dim=2).repeat_interleave(3, dim=1)
    logits = q @ key.repeat_interleave(3, dim=1).mT * SCALE
    logits[..., 450:500] = float("-inf")
    logits[..., :450].masked_fill_(gone.repeat_interleave(3, dim=1).unsqueeze(2), float("-inf"))
    logits[..., -1] = unread.unsqueeze(-1) * math.log(2)
    actual = attend(q, k, v, choice, SCALE, length)
    torch.testing.assert_close(actual, logits.softmax(-1) @ value)
    # and is nearer to dense attention than without it
    seen = k[:, :, :450], v[:, :, :450]
    dense = F.scaled_dot_product_attention(q, *seen, scale=SCALE, enable_gqa=True)
    without = attend(q, k, v, choice.for_layer(q.device), SCALE, length)
    assert (actual - dense).norm() < 0.8 * (without - dense).norm()


def test_scores_use_index_channels_only():
    q, k, _ = qkv(q_length=1, kv_length=500)
    other = torch.cat([k[..., :8], torch.randn_like(k[..., 8:])], dim=-1)
    kept = [chosen(q, x, 500, 128, channels=tuple(range(8))) for x in (k, other)]
    assert torch.equal(*kept)


def test_padding_is_not_selected_and_sinks_follow_it():
    q, k, _ = qkv(q_length=1, kv_length=500)
    valid = torch.ones(1, 500, dtype=torch.bool)
    valid[:, :100] = False
    kept = chosen(q, k, 500, 128, valid=valid)
    assert not kept[..., :100].any() and kept[..., 100 : 100 + SINK_TOKENS].all()
    alone = chosen(q, k[:, :, 100:], 400, 128)
    assert torch.equal(kept[..., 100:], alone)


def test_keys_with_equal_shares_are_selected_together():
    q, k, _ = qkv(q_length=1, kv_length=500)
    k[:, :, 100:150] = k[:, :, 100:101]
    kept = chosen(q, k, 500, 140)[..., 100:150]
    assert ((kept.sum(-1) == 0) | (kept.sum(-1) == 50)).all()


@pytest.mark.parametrize("wanted", [300, 450, 1000])
def test_sequence_within_budget_is_read_completely(wanted):
    q, k, v = qkv(q_length=1, kv_length=500)
    choice = choice_of(q, k, 300, wanted)
    kept = choice.to_mask()
    assert kept[..., :300].all() and not kept[..., 300:].any()
    seen = k[:, :, :300], v[:, :, :300]
    expected = F.scaled_dot_product_attention(q, *seen, scale=SCALE, enable_gqa=True)
    actual = attend(q, k, v, choice, SCALE, torch.tensor([300]))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_long_cache_threshold_comes_from_a_sample(kv_heads):
    q, k, _ = qkv(1, 6, kv_heads, q_length=1, kv_length=40_000)
    assert reference.sample_stride(40_000) == 8 and reference.sample_stride(8192) == 1
    kept = chosen(3 * q, k, 39_000, 4000)
    assert not kept[..., 39_000:].any()
    count = kept.sum(-1)
    assert ((count - 4000).abs() < 400).all() and (count != 4000).any()
    share = shares(3 * q, k, 39_000)
    best = share.topk(4000, dim=-1).values.sum(-1)
    ends = torch.zeros_like(kept)
    ends[..., :SINK_TOKENS] = ends[..., 39_000 - LOCAL_TOKENS : 39_000] = True
    assert (((kept & ~ends)[..., :39_000] * share).sum(-1) > 0.95 * best).all()
    if kv_heads == 6:
        # heads choose for themselves: no key that is read has a smaller share than one that is not
        middle = slice(SINK_TOKENS, 39_000 - LOCAL_TOKENS)
        least = share[..., middle].masked_fill(~kept[..., middle], 2).amin(-1)
        most = share[..., middle].masked_fill(kept[..., middle], 0).amax(-1)
        assert (least * 2 ** (1.5 / LEVELS_PER_OCTAVE) >= most).all()
