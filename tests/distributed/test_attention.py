"""Attention over a sequence that is sharded across ranks equals attention in one process."""

import math
from functools import partial

import pytest
import torch
from shards import BLOCK_TOKENS, CUMULATIVE_LENGTHS, join_shards, make_sharding, take_shard
from tiny import draw_qkv
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cab_hf.distributed import zigzag_attention
from cab_hf.eval.speed import schemes

SCHEMES = {
    "zigzag": zigzag_attention,
    "ring": schemes.ring_attention,
}


def make_full_sequence(sharding, query_heads_per_kv_head, num_kv_heads, head_dim=16):
    """Return q, k, v and the output gradient of the whole sequence, without padding."""
    q, k, v = draw_qkv(
        2, num_kv_heads * query_heads_per_kv_head, num_kv_heads, sharding.num_tokens, dim=head_dim
    )
    grad = draw_qkv(
        2,
        num_kv_heads * query_heads_per_kv_head,
        num_kv_heads,
        sharding.num_tokens,
        dim=head_dim,
        seed=9,
    )[0]
    return q, k, v, grad


def compute_attention_of_rank(process_group, scheme_name, cu_seqlens, head_counts, scheme_settings):
    """Return the shards of this rank by name: "out", "lse", "dq", "dk" and "dv".

    ``head_counts`` has the arguments ``query_heads_per_kv_head`` and ``num_kv_heads`` of
    `make_full_sequence`.
    """
    sharding, rank = make_sharding(process_group.size(), cu_seqlens), process_group.rank()
    q, k, v, grad = (
        take_shard(tensor, sharding, rank) for tensor in make_full_sequence(sharding, **head_counts)
    )
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    # gather one KV head at a time, so that the next all-gather overlaps with attention
    scheme_settings = {"heads_k_stride": 1, **scheme_settings}
    out, lse = SCHEMES[scheme_name](
        q,
        k,
        v,
        group=process_group,
        cu_seqlens=cu_seqlens,
        block=BLOCK_TOKENS,
        engine="reference",
        **scheme_settings,
    )
    # padding queries do not contribute to the loss
    grad = grad * sharding.is_real[rank][:, None]
    gradients = torch.autograd.grad(out, leaves, grad)
    tensor_by_name = dict(
        zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)
    )
    return {tensor_name: tensor.detach() for tensor_name, tensor in tensor_by_name.items()}


def compute_attention_in_one_process(sharding, query_heads_per_kv_head, num_kv_heads, causal=True):
    """Return "out", "lse", "dq", "dk" and "dv" of masked attention over the whole sequence."""
    q, k, v, grad = make_full_sequence(sharding, query_heads_per_kv_head, num_kv_heads)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    doc_ids = torch.arange(len(sharding.document_lengths)).repeat_interleave(
        torch.tensor(sharding.document_lengths)
    )
    mask = doc_ids[:, None] == doc_ids
    if causal:
        mask = mask.tril()
    repeated_keys, repeated_values = (
        x.repeat_interleave(query_heads_per_kv_head, dim=1) for x in leaves[1:]
    )
    logits = (leaves[0] @ repeated_keys.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
    out = logits.softmax(-1) @ repeated_values
    gradients = torch.autograd.grad(out, leaves, grad)
    lse = logits.logsumexp(-1).detach()
    tensor_names = ("out", "lse", "dq", "dk", "dv")
    return dict(zip(tensor_names, (out.detach(), lse, *gradients), strict=True))


def assert_shards_equal(actual, sharding, expected):
    """Assert that the shards of all ranks, concatenated, equal the tensor of the same name.

    ``actual`` has a dict of shards by name for each rank.
    """
    for tensor_name, expected_tensor in expected.items():
        joined_tensor = join_shards(
            [tensors_of_rank[tensor_name] for tensors_of_rank in actual], sharding
        )
        relative_error = (joined_tensor - expected_tensor).abs().max() / expected_tensor.abs().max()
        assert relative_error <= 1e-5, f"{tensor_name}: {relative_error:.2g}"


# by name: (number of ranks, scheme, KV heads, query heads per KV head, settings of the scheme)
SHARDING_CASES = {
    **{f"own-keys-{world_size}": (world_size, "zigzag", 2, 1, {}) for world_size in (1, 2, 4, 8)},
    **{
        f"shared-keys-{world_size}": (world_size, "zigzag", 2, 4, {}) for world_size in (1, 2, 4, 8)
    },
    "ring": (4, "ring", 3, 2, {}),
    "two-heads-at-a-time": (4, "zigzag", 3, 2, {"heads_k_stride": 2}),
    "stride-above-kv-heads": (4, "zigzag", 3, 2, {"heads_k_stride": 5}),
    "saved-for-backward": (4, "zigzag", 3, 2, {"regather_kv": False}),
    # bidirectional attention within each document
    "not-causal": (2, "zigzag", 2, 2, {"causal": False}),
}


@pytest.mark.parametrize("cu_seqlens_name", CUMULATIVE_LENGTHS)
@pytest.mark.parametrize(
    ("world_size", "scheme_name", "num_kv_heads", "query_heads_per_kv_head", "scheme_settings"),
    SHARDING_CASES.values(),
    ids=SHARDING_CASES,
)
def test_every_sharding_equals_single_process(
    ranks,
    world_size,
    scheme_name,
    num_kv_heads,
    query_heads_per_kv_head,
    scheme_settings,
    cu_seqlens_name,
):
    cu_seqlens, sharding = (
        CUMULATIVE_LENGTHS[cu_seqlens_name],
        make_sharding(world_size, CUMULATIVE_LENGTHS[cu_seqlens_name]),
    )
    head_counts = {"query_heads_per_kv_head": query_heads_per_kv_head, "num_kv_heads": num_kv_heads}
    actual = ranks.run(
        world_size, compute_attention_of_rank, scheme_name, cu_seqlens, head_counts, scheme_settings
    )
    causal = scheme_settings.get("causal", True)
    assert_shards_equal(
        actual, sharding, compute_attention_in_one_process(sharding, **head_counts, causal=causal)
    )


def attend_without_hooks(attend, q, k, v):
    return attend(q, k, v)


def attend_with_checkpoint(attend, q, k, v):
    return checkpoint(attend, q, k, v, use_reentrant=False)


def attend_with_selective_checkpoint(attend, q, k, v):
    make_contexts = partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.index_select.default]
    )
    return checkpoint(attend, q, k, v, use_reentrant=False, context_fn=make_contexts)


def attend_with_offload(attend, q, k, v):
    with save_on_cpu():
        return attend(q, k, v)


def attend_with_copied_tensors(attend, q, k, v):
    """Call ``attend`` with hooks that clone all saved tensors whenever backward reads a tensor."""
    saved_tensors = []

    def unpack(tensor_index):
        saved_tensors[:] = [saved_tensor.clone() for saved_tensor in saved_tensors]
        return saved_tensors[tensor_index]

    with saved_tensors_hooks(
        lambda saved_tensor: saved_tensors.append(saved_tensor) or len(saved_tensors) - 1, unpack
    ):
        return attend(q, k, v)


AUTOGRAD_MODES = {
    "without-hooks": attend_without_hooks,
    "checkpointed": attend_with_checkpoint,
    "some-checkpointed": attend_with_selective_checkpoint,
    "offloaded": attend_with_offload,
    "copied-later": attend_with_copied_tensors,
}


def compute_gradients_of_rank(
    process_group, autograd_mode, query_heads_per_kv_head, scheme_settings
):
    """Return a list of dq, dk and dv by name: one dict for each backward pass."""
    sharding, rank = make_sharding(process_group.size(), None), process_group.rank()
    q, k, v, grad = (
        take_shard(x, sharding, rank)
        for x in make_full_sequence(sharding, query_heads_per_kv_head, 3)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def attend(q, k, v):
        out, _ = zigzag_attention(
            q,
            k,
            v,
            group=process_group,
            block=BLOCK_TOKENS,
            engine="reference",
            heads_k_stride=1,
            **scheme_settings,
        )
        return out

    out = AUTOGRAD_MODES[autograd_mode](attend, q, k, v)
    num_passes = 1 if autograd_mode == "some-checkpointed" else 2
    gradients_of_passes = [
        torch.autograd.grad(out, leaves, grad, retain_graph=pass_index == 0)
        for pass_index in range(num_passes)
    ]
    return [
        dict(zip(("dq", "dk", "dv"), gradients, strict=True)) for gradients in gradients_of_passes
    ]


@pytest.mark.parametrize("autograd_mode", AUTOGRAD_MODES)
@pytest.mark.parametrize("query_heads_per_kv_head", [1, 2], ids=["own-keys", "shared-keys"])
@pytest.mark.parametrize(
    "scheme_settings", [{}, {"regather_kv": False}], ids=["regathered", "saved"]
)
def test_gradients_are_equal_under_checkpointing_and_offloading(
    ranks, autograd_mode, query_heads_per_kv_head, scheme_settings
):
    gradients_of_rank_0, gradients_of_rank_1 = ranks.run(
        2, compute_gradients_of_rank, autograd_mode, query_heads_per_kv_head, scheme_settings
    )
    sharding = make_sharding(2, None)
    expected_tensors = compute_attention_in_one_process(sharding, query_heads_per_kv_head, 3)
    expected_gradients = {
        gradient_name: expected_tensors[gradient_name] for gradient_name in ("dq", "dk", "dv")
    }
    # rank_0 and rank_1 have the gradients of each backward pass
    for gradients_of_ranks in zip(gradients_of_rank_0, gradients_of_rank_1, strict=True):
        assert_shards_equal(gradients_of_ranks, sharding, expected_gradients)


def test_zigzag_balances_work_across_ranks():
    shard_map = make_sharding(4, None).shard_map(BLOCK_TOKENS, "cpu")
    num_pairs_of_ranks = [int(shard_map.ranges(rank, 1).pairs()) for rank in range(4)]
    num_tokens = 2 * 4 * BLOCK_TOKENS * 2
    assert (
        len(set(num_pairs_of_ranks)) == 1
        and sum(num_pairs_of_ranks) == num_tokens * (num_tokens + 1) // 2
    )
