"""Layers of a KV cache with an index of the keys in addition to keys and values.

These layers replace the layers of transformers' `DynamicCache` and `StaticCache`. `index_keys`
computes the index once per key, when the key is written.
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

# tokens by which the buffers of a dynamic layer grow, so that few decode steps allocate memory
BUFFER_GROWTH_TOKENS = 1024


class KeyIndex(NamedTuple):
    """The index of a key tensor, as stored in the attribute ``cab_index`` of the tensor.

    `IndexedLayer.update` returns keys with this attribute. A tensor that is computed from the keys,
    for example by a cast, has no ``cab_index``.

    Attributes:
        index: index of the keys, on the device of the keys.
        channels: channels in the index; () for all channels.
    """

    index: Index
    channels: tuple[int, ...]


class IndexedLayer(CacheLayerMixin):
    """A cache layer with an index of its keys. Every change of the keys also changes the index.

    Subclasses define three methods:

    * `_append_tokens` writes new tokens and the index of their keys.
    * `_set_keys_and_values` sets the keys and values of a layer without an index.
    * `_transform_tensors` applies a function to the tensors of keys, values and index.

    Attributes:
        index: index of the keys; None before the first key.
        channels: channels in the index; () for all channels.
    """

    index: Index | None = None
    channels: tuple[int, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens, and return the keys and values of all tokens.

        Args:
            key_states: [B, H_kv, n, D], keys of the new tokens.
            value_states: [B, H_kv, n, D_v], values of the new tokens.
            args, kwargs: arguments of transformers' own layers, not read.

        Returns:
            Keys [B, H_kv, N, D] and values [B, H_kv, N, D_v], where N is the number of written
            tokens, and the number of slots of a static layer.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append_tokens(key_states, value_states)
        self.keys.cab_index = KeyIndex(self.index, self.channels)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace batch row i by batch row ``beam_idx[i]``, int64 [B]."""
        self._transform_tensors(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def offload(self) -> None:
        """Move keys, values and index to the CPU."""
        self._transform_tensors(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move keys, values and index back to the device of the layer."""
        self._transform_tensors(lambda x: x.to(self.device, non_blocking=True))


class IndexedDynamicLayer(IndexedLayer, DynamicLayer):
    """A growing layer with spare capacity, so that a decode step copies only the new token.

    ``keys``, ``values`` and the tensors of ``index`` are views [B, H_kv, N, ...] of buffers. If
    gradients are recorded, the layer concatenates tensors instead, because tensors that autograd
    saves must not be overwritten.
    """

    # keys, values and index tensors, with spare capacity after the written tokens
    _buffers: tuple[Tensor, ...] | None = None
    _length = 0

    def _set_keys_and_values(self, keys: Tensor, values: Tensor) -> None:
        self.lazy_initialization(keys, values)
        self._append_tokens(keys, values)

    def _append_tokens(self, keys: Tensor, values: Tensor) -> None:
        new_tensors = keys, values, *decode.index_keys(keys.detach(), self.channels)
        start = self.get_seq_length()
        stop = start + keys.shape[2]
        if not torch.is_grad_enabled() and self._can_write_in_place(stop):
            for buffer, new_tensor in zip(self._buffers, new_tensors, strict=True):
                buffer[:, :, start:stop] = new_tensor
        else:
            num_spare_tokens = 0
            if not torch.is_grad_enabled():
                num_spare_tokens = (stop // BUFFER_GROWTH_TOKENS + 1) * BUFFER_GROWTH_TOKENS - stop
            old_tensors = (None,) * len(new_tensors)
            if start:
                old_tensors = self.keys, self.values, *self.index
            with decode.without_autocast(keys):
                self._buffers = tuple(
                    _concatenate_tokens(old_tensor, new_tensor, num_spare_tokens)
                    for old_tensor, new_tensor in zip(old_tensors, new_tensors, strict=True)
                )
        self._set_views(stop)

    def _can_write_in_place(self, stop: int) -> bool:
        """Return True if the buffers can be written up to token ``stop``."""
        if self._buffers is None or stop > self._buffers[0].shape[2]:
            return False
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return True
        # an inference tensor must not be written outside of inference mode
        return not self._buffers[0].is_inference()

    def _set_views(self, length: int) -> None:
        """Set keys, values and index to the first ``length`` tokens of the buffers."""
        self._length = length
        self.keys, self.values, *index = (x[:, :, :length] for x in self._buffers)
        self.index = Index._make(index)

    def _transform_tensors(self, transform: Callable[[Tensor], Tensor]) -> None:
        if self._buffers is not None:
            self._buffers = tuple(map(transform, self._buffers))
            self._set_views(self._length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row ``repeats`` times, next to each other."""
        self._transform_tensors(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Remove all batch rows except ``indices``, a tensor that indexes the batch dimension."""
        self._transform_tensors(lambda x: x[indices, ...])

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Remove tokens from the end; see `DynamicLayer.crop` of transformers for the arguments."""
        if self._buffers is not None:
            super().crop(*args, **kwargs)
            self._set_views(self.keys.shape[2])

    def reset(self) -> None:
        """Remove all tokens and the buffers."""
        self.keys = self.values = self.index = self._buffers = None
        self.is_initialized = False

    def __getstate__(self) -> dict[str, Any]:
        # copies of views would be separate tensors; `__setstate__` makes new views
        return vars(self) | {"keys": None, "values": None, "index": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._buffers is not None:
            self._set_views(self._length)


class IndexedStaticLayer(IndexedLayer, StaticLayer):
    """A layer with a fixed number of slots, for compiled models.

    A decode step changes only the contents of tensors. ``index`` covers all slots: the index of a
    key is written to the slot of the key.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys, values and index of all slots, all zero."""
        super().lazy_initialization(key_states, value_states)
        empty_slots = (
            x.repeat_interleave(self.max_cache_len, dim=2) for x in self._make_empty_slot_index()
        )
        self._set_index(Index._make(empty_slots))

    def _make_empty_slot_index(self) -> Index:
        """Return the index of a key of zeros, tensors [B, H_kv, 1, ...]."""
        return decode.index_keys(torch.zeros_like(self.keys[:, :, :1]), self.channels)

    def _set_index(self, index: Index) -> None:
        self.index = index
        if not torch.compiler.is_compiling():
            # CUDA graphs then use the index without a copy; transformers marks keys and values too
            for x in index:
                torch._dynamo.mark_static_address(x)

    def _set_keys_and_values(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self._set_index(decode.index_keys(keys, self.channels))

    def _append_tokens(self, keys: Tensor, values: Tensor) -> None:
        decode.write_index(self.index, keys.detach(), self.channels, self.cumulative_length)
        StaticLayer.update(self, keys, values)

    def reset(self) -> None:
        """Set keys, values and index of all slots to zero."""
        super().reset()
        if self.index is not None:
            for x, empty_slot in zip(self.index, self._make_empty_slot_index(), strict=True):
                x.copy_(empty_slot)

    def _transform_tensors(self, transform: Callable[[Tensor], Tensor]) -> None:
        if self.index is not None:
            self.keys, self.values, *index = map(transform, (self.keys, self.values, *self.index))
            self.index = Index._make(index)


def _make_hybrid_method(method_name: str) -> Callable[..., None]:
    """Return a method that calls a method of `LinearAttentionLayer`, then of the indexed layer.

    The first call changes the linear-attention states, and the second call keys and values.
    """

    def change_states_and_keys(self: LinearAttentionLayer, *args: Any) -> None:
        getattr(LinearAttentionLayer, method_name)(self, *args)
        getattr(super(LinearAttentionCacheLayerMixin, self), method_name)(*args)

    return change_states_and_keys


class IndexedHybridLayer(LinearAttentionAndFullAttentionLayer, IndexedDynamicLayer):
    """An `IndexedDynamicLayer` that also contains states of linear attention."""

    offload = _make_hybrid_method("offload")
    prefetch = _make_hybrid_method("prefetch")
    reset = _make_hybrid_method("reset")
    reorder_cache = _make_hybrid_method("reorder_cache")
    crop = _make_hybrid_method("crop")


class IndexedStaticHybridLayer(LinearAttentionAndStaticFullAttentionLayer, IndexedStaticLayer):
    """An `IndexedStaticLayer` that also contains states of linear attention."""

    offload = _make_hybrid_method("offload")
    prefetch = _make_hybrid_method("prefetch")
    reset = _make_hybrid_method("reset")
    reorder_cache = _make_hybrid_method("reorder_cache")
    crop = _make_hybrid_method("crop")

    def lazy_initialization(self, *args: Tensor, **kwargs: Any) -> None:
        """Allocate keys and values, or linear-attention states.

        A call with positional arguments allocates keys and values. transformers' own layer
        distinguishes the two cases in the same way.
        """
        layer_class = IndexedStaticLayer if args else LinearAttentionLayer
        layer_class.lazy_initialization(self, *args, **kwargs)


# class of a cache layer of transformers -> class with an index that replaces it
INDEXED_CLASS_BY_LAYER_CLASS = {
    DynamicLayer: IndexedDynamicLayer,
    StaticLayer: IndexedStaticLayer,
    LinearAttentionAndFullAttentionLayer: IndexedHybridLayer,
    LinearAttentionAndStaticFullAttentionLayer: IndexedStaticHybridLayer,
}


def make_indexed_layer(layer: CacheLayerMixin, channels: tuple[int, ...]) -> CacheLayerMixin:
    """Return a cache layer with the tokens of ``layer`` and an index of their keys.

    Args:
        layer: layer of a cache. The layer is returned unchanged if `INDEXED_CLASS_BY_LAYER_CLASS`
            does not contain its class. The new static layer uses the key and value tensors of
            ``layer``.
        channels: channels in the index; () for all channels.
    """
    layer_class = INDEXED_CLASS_BY_LAYER_CLASS.get(type(layer))
    if layer_class is None:
        return layer
    indexed_layer = layer_class.__new__(layer_class)
    vars(indexed_layer).update(vars(layer), channels=tuple(channels))
    if layer.is_initialized and layer.keys.numel():
        # the tensors of an offloaded layer are on the CPU
        indexed_layer._set_keys_and_values(
            layer.keys.to(layer.device), layer.values.to(layer.device)
        )
        if layer.keys.device != layer.device:
            indexed_layer.offload()
    return indexed_layer


def _concatenate_tokens(
    old_tensor: Tensor | None, new_tensor: Tensor, num_spare_tokens: int
) -> Tensor:
    """Concatenate along dimension 2, and append ``num_spare_tokens`` uninitialised tokens."""
    tensors = [new_tensor] if old_tensor is None else [old_tensor, new_tensor]
    if num_spare_tokens:
        tensors.append(
            new_tensor.new_empty((*new_tensor.shape[:2], num_spare_tokens, *new_tensor.shape[3:]))
        )
    return torch.cat(tensors, dim=2)
