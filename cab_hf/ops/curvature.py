"""What ranks the blocks of a row beyond its mass target, `reference.curvature_score`."""

from __future__ import annotations

import triton
import triton.language as tl

from cab_hf.ops.score import affinity_of
from cab_hf.ops.threshold import is_kept


@triton.jit
def curvature_score(
    direct,
    graph,
    weights,
    span,
    threshold,
    kv_blocks,
    redundancy,
    begin,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CLUSTERS: tl.constexpr,
    CURVATURE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Replace a row of ``direct`` by `reference.curvature_score`, -inf for what is no candidate.

    Args:
        graph: the row's log_sum, hops and strength, as in `Scores`.
        span: first and last block that the row sees, first that is no sink, first of its tail.
        threshold: (low, high, cut) of the weights that are kept already.

    Returns (candidates, the least of their scores, the largest).
    """
    low, high, sinks, tail = span
    weight_low, weight_high, weight_cut = threshold
    by_base, by_term = _factors(
        direct,
        graph,
        low,
        high,
        kv_blocks,
        redundancy,
        begin,
        QUERY_BLOCK,
        KEY_BLOCK,
        CLUSTERS,
        CURVATURE,
        CHUNK,
    )
    count = tl.zeros([CHUNK], tl.int32)
    lowest = tl.full([CHUNK], float("inf"), tl.float32)
    highest = tl.full([CHUNK], float("-inf"), tl.float32)
    column = begin + tl.arange(0, CHUNK)
    source = direct + column
    if CLUSTERS:
        weight_source = weights + column
    for _ in range(begin, high + 1, CHUNK):
        left = (column >= sinks) & (column < tail)
        base, term = _base_and_term(
            source, graph, column, left, QUERY_BLOCK, KEY_BLOCK, CLUSTERS, CURVATURE
        )
        score = by_base * base + by_term * term
        if CLUSTERS:
            weight = tl.load(weight_source)
            kept = is_kept(weight, column, weight_low, weight_high, weight_cut)
            left = left & (kept == 0)
            weight_source += CHUNK
        tl.store(source, tl.where(left, score, float("-inf")))
        count += left.to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(left, score, float("inf")))
        highest = tl.maximum(highest, tl.where(left, score, float("-inf")))
        column += CHUNK
        source += CHUNK
    tl.debug_barrier()
    return tl.sum(count, 0), tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def _factors(
    direct,
    graph,
    low,
    high,
    kv_blocks,
    redundancy,
    begin,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CLUSTERS: tl.constexpr,
    CURVATURE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What base and term are multiplied by in the score.

    What is the same for the whole row changes no order, and is left out.
    """
    eps: tl.constexpr = 1.1920928955078125e-07
    by_base = 1.0
    by_term = 0.0
    if CURVATURE != "none":
        # deviations are taken from some value of the row: squares of large numbers cancel badly
        first_base, first_term = _base_and_term(
            direct + low, graph, low, True, QUERY_BLOCK, KEY_BLOCK, CLUSTERS, CURVATURE
        )
        base_sum = tl.zeros([CHUNK], tl.float32)
        base_squares = tl.zeros([CHUNK], tl.float32)
        term_sum = tl.zeros([CHUNK], tl.float32)
        term_squares = tl.zeros([CHUNK], tl.float32)
        least = tl.full([CHUNK], float("inf"), tl.float32)
        most = tl.full([CHUNK], float("-inf"), tl.float32)
        column = begin + tl.arange(0, CHUNK)
        source = direct + column
        for _ in range(begin, high + 1, CHUNK):
            visible = (column >= low) & (column <= high)
            base, term = _base_and_term(
                source, graph, column, visible, QUERY_BLOCK, KEY_BLOCK, CLUSTERS, CURVATURE
            )
            if CLUSTERS:
                base = tl.where(visible, base - first_base, 0.0)
                term = tl.where(visible, term - first_term, 0.0)
                base_sum += base
                base_squares += base * base
                term_sum += term
                term_squares += term * term
            else:
                least = tl.minimum(least, tl.where(visible, base, float("inf")))
                most = tl.maximum(most, tl.where(visible, base, float("-inf")))
            column += CHUNK
            source += CHUNK
        if CLUSTERS:
            blocks = (high - low + 1).to(tl.float32)
            by_base = 1.0 / tl.maximum(_deviation(base_sum, base_squares, blocks), eps)
            by_term = -redundancy / tl.maximum(_deviation(term_sum, term_squares, blocks), eps)
            if CURVATURE == "forman":
                by_base *= 1 - redundancy
        elif CURVATURE == "forman":
            by_base = 1 - redundancy
            by_term = -redundancy
        else:
            by_base = 1.0 / tl.maximum(tl.max(most, 0) - tl.min(least, 0), eps)
            by_term = -redundancy / kv_blocks
    return by_base, by_term


@triton.jit
def _base_and_term(
    source,
    graph,
    column,
    visible,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CLUSTERS: tl.constexpr,
    CURVATURE: tl.constexpr,
):
    """What curvature is weighed against, and curvature; the row's strength is left out.

    It is the same for the whole row and changes no order.
    """
    log_sum, hops, strength = graph
    base = tl.load(source, mask=visible, other=0.0)
    affinity = base
    if not CLUSTERS or CURVATURE == "forman":
        affinity = affinity_of(base, log_sum, visible, CLUSTERS)
    if not CLUSTERS:
        base = affinity
    term = base
    if CURVATURE != "none":
        term = _paths(hops, column, visible, QUERY_BLOCK, KEY_BLOCK)
        if CURVATURE == "forman":
            above = tl.load(strength + column, mask=visible, other=0.0)
            term = 4 * affinity - above + 3 * term
    return base, term


@triton.jit
def _paths(hops, column, visible, QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr):
    """Two-hop weights spread back from the query grid to key blocks."""
    ratio: tl.constexpr = QUERY_BLOCK // KEY_BLOCK if QUERY_BLOCK > KEY_BLOCK else 1
    spread: tl.constexpr = KEY_BLOCK // QUERY_BLOCK if KEY_BLOCK > QUERY_BLOCK else 1
    total = tl.load(hops + column // ratio * spread, mask=visible, other=0.0)
    for step in tl.static_range(1, spread):
        total += tl.load(hops + column * spread + step, mask=visible, other=0.0)
    return total


@triton.jit
def _deviation(total, squares, count):
    mean = tl.sum(total, 0) / count
    return tl.sqrt(tl.maximum(tl.sum(squares, 0) / count - mean * mean, 0.0))
