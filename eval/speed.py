"""How long an op takes, beside the best dense attention in the same run: ``speed predictor``.

A row is one length. Rows are measured one by one and written to ``results.json`` as they come;
``results.csv``, ``report.md`` and ``speed.png`` are derived from that file.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.eval import dense, report
from cab_hf.eval.settings import (
    add_options,
    comma_separated,
    option,
    parse_assignment,
    read_options,
)
from cab_hf.plan import BlockPlan, Spans
from cab_hf.predictor import make_predictor

GPU_LENGTHS = tuple(2**n for n in range(10, 21))
CPU_LENGTHS = (256, 512)
DTYPES = ("bfloat16", "float16", "float32")

WARM_UP_CALLS = 3
WARM_UP_SECONDS = 0.1  # an idle GPU takes a while to reach its clocks
LEAST_RUNS = 5
MOST_RUNS = 100
SECONDS_A_CASE = 1.5
PROFILED_CALLS = 5
INPUTS = {
    "topics": "random with the block structure of text (runs of tokens that share a direction)",
    "noise": "white noise, where every block matters alike",
}
# of inputs with the structure of text: directions, tokens that share one, its size beside the noise
TOPICS = 64
TOPIC_TOKENS = 512
TOPIC_STRENGTH = 0.8
FLUSHED_BYTES = 256 << 20  # several times the L2 of any GPU there is
METHOD = {
    "cuda": (
        f"median of {LEAST_RUNS} to {MOST_RUNS} runs ({SECONDS_A_CASE} s where there is time for "
        f"more), timed by CUDA events after at least {WARM_UP_CALLS} calls and {WARM_UP_SECONDS} s "
        f"of warm-up; {FLUSHED_BYTES >> 20} MiB are zeroed before every run, outside of the "
        "events, so the L2 cache is cold; ms is the replay of a CUDA graph of the op, for the "
        "dense baselines too, and eager_ms the same calls made from Python; the parts are kernel "
        f"times of the profiler, median of {PROFILED_CALLS} eager calls; the peak is that of an "
        "eager call over its inputs, its result included"
    ),
    "cpu": (
        f"median of {LEAST_RUNS} to {MOST_RUNS} runs by time.perf_counter after at least "
        f"{WARM_UP_CALLS} calls and {WARM_UP_SECONDS} s of warm-up; a functional check, no result"
    ),
}

# part of the predictor -> what the names of its kernels contain; the first that fits
PARTS = {
    "coarsen": ("coarsen",),
    "curvature": ("block_scores", "affinity", "two_hop", "column_strength"),
    "select": ("select", "lists"),
}
OTHER = "other"

GROWTH_FROM = 131_072  # tokens from which growth is summed up, where there are such rows
# what only several rows together tell; computed anew whenever one is added
DERIVED = (
    "baseline",
    "baseline_ms",
    "ratio",
    "extrapolated",
    "growth",
    "growth_linear",
    "growth_quadratic",
    "exponent",
)


# --- settings


@dataclass(frozen=True)
class Settings:
    """What a run is told. None stands for a default that depends on the device.

    Raises:
        ValueError: naming the option, the value seen and what is accepted.
    """

    lengths: tuple[int, ...] | None = option(
        None,
        "tokens, separated by commas or spaces (default: 1024 to 1048576, doubling; "
        f"{' '.join(map(str, CPU_LENGTHS))} on CPU)",
        comma_separated(int),
    )
    batch: int = option(1, "sequences", int)
    heads: int = option(32, "query heads", int)
    kv_heads: int = option(8, "key and value heads", int)
    head_dim: int = option(128, "channels of a head", int)
    inputs: str = option("topics", "topics (blocks differ, as in text) or noise (they do not)")
    dtype: str | None = option(None, f"{', '.join(DTYPES)} (default: float32 on CPU, bfloat16)")
    config: tuple[str, ...] = option(
        (), "field=value of CabConfig, e.g. mass=0.8; repeatable", repeatable=True
    )
    dense_up_to: int = option(
        131_072, "tokens up to which dense attention is run; beyond, it is extrapolated by N²", int
    )
    out: str = option("speed_results", "folder for the results; a run found there goes on")
    seed: int = option(0, "of the inputs", int)
    device: str | None = option(None, "torch device; the default is the GPU, and cpu is for tests")

    def __post_init__(self) -> None:
        device = self.device or "cuda"
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device is {device!r} and torch finds no CUDA device; run it where there is a "
                "GPU, or see it work at tiny lengths with --device cpu."
            )
        small = torch.device(device).type == "cpu"
        resolved = {
            "device": device,
            "dtype": self.dtype or ("float32" if small else "bfloat16"),
            "lengths": tuple(sorted(set(self.lengths or (CPU_LENGTHS if small else GPU_LENGTHS)))),
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        self._check("lengths", self.lengths[0] > 0, "numbers of tokens")
        for name in ("batch", "kv_heads", "head_dim"):
            self._check(name, getattr(self, name) > 0, "at least 1")
        divides = self.heads > 0 and self.heads % self.kv_heads == 0
        self._check("heads", divides, f"a multiple of kv_heads={self.kv_heads}")
        self._check("inputs", self.inputs in INPUTS, " or ".join(INPUTS))
        self._check("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        self._check("dense_up_to", self.dense_up_to >= 0, "a number of tokens, 0 for never")
        _ = self.cab_config  # refuses bad fields here rather than in the middle of a run

    def _check(self, name: str, holds: object, accepted: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {accepted}; got {getattr(self, name)!r}.")

    @cached_property
    def cab_config(self) -> CabConfig:
        """CAB's config: ``--config`` over the defaults."""
        return CabConfig.from_dict(dict(map(parse_assignment, self.config)))

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def identity(self) -> dict[str, Any]:
        """What a row depends on, without paths. Lengths are left out: a run can be extended."""
        left_out = ("lengths", "out", "config")
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        method = METHOD[torch.device(self.device).type]
        return {**kept, "cab_config": self.cab_config.to_dict(), "method": method}


def read_yaml(path: Path | str, kind: type) -> dict[str, Any]:
    """The settings in a YAML file, a mapping from option to value, by field of ``kind``.

    Values are what would be typed on the command line; lists may be lists, and ``config`` a
    mapping. ValueError for a file that is none, an option there is not, a value that is refused.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"settings must be a YAML file; {path}: {in_a_sentence(error)}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"settings must be a mapping from option to value; {path} holds none.")
    known = {field.name: field for field in fields(kind)}
    read = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"{path} sets {key!r}; the options are {', '.join(known)}.")
        metadata = known[name].metadata
        if isinstance(value, dict):
            value = [f"{field}={setting!r}" for field, setting in value.items()]
        items = value if isinstance(value, list) else [value]
        try:
            if metadata["repeatable"]:
                read[name] = [metadata["parse"](str(item)) for item in items]
            elif value is not None:
                read[name] = metadata["parse"](",".join(map(str, items)))
        except ValueError as error:
            raise ValueError(f"{path}, {key}: {error}") from error
    return read


def with_commas(words: Sequence[str]) -> list[str]:
    """``--lengths 1024 2048`` as ``--lengths 1024,2048``, which is what options understand."""
    joined: list[str] = []
    last_option, values = "", 0
    for word in words:
        if word.startswith("-"):
            last_option, values = word, 0
        elif last_option == "--lengths":
            values += 1
        if values > 1:
            joined[-1] += f",{word}"
        else:
            joined.append(word)
    return joined


# --- timing


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: made from Python, and replayed from a CUDA graph.

    ``graph`` is None where there is no graph, and ``why_not`` says why one could not be made.
    """

    eager: float
    graph: float | None = None
    why_not: str | None = None

    @property
    def ms(self) -> float:
        return self.eager if self.graph is None else self.graph


class CpuBench:
    """The clock for tests: no graph, no peak, no kernels."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def settle(self) -> None:
        """Give back what nobody holds."""
        gc.collect()

    def peak(self, call: Callable[[], Any]) -> tuple[Any, float | None]:
        """(what ``call`` returns, MiB it needed at its peak, its result included)."""
        return call(), None

    def time(self, call: Callable[[], Any]) -> Timing:
        def once() -> float:
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e3

        runs = number_of_runs(warm_up(call))
        return Timing(statistics.median(once() for _ in range(runs)))

    def kernels(self, call: Callable[[], Any]) -> list[list[tuple[str, float]]]:
        """(name, ms) of the kernels of every profiled call."""
        raise RuntimeError("there is no GPU to profile")


class GpuBench:
    """CUDA events, cold L2, graphs, peak memory and kernel times."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        self.flushed = torch.empty(FLUSHED_BYTES, device=self.device, dtype=torch.uint8)

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def peak(self, call: Callable[[], Any]) -> tuple[Any, float]:
        self.settle()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        return result, (torch.cuda.max_memory_allocated() - before) / 2**20

    def time(self, call: Callable[[], Any]) -> Timing:
        eager = self._median(call)
        try:
            graph = self._captured(call)
            return Timing(eager, self._median(graph.replay))
        except Exception as error:
            # whatever a capture refuses, the eager time stands and the row says why it is alone.
            # ending a broken capture raises too: the first error is the reason
            while error.__context__ is not None:
                error = error.__context__
            return Timing(eager, why_not=in_a_sentence(error))

    def kernels(self, call: Callable[[], Any]) -> list[list[tuple[str, float]]]:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        calls = []
        for _ in range(PROFILED_CALLS):
            # before the profiler looks: what empties the cache is not the op's
            self.flushed.zero_()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                call()
                torch.cuda.synchronize()
            calls.append(
                [
                    (event.name, event.time_range.elapsed_us() / 1e3)
                    for event in seen.events()
                    if event.device_type == DeviceType.CUDA
                ]
            )
        if not all(calls):
            raise RuntimeError("the profiler saw no kernels")
        return calls

    def _median(self, call: Callable[[], Any]) -> float:
        runs = number_of_runs(warm_up(call, torch.cuda.synchronize))
        starts, ends = (
            [torch.cuda.Event(enable_timing=True) for _ in range(runs)] for _ in range(2)
        )
        for start, end in zip(starts, ends, strict=True):
            self.flushed.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(map(torch.cuda.Event.elapsed_time, starts, ends))

    def _captured(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # the outer context puts the stream back even when ending the capture raises
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=stream):
            call()
        return graph


Bench = CpuBench | GpuBench


def warm_up(call: Callable[[], Any], wait: Callable[[], None] = lambda: None) -> float:
    """Call until it is warm; the seconds the last call took."""
    began = time.perf_counter()
    calls = 0
    while True:
        started = time.perf_counter()
        call()
        wait()
        now = time.perf_counter()
        calls += 1
        if calls >= WARM_UP_CALLS and now - began >= WARM_UP_SECONDS:
            return now - started


def number_of_runs(seconds: float) -> int:
    """How often a call of that many seconds is timed."""
    return min(MOST_RUNS, max(LEAST_RUNS, int(SECONDS_A_CASE / max(seconds, 1e-9))))


def in_a_sentence(error: BaseException) -> str:
    """What went wrong, in one line without a full stop."""
    if isinstance(error, torch.OutOfMemoryError):
        wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
        return "out of memory" + (f": tried to allocate {wanted[1]}" if wanted else "")
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    kind = type(error).__name__
    # the name of the most general error says nothing
    told = first if first and kind == "RuntimeError" else ": ".join(filter(None, (kind, first)))
    return (told if len(told) <= 160 else f"{told[:157]}...").rstrip(".")


# --- the file


class Results:
    """The rows of one run in ``results.json``, on disk as soon as they are there.

    Raises:
        ValueError: the file holds rows of other settings, of another GPU or of other code.
    """

    def __init__(self, settings: Settings, op: str) -> None:
        self.path = Path(settings.out) / "results.json"
        self.settings = settings
        self.op = op
        self.started = report.utc_now()
        self.rows: list[dict[str, Any]] = []
        if self.path.exists():
            self._resume(json.loads(self.path.read_text()))

    def _resume(self, content: Mapping[str, Any]) -> None:
        found, now = (_comparable(made) for made in (content["provenance"], self.provenance()))
        differs = [name for name in now if found.get(name) != now[name]]
        if differs:
            name = differs[0]
            raise ValueError(
                f"{self.path} was made with {name} {found.get(name)!r}, this run has "
                f"{now[name]!r}; give another --out, or what the first run had to go on with it."
            )
        self.rows = content["rows"]
        self.started = content["provenance"]["started"]

    def provenance(self) -> dict[str, Any]:
        """`report.provenance` of this run, and the versions of the dense baselines."""
        settings = self.settings
        lengths = sorted({*settings.lengths, *(row["length"] for row in self.rows)})
        told = {"op": self.op, **settings.identity(), "lengths": lengths}
        made = report.provenance(told, settings.device, settings.seed, self.started)
        behind = {name: one.version() for name, one in dense.on(settings.device).items()}
        made["baselines"] = {name: version for name, version in behind.items() if version}
        # as it will be read
        return json.loads(json.dumps(made))

    def todo(self) -> list[int]:
        """The lengths that have no row yet."""
        done = {row["length"] for row in self.rows}
        return [length for length in self.settings.lengths if length not in done]

    def add(self, row: Mapping[str, Any]) -> None:
        """Write the file with one more row."""
        self.rows = derive([*self.rows, row])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        report.write_results(self.path.parent, self.rows, self.provenance())


def _comparable(made: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for two rows to stand in one table, each by its name."""
    settings = {name: value for name, value in made["settings"].items() if name != "lengths"}
    made_by = {name: made.get(name) for name in ("device", "versions", "baselines", "commit")}
    return settings | made_by


def derive(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows by length, with what only several of them together tell (`DERIVED`).

    A row's ratio is against the baseline measured at its length, or else extrapolated from the
    longest it was measured at. Growth is from the row before that has a time.
    """
    rows = [dict(row) for row in sorted(rows, key=itemgetter("length"))]
    longest = max((row for row in rows if row["baselines"]), key=itemgetter("length"), default=None)
    before = None
    for row in rows:
        row |= dict.fromkeys(DERIVED)
        source = row if row["baselines"] else longest
        if source is not None and source["length"] <= row["length"]:
            name = dense.against(source["baselines"])
            measured = source["baselines"][name]
            row["baseline"] = name
            row["baseline_ms"] = dense.extrapolate(measured, source["length"], row["length"])
            row["extrapolated"] = source is not row
        if row["ms"] is None:
            continue
        if row["baseline_ms"] is not None:
            row["ratio"] = row["ms"] / row["baseline_ms"]
        if before is not None:
            row |= growth([before, row])
        before = row
    return rows


def growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How the time grows from the first row to the last, and how it would if linear or quadratic.

    The exponent is that of N in a least squares fit of log ms over all the rows, at least two.
    """
    first, last = rows[0], rows[-1]
    longer = last["length"] / first["length"]
    fit = statistics.linear_regression(
        [math.log(row["length"]) for row in rows], [math.log(row["ms"]) for row in rows]
    )
    return {
        "growth": last["ms"] / first["ms"],
        "growth_linear": longer,
        "growth_quadratic": longer**2,
        "exponent": fit.slope,
    }


# --- measuring the predictor


def measure_predictor(settings: Settings, length: int, bench: Bench) -> dict[str, Any]:
    """The row of one length, less what is derived. Out of memory is a row too."""
    row = {
        "op": "predictor",
        "length": length,
        **{name: getattr(settings, name) for name in ("batch", "heads", "kv_heads", "head_dim")},
        "dtype": settings.dtype,
        **dict.fromkeys(("density", "ms", "eager_ms", "graph_ms", "peak_mib", "gflops")),
        **dict.fromkeys(f"{part}_ms" for part in (*PARTS, OTHER)),
        "why_no_split": None,
        "error": None,
        "baselines": {},
        "not_measured": {},
        "without_graph": {},
    }
    try:
        row |= time_predictor(settings, length, bench)
    except torch.OutOfMemoryError as error:
        row["error"] = in_a_sentence(error)
    bench.settle()
    if length <= settings.dense_up_to:
        _time_baselines(row, settings, length, bench)
        bench.settle()
    return row


@torch.no_grad()
def time_predictor(settings: Settings, length: int, bench: Bench) -> dict[str, Any]:
    """Time, parts, peak memory and density of predicting; torch.OutOfMemoryError passes through."""
    config = settings.cab_config
    q, k = random_heads(settings, length, bench.device, "qk")
    spans = Spans.causal(settings.batch, length, length, bench.device)
    predict = make_predictor(config)

    def call() -> BlockPlan:
        return predict(q, k, spans, settings.scale)

    call()  # kernels are compiled and tuned, which takes memory of its own
    plan, peak = bench.peak(call)
    density = plan.density()
    del plan
    timing = bench.time(call)
    work = sum(predictor_flops(config, settings, length).values())
    row = {
        "density": density,
        "ms": timing.ms,
        "eager_ms": timing.eager,
        "graph_ms": timing.graph,
        "peak_mib": peak,
        "gflops": work / timing.ms / 1e6,
        "without_graph": {"predictor": timing.why_not} if timing.why_not else {},
    }
    try:
        return row | split(bench.kernels(call))
    except RuntimeError as error:
        return row | {"why_no_split": in_a_sentence(error)}


@torch.no_grad()
def _time_baselines(row: dict[str, Any], settings: Settings, length: int, bench: Bench) -> None:
    """Every dense baseline there is, or why it was not measured, written into ``row``."""
    try:
        q, k, v = random_heads(settings, length, bench.device, "qkv")
    except torch.OutOfMemoryError as error:
        row["not_measured"] = dict.fromkeys(dense.on(bench.device), in_a_sentence(error))
        return
    for name, baseline in dense.on(bench.device).items():
        try:
            attend = baseline.load()
            dense.check(attend, q, k, v, settings.scale)
            timing = bench.time(lambda attend=attend: attend(q, k, v, settings.scale))
        except Exception as error:
            # a kernel that is missing, refuses or is wrong is told of and not measured
            row["not_measured"] |= {name: in_a_sentence(error)}
            continue
        row["baselines"] |= {name: timing.ms}
        if timing.why_not:
            row["without_graph"] |= {name: timing.why_not}


def random_heads(
    settings: Settings, length: int, device: torch.device, names: str
) -> tuple[Tensor, ...]:
    """Random q, k or v by its letter, laid out as transformers hands them at prefill.

    [B, H, N, D] views of [B, N, H * D]; k and v have the key and value heads. ``inputs="topics"``
    has the block structure of text: in q and k, runs of `TOPIC_TOKENS` tokens share one of `TOPICS`
    directions, so that a query has most of its mass on the blocks of its topic. ``"noise"`` is
    white: every block matters alike, and next to nothing can be left out.
    """
    generator = torch.Generator(device).manual_seed(settings.seed)
    like = {"device": device, "dtype": getattr(torch, settings.dtype), "generator": generator}
    dim = settings.head_dim
    topics = torch.randn(TOPICS, dim, **like)
    topics *= TOPIC_STRENGTH * dim**0.5 / topics.norm(dim=-1, keepdim=True)
    runs = torch.randint(TOPICS, (-(-length // TOPIC_TOKENS),), device=device, generator=generator)
    shared = topics[runs.repeat_interleave(TOPIC_TOKENS)[:length]]
    made = []
    for name in names:
        heads = settings.heads if name == "q" else settings.kv_heads
        x = torch.randn(settings.batch, length, heads, dim, **like)
        if settings.inputs == "topics" and name != "v":
            x += shared[:, None]
        made.append(x.transpose(1, 2))
    return tuple(made)


def predictor_flops(config: CabConfig, settings: Settings, length: int) -> dict[str, int]:
    """Floating-point operations of deciding a causal prefill, by step.

    Counted are coarsening (one operation per element for a mean, a maximum or a minimum, two for a
    norm), block logits (a multiplication and an addition per channel and product: mean, and for
    boxes upper and lower bound) over the causal tiles, and the two-hop product of the lower
    triangular matrix on the query grid with itself. Softmax, standardising and selecting are not.
    """
    dim, heads = settings.head_dim, settings.batch * settings.heads
    kv_heads = settings.batch * settings.kv_heads
    a_query, a_key, products = {"box": (1, 3, 3), "mean": (1, 1, 1), "max_l2": (2, 2, 1)}[
        config.coarsen
    ]
    rows = -(-length // config.query_block)
    ends = (min(length, (row + 1) * config.query_block) for row in range(rows))
    tiles = sum(-(-end // config.key_block) for end in ends)
    # paths i -> t -> j with j <= t <= i
    paths = rows * (rows + 1) * (rows + 2) // 6
    return {
        "coarsen": length * dim * (a_query * heads + a_key * kv_heads),
        "logits": 2 * products * dim * heads * tiles,
        "two_hop": 2 * heads * paths if config.curved else 0,
    }


def part_of(kernel: str) -> str:
    """Which part of the predictor a kernel of that name belongs to."""
    for part, marks in PARTS.items():
        if any(mark in kernel for mark in marks):
            return part
    return OTHER


def split(calls: Sequence[Sequence[tuple[str, float]]]) -> dict[str, float]:
    """ms of every part, the median over calls of (kernel name, ms) each."""
    sums = []
    for kernels in calls:
        parts = dict.fromkeys((*PARTS, OTHER), 0.0)
        for name, ms in kernels:
            parts[part_of(name)] += ms
        sums.append(parts)
    return {
        f"{part}_ms": statistics.median(parts[part] for parts in sums) for part in (*PARTS, OTHER)
    }


# --- the report, from results.json alone


def digits(value: float | None) -> str | None:
    """A number from 0 up with three digits that count, and no exponent."""
    if not value:
        return None if value is None else "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def percent(share: float | None) -> str | None:
    """A share as ``12.3 %``."""
    return None if share is None else f"{digits(100 * share)} %"


def _digits_of(key: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda row: digits(row[key])


def _dense_time(row: Mapping[str, Any]) -> str | None:
    if row["baseline_ms"] is None:
        return None
    return f"{'≈ ' * row['extrapolated']}{digits(row['baseline_ms'])} {row['baseline']}"


def _growth(row: Mapping[str, Any]) -> str | None:
    if row["growth"] is None:
        return None
    return f"{row['growth']:.2f} (N: {row['growth_linear']:.3g}, N²: {row['growth_quadratic']:.3g})"


COLUMNS = {
    "tokens": lambda row: f"{row['length']:,}",
    "graph ms": _digits_of("graph_ms"),
    "eager ms": _digits_of("eager_ms"),
    **{part: _digits_of(f"{part}_ms") for part in (*PARTS, OTHER)},
    "GFLOP/s": _digits_of("gflops"),
    "peak MiB": _digits_of("peak_mib"),
    "density": "density",
    "dense ms": _dense_time,
    "of dense": lambda row: percent(row["ratio"]),
    "times the row above": _growth,
}


def readings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows say, a sentence each: growth, where it loses, what is missing and why."""
    return [
        *_growth_told(rows),
        *_losses_told(rows),
        *(f"At {row['length']:,} tokens: {row['error']}." for row in rows if row["error"]),
        *_told_by_length(
            rows,
            lambda row: {"": row["why_no_split"]} if row["why_no_split"] else {},
            "Time is not split into parts at {lengths} tokens: {why}.",
        ),
        *_told_by_length(
            rows,
            lambda row: row["without_graph"],
            "{name} could not be captured as a CUDA graph at {lengths} tokens and its time is "
            "eager: {why}.",
        ),
        *_told_by_length(
            rows,
            lambda row: row["not_measured"],
            "{name} was not measured at {lengths} tokens: {why}.",
        ),
    ]


def _growth_told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    timed = [row for row in rows if row["ms"] is not None]
    long = [row for row in timed if row["length"] >= GROWTH_FROM]
    over = long if len(long) > 1 else timed
    if len(over) < 2:
        return []
    grown = growth(over)
    return [
        f"From {over[0]['length']:,} to {over[-1]['length']:,} tokens the time grows "
        f"{grown['growth']:.1f} times; linear would be {grown['growth_linear']:.3g}, "
        f"quadratic {grown['growth_quadratic']:.3g}. The fitted exponent of N is "
        f"{grown['exponent']:.2f}."
    ]


def _losses_told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    compared = [row for row in rows if row["ratio"] is not None]
    if not compared:
        return []
    lost = [row["length"] for row in compared if row["ratio"] >= 1]
    if lost:
        said = f"Predicting takes as long as dense attention or longer at {_listed(lost)} tokens"
    else:
        said = "Predicting takes less time than dense attention at every length"
    last = compared[-1]
    about = " (extrapolated)" if last["extrapolated"] else ""
    return [
        f"{said}; at {last['length']:,} tokens it takes {percent(last['ratio'])} of "
        f"{last['baseline']}'s time{about}."
    ]


def _told_by_length(
    rows: Sequence[Mapping[str, Any]],
    reasons: Callable[[Mapping[str, Any]], Mapping[str, str]],
    sentence: str,
) -> list[str]:
    """``sentence`` for each (name, why) of ``reasons(row)``, with the lengths it holds at."""
    where: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for name, why in reasons(row).items():
            where.setdefault((name, why), []).append(row["length"])
    told = (
        sentence.format(name=name, why=why, lengths=_listed(lengths))
        for (name, why), lengths in where.items()
    )
    return [line[0].upper() + line[1:] for line in told]


def _listed(lengths: Sequence[int]) -> str:
    if len(lengths) > 3:
        return f"{lengths[0]:,} … {lengths[-1]:,} ({len(lengths)} lengths)"
    return " and ".join(", ".join(f"{length:,}" for length in lengths).rsplit(", ", 1))


def _baseline_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["baselines"]))
    columns = {"tokens": COLUMNS["tokens"]}
    columns |= {
        f"{name} ms": lambda row, name=name: digits(row["baselines"].get(name)) for name in names
    }
    return report.markdown_table([row for row in rows if row["baselines"]], columns)


def render(content: Mapping[str, Any]) -> str:
    """``report.md`` from what ``results.json`` holds."""
    rows, made = content["rows"], content["provenance"]
    settings = made["settings"]
    chosen = CabConfig.from_dict(settings["cab_config"])
    default = CabConfig().to_dict()
    changed = {k: v for k, v in chosen.to_dict().items() if v != default[k]}
    versions = [f"{name} {version}" for name, version in made["versions"].items()]
    parts = [
        f"# Speed of the {settings['op']}",
        report.markdown_table(rows, COLUMNS),
        "\n".join(f"* {sentence}" for sentence in readings(rows)),
        "![time and share of dense attention by length](speed.png)",
        "Dense causal attention, forward:\n\n" + _baseline_table(rows),
        f"Method: {settings['method']}. Density is attended over causal (query, key) pairs. "
        f"Inputs are {INPUTS[settings['inputs']]}; no model made them. GFLOP/s counts coarsening, "
        "block logits and the two-hop product. ≈: extrapolated by N² beyond "
        f"{settings['dense_up_to']:,} tokens.",
        f"Batch {settings['batch']}, {settings['heads']} query and {settings['kv_heads']} key "
        f"heads of {settings['head_dim']}, {settings['dtype']}, "
        f"{f'CabConfig with {changed}' if changed else 'default CabConfig'}, seed "
        f"{settings['seed']}, on {made['device']}; "
        f"{', '.join([*versions, *made['baselines'].values()])}; commit "
        f"{made['commit'] or 'unknown'}; finished {made['finished']}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_report(out: Path | str) -> str:
    """Derive results.csv, speed.png and report.md from results.json in ``out``; the report."""
    out = Path(out)
    content = json.loads((out / "results.json").read_text())
    report.write_atomically(out / "results.csv", report.as_csv(content["rows"]))
    draw(out / "speed.png", content["rows"])
    text = render(content)
    report.write_atomically(out / "report.md", text)
    return text


def draw(path: Path | str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Time by length with its parts and dense attention, and beside it the share of the latter."""
    # imported here: measuring draws nothing
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), sharex=True, layout="constrained")
    _draw_times(left, rows)
    _draw_share(right, rows)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens")
        axis.set_xticks([row["length"] for row in rows])
        axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: _short(length)))
        low, high = axis.get_ylim()
        # a narrow range has too few powers of ten to read it by
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        for minor in (axis.xaxis, axis.yaxis):
            minor.set_minor_formatter(NullFormatter())
        axis.grid(which="major", alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    left.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    right.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share * 100:g} %"))
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    plt.close(figure)
    report.write_atomically(path, drawn.getvalue())


def _draw_times(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    replayed = any(row["graph_ms"] is not None for row in rows)
    timed = "predictor (CUDA graph)" if replayed else "predictor (eager)"
    _line(axis, rows, itemgetter("ms"), label=timed, color="C0", linewidth=2.2)
    if replayed:
        _line(
            axis,
            rows,
            itemgetter("eager_ms"),
            label="predictor (eager)",
            color="C0",
            linestyle=":",
            marker="",
        )
    for part, colour in zip((*PARTS, OTHER), ("C2", "C3", "C1", "C5"), strict=True):
        style = {"label": f"    {part}", "color": colour, "linewidth": 1, "markersize": 2.5}
        _line(axis, rows, itemgetter(f"{part}_ms"), **style)
    names = dict.fromkeys(name for row in rows for name in row["baselines"])
    for name, grey in zip(names, ("black", "dimgrey", "darkgrey", "silver"), strict=False):
        style = {"label": f"{name} dense", "color": grey, "linewidth": 1.2, "marker": "s"}
        _line(axis, rows, lambda row, name=name: row["baselines"].get(name), **style)
    _line(
        axis,
        _from_last_measured(rows),
        itemgetter("baseline_ms"),
        label="dense, extrapolated by N²",
        color="black",
        linestyle="--",
        linewidth=1.2,
        marker="",
    )
    axis.set_ylabel("ms")
    axis.set_title("time of one layer's selection and of its dense attention", fontsize=10)


def _draw_share(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    measured = [row for row in rows if row["extrapolated"] is False]
    style = {"color": "C0", "linewidth": 2.2}
    _line(axis, measured, itemgetter("ratio"), label="predictor / dense", **style)
    _line(
        axis,
        _from_last_measured(rows),
        itemgetter("ratio"),
        label="dense extrapolated by N²",
        linestyle="--",
        markerfacecolor="white",
        zorder=1,
        **style,
    )
    axis.axhline(1, color="grey", linewidth=1)
    axis.set_ylabel("share of dense attention")
    axis.set_title("what selecting adds to a layer", fontsize=10)


def _from_last_measured(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows with an extrapolated baseline, and the one their line starts at."""
    beyond = [row for row in rows if row["extrapolated"]]
    measured = [row for row in rows if row["extrapolated"] is False]
    return [*measured[-1:], *beyond] if beyond else []


def _line(
    axis: Any,
    rows: Sequence[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], float | None],
    **style: Any,
) -> None:
    # 0 has no place on a logarithmic axis: no kernel belongs to that part
    points = [(row["length"], value(row)) for row in rows if value(row)]
    if points:
        axis.plot(*zip(*points, strict=True), **{"marker": "o", "markersize": 4, **style})


def _short(length: float) -> str:
    """Tokens as 512, 64k, 1M."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if length >= size:
            return f"{length / size:g}{letter}"
    return f"{length:g}"


# --- the command


@dataclass(frozen=True)
class Op:
    """What one second word measures.

    Attributes:
        measure: (settings, length, bench) -> the row, less what is derived.
    """

    purpose: str
    settings: type[Settings]
    measure: Callable[[Settings, int, Bench], dict[str, Any]]


OPS = {
    "predictor": Op(
        "time deciding which blocks are attended, beside dense attention",
        Settings,
        measure_predictor,
    ),
}


def run(op: str, settings: Settings, results: Results | None = None) -> list[dict[str, Any]]:
    """Measure the lengths that have no row yet, write all files, print the report; the rows."""
    results = Results(settings, op) if results is None else results
    todo = results.todo()
    if todo:
        gpu = torch.device(settings.device).type == "cuda"
        bench = GpuBench(settings.device) if gpu else CpuBench(settings.device)
        for length in todo:
            row = OPS[op].measure(settings, length, bench)
            results.add(row)
            told = row["error"] or f"{digits(row['ms'])} ms"
            print(f"{op} at {length:,} tokens: {told}", file=sys.stderr, flush=True)
    print(write_report(settings.out), end="")
    return results.rows


def main(arguments: Sequence[str]) -> int:
    """Run the op named in ``arguments``, what stands behind ``speed``; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cab_hf.eval speed", description=__doc__)
    ops = parser.add_subparsers(dest="op", required=True)
    for name, op in OPS.items():
        command = ops.add_parser(name, help=op.purpose, description=op.purpose)
        add_options(command, op.settings)
        command.add_argument(
            "--settings", metavar="FILE", help="YAML file of these options; those typed here win"
        )
    parsed = parser.parse_args(with_commas(arguments))
    kind = OPS[parsed.op].settings
    try:
        if parsed.settings is not None:
            fill_in(parsed, read_yaml(parsed.settings, kind), kind)
        settings = read_options(parsed, kind)
        results = Results(settings, parsed.op)
    except ValueError as error:
        parser.exit(2, f"{parser.prog} {parsed.op}: {error}\n")
    run(parsed.op, settings, results)
    return 0


def fill_in(parsed: argparse.Namespace, read: Mapping[str, Any], kind: type) -> None:
    """Add what a file says to what was typed; repeatable options are taken from both."""
    repeatable = {field.name for field in fields(kind) if field.metadata["repeatable"]}
    for name, value in read.items():
        if name in repeatable:
            # of two assignments to a field the later one holds
            setattr(parsed, name, [*value, *getattr(parsed, name, ())])
        elif not hasattr(parsed, name):
            setattr(parsed, name, value)
