"""`find_unbatchable_reason`: why continuous batching does not support a model on "cab"."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from cab_hf.batching import support
from cab_hf.call.scope import is_sharded
from cab_hf.call.validate import find_unsupported_feature
from cab_hf.config import IMPLEMENTATION_NAMES
from cab_hf.hf.fit import softcap
from cab_hf.hf.layers import attention_layers, layer_type, window
from cab_hf.hf.token_mixers import token_mixers
from cab_hf.ops import HAS_TRITON


def find_unbatchable_reason(model: PreTrainedModel) -> str | None:
    """Return why continuous batching does not support a model on "cab", as a clause.

    Returns None if continuous batching supports the model.
    """
    if not support.transformers_passes_paged_cache():
        return f"transformers must be 5.19 or newer, got {transformers.__version__}"
    if not all(
        submodel.config._attn_implementation in IMPLEMENTATION_NAMES
        for submodel in support.transformers_submodels(model)
    ):
        return "some of its parts use another attention"
    if model.config.get_text_config().is_encoder_decoder:
        return "it has an encoder"
    mixer_names = dict.fromkeys(type(module).__name__ for module in token_mixers(model))
    if mixer_names:
        return f"it has layers that mix tokens without attention ({', '.join(mixer_names)})"
    layer_reasons = (
        _find_unbatchable_layer_reason(module) for _, module in attention_layers(model)
    )
    layer_reason = next(filter(None, layer_reasons), None)
    return layer_reason and f"it has {layer_reason}"


def _find_unbatchable_layer_reason(module: nn.Module) -> str | None:
    """Return the property of an attention module that is not supported, as a noun phrase.

    Returns None if continuous batching supports the module.
    """
    if layer_type(module) == "chunked_attention":
        return f"layers that attend in chunks of {window(module)} tokens"
    if window(module) is not None:
        return f"layers under a sliding window of {window(module)} tokens"
    if softcap(module) is not None:
        return "soft-capped logits"
    if getattr(module, "kv_lora_rank", None) is not None:
        return "multi-head latent attention"
    if is_sharded(module.config):
        return "a sequence that is sharded over ranks (context_parallel)"
    return find_unsupported_feature(module)


def has_kernel_for_pages() -> bool:
    """Return True if a kernel is available that reads the keys of decode steps from pages."""
    return torch.cuda.is_available() and HAS_TRITON
