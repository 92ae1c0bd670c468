"""Cross-entropy of hidden states and the weight of a head, without all logits of a sequence.

The logits of 128k tokens with a vocabulary of 128k take 32 GiB in bfloat16. Here only a chunk of
tokens has logits at a time. The gradient of a chunk is computed with its logits, so that nothing is
computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cab_hf.checks import require

IGNORED = -100  # label of a token without a loss

# logits of one chunk: 256 MiB in float32, and products large enough to keep a GPU busy
CHUNK_LOGITS = 2**26
# tiles of matrix products are complete if chunks are multiples of it
CHUNK_STEP = 128


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int | None = None
) -> Tensor:
    """Return the sum of -log softmax(hidden weight^T)[label] over labelled tokens, a float scalar.

    The result is a sum, so that ranks and micro batches can be added before the division. Products
    use autocast's dtype if autocast is on, else the narrower dtype of both inputs. Softmax and sums
    use float32, or float64 if the products do.

    Args:
        hidden: [B, N, D], the last hidden states, scaled as the model scales its logits.
        weight: [V, D], the weight of the head.
        labels: int64 [B, N], already shifted: the token that each token predicts. Tokens with -100
            are ignored and cost nothing.
        chunk_tokens: tokens whose logits exist at a time; by default as many as have 2^26 logits.

    Raises:
        ValueError: a label is outside the vocabulary.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        # the head may be float32 in a bfloat16 model, or norms may return float32
        dtype = min(hidden.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    h = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    w, target = weight.to(dtype), labels.reshape(-1)
    labelled = (target != IGNORED).nonzero().squeeze(-1)
    if labelled.numel():
        # one device sync; a gather outside the vocabulary would crash a CUDA process
        least, most = torch.stack(target[labelled].aminmax()).tolist()
        worst, last = least if least < 0 else most, weight.shape[0] - 1
        accepted = f"from 0 to {last}, or {IGNORED} for tokens without a loss"
        require(0 <= worst <= last, "labels", worst, accepted)
    whole_tiles = max(1, CHUNK_LOGITS // (weight.shape[0] * CHUNK_STEP)) * CHUNK_STEP
    chunk = chunk_tokens or whole_tiles
    return _ChunkedCrossEntropy.apply(h, w, target, labelled, chunk, torch.is_grad_enabled())


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The summed loss; the forward pass computes its gradient, and the backward pass scales it."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w: Tensor, target: Tensor, labelled: Tensor, chunk: int, learning: bool
    ) -> Tensor:
        """Compute the loss of h [T, D], w [V, D] and target [T] over the tokens ``labelled``."""
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
    """Return the loss of one chunk h [C, D], a scalar, and its gradient by the logits [C, V]."""
    # [C, V]; everything below is in place except the last cast
    logits = (h @ w.T).to(wide)
    target = target.unsqueeze(-1)
    own = logits.gather(1, target)
    lse = logits.logsumexp(-1, keepdim=True)
    p = logits.sub_(lse).exp_()
    loss = (lse - own).sum()
    p.scatter_add_(1, target, torch.full_like(own, -1))
    return loss, p.to(h.dtype)
