"""Choose by rows on the GPU, from q and scored keys to `BlockLists`.

The definition is `cab_hf.predictors.rows.choose_by_reference`. No step waits for the device, and no
shape depends on data, except where lists would be larger than `LISTS_AT_MOST`.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.ops import rows
from cab_hf.ops.sweep import Forced, RowRules, kept_blocks
from cab_hf.plan import BlockLists, Spans, crossed_blocks

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256
# bytes of lists that are made as wide as a row could ever need; wider ones are measured first,
# which waits for the device once
LISTS_AT_MOST = 2 << 30
# columns that a program turns into lists at a time
CHUNK = 128


def unavailable(x: Tensor) -> str | None:
    """Why q or k is not for the kernels, as half a sentence; None when it is."""
    if not x.is_cuda:
        return f"runs on CUDA devices only, not {x.device.type}"
    if x.dtype not in DTYPES:
        return f"takes float16, bfloat16 and float32, not {x.dtype}"
    if x.shape[-1] > LARGEST_HEAD_DIM:
        return f"takes head dims up to {LARGEST_HEAD_DIM}, not {x.shape[-1]}"
    return None


def keys_of(k: Tensor, channels: tuple[int, ...]) -> list[Tensor]:
    """`rows.scored_keys` of k [B, H_kv, N_k, D], in what its device multiplies."""
    with on_device_of(k):
        made = rows.scored_keys(k, channels, rows.scored_dtype(k))
    return [x for x in made if x is not None]


def choose(
    q: Tensor,
    keys: Tensor,
    exponents: Tensor | None,
    spans: Spans,
    scale: float,
    channels: tuple[int, ...],
    config: CabConfig,
) -> tuple[BlockLists, BlockLists]:
    """(full, partial) lists of the key blocks that each block of q [B, H, N_q, D] attends.

    Rows of ``spans.tail_rows``, where there are any, list nothing: the plan is to name them. Safe
    in a CUDA graph once the channels have been on the device.

    Args:
        keys, exponents: those of `keys_of`, for the same ``channels``.
    """
    batch, heads, length, _ = q.shape
    blocks = config.query_block, config.key_block
    tail = config.dense_tail_blocks * config.query_block, config.query_block
    shape = batch, heads, triton.cdiv(length, config.query_block)
    kv_blocks = triton.cdiv(keys.shape[2], config.key_block)
    with on_device_of(q):
        seen = spans.rows(config.query_block)
        bounds = torch.stack((seen.min_first, seen.max_first, seen.min_last, seen.max_last))
        mass = torch.full_like(seen.max_last, config.mass_threshold, dtype=torch.float32)
        rules = RowRules(bounds, mass, spans.tail(*tail) if spans.has_tail(*tail) else None)
        named = spans.documents is not None
        forced = Forced(config.sink_blocks, config.local_blocks, config.share_threshold, not named)
        parts = (0, batch * heads), config.query_block
        odd, scored = None, (spans, parts[0], scale, config.query_block)
        if count := config.exact_queries:
            at = rows.outliers(q, spans, *parts, count)
            odd = rows.scored_rows(q, *scored, count, channels, keys.dtype, at)
        typical = rows.scored_rows(q, *scored, config.typical_queries, channels, keys.dtype)
        bits = torch.empty(*shape, triton.cdiv(kv_blocks, 32), device=q.device, dtype=torch.int32)
        counts = bits.new_empty(shape)
        whole = length == keys.shape[2] and spans.consecutive
        given = keys, exponents, rules, forced, 0, heads, blocks, whole
        kept_blocks(odd, typical, *given, bits, counts)
        room = kv_blocks
        if 4 * math.prod(shape) * room > LISTS_AT_MOST and not _capturing(q):
            room = max(1, int(counts.max()))
        crossed = min(crossed_blocks(*blocks) if spans.aligned else room, room)
        made = [
            BlockLists(torch.empty_like(counts), bits.new_empty(*shape, x)) for x in (room, crossed)
        ]
        fill_lists(bits, bounds, *made, config.key_block)
    return tuple(made)


def on_device_of(x: Tensor) -> torch.cuda.device | nullcontext:
    """Triton launches on the current device: make it that of ``x``."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()


def _capturing(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def fill_lists(
    bits: Tensor, spans: Tensor, full: BlockLists, partial: BlockLists, key_block: int
) -> None:
    """Fill the lists of every row, [B, H, M_q], with the blocks whose bits are set, ascending.

    Args:
        bits: int32 [B, H, M_q, W]: bit j % 32 of word j // 32 says that a row keeps block j.
        spans: int32 [4, B, M_q], the fields min_first, max_first, min_last, max_last of `RowSpans`.
        full, partial: with room for what a row keeps of each. Blocks that all queries of a row see
            wholly are full.
    """
    heads, q_blocks, words = bits.shape[1:]
    _lists_kernel[(full.counts.numel(),)](
        bits,
        spans,
        spans.stride(0),
        full.counts,
        full.indices,
        full.width,
        partial.counts,
        partial.indices,
        partial.width,
        heads,
        q_blocks,
        words,
        KEY_BLOCK=key_block,
        CHUNK=CHUNK,
        num_warps=1,
    )


@triton.jit(
    do_not_specialize=["spans_plane", "full_width", "partial_width", "heads", "q_blocks", "words"]
)
def _lists_kernel(
    bits,
    spans,
    spans_plane,
    full_counts,
    full,
    full_width,
    partial_counts,
    partial,
    partial_width,
    heads,
    q_blocks,
    words,
    KEY_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = spans + row // (heads * q_blocks) * q_blocks + row % q_blocks
    last = tl.load(at + 3 * spans_plane)
    low = tl.load(at) // KEY_BLOCK
    high = tl.where(last < 0, -1, last // KEY_BLOCK)
    # what every query of the row sees wholly
    whole_low = tl.cdiv(tl.load(at + spans_plane), KEY_BLOCK)
    whole_high = (tl.load(at + 2 * spans_plane) + 1) // KEY_BLOCK - 1
    bits += row * words
    full += row * full_width
    partial += row * partial_width
    full_count = 0
    partial_count = 0
    for first in range(low // CHUNK * CHUNK, high + 1, CHUNK):
        column = first + tl.arange(0, CHUNK)
        there = (column >= low) & (column <= high)
        word = tl.load(bits + column // 32, mask=there, other=0)
        kept = there & (((word >> (column % 32)) & 1) != 0)
        whole = (column >= whole_low) & (column <= whole_high)
        # both ranks in one scan: full in the lower half, partial in the upper
        step = tl.where(kept, tl.where(whole, 1, 65536), 0)
        rank = tl.cumsum(step, 0) - 1
        tl.store(full + full_count + (rank & 65535), column, mask=kept & whole)
        behind = partial_count + ((rank + 1) >> 16) - 1
        tl.store(partial + behind, column, mask=kept & (whole == 0))
        added = tl.sum(step, 0)
        full_count += added & 65535
        partial_count += added >> 16
    tl.store(full_counts + row, full_count)
    tl.store(partial_counts + row, partial_count)
