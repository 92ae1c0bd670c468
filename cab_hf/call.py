"""The mask hook, and what the layers of one forward pass share.

The hook hands every layer one small `CabMask` instead of a 4-D tensor. It knows who may see whom,
where the tokens stand on the block grid, and carries what predictors hand from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import causal_mask_function

from cab_hf.frame import Frame, Length, whole_documents
from cab_hf.plan import BlockPlan

# a layer that gradient checkpointing computes again attends as it did the first time, or not at all
LEFT_EARLY = (
    "gradient checkpointing computes a layer again in the backward pass, and the model attends "
    "otherwise than in the forward pass: a `with` block of cab_hf.cab or cab_hf.context_parallel "
    "was left or entered in between, or apply_cab or remove_cab called. Call backward inside the "
    "block that the forward pass ran in."
)


class NotATensor(NotImplementedError, AttributeError):
    """A model computes with the mask itself. An AttributeError too, so that `hasattr` says no."""


class _NoShape(tuple[int, ...]):
    """The shape of what is no tensor: its length may be asked, a size may not."""

    mask: CabMask

    def __getitem__(self, index: Any) -> Any:
        raise self.mask.misused("a size")


@dataclass(eq=False)
class CabMask:
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
        slots: length of the key tensor a layer hands over; None where nobody has said.
        model: whose it is, for sentences about it.
        refusal: why no layer may use it; None where layers may. Models also make masks that none
            of their layers uses.
        handed: what predictors of one layer leave for those of later ones.
    """

    # transformers asks this and the shape of a mask to tell 2-D and 4-D tensors; this is neither
    ndim: ClassVar[int] = 0
    # block size of the plan that exact attention needs; None where a dense kernel may compute it
    exact_block: ClassVar[int | None] = None

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
    handed: dict[Any, Any] = field(default_factory=dict)
    _looked_for_documents: bool = False
    # of the document ids, where they are known without a wait
    _most_documents: int | None = None
    _lengths: list[list[Length]] | None = None
    _frames: dict[tuple[Any, ...], Frame] = field(default_factory=dict)
    _parsed: list[tuple[Any, Any]] = field(default_factory=list)
    # how each layer attended, by layer
    _attended: dict[Any, Any] = field(default_factory=dict)
    # of layers that gradients flow through
    _predicted: dict[Any, list[BlockPlan]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = _NoShape()
        shape.mask = self
        return shape

    def __getattr__(self, name: str) -> Any:
        raise self.misused(name)

    def __getitem__(self, index: Any) -> CabMask:
        """``mask[:, :, -n:, :]``, as Gemma 4 asks where layers compute the last n queries alone."""
        slices = isinstance(index, tuple) and all(isinstance(each, slice) for each in index)
        if not slices or len(index) != 4 or {index[i] == slice(None) for i in (0, 1, 3)} != {True}:
            raise self.misused("getitem")
        start, stop, step = index[2].indices(self.q_length)
        if (stop, step) != (self.q_length, 1) or start == stop:
            raise self.misused("getitem")
        if start == 0:
            return self
        # what the layers share is about all queries
        fresh = {"_frames": {}, "handed": {}, "_predicted": {}}
        return replace(self, q_length=stop - start, q_slot=self.q_slot + start, **fresh)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        masks = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)]
        # none of them where it stands in a list, as for torch.cat
        mask = masks[0] if masks else cls(0, 0, 0, 0)
        raise mask.misused(getattr(function, "__name__", "a function of torch"))

    def misused(self, what: str) -> NotATensor:
        """What a model is told that takes this for a tensor."""
        if in_backward_pass():
            return NotATensor(LEFT_EARLY)
        return NotATensor(
            f"{self.model} computes with its attention mask (asks it for {what!r}), of which 'cab' "
            "makes no tensor. Load it with attn_implementation='eager'."
        )

    def contiguous(self) -> CabMask:
        """Itself: generate() tidies the masks of static caches this way."""
        return self

    @property
    def plain(self) -> bool:
        """Nothing but causality."""
        return self.valid is None and self.document is None and self.window is None

    @property
    def lengths(self) -> list[list[Length]] | None:
        """Of the documents of every batch row.

        None where each row is one text without padding, and where nobody may wait for the device.
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
        all that is in it. While compiling nobody looks at positions.

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
                self.document = _documents_between(cu_seq_lens, self.batch, self.kv_length)
                self._most_documents = cu_seq_lens.shape[0]
            elif self._told_by(position_ids):
                starts = _starts(position_ids, self.valid)
        # a decode step is too short to pay for a wait
        if self.q_length > 1 and not torch.compiler.is_compiling():
            self._look(starts)

    def _told_by(self, position_ids: Tensor | None) -> bool:
        """Whether these may be looked at, and are one a token: those of pictures are several."""
        unknown = position_ids is None or position_ids.is_floating_point()
        if unknown or torch.compiler.is_compiling():
            return False
        return tuple(position_ids.shape) in ((1, self.q_length), (self.batch, self.q_length))

    def _look(self, starts: Tensor | None) -> None:
        """What the host must know of padding and of documents' ``starts``, in one wait."""
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

    def parsed(self, config: Any, parse: Callable[[Any], Any]) -> Any:
        """What ``parse`` makes of a model's ``config``, once a forward pass.

        Tables of budgets are long, and torch.compile traces every number that is looked at.
        """
        for known, result in self._parsed:
            if known is config:
                return result
        self._parsed.append((config, parse(config)))
        return self._parsed[-1][1]

    def require_as_before(self, layer: Any, how: Any) -> None:
        """Refuse a ``layer`` that is computed again and attends otherwise than the first time.

        Raises:
            RuntimeError: a backward pass finds another ``how`` than the forward pass had.
        """
        if torch.compiler.is_compiling():
            return
        if self._attended.setdefault(layer, how) == how:
            return
        if in_backward_pass():
            raise RuntimeError(LEFT_EARLY)
        self._attended[layer] = how

    def planned(self, layer: Any, query: Tensor, predict: Callable[[], BlockPlan]) -> BlockPlan:
        """What ``predict`` chooses for ``layer``, kept for a second forward pass.

        Gradient checkpointing computes a layer again in the backward pass: it then attends under
        the plan of the first time. A layer that a model calls several times is predicted anew.
        """
        if torch.compiler.is_compiling() or not query.requires_grad or _is_captured(query):
            return predict()
        kept = self._predicted.setdefault(layer, [])
        if not in_backward_pass():
            plan = predict()
            # lists of all layers would stand beside what the longest layer needs
            kept.append(plan.each(_put_by))
            return plan
        if len(kept) > 1:
            # nobody knows which of the calls this is, nor whose plans those before it had left
            self.handed.clear()
        if len(kept) != 1:
            return predict()
        return kept.pop().each(lambda x: x.to(query.device, non_blocking=True))

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
            seen = seen & (document[:, start:stop, None] == document[:, None, low:high])
        # a padding query would see nothing, and softmax over nothing is NaN: let it see itself
        return (seen | (key == query)).unsqueeze(1)


def _is_captured(x: Tensor) -> bool:
    # a graph that is replayed knows no host
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _put_by(x: Tensor) -> Tensor:
    """A copy in the host's memory, without waiting for it; on a CPU the tensor itself."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def in_backward_pass() -> bool:
    """Whether autograd runs, and what is computed is computed again."""
    # what torch.utils.checkpoint asks too
    return torch._C._current_graph_task_id() != -1


def _operator(name: str) -> Callable[..., Any]:
    def refused(self: CabMask, *_: Any) -> Any:
        raise self.misused(name)

    return refused


# Python asks the class for these, not `__getattr__`
for _name in ("setitem", "invert", "neg", "lt", "le", "gt", "ge"):
    setattr(CabMask, f"__{_name}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    setattr(CabMask, f"__{_name}__", _operator(_name))
    setattr(CabMask, f"__r{_name}__", _operator(_name))


def named(config: Any) -> str:
    """What a model calls itself, for sentences about it."""
    return getattr(config, "model_type", None) or "this model"


def cab_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | CabMask | None = None,
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
        ValueError: for a padding mask of another batch size.
    """
    # generate() with a static cache calls the hook, then the model does again with what it returned
    if isinstance(attention_mask, CabMask):
        return attention_mask
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

    refusal = _refusal(config, mask_function, local_size, use_vmap, q_length, batch_size, device)
    document = None
    if refusal is None and mask_function is not causal_mask_function and not decode:
        document = _documents(mask_function, batch_size, q_length, q_offset, device)
    return CabMask(
        batch_size,
        q_length,
        written,
        q_slot,
        valid,
        document,
        local_size,
        slots=kv_length,
        model=named(config),
        refusal=refusal,
    )


def _refusal(
    config: Any,
    mask_function: Any,
    local_size: int | None,
    use_vmap: bool,
    q_length: int,
    batch: int,
    device: Any,
) -> str | None:
    """Why no layer may attend as the arguments of the mask hook say; None where layers may."""
    if use_vmap:
        found = "adds an or_mask_function or and_mask_function"
    elif local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        found = f"attends in chunks of {local_size}"
    elif _looks_ahead(mask_function, q_length, batch, device):
        found = "has a mask that lets tokens see later ones"
    else:
        return None
    return (
        f"{named(config)} {found}; 'cab' computes causal attention, whole or under sliding "
        "windows. Load it with attn_implementation='sdpa'."
    )


def _looks_ahead(mask_function: Any, q_length: int, batch: int, device: Any) -> bool:
    """Whether a token sees the one behind it."""
    if mask_function is causal_mask_function or q_length == 1 or torch.compiler.is_compiling():
        return False
    row = torch.arange(batch, device=device).unsqueeze(-1)
    slot = torch.arange(q_length - 1, device=device).unsqueeze(0)
    return bool(mask_function(row, torch.zeros_like(row), slot, slot + 1).any())


def _documents(
    mask_function: Any, batch: int, q_length: int, q_offset: int | Tensor, device: Any
) -> Tensor | None:
    """Document ids int [B, N_q], read off transformers' own mask function.

    A document starts at a token that may not see the token before it.
    """
    row = torch.arange(batch, device=device).unsqueeze(-1)
    head = torch.zeros_like(row)
    slot = torch.arange(q_length, device=device).unsqueeze(0)
    before = (slot - 1).clamp(min=0)
    eager = not torch.compiler.is_compiling()
    starts = ~mask_function(row, head, slot, before).expand(batch, q_length) & (slot > 0)
    if eager and not bool(starts.any()):
        return None
    return starts.cumsum(-1)


def _documents_between(cu_seq_lens: Tensor, batch: int, length: int) -> Tensor:
    """Document ids int [B, N] of cumulative lengths: of one row for all, or of all rows in one.

    What lies behind the last is a document of its own.
    """
    slot = torch.arange(batch * length, device=cu_seq_lens.device)
    if not torch.compiler.is_compiling():
        end = int(cu_seq_lens[-1])
        if end > batch * length or (batch > 1 and end not in (length, batch * length)):
            raise ValueError(
                f"cu_seq_lens_q ends at {end} in a call of {batch} x {length} tokens; it must end "
                f"at {batch * length}."
            )
    if batch > 1:
        # lengths of one row begin again with every row
        slot = slot % cu_seq_lens[-1]
    return torch.bucketize(slot, cu_seq_lens[1:], right=True).unflatten(0, (batch, length))


def _starts(position_ids: Tensor, valid: Tensor | None) -> Tensor:
    """bool [B or 1, N]: real tokens that begin a document, the first of a row among them.

    A document begins where the position is below that of the real token before. One that repeats
    the position of a beginning begins another: the one before it was a document of one token.
    Positions that repeat elsewhere are those of a picture's tokens.
    """
    slot = torch.arange(position_ids.shape[1], device=position_ids.device)
    if valid is not None:
        valid = valid.to(position_ids.device)
        # padding has the position of the real token before it, and so begins nothing
        latest = torch.where(valid, slot, -1).cummax(-1).values
        position_ids = position_ids.expand(valid.shape[0], -1).gather(1, latest.clamp(min=0))
        position_ids = position_ids.masked_fill(latest < 0, torch.iinfo(position_ids.dtype).max)
    step = F.pad(position_ids[:, 1:].sub(position_ids[:, :-1]).sign(), (1, 0), value=-1)
    moved = torch.where(step != 0, slot, 0).cummax(-1).values
    starts = step.gather(1, moved) < 0
    return starts if valid is None else starts & valid
