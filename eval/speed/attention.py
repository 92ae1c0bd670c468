"""``speed attention``: predicting and attending, forward and backward, beside dense kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from cab_hf import engines
from cab_hf.config import CabConfig
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import column, digits, grouped, markdown_table, percent
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import KEEPS_ALL, TOKENS, listed, remarks, varying
from cab_hf.eval.speed.checks import CHECK_LENGTH, check_gradients, check_rows, gradients_of
from cab_hf.eval.speed.heads import HeadSettings, HeadSpeed, call_of, described, draw_dense, names
from cab_hf.eval.speed.timing import in_a_sentence, method_on
from cab_hf.plan import BlockPlan, Spans
from cab_hf.predictors import make_predictor
from cab_hf.runs.settings import comma_separated, option

# direction -> its floating-point operations over those of the forward pass: five products, not two
DIRECTIONS = {"forward": 1.0, "backward": 2.5}
# whose rate an engine's is held against: the fastest dense kernels known
RATED_AGAINST = {"forward": ("FA3",), "backward": ("FA4",)}
EVERYTHING = 1.0  # the budget that leaves nothing out
ENGINES_ON_GPU = ("flex", "triton")
VARYING = {"head dim": "head_dim", "blocks": "blocks"}  # columns, where rows differ in them
OF_ENGINES = ("attend_ms", "total_ms", "total_eager_ms", "peak_mib", "labels")
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
    DEFAULTS = {**KEEPS_ALL, "min_length": 0}

    head_dims: tuple[int, ...] | None = listed((128,), (32,), "channels of a head", int)
    densities: tuple[float, ...] = option(
        (0.05, 0.1, 0.2, EVERYTHING),
        "max_density of the predictor, which fills it; 1 keeps everything and predicts nothing",
        comma_separated(float),
    )
    blocks: tuple[str, ...] | None = listed(
        ("128x64",), ("32x16",), "query block x key block", str.lower
    )
    directions: tuple[str, ...] = option(
        tuple(DIRECTIONS), "forward, backward or both", comma_separated(str)
    )
    engines: tuple[str, ...] | None = listed(ENGINES_ON_GPU, ("reference",), "what attends")
    seconds: float = option(0.5, "seconds of timing one case, or what five runs take", float)

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

    def budgeted(self, case: Mapping[str, Any]) -> CabConfig:
        """The config that fills the budget of ``case``."""
        sizes = case["blocks"].split("x")
        self.check("blocks", len(sizes) == 2 and all(map(str.isdigit, sizes)), "like 128x64")
        query_block, key_block = map(int, sizes)
        return self.configured(
            max_density=case["budget"], query_block=query_block, key_block=key_block
        )

    def planner(self, case: Mapping[str, Any]) -> Callable[[Tensor, Tensor, Spans], BlockPlan]:
        """(q, k, spans) -> the plan of ``case``."""
        config = self.budgeted(case)
        if case["budget"] == EVERYTHING:
            return lambda q, k, spans: BlockPlan.causal(
                spans, q.shape[1], config.query_block, config.key_block
            )
        predict = make_predictor(config)
        return lambda q, k, spans: predict(q, k, call_of(config, spans, q.shape[-1]))


class Attention(HeadSpeed):
    """A case is one length, head dim, direction, size of blocks and budget."""

    name = "speed attention"
    purpose = "time predicting and attending, forward and backward, beside dense kernels"
    title = "Speed of attention"
    caption = "time and rate of attention by length"
    Settings = Settings
    CASE = tuple(Settings.KEYS)
    GROWS = (*Settings.KEYS.values(), "cab")

    FOUND = ("density", "attended_pairs", "listed_pairs", "predict_ms")
    BY_NAME = (*OF_ENGINES, *HeadSpeed.BY_NAME)

    @torch.no_grad()
    def find(self, sample: dict[str, Any]) -> None:
        settings, bench = self.settings, self.bench
        length, head_dim = sample["length"], sample["head_dim"]
        heads = settings.random_heads(length, head_dim, bench.device, "qkv")
        spans = Spans.causal(settings.batch, length, length, bench.device)
        planner = settings.planner(sample)
        decide = partial(planner, *heads[:2], spans)
        plan = decide()
        sample |= counted(plan, settings.heads)
        if _predicts(sample):
            sample["predict_ms"] = self.time(sample, "predicting", decide).ms
        like = bench.device.type, head_dim, settings.torch_dtype, sample["direction"] == "backward"
        work = engines.Workload(*like, plan.query_block, plan.key_block)
        for name in settings.engines:
            bench.settle()
            try:
                engine = engines.choose(name, work)
                check_rows(engine.attention, *heads, plan)
                if work.training:
                    check_gradients(engine.attention, *heads, planner)
                self.time_engine(sample, name, partial(engine.attention, *heads), decide, plan)
            except Exception as error:
                # an engine that refuses or is wrong is told of and not measured
                sample["not_measured"][name] = in_a_sentence(error)
            else:
                sample["labels"][name] = engine.label(work)

    def time_engine(
        self,
        sample: dict[str, Any],
        name: str,
        attend: partial[Tensor],
        decide: Callable[[], BlockPlan],
        plan: BlockPlan,
    ) -> None:
        """Write into ``sample`` what attending takes, and together with predicting.

        ``attend`` is an engine's function of q, k and v, called with a plan and a scale.
        """
        scale = sample["head_dim"] ** -0.5
        if sample["direction"] == "backward":
            complete = gradients_of(attend.func, *attend.args, plan, scale)
            sample["attend_ms"][name] = self.bench.time(complete, graph=False).ms
        else:
            sample["attend_ms"][name] = self.time(sample, name, lambda: attend(plan, scale)).ms
            if not _predicts(sample):
                return

            def complete() -> Tensor:
                return attend(decide(), scale)

            timing = self.time(sample, f"predicting and {name}", complete)
            sample["total_ms"][name], sample["total_eager_ms"][name] = timing.ms, timing.eager
        sample["peak_mib"][name] = self.bench.peak(complete)[1]

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """In the order of `GROUP` and length, each with its fastest engine, dense attention, rates.

        ``ms`` is that of the fastest engine, predicting included where there is anything to
        predict; ``ratio`` is over the fastest dense kernel, measured at its length or extrapolated.
        Rates are TFLOP/s: of listed blocks for engines (and of attended pairs alone,
        ``tflops_pairs``), of the causal half for dense kernels. ``rate_ratio`` is over
        `RATED_AGAINST`, or the fastest.
        """
        ways = list(DIRECTIONS)
        order = itemgetter("blocks", "budget", "length")
        rows = sorted(
            map(dict, samples),
            key=lambda row: (row["head_dim"], ways.index(row["direction"]), *order(row)),
        )
        for alike in grouped(rows, "head_dim", "direction"):
            for row in alike:
                times = row["total_ms" if _predicts(row) else "attend_ms"]
                row["engine"] = min(times, key=times.__getitem__, default=None)
                row["ms"] = times.get(row["engine"])
                row |= dense.compared(row, alike, preferred=()) | rates(row, alike)
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """What the longest input of every group takes, then every engine and dense kernel."""
        by = {"direction": "direction"} | varying(rows, {"head dim": "head_dim"})
        which = {"direction": "direction"} | varying(rows, VARYING) | TOKENS
        by_engine = [_of_engine(row, name) for row in rows for name in row["attend_ms"]]
        once = [alike[0] for alike in grouped(rows, "head_dim", "direction", "length")]
        kernels = {name: partial(_dense, name) for name in names(rows)}
        return {
            "At the longest length": markdown_table(_longest(rows), which | COLUMNS | LONGEST),
            "Attending": markdown_table(by_engine, which | COLUMNS | ENGINES),
            "Dense causal attention, ms (TFLOP/s)": markdown_table(once, by | TOKENS | kernels),
            **remarks(rows, by),
        }

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Of each direction, what the smallest budget brings at the longest input."""
        parts = []
        for some in grouped([row for row in rows if row["ratio"] is not None], "direction"):
            row = min(some, key=lambda row: (row["budget"], -row["length"], row["ratio"]))
            alike = [each for each in some if all(each[name] == row[name] for name in GROUP)]
            predicting = ", predicting included" if _predicts(row) else ""
            named = "".join(f"{h} {row[field]}, " for h, field in varying(rows, VARYING).items())
            parts.append(
                f"{row['direction'].capitalize()}, {named}{row['engine']} attends "
                f"{percent(row['density'])} of the pairs of {row['length']:,} tokens in "
                f"{percent(row['ratio'])} of {row['baseline']}'s time"
                f"{' (extrapolated)' * row['extrapolated']}{predicting}, and is faster "
                f"{dense.break_even_shown(alike)}."
            )
        return parts

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
        kernels = names(rows)
        with charts.figure(path, len(panels), 2, figsize=(12, 4.8 * len(panels))) as axes:
            for (left, right), some in zip(axes, panels, strict=True):
                _draw_lines(left, some, kernels, _time_of)
                _draw_lines(right, some, kernels, lambda name, row: row["tflops"].get(name))
                first, lengths = some[0], [row["length"] for row in some]
                predicted = " (predicting included)" * (first["direction"] == "forward")
                title = f"{first['direction']}, head dim {first['head_dim']}, {first['blocks']}"
                charts.over_tokens(left, lengths, f"{title}: time{predicted}", "ms")
                rate = ("rate of attending: listed blocks, dense half", "TFLOP/s")
                charts.over_tokens(right, lengths, *rate, log=False, legend=False)


EXPERIMENT = Attention


def counted(plan: BlockPlan, heads: int) -> dict[str, float]:
    """Density, and (query, key) pairs over all ``heads``: attended ones, and all of listed blocks.

    A listed block counts whole, masked pairs and all: that is what a kernel computes.
    """
    attended, causal = map(int, plan.pairs())
    listed = int(plan.full.counts.sum() + plan.partial.counts.sum())
    sharing = plan.shared_by(heads)
    return {
        "density": attended / causal,
        "attended_pairs": attended * sharing,
        "listed_pairs": listed * sharing * plan.query_block * plan.key_block,
    }


def rates(row: Row, alike: Sequence[Row]) -> dict[str, Any]:
    """TFLOP/s of the engines and dense kernels of ``row``, and whose its engines are compared with.

    Forward, a (query, key) pair is a multiplication and an addition per channel, in each of two
    products. ``alike`` has the head dim and direction of ``row``.
    """

    def tflops(pairs: float, times: Mapping[str, float]) -> dict[str, float]:
        operations = 4 * row["head_dim"] * pairs * DIRECTIONS[row["direction"]]
        return {name: operations / ms / 1e9 for name, ms in times.items()}

    causal = row["batch"] * row["heads"] * row["length"] ** 2 / 2
    blocks = tflops(row["listed_pairs"], row["attend_ms"])
    rated = dense.compared(row, alike, preferred=RATED_AGAINST[row["direction"]])
    name, over = rated["baseline"], None
    if name is not None:
        rate = tflops(causal, {name: rated["baseline_ms"]})[name]
        over = {engine: each / rate for engine, each in blocks.items()}
    return {
        "tflops": blocks | tflops(causal, row["baselines"]),
        "tflops_pairs": tflops(row["attended_pairs"], row["attend_ms"]),
        "rated_against": name,
        "rate_ratio": over,
    }


def _predicts(row: Row) -> bool:
    """Whether predicting is part of what the row times."""
    return row["direction"] == "forward" and row["budget"] != EVERYTHING


def _of_engine(row: Row, name: str | None) -> dict[str, Any]:
    """``row`` with what one engine has where it has something by name."""
    by_name = (*OF_ENGINES, "tflops", "tflops_pairs", "rate_ratio")
    named = {field: (row[field] or {}).get(name) for field in by_name}
    ms = named["total_ms" if _predicts(row) else "attend_ms"]
    ratio = None if None in (ms, row["baseline_ms"]) else ms / row["baseline_ms"]
    return {**row, **named, "engine": name, "ms": ms, "ratio": ratio}


def _longest(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of every group the longest row that is compared, with the break-even of the group."""
    longest = []
    for alike in grouped(rows, *GROUP):
        compared = [row for row in alike if row["ratio"] is not None]
        last = (compared or alike)[-1]
        break_even = dense.break_even_shown(compared)
        longest.append({**_of_engine(last, last["engine"]), "break_even": break_even})
    return longest


def _budget(row: Row) -> str:
    return "all" if row["budget"] == EVERYTHING else f"{row['budget']:g}"


def _rate_over(row: Row) -> str | None:
    return row["rate_ratio"] and f"{row['rate_ratio']:.2f} {row['rated_against']}"


def _dense(name: str, row: Row) -> str | None:
    """``2.61 (628)``: ms and TFLOP/s of a dense kernel."""
    if name not in row["baselines"]:
        return None
    return f"{digits(row['baselines'][name])} ({digits(row['tflops'][name])})"


# of a row and one of its engines
COLUMNS = {
    "budget": _budget,
    "density": column("{:.3f}".format, "density"),
    "engine": "engine",
    "ms": column(digits, "ms"),
    "dense ms": dense.time_shown,
    "of dense": column(percent, "ratio"),
    "TFLOP/s of blocks": column(digits, "tflops"),
    "of pairs": column(digits, "tflops_pairs"),
    "rate over": _rate_over,
}
LONGEST = {"faster than dense": "break_even"}
ENGINES = {
    "predict ms": column(digits, "predict_ms"),
    "attend ms": column(digits, "attend_ms"),
    "from Python ms": column(digits, "total_eager_ms"),
    "peak MiB": column(digits, "peak_mib"),
    "computed by": "labels",
}


def _time_of(name: str, row: Row) -> float | None:
    return {**row["baselines"], **row["attend_ms"], **row["total_ms"]}.get(name)


def _draw_lines(
    axis: Any,
    rows: Sequence[Row],
    kernels: Sequence[str],
    value: Callable[[str, Row], float | None],
) -> None:
    for colour, alike in enumerate(grouped(rows, "budget")):
        for name, style in zip(names(rows, "attend_ms"), ("-", "--", ":"), strict=False):
            label = f"{name}, {_budget(alike[0])}"
            look = {"color": f"C{colour}", "linestyle": style, "label": label}
            charts.line(axis, alike, partial(value, name), **look)
    draw_dense(axis, [alike[0] for alike in grouped(rows, "length")], kernels, value)
