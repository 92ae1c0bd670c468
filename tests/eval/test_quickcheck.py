"""The quickcheck command: time limit, search, advice, and runs on a tiny model."""

import importlib.machinery
import json
import math
import re
import runpy
import sys
import types
from itertools import count
from pathlib import Path

import pytest
import torch
from tiny import SMALL_BLOCKS_CONFIG, draw_token_ids, make_tiny_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel
from words import PROSE_TEXT, make_tokenizer

import cab_hf
from cab_hf import CabConfig
from cab_hf.eval import on_model
from cab_hf.eval.__main__ import main
from cab_hf.eval.quickcheck import (
    CONFIG_FILE,
    FIGURE_FILE,
    REPORT_FILE,
    ROWS_FILE,
    Settings,
    advice,
    budget,
    kernels,
    report,
)
from cab_hf.eval.quickcheck.advice import CAB, DENSE, FULL, KlPoint
from cab_hf.eval.quickcheck.budget import KL, RECALL, TTFT, Cost, Scope, Step, find_next_step
from cab_hf.eval.quickcheck.measure import (
    Measurements,
    OutOfTime,
    SourceText,
    choose_num_keys,
    rank_kernels,
)
from cab_hf.experiment.settings import UsageError, read_settings

EXAMPLES_FOLDER = Path(__file__).parents[2] / "examples"
# the first threshold of a search
START_THRESHOLD = 0.0027
# the KL to reach, in nats per token
TARGET_KL = 0.02
CAB_OPTIONS = ("--cab", "query_block=32", "--cab", "key_block=32")
MODEL_COST = Cost(num_parameters=1e8, attention_channels=2e4)


def make_kl_row(length, threshold, kl, document_index=0, method=CAB):
    """Return a log row of a measured KL of ``kl`` nats per token over 10 tokens."""
    return {
        **Step(KL, length, method, threshold, index=document_index).row_fields,
        **{"kl": kl * 10, "count": 10, "densities": [0.5, None]},
        "pass_seconds": {method: 1.0},
    }


def make_time_row(length, threshold, dense_ms, cab_ms):
    """Return a log row of the measured time to the first token, dense and by CAB."""
    return {
        **Step(TTFT, length, CAB, threshold).row_fields,
        **{"dense_ms": dense_ms, "cab_ms": cab_ms, "kernel": "sdpa", "densities": [0.25, None]},
        **{"dense_peak_gib": 2.0, "cab_peak_gib": 2.5},
        "pass_seconds": {DENSE: dense_ms / 1000, CAB: cab_ms / 1000},
    }


def make_recall_row(length, method, threshold, is_key_right):
    """Return a log row of a recall measurement; ``is_key_right`` has a bool for each key."""
    step_fields = Step(RECALL, length, method, threshold).row_fields
    return {**step_fields, "right": is_key_right, "pass_seconds": {method: 1.0}}


@pytest.mark.parametrize("target_kl", [0.002, 0.01, 0.02, 0.09])
@pytest.mark.parametrize("slope", [0.5, 0.75, 1.2])
def test_search_finds_threshold_of_power_law(target_kl, slope):
    kl_points = [KlPoint(START_THRESHOLD, 0.02)]
    while (threshold := advice.choose_next_threshold(sorted(kl_points), target_kl)) is not None:
        kl_points.append(KlPoint(threshold, 0.02 * (threshold / START_THRESHOLD) ** slope))
        assert len(kl_points) <= advice.MAX_KL_POINTS
    chosen_threshold = advice.choose_threshold(kl_points, target_kl)
    kl = dict(kl_points)[chosen_threshold]
    assert 0.5 * target_kl <= kl <= target_kl


@pytest.mark.parametrize(
    ("thresholds_and_kls", "expected"),
    [
        ([], None),
        # the KL is close enough to the target
        ([(0.0027, 0.019)], None),
        # the next threshold differs by a factor of 8 at most
        ([(0.0027, 0.0)], 0.0216),
        # the KL does not grow
        ([(0.02, 0.0008), (0.08, 0.0008)], 0.64),
        # a threshold is a fraction of the attention mass, so at most 1
        ([(0.5, 0.001)], 1.0),
        ([(1.0, 0.001)], None),
        # five thresholds are the maximum
        ([(0.1, 0.5), (0.2, 0.6), (0.3, 0.7), (0.4, 0.8), (0.5, 0.9)], None),
    ],
)
def test_next_threshold_by_hand(thresholds_and_kls, expected):
    kl_points = [KlPoint(threshold, kl) for threshold, kl in thresholds_and_kls]
    assert advice.choose_next_threshold(kl_points, TARGET_KL) == expected


def test_unreachable_target_selects_threshold_with_least_kl():
    kl_points = [KlPoint(0.001, 0.03), KlPoint(0.002, 0.05)]
    assert advice.choose_threshold(kl_points, TARGET_KL) == 0.001
    assert advice.choose_threshold([*kl_points, KlPoint(0.0005, 0.01)], TARGET_KL) == 0.0005


def test_threshold_needs_kl_of_all_documents():
    rows = [make_kl_row(8192, START_THRESHOLD, 0.01, document_index) for document_index in (0, 1)]
    rows += [make_kl_row(8192, 0.005, 0.02, 0)]
    assert advice.list_kl_points(rows, 8192, START_THRESHOLD) == [
        (START_THRESHOLD, pytest.approx(0.01))
    ]
    rows += [make_kl_row(8192, 0.005, 0.04, 1)]
    assert advice.list_kl_points(rows, 8192, START_THRESHOLD)[1].kl == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("lengths_and_speedups", "expected"),
    [
        ([], None),
        ([(8192, 0.9), (32768, 1.3), (131072, 2.1)], 12544),
        ([(8192, 1.1), (32768, 1.3)], 8192),
        # a speed-up of 1.01 is within the noise of timing
        ([(8192, 0.5), (32768, 1.01)], None),
        # CAB must save time at the longest length
        ([(8192, 1.2), (32768, 0.9)], None),
        ([(32768, 1.3), (8192, 1.02)], 8192),
    ],
)
def test_break_even_length(lengths_and_speedups, expected):
    assert advice.find_break_even_length(lengths_and_speedups, multiple_tokens=128) == expected


def test_time_estimate_grows_with_length():
    rows = [make_time_row(8192, START_THRESHOLD, 1000, 500)]
    step = Step(TTFT, 32768, CAB, START_THRESHOLD)
    num_passes_by_method = budget.count_passes(
        step, num_runs=3, num_warm_ups=1, num_kernels=1, is_dense_cached=False
    )
    assert num_passes_by_method == {DENSE: 4, CAB: 4}
    operation_ratio = MODEL_COST.count_operations(32768) / MODEL_COST.count_operations(8192)
    assert budget.estimate_step_seconds(
        step, rows, num_passes_by_method, MODEL_COST
    ) == pytest.approx(1.2 * operation_ratio * (4 * 1.5))
    step_at_other_threshold = Step(TTFT, 8192, CAB, 0.001)
    assert budget.estimate_step_seconds(
        step_at_other_threshold, rows, num_passes_by_method, MODEL_COST
    ) == pytest.approx(4 * 1.5)


@pytest.mark.parametrize(
    ("cab_ms", "seconds"),
    [(500, budget.FULL_DENSE_TIME_RATIO), (2000, 2 * budget.FULL_CAB_TIME_RATIO)],
)
def test_full_budget_pass_is_estimated_from_other_passes(cab_ms, seconds):
    rows = [make_time_row(8192, START_THRESHOLD, 1000, cab_ms)]
    assert budget.estimate_pass_seconds(rows, FULL, 8192, MODEL_COST) == seconds
    assert budget.estimate_pass_seconds([], FULL, 8192, MODEL_COST) is None


@pytest.mark.parametrize("minutes", [0.5, 2, 10, 30])
@pytest.mark.parametrize("operations_per_second", [2e9, 2e10, 4e12])
def test_run_stays_within_its_minutes(minutes, operations_per_second):
    """Each simulated pass takes up to 15 % more or less time than estimated from its operations."""
    measurement_scope = Scope(
        (8192, 32768, 131072), START_THRESHOLD, TARGET_KL, num_documents=2, num_kernels=3
    )
    rows, skip_reasons, elapsed_seconds, pass_numbers = [], {}, 10.0, count()
    while (step := find_next_step(measurement_scope, rows, skip_reasons)) is not None:
        num_passes_by_method = budget.count_passes(
            step, num_runs=3, num_warm_ups=1, num_kernels=3, is_dense_cached=False
        )
        seconds = budget.estimate_step_seconds(step, rows, num_passes_by_method, MODEL_COST)
        if not budget.fits_time_limit(seconds, elapsed_seconds, minutes):
            skip_reasons[step] = budget.describe_missing_time(seconds, elapsed_seconds, minutes)
            continue
        noise_factor = 1 + 0.3 * ((next(pass_numbers) * 0.618) % 1 - 0.5)
        num_operations = MODEL_COST.count_operations(step.length)
        relative_work_by_method = {DENSE: 1.0, CAB: 0.6, FULL: 1.2}
        pass_seconds = {
            method: noise_factor
            * relative_work_by_method[method]
            * num_operations
            / operations_per_second
            for method in num_passes_by_method
        }
        elapsed_seconds += sum(
            num_passes_by_method[method] * pass_seconds[method] for method in num_passes_by_method
        )
        kl = 0.02 * ((step.threshold or 0) / START_THRESHOLD) ** 0.75
        kl_fields = {"kl": kl, "count": 1, "densities": [0.5]}
        rows.append({**step.row_fields, **kl_fields, "pass_seconds": pass_seconds})
    # the first four steps, probes, have no estimate and may exceed the time
    assert elapsed_seconds + budget.REPORT_SECONDS <= 1.1 * 60 * minutes or len(rows) <= 4
    assert all("were left" in reason for reason in skip_reasons.values())


def test_schedule_measures_selected_threshold_and_ends():
    measurement_scope, rows = Scope((512, 1024), START_THRESHOLD, TARGET_KL), []
    while (step := find_next_step(measurement_scope, rows)) is not None:
        rows.append(
            {
                **step.row_fields,
                **{"kl": 0.03 * ((step.threshold or 0) / START_THRESHOLD) ** 0.75, "count": 1},
                **{"right": [True], "densities": [0.5], "pass_seconds": {step.method: 9.0}},
            }
        )
        assert len(rows) < 60
    steps = [(row["measure"], row["length"], row["threshold"]) for row in rows]
    rows_without_times = [row for row in rows if row["measure"] != TTFT]
    verdict = advice.draw_conclusions(
        rows_without_times, START_THRESHOLD, TARGET_KL, query_block=128
    )
    assert verdict.threshold < START_THRESHOLD and verdict.is_close_enough
    for length in measurement_scope.lengths:
        assert (TTFT, length, verdict.threshold) in steps
        assert (RECALL, length, verdict.threshold) in steps
    # the steps without which no advice is possible come first
    assert [measure for measure, _, _ in steps[:4]] == ["probe", "probe", TTFT, TTFT]


def test_skipped_search_step_keeps_measured_thresholds():
    measurement_scope, skip_reasons = Scope((512,), START_THRESHOLD, TARGET_KL), {}
    probe_steps = [Step("probe", 512, DENSE), Step("probe", 512, CAB, START_THRESHOLD)]
    measured_steps = [*probe_steps, Step(TTFT, 512, CAB, START_THRESHOLD)]
    rows = [{**step.row_fields, "pass_seconds": {DENSE: 9.0, CAB: 9.0}} for step in measured_steps]
    rows += [make_kl_row(512, START_THRESHOLD, 0.05)]
    step = find_next_step(measurement_scope, rows, skip_reasons)
    assert step.measure == KL and step.threshold < START_THRESHOLD
    skip_reasons[step] = "no time"
    assert find_next_step(measurement_scope, rows, skip_reasons) == Step(KL, 512, FULL)
    rows += [make_kl_row(512, None, 0.0, method=FULL)]
    assert find_next_step(measurement_scope, rows, skip_reasons).measure == RECALL


@pytest.mark.parametrize(
    ("length", "min_border_distance", "num_keys"), [(131072, 128, 16), (1024, 32, 5), (64, 1, 1)]
)
def test_number_of_keys_fits_into_document(length, min_border_distance, num_keys):
    assert choose_num_keys(length, min_border_distance) == num_keys


def test_kernels_are_ranked_at_nearest_length():
    rows = [
        {"measure": "kernels", "length": 512, "kernel_ms": {"a": 1.0, "b": 2.0, "c": 3.0}},
        {"measure": "kernels", "length": 4096, "kernel_ms": {"b": 4.0, "a": 5.0}},
    ]
    assert rank_kernels([], 512) == []
    assert rank_kernels(rows, 600) == ["a", "b"]
    assert rank_kernels(rows, 8192) == ["b", "a"]


def write_advice(rows, target_kl=TARGET_KL):
    """Return the verdict on measured rows, and the sentence of advice about this verdict."""
    verdict = advice.draw_conclusions(rows, START_THRESHOLD, target_kl, query_block=128)
    summaries = advice.list_summaries(rows, START_THRESHOLD, verdict.threshold)
    sentence = advice.write_advice(rows, verdict, summaries, target_kl, device_name="NVIDIA H200")
    return verdict, sentence


# rows of a model for which CAB is slower at 8,192 tokens and faster at 32,768
FAST_ROWS = [
    make_time_row(8192, START_THRESHOLD, 100, 120),
    make_time_row(32768, START_THRESHOLD, 1000, 800),
    make_kl_row(32768, START_THRESHOLD, 0.018),
    make_kl_row(32768, None, 0.0018, method=FULL),
    make_recall_row(32768, DENSE, None, [True, True, True]),
    make_recall_row(32768, CAB, START_THRESHOLD, [True, True, False]),
]
# lower thresholds, whose KL stays above the target 0.001
LOWER_THRESHOLD_ROWS = [
    make_kl_row(32768, START_THRESHOLD / 2**num_halvings, 0.01) for num_halvings in range(1, 5)
]


@pytest.mark.parametrize(
    ("rows", "target_kl", "message", "min_length"),
    [
        (FAST_ROWS, TARGET_KL, "use CAB with mass_threshold=0.0027 for prompts from about", 15104),
        (FAST_ROWS[1:], TARGET_KL, "for all measured lengths, from 32,768 tokens", 32768),
        (FAST_ROWS[:1], TARGET_KL, "keep dense attention up to 8,192 tokens", 16384),
        (
            [*FAST_ROWS, *LOWER_THRESHOLD_ROWS],
            0.001,
            "no measured mass_threshold has a KL of at most 0.001",
            15104,
        ),
        (FAST_ROWS, 0.001, "raise --minutes and run the same command again", 15104),
        ([], TARGET_KL, "nothing was timed within the given minutes", 16384),
    ],
    ids=["from a length", "all lengths", "slow", "high KL", "search not ended", "no time"],
)
def test_advice_is_one_sentence(rows, target_kl, message, min_length):
    verdict, sentence = write_advice(rows, target_kl)
    assert message in sentence and sentence.count(". ") == 0 and sentence.endswith(".")
    config = advice.make_advised_config(CabConfig(), verdict)
    assert config.min_length == pytest.approx(min_length, rel=0.05)


def test_advice_states_speed_kl_and_recall():
    _, sentence = write_advice(FAST_ROWS)
    assert "1.25 times as fast as with sdpa" in sentence
    assert "KL is 0.018 (target 0.02, noise 0.0018)" in sentence
    assert "2 (dense 3) of 3 keys in running text" in sentence


def test_advice_states_threshold_of_the_time():
    _, sentence = write_advice([*FAST_ROWS, make_kl_row(32768, 0.0029, 0.0199)])
    assert "with mass_threshold=0.0029 for" in sentence
    assert "1.25 times as fast as with sdpa (with mass_threshold=0.0027)" in sentence


def test_lengths_timed_at_another_threshold_are_included():
    rows = [*FAST_ROWS, make_kl_row(32768, 0.0029, 0.0199), make_time_row(8192, 0.0029, 100, 90)]
    verdict, _ = write_advice(rows)
    assert (verdict.threshold, verdict.longest_timed_length, verdict.pays_from_length) == (
        0.0029,
        32768,
        8192,
    )


def test_target_0_keeps_configured_threshold():
    assert advice.choose_next_threshold([KlPoint(START_THRESHOLD, 0.5)], 0.0) is None
    verdict, sentence = write_advice(FAST_ROWS, 0.0)
    assert verdict.threshold == START_THRESHOLD and "use CAB with mass_threshold=0.0027" in sentence
    assert "KL is 0.018 (noise 0.0018)" in sentence


def test_advice_considers_larger_kl_at_shorter_length():
    verdict, sentence = write_advice([*FAST_ROWS, make_kl_row(8192, START_THRESHOLD, 0.05)])
    assert not verdict.is_close_enough and "keep dense attention" in sentence


def test_quickcheck_page_equals_committed_report():
    docs_folder = EXAMPLES_FOLDER.parent / "docs"
    report_text = (docs_folder / "quickcheck-smollm2-cpu" / REPORT_FILE).read_text()
    _, sentence, table, *_ = report_text.split("\n\n")
    page = (docs_folder / "quickcheck.md").read_text()
    assert sentence in page and table in page


@pytest.fixture
def skip_figure(monkeypatch):
    """Draw no figure, because drawing takes longer than measuring a tiny model."""
    monkeypatch.setattr(report, "draw_figure", lambda **_: None)


@pytest.fixture
def book_file(tmp_path):
    """Return the path of a text file."""
    text_file = tmp_path / "book.txt"
    text_file.write_text(f"{PROSE_TEXT} " * 60)
    return text_file


def make_command_arguments(model, book_file, out, *more_options):
    """Return the command line of quickcheck, as a list of words.

    The options ``more_options`` are added, and small blocks unless ``more_options`` contains --cab.
    """
    arguments = ["--model", model, "--texts", book_file, "--out", out, "--lengths", "160,320"]
    arguments += ["--device", "cpu", "--runs", 1]
    for option in more_options:
        arguments += option if isinstance(option, (list, tuple)) else [option]
    if "--cab" not in arguments:
        assignments = [f"{name}={value}" for name, value in on_model.SMALL_BLOCK_FIELDS.items()]
        arguments += [option for assignment in assignments for option in ("--cab", assignment)]
    return ["quickcheck", *map(str, arguments)]


def read_rows(out):
    """Return the measured rows in the log of a run."""
    return [json.loads(line) for line in (out / ROWS_FILE).read_text().splitlines()[1:]]


def test_quickcheck_writes_rows_report_figure_and_config(model_folder, book_file, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(make_command_arguments(model_folder, book_file, out)) == 0
    printed_text = capsys.readouterr().out
    report_text = (out / REPORT_FILE).read_text()
    (sentence,) = re.findall(r"^On \S+, .*\.$", printed_text, re.MULTILINE)
    assert sentence in report_text and "| 320 | dense (sdpa) | 1.00 |" in report_text
    assert "## Density by layer" in report_text and "## Not measured" not in report_text
    assert (out / FIGURE_FILE).stat().st_size > 3_000
    measure_names = {row["measure"] for row in read_rows(out)}
    assert measure_names == {"probe", TTFT, KL, RECALL, "recall_border"}
    config = CabConfig.calibrated(out / CONFIG_FILE)
    assert f"mass_threshold={config.mass_threshold:g} (advised)" in report_text
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    cab_hf.apply_cab(model, out / CONFIG_FILE)
    loaded_model, _ = cab_hf.load_model(model_folder, device="cpu", cab_config=out / CONFIG_FILE)
    assert loaded_model.config.cab_config == config.to_dict()


@pytest.mark.usefixtures("skip_figure")
def test_interrupted_quickcheck_continues(model_folder, book_file, tmp_path, monkeypatch):
    out, original_measure_step, measured_steps = tmp_path / "run", Measurements.measure_step, []

    def interrupt_after_five_steps(self, step, rows, deadline):
        if len(measured_steps) == 5:
            raise KeyboardInterrupt
        measured_steps.append(step)
        return original_measure_step(self, step, rows, deadline)

    monkeypatch.setattr(Measurements, "measure_step", interrupt_after_five_steps)
    with pytest.raises(KeyboardInterrupt):
        main(make_command_arguments(model_folder, book_file, out))
    rows_before = read_rows(out)
    assert len(rows_before) == 5 and not (out / REPORT_FILE).exists()
    measured_steps.clear()
    monkeypatch.setattr(Measurements, "measure_step", original_measure_step)
    assert main(make_command_arguments(model_folder, book_file, out)) == 0
    rows_after = read_rows(out)
    assert rows_after[:5] == rows_before
    assert len({tuple(row[name] for name in budget.STEP_FIELDS) for row in rows_after}) == len(
        rows_after
    )


@pytest.mark.usefixtures("skip_figure")
def test_only_budget_settings_may_change_in_a_resumed_run(
    model_folder, book_file, tmp_path, capsys
):
    out = tmp_path / "run"
    assert main(make_command_arguments(model_folder, book_file, out)) == 0
    assert (
        main(
            make_command_arguments(model_folder, book_file, out, ["--lengths", "160", "--kl", 0.1])
        )
        == 0
    )
    assert main(make_command_arguments(model_folder, book_file, out, ["--seed", 1])) == 2
    assert "seed" in capsys.readouterr().err


@pytest.mark.usefixtures("skip_figure")
def test_steps_over_budget_are_skipped_and_reported(model_folder, book_file, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(make_command_arguments(model_folder, book_file, out, ["--minutes", 0.001])) == 0
    report_text = (out / REPORT_FILE).read_text()
    assert "## Not measured" in report_text and "took longer than estimated" in report_text
    assert "nothing was timed" in report_text and CabConfig.calibrated(out / CONFIG_FILE)
    assert not read_rows(out) and not (out / FIGURE_FILE).exists()
    assert "steps were skipped" in capsys.readouterr().out
    # the same command with more minutes measures the skipped steps
    assert main(make_command_arguments(model_folder, book_file, out, ["--minutes", 5])) == 0
    assert "## Not measured" not in (out / REPORT_FILE).read_text()


@pytest.mark.usefixtures("skip_figure")
def test_failed_step_is_reported_and_others_run(model_folder, book_file, tmp_path, monkeypatch):
    def raise_out_of_memory(self, step):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Measurements, "measure_recall", raise_out_of_memory)
    out = tmp_path / "run"
    assert main(make_command_arguments(model_folder, book_file, out)) == 0
    assert "text 0: CUDA out of memory" in (out / REPORT_FILE).read_text()
    assert {row["measure"] for row in read_rows(out)} == {"probe", TTFT, KL}


@pytest.mark.usefixtures("skip_figure")
def test_lengths_beyond_texts_are_skipped(model_folder, book_file, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(make_command_arguments(model_folder, book_file, out, ["--lengths", "160,2k"])) == 0
    message = "so that 2,048 tokens are left out."
    assert message in capsys.readouterr().out and message in (out / REPORT_FILE).read_text()
    assert {row["length"] for row in read_rows(out)} == {160}


@pytest.fixture
def bert_folder(tmp_path):
    """Return the folder of a tiny BERT, which is not causal."""
    model_folder, tokenizer = tmp_path / "bert", make_tokenizer()
    config_fields = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = BertConfig(
        **config_fields, num_hidden_layers=1, vocab_size=len(tokenizer), pad_token_id=1
    )
    BertLMHeadModel(config).save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
    return model_folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--texts", "none.txt"], "texts must be a UTF-8 text file, got 'none.txt'"),
        (["--lengths", "2k"], "texts must contain one text of at least 2,048 tokens"),
        (["--lengths", "4k"], "lengths must be at most 2048, the positions of model"),
        (["--lengths", "32"], "lengths must be at least 128 tokens each"),
        (["--model", "lama"], "model 'lama' does not exist"),
        (["--minutes", "0"], "minutes must be greater than 0"),
        (["--kl", "-1"], "kl must be at least 0"),
        (["--cab", "mass_threshold=0", "--lengths", "1k"], "a mass_threshold greater than 0"),
        (["--cab", "predictor=frc", "--lengths", "1k"], "a predictor with a mass_threshold"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, list) else "",
)
@pytest.mark.usefixtures("skip_figure")
def test_invalid_input_is_refused_in_one_sentence(
    model_folder, book_file, tmp_path, capsys, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(make_command_arguments(model_folder, book_file, tmp_path / "run", options))
    except SystemExit as error:
        status = error.code
    error_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2 and message in error_line
    assert not (tmp_path / "run" / REPORT_FILE).exists()


@pytest.mark.usefixtures("skip_figure")
def test_noncausal_model_is_refused(bert_folder, book_file, tmp_path, capsys):
    assert main(make_command_arguments(bert_folder, book_file, tmp_path / "run")) == 2
    assert (
        "model must be a causal LM with attention that CAB can compute" in capsys.readouterr().err
    )


def test_default_lengths_fit_the_model():
    settings = Settings(model="tiny", device="cpu", lengths=(8192, 32768, 131072))
    from cab_hf.eval.quickcheck import limit_lengths

    assert limit_lengths(settings).lengths == (4096,)
    with pytest.raises(UsageError, match="lengths must be at most 4096"):
        limit_lengths(Settings(model="tiny", device="cpu", lengths=(512, 8192)))


@pytest.mark.usefixtures("skip_figure")
def test_command_in_report_repeats_the_run(model_folder, book_file, tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert main(make_command_arguments(model_folder, book_file, out, CAB_OPTIONS)) == 0
    command_lines = re.findall(
        r"^python -m cab_hf.eval quickcheck (.*)$", (out / REPORT_FILE).read_text(), re.M
    )
    monkeypatch.chdir(tmp_path)
    repeated_settings = read_settings(Settings, command_lines[0].split(), "quickcheck")
    assert (
        repeated_settings.lengths == (160, 320)
        and repeated_settings.cab == CAB_OPTIONS[1::2]
        and repeated_settings.runs == 1
    )


@pytest.mark.slow
def test_quickcheck_of_smollm2_on_cpu(tmp_path):
    out = tmp_path / "run"
    options = ["--model", "smollm2", "--device", "cpu", "--out", str(out), "--minutes", "3"]
    assert main(["quickcheck", *options]) == 0
    assert {TTFT, KL} <= {row["measure"] for row in read_rows(out)}
    assert CabConfig.calibrated(out / CONFIG_FILE).origin.layers == 30


@pytest.mark.usefixtures("skip_figure")
def test_random_weights_are_timed_at_max_density(book_file, tmp_path, monkeypatch):
    out, random_model_folder = tmp_path / "run", tmp_path / "random"
    config_fields = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 258,
    }
    config_fields |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    arguments = [
        str(random_model_folder),
        *(f"{name}={value}" for name, value in config_fields.items()),
    ]
    monkeypatch.setattr(sys, "argv", ["random_model.py", *arguments])
    runpy.run_path(str(EXAMPLES_FOLDER / "random_model.py"), run_name="__main__")
    options = ("--kl", 0, "--cab", "mass_threshold=1e-6", "--cab", "max_density=0.5", *CAB_OPTIONS)
    assert (
        main(
            make_command_arguments(
                random_model_folder, book_file, out, [*options, "--lengths", "640"]
            )
        )
        == 0
    )
    (density,) = next(row["densities"] for row in read_rows(out) if row["measure"] == KL)
    # above 0.5, because the first blocks and the blocks of the dense tail are always selected
    assert 0.5 <= density < 0.75
    assert CabConfig.calibrated(out / CONFIG_FILE).mass_threshold == 1e-6


@pytest.fixture
def fake_flash_modules(monkeypatch):
    """Install a fake FlashAttention-3 module, and a FlashAttention-2 module with wrong results."""

    def fake_flash_attn(q, k, v, softmax_scale, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2), None

    for module_name, attend_function in (
        ("fa3_fwd_interface", fake_flash_attn),
        ("broken", lambda q, *_, **__: q * 9),
    ):
        module = types.ModuleType(module_name)
        module.__spec__ = importlib.machinery.ModuleSpec(module_name, None)
        module.flash_attn_func = attend_function
        monkeypatch.setitem(sys.modules, module_name, module)
    monkeypatch.setitem(kernels.FLASH_MODULES, "FlashAttention-2", ("broken",))


def test_dense_kernels_are_compared_and_checked(fake_flash_modules):
    tokenizer = make_tokenizer()
    model = make_tiny_model(vocab_size=len(tokenizer))
    assert kernels.list_kernel_names("sdpa", is_on_cpu=True) == ["sdpa"]
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    measurements = Measurements(
        model, tokenizer, [SourceText([PROSE_TEXT], 0)], SMALL_BLOCKS_CONFIG, seed=0, num_runs=1
    )
    measurements.kernel_names = kernels.list_kernel_names("sdpa", is_on_cpu=False)
    step = Step("kernels", 300, DENSE)
    kernel_comparison = measurements.measure_step(step, [], math.inf)
    assert {"sdpa", "FlashAttention-3", "cab_dense"} <= kernel_comparison["kernel_ms"].keys()
    assert "differs by" in kernel_comparison["reasons"]["FlashAttention-2"]
    assert "cuDNN" in kernel_comparison["reasons"]
    row = {**step.row_fields, **kernel_comparison, "kernel_ms": {"FlashAttention-3": 1.0}}
    timed_fields = measurements.measure_step(Step(TTFT, 300, CAB, START_THRESHOLD), [row], math.inf)
    assert timed_fields["kernel"] == "FlashAttention-3" and timed_fields["dense_ms"] > 0
    assert model.config._attn_implementation == "sdpa"


def test_kernel_without_windows_raises_for_sliding_window(fake_flash_modules):
    model = make_tiny_model("mistral-sliding")
    with (
        pytest.raises(NotImplementedError),
        kernels.use_dense_kernel(model, "FlashAttention-3", "sdpa"),
    ):
        model(draw_token_ids(1, 100))
    assert model.config._attn_implementation == "sdpa"


def test_step_stops_at_deadline():
    tokenizer = make_tokenizer()
    model = make_tiny_model(vocab_size=len(tokenizer))
    measurements = Measurements(
        model, tokenizer, [SourceText([PROSE_TEXT], 0)], SMALL_BLOCKS_CONFIG, seed=0, num_runs=1
    )
    with pytest.raises(OutOfTime, match="took longer than estimated"):
        measurements.measure_step(Step("probe", 300, DENSE), [], 0.0)


def test_documents_alternate_between_texts_that_are_long_enough():
    model, tokenizer = make_tiny_model(), make_tokenizer()
    texts = [SourceText(["a"], 100), SourceText(["b"], 300), SourceText(["c"], 300)]
    measurements = Measurements(model, tokenizer, texts, SMALL_BLOCKS_CONFIG, seed=0, num_runs=1)
    sources = [measurements.find_source_sentences(200, index) for index in range(4)]
    assert sources == [(["b"], 0), (["c"], 0), (["b"], 1), (["c"], 1)]
    assert [measurements.find_source_sentences(100, index)[0] for index in range(3)] == [
        ["a"],
        ["b"],
        ["c"],
    ]
