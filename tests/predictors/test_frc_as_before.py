"""Predictor "frc" makes the plans that the published recipe made as a form of "curvature"."""

import pytest
import torch
from marks import slow_but
from selecting import by_kernels, laid_in, loud, on_the_cpu

from cab_hf import CabConfig
from cab_hf.predictors import CurvaturePredictor, LayerContext

LAYOUTS = ["causal", "padded", "packed", "chunk", "in-place"]
CURVATURES = [("forman", 1.0), ("forman", 0.4), ("additive", 0.3), ("none", 0.3), ("forman", 0.0)]
BLOCKS = [(32, 32), (32, 16), (16, 32), (48, 16), (16, 64)]
BUDGETS = [
    {"sparsity": 0.7},
    {"sparsity": 0.95, "dense_tail_blocks": 2},
    {"sparsity": ((0.0, 0.3, 0.7, 0.9, 0.95, 0.5),), "sink_blocks": 2},
    {"sparsity": 0.2, "max_density": 0.4},
]
PUBLISHED = {"sink_blocks": 0, "local_blocks": 1, "dense_tail_blocks": 0}
BEFORE = {"coarsen": "max_l2", "select": "topk", "exact_queries": 0}


def cases(layout, blocks, curvature, budgets):
    """(config, the same as it was before, q, k, spans) for some budgets."""
    length, q_length = (330, 150) if layout == "chunk" else (330, 330)
    by = dict(zip(("curvature", "redundancy"), curvature, strict=True))
    for seed, budget in enumerate(budgets):
        given = loud(batch=2, heads=6, kv_heads=2, q_length=q_length, kv_length=length, seed=seed)
        fields = {**PUBLISHED, **by, **budget}
        configs = (CabConfig(*blocks, **fields, **way) for way in ({"predictor": "frc"}, BEFORE))
        yield *configs, *laid_in(layout, *given, max(blocks))


def assert_same(actual, meant):
    assert torch.equal(actual.to_dense(), meant.to_dense())
    assert torch.equal(actual.full.counts, meant.full.counts)
    named = [None if x.dense_rows is None else x.dense_rows.tolist() for x in (actual, meant)]
    assert named[0] == named[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_the_reference_makes_the_plans_of_before(blocks, curvature, layout):
    for config, before, q, k, spans in cases(layout, blocks, curvature, BUDGETS):
        meant = CurvaturePredictor(before)(q, k, LayerContext(spans, 0.25, 0))
        assert_same(on_the_cpu(config, q, k, spans), meant)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, 0, 3))
@pytest.mark.parametrize("curvature", slow_but([pytest.param(x) for x in CURVATURES], 0))
@pytest.mark.parametrize("blocks", slow_but([pytest.param(x) for x in BLOCKS], 1))
def test_kernels_make_the_plans_of_before(blocks, curvature, layout):
    for config, before, q, k, spans in cases(layout, blocks, curvature, BUDGETS[2:3]):
        meant = CurvaturePredictor(before)(q, k, LayerContext(spans, 0.25, 0))
        assert_same(by_kernels(config, q, k, spans), meant)
