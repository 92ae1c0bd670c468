"""Models on several ranks with sharded sequences equal the same models in one process."""

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from marks import mark_slow_except
from shards import BLOCK_TOKENS, assert_same_gradients, make_model
from tiny import FULL_BUDGET_CONFIG, SPARSE_CONFIG, draw_token_ids
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cab_hf
from cab_hf import distributed
from cab_hf.distributed.sharding import get_sharding
from cab_hf.eval import methods  # noqa: F401  registers predictors of other methods
from cab_hf.plan import KeyRanges

PACKED_BOUNDARIES = [0, 70, 71, 300, 655]
CONFIGS = {
    "sparse": SPARSE_CONFIG,
    "no-hops": replace(SPARSE_CONFIG, redundancy=0),
    "full": FULL_BUDGET_CONFIG,
    "some-documents-exact": replace(SPARSE_CONFIG, min_length=300),
    "a-dense-layer": replace(SPARSE_CONFIG, dense_layers=(1,)),
    "streaming": SPARSE_CONFIG.changed(predictor="streaming"),
    "cascade": replace(SPARSE_CONFIG, predictor="cascade", anchors=(0,)),
    "cascade-exact": replace(
        SPARSE_CONFIG,
        **{"predictor": "cascade", "anchors": (0,), "outlier_queries": 4},
        head_map=((0,) * 6, (5, 0, 0, 1, 4, 2)),
        min_length=300,
    ),
}
# RoPE frequencies depend on the largest position, which only one rank has: with 400 tokens on two
# ranks, the first rank has the last token, and the second rank has tokens 128 to 383
DYNAMIC_ROPE_FIELDS = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "max_position_embeddings": 128,
}
LONGROPE_FIELDS = {
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0},
        **{"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]},
        "original_max_position_embeddings": 390,
    }
}
ROUTER_LOSS_FIELDS = {
    "family": "mixtral",
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}


def make_batch(num_tokens, cu_seqlens=None, num_rows=2):
    input_ids = draw_token_ids(num_rows, num_tokens)
    labels = input_ids.clone()
    labels[:, :7] = -100
    batch = {"input_ids": input_ids, "labels": labels}
    if cu_seqlens is not None:
        batch["cu_seq_lens_q"] = torch.tensor(cu_seqlens, dtype=torch.int32)
    return batch


def run_training_step(model, inputs):
    """Return (loss, logits, gradients of all parameters by name)."""
    outputs = model(**inputs, use_cache=False)
    # run backward in another thread, as autograd does for CUDA tensors
    with ThreadPoolExecutor(1) as autograd_thread:
        autograd_thread.submit(outputs.loss.backward).result()
    gradients = {
        parameter_name: parameter.grad for parameter_name, parameter in model.named_parameters()
    }
    return outputs.loss.detach(), outputs.logits.detach(), gradients


def run_training_step_of_rank(group, batch, model_fields, parallel_settings):
    """Run a step on a shard; return (own loss, logits of all ranks, own gradients by name).

    ``model_fields`` are the arguments of `make_model`. ``parallel_settings`` are arguments of
    `context_parallel`, and "checkpointing".
    """
    model = make_model(**model_fields).train()
    if parallel_settings.get("checkpointing"):
        model.gradient_checkpointing_enable()
    # gather one KV head at a time, so that the next all-gather overlaps with attention
    context_arguments = {"heads_k_stride": 1, **parallel_settings}
    context_arguments.pop("checkpointing", None)
    with cab_hf.context_parallel(model, group, block=BLOCK_TOKENS, **context_arguments):
        inputs = distributed.shard(batch, group, BLOCK_TOKENS)
        loss, logits, gradients = run_training_step(model, inputs)
    all_logits = distributed.unshard(logits, inputs["cu_seq_lens_q"], group, block=BLOCK_TOKENS)
    return loss, all_logits, gradients


def run_training_step_in_one_process(batch, model_fields):
    model = make_model(**model_fields).train()
    batch = dict(batch)
    if "cu_seq_lens_q" in batch:
        boundaries = batch["cu_seq_lens_q"].tolist()
        document_lengths = [end - start for start, end in pairwise(boundaries)]
        batch["position_ids"] = torch.cat(
            [torch.arange(document_length) for document_length in document_lengths]
        )[None]
    return run_training_step(model, batch)


def assert_same_step(actual, expected):
    """Assert that losses and gradients of all ranks sum to those of one process.

    The logits of each rank must equal the logits of one process.
    """
    loss, logits, gradients = expected
    losses_of_ranks = torch.stack([loss_of_rank for loss_of_rank, _, _ in actual])
    assert losses_of_ranks.sum() == pytest.approx(float(loss), rel=1e-5)
    for _, logits_of_rank, _ in actual:
        assert (logits_of_rank - logits).abs().max() <= 1e-4 * logits.abs().max()
    assert_same_gradients([gradients_of_rank for _, _, gradients_of_rank in actual], gradients)


def make_cab_model_fields(config=SPARSE_CONFIG, **fields):
    """Return arguments of `make_model` for a model with attn_implementation "cab"."""
    return {"implementation": "cab", "config": config, **fields}


@pytest.mark.parametrize("cu_seqlens", [None, PACKED_BOUNDARIES], ids=["one-document", "packed"])
@pytest.mark.parametrize("config_name", mark_slow_except(CONFIGS, 0, 2, 3, 7))
def test_training_step_equals_single_process(ranks, config_name, cu_seqlens):
    batch, model_fields = make_batch(655, cu_seqlens), make_cab_model_fields(CONFIGS[config_name])
    actual = ranks.run(4, run_training_step_of_rank, batch, model_fields, {})
    assert_same_step(actual, run_training_step_in_one_process(batch, model_fields))


@pytest.mark.parametrize(
    ("model_fields", "parallel_settings", "world_size"),
    [
        pytest.param({"implementation": "cab_dense"}, {}, 2, id="cab_dense"),
        pytest.param(make_cab_model_fields(), {"checkpointing": True}, 2, id="checkpointing"),
        # with as many KV heads as query heads, engines save K and V without repeating heads
        pytest.param(
            make_cab_model_fields(num_key_value_heads=6),
            {"checkpointing": True},
            2,
            id="checkpointing-of-own-keys",
        ),
        pytest.param(
            make_cab_model_fields(CONFIGS["cascade"]),
            {"checkpointing": True},
            2,
            id="cascade-checkpointed",
        ),
        pytest.param(make_cab_model_fields(), {"heads_k_stride": 2}, 2, id="both-heads-at-once"),
        # ranks draw different random blocks, unless sampled_one_in=1 samples all blocks
        pytest.param(
            make_cab_model_fields(replace(SPARSE_CONFIG, sampled_one_in=1)), {}, 2, id="all-sampled"
        ),
        pytest.param(make_cab_model_fields(), {}, 1, id="alone"),
        pytest.param(make_cab_model_fields(family="mistral-sliding"), {}, 4, id="a-sliding-window"),
        pytest.param(make_cab_model_fields(family="qwen3-some-sliding"), {}, 2, id="some-sliding"),
        pytest.param(make_cab_model_fields(family="granite-swa"), {}, 2, id="sinks"),
        pytest.param(make_cab_model_fields(**DYNAMIC_ROPE_FIELDS), {}, 2, id="dynamic-rope"),
        pytest.param(
            make_cab_model_fields(**LONGROPE_FIELDS), {"checkpointing": True}, 2, id="longrope"
        ),
        pytest.param(make_cab_model_fields(**ROUTER_LOSS_FIELDS), {}, 2, id="a-router-loss"),
        pytest.param(
            make_cab_model_fields(**ROUTER_LOSS_FIELDS),
            {"checkpointing": True},
            4,
            id="a-router-loss-checkpointed",
        ),
        pytest.param(
            make_cab_model_fields(FULL_BUDGET_CONFIG, **ROUTER_LOSS_FIELDS),
            {"ends": [0, 70, 71, 300, 400]},
            2,
            id="a-router-loss-packed",
        ),
        # RoPE frequencies depend on the longest document
        pytest.param(
            make_cab_model_fields(FULL_BUDGET_CONFIG, **DYNAMIC_ROPE_FIELDS),
            {"ends": [0, 70, 71, 200, 400]},
            4,
            id="dynamic-rope-packed",
        ),
    ],
)
def test_training_step_of_other_models_and_settings_equals_single_process(
    ranks, model_fields, parallel_settings, world_size
):
    parallel_settings = dict(parallel_settings)
    batch = make_batch(400, parallel_settings.pop("ends", None))
    actual = ranks.run(
        world_size, run_training_step_of_rank, batch, model_fields, parallel_settings
    )
    assert_same_step(actual, run_training_step_in_one_process(batch, model_fields))


def count_cached_entries_after_passes(group, batch):
    """Return the number of cached entries in all living `KeyRanges` after each of three passes."""
    model, cached_entry_counts = make_model("cab", CONFIGS["some-documents-exact"]), []
    for _ in range(3):
        with torch.no_grad(), cab_hf.context_parallel(model, group, block=BLOCK_TOKENS):
            model(**distributed.shard(batch, group, BLOCK_TOKENS), use_cache=False)
        gc.collect()
        cached_entry_counts.append(
            sum(
                len(live_object._cache)
                for live_object in gc.get_objects()
                if isinstance(live_object, KeyRanges)
            )
        )
    return cached_entry_counts


def test_forward_pass_frees_its_caches(ranks):
    for first_count, *later_counts in ranks.run(
        2, count_cached_entries_after_passes, make_batch(655, PACKED_BOUNDARIES)
    ):
        assert later_counts == [first_count, first_count]


def generate_on_rank(group, input_ids):
    """Prefill a sharded sequence, gather its cache and generate, as `whole_cache` describes."""
    model = make_model("cab", SPARSE_CONFIG)
    with torch.no_grad(), cab_hf.context_parallel(model, group, block=BLOCK_TOKENS):
        inputs = distributed.shard({"input_ids": input_ids}, group, BLOCK_TOKENS)
        cache = model(**inputs, use_cache=True).past_key_values
    cache = distributed.whole_cache(cache, inputs["cu_seq_lens_q"], group, BLOCK_TOKENS)
    # run the call that the docstring of `whole_cache` shows
    (crop_call,) = re.findall(r"``(cache\.crop\(.*?\))``", distributed.whole_cache.__doc__)
    eval(crop_call, {"cache": cache, "N": input_ids.shape[1]})
    return model.generate(input_ids, past_key_values=cache, max_new_tokens=8, do_sample=False)


def test_generation_continues_from_sharded_prefill(ranks):
    input_ids = draw_token_ids(1, 333)
    expected = make_model("cab", SPARSE_CONFIG).generate(
        input_ids, max_new_tokens=8, do_sample=False
    )
    for actual in ranks.run(4, generate_on_rank, input_ids):
        assert torch.equal(actual, expected)


def test_unshard_inverts_shard(ranks):
    batch = make_batch(655, PACKED_BOUNDARIES)
    for unsharded_ids in ranks.run(4, shard_and_unshard_ids, batch):
        assert torch.equal(unsharded_ids, batch["input_ids"])


def shard_and_unshard_ids(group, batch):
    sharded_batch = distributed.shard(batch, group, BLOCK_TOKENS)
    return distributed.unshard(
        sharded_batch["input_ids"], sharded_batch["cu_seq_lens_q"], group, block=BLOCK_TOKENS
    )


def test_shard_of_handwritten_batch(ranks):
    sharding = get_sharding((5, 40), 2, 16)
    assert sharding.chunk_lengths == (16, 16) and sharding.tokens_per_rank == 64
    # rank 0 has the 5 tokens of the first document, and the start and end of the second document
    assert sharding.is_real.sum(1).tolist() == [5 + 16, 16 + 8]
    assert sharding.sequence_index[1, 32:48].tolist() == list(range(21, 37))
    assert sharding.positions[1, 48:].tolist() == [*range(32, 40), *[39] * 8]
    batch = {"input_ids": torch.arange(10, 55)[None], "labels": torch.arange(10, 55)[None]}
    batch["position_ids"] = torch.cat((torch.arange(5), torch.arange(40)))[None]
    shard_of_rank_0, shard_of_rank_1 = ranks.run(2, shard_batch, batch)
    assert shard_of_rank_0["input_ids"][0, :6].tolist() == [10, 11, 12, 13, 14, 0]
    # the shifted label of the last token of a document is the first token of the next document
    assert shard_of_rank_0["shift_labels"][0, :6].tolist() == [11, 12, 13, 14, 15, -100]
    assert shard_of_rank_1["labels"][0, 48:].tolist() == [*range(48, 55), *[-100] * 9]
    assert shard_of_rank_0["num_items_in_batch"] == 44
    assert shard_of_rank_0["cu_seq_lens_q"].tolist() == [0, 5, 45]
    batch["shift_labels"] = batch.pop("labels") + 100
    shifted_shard = ranks.run(2, shard_batch, batch)[1]
    # labels that are already shifted are sharded without another shift
    assert shifted_shard["labels"][0, 48:].tolist() == [*range(147, 155), *[-100] * 8]
    assert shifted_shard["num_items_in_batch"] == 45


def shard_batch(group, batch):
    return distributed.shard(batch, group, 16)


def compute_gradients_of_wrapped_model(group, batches, wrapper_name):
    """Return gradients of a step on two sequences, each sharded over two of four ranks."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = WRAPPER_FUNCTIONS[wrapper_name](make_model("cab", SPARSE_CONFIG).train())
    batch, sequence_group = batches[device_mesh.get_local_rank("dp")], device_mesh.get_group("cp")
    with cab_hf.context_parallel(model, sequence_group, block=BLOCK_TOKENS):
        inputs = distributed.shard(batch, sequence_group, BLOCK_TOKENS)
        # factor 2: the wrapper averages gradients over four ranks, and two ranks share a sequence
        loss = 2 * model(**inputs, use_cache=False).loss
        loss.backward()
    gradients = {
        parameter_name: parameter.grad for parameter_name, parameter in model.named_parameters()
    }
    return {
        parameter_name.removeprefix("module."): gradient.full_tensor()
        if isinstance(gradient, DTensor)
        else gradient
        for parameter_name, gradient in gradients.items()
    }


def apply_fsdp(model):
    device_mesh = init_device_mesh("cpu", (4,))
    for decoder_layer in model.model.layers:
        fully_shard(decoder_layer, mesh=device_mesh)
    return fully_shard(model, mesh=device_mesh)


WRAPPER_FUNCTIONS = {
    "ddp": DistributedDataParallel,
    "fsdp2": apply_fsdp,
}


@pytest.mark.parametrize("wrapper_name", WRAPPER_FUNCTIONS)
def test_data_parallel_wrappers_match_single_process(start_ranks, wrapper_name):
    batches = [make_batch(400), make_batch(400)]
    batches[1]["input_ids"] = draw_token_ids(2, 400, seed=5)
    # start exactly four processes, because wrappers communicate with all processes
    gradients_of_ranks = start_ranks(4).run(
        4, compute_gradients_of_wrapped_model, batches, wrapper_name
    )
    first_gradients, second_gradients = (
        run_training_step_in_one_process(batch, make_cab_model_fields())[2] for batch in batches
    )
    for parameter_name in first_gradients:
        expected = (first_gradients[parameter_name] + second_gradients[parameter_name]) / 2
        for gradients in gradients_of_ranks:
            assert (
                gradients[parameter_name] - expected
            ).abs().max() <= 1e-4 * expected.abs().max(), parameter_name
