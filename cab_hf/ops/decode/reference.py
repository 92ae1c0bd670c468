"""Definition of a sparse decode step, in plain PyTorch on any device.

A step has one query per head. The query heads of a group read the same keys, so that a KV head
selects keys once for its group. The score of a key is the largest share of attention over the heads
of the group. Shares come from 8-bit queries and the 4-bit keys of the index (`index_keys`). These
products are sums of integers, which are the same on every device.

Shares are compared in steps of 1 / `STEPS_AN_OCTAVE` of a power of two. Thus the selection does not
depend on the last bit of a sum, and the limit is found by counting instead of sorting.

A sample of a long cache estimates the log-sum-exp of a head and the limit of the shares. The sample
has at most `SAMPLED` keys, in equidistant groups of `NEIGHBOURS` (`spread_of`). Of 131,072 keys it
contains every sixteenth; instead of 4,096 requested keys, a step then reads some 250 more or fewer.
The complete cache is scored only once, and no logits are stored.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops.reference import capped

# logarithms of shares are compared in steps of this part of a power of two
STEPS_AN_OCTAVE = 64
# step of keys that are always read; of keys whose share is below 2^-32 of all attention, or too
# small to measure; and of invisible keys
ALWAYS, LEAST, HIDDEN = 0, 2047, 2048
# the most keys of a cache in the sample, and the number of neighbours in a group
SAMPLED, NEIGHBOURS = 8192, 4
# values that estimate the mean of unread ones, equidistant; and the factor for the weight of unread
# keys, because 4-bit errors make a sum of exponentials too large
SPREAD_VALUES, UNREAD_SHARE = 256, 0.3
# largest magnitudes of 4-bit keys and of 8-bit queries; bounds of the scales of keys, positive
# because scales are divisors
LARGEST_CODE, LARGEST_QUERY, LARGEST_SCALE, LEAST_SCALE = 7, 127, 65504.0, 1.0e-20
# tokens at the start and at the end of a sequence that are always read
SINKS, LOCAL = 16, 64
LOG2_E = 1.4426950408889634


@functools.cache
def on_device(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``heads`` as int32 [heads] on a device.

    The result is cached: the copy synchronises with the device, which a CUDA graph cannot capture.
    """
    return torch.tensor(heads, dtype=torch.int32, device=device)


class Index(NamedTuple):
    """Compressed keys by which a decode step selects keys.

    Attributes:
        codes: uint8 [B, H_kv, N, C / 2], two channels per byte. Channel i of C is in the lower half
            of byte i, channel i + C / 2 in the upper half. Codes 0 to 15 represent -8 to 7.
        scales: float16 [B, H_kv, N], one scale per key. It is infinity for a key with NaN or an
            infinity in any channel. Such a key is always read, and its codes are those of zeros.
    """

    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def index_keys(k: Tensor, channels: tuple[int, ...]) -> Index:
    """Build the index of k [B, H_kv, N, D] on its scored ``channels``, () for all.

    The last channel of an odd count is dropped. Each key is divided by a separate scale, so that
    the bits of a key do not depend on other keys.
    """
    finite = k.isfinite().all(-1)
    x = picked(k, channels).masked_fill(~finite.unsqueeze(-1), 0.0)
    # products instead of divisions: some devices divide by a number, others multiply by its inverse
    scales = (x.abs().amax(-1) * (1 / LARGEST_CODE)).clamp(max=LARGEST_SCALE).to(torch.float16)
    inverse = scales.float().clamp(min=LEAST_SCALE).reciprocal().unsqueeze(-1)
    codes = (x * inverse).clamp(-LARGEST_CODE - 1, LARGEST_CODE)
    codes = ((codes + 0.5).floor() + 8).to(torch.uint8)
    scales = scales.masked_fill(~finite, torch.inf)
    low, high = codes.chunk(2, dim=-1)
    return Index(low | high << 4, scales)


def write_index(index: Index, k: Tensor, channels: tuple[int, ...], start: Tensor) -> None:
    """Write the index of k [B, H_kv, n, D] into that of a cache, from slot ``start`` (int64) on."""
    slots = start + torch.arange(k.shape[2], device=k.device)
    for x, new in zip(index, index_keys(k, channels), strict=True):
        x.index_copy_(2, slots, new)


def picked(x: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Return some channels of x [..., D] in float32, all for ().

    The count is rounded down to an even number, because two channels share a byte.
    """
    some = x[..., list(channels)] if channels else x
    return some[..., : some.shape[-1] // 2 * 2].float()


class Choice(NamedTuple):
    """Keys that the KV heads of a layer read for one query per head.

    Attributes:
        slots: int32 [B, H_kv, M], slots of the selected keys, one after the other; the rest is
            undefined.
        counts: int32 [B, H_kv], the number of selected keys.
        unread: float32 [B, H], log2 of `UNREAD_SHARE` * sum exp(logit) over the unread keys,
            estimated by the sample; None if unknown.
    """

    slots: Tensor
    counts: Tensor
    unread: Tensor | None

    @classmethod
    def of(cls, kept: Tensor, unread: Tensor | None = None) -> Choice:
        """Build the choice of the keys where ``kept``, bool [B, H_kv, N], is True."""
        slots = (~kept).byte().argsort(dim=-1, stable=True).to(torch.int32)
        return cls(slots, kept.sum(-1, dtype=torch.int32), unread)

    def kept(self, keys: int | None = None) -> Tensor:
        """Return which keys are read, bool [B, H_kv, N].

        Args:
            keys: N; None for the M of ``slots``.
        """
        there = torch.arange(self.slots.shape[2], device=self.slots.device) < self.counts[..., None]
        # slots after the last selected one may contain any number
        slots = self.slots.masked_fill(~there, 0).long()
        count = slots.new_zeros(*slots.shape[:2], slots.shape[2] if keys is None else keys)
        return count.scatter_add_(2, slots, there.long()) > 0

    def expanded(self, batch: int, kv_heads: int) -> Choice:
        """Expand a choice [B or 1, 1, M] to every KV head of a batch, without a copy."""
        slots = self.slots.expand(batch, kv_heads, -1)
        return Choice(slots, self.counts.expand(batch, kv_heads), self.unread)

    def elsewhere(self, device: torch.device, heads: tuple[int, ...] | None = None) -> Choice:
        """Return the choice for another layer, on its device.

        Args:
            heads: For each KV head of that layer, the KV head whose keys it reads; None for the
                same.
        """
        slots, counts = self.slots.to(device), self.counts.to(device)
        if heads is not None:
            slots, counts = (x[:, on_device(heads, device)] for x in (slots, counts))
        return Choice(slots, counts, None)


def choose(
    q: Tensor,
    index: Index,
    scale: float,
    length: Tensor,
    wanted: Tensor,
    channels: tuple[int, ...] = (),
    valid: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Choice:
    """Select the keys that each KV head reads for q [B, H, 1, D].

    Each KV head reads about ``wanted`` keys; counts are estimates unless the sample is the complete
    cache. Keys of equal shares are all read or none. Therefore a head reads as many whole steps as
    fit, and one more step if these have less than half of ``wanted``. A head reads everything if
    there are at most ``wanted`` keys. Keys that are not finite are read in addition to ``wanted``.
    Queries that are not finite do not affect the selection.

    Args:
        index: `index_keys` of the cache; entries from ``length`` on are ignored.
        scale: Factor of the logits.
        length: int [1], the number of written keys, including the key of the query.
        wanted: int32 [B], or [1] for all rows, the number of keys to read.
        channels: Channels of the index.
        valid: bool [B, >= length], False for padding; None without padding.
        sinks: [H], one logit per head that takes part in the softmax; None without.
    """
    logits, *ranks = ranked(q, index, scale, length, channels, valid, sinks)
    steps, sampled, _ = ranks
    selected = steps <= limit_of(*ranks, length, wanted)
    unselected = (sampled & ~selected & (steps < HIDDEN)).unsqueeze(2)
    unread = (logits / (STEPS_AN_OCTAVE * LOG2_E)).masked_fill(~unselected, float("-inf"))
    unread = unread.logsumexp(-1) * LOG2_E + math.log2(spread_of(steps.shape[2]) * UNREAD_SHARE)
    return Choice.of(selected, unread.flatten(1, 2))


def ranked(
    q: Tensor,
    index: Index,
    scale: float,
    length: Tensor,
    channels: tuple[int, ...],
    valid: Tensor | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (logits, steps, sampled, always) of the keys of a cache; see `choose` for arguments.

    Returns:
        logits: float32 [B, H_kv, H / H_kv, N], to base two, in units of 1 / `STEPS_AN_OCTAVE`.
        steps: int64 [B, H_kv, N], min over the group of log-sum-exp - logit, at least 1; or
            `ALWAYS`, `LEAST` or `HIDDEN`.
        sampled: bool [B, H_kv, N], the keys of the sample.
        always: bool [B, H_kv, N], the keys that are always read. Keys that are not finite are in
            neither ``sampled`` nor ``always``.
    """
    kv_heads, slots = index.scales.shape[1:]
    group = q.shape[1] // kv_heads
    visible, always = (x.unsqueeze(1) for x in _visible(slots, length, valid, q.device))
    # keys that are not finite are read, but not counted
    marked = index.scales.isinf() & visible
    always = always & ~marked
    spread, slot = spread_of(slots), torch.arange(slots, device=q.device)
    sampled = visible & ~always & ~marked & (slot // NEIGHBOURS % spread == 0)
    some = picked(q, channels).unflatten(1, (kv_heads, group)).squeeze(3)
    some = some.masked_fill(~some.isfinite().all(-1, keepdim=True), torch.nan)
    unit = (some.abs().amax(-1, keepdim=True) * (1 / LARGEST_QUERY)).clamp(min=LEAST_SCALE)
    some = (some * unit.reciprocal() + 0.5).floor()
    codes = torch.cat((index.codes & 15, index.codes >> 4), dim=-1).float() - 8
    scales = index.scales.float().masked_fill(marked, 0.0)
    logits = some @ codes.transpose(-1, -2) * scales.unsqueeze(2)
    logits = logits * (unit * (scale * LOG2_E))
    # a sampled key represents ``spread`` keys
    counted = logits + math.log2(spread) * sampled.unsqueeze(2)
    counted = counted.masked_fill(~(sampled | always).unsqueeze(2), float("-inf"))
    whole = torch.logsumexp(counted / LOG2_E, dim=-1, keepdim=True)
    if sinks is not None:
        whole = torch.logaddexp(whole, sinks.float().view(1, kv_heads, group, 1))
    whole = whole * LOG2_E
    # rounded before they are compared
    logits, whole = in_steps(logits), in_steps(whole)
    # a query that is not finite leaves the selection to the other heads of its group, and its
    # output is NaN
    steps = (whole - logits).nan_to_num(nan=LEAST).amin(2).clamp(ALWAYS + 1, LEAST).long()
    steps = steps.masked_fill(always | marked, ALWAYS).masked_fill(~visible, HIDDEN)
    return logits, steps, sampled, always


def limit_of(
    steps: Tensor,
    sampled: Tensor,
    always: Tensor,
    length: Tensor,
    wanted: Tensor,
) -> Tensor:
    """Return the last step that is read, int64 [B, H_kv, 1].

    Args:
        steps, sampled, always: From `ranked`.
        length, wanted: See `choose`.
    """
    spread = spread_of(steps.shape[2])
    counts = steps.new_zeros(*steps.shape[:2], HIDDEN + 1)
    counts.scatter_add_(2, steps, sampled.long().expand_as(steps))
    # all keys of step 0 are always read, sampled or not
    wanted = wanted.view(-1, 1, 1)
    total = counts[..., :HIDDEN].cumsum(-1) * spread + always.sum(-1, keepdim=True)
    fits = total[..., :LEAST] <= wanted
    fits[..., ALWAYS] = True
    fitting = fits.sum(-1)
    num_read = (total[..., :LEAST] * fits).amax(-1)
    takes_one_more = (2 * num_read < wanted.squeeze(-1)) & (fitting < LEAST)
    everything = (total[..., -1:] <= wanted).squeeze(-1) | (length <= wanted.squeeze(-1))
    return (fitting - 1 + takes_one_more.long()).masked_fill(everything, LEAST).unsqueeze(-1)


def spread_of(slots: int) -> int:
    """Return the distance of sampled groups of `NEIGHBOURS` keys in groups, a power of two."""
    return 1 << (-(-slots // SAMPLED) - 1).bit_length()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    scale: float,
    length: Tensor | None = None,
    valid: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute attention of q [B, H, 1, D] over the selected keys, [B, H, 1, D_v].

    All unread keys count as one key, with the sum of their weights and the mean value (SparQ
    Attention, Ribar et al., 2024). Without this key, the weights of the read keys would be too
    large. The mean is over `SPREAD_VALUES` equidistant keys from the first to the last.

    Args:
        k, v: [B, H_kv, N, D] and [B, H_kv, N, D_v].
        length, valid: See `choose`; only needed for a choice with ``unread``.
        sinks: [H], logits without a value.
        softcap: See `capped`.
    """
    kv_heads, slots = k.shape[1:3]
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(exact).unflatten(1, (kv_heads, -1)).squeeze(3)
    logits = capped(grouped @ k.to(exact).transpose(-1, -2) * scale, softcap)
    selected = choice.kept(slots).unsqueeze(2)
    logits, values = logits.masked_fill(~selected, float("-inf")), v.to(exact)
    values = values.masked_fill(~selected.any(2).unsqueeze(-1), 0)
    if choice.unread is not None:
        mean, share = _mean_value(v, length, valid)
        unread = choice.unread.to(exact).unflatten(1, (kv_heads, -1)).unsqueeze(-1) / LOG2_E
        logits = torch.cat((logits, unread + share.to(exact).log()), dim=-1)
        values = torch.cat((values, mean.to(exact)), dim=2)
    if sinks is not None:
        # a sink is one more key, whose value is 0
        sinks = sinks.to(exact).view(1, kv_heads, -1, 1).expand(len(q), -1, -1, -1)
        logits, values = torch.cat((logits, sinks), dim=-1), F.pad(values, (0, 0, 0, 1))
    return (logits.softmax(-1) @ values).to(q.dtype).flatten(1, 2).unsqueeze(2)


def _mean_value(v: Tensor, length: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean of `SPREAD_VALUES` real values of v, and the share of values that are real.

    Returns:
        float32 [B, H_kv, 1, D_v] for v [B, H_kv, N, D_v], and float32 [B, 1, 1, 1].
    """
    batch, kv_heads, _, dim = v.shape
    first = length.new_zeros(batch, 1) if valid is None else valid.int().argmax(-1, keepdim=True)
    slots = torch.arange(SPREAD_VALUES, device=v.device)
    slots = first + slots * (length - first) // SPREAD_VALUES
    some = v.gather(2, slots[:, None, :, None].expand(-1, kv_heads, -1, dim)).float()
    real = torch.ones_like(slots) if valid is None else valid.gather(1, slots)
    real = real[:, None, :, None].float()
    return (some * real).sum(2, keepdim=True) / real.sum(2, keepdim=True), real.mean(2, True)


def in_steps(x: Tensor) -> Tensor:
    """Round logarithms to base two to whole steps, in the range of int16; the dtype stays float."""
    limits = torch.iinfo(torch.int16)
    return (x * STEPS_AN_OCTAVE).round().clamp(limits.min, limits.max)


def _visible(
    slots: int, length: Tensor, valid: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the visible keys, and the visible keys that are always read, bool [B or 1, N]."""
    slot = torch.arange(slots, device=device)
    visible = (slot < length).unsqueeze(0)
    if valid is not None:
        padded = torch.zeros(valid.shape[0], slots, dtype=torch.bool, device=device)
        width = min(slots, valid.shape[1])
        padded[:, :width] = valid[:, :width]
        visible = visible & padded
    first = visible.int().argmax(-1, keepdim=True)
    always = visible & ((slot < first + SINKS) | (slot >= length - LOCAL))
    return visible, always
