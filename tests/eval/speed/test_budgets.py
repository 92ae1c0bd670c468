"""``speed budgets``: forms and the densities they meet, rows by hand, what is said."""

import json

import pytest
import torch
from bench import FakeBench, refused, sample_of, shown, speed_run

from cab_hf.engines import Reference
from cab_hf.eval.speed import budgets, dense, forms
from cab_hf.eval.speed.budgets import Budgets, Settings, mix
from cab_hf.eval.speed.forms import Form
from cab_hf.plan import BlockLists, BlockPlan, Spans
from cab_hf.predictors import Call, make_predictor

# so few that short texts have blocks to leave out
BLOCKS = ("query_block=16", "key_block=16", "local_blocks=1")
WORDS = ["--seconds", "0", *(word for each in BLOCKS for word in ("--config", each))]
WAYS = ("uniform:0.5", "whole:0.3:0.5", "exact:0.5:4:0.5")


def tiny(**more):
    return Settings(**{"device": "cpu", "seconds": 0.0, "config": BLOCKS, **more})


def measured(form, bench=None, length=256, **more):
    return sample_of(Budgets, tiny(**more), {"length": length, "form": form}, bench)


def derive(samples):
    return Budgets.rows(samples, {})


def told(form, ms=(4.0,), weights=(1.0,), baselines=None, length=1000, **more):
    """A sample, as `Budgets.measure` makes it: 1 ms to predict, and 0, 1, ... heads apart."""
    density = Form.parse(form).density
    layers = dict(zip(map(str, range(len(ms))), ms, strict=True))
    found = {
        "weights": dict(zip(layers, weights, strict=True)),
        "densities": dict.fromkeys(layers, density),
        "predict_ms": dict.fromkeys(layers, 1.0),
        "attend_ms": {count: taken - 1 for count, taken in layers.items()},
        "total_ms": layers,
        "list_bytes": dict.fromkeys(layers, 2**20),
        "peak_mib": {count: 10 * taken for count, taken in layers.items()},
        "max_density": density,
        "exact_pass_ms": None,
        "engine": "triton",
    }
    shape = {"length": length, "form": form, "batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 8}
    said = {"baselines": baselines or {}, "not_measured": {}, "without_graph": {}, "error": None}
    return shape | found | said | more


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a whole run, to read."""
    out = tmp_path_factory.mktemp("budgets")
    speed_run("budgets", out, *WORDS, "--lengths", "256", "--forms", ",".join(WAYS), drawn=True)
    return out


# --- forms


@pytest.mark.parametrize(
    ("text", "form"),
    [
        pytest.param("uniform:.1", Form("uniform", 0.1), id="uniform"),
        pytest.param(" whole:0.04:0.10", Form("whole", 0.1, 0.04), id="whole"),
        pytest.param("exact:.1:4:.08", Form("exact", 0.08, 0.1, 4), id="exact"),
        pytest.param("exact:1:1:1", Form("exact", 1, 1, 1), id="all of them"),
    ],
)
def test_a_form_is_read_and_has_one_spelling(text, form):
    assert Form.parse(text) == form
    assert Form.parse(str(form)) == form and forms.spelled(text) == str(form)


@pytest.mark.parametrize(
    "text",
    [
        *("", "uniform", "uniform:much", "uniform:0", "uniform:1.5", "uniform:nan"),
        *("whole:0.1", "whole:0.1:0.1", "whole:0:0.1", "whole:0.1:4:0.5"),
        *("exact:0.1:0.5", "exact:0.1:0:0.5", "exact:0.1:1.5:0.5", "magic:0.1"),
    ],
)
def test_other_spellings_are_refused(text):
    with pytest.raises(ValueError, match="budgets are uniform:DENSITY, whole:SHARE") as refusal:
        Form.parse(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("share", "heads", "weights"),
    [
        pytest.param(0.04, 32, {1: 0.72, 2: 0.28}, id="between"),
        pytest.param(0.25, 32, {8: 1.0}, id="a whole number"),
        pytest.param(0.07, 100, {7: 1.0}, id="but for rounding"),
        pytest.param(0.0, 4, {0: 1.0}, id="none"),
        pytest.param(1.0, 4, {4: 1.0}, id="all"),
    ],
)
def test_layers_are_mixed_to_the_share(share, heads, weights):
    assert mix(share, heads) == pytest.approx(weights)
    assert sum(count * weight for count, weight in weights.items()) == pytest.approx(share * heads)


@pytest.mark.parametrize(("layers", "heads"), [(1, 4), (3, 5), (32, 32)])
def test_heads_are_spread_evenly_over_layers(layers, heads):
    pairs = forms.spread(layers, heads)
    assert len(set(pairs)) == len(pairs) == layers * heads
    for count in range(0, len(pairs), 7):
        chosen = [layer for layer, _ in pairs[:count]]
        counts = [chosen.count(layer) for layer in range(layers)]
        assert max(counts) - min(counts) <= 1


def test_heads_of_a_layer_stand_apart():
    first = sorted(head for _, head in forms.spread(1, 32)[:4])
    gaps = [after - one for one, after in zip(first, [*first[1:], first[0] + 32], strict=True)]
    assert min(gaps) >= 4


def test_forms_share_out_a_model():
    whole, exact = Form("whole", 0.5, 0.1), Form("exact", 0.5, 0.25, 4)
    apart = forms.shared_out([whole, exact], 8, 10)
    assert [len(pairs) for pairs in apart.values()] == [8, 20]
    assert not set(apart[whole]) & set(apart[exact])
    config = tiny().cab_config
    tables = forms.tables(config, apart, 8, 10)
    masses = [mass for row in tables["mass"] for mass in row]
    assert masses.count(1.0) == 8 and masses.count(config.mass) == 72
    counts = [count for row in tables["exact_queries"] for count in row]
    assert counts.count(4) == 20 and counts.count(0) == 60


# --- densities


@pytest.mark.parametrize("density", [0.3, 0.5, 0.8, 1.0])
def test_a_budget_is_filled(density):
    q, k = torch.randn(2, 1, 1, 600, 16)
    config = forms.filled(tiny().configured(max_density=1.0), density, q, k)
    known = Call(Spans.causal(1, 600, 600, "cpu"), 0.25)
    assert make_predictor(config)(q, k, known).density() == pytest.approx(density, rel=0.01)


@pytest.mark.parametrize("form", [*WAYS, "whole:0.25:0.45", "exact:1:1:0.4"])
def test_all_heads_together_meet_the_density(form):
    sample = measured(form, length=512)
    assert sample["error"] is None
    (row,) = derive([sample])
    assert row["density"] == pytest.approx(Form.parse(form).density, rel=0.01)
    assert row["missed"] is None


def test_heads_that_list_blocks_have_one_density():
    densities = measured("exact:0.3:4:0.5", length=512)["densities"]
    assert list(densities) == ["1", "2"] and len(set(densities.values())) == 1
    # of four heads, one that attends everything
    none, one = measured("whole:0.1:0.5", length=512)["densities"].values()
    assert one == pytest.approx(none + (1 - none) / 4)


def test_a_density_below_what_is_forced_is_told():
    (row,) = derive([measured("uniform:0.05")])
    assert row["density"] > 0.1
    told = shown(Budgets, [row])
    assert "| uniform:0.05 | density missed | " in told and "attended, 5.00 % asked for" in told


# --- the row


def test_a_row_has_what_every_layer_took():
    row = measured("whole:0.3:0.5", FakeBench())
    assert row["weights"] == pytest.approx({"1": 0.8, "2": 0.2})
    for field in ("predict_ms", "attend_ms", "total_ms"):
        assert row[field] == {"1": 2.0, "2": 2.0}
    assert row["peak_mib"] == {"1": 5.0, "2": 5.0} and row["engine"] == "reference"
    assert row["exact_pass_ms"] is None and row["baselines"] == {"SDPA": 2.0}


def test_an_exact_head_is_timed_alone():
    assert measured("exact:0.5:4:0.5", FakeBench())["exact_pass_ms"] == 2.0
    settings = tiny()
    q, k = torch.randn(2, 1, 1, 96, 16)
    config = settings.budgeted(Form.parse("exact:0.5:4:0.5"), q, k)
    plan = budgets.exactly_chosen(q, k, config, 4)()
    assert plan.to_dense().shape == (1, 1, 6, 6)


def test_bytes_of_lists_by_hand():
    lists = [
        BlockLists(torch.zeros(1, 2, 3).int(), torch.zeros(1, 2, 3, width).int())
        for width in (5, 2)
    ]
    plan = BlockPlan(*lists, Spans.causal(1, 48, 48, "cpu"), 16, 16)
    assert budgets.list_bytes(plan) == 4 * 2 * 3 * (1 + 5 + 1 + 2)


def test_a_row_is_the_mean_over_layers_by_hand():
    samples = [
        told("uniform:0.1", baselines={"FA3": 16.0, "FA4": 2.0}),
        told("whole:0.05:0.1", (4.0, 9.0), (0.6, 0.4)),
        told("exact:0.5:4:0.1", (8.0,), exact_pass_ms=1.0),
        told("uniform:0.2", (5.0,)),
    ]
    even, whole, exact, other = derive(samples)
    assert (whole["ms"], whole["predicting_ms"], whole["attending_ms"]) == (6.0, 1.0, 5.0)
    assert (whole["peak"], whole["lists"], whole["density"]) == (90.0, 2**20, 0.1)
    assert [row["over_uniform"] for row in (even, whole, exact)] == [1.0, 1.5, 2.0]
    assert other["over_uniform"] == 1.0 and other["ms"] == 5.0
    # a head of FA3 takes 4 ms
    assert (even["baseline"], even["ratio"], exact["pass_ratio"]) == ("FA3", 0.25, 0.25)
    assert even["pass_ratio"] is whole["pass_ratio"] is None


def test_dense_attention_is_extrapolated_to_lengths_it_was_not_run_at():
    samples = [
        told("exact:0.5:1:0.1", length=4000, exact_pass_ms=8.0),
        told("exact:0.5:1:0.1", baselines={"FA3": 4.0}, exact_pass_ms=0.5),
    ]
    short, long = derive(samples)
    assert (short["length"], long["baseline_ms"], long["extrapolated"]) == (1000, 64.0, True)
    assert (short["pass_ratio"], long["pass_ratio"]) == (0.5, 0.5)
    assert "≈ 64.0 FA3" in shown(Budgets, [short, long])
    (said,) = Budgets.readings([short, long])
    assert "of a head of FA3 (extrapolated), 50.0 % by 1 queries" in said


def test_what_uneven_budgets_cost_is_said():
    rows = derive(
        [
            told("uniform:0.1", baselines={"FA3": 16.0}),
            told("whole:0.05:0.1", (4.0, 9.0), (0.6, 0.4), {"FA3": 16.0}),
        ]
    )
    (said,) = Budgets.readings(rows)
    assert said.startswith("At 1,000 tokens whole:0.05:0.1 takes 1.50× the time of even budgets")
    table = Budgets.tables(rows)
    line = "| 1,000 | whole:0.05:0.1 | 0.1000 | 0.100 | 1.00 | 5.00 | 6.00 | 1.00 | 90.0 | 1.50× |"
    assert line in table["Forms of budgets"]
    assert "| 16.0 FA3 | 2.67× | triton |" in table["Forms of budgets"]
    layers = table["Layers"].splitlines()[3:]
    assert [line.split(" | ")[2:4] for line in layers] == [["0", "0.60"], ["1", "0.40"]]


# --- what is not timed


def test_a_wrong_engine_is_a_row_with_its_reason(monkeypatch):
    attend = Reference.attention
    monkeypatch.setattr(Reference, "attention", lambda *known: attend(*known) * torch.nan)
    row = measured("whole:0.3:0.5", FakeBench())
    assert "wrong by nan" in row["error"] and row["weights"] == {}
    assert row["baselines"] == {"SDPA": 2.0}
    rows = derive([row, told("uniform:0.5", length=256)])
    assert rows[0]["ms"] is rows[0]["over_uniform"] is rows[0]["ratio"] is None
    assert "| whole:0.3:0.5 | not measured | ArithmeticError: wrong by nan" in shown(Budgets, rows)


def test_what_fails_in_one_layer_has_no_mean(monkeypatch):
    class Full(FakeBench):
        def peak(self, call):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
            return super().peak(call)

    row = measured("whole:0.3:0.5", Full())
    assert row["error"] == "out of memory: tried to allocate 4.00 GiB"
    (derived,) = derive([row])
    assert derived["ms"] is None and Budgets.readings([derived]) == []
    assert "out of memory" in shown(Budgets, [derived])


def test_a_graph_that_fails_is_told():
    row = measured("exact:0.5:4:0.5", FakeBench("it waits"))
    whats = ("predict", "attend", "total")
    expected = {f"{what}, 2 apart" for what in whats} | {"one exact head"}
    assert expected <= set(row["without_graph"])


def test_dense_attention_is_measured_once_for_all_forms(monkeypatch):
    calls = []
    monkeypatch.setattr(dense, "measure", lambda *known: calls.append(known) or {})
    bench, settings = FakeBench(), tiny(lengths=(96,), forms=WAYS)
    for case in settings.asked():
        sample_of(Budgets, settings, case, bench)
    assert len(calls) == 1


# --- the files


def test_a_whole_run(finished):
    rows = json.loads((finished / "results.json").read_text())["rows"]
    assert [row["form"] for row in rows] == list(WAYS)
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and row["over_uniform"] > 0
        assert (row["exact_pass_ms"] is not None) == row["form"].startswith("exact")
    text = (finished / "report.md").read_text()
    for heading in ("Layers", "Choosing for one exact head", "Dense causal attention, forward"):
        assert f"\n## {heading}\n" in text
    assert "two layers are measured" in text
    assert (finished / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_grows_by_a_form(tmp_path):
    words = (*WORDS, "--lengths", "96", "--forms")
    first = speed_run("budgets", tmp_path, *words, "uniform:.5")["rows"]
    rows = speed_run("budgets", tmp_path, *words, "uniform:0.50,whole:0.25:0.5")["rows"]
    assert [row["form"] for row in rows] == ["uniform:0.5", "whole:0.25:0.5"]
    assert rows[0]["total_ms"] == first[0]["total_ms"]


# --- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--forms", "most:0.1"], "forms: budgets are uniform:DENSITY", id="form"),
        pytest.param(["--forms", "exact:0.1:3:0.5"], "exact_queries", id="queries"),
        pytest.param(["--config", "max_density=0.3"], "config sets max_density", id="twice"),
        pytest.param(
            ["--config", "exact_queries=((0,4),)"], "config must be without tables", id="two tables"
        ),
        pytest.param(
            ["--config", "mass=((1.0,0.5),)"], "config must be without tables", id="a table"
        ),
        pytest.param(["--heads", "3"], "heads must be a multiple of kv_heads=2", id="heads"),
        pytest.param(["--head-dim", "0"], "head_dim must be at least 1", id="head dim"),
        pytest.param(["--seconds", "-1"], "seconds must be 0 or more", id="seconds"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(tmp_path, options, message, capsys):
    words = ["--device", "cpu", "--out", str(tmp_path / "none"), *options]
    assert message in refused(capsys, "budgets", *words)
    assert not (tmp_path / "none").exists()


def test_defaults_on_a_gpu_are_what_was_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = Settings()
    assert (settings.lengths, settings.heads, settings.kv_heads) == ((131_072,), 32, 8)
    assert settings.head_dim == 128 and settings.dtype == "bfloat16"
    assert settings.forms[:2] == ("uniform:0.1", "whole:0.04:0.1")
