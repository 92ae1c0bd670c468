"""One forward pass of continuous batching: many sequences in a row, each attended by itself.

transformers packs what is read next of every request: prompts, chunks of longer prompts, and the
last tokens of those that decode. The keys of prompts are gathered from a paged cache and packed
alike; those of requests that decode are read where they lie, in pages.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cab_hf.call.call import Call
from cab_hf.call.forward_pass import is_captured
from cab_hf.call.mask import CabMask
from cab_hf.call.scope import Prompt
from cab_hf.engines import TRITON
from cab_hf.ops import decode
from cab_hf.ops.decode import Choice
from cab_hf.plan import EXACT_BLOCK
from cab_hf.route import attend


class Packed(NamedTuple):
    """What a forward pass reads of all requests.

    Attributes:
        sequences: those that are attended one by one: where their queries and keys are in the
            packed ones, and their text. A prompt and the answer behind it are two.
        steps: of those that decode, where a kernel takes them together: where the query of each is,
            int64 [B], and by their place in the cache the keys that it reads, all of its own.
        read: int64, the places in the cache of what `sequences` attend, one behind the other.
    """

    sequences: list[tuple[slice, slice, CabMask]]
    steps: tuple[Tensor, Choice] | None
    read: Tensor


def attend_batch(call: Call) -> Tensor:
    """[1, T, H, D_v] of a call of continuous batching, of T tokens of all sequences."""
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
    # whatever follows the sequences pads the batch
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
    """What layers with this ``allocator`` read."""
    given, batch = call.packed, call.batch
    read = given["read_index"][allocator.index]
    cu_seq_lens_k = given["cu_seq_lens_k"][allocator.layer_type]
    # in one wait
    borders = torch.stack((given["cu_seq_lens_q"], cu_seq_lens_k)).tolist()
    starts, key_starts = borders
    # an empty read_index: no request has keys in the cache
    together = len(read) > 0 and decode.has_kernels(call.q, call.k)
    # requests have ever new lengths, for each of which SDPA's fastest kernels are prepared
    # anew, which takes up to a second
    work = replace(call.work, query_block=EXACT_BLOCK, key_block=EXACT_BLOCK)
    exact_block = None if TRITON.unavailable(work) else EXACT_BLOCK
    sequences, single, kept, keys = [], [], [], 0
    for at, queries in enumerate(starmap(slice, pairwise(starts))):
        own = slice(*key_starts[at : at + 2])
        count, length = queries.stop - queries.start, own.stop - own.start
        # what pads a batch belongs to no request
        prompt = Prompt(batch.prompts[at]) if at < len(batch.prompts) else None
        answer = prompt is None or length > prompt.end
        if count == 1 and together and answer:
            single.append((queries.start, own.start, length))
        elif count:
            place = 1, count, length, length - count
            text = CabMask(*place, model=batch.model, prompt=prompt, exact_block=exact_block)
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
    """A step of every sequence of a batch, over pages [P, tokens, H_kv, D] of K and V."""
    given, count = call.packed, call.q.shape[2]
    pages = given["k_cache"], given["v_cache"]

    def find() -> tuple[Tensor, Choice]:
        lengths, tokens = given["cu_seq_lens_k"].diff(), pages[0].shape[1]
        table = given["block_table"].long().clamp(min=0)
        slots = table.unsqueeze(-1) * tokens + torch.arange(tokens, device=table.device)
        slots = slots.flatten(1)
        last = slots.gather(1, (lengths - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)
        # padding is written to a slot that is never read, and reads one key of any sequence
        written = torch.where(lengths > 0, last, allocator.write_trash_index)
        counts = lengths.clamp(min=1).to(torch.int32).unsqueeze(1)
        seen = Choice(slots.to(torch.int32).unsqueeze(1), counts, None)
        return written, seen.expanded(count, call.k.shape[1])

    # a graph is captured behind a pass without one, whose tensors it may not read
    written, seen = call.batch.state.once(("pages", allocator, is_captured(call.q)), find)
    for cached, x in zip(pages, (call.k, call.v), strict=True):
        cached.flatten(0, 1).index_copy_(0, written, x[0].transpose(0, 1))
    k, v = (_for_each(x, count) for x in pages)
    q = call.q[0].transpose(0, 1).unsqueeze(2)
    return decode.attend(q, k, v, seen, call.scale, sinks=call.sinks).squeeze(2).unsqueeze(0)


def _steps(single: list[tuple[int, int, int]], read: Tensor, heads: int) -> tuple[Tensor, Choice]:
    """Of (place of the query, first of its keys in ``read``, keys) of each sequence."""
    numbers = torch.tensor(single, device=read.device)
    queries, starts, lengths = numbers.unbind(1)
    longest = max(length for *_, length in single)
    # what is behind the keys of a sequence is not read
    places = starts.unsqueeze(1) + torch.arange(longest, device=read.device)
    slots = read[places.clamp(max=len(read) - 1)].to(torch.int32).unsqueeze(1)
    counts = lengths.to(torch.int32).unsqueeze(1)
    seen = Choice(slots, counts, None)
    return queries, seen.expanded(len(single), heads)


def _for_each(pages: Tensor, count: int) -> Tensor:
    """What pages [P, tokens, H_kv, D] hold, as [count, H_kv, P * tokens, D]; nothing is copied."""
    held = pages.flatten(0, 1).transpose(0, 1)
    return held.unsqueeze(0).expand(count, -1, -1, -1)
