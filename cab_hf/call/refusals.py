"""What "cab" does not compute, refused before anything runs: one sentence each."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import Cache

from cab_hf.call.forward_pass import SETTINGS_CHANGED, in_backward_pass
from cab_hf.call.mask import CabMask, of_another_kind, too_short
from cab_hf.checks import short
from cab_hf.hf.fit import name_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# looked at one by one
READ = frozenset({"cu_seq_lens_q", "is_causal", "output_attentions"})
# arguments that reach attention functions and change no attention: caching is done by then, the
# lengths follow from cu_seq_lens_q, and others concern the model around the layer
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
# where configs and attention modules of transformers have the rate of attention dropout
DROPOUT_FIELDS = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attention_dropout_prob",
    "attn_dropout",
    "dropout",
)
DROPOUT_ATTRIBUTES = ("attention_dropout", "attn_dropout", "attn_drop", "dropout", "dropout_p")
# other arguments of models, by what they mean
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


# DeepSeek-V4 puts them behind the keys of the text, where no mask of ours says who sees them
COMPRESSED = "compressed keys beside those of the text"


def refuse(
    module: nn.Module,
    dtype: torch.dtype,
    lengths: tuple[int, int],
    mask: Any,
    dropout: float,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> None:
    """One sentence for everything that would otherwise quietly change meaning.

    Args:
        dtype: of the queries.
        lengths: of queries and keys, in tokens.

    Raises:
        ValueError, NotImplementedError: naming the argument, the value seen and what to do.
    """
    if _context_parallel_active():
        raise ValueError(
            "a context-parallel mesh is active; 'cab' would attend to this rank's shard only. "
            "Leave the context_parallel region, or use attn_implementation='sdpa' inside it."
        )
    _refuse_directions(module, *lengths, kwargs)
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions is True; 'cab' never forms attention weights. "
            "Use attn_implementation='eager' to read them."
        )
    _refuse_keywords(name_of(getattr(module, "config", None)), kwargs)
    if getattr(module, "compressor", None) is not None:
        raise NotImplementedError(
            f"{type(module).__name__} attends to {COMPRESSED}, which 'cab' does not compute. "
            f"Use attn_implementation='eager' for {name_of(module.config)}."
        )
    if mask is not None:
        _refuse_mask(mask, lengths[1], sliding_window)
    if dropout:
        raise ValueError(
            f"dropout is {dropout}; 'cab' has no attention dropout. "
            f"{_remedy_for_dropout(module, dropout)}"
        )
    if dtype not in DTYPES:
        raise ValueError(
            f"query is {dtype}; 'cab' takes float16, bfloat16 and float32. "
            "Load the model with one of these dtypes."
        )


def refuse_sinks(sinks: Any, heads: int) -> None:
    """Refuse sinks that are not one a head, as where a library deals heads out to ranks.

    Raises:
        ValueError: naming the argument.
    """
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(
            f"s_aux is {short(sinks)}, and query has {heads} heads; give one sink logit a head."
        )


def foreseen(module: nn.Module) -> str | None:
    """What an attention layer will be refused for, as far as the layer itself shows it."""
    if getattr(module, "compressor", None) is not None:
        return COMPRESSED
    if hasattr(module, "rel_logits_proj"):
        return MEANINGS["position_bias"]
    # a layer that skips its own indexer takes what another layer's has chosen
    if getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False):
        return MEANINGS["indices"]
    if hasattr(module, "prepare_dynamic_mask"):
        return MEANINGS["block_mask"]
    return None


def _remedy_for_dropout(module: nn.Module, dropout: float) -> str:
    """Return a sentence that says how to turn off attention dropout in a loaded model."""
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
            # Persimmon has such a module, and reads the config in every call
            remedies.append(f"set model.config.{name} = 0.0")
        else:
            remedies.append(f"set {setting} = 0.0 in every {type(module).__name__} of this model")
        break
    remedy = ", or ".join([*remedies, "call model.eval()"])
    return f"{remedy[0].upper()}{remedy[1:]}."


def _refuse_directions(module: nn.Module, queries: int, keys: int, kwargs: dict[str, Any]) -> None:
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
            "self-attention, where no query lies behind the keys."
        )


def _refuse_keywords(model: str, kwargs: dict[str, Any]) -> None:
    """Whatever is handed over, and neither used nor known to change nothing."""
    cache = kwargs.get("cache")
    if isinstance(cache, Cache):
        raise ValueError(
            f"cache is a {type(cache).__name__}, which {model} does not read; before transformers "
            "5.24 models take it as past_key_values."
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
            f"{name} is {short(value)}; 'cab' does not know this argument and would ignore it. "
            f"Leave it out, or use attn_implementation='eager' for {model}."
        )
    if kwargs.get("cu_seq_lens_k") is not None and kwargs.get("cu_seq_lens_q") is None:
        raise ValueError("cu_seq_lens_k is set, and 'cab' reads cu_seq_lens_q, which is None.")


def _refuse_mask(mask: Any, keys: int, sliding_window: int | None) -> None:
    if not isinstance(mask, CabMask):
        if in_backward_pass():
            raise RuntimeError(SETTINGS_CHANGED)
        raise ValueError(of_another_kind(mask))
    if mask.refusal is not None:
        raise NotImplementedError(mask.refusal)
    if mask.slots is not None and mask.slots != keys:
        # without a cache all keys are the call's own
        if keys == mask.q_length and isinstance(mask.q_slot, int) and mask.q_slot == 0:
            raise ValueError(too_short(mask.slots, keys))
        raise ValueError(
            f"key has {keys} tokens, and with its cache the text has {mask.slots}: this layer's "
            "part of past_key_values does not hold what that of the first one does. Give a cache "
            "that all layers have written alike, or none."
        )
    # eager and sdpa follow the mask; the keyword is for kernels that read no mask
    if mask.window is None and sliding_window is not None and sliding_window < keys:
        raise NotImplementedError(
            f"sliding_window is {sliding_window}, and the mask of this layer has none; 'cab' "
            f"cannot tell which of them {mask.model} means. Use attn_implementation='sdpa'."
        )


def _context_parallel_active() -> bool:
    """Whether torch's context_parallel has taken over SDPA in this process."""
    tensor = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(tensor, "DTensor", None), "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers
