"""K and V on their way: gathered a slice of KV heads at a time, their gradients summed at home.

The next slice is under way while this one is attended, forward and backward. Between the two
nobody holds the gathered slices, and they are gathered again: what autograd keeps is then each
rank's own K and V, not those of the whole text in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cab_hf.distributed.exchange import finish, start_gather, start_reduce_scatter
from cab_hf.distributed.sharding import ShardMap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# over two H200s a turn of CAB on 131,072 tokens took 17.0 ms by 4 of 8 heads, 17.6 by 2, 18.0 by 8
# and 19.6 by 1: the first slice hides behind nothing, and each ends with idle parts
KV_HEADS_TOGETHER = 4
# (k, v) of some KV heads, [B, h, N', D] and [B, h, N', D_v], to what is computed of them
Attend = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class KVGather:
    """The K and V of one attention, to everyone and back.

    Args:
        k, v: [B, H_kv, n, D] and [B, H_kv, n, D_v] of this rank.
        shard_map: the places of the tokens of all ranks.
        heads_k_stride: KV heads that travel together.
        regather_kv: whether slices are gathered once more for the backward pass, or kept.
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
        self._coming: dict[int, tuple[Tensor, Work]] = {}
        self._going: list[Work] = []
        # the slice that a backward pass has gathered again, and its number
        self._again: tuple[int, Tensor] | None = None

    def start(self, i: int) -> None:
        """Set slice ``i`` under way; nothing if it is, or is none."""
        if not 0 <= i < len(self.slices) or i in self._coming:
            return
        heads = self.slices[i]
        self._coming[i] = start_gather(_together(self.k[:, heads], self.v[:, heads]), self.group)

    def arrive(self, i: int) -> tuple[Tensor, Tensor]:
        """K and V of slice ``i`` in the order of the layout, parts of one tensor."""
        return self._apart(self._arrived(i).index_select(0, self.shard_map.source))

    def attending(self, i: int, k: Tensor) -> AbstractContextManager[Any]:
        """Inside, autograd saves no part of slice ``i``, of which ``k`` is one, but what it takes
        to gather it again.

        Everything else is saved by the hooks in force, such as those of gradient checkpointing and
        of offload. These never see the slice: whether they keep, copy or drop what they are given
        cannot be told.
        """
        if not self.regather_kv or not torch.is_grad_enabled():
            return nullcontext()
        slice_of = k.untyped_storage()._cdata
        # as torch.utils.checkpoint looks it up, to save by hooks around it
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack, unpack = outer or (_same, _same)

        def packed(x: Tensor) -> Any:
            if x.untyped_storage()._cdata == slice_of:
                return _Part(x.shape, x.stride(), x.storage_offset())
            return pack(x)

        def unpacked(x: Any) -> Tensor:
            return self._gathered_again(i).as_strided(*x) if isinstance(x, _Part) else unpack(x)

        return saved_tensors_hooks(packed, unpacked)

    def _gathered_again(self, i: int) -> Tensor:
        """Slice ``i`` for the backward pass, with the one before it set under way."""
        if self._again is None or self._again[0] != i:
            self._again = None
            self.start(i)
            self.start(i - 1)
            self._again = i, self._arrived(i).index_select(0, self.shard_map.source)
        return self._again[1]

    def reduce_scatter_grads(self, i: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's K and V; valid after `landed`."""
        self._again = None
        place, padding = self.shard_map.home
        both = _together(dk, dv).index_select(0, place)
        if padding is not None:
            both.index_fill_(0, padding, 0.0)
        mine, work = start_reduce_scatter(both, self.group)
        self._going.append(work)
        return self._apart(mine)

    def _arrived(self, i: int) -> Tensor:
        """[W * n, B, h, D + D_v]: what the ranks sent of slice ``i``, one behind the other."""
        self.start(i)
        both, work = self._coming.pop(i)
        finish(work, self.group)
        return both

    def _apart(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """[B, h, n, D] and [B, h, n, D_v] of what `_together` made, without a copy."""
        both, dim = both.permute(1, 2, 0, 3), self.k.shape[-1]
        return both[..., :dim], both[..., dim:]

    def landed(self) -> None:
        """Wait for all gradients sent home."""
        for work in self._going:
            finish(work, self.group)
        self._going.clear()


def over_slices(gather: KVGather, k: Tensor, v: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """``attend`` over every slice of k and v, in the order of the layout: (out, log-sum-exp).

    ``attend`` is given K, V and the number of their slice.
    """
    tracked = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    placeholders = _SplitGrads.apply(gather, k, v) if tracked else None
    outs, sums = [], []
    gather.start(0)
    for i in range(len(gather.slices)):
        gather.start(i + 1)
        if tracked:
            keys, values = _GatherSlice.apply(gather, i, *placeholders[2 * i :][:2])
        else:
            keys, values = gather.arrive(i)
        with gather.attending(i, keys):
            out, lse = attend(keys, values, i)
        # the next slice takes its memory
        del keys, values
        outs.append(out)
        sums.append(lse.detach())
    return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


class _Part(NamedTuple):
    """The offset and strides of a tensor in the memory of a slice."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _same(x: Any) -> Any:
    return x


def _together(k: Tensor, v: Tensor) -> Tensor:
    """[n, B, h, D + D_v]: tokens first, so that ranks can be put one behind the other."""
    return torch.cat([x.permute(2, 0, 1, 3) for x in (k, v)], dim=-1)


class _SplitGrads(torch.autograd.Function):
    """k and v to two placeholders for each slice, which carry shapes and gradients and no data."""

    @staticmethod
    def forward(ctx: Any, gather: KVGather, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.gather = gather
        return tuple(
            x.new_empty(1).expand(x[:, heads].shape) for heads in gather.slices for x in (k, v)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gather.landed()
        return None, torch.cat(grads[::2], dim=1), torch.cat(grads[1::2], dim=1)


class _GatherSlice(torch.autograd.Function):
    """The placeholders of a slice to its K and V of all ranks; gradients the other way, summed."""

    @staticmethod
    def forward(ctx: Any, gather: KVGather, i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.gather, ctx.i = gather, i
        return gather.arrive(i)

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gather.reduce_scatter_grads(ctx.i, dk, dv)
