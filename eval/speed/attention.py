"""``speed attention``: time selecting blocks and attending, next to dense kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from cab_hf import engines
from cab_hf.call.layout import BlockLayout
from cab_hf.config import CabConfig
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import grouped, percent
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import KEEPS_ALL, listed
from cab_hf.eval.speed.dense import CHECK_LENGTH, check_gradients, check_rows, gradients_of
from cab_hf.eval.speed.heads import HeadSettings, HeadSpeed, call_of
from cab_hf.eval.speed.reported import Panel, named, varying
from cab_hf.eval.speed.timing import in_a_sentence, method_on
from cab_hf.experiment.settings import flag, option
from cab_hf.plan import BlockPlan, KeyRanges
from cab_hf.predictors import make_predictor

# direction -> operations relative to the forward pass: five products instead of two
DIRECTIONS = {"forward": 1.0, "backward": 2.5}
EVERYTHING = 1.0  # the budget that keeps all blocks
ENGINES_ON_GPU = ("flex", "triton")
OF_ENGINES = ("attend_ms", "total_ms", "total_eager_ms", "peak_mib", "labels")
GROUP = ("head_dim", "direction", "blocks", "budget")  # rows of a group differ in length alone


@dataclass(frozen=True)
class Settings(HeadSettings):
    """Settings of a run of attention."""

    KEYS = {"length": "lengths", "head_dim": "head_dims", "direction": "directions"}
    KEYS |= {"blocks": "blocks", "budget": "densities"}
    DEFAULTS = {**KEEPS_ALL, "min_length": 0}
    POSITIVE = (*HeadSettings.POSITIVE, "head_dims")
    FROM_0 = (*HeadSettings.FROM_0, "seconds")
    CHOICES = {"directions": DIRECTIONS, "engines": engines.ENGINES}

    head_dims: tuple[int, ...] | None = listed((128,), (32,), "head dims", int)
    densities: tuple[float, ...] = listed(
        (0.05, 0.1, 0.2, EVERYTHING),
        None,
        "max_density, which is used completely; 1: all blocks",
        float,
    )
    blocks: tuple[str, ...] | None = listed(
        ("128x64",), ("32x16",), "block sizes, query block x key block", str.lower
    )
    directions: tuple[str, ...] = listed(tuple(DIRECTIONS), None, "forward, backward or both")
    engines: tuple[str, ...] | None = listed(ENGINES_ON_GPU, ("reference",), "attention engines")
    sinks: bool = flag("give each head an attention sink, a logit without a key")
    seconds: float = option(0.5, "seconds for timing one case, at least five runs", float)

    def configs(self) -> list[CabConfig]:
        return [self.budgeted(case) for case in self.asked()]

    @property
    def method(self) -> str:
        return (
            f"{method_on(self.device, self.seconds)}; backward times are those of "
            "torch.autograd.grad alone, called from Python; predict + attend is one call, and "
            "its peak excludes its inputs and includes its result; every kernel is compared with "
            "float32 attention before it is timed, an engine at the whole length, gradients on "
            f"{CHECK_LENGTH} tokens"
        )

    def budgeted(self, case: Mapping[str, Any]) -> CabConfig:
        """Return the config with the budget of ``case``."""
        sizes = case["blocks"].split("x")
        self.check("blocks", len(sizes) == 2 and all(map(str.isdigit, sizes)), "like 128x64")
        query_block, key_block = map(int, sizes)
        return self.configured(
            max_density=case["budget"], query_block=query_block, key_block=key_block
        )

    def planner(
        self, case: Mapping[str, Any], sinks: Tensor | None = None
    ) -> Callable[[Tensor, Tensor, KeyRanges], BlockPlan]:
        """Return a function (q, k, ranges) -> plan of ``case``, for heads with these ``sinks``."""
        config = self.budgeted(case)
        if case["budget"] == EVERYTHING:
            return lambda q, k, ranges: BlockPlan.causal(
                ranges, q.shape[1], config.query_block, config.key_block
            )
        predict = make_predictor(config)
        return lambda q, k, ranges: predict(q, k, call_of(config, ranges, q.shape[-1], sinks))

    def sinks_on(self, device: torch.device) -> Tensor | None:
        """Return random logits [H] of attention sinks; None without sinks."""
        generator = torch.Generator(device).manual_seed(self.seed)
        return torch.randn(self.heads, device=device, generator=generator) if self.sinks else None


class Attention(HeadSpeed):
    """The experiment; a case is one length, head dim, direction, block size and budget."""

    name = "speed attention"
    purpose = "time selecting blocks and attending, forward and backward, next to dense kernels"
    title = "Speed of attention"
    caption = "time and rate of attention by length"
    Settings = Settings
    CASE = tuple(Settings.KEYS)
    GROWS = (*Settings.KEYS.values(), "cab")

    FOUND = ("density", "listed_pairs", "predict_ms")
    BY_NAME = (*OF_ENGINES, *HeadSpeed.BY_NAME)
    BY = {"direction": "direction", "head dim": "head_dim", "blocks": "blocks", "budget": "budget"}
    BY |= {"way": "way"}
    APART = ("direction", "head dim", "blocks")
    DENSE = ("direction", "head_dim")
    OF_DENSE = {"ms": "baselines", "tflops": "tflops"}
    HIDDEN = ("engine", "total_ms", "attended_pairs", "listed_pairs")
    LONGEST_FIRST = True
    PANELS = (
        Panel("time", "ms", ("ms",)),
        Panel("rate of attending", "TFLOP/s", ("tflops",), log=False),
    )
    NOTES = {
        "": "A budget is a max_density, and 1 attends to everything. Density is the result: "
        "attended over causal pairs. ms includes selecting blocks; total eager ms is the time "
        "of a call from Python. TFLOP/s exclude selecting blocks, and count four operations "
        "per pair and channel forward and ten backward: every pair of a listed block, masked "
        "or not; for dense kernels, half of all pairs. Efficient attention gets repeated k "
        "and v before the clock starts."
    }

    @torch.no_grad()
    def find(self, sample: dict[str, Any]) -> None:
        settings, bench = self.settings, self.bench
        length, head_dim = sample["length"], sample["head_dim"]
        heads = settings.random_heads(length, head_dim, bench.device, "qkv")
        ranges = KeyRanges.causal(settings.batch, length, length, bench.device)
        sinks = settings.sinks_on(bench.device)
        planner = settings.planner(sample, sinks)
        decide = partial(planner, *heads[:2], ranges)
        plan = decide()
        sample |= counted(plan, settings.heads)
        if _predicts(sample):
            sample["predict_ms"] = self.time(sample, "predicting", decide).ms
        like = bench.device.type, head_dim, settings.torch_dtype, sample["direction"] == "backward"
        work = engines.Workload(*like, plan.query_block, plan.key_block, sinks=settings.sinks)
        for name in settings.engines:
            bench.settle()
            try:
                engine = engines.choose(name, work)
                check_rows(engine.attention(*heads, plan, head_dim**-0.5), *heads, plan)
                if work.training:
                    check_gradients(engine.attention, *heads, planner)
                attend = partial(BlockLayout(ranges, length).attend, engine, sinks=sinks)
                self.time_engine(sample, name, attend, heads, decide, plan)
            except Exception as error:
                # an engine that raises an error or is wrong is reported and not measured
                sample["not_measured"][name] = in_a_sentence(error)
            else:
                sample["labels"][name] = engine.label(work)

    def time_engine(
        self,
        sample: dict[str, Any],
        name: str,
        attend: Callable[..., Tensor],
        heads: tuple[Tensor, ...],
        decide: Callable[[], BlockPlan],
        plan: BlockPlan,
    ) -> None:
        """Add the times of ``attend``, alone and with block selection, to ``sample``."""
        scale = sample["head_dim"] ** -0.5
        if sample["direction"] == "backward":
            complete = gradients_of(attend, *heads, plan, scale)
            sample["attend_ms"][name] = self.bench.time(complete, graph=False).ms
        else:
            attending = partial(attend, *heads, plan, scale)
            sample["attend_ms"][name] = self.time(sample, name, attending).ms
            if not _predicts(sample):
                return

            def complete() -> Tensor:
                return attend(*heads, decide(), scale)

            timing = self.time(sample, f"predicting and {name}", complete)
            sample["total_ms"][name], sample["total_eager_ms"][name] = timing.ms, timing.eager
        sample["peak_mib"][name] = self.bench.peak(complete)[1]

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return rows by `GROUP` and length, with the fastest engine, dense attention and rates.

        ``ms`` includes block selection; ``ratio`` is relative to the fastest dense kernel.
        """
        rows = sorted(map(dict, samples), key=itemgetter("blocks", "budget", "length"))
        # forward before backward
        rows.sort(key=lambda row: (row["head_dim"], DIRECTIONS[row["direction"]]))
        for alike in grouped(rows, "head_dim", "direction"):
            for row in alike:
                times = _times(row)
                row["engine"] = min(times, key=times.__getitem__, default=None)
                row["ms"] = times.get(row["engine"])
                row |= dense.compared(row, alike, preferred=()) | {"tflops": rates(row)}
        return rows

    @classmethod
    def shown(cls, rows: Sequence[Row]) -> list[Row]:
        """Return one row per engine, with the length at which it becomes faster than dense."""
        by_name, made = (*OF_ENGINES, "tflops"), []
        first = dict.fromkeys(("density", "ms", "baseline", "baseline_ms", "ratio"))
        for row in rows:
            for name, ms in _times(row).items():
                own = {field: (row[field] or {}).get(name) for field in by_name}
                ratio = row["baseline_ms"] and ms / row["baseline_ms"]
                made.append({**first, **row, **own, "ms": ms, "ratio": ratio, "way": f"cab {name}"})
        for alike in grouped(made, *GROUP, "way"):
            break_even = dense.break_even_shown(alike)
            for row in alike:
                row["break_even"] = break_even
        return made

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Summarise the smallest budget at the longest input for each direction."""
        parts = []
        for some in grouped([row for row in rows if row["ratio"] is not None], "direction"):
            row = min(some, key=lambda row: (row["budget"], -row["length"], row["ratio"]))
            alike = [each for each in some if all(each[name] == row[name] for name in GROUP)]
            which = named(row, varying(rows, {"head dim": "head_dim", "blocks": "blocks"}))
            share = f"{percent(row['density'])} of the pairs by {row['engine']}"
            predicting = ["selecting blocks included"] if _predicts(row) else []
            what = ", ".join([f"{row['direction']} of {share}", *which, *predicting])
            parts.append(dense.reading(alike, what))
        return parts


EXPERIMENT = Attention


def counted(plan: BlockPlan, heads: int) -> dict[str, float]:
    """Return density, and listed (query, key) pairs over ``heads``, masked ones included."""
    listed = int(plan.full.counts.sum() + plan.partial.counts.sum())
    pairs = listed * plan.shared_by(heads) * plan.query_block * plan.key_block
    return {"density": plan.density(), "listed_pairs": pairs}


def rates(row: Row) -> dict[str, float]:
    """Return TFLOP/s of the engines, over listed blocks, and of the dense kernels of ``row``."""
    causal = row["batch"] * row["heads"] * row["length"] ** 2 / 2
    pairs = {name: row["listed_pairs"] for name in row["attend_ms"]}
    pairs |= dict.fromkeys(row["baselines"], causal)
    # a pair needs a multiplication and an addition per channel in each of two forward products
    operations = 4 * row["head_dim"] * DIRECTIONS[row["direction"]]
    times = row["attend_ms"] | row["baselines"]
    return {name: operations * pairs[name] / ms / 1e9 for name, ms in times.items()}


def _predicts(row: Row) -> bool:
    """Return True if the time of the row includes selecting blocks."""
    return row["direction"] == "forward" and row["budget"] != EVERYTHING


def _times(row: Row) -> Mapping[str, float]:
    """Return ms by engine, including block selection if there is any."""
    return row["total_ms" if _predicts(row) else "attend_ms"]
