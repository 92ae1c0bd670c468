"""FRC: the published CAB method, which keeps the edges of lowest Forman-Ricci curvature."""

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

# bytes of live scores; heads are computed in groups of this size
SCORE_BYTES_AT_A_TIME = 1 << 30
SCORES_OF_A_HEAD = 8  # live float32 [M_q, M_k] tensors


class FrcPredictor(Predictor):
    """The published CAB method (`CabConfig.published`): row-wise top-k by curvature.

    The summary of a block is its token of largest norm. The edges of the block graph have the
    weights A = ReLU(Q K^T scale), and 0 where a row may not attend. Every row keeps a share of 1 -
    ``config.sparsity`` of its blocks: sink blocks, local blocks, and the blocks of highest `score`.
    With ``config.curvature="forman"`` and ``config.redundancy=1`` the highest score is the lowest
    Forman-Ricci curvature.

    On CUDA devices, kernels (`cab_hf.ops.frc`) find the tokens and select the blocks without a
    device sync. The products and sums between these kernels are PyTorch operations in float32. The
    products use TF32 if ``torch.set_float32_matmul_precision`` allows it.
    """

    def encode_keys(self, k: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the key of largest norm of every key block, float32 [B, H_kv, M_k, D].

        The result is NaN for blocks with a key that is not finite. Such blocks are always kept.
        """
        if valid is None:
            valid = torch.ones(k.shape[0], k.shape[2], device=k.device, dtype=torch.bool)
        return self._largest("k", k, valid, self.config.key_block, mark=True)

    def vectors(self, q: Tensor, ranges: KeyRanges) -> Tensor:
        """Return the query of largest norm of every query block, float32 [B, H, M_q, D]."""
        return self._largest("q", q, ranges.end >= 0, self.config.query_block, mark=False)

    def _largest(self, name: str, x: Tensor, valid: Tensor, block: int, mark: bool) -> Tensor:
        if self.config.check_finite:
            reference.refuse_infinite(name, x)
        return _tokens(x, valid, block, mark)

    def required_inputs(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        """Return "summaries", and "vectors" if the score depends on the rows of other ranks."""
        if type(self) is not FrcPredictor:
            # a subclass may select by something else
            return super().required_inputs(call, heads)
        curved = is_curved(self.config.curvature, self.config.redundancy)
        return ("summaries", "vectors") if curved else ("summaries",)

    def choose(
        self, q: Tensor, summary: Tensor, call: LayerContext, vectors: Tensor | None = None
    ) -> BlockPlan:
        """Return the plan for q; `Predictor.required_inputs` describes ``vectors``."""
        if vectors is None:
            return self._plan(self.vectors(q, call.ranges), summary, call)
        sequence_call = replace(call, ranges=call.ranges.sequence_ranges)
        return call.ranges.local_plan(self._plan(vectors, summary, sequence_call))

    def _plan(self, queries: Tensor, keys: Tensor, call: LayerContext) -> BlockPlan:
        """Return the plan from the vectors of query blocks [B, H, M_q, D] and of key blocks."""
        config, ranges, heads = self.config, call.ranges, queries.shape[1]
        rows = ranges.tail(*tail_of(config)) if ranges.has_tail(*tail_of(config)) else None
        named = ranges.tail_rows(*tail_of(config))
        listed = rows is not None and named is None
        sparsity = sparsity_of(config, call.layer, heads)
        blocks = blocks_of(config)
        bounds = reference.row_bounds(ranges, *blocks, config.sink_blocks, config.local_blocks)
        marked = keys[..., 0].isnan().repeat_interleave(heads // keys.shape[1], dim=1)
        wanted = wanted_blocks(bounds, rows, listed, sparsity, config.max_density, marked)
        given = wanted.expand(-1, heads, -1).contiguous(), ranges.rows(blocks[0]).places(blocks[0])
        by = config.curvature, config.redundancy
        # one more than the share, because it is rounded up, and here in floating point
        share = 1.0 if listed else min(1 - min(sparsity), config.max_density)
        crossed, kv_blocks = crossed_blocks(*blocks), keys.shape[2]
        # and one more than what is forced, for a marked block
        forced = config.sink_blocks + max(config.local_blocks, crossed) + 1
        room = min(kv_blocks, max(torch.sym_int(share * kv_blocks) + 2, forced))
        rooms = room, min(kv_blocks, crossed) if ranges.aligned else kv_blocks
        known = queries.float(), keys.float(), bounds, *given
        lists = _lists(*known, call.scale, *blocks, *by, *rooms)
        full, partial = BlockIndices(*lists[:2]), BlockIndices(*lists[2:])
        return BlockPlan(full, partial, ranges, *blocks, dense_rows=named)


def is_curved(curvature: str, redundancy: float) -> bool:
    """Return True if curvature changes the score."""
    return curvature != "none" and redundancy > 0


def largest_tokens(x: Tensor, valid: Tensor, block: int, mark: bool = False) -> Tensor:
    """Return the token of largest norm of every block of x [B, H, N, D], float32 [B, H, M, D].

    Ties select the first token. Padding tokens and tokens with NaN are selected only if a block has
    no others.

    Args:
        x: q or k.
        valid: bool [B, N], False for padding; None if there is no padding.
        block: tokens per block.
        mark: True for NaN in blocks with a token whose squared norm is not finite.
    """
    padding = -x.shape[2] % block
    tokens = F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, block)).float()
    real = F.pad(valid, (0, padding)).unflatten(1, (-1, block)).unsqueeze(1)
    norm = tokens.square().sum(-1)
    marked = (real & ~norm.isfinite()).any(-1, keepdim=True)
    norm = norm.masked_fill(~real | norm.isnan(), -1.0)
    found = tokens.take_along_dim(norm.argmax(-1)[..., None, None], dim=-2).squeeze(-2)
    return found.masked_fill(marked, torch.nan) if mark else found


def affinity_of(queries: Tensor, keys: Tensor, scale: float, visible: Tensor) -> Tensor:
    """Return edge weights ReLU(Q K^T scale) of [B, H, M, D] each.

    Weights outside ``visible`` and NaN weights are 0.
    """
    logits = queries @ keys.transpose(-1, -2) * scale
    return logits.where(visible & (logits > 0), 0.0)


def two_hop(affinity: Tensor, places: Tensor, query_block: int, key_block: int) -> Tensor:
    """Return the weights of paths row i -> row t -> key block j, [B, H, M_q, M_k].

    For square blocks this is the matrix product A A. Key blocks are summed to the query grid before
    the product, and the result is spread over the key blocks again. Rows of earlier chunks are not
    available as the middle of a path. Weights that are not finite count as 0, because 0 * inf would
    spread NaN to rows that cannot attend to them.

    Args:
        affinity: edge weights A, [B, H, M_q, M_k].
        places: int64 [B, M_q], the rows' indices on the query grid; see `BlockRanges.places`.
        query_block, key_block: block sizes in tokens.
    """
    kv_blocks = affinity.shape[-1]
    ratio, spread = max(1, query_block // key_block), max(1, key_block // query_block)
    coarse = affinity.where(affinity.isfinite(), 0.0)
    if ratio > 1:
        coarse = F.pad(coarse, (0, -kv_blocks % ratio)).unflatten(-1, (-1, ratio)).sum(-1)
    elif spread > 1:
        coarse = (coarse / spread).repeat_interleave(spread, dim=-1)
    to_rows = coarse.gather(-1, places[:, None, None].expand(*coarse.shape[:3], -1))
    hops = to_rows @ coarse
    if spread > 1:
        return hops.unflatten(-1, (kv_blocks, spread)).sum(-1)
    return hops.repeat_interleave(ratio, dim=-1)[..., :kv_blocks] if ratio > 1 else hops


def forman_curvature(affinity: Tensor, hops: Tensor) -> Tensor:
    """Return Forman-Ricci curvature with triangles, F = 4 A - S_i - S_j + 3 A A, [B, H, M_q, M_k].

    S_i is the strength of row i, S_j the strength of column j. The sum of a column ends at the row
    itself, so that the selection of a row does not depend on later queries.
    """
    return 4 * affinity - affinity.sum(-1, keepdim=True) - affinity.cumsum(-2) + 3 * hops


def min_max(x: Tensor, visible: Tensor) -> Tensor:
    """Scale x to [0, 1] over the visible part of each row."""
    low = x.masked_fill(~visible, torch.inf).amin(-1, keepdim=True)
    high = x.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
    scaled = (x - low) / (high - low).clamp(min=torch.finfo(x.dtype).eps)
    return scaled.masked_fill(~visible, 0.0)


def score(
    affinity: Tensor, hops: Tensor | None, visible: Tensor, curvature: str, redundancy: float
) -> Tensor:
    """Return the score of each block, [B, H, M_q, M_k]; every row keeps the highest scores.

    * ``"forman"``: (1 - redundancy) A - redundancy F.
    * ``"additive"``: A scaled to [0, 1] over its row - redundancy A A / M_k. M_k counts all key
      blocks of the call, as published, so padding and packing change the selection.

    Without ``hops`` (the result of `two_hop`) the score is A.
    """
    if hops is None:
        return affinity
    if curvature == "forman":
        return (1 - redundancy) * affinity - redundancy * forman_curvature(affinity, hops)
    return min_max(affinity, visible) - redundancy * hops / affinity.shape[-1]


def wanted_blocks(
    bounds: Tensor,
    tail: Tensor | None,
    listed: bool,
    sparsity: tuple[float, ...],
    cap: float,
    marked: Tensor | None = None,
) -> Tensor:
    """Return the number of blocks that each row lists, int32 [B, H or 1, M_q].

    The number is the row's share, and at least the number of forced blocks. The minimum is one
    higher if the row has a visible marked block.

    Args:
        bounds: the result of `reference.row_bounds`.
        tail: bool [B, M_q], rows that attend to everything; None if there are none.
        listed: True if these rows list all blocks; otherwise the plan names the rows, and their
            lists are empty.
        sparsity: share of blocks dropped, for each head or for all heads.
        cap: the largest share of blocks that a row keeps, unless more are forced.
        marked: bool [B, H, M_k], blocks with a key that is not finite; None for none.
    """
    first, last, sinks, local = bounds[:4].unsqueeze(2)
    blocks = last - first + 1
    forced = blocks - (local - sinks).clamp(min=0)
    if marked is not None:
        forced = forced + reference.has_visible_marked(marked, bounds).int()
    dropped = sparsity[0] if len(sparsity) == 1 else _on_device(sparsity, bounds.device)
    # 0.05 * 20 must not round up to 2
    share, most = ((blocks.double() * x - 1e-9).ceil().int() for x in (1 - dropped, cap))
    wanted = share.minimum(most).maximum(forced)
    return wanted if tail is None else wanted.where(~tail.unsqueeze(1), blocks if listed else 0)


@lru_cache(1024)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as float64 [H, 1] on ``device``.

    The result is cached per layer: the copy is a device sync, and CUDA graphs allow none.
    """
    return torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1)


@torch.library.custom_op("cab_hf::frc_tokens", mutates_args=())
def _tokens(x: Tensor, valid: Tensor, block: int, mark: bool) -> Tensor:
    """Compute `largest_tokens`, by a kernel if one is available."""
    if not has_kernels(x):
        return largest_tokens(x, valid, block, mark)
    # models on the CPU never need Triton
    from cab_hf.ops import frc

    return frc.largest_tokens(x, valid, block, mark)


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
    places: Tensor,
    scale: float,
    query_block: int,
    key_block: int,
    curvature: str,
    redundancy: float,
    full_room: int,
    partial_room: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return counts and indices of full and of partial blocks.

    The lists have ``full_room`` and ``partial_room`` columns.
    """
    (batch, heads, q_blocks, _), kv_blocks = queries.shape, keys.shape[2]
    column = torch.arange(kv_blocks, device=queries.device)
    first, last, sinks, local, begin, end = bounds[:, :, None, :, None]
    visible = (column >= first) & (column <= last)
    forced = visible & ((column < sinks) | (column >= local))
    keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
    marked = keys[..., 0].isnan().unsqueeze(2)
    kernels, selected, buffers = has_kernels(queries), [], _empty(queries, full_room, partial_room)
    a_head = 4 * SCORES_OF_A_HEAD * batch * q_blocks * kv_blocks
    step = max(1, SCORE_BYTES_AT_A_TIME // a_head)
    # autocast would round the products
    with torch.autocast(queries.device.type, enabled=False):
        for start in range(0, heads, step):
            head_slice = slice(start, start + step)
            affinity = affinity_of(queries[:, head_slice], keys[:, head_slice], scale, visible)
            curved = is_curved(curvature, redundancy)
            hops = two_hop(affinity, places, query_block, key_block) if curved else None
            ranked = score(affinity, hops, visible, curvature, redundancy)
            ranked = ranked.masked_fill(marked[:, head_slice], torch.inf)
            if kernels:
                from cab_hf.ops import top_k

                top_k.select(ranked, bounds, wanted, start, buffers)
            else:
                selected.append(
                    reference.best_of_rows(ranked, visible, forced, wanted[:, head_slice])
                )
    if kernels:
        return buffers
    keep, complete = torch.cat(selected, dim=1), (column >= begin) & (column <= end)
    full = BlockIndices.from_dense(keep & complete, full_room)
    partial = BlockIndices.from_dense(keep & ~complete, partial_room)
    return full.counts, full.indices, partial.counts, partial.indices


@_lists.register_fake
def _(queries, keys, bounds, wanted, places, *given):
    return _empty(queries, *given[-2:])


def _empty(like: Tensor, *rooms: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = [shape for room in rooms for shape in ((), (room,))]
    return tuple([like.new_empty(*like.shape[:3], *x, dtype=torch.int32) for x in shapes])
