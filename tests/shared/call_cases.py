"""Single, padded and packed inputs of a model, and its logits and gradients."""

import torch
from tiny import tokens


def positions_of(lengths):
    """Return position ids [1, N] of packed documents with these lengths."""
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


def left_padded(ids, padding):
    """Return ids and attention mask with ``padding`` additional tokens on the left."""
    ids = torch.cat([ids.new_zeros(ids.shape[0], padding), ids], dim=1)
    return ids, (torch.arange(ids.shape[1]) >= padding).long().expand(ids.shape[0], -1)


def _padded(padding):
    """Return an element of `CALLS` with padding at the slice ``padding`` of row 0."""
    ids = tokens(2, 150)
    mask = torch.ones_like(ids)
    mask[0, padding] = 0
    return {"input_ids": ids, "attention_mask": mask}, mask.bool()


def _single(length):
    """Return an element of `CALLS` without padding."""
    return {"input_ids": tokens(2, length)}, slice(None)


def _packed():
    """Return an element of `CALLS` with three packed documents."""
    positions = positions_of((50, 3, 97))
    return {"input_ids": tokens(1, 150), "position_ids": positions, "use_cache": False}, slice(None)


# inputs of a model, and the index of tokens that are not padding
CALLS = {
    "one-token": _single(1),
    "less-than-a-block": _single(31),
    "plain": _single(200),
    "left": _padded(slice(0, 37)),
    "right": _padded(slice(-37, None)),
    "packed": _packed(),
}


def logits(model, **inputs):
    """Return the logits of ``model`` without gradients."""
    with torch.no_grad():
        return model(**inputs).logits


def gradients(model, ids):
    """Return the gradient of the causal loss of ``ids`` for every parameter."""
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [weight.grad.clone() for weight in model.parameters()]
