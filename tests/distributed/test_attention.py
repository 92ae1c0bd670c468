"""Attention over a sequence that is sharded across ranks equals attention in one process."""

import math
from functools import partial

import pytest
import torch
from shards import BLOCK, CUMULATIVE_LENGTHS, join_shards, make_sharding, take_shard
from tiny import qkv
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cab_hf.distributed import zigzag_attention
from cab_hf.eval.speed import schemes

SCHEMES = {
    "zigzag": zigzag_attention,
    "ring": schemes.ring_attention,
}


def make_full_sequence(sharding, group, kv_heads, dim=16):
    """Return q, k, v and the output gradient of the whole sequence, without padding."""
    q, k, v = qkv(2, kv_heads * group, kv_heads, sharding.length, dim=dim)
    grad = qkv(2, kv_heads * group, kv_heads, sharding.length, dim=dim, seed=9)[0]
    return q, k, v, grad


def compute_attention_of_rank(process_group, scheme, ends, shape, settings):
    """Return the shards of this rank by name: "out", "lse", "dq", "dk" and "dv".

    ``shape`` has the arguments ``group`` and ``kv_heads`` of `make_full_sequence`.
    """
    sharding, rank = make_sharding(process_group.size(), ends), process_group.rank()
    q, k, v, grad = (take_shard(x, sharding, rank) for x in make_full_sequence(sharding, **shape))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    # gather one KV head at a time, so that the next all-gather overlaps with attention
    settings = {"heads_k_stride": 1, **settings}
    out, lse = SCHEMES[scheme](
        q, k, v, group=process_group, cu_seqlens=ends, block=BLOCK, engine="reference", **settings
    )
    # padding queries do not contribute to the loss
    grad = grad * sharding.is_real[rank][:, None]
    gradients = torch.autograd.grad(out, leaves, grad)
    result = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))
    return {name: x.detach() for name, x in result.items()}


def compute_attention_in_one_process(sharding, group, kv_heads, causal=True):
    """Return "out", "lse", "dq", "dk" and "dv" of masked attention over the whole sequence."""
    q, k, v, grad = make_full_sequence(sharding, group, kv_heads)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    doc_ids = torch.arange(len(sharding.lengths)).repeat_interleave(torch.tensor(sharding.lengths))
    mask = doc_ids[:, None] == doc_ids
    if causal:
        mask = mask.tril()
    keys, values = (x.repeat_interleave(group, dim=1) for x in leaves[1:])
    logits = (leaves[0] @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
    out = logits.softmax(-1) @ values
    gradients = torch.autograd.grad(out, leaves, grad)
    lse = logits.logsumexp(-1).detach()
    names = ("out", "lse", "dq", "dk", "dv")
    return dict(zip(names, (out.detach(), lse, *gradients), strict=True))


def assert_shards_equal(actual, sharding, expected):
    """Assert that the shards of all ranks, concatenated, equal the tensor of the same name.

    ``actual`` has a dict of shards by name for each rank.
    """
    for name, tensor in expected.items():
        result = join_shards([tensors_of_rank[name] for tensors_of_rank in actual], sharding)
        error = (result - tensor).abs().max() / tensor.abs().max()
        assert error <= 1e-5, f"{name}: {error:.2g}"


# by name: (number of ranks, scheme, KV heads, query heads per KV head, settings of the scheme)
CASES = {
    **{f"own-keys-{world}": (world, "zigzag", 2, 1, {}) for world in (1, 2, 4, 8)},
    **{f"shared-keys-{world}": (world, "zigzag", 2, 4, {}) for world in (1, 2, 4, 8)},
    "ring": (4, "ring", 3, 2, {}),
    "two-heads-at-a-time": (4, "zigzag", 3, 2, {"heads_k_stride": 2}),
    "stride-above-kv-heads": (4, "zigzag", 3, 2, {"heads_k_stride": 5}),
    "saved-for-backward": (4, "zigzag", 3, 2, {"regather_kv": False}),
    # bidirectional attention within each document
    "not-causal": (2, "zigzag", 2, 2, {"causal": False}),
}


@pytest.mark.parametrize("boundaries", CUMULATIVE_LENGTHS)
@pytest.mark.parametrize(
    ("world", "scheme", "kv_heads", "group", "settings"), CASES.values(), ids=CASES
)
def test_every_sharding_equals_single_process(
    ranks, world, scheme, kv_heads, group, settings, boundaries
):
    ends, sharding = (
        CUMULATIVE_LENGTHS[boundaries],
        make_sharding(world, CUMULATIVE_LENGTHS[boundaries]),
    )
    shape = {"group": group, "kv_heads": kv_heads}
    actual = ranks.run(world, compute_attention_of_rank, scheme, ends, shape, settings)
    causal = settings.get("causal", True)
    assert_shards_equal(
        actual, sharding, compute_attention_in_one_process(sharding, **shape, causal=causal)
    )


def attend_without_hooks(attend, q, k, v):
    return attend(q, k, v)


def attend_with_checkpoint(attend, q, k, v):
    return checkpoint(attend, q, k, v, use_reentrant=False)


def attend_with_selective_checkpoint(attend, q, k, v):
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.index_select.default])
    return checkpoint(attend, q, k, v, use_reentrant=False, context_fn=contexts)


def attend_with_offload(attend, q, k, v):
    with save_on_cpu():
        return attend(q, k, v)


def attend_with_copied_tensors(attend, q, k, v):
    """Call ``attend`` with hooks that clone all saved tensors whenever backward reads a tensor."""
    saved_tensors = []

    def unpack(index):
        saved_tensors[:] = [x.clone() for x in saved_tensors]
        return saved_tensors[index]

    with saved_tensors_hooks(lambda x: saved_tensors.append(x) or len(saved_tensors) - 1, unpack):
        return attend(q, k, v)


AUTOGRAD_MODES = {
    "without-hooks": attend_without_hooks,
    "checkpointed": attend_with_checkpoint,
    "some-checkpointed": attend_with_selective_checkpoint,
    "offloaded": attend_with_offload,
    "copied-later": attend_with_copied_tensors,
}


def compute_gradients_of_rank(process_group, mode, group, settings):
    """Return a list of dq, dk and dv by name: one dict for each backward pass of ``mode``."""
    sharding, rank = make_sharding(process_group.size(), None), process_group.rank()
    q, k, v, grad = (take_shard(x, sharding, rank) for x in make_full_sequence(sharding, group, 3))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def attend(q, k, v):
        out, _ = zigzag_attention(
            q,
            k,
            v,
            group=process_group,
            block=BLOCK,
            engine="reference",
            heads_k_stride=1,
            **settings,
        )
        return out

    out = AUTOGRAD_MODES[mode](attend, q, k, v)
    num_passes = 1 if mode == "some-checkpointed" else 2
    gradients_of_passes = [
        torch.autograd.grad(out, leaves, grad, retain_graph=i == 0) for i in range(num_passes)
    ]
    return [
        dict(zip(("dq", "dk", "dv"), gradients, strict=True)) for gradients in gradients_of_passes
    ]


@pytest.mark.parametrize("mode", AUTOGRAD_MODES)
@pytest.mark.parametrize("group", [1, 2], ids=["own-keys", "shared-keys"])
@pytest.mark.parametrize("settings", [{}, {"regather_kv": False}], ids=["regathered", "saved"])
def test_gradients_are_equal_under_checkpointing_and_offloading(ranks, mode, group, settings):
    rank_0, rank_1 = ranks.run(2, compute_gradients_of_rank, mode, group, settings)
    sharding = make_sharding(2, None)
    expected = compute_attention_in_one_process(sharding, group, 3)
    gradients = {name: expected[name] for name in ("dq", "dk", "dv")}
    # rank_0 and rank_1 have the gradients of each backward pass
    for gradients_of_ranks in zip(rank_0, rank_1, strict=True):
        assert_shards_equal(gradients_of_ranks, sharding, gradients)


def test_zigzag_balances_work_across_ranks():
    shard_map = make_sharding(4, None).shard_map(BLOCK, "cpu")
    pairs = [int(shard_map.ranges(rank, 1).pairs()) for rank in range(4)]
    length = 2 * 4 * BLOCK * 2
    assert len(set(pairs)) == 1 and sum(pairs) == length * (length + 1) // 2
