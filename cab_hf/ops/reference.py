"""Definitions of block selection and of attention under a plan, in plain PyTorch.

Kernels are tested against these functions. A row is a query block. Shapes: q is [B, H, N_q, D], k
is [B, H_kv, N_k, D], v is [B, H_kv, N_k, D_v]. A group has g = H / H_kv query heads. M_q is the
number of query blocks, M_k the number of key blocks. Scores are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig, tail_and_query_block_sizes
from cab_hf.plan import BlockPlan, KeyRanges, cached_per_ranges

# largest number of queries whose token mask is built at a time; limits memory, and does not affect
# the result
QUERIES_PER_CHUNK = 256
# smallest divisor when weights are normalised by their sum, which may be 0
MIN_DIVISOR = 1e-30


class Masks(NamedTuple):
    """Token mask of one chunk of queries.

    Attributes:
        query_slice: Slice of the N_q queries: the queries of the chunk.
        key_slice: Slice of the N_k keys: the keys of the mask. No query of the chunk attends to
            other keys.
        is_attended: bool [B or 1, H or 1, rows, keys], True where a query attends to a key.
        logit_bias: Added to the scaled logits, float with the shape of ``is_attended``; None for
            zeros.
        has_finite_kv: False if k or v contains NaN or an infinity. The keys and values that no
            query of the chunk attends to must then be replaced by zeros.
    """

    query_slice: slice
    key_slice: slice
    is_attended: Tensor
    logit_bias: Tensor | None = None
    has_finite_kv: bool = True


def standardise(x: Tensor, is_visible: Tensor) -> Tensor:
    """Shift and scale the visible entries of each row to zero mean and unit variance.

    Args:
        x: float [..., M_k].
        is_visible: bool, same shape. Invisible entries do not affect the mean and the variance, and
            are 0 in the result.
    """
    num_visible = is_visible.sum(-1, keepdim=True).clamp(min=1)
    x = x.masked_fill(~is_visible, 0.0)
    centred = (x - x.sum(-1, keepdim=True) / num_visible).masked_fill(~is_visible, 0.0)
    deviation = (centred.square().sum(-1, keepdim=True) / num_visible).sqrt()
    return centred / deviation.clamp(min=torch.finfo(x.dtype).eps)


def forced_blocks(is_visible: Tensor, ranges: KeyRanges, config: CabConfig) -> Tensor:
    """Return the key blocks that each row attends to regardless of scores, bool [B, M_q, M_k].

    The forced blocks of a row are the first ``sink_blocks`` and the last ``local_blocks`` of its
    visible blocks, and the blocks that contain the tokens of the row itself. In rows of the dense
    tail (``config.dense_tail_blocks``, see `KeyRanges.tail`), all visible blocks are forced.

    Args:
        is_visible: bool [B, M_q, M_k], True if any key of the block is visible to any query of the
            row.
        ranges: The visible keys of each query.
        config: The configuration, of which block sizes and numbers of forced blocks are used.
    """
    block_ranges = ranges.rows(config.query_block)
    block_index = torch.arange(is_visible.shape[-1], device=is_visible.device)
    first_visible = (block_ranges.min_first // config.key_block).unsqueeze(-1)
    last_visible = (block_ranges.max_last // config.key_block).unsqueeze(-1)
    diagonal_block = (block_ranges.min_last // config.key_block).unsqueeze(-1)
    is_sink = block_index < first_visible + config.sink_blocks
    is_local = (block_index > last_visible - config.local_blocks) | (block_index >= diagonal_block)
    is_tail = ranges.tail(*tail_and_query_block_sizes(config)).unsqueeze(-1)
    return is_visible & (is_sink | is_local | is_tail)


def share_of_row(is_visible: Tensor, fraction: float | Tensor) -> Tensor:
    """Return ceil(fraction * number of visible blocks) for each row, int64 [..., 1].

    Args:
        is_visible: bool [..., M_k].
        fraction: Fraction from 0 to 1; a tensor must broadcast with [..., 1].
    """
    num_visible = is_visible.sum(-1, keepdim=True).to(torch.float64)
    # 1e-9 compensates rounding: 0.07 * 100 is above 7 in floating point, and ceil would return 8
    return (num_visible * fraction - 1e-9).ceil().to(torch.int64)


def top_blocks(score: Tensor, is_candidate: Tensor, num_blocks: Tensor) -> Tensor:
    """Return the ``num_blocks`` candidates of each row with the highest scores, bool [..., M_k].

    Among equal scores, the lower index comes first.

    Args:
        score: float [..., M_k].
        is_candidate: bool, same shape, True for entries that may be returned.
        num_blocks: int [..., 1], the number of entries to return per row.
    """
    order = score.masked_fill(~is_candidate, -torch.inf).argsort(
        dim=-1, descending=True, stable=True
    )
    rank = order.argsort(-1)
    return is_candidate & (rank < num_blocks)


def find_nonfinite_keys(k: Tensor, padding_mask: Tensor) -> Tensor:
    """Return True for keys that contain NaN or an infinity, bool [B, H_kv, N_k].

    Args:
        k: [B, H_kv, N_k, D].
        padding_mask: bool [B, N_k], False for padding keys, whose result is always False.
    """
    # a maximum is NaN if any entry is NaN; this is faster than isfinite().all()
    return ~(k.abs().amax(-1) < torch.inf) & padding_mask.unsqueeze(1)


def find_marked_blocks(is_marked_key: Tensor, key_block: int) -> Tensor:
    """Return True for key blocks that contain a key with NaN or an infinity, bool [B, H_kv, M_k].

    Predictors must select these marked blocks, because the logits of such keys are NaN or infinite,
    and attention must return NaN as dense attention does.

    Args:
        is_marked_key: bool [B, H_kv, N_k], result of `find_nonfinite_keys`.
        key_block: Tokens per key block.
    """
    return (
        F.pad(is_marked_key, (0, -is_marked_key.shape[2] % key_block))
        .unflatten(2, (-1, key_block))
        .any(-1)
    )


def has_visible_marked_block(is_marked_block: Tensor, block_bounds: Tensor) -> Tensor:
    """Return True for rows with a visible marked block that is not forced, bool [B, H_kv, M_q].

    Args:
        is_marked_block: bool [B, H_kv, M_k], result of `find_marked_blocks`.
        block_bounds: int32 [6, B, M_q], result of `compute_block_bounds`.
    """
    # number of marked blocks before each block; blocks from end_of_sinks to first_local - 1 of a
    # row are visible and not forced
    num_marked_before = F.pad(is_marked_block.cumsum(-1, dtype=torch.int32), (1, 0))
    end_of_sinks, first_local = (
        x.long().unsqueeze(1).expand(-1, is_marked_block.shape[1], -1) for x in block_bounds[2:4]
    )
    return num_marked_before.gather(2, first_local) > num_marked_before.gather(2, end_of_sinks)


def compute_max_blocks(
    block_bounds: Tensor, max_density: float, is_marked_block: Tensor | None = None
) -> Tensor:
    """Return the largest number of blocks that each row may select, int32 [B, 1 or H_kv, M_q].

        max(ceil(max_density * visible blocks), forced blocks + m)

    m is 1 if `has_visible_marked_block` is True for the row, else 0. Then at least one marked block
    fits.

    Args:
        block_bounds: int32 [6, B, M_q], result of `compute_block_bounds`.
        max_density: Largest fraction of the visible blocks that a row may select.
        is_marked_block: bool [B, H_kv, M_k], result of `find_marked_blocks`; None if no block is
            marked.
    """
    first_visible, last_visible, end_of_sinks, first_local = block_bounds[:4].unsqueeze(2)
    num_visible = last_visible - first_visible + 1
    num_forced = num_visible - (first_local - end_of_sinks).clamp(min=0)
    if is_marked_block is not None:
        num_forced = num_forced + has_visible_marked_block(is_marked_block, block_bounds).int()
    # 1e-9 compensates rounding: 0.07 * 100 is above 7 in floating point, and ceil would return 8
    return (num_visible.double() * max_density - 1e-9).ceil().int().maximum(num_forced)


def select_best_blocks(
    score: Tensor, is_visible: Tensor, is_forced: Tensor, num_blocks: Tensor
) -> Tensor:
    """Return the ``num_blocks`` best blocks of each row, bool [B, H, M_q, M_k].

    Forced blocks come first, then the blocks with the highest scores. Among equal scores, the lower
    index comes first. NaN counts as infinity.

    Args:
        score: float [B, H, M_q, M_k].
        is_visible: bool, broadcasts with ``score``; blocks that are not visible are never returned.
        is_forced: bool, broadcasts with ``score``. All forced blocks of a row are returned unless
            ``num_blocks`` is 0 for the row.
        num_blocks: int [B, H, M_q], number of blocks to return per row.
    """
    num_blocks, score = num_blocks.unsqueeze(-1), score.masked_fill(score.isnan(), torch.inf)
    num_selected_by_score = num_blocks - is_forced.sum(-1, keepdim=True)
    return (is_forced & (num_blocks > 0)) | top_blocks(
        score, is_visible & ~is_forced, num_selected_by_score
    )


@cached_per_ranges
def compute_block_bounds(
    key_ranges: KeyRanges, query_block: int, key_block: int, sink_blocks: int, local_blocks: int
) -> Tensor:
    """Return the ranges of visible, forced and full key blocks of each row, int32 [6, B, M_q].

    The six key block indices of a row are:

    0. the first visible block,
    1. the last visible block,
    2. the first block after the sink blocks,
    3. the first local block,
    4. the first block that is completely visible to all queries of the row,
    5. the last block that is completely visible to all queries of the row.

    Blocks before index 2 and from index 3 on are forced. Blocks that contain the tokens of the row
    itself are local. A row that contains only padding has first block 0 and last block -1.

    Args:
        key_ranges: The visible keys of each query.
        query_block, key_block: Block sizes in tokens.
        sink_blocks, local_blocks: Numbers of forced blocks at the start and at the end of the
            visible blocks.
    """
    block_ranges = key_ranges.rows(query_block)
    has_queries = block_ranges.queries > 0
    first_visible = block_ranges.min_first.where(has_queries, 0) // key_block
    last_visible = block_ranges.max_last // key_block
    diagonal_block = block_ranges.min_last.where(has_queries, -1) // key_block
    end_of_sinks = (first_visible + sink_blocks).minimum(last_visible + 1)
    first_local = diagonal_block.minimum(last_visible + 1 - local_blocks).maximum(first_visible)
    first_full = -(-block_ranges.max_first // key_block)
    last_full = (block_ranges.min_last.where(has_queries, -1) + 1) // key_block - 1
    return torch.stack(
        (first_visible, last_visible, end_of_sinks, first_local, first_full, last_full)
    ).int()


def require_finite(tensor_name: str, x: Tensor) -> None:
    """Raise ValueError if ``x`` contains infinities or NaN. The check is a device sync.

    Args:
        tensor_name: Name of the tensor in the error message.
        x: The tensor to check.
    """
    if not bool(torch.isfinite(x).all()):
        raise ValueError(
            f"{tensor_name} must be finite, got infinite or NaN values (shape {tuple(x.shape)}). "
            "Look for an overflow in the layers before this one."
        )


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(logits / softcap), or the logits unchanged if ``softcap`` is None."""
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool = False,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over the key blocks of a plan.

    The softmax of a query runs over its visible keys in the blocks that the plan lists, samples, or
    implies by dense rows. The logits of keys in sampled blocks are increased by
    log(``plan.sample_period``). The output is 0 for queries without keys (padding queries, and
    queries whose lists are empty).

    The function is differentiable. Token masks are built for `QUERIES_PER_CHUNK` queries at a time.
    A token with NaN or an infinity affects only query blocks that attend to this token. For
    torch.compile, `cab_hf.ops.attention.traced` registers this function as one op.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        v: [B, H_kv, N_k, D_v].
        plan: The key blocks that each query block attends to. H is a multiple of the plan's heads,
            see `BlockPlan.shared_by`.
        scale: Factor of the products q · k.
        return_lse: True to also return the log-sum-exp of the logits of each query.
        softcap: Soft cap of the scaled logits, see `cap_logits`; None for no cap.

    Returns:
        out: [B, H, N_q, D_v].
        lse: Only with ``return_lse``. The log-sum-exp (natural logarithm), [B, H, N_q], float32, or
            float64 for float64 inputs. It is -inf for queries without keys.
    """
    chunks = iterate_masks(q, k, v, plan)
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, dim=1) if group_size > 1 else x for x in (k, v))
    out_chunks, lse_chunks = [], []
    for chunk in chunks:
        out, lse = _attend_chunk(
            q[:, :, chunk.query_slice],
            k[:, :, chunk.key_slice],
            v[:, :, chunk.key_slice],
            chunk,
            scale=scale,
            return_lse=return_lse,
            softcap=softcap,
        )
        out_chunks.append(out)
        lse_chunks.append(lse)
    out = torch.cat(out_chunks, dim=2)
    return (out, torch.cat(lse_chunks, dim=2)) if return_lse else out


def _attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk: Masks,
    *,
    scale: float,
    return_lse: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of one chunk of n queries over m keys.

    Args:
        q: [B, H, n, D].
        k: [B, H, m, D], repeated to the heads of q.
        v: [B, H, m, D_v], repeated to the heads of q.
        chunk: The token mask of the n queries and m keys.
        scale: Factor of the products q · k.
        return_lse: True to return the log-sum-exp.
        softcap: Soft cap of the scaled logits; None for no cap.

    Returns:
        out: [B, H, n, D_v].
        lse: [B, H, n], the log-sum-exp; None without ``return_lse``.
    """
    out_dtype, logits, lse = q.dtype, None, None
    if not chunk.has_finite_kv:
        # NaN - inf and 0 * NaN are NaN, so that keys and values that are masked must be finite
        is_unattended_key = ~chunk.is_attended.any(dim=-2).unsqueeze(-1)
        k, v = (x.masked_fill(is_unattended_key, 0.0) for x in (k, v))
    # the softmax over no keys is NaN. Therefore a query without keys attends to all keys here, and
    # its output is set to 0 below
    has_no_keys = ~chunk.is_attended.any(dim=-1, keepdim=True)
    token_mask = chunk.is_attended | has_no_keys
    if return_lse or softcap is not None:
        logits = _compute_logits(q, k, logit_bias=chunk.logit_bias, scale=scale, softcap=softcap)
    if softcap is not None:
        p = logits.masked_fill(~token_mask, -torch.inf).softmax(-1)
        out = p @ v.to(p.dtype)
    else:
        if chunk.logit_bias is not None:
            token_mask = chunk.logit_bias.masked_fill(~token_mask, -torch.inf)
            q, k, v = (x.to(token_mask.dtype) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=token_mask, scale=scale)
    if return_lse:
        lse = logits.masked_fill(~chunk.is_attended, -torch.inf).logsumexp(-1)
    return out.to(out_dtype).masked_fill(has_no_keys, 0.0), lse


def rescale_for_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Rescale attention as if the softmax of each head had one more logit, whose value is zero.

        out * exp(lse) / (exp(lse) + exp(sink))

    Args:
        out: [B, H, N_q, D_v], attention without sinks.
        lse: [B, H, N_q], the log-sum-exp of the logits; -inf for queries without keys.
        sinks: [H], the additional logit of each head, not multiplied by the scale of q · k.
    """
    share_without_sink = (lse - sinks.to(lse.dtype).unsqueeze(-1)).sigmoid()
    return out * share_without_sink.to(out.dtype).unsqueeze(-1)


def iterate_masks(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> Iterator[Masks]:
    """Yield the token masks of ``plan`` for all queries, one chunk of queries at a time.

    A chunk has at most `QUERIES_PER_CHUNK` queries. If k or v contains NaN or infinities, all
    queries of a chunk are in one query block. Keys that this query block does not attend to can
    then be replaced by zeros, without a change for other query blocks.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        v: [B, H_kv, N_k, D_v].
        plan: The key blocks that each query block attends to.
    """
    has_finite_kv = all(bool(x.isfinite().all()) for x in (k, v))
    heads_per_list = plan.shared_by(q.shape[1])
    sample_plan = None if plan.sampled is None else plan.of_sampled()
    queries_per_chunk = (
        QUERIES_PER_CHUNK if has_finite_kv else math.gcd(QUERIES_PER_CHUNK, plan.query_block)
    )
    for start in range(0, plan.q_length, queries_per_chunk):
        stop = min(start + queries_per_chunk, plan.q_length)
        end_of_keys = max(1, int(plan.ranges.end[:, start:stop].max()) + 1)
        is_attended = plan.token_mask(start, stop, end_of_keys).repeat_interleave(
            heads_per_list, dim=1
        )
        logit_bias = None
        if sample_plan is not None:
            is_sampled = sample_plan.token_mask(start, stop, end_of_keys)
            is_sampled = is_sampled.repeat_interleave(heads_per_list, dim=1)
            # at least float32, because 16 bits would round log(sample_period)
            bias_dtype = torch.promote_types(q.dtype, torch.float32)
            is_attended = is_attended | is_sampled
            logit_bias = is_sampled.to(bias_dtype) * math.log(plan.sample_period)
        yield Masks(
            query_slice=slice(start, stop),
            key_slice=slice(0, end_of_keys),
            is_attended=is_attended,
            logit_bias=logit_bias,
            has_finite_kv=has_finite_kv,
        )


def _compute_logits(
    q: Tensor, k: Tensor, logit_bias: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Return the logits of q [B, H, n, D] and k [B, H, m, D] in at least float32, [B, H, n, m].

    Args:
        q: Queries.
        k: Keys, repeated to the heads of q.
        logit_bias: [B or 1, H or 1, n, m], added after the soft cap; None for zeros.
        scale: Factor of the products.
        softcap: Soft cap of the scaled products; None for no cap.
    """
    logit_dtype = torch.promote_types(q.dtype, torch.float32)
    logits = cap_logits(q.to(logit_dtype) @ k.to(logit_dtype).transpose(-1, -2) * scale, softcap)
    return logits if logit_bias is None else logits + logit_bias
