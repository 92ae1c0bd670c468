"""Attention of one forward pass of continuous batching: a packed row of many sequences.

transformers packs the next tokens of every request into one row: prompts, chunks of longer prompts,
and the last token of each decoding request. Each sequence attends only to its own keys. Keys of
prompts are gathered from the paged cache and packed. Keys of decoding requests are read in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cab_hf.call.call import Call, one_dtype
from cab_hf.call.forward_state import is_captured
from cab_hf.call.mask import MaskDetails, MaskInfo
from cab_hf.call.placeholder import KEYWORDS, PagedBatch
from cab_hf.call.scope import Prompt
from cab_hf.call.validate import validate_arguments
from cab_hf.config import CabConfig, blocks_of
from cab_hf.dispatch import dispatch
from cab_hf.engines import TRITON
from cab_hf.hf.model_config import cab_config_in_use, cab_config_of
from cab_hf.ops import Workload, decode
from cab_hf.ops.decode import Choice
from cab_hf.plan import DENSE_BLOCK_SIZE


class Packed(NamedTuple):
    """The queries and keys of all requests in a forward pass.

    Attributes:
        sequences: (slice of packed queries, slice of packed keys, mask) per sequence that is
            attended separately. A prompt and the answer after the prompt are two sequences.
        steps: decode steps that one kernel computes together; None if there are none. The first
            element is the place of each query in the row, int64 [B]. The second one lists the
            cache slots of all keys of each request.
        read: cache slots of the keys of `sequences`, concatenated, int64 [N].
    """

    sequences: list[tuple[slice, slice, MaskInfo]]
    steps: tuple[Tensor, Choice] | None
    read: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """The packed row of all sequences, in one layer.

    Attributes:
        q: [1, H, T, D] after RoPE.
        k: [1, H_kv, T, D], keys of the tokens of the row.
        v: [1, H_kv, T, D_v], values of the tokens of the row.
        scale, layer, config, sparse, work, sinks, softcap: see `Call`.
        batch: the mask of the forward pass.
        paging: the arguments `KEYWORDS` of transformers.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    layer: nn.Module
    config: CabConfig
    sparse: bool
    work: Workload
    sinks: Tensor | None
    softcap: float | None
    batch: PagedBatch
    paging: dict[str, Any]

    @classmethod
    def create(
        cls,
        *,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: PagedBatch,
        sparse: bool,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        position_ids: Tensor | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> Row:
        """Build a row from transformers' arguments; raises the errors of `Call.create`."""
        paging = {name: kwargs.pop(name, None) for name in KEYWORDS}
        validate_arguments(
            module,
            query,
            key,
            value,
            mask=None,
            dropout=dropout,
            sliding_window=sliding_window,
            position_ids=position_ids,
            s_aux=s_aux,
            kwargs=kwargs,
        )
        q, k, v = one_dtype(module, query, key, value)
        config = batch.state.parsed(module.config, cab_config_in_use if sparse else cab_config_of)
        features = {"sinks": s_aux is not None, "softcap": softcap is not None}
        return cls(
            q=q,
            k=k,
            v=v,
            scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
            layer=module,
            config=config,
            sparse=sparse,
            work=Workload.of(q, k, v, blocks_of(config), **features),
            sinks=s_aux,
            softcap=softcap,
            batch=batch,
            paging=paging,
        )

    def call(self, queries: slice, k: Tensor, v: Tensor, mask: MaskInfo) -> Call:
        """Return the call of one sequence.

        Args:
            queries: tokens of the sequence in the row.
            k: [1, H_kv, N_k, D], all keys of the sequence.
            v: [1, H_kv, N_k, D_v], all values of the sequence.
            mask: visible keys of the sequence.
        """
        return Call(
            q=self.q[:, :, queries],
            k=k,
            v=v,
            scale=self.scale,
            layer=self.layer,
            config=self.config,
            sparse=self.sparse,
            work=self.work,
            mask=mask,
            sinks=self.sinks,
            softcap=self.softcap,
        )


def accepting_batches(attention: Callable[..., Any], *, sparse: bool) -> Callable[..., Any]:
    """Return ``attention`` with support for the packed rows of continuous batching.

    Args:
        attention: an attention function of transformers, which computes all other calls.
        sparse: True if sparse attention is requested.
    """

    @functools.wraps(attention)
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        # since transformers 5.24 layers receive no mask in continuous batching
        batch = kwargs.get("batch") if attention_mask is None else attention_mask
        if not isinstance(batch, PagedBatch):
            return attention(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                **kwargs,
            )
        kwargs.pop("batch", None)
        row = Row.create(
            module=module,
            query=query,
            key=key,
            value=value,
            batch=batch,
            sparse=sparse,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return attend_batch(row).contiguous(), None

    return attend


def attend_batch(row: Row) -> Tensor:
    """Return the attention of a packed row of T tokens of all sequences, [1, T, H, D_v]."""
    layer, paging = row.layer.layer_idx, row.paging
    cache, new = paging["cache"], {"key_states": row.k, "value_states": row.v}
    allocator = cache.layer_to_allocator[layer]
    if paging.get("block_table") is not None:
        cache.update(**new, layer_idx=layer, kwargs=paging)
        return _attend_pages(row, allocator)
    packed = row.batch.state.cached(("packed", allocator), lambda: _pack(row, allocator))
    read = list(paging["read_index"])
    read[allocator.index] = packed.read
    keys, values = cache.update(**new, layer_idx=layer, kwargs={**paging, "read_index": read})
    # tokens after the sequences are padding of the batch
    out = row.q.new_zeros(1, row.q.shape[2], row.q.shape[1], values.shape[3])
    for queries, own, mask in packed.sequences:
        call = row.call(queries, k=keys[:, :, own], v=values[:, :, own], mask=mask)
        out[:, queries] = dispatch(call).transpose(1, 2)
    if packed.steps is not None:
        queries, visible = packed.steps
        pages = allocator.get_cache_for_block_table(layer)
        q = row.q[0, :, queries].transpose(0, 1).unsqueeze(2)
        k, v = (_for_each(x, len(queries)) for x in pages)
        steps = decode.attend(q, k, v, visible, row.scale, sinks=row.sinks)
        out[0, queries] = steps.squeeze(2)
    return out


def _pack(row: Row, allocator: Any) -> Packed:
    """Return the `Packed` batch of the layers that use this ``allocator``."""
    paging, batch = row.paging, row.batch
    read = paging["read_index"][allocator.index]
    cu_seq_lens_k = paging["cu_seq_lens_k"][allocator.layer_type]
    # one transfer for both, so that the host waits for the device once
    starts, key_starts = torch.stack((paging["cu_seq_lens_q"], cu_seq_lens_k)).tolist()
    # read_index is empty if no request has keys in the cache
    has_kernels = len(read) > 0 and decode.has_kernels(row.q, row.k)
    # requests have many different lengths, and SDPA's fastest kernels need up to a second of
    # preparation for each new length
    work = replace(row.work, query_block=DENSE_BLOCK_SIZE, key_block=DENSE_BLOCK_SIZE)
    dense_block_size = None if TRITON.unavailable(work) else DENSE_BLOCK_SIZE
    details = MaskDetails(model=batch.model, dense_block_size=dense_block_size)
    sequences, single, gathered_pages, keys = [], [], [], 0
    for at, queries in enumerate(starmap(slice, pairwise(starts))):
        own_slots = slice(*key_starts[at : at + 2])
        count, length = queries.stop - queries.start, own_slots.stop - own_slots.start
        # padding of a batch belongs to no request
        prompt = Prompt(batch.prompts[at]) if at < len(batch.prompts) else None
        is_answer = prompt is None or length > prompt.end
        if count == 1 and has_kernels and is_answer:
            single.append((queries.start, own_slots.start, length))
        elif count:
            mask = MaskInfo(
                batch=1,
                q_length=count,
                kv_length=length,
                q_offset=length - count,
                prompt=prompt,
                details=details,
            )
            for part, piece in mask.split_at_prompt_end(steps=False):
                first, last, _ = part.indices(count)
                part_queries = slice(queries.start + first, queries.start + last)
                sequences.append((part_queries, slice(keys, keys + length), piece))
            gathered_pages.append(read[own_slots])
            keys += length
    steps = None
    if single:
        steps = _steps(single, read, row.k.shape[1])
        read = torch.cat(gathered_pages) if gathered_pages else read[:0]
    return Packed(sequences, steps, read)


def _attend_pages(row: Row, allocator: Any) -> Tensor:
    """Return a decode step of every sequence, over pages [P, tokens, H_kv, D] of K and V."""
    paging, count = row.paging, row.q.shape[2]
    pages = paging["k_cache"], paging["v_cache"]

    def find() -> tuple[Tensor, Choice]:
        lengths, tokens = paging["cu_seq_lens_k"].diff(), pages[0].shape[1]
        table = paging["block_table"].long().clamp(min=0)
        slots = table.unsqueeze(-1) * tokens + torch.arange(tokens, device=table.device)
        slots = slots.flatten(1)
        last = slots.gather(1, (lengths - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)
        # K and V of padding go to a slot that is never read; a padding query reads one valid key
        written = torch.where(lengths > 0, last, allocator.write_trash_index)
        counts = lengths.clamp(min=1).to(torch.int32).unsqueeze(1)
        visible = Choice(slots.to(torch.int32).unsqueeze(1), counts, None)
        return written, visible.expanded(count, row.k.shape[1])

    # a graph is captured after a pass without a graph, and must not read the tensors of that pass
    written, visible = row.batch.state.cached(("pages", allocator, is_captured(row.q)), find)
    for cached, x in zip(pages, (row.k, row.v), strict=True):
        cached.flatten(0, 1).index_copy_(0, written, x[0].transpose(0, 1))
    k, v = (_for_each(x, count) for x in pages)
    q = row.q[0].transpose(0, 1).unsqueeze(2)
    out = decode.attend(q, k, v, visible, row.scale, sinks=row.sinks)
    return out.squeeze(2).unsqueeze(0)


def _steps(single: list[tuple[int, int, int]], read: Tensor, heads: int) -> tuple[Tensor, Choice]:
    """Return the `Packed.steps` of sequences that decode.

    Args:
        single: (place of the query, place of the first key in ``read``, number of keys) of each.
        read: cache slots of the keys of all requests, int64 [N].
        heads: number of KV heads.
    """
    numbers = torch.tensor(single, device=read.device)
    queries, starts, lengths = numbers.unbind(1)
    longest = max(length for *_, length in single)
    # slots after the keys of a sequence are not read
    places = starts.unsqueeze(1) + torch.arange(longest, device=read.device)
    slots = read[places.clamp(max=len(read) - 1)].to(torch.int32).unsqueeze(1)
    counts = lengths.to(torch.int32).unsqueeze(1)
    choice = Choice(slots, counts, None)
    return queries, choice.expanded(len(single), heads)


def _for_each(pages: Tensor, count: int) -> Tensor:
    """Return pages [P, tokens, H_kv, D] as a view [count, H_kv, P * tokens, D]."""
    pages_as_tokens = pages.flatten(0, 1).transpose(0, 1)
    return pages_as_tokens.unsqueeze(0).expand(count, -1, -1, -1)
