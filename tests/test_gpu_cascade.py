"""Anchors of a cascade on a CUDA device: their scores, what they choose, and what that takes."""

import pytest
import torch
from selecting import heads_on

from cab_hf import CabConfig
from cab_hf.ops import reference
from cab_hf.plan import Spans
from cab_hf.predictors import Call, cascade, curvature, make_predictor

pytestmark = pytest.mark.gpu
SCALE = 128**-0.5


@pytest.mark.parametrize("reduction", ["max", "mean"])
@pytest.mark.parametrize("blocks", [(128, 64), (128, 128), (64, 32), (48, 48), (64, 256)])
def test_block_shares_are_those_of_the_reference(gpu, blocks, reduction):
    from cab_hf.ops.block_shares import block_shares

    q, k = heads_on(gpu, 2000, q_length=1900)
    told = Spans.causal(1, 1900, 2000, gpu), SCALE, *blocks, reduction
    found, meant = block_shares(q, k, *told), reference.block_shares(q, k, *told)
    # products of bfloat16 are exact in float32, their sums are not
    torch.testing.assert_close(found, meant, atol=1e-4, rtol=1e-3)


BUDGETS = [
    pytest.param({"mass": 0.9, "bridges": 0.0}, id="mass"),
    pytest.param({"mass": 0.5, "bridges": 0.1}, id="mass-and-bridges"),
    pytest.param({"mass": 0.999, "max_density": 0.2}, id="capped"),
]


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("scores", ["exact", "cab"])
@pytest.mark.parametrize("heads", ["each", "group", "all"])
def test_anchors_choose_what_the_reference_chooses(gpu, monkeypatch, heads, scores, budgets):
    shared = {"anchors": (0,), "anchor_heads": heads, "anchor_scores": scores, "local_blocks": 1}
    config = CabConfig(predictor="cascade", **shared, **budgets)
    q, k = heads_on(gpu, 2000)
    call = Call(Spans.causal(1, 2000, 2000, gpu), SCALE, 0)
    plan = make_predictor(config)(q, k, call)
    plan.validate()
    for module in (cascade, curvature):
        monkeypatch.setattr(module, "has_kernels", lambda x: False)
    meant = make_predictor(config)(q, k, call).to_dense()
    # rounding moves thresholds; nothing else may differ
    assert (plan.to_dense() != meant).sum() <= 0.002 * meant.sum()
    assert plan.heads == {"each": 8, "group": 2, "all": 1}[heads]


def test_heads_of_an_anchor_have_budgets_of_their_own(gpu, monkeypatch):
    shares = (0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.45, 0.07)
    told = {"mass": ((0.0,) * 8,), "bridges": (shares,), "anchors": (0,)}
    config = CabConfig(predictor="cascade", **told)
    q, k = heads_on(gpu, 4000)
    call = Call(Spans.causal(1, 4000, 4000, gpu), SCALE, 0)
    found = make_predictor(config)(q, k, call).to_dense()
    monkeypatch.setattr(cascade, "has_kernels", lambda x: False)
    meant = make_predictor(config)(q, k, call).to_dense()
    assert (found != meant).sum() <= 0.002 * meant.sum()
    kept = found.float().mean((0, 2, 3)).tolist()
    assert sorted(range(8), key=kept.__getitem__)[-3:] == [4, 5, 6]


def test_an_exact_anchor_takes_little_memory(gpu):
    """32 heads of 65,536 tokens: 32 MiB a head of shares, and less than .75 GiB in all."""
    config = CabConfig(predictor="cascade", anchors=(0,), mass=0.999, max_density=0.1)
    q, k = (
        torch.randn(1, heads, 65_536, 128, device=gpu, dtype=torch.bfloat16) for heads in (32, 8)
    )
    call = Call(Spans.causal(1, 65_536, 65_536, gpu), SCALE, 0)
    make_predictor(config)(q, k, call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = make_predictor(config)(q, k, call)
    assert torch.cuda.max_memory_allocated() - before < 3 << 28
    assert 0.05 < plan.density() < 0.15
