"""Predictor "cascade" on a CUDA device: plans of anchor layers, and layers that reuse them."""

import pytest
import torch
from selecting import draw_topic_qk
from valid_plan import assert_valid_plan

from cab_hf import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

pytestmark = pytest.mark.gpu
SCALE = 128**-0.5


def test_cascade_layers_attend_blocks_of_mapped_heads(gpu):
    mapped_heads = (3, 3, 0, 1, 7, 6, 5, 4)
    config = CabConfig(predictor="cascade", anchors=(0,), head_map=((0,) * 8, mapped_heads))
    q, k = draw_topic_qk(gpu, 2000)
    key_ranges, shared_state = KeyRanges.causal(1, 2000, 2000, gpu), {}
    rows_plan = make_predictor(CabConfig())(q, k, LayerContext(key_ranges, SCALE))
    anchor_plan, mapped_plan = (
        make_predictor(config)(q, k, LayerContext(key_ranges, SCALE, layer, shared_state))
        for layer in range(2)
    )
    assert torch.equal(anchor_plan.to_dense(), rows_plan.to_dense())
    assert_valid_plan(mapped_plan)
    assert torch.equal(mapped_plan.to_dense(), anchor_plan.to_dense()[:, list(mapped_heads)])
