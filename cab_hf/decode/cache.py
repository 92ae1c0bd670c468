"""Layers of a KV cache that keep, beside keys and values, the index of the keys.

They replace those of transformers' own `DynamicCache` and `StaticCache`. The index is what
`index_keys` makes of the keys: it is made once a key, when the key is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
)

from cab_hf.ops import decode
from cab_hf.ops.decode import Index

# tokens by which the buffers of a dynamic layer grow
ROOM = 1024


class KeyIndex(NamedTuple):
    """The index of the keys that a layer's `update` returns, which is their ``cab_index``.

    Keys that are made of these, as a cast or a repetition makes them, have none.

    Attributes:
        index: of the keys, on their device.
        channels: those of the index; () for all.
    """

    index: Index
    channels: tuple[int, ...]


class IndexedLayer(CacheLayerMixin):
    """A layer with an index of its keys: whatever is done to them is done to the index.

    A kind has `_append`, which writes new tokens and their index, `_hold`, which takes over all
    that a plain layer holds, and `_change`, which has something done to keys, values and index.

    Attributes:
        index: of the keys; None before the first.
        channels: those that the index holds; () for all.
    """

    index: Index | None = None
    channels: tuple[int, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens, [B, H_kv, n, D]: all of both, of a static
        layer all slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states)
        self.keys.cab_index = KeyIndex(self.index, self.channels)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def offload(self) -> None:
        self._change(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change(lambda x: x.to(self.device, non_blocking=True))


class IndexedDynamicLayer(IndexedLayer, DynamicLayer):
    """A layer that grows, with room for the tokens to come: a step copies nothing but its token.

    ``keys``, ``values`` and what ``index`` has are views of what is written: [B, H_kv, N, ...].
    Where gradients are recorded they are concatenated instead, as nothing that autograd keeps may
    be written over.
    """

    # of keys, values and what the index has, with room behind what is written
    _buffers: tuple[Tensor, ...] | None = None
    _length = 0

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        self.lazy_initialization(keys, values)
        self._append(keys, values)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        new = keys, values, *decode.index_keys(keys.detach(), self.channels)
        start = self.get_seq_length()
        stop = start + keys.shape[2]
        if not torch.is_grad_enabled() and self._has_room(stop):
            for buffer, x in zip(self._buffers, new, strict=True):
                buffer[:, :, start:stop] = x
        else:
            room = 0 if torch.is_grad_enabled() else (stop // ROOM + 1) * ROOM - stop
            old = (self.keys, self.values, *self.index) if start else len(new) * (None,)
            with decode.as_they_are(keys):
                self._buffers = tuple(_grown(*each, room) for each in zip(old, new, strict=True))
        self._show(stop)

    def _has_room(self, stop: int) -> bool:
        if self._buffers is None or stop > self._buffers[0].shape[2]:
            return False
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return True
        # what was made in inference mode is not to be written outside of it
        return not self._buffers[0].is_inference()

    def _show(self, length: int) -> None:
        self._length = length
        self.keys, self.values, *index = (x[:, :, :length] for x in self._buffers)
        self.index = Index(*index)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._buffers is not None:
            self._buffers = tuple(map(change, self._buffers))
            self._show(self._length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x[indices, ...])

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Remove tokens from the end, so many as transformers' own layer would."""
        if self._buffers is not None:
            super().crop(*args, **kwargs)
            self._show(self.keys.shape[2])

    def reset(self) -> None:
        self.keys = self.values = self.index = self._buffers = None
        self.is_initialized = False

    def __getstate__(self) -> dict[str, Any]:
        # views that are copied one by one would not be views of the buffers any more
        return vars(self) | {"keys": None, "values": None, "index": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._buffers is not None:
            self._show(self._length)


class IndexedStaticLayer(IndexedLayer, StaticLayer):
    """A layer of so many slots, for compiled models: nothing but its tensors changes in a step.

    ``index`` is of all slots, written where the keys are.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        parts = (x.repeat_interleave(self.max_cache_len, dim=2) for x in self._of_no_key())
        self._point_to(Index(*parts))

    def _of_no_key(self) -> Index:
        """What the index has in a slot that is not written yet, [B, H_kv, 1, ...]."""
        return decode.index_keys(torch.zeros_like(self.keys[:, :, :1]), self.channels)

    def _point_to(self, index: Index) -> None:
        self.index = index
        if not torch.compiler.is_compiling():
            # as transformers has it of keys and values
            for x in index:
                torch._dynamo.mark_static_address(x)

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self._point_to(decode.index_keys(keys, self.channels))

    def _append(self, keys: Tensor, values: Tensor) -> None:
        decode.write_index(self.index, keys.detach(), self.channels, self.cumulative_length)
        StaticLayer.update(self, keys, values)

    def reset(self) -> None:
        super().reset()
        if self.index is not None:
            for x, empty in zip(self.index, self._of_no_key(), strict=True):
                x.copy_(empty)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.index is not None:
            self.keys, self.values, *index = map(change, (self.keys, self.values, *self.index))
            self.index = Index(*index)


def _of_both(name: str) -> Callable[..., None]:
    """A method of layers that have the states of linear attention beside keys: done to both."""

    def method(self: LinearAttentionLayer, *args: Any) -> None:
        getattr(LinearAttentionLayer, name)(self, *args)
        getattr(super(LinearAttentionCacheLayerMixin, self), name)(*args)

    return method


BOTH = ("offload", "prefetch", "reset", "reorder_cache", "crop")


class IndexedHybridLayer(LinearAttentionAndFullAttentionLayer, IndexedDynamicLayer):
    """An `IndexedDynamicLayer` that has states of linear attention as well."""

    offload, prefetch, reset, reorder_cache, crop = map(_of_both, BOTH)


class IndexedStaticHybridLayer(LinearAttentionAndStaticFullAttentionLayer, IndexedStaticLayer):
    """An `IndexedStaticLayer` that has states of linear attention as well."""

    offload, prefetch, reset, reorder_cache, crop = map(_of_both, BOTH)

    def lazy_initialization(self, *key_value: Tensor, **states: Any) -> None:
        # as transformers' layer distinguishes them
        kind = IndexedStaticLayer if key_value else LinearAttentionLayer
        kind.lazy_initialization(self, *key_value, **states)


KINDS = {
    DynamicLayer: IndexedDynamicLayer,
    StaticLayer: IndexedStaticLayer,
    LinearAttentionAndFullAttentionLayer: IndexedHybridLayer,
    LinearAttentionAndStaticFullAttentionLayer: IndexedStaticHybridLayer,
}


def indexed(layer: CacheLayerMixin, channels: tuple[int, ...]) -> CacheLayerMixin:
    """A plain layer with an index of what it holds, a static one in the same tensors; any other
    layer as it is."""
    kind = KINDS.get(type(layer))
    if kind is None:
        return layer
    made = kind.__new__(kind)
    vars(made).update(vars(layer), channels=tuple(channels))
    if layer.is_initialized and layer.keys.numel():
        # an offloaded layer holds its tensors elsewhere
        made._hold(layer.keys.to(layer.device), layer.values.to(layer.device))
        if layer.keys.device != layer.device:
            made.offload()
    return made


def _grown(old: Tensor | None, new: Tensor, room: int) -> Tensor:
    """``new`` behind ``old``, and ``room`` tokens that hold nothing yet."""
    parts = [new] if old is None else [old, new]
    if room:
        parts.append(new.new_empty(*new.shape[:2], room, *new.shape[3:]))
    return torch.cat(parts, dim=2)
