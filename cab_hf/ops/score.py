"""Scores of the block graph on the GPU: logits, affinity, two-hop paths, column strengths.

The definitions are `reference.block_logits`, `block_log_mass`, `two_hop` and `forman_curvature`.
Everything here works on a run of heads, so that memory stays bounded however long the text is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.ops.coarsen import QuerySummary
from cab_hf.ops.reference import KeySummary
from cab_hf.plan import Spans

# affinities are at most 1; float16 keeps 11 bits of anything above 2^-29 when they are scaled up
AFFINITY_SCALE = 32768.0
# the most columns of a row of scores that a program selects from at a time
ROW_CHUNK = 128
# a row of scores has room for a multiple of so many columns
COLUMNS = tl.constexpr(32)
# rows, and columns at a time, that one program turns into affinities
AFFINITY_ROWS = 4
AFFINITY_CHUNK = 128
AFFINITY_WARPS = 4


class Scores(NamedTuple):
    """The scores of some heads, float32, as kernels take them.

    Entries that a row may not see mean nothing.

    Attributes:
        direct: [heads, M_q, width], upper logits (clusters) or mean logits (top-k); the first M_k
            columns are key blocks.
        estimate: the same shape, half of upper plus mean logits (clusters); None for top-k.
        shares: the same shape, what the outlier queries of a row give, of any total, where these
            are scored; ``direct`` then is the most that one of them gives.
        log_sum: [heads, M_q], log-sum-exp of a row of ``direct``; None without curvature.
        hops: [heads, M_q, coarse width], two-hop weights on the query grid; None without curvature.
        strength: like ``direct``, column strengths; None without Forman.
    """

    direct: Tensor
    estimate: Tensor | None
    log_sum: Tensor | None
    hops: Tensor | None
    strength: Tensor | None
    shares: Tensor | None = None


class HeadChunk(NamedTuple):
    """The heads whose turn it is, and how many blocks they have; kernels are given `packed`.

    Attributes:
        rows, rows_plane: `QuerySummary.rows`, and the stride of its first dimension.
        start, count: the first of them, and how many, batch rows and heads counted together.
        heads, kv_heads: of a batch row.
        width, coarse_width: room for the columns of a row on the key and on the query grid.
    """

    rows: Tensor
    rows_plane: int
    start: int
    count: int
    heads: int
    kv_heads: int
    q_blocks: int
    kv_blocks: int
    width: int
    coarse_width: int

    @property
    def packed(self) -> HeadChunk:
        """As an argument of kernels, which call `unpacked`."""
        rooms = self.width // COLUMNS.value, self.coarse_width // COLUMNS.value
        return HeadChunk(self.rows, *map(odd, (*self[1:-2], *rooms)))


def odd(number: int) -> int:
    """A ``number`` from 0 up for a kernel that is not to be compiled anew for some numbers.

    Triton compiles kernels anew for 1 and for multiples of 16; inside of tuples it does so whatever
    ``do_not_specialize`` says. Numbers that differ with the length of a text go as odd ones, which
    are neither, and kernels take them by `number_of`.
    """
    return 2 * number + 3


def turns(
    rows: Tensor, shape: tuple[int, int, int, int, int], config: CabConfig, bytes_at_most: int
) -> Iterator[HeadChunk]:
    """All heads, as many in each turn as have scores of no more than that many bytes.

    Args:
        rows: `QuerySummary.rows`.
        shape: batch, heads, KV heads, query blocks, key blocks.
    """
    batch, heads, kv_heads, q_blocks, kv_blocks = shape
    coarse = triton.cdiv(kv_blocks * config.key_block, config.query_block)
    chunk = row_chunk(kv_blocks)
    width = chunk * triton.cdiv(kv_blocks, chunk)
    coarse_width = COLUMNS.value * triton.cdiv(coarse, COLUMNS.value)
    planes = 1 + (config.select == "clusters") + (config.curvature == "forman")
    a_head = 4 * q_blocks * (planes * width + 2 * config.curved * coarse_width)
    step = triton.cdiv(batch * heads, triton.cdiv(batch * heads * a_head, bytes_at_most))
    for start in range(0, batch * heads, step):
        count = min(step, batch * heads - start)
        sizes = (heads, kv_heads, q_blocks, kv_blocks, width, coarse_width)
        yield HeadChunk(rows, rows.stride(0), start, count, *sizes)


def block_scores(
    turn: HeadChunk,
    queries: QuerySummary,
    keys: KeySummary,
    scale: float,
    config: CabConfig,
    spans: Spans,
    half: bool,
) -> Scores:
    """The scores of the heads of ``turn``; ``queries`` and ``keys`` are those of all heads.

    ``half`` takes one tf32 product, as is enough for summaries of 16-bit inputs: it has the 11 bits
    of float16, and the range of float32.
    """
    dim = queries.vectors.shape[3]
    clusters = config.select == "clusters"
    blocks = {"QUERY_BLOCK": config.query_block, "KEY_BLOCK": config.key_block}
    shape = turn.count, turn.q_blocks, turn.width
    direct = queries.vectors.new_empty(shape, dtype=torch.float32)
    estimate = torch.empty_like(direct) if clusters else None
    block_d = max(16, triton.next_power_of_2(dim))
    block_m, block_n, steps, warps, stages = _score_tile(turn.q_blocks, block_d, half)
    tiles = triton.cdiv(turn.q_blocks, block_m * steps) * triton.cdiv(turn.kv_blocks, block_n)
    _block_scores_kernel[(tiles * turn.count,)](
        queries.vectors,
        keys.planes,
        keys.planes.stride(0),
        direct,
        estimate,
        scale,
        turn.packed,
        **blocks,
        D=dim,
        BLOCK_D=block_d,
        MINMAX=keys.minmax,
        CLUSTERS=clusters,
        CONSECUTIVE=spans.consecutive,
        PRECISION="tf32" if half else "tf32x3",
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STEPS=steps,
        num_warps=warps,
        num_stages=stages,
    )
    # affinities of 16-bit inputs come from 16-bit operands, and the products may take them so
    return Scores(direct, estimate, *block_graph(turn, direct, half and clusters, config, spans))


def block_graph(
    turn: HeadChunk, direct: Tensor, half: bool, config: CabConfig, spans: Spans
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(log_sum, hops, strength) of `Scores` over their ``direct``, which stays as it is.

    ``half`` keeps affinities in float16.
    """
    if not config.curved:
        return None, None, None
    blocks = {"QUERY_BLOCK": config.query_block, "KEY_BLOCK": config.key_block}
    clusters = config.select == "clusters"
    log_sum = direct.new_empty(turn.count, turn.q_blocks)
    shape = turn.count, turn.q_blocks, turn.coarse_width
    affinity = direct.new_empty(shape, dtype=torch.float16 if half else torch.float32)
    _affinity_kernel[(triton.cdiv(turn.q_blocks, AFFINITY_ROWS) * turn.count,)](
        direct,
        log_sum,
        affinity,
        AFFINITY_SCALE if half else 1.0,
        turn.packed,
        **blocks,
        CLUSTERS=clusters,
        ROWS=AFFINITY_ROWS,
        CHUNK=AFFINITY_CHUNK,
        num_warps=AFFINITY_WARPS,
    )
    hops = direct.new_empty(shape)
    block, depth, warps, stages = _hop_tile(turn.q_blocks, half)
    tiles = triton.cdiv(turn.q_blocks, block) * triton.cdiv(turn.coarse_width, block)
    _two_hop_kernel[(tiles * turn.count,)](
        affinity,
        hops,
        AFFINITY_SCALE**-2 if half else 1.0,
        turn.packed,
        QUERY_BLOCK=config.query_block,
        PREFIX=spans.q_length != spans.kv_length,
        CONSECUTIVE=spans.consecutive,
        BLOCK_M=block,
        BLOCK_N=block,
        BLOCK_K=depth,
        num_warps=warps,
        num_stages=stages,
    )
    strength = None
    if config.curvature == "forman":
        strength = torch.empty_like(direct)
        _column_strength_kernel[(triton.cdiv(turn.kv_blocks, 64), turn.count)](
            direct,
            log_sum,
            strength,
            turn.packed,
            KEY_BLOCK=config.key_block,
            CLUSTERS=clusters,
            BLOCK_M=32,
            BLOCK_N=64,
        )
    return log_sum, hops, strength


def _score_tile(q_blocks: int, block_d: int, half: bool) -> tuple[int, int, int, int, int]:
    """(rows, columns at a time, times, warps, stages) of a program of `_block_scores_kernel`."""
    if not half and block_d > 128:
        return 16, 16, 4, 4, 1
    if not half or block_d > 128:
        return 32, 32, 4, 4, 1
    if q_blocks <= 128:
        return 32, 64, 1, 4, 1
    return 64, 64, 8, 4, 3


def _hop_tile(q_blocks: int, half: bool) -> tuple[int, int, int, int]:
    """(rows and columns, depth, warps, stages) of a program of `_two_hop_kernel`."""
    block = 128 if half and q_blocks >= 512 else 64 if q_blocks > 64 else 32
    return block, 64 if half else 32, 4, 3


def row_chunk(kv_blocks: int) -> int:
    """Columns of a row of scores that a program selects from at a time; a row has whole ones."""
    return min(ROW_CHUNK, triton.next_power_of_2(max(kv_blocks, COLUMNS.value)))


@triton.jit
def unpacked(turn):
    """The `HeadChunk` of what `HeadChunk.packed` gives."""
    return HeadChunk(
        turn.rows,
        number_of(turn.rows_plane),
        number_of(turn.start),
        number_of(turn.count),
        number_of(turn.heads),
        number_of(turn.kv_heads),
        number_of(turn.q_blocks),
        number_of(turn.kv_blocks),
        # the compiler sees how wide loads may be
        number_of(turn.width) * COLUMNS,
        number_of(turn.coarse_width) * COLUMNS,
    )


@triton.jit
def number_of(odd):
    """The number that `odd` was given."""
    return (odd - 3) // 2


@triton.jit
def visible_range(rows, plane, mask, BLOCK: tl.constexpr):
    """First and last block of ``BLOCK`` tokens that rows of the plan see; (large, -1) for none."""
    first = tl.load(rows, mask=mask, other=2147483647)
    last = tl.load(rows + 3 * plane, mask=mask, other=-1)
    # division rounds towards zero
    return first // BLOCK, tl.where(last < 0, -1, last // BLOCK)


@triton.jit
def _place(rows, plane, mask, QUERY_BLOCK: tl.constexpr):
    """`RowSpans.places`: where rows stand on the query grid."""
    first = tl.load(rows + 2 * plane, mask=mask, other=0)
    # a row of padding has the largest number there is
    first = tl.where(tl.load(rows + 3 * plane, mask=mask, other=-1) < 0, 0, first)
    return first // QUERY_BLOCK


@triton.jit
def affinity_of(direct, log_sum, visible, CLUSTERS: tl.constexpr):
    """Edge weights of the block graph: softmax of upper logits, or rectified mean logits."""
    weight = tl.exp(direct - log_sum) if CLUSTERS else tl.where(direct > 0, direct, 0.0)
    return tl.where(visible, weight, 0.0)


@triton.jit
def _product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b; three tf32 products stand in for a float32 one."""
    if a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _block_scores_kernel(
    queries,
    keys,
    key_plane,
    direct,
    estimate,
    scale,
    turn,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MINMAX: tl.constexpr,
    CLUSTERS: tl.constexpr,
    CONSECUTIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
):
    turn = unpacked(turn)
    q_blocks, kv_blocks, width = turn.q_blocks, turn.kv_blocks, turn.width
    columns = tl.cdiv(kv_blocks, BLOCK_N)
    per_head = tl.num_programs(0) // turn.count
    mine = (tl.program_id(0) // per_head).to(tl.int64)
    tile = tl.program_id(0) % per_head
    plane = turn.start + mine
    b = plane // turn.heads
    kv_head = b * turn.kv_heads + plane % turn.heads // (turn.heads // turn.kv_heads)
    queries += plane * q_blocks * D
    j0 = tile % columns * BLOCK_N
    j = j0 + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_D)
    # [BLOCK_D, BLOCK_N]: keys stay, queries pass by
    keys += kv_head * kv_blocks * D
    key_tile = keys + j[None, :] * D + channel[:, None]
    there = (j < kv_blocks)[None, :] & (channel[:, None] < D)
    centre = tl.load(key_tile, mask=there, other=0.0)
    top = centre
    bottom = centre
    if MINMAX:
        top = tl.load(key_tile + key_plane, mask=there, other=0.0)
        bottom = tl.load(key_tile + 2 * key_plane, mask=there, other=0.0)
    first = tile // columns * BLOCK_M * STEPS
    end = tl.minimum(first + BLOCK_M * STEPS, q_blocks)
    if CONSECUTIVE:
        # rows before this one end left of column j0
        begins = tl.load(turn.rows + b * q_blocks + 2 * turn.rows_plane)
        earliest = (j0 * KEY_BLOCK - begins) // QUERY_BLOCK - 1
        first = tl.maximum(first, earliest // BLOCK_M * BLOCK_M)
    for i0 in range(first, end, BLOCK_M):
        i = i0 + tl.arange(0, BLOCK_M)
        inside = i < q_blocks
        # [BLOCK_M, BLOCK_D]
        query = tl.load(
            queries + i[:, None] * D + channel[None, :],
            mask=inside[:, None] & (channel[None, :] < D),
            other=0.0,
        )
        nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        mean = _product(query, centre, nothing, PRECISION)
        upper = mean
        if MINMAX:
            # sum over channels of max(q u, q l) = q+ u + q- l
            zero = tl.zeros_like(query)
            upper = _product(tl.where(query > 0, query, zero), top, nothing, PRECISION)
            upper = _product(tl.where(query > 0, zero, query), bottom, upper, PRECISION)
        place = (mine * q_blocks + i)[:, None] * width + j[None, :]
        # a row has room for whole chunks: what is behind its last block means nothing
        written = inside[:, None] & (j < width)[None, :]
        tl.store(direct + place, (upper if CLUSTERS else mean) * scale, mask=written)
        if CLUSTERS:
            tl.store(estimate + place, (upper + mean) * (0.5 * scale), mask=written)


@triton.jit
def _affinity_kernel(
    direct,
    log_sum,
    affinity,
    affinity_scale,
    turn,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CLUSTERS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Edge weights of some rows summed to the query grid, zeros where a row sees nothing."""
    turn = unpacked(turn)
    q_blocks, width, coarse_width = turn.q_blocks, turn.width, turn.coarse_width
    # the longest rows first
    tile = tl.num_programs(0) // turn.count - 1 - tl.program_id(0) // turn.count
    mine = (tl.program_id(0) % turn.count).to(tl.int64)
    i = tile * ROWS + tl.arange(0, ROWS)
    inside = i < q_blocks
    rows = turn.rows + ((turn.start + mine) // turn.heads * q_blocks + i)
    low, high = visible_range(rows, turn.rows_plane, inside, KEY_BLOCK)
    low = low[:, None]
    high = high[:, None]
    direct += ((mine * q_blocks + i) * width)[:, None]
    ratio: tl.constexpr = QUERY_BLOCK // KEY_BLOCK if QUERY_BLOCK > KEY_BLOCK else 1
    spread: tl.constexpr = KEY_BLOCK // QUERY_BLOCK if KEY_BLOCK > QUERY_BLOCK else 1
    end = tl.max(tl.max(high, 1), 0) + 1

    # [ROWS, CHUNK]
    sums = tl.zeros([ROWS], tl.float32)
    if CLUSTERS:
        peak = tl.full([ROWS, CHUNK], -1e30, tl.float32)
        total = tl.zeros([ROWS, CHUNK], tl.float32)
        for j0 in range(tl.min(tl.min(low, 1), 0) // CHUNK * CHUNK, end, CHUNK):
            j = (j0 + tl.arange(0, CHUNK))[None, :]
            visible = (j >= low) & (j <= high)
            score = tl.load(direct + j, mask=visible, other=float("-inf"))
            new_peak = tl.maximum(peak, score)
            total = total * tl.exp(peak - new_peak) + tl.exp(score - new_peak)
            peak = new_peak
        top = tl.max(peak, 1)
        mass = tl.sum(total * tl.exp(peak - top[:, None]), 1)
        sums = top + tl.log(tl.maximum(mass, 1e-30))
    tl.store(log_sum + mine * q_blocks + i, sums, mask=inside)

    affinity += ((mine * q_blocks + i) * coarse_width)[:, None]
    for t0 in range(0, coarse_width, CHUNK):
        t = (t0 + tl.arange(0, CHUNK))[None, :]
        weight = tl.zeros([ROWS, CHUNK], tl.float32)
        if t0 * ratio // spread < end:
            for step in tl.static_range(ratio):
                j = t * ratio // spread + step
                visible = (j >= low) & (j <= high)
                score = tl.load(direct + j, mask=visible, other=0.0)
                edge = affinity_of(score, sums[:, None], visible, CLUSTERS)
                # `reference.finite_weights`
                weight += tl.where(edge < float("inf"), edge, 0.0)
        written = inside[:, None] & (t < coarse_width)
        tl.store(affinity + t, weight * (affinity_scale / spread), mask=written)


@triton.jit
def _two_hop_kernel(
    affinity,
    hops,
    product_scale,
    turn,
    QUERY_BLOCK: tl.constexpr,
    PREFIX: tl.constexpr,
    CONSECUTIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    turn = unpacked(turn)
    q_blocks, width, rows_plane = turn.q_blocks, turn.coarse_width, turn.rows_plane
    pid = tl.program_id(0)
    mine = pid % turn.count
    columns = tl.cdiv(width, BLOCK_N)
    # the longest rows first
    tile = tl.num_programs(0) // turn.count - 1 - pid // turn.count
    rows = turn.rows + (turn.start + mine) // turn.heads * q_blocks
    i = tile // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    j0 = tile % columns * BLOCK_N
    j = j0 + tl.arange(0, BLOCK_N)
    inside = i < q_blocks
    low, high = visible_range(rows + i, rows_plane, inside, QUERY_BLOCK)
    begin = 0
    end = q_blocks
    if CONSECUTIVE:
        # where row 0 stands on the query grid: 0 unless a prefix came before
        base = 0
        if PREFIX:
            base = _place(rows, rows_plane, True, QUERY_BLOCK)
        end = tl.minimum(tl.max(high, 0) + 1 - base, q_blocks)
        # rows before this one end left of column j0
        begin = tl.maximum(j0 - base - 1, tl.minimum(tl.min(low, 0) - base, q_blocks))
        begin = tl.maximum(begin, 0) // BLOCK_K * BLOCK_K

    affinity += mine.to(tl.int64) * q_blocks * width
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for t0 in range(begin, end, BLOCK_K):
        t = t0 + tl.arange(0, BLOCK_K)
        known = t < q_blocks
        place = base + t if CONSECUTIVE else _place(rows + t, rows_plane, known, QUERY_BLOCK)
        # [BLOCK_M, BLOCK_K]: from row i to the column where row t stands
        to_row = tl.load(
            affinity + i.to(tl.int64)[:, None] * width + place[None, :],
            mask=inside[:, None] & (known & (place < width))[None, :],
            other=0.0,
        )
        # [BLOCK_K, BLOCK_N]: from row t to column j
        onward = tl.load(
            affinity + t.to(tl.int64)[:, None] * width + j[None, :],
            mask=known[:, None] & (j < width)[None, :],
            other=0.0,
        )
        total = _product(to_row, onward, total, "tf32x3")
    place = (mine.to(tl.int64) * q_blocks + i)[:, None] * width + j[None, :]
    seen = inside[:, None] & (j[None, :] <= tl.max(high, 0)) & (j[None, :] < width)
    tl.store(hops + place, total * product_scale, mask=seen)


@triton.jit
def _column_strength_kernel(
    direct,
    log_sum,
    strength,
    turn,
    KEY_BLOCK: tl.constexpr,
    CLUSTERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    turn = unpacked(turn)
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = tl.program_id(1).to(tl.int64)
    q_blocks, width = turn.q_blocks, turn.width
    rows = turn.rows + (turn.start + mine) // turn.heads * q_blocks
    above = tl.zeros([BLOCK_N], tl.float32)
    for i0 in range(0, q_blocks, BLOCK_M):
        i = i0 + tl.arange(0, BLOCK_M)
        inside = i < q_blocks
        low, high = visible_range(rows + i, turn.rows_plane, inside, KEY_BLOCK)
        visible = (j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None])
        place = (mine * q_blocks + i)[:, None] * width + j[None, :]
        score = tl.load(direct + place, mask=visible, other=0.0)
        sums = tl.load(log_sum + mine * q_blocks + i, mask=inside, other=0.0)
        weight = affinity_of(score, sums[:, None], visible, CLUSTERS)
        tl.store(strength + place, above[None, :] + tl.cumsum(weight, 0), mask=visible)
        above += tl.sum(weight, 0)
