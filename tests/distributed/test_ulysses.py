"""Ulysses parallelism with "cab" and "cab_dense": each rank computes some heads of all tokens.

An exchange before and after the attention function converts shards of tokens to shards of heads.
DeepSpeed has a wrapper for this exchange. `use_torch_exchange` is the same exchange in PyTorch, for
environments without DeepSpeed.
"""

import os
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from ranks import Failure
from shards import assert_same_gradients, make_model
from tiny import SPARSE_CONFIG, draw_token_ids
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.functional import cross_entropy
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cab_hf import CabConfig

NUM_TOKENS = 512
# document lengths by name; the shard of the second rank starts inside a document
DOCUMENT_LENGTHS = {"one-document": (NUM_TOKENS,), "packed": (150, 1, 230, 131)}
MODEL_CASES = {"cab_dense": ("cab_dense", None), "cab": ("cab", SPARSE_CONFIG)}


def make_batch(document_lengths):
    position_ids = torch.cat(
        [torch.arange(document_length) for document_length in document_lengths]
    )[None]
    return {
        "input_ids": draw_token_ids(1, NUM_TOKENS),
        "position_ids": position_ids,
    }, draw_token_ids(1, NUM_TOKENS, seed=2)


def run_training_step(model, inputs, labels):
    """Return (logits, gradients by name) of the sum of token losses divided by ``NUM_TOKENS``."""
    logits = model(**inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / NUM_TOKENS
    loss.backward()
    return logits.detach(), {
        parameter_name: parameter.grad for parameter_name, parameter in model.named_parameters()
    }


def exchange_dimensions(tensor, group, scatter_dim, gather_dim):
    """Shard dimension ``scatter_dim`` and gather dimension ``gather_dim`` by all-to-all."""
    shards = tensor.unflatten(scatter_dim, (group.size(), -1)).movedim(scatter_dim, 0).contiguous()
    shards = all_to_all_single(torch.empty_like(shards), shards, group=group)
    return torch.cat(list(shards), dim=gather_dim)


@contextmanager
def use_torch_exchange(model, group):
    implementation = model.config._attn_implementation
    attention_function = ALL_ATTENTION_FUNCTIONS[implementation]

    def attend_with_exchange(module, query, key, value, mask, position_ids, **kwargs):
        position_ids_of_ranks = [torch.empty_like(position_ids) for _ in range(group.size())]
        dist.all_gather(position_ids_of_ranks, position_ids, group=group)
        query, key, value = (
            exchange_dimensions(tensor, group, 1, 2) for tensor in (query, key, value)
        )
        kwargs["position_ids"] = torch.cat(position_ids_of_ranks, dim=1)
        out, _ = attention_function(module, query, key, value, attention_mask=None, **kwargs)
        return exchange_dimensions(out, group, 1, 2), None

    ALL_ATTENTION_FUNCTIONS[implementation] = attend_with_exchange
    try:
        yield
    finally:
        # the global registration of "cab" is visible again
        del ALL_ATTENTION_FUNCTIONS[implementation]


def init_deepspeed(group):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(group.rank()))
    import deepspeed

    deepspeed.init_distributed("gloo")


@contextmanager
def use_deepspeed_exchange(model, group):
    init_deepspeed(group)
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    UlyssesSPAttentionHF.register_with_transformers(
        model,
        model.config._attn_implementation,
        sequence_parallel_size=group.size(),
        micro_batch_size=1,
    )
    yield


EXCHANGE_CONTEXTS = {"torch": use_torch_exchange, "deepspeed": use_deepspeed_exchange}


def run_training_step_of_rank(group, exchange_name, model_case, inputs_and_labels):
    """Run a step on the shard of this rank, and return (logits, gradients by name).

    ``inputs_and_labels`` is (inputs, labels) of the whole sequence.
    """
    model, (inputs, labels) = build_model_of_case(model_case), inputs_and_labels
    with EXCHANGE_CONTEXTS[exchange_name](model, group):
        return run_training_step(model, take_shards(inputs, group), take_shard(labels, group))


def build_model_of_case(model_case):
    implementation, config = model_case
    return make_model(implementation, config).train()


def take_shard(tensor, group):
    return tensor.chunk(group.size(), dim=1)[group.rank()]


def take_shards(inputs, group):
    return {input_name: take_shard(tensor, group) for input_name, tensor in inputs.items()}


def assert_same_step(actual, model_case, inputs_and_labels):
    """Assert that the steps of all ranks equal the step of one process."""
    inputs, labels = inputs_and_labels
    logits, gradients = run_training_step(build_model_of_case(model_case), inputs, labels)
    all_logits = torch.cat([logits_of_rank for logits_of_rank, _ in actual], dim=1)
    assert (all_logits - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert_same_gradients([gradients_of_rank for _, gradients_of_rank in actual], gradients)


@pytest.mark.parametrize("layout_name", DOCUMENT_LENGTHS)
@pytest.mark.parametrize("case_name", MODEL_CASES)
def test_training_step_equals_single_process(ranks, case_name, layout_name):
    model_case, inputs_and_labels = (
        MODEL_CASES[case_name],
        make_batch(DOCUMENT_LENGTHS[layout_name]),
    )
    actual = ranks.run(2, run_training_step_of_rank, "torch", model_case, inputs_and_labels)
    assert_same_step(actual, model_case, inputs_and_labels)


@pytest.fixture
def two_ranks(start_ranks):
    """Start two processes for one test, because DeepSpeed changes them permanently."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    return start_ranks(2)


@pytest.mark.parametrize("case_name", MODEL_CASES)
def test_deepspeed_training_step_equals_single_process(two_ranks, case_name):
    model_case, inputs_and_labels = (
        MODEL_CASES[case_name],
        make_batch(DOCUMENT_LENGTHS["packed"]),
    )
    actual = two_ranks.run(2, run_training_step_of_rank, "deepspeed", model_case, inputs_and_labels)
    assert_same_step(actual, model_case, inputs_and_labels)


def compute_logits_by_accelerate(group, model_case, inputs):
    init_deepspeed(group)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import Accelerator
    from accelerate.utils import (
        DeepSpeedPlugin,
        DeepSpeedSequenceParallelConfig,
        ParallelismConfig,
    )

    sequence_parallel_config = DeepSpeedSequenceParallelConfig()
    # the constructor accepts implementation names of transformers only
    sequence_parallel_config.sp_attn_implementation, _ = model_case
    parallelism_config = ParallelismConfig(
        sp_backend="deepspeed", sp_size=group.size(), sp_handler=sequence_parallel_config
    )
    deepspeed_config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config)
    accelerator = Accelerator(
        deepspeed_plugin=deepspeed_plugin, parallelism_config=parallelism_config
    )
    model = build_model_of_case(model_case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, *_ = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader([0]))
    return model(**take_shards(inputs, group), use_cache=False).logits.detach()


def test_accelerate_passes_implementation_to_deepspeed(two_ranks):
    model_case, (inputs, _) = MODEL_CASES["cab"], make_batch(DOCUMENT_LENGTHS["packed"])
    actual = torch.cat(two_ranks.run(2, compute_logits_by_accelerate, model_case, inputs), dim=1)
    expected = build_model_of_case(model_case)(**inputs, use_cache=False).logits
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_per_head_budgets_raise(ranks):
    """A rank has 3 of 6 heads, and cannot know which rows of a per-head table apply."""
    per_head_config = CabConfig.published(((0.3, 0.4, 0.5, 0.6, 0.7, 0.8),) * 2, min_length=0)
    model_case, inputs_and_labels = (
        ("cab", per_head_config),
        make_batch(DOCUMENT_LENGTHS["one-document"]),
    )
    for outcome in ranks.collect_outcomes(
        2, run_training_step_of_rank, "torch", model_case, inputs_and_labels
    ):
        assert isinstance(outcome, Failure) and outcome.error_type == "ValueError"
        assert "layer 0 with 3 heads, got a table of 2 layers of 6 heads" in outcome.message
