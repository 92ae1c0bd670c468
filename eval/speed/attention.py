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
from cab_hf.eval.report import format_percent, group_rows
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.dense import CHECK_LENGTH, check_attention, check_gradients, make_backward
from cab_hf.eval.speed.layouts import LAYOUTS, WHOLE_LAYOUT, Sequences, make_baselines
from cab_hf.eval.speed.runner import (
    ALL_BLOCKS_FIELDS,
    INPUTS_DESCRIPTION,
    Panel,
    Speed,
    SpeedSettings,
    format_run_description,
    list_distinct_values,
    make_list_option,
    select_varying_columns,
)
from cab_hf.eval.speed.timing import Bench, describe_timing, summarise_error
from cab_hf.experiment.settings import flag, option
from cab_hf.hf.rotary import slow_channels_of_llama
from cab_hf.plan import BlockPlan, KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

# direction -> operations relative to the forward pass: five products instead of two
DIRECTIONS = {"forward": 1.0, "backward": 2.5}
ALL_BLOCKS_BUDGET = 1.0  # the budget that keeps all blocks
ENGINES_ON_GPU = ("flex", "triton")
# fields of a sample that map names of engines to values
ENGINE_FIELDS = ("attend_ms", "total_ms", "total_eager_ms", "peak_mib", "labels")
# a group of rows has equal values in these fields, and differs only in length
CONFIGURATION_FIELDS = ("head_dim", "direction", "blocks", "layout", "budget")


@dataclass(frozen=True)
class Settings(SpeedSettings):
    """Settings of a run of ``speed attention``."""

    CASE_OPTIONS = {"length": "lengths", "head_dim": "head_dims", "direction": "directions"}
    CASE_OPTIONS |= {"blocks": "blocks", "layout": "layouts", "budget": "densities"}
    CONFIG_DEFAULTS = {**ALL_BLOCKS_FIELDS, "min_length": 0}
    POSITIVE = ("batch", "kv_heads", "head_dims")
    NON_NEGATIVE = ("dense_up_to", "seconds")
    CHOICES = {"directions": DIRECTIONS, "engines": engines.ENGINES, "layouts": LAYOUTS}

    batch: int = option(1, "sequences", int)
    heads: int = option(32, "query heads", int)
    kv_heads: int = option(8, "key and value heads", int)
    dense_up_to: int = option(
        2**17, "longest measured length of dense attention; N² extrapolation beyond", int
    )
    head_dims: tuple[int, ...] | None = make_list_option((128,), (32,), "head dims", int)
    densities: tuple[float, ...] = make_list_option(
        (0.05, 0.1, 0.2, ALL_BLOCKS_BUDGET),
        None,
        "max_density, which is used completely; 1: all blocks",
        float,
    )
    blocks: tuple[str, ...] | None = make_list_option(
        ("128x64",), ("32x16",), "block sizes, query block x key block", str.lower
    )
    directions: tuple[str, ...] = make_list_option(
        tuple(DIRECTIONS), None, "forward, backward or both"
    )
    layouts: tuple[str, ...] = make_list_option(
        (WHOLE_LAYOUT,), None, f"layouts of a batch: {', '.join(LAYOUTS)}"
    )
    engines: tuple[str, ...] | None = make_list_option(
        ENGINES_ON_GPU, ("reference",), "attention engines"
    )
    sinks: bool = flag("give each head an attention sink, a logit without a key")
    seconds: float = option(0.5, "seconds for timing one case, at least five runs", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        # gradients of dense kernels are checked only for the layout `WHOLE_LAYOUT`
        are_gradients_checked = self.layouts == (WHOLE_LAYOUT,) or self.directions == ("forward",)
        self.require_option(
            "directions", are_gradients_checked, f"forward for layouts other than {WHOLE_LAYOUT}"
        )

    def configs(self) -> list[CabConfig]:
        return [self.make_config_for_case(case) for case in self.list_requested_cases()]

    @property
    def method_description(self) -> str:
        return (
            f"{describe_timing(self.device, self.seconds)}; backward times are those of "
            "torch.autograd.grad alone, called from Python; predict + attend is one call, and "
            "its peak excludes its inputs and includes its result; every kernel is compared with "
            "float32 attention before it is timed, an engine at the whole length, gradients on "
            f"{CHECK_LENGTH} tokens"
        )

    def make_config_for_case(self, case: Mapping[str, Any]) -> CabConfig:
        """Return CAB's config with the block sizes of ``case`` and its budget as max_density."""
        block_sizes = case["blocks"].split("x")
        self.require_option(
            "blocks", len(block_sizes) == 2 and all(map(str.isdigit, block_sizes)), "like 128x64"
        )
        query_block, key_block = map(int, block_sizes)
        return self.make_measured_config(
            max_density=case["budget"], query_block=query_block, key_block=key_block
        )

    def make_planner(
        self, case: Mapping[str, Any], sinks: Tensor | None = None
    ) -> Callable[[Tensor, Tensor, KeyRanges], BlockPlan]:
        """Return a function of q, k and ranges that returns a plan.

        Args:
            case: the case with blocks and budget.
            sinks: logits [H] of attention sinks; None without sinks.
        """
        config = self.make_config_for_case(case)
        if case["budget"] == ALL_BLOCKS_BUDGET:
            return lambda q, k, ranges: BlockPlan.causal(
                ranges, q.shape[1], query_block=config.query_block, key_block=config.key_block
            )
        predict = make_predictor(config)
        # in a cascade, only anchor layers select blocks: use the first anchor layer
        layer_index = config.anchors[0] if config.anchors else None

        def select_blocks(q: Tensor, k: Tensor, ranges: KeyRanges) -> BlockPlan:
            head_dim = q.shape[-1]
            context = LayerContext(
                ranges,
                head_dim**-0.5,
                layer_index,
                channels=slow_channels_of_llama(head_dim),
                sinks=sinks,
            )
            return predict(q, k, context)

        return select_blocks

    def draw_random_sinks(self, device: torch.device) -> Tensor | None:
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
    CASE_FIELDS = tuple(Settings.CASE_OPTIONS)
    EXTENSIBLE_SETTINGS = (*Settings.CASE_OPTIONS.values(), "cab")

    ADDED_DEFAULTS = {"layout": WHOLE_LAYOUT, "causal_pairs": None}
    COPIED_SETTINGS = ("batch", "heads", "kv_heads", "dtype")
    RESULT_FIELDS = ("density", "listed_pairs", "causal_pairs", "predict_ms")
    RESULT_FIELDS_BY_NAME = (*ENGINE_FIELDS, *dense.BASELINE_FIELDS)
    GROUP_FIELDS = {
        "direction": "direction",
        "head dim": "head_dim",
        "blocks": "blocks",
        "layout": "layout",
    }
    GROUP_FIELDS |= {"budget": "budget", "way": "way"}
    PANEL_HEADINGS = ("direction", "head dim", "blocks", "layout")
    DENSE_FIELDS = ("direction", "head_dim", "layout")
    DENSE_VALUE_FIELDS = {"ms": "baselines", "tflops": "tflops"}
    HIDDEN_FIELDS = ("engine", "total_ms", "attended_pairs", "listed_pairs", "causal_pairs")
    LONGEST_FIRST = True
    PANELS = (
        Panel("time", "ms", ("ms",)),
        Panel("rate of attending", "TFLOP/s", ("tflops",), is_logarithmic=False),
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
    def describe_run(settings: Mapping[str, Any]) -> str:
        head_dims = ", ".join(map(str, settings["head_dims"]))
        description = format_run_description(
            f"Batch {settings['batch']}, {settings['heads']} query heads and "
            f"{settings['kv_heads']} KV heads of {head_dims} channels, {settings['dtype']}; inputs "
            f"are {INPUTS_DESCRIPTION}, not those of a model",
            settings,
        )
        longest_measured_length = settings["dense_up_to"]
        extrapolation_note = (
            f"≈: extrapolated by N² beyond {longest_measured_length:,} tokens. "
            f"{dense.BREAK_EVEN_NOTE}"
        )
        return f"{description}\n\n{extrapolation_note}"

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        sample, settings = super().measure(case), self.settings
        if case["length"] <= settings.dense_up_to:
            for field, values_by_kernel in time_baselines(
                settings,
                self.bench,
                layout=case["layout"],
                length=case["length"],
                head_dim=case["head_dim"],
                backward=case["direction"] == "backward",
            ).items():
                sample[field] |= values_by_kernel
            self.bench.free_memory()
        return sample

    @torch.no_grad()
    def fill_sample(self, sample: dict[str, Any]) -> None:
        settings, bench = self.settings, self.bench
        sequences, q, k, v = make_inputs(settings, bench, sample)
        config = settings.make_config_for_case(sample)
        layout = sequences.make_block_layout(config.query_block, config.key_block)
        sinks = settings.draw_random_sinks(bench.device)
        layer = Layer(
            q, k, v, layout=layout, planner=settings.make_planner(sample, sinks), sinks=sinks
        )
        plan = layer.select_blocks()
        sample |= count_pairs(plan, settings.heads) | {"causal_pairs": sequences.num_causal_pairs}
        if _includes_selection(sample):
            sample["predict_ms"] = self.time_call(sample, "predicting", layer.select_blocks).ms
        workload = engines.Workload(
            device=bench.device.type,
            head_dim=sample["head_dim"],
            dtype=settings.torch_dtype,
            training=sample["direction"] == "backward",
            query_block=plan.query_block,
            key_block=plan.key_block,
            sinks=settings.sinks,
        )
        for engine_name in settings.engines:
            bench.free_memory()
            try:
                engine = engines.choose(engine_name, workload)
                layer.check_engine(engine, plan, backward=workload.training)
                self.time_engine(
                    sample=sample, engine_name=engine_name, engine=engine, layer=layer, plan=plan
                )
            except Exception as error:
                # an engine that raises an error or is wrong is reported and not measured
                sample["not_measured"][engine_name] = summarise_error(error)
            else:
                sample["labels"][engine_name] = engine.label(workload)

    def time_engine(
        self,
        sample: dict[str, Any],
        engine_name: str,
        engine: Engine,
        layer: Layer,
        plan: BlockPlan,
    ) -> None:
        """Add the times of an engine to ``sample``: of attention alone, and with block selection.

        Args:
            sample: result record of a case.
            engine_name: name of the engine in results.
            engine: the engine.
            layer: the layer.
            plan: the plan of the layer.
        """
        q, k, v = layer.reorder_inputs()
        attend_by_engine = partial(layer.attend, engine=engine, plan=plan)
        if sample["direction"] == "backward":
            timed_call = make_backward(attend_by_engine, q, k, v)
            sample["attend_ms"][engine_name] = self.bench.time(timed_call, has_graph=False).ms
        else:
            sample["attend_ms"][engine_name] = self.time_call(
                sample, engine_name, partial(attend_by_engine, q, k, v)
            ).ms
            if not _includes_selection(sample):
                return
            timed_call = partial(layer.select_and_attend, engine)
            timing = self.time_call(sample, f"predicting and {engine_name}", timed_call)
            sample["total_ms"][engine_name], sample["total_eager_ms"][engine_name] = (
                timing.ms,
                timing.eager_ms,
            )
        sample["peak_mib"][engine_name] = self.bench.measure_peak(timed_call)[1]

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
        for comparable_rows in group_rows(rows, ["head_dim", "direction", "layout"]):
            for row in comparable_rows:
                ms_by_engine = _get_ms_by_engine(row)
                row["engine"] = min(ms_by_engine, key=ms_by_engine.__getitem__, default=None)
                row["ms"] = ms_by_engine.get(row["engine"])
                row |= dense.compare_with_dense(row, comparable_rows, preferred_names=()) | {
                    "tflops": compute_tflops(row)
                }
        return rows

    @classmethod
    def display_rows(cls, rows: Sequence[Row]) -> list[Row]:
        """Return one row per engine, with the break-even length against dense attention."""
        value_fields, engine_rows = (*ENGINE_FIELDS, "tflops"), []
        # these columns come first
        leading_fields = dict.fromkeys(("density", "ms", "baseline", "baseline_ms", "ratio"))
        for row in rows:
            for engine_name, ms in _get_ms_by_engine(row).items():
                engine_fields = {
                    field: (row[field] or {}).get(engine_name) for field in value_fields
                }
                ratio = row["baseline_ms"] and ms / row["baseline_ms"]
                engine_fields |= {"ms": ms, "ratio": ratio, "way": f"cab {engine_name}"}
                engine_rows.append({**leading_fields, **row, **engine_fields})
        for engine_group in group_rows(engine_rows, [*CONFIGURATION_FIELDS, "way"]):
            break_even = dense.describe_break_even(engine_group)
            for row in engine_group:
                row["break_even"] = break_even
        return engine_rows

    @staticmethod
    def summary_sentences(rows: Sequence[Row]) -> list[str]:
        """Return a sentence per direction that compares the smallest budget with dense attention.

        The sentence is about the longest sequence that was measured with this budget.
        """
        sentences = []
        timed_rows = [row for row in rows if row["ratio"] is not None]
        for direction_rows in group_rows(timed_rows, ["direction"]):
            row = min(direction_rows, key=lambda row: (row["budget"], -row["length"], row["ratio"]))
            configuration_rows = [
                other_row
                for other_row in direction_rows
                if all(
                    other_row[field_name] == row[field_name] for field_name in CONFIGURATION_FIELDS
                )
            ]
            columns = {"head dim": "head_dim", "blocks": "blocks", "layout": "layout"}
            distinguishing_values = list_distinct_values(row, select_varying_columns(rows, columns))
            density_phrase = f"{format_percent(row['density'])} of the pairs by {row['engine']}"
            selection_phrases = ["selecting blocks included"] if _includes_selection(row) else []
            subject = ", ".join(
                [
                    f"{row['direction']} of {density_phrase}",
                    *distinguishing_values,
                    *selection_phrases,
                ]
            )
            sentences.append(dense.describe_speed(configuration_rows, subject))
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

    def reorder_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v in the order of the layout."""
        return self.layout.queries(self.q), self.layout.keys(self.k), self.layout.keys(self.v)

    def select_blocks(self) -> BlockPlan:
        """Reorder q and k, select blocks, and return the plan."""
        layout = self.layout
        return self.planner(layout.queries(self.q), layout.keys(self.k), layout.ranges)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, engine: Engine, plan: BlockPlan) -> Tensor:
        """Return attention in the order of the inputs, [B, H, N, D].

        Args:
            q, k, v: result of `reorder_inputs`.
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

    def select_and_attend(self, engine: Engine) -> Tensor:
        """Reorder the inputs once, select blocks, and return attention [B, H, N, D]."""
        q, k, v = self.reorder_inputs()
        plan = self.planner(q, k, self.layout.ranges)
        return self.attend(q, k, v, engine=engine, plan=plan)

    def check_engine(self, engine: Engine, plan: BlockPlan, backward: bool) -> None:
        """Compare an engine with float32 attention, and also its gradients for ``backward``.

        Raises:
            ArithmeticError: a relative error exceeds its tolerance.
        """
        q, k, v = self.reorder_inputs()
        out = engine.attention(q, k, v, plan, scale=q.shape[-1] ** -0.5)
        check_attention(out=out, q=q, k=k, v=v, plan=plan)
        if backward:
            check_gradients(engine.attention, q=q, k=k, v=v, planner=self.planner)


def make_inputs(
    settings: Settings, bench: Bench, case: Mapping[str, Any]
) -> tuple[Sequences, Tensor, Tensor, Tensor]:
    """Return (sequences, q, k, v) of a case: random lengths, and random tensors in their layout.

    q is [rows, H, slots, D]; k and v are [rows, H_kv, slots, D].
    """
    sequences = Sequences.draw_random(
        case["layout"],
        batch=settings.batch,
        length=case["length"],
        seed=settings.seed,
        device=bench.device,
    )
    q, k, v = settings.draw_random_heads(
        sequences.num_slots,
        head_dim=case["head_dim"],
        device=bench.device,
        tensor_names="qkv",
        batch=sequences.num_rows,
    )
    return sequences, q, k, v


# the times do not depend on the budget, so the cases of all budgets use the same cached result
@lru_cache(maxsize=1)
def time_baselines(
    settings: Settings, bench: Bench, *, layout: str, length: int, head_dim: int, backward: bool
) -> dict[str, dict[str, Any]]:
    """Time every dense baseline on random q, k and v.

    Returns:
        The result of `dense.measure_baselines`. If the inputs do not fit into memory, only the
        field ``not_measured``, with this reason for every baseline.
    """
    case = {"layout": layout, "length": length, "head_dim": head_dim}
    try:
        sequences, q, k, v = make_inputs(settings, bench, case)
    except torch.OutOfMemoryError as error:
        return {
            "not_measured": dict.fromkeys(dense.get_baselines(bench.device), summarise_error(error))
        }
    return dense.measure_baselines(
        q,
        k,
        v,
        scale=head_dim**-0.5,
        bench=bench,
        backward=backward,
        baselines=make_baselines(sequences),
        check_kernel=sequences.check_kernel,
    )


def count_pairs(plan: BlockPlan, num_heads: int) -> dict[str, float]:
    """Return the fields ``density`` and ``listed_pairs`` of a plan.

    ``listed_pairs`` is the number of (query, key) pairs in the selected blocks of all heads. It
    includes masked pairs in these blocks, because kernels compute them too.
    """
    num_listed_blocks = int(plan.full.counts.sum() + plan.partial.counts.sum())
    num_listed_pairs = (
        num_listed_blocks * plan.shared_by(num_heads) * plan.query_block * plan.key_block
    )
    return {"density": plan.density(), "listed_pairs": num_listed_pairs}


def compute_tflops(row: Row) -> dict[str, float]:
    """Return name -> TFLOP/s of attending, for the engines and dense kernels of a row.

    The operations of engines are those of all pairs in selected blocks. The operations of dense
    kernels are those of all causal pairs.
    """
    # rows of earlier versions have no causal_pairs
    num_causal_pairs = row["heads"] * (row["causal_pairs"] or row["batch"] * row["length"] ** 2 / 2)
    num_pairs_by_kernel = {kernel_name: row["listed_pairs"] for kernel_name in row["attend_ms"]}
    num_pairs_by_kernel |= dict.fromkeys(row["baselines"], num_causal_pairs)
    # each of two forward products needs a multiplication and an addition per pair and channel
    flops_per_pair = 4 * row["head_dim"] * DIRECTIONS[row["direction"]]
    ms_by_kernel = row["attend_ms"] | row["baselines"]
    return {
        kernel_name: flops_per_pair * num_pairs_by_kernel[kernel_name] / ms / 1e9
        for kernel_name, ms in ms_by_kernel.items()
    }


def _includes_selection(row: Row) -> bool:
    """Return True if the time of the row includes selecting blocks."""
    return row["direction"] == "forward" and row["budget"] != ALL_BLOCKS_BUDGET


def _get_ms_by_engine(row: Row) -> Mapping[str, float]:
    """Return engine -> ms, which include block selection if `_includes_selection`."""
    return row["total_ms" if _includes_selection(row) else "attend_ms"]
