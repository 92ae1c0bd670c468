"""Predict on the GPU, in two halves: summarise keys, then choose blocks. Each is a registered op.

The definition is `CurvaturePredictor` on the ops of `reference`. No step waits for the device, and
no shape depends on data, except where lists would be larger than `LISTS_AT_MOST`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from cab_hf.budgets import OP_SETTINGS, Budgets, op_settings, settings_of_op
from cab_hf.config import CabConfig
from cab_hf.ops.coarsen import QuerySummary, coarsen_keys, coarsen_queries
from cab_hf.ops.exact_scores import (
    empty_keys,
    exact_scores,
    outlier_rows,
    scored_keys,
)
from cab_hf.ops.reference import KeySummary
from cab_hf.ops.rows import scored_dtype
from cab_hf.ops.score import HeadChunk, Scores, block_scores, turns
from cab_hf.ops.select import HeadBudget, Tail, fill_lists, select_blocks
from cab_hf.plan import BlockLists, Spans, crossed_blocks

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256
# bytes of scores alive at a time; heads take turns so that it is enough
SCORE_BYTES_AT_A_TIME = 1 << 30
# bytes of lists that are made as wide as a row could ever need; wider ones are measured first,
# which waits for the device once
LISTS_AT_MOST = 2 << 30

# how the registered op is told what `_unpack` understands
OP_SCHEMA = (
    "Tensor first, Tensor last, Tensor key_valid, bool aligned, bool consecutive, Tensor? tail,"
    f" bool tail_listed, {OP_SETTINGS}"
)
# turns with their scores, what selects by them, and budgets of own
Scored = Iterator[tuple[HeadChunk, Scores, CabConfig, HeadBudget | None]]


def unavailable(x: Tensor) -> str | None:
    """Why q or k is not for the kernels, as half a sentence; None when it is."""
    if not x.is_cuda:
        return f"runs on CUDA devices only, not {x.device.type}"
    if x.dtype not in DTYPES:
        return f"takes float16, bfloat16 and float32, not {x.dtype}"
    if x.shape[-1] > LARGEST_HEAD_DIM:
        return f"takes head dims up to {LARGEST_HEAD_DIM}, not {x.shape[-1]}"
    return None


def summarise(
    k: Tensor, valid: Tensor, config: CabConfig, channels: tuple[int, ...] = ()
) -> KeySummary:
    """The summary of every key block of k [B, H_kv, N_k, D]; see `coarsen.coarsen_keys`.

    With the ``channels`` of all keys that `scored_keys` keeps, where queries are scored exactly.
    """
    scored = config.exact_queries != 0
    if torch.compiler.is_compiling():
        planes = torch.ops.cab_hf.summarise(k, valid, config.key_block, config.coarsen)
        return KeySummary(planes, *(torch.ops.cab_hf.scored_keys(k, channels) if scored else ()))
    with on_device_of(k):
        planes = coarsen_keys(k, valid, config.key_block, config.coarsen).planes
        return KeySummary(planes, *(scored_keys(k, channels, scored_dtype(k)) if scored else ()))


def choose(
    q: Tensor,
    summary: KeySummary,
    spans: Spans,
    scale: float,
    config: CabConfig,
    budgets: Budgets,
    channels: tuple[int, ...] = (),
    vectors: Tensor | None = None,
) -> tuple[BlockLists, BlockLists]:
    """(full, partial) lists of the key blocks CAB attends for q [B, H, N_q, D].

    Heads of ``budgets.dense_heads`` and rows of ``spans.tail_rows``, where there are any, list
    nothing: the plan is to name them. ``channels`` are those of ``summary.keys``. ``vectors``, [B,
    H, M_q, D], are the query blocks of q where somebody has coarsened them already; not while
    compiling. Safe under ``torch.compile(fullgraph=True)``, and in a CUDA graph once the budgets of
    the layer and its channels have been on the device.
    """
    if torch.compiler.is_compiling():
        given = _pack(spans, config, budgets)
        tensors = q, summary.planes, summary.keys, summary.exponents
        lists = torch.ops.cab_hf.choose(*tensors, scale, channels, *given)
        return BlockLists(*lists[:2]), BlockLists(*lists[2:])
    with on_device_of(q):
        tail = _tail(spans, config)
        scored = _scored(q, summary, spans, budgets, scale, config, channels, vectors)
        shape = *q.shape[:2], -(-q.shape[2] // config.query_block)
        return _chosen(shape, scored, spans, tail, budgets, config, measured=not _capturing(q))


def _chosen(
    shape: tuple[int, int, int],
    scored: Scored,
    spans: Spans,
    tail: Tail,
    budgets: Budgets,
    config: CabConfig,
    measured: bool,
) -> tuple[BlockLists, BlockLists]:
    """(full, partial) lists of [B, H, M_q] rows, filled by one turn after the other."""
    room, crossed = _rooms(shape, spans.kv_length, spans.aligned, tail, budgets, config)
    # lists that would be too large are measured before they are made
    wide = measured and 4 * math.prod(shape) * room > LISTS_AT_MOST
    full = _empty_lists(spans.first, shape, 0 if wide else room)
    partial = _empty_lists(spans.first, shape, crossed)
    words = -(-spans.kv_length // (32 * config.key_block))
    bits = full.counts.new_zeros(*shape, words) if wide else None
    for turn, scores, by, own in scored:
        select_blocks(turn, scores, by, budgets, own, full, partial, bits, tail)
        # the next turn, and the lists after the last, take its memory
        del scores
    if wide:
        width = max(1, int(full.counts.max()))
        full = BlockLists(full.counts, full.counts.new_empty(*shape, width))
        fill_lists(turn, bits, full, partial, config)
    return full, partial


def _scored(
    q: Tensor,
    summary: KeySummary,
    spans: Spans,
    budgets: Budgets,
    scale: float,
    config: CabConfig,
    channels: tuple[int, ...],
    vectors: Tensor | None = None,
) -> Scored:
    """Heads that choose by the estimate, then those whose outlier queries are scored exactly."""
    # a summary may come out of a cache, or from another process
    keys, exponents = summary.keys, summary.exponents
    summary = KeySummary(summary.planes.float().contiguous())
    heads, exact = q.shape[1], _exact_heads(budgets, q.shape[1])
    fused = vectors is None and exact == heads and config.coarsen != "max_l2"
    if fused:
        queries = _empty_summary(q, config.query_block)
    elif vectors is None:
        queries = coarsen_queries(q, spans, config.query_block, config.coarsen)
    else:
        queries = QuerySummary(vectors.float().contiguous(), _rows(spans, config))
    batch, _, q_blocks, _ = queries.vectors.shape
    shape = batch, heads, *summary.planes.shape[2:3], q_blocks, summary.planes.shape[3]
    clusters, half = config.select == "clusters", q.dtype != torch.float32
    own = HeadBudget.of(budgets, clusters, heads, q.device, exact=False)
    for turn in turns(queries.rows, shape, config, SCORE_BYTES_AT_A_TIME):
        if exact == heads:
            break
        yield turn, block_scores(turn, queries, summary, scale, config, spans, half), config, own
    plain = _without_curvature(config)
    own = HeadBudget.of(budgets, clusters, heads, q.device, exact=True)
    for count, start, some in _alike(budgets, batch, heads):
        parts = scale, config.query_block, count, channels, keys.dtype
        rows = outlier_rows(q, spans, (start, some), *parts, queries if fused else None)
        # an estimate, the most and the sum of shares
        room = max(1, SCORE_BYTES_AT_A_TIME // (12 * turn.q_blocks * turn.width))
        step = -(-some // -(-some // room))
        for at in range(0, some, step):
            one = turn._replace(start=start + at, count=min(step, some - at))
            scores = block_scores(one, queries, summary, scale, plain, spans, half)
            mine = rows.heads(at, at + one.count)
            most, shares = exact_scores(one, mine, keys, exponents, config.key_block, scores.direct)
            yield one, scores._replace(direct=most, shares=shares), plain, own
            del scores, most, shares


@lru_cache
def _without_curvature(config: CabConfig) -> CabConfig:
    """Made once: a config is checked whenever one is made."""
    return replace(config, curvature="none")


@lru_cache
def _exact_heads(budgets: Budgets, heads: int) -> int:
    """How many of ``heads`` choose by exact scores."""
    return len(budgets.exact(heads))


@lru_cache
def _alike(budgets: Budgets, batch: int, heads: int) -> tuple[tuple[int, int, int], ...]:
    """(exact queries, first, how many) of neighbouring heads that score as many, if any."""
    exact, found = budgets.exact(heads), []
    counts = [budgets.of_head(head)[3] if head in exact else 0 for head in range(heads)] * batch
    for count, run in groupby(range(len(counts)), key=counts.__getitem__):
        first, *others = run
        if count:
            found.append((count, first, 1 + len(others)))
    return tuple(found)


def _empty_summary(q: Tensor, query_block: int) -> QuerySummary:
    batch, heads, length, dim = q.shape
    blocks = -(-length // query_block)
    vectors = q.new_empty(batch, heads, blocks, dim, dtype=torch.float32)
    return QuerySummary(vectors, q.new_empty(4, batch, blocks, dtype=torch.int32))


def _rows(spans: Spans, config: CabConfig) -> Tensor:
    """What `coarsen_queries` finds out on its way: `QuerySummary.rows`."""
    rows = spans.rows(config.query_block)
    return torch.stack((rows.min_first, rows.max_first, rows.min_last, rows.max_last))


def _tail(spans: Spans, config: CabConfig) -> Tail:
    listed = spans.documents is None
    tail = config.dense_tail_blocks * config.query_block, config.query_block
    return Tail(spans.tail(*tail) if spans.has_tail(*tail) else None, listed)


def _rooms(
    shape: tuple[int, int, int],
    kv_length: int,
    aligned: bool,
    tail: Tail,
    budgets: Budgets,
    config: CabConfig,
) -> tuple[int, int]:
    """(the most full blocks that a row of [B, H, M_q] can list, the most partial ones)."""
    kv_blocks = -(-kv_length // config.key_block)
    crossed = crossed_blocks(config.query_block, config.key_block)
    forced = config.sink_blocks + max(config.local_blocks, crossed)
    # of heads that are alike one tells all
    heads = range(1 if budgets.alike else shape[1])
    listed = [budgets.of_head(head) for head in heads if head not in budgets.dense_heads]
    share = 1 - min(budgets.sparsity)
    if config.select == "clusters":
        top_k_share = max((top_k_share for _, top_k_share, *_ in listed), default=0.0)
        # they come to what is forced
        share = 1.0 if any(top_p for top_p, *_ in listed) else top_k_share + forced / kv_blocks
    share = min(share, config.max_density)
    if tail.rows is not None and tail.listed:
        share = 1.0
    # one more than the share: it is rounded up, and here in floating point
    room = min(kv_blocks, max(torch.sym_int(share * kv_blocks) + 2, forced))
    return room, min(kv_blocks, crossed if aligned else kv_blocks)


def _empty_lists(like: Tensor, shape: tuple[int, int, int], room: int) -> BlockLists:
    counts = like.new_empty(shape, dtype=torch.int32)
    return BlockLists(counts, counts.new_empty(*shape, room))


def on_device_of(x: Tensor) -> torch.cuda.device | nullcontext:
    """Triton launches on the current device: make it that of ``x``."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()


def _capturing(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.library.custom_op("cab_hf::summarise", mutates_args=())
def _summarise_op(k: Tensor, valid: Tensor, key_block: int, coarsen: str) -> Tensor:
    return coarsen_keys(k, valid, key_block, coarsen).planes


@_summarise_op.register_fake
def _(k: Tensor, valid: Tensor, key_block: int, coarsen: str) -> Tensor:
    batch, heads, length, dim = k.shape
    shape = (3 if coarsen == "minmax" else 1, batch, heads, -(-length // key_block), dim)
    return k.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("cab_hf::scored_keys", mutates_args=())
def _scored_keys_op(k: Tensor, channels: list[int]) -> list[Tensor]:
    return [x for x in scored_keys(k, tuple(channels), scored_dtype(k)) if x is not None]


@_scored_keys_op.register_fake
def _(k: Tensor, channels: list[int]) -> list[Tensor]:
    return [x for x in empty_keys(k, tuple(channels), scored_dtype(k)) if x is not None]


@torch.library.custom_op(
    "cab_hf::choose",
    mutates_args=(),
    schema="(Tensor q, Tensor planes, Tensor? keys, Tensor? exponents, float scale, "
    f"int[] channels, {OP_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _choose_op(q, planes, keys, exponents, scale, channels, *values):
    spans, tail, budgets, config = _unpack(values)
    summary = KeySummary(planes, keys, exponents)
    scored = _scored(q, summary, spans, budgets, scale, config, tuple(channels))
    shape = *q.shape[:2], -(-q.shape[2] // config.query_block)
    return _four(*_chosen(shape, scored, spans, tail, budgets, config, measured=False))


@_choose_op.register_fake
def _(q, planes, keys, exponents, scale, channels, *values):
    spans, tail, budgets, config = _unpack(values)
    shape = *q.shape[:2], -(-q.shape[2] // config.query_block)
    rooms = _rooms(shape, spans.kv_length, spans.aligned, tail, budgets, config)
    return _four(*[_empty_lists(q, shape, room) for room in rooms])


def _four(full: BlockLists, partial: BlockLists) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return full.counts, full.indices, partial.counts, partial.indices


def _pack(spans: Spans, config: CabConfig, budgets: Budgets) -> tuple:
    """What the registered op is told by the schema `OP_SCHEMA`."""
    known = spans.first, spans.last, spans.key_valid, spans.aligned, spans.consecutive
    return *known, *_tail(spans, config), *op_settings(config, budgets)


def _unpack(values: tuple) -> tuple[Spans, Tail, Budgets, CabConfig]:
    """What `_pack` has told."""
    return Spans(*values[:5]), Tail(*values[5:7]), *settings_of_op(values[7:])
