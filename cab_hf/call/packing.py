"""Packed documents and padding, found from the arguments of a layer or from a mask function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import causal_mask_function

from cab_hf.checks import require

# CONSTANT_END equal tokens at the end of a row look like padding. In the first layer, values of
# equal tokens differ by at most SAME_VALUE times the largest value.
CONSTANT_END, SAME_VALUE = 4, 1e-3


class Length(NamedTuple):
    """Number of queries of a document in this call, and of its tokens so far, without padding."""

    queries: int
    tokens: int


class Packing(NamedTuple):
    """The documents and the padding of a call.

    Attributes:
        padding_mask: bool [B, N_k], False for padding keys; None without padding.
        doc_ids: int [B, N_k], equal for tokens of one packed document; None if not packed.
        lengths: `Length` of every row, if rows have padding and no documents; otherwise None.
        max_documents: upper bound of the number of documents, if known without waiting for the
            device.
        num_constant_ends: rows that end in equal tokens, which look like right padding.
    """

    padding_mask: Tensor | None
    doc_ids: Tensor | None
    lengths: list[list[Length]] | None = None
    max_documents: int | None = None
    num_constant_ends: int = 0


def detect_packing(
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    padding_mask: Tensor | None,
    *,
    batch: int,
    queries: slice,
    kv_length: int | None,
    doc_ids: Tensor | None = None,
    value: Tensor | None = None,
    may_wait: bool = True,
) -> Packing:
    """Return the documents and the padding of a call, after at most one wait for the device.

    Args:
        position_ids: int [B or 1, N_q]; a document starts where they restart. None to find no
            documents in them.
        cu_seqlens: int [documents + 1], cumulative lengths of documents, which replace position
            ids; None if there are none.
        padding_mask: bool [B, N_k], False for padding keys; None without padding.
        batch: batch rows.
        queries: slots of the queries.
        kv_length: number of written keys.
        doc_ids: int [B, N_k], documents that are known already; None to find them.
        value: [B, H_kv, N, D_v] of the first layer, to find rows that end in equal tokens. Not
            read if there is padding, or several documents.
        may_wait: False if waiting for the device is not allowed.

    Raises:
        ValueError: if ``cu_seqlens`` has another number of tokens.
    """
    max_documents, starts = None, None
    if doc_ids is None and cu_seqlens is not None:
        doc_ids = documents_between(cu_seqlens, batch, kv_length)
        max_documents = cu_seqlens.shape[0]
    elif doc_ids is None and position_ids is not None:
        starts = document_starts(position_ids, padding_mask)
    detected = Packing(padding_mask, doc_ids, max_documents=max_documents)
    if not may_wait:
        return detected
    has_values = value is not None and padding_mask is None and doc_ids is None
    device_values = [] if starts is None else [starts.sum(-1).expand(batch)]
    if padding_mask is not None:
        device_values += [padding_mask[:, queries].sum(-1), padding_mask.sum(-1)]
    if has_values:
        device_values += [ends_in_equal_tokens(value).long()]
    if not device_values:
        return detected
    # the model's tensors can be on several devices
    counts = torch.stack([x.to(device_values[-1].device) for x in device_values], dim=-1).tolist()
    if starts is not None:
        max_documents = max(row[0] for row in counts)
        if max_documents > 1:
            doc_ids = (starts.cumsum(-1) - 1).clamp(min=0).expand(batch, -1)
    if padding_mask is not None and all(row[-1] == kv_length for row in counts):
        # kernels without a mask are faster
        padding_mask = None
    has_lengths = padding_mask is not None and doc_ids is None
    return Packing(
        padding_mask=padding_mask,
        doc_ids=doc_ids,
        lengths=[[Length(*row[-2:])] for row in counts] if has_lengths else None,
        max_documents=max_documents,
        num_constant_ends=sum(row[-1] for row in counts) if has_values else 0,
    )


def ends_in_equal_tokens(value: Tensor) -> Tensor:
    """Return bool [B], True for rows of ``value`` [B, H_kv, N, D_v] that end in equal tokens."""
    # detached: a recomputed layer does not run this code
    end = value[:, :, -CONSTANT_END:].detach().float()
    difference = (end - end[:, :, -1:]).flatten(1).abs().amax(-1)
    return difference <= SAME_VALUE * end.flatten(1).abs().amax(-1)


def whole_documents(
    padding_mask: Tensor, doc_ids: Tensor, max_documents: int | None = None
) -> list[list[Length]]:
    """Return the lengths of documents without cached tokens, per row. Waits for the device.

    Args:
        padding_mask, doc_ids: as in `MaskInfo`.
        max_documents: upper bound of the number of documents; computed if None.
    """
    if max_documents is None:
        max_documents = int(doc_ids.max()) + 1
    tokens = document_lengths(padding_mask, doc_ids, max_documents)
    return [[Length(count, count) for count in row] for row in tokens.tolist()]


def document_lengths(padding_mask: Tensor, doc_ids: Tensor, max_documents: int) -> Tensor:
    """Return the number of real tokens of each document, int64 [B, documents]; see `MaskInfo`."""
    tokens = torch.zeros(
        padding_mask.shape[0], max_documents, dtype=torch.int64, device=padding_mask.device
    )
    return tokens.scatter_add_(1, doc_ids.to(torch.int64), padding_mask.to(torch.int64))


def document_starts(position_ids: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return bool [B or 1, N], True for real tokens that start a document.

    The first token of a row starts a document. A token also starts one if its position is below
    that of the real token before, or repeats the position of a document start. In the second case,
    the document before has one token. Other repeated positions belong to the tokens of an image.

    Args:
        position_ids: int [B or 1, N].
        padding_mask: bool [B, N], False for padding; None without padding.
    """
    slot = torch.arange(position_ids.shape[1], device=position_ids.device)
    if padding_mask is not None:
        padding_mask = padding_mask.to(position_ids.device)
        # padding gets the position of the real token before it, so it starts no document
        latest = torch.where(padding_mask, slot, -1).cummax(-1).values
        position_ids = position_ids.expand(padding_mask.shape[0], -1).gather(1, latest.clamp(min=0))
        position_ids = position_ids.masked_fill(latest < 0, torch.iinfo(position_ids.dtype).max)
    step = F.pad(position_ids[:, 1:].sub(position_ids[:, :-1]).sign(), (1, 0), value=-1)
    moved = torch.where(step != 0, slot, 0).cummax(-1).values
    starts = step.gather(1, moved) < 0
    return starts if padding_mask is None else starts & padding_mask


def counted_lengths(position_ids: Tensor) -> tuple[int, ...]:
    """Return the lengths of the packed documents, which must be equal in all rows.

    Waits for the device.

    Args:
        position_ids: int [B or 1, N].

    Raises:
        ValueError: if ``position_ids`` do not count from 0 in every document, or rows differ.
    """
    tokens = position_ids.shape[1]
    begins = document_starts(position_ids[:1], None)[0].nonzero().squeeze(1)
    lengths = F.pad(begins[1:], (0, 1), value=tokens) - begins
    counted = torch.arange(tokens, device=begins.device) - begins.repeat_interleave(lengths)
    if not bool((position_ids == counted).all()):
        raise ValueError(
            "position_ids do not count from 0 in every document, equally in all rows. Leave them "
            "out, or pass the cumulative lengths of documents as cu_seq_lens_q."
        )
    return tuple(lengths.tolist())


def documents_between(cu_seq_lens: Tensor, batch: int, length: int) -> Tensor:
    """Return document ids int [B, N] from cumulative lengths.

    Tokens after the last length form another document.

    Args:
        cu_seq_lens: int [documents + 1], lengths of one row that apply to all rows, or lengths of
            all rows one after the other.
        batch: batch rows.
        length: tokens per row.

    Raises:
        ValueError: if the lengths are not cumulative, or do not end at a row or at the batch.
            Values are not read while compiling.
    """
    name, what = "cu_seq_lens_q", "non-decreasing cumulative lengths from 0, int [documents + 1]"
    is_int_tensor = isinstance(cu_seq_lens, Tensor) and not cu_seq_lens.is_floating_point()
    require(
        is_int_tensor and cu_seq_lens.ndim == 1 and len(cu_seq_lens) > 1, name, cu_seq_lens, what
    )
    slot = torch.arange(batch * length, device=cu_seq_lens.device)
    if not torch.compiler.is_compiling():
        ends = cu_seq_lens.tolist()
        # without the 0, the first two documents would be merged
        require(ends[0] == 0 and ends == sorted(ends), name, ends, what)
        end = ends[-1]
        if end > batch * length or (batch > 1 and end not in (length, batch * length)):
            raise ValueError(
                f"cu_seq_lens_q must end at {batch * length} in a call of {batch} x {length} "
                f"tokens, got an end at {end}."
            )
    if batch > 1:
        # lengths of one row apply to every row
        slot = slot % cu_seq_lens[-1]
    return torch.bucketize(slot, cu_seq_lens[1:], right=True).unflatten(0, (batch, length))


def in_chunks(doc_ids: Tensor, padding_mask: Tensor | None, size: int) -> Tensor:
    """Return document ids [B, N] with every document split into chunks of ``size`` tokens.

    Args:
        doc_ids: int [B, N], document ids.
        padding_mask: bool [B, N], False for padding, which never starts a document; None without
            padding.
        size: tokens per chunk.
    """
    if padding_mask is not None:
        doc_ids = doc_ids.masked_fill(~padding_mask.to(doc_ids.device), -1)
    slot = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    first_tokens = begins(doc_ids)
    first = torch.where(first_tokens, slot, 0).cummax(-1).values
    return (first_tokens | ((slot - first) % size == 0)).cumsum(-1)


def begins(doc_ids: Tensor) -> Tensor:
    """Return bool [B, N], True for first tokens of documents, from document ids [B, N]."""
    return F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0), value=True)


def pattern_of(
    mask_function: Any, batch: int, q_offset: int | Tensor, q_length: int, device: Any
) -> tuple[Tensor, Tensor]:
    """Evaluate a mask function of transformers for neighbouring tokens.

    Args:
        mask_function: mask function of transformers.
        batch: batch rows.
        q_offset: position of the first query.
        q_length: number of queries.
        device: device of the results.

    Returns:
        (bool [], True if a token attends to the next one; bool [B, N_q], True for tokens that do
        not attend to the previous token, which start documents).
    """
    slot = q_offset + torch.arange(q_length, device=device).unsqueeze(0)
    ahead = _attends(mask_function, batch, slot[:, :-1], slot[:, 1:]).any()
    starts = ~_attends(mask_function, batch, slot, (slot - 1).clamp(min=0)) & (slot > 0)
    return ahead, starts


def parts_of(mask_function: Callable[..., Any]) -> dict[str, dict[str, Any]] | None:
    """Return the mask functions of transformers that a pattern consists of, with their arguments.

    Returns None if one function is not from transformers: its pattern is only known for neighbours.

    Returns:
        {name of the function that built the part: its arguments by name}, or None.
    """
    if mask_function.__module__ != causal_mask_function.__module__:
        return None
    made_with = inspect.getclosurevars(mask_function).nonlocals
    inner = [*made_with.get("mask_functions", ()), *filter(callable, made_with.values())]
    parts = {mask_function.__qualname__.partition(".")[0]: made_with}
    for inner_parts in map(parts_of, inner):
        if inner_parts is None:
            return None
        parts |= inner_parts
    return parts


@torch.library.custom_op("cab_hf::raise_where", mutates_args=())
def raise_where(x: Tensor, refused: Tensor, sentence: str) -> Tensor:
    """Return a copy of x, and raise an error if ``refused``, bool [], is True.

    For compiled graphs, and for conditions that the host cannot read without a wait.

    Raises:
        NotImplementedError: with the message ``sentence``. On a GPU, a device assertion fails at
            the next synchronisation instead.
    """
    if refused.is_cuda:
        torch._assert_async(~refused, sentence)
    elif bool(refused):
        raise NotImplementedError(sentence)
    return x.clone()


@raise_where.register_fake
def _(x: Tensor, refused: Tensor, sentence: str) -> Tensor:
    return torch.empty_like(x)


def _pass_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


raise_where.register_autograd(_pass_gradient)


def mixed_by(model: str) -> str:
    """Return the error for packed documents that a compiled ``model`` cannot keep separate."""
    return (
        f"position_ids pack documents in a compiled {model}, which reads position_ids only in "
        "calls without attention_mask and cache. Leave both out, pass cu_seq_lens_q, or do not "
        "compile."
    )


def _attends(mask_function: Any, batch: int, query: Tensor, key: Tensor) -> Tensor:
    """Return bool [B, N], True if a query attends to its key in head 0; both are int [1, N]."""
    row = torch.arange(batch, device=query.device).unsqueeze(-1)
    return mask_function(row, torch.zeros_like(row), query, key).expand(batch, query.shape[1])
