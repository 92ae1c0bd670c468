"""`cab_mask`: the mask function that transformers calls, which builds a `MaskInfo`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import causal_mask_function

from cab_hf.call import packing
from cab_hf.call.mask import (
    AHEAD,
    MaskDetails,
    MaskInfo,
    not_a_padding_mask,
    not_causal,
    too_short,
)
from cab_hf.call.placeholder import MaskPlaceholder
from cab_hf.call.scope import (
    FORWARD_CONTEXT,
    Prompt,
    prompt_of,
    recorded_positions,
    validate_compiled,
)
from cab_hf.call.validate import validate_tracing, validate_vmap
from cab_hf.hf.fit import name_of


def cab_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | MaskPlaceholder | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> MaskInfo:
    """Return a `MaskInfo` in place of a mask tensor [B, 1, N_q, N_k].

    transformers calls this function once per forward pass and layer type, with the arguments of
    its own mask functions. Supported patterns are causal, sliding-window, chunked and packed. For
    other patterns, the first layer that uses the mask raises an error: BART's decoder builds an
    encoder mask that it may not use.

    Raises:
        ValueError: if the mask is not 2-D, has another batch size, or has too few tokens.
        NotImplementedError: for a compiled model inside `context_parallel`, and under
            `torch.jit.trace` and other transforms.
    """
    position_ids = recorded_positions()
    # the mask that generate() built for a static cache, or the mask of continuous batching
    if isinstance(attention_mask, MaskPlaceholder):
        return attention_mask
    validate_compiled(config)
    validate_tracing(attention_mask)
    validate_vmap("attention_mask", attention_mask)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(not_a_padding_mask(attention_mask))
    eager = not torch.compiler.is_compiling()
    chunk_size = getattr(config, "attention_chunk_size", None)
    is_chunked = local_size is not None and local_size == chunk_size
    prompt = None
    if eager:
        prompt = _prompt(
            batch_size,
            config,
            q_offset=q_offset,
            q_length=q_length,
            is_windowed=bool(kv_offset) or local_size is not None,
        )
    if isinstance(q_offset, Tensor):
        # the counter of a static cache changes in place
        is_readable = eager and (q_length > 1 or prompt is not None)
        q_offset = int(q_offset) if is_readable else q_offset.clone()
    first_slot = q_offset - kv_offset
    # a static cache has more slots than written keys
    written = None if isinstance(first_slot, Tensor) else min(kv_length, first_slot + q_length)
    padding_mask = None
    if attention_mask is not None:
        padding_mask = _padding(
            attention_mask,
            batch=batch_size,
            start=kv_offset,
            keys=written or kv_length,
            end=q_offset + q_length,
        ).to(device)

    model = name_of(config)
    pattern = _pattern(
        mask_function,
        batch=batch_size,
        q_offset=q_offset,
        q_length=q_length,
        is_complete=written == q_length,
        window=local_size,
        is_chunked=is_chunked,
        use_vmap=use_vmap,
        device=device,
    )
    chunk_starts = None
    if is_chunked:
        chunk_starts = _first_tokens(attention_mask, batch_size, device) - kv_offset
    details = MaskDetails(
        model=model,
        cache_length=kv_length,
        unsupported=None if pattern.unsupported is None else not_causal(model, pattern.unsupported),
        parallel=FORWARD_CONTEXT.get().parallel if eager else None,
        non_causal=pattern.non_causal,
        chunk_starts=chunk_starts,
        position_ids=position_ids,
    )
    return MaskInfo(
        batch=batch_size,
        q_length=q_length,
        kv_length=written,
        q_offset=first_slot,
        padding_mask=padding_mask,
        doc_ids=pattern.doc_ids,
        window=pattern.window,
        prompt=prompt,
        details=details,
    )


class _Pattern(NamedTuple):
    """The pattern of a mask function.

    Attributes:
        window: width of a sliding window or of chunks in tokens, or None.
        doc_ids: see `MaskInfo`.
        unsupported: error for layers that use the mask, without the name of the model; None if the
            pattern is supported.
        non_causal: see `MaskDetails`.
    """

    window: int | None
    doc_ids: Tensor | None = None
    unsupported: str | None = None
    non_causal: Tensor | None = None


def _pattern(
    mask_function: Any,
    *,
    batch: int,
    q_offset: int | Tensor,
    q_length: int,
    is_complete: bool,
    window: int | None,
    is_chunked: bool,
    use_vmap: bool,
    device: torch.device | str,
) -> _Pattern:
    """Return the pattern of a mask function of transformers.

    Args:
        mask_function: mask function of transformers.
        batch: batch rows.
        q_offset: position of the first query.
        q_length: number of queries.
        is_complete: True if the call contains all keys that are visible to its queries.
        window: argument ``local_size`` of the mask hook.
        is_chunked: True if ``window`` is the size of chunks.
        use_vmap: True if the caller has added mask functions.
        device: device of the results.
    """
    eager = not torch.compiler.is_compiling()
    unsupported, doc_ids, non_causal = None, None, None
    parts = packing.parts_of(mask_function) if eager and (is_chunked or use_vmap) else None
    if use_vmap:
        # functions of the caller, or of models with images, also for prompts without images
        if parts is None or "chunked_overlay" in parts:
            unsupported = "adds an or_mask_function or and_mask_function"
        else:
            window = parts.get("sliding_window_overlay", {}).get("sliding_window", window)
    if unsupported is None and mask_function is not causal_mask_function and q_length > 1:
        ahead, starts = packing.pattern_of(
            mask_function, batch=batch, q_offset=q_offset, q_length=q_length, device=device
        )
        unsupported, non_causal, doc_ids = _documents(
            ahead, starts, is_complete=is_complete, window=window
        )
    if is_chunked and parts is not None:
        # documents from transformers: the pattern does not distinguish them from chunks
        doc_ids = parts.get("packed_sequence_mask_function", {}).get("packed_sequence_mask")
    return _Pattern(window, doc_ids, unsupported, non_causal)


def _prompt(
    batch: int, config: Any, *, q_offset: int | Tensor, q_length: int, is_windowed: bool
) -> Prompt | None:
    """Return the prompt that a call processes; None if its end is not known or not needed.

    Args:
        batch: batch rows.
        config: config of the layers.
        q_offset: position of the first query. A tensor is read from the device, until the first
            decode step.
        q_length: number of queries.
        is_windowed: True if layers have a window or chunks.
    """
    end = None if isinstance(q_offset, Tensor) else q_offset + q_length
    prompt = prompt_of(batch, config, end)
    if prompt is None:
        return None
    is_over = prompt.progress.is_over(q_offset, prompt.end)
    # layers with a window do not need the prompt, and a single query is a decode step
    return None if is_windowed or (is_over and q_length == 1) else prompt


def _first_tokens(mask: Tensor | None, batch: int, device: torch.device | str) -> Tensor:
    """Return int64 [B], the slot of the first real token of every row."""
    if mask is None:
        return torch.zeros(batch, dtype=torch.int64, device=device)
    return mask.bool().int().argmax(-1).to(device)


def _documents(
    ahead: Tensor, starts: Tensor, *, is_complete: bool, window: int | None
) -> tuple[str | None, Tensor | None, Tensor | None]:
    """Return (error, `MaskDetails.non_causal`, `MaskInfo.doc_ids`) from `packing.pattern_of`.

    Args:
        ahead, starts: results of `packing.pattern_of`.
        is_complete: True if the call contains all keys that are visible to its queries.
        window: width of a sliding window in tokens, or None.
    """
    eager, unsupported, several = not torch.compiler.is_compiling(), None, True
    if eager:
        is_non_causal, several = torch.stack((ahead, starts.any())).tolist()
        unsupported, ahead = AHEAD if is_non_causal else None, None
    if several and is_complete:
        return unsupported, ahead, starts.cumsum(-1)
    if several and eager and window is None:
        hides = "has a mask that hides the token before one from it, in a cache"
        unsupported = unsupported or hides
    return unsupported, ahead, None


def _padding(mask: Tensor, *, batch: int, start: int, keys: int, end: int | Tensor) -> Tensor:
    """Return bool [B, keys], the columns of a padding ``mask`` from slot ``start`` on.

    Args:
        mask: [B, tokens], 0 for padding.
        batch: batch rows.
        start: first slot of the result.
        keys: number of slots of the result.
        end: least number of tokens of the mask, including the tokens of this call.

    Raises:
        ValueError: if the mask has another number of rows, or fewer than ``end`` tokens.
    """
    rows, tokens = mask.shape
    if rows != batch:
        raise ValueError(
            f"attention_mask has {rows} rows and the batch {batch}. Pass one row for each sequence."
        )
    padding_mask = mask[:, start : start + keys].bool()
    if isinstance(end, Tensor):
        padding_mask = packing.raise_where(
            padding_mask, (end > tokens).to(mask.device), too_short(tokens, "more")
        )
    elif tokens < end:
        raise ValueError(too_short(tokens, end))
    # slots of a static cache that are not written yet
    return F.pad(padding_mask, (0, keys - padding_mask.shape[1]), value=False)
