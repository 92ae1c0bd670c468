"""Where packed documents begin: by restarting positions, by lengths, or by a mask function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import causal_mask_function

from cab_hf.checks import require


def document_starts(position_ids: Tensor, valid: Tensor | None) -> Tensor:
    """bool [B or 1, N]: real tokens that begin a document, the first of a row among them.

    A document begins where the position is below that of the real token before. One that repeats
    the position of a beginning begins another: the one before it was a document of one token.
    Positions that repeat elsewhere are those of a picture's tokens.

    Args:
        position_ids: int [B or 1, N].
        valid: bool [B, N], False for padding; None for none.
    """
    slot = torch.arange(position_ids.shape[1], device=position_ids.device)
    if valid is not None:
        valid = valid.to(position_ids.device)
        # padding has the position of the real token before it, and so begins nothing
        latest = torch.where(valid, slot, -1).cummax(-1).values
        position_ids = position_ids.expand(valid.shape[0], -1).gather(1, latest.clamp(min=0))
        position_ids = position_ids.masked_fill(latest < 0, torch.iinfo(position_ids.dtype).max)
    step = F.pad(position_ids[:, 1:].sub(position_ids[:, :-1]).sign(), (1, 0), value=-1)
    moved = torch.where(step != 0, slot, 0).cummax(-1).values
    starts = step.gather(1, moved) < 0
    return starts if valid is None else starts & valid


def counted_lengths(position_ids: Tensor) -> tuple[int, ...]:
    """The lengths of the documents that every row of a batch is packed of. Waits for the device.

    Raises:
        ValueError: where ``position_ids``, int [B or 1, N], do not count every document from 0, or
            differ from row to row.
    """
    tokens = position_ids.shape[1]
    begins = document_starts(position_ids[:1], None)[0].nonzero().squeeze(1)
    lengths = F.pad(begins[1:], (0, 1), value=tokens) - begins
    counted = torch.arange(tokens, device=begins.device) - begins.repeat_interleave(lengths)
    if not bool((position_ids == counted).all()):
        raise ValueError(
            "position_ids do not count from 0 in every document, the same in every row; leave them "
            "out, or say by cu_seq_lens_q where documents begin and end."
        )
    return tuple(lengths.tolist())


def documents_between(cu_seq_lens: Tensor, batch: int, length: int) -> Tensor:
    """Document ids int [B, N] of cumulative lengths: of one row for all, or of all rows in one.

    What lies behind the last is a document of its own.

    Raises:
        ValueError: for what are no cumulative lengths, or end elsewhere than a row or the batch;
            values are not read while compiling.
    """
    name, what = "cu_seq_lens_q", "cumulative lengths, int [documents + 1], from 0 on, none falling"
    given = isinstance(cu_seq_lens, Tensor) and not cu_seq_lens.is_floating_point()
    require(given and cu_seq_lens.ndim == 1 and len(cu_seq_lens) > 1, name, cu_seq_lens, what)
    slot = torch.arange(batch * length, device=cu_seq_lens.device)
    if not torch.compiler.is_compiling():
        ends = cu_seq_lens.tolist()
        # without the 0 the first document would be one with the second
        require(ends[0] == 0 and ends == sorted(ends), name, ends, what)
        end = ends[-1]
        if end > batch * length or (batch > 1 and end not in (length, batch * length)):
            raise ValueError(
                f"cu_seq_lens_q must end at {batch * length} in a call of {batch} x {length} "
                f"tokens, got an end at {end}."
            )
    if batch > 1:
        # lengths of one row begin again with every row
        slot = slot % cu_seq_lens[-1]
    return torch.bucketize(slot, cu_seq_lens[1:], right=True).unflatten(0, (batch, length))


def in_chunks(document: Tensor, valid: Tensor | None, size: int) -> Tensor:
    """``document`` ids [B, N] in which every ``size`` tokens of a document are one of their own.

    Args:
        valid: bool [B, N], False for padding, which no document begins with; None for none.
    """
    if valid is not None:
        document = document.masked_fill(~valid.to(document.device), -1)
    slot = torch.arange(document.shape[1], device=document.device)
    first_tokens = begins(document)
    first = torch.where(first_tokens, slot, 0).cummax(-1).values
    return (first_tokens | ((slot - first) % size == 0)).cumsum(-1)


def begins(document: Tensor) -> Tensor:
    """Return the first tokens of documents, bool [B, N], of their ids [B, N]."""
    return F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)


def pattern_of(
    mask_function: Any, batch: int, q_offset: int | Tensor, q_length: int, device: Any
) -> tuple[Tensor, Tensor]:
    """What transformers' own mask function shows the queries of a call, from ``q_offset`` on.

    Returns:
        (whether a token sees the one behind it, bool []; tokens that may not see the one before
        them, bool [B, N_q]: they begin documents).
    """
    slot = q_offset + torch.arange(q_length, device=device).unsqueeze(0)
    ahead = _sees(mask_function, batch, slot[:, :-1], slot[:, 1:]).any()
    starts = ~_sees(mask_function, batch, slot, (slot - 1).clamp(min=0)) & (slot > 0)
    return ahead, starts


def parts_of(mask_function: Callable[..., Any]) -> dict[str, dict[str, Any]] | None:
    """What transformers' own mask functions a pattern is made of, and what each was made with.

    None where one is not transformers' own: what it does to tokens that are not neighbours cannot
    be told.
    """
    if mask_function.__module__ != causal_mask_function.__module__:
        return None
    made_with = inspect.getclosurevars(mask_function).nonlocals
    inner = [*made_with.get("mask_functions", ()), *filter(callable, made_with.values())]
    parts = {mask_function.__qualname__.partition(".")[0]: made_with}
    for found in map(parts_of, inner):
        if found is None:
            return None
        parts |= found
    return parts


@torch.library.custom_op("cab_hf::refuse_where", mutates_args=())
def refuse_where(x: Tensor, refused: Tensor, sentence: str) -> Tensor:
    """A copy of x, for what is to be refused and cannot be looked at: a graph, or without a wait.

    Raises:
        NotImplementedError: saying ``sentence`` where ``refused``, bool []; on a GPU what waits for
            it fails.
    """
    if refused.is_cuda:
        torch._assert_async(~refused, sentence)
    elif bool(refused):
        raise NotImplementedError(sentence)
    return x.clone()


@refuse_where.register_fake
def _(x: Tensor, refused: Tensor, sentence: str) -> Tensor:
    return torch.empty_like(x)


def _pass_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


refuse_where.register_autograd(_pass_gradient)


def mixed_by(model: str) -> str:
    """Return the error for packed documents that a compiled ``model`` cannot keep separate."""
    return (
        f"position_ids pack documents in a compiled {model}, which reads position_ids only in "
        "calls without attention_mask and cache. Leave both out, pass cu_seq_lens_q, or do not "
        "compile."
    )


def _sees(mask_function: Any, batch: int, query: Tensor, key: Tensor) -> Tensor:
    """bool [B, N]: whether each query may see its key, both int [1, N], in the first head."""
    row = torch.arange(batch, device=query.device).unsqueeze(-1)
    return mask_function(row, torch.zeros_like(row), query, key).expand(batch, query.shape[1])
