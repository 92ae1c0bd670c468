"""``speed budgets``: what it costs that heads have budgets of their own, beside dense kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from cab_hf.eval.speed import dense, forms
from cab_hf.eval.speed.base import DENSITY, TOKENS, UNREACHED_MASS, listed, remarks
from cab_hf.eval.speed.checks import check_rows
from cab_hf.eval.speed.forms import Form
from cab_hf.eval.speed.heads import HeadSettings, HeadSpeed, described, names
from cab_hf.eval.speed.timing import method_on
from cab_hf.plan import BlockPlan, Spans
from cab_hf.predictors import Call, make_predictor
from cab_hf.rotary import llama_channels
from cab_hf.runs.settings import by_device, option, parse_length

MIB = 2**20
TIMES = "{:.2f}×".format
# a density is met where what is realised lies within this share of it
TOLERANCE = 0.01
# what a layer is found to take, by the number of its heads that are apart
OF_LAYERS = ("densities", "predict_ms", "attend_ms", "total_ms", "list_bytes", "peak_mib")
# derived from it, the mean over layers -> of what
MEANS = {
    "density": "densities",
    "predicting_ms": "predict_ms",
    "attending_ms": "attend_ms",
    "ms": "total_ms",
    "lists": "list_bytes",
}


@dataclass(frozen=True)
class Settings(HeadSettings):
    """What a run of budgets is told."""

    KEYS: ClassVar[Mapping[str, str]] = {"length": "lengths", "form": "forms"}
    DEFAULTS = {**UNREACHED_MASS, "min_length": 0}
    POSITIVE = (*HeadSettings.POSITIVE, "head_dim")

    lengths: tuple[int, ...] | None = listed((131_072,), (512,), "tokens", parse_length)
    forms: tuple[str, ...] | None = listed(
        ("uniform:0.1", "whole:0.04:0.1", "exact:0.1:64:0.08", "exact:0.1:16:0.08", "uniform:0.08"),
        ("uniform:0.5", "whole:0.1:0.5", "exact:0.3:16:0.5", "exact:0.3:4:0.5"),
        forms.SPELLINGS,
        forms.spelled,
    )
    heads: int | None = by_device(32, 4, "query heads", int)
    kv_heads: int | None = by_device(8, 2, "key and value heads", int)
    head_dim: int | None = by_device(128, 16, "channels of a head", int)
    seconds: float = option(0.5, "for timing one case, where it needs less for five", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("forms", tuple(map(forms.spelled, self.forms)))
        self.check("forms", self.forms, f"like {forms.SPELLINGS}")
        self.check("seconds", self.seconds >= 0, "0 or more")
        # one budget for all is what forms depart from; budgets that fit no config are refused here
        even = self.configured(max_density=1.0)
        alike = even.mass, even.bridges, even.exact_queries
        tables = any(isinstance(number, tuple) for number in alike)
        self.check("config", not tables, "without tables: forms make those")
        for text in self.forms:
            form = Form.parse(text)
            replace(even, **forms.tables(even, *self.apart(form)))

    @property
    def method(self) -> str:
        return (
            f"{method_on(self.device, self.seconds)}; times are those of a CUDA graph where one "
            "could be made; predict + attend is one call, not a sum; the peak is that of such a "
            "call over its inputs, its result included; every plan is attended on some rows of the "
            "whole length in float32 as well, and compared, before anything is timed"
        )

    def apart(self, form: Form) -> tuple[dict[Form, set[tuple[int, int]]], int, int]:
        """(which heads of layers are apart, layers, heads): a layer for each count in `mix`."""
        counts, order = mix(form.share, self.heads), forms.spread(1, self.heads)
        pairs = {(layer, head) for layer, count in enumerate(counts) for _, head in order[:count]}
        return {form: pairs}, len(counts), self.heads

    def budgeted(self, form: Form, q: Tensor, k: Tensor) -> CabConfig:
        """The config of that form, filled as `forms.budgeted` says."""
        even = self.configured(max_density=1.0)
        return forms.budgeted(even, *self.apart(form), q, k, form.whole)


class Budgets(HeadSpeed):
    """A case is one length and one form of budgets."""

    name = "speed budgets"
    purpose = "what uneven budgets of heads cost: some attend everything, or go by exact scores"
    title = "Speed of uneven budgets"
    caption = "time of predicting and attending by form of budgets"
    Settings = Settings
    CASE = tuple(Settings.KEYS)
    GROWS = (*Settings.KEYS.values(), "config")

    SHAPE = (*HeadSpeed.SHAPE, "head_dim")
    FOUND = ("engine", "max_density", "exact_pass_ms")
    BY_NAME = ("weights", *OF_LAYERS, *HeadSpeed.BY_NAME)
    TOLD = Exception  # an engine or a kernel that refuses, is wrong or does not fit

    @torch.no_grad()
    def find(self, sample: dict[str, Any]) -> None:
        settings, bench = self.settings, self.bench
        form, length = Form.parse(sample["form"]), sample["length"]
        q, k, v = settings.random_heads(length, settings.head_dim, bench.device, "qkv")
        one = q[:1, :1], k[:1, :1]
        config = settings.budgeted(form, *one)
        sample["max_density"] = config.max_density
        work = engines.Workload.of(q, k, v, (config.query_block, config.key_block))
        engine = engines.choose(config.engine, work)
        sample["engine"] = engine.label(work)
        spans = Spans.causal(settings.batch, length, length, bench.device)
        weights = mix(form.share, settings.heads)
        for layer, count in enumerate(weights):
            bench.settle()
            channels = llama_channels(settings.head_dim)
            known = Call(spans, settings.head_dim**-0.5, layer, channels=channels)
            decide = partial(make_predictor(config), q, k, known)
            self.time_layer(sample, str(count), decide, partial(engine.attention, q, k, v))
        # only now: what fails in one layer has no mean
        sample["weights"] = {str(count): weight for count, weight in weights.items()}
        if form.kind == "exact":
            bench.settle()
            chosen = exactly_chosen(*one, config, form.queries)
            sample["exact_pass_ms"] = self.time(sample, "one exact head", chosen).ms

    def time_layer(
        self,
        sample: dict[str, Any],
        count: str,
        decide: Callable[[], BlockPlan],
        attend: partial[Tensor],
    ) -> None:
        """Write into ``sample`` what a layer takes that has so many heads apart.

        ``attend`` is an engine's function of q, k and v, called with a plan and a scale.
        """
        scale = sample["head_dim"] ** -0.5
        plan = decide()
        check_rows(attend.func, *attend.args, plan)
        sample["densities"][count] = plan.density()
        sample["list_bytes"][count] = list_bytes(plan)

        def whole() -> Tensor:
            return attend(decide(), scale)

        timed = {"predict_ms": decide, "attend_ms": lambda: attend(plan, scale), "total_ms": whole}
        for field, call in timed.items():
            what = field.removesuffix("_ms")
            sample[field][count] = self.time(sample, f"{what}, {count} apart", call).ms
        sample["peak_mib"][count] = self.bench.peak(whole)[1]

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """By length: the mean over layers, beside dense attention and even budgets.

        ``ms`` is predicting and attending; ``ratio`` is over FA3, else `dense.compared`'s;
        ``over_uniform`` is over even budgets of the same density; ``pass_ratio`` is what
        choosing for one head by exact scores takes of the time of one dense head.
        """
        rows = sorted(map(dict, samples), key=itemgetter("length"))
        for row in rows:
            row |= {name: mean(row, field) for name, field in MEANS.items()}
            peaks = [peak for peak in row["peak_mib"].values() if peak is not None]
            row["peak"] = max(peaks, default=None)
            row["missed"] = missed(row)
        even = {
            (row["length"], Form.parse(row["form"]).density): row["ms"]
            for row in rows
            if not _apart(row)
        }
        for row in rows:
            row |= dense.compared(row, rows)
            alike = even.get((row["length"], Form.parse(row["form"]).density))
            row["over_uniform"] = row["ms"] / alike if row["ms"] and alike else None
            row["pass_ratio"] = None
            if row["exact_pass_ms"] and row["baseline_ms"]:
                # a pass is over one head of one sequence
                dense_head = row["baseline_ms"] / (row["batch"] * row["heads"])
                row["pass_ratio"] = row["exact_pass_ms"] / dense_head
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """What every form takes, then layer by layer, one exact head and dense attention."""
        layers = [_of_layer(row, count) for row in rows for count in row["weights"]]
        passes = [row for row in rows if row["exact_pass_ms"] is not None]
        dense_ms = {f"{name} ms": column(digits, "baselines", name) for name in names(rows)}
        once = [alike[0] for alike in grouped([r for r in rows if r["baselines"]], "length")]
        made = {
            "Forms of budgets": markdown_table(rows, COLUMNS),
            "Layers": markdown_table(layers, LAYERS),
            "Dense causal attention, forward": markdown_table(once, TOKENS | dense_ms),
        }
        if passes:
            made["Choosing for one exact head"] = markdown_table(passes, PASSES)
        return made | remarks(rows, {"budgets": "form"})

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """At the longest input, what each form costs over even budgets, and one exact head."""
        timed = [row for row in rows if row["ms"] is not None]
        if not timed:
            return []
        longest = timed[-1]["length"]
        last = [row for row in timed if row["length"] == longest]
        told = []
        uneven = [row for row in last if row["over_uniform"] and _apart(row)]
        if uneven:
            costs = (f"{row['form']} takes {TIMES(row['over_uniform'])}" for row in uneven)
            told.append(
                f"At {longest:,} tokens {', '.join(costs)} the time of even budgets of the same "
                "density, predicting included."
            )
        passes = {
            Form.parse(row["form"]).queries: row for row in last if row["pass_ratio"] is not None
        }
        if passes:
            shares = (f"{percent(r['pass_ratio'])} by {n} queries" for n, r in passes.items())
            first = next(iter(passes.values()))
            told.append(
                "Choosing for one head by exact scores of outlier queries takes, of the time of a "
                f"head of {first['baseline']}{' (extrapolated)' * first['extrapolated']}, "
                f"{', '.join(shares)}."
            )
        return told

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return (
            f"{described(settings)}\n\nuniform:D: all heads alike attend the share D of causal "
            "pairs. whole:S:D: the share S of the heads attends everything and lists nothing, the "
            "others get what is left of D. exact:S:Q:D: the share S of the heads chooses by exact "
            "scores of Q queries a block, the others by the estimate; all attend D. Where S is no "
            "whole number of heads, two layers are measured, one with fewer and one with more, and "
            "what a form takes is their mean at the weights of a model that has S of all its heads "
            "apart, densities and lists included; the peak is the larger. max_density is the "
            "budget of the heads that list blocks, found by halving; forced blocks and the last "
            "rows, which attend everything, "
            f"count, and a density missed by more than {percent(TOLERANCE)} is told of. Over "
            "uniform: over even budgets of the same density. Lists: what the plan of a layer holds."
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """A panel a length: predicting below attending, a bar a form, beside dense attention."""
        panels = grouped(rows, "length")
        size = (1.5 + 1.1 * max(map(len, panels)), 4.8 * len(panels))
        with charts.figure(path, len(panels), 1, figsize=size) as axes:
            for axis, some in zip(axes[:, 0], panels, strict=True):
                _draw_bars(axis, some)


EXPERIMENT = Budgets


def mix(share: float, heads: int) -> dict[int, float]:
    """Heads apart in a layer -> the share of the layers that have so many.

    The whole numbers around ``share * heads``, weighted so that it is their mean.
    """
    # a product such as .07 * 100 is a hair above 7
    wanted = round(share * heads, 6)
    low = math.floor(wanted)
    weights = {low: low + 1 - wanted, low + 1: wanted - low}
    return {count: weight for count, weight in weights.items() if weight > 0}


def mean(row: Row, field: str) -> float | None:
    """The mean over layers of what ``field`` has by heads apart; None where a layer failed."""
    weights = row["weights"]
    if not weights:
        return None
    return sum(weight * row[field][count] for count, weight in weights.items())


def missed(row: Row) -> str | None:
    """What is attended, where that is not the density asked for."""
    density, asked = row["density"], Form.parse(row["form"]).density
    if density is None or abs(density - asked) <= TOLERANCE * asked:
        return None
    return f"{percent(density)} attended, {percent(asked)} asked for"


def list_bytes(plan: BlockPlan) -> int:
    """Bytes of the lists of ``plan``."""
    lists = plan.full, plan.partial
    return sum(x.numel() * x.element_size() for some in lists for x in (some.counts, some.indices))


def exactly_chosen(
    q: Tensor, k: Tensor, config: CabConfig, queries: int
) -> Callable[[], BlockPlan]:
    """What chooses for one head, q and k [1, 1, N, D], by exact scores of so many queries a block.

    Keys are summarised and blocks selected within it.
    """
    length = q.shape[2]
    known = Call(Spans.causal(1, length, length, q.device), q.shape[-1] ** -0.5)
    return partial(make_predictor(replace(config, exact_queries=queries)), q, k, known)


def _of_layer(row: Row, count: str) -> dict[str, Any]:
    """``row`` with what one of its layers has where it has something by heads apart."""
    own = {name: row[field][count] for name, field in MEANS.items()}
    peak, weight = row["peak_mib"][count], row["weights"][count]
    return {**row, **own, "apart": count, "weight": weight, "peak": peak}


def _apart(row: Row) -> bool:
    return Form.parse(row["form"]).kind != "uniform"


def _speedup(row: Row) -> str | None:
    return None if row["ratio"] is None else TIMES(1 / row["ratio"])


def _mib(count: float) -> str | None:
    return digits(count / MIB)


FORM = {**TOKENS, "budgets": "form"}
TAKEN = {
    **DENSITY,
    "predict ms": column(digits, "predicting_ms"),
    "attend ms": column(digits, "attending_ms"),
    "predict + attend ms": column(digits, "ms"),
    "lists MiB": column(_mib, "lists"),
    "peak MiB": column(digits, "peak"),
}
COLUMNS = {
    **FORM,
    "max_density": column("{:.4f}".format, "max_density"),
    **TAKEN,
    "over uniform": column(TIMES, "over_uniform"),
    "dense ms": dense.time_shown,
    "as fast as dense": _speedup,
    "engine": "engine",
}
LAYERS = {**FORM, "heads apart": "apart", "weight": "weight", **TAKEN}
PASSES = {
    **FORM,
    "ms": column(digits, "exact_pass_ms"),
    "dense ms of all heads": dense.time_shown,
    "of one dense head": column(percent, "pass_ratio"),
}


def _draw_bars(axis: Any, rows: Sequence[Row]) -> None:
    drawn = [row for row in rows if row["ms"] is not None]
    bars = range(len(drawn))
    predicting = [row["predicting_ms"] for row in drawn]
    attending = [row["attending_ms"] for row in drawn]
    axis.bar(bars, predicting, color="C3", label="predicting")
    axis.bar(bars, attending, bottom=predicting, color="C0", label="attending")
    ticks = [row["form"].replace(":", "\n", 1) for row in drawn]
    known = next((row for row in rows if row["baseline_ms"] is not None), None)
    if known is not None:
        how = ", extrapolated" * known["extrapolated"]
        label = f"{known['baseline']} dense{how}"
        axis.bar(len(drawn), known["baseline_ms"], color=charts.GREYS[1], label=label)
        ticks.append(known["baseline"])
    axis.set_xticks(range(len(ticks)), ticks, fontsize=8)
    axis.set_ylabel("ms")
    axis.set_title(f"one layer of {charts.short(rows[0]['length'])} tokens", fontsize=10)
    axis.grid(axis="y", alpha=0.3)
    if ticks:
        axis.legend(fontsize=8)
