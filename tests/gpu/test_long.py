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
TOKENS = 2**20
CHUNK = 2**15
# unused slots of a static cache after the last key
UNWRITTEN = 4096
HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
# channels with the lowest RoPE frequencies
SLOW = (*range(32, 64), *range(96, 128))
# the attention masses of random q and k are nearly equal, so every query block selects
# ``max_density`` of its blocks
CONFIG = CabConfig(mass_threshold=1e-4, max_density=0.02, dense_tail_blocks=0)
# query blocks per comparison: few, because their token masks have the length of the prompt
ROWS = 8


def make_heads(device, q_length):
    """Return q with the strides of a model, k and v with the strides of a static cache."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    q = torch.randn(1, q_length, HEADS, DIM, **options).transpose(1, 2)
    k, v = (
        torch.randn(1, KV_HEADS, TOKENS + UNWRITTEN, DIM, **options)[:, :, :TOKENS]
        for _ in range(2)
    )
    return q, k, v


@pytest.mark.parametrize(
    ("q_length", "max_gib_with_fp8"),
    # max_gib_with_fp8: limit of additional memory; the quantised keys take 1 GiB in FP8, and 2 GiB
    # without FP8
    [pytest.param(TOKENS, 24, id="prompt"), pytest.param(CHUNK, 3, id="chunk")],
)
def test_layer_attends_one_million_tokens(gpu, q_length, max_gib_with_fp8):
    q, k, v = make_heads(gpu, q_length)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    memory_of_inputs = torch.cuda.memory_allocated()
    with torch.inference_mode():
        ranges = KeyRanges.causal(1, q_length, TOKENS, gpu)
        plan = RowsPredictor(CONFIG)(q, k, LayerContext(ranges, SCALE, channels=SLOW))
        out = engines.TRITON.attention(q, k, v, plan, scale=SCALE)
    torch.cuda.synchronize()
    max_gib = max_gib_with_fp8 + (choose_scoring_dtype(k) != FP8)
    assert (torch.cuda.max_memory_allocated() - memory_of_inputs) / 2**30 < max_gib
    assert plan.density() == pytest.approx(CONFIG.max_density, rel=0.1)
    for chunk in out.split(CHUNK, dim=2):
        assert torch.isfinite(chunk).all()

    group = HEADS // KV_HEADS
    for start in (0, q_length // 2 + 100, q_length - ROWS):
        rows = slice(start, start + ROWS)
        mask = plan.token_mask(rows.start, rows.stop)
        for kv_head in (0, KV_HEADS - 1):
            heads = slice(kv_head * group, (kv_head + 1) * group)

            def exact(q, k, v, mask=mask[:, heads]):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)

            # repeat the KV head of these query heads
            keys, values = (x[:, kv_head : kv_head + 1].expand(-1, group, -1, -1) for x in (k, v))
            assert_within_budget(out[:, heads, rows], exact, q[:, heads, rows], keys, values)
