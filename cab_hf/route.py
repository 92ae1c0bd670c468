"""`route`: the only place that decides how a layer is computed, with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from cab_hf import break_even, engines
from cab_hf.call.call import Call
from cab_hf.config import CabConfig
from cab_hf.decode.cache import KeyIndex
from cab_hf.decode.step import SparseDecode, why_dense
from cab_hf.engines import SDPA, Engine, Workload
from cab_hf.engines.dense import Exact, ExactByBlocks, ExactByRows
from cab_hf.engines.sparse import Sparse
from cab_hf.hf.fit import layer_type
from cab_hf.plan import DENSE_BLOCK_SIZE


def attend(call: Call) -> Tensor:
    """Return the output [B, H, N_q, D_v] of one call, computed as `route` decides."""
    facts = {"sparse": call.sparse, "layer": call.layer, "index": call.index}
    return route(call.text, call.config, call.work, **facts).attend(call)


def route(
    text: Any,
    config: CabConfig,
    work: Workload,
    *,
    sparse: bool,
    layer: nn.Module | None,
    index: KeyIndex | None = None,
) -> Exact | Sparse | SparseDecode:
    """Return the object that computes one layer in one call with ``attend(call)``.

    Its ``reason`` says why attention is not sparse; None for sparse attention.

    Args:
        text: a `MaskInfo`, or a `ShardedMask` over ranks: the lengths of the call and of its
            documents, and the mask.
        config: settings of the layer.
        work: workload of the call, with the block sizes of ``config``.
        sparse: True if sparse attention is requested.
        layer: attention module, whose ``layer_idx`` is read if it has one.
        index: index of the keys; None if the cache of the layer has none.

    Raises:
        ValueError: if a named engine does not support the call.
    """
    kind, reason = _kind(text, config, layer, index) if sparse else ("exact", None)
    if kind == "sparse":
        reason = _why_slower(text, config, work.device)
        kind = "sparse" if reason is None else "exact"
    if kind == "sparse":
        tail = text.tail_from(config.dense_tail_blocks, config.query_block)
        if tail is not None and text.q_slot + text.q_length <= tail:
            config = replace(config, dense_tail_blocks=0)
        return Sparse(engines.choose(config.engine, work), config)
    if kind == SparseDecode.kind:
        return SparseDecode()
    q_length, kv_length = text.q_length, text.kv_length
    special = work.sinks or work.softcap
    if text.dense_block_size is not None or (special and q_length > 1):
        # no dense kernel supports soft caps, or returns a differentiable log-sum-exp
        block = text.dense_block_size or DENSE_BLOCK_SIZE
        work = replace(work, query_block=block, key_block=block)
        return ExactByBlocks(engines.choose("auto", work), kind, reason)
    if special:
        return ExactByRows(SDPA, kind, reason)
    complete = text.plain and q_length == kv_length
    few = q_length < DENSE_BLOCK_SIZE or text.window is not None or kv_length is None
    kernel = SDPA if few else engines.exact(work, q_length if complete else None)
    if isinstance(kernel, Engine):
        return ExactByBlocks(kernel, kind, reason)
    if complete or (text.plain and q_length == 1 and kv_length is not None):
        return Exact(kernel, kind, reason)
    return ExactByRows(kernel, kind, reason)


def _kind(
    text: Any, config: CabConfig, layer: nn.Module | None, index: KeyIndex | None
) -> tuple[str, str | None]:
    """Return (kind, reason if not sparse) of a layer for which sparse attention is requested."""
    if text.window is not None:
        chunked = layer_type(layer) == "chunked_attention"
        return "exact", f"{'chunks' if chunked else 'sliding window'} of {text.window} tokens"
    if getattr(layer, "layer_idx", None) in config.dense_layers:
        return "exact", "in dense_layers"
    # lengths of the longest document, without padding
    queries, tokens = text.longest or (text.q_length, text.kv_length)
    # under torch.compile the length of a static cache is unknown: at least the queries of the call
    tokens = queries if tokens is None else tokens
    if text.is_decode or queries < config.query_block:
        reason = why_dense(text, config, layer, index)
        return ("decode", reason) if reason else (SparseDecode.kind, None)
    if tokens < config.min_length:
        return "exact", f"input shorter than min_length={config.min_length}"
    tail = text.tail_from(config.dense_tail_blocks, config.query_block)
    if tail is not None and config.dense_tail_blocks and text.q_slot >= tail:
        return "exact", f"the end of a prompt (dense_tail_blocks={config.dense_tail_blocks})"
    return "sparse", None


def _why_slower(text: Any, config: CabConfig, device_type: str) -> str | None:
    """Return why dense attention is faster than sparse attention, or None if it is not.

    A prompt counts as a whole, so that its chunks are computed alike.
    """
    prompt = getattr(text, "prompt", None)
    queries, tokens = text.longest or (text.q_length, text.kv_length)
    if config.min_length == 0 or tokens is None or getattr(text, "sharding", None) is not None:
        return None
    if prompt is not None and text.document is None:
        queries -= prompt.start
    if break_even.pays(queries, tokens, device_type):
        return None
    least = break_even.least_queries(tokens, device_type)
    return f"fewer than {least} queries after a long cache, where dense attention is faster"
