"""Model inputs without padding, with padding and with packed documents; logits, gradients."""

import torch
from tiny import draw_token_ids


def make_packed_position_ids(lengths):
    """Return position ids [1, N] of packed documents with these lengths."""
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


def pad_left(ids, num_padding_tokens):
    """Return (ids, attention mask) after adding ``num_padding_tokens`` tokens on the left."""
    ids = torch.cat([ids.new_zeros(ids.shape[0], num_padding_tokens), ids], dim=1)
    return ids, (torch.arange(ids.shape[1]) >= num_padding_tokens).long().expand(ids.shape[0], -1)


def _make_padded_call(padding_slice):
    """Return an entry of `MODEL_CALLS` in which row 0 has padding at ``padding_slice``."""
    ids = draw_token_ids(2, 150)
    mask = torch.ones_like(ids)
    mask[0, padding_slice] = 0
    return {"input_ids": ids, "attention_mask": mask}, mask.bool()


def _make_plain_call(length):
    """Return an entry of `MODEL_CALLS`: two rows of ``length`` tokens without padding."""
    return {"input_ids": draw_token_ids(2, length)}, slice(None)


def _make_packed_call():
    """Return an entry of `MODEL_CALLS`: three packed documents in one row."""
    positions = make_packed_position_ids((50, 3, 97))
    return {
        "input_ids": draw_token_ids(1, 150),
        "position_ids": positions,
        "use_cache": False,
    }, slice(None)


# by name: (keyword arguments of a model, index [B, N] that selects tokens that are not padding)
MODEL_CALLS = {
    "one-token": _make_plain_call(1),
    "less-than-a-block": _make_plain_call(31),
    "plain": _make_plain_call(200),
    "left": _make_padded_call(slice(0, 37)),
    "right": _make_padded_call(slice(-37, None)),
    "packed": _make_packed_call(),
}


def compute_logits(model, **inputs):
    """Call ``model`` under no_grad, and return its logits."""
    with torch.no_grad():
        return model(**inputs).logits


def compute_gradients(model, ids):
    """Return a list with the gradient of the language modelling loss for every parameter."""
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [weight.grad.clone() for weight in model.parameters()]
