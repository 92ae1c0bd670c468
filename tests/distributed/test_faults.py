"""Every rank raises an error if arguments or shards differ between ranks or a rank dies."""

import os
import re
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from ranks import Failure
from shards import BLOCK_TOKENS, make_model, make_sharding, take_shard
from tiny import SPARSE_CONFIG, draw_qkv, draw_token_ids

import cab_hf
from cab_hf import distributed
from cab_hf.call.hook import cab_mask
from cab_hf.call.layout import make_plan_of_visible_blocks
from cab_hf.distributed import sharding as sharding_module
from cab_hf.distributed.sharded import ShardedLayout
from cab_hf.engines import REFERENCE

# seconds after which a collective fails if a rank does not take part
COLLECTIVE_TIMEOUT_SECONDS = 20


def build_one_layer_model(implementation="cab"):
    return make_model(implementation, SPARSE_CONFIG, num_hidden_layers=1)


def attend_with_changed_arguments(group, changed_arguments):
    """Run attention; rank 1 draws its inputs with other arguments than the other ranks.

    ``changed_arguments`` are arguments of `draw_qkv`, or ``cu_seqlens``.
    """
    qkv_arguments = {"heads": 4, "kv_heads": 2, "q_length": 128, "dim": 16}
    qkv_arguments |= {"dtype": torch.float32, "batch": 1, "cu_seqlens": None}
    if group.rank() == 1:
        qkv_arguments |= changed_arguments
    cu_seqlens = qkv_arguments.pop("cu_seqlens")
    q, k, v = draw_qkv(**qkv_arguments)
    return distributed.zigzag_attention(
        q, k, v, group=group, block=BLOCK_TOKENS, cu_seqlens=cu_seqlens
    )


@pytest.mark.parametrize(
    ("changed_arguments", "error_pattern"),
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
def test_inconsistent_arguments_raise_on_all_ranks(ranks, changed_arguments, error_pattern):
    for outcome in ranks.collect_outcomes(2, attend_with_changed_arguments, changed_arguments):
        assert isinstance(outcome, Failure) and outcome.error_type == "ValueError"
        with pytest.raises(ValueError, match=error_pattern):
            raise ValueError(outcome.message)


def run_model_with_positions_of_ranks(group, position_owners):
    """Run a model on each rank, with the position ids of the shard of another rank.

    Args:
        position_owners: for each rank, the rank whose position ids it gets.
    """
    batch = {"input_ids": draw_token_ids(1, 256)}
    inputs = distributed.shard(batch, group, BLOCK_TOKENS)
    sharding = sharding_module.get_sharding((256,), group.size(), BLOCK_TOKENS)
    inputs["position_ids"] = sharding.positions[position_owners[group.rank()]][None]
    with (
        torch.no_grad(),
        cab_hf.context_parallel(build_one_layer_model(), group, block=BLOCK_TOKENS) as model,
    ):
        return model(**inputs, use_cache=False)


@pytest.mark.parametrize(
    ("position_owners", "error_pattern"),
    [
        pytest.param(
            (0, 0), "tokens at positions of another rank must be equal .* got 0 on rank 0", id="one"
        ),
        pytest.param((1, 0), "must describe the 128 tokens of rank", id="swapped"),
    ],
)
def test_positions_of_another_rank_raise(ranks, position_owners, error_pattern):
    for outcome in ranks.collect_outcomes(2, run_model_with_positions_of_ranks, position_owners):
        with pytest.raises(ValueError, match=error_pattern):
            raise ValueError(outcome.message)


def run_model_with_other_settings(group):
    """Run a model on each rank; rank 1 has another mass threshold."""
    model = build_one_layer_model()
    if group.rank() == 1:
        model.config.cab_config = replace(SPARSE_CONFIG, mass_threshold=0.09).to_dict()
    inputs = distributed.shard({"input_ids": draw_token_ids(1, 256)}, group, BLOCK_TOKENS)
    with torch.no_grad(), cab_hf.context_parallel(model, group, block=BLOCK_TOKENS):
        return model(**inputs, use_cache=False)


def test_different_settings_raise_on_all_ranks(ranks):
    for outcome in ranks.collect_outcomes(2, run_model_with_other_settings):
        assert outcome.message.startswith("settings (checksum) must be equal")


def run_model_with_another_batch(group, changed_input, token_index):
    """Run a model on each rank; ``changed_input`` of rank 1 differs at token ``token_index``."""
    batch = {"input_ids": draw_token_ids(2, 256), "labels": draw_token_ids(2, 256)}
    if group.rank() == 1:
        batch[changed_input][1, token_index] = 1
    inputs = distributed.shard(batch, group, BLOCK_TOKENS)
    if changed_input == "input_ids":
        inputs["inputs_embeds"] = build_one_layer_model().get_input_embeddings()(
            inputs.pop("input_ids")
        )
    with (
        torch.no_grad(),
        cab_hf.context_parallel(build_one_layer_model(), group, block=BLOCK_TOKENS) as model,
    ):
        return model(**inputs, use_cache=False)


@pytest.mark.parametrize("changed_input", ["input_ids", "labels"])
@pytest.mark.parametrize("token_index", [1, 100], ids=["of-the-first-rank", "of-the-second-rank"])
def test_different_batches_raise_on_all_ranks(ranks, changed_input, token_index):
    for outcome in ranks.collect_outcomes(
        2, run_model_with_another_batch, changed_input, token_index
    ):
        assert outcome.error_type == "ValueError"
        assert re.match(
            r"tokens or labels \(checksum\) must be equal .* got \d+ on rank 0, \d+ on rank 1\. ",
            outcome.message,
        )


def measure_attention_error(group, injected_fault):
    """Return the maximum difference between this rank's output and attention in one process.

    Args:
        injected_fault: "permutation" (wrong order of gathered keys), "positions" (those of the
            other rank), or None.
    """
    sharding, rank = make_sharding(group.size(), [0, 300]), group.rank()
    q, k, v = draw_qkv(1, 4, 2, sharding.num_tokens)
    shard_map = sharding_module._shard_map.__wrapped__(
        sharding, sharding.dense_block_size, torch.device("cpu")
    )
    if injected_fault == "permutation":
        shard_map = replace(shard_map, token_of_slot=shard_map.token_of_slot.flip(0))
    if injected_fault == "positions":
        rank = 1 - rank
    layout = ShardedLayout(shard_map, group, shard_map.ranges(rank, 1))
    plan = make_plan_of_visible_blocks(layout.ranges, sharding.dense_block_size)
    q_shard, k_shard, v_shard = (take_shard(x, sharding, group.rank()) for x in (q, k, v))
    out = layout.attend(REFERENCE, q_shard, k_shard, v_shard, plan=plan, scale=0.25)
    exact_output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    output_difference = out - take_shard(exact_output, sharding, group.rank())
    return output_difference[:, :, sharding.is_real[group.rank()]].abs().max()


@pytest.mark.parametrize("injected_fault", ["permutation", "positions"])
def test_misplaced_shards_change_the_result(ranks, injected_fault):
    assert max(ranks.run(2, measure_attention_error, None)) < 1e-5
    assert min(ranks.run(2, measure_attention_error, injected_fault)) > 0.1


def attend_until_rank_dies(group, death_kind):
    """Run attention twice; rank 1 dies before the second call.

    Other ranks return (message of the error, seconds until the error).
    """
    q, k, v = draw_qkv(1, 4, 2, 128)
    distributed.zigzag_attention(q, k, v, group=group, block=BLOCK_TOKENS)
    model = build_one_layer_model()
    start_time = time.monotonic()
    try:
        with cab_hf.context_parallel(model, group, block=BLOCK_TOKENS):
            if group.rank() == 1 and death_kind == "killed":
                os._exit(9)
            if group.rank() == 1:
                raise MemoryError("the third layer did not fit")
            distributed.zigzag_attention(q, k, v, group=group, block=BLOCK_TOKENS)
    except MemoryError:
        # exiting closes the connections of this process, so that collectives of other ranks fail
        os._exit(1)
    except distributed.RankLost as error:
        return str(error), time.monotonic() - start_time


@pytest.mark.parametrize(
    ("death_kind", "expected_cause"),
    [
        ("killed", "rank 1 stopped without reporting an error"),
        ("raised", "rank 1 stopped: MemoryError: the third layer did not fit"),
    ],
)
def test_dead_rank_stops_other_ranks(start_ranks, death_kind, expected_cause):
    outcomes = start_ranks(3, COLLECTIVE_TIMEOUT_SECONDS).collect_outcomes(
        3, attend_until_rank_dies, death_kind
    )
    assert outcomes[1] is None
    for rank in (0, 2):
        error_message, elapsed_seconds = outcomes[rank]
        assert error_message.startswith(f"rank {rank} of 3 stops: {expected_cause} (")
        assert elapsed_seconds < COLLECTIVE_TIMEOUT_SECONDS


def run_model_with_unsupported_argument(group, unsupported_case):
    """Run a model with the unsupported argument or setting that ``unsupported_case`` names."""
    model = build_one_layer_model("sdpa" if unsupported_case == "implementation" else "cab")
    batch = {"input_ids": draw_token_ids(1, 256)}
    if unsupported_case == "padding":
        batch["attention_mask"] = torch.ones(1, 256).tril(-1)
    if unsupported_case == "unknown":
        batch["pixel_values"] = torch.ones(1)
    if unsupported_case == "labels":
        batch["labels"] = batch["shift_labels"] = batch["input_ids"]
    if unsupported_case == "leap":
        batch["position_ids"] = torch.arange(1, 257)[None]
    if unsupported_case == "end":
        batch["cu_seq_lens_q"] = torch.tensor([0, 200])
    if unsupported_case == "group":
        group = "cp"
    with torch.no_grad(), cab_hf.context_parallel(model, group, block=BLOCK_TOKENS):
        inputs = distributed.shard(batch, group, BLOCK_TOKENS)
        if unsupported_case == "twice":
            with cab_hf.context_parallel(model, group, block=BLOCK_TOKENS):
                pass
        if unsupported_case == "mask":
            inputs["attention_mask"] = torch.arange(256)[None] > 3
        if unsupported_case == "unsharded":
            inputs = batch
        if unsupported_case == "layer":
            hidden_states, rotary_embeddings = torch.ones(1, 256, 48), 2 * [torch.ones(1, 256, 16)]
            model.model.layers[0].self_attn(
                hidden_states, rotary_embeddings, attention_mask=cab_mask(1, 256, 256)
            )
        cache = model(**inputs, use_cache=unsupported_case == "cache").past_key_values
        if unsupported_case == "cache":
            model(**inputs, past_key_values=cache)


@pytest.mark.parametrize(
    ("unsupported_case", "error_start"),
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
def test_unsupported_arguments_raise(ranks, unsupported_case, error_start):
    (outcome,) = ranks.collect_outcomes(1, run_model_with_unsupported_argument, unsupported_case)
    assert isinstance(outcome, Failure) and outcome.message.startswith(error_start)
    assert not outcome.message.count("\n") and outcome.message.endswith(".")


def count_saved_bytes(group, regather_kv):
    """Return the number of bytes that autograd saves for the backward pass of attention."""
    q, k, v = (x.requires_grad_() for x in draw_qkv(1, 2, 2, 512))
    storage_by_address = {}

    def record_storage(x):
        storage_by_address[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record_storage, lambda x: x):
        out, _ = distributed.zigzag_attention(
            q, k, v, group=group, block=BLOCK_TOKENS, engine="reference", regather_kv=regather_kv
        )
    return sum(storage.nbytes() for storage in storage_by_address.values())


def test_autograd_does_not_save_gathered_keys(ranks):
    # bytes of K and V of all 1,024 tokens, with 2 heads of 16 channels in float32
    gathered_kv_bytes = 2 * 1024 * 2 * 16 * 4
    bytes_with_saved_kv, bytes_with_regathered_kv = (
        ranks.run(2, count_saved_bytes, regather_kv)[0] for regather_kv in (False, True)
    )
    assert bytes_with_saved_kv - bytes_with_regathered_kv == gathered_kv_bytes


def train_with_one_pass_in_context(group, use_reentrant, pass_in_context):
    """Run a training step of which only one pass, ``pass_in_context``, is in `context_parallel`.

    Args:
        pass_in_context: "forward" or "backward".
    """
    model = make_model("cab", SPARSE_CONFIG).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    input_ids, null_context = draw_token_ids(1, 512), nullcontext()
    inputs = {"input_ids": input_ids, "labels": input_ids}
    if pass_in_context == "forward":
        inputs = distributed.shard(inputs, group, 32)
    parallel_context = cab_hf.context_parallel(model, group, block=32)
    with parallel_context if pass_in_context == "forward" else null_context:
        loss = model(**inputs, use_cache=False).loss
    with parallel_context if pass_in_context == "backward" else null_context:
        loss.backward()


@pytest.mark.parametrize("pass_in_context", ["forward", "backward"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_pass_outside_of_context_parallel_raises(ranks, use_reentrant, pass_in_context):
    for outcome in ranks.collect_outcomes(
        2, train_with_one_pass_in_context, use_reentrant, pass_in_context
    ):
        assert isinstance(outcome, Failure)
        assert "was left or entered in between" in outcome.message
