"""Predictor "frc": hand-computed steps, properties of plans, and kernels against PyTorch."""

import math
from functools import partial

import pytest
import torch
from marks import mark_slow_except
from selecting import arrange_in_layout, draw_peaked_qk, plan_by_kernels, plan_by_reference
from tiny import draw_qkv

from cab_hf import CabConfig
from cab_hf.ops import frc as kernels
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges
from cab_hf.predictors import FrcPredictor, LayerContext, frc, make_predictor

SMALL_BLOCKS_FIELDS = {"query_block": 16, "key_block": 16}
# causal affinity of 3 query blocks (rows) and 3 key blocks (columns)
AFFINITY = torch.tensor([[1.0, 0, 0], [2, 3, 0], [0, 1, 2]])[None, None]
CAUSAL_MASK = torch.ones(3, 3, dtype=torch.bool).tril()


def make_tokens_with_logits(logits):
    """Return q and k whose block logits, by the largest token of each block, are ``logits``.

    Args:
        logits: nested list [num_blocks, num_blocks], logits at scale 1/4.

    Returns:
        q and k, [1, 1, 16 * num_blocks, 16].
    """
    logits = torch.tensor(logits, dtype=torch.float32)
    num_blocks = len(logits)
    q, k = torch.zeros((2, 1, 1, num_blocks, 16, 16))
    q[:, :, torch.arange(num_blocks), 5, :num_blocks] = logits
    k[:, :, torch.arange(num_blocks), 7, :num_blocks] = 4 * torch.eye(num_blocks)
    return q.flatten(2, 3), k.flatten(2, 3)


def test_largest_norm_tokens_equal_hand_computed_tokens():
    token_vectors = torch.tensor([[1.0, 1], [0, -3], [2, 0], [0, 2], [0.5, 0]])[None, None]
    is_valid = torch.tensor([[True, True, True, True, False]])
    # of equal norms, the first token is selected; in a block without valid tokens, any token
    assert frc.find_largest_norm_tokens(token_vectors, is_valid, 2).tolist() == [
        [[[0, -3], [2, 0], [0.5, 0]]]
    ]
    is_valid[0, 1] = False
    assert frc.find_largest_norm_tokens(token_vectors, is_valid, 2)[0, 0, 0].tolist() == [1, 1]


def test_affinity_is_rectified_visible_logits():
    q = torch.tensor([[1.0, 9, 9], [2, 3, 9], [-5, math.nan, 2]])[None, None]
    actual = frc.compute_affinity(q, torch.eye(3)[None, None], 0.5, CAUSAL_MASK)
    assert (2 * actual)[0, 0, :2].tolist() == [[1, 0, 0], [2, 3, 0]]
    assert actual[0, 0, 2].tolist() == [0, 0, 0]


def test_two_hop_weights_equal_hand_computed_values():
    two_hop_weights = frc.compute_two_hop_weights(AFFINITY, torch.arange(3)[None], 16, 16)
    assert two_hop_weights.tolist() == [[[[1, 0, 0], [8, 9, 0], [2, 5, 4]]]]
    # key blocks narrower than query blocks: affinities are summed per query block, and the result
    # is repeated
    narrow_affinity = torch.tensor([[0.25, 0.75, 0, 0], [0.1, 0.2, 0.3, 0.4]])[None, None]
    coarse_affinity = torch.tensor([[1.0, 0], [0.3, 0.7]])
    expected = (coarse_affinity @ coarse_affinity).repeat_interleave(2, -1)
    torch.testing.assert_close(
        frc.compute_two_hop_weights(narrow_affinity, torch.arange(2)[None], 32, 16)[0, 0], expected
    )
    # key blocks wider than query blocks: affinities are divided, and the results are summed
    wide_affinity = torch.tensor([[1.0], [3.0]])[None, None]
    assert frc.compute_two_hop_weights(
        wide_affinity, torch.arange(2)[None], 16, 32
    ).flatten().tolist() == [
        2,
        6,
    ]


def test_two_hop_of_some_rows_uses_these_rows_only():
    affinity = torch.rand(1, 1, 8, 8).tril()
    row_indices = torch.tensor([1, 6, 7])
    affinity_rows = affinity[..., row_indices, :]
    torch.testing.assert_close(
        frc.compute_two_hop_weights(affinity_rows, row_indices[None], 16, 16),
        affinity_rows[..., row_indices] @ affinity_rows,
    )


def test_two_hop_ignores_nonfinite_edges():
    affinity = AFFINITY.clone()
    affinity[..., 2, 2] = math.inf
    two_hop_weights = frc.compute_two_hop_weights(affinity, torch.arange(3)[None], 16, 16)
    assert two_hop_weights.tolist() == [[[[1, 0, 0], [8, 9, 0], [2, 3, 0]]]]


def test_forman_curvature_equals_hand_computed_values():
    two_hop_weights = AFFINITY @ AFFINITY
    # curvature[i, j] = 4 A[i, j] - sum_k A[i, k] - sum_{k <= i} A[k, j] + 3 (A A)[i, j]
    first_row = [4 - 1 - 1 + 3, -1 - 0, -1 - 0]
    second_row = [8 - 5 - 3 + 24, 12 - 5 - 3 + 27, -5 - 0]
    third_row = [0 - 3 - 3 + 6, 4 - 3 - 4 + 15, 8 - 3 - 2 + 12]
    assert frc.compute_forman_curvature(AFFINITY, two_hop_weights).tolist() == [
        [[first_row, second_row, third_row]]
    ]


def test_scores_equal_hand_computed_values():
    two_hop_weights = AFFINITY @ AFFINITY
    compute_scores = partial(frc.compute_scores, AFFINITY, is_visible=CAUSAL_MASK)
    assert torch.equal(
        compute_scores(two_hop_weights=None, curvature="forman", redundancy=1.0), AFFINITY
    )
    forman_curvature = frc.compute_forman_curvature(AFFINITY, two_hop_weights)
    assert torch.equal(
        compute_scores(two_hop_weights=two_hop_weights, curvature="forman", redundancy=1.0),
        -forman_curvature,
    )
    mean_of_both_scores = (AFFINITY - forman_curvature) / 2
    assert torch.equal(
        compute_scores(two_hop_weights=two_hop_weights, curvature="forman", redundancy=0.5),
        mean_of_both_scores,
    )
    # score = row of A scaled to [0, 1] - 0.3 (A A) / 3
    expected = torch.tensor([[-0.1, 0, 0], [-0.8, 0.1, 0], [-0.2, 0, 0.6]])[None, None]
    actual = compute_scores(two_hop_weights=two_hop_weights, curvature="additive", redundancy=0.3)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("curvature", "selected_blocks"),
    [
        # the fourth row has curvatures 0 - 10 - 9 + 81, 4 - 10 - 8 + 81 and 20 - 10 - 7 + 90 in
        # columns 0 to 2: column 0 has the lowest curvature, and column 2 the largest affinity
        pytest.param("forman", [0, 3], id="forman"),
        pytest.param("none", [2, 3], id="magnitude"),
    ],
)
def test_forman_selects_lowest_curvature(curvature, selected_blocks):
    logits = [[2.0, 9, 9, 9], [2, 3, 9, 9], [5, 4, 2, 9], [0, 1, 5, 4]]
    affinity = torch.tensor(logits).tril()
    assert (affinity @ affinity)[3].tolist() == [27, 27, 30, 16]
    config = CabConfig.published(0.5, curvature, **SMALL_BLOCKS_FIELDS)
    q, k = make_tokens_with_logits(logits)
    for make_plan in (plan_by_reference, plan_by_kernels):
        plan = make_plan(config, q, k, KeyRanges.causal(1, 64, 64, "cpu"))
        assert plan.to_dense()[0, 0, 3].nonzero().flatten().tolist() == selected_blocks


def test_ties_select_lower_index_after_forced_blocks():
    block_scores = torch.tensor([[1.0, 2, 2, 2, math.inf, 0]])[None, None]
    is_visible = torch.ones(6, dtype=torch.bool)
    is_visible[4] = False
    is_forced = torch.tensor([False] * 5 + [True])

    def select_blocks(num_selected):
        is_selected = reference.select_best_blocks(
            block_scores, is_visible, is_forced, torch.tensor([[[num_selected]]])
        )
        return is_selected.flatten().nonzero().flatten().tolist()

    assert [select_blocks(num_selected) for num_selected in range(5)] == [
        [],
        [5],
        [1, 5],
        [1, 2, 5],
        [1, 2, 3, 5],
    ]


def test_row_bounds_and_num_listed_equal_hand_computed_values():
    # queries are the last 48 of 112 tokens
    key_ranges = KeyRanges.causal(1, 48, 112, "cpu")
    block_bounds = reference.compute_block_bounds(key_ranges, 32, 16, 1, 3)[:, 0]
    assert block_bounds[:4].tolist() == [[0, 0], [5, 6], [1, 1], [3, 4]]
    assert block_bounds[4:].tolist() == [[0, 0], [3, 5]]
    num_listed = frc.count_listed_blocks(
        reference.compute_block_bounds(key_ranges, 32, 16, 1, 3),
        tail_mask=None,
        is_tail_listed=False,
        sparsity=(0.5,),
        max_density=1.0,
    )
    # max(ceil(6 / 2), 4) and max(ceil(7 / 2), 4): half of 6 or 7 visible blocks, and at least the
    # four forced blocks (one sink, three local)
    assert num_listed.flatten().tolist() == [4, 4]
    tail_mask = torch.tensor([[False, True]])
    for is_tail_listed, num_listed_in_tail in ((True, 7), (False, 0)):
        num_listed_by_head = frc.count_listed_blocks(
            reference.compute_block_bounds(key_ranges, 32, 16, 0, 1),
            tail_mask=tail_mask,
            is_tail_listed=is_tail_listed,
            sparsity=(0.5, 0.0),
            max_density=0.4,
        )
        # max_density 0.4 limits the number of blocks per query block
        assert num_listed_by_head.tolist() == [[[3, num_listed_in_tail], [3, num_listed_in_tail]]]


@pytest.mark.parametrize("curvature", ["additive", "forman"])
def test_curvature_changes_selection_unless_redundancy_is_0(curvature):
    q, k, _ = draw_qkv(q_length=500)
    config = CabConfig.published(0.7, curvature, **SMALL_BLOCKS_FIELDS, redundancy=1.0)
    blocks_selected_by_affinity = plan_by_reference(
        config.changed(curvature="none", redundancy=0.3), q, k
    ).to_dense()
    assert not torch.equal(plan_by_reference(config, q, k).to_dense(), blocks_selected_by_affinity)
    assert torch.equal(
        plan_by_reference(config.changed(redundancy=0.0), q, k).to_dense(),
        blocks_selected_by_affinity,
    )


def test_rows_select_the_share_of_their_head():
    q, k, _ = draw_qkv(q_length=640)
    sparsities = (0.0, 0.2, 0.5, 0.75, 0.9, 0.95)
    plan = plan_by_reference(CabConfig.published((sparsities,), query_block=32, key_block=32), q, k)
    num_selected = plan.to_dense().sum(-1)[0]
    for head, sparsity in enumerate(sparsities):
        selected_percent = round((1 - sparsity) * 100)
        assert num_selected[head].tolist() == [
            -(-selected_percent * (row + 1) // 100) for row in range(20)
        ]
    assert plan_by_reference(CabConfig.published(0.0), q, k).density() == 1


def test_later_tokens_change_no_earlier_row():
    q, k, _ = draw_qkv(q_length=320)
    config = CabConfig.published(0.6, **SMALL_BLOCKS_FIELDS)
    expected = plan_by_reference(config, q, k).to_dense()
    q[:, :, 160:], k[:, :, 160:] = -q[:, :, 160:], 3 * k[:, :, 160:]
    actual = plan_by_reference(config, q, k).to_dense()
    assert torch.equal(actual[:, :, :10], expected[:, :, :10]) and not torch.equal(actual, expected)


def test_autocast_does_not_change_selection():
    q, k, _ = draw_qkv(q_length=400)
    expected = plan_by_reference(CabConfig.published(0.7, **SMALL_BLOCKS_FIELDS), q, k).to_dense()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            plan_by_reference(CabConfig.published(0.7, **SMALL_BLOCKS_FIELDS), q, k).to_dense(),
            expected,
        )


@pytest.mark.parametrize("tensor_name", ["q", "k"])
def test_check_finite_error_names_the_tensor(tensor_name):
    tensor_by_name = dict(zip("qk", draw_qkv(q_length=64), strict=False))
    tensor_by_name[tensor_name][0, 0, 5, 3] = math.nan
    with pytest.raises(ValueError, match=f"^{tensor_name} must be finite, got infinite or NaN"):
        plan_by_reference(
            CabConfig.published(check_finite=True), tensor_by_name["q"], tensor_by_name["k"]
        )


def test_subclass_of_frc_requires_queries_and_keys():
    predictor = make_predictor(CabConfig.published())
    assert type(predictor) is FrcPredictor
    layer_context = LayerContext(KeyRanges.causal(1, 64, 64, "cpu"), 0.25)
    for config, expected in (
        (predictor.config, ("summaries", "vectors")),
        (CabConfig.published(curvature="none"), ("summaries",)),
    ):
        assert FrcPredictor(config).required_inputs(layer_context, (4, 2)) == expected

    class FrcSubclass(FrcPredictor):
        pass

    assert FrcSubclass(predictor.config).required_inputs(layer_context, (4, 2)) == (
        "queries",
        "keys",
    )


QK_SHAPE = {"q_length": 136, "heads": 2, "kv_heads": 1}
CONFIGS = [
    pytest.param(CabConfig.published(0.7, **SMALL_BLOCKS_FIELDS), id="forman"),
    pytest.param(CabConfig.published(0.7, "additive", **SMALL_BLOCKS_FIELDS), id="additive"),
    pytest.param(
        CabConfig.published(0.7, "none", **SMALL_BLOCKS_FIELDS, dense_tail_blocks=1), id="tail"
    ),
    pytest.param(CabConfig.published(0.3, query_block=32, key_block=16, max_density=0.5), id="cap"),
]


@pytest.mark.parametrize("length", [5, 63, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_select_largest_tokens_of_reference(length, dtype):
    token_vectors = draw_qkv(q_length=length, heads=4, dim=24, batch=2, dtype=dtype)[0]
    is_valid = torch.ones(2, length, dtype=torch.bool)
    is_valid[1, 3:40] = False
    # tokens 3 to 39 of row 1 are padding, so that some blocks contain padding only
    for block_size in (16, 48):
        actual = kernels.find_largest_norm_tokens(token_vectors, is_valid, block_size)
        assert torch.equal(
            actual, frc.find_largest_norm_tokens(token_vectors, is_valid, block_size)
        )


def test_blocks_with_nonfinite_key_are_marked():
    key_vectors = draw_qkv(q_length=100, heads=2, dim=24, batch=2)[0]
    is_valid = torch.ones(2, 100, dtype=torch.bool)
    is_valid[1, 40] = False
    key_vectors[:, 0, 40] = torch.nan
    key_vectors[:, 1, 70, 3] = torch.inf
    for find_tokens in (kernels.find_largest_norm_tokens, frc.find_largest_norm_tokens):
        is_marked = find_tokens(key_vectors, is_valid, 16, True).isnan().all(-1)
        # one NaN of row 1 is padding, and is not marked
        assert is_marked.nonzero().tolist() == [[0, 0, 2], [0, 1, 4], [1, 1, 4]]


@pytest.mark.parametrize("config", mark_slow_except(CONFIGS, 0, 3))
@pytest.mark.parametrize(
    "change_qk",
    [
        pytest.param(lambda q, k: (q, k), id="as-they-are"),
        # products of integers are exact, so that equal keys have exactly equal scores
        pytest.param(lambda q, k: (q.round(), k[:, :, :1].round().expand_as(k)), id="equal-keys"),
        pytest.param(lambda q, k: (torch.zeros_like(q), k), id="nothing-at-all"),
    ],
)
def test_kernels_select_blocks_of_reference(config, change_qk, fill_uninitialised_with_nan):
    q, k = change_qk(*draw_peaked_qk(**QK_SHAPE))
    key_ranges = KeyRanges.causal(1, 136, 136, "cpu")
    actual = plan_by_kernels(config, q, k, key_ranges)
    expected = plan_by_reference(config, q, k, key_ranges)
    assert torch.equal(actual.full.counts, expected.full.counts)
    assert torch.equal(actual.to_dense(), expected.to_dense())


@pytest.mark.parametrize("shape", [{"q_length": 7}, {"kv_length": 250}, {"batch": 2, "dim": 24}])
def test_kernels_select_blocks_of_reference_for_every_shape(shape):
    q, k = draw_peaked_qk(**QK_SHAPE | shape)
    key_ranges = KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], "cpu")
    actual, expected = (
        make_plan(CONFIGS[0].values[0], q, k, key_ranges)
        for make_plan in (plan_by_kernels, plan_by_reference)
    )
    assert torch.equal(actual.to_dense(), expected.to_dense())


@pytest.mark.parametrize("layout", mark_slow_except(["in-place", "padded", "packed", "chunk"], 0))
def test_kernels_select_blocks_of_reference_in_every_layout(layout):
    config = CabConfig.published(0.5, **SMALL_BLOCKS_FIELDS, dense_tail_blocks=1)
    kv_length_option = {"kv_length": 200} if layout == "chunk" else {}
    q, k = draw_peaked_qk(**QK_SHAPE, batch=2, **kv_length_option)
    q, k, key_ranges = arrange_in_layout(layout, q, k, 16)
    actual, expected = (
        make_plan(config, q, k, key_ranges) for make_plan in (plan_by_kernels, plan_by_reference)
    )
    assert torch.equal(actual.to_dense(), expected.to_dense())


def test_selection_head_by_head_equals_all_heads(monkeypatch):
    q, k = draw_peaked_qk(q_length=90, heads=4, kv_heads=2, batch=2)
    key_ranges, config = (
        KeyRanges.causal(2, 90, 90, "cpu"),
        CabConfig.published(0.7, **SMALL_BLOCKS_FIELDS),
    )
    expected = plan_by_reference(config, q, k, key_ranges).to_dense()
    monkeypatch.setattr(frc, "MAX_SCORE_BYTES", 1)
    assert torch.equal(plan_by_reference(config, q, k, key_ranges).to_dense(), expected)
    assert torch.equal(plan_by_kernels(config, q, k, key_ranges).to_dense(), expected)


def test_nan_query_gives_a_valid_plan():
    q, k = draw_peaked_qk(**QK_SHAPE)
    q[0, 0, 40] = math.nan
    # `plan_by_kernels` asserts that the plan is valid
    plan_by_kernels(CONFIGS[0].values[0], q, k, KeyRanges.causal(1, 136, 136, "cpu"))


def test_list_width_follows_sparsity():
    q, k = draw_peaked_qk(**QK_SHAPE)
    for make_plan in (plan_by_reference, plan_by_kernels):
        plan = make_plan(CONFIGS[0].values[0], q, k, KeyRanges.causal(1, 136, 136, "cpu"))
        assert (plan.full.width, plan.partial.width) == (4, 2)


def test_registered_ops_pass_opcheck():
    q, k, _ = draw_qkv(q_length=64)
    key_ranges = KeyRanges.causal(1, 64, 64, "cpu")
    check_options = {"test_utils": ("test_schema", "test_faketensor")}
    frc_tokens_op = torch.ops.cab_hf.frc_tokens.default
    torch.library.opcheck(frc_tokens_op, (q, key_ranges.end >= 0, 16, True), **check_options)
    block_bounds = reference.compute_block_bounds(key_ranges, 16, 16, 0, 1)
    num_listed = frc.count_listed_blocks(
        block_bounds, tail_mask=None, is_tail_listed=False, sparsity=(0.5,), max_density=1.0
    )
    num_listed = num_listed.expand(-1, 6, -1).contiguous()
    block_positions = key_ranges.rows(16).block_positions(16)
    vectors = (frc.find_largest_norm_tokens(x, key_ranges.end >= 0, 16) for x in (q, k))
    op_arguments = (
        *vectors,
        block_bounds,
        num_listed,
        block_positions,
        0.25,
        16,
        16,
        "forman",
        1.0,
        4,
        2,
    )
    torch.library.opcheck(torch.ops.cab_hf.frc.default, op_arguments, **check_options)
