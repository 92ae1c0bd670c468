"""Offload the inputs of layers to pinned host memory while layers compute.

Gradient checkpointing saves the input of each layer, [B, N, D]. torch's ``save_on_cpu`` would copy
that input on the compute stream, and pin new memory for each copy. This module copies on a second
stream, and reuses pinned memory. The input of layer i is copied to the host while layer i computes,
and back to the device during the backward pass of layer i + 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from cab_hf.checks import require

# bytes of a chunk of pinned memory: a power of two, because torch rounds pinned memory up to one
CHUNK_BYTES = 2**28


class Offload:
    """Offloading of the checkpoints of the first ``layers`` layers of a model.

    A checkpoint is the input of a layer, which gradient checkpointing saves. The first layers are
    offloaded because their backward passes come last.

    Args:
        layers: number of layers with offloaded checkpoints.
        device: the device of the model. On a CPU, checkpoints are copied too, without a stream.
        chunk_bytes: size of a chunk of pinned memory. A checkpoint may use several chunks.

    Attributes:
        host_bytes: bytes of all chunks, free or in use.
    """

    def __init__(self, layers: int, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.layers, self.chunk_bytes = layers, chunk_bytes
        self.host_bytes = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[Tensor] = []  # chunks that are not in use
        # weak reference to the latest saved input; the autograd graph has the strong reference
        self._last: Callable[[], _Input | None] = lambda: None

    def reserve(self, checkpoint_bytes: int) -> None:
        """Pin the memory of all checkpoints now instead of in the first step.

        ``checkpoint_bytes`` is the size of the input of a layer.
        """
        while self.host_bytes < self.layers * self._num_chunks(checkpoint_bytes) * self.chunk_bytes:
            self._free.append(self._pinned())

    def enable(self, model: nn.Module) -> None:
        """Install offloading in the first ``layers`` layers of ``model``.

        Gradient checkpointing must be on.

        Raises:
            ValueError: the model has fewer than ``layers`` layers with gradient checkpointing.
        """
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        accepted = f"at most {len(layers)}, the number of layers that are checkpointed one by one"
        require(self.layers <= len(layers), "offload_layers", self.layers, accepted)
        for index, layer in enumerate(layers):
            layer._gradient_checkpointing_func = partial(self._checkpoint, index)

    def _checkpoint(
        self, index: int, function: Callable[..., Any], hidden: Tensor, *args: Any
    ) -> Any:
        """Call ``function`` of layer ``index`` on ``hidden`` under gradient checkpointing."""
        # these hooks receive the inputs of the layer only: torch's checkpoint installs its own
        # hooks for the tensors inside
        pack = partial(self._pack, index, hidden.data_ptr())
        with saved_tensors_hooks(pack, self._unpack):
            return checkpoint(function, hidden, *args, use_reentrant=False)

    def _pack(self, index: int, hidden_address: int, x: Tensor) -> Tensor | _Input:
        """Return the object that autograd stores in place of a saved tensor of layer ``index``.

        For the hidden states, start the copy to the host, free the device memory of the previous
        layer's input, and return an `_Input`. Other tensors are returned detached.
        """
        if x.data_ptr() != hidden_address or not x.numel():
            return x.detach()
        previous = self._last()
        if previous is not None and previous.chunks:
            # the previous layer's copy to the host must end before its device memory is reused
            self._wait_for(previous)
            previous.tensor = None
        saved_input = _Input(self, x.detach().contiguous(), previous if index else None)
        if index < self.layers:
            saved_input.chunks = [
                self._free.pop() if self._free else self._pinned()
                for _ in range(self._num_chunks(x.nbytes))
            ]
            self._copy(
                saved_input, zip(saved_input.chunks, self._pieces(saved_input.tensor), strict=True)
            )
        self._last = weakref.ref(saved_input)
        return saved_input

    def _unpack(self, packed: Tensor | _Input) -> Tensor:
        """Return the tensor that `_pack` received; start fetching the previous layer's input."""
        if isinstance(packed, Tensor):
            return packed
        self._fetch(packed)
        self._wait_for(packed)
        if packed.previous is not None:
            self._fetch(packed.previous)
        return packed.tensor

    def _fetch(self, saved: _Input) -> None:
        """Start copying a checkpoint to the device if it is only on the host."""
        if saved.tensor is None:
            # allocated on the compute stream, which waits for the copy before it reads or frees the
            # memory
            saved.tensor = torch.empty(saved.shape, dtype=saved.dtype, device=saved.device)
            self._copy(saved, zip(self._pieces(saved.tensor), saved.chunks, strict=True))

    def _copy(self, saved: _Input, pairs: Any) -> None:
        """Copy each (target, source) of ``pairs``, pieces of a checkpoint, on the copy stream.

        The copies start after all work that the compute stream has queued.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(saved.device))
        # without a stream, on a CPU, this context has no effect
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                size = min(target.numel(), source.numel())
                target[:size].copy_(source[:size], non_blocking=True)
        if self._stream is not None:
            saved.copied = self._stream.record_event()

    def _wait_for(self, saved: _Input) -> None:
        """Make the compute stream wait for the last copy of a checkpoint."""
        if saved.copied is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.copied)
            saved.copied = None

    def _pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the bytes of ``x``, uint8, split into pieces of at most ``chunk_bytes``."""
        return x.view(-1).view(torch.uint8).split(self.chunk_bytes)

    def _num_chunks(self, num_bytes: int) -> int:
        """Return the number of chunks for a tensor of ``num_bytes``."""
        return -(-num_bytes // self.chunk_bytes)

    def _pinned(self) -> Tensor:
        """Allocate a chunk of host memory, pinned if the device is a GPU."""
        self.host_bytes += self.chunk_bytes
        return torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)


class _Input:
    """The input of a layer between its forward and its backward pass.

    Attributes:
        owner: the `Offload` that owns the chunks.
        tensor: the input on the device; None while the input is only on the host.
        previous: the input of the previous layer, which the backward pass needs next; None for the
            first layer.
        chunks: pinned memory with a copy of the input; empty if the input is not offloaded.
        copied: event after the last copy; None after the compute stream has waited for the event.
    """

    def __init__(self, owner: Offload, tensor: Tensor, previous: _Input | None) -> None:
        self.owner, self.previous = owner, previous
        self.tensor: Tensor | None = tensor
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.chunks: list[Tensor] = []
        self.copied: torch.cuda.Event | None = None

    def __del__(self) -> None:
        # also without a backward pass, the copy must end before device memory is reused
        self.owner._wait_for(self)
        # reusing chunks is safe: copies on one stream run in the order in which they start
        self.owner._free.extend(self.chunks)
