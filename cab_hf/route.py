"""`route`: the choice of sparse or dense attention, and of the engine, for a layer in one call.

`dispatch.dispatch` calls the engine of this choice, and `describe` reports the choice with its
reason. No other module makes this choice.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from cab_hf import break_even, engines
from cab_hf.config import CabConfig
from cab_hf.decode.cache import KeyIndex
from cab_hf.decode.step import why_dense
from cab_hf.engines import FLASH_ATTN, SDPA, DenseKernel, Engine, Workload
from cab_hf.hf.fit import layer_type
from cab_hf.plan import DENSE_BLOCK_SIZE


class Route(NamedTuple):
    """The method and the engine that compute the attention of one layer in one call.

    Attributes:
        method: name of a function in `cab_hf.dispatch`: "sparse", "sparse_decode", "dense",
            "dense_blockwise" or "dense_masked".
        config: settings of the call. For a chunk before the dense tail, ``dense_tail_blocks`` is 0.
        engine: engine or dense kernel that computes attention; None for "sparse_decode".
        dense_reason: why attention is not sparse, as a clause; None for sparse attention, and if
            sparse attention is not requested.
    """

    method: str
    config: CabConfig
    engine: Engine | DenseKernel | None = None
    dense_reason: str | None = None


def route(
    mask: Any,
    config: CabConfig,
    workload: Workload,
    *,
    is_sparse: bool,
    layer: nn.Module | None,
    key_index: KeyIndex | None = None,
) -> Route:
    """Return the `Route` of a layer in one call: sparse or dense attention, and its engine.

    Args:
        mask: a `MaskInfo`, or a `ShardedMask` for a sequence over many ranks.
        config: settings of the layer.
        workload: workload of the call, with the block sizes of ``config``.
        is_sparse: True if sparse attention is requested.
        layer: attention module, whose attribute ``layer_idx`` is optional; None without a layer.
        key_index: index of the cached keys; None if the cache of the layer has no index.

    Raises:
        ValueError: if a named engine does not support the call.
    """
    config = _apply_measured_min_length(config, workload)
    attention_type, dense_reason = (
        _choose_attention_type(mask, config, layer, key_index) if is_sparse else ("dense", None)
    )
    if attention_type == "sparse":
        dense_reason = _why_sparse_is_slower(mask, config, workload)
        attention_type = "sparse" if dense_reason is None else "dense"
    if attention_type == "sparse":
        dense_tail_start = mask.find_dense_tail_start(config.dense_tail_blocks, config.query_block)
        if dense_tail_start is not None and mask.q_offset + mask.q_length <= dense_tail_start:
            config = replace(config, dense_tail_blocks=0)
        return Route("sparse", config, engines.choose(config.engine, workload))
    if attention_type == "sparse_decode":
        return Route("sparse_decode", config)
    method, engine = _choose_dense_method(mask, workload)
    return Route(method, config, engine, dense_reason)


def _apply_measured_min_length(config: CabConfig, workload: Workload) -> CabConfig:
    """Raise ``min_length`` for layers with few heads, where short prompts are faster when dense.

    A ``min_length`` below the default requests sparse attention for short prompts, and stays.
    Compiled models launch kernels faster, and were not measured.

    Args:
        config, workload: see `route`.
    """
    if config.min_length < CabConfig.min_length or torch.compiler.is_compiling():
        return config
    num_channels = None if workload.num_heads is None else workload.num_heads * workload.head_dim
    min_length = break_even.min_length_for(num_channels, workload.device)
    return config if min_length <= config.min_length else _replace_min_length(config, min_length)


@lru_cache
def _replace_min_length(config: CabConfig, min_length: int) -> CabConfig:
    """Return the settings with another ``min_length``; cached for all layers and calls."""
    return replace(config, min_length=min_length)


def _choose_attention_type(
    mask: Any, config: CabConfig, layer: nn.Module | None, key_index: KeyIndex | None
) -> tuple[str, str | None]:
    """Return "sparse", "sparse_decode" or "dense", and the reason for "dense" or None.

    Args:
        mask, config, layer, key_index: see `route`; sparse attention is requested.
    """
    if mask.window is not None:
        is_chunked = layer_type(layer) == "chunked_attention"
        return "dense", f"{'chunks' if is_chunked else 'sliding window'} of {mask.window} tokens"
    if getattr(layer, "layer_idx", None) in config.dense_layers:
        return "dense", "in dense_layers"
    # numbers of queries and of tokens of the longest documents, without padding
    num_queries, num_tokens = mask.longest_document or (mask.q_length, mask.kv_length)
    # the length of a static cache is unknown under torch.compile: assume no tokens before the call
    num_tokens = num_queries if num_tokens is None else num_tokens
    if mask.is_decode or num_queries < config.query_block:
        dense_reason = why_dense(mask, config, layer, key_index)
        return ("dense", dense_reason) if dense_reason else ("sparse_decode", None)
    if num_tokens < config.min_length:
        return "dense", f"input shorter than min_length={config.min_length}"
    dense_tail_start = mask.find_dense_tail_start(config.dense_tail_blocks, config.query_block)
    if (
        dense_tail_start is not None
        and config.dense_tail_blocks
        and mask.q_offset >= dense_tail_start
    ):
        return "dense", f"the end of a prompt (dense_tail_blocks={config.dense_tail_blocks})"
    return "sparse", None


def _why_sparse_is_slower(mask: Any, config: CabConfig, workload: Workload) -> str | None:
    """Return why dense attention is faster than sparse attention; None if dense is not faster.

    The decision depends on the length of the complete prompt, so either all chunks of a prompt are
    sparse or none.

    Args:
        mask, config, workload: see `route`.
    """
    num_queries, num_tokens = mask.longest_document or (mask.q_length, mask.kv_length)
    if config.min_length == 0 or num_tokens is None or mask.details.parallel_settings is not None:
        return None
    if mask.prompt is not None and mask.doc_ids is None:
        num_queries -= mask.prompt.start
    if not break_even.has_enough_queries(num_queries, num_tokens, workload.device):
        min_queries = break_even.min_queries_for(num_tokens, workload.device)
        return (
            f"fewer than {min_queries} queries after a long cache, where dense attention is faster"
        )
    return None


def _choose_dense_method(mask: Any, workload: Workload) -> tuple[str, Engine | DenseKernel]:
    """Return the name of the function in `cab_hf.dispatch` for exact attention, and its kernel.

    The kernel is an `Engine` or `DenseKernel`, which the function uses.

    Args:
        mask, workload: see `route`.
    """
    q_length, kv_length = mask.q_length, mask.kv_length
    has_sinks_or_softcap = workload.sinks or workload.softcap
    if mask.details.dense_block_size is not None or (has_sinks_or_softcap and q_length > 1):
        # no dense kernel supports soft caps, or returns the differentiable log-sum-exp for sinks
        block_size = mask.details.dense_block_size or DENSE_BLOCK_SIZE
        workload = replace(workload, query_block=block_size, key_block=block_size)
        return "dense_blockwise", engines.choose("auto", workload)
    if has_sinks_or_softcap:
        return "dense_masked", SDPA
    has_no_cache = mask.is_plain_causal and q_length == kv_length
    needs_sdpa = q_length < DENSE_BLOCK_SIZE or mask.window is not None or kv_length is None
    num_causal_tokens, num_last_queries = (
        q_length if has_no_cache else None,
        q_length if mask.is_plain_causal else None,
    )
    dense_kernel = (
        SDPA
        if needs_sdpa
        else engines.choose_exact_attention(workload, num_causal_tokens, num_last_queries)
    )
    if isinstance(dense_kernel, Engine):
        return "dense_blockwise", dense_kernel
    is_decode_step = mask.is_plain_causal and q_length == 1 and kv_length is not None
    if has_no_cache or dense_kernel is FLASH_ATTN or is_decode_step:
        return "dense", dense_kernel
    return "dense_masked", dense_kernel
