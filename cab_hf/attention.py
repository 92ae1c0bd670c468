"""The attention functions of "cab", "cab_frc" and "cab_dense", which transformers calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cab_hf.call.call import Call
from cab_hf.call.mask import MaskInfo
from cab_hf.call.scope import FORWARD_CONTEXT
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
    lengths. Without ``cu_seq_lens_q``, a document starts at a real token whose position is below
    that of the token before. A document also starts at a token that repeats the first position of
    the document before, which then has one token. Masks and caches do not change these rules.

    "sdpa" reads positions only in calls without a mask and a cache. In such calls, documents are
    the same as with "sdpa": a document also starts after a jump forward. In other calls, jumps
    start no document. A call that continues a cache attends to the whole cache.

    Under torch.compile, positions are read in the same calls as by "sdpa", and documents are not
    aligned to block borders. Selection and ``min_length`` then do not treat each document alone.

    Args:
        query: [B, H, N_q, D] after RoPE.
        key: [B, H_kv, N_k, D] after the cache update.
        value: [B, H_kv, N_k, D_v] after the cache update.
        attention_mask: result of `cab_mask`; None for plain causal attention.
        dropout: must be 0.
        scaling: factor of the logits; 1/sqrt(D) by default.
        kwargs: further arguments of transformers. ``position_ids`` int [B, N_q] and
            ``cu_seq_lens_q`` int [documents + 1] are used, and ``sliding_window`` (in tokens) if
            there is no mask. Arguments that are None or in `validate.HARMLESS` are ignored. All
            others raise an error.

    Returns:
        [B, N_q, H, D_v], and None in place of the attention weights, which are never computed.

    Raises:
        ValueError, NotImplementedError: if the call cannot be computed exactly as specified.
    """
    call = Call.create(
        module,
        query,
        key,
        value,
        mask=attention_mask,
        sparse=True,
        dropout=dropout,
        scaling=scaling,
        **kwargs,
    )
    return _attend(call), None


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
    """Compute exact attention; arguments, results and errors as in `cab_attention`."""
    call = Call.create(
        module,
        query,
        key,
        value,
        mask=attention_mask,
        sparse=False,
        dropout=dropout,
        scaling=scaling,
        **kwargs,
    )
    return _attend(call), None


def _attend(call: Call) -> Tensor:
    """Return the output [B, N_q, H, D_v], contiguous because models may take a view of it."""
    observer = None if torch.compiler.is_compiling() else FORWARD_CONTEXT.get().observer
    if observer is not None:
        observer(call)
    outs = [dispatch(part) for part in call.split_at_prompt_end()]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out.transpose(1, 2).contiguous()
