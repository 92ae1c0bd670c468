"""The attention functions of "cab", "cab_frc" and "cab_dense", which transformers calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cab_hf.call.call import Call
from cab_hf.call.mask import MaskInfo
from cab_hf.call.scope import FORWARD_CONTEXT
from cab_hf.call.validate import LayerArguments
from cab_hf.dispatch import dispatch


def cab_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskInfo | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute block-sparse attention, with the signature of transformers' attention functions.

    Packed documents do not attend to each other. ``cu_seq_lens_q`` contains their cumulative
    lengths. Without ``cu_seq_lens_q``, a document starts at a token whose position is below the
    position of the token before. If the first token of a document and the next token have the same
    position, the next token starts another document. Padding starts no document.

    These rules also apply to calls with a mask or a cache, in which "sdpa" ignores positions. In
    calls without a mask and a cache, a document also starts where positions increase by more than
    1, as with "sdpa". A call that continues a cache attends to all cached tokens.

    Under torch.compile, this function reads positions in the same calls as "sdpa", and documents
    are not aligned to block borders. A block can then contain tokens of several documents, and
    ``min_length`` applies to the complete row.

    Args:
        query: [B, H, N_q, D] after RoPE.
        key: [B, H_kv, N_k, D] after the cache update.
        value: [B, H_kv, N_k, D_v] after the cache update.
        attention_mask: result of `cab_mask`; None for plain causal attention.
        dropout: must be 0.
        scaling: factor of the logits; 1/sqrt(D) by default.
        kwargs: further arguments of transformers. ``position_ids`` int [B, N_q],
            ``cu_seq_lens_q`` int [documents + 1], ``s_aux`` [H] and ``softcap`` are used, and
            ``sliding_window`` (in tokens) if there is no mask. Arguments that are None or in
            `validate.IGNORED_KEYWORDS` are ignored. Any other argument raises an error.

    Returns:
        [B, N_q, H, D_v], and None in place of the attention weights, which are never computed.

    Raises:
        ValueError, NotImplementedError: if the call cannot be computed exactly as specified.
    """
    arguments = LayerArguments.from_keywords(
        module, query, key, value, dropout=dropout, scaling=scaling, **kwargs
    )
    return _attend(Call.create(arguments, attention_mask, is_sparse=True)), None


def cab_dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskInfo | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute exact attention, with the arguments, results and errors of `cab_attention`."""
    arguments = LayerArguments.from_keywords(
        module, query, key, value, dropout=dropout, scaling=scaling, **kwargs
    )
    return _attend(Call.create(arguments, attention_mask, is_sparse=False)), None


def _attend(call: Call) -> Tensor:
    """Return the output [B, N_q, H, D_v], contiguous because models call ``view`` on the output."""
    observer = None if torch.compiler.is_compiling() else FORWARD_CONTEXT.get().observer
    if observer is not None:
        observer(call)
    part_outputs = [dispatch(call_part) for call_part in call.split_at_prompt_end()]
    output = part_outputs[0] if len(part_outputs) == 1 else torch.cat(part_outputs, dim=2)
    return output.transpose(1, 2).contiguous()
