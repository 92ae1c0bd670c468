"""``speed context-parallel``: a layer's attention over ranks, beside one rank alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.distributed.kv_gather import KV_HEADS_TOGETHER
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import column, digits, grouped, markdown_table, percent
from cab_hf.eval.speed.base import (
    KEEPS_ALL,
    TOKENS,
    Speed,
    SpeedSettings,
    densities,
    listed,
    made_of,
    remarks,
)
from cab_hf.eval.speed.heads import INPUTS, RandomHeads, inputs_option
from cab_hf.eval.speed.sharded_layer import (
    ALONE,
    BOTH,
    DIRECTIONS,
    OVER_RANKS,
    SCHEMES,
    BenchCase,
    check,
    needed,
)
from cab_hf.eval.speed.team import ROW_SECONDS, Ranked, Team
from cab_hf.eval.speed.timing import MOST_RUNS
from cab_hf.plan import EXACT_BLOCK, BlockPlan
from cab_hf.runs.settings import by_device, comma_separated, option, parse_length

DERIVED = ("iterations_s", "alone_ms", "efficiency")
# query heads, KV heads, channels of each
SHAPES = {"llama3-8b": (32, 8, 128), "llama3-70b": (64, 8, 128), "tiny": (4, 2, 16)}
SHORT_SECONDS = 0.5  # for timing collectives alone, or choosing alone
# dense attention of a longer text is warmed up by one of so many tokens; a turn on it that takes
# more seconds than that is not computed again for being the first. CAB has kernels for every length
WARM_UP_TOKENS, WARM_UP_SECONDS = 2**17, 2.0


@dataclass(frozen=True)
class Settings(RandomHeads, SpeedSettings):
    """What a run of context parallelism is told."""

    DEFAULTS = {**KEEPS_ALL, "min_length": 0}
    POSITIVE = ("batch", "heads_k_stride", "runs", "turns")

    lengths: tuple[int, ...] | None = listed(
        tuple(2**n for n in range(16, 21)), (1024,), "tokens of the whole text", parse_length
    )
    shape: str | None = by_device(
        "llama3-8b", "tiny", f"head counts of a layer: {', '.join(SHAPES)}"
    )
    batch: int = option(1, "sequences", int)
    inputs: str = inputs_option()
    max_density: tuple[str, ...] = densities("0.1")
    directions: tuple[str, ...] = option(DIRECTIONS, " or ".join(DIRECTIONS), comma_separated(str))
    schemes: tuple[str, ...] = option(
        tuple(OVER_RANKS), "what is compared over ranks", comma_separated(str)
    )
    heads_k_stride: int = option(KV_HEADS_TOGETHER, "KV heads sent at a time", int)
    runs: int = option(3, "timed runs of a case, at least", int)
    turns: int = option(8, "calls in a timed run, fewer if they take more than a second", int)
    seconds: float = option(5.0, "seconds of timing one case, or what --runs take", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_inputs()
        ours = self.device in ("cuda", "cpu")
        self.check("device", ours, "cuda or cpu: every rank takes the GPU of its own number")
        self.check("shape", self.shape in SHAPES, f"one of {', '.join(SHAPES)}")
        for name, known in (("directions", DIRECTIONS), ("schemes", OVER_RANKS)):
            given = getattr(self, name)
            self.check(name, given and set(given) <= set(known), f"out of {', '.join(known)}")
        self.check("seconds", self.seconds >= 0, "0 or more")
        for length in self.lengths:
            self.budgeted(length)

    heads = property(lambda self: SHAPES[self.shape][0])
    kv_heads = property(lambda self: SHAPES[self.shape][1])
    head_dim = property(lambda self: SHAPES[self.shape][2])

    def budgeted(self, length: int) -> CabConfig:
        """The config at that length."""
        config = self.configured(max_density=self.density_at(length))
        block = max(config.query_block, config.key_block)
        if EXACT_BLOCK % block:
            raise ValueError(
                f"config has blocks of {block}; they must divide {EXACT_BLOCK}, of which the "
                "chunks of ranks are whole multiples."
            )
        return config

    @property
    def method(self) -> str:
        return (
            f"median of {self.runs} to {MOST_RUNS} runs ({self.seconds} s where there is time for "
            f"more) by time.perf_counter after one that warms up (where dense attention takes more "
            f"than {WARM_UP_SECONDS:g} s, one of {WARM_UP_TOKENS:,} tokens), a run being "
            f"{self.turns} turns in a row, fewer where they take more than {ROW_SECONDS:g} s: all "
            "ranks begin together, the device is waited for, and the slowest rank of each run "
            "counts; CAB's plan is made inside of what is timed; the peak is the highest of any "
            "rank, inputs included; every scheme is compared with float32 "
            "attention of one process, gradients too, before it is timed"
        )


class ContextParallel(Ranked):
    """A case is one number of ranks, length, direction and scheme."""

    name = "speed context-parallel"
    purpose = "attention of one layer over the ranks of torchrun, beside one rank"
    title = "Context parallelism"
    caption = "efficiency over ranks by length"
    Settings = Settings
    CASE = ("world", "length", "direction", "scheme")
    GROWS = (*Speed.GROWS, "worlds", "directions", "schemes")
    SHAPE = ("shape", "batch", "dtype")
    FOUND = (
        *("ms", "runs", "in_a_row", "each_ms", "peak_gib"),
        *("ran_as", "density", "needed", "needed_by_rank", "choose_ms"),
    )
    ADDED: ClassVar[Mapping[str, Any]] = {"each_ms": None}
    REPORTED_ERRORS = (
        Exception  # what does not fit, refuses or is wrong is told of and not measured
    )
    LEAST_RANKS = 1  # which measures what more of them are held against

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        settings, world = self.settings, self.team.size
        over_ranks = settings.schemes if world > 1 else ()
        alone = dict.fromkeys(SCHEMES[scheme].against for scheme in settings.schemes)
        for length in settings.lengths:
            for scheme in (*alone, *over_ranks):
                for direction in settings.directions:
                    ranks = 1 if scheme in ALONE else world
                    case = {"world": ranks, "length": length, "direction": direction}
                    yield {**case, "scheme": scheme}

    def expected(self) -> int:
        return sum(1 for _ in self.cases(()))

    def find(self, sample: dict[str, Any]) -> None:
        team = self.team
        if sample["world"] > 1:
            self.time_turn(sample, team)
        else:
            self.alone(lambda: self.time_turn(sample, Team()))

    def turn(self, sample: Mapping[str, Any], team: Team, length: int) -> BenchCase:
        """The scheme of a case, on a text of ``length`` tokens."""
        settings, scheme = self.settings, SCHEMES[sample["scheme"]]
        config = settings.budgeted(sample["length"])
        return BenchCase(scheme, length, team.group, config, settings.heads_k_stride)

    def time_turn(self, sample: dict[str, Any], team: Team) -> None:
        """Write into ``sample`` what a turn takes, once it is known to be right."""
        settings, bench = self.settings, self.bench
        backward = sample["direction"] == BOTH
        # chunks of two blocks, the last one not whole
        small = self.turn(sample, team, 4 * team.size * EXACT_BLOCK - 37)
        team.together(lambda: check(small, *self.whole(small), backward))
        turn, warm_up = self.turn(sample, team, sample["length"]), math.inf
        if turn.length > WARM_UP_TOKENS and not turn.scheme.sparse:
            warm_up = WARM_UP_SECONDS
            short = self.turn(sample, team, WARM_UP_TOKENS)
            team.together(short.call(*self.held(short, team, backward)))
        bench.settle()
        held = self.held(turn, team, backward)
        sample["ran_as"] = turn.label(*held[:3], backward)
        how = settings.runs, settings.seconds, settings.turns, warm_up
        sample |= team.slowest(bench, turn.call(*held), *how)._asdict()
        if turn.scheme.sparse:
            self.describe_plan(sample, team, turn, *held[:2])

    def whole(self, turn: BenchCase) -> tuple[Tensor, ...]:
        """q, k and v of the text of a turn."""
        settings = self.settings
        return settings.random_heads(turn.length, settings.head_dim, self.bench.device, "qkv")

    def held(self, turn: BenchCase, team: Team, backward: bool) -> list[Tensor]:
        """What this rank holds of q, k and v, and a gradient of the output for ``backward``."""

        def drawn() -> list[Tensor]:
            held = [turn.sharded(x) for x in self.whole(turn)]
            return [*held, torch.randn_like(held[0])] if backward else held

        return team.together(drawn)

    def describe_plan(
        self, sample: dict[str, Any], team: Team, turn: BenchCase, q: Tensor, k: Tensor
    ) -> None:
        """Write what CAB chose, and how long that took."""
        settings = self.settings

        def seen() -> tuple[int, int, float]:
            plan: BlockPlan = turn.choose(q, k)
            return *map(int, plan.pairs()), needed(plan, settings.heads, settings.kv_heads)

        attended, causal, shares = zip(*team.everyone(team.together(seen)), strict=True)
        sample["density"] = sum(attended) / sum(causal)
        # one rank alone has the last rows, which attend everything
        if team.group is not None:
            sample["needed"], sample["needed_by_rank"] = sum(shares) / len(shares), list(shares)
        choose = partial(turn.choose, q, k)
        sample["choose_ms"] = team.slowest(self.bench, choose, settings.runs, SHORT_SECONDS).ms

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """By direction, length, ranks and scheme, each beside one rank alone where that ran."""
        ways, schemes = list(DIRECTIONS), list(SCHEMES)
        rows = [{**sample, "measured": True, **dict.fromkeys(DERIVED)} for sample in samples]
        rows.sort(
            key=lambda row: (
                *(ways.index(row["direction"]), row["length"], row["world"]),
                schemes.index(row["scheme"]),
            )
        )
        alone = {
            (row["scheme"], row["direction"], row["length"]): row["ms"]
            for row in rows
            if row["scheme"] in ALONE
        }
        for row in rows:
            ms, scheme = row["ms"], SCHEMES[row["scheme"]]
            if ms is not None:
                row["iterations_s"] = 1e3 / ms
            if scheme.function is None:
                continue
            one = row["alone_ms"] = alone.get((scheme.against, row["direction"], row["length"]))
            if None not in (ms, one):
                row["efficiency"] = one / ms / row["world"]
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """What was measured at the longest text, then at all of them."""
        most = max((row["length"] for row in rows), default=0)
        longest = [row for row in rows if row["length"] == most]
        made = {"At the longest text": markdown_table(longest, COLUMNS)}
        if len(longest) < len(rows):
            made["Every text"] = markdown_table(rows, COLUMNS)
        return made | remarks(list(map(_by_scheme, rows)), {"direction": "direction"})

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Of each direction, how the schemes compare at the longest text on most ranks."""
        parts = []
        compared = [row for row in rows if row["efficiency"] is not None]
        for some in grouped(compared, "direction"):
            last = max(some, key=lambda row: (row["world"], row["length"]))
            same = [r for r in some if all(r[n] == last[n] for n in ("world", "length"))]
            same.sort(key=lambda row: -row["efficiency"])
            shown = ", ".join(f"{row['scheme']} {percent(row['efficiency'])}" for row in same)
            parts.append(
                f"{last['direction'].capitalize()} of {last['length']:,} tokens on "
                f"{last['world']} ranks runs at this share of {last['world']} times the rate of "
                f"one: {shown}."
            )
        return parts

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        heads, kv_heads, head_dim = SHAPES[settings["shape"]]
        shape = (
            f"One layer of {settings['shape']}: batch {settings['batch']}, {heads} query and "
            f"{kv_heads} key heads of {head_dim}, {settings['dtype']}; inputs are "
            f"{INPUTS[settings['inputs']]}; max_density {', '.join(settings['max_density'])}; "
            f"{settings['heads_k_stride']} KV heads travel together"
        )
        return (
            f"{made_of(shape, settings)}\n\nAlone is one rank with the whole text. Efficiency is "
            "its time over the ranks' number and time. Key blocks needed: those "
            "that any query of a rank attends, the mean over ranks and KV heads; ranks get all of "
            "them."
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Efficiency by length, a panel a direction, beside the 1 of one rank alone."""
        panels = grouped(rows, "direction")
        with charts.figure(path, 1, len(panels), figsize=(6 * len(panels), 4.6)) as axes:
            for axis, some in zip(axes[0], panels, strict=True):
                axis.axhline(1, color="grey", linewidth=1)
                for alike in grouped(some, "scheme", "world"):
                    label = f"{alike[0]['scheme']} on {alike[0]['world']}"
                    charts.line(axis, alike, itemgetter("efficiency"), label=label)
                lengths, title = [row["length"] for row in some], some[0]["direction"]
                charts.over_tokens(axis, lengths, title, "efficiency", "{:.0%}".format, log=False)


EXPERIMENT = ContextParallel


def _by_scheme(row: Row) -> dict[str, Any]:
    """``row`` with what is told of it under the name of its scheme and ranks."""
    name = row["scheme"] + f" on {row['world']}" * (row["world"] > 1)
    return {**row, **{told: {name: row[told]} for told in ("error", "ran_as") if row[told]}}


COLUMNS = {
    "direction": "direction",
    **TOKENS,
    "ranks": "world",
    "scheme": "scheme",
    "ms": column(digits, "ms"),
    "turns/s": column(digits, "iterations_s"),
    "efficiency": column(percent, "efficiency"),
    "peak GiB": column(digits, "peak_gib"),
    "density": column("{:.3f}".format, "density"),
    "key blocks needed": column(percent, "needed"),
}
