"""Every rank raises an error if arguments or shards differ between ranks or a rank dies."""

import os
import re
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from ranks import Failure
from shards import BLOCK, make_model, make_sharding, take_shard
from tiny import SPARSE, qkv, tokens

import cab_hf
from cab_hf import distributed
from cab_hf.call.hook import cab_mask
from cab_hf.call.layout import full_plan
from cab_hf.distributed import sharding as shardings
from cab_hf.distributed.sharded import ShardedLayout
from cab_hf.engines import REFERENCE

# seconds after which a collective fails if a rank does not take part
TIMEOUT = 20


def build_one_layer_model(implementation="cab"):
    return make_model(implementation, SPARSE, num_hidden_layers=1)


def attend(group, changed):
    """Run attention; rank 1 draws its inputs with other arguments than the other ranks.

    ``changed`` are arguments of `qkv`, or ``cu_seqlens``.
    """
    arguments = {"heads": 4, "kv_heads": 2, "q_length": 128, "dim": 16}
    arguments |= {"dtype": torch.float32, "batch": 1, "cu_seqlens": None}
    if group.rank() == 1:
        arguments |= changed
    cu_seqlens = arguments.pop("cu_seqlens")
    q, k, v = qkv(**arguments)
    return distributed.zigzag_attention(q, k, v, group=group, block=BLOCK, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        pytest.param(
            {"q_length": 64},
            "tokens of a rank must be equal .* got 128 on rank 0, 64 on rank 1",
            id="tokens",
        ),
        pytest.param(
            {"heads": 8}, "^heads must be equal .* got 4 on rank 0, 8 on rank 1", id="heads"
        ),
        pytest.param(
            {"kv_heads": 1}, "KV heads must be equal .* got 2 on rank 0, 1 on", id="kv-heads"
        ),
        pytest.param({"dtype": torch.float64}, "dtypes must be equal on all ranks", id="dtype"),
        pytest.param({"batch": 2}, "batch rows must be equal on all ranks", id="batch"),
        pytest.param({"dim": 32}, "head dims must be equal on all ranks", id="head-dim"),
        pytest.param(
            {"cu_seqlens": [0, 100, 256]}, "documents must be equal .* got 1 on", id="documents"
        ),
    ],
)
def test_inconsistent_arguments_raise_on_all_ranks(ranks, changed, sentence):
    for outcome in ranks.outcomes(2, attend, changed):
        assert isinstance(outcome, Failure) and outcome.kind == "ValueError"
        with pytest.raises(ValueError, match=sentence):
            raise ValueError(outcome.sentence)


def run_with_positions_of(group, owners):
    """Run a model on each rank, with the position ids of the shard of rank ``owners[rank]``."""
    batch = {"input_ids": tokens(1, 256)}
    inputs = distributed.shard(batch, group, BLOCK)
    sharding = shardings.get_sharding((256,), group.size(), BLOCK)
    inputs["position_ids"] = sharding.positions[owners[group.rank()]][None]
    with (
        torch.no_grad(),
        cab_hf.context_parallel(build_one_layer_model(), group, block=BLOCK) as model,
    ):
        return model(**inputs, use_cache=False)


@pytest.mark.parametrize(
    ("owners", "sentence"),
    [
        pytest.param(
            (0, 0), "tokens at positions of another rank must be equal .* got 0 on rank 0", id="one"
        ),
        pytest.param((1, 0), "must describe the 128 tokens of rank", id="swapped"),
    ],
)
def test_positions_of_another_rank_raise(ranks, owners, sentence):
    for outcome in ranks.outcomes(2, run_with_positions_of, owners):
        with pytest.raises(ValueError, match=sentence):
            raise ValueError(outcome.sentence)


def run_with_other_settings(group):
    """Run a model on each rank; rank 1 has another mass threshold."""
    model = build_one_layer_model()
    if group.rank() == 1:
        model.config.cab_config = replace(SPARSE, mass_threshold=0.09).to_dict()
    inputs = distributed.shard({"input_ids": tokens(1, 256)}, group, BLOCK)
    with torch.no_grad(), cab_hf.context_parallel(model, group, block=BLOCK):
        return model(**inputs, use_cache=False)


def test_different_settings_raise_on_all_ranks(ranks):
    for outcome in ranks.outcomes(2, run_with_other_settings):
        assert outcome.sentence.startswith("settings (checksum) must be equal")


def run_with_another_batch(group, changed, index):
    """Run a model on each rank; the input ``changed`` of rank 1 differs at token ``index``."""
    batch = {"input_ids": tokens(2, 256), "labels": tokens(2, 256)}
    if group.rank() == 1:
        batch[changed][1, index] = 1
    inputs = distributed.shard(batch, group, BLOCK)
    if changed == "input_ids":
        inputs["inputs_embeds"] = build_one_layer_model().get_input_embeddings()(
            inputs.pop("input_ids")
        )
    with (
        torch.no_grad(),
        cab_hf.context_parallel(build_one_layer_model(), group, block=BLOCK) as model,
    ):
        return model(**inputs, use_cache=False)


@pytest.mark.parametrize("changed", ["input_ids", "labels"])
@pytest.mark.parametrize("index", [1, 100], ids=["of-the-first-rank", "of-the-second-rank"])
def test_different_batches_raise_on_all_ranks(ranks, changed, index):
    for outcome in ranks.outcomes(2, run_with_another_batch, changed, index):
        assert outcome.kind == "ValueError"
        assert re.match(
            r"tokens or labels \(checksum\) must be equal .* got \d+ on rank 0, \d+ on rank 1\. ",
            outcome.sentence,
        )


def measure_attention_error(group, wrong):
    """Return the maximum difference between this rank's output and attention in one process.

    ``wrong`` is the injected fault: "permutation" (wrong order of gathered keys), "positions"
    (those of the other rank) or None.
    """
    sharding, rank = make_sharding(group.size(), [0, 300]), group.rank()
    q, k, v = qkv(1, 4, 2, sharding.length)
    shard_map = shardings._shard_map.__wrapped__(
        sharding, sharding.dense_block_size, torch.device("cpu")
    )
    if wrong == "permutation":
        shard_map = replace(shard_map, token_of_slot=shard_map.token_of_slot.flip(0))
    if wrong == "positions":
        rank = 1 - rank
    layout = ShardedLayout(shard_map, group, shard_map.ranges(rank, 1))
    plan = full_plan(layout.ranges, sharding.dense_block_size)
    q_shard, k_shard, v_shard = (take_shard(x, sharding, group.rank()) for x in (q, k, v))
    out = layout.attend(REFERENCE, q_shard, k_shard, v_shard, plan=plan, scale=0.25)
    exact_output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    error = out - take_shard(exact_output, sharding, group.rank())
    return error[:, :, sharding.is_real[group.rank()]].abs().max()


@pytest.mark.parametrize("wrong", ["permutation", "positions"])
def test_misplaced_shards_change_the_result(ranks, wrong):
    assert max(ranks.run(2, measure_attention_error, None)) < 1e-5
    assert min(ranks.run(2, measure_attention_error, wrong)) > 0.1


def attend_until_rank_dies(group, death):
    """Run attention twice; rank 1 dies before the second call.

    Other ranks return (message of the error, seconds until the error).
    """
    q, k, v = qkv(1, 4, 2, 128)
    distributed.zigzag_attention(q, k, v, group=group, block=BLOCK)
    model = build_one_layer_model()
    start = time.monotonic()
    try:
        with cab_hf.context_parallel(model, group, block=BLOCK):
            if group.rank() == 1 and death == "killed":
                os._exit(9)
            if group.rank() == 1:
                raise MemoryError("the third layer did not fit")
            distributed.zigzag_attention(q, k, v, group=group, block=BLOCK)
    except MemoryError:
        # exiting closes the connections of this process, so that collectives of other ranks fail
        os._exit(1)
    except distributed.RankLost as error:
        return str(error), time.monotonic() - start


@pytest.mark.parametrize(
    ("death", "cause"),
    [
        ("killed", "rank 1 stopped without reporting an error"),
        ("raised", "rank 1 stopped: MemoryError: the third layer did not fit"),
    ],
)
def test_dead_rank_stops_other_ranks(start_ranks, death, cause):
    outcomes = start_ranks(3, TIMEOUT).outcomes(3, attend_until_rank_dies, death)
    assert outcomes[1] is None
    for rank in (0, 2):
        sentence, seconds = outcomes[rank]
        assert sentence.startswith(f"rank {rank} of 3 stops: {cause} (")
        assert seconds < TIMEOUT


def run_with_unsupported(group, what):
    """Run a model with the unsupported argument or setting that ``what`` names."""
    model = build_one_layer_model("sdpa" if what == "implementation" else "cab")
    batch = {"input_ids": tokens(1, 256)}
    if what == "padding":
        batch["attention_mask"] = torch.ones(1, 256).tril(-1)
    if what == "unknown":
        batch["pixel_values"] = torch.ones(1)
    if what == "labels":
        batch["labels"] = batch["shift_labels"] = batch["input_ids"]
    if what == "leap":
        batch["position_ids"] = torch.arange(1, 257)[None]
    if what == "end":
        batch["cu_seq_lens_q"] = torch.tensor([0, 200])
    if what == "group":
        group = "cp"
    with torch.no_grad(), cab_hf.context_parallel(model, group, block=BLOCK):
        inputs = distributed.shard(batch, group, BLOCK)
        if what == "twice":
            with cab_hf.context_parallel(model, group, block=BLOCK):
                pass
        if what == "mask":
            inputs["attention_mask"] = torch.arange(256)[None] > 3
        if what == "unsharded":
            inputs = batch
        if what == "layer":
            hidden, rotary = torch.ones(1, 256, 48), 2 * [torch.ones(1, 256, 16)]
            model.model.layers[0].self_attn(hidden, rotary, attention_mask=cab_mask(1, 256, 256))
        cache = model(**inputs, use_cache=what == "cache").past_key_values
        if what == "cache":
            model(**inputs, past_key_values=cache)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("implementation", "attn_implementation of LlamaForCausalLM must be one of"),
        ("padding", "attention_mask must have no padding, got 256 padding tokens"),
        ("unknown", "batch must contain only input_ids, labels,"),
        ("labels", "batch must have either labels or shift_labels, got both"),
        ("leap", "position_ids must count from 0"),
        ("end", "cu_seq_lens_q must end at 256, the number of tokens in input_ids, got 200"),
        ("group", "group must be a ProcessGroup of this process, got 'cp'"),
        ("twice", "LlamaForCausalLM is already inside context_parallel"),
        ("mask", "attention_mask must have no padding inside context_parallel"),
        ("unsharded", "position_ids and cu_seq_lens_q must describe the 256 tokens"),
        ("cache", "past_key_values must be empty inside context_parallel, got 256 tokens"),
        ("layer", "LlamaAttention is inside context_parallel, and its mask was built outside"),
    ],
)
def test_unsupported_arguments_raise(ranks, what, sentence):
    (outcome,) = ranks.outcomes(1, run_with_unsupported, what)
    assert isinstance(outcome, Failure) and outcome.sentence.startswith(sentence)
    assert not outcome.sentence.count("\n") and outcome.sentence.endswith(".")


def count_saved_bytes(group, regather_kv):
    """Return the number of bytes that autograd saves for the backward pass of attention."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 512))
    storages = {}

    def record_storage(x):
        storages[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record_storage, lambda x: x):
        out, _ = distributed.zigzag_attention(
            q, k, v, group=group, block=BLOCK, engine="reference", regather_kv=regather_kv
        )
    return sum(storage.nbytes() for storage in storages.values())


def test_autograd_does_not_save_gathered_keys(ranks):
    # bytes of K and V of all 1,024 tokens, with 2 heads of 16 channels in float32
    gathered_kv_bytes = 2 * 1024 * 2 * 16 * 4
    with_saved_kv, with_regathered_kv = (
        ranks.run(2, count_saved_bytes, regather_kv)[0] for regather_kv in (False, True)
    )
    assert with_saved_kv - with_regathered_kv == gathered_kv_bytes


def train_with_one_pass_inside(group, reentrant, inside):
    """Run a training step of which only one pass, ``inside``, is in `context_parallel`.

    Args:
        inside: "forward" or "backward".
    """
    model = make_model("cab", SPARSE).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    ids, outside = tokens(1, 512), nullcontext()
    inputs = {"input_ids": ids, "labels": ids}
    if inside == "forward":
        inputs = distributed.shard(inputs, group, 32)
    block = cab_hf.context_parallel(model, group, block=32)
    with block if inside == "forward" else outside:
        loss = model(**inputs, use_cache=False).loss
    with block if inside == "backward" else outside:
        loss.backward()


@pytest.mark.parametrize("inside", ["forward", "backward"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_outside_of_block_raises(ranks, reentrant, inside):
    for outcome in ranks.outcomes(2, train_with_one_pass_inside, reentrant, inside):
        assert isinstance(outcome, Failure)
        assert "was left or entered in between" in outcome.sentence
