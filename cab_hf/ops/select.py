"""Select on the GPU: forced blocks, clusters and bridges of every row, without a sort.

The definition is `reference.select_blocks`. A program walks one row, which stays in the cache, once
for every cut of a bisection; ties go to the lower index. What is selected goes straight into
ascending lists, full and partial apart.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.ops.coarsen import Summary
from cab_hf.ops.reference import MASS_TOLERANCE
from cab_hf.ops.score import Scores, affinity_of, row_chunk, visible_range
from cab_hf.plan import BlockLists

# shares of a row travel as whole multiples of 2^-40: a float32 argument would turn 5 % of 20 into 2
SHARE_ONE = tl.constexpr(1 << 40)
# halvings of a bracket of scores by value before halving by representation, which always ends
EVEN_ROUNDS = tl.constexpr(20)


def select_blocks(
    scores: Scores,
    summary: Summary,
    start: int,
    config: CabConfig,
    full: BlockLists,
    partial: BlockLists,
    bits: Tensor | None,
) -> None:
    """Select for the heads of ``scores``, the first of which is ``start``, and write the result.

    The scores are used up: their memory holds other values afterwards.

    Args:
        full, partial: lists of all heads with room for what a row may keep, filled for these.
        bits: None, or int32 [B, H, M_q, ceil(M_k / 32)]: then only the counts of the lists are
            written, and bit j % 32 of word j // 32 says that block j is kept; see `fill_lists`.
    """
    count, q_blocks, width = scores.direct.shape
    kv_blocks = summary.keys.shape[3]
    clusters = config.select == "clusters"
    _select_kernel[(count * q_blocks,)](
        scores.direct,
        scores.estimate,
        scores.log_sum,
        scores.hops,
        scores.strength,
        summary.rows,
        full.counts if bits is None else bits,
        full.counts,
        full.indices,
        partial.counts,
        partial.indices,
        config.mass - MASS_TOLERANCE,
        config.redundancy,
        _share(config.bridges),
        _share(1 - config.sparsity),
        _share(config.max_density),
        start,
        count,
        summary.queries.shape[1],
        q_blocks,
        kv_blocks,
        summary.rows.stride(0),
        width,
        scores.hops.shape[-1] if scores.hops is not None else 0,
        0 if bits is None else bits.shape[-1],
        full.width,
        partial.width,
        config.sink_blocks,
        config.local_blocks,
        QUERY_BLOCK=config.query_block,
        KEY_BLOCK=config.key_block,
        CLUSTERS=clusters,
        EXACT=config.mass == 1,
        CURVATURE=config.curvature if config.curved else "none",
        BRIDGES=clusters and config.bridges > 0 and config.mass < 1,
        CAPPED=config.max_density < 1,
        LISTS=bits is None,
        CHUNK=row_chunk(kv_blocks),
        num_warps=1,
    )


def fill_lists(
    bits: Tensor, summary: Summary, full: BlockLists, partial: BlockLists, config: CabConfig
) -> None:
    """Write the lists whose counts `select_blocks` left beside ``bits``."""
    batch, heads, q_blocks = summary.queries.shape[:3]
    _block_lists_kernel[(batch * heads * q_blocks,)](
        bits,
        summary.rows,
        full.indices,
        partial.indices,
        heads,
        q_blocks,
        summary.rows.stride(0),
        bits.shape[-1],
        full.width,
        partial.width,
        KEY_BLOCK=config.key_block,
        CHUNK=row_chunk(summary.keys.shape[3]),
        num_warps=1,
    )


def _share(share: float) -> int:
    return round(share * SHARE_ONE.value)


# --- thresholds


@triton.jit
def _share_of(blocks, share):
    """ceil(blocks * share), where a product within rounding of a whole number is that number."""
    multiples = blocks * share.to(tl.int64)
    return ((multiples - blocks + SHARE_ONE - 1) // SHARE_ONE).to(tl.int32)


@triton.jit
def _ordered(x):
    """int32 that compare as the float32 do."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(order):
    """The float32 that `_ordered` makes ``order`` of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _between(low, high):
    """A float32 in [low, high), halfway in the order of float32; ``low`` when there is no other."""
    low = _ordered(low)
    high = _ordered(high)
    return _unordered((low & high) + ((low ^ high) >> 1))


@triton.jit
def _next_middle(low, high, rounds):
    """Where to cut a bracket of scores; ``low`` when nothing lies inside.

    Scores lie evenly, until they do not: then by representation, which always ends.
    """
    half_way = low + (high - low) * 0.5
    even = (rounds < EVEN_ROUNDS) & (half_way > low) & (half_way < high)
    return tl.where(even, half_way, _between(low, high))


@triton.jit
def _sum_above(values, level, begin, end, CHUNK: tl.constexpr):
    """Sum of the entries above ``level``, which is not negative."""
    # a power of two, so that products are exact: it parts any two weights above 2^-36, and gives 1
    # above the level and 0 elsewhere on the units that multiply
    large: tl.constexpr = 1152921504606846976.0
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(begin, end, CHUNK):
        x = tl.load(values + start + tl.arange(0, CHUNK))
        total += x * tl.clamp(x * large - level * large, 0.0, 1.0)
    return tl.sum(total, 0)


@triton.jit
def _count_above(values, level, begin, end, CHUNK: tl.constexpr):
    """How many entries are above ``level``: a float32, which sums faster and is exact to 2^24."""
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(begin, end, CHUNK):
        x = tl.load(values + start + tl.arange(0, CHUNK))
        total += tl.where(x > level, 1.0, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _cut(values, level, count, begin, end, CHUNK: tl.constexpr):
    """The column of the ``count``-th entry that equals ``level``."""
    low = begin - 1
    high = end
    while low + 1 < high:
        middle = (low + high) // 2
        total = tl.zeros([CHUNK], tl.float32)
        for start in range(begin, middle + 1, CHUNK):
            column = start + tl.arange(0, CHUNK)
            x = tl.load(values + column)
            total += tl.where((x == level) & (column <= middle), 1.0, 0.0)
        enough = tl.sum(total, 0) >= count
        low = tl.where(enough, low, middle)
        high = tl.where(enough, middle, high)
    return high


@triton.jit
def _threshold_by_count(values, low, high, total, count, begin, end, CHUNK: tl.constexpr):
    """(low, high, cut) of the ``count`` largest of ``total`` entries: `reference.top_blocks`.

    ``low`` lies below all of them, ``high`` is the largest. What `_is_kept` keeps is the answer.
    """
    wanted = tl.minimum(count, total).to(tl.float32)
    # at least `wanted` entries are > low, fewer are > high
    at_low = total.to(tl.float32)
    at_high = 0.0
    rounds = 0
    middle = _next_middle(low, high, rounds)
    while (count > 0) & (at_low > wanted) & (middle > low):
        here = _count_above(values, middle, begin, end, CHUNK)
        enough = here >= wanted
        low = tl.where(enough, middle, low)
        at_low = tl.where(enough, here, at_low)
        high = tl.where(enough, high, middle)
        at_high = tl.where(enough, at_high, here)
        rounds += 1
        middle = _next_middle(low, high, rounds)
    cut = end
    if (count > 0) & (at_low > wanted):
        cut = _cut(values, high, wanted - at_high, begin, end, CHUNK)
    nothing = float("inf")
    return tl.where(count > 0, low, nothing), tl.where(count > 0, high, nothing), cut


@triton.jit
def _threshold_by_mass(weights, high, total, missing, blocks, begin, end, CHUNK: tl.constexpr):
    """(low, high, cut) of the fewest entries, largest first, that sum to ``missing``.

    ``total`` is the sum of all entries that take part, ``high`` the largest.
    """
    # all that is no larger than the low end may be left out together: no need to look there
    low = tl.maximum(total - missing, 0.0) / blocks * 0.999
    # what is > low holds enough, what is > high does not
    held_low = total
    held_high = 0.0
    middle = _between(low, high)
    searching = (missing > 0) & (middle > low)
    while searching:
        held = _sum_above(weights, middle, begin, end, CHUNK)
        enough = held >= missing
        low = tl.where(enough, middle, low)
        held_low = tl.where(enough, held, held_low)
        high = tl.where(enough, high, middle)
        held_high = tl.where(enough, held_high, held)
        # sums less than two entries apart have one entry between them
        single = (high < 1.5 * low) & (held_low - held_high < 1.75 * low)
        # weights differ by orders of magnitude; so do the brackets worth trying
        middle = _between(low, high)
        searching = (single == 0) & (middle > low)
    cut = end
    if (missing > 0) & (middle <= low):
        count = tl.ceil((missing - held_high) / tl.maximum(high, 1e-30))
        cut = _cut(weights, high, count, begin, end, CHUNK)
    nothing = float("inf")
    return tl.where(missing > 0, low, nothing), tl.where(missing > 0, high, nothing), cut


@triton.jit
def _is_kept(x, column, low, high, cut):
    """Above the bracket, or in it and not right of the cut, which parts what is equal."""
    return (x > high) | ((x > low) & (column <= cut))


# --- one row


@triton.jit
def _weigh(estimate, low, high, sinks, tail, begin, CHUNK: tl.constexpr):
    """Replace a row of logits by exp(logit - largest), -1 where a block is forced or unseen.

    Returns (sum over the forced, sum over the others, the largest of these).
    """
    # pointers and columns move on apart: a column that also is an address is compared as 64 bits
    column = begin + tl.arange(0, CHUNK)
    source = estimate + column
    peak = tl.full([CHUNK], float("-inf"), tl.float32)
    for _ in range(begin, high + 1, CHUNK):
        visible = (column >= low) & (column <= high)
        # a row has room for whole chunks: what lies beyond is read, fast, and dropped
        peak = tl.maximum(peak, tl.where(visible, tl.load(source), float("-inf")))
        column += CHUNK
        source += CHUNK
    top = tl.max(peak, 0)
    column = begin + tl.arange(0, CHUNK)
    source = estimate + column
    held = tl.zeros([CHUNK], tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    largest = tl.zeros([CHUNK], tl.float32)
    for _ in range(begin, high + 1, CHUNK):
        visible = (column >= low) & (column <= high)
        free = (column >= sinks) & (column < tail)
        weight = tl.exp(tl.where(visible, tl.load(source), float("-inf")) - top)
        held += tl.where(free, 0.0, weight)
        weight = tl.where(free, weight, 0.0)
        total += weight
        largest = tl.maximum(largest, weight)
        tl.store(source, tl.where(free, weight, -1.0))
        column += CHUNK
        source += CHUNK
    tl.debug_barrier()
    return tl.sum(held, 0), tl.sum(total, 0), tl.max(largest, 0)


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
def _base_and_term(
    source,
    log_sum,
    hops,
    strength,
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
def _score(
    direct,
    log_sum,
    hops,
    strength,
    weights,
    low,
    high,
    sinks,
    tail,
    weight_low,
    weight_high,
    weight_cut,
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

    Returns (candidates, the least of their scores, the largest).
    """
    eps: tl.constexpr = 1.1920928955078125e-07
    # weights of base and term in the score; what is the same for the whole row changes no order
    by_base = 1.0
    by_term = 0.0
    if CURVATURE != "none":
        # deviations are taken from some value of the row: squares of large numbers cancel badly
        first_base, first_term = _base_and_term(
            direct + low,
            log_sum,
            hops,
            strength,
            low,
            True,
            QUERY_BLOCK,
            KEY_BLOCK,
            CLUSTERS,
            CURVATURE,
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
                source,
                log_sum,
                hops,
                strength,
                column,
                visible,
                QUERY_BLOCK,
                KEY_BLOCK,
                CLUSTERS,
                CURVATURE,
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
            source,
            log_sum,
            hops,
            strength,
            column,
            left,
            QUERY_BLOCK,
            KEY_BLOCK,
            CLUSTERS,
            CURVATURE,
        )
        score = by_base * base + by_term * term
        if CLUSTERS:
            weight = tl.load(weight_source)
            kept = _is_kept(weight, column, weight_low, weight_high, weight_cut)
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
def _deviation(total, squares, count):
    mean = tl.sum(total, 0) / count
    return tl.sqrt(tl.maximum(tl.sum(squares, 0) / count - mean * mean, 0.0))


# --- the kernels


@triton.jit(do_not_specialize=["bridges", "density", "max_density"])
def _select_kernel(
    direct,
    estimate,
    log_sum,
    hops,
    strength,
    rows,
    bits,
    full_counts,
    full_indices,
    partial_counts,
    partial_indices,
    mass,
    redundancy,
    bridges,
    density,
    max_density,
    start,
    count,
    heads,
    q_blocks,
    kv_blocks,
    rows_plane,
    width,
    coarse_width,
    word_count,
    full_room,
    partial_room,
    sink_blocks,
    local_blocks,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CLUSTERS: tl.constexpr,
    EXACT: tl.constexpr,
    CURVATURE: tl.constexpr,
    BRIDGES: tl.constexpr,
    CAPPED: tl.constexpr,
    LISTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # the longest rows first
    i = q_blocks - 1 - tl.program_id(0) // count
    mine = (tl.program_id(0) % count).to(tl.int64)
    row = mine * q_blocks + i
    rows += (start + mine) // heads * q_blocks + i
    low, high = visible_range(rows, rows_plane, True, KEY_BLOCK)
    diagonal = tl.load(rows + 2 * rows_plane) // KEY_BLOCK
    # forced are the blocks left of `sinks` and from `tail` on
    blocks = tl.maximum(high - low + 1, 0)
    sinks = tl.minimum(low + sink_blocks, high + 1)
    tail = tl.maximum(tl.minimum(high + 1 - local_blocks, diagonal), low)
    forced = blocks - tl.maximum(tail - sinks, 0)
    cap = blocks
    if CAPPED:
        cap = tl.maximum(_share_of(blocks, max_density), forced)
    begin = low // CHUNK * CHUNK
    direct += row * width

    # clusters
    nothing = float("inf")
    weight_low = nothing
    weight_high = nothing
    weight_cut = 0
    spare = tl.minimum(_share_of(blocks, density), cap) - forced
    if CLUSTERS:
        estimate += row * width
        spare = tl.minimum(_share_of(blocks, bridges), cap)
        if high >= 0:
            held, total, largest = _weigh(estimate, low, high, sinks, tail, begin, CHUNK)
            if EXACT:
                weight_low = -0.5
                weight_high = -0.5
            else:
                missing = mass * (held + total) - held
                weight_low, weight_high, weight_cut = _threshold_by_mass(
                    estimate,
                    largest,
                    total,
                    missing,
                    blocks,
                    begin,
                    high + 1,
                    CHUNK,
                )
            if CAPPED:
                room = cap - forced
                taken = _count_kept(
                    estimate, weight_low, weight_high, weight_cut, begin, high + 1, CHUNK
                )
                if taken > room:
                    under = tl.full([], -0.5, tl.float32)
                    weight_low, weight_high, weight_cut = _threshold_by_count(
                        estimate,
                        under,
                        largest,
                        blocks - forced,
                        room,
                        begin,
                        high + 1,
                        CHUNK,
                    )

    # bridges, or all there is to top-k
    score_low = nothing
    score_high = nothing
    score_cut = 0
    if BRIDGES or not CLUSTERS:
        log_sum_of_row = 0.0
        if CURVATURE != "none":
            hops += row * coarse_width
        if CURVATURE == "forman":
            strength += row * width
            log_sum_of_row = tl.load(log_sum + row)
        if high >= 0:
            left, lowest, highest = _score(
                direct,
                log_sum_of_row,
                hops,
                strength,
                estimate,
                low,
                high,
                sinks,
                tail,
                weight_low,
                weight_high,
                weight_cut,
                kv_blocks,
                redundancy,
                begin,
                QUERY_BLOCK,
                KEY_BLOCK,
                CLUSTERS,
                CURVATURE,
                CHUNK,
            )
            if CLUSTERS:
                spare = tl.minimum(spare, cap - (blocks - left))
            # below all of them; one step below 0 is -0, which is not below
            lowest = _unordered(_ordered(lowest) - 2)
            score_low, score_high, score_cut = _threshold_by_count(
                direct,
                lowest,
                highest,
                left,
                spare,
                begin,
                high + 1,
                CHUNK,
            )

    whole_low, whole_high = _whole_range(rows, rows_plane, KEY_BLOCK)
    # where this row stands among those of all heads
    row = (start + mine) * q_blocks + i
    bits += row * word_count
    full_indices += row * full_room
    partial_indices += row * partial_room
    full = 0
    partial = 0
    column = begin + tl.arange(0, CHUNK)
    if CLUSTERS:
        weight_source = estimate + column
    score_source = direct + column
    for first in range(begin, high + 1, CHUNK):
        kept = (column < sinks) | (column >= tail)
        if CLUSTERS:
            weight = tl.load(weight_source)
            kept = kept | _is_kept(weight, column, weight_low, weight_high, weight_cut)
            weight_source += CHUNK
        if BRIDGES or not CLUSTERS:
            score = tl.load(score_source)
            kept = kept | _is_kept(score, column, score_low, score_high, score_cut)
            score_source += CHUNK
        kept = kept & (column >= low) & (column <= high)
        if LISTS:
            full, partial = _append(
                kept,
                column,
                first,
                full_indices,
                partial_indices,
                full,
                partial,
                whole_low,
                whole_high,
                CHUNK,
            )
        else:
            # [CHUNK / 32, 32]: one bit a block
            word = tl.reshape(kept.to(tl.int32), [CHUNK // 32, 32]) << tl.arange(0, 32)[None, :]
            place = first // 32 + tl.arange(0, CHUNK // 32)
            tl.store(bits + place, tl.sum(word, 1), mask=place < word_count)
            whole = kept & (column >= whole_low) & (column <= whole_high)
            full_here = tl.sum(whole.to(tl.int32), 0)
            full += full_here
            partial += tl.sum(kept.to(tl.int32), 0) - full_here
        column += CHUNK
    tl.store(full_counts + row, full)
    tl.store(partial_counts + row, partial)


@triton.jit
def _whole_range(rows, rows_plane, KEY_BLOCK: tl.constexpr):
    """First and last key block that every query of the row sees wholly."""
    low = tl.cdiv(tl.load(rows + rows_plane), KEY_BLOCK)
    return low, (tl.load(rows + 2 * rows_plane) + 1) // KEY_BLOCK - 1


@triton.jit
def _append(
    kept,
    column,
    first,
    full_indices,
    partial_indices,
    full,
    partial,
    whole_low,
    whole_high,
    CHUNK: tl.constexpr,
):
    """Add columns, the lowest of which is ``first``, to the lists of a row: their new lengths."""
    if (first >= whole_low) & (first + CHUNK - 1 <= whole_high):
        rank = tl.cumsum(kept.to(tl.int32), 0)
        tl.store(full_indices + (full - 1 + rank), column, mask=kept)
        full += tl.sum(kept.to(tl.int32), 0)
    else:
        whole = (column >= whole_low) & (column <= whole_high)
        # both ranks in one scan: full in the lower half, partial in the upper
        step = tl.where(kept, tl.where(whole, 1, 65536), 0)
        rank = tl.cumsum(step, 0)
        tl.store(full_indices + (full - 1 + (rank & 65535)), column, mask=kept & whole)
        tl.store(partial_indices + (partial - 1 + (rank >> 16)), column, mask=kept & (whole == 0))
        added = tl.sum(step, 0)
        full += added & 65535
        partial += added >> 16
    return full, partial


@triton.jit
def _count_kept(values, low, high, cut, begin, end, CHUNK: tl.constexpr):
    total = tl.zeros([CHUNK], tl.int32)
    for start in range(begin, end, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(values + column)
        total += _is_kept(x, column, low, high, cut).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _block_lists_kernel(
    bits,
    rows,
    full_indices,
    partial_indices,
    heads,
    q_blocks,
    rows_plane,
    word_count,
    full_room,
    partial_room,
    KEY_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows += row // (heads * q_blocks) * q_blocks + row % q_blocks
    low, high = visible_range(rows, rows_plane, True, KEY_BLOCK)
    whole_low, whole_high = _whole_range(rows, rows_plane, KEY_BLOCK)
    bits += row * word_count
    full_indices += row * full_room
    partial_indices += row * partial_room
    full = 0
    partial = 0
    for first in range(low // CHUNK * CHUNK, high + 1, CHUNK):
        column = first + tl.arange(0, CHUNK)
        there = (column >= low) & (column <= high)
        word = tl.load(bits + column // 32, mask=there, other=0)
        kept = there & (((word >> (column % 32)) & 1) != 0)
        full, partial = _append(
            kept,
            column,
            first,
            full_indices,
            partial_indices,
            full,
            partial,
            whole_low,
            whole_high,
            CHUNK,
        )
