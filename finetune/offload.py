"""Layer checkpoints offloaded to pinned memory of the host, copied while layers compute.

Gradient checkpointing keeps the input of each layer, [B, N, D]. torch's ``save_on_cpu`` copies it
on the computing stream, into memory that is pinned for each copy. Here a second stream copies: to
the host while the layer computes, and back during the backward pass of the layer behind it. Memory
is pinned once.
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

# a power of two: torch rounds what it pins up to the next
CHUNK_BYTES = 2**28


class Offload:
    """Offloads the checkpoints of the first ``layers`` of a model.

    Their backward passes come last, when the device holds few other checkpoints.

    Args:
        device: where the model is. On a CPU copies are made as well, without a stream.
        chunk_bytes: size of a chunk of pinned memory; a checkpoint takes as many as it needs.

    Attributes:
        host_bytes: size of all chunks, in use or not.
    """

    def __init__(self, layers: int, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.layers, self.chunk_bytes = layers, chunk_bytes
        self.host_bytes = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[Tensor] = []
        # the input saved last; a pass that is given up drops it
        self._last: Callable[[], _Input | None] = lambda: None

    def reserve(self, bytes_of_one: int) -> None:
        """Pin the memory of all checkpoints now, and not in the first step."""
        while self.host_bytes < self.layers * self._chunks_of(bytes_of_one) * self.chunk_bytes:
            self._free.append(self._pinned())

    def enable(self, model: nn.Module) -> None:
        """Take over the checkpoints of a model that has gradient checkpointing on.

        Raises:
            ValueError: it has fewer layers that transformers checkpoints.
        """
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        accepted = f"at most {len(layers)}, the layers that are checkpointed one by one"
        require(self.layers <= len(layers), "offload_layers", self.layers, accepted)
        for index, layer in enumerate(layers):
            layer._gradient_checkpointing_func = partial(self._checkpoint, index)

    def _checkpoint(
        self, index: int, function: Callable[..., Any], hidden: Tensor, *more: Any
    ) -> Any:
        """``function`` of a layer, computed again in the backward pass."""
        # these hooks see the inputs alone: inside, those of torch's checkpoint are in force
        pack = partial(self._pack, index, hidden.data_ptr())
        with saved_tensors_hooks(pack, self._unpack):
            return checkpoint(function, hidden, *more, use_reentrant=False)

    def _pack(self, index: int, hidden: int, x: Tensor) -> Tensor | _Input:
        if x.data_ptr() != hidden or not x.numel():
            return x.detach()
        last = self._last()
        if last is not None and last.chunks:
            # the copy began a layer ago; then the memory is the computing stream's again
            self._wait_for(last)
            last.tensor = None
        kept = _Input(self, x.detach().contiguous(), last if index else None)
        if index < self.layers:
            count = self._chunks_of(x.nbytes)
            kept.chunks = [self._free.pop() if self._free else self._pinned() for _ in range(count)]
            self._copy(kept, zip(kept.chunks, self._pieces(kept.tensor), strict=True))
        self._last = weakref.ref(kept)
        return kept

    def _unpack(self, kept: Tensor | _Input) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._fetch(kept)
        self._wait_for(kept)
        if kept.before is not None:
            self._fetch(kept.before)
        return kept.tensor

    def _fetch(self, kept: _Input) -> None:
        """Begin to copy a checkpoint to the device, unless it is there."""
        if kept.tensor is None:
            # allocated by the computing stream, which waits for the copy before it reads or frees
            kept.tensor = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
            self._copy(kept, zip(self._pieces(kept.tensor), kept.chunks, strict=True))

    def _copy(self, kept: _Input, pairs: Any) -> None:
        """Copy pairs (to, from) of pieces of a checkpoint, once the work so far is done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(kept.device))
        # of None it changes nothing
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                size = min(to.numel(), source.numel())
                to[:size].copy_(source[:size], non_blocking=True)
        if self._stream is not None:
            kept.copied = self._stream.record_event()

    def _wait_for(self, kept: _Input) -> None:
        """Have the computing stream wait for the last copy of a checkpoint."""
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
        tensor: on the device; None while the host alone has it.
        before: the input of the layer before, which is needed next.
        chunks: pinned memory that holds it; none where it is not offloaded.
        copied: recorded behind the last copy, until the computing stream has waited for it.
    """

    def __init__(self, owner: Offload, tensor: Tensor, before: _Input | None) -> None:
        self.owner, self.before = owner, before
        self.tensor: Tensor | None = tensor
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.chunks: list[Tensor] = []
        self.copied: torch.cuda.Event | None = None

    def __del__(self) -> None:
        # its memory goes back to the computing stream, also where a backward pass was left halfway
        self.owner._wait_for(self)
        # copies follow each other on one stream: no later one overtakes those of this checkpoint
        self.owner._free.extend(self.chunks)
