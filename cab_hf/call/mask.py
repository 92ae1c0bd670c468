"""`MaskInfo`: the object that layers receive in place of a 4-D mask tensor.

A `MaskInfo` contains the visible keys of each query, and builds the `BlockLayout` of the call. Its
`ForwardState` has the caches that the layers of one forward pass share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cab_hf.call import packing
from cab_hf.call.forward_state import ForwardState
from cab_hf.call.layout import BlockLayout, LayoutOptions
from cab_hf.call.packing import (
    MIN_EQUAL_END_TOKENS,
    DocumentLength,
    Packing,
    detect_packing,
    read_document_lengths,
)
from cab_hf.call.placeholder import MaskPlaceholder
from cab_hf.call.scope import Prompt
from cab_hf.checks import short_repr, warn_once

# keys of cached results in `ForwardState`
PACKING_CACHE_KEY = "packing"
LENGTHS_CACHE_KEY = "document lengths"


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskDetails:
    """The properties of a mask that few functions need.

    Attributes:
        model_name: name of the model, for error messages.
        cache_length: length of the key tensor of a layer; None if not known.
        unsupported_error: message of the error that the first layer with this mask raises; None if
            the mask is supported. `cab_mask` does not raise, because some masks are never used.
        parallel_settings: `ParallelSettings` of the ranks that share the sequence; None with one
            process.
        is_non_causal: bool [], True if a token attends to a later token. The first layer that uses
            the mask then fails on the device. None if the host has checked the mask.
        chunk_starts: int64 [B], slot from which chunks of a row are counted, for layers with
            chunked attention and without documents; None for other layers.
        position_ids: int [B or 1, N_q] that the model passes to its mask functions; None if the
            model passes no position ids. Layers can receive other position ids.
        dense_block_size: block size of the plan for exact attention, in tokens; None if a dense
            kernel computes exact attention.
        document_lengths: `DocumentLength` of each document of each row; None if the host has no
            lengths.
        max_documents: upper bound of the number of documents per row; None if the host has none.
    """

    model_name: str = "this model"
    cache_length: int | None = None
    unsupported_error: str | None = None
    parallel_settings: Any = None
    is_non_causal: Tensor | None = None
    chunk_starts: Tensor | None = None
    position_ids: Tensor | None = None
    dense_block_size: int | None = None
    document_lengths: list[list[DocumentLength]] | None = None
    max_documents: int | None = None


@dataclass(frozen=True, eq=False)
class MaskInfo(MaskPlaceholder):
    """The visible keys of every query in one forward pass, for all layers of one type.

    A slot is an index into the key tensor of a layer.

    Attributes:
        batch: batch rows.
        q_length: queries per row.
        kv_length: cache slots in use per row; a static cache has more slots. None if reading the
            number would wait for the device (decode steps with a static cache).
        q_offset: slot of the first query, int or 0-d tensor.
        padding_mask: bool [B, N_k], False for padding keys; None without padding.
        doc_ids: int [B, N_k], equal for tokens of one packed document; None if not packed.
        window: width of the sliding window or of chunks, in tokens; None without a window.
        prompt: prompt that the call processes; None if its end is not known. Each call then counts
            as the end of a prompt, and calls with few queries count as decode steps.
        details: properties that few functions need.
        forward_state: caches that the layers share.
    """

    batch: int
    q_length: int
    kv_length: int | None
    q_offset: int | Tensor
    padding_mask: Tensor | None = None
    doc_ids: Tensor | None = None
    window: int | None = None
    prompt: Prompt | None = None
    # lambdas: torch.compile does not trace a class as a factory, nor an object as a default
    details: MaskDetails = field(default_factory=lambda: MaskDetails())
    forward_state: ForwardState = field(default_factory=lambda: ForwardState())

    @property
    def model_name(self) -> str:
        """Name of the model, for error messages."""
        return self.details.model_name

    def __getitem__(self, index: Any) -> MaskInfo:
        """Return the mask ``mask[:, :, -n:, :]`` of the last n queries, which Gemma 4 uses.

        Raises:
            MaskUsedAsTensorError: for any other index.
        """
        full_slice = slice(None)
        query_slice = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        if not isinstance(query_slice, slice) or index != (
            full_slice,
            full_slice,
            query_slice,
            full_slice,
        ):
            return super().__getitem__(index)
        query_start, query_stop, step = query_slice.indices(self.q_length)
        if (query_stop, step) != (self.q_length, 1) or query_start == query_stop:
            return super().__getitem__(index)
        stored_packing = self.forward_state.get_stored(PACKING_CACHE_KEY)
        mask = self if stored_packing is None else self._with_packing(stored_packing)
        return mask.slice_queries(query_start, query_stop)

    def slice_queries(self, query_start: int, query_stop: int) -> MaskInfo:
        """Return the mask of queries ``query_start`` to ``query_stop - 1``, without later keys."""
        if (query_start, query_stop) == (0, self.q_length):
            return self
        changed_fields: dict[str, Any] = {
            "q_length": query_stop - query_start,
            "q_offset": self.q_offset + query_start,
        }
        if query_stop < self.q_length:
            key_end = changed_fields["kv_length"] = self.q_offset + query_stop
            key_tensors = {"padding_mask": self.padding_mask, "doc_ids": self.doc_ids}
            changed_fields |= {
                field_name: x[:, :key_end] for field_name, x in key_tensors.items() if x is not None
            }
        sliced_details = self.details
        if sliced_details.position_ids is not None:
            sliced_details = replace(
                sliced_details,
                position_ids=sliced_details.position_ids[..., query_start:query_stop],
            )
        document_lengths = sliced_details.document_lengths or self.forward_state.get_stored(
            LENGTHS_CACHE_KEY
        )
        sliced_forward_state = self.forward_state.make_state_of_query_slice()
        sliced_mask = replace(
            self,
            **changed_fields,
            details=replace(sliced_details, document_lengths=document_lengths),
            forward_state=sliced_forward_state,
        )
        if document_lengths is not None and self.doc_ids is None:
            # the slice changes the number of queries in padded rows: compute the lengths again
            sliced_mask = sliced_mask._with_packing(sliced_mask._detect_packing())
        if self.forward_state.get_stored(PACKING_CACHE_KEY) is not None:
            sliced_forward_state.store(PACKING_CACHE_KEY, sliced_mask._packing)
        return sliced_mask

    def split_at_prompt_end(self, has_separate_decode_steps: bool) -> list[tuple[slice, MaskInfo]]:
        """Return the parts of the call that are computed separately: prompt, and answer.

        Args:
            has_separate_decode_steps: True to return each token of the answer as a separate part,
                as in decode steps.

        Returns:
            For each part: the slice of its queries, and the mask of these queries.
        """
        if self.prompt is None:
            return [(slice(None), self)]
        num_prompt_queries = min(max(self.prompt.end - self.q_offset, 0), self.q_length)
        cut_indices = (
            range(num_prompt_queries, self.q_length)
            if has_separate_decode_steps
            else (num_prompt_queries,)
        )
        call_part_borders = sorted({0, *cut_indices, self.q_length})
        if len(call_part_borders) == 2:
            # not cached in ``forward_state``, which would then contain the mask to which it belongs
            return [(slice(None), self)]
        return self.forward_state.get_or_compute(
            ("prompt and answer", has_separate_decode_steps),
            lambda: [
                (slice(start, stop), self.slice_queries(start, stop))
                for start, stop in pairwise(call_part_borders)
            ],
        )

    @property
    def is_prefill(self) -> bool:
        """True if all queries belong to a prompt whose end is known."""
        return self.prompt is not None and self.q_offset + self.q_length <= self.prompt.end

    @property
    def is_decode(self) -> bool:
        """True if all queries follow a prompt whose end is known."""
        return self.prompt is not None and self.q_offset >= self.prompt.end

    @property
    def is_plain_causal(self) -> bool:
        """True if the mask is causal, without padding, documents and window."""
        return self.padding_mask is None and self.doc_ids is None and self.window is None

    def find_dense_tail_start(self, num_tail_blocks: int, query_block: int) -> int | None:
        """Return the slot at which the last ``num_tail_blocks`` query blocks of the prompt start.

        Returns None if rows end at different slots, or if the end of the prompt is not known.

        Args:
            num_tail_blocks: number of query blocks.
            query_block: query block size, in tokens.
        """
        if not self.is_prefill or self.prompt.row_lengths is not None or self.doc_ids is not None:
            return None
        return max(0, self.prompt.end - num_tail_blocks * query_block) // query_block * query_block

    @property
    def document_lengths(self) -> list[list[DocumentLength]] | None:
        """One list per row, with the `DocumentLength` of each document.

        In a prompt whose end is known, each row is one document, and its length is the length of
        the complete prompt. None if each row is one sequence without padding, or if waiting for the
        device is not allowed.
        """
        if self.is_prefill and self.doc_ids is None:
            row_lengths = self.prompt.row_lengths
            return (
                None
                if row_lengths is None
                else [[DocumentLength(num_tokens, num_tokens)] for num_tokens in row_lengths]
            )
        has_host_lengths = self.details.document_lengths is not None or self.doc_ids is None
        if has_host_lengths or torch.compiler.is_compiling():
            return self.details.document_lengths
        return self.forward_state.get_or_compute(LENGTHS_CACHE_KEY, self._read_document_lengths)

    def _read_document_lengths(self) -> list[list[DocumentLength]]:
        """Return the `DocumentLength` of each packed document of each row. Waits for the device."""
        padding_mask = self.padding_mask
        if padding_mask is None:
            padding_mask = torch.ones_like(self.doc_ids, dtype=torch.bool)
        doc_ids = self.doc_ids.to(padding_mask.device)
        return read_document_lengths(padding_mask, doc_ids, self.details.max_documents)

    @property
    def longest_document(self) -> DocumentLength | None:
        """Largest numbers of queries and of tokens of a document.

        None if every row is one document without padding, which is as long as the call.
        """
        if self.is_prefill and self.doc_ids is None:
            return DocumentLength(self.prompt.longest_row_tokens, self.prompt.longest_row_tokens)
        if self.document_lengths is None:
            return None
        document_lengths = [length for row in self.document_lengths for length in row]
        return DocumentLength(
            max(x.num_queries for x in document_lengths),
            max(x.num_tokens for x in document_lengths),
        )

    def with_documents(
        self,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        value_states: Tensor | None = None,
    ) -> tuple[MaskInfo, Tensor | None]:
        """Return the mask with the packed documents and the padding of the forward pass.

        The first layer detects documents and padding, and the other layers reuse the result.
        Unlike transformers, this method also detects packed documents in calls with a mask or a
        cache. A call that continues a cache attends to all cached tokens.

        Args:
            position_ids: int [B or 1, N_q] of the layer, which restart where a document starts.
                None to read the position ids of the mask.
            cu_seqlens: int [documents + 1], cumulative lengths of documents, which are read in
                place of position ids; None without cumulative lengths.
            value_states: [B, H_kv, N, D_v] of the first layer. Rows that end in a run of equal
                tokens cause a warning without a padding mask, because such tokens look like right
                padding. None to omit this check.

        Returns:
            The mask; and for the first layer under torch.compile a condition, bool []: True if
            tokens would attend to other packed documents. The condition is None in all other cases.

        Raises:
            ValueError: if ``cu_seqlens`` has another number of tokens.
            NotImplementedError: if ``cu_seqlens`` is set in a call that continues a cache.
        """
        stored_packing, has_mixed_documents = self.forward_state.get_stored(PACKING_CACHE_KEY), None
        if stored_packing is None:
            stored_packing, has_mixed_documents = self._detect_documents(
                position_ids, cu_seqlens, value_states
            )
            self.forward_state.store(PACKING_CACHE_KEY, stored_packing)
        return self._with_packing(stored_packing), has_mixed_documents

    @property
    def _packing(self) -> Packing:
        """Documents and padding of this mask."""
        return Packing(
            padding_mask=self.padding_mask,
            doc_ids=self.doc_ids,
            document_lengths=self.details.document_lengths,
            max_documents=self.details.max_documents,
        )

    def _with_packing(self, detected_packing: Packing) -> MaskInfo:
        """Return the mask with the documents and the padding in ``detected_packing``."""
        details = replace(
            self.details,
            document_lengths=detected_packing.document_lengths,
            max_documents=detected_packing.max_documents,
        )
        return replace(
            self,
            padding_mask=detected_packing.padding_mask,
            doc_ids=detected_packing.doc_ids,
            details=details,
        )

    def _detect_documents(
        self, position_ids: Tensor | None, cu_seqlens: Tensor | None, value_states: Tensor | None
    ) -> tuple[Packing, Tensor | None]:
        """Return the packing and the condition of `with_documents`, for the first layer.

        Args:
            position_ids: int [B or 1, N_q] of the layer, or None.
            cu_seqlens: int [documents + 1], cumulative lengths of documents, or None.
            value_states: [B, H_kv, N, D_v] of the layer, or None.
        """
        mask = self if self.details.is_non_causal is None else self._raise_if_non_causal()
        has_all_keys = self.q_length == self.kv_length
        if cu_seqlens is not None and not has_all_keys:
            raise NotImplementedError(
                f"cu_seq_lens_q is set in a call of {self.q_length} tokens that continues a cache; "
                "'cab' packs documents in one call. Leave out cu_seq_lens_q, or the cache."
            )
        has_mixed_documents, positions = None, None
        if self.q_length > 1:
            positions = self._find_one_dimensional_positions(position_ids)
        if torch.compiler.is_compiling() and cu_seqlens is None and positions is not None:
            has_mixed_documents, positions = mask._has_mixed_documents(positions), None
        if not has_all_keys or self.q_length == 1:
            positions = cu_seqlens = None
        if not has_all_keys or self.batch == 1:
            value_states = None
        detected_packing = mask._detect_packing(positions, cu_seqlens, value_states)
        self._warn_of_padding(detected_packing)
        chunk_starts = self.details.chunk_starts
        if chunk_starts is not None and detected_packing.doc_ids is not None:
            doc_ids = packing.split_into_chunks(
                detected_packing.doc_ids, detected_packing.padding_mask, self.window
            )
            detected_packing = detected_packing._replace(doc_ids=doc_ids, max_documents=None)
        return detected_packing, has_mixed_documents

    def _detect_packing(
        self,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        value_states: Tensor | None = None,
    ) -> Packing:
        """Return the result of `detect_packing`, which waits for the device except in decode steps.

        Args:
            position_ids: int [B or 1, N_q], which restart where a document starts; or None.
            cu_seqlens: int [documents + 1], cumulative lengths of documents, or None.
            value_states: [B, H_kv, N, D_v] of the first layer, or None.
        """
        is_decode_step = self.q_length == 1 and not self.is_prefill
        can_wait_for_device = not is_decode_step and not torch.compiler.is_compiling()
        query_end_slot = self.q_offset + self.q_length
        return detect_packing(
            position_ids,
            cu_seqlens,
            self.padding_mask,
            batch=self.batch,
            query_slots=slice(self.q_offset, query_end_slot)
            if can_wait_for_device
            else slice(None),
            kv_length=self.kv_length,
            doc_ids=self.doc_ids,
            value_states=value_states,
            can_wait_for_device=can_wait_for_device,
        )

    def _has_mixed_documents(self, position_ids: Tensor) -> Tensor | None:
        """Return bool [], True if the mask does not separate documents of ``position_ids``.

        Returns None if the call continues a cache, or if transformers has already separated the
        documents.

        Args:
            position_ids: int [B or 1, N_q], which restart where a document starts.
        """
        has_cached_tokens = self.kv_length is not None and self.q_length != self.kv_length
        if has_cached_tokens or (self.doc_ids is not None and self.details.chunk_starts is None):
            return None
        padding_mask = self.padding_mask
        if padding_mask is not None:
            padding_mask = padding_mask[:, : self.q_length]
        starts_document = packing.find_document_starts(position_ids, padding_mask)
        if self.doc_ids is None:
            has_mixed_documents = (starts_document.sum(-1) > 1).any()
        else:
            # ``doc_ids`` are chunks here: a document that starts inside a chunk is not separated
            has_mixed_documents = (starts_document & ~packing.is_first_token(self.doc_ids)).any()
        # only the device has the length of a static cache, which a call continues unless it is at 0
        return (
            has_mixed_documents
            if self.kv_length is not None
            else has_mixed_documents & (self.q_offset == 0)
        )

    def _raise_if_non_causal(self) -> MaskInfo:
        """Return the mask with an operation that fails on the device for non-causal attention."""
        is_non_causal, error_message = (
            self.details.is_non_causal,
            non_causal_error(self.model_name, NON_CAUSAL_REASON),
        )
        if self.doc_ids is not None:
            return replace(
                self, doc_ids=packing.raise_where(self.doc_ids, is_non_causal, error_message)
            )
        padding_mask = self.padding_mask
        if padding_mask is None:
            mask_shape = self.batch, self.kv_length or self.details.cache_length
            padding_mask = torch.ones(mask_shape, dtype=torch.bool, device=is_non_causal.device)
        return replace(
            self, padding_mask=packing.raise_where(padding_mask, is_non_causal, error_message)
        )

    def _find_one_dimensional_positions(self, position_ids: Tensor | None) -> Tensor | None:
        """Return position ids with one integer per token, int [B or 1, N_q].

        Returns None without such position ids. Models with images have position ids with several
        numbers per token.

        Args:
            position_ids: position ids of the layer; None to read the position ids of the mask.
        """
        valid_shapes = (1, self.q_length), (self.batch, self.q_length)
        for candidate_position_ids in (position_ids, self.details.position_ids):
            if (
                candidate_position_ids is not None
                and not candidate_position_ids.is_floating_point()
                and tuple(candidate_position_ids.shape) in valid_shapes
            ):
                return candidate_position_ids
        return None

    def _warn_of_padding(self, detected_packing: Packing) -> None:
        """Warn once per process and model if some rows of a batch end in equal tokens."""
        num_rows_with_equal_ends = detected_packing.num_rows_with_equal_ends
        if 0 < num_rows_with_equal_ends < self.batch and detected_packing.doc_ids is None:
            warn_once(
                (self.model_name, "right padding"),
                f"{self.model_name} reads {self.batch} sequences without an attention_mask, of "
                f"which {num_rows_with_equal_ends} end in {MIN_EQUAL_END_TOKENS} or more equal "
                "tokens. If these are padding, 'cab' reads them as real tokens, and the result of "
                "a row depends on the others. Pass the attention_mask of the tokenizer.",
            )

    def layout(
        self,
        query_block: int,
        key_block: int,
        device: torch.device,
        from_sequence_start: bool = True,
    ) -> BlockLayout:
        """Return the `BlockLayout` of this call, built once for all layers.

        Args:
            query_block: query block size, in tokens.
            key_block: key block size, in tokens.
            device: device of the layer.
            from_sequence_start: True to count query blocks from the first token of each sequence,
                so that chunks have the blocks of a single call. False to count query blocks from
                the first query of this call.
        """

        def build_layout() -> BlockLayout:
            # moved to ``device``, because layers on several devices share this mask
            padding_mask, doc_ids = (
                None if x is None else x.to(device) for x in (self.padding_mask, self.doc_ids)
            )
            kv_length = self.details.cache_length if self.kv_length is None else self.kv_length
            return BlockLayout.build(
                batch=self.batch,
                q_length=self.q_length,
                kv_length=kv_length,
                q_offset=self.q_offset,
                padding_mask=padding_mask,
                doc_ids=doc_ids,
                align=max(query_block, key_block),
                device=device,
                options=LayoutOptions(
                    document_lengths=self.document_lengths,
                    block_offset=self._find_offset_in_query_block(query_block)
                    if from_sequence_start
                    else 0,
                    sequence_end=self._sequence_end(device),
                    window=self.window,
                ),
            )

        return self.forward_state.get_or_compute(
            ("layout", query_block, key_block, device, from_sequence_start), build_layout
        )

    def _find_offset_in_query_block(self, query_block: int) -> int | list[int]:
        """Return the position of the first query in its query block, in tokens.

        Blocks are counted from the first token of the sequence. The result is one number for all
        rows, or one number per row.
        """
        if self.doc_ids is not None or isinstance(self.q_offset, Tensor):
            return 0
        if self.padding_mask is None:
            return self.q_offset % query_block
        document_lengths = self.details.document_lengths
        if document_lengths is None:
            return 0
        block_offsets = [
            (row[0].num_tokens - row[0].num_queries) % query_block for row in document_lengths
        ]
        return block_offsets if any(block_offsets) else 0

    def _sequence_end(self, device: torch.device) -> int | Tensor | None:
        """Return the length of the complete prompt, in tokens, int or int32 [B, 1].

        Returns None if sequences end with this call.
        """
        if not self.is_prefill or self.doc_ids is not None:
            return None
        row_lengths = self.prompt.row_lengths
        if row_lengths is None:
            return self.prompt.end
        return torch.tensor(row_lengths, dtype=torch.int32, device=device).unsqueeze(1)

    def decode_budget(
        self, decode_tokens: int | float, min_tokens: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the length of the KV cache, and the number of keys that a decode step reads.

        The host does not wait for the device. The results are computed once for all layers.

        Args:
            decode_tokens: number of keys, or share of the tokens of each row; see `CabConfig`.
            min_tokens: rows with fewer tokens read all keys.
            device: device of the results.

        Returns:
            num_used_slots: int64 [1], number of cache slots in use, with padding and the keys of
                this call.
            num_keys: int32 [B], number of keys that each row reads; the largest int32 for rows with
                fewer than ``min_tokens`` tokens.
        """

        def count_keys() -> tuple[Tensor, Tensor]:
            num_used_slots = self.q_offset + self.q_length
            if isinstance(num_used_slots, Tensor):
                num_used_slots = num_used_slots.to(device).reshape(1)
            else:
                num_used_slots = torch.full((1,), num_used_slots, dtype=torch.int64, device=device)
            num_tokens = num_used_slots.expand(self.batch)
            if self.padding_mask is not None:
                padding_mask = self.padding_mask.to(device)
                is_used_slot = torch.arange(padding_mask.shape[1], device=device) < num_used_slots
                num_tokens = (padding_mask & is_used_slot).sum(-1)
            if isinstance(decode_tokens, int):
                num_keys = torch.full_like(num_tokens, decode_tokens)
            else:
                num_keys = (num_tokens * decode_tokens).ceil().long()
            max_int32 = torch.iinfo(torch.int32).max
            return num_used_slots, num_keys.masked_fill(num_tokens < min_tokens, max_int32).to(
                torch.int32
            )

        return self.forward_state.get_or_compute(("decode budget", device), count_keys)

    def dense_mask(
        self, query_start: int, query_stop: int, key_start: int, key_stop: int, device: Any
    ) -> Tensor:
        """Return the dense mask of some queries and keys, True for visible keys.

        Args:
            query_start: index of the first query in this call.
            query_stop: index after the last query.
            key_start: first key slot.
            key_stop: slot after the last key.
            device: device of the mask.

        Returns:
            bool [B or 1, 1, query_stop - query_start, key_stop - key_start].
        """
        query_slots = self.q_offset + torch.arange(
            query_start, query_stop, device=device
        ).unsqueeze(-1)
        key_slots = torch.arange(key_start, key_stop, device=device)
        is_visible = key_slots <= query_slots
        if self.window is not None:
            is_visible = is_visible & (key_slots > query_slots - self.window)
        is_visible = is_visible.unsqueeze(0)
        if self.padding_mask is not None:
            is_visible = is_visible & self.padding_mask[:, None, key_start:key_stop].to(device)
        if self.details.chunk_starts is not None and self.doc_ids is None:
            chunk_start = self.details.chunk_starts.to(device).view(-1, 1, 1)
            chunk_of_key = (key_slots - chunk_start) // self.window
            chunk_of_query = (query_slots - chunk_start) // self.window
            is_visible = is_visible & (chunk_of_key == chunk_of_query)
        if self.doc_ids is not None:
            doc_ids = self.doc_ids.to(device)
            doc_of_query = doc_ids[
                :, self.q_offset + query_start : self.q_offset + query_stop, None
            ]
            is_visible = is_visible & (doc_of_query == doc_ids[:, None, key_start:key_stop])
        # a padding query attends to itself, because softmax over no keys is NaN
        return (is_visible | (key_slots == query_slots)).unsqueeze(1)


# reason for `non_causal_error`
NON_CAUSAL_REASON = "has a mask that lets tokens attend to later tokens"


def non_causal_error(model_name: str, reason: str) -> str:
    """Return the error message for a model whose mask has an unsupported pattern.

    Args:
        model_name: name of the model.
        reason: property of the mask, as the predicate of a sentence about the model.
    """
    return (
        f"{model_name} {reason}; 'cab' computes causal attention, with or without sliding windows. "
        "Load the model with attn_implementation='sdpa'."
    )


def mask_too_short_error(num_tokens: int, num_keys: int | str) -> str:
    """Return the error message for an attention_mask with fewer tokens than keys."""
    return (
        f"attention_mask has {num_tokens} tokens and there are {num_keys} keys. Pass one "
        "number for each token, including the tokens in the cache."
    )


def padding_mask_error(mask: Any) -> str:
    """Return the error message for an attention_mask that is not a padding mask."""
    return (
        "attention_mask must be None or the 2-D padding mask [batch, tokens] of the tokenizer, got "
        f"{short_repr(mask)}. Use attn_implementation='sdpa' for other masks."
    )
