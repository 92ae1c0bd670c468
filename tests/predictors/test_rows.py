"""`RowsPredictor` under torch.compile, its settings, and its line in `describe`."""

from dataclasses import replace

import pytest
import torch
from selecting import loud
from tiny import tiny_model

import cab_hf
from cab_hf import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, RowsPredictor

SMALL = CabConfig(
    32, 16, predictor="rows", outlier_queries=4, typical_queries=4,
    typical_key_stride=1, mass_threshold=0.08, share_threshold=0.3,
)  # fmt: skip


def test_torch_compile_selects_the_same_blocks():
    q, k = loud(q_length=205)
    ranges = KeyRanges.causal(1, 205, 205, "cpu")

    def choose(q, k, end):
        own = replace(ranges, sequence_end=end)
        plan = RowsPredictor(SMALL)(q, k, LayerContext(own, 0.25))
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
def test_invalid_settings_raise(fields, words):
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **fields)


def test_describe_names_samples_and_thresholds():
    model = tiny_model()
    cab_hf.apply_cab(model, SMALL)
    assert cab_hf.describe(model).startswith(
        "cab: predictor rows (4 outlier queries and 4 typical queries, mass_threshold 0.08, "
        "share_threshold 0.3), blocks 32 x 16"
    )


def test_check_finite_names_the_tensor():
    q, k = loud(q_length=64)
    k[0, 0, 3, 1] = torch.inf
    predictor = RowsPredictor(replace(SMALL, check_finite=True))
    with pytest.raises(ValueError, match="k must be finite, got infinite or NaN values"):
        predictor(q, k, LayerContext(KeyRanges.causal(1, 64, 64, "cpu"), 1.0))
