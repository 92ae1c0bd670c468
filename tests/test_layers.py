"""`CABAttention` equals attention under the token mask of its plan, forward and backward."""

from functools import partial

import pytest
import torch
from budget import assert_within_budget
from torch.nn import functional as F
from valid_plan import assert_valid_plan

from cab_hf import CabConfig
from cab_hf.layers import CABAttention, CABAttentionLayer
from cab_hf.plan import KeyRanges
from cab_hf.predictors import FrcPredictor, LayerContext

MODEL_DIM, NUM_HEADS, BLOCK_TOKENS = 64, 4, 32
parametrize_causal = pytest.mark.parametrize(
    "is_causal", [True, False], ids=["causal", "bidirectional"]
)
parametrize_curvature_formula = pytest.mark.parametrize("formula", ["forman", "additive"])
parametrize_kv_heads = pytest.mark.parametrize("kv_heads", [4, 2, 1])
parametrize_length = pytest.mark.parametrize("length", [1, 32, 63, 111, 205])


def make_attention(sparsity=0.6, **layer_options):
    """Return a random `CABAttention` whose attention weights are far from uniform."""
    torch.manual_seed(0)
    layer = CABAttention(MODEL_DIM, NUM_HEADS, BLOCK_TOKENS, sparsity, **layer_options)
    with torch.no_grad():
        layer.q_proj.weight.mul_(4)
        layer.k_proj.weight.mul_(4)
    return layer


def make_random_inputs(length, batch=2):
    """Return random inputs [B, N, DIM]."""
    return torch.randn(batch, length, MODEL_DIM, generator=torch.Generator().manual_seed(1))


def compute_masked_attention(layer_inputs, q_weight, k_weight, v_weight, o_weight, mask):
    """Return the output of the layer, computed by SDPA with the mask ``mask``."""
    q, k, v = (
        F.linear(layer_inputs, weight).unflatten(-1, (-1, MODEL_DIM // NUM_HEADS)).transpose(1, 2)
        for weight in (q_weight, k_weight, v_weight)
    )
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return F.linear(out.transpose(1, 2).flatten(2), o_weight)


@parametrize_curvature_formula
@parametrize_kv_heads
@parametrize_length
@parametrize_causal
def test_full_budget_equals_dense_attention(formula, kv_heads, length, is_causal):
    layer = make_attention(0.0, formula=formula, num_kv_heads=kv_heads, causal=is_causal)
    layer_inputs = make_random_inputs(length)
    mask = torch.ones(length, length, dtype=torch.bool)
    mask = mask.tril() if is_causal else mask
    q_weight, k_weight, v_weight, o_weight = (
        parameter.detach() for parameter in layer.parameters()
    )
    compute_expected = partial(compute_masked_attention, mask=mask)
    assert_within_budget(
        layer(layer_inputs).detach(),
        compute_expected,
        layer_inputs,
        q_weight,
        k_weight,
        v_weight,
        o_weight,
    )


@parametrize_kv_heads
@parametrize_length
@parametrize_causal
def test_outputs_and_gradients_match_masked_attention(kv_heads, length, is_causal):
    layer = make_attention(num_kv_heads=kv_heads, causal=is_causal)
    layer_inputs = make_random_inputs(length).requires_grad_()
    out, plan = layer(layer_inputs, return_plan=True)
    expected = compute_masked_attention(layer_inputs, *layer.parameters(), plan.token_mask())
    torch.testing.assert_close(out, expected)
    grad_out = torch.randn_like(out)
    leaves = (layer_inputs, *layer.parameters())
    actual_gradients = torch.autograd.grad(out, leaves, grad_out)
    expected_gradients = torch.autograd.grad(expected, leaves, grad_out)
    for actual_gradient, expected_gradient in zip(
        actual_gradients, expected_gradients, strict=True
    ):
        torch.testing.assert_close(actual_gradient, expected_gradient, rtol=1e-4, atol=1e-4)


@parametrize_curvature_formula
def test_plan_equals_published_config(formula):
    layer = make_attention(formula=formula)
    layer_inputs = make_random_inputs(300)
    plan = layer(layer_inputs, return_plan=True)[1]
    assert_valid_plan(plan)
    q, k = (
        projection(layer_inputs).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
        for projection in (layer.q_proj, layer.k_proj)
    )
    config = CabConfig.published(0.6, formula, query_block=BLOCK_TOKENS, key_block=BLOCK_TOKENS)
    expected = FrcPredictor(config)(
        q, k, LayerContext(KeyRanges.causal(2, 300, 300, "cpu"), 16**-0.5)
    )
    assert torch.equal(plan.to_dense(), expected.to_dense())


@parametrize_curvature_formula
def test_bidirectional_plan_selects_earlier_and_later_blocks(formula):
    plan = make_attention(formula=formula, causal=False)(make_random_inputs(300), return_plan=True)[
        1
    ]
    assert_valid_plan(plan)
    is_selected = plan.to_dense()
    assert (is_selected.sum(-1) == 4).all(), "a row must have ceil(0.4 * 10) blocks"
    assert is_selected.diagonal(dim1=2, dim2=3).all()
    assert is_selected.triu(1).any() and is_selected.tril(-1).any()


@parametrize_curvature_formula
def test_later_blocks_do_not_change_earlier_outputs(formula):
    layer = make_attention(formula=formula)
    layer_inputs = make_random_inputs(205)
    changed_inputs = layer_inputs.clone()
    changed_inputs[:, 128:] = 5 - 2 * changed_inputs[:, 128:]
    torch.testing.assert_close(layer(changed_inputs)[:, :128], layer(layer_inputs)[:, :128])
    assert not torch.allclose(layer(changed_inputs)[:, 128:], layer(layer_inputs)[:, 128:])


@parametrize_causal
def test_batch_rows_are_independent(is_causal):
    layer = make_attention(causal=is_causal)
    layer_inputs = make_random_inputs(150, batch=3)
    torch.testing.assert_close(layer(layer_inputs)[1:2], layer(layer_inputs[1:2]))


def test_higher_sparsity_lowers_density():
    layer_inputs = make_random_inputs(640, batch=1)
    densities = [
        make_attention(sparsity)(layer_inputs, return_plan=True)[1].density()
        for sparsity in (0.0, 0.5, 0.9)
    ]
    assert densities[0] == 1 and densities[0] > densities[1] > densities[2]


@parametrize_causal
def test_every_parameter_of_a_layer_gets_a_gradient(is_causal):
    layer = CABAttentionLayer(
        MODEL_DIM, NUM_HEADS, BLOCK_TOKENS, 0.6, causal=is_causal, num_kv_heads=2, bias=True
    )
    layer_inputs = make_random_inputs(111).requires_grad_()
    out = layer(layer_inputs)
    assert out.shape == layer_inputs.shape
    out.square().mean().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # the key bias adds a constant to all logits of a query, so that its gradient may be 0
        assert parameter.grad.any() or name == "attention.k_proj.bias", name
    assert layer_inputs.grad.abs().sum() > 0


def test_layer_equals_composition_of_its_parts():
    layer = CABAttentionLayer(MODEL_DIM, NUM_HEADS, BLOCK_TOKENS, 0.6)
    layer_inputs = make_random_inputs(100)
    residual_stream = layer_inputs + layer.attention(F.rms_norm(layer_inputs, (MODEL_DIM,)))
    up_projection, _, down_projection = layer.mlp
    expected = residual_stream + down_projection(
        F.gelu(up_projection(F.rms_norm(residual_stream, (MODEL_DIM,))))
    )
    torch.testing.assert_close(layer(layer_inputs), expected)


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    layer = CABAttentionLayer(MODEL_DIM, NUM_HEADS, BLOCK_TOKENS, 0.6, mlp_ratio=2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    layer_inputs = make_random_inputs(96)
    # the target is the input of the previous token, which only attention can copy
    target = layer_inputs.roll(1, dims=1)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(layer(layer_inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("has_bias", [True, False])
def test_bias_option_applies_to_all_projections(has_bias):
    layer = CABAttentionLayer(MODEL_DIM, NUM_HEADS, bias=has_bias)
    assert any("bias" in name for name in layer.state_dict()) is has_bias


@pytest.mark.parametrize(
    ("make_or_call_layer", "error_pattern"),
    [
        pytest.param(lambda: CABAttention(64, 5), "num_heads must divide dim=64, got 5", id="dim"),
        pytest.param(
            lambda: CABAttention(64, 4, num_kv_heads=3),
            "num_kv_heads must divide num_heads=4, got 3",
            id="kv-heads",
        ),
        pytest.param(lambda: CABAttention(64, 0), "num_heads must .*, got 0", id="no-heads"),
        pytest.param(lambda: CABAttention(64.0, 4), "dim must .*, got 64.0", id="fraction"),
        pytest.param(
            lambda: CABAttention(64, 4, 40),
            "block_size must be a multiple of 16, got 40",
            id="block",
        ),
        pytest.param(
            lambda: CABAttention(64, 4, sparsity=1), "sparsity must .*, got 1", id="sparsity"
        ),
        pytest.param(
            lambda: CABAttention(64, 4, formula="none"), "formula must .*, got 'none'", id="formula"
        ),
        pytest.param(
            lambda: CABAttention(64, 4, engine="magic"),
            "engine must be one of 'auto', 'reference', .*, got 'magic'",
            id="engine",
        ),
        pytest.param(
            lambda: CABAttention(64, 4, engine="flex")(torch.randn(1, 64, 64)),
            "'flex', which has no backward on CPU",
            id="engine-by-name",
        ),
        pytest.param(
            lambda: CABAttention(64, 4)(torch.randn(1, 64, 32)),
            r"shape of x must be \[B, N, 64\] .*, got \[1, 64, 32\]",
            id="channels",
        ),
        pytest.param(
            lambda: CABAttention(64, 4)(torch.randn(64, 64)), "shape of x must be ", id="2d"
        ),
        pytest.param(
            lambda: CABAttention(64, 4)(torch.randn(1, 0, 64)), "shape of x must be ", id="empty"
        ),
        pytest.param(
            lambda: CABAttentionLayer(64, 4, mlp_ratio=0), "mlp_ratio must .*, got 0", id="no-mlp"
        ),
    ],
)
def test_invalid_arguments_raise(make_or_call_layer, error_pattern):
    with pytest.raises(ValueError, match=error_pattern):
        make_or_call_layer()
