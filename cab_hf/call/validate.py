"""Errors for arguments, layers and transforms that "cab" does not support.

All are raised before any computation.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad
from transformers import Cache

from cab_hf.call.forward_state import SETTINGS_CHANGED, in_backward_pass
from cab_hf.call.mask import MaskInfo, padding_mask_error, too_short_error
from cab_hf.call.scope import validate_compiled
from cab_hf.checks import short
from cab_hf.hf.fit import name_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# arguments that have their own checks
READ = frozenset({"cu_seq_lens_q", "is_causal", "output_attentions"})
# arguments that reach attention functions and do not change attention: the cache is updated
# already, lengths follow from cu_seq_lens_q, and other arguments concern the rest of the model
HARMLESS = frozenset(
    {
        # further outputs of tokenizers, and columns that a Trainer keeps
        "assistant_masks",
        "label_ids",
        "length",
        "num_truncated_tokens",
        "offset_mapping",
        "overflow_to_sample_mapping",
        "overflowing_tokens",
        "return_loss",
        "special_tokens_mask",
        # arguments of models
        "cache_position",
        "cu_seq_lens_k",
        "deterministic",
        "ignore_index",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "return_dict",
        "seq_idx",
        "shift_labels",
        "token_type_ids",
        "use_cache",
    }
)
# names of the rate of attention dropout in configs and attention modules of transformers
DROPOUT_FIELDS = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attention_dropout_prob",
    "attn_dropout",
    "dropout",
)
DROPOUT_ATTRIBUTES = ("attention_dropout", "attn_dropout", "attn_drop", "dropout", "dropout_p")
# meaning of other arguments of models
MEANINGS = {
    "alibi_slopes": "a bias on logits",
    "attn_bias": "a bias on logits",
    "attn_mask": "a mask of its own",
    "block_indices": "blocks chosen by an indexer",
    "block_mask": "a mask of its own",
    "head_mask": "weights of heads",
    "indices": "keys chosen by an indexer",
    "key_padding_mask": "a mask of its own",
    "layer_head_mask": "weights of heads",
    "position_bias": "a bias on logits",
}


# DeepSeek-V4 appends compressed keys to the keys of the sequence, and no MaskInfo describes them
COMPRESSED = "compressed keys in addition to those of the sequence"


def validate_arguments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any,
    dropout: float,
    sliding_window: int | None,
    position_ids: Tensor | None,
    s_aux: Any,
    kwargs: dict[str, Any],
) -> None:
    """Raise an error for arguments that would otherwise be ignored or computed wrongly.

    Args:
        module: attention layer.
        query: [B, H, N_q, D].
        key: [B, H_kv, N_k, D].
        value: [B, H_kv, N_k, D_v].
        mask: argument ``attention_mask`` of the layer.
        dropout: rate of attention dropout.
        sliding_window: width of a sliding window in tokens, or None.
        position_ids: position ids that the layer receives, or None.
        s_aux: sinks, [H], or None.
        kwargs: further arguments of the layer.

    Raises:
        ValueError, NotImplementedError: if an argument is not supported. The message names the
            argument, its value and a remedy.
    """
    validate_tracing(query, key, value)
    validate_forward_mode(query, key, value)
    validate_vmap("position_ids", position_ids)
    dtype, num_queries, num_keys = query.dtype, query.shape[2], key.shape[2]
    if _context_parallel_active():
        raise ValueError(
            "a context-parallel mesh is active; 'cab' would attend to this rank's shard only. "
            "Leave the context_parallel region, or use attn_implementation='sdpa' inside it."
        )
    _validate_directions(module, num_queries, num_keys, kwargs=kwargs)
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions is True; 'cab' never forms attention weights. "
            "Use attn_implementation='eager' to read them."
        )
    _validate_keywords(name_of(getattr(module, "config", None)), kwargs)
    if getattr(module, "compressor", None) is not None:
        raise NotImplementedError(
            f"{type(module).__name__} attends to {COMPRESSED}, which 'cab' does not compute. "
            f"Use attn_implementation='eager' for {name_of(module.config)}."
        )
    if mask is not None:
        _validate_mask(mask, num_keys, sliding_window)
    if dropout:
        raise ValueError(
            f"dropout is {dropout}; 'cab' has no attention dropout. "
            f"{_remedy_for_dropout(module, dropout)}"
        )
    if dtype not in DTYPES:
        raise ValueError(
            f"query must be float16, bfloat16 or float32, got {dtype}. "
            "Load the model with one of these dtypes."
        )
    _validate_sinks(s_aux, query.shape[1])
    validate_compiled(module.config)


def _validate_sinks(sinks: Any, heads: int) -> None:
    """Raise an error for sinks that are not one logit per head.

    Sinks have another length than the heads if heads are sharded over ranks.

    Args:
        sinks: argument ``s_aux`` of the layer, [H]; None without sinks.
        heads: number of query heads.

    Raises:
        ValueError: if the shape is not [H].
    """
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(
            f"s_aux must have one logit per head, got {short(sinks)} for {heads} heads. Pass a "
            "tensor of shape [heads]."
        )


def unsupported_reason(module: nn.Module) -> str | None:
    """Return the reason why an attention layer is not supported; None if no reason is known."""
    if getattr(module, "compressor", None) is not None:
        return COMPRESSED
    if hasattr(module, "rel_logits_proj"):
        return MEANINGS["position_bias"]
    # a layer that skips its indexer uses the selection of another layer
    if getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False):
        return MEANINGS["indices"]
    if hasattr(module, "prepare_dynamic_mask"):
        return MEANINGS["block_mask"]
    return None


def _remedy_for_dropout(module: nn.Module, dropout: float) -> str:
    """Return the remedies for attention dropout in a loaded model, as a sentence."""
    config = getattr(module, "config", None)
    fields = [name for name in DROPOUT_FIELDS if getattr(config, name, None) == dropout]
    remedies = [f"load the model with {fields[0]}=0.0 in its config"] if fields else []
    for name in DROPOUT_ATTRIBUTES:
        value = getattr(module, name, None)
        is_module = isinstance(value, nn.Dropout)
        if (value.p if is_module else value) != dropout:
            continue
        setting = f"{name}.p" if is_module else name
        if is_module and name in fields:
            # Persimmon has a dropout module, but reads the rate from its config in every call
            remedies.append(f"set model.config.{name} = 0.0")
        else:
            remedies.append(f"set {setting} = 0.0 in every {type(module).__name__} of this model")
        break
    remedy = ", or ".join([*remedies, "call model.eval()"])
    return f"{remedy[0].upper()}{remedy[1:]}."


def _validate_directions(
    module: nn.Module, queries: int, keys: int, *, kwargs: dict[str, Any]
) -> None:
    """Raise a ValueError for attention that is not causal self-attention."""
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal:
        raise ValueError(
            f"is_causal is False in {type(module).__name__}; 'cab' computes causal self-attention "
            "only. Use attn_implementation='sdpa' for bidirectional and cross attention, "
            "{'text_config': 'cab'} where the language model is one part of several."
        )
    if keys < queries:
        raise ValueError(
            f"key has {keys} tokens and query {queries}; 'cab' computes causal "
            "self-attention, which needs a key for every query."
        )


def _validate_keywords(model: str, kwargs: dict[str, Any]) -> None:
    """Raise an error for arguments that are neither used nor known to be harmless."""
    cache = kwargs.get("cache")
    if isinstance(cache, Cache):
        raise ValueError(
            f"cache is a {type(cache).__name__}, which {model} does not read. Before transformers "
            "5.24, pass the cache as past_key_values."
        )
    if cache is not None:
        raise NotImplementedError(
            "cache is a paged cache (continuous batching); 'cab' does not read one. "
            "Use attn_implementation='sdpa' for generate_batch."
        )
    if kwargs.get("softmax_scale") is not None:
        raise ValueError(
            f"softmax_scale is {short(kwargs['softmax_scale'])}; pass it as scaling, the "
            "name that transformers uses."
        )
    for name, value in kwargs.items():
        if value is None or name in READ or name in HARMLESS:
            continue
        if name in MEANINGS:
            raise NotImplementedError(
                f"{name} is set ({MEANINGS[name]}); 'cab' does not compute that. "
                f"Use attn_implementation='eager' for {model}."
            )
        raise ValueError(
            f"{name} is {short(value)}; 'cab' does not support this argument and would ignore it. "
            f"Leave it out, or use attn_implementation='eager' for {model}."
        )
    if kwargs.get("cu_seq_lens_k") is not None and kwargs.get("cu_seq_lens_q") is None:
        raise ValueError("cu_seq_lens_k is set, but cu_seq_lens_q is None. Pass cu_seq_lens_q too.")


def _validate_mask(mask: Any, keys: int, sliding_window: int | None) -> None:
    """Raise an error for a mask that does not fit the layer, or that is not supported."""
    if not isinstance(mask, MaskInfo):
        if in_backward_pass():
            raise RuntimeError(SETTINGS_CHANGED)
        raise ValueError(padding_mask_error(mask))
    details = mask.details
    if details.unsupported is not None:
        raise NotImplementedError(details.unsupported)
    if details.cache_length is not None and details.cache_length != keys:
        # without a cache, all keys belong to this call
        if keys == mask.q_length and isinstance(mask.q_offset, int) and mask.q_offset == 0:
            raise ValueError(too_short_error(details.cache_length, keys))
        raise ValueError(
            f"key has {keys} tokens, and with its cache the sequence has "
            f"{details.cache_length}: "
            "past_key_values has another length in this layer than in the first layer. Pass a "
            "cache with equal lengths in all layers, or none."
        )
    # eager and sdpa use the mask; the argument is for kernels that read no mask
    if mask.window is None and sliding_window is not None and sliding_window < keys:
        raise NotImplementedError(
            f"sliding_window is {sliding_window}, and the mask of this layer has none; 'cab' "
            f"does not know which of the two {mask.model} needs. Use attn_implementation='sdpa'."
        )


def _context_parallel_active() -> bool:
    """Return True if torch's context_parallel is active in this process."""
    tensor = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(tensor, "DTensor", None), "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def validate_tracing(*tensors: Any) -> None:
    """Raise an error under tracers that record one call, and for tensors without values.

    Args:
        tensors: arguments of the call; arguments that are not tensors are ignored.

    Raises:
        NotImplementedError: if a transform is active. The message names the transform.
    """
    if torch.compiler.is_compiling():
        return
    tensors = [x for x in tensors if isinstance(x, Tensor)]
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace records the operations of one input, and the operations of 'cab' and "
            "'cab_dense' depend on the input. Use torch.export.export or torch.compile."
        )
    # detecting a mode takes longer than the rest of this function
    is_plain = len(tensors) > 0 and all(type(x) is Tensor for x in tensors)
    if not is_plain and detect_fake_mode(tensors) is not None:
        raise NotImplementedError(
            "the call has fake tensors (FakeTensorMode), and 'cab' reads values of tensors. Use "
            "torch.export.export or torch.compile, or set attn_implementation='sdpa'."
        )
    if any(map(_is_functional, tensors)):
        raise NotImplementedError(
            "torch.func.functionalize is active, and 'cab' reads values of tensors. Use "
            "torch.export.export or torch.compile, or set attn_implementation='sdpa'."
        )


def validate_vmap(what: str, *tensors: Any) -> None:
    """Raise an error for tensors that are batched by `torch.vmap`.

    Args:
        what: name of the tensors, for the message.
        tensors: tensors to check; None is ignored.

    Raises:
        NotImplementedError: if `torch.vmap` batches a tensor.
    """
    if torch.compiler.is_compiling():
        return
    if any(isinstance(x, Tensor) and _is_batched(x) for x in tensors):
        raise NotImplementedError(
            f"torch.vmap batches {what}, and 'cab' reads its values. Loop over the samples, or "
            "set attn_implementation='sdpa'."
        )


def validate_forward_mode(*tensors: Tensor) -> None:
    """Raise an error for forward-mode differentiation of CUDA kernels, which drop the tangents.

    Raises:
        NotImplementedError: if forward-mode differentiation is active and a tensor is on a GPU.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x.is_cuda for x in tensors):
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp) is active, and the kernels of 'cab' "
            "have gradients in reverse mode only. Use torch.func.vjp or backward, or set "
            "attn_implementation='eager'."
        )


def _is_batched(x: Tensor) -> bool:
    """Return True if vmap batches ``x`` at any level of nested transforms."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def _is_functional(x: Tensor) -> bool:
    """Return True if functionalize wraps ``x`` at any level of nested transforms."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_functionaltensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False
