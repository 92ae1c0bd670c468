"""Exact scores: what queries need of key blocks, by hand, by the kernel, and what they select."""

import pytest
import torch
from attention_cases import laid_out
from selecting import by_kernels, laid_in, loud, on_the_cpu
from tiny import qkv
from torch.nn import functional as F

from cab_hf import BlockPlan, CabConfig
from cab_hf.ops import predict, reference
from cab_hf.ops.exact_scores import exact_scores
from cab_hf.plan import Spans, block_visibility

SMALL = {"query_block": 32, "key_block": 16}
SHAPE = {"q_length": 136, "heads": 4, "kv_heads": 2, "dim": 16}


# --- the definition


def looking(batch, length, queries, key, loudness=10.0):
    """q and k [B, 1, N, 2] where only some queries look for one key, and all others for nothing.

    ``queries`` is bool [B, N].
    """
    q, k = torch.zeros(2, batch, 1, length, 2)
    q[..., 0] = queries.unsqueeze(1) * loudness
    k[:, :, key, 0] = 1.0
    return q, k


@pytest.mark.parametrize(
    ("stride", "found"), [(1, True), (2, True), (4, False), (8, False), (16, False)]
)
def test_one_loud_query_is_found_where_it_is_looked_at(stride, found):
    queries = (torch.arange(64) == 50).unsqueeze(0)
    q, k = looking(1, 64, queries, 20)
    most, log_mass = reference.exact_scores(
        q, k, Spans.causal(1, 64, 64, "cpu"), 1.0, 16, 16, stride
    )
    e = torch.tensor(10.0).exp()
    # the last row sees four blocks; who looks for nothing gives each a quarter
    quiet = torch.full((4,), 0.25)
    loudest = torch.tensor([1.0, e, 1.0, 1.0]) / (e + 3)
    torch.testing.assert_close(most[0, 0, 3], torch.maximum(quiet, loudest) if found else quiet)
    needed = (16 // stride - found) * quiet + found * loudest
    torch.testing.assert_close(log_mass[0, 0, 3].exp(), needed)


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_a_run_of_as_many_queries_as_the_stride_is_found_wherever_it_starts(stride):
    starts = torch.arange(32, 65 - stride)
    token = torch.arange(64)
    queries = (token >= starts[:, None]) & (token < starts[:, None] + stride)
    q, k = looking(len(starts), 64, queries, 20)
    spans = Spans.causal(len(starts), 64, 64, "cpu")
    most, _ = reference.exact_scores(q, k, spans, 1.0, 16, 16, stride)
    # the key stands in block 1; the run is in row 2, in row 3, or in both
    assert (most[:, 0, 2:, 1].amax(-1) > 0.99).all()
    # and a run that is shorter by one can fall between those that are looked at
    short = queries & (token > starts[:, None])
    q, k = looking(len(starts), 64, short, 20)
    most, _ = reference.exact_scores(q, k, spans, 1.0, 16, 16, stride)
    assert (most[:, 0, 2:, 1].amax(-1) < 0.99).any()


def test_of_a_key_block_its_largest_logit_counts():
    k = torch.tensor([1.0] * 16 + [2.0] + [-9.0] * 15).reshape(1, 1, 32, 1)
    q = torch.ones(1, 1, 32, 1)
    most, _ = reference.exact_scores(q, k, Spans.causal(1, 32, 32, "cpu"), 1.0, 16, 16, 16)
    # sixteen keys of logit 1 need no more than one does
    torch.testing.assert_close(most[0, 0, 1], torch.tensor([1.0, 2.0]).softmax(-1))


def brute_force(q, k, spans, scale, query_block, key_block, stride):
    """(most, mass) of whole logits, in double precision."""
    heads = q.shape[1]
    seen = BlockPlan.causal(spans, heads, query_block, key_block).token_mask()
    keys = k.repeat_interleave(heads // k.shape[1], 1)
    logits = (q.double() @ keys.double().transpose(-1, -2)) * scale
    looked_at = torch.arange(q.shape[2]) % query_block % stride == 0
    logits = logits.masked_fill(~seen | ~looked_at[:, None], -torch.inf)
    padding = (0, -logits.shape[3] % key_block, 0, -logits.shape[2] % query_block)
    logits = F.pad(logits, padding, value=-torch.inf)
    largest = logits.unflatten(3, (-1, key_block)).amax(-1)
    shares = largest.softmax(-1).nan_to_num().unflatten(2, (-1, query_block))
    return shares.amax(3).float(), shares.sum(3).float()


@pytest.mark.parametrize("stride", [1, 4, 32])
@pytest.mark.parametrize("layout", ["causal", "padded", "packed", "chunk"])
def test_the_reference_is_what_whole_logits_give(layout, stride):
    length = 75
    q, k = loud(q_length=length, kv_length=130 if layout == "chunk" else 75, batch=2)
    frame = laid_out(layout, 2, length, k.shape[2], 32, "cpu")
    q, k, spans = frame.queries(q), frame.keys(k), frame.spans
    most, log_mass = reference.exact_scores(q, k, spans, 0.3, 32, 16, stride)
    meant_most, meant_mass = brute_force(q, k, spans, 0.3, 32, 16, stride)
    torch.testing.assert_close(most, meant_most, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(log_mass.exp(), meant_mass, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("stride", [1, 4])
def test_padding_counts_nothing(stride):
    q, k = loud(q_length=100, batch=2)
    frame = laid_out("padded", 2, 100, 100, 32, "cpu")
    q, k, spans = frame.queries(q), frame.keys(k), frame.spans
    quiet = reference.exact_scores(q, k, spans, 0.25, 32, 16, stride)
    padding = spans.last < 0
    assert padding.any() and (~spans.key_valid).any()
    q = q.masked_fill(padding[:, None, :, None], 1e4)
    k = k.masked_fill(~spans.key_valid[:, None, :, None], 1e4)
    for one, other in zip(
        reference.exact_scores(q, k, spans, 0.25, 32, 16, stride), quiet, strict=True
    ):
        assert torch.equal(one, other)
    # what queries give sums to how many are looked at
    looked_at = (~padding)[:, ::stride].sum(-1)
    given = quiet[1].exp().sum((-1, -2))
    torch.testing.assert_close(given, looked_at[:, None].expand_as(given).float())


@pytest.mark.parametrize("stride", [1, 8])
def test_no_earlier_row_feels_the_future(stride):
    q, k = loud(q_length=150)
    spans = Spans.causal(1, 150, 150, "cpu")
    before = reference.exact_scores(q, k, spans, 0.25, 32, 16, stride)
    q[:, :, 96:], k[:, :, 96:] = 5.0, -7.0
    after = reference.exact_scores(q, k, spans, 0.25, 32, 16, stride)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:, :, :3], other[:, :, :3])
        assert not torch.equal(one[:, :, 3:], other[:, :, 3:])


# --- the kernel


def case(blocks, stride, layout="causal", heads=None, **shape):
    return {"blocks": blocks, "stride": stride, "layout": layout, "some": heads, "shape": shape}


KERNEL_CASES = [
    pytest.param(case((32, 16), 1, q_length=75), id="stride-1"),
    pytest.param(case((32, 16), 2, q_length=111), id="stride-2"),
    pytest.param(case((32, 16), 4, q_length=205), id="stride-4"),
    pytest.param(case((32, 16), 8, q_length=205), id="stride-8"),
    pytest.param(case((32, 16), 32, q_length=205), id="one-query-a-block"),
    pytest.param(case((128, 64), 4, q_length=300), id="default-blocks"),
    pytest.param(case((16, 16), 1, q_length=63), id="q16"),
    pytest.param(case((48, 48), 1, q_length=111), id="q48-k48"),
    pytest.param(case((48, 16), 2, q_length=205), id="q48-stride-2"),
    pytest.param(case((48, 16), 3, q_length=205), id="q48-stride-3"),
    pytest.param(case((256, 256), 8, q_length=601), id="q256-k256"),
    pytest.param(case((256, 64), 1, q_length=300), id="q256-stride-1"),
    pytest.param(case((16, 256), 2, q_length=300), id="k256-over-q16"),
    pytest.param(case((32, 16), 2, q_length=75, dim=24), id="d24"),
    pytest.param(case((32, 16), 2, q_length=75, dim=80), id="d80"),
    pytest.param(case((32, 16), 2, "padded", q_length=111, batch=2), id="padded"),
    pytest.param(case((32, 16), 2, "packed", q_length=111, batch=2), id="packed"),
    pytest.param(case((48, 16), 4, "packed", q_length=205, batch=2), id="packed-q48"),
    pytest.param(case((32, 16), 4, "chunk", q_length=75, kv_length=205), id="chunk"),
    pytest.param(case((128, 64), 8, "chunk", q_length=63, kv_length=301), id="short-chunk"),
    pytest.param(case((32, 16), 1, "in-place", q_length=111, batch=2), id="in-place"),
    pytest.param(case((32, 16), 2, q_length=111, heads=(5, 0, 3)), id="heads-out-of-order"),
    pytest.param(
        case((32, 16), 4, "padded", q_length=111, batch=2, heads=(4, 1)), id="heads-of-a-batch"
    ),
    pytest.param(case((32, 16), 4, q_length=75, kv_heads=6), id="no-groups"),
    pytest.param(case((32, 16), 4, q_length=34), id="a-row-without-a-sample"),
    pytest.param(case((32, 16), 4, q_length=3), id="no-sample-at-all"),
]


def of_kernel(q, k, spans, scale, blocks, stride, some=None, more=0):
    """(most, log mass over the visible blocks), cut to the key blocks."""
    heads = torch.tensor(range(q.shape[1]) if some is None else some, dtype=torch.int32)
    columns = -(-k.shape[2] // blocks[1])
    width = -(-columns // 32) * 32 + more
    found = exact_scores(q, k, heads, spans, scale, *blocks, stride, width)
    rows = -(-q.shape[2] // blocks[0])
    for x in found:
        assert x.shape == (q.shape[0], len(heads), rows, width) and x.dtype == torch.float32
        assert torch.isfinite(x).all()
    return over_the_row(*(x[..., :columns] for x in found), spans, blocks)


def over_the_row(most, log_mass, spans, blocks):
    visible = block_visibility(spans, *blocks).unsqueeze(1)
    return most, reference.block_log_mass(log_mass, visible).exp().nan_to_num() * visible


def assert_same(found, meant):
    for one, other in zip(found, meant, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_the_kernel_finds_what_the_reference_finds(case, uninitialised_is_nan):
    blocks, stride, some = case["blocks"], case["stride"], case["some"]
    q, k, spans = laid_in(case["layout"], *loud(**case["shape"]), max(blocks))
    scale = q.shape[-1] ** -0.5
    meant = reference.exact_scores(q, k, spans, scale, *blocks, stride)
    meant = (x if some is None else x[:, list(some)] for x in meant)
    found = of_kernel(q, k, spans, scale, blocks, stride, some)
    assert_same(found, over_the_row(*meant, spans, blocks))


def test_the_width_of_a_row_changes_nothing(uninitialised_is_nan):
    q, k = loud(**SHAPE)
    spans = Spans.causal(1, 136, 136, "cpu")
    narrow = of_kernel(q, k, spans, 0.25, (32, 16), 2)
    for more in (32, 64, 96):
        for one, other in zip(
            of_kernel(q, k, spans, 0.25, (32, 16), 2, more=more), narrow, strict=True
        ):
            assert torch.equal(one, other)


def test_tiles_in_turns_find_the_same(monkeypatch, uninitialised_is_nan):
    q, k = loud(**SHAPE | {"q_length": 205})
    spans = Spans.causal(1, 205, 205, "cpu")
    together = of_kernel(q, k, spans, 0.25, (32, 16), 1)
    monkeypatch.setattr("cab_hf.ops.exact_scores.SCRATCH_AT_A_TIME", 1)
    for one, other in zip(of_kernel(q, k, spans, 0.25, (32, 16), 1), together, strict=True):
        assert torch.equal(one, other)


def test_sixteen_bits_find_the_same():
    # bfloat16 is for a GPU: the interpreter multiplies its bits as whole numbers
    q, k = (x.half() for x in loud(**SHAPE))
    spans = Spans.causal(1, 136, 136, "cpu")
    meant = over_the_row(*reference.exact_scores(q, k, spans, 0.25, 32, 16, 4), spans, (32, 16))
    for one, other in zip(of_kernel(q, k, spans, 0.25, (32, 16), 4), meant, strict=True):
        # there products are summed in 16 bits
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


# --- what is selected by them

STRIDES = ((4, 0, 1, 8),)
SELECTED = [
    pytest.param(CabConfig(**SMALL, mass=0.8, exact_stride=4), id="mass-and-bridges"),
    pytest.param(CabConfig(**SMALL, mass=0.8, bridges=0.0, exact_stride=4), id="mass"),
    pytest.param(
        CabConfig(**SMALL, mass=((0.0,) * 4,), bridges=0.3, exact_stride=2), id="bridges-alone"
    ),
    pytest.param(CabConfig(**SMALL, mass=0.6, exact_stride=STRIDES), id="some-heads"),
    pytest.param(CabConfig(**SMALL, mass=0.6, exact_stride=((4, 1, 2, 8),)), id="all-strides"),
    pytest.param(
        CabConfig(
            **SMALL,
            mass=((0.0, 0.5, 0.9, 1.0),),
            bridges=((0.3, 0.0, 0.1, 0.2),),
            exact_stride=((4, 4, 2, 4),),
        ),
        id="every-budget-its-own",
    ),
    pytest.param(CabConfig(**SMALL, exact_stride=4, max_density=0.4), id="capped"),
    pytest.param(CabConfig(**SMALL, exact_stride=STRIDES, max_density=0.4), id="some-capped"),
    pytest.param(CabConfig(**SMALL, exact_stride=4, dense_tail=0, mass=0.5), id="no-tail"),
    pytest.param(
        CabConfig(**SMALL, exact_stride=STRIDES, curvature="forman", mass=0.5), id="beside-forman"
    ),
    pytest.param(CabConfig(48, 16, exact_stride=3, mass=0.5), id="q48"),
    pytest.param(CabConfig(16, 32, exact_stride=2, mass=0.5), id="wide-keys"),
    pytest.param(CabConfig.published(0.7, query_block=16, key_block=16, exact_stride=4), id="topk"),
    pytest.param(
        CabConfig.published(
            ((0.5, 0.9, 0.7, 0.7),), query_block=16, key_block=16, exact_stride=((4, 0, 2, 0),)
        ),
        id="topk-some",
    ),
]


@pytest.mark.parametrize("config", SELECTED)
def test_kernels_select_what_the_reference_selects(config):
    q, k = loud(**SHAPE)
    spans = Spans.causal(1, 136, 136, "cpu")
    found, meant = by_kernels(config, q, k, spans), on_the_cpu(config, q, k, spans)
    assert torch.equal(found.to_dense(), meant.to_dense())
    assert torch.equal(found.full.counts, meant.full.counts)


@pytest.mark.parametrize("layout", ["padded", "packed", "chunk", "in-place"])
def test_kernels_select_the_same_in_every_layout(layout):
    kv_length = 205 if layout == "chunk" else 111
    q, k = loud(**SHAPE | {"q_length": 111, "kv_length": kv_length, "batch": 2})
    q, k, spans = laid_in(layout, q, k, 32)
    config = CabConfig(**SMALL, mass=0.6, exact_stride=STRIDES)
    found, meant = by_kernels(config, q, k, spans), on_the_cpu(config, q, k, spans)
    assert torch.equal(found.to_dense(), meant.to_dense())


@pytest.mark.parametrize("limit", ["LISTS_AT_MOST", "SCORES_AT_A_TIME"])
@pytest.mark.parametrize("stride", [4, STRIDES], ids=["all", "some"])
def test_measured_lists_and_heads_in_turns_hold_the_same(monkeypatch, limit, stride):
    q, k = loud(**SHAPE | {"batch": 2})
    spans = Spans.causal(2, 136, 136, "cpu")
    config = CabConfig(**SMALL, mass=0.6, exact_stride=stride)
    meant = on_the_cpu(config, q, k, spans)
    monkeypatch.setattr(predict, limit, 1)
    found = by_kernels(config, q, k, spans)
    assert torch.equal(found.to_dense(), meant.to_dense())
    if limit == "LISTS_AT_MOST":
        assert found.full.width == found.full.counts.max()


@pytest.mark.parametrize("length", [1, 129, 150])
def test_no_block_goes_without_a_sample(length):
    """Single queries of sparse decoding, and what is left over at the end of a text."""
    q, k = loud(**SHAPE | {"q_length": length, "kv_length": 200})
    spans = Spans.causal(1, length, 200, "cpu")
    _, log_mass = reference.exact_scores(q, k, spans, 0.25, 32, 16, 16)
    assert (log_mass.exp().sum(-1) > 0.99).all()
    fields = {"mass": ((0.8,) * 4,), "bridges": 0.1, "exact_stride": 16, "dense_tail": 0}
    config = CabConfig(**SMALL, **fields)
    found, meant = (choose(config, q, k, spans) for choose in (by_kernels, on_the_cpu))
    assert torch.equal(found.to_dense(), meant.to_dense())


@pytest.mark.parametrize("stride", [4, 0])
def test_one_loud_run_is_enough_for_an_exact_head(stride):
    """A mean over the block's queries hides the few that look there."""
    q, k, _ = qkv(q_length=512, heads=2, kv_heads=1, dim=32)
    q, k = q / 4, k / 4
    k[..., 200, :] = 4.0
    q[..., 480:484, :] = 4.0
    q[..., 484:512, :] -= 1.0
    fields = {"dense_tail": 0, "mass": ((0.0, 0.0),), "bridges": 0.1, "redundancy": 0.0}
    config = CabConfig(**SMALL, **fields, exact_stride=((4, stride),))
    kept = on_the_cpu(config, q, k, Spans.causal(1, 512, 512, "cpu")).to_dense()
    assert kept[0, 0, 15, 200 // 16] and kept[0, 0].sum() < kept[0, 0].numel() / 4
    assert bool(kept[0, 1, 15, 200 // 16]) == bool(stride)
