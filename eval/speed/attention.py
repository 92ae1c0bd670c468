"""``speed attention``: predicting and attending, forward and backward, beside dense kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from cab_hf import engines
from cab_hf.config import CabConfig
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import column, digits, markdown_table, percent
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import TOKENS, UNREACHED_MASS, Speed, grouped, remarks, varying
from cab_hf.eval.speed.checks import CHECK_LENGTH, check_gradients, check_rows, gradients_of
from cab_hf.eval.speed.heads import HeadSettings, described, time_baselines
from cab_hf.eval.speed.rates import DIRECTIONS, counted, rates
from cab_hf.eval.speed.timing import Bench, Timing, in_a_sentence, method_on
from cab_hf.plan import BlockPlan, Spans
from cab_hf.predictors import Call, make_predictor
from cab_hf.runs.settings import by_device, comma_separated, option

UNREACHED = {**UNREACHED_MASS, "min_length": 0}
EVERYTHING = 1.0  # the budget that leaves nothing out
ENGINES_ON_GPU = tuple(name for name in engines.ENGINES if name != "reference")
VARYING = {"head dim": "head_dim", "blocks": "blocks"}  # columns, where rows differ in them
BY_NAME = (  # of an engine or dense kernel
    *("attend_ms", "total_ms", "total_eager_ms", "peak_mib", "labels"),
    *("baselines", "not_measured", "without_graph"),
)
GROUP = ("head_dim", "direction", "blocks", "budget")  # rows of one differ in length alone


@dataclass(frozen=True)
class Settings(HeadSettings):
    """What a run of attention is told."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "length": "lengths",
        "head_dim": "head_dims",
        "direction": "directions",
        "blocks": "blocks",
        "budget": "densities",
    }

    lengths: tuple[int, ...] | None = by_device(
        tuple(2**n for n in range(13, 18)), (256, 512), "tokens", comma_separated(int)
    )
    head_dims: tuple[int, ...] | None = by_device(
        (128,), (32,), "channels of a head", comma_separated(int)
    )
    densities: tuple[float, ...] = option(
        (0.05, 0.1, 0.2, EVERYTHING),
        "max_density of the predictor, which fills it; 1 keeps everything and predicts nothing",
        comma_separated(float),
    )
    blocks: tuple[str, ...] | None = by_device(
        ("128x64",), ("32x16",), "query block x key block", comma_separated(str.lower)
    )
    directions: tuple[str, ...] = option(
        tuple(DIRECTIONS), "forward, backward or both", comma_separated(str)
    )
    engines: tuple[str, ...] | None = by_device(
        ENGINES_ON_GPU, ("reference",), "what attends", comma_separated(str)
    )
    seconds: float = option(0.5, "for timing one case, where it needs less for five", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("directions", DIRECTIONS), ("engines", engines.ENGINES)):
            named = set(getattr(self, name)) <= set(known)
            self.check(name, named, f"out of {', '.join(known)}")
        self.check("head_dims", min(self.head_dims, default=0) > 0, "at least 1 each")
        self.check("seconds", self.seconds >= 0, "0 or more")
        for case in self.asked():
            self.budgeted(case)

    @property
    def method(self) -> str:
        return (
            f"{method_on(self.device, self.seconds)}; forward times are those of a CUDA graph "
            "where one could be made, backward times are of torch.autograd.grad alone, called from "
            "Python on a graph that is kept; predict + attend is one call, not a sum; the peak is "
            "that of such a call over its inputs, its result included; every kernel is compared "
            "with float32 attention before it is timed, an engine on rows of the whole length, "
            f"gradients on {CHECK_LENGTH} tokens"
        )

    @cached_property
    def cab_config(self) -> CabConfig:
        """A mass that no budget reaches, so that every row of blocks fills its own."""
        return self.configured(UNREACHED)

    def budgeted(self, case: Mapping[str, Any]) -> CabConfig:
        """The config that fills the budget of ``case``."""
        sizes = case["blocks"].split("x")
        self.check("blocks", len(sizes) == 2 and all(map(str.isdigit, sizes)), "like 128x64")
        query_block, key_block = map(int, sizes)
        return self.configured(
            UNREACHED, max_density=case["budget"], query_block=query_block, key_block=key_block
        )

    def planner(self, case: Mapping[str, Any]) -> Callable[[Tensor, Tensor, Spans], BlockPlan]:
        """(q, k, spans) -> the plan of ``case``."""
        config = self.budgeted(case)
        if case["budget"] == EVERYTHING:
            return lambda q, k, spans: BlockPlan.causal(
                spans, q.shape[1], config.query_block, config.key_block
            )
        predict = make_predictor(config)
        return lambda q, k, spans: predict(q, k, Call(spans, q.shape[-1] ** -0.5))


class Attention(Speed):
    """A case is one length, head dim, direction, size of blocks and budget."""

    name = "speed attention"
    purpose = "time predicting and attending, forward and backward, beside dense kernels"
    title = "Speed of attention"
    caption = "time and rate of attention by length"
    Settings = Settings
    CASE = tuple(Settings.KEYS)
    GROWS = (*Settings.KEYS.values(), "config")

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        settings, bench = self.settings, self.bench
        sample = {
            "op": "attention",
            **case,
            **{name: getattr(settings, name) for name in ("batch", "heads", "kv_heads", "dtype")},
            **dict.fromkeys(("density", "attended_pairs", "listed_pairs", "predict_ms", "error")),
            **{name: {} for name in BY_NAME},
        }
        try:
            _time_engines(sample, settings, bench)
        except torch.OutOfMemoryError as error:
            sample["error"] = in_a_sentence(error)
        bench.settle()
        if case["length"] <= settings.dense_up_to:
            heads = (case["length"], case["head_dim"], case["direction"])
            measured = _time_dense(settings, *heads, bench)
            sample["baselines"] = measured.times
            sample["not_measured"] |= measured.not_measured
            sample["without_graph"] |= measured.without_graph
            bench.settle()
        return sample

    # --- reporting

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """In the order of `GROUP` and length, each with its fastest engine, dense attention, rates.

        ``ms`` is that of the fastest engine, predicting included where there is anything to
        predict; ``ratio`` is over the fastest dense kernel, measured at its length or extrapolated.
        Rates are TFLOP/s: of listed blocks for engines (and of attended pairs alone,
        ``tflops_pairs``), of the causal half for dense kernels. ``rate_ratio`` is over
        `RATED_AGAINST`, or the fastest.
        """

        def order(row: Row) -> tuple[Any, ...]:
            direction = list(DIRECTIONS).index(row["direction"])
            return row["head_dim"], direction, row["blocks"], row["budget"], row["length"]

        rows = [dict(sample) for sample in sorted(samples, key=order)]
        for alike in grouped(rows, "head_dim", "direction"):
            for row in alike:
                times = _times(row)
                row["engine"] = min(times, key=times.__getitem__, default=None)
                row["ms"] = times.get(row["engine"])
                row |= dense.compared(row, alike, preferred=()) | rates(row, alike)
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """What the longest input of every group takes, then every engine and dense kernel."""
        which = varying(rows, VARYING) | TOKENS
        longest = {"direction": "direction"} | which | LONGEST
        made = {"At the longest length": markdown_table(_longest(rows), longest)}
        for some in grouped(rows, "direction"):
            made |= _direction_tables(some, which)
        kinds = {
            "error": "not measured",
            "without_graph": "no CUDA graph, so its time is eager",
            "not_measured": "not measured",
        }
        by = {"direction": "direction"} | varying(rows, {"head dim": "head_dim"})
        return made | remarks(rows, kinds, by)

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Of each direction, what the smallest budget brings at the longest input."""
        told = []
        for some in grouped([row for row in rows if row["ratio"] is not None], "direction"):
            row = min(some, key=lambda row: (row["budget"], -row["length"], row["ratio"]))
            alike = [each for each in some if all(each[name] == row[name] for name in GROUP)]
            predicting = ", predicting included" if _predicts(row) else ""
            named = "".join(f"{h} {row[field]}, " for h, field in varying(rows, VARYING).items())
            told.append(
                f"{row['direction'].capitalize()}, {named}{row['engine']} attends "
                f"{percent(row['density'])} of the pairs of {row['length']:,} tokens in "
                f"{percent(row['ratio'])} of {row['baseline']}'s time"
                f"{' (extrapolated)' * row['extrapolated']}{predicting}, and is faster "
                f"{dense.break_even_shown(alike)}."
            )
        return told

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return (
            f"{described(settings)} A budget is max_density, density what came of it, attended "
            "over causal pairs. ms: predicting included. TFLOP/s, predicting left out, count four "
            "operations a pair and channel forward and ten backward: of blocks, every pair of a "
            "listed block, masked or not; of pairs, those attended; of dense kernels, half of all. "
            "Rate over: that of blocks over FA3's forward or FA4's backward, else over the fastest "
            "dense kernel's. Efficient attention gets k and v repeated before the clock starts."
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Time and rate by length: two panels for every direction, head dim and size of blocks."""
        panels = grouped(rows, "head_dim", "blocks", "direction")
        # one grey a kernel, in every panel
        greys = dict(zip(_names(rows, "baselines"), charts.GREYS, strict=False))
        with charts.figure(path, len(panels), 2, figsize=(12, 4.8 * len(panels))) as axes:
            for (left, right), some in zip(axes, panels, strict=True):
                first, lengths = some[0], [row["length"] for row in some]
                _draw_lines(left, some, greys, _time_of)
                _draw_lines(right, some, greys, lambda name, row: row["tflops"].get(name))
                predicted = " (predicting included)" if first["direction"] == "forward" else ""
                named = f"{first['direction']}, head dim {first['head_dim']}, {first['blocks']}"
                left.set_title(f"{named}: time{predicted}", fontsize=10)
                right.set_title("rate of attending: listed blocks, dense half", fontsize=10)
                left.set_ylabel("ms")
                right.set_ylabel("TFLOP/s")
                charts.over_tokens(left, lengths)
                charts.over_tokens(right, lengths, log=False, legend=False)


EXPERIMENT = Attention


# --- measuring


@lru_cache(maxsize=1)
def _time_dense(
    settings: Settings, length: int, head_dim: int, direction: str, bench: Bench
) -> dense.Measured:
    """Measured once for all the blocks and budgets that are compared with it."""
    return time_baselines(settings, length, head_dim, bench, direction == "backward")


@torch.no_grad()
def _time_engines(sample: dict[str, Any], settings: Settings, bench: Bench) -> None:
    """Write into ``sample`` what predicting and every engine takes, or why it was not measured."""
    length, head_dim = sample["length"], sample["head_dim"]
    heads = settings.random_heads(length, head_dim, bench.device, "qkv")
    spans = Spans.causal(settings.batch, length, length, bench.device)
    planner = settings.planner(sample)
    decide = partial(planner, *heads[:2], spans)
    plan = decide()
    sample |= counted(plan, settings.heads)
    if _predicts(sample):
        sample["predict_ms"] = _time(sample, "predicting", decide, bench).ms
    work = engines.Workload(
        device=bench.device.type,
        head_dim=head_dim,
        dtype=settings.torch_dtype,
        training=sample["direction"] == "backward",
        query_block=plan.query_block,
        key_block=plan.key_block,
    )
    for name in settings.engines:
        bench.settle()
        try:
            engine = engines.choose(name, work)
            check_rows(engine.attention, *heads, plan)
            if work.training:
                check_gradients(engine.attention, *heads, planner)
                _time_backward(sample, name, engine.attention, (*heads, plan), bench)
            else:
                _time_forward(sample, name, partial(engine.attention, *heads), decide, plan, bench)
        except Exception as error:
            # an engine that refuses or is wrong is told of and not measured
            sample["not_measured"][name] = in_a_sentence(error)
        else:
            sample["labels"][name] = engine.label(work)


def _time(sample: dict[str, Any], what: str, call: Callable[[], Any], bench: Bench) -> Timing:
    timing = bench.time(call)
    if timing.why_not:
        sample["without_graph"][what] = timing.why_not
    return timing


def _time_forward(
    sample: dict[str, Any],
    name: str,
    attend: Callable[[BlockPlan, float], Tensor],
    decide: Callable[[], BlockPlan],
    plan: BlockPlan,
    bench: Bench,
) -> None:
    scale = sample["head_dim"] ** -0.5
    sample["attend_ms"][name] = _time(sample, name, lambda: attend(plan, scale), bench).ms
    if _predicts(sample):
        timing = _time(sample, f"predicting and {name}", lambda: attend(decide(), scale), bench)
        sample["total_ms"][name], sample["total_eager_ms"][name] = timing.ms, timing.eager
        sample["peak_mib"][name] = bench.peak(lambda: attend(decide(), scale))[1]


def _time_backward(
    sample: dict[str, Any],
    name: str,
    attend: Callable[..., Tensor],
    known: tuple[Any, ...],
    bench: Bench,
) -> None:
    backward = gradients_of(attend, *known, sample["head_dim"] ** -0.5)
    sample["attend_ms"][name] = bench.time(backward, graph=False).ms
    sample["peak_mib"][name] = bench.peak(backward)[1]


def _predicts(row: Row) -> bool:
    """Whether predicting is part of what the row times."""
    return row["direction"] == "forward" and row["budget"] != EVERYTHING


def _times(row: Row) -> Mapping[str, float]:
    """ms by engine, predicting included where there is anything to predict."""
    return row["total_ms" if _predicts(row) else "attend_ms"]


# --- reporting


def _longest(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of every group the longest row that is compared, with the break-even of the group."""
    longest = []
    for alike in grouped(rows, *GROUP):
        compared = [row for row in alike if row["ratio"] is not None]
        last = (compared or alike)[-1]
        longest.append({**last, "break_even": dense.break_even_shown(compared)})
    return longest


def _names(rows: Sequence[Row], field: str) -> list[str]:
    """The names in ``field`` of any row, each once."""
    return list(dict.fromkeys(name for row in rows for name in row[field]))


def _budget(row: Row) -> str:
    return "all" if row["budget"] == EVERYTHING else f"{row['budget']:g}"


def _of(field: str) -> Callable[[Row], str | None]:
    """What the engine of the row has in ``field``."""
    return lambda row: digits((row[field] or {}).get(row["engine"]))


def _of_dense(row: Row) -> str | None:
    ms = _times(row).get(row["engine"])
    return None if None in (ms, row["baseline_ms"]) else percent(ms / row["baseline_ms"])


def _rate_over(row: Row) -> str | None:
    ratio = (row["rate_ratio"] or {}).get(row["engine"])
    return None if ratio is None else f"{ratio:.2f} {row['rated_against']}"


def _dense(name: str, row: Row) -> str | None:
    """``2.61 (628)``: ms and TFLOP/s of a dense kernel."""
    if name not in row["baselines"]:
        return None
    return f"{digits(row['baselines'][name])} ({digits(row['tflops'][name])})"


BUDGET = {"budget": _budget, "density": column("{:.3f}".format, "density")}
# of a row
LONGEST = {
    **BUDGET,
    "engine": "engine",
    "ms": column(digits, "ms"),
    "dense ms": dense.time_shown,
    "of dense": column(percent, "ratio"),
    "TFLOP/s of blocks": _of("tflops"),
    "of pairs": _of("tflops_pairs"),
    "rate over": _rate_over,
    "faster than dense": "break_even",
}
# of a row and each of its engines
ENGINES = {
    **BUDGET,
    "engine": lambda row: row["labels"].get(row["engine"], row["engine"]),
    "predict ms": column(digits, "predict_ms"),
    "attend ms": _of("attend_ms"),
    "predict + attend ms": _of("total_ms"),
    "from Python ms": _of("total_eager_ms"),
    "of dense": _of_dense,
    "TFLOP/s of blocks": _of("tflops"),
    "of pairs": _of("tflops_pairs"),
    "rate over": _rate_over,
    "peak MiB": _of("peak_mib"),
}
FORWARD_ONLY = ("predict ms", "predict + attend ms", "from Python ms")


def _direction_tables(rows: Sequence[Row], which: Mapping[str, Any]) -> dict[str, str]:
    """Every engine of every row and every dense kernel; ``rows`` are of one direction."""
    direction = rows[0]["direction"]
    hidden = () if direction == "forward" else FORWARD_ONLY
    columns = which | {heading: get for heading, get in ENGINES.items() if heading not in hidden}
    by_engine = [{**row, "engine": name} for row in rows for name in row["attend_ms"]]
    once = [alike[0] for alike in grouped(rows, "head_dim", "length")]
    kernels = {f"{n} ms (TFLOP/s)": partial(_dense, n) for n in _names(rows, "baselines")}
    which = varying(once, {"head dim": "head_dim"}) | TOKENS
    return {
        f"Attending, {direction}": markdown_table(by_engine, columns),
        f"Dense causal attention, {direction}": markdown_table(once, which | kernels),
    }


def _time_of(name: str, row: Row) -> float | None:
    return row["total_ms"].get(name, row["attend_ms"].get(name, row["baselines"].get(name)))


def _draw_lines(
    axis: Any,
    rows: Sequence[Row],
    greys: Mapping[str, str],
    value: Callable[[str, Row], float | None],
) -> None:
    names = _names(rows, "attend_ms")
    for colour, alike in enumerate(grouped(rows, "budget")):
        for name, style in zip(names, ("-", "--", ":"), strict=False):
            label = f"{name}, {_budget(alike[0])}"
            look = {"color": f"C{colour}", "linestyle": style, "label": label}
            charts.line(axis, alike, partial(value, name), **look)
    once = [alike[0] for alike in grouped(rows, "length")]
    for name, grey in greys.items():
        look = {"color": grey, "linewidth": 1.2, "marker": "s", "label": f"{name} dense"}
        charts.line(axis, once, partial(value, name), **look)
