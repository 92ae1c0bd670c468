"""What transformers calls: the attention functions behind "cab", "cab_frc" and "cab_dense".

A call is looked at, routed (decode, exact or sparse), and attended as the route has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from cab_hf.batching.batch import KEYWORDS, Batch
from cab_hf.call.forward_pass import SETTINGS_CHANGED, in_backward_pass
from cab_hf.call.frame import PARALLEL
from cab_hf.call.mask import CabMask
from cab_hf.call.prompt import prompt_of
from cab_hf.call.refusals import refuse
from cab_hf.config import CabConfig, blocks_of
from cab_hf.engines import Workload
from cab_hf.hf.fit import warn_if_too_short
from cab_hf.hf.model_config import cab_config_in_use, cab_config_of
from cab_hf.route import route, sampled_one_in

if TYPE_CHECKING:
    # imported where a text is first sharded
    from cab_hf.distributed.context import Parallel


def cab_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CabMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Block-sparse attention under the signature of transformers' attention functions.

    Args:
        query: [B, H, N_q, D] after RoPE.
        key, value: [B, H_kv, N_k, D] after the cache update.
        attention_mask: what `cab_mask` made, or None for plain causal attention.
        dropout: refused unless it is 0.
        scaling: of logits; 1/sqrt(D) by default.
        kwargs: what transformers adds; ``position_ids`` int [B, N_q] and ``cu_seq_lens_q`` int
            [documents + 1] are used and, without a mask, ``sliding_window`` in tokens. What is None
            or in `refusals.HARMLESS` is ignored, the rest refused.

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
        ValueError, NotImplementedError: for what cannot be computed exactly.
    """
    given = query, key, value, attention_mask, dropout, scaling
    return _attend(module, *given, sparse=True, **kwargs), None


def cab_dense_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Exact attention; arguments, results and errors are those of `cab_attention`."""
    return _attend(module, *args, sparse=False, **kwargs), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CabMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    sparse: bool,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    mask = attention_mask
    # the cache's, which is lost where keys are cast
    index = getattr(key, "cab_index", None)
    # since transformers 5.24 layers have no mask in continuous batching
    batch = kwargs.get("batch") if mask is None else mask
    batched = isinstance(batch, Batch)
    packed = {name: kwargs.pop(name, None) for name in KEYWORDS} if batched else None
    refuse(module, query, key, None if batched else mask, dropout, sliding_window, kwargs)
    query, key, value = _one_dtype(module, query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if batched:
        config = batch.state.parsed(module.config, cab_config_in_use if sparse else cab_config_of)
        return batch.attend(module, query, key, value, config, scale, sparse, packed)
    if mask is None:
        _require_seen(module)
        batch, q_length, kv_length = query.shape[0], query.shape[2], key.shape[2]
        mask = CabMask(
            batch, q_length, kv_length, kv_length - q_length, window=sliding_window or None
        )
        mask.prompt = None if torch.compiler.is_compiling() else prompt_of(batch)
    config = mask.state.parsed(module.config, cab_config_in_use if sparse else cab_config_of)
    parallel: Parallel | None = getattr(module, PARALLEL, None)
    work = Workload.of(query, key, value, blocks_of(config))
    mask.state.require_same_settings(
        module, (config, sparse, parallel), sampled_one_in(config, work)
    )
    parts = position_ids, kwargs.get("cu_seq_lens_q")
    if parallel is None:
        mask.find_documents(*parts, value)
        texts = mask.pieces(sparse and config.sparse_decode)
    else:
        texts = [(slice(None), parallel.text(mask, query, key, value, config, *parts))]
    outs = []
    for queries, text in texts:
        way = route(text, config, work, sparse=sparse, layer=module, index=index)
        if sparse and way.kind != "sparse" and parallel is None:
            _warn_of_a_short_prompt(module, text, config)
        outs.append(way.attend(query[:, :, queries], key, value, scale))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    # [B, N_q, H, D]; engines leave it in memory so, and models may ask for a view of it
    return out.transpose(1, 2).contiguous()


def _warn_of_a_short_prompt(module: nn.Module, mask: CabMask, config: CabConfig) -> None:
    """Say once that a call which begins a text has too few tokens of it, in every document."""
    begins = mask.q_length == mask.kv_length and mask.q_length > 1
    if torch.compiler.is_compiling() or not begins or mask.window is not None:
        return
    longest = mask.longest
    tokens = mask.kv_length if longest is None else longest.tokens
    warn_if_too_short(tokens, config.min_length, CabConfig.min_length, module.config)


def _require_seen(module: nn.Module) -> None:
    """Refuse a layer without a mask that is computed again, and was not computed here before.

    "sdpa" makes no mask where it needs none: nothing else shows that the forward pass was its.
    """
    if torch.compiler.is_compiling():
        return
    if not in_backward_pass():
        _seen_without_mask[module] = module.config
    elif _seen_without_mask.get(module) is not module.config:
        raise RuntimeError(SETTINGS_CHANGED)


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
