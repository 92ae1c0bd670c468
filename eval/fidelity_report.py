"""The report of `fidelity`: rows of samples, tables, sentences and the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from cab_hf.eval import charts
from cab_hf.eval.comparison import (
    RATIO,
    TIME,
    TIME_COLUMNS,
    Comparison,
    cell_fields,
    cells_of,
    draw_by_name,
    draw_legend,
    draw_lines,
    fewer_readings,
    finish_panel,
    looks_of,
    mark_fewer,
    notes_how,
    notes_time,
    off_readings,
    perplexity,
    ratio_to_dense,
    time_said,
)
from cab_hf.eval.experiment import Row
from cab_hf.eval.intervals import (
    mean_interval,
    mean_of_intervals,
    paired_difference,
    wilson,
)
from cab_hf.eval.methods import (
    Cab,
    Dense,
    Full,
    exact_readings,
)
from cab_hf.eval.probes import (
    ALL_TASKS,
    ASKED,
    CONTINUATION,
    CONTINUED,
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
    border_of,
    question_of,
)
from cab_hf.eval.report import (
    column,
    difference,
    digits,
    grouped,
    markdown_table,
    with_interval,
)
from cab_hf.runs.markdown import plain
from cab_hf.texts.needles import shared
from cab_hf.texts.tasks import TASKS


class FidelityReport(Comparison):
    """`Fidelity` as far as it makes rows of samples and a report of rows."""

    @staticmethod
    def usual(samples: Sequence[Row]) -> list[Row]:
        """Those that read a text of its length in one pass and are asked nothing twice.

        Where there are none, all that have a density.
        """
        parts = [s for s in samples if s["probe"] != TIME]
        read = [s for s in parts if s["probe"] not in DECODES] or parts
        unusual = (QUESTION_FIRST, CONTINUATION, ASKED, TURNS, *TASKS)
        return [s for s in read if s["probe"] not in unusual] or read

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row a (method, text, length, budget), with what was found by each probe.

        Of answers: the share that is right with Wilson's interval, and the difference to dense with
        Newcombe's. Of perplexity: its ratio to dense, the geometric mean over documents with
        Student's interval. Both over what this method and dense attention have read alike. Of what
        follows a prompt also the KL divergence a token, the mean over documents with Student's
        interval, and the share of tokens at which greedy decoding would agree with dense. Of what
        is decoded the KL divergence also over that of `Full`, the noise floor. Of turns also what
        is found in each, and by how much the last one's KL exceeds the first one's. Of
        continuations: how many are those of dense word for word, and how many tokens they begin
        alike.
        """
        dense = {question_of(s): s for s in samples if s["method"] == Dense.name}
        cells = cells_of(samples)
        rows = [_row(cell, dense) for cell in cells]
        mark_fewer(rows, cells)
        _tell_means_of_tasks(rows)
        _hold_against_floor(rows)
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        shown = {
            heading: write
            for heading, (probe, write) in COLUMNS.items()
            if probe is None or any(row.get(probe) for row in rows)
        }
        turned = [row for row in rows if row.get(TURNS)]
        return table_a_text(rows, shown) | table_a_text(turned, TURN_COLUMNS, "Turn after turn on")

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """What CAB changes in each text, at the greatest length, and what rows do not hold.

        That is the match, cases that others have, and a method that was dense attention.
        """
        cab = {}
        for row in rows:
            if row["method"] == Cab.name and (changes := _changes(row, rows)):
                cab[row["text"]] = row, ", ".join(changes)
        return [
            f"On {plain(text)}, {row['length']} tokens, cab attends {row['density']:.0%} of the "
            f"pairs{time_said(row)}; against dense: {changes}."
            for text, (row, changes) in cab.items()
        ] + [*off_readings(rows), *fewer_readings(rows), *exact_readings(rows)]

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        configs = settings["cab_configs"]
        border = border_of(config.get("query_block", 0) for config in configs.values())
        return notes_how(settings) + (
            "Nothing but continuations is generated: an answer is right when each of its tokens is "
            "the likeliest one after all that stands before it. Behind the prompt: the method "
            f"reads a prompt, and {CONTINUED} tokens of the same text that follow (an eighth of it "
            "at most) are read through the KV cache, teacher forced, by exact attention but for "
            "methods that have dropped keys for good; KL is KL(dense || method) of the next token, "
            "in nats, a token, the mean over documents with Student's interval; agreement is the "
            "share of tokens at which both find the same token likeliest. Full, the sparse path "
            "with all blocks, shows what of it kernels and rounding leave. Asked behind it: keys "
            "stated in the prompt and repeated behind it. Decode: the method reads a prompt and "
            "then what follows one token at a time, teacher forced, against dense attention that "
            "reads it so. Its floor is the KL of full, which decodes by another exact kernel than "
            "dense. Keys a step: tokens whose K and V have the bytes that a step reads in a layer, "
            "for CAB the index of all tokens and decode_tokens rows. Streaming (4 sinks and the "
            "latest tokens), h2o (heavy hitters and the latest, half each) and snapkv (what the "
            "last queries of the prompt attend, and all that is decoded) read the prompt densely "
            "there, and keep so many; the density of the last two is what they keep. Equal "
            "continuations: greedy ones that are those of dense word for word; agreeing prefix: "
            "tokens until the first other one, the mean. "
            f"{notes_time()}"
            "Pass: a key in a text, asked for behind it; question first: asked for before it as "
            "well; multi key: one of four of different names. Recall: keys stated in the first "
            "half of a document and repeated in its second. Perplexity: of the second "
            "half of a document without keys. Shares with Wilson's interval, differences to dense "
            "with Newcombe's "
            "(of recall over keys, those of one document counting as independent), ratios of "
            "perplexity the geometric mean over documents with Student's, all 95 %. Density: "
            "attended over causal (query, key) pairs. "
            "Query blocks are decided as a whole, so that what an answer's first token "
            "attends may depend on its later ones, as on all that follow in the block. At borders "
            "it does not: there numbers of recall, and the tokens of perplexity, are the first of "
            f"{border} tokens that whole query blocks make up."
            f"{_chats(settings.get('probes', ()))}{_tasks(settings.get('probes', ()))}"
            f"{_cascades(configs)}"
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Quality over attention time or density, a row of panels each text and length."""
        panels = grouped(rows, "text", "length")
        tasks = {
            name: task.title for name, task in TASKS.items() if any(row.get(name) for row in rows)
        }
        asked = [probe for probe in DRAWN if any(row.get(probe) for row in rows)]
        columns = {probe: DRAWN[probe] for probe in asked or ([] if tasks else DRAWN)}
        columns |= {ALL_TASKS: ("right answers by task", "share")} if tasks else {}
        looks = looks_of(rows)
        # names of tasks stand beside each other
        widths = [max(1, 0.3 * len(tasks)) if probe == ALL_TASKS else 1 for probe in columns]
        size = (max(7.2, 3.6 * sum(widths)), 0.9 + 2.9 * len(panels))
        grid = {"figsize": size, "width_ratios": widths}
        with charts.figure(path, len(panels), len(columns), **grid) as axes:
            for beside, own in zip(axes, panels, strict=True):
                for axis, (probe, (title, value)) in zip(beside, columns.items(), strict=True):
                    if probe == ALL_TASKS:
                        draw_by_name(axis, own, tasks, looks)
                    else:
                        _panel(axis, own, probe, value, looks)
                    where = f"{own[0]['text']}, {own[0]['length']:,} tokens"
                    axis.set_title(f"{title}\n{where}", fontsize=9, parse_math=False)
            draw_legend(axes)


def table_a_text(
    rows: Sequence[Row], columns: Mapping[str, Any], heading: str = "On"
) -> dict[str, str]:
    """A table of each text, under its name behind ``heading``."""
    return {
        f"{heading} {plain(own[0]['text'])}": markdown_table(own, columns)
        for own in grouped(rows, "text")
    }


def _chats(probes: Sequence[str]) -> str:
    """What turns are, where they are asked for."""
    if TURNS not in probes:
        return ""
    return (
        f" Turns: a text is read as {TURN_COUNT} equal turns over one KV cache, each a prompt that "
        f"the method reads and the {CONTINUED} tokens that follow it (an eighth of the turn at "
        "most), read as those behind a prompt are, against dense attention that reads the same "
        f"turns. Turn {TURN_COUNT} less turn 1: the mean over documents with Student's interval."
    )


def _tasks(probes: Sequence[str]) -> str:
    """What answers of tasks are, where some are asked for."""
    if not {*TASKS} & {*probes}:
        return ""
    return (
        " Tasks: the method reads a prompt, and its answers behind it are read through the KV "
        "cache as those asked behind a prompt are; each answer counts, those of one prompt as "
        "independent. Mean over tasks: each counts once, with the intervals of all joined by MOVER."
    )


def _cascades(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Which methods are cascades, and how they differ; of configs as they are recorded."""
    parts = []
    for name, config in configs.items():
        if anchors := config.get("anchors"):
            budget = f"{config['max_density']:g} of each row"
            if config["max_density"] == 1 and "mass_threshold" in config:
                budget = f"mass_threshold {config['mass_threshold']:g}"
            # older results have tables, and say how anchors chose, and for whom
            budget = "budgets a head" if isinstance(config.get("top_p"), Sequence) else budget
            how = ""
            if "anchor_scores" in config:
                how = f" by {config['anchor_scores']} scores, {SHARING[config['anchor_heads']]}"
            parts.append(f"{name} of {len(anchors)} anchors{how}, {budget}")
    return f" Cascades: {'; '.join(parts)}." if parts else ""


def _row(members: Sequence[Row], dense: Mapping[tuple, Row]) -> dict[str, Any]:
    row = cell_fields(members, FidelityReport.usual(members))
    decoded = next((s for s in members if s["probe"] in DECODES), None)
    if decoded is not None:
        step_tokens = decoded["step_tokens"]
        row |= {"step_tokens": step_tokens, "step_share": step_tokens / decoded["length"]}
    compared = {} if members[0]["method"] == Dense.name else dense
    scored = dict.fromkeys(PERPLEXITIES, perplexity) | {GREEDY: _written, TURNS: _turns}
    scored |= dict.fromkeys((CONTINUATION, DECODE), _continuation)
    for probe in PROBES:
        own = [s for s in members if s["probe"] == probe]
        pairs = [(s, compared[question_of(s)]) for s in own if question_of(s) in compared]
        if own:
            row[probe] = scored.get(probe, _answers)(own, pairs)
    return row


def _continuation(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """KL divergence a token and greedy agreement, and what `perplexity` tells."""
    means = [s["kl"] / s["count"] for s in own]
    fields = {"kl": fmean(means)}
    if len(own) > 1:
        _, low, high = mean_interval(means, [0.0] * len(means))
        # no divergence is below 0
        fields |= {"kl_low": max(0.0, low), "kl_high": high}
    agreed, count = (sum(s[name] for s in own) for name in ("agree", "count"))
    return {**fields, "agreement": agreed / count, **perplexity(own, pairs)}


def _turns(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """`_continuation` of all turns and of each, and the KL of the last less that of the first."""
    turns = [
        _continuation(
            [s["turns"][at] for s in own], [(s["turns"][at], b["turns"][at]) for s, b in pairs]
        )
        for at in range(TURN_COUNT)
    ]
    first, last = ([s["turns"][at]["kl"] / s["turns"][at]["count"] for s in own] for at in (0, -1))
    fields = {"growth": fmean(last) - fmean(first)}
    if len(own) > 1:
        _, low, high = mean_interval(last, first)
        fields |= {"growth_low": low, "growth_high": high}
    return {**_continuation(own, pairs), "turns": turns, **fields}


def _hold_against_floor(rows: Sequence[dict[str, Any]]) -> None:
    """Give what was decoded its KL over that of `Full` on the same, where that is there."""
    place = itemgetter("text", "length")
    decoded = [row for row in rows if row.get(DECODE) and row["method"] != Dense.name]
    floors = {place(row): row[DECODE]["kl"] for row in decoded if row["method"] == Full.name}
    for row in decoded:
        floor = floors.get(place(row), 0.0)
        if floor > 0:
            row[DECODE]["over_floor"] = row[DECODE]["kl"] / floor


def _written(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """How many continuations are those of dense, and how many tokens they begin alike."""
    fields = {"n": len(own), "tokens": len(own[0]["written"])}
    if not pairs:
        return fields
    alike = [shared(s["written"], base["written"]) for s, base in pairs]
    equal = sum(s["written"] == base["written"] for s, base in pairs)
    low, high = wilson(equal, len(pairs))
    fields |= {"pairs": len(pairs), "equal": equal, "low": low, "high": high}
    return {**fields, "share": equal / len(pairs), "prefix": fmean(alike)}


def _answers(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """What was right; every key counts, and only keys both were asked for are compared."""
    right = [each for s in own for each in s["right"]]
    low, high = wilson(sum(right), len(right))
    fields = {
        "n": len(right),
        "correct": sum(right),
        "share": fmean(right),
        "low": low,
        "high": high,
    }
    if not pairs:
        return fields
    both = [keys for s, base in pairs for keys in zip(s["right"], base["right"], strict=True)]
    ours, base = zip(*both, strict=True)
    interval = paired_difference(ours, base)
    fields |= dict(zip(("delta", "delta_low", "delta_high"), interval, strict=True))
    return {**fields, "pairs": len(both), "ratio": sum(ours) / sum(base) if any(base) else None}


def _mean_of_tasks(results: Sequence[Row]) -> dict[str, Any]:
    """What `_answers` says of each task, as the mean over tasks, each counting once."""
    shown = {"n": len(results)}
    for names in (("share", "low", "high"), ("delta", "delta_low", "delta_high")):
        if all(names[0] in result for result in results):
            parts = [tuple(map(result.get, names)) for result in results]
            shown |= dict(zip(names, mean_of_intervals(parts), strict=True))
    return shown


def _tell_means_of_tasks(rows: Sequence[dict[str, Any]]) -> None:
    """Give rows their mean over tasks, where they have all that others of their text have."""
    for alike in grouped(rows, "text", "length"):
        asked = [name for name in TASKS if any(name in row for row in alike)]
        for row in alike:
            if asked and row.keys() >= {*asked}:
                row[ALL_TASKS] = _mean_of_tasks([row[name] for name in asked])


def _panel(
    axis: Any, rows: Sequence[Row], probe: str, value: str, looks: Mapping[str, Mapping[str, Any]]
) -> None:
    """``value`` of a probe over time or density, a line a method; dense attention is a level."""
    results = [row for row in rows if row.get(probe, {}).get(value) is not None]
    for row in results:
        if row["method"] == Dense.name and value != "kl":
            axis.axhline(row[probe][value], color="black", linestyle="--", label=Dense.name)
    if value == "ratio" and any(row["method"] == Dense.name for row in rows):
        axis.axhline(1, color="black", linestyle="--", label=Dense.name)
    drawn = [row for row in results if row["method"] in looks]
    timed = bool(drawn) and all(row.get("over_dense") is not None for row in drawn)
    share = "step_share" if probe in DECODES else "over_dense" if timed else "density"
    draw_lines(axis, drawn, share, itemgetter(probe), (value, *EDGES[value]), looks)
    if value == "share":
        axis.set_ylim(-0.04, 1.04)
    # what a method changes and what kernels leave are some powers of ten apart
    if value == "kl" and drawn and all(row[probe][value] > 0 for row in drawn):
        axis.set_yscale("log", nonpositive="clip")
    finish_panel(axis, share)


def _of(probe: str, write: Callable[[Row], str | None]) -> tuple[str, Callable[[Row], Any]]:
    """A column of what a probe found: the probe, and what is shown of a row."""
    return probe, column(write, probe)


def _share(result: Row) -> str:
    return with_interval(result["share"], result["low"], result["high"])


def _divergence(result: Row) -> str:
    """KL a token, and its interval where there is one."""
    return with_interval(result["kl"], *map(result.get, EDGES["kl"]), digits)


def _changes(row: Row, rows: Sequence[Row]) -> list[str]:
    """What a method changes against dense, a phrase an item; none where nothing is compared."""
    phrases = []
    place = itemgetter("text", "length")
    behind, turned, decoded, written = (
        row[probe] if row.get(probe, {}).get("pairs") else None
        for probe in (CONTINUATION, TURNS, DECODE, GREEDY)
    )
    if behind:
        # what the sparse path leaves at full budget
        full = [each for each in rows if each["method"] == Full.name and place(each) == place(row)]
        noise = [digits(each[CONTINUATION]["kl"]) for each in full if each.get(CONTINUATION)]
        beside = f" (of the kernels alone {noise[0]})" if noise else ""
        phrases += [
            f"behind the prompt KL {_divergence(behind)} a token{beside}",
            f"greedy agreement {behind['agreement']:.1%}",
            f"perplexity behind the prompt × {ratio_to_dense(behind)}",
        ]
    if turned:
        first, *_, last = map(_divergence, turned["turns"])
        phrases.append(f"KL a token {first} in turn 1 and {last} in turn {TURN_COUNT} of a chat")
    if decoded:
        over = decoded.get("over_floor")
        beside = "" if over is None else f" ({over:.1f} × the floor)"
        phrases += [
            f"decoded KL {_divergence(decoded)} a token{beside}",
            f"decoded agreement {decoded['agreement']:.1%}",
        ]
    if written:
        phrases.append(f"{_equal(written)} continuations equal")
    left_out = (CONTINUATION, TURNS, DECODE, GREEDY, *TASKS)
    for probe in (*PROBES, ALL_TASKS):
        if probe in left_out or not row.get(probe):
            continue
        of_perplexity = probe in PERPLEXITIES
        change = ratio_to_dense(row[probe]) if of_perplexity else difference(row[probe])
        if change:
            name = SAID.get(probe, probe.replace("_", " "))
            phrases.append(f"{name} {'× ' if of_perplexity else ''}{change}")
    return phrases


def _growth(result: Row) -> str:
    """The KL of the last turn less that of the first, and its interval where there is one."""
    edges = result.get("growth_low"), result.get("growth_high")
    return with_interval(result["growth"], *edges, "{:+.2g}".format)


def _equal(result: Row) -> str | None:
    """``34 of 100``, where continuations are held against those of dense."""
    return f"{result['equal']} of {result['pairs']}" if "pairs" in result else None


def _prefix(result: Row) -> str | None:
    return f"{result['prefix']:.0f} of {result['tokens']}" if "pairs" in result else None


# whose a plan of an anchor is
SHARING = {"each": "a plan a head", "group": "a plan a KV head", "all": "one plan for all heads"}
SAID = {
    ASKED: "end-of-prompt recall",
    DECODE_ASKED: "decoded recall",
    RECALL: "in-text recall",
    RECALL_BORDER: "block-start recall",
    PERPLEXITY_BORDER: "block-start perplexity",
    ALL_TASKS: "mean over tasks",
}
DRAWN = {
    CONTINUATION: ("KL behind the prompt", "kl"),
    ASKED: ("end-of-prompt recall", "share"),
    TURNS: ("KL over turns", "kl"),
    DECODE: ("KL of decoding", "kl"),
    DECODE_ASKED: ("decoded recall", "share"),
    GREEDY: ("equal continuations", "share"),
    RECALL: ("in-text recall", "share"),
    RECALL_BORDER: ("block-start recall", "share"),
    PASS: ("pass", "share"),
    PERPLEXITY: ("perplexity × dense", "ratio"),
    PERPLEXITY_BORDER: ("block-start perplexity × dense", "ratio"),
}
EDGES = {
    "share": ("low", "high"),
    "ratio": RATIO[1:],
    "kl": ("kl_low", "kl_high"),
}
# heading -> the probe or time that a row must have for it, and what is shown of a row
COLUMNS = {
    "method": (None, "method"),
    "length": (None, "length"),
    "budget": (None, "budget"),
    "density": (None, "density"),
    "KL behind the prompt": _of(CONTINUATION, _divergence),
    "agreement": _of(CONTINUATION, lambda result: f"{result['agreement']:.3f}"),
    "perplexity behind the prompt × dense": _of(CONTINUATION, ratio_to_dense),
    "end-of-prompt recall": _of(ASKED, _share),
    "end-of-prompt recall to dense": _of(ASKED, difference),
    "KL over turns": _of(TURNS, _divergence),
    "keys a step": ("step_tokens", column(lambda tokens: f"{tokens:,.0f}", "step_tokens")),
    "decode KL": _of(DECODE, _divergence),
    "× floor": _of(DECODE, lambda result: digits(result.get("over_floor"))),
    "decode agreement": _of(DECODE, lambda result: f"{result['agreement']:.3f}"),
    "decode recall": _of(DECODE_ASKED, _share),
    "decode recall to dense": _of(DECODE_ASKED, difference),
    "equal continuations": _of(GREEDY, _equal),
    "agreeing prefix": _of(GREEDY, _prefix),
    **TIME_COLUMNS,
    "pass [95 %]": _of(PASS, _share),
    "pass to dense": _of(PASS, difference),
    "question first": _of(QUESTION_FIRST, _share),
    "question first to dense": _of(QUESTION_FIRST, difference),
    "multi key [95 %]": _of(MULTI_KEY, _share),
    "multi key to dense": _of(MULTI_KEY, difference),
    "in-text recall [95 %]": _of(RECALL, _share),
    "in-text recall to dense": _of(RECALL, difference),
    "in-text recall × dense": _of(RECALL, ratio_to_dense),
    "block-start recall [95 %]": _of(RECALL_BORDER, _share),
    "block-start recall to dense": _of(RECALL_BORDER, difference),
    "perplexity": _of(PERPLEXITY, lambda result: f"{result['value']:.2f}"),
    "perplexity × dense [95 %]": _of(PERPLEXITY, ratio_to_dense),
    "block-start perplexity × dense [95 %]": _of(PERPLEXITY_BORDER, ratio_to_dense),
    "mean over tasks [95 %]": _of(ALL_TASKS, _share),
    "mean over tasks to dense": _of(ALL_TASKS, difference),
    **{
        f"{task.title} {heading}": _of(name, write)
        for name, task in TASKS.items()
        for heading, write in (("[95 %]", _share), ("to dense", difference))
    },
}
TURN_COLUMNS = {
    **{name: COLUMNS[name][1] for name in ("method", "length", "budget", "density")},
    **{
        f"KL of turn {at + 1}": column(
            lambda result, at=at: _divergence(result["turns"][at]), TURNS
        )
        for at in range(TURN_COUNT)
    },
    f"turn {TURN_COUNT} less turn 1": column(_growth, TURNS),
    "agreement, turn by turn": column(
        lambda result: ", ".join(f"{turn['agreement']:.3f}" for turn in result["turns"]), TURNS
    ),
}
