"""Attention under a plan by flash-attn-4's kernels: the FLASH backend of the flex engine.

This module calls directly what FlexAttention's FLASH backend would generate. Thus no graph is
compiled per shape, and the plan's compact lists need no conversion. flash-attn-4 reads key blocks
of one tile and query blocks of whole tiles. Lists of wider key blocks are split into its tiles.

The backward pass of flash-attn-4 supports only blocks that match its tiles (`own_backward`). For
other blocks, `block.backward_op` computes the gradients from its output and log-sum-exp.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor

from cab_hf.capability import HOPPER, capability
from cab_hf.ops.attention import block
from cab_hf.ops.attention.tiles import vectors, vectors_at
from cab_hf.ops.attention.transpose import transpose
from cab_hf.plan import BlockIndices, BlockPlan

PACKAGE = "flash-attn-4"
# the private interface of a beta may change with every version: the first version that works, and
# the first that was not tried
LEAST_VERSION, UNTRIED_VERSION = "4.0.0b36", "4.0.0b37"
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
# head dim -> (query, key) tile of the backward pass with lists, on Hopper
BACKWARD_TILES = {64: (128, 128), 96: (64, 128), 128: (64, 128), 256: (64, 64)}
BLACKWELL = (10, 11)
# multiples of (query, key) blocks that the Blackwell kernel supports with block sparsity
BLACKWELL_BLOCKS = (256, 128)
# tiles are multiples of the 64 rows of a Hopper matrix instruction
TILE = 64
# above this head dim, a tile of 128 keys does not fit next to the kernel's pipeline
WIDE_HEAD_DIM = 128
BLANK_ROWS = 32


def unavailable(head_dim: int, dtype: torch.dtype, query_block: int, key_block: int) -> str | None:
    """Return why FLASH cannot run on this GPU, as half a sentence; None if it can."""
    major, minor = capability()
    blackwell = major in BLACKWELL
    if major != HOPPER and not blackwell:
        return f"runs on sm_90, sm_100 and sm_110, not on sm_{major}{minor}"
    if dtype not in DTYPES:
        return f"supports float16 and bfloat16, not {dtype}"
    widest = WIDE_HEAD_DIM if blackwell else MAX_HEAD_DIM
    if head_dim > widest or head_dim % 8:
        return f"supports head dims up to {widest} that are multiples of 8, not {head_dim}"
    rows, columns = BLACKWELL_BLOCKS if blackwell else (TILE, TILE)
    if query_block % rows or key_block % columns:
        return (
            f"supports blocks of multiples of {rows} x {columns}, not {query_block} x {key_block}"
        )
    return _missing()


def own_backward(head_dim: int, query_block: int, key_block: int) -> bool:
    """Return True if flash-attn-4 computes the gradients itself."""
    if head_dim not in BACKWARD_TILES or capability()[0] != HOPPER:
        return False
    rows, columns = BACKWARD_TILES[head_dim]
    return query_block % rows == 0 and key_block % columns == 0


@cache
def _missing() -> str | None:
    try:
        result = version(PACKAGE)
    except PackageNotFoundError:
        return f"needs the package {PACKAGE}, which is not installed"
    if not Version(LEAST_VERSION) <= Version(result) < Version(UNTRIED_VERSION):
        return f"needs {PACKAGE} {LEAST_VERSION} or later, below {UNTRIED_VERSION}, not {result}"
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `reference.attention` under a plan's lists."""
    out, lse = _forward_op(q, k, v, *block.flattened(plan, scale))
    return (out, lse) if return_lse else out


@torch.library.custom_op("cab_hf::flash_attention", mutates_args=(), schema=block.FORWARD)
def _forward_op(q, k, v, *plan):
    rows, scale, _ = block.rows_of(plan)
    flash = _flash()
    batch, heads, length, dim = q.shape
    kv_heads, kv_length = k.shape[1:3]
    tile = key_tile(dim, rows.key_block)
    lists = [
        finer_columns(part, rows.key_block // tile, -(-kv_length // tile))
        for part in (rows.partial, rows.full)
    ]
    out = q.new_empty(batch, length, heads, v.shape[3])
    tensors = [*(x.transpose(1, 2) for x in (q, k, v)), out]
    ranges = [rows.first, rows.last]
    # a tile of all heads of a group reads keys once; with narrow tiles this gains nothing
    packed = tile > TILE and kv_heads < heads
    if packed and lists[0].counts.shape[1] == kv_heads and (batch == 1 or kv_heads == 1):
        tensors = [_heads_as_batch(x, kv_heads) for x in tensors]
        lists = [part.map_tensors(lambda x: x.flatten(0, 1).unsqueeze(1)) for part in lists]
        ranges = [x.repeat_interleave(kv_heads, dim=0) for x in ranges]
    else:
        lists = [part.for_heads(heads) for part in lists]
    *inputs, result = tensors
    _, lse, *_ = flash.forward(
        *inputs,
        out=result,
        softmax_scale=scale,
        return_lse=True,
        pack_gqa=packed and lists[0].counts.shape[1] == 1,
        **_sparsity(flash, *lists, (rows.query_block, tile), *ranges),
    )
    out, lse = out.transpose(1, 2), lse.view(batch, heads, length)
    _blank(out, lse, rows.last)
    return out, lse


@torch.library.custom_op("cab_hf::flash_attention_backward", mutates_args=(), schema=block.BACKWARD)
def _backward_op(grad, grad_lse, q, k, v, out, lse, *plan):
    assert grad_lse is None
    rows, scale, _ = block.rows_of(plan)
    flash = _flash()
    heads, kv_length = q.shape[1], k.shape[2]
    _, tile = BACKWARD_TILES[q.shape[3]]
    # an infinite log-sum-exp gives padding queries no weight, because full blocks are not masked
    lse = lse.masked_fill((rows.last < 0).unsqueeze(1), torch.inf)
    lists = (
        by_tile(part, rows.key_block, tile, kv_length).for_heads(heads)
        for part in (rows.partial, rows.full)
    )
    tensors = (x.transpose(1, 2) for x in (q, k, v, out, grad))
    plan = _sparsity(flash, *lists, (rows.query_block, tile), rows.first, rows.last)
    result = flash.backward(*tensors, lse, scale, **plan)
    return tuple(x.transpose(1, 2) for x in result)


@_backward_op.register_fake
def _(grad, grad_lse, q, k, v, *_):
    return tuple(torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))


block.register_gradients(
    _forward_op, lambda *work: _backward_op if own_backward(*work) else block.backward_op
)


def key_tile(head_dim: int, key_block: int) -> int:
    """Return the keys per tile of the kernels, a divisor of the key block."""
    wide = key_block % (2 * TILE) == 0 and head_dim <= WIDE_HEAD_DIM
    return 2 * TILE if wide else TILE


def finer_columns(lists: BlockIndices, parts: int, columns: int) -> BlockIndices:
    """Split every listed block into ``parts`` blocks, of which ``columns`` exist."""
    if parts == 1:
        return lists
    part = torch.arange(parts, device=lists.indices.device, dtype=torch.int32)
    indices = (lists.indices.unsqueeze(-1) * parts + part).flatten(-2)
    indices = indices.narrow(-1, 0, min(columns, indices.shape[-1]))
    # only the last block may extend past the end, and it is the last entry of a list
    at = (lists.counts - 1).clamp(min=0).unsqueeze(-1).to(torch.int64)
    largest = lists.indices.gather(-1, at).squeeze(-1) * parts + (parts - 1)
    missing = (largest - (columns - 1)).clamp(min=0).where(lists.counts > 0, 0)
    return BlockIndices(lists.counts * parts - missing, indices.contiguous())


def by_tile(lists: BlockIndices, key_block: int, tile: int, kv_length: int) -> BlockIndices:
    """Return for every tile of keys the query blocks that attend to it."""
    turned = transpose(lists, -(-kv_length // key_block))
    parts, tiles = key_block // tile, -(-kv_length // tile)
    if parts == 1:
        return turned
    return turned.map_tensors(
        lambda x: x.repeat_interleave(parts, dim=2).narrow(2, 0, tiles).contiguous()
    )


def _heads_as_batch(x: Tensor, kv_heads: int) -> Tensor:
    """Return [1, N, H, D] as [H_kv, N, H / H_kv, D]; with one KV head, return ``x`` unchanged."""
    return x if kv_heads == 1 else x.squeeze(0).unflatten(1, (kv_heads, -1)).transpose(0, 1)


def _blank(out: Tensor, lse: Tensor, last: Tensor) -> None:
    """Write zeros and -inf for padding queries, whose results are arbitrary in full blocks."""
    batch, heads, length, dim = out.shape
    _blank_kernel[(triton.cdiv(length, BLANK_ROWS), batch)](
        last,
        *last.stride(),
        vectors(out),
        lse,
        heads,
        length,
        dim,
        BLOCK_M=BLANK_ROWS,
        D=triton.next_power_of_2(dim),
    )


# the length must not cause another compilation
@triton.jit(do_not_specialize=["last_batch", "length"])
def _blank_kernel(
    last,
    last_batch,
    last_token,
    out,
    lse,
    heads,
    length,
    dim,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < length
    seen = tl.load(last + batch * last_batch + row * last_token, mask=inside, other=0)
    blind = inside & (seen < 0)
    if tl.max(blind.to(tl.int32), 0) > 0:
        channel = tl.arange(0, D)[None, :]
        # [BLOCK_M, D]
        zeros = tl.zeros((BLOCK_M, D), out.data.dtype.element_ty)
        for head in range(heads):
            at = vectors_at(out, batch, head, row) + channel
            tl.store(at, zeros, mask=blind[:, None] & (channel < dim))
            sums = lse + (batch * heads + head) * length + row
            tl.store(sums, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=blind)


@cache
def _flash() -> SimpleNamespace:
    """Import the parts of flash-attn-4 that run a plan; the first call takes seconds."""
    from cutlass import cute
    from flash_attn.cute import interface
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def in_span(batch, head, query, key, lengths, ranges):
        first = ranges[0][batch[0], query[0]]
        last = ranges[1][batch[0], query[0]]
        return (key >= first) & (key <= last)

    return SimpleNamespace(
        forward=interface._flash_attn_fwd,
        backward=interface._flash_attn_bwd,
        lists=BlockSparseTensorsTorch,
        in_span=in_span,
    )


def _sparsity(
    flash: SimpleNamespace,
    partial: BlockIndices,
    full: BlockIndices,
    blocks: tuple[int, int],
    first: Tensor,
    last: Tensor,
) -> dict[str, object]:
    """Return the plan for flash-attn-4: lists for its grid, and a mask for partial blocks."""
    ranges = [first.contiguous(), last.contiguous()]
    for span in ranges:
        # flash-attn-4 reads the dimension of stride 1, which is ambiguous if a dimension has size 1
        span.__leading_dim__ = 1
    return {
        "block_sparse_tensors": flash.lists(
            partial.counts, partial.indices, full.counts, full.indices, block_size=blocks
        ),
        "mask_mod": flash.in_span,
        "aux_tensors": ranges,
    }
