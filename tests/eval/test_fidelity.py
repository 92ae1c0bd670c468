"""The fidelity command: settings, probes, times, output files and resumed runs."""

import json
from functools import cache, partial
from pathlib import Path

import long_runs
import pytest
import torch
from bench import DensityBench
from tiny import SPARSE_ASSIGNMENTS
from words import PROSE_TEXT

from cab_hf.config import CabConfig
from cab_hf.eval import attention_time, fidelity, probes, teacher_forcing
from cab_hf.eval.attention_time import AttentionClock
from cab_hf.eval.fidelity import Fidelity, Settings
from cab_hf.eval.methods import METHODS, last_queries
from cab_hf.eval.methods.blocks import PredictorMethod
from cab_hf.eval.speed.timing import Bench, Timing
from cab_hf.eval.teacher_forcing import Reading, predict_log_probs
from cab_hf.experiment.log import read_log

SMALL_BLOCK_ASSIGNMENTS = (
    "query_block=32,key_block=16,mass_threshold=0.06,share_threshold=0.5,dense_tail_blocks=1"
)
run_fidelity = partial(long_runs.run_eval_and_read_results, "fidelity")


@pytest.fixture
def book_file(tmp_path):
    """Return the path of a text file."""
    text_file = tmp_path / "book.txt"
    text_file.write_text(PROSE_TEXT)
    return str(text_file)


def test_variants_are_parsed_into_configs(tmp_path):
    fields_file, model_config_file = tmp_path / "fields.json", tmp_path / "model.json"
    fields_file.write_text(json.dumps({"mass_threshold": 0.7}))
    model_config_file.write_text(
        json.dumps({"cab_config": CabConfig(mass_threshold=0.6).to_dict(), "other": 1})
    )
    variants_file = tmp_path / "several.yaml"
    variants_file.write_text(
        "d: {mass_threshold: 0.4}\ne:\n  mass_threshold: 0.3\n  dense_layers: [1]\n"
    )
    variants = ("a=mass_threshold=0.8,dense_layers=(0,2),engine=gather", f"b={fields_file}")
    variants += (f"c={model_config_file}", str(variants_file))
    settings = Settings(variant=variants, cab=("mass_threshold=0.5",))
    configs = settings.configs
    expected_thresholds = {
        "cab": 0.5,
        "cab:a": 0.8,
        "cab:b": 0.7,
        "cab:c": 0.6,
        "cab:d": 0.4,
        "cab:e": 0.3,
    }
    assert {name: config.mass_threshold for name, config in configs.items()} == expected_thresholds
    assert (configs["cab:a"].dense_layers, configs["cab:a"].engine) == ((0, 2), "gather")
    assert configs["cab:e"].dense_layers == (1,)
    assert {config.min_length for config in configs.values()} == {0}
    recorded_settings = Fidelity(settings).recorded_settings()
    assert recorded_settings["variant"][1:] == ["b=fields.json", "c=model.json", "several.yaml"]
    assert str(tmp_path) not in json.dumps(recorded_settings)


def test_example_variants_file_is_valid():
    variants_file = Path(__file__).parents[2] / "examples" / "variants.yaml"
    configs = Settings(variant=(str(variants_file),)).configs
    assert len(configs) == 10 and configs["cab:rows-128-keys"].key_block == 128
    assert {config.predictor for name, config in configs.items() if name != "cab"} == {"rows"}


def test_fidelity_command_writes_expected_rows(
    model_folder, tmp_path, book_file, capsys, monkeypatch
):
    monkeypatch.setattr(probes, "MIN_BORDER_DISTANCE", 32)
    options = (
        "--texts",
        f"noise,{book_file}",
        "--budgets",
        "match,0.5",
        "--variant",
        f"wide={SMALL_BLOCK_ASSIGNMENTS}",
    )
    options += ("--probes", "pass,recall,recall_border,perplexity,perplexity_border")
    methods = "dense,full,cab,random,no_needle"
    results = run_fidelity(model_folder, tmp_path / "out", options, methods=methods)
    rows = results["rows"]
    methods_with_budgets = [
        *((name, None) for name in ("dense", "cab", "cab:wide")),
        ("random", "match"),
    ]
    methods_with_budgets += [("random", 0.5), ("full", None), ("no_needle", None)]
    row_keys = [(row["text"], row["method"], row["budget"]) for row in rows]
    assert row_keys == [
        (text, *method_with_budget)
        for text in ("noise", "book")
        for method_with_budget in methods_with_budgets
    ]
    for (
        dense_row,
        cab_row,
        wide_variant_row,
        matched_density_row,
        half_density_row,
        full_attention_row,
        no_needle_row,
    ) in (
        rows[:7],
        rows[7:],
    ):
        assert dense_row["density"] == full_attention_row["density"] == 1
        # attention is not timed on a CPU
        assert dense_row["attend_ms"] is cab_row["over_dense"] is None
        assert cab_row["density"] < wide_variant_row["density"] < 1
        assert matched_density_row["fitted"] == pytest.approx(cab_row["density"])
        assert matched_density_row["density"] == pytest.approx(cab_row["density"], abs=0.05)
        assert half_density_row["density"] == pytest.approx(0.5, abs=0.05)
        for row in (cab_row, wide_variant_row, matched_density_row, half_density_row):
            assert (row["pass"]["n"], row["recall"]["n"], row["recall"]["pairs"]) == (2, 2, 2)
            assert row["perplexity"]["ratio"] > 0
        # no_needle has no recall, because the documents of recall have no needle to remove
        assert "pass" in no_needle_row and "recall" not in no_needle_row
        # the query blocks in the second half start at tokens 160, 192, 224, 256 and 288
        assert dense_row["perplexity_border"]["tokens"] == 5
        for row in (
            dense_row,
            cab_row,
            wide_variant_row,
            matched_density_row,
            half_density_row,
            full_attention_row,
        ):
            assert row["recall_border"]["n"] == row["recall"]["n"] == 2
        assert full_attention_row["recall"]["share"] == dense_row["recall"]["share"]
        for perplexity_field in ("perplexity", "perplexity_border"):
            assert full_attention_row[perplexity_field]["ratio"] == pytest.approx(1, abs=1e-5)
        assert cab_row["perplexity_border"]["ratio"] != pytest.approx(1, abs=1e-5)
    assert str(tmp_path) not in json.dumps(results)
    noise_record, book_record = results["provenance"]["settings"]["texts"]
    assert (noise_record, book_record["name"]) == ("noise", "book.txt")
    assert "On book, 300 tokens, cab attends" in capsys.readouterr().out


@pytest.mark.parametrize("probe", ["recall", "recall_border"])
def test_predictions_at_block_borders_ignore_later_tokens(model_folder, monkeypatch, probe):
    monkeypatch.setattr(probes, "MIN_BORDER_DISTANCE", 32)
    sparse_assignments = (*SPARSE_ASSIGNMENTS, "mass_threshold=0", "max_density=0.3")
    options = {"device": "cpu", "lengths": (900,), "keys": 2}
    options |= {"cab": sparse_assignments, "methods": ("cab",)}
    experiment = Fidelity(Settings(model=str(model_folder), **options))
    reading = experiment.make_reading("noise", 900, probe, depth=None, index=0)
    case = {"method": "cab", "text": "noise", "length": 900, "budget": None, "fitted": None}

    def predict_at(tokens, position):
        """Return the model's prediction of the token at ``position``."""
        with experiment.make_method(case).apply_to(experiment.model):
            return teacher_forcing.predict_logits(
                experiment.model, Reading(tokens, ((position, position + 1),))
            )

    num_changed = 0
    for position, _ in reading.predicted_ranges:
        changed_tokens = reading.tokens[:position] + tuple(reversed(reading.tokens[position:]))
        is_equal = torch.equal(
            predict_at(reading.tokens, position), predict_at(changed_tokens, position)
        )
        num_changed += not is_equal
    assert (num_changed > 0) == (probe == "recall")


LOW_DENSITY_VARIANT = "tiny=query_block=32,key_block=16,dense_tail_blocks=1,max_density=0.05"
CONTINUATION_OPTIONS = (
    *("--probes", "continuation,asked", "--lengths", 640, "--documents", 2, "--asked", 2),
    *("--budgets", "0.05"),
)
TURN_OPTIONS = (
    *("--probes", "turns", "--lengths", 900, "--documents", 2, "--budgets", "0.05"),
    *("--variant", LOW_DENSITY_VARIANT, "--cab", "mass_threshold=0.2"),
)
# 640 tokens: sparse decoding needs at least 4 x decode_tokens = 512
DECODE_OPTIONS = (
    *("--probes", "decode,decode_asked,greedy", "--lengths", 640, "--documents", 2, "--asked", 2),
    *("--decoded", 24, "--written", 8, "--continuations", 3, "--match", "cab:sparse"),
    *("--variant", f"sparse={SMALL_BLOCK_ASSIGNMENTS},sparse_decode=true,decode_tokens=128"),
    *("--variant", f"dense={SMALL_BLOCK_ASSIGNMENTS}"),
)


@pytest.fixture(scope="module")
def run_and_get_rows(model_folder, tmp_path_factory):
    """Return a cached function that runs `run_fidelity` with options, and returns {method: row}."""

    @cache
    def run_once(options):
        methods_by_options = {
            CONTINUATION_OPTIONS: "full,cab,streaming",
            TURN_OPTIONS: "full,cab,random,streaming",
        }
        methods = methods_by_options.get(options, "full,streaming,h2o,snapkv")
        results = run_fidelity(
            model_folder,
            tmp_path_factory.mktemp("run"),
            options,
            methods=f"dense,{methods}",
            should_draw_figure=options != CONTINUATION_OPTIONS,
        )
        return {row["method"]: row for row in results["rows"]}

    return run_once


def test_continuation_is_compared_with_dense(run_and_get_rows):
    rows = run_and_get_rows(CONTINUATION_OPTIONS)
    continuations = {name: row["continuation"] for name, row in rows.items()}
    # the last eighth of 640 tokens, in two documents
    assert {result["tokens"] for result in continuations.values()} == {2 * 80}
    assert (continuations["dense"]["kl"], continuations["dense"]["agreement"]) == (0, 1)
    assert "ratio" not in continuations["dense"]
    assert continuations["full"]["kl"] == pytest.approx(0, abs=1e-7)
    assert continuations["full"]["ratio"] == pytest.approx(1, abs=1e-5)
    # streaming drops all keys before its window
    kl_by_method = {name: result["kl"] for name, result in continuations.items()}
    assert kl_by_method["streaming"] > kl_by_method["cab"] > 10 * abs(kl_by_method["full"])
    for continuation in continuations.values():
        assert 0 <= continuation["kl_low"] <= max(continuation["kl"], 0) <= continuation["kl_high"]
    assert {row["asked"]["n"] for row in rows.values()} == {4}


def test_turns_are_compared_with_dense(run_and_get_rows):
    rows = run_and_get_rows(TURN_OPTIONS)
    turns_by_method = {name: row["turns"]["turns"] for name, row in rows.items()}
    # the last eighth of the 180 tokens of a turn, in two documents
    assert {
        turn["tokens"] for turn_results in turns_by_method.values() for turn in turn_results
    } == {2 * 22}
    assert {len(turn_results) for turn_results in turns_by_method.values()} == {5}
    assert {(turn["kl"], turn["agreement"]) for turn in turns_by_method["dense"]} == {(0, 1)}
    for index, turn in enumerate(turns_by_method["full"]):
        assert turn["kl"] == pytest.approx(0, abs=1e-7) and turn["agreement"] == 1
        for name in ("cab", "cab:tiny", "random", "streaming"):
            assert turns_by_method[name][index]["kl"] > 10 * abs(turn["kl"])
    assert rows["cab"]["density"] < 0.6
    for row in rows.values():
        result = row["turns"]
        assert result["kl"] == pytest.approx(sum(turn["kl"] for turn in result["turns"]) / 5)
        expected = result["turns"][-1]["kl"] - result["turns"][0]["kl"]
        assert result["growth"] == pytest.approx(expected)
        assert result["growth_low"] <= result["growth"] <= result["growth_high"]


def test_continuation_is_exact_except_with_evicted_keys(model_folder):
    options = {"device": "cpu", "lengths": (640,), "cab": SPARSE_ASSIGNMENTS, "methods": ("cab",)}
    experiment = Fidelity(Settings(model=str(model_folder), **options))
    reading = experiment.make_reading("noise", 640, "continuation", depth=None, index=0)
    assert reading.prompt_length == 640 - 80
    question = {"text": "noise", "length": 640, "index": 0, "probe": "continuation"}
    measured_nll = {}
    for method_name in ("cab", "streaming"):
        case = {"method": method_name, "budget": None, **question, "fitted": 0.1}
        method = experiment.make_method(case)
        with method.apply_to(experiment.model):
            # `predict_log_probs` has a complete KV cache. `Fidelity.score_reading` has the cache of
            # the method, and that of streaming drops keys of the prompt
            exact_log_probs = predict_log_probs(
                experiment.model, reading, chunk=experiment.settings.dense_chunk_tokens
            )
            experiment.get_dense_predictions(case)
            measured_nll[method_name] = experiment.score_reading(case, reading, method)["nll"]
        exact_nll = -exact_log_probs[range(80), list(reading.tokens[560:])].sum().item()
        assert (measured_nll[method_name] == pytest.approx(exact_nll, abs=1e-3)) == (
            method_name == "cab"
        )


def test_decode_is_compared_with_dense(run_and_get_rows):
    rows = run_and_get_rows(DECODE_OPTIONS)
    cache_methods = ("streaming", "h2o", "snapkv")
    assert list(rows) == ["dense", "cab:sparse", "cab:dense", *cache_methods, "full"]
    # bytes per key: the index has 16 channels of half a byte and a scale of 2 bytes. K and V
    # together have 32 channels of 4 bytes
    expected_step_tokens = {
        "cab:dense": 640,
        "dense": 640,
        "full": 640,
        "cab:sparse": 128 + 640 * 10 / 128,
        **dict.fromkeys(cache_methods, 178),
    }
    assert {name: row["step_tokens"] for name, row in rows.items()} == expected_step_tokens
    assert {row["decode"]["tokens"] for row in rows.values()} == {2 * 24}
    assert {row["decode_asked"]["n"] for row in rows.values()} == {4}
    assert {row["greedy"]["n"] for row in rows.values()} == {3}
    decode_results = {name: row["decode"] for name, row in rows.items()}
    assert (decode_results["dense"]["kl"], decode_results["dense"]["agreement"]) == (0, 1)
    assert decode_results["full"]["kl"] == pytest.approx(0, abs=1e-7)
    for name in ("cab:sparse", *cache_methods):
        assert decode_results[name]["kl"] > 1e-6 > abs(decode_results["full"]["kl"])
    # the two configs have the same prefill, so the difference comes from decode steps
    assert decode_results["cab:sparse"]["kl"] != pytest.approx(
        decode_results["cab:dense"]["kl"], rel=1e-2
    )
    assert (rows["full"]["greedy"]["equal"], rows["full"]["greedy"]["prefix"]) == (3, 8)
    assert "equal" not in rows["dense"]["greedy"]


def test_batched_decode_equals_single_decode(model_folder, tmp_path, monkeypatch, run_and_get_rows):
    # with this limit a batch has one sequence of 640 tokens
    monkeypatch.setattr(fidelity, "MAX_BATCH_TOKENS", 640)
    for single_row in run_fidelity(model_folder, tmp_path, DECODE_OPTIONS, methods="dense,h2o")[
        "rows"
    ]:
        batched_row = run_and_get_rows(DECODE_OPTIONS)[single_row["method"]]
        assert single_row["decode"]["kl"] == pytest.approx(batched_row["decode"]["kl"], abs=1e-6)
        assert single_row["decode_asked"] == batched_row["decode_asked"]
        assert single_row["greedy"] == batched_row["greedy"]


@pytest.fixture
def interrupt_at_case(monkeypatch):
    """Return a function of n that makes the n-th measured case interrupt the run.

    Cases are counted from the call of the function. With None, no case interrupts the run. The
    function returns a list to which every case measured after the call is appended.
    """
    original_measure = Fidelity.measure

    def interrupt_at_case(case_number):
        measured_cases = []

        def measure_or_interrupt(self, case):
            measured_cases.append(case)
            if len(measured_cases) == case_number:
                raise KeyboardInterrupt
            return original_measure(self, case)

        monkeypatch.setattr(Fidelity, "measure", measure_or_interrupt)
        return measured_cases

    return interrupt_at_case


@pytest.mark.parametrize(
    ("options", "case_number"),
    [
        pytest.param(CONTINUATION_OPTIONS, 6, id="continuations"),
        pytest.param(TURN_OPTIONS, 4, id="turns, the first document of a variant"),
        pytest.param(DECODE_OPTIONS, 2, id="decoding, the second of two in a batch"),
    ],
)
def test_resumed_run_equals_uninterrupted_run(
    model_folder, tmp_path, interrupt_at_case, run_and_get_rows, options, case_number
):
    methods = "dense" if options is DECODE_OPTIONS else "dense,cab"
    interrupt_at_case(case_number)
    with pytest.raises(KeyboardInterrupt):
        run_fidelity(model_folder, tmp_path, options, methods=methods)
    for row in run_fidelity(model_folder, tmp_path, options, methods=methods)["rows"]:
        assert remove_over_floor_fields(row) == remove_over_floor_fields(
            run_and_get_rows(options)[row["method"]]
        )


def remove_over_floor_fields(row):
    """Return a row without ``over_floor``, which depends on the other methods of the run."""
    return {
        field: remove_over_floor_fields(value) if isinstance(value, dict) else value
        for field, value in row.items()
        if field != "over_floor"
    }


class CountingBench(Bench):
    """A fake timer: the n-th timed call takes n milliseconds."""

    def __init__(self):
        super().__init__("cpu")
        self.num_calls = 0

    def time(self, call, has_graph=True):
        call()
        self.num_calls += 1
        return Timing(float(self.num_calls))


def test_layer_times_are_summed(model_folder):
    model = Fidelity(Settings(model=str(model_folder), device="cpu")).model
    attention_clock, tokens = AttentionClock(CountingBench()), tuple(range(3, 63)) * 10
    dense_times = attention_clock.time(model, tokens, None)
    # both layers have the same shape, which is timed once: 1 ms each
    assert dense_times == {
        "predict_ms": 0.0,
        "attend_ms": 2.0,
        "dense_ms": 2.0,
        "dense_kernel": "SDPA",
    }
    config = CabConfig(min_length=0, query_block=32, key_block=16)
    sparse_times = attention_clock.time(model, tokens, config)
    assert (sparse_times["predict_ms"], sparse_times["attend_ms"], sparse_times["dense_ms"]) == (
        2 + 4,
        3 + 5,
        2,
    )
    assert "predict_reported" not in sparse_times
    # the layer in dense_layers takes the time of dense attention, 1 ms
    sparse_times = attention_clock.time(model, tokens, CabConfig(min_length=0, dense_layers=(0,)))
    assert (sparse_times["predict_ms"], sparse_times["attend_ms"]) == (6, 1 + 7)
    cascade_config = CabConfig(min_length=0, predictor="cascade", anchors=(0,))
    assert attention_clock.time(model, tokens, cascade_config)["dense_ms"] == 2
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("predictor_name", "reported_share"), [("xattention", 9.3 / 73.8), ("streaming", 0.0)]
)
def test_selection_time_uses_share_reported_by_authors(
    predictor_name, reported_share, model_folder
):
    model = Fidelity(Settings(model=str(model_folder), device="cpu")).model
    config = CabConfig(min_length=0, query_block=32, key_block=16, predictor=predictor_name)
    result = AttentionClock(CountingBench()).time(model, tuple(range(3, 63)) * 10, config)
    assert result["predict_reported"] == reported_share
    # dense attention is measured once and counts for both layers
    assert result["predict_ms"] == pytest.approx(reported_share * 2)
    assert result["attend_ms"] == 2 + 3


def test_baselines_without_selection_kernel_have_reported_share():
    predictors = {
        method.predictor for method in METHODS.values() if issubclass(method, PredictorMethod)
    }
    assert set(attention_time.REPORTED_SELECTION_SHARES) == predictors | {"streaming"}


def test_rows_contain_times_and_quality(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "make_layer_bench", lambda device: CountingBench())
    results = run_fidelity(
        model_folder, tmp_path, ["--probes", "continuation"], should_draw_figure=True
    )
    dense_row, cab_row, random_row = results["rows"]
    assert dense_row["over_dense"] == 1
    assert (
        cab_row["over_dense"]
        == (cab_row["predict_ms"] + cab_row["attend_ms"]) / cab_row["dense_ms"]
    )
    assert random_row["attend_ms"] > 0
    assert (random_row["predict_ms"], random_row["predict_reported"]) == (0, 0)


def test_cpu_is_timed_only_for_equal_time():
    assert attention_time.make_layer_bench("cpu") is None
    assert Fidelity(Settings(device="cpu")).attention_clock is None
    # methods that are matched by time need a timer, even on a CPU
    assert type(Fidelity(Settings(device="cpu", equal="time")).attention_clock.bench) is Bench


BASELINE_NAMES = (
    "random,antidiagonal,xattention_fitted,vertical_slash,flexprefill_fitted,mean_pooled,streaming"
)
EQUAL_TIME_OPTIONS = ("--probes", "continuation", "--lengths", "900", "--equal", "time")


def test_fitted_budget_matches_attention_time(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "make_layer_bench", lambda device: DensityBench())
    # with the default minimum, FlexPrefill would select all blocks of such a short sequence
    monkeypatch.setattr(last_queries, "FLEXPREFILL_MIN_TOKENS", 32)
    results = run_fidelity(
        model_folder, tmp_path, EQUAL_TIME_OPTIONS, methods=f"dense,cab,{BASELINE_NAMES}"
    )
    rows = {row["method"]: row for row in results["rows"]}
    cab_ms = rows["cab"]["predict_ms"] + rows["cab"]["attend_ms"]
    for name in BASELINE_NAMES.split(","):
        row = rows[name]
        assert row["predict_ms"] + row["attend_ms"] == pytest.approx(cab_ms, rel=0.05)
        assert row["over_match"] == pytest.approx(1, abs=0.05)
        assert row["fitted"] == cab_ms
        assert row["continuation"]["n"] == 1
    assert rows["antidiagonal"]["density"] < rows["random"]["density"]
    assert "over_match" not in rows["dense"] and "over_match" not in rows["cab"]


def test_resumed_run_reuses_fitted_budgets(model_folder, tmp_path, monkeypatch, interrupt_at_case):
    """A resumed run fits no method again, although the patched timer returns different times."""
    monkeypatch.setattr(fidelity, "make_layer_bench", lambda device: DensityBench())
    options = (*EQUAL_TIME_OPTIONS, "--probes", "continuation,recall", "--documents", "2")
    # interrupt the run at case 12, the second sample of the third method
    measured_cases = interrupt_at_case(12)
    with pytest.raises(KeyboardInterrupt):
        run_fidelity(model_folder, tmp_path, options)
    assert measured_cases[-1]["method"] == "random"
    monkeypatch.setattr(fidelity, "make_layer_bench", lambda device: CountingBench())
    run_fidelity(model_folder, tmp_path, options)
    _, samples = read_log(tmp_path / "samples.jsonl")
    samples = [sample for sample in samples if sample["method"] == "random"]
    assert ["fitted_config" in sample for sample in samples] == [True, *[False] * 4]
    assert len({sample["density"] for sample in samples if sample["probe"] == "recall"}) == 1


def test_every_method_has_rows(model_folder, tmp_path, halve_weights_for_fp8):
    # leave out methods with dense prefill, which equal dense attention except in decode steps
    method_names = [name for name, method in METHODS.items() if not method.has_dense_prefill]
    options = ("--probes", "continuation", "--lengths", "600", "--budgets", "0.5")
    rows = run_fidelity(model_folder, tmp_path, options, methods=",".join(method_names))["rows"]
    # the documents have no needle, so the method no_needle has no rows
    assert [row["method"] for row in rows] == [name for name in method_names if name != "no_needle"]
    densities = {row["method"]: row["density"] for row in rows}
    assert densities["mean_pooled"] == pytest.approx(0.5, abs=0.06)


def test_run_is_extended_by_more_cases(model_folder, tmp_path, interrupt_at_case, capsys):
    run_fidelity(model_folder, tmp_path)
    measured_cases = interrupt_at_case(None)
    results = run_fidelity(model_folder, tmp_path, ["--documents", "2"], methods="dense")
    assert [row["recall"]["n"] for row in results["rows"]] == [4, 2, 2]
    assert [case["index"] for case in measured_cases] == [1] * 4

    variant_options = ["--variant", f"wide={SMALL_BLOCK_ASSIGNMENTS}"]
    assert (
        long_runs.run_eval("fidelity", model_folder, tmp_path, command_options=variant_options) == 2
    )
    assert "Give another --out" in capsys.readouterr().err
