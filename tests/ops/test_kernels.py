"""The kernels of the predictor, in Triton's interpreter: each against the op it stands for."""

import pytest
import torch
from marks import slow_but
from selecting import by_kernels, laid_in, loud, on_the_cpu
from tiny import qkv

from cab_hf import CabConfig
from cab_hf.budgets import budgets_of
from cab_hf.frame import Frame
from cab_hf.ops import coarsen, exact_scores, predict, reference
from cab_hf.plan import Spans
from cab_hf.predictors import CurvaturePredictor, LayerContext

SMALL = {"query_block": 32, "key_block": 16}
# by the estimate: exact scores have a file of their own
ESTIMATE = {"exact_queries": 0, "top_p": 0.9, "top_k_share": 0.05}
GRID = {"query_block": 16, "key_block": 16}
LENGTH = 136
KEY_BLOCKS = 9
SHAPE = {"q_length": LENGTH, "heads": 2, "kv_heads": 1, "dim": 16}


def small(**fields):
    return CabConfig(**{**SMALL, **ESTIMATE, **fields})


CONFIGS = [
    pytest.param(small(), id="clusters"),
    pytest.param(small(redundancy=0.0), id="clusters-no-curvature"),
    pytest.param(small(curvature="forman"), id="clusters-forman"),
    pytest.param(small(top_k_share=0.0), id="clusters-no-bridges"),
    pytest.param(small(top_p=1.0), id="everything"),
    pytest.param(small(max_density=0.4), id="capped"),
    pytest.param(small(top_p=1.0, max_density=0.4), id="capped-everything"),
    pytest.param(small(coarsen="mean"), id="mean"),
    pytest.param(small(query_block=16, key_block=32), id="wide-keys"),
    pytest.param(small(query_block=48, key_block=16), id="three-to-one"),
    pytest.param(small(sink_blocks=0, local_blocks=0), id="nothing-forced"),
    pytest.param(CabConfig.published(0.7, **GRID), id="published"),
    pytest.param(CabConfig.published(0.7, "additive", **GRID), id="published-additive"),
    pytest.param(CabConfig.published(0.7, "none", **GRID), id="published-magnitude"),
    pytest.param(
        CabConfig.published(0.7, "none", **GRID, dense_tail_blocks=1), id="published-tail"
    ),
    pytest.param(small(dense_tail_blocks=0), id="no-tail"),
    pytest.param(small(dense_tail_blocks=2, max_density=0.4), id="two-tails-capped"),
    pytest.param(small(top_p=0.5, exact_queries=8), id="outliers"),
]
SHAPES = [
    pytest.param(SHAPE | {"kv_length": 250}, id="chunk-of-a-longer-text"),
    pytest.param(SHAPE | {"q_length": 73, "batch": 2, "heads": 3, "kv_heads": 3}, id="batch"),
    pytest.param(SHAPE | {"q_length": 90, "heads": 6, "kv_heads": 2, "dim": 24}, id="odd-head-dim"),
    pytest.param(SHAPE | {"q_length": 7}, id="below-one-block"),
    pytest.param(SHAPE | {"q_length": 31}, id="one-block-less-one"),
    pytest.param(SHAPE | {"q_length": 33}, id="one-block-and-one"),
]


def plans(config, q, k, spans=None):
    """(what the kernels select, what the reference selects), both bool [B, H, M_q, M_k]."""
    spans = spans or Spans.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    parts = config, q, k, spans, q.shape[-1] ** -0.5
    actual, meant = by_kernels(*parts), on_the_cpu(*parts)
    assert torch.equal(actual.full.counts, meant.full.counts)
    return actual.to_dense(), meant.to_dense()


@pytest.mark.parametrize("config", slow_but(CONFIGS, 0, 2, 5, 8, 9, 11, 13))
def test_the_plan_is_that_of_the_reference(config):
    actual, meant = plans(config, *loud(**SHAPE))
    assert torch.equal(actual, meant)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_is_that_of_the_reference_for_every_shape(shape):
    actual, meant = plans(small(), *loud(**shape))
    assert torch.equal(actual, meant)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_select_the_same(dtype):
    q, k = (x.to(dtype) for x in loud(**SHAPE))
    actual, meant = plans(small(), q, k)
    # means are rounded to 11 bits: a block at the edge of a threshold may differ
    assert (actual != meant).sum() <= 0.001 * meant.numel()


def test_padding_and_documents():
    valid = torch.ones(2, 150, dtype=torch.bool)
    valid[0, :23] = False
    valid[1, 140:] = False
    document = (torch.arange(150) >= 70).long().expand(2, -1)
    frame = Frame.build(2, 150, 150, 0, valid, document, align=32, device=torch.device("cpu"))
    q, k = loud(q_length=150, heads=2, kv_heads=1, dim=16, batch=2)
    actual, meant = plans(small(), frame.queries(q), frame.keys(k), frame.spans)
    assert torch.equal(actual, meant)


@pytest.mark.parametrize("tail", [0, 1, 2])
@pytest.mark.parametrize("fields", [{}, {"exact_queries": 8}], ids=["curvature", "outliers"])
@pytest.mark.parametrize("length", [LENGTH, 3])
def test_a_chunk_that_begins_inside_of_a_query_block(length, fields, tail):
    config = small(dense_tail_blocks=tail, **fields)
    parts = loud(**SHAPE | {"q_length": length, "kv_length": 250})
    q, k, spans = laid_in("chunk", *parts, config.query_block)
    assert spans.last[0, 0] == -1
    actual, meant = plans(config, q, k, spans)
    assert torch.equal(actual, meant)


def test_documents_left_where_they_are():
    # what torch.compile sees: borders inside of blocks, any number of partial blocks a row
    first = (torch.arange(150) >= 71).int() * 71
    last = torch.arange(150, dtype=torch.int32)
    spans = Spans(first[None].int(), last[None], torch.ones(1, 150, dtype=torch.bool))
    q, k = loud(q_length=150, heads=2, kv_heads=1, dim=16)
    actual, meant = plans(small(), q, k, spans)
    assert torch.equal(actual, meant)


# --- inputs that break ties, or try to break more


def equal_keys(q, k):
    # whole numbers, whose products are exact: equal keys give equal scores
    return q.round(), k[:, :, :1].round().expand_as(k)


def one_huge_key(q, k):
    k = k.clone()
    k[:, :, 50] *= 1e4
    return q, k


def nothing_at_all(q, k):
    return torch.zeros_like(q), torch.zeros_like(k)


@pytest.mark.parametrize("config", slow_but([CONFIGS[i] for i in (0, 5, 11, 13)], 0, 2))
@pytest.mark.parametrize("change", [equal_keys, one_huge_key, nothing_at_all])
def test_ties_and_extremes(change, config):
    actual, meant = plans(config, *change(*loud(**SHAPE)))
    assert torch.equal(actual, meant)


@pytest.mark.parametrize("eight_bits", [False, True], ids=["estimated", "scored-in-8-bits"])
@pytest.mark.parametrize(
    ("dtype", "powers"),
    [
        pytest.param(torch.bfloat16, (-24, -13, 13, 24), id="bfloat16"),
        pytest.param(torch.float16, (-12, 12), id="float16"),
    ],
)
def test_the_same_attention_in_other_magnitudes_chooses_the_same(
    dtype, powers, eight_bits, monkeypatch
):
    """Keys times a power of two, and queries divided by it."""
    monkeypatch.setattr(predict, "scored_dtype", lambda x: exact_scores.FP8)
    # so that float16 holds what is small
    q, k = ((8 * x).round() / 8 for x in loud(**SHAPE))
    config = small(exact_queries=8 * eight_bits, top_p=0.5)
    parts = Spans.causal(1, LENGTH, LENGTH, "cpu"), 0.25
    meant = by_kernels(config, q.to(dtype), k.to(dtype), *parts).to_dense()
    for power in powers:
        one, other = (q * 2.0**-power).to(dtype), (k * 2.0**power).to(dtype)
        assert torch.equal(by_kernels(config, one, other, *parts).to_dense(), meant)


def test_sixteen_bits_hold_one_huge_key():
    q, k = (x.bfloat16() for x in loud(**SHAPE))
    k[:, :, 51] = 1e30
    actual, _ = plans(small(), q.abs(), k)
    # every row that comes after it
    assert actual[..., 2:, 51 // 16].all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("name", ["q", "k"])
def test_check_finite_names_the_tensor(name, value):
    tensors = dict(zip("qk", loud(**SHAPE), strict=True))
    tensors[name][0, 0, 5, 3] = value
    predictor = CurvaturePredictor(small(check_finite=True))
    with pytest.raises(ValueError, match=f"^{name} holds infinite or NaN"):
        predictor(
            tensors["q"], tensors["k"], LayerContext(Spans.causal(1, LENGTH, LENGTH, "cpu"), 0.25)
        )


def test_nan_selects_something_and_ends():
    q, k = loud(**SHAPE)
    q[0, 0, 40] = float("nan")
    spans = Spans.causal(1, LENGTH, LENGTH, "cpu")
    # which validates the plan
    by_kernels(small(), q, k, spans)


# --- summaries


@pytest.mark.parametrize("how", ["minmax", "mean", "max_l2"])
@pytest.mark.parametrize("length", [5, 63, 128])
def test_summaries_are_those_of_the_reference(how, length):
    q, k, _ = qkv(q_length=length, heads=4, kv_heads=2, dim=24, batch=2)
    spans = Spans.causal(2, length, length, "cpu")
    spans.key_valid[1, 3:20] = False
    queries = coarsen.coarsen_queries(q, spans, 48, how).vectors
    keys = coarsen.coarsen_keys(k, spans.key_valid, 16, how)
    meant = reference.coarsen_keys(k, spans.key_valid, 16, how)
    torch.testing.assert_close(
        queries, reference.coarsen_queries(q, spans.last >= 0, 48, how), rtol=1e-6, atol=1e-6
    )
    for name in ("mean", "upper", "lower"):
        torch.testing.assert_close(
            getattr(keys, name), getattr(meant, name), rtol=1e-6, atol=1e-6, msg=name
        )


# --- memory


def test_heads_in_turns_select_the_same(monkeypatch):
    q, k = loud(**SHAPE | {"q_length": 90, "kv_heads": 2, "batch": 2})
    together = plans(small(), q, k)[0]
    monkeypatch.setattr(predict, "SCORE_BYTES_AT_A_TIME", 1)
    assert torch.equal(plans(small(), q, k)[0], together)


def test_measured_lists_hold_the_same(monkeypatch):
    q, k = loud(**SHAPE)
    config = small(top_p=0.5, top_k_share=0.0)
    spans = Spans.causal(1, LENGTH, LENGTH, "cpu")
    widest = by_kernels(config, q, k, spans).full
    monkeypatch.setattr(predict, "LISTS_AT_MOST", 0)
    measured = by_kernels(config, q, k, spans).full
    assert measured.width == widest.counts.max() < widest.width
    assert torch.equal(measured.to_dense(KEY_BLOCKS), widest.to_dense(KEY_BLOCKS))


def test_lists_of_a_fixed_share_are_narrow():
    q, k = loud(**SHAPE)
    config = CabConfig.published(0.7, **GRID)
    plan = by_kernels(config, q, k, Spans.causal(1, LENGTH, LENGTH, "cpu"))
    assert plan.full.width < KEY_BLOCKS


@pytest.mark.parametrize("dtype", [torch.float32, exact_scores.FP8], ids=str)
def test_the_registered_ops_keep_their_promises(dtype, monkeypatch):
    monkeypatch.setattr(predict, "scored_dtype", lambda x: dtype)
    q, k = loud(**SHAPE | {"q_length": 64})
    spans, config = Spans.causal(1, 64, 64, "cpu"), small(exact_queries=8)
    # torch's check of schemas compares no floats of 8 bits
    checks = ("test_faketensor", "test_schema")[: dtype.itemsize]
    inputs = (k, spans.key_valid, config.key_block, config.coarsen)
    torch.library.opcheck(torch.ops.cab_hf.summarise.default, inputs, test_utils=checks)
    torch.library.opcheck(torch.ops.cab_hf.scored_keys.default, (k, []), test_utils=checks)
    summary = predict.summarise(k, spans.key_valid, config)
    result = predict._pack(spans, config, budgets_of(config, 0, 2))
    inputs = (q, summary.planes, summary.keys, summary.exponents, 0.25, [], *result)
    torch.library.opcheck(torch.ops.cab_hf.choose.default, inputs, test_utils=checks)


def test_the_cpu_is_not_for_kernels():
    assert predict.unavailable(torch.empty(1, 1, 4, 16)) == "runs on CUDA devices only, not cpu"


# --- rows from several places of a text, as the shards of a zigzag are


def pieces(q, k, *places):
    """(the queries of some stretches of a text, their spans)."""
    token = torch.cat([torch.arange(*place) for place in places])
    complete = Spans.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    first, last = complete.first[:, token], complete.last[:, token]
    return q[:, :, token], Spans(first, last, complete.key_valid, True, consecutive=False)


@pytest.mark.parametrize("config", slow_but([CONFIGS[i] for i in (0, 2, 5, 8, 9, 12, -1)], 0, 2))
def test_rows_from_several_places(config):
    q, k = loud(**SHAPE | {"q_length": 330})
    # 96 tokens are whole query blocks in every config
    rows, spans = pieces(q, k, (96, 192), (288, 330))
    actual, meant = plans(config, rows, k, spans)
    assert torch.equal(actual, meant)


@pytest.mark.parametrize("config", slow_but([CONFIGS[i] for i in (0, 2, -1)], 0))
def test_a_whole_text_selects_the_same_as_pieces_that_make_it_up(config):
    q, k = loud(**SHAPE)
    rows, spans = pieces(q, k, (0, 64), (64, LENGTH))
    assert torch.equal(plans(config, rows, k, spans)[0], plans(config, q, k)[0])


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"redundancy": 0.0}, id="estimate", marks=pytest.mark.slow),
        pytest.param({"top_p": 0.5, "exact_queries": 8}, id="outliers"),
    ],
)
def test_rows_without_curvature_select_what_they_do_in_the_whole_text(fields):
    q, k = loud(**SHAPE | {"q_length": 256})
    config = small(dense_tail_blocks=0, **fields)
    rows, spans = pieces(q, k, (32, 96), (160, 224))
    held = plans(config, q, k)[0][:, :, [1, 2, 5, 6]]
    assert torch.equal(plans(config, rows, k, spans)[0], held)


def test_a_summary_out_of_a_cache_selects_the_same():
    """Of another layout, and in another precision than the kernels': room behind the last block."""
    q, k = loud(**SHAPE)
    spans, config = Spans.causal(1, LENGTH, LENGTH, "cpu"), small()
    summary = predict.summarise(k, spans.key_valid, config)
    room = torch.full((*summary.planes.shape[:3], 20, 16), 1e3, dtype=torch.float64)
    room[:, :, :, :KEY_BLOCKS] = summary.planes
    kept = reference.KeySummary(room[:, :, :, :KEY_BLOCKS])
    for one, other in zip(
        predict.choose(q, kept, spans, 0.25, config, budgets_of(config, 0, q.shape[1])),
        predict.choose(q, summary, spans, 0.25, config, budgets_of(config, 0, q.shape[1])),
        strict=True,
    ):
        assert torch.equal(one.to_dense(KEY_BLOCKS), other.to_dense(KEY_BLOCKS))
