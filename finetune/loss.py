"""Cross-entropy of hidden states and the weight of a head, without all logits of a text.

128k tokens times a vocabulary of 128k are 32 GiB in bfloat16. Here a chunk of tokens has its logits
at a time, and its gradient is made while they are there: nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cab_hf.checks import require

IGNORED = -100  # a label that is not to be learnt

# of one chunk: 256 MiB in float32, and products large enough to keep a GPU busy
CHUNK_LOGITS = 2**26
# tiles of matrix products are whole where chunks are multiples of it
CHUNK_STEP = 128


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int | None = None
) -> Tensor:
    """The sum of -log softmax(hidden weight^T)[label] over labelled tokens, a float scalar.

    A sum, so that ranks and micro batches add up before the division. Products are in autocast's
    dtype where it is on, else in the narrower of both; softmax and sums are in float32, or float64
    where the products are.

    Args:
        hidden: [B, N, D], the last hidden states, scaled as the model scales its logits.
        weight: [V, D], of the head.
        labels: int64 [B, N], the token that each is to predict: already shifted. Those of -100
            are ignored and cost nothing.
        chunk_tokens: tokens whose logits exist at a time; by default as many as have 2^26 of them.

    Raises:
        ValueError: a label outside the vocabulary.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        # a head trained in float32 in a model of bfloat16, or norms whose output is float32
        dtype = min(hidden.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    h = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    w, target = weight.to(dtype), labels.reshape(-1)
    labelled = (target != IGNORED).nonzero().squeeze(-1)
    if labelled.numel():
        # one wait; a gather outside the vocabulary would end a CUDA process
        least, most = torch.stack(target[labelled].aminmax()).tolist()
        worst, last = least if least < 0 else most, weight.shape[0] - 1
        accepted = f"from 0 to {last}, or {IGNORED} for what is not to be learnt"
        require(0 <= worst <= last, "labels", worst, accepted)
    whole_tiles = max(1, CHUNK_LOGITS // (weight.shape[0] * CHUNK_STEP)) * CHUNK_STEP
    chunk = chunk_tokens or whole_tiles
    return _ChunkedCrossEntropy.apply(h, w, target, labelled, chunk, torch.is_grad_enabled())


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum over tokens. Its gradient is made with it, and only scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w: Tensor, target: Tensor, labelled: Tensor, chunk: int, learning: bool
    ) -> Tensor:
        """h [T, D], w [V, D], target [T], labelled: indices of the tokens that count."""
        wide = torch.float64 if h.dtype == torch.float64 else torch.float32
        dh = torch.zeros_like(h) if learning and ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(w, dtype=wide) if learning and ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=wide, device=h.device)
        for tokens in labelled.split(chunk) if labelled.numel() else ():
            h_c = h[tokens]
            loss, dlogits = _softmax_and_loss(h_c, w, target[tokens], wide)
            total += loss
            if dh is not None:
                dh[tokens] = dlogits @ w
            if dw is not None:
                dw += dlogits.T @ h_c
        ctx.save_for_backward(dh, None if dw is None else dw.to(w.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dh, dw = [None if x is None else x * dtotal.to(x.dtype) for x in ctx.saved_tensors]
        return dh, dw, None, None, None, None


def _softmax_and_loss(
    h: Tensor, w: Tensor, target: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of one chunk h [C, D]: the loss, a scalar, and its gradient by the logits [C, V]."""
    # [C, V]; everything below is in place but the last cast
    logits = (h @ w.T).to(wide)
    target = target.unsqueeze(-1)
    own = logits.gather(1, target)
    lse = logits.logsumexp(-1, keepdim=True)
    p = logits.sub_(lse).exp_()
    loss = (lse - own).sum()
    p.scatter_add_(1, target, torch.full_like(own, -1))
    return loss, p.to(h.dtype)
