"""Every op in plain PyTorch: the definition that kernels are held to.

Shapes: q [B, H, N_q, D], k and v [B, H_kv, N_k, D], g = H / H_kv. Blocks: M_q query blocks, M_k key
blocks. Everything between the scores and the selection is float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.budgets import Budgets
from cab_hf.config import TOP_P_BY_KEYS, CabConfig
from cab_hf.plan import BlockPlan, RowSpans, Spans, once_per_spans

# the most rows of attention computed at a time: bounds the token mask, not the result
QUERY_CHUNK = 256
# a mass target met within this is met: sums of thousands of float32 shares are no better
TOP_P_TOLERANCE = 1e-5
# far below any share that counts, and finite as a logarithm
LEAST = 1e-30
# cosines are compared in so many steps of one: what is closer counts as equal
COSINE_STEPS = 65536.0
# squares of norms are at least this: a vector of zeros is like nothing
LEAST_SQUARE = 1e-30
# rows of exact attention held at once
QUERIES_AT_A_TIME = 128


@dataclass(frozen=True, eq=False)
class KeySummary:
    """What is known of each key block: all that choosing blocks needs of k.

    Attributes:
        planes: [3, B, H_kv, M_k, D]: the mean of a block's keys, and per channel the largest and
            the smallest of them. [1, B, H_kv, M_k, D] where one vector stands for the block.
        keys: [B, H_kv, N_k, C], the scored channels of every key where outlier queries are scored
            exactly, as that is computed; else None.
        exponents: int8 [B, H_kv, N_k, 1]: ``keys`` are in units of 2 to these, where they are of 8
            bits; else None.
    """

    planes: Tensor
    keys: Tensor | None = None
    exponents: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        return self.planes[0]

    @property
    def upper(self) -> Tensor:
        return self.planes[1 if self.minmax else 0]

    @property
    def lower(self) -> Tensor:
        return self.planes[2 if self.minmax else 0]

    @property
    def minmax(self) -> bool:
        """Whether keys have bounds."""
        return self.planes.shape[0] == 3

    def heads(self, start: int, stop: int) -> KeySummary:
        """The same of KV heads ``start`` to ``stop``, float32."""
        return KeySummary(self.planes[:, :, start:stop].float())


class Masks(NamedTuple):
    """What some queries attend: the slices of queries and of keys, and which of these they see.

    Attributes:
        seen: bool [B or 1, H or 1, rows, keys].
        raised: what is added to the logits, of the same shape; None for nothing.
        sound: False where keys or values that these queries do not see may not be finite.
    """

    rows: slice
    keys: slice
    seen: Tensor
    raised: Tensor | None = None
    sound: bool = True


def coarsen_queries(q: Tensor, valid: Tensor, query_block: int, how: str) -> Tensor:
    """One float32 vector per query block, [B, H, M_q, D]: the mean, or the query of largest norm.

    ``valid``, bool [B, N_q], is False for padding queries. ``how`` is a ``CabConfig.coarsen``.
    """
    blocks, real = _blocked(q, valid, query_block)
    return _largest(blocks, real) if how == "max_l2" else _mean(blocks, real)


def coarsen_keys(k: Tensor, valid: Tensor, key_block: int, how: str) -> KeySummary:
    """Mean and box of every key block (``how="minmax"``), its mean, or its key of largest norm."""
    blocks, real = _blocked(k, valid, key_block)
    if how == "max_l2":
        return KeySummary(_largest(blocks, real).unsqueeze(0))
    mean = _mean(blocks, real)
    if how == "mean":
        return KeySummary(mean.unsqueeze(0))
    inhabited = real.any(-1, keepdim=True)
    real = real.unsqueeze(-1)
    upper = blocks.masked_fill(~real, -torch.inf).amax(-2).masked_fill(~inhabited, 0.0)
    lower = blocks.masked_fill(~real, torch.inf).amin(-2).masked_fill(~inhabited, 0.0)
    return KeySummary(torch.stack((mean, upper, lower)))


def _blocked(x: Tensor, valid: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """[B, H, N, D] -> float32 [B, H, M, block, D], and what of it is real, [B, 1, M, block]."""
    padding = -x.shape[2] % block
    blocks = F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, block)).float()
    return blocks, F.pad(valid, (0, padding)).unflatten(1, (-1, block)).unsqueeze(1)


def _mean(blocks: Tensor, real: Tensor) -> Tensor:
    total = blocks.masked_fill(~real.unsqueeze(-1), 0.0).sum(-2)
    return total / real.sum(-1).clamp(min=1).unsqueeze(-1)


def _largest(blocks: Tensor, real: Tensor) -> Tensor:
    norm = blocks.square().sum(-1).masked_fill(~real, -1.0)
    index = (
        norm.argmax(-1, keepdim=True).unsqueeze(-1).expand(*blocks.shape[:-2], 1, blocks.shape[-1])
    )
    return blocks.gather(-2, index).squeeze(-2)


def block_logits(query: Tensor, keys: KeySummary, scale: float) -> tuple[Tensor, Tensor]:
    """(upper, mean) logits of every query block against every key block, [B, H, M_q, M_k].

    ``upper`` is the largest logit any key inside the block's box could reach:
    sum over channels of max(q u, q l), computed as q+ u + q- l.
    """
    grouped = query.unflatten(1, (keys.mean.shape[1], -1))

    def against(vectors: Tensor, queries: Tensor) -> Tensor:
        return (queries @ vectors.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)

    mean = against(keys.mean, grouped) * scale
    if not keys.minmax:
        return mean, mean
    upper = against(keys.upper, grouped.clamp(min=0)) + against(keys.lower, grouped.clamp(max=0))
    return upper * scale, mean


def block_log_mass(logits: Tensor, visible: Tensor) -> Tensor:
    """log softmax over the visible key blocks, -inf outside them."""
    masked = logits.masked_fill(~visible, -torch.inf)
    return F.log_softmax(masked, dim=-1).masked_fill(~visible, -torch.inf)


def curvature_score(
    affinity: Tensor, direct: Tensor, visible: Tensor, places: Tensor, config: CabConfig
) -> Tensor:
    """What ranks a block beyond the mass target; higher is kept. [B, H, M_q, M_k]

    Args:
        affinity: non-negative edge weights of the block graph, 0 outside ``visible``:
            softmax of the upper logits (clusters) or the rectified scores (top-k).
        direct: the score without curvature, the same shape.
        visible: bool, broadcastable to ``affinity``.
        places: int64 [B, M_q], as in `two_hop`.

    With lambda = ``config.redundancy``: ``additive`` is direct - lambda * two-hop, both
    standardised over the row (clusters), or direct min-max scaled and two-hop over M_k (top-k);
    ``forman`` goes from direct at lambda = 0 to the negative Forman-Ricci curvature at 1.
    """
    weight = config.redundancy
    if config.curvature == "none" or weight == 0:
        return direct
    clusters = config.select == "clusters"
    hops = two_hop(affinity, places, config.query_block, config.key_block)
    if config.curvature == "forman":
        flow = forman_curvature(affinity, hops)
        return (1 - weight) * direct - weight * (standardise(flow, visible) if clusters else flow)
    if clusters:
        return direct - weight * standardise(hops, visible)
    return min_max(affinity, visible) - weight * hops / affinity.shape[-1]


def two_hop(affinity: Tensor, places: Tensor, query_block: int, key_block: int) -> Tensor:
    """Weight of the paths row i -> row t -> key block j, [B, H, M_q, M_k].

    Key blocks are summed to the query grid before the product and the result is spread back.
    ``places``, int64 [B, M_q], says where on the query grid each row stands: `RowSpans.places`. The
    middle of a path is one of the rows at hand: those of earlier chunks are gone.
    """
    kv_blocks = affinity.shape[-1]
    coarse = _to_query_grid(finite_weights(affinity), query_block, key_block)
    inside = places < coarse.shape[-1]
    index = places.clamp(max=coarse.shape[-1] - 1)[:, None, None]
    to_rows = coarse.gather(-1, index.expand(-1, *coarse.shape[1:3], -1)) * inside[:, None, None]
    return _from_query_grid(to_rows @ coarse, query_block, key_block, kv_blocks)


def finite_weights(affinity: Tensor) -> Tensor:
    """Edge weights without those that are not finite: in a product 0 times such a one is NaN.

    It would reach rows that see nothing of what it comes from.
    """
    return affinity.where(affinity.isfinite(), 0.0)


def _to_query_grid(affinity: Tensor, query_block: int, key_block: int) -> Tensor:
    if key_block > query_block:
        ratio = key_block // query_block
        return (affinity / ratio).repeat_interleave(ratio, dim=-1)
    ratio = query_block // key_block
    return F.pad(affinity, (0, -affinity.shape[-1] % ratio)).unflatten(-1, (-1, ratio)).sum(-1)


def _from_query_grid(hops: Tensor, query_block: int, key_block: int, kv_blocks: int) -> Tensor:
    if key_block > query_block:
        return hops.unflatten(-1, (kv_blocks, key_block // query_block)).sum(-1)
    return hops.repeat_interleave(query_block // key_block, dim=-1)[..., :kv_blocks]


def forman_curvature(affinity: Tensor, hops: Tensor) -> Tensor:
    """Forman-Ricci curvature with triangles: 4 A - S_i - S_j + 3 A A, [B, H, M_q, M_k].

    S_i is the strength of the row, S_j of the column. The column is summed down to the row itself,
    so that no row's selection depends on later queries.
    """
    return 4 * affinity - affinity.sum(-1, keepdim=True) - affinity.cumsum(-2) + 3 * hops


def standardise(x: Tensor, visible: Tensor) -> Tensor:
    """Zero mean and unit variance over the visible part of each row; 0 elsewhere."""
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    x = x.masked_fill(~visible, 0.0)
    centred = (x - x.sum(-1, keepdim=True) / count).masked_fill(~visible, 0.0)
    deviation = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    return centred / deviation.clamp(min=torch.finfo(x.dtype).eps)


def min_max(x: Tensor, visible: Tensor) -> Tensor:
    """Scaled to [0, 1] over the visible part of each row."""
    low = x.masked_fill(~visible, torch.inf).amin(-1, keepdim=True)
    high = x.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
    scaled = (x - low) / (high - low).clamp(min=torch.finfo(x.dtype).eps)
    return scaled.masked_fill(~visible, 0.0)


def forced_blocks(visible: Tensor, spans: Spans, config: CabConfig) -> Tensor:
    """bool [B, M_q, M_k]: sinks, local blocks, those of the row's own positions, all of a tail's.

    The tail is the query blocks of ``config.dense_tail_blocks``, see `Spans.tail`.
    """
    rows = spans.rows(config.query_block)
    block = torch.arange(visible.shape[-1], device=visible.device)
    first = (rows.min_first // config.key_block).unsqueeze(-1)
    last = (rows.max_last // config.key_block).unsqueeze(-1)
    diagonal = (rows.min_last // config.key_block).unsqueeze(-1)
    sink = block < first + config.sink_blocks
    local = (block > last - config.local_blocks) | (block >= diagonal)
    tail = spans.tail(config.dense_tail_blocks * config.query_block, config.query_block)
    return visible & (sink | local | tail.unsqueeze(-1))


def share_of_row(visible: Tensor, share: float | Tensor) -> Tensor:
    """The number of blocks that is ``share`` of each row's visible blocks, rounded up."""
    blocks = visible.sum(-1, keepdim=True).to(torch.float64)
    # 0.05 * 20 must not round up to 2
    return (blocks * share - 1e-9).ceil().to(torch.int64)


def top_blocks(score: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """bool like ``score``: the ``count`` best candidates of each row, ties to the lower index."""
    order = score.masked_fill(~candidates, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(-1)
    return candidates & (rank < count)


def top_p_by_keys(rows: RowSpans) -> Tensor:
    """The share of its estimated mass that each row keeps by the keys it sees: [B, 1, M_q, 1]."""
    (short, most), (long, least) = TOP_P_BY_KEYS
    seen = (rows.max_last - rows.min_first + 1)[:, None, :, None].double()
    return most + (least - most) * ((seen - short) / (long - short)).clamp(0, 1)


def top_p_blocks(
    log_mass: Tensor, forced: Tensor, visible: Tensor, top_p: Tensor, cap: Tensor
) -> Tensor:
    """bool: the smallest set of blocks that holds ``top_p``, forced ones first, at most ``cap``.

    ``top_p`` broadcasts with the rows: one for each head, for each row, or for all.
    """
    share = log_mass.exp()
    # a forced block's share counts, whatever its size: it goes to the front of the queue
    queue = torch.where(forced, 2.0, share).masked_fill(~visible, -1.0)
    order = queue.argsort(dim=-1, descending=True, stable=True)
    queued = share.gather(-1, order)
    before = queued.cumsum(-1) - queued
    rank = torch.arange(queued.shape[-1], device=queued.device)
    taken = (before < top_p - TOP_P_TOLERANCE) | (top_p >= 1)
    taken = (taken & (rank < cap)).gather(-1, order.argsort(-1))
    return (taken | forced) & visible


def select_blocks(
    upper: Tensor,
    mean: Tensor,
    spans: Spans,
    visible: Tensor,
    config: CabConfig,
    budgets: Budgets,
) -> Tensor:
    """The blocks CAB attends, bool [B, H, M_q, M_k], from both logits of `block_logits`.

    ``budgets`` are those of the heads at hand.
    """
    if config.select == "topk":
        places = spans.rows(config.query_block).places(config.query_block)
        affinity = mean.relu().masked_fill(~visible.unsqueeze(1), 0.0)
        score = curvature_score(affinity, affinity, visible.unsqueeze(1), places, config)
        return best_blocks(score, None, spans, visible, config, budgets)
    estimate = block_log_mass((upper + mean) / 2, visible.unsqueeze(1))
    if not any(budgets.top_k_share):
        return best_blocks(estimate, estimate, spans, visible, config, budgets)
    # the top k by curvature over what keys could reach
    reach = block_log_mass(upper, visible.unsqueeze(1))
    places = spans.rows(config.query_block).places(config.query_block)
    direct = standardise(reach, visible.unsqueeze(1))
    score = curvature_score(reach.exp(), direct, visible.unsqueeze(1), places, config)
    return best_blocks(score, estimate, spans, visible, config, budgets)


def best_blocks(
    score: Tensor,
    log_mass: Tensor | None,
    spans: Spans,
    visible: Tensor,
    config: CabConfig,
    budgets: Budgets,
) -> Tensor:
    """The blocks that ``budgets`` pay for, bool [B, H, M_q, M_k] like ``score``.

    By ``select="clusters"`` the fewest that hold the mass, and then the top k by ``score``;
    by ``"topk"`` the best alone. Forced ones always.
    """
    forced = forced_blocks(visible, spans, config).unsqueeze(1)
    visible = visible.unsqueeze(1)
    cap = torch.maximum(share_of_row(visible, config.max_density), forced.sum(-1, keepdim=True))
    everything, forced = visible.expand_as(score), forced.expand_as(score)
    top_p, top_k_share, sparsity = (_by_head(numbers, score) for numbers in budgets[:3])
    if log_mass is None or config.select == "topk":
        spare = torch.minimum(share_of_row(visible, 1 - sparsity), cap)
        spare = spare - forced.sum(-1, keepdim=True)
        return forced | top_blocks(score, everything & ~forced, spare)
    if config.top_p is None:
        top_p = top_p_by_keys(spans.rows(config.query_block))
    kept = top_p_blocks(log_mass, forced, everything, top_p, cap)
    spare = torch.minimum(share_of_row(visible, top_k_share), cap - kept.sum(-1, keepdim=True))
    return kept | top_blocks(score, everything & ~kept, spare)


def _by_head(numbers: Sequence[float], like: Tensor) -> Tensor:
    """A number for each head, or for all, as float64 that broadcasts with [B, H, M_q, M_k]."""
    return torch.tensor(numbers, device=like.device, dtype=torch.float64)[:, None, None]


def most_of_rows(bounds: Tensor, max_density: float) -> Tensor:
    """The most blocks that a row keeps, int32 [B, M_q]: a share of what it sees, or all forced.

    Args:
        bounds: `row_bounds`.
    """
    first, last, sinks, local = bounds[:4]
    blocks = last - first + 1
    forced = blocks - (local - sinks).clamp(min=0)
    # 0.05 * 20 must not round up to 2
    return (blocks.double() * max_density - 1e-9).ceil().int().maximum(forced)


def best_of_rows(score: Tensor, visible: Tensor, forced: Tensor, wanted: Tensor) -> Tensor:
    """As many blocks of each row as ``wanted`` [B, H, M_q] says, bool [B, H, M_q, M_k].

    Those that are forced, then the best; ties go to the lower index.
    """
    free, wanted = visible & ~forced, wanted.unsqueeze(-1)
    order = score.masked_fill(~free, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    spare = wanted - forced.sum(-1, keepdim=True)
    return (forced & (wanted > 0)) | (free & (order.argsort(-1) < spare))


@once_per_spans
def row_bounds(
    spans: Spans, query_block: int, key_block: int, sink_blocks: int, local_blocks: int
) -> Tensor:
    """int32 [6, B, M_q], key blocks: the first and the last that a row sees, the first that is no
    sink, the first of its local ones, the first and the last that all of its queries see wholly.

    Blocks that hold positions of the row itself are local. Rows of padding see blocks 0 to -1.
    """
    rows = spans.rows(query_block)
    real = rows.queries > 0
    first = rows.min_first.where(real, 0) // key_block
    last = rows.max_last // key_block
    own = rows.min_last.where(real, -1) // key_block
    sinks = (first + sink_blocks).minimum(last + 1)
    local = own.minimum(last + 1 - local_blocks).maximum(first)
    begin = -(-rows.max_first // key_block)
    end = (rows.min_last.where(real, -1) + 1) // key_block - 1
    return torch.stack((first, last, sinks, local, begin, end)).int()


def outlier_queries(q: Tensor, spans: Spans, query_block: int, count: int) -> Tensor:
    """The queries of each block least like the block's mean query: int64 [B, H, M_q, count].

    They are positions in q [B, H, N_q, D], by rising cosine with the mean in steps of
    1 / `COSINE_STEPS`, ties to the earlier; -1 where a block has fewer real queries. All
    ``query_block`` queries come in order.
    """
    blocks, real = _blocked(q, spans.last >= 0, query_block)
    blocks = blocks.masked_fill(~real.unsqueeze(-1), 0.0)
    mean = _mean(blocks, real).unsqueeze(-2)
    size = blocks.square().sum(-1) * mean.square().sum(-1)
    cosine = (blocks * mean).sum(-1) / size.clamp(min=LEAST_SQUARE).sqrt()
    cosine = (cosine.nan_to_num(nan=-1.0) * COSINE_STEPS).trunc().masked_fill(~real, torch.inf)
    inside = torch.arange(query_block, device=q.device).expand(cosine.shape)
    if count < query_block:
        inside = cosine.argsort(dim=-1, stable=True)[..., :count]
    start = torch.arange(0, q.shape[2], query_block, device=q.device)
    missing = ~real.expand(cosine.shape).gather(-1, inside)
    return (inside + start[:, None]).masked_fill(missing, -1)


def typical_queries(spans: Spans, query_block: int, count: int) -> Tensor:
    """The queries in the middle of ``count`` equal steps of each block: int64 [B, M_q, count].

    -1 where there is no token.
    """
    apart = query_block // count
    starts = torch.arange(0, spans.q_length, query_block, device=spans.last.device)
    steps = torch.arange(apart // 2, query_block, apart, device=spans.last.device)
    at = (starts[:, None] + steps).expand(spans.last.shape[0], -1, -1)
    last = spans.blocked(query_block)[1][:, :, steps]
    return at.masked_fill(last < 0, -1)


def mass_by_rows(
    q: Tensor,
    k: Tensor,
    spans: Spans,
    scale: float,
    config: CabConfig,
    channels: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """(mass, most) of every key block for every query block, float32 [B, H, M_q, M_k] both.

    The mean share (`exact_scores`) of the ``config.exact_queries`` outliers, which stand for
    themselves, and of the ``config.typical_queries``, which stand for all other queries: a
    stratified sample. ``most`` is the largest share that any of them gives.

    Args:
        q, k: [B, H, N_q, D], [B, H_kv, N_k, D].
        channels: those that outliers are scored on, () for all.
    """
    block = config.query_block
    count, typical = config.exact_queries, config.typical_queries
    at = typical_queries(spans, block, typical).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    scored = [(at, (block - count) / typical, ())]
    if count:
        scored.append((outlier_queries(q, spans, block, count), 1.0, channels))
    mass, total, most = 0.0, 0.0, None
    for positions, weight, some in scored:
        queries, keys = (x[..., list(some)] if some else x for x in (q, k))
        index = positions.clamp(min=0).flatten(2)[..., None].expand(-1, -1, -1, queries.shape[3])
        rows = queries.gather(2, index).unflatten(2, positions.shape[2:])
        largest, shares = exact_scores(rows, positions, keys, spans, scale, config.key_block)
        mass = mass + weight * shares
        total = total + weight * (positions >= 0).sum(-1, keepdim=True)
        most = largest if most is None else torch.maximum(most, largest)
    # by products, as kernels compare: what sees nothing has no mass
    return mass / total.clamp(min=LEAST), most


def exact_scores(
    rows: Tensor, positions: Tensor, keys: Tensor, spans: Spans, scale: float, key_block: int
) -> tuple[Tensor, Tensor]:
    """What the gathered queries of a block need of every key block: (most, shares).

    The share that a query gives to a key block is the softmax, over the blocks it sees, of the
    largest logit of any key inside. ``most`` is the largest share that any query of the block
    gives, ``shares`` the sum of them: float32 [B, H, M_q, M_k] both.

    Args:
        rows: [B, H, M_q, S, C], what is scored of S queries of each block.
        positions: int64 [B, H, M_q, S], which queries they are; -1 for none.
        keys: [B, H_kv, N_k, C], the same channels of the keys.
    """
    heads, kv_blocks = rows.shape[1], -(-keys.shape[2] // key_block)
    most, shares = (rows.new_zeros(*rows.shape[:3], kv_blocks).float() for _ in range(2))
    key = torch.arange(keys.shape[2], device=keys.device)
    group, step = heads // keys.shape[1], max(1, QUERIES_AT_A_TIME // rows.shape[3])
    for head, start in product(range(heads), range(0, rows.shape[2], step)):
        some = slice(start, start + step)
        at = positions[:, head, some].flatten(1)
        first, last = (x.gather(1, at.clamp(min=0)) for x in (spans.first, spans.last))
        last = last.masked_fill(at < 0, -1)
        queries = rows[:, head, some].flatten(1, 2).float()
        logits = queries @ keys[:, head // group].float().transpose(-1, -2) * scale
        unseen = (key < first.unsqueeze(-1)) | (key > last.unsqueeze(-1))
        logits = F.pad(
            logits.masked_fill(unseen, -torch.inf), (0, -len(key) % key_block), value=-torch.inf
        )
        largest = logits.unflatten(-1, (-1, key_block)).amax(-1)
        # softmax over nothing is NaN: who sees nothing needs nothing
        given = largest.softmax(-1).masked_fill(largest == -torch.inf, 0.0)
        given = given.unflatten(1, (-1, rows.shape[3]))
        most[:, head, some], shares[:, head, some] = given.amax(2), given.sum(2)
    return most, shares


def shared_mass(estimate: Tensor, shares: Tensor, visible: Tensor) -> Tensor:
    """log of the mean of two shares of a row: of ``estimate``, log shares, and of exact ones.

    The estimate speaks for the many queries that are like their mean, ``shares`` (of any total) for
    the outliers. -inf outside ``visible``.
    """
    total = shares.sum(-1, keepdim=True).clamp(min=LEAST)
    both = (estimate.exp() + shares / total) / 2
    return both.clamp(min=LEAST).log().masked_fill(~visible, -torch.inf)


def refuse_infinite(name: str, x: Tensor) -> None:
    """Refuse ``x``, which is called ``name``, where it holds infinities or NaN."""
    if not bool(torch.isfinite(x).all()):
        raise ValueError(
            f"{name} holds infinite or NaN values (shape {tuple(x.shape)}); nothing can be "
            "selected by them. Look for an overflow in the layers before this one."
        )


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention under a plan, [B, H, N_q, D_v]: softmax over the keys the plan keeps.

    What a plan samples has log(``plan.one_in``) added to its logits. Differentiable. Queries that
    see nothing (padding, or no block listed) get zeros. A plan may have fewer heads than q, see
    `BlockPlan.shared_by`. The token mask is made for at most `QUERY_CHUNK` queries at a time, over
    the keys they could see. What is not finite reaches no query of a block that sees nothing of it.
    torch.compile takes it as one op, `cab_hf.ops.attention.traced`.

    ``return_lse`` adds the log-sum-exp of each query's scaled scores: natural logarithm, float32
    (float64 for float64 inputs) [B, H, N_q], -inf where a query sees nothing.
    """
    chunks = masks(q, k, v, plan)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    outs, sums = [], []
    for rows, reach, mask, raised, sound in chunks:
        queries, keys, values = q[:, :, rows], k[:, :, reach], v[:, :, reach]
        if not sound:
            # a mask adds to logits and a weight of 0 multiplies: neither removes a NaN
            unseen = ~mask.any(dim=-2).unsqueeze(-1)
            keys, values = (x.masked_fill(unseen, 0.0) for x in (keys, values))
        # softmax over nothing is NaN: a blind query looks somewhere, and what it saw is dropped
        blind = ~mask.any(dim=-1, keepdim=True)
        seen = mask | blind
        if raised is not None:
            seen = raised.masked_fill(~seen, -torch.inf)
            queries, keys, values = (x.to(raised.dtype) for x in (queries, keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
        outs.append(out.to(q.dtype).masked_fill(blind, 0.0))
        if return_lse:
            sums.append(_log_sum_exp(queries, keys, mask, raised, scale))
    out = torch.cat(outs, dim=2)
    return (out, torch.cat(sums, dim=2)) if return_lse else out


def masks(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> Iterator[Masks]:
    """What the queries attend under ``plan``, a chunk of them at a time.

    Where k or v is not finite, a chunk has queries of one block alone.
    """
    sound = all(bool(x.isfinite().all()) for x in (k, v))
    sharing = plan.shared_by(q.shape[1])
    sample = None if plan.sampled is None else plan.of_sampled()
    chunk = QUERY_CHUNK if sound else math.gcd(QUERY_CHUNK, plan.query_block)
    for start in range(0, plan.q_length, chunk):
        stop = min(start + chunk, plan.q_length)
        reach = max(1, int(plan.spans.last[:, start:stop].max()) + 1)
        mask = plan.token_mask(start, stop, reach).repeat_interleave(sharing, dim=1)
        raised = None
        if sample is not None:
            more = sample.token_mask(start, stop, reach).repeat_interleave(sharing, dim=1)
            # in float32, where log(one_in) is not rounded to the dtype of q
            wide = torch.promote_types(q.dtype, torch.float32)
            mask, raised = mask | more, more.to(wide) * math.log(plan.one_in)
        yield Masks(slice(start, stop), slice(0, reach), mask, raised, sound)


def _log_sum_exp(q: Tensor, k: Tensor, mask: Tensor, raised: Tensor | None, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * scale
    logits = logits if raised is None else logits + raised
    return logits.masked_fill(~mask, -torch.inf).logsumexp(dim=-1)
