"""Selection of blocks from the output of `sweep`: shares, their weighted mean, one bit per block.

This is a launch of its own. In the sweep's programs, of which few fit on a multiprocessor, this
work spent most of its time waiting for memory.
"""

import triton
import triton.language as tl

from cab_hf.ops.attention.tiles import tanh

# key blocks per step of a row, whole words of bits; and the warps of a program
CHUNK, WARPS = 64, 1
# bytes that a lane loads at a time
BYTES_OF_A_LOAD = tl.constexpr(16)
# arguments whose values must not cause another compilation: those shared with the sweep, then the
# rest
PLACES = ["columns", "all_columns", "begin", "start", "heads", "q_blocks"]
NUMBERS = ["least_mass", "share", "kv_heads", "kv_blocks", "words", "bounds_plane"]
NUMBERS += ["typical_columns", "outlier_columns", "all_typical_columns", "all_outlier_columns"]


@triton.jit
def scratch_of(
    scratch, plane, tile, begin, columns, all_columns, ROWS: tl.constexpr, GROWTH: tl.constexpr
):  # fmt: skip
    """Return a pointer to the first logit of a tile of rows."""
    before = (tile - begin) * all_columns
    if GROWTH > 0:
        before = GROWTH * (tile * (tile + 1) - begin * (begin + 1)) // 2
    return scratch + (plane.to(tl.int64) * columns + before) * ROWS


@triton.jit
def capped(logit, softcap):
    """Return `reference.capped`; -inf stays -inf."""
    if softcap is not None:
        logit = tl.where(logit == float("-inf"), logit, softcap * tanh(logit / softcap))
    return logit


@triton.jit
def _shares(
    samples, softcap, line, logits, begins, first, last, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COUNT: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the maximum and the sum of the shares that the samples of a query block give.

    Args:
        line: The query block.
        logits: Pointer to the logits of its samples, [steps, ROWS, BLOCKS].
        begins: The first of CHUNK key blocks.
        first, last: Range of sampled keys that some sample sees. The scratch has no other steps.

    Returns:
        Two tensors [CHUNK], one number per key block.
    """
    STEP: tl.constexpr = BLOCKS * KEY_BLOCK
    row = line * COUNT + tl.arange(0, COUNT)
    scale = tl.load(samples[1] + row)
    norm = tl.load(samples[2] + row)
    if BLOCKS * 2 >= BYTES_OF_A_LOAD:
        # [COUNT, CHUNK]: a lane holds neighbouring key blocks of several samples
        column = begins + tl.arange(0, CHUNK)
        step = column // BLOCKS
        there = (step >= first // STEP) & (step <= last // STEP)
        cell = step[None, :] * (ROWS * BLOCKS) + (column % BLOCKS)[None, :]
        cell += tl.arange(0, COUNT)[:, None] * BLOCKS
        top = tl.load(logits + cell, mask=there[None, :], other=float("-inf")).to(tl.float32)
        share = tl.exp2(capped(top * scale[:, None], softcap) - norm[:, None])
        return tl.max(share, 0), tl.sum(share, 0)
    # [steps, COUNT * BLOCKS]: a lane holds samples of few key blocks
    step = begins // BLOCKS + tl.arange(0, CHUNK // BLOCKS)
    there = (step >= first // STEP) & (step <= last // STEP)
    cell = step[:, None] * (ROWS * BLOCKS) + tl.arange(0, COUNT * BLOCKS)[None, :]
    top = tl.load(logits + cell, mask=there[:, None], other=float("-inf")).to(tl.float32)
    top = tl.reshape(top, (step.shape[0], COUNT, BLOCKS))
    share = tl.exp2(capped(top * scale[None, :, None], softcap) - norm[None, :, None])
    return tl.reshape(tl.max(share, 1), (CHUNK,)), tl.reshape(tl.sum(share, 1), (CHUNK,))


@triton.jit
def _seen_by(samples, line, COUNT: tl.constexpr):
    """Return the first and last key that samples of a block see, and the number that see any."""
    row = line * COUNT + tl.arange(0, COUNT)
    last = tl.load(samples[4] + row)
    first = tl.where(last >= 0, tl.load(samples[3] + row), 2147483647)
    return tl.min(first, 0), tl.max(last, 0), tl.sum((last >= 0).to(tl.float32), 0)


@triton.jit(do_not_specialize=[*PLACES[2:], *NUMBERS])
def _keep_kernel(
    typical,
    outliers,
    bounds,
    marked,
    tails,
    bits,
    counts,
    scores,
    softcap,
    typical_scratch,
    outlier_scratch,
    typical_columns,
    outlier_columns,
    all_typical_columns,
    all_outlier_columns,
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
    TYPICAL: tl.constexpr,
    OUTLIERS: tl.constexpr,
    TYPICAL_Q_BLOCKS: tl.constexpr,
    OUTLIER_Q_BLOCKS: tl.constexpr,
    TYPICAL_KEY_BLOCK: tl.constexpr,
    OUTLIER_KEY_BLOCK: tl.constexpr,
    TYPICAL_STEP: tl.constexpr,
    OUTLIER_STEP: tl.constexpr,
    TYPICAL_GROWTH: tl.constexpr,
    OUTLIER_GROWTH: tl.constexpr,
    WEIGHT: tl.constexpr,
    THRESHOLD_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write the bitmap of one query block of a head from the logits of its samples.

    ``begin`` is the first query block of the launch.
    """
    TYPICAL_ROWS: tl.constexpr = TYPICAL_Q_BLOCKS * TYPICAL
    plane = tl.program_id(1)
    # the longest rows start first
    block = begin + tl.num_programs(0) - 1 - tl.program_id(0)
    if block >= q_blocks:
        return
    line = plane.to(tl.int64) * q_blocks + block
    typical_logits = scratch_of(
        typical_scratch, plane, block // TYPICAL_Q_BLOCKS, begin // TYPICAL_Q_BLOCKS,
        typical_columns, all_typical_columns, TYPICAL_ROWS, TYPICAL_GROWTH,
    )  # fmt: skip
    typical_logits += block % TYPICAL_Q_BLOCKS * (TYPICAL * TYPICAL_STEP)
    first, last, num_samples = _seen_by(typical, line, TYPICAL)
    weight = num_samples * WEIGHT
    if OUTLIERS > 0:
        OUTLIER_ROWS: tl.constexpr = OUTLIER_Q_BLOCKS * OUTLIERS
        outlier_logits = scratch_of(
            outlier_scratch, plane, block // OUTLIER_Q_BLOCKS, begin // OUTLIER_Q_BLOCKS,
            outlier_columns, all_outlier_columns, OUTLIER_ROWS, OUTLIER_GROWTH,
        )  # fmt: skip
        outlier_logits += block % OUTLIER_Q_BLOCKS * (OUTLIERS * OUTLIER_STEP)
        outlier_first, outlier_last, num_samples = _seen_by(outliers, line, OUTLIERS)
        weight += num_samples
    at = (start + plane) // heads * q_blocks + block
    lowest = tl.load(bounds + at)
    highest = tl.load(bounds + bounds_plane + at)
    sinks = tl.load(bounds + 2 * bounds_plane + at)
    local = tl.load(bounds + 3 * bounds_plane + at)
    # a row with more keys spreads its attention over more blocks
    longer = tl.maximum((highest - lowest + 1) / THRESHOLD_BLOCKS, 1.0)
    weight = tl.maximum(weight, 1e-30) / longer
    needed = least_mass * weight
    if TAIL != "none":
        tail = tl.load(tails + at) != 0
    kv_plane = (start + plane) // heads * kv_heads + (start + plane) % heads // (heads // kv_heads)
    marked += kv_plane.to(tl.int64) * kv_blocks
    # index over all heads; the other indices count the heads of this launch
    own = (start + plane).to(tl.int64) * q_blocks + block
    found = 0
    for begins in range(lowest // CHUNK * CHUNK, highest + 1, CHUNK):
        most, mass = _shares(
            typical, softcap, line, typical_logits, begins, first, last, CHUNK, TYPICAL_STEP,
            TYPICAL_ROWS, TYPICAL, TYPICAL_KEY_BLOCK,
        )  # fmt: skip
        mass *= WEIGHT
        if OUTLIERS > 0:
            largest, shares = _shares(
                outliers, softcap, line, outlier_logits, begins, outlier_first, outlier_last, CHUNK,
                OUTLIER_STEP, OUTLIER_ROWS, OUTLIERS, OUTLIER_KEY_BLOCK,
            )  # fmt: skip
            mass += shares
            most = tl.maximum(most, largest)
        column = begins + tl.arange(0, CHUNK)
        # NaN, the mass if a scored query is not finite, is not below any threshold
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
