"""Which blocks are kept by what `sweep` leaves: shares, their weighted mean, a bit for each block.

A launch of its own: in the sweep's programs, few on a multiprocessor, it waited for memory longer
than for anything else.
"""

import triton
import triton.language as tl

from cab_hf.ops.attention.tiles import tanh

# key blocks of a row that are weighed at a time, whole words of bits, and by how many warps
CHUNK, WARPS = 64, 1
# arguments that are no reason to compile twice: those of the sweep, and others
PLACES = ["columns", "all_columns", "begin", "start", "heads", "q_blocks"]
NUMBERS = ["least_mass", "share", "kv_heads", "kv_blocks", "words", "bounds_plane"]


@triton.jit
def scratch_of(
    scratch, plane, tile, begin, columns, all_columns, ALL: tl.constexpr, WIDER: tl.constexpr
):  # fmt: skip
    """Where the logits of a tile of rows begin, from column 0 on."""
    before = (tile - begin) * all_columns
    if WIDER > 0:
        before = WIDER * (tile * (tile + 1) - begin * (begin + 1)) // 2
    return scratch + (plane.to(tl.int64) * columns + before) * ALL


@triton.jit
def capped(logit, softcap):
    """`reference.capped`; what is not seen stays so."""
    if softcap is not None:
        logit = tl.where(logit == float("-inf"), logit, softcap * tanh(logit / softcap))
    return logit


@triton.jit
def _shares(
    rows, softcap, line, kept, step, there, BLOCKS: tl.constexpr, ALL: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """(largest, sum) of the shares that the scored rows of a query block have of some key blocks.

    [steps * BLOCKS] each. ``kept`` is where the logits of the query block ``line`` begin.
    """
    row = line * COUNT + tl.arange(0, COUNT)
    scale = tl.load(rows.scale + row)[None, :, None]
    norm = tl.load(rows.norm + row)[None, :, None]
    cell = step[:, None] * (ALL * BLOCKS) + tl.arange(0, COUNT * BLOCKS)[None, :]
    top = tl.load(kept + cell, mask=there[:, None], other=float("-inf")).to(tl.float32)
    logit = capped(tl.reshape(top, (step.shape[0], COUNT, BLOCKS)) * scale, softcap)
    share = tl.exp2(logit - norm)
    size: tl.constexpr = step.shape[0] * BLOCKS
    return tl.reshape(tl.max(share, 1), (size,)), tl.reshape(tl.sum(share, 1), (size,))


@triton.jit
def _seen_by(rows, line, COUNT: tl.constexpr):
    """The first and the last key that rows of a query block see, and how many see any."""
    row = line * COUNT + tl.arange(0, COUNT)
    last = tl.load(rows.last + row)
    first = tl.where(last >= 0, tl.load(rows.first + row), 2147483647)
    return tl.min(first, 0), tl.max(last, 0), tl.sum((last >= 0).to(tl.float32), 0)


@triton.jit(do_not_specialize=[*PLACES, *NUMBERS])
def _keep_kernel(
    outliers,
    typical,
    bounds,
    marked,
    tails,
    bits,
    counts,
    scores,
    softcap,
    scratch,
    columns,
    all_columns,
    least_mass,
    share,
    begin,
    start,
    heads,
    kv_heads,
    q_blocks,
    kv_blocks,
    words,
    bounds_plane,
    OUTLIERS: tl.constexpr,
    TYPICAL: tl.constexpr,
    TOGETHER: tl.constexpr,
    WEIGHT: tl.constexpr,
    THRESHOLD_BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDER: tl.constexpr,
    CHUNK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Find the key blocks that one query block of a head keeps, by the logits of the sweep."""
    ALL: tl.constexpr = TOGETHER * (OUTLIERS + TYPICAL)
    plane = tl.program_id(1)
    # the longest rows first
    block = begin * TOGETHER + tl.num_programs(0) - 1 - tl.program_id(0)
    if block >= q_blocks:
        return
    line = plane.to(tl.int64) * q_blocks + block
    tile = block // TOGETHER
    even = scratch_of(scratch, plane, tile, begin, columns, all_columns, ALL, WIDER)
    odd = even + (TOGETHER * TYPICAL + block % TOGETHER * OUTLIERS) * BLOCKS
    even += block % TOGETHER * (TYPICAL * BLOCKS)
    first, last, real = _seen_by(typical, line, TYPICAL)
    weight = real * WEIGHT
    if OUTLIERS > 0:
        odd_first, odd_last, real = _seen_by(outliers, line, OUTLIERS)
        first = tl.minimum(first, odd_first)
        last = tl.maximum(last, odd_last)
        weight += real
    at = (start + plane) // heads * q_blocks + block
    lowest = tl.load(bounds + at)
    highest = tl.load(bounds + bounds_plane + at)
    sinks = tl.load(bounds + 2 * bounds_plane + at)
    local = tl.load(bounds + 3 * bounds_plane + at)
    # a row of more keys spreads its attention over more blocks
    longer = tl.maximum((highest - lowest + 1) / THRESHOLD_BLOCKS, 1.0)
    weight = tl.maximum(weight, 1e-30) / longer
    needed = least_mass * weight
    if TAIL != "none":
        tail = tl.load(tails + at) != 0
    kv_plane = (start + plane) // heads * kv_heads + (start + plane) % heads // (heads // kv_heads)
    marked += kv_plane.to(tl.int64) * kv_blocks
    # of all heads, where the other lines count those at hand
    own = (start + plane).to(tl.int64) * q_blocks + block
    found = 0
    for begins in range(lowest // CHUNK * CHUNK, highest + 1, CHUNK):
        # what no scored row sees is not in the scratch
        step = begins // BLOCKS + tl.arange(0, CHUNK // BLOCKS)
        there = (step >= first // STEP) & (step <= last // STEP)
        most, mass = _shares(typical, softcap, line, even, step, there, BLOCKS, ALL, TYPICAL)
        mass *= WEIGHT
        if OUTLIERS > 0:
            largest, shares = _shares(
                outliers, softcap, line, odd, step, there, BLOCKS, ALL, OUTLIERS
            )
            mass += shares
            most = tl.maximum(most, largest)
        column = begins + tl.arange(0, CHUNK)
        # NaN, the mass where a scored query is not finite, is not below any threshold
        keep = ~(mass < needed) | (most >= share)
        is_marked = tl.load(marked + column, mask=column < kv_blocks, other=0) != 0
        if scores is not None:
            score = tl.where(most >= share, 1 + most, tl.minimum(mass / weight, 1.0))
            score = tl.where(mass == mass, score, 1.0)
            score = tl.where(is_marked, float("inf"), score)
            tl.store(scores + line * kv_blocks + column, score, mask=column < kv_blocks)
        keep |= is_marked | (column < sinks) | (column >= local)
        if TAIL == "listed":
            keep |= tail
        keep &= (column >= lowest) & (column <= highest)
        if TAIL == "named":
            keep &= tail == 0
        found += tl.sum(keep.to(tl.int32), 0)
        word = tl.reshape(keep.to(tl.int32), (CHUNK // 32, 32)) << tl.arange(0, 32)[None, :]
        place = begins // 32 + tl.arange(0, CHUNK // 32)
        tl.store(bits + own * words + place, tl.sum(word, 1), mask=place < words)
    tl.store(counts + own, found)
