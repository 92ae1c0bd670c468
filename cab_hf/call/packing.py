"""Detection of packed documents and padding, from arguments of a layer or a mask function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import causal_mask_function

from cab_hf.checks import require

# number of equal tokens at the end of a row that look like padding
MIN_EQUAL_END_TOKENS = 4
# tokens count as equal if their V vectors in the first layer differ by at most this factor times
# the largest absolute number
EQUAL_VALUE_TOLERANCE = 1e-3


class DocumentLength(NamedTuple):
    """The length of one packed document, or of one batch row without documents.

    Attributes:
        num_queries: number of queries in this call, without padding.
        num_tokens: number of tokens up to the end of this call, including cached tokens, without
            padding.
    """

    num_queries: int
    num_tokens: int


class Packing(NamedTuple):
    """The documents and the padding of a call.

    Attributes:
        padding_mask: bool [B, N_k], False for padding keys; None without padding.
        doc_ids: int [B, N_k], equal for tokens of one packed document; None if not packed.
        document_lengths: one `DocumentLength` in a list per row, if rows have padding and no
            documents; otherwise None.
        max_documents: upper bound of the number of documents per row; None if only the device has
            the number.
        num_rows_with_equal_ends: number of rows that end in equal tokens, which look like right
            padding.
    """

    padding_mask: Tensor | None
    doc_ids: Tensor | None
    document_lengths: list[list[DocumentLength]] | None = None
    max_documents: int | None = None
    num_rows_with_equal_ends: int = 0


def detect_packing(
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    padding_mask: Tensor | None,
    *,
    batch: int,
    query_slots: slice,
    kv_length: int | None,
    doc_ids: Tensor | None = None,
    value_states: Tensor | None = None,
    can_wait_for_device: bool = True,
) -> Packing:
    """Return the documents and the padding of a call. Waits for the device at most once.

    Args:
        position_ids: int [B or 1, N_q], which restart where a document starts; or None.
        cu_seqlens: int [documents + 1], cumulative lengths, read instead of position ids; or None.
        padding_mask: bool [B, N_k], False for padding keys; None without padding.
        batch: batch rows.
        query_slots: slots of the queries.
        kv_length: number of written keys.
        doc_ids: int [B, N_k], the known document of each key; None to detect documents.
        value_states: [B, H_kv, N, D_v] of the first layer, to detect rows that look padded; None to
            omit this check.
        can_wait_for_device: False if waiting for the device is not allowed.

    Raises:
        ValueError: if ``cu_seqlens`` has another number of tokens.
    """
    max_documents = starts_document = None
    if doc_ids is None and cu_seqlens is not None:
        doc_ids = doc_ids_from_cu_seq_lens(cu_seqlens, batch, kv_length)
        max_documents = cu_seqlens.shape[0]
    elif doc_ids is None and position_ids is not None:
        starts_document = find_document_starts(position_ids, padding_mask)
    if not can_wait_for_device:
        return Packing(padding_mask, doc_ids, max_documents=max_documents)
    row_counts_on_device = {}
    if starts_document is not None:
        row_counts_on_device["documents"] = starts_document.sum(-1).expand(batch)
    if padding_mask is not None:
        row_counts_on_device["queries"] = padding_mask[:, query_slots].sum(-1)
        row_counts_on_device["tokens"] = padding_mask.sum(-1)
    if value_states is not None and padding_mask is None and doc_ids is None:
        row_counts_on_device["rows with equal ends"] = ends_in_equal_tokens(value_states).long()
    row_counts_on_host = _read_counts_from_device(row_counts_on_device)
    if starts_document is not None:
        max_documents = max(row_counts_on_host["documents"])
        if max_documents > 1:
            doc_ids = (starts_document.cumsum(-1) - 1).clamp(min=0).expand(batch, -1)
    if padding_mask is not None and all(
        num_row_tokens == kv_length for num_row_tokens in row_counts_on_host["tokens"]
    ):
        # no key is padding: drop the mask, because kernels without a mask are faster
        padding_mask = None
    has_row_lengths = padding_mask is not None and doc_ids is None
    return Packing(
        padding_mask=padding_mask,
        doc_ids=doc_ids,
        document_lengths=_make_row_lengths(row_counts_on_host) if has_row_lengths else None,
        max_documents=max_documents,
        num_rows_with_equal_ends=sum(row_counts_on_host.get("rows with equal ends", ())),
    )


def _read_counts_from_device(row_counts_on_device: dict[str, Tensor]) -> dict[str, list[int]]:
    """Return int64 tensors [B] as lists of numbers, by name. Waits for the device at most once."""
    if not row_counts_on_device:
        return {}
    # the model's tensors can be on several devices
    device = list(row_counts_on_device.values())[-1].device
    row_counts_on_host = torch.stack([x.to(device) for x in row_counts_on_device.values()]).tolist()
    return dict(zip(row_counts_on_device, row_counts_on_host, strict=True))


def _make_row_lengths(row_counts_on_host: dict[str, list[int]]) -> list[list[DocumentLength]]:
    """Return for each row a list of one `DocumentLength`, because each row is one document.

    Args:
        row_counts_on_host: the numbers of "queries" and of "tokens" in every row.
    """
    query_and_token_counts = zip(
        row_counts_on_host["queries"], row_counts_on_host["tokens"], strict=True
    )
    return [
        [DocumentLength(num_queries, num_tokens)]
        for num_queries, num_tokens in query_and_token_counts
    ]


def ends_in_equal_tokens(value_states: Tensor) -> Tensor:
    """Return bool [B], True for rows of value states [B, H_kv, N, D_v] that end in equal tokens."""
    # detached, because autograd must save no tensors here: a recomputed layer skips this code
    last_value_states = value_states[:, :, -MIN_EQUAL_END_TOKENS:].detach().float()
    max_difference = (last_value_states - last_value_states[:, :, -1:]).flatten(1).abs().amax(-1)
    return max_difference <= EQUAL_VALUE_TOLERANCE * last_value_states.flatten(1).abs().amax(-1)


def read_document_lengths(
    padding_mask: Tensor, doc_ids: Tensor, max_documents: int | None = None
) -> list[list[DocumentLength]]:
    """Return the `DocumentLength` of each document of each row, if no token is in a cache.

    Waits for the device.

    Args:
        padding_mask: bool [B, N], False for padding.
        doc_ids: int [B, N], equal for tokens of one document.
        max_documents: upper bound of the number of documents per row; None to read the number.
    """
    if max_documents is None:
        max_documents = int(doc_ids.max()) + 1
    num_tokens = count_document_tokens(padding_mask, doc_ids, max_documents)
    return [[DocumentLength(length, length) for length in row] for row in num_tokens.tolist()]


def count_document_tokens(padding_mask: Tensor, doc_ids: Tensor, max_documents: int) -> Tensor:
    """Return the number of tokens without padding of each document, int64 [B, max_documents].

    Args:
        padding_mask: bool [B, N], False for padding.
        doc_ids: int [B, N], equal for tokens of one document.
        max_documents: upper bound of the number of documents per row.
    """
    num_tokens = torch.zeros(
        padding_mask.shape[0], max_documents, dtype=torch.int64, device=padding_mask.device
    )
    return num_tokens.scatter_add_(1, doc_ids.to(torch.int64), padding_mask.to(torch.int64))


def find_document_starts(position_ids: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return bool [B or 1, N], True for tokens that start a document.

    The first token of a row starts a document. Another token starts a document if its position is
    below the position of the token before. A token that repeats the position of a document start
    also starts a document: the document before has one token. Other repeated positions belong to
    the tokens of an image. Padding is ignored.

    Args:
        position_ids: int [B or 1, N].
        padding_mask: bool [B, N], False for padding; None without padding.
    """
    token_slots = torch.arange(position_ids.shape[1], device=position_ids.device)
    if padding_mask is not None:
        padding_mask = padding_mask.to(position_ids.device)
        # padding gets the position of the last token before the padding, and starts no document
        last_token_slot = torch.where(padding_mask, token_slots, -1).cummax(-1).values
        position_ids = position_ids.expand(padding_mask.shape[0], -1).gather(
            1, last_token_slot.clamp(min=0)
        )
        position_ids = position_ids.masked_fill(
            last_token_slot < 0, torch.iinfo(position_ids.dtype).max
        )
    position_change = F.pad(position_ids[:, 1:].sub(position_ids[:, :-1]).sign(), (1, 0), value=-1)
    # slot of the last token whose position differs from the position before
    last_change_slot = torch.where(position_change != 0, token_slots, 0).cummax(-1).values
    starts_document = position_change.gather(1, last_change_slot) < 0
    return starts_document if padding_mask is None else starts_document & padding_mask


def read_common_document_lengths(position_ids: Tensor) -> tuple[int, ...]:
    """Return the lengths of the packed documents, which must be equal in all rows.

    Waits for the device.

    Args:
        position_ids: int [B or 1, N].

    Raises:
        ValueError: if ``position_ids`` do not count from 0 in every document, or rows differ.
    """
    num_tokens = position_ids.shape[1]
    first_document_slots = find_document_starts(position_ids[:1], None)[0].nonzero().squeeze(1)
    document_lengths = (
        F.pad(first_document_slots[1:], (0, 1), value=num_tokens) - first_document_slots
    )
    expected_position_ids = torch.arange(
        num_tokens, device=first_document_slots.device
    ) - first_document_slots.repeat_interleave(document_lengths)
    if not bool((position_ids == expected_position_ids).all()):
        raise ValueError(
            "position_ids must count from 0 in every document, equally in all rows. Leave out "
            "position_ids, or pass the cumulative lengths of documents as cu_seq_lens_q."
        )
    return tuple(document_lengths.tolist())


def doc_ids_from_cu_seq_lens(cu_seq_lens: Tensor, batch: int, row_length: int) -> Tensor:
    """Return document ids int [B, N] from cumulative lengths.

    Tokens after the end of the last document form one more document.

    Args:
        cu_seq_lens: int [documents + 1], lengths of one row that apply to all rows, or lengths of
            all rows one after the other.
        batch: batch rows.
        row_length: tokens per row.

    Raises:
        ValueError: if the lengths are not cumulative, or do not end at a row or at the batch.
            Values are not read while compiling.
    """
    argument_name = "cu_seq_lens_q"
    requirement = "non-decreasing cumulative lengths from 0, int [documents + 1]"
    is_int_tensor = isinstance(cu_seq_lens, Tensor) and not cu_seq_lens.is_floating_point()
    has_valid_shape = is_int_tensor and cu_seq_lens.ndim == 1 and len(cu_seq_lens) > 1
    require(has_valid_shape, argument_name, cu_seq_lens, requirement)
    token_indices = torch.arange(batch * row_length, device=cu_seq_lens.device)
    if not torch.compiler.is_compiling():
        cumulative_lengths = cu_seq_lens.tolist()
        # without the 0, the first two documents would be merged
        require(
            cumulative_lengths[0] == 0 and cumulative_lengths == sorted(cumulative_lengths),
            argument_name,
            cumulative_lengths,
            requirement,
        )
        total_length = cumulative_lengths[-1]
        if total_length > batch * row_length or (
            batch > 1 and total_length not in (row_length, batch * row_length)
        ):
            raise ValueError(
                f"cu_seq_lens_q must end at {batch * row_length} in a call of {batch} x "
                f"{row_length} tokens, got an end at {total_length}."
            )
    if batch > 1:
        # lengths of one row apply to every row
        token_indices = token_indices % cu_seq_lens[-1]
    return torch.bucketize(token_indices, cu_seq_lens[1:], right=True).unflatten(
        0, (batch, row_length)
    )


def split_into_chunks(doc_ids: Tensor, padding_mask: Tensor | None, chunk_size: int) -> Tensor:
    """Return document ids [B, N] with every document split into chunks of ``chunk_size`` tokens.

    Args:
        doc_ids: int [B, N], document ids.
        padding_mask: bool [B, N], False for padding, which never starts a document; None without
            padding.
        chunk_size: tokens per chunk.
    """
    if padding_mask is not None:
        doc_ids = doc_ids.masked_fill(~padding_mask.to(doc_ids.device), -1)
    token_slots = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    starts_document = is_first_token(doc_ids)
    document_start = torch.where(starts_document, token_slots, 0).cummax(-1).values
    return (starts_document | ((token_slots - document_start) % chunk_size == 0)).cumsum(-1)


def is_first_token(doc_ids: Tensor) -> Tensor:
    """Return bool [B, N], True for the first token of each document, from document ids [B, N]."""
    return F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)


def find_attention_to_neighbours(
    mask_function: Any, batch: int, q_offset: int | Tensor, q_length: int, device: Any
) -> tuple[Tensor, Tensor]:
    """Return which tokens attend to their neighbours under a mask function.

    Args:
        mask_function: mask function of transformers.
        batch: batch rows.
        q_offset: position of the first query.
        q_length: number of queries.
        device: device of the results.

    Returns:
        bool [], True if any token attends to the next token; and bool [B, N_q], True for tokens
        that do not attend to the previous token. Such tokens start documents.
    """
    query_slots = q_offset + torch.arange(q_length, device=device).unsqueeze(0)
    has_attention_to_next_token = _attends(
        mask_function, batch, query_slots[:, :-1], query_slots[:, 1:]
    ).any()
    attends_to_previous_token = _attends(
        mask_function, batch, query_slots, (query_slots - 1).clamp(min=0)
    )
    return has_attention_to_next_token, ~attends_to_previous_token & (query_slots > 0)


def find_combined_functions(mask_function: Callable[..., Any]) -> dict[str, dict[str, Any]] | None:
    """Return the mask functions of transformers that a mask function combines.

    Returns:
        A dict from the name of the function that builds a mask function, for example
        "sliding_window_overlay", to its arguments by name. None if a mask function is not from
        transformers, because its pattern is then only known for neighbouring tokens.
    """
    if mask_function.__module__ != causal_mask_function.__module__:
        return None
    mask_function_arguments = inspect.getclosurevars(mask_function).nonlocals
    inner_functions = [
        *mask_function_arguments.get("mask_functions", ()),
        *filter(callable, mask_function_arguments.values()),
    ]
    arguments_by_function = {mask_function.__qualname__.partition(".")[0]: mask_function_arguments}
    for inner_arguments_by_function in map(find_combined_functions, inner_functions):
        if inner_arguments_by_function is None:
            return None
        arguments_by_function |= inner_arguments_by_function
    return arguments_by_function


@torch.library.custom_op("cab_hf::raise_where", mutates_args=())
def raise_where(x: Tensor, condition: Tensor, message: str) -> Tensor:
    """Return a copy of x, or raise an error if a condition on the device is True.

    The op is for compiled graphs, and for code that must not wait for the device.

    Args:
        x: any tensor that later operations read, so that the op is not removed.
        condition: bool [], True to raise the error.
        message: message of the error.

    Raises:
        NotImplementedError: if ``condition`` is True. On a GPU, a device assertion fails at the
            next synchronisation instead.
    """
    if condition.is_cuda:
        torch._assert_async(~condition, message)
    elif bool(condition):
        raise NotImplementedError(message)
    return x.clone()


@raise_where.register_fake
def _(x: Tensor, condition: Tensor, message: str) -> Tensor:
    return torch.empty_like(x)


def _pass_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


raise_where.register_autograd(_pass_gradient)


def mixed_documents_error(model_name: str) -> str:
    """Return the error message for packed documents that a compiled model mixes."""
    return (
        f"position_ids pack documents in a compiled {model_name}, which reads position_ids only in "
        "calls without attention_mask and cache. Leave both out, pass cu_seq_lens_q, or do not "
        "compile."
    )


def _attends(
    mask_function: Any, batch: int, query_positions: Tensor, key_positions: Tensor
) -> Tensor:
    """Return bool [B, N], True if query i attends to key i in head 0.

    Args:
        mask_function: mask function of transformers.
        batch: batch rows.
        query_positions: int [1, N], positions of the queries.
        key_positions: int [1, N], positions of the keys.
    """
    row_indices = torch.arange(batch, device=query_positions.device).unsqueeze(-1)
    return mask_function(
        row_indices, torch.zeros_like(row_indices), query_positions, key_positions
    ).expand(batch, query_positions.shape[1])
