"""Fast scores on a CPU select the blocks of the reference, except for rounding."""

from dataclasses import replace

import pytest
import torch
from selecting import arrange_in_layout, draw_peaked_qk, draw_topic_qk

from cab_hf import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.selection import cpu, reference
from cab_hf.selection.reference import ScoreOptions

CONFIG = CabConfig(
    query_block=32,
    key_block=16,
    outlier_queries=4,
    typical_queries=8,
    mass_threshold=0.05,
)
LAYOUTS = ("causal", "padded", "packed", "chunk", "in-place")
# fraction of blocks that may differ, because rounding moves a value across a threshold
MAX_DIFFERING_FRACTION = 1e-3


def select_blocks_by_reference_and_cpu(q, k, key_ranges, config, **logit_options):
    """Return selected blocks, bool [B, H, M_q, M_k], by scores of the reference and of `cpu`."""
    score_options = ScoreOptions(q.shape[-1] ** -0.5, **logit_options)
    return [
        reference.select_blocks(
            q,
            k,
            ranges=key_ranges,
            config=config,
            score_options=score_options,
            sampled_scores_fn=sampled_scores_fn,
        )
        for sampled_scores_fn in (None, cpu.compute_sampled_scores)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("config_fields", "logit_options"),
    [
        pytest.param({}, {"channels": (1, 3, 5, 7)}, id="channels"),
        pytest.param({}, {"sinks": torch.linspace(-1, 3, 6)}, id="sinks"),
        pytest.param({"typical_key_stride": 16}, {"softcap": 5.0}, id="softcap"),
        pytest.param({}, {"softcap": 0.25}, id="low-softcap"),
        pytest.param({"outlier_queries": 0, "typical_key_stride": 1}, {}, id="typical"),
        pytest.param({"outlier_queries": 32, "max_density": 0.3}, {}, id="all-queries"),
        pytest.param({"key_block": 32}, {}, id="wide-keys"),
    ],
)
def test_cpu_scores_select_blocks_of_reference(layout, config_fields, logit_options):
    shape = {"length": 740 if layout == "chunk" else 640, "heads": 6, "kv_heads": 2, "dim": 16}
    q, k = draw_topic_qk("cpu", q_length=640, batch=2, dtype=torch.float32, **shape)
    q, k, key_ranges = arrange_in_layout(layout, q, k, 32)
    config = replace(CONFIG, **config_fields)
    expected, actual = select_blocks_by_reference_and_cpu(
        q, k, key_ranges=key_ranges, config=config, **logit_options
    )
    assert 0.05 < expected.float().mean() < 0.9
    assert (expected != actual).float().mean() <= MAX_DIFFERING_FRACTION


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cpu_scores_of_the_small_sample_select_blocks_of_reference(monkeypatch, layout):
    q, k = draw_topic_qk("cpu", 640, batch=2, heads=2, kv_heads=1, dim=16, dtype=torch.float32)
    q, k, key_ranges = arrange_in_layout(layout, q, k, 32)
    full_sample_blocks, _ = select_blocks_by_reference_and_cpu(
        q, k, key_ranges=key_ranges, config=CONFIG
    )
    monkeypatch.setattr(reference, "MAX_KEYS_AT_FULL_SAMPLE", 128)
    expected, actual = select_blocks_by_reference_and_cpu(
        q, k, key_ranges=key_ranges, config=CONFIG
    )
    assert not torch.equal(expected, full_sample_blocks)
    assert (expected != actual).float().mean() <= MAX_DIFFERING_FRACTION


@pytest.mark.parametrize(
    "constant_name", ["MAX_LOGITS_PER_PRODUCT", "MAX_SAMPLES_PER_GROUP", "MAX_GRAM_ELEMENTS"]
)
def test_memory_bounds_of_cpu_scores_do_not_change_selection(monkeypatch, constant_name):
    monkeypatch.setattr(cpu, constant_name, 1)
    q, k = draw_topic_qk("cpu", 640, heads=6, kv_heads=2, dim=16, dtype=torch.float32)
    expected, actual = select_blocks_by_reference_and_cpu(
        q, k, KeyRanges.causal(1, 640, 640, "cpu"), CONFIG
    )
    assert (expected != actual).float().mean() <= MAX_DIFFERING_FRACTION


@pytest.mark.parametrize("layout", ["causal", "in-place"])
@pytest.mark.parametrize("bad_value", [torch.nan, torch.inf])
def test_nonfinite_query_selects_blocks_of_reference(layout, bad_value):
    q, k = draw_topic_qk("cpu", 640, heads=6, kv_heads=2, dim=16, dtype=torch.float32)
    q[0, 1, [50, 302, 639], 3] = bad_value
    q, k, key_ranges = arrange_in_layout(layout, q, k, 32)
    expected, actual = select_blocks_by_reference_and_cpu(
        q, k, key_ranges=key_ranges, config=CONFIG
    )
    assert (expected != actual).float().mean() <= MAX_DIFFERING_FRACTION


@pytest.mark.parametrize("bad_value", [torch.nan, torch.inf])
def test_outliers_of_nonfinite_queries_equal_reference(bad_value):
    q, _ = draw_peaked_qk(q_length=205, heads=2, kv_heads=1)
    q[0, 1, [50, 100, 101], 3] = bad_value
    key_ranges = KeyRanges.causal(1, 205, 205, "cpu")
    expected = reference.sample_outlier_queries(q, key_ranges, 32, 4)
    assert torch.equal(cpu.sample_outlier_queries(q, key_ranges, 32, 4), expected)


@pytest.mark.parametrize("length", [205, 256, 31])
@pytest.mark.parametrize("samples_per_block", [4, 32])
def test_outliers_equal_reference(length, samples_per_block):
    q, _ = draw_peaked_qk(q_length=length, heads=2, kv_heads=1)
    key_ranges = KeyRanges.causal(1, length, length, "cpu")
    expected = reference.sample_outlier_queries(q, key_ranges, 32, samples_per_block)
    assert torch.equal(cpu.sample_outlier_queries(q, key_ranges, 32, samples_per_block), expected)


def test_bfloat16_is_scored_in_float32():
    q, k = draw_topic_qk("cpu", 640, heads=6, kv_heads=2, dim=16)
    expected, actual = select_blocks_by_reference_and_cpu(
        q, k, KeyRanges.causal(1, 640, 640, "cpu"), CONFIG
    )
    assert (expected != actual).float().mean() <= MAX_DIFFERING_FRACTION
