"""`route`: the only place that decides how a layer is computed, with the reason.

`dispatch.dispatch` computes what `route` chooses, and `describe` reports it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from cab_hf import break_even, engines
from cab_hf.config import CabConfig
from cab_hf.decode.cache import KeyIndex
from cab_hf.decode.step import why_dense
from cab_hf.engines import FLASH_ATTN, SDPA, DenseKernel, Engine, Workload
from cab_hf.hf.fit import layer_type
from cab_hf.plan import DENSE_BLOCK_SIZE


class Route(NamedTuple):
    """The decision how one layer is computed in one call.

    Attributes:
        method: name of a function in `cab_hf.dispatch`: "sparse", "sparse_decode", "dense",
            "dense_blockwise" or "dense_masked".
        config: settings of the call; without a dense tail for a chunk that does not contain it.
        engine: engine or dense kernel of the function; None for "sparse_decode", which has none.
        reason: why attention is not sparse, as a clause; None for sparse attention, and if sparse
            attention is not requested.
    """

    method: str
    config: CabConfig
    engine: Engine | DenseKernel | None = None
    reason: str | None = None


def route(
    mask: Any,
    config: CabConfig,
    work: Workload,
    *,
    sparse: bool,
    layer: nn.Module | None,
    index: KeyIndex | None = None,
) -> Route:
    """Return how one layer is computed in one call.

    This function is the only one that asks whether an engine can run a call.

    Args:
        mask: a `MaskInfo`, or a `ShardedMask` over ranks: the lengths of the call and of its
            documents, and the visible keys.
        config: settings of the layer.
        work: workload of the call, with the block sizes of ``config``.
        sparse: True if sparse attention is requested.
        layer: attention module, whose ``layer_idx`` is read if it has one.
        index: index of the keys; None if the cache of the layer has none.

    Raises:
        ValueError: if a named engine does not support the call.
    """
    family, reason = _family(mask, config, layer, index) if sparse else ("dense", None)
    if family == "sparse":
        reason = _why_slower(mask, config, work.device)
        family = "sparse" if reason is None else "dense"
    if family == "sparse":
        tail = mask.tail_start(config.dense_tail_blocks, config.query_block)
        if tail is not None and mask.q_offset + mask.q_length <= tail:
            config = replace(config, dense_tail_blocks=0)
        return Route("sparse", config, engines.choose(config.engine, work))
    if family == "sparse_decode":
        return Route("sparse_decode", config)
    method, engine = _dense_method(mask, work)
    return Route(method, config, engine, reason)


def _family(
    mask: Any, config: CabConfig, layer: nn.Module | None, index: KeyIndex | None
) -> tuple[str, str | None]:
    """Return ("sparse", "sparse_decode" or "dense", reason of "dense") if sparse is requested."""
    if mask.window is not None:
        is_chunked = layer_type(layer) == "chunked_attention"
        return "dense", f"{'chunks' if is_chunked else 'sliding window'} of {mask.window} tokens"
    if getattr(layer, "layer_idx", None) in config.dense_layers:
        return "dense", "in dense_layers"
    # lengths of the longest document, without padding
    queries, tokens = mask.longest or (mask.q_length, mask.kv_length)
    # under torch.compile the length of a static cache is unknown: at least the queries of the call
    tokens = queries if tokens is None else tokens
    if mask.is_decode or queries < config.query_block:
        reason = why_dense(mask, config, layer, index)
        return ("dense", reason) if reason else ("sparse_decode", None)
    if tokens < config.min_length:
        return "dense", f"input shorter than min_length={config.min_length}"
    tail = mask.tail_start(config.dense_tail_blocks, config.query_block)
    if tail is not None and config.dense_tail_blocks and mask.q_offset >= tail:
        return "dense", f"the end of a prompt (dense_tail_blocks={config.dense_tail_blocks})"
    return "sparse", None


def _why_slower(mask: Any, config: CabConfig, device_type: str) -> str | None:
    """Return why dense attention is faster than sparse attention, or None if it is not.

    A prompt counts as a whole, so that its chunks are computed alike.
    """
    queries, tokens = mask.longest or (mask.q_length, mask.kv_length)
    if config.min_length == 0 or tokens is None or mask.details.parallel is not None:
        return None
    if mask.prompt is not None and mask.doc_ids is None:
        queries -= mask.prompt.start
    if break_even.pays(queries, tokens, device_type):
        return None
    least = break_even.least_queries(tokens, device_type)
    return f"fewer than {least} queries after a long cache, where dense attention is faster"


def _dense_method(mask: Any, work: Workload) -> tuple[str, Engine | DenseKernel]:
    """Return the function of `cab_hf.dispatch` for exact attention, and its engine or kernel."""
    q_length, kv_length = mask.q_length, mask.kv_length
    is_special = work.sinks or work.softcap
    if mask.details.dense_block_size is not None or (is_special and q_length > 1):
        # no dense kernel supports soft caps, or returns a differentiable log-sum-exp
        size = mask.details.dense_block_size or DENSE_BLOCK_SIZE
        work = replace(work, query_block=size, key_block=size)
        return "dense_blockwise", engines.choose("auto", work)
    if is_special:
        return "dense_masked", SDPA
    is_complete = mask.is_plain and q_length == kv_length
    is_small = q_length < DENSE_BLOCK_SIZE or mask.window is not None or kv_length is None
    length, last_queries = q_length if is_complete else None, q_length if mask.is_plain else None
    kernel = SDPA if is_small else engines.exact(work, length, last_queries)
    if isinstance(kernel, Engine):
        return "dense_blockwise", kernel
    is_step = mask.is_plain and q_length == 1 and kv_length is not None
    if is_complete or kernel is FLASH_ATTN or is_step:
        return "dense", kernel
    return "dense_masked", kernel
