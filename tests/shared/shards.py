"""Shard tensors across ranks, join shards, and compare gradients of ranks with one process."""

import torch
from tiny import make_tiny_model

from cab_hf.call.layout import BlockLayout, LayoutOptions
from cab_hf.call.packing import DocumentLength
from cab_hf.distributed.sharding import get_sharding, lengths_from_boundaries

BLOCK_TOKENS = 32
# cumulative document lengths by test id; None: one document whose length needs no padding
CUMULATIVE_LENGTHS = {
    "causal": None,
    "padded": [0, 461],
    "packed": [0, 70, 71, 300, 655],
}


def make_sharding(world_size, cumulative_lengths):
    """Return the `Sharding` of documents over ``world_size`` ranks.

    ``cumulative_lengths`` is a value of `CUMULATIVE_LENGTHS`.
    """
    if cumulative_lengths is None:
        lengths = (2 * world_size * BLOCK_TOKENS * 2,)
    else:
        lengths = lengths_from_boundaries(cumulative_lengths)
    return get_sharding(lengths, world_size, BLOCK_TOKENS)


def take_shard(x, sharding, rank):
    """Return a rank's shard of ``x`` [B, H, N, D].

    Padding slots are 7.0, which must not change the results.
    """
    shard = x[:, :, sharding.sequence_index[rank]].clone()
    shard[:, :, ~sharding.is_real[rank]] = 7.0
    return shard


def join_shards(shards, sharding):
    """Join the shards of all ranks to a tensor [B, H, N, ...] of the sequence, without padding."""
    return torch.cat(shards, dim=2)[:, :, sharding.shard_index]


def make_layout(sharding, align):
    """Return the `BlockLayout` of the documents of ``sharding`` in a single process."""
    doc_ids = torch.arange(len(sharding.document_lengths)).repeat_interleave(
        torch.tensor(sharding.document_lengths)
    )
    return BlockLayout.build(
        batch=1,
        q_length=sharding.num_tokens,
        kv_length=sharding.num_tokens,
        q_offset=0,
        padding_mask=None,
        doc_ids=doc_ids[None] if len(sharding.document_lengths) > 1 else None,
        align=align,
        device=torch.device("cpu"),
        options=LayoutOptions(
            document_lengths=[
                [DocumentLength(length, length) for length in sharding.document_lengths]
            ]
        ),
    )


def make_model(implementation, config=None, **model_fields):
    """Return a tiny two-layer model with the attention implementation ``implementation``.

    ``config`` is the CabConfig of the model; None: the default.
    """
    model = make_tiny_model(**{"num_hidden_layers": 2, **model_fields})
    model.set_attn_implementation(implementation)
    if config is not None:
        model.config.cab_config = config.to_dict()
    return model


def assert_same_gradients(actual, expected):
    """Assert that the gradients of all ranks sum to the gradients of one process.

    ``actual`` has the gradients of each rank by name, and ``expected`` the gradients of one
    process.
    """
    for name, gradient in expected.items():
        gradient_sum = sum(gradients[name] for gradients in actual)
        assert (gradient_sum - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name
