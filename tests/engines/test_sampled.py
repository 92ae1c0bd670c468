"""Sampled blocks: in training, a random sample of unlisted blocks estimates all of them."""

from dataclasses import replace

import pytest
import torch
from attention_cases import assert_engine_within_budget, case, seeds, with_gradients
from marks import slow_but
from tiny import SPARSE, tiny_model, tokens
from valid_plan import require_valid

import cab_hf
from cab_hf import BlockPlan, capability, engines
from cab_hf.dispatch import attended, validate_sample
from cab_hf.ops import reference

FOUR = {"heads": 4, "kv_heads": 2}
CASES = [
    pytest.param(FOUR | {"q_length": 200}, (32, 16), id="causal"),
    pytest.param(FOUR | {"q_length": 70, "kv_length": 201}, (32, 16), id="chunk"),
    pytest.param(FOUR | {"q_length": 200, "plan_heads": 2}, (32, 16), id="plan-of-groups"),
    pytest.param(FOUR | {"q_length": 150, "dense_rows": "tail"}, (32, 16), id="dense-rows"),
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
SAMPLING = replace(SPARSE, sampled_one_in=3)


def sampled_case(shape, blocks, sample_period):
    """Return (q, k, v, output gradient, plan); the plan samples 1 / ``sample_period`` of blocks."""
    return case("cpu", torch.float32, blocks, share=0.2, sample_period=sample_period, **shape)


def test_sampled_one_in_without_triton_kernel_raises(monkeypatch):
    monkeypatch.setattr(capability, "NAMED", (8, 0))
    work = engines.Workload(
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
        validate_sample(work)
    validate_sample(replace(work, dtype=torch.bfloat16))
    validate_sample(replace(work, device="cpu"))


@pytest.mark.parametrize(("shape", "blocks"), slow_but(CASES, 0, 4))
def test_kernels_compute_what_the_reference_defines(shape, blocks):
    q, k, v, grad, plan = sampled_case(shape, blocks, sample_period=3)
    assert plan.sampled.counts.sum() > 0
    assert_engine_within_budget(engines.TRITON.attention, q, k, v, grad=grad, plan=plan, scale=0.2)


def test_soft_cap_applies_to_listed_and_sampled_blocks():
    q, k, v, grad, plan = sampled_case(FOUR | {"q_length": 150, "dense_rows": "tail"}, (32, 16), 3)
    assert_engine_within_budget(
        engines.TRITON.attention, q, k, v, grad=grad, plan=plan, scale=0.2, softcap=3.0
    )


@pytest.mark.parametrize(("shape", "blocks"), CASES)
def test_sample_period_1_equals_dense_attention(shape, blocks):
    """Period 1 samples every unlisted block, so that listed and sampled blocks are all blocks."""
    q, k, v, grad, plan = sampled_case(shape, blocks, sample_period=1)
    query_block, key_block = blocks
    dense = BlockPlan.causal(plan.ranges, 1, query_block, key_block)
    expected = with_gradients(reference.attention, (q, k, v), grad=grad, plan=dense, scale=0.2)
    actual = with_gradients(reference.attention, (q, k, v), grad=grad, plan=plan, scale=0.2)
    has_keys = (plan.ranges.end >= 0)[:, None, :, None]
    for name in expected:
        result, exact = actual[name], expected[name]
        if name in ("out", "dq"):
            result, exact = result * has_keys, exact * has_keys
        torch.testing.assert_close(result, exact, atol=1e-5, rtol=1e-5)
    assert plan.density() == dense.density()


def test_unlisted_blocks_are_sampled_with_equal_probability():
    *_, plan = sampled_case(FOUR | {"q_length": 640}, (32, 16), sample_period=4)
    draws = [plan.with_sample(4, seed) for seed in seeds(300)]
    frequency = sum(x.of_sampled().to_dense().float() for x in draws) / len(draws)
    visible = BlockPlan.causal(plan.ranges, 1, 32, 16).to_dense()
    is_unlisted = visible & ~plan.to_dense()
    # the sampling frequency over 300 draws, per key block, per query block and per head
    assert (frequency[~is_unlisted] == 0).all()
    for dims in ((0, 1, 2), (0, 1, 3), (0, 2, 3)):
        count = is_unlisted.sum(dims)
        mean = (frequency * is_unlisted).sum(dims) / count.clamp(min=1)
        assert (mean[count > 20] - 0.25).abs().max() < 0.03
    sampled = torch.stack([x.of_sampled().to_dense() for x in draws]).float()
    # query block 19 and key block 4, for all heads and draws
    one_block = sampled[:, 0, :, 19, 4]
    both_heads = one_block[:, 0].mul(one_block[:, 1]).mean()
    assert both_heads < 0.12, "samples of heads are not independent"


def test_sampled_estimate_of_softmax_sum_is_unbiased():
    q, k, v, _, plan = sampled_case(FOUR | {"q_length": 200}, (32, 16), sample_period=4)
    dense = BlockPlan.causal(plan.ranges, 1, 32, 16)
    expected = reference.attention(q, k, v, dense, scale=0.2, return_lse=True)[1].exp()
    draws = (plan.with_sample(4, seed) for seed in seeds(300))
    sums = [reference.attention(q, k, v, x, scale=0.2, return_lse=True)[1].exp() for x in draws]
    assert (sum(sums) / len(sums) / expected).mean() == pytest.approx(1.0, abs=0.01)


def test_sampled_blocks_survive_plan_changes():
    *_, plan = sampled_case(FOUR | {"q_length": 200}, (32, 16), sample_period=3)
    sampled = plan.of_sampled().to_dense()
    for changed, expected in (
        (plan.slice_heads(1, 2, 4), sampled[:, 1:2]),
        (plan.select_heads([3, 0]), sampled[:, [3, 0]]),
    ):
        require_valid(changed)
        assert torch.equal(changed.of_sampled().to_dense(), expected)
    with_dense_row = plan.with_dense_rows(torch.tensor([[6]]))
    require_valid(with_dense_row)
    assert torch.equal(with_dense_row.of_sampled().to_dense()[:, :, :6], sampled[:, :, :6])
    assert plan.density() > replace(plan, sampled=None).density()


def gradients(model, ids, **checkpointing):
    """Run one training step with a fixed seed, and return a list of gradients.

    Args:
        checkpointing: arguments of gradient checkpointing; empty for no checkpointing.
    """
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, **checkpointing})
        # also checkpoint layers whose input needs no gradient
        model.disable_input_require_grads()
    torch.manual_seed(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


def density(model, ids):
    """Run one training step and return the density that `attended` recorded."""
    attended.clear()
    gradients(model, ids)
    num_attended, num_causal = sum(attended.values()).tolist()
    return num_attended / num_causal


def test_gradients_with_sample_period_1_equal_dense_gradients():
    ids = tokens(2, 200)
    model = cab_hf.apply_cab(tiny_model(), replace(SPARSE, sampled_one_in=1))
    assert density(model, ids) == 1.0
    model.zero_grad()
    expected, actual = gradients(tiny_model(), ids), gradients(model, ids)
    for result, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, exact, atol=1e-5, rtol=1e-3)


def test_recompute_attends_to_the_same_sample():
    ids = tokens(2, 200)
    sampling, sparse = (cab_hf.apply_cab(tiny_model(), x) for x in (SAMPLING, SPARSE))
    assert density(sampling, ids) > density(sparse, ids)
    sampling.zero_grad()
    expected = gradients(sampling, ids)
    actual = gradients(cab_hf.apply_cab(tiny_model(), SAMPLING), ids, preserve_rng_state=True)
    for result, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, exact)


def test_recompute_reuses_plan_if_only_values_have_gradients():
    ids, results = tokens(2, 200), []
    for checkpointing in ({}, {"preserve_rng_state": False}):
        model = cab_hf.apply_cab(tiny_model(), SAMPLING)
        for name, weight in model.named_parameters():
            weight.requires_grad_("v_proj" in name)
        results.append(gradients(model, ids, **checkpointing))
    plain, recomputed = results
    for actual, expected in zip(recomputed, plain, strict=True):
        torch.testing.assert_close(actual, expected)


def test_sampling_config_compiles_for_inference():
    model, ids = cab_hf.apply_cab(tiny_model(num_hidden_layers=1), SAMPLING), tokens(1, 130)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_sampling_with_unaligned_documents_raises():
    """Sampling requires documents that are aligned to blocks; under torch.compile they are not."""
    model, ids = cab_hf.apply_cab(tiny_model(num_hidden_layers=1), SAMPLING).train(), tokens(1, 400)
    positions = torch.cat([torch.arange(90), torch.arange(310)])[None]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(NotImplementedError, match="sampled_one_in must be 0 for packed documents"):
        compiled(input_ids=ids, position_ids=positions, use_cache=False)


def test_reentrant_checkpointing_with_sampling_raises():
    model, ids = cab_hf.apply_cab(tiny_model(), SAMPLING).train(), tokens(1, 200)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with pytest.raises(RuntimeError, match="Set use_reentrant=False"):
        loss.backward()


def test_sampling_is_off_without_gradients():
    ids = tokens(1, 200)
    model = cab_hf.apply_cab(tiny_model(), SAMPLING)
    with torch.no_grad():
        actual = model(ids).logits
        expected = cab_hf.apply_cab(tiny_model(), SPARSE)(ids).logits
    assert torch.equal(actual, expected)
