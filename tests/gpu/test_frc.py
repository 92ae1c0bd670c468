"""Triton kernels of predictor "frc" on a GPU, compared with its PyTorch implementation."""

import pytest
import torch
from attention_cases import make_block_layout
from selecting import draw_topic_qk
from valid_plan import assert_valid_plan

from cab_hf import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.predictors import FrcPredictor, LayerContext, frc

pytestmark = pytest.mark.gpu

CASES = [
    pytest.param(CabConfig.published(), {}, id="forman"),
    pytest.param(CabConfig.published(curvature="additive"), {}, id="additive"),
    pytest.param(CabConfig.published(curvature="none"), {"dtype": torch.float16}, id="magnitude"),
    pytest.param(CabConfig.published(), {"dtype": torch.float32, "dim": 256}, id="float32-256"),
    pytest.param(
        CabConfig.published(0.8, query_block=128), {"dim": 80}, id="query-block-of-2-key-blocks"
    ),
    pytest.param(CabConfig.published(key_block=128), {"q_length": 3000}, id="wide-keys-chunk"),
    pytest.param(CabConfig.published(((0.5, 0.9) * 4,)), {"length": 40}, id="below-one-block"),
    pytest.param(CabConfig.published(0.0), {"batch": 2}, id="all-blocks"),
    pytest.param(CabConfig.published(0.5, max_density=0.2), {"batch": 3}, id="capped"),
    pytest.param(CabConfig.published(dense_tail_blocks=2), {}, id="tail"),
]


def compute_blocks_by_kernels_and_pytorch(monkeypatch, config, q, k, *, layer_context):
    """Return the selected blocks, bool [B, H, M_q, M_k], by the kernels and by PyTorch."""
    plan = FrcPredictor(config)(q, k, layer_context)
    assert_valid_plan(plan)
    assert torch.equal(plan.to_dense(), FrcPredictor(config)(q, k, layer_context).to_dense())
    monkeypatch.setattr(frc, "has_kernels", lambda x: False)
    return plan.to_dense(), FrcPredictor(config)(q, k, layer_context).to_dense()


@pytest.mark.parametrize(("config", "shape"), CASES)
def test_kernels_select_same_blocks_as_pytorch(gpu, config, shape, monkeypatch):
    q, k = draw_topic_qk(gpu, **shape)
    key_ranges = KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], gpu)
    actual, expected = compute_blocks_by_kernels_and_pytorch(
        monkeypatch, config, q, k, layer_context=LayerContext(key_ranges, 0.1, 0)
    )
    # rounding may change which token of a block has the largest norm
    assert (actual != expected).sum() <= 0.001 * expected.sum()


@pytest.mark.parametrize("layout", ["padded", "packed", "chunk"])
def test_kernels_select_same_blocks_in_every_layout(gpu, layout, monkeypatch):
    length = 1111 if layout == "chunk" else 2000
    q, k = draw_topic_qk(gpu, length=2000, q_length=length, batch=2)
    block_layout = make_block_layout(
        layout, batch=2, length=length, kv_length=2000, align=64, device=gpu
    )
    actual, expected = compute_blocks_by_kernels_and_pytorch(
        monkeypatch,
        CabConfig.published(0.8),
        block_layout.queries(q),
        block_layout.keys(k),
        layer_context=LayerContext(block_layout.ranges, 0.1, 0),
    )
    assert (actual != expected).sum() <= 0.001 * expected.sum()


def test_compiled_layers_select_same_blocks(gpu):
    q, k = draw_topic_qk(gpu, length=3000)
    config = CabConfig.published(0.8)

    def list_blocks(q, k):
        plan = FrcPredictor(config)(
            q, k, LayerContext(KeyRanges.causal(1, 3000, 3000, q.device), 0.1)
        )
        return plan.full.counts, plan.full.indices, plan.partial.counts

    full_counts, _, partial_counts = list_blocks(q, k)
    actual = torch.compile(list_blocks, fullgraph=True)(q, k)
    assert torch.equal(actual[0], full_counts) and torch.equal(actual[2], partial_counts)


def test_long_sequence_memory_is_bounded(gpu):
    length, tensor_options = 131_072, {"device": gpu, "dtype": torch.bfloat16}
    q, k = (torch.randn(1, num_heads, length, 128, **tensor_options) for num_heads in (32, 8))
    torch.cuda.reset_peak_memory_stats()
    input_bytes = torch.cuda.memory_allocated()
    layer_context = LayerContext(KeyRanges.causal(1, length, length, gpu), 128**-0.5)
    FrcPredictor(CabConfig.published())(q, k, layer_context)
    assert (torch.cuda.max_memory_allocated() - input_bytes) / 2**30 < 4
