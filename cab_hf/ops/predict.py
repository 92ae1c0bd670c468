"""Predict on the GPU: coarsen, score and select, as one registered op.

The definition is `CurvaturePredictor` on the ops of `reference`. No step waits for the device, and
no shape depends on data, except where lists would be larger than `LISTS_AT_MOST`.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.ops.coarsen import coarsen
from cab_hf.ops.score import block_scores, bytes_per_head
from cab_hf.ops.select import fill_lists, select_blocks
from cab_hf.plan import BlockLists, Spans, crossed_blocks

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256
# bytes of scores alive at a time; heads take turns so that it is enough
SCORES_AT_A_TIME = 256 << 20
# bytes of lists that are made as wide as a row could ever need; wider ones are measured first,
# which waits for the device once
LISTS_AT_MOST = 2 << 30

# what the op takes of a CabConfig, in its order
FIELDS = (
    "query_block",
    "key_block",
    "sink_blocks",
    "local_blocks",
    "coarsen",
    "select",
    "mass",
    "bridges",
    "sparsity",
    "curvature",
    "redundancy",
    "max_density",
)


def unavailable(q: Tensor, k: Tensor) -> str | None:
    """Why these inputs are not for the kernels, as half a sentence; None when they are."""
    if not q.is_cuda:
        return f"runs on CUDA devices only, not {q.device.type}"
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        return f"takes q and k both float16, bfloat16 or float32, not {q.dtype} and {k.dtype}"
    if q.shape[-1] > LARGEST_HEAD_DIM:
        return f"takes head dims up to {LARGEST_HEAD_DIM}, not {q.shape[-1]}"
    return None


def predict(
    q: Tensor, k: Tensor, spans: Spans, scale: float, config: CabConfig
) -> tuple[BlockLists, BlockLists]:
    """(full, partial) lists of the blocks CAB attends.

    Safe in a CUDA graph, and under ``torch.compile(fullgraph=True)``.
    """
    if torch.compiler.is_compiling():
        settings = [getattr(config, name) for name in FIELDS]
        inputs = (q, k, spans.first, spans.last, spans.key_valid, spans.aligned, scale)
        lists = torch.ops.cab_hf.predict(*inputs, *settings)
        return BlockLists(*lists[:2]), BlockLists(*lists[2:])
    here = q.is_cuda and q.device.index != torch.cuda.current_device()
    with torch.cuda.device(q.device) if here else nullcontext():
        return _predict(q, k, spans, scale, config, measured=not _capturing(q))


def _predict(
    q: Tensor, k: Tensor, spans: Spans, scale: float, config: CabConfig, measured: bool
) -> tuple[BlockLists, BlockLists]:
    batch, heads, q_length, _ = q.shape
    kv_length = k.shape[2]
    shape = (batch, heads, -(-q_length // config.query_block))
    kv_blocks, room, crossed = _rooms(kv_length, spans.aligned, config)
    # lists that would be too large are measured before they are made
    wide = measured and 4 * batch * heads * shape[2] * room > LISTS_AT_MOST
    full = _empty_lists(q, shape, 0 if wide else room)
    partial = _empty_lists(q, shape, crossed)
    bits = full.counts.new_empty(*shape, -(-kv_blocks // 32)) if wide else None

    summary = coarsen(q, k, spans, config)
    flat = batch * heads
    turns = -(-flat * bytes_per_head(shape[2], kv_blocks, config) // SCORES_AT_A_TIME)
    step = -(-flat // turns)
    for start in range(0, flat, step):
        stop = min(start + step, flat)
        scores = block_scores(summary, start, stop, scale, config, prefix=q_length != kv_length)
        select_blocks(scores, summary, start, config, full, partial, bits)
        # the next turn, and the lists after the last, take its memory
        del scores
    if wide:
        width = max(1, int(full.counts.max()))
        full = BlockLists(full.counts, full.counts.new_empty(*shape, width))
        fill_lists(bits, summary, full, partial, config)
    return full, partial


def _empty_lists(like: Tensor, shape: tuple[int, ...], room: int) -> BlockLists:
    counts = like.new_empty(shape, dtype=torch.int32)
    return BlockLists(counts, counts.new_empty(*shape, room))


def _rooms(kv_length: int, aligned: bool, config: CabConfig) -> tuple[int, int, int]:
    """(key blocks, the most full blocks a row can list, the most partial ones)."""
    kv_blocks = -(-kv_length // config.key_block)
    crossed = crossed_blocks(config.query_block, config.key_block)
    forced = config.sink_blocks + max(config.local_blocks, crossed)
    share = config.max_density
    if config.select == "topk":
        share = min(share, 1 - config.sparsity)
    # one more than the share: it is rounded up, and here in floating point
    room = min(kv_blocks, max(int(share * kv_blocks) + 2, forced))
    return kv_blocks, room, min(kv_blocks, crossed if aligned else kv_blocks)


def _capturing(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.library.custom_op("cab_hf::predict", mutates_args=())
def _predict_op(
    q: Tensor,
    k: Tensor,
    first: Tensor,
    last: Tensor,
    key_valid: Tensor,
    aligned: bool,
    scale: float,
    query_block: int,
    key_block: int,
    sink_blocks: int,
    local_blocks: int,
    coarsen: str,
    select: str,
    mass: float,
    bridges: float,
    sparsity: float,
    curvature: str,
    redundancy: float,
    max_density: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = CabConfig(
        query_block=query_block,
        key_block=key_block,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        coarsen=coarsen,
        select=select,
        mass=mass,
        bridges=bridges,
        sparsity=sparsity,
        curvature=curvature,
        redundancy=redundancy,
        max_density=max_density,
    )
    spans = Spans(first, last, key_valid, aligned)
    full, partial = _predict(q, k, spans, scale, config, measured=False)
    return full.counts, full.indices, partial.counts, partial.indices


@_predict_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    first: Tensor,
    last: Tensor,
    key_valid: Tensor,
    aligned: bool,
    scale: float,
    *settings: int | float | str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = CabConfig(**dict(zip(FIELDS, settings, strict=True)))
    _, room, crossed = _rooms(k.shape[2], aligned, config)
    shape = (*q.shape[:2], -(-q.shape[2] // config.query_block))
    full, partial = (_empty_lists(q, shape, width) for width in (room, crossed))
    return full.counts, full.indices, partial.counts, partial.indices
