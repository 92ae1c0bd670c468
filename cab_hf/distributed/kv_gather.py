"""All-gather of K and V by slices of KV heads, and reduce-scatter of their gradients.

The all-gather of the next slice overlaps with attention over the current slice, in the forward and
the backward pass. The backward pass gathers slices again. Autograd therefore saves only the K and V
shard of each rank, not K and V of the whole sequence in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cab_hf.distributed.exchange import finish, start_all_gather, start_reduce_scatter
from cab_hf.distributed.sharding import ShardMap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# default number of KV heads per slice. A pass of CAB over 131,072 tokens and 8 KV heads on two
# H200s took 19.6 ms with 1 head, 17.6 with 2, 17.0 with 4 and 18.0 with 8. Nothing overlaps with
# the first gather, and every slice ends with idle parts of the GPU
KV_HEADS_TOGETHER = 4
# (k [B, h, N', D], v [B, h, N', D_v], number of the slice) -> (out, log-sum-exp)
Attend = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class KVGather:
    """The all-gathers of K and V of one attention call, and the reduce-scatters of gradients.

    Args:
        k: keys of this rank, [B, H_kv, n, D].
        v: values of this rank, [B, H_kv, n, D_v].
        shard_map: the places of the tokens of all ranks.
        group: the ranks that hold one sequence.
        heads_k_stride: KV heads per slice.
        regather_kv: True to gather slices again in the backward pass, False to save them.
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
        starts = range(0, k.shape[1], heads_k_stride)
        self.slices = [slice(i, min(i + heads_k_stride, k.shape[1])) for i in starts]
        self._pending: dict[int, tuple[Tensor, Work]] = {}
        self._pending_grads: list[Work] = []
        # (number, tensor) of the slice that the backward pass has gathered again
        self._regathered: tuple[int, Tensor] | None = None

    def prefetch(self, i: int) -> None:
        """Start the all-gather of slice ``i``, unless it is started already or does not exist."""
        if not 0 <= i < len(self.slices) or i in self._pending:
            return
        heads = self.slices[i]
        self._pending[i] = start_all_gather(_concat(self.k[:, heads], self.v[:, heads]), self.group)

    def wait(self, i: int) -> tuple[Tensor, Tensor]:
        """Return K and V of slice ``i`` in the order of the layout, as views of one tensor."""
        return self._split(self._wait_slice(i).index_select(0, self.shard_map.source))

    def attending(self, i: int, k: Tensor) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves no data of slice ``i``.

        Autograd saves only offsets and strides, and the backward pass gathers the slice again.
        Active hooks, such as those of gradient checkpointing or offload, save all other tensors.
        They never receive the slice, because they might copy or keep it.

        Args:
            i: number of the slice.
            k: keys of the slice, whose storage identifies the slice.
        """
        if not self.regather_kv or not torch.is_grad_enabled():
            return nullcontext()
        slice_of = k.untyped_storage()._cdata
        # the same lookup as in torch.utils.checkpoint, for the hooks around this context
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack, unpack = outer or (_identity, _identity)

        def packed(x: Tensor) -> Any:
            if x.untyped_storage()._cdata == slice_of:
                return _StorageView(x.shape, x.stride(), x.storage_offset())
            return pack(x)

        def unpacked(x: Any) -> Tensor:
            if isinstance(x, _StorageView):
                return self._regather(i).as_strided(x.size, x.stride, x.offset)
            return unpack(x)

        return saved_tensors_hooks(packed, unpacked)

    def _regather(self, i: int) -> Tensor:
        """Return slice ``i`` for the backward pass, and start the all-gather of slice ``i - 1``."""
        if self._regathered is None or self._regathered[0] != i:
            self._regathered = None
            self.prefetch(i)
            self.prefetch(i - 1)
            self._regathered = i, self._wait_slice(i).index_select(0, self.shard_map.source)
        return self._regathered[1]

    def reduce_scatter_grads(self, i: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Start a reduce-scatter; return this rank's dK and dV, valid after `wait_grads`.

        Args:
            i: number of the slice.
            dk: gradient of the gathered keys, [B, h, N', D].
            dv: gradient of the gathered values, [B, h, N', D_v].
        """
        self._regathered = None
        index, padding = self.shard_map.local_index
        grads = _concat(dk, dv).index_select(0, index)
        if padding is not None:
            grads.index_fill_(0, padding, 0.0)
        own_grads, work = start_reduce_scatter(grads, self.group)
        self._pending_grads.append(work)
        return self._split(own_grads)

    def _wait_slice(self, i: int) -> Tensor:
        """Return slice ``i`` of all ranks in the order of the ranks, [W * n, B, h, D + D_v]."""
        self.prefetch(i)
        both, work = self._pending.pop(i)
        finish(work, self.group)
        return both

    def _split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Return views [B, h, n, D] and [B, h, n, D_v] of the result of `_concat`."""
        both, dim = both.permute(1, 2, 0, 3), self.k.shape[-1]
        return both[..., :dim], both[..., dim:]

    def wait_grads(self) -> None:
        """Wait for all reduce-scatters of gradients."""
        for work in self._pending_grads:
            finish(work, self.group)
        self._pending_grads.clear()


def over_slices(gather: KVGather, k: Tensor, v: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """Call ``attend`` for every slice of k and v; return (out, log-sum-exp) of all heads.

    Args:
        gather: the all-gathers of k and v.
        k: keys of this rank, [B, H_kv, n, D].
        v: values of this rank, [B, H_kv, n, D_v].
        attend: function of gathered K, gathered V and the number of the slice.
    """
    tracked = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    placeholders = _SplitGrads.apply(gather, k, v) if tracked else None
    outs, sums = [], []
    gather.prefetch(0)
    for i in range(len(gather.slices)):
        gather.prefetch(i + 1)
        if tracked:
            keys, values = _GatherSlice.apply(gather, i, *placeholders[2 * i :][:2])
        else:
            keys, values = gather.wait(i)
        with gather.attending(i, keys):
            out, lse = attend(keys, values, i)
        # free the memory of this slice for the next slice
        del keys, values
        outs.append(out)
        sums.append(lse.detach())
    return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


class _StorageView(NamedTuple):
    """Shape, strides and offset of a tensor in the storage of a slice."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _identity(x: Any) -> Any:
    return x


def _concat(k: Tensor, v: Tensor) -> Tensor:
    """Concatenate k and v to [n, B, h, D + D_v], with tokens first for collectives over ranks."""
    return torch.cat([x.permute(2, 0, 1, 3) for x in (k, v)], dim=-1)


class _SplitGrads(torch.autograd.Function):
    """Two placeholders per slice for k and v, which have shapes and gradients but no data."""

    @staticmethod
    def forward(ctx: Any, gather: KVGather, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.gather = gather
        return tuple(
            x.new_empty(1).expand(x[:, heads].shape) for heads in gather.slices for x in (k, v)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gather.wait_grads()
        return None, torch.cat(grads[::2], dim=1), torch.cat(grads[1::2], dim=1)


class _GatherSlice(torch.autograd.Function):
    """All-gather of one slice from its placeholders; backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, gather: KVGather, i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.gather, ctx.i = gather, i
        return gather.wait(i)

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gather.reduce_scatter_grads(ctx.i, dk, dv)
