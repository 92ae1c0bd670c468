"""Fast block selection on a CPU: the ranks of the default predictor in one pass over the logits.

The definition is `reference.ranks`. The samples of a few query blocks of all heads are
multiplied with a slab of keys in one batched product. The block maxima of the slab are computed
while its logits are in the cache. Only blocks on the border of the visible keys are masked. Query
blocks that attend to all visible blocks anyway are not scored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig, num_typical_queries
from cab_hf.ops import reference as definitions
from cab_hf.plan import KeyRanges
from cab_hf.selection import reference

# logits of one product, 2 MiB in float32: they stay in the cache of a core until the maxima are
# computed
LOGITS_AT_A_TIME = 2**19
# key blocks of a part of a slab, a multiple of this number: a maximum over keys is fast for this
# many columns
BLOCKS_OF_A_VECTOR = 32
# sampled queries of all heads that are scored together: enough for fast products, and few enough
# that little of the slab is masked
SAMPLES_AT_A_TIME = 1024
# query blocks whose Gram matrices are in memory together: 8 MiB for blocks of 128 queries
GRAMS_AT_A_TIME = 128


@dataclass(frozen=True, eq=False)
class Samples:
    """One kind of sampled queries and the keys that they are scored on.

    Attributes:
        positions: int64 [B, H, M_q, S], positions of the queries; -1 for none.
        channels: The channels that are scored; None for all.
        keys: float32 [B, H_kv, N, C], the sampled keys, padded to whole blocks.
        key_stride: Distance between sampled keys, in tokens.
        weight: Number of queries of the block that a sample represents.
    """

    positions: Tensor
    channels: Tensor | None
    keys: Tensor
    key_stride: int
    weight: float


@dataclass(frozen=True, eq=False)
class Logits:
    """The rules from products of queries and keys to logits.

    Attributes:
        ranges: Keys that each query may attend to.
        scale: Factor of the products, above 0.
        sinks: [H], one logit per head that takes part in the softmax; None without.
        softcap: Soft cap of the logits; None for no cap.
    """

    ranges: KeyRanges
    scale: float
    sinks: Tensor | None
    softcap: float | None


def scores(
    q: Tensor,
    k: Tensor,
    ranges: KeyRanges,
    config: CabConfig,
    *,
    scale: float,
    channels: tuple[int, ...],
    sinks: Tensor | None,
    softcap: float | None,
    visible: Tensor,
    forced: Tensor,
) -> Tensor:
    """Compute `reference.scores`, with the same arguments, for a ``scale`` above 0."""
    rules = Logits(ranges, scale, sinks, softcap)
    heads = q.shape[1]
    kinds = _samples(q, k, ranges, config, channels)
    most_samples = max(kind.positions.shape[3] for kind in kinds)
    together = max(1, SAMPLES_AT_A_TIME // (heads * most_samples))
    seen = config.key_block * visible.sum(-1)
    longer = (seen / reference.THRESHOLD_KEYS).clamp(min=1)
    # a row that attends to all visible blocks needs no scores
    scored = (visible & ~forced).any(-1)
    rank = torch.zeros(q.shape[0], heads, *visible.shape[1:], device=q.device)
    for batch in range(q.shape[0]):
        rows_to_score = scored[batch].nonzero()[:, 0]
        for rows in rows_to_score.split(together) if len(rows_to_score) else ():
            slab = _Slab.of(ranges, batch, rows, config)
            mass, total, most = 0.0, 0.0, None
            for kind in kinds:
                largest, shares, num_samples = _shares(q, kind, rules, slab, config.key_block)
                mass = mass + kind.weight * shares
                total = total + kind.weight * num_samples.unsqueeze(-1)
                most = largest if most is None else torch.maximum(most, largest)
            mass = mass / total.clamp(min=definitions.LEAST) * longer[batch, rows, None]
            some = torch.where(most >= config.share_threshold, 1 + most, mass.clamp(max=1))
            # a query that is not finite keeps all blocks
            some = some.masked_fill(some.isnan(), 1.0)
            rank[batch][:, rows, slab.first_block : slab.end_block] = some
    return rank


@dataclass(frozen=True, eq=False)
class _Slab:
    """Some query blocks of a batch row, and their visible key blocks.

    Attributes:
        batch: Index of the batch row.
        rows: int64 [R], the query blocks.
        first_block, end_block: Key blocks that are visible to any query of the rows.
        first_full, end_full: Key blocks that are completely visible to all queries.
    """

    batch: int
    rows: Tensor
    first_block: int
    end_block: int
    first_full: int
    end_full: int

    @classmethod
    def of(cls, ranges: KeyRanges, batch: int, rows: Tensor, config: CabConfig) -> _Slab:
        bounds, size = ranges.rows(config.query_block), config.key_block
        first_block = int(bounds.min_first[batch, rows].min()) // size
        end_block = int(bounds.max_last[batch, rows].max()) // size + 1
        first_full = -(-int(bounds.max_first[batch, rows].max()) // size)
        end_full = (int(bounds.min_last[batch, rows].min()) + 1) // size
        if first_full >= end_full:
            first_full = end_full = end_block
        return cls(batch, rows, first_block, end_block, first_full, end_full)

    def parts(self, blocks: int) -> list[tuple[int, int, bool]]:
        """Return (first block, end, is_masked) of parts of at most ``blocks`` key blocks."""
        result = []
        for first, end, is_masked in (
            (self.first_block, self.first_full, True),
            (self.first_full, self.end_full, False),
            (self.end_full, self.end_block, True),
        ):
            result += [(x, min(x + blocks, end), is_masked) for x in range(first, end, blocks)]
        return result


def _samples(
    q: Tensor, k: Tensor, ranges: KeyRanges, config: CabConfig, channels: tuple[int, ...]
) -> list[Samples]:
    """Return the typical queries, and the outliers if there are any."""
    size, count = config.query_block, config.outlier_queries
    num_typical, stride = num_typical_queries(config), config.typical_key_stride
    typical = reference.typical_queries(ranges, size, num_typical)
    typical = typical.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    whole = F.pad(k, (0, 0, 0, -k.shape[2] % config.key_block))
    keys = whole[:, :, reference.key_offset(stride) :: stride].float()
    weight = (size - count) / num_typical
    kinds = [Samples(typical, None, keys, key_stride=stride, weight=weight)]
    if count:
        some = torch.tensor(channels, device=q.device) if channels else None
        kinds.append(
            Samples(
                positions=outlier_queries(q, ranges, size, count),
                channels=some,
                keys=(whole if some is None else whole.index_select(-1, some)).float(),
                key_stride=1,
                weight=1.0,
            )
        )
    return kinds


def _shares(
    q: Tensor, kind: Samples, rules: Logits, slab: _Slab, key_block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reference.shares_of_samples` for the rows and the key blocks of ``slab``.

    Returns:
        maximum and total, float32 [H, R, blocks], and num_samples, float32 [H, R].
    """
    keys = kind.keys[slab.batch]
    at = kind.positions[slab.batch][:, slab.rows]
    heads, _, num_samples = at.shape
    # [H, R * S]
    position = at.flatten(1)
    missing = position < 0
    position = position.clamp(min=0)
    head = torch.arange(heads, device=q.device).unsqueeze(-1)
    samples = q[slab.batch][head, position]
    if kind.channels is not None:
        samples = samples.index_select(-1, kind.channels)
    first = rules.ranges.start[slab.batch][position]
    last = rules.ranges.end[slab.batch][position].masked_fill(missing, -1)
    # the queries of a group become more queries of their KV head
    samples, low, high = (
        x.unflatten(0, (keys.shape[0], -1)).flatten(1, 2) for x in (samples.float(), first, last)
    )
    largest = _block_maxima(samples, low, high, keys, kind.key_stride, slab, key_block)
    # scaling and soft caps do not change the order
    largest = definitions.capped(largest.mul_(rules.scale), rules.softcap)
    if bool(missing.any()):
        largest = largest.masked_fill((high < 0).unsqueeze(-1), -torch.inf)
    largest = largest.unflatten(1, (heads // keys.shape[0], -1)).flatten(0, 1)
    share = _softmax(largest, rules.sinks, key_block).unflatten(1, (-1, num_samples))
    offset = reference.key_offset(kind.key_stride)
    nearest = (first - offset).clamp(min=0).add(kind.key_stride - 1) // kind.key_stride
    sees = nearest * kind.key_stride + offset <= last
    return share.amax(2), share.sum(2), sees.unflatten(1, (-1, num_samples)).sum(-1).float()


def _block_maxima(
    samples: Tensor,
    first: Tensor,
    last: Tensor,
    keys: Tensor,
    key_stride: int,
    slab: _Slab,
    key_block: int,
) -> Tensor:
    """Return the largest product of each sample and key block, [H_kv, samples, blocks].

    Args:
        samples: float32 [H_kv, samples, C].
        first, last: int32 [H_kv, samples], the first and last visible token of each sample.
        keys: float32 [H_kv, N, C], padded to whole blocks.
    """
    kv_heads, count, dim = samples.shape
    keys_per_block, blocks = key_block // key_stride, slab.end_block - slab.first_block
    width = max(1, LOGITS_AT_A_TIME // (keys_per_block * kv_heads * count))
    width = min(width // BLOCKS_OF_A_VECTOR * BLOCKS_OF_A_VECTOR or width, blocks)
    latest_start = int(first.max())
    room = samples.new_empty(kv_heads * count * width * keys_per_block)
    largest = samples.new_empty(kv_heads, count, blocks)
    for begin, end, is_masked in slab.parts(width):
        shape = keys_per_block, end - begin
        # [H_kv, keys_per_block * blocks, C]: the keys of a block are ``blocks`` apart, so that a
        # maximum over keys is a maximum of vectors
        part = keys[:, begin * shape[0] : end * shape[0]].unflatten(1, shape[::-1])
        part = part.transpose(1, 2).reshape(kv_heads, -1, dim)
        logits = room[: kv_heads * count * part.shape[1]].view(kv_heads, count, -1)
        torch.bmm(samples, part.transpose(1, 2), out=logits)
        if is_masked:
            number = torch.arange(begin * shape[0], end * shape[0], device=keys.device)
            key = number.view(shape[::-1]).T.flatten() * key_stride
            key = (key + reference.key_offset(key_stride)).int()
            unseen = key > last.unsqueeze(-1)
            if begin * key_block < latest_start:
                unseen |= key < first.unsqueeze(-1)
            logits.masked_fill_(unseen, -torch.inf)
        logits = logits.unflatten(2, shape)
        while logits.shape[2] > 1 and logits.shape[2] % 2 == 0 and shape[1] < BLOCKS_OF_A_VECTOR:
            # amax over few columns is slow
            half = logits.shape[2] // 2
            logits = torch.maximum(logits[:, :, :half], logits[:, :, half:])
        place = slice(begin - slab.first_block, end - slab.first_block)
        torch.amax(logits, 2, out=largest[..., place])
    return largest


def _softmax(largest: Tensor, sinks: Tensor | None, key_block: int) -> Tensor:
    """Return the shares of key blocks [H, samples, blocks]; see `reference.shares_of_samples`."""
    weighed = largest
    if sinks is not None:
        sink = sinks.float() - torch.tensor(key_block, dtype=torch.float32).log()
        weighed = torch.cat([largest, sink[:, None, None].expand(-1, largest.shape[1], 1)], -1)
    share = weighed.softmax(-1)[..., : largest.shape[-1]]
    # softmax over no keys is NaN
    return share.masked_fill(largest == -torch.inf, 0.0)


def outlier_queries(q: Tensor, ranges: KeyRanges, query_block: int, count: int) -> Tensor:
    """Compute `reference.outlier_queries` from the Gram matrix of each query block."""
    if count == query_block:
        return reference.outlier_queries(q, ranges, query_block, count)
    blocks = -(-q.shape[2] // query_block)
    padding = blocks * query_block - q.shape[2]
    real = F.pad(ranges.end >= 0, (0, padding)).unflatten(1, (-1, query_block))
    inside = torch.empty(*q.shape[:2], blocks, count, dtype=torch.int64, device=q.device)
    step = max(1, GRAMS_AT_A_TIME // (q.shape[0] * q.shape[1]))
    for start in range(0, blocks, step):
        some = slice(start, start + step)
        part = q[:, :, start * query_block : (start + step) * query_block].float()
        part = F.pad(part, (0, 0, 0, -part.shape[2] % query_block)).unflatten(2, (-1, query_block))
        is_real = real[:, some].unsqueeze(1).expand(part.shape[:-1])
        if not bool(is_real.all()):
            part = part.masked_fill(~is_real.unsqueeze(-1), 0.0)
        samples = _farthest_points(part.flatten(0, 2), is_real.flatten(0, 2), count)
        inside[:, :, some] = samples.view(inside[:, :, some].shape)
    start = torch.arange(0, q.shape[2], query_block, device=q.device)
    missing = ~real.unsqueeze(1).expand(-1, q.shape[1], -1, -1).gather(-1, inside)
    return (inside + start[:, None]).masked_fill_(missing, -1)


def _farthest_points(blocks: Tensor, real: Tensor, count: int) -> Tensor:
    """Compute `reference._farthest_points` for blocks [M, query_block, D]: int64 [M, count].

    ``nearest`` contains steps * query_block + position, exact in float32. Its minimum is the first
    query with the lowest similarity.
    """
    size = blocks.shape[1]
    gram = torch.bmm(blocks, blocks.transpose(1, 2))
    mean = blocks.sum(1)
    inverse, mean_inverse = (
        x.square().sum(-1).clamp(min=reference.LEAST_SQUARE).rsqrt()
        for x in (blocks, mean.unsqueeze(1))
    )
    position = torch.arange(size, device=blocks.device, dtype=torch.float32)
    missing = None if bool(real.all()) else ~real

    def similarity(products: Tensor, other_inverse: Tensor) -> Tensor:
        cosine = (products * inverse).mul_(other_inverse).nan_to_num_(nan=-1.0).clamp_(-1, 1)
        steps = cosine.mul_(reference.COSINE_STEPS).trunc_()
        if missing is not None:
            steps.masked_fill_(missing, reference.PADDING_STEPS)
        return steps.mul_(size).add_(position)

    nearest = similarity(torch.bmm(blocks, mean.unsqueeze(-1))[..., 0], mean_inverse)
    samples = torch.empty(len(blocks), count, dtype=torch.int64, device=blocks.device)
    for number in range(count):
        chosen = nearest.amin(-1, keepdim=True).remainder_(size)
        sampled = chosen + reference.SAMPLED_STEPS * size
        chosen = chosen.long()
        samples[:, number] = chosen[:, 0]
        products = gram.gather(1, chosen.unsqueeze(-1).expand(-1, -1, size))[:, 0]
        steps = similarity(products, inverse.gather(-1, chosen))
        nearest = steps if number == 0 else torch.maximum(nearest, steps, out=nearest)
        # larger than every similarity
        nearest.scatter_(-1, chosen, sampled)
    return samples
