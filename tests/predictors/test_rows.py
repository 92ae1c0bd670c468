"""`RowsPredictor` under torch.compile, its settings, and its line in `describe`."""

from dataclasses import replace

import pytest
import torch
from selecting import draw_peaked_qk
from tiny import make_tiny_model

import cab_hf
from cab_hf import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, RowsPredictor

SMALL_BLOCKS_CONFIG = CabConfig(
    32, 16, predictor="rows", outlier_queries=4, typical_queries=4,
    typical_key_stride=1, mass_threshold=0.08, share_threshold=0.3,
)  # fmt: skip


def test_torch_compile_selects_the_same_blocks():
    q, k = draw_peaked_qk(q_length=205)
    key_ranges = KeyRanges.causal(1, 205, 205, "cpu")

    def select_lists(q, k, sequence_end):
        ranges_with_end = replace(key_ranges, sequence_end=sequence_end)
        plan = RowsPredictor(SMALL_BLOCKS_CONFIG)(q, k, LayerContext(ranges_with_end, 0.25))
        return plan.full.counts, plan.full.indices, plan.partial.counts, plan.partial.indices

    for sequence_end in (None, torch.tensor([[170]], dtype=torch.int32)):
        expected = select_lists(q, k, sequence_end)
        actual = torch.compile(select_lists, fullgraph=True)(q, k, sequence_end)
        for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
            assert torch.equal(
                actual_tensor[..., : expected_tensor.shape[-1]]
                if actual_tensor.ndim > 3
                else actual_tensor,
                expected_tensor,
            )


@pytest.mark.parametrize(
    ("config_fields", "error_pattern"),
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
def test_invalid_config_of_rows_predictor_raises(config_fields, error_pattern):
    with pytest.raises(ValueError, match=error_pattern):
        replace(SMALL_BLOCKS_CONFIG, **config_fields)


def test_describe_names_samples_and_thresholds():
    model = make_tiny_model()
    cab_hf.apply_cab(model, SMALL_BLOCKS_CONFIG)
    assert cab_hf.describe(model).startswith(
        "cab: predictor rows (4 outlier queries and 4 typical queries, mass_threshold 0.08, "
        "share_threshold 0.3), blocks 32 x 16"
    )


def test_check_finite_names_the_tensor():
    q, k = draw_peaked_qk(q_length=64)
    k[0, 0, 3, 1] = torch.inf
    predictor = RowsPredictor(replace(SMALL_BLOCKS_CONFIG, check_finite=True))
    with pytest.raises(ValueError, match="k must be finite, got infinite or NaN values"):
        predictor(q, k, LayerContext(KeyRanges.causal(1, 64, 64, "cpu"), 1.0))
