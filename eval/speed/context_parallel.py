"""``speed context-parallel``: time a layer's attention over ranks, next to one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cab_hf import engines
from cab_hf.call.layout import full_plan
from cab_hf.config import CabConfig
from cab_hf.distributed import predict, zigzag_attention
from cab_hf.distributed.sharding import Sharding, sharding_of
from cab_hf.engines import REFERENCE, Workload
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import grouped, percent
from cab_hf.eval.speed.dense import CHECK_GRADIENT_TOLERANCE, CHECK_TOLERANCE, close
from cab_hf.eval.speed.rank_group import ROW_SECONDS, Ranked, RankGroup
from cab_hf.eval.speed.runner import (
    INPUTS,
    KEEPS_ALL,
    Panel,
    Speed,
    SpeedSettings,
    densities,
    listed,
    made_of,
)
from cab_hf.eval.speed.schemes import ring_attention
from cab_hf.eval.speed.timing import MOST_RUNS
from cab_hf.experiment.settings import by_device, option, parse_length
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

FORWARD, BOTH = DIRECTIONS = ("forward", "forward+backward")
# number of checked KV heads: one more than is attended is in transfer
CHECKED_KV_HEADS = 2


class Scheme(NamedTuple):
    """A scheme of attention: a function like `zigzag_attention`, or None for one rank."""

    function: Callable[..., tuple[Tensor, Tensor]] | None
    sparse: bool = False

    @property
    def against(self) -> str:
        """The one-rank scheme to which its rate is compared."""
        return "alone+cab" if self.sparse else "alone"


ALONE = {"alone": Scheme(None), "alone+cab": Scheme(None, sparse=True)}
OVER_RANKS = {
    "ring": Scheme(ring_attention),
    "grouped": Scheme(zigzag_attention),
    "grouped+cab": Scheme(zigzag_attention, sparse=True),
}
SCHEMES = ALONE | OVER_RANKS
DERIVED = ("iterations_s", "alone_ms", "efficiency")
# query heads, KV heads, channels per head
SHAPES = {"llama3-8b": (32, 8, 128), "llama3-70b": (64, 8, 128), "tiny": (4, 2, 16)}
TURNS = 8  # calls in a timed run, fewer if they take more than a second
SHORT_SECONDS = 0.5  # seconds for timing block selection alone
# warm-up tokens of dense attention for longer sequences. A turn that takes more seconds than this
# is not repeated for being the first. CAB compiles kernels for every length.
WARM_UP_TOKENS, WARM_UP_SECONDS = 2**17, 2.0


@dataclass(frozen=True)
class Settings(SpeedSettings):
    """Settings of a run of context parallelism."""

    DEFAULTS = {**KEEPS_ALL, "min_length": 0}
    POSITIVE = ("runs",)
    FROM_0 = ("seconds",)
    CHOICES = {"shape": SHAPES, "directions": DIRECTIONS, "schemes": OVER_RANKS}

    lengths: tuple[int, ...] | None = listed(
        tuple(2**n for n in range(16, 21)), (1024,), "tokens of the whole sequence", parse_length
    )
    shape: str | None = by_device("llama3-8b", "tiny", f"shape of the heads: {', '.join(SHAPES)}")
    max_density: tuple[str, ...] = densities("0.1")
    directions: tuple[str, ...] = listed(DIRECTIONS, None, " or ".join(DIRECTIONS))
    schemes: tuple[str, ...] = listed(tuple(OVER_RANKS), None, "schemes to compare over ranks")
    runs: int = option(3, "timed runs of a case, at least", int)
    seconds: float = option(5.0, "seconds for timing one case, at least --runs runs", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        ours = self.device in ("cuda", "cpu")
        self.check("device", ours, "cuda or cpu, because every rank uses the GPU with its number")

    def configs(self) -> list[CabConfig]:
        return [self.budgeted(length) for length in self.lengths]

    batch = 1
    heads = property(lambda self: SHAPES[self.shape][0])
    kv_heads = property(lambda self: SHAPES[self.shape][1])
    head_dim = property(lambda self: SHAPES[self.shape][2])

    def budgeted(self, length: int) -> CabConfig:
        """Return the config at that length."""
        config = self.configured(max_density=self.density_at(length))
        block = max(config.query_block, config.key_block)
        if DENSE_BLOCK_SIZE % block:
            raise ValueError(
                f"config must have blocks that divide {DENSE_BLOCK_SIZE}, because the chunks of "
                f"ranks are multiples of it, got {block}. Change --cab."
            )
        return config

    @property
    def method(self) -> str:
        return (
            f"median of {self.runs} to {MOST_RUNS} runs ({self.seconds} s if there is time for "
            f"more) by time.perf_counter after one warm-up run (of {WARM_UP_TOKENS:,} tokens if "
            f"dense attention takes more than {WARM_UP_SECONDS:g} s), a run being {TURNS} turns "
            f"in a row, fewer if they take more than {ROW_SECONDS:g} s: all ranks start together, "
            "and the slowest rank of each run counts; the timed part includes CAB's plan; the "
            "peak is the highest of any rank, including inputs; every scheme is compared with "
            "float32 attention of one process, including gradients, before it is timed"
        )


class ContextParallel(Ranked):
    """The experiment; a case is one number of ranks, length, direction and scheme."""

    name = "speed context-parallel"
    purpose = "time attention of one layer over the ranks of torchrun, next to one rank"
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
    ADDED = {"each_ms": None}
    LEAST_RANKS = 1  # one rank is the baseline of several
    BY = {"direction": "direction", "ranks": "world", "scheme": "scheme"}
    APART = ("direction",)
    HIDDEN = (
        *("runs", "in_a_row", "batch"),
        *("needed", "collectives_ms", "received_bytes"),  # of earlier versions
    )
    LONGEST_FIRST = True
    PANELS = (Panel("efficiency over ranks", "efficiency", ("efficiency",), log=False),)
    NOTES = {
        "": "Alone is one rank with the whole sequence. Efficiency is its time divided by the "
        "number of ranks and their time."
    }

    @staticmethod
    def described(settings: Mapping[str, Any]) -> str:
        heads, kv_heads, head_dim = SHAPES[settings["shape"]]
        return made_of(
            f"One layer of {settings['shape']}: {heads} query and {kv_heads} key heads of "
            f"{head_dim}, {settings['dtype']}; inputs are {INPUTS}; max_density "
            f"{', '.join(settings['max_density'])}",
            settings,
        )

    @staticmethod
    def needs_ranks(settings: SpeedSettings) -> bool:
        return True

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        settings, world = self.settings, self.ranks.size
        over_ranks = settings.schemes if world > 1 else ()
        alone = dict.fromkeys(SCHEMES[scheme].against for scheme in settings.schemes)
        for length in settings.lengths:
            for scheme in (*alone, *over_ranks):
                for direction in settings.directions:
                    ranks = 1 if scheme in ALONE else world
                    case = {"world": ranks, "length": length, "direction": direction}
                    yield {**case, "scheme": scheme}

    def turn(self, sample: Mapping[str, Any], ranks: RankGroup, length: int) -> BenchCase:
        """Return the scheme of a case, on a sequence of ``length`` tokens."""
        settings, scheme = self.settings, SCHEMES[sample["scheme"]]
        config = settings.budgeted(sample["length"])
        return BenchCase(scheme, length, ranks.group, config)

    def find_on_ranks(self, sample: dict[str, Any], ranks: RankGroup) -> None:
        settings, bench = self.settings, self.bench
        backward = sample["direction"] == BOTH
        # chunks of two blocks, the last one incomplete
        small = self.turn(sample, ranks, 4 * ranks.size * DENSE_BLOCK_SIZE - 37)
        ranks.together(lambda: check(small, *self.whole(small), backward))
        turn, warm_up = self.turn(sample, ranks, sample["length"]), math.inf
        if turn.length > WARM_UP_TOKENS and not turn.scheme.sparse:
            warm_up = WARM_UP_SECONDS
            short = self.turn(sample, ranks, WARM_UP_TOKENS)
            ranks.together(short.call(*self.held(short, ranks, backward)))
        bench.settle()
        held = self.held(turn, ranks, backward)
        sample["ran_as"] = turn.label(*held[:3], backward)
        sample |= ranks.time_slowest(
            bench,
            turn.call(*held),
            settings.runs,
            settings.seconds,
            in_a_row=TURNS,
            warm_up=warm_up,
        )._asdict()
        if turn.scheme.sparse:
            choose = partial(turn.choose, *held[:2])
            pairs = ranks.all_gather(ranks.together(lambda: tuple(map(int, choose().pairs()))))
            attended, causal = map(sum, zip(*pairs, strict=True))
            sample["density"] = attended / causal
            sample["choose_ms"] = ranks.time_slowest(bench, choose, settings.runs, SHORT_SECONDS).ms

    def whole(self, turn: BenchCase) -> tuple[Tensor, ...]:
        """Return q, k and v of the whole sequence of a turn."""
        settings = self.settings
        return settings.random_heads(turn.length, settings.head_dim, self.bench.device, "qkv")

    def held(self, turn: BenchCase, ranks: RankGroup, backward: bool) -> list[Tensor]:
        """Return this rank's part of q, k and v, and a gradient of the output for ``backward``."""

        def drawn() -> list[Tensor]:
            held = [turn.sharded(x) for x in self.whole(turn)]
            return [*held, torch.randn_like(held[0])] if backward else held

        return ranks.together(drawn)

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return rows sorted by direction, length, ranks and scheme, with efficiencies."""
        rows = [{**sample, "measured": True, **dict.fromkeys(DERIVED)} for sample in samples]
        rows.sort(key=lambda row: list(SCHEMES).index(row["scheme"]))
        rows.sort(key=lambda row: (DIRECTIONS.index(row["direction"]), row["length"], row["world"]))
        alone = {(row["scheme"], row["direction"], row["length"]): row["ms"] for row in rows}
        for row in rows:
            ms, scheme = row["ms"], SCHEMES[row["scheme"]]
            row["iterations_s"] = ms and 1e3 / ms
            if scheme.function is not None:
                one = alone.get((scheme.against, row["direction"], row["length"]))
                row["alone_ms"] = one
                row["efficiency"] = one / ms / row["world"] if ms and one else None
        return rows

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Compare the schemes at the longest sequence on most ranks, for each direction."""
        parts = []
        compared = [row for row in rows if row["efficiency"] is not None]
        for some in grouped(compared, "direction"):
            last = max(some, key=lambda row: (row["world"], row["length"]))
            (same,) = (x for x in grouped(some, "world", "length") if last in x)
            same.sort(key=lambda row: -row["efficiency"])
            shown = ", ".join(f"{row['scheme']} {percent(row['efficiency'])}" for row in same)
            parts.append(
                f"{last['direction'].capitalize()} of {last['length']:,} tokens on "
                f"{last['world']} ranks: rate as a share of {last['world']} times the rate of one "
                f"rank: {shown}."
            )
        return parts


EXPERIMENT = ContextParallel


@dataclass(eq=False)
class BenchCase:
    """One scheme on a sequence of ``length`` tokens, on this rank.

    Attributes:
        group: the ranks of the sequence; unused for one rank.
        config: CAB's config, with the engine of all schemes.
        ranges: ranges of this rank's queries; all calls share them, like the layers of a forward
            pass.
    """

    scheme: Scheme
    length: int
    group: ProcessGroup | None
    config: CabConfig
    ranges: KeyRanges | None = None

    @cached_property
    def sharding(self) -> Sharding | None:
        if self.scheme.function is None:
            return None
        return sharding_of((self.length,), self.group.size(), DENSE_BLOCK_SIZE)

    @property
    def over_ranks(self) -> dict[str, Any]:
        """The arguments of functions over ranks."""
        return {"group": self.group, "cu_seqlens": (0, self.length), "block": DENSE_BLOCK_SIZE}

    def sharded(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of [B, H, N, D] in the same memory layout.

        One rank alone gets all tokens.
        """
        if self.sharding is None:
            return x
        slots = self.sharding.sequence_index[self.group.rank()].to(x.device)
        return x.transpose(1, 2).index_select(1, slots).transpose(1, 2)

    def without_padding(self, x: Tensor) -> Tensor:
        """Return this rank's [B, H, n, D] with zeros at padding."""
        if self.sharding is None:
            return x
        return x.masked_fill(~self.sharding.real[self.group.rank()].to(x.device)[:, None], 0.0)

    @torch.no_grad()
    def choose(self, q: Tensor, k: Tensor) -> BlockPlan | None:
        """Return CAB's plan of this rank's queries; None if a scheme attends to all keys."""
        if self.sharding is not None:
            if not self.scheme.sparse:
                return None
            plan = predict(q, k, ranges=self.ranges, config=self.config, **self.over_ranks)
            self.ranges = plan.ranges
            return plan
        if self.ranges is None:
            self.ranges = KeyRanges.causal(q.shape[0], self.length, self.length, q.device)
        if not self.scheme.sparse:
            return full_plan(self.ranges, DENSE_BLOCK_SIZE)
        return make_predictor(self.config)(q, k, LayerContext(self.ranges, q.shape[-1] ** -0.5))

    def workload(self, q: Tensor, k: Tensor, v: Tensor) -> Workload:
        """Return the workload of the engine, with the gradients that the inputs need."""
        blocks = self.config.query_block, self.config.key_block
        return Workload.of(
            q, k, v, blocks if self.scheme.sparse else (DENSE_BLOCK_SIZE, DENSE_BLOCK_SIZE)
        )

    def label(self, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> str:
        """Return the name of the kernels that attend."""
        with torch.set_grad_enabled(backward):
            work = self.workload(*(x.detach().requires_grad_(backward) for x in (q, k, v)))
        return engines.choose(self.config.engine, work).label(work)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention [B, H, n, D] for results of `sharded`; a plan is made here."""
        plan = self.choose(q, k)
        if self.sharding is None:
            engine = engines.choose(self.config.engine, self.workload(q, k, v))
            return engine.attention(q, k, v, plan, q.shape[-1] ** -0.5, return_lse=True)[0]
        how = {"plan": plan, "engine": self.config.engine, "check": False}
        return self.scheme.function(q, k, v, **how, **self.over_ranks)[0]

    def call(self, *heads: Tensor) -> Callable[[], Any]:
        """Return a function that computes attention of q, k and v repeatedly.

        With a gradient of the output, it computes the gradients of q, k and v too.
        """
        if len(heads) == 4:
            return lambda: outcome(self.attend, *heads)
        return torch.no_grad()(lambda: (self.attend(*heads),))


@torch.enable_grad()
def outcome(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Return (attention, the gradients of q, k and v)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


def check(turn: BenchCase, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> None:
    """Compare a turn with float32 attention of one process over the same sequence.

    Args:
        turn: the scheme and sequence.
        q, k, v: the whole sequence of ``turn.length`` tokens, equal on every rank.
        backward: True to compare gradients too.

    Raises:
        ArithmeticError: the message contains the relative error and its tensor.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q[:, : CHECKED_KV_HEADS * group], k[:, :CHECKED_KV_HEADS], v[:, :CHECKED_KV_HEADS]
    generator = torch.Generator(q.device).manual_seed(0)
    gradient = torch.randn(q.shape, device=q.device, generator=generator).to(q.dtype)
    plan = replace(turn, scheme=ALONE[turn.scheme.against], ranges=None).choose(q, k)

    def exactly(*heads: Tensor) -> Tensor:
        return REFERENCE.attention(*heads, plan, q.shape[-1] ** -0.5)

    whole = (q, k, v, gradient)[: 4 if backward else 3]
    held = [turn.sharded(x) for x in whole]
    # the loss of padding queries does not count
    held[3:] = map(turn.without_padding, held[3:])
    result = turn.call(*held)()
    floats = [x.float() for x in whole]
    exact = outcome(exactly, *floats) if backward else [exactly(*floats)]
    places = ("output", "gradient of q", "gradient of k", "gradient of v")
    for place, ours, theirs in zip(places, result, exact, strict=False):
        tolerance = CHECK_TOLERANCE if place == "output" else CHECK_GRADIENT_TOLERANCE
        pair = map(turn.without_padding, (ours, turn.sharded(theirs)))
        close(*pair, f"in the {place} at {turn.length} tokens", tolerance)
