"""What only a CUDA device can show. Run with `make gpu-test`."""

from dataclasses import replace

import pytest
import torch
from attention_cases import random_plan
from budget import assert_within_budget
from selecting import heads_on
from tiny import FULL, SPARSE, qkv, tiny_model, tokens

import cab_hf
from cab_hf import CabConfig, engines
from cab_hf.config import budgets_of
from cab_hf.frame import Frame
from cab_hf.ops import reference
from cab_hf.ops.attention import flex
from cab_hf.plan import BlockLists, Spans, block_visibility
from cab_hf.predictors import Call, CurvaturePredictor
from cab_hf.predictors.curvature import by_reference

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
    here = predict(q, k, Call(Spans.causal(1, 2000, 2000, "cpu"), 0.125)).to_dense()
    there = (
        predict(q.to(gpu), k.to(gpu), Call(Spans.causal(1, 2000, 2000, gpu), 0.125))
        .to_dense()
        .cpu()
    )
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
        call = Call(Spans.causal(1, length, length, gpu), 128**-0.5)
        plan = CurvaturePredictor(CabConfig())(q, k, call)
        work = engines.Workload.of(q, k, v, plan.blocks)
        out = engines.choose("flex", work).attention(q, k, v, plan, 128**-0.5)
    assert torch.isfinite(out).all()
    assert (torch.cuda.max_memory_allocated() - inputs) / 2**30 < 12


# --- the predictor's kernels

PREDICTED = [
    pytest.param(CabConfig(), {}, id="default"),
    pytest.param(CabConfig(), {"dtype": torch.float16}, id="float16"),
    pytest.param(CabConfig(), {"dtype": torch.float32}, id="float32"),
    pytest.param(CabConfig(curvature="forman"), {}, id="forman"),
    pytest.param(CabConfig(max_density=0.1), {}, id="capped"),
    pytest.param(CabConfig(query_block=64, key_block=128), {}, id="wide-keys"),
    pytest.param(CabConfig(query_block=64, coarsen="mean"), {}, id="mean"),
    pytest.param(CabConfig.published(), {}, id="published"),
    pytest.param(CabConfig.published(curvature="additive"), {}, id="published-additive"),
    pytest.param(CabConfig.published(), {"dtype": torch.float32}, id="published-float32"),
    pytest.param(CabConfig(), {"q_length": 3000}, id="chunk"),
    pytest.param(CabConfig(), {"length": 129, "batch": 2}, id="block-and-one"),
    pytest.param(CabConfig(), {"length": 127}, id="block-less-one"),
    pytest.param(CabConfig(), {"length": 40}, id="below-one-block"),
    pytest.param(CabConfig(), {"length": 1025, "batch": 32, "heads": 3, "kv_heads": 1}, id="b32"),
    *(
        pytest.param(CabConfig(), {"dim": dim, "length": 4097}, id=f"d{dim}")
        for dim in (16, 64, 80, 96, 192, 256)
    ),
    pytest.param(
        CabConfig(), {"dim": 256, "length": 4097, "dtype": torch.float32}, id="d256-float32"
    ),
]


def lost_mass(q, k, spans, config, kept, meant):
    """Estimated attention mass that rows keep less of than they are meant to, on average."""
    visible = block_visibility(spans, config.query_block, config.key_block)
    queries = reference.coarsen_queries(q, spans.last >= 0, config.query_block, config.coarsen)
    keys = reference.coarsen_keys(k, spans.key_valid, config.key_block, config.coarsen)
    upper, mean = reference.block_logits(queries, keys, q.shape[-1] ** -0.5)
    mass = reference.block_log_mass((upper + mean) / 2, visible.unsqueeze(1)).exp()
    gain = (mass * kept).sum(-1) - (mass * meant).sum(-1)
    return (-gain).clamp(min=0).mean()


def referred(q, k, spans, scale, config):
    """The plan of the reference."""
    keys = reference.coarsen_keys(k, spans.key_valid, config.key_block, config.coarsen)
    return by_reference(q, keys, spans, scale, config, budgets_of(config, None, q.shape[1]))


@pytest.mark.parametrize(("config", "shape"), PREDICTED)
def test_kernels_select_what_the_reference_selects(gpu, config, shape):
    q, k = heads_on(gpu, **shape)
    spans = Spans.causal(q.shape[0], q.shape[2], k.shape[2], gpu)
    scale = q.shape[-1] ** -0.5
    plan = CurvaturePredictor(config)(q, k, Call(spans, scale))
    plan.validate()
    found = plan.to_dense()
    meant = referred(q, k, spans, scale, config).to_dense()
    # rounding moves thresholds; nothing else may differ
    assert (found != meant).sum() <= 0.001 * meant.sum()
    assert lost_mass(q, k, spans, config, found, meant) <= 1e-3
    again = CurvaturePredictor(config)(q, k, Call(spans, scale))
    assert torch.equal(found, again.to_dense())


def test_kernels_select_for_padded_and_packed_texts(gpu):
    q, k = heads_on(gpu, length=2000, batch=2)
    valid = torch.ones(2, 2000, dtype=torch.bool, device=gpu)
    valid[0, :333] = False
    document = (torch.arange(2000, device=gpu) >= 900).long().expand(2, -1)
    frame = Frame.build(2, 2000, 2000, 0, valid, document, align=128, device=gpu)
    q, k = frame.queries(q), frame.keys(k)
    found = CurvaturePredictor(CabConfig())(q, k, Call(frame.spans, 128**-0.5)).to_dense()
    meant = referred(q, k, frame.spans, 128**-0.5, CabConfig()).to_dense()
    assert (found != meant).sum() <= 0.001 * meant.sum()


def test_kernels_select_what_the_reference_selects_for_every_kind_of_head(gpu):
    q, k = heads_on(gpu, length=2000)
    heads = q.shape[1]
    masses = (0.0, 0.3, 0.9, 1.0, 0.0) + (0.7,) * (heads - 5)
    strides = (0, 0, 8, 4, 4) + (0,) * (heads - 5)
    bridges = (0.0, 0.1) + (0.05,) * (heads - 2)
    config = CabConfig(mass=(masses,), exact_queries=(strides,), bridges=(bridges,))
    spans = Spans.causal(1, 2000, 2000, gpu)
    plan = CurvaturePredictor(config)(q, k, Call(spans, 128**-0.5, 0))
    plan.validate()
    keys = reference.coarsen_keys(k, spans.key_valid, config.key_block, config.coarsen)
    budgets = budgets_of(config, 0, heads)
    meant = by_reference(q, replace(keys, keys=k), spans, 128**-0.5, config, budgets).to_dense()
    assert (plan.to_dense() != meant).sum() <= 0.001 * meant.sum()


EXACT_BLOCKS = [(128, 64), (64, 128), (48, 48), (256, 256)]


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
@pytest.mark.parametrize("blocks", EXACT_BLOCKS, ids=lambda blocks: "x".join(map(str, blocks)))
def test_exact_scores_are_those_of_the_reference(gpu, blocks, stride):
    from cab_hf.ops.exact_scores import exact_scores

    q, k = heads_on(gpu, length=2000, q_length=1900)
    spans = Spans.causal(1, 1900, 2000, gpu)
    heads = torch.tensor([5, 0, 3], dtype=torch.int32, device=gpu)
    width = 64
    most, log_mass = exact_scores(q, k, heads, spans, 128**-0.5, *blocks, stride, width)
    assert torch.isfinite(most).all() and torch.isfinite(log_mass).all()
    visible = block_visibility(spans, *blocks).unsqueeze(1)
    columns = visible.shape[-1]
    meant_most, meant_mass = (
        x[:, heads.long()] for x in reference.exact_scores(q, k, spans, 128**-0.5, *blocks, stride)
    )
    # products of bfloat16 are exact in float32, their sums are not
    torch.testing.assert_close(most[..., :columns], meant_most, atol=1e-4, rtol=1e-3)
    found, meant = (
        reference.block_log_mass(x, visible).exp() for x in (log_mass[..., :columns], meant_mass)
    )
    torch.testing.assert_close(found, meant, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"mass": 0.9, "exact_queries": 4}, id="mass-and-bridges"),
        pytest.param({"mass": ((0.0,) * 8,), "bridges": 0.2, "exact_queries": 1}, id="bridges"),
        pytest.param({"exact_queries": ((1, 2, 4, 8, 16, 0, 0, 4),)}, id="all-strides"),
        pytest.param({"exact_queries": 4, "max_density": 0.2}, id="capped"),
        pytest.param({"exact_queries": 4, "select": "topk", "sparsity": 0.8}, id="topk"),
    ],
)
@pytest.mark.parametrize("measured", [False, True], ids=["wide", "measured"])
def test_exact_heads_select_what_the_reference_selects(gpu, monkeypatch, fields, measured):
    from cab_hf.ops import predict

    if measured:
        monkeypatch.setattr(predict, "LISTS_AT_MOST", 0)
    q, k = heads_on(gpu, length=2000)
    config, spans = CabConfig(**fields), Spans.causal(1, 2000, 2000, gpu)
    plan = CurvaturePredictor(config)(q, k, Call(spans, 128**-0.5, 0))
    plan.validate()
    keys = reference.coarsen_keys(k, spans.key_valid, config.key_block, config.coarsen)
    budgets = budgets_of(config, 0, 8)
    meant = by_reference(q, replace(keys, keys=k), spans, 128**-0.5, config, budgets).to_dense()
    # rounding moves thresholds; nothing else may differ
    assert (plan.to_dense() != meant).sum() <= 0.001 * meant.sum()


def test_exact_heads_select_for_padded_and_packed_texts(gpu):
    q, k = heads_on(gpu, length=2000, batch=2)
    valid = torch.ones(2, 2000, dtype=torch.bool, device=gpu)
    valid[0, :333] = False
    document = (torch.arange(2000, device=gpu) >= 900).long().expand(2, -1)
    frame = Frame.build(2, 2000, 2000, 0, valid, document, align=128, device=gpu)
    q, k, spans = frame.queries(q), frame.keys(k), frame.spans
    config = CabConfig(exact_queries=4)
    found = CurvaturePredictor(config)(q, k, Call(spans, 128**-0.5, 0)).to_dense()
    keys = reference.coarsen_keys(k, spans.key_valid, config.key_block, config.coarsen)
    budgets = budgets_of(config, 0, 8)
    meant = by_reference(q, replace(keys, keys=k), spans, 128**-0.5, config, budgets).to_dense()
    assert (found != meant).sum() <= 0.001 * meant.sum()


def test_exact_scores_stay_within_their_scratch(gpu):
    """32 heads of 65,536 tokens: nothing but scratch beside the 4 MiB a head that are found."""
    from cab_hf.ops import exact_scores

    length, stride = 65_536, 4
    q, k = heads_on(gpu, length=length, heads=32, kv_heads=8)
    spans = Spans.causal(1, length, length, gpu)
    heads = torch.arange(32, dtype=torch.int32, device=gpu)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores = exact_scores.exact_scores(q, k, heads, spans, 128**-0.5, 128, 64, stride, 1024)
    given = sum(x.numel() * x.element_size() for x in scores)
    scratch = torch.cuda.max_memory_allocated() - before - given
    assert given == 32 * 4 << 20 and scratch <= exact_scores.SCRATCH_AT_A_TIME + (1 << 20)
    assert all(torch.isfinite(x).all() for x in scores)


@pytest.mark.parametrize("mass", [0.9, "table"])
def test_predicting_is_captured_in_a_cuda_graph(gpu, mass):
    q, k = heads_on(gpu)
    spans = Spans.causal(1, 8191, 8191, gpu)
    if mass == "table":
        mass = ((0.0, 1.0) + (0.5,) * (q.shape[1] - 2),)
    predictor = CurvaturePredictor(CabConfig(mass=mass))
    predictor(q, k, Call(spans, 128**-0.5, 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = predictor(q, k, Call(spans, 128**-0.5, 0))
    q.copy_(q.roll(512, dims=2))
    graph.replay()
    meant = predictor(q, k, Call(spans, 128**-0.5, 0))
    assert torch.equal(captured.to_dense(), meant.to_dense())


def test_predicting_compiles_without_a_break(gpu):
    q, k = heads_on(gpu, length=2000)
    spans = Spans.causal(1, 2000, 2000, gpu)
    predictor = CurvaturePredictor(CabConfig())

    @torch.compile(fullgraph=True)
    def compiled(q, k):
        plan = predictor(q, k, Call(spans, 128**-0.5))
        return plan.full.counts, plan.full.indices, plan.partial.counts, plan.partial.indices

    counts, indices, *partial = compiled(q, k)
    plan = predictor(q, k, Call(spans, 128**-0.5))
    assert torch.equal(BlockLists(counts, indices).to_dense(32), plan.full.to_dense(32))
    assert torch.equal(BlockLists(*partial).to_dense(32), plan.partial.to_dense(32))


def test_predicting_never_waits_for_the_device(gpu):
    q, k = heads_on(gpu)
    spans = Spans.causal(1, 8191, 8191, gpu)
    CurvaturePredictor(CabConfig())(q, k, Call(spans, 128**-0.5))
    torch.cuda.set_sync_debug_mode("error")
    try:
        CurvaturePredictor(CabConfig())(q, k, Call(spans, 128**-0.5))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("length", "mib"),
    [pytest.param(131_072, 600, id="128k"), pytest.param(1_048_576, 12 << 10, id="1m")],
)
def test_predicting_stays_within_its_memory(gpu, length, mib):
    q, k = heads_on(gpu, length=length, heads=32, kv_heads=8)
    spans = Spans.causal(1, length, length, gpu)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = CurvaturePredictor(CabConfig())(q, k, Call(spans, 128**-0.5))
    assert (torch.cuda.max_memory_allocated() - before) / 2**20 <= mib
    assert plan.full.counts.min() >= 0
