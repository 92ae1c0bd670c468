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
    """Offloading of the checkpoints of the first ``num_layers`` layers of a model.

    A checkpoint is the input of a layer, which gradient checkpointing saves. The first layers are
    offloaded because their backward passes come last.

    Args:
        num_layers: number of layers with offloaded checkpoints.
        device: the device of the model. On a CPU, checkpoints are copied too, without a stream.
        chunk_bytes: size of a chunk of pinned memory. A checkpoint may use several chunks.

    Attributes:
        host_bytes: bytes of all chunks, free or in use.
    """

    def __init__(
        self, num_layers: int, device: torch.device, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.num_layers, self.chunk_bytes = num_layers, chunk_bytes
        self.host_bytes = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free_chunks: list[Tensor] = []  # chunks that are not in use
        # weak reference to the latest saved input; the autograd graph has the strong reference
        self._last_input: Callable[[], _LayerInput | None] = lambda: None

    def reserve_host_memory(self, checkpoint_bytes: int) -> None:
        """Pin the memory of all checkpoints now instead of in the first step.

        ``checkpoint_bytes`` is the size of the input of a layer.
        """
        while (
            self.host_bytes
            < self.num_layers * self._count_chunks(checkpoint_bytes) * self.chunk_bytes
        ):
            self._free_chunks.append(self._allocate_chunk())

    def install_in_layers(self, model: nn.Module) -> None:
        """Install offloading in the first ``num_layers`` layers of ``model``.

        Gradient checkpointing must be on.

        Raises:
            ValueError: the model has fewer than ``num_layers`` layers with gradient checkpointing.
        """
        checkpointed_layers = [
            module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
        ]
        accepted_layers = (
            f"at most {len(checkpointed_layers)}, the number of layers that are checkpointed "
            "one by one"
        )
        require(
            self.num_layers <= len(checkpointed_layers),
            "offload_layers",
            self.num_layers,
            accepted_layers,
        )
        for layer_index, layer in enumerate(checkpointed_layers):
            layer._gradient_checkpointing_func = partial(self._checkpoint, layer_index)

    def _checkpoint(
        self, layer_index: int, layer_function: Callable[..., Any], hidden: Tensor, *layer_args: Any
    ) -> Any:
        """Call ``layer_function`` on ``hidden`` under gradient checkpointing."""
        # these hooks receive the inputs of the layer only: torch's checkpoint installs its own
        # hooks for the tensors inside
        pack_hook = partial(self._pack, layer_index, hidden.data_ptr())
        with saved_tensors_hooks(pack_hook, self._unpack):
            return checkpoint(layer_function, hidden, *layer_args, use_reentrant=False)

    def _pack(self, layer_index: int, hidden_address: int, tensor: Tensor) -> Tensor | _LayerInput:
        """Return the object that autograd stores in place of a saved tensor of a layer.

        For the hidden states, start the copy to the host, free the device memory of the previous
        layer's input, and return an `_LayerInput`. Other tensors are returned detached.
        """
        if tensor.data_ptr() != hidden_address or not tensor.numel():
            return tensor.detach()
        previous_input = self._last_input()
        if previous_input is not None and previous_input.chunks:
            # the previous layer's copy to the host must end before its device memory is reused
            self._wait_for_copy(previous_input)
            previous_input.tensor = None
        saved_input = _LayerInput(
            self, tensor.detach().contiguous(), previous_input if layer_index else None
        )
        if layer_index < self.num_layers:
            saved_input.chunks = [
                self._free_chunks.pop() if self._free_chunks else self._allocate_chunk()
                for _ in range(self._count_chunks(tensor.nbytes))
            ]
            self._copy_pieces(
                saved_input,
                zip(saved_input.chunks, self._split_bytes(saved_input.tensor), strict=True),
            )
        self._last_input = weakref.ref(saved_input)
        return saved_input

    def _unpack(self, packed_object: Tensor | _LayerInput) -> Tensor:
        """Return the tensor that `_pack` received; start fetching the previous layer's input."""
        if isinstance(packed_object, Tensor):
            return packed_object
        self._fetch(packed_object)
        self._wait_for_copy(packed_object)
        if packed_object.previous_input is not None:
            self._fetch(packed_object.previous_input)
        return packed_object.tensor

    def _fetch(self, saved_input: _LayerInput) -> None:
        """Start copying a checkpoint to the device if it is only on the host."""
        if saved_input.tensor is None:
            # allocated on the compute stream, which waits for the copy before it reads or frees the
            # memory
            saved_input.tensor = torch.empty(
                saved_input.shape, dtype=saved_input.dtype, device=saved_input.device
            )
            self._copy_pieces(
                saved_input,
                zip(self._split_bytes(saved_input.tensor), saved_input.chunks, strict=True),
            )

    def _copy_pieces(self, saved_input: _LayerInput, piece_pairs: Any) -> None:
        """Copy (target, source) pieces of a checkpoint on the copy stream.

        The copies start after all work that the compute stream has queued.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(saved_input.device))
        # without a stream, on a CPU, this context has no effect
        with torch.cuda.stream(self._stream):
            for target_piece, source_piece in piece_pairs:
                num_copied_bytes = min(target_piece.numel(), source_piece.numel())
                target_piece[:num_copied_bytes].copy_(
                    source_piece[:num_copied_bytes], non_blocking=True
                )
        if self._stream is not None:
            saved_input.copy_event = self._stream.record_event()

    def _wait_for_copy(self, saved_input: _LayerInput) -> None:
        """Make the compute stream wait for the last copy of a checkpoint."""
        if saved_input.copy_event is not None:
            torch.cuda.current_stream(saved_input.device).wait_event(saved_input.copy_event)
            saved_input.copy_event = None

    def _split_bytes(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the bytes of ``tensor``, uint8, split into pieces of at most ``chunk_bytes``."""
        return tensor.view(-1).view(torch.uint8).split(self.chunk_bytes)

    def _count_chunks(self, num_bytes: int) -> int:
        """Return the number of chunks for a tensor of ``num_bytes``."""
        return -(-num_bytes // self.chunk_bytes)

    def _allocate_chunk(self) -> Tensor:
        """Allocate a chunk of host memory, pinned if the device is a GPU."""
        self.host_bytes += self.chunk_bytes
        return torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)


class _LayerInput:
    """The input of a layer between its forward and its backward pass.

    Attributes:
        offload: the `Offload` that owns the chunks.
        tensor: the input on the device; None while the input is only on the host.
        previous_input: the input of the previous layer, which the backward pass needs next; None
            for the first layer.
        chunks: pinned memory with a copy of the input; empty if the input is not offloaded.
        copy_event: event after the last copy; None after the compute stream has waited for it.
    """

    def __init__(
        self, offload: Offload, tensor: Tensor, previous_input: _LayerInput | None
    ) -> None:
        self.offload, self.previous_input = offload, previous_input
        self.tensor: Tensor | None = tensor
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.chunks: list[Tensor] = []
        self.copy_event: torch.cuda.Event | None = None

    def __del__(self) -> None:
        # also without a backward pass, the copy must end before device memory is reused
        self.offload._wait_for_copy(self)
        # reusing chunks is safe: copies on one stream run in the order in which they start
        self.offload._free_chunks.extend(self.chunks)
