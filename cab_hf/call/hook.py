"""The mask hook, which transformers calls: a `CabMask` of what it hands over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import causal_mask_function

from cab_hf.call import packing
from cab_hf.call.mask import AHEAD, CabMask, not_causal, of_another_kind, too_short
from cab_hf.call.placeholder import NotATensor
from cab_hf.call.scope import SCOPE, prompt_of, recorded_positions, refuse_compiled
from cab_hf.call.transforms import refuse_tracing, refuse_vmap
from cab_hf.hf.fit import name_of


def cab_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | NotATensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> CabMask:
    """The mask hook registered beside "cab": a `CabMask` instead of a [B, 1, N_q, N_k] tensor.

    Called by transformers once a forward pass and kind of layer, with its own arguments.

    Patterns other than causal, sliding-window and packed are refused by the layer that uses them:
    BART's decoder has a mask made for the encoder that it may not have.

    Raises:
        ValueError: for a mask that is not 2-D, of another batch size, or of too few tokens.
        NotImplementedError: for a compiled model inside `context_parallel`, and under
            `torch.jit.trace` and other transforms.
    """
    position_ids = recorded_positions()
    # what generate() made for a static cache, or the mask of continuous batching
    if isinstance(attention_mask, NotATensor):
        return attention_mask
    refuse_compiled(config)
    refuse_tracing(attention_mask)
    refuse_vmap("attention_mask", attention_mask)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(of_another_kind(attention_mask))
    eager = not torch.compiler.is_compiling()
    end = None if isinstance(q_offset, Tensor) else q_offset + q_length
    prompt = prompt_of(batch_size, config, end) if eager else None
    if prompt is not None:
        # waits for a static cache until the first step of its answer
        prompt.read = prompt.read or int(q_offset) >= prompt.end
        if kv_offset or local_size is not None or (prompt.read and q_length == 1):
            # layers of a window have no use for it, and one query is an answer without
            prompt = None
    if isinstance(q_offset, Tensor):
        # a static cache that has begun: its counter is live
        known = eager and (q_length > 1 or prompt is not None)
        q_offset = int(q_offset) if known else q_offset.clone()
    q_slot = q_offset - kv_offset
    # a static cache's keys reach beyond what is written
    written = None if isinstance(q_slot, Tensor) else min(kv_length, q_slot + q_length)
    valid = None
    if attention_mask is not None:
        given = batch_size, kv_offset, written or kv_length, q_offset + q_length
        valid = _padding(attention_mask, *given).to(device)

    refusal, document, ahead, chunks_from = None, None, None, None
    chunks = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    if chunks:
        chunks_from = _first_tokens(attention_mask, batch_size, device) - kv_offset
    parts = packing.parts_of(mask_function) if eager and (chunks or use_vmap) else None
    if use_vmap:
        # a caller's own functions, or those of pictures, which text alone may have as well
        if parts is None or "chunked_overlay" in parts:
            refusal = "adds an or_mask_function or and_mask_function"
        else:
            local_size = parts.get("sliding_window_overlay", {}).get("sliding_window", local_size)
    model = name_of(config)
    if refusal is None and mask_function is not causal_mask_function and q_length > 1:
        seen = packing.pattern_of(mask_function, batch_size, q_offset, q_length, device)
        refusal, ahead, document = _documents(*seen, written == q_length, local_size)
    if chunks and parts is not None:
        # those that transformers has found: in the pattern they are no others than chunks
        packed = parts.get("packed_sequence_mask_function", {})
        document = packed.get("packed_sequence_mask")
    return CabMask(
        batch_size,
        q_length,
        written,
        q_slot,
        valid,
        document,
        local_size,
        slots=kv_length,
        model=model,
        refusal=None if refusal is None else not_causal(model, refusal),
        prompt=prompt,
        parallel=SCOPE.get().parallel if eager else None,
        looks_ahead=ahead,
        chunks_from=chunks_from,
        position_ids=position_ids,
    )


def _first_tokens(mask: Tensor | None, batch: int, device: torch.device | str) -> Tensor:
    """int64 [B]: the place of the first token of every row behind its padding."""
    if mask is None:
        return torch.zeros(batch, dtype=torch.int64, device=device)
    return mask.bool().int().argmax(-1).to(device)


def _documents(
    ahead: Tensor, starts: Tensor, whole: bool, window: int | None
) -> tuple[str | None, Tensor | None, Tensor | None]:
    """(refusal, `CabMask.looks_ahead`, `CabMask.document`) of what `packing.pattern_of` returns.

    ``whole``: the call holds all that its queries see.
    """
    eager, refusal, several = not torch.compiler.is_compiling(), None, True
    if eager:
        looks, several = torch.stack((ahead, starts.any())).tolist()
        refusal, ahead = AHEAD if looks else None, None
    if several and whole:
        return refusal, ahead, starts.cumsum(-1)
    if several and eager and window is None:
        refusal = refusal or "has a mask that hides the token before one from it, in a cache"
    return refusal, ahead, None


def _padding(mask: Tensor, batch: int, start: int, keys: int, end: int | Tensor) -> Tensor:
    """bool [B, keys], from slot ``start`` on: those of the tokens of a padding ``mask``.

    Args:
        end: slots that the mask must reach to, those of this call among them.

    Raises:
        ValueError: for a mask of other rows, or of fewer tokens.
    """
    rows, tokens = mask.shape
    if rows != batch:
        raise ValueError(
            f"attention_mask has {rows} rows and the batch {batch}; give one row for each text."
        )
    valid = mask[:, start : start + keys].bool()
    if isinstance(end, Tensor):
        valid = packing.refuse_where(
            valid, (end > tokens).to(mask.device), too_short(tokens, "more")
        )
    elif tokens < end:
        raise ValueError(too_short(tokens, end))
    # slots of a static cache that nothing is written to
    return F.pad(valid, (0, keys - valid.shape[1]), value=False)
