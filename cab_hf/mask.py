"""The mask hook: what every layer gets instead of a 4-D tensor, and what it says.

A `CabMask` knows who may see whom and where the tokens stand on the block grid. It is also where
the layers of one forward pass leave what they share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import causal_mask_function

from cab_hf import packing
from cab_hf.checks import short
from cab_hf.chunks import goes_on
from cab_hf.fit import name_of
from cab_hf.forward_pass import ForwardPass
from cab_hf.frame import Frame, Length, whole_documents
from cab_hf.not_a_tensor import NotATensor


@dataclass(eq=False)
class CabMask(NotATensor, ForwardPass):
    """What may be attended, for one forward pass; every layer of one kind gets the same object.

    Slots are indices into the key tensor a layer hands over.

    Attributes:
        batch, q_length, kv_length: of this call; ``kv_length`` counts the keys written so far,
            less than the key tensor's length for a static cache. None where that would take a
            device sync (decoding on a static cache).
        q_slot: slot of the first query, int or 0-d tensor.
        valid: bool [B, N_k], False for padding keys; None when no key is padding.
        document: int [B, N_k], equal for tokens of one packed document; None when not packed.
        window: sliding-window width in tokens; None without one.
        slots: length of the key tensor a layer hands over; None where the caller did not say.
        model: its name, for error messages.
        refusal: why no layer may use it; None where layers may. Models also make masks that none
            of their layers uses.
        goes_on: whether it is known that more of the prompt is read in another call: the last
            queries are then no end, at which questions stand.
        exact_block: block size of the plan under which exact attention is computed; None where a
            dense kernel may compute it.
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
    goes_on: bool = False
    exact_block: int | None = None
    _looked_for_documents: bool = False
    # of the document ids, where they are known without a wait
    _most_documents: int | None = None
    _lengths: list[list[Length]] | None = None
    _frames: dict[tuple[Any, ...], Frame] = field(default_factory=dict)
    _reach: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __getitem__(self, index: Any) -> CabMask:
        """``mask[:, :, -n:, :]``, as Gemma 4 asks where layers compute the last n queries alone."""
        everything = slice(None)
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        if not isinstance(rows, slice) or index != (everything, everything, rows, everything):
            return super().__getitem__(index)
        start, stop, step = rows.indices(self.q_length)
        if (stop, step) != (self.q_length, 1) or start == stop:
            return super().__getitem__(index)
        if start == 0:
            return self
        # what the layers share is about all queries
        fresh = {"_frames": {}, "_reach": {}, "shared_state": {}, "_predicted": {}}
        rest = replace(self, q_length=stop - start, q_slot=self.q_slot + start, **fresh)
        if self._lengths is not None and self.document is None:
            # of padded rows, which have fewer queries now
            rest._lengths = None
            rest._look(None)
        return rest

    @property
    def plain(self) -> bool:
        """Nothing but causality."""
        return self.valid is None and self.document is None and self.window is None

    @property
    def lengths(self) -> list[list[Length]] | None:
        """Of the documents of every batch row.

        None where each row is one text without padding, and where waiting for the device is not
        allowed.
        """
        known = self._lengths is not None or self.document is None
        if not known and not torch.compiler.is_compiling():
            document, valid = self.document, self.valid
            valid = torch.ones_like(document, dtype=torch.bool) if valid is None else valid
            self._lengths = whole_documents(valid, document.to(valid.device), self._most_documents)
        return self._lengths

    @property
    def longest(self) -> Length | None:
        """The most queries and the most tokens of any document; None where `lengths` is."""
        if self.lengths is None:
            return None
        everyone = [length for row in self.lengths for length in row]
        return Length(max(x.queries for x in everyone), max(x.tokens for x in everyone))

    def find_documents(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> None:
        """Recognise packing and padding that only the attention call can see, once a forward pass.

        A row is packed where ``cu_seq_lens``, int [documents + 1], says so, or else where
        ``position_ids``, int [B or 1, N_q], restart, whatever mask or cache comes with them:
        transformers looks at them only where there is neither. A call that continues a cache sees
        all that is in it. Positions are not read while compiling.

        Raises:
            ValueError: for ``cu_seq_lens`` of another number of tokens.
            NotImplementedError: for ``cu_seq_lens`` in a call that continues a cache.
        """
        if self._looked_for_documents:
            return
        self._looked_for_documents = True
        begins = self.q_length == self.kv_length
        if cu_seq_lens is not None and not begins:
            raise NotImplementedError(
                f"cu_seq_lens_q is set in a call of {self.q_length} tokens that continues a cache; "
                "'cab' packs documents in one call. Leave it out, or the cache."
            )
        starts = None
        if self.document is None and begins and self.q_length > 1:
            if cu_seq_lens is not None:
                self.document = packing.documents_between(cu_seq_lens, self.batch, self.kv_length)
                self._most_documents = cu_seq_lens.shape[0]
            elif self._readable(position_ids):
                starts = packing.document_starts(position_ids, self.valid)
        self._look(starts)

    def _readable(self, position_ids: Tensor | None) -> bool:
        """Whether these may be looked at, and are one a token: those of pictures are several."""
        unknown = position_ids is None or position_ids.is_floating_point()
        if unknown or torch.compiler.is_compiling():
            return False
        return tuple(position_ids.shape) in ((1, self.q_length), (self.batch, self.q_length))

    def _look(self, starts: Tensor | None) -> None:
        """What the host must know of padding and of documents' ``starts``, in one wait.

        Not for a decode step, which is too short to pay for it.
        """
        if self.q_length == 1 or torch.compiler.is_compiling():
            return
        asked = [] if starts is None else [starts.sum(-1).expand(self.batch)]
        if self.valid is not None:
            mine = self.valid[:, self.q_slot : self.q_slot + self.q_length]
            asked = [x.to(self.valid.device) for x in asked]
            asked += [mine.sum(-1), self.valid.sum(-1)]
        if not asked:
            return
        counts = torch.stack(asked, dim=-1).tolist()
        if starts is not None:
            self._most_documents = max(row[0] for row in counts)
            if self._most_documents > 1:
                self.document = (starts.cumsum(-1) - 1).clamp(min=0).expand(self.batch, -1)
        if self.valid is not None and all(row[-1] == self.kv_length for row in counts):
            # the mask-free kernels are faster
            self.valid = None
        if self.valid is not None and self.document is None:
            self._lengths = [[Length(*row[-2:])] for row in counts]

    def frame(self, query_block: int, key_block: int, device: torch.device) -> Frame:
        """Where the tokens of this call stand on the block grid; made once for all layers."""
        key = (query_block, key_block, device)
        if key not in self._frames:
            # layers of a model spread over devices share this mask
            valid = None if self.valid is None else self.valid.to(device)
            document = None if self.document is None else self.document.to(device)
            self._frames[key] = Frame.build(
                self.batch,
                self.q_length,
                self.kv_length,
                self.q_slot,
                valid,
                document,
                align=max(query_block, key_block),
                device=device,
                lengths=self.lengths,
            )
        return self._frames[key]

    def reach(self, decode_tokens: int | float, device: torch.device) -> tuple[Tensor, Tensor]:
        """What a step of decode may read and does, without a wait; made once for all layers.

        Args:
            decode_tokens: of the model's `CabConfig`; a share is of all that is written.

        Returns:
            (int64 [1], keys written so far; int32 [1], how many of them are read).
        """
        if device not in self._reach:
            length = self.q_slot + self.q_length
            if isinstance(length, Tensor):
                length = length.to(device).reshape(1)
            else:
                length = torch.full((1,), length, dtype=torch.int64, device=device)
            if isinstance(decode_tokens, int):
                wanted = torch.full((1,), decode_tokens, dtype=torch.int32, device=device)
            else:
                wanted = (length * decode_tokens).ceil().to(torch.int32)
            self._reach[device] = length, wanted
        return self._reach[device]

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
        if self.document is not None:
            document = self.document.to(device)
            own = document[:, self.q_slot + start : self.q_slot + stop, None]
            seen = seen & (own == document[:, None, low:high])
        # a padding query would see nothing, and softmax over nothing is NaN: let it see itself
        return (seen | (key == query)).unsqueeze(1)


def cab_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | NotATensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> CabMask:
    """The mask hook registered beside "cab": a `CabMask` instead of a [B, 1, N_q, N_k] tensor.

    Called by transformers once a forward pass and kind of layer, with its own arguments.

    Patterns other than causal, sliding-window and packed are refused by the layer that uses them:
    BART's decoder has a mask made for the encoder that it may not have.

    Raises:
        ValueError: for a mask that is not 2-D, or of another batch size.
    """
    # generate() with a static cache calls the hook, then the model does again with what it
    # returned; continuous batching brings a mask of its own
    if isinstance(attention_mask, NotATensor):
        return attention_mask
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(of_another_kind(attention_mask))
    eager = not torch.compiler.is_compiling()
    decode = q_length == 1
    if isinstance(q_offset, Tensor):
        # a static cache that has begun: its counter is live
        q_offset = int(q_offset) if eager and not decode else q_offset.clone()
    q_slot = q_offset - kv_offset
    # a static cache's keys reach beyond what is written
    written = None if isinstance(q_slot, Tensor) else min(kv_length, q_slot + q_length)

    valid = None
    if attention_mask is not None:
        if attention_mask.shape[0] != batch_size:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[0]} rows and the batch {batch_size}; "
                "give one row for each text."
            )
        valid = attention_mask[:, kv_offset : kv_offset + (written or kv_length)].to(
            device, torch.bool
        )
        valid = F.pad(valid, (0, (written or kv_length) - valid.shape[1]), value=False)

    model, document = name_of(config), None
    refusal = _refusal(config, local_size, use_vmap)
    if refusal is None and mask_function is not causal_mask_function and not decode:
        pattern = mask_function, batch_size, q_length, device
        if eager and packing.looks_ahead(*pattern):
            refusal = "has a mask that lets tokens see later ones"
        else:
            document = packing.documents_of(*pattern)
    if refusal is not None:
        refusal = (
            f"{model} {refusal}; 'cab' computes causal attention, whole or under sliding windows. "
            "Load it with attn_implementation='sdpa'."
        )
    return CabMask(
        batch_size,
        q_length,
        written,
        q_slot,
        valid,
        document,
        local_size,
        slots=kv_length,
        model=model,
        refusal=refusal,
        goes_on=eager and written is not None and goes_on(written),
    )


def _refusal(config: Any, local_size: int | None, use_vmap: bool) -> str | None:
    """What the arguments of the mask hook ask for beside causal attention, as half a sentence."""
    if use_vmap:
        return "adds an or_mask_function or and_mask_function"
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        return f"attends in chunks of {local_size}"
    return None


def of_another_kind(mask: Any) -> str:
    """What is said of an attention_mask that is no padding mask."""
    return (
        f"attention_mask is {short(mask)}; 'cab' takes the 2-D padding mask [batch, tokens] of the "
        "tokenizer, or none. Use attn_implementation='sdpa' for a mask of your own."
    )
