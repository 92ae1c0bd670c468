"""`Call`: all inputs of one attention computation in one layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from cab_hf.call import packing
from cab_hf.call.forward_state import SETTINGS_CHANGED, in_backward_pass
from cab_hf.call.mask import MaskDetails, MaskInfo
from cab_hf.call.scope import FORWARD_CONTEXT, is_sharded, prompt_of
from cab_hf.call.validate import validate_arguments
from cab_hf.config import CabConfig, blocks_of
from cab_hf.hf.fit import layer_index, warn_if_too_short
from cab_hf.hf.model_config import cab_config_in_use, cab_config_of
from cab_hf.hf.rotary import slow_channels
from cab_hf.ops import Workload
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """One attention computation of one layer.

    Attributes:
        q: [B, H, N_q, D] after RoPE.
        k: [B, H_kv, N_k, D] after the cache update; same dtype as q.
        v: [B, H_kv, N_k, D_v] after the cache update; same dtype as q.
        scale: factor of the logits.
        layer: attention module, whose ``layer_idx`` is read if it has one.
        config: settings of the layer.
        sparse: True if sparse attention is requested.
        work: workload that an engine must support.
        mask: visible keys: a `MaskInfo`, or a `ShardedMask` over ranks.
        index: the `KeyIndex` of the keys; None if the cache of the layer has none.
        sinks: [H], one additional logit per head in the softmax; None without sinks.
        softcap: cap c of the logits, ``c * tanh(logits / c)``; None without a cap.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    layer: nn.Module
    config: CabConfig
    sparse: bool
    work: Workload
    mask: Any
    index: Any = None
    sinks: Tensor | None = None
    softcap: float | None = None

    @staticmethod
    def create(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: MaskInfo | None,
        sparse: bool,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        position_ids: Tensor | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> Call:
        """Build a call from transformers' arguments; see `cab_attention` for these and errors."""
        validate_arguments(
            module,
            query,
            key,
            value,
            mask=mask,
            dropout=dropout,
            sliding_window=sliding_window,
            position_ids=position_ids,
            s_aux=s_aux,
            kwargs=kwargs,
        )
        q, k, v = one_dtype(module, query, key, value)
        if mask is None:
            mask = _plain_mask(
                module, batch=q.shape[0], queries=q.shape[2], keys=k.shape[2], window=sliding_window
            )
        config = mask.state.parsed(module.config, cab_config_in_use if sparse else cab_config_of)
        call = Call(
            q=q,
            k=k,
            v=v,
            scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
            layer=module,
            config=config,
            sparse=sparse,
            work=Workload.of(
                q, k, v, blocks_of(config), sinks=s_aux is not None, softcap=softcap is not None
            ),
            mask=mask,
            # an attribute of the keys that a cast would lose
            index=getattr(key, "cab_index", None),
            sinks=s_aux,
            softcap=softcap,
        )
        mask.state.require_same_settings(
            module, config, sparse=sparse, sampled_one_in=call.sampled_one_in
        )
        return call._with_documents(position_ids, kwargs.get("cu_seq_lens_q"))

    def _with_documents(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> Call:
        """Return the call after its mask has found the packed documents of the forward pass."""
        parallel, q = self.mask.details.parallel, self.q
        if parallel is not None:
            return replace(self, mask=parallel.sharded_mask(self, position_ids, cu_seq_lens))
        if is_sharded(self.layer.config):
            _raise_outside(self.layer)
        mask, mixed = self.mask.with_documents(position_ids, cu_seq_lens, self.v)
        if mixed is not None:
            q = packing.raise_where(q, mixed, packing.mixed_documents_error(mask.model))
        if self.sparse:
            _warn_of_a_short_prompt(self.layer, mask, self.config)
        return replace(self, q=q, mask=mask)

    def split_at_prompt_end(self) -> list[Call]:
        """Return the calls that are computed separately: the prompt, and the answer after it.

        The queries of an answer are decode steps, one by one, if the layer decodes sparsely.
        """
        parts = self.mask.split_at_prompt_end(self.sparse and self.config.sparse_decode)
        return [replace(self, q=self.q[:, :, queries], mask=mask) for queries, mask in parts]

    def context(self, ranges: KeyRanges, shared: dict[Any, Any] | None = None) -> LayerContext:
        """Return the context of the layer for a predictor.

        Args:
            ranges: visible keys of every query.
            shared: state that layers of a forward pass share; None for a new dict.
        """
        return LayerContext(
            ranges=ranges,
            scale=self.scale,
            layer=layer_index(self.layer),
            shared_state={} if shared is None else shared,
            channels=slow_channels(self.layer, self.q.shape[-1]),
            sinks=self.sinks,
            softcap=self.softcap,
        )

    @property
    def sampled_one_in(self) -> int:
        """Return `CabConfig.sampled_one_in`; 0 if no gradients are needed."""
        return self.config.sampled_one_in if self.work.training else 0


def _plain_mask(
    module: nn.Module, *, batch: int, queries: int, keys: int, window: int | None
) -> MaskInfo:
    """Return the mask of a layer that receives none: plain causal attention.

    Args:
        module: attention layer.
        batch: batch rows.
        queries, keys: numbers of tokens.
        window: width of a sliding window in tokens, or None.

    Raises:
        RuntimeError: if the layer is recomputed in a backward pass, but its forward pass used
            another attention implementation. "sdpa" often needs no mask, so nothing else shows it.
    """
    mask = MaskInfo(
        batch=batch,
        q_length=queries,
        kv_length=keys,
        q_offset=keys - queries,
        window=window or None,
        # torch.compile does not trace the default value
        details=MaskDetails(),
    )
    if torch.compiler.is_compiling():
        return mask
    if not in_backward_pass():
        _seen_without_mask[module] = module.config, FORWARD_CONTEXT.get().parallel
    config, parallel = _seen_without_mask.get(module, (None, None))
    if config is not module.config:
        raise RuntimeError(SETTINGS_CHANGED)
    prompt = prompt_of(batch, module.config, keys)
    return replace(mask, prompt=prompt, details=MaskDetails(parallel=parallel))


# config and ranks of the last call of each layer; a switch of the implementation replaces the
# config objects of a model
_seen_without_mask: WeakKeyDictionary[nn.Module, tuple[PreTrainedConfig, Any]] = WeakKeyDictionary()


def _raise_outside(layer: nn.Module) -> NoReturn:
    """Raise the error for a layer inside `context_parallel` whose mask was made outside."""
    if in_backward_pass():
        raise RuntimeError(SETTINGS_CHANGED)
    raise NotImplementedError(
        f"{type(layer).__name__} is inside context_parallel, and its mask was made outside. Call "
        "the model that was passed to context_parallel."
    )


def _warn_of_a_short_prompt(module: nn.Module, mask: MaskInfo, config: CabConfig) -> None:
    """Warn once if all documents of a prompt are too short for sparse attention."""
    begins = mask.q_length == mask.kv_length and mask.q_length > 1
    if torch.compiler.is_compiling() or not begins or mask.window is not None:
        return
    longest = mask.longest
    tokens = mask.kv_length if longest is None else longest.tokens
    warn_if_too_short(tokens, config.min_length, CabConfig.min_length, module.config)


def one_dtype(module: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast q, k and v to one dtype, as transformers does for flash attention.

    Adapters can pass float32 queries to a model in bfloat16.
    """
    query = tensors[0]
    device = query.device.type
    target = query.dtype
    if torch.is_autocast_enabled(device):
        target = torch.get_autocast_dtype(device)
    elif query.dtype == torch.float32:
        weights = (m.weight.dtype for m in module.modules() if isinstance(m, nn.Linear))
        target = next(weights, query.dtype)
        if not target.is_floating_point or target.itemsize == 1:
            # quantised weights: the compute dtype is in the config
            target = module.config.dtype or query.dtype
    return tuple(x.to(target) for x in tensors)
