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
from cab_hf.eval.fidelity_settings import OFF, TIME, kind_of
from cab_hf.eval.intervals import compared_shares, mean_interval, mean_of_intervals, wilson
from cab_hf.eval.methods import METHODS, Cab, Dense, Full, dense_row_sentences, never_sparse
from cab_hf.eval.on_model import realised_density
from cab_hf.eval.probes import (
    ALL_TASKS,
    ASKED,
    CONTINUATION,
    DECODE,
    DECODE_ASKED,
    DECODES,
    GREEDY,
    MULTI_KEY,
    PASS,
    PERPLEXITIES,
    PERPLEXITY,
    PERPLEXITY_BORDER,
    PROBES,
    QUESTION_FIRST,
    RECALL,
    RECALL_BORDER,
    TURN_COUNT,
    TURNS,
    question_of,
)
from cab_hf.eval.report import column, difference, digits, grouped, markdown_table, with_interval
from cab_hf.experiment.markdown import plain

CELL = ("method", "text", "length", "budget")
cell_of = itemgetter("method", "text", "length", "budget")
text_key_of = itemgetter("text", "length")
TIMES = ("predict_ms", "attend_ms", "dense_ms", "dense_kernel")
# fields of a probe's result: a value, and the low and high end of its 95 % interval
RATIO, KL = ("ratio", "ratio_low", "ratio_high"), ("kl", "kl_low", "kl_high")
GROWTH = ("growth", "growth_low", "growth_high")


# --- rows


def samples_for_density(samples: Sequence[Row]) -> list[Row]:
    """Return the samples of a cell whose mean density is the density of the cell.

    These samples read a whole text in one pass, and the text does not begin with its question. If
    the cell has no such sample, return all samples of probes that do not decode, or else all
    samples of probes that decode. Samples of the probe `TIME` have no density.
    """
    with_density = [s for s in samples if s["probe"] != TIME]
    prefilled = [s for s in with_density if s["probe"] not in DECODES] or with_density
    unusual = (QUESTION_FIRST, CONTINUATION, ASKED, TURNS, *TASKS)
    return [s for s in prefilled if s["probe"] not in unusual] or prefilled


def attention_ms(timed: Row) -> float:
    """Return the milliseconds of block selection plus attention of a timed sample or row."""
    return timed["predict_ms"] + timed["attend_ms"]


def rows_of(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    dense = {question_of(s): s for s in samples if s["method"] == Dense.name}
    cells = _cells_of(samples)
    rows = [_row(cell, dense) for cell in cells]
    _record_missing_cases(rows, cells)
    _add_task_means(rows)
    _divide_by_noise_floor(rows)
    return rows


def _cells_of(samples: Sequence[Row]) -> list[list[Row]]:
    """Return the samples of each cell, sorted by text, length, method and budget."""
    texts, kinds = list(dict.fromkeys(s["text"] for s in samples)), list(METHODS.values())

    def sort_key(cell: Sequence[Row]) -> tuple:
        method, text, length, budget = cell_of(cell[0])
        kind, density = kind_of(method), budget if isinstance(budget, float) else 0.0
        return texts.index(text), length, kinds.index(kind), method != kind.name, density

    return sorted(grouped(samples, CELL), key=sort_key)


def _row(cell: Sequence[Row], dense: Mapping[tuple, Row]) -> dict[str, Any]:
    """Return the row of one cell.

    Args:
        cell: all samples of the cell.
        dense: question (`question_of`) -> sample of dense attention.
    """
    method, density_samples = cell[0]["method"], samples_for_density(cell)
    row = {name: cell[0][name] for name in (*CELL, "fitted")}
    row["density"] = fmean(s["density"] for s in density_samples) if density_samples else None
    row |= _times(cell)
    if never_sparse(kind_of(method), cell):
        row["never_sparse"] = True
    over = _density_over_match(cell, density_samples)
    if over is not None and abs(over - 1) > OFF:
        row["density_over_match"] = over
    decoded = next((s for s in cell if s["probe"] in DECODES), None)
    if decoded is not None:
        step_tokens = decoded["step_tokens"]
        row |= {"step_tokens": step_tokens, "step_share": step_tokens / decoded["length"]}
    reference = {} if method == Dense.name else dense
    for probe in PROBES:
        samples = [s for s in cell if s["probe"] == probe]
        pairs = [(s, reference[question_of(s)]) for s in samples if question_of(s) in reference]
        if samples:
            row[probe] = SCORED.get(probe, _answers)(samples, pairs)
    return row


def _density_over_match(cell: Sequence[Row], density_samples: Sequence[Row]) -> float | None:
    """Return the measured density of sparse layers divided by the density that was asked for.

    Returns None if the cell has no density as budget, or has no sparse layer. A method that drops
    keys from the cache after a dense prefill has no sparse layer.
    """
    fitted, fields_of_times = cell[0]["fitted"], {"fitted_config", "match_ms"}
    if fitted is None or any(fields_of_times & s.keys() for s in cell):
        return None
    if all(s.get("sparse_density") is None for s in density_samples):
        return None
    return realised_density(density_samples) / fitted


def _times(cell: Sequence[Row]) -> dict[str, Any]:
    """Return the fields of a row with attention times in ms, and their ratios to other times.

    All fields are None if the attention of the cell was not timed.
    """
    timed = next((s for s in cell if s["probe"] == TIME), None)
    if timed is None:
        return dict.fromkeys((*TIMES, "over_dense"))
    # samples of earlier versions lack predict_reported: their predict_ms was always measured
    names = (*TIMES, "predict_reported")
    row = {name: timed[name] for name in names if name in timed}
    if "match_ms" in timed:
        row["over_match"] = attention_ms(timed) / timed["match_ms"]
    return {**row, "over_dense": attention_ms(timed) / timed["dense_ms"]}


# Each of the following functions returns the result of one probe in one cell, a field of the row.
# ``samples`` are the probe's samples in the cell. ``pairs`` contains (sample, sample of dense
# attention) for each question that both methods answered.


def _perplexity(samples: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return the perplexity over all tokens, and its ratio to dense.

    The ratio is the geometric mean over the documents of ``pairs``, equally weighted.
    """
    nll, count = (sum(s[name] for s in samples) for name in ("nll", "count"))
    fields = {"n": len(samples), "tokens": count, "value": math.exp(nll / count)}
    if not pairs:
        return fields
    means = [s["nll"] / s["count"] for s, _ in pairs]
    dense_means = [base["nll"] / base["count"] for _, base in pairs]
    ratio = math.exp(fmean(means) - fmean(dense_means))
    fields |= {"pairs": len(pairs), "ratio": ratio}
    if len(pairs) > 1:
        _, low, high = mean_interval(means, dense_means)
        fields |= {"ratio_low": math.exp(low), "ratio_high": math.exp(high)}
    return fields


def _continuation(samples: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return the KL divergence per token, and the fields of `_perplexity`.

    ``agreement`` is the share of tokens with the same likeliest token as by dense attention.
    """
    means = [s["kl"] / s["count"] for s in samples]
    fields = {"kl": fmean(means)}
    if len(samples) > 1:
        _, low, high = mean_interval(means, [0.0] * len(means))
        # a divergence is never below 0
        fields |= {"kl_low": max(0.0, low), "kl_high": high}
    agreed, count = (sum(s[name] for s in samples) for name in ("agree", "count"))
    return {**fields, "agreement": agreed / count, **_perplexity(samples, pairs)}


def _turns(samples: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return the result of `_continuation` for all turns together, and more fields.

    ``turns`` contains the result of `_continuation` for each turn. ``growth`` is the mean KL per
    token of the last turn minus that of the first turn.
    """
    turns = [
        _continuation(
            [s["turns"][turn] for s in samples],
            [(s["turns"][turn], base["turns"][turn]) for s, base in pairs],
        )
        for turn in range(TURN_COUNT)
    ]
    first, last = (
        [s["turns"][turn]["kl"] / s["turns"][turn]["count"] for s in samples] for turn in (0, -1)
    )
    growth = {"growth": fmean(last) - fmean(first)}
    if len(samples) > 1:
        growth = dict(zip(GROWTH, mean_interval(last, first), strict=True))
    return {**_continuation(samples, pairs), "turns": turns, **growth}


def _written(samples: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return the number of continuations that equal that of dense attention, and more fields.

    ``prefix`` is the mean number of tokens before the first difference to dense attention.
    """
    fields = {"n": len(samples), "tokens": len(samples[0]["written"])}
    if not pairs:
        return fields
    prefixes = [common_prefix_length(s["written"], base["written"]) for s, base in pairs]
    equal = sum(s["written"] == base["written"] for s, base in pairs)
    low, high = wilson(equal, len(pairs))
    fields |= {"pairs": len(pairs), "equal": equal, "low": low, "high": high}
    return {**fields, "share": equal / len(pairs), "prefix": fmean(prefixes)}


def _answers(samples: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return the share of right answers over all keys, and its difference and ratio to dense."""
    outcomes = [right for s in samples for right in s["right"]]
    paired_outcomes = [
        outcome for s, base in pairs for outcome in zip(s["right"], base["right"], strict=True)
    ]
    fields = compared_shares(outcomes, paired_outcomes)
    if paired_outcomes:
        num_right = sum(right for right, _ in paired_outcomes)
        num_dense_right = sum(dense_right for _, dense_right in paired_outcomes)
        fields["ratio"] = num_right / num_dense_right if num_dense_right else None
    return fields


# probe -> function that computes its result from samples and pairs; `_answers` for other probes
SCORED: dict[str, Callable[..., dict[str, Any]]] = {
    **dict.fromkeys(PERPLEXITIES, _perplexity),
    **dict.fromkeys((CONTINUATION, DECODE), _continuation),
    **{GREEDY: _written, TURNS: _turns},
}


def _divide_by_noise_floor(rows: Sequence[dict[str, Any]]) -> None:
    """Add ``over_floor``: the KL of decoding divided by that of `Full` on the same text and length.

    `Full` selects every block, so that its KL is the effect of different rounding in the kernels.
    """
    decoded = [row for row in rows if row.get(DECODE) and row["method"] != Dense.name]
    floors = {text_key_of(row): row[DECODE]["kl"] for row in decoded if row["method"] == Full.name}
    for row in decoded:
        floor = floors.get(text_key_of(row), 0.0)
        if floor > 0:
            row[DECODE]["over_floor"] = row[DECODE]["kl"] / floor


def _add_task_means(rows: Sequence[dict[str, Any]]) -> None:
    """Add the mean over tasks to each row that has all tasks of its text and length.

    These are the tasks that at least one row of the text and length has.
    """
    for group in grouped(rows, ["text", "length"]):
        tasks = [name for name in TASKS if any(name in row for row in group)]
        for row in group:
            if tasks and row.keys() >= {*tasks}:
                row[ALL_TASKS] = _mean_of_tasks([row[name] for name in tasks])


def _mean_of_tasks(results: Sequence[Row]) -> dict[str, Any]:
    """Return the mean of the shares and of the differences of several tasks, equally weighted.

    Args:
        results: the result of `_answers` for each task.
    """
    mean = {"n": len(results)}
    for names in (("share", "low", "high"), ("delta", "delta_low", "delta_high")):
        if all(names[0] in result for result in results):
            intervals = [tuple(map(result.get, names)) for result in results]
            mean |= dict(zip(names, mean_of_intervals(intervals), strict=True))
    return mean


def _record_missing_cases(rows: Sequence[dict[str, Any]], cells: Sequence[Sequence[Row]]) -> None:
    """Add the field ``fewer`` to rows with missing cases: probe -> ``6 of 20`` cases.

    A row misses cases if another row of the same text and length has more cases of the probe. This
    happens if the run was stopped, or was continued with some of its methods.

    Args:
        rows: one row per cell.
        cells: the samples of each row.
    """
    counts = [Counter((*text_key_of(s), s["probe"]) for s in cell) for cell in cells]
    largest_counts: Counter = Counter()
    for count in counts:
        # | of counters is their maximum
        largest_counts |= count
    for row, count in zip(rows, counts, strict=True):
        fewer = {
            probe: f"{cases} of {largest_counts[text, length, probe]}"
            for (text, length, probe), cases in count.items()
            if cases < largest_counts[text, length, probe]
        }
        if fewer:
            row["fewer"] = fewer


# --- tables


def tables_of(rows: Sequence[Row]) -> dict[str, str]:
    """Return heading -> Markdown table, one table per text, without empty columns."""
    columns = {
        heading: write
        for heading, (field, write) in COLUMNS.items()
        if field is None or any(row.get(field) for row in rows)
    }
    return {
        f"On {plain(group[0]['text'])}": markdown_table(group, columns)
        for group in grouped(rows, ["text"])
    }


def _estimate(
    result: Row, names: tuple[str, str, str], write: Callable[[float], str | None]
) -> str:
    """Format a value of a probe's result with its interval.

    Args:
        result: the result of a probe.
        names: the fields of the value, the low end and the high end of the interval.
        write: formats a number.
    """
    value, low, high = (result.get(name) for name in names)
    return with_interval(value, low, high, write)


def _share(result: Row) -> str:
    """Return the share of right answers with its interval."""
    return with_interval(result["share"], result["low"], result["high"])


def _ratio(result: Row) -> str | None:
    """Return the ratio to dense attention with its interval; None without a ratio."""
    return None if result.get("ratio") is None else _estimate(result, RATIO, "{:.3f}".format)


def _divergence(result: Row) -> str:
    """Return the KL divergence per token, with its interval if there are several documents."""
    return _estimate(result, KL, digits)


def _growth(result: Row) -> str:
    """Return the KL of the last turn minus that of the first, with its interval."""
    return _estimate(result, GROWTH, "{:+.2g}".format)


def _agreement(result: Row) -> str:
    """Return the share of tokens with the same likeliest token as by dense attention."""
    return f"{result['agreement']:.3f}"


def _by_turn(result: Row, write: Callable[[Row], str]) -> str:
    """Return the results of all turns, each formatted by ``write``, separated by commas."""
    return ", ".join(map(write, result["turns"]))


def _equal(result: Row) -> str | None:
    """Return how many continuations equal dense, such as ``34 of 100``; None without dense."""
    return f"{result['equal']} of {result['pairs']}" if "pairs" in result else None


def _prefix(result: Row) -> str | None:
    """Return the mean number of tokens before the first difference to dense, as ``57 of 256``.

    Returns None if dense attention was not measured.
    """
    return f"{result['prefix']:.0f} of {result['tokens']}" if "pairs" in result else None


def _milliseconds(row: Row) -> str | None:
    """Return the milliseconds of attention as ``total (selection + attention)``.

    The prefix ~ marks a selection time that is not measured but computed from the ratio that the
    authors of the method report. Returns None if attention was not timed.
    """
    if row.get("attend_ms") is None:
        return None
    mark = "~" if "predict_reported" in row else ""
    stages = f"{mark}{digits(row['predict_ms'])} + {digits(row['attend_ms'])}"
    return f"{digits(attention_ms(row))} ({stages})"


def _over_dense(row: Row) -> str | None:
    """Return the attention time divided by dense, and the dense kernel; None without times."""
    over = row.get("over_dense")
    return None if over is None else f"{over:.2f} {row['dense_kernel']}"


def _of(probe: str, write: Callable[[Row], str | None]) -> tuple[str, Callable[[Row], Any]]:
    """Return a value of `COLUMNS`: the name of the field, and a function from row to cell.

    Args:
        probe: name of the probe or field.
        write: function that formats the field.
    """
    return probe, column(write, probe)


def _right(probe: str, heading: str, mark: str = " [95 %]") -> dict[str, tuple]:
    """Return two columns for a probe with right answers: the share, and the difference to dense.

    Args:
        probe: name of the probe.
        heading: heading of both columns.
        mark: suffix of the first heading.
    """
    return {
        f"{heading}{mark}": _of(probe, _share),
        f"{heading}, difference to dense": _of(probe, difference),
    }


# heading -> (field, cell), where ``cell`` is a field or a function of the row. The column is shown
# if any row has ``field``, or if ``field`` is None.
COLUMNS = {
    **{name: (None, name) for name in ("method", "length", "budget", "density")},
    "KL after the prompt": _of(CONTINUATION, _divergence),
    "agreement": _of(CONTINUATION, _agreement),
    "perplexity after the prompt / dense": _of(CONTINUATION, _ratio),
    **_right(ASKED, "recall after the prompt", ""),
    "KL over turns": _of(TURNS, _divergence),
    "KL, turn by turn": _of(TURNS, lambda result: _by_turn(result, _divergence)),
    f"turn {TURN_COUNT} minus turn 1": _of(TURNS, _growth),
    "agreement, turn by turn": _of(TURNS, lambda result: _by_turn(result, _agreement)),
    "keys per step": ("step_tokens", column(lambda tokens: f"{tokens:,.0f}", "step_tokens")),
    "KL of decoding": _of(DECODE, _divergence),
    "KL / noise floor": _of(DECODE, lambda result: digits(result.get("over_floor"))),
    "agreement of decoding": _of(DECODE, _agreement),
    **_right(DECODE_ASKED, "recall in decoding", ""),
    "equal continuations": _of(GREEDY, _equal),
    "agreeing prefix": _of(GREEDY, _prefix),
    "ms (selection + attention)": ("attend_ms", _milliseconds),
    "time / dense": ("attend_ms", _over_dense),
    "time / matched time": _of("over_match", "{:.2f}".format),
    **_right(PASS, "pass"),
    **_right(QUESTION_FIRST, "question first", ""),
    **_right(MULTI_KEY, "multi key"),
    **_right(RECALL, "recall in the prompt"),
    "recall in the prompt / dense": _of(RECALL, _ratio),
    **_right(RECALL_BORDER, "recall at block starts"),
    "perplexity": _of(PERPLEXITY, lambda result: f"{result['value']:.2f}"),
    "perplexity / dense [95 %]": _of(PERPLEXITY, _ratio),
    "block-start perplexity / dense [95 %]": _of(PERPLEXITY_BORDER, _ratio),
    **_right(ALL_TASKS, "mean of tasks"),
    **{
        heading: task_column
        for name, task in TASKS.items()
        for heading, task_column in _right(name, task.title).items()
    },
}

# --- sentences


def readings_of(rows: Sequence[Row]) -> list[str]:
    """Return the sentences of the report.

    For each text, one sentence summarises CAB's differences to dense attention at the largest
    length. Further sentences list rows whose density or time differs from their budget by more than
    `OFF`, rows with missing cases, and methods that attended densely.
    """
    cab = {}
    for row in rows:
        if row["method"] == Cab.name and (changes := _changes(row, rows)):
            over = row.get("over_dense")
            time = "" if over is None else f" in {over:.2f} × the time of {row['dense_kernel']}"
            cab[row["text"]] = (
                f"On {plain(row['text'])}, {row['length']} tokens, cab attends "
                f"{row['density']:.0%} of the pairs{time}. Compared with dense: "
                f"{', '.join(changes)}."
            )
    off = {
        "over_match": f"No budget matches the time within {OFF:.0%}",
        "density_over_match": f"The density misses the matched density by over {OFF:.0%}",
    }
    exceptions = [
        (problem, [f"{_where(row)} ({row[field]:.2f} ×)" for row in rows if _is_off(row, field)])
        for field, problem in off.items()
    ]
    fewer = {_where(row): dict.fromkeys(row["fewer"].values()) for row in rows if "fewer" in row}
    fewer = [f"{where} ({' or '.join(cases)})" for where, cases in fewer.items()]
    exceptions.append(("Measured in fewer cases than other rows", fewer))
    sentences = [f"{problem}: {', '.join(cells)}." for problem, cells in exceptions if cells]
    return [*cab.values(), *sentences, *dense_row_sentences(rows)]


def _is_off(row: Row, field: str) -> bool:
    """Return True if the ratio in ``field`` differs from 1 by more than the tolerance `OFF`."""
    return abs(row.get(field, 1.0) - 1) > OFF


def _where(row: Row) -> str:
    """Return a phrase with method, text, length and budget of a row."""
    budget = f" and budget {row['budget']}" if isinstance(row["budget"], float) else ""
    return f"{row['method']} on {plain(row['text'])} at {row['length']} tokens{budget}"


def _changes(row: Row, rows: Sequence[Row]) -> list[str]:
    """Return the differences of a row to dense, one phrase each; [] if dense was not measured.

    Args:
        row: the row of a method.
        rows: all rows. Rows of `Full` show the differences that only different rounding causes.
    """
    phrases = []
    continuation, turns, decoded, written = (
        row[probe] if row.get(probe, {}).get("pairs") else None for probe in OWN_PHRASES
    )
    if continuation:
        full = [x for x in rows if x["method"] == Full.name and text_key_of(x) == text_key_of(row)]
        noise = [digits(x[CONTINUATION]["kl"]) for x in full if x.get(CONTINUATION)]
        noise_note = f" (kernels alone: {noise[0]})" if noise else ""
        phrases += [
            f"KL after the prompt {_divergence(continuation)} per token{noise_note}",
            f"greedy agreement {continuation['agreement']:.1%}",
            f"perplexity after the prompt × {_ratio(continuation)}",
        ]
    if turns:
        first, *_, last = map(_divergence, turns["turns"])
        phrases.append(f"KL per token {first} in turn 1 and {last} in turn {TURN_COUNT} of a chat")
    if decoded:
        over = decoded.get("over_floor")
        noise_note = "" if over is None else f" ({over:.1f} × the floor)"
        phrases += [
            f"KL of decoding {_divergence(decoded)} per token{noise_note}",
            f"agreement of decoding {decoded['agreement']:.1%}",
        ]
    if written:
        phrases.append(f"equal continuations: {_equal(written)}")
    for probe in (*PROBES, ALL_TASKS):
        if row.get(probe) and probe not in (*OWN_PHRASES, *TASKS):
            is_ratio = probe in PERPLEXITIES
            change = _ratio(row[probe]) if is_ratio else difference(row[probe])
            name = PHRASES.get(probe, probe.replace("_", " "))
            phrases += [f"{name} {'× ' if is_ratio else ''}{change}"] if change else []
    return phrases


# probes for which `_changes` writes special phrases
OWN_PHRASES = (CONTINUATION, TURNS, DECODE, GREEDY)
# probe -> its name in the phrases of `_changes`; other probes have their own name
PHRASES = {
    ASKED: "recall after the prompt",
    DECODE_ASKED: "recall in decoding",
    RECALL: "recall in the prompt",
    RECALL_BORDER: "recall at block starts",
    PERPLEXITY_BORDER: "block-start perplexity",
    ALL_TASKS: "mean of tasks",
}
