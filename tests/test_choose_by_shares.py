"""Anchors of a cascade choose by shares: the kernels in the interpreter, against the sorts."""

from dataclasses import replace

import pytest
import torch
from selecting import laid_in, loud
from tiny import SPARSE, tiny_model, tokens

import cab_hf
from cab_hf.config import budgets_of
from cab_hf.ops import predict, reference
from cab_hf.plan import BlockLists, Spans
from cab_hf.predictors import Call, cascade, make_predictor
from cab_hf.predictors.cascade import pooled, selected, selected_by_kernels

# few blocks are forced, so that most are chosen or left
ANCHOR = replace(SPARSE, predictor="cascade", anchors=(0,), mass=0.6, local_blocks=1)
LENGTH = 205
KEY_BLOCKS = 13
SHAPE = {"q_length": LENGTH, "heads": 4, "kv_heads": 2, "dim": 16}
OWN = {"mass": ((0.0, 0.5, 0.9, 1.0),), "bridges": ((0.3, 0.0, 0.1, 0.2),)}


def causal(length=LENGTH, batch=1):
    return Spans.causal(batch, length, length, "cpu")


def shares_of(config, q, k, spans):
    """Exact shares of the heads of the plan, by the reference."""
    told = spans, 0.25, config.query_block, config.key_block, config.anchor_reduction
    return pooled(reference.block_shares(q, k, *told), k.shape[1], config)


def assert_same(found, meant):
    found.validate()
    assert torch.equal(found.full.counts, meant.full.counts)
    assert torch.equal(found.partial.counts, meant.partial.counts)
    assert torch.equal(found.to_dense(), meant.to_dense())
    assert found.whole_heads == meant.whole_heads


def assert_chosen_alike(config, q, k, spans):
    """What the kernels choose, which has to be what the reference chooses."""
    shares, call = shares_of(config, q, k, spans), Call(spans, 0.25, 0)
    before = shares.clone()
    found = selected_by_kernels(shares, None, call, config)
    assert torch.equal(shares, before)
    assert_same(found, selected(shares, shares, call, config))
    return found


CONFIGS = [
    *[
        pytest.param(
            {"anchor_heads": heads, "anchor_reduction": reduction}, id=f"{heads}-{reduction}"
        )
        for heads in ("each", "group", "all")
        for reduction in ("max", "mean")
    ],
    pytest.param(OWN, id="every-budget-its-own"),
    pytest.param(OWN | {"exact_stride": ((4, 0, 2, 0),)}, id="no-stride-is-read"),
    pytest.param({"bridges": 0.0}, id="no-bridges"),
    pytest.param({"bridges": 0.3, "mass": 0.2}, id="bridges-for-the-most-part"),
    pytest.param({"max_density": 0.4}, id="capped"),
    pytest.param({"max_density": 0.4, "anchor_heads": "group"}, id="group-capped"),
    pytest.param({"max_density": 0.4, "mass": 1.0}, id="capped-everything"),
    pytest.param({"max_density": 0.3} | OWN, id="own-capped"),
    pytest.param({"dense_tail": 0}, id="no-tail"),
    pytest.param({"dense_tail": 2, "max_density": 0.4}, id="two-tails-capped"),
    pytest.param({"sink_blocks": 0, "local_blocks": 0}, id="nothing-forced"),
    pytest.param({"query_block": 48, "key_block": 16}, id="q48"),
    pytest.param({"query_block": 16, "key_block": 32}, id="wide-keys"),
    pytest.param({"curvature": "forman", "bridges": 0.2}, id="no-curvature-is-read"),
    pytest.param({"select": "topk", "sparsity": 0.6}, id="topk"),
    pytest.param({"select": "topk", "sparsity": ((0.5, 0.9, 0.7, 0.0),)}, id="topk-own"),
]


@pytest.mark.parametrize("fields", CONFIGS)
def test_kernels_choose_what_the_reference_chooses(fields, uninitialised_is_nan):
    assert_chosen_alike(replace(ANCHOR, **fields), *loud(**SHAPE), causal())


@pytest.mark.parametrize("heads", ["each", "group"])
@pytest.mark.parametrize("layout", ["padded", "packed", "chunk", "in-place"])
def test_the_same_in_every_layout(layout, heads, uninitialised_is_nan):
    kv_length = 330 if layout == "chunk" else 250
    q, k = loud(**SHAPE | {"q_length": 250, "kv_length": kv_length, "batch": 2})
    config = replace(ANCHOR, anchor_heads=heads)
    assert_chosen_alike(config, *laid_in(layout, q, k, 32))


@pytest.mark.parametrize("length", [5, 31, 65, 160])
def test_the_same_for_every_length(length, uninitialised_is_nan):
    q, k = loud(**SHAPE | {"q_length": length, "batch": 2})
    assert_chosen_alike(ANCHOR, q, k, causal(length, 2))


@pytest.mark.parametrize("fields", [{"mass": 0.8}, {"bridges": 0.0}], ids=["bridges", "none"])
def test_the_same_for_rows_that_are_walked_in_parts(fields, uninitialised_is_nan):
    q, k = loud(q_length=2700, heads=2, kv_heads=1)
    config = replace(ANCHOR, query_block=128, **fields)
    assert_chosen_alike(config, q, k, causal(2700))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"mass": ((0.0,) * 4,), "bridges": 0.2}, [0, 1, 2, 6, 7]),
        ({"bridges": 0.0}, [0, 1, 2, 6, 7]),
        ({"mass": 1.0, "max_density": 0.7}, [0, 1, 2, 3, 6, 7]),
    ],
    ids=["bridges", "mass", "capped"],
)
def test_ties_go_to_the_lower_index(fields, kept):
    q, k = loud(**SHAPE)
    # no query looks for anything; of eight blocks the first and the last two are forced
    config = replace(ANCHOR, dense_tail=0, **fields)
    plan = assert_chosen_alike(config, torch.zeros_like(q), k, causal())
    assert plan.to_dense()[0, 0, 3].nonzero().flatten().tolist() == kept


# --- by estimates that heads share: bridges by curvature over other shares


ESTIMATED = [
    pytest.param({}, id="bridges"),
    pytest.param({"bridges": 0.0}, id="no-bridges"),
    pytest.param({"curvature": "forman", "bridges": 0.2}, id="forman"),
    pytest.param({"redundancy": 0.0, "bridges": 0.2}, id="no-curvature"),
    pytest.param({"max_density": 0.4, "bridges": 0.2}, id="capped"),
    pytest.param({"anchor_reduction": "mean", "bridges": 0.2}, id="mean"),
    pytest.param({"query_block": 16, "key_block": 32, "bridges": 0.2}, id="wide-keys"),
    pytest.param({"dense_tail": 2}, id="two-tails"),
]


def by_both(config, q, k, spans, monkeypatch):
    """(by the kernels, by the reference), from q and k."""
    predictor, call = make_predictor(config), Call(spans, 0.25, 0)
    meant = predictor(q, k, call)
    asked = []
    with monkeypatch.context() as patched:
        patched.setattr(cascade, "has_kernels", lambda x: asked.append(x) or True)
        found = predictor(q, k, call)
    assert asked
    return found, meant


@pytest.mark.parametrize("heads", ["group", "all"])
@pytest.mark.parametrize("fields", ESTIMATED)
def test_estimates_that_heads_share_choose_the_same(
    fields, heads, monkeypatch, uninitialised_is_nan
):
    config = replace(ANCHOR, anchor_scores="cab", anchor_heads=heads, **fields)
    assert_same(*by_both(config, *loud(**SHAPE), causal(), monkeypatch))


@pytest.mark.parametrize("layout", ["padded", "packed", "chunk", "in-place"])
def test_estimates_choose_the_same_in_every_layout(layout, monkeypatch, uninitialised_is_nan):
    kv_length = 330 if layout == "chunk" else 250
    q, k = loud(**SHAPE | {"q_length": 250, "kv_length": kv_length, "batch": 2})
    config = replace(ANCHOR, anchor_scores="cab", anchor_heads="group", bridges=0.2)
    assert_same(*by_both(config, *laid_in(layout, q, k, 32), monkeypatch))


# --- memory


@pytest.mark.parametrize("heads", ["each", "group"])
def test_measured_lists_hold_the_same(heads, monkeypatch):
    q, k = loud(**SHAPE | {"batch": 2})
    config = replace(ANCHOR, anchor_heads=heads, mass=0.5, bridges=0.0)
    widest = assert_chosen_alike(config, q, k, causal(batch=2))
    monkeypatch.setattr(predict, "LISTS_AT_MOST", 0)
    measured = assert_chosen_alike(config, q, k, causal(batch=2))
    assert measured.full.width == measured.full.counts.max() < widest.full.width


@pytest.mark.parametrize("fields", [{}, OWN], ids=["alike", "own"])
@pytest.mark.parametrize(("limit", "counts"), [(1, [1] * 8), (6000, [3, 3, 2])])
def test_few_heads_at_a_time_choose_the_same(limit, counts, fields, monkeypatch):
    q, k = loud(**SHAPE | {"batch": 2})
    select_blocks, taken = predict.select_blocks, []

    def watched(turn, scores, *others):
        taken.append(turn.count)
        held = sum(x.nbytes for x in scores if x is not None)
        assert held <= limit or turn.count == 1
        return select_blocks(turn, scores, *others)

    monkeypatch.setattr(predict, "SHARES_AT_A_TIME", limit)
    monkeypatch.setattr(predict, "select_blocks", watched)
    assert_chosen_alike(replace(ANCHOR, **fields), q, k, causal(batch=2))
    assert taken == counts


# --- under torch.compile


@pytest.mark.parametrize(
    ("fields", "reached"),
    [
        pytest.param({}, False, id="alike"),
        pytest.param({}, True, id="alike-reach"),
        pytest.param(OWN, False, id="own"),
        pytest.param(OWN, True, id="own-reach"),
        pytest.param({"select": "topk", "sparsity": 0.5}, False, id="topk"),
    ],
)
def test_the_registered_op_chooses_the_same(fields, reached):
    config, spans = replace(ANCHOR, **fields), causal()
    shares = shares_of(config, *loud(**SHAPE), spans)
    reach = shares.flip(1) if reached else None
    budgets = budgets_of(config, 0, 4)
    inputs = shares, reach, *predict._telling(spans, config, budgets)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cab_hf.choose_by_shares.default, inputs, test_utils=checks)
    found = torch.ops.cab_hf.choose_by_shares(*inputs)
    full, partial = predict.choose_by_shares(shares, reach, spans, config, budgets)
    meant = full.counts, full.indices, partial.counts, partial.indices
    for i, (one, other) in enumerate(zip(found, meant, strict=True)):
        # what lies behind the counts means nothing
        assert one.shape == other.shape and (i % 2 or torch.equal(one, other))
    for one, other in ((found[:2], full), (found[2:], partial)):
        assert torch.equal(BlockLists(*one).to_dense(KEY_BLOCKS), other.to_dense(KEY_BLOCKS))


@pytest.mark.parametrize(
    "fields",
    [
        {"anchor_heads": "each"},
        {"anchor_heads": "group", "anchor_reduction": "mean"},
        {"anchor_heads": "all", "anchor_scores": "cab"},
    ],
    ids=["each", "group", "cab"],
)
def test_an_anchor_by_the_kernels_compiles_without_a_graph_break(fields, monkeypatch):
    model, ids = tiny_model(num_hidden_layers=2), tokens(1, 130)
    config = replace(ANCHOR, engine="reference", **fields)
    with cab_hf.cab(model, config), torch.no_grad():
        expected = model(ids, use_cache=False).logits
    monkeypatch.setattr(cascade, "has_kernels", lambda q: True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with cab_hf.cab(model, config), torch.no_grad():
        found = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
