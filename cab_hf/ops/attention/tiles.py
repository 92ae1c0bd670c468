"""Functions that the block attention kernels share: plan arguments, tiles, masks and the softmax.

Kernels compute exponentials and log-sum-exps to base two. A plan is passed to kernels as
NamedTuples. Tile descriptors are separate arguments, because Triton 3.6 cannot launch a kernel with
a descriptor inside a tuple.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cab_hf.ops import launch
from cab_hf.ops.attention.transpose import ColumnLists, pack_columns
from cab_hf.plan import BlockIndices

# bytes; the address and the strides of a tensor with a descriptor must be multiples of this number
ALIGNMENT_BYTES = 16
# `BackwardStats` are padded to a multiple of this number of queries, which is a multiple of every
# query tile, so that kernels read `BackwardStats` without a mask
PADDED_LENGTH_MULTIPLE = 128
# queries whose `BackwardStats` one program computes
STATS_TILE_QUERIES = 32
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# smallest result of `get_magnitude_bits` for infinities and NaN; results for finite numbers are
# smaller
INFINITE_BITS = tl.constexpr(0x7F800000)


class PlanTensors(NamedTuple):
    """Fields of a `BlockPlan` that the kernels need.

    Attributes:
        full: Lists of full blocks. All keys of a full block are visible to all queries of the query
            block, except padding queries.
        partial: Lists of partial blocks, in which ``first_key`` and ``last_key`` mask keys.
        first_key: int32 [B, N_q], the first visible key of each query.
        last_key: int32 [B, N_q], the last visible key of each query; -1 for padding queries.
        query_block: Tokens per query block.
        key_block: Tokens per key block.
    """

    full: BlockIndices
    partial: BlockIndices
    first_key: Tensor
    last_key: Tensor
    query_block: int
    key_block: int


class BlockLists(NamedTuple):
    """`BlockIndices` as an argument of kernels.

    Attributes:
        counts: int32 [B, P, M_q], number of listed blocks per query block, for P heads of the plan.
        indices: int32 [B, P, M_q, width], indices of the listed blocks.
        width: Allocated indices per query block.
    """

    counts: Tensor
    indices: Tensor
    width: int

    @classmethod
    def from_indices(cls, block_indices: BlockIndices) -> BlockLists:
        """Convert `BlockIndices`. Lists of width 1 get a second, unused entry per query block."""
        # Triton 3.6 makes an integer argument of 1 a constant, and loses a constant in a tuple
        # inside a tuple. Therefore ``width`` must not be 1
        block_indices = block_indices.widened(2) if block_indices.width < 2 else block_indices
        return cls(block_indices.counts, block_indices.indices, block_indices.width)


class KernelPlan(NamedTuple):
    """`PlanTensors` as an argument of kernels. Block sizes are separate, constant arguments.

    Kernels read ``plan[0]`` for the full lists and ``plan[1]`` for the partial lists.

    Attributes:
        full: Full blocks that each query block lists. In the backward pass for k and v,
            `ColumnLists`: the query blocks that list each key block as full.
        partial: The same for partial blocks.
        first_key: int32 [B, N_q], the first visible key of each query.
        last_key: int32 [B, N_q], the last visible key of each query; -1 for padding queries.
        first_key_stride: Elements between two batch rows of ``first_key``.
        last_key_stride: Elements between two batch rows of ``last_key``.
    """

    full: BlockLists | ColumnLists
    partial: BlockLists | ColumnLists
    first_key: Tensor
    last_key: Tensor
    first_key_stride: int
    last_key_stride: int


class AttentionSizes(NamedTuple):
    """Sizes of an attention call as an argument of kernels.

    Attributes:
        heads: Heads of q.
        kv_heads: Heads of k and v.
        plan_heads: Heads of the plan.
        q_length: Number of queries of the call, N_q.
        q_blocks: Number of query blocks in the lists. `split` passes the lists of a piece of
            consecutive query blocks.
        first_query: Index of the first query of the piece; 0 without pieces.
        num_tokens: Number of queries of the piece, a multiple of the query block; 0 without pieces.
    """

    heads: int
    kv_heads: int
    plan_heads: int
    q_length: int
    q_blocks: int
    first_query: int = 0
    num_tokens: int = 0


class Vectors(NamedTuple):
    """Tensor [B, H, N, D] as an argument of kernels, with contiguous D.

    Attributes:
        data: The tensor.
        batch_stride, head_stride, token_stride: Strides of the first three dimensions, in elements.
    """

    data: Tensor
    batch_stride: int
    head_stride: int
    token_stride: int


class Tiles(NamedTuple):
    """Tensor [B, H, N, D] as an argument of kernels that access tiles by pointers.

    Attributes:
        data: The tensor.
        batch_stride, head_stride, token_stride: Strides of the first three dimensions, in elements.
        num_tokens: N.
        num_channels: D.
    """

    data: Tensor
    batch_stride: int
    head_stride: int
    token_stride: int
    num_tokens: int
    num_channels: int


class BackwardStats(NamedTuple):
    """Log-sum-exp and delta of every query, which the backward pass needs.

    Attributes:
        lse: float32 [B, H, padded_length], the log-sum-exp to base two. It is +inf for queries
            without keys and after the last query, so that all weights of such queries are 0.
        delta: float32 [B, H, padded_length], (sum over channels of grad * out) - grad_lse.
        padded_length: N_q rounded up to `PADDED_LENGTH_MULTIPLE`.
    """

    lse: Tensor
    delta: Tensor
    padded_length: int


def make_kernel_arguments(
    q: Tensor, k: Tensor, plan: PlanTensors
) -> tuple[KernelPlan, AttentionSizes]:
    """Return the arguments ``plan`` and ``sizes`` of the kernels.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        plan: The plan, or the part of the plan for a piece of consecutive query blocks.
    """
    full, partial = BlockLists.from_indices(plan.full), BlockLists.from_indices(plan.partial)
    first_key, last_key = (
        x if x.stride(1) == 1 else x.contiguous() for x in (plan.first_key, plan.last_key)
    )
    _, plan_heads, q_blocks = full.counts.shape
    kernel_plan = KernelPlan(
        full=full,
        partial=partial,
        first_key=first_key,
        last_key=last_key,
        first_key_stride=first_key.stride(0),
        last_key_stride=last_key.stride(0),
    )
    sizes = AttentionSizes(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        plan_heads=plan_heads,
        q_length=q.shape[2],
        q_blocks=q_blocks,
    )
    return kernel_plan, sizes


def transpose_plan(plan: KernelPlan, kv_blocks: int, with_slots: bool = False) -> KernelPlan:
    """Return the plan with `ColumnLists`: the query blocks that list each key block.

    Args:
        plan: The plan with lists per query block.
        kv_blocks: Number of key blocks.
        with_slots: True to compute `ColumnLists.slots`.
    """
    full, partial = (
        pack_columns(block_lists, kv_blocks, with_slots)
        for block_lists in (plan.full, plan.partial)
    )
    return plan._replace(full=full, partial=partial)


def compute_backward_stats(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> BackwardStats:
    """Compute log-sum-exp (to base two) and delta of every query for the backward pass.

    Args:
        grad: [B, H, N_q, D], the gradient of the output.
        grad_lse: [B, H, N_q], the gradient of the log-sum-exp; None for zeros.
        out: [B, H, N_q, D], the output.
        lse: float32 [B, H, N_q], the log-sum-exp (natural logarithm).
    """
    batch, heads, length, dim = grad.shape
    padded_length = triton.cdiv(length, PADDED_LENGTH_MULTIPLE) * PADDED_LENGTH_MULTIPLE
    stats = BackwardStats(
        lse=lse.new_empty(batch, heads, padded_length),
        delta=lse.new_empty(batch, heads, padded_length),
        padded_length=padded_length,
    )
    _backward_stats_kernel[(padded_length // STATS_TILE_QUERIES, batch * heads)](
        grad=make_vectors(grad),
        out=make_vectors(out),
        lse=lse,
        stats=stats,
        heads=heads,
        length=length,
        BLOCK_M=STATS_TILE_QUERIES,
        D=dim,
        BLOCK_D=triton.next_power_of_2(min(dim, 128)),
        num_warps=4,
    )
    if grad_lse is not None:
        stats.delta[:, :, :length] -= grad_lse
    return stats


def make_descriptor_ready(x: Tensor) -> Tensor:
    """Return ``x`` if a tensor descriptor supports the strides and the address, else a copy.

    Args:
        x: [B, H, N, D].
    """
    is_aligned = all(stride * x.element_size() % ALIGNMENT_BYTES == 0 for stride in x.stride()[:3])
    if is_aligned and x.stride(3) == 1 and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return x.contiguous().clone() if x.data_ptr() % ALIGNMENT_BYTES else x.contiguous()


def allocate_transposed(x: Tensor, dim: int | None = None) -> Tensor:
    """Allocate [B, H, N, D] with the memory layout [B, N, H, D].

    Models transpose the output of attention to [B, N, H, D], which is then contiguous.

    Args:
        x: [B, H, N, D], the tensor whose shape, dtype and device the result has.
        dim: Channels of the result; None for the channels of ``x``.
    """
    batch, heads, length, _ = x.shape
    return x.new_empty(batch, length, heads, dim or x.shape[3]).transpose(1, 2)


def make_vectors(x: Tensor) -> Vectors:
    """Return x [B, H, N, D] with its strides, as an argument of kernels. D must be contiguous."""
    batch_stride, head_stride, token_stride = x.stride()[:3]
    return Vectors(
        data=x, batch_stride=batch_stride, head_stride=head_stride, token_stride=token_stride
    )


def make_descriptor(
    x: Tensor, tokens: int, channels: int | None = None
) -> TensorDescriptor | Tiles:
    """Return x [B, H, N, D] as an argument of kernels that use `load_tile` or `store_tile`.

    Args:
        x: A tensor that `make_descriptor_ready` returned, or a new tensor.
        tokens: Tokens per tile.
        channels: Channels per tile; None for D, rounded up to a power of two.
    """
    if not launch.reads_by_descriptor(x.device):
        batch_stride, head_stride, token_stride = x.stride()[:3]
        return Tiles(
            data=x,
            batch_stride=batch_stride,
            head_stride=head_stride,
            token_stride=token_stride,
            num_tokens=x.shape[2],
            num_channels=x.shape[3],
        )
    block_shape = [1, 1, tokens, channels or triton.next_power_of_2(x.shape[3])]
    return TensorDescriptor.from_tensor(x, block_shape)


def choose_tile_size(block_size: int, max_size: int) -> int:
    """Return the largest power of two that divides ``block_size``, at most ``max_size``."""
    return min(max_size, block_size & -block_size)


def has_future_keys(plan: PlanTensors, q_length: int, kv_length: int) -> bool:
    """Return True if listed blocks may contain keys after the last query of the query block.

    The values of such keys may be NaN, and 0 * NaN is NaN. Kernels must then replace the values by
    zeros. No such keys exist if q and k have the same length and key blocks are not larger than
    query blocks.
    """
    return q_length != kv_length or plan.key_block > plan.query_block


def choose_precision(x: Tensor) -> str:
    """Return the precision of matrix products in kernels, an argument of `tl.dot`.

    float32 products use tf32 on NVIDIA's GPUs and float32 elsewhere (gfx950 has no tf32). Products
    of 16-bit numbers have only one precision.
    """
    return "tf32" if x.dtype != torch.float32 and launch.has_ptx(x) else "ieee"


def make_logit_scale_arguments(scale: float, softcap: float) -> dict[str, float | bool]:
    """Return the kernel arguments that turn products q · k into logits to base two.

        without soft cap: logit = qk_scale * (q · k)
        with soft cap:    logit = qk_scale * tanh(cap_scale * (q · k))

    Args:
        scale: Factor of the products.
        softcap: Soft cap of the logits to base e, see `reference.cap_logits`; 0 for no cap.
    """
    outer_scale = softcap or scale
    inner_scale = scale / softcap if softcap else 0.0
    return {
        "qk_scale": outer_scale * LOG2_E.value,
        "cap_scale": inner_scale,
        "HAS_SOFTCAP": softcap > 0,
    }


@triton.jit
def locate_tile(plane, start, sizes, QUERY_BLOCK: tl.constexpr):
    """Return the indices by which a program reads the tensors and the lists of a tile of queries.

    Args:
        plane: batch * heads + head.
        start: The first query of the tile, counted from ``sizes.first_query``.
        sizes: `AttentionSizes`.

    Returns:
        batch: Index of the batch row.
        head: Index of the query head.
        kv_head: Index of the KV head.
        plan_row: Index of the lists of the tile's query block among the lists of all batch rows and
            plan heads.
    """
    batch = plane // sizes.heads
    head = plane % sizes.heads
    kv_head = head // (sizes.heads // sizes.kv_heads)
    plan_row = compute_plan_head_index(batch, head, sizes) * sizes.q_blocks + start // QUERY_BLOCK
    return batch, head, kv_head, plan_row


@triton.jit
def compute_plan_head_index(batch, head, sizes):
    """Return batch * plan_heads + plan_head as int64, for the plan head of a query head."""
    plan_head = head // (sizes.heads // sizes.plan_heads)
    return (batch * sizes.plan_heads + plan_head).to(tl.int64)


@triton.jit
def load_tile_start(indices, tile_index, BLOCK_TOKENS: tl.constexpr, TILE_TOKENS: tl.constexpr):
    """Return the first token of the i-th tile of a list of blocks.

    Args:
        indices: Pointer to the list of blocks.
        tile_index: Index of the tile. Tiles are counted over all listed blocks, with
            BLOCK_TOKENS // TILE_TOKENS tiles per block.
    """
    TILES_PER_BLOCK: tl.constexpr = BLOCK_TOKENS // TILE_TOKENS
    return (
        tl.load(indices + tile_index // TILES_PER_BLOCK) * BLOCK_TOKENS
        + tile_index % TILES_PER_BLOCK * TILE_TOKENS
    )


@triton.jit
def make_vector_pointers(x, batch, head, token):
    """Return pointers [N, 1] to the first channel of N tokens.

    Args:
        x: `Vectors` or `Tiles`.
        batch, head: Indices of the batch row and the head.
        token: [N], indices of the tokens.
    """
    plane = x.data + batch.to(tl.int64) * x.batch_stride + head.to(tl.int64) * x.head_stride
    return plane + token.to(tl.int64)[:, None] * x.token_stride


@triton.jit
def load_tile(x, batch, head, token, channel, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Load a tile [TOKENS, CHANNELS] of ``x``, a result of `make_descriptor`.

    ``token`` and ``channel`` are the indices of the first token and channel of the tile. Entries
    after the tensor's last token or last channel are 0.
    """
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([batch, head, token, channel]).reshape(TOKENS, CHANNELS)
    else:
        pointers, is_in_bounds = _make_tile_pointers(
            x, batch, head, token=token, channel=channel, TOKENS=TOKENS, CHANNELS=CHANNELS
        )
        tile = tl.load(pointers, mask=is_in_bounds, other=0.0)
    return tile


@triton.jit
def store_tile(
    x,
    batch,
    head,
    token,
    channel,
    tile,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write ``tile`` [TOKENS, CHANNELS] to ``x``, a result of `make_descriptor`, in the dtype of x.

    ``token`` and ``channel`` are the indices of the first token and channel of the tile. Entries
    after the tensor's last token or last channel are not written.
    """
    if isinstance(x, tl.tensor_descriptor):
        tile = tile.to(x.dtype).reshape(1, 1, TOKENS, CHANNELS)
        x.store([batch, head, token, channel], tile)
    else:
        pointers, is_in_bounds = _make_tile_pointers(
            x, batch, head, token=token, channel=channel, TOKENS=TOKENS, CHANNELS=CHANNELS
        )
        tl.store(pointers, tile.to(x.data.dtype.element_ty), mask=is_in_bounds)


@triton.jit
def _make_tile_pointers(
    x, batch, head, token, channel, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Return pointers to a tile of `Tiles`, and a mask of existing entries, [TOKENS, CHANNELS]."""
    tokens = token + tl.arange(0, TOKENS)
    channels = channel + tl.arange(0, CHANNELS)[None, :]
    is_in_bounds = (tokens < x.num_tokens)[:, None] & (channels < x.num_channels)
    # in Triton's interpreter, a loop variable is a Python integer, which has no method ``to``. The
    # sum with a tensor is a tensor
    zero = tl.zeros([], tl.int32)
    return make_vector_pointers(x, batch + zero, head + zero, tokens) + channels, is_in_bounds


@triton.jit
def load_key_ranges(plan, batch, query, q_length):
    """Return the first and the last visible key of each query; 0 and -1 if query >= q_length."""
    is_in_bounds = query < q_length
    batch = batch.to(tl.int64)
    first_key = tl.load(
        plan.first_key + batch * plan.first_key_stride + query, mask=is_in_bounds, other=0
    )
    last_key = tl.load(
        plan.last_key + batch * plan.last_key_stride + query, mask=is_in_bounds, other=-1
    )
    return first_key, last_key


@triton.jit
def is_visible(key, first_key, last_key):
    """Return True where ``key`` is in the range of visible keys, first <= key <= last."""
    return (key >= first_key) & (key <= last_key)


@triton.jit
def zero_unseen(x, key, first_key, last_key):
    """Return values with zeros for keys before or after all visible keys of a tile of queries.

    A NaN in the value of an invisible key would reach the output, because 0 * NaN is NaN.

    Args:
        x: [BLOCK_N, D], values.
        key: [BLOCK_N], indices of the keys.
        first_key, last_key: [BLOCK_M], the first and the last visible key of each query.
    """
    min_first_key = tl.min(tl.where(last_key < 0, 2147483647, first_key), 0)
    is_seen = (key >= min_first_key) & (key <= tl.max(last_key, 0))
    return tl.where(is_seen[:, None], x, 0.0).to(x.dtype)


@triton.jit
def replace_minus_infinity(max_logit):
    """Return ``max_logit`` with -inf (no keys) replaced by 0, because -inf + inf is NaN."""
    return tl.where(max_logit == float("-inf"), 0.0, max_logit)


@triton.jit
def get_magnitude_bits(x):
    """Return the bits of float32 ``x`` without the sign, int32.

    The results have the same order as the absolute values, and the result for NaN is larger than
    the result for infinity. Thus a maximum of results includes NaN, which a maximum of floats
    ignores.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent with an absolute error below one float32 step of 1.

    For small x, the numerator 1 - exp(-2 |x|) is a difference without a rounding error. The formula
    2 * sigmoid(2 x) - 1 rounds the sigmoid first.
    """
    e = tl.exp(-2 * tl.abs(x))
    y = (1 - e) / (1 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def online_softmax_update(m_i, l_i, qk, qk_scale, IS_MASKED: tl.constexpr):
    """Update the statistics of an online softmax by one tile of logits.

    Args:
        m_i: [BLOCK_M], the largest logit of each query so far, to base two.
        l_i: [BLOCK_M], the sum of exp2(logit - m_i) so far.
        qk: [BLOCK_M, BLOCK_N], products of queries and keys, not scaled; -inf where masked.
        qk_scale: Factor that turns products into logits to base two, see
            `make_logit_scale_arguments`.
        IS_MASKED: False if every query has a finite logit in ``qk``.

    Returns:
        m_i, l_i: The updated statistics.
        p: [BLOCK_M, BLOCK_N], weights relative to the new m_i.
        alpha: [BLOCK_M], factor that rescales an accumulator to the new m_i.
    """
    m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
    m_safe = replace_minus_infinity(m_new) if IS_MASKED else m_new
    p = tl.exp2(qk * qk_scale - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    return m_new, l_i * alpha + tl.sum(p, 1), p, alpha


@triton.jit
def _backward_stats_kernel(
    grad,
    out,
    lse,
    stats,
    heads,
    length,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write `BackwardStats` of BLOCK_M queries of one head, with a ``grad_lse`` of 0."""
    plane = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_in_bounds = query < length
    grad_ptrs = make_vector_pointers(grad, batch, head, query)
    out_ptrs = make_vector_pointers(out, batch, head, query)
    delta = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        # [BLOCK_M, BLOCK_D]
        channel = start + tl.arange(0, BLOCK_D)[None, :]
        mask = is_in_bounds[:, None] & (channel < D)
        do = tl.load(grad_ptrs + channel, mask=mask, other=0.0).to(tl.float32)
        o = tl.load(out_ptrs + channel, mask=mask, other=0.0).to(tl.float32)
        delta += tl.sum(do * o, 1)
    tl.store(stats.delta + plane * stats.padded_length + query, delta)
    query_lse = tl.load(lse + plane * length + query, mask=is_in_bounds, other=float("-inf"))
    query_lse = tl.where(query_lse == float("-inf"), float("inf"), query_lse * LOG2_E)
    tl.store(stats.lse + plane * stats.padded_length + query, query_lse)
