"""What transformers calls: the attention functions behind "cab", "cab_frc" and "cab_dense"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cab_hf.batching.batch import attend_batch
from cab_hf.call.call import Call
from cab_hf.call.mask import CabMask
from cab_hf.call.scope import SCOPE
from cab_hf.route import attend


def cab_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CabMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Block-sparse attention under the signature of transformers' attention functions.

    Args:
        query: [B, H, N_q, D] after RoPE.
        key, value: [B, H_kv, N_k, D] after the cache update.
        attention_mask: what `cab_mask` made, or None for plain causal attention.
        dropout: refused unless it is 0.
        scaling: of logits; 1/sqrt(D) by default.
        kwargs: what transformers adds; ``position_ids`` int [B, N_q] and ``cu_seq_lens_q`` int
            [documents + 1] are used and, without a mask, ``sliding_window`` in tokens. What is None
            or in `refusals.HARMLESS` is ignored, the rest refused.

    Packed documents do not see each other. One begins where ``position_ids`` of real tokens fall
    back or repeat the position of a document's first token (which then was all of it), or where
    ``cu_seq_lens_q``, cumulative lengths, say so; with a mask or a cache as without. "sdpa" looks
    at positions where there is neither, and then this is the same: also where they leap forward,
    which begins a document there and nowhere else. A call that continues a cache sees all of it.
    Under torch.compile positions are looked at where "sdpa" does, and documents are not moved to
    block borders: neither selection nor ``min_length`` is then that of each alone.

    Returns:
        [B, N_q, H, D], and None for the attention weights, which never exist.

    Raises:
        ValueError, NotImplementedError: for what cannot be computed exactly.
    """
    given = query, key, value, attention_mask, dropout, scaling
    return _output(Call.of(module, *given, sparse=True, **kwargs)), None


def cab_dense_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Exact attention; arguments, results and errors are those of `cab_attention`."""
    return _output(Call.of(module, *args, sparse=False, **kwargs)), None


def _output(call: Call) -> Tensor:
    """[B, N_q, H, D_v]; engines leave it in memory so, and models may ask for a view of it."""
    observer = None if torch.compiler.is_compiling() else SCOPE.get().observer
    if observer is not None:
        observer(call)
    if call.batch is not None:
        return attend_batch(call)
    # the prompt, and the answer behind it, which may be steps
    pieces = call.text.pieces(call.sparse and call.config.sparse_decode)
    outs = [attend(replace(call, q=call.q[:, :, own], text=text)) for own, text in pieces]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out.transpose(1, 2).contiguous()
