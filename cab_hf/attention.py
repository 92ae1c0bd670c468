"""What transformers calls: the attention functions behind "cab" and "cab_dense".

A call is routed (decode, exact or sparse), a plan is predicted, and an engine runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from cab_hf.config import CabConfig
from cab_hf.engines import Engine, Workload
from cab_hf.exact import exact_attention
from cab_hf.fit import warn_if_too_short
from cab_hf.forward_pass import LEFT_EARLY, in_backward_pass
from cab_hf.frame import PARALLEL, Length
from cab_hf.mask import CabMask
from cab_hf.model_config import settings, settings_in_use
from cab_hf.plan import BlockPlan
from cab_hf.predictors import make_predictor
from cab_hf.refusals import refuse, refuse_across_ranks
from cab_hf.rotary import slow_channels
from cab_hf.route import route

if TYPE_CHECKING:
    # imported where a text is first dealt out
    from cab_hf.distributed.context import Parallel


def cab_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CabMask | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Block-sparse attention under the signature of transformers' attention functions.

    Args:
        query: [B, H, N_q, D] after RoPE.
        key, value: [B, H_kv, N_k, D] after the cache update.
        attention_mask: what `cab_mask` made, or None for plain causal attention.
        kwargs: what transformers adds; ``scaling`` (1/sqrt(D) by default), ``position_ids`` int
            [B, N_q] and ``cu_seq_lens_q`` int [documents + 1] are used and, without a mask,
            ``sliding_window`` in tokens. What is None or in `refusals.HARMLESS` is ignored, the
            rest refused.

    Packed documents do not see each other. One begins where ``position_ids`` of real tokens fall
    back or repeat the position of a document's first token (which then was all of it), or where
    ``cu_seq_lens_q``, cumulative lengths, say so; with a mask or a cache as without. "sdpa" looks
    at positions where there is neither, and then this is the same: also where they leap forward,
    which begins a document there and nowhere else. A call that continues a cache sees all of it.
    Under torch.compile positions are looked at where "sdpa" does, and documents are not moved to
    block borders: neither selection nor ``min_length`` is then that of each alone.

    Returns:
        [B, N_q, H, D], and None for the attention weights, which never exist.

    Raises:
        ValueError, NotImplementedError: for what cannot be computed exactly as asked.
    """
    return _attend(module, query, key, value, attention_mask, sparse=True, **kwargs)


def cab_dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CabMask | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Exact attention through the same door as `cab_attention`, with the same arguments."""
    return _attend(module, query, key, value, attention_mask, sparse=False, **kwargs)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: CabMask | None,
    sparse: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    refuse(module, query, key, mask, dropout, sliding_window, kwargs)
    query, key, value = _one_dtype(module, query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is None:
        _require_seen(module)
        batch, q_length, kv_length = query.shape[0], query.shape[2], key.shape[2]
        mask = CabMask(
            batch, q_length, kv_length, kv_length - q_length, window=sliding_window or None
        )
    config = mask.parsed(module.config, settings_in_use if sparse else settings)
    parallel = getattr(module, PARALLEL, None)
    mask.require_as_before(module, (config, sparse, parallel))
    if parallel is not None:
        told = position_ids, kwargs.get("cu_seq_lens_q")
        out = _across_ranks(parallel, module, query, key, value, mask, scale, config, sparse, *told)
        return out.transpose(1, 2).contiguous(), None
    mask.find_documents(position_ids, kwargs.get("cu_seq_lens_q"))
    way = route(
        config,
        Workload.of(query, key, value, (config.query_block, config.key_block)),
        sparse=sparse,
        layer=getattr(module, "layer_idx", None),
        q_length=mask.q_length,
        kv_length=mask.kv_length,
        window=mask.window,
        plain=mask.plain,
        longest=mask.longest if sparse and mask.window is None else None,
    )
    if sparse and way.kind != "sparse":
        _warn_of_a_short_prompt(module, mask, config)
    if way.kind == "sparse":
        out = _sparse(module, query, key, value, mask, scale, config, way.engine)
    else:
        out = exact_attention(query, key, value, mask, scale, way.engine)
    # [B, N_q, H, D]; engines leave it in memory so, and models may ask for a view of it
    return out.transpose(1, 2).contiguous(), None


def _warn_of_a_short_prompt(module: nn.Module, mask: CabMask, config: CabConfig) -> None:
    """Say once that a call which begins a text has too few tokens of it, in every document."""
    begins = mask.q_length == mask.kv_length and mask.q_length > 1
    if torch.compiler.is_compiling() or not begins or mask.window is not None:
        return
    longest = mask.longest
    tokens = mask.kv_length if longest is None else longest.tokens
    warn_if_too_short(tokens, config.min_length, CabConfig.min_length, module.config)


def _sparse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: CabMask,
    scale: float,
    config: CabConfig,
    engine: Engine,
) -> Tensor:
    frame = mask.frame(config.query_block, config.key_block, query.device)
    q, k, v = frame.queries(query), frame.keys(key), frame.keys(value)
    channels = slow_channels(module, q.shape[-1])
    call = mask.call(frame, scale, getattr(module, "layer_idx", None), channels)

    def predict() -> BlockPlan:
        plan = make_predictor(config)(q, k, call)
        fewest = 0 if config.sparse_decode else config.query_block
        short = frame.short(fewest, config.min_length, plan.query_block)
        # documents that would be exact alone
        return plan if short is None else plan.with_whole_rows(short)

    plan = mask.planned(module, query, predict)
    out = engine.attention(q, k, v, plan, scale)
    if not torch.compiler.is_compiling():
        _record(module, plan)
    return frame.restore(out)


def _across_ranks(
    parallel: Parallel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: CabMask,
    scale: float,
    config: CabConfig,
    sparse: bool,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
) -> Tensor:
    """Inside `context_parallel`: routed as the whole text would be, over the keys of all ranks."""
    refuse_across_ranks(mask, query, key)
    layer = getattr(module, "layer_idx", None)
    layout = parallel.layout(mask, query, key, value, config, position_ids, cu_seq_lens)
    longest = max(layout.lengths)
    way = route(
        config,
        Workload.of(query, key, value, (config.query_block, config.key_block)),
        sparse=sparse,
        layer=layer,
        q_length=layout.text,
        kv_length=layout.text,
        window=mask.window,
        longest=Length(longest, longest),
    )
    if way.kind != "sparse":
        return parallel.exact(query, key, value, layout, scale, mask.window)
    channels = slow_channels(module, query.shape[-1])
    call = parallel.call(mask, layout, query, config, scale, layer, mask.handed, channels)
    plan = mask.planned(module, query, lambda: parallel.predict(query, key, layout, call, config))
    _record(module, plan)
    return parallel.sparse(query, key, value, layout, call, config, plan)


def _require_seen(module: nn.Module) -> None:
    """Refuse a layer without a mask that is computed again, and was not computed here before.

    "sdpa" makes no mask where it needs none: nothing else tells that the forward pass was its.
    """
    if torch.compiler.is_compiling():
        return
    if not in_backward_pass():
        _seen_without_mask[module] = module.config
    elif _seen_without_mask.get(module) is not module.config:
        raise RuntimeError(LEFT_EARLY)


# the config with which each layer was last called; every switch gives a model other config objects
_seen_without_mask: WeakKeyDictionary[nn.Module, PreTrainedConfig] = WeakKeyDictionary()


def _one_dtype(module: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as transformers' flash path does: an adapter may hand float32 to a model in bfloat16."""
    query = tensors[0]
    device = query.device.type
    target = query.dtype
    if torch.is_autocast_enabled(device):
        target = torch.get_autocast_dtype(device)
    elif query.dtype == torch.float32:
        weights = (m.weight.dtype for m in module.modules() if isinstance(m, nn.Linear))
        target = next(weights, query.dtype)
        if not target.is_floating_point or target.itemsize == 1:
            # quantised weights: their dtype is a container, the config has the compute dtype
            target = module.config.dtype or query.dtype
    return tuple(x.to(target) for x in tensors)


@dataclass
class Attended:
    """(query, key) pairs a layer attended and could have attended, int64 scalars on its device."""

    attended: Tensor
    causal: Tensor


attended: WeakKeyDictionary[nn.Module, Attended] = WeakKeyDictionary()


def _record(module: nn.Module, plan: BlockPlan) -> None:
    pairs = Attended(*plan.pairs())
    before = attended.get(module)
    if before is not None:
        pairs = Attended(before.attended + pairs.attended, before.causal + pairs.causal)
    attended[module] = pairs
