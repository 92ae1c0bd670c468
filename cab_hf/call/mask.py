"""`CabMask`: what every layer gets instead of a 4-D mask tensor.

It knows which tokens may see which, and their places on the block grid. Its `ForwardState` is what
the layers of one forward pass share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cab_hf.call import packing
from cab_hf.call.forward_pass import ForwardState
from cab_hf.call.layout import Layout, Length, whole_documents
from cab_hf.call.placeholder import NotATensor
from cab_hf.call.scope import Prompt
from cab_hf.checks import short, warn_once

# equal tokens at the end of a row that look like padding, and by how much of the largest their
# values differ in the first layer at most
A_RUN, SAME_VALUE = 4, 1e-3


@dataclass(eq=False)
class CabMask(NotATensor):
    """What may be attended, for one forward pass; every layer of one kind gets the same object.

    Slots are indices into the key tensor a layer hands over.

    Attributes:
        batch, q_length, kv_length: of this call; ``kv_length`` counts the keys written so far,
            less than the key tensor's length for a static cache. None where that would take a
            device sync (decoding on a static cache).
        q_slot: slot of the first query, int or 0-d tensor.
        valid: bool [B, N_k], False for padding keys; None when no key is padding.
        document: int [B, N_k], equal for tokens of one packed document; None when not packed.
        window: sliding-window width in tokens, or that of chunks; None without.
        slots: length of the key tensor a layer hands over; None where the caller did not say.
        model: its name, for error messages.
        refusal: why no layer may use it; None where layers may. Models also make masks that none
            of their layers uses.
        prompt: what is read, up to where it is known to end; None where that is not known: the end
            of a call is then that of a prompt, and few queries are an answer.
        parallel: the `Parallel` of the ranks that hold the text; None where one process does.
        looks_ahead: whether a token sees a later one, bool [], where only the device knows: the
            first layer that uses the mask refuses it there. None where it is known that none does.
        chunks_from: int64 [B], of layers that attend in chunks the slot from which on a row counts
            them, where documents do not say it; None for others.
        position_ids: int [B or 1, N_q] that the model gives to the functions that make masks; None
            where it gives none. Layers may receive others, or none.
        exact_block: block size of the plan under which exact attention is computed; None where a
            dense kernel may compute it.
        state: what the layers share.
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
    looks_ahead: Tensor | None = None
    chunks_from: Tensor | None = None
    position_ids: Tensor | None = None
    exact_block: int | None = None
    # torch.compile traces no class as a factory
    state: ForwardState = field(default_factory=lambda: ForwardState())
    _looked_for_documents: bool = False
    # of the document ids, where they are known without a wait
    _most_documents: int | None = None
    _lengths: list[list[Length]] | None = None

    def __getitem__(self, index: Any) -> CabMask:
        """``mask[:, :, -n:, :]``, as Gemma 4 slices it for layers of the last n queries alone."""
        everything = slice(None)
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        if not isinstance(rows, slice) or index != (everything, everything, rows, everything):
            return super().__getitem__(index)
        start, stop, step = rows.indices(self.q_length)
        if (stop, step) != (self.q_length, 1) or start == stop:
            return super().__getitem__(index)
        return self._cut(start, stop)

    def _cut(self, start: int, stop: int) -> CabMask:
        """The mask of these queries alone, and of the keys up to the last of them."""
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
            # of padded rows, which have fewer queries now
            rest._lengths = None
            rest._look(None)
        return rest

    def pieces(self, steps: bool) -> list[tuple[slice, CabMask]]:
        """(queries, their mask) of what is attended apart: the prompt, and the answer behind it.

        Args:
            steps: whether an answer is attended token by token, as steps of decode are.
        """
        if self.prompt is None:
            return [(slice(None), self)]

        def cut() -> list[tuple[slice, CabMask]]:
            border = min(max(self.prompt.end - self.q_slot, 0), self.q_length)
            cuts = range(border, self.q_length) if steps else (border,) * (border < self.q_length)
            ends = sorted({0, *cuts, self.q_length})
            return [(slice(*x), self._cut(*x)) for x in pairwise(ends)]

        return self.state.once(("pieces", steps), cut)

    @property
    def in_prompt(self) -> bool:
        """Whether all queries are of a prompt whose end is known."""
        return self.prompt is not None and self.q_slot + self.q_length <= self.prompt.end

    def tail_from(self, blocks: int, query_block: int) -> int | None:
        """Slot of the first query block that holds one of the prompt's last ``blocks`` blocks.

        None where rows end in different places, and where the end of the prompt is not known.
        """
        if not self.in_prompt or self.prompt.lengths is not None or self.document is not None:
            return None
        return max(0, self.prompt.end - blocks * query_block) // query_block * query_block

    @property
    def behind_prompt(self) -> bool:
        """Whether all queries are of an answer, as far as that is known."""
        return self.prompt is not None and self.q_slot >= self.prompt.end

    @property
    def plain(self) -> bool:
        """Nothing but causality."""
        return self.valid is None and self.document is None and self.window is None

    @property
    def lengths(self) -> list[list[Length]] | None:
        """Of the documents of every batch row; of a prompt whose end is known, of all of it.

        None where each row is one text without padding, and where waiting for the device is not
        allowed.
        """
        if self.in_prompt and self.document is None:
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
        """The most queries and the most tokens of any document; None where they are the call's."""
        if self.in_prompt and self.document is None:
            return Length(self.prompt.longest, self.prompt.longest)
        if self.lengths is None:
            return None
        everyone = [length for row in self.lengths for length in row]
        return Length(max(x.queries for x in everyone), max(x.tokens for x in everyone))

    def find_documents(
        self, position_ids: Tensor | None, cu_seq_lens: Tensor | None, value: Tensor | None = None
    ) -> Tensor | None:
        """Recognise packing and padding that only the attention call can see, once a forward pass.

        Rows that end in runs of one token, as right padding does, are warned of where no mask came
        with them: ``value``, [B, H_kv, N, D_v] of the first layer, is alike for equal tokens.

        ``cu_seq_lens``, int [documents + 1], packs a row. Without it, a row is packed where
        position ids restart, also in a call with a mask or a cache, which transformers ignores.
        These are ``position_ids``, int [B or 1, N_q], or those of the mask if the layer has none.
        A call that continues a cache sees all that is in it.

        Returns:
            None, or while compiling a bool []: whether documents are packed that the graph mixes.

        Raises:
            ValueError: for ``cu_seq_lens`` of another number of tokens.
            NotImplementedError: for ``cu_seq_lens`` in a call that continues a cache.
        """
        if self._looked_for_documents:
            return None
        self._looked_for_documents = True
        if self.looks_ahead is not None:
            self._refuse_looking_ahead()
        begins = self.q_length == self.kv_length
        if cu_seq_lens is not None and not begins:
            raise NotImplementedError(
                f"cu_seq_lens_q is set in a call of {self.q_length} tokens that continues a cache; "
                "'cab' packs documents in one call. Leave it out, or the cache."
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
        """Return whether documents of these positions are not separate here, bool [].

        None if the call continues a cache, or if transformers has looked at the positions.
        """
        continues = self.kv_length is not None and self.q_length != self.kv_length
        if continues or (self.document is not None and self.chunks_from is None):
            return None
        valid = None if self.valid is None else self.valid[:, : self.q_length]
        starts = packing.document_starts(position_ids, valid)
        if self.document is None:
            mixed = (starts.sum(-1) > 1).any()
        else:
            # chunks, which are counted from document starts only if transformers has found these
            mixed = (starts & ~packing.begins(self.document)).any()
        # only the device knows whether a static cache has begun
        return mixed if self.kv_length is not None else mixed & (self.q_slot == 0)

    def _refuse_looking_ahead(self) -> None:
        """Make the mask tensors fail on the device where a token sees a later one."""
        refusal = self.looks_ahead, not_causal(self.model, AHEAD)
        if self.document is not None:
            self.document = packing.refuse_where(self.document, *refusal)
            return
        if self.valid is None:
            shape = self.batch, self.kv_length or self.slots
            self.valid = torch.ones(shape, dtype=torch.bool, device=self.looks_ahead.device)
        self.valid = packing.refuse_where(self.valid, *refusal)

    def _positions(self, position_ids: Tensor | None) -> Tensor | None:
        """Return the position ids of a layer or else of the mask that are whole, and one a token.

        Those of pictures are several a token.
        """
        shapes = (1, self.q_length), (self.batch, self.q_length)
        for given in (position_ids, self.position_ids):
            if given is not None and not given.is_floating_point() and tuple(given.shape) in shapes:
                return given
        return None

    def _look(self, starts: Tensor | None, value: Tensor | None = None) -> None:
        """What the host must know of padding and of documents' ``starts``, in one wait.

        And whether the rows of a ``value`` end in runs of one token.

        Not for a decode step, which is too short to pay for it.
        """
        step = self.q_length == 1 and not self.in_prompt
        if step or torch.compiler.is_compiling():
            return
        wanted = [] if starts is None else [starts.sum(-1).expand(self.batch)]
        if self.valid is not None:
            mine = self.valid[:, self.q_slot : self.q_slot + self.q_length]
            wanted = [x.to(self.valid.device) for x in wanted]
            wanted += [mine.sum(-1), self.valid.sum(-1)]
        if value is not None:
            # a layer that is computed again does not look again
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
            # the mask-free kernels are faster
            self.valid = None
        if self.valid is not None and self.document is None:
            self._lengths = [[Length(*row[-2:])] for row in counts]

    def _warn_of_padding(self, rows: int) -> None:
        """Warn, once a process and model, of a batch of which some ``rows`` end in runs."""
        if 0 < rows < self.batch and self.document is None:
            warn_once(
                (self.model, "right padding"),
                f"{self.model} reads {self.batch} texts without an attention_mask, of which {rows} "
                f"end in {A_RUN} or more equal tokens: if these are padding, 'cab' reads them as "
                "text, and the result of one row depends on the others; pass the attention_mask of "
                "the tokenizer.",
            )

    def layout(
        self, query_block: int, key_block: int, device: torch.device, from_start: bool = True
    ) -> Layout:
        """The places of this call's tokens on the block grid; made once for all layers.

        Args:
            from_start: whether query blocks are counted from the first token of each row's text,
                as they are in one call; else from the first of this call.
        """

        def build() -> Layout:
            # layers of a model spread over devices share this mask
            valid = None if self.valid is None else self.valid.to(device)
            document = None if self.document is None else self.document.to(device)
            return Layout.build(
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
        """Tokens of each row's text before this call that are in the query block of its first."""
        if self.document is not None or isinstance(self.q_slot, Tensor):
            return 0
        if self.valid is None:
            return self.q_slot % query_block
        if self._lengths is None:
            return 0
        before = [(row[0].tokens - row[0].queries) % query_block for row in self._lengths]
        return before if any(before) else 0

    def _text_end(self, device: torch.device) -> int | Tensor | None:
        """Tokens of the prompt, int or int32 [B, 1]; None where documents end with the call."""
        if not self.in_prompt or self.document is not None:
            return None
        lengths = self.prompt.lengths
        if lengths is None:
            return self.prompt.end
        return torch.tensor(lengths, dtype=torch.int32, device=device).unsqueeze(1)

    def reach(
        self, decode_tokens: int | float, least: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """What a step of decode may read and does, without a wait; made once for all layers.

        Args:
            decode_tokens: of the model's `CabConfig`; a share is of a row's own tokens.
            least: tokens of a row below which it reads all of them.

        Returns:
            (int64 [1], keys written so far; int32 [B], how many of them each row reads).
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
        """bool [B or 1, 1, stop - start, high - low]: keys that these queries may see."""
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
        # a padding query would see nothing, and softmax over nothing is NaN: let it see itself
        return (seen | (key == query)).unsqueeze(1)


AHEAD = "has a mask that lets tokens see later ones"


def not_causal(model: str, refusal: str) -> str:
    """The error for a model whose mask is of a pattern that is not computed."""
    return (
        f"{model} {refusal}; 'cab' computes causal attention, whole or under sliding windows. "
        "Load it with attn_implementation='sdpa'."
    )


def too_short(tokens: int, keys: int | str) -> str:
    """The error for an attention_mask with fewer tokens than there are keys."""
    return (
        f"attention_mask has {tokens} tokens and there are {keys} keys; give one number for each "
        "token, those in the cache among them."
    )


def of_another_kind(mask: Any) -> str:
    """The error for an attention_mask that is no padding mask."""
    return (
        f"attention_mask is {short(mask)}; 'cab' takes the 2-D padding mask [batch, tokens] of the "
        "tokenizer, or none. Use attn_implementation='sdpa' for a mask of your own."
    )
