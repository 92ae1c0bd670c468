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

from cab_hf.call.call import Call, cast_to_one_dtype
from cab_hf.call.forward_state import is_captured_in_cuda_graph
from cab_hf.call.mask import MaskDetails, MaskInfo
from cab_hf.call.placeholder import PAGING_KEYWORDS, PagedBatch
from cab_hf.call.scope import Prompt
from cab_hf.call.validate import LayerArguments, validate_arguments
from cab_hf.config import CabConfig, block_sizes
from cab_hf.dispatch import dispatch
from cab_hf.engines import TRITON
from cab_hf.hf.model_config import cab_config_in_use, cab_config_of
from cab_hf.ops import Workload, decode
from cab_hf.ops.decode import Choice
from cab_hf.plan import DENSE_BLOCK_SIZE


class DecodeSteps(NamedTuple):
    """The decode steps of a forward pass, which one kernel computes together.

    Attributes:
        query_indices: int64 [B], index of each query in the packed row.
        visible_keys: cache slots of all keys of each request.
    """

    query_indices: Tensor
    visible_keys: Choice


class PackedSequence(NamedTuple):
    """A part of a request whose attention is computed by one `Call`.

    A prompt and the answer in the same forward pass are two such sequences.

    Attributes:
        query_slice: slice of the packed row that contains the queries of the sequence.
        key_slice: slice of the gathered keys that contains the keys of the request.
        mask: visible keys of the queries.
    """

    query_slice: slice
    key_slice: slice
    mask: MaskInfo


class PackedRequests(NamedTuple):
    """The queries and keys of all requests in a forward pass.

    Attributes:
        sequences: prompts, and answers that follow a prompt in the same forward pass.
        decode_steps: decode steps; None if there are no decode steps.
        read_slots: int64 [N], cache slots of the keys of ``sequences``, concatenated.
    """

    sequences: list[PackedSequence]
    decode_steps: DecodeSteps | None
    read_slots: Tensor


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
        is_sparse: True if sparse attention is requested.
        workload: workload that an engine must support.
        sinks: [H], one additional logit per head in the softmax; None without sinks.
        softcap: cap c of the logits, ``c * tanh(logits / c)``; None without a cap.
        paged_batch: the mask of the forward pass.
        paging_arguments: the arguments `placeholder.PAGING_KEYWORDS` of transformers, by name.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    layer: nn.Module
    config: CabConfig
    is_sparse: bool
    workload: Workload
    sinks: Tensor | None
    softcap: float | None
    paged_batch: PagedBatch
    paging_arguments: dict[str, Any]

    @classmethod
    def create(
        cls,
        arguments: LayerArguments,
        paged_batch: PagedBatch,
        *,
        is_sparse: bool,
        paging_arguments: dict[str, Any],
    ) -> BatchRow:
        """Build a row from the arguments of an attention function.

        Args:
            arguments: arguments of the attention function, without those in ``paging_arguments``.
            paged_batch: the mask of the forward pass.
            is_sparse: True if sparse attention is requested.
            paging_arguments: the arguments `placeholder.PAGING_KEYWORDS`, by name.

        Raises:
            ValueError, NotImplementedError: as in `Call.create`.
        """
        validate_arguments(arguments, mask=None)
        module = arguments.module
        q, k, v = cast_to_one_dtype(module, arguments.query, arguments.key, arguments.value)
        config = paged_batch.forward_state.parse_config_once(
            module.config, cab_config_in_use if is_sparse else cab_config_of
        )
        has_sinks, has_softcap = arguments.s_aux is not None, arguments.softcap is not None
        return cls(
            q=q,
            k=k,
            v=v,
            scale=q.shape[-1] ** -0.5 if arguments.scaling is None else arguments.scaling,
            layer=module,
            config=config,
            is_sparse=is_sparse,
            workload=Workload.from_tensors(
                q, k, v, block_sizes(config), sinks=has_sinks, softcap=has_softcap
            ),
            sinks=arguments.s_aux,
            softcap=arguments.softcap,
            paged_batch=paged_batch,
            paging_arguments=paging_arguments,
        )

    def make_call(self, queries: slice, k: Tensor, v: Tensor, mask: MaskInfo) -> Call:
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
            is_sparse=self.is_sparse,
            workload=self.workload,
            mask=mask,
            sinks=self.sinks,
            softcap=self.softcap,
        )


def accept_batches(
    attention_function: Callable[..., Any], *, is_sparse: bool
) -> Callable[..., Any]:
    """Return an attention function that also computes the packed rows of continuous batching.

    Args:
        attention_function: attention function that computes all other calls.
        is_sparse: True if sparse attention is requested.
    """

    @functools.wraps(attention_function)
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
        paged_batch = kwargs.get("batch") if attention_mask is None else attention_mask
        if not isinstance(paged_batch, PagedBatch):
            return attention_function(
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
        paging_arguments = {keyword: kwargs.pop(keyword, None) for keyword in PAGING_KEYWORDS}
        arguments = LayerArguments.from_keywords(
            module, query, key, value, dropout=dropout, scaling=scaling, **kwargs
        )
        packed_row = BatchRow.create(
            arguments, paged_batch, is_sparse=is_sparse, paging_arguments=paging_arguments
        )
        return attend_batch(packed_row).contiguous(), None

    return attend


def attend_batch(packed_row: BatchRow) -> Tensor:
    """Return the attention output [1, T, H, D_v] of a packed row of T tokens."""
    layer_idx, paging_arguments = packed_row.layer.layer_idx, packed_row.paging_arguments
    paged_cache, key_value_states = (
        paging_arguments["cache"],
        {"key_states": packed_row.k, "value_states": packed_row.v},
    )
    allocator = paged_cache.layer_to_allocator[layer_idx]
    if paging_arguments.get("block_table") is not None:
        paged_cache.update(**key_value_states, layer_idx=layer_idx, kwargs=paging_arguments)
        return _attend_pages(packed_row, allocator)
    packed_requests = packed_row.paged_batch.forward_state.get_or_compute(
        ("packed", allocator), lambda: _pack_requests(packed_row, allocator)
    )
    read_index = list(paging_arguments["read_index"])
    read_index[allocator.index] = packed_requests.read_slots
    gathered_keys, gathered_values = paged_cache.update(
        **key_value_states,
        layer_idx=layer_idx,
        kwargs={**paging_arguments, "read_index": read_index},
    )
    # zeros, because padding tokens of the batch belong to no sequence and have zero output
    out = packed_row.q.new_zeros(
        1, packed_row.q.shape[2], packed_row.q.shape[1], gathered_values.shape[3]
    )
    for packed_sequence in packed_requests.sequences:
        k, v = (
            gathered_keys[:, :, packed_sequence.key_slice],
            gathered_values[:, :, packed_sequence.key_slice],
        )
        call = packed_row.make_call(
            packed_sequence.query_slice, k=k, v=v, mask=packed_sequence.mask
        )
        out[:, packed_sequence.query_slice] = dispatch(call).transpose(1, 2)
    if packed_requests.decode_steps is not None:
        query_indices = packed_requests.decode_steps.query_indices
        cache_pages = allocator.get_cache_for_block_table(layer_idx)
        q = packed_row.q[0, :, query_indices].transpose(0, 1).unsqueeze(2)
        k, v = (_expand_pages(x, len(query_indices)) for x in cache_pages)
        decode_out = decode.attend(
            q,
            k,
            v,
            choice=packed_requests.decode_steps.visible_keys,
            scale=packed_row.scale,
            sinks=packed_row.sinks,
        )
        out[0, query_indices] = decode_out.squeeze(2)
    return out


def _pack_requests(packed_row: BatchRow, allocator: Any) -> PackedRequests:
    """Return the queries and keys of all requests, for the layers that use ``allocator``.

    Args:
        packed_row: packed row of the first of these layers.
        allocator: cache allocator of transformers.
    """
    paging_arguments, prompt_lengths = (
        packed_row.paging_arguments,
        packed_row.paged_batch.prompt_lengths,
    )
    read_index = paging_arguments["read_index"][allocator.index]
    cu_seq_lens_k = paging_arguments["cu_seq_lens_k"][allocator.layer_type]
    # one transfer for both tensors, so that the host waits for the device once
    query_borders, key_borders = torch.stack(
        (paging_arguments["cu_seq_lens_q"], cu_seq_lens_k)
    ).tolist()
    # read_index is empty if no request has keys in the cache
    has_decode_kernels = len(read_index) > 0 and decode.has_kernels(packed_row.q, packed_row.k)
    mask_details = MaskDetails(
        model_name=packed_row.paged_batch.model_name,
        dense_block_size=_dense_block_size(packed_row.workload),
    )
    packed_sequences, decode_requests, gathered_slots, num_gathered_keys = [], [], [], 0
    for request_index, query_slice in enumerate(starmap(slice, pairwise(query_borders))):
        key_slice = slice(key_borders[request_index], key_borders[request_index + 1])
        num_queries, num_keys = (
            query_slice.stop - query_slice.start,
            key_slice.stop - key_slice.start,
        )
        # padding of a batch belongs to no request
        has_prompt = request_index < len(prompt_lengths)
        prompt = Prompt(prompt_lengths[request_index]) if has_prompt else None
        is_after_prompt = prompt is None or num_keys > prompt.end
        if num_queries == 1 and has_decode_kernels and is_after_prompt:
            decode_requests.append((query_slice.start, key_slice.start, num_keys))
        elif num_queries:
            mask = MaskInfo(
                batch=1,
                q_length=num_queries,
                kv_length=num_keys,
                q_offset=num_keys - num_queries,
                prompt=prompt,
                details=mask_details,
            )
            gathered_key_slice = slice(num_gathered_keys, num_gathered_keys + num_keys)
            for query_slice_in_request, sliced_mask in mask.split_at_prompt_end(
                has_separate_decode_steps=False
            ):
                slice_start, slice_stop, _ = query_slice_in_request.indices(num_queries)
                packed_query_slice = slice(
                    query_slice.start + slice_start, query_slice.start + slice_stop
                )
                packed_sequences.append(
                    PackedSequence(packed_query_slice, gathered_key_slice, sliced_mask)
                )
            gathered_slots.append(read_index[key_slice])
            num_gathered_keys += num_keys
    if not decode_requests:
        return PackedRequests(packed_sequences, None, read_index)
    read_slots = torch.cat(gathered_slots) if gathered_slots else read_index[:0]
    return PackedRequests(
        packed_sequences,
        _build_decode_steps(decode_requests, read_index, packed_row.k.shape[1]),
        read_slots,
    )


def _dense_block_size(workload: Workload) -> int | None:
    """Return the block size of exact attention by the Triton engine; None if it cannot run.

    The Triton engine is preferred to SDPA, because requests have many different lengths. The
    fastest kernels of SDPA need up to a second of preparation for each new length.
    """
    workload = replace(workload, query_block=DENSE_BLOCK_SIZE, key_block=DENSE_BLOCK_SIZE)
    return None if TRITON.unavailable(workload) else DENSE_BLOCK_SIZE


def _attend_pages(packed_row: BatchRow, allocator: Any) -> Tensor:
    """Return the output [1, T, H, D_v] of a batch in which every request has one decode step.

    Args:
        packed_row: packed row; its block table lists pages [P, tokens, H_kv, D] of K and V.
        allocator: cache allocator of transformers.
    """
    paging_arguments, num_requests = packed_row.paging_arguments, packed_row.q.shape[2]
    cache_pages = paging_arguments["k_cache"], paging_arguments["v_cache"]

    def find_slots() -> tuple[Tensor, Choice]:
        """Return the cache slot of each new token, and the cache slots of all visible keys."""
        num_keys, page_size = paging_arguments["cu_seq_lens_k"].diff(), cache_pages[0].shape[1]
        block_table = paging_arguments["block_table"].long().clamp(min=0)
        page_slots = block_table.unsqueeze(-1) * page_size + torch.arange(
            page_size, device=block_table.device
        )
        page_slots = page_slots.flatten(1)
        new_token_slots = page_slots.gather(
            1, (num_keys - 1).clamp(min=0).long().unsqueeze(1)
        ).squeeze(1)
        # K and V of padding go to a slot that is never read; a padding query reads one valid key
        written_slots = torch.where(num_keys > 0, new_token_slots, allocator.write_trash_index)
        num_read_keys = num_keys.clamp(min=1).to(torch.int32).unsqueeze(1)
        visible_slots = Choice(page_slots.to(torch.int32).unsqueeze(1), num_read_keys, None)
        return written_slots, visible_slots.expand(num_requests, packed_row.k.shape[1])

    # a captured CUDA graph must not read tensors that an earlier, uncaptured forward pass cached
    cache_key = "pages", allocator, is_captured_in_cuda_graph(packed_row.q)
    written_slots, visible_slots = packed_row.paged_batch.forward_state.get_or_compute(
        cache_key, find_slots
    )
    for cached_pages, x in zip(cache_pages, (packed_row.k, packed_row.v), strict=True):
        cached_pages.flatten(0, 1).index_copy_(0, written_slots, x[0].transpose(0, 1))
    k, v = (_expand_pages(x, num_requests) for x in cache_pages)
    q = packed_row.q[0].transpose(0, 1).unsqueeze(2)
    out = decode.attend(
        q, k, v, choice=visible_slots, scale=packed_row.scale, sinks=packed_row.sinks
    )
    return out.squeeze(2).unsqueeze(0)


def _build_decode_steps(
    decode_requests: list[tuple[int, int, int]], read_index: Tensor, kv_heads: int
) -> DecodeSteps:
    """Return the decode steps of a forward pass.

    Args:
        decode_requests: for each request, the index of the query in the packed row, the index of
            the first key in ``read_index``, and the number of keys.
        read_index: int64 [N], cache slots of the keys of all requests.
        kv_heads: number of KV heads.
    """
    query_indices, first_key_indices, num_keys_of_requests = torch.tensor(
        decode_requests, device=read_index.device
    ).unbind(1)
    max_keys = max(num_request_keys for *_, num_request_keys in decode_requests)
    # clamped indices are harmless: kernels do not read the slots after the keys of a request
    key_indices = first_key_indices.unsqueeze(1) + torch.arange(max_keys, device=read_index.device)
    key_slots = read_index[key_indices.clamp(max=len(read_index) - 1)].to(torch.int32).unsqueeze(1)
    num_keys = num_keys_of_requests.to(torch.int32).unsqueeze(1)
    visible_keys = Choice(key_slots, num_keys, None)
    return DecodeSteps(query_indices, visible_keys.expand(len(decode_requests), kv_heads))


def _expand_pages(cache_pages: Tensor, num_requests: int) -> Tensor:
    """Return pages [P, tokens, H_kv, D] as a view [num_requests, H_kv, P * tokens, D]."""
    page_tokens = cache_pages.flatten(0, 1).transpose(0, 1)
    return page_tokens.unsqueeze(0).expand(num_requests, -1, -1, -1)
