"""What is selected: by hand where that is possible, and the promises every recipe keeps."""

import math
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import qkv

from cab_hf import CabConfig
from cab_hf.config import TOP_P_BY_KEYS
from cab_hf.frame import Frame
from cab_hf.ops import reference
from cab_hf.plan import Spans, block_visibility
from cab_hf.predictors import CurvaturePredictor, LayerContext, make_predictor, register_predictor

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_predictor.py"
ESTIMATE = {"exact_queries": 0, "top_p": 0.9, "top_k_share": 0.05}
RECIPES = [
    pytest.param(CabConfig(32, 16), id="outliers"),
    pytest.param(CabConfig(32, 16, **ESTIMATE), id="clusters"),
    pytest.param(CabConfig(16, 32, **ESTIMATE), id="clusters-wide-keys"),
    pytest.param(CabConfig(32, 32, curvature="forman", **ESTIMATE), id="clusters-forman"),
    pytest.param(CabConfig(32, 16, coarsen="mean", **ESTIMATE), id="mean"),
    pytest.param(CabConfig.published(0.7, query_block=32, key_block=32), id="published"),
    pytest.param(CabConfig.published(0.7, "additive", query_block=32, key_block=16), id="additive"),
]
recipes = pytest.mark.parametrize("config", RECIPES)


def select(config, q, k, spans=None):
    spans = spans or Spans.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    plan = make_predictor(config)(q, k, LayerContext(spans, q.shape[-1] ** -0.5))
    plan.validate()
    return plan


def changed(config, **fields):
    return CabConfig.from_dict({**config.to_dict(), **fields})


# --- coarsening, by hand


def test_summaries_by_hand():
    keys = torch.tensor([[1.0, -4.0], [3.0, 2.0], [5.0, 0.0]])[None, None]
    real = torch.ones(1, 3, dtype=torch.bool)
    box = reference.coarsen_keys(keys, real, 2, "minmax")
    assert box.mean.tolist() == [[[[2, -1], [5, 0]]]]
    assert box.upper.tolist() == [[[[3, 2], [5, 0]]]]
    assert box.lower.tolist() == [[[[1, -4], [5, 0]]]]
    loud = reference.coarsen_keys(keys, real, 2, "max_l2")
    assert loud.mean.tolist() == [[[[1, -4], [5, 0]]]]
    assert reference.coarsen_queries(keys, real, 2, "mean").tolist() == [[[[2, -1], [5, 0]]]]


def test_padding_leaves_no_trace_in_summaries():
    keys = torch.tensor([[1.0, 1.0], [9.0, -9.0], [5.0, 5.0], [7.0, 7.0]])[None, None]
    real = torch.tensor([[True, False, False, False]])
    box = reference.coarsen_keys(keys, real, 2, "minmax")
    assert box.mean.tolist() == box.upper.tolist() == box.lower.tolist() == [[[[1, 1], [0, 0]]]]


def test_upper_logit_is_the_largest_a_key_in_the_box_could_reach():
    q, k, _ = qkv(q_length=96, heads=4, kv_heads=2, dim=16)
    real = torch.ones(1, 96, dtype=torch.bool)
    queries = reference.coarsen_queries(q, real, 32, "mean")
    upper, mean = reference.block_logits(
        queries, reference.coarsen_keys(k, real, 16, "minmax"), 0.5
    )
    every = queries @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.5
    assert (upper >= every.unflatten(-1, (-1, 16)).amax(-1) - 1e-5).all()
    torch.testing.assert_close(mean, every.unflatten(-1, (-1, 16)).mean(-1))


def test_what_a_row_keeps_falls_between_two_numbers_of_keys():
    (short, most), (long, least) = TOP_P_BY_KEYS
    middle = (short + long) // 2
    last = torch.tensor([[0, short - 1, middle - 1, long - 1, 4 * long]])
    first = torch.zeros_like(last)
    kept = reference.top_p_by_keys(Spans(first, last, torch.ones(1, 4 * long + 1).bool()).rows(1))
    expected = [most, most, (most + least) / 2, least, least]
    assert kept.flatten().tolist() == pytest.approx(expected)


# --- curvature, by hand


def test_two_hop_by_hand():
    affinity = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]])[None, None]
    hops = reference.two_hop(affinity, torch.arange(3)[None], 16, 16)
    torch.testing.assert_close(hops, affinity @ affinity)


def test_two_hop_sums_keys_to_the_query_grid_and_spreads_back():
    affinity = torch.tensor([[0.4, 0.6, 0, 0], [0.1, 0.2, 0.3, 0.4]])[None, None]
    places = torch.arange(2)[None]
    coarse = torch.tensor([[1.0, 0], [0.3, 0.7]])
    expected = (coarse @ coarse).repeat_interleave(2, -1)[None, None]
    torch.testing.assert_close(reference.two_hop(affinity, places, 32, 16), expected)


def test_two_hop_of_a_chunk_uses_its_own_rows():
    complete = torch.rand(1, 1, 4, 4).tril()
    expected = complete[..., 2:, 2:] @ complete[..., 2:, :]
    places = Spans.causal(1, 32, 64, "cpu").rows(16).places(16)
    actual = reference.two_hop(complete[..., 2:, :], places, 16, 16)
    torch.testing.assert_close(actual, expected)


def test_two_hop_of_rows_from_several_places_walks_through_those_alone():
    complete = torch.rand(1, 1, 8, 8).tril()
    held = torch.tensor([1, 6, 7])
    rows = complete[..., held, :]
    actual = reference.two_hop(rows, held[None], 16, 16)
    torch.testing.assert_close(actual, rows[..., held] @ rows)


def test_rows_stand_where_their_first_query_does():
    spans = Spans.causal(2, 40, 72, "cpu")
    assert spans.rows(16).places(16).tolist() == [[2, 3, 4]] * 2
    padded = replace(spans, last=spans.last.masked_fill(torch.arange(40) >= 32, -1))
    assert padded.rows(16).places(16).tolist() == [[2, 3, 0]] * 2


def test_forman_by_hand():
    affinity = torch.tensor([[1.0, 0.0], [2.0, 3.0]])[None, None]
    hops = affinity @ affinity
    actual = reference.forman_curvature(affinity, hops)
    # 4 A - row strength - column strength so far + 3 A A
    assert actual.tolist() == [
        [[[4 - 1 - 1 + 3, 0 - 1 - 0 + 0], [8 - 5 - 3 + 24, 12 - 5 - 3 + 27]]]
    ]


# --- selection, by hand


def test_smallest_set_of_blocks_by_hand():
    share = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    forced = torch.tensor([[True, False, False, False]])
    visible = torch.ones_like(forced)

    def kept(top_p, cap=9):
        values = torch.tensor([[top_p]]), torch.tensor([[cap]])
        chosen = reference.top_p_blocks(share.log(), forced, visible, *values)
        return chosen.nonzero()[:, 1].tolist()

    assert kept(0.05) == [0]
    assert kept(0.45) == [0, 1]
    assert kept(0.55) == [0, 1, 3]
    assert kept(0.9) == [0, 1, 2, 3]
    assert kept(0.9, cap=2) == [0, 1]
    assert kept(1.0) == [0, 1, 2, 3]


def test_ties_go_to_the_lower_index():
    score = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    chosen = reference.top_blocks(score, torch.ones(1, 5, dtype=torch.bool), torch.tensor([[2]]))
    assert chosen.tolist() == [[False, True, True, False, False]]


def test_a_share_is_rounded_up_but_not_by_rounding_error():
    visible = torch.ones(1, 60, dtype=torch.bool)
    assert [reference.share_of_row(visible, x).item() for x in (0.05, 0.1, 0.11)] == [3, 6, 7]


def test_forced_blocks_by_hand():
    spans = Spans.causal(1, 128, 128, "cpu")
    config = CabConfig(
        query_block=32, key_block=16, sink_blocks=1, local_blocks=3, dense_tail_blocks=0
    )
    forced = reference.forced_blocks(block_visibility(spans, 32, 16), spans, config)
    assert [row.nonzero().flatten().tolist() for row in forced[0]] == [
        [0, 1],
        [0, 1, 2, 3],
        [0, 3, 4, 5],
        [0, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    ("length", "tail", "rows"),
    [
        pytest.param(128, 0, [], id="none"),
        pytest.param(128, 1, [3], id="whole-blocks"),
        pytest.param(130, 1, [3, 4], id="a-block-more-where-the-last-is-short"),
        pytest.param(130, 2, [2, 3, 4], id="two"),
        pytest.param(128, 9, [0, 1, 2, 3], id="everything"),
        pytest.param(32, 1, [0], id="one-block"),
        pytest.param(31, 1, [], id="fewer-than-a-block"),
    ],
)
def test_the_tail_is_forced(length, tail, rows):
    spans = Spans.causal(2, length, length + 64, "cpu")
    config = CabConfig(query_block=32, key_block=16, dense_tail_blocks=tail)
    visible = block_visibility(spans, 32, 16)
    forced = reference.forced_blocks(visible, spans, config)
    complete = (forced == visible).all(-1)
    assert torch.equal(spans.tail(tail * 32, 32)[0].nonzero().flatten(), torch.tensor(rows).long())
    others = [row for row in range(complete.shape[1]) if row not in rows]
    assert complete[0, rows].all() and not complete[0, others].any()


def test_every_document_has_a_tail_of_its_own_real_tokens():
    valid = torch.ones(2, 150, dtype=torch.bool)
    valid[0, :23] = False
    valid[1, 140:] = False
    document = (torch.arange(150) >= 70).long().expand(2, -1)
    frame = Frame.build(2, 150, 150, 0, valid, document, align=32, device=torch.device("cpu"))
    # 47 + 80 tokens, and 70 + 70, from one border to the next
    assert frame.spans.tail(32, 32).nonzero().tolist() == [
        [0, 0],
        [0, 1],
        [0, 3],
        [0, 4],
        [1, 1],
        [1, 2],
        [1, 4],
        [1, 5],
    ]


@pytest.mark.parametrize(
    "name", ["antidiagonal", "curvature", "oracle", "random", "rows", "streaming"]
)
def test_every_predictor_has_a_tail(name):
    q, k, _ = qkv(q_length=300)
    rows = {"mass_threshold": 0.2, "share_threshold": 1.0}
    fields = {"curvature": {"top_p": 0.2}, "rows": rows}.get(name, {})
    config = CabConfig(query_block=32, key_block=16, predictor=name, **fields)
    plan = make_predictor(config)(q, k, LayerContext(Spans.causal(1, 300, 300, "cpu"), 0.25))
    tail = plan.token_mask()[:, :, 300 - 32 :]
    assert torch.equal(tail, torch.ones(300, 300, dtype=torch.bool).tril()[-32:].expand_as(tail))
    assert plan.density() < 0.8


def test_a_needle_is_found_by_the_box_and_not_by_the_mean():
    """One key in a thousand answers the query; its block's mean hides it."""
    q, k, _ = qkv(q_length=1024, heads=1, kv_heads=1, dim=32)
    k = k * 0.5
    k[..., 500, :] = q[0, 0, -16:].mean(0) * 8
    fields = {
        "query_block": 16,
        "key_block": 64,
        "top_p": 0.2,
        "top_k_share": 0.0,
        "local_blocks": 1,
    }
    fields |= {"dense_tail_blocks": 0, "exact_queries": 0}
    needle = 500 // 64
    assert select(CabConfig(**fields), q, k).to_dense()[0, 0, -1, needle]
    by_mean = select(CabConfig(coarsen="mean", **fields), q, k)
    assert not by_mean.to_dense()[0, 0, -1, needle]


# --- promises


@recipes
def test_without_redundancy_curvature_changes_nothing(config):
    """lambda = 0 is the selection by magnitude, bit for bit."""
    q, k, _ = qkv(q_length=500)
    plain = select(changed(config, curvature="none"), q, k).to_dense()
    assert torch.equal(select(changed(config, redundancy=0.0), q, k).to_dense(), plain)


@pytest.mark.parametrize("curvature", ["additive", "forman"])
def test_with_redundancy_curvature_does_something(curvature):
    q, k, _ = qkv(q_length=1000, dim=16)
    config = CabConfig.published(0.7, curvature, query_block=32, key_block=32, redundancy=1.0)
    plain = changed(config, curvature="none")
    assert not torch.equal(select(config, q, k).to_dense(), select(plain, q, k).to_dense())


@recipes
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 111, 205])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (4, 4)], ids=str)
def test_any_length_and_group_gives_a_valid_plan(config, length, heads):
    q, k, _ = qkv(batch=2, heads=heads[0], kv_heads=heads[1], q_length=length)
    plan = select(config, q, k)
    diagonal = torch.arange(length)
    assert plan.token_mask()[:, :, diagonal, diagonal].all(), "a query must see itself"


@recipes
def test_full_budget_keeps_every_block(config):
    q, k, _ = qkv(q_length=205)
    full = changed(config, **({"sparsity": 0.0} if config.predictor == "frc" else {"top_p": 1.0}))
    assert select(full, q, k).density() == 1


@recipes
@pytest.mark.parametrize("cap", [0.2, 0.5])
def test_max_density_caps_every_row(config, cap):
    q, k, _ = qkv(q_length=900)
    spans = Spans.causal(1, 900, 900, "cpu")
    visible = block_visibility(spans, config.query_block, config.key_block)
    forced = reference.forced_blocks(visible, spans, config).sum(-1)
    allowed = torch.maximum(forced, reference.share_of_row(visible, cap).squeeze(-1))
    kept = select(changed(config, max_density=cap), q, k).to_dense().sum(-1)
    assert (kept <= allowed.unsqueeze(1)).all()


def test_topk_keeps_its_share_of_every_row():
    q, k, _ = qkv(q_length=640)
    config = CabConfig.published(0.75, query_block=32, key_block=32)
    kept = select(config, q, k).to_dense().sum(-1)
    expected = torch.tensor([math.ceil(0.25 * (row + 1)) for row in range(20)])
    assert torch.equal(kept, expected.expand_as(kept))


@recipes
def test_the_same_inputs_give_the_same_plan(config):
    q, k, _ = qkv(q_length=300)
    assert torch.equal(select(config, q, k).to_dense(), select(config, q, k).to_dense())


@recipes
def test_heads_worked_on_in_parts_select_the_same(config, monkeypatch):
    q, k, _ = qkv(q_length=300)
    together = select(config, q, k).to_dense()
    monkeypatch.setattr("cab_hf.predictors.curvature.SCORE_ELEMENTS_AT_A_TIME", 1)
    monkeypatch.setattr("cab_hf.predictors.frc.SCORE_BYTES_AT_A_TIME", 1)
    assert torch.equal(select(config, q, k).to_dense(), together)


def test_no_gradient_flows_through_a_plan():
    q, k, _ = qkv(q_length=100)
    plan = select(CabConfig(32, 16), q.requires_grad_(), k.requires_grad_())
    assert not plan.full.counts.requires_grad


# --- names


def test_the_example_of_an_own_predictor_runs(capsys):
    runpy.run_path(str(EXAMPLE))["main"]()
    described, *given = capsys.readouterr().out.split("\nlayer ")
    assert "predictor loudest" in described and "layers 0-1: sparse" in described
    assert [line.split(":")[1].strip()[:5] for line in given] == ["0.321", "0.321"]


def test_baselines_load_without_an_evaluation():
    code = (
        "import sys; from cab_hf.predictors import make_predictor; from cab_hf import CabConfig;"
        "print(*(make_predictor(CabConfig(predictor=name)).__class__.__name__"
        " for name in ('antidiagonal', 'oracle', 'random', 'streaming')),"
        " any(name.startswith('cab_hf.eval') for name in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    *names, evaluated = result.stdout.split()
    assert names == [f"{x}Predictor" for x in ("Antidiagonal", "Oracle", "Random", "Streaming")]
    assert evaluated == "False"


def test_a_predictor_is_registered_by_name():
    register_predictor("test-again", CurvaturePredictor)
    register_predictor("test-again", CurvaturePredictor)
    assert isinstance(make_predictor(CabConfig(predictor="test-again")), CurvaturePredictor)
    with pytest.raises(ValueError, match="registered already"):
        register_predictor("test-again", lambda config: None)
    with pytest.raises(ValueError, match="factory is 3; it must be a Predictor class"):
        register_predictor("test-number", 3)
    with pytest.raises(ValueError, match="name is 3; it must be the text"):
        register_predictor(3, CurvaturePredictor)
    with pytest.raises(ValueError, match="'nobody'; registered are .*curvature"):
        make_predictor(CabConfig(predictor="nobody"))
