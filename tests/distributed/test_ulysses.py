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
from tiny import SPARSE, tokens
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.functional import cross_entropy
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cab_hf import CabConfig

LENGTH = 512
# document lengths by name; the shard of the second rank starts inside a document
DOCUMENT_LENGTHS = {"one-document": (LENGTH,), "packed": (150, 1, 230, 131)}
CASES = {"cab_dense": ("cab_dense", None), "cab": ("cab", SPARSE)}


def make_batch(documents):
    positions = torch.cat([torch.arange(size) for size in documents])[None]
    return {"input_ids": tokens(1, LENGTH), "position_ids": positions}, tokens(1, LENGTH, seed=2)


def run_step(model, inputs, labels):
    """Return (logits, gradients by name) of the sum of token losses divided by ``LENGTH``."""
    logits = model(**inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / LENGTH
    loss.backward()
    return logits.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def exchange_dimensions(x, group, scatter_dim, gather_dim):
    """Exchange ``x`` by all-to-all: shard the dimension ``scatter_dim``, gather ``gather_dim``."""
    shards = x.unflatten(scatter_dim, (group.size(), -1)).movedim(scatter_dim, 0).contiguous()
    shards = all_to_all_single(torch.empty_like(shards), shards, group=group)
    return torch.cat(list(shards), dim=gather_dim)


@contextmanager
def use_torch_exchange(model, group):
    name = model.config._attn_implementation
    attention_function = ALL_ATTENTION_FUNCTIONS[name]

    def attend(module, query, key, value, mask, position_ids, **kwargs):
        positions = [torch.empty_like(position_ids) for _ in range(group.size())]
        dist.all_gather(positions, position_ids, group=group)
        query, key, value = (exchange_dimensions(x, group, 1, 2) for x in (query, key, value))
        kwargs["position_ids"] = torch.cat(positions, dim=1)
        out, _ = attention_function(module, query, key, value, attention_mask=None, **kwargs)
        return exchange_dimensions(out, group, 1, 2), None

    ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield
    finally:
        # the global registration of "cab" is visible again
        del ALL_ATTENTION_FUNCTIONS[name]


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


BACKENDS = {"torch": use_torch_exchange, "deepspeed": use_deepspeed_exchange}


def run_step_of_rank(group, backend, case, batch):
    """Run a step on the shard of this rank, and return (logits, gradients by name).

    ``batch`` is (inputs, labels) of the whole sequence.
    """
    model, (inputs, labels) = build_model_of_case(case), batch
    with BACKENDS[backend](model, group):
        return run_step(model, take_shards(inputs, group), take_shard(labels, group))


def build_model_of_case(case):
    implementation, config = case
    return make_model(implementation, config).train()


def take_shard(x, group):
    return x.chunk(group.size(), dim=1)[group.rank()]


def take_shards(inputs, group):
    return {name: take_shard(x, group) for name, x in inputs.items()}


def assert_same_step(actual, case, batch):
    """Assert that the steps of all ranks equal the step of one process."""
    inputs, labels = batch
    logits, gradients = run_step(build_model_of_case(case), inputs, labels)
    all_logits = torch.cat([logits_of_rank for logits_of_rank, _ in actual], dim=1)
    assert (all_logits - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert_same_gradients([gradients_of_rank for _, gradients_of_rank in actual], gradients)


@pytest.mark.parametrize("name", DOCUMENT_LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_training_step_equals_single_process(ranks, case, name):
    case, batch = CASES[case], make_batch(DOCUMENT_LENGTHS[name])
    assert_same_step(ranks.run(2, run_step_of_rank, "torch", case, batch), case, batch)


@pytest.fixture
def two(start_ranks):
    """Start two processes for one test, because DeepSpeed changes them permanently."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    return start_ranks(2)


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_training_step_equals_single_process(two, case):
    case, batch = CASES[case], make_batch(DOCUMENT_LENGTHS["packed"])
    assert_same_step(two.run(2, run_step_of_rank, "deepspeed", case, batch), case, batch)


def compute_logits_by_accelerate(group, case, inputs):
    init_deepspeed(group)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import Accelerator
    from accelerate.utils import (
        DeepSpeedPlugin,
        DeepSpeedSequenceParallelConfig,
        ParallelismConfig,
    )

    handler = DeepSpeedSequenceParallelConfig()
    # the constructor accepts implementation names of transformers only
    handler.sp_attn_implementation, _ = case
    parallelism = ParallelismConfig(
        sp_backend="deepspeed", sp_size=group.size(), sp_handler=handler
    )
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism)
    model = build_model_of_case(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, *_ = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader([0]))
    return model(**take_shards(inputs, group), use_cache=False).logits.detach()


def test_accelerate_passes_implementation_to_deepspeed(two):
    case, (inputs, _) = CASES["cab"], make_batch(DOCUMENT_LENGTHS["packed"])
    actual = torch.cat(two.run(2, compute_logits_by_accelerate, case, inputs), dim=1)
    expected = build_model_of_case(case)(**inputs, use_cache=False).logits
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_per_head_budgets_raise(ranks):
    """A rank has 3 of 6 heads, and cannot know which rows of a per-head table apply."""
    tables = CabConfig.published(((0.3, 0.4, 0.5, 0.6, 0.7, 0.8),) * 2, min_length=0)
    case, batch = ("cab", tables), make_batch(DOCUMENT_LENGTHS["one-document"])
    for outcome in ranks.outcomes(2, run_step_of_rank, "torch", case, batch):
        assert isinstance(outcome, Failure) and outcome.kind == "ValueError"
        assert "layer 0 with 3 heads, got a table of 2 layers of 6 heads" in outcome.sentence
