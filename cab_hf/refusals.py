"""What "cab" does not compute, refused before anything runs: one sentence each."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from cab_hf.call import CabMask

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    dropout: float,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> None:
    """One sentence for everything that would otherwise quietly change meaning.

    Raises:
        ValueError, NotImplementedError: naming the argument, the value seen and what to do.
    """
    if _context_parallel_active():
        raise ValueError(
            "a context-parallel mesh is active; 'cab' would attend to this rank's shard only. "
            "Leave the context_parallel region, or use attn_implementation='sdpa' inside it."
        )
    if dropout:
        raise ValueError(
            f"dropout is {dropout}; 'cab' has no attention dropout. "
            "Set config.attention_dropout = 0.0 or call model.eval()."
        )
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal:
        raise ValueError(
            "is_causal is False; 'cab' computes causal self-attention only. "
            "Use attn_implementation='sdpa' for bidirectional and cross attention."
        )
    if key.shape[2] < query.shape[2]:
        raise ValueError(
            f"key has {key.shape[2]} tokens and query {query.shape[2]}; 'cab' computes causal "
            "self-attention, where no query lies behind the keys."
        )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions is True; 'cab' never forms attention weights. "
            "Use attn_implementation='eager' to read them."
        )
    for name, meaning in (("softcap", "soft-capped logits"), ("s_aux", "sink logits")):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name} is set ({meaning}); 'cab' does not compute them. "
                "Use attn_implementation='eager' or a flash implementation for this model."
            )
    if kwargs.get("cache") is not None:
        raise NotImplementedError(
            "cache is a paged cache (continuous batching); 'cab' does not read one. "
            "Use attn_implementation='sdpa' for generate_batch."
        )
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError(
            "position_bias is set; 'cab' adds no bias to logits. Use attn_implementation='sdpa'."
        )
    if mask is not None and not isinstance(mask, CabMask):
        seen = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(
            f"attention_mask is {seen}; 'cab' takes the 2-D padding mask [batch, tokens] of the "
            "tokenizer, or none. Use attn_implementation='sdpa' for a mask of your own."
        )
    if mask is not None and mask.window is not None and sliding_window is None:
        raise NotImplementedError(
            f"this layer attends in chunks of {mask.window}; 'cab' knows sliding windows and full "
            "attention. Use attn_implementation='sdpa' for this model."
        )
    if query.dtype not in DTYPES:
        raise ValueError(
            f"query is {query.dtype}; 'cab' takes float16, bfloat16 and float32. "
            "Load the model with one of these dtypes."
        )


def _context_parallel_active() -> bool:
    """Whether torch's context_parallel has taken over SDPA in this process."""
    tensor = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(tensor, "DTensor", None), "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers
