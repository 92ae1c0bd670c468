"""Attention under a plan by flash-attn-4's kernels: the FLASH backend of the flex engine.

What FlexAttention's own FLASH backend generates is called here directly: no graph is compiled for
every shape, the plan's compact lists are taken as they are, and tiles are chosen for the plan's
blocks. flash-attn-4 walks key blocks of one tile and query blocks of whole tiles; lists of wider
key blocks are split to its tile. In the backward, blocks of 64 keys that come in pairs are walked
as one of 128, which costs less, and gradients of the two walks are added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor

from cab_hf.ops.transpose import transpose
from cab_hf.plan import BlockLists, BlockPlan

PACKAGE = "flash-attn-4"
# the first whose private interface was seen to fit
LEAST_VERSION = "4.0.0b36"
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
# head dims whose gradients were seen to be right; those of 80, for one, are not
TRAINED_HEAD_DIMS = (64, 96, 128, 192, 256)
HOPPER = 9
BLACKWELL = (10, 11)
# what one step of the Blackwell kernel takes under block sparsity
BLACKWELL_BLOCKS = (256, 128)
# tiles are multiples of the 64 rows of a Hopper matrix instruction
TILE = 64
# above this head dim a tile of 128 keys does not fit beside its pipeline
WIDE_HEAD_DIM = 128
# How many pairs a query block must have for a second walk to pay, on average. On an H200 key blocks
# of 64 are walked at 376 TFLOP/s and of 128 at 544, which saves 17 ns a pair of 128 queries, 128
# channels; reading and adding gradients once more moves 460 KB for these, which is 115 ns.
PAIRS_A_ROW = 7
BLANK_ROWS = 32
CHUNK = 128


def unavailable(
    capability: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    training: bool,
    query_block: int,
    key_block: int,
) -> str | None:
    """Why FLASH cannot run this on a GPU of ``capability``, as half a sentence; None if it can."""
    blackwell = capability[0] in BLACKWELL
    if capability[0] != HOPPER and not blackwell:
        return f"runs on sm_90, sm_100 and sm_110, not on sm_{capability[0]}{capability[1]}"
    if dtype not in DTYPES:
        return f"takes float16 and bfloat16, not {dtype}"
    widest = WIDE_HEAD_DIM if blackwell else MAX_HEAD_DIM
    if head_dim > widest or head_dim % 8:
        return f"takes head dims to {widest} that are multiples of 8, not {head_dim}"
    rows, columns = BLACKWELL_BLOCKS if blackwell else (TILE, TILE)
    if query_block % rows or key_block % columns:
        return f"takes multiples of {rows} x {columns} as blocks, not {query_block} x {key_block}"
    if training and blackwell:
        return "trains on Hopper"
    if training and head_dim not in TRAINED_HEAD_DIMS:
        known = ", ".join(map(str, TRAINED_HEAD_DIMS))
        return f"trains with head dims {known}, not {head_dim}"
    return _missing()


@cache
def _missing() -> str | None:
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return f"needs the package {PACKAGE}, which is not installed"
    if Version(found) < Version(LEAST_VERSION):
        return f"needs {PACKAGE} {LEAST_VERSION} or later, not {found}"
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) under ``plan``; see `reference.attention`. Gradients flow through out."""
    return _forward_op(
        q,
        k,
        v,
        plan.full.counts,
        plan.full.indices,
        plan.partial.counts,
        plan.partial.indices,
        plan.spans.first,
        plan.spans.last,
        plan.query_block,
        plan.key_block,
        scale,
    )


@torch.library.custom_op("cab_hf::flash_attention", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    full_counts: Tensor,
    full_indices: Tensor,
    partial_counts: Tensor,
    partial_indices: Tensor,
    first: Tensor,
    last: Tensor,
    query_block: int,
    key_block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    flash = _flash()
    batch, heads, length, dim = q.shape
    kv_heads, kv_length = k.shape[1:3]
    tile = key_tile(dim, key_block)
    lists = [
        finer_columns(part, key_block // tile, -(-kv_length // tile))
        for part in (
            BlockLists(partial_counts, partial_indices),
            BlockLists(full_counts, full_indices),
        )
    ]
    out = q.new_empty(batch, length, heads, v.shape[3])
    tensors = [*(x.transpose(1, 2) for x in (q, k, v)), out]
    spans = [first, last]
    # a tile of one group's heads reads keys once for all of them; with narrow tiles it is no gain
    packed = tile > TILE and kv_heads < heads
    if packed and lists[0].counts.shape[1] == kv_heads and (batch == 1 or kv_heads == 1):
        tensors = [_heads_as_batch(x, kv_heads) for x in tensors]
        lists = [_each(part, lambda x: x.flatten(0, 1).unsqueeze(1)) for part in lists]
        spans = [x.repeat_interleave(kv_heads, dim=0) for x in spans]
    else:
        lists = [part.for_heads(heads) for part in lists]
    *inputs, result = tensors
    _, lse, *_ = flash.forward(
        *inputs,
        out=result,
        softmax_scale=scale,
        return_lse=True,
        pack_gqa=packed and lists[0].counts.shape[1] == 1,
        **_sparsity(flash, *lists, (query_block, tile), *spans),
    )
    out, lse = out.transpose(1, 2), lse.view(batch, heads, length)
    _blank(out, lse, last)
    return out, lse


@_forward_op.register_fake
def _(q, k, v, *_):
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("cab_hf::flash_attention_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    full_counts: Tensor,
    full_indices: Tensor,
    partial_counts: Tensor,
    partial_indices: Tensor,
    first: Tensor,
    last: Tensor,
    query_block: int,
    key_block: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    flash = _flash()
    heads, dim, kv_length = q.shape[1], q.shape[3], k.shape[2]
    # an infinite sum leaves padding queries, which full blocks do not mask, no weight
    lse = lse.masked_fill((last < 0).unsqueeze(1), torch.inf)
    inputs = [x.transpose(1, 2) for x in (q, k, v, out, grad)]
    whole = Walk(
        BlockLists(partial_counts, partial_indices),
        BlockLists(full_counts, full_indices),
        key_block,
    )
    total: tuple[Tensor, ...] = ()
    for walk in walks(whole, kv_length, dim):
        tile = key_tile(dim, walk.key_block)
        lists = (
            by_tile(part, walk.key_block, tile, kv_length).for_heads(heads)
            for part in (walk.partial, walk.full)
        )
        found = flash.backward(dim, query_block, tile)(
            *inputs, lse, scale, **_sparsity(flash, *lists, (query_block, tile), first, last)
        )
        total = tuple(x.add_(y) for x, y in zip(total, found, strict=True)) if total else found
    return tuple(x.transpose(1, 2) for x in total)


@_backward_op.register_fake
def _(grad, q, k, v, *_):
    return tuple(torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))


def _save(ctx, inputs, output):
    *tensors, ctx.query_block, ctx.key_block, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _differentiate(ctx, grad, _):
    grads = _backward_op(grad, *ctx.saved_tensors, ctx.query_block, ctx.key_block, ctx.scale)
    return *grads, *(None,) * 9


_forward_op.register_autograd(_differentiate, setup_context=_save)


# --- lists on the kernels' grid


def key_tile(head_dim: int, key_block: int) -> int:
    """How many keys the kernels take at a time, which divides the key block."""
    wide = key_block % (2 * TILE) == 0 and head_dim <= WIDE_HEAD_DIM
    return 2 * TILE if wide else TILE


def finer_columns(lists: BlockLists, parts: int, columns: int) -> BlockLists:
    """The same lists where every block listed is ``parts`` blocks, of which ``columns`` exist."""
    if parts == 1:
        return lists
    part = torch.arange(parts, device=lists.indices.device, dtype=torch.int32)
    indices = (lists.indices.unsqueeze(-1) * parts + part).flatten(-2)
    indices = indices.narrow(-1, 0, min(columns, indices.shape[-1]))
    # only the last block may reach past the end, and it stands at the end of a list
    at = (lists.counts - 1).clamp(min=0).unsqueeze(-1).to(torch.int64)
    largest = lists.indices.gather(-1, at).squeeze(-1) * parts + (parts - 1)
    missing = (largest - (columns - 1)).clamp(min=0).where(lists.counts > 0, 0)
    return BlockLists(lists.counts * parts - missing, indices.contiguous())


def by_tile(lists: BlockLists, key_block: int, tile: int, kv_length: int) -> BlockLists:
    """For every tile of keys the query blocks that attend it."""
    turned = transposed(lists, -(-kv_length // key_block))
    return finer_rows(turned, key_block // tile, -(-kv_length // tile))


def transposed(lists: BlockLists, columns: int) -> BlockLists:
    """`BlockLists.transpose` on the GPU, as wide as the longest list; captured, as it may be."""
    return transpose(lists, columns, lists.counts.shape[2] if _capturing() else None)


def finer_rows(lists: BlockLists, parts: int, rows: int) -> BlockLists:
    """The same lists for each of the ``parts`` that a row is made of, of which ``rows`` exist."""
    if parts == 1:
        return lists
    return _each(lists, lambda x: x.repeat_interleave(parts, dim=2).narrow(2, 0, rows).contiguous())


def _heads_as_batch(x: Tensor, kv_heads: int) -> Tensor:
    """[1, N, H, D] as [H_kv, N, H / H_kv, D]; for one KV head any batch stays as it is."""
    return x if kv_heads == 1 else x.squeeze(0).unflatten(1, (kv_heads, -1)).transpose(0, 1)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _each(lists: BlockLists, change: Callable[[Tensor], Tensor]) -> BlockLists:
    return BlockLists(change(lists.counts), change(lists.indices))


# --- pairs of narrow blocks


class Walk(NamedTuple):
    """Lists that the backward goes through in one call, [B, P, M_q], of one key block."""

    partial: BlockLists
    full: BlockLists
    key_block: int


def joins(head_dim: int, key_block: int) -> bool:
    """Whether two key blocks of this size fit into one tile of the backward."""
    return key_block == TILE and head_dim <= WIDE_HEAD_DIM


def walks(whole: Walk, kv_length: int, head_dim: int) -> list[Walk]:
    """``whole``, or its pairs and its rest where that costs less; waits for the device to know."""
    if not joins(head_dim, whole.key_block) or _capturing():
        return [whole]
    columns = -(-kv_length // whole.key_block)
    full, full_rest = in_pairs(whole.full, columns)
    # the last block of an odd number is cut as it is: it may stand in a partial pair alone
    partial, partial_rest = in_pairs(whole.partial, columns, odd=True)
    sums = [x.counts.sum() for x in (full, partial, full_rest, partial_rest)]
    pairs, rest = torch.stack([sums[0] + sums[1], sums[2] + sums[3]]).tolist()
    joined = Walk(partial, full, 2 * whole.key_block)
    if rest == 0:
        return [joined]
    if pairs < PAIRS_A_ROW * full.counts.numel():
        return [whole]
    return [joined, Walk(partial_rest, full_rest, whole.key_block)]


def in_pairs(lists: BlockLists, columns: int, odd: bool = False) -> tuple[BlockLists, BlockLists]:
    """(blocks 2i and 2i + 1 listed together, as block i; the rest as it was).

    With ``odd`` the last of an odd number of ``columns`` needs no other to be a pair.
    """
    width = lists.width
    pairs, rest = (
        BlockLists(
            torch.empty_like(lists.counts), lists.indices.new_zeros(*lists.counts.shape, max(1, x))
        )
        for x in (width // 2 + 1, width)
    )
    _pair_kernel[(lists.counts.numel(),)](
        lists.counts,
        lists.indices,
        pairs.counts,
        pairs.indices,
        rest.counts,
        rest.indices,
        width,
        pairs.width,
        rest.width,
        columns - 1 if odd else -1,
        CHUNK=CHUNK,
        num_warps=1,
    )
    return pairs, rest


@triton.jit
def _pair_kernel(
    counts,
    indices,
    pair_counts,
    pair_indices,
    rest_counts,
    rest_indices,
    width,
    pair_width,
    rest_width,
    alone,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    indices += row * width
    pair_indices += row * pair_width
    rest_indices += row * rest_width
    pairs = 0
    rest = 0
    for start in range(0, count, CHUNK):
        # [CHUNK]
        slot = start + tl.arange(0, CHUNK)
        listed = slot < count
        column = tl.load(indices + slot, mask=listed, other=0)
        before = tl.load(indices + slot - 1, mask=listed & (slot > 0), other=-2)
        after = tl.load(indices + slot + 1, mask=slot + 1 < count, other=-2)
        even = column % 2 == 0
        opens = listed & even & ((after == column + 1) | (column == alone))
        closes = listed & (column % 2 == 1) & (before == column - 1)
        left = listed & (opens == 0) & (closes == 0)
        place = pairs + tl.cumsum(opens.to(tl.int32), 0) - 1
        tl.store(pair_indices + place, column // 2, mask=opens)
        place = rest + tl.cumsum(left.to(tl.int32), 0) - 1
        tl.store(rest_indices + place, column, mask=left)
        pairs += tl.sum(opens.to(tl.int32), 0)
        rest += tl.sum(left.to(tl.int32), 0)
    tl.store(pair_counts + row, pairs)
    tl.store(rest_counts + row, rest)


# --- padding queries


def _blank(out: Tensor, lse: Tensor, last: Tensor) -> None:
    """Zeros and -inf for padding queries: full blocks are not masked, so they came to something."""
    batch, heads, length, dim = out.shape
    _blank_kernel[(triton.cdiv(length, BLANK_ROWS), batch)](
        last,
        out,
        lse,
        *last.stride(),
        *out.stride()[:3],
        heads,
        length,
        dim,
        ROWS=BLANK_ROWS,
        DIM=triton.next_power_of_2(dim),
    )


@triton.jit
def _blank_kernel(
    last,
    out,
    lse,
    last_stride_b,
    last_stride_n,
    stride_b,
    stride_h,
    stride_n,
    heads,
    length,
    dim,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < length
    seen = tl.load(last + batch * last_stride_b + row * last_stride_n, mask=inside, other=0)
    blind = inside & (seen < 0)
    if tl.max(blind.to(tl.int32), 0) > 0:
        channel = tl.arange(0, DIM)
        # [ROWS, DIM]
        cells = out + batch * stride_b + row.to(tl.int64)[:, None] * stride_n + channel[None, :]
        where = blind[:, None] & (channel[None, :] < dim)
        sums = lse + batch * heads * length + row
        for _ in range(heads):
            tl.store(cells, tl.zeros((ROWS, DIM), out.dtype.element_ty), mask=where)
            tl.store(sums, tl.full((ROWS,), float("-inf"), tl.float32), mask=blind)
            cells += stride_h
            sums += length


# --- flash-attn-4


@cache
def _flash() -> SimpleNamespace:
    """The parts of flash-attn-4 that run a plan; imported on first use, which takes seconds."""
    from cutlass import cute
    from flash_attn.cute import interface
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def in_span(batch, head, query, key, lengths, spans):
        first = spans[0][batch[0], query[0]]
        last = spans[1][batch[0], query[0]]
        return (key >= first) & (key <= last)

    @cache
    def backward(head_dim: int, query_block: int, key_tile: int) -> Callable:
        numbers = backward_tiles(head_dim, query_block, key_tile)
        if numbers is None:
            return interface._flash_attn_bwd
        tiles = interface.BwdConfig(*numbers)
        # its tiles are no arguments on Hopper: the same code, with a choice of tiles of its own
        own = {**vars(interface), "_tile_size_bwd_sm90": lambda *_, **__: tiles}
        return FunctionType(
            interface._flash_attn_bwd.__code__, own, argdefs=interface._flash_attn_bwd.__defaults__
        )

    return SimpleNamespace(
        forward=interface._flash_attn_fwd,
        backward=backward,
        lists=BlockSparseTensorsTorch,
        in_span=in_span,
    )


def backward_tiles(head_dim: int, query_block: int, key_tile: int) -> tuple | None:
    """flash-attn-4's ``BwdConfig`` for these tiles on Hopper; None where its own choice fits.

    In order: query and key tile; stages of Q, dO and P; whether S, dK and dQ are computed
    transposed; warp groups along the rows of S, of dK and of dQ.
    """
    whole = query_block % (2 * TILE) == 0
    if key_tile == 2 * TILE:
        if whole or head_dim > TILE:
            return None
        return TILE, 2 * TILE, 2, 2, 2, True, False, False, 1, 2, 1
    if head_dim > 3 * TILE:
        return None
    if head_dim > WIDE_HEAD_DIM:
        return TILE, TILE, 1, 1, 1, False, False, False, 1, 1, 1
    if whole:
        # shared memory holds a second stage of dO and P only beside narrow heads
        deep = 2 if head_dim <= TILE else 1
        return 2 * TILE, TILE, 2, deep, deep, False, False, False, 2, 1, 2
    return TILE, TILE, 2, 2, 2, False, False, False, 1, 1, 1


def _sparsity(
    flash: SimpleNamespace,
    partial: BlockLists,
    full: BlockLists,
    blocks: tuple[int, int],
    first: Tensor,
    last: Tensor,
) -> dict[str, object]:
    """What says the plan to flash-attn-4: lists for its grid, and what masks in partial blocks."""
    spans = [first.contiguous(), last.contiguous()]
    for span in spans:
        # read by flash-attn-4: the dimension of stride 1, which shapes of one leave open
        span.__leading_dim__ = 1
    return {
        "block_sparse_tensors": flash.lists(
            partial.counts, partial.indices, full.counts, full.indices, block_size=blocks
        ),
        "mask_mod": flash.in_span,
        "aux_tensors": spans,
    }
