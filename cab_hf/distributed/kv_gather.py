"""All-gather of K and V in slices of KV heads, and reduce-scatter of their gradients.

A slice has K and V of some KV heads. The all-gather of the next slice overlaps with attention over
the current slice, in the forward and the backward pass. The backward pass gathers slices again, so
that autograd saves only each rank's shard of K and V instead of K and V of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cab_hf.distributed.exchange import start_all_gather, start_reduce_scatter, wait_for_collective
from cab_hf.distributed.sharding import ShardMap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# default number of KV heads per slice. Attention over 131,072 tokens and 8 KV heads on two H200s
# took 19.6 ms with 1 head per slice, 17.6 with 2, 17.0 with 4 and 18.0 with 8. Large slices delay
# the first launch, with which no all-gather overlaps; many launches leave parts of the GPU idle
KV_HEADS_PER_GATHER = 4
# function of gathered k [B, h, N', D], gathered v [B, h, N', D_v] and the index of the slice, which
# returns output and log-sum-exp of the query heads of the slice
AttendSlice = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class KVGather:
    """The all-gathers of K and V of one attention call, and the reduce-scatters of gradients.

    Args:
        k: keys of this rank, [B, H_kv, n, D].
        v: values of this rank, [B, H_kv, n, D_v].
        shard_map: the slots of the tokens of all ranks, N' slots.
        group: the ranks that share the sequence.
        heads_k_stride: number of KV heads per slice, h.
        regather_kv: True to gather slices again in the backward pass, False to save all slices.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        shard_map: ShardMap,
        group: ProcessGroup,
        heads_k_stride: int,
        regather_kv: bool = True,
    ) -> None:
        self.k, self.v = k.detach(), v.detach()
        self.shard_map, self.group, self.regather_kv = shard_map, group, regather_kv
        slice_starts = range(0, k.shape[1], heads_k_stride)
        self.slices = [
            slice(start, min(start + heads_k_stride, k.shape[1])) for start in slice_starts
        ]
        # (receive buffer, work) of every all-gather that runs, by index of the slice
        self._pending_gathers: dict[int, tuple[Tensor, Work]] = {}
        self._pending_grad_scatters: list[Work] = []
        # (index, tensor) of the latest slice that the backward pass has gathered
        self._regathered_slice: tuple[int, Tensor] | None = None

    def prefetch(self, slice_index: int) -> None:
        """Start the all-gather of slice ``slice_index``.

        Has no effect if the all-gather is already running, or if there is no slice ``slice_index``.
        """
        if not 0 <= slice_index < len(self.slices) or slice_index in self._pending_gathers:
            return
        kv_heads = self.slices[slice_index]
        local_kv = _concat_kv(self.k[:, kv_heads], self.v[:, kv_heads])
        self._pending_gathers[slice_index] = start_all_gather(local_kv, self.group)

    def wait_for_kv(self, slice_index: int) -> tuple[Tensor, Tensor]:
        """Wait for the all-gather of a slice, and return its K and V as views of one tensor.

        Returns:
            K [B, h, N', D] and V [B, h, N', D_v] of all ranks, in the order of the slots.
        """
        return self._split_kv(self._wait_for_slice(slice_index))

    def exclude_slice_from_saved_tensors(
        self, slice_index: int, k: Tensor
    ) -> AbstractContextManager[Any]:
        """Return a context manager under which autograd saves no data of a slice.

        Instead of views of the slice, autograd saves their shapes, strides and offsets. The
        backward pass gathers the slice again. The context manager has no effect if ``regather_kv``
        is False.

        Outer hooks for saved tensors, such as hooks of gradient checkpointing or offload, receive
        all tensors except the slice, because these hooks might copy the slice.

        Args:
            slice_index: index of the slice.
            k: keys of the slice, whose storage identifies the slice.
        """
        if not self.regather_kv or not torch.is_grad_enabled():
            return nullcontext()
        slice_storage = k.untyped_storage()._cdata
        # torch.utils.checkpoint finds outer hooks by the same private function
        outer_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        outer_pack, outer_unpack = outer_hooks or (_identity, _identity)

        def pack(x: Tensor) -> Any:
            if x.untyped_storage()._cdata == slice_storage:
                return _StorageView(x.shape, x.stride(), x.storage_offset())
            return outer_pack(x)

        def unpack(packed_tensor: Any) -> Tensor:
            if isinstance(packed_tensor, _StorageView):
                return self._regather(slice_index).as_strided(
                    packed_tensor.shape, packed_tensor.strides, packed_tensor.storage_offset
                )
            return outer_unpack(packed_tensor)

        return saved_tensors_hooks(pack, unpack)

    def _regather(self, slice_index: int) -> Tensor:
        """Gather a slice again for the backward pass, and return the slice, [N', B, h, D + D_v].

        Also start the all-gather of the previous slice, which the backward pass needs next.
        """
        if self._regathered_slice is None or self._regathered_slice[0] != slice_index:
            self._regathered_slice = None
            self.prefetch(slice_index)
            self.prefetch(slice_index - 1)
            self._regathered_slice = slice_index, self._wait_for_slice(slice_index)
        return self._regathered_slice[1]

    def reduce_scatter_grads(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Start the reduce-scatter of the gradients of a slice.

        Args:
            dk: gradient of the gathered keys, [B, h, N', D].
            dv: gradient of the gathered values, [B, h, N', D_v].

        Returns:
            This rank's gradients, [B, h, n, D] and [B, h, n, D_v]. Their data is valid after
            `wait_for_grads`.
        """
        self._regathered_slice = None
        slots, padding_indices = self.shard_map.flat_slots
        grads = _concat_kv(dk, dv).index_select(0, slots)
        if padding_indices is not None:
            grads.index_fill_(0, padding_indices, 0.0)
        local_grads, work = start_reduce_scatter(grads, self.group)
        self._pending_grad_scatters.append(work)
        return self._split_kv(local_grads)

    def _wait_for_slice(self, slice_index: int) -> Tensor:
        """Return a gathered slice in the order of the slots of the layout, [N', B, h, D + D_v]."""
        self.prefetch(slice_index)
        shards, work = self._pending_gathers.pop(slice_index)
        wait_for_collective(work, self.group)
        return shards.index_select(0, self.shard_map.token_of_slot)

    def _split_kv(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return K [B, h, n, D] and V [B, h, n, D_v] as views of a result of `_concat_kv`."""
        kv, head_dim = kv.permute(1, 2, 0, 3), self.k.shape[-1]
        return kv[..., :head_dim], kv[..., head_dim:]

    def wait_for_grads(self) -> None:
        """Wait for all reduce-scatters of gradients."""
        for work in self._pending_grad_scatters:
            wait_for_collective(work, self.group)
        self._pending_grad_scatters.clear()


def attend_over_slices(
    kv_gather: KVGather, k: Tensor, v: Tensor, attend_slice: AttendSlice
) -> tuple[Tensor, Tensor]:
    """Compute attention slice by slice, while the next slice is gathered.

    Args:
        kv_gather: the all-gathers of k and v.
        k: keys of this rank, [B, H_kv, n, D].
        v: values of this rank, [B, H_kv, n, D_v].
        attend_slice: function of gathered K [B, h, N', D], gathered V [B, h, N', D_v] and the index
            of the slice. Returns the output and the log-sum-exp of the slice's heads.

    Returns:
        Output [B, H, n, D_v], and log-sum-exp [B, H, n] without gradient, of all heads.
    """
    needs_grad = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    placeholders = _SplitGrads.apply(kv_gather, k, v) if needs_grad else None
    outs_of_slices, lses_of_slices = [], []
    kv_gather.prefetch(0)
    for slice_index in range(len(kv_gather.slices)):
        kv_gather.prefetch(slice_index + 1)
        if needs_grad:
            k_placeholder, v_placeholder = (
                placeholders[2 * slice_index],
                placeholders[2 * slice_index + 1],
            )
            gathered_k, gathered_v = _GatherSlice.apply(
                kv_gather, slice_index, k_placeholder, v_placeholder
            )
        else:
            gathered_k, gathered_v = kv_gather.wait_for_kv(slice_index)
        with kv_gather.exclude_slice_from_saved_tensors(slice_index, gathered_k):
            out, lse = attend_slice(gathered_k, gathered_v, slice_index)
        # free the memory of this slice for the next slice
        del gathered_k, gathered_v
        outs_of_slices.append(out)
        lses_of_slices.append(lse.detach())
    return torch.cat(outs_of_slices, dim=1), torch.cat(lses_of_slices, dim=1)


class _StorageView(NamedTuple):
    """Shape, strides and offset of a tensor in the storage of a slice."""

    shape: torch.Size
    strides: tuple[int, ...]
    storage_offset: int


def _identity(x: Any) -> Any:
    return x


def _concat_kv(k: Tensor, v: Tensor) -> Tensor:
    """Concatenate k [B, h, n, D] and v [B, h, n, D_v] along channels to [n, B, h, D + D_v].

    The tokens are in dimension 0, because collectives concatenate ranks along dimension 0.
    """
    return torch.cat([x.permute(2, 0, 1, 3) for x in (k, v)], dim=-1)


class _SplitGrads(torch.autograd.Function):
    """A function of k and v that returns placeholders of k and v for every slice.

    A placeholder has the shape of the slice but no data. The backward pass concatenates the
    gradients of all placeholders to dK and dV.
    """

    @staticmethod
    def forward(ctx: Any, kv_gather: KVGather, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.kv_gather = kv_gather
        return tuple(
            x.new_empty(1).expand(x[:, kv_heads].shape)
            for kv_heads in kv_gather.slices
            for x in (k, v)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.kv_gather.wait_for_grads()
        return None, torch.cat(grads[::2], dim=1), torch.cat(grads[1::2], dim=1)


class _GatherSlice(torch.autograd.Function):
    """The all-gather of one slice, whose backward pass starts a reduce-scatter of the gradients.

    The placeholders ``k`` and ``v`` connect the slice to `_SplitGrads` in autograd's graph.
    """

    @staticmethod
    def forward(
        ctx: Any, kv_gather: KVGather, slice_index: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.kv_gather = kv_gather
        return kv_gather.wait_for_kv(slice_index)

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.kv_gather.reduce_scatter_grads(dk, dv)
