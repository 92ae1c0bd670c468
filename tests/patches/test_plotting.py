"""`plot_plan` draws the blocks that a layer attends to, and raises for invalid arguments."""

import sys

import numpy
import pytest
import torch
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model

import cab_hf

pytest.importorskip("matplotlib")
PROMPT_TOKENS = 300
# axis limits of a panel (left, right, bottom, top), in tokens: PROMPT_TOKENS rounded up to whole
# blocks of 16 keys and 32 queries
PANEL_EXTENT_TOKENS = [0, 304, 320, 0]


@pytest.fixture
def model():
    return cab_hf.apply_cab(make_tiny_model(), SPARSE_CONFIG)


def count_attended_and_causal_pairs(panel):
    """Return (number of attended token pairs, number of causal pairs) of a panel.

    Attended pairs are a mean over heads, because the colour of a block is a mean over heads.
    """
    share_of_heads = torch.from_numpy(numpy.ma.getdata(panel.images[0].get_array())).nan_to_num()
    share_of_token_pairs = share_of_heads.repeat_interleave(32, 0)[
        :PROMPT_TOKENS
    ].repeat_interleave(16, 1)[:, :PROMPT_TOKENS]
    return float(share_of_token_pairs.tril().sum()), PROMPT_TOKENS * (PROMPT_TOKENS + 1) / 2


@pytest.mark.parametrize("setting_changes", [{}, {"predictor": "cascade", "anchors": (0, 2)}])
def test_panel_of_all_heads_has_density_of_layer(model, setting_changes):
    cab_hf.apply_cab(model, **setting_changes)
    input_ids = draw_token_ids(1, PROMPT_TOKENS)
    with torch.no_grad():
        model(input_ids)
    density = cab_hf.stats(model, reset=True)[1]["density"]
    panel = cab_hf.plot_plan(model, input_ids, layer=1).axes[0]
    assert [row["density"] is None for row in cab_hf.stats(model)] == [False, True, True]
    num_attended, num_causal = count_attended_and_causal_pairs(panel)
    assert 0.1 < density < 0.9 and num_attended / num_causal == pytest.approx(density, abs=1e-6)
    assert f"density {density:.2f}" in panel.get_title()
    assert panel.images[0].get_extent() == PANEL_EXTENT_TOKENS


def test_mean_of_head_panels_equals_panel_of_all_heads(model):
    input_ids = draw_token_ids(1, PROMPT_TOKENS)
    panels = cab_hf.plot_plan(model, input_ids, layer=2, heads=range(6)).axes
    assert [panel.get_title().split("\n")[0] for panel in panels] == [
        f"layer 2, head {head}" for head in range(6)
    ]
    num_attended, _ = count_attended_and_causal_pairs(
        cab_hf.plot_plan(model, input_ids, layer=2).axes[0]
    )
    assert sum(count_attended_and_causal_pairs(panel)[0] for panel in panels) / 6 == pytest.approx(
        num_attended
    )
    images = {panel.images[0].get_array().tobytes() for panel in panels}
    assert len(images) > 1


def test_invisible_pairs_are_blank(model):
    (panel, _) = cab_hf.plot_plan(model, draw_token_ids(1, PROMPT_TOKENS), layer=0).axes
    image = numpy.ma.getdata(panel.images[0].get_array())
    # the first query block (32 queries) sees two key blocks of 16; later blocks are not drawn
    assert numpy.isnan(image[0]).tolist() == [False] * 2 + [True] * 17
    # the last query block attends to all keys
    assert (image[-1] == 1).all()


@pytest.mark.parametrize(
    ("plot_arguments", "setting_changes", "error_pattern"),
    [
        ({"layer": 3}, {}, r"index of an attention layer, one of \[0, 1, 2\], got 3"),
        ({"input_ids": draw_token_ids(2, PROMPT_TOKENS)}, {}, "must be the tokens of one prompt"),
        ({"heads": [6]}, {}, "query heads, 0 to 5"),
        ({"heads": []}, {}, "query heads, 0 to 5"),
        *(
            ({"heads": heads}, {}, "heads must be a list of query heads, 0 to 5, got ")
            for heads in (1, torch.tensor(1), numpy.int64(1), 1.5, [1.0], [True], ["1"], "12")
        ),
        ({"heads": torch.tensor([True])}, {}, "heads must be a list of query heads.*, got "),
        ({"layer": True}, {}, "layer must be the index .*, got True"),
        ({"layer": 1.0}, {}, r"layer must be the index .*, got 1\.0"),
        ({"layer": torch.tensor([0, 1])}, {}, r"layer must be .*, got a tensor of shape \(2,\)"),
        (
            {"input_ids": [[1, 2]]},
            {},
            r"input_ids must be the tokens of one prompt.*, got \[\[1, 2\]\]",
        ),
        (
            {"input_ids": draw_token_ids(1, 0)},
            {},
            r"input_ids must be .*, got a tensor of shape \(1, 0\)",
        ),
        ({"input_ids": draw_token_ids(1, 9).float()}, {}, "must be a tensor .*, got torch.float32"),
        (
            {"input_ids": draw_token_ids(1, 9) > 1},
            {},
            "input_ids must be a tensor .*, got torch.bool",
        ),
        (
            {"input_ids": draw_token_ids(1, 9) - 99},
            {},
            "input_ids must be tokens that the .*, got -",
        ),
        (
            {"input_ids": draw_token_ids(1, 9) + 999},
            {},
            "input_ids must be tokens that the .*, got 1",
        ),
        ({}, {"min_length": 500}, "shorter than min_length=500"),
        ({}, {"dense_layers": (1,)}, "layer must attend sparsely, got 1, .*: in dense_layers"),
    ],
)
def test_invalid_plot_arguments_raise(model, plot_arguments, setting_changes, error_pattern):
    cab_hf.apply_cab(model, **setting_changes)
    plot_arguments = {"input_ids": draw_token_ids(1, PROMPT_TOKENS), "layer": 1} | plot_arguments
    with pytest.raises(ValueError, match=error_pattern):
        cab_hf.plot_plan(model, **plot_arguments)


@pytest.mark.parametrize(
    ("layer", "heads", "dtype"),
    [
        (torch.tensor(1), torch.tensor([1, 2]), torch.int32),
        (numpy.int64(1), numpy.array([1, 2]), torch.uint8),
        (1, (numpy.int32(1), torch.tensor(2)), torch.int16),
    ],
)
def test_integers_of_other_libraries_are_accepted(model, layer, heads, dtype):
    input_ids = draw_token_ids(1, PROMPT_TOKENS)
    actual = cab_hf.plot_plan(model, input_ids.to(dtype), layer=layer, heads=heads).axes
    expected = cab_hf.plot_plan(model, input_ids, layer=1, heads=[1, 2]).axes
    assert [panel.get_title() for panel in actual] == [panel.get_title() for panel in expected]


def test_model_without_cab_raises():
    with pytest.raises(ValueError, match="attn_implementation must be cab .*, got 'sdpa'"):
        cab_hf.plot_plan(make_tiny_model(), draw_token_ids(1, PROMPT_TOKENS), layer=1)


def test_missing_matplotlib_error_names_extra(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        cab_hf.plot_plan(model, draw_token_ids(1, PROMPT_TOKENS), layer=0)
