"""`Reordering`: the tokens of a call in another order, all heads of a token at a time, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Reordering:
    """Which token of a call each place of another order is filled from, and where each token went.

    No two tokens go to one place, so that the gradient of moving them is moving them back: rows are
    read one way or the other, and nothing is summed. A place without a token holds anything, and
    has no gradient.

    Attributes:
        source: int64 [B * N'], for each place the token it is filled from, counted over the batch;
            the first of its row where none is.
        vacant: bool [B, N'], the places without a token.
        place: int64 [B * N], for each token its place, counted over the batch; the first of its row
            for padding.
        padding: bool [B, N], tokens that go nowhere; None where all go somewhere.
    """

    source: Tensor
    vacant: Tensor
    place: Tensor
    padding: Tensor | None

    @classmethod
    def of(cls, source: Tensor, filled: Tensor, place: Tensor, real: Tensor | None) -> Reordering:
        """Of indices within a row, where ``filled`` [B, N'] and ``real`` [B, N]; None for all."""
        padding = None if real is None else ~real
        place = place if padding is None else place.masked_fill(padding, 0)
        indices = source, place
        if len(source) > 1:
            row = torch.arange(len(source), device=source.device).unsqueeze(1)
            indices = source + row * place.shape[1], place + row * source.shape[1]
        source, place = (x.flatten() for x in indices)
        return cls(source, ~filled, place, padding)

    def apply(self, x: Tensor) -> Tensor:
        """[B, H, N', D] of x [B, H, N, D], which lies in memory as [B, N', H, D]."""
        return _Moved.apply(x, self.source, None, self.place, self.padding)

    def undo(self, x: Tensor) -> Tensor:
        """[B, H, N, D] of x [B, H, N', D], zeros at padding; it lies in memory as [B, N, H, D]."""
        return _Moved.apply(x, self.place, self.padding, self.source, self.vacant)


class _Moved(torch.autograd.Function):
    """`_rows` of x, and those of its gradient, which ``back`` and ``back_zero`` give."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        zero: Tensor | None,
        back: Tensor,
        back_zero: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(back, back_zero)
        return _rows(x, index, zero)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _rows(grad, *ctx.saved_tensors), None, None, None, None


def _rows(x: Tensor, index: Tensor, zero: Tensor | None) -> Tensor:
    """[B, H, N', D] of x [B, H, N, D] by ``index`` [B * N'], zeros where ``zero``, bool [B, N'].

    What models hand over lies in memory as [B, N, H, D]; what does not is copied first.
    """
    batch, heads, _, dim = x.shape
    rows = x.transpose(1, 2).reshape(-1, heads * dim).index_select(0, index)
    rows = rows.view(batch, -1, heads, dim)
    if zero is not None:
        rows = rows.masked_fill_(zero[:, :, None, None], 0.0)
    return rows.transpose(1, 2)
