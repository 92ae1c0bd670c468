"""The report of `fidelity`: rows of samples, tables and sentences."""

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
from cab_hf.eval.methods import METHODS, Cab, Dense, Full, exact_readings, never_sparse
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
cell_of = itemgetter(*CELL)
place_of = itemgetter("text", "length")
TIMES = ("predict_ms", "attend_ms", "dense_ms", "dense_kernel")
# fields of a value of a row, and the edges of its interval
RATIO, KL = ("ratio", "ratio_low", "ratio_high"), ("kl", "kl_low", "kl_high")
GROWTH = ("growth", "growth_low", "growth_high")


# --- rows


def usual(samples: Sequence[Row]) -> list[Row]:
    """Return samples that read a text of its length in one pass, without repeated questions.

    If there are none, return all samples with a density.
    """
    parts = [s for s in samples if s["probe"] != TIME]
    read = [s for s in parts if s["probe"] not in DECODES] or parts
    unusual = (QUESTION_FIRST, CONTINUATION, ASKED, TURNS, *TASKS)
    return [s for s in read if s["probe"] not in unusual] or read


def attention_ms(timed: Row) -> float:
    """Return the attention time of a sample or row that was timed."""
    return timed["predict_ms"] + timed["attend_ms"]


def rows_of(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per (method, text, length, budget), with the result of each probe.

    * Answers: the share of right answers with Wilson's interval, and the difference to dense with
      Newcombe's interval.
    * Perplexity: its ratio to dense, the geometric mean over documents with Student's interval.
      Both compare texts that this method and dense attention have read.
    * Tokens after a prompt: also the KL divergence per token, the mean over documents with
      Student's interval, and the share of tokens at which greedy decoding agrees with dense.
    * Decoding: also the KL divergence divided by that of `Full`, the noise floor.
    * Turns: also the results of each turn, and the KL of the last turn minus that of the first.
    * Continuations: the number equal to dense word for word, and the number of tokens before the
      first difference.
    """
    dense = {question_of(s): s for s in samples if s["method"] == Dense.name}
    cells = _cells_of(samples)
    rows = [_row(cell, dense) for cell in cells]
    _mark_fewer(rows, cells)
    _tell_means_of_tasks(rows)
    _hold_against_floor(rows)
    return rows


def _cells_of(samples: Sequence[Row]) -> list[list[Row]]:
    """Return the samples of each cell, by text, length, method and budget."""
    texts, kinds = list(dict.fromkeys(s["text"] for s in samples)), list(METHODS.values())

    def place(cell: Sequence[Row]) -> tuple:
        method, text, length, budget = cell_of(cell[0])
        kind, density = kind_of(method), budget if isinstance(budget, float) else 0.0
        return texts.index(text), length, kinds.index(kind), method != kind.name, density

    return sorted(grouped(samples, *CELL), key=place)


def _row(members: Sequence[Row], dense: Mapping[tuple, Row]) -> dict[str, Any]:
    method, read = members[0]["method"], usual(members)
    row = {name: members[0][name] for name in (*CELL, "fitted")}
    row |= {"density": fmean(s["density"] for s in read) if read else None, **_times(members)}
    if never_sparse(kind_of(method), members):
        row["never_sparse"] = True
    over = _density_over_match(members, read)
    if over is not None and abs(over - 1) > OFF:
        row["density_over_match"] = over
    decoded = next((s for s in members if s["probe"] in DECODES), None)
    if decoded is not None:
        step_tokens = decoded["step_tokens"]
        row |= {"step_tokens": step_tokens, "step_share": step_tokens / decoded["length"]}
    compared = {} if method == Dense.name else dense
    for probe in PROBES:
        own = [s for s in members if s["probe"] == probe]
        pairs = [(s, compared[question_of(s)]) for s in own if question_of(s) in compared]
        if own:
            row[probe] = SCORED.get(probe, _answers)(own, pairs)
    return row


def _density_over_match(members: Sequence[Row], read: Sequence[Row]) -> float | None:
    """Return the density of sparse layers divided by the matched density; None without a match.

    A cache that keeps some tokens after a dense prefill has no sparse layer.
    """
    fitted, by_time = members[0]["fitted"], {"fitted_config", "match_ms"}
    if fitted is None or any(by_time & s.keys() for s in members):
        return None
    if all(s.get("sparse_density") is None for s in read):
        return None
    return realised_density(read) / fitted


def _times(members: Sequence[Row]) -> dict[str, Any]:
    """Return the attention time, absolute and relative to dense; None if it was not timed."""
    timed = next((s for s in members if s["probe"] == TIME), None)
    if timed is None:
        return dict.fromkeys((*TIMES, "over_dense"))
    # older results contain the time of selection in plain PyTorch
    names = (*TIMES, "predict_reported")
    row = {name: timed[name] for name in names if name in timed}
    if "match_ms" in timed:
        row["over_match"] = attention_ms(timed) / timed["match_ms"]
    return {**row, "over_dense": attention_ms(timed) / timed["dense_ms"]}


def _perplexity(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return perplexity over all tokens; its ratio compares the same documents equally."""
    nll, count = (sum(s[name] for s in own) for name in ("nll", "count"))
    fields = {"n": len(own), "tokens": count, "value": math.exp(nll / count)}
    if not pairs:
        return fields
    means = [[s["nll"] / s["count"] for s in each] for each in zip(*pairs, strict=True)]
    ratio = math.exp(fmean(means[0]) - fmean(means[1]))
    fields |= {"pairs": len(pairs), "ratio": ratio}
    if len(pairs) > 1:
        _, low, high = mean_interval(*means)
        fields |= {"ratio_low": math.exp(low), "ratio_high": math.exp(high)}
    return fields


def _continuation(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return KL divergence per token, greedy agreement, and the result of `_perplexity`."""
    means = [s["kl"] / s["count"] for s in own]
    fields = {"kl": fmean(means)}
    if len(own) > 1:
        _, low, high = mean_interval(means, [0.0] * len(means))
        # a divergence is never below 0
        fields |= {"kl_low": max(0.0, low), "kl_high": high}
    agreed, count = (sum(s[name] for s in own) for name in ("agree", "count"))
    return {**fields, "agreement": agreed / count, **_perplexity(own, pairs)}


def _turns(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return `_continuation` of all turns and of each, and the KL growth over turns."""
    turns = [
        _continuation(
            [s["turns"][at] for s in own], [(s["turns"][at], b["turns"][at]) for s, b in pairs]
        )
        for at in range(TURN_COUNT)
    ]
    first, last = ([s["turns"][at]["kl"] / s["turns"][at]["count"] for s in own] for at in (0, -1))
    fields = {"growth": fmean(last) - fmean(first)}
    if len(own) > 1:
        fields = dict(zip(GROWTH, mean_interval(last, first), strict=True))
    return {**_continuation(own, pairs), "turns": turns, **fields}


def _written(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Count continuations equal to dense, and the tokens before the first difference."""
    fields = {"n": len(own), "tokens": len(own[0]["written"])}
    if not pairs:
        return fields
    alike = [common_prefix_length(s["written"], base["written"]) for s, base in pairs]
    equal = sum(s["written"] == base["written"] for s, base in pairs)
    low, high = wilson(equal, len(pairs))
    fields |= {"pairs": len(pairs), "equal": equal, "low": low, "high": high}
    return {**fields, "share": equal / len(pairs), "prefix": fmean(alike)}


def _answers(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return right answers over all keys; only keys that both were asked for are compared."""
    both = [keys for s, base in pairs for keys in zip(s["right"], base["right"], strict=True)]
    fields = compared_shares([each for s in own for each in s["right"]], both)
    if both:
        ours, base = map(sum, zip(*both, strict=True))
        fields["ratio"] = ours / base if base else None
    return fields


SCORED: dict[str, Callable[..., dict[str, Any]]] = {
    **dict.fromkeys(PERPLEXITIES, _perplexity),
    **dict.fromkeys((CONTINUATION, DECODE), _continuation),
    **{GREEDY: _written, TURNS: _turns},
}


def _hold_against_floor(rows: Sequence[dict[str, Any]]) -> None:
    """Divide the KL of decoding by that of `Full` on the same texts, if it exists."""
    decoded = [row for row in rows if row.get(DECODE) and row["method"] != Dense.name]
    floors = {place_of(row): row[DECODE]["kl"] for row in decoded if row["method"] == Full.name}
    for row in decoded:
        floor = floors.get(place_of(row), 0.0)
        if floor > 0:
            row[DECODE]["over_floor"] = row[DECODE]["kl"] / floor


def _tell_means_of_tasks(rows: Sequence[dict[str, Any]]) -> None:
    """Add the mean over tasks to rows that have all tasks of other rows of their text."""
    for alike in grouped(rows, "text", "length"):
        asked = [name for name in TASKS if any(name in row for row in alike)]
        for row in alike:
            if asked and row.keys() >= {*asked}:
                row[ALL_TASKS] = _mean_of_tasks([row[name] for name in asked])


def _mean_of_tasks(results: Sequence[Row]) -> dict[str, Any]:
    """Return the mean over tasks of the results of `_answers`, equally weighted."""
    shown = {"n": len(results)}
    for names in (("share", "low", "high"), ("delta", "delta_low", "delta_high")):
        if all(names[0] in result for result in results):
            parts = [tuple(map(result.get, names)) for result in results]
            shown |= dict(zip(names, mean_of_intervals(parts), strict=True))
    return shown


def _mark_fewer(rows: Sequence[dict[str, Any]], cells: Sequence[Sequence[Row]]) -> None:
    """Record in ``fewer`` which probes of a row have fewer cases than other rows, ``6 of 20``.

    Other rows are those of its text and length. The run of such a row was stopped, or continued for
    other methods alone.
    """
    counts = [Counter((*place_of(s), s["probe"]) for s in cell) for cell in cells]
    most: Counter = Counter()
    for count in counts:
        # the maximum of both
        most |= count
    for row, count in zip(rows, counts, strict=True):
        fewer = {at[-1]: f"{n} of {most[at]}" for at, n in count.items() if n < most[at]}
        if fewer:
            row["fewer"] = fewer


# --- tables


def tables_of(rows: Sequence[Row]) -> dict[str, str]:
    """Return one table per text; empty columns are left out."""
    shown = {
        heading: write
        for heading, (probe, write) in COLUMNS.items()
        if probe is None or any(row.get(probe) for row in rows)
    }
    return {
        f"On {plain(own[0]['text'])}": markdown_table(own, shown) for own in grouped(rows, "text")
    }


def _share(result: Row) -> str:
    return with_interval(result["share"], result["low"], result["high"])


def _ratio(result: Row) -> str | None:
    """Return the ratio to dense attention with its interval, or None."""
    if result.get("ratio") is None:
        return None
    return with_interval(*map(result.get, RATIO), "{:.3f}".format)


def _divergence(result: Row) -> str:
    """Return KL per token, with its interval if there is one."""
    return with_interval(*map(result.get, KL), digits)


def _agreement(result: Row) -> str:
    return f"{result['agreement']:.3f}"


def _listed(turns: Sequence[Row], write: Callable[[Row], str]) -> str:
    return ", ".join(map(write, turns))


def _equal(result: Row) -> str | None:
    """Return ``34 of 100`` if continuations are compared with those of dense."""
    return f"{result['equal']} of {result['pairs']}" if "pairs" in result else None


def _prefix(result: Row) -> str | None:
    return f"{result['prefix']:.0f} of {result['tokens']}" if "pairs" in result else None


def _milliseconds(row: Row) -> str | None:
    """Return attention ms ``12.3 (1.20 + 11.1)``: selecting and attending; ~ marks reports."""
    if row.get("attend_ms") is None:
        return None
    about = "~" if "predict_reported" in row else ""
    parts = f"{about}{digits(row['predict_ms'])} + {digits(row['attend_ms'])}"
    return f"{digits(attention_ms(row))} ({parts})"


def _over_dense(row: Row) -> str | None:
    over = row.get("over_dense")
    return None if over is None else f"{over:.2f} {row['dense_kernel']}"


def _of(probe: str, write: Callable[[Row], str | None]) -> tuple[str, Callable[[Row], Any]]:
    """Return a column of a probe: the probe, and a function from row to text."""
    return probe, column(write, probe)


def _right(probe: str, heading: str, mark: str = " [95 %]") -> dict[str, tuple]:
    """Return the two columns of a probe of answers; ``mark`` follows the heading of the first."""
    return {
        f"{heading}{mark}": _of(probe, _share),
        f"{heading}, difference to dense": _of(probe, difference),
    }


# heading -> the probe or time that a row must have, and a function from row to text
COLUMNS = {
    **{name: (None, name) for name in ("method", "length", "budget", "density")},
    "KL after the prompt": _of(CONTINUATION, _divergence),
    "agreement": _of(CONTINUATION, _agreement),
    "perplexity after the prompt / dense": _of(CONTINUATION, _ratio),
    **_right(ASKED, "recall after the prompt", ""),
    "KL over turns": _of(TURNS, _divergence),
    "KL, turn by turn": _of(TURNS, lambda result: _listed(result["turns"], _divergence)),
    f"turn {TURN_COUNT} minus turn 1": _of(
        TURNS, lambda result: with_interval(*map(result.get, GROWTH), "{:+.2g}".format)
    ),
    "agreement, turn by turn": _of(TURNS, lambda result: _listed(result["turns"], _agreement)),
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
        heading: shown
        for name, task in TASKS.items()
        for heading, shown in _right(name, task.title).items()
    },
}
# --- sentences


def readings_of(rows: Sequence[Row]) -> list[str]:
    """Summarise CAB's differences to dense per text at the greatest length, and list exceptions.

    Exceptions are budgets that miss the match, missing cases, and methods that were dense
    attention.
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
    sentences = [
        (sentence, [f"{_where(row)} ({row[field]:.2f} ×)" for row in rows if _is_off(row, field)])
        for field, sentence in off.items()
    ]
    fewer = {_where(row): dict.fromkeys(row["fewer"].values()) for row in rows if "fewer" in row}
    fewer = [f"{where} ({' or '.join(cases)})" for where, cases in fewer.items()]
    sentences.append(("Measured in fewer cases than other rows", fewer))
    named = [f"{sentence}: {', '.join(which)}." for sentence, which in sentences if which]
    return [*cab.values(), *named, *exact_readings(rows)]


def _is_off(row: Row, field: str) -> bool:
    return abs(row.get(field, 1.0) - 1) > OFF


def _where(row: Row) -> str:
    """Describe a row in a sentence."""
    budget = f" and budget {row['budget']}" if isinstance(row["budget"], float) else ""
    return f"{row['method']} on {plain(row['text'])} at {row['length']} tokens{budget}"


def _changes(row: Row, rows: Sequence[Row]) -> list[str]:
    """List the differences of a method to dense, one phrase each; empty without comparisons."""
    phrases = []
    behind, turned, decoded, written = (
        row[probe] if row.get(probe, {}).get("pairs") else None for probe in OWN_PHRASES
    )
    if behind:
        # differences of the sparse path at full budget
        full = [x for x in rows if x["method"] == Full.name and place_of(x) == place_of(row)]
        noise = [digits(each[CONTINUATION]["kl"]) for each in full if each.get(CONTINUATION)]
        noise_note = f" (kernels alone: {noise[0]})" if noise else ""
        phrases += [
            f"KL after the prompt {_divergence(behind)} per token{noise_note}",
            f"greedy agreement {behind['agreement']:.1%}",
            f"perplexity after the prompt × {_ratio(behind)}",
        ]
    if turned:
        first, *_, last = map(_divergence, turned["turns"])
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
            ratio = probe in PERPLEXITIES
            change = _ratio(row[probe]) if ratio else difference(row[probe])
            name = SAID.get(probe, probe.replace("_", " "))
            phrases += [f"{name} {'× ' if ratio else ''}{change}"] if change else []
    return phrases


OWN_PHRASES = (CONTINUATION, TURNS, DECODE, GREEDY)
SAID = {
    ASKED: "recall after the prompt",
    DECODE_ASKED: "recall in decoding",
    RECALL: "recall in the prompt",
    RECALL_BORDER: "recall at block starts",
    PERPLEXITY_BORDER: "block-start perplexity",
    ALL_TASKS: "mean of tasks",
}
