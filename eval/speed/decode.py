"""``speed decode``: a step that reads a part of the cache, in one layer and in a whole model."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from cab_hf.config import CabConfig
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import column, digits, grouped, markdown_table, percent
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import TOKENS, Speed, by_length, listed, made_of, remarks
from cab_hf.eval.speed.heads import INPUTS, RandomHeads, inputs_option
from cab_hf.eval.speed.model import SDPA, ModelShape, shape_of
from cab_hf.eval.speed.one_query import (
    CAB,
    DENSE,
    bandwidth,
    random_step,
    time_cab,
    time_dense,
)
from cab_hf.eval.speed.steps import MODES, WARM_UP_STEPS, time_steps
from cab_hf.eval.speed.timing import Bench, bench_on, method_on
from cab_hf.runs.settings import comma_separated, option, parse_length

ATTENTION, MODEL = "attention", "model"
PARTS = (ATTENTION, MODEL)  # the cheap one first
OF_CAB = ("index", "choose", "attend")  # what a step of it consists of


def parse_budget(text: str) -> int | float:
    """``decode_tokens``: a number of tokens, such as 4096 or 4k, or a share of the text."""
    return float(text) if "." in text else parse_length(text)


@dataclass(frozen=True)
class Settings(RandomHeads, ModelShape):
    """What a run of decode steps is told."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"min_length": 0, "sparse_decode": True}
    POSITIVE = (*ModelShape.POSITIVE, "steps")

    lengths: tuple[int, ...] | None = listed((32_768, 131_072), (1024,), "tokens", parse_length)
    batches: tuple[int, ...] | None = listed((1, 4, 8), (1, 2), "batch sizes", int)
    budgets: tuple[int | float, ...] | None = listed(
        (4096,), (128,), "decode_tokens, a number of tokens or a share", parse_budget
    )
    parts: tuple[str, ...] = option(
        PARTS, "attention of one layer, steps of the whole model, or both", comma_separated(str)
    )
    kernels: tuple[str, ...] = option(
        tuple(DENSE), "dense kernels to compare with", comma_separated(str)
    )
    modes: tuple[str, ...] = option(tuple(MODES), "how the model is run", comma_separated(str))
    steps: int | None = option(32, "timed steps of the model", int)
    inputs: str = inputs_option()
    seconds: float = option(0.5, "seconds of timing one call, or what five take", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("parts", PARTS), ("kernels", DENSE), ("modes", MODES)):
            given = getattr(self, name)
            self.check(name, set(given) <= set(known), f"out of {', '.join(known)}")
        self.check("parts", self.parts, f"out of {', '.join(PARTS)}")
        self.check("batches", min(self.batches, default=0) > 0, "numbers from 1 up")
        self.check("seconds", self.seconds >= 0, "0 or more")
        self.check_inputs()
        for budget in self.budgets:
            self.budgeted(budget)

    @property
    def method(self) -> str:
        clock = method_on(self.device, self.seconds, clean=True)
        return (
            f"attention: {clock}; ms is the replay of a CUDA graph "
            "where one could be made, eager ms the same call made from Python; every kernel is "
            "compared with float32 attention before it is timed, cab with that over its choice; of "
            "several ways to call a kernel the fastest counts. Model: median of "
            f"{self.steps} steps by time.perf_counter, each until the device is done, after "
            f"{WARM_UP_STEPS} that warm up; every step writes its token into the cache, which "
            "random keys and values fill up to the length; the peak is all that was allocated, "
            "warm-up included"
        )

    def budgeted(self, budget: float) -> CabConfig:
        """The config of cab with that budget."""
        return self.configured(decode_tokens=budget)

    def asked(self) -> list[dict[str, Any]]:
        sparse = [(CAB, budget) for budget in self.budgets]
        attention = [(name, None) for name in self.kernels] + sparse
        ways = {
            ATTENTION: [{"way": name, "mode": None, "budget": keys} for name, keys in attention],
            MODEL: [
                {"way": name, "mode": mode, "budget": keys}
                for mode in self.modes
                for name, keys in ((SDPA, None), *sparse)
            ],
        }
        # the cheap part first, and the cheap cases of each
        parts = [part for part in PARTS if part in self.parts]
        places = itertools.product(parts, self.lengths, self.batches)
        return [
            {"part": part, "length": length, "batch": batch, **way}
            for part, length, batch in places
            for way in ways[part]
        ]


class Decode(Speed):
    """A case is one way to attend one layer's cache, or to run a model, by length and batch."""

    name = "speed decode"
    purpose = "time decode steps that read a part of the cache, beside dense ones"
    title = "Speed of decoding"
    caption = "time of a step by length"
    Settings = Settings
    CASE = ("part", "length", "batch", "way", "mode", "budget")
    GROWS = (*Speed.GROWS, "parts", "batches", "budgets", "kernels", "modes")

    SHAPE = ("heads", "kv_heads", "head_dim", "layers", "dtype")
    FOUND = (
        *("ms", "eager_ms", *(f"{part}_ms" for part in OF_CAB), "bytes", "bandwidth"),
        *("kept", "mass", "full_error", "tokens_s", "least_ms", "most_ms", "first_s"),
        *("peak_gib", "cache_gib", "index_gib", "ran_as", "without_graph"),
    )
    REPORTED_ERRORS = Exception  # a kernel that is missing, refuses, is wrong or does not fit

    @cached_property
    def bench(self) -> Bench:
        return bench_on(self.settings.device, self.settings.seconds, clean=True)

    def find(self, sample: dict[str, Any]) -> None:
        if sample["part"] == ATTENTION:
            self.find_attention(sample)
        else:
            random_step.cache_clear()
            self.find_model(sample)

    def find_attention(self, sample: dict[str, Any]) -> None:
        settings, bench = self.settings, self.bench
        length, budget = sample["length"], sample["budget"]
        sample["bandwidth"] = bandwidth(bench)
        place = length, sample["batch"], settings.head_dim, bench.device
        step = random_step(settings, *place)
        if budget is None:
            timing, sample["ran_as"] = time_dense(step, sample["way"], bench)
            keys = sample["batch"] * settings.kv_heads * length
            sample |= {"kept": length, "mass": 1.0, "bytes": keys * step.bytes_a_key}
        else:
            found = time_cab(step, tokens_of(budget, length), bench)
            timing = found.pop("timing")
            sample |= {f"{part}_ms": found.pop(part).ms for part in OF_CAB} | found
        sample |= {"ms": timing.ms, "eager_ms": timing.eager, "without_graph": timing.why_not}

    def find_model(self, sample: dict[str, Any]) -> None:
        settings, budget, batch = self.settings, sample["budget"], sample["batch"]
        config = None if budget is None else settings.budgeted(budget)
        place = sample["length"], batch, sample["mode"]
        found = time_steps(settings, self.bench, *place, config, settings.steps)._asdict()
        times = found.pop("times")
        ms = statistics.median(times)
        sample |= {"ms": ms, "least_ms": min(times), "most_ms": max(times), **found}
        sample["tokens_s"] = batch / ms * 1e3

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Attention before the model, by length and batch, cab beside the fastest dense way.

        ``over_best`` says how many times faster a row is than that, ``over_same`` than sdpa in the
        same mode. ``gb_s`` is what is read a second, ``of_bandwidth`` its share of what a copy
        moves.
        """
        compared = ("baseline", "baseline_ms", "over_best", "over_same")
        rows = by_length(samples, (*compared, "gb_s", "of_bandwidth"))
        rows.sort(key=lambda row: (PARTS.index(row["part"]), row["length"], row["batch"]))
        for alike in grouped(rows, "part", "length", "batch"):
            timed = [row for row in alike if row["ms"] is not None]
            others = {_way(row): row["ms"] for row in timed if row["budget"] is None}
            best = dense.against(others, preferred=())
            for row in timed:
                if row["bytes"]:
                    row["gb_s"] = row["bytes"] / row["ms"] / 1e6
                    row["of_bandwidth"] = row["gb_s"] / row["bandwidth"]
                if row["budget"] is None or best is None:
                    continue
                row |= {"baseline": best, "baseline_ms": others[best]}
                row["over_best"] = others[best] / row["ms"]
                same = others.get(_way({**row, "way": SDPA}))
                row["over_same"] = same and same / row["ms"]
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """Sparse steps beside dense ones, then every way to attend and to run the model."""
        attention, model = (_of(rows, part) for part in PARTS)
        made = {"Beside dense": markdown_table(_beside(rows), PLACE | BESIDE)}
        if attention:
            made["Attention of one step"] = markdown_table(attention, PLACE | OF_ATTENTION)
        if model:
            made["Steps of the model"] = markdown_table(model, PLACE | OF_MODEL)
        by = {"part": "part", "texts": "batch", "way": "way", "run": "mode", "keys": "budget"}
        # None is a dash in tables, and here too
        shown = [
            {**row, "mode": row["mode"] or "–", "budget": row["budget"] or "all"} for row in rows
        ]
        return made | remarks(shown, by)

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        modes = "; ".join(f"{mode}: {what}" for mode, what in MODES.items())
        return (
            f"{made_of(shape_of(settings), settings)}\n\nAttention is that of one layer of this "
            f"model; its inputs are {INPUTS[settings['inputs']]}. All kernels read the cache as "
            "transformers lays it out; transformers is what its sdpa calls over a static cache, "
            "with a mask of the slots. cab: the new key is written into the index, keys are "
            "chosen, the chosen ones attended; the parts are timed apart as well, so that they do "
            "not sum up. GB: K and V once for dense ways, whatever copies they make; for cab its "
            "index, and K and V of the keys that are read. Of bandwidth: GB/s over that at which a "
            "large tensor is summed in the same run. Mass: the share of attention on the chosen "
            "keys. Error: relative, of cab where "
            "everything is chosen, against float32 attention.\n\nThe model attends by "
            "transformers' sdpa or by cab, here whatever min_length says, though never below four "
            f"times decode_tokens. {modes}. Slowest: the slowest step over the median; first: "
            "seconds of the first step, compiling included."
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """ms of attention and tokens/s of the model by length, a row of panels a batch."""
        batches = grouped(rows, "batch")
        titles = {ATTENTION: ("attention of one step", "ms"), MODEL: ("decoding", "tokens/s")}
        titles = {part: text for part, text in titles.items() if _of(rows, part)}
        size = (5.5 * len(titles), 4.6 * len(batches))
        with charts.figure(path, len(batches), len(titles), figsize=size) as axes:
            for panels, some in zip(axes, batches, strict=True):
                for axis, (part, (title, unit)) in zip(panels, titles.items(), strict=True):
                    _draw_ways(axis, _of(some, part), "ms" if part == ATTENTION else "tokens_s")
                    lengths = [row["length"] for row in some]
                    title = f"{title}, batch {some[0]['batch']}"
                    charts.over_tokens(axis, lengths, title, unit, log=part == ATTENTION)


EXPERIMENT = Decode


def tokens_of(budget: float, length: int) -> int:
    """The keys that a budget of `decode_tokens` stands for."""
    return budget if isinstance(budget, int) else round(budget * length)


def _of(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def _way(row: Row) -> str:
    """``FA3``, or ``sdpa compiled``."""
    return " ".join(filter(None, (row["way"], row["mode"])))


def _beside(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each length, batch and budget: cab's attention, and its model in the first mode.

    The first mode that was run, which is `COMPILED` unless it failed.
    """
    lines = []
    sparse = [row for row in rows if row["budget"] is not None and row["ms"] is not None]
    for alike in sorted(grouped(sparse, "length", "batch", "budget"), key=_place):
        model = _of(alike, MODEL)
        model.sort(key=lambda row: list(MODES).index(row["mode"]))
        both = {ATTENTION: _of(alike, ATTENTION)[:1], MODEL: model[:1]}
        line = {name: alike[0][name] for name in ("length", "batch", "budget")}
        lines.append(line | {part: row[0] for part, row in both.items() if row})
    return lines


def _place(alike: Sequence[Row]) -> tuple[int, int]:
    return alike[0]["length"], alike[0]["batch"]


def _best(row: Row | None) -> str | None:
    return row and row["baseline"] and f"{digits(row['baseline_ms'])} {row['baseline']}"


def _draw_ways(axis: Any, rows: Sequence[Row], field: str) -> None:
    for alike in grouped(rows, "way", "mode", "budget"):
        first = alike[0]
        keys = "" if first["budget"] is None else f", {first['budget']} keys"
        charts.line(axis, alike, itemgetter(field), label=f"{_way(first)}{keys}")


TIMES = "{:.2f}×".format
COUNT = "{:,.0f}".format
PLACE = {**TOKENS, "texts": "batch"}
BUDGET = {"keys": lambda row: "all" if row["budget"] is None else str(row["budget"])}
BESIDE = {
    **BUDGET,
    "attention ms": column(digits, ATTENTION, "ms"),
    "best dense ms": lambda row: _best(row.get(ATTENTION)),
    "attention": column(TIMES, ATTENTION, "over_best"),
    "model": column(str, MODEL, "mode"),
    "tokens/s": column(digits, MODEL, "tokens_s"),
    "over sdpa in this mode": column(TIMES, MODEL, "over_same"),
    "over sdpa in its best": column(TIMES, MODEL, "over_best"),
}
OF_ATTENTION = {
    "way": "way",
    **BUDGET,
    "ms": column(digits, "ms"),
    "eager ms": column(digits, "eager_ms"),
    **{f"{part} ms": column(digits, f"{part}_ms") for part in OF_CAB},
    "GB": column(lambda count: digits(count / 1e9), "bytes"),
    "GB/s": column(digits, "gb_s"),
    "of bandwidth": column(percent, "of_bandwidth"),
    "over best dense": column(TIMES, "over_best"),
    "keys read": column(COUNT, "kept"),
    "mass": column("{:.3f}".format, "mass"),
    "error": column("{:.1e}".format, "full_error"),
}
OF_MODEL = {
    "way": "way",
    "run": "mode",
    **BUDGET,
    "ms a step": column(digits, "ms"),
    "slowest": lambda row: row["ms"] and TIMES(row["most_ms"] / row["ms"]),
    "tokens/s": column(digits, "tokens_s"),
    "over sdpa alike": column(TIMES, "over_same"),
    "over best sdpa": column(TIMES, "over_best"),
    "first s": column(digits, "first_s"),
    "peak GiB": column(digits, "peak_gib"),
    "cache GiB": column(digits, "cache_gib"),
    "index GiB": column(digits, "index_gib"),
}
