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

from cab_hf.frame import Frame
from cab_hf.plan import EXACT_BLOCK, BlockPlan
from cab_hf.predictors import Call


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
    """

    # transformers asks this and the shape of a mask to tell 2-D and 4-D tensors; this is neither
    ndim: ClassVar[int] = 0

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
    _looked_for_documents: bool = False
    _frames: dict[tuple[Any, ...], Frame] = field(default_factory=dict)
    _plans: dict[Frame, BlockPlan] = field(default_factory=dict)
    _handed: dict[Any, Any] = field(default_factory=dict)
    _parsed: list[tuple[Any, Any]] = field(default_factory=list)

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
        fresh = {"_frames": {}, "_plans": {}, "_handed": {}}
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

    def find_documents(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> None:
        """Recognise packing that only the attention call can see, once a forward pass.

        transformers looks for restarting positions only where there is no cache; ``cu_seq_lens``
        reach the attention function alone.
        """
        looked = self._looked_for_documents or self.document is not None
        if looked or self.q_length == 1 or self.q_length != self.kv_length:
            return
        self._looked_for_documents = True
        if cu_seq_lens is not None:
            slot = torch.arange(self.kv_length, device=cu_seq_lens.device)
            document = torch.bucketize(slot, cu_seq_lens[1:], right=True)
            self.document = document.expand(self.batch, -1)
        elif (
            self.valid is None
            and position_ids is not None
            and position_ids.shape[-1] == self.q_length
            and position_ids.ndim == 2
            and not torch.compiler.is_compiling()
        ):
            restarts = F.pad(position_ids[:, 1:] < position_ids[:, :-1], (1, 0))
            if restarts.any():
                self.document = restarts.cumsum(-1).expand(self.batch, -1)

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
            )
        return self._frames[key]

    def everything(self, frame: Frame) -> BlockPlan:
        """The plan that leaves out nothing of ``frame``; made once for all layers and heads."""
        if frame not in self._plans:
            self._plans[frame] = BlockPlan.causal(frame.spans, 1, EXACT_BLOCK, EXACT_BLOCK)
        return self._plans[frame]

    def parsed(self, config: Any, parse: Callable[[Any], Any]) -> Any:
        """What ``parse`` makes of a model's ``config``, once a forward pass.

        Tables of budgets are long, and torch.compile traces every number that is looked at.
        """
        for known, result in self._parsed:
            if known is config:
                return result
        self._parsed.append((config, parse(config)))
        return self._parsed[-1][1]

    def call(self, frame: Frame, scale: float, layer: int | None) -> Call:
        """What the predictor of one layer is told; what it hands on reaches the later layers."""
        return Call(frame.spans, scale, layer, self._handed)

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
        # one sync a prefill buys the mask-free kernels; a decode step is too short to pay it
        if eager and not decode and bool(valid.all()):
            valid = None

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
