"""Exact scores of outlier queries: which they are, what they need, and what is selected by them."""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import laid_out
from marks import slow_but
from selecting import by_kernels, laid_in, loud, on_the_cpu
from torch.nn import functional as F

from cab_hf import BlockPlan, CabConfig
from cab_hf.config import TOP_P_BY_KEYS
from cab_hf.ops import predict, reference
from cab_hf.ops.coarsen import QuerySummary, coarsen_queries
from cab_hf.ops.exact_scores import (
    FP8,
    LEAST_CHANNELS,
    Channels,
    exact_scores,
    outlier_rows,
    scored_keys,
)
from cab_hf.ops.score import HeadChunk
from cab_hf.plan import Spans, block_visibility
from cab_hf.predictors.curvature import picked

SMALL = {"query_block": 32, "key_block": 16}
SHAPE = {"q_length": 136, "heads": 4, "kv_heads": 2, "dim": 16}
# the interpreter takes as long for each head
TWO, FOUR = {"heads": 2, "kv_heads": 1}, {"heads": 4, "kv_heads": 2}


def outliers_of(q, spans, query_block, count, channels=()):
    """(rows [B, H, M_q, count, C], positions) as the reference gathers them."""
    positions = reference.outlier_queries(q, spans, query_block, count)
    index = positions.clamp(min=0).flatten(2).unsqueeze(-1)
    scored = picked(q, channels)
    rows = scored.gather(2, index.expand(-1, -1, -1, scored.shape[3]))
    return rows.unflatten(2, (-1, count)), positions


def by_reference(q, k, spans, scale, blocks, count, channels=()):
    """(most, shares) of all heads."""
    rows, positions = outliers_of(q, spans, blocks[0], count, channels)
    return reference.exact_scores(rows, positions, picked(k, channels), spans, scale, blocks[1])


# --- which queries


def directions(*degrees):
    """q [1, 1, N, 2] of norm 1."""
    angle = torch.tensor(degrees).deg2rad()
    return torch.stack((angle.cos(), angle.sin()), dim=-1)[None, None]


def test_outliers_by_hand():
    # the means point to 24 and 17.5 degrees
    q = directions(0.0, 60.0, -160.0, 10.0, 30.0, 0.0, 5.0, 180.0)
    spans = Spans.causal(1, 8, 8, "cpu")

    def actual(count):
        return reference.outlier_queries(q, spans, 4, count)[0, 0].tolist()

    assert actual(1) == [[2], [7]]
    assert actual(2) == [[2, 1], [7, 5]]
    # all of them come in order
    assert actual(4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_of_equals_the_earlier_are_chosen():
    q = torch.ones(1, 2, 32, 4)
    spans = Spans.causal(1, 32, 32, "cpu")
    actual = reference.outlier_queries(q, spans, 16, 3)
    assert actual.tolist() == [[[[0, 1, 2], [16, 17, 18]]] * 2]


def test_how_long_a_query_is_changes_nothing():
    q, _ = loud(**SHAPE)
    spans = Spans.causal(1, 136, 136, "cpu")
    # by powers of two, so that nothing is rounded; all queries of a block alike
    longer = q * 2.0 ** (torch.arange(136) // 32)[:, None]
    result = [reference.outlier_queries(x, spans, 32, 4) for x in (q, longer)]
    assert torch.equal(*result)


@pytest.mark.parametrize("count", [1, 8, 32])
def test_padding_is_never_chosen(count):
    q, k = loud(q_length=100, batch=2)
    frame = laid_out("padded", 2, 100, 100, 32, "cpu")
    q, spans = frame.queries(q), frame.spans
    padding = spans.last < 0
    # as loud and as odd as it may be
    q = q.masked_fill(padding[:, None, :, None], -1e4)
    positions = reference.outlier_queries(q, spans, 32, count)
    real = (~F.pad(padding, (0, -padding.shape[1] % 32), value=True)).unflatten(1, (-1, 32)).sum(-1)
    missing = (count - real.clamp(max=count))[:, None].expand(positions.shape[:3])
    assert torch.equal((positions < 0).sum(-1), missing) and missing.any()
    for row, of_row in enumerate(positions):
        assert not padding[row, of_row[of_row >= 0]].any()
    # and what it holds moves nobody into a row, or out of one
    quiet = q.masked_fill(padding[:, None, :, None], 0.0)
    assert torch.equal(positions, reference.outlier_queries(quiet, spans, 32, count))


@pytest.mark.parametrize(
    ("fields", "actual"),
    [
        pytest.param({"exact_queries": 1}, True, id="scored"),
        pytest.param({"exact_queries": 0}, False, id="estimated", marks=pytest.mark.slow),
        pytest.param({"exact_queries": 8}, False, id="outvoted", marks=pytest.mark.slow),
        pytest.param({"exact_queries": 8, "top_k_share": 0.03}, True, id="outvoted-but-a-bridge"),
    ],
)
def test_one_query_that_alone_looks_at_a_key_is_found(fields, actual):
    """The mean over its block hides it from the estimate over block summaries."""
    q = torch.zeros(1, 1, 512, 8)
    q[..., 0] = 4.0
    q[..., 490, 0], q[..., 490, 1] = 0.0, 8.0
    k = torch.zeros(1, 1, 512, 8)
    k[..., :96, 0], k[..., 200, 1] = 1.0, 4.0
    config = CabConfig(
        **SMALL, **{"dense_tail_blocks": 0, "top_p": 0.5, "top_k_share": 0.0, **fields}
    )
    for choose in (on_the_cpu, by_kernels):
        kept = choose(config, q, k, Spans.causal(1, 512, 512, "cpu"), 1.0).to_dense()[0, 0]
        assert bool(kept[15, 200 // 16]) == actual
        assert kept.sum() < kept.numel() / 3


# --- what they need


def test_of_a_key_block_its_largest_logit_counts():
    k = torch.tensor([1.0] * 16 + [2.0] + [-9.0] * 15).reshape(1, 1, 32, 1)
    q = torch.ones(1, 1, 32, 1)
    most, shares = by_reference(q, k, Spans.causal(1, 32, 32, "cpu"), 1.0, (16, 16), 1)
    # the first query of the second block sees one key of it; sixteen keys of logit 1 need no more
    # than one does
    torch.testing.assert_close(most[0, 0, 1], torch.tensor([1.0, 2.0]).softmax(-1))
    assert torch.equal(most, shares)


def test_shares_are_summed_and_the_largest_is_kept():
    q = torch.zeros(1, 1, 32, 2)
    q[..., 16, 0] = q[..., 17, 1] = 1.0
    k = torch.zeros(1, 1, 32, 2)
    k[..., 0, 0] = k[..., 16, 1] = 3.0
    rows, positions = outliers_of(q, Spans.causal(1, 32, 32, "cpu"), 16, 16)
    parts = rows, positions, k, Spans.causal(1, 32, 32, "cpu"), 1.0, 16
    most, shares = reference.exact_scores(*parts)
    much = torch.tensor([3.0, 0.0]).softmax(-1)
    # fourteen queries look for nothing
    torch.testing.assert_close(shares[0, 0, 1], torch.tensor([8.0, 8.0]))
    torch.testing.assert_close(most[0, 0, 1], much[:1].expand(2))


def test_half_of_the_mass_is_the_outliers():
    estimate = torch.tensor([0.7, 0.2, 0.1, 0.0]).log()
    shares = torch.tensor([0.0, 1.0, 3.0, 9.0])
    visible = torch.tensor([True, True, True, False])
    actual = reference.shared_mass(estimate, shares * visible, visible).exp()
    torch.testing.assert_close(actual, torch.tensor([0.35, 0.225, 0.425, 0.0]))
    # a row without outliers is left to the estimate, a row of nothing to nobody
    actual = reference.shared_mass(estimate, torch.zeros(4), visible).softmax(-1)
    torch.testing.assert_close(actual, torch.tensor([0.7, 0.2, 0.1, 0.0]))


def brute_force(q, k, spans, scale, query_block, key_block, positions):
    """(most, shares) of whole logits, in double precision."""
    heads = q.shape[1]
    seen = BlockPlan.causal(spans, heads, query_block, key_block).token_mask()
    keys = k.repeat_interleave(heads // k.shape[1], 1)
    logits = (q.double() @ keys.double().transpose(-1, -2)) * scale
    chosen = torch.zeros(*q.shape[:2], q.shape[2] + 1, dtype=torch.bool)
    chosen.scatter_(2, positions.where(positions >= 0, q.shape[2]).flatten(2), True)
    logits = logits.masked_fill(~seen | ~chosen[..., :-1, None], -torch.inf)
    padding = (0, -logits.shape[3] % key_block, 0, -logits.shape[2] % query_block)
    logits = F.pad(logits, padding, value=-torch.inf)
    largest = logits.unflatten(3, (-1, key_block)).amax(-1)
    shares = largest.softmax(-1).nan_to_num().unflatten(2, (-1, query_block))
    return shares.amax(3).float(), shares.sum(3).float()


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("layout", ["causal", "padded", "packed", "chunk", "in-place"])
def test_the_reference_is_what_whole_logits_give(layout, count):
    length = 75
    q, k = loud(q_length=length, kv_length=130 if layout == "chunk" else 75, batch=2)
    q, k, spans = laid_in(layout, q, k, 32)
    positions = reference.outlier_queries(q, spans, 32, count)
    actual = by_reference(q, k, spans, 0.3, (32, 16), count)
    meant = brute_force(q, k, spans, 0.3, 32, 16, positions)
    for one, other in zip(actual, meant, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    # a query gives shares of 1 in all
    torch.testing.assert_close(actual[1].sum(-1), (positions >= 0).sum(-1).float())


@pytest.mark.parametrize("count", [1, 8, 32])
def test_padding_counts_nothing(count):
    q, k = loud(q_length=100, batch=2)
    frame = laid_out("padded", 2, 100, 100, 32, "cpu")
    q, k, spans = frame.queries(q), frame.keys(k), frame.spans
    quiet = by_reference(q, k, spans, 0.25, (32, 16), count)
    padding = spans.last < 0
    assert padding.any() and (~spans.key_valid).any()
    q = q.masked_fill(padding[:, None, :, None], 1e4)
    k = k.masked_fill(~spans.key_valid[:, None, :, None], 1e4)
    loud_padding = by_reference(q, k, spans, 0.25, (32, 16), count)
    for one, other in zip(loud_padding, quiet, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("count", [1, 8, 32])
def test_no_earlier_row_feels_the_future(count):
    """A row is a query block: which of its queries are outliers is a matter of all of them."""
    q, k = loud(q_length=150)
    spans = Spans.causal(1, 150, 150, "cpu")
    before = by_reference(q, k, spans, 0.25, (32, 16), count)
    q[:, :, 96:], k[:, :, 96:] = 5.0, -7.0
    after = by_reference(q, k, spans, 0.25, (32, 16), count)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:, :, :3], other[:, :, :3])
        assert not torch.equal(one[:, :, 3:], other[:, :, 3:])


# --- the kernels


def case(blocks, count, layout="causal", channels=(), **shape):
    fixed = {"blocks": blocks, "count": count, "layout": layout, "channels": channels}
    return fixed | TWO | shape


KERNEL_CASES = [
    pytest.param(case((256, 64), 1, q_length=601), id="blocks-of-which-outliers-see-a-part"),
    pytest.param(case((64, 64), 1, "chunk", q_length=95, kv_length=301), id="and-in-a-chunk"),
    pytest.param(case((128, 128), 1, "in-place", q_length=300), id="and-of-a-document"),
    pytest.param(case((32, 16), 1, q_length=75), id="one-a-block"),
    pytest.param(case((32, 16), 2, q_length=111, heads=6, kv_heads=2), id="two"),
    pytest.param(case((32, 16), 8, q_length=205, **FOUR), id="eight"),
    pytest.param(case((32, 16), 32, q_length=205), id="all"),
    pytest.param(case((128, 64), 16, q_length=300, **FOUR), id="default-blocks"),
    pytest.param(case((16, 16), 16, q_length=63), id="q16-all"),
    pytest.param(case((48, 48), 48, q_length=111), id="q48-all-k48", marks=pytest.mark.slow),
    pytest.param(case((48, 16), 24, q_length=205), id="q48-24"),
    pytest.param(case((48, 16), 3, q_length=205), id="q48-3"),
    pytest.param(case((256, 256), 32, q_length=601), id="q256-k256", marks=pytest.mark.slow),
    pytest.param(case((256, 64), 256, q_length=300), id="q256-all", marks=pytest.mark.slow),
    pytest.param(case((16, 256), 8, q_length=300), id="k256-over-q16", marks=pytest.mark.slow),
    pytest.param(case((32, 16), 8, q_length=75, dim=24), id="d24"),
    pytest.param(case((32, 16), 8, q_length=75, dim=80), id="d80"),
    pytest.param(
        case((32, 16), 8, q_length=75, dim=24, channels=(1, 2, 3, 20, 21, 22)), id="d24-two-runs"
    ),
    pytest.param(case((32, 16), 32, q_length=75, channels=(3, 4, 5)), id="all-of-three-channels"),
    pytest.param(
        case((32, 16), 8, q_length=111, dim=80, channels=tuple(range(40, 80))), id="d80-half"
    ),
    pytest.param(case((32, 16), 8, "padded", q_length=111, batch=2, **FOUR), id="padded"),
    pytest.param(
        case((32, 16), 32, "padded", q_length=111, batch=2, **FOUR),
        id="padded-all",
        marks=pytest.mark.slow,
    ),
    pytest.param(case((32, 16), 8, "packed", q_length=111, batch=2, **FOUR), id="packed"),
    pytest.param(
        case((48, 16), 12, "packed", q_length=205, batch=2, **FOUR),
        id="packed-q48",
        marks=pytest.mark.slow,
    ),
    pytest.param(case((32, 16), 8, "chunk", q_length=75, kv_length=205, **FOUR), id="chunk"),
    pytest.param(case((128, 64), 16, "chunk", q_length=63, kv_length=301), id="short-chunk"),
    pytest.param(case((32, 16), 8, "in-place", q_length=111, batch=2, **FOUR), id="in-place"),
    pytest.param(case((32, 16), 8, q_length=75, kv_heads=2), id="no-groups"),
    pytest.param(case((32, 16), 8, q_length=34), id="a-row-of-two-queries"),
    pytest.param(case((32, 16), 8, q_length=3), id="fewer-than-are-asked-for"),
]


def channels_of(scored, channels, dim=16):
    """What is scored, out of vectors whose runs are filled up."""
    runs = Channels.of(channels, dim)
    return scored.unflatten(-1, (runs.count, runs.room))[..., : runs.size].flatten(-2)


def turn_of(q, k, spans, blocks, start=0, planes=None, more=0):
    """The `HeadChunk` of ``planes`` heads from ``start`` on."""
    batch, heads, length, _ = q.shape
    columns = -(-k.shape[2] // blocks[1])
    rows = coarsen_queries(q, spans, blocks[0], "mean").rows
    return HeadChunk(
        rows=rows,
        rows_plane=rows.stride(0),
        start=start,
        count=batch * heads if planes is None else planes,
        heads=heads,
        kv_heads=k.shape[1],
        q_blocks=-(-length // blocks[0]),
        kv_blocks=columns,
        width=-(-columns // 32) * 32 + more,
        coarse_width=0,
    )


def by_kernel(q, k, spans, scale, blocks, count, channels=(), dtype=None, **turn):
    """(most, shares) of the planes of a turn, [planes, M_q, M_k]; 0 where a row sees nothing."""
    turn, dtype = turn_of(q, k, spans, blocks, **turn), dtype or q.dtype
    rows = outlier_rows(
        q, spans, (turn.start, turn.count), scale, blocks[0], count, channels, dtype
    )
    keys = scored_keys(k, channels, dtype)
    most = q.new_empty(turn.count, turn.q_blocks, turn.width, dtype=torch.float32)
    result = exact_scores(turn, rows, *keys, blocks[1], most)
    visible = block_visibility(spans, *blocks).repeat_interleave(q.shape[1], 0)
    visible = visible[turn.start : turn.start + turn.count]
    for x in result:
        assert x.shape == most.shape and x.dtype == torch.float32
    return [x[..., : turn.kv_blocks].masked_fill(~visible, 0.0) for x in result]


def assert_same(actual, meant):
    for one, other in zip(actual, meant, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_the_kernels_find_what_the_reference_finds(case, uninitialised_is_nan):
    blocks, count, layout, channels = (case.pop(name) for name in tuple(case)[:4])
    q, k, spans = laid_in(layout, *loud(**case), max(blocks))
    parts = spans, q.shape[-1] ** -0.5, blocks, count, channels
    meant = by_reference(q, k, *parts)
    assert_same(by_kernel(q, k, *parts), [x.flatten(0, 1) for x in meant])


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("layout", ["causal", "padded", "packed", "chunk"])
def test_the_kernel_gathers_the_outliers_of_the_reference(layout, count):
    q, k = loud(q_length=111, kv_length=205 if layout == "chunk" else 111, batch=2, dim=24)
    q, k, spans = laid_in(layout, q, k, 32)
    channels = (3, 4, 20, 21)
    rows, positions = outliers_of(q, spans, 32, count, channels)
    actual = outlier_rows(q, spans, (0, q.shape[0] * q.shape[1]), 1.0, 32, count, channels, q.dtype)
    missing = positions.flatten() < 0
    assert torch.equal(actual.last.flatten() < 0, missing)
    held = channels_of(actual.vectors, channels, 24).flatten(0, 1)[~missing]
    assert torch.equal(held, rows.flatten(0, 3)[~missing])
    # what makes products a multiple of 32 channels is nothing
    assert actual.vectors.shape[2] == LEAST_CHANNELS
    given = actual.vectors.flatten(0, 1)[~missing]
    torch.testing.assert_close(given.square().sum(-1), held.square().sum(-1))
    batch = torch.arange(2)[:, None, None, None].expand(positions.shape)
    for items, spanned in ((actual.first, spans.first), (actual.last, spans.last)):
        meant = spanned[batch, positions.clamp(min=0)].flatten()
        assert torch.equal(items.flatten()[~missing], meant[~missing])


def test_ties_go_to_the_earlier_in_the_kernel_too():
    q = torch.ones(1, 1, 40, 16)
    q[..., 30, :] = -1.0
    spans = Spans.causal(1, 40, 40, "cpu")
    actual = outlier_rows(q, spans, (0, 1), 1.0, 32, 4, (), q.dtype)
    assert actual.last.tolist() == [[30, 0, 1, 2, 32, 33, 34, 35]]


@pytest.mark.parametrize("count", slow_but([8, 24], 1), ids=["whole-groups", "groups-of-parts"])
def test_the_width_of_a_row_changes_nothing(count, uninitialised_is_nan):
    q, k = loud(**SHAPE | TWO)
    parts = Spans.causal(1, 136, 136, "cpu"), 0.25, (48, 16), count
    narrow = by_kernel(q, k, *parts)
    for more in (32, 64, 96):
        for one, other in zip(by_kernel(q, k, *parts, more=more), narrow, strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
def test_heads_in_turns_and_tiles_in_turns_find_the_same(monkeypatch, uninitialised_is_nan):
    q, k = loud(**SHAPE | {"q_length": 111, "batch": 2})
    parts = Spans.causal(2, 111, 111, "cpu"), 0.25, (32, 16), 32
    together = by_kernel(q, k, *parts)
    monkeypatch.setattr("cab_hf.ops.exact_scores.SCRATCH_AT_A_TIME", 1)
    for start, planes in ((0, 3), (3, 5)):
        some = by_kernel(q, k, *parts, start=start, planes=planes)
        for one, other in zip(some, together, strict=True):
            assert torch.equal(one, other[start : start + planes])


def test_sixteen_bits_find_the_same():
    # bfloat16 is for a GPU: the interpreter multiplies its bits as whole numbers
    q, k = (x.half() for x in loud(**SHAPE))
    parts = Spans.causal(1, 136, 136, "cpu"), 0.25, (32, 16), 32
    meant = by_reference(q, k, *parts)
    for one, other in zip(by_kernel(q, k, *parts), meant, strict=True):
        torch.testing.assert_close(one, other.flatten(0, 1), atol=2e-2, rtol=2e-2)


def test_means_found_on_the_way_are_those_of_coarsening():
    q, k = loud(**SHAPE | {"batch": 2, "dim": 24})
    for layout in ("causal", "padded"):
        x, _, spans = laid_in(layout, q, k, 32)
        meant = coarsen_queries(x, spans, 32, "mean")
        actual = QuerySummary(torch.full_like(meant.vectors, torch.nan), -1 - meant.rows)
        # in turns, as heads of different counts are
        for start, some in ((0, 3), (3, 5)):
            outlier_rows(x, spans, (start, some), 1.0, 32, 8, (), x.dtype, actual)
        torch.testing.assert_close(actual.vectors, meant.vectors, atol=1e-6, rtol=1e-6)
        assert torch.equal(actual.rows, meant.rows)


@pytest.mark.parametrize("channels", [(0, 2, 4), (0, 1, 8), (15, 16), (1, 2, 5, 6, 9, 10)], ids=str)
def test_channels_that_are_no_runs_are_refused(channels):
    with pytest.raises(ValueError, match="channels is .*one run of channels below 16, or two runs"):
        Channels.of(channels, 16)


# --- keys of 8 bits


def held(k, channels=()):
    """What 8 bits hold of scored keys, and the exponents of their units."""
    keys, exponents = scored_keys(k, channels, FP8)
    assert keys.dtype == FP8 and exponents.dtype == torch.int8
    return channels_of(keys.float(), channels, k.shape[3]) * 2.0**exponents, exponents


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        # four significant bits, and steps of 2^-7 of the power of two below the largest channel
        pytest.param([1.0, 0.53, 2**-7, 2**-9, 0.0], [1.0, 0.5, 2**-7, 0.0, 0.0], id="ones"),
        pytest.param([1e4, -17.2, 320.0], [10240.0, 0.0, 320.0], id="one-channel-alone"),
        pytest.param([0.0] * 3, [0.0] * 3, id="nothing"),
        pytest.param([3e38, -3e38, 1e30], [2.0**56, -(2.0**56), 2.0**56], id="never-infinite"),
        pytest.param([torch.inf, 1.0], [2.0**56, 0.0], id="nor-of-infinity"),
    ],
)
def test_keys_of_eight_bits_by_hand(key, meant):
    actual, _ = held(torch.tensor(key).reshape(1, 1, 1, -1))
    assert torch.equal(actual.flatten(), torch.tensor(meant))


@pytest.mark.parametrize("power", [-45, -14, -10, -3, 1, 9, 14, 45])
def test_keys_of_any_magnitude_are_rounded_alike(power):
    _, k = loud(**SHAPE)
    alike, exponents = held(k)
    assert torch.equal(held(k * 2.0**power)[0], alike * 2.0**power)
    # and keys that are as large as those of a model share a unit
    assert exponents.unique().tolist() == [-1]


@pytest.mark.parametrize("channels", [(), (2, 3, 10, 11)], ids=["all", "some"])
def test_bits_of_a_key_are_its_own(channels):
    """So that chunks, caches and ranks hold what the whole text alone would."""
    _, k = loud(**SHAPE)
    alone = scored_keys(k[:, :, 42:43], channels, FP8)
    among = k * 3000.0
    among[:, :, 42] = k[:, :, 42]
    for x in (k, among, k[:, :, 42:90], k[:, :, :43]):
        at = 0 if x.shape[2] == 48 else 42
        for one, other in zip(scored_keys(x, channels, FP8), alone, strict=True):
            own = one[:, :, at : at + 1].contiguous()
            assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))
    # and they hold it to a sixteenth of what it is, or to a part of its largest channel: the
    # interpreter cuts what is small where a GPU rounds it
    kept, meant = held(k[:, :, 42:43], channels)[0], picked(k[:, :, 42:43], channels)
    step = meant.abs().amax(-1, keepdim=True) / 128
    assert ((kept - meant).abs() <= (meant.abs() / 16).maximum(step)).all()


def one_key_apart(k):
    """Two units in one block."""
    k = k.clone()
    k[:, :, 50] *= 2.0**12
    return k


def every_magnitude(k):
    """Every second key small, a third of the blocks smaller."""
    token = torch.arange(k.shape[2])
    return k * 2.0 ** -(12.0 * (token % 2) + 9.0 * (token // 16 % 3 == 1))[:, None]


EIGHT_BITS = [
    pytest.param(case((32, 16), 8, q_length=301, **FOUR), id="blocks-side-by-side"),
    pytest.param(case((128, 64), 16, "chunk", q_length=140, kv_length=301, dim=64), id="chunk"),
    pytest.param(case((48, 16), 3, "packed", q_length=205, batch=2), id="packed-parts"),
    pytest.param(
        case((256, 256), 4, q_length=520, dim=256), id="a-block-of-tiles", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("change", [torch.clone, one_key_apart, every_magnitude])
@pytest.mark.parametrize("case", EIGHT_BITS)
def test_eight_bits_find_what_the_reference_finds_of_them(case, change, uninitialised_is_nan):
    (blocks, count, layout, channels), shape = list(case.values())[:4], dict(list(case.items())[4:])
    q, k, spans = laid_in(layout, *loud(**shape), max(blocks))
    k, scale, planes = change(k), q.shape[-1] ** -0.5, q.shape[0] * q.shape[1]
    positions = reference.outlier_queries(q, spans, blocks[0], count)
    rows = outlier_rows(q, spans, (0, planes), scale, blocks[0], count, channels, FP8)
    queries = channels_of(rows.vectors.float(), channels, q.shape[3]) * rows.scale.unsqueeze(-1)
    # logits to base two
    queries = queries.reshape(*positions.shape, -1) * math.log(2)
    meant = reference.exact_scores(queries, positions, held(k)[0], spans, 1.0, blocks[1])
    actual = by_kernel(q, k, spans, scale, blocks, count, channels, FP8)
    for one, other in zip(actual, meant, strict=True):
        # of float16
        torch.testing.assert_close(one, other.flatten(0, 1), atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("change", [torch.clone, every_magnitude])
@pytest.mark.parametrize("power", [-20, -13, 13, 20])
def test_eight_bits_find_the_same_whatever_the_magnitude(power, change):
    q, k = loud(**SHAPE | TWO)
    parts = Spans.causal(1, 136, 136, "cpu"), 0.25, (32, 16), 8, (), FP8
    meant = by_kernel(q, change(k), *parts)
    actual = by_kernel(q * 2.0**-power, change(k) * 2.0**power, *parts)
    for one, other in zip(actual, meant, strict=True):
        assert torch.equal(one, other)


def test_a_later_key_of_another_magnitude_changes_no_earlier_row():
    """Not even one of the same block."""
    q, k = loud(**SHAPE | TWO)
    parts = Spans.causal(1, 136, 136, "cpu"), 0.25, (32, 16), 32, (), FP8
    before = by_kernel(q, k, *parts)
    k[:, :, 100:] *= 2.0**11
    after = by_kernel(q, k, *parts)
    for one, other in zip(after, before, strict=True):
        assert torch.equal(one[:, :3], other[:, :3])
        assert not torch.equal(one[:, 3:], other[:, 3:])


def test_what_the_cpu_scores_is_what_it_is_given():
    """Floats of 8 bits are for devices with units for them."""
    _, k = loud(**SHAPE)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        summary = predict.summarise(k.to(dtype), torch.ones(1, 136).bool(), CabConfig(**SMALL))
        assert summary.keys.dtype == dtype
        assert torch.equal(summary.keys[..., :16], k.to(dtype))


# --- what is selected by them

COUNTS = ((4, 0, 1, 8),)
TOPK = {"select": "topk", "sink_blocks": 0, "local_blocks": 1, "dense_tail_blocks": 0}
SELECTED = [
    pytest.param(CabConfig(**SMALL, top_p=0.8, exact_queries=8), id="mass-and-bridges"),
    pytest.param(CabConfig(**SMALL, top_p=0.8, top_k_share=0.0, exact_queries=8), id="top_p"),
    pytest.param(
        CabConfig(**SMALL, top_p=((0.0,) * 4,), top_k_share=0.3, exact_queries=2),
        id="bridges-alone",
    ),
    pytest.param(CabConfig(**SMALL, top_p=0.6, exact_queries=1), id="one-query"),
    pytest.param(CabConfig(**SMALL, top_p=0.6, exact_queries=32), id="every-query"),
    pytest.param(CabConfig(**SMALL, top_p=0.6, exact_queries=COUNTS), id="some-heads"),
    pytest.param(CabConfig(**SMALL, top_p=0.6, exact_queries=((4, 1, 2, 8),)), id="all-counts"),
    pytest.param(
        CabConfig(
            **SMALL,
            top_p=((0.0, 0.5, 0.9, 1.0),),
            top_k_share=((0.3, 0.0, 0.1, 0.2),),
            exact_queries=((4, 4, 2, 4),),
        ),
        id="every-budget-its-own",
    ),
    pytest.param(CabConfig(**SMALL, exact_queries=4, max_density=0.4), id="capped"),
    pytest.param(CabConfig(**SMALL, exact_queries=COUNTS, max_density=0.4), id="some-capped"),
    pytest.param(CabConfig(**SMALL, exact_queries=4, dense_tail_blocks=0, top_p=0.5), id="no-tail"),
    pytest.param(
        CabConfig(**SMALL, exact_queries=COUNTS, curvature="forman", top_p=0.5), id="beside-forman"
    ),
    pytest.param(CabConfig(48, 16, exact_queries=12, top_p=0.5), id="q48"),
    pytest.param(CabConfig(16, 32, exact_queries=2, top_p=0.5), id="wide-keys"),
    pytest.param(CabConfig(16, 16, **TOPK, sparsity=0.7, exact_queries=4), id="topk"),
    pytest.param(
        CabConfig(16, 16, **TOPK, sparsity=((0.5, 0.9, 0.7, 0.7),), exact_queries=((4, 0, 2, 0),)),
        id="topk-some",
    ),
]


@pytest.mark.parametrize(
    "channels",
    [
        pytest.param((), id="all"),
        pytest.param((1, 2, 9, 10), id="some-channels", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("config", slow_but(SELECTED, 0, 2, 4, 7, 9, 11, 14))
def test_kernels_select_what_the_reference_selects(config, channels):
    q, k = loud(**SHAPE)
    parts = q, k, Spans.causal(1, 136, 136, "cpu"), 0.25, channels
    actual, meant = by_kernels(config, *parts), on_the_cpu(config, *parts)
    assert torch.equal(actual.to_dense(), meant.to_dense())
    assert torch.equal(actual.full.counts, meant.full.counts)


def test_channels_that_are_not_scored_change_no_bridge():
    q, k = loud(**SHAPE)
    spans, channels = Spans.causal(1, 136, 136, "cpu"), tuple(range(8, 16))
    fields = {"top_p": ((0.0,) * 4,), "top_k_share": 0.2, "sink_blocks": 0, "local_blocks": 1}
    config = CabConfig(**SMALL, exact_queries=32, dense_tail_blocks=0, **fields)
    before = on_the_cpu(config, q, k, spans, channels=channels).to_dense()
    k[..., :8] = 4 * k[..., :8].flip(2)
    assert torch.equal(on_the_cpu(config, q, k, spans, channels=channels).to_dense(), before)
    assert not torch.equal(on_the_cpu(config, q, k, spans).to_dense(), before)


@pytest.mark.parametrize("layout", slow_but(["padded", "packed", "chunk", "in-place"], 1, 2))
def test_kernels_select_the_same_in_every_layout(layout):
    kv_length = 205 if layout == "chunk" else 111
    q, k = loud(**SHAPE | {"q_length": 111, "kv_length": kv_length, "batch": 2})
    q, k, spans = laid_in(layout, q, k, 32)
    config = CabConfig(**SMALL, top_p=0.6, exact_queries=COUNTS)
    actual, meant = by_kernels(config, q, k, spans), on_the_cpu(config, q, k, spans)
    assert torch.equal(actual.to_dense(), meant.to_dense())


@pytest.mark.parametrize("before", slow_but([8000, 12_000, 16_500], 0))
def test_a_row_keeps_by_the_keys_it_sees(before):
    """As short texts do, as long ones do, and between."""
    q, k = loud(q_length=32, kv_length=before + 32, heads=2, kv_heads=1, dim=16)
    spans = Spans.causal(1, 32, before + 32, "cpu")
    # by the estimate: exact scores of so many keys take the interpreter minutes
    config = CabConfig(
        query_block=32, key_block=64, top_k_share=0.0, dense_tail_blocks=0, exact_queries=0
    )
    assert config.top_p is None
    actual, meant = (choose(config, q, k, spans) for choose in (by_kernels, on_the_cpu))
    assert torch.equal(actual.to_dense(), meant.to_dense())
    top_p = {8000: TOP_P_BY_KEYS[0][1], 16_500: TOP_P_BY_KEYS[1][1]}.get(before)
    if top_p is not None:
        alike = on_the_cpu(replace(config, top_p=top_p), q, k, spans)
        assert torch.equal(meant.to_dense(), alike.to_dense())


@pytest.mark.parametrize("limit", slow_but(["LISTS_AT_MOST", "SCORE_BYTES_AT_A_TIME"], 0))
@pytest.mark.parametrize(
    "counts",
    [pytest.param(4, id="all", marks=pytest.mark.slow), pytest.param(COUNTS, id="some")],
)
def test_measured_lists_and_heads_in_turns_hold_the_same(monkeypatch, limit, counts):
    q, k = loud(**SHAPE | {"batch": 2})
    spans = Spans.causal(2, 136, 136, "cpu")
    config = CabConfig(**SMALL, top_p=0.6, exact_queries=counts)
    meant = on_the_cpu(config, q, k, spans)
    monkeypatch.setattr(predict, limit, 1)
    actual = by_kernels(config, q, k, spans)
    assert torch.equal(actual.to_dense(), meant.to_dense())
    if limit == "LISTS_AT_MOST":
        assert actual.full.width == actual.full.counts.max()


@pytest.mark.parametrize("length", slow_but([1, 129, 150], 0, 1))
def test_no_row_goes_without_an_outlier(length):
    """Single queries of sparse decoding, and what is left over at the end of a text."""
    q, k = loud(**SHAPE | {"q_length": length, "kv_length": 200})
    spans = Spans.causal(1, length, 200, "cpu")
    _, shares = by_reference(q, k, spans, 0.25, (32, 16), 2)
    assert (shares.sum(-1) > 0.99).all()
    fields = {
        "top_p": ((0.8,) * 4,),
        "top_k_share": 0.1,
        "exact_queries": 2,
        "dense_tail_blocks": 0,
    }
    config = CabConfig(**SMALL, **fields)
    actual, meant = (choose(config, q, k, spans) for choose in (by_kernels, on_the_cpu))
    assert torch.equal(actual.to_dense(), meant.to_dense())


# --- a text chooses what it would alone

SLOW = (*range(16, 32), *range(48, 64))
WHOLE = CabConfig(**SMALL, top_p=0.5, top_k_share=0.1, exact_queries=8)


@pytest.mark.parametrize("choose", slow_but([on_the_cpu, by_kernels], 0))
@pytest.mark.parametrize("layout", ["batch", "padded", "packed", "chunk"])
def test_a_text_chooses_what_it_would_alone(layout, choose):
    """With half of the channels of a head of 64, however it comes."""
    q, k = loud(q_length=150, batch=2, heads=2, kv_heads=1, dim=64)
    # all but the end of a call, which a chunk has and the whole text has not
    config = replace(WHOLE, dense_tail_blocks=0)
    # (batch row, tokens before, tokens) of a text that stands in the layout
    row, begin, length = {"padded": (0, 30, 120), "packed": (1, 50, 100)}.get(layout, (1, 0, 150))
    text = [x[row : row + 1, :, begin : begin + length] for x in (q, k)]
    alone = choose(config, *text, Spans.causal(1, length, length, "cpu"), channels=SLOW).to_dense()
    if layout == "chunk":
        pieces = []
        for start, end in ((0, 64), (64, 96), (96, 150)):
            spans = Spans.causal(2, end - start, end, "cpu")
            chunk = choose(config, q[:, :, start:end], k[:, :, :end], spans, channels=SLOW)
            columns = alone.shape[3] - chunk.to_dense().shape[3]
            pieces.append(F.pad(chunk.to_dense(), (0, columns)))
        actual = torch.cat(pieces, dim=2)[row:]
    else:
        frame = laid_out("causal" if layout == "batch" else layout, 2, 150, 150, 32, "cpu")
        dense = choose(config, frame.queries(q), frame.keys(k), frame.spans, channels=SLOW)
        actual = dense.to_dense()[row : row + 1]
        rows, columns = alone.shape[2:]
        # a document stands behind the blocks of the one before it
        at = (2, 4) if layout == "packed" else (0, 0)
        assert not actual[:, :, at[0] : at[0] + rows, : at[1]].any()
        actual = actual[:, :, at[0] : at[0] + rows, at[1] : at[1] + columns]
    assert torch.equal(actual, alone)
    # there is something to choose
    seen = block_visibility(Spans.causal(1, length, length, "cpu"), 32, 16)
    assert alone.float().mean(1).sum() < seen.sum()
