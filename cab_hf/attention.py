"""The attention functions of "cab", "cab_frc" and "cab_dense", which transformers calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cab_hf.batching.batch import attend_batch
from cab_hf.call.call import Call
from cab_hf.call.mask import MaskInfo
from cab_hf.call.scope import FORWARD_CONTEXT
from cab_hf.route import attend


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
            there is no mask. Arguments that are None or in `refusals.HARMLESS` are ignored. All
            others raise an error.

    Returns:
        [B, N_q, H, D_v], and None in place of the attention weights, which are never computed.

    Raises:
        ValueError, NotImplementedError: if the call cannot be computed exactly as specified.
    """
    given = query, key, value, attention_mask, dropout, scaling
    return _output(Call.of(module, *given, sparse=True, **kwargs)), None


def cab_dense_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Compute exact attention; arguments, results and errors as in `cab_attention`."""
    return _output(Call.of(module, *args, sparse=False, **kwargs)), None


def _output(call: Call) -> Tensor:
    """Return the output [B, N_q, H, D_v], contiguous because models may take a view of it."""
    observer = None if torch.compiler.is_compiling() else FORWARD_CONTEXT.get().observer
    if observer is not None:
        observer(call)
    if call.batch is not None:
        return attend_batch(call)
    # the prompt, then the answer, which may be decode steps
    pieces = call.text.pieces(call.sparse and call.config.sparse_decode)
    outs = [attend(replace(call, q=call.q[:, :, own], text=text)) for own, text in pieces]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out.transpose(1, 2).contiguous()
