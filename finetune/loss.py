"""Chunked cross-entropy from hidden states and the weight of the head.

The logits of 128k tokens with a vocabulary of 128k take 32 GiB in bfloat16. This loss computes the
logits of one chunk of tokens at a time. The forward pass also computes the gradient of each chunk,
so that the backward pass does not compute logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cab_hf.checks import require

IGNORED_LABEL = -100  # label of tokens that do not count in the loss

# number of logits in a chunk: 256 MiB in float32, and matrix products large enough for a GPU
LOGITS_PER_CHUNK = 2**26
# tokens; chunk sizes are multiples of this number, so that matrix products have complete tiles
CHUNK_STEP_TOKENS = 128


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int | None = None
) -> Tensor:
    """Return the sum of -log softmax(hidden weight^T)[label] over labelled tokens, a float scalar.

    The result is a sum, so that the losses of ranks and micro batches can be added and then divided
    by the number of labels. Products use autocast's dtype if autocast is on, else the narrower
    dtype of both inputs. Softmax and sums use float32, or float64 for float64 products.

    Args:
        hidden: [B, N, D], the last hidden states, scaled as the model scales its logits.
        weight: [V, D], the weight of the head.
        labels: int64 [B, N], already shifted: the token that each token predicts. The logits of
            tokens with label -100 are not computed.
        chunk_tokens: tokens per chunk; None: about 2^26 logits per chunk.

    Raises:
        ValueError: a label is outside the vocabulary.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        product_dtype = torch.get_autocast_dtype(device_type)
    else:
        # the head may be float32 in a bfloat16 model, or norms may return float32
        product_dtype = min(
            hidden.dtype, weight.dtype, key=lambda product_dtype: product_dtype.itemsize
        )
    h = hidden.reshape(-1, hidden.shape[-1]).to(product_dtype)
    w, flat_labels = weight.to(product_dtype), labels.reshape(-1)
    labelled_indices = (flat_labels != IGNORED_LABEL).nonzero().squeeze(-1)
    if labelled_indices.numel():
        # this check costs one device sync; a label outside the vocabulary would crash CUDA
        smallest_label, largest_label = torch.stack(
            flat_labels[labelled_indices].aminmax()
        ).tolist()
        worst_label, largest_token = (
            smallest_label if smallest_label < 0 else largest_label,
            weight.shape[0] - 1,
        )
        accepted_labels = f"from 0 to {largest_token}, or {IGNORED_LABEL} for tokens without a loss"
        require(0 <= worst_label <= largest_token, "labels", worst_label, accepted_labels)
    default_chunk_tokens = (
        max(1, LOGITS_PER_CHUNK // (weight.shape[0] * CHUNK_STEP_TOKENS)) * CHUNK_STEP_TOKENS
    )
    chunk_size = chunk_tokens or default_chunk_tokens
    return _ChunkedCrossEntropy.apply(
        h, w, flat_labels, labelled_indices, chunk_size, torch.is_grad_enabled()
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """An autograd function for the summed loss.

    The forward pass also computes the gradients, and the backward pass only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        w: Tensor,
        labels: Tensor,
        labelled_indices: Tensor,
        chunk_tokens: int,
        needs_gradients: bool,
    ) -> Tensor:
        """Return the summed loss over the tokens ``labelled_indices``, a scalar.

        Args:
            ctx: context of autograd.
            h: [T, D], hidden states.
            w: [V, D], weight of the head.
            labels: int64 [T], labels.
            labelled_indices: int64 [L], indices of tokens with a label.
            chunk_tokens: tokens per chunk.
            needs_gradients: True to compute gradients.
        """
        accumulator_dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
        needs_dh = needs_gradients and ctx.needs_input_grad[0]
        needs_dw = needs_gradients and ctx.needs_input_grad[1]
        dh = torch.zeros_like(h) if needs_dh else None
        dw = torch.zeros_like(w, dtype=accumulator_dtype) if needs_dw else None
        total_loss = torch.zeros((), dtype=accumulator_dtype, device=h.device)
        for chunk_indices in (
            labelled_indices.split(chunk_tokens) if labelled_indices.numel() else ()
        ):
            h_c = h[chunk_indices]
            chunk_loss, dlogits = _softmax_and_loss(
                h_c, w, labels[chunk_indices], accumulator_dtype
            )
            total_loss += chunk_loss
            if dh is not None:
                dh[chunk_indices] = dlogits @ w
            if dw is not None:
                dw += dlogits.T @ h_c
        ctx.save_for_backward(dh, None if dw is None else dw.to(w.dtype))
        return total_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dh, dw = [
            None if gradient is None else gradient * dtotal.to(gradient.dtype)
            for gradient in ctx.saved_tensors
        ]
        return dh, dw, None, None, None, None


def _softmax_and_loss(
    h: Tensor, w: Tensor, labels: Tensor, accumulator_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a chunk, and the gradient of the loss with respect to the logits.

    Args:
        h: [C, D], hidden states of the chunk.
        w: [V, D], weight of the head.
        labels: int64 [C], labels.
        accumulator_dtype: dtype of softmax and sums.

    Returns:
        loss: scalar of dtype ``accumulator_dtype``.
        p: [C, V], the gradient with respect to the logits, in the dtype of ``h``.
    """
    # [C, V]; the operations on `logits` are in place to save memory
    logits = (h @ w.T).to(accumulator_dtype)
    labels = labels.unsqueeze(-1)
    label_logits = logits.gather(1, labels)
    lse = logits.logsumexp(-1, keepdim=True)
    p = logits.sub_(lse).exp_()
    loss = (lse - label_logits).sum()
    p.scatter_add_(1, labels, torch.full_like(label_logits, -1))
    return loss, p.to(h.dtype)
