"""Attention under a complete plan, by kernels that read only its lists.

Values with another head dim are padded. The plan's sample is attended separately and merged. Rows
that attend to everything run separately, under a one-head plan of all blocks. The definition is
`reference.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.ops import HAS_TRITON, reference
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges, cached_per_ranges

# devices where kernels merge parts that were attended separately
JOINED_ON = ("cuda",)
# the fewest keys in a part of a row, and the most parts
SPLIT_KEYS = 4096
MOST_SPLITS = 16

Attend = Callable[..., Tensor | tuple[Tensor, Tensor]]


def attention(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    return_lse: bool = False,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `reference.attention` under ``plan``.

    Args:
        attend: Attention under the lists of a plan, for v with the head dim of q. Its arguments are
            those of `reference.attention`.
    """
    capped = {} if softcap is None else {"softcap": softcap}
    attend = partial(attend, **capped)
    value_dim = v.shape[-1]
    if value_dim != q.shape[-1]:
        # kernels support one head dim; channels of zeros change neither logits nor values
        widest = max(value_dim, q.shape[-1])
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    lists = attend
    if plan.sampled is not None:
        from cab_hf.ops.attention import sampled

        lists = partial(sampled.attention, attend, **capped)
    if plan.dense_rows is None:
        result = lists(q, k, v, plan, scale, return_lse)
    else:
        result = lists(q, k, v, replace(plan, dense_rows=None), scale, return_lse)
        result = _with_rows(attend, result if return_lse else (result,), q, k, v, plan, scale)
        result = tuple(result) if return_lse else result[0]
    if value_dim == v.shape[-1]:
        return result
    return (result[0][..., :value_dim], result[1]) if return_lse else result[..., :value_dim]


def _with_rows(attend, result, q, k, v, plan, scale) -> list[Tensor]:
    """Add the rows that attend to everything to ``result``: output, or output and log-sum-exp."""
    # the backward pass reads the engine's output, which may change in place only without gradients
    trained = result[0].requires_grad
    splits = 1 if trained or not _joined_by_kernels(q) else _splits(plan.kv_length)
    query, taken, real, rows = _gathered(plan.ranges, plan.dense_rows, plan.blocks, splits)
    index = taken[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
    dense_part = attend(q.gather(2, index), k, v, rows, scale, splits > 1 or len(result) > 1)
    if splits > 1:
        from cab_hf.ops.attention.merge import write_merged

        write_merged(result[0], result[1] if len(result) > 1 else None, *dense_part, query, real)
        return list(result)
    dense_part = dense_part if len(result) > 1 else (dense_part,)
    # these rows list nothing, so their output is 0 and their log-sum-exp is -inf. Rows named -1 are
    # mapped to query 0, where adding zeros changes nothing
    target, source = result[0], dense_part[0].masked_fill(~real[:, None, :, None], 0.0)
    add = target.scatter_add if trained else target.scatter_add_
    together = [add(2, query[:, None, :, None].expand_as(source), source)]
    for target, source in zip(result[1:], dense_part[1:], strict=False):
        source = source.masked_fill(~real[:, None], -torch.inf)
        raised = target.scatter_reduce if trained else target.scatter_reduce_
        together.append(raised(2, query[:, None].expand_as(source), source, "amax"))
    return together


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Compute `reference.with_sinks`; without gradients, ``out`` may change in place."""
    trained = torch.is_grad_enabled() and (out.requires_grad or sinks.requires_grad)
    if trained or not _joined_by_kernels(out):
        return reference.with_sinks(out, lse, sinks)
    from cab_hf.ops.attention.merge import share_with_sinks

    share_with_sinks(out, lse, sinks)
    return out


def _joined_by_kernels(x: Tensor) -> bool:
    """Return True if kernels merge parts.

    The kernels weight parts by their log-sum-exps, and have no gradients through these.
    """
    return x.device.type in JOINED_ON and HAS_TRITON and not torch.compiler.is_compiling()


def _splits(kv_length: int) -> int:
    """Return the number of parts into which the keys of dense rows are split.

    A few rows that read all keys would leave most of the GPU idle.
    """
    return max(1, min(MOST_SPLITS, kv_length // SPLIT_KEYS))


@cached_per_ranges
def _gathered(
    ranges: KeyRanges, rows: Tensor, blocks: tuple[int, int], splits: int
) -> tuple[Tensor, Tensor, Tensor, BlockPlan]:
    """Return the queries of the rows that attend to everything, and a one-head plan for them.

    Returns:
        query: int64 [B, R * query_block], the queries.
        taken: int64 [B, splits * R * query_block], the queries repeated ``splits`` times.
        real: bool [B, R * query_block], False for queries that do not exist.
        plan: The plan of ``taken``. Each repetition attends to another part of the keys.
    """
    size, key_block = blocks
    key_block = max(key_block, DENSE_BLOCK_SIZE)
    inside = torch.arange(size, device=ranges.end.device)
    query = (rows.unsqueeze(-1) * size + inside).flatten(1)
    real = (query >= 0) & (query < ranges.q_length)
    query = query.clamp(0, ranges.q_length - 1)
    first = ranges.start.gather(1, query)
    last = ranges.end.gather(1, query).masked_fill(~real, -1)
    if splits > 1:
        # parts are whole blocks, so that no block is cut at the end of a part
        part = -(-ranges.kv_length // (splits * key_block)) * key_block
        begins = part * torch.arange(splits, device=first.device, dtype=first.dtype)[:, None]
        first = torch.maximum(first.unsqueeze(1), begins).flatten(1)
        last = torch.minimum(last.unsqueeze(1), begins + (part - 1)).flatten(1)
        last = last.masked_fill(last < first, -1)
    some = replace(ranges, start=first, end=last, consecutive=False)
    if ranges.documents != 1 and any(max(blocks) % x for x in (size, key_block)):
        # documents that start at borders of ``blocks`` need not start at borders of larger blocks
        some = replace(some, aligned=False)
    return query, query.repeat(1, splits), real, BlockPlan.causal(some, 1, size, key_block)
