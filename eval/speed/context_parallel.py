"""``speed context-parallel``: time a layer's attention on several ranks and on one rank."""

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
    run_description,
)
from cab_hf.eval.speed.schemes import ring_attention
from cab_hf.eval.speed.timing import MOST_RUNS
from cab_hf.experiment.settings import by_device, option, parse_length
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

FORWARD, BOTH = DIRECTIONS = ("forward", "forward+backward")
# KV heads whose output is checked. Two are the fewest with which `zigzag_attention` transfers the
# keys of one head while it computes the attention of another head.
CHECKED_KV_HEADS = 2


class Scheme(NamedTuple):
    """An algorithm that computes attention on one rank, or over several ranks.

    Attributes:
        function: function over several ranks with the signature of `zigzag_attention`; None if one
            rank computes attention by itself.
        sparse: True if CAB selects blocks; False for dense attention.
    """

    function: Callable[..., tuple[Tensor, Tensor]] | None
    sparse: bool = False

    @property
    def against(self) -> str:
        """The name of the scheme on one rank that is the baseline of this scheme's efficiency."""
        return "alone+cab" if self.sparse else "alone"


ALONE = {"alone": Scheme(None), "alone+cab": Scheme(None, sparse=True)}
OVER_RANKS = {
    "ring": Scheme(ring_attention),
    "grouped": Scheme(zigzag_attention),
    "grouped+cab": Scheme(zigzag_attention, sparse=True),
}
SCHEMES = ALONE | OVER_RANKS
DERIVED = ("iterations_s", "alone_ms", "efficiency")
# name -> (query heads, KV heads, channels per head)
SHAPES = {"llama3-8b": (32, 8, 128), "llama3-70b": (64, 8, 128), "tiny": (4, 2, 16)}
TURNS = 8  # largest number of calls in a timed run, which takes at most `ROW_SECONDS`
SHORT_SECONDS = 0.5  # total time of the runs that time block selection
# Dense attention of more than WARM_UP_TOKENS tokens warms up on a sequence of WARM_UP_TOKENS. The
# first call on the whole sequence then counts as a timed run if it takes more than WARM_UP_SECONDS.
# CAB warms up on the whole sequence, because it compiles kernels for every length.
WARM_UP_TOKENS = 2**17
WARM_UP_SECONDS = 2.0


@dataclass(frozen=True)
class Settings(SpeedSettings):
    """Settings of a run of ``speed context-parallel``."""

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
        accepted = "cuda or cpu, because every rank uses the GPU with its number"
        self.check("device", self.device in ("cuda", "cpu"), accepted)

    def configs(self) -> list[CabConfig]:
        return [self.budgeted(length) for length in self.lengths]

    batch = 1
    heads = property(lambda self: SHAPES[self.shape][0])
    kv_heads = property(lambda self: SHAPES[self.shape][1])
    head_dim = property(lambda self: SHAPES[self.shape][2])

    def budgeted(self, length: int) -> CabConfig:
        """Return CAB's config with the ``max_density`` for sequences of ``length`` tokens."""
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
    """The experiment that times attention of one layer over ranks.

    A case is one number of ranks, length, direction and scheme.
    """

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
    LEAST_RANKS = 1  # a run on one rank measures the baseline of runs on several ranks
    BY = {"direction": "direction", "ranks": "world", "scheme": "scheme"}
    APART = ("direction",)
    HIDDEN = (
        *("runs", "in_a_row", "batch"),
        *("needed", "collectives_ms", "received_bytes"),  # fields of earlier versions
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
        return run_description(
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
        """Return the scheme of a case, applied to a sequence of ``length`` tokens.

        Args:
            sample: the fields of the case. Its length determines ``max_density``.
            ranks: the ranks that compute attention.
            length: tokens of the whole sequence, which may differ from the length of the case.
        """
        return BenchCase(
            scheme=SCHEMES[sample["scheme"]],
            length=length,
            group=ranks.group,
            config=self.settings.budgeted(sample["length"]),
        )

    def find_on_ranks(self, sample: dict[str, Any], ranks: RankGroup) -> None:
        settings, bench = self.settings, self.bench
        backward = sample["direction"] == BOTH
        # for the check, each rank has two chunks of two blocks, and the last block is incomplete
        small = self.turn(sample, ranks, 4 * ranks.size * DENSE_BLOCK_SIZE - 37)
        ranks.together(lambda: check(small, self.full_inputs(small), backward))
        turn, warm_up = self.turn(sample, ranks, sample["length"]), math.inf
        if turn.length > WARM_UP_TOKENS and not turn.scheme.sparse:
            warm_up = WARM_UP_SECONDS
            short = self.turn(sample, ranks, WARM_UP_TOKENS)
            ranks.together(short.call(self.local_inputs(short, ranks, backward)))
        bench.settle()
        inputs = self.local_inputs(turn, ranks, backward)
        sample["ran_as"] = turn.label(inputs)
        sample |= ranks.time_slowest(
            bench,
            turn.call(inputs),
            settings.runs,
            settings.seconds,
            in_a_row=TURNS,
            warm_up=warm_up,
        )._asdict()
        if turn.scheme.sparse:
            choose = partial(turn.choose, inputs.q, inputs.k)
            pairs = ranks.all_gather(ranks.together(lambda: tuple(map(int, choose().pairs()))))
            attended = sum(rank_attended for rank_attended, _ in pairs)
            sample["density"] = attended / sum(rank_causal for _, rank_causal in pairs)
            sample["choose_ms"] = ranks.time_slowest(bench, choose, settings.runs, SHORT_SECONDS).ms

    def full_inputs(self, turn: BenchCase) -> Inputs:
        """Return q, k and v of the whole sequence of a turn, equal on every rank."""
        settings = self.settings
        q, k, v = settings.random_heads(turn.length, settings.head_dim, self.bench.device, "qkv")
        return Inputs(q, k, v)

    def local_inputs(self, turn: BenchCase, ranks: RankGroup, backward: bool) -> Inputs:
        """Return this rank's shards of random q, k and v.

        Args:
            turn: the scheme and the sequence.
            ranks: the ranks.
            backward: True to add a random gradient of the output.
        """

        def draw() -> Inputs:
            full = self.full_inputs(turn)
            q, k, v = (turn.sharded(x) for x in (full.q, full.k, full.v))
            return Inputs(q, k, v, gradient=torch.randn_like(q) if backward else None)

        return ranks.together(draw)

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a row per sample with the fields `DERIVED`, among them the efficiency.

        Rows are sorted by direction, length, number of ranks and scheme.
        """
        rows = [{**sample, "measured": True, **dict.fromkeys(DERIVED)} for sample in samples]
        rows.sort(key=lambda row: list(SCHEMES).index(row["scheme"]))
        rows.sort(key=lambda row: (DIRECTIONS.index(row["direction"]), row["length"], row["world"]))
        alone = {(row["scheme"], row["direction"], row["length"]): row["ms"] for row in rows}
        for row in rows:
            ms, scheme = row["ms"], SCHEMES[row["scheme"]]
            row["iterations_s"] = ms and 1e3 / ms
            if scheme.function is not None:
                alone_ms = alone.get((scheme.against, row["direction"], row["length"]))
                row["alone_ms"] = alone_ms
                row["efficiency"] = alone_ms / ms / row["world"] if ms and alone_ms else None
        return rows

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Return a sentence per direction that lists the efficiency of each scheme.

        The sentence covers the largest number of ranks, and the longest sequence on these ranks.
        """
        sentences = []
        compared = [row for row in rows if row["efficiency"] is not None]
        for direction_rows in grouped(compared, ["direction"]):
            last = max(direction_rows, key=lambda row: (row["world"], row["length"]))
            (group,) = (x for x in grouped(direction_rows, ["world", "length"]) if last in x)
            group.sort(key=lambda row: -row["efficiency"])
            schemes = ", ".join(f"{row['scheme']} {percent(row['efficiency'])}" for row in group)
            sentences.append(
                f"{last['direction'].capitalize()} of {last['length']:,} tokens on "
                f"{last['world']} ranks: rate as a share of {last['world']} times the rate of one "
                f"rank: {schemes}."
            )
        return sentences


EXPERIMENT = ContextParallel


class Inputs(NamedTuple):
    """The inputs of attention: of the whole sequence (n = N), or one rank's shards of these inputs.

    Attributes:
        q: queries [1, H, n, D].
        k, v: keys and values [1, H_kv, n, D].
        gradient: gradient of the output, [1, H, n, D]; None if only the forward pass runs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gradient: Tensor | None = None


@dataclass(eq=False)
class BenchCase:
    """The computation of one sequence's attention by one scheme, as this rank takes part in it.

    Attributes:
        scheme: the scheme.
        length: tokens of the whole sequence.
        group: the ranks of the sequence; None for one rank.
        config: CAB's config. Dense schemes use only its engine.
        ranges: key ranges of this rank's queries. The first call sets the ranges, and later calls
            reuse them, as the layers of a model do. None before the first call.
    """

    scheme: Scheme
    length: int
    group: ProcessGroup | None
    config: CabConfig
    ranges: KeyRanges | None = None

    @cached_property
    def sharding(self) -> Sharding | None:
        """The distribution of the tokens over ranks; None for one rank."""
        if self.scheme.function is None:
            return None
        return sharding_of((self.length,), self.group.size(), DENSE_BLOCK_SIZE)

    @property
    def over_ranks(self) -> dict[str, Any]:
        """The keyword arguments of `zigzag_attention` and `predict` that describe the sharding."""
        return {"group": self.group, "cu_seqlens": (0, self.length), "block": DENSE_BLOCK_SIZE}

    def sharded(self, x: Tensor) -> Tensor:
        """Return this rank's shard [B, H, n, D] of ``x`` [B, H, N, D]; ``x`` itself on one rank."""
        if self.sharding is None:
            return x
        slots = self.sharding.sequence_index[self.group.rank()].to(x.device)
        return x.transpose(1, 2).index_select(1, slots).transpose(1, 2)

    def without_padding(self, x: Tensor) -> Tensor:
        """Return this rank's ``x`` [B, H, n, D] with zeros at padding tokens."""
        if self.sharding is None:
            return x
        return x.masked_fill(~self.sharding.real[self.group.rank()].to(x.device)[:, None], 0.0)

    @torch.no_grad()
    def choose(self, q: Tensor, k: Tensor) -> BlockPlan | None:
        """Return the block plan of this rank's queries; None for dense schemes over ranks."""
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
        """Return the workload of the engine, for training if the inputs require gradients."""
        blocks = self.config.query_block, self.config.key_block
        return Workload.of(
            q, k, v, blocks if self.scheme.sparse else (DENSE_BLOCK_SIZE, DENSE_BLOCK_SIZE)
        )

    def label(self, inputs: Inputs) -> str:
        """Return the name of the kernels that compute attention of ``inputs``."""
        backward = inputs.gradient is not None
        with torch.set_grad_enabled(backward):
            q, k, v = (x.detach().requires_grad_(backward) for x in inputs[:3])
            work = self.workload(q, k, v)
        return engines.choose(self.config.engine, work).label(work)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Select blocks if the scheme is sparse, and return attention [B, H, n, D].

        Args:
            q, k, v: results of `sharded`.
        """
        plan = self.choose(q, k)
        if self.sharding is None:
            engine = engines.choose(self.config.engine, self.workload(q, k, v))
            return engine.attention(q, k, v, plan, scale=q.shape[-1] ** -0.5, return_lse=True)[0]
        options = {"plan": plan, "engine": self.config.engine, "check": False}
        return self.scheme.function(q, k, v, **options, **self.over_ranks)[0]

    def call(self, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function that computes attention, and gradients if ``inputs`` has a gradient.

        The function returns a tuple: attention [B, H, n, D], then the gradients of q, k and v if
        they are computed.
        """
        if inputs.gradient is not None:
            return lambda: outcome(self.attend, inputs)
        return torch.no_grad()(lambda: (self.attend(inputs.q, inputs.k, inputs.v),))


@torch.enable_grad()
def outcome(attend: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
    """Return a tuple of attention and the gradients of q, k and v.

    Args:
        attend: function of q, k and v that returns attention.
        inputs: the inputs with a gradient of the output.
    """
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = attend(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.gradient)


def check(turn: BenchCase, inputs: Inputs, backward: bool) -> None:
    """Compare a scheme with float32 attention that this process computes over the whole sequence.

    Only the first `CHECKED_KV_HEADS` KV heads are compared.

    Args:
        turn: the scheme and the length of the sequence.
        inputs: q, k and v of the whole sequence, equal on every rank.
        backward: True to compare gradients too.

    Raises:
        ArithmeticError: a relative error exceeds its tolerance. The message names the tensor.
    """
    group = inputs.q.shape[1] // inputs.k.shape[1]
    q = inputs.q[:, : CHECKED_KV_HEADS * group]
    k, v = inputs.k[:, :CHECKED_KV_HEADS], inputs.v[:, :CHECKED_KV_HEADS]
    generator = torch.Generator(q.device).manual_seed(0)
    gradient = torch.randn(q.shape, device=q.device, generator=generator).to(q.dtype)
    plan = replace(turn, scheme=ALONE[turn.scheme.against], ranges=None).choose(q, k)

    def attend_exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return REFERENCE.attention(q, k, v, plan, scale=q.shape[-1] ** -0.5)

    local = Inputs(turn.sharded(q), turn.sharded(k), turn.sharded(v))
    exact_inputs = Inputs(q.float(), k.float(), v.float())
    if backward:
        # padding queries have no loss, so that the gradient of their output is zero
        local = local._replace(gradient=turn.without_padding(turn.sharded(gradient)))
        exact = outcome(attend_exactly, exact_inputs._replace(gradient=gradient.float()))
    else:
        exact = (attend_exactly(exact_inputs.q, exact_inputs.k, exact_inputs.v),)
    result = turn.call(local)()
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    for name, actual, expected in zip(names, result, exact, strict=False):
        close(
            turn.without_padding(actual),
            turn.without_padding(turn.sharded(expected)),
            where=f"in the {name} at {turn.length} tokens",
            tolerance=CHECK_TOLERANCE if name == "output" else CHECK_GRADIENT_TOLERANCE,
        )
