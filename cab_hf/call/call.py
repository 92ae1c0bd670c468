"""`Call`: all inputs of one attention computation in one layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from cab_hf.call import packing
from cab_hf.call.forward_state import SETTINGS_CHANGED_ERROR, is_in_backward_pass
from cab_hf.call.mask import MaskDetails, MaskInfo
from cab_hf.call.scope import FORWARD_CONTEXT, current_prompt, is_sharded
from cab_hf.call.validate import LayerArguments, validate_arguments
from cab_hf.config import CabConfig, block_sizes
from cab_hf.hf.fit import layer_index, warn_if_too_short
from cab_hf.hf.model_config import cab_config_in_use, cab_config_of
from cab_hf.hf.rotary import slow_channels
from cab_hf.ops import Workload
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """The inputs of one attention computation in one layer.

    Attributes:
        q: [B, H, N_q, D] after RoPE.
        k: [B, H_kv, N_k, D] after the cache update; same dtype as q.
        v: [B, H_kv, N_k, D_v] after the cache update; same dtype as q.
        scale: factor of the logits.
        layer: attention module, whose attribute ``layer_idx`` is optional.
        config: settings of the layer.
        is_sparse: True if sparse attention is requested.
        workload: workload that an engine must support.
        mask: visible keys: a `MaskInfo`, or a `ShardedMask` for a sequence over many ranks.
        key_index: the `KeyIndex` of the keys; None if the cache of the layer has no index.
        sinks: [H], one additional logit per head in the softmax; None without sinks.
        softcap: cap c of the logits, ``c * tanh(logits / c)``; None without a cap.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    layer: nn.Module
    config: CabConfig
    is_sparse: bool
    workload: Workload
    mask: Any
    key_index: Any = None
    sinks: Tensor | None = None
    softcap: float | None = None

    @staticmethod
    def create(arguments: LayerArguments, mask: MaskInfo | None, *, is_sparse: bool) -> Call:
        """Build a call from the arguments of an attention function.

        Args:
            arguments: arguments of the attention function.
            mask: result of `cab_mask`; None for plain causal attention.
            is_sparse: True if sparse attention is requested.

        Raises:
            ValueError, NotImplementedError: as in `cab_attention`.
        """
        validate_arguments(arguments, mask)
        module, s_aux, softcap = arguments.module, arguments.s_aux, arguments.softcap
        q, k, v = cast_to_one_dtype(module, arguments.query, arguments.key, arguments.value)
        if mask is None:
            mask = _make_plain_mask(
                module,
                batch=q.shape[0],
                num_queries=q.shape[2],
                num_keys=k.shape[2],
                window=arguments.sliding_window,
            )
        config = mask.forward_state.parse_config_once(
            module.config, cab_config_in_use if is_sparse else cab_config_of
        )
        call = Call(
            q=q,
            k=k,
            v=v,
            scale=q.shape[-1] ** -0.5 if arguments.scaling is None else arguments.scaling,
            layer=module,
            config=config,
            is_sparse=is_sparse,
            workload=Workload.from_tensors(
                q, k, v, block_sizes(config), sinks=s_aux is not None, softcap=softcap is not None
            ),
            mask=mask,
            # from ``arguments.key``, because a cast to another dtype drops attributes of tensors
            key_index=getattr(arguments.key, "cab_index", None),
            sinks=s_aux,
            softcap=softcap,
        )
        mask.forward_state.require_same_settings(
            module, config, is_sparse=is_sparse, sampled_one_in=call.sampled_one_in
        )
        return call._with_documents(
            arguments.position_ids, arguments.other_arguments.get("cu_seq_lens_q")
        )

    def _with_documents(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> Call:
        """Return the call with a mask that separates packed documents.

        Args:
            position_ids: int [B or 1, N_q] of the layer; None without position ids.
            cu_seq_lens: int [documents + 1], cumulative lengths of documents, or None.
        """
        parallel_settings, q = self.mask.details.parallel_settings, self.q
        if parallel_settings is not None:
            return replace(
                self, mask=parallel_settings.make_sharded_mask(self, position_ids, cu_seq_lens)
            )
        if is_sharded(self.layer.config):
            _raise_mask_built_outside(self.layer)
        mask, has_mixed_documents = self.mask.with_documents(position_ids, cu_seq_lens, self.v)
        if has_mixed_documents is not None:
            q = packing.raise_where(
                q, has_mixed_documents, packing.mixed_documents_error(mask.model_name)
            )
        if self.is_sparse:
            _warn_of_short_prompt(self.layer, mask, self.config)
        return replace(self, q=q, mask=mask)

    def split_at_prompt_end(self) -> list[Call]:
        """Return the parts of this call that are computed separately: the prompt, and the answer.

        With ``sparse_decode``, each query of the answer is a separate part.
        """
        mask_parts = self.mask.split_at_prompt_end(self.is_sparse and self.config.sparse_decode)
        return [
            replace(self, q=self.q[:, :, query_slice], mask=mask)
            for query_slice, mask in mask_parts
        ]

    def make_layer_context(
        self, key_ranges: KeyRanges, shared_state: dict[Any, Any] | None = None
    ) -> LayerContext:
        """Return the context of the layer for a predictor.

        Args:
            key_ranges: visible keys of every query.
            shared_state: results that layers of a forward pass share, by key; None for a new dict.
        """
        return LayerContext(
            ranges=key_ranges,
            scale=self.scale,
            layer=layer_index(self.layer),
            shared_state={} if shared_state is None else shared_state,
            channels=slow_channels(self.layer, self.q.shape[-1]),
            sinks=self.sinks,
            softcap=self.softcap,
        )

    @property
    def sampled_one_in(self) -> int:
        """Return `CabConfig.sampled_one_in`; 0 if no gradients are needed."""
        return self.config.sampled_one_in if self.workload.training else 0


def _make_plain_mask(
    module: nn.Module, *, batch: int, num_queries: int, num_keys: int, window: int | None
) -> MaskInfo:
    """Return the mask of a layer that receives no mask: plain causal attention.

    Args:
        module: attention layer.
        batch: batch rows.
        num_queries: number of queries per row.
        num_keys: number of keys per row.
        window: width of a sliding window in tokens; None without a window.

    Raises:
        RuntimeError: if the layer is recomputed in a backward pass, and its forward pass used
            another attention implementation. Layers on "sdpa" often receive no mask, so the mask
            does not reveal the switch.
    """
    mask = MaskInfo(
        batch=batch,
        q_length=num_queries,
        kv_length=num_keys,
        q_offset=num_keys - num_queries,
        window=window or None,
        # set here, because torch.compile does not trace the default value
        details=MaskDetails(),
    )
    if torch.compiler.is_compiling():
        return mask
    if not is_in_backward_pass():
        _last_calls_without_mask[module] = module.config, FORWARD_CONTEXT.get().parallel_settings
    last_config, parallel_settings = _last_calls_without_mask.get(module, (None, None))
    if last_config is not module.config:
        raise RuntimeError(SETTINGS_CHANGED_ERROR)
    prompt = current_prompt(batch, module.config, num_keys)
    return replace(mask, prompt=prompt, details=MaskDetails(parallel_settings=parallel_settings))


# attention module -> config and ranks of its last call without a mask; switching the attention
# implementation of a model replaces its config objects
_last_calls_without_mask: WeakKeyDictionary[nn.Module, tuple[PreTrainedConfig, Any]] = (
    WeakKeyDictionary()
)


def _raise_mask_built_outside(layer: nn.Module) -> NoReturn:
    """Raise an error for a layer inside `context_parallel` whose mask was built outside."""
    if is_in_backward_pass():
        raise RuntimeError(SETTINGS_CHANGED_ERROR)
    raise NotImplementedError(
        f"{type(layer).__name__} is inside context_parallel, and its mask was built outside. Call "
        "the model that was passed to context_parallel."
    )


def _warn_of_short_prompt(module: nn.Module, mask: MaskInfo, config: CabConfig) -> None:
    """Warn once if all documents of a prompt are too short for sparse attention."""
    is_first_call = mask.q_length == mask.kv_length and mask.q_length > 1
    if torch.compiler.is_compiling() or not is_first_call or mask.window is not None:
        return
    longest_document = mask.longest_document
    num_tokens = mask.kv_length if longest_document is None else longest_document.num_tokens
    warn_if_too_short(num_tokens, config.min_length, CabConfig.min_length, module.config)


def cast_to_one_dtype(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in one dtype, which transformers would choose for flash attention.

    Adapters can pass float32 queries to a model in bfloat16.

    Args:
        module: attention layer, whose weights have the dtype of the model.
        query: [B, H, N_q, D].
        key: [B, H_kv, N_k, D].
        value: [B, H_kv, N_k, D_v].
    """
    device_type = query.device.type
    target_dtype = query.dtype
    if torch.is_autocast_enabled(device_type):
        target_dtype = torch.get_autocast_dtype(device_type)
    elif query.dtype == torch.float32:
        weight_dtypes = (
            submodule.weight.dtype
            for submodule in module.modules()
            if isinstance(submodule, nn.Linear)
        )
        target_dtype = next(weight_dtypes, query.dtype)
        if not target_dtype.is_floating_point or target_dtype.itemsize == 1:
            # quantised weights: the compute dtype is in the config
            target_dtype = module.config.dtype or query.dtype
    return query.to(target_dtype), key.to(target_dtype), value.to(target_dtype)
