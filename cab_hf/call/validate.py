"""`LayerArguments`, and errors for arguments, layers and transforms that "cab" does not support.

The functions of this module raise their errors before any computation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad
from transformers import Cache

from cab_hf.call.forward_state import SETTINGS_CHANGED_ERROR, is_in_backward_pass
from cab_hf.call.mask import MaskInfo, mask_too_short_error, padding_mask_error
from cab_hf.call.scope import refuse_compiled_model
from cab_hf.checks import short_repr
from cab_hf.hf.fit import model_name_of

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# arguments that `_validate_keywords` accepts, because other functions read them
CHECKED_KEYWORDS = frozenset({"cu_seq_lens_q", "is_causal", "output_attentions"})
# arguments that attention functions receive and may ignore: the cache is already updated, lengths
# follow from cu_seq_lens_q, and the other arguments are for other modules of the model
IGNORED_KEYWORDS = frozenset(
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
# names of the attention dropout rate in configs of transformers
DROPOUT_FIELDS = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attention_dropout_prob",
    "attn_dropout",
    "dropout",
)
# names of the attention dropout rate, or of a dropout module, in attention modules of transformers
DROPOUT_ATTRIBUTES = ("attention_dropout", "attn_dropout", "attn_drop", "dropout", "dropout_p")
# arguments of models that change attention -> their meaning, for error messages
UNSUPPORTED_FEATURES = {
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
COMPRESSED_KEYS_DESCRIPTION = "compressed keys in addition to those of the sequence"
# keyword arguments of attention functions that have a field in `LayerArguments`
LAYER_ARGUMENT_KEYWORDS = (
    "dropout",
    "scaling",
    "sliding_window",
    "position_ids",
    "s_aux",
    "softcap",
)


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerArguments:
    """The arguments that an attention function receives from transformers, except the mask.

    Attributes:
        module: attention layer.
        query: [B, H, N_q, D] after RoPE.
        key: [B, H_kv, N_k, D] after the cache update.
        value: [B, H_kv, N_k, D_v] after the cache update.
        dropout: rate of attention dropout.
        scaling: factor of the logits; None for 1/sqrt(D).
        sliding_window: width of a sliding window in tokens; None without a window.
        position_ids: int [B or 1, N_q]; None if the layer receives no position ids.
        s_aux: [H], sinks: one additional logit per head in the softmax; None without sinks.
        softcap: cap c of the logits, ``c * tanh(logits / c)``; None without a cap.
        other_arguments: all other keyword arguments, by name.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    dropout: float = 0.0
    scaling: float | None = None
    sliding_window: int | None = None
    position_ids: Tensor | None = None
    s_aux: Tensor | None = None
    softcap: float | None = None
    other_arguments: dict[str, Any]

    @classmethod
    def from_keywords(
        cls, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **keyword_arguments: Any
    ) -> LayerArguments:
        """Build `LayerArguments`; ``other_arguments`` are the arguments that have no field."""
        fields = {
            keyword: keyword_arguments.pop(keyword)
            for keyword in LAYER_ARGUMENT_KEYWORDS
            if keyword in keyword_arguments
        }
        return cls(
            module=module,
            query=query,
            key=key,
            value=value,
            other_arguments=keyword_arguments,
            **fields,
        )


def validate_arguments(arguments: LayerArguments, mask: Any) -> None:
    """Raise an error for arguments that would otherwise be ignored or computed wrongly.

    Args:
        arguments: arguments of the attention function.
        mask: argument ``attention_mask`` of the attention function.

    Raises:
        ValueError, NotImplementedError: if an argument is not supported. The message names the
            argument, its value and a remedy.
    """
    module, query, key = arguments.module, arguments.query, arguments.key
    validate_tracing(query, key, arguments.value)
    validate_forward_mode(query, key, arguments.value)
    refuse_vmap("position_ids", arguments.position_ids)
    num_queries, num_keys = query.shape[2], key.shape[2]
    if _is_context_parallel_active():
        raise ValueError(
            "a context-parallel mesh is active; 'cab' would attend to this rank's shard only. "
            "Leave the context_parallel region, or use attn_implementation='sdpa' inside it."
        )
    _validate_causal_self_attention(
        module, num_queries, num_keys, is_causal=arguments.other_arguments.get("is_causal")
    )
    if arguments.other_arguments.get("output_attentions"):
        raise ValueError(
            "output_attentions must be False, got True: 'cab' computes no attention weights. Use "
            "attn_implementation='eager' to read attention weights."
        )
    _validate_keywords(model_name_of(getattr(module, "config", None)), arguments.other_arguments)
    if getattr(module, "compressor", None) is not None:
        raise NotImplementedError(
            f"{type(module).__name__} attends to {COMPRESSED_KEYS_DESCRIPTION}, which 'cab' does "
            f"not compute. Use attn_implementation='eager' for {model_name_of(module.config)}."
        )
    if mask is not None:
        _validate_mask(mask, num_keys, arguments.sliding_window)
    if arguments.dropout:
        raise ValueError(
            f"dropout must be 0, got {arguments.dropout}: 'cab' has no attention dropout. "
            f"{_describe_remedy_for_dropout(module, arguments.dropout)}"
        )
    if query.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f"query must be float16, bfloat16 or float32, got {query.dtype}. "
            "Load the model with one of these dtypes."
        )
    _validate_sinks(arguments.s_aux, query.shape[1])
    refuse_compiled_model(module.config)


def _validate_sinks(sinks: Any, num_heads: int) -> None:
    """Raise an error for sinks that are not one logit per head.

    Sinks have another length than the heads if heads are sharded over ranks.

    Args:
        sinks: argument ``s_aux`` of the layer, [H]; None without sinks.
        num_heads: number of query heads.

    Raises:
        ValueError: if the shape is not [H].
    """
    if sinks is not None and tuple(sinks.shape) != (num_heads,):
        raise ValueError(
            f"s_aux must have one logit per head, got {short_repr(sinks)} for {num_heads} heads. "
            "Pass a tensor of shape [heads]."
        )


def find_unsupported_feature(module: nn.Module) -> str | None:
    """Return the unsupported property of an attention layer, as a noun phrase.

    Returns None if the layer is supported.
    """
    if getattr(module, "compressor", None) is not None:
        return COMPRESSED_KEYS_DESCRIPTION
    if hasattr(module, "rel_logits_proj"):
        return UNSUPPORTED_FEATURES["position_bias"]
    # a layer without its own indexer uses the keys that the indexer of another layer selects
    if getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False):
        return UNSUPPORTED_FEATURES["indices"]
    if hasattr(module, "prepare_dynamic_mask"):
        return UNSUPPORTED_FEATURES["block_mask"]
    return None


def _describe_remedy_for_dropout(module: nn.Module, dropout: float) -> str:
    """Return the remedies for an attention ``dropout`` rate in a loaded model, as a sentence."""
    config = getattr(module, "config", None)
    matching_dropout_fields = [
        attribute_name
        for attribute_name in DROPOUT_FIELDS
        if getattr(config, attribute_name, None) == dropout
    ]
    remedies = (
        [f"load the model with {matching_dropout_fields[0]}=0.0 in its config"]
        if matching_dropout_fields
        else []
    )
    for attribute_name in DROPOUT_ATTRIBUTES:
        attribute_value = getattr(module, attribute_name, None)
        is_dropout_module = isinstance(attribute_value, nn.Dropout)
        if (attribute_value.p if is_dropout_module else attribute_value) != dropout:
            continue
        attribute_path = f"{attribute_name}.p" if is_dropout_module else attribute_name
        if is_dropout_module and attribute_name in matching_dropout_fields:
            # Persimmon has a dropout module, but reads the rate from its config in every call
            remedies.append(f"set model.config.{attribute_name} = 0.0")
        else:
            remedies.append(
                f"set {attribute_path} = 0.0 in every {type(module).__name__} of this model"
            )
        break
    remedy_sentence = ", or ".join([*remedies, "call model.eval()"])
    return f"{remedy_sentence[0].upper()}{remedy_sentence[1:]}."


def _validate_causal_self_attention(
    module: nn.Module, num_queries: int, num_keys: int, *, is_causal: bool | None
) -> None:
    """Raise a ValueError for attention that is not causal self-attention.

    Args:
        module: attention layer.
        num_queries: queries per row.
        num_keys: keys per row.
        is_causal: argument of the attention function; None to read the attribute of the module.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal:
        raise ValueError(
            f"is_causal must be True, got False in {type(module).__name__}: 'cab' computes causal "
            "self-attention only. Use attn_implementation='sdpa' for bidirectional and cross "
            "attention, {'text_config': 'cab'} where the language model is one part of several."
        )
    if num_keys < num_queries:
        raise ValueError(
            f"key must have at least the {num_queries} tokens of query, got {num_keys}: 'cab' "
            "computes causal self-attention, which needs a key for every query. Use "
            "attn_implementation='sdpa' for cross attention."
        )


def _validate_keywords(model_name: str, keyword_arguments: dict[str, Any]) -> None:
    """Raise an error for arguments that "cab" neither reads nor may ignore.

    Args:
        model_name: name of the model, for error messages.
        keyword_arguments: `LayerArguments.other_arguments`.
    """
    cache = keyword_arguments.get("cache")
    if isinstance(cache, Cache):
        raise ValueError(
            f"cache must be None, got a {type(cache).__name__}, which {model_name} does not read. "
            "Before transformers 5.24, pass the cache as past_key_values."
        )
    if cache is not None:
        raise NotImplementedError(
            "cache must be None, got a paged cache (continuous batching), which 'cab' does not "
            "read. Use attn_implementation='sdpa' for generate_batch."
        )
    if keyword_arguments.get("softmax_scale") is not None:
        raise ValueError(
            f"softmax_scale must be None, got {short_repr(keyword_arguments['softmax_scale'])}. "
            "Pass the factor as scaling, the name that transformers uses."
        )
    for keyword, value in keyword_arguments.items():
        if value is None or keyword in CHECKED_KEYWORDS or keyword in IGNORED_KEYWORDS:
            continue
        if keyword in UNSUPPORTED_FEATURES:
            raise NotImplementedError(
                f"{keyword} must be None: 'cab' does not compute {UNSUPPORTED_FEATURES[keyword]}. "
                f"Use attn_implementation='eager' for {model_name}."
            )
        raise ValueError(
            f"{keyword} must be None, got {short_repr(value)}: 'cab' would ignore this argument. "
            f"Leave out {keyword}, or use attn_implementation='eager' for {model_name}."
        )
    if (
        keyword_arguments.get("cu_seq_lens_k") is not None
        and keyword_arguments.get("cu_seq_lens_q") is None
    ):
        raise ValueError(
            "cu_seq_lens_k must be None if cu_seq_lens_q is None. Pass cu_seq_lens_q too."
        )


def _validate_mask(mask: Any, num_keys: int, sliding_window: int | None) -> None:
    """Raise an error for a mask that does not fit the layer, or that is not supported.

    Args:
        mask: argument ``attention_mask`` of the layer.
        num_keys: length of the key tensor of the layer.
        sliding_window: width of a sliding window in tokens; None without a window.
    """
    if not isinstance(mask, MaskInfo):
        if is_in_backward_pass():
            raise RuntimeError(SETTINGS_CHANGED_ERROR)
        raise ValueError(padding_mask_error(mask))
    details = mask.details
    if details.unsupported_error is not None:
        raise NotImplementedError(details.unsupported_error)
    if details.cache_length is not None and details.cache_length != num_keys:
        # without a cache, all keys belong to this call
        if num_keys == mask.q_length and isinstance(mask.q_offset, int) and mask.q_offset == 0:
            raise ValueError(mask_too_short_error(details.cache_length, num_keys))
        raise ValueError(
            f"key must have {details.cache_length} tokens, as in the first layer, got {num_keys}: "
            "past_key_values has another length in this layer. Pass a cache with equal lengths in "
            "all layers, or none."
        )
    # refused, because other implementations disagree: "eager" and "sdpa" read only the mask, and
    # kernels without a mask read only the argument
    if mask.window is None and sliding_window is not None and sliding_window < num_keys:
        raise NotImplementedError(
            f"sliding_window must be None for a mask without a window, got {sliding_window}: the "
            f"argument and the mask of {mask.model_name} disagree. Use attn_implementation='sdpa'."
        )


def _is_context_parallel_active() -> bool:
    """Return True if torch's context_parallel is active in this process."""
    dtensor_module = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(dtensor_module, "DTensor", None), "_op_dispatcher", None)
    dtensor_op_handlers = getattr(dispatcher, "_custom_op_handlers", {})
    return torch.ops.aten._scaled_dot_product_flash_attention.default in dtensor_op_handlers


def validate_tracing(*tensors: Any) -> None:
    """Raise an error if a tracer records the call, and for tensors without values.

    Args:
        tensors: arguments of the call; arguments that are not tensors are ignored.

    Raises:
        NotImplementedError: under `torch.jit.trace`, for fake tensors, and under functionalize.
    """
    if torch.compiler.is_compiling():
        return
    tensors = [x for x in tensors if isinstance(x, Tensor)]
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace records the operations of one input, and the operations of 'cab' and "
            "'cab_dense' depend on the input. Use torch.export.export or torch.compile."
        )
    # plain tensors are never fake, so the slow `detect_fake_mode` is omitted for them
    has_only_plain_tensors = len(tensors) > 0 and all(type(x) is Tensor for x in tensors)
    if not has_only_plain_tensors and detect_fake_mode(tensors) is not None:
        raise NotImplementedError(
            "the call has fake tensors (FakeTensorMode), and 'cab' reads values of tensors. Use "
            "torch.export.export or torch.compile, or set attn_implementation='sdpa'."
        )
    if any(map(_is_functional, tensors)):
        raise NotImplementedError(
            "torch.func.functionalize is active, and 'cab' reads values of tensors. Use "
            "torch.export.export or torch.compile, or set attn_implementation='sdpa'."
        )


def refuse_vmap(tensors_description: str, *tensors: Any) -> None:
    """Raise an error for tensors that are batched by `torch.vmap`.

    Args:
        tensors_description: noun phrase for the tensors, for the message.
        tensors: tensors to check; other values are ignored.

    Raises:
        NotImplementedError: if `torch.vmap` batches a tensor.
    """
    if torch.compiler.is_compiling():
        return
    if any(isinstance(x, Tensor) and _is_batched(x) for x in tensors):
        raise NotImplementedError(
            f"torch.vmap batches {tensors_description}, and 'cab' reads its values. Loop over the "
            "samples, or set attn_implementation='sdpa'."
        )


def validate_forward_mode(*tensors: Tensor) -> None:
    """Raise an error for forward-mode differentiation, because CUDA kernels compute no tangents.

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
