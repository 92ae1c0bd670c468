"""Shard sequences across ranks and join them again."""

import torch
from tiny import tiny_model

from cab_hf.call.layout import BlockLayout, LayoutOptions
from cab_hf.call.packing import Length
from cab_hf.distributed.sharding import lengths_between, sharding_of

BLOCK = 32
# document boundaries by name; None is one document that fills all ranks
BOUNDARIES = {
    "causal": None,
    "padded": [0, 461],
    "packed": [0, 70, 71, 300, 655],
}


def sharding_for(world, ends):
    lengths = (2 * world * BLOCK * 2,) if ends is None else lengths_between(ends)
    return sharding_of(lengths, world, BLOCK)


def shard_of(x, sharding, rank):
    """Return a rank's shard of [B, H, N, D]; padding has values that must not matter."""
    shard = x[:, :, sharding.sequence_index[rank]].clone()
    shard[:, :, ~sharding.real[rank]] = 7.0
    return shard


def together(shards, sharding):
    """Join the shards of all ranks to [B, H, N, ...]."""
    return torch.cat(shards, dim=2)[:, :, sharding.shard_index]


def layout_of(sharding, align):
    """Return the layout of a single process with the whole sequence."""
    document = torch.arange(len(sharding.lengths)).repeat_interleave(torch.tensor(sharding.lengths))
    document = document[None] if len(sharding.lengths) > 1 else None
    lengths = [[Length(length, length) for length in sharding.lengths]]
    total = sharding.length
    return BlockLayout.build(
        batch=1,
        q_length=total,
        kv_length=total,
        q_offset=0,
        padding_mask=None,
        doc_ids=document,
        align=align,
        device=torch.device("cpu"),
        options=LayoutOptions(lengths=lengths),
    )


def model_of(implementation, config=None, **settings):
    """Return a tiny model of two layers with this attention implementation."""
    model = tiny_model(**{"num_hidden_layers": 2, **settings})
    model.set_attn_implementation(implementation)
    if config is not None:
        model.config.cab_config = config.to_dict()
    return model


def assert_same_gradients(actual, expected):
    """Assert that the summed gradients of all ranks equal those of one process, by name."""
    for name, meant in expected.items():
        total = sum(gradients[name] for gradients in actual)
        assert (total - meant).abs().max() <= 1e-4 * meant.abs().max(), name
