"""``speed attention``: rows computed by hand, rejected kernels, baselines, and sentences."""

import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from bench import FakeBench, sample_of, shown

from cab_hf import engines
from cab_hf.call import layout
from cab_hf.engines import REFERENCE
from cab_hf.eval.speed import attention, dense
from cab_hf.eval.speed.attention import Attention, Settings
from cab_hf.ops import reference
from cab_hf.plan import BlockPlan, KeyRanges

KEY = {"length": 192, "head_dim": 16, "direction": "forward", "blocks": "32x16"}
KEY |= {"layout": "whole", "budget": 0.2}


def measured(case, bench=None, **fields):
    """Return the sample of a case, measured with the settings ``fields`` of a tiny layer."""
    return sample_of(Attention, tiny_settings(**fields), case, bench)


def rows_of(samples):
    """Return the report rows of samples."""
    return Attention.rows(samples, {})


def tiny_settings(**fields):
    """Return settings of a layer with few heads and channels."""
    return Settings(device="cpu", heads=4, kv_heads=2, head_dims=(16,), seconds=0.0, **fields)


def sample(length, ms, baselines=None, direction="forward", budget=0.1, **result):
    """Return a sample with the fields of `Attention.measure`; ``result`` replaces fields.

    The selected blocks contain half of all causal pairs.

    Args:
        length: tokens of the sequence.
        ms: time of attention.
        baselines: times of dense kernels, in ms.
        direction: "forward" or "backward".
        budget: max_density of the case.
    """
    key = {"length": length, "head_dim": 8, "direction": direction, "budget": budget}
    pairs = length**2 / 4
    shape = {"batch": 1, "heads": 2, "blocks": "32x16", **Attention.ADDED}
    counted = {"density": 0.5, "listed_pairs": 2 * pairs}
    selects = direction == "forward" and budget != 1
    times = {"attend_ms": {"triton": ms}, "total_ms": {"triton": ms + 1} if selects else {}}
    costs = {"predict_ms": 1.0, "total_eager_ms": times["total_ms"], "peak_mib": {}, "labels": {}}
    fields = {"baselines": baselines or {}, "not_measured": {}, "without_graph": {}, "error": None}
    return key | shape | counted | times | costs | fields | result


# --- the row


def test_pairs_and_density_by_hand():
    # the 80 queries are in blocks of 32, 32 and 16, which attend to 2, 4 and 5 blocks of 16 keys
    plan = BlockPlan.causal(KeyRanges.causal(1, 80, 80, "cpu"), 2, 32, 16)
    counted = attention.counted(plan, heads=4)
    assert counted["density"] == 1
    assert counted["listed_pairs"] == 4 * (2 + 4 + 5) * 32 * 16


def test_rates_by_hand():
    forward, backward = rows_of(
        [sample(1000, 2.0, {"FA3": 4.0}), sample(1000, 2.0, {"FA4": 4.0}, "backward")]
    )
    # 4 operations per pair and channel, and 500,000 pairs in the selected blocks of two heads
    assert forward["tflops"]["triton"] == pytest.approx(4 * 8 * 500_000 / 2e-3 / 1e12)
    assert forward["tflops"]["FA3"] == pytest.approx(4 * 8 * 2 * 1000**2 / 2 / 4e-3 / 1e12)
    assert (forward["engine"], forward["ms"], forward["ratio"]) == ("triton", 3.0, 0.75)
    assert backward["tflops"]["triton"] == pytest.approx(2.5 * forward["tflops"]["triton"])
    assert (backward["ms"], backward["ratio"]) == (2.0, 0.5)
    # the ratio is the time of CAB divided by the time of the fastest baseline
    (row,) = rows_of([sample(1000, 2.0, {"FA3": 4.0, "FA4": 2.0})])
    assert (row["baseline"], row["ratio"]) == ("FA4", 1.5)


def test_dense_attention_is_measured_once_for_all_budgets(monkeypatch):
    calls = []
    monkeypatch.setattr(dense, "measure", lambda *_, backward, **__: calls.append(backward) or {})
    bench, settings = FakeBench(), tiny_settings(lengths=(96,), densities=(0.2, 1.0))
    for case in settings.asked():
        sample_of(Attention, settings, case, bench)
    assert calls == [False, True]


def test_graph_capture_error_is_reported():
    row = measured(KEY, FakeBench("it waits"))  # the reason why a graph cannot be captured
    assert set(row["without_graph"]) >= {"predicting", "reference", "predicting and reference"}
    line = "| no CUDA graph, so its time is eager | it waits | 192 | predicting, reference"
    assert line in shown(Attention, rows_of([row]))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sinks_are_included_in_time(monkeypatch, direction):
    shapes = []

    def with_sinks(out, lse, sinks):
        shapes.append(sinks.shape)
        return reference.with_sinks(out, lse, sinks)

    monkeypatch.setattr(layout, "with_sinks", with_sinks)
    row = measured(KEY | {"direction": direction}, sinks=True)
    assert row["attend_ms"] and not row["not_measured"]
    assert set(shapes) == {(4,)}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_composite_engine_is_timed(monkeypatch, direction):
    """The function of an engine may be a `partial` that wraps a kernel, as on a GPU."""

    def call(kernel, q, k, v, plan, **options):
        return kernel(q, k, v, plan, **options)

    composite = partial(call, reference.attention)
    engine = REFERENCE._replace(load=lambda: composite)
    monkeypatch.setitem(engines.ENGINES, "reference", (engine,))
    row = measured(KEY | {"direction": direction})
    assert row["attend_ms"] and not row["not_measured"]


# --- rejected kernels


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda out: torch.zeros_like(out), "wrong by 1 (relative)"),
        (lambda out: out.roll(1, dims=1), "wrong by"),
        (lambda out: out * torch.nan, "wrong by nan"),
    ],
    ids=["zeros", "other heads", "nan"],
)
def test_wrong_output_is_not_timed(monkeypatch, change, error):
    attend = reference.attention

    def attend_with_changed_output(q, k, v, plan, **options):
        return change(attend(q, k, v, plan, **options))

    monkeypatch.setattr(reference, "attention", attend_with_changed_output)
    row = measured(KEY)
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

    attend = reference.attention

    def attend_with_wrong_gradient(q, k, v, plan, **options):
        # calls 1 and 2 are those of the engine; later calls compute the float32 reference
        attend_with_wrong_gradient.calls += 1
        out = attend(q, k, v, plan, **options)
        return WrongGradient.apply(out) if attend_with_wrong_gradient.calls < 3 else out

    attend_with_wrong_gradient.calls = 0
    monkeypatch.setattr(reference, "attention", attend_with_wrong_gradient)
    row = measured(KEY | {"direction": "backward"})
    assert row["attend_ms"] == {}
    assert "in the gradient of q" in row["not_measured"]["reference"]


def test_exact_rows_equal_full_output():
    settings = tiny_settings()
    q, k, v = settings.random_heads(300, 16, torch.device("cpu"), "qkv")
    plan = settings.planner(KEY)(q, k, KeyRanges.causal(1, 300, 300, "cpu"))
    full = REFERENCE.attention(q, k, v, plan, scale=0.25)
    for start, stop in ((0, 32), (100, 150), (268, 300)):
        actual = dense.exact_rows(q, k, v, plan, start=start, stop=stop)
        torch.testing.assert_close(actual, full[:, :, start:stop])


# --- baselines


SDPA = dense.ON_CPU["SDPA"]


def times_of(baselines, backward=False, head_dim=16):
    """Return the times of ``baselines`` by `dense.measure`."""
    q, k, v = tiny_settings().random_heads(300, head_dim, torch.device("cpu"), "qkv")
    return dense.measure(q, k, v, head_dim**-0.5, FakeBench(), backward, baselines)


def test_unsupported_head_dim_is_reported():
    narrow = dense.Baseline(lambda: None, head_dims=dense.FLASH_DIMS)
    measured = times_of({"FA3": narrow, "SDPA": SDPA}, head_dim=320)
    assert measured["not_measured"] == {"FA3": "it supports head dims 1 to 256, not 320"}
    assert measured["baselines"] == {"SDPA": 2.0}


@pytest.mark.parametrize("backward", [False, True])
def test_kv_heads_are_repeated_for_kernels_without_gqa(backward):
    kv_heads = []

    def attend(q, k, v, scale):
        kv_heads.append((k.shape[1], v.shape[1]))
        return SDPA.load()(q, k, v, scale)

    measured = times_of({"efficient": dense.Baseline(lambda: attend, grouped=False)}, backward)
    assert measured["not_measured"] == {} and set(kv_heads) == {(4, 4)}


def test_baseline_with_wrong_gradient_is_not_timed():
    def attend(q, k, v, scale):
        return SDPA.load()(q, k, v.detach(), scale) + 0 * v.repeat_interleave(2, 1)

    wrong = {"FA4": dense.Baseline(lambda: attend)}
    assert times_of(wrong)["baselines"] == {"FA4": 2.0}
    error = times_of(wrong, backward=True)["not_measured"]["FA4"]
    assert "in the gradient of v at 300 tokens" in error


@pytest.mark.parametrize("falls_back", [False, True])
def test_ffpa_fallback_is_not_measured(monkeypatch, falls_back):
    def attend(q, k, v, is_causal, scale, enable_gqa, backend):
        assert is_causal and enable_gqa and backend == "cutedsl"
        return SDPA.load()(q, k, v, scale)

    class Meta:
        from_kwargs = classmethod(lambda cls, backend: cls())
        fallback = staticmethod(lambda q, k, mask, dropout: falls_back)

    package, functional = ModuleType("ffpa_attn"), ModuleType("ffpa_attn.functional")
    package.ffpa_attn_func, functional.FFPAAttnMeta = attend, Meta
    monkeypatch.setitem(sys.modules, "ffpa_attn", package)
    monkeypatch.setitem(sys.modules, "ffpa_attn.functional", functional)
    measured = times_of({"ffpa CuTe": dense.ON_GPU["ffpa CuTe"]}, head_dim=320)
    if falls_back:
        assert measured["not_measured"] == {"ffpa CuTe": "it would call SDPA instead"}
    else:
        assert measured["baselines"] == {"ffpa CuTe": 2.0}


@pytest.mark.parametrize(
    ("points", "length", "message"),
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
def test_break_even_length_is_interpolated(points, length, message):
    assert dense.break_even(points) == (None if length is None else pytest.approx(length))
    rows = [{"length": length, "ratio": ratio} for length, ratio in points]
    assert message in dense.break_even_shown(rows)


def test_budgeted_config_has_max_density_and_zero_threshold():
    config = tiny_settings().budgeted(KEY)
    assert (config.max_density, config.mass_threshold, config.min_length) == (0.2, 0.0, 0)
    assert (config.query_block, config.key_block) == (32, 16)
    settings = tiny_settings(cab=("mass_threshold=0.08", "typical_queries=4"))
    config = settings.budgeted(KEY)
    assert (config.mass_threshold, config.typical_queries) == (0.08, 4)
