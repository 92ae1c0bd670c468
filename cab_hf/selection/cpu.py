"""Fast block selection on a CPU: the ranks of the default predictor in one pass over the logits.

The definition is `cab_hf.predictors.rows.ranks`. The samples of a few query blocks of all heads are
multiplied with a slab of keys in one batched product. The block maxima of the slab are computed
while its logits are in the cache. Only blocks on the border of the visible keys are masked. Query
blocks that attend to all visible blocks anyway are not scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig, num_typical_queries
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges

# logits of one product, 1 MiB in float32: they stay in the cache of a core until the maxima are
# computed
LOGITS_AT_A_TIME = 2**18
# sampled queries of all heads that are scored together: enough for fast products, and few enough
# that little of the slab is masked
SAMPLES_AT_A_TIME = 1024
# query blocks whose Gram matrices are in memory together: 4 MiB for blocks of 128 queries
GRAMS_AT_A_TIME = 64


@dataclass(frozen=True, eq=False)
class Samples:
    """One kind of sampled queries and the keys that they are scored on.

    Attributes:
        positions: int64 [B, H, M_q, S], positions of the queries; -1 for none.
        queries: [B, H, N_q, C], all queries.
        keys: float32 [B, H_kv, N, C], the sampled keys.
        key_stride: Distance between sampled keys, in tokens.
        weight: Number of queries of the block that a sample represents.
    """

    positions: Tensor
    queries: Tensor
    keys: Tensor
    key_stride: int
    weight: float


def scores(
    q: Tensor, k: Tensor, call: Any, config: CabConfig, *, visible: Tensor, forced: Tensor
) -> Tensor:
    """Return the ranks of blocks that are neither forced nor marked, float32 [B, H, M_q, M_k].

    The ranks of other blocks are any numbers. See `cab_hf.predictors.rows.ranks`.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D], finite.
        call: A `cab_hf.predictors.LayerContext` with a scale above 0.
        visible, forced: bool [B, M_q, M_k], blocks that rows see, and blocks that rows always
            attend to.
    """
    ranges = call.ranges
    heads = q.shape[1]
    kinds = _samples(q, k, ranges, config, call.channels)
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
                largest, shares, num_samples = _shares(kind, call, slab, config.key_block)
                mass = mass + kind.weight * shares
                total = total + kind.weight * num_samples.unsqueeze(-1)
                most = largest if most is None else torch.maximum(most, largest)
            mass = mass / total.clamp(min=reference.LEAST) * longer[batch, rows, None]
            some = torch.where(most >= config.share_threshold, 1 + most, mass.clamp(max=1))
            # a query that is not finite keeps all blocks
            some = some.masked_fill(some.isnan(), 1.0)
            rank[batch][:, rows, slab.first_block : slab.end_block] = some
    return rank


@dataclass(frozen=True, eq=False)
class _Slab:
    """Some query blocks of a batch row, and the key blocks that they see.

    Attributes:
        batch: Index of the batch row.
        rows: int64 [R], the query blocks.
        first_block, end_block: Key blocks that some query of the rows sees.
        first_full, end_full: Key blocks that all queries of the rows see completely.
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
    keys = k[:, :, reference.key_offset(stride) :: stride].float()
    weight = (size - count) / num_typical
    kinds = [Samples(typical, q, keys, key_stride=stride, weight=weight)]
    if count:
        some = list(channels) if channels else slice(None)
        kinds.append(
            Samples(
                positions=outlier_queries(q, ranges, size, count),
                queries=q[..., some],
                keys=k[..., some].float(),
                key_stride=1,
                weight=1.0,
            )
        )
    return kinds


def _shares(kind: Samples, call: Any, slab: _Slab, key_block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reference.shares_of_blocks` for the rows and the key blocks of ``slab``.

    Returns:
        maximum and total, float32 [H, R, blocks], and num_samples, float32 [H, R].
    """
    keys = kind.keys[slab.batch]
    kv_heads, num_keys = keys.shape[:2]
    at = kind.positions[slab.batch][:, slab.rows]
    heads, _, num_samples = at.shape
    # [H, R * S]
    position = at.flatten(1)
    missing = position < 0
    position = position.clamp(min=0)
    queries = kind.queries[slab.batch]
    samples = queries.gather(1, position.unsqueeze(-1).expand(-1, -1, queries.shape[2])).float()
    samples = samples.unflatten(0, (kv_heads, -1)).flatten(1, 2)
    first = call.ranges.start[slab.batch][position]
    last = call.ranges.end[slab.batch][position].masked_fill(missing, -1)
    offset = reference.key_offset(kind.key_stride)

    blocks = slab.end_block - slab.first_block
    keys_per_block = key_block // kind.key_stride
    width = max(1, LOGITS_AT_A_TIME // (keys_per_block * samples.shape[0] * samples.shape[1]))
    width = min(width, blocks)
    room = samples.new_empty(kv_heads * samples.shape[1] * width * keys_per_block)
    largest = samples.new_empty(*samples.shape[:2], blocks)
    for begin, end, is_masked in slab.parts(width):
        low, high = begin * keys_per_block, min(end * keys_per_block, num_keys)
        shape = (*samples.shape[:2], high - low)
        logits = room[: shape[0] * shape[1] * shape[2]].view(shape)
        torch.bmm(samples, keys[:, low:high].transpose(1, 2), out=logits)
        if is_masked:
            key = torch.arange(low, high, device=keys.device) * kind.key_stride + offset
            unseen = (key < first.unsqueeze(-1)) | (key > last.unsqueeze(-1))
            logits.masked_fill_(unseen.unflatten(0, (kv_heads, -1)).flatten(1, 2), -torch.inf)
            logits = F.pad(logits, (0, end * keys_per_block - high), value=-torch.inf)
        place = slice(begin - slab.first_block, end - slab.first_block)
        torch.amax(logits.unflatten(2, (end - begin, -1)), -1, out=largest[..., place])
    # scaling and soft caps do not change the order
    largest = largest.unflatten(1, (heads // kv_heads, -1)).flatten(0, 1)
    largest = reference.capped(largest.mul_(call.scale), call.softcap)
    if bool(missing.any()):
        largest = largest.masked_fill(missing.unsqueeze(-1), -torch.inf)
    share = _softmax(largest, call.sinks, key_block).unflatten(1, (-1, num_samples))
    nearest = (first - offset).clamp(min=0).add(kind.key_stride - 1) // kind.key_stride
    sees = nearest * kind.key_stride + offset <= last
    return share.amax(2), share.sum(2), sees.unflatten(1, (-1, num_samples)).sum(-1).float()


def _softmax(largest: Tensor, sinks: Tensor | None, key_block: int) -> Tensor:
    """Return the shares of key blocks [H, samples, blocks]; see `reference.shares_of_blocks`."""
    weighed = largest
    if sinks is not None:
        sink = sinks.float() - torch.tensor(key_block, dtype=torch.float32).log()
        weighed = torch.cat([largest, sink[:, None, None].expand(-1, largest.shape[1], 1)], -1)
    share = weighed.softmax(-1)[..., : largest.shape[-1]]
    # softmax over nothing is NaN
    return share.masked_fill(largest == -torch.inf, 0.0)


def outlier_queries(q: Tensor, ranges: KeyRanges, query_block: int, count: int) -> Tensor:
    """Compute `reference.outlier_queries` from the Gram matrix of each query block."""
    if count == query_block:
        return reference.outlier_queries(q, ranges, query_block, count)
    blocks, real = reference._blocked(q, ranges.end >= 0, query_block)
    blocks = blocks.masked_fill_(~real.unsqueeze(-1), 0.0).flatten(0, 2)
    start = torch.arange(0, q.shape[2], query_block, device=q.device)
    shape = (*q.shape[:2], len(start))
    real = real.expand(*shape, -1)
    parts = zip(
        blocks.split(GRAMS_AT_A_TIME), real.flatten(0, 2).split(GRAMS_AT_A_TIME), strict=True
    )
    inside = torch.cat([_farthest_points(*part, count) for part in parts]).unflatten(0, shape)
    return (inside + start[:, None]).masked_fill(~real.gather(-1, inside), -1)


def _farthest_points(blocks: Tensor, real: Tensor, count: int) -> Tensor:
    """Compute `reference._farthest_points` for blocks [M, query_block, D]: int64 [M, count]."""
    size = blocks.shape[1]
    gram = blocks @ blocks.transpose(1, 2)
    mean = blocks.sum(1)
    inverse, mean_inverse = (
        x.square().sum(-1).clamp(min=reference.LEAST_SQUARE).rsqrt()
        for x in (blocks, mean.unsqueeze(1))
    )
    products = (blocks @ mean.unsqueeze(-1))[..., 0]
    nearest = reference._cosine_steps(products, inverse, mean_inverse)
    nearest = nearest.masked_fill(~real, reference.PADDING_STEPS)
    position = torch.arange(size, device=blocks.device)
    samples = []
    for number in range(count):
        chosen = (nearest * size + position).argmin(-1, keepdim=True)
        samples.append(chosen)
        products = gram.gather(1, chosen.unsqueeze(-1).expand(-1, -1, size))[:, 0]
        similarity = reference._cosine_steps(products, inverse, inverse.gather(-1, chosen))
        similarity = similarity.masked_fill(~real, reference.PADDING_STEPS)
        nearest = similarity if number == 0 else torch.maximum(nearest, similarity)
        nearest = nearest.scatter(-1, torch.cat(samples, -1), reference.SAMPLED_STEPS)
    return torch.cat(samples, -1)
