"""The published CAB method: select the edges of the block graph with the lowest curvature.

An edge connects a query block and a key block. Its weight is the similarity of one representative
token of each block. Its curvature is the Forman-Ricci curvature (FRC).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import blocks_of, tail_of
from cab_hf.ops import has_kernels, reference
from cab_hf.plan import BlockIndices, BlockPlan, KeyRanges, crossed_blocks
from cab_hf.predictors.base import LayerContext, Predictor, sparsity_of

# largest size of the scores in memory, in bytes; more heads are processed in several groups
SCORE_BYTES_AT_A_TIME = 1 << 30
# float32 [M_q, M_k] tensors that are in memory together per head
SCORES_OF_A_HEAD = 8


class FrcPredictor(Predictor):
    """The published CAB method (`CabConfig.published`): row-wise top-k by curvature.

    The token of largest norm represents a block. With the representatives Q of query blocks and K
    of key blocks, the edges of the block graph have the weights A = ReLU(Q K^T scale), or 0 for
    invisible key blocks. A row is a query block. A row with n visible blocks selects about (1 -
    ``config.sparsity``) * n blocks: sink blocks, local blocks, and the blocks with the highest
    `score`. With ``config.curvature="forman"`` and ``config.redundancy=1``, the highest
    score is the lowest Forman-Ricci curvature.

    On a GPU, the kernels of `cab_hf.ops.frc` and `cab_hf.ops.top_k` find the representatives and
    select the blocks without a device sync. The operations between these kernels are PyTorch
    operations in float32. Matrix products use TF32 if ``torch.set_float32_matmul_precision`` allows
    TF32.
    """

    def encode_keys(self, k: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the key of largest norm of every key block, float32 [B, H_kv, M_k, D].

        The representative of a block is NaN if a key of the block contains NaN or an infinity. Rows
        always select such blocks.

        Args:
            k: [B, H_kv, N_k, D], after RoPE.
            valid: bool [B, N_k], False for padding keys; None if no key is padding.
        """
        if valid is None:
            valid = torch.ones(k.shape[0], k.shape[2], device=k.device, dtype=torch.bool)
        if self.config.check_finite:
            reference.refuse_infinite("k", k)
        return _tokens(k, valid, block=self.config.key_block, mark=True)

    def vectors(self, q: Tensor, ranges: KeyRanges) -> Tensor:
        """Return the query of largest norm of every query block, float32 [B, H, M_q, D]."""
        if self.config.check_finite:
            reference.refuse_infinite("q", q)
        return _tokens(q, ranges.end >= 0, block=self.config.query_block, mark=False)

    def required_inputs(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        """Return "summaries", and "vectors" if the score depends on query blocks of other ranks."""
        if type(self) is not FrcPredictor:
            # the override of ``choose`` in a subclass may need q and k of all ranks
            return super().required_inputs(call, heads)
        if is_curved(self.config.curvature, self.config.redundancy):
            return ("summaries", "vectors")
        return ("summaries",)

    def choose(
        self, q: Tensor, summary: Tensor, call: LayerContext, vectors: Tensor | None = None
    ) -> BlockPlan:
        """Return the plan for q.

        Args:
            q: [B, H, N_q, D], after RoPE.
            summary: the result of `encode_keys`, [B, H_kv, M_k, D].
            call: the context of the layer.
            vectors: representatives of the query blocks of all ranks, [B, H, M_q, D], under context
                parallelism; None for the query blocks of q.
        """
        if vectors is None:
            return self._plan(self.vectors(q, call.ranges), summary, call)
        sequence_call = replace(call, ranges=call.ranges.sequence_ranges)
        plan_of_all_ranks = self._plan(vectors, summary, sequence_call)
        return call.ranges.local_plan(plan_of_all_ranks)

    def _plan(self, queries: Tensor, keys: Tensor, call: LayerContext) -> BlockPlan:
        """Return the plan from the representatives of blocks.

        Args:
            queries: [B, H, M_q, D], representatives of the query blocks.
            keys: [B, H_kv, M_k, D], representatives of the key blocks.
            call: the context of the layer.
        """
        config, ranges, heads = self.config, call.ranges, queries.shape[1]
        query_block, key_block = blocks_of(config)
        tail_tokens, _ = tail_of(config)
        has_tail = ranges.has_tail(tail_tokens, query_block)
        tail = ranges.tail(tail_tokens, query_block) if has_tail else None
        dense_rows = ranges.tail_rows(tail_tokens, query_block)
        is_tail_listed = tail is not None and dense_rows is None
        sparsity = sparsity_of(config, call.layer, heads)
        bounds = reference.row_bounds(
            ranges, query_block, key_block, config.sink_blocks, config.local_blocks
        )
        marked = keys[..., 0].isnan().repeat_interleave(heads // keys.shape[1], dim=1)
        wanted = wanted_blocks(
            bounds,
            tail=tail,
            is_tail_listed=is_tail_listed,
            sparsity=sparsity,
            max_density=config.max_density,
            marked=marked,
        )
        max_share = 1.0 if is_tail_listed else min(1 - min(sparsity), config.max_density)
        crossed, kv_blocks = crossed_blocks(query_block, key_block), keys.shape[2]
        # add 1 because the number of blocks is rounded up, and 1 for floating-point errors
        max_selected = torch.sym_int(max_share * kv_blocks) + 2
        # add 1 because a row with a marked block may list one more block
        max_forced = config.sink_blocks + max(config.local_blocks, crossed) + 1
        full_counts, full, partial_counts, partial = _lists(
            queries.float(),
            keys.float(),
            bounds,
            wanted.expand(-1, heads, -1).contiguous(),
            ranges.rows(query_block).block_positions(query_block),
            scale=call.scale,
            query_block=query_block,
            key_block=key_block,
            curvature=config.curvature,
            redundancy=config.redundancy,
            full_width=min(kv_blocks, max(max_selected, max_forced)),
            partial_width=min(kv_blocks, crossed) if ranges.aligned else kv_blocks,
        )
        return BlockPlan(
            BlockIndices(full_counts, full),
            BlockIndices(partial_counts, partial),
            ranges,
            query_block=query_block,
            key_block=key_block,
            dense_rows=dense_rows,
        )


def is_curved(curvature: str, redundancy: float) -> bool:
    """Return True if the score depends on curvature and not on edge weights alone.

    Args:
        curvature: ``"forman"``, ``"additive"`` or ``"none"``.
        redundancy: weight of the curvature, in [0, 1].
    """
    return curvature != "none" and redundancy > 0


def largest_norm_tokens(x: Tensor, valid: Tensor, block: int, mark: bool = False) -> Tensor:
    """Return the token of largest norm of every block of x [B, H, N, D], float32 [B, H, M, D].

    Ties select the first token. Padding tokens and tokens with NaN are selected only if the block
    has no other tokens.

    Args:
        x: q or k, [B, H, N, D].
        valid: bool [B, N], False for padding.
        block: tokens per block.
        mark: True to return NaN for blocks with a token whose squared norm is not finite.
    """
    num_padding = -x.shape[2] % block
    tokens = F.pad(x, (0, 0, 0, num_padding)).unflatten(2, (-1, block)).float()
    is_real = F.pad(valid, (0, num_padding)).unflatten(1, (-1, block)).unsqueeze(1)
    squared_norm = tokens.square().sum(-1)
    is_marked = (is_real & ~squared_norm.isfinite()).any(-1, keepdim=True)
    squared_norm = squared_norm.masked_fill(~is_real | squared_norm.isnan(), -1.0)
    index = squared_norm.argmax(-1)[..., None, None]
    largest = tokens.take_along_dim(index, dim=-2).squeeze(-2)
    return largest.masked_fill(is_marked, torch.nan) if mark else largest


def affinity_of(queries: Tensor, keys: Tensor, scale: float, visible: Tensor) -> Tensor:
    """Return the edge weights ReLU(Q K^T scale), float32 [B, H, M_q, M_k].

    Args:
        queries: Q, representatives of the query blocks, float32 [B, H, M_q, D].
        keys: K, representatives of the key blocks, float32 [B, H, M_k, D].
        scale: factor of the products.
        visible: bool, broadcast to [B, H, M_q, M_k]. Weights are 0 where ``visible`` is False or
            the product is NaN.
    """
    logits = queries @ keys.transpose(-1, -2) * scale
    return logits.where(visible & (logits > 0), 0.0)


def two_hop(affinity: Tensor, block_positions: Tensor, query_block: int, key_block: int) -> Tensor:
    """Return the total weight of paths from row i over row t to key block j, [B, H, M_q, M_k].

    If query blocks and key blocks have the same size, the result is the matrix product A A.
    Otherwise columns are first converted from key blocks to query blocks, and the product is
    converted back. With chunked prefill, rows of earlier chunks do not take part as row t.

    Weights that are not finite count as 0. Otherwise a row i without an edge to row t would get
    0 * inf = NaN from an infinite weight of row t.

    Args:
        affinity: edge weights A, [B, H, M_q, M_k].
        block_positions: int64 [B, M_q], index of each query block in the sequence.
        query_block: tokens per query block.
        key_block: tokens per key block; a multiple or a divisor of ``query_block``.
    """
    kv_blocks = affinity.shape[-1]
    # key blocks per query block, and query blocks per key block: one of the two is 1
    ratio, spread = max(1, query_block // key_block), max(1, key_block // query_block)
    coarse = affinity.where(affinity.isfinite(), 0.0)
    if ratio > 1:
        coarse = F.pad(coarse, (0, -kv_blocks % ratio)).unflatten(-1, (-1, ratio)).sum(-1)
    elif spread > 1:
        coarse = (coarse / spread).repeat_interleave(spread, dim=-1)
    to_rows = coarse.gather(-1, block_positions[:, None, None].expand(*coarse.shape[:3], -1))
    hops = to_rows @ coarse
    if spread > 1:
        return hops.unflatten(-1, (kv_blocks, spread)).sum(-1)
    return hops.repeat_interleave(ratio, dim=-1)[..., :kv_blocks] if ratio > 1 else hops


def forman_curvature(affinity: Tensor, hops: Tensor) -> Tensor:
    """Return the Forman-Ricci curvature F = 4 A - S_i - S_j + 3 A A, [B, H, M_q, M_k].

    S_i is the sum of row i of A. S_j is the sum of column j of A over the rows up to i, so that the
    selection of a row does not depend on later queries.

    Args:
        affinity: edge weights A, [B, H, M_q, M_k].
        hops: A A, the result of `two_hop`, [B, H, M_q, M_k].
    """
    return 4 * affinity - affinity.sum(-1, keepdim=True) - affinity.cumsum(-2) + 3 * hops


def min_max(x: Tensor, visible: Tensor) -> Tensor:
    """Scale each row of x to [0, 1] over its visible entries; invisible entries become 0.

    Args:
        x: [B, H, M_q, M_k].
        visible: bool, broadcast to the shape of x.
    """
    low = x.masked_fill(~visible, torch.inf).amin(-1, keepdim=True)
    high = x.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
    scaled = (x - low) / (high - low).clamp(min=torch.finfo(x.dtype).eps)
    return scaled.masked_fill(~visible, 0.0)


def score(
    affinity: Tensor, hops: Tensor | None, visible: Tensor, curvature: str, redundancy: float
) -> Tensor:
    """Return the score of each block, [B, H, M_q, M_k]; every row selects the highest scores.

    * ``"forman"``: (1 - redundancy) * A - redundancy * F, with F of `forman_curvature`.
    * ``"additive"``: `min_max` (A) - redundancy * A A / M_k. M_k is the number of all key blocks,
      as published. Thus padding and packing change the selection.

    Args:
        affinity: edge weights A, [B, H, M_q, M_k].
        hops: A A, the result of `two_hop`; None for the score A.
        visible: bool, broadcast to [B, H, M_q, M_k].
        curvature: ``"forman"`` or ``"additive"``.
        redundancy: weight of the curvature, in [0, 1].
    """
    if hops is None:
        return affinity
    if curvature == "forman":
        return (1 - redundancy) * affinity - redundancy * forman_curvature(affinity, hops)
    return min_max(affinity, visible) - redundancy * hops / affinity.shape[-1]


def wanted_blocks(
    bounds: Tensor,
    *,
    tail: Tensor | None,
    is_tail_listed: bool,
    sparsity: tuple[float, ...],
    max_density: float,
    marked: Tensor | None = None,
) -> Tensor:
    """Return the number of blocks that each row lists, int32 [B, H or 1, M_q].

    For a row with n visible blocks::

        wanted = max(min(ceil((1 - sparsity) * n), ceil(max_density * n)), forced)

    ``forced`` is the number of forced blocks, plus one if the row has a visible marked block that
    is not forced.

    Args:
        bounds: int32 [6, B, M_q], the result of `reference.row_bounds`.
        tail: bool [B, M_q], True for rows of the dense tail; None if there is no tail.
        is_tail_listed: True if rows of the tail list all visible blocks. False if their lists are
            empty, because the plan names these rows.
        sparsity: fraction of the visible blocks that a row does not list: one number for all heads,
            or one number per head.
        max_density: largest fraction of the visible blocks that a row lists, unless more blocks
            are forced.
        marked: bool [B, H, M_k], blocks with a key that is not finite; None for none.
    """
    first, last, sinks, local = bounds[:4].unsqueeze(2)
    num_visible = last - first + 1
    forced = num_visible - (local - sinks).clamp(min=0)
    if marked is not None:
        forced = forced + reference.has_visible_marked(marked, bounds).int()
    dropped = sparsity[0] if len(sparsity) == 1 else _on_device(sparsity, bounds.device)
    # subtract 1e-9 because 0.05 * 20 must not round up to 2
    share, most = (
        (num_visible.double() * x - 1e-9).ceil().int() for x in (1 - dropped, max_density)
    )
    wanted = share.minimum(most).maximum(forced)
    if tail is None:
        return wanted
    return wanted.where(~tail.unsqueeze(1), num_visible if is_tail_listed else 0)


@lru_cache(1024)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor on ``device``, float64 [H, 1].

    The result is cached, because the copy synchronises with the device, which is forbidden while a
    CUDA graph is captured.
    """
    return torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1)


@torch.library.custom_op("cab_hf::frc_tokens", mutates_args=())
def _tokens(x: Tensor, valid: Tensor, block: int, mark: bool) -> Tensor:
    """Run `largest_norm_tokens` as a registered op, on a GPU by a kernel."""
    if not has_kernels(x):
        return largest_norm_tokens(x, valid, block, mark)
    # imported here, so that models on a CPU run without Triton
    from cab_hf.ops import frc

    return frc.largest_norm_tokens(x, valid, block, mark)


@_tokens.register_fake
def _(x, valid, block, mark):
    blocks = -(-x.shape[2] // block)
    return x.new_empty(*x.shape[:2], blocks, x.shape[3], dtype=torch.float32)


@torch.library.custom_op("cab_hf::frc", mutates_args=())
def _lists(
    queries: Tensor,
    keys: Tensor,
    bounds: Tensor,
    wanted: Tensor,
    block_positions: Tensor,
    scale: float,
    query_block: int,
    key_block: int,
    curvature: str,
    redundancy: float,
    full_width: int,
    partial_width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select blocks by the scores of representatives, and return the lists of selected blocks.

    Args:
        queries: float32 [B, H, M_q, D], representatives of the query blocks.
        keys: float32 [B, H_kv, M_k, D], representatives of the key blocks; NaN for marked blocks.
        bounds: int32 [6, B, M_q], the result of `reference.row_bounds`.
        wanted: int32 [B, H, M_q], the number of blocks that each row lists.
        block_positions: int64 [B, M_q], see `two_hop`.
        scale: factor of the products.
        query_block: tokens per query block.
        key_block: tokens per key block.
        curvature: see `score`.
        redundancy: see `score`.
        full_width: entries per list of full blocks.
        partial_width: entries per list of partial blocks.

    Returns:
        Counts and indices of full blocks, then counts and indices of partial blocks. Counts are
        int32 [B, H, M_q]; indices have one more dimension, the entries of a list.
    """
    (batch, heads, q_blocks, _), kv_blocks = queries.shape, keys.shape[2]
    column = torch.arange(kv_blocks, device=queries.device)
    first, last, sinks, local, first_full, last_full = bounds[:, :, None, :, None]
    visible = (column >= first) & (column <= last)
    forced = visible & ((column < sinks) | (column >= local))
    keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
    marked = keys[..., 0].isnan().unsqueeze(2)
    uses_kernels, selected = has_kernels(queries), []
    lists = _empty_lists(queries, full_width, partial_width)
    score_bytes_per_head = 4 * SCORES_OF_A_HEAD * batch * q_blocks * kv_blocks
    heads_per_group = max(1, SCORE_BYTES_AT_A_TIME // score_bytes_per_head)
    has_curvature = is_curved(curvature, redundancy)
    # autocast would round the products to 16 bits
    with torch.autocast(queries.device.type, enabled=False):
        for first_head in range(0, heads, heads_per_group):
            group = slice(first_head, first_head + heads_per_group)
            affinity = affinity_of(queries[:, group], keys[:, group], scale, visible)
            hops = (
                two_hop(affinity, block_positions, query_block, key_block)
                if has_curvature
                else None
            )
            group_score = score(
                affinity, hops, visible=visible, curvature=curvature, redundancy=redundancy
            )
            group_score = group_score.masked_fill(marked[:, group], torch.inf)
            if uses_kernels:
                from cab_hf.ops import top_k

                top_k.select(
                    score=group_score, bounds=bounds, wanted=wanted, start=first_head, lists=lists
                )
            else:
                selected.append(
                    reference.best_of_rows(group_score, visible, forced, wanted[:, group])
                )
    if uses_kernels:
        return lists
    keep, is_full = torch.cat(selected, dim=1), (column >= first_full) & (column <= last_full)
    full = BlockIndices.from_dense(keep & is_full, full_width)
    partial = BlockIndices.from_dense(keep & ~is_full, partial_width)
    return full.counts, full.indices, partial.counts, partial.indices


@_lists.register_fake
def _(
    queries,
    keys,
    bounds,
    wanted,
    block_positions,
    scale,
    query_block,
    key_block,
    curvature,
    redundancy,
    full_width,
    partial_width,
):
    return _empty_lists(queries, full_width, partial_width)


def _empty_lists(
    queries: Tensor, full_width: int, partial_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the result of `_lists`; ``queries`` has the shape [B, H, M_q, D]."""
    rows = tuple(queries.shape[:3])
    full_counts, full, partial_counts, partial = (
        queries.new_empty(shape, dtype=torch.int32)
        for shape in (rows, (*rows, full_width), rows, (*rows, partial_width))
    )
    return full_counts, full, partial_counts, partial
