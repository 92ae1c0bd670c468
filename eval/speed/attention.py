"""``speed attention``: time selecting blocks and attending, next to dense kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from cab_hf import engines
from cab_hf.call.layout import BlockLayout
from cab_hf.config import CabConfig
from cab_hf.engines import Engine
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import grouped, percent
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.dense import CHECK_LENGTH, check_gradients, check_rows, gradients_of
from cab_hf.eval.speed.layouts import LAYOUTS, WHOLE, Sequences, baselines
from cab_hf.eval.speed.runner import (
    INPUTS,
    KEEPS_ALL,
    Panel,
    Speed,
    SpeedSettings,
    distinct_values,
    listed,
    run_description,
    varying_columns,
)
from cab_hf.eval.speed.timing import Bench, in_a_sentence, method_on
from cab_hf.experiment.settings import flag, option
from cab_hf.hf.rotary import llama_channels
from cab_hf.plan import BlockPlan, KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

# direction -> operations relative to the forward pass: five products instead of two
DIRECTIONS = {"forward": 1.0, "backward": 2.5}
EVERYTHING = 1.0  # the budget that keeps all blocks
ENGINES_ON_GPU = ("flex", "triton")
# fields of a sample that map names of engines to values
OF_ENGINES = ("attend_ms", "total_ms", "total_eager_ms", "peak_mib", "labels")
# a group of rows has equal values in these fields, and differs only in length
GROUP = ("head_dim", "direction", "blocks", "layout", "budget")


@dataclass(frozen=True)
class Settings(SpeedSettings):
    """Settings of a run of ``speed attention``."""

    KEYS = {"length": "lengths", "head_dim": "head_dims", "direction": "directions"}
    KEYS |= {"blocks": "blocks", "layout": "layouts", "budget": "densities"}
    DEFAULTS = {**KEEPS_ALL, "min_length": 0}
    POSITIVE = ("batch", "kv_heads", "head_dims")
    FROM_0 = ("dense_up_to", "seconds")
    CHOICES = {"directions": DIRECTIONS, "engines": engines.ENGINES, "layouts": LAYOUTS}

    batch: int = option(1, "sequences", int)
    heads: int = option(32, "query heads", int)
    kv_heads: int = option(8, "key and value heads", int)
    dense_up_to: int = option(
        2**17, "longest measured length of dense attention; N² extrapolation beyond", int
    )
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
    layouts: tuple[str, ...] = listed((WHOLE,), None, f"layouts of a batch: {', '.join(LAYOUTS)}")
    engines: tuple[str, ...] | None = listed(ENGINES_ON_GPU, ("reference",), "attention engines")
    sinks: bool = flag("give each head an attention sink, a logit without a key")
    seconds: float = option(0.5, "seconds for timing one case, at least five runs", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        # only the layout of whole rows has a check of dense kernels' gradients
        is_checked = self.layouts == (WHOLE,) or self.directions == ("forward",)
        self.check("directions", is_checked, f"forward for layouts other than {WHOLE}")

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
        """Return CAB's config with the block sizes of ``case`` and its budget as max_density."""
        sizes = case["blocks"].split("x")
        self.check("blocks", len(sizes) == 2 and all(map(str.isdigit, sizes)), "like 128x64")
        query_block, key_block = map(int, sizes)
        return self.configured(
            max_density=case["budget"], query_block=query_block, key_block=key_block
        )

    def planner(
        self, case: Mapping[str, Any], sinks: Tensor | None = None
    ) -> Callable[[Tensor, Tensor, KeyRanges], BlockPlan]:
        """Return a function of q, k and ranges that returns a plan.

        Args:
            case: the case with blocks and budget.
            sinks: logits [H] of attention sinks; None without sinks.
        """
        config = self.budgeted(case)
        if case["budget"] == EVERYTHING:
            return lambda q, k, ranges: BlockPlan.causal(
                ranges, q.shape[1], query_block=config.query_block, key_block=config.key_block
            )
        predict = make_predictor(config)
        # in a cascade, only anchor layers select blocks: use the first anchor layer
        layer = config.anchors[0] if config.anchors else None

        def select(q: Tensor, k: Tensor, ranges: KeyRanges) -> BlockPlan:
            dim = q.shape[-1]
            context = LayerContext(
                ranges, dim**-0.5, layer, channels=llama_channels(dim), sinks=sinks
            )
            return predict(q, k, context)

        return select

    def sinks_on(self, device: torch.device) -> Tensor | None:
        """Return random logits [H] of attention sinks; None without sinks."""
        generator = torch.Generator(device).manual_seed(self.seed)
        return torch.randn(self.heads, device=device, generator=generator) if self.sinks else None


class Attention(Speed):
    """The experiment that times selecting blocks and attending in one layer.

    A case is one length, head dim, direction, block size, layout and budget.
    """

    name = "speed attention"
    purpose = "time selecting blocks and attending, forward and backward, next to dense kernels"
    title = "Speed of attention"
    caption = "time and rate of attention by length"
    Settings = Settings
    CASE = tuple(Settings.KEYS)
    GROWS = (*Settings.KEYS.values(), "cab")

    ADDED = {"layout": WHOLE, "causal_pairs": None}
    SHAPE = ("batch", "heads", "kv_heads", "dtype")
    FOUND = ("density", "listed_pairs", "causal_pairs", "predict_ms")
    BY_NAME = (*OF_ENGINES, *dense.MEASURED)
    BY = {"direction": "direction", "head dim": "head_dim", "blocks": "blocks", "layout": "layout"}
    BY |= {"budget": "budget", "way": "way"}
    APART = ("direction", "head dim", "blocks", "layout")
    DENSE = ("direction", "head_dim", "layout")
    OF_DENSE = {"ms": "baselines", "tflops": "tflops"}
    HIDDEN = ("engine", "total_ms", "attended_pairs", "listed_pairs", "causal_pairs")
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

    @staticmethod
    def described(settings: Mapping[str, Any]) -> str:
        channels = ", ".join(map(str, settings["head_dims"]))
        description = run_description(
            f"Batch {settings['batch']}, {settings['heads']} query heads and "
            f"{settings['kv_heads']} KV heads of {channels} channels, {settings['dtype']}; inputs "
            f"are {INPUTS}, not those of a model",
            settings,
        )
        longest = settings["dense_up_to"]
        extrapolated = f"≈: extrapolated by N² beyond {longest:,} tokens. {dense.BREAK_EVEN}"
        return f"{description}\n\n{extrapolated}"

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        sample, settings = super().measure(case), self.settings
        if case["length"] <= settings.dense_up_to:
            for field, by_name in time_baselines(
                settings,
                self.bench,
                layout=case["layout"],
                length=case["length"],
                head_dim=case["head_dim"],
                backward=case["direction"] == "backward",
            ).items():
                sample[field] |= by_name
            self.bench.settle()
        return sample

    @torch.no_grad()
    def find(self, sample: dict[str, Any]) -> None:
        settings, bench = self.settings, self.bench
        sequences, q, k, v = inputs_of(settings, bench, sample)
        config = settings.budgeted(sample)
        layout = sequences.block_layout(config.query_block, config.key_block)
        sinks = settings.sinks_on(bench.device)
        layer = Layer(q, k, v, layout=layout, planner=settings.planner(sample, sinks), sinks=sinks)
        plan = layer.select()
        sample |= counted(plan, settings.heads) | {"causal_pairs": sequences.causal_pairs}
        if _predicts(sample):
            sample["predict_ms"] = self.time(sample, "predicting", layer.select).ms
        work = engines.Workload(
            device=bench.device.type,
            head_dim=sample["head_dim"],
            dtype=settings.torch_dtype,
            training=sample["direction"] == "backward",
            query_block=plan.query_block,
            key_block=plan.key_block,
            sinks=settings.sinks,
        )
        for name in settings.engines:
            bench.settle()
            try:
                engine = engines.choose(name, work)
                layer.check(engine, plan, backward=work.training)
                self.time_engine(sample=sample, name=name, engine=engine, layer=layer, plan=plan)
            except Exception as error:
                # an engine that raises an error or is wrong is reported and not measured
                sample["not_measured"][name] = in_a_sentence(error)
            else:
                sample["labels"][name] = engine.label(work)

    def time_engine(
        self, sample: dict[str, Any], name: str, engine: Engine, layer: Layer, plan: BlockPlan
    ) -> None:
        """Add the times of an engine to ``sample``: of attention alone, and with block selection.

        Args:
            sample: result record of a case.
            name: name of the engine in results.
            engine: the engine.
            layer: the layer.
            plan: the plan of the layer.
        """
        q, k, v = layer.reordered_inputs()
        attend = partial(layer.attend, engine=engine, plan=plan)
        if sample["direction"] == "backward":
            complete = gradients_of(attend, q, k, v)
            sample["attend_ms"][name] = self.bench.time(complete, graph=False).ms
        else:
            sample["attend_ms"][name] = self.time(sample, name, partial(attend, q, k, v)).ms
            if not _predicts(sample):
                return
            complete = partial(layer.complete, engine)
            timing = self.time(sample, f"predicting and {name}", complete)
            sample["total_ms"][name], sample["total_eager_ms"][name] = timing.ms, timing.eager
        sample["peak_mib"][name] = self.bench.peak(complete)[1]

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a row per sample, with the time of its fastest engine, its baseline and its rates.

        ``ms`` includes block selection, and ``ratio`` is relative to the fastest dense kernel. Rows
        are sorted by head dim, direction, layout, blocks, budget and length.
        """
        rows = sorted(map(dict, samples), key=itemgetter("blocks", "budget", "length"))
        layouts = list(LAYOUTS)
        rows.sort(
            key=lambda row: (
                row["head_dim"],
                # forward before backward
                DIRECTIONS[row["direction"]],
                layouts.index(row["layout"]),
            )
        )
        for group in grouped(rows, ["head_dim", "direction", "layout"]):
            for row in group:
                times = _times(row)
                row["engine"] = min(times, key=times.__getitem__, default=None)
                row["ms"] = times.get(row["engine"])
                row |= dense.compared(row, group, preferred=()) | {"tflops": rates(row)}
        return rows

    @classmethod
    def shown(cls, rows: Sequence[Row]) -> list[Row]:
        """Return one row per engine, with the break-even length against dense attention."""
        fields, derived = (*OF_ENGINES, "tflops"), []
        # these columns come first
        leading = dict.fromkeys(("density", "ms", "baseline", "baseline_ms", "ratio"))
        for row in rows:
            for name, ms in _times(row).items():
                of_engine = {field: (row[field] or {}).get(name) for field in fields}
                ratio = row["baseline_ms"] and ms / row["baseline_ms"]
                of_engine |= {"ms": ms, "ratio": ratio, "way": f"cab {name}"}
                derived.append({**leading, **row, **of_engine})
        for group in grouped(derived, [*GROUP, "way"]):
            break_even = dense.break_even_shown(group)
            for row in group:
                row["break_even"] = break_even
        return derived

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Return a sentence per direction that compares the smallest budget with dense attention.

        The sentence is about the longest sequence that was measured with this budget.
        """
        sentences = []
        timed = [row for row in rows if row["ratio"] is not None]
        for direction_rows in grouped(timed, ["direction"]):
            row = min(direction_rows, key=lambda row: (row["budget"], -row["length"], row["ratio"]))
            group = [
                other for other in direction_rows if all(other[name] == row[name] for name in GROUP)
            ]
            columns = {"head dim": "head_dim", "blocks": "blocks", "layout": "layout"}
            values = distinct_values(row, varying_columns(rows, columns))
            share = f"{percent(row['density'])} of the pairs by {row['engine']}"
            selection = ["selecting blocks included"] if _predicts(row) else []
            subject = ", ".join([f"{row['direction']} of {share}", *values, *selection])
            sentences.append(dense.reading(group, subject))
        return sentences


EXPERIMENT = Attention


@dataclass(frozen=True, eq=False)
class Layer:
    """The inputs of one attention layer, and methods that select blocks and compute attention.

    Attributes:
        q: queries [B, H, N, D].
        k, v: keys and values [B, H_kv, N, D].
        layout: the `BlockLayout` that moves tokens to block boundaries.
        planner: function of q, k and ranges that returns a plan.
        sinks: logits [H] of attention sinks; None without sinks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: BlockLayout
    planner: Callable[[Tensor, Tensor, KeyRanges], BlockPlan]
    sinks: Tensor | None

    def reordered_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v in the order of the layout."""
        return self.layout.queries(self.q), self.layout.keys(self.k), self.layout.keys(self.v)

    def select(self) -> BlockPlan:
        """Reorder q and k, select blocks, and return the plan."""
        layout = self.layout
        return self.planner(layout.queries(self.q), layout.keys(self.k), layout.ranges)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, engine: Engine, plan: BlockPlan) -> Tensor:
        """Return attention in the order of the inputs, [B, H, N, D].

        Args:
            q, k, v: result of `reordered_inputs`.
            engine: the engine.
            plan: the plan.
        """
        out = self.layout.attend(
            engine=engine,
            q=q,
            k=k,
            v=v,
            plan=plan,
            scale=q.shape[-1] ** -0.5,
            sinks=self.sinks,
        )
        return self.layout.restore(out)

    def complete(self, engine: Engine) -> Tensor:
        """Reorder the inputs once, select blocks, and return attention [B, H, N, D]."""
        q, k, v = self.reordered_inputs()
        plan = self.planner(q, k, self.layout.ranges)
        return self.attend(q, k, v, engine=engine, plan=plan)

    def check(self, engine: Engine, plan: BlockPlan, backward: bool) -> None:
        """Compare an engine with float32 attention, and also its gradients for ``backward``.

        Raises:
            ArithmeticError: a relative error exceeds its tolerance.
        """
        q, k, v = self.reordered_inputs()
        out = engine.attention(q, k, v, plan, scale=q.shape[-1] ** -0.5)
        check_rows(out=out, q=q, k=k, v=v, plan=plan)
        if backward:
            check_gradients(engine.attention, q=q, k=k, v=v, planner=self.planner)


def inputs_of(
    settings: Settings, bench: Bench, case: Mapping[str, Any]
) -> tuple[Sequences, Tensor, Tensor, Tensor]:
    """Return (sequences, q, k, v) of a case: random lengths, and random tensors in their layout.

    q is [rows, H, slots, D]; k and v are [rows, H_kv, slots, D].
    """
    sequences = Sequences.drawn(
        case["layout"],
        batch=settings.batch,
        length=case["length"],
        seed=settings.seed,
        device=bench.device,
    )
    q, k, v = settings.random_heads(
        sequences.slots,
        head_dim=case["head_dim"],
        device=bench.device,
        names="qkv",
        batch=sequences.rows,
    )
    return sequences, q, k, v


# the times do not depend on the budget, so the cases of all budgets use the same cached result
@lru_cache(maxsize=1)
def time_baselines(
    settings: Settings, bench: Bench, *, layout: str, length: int, head_dim: int, backward: bool
) -> dict[str, dict[str, Any]]:
    """Time every dense baseline on random q, k and v.

    Returns:
        The result of `dense.measure`. If the inputs do not fit into memory, only its field
        ``not_measured``, with this reason for every baseline.
    """
    case = {"layout": layout, "length": length, "head_dim": head_dim}
    try:
        sequences, q, k, v = inputs_of(settings, bench, case)
    except torch.OutOfMemoryError as error:
        return {"not_measured": dict.fromkeys(dense.on(bench.device), in_a_sentence(error))}
    return dense.measure(
        q,
        k,
        v,
        scale=head_dim**-0.5,
        bench=bench,
        backward=backward,
        baselines=baselines(sequences),
        check=sequences.check,
    )


def counted(plan: BlockPlan, heads: int) -> dict[str, float]:
    """Return the fields ``density`` and ``listed_pairs`` of a plan.

    ``listed_pairs`` is the number of (query, key) pairs in the selected blocks of all heads. It
    includes masked pairs in these blocks, because kernels compute them too.
    """
    listed = int(plan.full.counts.sum() + plan.partial.counts.sum())
    pairs = listed * plan.shared_by(heads) * plan.query_block * plan.key_block
    return {"density": plan.density(), "listed_pairs": pairs}


def rates(row: Row) -> dict[str, float]:
    """Return name -> TFLOP/s of attending, for the engines and dense kernels of a row.

    The operations of engines are those of all pairs in selected blocks. The operations of dense
    kernels are those of all causal pairs.
    """
    # rows of earlier versions have no causal_pairs
    causal = row["heads"] * (row["causal_pairs"] or row["batch"] * row["length"] ** 2 / 2)
    pairs = {name: row["listed_pairs"] for name in row["attend_ms"]}
    pairs |= dict.fromkeys(row["baselines"], causal)
    # each of two forward products needs a multiplication and an addition per pair and channel
    operations = 4 * row["head_dim"] * DIRECTIONS[row["direction"]]
    times = row["attend_ms"] | row["baselines"]
    return {name: operations * pairs[name] / ms / 1e9 for name, ms in times.items()}


def _predicts(row: Row) -> bool:
    """Return True if the time of the row includes selecting blocks."""
    return row["direction"] == "forward" and row["budget"] != EVERYTHING


def _times(row: Row) -> Mapping[str, float]:
    """Return a mapping from engines to ms, which include block selection if `_predicts`."""
    return row["total_ms" if _predicts(row) else "attend_ms"]
