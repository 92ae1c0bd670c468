"""Attention in continuous batching: one forward pass over a packed row of many sequences.

transformers packs the next tokens of every request into one row: prompts, chunks of longer prompts,
and the last token of each decoding request. Each sequence attends only to its own keys. For
prompts, the paged cache gathers the keys into one packed tensor. Decode steps read their keys from
the pages.
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
from cab_hf.call.validate import LayerArguments, validate_arguments
from cab_hf.config import CabConfig, blocks_of
from cab_hf.dispatch import dispatch
from cab_hf.engines import TRITON
from cab_hf.hf.model_config import cab_config_in_use, cab_config_of
from cab_hf.ops import Workload, decode
from cab_hf.ops.decode import Choice
from cab_hf.plan import DENSE_BLOCK_SIZE


class DecodeSteps(NamedTuple):
    """The decode steps of a forward pass, which one kernel computes together.

    Attributes:
        queries: int64 [B], index of each query in the packed row.
        visible: cache slots of all keys of each request.
    """

    queries: Tensor
    visible: Choice


class PackedSequence(NamedTuple):
    """A part of a request whose attention is computed by one `Call`.

    A prompt and the answer in the same forward pass are two such sequences.

    Attributes:
        queries: slice of the packed row that contains the queries of the sequence.
        keys: slice of the gathered keys that contains the keys of the request.
        mask: visible keys of the queries.
    """

    queries: slice
    keys: slice
    mask: MaskInfo


class Packed(NamedTuple):
    """The queries and keys of all requests in a forward pass.

    Attributes:
        sequences: prompts, and answers that follow a prompt in the same forward pass.
        steps: decode steps; None if there are no decode steps.
        read: int64 [N], cache slots of the keys of ``sequences``, concatenated.
    """

    sequences: list[PackedSequence]
    steps: DecodeSteps | None
    read: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchRow:
    """The packed row of all sequences, in one layer.

    Attributes:
        q: [1, H, T, D] after RoPE.
        k: [1, H_kv, T, D], keys of the tokens of the row.
        v: [1, H_kv, T, D_v], values of the tokens of the row.
        scale: factor of the logits.
        layer: attention module.
        config: settings of the layer.
        sparse: True if sparse attention is requested.
        work: workload that an engine must support.
        sinks: [H], one additional logit per head in the softmax; None without sinks.
        softcap: cap c of the logits, ``c * tanh(logits / c)``; None without a cap.
        batch: the mask of the forward pass.
        paging: the arguments `placeholder.KEYWORDS` of transformers, by name.
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
        arguments: LayerArguments,
        batch: PagedBatch,
        *,
        sparse: bool,
        paging: dict[str, Any],
    ) -> BatchRow:
        """Build a row from the arguments of an attention function.

        Args:
            arguments: arguments of the attention function, without those in ``paging``.
            batch: the mask of the forward pass.
            sparse: True if sparse attention is requested.
            paging: the arguments `placeholder.KEYWORDS`, by name.

        Raises:
            ValueError, NotImplementedError: as in `Call.create`.
        """
        validate_arguments(arguments, mask=None)
        module = arguments.module
        q, k, v = one_dtype(module, arguments.query, arguments.key, arguments.value)
        config = batch.state.parsed(module.config, cab_config_in_use if sparse else cab_config_of)
        has_sinks, has_softcap = arguments.s_aux is not None, arguments.softcap is not None
        return cls(
            q=q,
            k=k,
            v=v,
            scale=q.shape[-1] ** -0.5 if arguments.scaling is None else arguments.scaling,
            layer=module,
            config=config,
            sparse=sparse,
            work=Workload.of(q, k, v, blocks_of(config), sinks=has_sinks, softcap=has_softcap),
            sinks=arguments.s_aux,
            softcap=arguments.softcap,
            batch=batch,
            paging=paging,
        )

    def call(self, queries: slice, k: Tensor, v: Tensor, mask: MaskInfo) -> Call:
        """Return the `Call` that computes attention of one sequence of the row.

        Args:
            queries: slice of the row that contains the queries of the sequence.
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
    """Return an attention function that also computes the packed rows of continuous batching.

    Args:
        attention: attention function that computes all other calls.
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
        # since transformers 5.24 layers receive no mask in continuous batching, but this keyword
        batch = kwargs.get("batch") if attention_mask is None else attention_mask
        if not isinstance(batch, PagedBatch):
            return attention(
                module,
                query,
                key,
                value,
                attention_mask=attention_mask,
                dropout=dropout,
                scaling=scaling,
                **kwargs,
            )
        kwargs.pop("batch", None)
        paging = {name: kwargs.pop(name, None) for name in KEYWORDS}
        arguments = LayerArguments.of(
            module, query, key, value, dropout=dropout, scaling=scaling, **kwargs
        )
        row = BatchRow.create(arguments, batch, sparse=sparse, paging=paging)
        return attend_batch(row).contiguous(), None

    return attend


def attend_batch(row: BatchRow) -> Tensor:
    """Return the attention output [1, T, H, D_v] of a packed row of T tokens."""
    layer_idx, paging = row.layer.layer_idx, row.paging
    cache, new_states = paging["cache"], {"key_states": row.k, "value_states": row.v}
    allocator = cache.layer_to_allocator[layer_idx]
    if paging.get("block_table") is not None:
        cache.update(**new_states, layer_idx=layer_idx, kwargs=paging)
        return _attend_pages(row, allocator)
    packed = row.batch.state.cached(("packed", allocator), lambda: _pack(row, allocator))
    read_index = list(paging["read_index"])
    read_index[allocator.index] = packed.read
    keys, values = cache.update(
        **new_states, layer_idx=layer_idx, kwargs={**paging, "read_index": read_index}
    )
    # zeros, because padding tokens of the batch belong to no sequence and have zero output
    out = row.q.new_zeros(1, row.q.shape[2], row.q.shape[1], values.shape[3])
    for sequence in packed.sequences:
        k, v = keys[:, :, sequence.keys], values[:, :, sequence.keys]
        call = row.call(sequence.queries, k=k, v=v, mask=sequence.mask)
        out[:, sequence.queries] = dispatch(call).transpose(1, 2)
    if packed.steps is not None:
        queries = packed.steps.queries
        pages = allocator.get_cache_for_block_table(layer_idx)
        q = row.q[0, :, queries].transpose(0, 1).unsqueeze(2)
        k, v = (_expand_pages(x, len(queries)) for x in pages)
        step_out = decode.attend(
            q, k, v, choice=packed.steps.visible, scale=row.scale, sinks=row.sinks
        )
        out[0, queries] = step_out.squeeze(2)
    return out


def _pack(row: BatchRow, allocator: Any) -> Packed:
    """Return the queries and keys of all requests, for the layers that use ``allocator``.

    Args:
        row: packed row of the first of these layers.
        allocator: cache allocator of transformers.
    """
    paging, prompt_lengths = row.paging, row.batch.prompts
    read_index = paging["read_index"][allocator.index]
    cu_seq_lens_k = paging["cu_seq_lens_k"][allocator.layer_type]
    # one transfer for both tensors, so that the host waits for the device once
    query_ends, key_ends = torch.stack((paging["cu_seq_lens_q"], cu_seq_lens_k)).tolist()
    # read_index is empty if no request has keys in the cache
    has_kernels = len(read_index) > 0 and decode.has_kernels(row.q, row.k)
    details = MaskDetails(model=row.batch.model, dense_block_size=_dense_block_size(row.work))
    sequences, decoding, gathered_slots, num_gathered = [], [], [], 0
    for request, queries in enumerate(starmap(slice, pairwise(query_ends))):
        keys = slice(key_ends[request], key_ends[request + 1])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        # padding of a batch belongs to no request
        has_prompt = request < len(prompt_lengths)
        prompt = Prompt(prompt_lengths[request]) if has_prompt else None
        is_answer = prompt is None or num_keys > prompt.end
        if num_queries == 1 and has_kernels and is_answer:
            decoding.append((queries.start, keys.start, num_keys))
        elif num_queries:
            mask = MaskInfo(
                batch=1,
                q_length=num_queries,
                kv_length=num_keys,
                q_offset=num_keys - num_queries,
                prompt=prompt,
                details=details,
            )
            own_keys = slice(num_gathered, num_gathered + num_keys)
            for piece, piece_mask in mask.split_at_prompt_end(steps=False):
                first, last, _ = piece.indices(num_queries)
                piece_queries = slice(queries.start + first, queries.start + last)
                sequences.append(PackedSequence(piece_queries, own_keys, piece_mask))
            gathered_slots.append(read_index[keys])
            num_gathered += num_keys
    if not decoding:
        return Packed(sequences, None, read_index)
    read = torch.cat(gathered_slots) if gathered_slots else read_index[:0]
    return Packed(sequences, _decode_steps(decoding, read_index, row.k.shape[1]), read)


def _dense_block_size(work: Workload) -> int | None:
    """Return the block size of exact attention by the Triton engine; None if it cannot run.

    The Triton engine is preferred to SDPA, because requests have many different lengths. The
    fastest kernels of SDPA need up to a second of preparation for each new length.
    """
    work = replace(work, query_block=DENSE_BLOCK_SIZE, key_block=DENSE_BLOCK_SIZE)
    return None if TRITON.unavailable(work) else DENSE_BLOCK_SIZE


def _attend_pages(row: BatchRow, allocator: Any) -> Tensor:
    """Return the output [1, T, H, D_v] of a batch in which every request has one decode step.

    Args:
        row: packed row; its block table lists pages [P, tokens, H_kv, D] of K and V.
        allocator: cache allocator of transformers.
    """
    paging, num_requests = row.paging, row.q.shape[2]
    pages = paging["k_cache"], paging["v_cache"]

    def find_slots() -> tuple[Tensor, Choice]:
        """Return the cache slot of each new token, and the cache slots of all visible keys."""
        lengths, page_size = paging["cu_seq_lens_k"].diff(), pages[0].shape[1]
        table = paging["block_table"].long().clamp(min=0)
        slots = table.unsqueeze(-1) * page_size + torch.arange(page_size, device=table.device)
        slots = slots.flatten(1)
        last = slots.gather(1, (lengths - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)
        # K and V of padding go to a slot that is never read; a padding query reads one valid key
        written = torch.where(lengths > 0, last, allocator.write_trash_index)
        counts = lengths.clamp(min=1).to(torch.int32).unsqueeze(1)
        visible = Choice(slots.to(torch.int32).unsqueeze(1), counts, None)
        return written, visible.expanded(num_requests, row.k.shape[1])

    # a captured CUDA graph must not read tensors that an earlier, uncaptured forward pass cached
    key = "pages", allocator, is_captured(row.q)
    written, visible = row.batch.state.cached(key, find_slots)
    for cached, x in zip(pages, (row.k, row.v), strict=True):
        cached.flatten(0, 1).index_copy_(0, written, x[0].transpose(0, 1))
    k, v = (_expand_pages(x, num_requests) for x in pages)
    q = row.q[0].transpose(0, 1).unsqueeze(2)
    out = decode.attend(q, k, v, choice=visible, scale=row.scale, sinks=row.sinks)
    return out.squeeze(2).unsqueeze(0)


def _decode_steps(
    decoding: list[tuple[int, int, int]], read_index: Tensor, kv_heads: int
) -> DecodeSteps:
    """Return the decode steps of a forward pass.

    Args:
        decoding: for each request, the index of the query in the packed row, the index of the first
            key in ``read_index``, and the number of keys.
        read_index: int64 [N], cache slots of the keys of all requests.
        kv_heads: number of KV heads.
    """
    queries, starts, lengths = torch.tensor(decoding, device=read_index.device).unbind(1)
    longest = max(num_keys for *_, num_keys in decoding)
    # clamped indices are harmless: kernels do not read the slots after the keys of a request
    index = starts.unsqueeze(1) + torch.arange(longest, device=read_index.device)
    slots = read_index[index.clamp(max=len(read_index) - 1)].to(torch.int32).unsqueeze(1)
    counts = lengths.to(torch.int32).unsqueeze(1)
    choice = Choice(slots, counts, None)
    return DecodeSteps(queries, choice.expanded(len(decoding), kv_heads))


def _expand_pages(pages: Tensor, num_requests: int) -> Tensor:
    """Return pages [P, tokens, H_kv, D] as a view [num_requests, H_kv, P * tokens, D]."""
    tokens = pages.flatten(0, 1).transpose(0, 1)
    return tokens.unsqueeze(0).expand(num_requests, -1, -1, -1)
