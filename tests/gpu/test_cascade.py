"""A cascade on a CUDA device: what anchors choose, and what the layers behind them attend."""

import pytest
import torch
from selecting import heads_on

from cab_hf import CabConfig
from cab_hf.plan import Spans
from cab_hf.predictors import LayerContext, curvature, make_predictor

pytestmark = pytest.mark.gpu
SCALE = 128**-0.5
SHARES = (0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.45, 0.07)


@pytest.mark.parametrize("count", [0, 16])
def test_heads_of_an_anchor_have_budgets_of_their_own(gpu, monkeypatch, count):
    fields = {"top_p": ((0.0,) * 8,), "top_k_share": (SHARES,), "anchors": (0,)}
    config = CabConfig(predictor="cascade", exact_queries=count, **fields)
    # float32: 16-bit keys are scored in 8 bits
    q, k = heads_on(gpu, 4000, dtype=torch.float32)
    call = LayerContext(Spans.causal(1, 4000, 4000, gpu), SCALE, 0)
    actual = make_predictor(config)(q, k, call).to_dense()
    monkeypatch.setattr(curvature, "has_kernels", lambda x: False)
    meant = make_predictor(config)(q, k, call).to_dense()
    # rounding moves thresholds; nothing else may differ
    assert (actual != meant).sum() <= 0.002 * meant.sum()
    kept = actual.float().mean((0, 2, 3)).tolist()
    assert sorted(range(8), key=kept.__getitem__)[-3:] == [4, 5, 6]


def test_layers_behind_an_anchor_attend_the_heads_of_their_map(gpu):
    row = (3, 3, 0, 1, 7, 6, 5, 4)
    config = CabConfig(predictor="cascade", anchors=(0,), head_map=((0,) * 8, row))
    q, k = heads_on(gpu, 2000)
    spans, shared_state = Spans.causal(1, 2000, 2000, gpu), {}
    anchor, behind = (
        make_predictor(config)(q, k, LayerContext(spans, SCALE, layer, shared_state))
        for layer in range(2)
    )
    behind.validate()
    assert torch.equal(behind.to_dense(), anchor.to_dense()[:, list(row)])
