"""Comparisons: several methods read the same texts, at budgets matched by density or by time.

A cell is (method, text, length, budget). How long attention takes in a cell is timed once, on a
device where times mean something.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, product
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from cab_hf.config import CabConfig
from cab_hf.eval.attention_time import REPORTED, AttentionClock, layer_bench
from cab_hf.eval.experiment import Row
from cab_hf.eval.intervals import mean_interval
from cab_hf.eval.long_run import LongRun, LongRunSettings
from cab_hf.eval.methods import (
    METHODS,
    Cab,
    Cell,
    Dense,
    Method,
    Realised,
    known,
    layers_of,
    logged_config,
    never_sparse,
    realised_on,
)
from cab_hf.eval.on_model import realised_density, refusing
from cab_hf.eval.passkey import MATCH, fitted
from cab_hf.eval.report import column, digits, grouped, with_interval
from cab_hf.eval.speed.timing import Bench
from cab_hf.eval.teacher_forcing import CHUNK
from cab_hf.runs.markdown import plain
from cab_hf.runs.settings import (
    by_device,
    comma_separated,
    option,
    parse_assignment,
    parse_length,
    require,
)
from cab_hf.texts.needles import Tokens

# no probe that is asked for: how long attention takes, on a GPU once a cell
TIME = "time"
# what can be matched, beside times, and how far a time may be off
DENSITY, OFF = "density", 0.05
# of a ratio to dense attention in a row, with the edges of its interval
RATIO = ("ratio", "ratio_low", "ratio_high")
CELL = ("method", "text", "length", "budget")
cell_of = itemgetter(*CELL)
FIELD = re.compile(r",(?=\s*\w+\s*=)")  # between two assignments, whose values may have commas
NAME = re.compile(r"[\w.-]+")
YAML = (".yaml", ".yml")


def parse_budget(text: str) -> str | float:
    """A density, or `MATCH`."""
    return MATCH if text == MATCH else float(text)


def cab_config(text: str | Mapping[str, Any]) -> CabConfig:
    """Of fields, ``field=value,field=value`` or a JSON file; sparse at any length.

    Raises:
        ValueError: there is no such file, or what it or ``text`` has are no fields of CabConfig.
    """
    if isinstance(text, Mapping):
        return CabConfig.from_dict({"min_length": 0, **text})
    if not text.endswith(".json"):
        given = dict(map(parse_assignment, filter(None, FIELD.split(text))))
        return CabConfig.from_dict({"min_length": 0, **given})
    try:
        content = json.loads(Path(text).read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"variant must name a JSON file of CabConfig fields: {error}.") from None
    fields = content.get("cab_config", content) if isinstance(content, dict) else content
    # a file holds all fields, with the length from which a user wants to be sparse
    return CabConfig.from_dict({**CabConfig.from_dict(fields).to_dict(), "min_length": 0})


def parse_variant(text: str) -> dict[str, Any]:
    """Name -> what `cab_config` takes, of ``NAME=...`` or of a YAML file that holds several.

    Raises:
        ValueError: there is no such file, or it holds no configurations by name.
    """
    import yaml

    if "=" in text or not text.endswith(YAML):
        return dict([parse_assignment(text)])
    try:
        content = yaml.safe_load(Path(text).read_text("utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{text} must be a YAML file of configurations: {why}.") from None
    by_name = isinstance(content, Mapping) and content
    if not by_name or not all(isinstance(fields, Mapping) for fields in content.values()):
        raise ValueError(f"{text} must hold names, and fields of CabConfig below each.")
    return {str(name): fields for name, fields in content.items()}


def kind_of(method: str) -> type[Method]:
    """The class of a method; of ``cab:NAME``, that of cab."""
    return METHODS[method.partition(":")[0]]


@dataclass(frozen=True)
class ComparisonSettings(LongRunSettings):
    """Which methods are compared, at which lengths and budgets."""

    methods: tuple[str, ...] | None = by_device(
        ("dense", "full", "cab", "published", "streaming", "random", "antidiagonal"),
        ("dense", "full", "cab", "random"),
        f"comma-separated, of {', '.join(METHODS)}",
        comma_separated(str),
    )
    variant: tuple[str, ...] = option(
        (),
        "another configuration as method cab:NAME, NAME=field=value,... or NAME=FILE.json; "
        "FILE.yaml has several, their fields below their names; repeatable",
        parse_variant,
        repeatable=True,
    )
    lengths: tuple[int, ...] | None = by_device(
        (8192,), (1536,), "comma-separated lengths in tokens", comma_separated(parse_length)
    )
    prefill_chunk: int = option(0, "read prompts in chunks of so many tokens; 0: in one call", int)
    budgets: tuple[str | float, ...] = option(
        (MATCH,),
        f"comma-separated densities of the baselines: {MATCH} (what --{MATCH} realises), numbers",
        comma_separated(parse_budget),
    )
    match: str = option(Cab.name, "the method whose density is matched, cab or cab:NAME")
    equal: str = option(
        DENSITY,
        f"what is matched of it, {DENSITY} or {TIME}: what attention takes, choosing included, "
        f"within {OFF:.0%}",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check = partial(require, self)
        for method in self.methods:
            check("methods", method in METHODS, f"names of {', '.join(METHODS)}", method)
        check("methods", self.methods, "at least one name")
        for method in (name for name in self.methods if kind_of(name).dense_prefill):
            dense = f"without {method}, whose prefill is dense, where no probe decodes"
            check("methods", self.decoding, dense, method)
            whole = f"0 with {method}, which reads a prompt at once"
            check("prefill_chunk", not self.prefill_chunk, whole)
        # a text of one token has nothing to foresee
        check("lengths", self.lengths and min(self.lengths) > 1, "numbers of tokens, 2 at least")
        check("prefill_chunk", self.prefill_chunk >= 0, "0 or more")
        densities = [budget for budget in self.budgets if budget != MATCH]
        fits = self.budgets and all(0 < density <= 1 for density in densities)
        check("budgets", fits, f"{MATCH} or densities in (0, 1]")
        check("equal", self.equal in (DENSITY, TIME), f"{DENSITY} or {TIME}")
        alone = self.equal == DENSITY or self.budgets == (MATCH,)
        check("budgets", alone, f"{MATCH} alone with --equal {TIME}")
        # refuses bad fields here rather than in the middle of a run
        check("match", self.match in self.configs, f"one of {', '.join(self.configs)}")
        matched = [name for name in self.methods if METHODS[name].matched]
        check(
            "budgets",
            not matched or MATCH not in self.budgets or self.match in self.compared,
            f"densities such as 0.2 when {', '.join(matched)} is to match a budget and "
            f"{self.match}, whose density would be matched, is not among the methods",
        )

    @property
    def decoding(self) -> set[str]:
        """The probes that have methods decode, sparsely where they do."""
        return set()

    @cached_property
    def configs(self) -> dict[str, CabConfig]:
        """``cab``, the defaults and ``--cab``; and ``cab:NAME`` for each ``--variant``."""
        chosen = {Cab.name: CabConfig.from_dict({"min_length": 0, **self.cab_fields})}
        given_by_name = chain.from_iterable(parse_variant(x).items() for x in self.variant)
        for name, given in given_by_name:
            accepted = "NAME=field=value,... or NAME=FILE.json"
            fits = NAME.fullmatch(name) and isinstance(given, (str, Mapping)) and given
            require(self, "variant", fits, accepted, f"{name}={given}")
            chosen[f"{Cab.name}:{name}"] = cab_config(given)
        return {name: known(config) for name, config in chosen.items()}

    @cached_property
    def chunk(self) -> int:
        """Tokens behind a prompt that are read at once: too few for any config to be sparse."""
        smallest = min(config.query_block for config in self.configs.values())
        return min(CHUNK, smallest - 1, CabConfig.published().query_block - 1)

    @cached_property
    def compared(self) -> tuple[str, ...]:
        """All methods; those that match a budget wait for the one that sets it."""
        others = [name for name in self.configs if name != Cab.name]
        return tuple(sorted((*self.methods, *others), key=lambda name: kind_of(name).matched))


def _without_folder(text: str) -> str:
    """``NAME=...`` of a variant, of a file its name alone."""
    name, value = parse_assignment(text)
    return f"{name}={Path(value).name if value.endswith('.json') else value}"


class Comparison(LongRun):
    """Base of experiments in which methods read the same texts, with `ComparisonSettings`.

    A case has the fields of `CELL`, a ``probe``, which is `TIME` where attention is timed, and what
    else the experiment tells its cases by.
    """

    CELL, FITTED = CELL, "fitted"
    # what cab and variant say is in cab_configs
    GROWS: ClassVar[tuple[str, ...]] = ("methods", "budgets", "cab", "variant")

    @property
    @abstractmethod
    def texts(self) -> Sequence[str]:
        """Names of the texts of cells."""

    @abstractmethod
    def typical(self, text: str, length: int) -> Tokens:
        """What of a text tells densities and times at that length, always the same."""

    @abstractmethod
    def questions(self, method: str) -> list[dict[str, Any]]:
        """The fields beyond a cell's of all that a method is asked of a text and a length."""

    @abstractmethod
    def probed(self, case: Mapping[str, Any], method: Method) -> dict[str, Any]:
        """What is found in a case that is not timed, under its method."""

    @staticmethod
    def usual(samples: Sequence[Row]) -> list[Row]:
        """The samples whose density is that of a cell."""
        return [s for s in samples if s["probe"] != TIME]

    @cached_property
    def realised_on(self) -> Callable[[str, int], Realised]:
        """(text, length) -> what tells a config's density there, always the same one."""

        @lru_cache
        def made(text: str, length: int) -> Realised:
            return realised_on(self.model, self.typical(text, length))

        return made

    @cached_property
    def clock(self) -> AttentionClock | None:
        """What times attention in a model's layers; None where times would mean nothing."""
        device = self.settings.device
        bench = layer_bench(device)
        if bench is None and self.settings.equal == TIME:
            # which is asked for all the same
            bench = Bench(device)
        return None if bench is None else AttentionClock(bench)

    @cached_property
    def took_on(self) -> Callable[[str, int], Realised]:
        """(text, length) -> what tells how many ms a config takes there, always the same one."""

        @lru_cache
        def made(text: str, length: int) -> Realised:
            tokens = self.typical(text, length)

            def took(config: CabConfig) -> float:
                spent = self.clock.time(self.model, tokens, config)
                return spent["predict_ms"] + spent["attend_ms"]

            return took

        return made

    @cached_property
    def timed(self) -> dict[tuple, Method]:
        """Cell -> the method whose time is matched: fitted once, as no time is taken twice."""
        return {}

    def recorded(self) -> dict[str, Any]:
        settings, given = self.settings, super().recorded()
        given["variant"] = [
            Path(text).name if text.endswith(YAML) else _without_folder(text)
            for text in settings.variant
        ]
        configs = {name: config.to_dict() for name, config in settings.configs.items()}
        if settings.equal == DENSITY:
            # as it always was
            del given["equal"]
        return {**given, "cab_configs": configs}

    @cached_property
    def arms(self) -> list[tuple[str, str | float | None]]:
        """(method, budget) in the order they are measured."""
        compared, budgets = self.settings.compared, self.settings.budgets
        free = [(name, None) for name in compared if not kind_of(name).matched]
        return free + [
            (name, budget) for budget, name in product(budgets, compared) if kind_of(name).matched
        ]

    def expected(self) -> int:
        questions = sum(len(self.questions(method)) for method, _ in self.arms)
        return len(self.texts) * len(self.settings.lengths) * questions

    def planned(self) -> Iterator[dict[str, Any]]:
        for text, length in product(self.texts, self.settings.lengths):
            # what is matched to a method waits for all that this is asked
            yield from sorted(self._question_by_question(text, length), key=self.waits)

    def _question_by_question(self, text: str, length: int) -> Iterator[dict[str, Any]]:
        """All methods are asked a question before the next: a run that stops has asked them alike.

        So what a question needs of dense attention is computed once, too.
        """
        asked: dict[tuple, list[dict[str, Any]]] = {}
        for method, budget in self.arms:
            cell = dict(zip(CELL, (method, text, length, budget), strict=True))
            for question in self.questions(method):
                case = {**cell, **question}
                asked.setdefault(self.question(case), []).append(case)
        return chain.from_iterable(asked.values())

    def alone(self, case: Mapping[str, Any]) -> bool:
        # one fit by time, which is logged, holds for all cases of a cell
        by_time = self.settings.equal == TIME and self.waits(case)
        return case["probe"] == TIME or by_time

    def waits(self, case: Mapping[str, Any]) -> bool:
        return case["budget"] == MATCH

    def fitted(self, case: Mapping[str, Any], samples: Sequence[Row]) -> float | None:
        self.remember(case, samples)
        if not self.waits(case):
            return case["budget"]
        return self.realised(case["text"], case["length"], samples)

    def remember(self, case: Mapping[str, Any], samples: Sequence[Row]) -> None:
        """What was fitted to a cell by time, where an earlier run did so and logged it."""
        for sample in samples:
            if cell_of(sample) == cell_of(case) and "fitted_config" in sample:
                config = logged_config(sample["fitted_config"])
                self.timed[cell_of(case)] = kind_of(case["method"])(config)

    def realised(self, text: str, length: int, samples: Sequence[Row]) -> float | None:
        """What is to be matched on ``text``: the density in layers that are not dense, or ms."""
        ours = (self.settings.match, text, length, None)
        if self.settings.equal == TIME:
            times = [s for s in samples if cell_of(s) == ours and s["probe"] == TIME]
            return times[0]["predict_ms"] + times[0]["attend_ms"] if times else None
        return realised_density([s for s in self.usual(samples) if cell_of(s) == ours])

    def kind(self, case: Mapping[str, Any]) -> type[Method]:
        """The class of a case's method."""
        return kind_of(case["method"])

    def method(self, case: Mapping[str, Any]) -> Method:
        """Set up for a case; block sizes and engine of baselines are the matched method's."""
        settings, kind = self.settings, self.kind(case)
        config = settings.configs.get(case["method"], settings.configs[settings.match])
        text, length = case["text"], case["length"]
        realised = self.realised_on(text, length)
        layers = layers_of(self.model)
        cell = Cell(config, case["fitted"], length, settings.device, realised, layers)
        if settings.equal == TIME and case["budget"] == MATCH:
            if cell_of(case) not in self.timed:
                cell = replace(cell, took=self.took_on(text, length))
                self.timed[cell_of(case)] = kind.fit(cell)
            return self.timed[cell_of(case)]
        return fitted(kind, cell)

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        new = cell_of(case) not in self.timed
        method = self.method(case)
        logged = {}
        if new and cell_of(case) in self.timed:
            logged["fitted_config"] = method.config.to_dict()
        if case["probe"] != TIME:
            return {**self.probed(case, method), **logged}
        tokens, config = self.typical(case["text"], case["length"]), getattr(method, "config", None)
        with refusing("model"):
            spent = self.clock.time(self.model, tokens, config)
        if cell_of(case) in self.timed:
            logged["match_ms"] = case["fitted"]
        return {"tokens": len(tokens), **spent, **logged}


def cells_of(samples: Sequence[Row]) -> list[list[Row]]:
    """The samples of each cell, by text, length, method and budget."""
    texts, kinds = list(dict.fromkeys(s["text"] for s in samples)), list(METHODS.values())

    def place(cell: Sequence[Row]) -> tuple:
        method, text, length, budget = cell_of(cell[0])
        kind, density = kind_of(method), budget if isinstance(budget, float) else 0.0
        return texts.index(text), length, kinds.index(kind), method != kind.name, density

    return sorted(grouped(samples, *CELL), key=place)


def cell_fields(members: Sequence[Row], usual: Sequence[Row]) -> dict[str, Any]:
    """What a row says of its cell: density, of the ``usual`` samples, and times."""
    densities = [s["density"] for s in usual]
    row = {name: members[0][name] for name in (*CELL, "fitted")}
    row |= {"density": fmean(densities) if densities else None, **_times(members)}
    if never_sparse(kind_of(members[0]["method"]), members):
        row["never_sparse"] = True
    over = _density_over_match(members, usual)
    if over is not None and abs(over - 1) > OFF:
        row["density_over_match"] = over
    return row


def _density_over_match(members: Sequence[Row], usual: Sequence[Row]) -> float | None:
    """What was attended in sparse layers over what was to be; None where no density was matched.

    A cache that keeps some tokens, behind a dense prefill, has no layer that is sparse.
    """
    fitted, by_time = members[0]["fitted"], {"fitted_config", "match_ms"}
    if fitted is None or any(by_time & s.keys() for s in members):
        return None
    if all(s.get("sparse_density") is None for s in usual):
        return None
    return realised_density(usual) / fitted


def _times(members: Sequence[Row]) -> dict[str, Any]:
    """What attention took, and over dense attention; nothing but None where it was not timed."""
    timed = next((s for s in members if s["probe"] == TIME), None)
    if timed is None:
        return dict.fromkeys((*TIMES, "over_dense"))
    over = (timed["predict_ms"] + timed["attend_ms"]) / timed["dense_ms"]
    # results of before it counted have what plain PyTorch took to choose
    more = {name: timed[name] for name in ("predict_reported",) if name in timed}
    if "match_ms" in timed:
        more["over_match"] = (timed["predict_ms"] + timed["attend_ms"]) / timed["match_ms"]
    return {**{name: timed[name] for name in TIMES}, "over_dense": over, **more}


def perplexity(own: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Over all tokens; its ratio is that of the same documents, each counting once."""
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


def ratio_to_dense(result: Row) -> str | None:
    """The ratio with its interval, where there is one."""
    if result.get("ratio") is None:
        return None
    return with_interval(*map(result.get, RATIO), "{:.3f}".format)


def off_readings(rows: Sequence[Row]) -> list[str]:
    """Sentences on the methods whose time, or density, is not the one that they were to match."""
    said = {
        "over_match": f"No budget takes the matched time within {OFF:.0%}",
        "density_over_match": f"The density is not the matched one within {OFF:.0%}",
    }
    result = []
    for field, sentence in said.items():
        off = [row for row in rows if abs(row.get(field, 1.0) - 1) > OFF]
        named = ", ".join(f"{_where(row)} ({row[field]:.2f} ×)" for row in off)
        result += [f"{sentence}: {named}."] * bool(off)
    return result


def _where(row: Row) -> str:
    """A row in a sentence."""
    budget = f" and budget {row['budget']}" if isinstance(row["budget"], float) else ""
    return f"{row['method']} on {plain(row['text'])} at {row['length']} tokens{budget}"


def mark_fewer(rows: Sequence[dict[str, Any]], cells: Sequence[Sequence[Row]]) -> None:
    """Say as ``fewer`` of a row which probes have fewer cases than elsewhere, ``6 of 20``.

    Elsewhere: in other rows of its text and length. The run of such a row was stopped, or went on
    for other methods alone.
    """
    counts = [Counter(s["probe"] for s in cell) for cell in cells]
    most: dict[tuple, int] = {}
    for row, count in zip(rows, counts, strict=True):
        for probe, n in count.items():
            place = row["text"], row["length"], probe
            most[place] = max(most.get(place, 0), n)
    for row, count in zip(rows, counts, strict=True):
        asked = {probe: most[row["text"], row["length"], probe] for probe in count}
        fewer = {probe: f"{count[probe]} of {n}" for probe, n in asked.items() if count[probe] < n}
        if fewer:
            row["fewer"] = fewer


def fewer_readings(rows: Sequence[Row]) -> list[str]:
    """A sentence on the rows that `mark_fewer` has marked."""
    named = ", ".join(
        f"{_where(row)} ({' or '.join(dict.fromkeys(row['fewer'].values()))})"
        for row in rows
        if "fewer" in row
    )
    return [f"Not measured in all the cases that others have: {named}."] * bool(named)


def notes_how(settings: Mapping[str, Any]) -> str:
    """How prompts are read and budgets matched, where that is not the usual way."""
    chunk = settings.get("prefill_chunk")
    how = f"Prompts are read in chunks of {chunk:,} tokens. " if chunk else ""
    if settings.get("equal") == TIME:
        how += (
            "Matched methods have the budget at which attention takes as long as that of "
            f"{settings['match']}, choosing included, within {OFF:.0%} where there is one. "
        )
    return how


def notes_time() -> str:
    """What times are, and what choosing blocks takes where it is not measured."""
    shares = ", ".join(f"{share:.3f} for {name}" for name, share in REPORTED.items() if share)
    favoured = ", ".join(name for name, share in REPORTED.items() if not share)
    return (
        "Attention ms: choosing blocks and "
        "attending them in all layers, by CUDA events, on the q, k and v of one text of the "
        "cell as dense attention has them; × dense: over the fastest dense kernel on the "
        "same. "
        "Behind ~, choosing is not measured, as these methods choose in plain PyTorch here: it "
        f"takes what Xu et al. 2025 report, over dense attention {shares}, and 0 for {favoured}, "
        "whose authors report no share that we know of, or which have nothing to choose by. "
        "Elsewhere it is measured, in older results that of plain PyTorch too. "
    )


def time_said(row: Row) -> str:
    """What attention takes, as the end of half a sentence."""
    over = row.get("over_dense")
    return "" if over is None else f" in {over:.2f} × the time of {row['dense_kernel']}"


def _milliseconds(row: Row) -> str | None:
    """What attention took: ``12.3 (1.20 + 11.1)``, choosing and attending; ~ for reported."""
    if row.get("attend_ms") is None:
        return None
    predict, attend = row["predict_ms"], row["attend_ms"]
    about = "~" if "predict_reported" in row else ""
    return f"{digits(predict + attend)} ({about}{digits(predict)} + {digits(attend)})"


def _over_dense(row: Row) -> str | None:
    over = row.get("over_dense")
    return None if over is None else f"{over:.2f} {row['dense_kernel']}"


def looks_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Method -> how its line looks in all panels; CAB stands before the others."""
    names = dict.fromkeys(row["method"] for row in rows if row["method"] != Dense.name)
    return {
        name: {
            "color": f"C{i % 10}",
            "marker": MARKERS[i % len(MARKERS)],
            "zorder": 3 if kind_of(name) is Cab else 2,
        }
        for i, name in enumerate(names)
    }


def draw_lines(
    axis: Any,
    rows: Sequence[Row],
    share: str,
    result_of: Callable[[Row], Row],
    fields: tuple[str, str, str],
    looks: Mapping[str, Mapping[str, Any]],
) -> None:
    """A line a method over its budgets, with intervals.

    Args:
        share: the field of rows that stands along the axis, of `ACROSS`.
        result_of: what of a row has the ``fields``: a value, and where there are some its edges.
        looks: of methods, see `looks_of`.
    """
    value, low, high = fields
    for own in grouped(rows, "method"):
        own = sorted(own, key=itemgetter(share))
        parts, name = list(map(result_of, own)), own[0]["method"]
        # a single document has no interval
        reach = [
            [abs(each.get(edge, each[value]) - each[value]) for each in parts]
            for edge in (low, high)
        ]
        values = [each[value] for each in parts]
        style = {"label": name, "markersize": 5, "linewidth": 1.2, "elinewidth": 0.6}
        axis.errorbar([row[share] for row in own], values, reach, **style, **looks[name])


def draw_by_name(
    axis: Any,
    rows: Sequence[Row],
    titles: Mapping[str, str],
    looks: Mapping[str, Mapping[str, Any]],
) -> None:
    """Shares with intervals, side by side by name; a marker a row, and dense attention a level.

    Args:
        titles: field of a row that has a ``share``, ``low`` and ``high`` -> what it is called.
        looks: of methods, see `looks_of`.
    """
    marked = [row for row in rows if row["method"] != Dense.name]
    for place, name in enumerate(titles):
        for row in rows:
            share = row.get(name)
            if share is None:
                continue
            if row["method"] == Dense.name:
                edges = place - SPREAD, place + SPREAD
                axis.hlines(share["share"], *edges, "black", "--", label=Dense.name)
                continue
            step = (marked.index(row) + 0.5) / len(marked) - 0.5
            reach = [[abs(share[edge] - share["share"])] for edge in ("low", "high")]
            style = {"label": row["method"], "markersize": 5, "elinewidth": 0.6, "linestyle": ""}
            at = [place + 2 * SPREAD * step]
            axis.errorbar(at, [share["share"]], reach, **style, **looks[row["method"]])
    axis.set_xticks(range(len(titles)), titles.values(), fontsize=8)
    axis.set_xlim(-0.5, len(titles) - 0.5)
    axis.set_ylim(-0.04, 1.04)
    axis.grid(alpha=0.25, axis="y")


def finish_panel(axis: Any, share: str) -> None:
    """Give a panel its label, its grid, and a width that does not exaggerate."""
    left, right = axis.get_xlim()
    # shares that are matched differ by less than means anything
    missing = max(0.0, NARROWEST - (right - left)) / 2
    axis.set_xlim(left - missing, right + missing)
    axis.set_xlabel(ACROSS[share], fontsize=8)
    axis.grid(alpha=0.25)


def draw_legend(axes: Any) -> None:
    """One legend of all panels above them."""
    drawn = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    legend = {"loc": "outside upper center", "ncols": 6, "fontsize": 8}
    axes[0, 0].figure.legend(drawn.values(), drawn, **legend)


MARKERS = "osv^DPX*<>p"
SPREAD = 0.38  # to both sides of the middle of what is side by side, whose middles are 1 apart
NARROWEST = 0.1  # of a share of dense attention, that a panel spans at least
TIMES = ("predict_ms", "attend_ms", "dense_ms", "dense_kernel")
# what stands along a panel
ACROSS = {
    "density": "density",
    "over_dense": "attention time × dense",
    "step_share": "share of the text read a step",
}
# heading -> the field that a row must have for it, and what is shown of a row
TIME_COLUMNS = {
    "attention ms (predict + attend)": ("attend_ms", _milliseconds),
    "× dense": ("attend_ms", _over_dense),
    "× matched time": ("over_match", column(lambda over: f"{over:.2f}", "over_match")),
}
