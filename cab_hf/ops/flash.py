"""Attention under a plan by flash-attn-4's kernels: the FLASH backend of the flex engine.

What FlexAttention's own FLASH backend generates is called here directly: no graph is compiled for
every shape, the plan's compact lists are taken as they are, and tiles are chosen for the plan's
blocks. flash-attn-4 walks key blocks of one tile and query blocks of whole tiles; lists of wider
key blocks are split to its tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.plan import BlockLists, BlockPlan

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
HOPPER = 9
# tiles are multiples of the 64 rows of a Hopper matrix instruction
TILE = 64
# above this head dim a tile of 128 keys does not fit beside its pipeline
WIDE_HEAD_DIM = 128
BLANK_ROWS = 32


def unavailable(
    capability: tuple[int, int], head_dim: int, dtype: torch.dtype, query_block: int, key_block: int
) -> str | None:
    """Why FLASH cannot run this on a GPU of ``capability``, as half a sentence; None if it can."""
    if capability[0] != HOPPER:
        return f"runs on Hopper (sm_90), not on sm_{capability[0]}{capability[1]}"
    if dtype not in DTYPES:
        return f"takes float16 and bfloat16, not {dtype}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"takes head dims to {MAX_HEAD_DIM} that are multiples of 8, not {head_dim}"
    if query_block % TILE or key_block % TILE:
        return f"takes blocks that are multiples of {TILE}, not {query_block} x {key_block}"
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "needs the package flash-attn-4, which is not installed"
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
    tile = key_tile(q.shape[-1], key_block)
    lists = (
        finer_columns(_per_head(part, q.shape[1]), key_block // tile)
        for part in (
            BlockLists(partial_counts, partial_indices),
            BlockLists(full_counts, full_indices),
        )
    )
    out, lse, *_ = flash.forward(
        *(x.transpose(1, 2) for x in (q, k, v)),
        softmax_scale=scale,
        return_lse=True,
        # sharing a tile between heads of a group is for lists that all heads share
        pack_gqa=False,
        **_sparsity(flash, *lists, (query_block, tile), first, last),
    )
    out = out.transpose(1, 2)
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
    tile = key_tile(q.shape[-1], key_block)
    columns = -(-k.shape[2] // key_block)
    tiles = -(-k.shape[2] // tile)
    lists = (
        _per_head(finer_rows(part.transpose(columns), key_block // tile, tiles), q.shape[1])
        for part in (
            BlockLists(partial_counts, partial_indices),
            BlockLists(full_counts, full_indices),
        )
    )
    # an infinite sum leaves padding queries, which full blocks do not mask, no weight
    lse = lse.masked_fill((last < 0).unsqueeze(1), torch.inf)
    grads = flash.backward(q.shape[-1], query_block, tile)(
        *(x.transpose(1, 2) for x in (q, k, v, out, grad)),
        lse,
        scale,
        **_sparsity(flash, *lists, (query_block, tile), first, last),
    )
    return tuple(x.transpose(1, 2) for x in grads)


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


def finer_columns(lists: BlockLists, parts: int) -> BlockLists:
    """The same lists where every block listed is ``parts`` blocks, ascending."""
    if parts == 1:
        return lists
    part = torch.arange(parts, device=lists.indices.device, dtype=torch.int32)
    indices = lists.indices.unsqueeze(-1) * parts + part
    return BlockLists(lists.counts * parts, indices.flatten(-2))


def finer_rows(lists: BlockLists, parts: int, rows: int) -> BlockLists:
    """The same lists for each of the ``parts`` that a row is made of, of which ``rows`` exist."""
    if parts == 1:
        return lists
    return _each(lists, lambda x: x.repeat_interleave(parts, dim=2).narrow(2, 0, rows))


def _per_head(lists: BlockLists, heads: int) -> BlockLists:
    sharing = heads // lists.counts.shape[1]
    # the kernels read one list for all heads of a batch row, or one for each
    if sharing == 1 or lists.counts.shape[1] == 1:
        return lists
    return _each(lists, lambda x: x.repeat_interleave(sharing, dim=1))


def _each(lists: BlockLists, change: Callable[[Tensor], Tensor]) -> BlockLists:
    return BlockLists(change(lists.counts), change(lists.indices))


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
        return 2 * TILE, TILE, 2, deep, deep, True, False, False, 2, 1, 2
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
