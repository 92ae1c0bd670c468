"""The fidelity command: settings, probes, output files and resuming."""

import json
from functools import cache, partial
from pathlib import Path

import long_runs
import pytest
import torch
from bench import DensityBench
from tiny import SPARSE_WORDS
from words import TEXT

from cab_hf.config import CabConfig
from cab_hf.eval import attention_time, fidelity, probes, teacher_forcing
from cab_hf.eval.attention_time import AttentionClock
from cab_hf.eval.fidelity import Fidelity, Settings
from cab_hf.eval.methods import METHODS, last_queries
from cab_hf.eval.methods.blocks import Chosen
from cab_hf.eval.speed.timing import Bench, Timing
from cab_hf.eval.teacher_forcing import TeacherForced, distributions
from cab_hf.experiment.log import read_log

SMALL = "query_block=32,key_block=16,mass_threshold=0.06,share_threshold=0.5,dense_tail_blocks=1"
command = partial(long_runs.command, "fidelity")


@pytest.fixture
def book(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(TEXT)
    return str(file)


# --- settings


def test_variants_are_parsed_into_configs(tmp_path):
    plain, complete = tmp_path / "plain.json", tmp_path / "whole.json"
    plain.write_text(json.dumps({"mass_threshold": 0.7}))
    complete.write_text(
        json.dumps({"cab_config": CabConfig(mass_threshold=0.6).to_dict(), "other": 1})
    )
    several = tmp_path / "several.yaml"
    several.write_text("d: {mass_threshold: 0.4}\ne:\n  mass_threshold: 0.3\n  dense_layers: [1]\n")
    parts = ("a=mass_threshold=0.8,dense_layers=(0,2),engine=gather", f"b={plain}", f"c={complete}")
    parts += (str(several),)
    settings = Settings(variant=parts, cab=("mass_threshold=0.5",))
    configs = settings.configs
    masses = {"cab": 0.5, "cab:a": 0.8, "cab:b": 0.7, "cab:c": 0.6, "cab:d": 0.4, "cab:e": 0.3}
    assert {name: config.mass_threshold for name, config in configs.items()} == masses
    assert (configs["cab:a"].dense_layers, configs["cab:a"].engine) == ((0, 2), "gather")
    assert configs["cab:e"].dense_layers == (1,)
    assert {config.min_length for config in configs.values()} == {0}
    recorded = Fidelity(settings).recorded()
    assert recorded["variant"][1:] == ["b=plain.json", "c=whole.json", "several.yaml"]
    assert str(tmp_path) not in json.dumps(recorded)


def test_example_variants_file_is_valid():
    file = Path(__file__).parents[2] / "examples" / "variants.yaml"
    configs = Settings(variant=(str(file),)).configs
    assert len(configs) == 10 and configs["cab:rows-128-keys"].key_block == 128
    assert {config.predictor for name, config in configs.items() if name != "cab"} == {"rows"}


# --- the command


def test_fidelity_command_writes_expected_rows(model_folder, tmp_path, book, capsys, monkeypatch):
    monkeypatch.setattr(probes, "BORDER", 32)
    more = ("--texts", f"noise,{book}", "--budgets", "match,0.5", "--variant", f"wide={SMALL}")
    more += ("--probes", "pass,recall,recall_border,perplexity,perplexity_border")
    methods = "dense,full,cab,random,no_needle"
    results = command(model_folder, tmp_path / "out", *more, methods=methods)
    rows = results["rows"]
    arms = [*((name, None) for name in ("dense", "cab", "cab:wide")), ("random", "match")]
    arms += [("random", 0.5), ("full", None), ("no_needle", None)]
    cells = [(row["text"], row["method"], row["budget"]) for row in rows]
    assert cells == [(text, *arm) for text in ("noise", "book") for arm in arms]
    for dense, cab, wide, matched, half, full, hidden in (rows[:7], rows[7:]):
        assert dense["density"] == full["density"] == 1
        # a CPU is not timed
        assert dense["attend_ms"] is cab["over_dense"] is None
        assert cab["density"] < wide["density"] < 1
        assert matched["fitted"] == pytest.approx(cab["density"])
        assert matched["density"] == pytest.approx(cab["density"], abs=0.05)
        assert half["density"] == pytest.approx(0.5, abs=0.05)
        for row in (cab, wide, matched, half):
            assert (row["pass"]["n"], row["recall"]["n"], row["recall"]["pairs"]) == (2, 2, 2)
            assert row["perplexity"]["ratio"] > 0
        # documents have no needle to hide
        assert "pass" in hidden and "recall" not in hidden
        # tokens 160, 192, 224, 256 and 288
        assert dense["perplexity_border"]["tokens"] == 5
        for row in (dense, cab, wide, matched, half, full):
            assert row["recall_border"]["n"] == row["recall"]["n"] == 2
        assert full["recall"]["share"] == dense["recall"]["share"]
        for probe in ("perplexity", "perplexity_border"):
            assert full[probe]["ratio"] == pytest.approx(1, abs=1e-5)
        assert cab["perplexity_border"]["ratio"] != pytest.approx(1, abs=1e-5)
    assert str(tmp_path) not in json.dumps(results)
    noise, file = results["provenance"]["settings"]["texts"]
    assert (noise, file["name"]) == ("noise", "book.txt")
    assert "On book, 300 tokens, cab attends" in capsys.readouterr().out


@pytest.mark.parametrize("probe", ["recall", "recall_border"])
def test_predictions_at_block_borders_ignore_later_tokens(model_folder, monkeypatch, probe):
    monkeypatch.setattr(probes, "BORDER", 32)
    sparse_words = (*SPARSE_WORDS, "mass_threshold=0", "max_density=0.3")
    options = {"device": "cpu", "lengths": (900,), "keys": 2}
    options |= {"cab": sparse_words, "methods": ("cab",)}
    measured = Fidelity(Settings(model=str(model_folder), **options))
    reading = measured.reading("noise", 900, probe, None, 0)
    case = {"method": "cab", "text": "noise", "length": 900, "budget": None, "fitted": None}

    def before(tokens, at):
        with measured.method(case).applied(measured.model):
            return teacher_forcing.predictions(
                measured.model, TeacherForced(tokens, ((at, at + 1),))
            )

    changes = 0
    for at, _ in reading.ranges:
        others = reading.tokens[:at] + tuple(reversed(reading.tokens[at:]))
        changes += not torch.equal(before(reading.tokens, at), before(others, at))
    assert (changes > 0) == (probe == "recall")


TIGHT = "tiny=query_block=32,key_block=16,dense_tail_blocks=1,max_density=0.05"
BEHIND = (
    *("--probes", "continuation,asked", "--lengths", 640, "--documents", 2, "--asked", 2),
    *("--budgets", "0.05"),
)
TURNS = (
    *("--probes", "turns", "--lengths", 900, "--documents", 2, "--budgets", "0.05"),
    *("--variant", TIGHT, "--cab", "mass_threshold=0.2"),
)
# sparse decoding starts at 4 x 128 tokens, and 640 exceed them
DECODING = (
    *("--probes", "decode,decode_asked,greedy", "--lengths", 640, "--documents", 2, "--asked", 2),
    *("--decoded", 24, "--written", 8, "--continuations", 3, "--match", "cab:sparse"),
    *("--variant", f"sparse={SMALL},sparse_decode=true,decode_tokens=128"),
    *("--variant", f"dense={SMALL}"),
)


@pytest.fixture(scope="module")
def complete(model_folder, tmp_path_factory):
    """Return a cached function: command words of a run -> rows by method."""

    @cache
    def rows(words):
        methods = {BEHIND: "full,cab,streaming", TURNS: "full,cab,random,streaming"}
        methods = methods.get(words, "full,streaming,h2o,snapkv")
        out = tmp_path_factory.mktemp("complete")
        more = {"methods": f"dense,{methods}", "drawn": words != BEHIND}
        run = command(model_folder, out, *words, **more)
        return {row["method"]: row for row in run["rows"]}

    return rows


def test_continuation_is_compared_with_dense(complete):
    rows = complete(BEHIND)
    behind = {name: row["continuation"] for name, row in rows.items()}
    # an eighth of 640 tokens, of two documents
    assert {result["tokens"] for result in behind.values()} == {2 * 80}
    assert (behind["dense"]["kl"], behind["dense"]["agreement"]) == (0, 1)
    assert "ratio" not in behind["dense"]
    assert behind["full"]["kl"] == pytest.approx(0, abs=1e-7)
    assert behind["full"]["ratio"] == pytest.approx(1, abs=1e-5)
    # a window that drops all earlier keys
    assert behind["streaming"]["kl"] > behind["cab"]["kl"] > 10 * abs(behind["full"]["kl"])
    for actual in behind.values():
        assert 0 <= actual["kl_low"] <= max(actual["kl"], 0) <= actual["kl_high"]
    assert {row["asked"]["n"] for row in rows.values()} == {4}


def test_turns_are_compared_with_dense(complete):
    rows = complete(TURNS)
    turns = {name: row["turns"]["turns"] for name, row in rows.items()}
    # an eighth of 180 tokens, of two documents
    assert {turn["tokens"] for each in turns.values() for turn in each} == {2 * 22}
    assert {len(each) for each in turns.values()} == {5}
    assert {(turn["kl"], turn["agreement"]) for turn in turns["dense"]} == {(0, 1)}
    for at, turn in enumerate(turns["full"]):
        assert turn["kl"] == pytest.approx(0, abs=1e-7) and turn["agreement"] == 1
        for name in ("cab", "cab:tiny", "random", "streaming"):
            assert turns[name][at]["kl"] > 10 * abs(turn["kl"])
    assert rows["cab"]["density"] < 0.6
    for row in rows.values():
        result = row["turns"]
        assert result["kl"] == pytest.approx(sum(turn["kl"] for turn in result["turns"]) / 5)
        expected = result["turns"][-1]["kl"] - result["turns"][0]["kl"]
        assert result["growth"] == pytest.approx(expected)
        assert result["growth_low"] <= result["growth"] <= result["growth_high"]


def test_continuation_is_exact_except_with_evicted_keys(model_folder):
    given = {"device": "cpu", "lengths": (640,), "cab": SPARSE_WORDS, "methods": ("cab",)}
    measured = Fidelity(Settings(model=str(model_folder), **given))
    reading = measured.reading("noise", 640, "continuation", None, 0)
    assert reading.prompt == 640 - 80
    place = {"text": "noise", "length": 640, "index": 0, "probe": "continuation", "fitted": 0.1}
    likely = {}
    for name in ("cab", "streaming"):
        case = {"method": name, "budget": None, **place}
        method = measured.method(case)
        with method.applied(measured.model):
            # only the cache of a method can drop keys of the prompt
            complete = distributions(measured.model, reading, chunk=measured.settings.chunk)
            measured.dense_of(case)
            likely[name] = measured.read(case, reading, method)["nll"]
        exact = -complete[range(80), list(reading.tokens[560:])].sum().item()
        assert (likely[name] == pytest.approx(exact, abs=1e-3)) == (name == "cab")


def test_decode_is_compared_with_dense(complete):
    rows = complete(DECODING)
    caches = ("streaming", "h2o", "snapkv")
    assert list(rows) == ["dense", "cab:sparse", "cab:dense", *caches, "full"]
    # the index has 16 channels in half a byte and a scale of two, keys and values 32 in four
    kept = {
        "cab:dense": 640,
        "dense": 640,
        "full": 640,
        "cab:sparse": 128 + 640 * 10 / 128,
        **dict.fromkeys(caches, 178),
    }
    assert {name: row["step_tokens"] for name, row in rows.items()} == kept
    assert {row["decode"]["tokens"] for row in rows.values()} == {2 * 24}
    assert {row["decode_asked"]["n"] for row in rows.values()} == {4}
    assert {row["greedy"]["n"] for row in rows.values()} == {3}
    decode = {name: row["decode"] for name, row in rows.items()}
    assert (decode["dense"]["kl"], decode["dense"]["agreement"]) == (0, 1)
    assert decode["full"]["kl"] == pytest.approx(0, abs=1e-7)
    for name in ("cab:sparse", *caches):
        assert decode[name]["kl"] > 1e-6 > abs(decode["full"]["kl"])
    # both use the same prefill, so the difference comes from decode steps
    assert decode["cab:sparse"]["kl"] != pytest.approx(decode["cab:dense"]["kl"], rel=1e-2)
    assert (rows["full"]["greedy"]["equal"], rows["full"]["greedy"]["prefix"]) == (3, 8)
    assert "equal" not in rows["dense"]["greedy"]


def test_batched_decode_equals_single_decode(model_folder, tmp_path, monkeypatch, complete):
    # two continuations and documents at once, then one
    monkeypatch.setattr(fidelity, "TOKENS_AT_ONCE", 640)
    for alone in command(model_folder, tmp_path, *DECODING, methods="dense,h2o")["rows"]:
        together = complete(DECODING)[alone["method"]]
        assert alone["decode"]["kl"] == pytest.approx(together["decode"]["kl"], abs=1e-6)
        assert alone["decode_asked"] == together["decode_asked"]
        assert alone["greedy"] == together["greedy"]


@pytest.fixture
def kill(monkeypatch):
    """Return a function (n) -> list of cases measured later; the n-th case is interrupted."""
    measure = Fidelity.measure

    def kill(n):
        calls = []

        def counted(self, case):
            calls.append(case)
            if len(calls) == n:
                raise KeyboardInterrupt
            return measure(self, case)

        monkeypatch.setattr(Fidelity, "measure", counted)
        return calls

    return kill


@pytest.mark.parametrize(
    ("words", "at"),
    [
        pytest.param(BEHIND, 6, id="continuations"),
        pytest.param(TURNS, 4, id="turns, the first document of a variant"),
        pytest.param(DECODING, 2, id="decoding, the second of two read together"),
    ],
)
def test_resumed_run_equals_uninterrupted_run(model_folder, tmp_path, kill, complete, words, at):
    methods = "dense" if words is DECODING else "dense,cab"
    kill(at)
    with pytest.raises(KeyboardInterrupt):
        command(model_folder, tmp_path, *words, methods=methods)
    for row in command(model_folder, tmp_path, *words, methods=methods)["rows"]:
        assert row == complete(words)[row["method"]]


# --- time


class CountingBench(Bench):
    """Clock whose n-th call takes n milliseconds."""

    def __init__(self):
        super().__init__("cpu")
        self.calls = 0

    def time(self, call, graph=True):
        call()
        self.calls += 1
        return Timing(float(self.calls))


def test_layer_times_are_summed(model_folder):
    model = Fidelity(Settings(model=str(model_folder), device="cpu")).model
    clock, tokens = AttentionClock(CountingBench()), tuple(range(3, 63)) * 10
    dense = clock.time(model, tokens, None)
    # one shape is measured once, and there are two layers
    assert dense == {"predict_ms": 0.0, "attend_ms": 2.0, "dense_ms": 2.0, "dense_kernel": "SDPA"}
    config = CabConfig(min_length=0, query_block=32, key_block=16)
    result = clock.time(model, tokens, config)
    assert (result["predict_ms"], result["attend_ms"], result["dense_ms"]) == (2 + 4, 3 + 5, 2)
    assert "predict_reported" not in result
    # an exact layer takes the time of dense attention
    result = clock.time(model, tokens, CabConfig(min_length=0, dense_layers=(0,)))
    assert (result["predict_ms"], result["attend_ms"]) == (6, 1 + 7)
    cascade = CabConfig(min_length=0, predictor="cascade", anchors=(0,))
    assert clock.time(model, tokens, cascade)["dense_ms"] == 2
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("name", "share"), [("xattention", 9.3 / 73.8), ("streaming", 0.0)])
def test_selection_time_uses_share_reported_by_authors(name, share, model_folder):
    model = Fidelity(Settings(model=str(model_folder), device="cpu")).model
    config = CabConfig(min_length=0, query_block=32, key_block=16, predictor=name)
    result = AttentionClock(CountingBench()).time(model, tuple(range(3, 63)) * 10, config)
    assert result["predict_reported"] == share
    # dense attention is measured once and counts for both layers
    assert result["predict_ms"] == pytest.approx(share * 2)
    assert result["attend_ms"] == 2 + 3


def test_rivals_without_kernel_have_reported_share():
    rivals = {method.predictor for method in METHODS.values() if issubclass(method, Chosen)}
    rivals |= {"streaming"}
    assert set(attention_time.REPORTED) == rivals


def test_rows_contain_times_and_quality(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "layer_bench", lambda device: CountingBench())
    results = command(model_folder, tmp_path, "--probes", "continuation", drawn=True)
    dense, cab, random = results["rows"]
    assert dense["over_dense"] == 1
    assert cab["over_dense"] == (cab["predict_ms"] + cab["attend_ms"]) / cab["dense_ms"]
    assert random["attend_ms"] > 0
    assert (random["predict_ms"], random["predict_reported"]) == (0, 0)


def test_cpu_is_timed_only_for_equal_time():
    assert attention_time.layer_bench("cpu") is None
    assert Fidelity(Settings(device="cpu")).clock is None
    # equal time needs a clock on every device
    assert type(Fidelity(Settings(device="cpu", equal="time")).clock.bench) is Bench


RIVALS = (
    "random,antidiagonal,xattention_fitted,vertical_slash,flexprefill_fitted,mean_pooled,streaming"
)
TIMED = ("--probes", "continuation", "--lengths", "900", "--equal", "time")


def test_fitted_budget_matches_attention_time(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "layer_bench", lambda device: DensityBench())
    # a lower minimum, because FlexPrefill would select all blocks of such a short sequence
    monkeypatch.setattr(last_queries, "MIN_TOKENS", 32)
    results = command(model_folder, tmp_path, *TIMED, methods=f"dense,cab,{RIVALS}")
    rows = {row["method"]: row for row in results["rows"]}
    cab = rows["cab"]["predict_ms"] + rows["cab"]["attend_ms"]
    for name in RIVALS.split(","):
        row = rows[name]
        assert row["predict_ms"] + row["attend_ms"] == pytest.approx(cab, rel=0.05)
        assert row["over_match"] == pytest.approx(1, abs=0.05)
        assert row["fitted"] == cab
        assert row["continuation"]["n"] == 1
    assert rows["antidiagonal"]["density"] < rows["random"]["density"]
    assert "over_match" not in rows["dense"] and "over_match" not in rows["cab"]


def test_resumed_run_reuses_fitted_budgets(model_folder, tmp_path, monkeypatch, kill):
    """The second part of the run measures other times, but does not fit again."""
    monkeypatch.setattr(fidelity, "layer_bench", lambda device: DensityBench())
    more = (*TIMED, "--probes", "continuation,recall", "--documents", "2")
    # the second sample of the third method
    calls = kill(12)
    with pytest.raises(KeyboardInterrupt):
        command(model_folder, tmp_path, *more)
    assert calls[-1]["method"] == "random"
    monkeypatch.setattr(fidelity, "layer_bench", lambda device: CountingBench())
    command(model_folder, tmp_path, *more)
    ours = [each for each in read_log(tmp_path / "samples.jsonl")[1] if each["method"] == "random"]
    assert ["fitted_config" in each for each in ours] == [True, *[False] * 4]
    assert len({each["density"] for each in ours if each["probe"] == "recall"}) == 1


def test_every_method_has_rows(model_folder, tmp_path, halved_for_fp8):
    # methods with dense prefill are dense without decoding
    names = [name for name, method in METHODS.items() if not method.dense_prefill]
    more = ("--probes", "continuation", "--lengths", "600", "--budgets", "0.5")
    rows = command(model_folder, tmp_path, *more, methods=",".join(names))["rows"]
    # documents have no needle, so no_needle has no rows
    assert [row["method"] for row in rows] == [name for name in names if name != "no_needle"]
    densities = {row["method"]: row["density"] for row in rows}
    assert densities["mean_pooled"] == pytest.approx(0.5, abs=0.06)


def test_run_is_extended_by_more_cases(model_folder, tmp_path, kill, capsys):
    command(model_folder, tmp_path)
    calls = kill(None)
    grown = command(model_folder, tmp_path, "--documents", "2", methods="dense")
    assert [row["recall"]["n"] for row in grown["rows"]] == [4, 2, 2]
    assert [case["index"] for case in calls] == [1] * 4

    assert long_runs.start("fidelity", model_folder, tmp_path, "--variant", f"wide={SMALL}") == 2
    assert "Give another --out" in capsys.readouterr().err
