"""Sampled blocks: in training, a random sample of unlisted blocks estimates all of them."""

from dataclasses import replace

import pytest
import torch
from attention_cases import assert_engine_within_budget, draw_seeds, make_case, run_with_gradients
from marks import mark_slow_except
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model
from valid_plan import assert_valid_plan

import cab_hf
from cab_hf import BlockPlan, capability, engines
from cab_hf.dispatch import attended_pairs, validate_sample
from cab_hf.ops import reference

FOUR_HEADS_SHAPE = {"heads": 4, "kv_heads": 2}
CASES = [
    pytest.param(FOUR_HEADS_SHAPE | {"q_length": 200}, (32, 16), id="causal"),
    pytest.param(FOUR_HEADS_SHAPE | {"q_length": 70, "kv_length": 201}, (32, 16), id="chunk"),
    pytest.param(
        FOUR_HEADS_SHAPE | {"q_length": 200, "plan_heads": 2}, (32, 16), id="plan-of-groups"
    ),
    pytest.param(
        FOUR_HEADS_SHAPE | {"q_length": 150, "dense_rows": "tail"}, (32, 16), id="dense-rows"
    ),
    pytest.param(
        {"heads": 2, "kv_heads": 1, "q_length": 130, "layout": "packed", "batch": 2},
        (16, 32),
        id="packed",
    ),
    pytest.param(
        {"heads": 2, "kv_heads": 1, "q_length": 130, "layout": "padded", "batch": 2},
        (32, 16),
        id="padded",
    ),
    pytest.param({"heads": 2, "kv_heads": 1, "q_length": 130, "dim": 264}, (32, 16), id="split"),
]
SAMPLING_CONFIG = replace(SPARSE_CONFIG, sampled_one_in=3)


def make_sampled_case(shape, block_sizes, sample_period):
    """Return (q, k, v, output gradient, plan); the plan samples 1 / ``sample_period`` of blocks."""
    return make_case(
        "cpu",
        torch.float32,
        block_sizes,
        selection_probability=0.2,
        sample_period=sample_period,
        **shape,
    )


def test_sampled_one_in_without_triton_kernel_raises(monkeypatch):
    monkeypatch.setattr(capability, "CAPABILITY_OVERRIDE", (8, 0))
    workload = engines.Workload(
        device="cuda",
        head_dim=256,
        dtype=torch.float32,
        training=True,
        query_block=128,
        key_block=64,
    )
    with pytest.raises(
        ValueError, match="sampled_one_in must be 0 .* supports head dims .* not 256"
    ):
        validate_sample(workload)
    validate_sample(replace(workload, dtype=torch.bfloat16))
    validate_sample(replace(workload, device="cpu"))


@pytest.mark.parametrize(("shape", "block_sizes"), mark_slow_except(CASES, 0, 4))
def test_kernels_with_sampled_blocks_equal_reference(shape, block_sizes):
    q, k, v, grad, plan = make_sampled_case(shape, block_sizes, sample_period=3)
    assert plan.sampled.counts.sum() > 0
    assert_engine_within_budget(
        engines.TRITON.attention, q, k, v, grad_out=grad, plan=plan, scale=0.2
    )


def test_soft_cap_applies_to_listed_and_sampled_blocks():
    q, k, v, grad, plan = make_sampled_case(
        FOUR_HEADS_SHAPE | {"q_length": 150, "dense_rows": "tail"}, (32, 16), 3
    )
    assert_engine_within_budget(
        engines.TRITON.attention, q, k, v, grad_out=grad, plan=plan, scale=0.2, softcap=3.0
    )


@pytest.mark.parametrize(("shape", "block_sizes"), CASES)
def test_sample_period_1_equals_dense_attention(shape, block_sizes):
    """Period 1 samples every unlisted block, so that listed and sampled blocks are all blocks."""
    q, k, v, grad, plan = make_sampled_case(shape, block_sizes, sample_period=1)
    query_block, key_block = block_sizes
    dense_plan = BlockPlan.causal(plan.ranges, 1, query_block, key_block)
    expected = run_with_gradients(
        reference.attention, (q, k, v), grad_out=grad, plan=dense_plan, scale=0.2
    )
    actual = run_with_gradients(reference.attention, (q, k, v), grad_out=grad, plan=plan, scale=0.2)
    has_keys = (plan.ranges.end >= 0)[:, None, :, None]
    for tensor_name in expected:
        actual_tensor, expected_tensor = actual[tensor_name], expected[tensor_name]
        if tensor_name in ("out", "dq"):
            actual_tensor, expected_tensor = actual_tensor * has_keys, expected_tensor * has_keys
        torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-5, rtol=1e-5)
    assert plan.density() == dense_plan.density()


def test_unlisted_blocks_are_sampled_with_equal_probability():
    *_, plan = make_sampled_case(FOUR_HEADS_SHAPE | {"q_length": 640}, (32, 16), sample_period=4)
    sampled_plans = [plan.with_sample(4, seed) for seed in draw_seeds(300)]
    sampling_frequency = sum(x.of_sampled().to_dense().float() for x in sampled_plans) / len(
        sampled_plans
    )
    is_visible = BlockPlan.causal(plan.ranges, 1, 32, 16).to_dense()
    is_unlisted = is_visible & ~plan.to_dense()
    # the sampling frequency over 300 draws, per key block, per query block and per head
    assert (sampling_frequency[~is_unlisted] == 0).all()
    for summed_dims in ((0, 1, 2), (0, 1, 3), (0, 2, 3)):
        num_unlisted = is_unlisted.sum(summed_dims)
        mean_frequency = (sampling_frequency * is_unlisted).sum(summed_dims) / num_unlisted.clamp(
            min=1
        )
        assert (mean_frequency[num_unlisted > 20] - 0.25).abs().max() < 0.03
    is_sampled = torch.stack([x.of_sampled().to_dense() for x in sampled_plans]).float()
    # query block 19 and key block 4, for all heads and draws
    draws_of_one_block = is_sampled[:, 0, :, 19, 4]
    probability_of_both_heads = draws_of_one_block[:, 0].mul(draws_of_one_block[:, 1]).mean()
    assert probability_of_both_heads < 0.12, "samples of heads are not independent"


def test_sampled_estimate_of_softmax_sum_is_unbiased():
    q, k, v, _, plan = make_sampled_case(
        FOUR_HEADS_SHAPE | {"q_length": 200}, (32, 16), sample_period=4
    )
    dense_plan = BlockPlan.causal(plan.ranges, 1, 32, 16)
    expected_sums = reference.attention(q, k, v, dense_plan, scale=0.2, return_lse=True)[1].exp()
    sampled_plans = (plan.with_sample(4, seed) for seed in draw_seeds(300))
    softmax_sums = [
        reference.attention(q, k, v, x, scale=0.2, return_lse=True)[1].exp() for x in sampled_plans
    ]
    assert (sum(softmax_sums) / len(softmax_sums) / expected_sums).mean() == pytest.approx(
        1.0, abs=0.01
    )


def test_selected_heads_and_dense_rows_keep_sampled_blocks():
    *_, plan = make_sampled_case(FOUR_HEADS_SHAPE | {"q_length": 200}, (32, 16), sample_period=3)
    is_sampled = plan.of_sampled().to_dense()
    for changed_plan, expected in (
        (plan.slice_heads(1, 2, 4), is_sampled[:, 1:2]),
        (plan.select_heads([3, 0]), is_sampled[:, [3, 0]]),
    ):
        assert_valid_plan(changed_plan)
        assert torch.equal(changed_plan.of_sampled().to_dense(), expected)
    plan_with_dense_row = plan.with_dense_rows(torch.tensor([[6]]))
    assert_valid_plan(plan_with_dense_row)
    assert torch.equal(plan_with_dense_row.of_sampled().to_dense()[:, :, :6], is_sampled[:, :, :6])
    assert plan.density() > replace(plan, sampled=None).density()


def compute_gradients(model, ids, **checkpointing_options):
    """Run one training step with a fixed seed, and return a list of gradients.

    Args:
        checkpointing_options: arguments of gradient checkpointing; empty for no checkpointing.
    """
    model.train()
    if checkpointing_options:
        model.gradient_checkpointing_enable({"use_reentrant": False, **checkpointing_options})
        # also checkpoint layers whose input needs no gradient
        model.disable_input_require_grads()
    torch.manual_seed(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def measure_density(model, ids):
    """Run one training step and return the density that `attended_pairs` recorded."""
    attended_pairs.clear()
    compute_gradients(model, ids)
    num_attended, num_causal = sum(attended_pairs.values()).tolist()
    return num_attended / num_causal


def test_gradients_with_sample_period_1_equal_dense_gradients():
    ids = draw_token_ids(2, 200)
    model = cab_hf.apply_cab(make_tiny_model(), replace(SPARSE_CONFIG, sampled_one_in=1))
    assert measure_density(model, ids) == 1.0
    model.zero_grad()
    dense_gradients, sampled_gradients = (
        compute_gradients(make_tiny_model(), ids),
        compute_gradients(model, ids),
    )
    for actual_gradient, expected_gradient in zip(sampled_gradients, dense_gradients, strict=True):
        torch.testing.assert_close(actual_gradient, expected_gradient, atol=1e-5, rtol=1e-3)


def test_recompute_attends_to_the_same_sample():
    ids = draw_token_ids(2, 200)
    sampling_model, sparse_model = (
        cab_hf.apply_cab(make_tiny_model(), x) for x in (SAMPLING_CONFIG, SPARSE_CONFIG)
    )
    assert measure_density(sampling_model, ids) > measure_density(sparse_model, ids)
    sampling_model.zero_grad()
    expected_gradients = compute_gradients(sampling_model, ids)
    actual_gradients = compute_gradients(
        cab_hf.apply_cab(make_tiny_model(), SAMPLING_CONFIG), ids, preserve_rng_state=True
    )
    for actual_gradient, expected_gradient in zip(
        actual_gradients, expected_gradients, strict=True
    ):
        torch.testing.assert_close(actual_gradient, expected_gradient)


def test_recompute_reuses_plan_if_only_values_have_gradients():
    ids, gradients_of_runs = draw_token_ids(2, 200), []
    for checkpointing_options in ({}, {"preserve_rng_state": False}):
        model = cab_hf.apply_cab(make_tiny_model(), SAMPLING_CONFIG)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_("v_proj" in parameter_name)
        gradients_of_runs.append(compute_gradients(model, ids, **checkpointing_options))
    expected_gradients, actual_gradients = gradients_of_runs
    for actual, expected in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, expected)


def test_sampling_config_compiles_for_inference():
    model, ids = (
        cab_hf.apply_cab(make_tiny_model(num_hidden_layers=1), SAMPLING_CONFIG),
        draw_token_ids(1, 130),
    )
    torch._dynamo.reset()
    with torch.no_grad():
        compiled_model = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(
            compiled_model(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5
        )


def test_sampling_with_unaligned_documents_raises():
    """Sampling requires documents that are aligned to blocks; under torch.compile they are not."""
    model, ids = (
        cab_hf.apply_cab(make_tiny_model(num_hidden_layers=1), SAMPLING_CONFIG).train(),
        draw_token_ids(1, 400),
    )
    position_ids = torch.cat([torch.arange(90), torch.arange(310)])[None]
    torch._dynamo.reset()
    compiled_model = torch.compile(model, backend="eager")
    with pytest.raises(NotImplementedError, match="sampled_one_in must be 0 for packed documents"):
        compiled_model(input_ids=ids, position_ids=position_ids, use_cache=False)


def test_reentrant_checkpointing_with_sampling_raises():
    model, ids = (
        cab_hf.apply_cab(make_tiny_model(), SAMPLING_CONFIG).train(),
        draw_token_ids(1, 200),
    )
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with pytest.raises(RuntimeError, match="Set use_reentrant=False"):
        loss.backward()


def test_sampling_is_off_without_gradients():
    ids = draw_token_ids(1, 200)
    model = cab_hf.apply_cab(make_tiny_model(), SAMPLING_CONFIG)
    with torch.no_grad():
        actual_logits = model(ids).logits
        expected_logits = cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG)(ids).logits
    assert torch.equal(actual_logits, expected_logits)
