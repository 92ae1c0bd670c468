"""``speed attention``: rows computed by hand, rejected kernels, baselines, and sentences."""

import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from bench import FakeBench, format_tables, measure_sample

from cab_hf import engines
from cab_hf.call import layout
from cab_hf.engines import REFERENCE
from cab_hf.eval.speed import attention, dense
from cab_hf.eval.speed.attention import Attention, Settings
from cab_hf.ops import reference
from cab_hf.plan import BlockPlan, KeyRanges

FORWARD_CASE = {"length": 192, "head_dim": 16, "direction": "forward", "blocks": "32x16"}
FORWARD_CASE |= {"layout": "whole", "budget": 0.2}


def measure_case(case, bench=None, **setting_fields):
    """Return the sample of a case; ``setting_fields`` are settings of a tiny layer."""
    return measure_sample(Attention, make_tiny_settings(**setting_fields), case, bench)


def make_report_rows(samples):
    """Return the report rows of samples."""
    return Attention.rows(samples, {})


def make_tiny_settings(**setting_fields):
    """Return settings of a layer with few heads and channels."""
    return Settings(
        device="cpu", heads=4, kv_heads=2, head_dims=(16,), seconds=0.0, **setting_fields
    )


def make_sample(length, ms, baselines=None, direction="forward", budget=0.1, **replaced_fields):
    """Return a sample with the fields of `Attention.measure`; ``replaced_fields`` replaces fields.

    The selected blocks contain half of all causal pairs.

    Args:
        length: tokens of the sequence.
        ms: time of attention.
        baselines: times of dense kernels, in ms.
        direction: "forward" or "backward".
        budget: max_density of the case.
    """
    case_fields = {"length": length, "head_dim": 8, "direction": direction, "budget": budget}
    num_pairs = length**2 / 4
    shape_fields = {"batch": 1, "heads": 2, "blocks": "32x16", **Attention.ADDED_DEFAULTS}
    density_fields = {"density": 0.5, "listed_pairs": 2 * num_pairs}
    selects_blocks = direction == "forward" and budget != 1
    time_fields = {
        "attend_ms": {"triton": ms},
        "total_ms": {"triton": ms + 1} if selects_blocks else {},
    }
    cost_fields = {
        "predict_ms": 1.0,
        "total_eager_ms": time_fields["total_ms"],
        "peak_mib": {},
        "labels": {},
    }
    outcome_fields = {
        "baselines": baselines or {},
        "not_measured": {},
        "without_graph": {},
        "error": None,
    }
    return (
        case_fields
        | shape_fields
        | density_fields
        | time_fields
        | cost_fields
        | outcome_fields
        | replaced_fields
    )


def test_pairs_and_density_by_hand():
    # the 80 queries are in blocks of 32, 32 and 16, which attend to 2, 4 and 5 blocks of 16 keys
    plan = BlockPlan.causal(KeyRanges.causal(1, 80, 80, "cpu"), 2, 32, 16)
    plan_fields = attention.count_pairs(plan, num_heads=4)
    assert plan_fields["density"] == 1
    assert plan_fields["listed_pairs"] == 4 * (2 + 4 + 5) * 32 * 16


def test_rates_by_hand():
    forward_row, backward_row = make_report_rows(
        [make_sample(1000, 2.0, {"FA3": 4.0}), make_sample(1000, 2.0, {"FA4": 4.0}, "backward")]
    )
    # 4 operations per pair and channel, and 500,000 pairs in the selected blocks of two heads
    assert forward_row["tflops"]["triton"] == pytest.approx(4 * 8 * 500_000 / 2e-3 / 1e12)
    assert forward_row["tflops"]["FA3"] == pytest.approx(4 * 8 * 2 * 1000**2 / 2 / 4e-3 / 1e12)
    assert (forward_row["engine"], forward_row["ms"], forward_row["ratio"]) == ("triton", 3.0, 0.75)
    assert backward_row["tflops"]["triton"] == pytest.approx(2.5 * forward_row["tflops"]["triton"])
    assert (backward_row["ms"], backward_row["ratio"]) == (2.0, 0.5)
    # the ratio is the time of CAB divided by the time of the fastest baseline
    (row,) = make_report_rows([make_sample(1000, 2.0, {"FA3": 4.0, "FA4": 2.0})])
    assert (row["baseline"], row["ratio"]) == ("FA4", 1.5)


def test_dense_attention_is_measured_once_for_all_budgets(monkeypatch):
    backward_flags = []
    monkeypatch.setattr(
        dense, "measure_baselines", lambda *_, backward, **__: backward_flags.append(backward) or {}
    )
    bench, settings = FakeBench(), make_tiny_settings(lengths=(96,), densities=(0.2, 1.0))
    for case in settings.list_requested_cases():
        measure_sample(Attention, settings, case, bench)
    assert backward_flags == [False, True]


def test_graph_capture_error_is_reported():
    row = measure_case(
        FORWARD_CASE, FakeBench("it waits")
    )  # the reason why a graph cannot be captured
    assert set(row["without_graph"]) >= {"predicting", "reference", "predicting and reference"}
    line = "| no CUDA graph, so its time is eager | it waits | 192 | predicting, reference"
    assert line in format_tables(Attention, make_report_rows([row]))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sinks_are_included_in_time(monkeypatch, direction):
    sink_shapes = []

    def record_shape_and_apply_sinks(out, lse, sinks):
        sink_shapes.append(sinks.shape)
        return reference.rescale_for_sinks(out, lse, sinks)

    monkeypatch.setattr(layout, "rescale_for_sinks", record_shape_and_apply_sinks)
    row = measure_case(FORWARD_CASE | {"direction": direction}, sinks=True)
    assert row["attend_ms"] and not row["not_measured"]
    assert set(sink_shapes) == {(4,)}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_composite_engine_is_timed(monkeypatch, direction):
    """The function of an engine may be a `partial` that wraps a kernel, as on a GPU."""

    def call_kernel(kernel, q, k, v, plan, **options):
        return kernel(q, k, v, plan, **options)

    composite_kernel = partial(call_kernel, reference.attention)
    engine = REFERENCE._replace(load=lambda: composite_kernel)
    monkeypatch.setitem(engines.ENGINES, "reference", (engine,))
    row = measure_case(FORWARD_CASE | {"direction": direction})
    assert row["attend_ms"] and not row["not_measured"]


@pytest.mark.parametrize(
    ("change_output", "error"),
    [
        (lambda out: torch.zeros_like(out), "wrong by 1 (relative)"),
        (lambda out: out.roll(1, dims=1), "wrong by"),
        (lambda out: out * torch.nan, "wrong by nan"),
    ],
    ids=["zeros", "other heads", "nan"],
)
def test_wrong_output_is_not_timed(monkeypatch, change_output, error):
    reference_attention = reference.attention

    def attend_with_changed_output(q, k, v, plan, **options):
        return change_output(reference_attention(q, k, v, plan, **options))

    monkeypatch.setattr(reference, "attention", attend_with_changed_output)
    row = measure_case(FORWARD_CASE)
    assert row["attend_ms"] == row["total_ms"] == {}
    assert (
        error in row["not_measured"]["reference"] and "queries" in row["not_measured"]["reference"]
    )
    assert row["baselines"] == {"SDPA": 2.0}


def test_wrong_gradient_is_not_timed(monkeypatch):
    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.flip(-1)

    reference_attention = reference.attention

    def attend_with_wrong_gradient(q, k, v, plan, **options):
        # calls 1 and 2 are those of the engine; later calls compute the float32 reference
        attend_with_wrong_gradient.num_calls += 1
        out = reference_attention(q, k, v, plan, **options)
        return WrongGradient.apply(out) if attend_with_wrong_gradient.num_calls < 3 else out

    attend_with_wrong_gradient.num_calls = 0
    monkeypatch.setattr(reference, "attention", attend_with_wrong_gradient)
    row = measure_case(FORWARD_CASE | {"direction": "backward"})
    assert row["attend_ms"] == {}
    assert "in the gradient of q" in row["not_measured"]["reference"]


def test_exact_rows_equal_full_output():
    settings = make_tiny_settings()
    q, k, v = settings.draw_random_heads(300, 16, torch.device("cpu"), "qkv")
    plan = settings.make_planner(FORWARD_CASE)(q, k, KeyRanges.causal(1, 300, 300, "cpu"))
    full_output = REFERENCE.attention(q, k, v, plan, scale=0.25)
    for start, stop in ((0, 32), (100, 150), (268, 300)):
        exact_rows = dense.compute_exact_attention(
            q, k, v, plan, start_query=start, stop_query=stop
        )
        torch.testing.assert_close(exact_rows, full_output[:, :, start:stop])


SDPA_BASELINE = dense.CPU_BASELINES["SDPA"]


def time_baselines(baselines, has_backward=False, head_dim=16):
    """Return the times of ``baselines`` by `dense.measure_baselines`."""
    q, k, v = make_tiny_settings().draw_random_heads(300, head_dim, torch.device("cpu"), "qkv")
    return dense.measure_baselines(q, k, v, head_dim**-0.5, FakeBench(), has_backward, baselines)


def test_unsupported_head_dim_is_reported():
    narrow_baseline = dense.Baseline(lambda: None, head_dims=dense.FLASH_HEAD_DIMS)
    results_by_field = time_baselines({"FA3": narrow_baseline, "SDPA": SDPA_BASELINE}, head_dim=320)
    assert results_by_field["not_measured"] == {"FA3": "it supports head dims 1 to 256, not 320"}
    assert results_by_field["baselines"] == {"SDPA": 2.0}


@pytest.mark.parametrize("has_backward", [False, True])
def test_kv_heads_are_repeated_for_kernels_without_gqa(has_backward):
    kv_heads = []

    def attend(q, k, v, scale):
        kv_heads.append((k.shape[1], v.shape[1]))
        return SDPA_BASELINE.load_kernel()(q, k, v, scale)

    results_by_field = time_baselines(
        {"efficient": dense.Baseline(lambda: attend, supports_gqa=False)}, has_backward
    )
    assert results_by_field["not_measured"] == {} and set(kv_heads) == {(4, 4)}


def test_baseline_with_wrong_gradient_is_not_timed():
    def attend(q, k, v, scale):
        return SDPA_BASELINE.load_kernel()(q, k, v.detach(), scale) + 0 * v.repeat_interleave(2, 1)

    wrong_baselines = {"FA4": dense.Baseline(lambda: attend)}
    assert time_baselines(wrong_baselines)["baselines"] == {"FA4": 2.0}
    error = time_baselines(wrong_baselines, has_backward=True)["not_measured"]["FA4"]
    assert "in the gradient of v at 300 tokens" in error


@pytest.mark.parametrize("has_fallback", [False, True])
def test_ffpa_fallback_is_not_measured(monkeypatch, has_fallback):
    def attend(q, k, v, is_causal, scale, enable_gqa, backend):
        assert is_causal and enable_gqa and backend == "cutedsl"
        return SDPA_BASELINE.load_kernel()(q, k, v, scale)

    class Meta:
        from_kwargs = classmethod(lambda cls, backend: cls())
        fallback = staticmethod(lambda q, k, mask, dropout: has_fallback)

    package, functional = ModuleType("ffpa_attn"), ModuleType("ffpa_attn.functional")
    package.ffpa_attn_func, functional.FFPAAttnMeta = attend, Meta
    monkeypatch.setitem(sys.modules, "ffpa_attn", package)
    monkeypatch.setitem(sys.modules, "ffpa_attn.functional", functional)
    results_by_field = time_baselines({"ffpa CuTe": dense.GPU_BASELINES["ffpa CuTe"]}, head_dim=320)
    if has_fallback:
        assert results_by_field["not_measured"] == {"ffpa CuTe": "it would call SDPA instead"}
    else:
        assert results_by_field["baselines"] == {"ffpa CuTe": 2.0}


@pytest.mark.parametrize(
    ("lengths_and_ratios", "length", "message"),
    [
        # the ratio halves if the length doubles
        ([(1000, 2.0), (4000, 0.5)], 2000, "from about 2,000 tokens on"),
        ([(1000, 0.9), (2000, 2.0), (8000, 0.5)], 4000, "from about 4,000"),
        ([(1000, 1.0), (2000, 0.5)], 1000, "from about 1,000"),
        ([(1000, 0.5), (2000, 0.4)], 1000, "at every length from 1,000"),
        ([(1000, 0.5), (2000, 1.0)], None, "no length up to 2,000"),
    ],
    ids=["between two lengths", "last crossing", "at a length", "always", "never"],
)
def test_break_even_length_is_interpolated(lengths_and_ratios, length, message):
    assert dense.find_break_even(lengths_and_ratios) == (
        None if length is None else pytest.approx(length)
    )
    rows = [{"length": length, "ratio": ratio} for length, ratio in lengths_and_ratios]
    assert message in dense.describe_break_even(rows)


def test_budgeted_config_has_max_density_and_zero_threshold():
    config = make_tiny_settings().make_config_for_case(FORWARD_CASE)
    assert (config.max_density, config.mass_threshold, config.min_length) == (0.2, 0.0, 0)
    assert (config.query_block, config.key_block) == (32, 16)
    settings = make_tiny_settings(cab=("mass_threshold=0.08", "typical_queries=4"))
    config = settings.make_config_for_case(FORWARD_CASE)
    assert (config.mass_threshold, config.typical_queries) == (0.08, 4)
