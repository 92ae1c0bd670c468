"""One million tokens on a CUDA device: one attention layer of LLaMA-3-8B with selection."""

import pytest
import torch
from budget import assert_within_budget
from torch.nn import functional as F

from cab_hf import CabConfig, engines
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, RowsPredictor
from cab_hf.selection.gather import choose_scoring_dtype
from cab_hf.selection.tiles import FP8

pytestmark = pytest.mark.gpu
NUM_TOKENS = 2**20
CHUNK_TOKENS = 2**15
# unused slots of a static cache after the last key
NUM_UNWRITTEN_SLOTS = 4096
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
# channels with the lowest RoPE frequencies
SLOW_CHANNELS = (*range(32, 64), *range(96, 128))
# the attention masses of random q and k are nearly equal, so every query block selects
# ``max_density`` of its blocks
CONFIG = CabConfig(mass_threshold=1e-4, max_density=0.02, dense_tail_blocks=0)
# query blocks per comparison: few, because their token masks have the length of the prompt
NUM_COMPARED_QUERIES = 8


def make_qkv(device, q_length):
    """Return q with the strides of a model, k and v with the strides of a static cache."""
    generator = torch.Generator(device).manual_seed(0)
    tensor_options = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    q = torch.randn(1, q_length, NUM_HEADS, HEAD_DIM, **tensor_options).transpose(1, 2)
    k, v = (
        torch.randn(1, NUM_KV_HEADS, NUM_TOKENS + NUM_UNWRITTEN_SLOTS, HEAD_DIM, **tensor_options)[
            :, :, :NUM_TOKENS
        ]
        for _ in range(2)
    )
    return q, k, v


@pytest.mark.parametrize(
    ("q_length", "max_gib_with_fp8"),
    # max_gib_with_fp8: limit of additional memory; the quantised keys take 1 GiB in FP8, and 2 GiB
    # without FP8
    [pytest.param(NUM_TOKENS, 24, id="prompt"), pytest.param(CHUNK_TOKENS, 3, id="chunk")],
)
def test_layer_attends_one_million_tokens(gpu, q_length, max_gib_with_fp8):
    q, k, v = make_qkv(gpu, q_length)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    input_bytes = torch.cuda.memory_allocated()
    with torch.inference_mode():
        key_ranges = KeyRanges.causal(1, q_length, NUM_TOKENS, gpu)
        plan = RowsPredictor(CONFIG)(q, k, LayerContext(key_ranges, SCALE, channels=SLOW_CHANNELS))
        out = engines.TRITON.attention(q, k, v, plan, scale=SCALE)
    torch.cuda.synchronize()
    max_gib = max_gib_with_fp8 + (choose_scoring_dtype(k) != FP8)
    assert (torch.cuda.max_memory_allocated() - input_bytes) / 2**30 < max_gib
    assert plan.density() == pytest.approx(CONFIG.max_density, rel=0.1)
    for out_chunk in out.split(CHUNK_TOKENS, dim=2):
        assert torch.isfinite(out_chunk).all()

    group_size = NUM_HEADS // NUM_KV_HEADS
    for first_query in (0, q_length // 2 + 100, q_length - NUM_COMPARED_QUERIES):
        query_slice = slice(first_query, first_query + NUM_COMPARED_QUERIES)
        mask = plan.token_mask(query_slice.start, query_slice.stop)
        for kv_head in (0, NUM_KV_HEADS - 1):
            head_slice = slice(kv_head * group_size, (kv_head + 1) * group_size)

            def attend_exactly(q, k, v, mask=mask[:, head_slice]):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)

            # repeat the KV head of these query heads
            keys, values = (
                x[:, kv_head : kv_head + 1].expand(-1, group_size, -1, -1) for x in (k, v)
            )
            assert_within_budget(
                out[:, head_slice, query_slice],
                attend_exactly,
                q[:, head_slice, query_slice],
                keys,
                values,
            )
