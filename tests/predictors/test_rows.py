"""Blocks chosen by rows, by the reference: by hand, and what is promised of any layout."""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import laid_out
from selecting import loud, on_the_cpu
from tiny import tiny_model
from torch.nn import functional as F

import cab_hf
from cab_hf import CabConfig
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges, block_visibility
from cab_hf.predictors import LayerContext, RowsPredictor
from cab_hf.predictors.rows import choose_by_reference

BLOCKS = {"query_block": 32, "key_block": 16}
SMALL = CabConfig(
    **BLOCKS, predictor="rows", outlier_queries=4, typical_queries=4,
    typical_key_stride=1, mass_threshold=0.08, share_threshold=0.3,
)  # fmt: skip


def call_of(length):
    return LayerContext(KeyRanges.causal(1, length, length, "cpu"), 1.0)


def mass_of(q, k, config, channels=()):
    """[M_q, M_k] of the only head: (mass, most)."""
    ranges = KeyRanges.causal(1, q.shape[2], q.shape[2], "cpu")
    both = reference.mass_by_rows(q, k, ranges, 1.0, config, channels)
    return [x[0, 0] for x in both]


# --- by hand


def test_typical_queries_stand_in_the_middle_of_equal_steps():
    ranges = KeyRanges.causal(1, 80, 80, "cpu")
    positions = reference.typical_queries(ranges, 32, 4)
    assert positions.tolist() == [[[4, 12, 20, 28], [36, 44, 52, 60], [68, 76, -1, -1]]]


def test_outliers_have_weight_one_and_typical_queries_share_the_rest():
    """Four of 32 queries look at the second key block; one of them is an outlier."""
    q = torch.zeros(1, 1, 64, 2)
    q[..., 0] = 1.0
    q[0, 0, [33, 40, 47, 55]] = torch.tensor([0.0, 1.0])
    k = torch.full((1, 1, 64, 2), -40.0)
    k[0, 0, 3], k[0, 0, 20] = torch.tensor([40.0, -40.0]), torch.tensor([-40.0, 40.0])
    mass, most = mass_of(q, k, SMALL)
    torch.testing.assert_close(mass[1], torch.tensor([31 / 32, 1 / 32, 0.0, 0.0]))
    torch.testing.assert_close(most[1], torch.tensor([1.0, 1.0, 0.0, 0.0]))


def test_outliers_are_a_farthest_point_sample():
    """Directions at 0, 90, 100 and 180 degrees: each is sampled before any is sampled twice."""
    angles = torch.zeros(32)
    angles[[5, 6, 20]] = torch.tensor([180.0, 90.0, 100.0])
    angles = angles.deg2rad()
    q = torch.stack((angles.cos(), angles.sin()), -1)[None, None]
    positions = reference.outlier_queries(q, KeyRanges.causal(1, 32, 32, "cpu"), 32, 8)
    # 180 is farthest from the mean, 0 from 180; 90 is as far from both; then 100, then ties
    assert positions.flatten().tolist() == [5, 0, 6, 20, 1, 2, 3, 4]


def test_fewer_real_queries_than_outliers_are_all_sampled_once():
    q, _ = loud(q_length=37, heads=1, kv_heads=1)
    positions = reference.outlier_queries(q, KeyRanges.causal(1, 37, 37, "cpu"), 32, 8)
    assert sorted(positions[0, 0, 1].tolist()) == [-1, -1, -1, 32, 33, 34, 35, 36]


def test_typical_queries_see_every_nth_key():
    """A stride of 4 in blocks of 16 keys scores keys 2, 6, 10 and 14 of each block."""
    q = torch.ones(1, 1, 64, 2)
    k = torch.full((1, 1, 64, 2), -20.0)
    k[0, 0, 6], k[0, 0, 21] = 20.0, 20.0
    config = replace(SMALL, outlier_queries=0, typical_key_stride=4)
    mass, most = mass_of(q, k, config)
    torch.testing.assert_close(mass[1], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    mass, most = mass_of(q, k, replace(config, typical_key_stride=1))
    torch.testing.assert_close(mass[1], torch.tensor([0.5, 0.5, 0.0, 0.0]))


def test_a_sample_that_sees_no_sampled_key_has_no_weight():
    """Documents begin inside of a stride: their first query sees no sampled key."""
    q, k = loud(q_length=32, heads=1, kv_heads=1)
    last = torch.arange(32, dtype=torch.int32)[None]
    first = (last >= 19).int() * 19
    ranges = KeyRanges(first, last, torch.ones(1, 32, dtype=torch.bool))
    config = replace(SMALL, outlier_queries=0, typical_queries=32, typical_key_stride=8)
    mass, _ = reference.mass_by_rows(q, k, ranges, 1.0, config)
    # keys 4, 12, 20, 28 are scored: queries 0 to 3 and 19 see none of them
    torch.testing.assert_close(mass.sum(), torch.tensor(1.0))


def test_a_mass_is_that_of_all_queries_where_all_are_scored():
    q, k = loud(q_length=96, heads=1, kv_heads=1)
    every = replace(SMALL, outlier_queries=0, typical_queries=32)
    logits = (q @ k.transpose(-1, -2))[0, 0].masked_fill(torch.ones(96, 96).triu(1).bool(), -1e9)
    shares = logits.unflatten(-1, (6, 16)).amax(-1).softmax(-1)
    expected = shares.unflatten(0, (3, 32)).mean(1)
    torch.testing.assert_close(mass_of(q, k, every)[0], expected)


def test_a_sink_holds_mass_that_no_block_has():
    q, k = loud(q_length=96, heads=2, kv_heads=1)
    every = replace(SMALL, outlier_queries=0, typical_queries=32)
    ranges = KeyRanges.causal(1, 96, 96, "cpu")
    alone, _ = reference.mass_by_rows(q, k, ranges, 1.0, every)
    given = q, k, ranges, 1.0, every
    held, _ = reference.mass_by_rows(*given, sinks=torch.tensor([2.0, -torch.inf]))
    torch.testing.assert_close(held[:, 1], alone[:, 1])
    logits = (q @ k.transpose(-1, -2))[0, 0].masked_fill(torch.ones(96, 96).triu(1).bool(), -1e9)
    largest = F.pad(logits.unflatten(-1, (6, 16)).amax(-1), (0, 1), value=2.0 - math.log(16))
    expected = largest.softmax(-1)[:, :6].unflatten(0, (3, 32)).mean(1)
    torch.testing.assert_close(held[0, 0], expected)


def test_outliers_are_scored_on_their_channels_and_typical_queries_on_all():
    q, k = loud(q_length=96, heads=1, kv_heads=1)
    blind = k.clone()
    blind[..., :8] = 0.0
    typical = replace(SMALL, outlier_queries=0)
    assert torch.equal(*(mass_of(q, k, typical, x)[0] for x in ((), (8, 9, 10, 11))))
    every = replace(SMALL, outlier_queries=32)
    seen = [mass_of(q, x, every, tuple(range(8, 16)))[0] for x in (k, blind)]
    # typical queries weigh nothing where every query is an outlier
    torch.testing.assert_close(*seen)


def test_thresholds_by_hand():
    q, k = loud(q_length=640)
    ranges = KeyRanges.causal(1, 640, 640, "cpu")
    config = replace(SMALL, dense_tail_blocks=0)
    mass, most = reference.mass_by_rows(q, k, ranges, 0.25, config)
    visible = block_visibility(ranges, 32, 16)
    forced = reference.forced_blocks(visible, ranges, config)
    expected = visible & (forced | (mass >= 0.08) | (most >= 0.3))
    actual = on_the_cpu(config, q, k, ranges).to_dense()
    assert torch.equal(actual, expected)
    assert 0.2 < actual.float().mean() / visible.float().mean() < 0.8


def test_one_query_that_alone_looks_at_a_key_is_found():
    q = torch.zeros(1, 1, 512, 8)
    q[..., 0] = 4.0
    q[..., 490, 0], q[..., 490, 1] = 0.0, 8.0
    k = torch.zeros(1, 1, 512, 8)
    k[..., :96, 0], k[..., 200, 1] = 1.0, 4.0
    config = replace(SMALL, dense_tail_blocks=0, mass_threshold=0.2)
    for count, found in ((4, True), (0, False)):
        kept = on_the_cpu(
            replace(config, outlier_queries=count), q, k, KeyRanges.causal(1, 512, 512, "cpu"), 1.0
        )
        assert bool(kept.to_dense()[0, 0, 15, 200 // 16]) == found
        assert kept.density() < 0.7


# --- promises


@pytest.mark.parametrize("cap", [0.2, 0.5])
def test_max_density_caps_every_row_and_keeps_the_best(cap):
    q, k = loud(q_length=900)
    ranges, config = KeyRanges.causal(1, 900, 900, "cpu"), replace(SMALL, dense_tail_blocks=0)
    whole = on_the_cpu(config, q, k, ranges).to_dense()
    capped = on_the_cpu(replace(config, max_density=cap), q, k, ranges).to_dense()
    visible = block_visibility(ranges, 32, 16)
    forced = reference.forced_blocks(visible, ranges, config)
    most = reference.share_of_row(visible, cap).squeeze(-1).maximum(forced.sum(-1))
    assert torch.equal(capped.sum(-1), whole.sum(-1).minimum(most))
    assert (whole | ~capped).all()
    # what is left out has less than what is kept
    mass, most = reference.mass_by_rows(q, k, ranges, 0.25, config)
    rank = torch.where(most >= 0.3, 1 + most, mass).masked_fill(forced, torch.inf)
    least = rank.masked_fill(~capped, torch.inf).amin(-1)
    assert (rank.masked_fill(capped | ~whole, -1).amax(-1) <= least).all()


def test_the_largest_share_of_a_row_can_be_all_that_decides():
    """Benchmarks of random inputs at a density need this: every block reaches threshold 0."""
    q, k = loud(q_length=640)
    config = replace(SMALL, mass_threshold=0.0, max_density=0.25, dense_tail_blocks=0)
    plan = on_the_cpu(config, q, k, KeyRanges.causal(1, 640, 640, "cpu"))
    kept, rows = plan.to_dense().sum(-1), 2 * torch.arange(1, 21)
    assert torch.equal(kept, (rows / 4).ceil().long().maximum(rows.clamp(max=4)).expand_as(kept))


def test_no_earlier_row_feels_the_future():
    q, k = loud(q_length=256)
    ranges = KeyRanges.causal(1, 256, 256, "cpu")
    config = replace(SMALL, dense_tail_blocks=0)
    before = on_the_cpu(config, q, k, ranges).to_dense()[:, :, :4]
    for x in (q, k):
        x[:, :, 128:] = -3 * x[:, :, 128:]
    assert torch.equal(on_the_cpu(config, q, k, ranges).to_dense()[:, :, :4], before)


def test_chunks_of_whole_query_blocks_are_one_call():
    q, k = loud(q_length=320)
    config = replace(SMALL, dense_tail_blocks=0)
    whole = on_the_cpu(config, q, k, KeyRanges.causal(1, 320, 320, "cpu")).to_dense()
    for start, stop in ((0, 96), (96, 224), (224, 320)):
        ranges = KeyRanges.causal(1, stop - start, stop, "cpu")
        part = on_the_cpu(config, q[:, :, start:stop], k[:, :, :stop], ranges).to_dense()
        expected = whole[:, :, start // 32 : -(-stop // 32), : stop // 16]
        assert torch.equal(part, expected)


def test_padding_changes_nothing():
    q, k = loud(q_length=200, batch=2)
    layout = laid_out("padded", 2, 200, 200, 32, "cpu")
    alone = KeyRanges.causal(1, 160, 160, "cpu")
    expected = on_the_cpu(SMALL, q[:1, :, 40:], k[:1, :, 40:], alone).token_mask()
    padded = on_the_cpu(SMALL, layout.queries(q), layout.keys(k), layout.ranges).token_mask()[:1]
    real, keys = layout.ranges.end[0] >= 0, layout.ranges.key_valid[0]
    assert torch.equal(padded[:, :, real][..., keys], expected)


def test_packed_documents_answer_as_alone():
    q, k = loud(q_length=192)
    layout = laid_out("packed", 1, 192, 192, 32, "cpu")
    packed = on_the_cpu(SMALL, layout.queries(q), layout.keys(k), layout.ranges).token_mask()
    real, keys = layout.ranges.end[0] >= 0, layout.ranges.key_valid[0]
    mask = packed[:, :, real][..., keys]
    for start, stop in ((0, 64), (64, 192)):
        alone = KeyRanges.causal(1, stop - start, stop - start, "cpu")
        part = on_the_cpu(SMALL, q[:, :, start:stop], k[:, :, start:stop], alone).token_mask()
        assert torch.equal(mask[:, :, start:stop, start:stop], part)


def test_the_same_under_torch_compile():
    q, k = loud(q_length=205)
    ranges = KeyRanges.causal(1, 205, 205, "cpu")

    def choose(q, k, end):
        told = replace(ranges, sequence_end=end)
        plan = RowsPredictor(SMALL)(q, k, LayerContext(told, 0.25))
        return plan.full.counts, plan.full.indices, plan.partial.counts, plan.partial.indices

    for end in (None, torch.tensor([[170]], dtype=torch.int32)):
        expected = choose(q, k, end)
        actual = torch.compile(choose, fullgraph=True)(q, k, end)
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one[..., : other.shape[-1]] if one.ndim > 3 else one, other)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"query_block": 48, "outlier_queries": 24},
            "outlier_queries must be 0 or a power.*, got 24",
        ),
        ({"typical_queries": 64}, "typical_queries must be a power of two .*, got 64"),
        ({"typical_key_stride": 3}, "typical_key_stride must be a power of two .*, got 3"),
        ({"typical_key_stride": 32}, "typical_key_stride must be a power of two .*, got 32"),
        ({"sparsity": 0.5}, "sparsity is 0.5, which predictor='rows' does not read"),
        ({"predictor": "frc"}, "outlier_queries is 4, which predictor='frc' does not read"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **fields)


def test_describe_tells_what_decides():
    model = tiny_model()
    cab_hf.apply_cab(model, SMALL)
    assert cab_hf.describe(model).startswith(
        "cab: predictor rows (4 outlier queries and 4 typical queries, mass_threshold 0.08, "
        "share_threshold 0.3), blocks 32 x 16"
    )


def test_what_is_not_finite_is_refused_by_name():
    q, k = loud(q_length=64)
    k[0, 0, 3, 1] = torch.inf
    predictor = RowsPredictor(replace(SMALL, check_finite=True))
    with pytest.raises(ValueError, match="k must be finite, got infinite or NaN values"):
        predictor(q, k, call_of(64))


def test_heads_of_a_group_read_their_own_keys():
    q, k = loud(q_length=160, heads=4, kv_heads=2)
    call = call_of(160)
    together = choose_by_reference(q, k, call, SMALL)
    for head in range(4):
        one = choose_by_reference(q[:, [head]], k[:, [head // 2]], call, SMALL)
        assert torch.equal(together[:, [head]], one)
