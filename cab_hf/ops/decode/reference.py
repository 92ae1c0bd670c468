"""What a sparse decode step computes, in plain PyTorch on any device.

A step has one query a head. The query heads of a group read the same keys, so that a KV head
chooses once for its group: a key is worth the largest share of attention that any head of the group
gives it, by scores of 8-bit queries and the 4-bit keys of the index (`index_keys`), which are sums
of whole numbers and the same on every device. Shares are compared in steps of 1 / `STEPS_AN_OCTAVE`
of a power of two: which keys are read does not hang on the last bit of a sum, and how small a share
is still read is found by counting, not by sorting.

What all attention of a head is, and which shares are still read, is taken from a sample of a long
cache: `SAMPLED` keys at most, `NEIGHBOURS` at a time and equally far apart (`spread_of`). Of
131,072 keys it is every sixteenth, and instead of 4,096 that are wanted some 250 more or fewer are
read. The cache is then scored once, and no logits are kept.
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
# step of the keys that are always read; of those whose share is below 2^-32 of all attention, or
# too small to tell; and of those that may not be seen
ALWAYS, LEAST, HIDDEN = 0, 2047, 2048
# keys of a cache that estimate all attention, at most, and how many are neighbours
SAMPLED, NEIGHBOURS = 8192, 4
# values that estimate the mean of unread ones, equally far apart; and the share that counts
# of the weight of these keys by scores: errors of 4 bits make a sum of exponentials too large
SPREAD_VALUES, UNREAD_SHARE = 256, 0.3
# of 4-bit keys and 8-bit queries, and of the scales of keys; scales are not 0, to divide by
LARGEST_CODE, LARGEST_QUERY, LARGEST_SCALE, LEAST_SCALE = 7, 127, 65504.0, 1.0e-20
# tokens at the start of a text, and up to its end, that are always read
SINKS, LOCAL = 16, 64
LOG2_E = 1.4426950408889634


@functools.cache
def on_device(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [heads]; made once, as a copy to the device waits and no graph can hold it."""
    return torch.tensor(heads, dtype=torch.int32, device=device)


class Index(NamedTuple):
    """What is kept of keys beside them, to choose by.

    Attributes:
        codes: uint8 [B, H_kv, N, C / 2], two channels a byte: the i-th of C in the lower half, the
            one C / 2 behind it in the upper half; 0 to 15 for -8 to 7.
        scales: float16 [B, H_kv, N], of each key; infinity for a key with NaN or an infinity in
            any channel, which is always read and whose codes are those of zeros.
    """

    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def index_keys(k: Tensor, channels: tuple[int, ...]) -> Index:
    """The index of k [B, H_kv, N, D]: its scored ``channels``, () for all; the last of an odd count
    is left out.

    A key is divided by a scale of its own, and no key's bits depend on another key.
    """
    finite = k.isfinite().all(-1)
    x = picked(k, channels).masked_fill(~finite.unsqueeze(-1), 0.0)
    # products, as some devices divide by a number and others multiply by its inverse
    scales = (x.abs().amax(-1) * (1 / LARGEST_CODE)).clamp(max=LARGEST_SCALE).to(torch.float16)
    inverse = scales.float().clamp(min=LEAST_SCALE).reciprocal().unsqueeze(-1)
    codes = (x * inverse).clamp(-LARGEST_CODE - 1, LARGEST_CODE)
    codes = ((codes + 0.5).floor() + 8).to(torch.uint8)
    scales = scales.masked_fill(~finite, torch.inf)
    low, high = codes.chunk(2, dim=-1)
    return Index(low | high << 4, scales)


def write_index(index: Index, k: Tensor, channels: tuple[int, ...], start: Tensor) -> None:
    """Write the index of k [B, H_kv, n, D] into that of a cache, from slot ``start``, an int64."""
    slots = start + torch.arange(k.shape[2], device=k.device)
    for x, new in zip(index, index_keys(k, channels), strict=True):
        x.index_copy_(2, slots, new)


def picked(x: Tensor, channels: tuple[int, ...]) -> Tensor:
    """Some channels of x [..., D] in float32, all of them for (); an even count, as two share a
    byte."""
    some = x[..., list(channels)] if channels else x
    return some[..., : some.shape[-1] // 2 * 2].float()


class Choice(NamedTuple):
    """Which keys the KV heads of a layer read for one query a head.

    Attributes:
        slots: int32 [B, H_kv, M], those of the keys that are read, one behind the other; anything
            behind them.
        counts: int32 [B, H_kv], how many they are.
        unread: float32 [B, H], the logarithm to base two of what all other keys together are to
            count, in units of the exponential of a logit: `UNREAD_SHARE` of what they weigh by the
            sample; None where that is not known.
    """

    slots: Tensor
    counts: Tensor
    unread: Tensor | None

    @classmethod
    def of(cls, kept: Tensor, unread: Tensor | None = None) -> Choice:
        """To read the keys that ``kept``, bool [B, H_kv, N], has."""
        slots = (~kept).byte().argsort(dim=-1, stable=True).to(torch.int32)
        return cls(slots, kept.sum(-1, dtype=torch.int32), unread)

    def kept(self, keys: int | None = None) -> Tensor:
        """bool [B, H_kv, N]: which of so many keys are read, by default of as many as listed."""
        there = torch.arange(self.slots.shape[2], device=self.slots.device) < self.counts[..., None]
        # what is behind the last one may be any number
        slots = self.slots.masked_fill(~there, 0).long()
        count = slots.new_zeros(*slots.shape[:2], slots.shape[2] if keys is None else keys)
        return count.scatter_add_(2, slots, there.long()) > 0

    def expanded(self, batch: int, kv_heads: int) -> Choice:
        """What is listed once, [B or 1, 1, M], for every KV head of a batch; nothing is copied."""
        slots = self.slots.expand(batch, kv_heads, -1)
        return Choice(slots, self.counts.expand(batch, kv_heads), self.unread)

    def elsewhere(self, device: torch.device, heads: tuple[int, ...] | None = None) -> Choice:
        """For another layer, on its device; for its KV heads those of these ``heads``."""
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
    """The keys that each KV head reads for q [B, H, 1, D].

    About ``wanted`` of them, exactly where the sample is the whole cache: as many whole steps as
    fit, and one more where those are less than half of what is wanted, since keys of equal shares
    are all read or none. Everything, where there is no more than that. Keys that are not finite are
    read in addition to ``wanted``, and queries that are not finite choose nothing.

    Args:
        index: `index_keys` of the cache; what is behind ``length`` is not read.
        scale: of logits.
        length: int [1], keys written so far, that of the query among them.
        wanted: int32 [B], or [1] for all rows, how many keys are read.
        channels: those of the index.
        valid: bool [B, >= length], False for padding; None without.
        sinks: [H], logits of which no key has its share; None without.
    """
    logits, *ranks = ranked(q, index, scale, length, channels, valid, sinks)
    steps, sampled, _ = ranks
    kept = steps <= limit_of(*ranks, length, wanted)
    gone = (sampled & ~kept & (steps < HIDDEN)).unsqueeze(2)
    unread = (logits / (STEPS_AN_OCTAVE * LOG2_E)).masked_fill(~gone, float("-inf"))
    unread = unread.logsumexp(-1) * LOG2_E + math.log2(spread_of(steps.shape[2]) * UNREAD_SHARE)
    return Choice.of(kept, unread.flatten(1, 2))


def ranked(
    q: Tensor,
    index: Index,
    scale: float,
    length: Tensor,
    channels: tuple[int, ...],
    valid: Tensor | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits, steps, sampled, always) of the keys of a cache; arguments are those of `choose`.

    Logits, float32 [B, H_kv, H / H_kv, N], are to base two and in `STEPS_AN_OCTAVE`. Steps, int64
    [B, H_kv, N], say how far below all of its attention the largest share lies that a head of the
    group gives a key; or `ALWAYS`, `LEAST`, `HIDDEN`. The others are bool [B, H_kv, N]: the keys
    that are sampled, and those that are always read. Keys that are not finite are in neither.
    """
    kv_heads, slots = index.scales.shape[1:]
    group = q.shape[1] // kv_heads
    seen, always = (x.unsqueeze(1) for x in _visible(slots, length, valid, q.device))
    # read, and counted nowhere
    marked = index.scales.isinf() & seen
    always = always & ~marked
    spread, slot = spread_of(slots), torch.arange(slots, device=q.device)
    sampled = seen & ~always & ~marked & (slot // NEIGHBOURS % spread == 0)
    some = picked(q, channels).unflatten(1, (kv_heads, group)).squeeze(3)
    some = some.masked_fill(~some.isfinite().all(-1, keepdim=True), torch.nan)
    unit = (some.abs().amax(-1, keepdim=True) * (1 / LARGEST_QUERY)).clamp(min=LEAST_SCALE)
    some = (some * unit.reciprocal() + 0.5).floor()
    codes = torch.cat((index.codes & 15, index.codes >> 4), dim=-1).float() - 8
    scales = index.scales.float().masked_fill(marked, 0.0)
    logits = some @ codes.transpose(-1, -2) * scales.unsqueeze(2)
    logits = logits * (unit * (scale * LOG2_E))
    # a sampled key represents as many as are not
    counted = logits + math.log2(spread) * sampled.unsqueeze(2)
    counted = counted.masked_fill(~(sampled | always).unsqueeze(2), float("-inf"))
    whole = torch.logsumexp(counted / LOG2_E, dim=-1, keepdim=True)
    if sinks is not None:
        whole = torch.logaddexp(whole, sinks.float().view(1, kv_heads, group, 1))
    whole = whole * LOG2_E
    # rounded before they are compared
    logits, whole = in_steps(logits), in_steps(whole)
    # a query that is not finite leaves the choice to the others of its group, and is NaN itself
    steps = (whole - logits).nan_to_num(nan=LEAST).amin(2).clamp(ALWAYS + 1, LEAST).long()
    steps = steps.masked_fill(always | marked, ALWAYS).masked_fill(~seen, HIDDEN)
    return logits, steps, sampled, always


def limit_of(
    steps: Tensor,
    sampled: Tensor,
    always: Tensor,
    length: Tensor,
    wanted: Tensor,
) -> Tensor:
    """The last step that is read, int64 [B, H_kv, 1].

    ``steps``, ``sampled`` and ``always`` are what `ranked` gives, the others are those of `choose`.
    """
    spread = spread_of(steps.shape[2])
    counts = steps.new_zeros(*steps.shape[:2], HIDDEN + 1)
    counts.scatter_add_(2, steps, sampled.long().expand_as(steps))
    # always read are those of step 0, whether they are sampled or not
    wanted = wanted.view(-1, 1, 1)
    total = counts[..., :HIDDEN].cumsum(-1) * spread + always.sum(-1, keepdim=True)
    fits = total[..., :LEAST] <= wanted
    fits[..., ALWAYS] = True
    fitting = fits.sum(-1)
    taken = (total[..., :LEAST] * fits).amax(-1)
    more = (2 * taken < wanted.squeeze(-1)) & (fitting < LEAST)
    everything = (total[..., -1:] <= wanted).squeeze(-1) | (length <= wanted.squeeze(-1))
    return (fitting - 1 + more.long()).masked_fill(everything, LEAST).unsqueeze(-1)


def spread_of(slots: int) -> int:
    """Of so many groups of `NEIGHBOURS` keys one is sampled, a power of two."""
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
    """[B, H, 1, D_v] of q [B, H, 1, D] over the chosen keys of k and v [B, H_kv, N, D].

    The keys that are not read count as one of their weight and of the mean value, as in SparQ
    Attention (Ribar et al., 2024), so that the others do not weigh more than they should. The mean
    is that of `SPREAD_VALUES` keys from the first to the last; ``length`` and ``valid``, by which
    they are placed, are those of `choose`; a choice without ``unread`` needs neither. ``sinks`` [H]
    are logits that no value belongs to, and ``softcap`` is that of `reference.capped`.
    """
    kv_heads, slots = k.shape[1:3]
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(exact).unflatten(1, (kv_heads, -1)).squeeze(3)
    logits = capped(grouped @ k.to(exact).transpose(-1, -2) * scale, softcap)
    kept = choice.kept(slots).unsqueeze(2)
    logits, values = logits.masked_fill(~kept, float("-inf")), v.to(exact)
    values = values.masked_fill(~kept.any(2).unsqueeze(-1), 0)
    if choice.unread is not None:
        mean, share = _mean_value(v, length, valid)
        unread = choice.unread.to(exact).unflatten(1, (kv_heads, -1)).unsqueeze(-1) / LOG2_E
        logits = torch.cat((logits, unread + share.to(exact).log()), dim=-1)
        values = torch.cat((values, mean.to(exact)), dim=2)
    if sinks is not None:
        # in the place of one more key, whose value is 0
        sinks = sinks.to(exact).view(1, kv_heads, -1, 1).expand(len(q), -1, -1, -1)
        logits, values = torch.cat((logits, sinks), dim=-1), F.pad(values, (0, 0, 0, 1))
    return (logits.softmax(-1) @ values).to(q.dtype).flatten(1, 2).unsqueeze(2)


def _mean_value(v: Tensor, length: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """(mean [B, H_kv, 1, D_v] of `SPREAD_VALUES` of v [B, H_kv, N, D_v], share of them that is no
    padding [B, 1, 1, 1]), float32."""
    batch, kv_heads, _, dim = v.shape
    first = length.new_zeros(batch, 1) if valid is None else valid.int().argmax(-1, keepdim=True)
    slots = torch.arange(SPREAD_VALUES, device=v.device)
    slots = first + slots * (length - first) // SPREAD_VALUES
    some = v.gather(2, slots[:, None, :, None].expand(-1, kv_heads, -1, dim)).float()
    real = torch.ones_like(slots) if valid is None else valid.gather(1, slots)
    real = real[:, None, :, None].float()
    return (some * real).sum(2, keepdim=True) / real.sum(2, keepdim=True), real.mean(2, True)


def in_steps(x: Tensor) -> Tensor:
    """Logarithms to base two in whole steps, float, as far as 16 bits hold them."""
    limits = torch.iinfo(torch.int16)
    return (x * STEPS_AN_OCTAVE).round().clamp(limits.min, limits.max)


def _visible(
    slots: int, length: Tensor, valid: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(keys that may be seen, those of them that are always read), bool [B or 1, N]."""
    slot = torch.arange(slots, device=device)
    seen = (slot < length).unsqueeze(0)
    if valid is not None:
        padded = torch.zeros(valid.shape[0], slots, dtype=torch.bool, device=device)
        width = min(slots, valid.shape[1])
        padded[:, :width] = valid[:, :width]
        seen = seen & padded
    first = seen.int().argmax(-1, keepdim=True)
    always = seen & ((slot < first + SINKS) | (slot >= length - LOCAL))
    return seen, always
