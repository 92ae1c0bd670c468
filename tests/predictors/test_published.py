"""Classes of the published method: hand-computed formulas, and plans of `CabConfig.published`."""

import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from tiny import draw_qkv

from cab_hf import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.predictors import FrcPredictor, LayerContext
from cab_hf.predictors.published import (
    AdaptiveCurvaturePredictor,
    BlockFrc,
    CoarseCurvaturePredictor,
    coarsen_qk_max_l2,
    compute_block_frc,
    estimate_flops,
    generate_block_mask_from_frc,
    visualize_frc_statistics,
)

EXAMPLE_PATH = Path(__file__).parents[2] / "examples" / "published_classes.py"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
parametrize_formula = pytest.mark.parametrize("formula", ["forman", "additive"])
parametrize_causal = pytest.mark.parametrize(
    "causal", [True, False], ids=["causal", "bidirectional"]
)


def make_coarse_tokens(logits):
    """Return q and k [1, 1, blocks, D=4] with q k^T / sqrt(D) = ``logits``."""
    logits = torch.tensor(logits, dtype=torch.float32)
    num_blocks = len(logits)
    q, k = torch.zeros((2, 1, 1, num_blocks, 4))
    q[..., :num_blocks] = logits
    k[..., :num_blocks] = 2 * torch.eye(num_blocks)
    return q, k


def select_blocks(curvature, sparsity, **settings):
    """Return a list of selected key blocks for each row of ``curvature`` [M, M]."""
    block_mask = generate_block_mask_from_frc(
        torch.tensor(curvature)[None, None], sparsity, **settings
    )
    return [row.nonzero().flatten().tolist() for row in block_mask[0, 0]]


def make_published_plan(q, k, *, sparsity, formula="forman", **settings):
    """Return the plan of `CabConfig.published` with blocks of 32 x 32 tokens."""
    config = CabConfig.published(sparsity, formula, query_block=32, key_block=32, **settings)
    key_ranges = KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    return FrcPredictor(config)(q, k, LayerContext(key_ranges, q.shape[-1] ** -0.5))


def test_coarse_token_is_largest_token_of_its_block():
    q = torch.tensor([[1.0, 1], [0, -3], [2, 0], [0, 2], [0.1, 0]])[None, None]
    q_coarse, k_coarse = coarsen_qk_max_l2(q, q.flip(2), 2)
    # of equal norms, the first token is selected; the last block has one token
    assert torch.equal(q_coarse, torch.tensor([[[[0, -3], [2, 0], [0.1, 0]]]]))
    assert k_coarse.tolist() == [[[[0, 2], [0, -3], [1, 1]]]]


def test_coarse_tokens_are_float32():
    q, k, _ = draw_qkv(q_length=100, dtype=torch.bfloat16)
    assert {x.dtype for x in coarsen_qk_max_l2(q, k)} == {torch.float32}


LOGITS = [[1.0, 9, 9], [2, 3, 9], [-5, 1, 2]]


def test_curvature_equals_hand_computed_values():
    actual = compute_block_frc(*make_coarse_tokens(LOGITS), formula="forman")
    assert actual.affinity.tolist() == [[[[1, 0, 0], [2, 3, 0], [0, 1, 2]]]]
    assert actual.triangles.tolist() == [[[[1, 0, 0], [8, 9, 0], [2, 5, 4]]]]
    # curvature[i, j] = 4 A[i, j] - sum_k A[i, k] - sum_{k <= i} A[k, j] + 3 (A A)[i, j]
    first_row = [4 - 1 - 1 + 3, 0, 0]
    second_row = [8 - 5 - 3 + 24, 12 - 5 - 3 + 27, 0]
    third_row = [0 - 3 - 3 + 6, 4 - 3 - 4 + 15, 8 - 3 - 2 + 12]
    assert actual.frc.tolist() == [[[first_row, second_row, third_row]]]
    # score = row of A scaled to [0, 1] - 0.3 (A A) / 3
    actual = compute_block_frc(*make_coarse_tokens(LOGITS), formula="additive", redundancy=0.3).frc
    expected = [[-0.1, 0, 0], [-0.8, 0.1, 0], [-0.2, 0, 0.6]]
    torch.testing.assert_close(actual, torch.tensor(expected)[None, None])


def test_bidirectional_forman_curvature_equals_hand_computed_values():
    actual = compute_block_frc(*make_coarse_tokens([[1.0, 1], [-3, 2]]), causal=False)
    assert actual.triangles.tolist() == [[[[1, 3], [0, 4]]]]
    # not causal: both rows of A sum to 2, and the columns sum to 1 and 3
    first_row = [4 - 2 - 1 + 3, 4 - 2 - 3 + 9]
    second_row = [0 - 2 - 1 + 0, 8 - 2 - 3 + 12]
    assert actual.frc.tolist() == [[[first_row, second_row]]]


def test_forman_curvature_grows_with_edge_weight():
    """Show that a large affinity does not mean a low curvature."""
    curvature = [
        compute_block_frc(*make_coarse_tokens([[1.0, 0, 0], [1, 1, 0], [1, edge_logit, 1]])).frc[
            0, 0, 2, 1
        ]
        for edge_logit in (0, 1, 8)
    ]
    assert curvature[0] < curvature[1] < curvature[2]


CURVATURE = [[0.0, 9, 9, 9], [1, 2, 9, 9], [3, 1, 2, 9], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("sparsity", "settings", "selected_blocks"),
    [
        pytest.param(0.5, {}, [[0], [1], [1, 2], [0, 3]], id="lowest"),
        pytest.param(0.5, {"keep": "highest"}, [[0], [1], [0, 2], [2, 3]], id="highest"),
        pytest.param(0.5, {"keep_diagonal": False}, [[0], [0], [1, 2], [0, 1]], id="no-diagonal"),
        pytest.param(0.99, {}, [[0], [1], [2], [3]], id="one-each"),
        pytest.param(0.0, {}, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]], id="all-causal"),
        pytest.param(0.5, {"causal": False}, [[0, 1], [0, 1], [1, 2], [0, 3]], id="bidirectional"),
        pytest.param(0.7, {}, [[0], [1], [2], [0, 3]], id="rounded-up"),
    ],
)
def test_block_mask_equals_hand_computed_mask(sparsity, settings, selected_blocks):
    assert select_blocks(CURVATURE, sparsity, **settings) == selected_blocks


@pytest.mark.parametrize("keep", ["lowest", "highest"])
def test_ties_select_lower_index(keep):
    assert select_blocks([[1.0] * 4] * 4, 0.5, keep=keep)[3] == [0, 3]


@parametrize_formula
@pytest.mark.parametrize("length", [1, 31, 32, 63, 65, 205, 640, 1024], ids=str)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.7, 0.95], ids=str)
def test_predictor_class_equals_plan_of_published_config(formula, length, sparsity):
    q, k, _ = draw_qkv(batch=2, q_length=length)
    block_mask = CoarseCurvaturePredictor(32, sparsity, formula=formula)(q, k)
    assert torch.equal(
        block_mask, make_published_plan(q, k, sparsity=sparsity, formula=formula).to_dense()
    )


@pytest.mark.parametrize("redundancy", [0.1, 1.0])
def test_redundancy_equals_config_field(redundancy):
    q, k, _ = draw_qkv(q_length=640)
    block_mask = CoarseCurvaturePredictor(32, 0.7, formula="additive", redundancy=redundancy)(q, k)
    plan = make_published_plan(q, k, sparsity=0.7, formula="additive", redundancy=redundancy)
    assert torch.equal(block_mask, plan.to_dense())


@parametrize_formula
def test_selection_follows_from_returned_diagnostics(formula):
    q, k, _ = draw_qkv(q_length=500)
    predictor = CoarseCurvaturePredictor(32, 0.7, formula=formula)
    block_mask, diagnostics = predictor(q, k, return_diagnostics=True)
    assert isinstance(diagnostics, BlockFrc)
    expected = compute_block_frc(*coarsen_qk_max_l2(q, k, 32), formula=formula)
    assert all(map(torch.equal, diagnostics, expected))
    assert torch.equal(predictor.select(diagnostics.frc), block_mask)


@parametrize_formula
def test_later_blocks_change_no_earlier_row(formula):
    q, k, _ = draw_qkv(q_length=320)
    predictors = [
        CoarseCurvaturePredictor(32, 0.7, formula=formula),
        AdaptiveCurvaturePredictor(32, formula=formula),
    ]
    expected = [predictor(q, k)[:, :, :6] for predictor in predictors]
    q, k = q.clone(), k.clone()
    q[:, :, 192:] *= -3
    k[:, :, 192:] += 5
    actual = [predictor(q, k)[:, :, :6] for predictor in predictors]
    assert all(map(torch.equal, expected, actual))


@parametrize_formula
def test_bidirectional_rows_keep_share_of_all_blocks(formula):
    q, k, _ = draw_qkv(q_length=320)
    block_mask = CoarseCurvaturePredictor(32, 0.75, formula=formula, causal=False)(q, k)
    assert (block_mask.sum(-1) == 3).all()
    assert block_mask.diagonal(dim1=2, dim2=3).all()
    assert block_mask.triu(1).any()


@pytest.mark.parametrize("predictor_class", [CoarseCurvaturePredictor, AdaptiveCurvaturePredictor])
def test_predictor_outputs_have_no_gradient(predictor_class):
    q, k, _ = draw_qkv(q_length=100)
    _, diagnostics = predictor_class(32)(
        q.requires_grad_(), k.requires_grad_(), return_diagnostics=True
    )
    assert not any(tensor.requires_grad for tensor in diagnostics)


def select_adaptive_rows(curvature, **settings):
    """Return the key blocks that the adaptive predictor selects for each row of ``curvature``."""
    predictor = AdaptiveCurvaturePredictor(**{"min_keep": 0.01, "max_keep": 1.0, **settings})
    block_mask = predictor.select(torch.tensor(curvature)[None, None])
    return [row.nonzero().flatten().tolist() for row in block_mask[0, 0]]


# the last row has mean 0, population standard deviation sqrt(2), and 0 on the diagonal
UNEVEN_CURVATURE = [[0.0] * 5, [0.0] * 5, [0.0] * 5, [0.0] * 5, [-2.0, -1, 1, 2, 0]]


@pytest.mark.parametrize(
    ("settings", "selected_blocks"),
    [
        pytest.param({"threshold": 1.0}, [0, 4], id="lowest"),
        pytest.param({"threshold": 1.0, "formula": "additive"}, [3, 4], id="highest"),
        pytest.param({"threshold": 0.7}, [0, 1, 4], id="lower-threshold"),
        pytest.param({"threshold": 1.0, "keep_diagonal": False}, [0], id="no-diagonal"),
        pytest.param({"threshold": 9.0}, [4], id="diagonal-only"),
        pytest.param({"threshold": 9.0, "min_keep": 0.6}, [0, 1, 4], id="at-least"),
        pytest.param({"threshold": -9.0, "max_keep": 0.6}, [0, 1, 4], id="at-most"),
        pytest.param({"threshold": -9.0}, [0, 1, 2, 3, 4], id="everything"),
    ],
)
def test_adaptive_row_selects_hand_computed_blocks(settings, selected_blocks):
    assert select_adaptive_rows(UNEVEN_CURVATURE, **settings)[-1] == selected_blocks


@pytest.mark.parametrize("curvature", [0.0, 0.1, 1234.5])
def test_constant_row_keeps_diagonal_only(curvature):
    assert select_adaptive_rows([[curvature] * 7] * 7, threshold=0.0) == [[row] for row in range(7)]


@parametrize_formula
@parametrize_causal
def test_adaptive_rows_stay_between_min_and_max_keep(formula, causal):
    q, k, _ = draw_qkv(q_length=1000)
    predictor = AdaptiveCurvaturePredictor(
        32, threshold=0.5, min_keep=0.2, max_keep=0.4, formula=formula, causal=causal
    )
    num_selected = predictor(q, k).sum(-1)
    num_visible = torch.arange(1, 33) if causal else torch.full((32,), 32)
    assert (num_selected >= (num_visible * 0.2).ceil()).all()
    assert (num_selected <= (num_visible * 0.4).ceil()).all()
    # rows select different numbers of blocks
    assert num_selected[..., -1].unique().numel() > 1


@pytest.fixture
def diagnostics():
    q, k, _ = draw_qkv(q_length=300)
    return CoarseCurvaturePredictor(32)(q, k, return_diagnostics=True)[1]


def test_figure_is_png_and_opens_no_pyplot_window(diagnostics, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures_before = pyplot.get_fignums()
    figure = visualize_frc_statistics(*diagnostics, path=tmp_path / "frc.png")
    assert (tmp_path / "frc.png").read_bytes().startswith(PNG_SIGNATURE)
    assert pyplot.get_fignums() == figures_before
    titles = [axes.get_title() for axes in figure.axes]
    assert "curvature against affinity" in titles and "curvature against triangles" in titles


@parametrize_causal
def test_histogram_counts_visible_blocks(diagnostics, causal):
    figure = visualize_frc_statistics(diagnostics.frc, causal=causal)
    num_counted = sum(bar.get_height() for bar in figure.axes[0].patches)
    assert num_counted == 6 * (10 * 11 // 2 if causal else 10 * 10)
    assert not any("against" in axes.get_title() for axes in figure.axes)


def test_missing_matplotlib_error_names_package(diagnostics, monkeypatch):
    # Python cannot import a module whose entry in sys.modules is None
    for module_name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module_name, None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        visualize_frc_statistics(diagnostics.frc)


def test_flops_estimate_equals_hand_computed_operations():
    actual = estimate_flops(4, head_dim=8, heads=3, block_size=2, sparsity=0.5)
    # 4 tokens are two blocks of 2; each row selects its diagonal block with 3 causal pairs
    assert actual == (3 * 4 * 4 * 8, 3 * 2 * 4 * 8, 3 * 2 * 8, 3 * 4 * 8 * 6, 3 * 4 * 8 * 10)
    assert actual.saving == actual.dense / sum(actual[:4])


@pytest.mark.parametrize("length", [64, 100, 640, 1000])
@pytest.mark.parametrize("sparsity", [0.0, 0.7, 0.95])
def test_causal_pairs_equal_plan_pairs(length, sparsity):
    q, k, _ = draw_qkv(q_length=length)
    num_attended, num_causal = make_published_plan(q, k, sparsity=sparsity).pairs()
    actual = estimate_flops(length, 16, heads=6, block_size=32, sparsity=sparsity)
    assert (actual.attention, actual.dense) == (4 * 16 * num_attended, 4 * 16 * num_causal)


@parametrize_causal
def test_sparsity_0_counts_dense_attention(causal):
    actual = estimate_flops(1000, 64, sparsity=0.0, causal=causal)
    assert actual.attention == actual.dense
    assert actual.saving < 1


SIX_HEADS_TENSOR = torch.zeros(1, 6, 64, 16)
FOUR_HEADS_TENSOR, NINE_TOKENS_TENSOR = SIX_HEADS_TENSOR[:, :4], SIX_HEADS_TENSOR[:, :, :9]
SQUARE_CURVATURE = SIX_HEADS_TENSOR[..., :16, :]
# (function, positional arguments, keyword arguments, pattern of the error message)
INVALID_CALLS = [
    (coarsen_qk_max_l2, (SIX_HEADS_TENSOR[0], SIX_HEADS_TENSOR), {}, "shape of q must be "),
    (coarsen_qk_max_l2, (SIX_HEADS_TENSOR, SIX_HEADS_TENSOR[0]), {}, "shape of k must be "),
    (coarsen_qk_max_l2, (SIX_HEADS_TENSOR[:, :, :0], SIX_HEADS_TENSOR), {}, "shape of q must be "),
    (coarsen_qk_max_l2, (SIX_HEADS_TENSOR, SIX_HEADS_TENSOR[..., :8]), {}, "shape of k must be "),
    (coarsen_qk_max_l2, (SIX_HEADS_TENSOR, FOUR_HEADS_TENSOR), {}, "the 4 heads of k, got 6"),
    (coarsen_qk_max_l2, (SIX_HEADS_TENSOR, SIX_HEADS_TENSOR, 0), {}, "block_size must .*, got 0"),
    (
        compute_block_frc,
        (SIX_HEADS_TENSOR, NINE_TOKENS_TENSOR),
        {},
        "k_coarse must have .* q_coarse .64., got 9",
    ),
    (
        compute_block_frc,
        (SIX_HEADS_TENSOR, FOUR_HEADS_TENSOR),
        {},
        "the 4 heads of k_coarse, got 6",
    ),
    (
        compute_block_frc,
        (SIX_HEADS_TENSOR, SIX_HEADS_TENSOR),
        {"formula": "ollivier"},
        "formula must be 'forman' or 'additive', got 'ollivier'",
    ),
    (
        compute_block_frc,
        (SIX_HEADS_TENSOR, SIX_HEADS_TENSOR),
        {"redundancy": 2},
        "redundancy must .*, got 2",
    ),
    (generate_block_mask_from_frc, (SIX_HEADS_TENSOR,), {}, "shape of frc must be "),
    (
        generate_block_mask_from_frc,
        (SQUARE_CURVATURE, 1.0),
        {},
        r"sparsity must be in \[0, 1\) .*, got 1.0",
    ),
    (
        generate_block_mask_from_frc,
        (SQUARE_CURVATURE,),
        {"keep": "best"},
        "keep must be 'lowest' or 'highest', got 'best'",
    ),
    (
        CoarseCurvaturePredictor(),
        (SIX_HEADS_TENSOR, NINE_TOKENS_TENSOR),
        {},
        "k must have as many tokens as q .64., got 9",
    ),
    (CoarseCurvaturePredictor, (6.4,), {}, "block_size must .*, got 6.4"),
    (CoarseCurvaturePredictor, (), {"sparsity": math.nan}, "sparsity must .*, got nan"),
    (CoarseCurvaturePredictor, (), {"formula": None}, "formula must .*, got None"),
    (AdaptiveCurvaturePredictor, (), {"threshold": math.inf}, "threshold must .*, got inf"),
    (AdaptiveCurvaturePredictor, (), {"min_keep": 0}, "min_keep must .*, got 0[.]"),
    (AdaptiveCurvaturePredictor, (), {"max_keep": 1.5}, "max_keep must .*, got 1.5"),
    (
        AdaptiveCurvaturePredictor,
        (),
        {"min_keep": 0.5, "max_keep": 0.1},
        "min_keep must be at most max_keep=0.1, got 0.5",
    ),
    (visualize_frc_statistics, (SIX_HEADS_TENSOR,), {}, "shape of frc must be "),
    (
        visualize_frc_statistics,
        (SQUARE_CURVATURE,),
        {"triangles": SIX_HEADS_TENSOR},
        "shape of triangles must be ",
    ),
    (estimate_flops, (0, 64), {}, "n must .*, got 0"),
    (estimate_flops, (64, 64), {"heads": 1.5}, "heads must .*, got 1.5"),
    (estimate_flops, (64, 64), {"sparsity": -1}, "sparsity must .*, got -1"),
]


@pytest.mark.parametrize(
    ("published_function", "arguments", "settings", "error_pattern"), INVALID_CALLS
)
def test_invalid_arguments_of_published_classes_raise(
    published_function, arguments, settings, error_pattern
):
    with pytest.raises(ValueError, match=error_pattern):
        published_function(*arguments, **settings)


def test_published_classes_example_runs(tmp_path, capsys):
    figure_path = tmp_path / "new" / "published.png"
    runpy.run_path(str(EXAMPLE_PATH))["main"](["--out", str(figure_path)])
    lines = capsys.readouterr().out.splitlines()
    line_of_formula = {
        line.split(" keeps ")[0].strip(): line for line in lines if " keeps " in line
    }
    assert "the bridge in 0 of 4 heads" in line_of_formula["forman"]
    assert "the bridge in 4 of 4 heads" in line_of_formula["additive"]
    assert figure_path.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 205])
def test_coarse_tokens_belong_to_their_block(length):
    q, k, _ = draw_qkv(batch=2, heads=4, kv_heads=2, q_length=length)
    coarse_qk = coarsen_qk_max_l2(q, k, 64)
    for x, actual in zip((q, k), coarse_qk, strict=True):
        assert actual.shape == (2, x.shape[1], math.ceil(length / 64), 16)
        for block in range(actual.shape[2]):
            norms = x[:, :, block * 64 : (block + 1) * 64].norm(dim=-1)
            torch.testing.assert_close(actual[:, :, block].norm(dim=-1), norms.amax(-1))


@parametrize_formula
def test_grouped_kv_heads_equal_repeated_kv_heads(formula):
    q, k, _ = draw_qkv(heads=6, kv_heads=2, q_length=8)
    frc_of_kv_heads = compute_block_frc(q, k, formula=formula)
    frc_of_repeated_heads = compute_block_frc(q, k.repeat_interleave(3, dim=1), formula=formula)
    for actual, expected in zip(frc_of_kv_heads, frc_of_repeated_heads, strict=True):
        assert actual.shape == (1, 6, 8, 8)
        torch.testing.assert_close(actual, expected)
