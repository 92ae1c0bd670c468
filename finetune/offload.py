"""Layer checkpoints offloaded to pinned host memory, copied while layers compute.

Gradient checkpointing keeps the input of each layer, [B, N, D]. torch's ``save_on_cpu`` copies it
on the compute stream, into memory that is pinned for each copy. Here a second stream copies to the
host while the layer computes, and back during the backward pass of the next layer. Memory is pinned
once.
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

# a power of two, because torch rounds pinned memory up to one
CHUNK_BYTES = 2**28


class Offload:
    """Offloading of the checkpoints of the first ``layers`` of a model.

    The backward passes of these layers come last, when the device has few other checkpoints.

    Args:
        layers: number of layers.
        device: the device of the model. A CPU makes copies too, without a stream.
        chunk_bytes: size of a chunk of pinned memory; a checkpoint uses as many chunks as it needs.

    Attributes:
        host_bytes: size of all chunks, in use or not.
    """

    def __init__(self, layers: int, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.layers, self.chunk_bytes = layers, chunk_bytes
        self.host_bytes = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[Tensor] = []
        # the latest saved input; an abandoned pass drops it
        self._last: Callable[[], _Input | None] = lambda: None

    def reserve(self, bytes_of_one: int) -> None:
        """Pin the memory of all checkpoints now instead of in the first step."""
        while self.host_bytes < self.layers * self._chunks_of(bytes_of_one) * self.chunk_bytes:
            self._free.append(self._pinned())

    def enable(self, model: nn.Module) -> None:
        """Take over the checkpoints of a model with gradient checkpointing.

        Raises:
            ValueError: transformers checkpoints fewer layers of the model.
        """
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        accepted = f"at most {len(layers)}, the number of layers that are checkpointed one by one"
        require(self.layers <= len(layers), "offload_layers", self.layers, accepted)
        for index, layer in enumerate(layers):
            layer._gradient_checkpointing_func = partial(self._checkpoint, index)

    def _checkpoint(
        self, index: int, function: Callable[..., Any], hidden: Tensor, *more: Any
    ) -> Any:
        """Call ``function`` of a layer, and recompute it in the backward pass."""
        # these hooks see the inputs only: inside, the hooks of torch's checkpoint apply
        pack = partial(self._pack, index, hidden.data_ptr())
        with saved_tensors_hooks(pack, self._unpack):
            return checkpoint(function, hidden, *more, use_reentrant=False)

    def _pack(self, index: int, hidden: int, x: Tensor) -> Tensor | _Input:
        if x.data_ptr() != hidden or not x.numel():
            return x.detach()
        last = self._last()
        if last is not None and last.chunks:
            # the copy started a layer ago; afterwards the memory belongs to the compute stream
            # again
            self._wait_for(last)
            last.tensor = None
        saved_input = _Input(self, x.detach().contiguous(), last if index else None)
        if index < self.layers:
            count = self._chunks_of(x.nbytes)
            saved_input.chunks = [
                self._free.pop() if self._free else self._pinned() for _ in range(count)
            ]
            self._copy(
                saved_input, zip(saved_input.chunks, self._pieces(saved_input.tensor), strict=True)
            )
        self._last = weakref.ref(saved_input)
        return saved_input

    def _unpack(self, kept: Tensor | _Input) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._fetch(kept)
        self._wait_for(kept)
        if kept.before is not None:
            self._fetch(kept.before)
        return kept.tensor

    def _fetch(self, kept: _Input) -> None:
        """Start copying a checkpoint to the device, unless it is there."""
        if kept.tensor is None:
            # allocated by the compute stream, which waits for the copy before it reads or frees the
            # memory
            kept.tensor = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
            self._copy(kept, zip(self._pieces(kept.tensor), kept.chunks, strict=True))

    def _copy(self, kept: _Input, pairs: Any) -> None:
        """Copy pairs (to, from) of pieces of a checkpoint, after the work queued so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(kept.device))
        # a stream of None has no effect
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                size = min(to.numel(), source.numel())
                to[:size].copy_(source[:size], non_blocking=True)
        if self._stream is not None:
            kept.copied = self._stream.record_event()

    def _wait_for(self, kept: _Input) -> None:
        """Make the compute stream wait for the last copy of a checkpoint."""
        if kept.copied is not None:
            torch.cuda.current_stream(kept.device).wait_event(kept.copied)
            kept.copied = None

    def _pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.view(-1).view(torch.uint8).split(self.chunk_bytes)

    def _chunks_of(self, size: int) -> int:
        return -(-size // self.chunk_bytes)

    def _pinned(self) -> Tensor:
        self.host_bytes += self.chunk_bytes
        return torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)


class _Input:
    """The input of a layer between its forward and its backward pass.

    Attributes:
        tensor: the input on the device; None while it is only on the host.
        before: the input of the layer before, which is needed next.
        chunks: pinned memory with the input; empty if it is not offloaded.
        copied: event after the last copy, until the compute stream has waited for it.
    """

    def __init__(self, owner: Offload, tensor: Tensor, before: _Input | None) -> None:
        self.owner, self.before = owner, before
        self.tensor: Tensor | None = tensor
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.chunks: list[Tensor] = []
        self.copied: torch.cuda.Event | None = None

    def __del__(self) -> None:
        # its memory returns to the compute stream, even if a backward pass was abandoned
        self.owner._wait_for(self)
        # copies on one stream are ordered: no later copy overtakes those of this checkpoint
        self.owner._free.extend(self.chunks)
