"""Definition of a sparse decode step, in plain PyTorch on any device.

A decode step has one query per head. Each KV head selects keys once for all query heads of its
group, and the step attends only to the selected keys. The score of a key is its attention
probability softmax(logits), the largest over the query heads of the group. Scores are computed from
8-bit queries and the 4-bit keys of the index (`index_keys`). Products of both are sums of integers,
which are the same on every device.

Logarithms of scores are rounded to integer levels: level l is the score
2^(-l / `LEVELS_PER_OCTAVE`). The keys of the lowest levels are selected. Thus the selection does
not depend on the last bit of a sum. The last selected level is found by counting keys per level
instead of sorting.

In a long cache, a sample of the keys estimates the log-sum-exp of each head and the last selected
level. The sample has at most `MAX_SAMPLED_KEYS` keys, in equidistant runs of `KEYS_PER_RUN`
adjacent keys (`compute_sample_stride`). For example, the sample of 131,072 keys has every sixteenth
run. If 4,096 keys are requested, the number of selected keys differs from 4,096 by about 250.
Because thresholds come from the sample, kernels read the complete index only once and store no
other logits.

In names, "read" stands for selected keys, and "unread" for visible keys that are not selected.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops.reference import cap_logits

# number of levels between attention probabilities p and p / 2
LEVELS_PER_OCTAVE = 64
# level of keys that are selected independent of their score: sinks, local tokens, NaN, infinities
ALWAYS_READ_LEVEL = 0
# largest level of visible keys: their attention probability is at most about 2^-32
LAST_LEVEL = 2047
# level of padding, and of slots that contain no key yet
HIDDEN_LEVEL = 2048
# maximum number of keys in the sample of a cache
MAX_SAMPLED_KEYS = 8192
# the sample of keys consists of runs of this many adjacent keys
KEYS_PER_RUN = 4
# number of equidistant values whose mean estimates the mean value of the unread keys
NUM_MEAN_VALUES = 256
# factor of the estimated weight of the unread keys, which is too large: rounding keys to 4 bits
# increases sums of exp(logit)
UNREAD_WEIGHT_FACTOR = 0.3
# largest integer to which channels of keys are quantised (4 bits)
MAX_KEY_CODE = 7
# largest integer to which channels of queries are quantised (8 bits)
MAX_QUERY_CODE = 127
# largest scale of a key: the largest finite float16
MAX_KEY_SCALE = 65504.0
# smallest scale of a key or query; positive, because scales are divisors
MIN_SCALE = 1.0e-20
# number of tokens at the start of a sequence that are always selected
SINK_TOKENS = 16
# number of tokens at the end of a sequence that are always selected
LOCAL_TOKENS = 64
LOG2_E = 1.4426950408889634


@functools.cache
def copy_heads_to_device(head_indices: tuple[int, ...], device: torch.device) -> Tensor:
    """Return head indices as an int32 tensor on ``device``.

    The result is cached. A copy to the device is a device sync, which a CUDA graph cannot capture.
    """
    return torch.tensor(head_indices, dtype=torch.int32, device=device)


class Index(NamedTuple):
    """Keys quantised to 4 bits per channel, from which a decode step computes scores.

    Attributes:
        codes: uint8 [B, H_kv, N, C / 2], for C scored channels, two per byte. Channel i is in the
            lower half of byte i, channel i + C / 2 in the upper half. Codes 0 to 15 represent -8
            to 7.
        scales: float16 [B, H_kv, N], one scale per key: channel = scale * (code - 8). The scale is
            infinity if any channel of the key is NaN or infinite. Such a key is always selected,
            and its codes represent zeros.
    """

    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def index_keys(k: Tensor, channels: tuple[int, ...]) -> Index:
    """Quantise the scored channels of keys to an index.

    Each key has a separate scale, so that the codes of a key do not depend on other keys.

    Args:
        k: [B, H_kv, N, D].
        channels: Indices of the scored channels; () for all. The last channel of an odd number is
            dropped.
    """
    is_finite = k.isfinite().all(-1)
    scored_k = select_scored_channels(k, channels).masked_fill(~is_finite.unsqueeze(-1), 0.0)
    # devices differ in whether they divide by a number or multiply by its inverse, which rounds
    # differently. Explicit products with the inverse are the same on every device
    scales = (
        (scored_k.abs().amax(-1) * (1 / MAX_KEY_CODE)).clamp(max=MAX_KEY_SCALE).to(torch.float16)
    )
    inverse_scale = scales.float().clamp(min=MIN_SCALE).reciprocal().unsqueeze(-1)
    codes = (scored_k * inverse_scale).clamp(-MAX_KEY_CODE - 1, MAX_KEY_CODE)
    codes = ((codes + 0.5).floor() + 8).to(torch.uint8)
    scales = scales.masked_fill(~is_finite, torch.inf)
    lower_half, upper_half = codes.chunk(2, dim=-1)
    return Index(lower_half | upper_half << 4, scales)


def write_index(index: Index, k: Tensor, channels: tuple[int, ...], start: Tensor) -> None:
    """Quantise new keys, and write the result to the index of a cache.

    Args:
        index: Index of all slots of the cache, changed in place.
        k: [B, H_kv, n, D], the new keys.
        channels: See `index_keys`.
        start: int64 scalar or [1], the slot of the first new key.
    """
    slots = start + torch.arange(k.shape[2], device=k.device)
    for index_tensor, new_entries in zip(index, index_keys(k, channels), strict=True):
        index_tensor.index_copy_(2, slots, new_entries)


def select_scored_channels(x: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Return the scored channels of x [..., D] in float32; all channels for ().

    The number of channels is rounded down to an even number, because two channels share a byte.
    """
    scored_channels = x[..., list(channels)] if channels else x
    return scored_channels[..., : scored_channels.shape[-1] // 2 * 2].float()


class Choice(NamedTuple):
    """Selected keys of each KV head of a layer, for one query per head.

    Attributes:
        slots: int32 [B, H_kv, M], the slots of the selected keys. Entries from ``counts`` on are
            undefined.
        counts: int32 [B, H_kv], the number of selected keys.
        unread_logit: float32 [B, H], log2(`UNREAD_WEIGHT_FACTOR` * sum of exp(logit) over the
            unread keys), estimated from the sample; None if there is no estimate. Unread keys are
            the visible keys that are not selected.
    """

    slots: Tensor
    counts: Tensor
    unread_logit: Tensor | None

    @classmethod
    def from_mask(cls, is_selected: Tensor, unread_logit: Tensor | None = None) -> Choice:
        """Build a choice from a mask: ``is_selected`` is bool [B, H_kv, N], True for selected keys.

        ``unread_logit`` becomes the field of the choice.
        """
        slots = (~is_selected).byte().argsort(dim=-1, stable=True).to(torch.int32)
        return cls(slots, is_selected.sum(-1, dtype=torch.int32), unread_logit)

    def to_mask(self, num_slots: int | None = None) -> Tensor:
        """Return bool [B, H_kv, num_slots], True for selected keys.

        Args:
            num_slots: Number of slots of the cache; None for the width of ``slots``.
        """
        list_width = self.slots.shape[2]
        is_listed = torch.arange(list_width, device=self.slots.device) < self.counts[..., None]
        # entries after the last selected slot may contain any number
        slots = self.slots.masked_fill(~is_listed, 0).long()
        slot_counts = slots.new_zeros(
            *slots.shape[:2], list_width if num_slots is None else num_slots
        )
        return slot_counts.scatter_add_(2, slots, is_listed.long()) > 0

    def expand(self, batch: int, kv_heads: int) -> Choice:
        """Expand slots [B or 1, 1, M] and counts to all KV heads and batch rows, without a copy."""
        slots = self.slots.expand(batch, kv_heads, -1)
        return Choice(slots, self.counts.expand(batch, kv_heads), self.unread_logit)

    def map_to_layer(
        self, device: torch.device, kv_head_map: tuple[int, ...] | None = None
    ) -> Choice:
        """Return the choice for another layer that attends to the keys which this layer selected.

        The result has no ``unread_logit``.

        Args:
            device: Device of the other layer.
            kv_head_map: For each KV head of the other layer, the index of the KV head of this
                choice whose slots are used; None if head h uses the slots of head h.
        """
        slots, counts = self.slots.to(device), self.counts.to(device)
        if kv_head_map is not None:
            slots, counts = (
                x[:, copy_heads_to_device(kv_head_map, device)] for x in (slots, counts)
            )
        return Choice(slots, counts, None)


def choose(
    q: Tensor,
    index: Index,
    scale: float,
    length: Tensor,
    num_keys: Tensor,
    channels: tuple[int, ...] = (),
    padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Choice:
    """Select the keys that each KV head attends to in a decode step.

    Each KV head selects about n = ``num_keys`` keys. Of the keys of one level, all or none are
    selected:

    * A head selects all keys if there are at most n keys.
    * Otherwise, a head selects the lowest levels, as many as have at most n keys together.
    * If these levels have fewer than n / 2 keys, the head also selects the next level.

    Numbers of keys per level are estimates unless the sample contains all keys. Keys with NaN or
    infinities are selected in addition to the n keys. Queries with NaN or infinities do not affect
    the selection.

    Args:
        q: [B, H, 1, D].
        index: Index of all slots of the cache; entries from ``length`` on are ignored.
        scale: Factor of the products q · k.
        length: int [1], the number of written keys, including the key of the query.
        num_keys: int32 [B], or [1] for all rows, the number of keys to select.
        channels: The scored channels from which the index was built; () for all.
        padding_mask: bool [B, >= length], False for padding; None without padding.
        sinks: [H], one logit per head that takes part in the softmax; None without.
    """
    scores = score_keys(
        q,
        index,
        scale=scale,
        length=length,
        channels=channels,
        padding_mask=padding_mask,
        sinks=sinks,
    )
    logits, levels, is_sampled, is_always_read = scores
    is_selected = levels <= find_last_read_level(
        levels,
        is_sampled=is_sampled,
        is_always_read=is_always_read,
        length=length,
        num_keys=num_keys,
    )
    is_unread = (is_sampled & ~is_selected & (levels < HIDDEN_LEVEL)).unsqueeze(2)
    unread_logit = (logits / (LEVELS_PER_OCTAVE * LOG2_E)).masked_fill(~is_unread, float("-inf"))
    num_represented_keys = compute_sample_stride(levels.shape[2])
    unread_logit = unread_logit.logsumexp(-1) * LOG2_E + math.log2(
        num_represented_keys * UNREAD_WEIGHT_FACTOR
    )
    return Choice.from_mask(is_selected, unread_logit.flatten(1, 2))


def score_keys(
    q: Tensor,
    index: Index,
    scale: float,
    length: Tensor,
    channels: tuple[int, ...],
    padding_mask: Tensor | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute logits and levels of all keys of a cache. The arguments are those of `choose`.

    Returns:
        logits: float32 [B, H_kv, H / H_kv, N], logits rounded by `round_to_levels`.
        levels: int64 [B, H_kv, N]. The level of a key is the minimum over the group of
            log-sum-exp - logit, clamped to the range 1 to `LAST_LEVEL`. The level is
            `ALWAYS_READ_LEVEL` for keys that are always selected, and `HIDDEN_LEVEL` for keys that
            are not visible.
        is_sampled: bool [B, H_kv, N], True for keys of the sample.
        is_always_read: bool [B, H_kv, N], True for sink and local tokens, which are always
            selected. Keys with NaN or infinities are in neither ``is_sampled`` nor
            ``is_always_read``.
    """
    kv_heads, num_slots = index.scales.shape[1:]
    group_size = q.shape[1] // kv_heads
    is_visible, is_always_read = (
        x.unsqueeze(1) for x in _find_visible_slots(num_slots, length, padding_mask, q.device)
    )
    # keys with NaN or infinities are selected in addition to ``num_keys`` keys, and not counted
    is_nonfinite = index.scales.isinf() & is_visible
    is_always_read = is_always_read & ~is_nonfinite
    sample_stride = compute_sample_stride(num_slots)
    is_in_sampled_run = (
        torch.arange(num_slots, device=q.device) // KEYS_PER_RUN % sample_stride == 0
    )
    is_sampled = is_visible & ~is_always_read & ~is_nonfinite & is_in_sampled_run

    # logits [B, H_kv, group, N] of 8-bit queries and 4-bit keys
    queries = select_scored_channels(q, channels).unflatten(1, (kv_heads, group_size)).squeeze(3)
    queries = queries.masked_fill(~queries.isfinite().all(-1, keepdim=True), torch.nan)
    query_scales = queries.abs().amax(-1, keepdim=True) * (1 / MAX_QUERY_CODE)
    query_scales = query_scales.clamp(min=MIN_SCALE)
    queries = (queries * query_scales.reciprocal() + 0.5).floor()
    keys = torch.cat((index.codes & 15, index.codes >> 4), dim=-1).float() - 8
    key_scales = index.scales.float().masked_fill(is_nonfinite, 0.0)
    logits = queries @ keys.transpose(-1, -2) * key_scales.unsqueeze(2)
    logits = logits * (query_scales * (scale * LOG2_E))

    # each sampled key represents ``sample_stride`` keys in the log-sum-exp [B, H_kv, group, 1]
    counted_logits = logits + math.log2(sample_stride) * is_sampled.unsqueeze(2)
    counted_logits = counted_logits.masked_fill(
        ~(is_sampled | is_always_read).unsqueeze(2), float("-inf")
    )
    lse = torch.logsumexp(counted_logits / LOG2_E, dim=-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, kv_heads, group_size, 1))
    lse = lse * LOG2_E
    # logits and log-sum-exps are rounded before the difference, as in the kernels
    logits, lse = round_to_levels(logits), round_to_levels(lse)
    # a query with NaN or infinities has NaN levels. They become the largest level, so that only the
    # other heads of the group select keys
    levels = (lse - logits).nan_to_num(nan=LAST_LEVEL).amin(2)
    levels = levels.clamp(ALWAYS_READ_LEVEL + 1, LAST_LEVEL).long()
    levels = levels.masked_fill(is_always_read | is_nonfinite, ALWAYS_READ_LEVEL)
    levels = levels.masked_fill(~is_visible, HIDDEN_LEVEL)
    return logits, levels, is_sampled, is_always_read


def find_last_read_level(
    levels: Tensor,
    is_sampled: Tensor,
    is_always_read: Tensor,
    length: Tensor,
    num_keys: Tensor,
) -> Tensor:
    """Return the last selected level of each KV head, int64 [B, H_kv, 1].

    Args:
        levels, is_sampled, is_always_read: Results of `score_keys`.
        length, num_keys: Arguments of `choose`.
    """
    sample_stride = compute_sample_stride(levels.shape[2])
    level_counts = levels.new_zeros(*levels.shape[:2], HIDDEN_LEVEL + 1)
    level_counts.scatter_add_(2, levels, is_sampled.long().expand_as(levels))
    # keys that are always selected are not in the sample, and are counted exactly
    num_keys = num_keys.view(-1, 1, 1)
    num_keys_up_to_level = level_counts[..., :HIDDEN_LEVEL].cumsum(-1) * sample_stride
    num_keys_up_to_level = num_keys_up_to_level + is_always_read.sum(-1, keepdim=True)
    is_within_budget = num_keys_up_to_level[..., :LAST_LEVEL] <= num_keys
    is_within_budget[..., ALWAYS_READ_LEVEL] = True
    num_levels = is_within_budget.sum(-1)
    num_read_keys = (num_keys_up_to_level[..., :LAST_LEVEL] * is_within_budget).amax(-1)
    should_take_next_level = (2 * num_read_keys < num_keys.squeeze(-1)) & (num_levels < LAST_LEVEL)
    is_all_read = (num_keys_up_to_level[..., -1:] <= num_keys).squeeze(-1)
    is_all_read = is_all_read | (length <= num_keys.squeeze(-1))
    last_level = num_levels - 1 + should_take_next_level.long()
    return last_level.masked_fill(is_all_read, LAST_LEVEL).unsqueeze(-1)


def compute_sample_stride(num_slots: int) -> int:
    """Return n, a power of two: the sample has every n-th run of `KEYS_PER_RUN` adjacent slots."""
    return 1 << (-(-num_slots // MAX_SAMPLED_KEYS) - 1).bit_length()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    scale: float,
    length: Tensor | None = None,
    padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute attention of q [B, H, 1, D] over the selected keys, [B, H, 1, D_v].

    If ``choice.unread_logit`` is not None, all keys that are not selected count as one key. This
    key has the sum of their weights and the mean value of the cache (SparQ Attention, Ribar et al.,
    2024). Without this key, the weights of the selected keys would be too large. The mean is over
    `NUM_MEAN_VALUES` equidistant slots of the sequence.

    Args:
        q: [B, H, 1, D].
        k, v: [B, H_kv, N, D] and [B, H_kv, N, D_v].
        choice: Selected keys of each KV head.
        scale: Factor of the products q · k.
        length, padding_mask: Arguments of `choose`; only needed for a choice with ``unread_logit``.
        sinks: [H], one additional logit per head, which has no value; None without.
        softcap: Soft cap of the scaled logits, see `cap_logits`; None for no cap.
    """
    kv_heads, num_slots = k.shape[1:3]
    exact_dtype = torch.promote_types(q.dtype, torch.float32)
    grouped_q = q.to(exact_dtype).unflatten(1, (kv_heads, -1)).squeeze(3)
    logits = cap_logits(grouped_q @ k.to(exact_dtype).transpose(-1, -2) * scale, softcap)
    is_selected = choice.to_mask(num_slots).unsqueeze(2)
    logits, values = logits.masked_fill(~is_selected, float("-inf")), v.to(exact_dtype)
    values = values.masked_fill(~is_selected.any(2).unsqueeze(-1), 0)
    if choice.unread_logit is not None:
        mean_value, real_slot_share = _compute_mean_value(v, length, padding_mask)
        unread_logit = (
            choice.unread_logit.to(exact_dtype).unflatten(1, (kv_heads, -1)).unsqueeze(-1) / LOG2_E
        )
        logits = torch.cat((logits, unread_logit + real_slot_share.to(exact_dtype).log()), dim=-1)
        values = torch.cat((values, mean_value.to(exact_dtype)), dim=2)
    if sinks is not None:
        # a sink acts as one more key, whose value is 0
        sinks = sinks.to(exact_dtype).view(1, kv_heads, -1, 1).expand(len(q), -1, -1, -1)
        logits, values = torch.cat((logits, sinks), dim=-1), F.pad(values, (0, 0, 0, 1))
    return (logits.softmax(-1) @ values).to(q.dtype).flatten(1, 2).unsqueeze(2)


def _compute_mean_value(
    v: Tensor, length: Tensor, padding_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the mean of `NUM_MEAN_VALUES` values at equidistant slots, without padding.

    Args:
        v: [B, H_kv, N, D_v].
        length, padding_mask: Arguments of `choose`.

    Returns:
        mean_value: float32 [B, H_kv, 1, D_v], the mean of the values that are not padding.
        real_slot_share: float32 [B, 1, 1, 1], the fraction of the equidistant slots that are not
            padding; 1 without ``padding_mask``.
    """
    batch, kv_heads, _, dim = v.shape
    first_token = (
        length.new_zeros(batch, 1)
        if padding_mask is None
        else padding_mask.int().argmax(-1, keepdim=True)
    )
    slots = torch.arange(NUM_MEAN_VALUES, device=v.device)
    slots = first_token + slots * (length - first_token) // NUM_MEAN_VALUES
    values = v.gather(2, slots[:, None, :, None].expand(-1, kv_heads, -1, dim)).float()
    is_real = torch.ones_like(slots) if padding_mask is None else padding_mask.gather(1, slots)
    is_real = is_real[:, None, :, None].float()
    mean_value = (values * is_real).sum(2, keepdim=True) / is_real.sum(2, keepdim=True)
    return mean_value, is_real.mean(2, True)


def round_to_levels(x: Tensor) -> Tensor:
    """Round x * `LEVELS_PER_OCTAVE` to integers in the range of int16; the dtype stays float.

    Args:
        x: Logits or log-sum-exps to base two.
    """
    int16_range = torch.iinfo(torch.int16)
    return (x * LEVELS_PER_OCTAVE).round().clamp(int16_range.min, int16_range.max)


def _find_visible_slots(
    num_slots: int, length: Tensor, padding_mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return which slots contain a visible key, and which of these are sink or local tokens.

    Args:
        num_slots: N, the number of slots of the cache.
        length, padding_mask: Arguments of `choose`.
        device: Device of the results.

    Returns:
        is_visible: bool [B or 1, N], False for padding and for slots from ``length`` on.
        is_always_read: bool [B or 1, N], True for visible sink and local tokens.
    """
    slot = torch.arange(num_slots, device=device)
    is_visible = (slot < length).unsqueeze(0)
    if padding_mask is not None:
        is_real = torch.zeros(padding_mask.shape[0], num_slots, dtype=torch.bool, device=device)
        num_mask_slots = min(num_slots, padding_mask.shape[1])
        is_real[:, :num_mask_slots] = padding_mask[:, :num_mask_slots]
        is_visible = is_visible & is_real
    first_token = is_visible.int().argmax(-1, keepdim=True)
    is_always_read = is_visible & (
        (slot < first_token + SINK_TOKENS) | (slot >= length - LOCAL_TOKENS)
    )
    return is_visible, is_always_read
