"""``speed attention``: predicting and attending, forward and backward, beside dense kernels.

A row is one length, head dim, direction, size of blocks and budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from cab_hf import engines
from cab_hf.config import CabConfig
from cab_hf.eval import charts, dense, report
from cab_hf.eval.speed_heads import INPUTS, HeadSettings, time_baselines
from cab_hf.eval.speed_settings import UNREACHED_MASS
from cab_hf.eval.timing import METHOD_ON_CPU, Bench, in_a_sentence, method_on_gpu
from cab_hf.plan import BlockPlan, Spans
from cab_hf.predictors import Call, make_predictor
from cab_hf.runs.settings import by_device, comma_separated, option

PURPOSE = "time predicting and attending, forward and backward, beside dense kernels"
TITLE = "Speed of attention"
CAPTION = "time and rate of attention by length"
SECONDS = 0.5
# direction -> its floating-point operations over those of the forward pass: five products, not two
DIRECTIONS = {"forward": 1.0, "backward": 2.5}
# whose rate an engine's is held against: the fastest dense kernels known
RATED_AGAINST = {"forward": ("FA3",), "backward": ("FA4",)}
UNREACHED = {**UNREACHED_MASS, "min_length": 0}
EVERYTHING = 1.0  # the budget that leaves nothing out
CHECKED_QUERIES = 32  # in a row, at the start, in the middle and at the end
# what several rows together tell, and what follows from one; made anew whenever a row is added
DERIVED = (
    *("engine", "ms", "baseline", "baseline_ms", "ratio", "extrapolated"),
    *("tflops", "tflops_pairs", "rated_against", "rate_ratio"),
)
ENGINES_ON_GPU = tuple(name for name in engines.ENGINES if name != "reference")


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
    seconds: float = option(SECONDS, "for timing one case, where it needs less for five", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ", ".join(DIRECTIONS)
        self.check("directions", set(self.directions) <= set(DIRECTIONS), f"out of {known}")
        known = ", ".join(engines.ENGINES)
        self.check("engines", set(self.engines) <= set(engines.ENGINES), f"out of {known}")
        self.check("head_dims", min(self.head_dims, default=0) > 0, "at least 1 each")
        self.check("seconds", self.seconds >= 0, "0 or more")
        for key in self.asked():
            self.budgeted(key)

    @property
    def method(self) -> str:
        if self.on_cpu:
            return METHOD_ON_CPU
        return (
            f"{method_on_gpu(self.seconds)}; forward times are those of a CUDA graph where one "
            "could be made, backward times are of torch.autograd.grad alone, called from Python on "
            "a graph that is kept; predict + attend is one call, not a sum; the peak is that of "
            "such a call over its inputs, its result included; every kernel is compared with "
            "float32 attention before it is timed, an engine on rows of the whole length, "
            f"gradients on {dense.CHECK_LENGTH} tokens"
        )

    @cached_property
    def cab_config(self) -> CabConfig:
        """A mass that no budget reaches, so that every row of blocks fills its own."""
        return self.configured(UNREACHED)

    def budgeted(self, key: Mapping[str, Any]) -> CabConfig:
        """The config that fills the budget of ``key``."""
        sizes = key["blocks"].split("x")
        self.check("blocks", len(sizes) == 2 and all(map(str.isdigit, sizes)), "like 128x64")
        query_block, key_block = map(int, sizes)
        return self.configured(
            UNREACHED, max_density=key["budget"], query_block=query_block, key_block=key_block
        )

    def planner(self, key: Mapping[str, Any]) -> Callable[[Tensor, Tensor, Spans], BlockPlan]:
        """(q, k, spans) -> the plan of ``key``."""
        config = self.budgeted(key)
        if key["budget"] == EVERYTHING:
            return lambda q, k, spans: BlockPlan.causal(
                spans, q.shape[1], config.query_block, config.key_block
            )
        predict = make_predictor(config)
        return lambda q, k, spans: predict(q, k, Call(spans, q.shape[-1] ** -0.5))


# --- measuring


def measure(settings: Settings, key: Mapping[str, Any], bench: Bench) -> dict[str, Any]:
    """The row of ``key``, less what is derived. Out of memory is a row too."""
    row = {
        "op": "attention",
        **key,
        **{name: getattr(settings, name) for name in ("batch", "heads", "kv_heads", "dtype")},
        **dict.fromkeys(("density", "attended_pairs", "listed_pairs", "predict_ms", "error")),
        **{name: {} for name in ("attend_ms", "total_ms", "total_eager_ms", "peak_mib", "labels")},
        **{name: {} for name in ("baselines", "not_measured", "without_graph")},
    }
    try:
        _time_engines(row, settings, bench)
    except torch.OutOfMemoryError as error:
        row["error"] = in_a_sentence(error)
    bench.settle()
    if row["length"] <= settings.dense_up_to:
        measured = _dense(settings, row["length"], row["head_dim"], row["direction"], bench)
        row["baselines"] = measured.times
        row["not_measured"] |= measured.not_measured
        row["without_graph"] |= measured.without_graph
        bench.settle()
    return row


@lru_cache(maxsize=1)
def _dense(
    settings: Settings, length: int, head_dim: int, direction: str, bench: Bench
) -> dense.Measured:
    """Measured once for all the blocks and budgets that are compared with it."""
    return time_baselines(settings, length, head_dim, bench, direction == "backward")


@torch.no_grad()
def _time_engines(row: dict[str, Any], settings: Settings, bench: Bench) -> None:
    """Write into ``row`` what predicting and every engine takes, or why it was not measured."""
    length, head_dim = row["length"], row["head_dim"]
    q, k, v = settings.random_heads(length, head_dim, bench.device, "qkv")
    spans = Spans.causal(settings.batch, length, length, bench.device)
    decide = partial(settings.planner(row), q, k, spans)
    plan = decide()
    row |= counted(plan, settings.heads)
    if _predicts(row):
        timing = bench.time(decide)
        row["predict_ms"] = timing.ms
        if timing.why_not:
            row["without_graph"]["predicting"] = timing.why_not
    work = engines.Workload(
        device=bench.device.type,
        head_dim=head_dim,
        dtype=settings.torch_dtype,
        training=row["direction"] == "backward",
        query_block=plan.query_block,
        key_block=plan.key_block,
    )
    for name in settings.engines:
        bench.settle()
        try:
            engine = engines.choose(name, work)
            attend = engine.attention
            check(attend, q, k, v, plan)
            if work.training:
                check_gradients(attend, q, k, v, settings.planner(row))
                _time_backward(
                    row, name, dense.backward_of(attend, q, k, v, plan, scaling(q)), bench
                )
            else:
                _time_forward(row, name, partial(attend, q, k, v), decide, plan, scaling(q), bench)
        except Exception as error:
            # an engine that refuses or is wrong is told of and not measured
            row["not_measured"][name] = in_a_sentence(error)
        else:
            row["labels"][name] = engine.label(work)


def _predicts(row: Mapping[str, Any]) -> bool:
    """Whether predicting is part of what the row times."""
    return row["direction"] == "forward" and row["budget"] != EVERYTHING


def _time_forward(
    row: dict[str, Any],
    name: str,
    attend: Callable[[BlockPlan, float], Tensor],
    decide: Callable[[], BlockPlan],
    plan: BlockPlan,
    scale: float,
    bench: Bench,
) -> None:
    timing = bench.time(lambda: attend(plan, scale))
    row["attend_ms"][name] = timing.ms
    if timing.why_not:
        row["without_graph"][name] = timing.why_not
    if not _predicts(row):
        return
    timing = bench.time(lambda: attend(decide(), scale))
    row["total_ms"][name] = timing.ms
    row["total_eager_ms"][name] = timing.eager
    if timing.why_not:
        row["without_graph"][f"predicting and {name}"] = timing.why_not
    row["peak_mib"][name] = bench.peak(lambda: attend(decide(), scale))[1]


def _time_backward(
    row: dict[str, Any], name: str, backward: Callable[[], Any], bench: Bench
) -> None:
    row["attend_ms"][name] = bench.time(backward, graph=False).ms
    row["peak_mib"][name] = bench.peak(backward)[1]


def scaling(q: Tensor) -> float:
    """What logits are multiplied by."""
    return q.shape[-1] ** -0.5


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


# --- checking


def check(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> None:
    """Compare some rows of queries with float32 attention over what the plan lets them see.

    Raises:
        ArithmeticError: with the relative error, and where.
    """
    out = attend(q, k, v, plan, scaling(q))
    last = max(0, plan.q_length - CHECKED_QUERIES)
    for start in dict.fromkeys((0, last // 2, last)):
        stop = min(start + CHECKED_QUERIES, plan.q_length)
        where = f"in queries {start} to {stop - 1}"
        dense.close(out[:, :, start:stop], exact_rows(q, k, v, plan, start, stop), where)


def exact_rows(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, start: int, stop: int) -> Tensor:
    """Float32 attention of queries ``start`` to ``stop`` under the plan, [B, H, rows, D]."""
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]

    def grouped(x: Tensor) -> Tensor:
        # [B, H, rows, .] -> [B, H_kv, group * rows, .]: no key is repeated
        return x.unflatten(1, (kv_heads, group)).flatten(2, 3)

    mask = plan.token_mask(start, stop)
    mask = mask.repeat_interleave(plan.shared_by(q.shape[1]), dim=1)
    logits = grouped(q[:, :, start:stop].float()) @ k.float().transpose(-1, -2) * scaling(q)
    weights = logits.masked_fill_(~grouped(mask), -torch.inf).softmax(dim=-1)
    return (weights @ v.float()).unflatten(2, (group, -1)).flatten(1, 2)


def check_gradients(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    planner: Callable[[Tensor, Tensor, Spans], BlockPlan],
) -> None:
    """Compare gradients with those of the reference in float32, on the first tokens.

    Raises:
        ArithmeticError: with the relative error, and of which gradient.
    """
    q, k, v = (x[:, :, : dense.CHECK_LENGTH] for x in (q, k, v))
    batch, _, length, _ = q.shape
    plan = planner(q, k, Spans.causal(batch, length, length, q.device))
    found = dense.backward_of(attend, q, k, v, plan, scaling(q))()
    reference = engines.REFERENCE.attention
    exact = dense.backward_of(reference, *(x.float() for x in (q, k, v)), plan, scaling(q))()
    dense.close_gradients(found, exact, f"at {length} tokens")


# --- what rows tell


def derive(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows in order, each with its fastest engine, dense attention and rates (`DERIVED`).

    ``ms`` is that of the fastest engine, predicting included where there is anything to predict;
    ``ratio`` is over the fastest dense kernel, measured at its length or extrapolated. Rates are
    TFLOP/s: of listed blocks for engines (and of attended pairs alone, ``tflops_pairs``), of the
    causal half for dense kernels. ``rate_ratio`` is over `RATED_AGAINST`, or the fastest.
    """
    directions = list(DIRECTIONS)

    def order(row: Mapping[str, Any]) -> tuple[Any, ...]:
        direction = directions.index(row["direction"])
        return row["head_dim"], direction, row["blocks"], row["budget"], row["length"]

    rows = [{**row, **dict.fromkeys(DERIVED)} for row in sorted(rows, key=order)]
    for row in rows:
        alike = [each for each in rows if _same(each, row, "head_dim", "direction")]
        times = row["total_ms" if _predicts(row) else "attend_ms"]
        row["engine"] = min(times, key=times.__getitem__, default=None)
        row["ms"] = times.get(row["engine"])
        against = dense.reference(row, alike, preferred=())
        if against is not None:
            row["baseline"], row["baseline_ms"], row["extrapolated"] = against
            row["ratio"] = None if row["ms"] is None else row["ms"] / against.ms
        row |= _rates(row)
        rated = dense.reference(row, alike, preferred=RATED_AGAINST[row["direction"]])
        if rated is not None:
            row["rated_against"] = rated.name
            rate = dense_flops(row) / rated.ms / 1e9
            row["rate_ratio"] = {name: row["tflops"][name] / rate for name in row["attend_ms"]}
    return rows


def _rates(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    blocks, pairs = (
        {name: flops(row, row[counted]) / ms / 1e9 for name, ms in row["attend_ms"].items()}
        for counted in ("listed_pairs", "attended_pairs")
    )
    kernels = {name: dense_flops(row) / ms / 1e9 for name, ms in row["baselines"].items()}
    return {"tflops": blocks | kernels, "tflops_pairs": pairs}


def flops(row: Mapping[str, Any], pairs: float) -> float:
    """Floating-point operations of that many (query, key) pairs in the row's direction.

    Forward, a pair is a multiplication and an addition per channel, in each of two products.
    """
    return 4 * row["head_dim"] * pairs * DIRECTIONS[row["direction"]]


def dense_flops(row: Mapping[str, Any]) -> float:
    """The same for the causal half of all pairs."""
    return flops(row, row["batch"] * row["heads"] * row["length"] ** 2 / 2)


def _same(row: Mapping[str, Any], other: Mapping[str, Any], *names: str) -> bool:
    return all(row[name] == other[name] for name in names)


def readings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows say, a sentence each: break-even, rates, what is missing and why."""
    told = []
    for alike in _groups(rows, "head_dim", "direction", "blocks", "budget"):
        told += _group_told(alike, _named(alike[0], rows))
    many = len({row["head_dim"] for row in rows}) > 1

    def of(reasons: str) -> Callable[[Mapping[str, Any]], dict[str, str]]:
        def told(row: Mapping[str, Any]) -> dict[str, str]:
            dim = f" at head dim {row['head_dim']}" if many else ""
            return {f"{row['direction']}, {n}{dim}": why for n, why in row[reasons].items()}

        return told

    return [
        *told,
        *report.told_by_length(
            [{**row, "labels": _telling(row["labels"])} for row in rows],
            of("labels"),
            "{name} ran as {why} at {lengths} tokens.",
        ),
        *report.told_by_length(
            rows,
            lambda row: {_named(row, rows): row["error"]} if row["error"] else {},
            "{name}, at {lengths} tokens: {why}.",
        ),
        *report.told_by_length(
            rows,
            of("without_graph"),
            "{name} could not be captured as a CUDA graph at {lengths} tokens and its time is "
            "eager: {why}.",
        ),
        *report.told_by_length(
            rows, of("not_measured"), "{name} was not measured at {lengths} tokens: {why}."
        ),
    ]


def _telling(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that say more than the engine's name."""
    return {name: label for name, label in labels.items() if label != name}


def _groups(rows: Sequence[Mapping[str, Any]], *names: str) -> list[list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def _named(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Which rows ``row`` stands for: its direction and budget, and what else varies."""
    budget = "everything kept" if row["budget"] == EVERYTHING else f"a budget of {row['budget']:g}"
    named = [f"{row['direction']}, {budget}"]
    named += [f"head dim {row['head_dim']}"] * _varies(rows, "head_dim")
    named += [f"blocks {row['blocks']}"] * _varies(rows, "blocks")
    return ", ".join(named)


def _varies(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return len({row[name] for row in rows}) > 1


def _group_told(rows: Sequence[Mapping[str, Any]], named: str) -> list[str]:
    """Where these rows, which differ in length alone, break even, and what the longest reaches."""
    compared = [row for row in rows if row["ratio"] is not None]
    if not compared:
        return []
    last = compared[-1]
    points = [(row["length"], row["ratio"]) for row in compared]
    what = "predict + attend" if _predicts(last) else "attending"
    named = named[0].upper() + named[1:]
    about = " (extrapolated)" if last["extrapolated"] else ""
    name = last["engine"]
    return [
        f"{named}: {what} is faster than the best dense kernel {dense.break_even_told(points)}; "
        f"at {last['length']:,} tokens (density {last['density']:.3f}) {name} takes "
        f"{report.percent(last['ratio'])} of {last['baseline']}'s time{about}; it attends at "
        f"{report.digits(last['tflops'][name])} TFLOP/s of listed blocks "
        f"({report.digits(last['tflops_pairs'][name])} of attended pairs), "
        f"{last['rate_ratio'][name]:.2f} of the rate of {last['rated_against']}.",
    ]


# --- the report


def _shared_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which row it is; what is the same in all rows is no column."""
    columns = {}
    if _varies(rows, "head_dim"):
        columns["head dim"] = "head_dim"
    if _varies(rows, "blocks"):
        columns["blocks"] = "blocks"
    return columns | {"tokens": lambda row: f"{row['length']:,}"}


def _budget(row: Mapping[str, Any]) -> str:
    return "all" if row["budget"] == EVERYTHING else f"{row['budget']:g}"


def _density(row: Mapping[str, Any]) -> str | None:
    return None if row["density"] is None else f"{row['density']:.3f}"


def _of_engine(values: str) -> Callable[[Mapping[str, Any]], str | None]:
    """What the fastest engine of the row has in ``values``."""
    return lambda row: report.digits(row[values].get(row["engine"]) if row[values] else None)


def _rate_over(name: str | None, row: Mapping[str, Any]) -> str | None:
    ratio = (row["rate_ratio"] or {}).get(name)
    return None if ratio is None else f"{ratio:.2f} {row['rated_against']}"


COLUMNS = {
    "budget": _budget,
    "density": _density,
    "predict ms": lambda row: report.digits(row["predict_ms"]),
    "attend ms": _of_engine("attend_ms"),
    "predict + attend ms": _of_engine("total_ms"),
    "engine": "engine",
    "dense ms": dense.time_told,
    "of dense": lambda row: report.percent(row["ratio"]),
    "TFLOP/s of blocks": _of_engine("tflops"),
    "of pairs": _of_engine("tflops_pairs"),
    "rate over": lambda row: _rate_over(row["engine"], row),
}
FORWARD_ONLY = ("predict ms", "predict + attend ms")


def overview(rows: Sequence[Mapping[str, Any]]) -> str:
    """The fastest engine of every row beside the fastest dense kernel, a table a direction."""
    tables = []
    for direction, some in _by_direction(rows):
        columns = {
            heading: get
            for heading, get in COLUMNS.items()
            if direction == "forward" or heading not in FORWARD_ONLY
        }
        table = report.markdown_table(some, _shared_columns(rows) | columns)
        tables.append(f"{direction.capitalize()}:\n\n{table}")
    return "\n\n".join(tables)


def _by_direction(
    rows: Sequence[Mapping[str, Any]],
) -> list[tuple[str, list[Mapping[str, Any]]]]:
    return [(some[0]["direction"], some) for some in _groups(rows, "direction")]


def _named_in(rows: Sequence[Mapping[str, Any]], values: str) -> list[str]:
    """The names in ``values`` of any row, each once."""
    return list(dict.fromkeys(name for row in rows for name in row[values]))


def _timed(name: str, times: str) -> Callable[[Mapping[str, Any]], str | None]:
    """``2.61 (628)``: ms and TFLOP/s."""

    def cell(row: Mapping[str, Any]) -> str | None:
        if name not in row[times]:
            return None
        return f"{report.digits(row[times][name])} ({report.digits(row['tflops'][name])})"

    return cell


def sections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The other tables: every engine, what it costs to call it, every dense kernel."""
    made = []
    for direction, some in _by_direction(rows):
        shared = _shared_columns(rows) | {"budget": _budget, "density": _density}
        columns = {}
        for name in _named_in(some, "attend_ms"):
            columns[f"{name} ms (TFLOP/s)"] = _timed(name, "attend_ms")
            columns[f"{name} rate over"] = partial(_rate_over, name)
        made.append(_section(f"Attending, {direction}, by engine", some, shared, columns))
        costs = {}
        for name in _named_in(some, "peak_mib"):
            if direction == "forward":
                costs[f"{name} ms"] = _value("total_ms", name)
                costs[f"{name} from Python ms"] = _value("total_eager_ms", name)
            costs[f"{name} peak MiB"] = _value("peak_mib", name)
        costly = [row for row in some if row["peak_mib"]]
        heading = "Predict + attend" if direction == "forward" else "Memory"
        made.append(_section(f"{heading}, {direction}, by engine", costly, shared, costs))
        names = _named_in(some, "baselines")
        columns = {f"{name} ms (TFLOP/s)": _timed(name, "baselines") for name in names}
        once = [alike[0] for alike in _groups(some, "head_dim", "length")]
        shared = _shared_columns(once)
        made.append(_section(f"Dense causal attention, {direction}", once, shared, columns))
    return [section for section in made if section]


def _value(values: str, name: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda row: report.digits(row[values].get(name))


def _section(
    heading: str,
    rows: Sequence[Mapping[str, Any]],
    shared: Mapping[str, Any],
    columns: Mapping[str, Any],
) -> str:
    """A table under its heading; nothing where it has no columns of its own."""
    if not rows or not columns:
        return ""
    return f"{heading}:\n\n{report.markdown_table(rows, {**shared, **columns})}"


def notes(settings: Mapping[str, Any]) -> str:
    """What the words of the report mean."""
    rated = " or ".join(name for names in RATED_AGAINST.values() for name in names)
    return (
        "A budget is max_density of a predictor that asks for nearly all of the mass, so that "
        "every row of blocks fills it; density is what came of it, attended over causal (query, "
        f"key) pairs. Inputs are {INPUTS[settings['inputs']]}; no model made them. TFLOP/s count "
        "four operations a pair and channel forward and ten backward: of blocks, every pair of a "
        "listed block, masked or not; of pairs, those attended alone; of dense kernels, half of "
        "all. Rates leave predicting out. Rate over: the rate of blocks over that of "
        f"{rated} (forward or backward), or of the fastest dense kernel. Efficient attention takes "
        "no grouped heads: k and v are repeated before the clock starts. A break-even length lies "
        "between two measured ones on a line through logarithms. ≈: extrapolated by N² beyond "
        f"{settings['dense_up_to']:,} tokens."
    )


# --- the figure


def draw(path: Path | str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Time and rate by length: a row of panels for every direction, head dim and size of blocks."""
    panels = _groups(rows, "head_dim", "blocks", "direction")
    # one grey a kernel, in every panel
    greys = dict(zip(_named_in(rows, "baselines"), charts.GREYS, strict=False))
    with charts.figure(path, len(panels), 2, figsize=(12, 4.8 * len(panels))) as axes:
        for (left, right), some in zip(axes, panels, strict=True):
            _draw_lines(left, some, greys, _time_of)
            _draw_lines(right, some, greys, _rate_of)
            first = some[0]
            named = f"{first['direction']}, head dim {first['head_dim']}, blocks {first['blocks']}"
            predicted = " (predicting included)" if first["direction"] == "forward" else ""
            left.set_title(f"{named}: time{predicted}", fontsize=10)
            right.set_title("rate of attending: listed blocks, dense half", fontsize=10)
            left.set_ylabel("ms")
            right.set_ylabel("TFLOP/s")
            lengths = [row["length"] for row in some]
            charts.over_tokens(left, lengths)
            charts.over_tokens(right, lengths, log=False, legend=False)


def _time_of(name: str, row: Mapping[str, Any]) -> float | None:
    return row["total_ms"].get(name, row["attend_ms"].get(name, row["baselines"].get(name)))


def _rate_of(name: str, row: Mapping[str, Any]) -> float | None:
    return row["tflops"].get(name)


def _draw_lines(
    axis: Any,
    rows: Sequence[Mapping[str, Any]],
    greys: Mapping[str, str],
    value: Callable[[str, Mapping[str, Any]], float | None],
) -> None:
    names = _named_in(rows, "attend_ms")
    for colour, alike in enumerate(_groups(rows, "budget")):
        for name, style in zip(names, ("-", "--", ":"), strict=False):
            label = f"{name}, {_budget(alike[0])}"
            look = {"color": f"C{colour}", "linestyle": style, "label": label}
            charts.line(axis, alike, partial(value, name), **look)
    once = [alike[0] for alike in _groups(rows, "length")]
    for name, grey in greys.items():
        look = {"color": grey, "linewidth": 1.2, "marker": "s", "label": f"{name} dense"}
        charts.line(axis, once, partial(value, name), **look)
