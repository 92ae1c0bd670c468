"""The report of `fidelity`: rows computed from samples, tables and sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

from cab_hf.data.needles import common_prefix_length
from cab_hf.data.tasks import TASKS
from cab_hf.eval.experiment import Row
from cab_hf.eval.fidelity_settings import MATCH_TOLERANCE, TIME, find_method_class
from cab_hf.eval.intervals import (
    compare_shares,
    mean_difference,
    mean_of_intervals,
    wilson_interval,
)
from cab_hf.eval.methods import METHODS, Cab, Dense, Full, dense_row_sentences, never_sparse
from cab_hf.eval.on_model import average_sparse_density
from cab_hf.eval.probes import (
    ALL_TASKS,
    ASKED,
    CONTINUATION,
    DECODE,
    DECODE_ASKED,
    DECODE_PROBES,
    GREEDY,
    MULTI_KEY,
    NUM_TURNS,
    PASS,
    PERPLEXITY,
    PERPLEXITY_BORDER,
    PERPLEXITY_PROBES,
    PROBES,
    QUESTION_FIRST,
    RECALL,
    RECALL_BORDER,
    TURNS,
    get_question,
)
from cab_hf.eval.report import (
    format_difference,
    format_digits,
    format_with_interval,
    group_rows,
    make_cell_formatter,
    markdown_table,
)
from cab_hf.experiment.markdown import escape_markdown

CELL_FIELDS = ("method", "text", "length", "budget")
get_cell_key = itemgetter("method", "text", "length", "budget")
get_text_key = itemgetter("text", "length")
TIME_FIELDS = ("predict_ms", "attend_ms", "dense_ms", "dense_kernel")
# fields of a probe's result: a value, and the low and high end of its 95 % interval
RATIO_FIELDS, KL_FIELDS = ("ratio", "ratio_low", "ratio_high"), ("kl", "kl_low", "kl_high")
GROWTH_FIELDS = ("growth", "growth_low", "growth_high")


def select_density_samples(samples: Sequence[Row]) -> list[Row]:
    """Return the samples of a cell whose mean density is the density of the cell.

    These samples read a whole text in one pass, and the text does not begin with its question. If
    the cell has no such sample, return all samples of probes that do not decode, or else all
    samples of probes that decode. Samples of the probe `TIME` have no density.
    """
    density_samples = [s for s in samples if s["probe"] != TIME]
    prefill_samples = [
        s for s in density_samples if s["probe"] not in DECODE_PROBES
    ] or density_samples
    excluded_probes = (QUESTION_FIRST, CONTINUATION, ASKED, TURNS, *TASKS)
    return [s for s in prefill_samples if s["probe"] not in excluded_probes] or prefill_samples


def get_attention_ms(timed_row: Row) -> float:
    """Return the milliseconds of block selection plus attention of a timed sample or row."""
    return timed_row["predict_ms"] + timed_row["attend_ms"]


def make_rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per (method, text, length, budget), with the result of each probe.

    * Answers: the share of right answers with Wilson's interval, and the difference to dense with
      Newcombe's interval.
    * Perplexity: its ratio to dense, the geometric mean over documents with Student's interval.
    * Tokens after a prompt: the KL divergence per token (mean over documents, with Student's
      interval), the share of tokens for which the method and dense attention predict the same
      likeliest token, and the perplexity.
    * Decoding: as tokens after a prompt, and the KL divergence divided by that of `Full`.
    * Turns: as tokens after a prompt, for all turns together and for each turn; and the KL of the
      last turn minus that of the first turn.
    * Continuations: the number that equals the continuation of dense token by token, and the mean
      number of tokens before the first difference.

    Differences and ratios cover the questions that both the method and dense attention answered.
    """
    dense_by_question = {get_question(s): s for s in samples if s["method"] == Dense.name}
    cells = _group_cells(samples)
    rows = [_make_row(cell, dense_by_question) for cell in cells]
    _record_missing_cases(rows, cells)
    _add_task_means(rows)
    _divide_by_noise_floor(rows)
    return rows


def _group_cells(samples: Sequence[Row]) -> list[list[Row]]:
    """Return the samples of each cell, sorted by text, length, method and budget."""
    texts, method_classes = list(dict.fromkeys(s["text"] for s in samples)), list(METHODS.values())

    def make_sort_key(cell: Sequence[Row]) -> tuple:
        method, text, length, budget = get_cell_key(cell[0])
        method_class, density = (
            find_method_class(method),
            budget if isinstance(budget, float) else 0.0,
        )
        return (
            texts.index(text),
            length,
            method_classes.index(method_class),
            method != method_class.name,
            density,
        )

    return sorted(group_rows(samples, CELL_FIELDS), key=make_sort_key)


def _make_row(cell: Sequence[Row], dense_by_question: Mapping[tuple, Row]) -> dict[str, Any]:
    """Return the row of one cell.

    Args:
        cell: all samples of the cell.
        dense_by_question: question (`get_question`) -> sample of dense attention.
    """
    method, density_samples = cell[0]["method"], select_density_samples(cell)
    row = {name: cell[0][name] for name in (*CELL_FIELDS, "fitted")}
    row["density"] = fmean(s["density"] for s in density_samples) if density_samples else None
    row |= _make_time_fields(cell)
    if never_sparse(find_method_class(method), cell):
        row["never_sparse"] = True
    density_ratio = _compute_density_ratio(cell, density_samples)
    if density_ratio is not None and abs(density_ratio - 1) > MATCH_TOLERANCE:
        row["density_over_match"] = density_ratio
    decode_sample = next((s for s in cell if s["probe"] in DECODE_PROBES), None)
    if decode_sample is not None:
        step_tokens = decode_sample["step_tokens"]
        row |= {"step_tokens": step_tokens, "step_share": step_tokens / decode_sample["length"]}
    compared_by_question = {} if method == Dense.name else dense_by_question
    for probe in PROBES:
        samples = [s for s in cell if s["probe"] == probe]
        dense_pairs = [
            (s, compared_by_question[get_question(s)])
            for s in samples
            if get_question(s) in compared_by_question
        ]
        if samples:
            row[probe] = SCORERS.get(probe, _score_answers)(samples, dense_pairs)
    return row


def _compute_density_ratio(cell: Sequence[Row], density_samples: Sequence[Row]) -> float | None:
    """Return the measured density of sparse layers divided by the density that was asked for.

    Returns None if the cell has no density as budget, or has no sparse layer. A method that drops
    keys from the cache after a dense prefill has no sparse layer.
    """
    fitted_budget, time_fields = cell[0]["fitted"], {"fitted_config", "match_ms"}
    if fitted_budget is None or any(time_fields & s.keys() for s in cell):
        return None
    if all(s.get("sparse_density") is None for s in density_samples):
        return None
    return average_sparse_density(density_samples) / fitted_budget


def _make_time_fields(cell: Sequence[Row]) -> dict[str, Any]:
    """Return the fields of a row with attention times in ms, and their ratios to other times.

    All fields are None if the attention of the cell was not timed.
    """
    timed_sample = next((s for s in cell if s["probe"] == TIME), None)
    if timed_sample is None:
        return dict.fromkeys((*TIME_FIELDS, "over_dense"))
    # samples of earlier versions lack predict_reported: their predict_ms was always measured
    field_names = (*TIME_FIELDS, "predict_reported")
    row = {name: timed_sample[name] for name in field_names if name in timed_sample}
    if "match_ms" in timed_sample:
        row["over_match"] = get_attention_ms(timed_sample) / timed_sample["match_ms"]
    return {**row, "over_dense": get_attention_ms(timed_sample) / timed_sample["dense_ms"]}


# Each of the following functions returns the result of one probe in one cell, a field of the row.
# ``samples`` are the probe's samples in the cell. ``pairs`` contains (sample, sample of dense
# attention) for each question that both methods answered.


def _score_perplexity(
    samples: Sequence[Row], dense_pairs: Sequence[tuple[Row, Row]]
) -> dict[str, Any]:
    """Return the perplexity over all tokens, and its ratio to dense.

    The ratio is the geometric mean over the documents of ``dense_pairs``, equally weighted.
    """
    total_nll, num_tokens = (sum(s[name] for s in samples) for name in ("nll", "count"))
    fields = {"n": len(samples), "tokens": num_tokens, "value": math.exp(total_nll / num_tokens)}
    if not dense_pairs:
        return fields
    mean_nlls = [s["nll"] / s["count"] for s, _ in dense_pairs]
    dense_mean_nlls = [
        dense_sample["nll"] / dense_sample["count"] for _, dense_sample in dense_pairs
    ]
    perplexity_ratio = math.exp(fmean(mean_nlls) - fmean(dense_mean_nlls))
    fields |= {"pairs": len(dense_pairs), "ratio": perplexity_ratio}
    if len(dense_pairs) > 1:
        _, low, high = mean_difference(mean_nlls, dense_mean_nlls)
        fields |= {"ratio_low": math.exp(low), "ratio_high": math.exp(high)}
    return fields


def _score_continuations(
    samples: Sequence[Row], dense_pairs: Sequence[tuple[Row, Row]]
) -> dict[str, Any]:
    """Return the KL divergence per token, and the fields of `_score_perplexity`.

    ``agreement`` is the share of tokens with the same likeliest token as by dense attention.
    """
    mean_kls = [s["kl"] / s["count"] for s in samples]
    fields = {"kl": fmean(mean_kls)}
    if len(samples) > 1:
        _, low, high = mean_difference(mean_kls, [0.0] * len(mean_kls))
        # a divergence is never below 0
        fields |= {"kl_low": max(0.0, low), "kl_high": high}
    num_agreed, num_tokens = (sum(s[name] for s in samples) for name in ("agree", "count"))
    return {
        **fields,
        "agreement": num_agreed / num_tokens,
        **_score_perplexity(samples, dense_pairs),
    }


def _score_turns(samples: Sequence[Row], dense_pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return the result of `_score_continuations` for all turns together, and more fields.

    ``turns`` contains the result of `_score_continuations` for each turn. ``growth`` is the mean
    KL per token of the last turn minus that of the first turn.
    """
    turn_results = [
        _score_continuations(
            [s["turns"][turn] for s in samples],
            [(s["turns"][turn], dense_sample["turns"][turn]) for s, dense_sample in dense_pairs],
        )
        for turn in range(NUM_TURNS)
    ]
    first_turn_kls, last_turn_kls = (
        [s["turns"][turn]["kl"] / s["turns"][turn]["count"] for s in samples] for turn in (0, -1)
    )
    growth_fields = {"growth": fmean(last_turn_kls) - fmean(first_turn_kls)}
    if len(samples) > 1:
        growth_fields = dict(
            zip(GROWTH_FIELDS, mean_difference(last_turn_kls, first_turn_kls), strict=True)
        )
    return {**_score_continuations(samples, dense_pairs), "turns": turn_results, **growth_fields}


def _score_generated_tokens(
    samples: Sequence[Row], dense_pairs: Sequence[tuple[Row, Row]]
) -> dict[str, Any]:
    """Return the number of continuations that equal that of dense attention, and more fields.

    ``prefix`` is the mean number of tokens before the first difference to dense attention.
    """
    fields = {"n": len(samples), "tokens": len(samples[0]["written"])}
    if not dense_pairs:
        return fields
    prefix_lengths = [
        common_prefix_length(s["written"], dense_sample["written"])
        for s, dense_sample in dense_pairs
    ]
    num_equal = sum(s["written"] == dense_sample["written"] for s, dense_sample in dense_pairs)
    low, high = wilson_interval(num_equal, len(dense_pairs))
    fields |= {"pairs": len(dense_pairs), "equal": num_equal, "low": low, "high": high}
    return {**fields, "share": num_equal / len(dense_pairs), "prefix": fmean(prefix_lengths)}


def _score_answers(
    samples: Sequence[Row], dense_pairs: Sequence[tuple[Row, Row]]
) -> dict[str, Any]:
    """Return the share of right answers over all keys, and its difference and ratio to dense."""
    outcomes = [is_right for s in samples for is_right in s["right"]]
    paired_outcomes = [
        outcome
        for s, dense_sample in dense_pairs
        for outcome in zip(s["right"], dense_sample["right"], strict=True)
    ]
    fields = compare_shares(outcomes, paired_outcomes)
    if paired_outcomes:
        num_right = sum(is_right for is_right, _ in paired_outcomes)
        num_dense_right = sum(is_dense_right for _, is_dense_right in paired_outcomes)
        fields["ratio"] = num_right / num_dense_right if num_dense_right else None
    return fields


# probe -> function that computes its result from samples and pairs; `_score_answers` for other
# probes
SCORERS: dict[str, Callable[..., dict[str, Any]]] = {
    **dict.fromkeys(PERPLEXITY_PROBES, _score_perplexity),
    **dict.fromkeys((CONTINUATION, DECODE), _score_continuations),
    **{GREEDY: _score_generated_tokens, TURNS: _score_turns},
}


def _divide_by_noise_floor(rows: Sequence[dict[str, Any]]) -> None:
    """Add ``over_floor``: the KL of decoding divided by that of `Full` on the same text and length.

    `Full` selects every block, so that its KL is the effect of different rounding in the kernels.
    """
    decode_rows = [row for row in rows if row.get(DECODE) and row["method"] != Dense.name]
    noise_floor_by_text = {
        get_text_key(row): row[DECODE]["kl"] for row in decode_rows if row["method"] == Full.name
    }
    for row in decode_rows:
        noise_floor_kl = noise_floor_by_text.get(get_text_key(row), 0.0)
        if noise_floor_kl > 0:
            row[DECODE]["over_floor"] = row[DECODE]["kl"] / noise_floor_kl


def _add_task_means(rows: Sequence[dict[str, Any]]) -> None:
    """Add the mean over tasks to each row that has all tasks of its text and length.

    These are the tasks that at least one row of the text and length has.
    """
    for rows_of_text in group_rows(rows, ["text", "length"]):
        tasks = [name for name in TASKS if any(name in row for row in rows_of_text)]
        for row in rows_of_text:
            if tasks and row.keys() >= {*tasks}:
                row[ALL_TASKS] = _average_tasks([row[name] for name in tasks])


def _average_tasks(task_results: Sequence[Row]) -> dict[str, Any]:
    """Return the mean of the shares and of the differences of several tasks, equally weighted.

    Args:
        task_results: the result of `_score_answers` for each task.
    """
    mean_fields = {"n": len(task_results)}
    for field_names in (("share", "low", "high"), ("delta", "delta_low", "delta_high")):
        if all(field_names[0] in result for result in task_results):
            intervals = [tuple(map(result.get, field_names)) for result in task_results]
            mean_fields |= dict(zip(field_names, mean_of_intervals(intervals), strict=True))
    return mean_fields


def _record_missing_cases(rows: Sequence[dict[str, Any]], cells: Sequence[Sequence[Row]]) -> None:
    """Add the field ``fewer`` to rows with missing cases: probe -> ``6 of 20`` cases.

    A row misses cases if another row of the same text and length has more cases of the probe. This
    happens if the run was stopped, or was continued with some of its methods.

    Args:
        rows: one row per cell.
        cells: the samples of each row.
    """
    case_counts_by_cell = [Counter((*get_text_key(s), s["probe"]) for s in cell) for cell in cells]
    largest_counts: Counter = Counter()
    for case_counts in case_counts_by_cell:
        # | of counters is their maximum
        largest_counts |= case_counts
    for row, case_counts in zip(rows, case_counts_by_cell, strict=True):
        missing_cases = {
            probe: f"{num_cases} of {largest_counts[text, length, probe]}"
            for (text, length, probe), num_cases in case_counts.items()
            if num_cases < largest_counts[text, length, probe]
        }
        if missing_cases:
            row["fewer"] = missing_cases


def make_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return heading -> Markdown table, one table per text, without empty columns."""
    columns = {
        heading: get_cell_text
        for heading, (field, get_cell_text) in COLUMNS.items()
        if field is None or any(row.get(field) for row in rows)
    }
    return {
        f"On {escape_markdown(rows_of_text[0]['text'])}": markdown_table(rows_of_text, columns)
        for rows_of_text in group_rows(rows, ["text"])
    }


def _format_estimate(
    result: Row, fields: tuple[str, str, str], format_number: Callable[[float], str | None]
) -> str:
    """Format a value of a probe's result with its interval.

    Args:
        result: the result of a probe.
        fields: the fields of the value, the low end and the high end of the interval.
        format_number: formats a number.
    """
    estimate, low, high = (result.get(name) for name in fields)
    return format_with_interval(estimate, low, high, format_number)


def _format_share(result: Row) -> str:
    """Return the share of right answers with its interval."""
    return format_with_interval(result["share"], result["low"], result["high"])


def _format_ratio(result: Row) -> str | None:
    """Return the ratio to dense attention with its interval; None without a ratio."""
    return (
        None
        if result.get("ratio") is None
        else _format_estimate(result, RATIO_FIELDS, "{:.3f}".format)
    )


def _format_kl(result: Row) -> str:
    """Return the KL divergence per token, with its interval if there are several documents."""
    return _format_estimate(result, KL_FIELDS, format_digits)


def _format_kl_growth(result: Row) -> str:
    """Return the KL of the last turn minus that of the first, with its interval."""
    return _format_estimate(result, GROWTH_FIELDS, "{:+.2g}".format)


def _format_agreement(result: Row) -> str:
    """Return the share of tokens with the same likeliest token as by dense attention."""
    return f"{result['agreement']:.3f}"


def _format_turns(result: Row, format_result: Callable[[Row], str]) -> str:
    """Return the results of all turns, each formatted by ``format_result``, separated by commas."""
    return ", ".join(map(format_result, result["turns"]))


def _format_equal_count(result: Row) -> str | None:
    """Return how many continuations equal dense, such as ``34 of 100``; None without dense."""
    return f"{result['equal']} of {result['pairs']}" if "pairs" in result else None


def _format_prefix_length(result: Row) -> str | None:
    """Return the mean number of tokens before the first difference to dense, as ``57 of 256``.

    Returns None if dense attention was not measured.
    """
    return f"{result['prefix']:.0f} of {result['tokens']}" if "pairs" in result else None


def _format_milliseconds(row: Row) -> str | None:
    """Return the milliseconds of attention as ``total (selection + attention)``.

    The prefix ~ marks a selection time that is not measured but computed from the ratio that the
    authors of the method report. Returns None if attention was not timed.
    """
    if row.get("attend_ms") is None:
        return None
    estimate_mark = "~" if "predict_reported" in row else ""
    stages_text = (
        f"{estimate_mark}{format_digits(row['predict_ms'])} + {format_digits(row['attend_ms'])}"
    )
    return f"{format_digits(get_attention_ms(row))} ({stages_text})"


def _format_time_ratio(row: Row) -> str | None:
    """Return the attention time divided by dense, and the dense kernel; None without times."""
    time_ratio = row.get("over_dense")
    return None if time_ratio is None else f"{time_ratio:.2f} {row['dense_kernel']}"


def _make_column(
    probe: str, format_result: Callable[[Row], str | None]
) -> tuple[str, Callable[[Row], Any]]:
    """Return a value of `COLUMNS`: the name of the field, and a function from row to cell.

    Args:
        probe: name of the probe or field.
        format_result: function that formats the field.
    """
    return probe, make_cell_formatter(format_result, probe)


def _make_answer_columns(
    probe: str, heading: str, heading_suffix: str = " [95 %]"
) -> dict[str, tuple]:
    """Return two columns for a probe with right answers: the share, and the difference to dense.

    Args:
        probe: name of the probe.
        heading: heading of both columns.
        heading_suffix: suffix of the first heading.
    """
    return {
        f"{heading}{heading_suffix}": _make_column(probe, _format_share),
        f"{heading}, difference to dense": _make_column(probe, format_difference),
    }


# heading -> (field, cell), where ``cell`` is a field or a function of the row. The column is shown
# if any row has ``field``, or if ``field`` is None.
COLUMNS = {
    **{name: (None, name) for name in ("method", "length", "budget", "density")},
    "KL after the prompt": _make_column(CONTINUATION, _format_kl),
    "agreement": _make_column(CONTINUATION, _format_agreement),
    "perplexity after the prompt / dense": _make_column(CONTINUATION, _format_ratio),
    **_make_answer_columns(ASKED, "recall after the prompt", ""),
    "KL over turns": _make_column(TURNS, _format_kl),
    "KL, turn by turn": _make_column(TURNS, lambda result: _format_turns(result, _format_kl)),
    f"turn {NUM_TURNS} minus turn 1": _make_column(TURNS, _format_kl_growth),
    "agreement, turn by turn": _make_column(
        TURNS, lambda result: _format_turns(result, _format_agreement)
    ),
    "keys per step": (
        "step_tokens",
        make_cell_formatter(lambda tokens: f"{tokens:,.0f}", "step_tokens"),
    ),
    "KL of decoding": _make_column(DECODE, _format_kl),
    "KL / noise floor": _make_column(
        DECODE, lambda result: format_digits(result.get("over_floor"))
    ),
    "agreement of decoding": _make_column(DECODE, _format_agreement),
    **_make_answer_columns(DECODE_ASKED, "recall in decoding", ""),
    "equal continuations": _make_column(GREEDY, _format_equal_count),
    "agreeing prefix": _make_column(GREEDY, _format_prefix_length),
    "ms (selection + attention)": ("attend_ms", _format_milliseconds),
    "time / dense": ("attend_ms", _format_time_ratio),
    "time / matched time": _make_column("over_match", "{:.2f}".format),
    **_make_answer_columns(PASS, "pass"),
    **_make_answer_columns(QUESTION_FIRST, "question first", ""),
    **_make_answer_columns(MULTI_KEY, "multi key"),
    **_make_answer_columns(RECALL, "recall in the prompt"),
    "recall in the prompt / dense": _make_column(RECALL, _format_ratio),
    **_make_answer_columns(RECALL_BORDER, "recall at block starts"),
    "perplexity": _make_column(PERPLEXITY, lambda result: f"{result['value']:.2f}"),
    "perplexity / dense [95 %]": _make_column(PERPLEXITY, _format_ratio),
    "block-start perplexity / dense [95 %]": _make_column(PERPLEXITY_BORDER, _format_ratio),
    **_make_answer_columns(ALL_TASKS, "mean of tasks"),
    **{
        heading: task_column
        for name, task in TASKS.items()
        for heading, task_column in _make_answer_columns(name, task.title).items()
    },
}


def make_sentences(rows: Sequence[Row]) -> list[str]:
    """Return the sentences of the report.

    For each text, one sentence summarises CAB's differences to dense attention at the largest
    length. Further sentences list rows whose density or time differs from their budget by more than
    `MATCH_TOLERANCE`, rows with missing cases, and methods that attended densely.
    """
    sentence_by_text = {}
    for row in rows:
        if row["method"] == Cab.name and (difference_phrases := _describe_differences(row, rows)):
            time_ratio = row.get("over_dense")
            time_phrase = (
                ""
                if time_ratio is None
                else f" in {time_ratio:.2f} × the time of {row['dense_kernel']}"
            )
            sentence_by_text[row["text"]] = (
                f"On {escape_markdown(row['text'])}, {row['length']} tokens, cab attends "
                f"{row['density']:.0%} of the pairs{time_phrase}. Compared with dense: "
                f"{', '.join(difference_phrases)}."
            )
    problem_by_field = {
        "over_match": f"No budget matches the time within {MATCH_TOLERANCE:.0%}",
        "density_over_match": (
            f"The density misses the matched density by over {MATCH_TOLERANCE:.0%}"
        ),
    }
    problem_phrases = [
        (
            problem,
            [
                f"{_describe_row(row)} ({row[field]:.2f} ×)"
                for row in rows
                if _is_outside_tolerance(row, field)
            ],
        )
        for field, problem in problem_by_field.items()
    ]
    case_counts_by_row = {
        _describe_row(row): dict.fromkeys(row["fewer"].values()) for row in rows if "fewer" in row
    }
    missing_phrases = [
        f"{row_description} ({' or '.join(case_counts)})"
        for row_description, case_counts in case_counts_by_row.items()
    ]
    problem_phrases.append(("Measured in fewer cases than other rows", missing_phrases))
    sentences = [
        f"{problem}: {', '.join(row_phrases)}."
        for problem, row_phrases in problem_phrases
        if row_phrases
    ]
    return [*sentence_by_text.values(), *sentences, *dense_row_sentences(rows)]


def _is_outside_tolerance(row: Row, field: str) -> bool:
    """Return True if the ratio in ``field`` differs from 1 by more than `MATCH_TOLERANCE`."""
    return abs(row.get(field, 1.0) - 1) > MATCH_TOLERANCE


def _describe_row(row: Row) -> str:
    """Return a phrase with method, text, length and budget of a row."""
    budget = f" and budget {row['budget']}" if isinstance(row["budget"], float) else ""
    return f"{row['method']} on {escape_markdown(row['text'])} at {row['length']} tokens{budget}"


def _describe_differences(row: Row, rows: Sequence[Row]) -> list[str]:
    """Return the differences of a row to dense, one phrase each; [] if dense was not measured.

    Args:
        row: the row of a method.
        rows: all rows. Rows of `Full` show the differences that only different rounding causes.
    """
    phrases = []
    continuation_result, turns_result, decode_result, greedy_result = (
        row[probe] if row.get(probe, {}).get("pairs") else None for probe in PROBES_WITH_OWN_PHRASES
    )
    if continuation_result:
        rows_of_method_full = [
            other_row
            for other_row in rows
            if other_row["method"] == Full.name and get_text_key(other_row) == get_text_key(row)
        ]
        noise_kls = [
            format_digits(other_row[CONTINUATION]["kl"])
            for other_row in rows_of_method_full
            if other_row.get(CONTINUATION)
        ]
        noise_note = f" (kernels alone: {noise_kls[0]})" if noise_kls else ""
        phrases += [
            f"KL after the prompt {_format_kl(continuation_result)} per token{noise_note}",
            f"greedy agreement {continuation_result['agreement']:.1%}",
            f"perplexity after the prompt × {_format_ratio(continuation_result)}",
        ]
    if turns_result:
        first_kl, *_, last_kl = map(_format_kl, turns_result["turns"])
        phrases.append(
            f"KL per token {first_kl} in turn 1 and {last_kl} in turn {NUM_TURNS} of a chat"
        )
    if decode_result:
        floor_ratio = decode_result.get("over_floor")
        noise_note = "" if floor_ratio is None else f" ({floor_ratio:.1f} × the floor)"
        phrases += [
            f"KL of decoding {_format_kl(decode_result)} per token{noise_note}",
            f"agreement of decoding {decode_result['agreement']:.1%}",
        ]
    if greedy_result:
        phrases.append(f"equal continuations: {_format_equal_count(greedy_result)}")
    for probe in (*PROBES, ALL_TASKS):
        if row.get(probe) and probe not in (*PROBES_WITH_OWN_PHRASES, *TASKS):
            is_ratio = probe in PERPLEXITY_PROBES
            change_phrase = _format_ratio(row[probe]) if is_ratio else format_difference(row[probe])
            probe_phrase = PROBE_PHRASES.get(probe, probe.replace("_", " "))
            phrases += (
                [f"{probe_phrase} {'× ' if is_ratio else ''}{change_phrase}"]
                if change_phrase
                else []
            )
    return phrases


# probes for which `_describe_differences` writes special phrases
PROBES_WITH_OWN_PHRASES = (CONTINUATION, TURNS, DECODE, GREEDY)
# probe -> its name in the phrases of `_describe_differences`; other probes have their own name
PROBE_PHRASES = {
    ASKED: "recall after the prompt",
    DECODE_ASKED: "recall in decoding",
    RECALL: "recall in the prompt",
    RECALL_BORDER: "recall at block starts",
    PERPLEXITY_BORDER: "block-start perplexity",
    ALL_TASKS: "mean of tasks",
}
