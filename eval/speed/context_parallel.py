"""``speed context-parallel``: a layer's attention over ranks, beside one rank alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import grouped, percent
from cab_hf.eval.speed.base import KEEPS_ALL, Speed, SpeedSettings, densities, listed, made_of
from cab_hf.eval.speed.heads import INPUTS, RandomHeads
from cab_hf.eval.speed.reported import Panel
from cab_hf.eval.speed.sharded_layer import (
    ALONE,
    BOTH,
    DIRECTIONS,
    OVER_RANKS,
    SCHEMES,
    BenchCase,
    check,
)
from cab_hf.eval.speed.team import ROW_SECONDS, Ranked, Team
from cab_hf.eval.speed.timing import MOST_RUNS
from cab_hf.plan import EXACT_BLOCK
from cab_hf.runs.settings import by_device, comma_separated, option, parse_length

DERIVED = ("iterations_s", "alone_ms", "efficiency")
# query heads, KV heads, channels of each
SHAPES = {"llama3-8b": (32, 8, 128), "llama3-70b": (64, 8, 128), "tiny": (4, 2, 16)}
TURNS = 8  # calls in a timed run, fewer if they take more than a second
SHORT_SECONDS = 0.5  # for timing choosing alone
# dense attention of a longer text is warmed up by one of so many tokens; a turn on it that takes
# more seconds than that is not computed again for being the first. CAB has kernels for every length
WARM_UP_TOKENS, WARM_UP_SECONDS = 2**17, 2.0


@dataclass(frozen=True)
class Settings(RandomHeads, SpeedSettings):
    """What a run of context parallelism is told."""

    DEFAULTS = {**KEEPS_ALL, "min_length": 0}
    POSITIVE = ("runs",)
    FROM_0 = ("seconds",)
    CHOICES: ClassVar[Mapping[str, Any]] = {
        **{"shape": SHAPES, "directions": DIRECTIONS, "schemes": OVER_RANKS}
    }

    lengths: tuple[int, ...] | None = listed(
        tuple(2**n for n in range(16, 21)), (1024,), "tokens of the whole text", parse_length
    )
    shape: str | None = by_device(
        "llama3-8b", "tiny", f"head counts of a layer: {', '.join(SHAPES)}"
    )
    max_density: tuple[str, ...] = densities("0.1")
    directions: tuple[str, ...] = option(DIRECTIONS, " or ".join(DIRECTIONS), comma_separated(str))
    schemes: tuple[str, ...] = option(
        tuple(OVER_RANKS), "what is compared over ranks", comma_separated(str)
    )
    runs: int = option(3, "timed runs of a case, at least", int)
    seconds: float = option(5.0, "seconds of timing one case, or what --runs take", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        ours = self.device in ("cuda", "cpu")
        self.check("device", ours, "cuda or cpu: every rank takes the GPU of its own number")
        for length in self.lengths:
            self.budgeted(length)

    batch = 1
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
            f"{TURNS} turns in a row, fewer where they take more than {ROW_SECONDS:g} s: all "
            "ranks begin together, the device is waited for, and the slowest rank of each run "
            "counts; CAB's plan is made inside of what is timed; the peak is the highest of any "
            "rank, inputs included; every scheme is compared with float32 "
            "attention of one process, gradients too, before it is timed"
        )


def described(settings: Mapping[str, Any]) -> str:
    """The layer of a run with these recorded ``settings``, and how it was timed."""
    heads, kv_heads, head_dim = SHAPES[settings["shape"]]
    shape = (
        f"One layer of {settings['shape']}: {heads} query and {kv_heads} key heads of {head_dim}, "
        f"{settings['dtype']}; inputs are {INPUTS}; max_density "
        f"{', '.join(settings['max_density'])}"
    )
    return made_of(shape, settings)


class ContextParallel(Ranked):
    """A case is one number of ranks, length, direction and scheme."""

    name = "speed context-parallel"
    purpose = "attention of one layer over the ranks of torchrun, beside one rank"
    title = "Context parallelism"
    caption = "efficiency over ranks by length"
    Settings = Settings
    CASE = ("world", "length", "direction", "scheme")
    GROWS = (*Speed.GROWS, "worlds", "directions", "schemes")
    SHAPE = ("shape", "dtype")
    FOUND = (
        *("ms", "runs", "in_a_row", "each_ms", "peak_gib"),
        *("ran_as", "density", "choose_ms"),
    )
    ADDED: ClassVar[Mapping[str, Any]] = {"each_ms": None}
    LEAST_RANKS = 1  # which measures what more of them are held against
    BY: ClassVar[Mapping[str, str]] = {
        "direction": "direction",
        "ranks": "world",
        "scheme": "scheme",
    }
    APART = ("direction",)
    HIDDEN = (
        *("runs", "in_a_row", "batch"),
        *("needed", "collectives_ms", "received_bytes"),  # of earlier versions
    )
    LONGEST_FIRST = True
    PANELS = (Panel("efficiency over ranks", "efficiency", ("efficiency",), log=False),)
    NOTES: ClassVar[Mapping[str, str]] = {
        "": "Alone is one rank with the whole text. Efficiency is its time over the ranks' number "
        "and time."
    }
    described = staticmethod(described)

    @staticmethod
    def needs_ranks(settings: SpeedSettings) -> bool:
        return True

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

    def turn(self, sample: Mapping[str, Any], team: Team, length: int) -> BenchCase:
        """The scheme of a case, on a text of ``length`` tokens."""
        settings, scheme = self.settings, SCHEMES[sample["scheme"]]
        config = settings.budgeted(sample["length"])
        return BenchCase(scheme, length, team.group, config)

    def find_on(self, sample: dict[str, Any], team: Team) -> None:
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
        how = settings.runs, settings.seconds, TURNS, warm_up
        sample |= team.slowest(bench, turn.call(*held), *how)._asdict()
        if turn.scheme.sparse:
            choose = partial(turn.choose, *held[:2])
            pairs = team.everyone(team.together(lambda: tuple(map(int, choose().pairs()))))
            attended, causal = map(sum, zip(*pairs, strict=True))
            sample["density"] = attended / causal
            sample["choose_ms"] = team.slowest(bench, choose, settings.runs, SHORT_SECONDS).ms

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


EXPERIMENT = ContextParallel
