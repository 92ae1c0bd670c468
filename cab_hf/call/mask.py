"""`MaskInfo`: the object that layers receive in place of a 4-D mask tensor.

It describes which tokens see which tokens, and builds the layout on the block grid. Its
`ForwardState` is the state that the layers of one forward pass share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cab_hf.call import packing
from cab_hf.call.forward_pass import ForwardState
from cab_hf.call.layout import BlockLayout, Length, whole_documents
from cab_hf.call.placeholder import MaskPlaceholder
from cab_hf.call.scope import Prompt
from cab_hf.checks import short, warn_once

# A_RUN equal tokens at the end of a row look like padding. In the first layer, values of equal
# tokens differ by at most SAME_VALUE times the largest value.
A_RUN, SAME_VALUE = 4, 1e-3


@dataclass(eq=False)
class MaskInfo(MaskPlaceholder):
    """The visible keys of every query in one forward pass; layers of one type share an object.

    Slots are indices into the key tensor of a layer.

    Attributes:
        batch: batch rows.
        q_length: queries per row.
        kv_length: written keys per row, fewer than the slots of a static cache. None if reading the
            number would wait for the device (decode steps with a static cache).
        q_slot: slot of the first query, int or 0-d tensor.
        valid: bool [B, N_k], False for padding keys; None without padding.
        document: int [B, N_k], equal for tokens of one packed document; None if not packed.
        window: width of the sliding window or of chunks, in tokens; None without a window.
        slots: length of the key tensor of a layer; None if not known.
        model: name of the model, for error messages.
        refusal: error for layers that use the mask; None if the mask is supported. Models also
            build masks that no layer uses.
        prompt: prompt that the call processes; None if its end is not known. Without it, each call
            ends a prompt, and calls with few queries are decode steps.
        parallel: `Parallel` of the ranks that share the sequence; None with one process.
        non_causal: bool [], True if a token sees a later one, when only the device has the value.
            The first layer that uses the mask then fails on the device. None if no token does.
        chunks_from: int64 [B], slot from which chunks of a row are counted, for layers with chunked
            attention and without documents; None for other layers.
        position_ids: int [B or 1, N_q] that the model passes to its mask functions; None if it
            passes none. Layers can receive other position ids.
        dense_block_size: block size of the plan for exact attention, in tokens; None if a dense
            kernel can compute it.
        state: state that the layers share.
    """

    batch: int
    q_length: int
    kv_length: int | None
    q_slot: int | Tensor
    valid: Tensor | None = None
    document: Tensor | None = None
    window: int | None = None
    slots: int | None = None
    model: str = "this model"
    refusal: str | None = None
    prompt: Prompt | None = None
    parallel: Any = None
    non_causal: Tensor | None = None
    chunks_from: Tensor | None = None
    position_ids: Tensor | None = None
    dense_block_size: int | None = None
    # a lambda, because torch.compile does not trace a class as a factory
    state: ForwardState = field(default_factory=lambda: ForwardState())
    _looked_for_documents: bool = False
    # upper bound of the number of documents, if known without waiting for the device
    _most_documents: int | None = None
    _lengths: list[list[Length]] | None = None

    def __getitem__(self, index: Any) -> MaskInfo:
        """Return ``mask[:, :, -n:, :]``, which Gemma 4 uses in layers with the last n queries."""
        everything = slice(None)
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        if not isinstance(rows, slice) or index != (everything, everything, rows, everything):
            return super().__getitem__(index)
        start, stop, step = rows.indices(self.q_length)
        if (stop, step) != (self.q_length, 1) or start == stop:
            return super().__getitem__(index)
        return self._cut(start, stop)

    def _cut(self, start: int, stop: int) -> MaskInfo:
        """Return the mask of queries from ``start`` to ``stop``, and of the keys up to ``stop``."""
        if (start, stop) == (0, self.q_length):
            return self
        kept: dict[str, Any] = {"q_length": stop - start, "q_slot": self.q_slot + start}
        if stop < self.q_length:
            kept["kv_length"] = self.q_slot + stop
            parts = {"valid": self.valid, "document": self.document}
            kept |= {name: x[:, : self.q_slot + stop] for name, x in parts.items() if x is not None}
        if self.position_ids is not None:
            kept["position_ids"] = self.position_ids[..., start:stop]
        rest = replace(self, **kept, state=self.state.of_some_queries())
        if self._lengths is not None and self.document is None:
            # the number of queries of padded rows has changed
            rest._lengths = None
            rest._look(None)
        return rest

    def pieces(self, steps: bool) -> list[tuple[slice, MaskInfo]]:
        """Return (queries, mask) of the parts that are computed separately: prompt and answer.

        Args:
            steps: True if the answer is computed token by token, as in decode steps.
        """
        if self.prompt is None:
            return [(slice(None), self)]

        def cut() -> list[tuple[slice, MaskInfo]]:
            border = min(max(self.prompt.end - self.q_slot, 0), self.q_length)
            cuts = range(border, self.q_length) if steps else (border,) * (border < self.q_length)
            ends = sorted({0, *cuts, self.q_length})
            return [(slice(*x), self._cut(*x)) for x in pairwise(ends)]

        return self.state.once(("pieces", steps), cut)

    @property
    def is_prefill(self) -> bool:
        """True if all queries belong to a prompt whose end is known."""
        return self.prompt is not None and self.q_slot + self.q_length <= self.prompt.end

    def tail_from(self, blocks: int, query_block: int) -> int | None:
        """Return the slot of the first query block in the last ``blocks`` blocks of the prompt.

        Returns None if rows end at different slots, or if the end of the prompt is not known.
        """
        if not self.is_prefill or self.prompt.lengths is not None or self.document is not None:
            return None
        return max(0, self.prompt.end - blocks * query_block) // query_block * query_block

    @property
    def is_decode(self) -> bool:
        """True if all queries are known to follow the prompt."""
        return self.prompt is not None and self.q_slot >= self.prompt.end

    @property
    def plain(self) -> bool:
        """True if the mask is plain causal."""
        return self.valid is None and self.document is None and self.window is None

    @property
    def lengths(self) -> list[list[Length]] | None:
        """The lengths of the documents of every batch row, or of a prompt whose end is known.

        None if each row is one sequence without padding, or if waiting for the device is not
        allowed.
        """
        if self.is_prefill and self.document is None:
            lengths = self.prompt.lengths
            return None if lengths is None else [[Length(n, n)] for n in lengths]
        known = self._lengths is not None or self.document is None
        if not known and not torch.compiler.is_compiling():
            document, valid = self.document, self.valid
            valid = torch.ones_like(document, dtype=torch.bool) if valid is None else valid
            self._lengths = whole_documents(valid, document.to(valid.device), self._most_documents)
        return self._lengths

    @property
    def longest(self) -> Length | None:
        """The most queries and tokens of any document; None if equal to those of the call."""
        if self.is_prefill and self.document is None:
            return Length(self.prompt.longest, self.prompt.longest)
        if self.lengths is None:
            return None
        everyone = [length for row in self.lengths for length in row]
        return Length(max(x.queries for x in everyone), max(x.tokens for x in everyone))

    def find_documents(
        self, position_ids: Tensor | None, cu_seq_lens: Tensor | None, value: Tensor | None = None
    ) -> Tensor | None:
        """Detect packing and padding from the arguments of a layer, once per forward pass.

        Packed documents are found with a mask or a cache too, which transformers does not do. A
        call that continues a cache sees the whole cache.

        Args:
            position_ids: int [B or 1, N_q] of the layer; a document starts where they restart. If
                the layer has none, those of the mask are read.
            cu_seq_lens: int [documents + 1], cumulative lengths of documents, which replace
                position ids.
            value: [B, H_kv, N, D_v] of the first layer. Without a mask, rows that end in a run of
                equal tokens cause a warning, because they look like right padding.

        Returns:
            None, or under torch.compile bool [], True if the graph mixes packed documents.

        Raises:
            ValueError: if ``cu_seq_lens`` has another number of tokens.
            NotImplementedError: if ``cu_seq_lens`` is set in a call that continues a cache.
        """
        if self._looked_for_documents:
            return None
        self._looked_for_documents = True
        if self.non_causal is not None:
            self._refuse_looking_ahead()
        begins = self.q_length == self.kv_length
        if cu_seq_lens is not None and not begins:
            raise NotImplementedError(
                f"cu_seq_lens_q is set in a call of {self.q_length} tokens that continues a cache; "
                "'cab' packs documents in one call. Leave out cu_seq_lens_q, or the cache."
            )
        starts, mixed = None, None
        positions = self._positions(position_ids) if self.q_length > 1 else None
        if torch.compiler.is_compiling() and cu_seq_lens is None and positions is not None:
            mixed = self._mixed(positions)
        elif self.document is None and begins and self.q_length > 1:
            if cu_seq_lens is not None:
                self.document = packing.documents_between(cu_seq_lens, self.batch, self.kv_length)
                self._most_documents = cu_seq_lens.shape[0]
            elif positions is not None:
                starts = packing.document_starts(positions, self.valid)
        plain = self.valid is None and self.document is None and begins
        self._look(starts, value if plain and self.batch > 1 else None)
        if self.chunks_from is not None and self.document is not None:
            self.document = packing.in_chunks(self.document, self.valid, self.window)
            self._most_documents = None
        return mixed

    def _mixed(self, position_ids: Tensor) -> Tensor | None:
        """Return bool [], True if the mask does not separate the documents of these positions.

        Returns None if the call continues a cache, or if transformers has read the positions.
        """
        continues = self.kv_length is not None and self.q_length != self.kv_length
        if continues or (self.document is not None and self.chunks_from is None):
            return None
        valid = None if self.valid is None else self.valid[:, : self.q_length]
        starts = packing.document_starts(position_ids, valid)
        if self.document is None:
            mixed = (starts.sum(-1) > 1).any()
        else:
            # chunks start at documents only if transformers has found the documents
            mixed = (starts & ~packing.begins(self.document)).any()
        # only the device has the length of a static cache
        return mixed if self.kv_length is not None else mixed & (self.q_slot == 0)

    def _refuse_looking_ahead(self) -> None:
        """Make the mask tensors fail on the device if a token sees a later one."""
        refusal = self.non_causal, not_causal(self.model, AHEAD)
        if self.document is not None:
            self.document = packing.refuse_where(self.document, *refusal)
            return
        if self.valid is None:
            shape = self.batch, self.kv_length or self.slots
            self.valid = torch.ones(shape, dtype=torch.bool, device=self.non_causal.device)
        self.valid = packing.refuse_where(self.valid, *refusal)

    def _positions(self, position_ids: Tensor | None) -> Tensor | None:
        """Return integer position ids with one number per token, of the layer or of the mask.

        Models with images have position ids with several numbers per token.
        """
        shapes = (1, self.q_length), (self.batch, self.q_length)
        for given in (position_ids, self.position_ids):
            if given is not None and not given.is_floating_point() and tuple(given.shape) in shapes:
                return given
        return None

    def _look(self, starts: Tensor | None, value: Tensor | None = None) -> None:
        """Read padding and document ``starts`` from the device, with a single wait.

        Also read which rows of ``value`` end in a run of equal tokens. Decode steps read nothing,
        because the wait would take too long.
        """
        step = self.q_length == 1 and not self.is_prefill
        if step or torch.compiler.is_compiling():
            return
        wanted = [] if starts is None else [starts.sum(-1).expand(self.batch)]
        if self.valid is not None:
            mine = self.valid[:, self.q_slot : self.q_slot + self.q_length]
            wanted = [x.to(self.valid.device) for x in wanted]
            wanted += [mine.sum(-1), self.valid.sum(-1)]
        if value is not None:
            # detached: a recomputed layer does not run this code
            end = value[:, :, -A_RUN:].detach().float()
            off = (end - end[:, :, -1:]).flatten(1)
            run = off.abs().amax(-1) <= SAME_VALUE * end.flatten(1).abs().amax(-1)
            wanted = [*(x.to(value.device) for x in wanted), run.long()]
        if not wanted:
            return
        counts = torch.stack(wanted, dim=-1).tolist()
        if starts is not None:
            self._most_documents = max(row[0] for row in counts)
            if self._most_documents > 1:
                self.document = (starts.cumsum(-1) - 1).clamp(min=0).expand(self.batch, -1)
        if value is not None:
            self._warn_of_padding(sum(row[-1] for row in counts))
        if self.valid is not None and all(row[-1] == self.kv_length for row in counts):
            # kernels without a mask are faster
            self.valid = None
        if self.valid is not None and self.document is None:
            self._lengths = [[Length(*row[-2:])] for row in counts]

    def _warn_of_padding(self, rows: int) -> None:
        """Warn once per process and model if some ``rows`` of a batch end in equal tokens."""
        if 0 < rows < self.batch and self.document is None:
            warn_once(
                (self.model, "right padding"),
                f"{self.model} reads {self.batch} sequences without an attention_mask, of which "
                f"{rows} end in {A_RUN} or more equal tokens. If these are padding, 'cab' reads "
                "them as real tokens, and the result of a row depends on the others. Pass the "
                "attention_mask of the tokenizer.",
            )

    def layout(
        self, query_block: int, key_block: int, device: torch.device, from_start: bool = True
    ) -> BlockLayout:
        """Return the `BlockLayout` of this call, built once for all layers.

        Args:
            query_block, key_block: block sizes in tokens.
            device: device of the layer.
            from_start: if True, query blocks are counted from the first token of each sequence, so
                that chunks have the blocks of a single call. If False, from the first query of this
                call.
        """

        def build() -> BlockLayout:
            # layers on several devices share this mask
            valid = None if self.valid is None else self.valid.to(device)
            document = None if self.document is None else self.document.to(device)
            return BlockLayout.build(
                self.batch,
                self.q_length,
                self.slots if self.kv_length is None else self.kv_length,
                self.q_slot,
                valid,
                document,
                align=max(query_block, key_block),
                device=device,
                lengths=self.lengths,
                ahead=self._ahead(query_block) if from_start else 0,
                end=self._text_end(device),
                window=self.window,
            )

        return self.state.once(("layout", query_block, key_block, device, from_start), build)

    def _ahead(self, query_block: int) -> int | list[int]:
        """Return the tokens of each row before this call in the query block of its first query."""
        if self.document is not None or isinstance(self.q_slot, Tensor):
            return 0
        if self.valid is None:
            return self.q_slot % query_block
        if self._lengths is None:
            return 0
        before = [(row[0].tokens - row[0].queries) % query_block for row in self._lengths]
        return before if any(before) else 0

    def _text_end(self, device: torch.device) -> int | Tensor | None:
        """Return the prompt length, int or int32 [B, 1]; None if documents end with the call."""
        if not self.is_prefill or self.document is not None:
            return None
        lengths = self.prompt.lengths
        if lengths is None:
            return self.prompt.end
        return torch.tensor(lengths, dtype=torch.int32, device=device).unsqueeze(1)

    def reach(
        self, decode_tokens: int | float, least: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the number of keys that a decode step reads, without waiting for the device.

        Args:
            decode_tokens: `CabConfig.decode_tokens`; a share refers to the tokens of each row.
            least: tokens below which a row reads all of its keys.
            device: device of the results.

        Returns:
            (int64 [1], number of written keys; int32 [B], number of keys that each row reads).
            Computed once for all layers.
        """

        def measure() -> tuple[Tensor, Tensor]:
            length = self.q_slot + self.q_length
            if isinstance(length, Tensor):
                length = length.to(device).reshape(1)
            else:
                length = torch.full((1,), length, dtype=torch.int64, device=device)
            own = length.expand(self.batch)
            if self.valid is not None:
                valid = self.valid.to(device)
                written = torch.arange(valid.shape[1], device=device) < length
                own = (valid & written).sum(-1)
            if isinstance(decode_tokens, int):
                wanted = torch.full_like(own, decode_tokens)
            else:
                wanted = (own * decode_tokens).ceil().long()
            everything = torch.iinfo(torch.int32).max
            return length, wanted.masked_fill(own < least, everything).to(torch.int32)

        return self.state.once(("reach", device), measure)

    def dense_rows(self, start: int, stop: int, low: int, high: int, device: Any) -> Tensor:
        """Return the dense mask of some queries and keys, True for visible keys.

        Args:
            start, stop: range of the queries in this call.
            low, high: range of the key slots.
            device: device of the mask.

        Returns:
            bool [B or 1, 1, stop - start, high - low].
        """
        query = self.q_slot + torch.arange(start, stop, device=device).unsqueeze(-1)
        key = torch.arange(low, high, device=device)
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        seen = seen.unsqueeze(0)
        if self.valid is not None:
            seen = seen & self.valid[:, None, low:high].to(device)
        if self.chunks_from is not None and self.document is None:
            begin = self.chunks_from.to(device).view(-1, 1, 1)
            seen = seen & ((key - begin) // self.window == (query - begin) // self.window)
        if self.document is not None:
            document = self.document.to(device)
            own = document[:, self.q_slot + start : self.q_slot + stop, None]
            seen = seen & (own == document[:, None, low:high])
        # a padding query sees itself, because softmax over no keys is NaN
        return (seen | (key == query)).unsqueeze(1)


AHEAD = "has a mask that lets tokens see later ones"


def not_causal(model: str, refusal: str) -> str:
    """Return the error for a model whose mask has an unsupported pattern."""
    return (
        f"{model} {refusal}; 'cab' computes causal attention, with or without sliding windows. "
        "Load the model with attn_implementation='sdpa'."
    )


def too_short(tokens: int, keys: int | str) -> str:
    """Return the error for an attention_mask with fewer tokens than keys."""
    return (
        f"attention_mask has {tokens} tokens and there are {keys} keys. Pass one number for each "
        "token, including the tokens in the cache."
    )


def of_another_kind(mask: Any) -> str:
    """Return the error for an attention_mask that is not a padding mask."""
    return (
        "attention_mask must be None or the 2-D padding mask [batch, tokens] of the tokenizer, got "
        f"{short(mask)}. Use attn_implementation='sdpa' for other masks."
    )
