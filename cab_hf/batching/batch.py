"""Attention of one forward pass of continuous batching: a packed row of many sequences.

transformers packs the next tokens of every request into one row: prompts, chunks of longer prompts,
and the last token of each decoding request. Each sequence attends only to its own keys. Keys of
prompts are gathered from the paged cache and packed. Keys of decoding requests are read in place.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cab_hf.call.call import Call
from cab_hf.call.forward_pass import is_captured
from cab_hf.call.mask import MaskInfo
from cab_hf.call.scope import Prompt
from cab_hf.engines import TRITON
from cab_hf.ops import decode
from cab_hf.ops.decode import Choice
from cab_hf.plan import DENSE_BLOCK_SIZE
from cab_hf.route import attend


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


def attend_batch(call: Call) -> Tensor:
    """Return the attention of a packed row of T tokens of all sequences, [1, T, H, D_v]."""
    q, given, layer = call.q, call.packed, call.layer.layer_idx
    cache, new = given["cache"], {"key_states": call.k, "value_states": call.v}
    allocator = cache.layer_to_allocator[layer]
    if given.get("block_table") is not None:
        cache.update(**new, layer_idx=layer, kwargs=given)
        return _attend_pages(call, allocator)
    packed = call.batch.state.once(("packed", allocator), lambda: _pack(call, allocator))
    read = list(given["read_index"])
    read[allocator.index] = packed.read
    keys, values = cache.update(**new, layer_idx=layer, kwargs={**given, "read_index": read})
    # tokens after the sequences are padding of the batch
    out = q.new_zeros(1, q.shape[2], q.shape[1], values.shape[3])
    for queries, own, text in packed.sequences:
        k, v = keys[:, :, own], values[:, :, own]
        part = replace(call, q=q[:, :, queries], k=k, v=v, text=text, batch=None)
        out[:, queries] = attend(part).transpose(1, 2)
    if packed.steps is not None:
        queries, seen = packed.steps
        pages = allocator.get_cache_for_block_table(layer)
        q = q[0, :, queries].transpose(0, 1).unsqueeze(2)
        k, v = (_for_each(x, len(queries)) for x in pages)
        out[0, queries] = decode.attend(q, k, v, seen, call.scale, sinks=call.sinks).squeeze(2)
    return out


def _pack(call: Call, allocator: Any) -> Packed:
    """Return the `Packed` batch of the layers that use this ``allocator``."""
    given, batch = call.packed, call.batch
    read = given["read_index"][allocator.index]
    cu_seq_lens_k = given["cu_seq_lens_k"][allocator.layer_type]
    # one transfer for both, so that the host waits for the device once
    borders = torch.stack((given["cu_seq_lens_q"], cu_seq_lens_k)).tolist()
    starts, key_starts = borders
    # read_index is empty if no request has keys in the cache
    together = len(read) > 0 and decode.has_kernels(call.q, call.k)
    # requests have many different lengths, and SDPA's fastest kernels need up to a second of
    # preparation for each new length
    work = replace(call.work, query_block=DENSE_BLOCK_SIZE, key_block=DENSE_BLOCK_SIZE)
    dense_block_size = None if TRITON.unavailable(work) else DENSE_BLOCK_SIZE
    sequences, single, kept, keys = [], [], [], 0
    for at, queries in enumerate(starmap(slice, pairwise(starts))):
        own = slice(*key_starts[at : at + 2])
        count, length = queries.stop - queries.start, own.stop - own.start
        # padding of a batch belongs to no request
        prompt = Prompt(batch.prompts[at]) if at < len(batch.prompts) else None
        answer = prompt is None or length > prompt.end
        if count == 1 and together and answer:
            single.append((queries.start, own.start, length))
        elif count:
            place = 1, count, length, length - count
            text = MaskInfo(
                *place, model=batch.model, prompt=prompt, dense_block_size=dense_block_size
            )
            for part, piece in text.pieces(steps=False):
                mine = slice(queries.start + part.start, queries.start + part.stop)
                sequences.append((mine, slice(keys, keys + length), piece))
            kept.append(read[own])
            keys += length
    steps = None
    if single:
        steps = _steps(single, read, call.k.shape[1])
        read = torch.cat(kept) if kept else read[:0]
    return Packed(sequences, steps, read)


def _attend_pages(call: Call, allocator: Any) -> Tensor:
    """Return a decode step of every sequence, over pages [P, tokens, H_kv, D] of K and V."""
    given, count = call.packed, call.q.shape[2]
    pages = given["k_cache"], given["v_cache"]

    def find() -> tuple[Tensor, Choice]:
        lengths, tokens = given["cu_seq_lens_k"].diff(), pages[0].shape[1]
        table = given["block_table"].long().clamp(min=0)
        slots = table.unsqueeze(-1) * tokens + torch.arange(tokens, device=table.device)
        slots = slots.flatten(1)
        last = slots.gather(1, (lengths - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)
        # K and V of padding go to a slot that is never read; a padding query reads one valid key
        written = torch.where(lengths > 0, last, allocator.write_trash_index)
        counts = lengths.clamp(min=1).to(torch.int32).unsqueeze(1)
        seen = Choice(slots.to(torch.int32).unsqueeze(1), counts, None)
        return written, seen.expanded(count, call.k.shape[1])

    # a graph is captured after a pass without a graph, and must not read the tensors of that pass
    written, seen = call.batch.state.once(("pages", allocator, is_captured(call.q)), find)
    for cached, x in zip(pages, (call.k, call.v), strict=True):
        cached.flatten(0, 1).index_copy_(0, written, x[0].transpose(0, 1))
    k, v = (_for_each(x, count) for x in pages)
    q = call.q[0].transpose(0, 1).unsqueeze(2)
    return decode.attend(q, k, v, seen, call.scale, sinks=call.sinks).squeeze(2).unsqueeze(0)


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
    seen = Choice(slots, counts, None)
    return queries, seen.expanded(len(single), heads)


def _for_each(pages: Tensor, count: int) -> Tensor:
    """Return pages [P, tokens, H_kv, D] as a view [count, H_kv, P * tokens, D]."""
    held = pages.flatten(0, 1).transpose(0, 1)
    return held.unsqueeze(0).expand(count, -1, -1, -1)
