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

from cab_hf.config import block_sizes, tail_and_query_block_sizes
from cab_hf.ops import has_kernels, reference
from cab_hf.plan import BlockIndices, BlockPlan, KeyRanges, crossed_blocks
from cab_hf.predictors.base import LayerContext, Predictor, get_head_sparsity

# largest size of the scores in memory, in bytes; more heads are processed in several groups
MAX_SCORE_BYTES = 1 << 30
# float32 [M_q, M_k] tensors that are in memory together per head
SCORE_TENSORS_PER_HEAD = 8


class FrcPredictor(Predictor):
    """The published CAB method (`CabConfig.published`): row-wise top-k by curvature.

    The token of largest norm represents a block. With the representatives Q of query blocks and K
    of key blocks, the edges of the block graph have the weights A = ReLU(Q K^T scale), or 0 for
    invisible key blocks. A row is a query block. A row with n visible blocks selects about (1 -
    ``config.sparsity``) * n blocks: sink blocks, local blocks, and the blocks with the highest
    `compute_scores`. With ``config.curvature="forman"`` and ``config.redundancy=1``, the highest
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
            reference.require_finite("k", k)
        return _largest_norm_tokens_op(
            k, valid, block_size=self.config.key_block, mark_not_finite=True
        )

    def vectors(self, q: Tensor, ranges: KeyRanges) -> Tensor:
        """Return the query of largest norm of every query block, float32 [B, H, M_q, D]."""
        if self.config.check_finite:
            reference.require_finite("q", q)
        return _largest_norm_tokens_op(
            q, ranges.end >= 0, block_size=self.config.query_block, mark_not_finite=False
        )

    def required_inputs(
        self, layer_context: LayerContext, heads: tuple[int, int]
    ) -> Collection[str]:
        """Return "summaries", and "vectors" if the score depends on query blocks of other ranks."""
        if type(self) is not FrcPredictor:
            # the override of ``choose`` in a subclass may need q and k of all ranks
            return super().required_inputs(layer_context, heads)
        if depends_on_curvature(self.config.curvature, self.config.redundancy):
            return ("summaries", "vectors")
        return ("summaries",)

    def choose(
        self, q: Tensor, summary: Tensor, layer_context: LayerContext, vectors: Tensor | None = None
    ) -> BlockPlan:
        """Return the plan for q.

        Args:
            q: [B, H, N_q, D], after RoPE.
            summary: the result of `encode_keys`, [B, H_kv, M_k, D].
            layer_context: the context of the layer.
            vectors: representatives of the query blocks of all ranks, [B, H, M_q, D], under context
                parallelism; None for the query blocks of q.
        """
        if vectors is None:
            return self._make_plan(self.vectors(q, layer_context.ranges), summary, layer_context)
        sequence_context = replace(layer_context, ranges=layer_context.ranges.sequence_ranges)
        plan_of_all_ranks = self._make_plan(vectors, summary, sequence_context)
        return layer_context.ranges.local_plan(plan_of_all_ranks)

    def _make_plan(
        self, query_vectors: Tensor, key_vectors: Tensor, layer_context: LayerContext
    ) -> BlockPlan:
        """Return the plan from the representatives of blocks.

        Args:
            query_vectors: [B, H, M_q, D], representatives of the query blocks.
            key_vectors: [B, H_kv, M_k, D], representatives of the key blocks.
            layer_context: the context of the layer.
        """
        config, key_ranges, heads = self.config, layer_context.ranges, query_vectors.shape[1]
        query_block, key_block = block_sizes(config)
        tail_tokens, _ = tail_and_query_block_sizes(config)
        has_tail = key_ranges.has_tail(tail_tokens, query_block)
        tail_mask = key_ranges.tail(tail_tokens, query_block) if has_tail else None
        dense_rows = key_ranges.tail_rows(tail_tokens, query_block)
        is_tail_listed = tail_mask is not None and dense_rows is None
        sparsity = get_head_sparsity(config, layer_context.layer, heads)
        block_bounds = reference.compute_block_bounds(
            key_ranges, query_block, key_block, config.sink_blocks, config.local_blocks
        )
        is_marked_block = (
            key_vectors[..., 0].isnan().repeat_interleave(heads // key_vectors.shape[1], dim=1)
        )
        num_listed = count_listed_blocks(
            block_bounds,
            tail_mask=tail_mask,
            is_tail_listed=is_tail_listed,
            sparsity=sparsity,
            max_density=config.max_density,
            is_marked_block=is_marked_block,
        )
        max_row_density = 1.0 if is_tail_listed else min(1 - min(sparsity), config.max_density)
        num_crossed_blocks, kv_blocks = crossed_blocks(query_block, key_block), key_vectors.shape[2]
        # add 1 because the number of blocks is rounded up, and 1 for floating-point errors
        max_selected = torch.sym_int(max_row_density * kv_blocks) + 2
        # add 1 because a row with a marked block may list one more block
        max_forced = config.sink_blocks + max(config.local_blocks, num_crossed_blocks) + 1
        full_counts, full_indices, partial_counts, partial_indices = _select_blocks_op(
            query_vectors.float(),
            key_vectors.float(),
            block_bounds,
            num_listed.expand(-1, heads, -1).contiguous(),
            key_ranges.rows(query_block).block_positions(query_block),
            scale=layer_context.scale,
            query_block=query_block,
            key_block=key_block,
            curvature=config.curvature,
            redundancy=config.redundancy,
            full_width=min(kv_blocks, max(max_selected, max_forced)),
            partial_width=min(kv_blocks, num_crossed_blocks) if key_ranges.aligned else kv_blocks,
        )
        return BlockPlan(
            BlockIndices(full_counts, full_indices),
            BlockIndices(partial_counts, partial_indices),
            key_ranges,
            query_block=query_block,
            key_block=key_block,
            dense_rows=dense_rows,
        )


def depends_on_curvature(curvature: str, redundancy: float) -> bool:
    """Return True if the score depends on curvature and not on edge weights alone.

    Args:
        curvature: ``"forman"``, ``"additive"`` or ``"none"``.
        redundancy: weight of the curvature, in [0, 1].
    """
    return curvature != "none" and redundancy > 0


def find_largest_norm_tokens(
    x: Tensor, is_valid: Tensor, block_size: int, mark_not_finite: bool = False
) -> Tensor:
    """Return the token of largest norm of every block of x [B, H, N, D], float32 [B, H, M, D].

    Ties select the first token. Padding tokens and tokens with NaN are selected only if the block
    has no other tokens.

    Args:
        x: q or k, [B, H, N, D].
        is_valid: bool [B, N], False for padding.
        block_size: tokens per block.
        mark_not_finite: True to return NaN for blocks with a token whose squared norm is not
            finite.
    """
    num_padding = -x.shape[2] % block_size
    tokens = F.pad(x, (0, 0, 0, num_padding)).unflatten(2, (-1, block_size)).float()
    is_real_token = F.pad(is_valid, (0, num_padding)).unflatten(1, (-1, block_size)).unsqueeze(1)
    squared_norm = tokens.square().sum(-1)
    is_marked_block = (is_real_token & ~squared_norm.isfinite()).any(-1, keepdim=True)
    squared_norm = squared_norm.masked_fill(~is_real_token | squared_norm.isnan(), -1.0)
    largest_index = squared_norm.argmax(-1)[..., None, None]
    largest_tokens = tokens.take_along_dim(largest_index, dim=-2).squeeze(-2)
    return (
        largest_tokens.masked_fill(is_marked_block, torch.nan)
        if mark_not_finite
        else largest_tokens
    )


def compute_affinity(queries: Tensor, keys: Tensor, scale: float, is_visible: Tensor) -> Tensor:
    """Return the edge weights ReLU(Q K^T scale), float32 [B, H, M_q, M_k].

    Args:
        queries: Q, representatives of the query blocks, float32 [B, H, M_q, D].
        keys: K, representatives of the key blocks, float32 [B, H, M_k, D].
        scale: factor of the products.
        is_visible: bool, broadcast to [B, H, M_q, M_k]. Weights are 0 where ``is_visible`` is False
            or the product is NaN.
    """
    logits = queries @ keys.transpose(-1, -2) * scale
    return logits.where(is_visible & (logits > 0), 0.0)


def compute_two_hop_weights(
    affinity: Tensor, block_positions: Tensor, query_block: int, key_block: int
) -> Tensor:
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
    key_blocks_per_q_block, q_blocks_per_key_block = (
        max(1, query_block // key_block),
        max(1, key_block // query_block),
    )
    weights = affinity.where(affinity.isfinite(), 0.0)
    if key_blocks_per_q_block > 1:
        weights = (
            F.pad(weights, (0, -kv_blocks % key_blocks_per_q_block))
            .unflatten(-1, (-1, key_blocks_per_q_block))
            .sum(-1)
        )
    elif q_blocks_per_key_block > 1:
        weights = (weights / q_blocks_per_key_block).repeat_interleave(
            q_blocks_per_key_block, dim=-1
        )
    weights_to_rows = weights.gather(
        -1, block_positions[:, None, None].expand(*weights.shape[:3], -1)
    )
    two_hop_weights = weights_to_rows @ weights
    if q_blocks_per_key_block > 1:
        return two_hop_weights.unflatten(-1, (kv_blocks, q_blocks_per_key_block)).sum(-1)
    return (
        two_hop_weights.repeat_interleave(key_blocks_per_q_block, dim=-1)[..., :kv_blocks]
        if key_blocks_per_q_block > 1
        else two_hop_weights
    )


def compute_forman_curvature(affinity: Tensor, two_hop_weights: Tensor) -> Tensor:
    """Return the Forman-Ricci curvature F = 4 A - S_i - S_j + 3 A A, [B, H, M_q, M_k].

    S_i is the sum of row i of A. S_j is the sum of column j of A over the rows up to i, so that the
    selection of a row does not depend on later queries.

    Args:
        affinity: edge weights A, [B, H, M_q, M_k].
        two_hop_weights: A A, the result of `compute_two_hop_weights`, [B, H, M_q, M_k].
    """
    return 4 * affinity - affinity.sum(-1, keepdim=True) - affinity.cumsum(-2) + 3 * two_hop_weights


def min_max_scale(x: Tensor, is_visible: Tensor) -> Tensor:
    """Scale each row of x to [0, 1] over its visible entries; invisible entries become 0.

    Args:
        x: [B, H, M_q, M_k].
        is_visible: bool, broadcast to the shape of x.
    """
    row_min = x.masked_fill(~is_visible, torch.inf).amin(-1, keepdim=True)
    row_max = x.masked_fill(~is_visible, -torch.inf).amax(-1, keepdim=True)
    scaled_x = (x - row_min) / (row_max - row_min).clamp(min=torch.finfo(x.dtype).eps)
    return scaled_x.masked_fill(~is_visible, 0.0)


def compute_scores(
    affinity: Tensor,
    two_hop_weights: Tensor | None,
    is_visible: Tensor,
    curvature: str,
    redundancy: float,
) -> Tensor:
    """Return the score of each block, [B, H, M_q, M_k]; every row selects the highest scores.

    * ``"forman"``: (1 - redundancy) * A - redundancy * F, with F of `compute_forman_curvature`.
    * ``"additive"``: `min_max_scale` (A) - redundancy * A A / M_k. M_k is the number of all key
      blocks, as published. Thus padding and packing change the selection.

    Args:
        affinity: edge weights A, [B, H, M_q, M_k].
        two_hop_weights: A A, the result of `compute_two_hop_weights`; None for the score A.
        is_visible: bool, broadcast to [B, H, M_q, M_k].
        curvature: ``"forman"`` or ``"additive"``.
        redundancy: weight of the curvature, in [0, 1].
    """
    if two_hop_weights is None:
        return affinity
    if curvature == "forman":
        return (1 - redundancy) * affinity - redundancy * compute_forman_curvature(
            affinity, two_hop_weights
        )
    return min_max_scale(affinity, is_visible) - redundancy * two_hop_weights / affinity.shape[-1]


def count_listed_blocks(
    block_bounds: Tensor,
    *,
    tail_mask: Tensor | None,
    is_tail_listed: bool,
    sparsity: tuple[float, ...],
    max_density: float,
    is_marked_block: Tensor | None = None,
) -> Tensor:
    """Return the number of blocks that each row lists, int32 [B, H or 1, M_q].

    For a row with n visible blocks::

        num_listed = max(min(ceil((1 - sparsity) * n), ceil(max_density * n)), num_forced)

    ``num_forced`` is the number of forced blocks, plus one if the row has a visible marked block
    that is not forced.

    Args:
        block_bounds: int32 [6, B, M_q], the result of `reference.compute_block_bounds`.
        tail_mask: bool [B, M_q], True for rows of the dense tail; None if there is no tail.
        is_tail_listed: True if rows of the tail list all visible blocks. False if their lists are
            empty, because the plan names these rows.
        sparsity: fraction of the visible blocks that a row does not list: one number for all heads,
            or one number per head.
        max_density: largest fraction of the visible blocks that a row lists, unless more blocks
            are forced.
        is_marked_block: bool [B, H, M_k], blocks with a key that is not finite; None for none.
    """
    first_visible, last_visible, end_of_sinks, first_local = block_bounds[:4].unsqueeze(2)
    num_visible = last_visible - first_visible + 1
    num_forced = num_visible - (first_local - end_of_sinks).clamp(min=0)
    if is_marked_block is not None:
        num_forced = (
            num_forced + reference.has_visible_marked_block(is_marked_block, block_bounds).int()
        )
    sparsity_of_heads = (
        sparsity[0] if len(sparsity) == 1 else _copy_to_device(sparsity, block_bounds.device)
    )
    # subtract 1e-9 because 0.05 * 20 must not round up to 2
    num_by_sparsity, max_listed = (
        (num_visible.double() * listed_fraction - 1e-9).ceil().int()
        for listed_fraction in (1 - sparsity_of_heads, max_density)
    )
    num_listed = num_by_sparsity.minimum(max_listed).maximum(num_forced)
    if tail_mask is None:
        return num_listed
    return num_listed.where(~tail_mask.unsqueeze(1), num_visible if is_tail_listed else 0)


@lru_cache(1024)
def _copy_to_device(head_sparsities: tuple[float, ...], device: torch.device) -> Tensor:
    """Return ``head_sparsities`` as a tensor on ``device``, float64 [H, 1].

    The result is cached, because the copy synchronises with the device, which is forbidden while a
    CUDA graph is captured.
    """
    return torch.tensor(head_sparsities, dtype=torch.float64, device=device).unsqueeze(1)


@torch.library.custom_op("cab_hf::frc_tokens", mutates_args=())
def _largest_norm_tokens_op(
    x: Tensor, is_valid: Tensor, block_size: int, mark_not_finite: bool
) -> Tensor:
    """Run `find_largest_norm_tokens` as a registered op, on a GPU by a kernel."""
    if not has_kernels(x):
        return find_largest_norm_tokens(x, is_valid, block_size, mark_not_finite)
    # imported here, so that models on a CPU run without Triton
    from cab_hf.ops import frc

    return frc.find_largest_norm_tokens(x, is_valid, block_size, mark_not_finite)


@_largest_norm_tokens_op.register_fake
def _(x, is_valid, block_size, mark_not_finite):
    num_blocks = -(-x.shape[2] // block_size)
    return x.new_empty(*x.shape[:2], num_blocks, x.shape[3], dtype=torch.float32)


@torch.library.custom_op("cab_hf::frc", mutates_args=())
def _select_blocks_op(
    query_vectors: Tensor,
    key_vectors: Tensor,
    block_bounds: Tensor,
    num_listed: Tensor,
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
        query_vectors: float32 [B, H, M_q, D], representatives of the query blocks.
        key_vectors: float32 [B, H_kv, M_k, D], representatives of the key blocks; NaN for marked
            blocks.
        block_bounds: int32 [6, B, M_q], the result of `reference.compute_block_bounds`.
        num_listed: int32 [B, H, M_q], the number of blocks that each row lists.
        block_positions: int64 [B, M_q], see `compute_two_hop_weights`.
        scale: factor of the products.
        query_block: tokens per query block.
        key_block: tokens per key block.
        curvature: see `compute_scores`.
        redundancy: see `compute_scores`.
        full_width: entries per list of full blocks.
        partial_width: entries per list of partial blocks.

    Returns:
        Counts and indices of full blocks, then counts and indices of partial blocks. Counts are
        int32 [B, H, M_q]; indices have one more dimension, the entries of a list.
    """
    (batch, heads, q_blocks, _), kv_blocks = query_vectors.shape, key_vectors.shape[2]
    key_block_index = torch.arange(kv_blocks, device=query_vectors.device)
    first_visible, last_visible, end_of_sinks, first_local, first_full, last_full = block_bounds[
        :, :, None, :, None
    ]
    is_visible = (key_block_index >= first_visible) & (key_block_index <= last_visible)
    is_forced = is_visible & ((key_block_index < end_of_sinks) | (key_block_index >= first_local))
    key_vectors = key_vectors.repeat_interleave(heads // key_vectors.shape[1], dim=1)
    is_marked_block = key_vectors[..., 0].isnan().unsqueeze(2)
    has_kernel_support, selected_groups = has_kernels(query_vectors), []
    block_lists = _allocate_lists(query_vectors, full_width, partial_width)
    score_bytes_per_head = 4 * SCORE_TENSORS_PER_HEAD * batch * q_blocks * kv_blocks
    heads_per_group = max(1, MAX_SCORE_BYTES // score_bytes_per_head)
    has_curvature = depends_on_curvature(curvature, redundancy)
    # autocast would round the products to 16 bits
    with torch.autocast(query_vectors.device.type, enabled=False):
        for first_head in range(0, heads, heads_per_group):
            head_group = slice(first_head, first_head + heads_per_group)
            affinity = compute_affinity(
                query_vectors[:, head_group], key_vectors[:, head_group], scale, is_visible
            )
            two_hop_weights = (
                compute_two_hop_weights(affinity, block_positions, query_block, key_block)
                if has_curvature
                else None
            )
            group_score = compute_scores(
                affinity,
                two_hop_weights,
                is_visible=is_visible,
                curvature=curvature,
                redundancy=redundancy,
            )
            group_score = group_score.masked_fill(is_marked_block[:, head_group], torch.inf)
            if has_kernel_support:
                from cab_hf.ops import top_k

                top_k.select_blocks(
                    score=group_score,
                    block_bounds=block_bounds,
                    num_selected=num_listed,
                    first_head=first_head,
                    block_lists=block_lists,
                )
            else:
                selected_groups.append(
                    reference.select_best_blocks(
                        group_score, is_visible, is_forced, num_listed[:, head_group]
                    )
                )
    if has_kernel_support:
        return block_lists
    is_selected, is_full = (
        torch.cat(selected_groups, dim=1),
        (key_block_index >= first_full) & (key_block_index <= last_full),
    )
    full = BlockIndices.from_dense(is_selected & is_full, full_width)
    partial = BlockIndices.from_dense(is_selected & ~is_full, partial_width)
    return full.counts, full.indices, partial.counts, partial.indices


@_select_blocks_op.register_fake
def _(
    query_vectors,
    key_vectors,
    block_bounds,
    num_listed,
    block_positions,
    scale,
    query_block,
    key_block,
    curvature,
    redundancy,
    full_width,
    partial_width,
):
    return _allocate_lists(query_vectors, full_width, partial_width)


def _allocate_lists(
    query_vectors: Tensor, full_width: int, partial_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the result of `_select_blocks_op`; ``query_vectors`` is [B, H, M_q, D]."""
    count_shape = tuple(query_vectors.shape[:3])
    full_counts, full_indices, partial_counts, partial_indices = (
        query_vectors.new_empty(list_shape, dtype=torch.int32)
        for list_shape in (
            count_shape,
            (*count_shape, full_width),
            count_shape,
            (*count_shape, partial_width),
        )
    )
    return full_counts, full_indices, partial_counts, partial_indices
