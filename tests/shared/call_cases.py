"""Single, padded and packed inputs of a model, its logits and its gradients."""

import torch
from tiny import tokens


def positions_of(lengths):
    """Return positions [1, N] of packed documents; they restart with each document."""
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


def left_padded(ids, padding):
    """Return (ids, mask) with ``padding`` tokens of left padding."""
    ids = torch.cat([ids.new_zeros(ids.shape[0], padding), ids], dim=1)
    return ids, (torch.arange(ids.shape[1]) >= padding).long().expand(ids.shape[0], -1)


def _padded(padding):
    ids = tokens(2, 150)
    mask = torch.ones_like(ids)
    mask[0, padding] = 0
    return {"input_ids": ids, "attention_mask": mask}, mask.bool()


def _single(length):
    return {"input_ids": tokens(2, length)}, slice(None)


def _packed():
    positions = positions_of((50, 3, 97))
    return {"input_ids": tokens(1, 150), "position_ids": positions, "use_cache": False}, slice(None)


# (inputs of a model, index of their real tokens)
CALLS = {
    "one-token": _single(1),
    "less-than-a-block": _single(31),
    "plain": _single(200),
    "left": _padded(slice(0, 37)),
    "right": _padded(slice(-37, None)),
    "packed": _packed(),
}


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def gradients(model, ids):
    """Return the gradient of every parameter under the causal loss of ``ids``."""
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [weight.grad.clone() for weight in model.parameters()]
