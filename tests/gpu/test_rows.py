"""Kernels of predictor "rows" on a GPU, compared with the reference."""

from dataclasses import replace

import pytest
import torch
from attention_cases import make_block_layout
from selecting import draw_topic_qk
from valid_plan import assert_valid_plan

from cab_hf import CabConfig
from cab_hf.hf.rotary import slow_channels_of_llama
from cab_hf.plan import BlockIndices, BlockPlan, KeyRanges
from cab_hf.predictors import LayerContext, RowsPredictor
from cab_hf.selection import compact, reference, tiles
from cab_hf.selection.reference import ScoreOptions, select_blocks

pytestmark = pytest.mark.gpu

ROWS_CONFIG = CabConfig(predictor="rows", mass_threshold=0.01, share_threshold=0.2)
# holds three chunks of one tile each of `draw_topic_qk` with 8-bit products, but not all tiles
SMALL_SCRATCH_BYTES = 5 << 19
FLOAT32_FIELDS = {"dtype": torch.float32}
CASES = [
    pytest.param({}, {}, id="8-bits"),
    pytest.param({}, {"dtype": torch.float16}, id="float16"),
    pytest.param({}, FLOAT32_FIELDS, id="float32"),
    pytest.param({}, {"length": 129, "batch": 2, **FLOAT32_FIELDS}, id="one-block-and-one-query"),
    pytest.param({}, {"length": 40, **FLOAT32_FIELDS}, id="below-one-block"),
    pytest.param({}, {"q_length": 3000, **FLOAT32_FIELDS}, id="chunk"),
    pytest.param({"key_block": 128}, {}, id="128-keys"),
    pytest.param({"key_block": 256, "query_block": 256}, {"dim": 256}, id="256-256-256"),
    pytest.param({"query_block": 64, "key_block": 32}, {"dim": 64}, id="64-32-64"),
    pytest.param({"outlier_queries": 0}, {}, id="typical-queries-only"),
    pytest.param({"outlier_queries": 32, "typical_queries": 16}, {}, id="32-and-16"),
    pytest.param({"max_density": 0.1}, {"batch": 2}, id="capped"),
    pytest.param({}, {"dim": 256, "length": 3000, **FLOAT32_FIELDS}, id="d256-float32"),
    *(pytest.param({}, {"dim": dim, "length": 3000}, id=f"d{dim}") for dim in (16, 80, 96, 192)),
]
LAYOUTS = ["padded", "packed", "chunk"]


def make_layer_context(q, k, key_ranges=None, **logit_fields):
    """Return the `LayerContext` of a layer with LLaMA's RoPE channels.

    Args:
        ranges: `KeyRanges`; None: causal.
        logit_fields: fields of the context that change logits, ``sinks`` or ``softcap``.
    """
    key_ranges = key_ranges or KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    dim = q.shape[3]
    return LayerContext(
        key_ranges, dim**-0.5, 0, channels=slow_channels_of_llama(dim), **logit_fields
    )


def compute_blocks_by_kernels_and_reference(config, q, k, layer_context):
    """Return the selected blocks, bool [B, H, M_q, M_k], by kernels and float32 reference."""
    plan = RowsPredictor(config)(q, k, layer_context)
    assert_valid_plan(plan)
    score_options = ScoreOptions(
        layer_context.scale, layer_context.channels, layer_context.sinks, layer_context.softcap
    )
    reference_blocks = select_blocks(
        q.float(),
        k.float(),
        ranges=layer_context.ranges,
        config=config,
        score_options=score_options,
    )
    tail_tokens = config.dense_tail_blocks * config.query_block
    expected = BlockPlan.from_dense(
        reference_blocks,
        layer_context.ranges,
        query_block=config.query_block,
        key_block=config.key_block,
        dense_rows=layer_context.ranges.tail_rows(tail_tokens, config.query_block),
    )
    return plan.to_dense(), expected.to_dense()


def assert_few_differences(actual, expected, dtype):
    """Assert that at most 0.1% (float32) or 3% (16-bit inputs) of the selected blocks differ."""
    # 16-bit inputs are scored in FP8 if the device supports FP8
    max_differing_share = 0.001 if dtype == torch.float32 else 0.03
    assert (actual != expected).sum() <= max_differing_share * expected.sum()


@pytest.mark.parametrize(("config_fields", "shape"), CASES)
def test_kernels_select_same_blocks_as_reference(gpu, config_fields, shape):
    q, k = draw_topic_qk(gpu, **shape)
    config = replace(ROWS_CONFIG, **config_fields)
    actual, expected = compute_blocks_by_kernels_and_reference(
        config, q, k, make_layer_context(q, k)
    )
    assert_few_differences(actual, expected, q.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("logit_field", ["sinks", "softcap"])
def test_scores_include_sinks_and_softcap(gpu, logit_field, dtype):
    q, k = draw_topic_qk(gpu, dtype=dtype)
    sinks = torch.linspace(0.0, 24.0, q.shape[1], device=gpu)
    layer_context = make_layer_context(
        q, k, **{logit_field: sinks if logit_field == "sinks" else 4.0}
    )
    actual, expected = compute_blocks_by_kernels_and_reference(ROWS_CONFIG, q, k, layer_context)
    assert_few_differences(actual, expected, dtype)
    _, blocks_without_logit_field = compute_blocks_by_kernels_and_reference(
        ROWS_CONFIG, q, k, make_layer_context(q, k)
    )
    assert (blocks_without_logit_field != expected).sum() > 0.05 * expected.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_select_same_blocks_in_every_layout(gpu, layout, dtype):
    length = 1111 if layout == "chunk" else 2000
    q, k = draw_topic_qk(gpu, length=2000, q_length=length, batch=2, dtype=dtype)
    block_layout = make_block_layout(
        layout, batch=2, length=length, kv_length=2000, align=128, device=gpu
    )
    q, k = block_layout.queries(q), block_layout.keys(k)
    layer_context = make_layer_context(q, k, block_layout.ranges)
    actual, expected = compute_blocks_by_kernels_and_reference(ROWS_CONFIG, q, k, layer_context)
    assert_few_differences(actual, expected, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_sample_of_many_keys_selects_blocks_of_reference(gpu, layout, monkeypatch):
    length = 1111 if layout == "chunk" else 2000
    q, k = draw_topic_qk(gpu, length=2000, q_length=length, batch=2)
    block_layout = make_block_layout(
        layout, batch=2, length=length, kv_length=2000, align=128, device=gpu
    )
    q, k = block_layout.queries(q), block_layout.keys(k)
    layer_context = make_layer_context(q, k, block_layout.ranges)
    full_sample_blocks = RowsPredictor(ROWS_CONFIG)(q, k, layer_context).to_dense()
    monkeypatch.setattr(reference, "MAX_KEYS_AT_FULL_SAMPLE", 512)
    actual, expected = compute_blocks_by_kernels_and_reference(ROWS_CONFIG, q, k, layer_context)
    assert_few_differences(actual, expected, q.dtype)
    assert not torch.equal(actual, full_sample_blocks)


@pytest.mark.parametrize("key_factor", [1e-4, 1e-3, 1e3, 1e4])
def test_key_magnitude_does_not_change_density(gpu, key_factor):
    q, k = draw_topic_qk(gpu)
    expected = RowsPredictor(ROWS_CONFIG)(q, k, make_layer_context(q, k)).to_dense()
    scaled_q, scaled_k = (q.float() / key_factor).bfloat16(), (k.float() * key_factor).bfloat16()
    actual = RowsPredictor(ROWS_CONFIG)(scaled_q, scaled_k, make_layer_context(q, k)).to_dense()
    assert int(actual.sum()) == pytest.approx(int(expected.sum()), rel=0.03)


@pytest.mark.parametrize("chunks_in_flight", [1, 3])
def test_chunked_scratch_and_lists_give_same_plan(gpu, chunks_in_flight, monkeypatch):
    q, k = draw_topic_qk(gpu)
    expected = RowsPredictor(ROWS_CONFIG)(q, k, make_layer_context(q, k))
    monkeypatch.setattr(tiles, "MAX_SCRATCH_BYTES", SMALL_SCRATCH_BYTES)
    monkeypatch.setattr(tiles, "MAX_CHUNKS_IN_FLIGHT", chunks_in_flight)
    monkeypatch.setattr(tiles, "MIN_PROGRAMS_IN_FLIGHT", 1)
    monkeypatch.setattr(compact, "MAX_LIST_BYTES", 0)
    actual = RowsPredictor(ROWS_CONFIG)(q, k, make_layer_context(q, k))
    assert actual.full.width < expected.full.width
    assert torch.equal(actual.to_dense(), expected.to_dense())


@pytest.mark.parametrize("max_density", [1.0, 0.1])
@pytest.mark.parametrize("chunks_in_flight", [1, 3])
def test_selection_runs_in_cuda_graph(gpu, max_density, chunks_in_flight, monkeypatch):
    monkeypatch.setattr(tiles, "MAX_SCRATCH_BYTES", SMALL_SCRATCH_BYTES)
    monkeypatch.setattr(tiles, "MAX_CHUNKS_IN_FLIGHT", chunks_in_flight)
    monkeypatch.setattr(tiles, "MIN_PROGRAMS_IN_FLIGHT", 1)
    q, k = draw_topic_qk(gpu)
    layer_context, predictor = (
        make_layer_context(q, k),
        RowsPredictor(replace(ROWS_CONFIG, max_density=max_density)),
    )
    predictor(q, k, layer_context)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_plan = predictor(q, k, layer_context)
    q.copy_(q.roll(512, dims=2))
    graph.replay()
    assert torch.equal(captured_plan.to_dense(), predictor(q, k, layer_context).to_dense())


def test_selection_compiles_without_graph_break(gpu):
    q, k = draw_topic_qk(gpu, length=2000)
    layer_context, predictor = make_layer_context(q, k), RowsPredictor(ROWS_CONFIG)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def select_lists(q, k):
        plan = predictor(q, k, layer_context)
        return plan.full.counts, plan.full.indices, plan.partial.counts, plan.partial.indices

    full_counts, full_indices, partial_counts, partial_indices = select_lists(q, k)
    plan = predictor(q, k, layer_context)
    full_lists = BlockIndices(full_counts, full_indices)
    partial_lists = BlockIndices(partial_counts, partial_indices)
    assert torch.equal(full_lists.to_dense(32), plan.full.to_dense(32))
    assert torch.equal(partial_lists.to_dense(32), plan.partial.to_dense(32))


def test_selection_does_not_synchronise(gpu):
    q, k = draw_topic_qk(gpu)
    layer_context = make_layer_context(q, k)
    RowsPredictor(ROWS_CONFIG)(q, k, layer_context)
    torch.cuda.set_sync_debug_mode("error")
    try:
        RowsPredictor(ROWS_CONFIG)(q, k, layer_context)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("length", "max_mib"),
    [pytest.param(131_072, 2200, id="128k"), pytest.param(1_048_576, 16 << 10, id="1m")],
)
def test_selection_memory_is_bounded(gpu, length, max_mib):
    q, k = draw_topic_qk(gpu, length=length, heads=32, kv_heads=8)
    layer_context = make_layer_context(q, k)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    input_bytes = torch.cuda.memory_allocated()
    plan = RowsPredictor(ROWS_CONFIG)(q, k, layer_context)
    assert (torch.cuda.max_memory_allocated() - input_bytes) / 2**20 <= max_mib
    assert plan.full.counts.min() >= 0
