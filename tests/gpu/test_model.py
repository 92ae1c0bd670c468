"""What only a CUDA device can show. Run with `make gpu-test`."""

from dataclasses import replace

import pytest
import torch
from attention_cases import random_plan
from budget import EPS, assert_within_budget
from selecting import heads_on
from tiny import FULL, SPARSE, qkv, tiny_model, tokens
from transformers import DynamicCache

import cab_hf
from cab_hf import CabConfig, engines
from cab_hf.budgets import budgets_of
from cab_hf.frame import Frame
from cab_hf.ops import reference
from cab_hf.ops.attention import flex
from cab_hf.ops.score import HeadChunk
from cab_hf.plan import BlockLists, Spans, block_visibility
from cab_hf.predictors import CurvaturePredictor, LayerContext, make_predictor
from cab_hf.predictors.attention_mass import block_mass
from cab_hf.predictors.curvature import by_reference, picked

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
        actual = flex.attention(q, k, v, plan, q.shape[-1] ** -0.5)
    scale = q.shape[-1] ** -0.5
    assert_within_budget(actual, lambda *x: reference.attention(*x, plan, scale), q, k, v)


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
        actual = gradient(which, flex.attention)(*inputs)
        assert_within_budget(actual, gradient(which, reference.attention), *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_full_budget_equals_sdpa(gpu, dtype):
    model = tiny_model().to(gpu, dtype)
    ids = tokens(2, 300).to(gpu)
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        with cab_hf.cab(model, FULL, query_block=128, key_block=64, engine="flex"):
            actual = model(input_ids=ids, attention_mask=mask).logits
    kept = mask.bool()
    limit = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert (actual - expected)[kept].abs().max() <= limit * expected.abs().max()


def test_many_lengths_stay_sparse(gpu):
    """Past dynamo's recompile limit flex would quietly become dense."""
    for length in range(130, 1800, 110):
        q, k, v = on(gpu, qkv(q_length=length, heads=4, kv_heads=2, dim=64), torch.bfloat16)
        plan = random_plan(q, k, (128, 64), share=0.1)
        with torch.no_grad():
            actual = flex.attention(q, k, v, plan, 0.125)
        assert_within_budget(actual, lambda *x, p=plan: reference.attention(*x, p, 0.125), q, k, v)


@pytest.mark.parametrize(
    "config",
    [
        CabConfig(),
        CabConfig(predictor="rows", mass_threshold=0.01),
        CabConfig(exact_queries=0),
        CabConfig.published(0.8),
    ],
    ids=["cab", "rows", "estimate", "published"],
)
def test_the_device_selects_what_the_cpu_selects(gpu, config):
    q, k, _ = qkv(q_length=2000, heads=8, kv_heads=2, dim=64)
    predict = make_predictor(config)
    here = predict(q, k, LayerContext(Spans.causal(1, 2000, 2000, "cpu"), 0.125)).to_dense()
    there = (
        predict(q.to(gpu), k.to(gpu), LayerContext(Spans.causal(1, 2000, 2000, gpu), 0.125))
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
        actual = torch.compile(model, fullgraph=True)(ids).logits
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)


def test_no_tensor_of_n_by_n_at_131072_tokens(gpu):
    """One LLaMA-3-8B layer, prediction included, in less than 12 GiB over its inputs."""
    length = 131_072
    shape = {"device": gpu, "dtype": torch.bfloat16}
    q = torch.randn(1, 32, length, 128, **shape)
    k, v = torch.randn(2, 1, 8, length, 128, **shape)
    torch.cuda.reset_peak_memory_stats()
    inputs = torch.cuda.memory_allocated()
    with torch.no_grad():
        call = LayerContext(Spans.causal(1, length, length, gpu), 128**-0.5)
        plan = CurvaturePredictor(CabConfig())(q, k, call)
        work = engines.Workload.of(q, k, v, plan.blocks)
        out = engines.choose("flex", work).attention(q, k, v, plan, 128**-0.5)
    assert torch.isfinite(out).all()
    assert (torch.cuda.max_memory_allocated() - inputs) / 2**30 < 12


# --- the predictor's kernels


def by_estimate(**fields):
    """Summaries are rounded to 16 bits at most: nothing but thresholds may move."""
    return CabConfig(**{"exact_queries": 0, "mass_threshold": 0.08, **fields})


PREDICTED = [
    pytest.param(by_estimate(), {}, id="default"),
    pytest.param(by_estimate(), {"dtype": torch.float16}, id="float16"),
    pytest.param(by_estimate(), {"dtype": torch.float32}, id="float32"),
    pytest.param(by_estimate(curvature="forman"), {}, id="forman"),
    pytest.param(by_estimate(max_density=0.1), {}, id="capped"),
    pytest.param(by_estimate(query_block=64, key_block=128), {}, id="wide-keys"),
    pytest.param(by_estimate(query_block=64, coarsen="mean"), {}, id="mean"),
    pytest.param(by_estimate(), {"q_length": 3000}, id="chunk"),
    pytest.param(by_estimate(), {"length": 129, "batch": 2}, id="block-and-one"),
    pytest.param(by_estimate(), {"length": 127}, id="block-less-one"),
    pytest.param(by_estimate(), {"length": 40}, id="below-one-block"),
    pytest.param(by_estimate(), {"length": 1025, "batch": 32, "heads": 3, "kv_heads": 1}, id="b32"),
    *(
        pytest.param(by_estimate(), {"dim": dim, "length": 4097}, id=f"d{dim}")
        for dim in (16, 64, 80, 96, 192, 256)
    ),
    pytest.param(
        by_estimate(), {"dim": 256, "length": 4097, "dtype": torch.float32}, id="d256-float32"
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


def referred(q, k, spans, scale, config, channels=()):
    """The plan of the reference."""
    keys = reference.coarsen_keys(k, spans.key_valid, config.key_block, config.coarsen)
    summary = replace(keys, keys=picked(k, channels))
    call = LayerContext(spans, scale, 0, channels=channels)
    return by_reference(q, summary, call, config, budgets_of(config, 0, q.shape[1]))


@pytest.mark.parametrize(("config", "shape"), PREDICTED)
def test_kernels_select_what_the_reference_selects(gpu, config, shape):
    q, k = heads_on(gpu, **shape)
    spans = Spans.causal(q.shape[0], q.shape[2], k.shape[2], gpu)
    scale = q.shape[-1] ** -0.5
    plan = CurvaturePredictor(config)(q, k, LayerContext(spans, scale))
    plan.validate()
    actual = plan.to_dense()
    meant = referred(q, k, spans, scale, config).to_dense()
    # rounding moves thresholds; nothing else may differ
    assert (actual != meant).sum() <= 0.001 * meant.sum()
    assert lost_mass(q, k, spans, config, actual, meant) <= 1e-3
    again = CurvaturePredictor(config)(q, k, LayerContext(spans, scale))
    assert torch.equal(actual, again.to_dense())


def test_kernels_select_for_padded_and_packed_texts(gpu):
    q, k = heads_on(gpu, length=2000, batch=2)
    valid = torch.ones(2, 2000, dtype=torch.bool, device=gpu)
    valid[0, :333] = False
    document = (torch.arange(2000, device=gpu) >= 900).long().expand(2, -1)
    frame = Frame.build(2, 2000, 2000, 0, valid, document, align=128, device=gpu)
    q, k = frame.queries(q), frame.keys(k)
    config = by_estimate()
    actual = CurvaturePredictor(config)(q, k, LayerContext(frame.spans, 128**-0.5)).to_dense()
    meant = referred(q, k, frame.spans, 128**-0.5, config).to_dense()
    assert (actual != meant).sum() <= 0.001 * meant.sum()


# --- outlier queries, scored exactly

SLOW = (*range(32, 64), *range(96, 128))
EVERY_KIND = {
    "top_p": ((0.0, 0.3, 0.9, 1.0, 0.0, 0.7, 0.7, 0.7),),
    "exact_queries": ((0, 0, 16, 32, 32, 0, 8, 1),),
    "top_k_share": ((0.0, 0.1, 0.05, 0.05, 0.2, 0.0, 0.05, 0.05),),
}
EXACT = [
    pytest.param({}, id="default"),
    pytest.param({"top_p": ((0.0,) * 8,), "exact_queries": 128}, id="top_k_share"),
    pytest.param({"exact_queries": ((1, 2, 4, 8, 16, 0, 0, 128),)}, id="all-counts"),
    pytest.param(EVERY_KIND, id="every-kind-of-head"),
    pytest.param({"max_density": 0.2}, id="capped"),
    pytest.param({"select": "topk", "sparsity": 0.8}, id="topk"),
    pytest.param({"query_block": 256, "key_block": 256}, id="large-blocks"),
]
exact = pytest.mark.parametrize("fields", EXACT)


def laid_on(device, layout, dtype):
    """(q, k, spans) of 2,000 tokens in a layout."""
    fields = {"length": 2000, "dtype": dtype}
    if layout == "chunk":
        # it begins inside of a block
        q, k = heads_on(device, q_length=1111, **fields)
        return q, k, Spans.causal(1, 1111, 2000, device)
    if layout == "causal":
        q, k = heads_on(device, **fields)
        return q, k, Spans.causal(1, 2000, 2000, device)
    q, k = heads_on(device, batch=2, **fields)
    valid = torch.ones(2, 2000, dtype=torch.bool, device=device)
    valid[0, :333] = False
    document = (torch.arange(2000, device=device) >= 900).long().expand(2, -1)
    frame = Frame.build(2, 2000, 2000, 0, valid, document, align=256, device=device)
    return frame.queries(q), frame.keys(k), frame.spans


@exact
@pytest.mark.parametrize("layout", ["causal", "chunk", "padded-and-packed"])
@pytest.mark.parametrize("channels", [(), SLOW], ids=["all-channels", "slow-channels"])
def test_exact_heads_select_what_the_reference_selects(gpu, fields, layout, channels):
    """Of float32: nothing but rounding moves thresholds."""
    q, k, spans = laid_on(gpu, layout, torch.float32)
    config = CabConfig(**fields)
    plan = CurvaturePredictor(config)(q, k, LayerContext(spans, 128**-0.5, 0, channels=channels))
    plan.validate()
    meant = referred(q, k, spans, 128**-0.5, config, channels).to_dense()
    assert (plan.to_dense() != meant).sum() <= 0.001 * meant.sum()


def test_measured_lists_of_exact_heads_hold_the_same(gpu, monkeypatch):
    from cab_hf.ops import predict

    q, k, spans = laid_on(gpu, "causal", torch.bfloat16)
    predictor, call = (
        CurvaturePredictor(CabConfig()),
        LayerContext(spans, 128**-0.5, 0, channels=SLOW),
    )
    wide = predictor(q, k, call)
    monkeypatch.setattr(predict, "LISTS_AT_MOST", 0)
    measured = predictor(q, k, call)
    assert measured.full.width < wide.full.width
    assert torch.equal(measured.to_dense(), wide.to_dense())


def attended(q, k, call, config, kept):
    """The share of attention that the kept blocks hold, mean over queries and heads."""
    mass = block_mass(q, k, call.spans, call.scale, config.query_block, config.key_block)
    return (mass * kept).sum() / mass.sum()


@exact
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_choose_nearly_what_float32_does(gpu, dtype, fields):
    """Their exact scores are of 8-bit floats where the device has them."""
    q, k, spans = laid_on(gpu, "causal", dtype)
    config, call = CabConfig(**fields), LayerContext(spans, 128**-0.5, 0, channels=SLOW)
    actual = CurvaturePredictor(config)(q, k, call).to_dense()
    q, k = q.float(), k.float()
    meant = referred(q, k, spans, 128**-0.5, config, SLOW).to_dense()
    assert (actual != meant).sum() < 0.03 * meant.sum()
    kept, wanted = (attended(q, k, call, config, x) for x in (actual, meant))
    assert wanted - kept < 0.01
    again = CurvaturePredictor(config)(q.to(dtype), k.to(dtype), call)
    assert torch.equal(actual, again.to_dense())


@pytest.mark.parametrize("count", [1, 8, 16, 128])
@pytest.mark.parametrize("blocks", [(128, 64), (128, 128), (128, 256)], ids=str)
@pytest.mark.parametrize("channels", [(), SLOW], ids=["all-channels", "slow-channels"])
@pytest.mark.parametrize("units", [1, 2], ids=["one-unit", "two-units"])
def test_exact_scores_of_eight_bits_are_those_of_the_reference(gpu, blocks, count, channels, units):
    """Of the same 8-bit rows and keys: what is left is that products are summed in 16 bits."""
    from cab_hf.ops.attention.tiles import LOG2_E
    from cab_hf.ops.exact_scores import FP8, exact_scores, outlier_rows, scored_keys

    q, k = heads_on(gpu, length=2000, q_length=1900)
    k[:, :, ::3] *= 2.0 ** (-10 * (units - 1))
    spans, heads = Spans.causal(1, 1900, 2000, gpu), q.shape[1]
    rows = outlier_rows(q, spans, (0, heads), 128**-0.5, blocks[0], count, channels, FP8)
    keys, exponents = scored_keys(k, channels, FP8)
    assert len(exponents.unique()) == units
    q_blocks, columns = -(-1900 // blocks[0]), -(-2000 // blocks[1])
    turn = HeadChunk(
        *(rows_of(q, spans, blocks[0]), q_blocks, 0, heads, heads, k.shape[1]),
        *(q_blocks, columns, -(-columns // 32) * 32, 0),
    )
    most = torch.full((heads, q_blocks, turn.width), torch.nan, device=gpu)
    actual = exact_scores(turn, rows, keys, exponents, blocks[1], most)
    keys = keys.float() * 2.0**exponents

    shape = 1, heads, q_blocks, count
    # the logits of a row in powers of two are its products times its scale
    held = rows.vectors.float() * rows.scale.unsqueeze(-1) / LOG2_E.value
    held = held.view(*shape, -1)
    positions = (rows.last - 100).clamp(min=-1).long().view(shape)
    meant = reference.exact_scores(held, positions, keys, spans, 1.0, blocks[1])
    # each sum of 32 products is rounded to 11 bits, and the logit that is kept
    roundings = keys.shape[3] // 32 + 2
    largest = keys.norm(dim=-1).max() * held.norm(dim=-1).max()
    moved = torch.expm1(2 * roundings * EPS[torch.float16] * largest)
    visible = block_visibility(spans, *blocks)
    for one, other in zip(actual, meant, strict=True):
        one, other = (x.masked_fill(~visible, 0.0) for x in (one[..., :columns], other[0]))
        assert torch.isfinite(one).all()
        assert ((one - other).abs() <= moved * other + 1e-5 * count).all()
        # on the whole far less
        assert (one - other).abs().sum() <= 0.02 * other.sum()


def rows_of(q, spans, query_block):
    from cab_hf.ops.coarsen import coarsen_queries

    return coarsen_queries(q, spans, query_block, "mean").rows


@pytest.mark.parametrize("loudness", [1e-4, 0.25, 1.0, 110.0, 1500.0, 1e4], ids=str)
def test_sums_of_eight_bit_products_are_finite_at_any_norm(gpu, loudness):
    """Rows are of norm 8 and channels of keys below 2^8: a float16 holds what 256 of these sum to.

    Every product has one sign, which is the most that they can sum to.
    """
    q = torch.full((1, 2, 512, 128), loudness, device=gpu, dtype=torch.bfloat16)
    k = q[:, :1].clone()
    # one block is twice as loud
    k[:, :, 128:192] *= 1.15
    spans = Spans.causal(1, 512, 512, gpu)
    config = CabConfig(dense_tail_blocks=0, sink_blocks=0, local_blocks=1, mass_threshold=0.08)
    plan = CurvaturePredictor(config)(q, k, LayerContext(spans, 1 / (loudness**2), 0))
    plan.validate()
    kept = plan.to_dense()
    assert kept[:, :, 3, 2].all()
    # of logits that are alike it is that block alone, beside what is forced and a bridge
    assert kept[:, :, 3].sum(-1).max() <= 2 + 1 + 1


def test_bits_of_a_key_are_its_own_on_the_device_too(gpu):
    from cab_hf.ops.exact_scores import FP8, scored_keys

    _, k = heads_on(gpu, length=2000)
    complete = scored_keys(k, SLOW, FP8)
    louder = k * 5000
    louder[:, :, 700:800] = k[:, :, 700:800]
    for x, start in ((k[:, :, 700:800], 0), (k[:, :, :800], 700), (louder, 700)):
        for some, of_all in zip(scored_keys(x, SLOW, FP8), complete, strict=True):
            held = some.view(torch.uint8)[:, :, start : start + 100]
            assert torch.equal(held, of_all.view(torch.uint8)[:, :, 700:800])


NEEDLES = 64


def needles_on(device, length=16384):
    """(q, k, head, row and key of `NEEDLES`): one query of a block each looks for one key."""
    q, k = heads_on(device, length=length, dtype=torch.float32)
    # float16 holds these times 1e4
    q, k = q.clamp(-6, 6), k.clamp(-6, 6)
    generator = torch.Generator(device).manual_seed(1)
    one = torch.zeros(NEEDLES, 128, device=device)
    one[:, SLOW] = 3 * torch.randn(NEEDLES, 64, device=device, generator=generator).sign()
    index = torch.arange(NEEDLES, device=device)
    heads = index % q.shape[1]
    # in blocks of one theme, where nothing else is an outlier
    starts = torch.arange(length // 2, length - 256, 128, device=device)
    starts = starts[starts // 300 == (starts + 127) // 300]
    rows = starts[index // 2 % len(starts)] + index
    keys = 200 + index * (length // 2 - 500) // NEEDLES
    q[0, heads, rows], k[0, heads // 4, keys] = one, one
    return q, k, (heads, rows, keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_keys_of_any_magnitude_are_found_and_cost_the_same(gpu, dtype):
    q, k, (heads, rows, keys) = needles_on(gpu)
    spans, config = Spans.causal(1, k.shape[2], k.shape[2], gpu), CabConfig()
    call = LayerContext(spans, 128**-0.5, 0, channels=SLOW)
    cells = heads, rows // config.query_block, keys // config.key_block

    def chosen(factor):
        plan = CurvaturePredictor(config)((q / factor).to(dtype), (k * factor).to(dtype), call)
        return plan.to_dense()[0]

    meant = chosen(1.0)
    assert meant[cells].all()
    for factor in (1e-4, 1e-3, 1e3, 1e4):
        actual = chosen(factor)
        assert actual[cells].all(), factor
        assert int(actual.sum()) == pytest.approx(int(meant.sum()), rel=0.03)
    # by powers of two not a bit is another
    for factor in (2.0**-13, 2.0**13) if dtype == torch.bfloat16 else ():
        assert torch.equal(chosen(factor), meant)


def test_exact_scores_stay_within_their_scratch(gpu):
    """32 heads of 65,536 tokens: nothing but scratch beside the 4 MiB a head that are found."""
    from cab_hf.ops import exact_scores as ops
    from cab_hf.ops.rows import scored_dtype

    length, count = 65_536, 16
    q, k = heads_on(gpu, length=length, heads=32, kv_heads=8)
    spans, dtype = Spans.causal(1, length, length, gpu), scored_dtype(k)
    rows = ops.outlier_rows(q, spans, (0, 32), 128**-0.5, 128, count, SLOW, dtype)
    (keys, exponents), blocks = ops.scored_keys(k, SLOW, dtype), rows_of(q, spans, 128)
    turn = HeadChunk(blocks, 512, 0, 32, 32, 8, 512, 1024, 1024, 0)
    most = torch.empty(32, 512, 1024, device=gpu)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = ops.exact_scores(turn, rows, keys, exponents, 64, most)
    # the memory of one of both was there
    given = most.numel() * most.element_size()
    scratch = torch.cuda.max_memory_allocated() - before - given
    assert given == 32 * 2 << 20 and scratch <= ops.SCRATCH_AT_A_TIME + (1 << 20)
    visible = block_visibility(spans, 128, 64)
    assert all(torch.isfinite(x.masked_fill(~visible, 0.0)).all() for x in result)


# --- how choosing runs

CHOOSING = [
    pytest.param({}, id="default"),
    pytest.param({"exact_queries": 0}, id="estimate"),
    pytest.param(EVERY_KIND, id="every-kind-of-head"),
]


@pytest.mark.parametrize("fields", CHOOSING)
def test_predicting_is_captured_in_a_cuda_graph(gpu, fields):
    q, k = heads_on(gpu)
    call = LayerContext(Spans.causal(1, 8191, 8191, gpu), 128**-0.5, 0, channels=SLOW)
    predictor = CurvaturePredictor(CabConfig(**fields))
    predictor(q, k, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = predictor(q, k, call)
    q.copy_(q.roll(512, dims=2))
    graph.replay()
    meant = predictor(q, k, call)
    assert torch.equal(captured.to_dense(), meant.to_dense())


@pytest.mark.parametrize("fields", CHOOSING)
def test_predicting_compiles_without_a_break(gpu, fields):
    q, k = heads_on(gpu, length=2000)
    spans = Spans.causal(1, 2000, 2000, gpu)
    predictor = CurvaturePredictor(CabConfig(**fields))
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def compiled(q, k):
        plan = predictor(q, k, LayerContext(spans, 128**-0.5, 0, channels=SLOW))
        return plan.full.counts, plan.full.indices, plan.partial.counts, plan.partial.indices

    counts, indices, *partial = compiled(q, k)
    plan = predictor(q, k, LayerContext(spans, 128**-0.5, 0, channels=SLOW))
    assert torch.equal(BlockLists(counts, indices).to_dense(32), plan.full.to_dense(32))
    assert torch.equal(BlockLists(*partial).to_dense(32), plan.partial.to_dense(32))


def test_predicting_never_waits_for_the_device(gpu):
    q, k = heads_on(gpu)
    spans = Spans.causal(1, 8191, 8191, gpu)
    CurvaturePredictor(CabConfig())(q, k, LayerContext(spans, 128**-0.5))
    torch.cuda.set_sync_debug_mode("error")
    try:
        CurvaturePredictor(CabConfig())(q, k, LayerContext(spans, 128**-0.5))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("length", "mib"),
    [pytest.param(131_072, 2200, id="128k"), pytest.param(1_048_576, 16 << 10, id="1m")],
)
def test_predicting_stays_within_its_memory(gpu, length, mib):
    q, k = heads_on(gpu, length=length, heads=32, kv_heads=8)
    spans = Spans.causal(1, length, length, gpu)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = CurvaturePredictor(CabConfig())(q, k, LayerContext(spans, 128**-0.5, channels=SLOW))
    assert (torch.cuda.max_memory_allocated() - before) / 2**20 <= mib
    assert plan.full.counts.min() >= 0


# query blocks are 128 on a GPU
LARGE = replace(SPARSE, query_block=128, key_block=64, exact_queries=16)
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def first_logits(model, ids, **options):
    told = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 2}
    seen = (ids != 0).long()
    result = model.generate(ids, attention_mask=seen, **GREEDY, **told, **options)
    return torch.stack(result.logits, dim=1)


@pytest.mark.parametrize("length", [600, 1000, 1153, 1281, 1536])
@pytest.mark.parametrize("tail", [1, 2])
def test_chunks_of_whole_query_blocks_are_one_call(gpu, length, tail):
    model = cab_hf.apply_cab(tiny_model().to(gpu), replace(LARGE, dense_tail_blocks=tail))
    ids = tokens(1, length).to(gpu)
    found = first_logits(model, ids, prefill_chunk_size=256)
    torch.testing.assert_close(found, first_logits(model, ids), rtol=2e-3, atol=2e-3)


def test_query_blocks_are_counted_from_the_first_token_of_a_text(gpu):
    settings = replace(LARGE, dense_tail_blocks=0)
    model = cab_hf.apply_cab(tiny_model(num_hidden_layers=1).to(gpu), settings)
    ids, cache = tokens(1, 1024).to(gpu), DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 256:]
        model(ids[:, :200], past_key_values=cache, use_cache=True)
        found = model(ids[:, 200:], past_key_values=cache, use_cache=True).logits[:, 56:]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("steps", [{}, {"sparse_decode": True, "decode_tokens": 0.05}])
def test_drafts_change_no_token(gpu, steps):
    model = cab_hf.apply_cab(tiny_model().to(gpu), replace(LARGE, **steps))
    for seed in range(8):
        ids = tokens(1, 200, seed=seed).repeat(1, 5)[:, : 700 + 31 * seed].to(gpu)
        told = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, **GREEDY}
        expected = model.generate(ids, **told)
        assert torch.equal(model.generate(ids, **told, prompt_lookup_num_tokens=5), expected)


@pytest.mark.parametrize("kind", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_a_padded_row_is_decoded_as_alone(gpu, kind):
    fields = {"min_length": 900, "sparse_decode": True, "decode_tokens": 128, "mass_threshold": 0.0}
    model = cab_hf.apply_cab(tiny_model().to(gpu), fields)
    texts = tokens(1, 500).to(gpu), tokens(1, 1300, seed=2).to(gpu)
    ids = torch.cat([torch.nn.functional.pad(texts[0], (800, 0)), texts[1]])
    together = first_logits(model, ids, **kind)
    for row, text in enumerate(texts):
        alone = first_logits(model, text, **kind)
        torch.testing.assert_close(together[row], alone[0], rtol=2e-3, atol=2e-3)
