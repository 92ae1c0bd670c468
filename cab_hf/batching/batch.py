"""One forward pass of continuous batching: many sequences in a row, each attended by itself.

transformers packs what is read next of every request: prompts, chunks of longer prompts, and the
last tokens of those that decode. The keys of prompts are gathered from a paged cache and packed
alike; those of requests that decode are read where they lie, in pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cab_hf.call.forward_pass import ForwardState, is_captured
from cab_hf.call.mask import CabMask
from cab_hf.call.placeholder import NotATensor
from cab_hf.call.prompt import Prompt
from cab_hf.config import CabConfig
from cab_hf.engines import TRITON, Workload
from cab_hf.ops import decode
from cab_hf.ops.decode import Choice
from cab_hf.plan import EXACT_BLOCK
from cab_hf.route import route

# the keyword by which attention functions receive a batch
KEYWORDS = (
    *("batch", "cache", "block_table", "read_index", "write_index"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("logits_indices", "logits_processor_args"),
)


class Sequence(NamedTuple):
    """What a forward pass reads of one request.

    Attributes:
        queries, keys: their places in the packed ones.
        text: the queries are the last of its keys.
    """

    queries: slice
    keys: slice
    text: CabMask


class Steps(NamedTuple):
    """The requests of a batch that decode.

    Attributes:
        queries: int64 [B], the place of each query.
        seen: the keys that each of them reads, by their place in the cache: all of its own.
    """

    queries: Tensor
    seen: Choice


class Packed(NamedTuple):
    """What a forward pass reads of all requests.

    Attributes:
        sequences: those that are attended one by one; a prompt and the answer behind it are two.
        steps: those that decode, where a kernel takes them together.
        read: int64, the places in the cache of what `sequences` attend, one behind the other.
    """

    sequences: list[Sequence]
    steps: Steps | None
    read: Tensor


@dataclass(eq=False)
class Batch(NotATensor):
    """The mask of all layers in a forward pass of continuous batching.

    Attributes:
        model: its name, for error messages.
        tokens: of all sequences, and what pads them.
        prompts: tokens of the prompt of each request, in the order of the batch.
        state: what the layers share.
    """

    model: str
    tokens: int
    prompts: tuple[int, ...] = ()
    state: ForwardState = field(default_factory=ForwardState)
    _packed: dict[Any, Packed] = field(default_factory=dict)
    _paged: dict[Any, tuple[Tensor, Choice]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """That of a mask of all tokens, which models read where they have no cache."""
        return 1, self.tokens

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        config: CabConfig,
        scale: float,
        sparse: bool,
        given: dict[str, Any],
    ) -> Tensor:
        """[1, T, H, D_v] of q [1, H, T, D] and the k and v [1, H_kv, T, D] of the same tokens.

        Args:
            given: the `KEYWORDS`.
        """
        cache, layer = given["cache"], module.layer_idx
        allocator, new = cache.layer_to_allocator[layer], {"key_states": key, "value_states": value}
        if given.get("block_table") is not None:
            cache.update(**new, layer_idx=layer, kwargs=given)
            return self._attend_pages(query, (key, value), scale, allocator, given)
        packed = self._pack(query, key, allocator, given)
        read = list(given["read_index"])
        read[allocator.index] = packed.read
        keys, values = cache.update(**new, layer_idx=layer, kwargs={**given, "read_index": read})
        # whatever follows the sequences pads the batch
        out = query.new_zeros(1, query.shape[2], query.shape[1], values.shape[3])
        for one in packed.sequences:
            q, k, v = query[:, :, one.queries], keys[:, :, one.keys], values[:, :, one.keys]
            work = Workload.of(q, k, v, (config.query_block, config.key_block))
            way = route(one.text, config, work, sparse=sparse, layer=module)
            out[:, one.queries] = way.attend(q, k, v, scale).transpose(1, 2)
        if packed.steps is not None:
            queries, seen = packed.steps
            pages = allocator.get_cache_for_block_table(layer)
            q = query[0, :, queries].transpose(0, 1).unsqueeze(2)
            k, v = (_for_each(x, len(queries)) for x in pages)
            out[0, queries] = decode.attend(q, k, v, seen, scale).squeeze(2)
        return out

    def _pack(self, query: Tensor, key: Tensor, allocator: Any, given: dict[str, Any]) -> Packed:
        """What layers with this ``allocator`` read; found once a pass."""
        if allocator not in self._packed:
            read = given["read_index"][allocator.index]
            cu_seq_lens_k = given["cu_seq_lens_k"][allocator.layer_type]
            # in one wait
            borders = torch.stack((given["cu_seq_lens_q"], cu_seq_lens_k)).tolist()
            starts, key_starts = borders
            # an empty read_index: no request has keys in the cache
            together = len(read) > 0 and decode.has_kernels(query, key)
            # requests have ever new lengths, for each of which SDPA's fastest kernels are prepared
            # anew, which takes up to a second
            work = Workload.of(query, key, key, (EXACT_BLOCK, EXACT_BLOCK))
            exact_block = None if TRITON.unavailable(work) else EXACT_BLOCK
            sequences, single, kept, keys = [], [], [], 0
            for at, queries in enumerate(starmap(slice, pairwise(starts))):
                own = slice(*key_starts[at : at + 2])
                count, length = queries.stop - queries.start, own.stop - own.start
                # what pads a batch belongs to no request
                prompt = Prompt(self.prompts[at]) if at < len(self.prompts) else None
                answer = prompt is None or length > prompt.end
                if count == 1 and together and answer:
                    single.append((queries.start, own.start, length))
                elif count:
                    place = 1, count, length, length - count
                    text = CabMask(*place, model=self.model, prompt=prompt, exact_block=exact_block)
                    for part, piece in text.pieces(steps=False):
                        mine = slice(queries.start + part.start, queries.start + part.stop)
                        sequences.append(Sequence(mine, slice(keys, keys + length), piece))
                    kept.append(read[own])
                    keys += length
            steps = None
            if single:
                steps = _steps(single, read, key.shape[1])
                read = torch.cat(kept) if kept else read[:0]
            self._packed[allocator] = Packed(sequences, steps, read)
        return self._packed[allocator]

    def _attend_pages(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        scale: float,
        allocator: Any,
        given: dict[str, Any],
    ) -> Tensor:
        """A step of every sequence of a batch, over pages [P, tokens, H_kv, D] of K and V."""
        pages = given["k_cache"], given["v_cache"]
        tokens, count = pages[0].shape[1], query.shape[2]
        heads = new[0].shape[1]
        # a graph is captured behind a pass without one, whose tensors it may not read
        known = allocator, is_captured(query)
        if known not in self._paged:
            lengths = given["cu_seq_lens_k"].diff()
            table = given["block_table"].long().clamp(min=0)
            slots = table.unsqueeze(-1) * tokens + torch.arange(tokens, device=table.device)
            slots = slots.flatten(1)
            last = slots.gather(1, (lengths - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)
            # padding is written to a slot that is never read, and reads one key of any sequence
            written = torch.where(lengths > 0, last, allocator.write_trash_index)
            counts = lengths.clamp(min=1).to(torch.int32).unsqueeze(1)
            seen = Choice(slots.to(torch.int32).unsqueeze(1), counts, None).expanded(count, heads)
            self._paged[known] = written, seen
        written, seen = self._paged[known]
        for held, x in zip(pages, new, strict=True):
            held.flatten(0, 1).index_copy_(0, written, x[0].transpose(0, 1))
        k, v = (_for_each(x, count) for x in pages)
        q = query[0].transpose(0, 1).unsqueeze(2)
        return decode.attend(q, k, v, seen, scale).squeeze(2).unsqueeze(0)


def _steps(single: list[tuple[int, int, int]], read: Tensor, heads: int) -> Steps:
    """Of (place of the query, first of its keys in ``read``, keys) of each sequence."""
    numbers = torch.tensor(single, device=read.device)
    queries, starts, lengths = numbers.unbind(1)
    longest = max(length for *_, length in single)
    # what is behind the keys of a sequence is not read
    places = starts.unsqueeze(1) + torch.arange(longest, device=read.device)
    slots = read[places.clamp(max=len(read) - 1)].to(torch.int32).unsqueeze(1)
    counts = lengths.to(torch.int32).unsqueeze(1)
    seen = Choice(slots, counts, None)
    return Steps(queries, seen.expanded(len(single), heads))


def _for_each(pages: Tensor, count: int) -> Tensor:
    """What pages [P, tokens, H_kv, D] hold, as [count, H_kv, P * tokens, D]; nothing is copied."""
    held = pages.flatten(0, 1).transpose(0, 1)
    return held.unsqueeze(0).expand(count, -1, -1, -1)
