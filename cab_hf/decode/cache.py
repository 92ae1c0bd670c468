"""Layers of a KV cache that keep an index of the keys in addition to keys and values.

The layers replace those of transformers' `DynamicCache` and `StaticCache`. `index_keys` computes
the index once per key, when the key is written.
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

# tokens by which the buffers of a dynamic layer grow: a decode step rarely allocates memory
ROOM = 1024


class KeyIndex(NamedTuple):
    """The index of the keys that a layer's `update` returns, in their attribute ``cab_index``.

    Keys that are computed from these, such as a cast or a repetition, have no ``cab_index``.

    Attributes:
        index: index of the keys, on their device.
        channels: channels in the index; () for all channels.
    """

    index: Index
    channels: tuple[int, ...]


class IndexedLayer(CacheLayerMixin):
    """A cache layer with an index of its keys. Every change of the keys also changes the index.

    Subclasses define three methods:

    * `_append` writes new tokens and their index.
    * `_hold` sets the tensors of a plain layer.
    * `_change` applies a function to keys, values and index.

    Attributes:
        index: index of the keys; None before the first key.
        channels: channels in the index; () for all channels.
    """

    index: Index | None = None
    channels: tuple[int, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens, [B, H_kv, n, D].

        Returns the keys and values of all tokens; a static layer returns all slots.
        """
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
    """A growing layer with spare capacity, so that a decode step copies only its own token.

    ``keys``, ``values`` and the tensors of ``index`` are views of the written part,
    [B, H_kv, N, ...]. The layer concatenates tensors instead if gradients are recorded, because
    tensors that autograd saves must not be overwritten.
    """

    # buffers of keys, values and index tensors, with spare capacity after the written tokens
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
            num_unused = 0 if torch.is_grad_enabled() else (stop // ROOM + 1) * ROOM - stop
            old = (self.keys, self.values, *self.index) if start else len(new) * (None,)
            with decode.without_autocast(keys):
                self._buffers = tuple(
                    _grown(before, after, num_unused)
                    for before, after in zip(old, new, strict=True)
                )
        self._show(stop)

    def _has_room(self, stop: int) -> bool:
        if self._buffers is None or stop > self._buffers[0].shape[2]:
            return False
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return True
        # an inference tensor must not be written outside of inference mode
        return not self._buffers[0].is_inference()

    def _show(self, length: int) -> None:
        self._length = length
        self.keys, self.values, *index = (x[:, :, :length] for x in self._buffers)
        self.index = Index._make(index)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._buffers is not None:
            self._buffers = tuple(map(change, self._buffers))
            self._show(self._length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x[indices, ...])

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Remove tokens from the end; the arguments are those of transformers' own layer."""
        if self._buffers is not None:
            super().crop(*args, **kwargs)
            self._show(self.keys.shape[2])

    def reset(self) -> None:
        self.keys = self.values = self.index = self._buffers = None
        self.is_initialized = False

    def __getstate__(self) -> dict[str, Any]:
        # views that are copied one by one are no longer views of the buffers
        return vars(self) | {"keys": None, "values": None, "index": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._buffers is not None:
            self._show(self._length)


class IndexedStaticLayer(IndexedLayer, StaticLayer):
    """A layer with a fixed number of slots, for compiled models: a step changes only its tensors.

    ``index`` covers all slots. The index of a key is written in the slot of the key.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        parts = (
            x.repeat_interleave(self.max_cache_len, dim=2) for x in self._index_of_empty_slot()
        )
        self._point_to(Index._make(parts))

    def _index_of_empty_slot(self) -> Index:
        """Return the index of an empty slot, [B, H_kv, 1, ...]."""
        return decode.index_keys(torch.zeros_like(self.keys[:, :, :1]), self.channels)

    def _point_to(self, index: Index) -> None:
        self.index = index
        if not torch.compiler.is_compiling():
            # as transformers does for keys and values
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
            for x, empty in zip(self.index, self._index_of_empty_slot(), strict=True):
                x.copy_(empty)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.index is not None:
            self.keys, self.values, *index = map(change, (self.keys, self.values, *self.index))
            self.index = Index._make(index)


def _for_states_and_keys(name: str) -> Callable[..., None]:
    """Return a method that applies ``name`` to the linear-attention states and to the keys."""

    def method(self: LinearAttentionLayer, *args: Any) -> None:
        getattr(LinearAttentionLayer, name)(self, *args)
        getattr(super(LinearAttentionCacheLayerMixin, self), name)(*args)

    return method


BOTH = ("offload", "prefetch", "reset", "reorder_cache", "crop")


class IndexedHybridLayer(LinearAttentionAndFullAttentionLayer, IndexedDynamicLayer):
    """An `IndexedDynamicLayer` that also holds states of linear attention."""

    offload, prefetch, reset, reorder_cache, crop = map(_for_states_and_keys, BOTH)


class IndexedStaticHybridLayer(LinearAttentionAndStaticFullAttentionLayer, IndexedStaticLayer):
    """An `IndexedStaticLayer` that also holds states of linear attention."""

    offload, prefetch, reset, reorder_cache, crop = map(_for_states_and_keys, BOTH)

    def lazy_initialization(self, *key_value: Tensor, **states: Any) -> None:
        # transformers' layer distinguishes keys and states in the same way
        kind = IndexedStaticLayer if key_value else LinearAttentionLayer
        kind.lazy_initialization(self, *key_value, **states)


KINDS = {
    DynamicLayer: IndexedDynamicLayer,
    StaticLayer: IndexedStaticLayer,
    LinearAttentionAndFullAttentionLayer: IndexedHybridLayer,
    LinearAttentionAndStaticFullAttentionLayer: IndexedStaticHybridLayer,
}


def indexed(layer: CacheLayerMixin, channels: tuple[int, ...]) -> CacheLayerMixin:
    """Return a plain layer with an index of its keys; return any other layer unchanged.

    A static layer keeps its key and value tensors.
    """
    kind = KINDS.get(type(layer))
    if kind is None:
        return layer
    indexed = kind.__new__(kind)
    vars(indexed).update(vars(layer), channels=tuple(channels))
    if layer.is_initialized and layer.keys.numel():
        # the tensors of an offloaded layer are on the CPU
        indexed._hold(layer.keys.to(layer.device), layer.values.to(layer.device))
        if layer.keys.device != layer.device:
            indexed.offload()
    return indexed


def _grown(old: Tensor | None, new: Tensor, room: int) -> Tensor:
    """Return ``old``, then ``new``, then ``room`` uninitialised tokens, along dimension 2."""
    parts = [new] if old is None else [old, new]
    if room:
        parts.append(new.new_empty(*new.shape[:2], room, *new.shape[3:]))
    return torch.cat(parts, dim=2)
