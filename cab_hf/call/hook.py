"""`cab_mask`: the mask function that transformers calls, which builds a `MaskInfo`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import causal_mask_function

from cab_hf.call import packing
from cab_hf.call.mask import (
    NON_CAUSAL_REASON,
    MaskDetails,
    MaskInfo,
    mask_too_short_error,
    non_causal_error,
    padding_mask_error,
)
from cab_hf.call.placeholder import MaskPlaceholder
from cab_hf.call.scope import (
    FORWARD_CONTEXT,
    Prompt,
    current_prompt,
    refuse_compiled_model,
    take_recorded_positions,
)
from cab_hf.call.validate import refuse_vmap, validate_tracing
from cab_hf.hf.fit import model_name_of


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

    transformers calls this function once per forward pass and layer type. For a pattern that is not
    causal, sliding-window, chunked or packed, the first layer that uses the mask raises an error.
    Models also build masks that no layer uses, such as the encoder mask of BART's decoder.

    Args:
        batch_size: batch rows.
        q_length: queries per row.
        kv_length: key slots per row, including unwritten slots of a static cache.
        q_offset: position of the first query, int or 0-d tensor.
        kv_offset: position of the first key slot.
        mask_function: mask function of transformers.
        attention_mask: [B, tokens], 0 for padding; None without padding. A `MaskPlaceholder` is
            returned unchanged.
        local_size: width of a sliding window or of chunks, in tokens; None without both.
        use_vmap: True if the caller has added an or_mask_function or and_mask_function.
        device: device of the result.
        config: config of the layers.

    Raises:
        ValueError: if the mask is not 2-D, has another batch size, or has too few tokens.
        NotImplementedError: for a compiled model inside `context_parallel`, and under transforms
            such as `torch.jit.trace`.
    """
    position_ids = take_recorded_positions()
    # the mask that generate() built for a static cache, or the mask of continuous batching
    if isinstance(attention_mask, MaskPlaceholder):
        return attention_mask
    refuse_compiled_model(config)
    _validate_padding_mask(attention_mask)
    mask_arguments = _MaskArguments(
        batch=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        use_vmap=use_vmap,
        device=device,
        config=config,
    )
    return _build_mask_info(mask_arguments, q_offset, position_ids)


class _MaskArguments(NamedTuple):
    """The arguments of `cab_mask` with the same names; ``batch`` is ``batch_size``."""

    batch: int
    q_length: int
    kv_length: int
    kv_offset: int
    mask_function: Any
    attention_mask: Tensor | None
    local_size: int | None
    use_vmap: bool
    device: torch.device | str
    config: Any


def _build_mask_info(
    mask_arguments: _MaskArguments, q_offset: int | Tensor, position_ids: Tensor | None
) -> MaskInfo:
    """Return the result of `cab_mask` for valid arguments.

    Args:
        mask_arguments: arguments of `cab_mask`.
        q_offset: position of the first query, int or 0-d tensor.
        position_ids: int [B or 1, N_q] that the model passes to mask functions; None without
            position ids.
    """
    q_length, kv_offset = mask_arguments.q_length, mask_arguments.kv_offset
    is_eager = not torch.compiler.is_compiling()
    prompt = _find_prompt(mask_arguments, q_offset) if is_eager else None
    if isinstance(q_offset, Tensor):
        # copied to the host or cloned, because the counter of a static cache changes in place
        can_read_offset = is_eager and (q_length > 1 or prompt is not None)
        q_offset = int(q_offset) if can_read_offset else q_offset.clone()
    first_query_slot = q_offset - kv_offset
    num_written_keys = None
    if not isinstance(first_query_slot, Tensor):
        # a static cache has more slots than written keys
        num_written_keys = min(mask_arguments.kv_length, first_query_slot + q_length)
    padding_mask = None
    if mask_arguments.attention_mask is not None:
        padding_mask = _slice_padding_mask(
            mask_arguments.attention_mask,
            batch=mask_arguments.batch,
            first_slot=kv_offset,
            num_slots=num_written_keys or mask_arguments.kv_length,
            min_tokens=q_offset + q_length,
        ).to(mask_arguments.device)

    mask_pattern = _find_pattern(
        mask_arguments, q_offset, has_all_keys=num_written_keys == q_length
    )
    model_name, unsupported_reason = (
        model_name_of(mask_arguments.config),
        mask_pattern.unsupported_reason,
    )
    mask_details = MaskDetails(
        model_name=model_name,
        cache_length=mask_arguments.kv_length,
        unsupported_error=None
        if unsupported_reason is None
        else non_causal_error(model_name, unsupported_reason),
        parallel_settings=FORWARD_CONTEXT.get().parallel_settings if is_eager else None,
        is_non_causal=mask_pattern.is_non_causal,
        chunk_starts=_find_first_unpadded_slots(mask_arguments) - kv_offset
        if _has_chunks(mask_arguments)
        else None,
        position_ids=position_ids,
    )
    return MaskInfo(
        batch=mask_arguments.batch,
        q_length=q_length,
        kv_length=num_written_keys,
        q_offset=first_query_slot,
        padding_mask=padding_mask,
        doc_ids=mask_pattern.doc_ids,
        window=mask_pattern.window,
        prompt=prompt,
        details=mask_details,
    )


def _has_chunks(mask_arguments: _MaskArguments) -> bool:
    """Return True if ``local_size`` is the size of chunks and not of a sliding window."""
    chunk_size = getattr(mask_arguments.config, "attention_chunk_size", None)
    return mask_arguments.local_size is not None and mask_arguments.local_size == chunk_size


def _validate_padding_mask(attention_mask: Tensor | None) -> None:
    """Raise the errors of `cab_mask` for a mask that is not a 2-D tensor with values."""
    validate_tracing(attention_mask)
    refuse_vmap("attention_mask", attention_mask)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(padding_mask_error(attention_mask))


class _MaskPattern(NamedTuple):
    """The visible keys that a mask function defines, in the terms of `MaskInfo`.

    Attributes:
        window: width of a sliding window or of chunks in tokens; None without both.
        doc_ids: see `MaskInfo`.
        unsupported_reason: the reason in the message of `non_causal_error`; None if the pattern is
            supported.
        is_non_causal: see `MaskDetails`.
    """

    window: int | None
    doc_ids: Tensor | None = None
    unsupported_reason: str | None = None
    is_non_causal: Tensor | None = None


def _find_pattern(
    mask_arguments: _MaskArguments, q_offset: int | Tensor, *, has_all_keys: bool
) -> _MaskPattern:
    """Return the pattern of the mask function of transformers.

    Args:
        mask_arguments: arguments of `cab_mask`.
        q_offset: position of the first query, int or 0-d tensor.
        has_all_keys: True if the call contains all keys that are visible to its queries.
    """
    mask_function, window = mask_arguments.mask_function, mask_arguments.local_size
    is_eager, has_chunks = not torch.compiler.is_compiling(), _has_chunks(mask_arguments)
    unsupported_reason, doc_ids, is_non_causal = None, None, None
    arguments_by_function = None
    if is_eager and (has_chunks or mask_arguments.use_vmap):
        arguments_by_function = packing.find_combined_functions(mask_function)
    if mask_arguments.use_vmap:
        # known added functions are accepted, because models with images add mask functions even to
        # prompts without images
        if arguments_by_function is None or "chunked_overlay" in arguments_by_function:
            unsupported_reason = "adds an or_mask_function or and_mask_function"
        else:
            window = arguments_by_function.get("sliding_window_overlay", {}).get(
                "sliding_window", window
            )
    is_causal_function = mask_function is causal_mask_function
    if unsupported_reason is None and not is_causal_function and mask_arguments.q_length > 1:
        has_attention_to_next_token, starts_document = packing.find_attention_to_neighbours(
            mask_function,
            batch=mask_arguments.batch,
            q_offset=q_offset,
            q_length=mask_arguments.q_length,
            device=mask_arguments.device,
        )
        unsupported_reason, is_non_causal, doc_ids = _classify_neighbour_attention(
            has_attention_to_next_token, starts_document, has_all_keys=has_all_keys, window=window
        )
    if has_chunks and arguments_by_function is not None:
        # neighbouring tokens do not distinguish documents from chunks: use the documents that
        # transformers has detected
        doc_ids = arguments_by_function.get("packed_sequence_mask_function", {}).get(
            "packed_sequence_mask"
        )
    return _MaskPattern(window, doc_ids, unsupported_reason, is_non_causal)


def _find_prompt(mask_arguments: _MaskArguments, q_offset: int | Tensor) -> Prompt | None:
    """Return the prompt that a call processes; None if the layers do not need its end.

    Also returns None if the end of the prompt is not known, and for decode steps.

    Args:
        mask_arguments: arguments of `cab_mask`.
        q_offset: position of the first query. The host reads a tensor from the device until the
            first decode step.
    """
    q_length = mask_arguments.q_length
    call_end_slot = None if isinstance(q_offset, Tensor) else q_offset + q_length
    prompt = current_prompt(mask_arguments.batch, mask_arguments.config, call_end_slot)
    if prompt is None:
        return None
    is_prompt_over = prompt.progress.is_prompt_over(q_offset, prompt.end)
    has_window = bool(mask_arguments.kv_offset) or mask_arguments.local_size is not None
    # layers with a window do not need the prompt, and a single query after it is a decode step
    return None if has_window or (is_prompt_over and q_length == 1) else prompt


def _find_first_unpadded_slots(mask_arguments: _MaskArguments) -> Tensor:
    """Return int64 [B], the slot of the first token without padding of every row."""
    attention_mask, device = mask_arguments.attention_mask, mask_arguments.device
    if attention_mask is None:
        return torch.zeros(mask_arguments.batch, dtype=torch.int64, device=device)
    return attention_mask.bool().int().argmax(-1).to(device)


def _classify_neighbour_attention(
    has_attention_to_next_token: Tensor,
    starts_document: Tensor,
    *,
    has_all_keys: bool,
    window: int | None,
) -> tuple[str | None, Tensor | None, Tensor | None]:
    """Return the fields of `_MaskPattern` that follow from attention between neighbouring tokens.

    Args:
        has_attention_to_next_token: bool [], True if any token attends to the next token.
        starts_document: bool [B, N_q], True for tokens that do not attend to the previous token.
        has_all_keys: True if the call contains all keys that are visible to its queries.
        window: width of a sliding window in tokens; None without a window.

    Returns:
        ``unsupported_reason``, ``is_non_causal`` and ``doc_ids``.
    """
    is_eager = not torch.compiler.is_compiling()
    unsupported_reason, is_non_causal, has_documents = None, has_attention_to_next_token, True
    if is_eager:
        is_non_causal_on_host, has_documents = torch.stack(
            (has_attention_to_next_token, starts_document.any())
        ).tolist()
        unsupported_reason, is_non_causal = (
            NON_CAUSAL_REASON if is_non_causal_on_host else None,
            None,
        )
    if has_documents and has_all_keys:
        return unsupported_reason, is_non_causal, starts_document.cumsum(-1)
    if has_documents and is_eager and window is None:
        unsupported_reason = unsupported_reason or (
            "has a mask that hides the previous token from a token, in a call with a cache"
        )
    return unsupported_reason, is_non_causal, None


def _slice_padding_mask(
    attention_mask: Tensor,
    *,
    batch: int,
    first_slot: int,
    num_slots: int,
    min_tokens: int | Tensor,
) -> Tensor:
    """Return the padding mask of some key slots, bool [B, num_slots].

    Args:
        attention_mask: [B, tokens], 0 for padding.
        batch: batch rows.
        first_slot: first slot of the result.
        num_slots: number of slots of the result.
        min_tokens: tokens that the mask must have: cached tokens and the tokens of this call.

    Raises:
        ValueError: if the mask has another number of rows, or fewer than ``min_tokens`` tokens.
    """
    num_rows, num_tokens = attention_mask.shape
    if num_rows != batch:
        raise ValueError(
            f"attention_mask must have {batch} rows, one for each sequence of the batch, got "
            f"{num_rows}. Pass one row for each sequence."
        )
    padding_mask = attention_mask[:, first_slot : first_slot + num_slots].bool()
    if isinstance(min_tokens, Tensor):
        is_too_short = (min_tokens > num_tokens).to(attention_mask.device)
        padding_mask = packing.raise_where(
            padding_mask, is_too_short, mask_too_short_error(num_tokens, "more")
        )
    elif num_tokens < min_tokens:
        raise ValueError(mask_too_short_error(num_tokens, min_tokens))
    # unwritten slots of a static cache count as padding
    return F.pad(padding_mask, (0, num_slots - padding_mask.shape[1]), value=False)
