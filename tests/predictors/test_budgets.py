"""What a head keeps can be its own: a mass, everything, nothing but what is forced, or the best
by exact scores."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from marks import slow_but
from selecting import by_kernels, laid_in, loud, on_the_cpu
from tiny import SPARSE, tiny_model, tokens

import cab_hf
from cab_hf import CabConfig, model_config
from cab_hf.budgets import Budgets, budgets_of
from cab_hf.ops import predict, reference
from cab_hf.plan import Spans, block_visibility
from cab_hf.predictors import CurvaturePredictor, LayerContext

EXACT = {"atol": 2e-5, "rtol": 1e-4}
SMALL = {"query_block": 32, "key_block": 16}
ESTIMATE = {**SMALL, "exact_queries": 0}
SHAPE = {"q_length": 136, "heads": 4, "kv_heads": 2, "dim": 16}
MIXED = {"top_p": ((0.0, 0.3, 0.9, 1.0),), "exact_queries": ((0, 0, 4, 2),)}
CONFIGS = [
    pytest.param(CabConfig(**ESTIMATE, top_p=((0.0, 0.3, 0.9, 1.0),)), id="masses"),
    pytest.param(CabConfig(**ESTIMATE, top_p=((0.0,) * 4,), top_k_share=0.0), id="forced-alone"),
    pytest.param(CabConfig(**ESTIMATE, top_p=((0.0,) * 4,), top_k_share=0.3), id="bridges-alone"),
    pytest.param(
        CabConfig(**ESTIMATE, top_p=0.5, top_k_share=((0.0, 0.1, 0.3, 1.0),)), id="top_k_share"
    ),
    pytest.param(
        CabConfig(**ESTIMATE, top_k_share=((0.0, 0.1, 0.3, 1.0),), curvature="forman", top_p=0.5),
        id="bridges-forman",
    ),
    pytest.param(CabConfig(**SMALL, **MIXED), id="all-kinds"),
    pytest.param(CabConfig(**SMALL, **MIXED, max_density=0.4), id="all-kinds-capped"),
    pytest.param(
        CabConfig(
            **SMALL, top_p=1.0, top_k_share=((0.0, 0.1, 0.3, 0.0),), exact_queries=((0, 4, 8, 1),)
        ),
        id="everything-listed",
    ),
    pytest.param(
        CabConfig.published(query_block=16, key_block=16, sparsity=((0.0, 0.5, 0.7, 0.9),)),
        id="published-shares",
    ),
]


def test_each_head_keeps_its_own_mass_by_hand():
    share = torch.tensor([0.1, 0.4, 0.2, 0.3]).expand(1, 5, 1, 4)
    forced = torch.tensor([True, False, False, False]).expand(1, 5, 1, 4)
    mass = torch.tensor([0.0, 0.45, 0.55, 0.9, 1.0])[:, None, None]
    chosen = reference.top_p_blocks(
        share.log(), forced, torch.ones_like(forced), mass, torch.tensor(9)
    )
    assert [row.nonzero().flatten().tolist() for row in chosen[0, :, 0]] == [
        [0],
        [0, 1],
        [0, 1, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


def test_each_head_adds_its_own_bridges_by_hand():
    spans = Spans.causal(1, 160, 160, "cpu")
    masses = (0.0, 0.0, 0.9, 0.9)
    config = CabConfig(16, 16, local_blocks=1, dense_tail_blocks=0, top_p=(masses,))
    visible = block_visibility(spans, 16, 16)
    score = torch.zeros(1, 4, 10, 10)
    score[:, :, 9, 4] = 0.5
    score[:, :, 9, 6] = 0.7
    # all of the mass is on block 5
    log_mass = torch.full((1, 4, 10, 10), -50.0)
    log_mass[..., 5] = 0.0
    budgets = Budgets(masses, (0.0, 0.1, 0.2, 0.3), (0.95,), (0,))
    kept = reference.best_blocks(score, log_mass, spans, visible, config, budgets)
    # beside forced blocks 0 and 9, and of equals the lower
    assert [row.nonzero().flatten().tolist() for row in kept[0, :, 9]] == [
        [0, 9],
        [0, 6, 9],
        [0, 4, 5, 6, 9],
        [0, 1, 4, 5, 6, 9],
    ]


@pytest.mark.parametrize("select", ["clusters", "topk"])
def test_a_mass_of_one_lists_everything_whatever_the_other_budgets(select):
    q, k = loud(**SHAPE)
    spans = Spans.causal(1, 136, 136, "cpu")
    everything = {"sparsity": 0.0}
    if select == "clusters":
        everything = {"top_p": 1.0, "top_k_share": ((0.0, 0.1, 0.0, 1.0),)}
    config = CabConfig(**SMALL, select=select, **everything, exact_queries=((0, 4, 8, 2),))
    meant = block_visibility(spans, 32, 16).unsqueeze(1).expand(-1, 4, -1, -1)
    for plan in (on_the_cpu(config, q, k, spans), by_kernels(config, q, k, spans)):
        assert plan.dense_heads == () and torch.equal(plan.to_dense(), meant)


def test_the_reference_does_every_kind_of_head():
    q, k = loud(**SHAPE)
    spans = Spans.causal(1, 136, 136, "cpu")
    config = CabConfig(**SMALL, **MIXED, top_k_share=((0.0, 0.05, 0.05, 0.05),))
    plan = on_the_cpu(config, q, k, spans)
    visible = block_visibility(spans, 32, 16)
    forced = reference.forced_blocks(visible, spans, config)
    kept = plan.to_dense()[0]
    assert plan.dense_heads == (3,)
    assert torch.equal(kept[0], forced[0])
    assert torch.equal(kept[3], visible[0])
    alone = on_the_cpu(CabConfig(**ESTIMATE, top_p=0.3, top_k_share=0.05), q, k, spans)
    assert torch.equal(kept[1], alone.to_dense()[0, 1])
    exact = on_the_cpu(
        CabConfig(**SMALL, top_p=0.9, top_k_share=0.05, exact_queries=4), q, k, spans
    )
    assert torch.equal(kept[2], exact.to_dense()[0, 2])


@pytest.mark.parametrize("config", slow_but(CONFIGS, 0, 2, 4, 6))
def test_kernels_select_what_the_reference_selects(config):
    q, k = loud(**SHAPE)
    spans = Spans.causal(1, 136, 136, "cpu")
    actual, meant = by_kernels(config, q, k, spans), on_the_cpu(config, q, k, spans)
    assert torch.equal(actual.to_dense(), meant.to_dense())
    assert torch.equal(actual.full.counts, meant.full.counts)


@pytest.mark.parametrize("layout", slow_but(["chunk", "padded", "packed", "in-place"], 2))
def test_kernels_select_the_same_in_every_layout(layout):
    q, k = loud(**SHAPE | {"q_length": 100, "kv_length": 250 if layout == "chunk" else 100})
    q, k = (torch.cat((x, x.flip(2))) for x in (q, k))
    q, k, spans = laid_in(layout, q, k, 32)
    config = CabConfig(**SMALL, **MIXED)
    actual, meant = by_kernels(config, q, k, spans), on_the_cpu(config, q, k, spans)
    assert (actual.dense_rows is None) == (layout == "in-place")
    assert torch.equal(actual.to_dense(), meant.to_dense())


def test_measured_lists_are_as_wide_as_the_longest_that_is_listed(monkeypatch):
    q, k = loud(**SHAPE)
    spans = Spans.causal(1, 136, 136, "cpu")
    config = CabConfig(**SMALL, **MIXED)
    widest = by_kernels(config, q, k, spans)
    monkeypatch.setattr(predict, "LISTS_AT_MOST", 0)
    measured = by_kernels(config, q, k, spans)
    assert measured.full.width == widest.full.counts.max() < 8
    assert torch.equal(measured.to_dense(), widest.to_dense())


@pytest.mark.parametrize(
    ("fields", "documents", "share"),
    [
        pytest.param({"max_density": 0.1}, 1, 0.1, id="capped"),
        pytest.param(
            {"top_p": ((0.9,) * 31 + (1.0,),), "max_density": 0.1}, 1, 0.1, id="one-whole"
        ),
        pytest.param(
            {"top_p": ((0.0,) * 31 + (1.0,),), "top_k_share": 0.0}, 1, 0.0, id="forced-and-whole"
        ),
        pytest.param(
            {"top_p": ((0.0,) * 32,), "top_k_share": ((0.02,) * 31 + (0.07,),)},
            1,
            0.07,
            id="top_k_share",
        ),
        pytest.param(
            {"top_p": ((0.0,) * 31 + (1.0,),), "top_k_share": ((0.02,) * 31 + (0.5,),)},
            1,
            0.02,
            id="bridges-of-a-whole-head",
        ),
        pytest.param(
            {"top_p": ((0.0,) * 32,), "top_k_share": 0.1, "exact_queries": 4},
            1,
            0.1,
            id="all-exact",
        ),
        pytest.param(
            {"select": "topk", "sparsity": ((0.95,) * 31 + (0.9,),)}, 1, 0.1, id="topk-shares"
        ),
        pytest.param({"max_density": 0.1}, None, 1.0, id="tails-listed"),
    ],
)
def test_lists_of_a_million_tokens_are_as_wide_as_what_is_listed(fields, documents, share):
    """A whole head or row in the lists would make 17 GiB of them."""
    length, config = 1 << 20, CabConfig(**fields)
    tail = predict.Tail(torch.empty(1, 8192, device="meta"), documents is None)
    shape, budgets = (1, 32, 8192), budgets_of(config, 0, 32)
    room, _ = predict._rooms(shape, length, True, tail, budgets, config)
    # rounded up, or what is forced
    assert share * 16384 <= room <= share * 16384 + 6


def test_the_registered_op_takes_tables():
    q, k = loud(**SHAPE | {"q_length": 64})
    spans, config = Spans.causal(1, 64, 64, "cpu"), CabConfig(**SMALL, **MIXED)
    summary = predict.summarise(k, spans.key_valid, config, (1, 2, 9, 10))
    result = predict._pack(spans, config, budgets_of(config, 0, 4))
    tensors = q, summary.planes, summary.keys, summary.exponents
    inputs = (*tensors, 0.25, [1, 2, 9, 10], *result)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cab_hf.choose.default, inputs, test_utils=checks)
    counts, *_ = torch.ops.cab_hf.choose(*inputs)
    outcome = by_kernels(config, q, k, spans, channels=(1, 2, 9, 10))
    assert torch.equal(counts, outcome.full.counts)
    inputs = (k, [1, 2, 9, 10])
    torch.library.opcheck(torch.ops.cab_hf.scored_keys.default, inputs, test_utils=checks)


def test_a_summary_without_keys_is_refused():
    q, k = loud(**SHAPE)
    config = CabConfig(**SMALL, exact_queries=4)
    summary = replace(CurvaturePredictor(config).summarise(k), keys=None)
    with pytest.raises(ValueError, match="exact_queries is above 0 for 4 heads"):
        CurvaturePredictor(config).choose(
            q, summary, LayerContext(Spans.causal(1, 136, 136, "cpu"), 0.25)
        )


# models: 3 layers of 6 heads
ROW = (0.0, 0.3, 0.9, 1.0, 0.5, 0.5)
TABLES = {
    "top_p": [list(ROW), list(reversed(ROW)), [0.4] * 6],
    "top_k_share": [[0.1] * 6, [0.1, 0.0] * 3, [0.2] * 6],
    "exact_queries": [[0] * 5 + [2], [0] * 6, [4] * 6],
}


@pytest.fixture(scope="module")
def llama():
    return tiny_model()


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


def test_a_table_of_ones_is_exact(llama):
    ids = tokens(2, 200)
    expected = logits(llama, ids)
    with cab_hf.cab(llama, SPARSE, top_p=[[1.0] * 6] * 3):
        torch.testing.assert_close(logits(llama, ids), expected, **EXACT)
        assert [row["density"] for row in cab_hf.stats(llama, reset=True)] == [1.0] * 3


def test_no_earlier_query_block_feels_the_future(llama):
    ids = tokens(1, 320)
    other = torch.cat([ids[:, :224], tokens(1, 96, seed=9)], dim=1)
    with cab_hf.cab(llama, SPARSE, **TABLES):
        before, after = logits(llama, ids), logits(llama, other)
    assert torch.equal(before[:, :224], after[:, :224])


def test_packed_documents_answer_as_they_do_alone(llama):
    documents = [tokens(1, n, seed=n) for n in (170, 130)]
    positions = torch.cat([torch.arange(n) for n in (170, 130)]).unsqueeze(0)
    with cab_hf.cab(llama, SPARSE, **TABLES):
        packed = logits(llama, torch.cat(documents, 1), position_ids=positions, use_cache=False)
        alone = [logits(llama, document) for document in documents]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **EXACT)


def test_tables_are_saved_with_the_model(tmp_path):
    model = cab_hf.apply_cab(tiny_model(), SPARSE, **TABLES)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["cab_config"]
    assert {name: saved[name] for name in TABLES} == TABLES
    again = type(model).from_pretrained(tmp_path, attn_implementation="cab")
    ids = tokens(1, 200)
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize("shape", [(2, 6), (3, 5)], ids=["layers", "heads"])
def test_a_table_of_another_model_is_refused_when_it_is_applied(llama, shape):
    table = [[0.5] * shape[1]] * shape[0]
    with pytest.raises(ValueError, match="this model has 3 layers of 6 heads; calibrate"):
        cab_hf.apply_cab(llama, top_p=table)
    assert llama.config._attn_implementation == "sdpa"


def test_a_dict_that_is_changed_in_place_is_parsed_again(monkeypatch):
    model = tiny_model()
    model.config.cab_config = CabConfig(**TABLES).to_dict()
    parsed = []
    from_dict = CabConfig.from_dict
    monkeypatch.setattr(
        CabConfig, "from_dict", lambda saved: parsed.append(saved) or from_dict(saved)
    )
    monkeypatch.setattr(model_config, "_latest", [None])
    once = model_config.cab_config_of(model.config)
    assert model_config.cab_config_of(copy.deepcopy(model.config)) is once and len(parsed) == 1
    model.config.cab_config["top_p"][1][2] = 0.125
    assert model_config.cab_config_of(model.config).top_p[1][2] == 0.125 and len(parsed) == 2


@pytest.mark.slow
def test_tables_compile_without_a_graph_break_and_change():
    model = tiny_model(num_hidden_layers=1)
    ids = tokens(1, 130)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for row in (ROW, tuple(reversed(ROW))):
        exact = [[0] * 4 + [2, 0]]
        with cab_hf.cab(model, SPARSE, top_p=[list(row)], exact_queries=exact):
            expected = logits(model, ids)
            torch.testing.assert_close(logits(compiled, ids), expected, **EXACT)


def test_describe_sums_tables_up(llama):
    with cab_hf.cab(llama, SPARSE, **TABLES):
        head = cab_hf.describe(llama, tokens=500).splitlines()[0]
    assert (
        "top_p a head (0.00 to 1.00, mean 0.49), top_k_share a head (0.00 to 0.20, mean 0.12)"
        in head
    )
    assert "; 7 heads exact, 2 dense)" in head
    with cab_hf.cab(llama, SPARSE, exact_queries=4):
        assert ", 4 queries of a block scored exactly)" in cab_hf.describe(llama)
    with cab_hf.cab(llama, SPARSE):
        head = cab_hf.describe(llama, tokens=500).splitlines()[0]
    assert "top_p 0.4" in head and "calibrated" not in head
