"""What a head keeps can be its own: a mass, everything, nothing but what is forced, or the best
by exact scores."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from attention_cases import laid_out
from tiny import SPARSE, qkv, tiny_model, tokens
from torch.nn import functional as F

import cab_hf
from cab_hf import BlockPlan, CabConfig, attention
from cab_hf.config import budgets_of
from cab_hf.ops import predict, reference
from cab_hf.plan import Spans, block_visibility
from cab_hf.predictors import Call, CurvaturePredictor

EXACT = {"atol": 2e-5, "rtol": 1e-4}
SMALL = {"query_block": 32, "key_block": 16}
SHAPE = {"q_length": 136, "heads": 4, "kv_heads": 2, "dim": 16}
MIXED = {"mass": ((0.0, 0.3, 0.9, 1.0),), "exact_share": ((0.0, 0.0, 0.3, 0.0),)}
CONFIGS = [
    pytest.param(CabConfig(**SMALL, mass=((0.0, 0.3, 0.9, 1.0),)), id="masses"),
    pytest.param(CabConfig(**SMALL, mass=((0.0, 0.0, 0.0, 0.0),)), id="forced-alone"),
    pytest.param(CabConfig(**SMALL, **MIXED), id="all-kinds"),
    pytest.param(CabConfig(**SMALL, **MIXED, max_density=0.4), id="all-kinds-capped"),
    pytest.param(CabConfig(**SMALL, exact_share=0.4), id="all-exact"),
    pytest.param(CabConfig(**SMALL, exact_share=((0.4, 0.0, 1.0, 0.0),)), id="some-exact"),
    pytest.param(
        CabConfig.published(0.7, query_block=16, key_block=16, exact_share=((0.5, 0, 0, 0.2),)),
        id="published-some-exact",
    ),
]


def on_the_cpu(config, q, k, spans, scale=0.25):
    """The plan of `CurvaturePredictor` by the reference."""
    plan = CurvaturePredictor(config)(q, k, Call(spans, scale, 0))
    plan.validate()
    return plan


def by_kernels(config, q, k, spans, scale=0.25):
    """The same by the kernels, in the interpreter."""
    budgets = budgets_of(config, 0, q.shape[1])
    summary = replace(predict.summarise(k, spans.key_valid, config), keys=k)
    full, partial = predict.choose(q, summary, spans, scale, config, budgets)
    rows = spans.tail_rows(config.dense_tail * config.query_block, config.query_block)
    blocks = config.query_block, config.key_block
    plan = BlockPlan(full, partial, spans, *blocks, budgets.whole, rows)
    plan.validate()
    return plan


def loud(**shape):
    q, k, _ = qkv(**shape)
    return 2 * q, 2 * k


def test_each_head_keeps_its_own_mass_by_hand():
    share = torch.tensor([0.1, 0.4, 0.2, 0.3]).expand(1, 5, 1, 4)
    forced = torch.tensor([True, False, False, False]).expand(1, 5, 1, 4)
    mass = torch.tensor([0.0, 0.45, 0.55, 0.9, 1.0])[:, None, None]
    chosen = reference.top_mass(share.log(), forced, torch.ones_like(forced), mass, torch.tensor(9))
    assert [row.nonzero().flatten().tolist() for row in chosen[0, :, 0]] == [
        [0],
        [0, 1],
        [0, 1, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize("layout", ["causal", "padded", "packed"])
def test_exact_scores_are_the_largest_share_of_any_query(layout):
    q, k, _ = qkv(q_length=75, batch=2, heads=4, kv_heads=2)
    frame = laid_out(layout, 2, 75, 75, 32, "cpu")
    q, k, spans = frame.queries(q), frame.keys(k), frame.spans
    found = reference.exact_scores(q, k, spans, 0.3, 32, 16)
    seen = BlockPlan.causal(spans, 4, 32, 16).token_mask()
    logits = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) * 0.3
    shares = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    shares = F.pad(shares, (0, -shares.shape[3] % 16, 0, -shares.shape[2] % 32))
    meant = shares.unflatten(3, (-1, 16)).sum(-1).unflatten(2, (-1, 32)).amax(3)
    torch.testing.assert_close(found, meant, atol=1e-6, rtol=1e-5)


def test_exact_heads_keep_a_share_of_every_row_by_hand():
    spans = Spans.causal(1, 160, 160, "cpu")
    config = CabConfig(query_block=16, key_block=16, local_blocks=1, dense_tail=0)
    visible = block_visibility(spans, 16, 16)
    scores = torch.zeros(1, 2, 10, 10)
    scores[:, 0, 9, 4] = 0.5
    scores[:, 0, 9, 6] = 0.7
    kept = reference.select_exact(scores, spans, visible, config, (0.3, 0.5))
    # forced blocks 0 and 9 count, and ties go to the lower index
    assert kept[0, 0, 9].nonzero().flatten().tolist() == [0, 6, 9]
    assert kept[0, 1, 9].nonzero().flatten().tolist() == [0, 1, 2, 3, 9]


def test_one_loud_query_is_enough_for_an_exact_head():
    """A mean over the block's queries hides the only one that looks there."""
    q, k, _ = qkv(q_length=512, heads=2, kv_heads=1, dim=32)
    q, k = q / 4, k / 4
    k[..., 200, :] = 4.0
    q[0, :, 480, :] = 4.0
    q[0, :, 481:512, :] -= 4.0 / 31
    config = CabConfig(
        query_block=32, key_block=16, dense_tail=0, mass=0.2, exact_share=((0.2, 0.0),)
    )
    kept = on_the_cpu(config, q, k, Spans.causal(1, 512, 512, "cpu")).to_dense()
    assert kept[0, 0, 15, 200 // 16] and kept[0, 0].sum() < kept[0, 0].numel() / 4


def test_the_reference_does_every_kind_of_head():
    q, k = loud(**SHAPE)
    spans = Spans.causal(1, 136, 136, "cpu")
    config = CabConfig(**SMALL, **MIXED)
    plan = on_the_cpu(config, q, k, spans)
    visible = block_visibility(spans, 32, 16)
    forced = reference.forced_blocks(visible, spans, config)
    kept = plan.to_dense()[0]
    assert plan.whole_heads == (3,)
    assert torch.equal(kept[0], forced[0])
    assert torch.equal(kept[3], visible[0])
    alone = on_the_cpu(CabConfig(**SMALL, mass=0.3), q, k, spans)
    assert torch.equal(kept[1], alone.to_dense()[0, 1])
    scores = reference.exact_scores(q[:, 2:3], k[:, 1:], spans, 0.25, 32, 16)
    meant = reference.select_exact(scores, spans, visible, config, (0.3,))
    assert torch.equal(kept[2], meant[0, 0])


@pytest.mark.parametrize("config", CONFIGS)
def test_kernels_select_what_the_reference_selects(config):
    q, k = loud(**SHAPE)
    spans = Spans.causal(1, 136, 136, "cpu")
    found, meant = by_kernels(config, q, k, spans), on_the_cpu(config, q, k, spans)
    assert torch.equal(found.to_dense(), meant.to_dense())
    assert torch.equal(found.full.counts, meant.full.counts)


@pytest.mark.parametrize("layout", ["chunk", "padded", "packed", "in-place"])
def test_kernels_select_the_same_in_every_layout(layout):
    q, k = loud(**SHAPE | {"q_length": 100, "kv_length": 250 if layout == "chunk" else 100})
    q, k = (torch.cat((x, x.flip(2))) for x in (q, k))
    if layout == "in-place":
        first = ((torch.arange(100) >= 37).int() * 37).expand(2, -1)
        last = torch.arange(100, dtype=torch.int32).expand(2, -1)
        spans = Spans(first, last, torch.ones(2, 100, dtype=torch.bool))
    else:
        frame = laid_out(layout, 2, 100, k.shape[2], 32, "cpu")
        q, k, spans = frame.queries(q), frame.keys(k), frame.spans
    config = CabConfig(**SMALL, **MIXED)
    found, meant = by_kernels(config, q, k, spans), on_the_cpu(config, q, k, spans)
    assert (found.whole_rows is None) == (layout == "in-place")
    assert torch.equal(found.to_dense(), meant.to_dense())


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
        pytest.param({"mass": ((0.9,) * 31 + (1.0,),), "max_density": 0.1}, 1, 0.1, id="one-whole"),
        pytest.param({"mass": ((0.0,) * 31 + (1.0,),)}, 1, 0.0, id="forced-and-whole"),
        pytest.param({"exact_share": 0.05}, 1, 0.05, id="all-exact"),
        pytest.param({"max_density": 0.1}, None, 1.0, id="tails-listed"),
    ],
)
def test_lists_of_a_million_tokens_are_as_wide_as_what_is_listed(fields, documents, share):
    """A whole head or row in the lists would make 17 GiB of them."""
    length, config = 1 << 20, CabConfig(**fields)
    q = torch.empty(1, 32, length, 128, device="meta")
    tail = predict.Tail(torch.empty(1, 8192, device="meta"), documents is None)
    shape, room, _ = predict._rooms(q, length, True, tail, budgets_of(config, 0, 32), config)
    assert shape == (1, 32, 8192)
    # rounded up, or what is forced
    assert share * 16384 <= room <= share * 16384 + 5


def test_the_registered_op_takes_tables():
    q, k = loud(**SHAPE | {"q_length": 64})
    spans, config = Spans.causal(1, 64, 64, "cpu"), CabConfig(**SMALL, **MIXED)
    planes = predict.summarise(k, spans.key_valid, config).planes
    known = (spans.first, spans.last, spans.key_valid, spans.aligned, spans.consecutive)
    settings = [getattr(config, name) for name in predict.FIELDS]
    budgets = map(list, budgets_of(config, 0, 4))
    inputs = (q, planes, k, *known, spans.tail(32, 32), False, *budgets, 0.25, *settings)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cab_hf.choose.default, inputs, test_utils=checks)
    counts, *_ = torch.ops.cab_hf.choose(*inputs)
    assert torch.equal(counts, by_kernels(config, q, k, spans).full.counts)


def test_a_summary_without_keys_is_refused():
    q, k = loud(**SHAPE)
    config = CabConfig(**SMALL, exact_share=0.2)
    summary = replace(CurvaturePredictor(config).summarise(k), keys=None)
    with pytest.raises(ValueError, match="exact_share is above 0 for 4 heads"):
        CurvaturePredictor(config).choose(q, summary, Call(Spans.causal(1, 136, 136, "cpu"), 0.25))


# models: 3 layers of 6 heads
ROW = (0.0, 0.3, 0.9, 1.0, 0.5, 0.5)
TABLES = {
    "mass": [list(ROW), list(reversed(ROW)), [0.4] * 6],
    "exact_share": [[0.0] * 5 + [0.3], [0.0] * 6, [0.2] * 6],
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
    with cab_hf.cab(llama, SPARSE, mass=[[1.0] * 6] * 3):
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
    with pytest.raises(ValueError, match="do not fit layer 2 of 6 heads"):
        cab_hf.apply_cab(llama, mass=table)
    assert llama.config._attn_implementation == "sdpa"


def test_a_dict_that_is_changed_in_place_is_parsed_again(monkeypatch):
    model = tiny_model()
    model.config.cab_config = CabConfig(**TABLES).to_dict()
    parsed = []
    from_dict = CabConfig.from_dict
    monkeypatch.setattr(
        CabConfig, "from_dict", lambda saved: parsed.append(saved) or from_dict(saved)
    )
    monkeypatch.setattr(attention, "_latest", attention._Latest())
    once = attention.settings(model.config)
    assert attention.settings(copy.deepcopy(model.config)) is once and len(parsed) == 1
    model.config.cab_config["mass"][1][2] = 0.125
    assert attention.settings(model.config).mass[1][2] == 0.125 and len(parsed) == 2


def test_tables_compile_without_a_graph_break_and_change():
    model = tiny_model(num_hidden_layers=1)
    ids = tokens(1, 130)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for row in (ROW, tuple(reversed(ROW))):
        exact = [[0.0] * 4 + [0.3, 0.0]]
        with cab_hf.cab(model, SPARSE, mass=[list(row)], exact_share=exact):
            expected = logits(model, ids)
            torch.testing.assert_close(logits(compiled, ids), expected, **EXACT)


def test_describe_sums_tables_up(llama):
    with cab_hf.cab(llama, SPARSE, **TABLES):
        head = cab_hf.describe(llama, tokens=500).splitlines()[0]
    assert "mass a head, 0.00 to 1.00, mean 0.49, bridges 0.1; 7 heads exact, 2 dense" in head
    assert "uncalibrated" not in head
    with cab_hf.cab(llama, SPARSE, exact_share=0.2):
        assert "; every head exact, 0.2 of a row" in cab_hf.describe(llama)
    with cab_hf.cab(llama, SPARSE):
        head = cab_hf.describe(llama, tokens=500).splitlines()[0]
    assert "mass 0.4" in head and head.endswith("finds budgets a head):")
