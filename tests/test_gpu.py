"""What only a CUDA device can show. Run with `make gpu-test`."""

import pytest
import torch
from budget import assert_within_budget
from test_engines import random_plan
from tiny import FULL, SPARSE, qkv, tiny_model, tokens

import cab_hf
from cab_hf import CabConfig, engine
from cab_hf.ops import flex, reference
from cab_hf.plan import Spans
from cab_hf.predictor import CurvaturePredictor

pytestmark = pytest.mark.gpu
BLOCKS = [
    pytest.param((128, 128), id="128x128"),
    pytest.param((128, 64), id="128x64"),
    pytest.param((64, 64), id="64x64"),
]
SHAPES = [
    pytest.param({"q_length": 1024, "heads": 8, "kv_heads": 2, "dim": 128}, id="d128"),
    pytest.param({"q_length": 777, "heads": 9, "kv_heads": 3, "dim": 64}, id="d64-odd-group-3"),
    pytest.param({"q_length": 63, "heads": 4, "kv_heads": 4, "dim": 64}, id="below-one-block"),
    pytest.param(
        {"q_length": 300, "kv_length": 1111, "heads": 4, "kv_heads": 1, "dim": 64}, id="chunk"
    ),
    pytest.param({"q_length": 900, "heads": 2, "kv_heads": 2, "dim": 256}, id="d256"),
    pytest.param(
        {"q_length": 500, "heads": 4, "kv_heads": 2, "dim": 96, "batch": 2}, id="d96-batch"
    ),
]


def on(device, tensors, dtype):
    # transposed again, so that q stays the strided view a model hands over
    return [x.transpose(1, 2).to(device, dtype).transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_flex_forward(gpu, shape, blocks):
    q, k, v = on(gpu, qkv(**shape), torch.bfloat16)
    plan = random_plan(q, k, blocks)
    plan.validate()
    with torch.no_grad():
        found = flex.attention(q, k, v, plan, q.shape[-1] ** -0.5)
    scale = q.shape[-1] ** -0.5
    assert_within_budget(found, lambda *x: reference.attention(*x, plan, scale), q, k, v)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_flex_backward(gpu, shape, blocks):
    inputs = on(gpu, qkv(**shape), torch.bfloat16)
    plan = random_plan(inputs[0], inputs[1], blocks)
    scale = inputs[0].shape[-1] ** -0.5
    weight = torch.randn(inputs[0].shape, device=gpu, generator=torch.Generator(gpu).manual_seed(1))

    def gradient(which, attend):
        def compute(*tensors):
            leaves = [x.detach().requires_grad_() for x in tensors]
            (attend(*leaves, plan, scale) * weight.to(leaves[0].dtype)).sum().backward()
            return leaves[which].grad

        return compute

    for which in range(3):
        found = gradient(which, flex.attention)(*inputs)
        assert_within_budget(found, gradient(which, reference.attention), *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_full_budget_equals_sdpa(gpu, dtype):
    model = tiny_model().to(gpu, dtype)
    ids = tokens(2, 300).to(gpu)
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        with cab_hf.cab(model, FULL, query_block=128, key_block=64, engine="flex"):
            found = model(input_ids=ids, attention_mask=mask).logits
    kept = mask.bool()
    limit = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert (found - expected)[kept].abs().max() <= limit * expected.abs().max()


def test_many_lengths_stay_sparse(gpu):
    """Past dynamo's recompile limit flex would quietly become dense."""
    for length in range(130, 1800, 110):
        q, k, v = on(gpu, qkv(q_length=length, heads=4, kv_heads=2, dim=64), torch.bfloat16)
        plan = random_plan(q, k, (128, 64), share=0.1)
        with torch.no_grad():
            found = flex.attention(q, k, v, plan, 0.125)
        assert_within_budget(found, lambda *x, p=plan: reference.attention(*x, p, 0.125), q, k, v)


@pytest.mark.parametrize(
    "config", [CabConfig(), CabConfig.published(0.8)], ids=["cab", "published"]
)
def test_the_device_selects_what_the_cpu_selects(gpu, config):
    q, k, _ = qkv(q_length=2000, heads=8, kv_heads=2, dim=64)
    predict = CurvaturePredictor(config)
    here = predict(q, k, Spans.causal(1, 2000, 2000, "cpu"), 0.125).to_dense()
    there = predict(q.to(gpu), k.to(gpu), Spans.causal(1, 2000, 2000, gpu), 0.125).to_dense().cpu()
    assert (here != there).float().mean() <= 1e-3


def test_static_cache_generation_compiles_and_agrees(gpu):
    model = tiny_model().to(gpu)
    ids = tokens(2, 200).to(gpu)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids, **options)
    with cab_hf.cab(model, FULL):
        assert model.generate(ids, **options).tolist() == expected.tolist()


def test_compiled_model_agrees(gpu):
    model = tiny_model().to(gpu)
    ids = tokens(1, 300).to(gpu)
    with torch.no_grad(), cab_hf.cab(model, SPARSE, query_block=128, key_block=64):
        expected = model(ids).logits
        found = torch.compile(model, fullgraph=True)(ids).logits
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_no_tensor_of_n_by_n_at_131072_tokens(gpu):
    """One LLaMA-3-8B layer, prediction included, in less than 12 GiB over its inputs."""
    length = 131_072
    shape = {"device": gpu, "dtype": torch.bfloat16}
    q = torch.randn(1, 32, length, 128, **shape)
    k, v = torch.randn(2, 1, 8, length, 128, **shape)
    torch.cuda.reset_peak_memory_stats()
    inputs = torch.cuda.memory_allocated()
    with torch.no_grad():
        plan = CurvaturePredictor(CabConfig())(
            q, k, Spans.causal(1, length, length, gpu), 128**-0.5
        )
        out = engine.run("flex", q, k, v, plan, 128**-0.5)
    assert torch.isfinite(out).all()
    assert (torch.cuda.max_memory_allocated() - inputs) / 2**30 < 12
