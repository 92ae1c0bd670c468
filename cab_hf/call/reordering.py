"""`TokenPermutation`: a permutation of the tokens of a call, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenPermutation:
    """A mapping from N tokens per row to N' places, and back.

    Every place has at most one token. The gradient is therefore the inverse mapping, a gather
    without sums. A place without a token has an arbitrary value and no gradient.

    Attributes:
        source: int64 [B * N'], index of the token at each place, counted over the batch. Vacant
            places have the first token of their row.
        vacant: bool [B, N'], True for places without a token.
        place: int64 [B * N], index of the place of each token, counted over the batch. Padding has
            the first place of its row.
        padding: bool [B, N], True for tokens without a place; None if all tokens have a place.
    """

    source: Tensor
    vacant: Tensor
    place: Tensor
    padding: Tensor | None

    @classmethod
    def of(
        cls, source: Tensor, filled: Tensor, place: Tensor, real: Tensor | None
    ) -> TokenPermutation:
        """Build a reordering from indices within a row.

        Args:
            source: int64 [B, N'], token of each place.
            filled: bool [B, N'], True for places with a token.
            place: int64 [B, N], place of each token.
            real: bool [B, N], True for tokens with a place; None for all tokens.
        """
        padding = None if real is None else ~real
        place = place if padding is None else place.masked_fill(padding, 0)
        indices = source, place
        if len(source) > 1:
            row = torch.arange(len(source), device=source.device).unsqueeze(1)
            indices = source + row * place.shape[1], place + row * source.shape[1]
        source, place = (x.flatten() for x in indices)
        return cls(source, ~filled, place, padding)

    def apply(self, x: Tensor) -> Tensor:
        """Return x [B, H, N, D] in the new order, [B, H, N', D] with strides of [B, N', H, D]."""
        return _Moved.apply(x, self.source, None, self.place, self.padding)

    def undo(self, x: Tensor) -> Tensor:
        """Return x [B, H, N', D] in the old order, [B, H, N, D], with zeros at padding.

        The strides are those of [B, N, H, D].
        """
        return _Moved.apply(x, self.place, self.padding, self.source, self.vacant)


class _Moved(torch.autograd.Function):
    """`_rows` with a gradient: the rows of the gradient by ``back`` and ``back_zero``."""

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
    """Gather tokens of x [B, H, N, D] and return [B, H, N', D].

    Models pass tensors with strides of [B, N, H, D]. Other tensors are copied first.

    Args:
        x: [B, H, N, D].
        index: int64 [B * N'], tokens to gather, counted over the batch.
        zero: bool [B, N'], True for results that are zero; None for none.
    """
    batch, heads, _, dim = x.shape
    rows = x.transpose(1, 2).reshape(-1, heads * dim).index_select(0, index)
    rows = rows.view(batch, -1, heads, dim)
    if zero is not None:
        rows = rows.masked_fill_(zero[:, :, None, None], 0.0)
    return rows.transpose(1, 2)
