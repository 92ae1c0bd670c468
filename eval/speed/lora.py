"""``speed lora``: a step of LoRA fine-tuning of a whole model, by what it attends with.

Started by torchrun, it measures how a step spreads over ranks.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from cab_hf.config import NAMES
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import column, digits, grouped, markdown_table, percent, seconds
from cab_hf.eval.speed import dense, spread
from cab_hf.eval.speed.base import DENSITY, KEEPS_ALL, TOKENS, listed, powers, remarks
from cab_hf.eval.speed.model import (
    CAB_DENSE,
    SDPA,
    ModelSettings,
    attending,
    described,
    layers_as,
    random_model,
)
from cab_hf.eval.speed.spread import ALONE, CP, FSDP2, SPREADS, Shared
from cab_hf.eval.speed.team import Slowest, Team, by_torchrun
from cab_hf.eval.speed.ttft import TIMES, TimeToFirstToken, drawn
from cab_hf.runs.settings import by_device, comma_separated, flag, number_or_auto, option

# transformers and PEFT are imported where they are used: asking for help needs none of them
if TYPE_CHECKING:
    from cab_hf.finetune.meter import Cost, Fit, Room
    from cab_hf.finetune.objective import Batch, Objective

CAB = "cab"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALPHA = 32.0
LEARNING_RATE = 1e-4
CLIP = 1.0
# tokens of the step that compiles all kernels, which is as long as CAB wants a text: one that is
# timed may take a minute
WARM_UP_TOKENS = 2**15
# what tells the lines of a figure apart, and a sequence's length among them
APART = ("spread", "world", "implementation")


@dataclass(frozen=True)
class Settings(ModelSettings):
    """What a run of training steps is told."""

    KEYS: ClassVar[Mapping[str, str]] = {"length": "lengths", "implementation": "implementations"}
    # the blocks whose gradients are fastest
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**KEEPS_ALL, "key_block": 128}
    POSITIVE = (*ModelSettings.POSITIVE, "rank", "runs", "multiple")

    lengths: tuple[int, ...] | None = powers(13, 17)
    implementations: tuple[str, ...] | None = listed(
        (SDPA, "cuDNN", "FA4", CAB), (SDPA, "SDPA", CAB), "ways to attend"
    )
    rank: int = option(16, f"rank of the LoRA adapters, in {', '.join(TARGETS)}", int)
    runs: int = option(3, "timed steps of every row", int)
    spread: tuple[str, ...] = option(
        (),
        f"how ranks share a step, out of {', '.join(SPREADS)}; by default all of them under "
        f"torchrun, and {ALONE} without it",
        comma_separated(str),
    )
    tile_tokens: int | None = option(
        None,
        "tokens of a tile of MLPs; 0: no tiles; auto (default): as in fine-tuning",
        number_or_auto,
    )
    offload_layers: int | None = option(
        None,
        "layers whose inputs are offloaded to the host; auto (default): as few as fit",
        number_or_auto,
    )
    host_gib: float = option(0.0, "GiB of the host; 0: all it has", float)
    longest: bool = flag("also search for the longest sequence of which a step fits")
    multiple: int | None = by_device(
        2**13, 64, "the longest sequence is a multiple of so many tokens", int
    )

    def __post_init__(self) -> None:
        asked = self.implementations
        if not self.spread:
            self._set("spread", SPREADS if by_torchrun() else (ALONE,))
        super().__post_init__()
        if self.is_spread and not asked:
            self._set("implementations", (CAB_DENSE, CAB))
        known = (SDPA, CAB_DENSE, CAB, *dense.on(self.device))
        named = set(self.implementations) <= set(known)
        self.check("implementations", named, f"out of {', '.join(known)}")
        self.check("spread", set(self.spread) <= set(SPREADS), f"out of {', '.join(SPREADS)}")
        across = CP not in self.spread or set(self.implementations) & set(NAMES)
        ours = ", ".join([name for name in NAMES if name in known])
        text = f"some of {ours} where a sequence is sharded ({CP})"
        self.check("implementations", across, text)
        for name in ("tile_tokens", "offload_layers", "host_gib"):
            self.check(name, (getattr(self, name) or 0) >= 0, "auto, or 0 or more")
        every = not self.longest or any(":" not in part for part in self.max_density)
        self.check("max_density", every, "a share for all lengths where the longest is sought")

    @property
    def is_spread(self) -> bool:
        return self.spread != (ALONE,)

    @property
    def method(self) -> str:
        text = (
            f"median of {self.runs} steps by time.perf_counter after one of at most "
            f"{WARM_UP_TOKENS:,} tokens that warms up; a step is the forward and the backward pass "
            "of one sequence of random tokens, every layer being computed again in the latter, the "
            "loss in chunks, clipping and AdamW; MLPs, norms and adapters compute long sequences "
            "in tiles, and checkpoints that have no room are offloaded to the host; the peak is "
            "all that was allocated, weights included"
        )
        if self.is_spread or by_torchrun():
            text += (
                "; all ranks begin together, the slowest of each step and the highest peak of any "
                "count; gradients of ranks are compared with those of one process at a small "
                "length before they are timed"
            )
        return text


class LoraStep(TimeToFirstToken):
    """A case is one length, one way to attend, and how so many ranks share a step.

    A length that was sought runs until its peak, without a time.
    """

    name = "speed lora"
    purpose = "a step of LoRA fine-tuning of a LLaMA, by what it attends with"
    title = "A step of LoRA fine-tuning"
    caption = "seconds of a training step by length, and what CAB gains"
    Settings = Settings
    CASE = (*Settings.KEYS, "spread", "world")
    ADDED: ClassVar[Mapping[str, Any]] = {
        **{"spread": ALONE, "world": 1},
        **{"sought": False, "fits": None, "room_gib": None},
        **{"tile_tokens": 0, "offloaded": 0, "host_gib": None},
    }
    GROWS = (
        *(*TimeToFirstToken.GROWS, "spread", "longest", "multiple", "worlds"),
        *("tile_tokens", "offload_layers", "host_gib"),
    )
    SHAPE = ("dtype", "rank")
    FOUND = (
        *(*TimeToFirstToken.FOUND, "fits", "room_gib"),
        *("tile_tokens", "offloaded", "host_gib"),
    )

    @staticmethod
    def needs_ranks(settings: Settings) -> bool:
        return settings.is_spread or by_torchrun()

    def recorded(self) -> dict[str, Any]:
        given = super().recorded()
        if not self.is_ranked:
            # as it is without the option
            del given["spread"]
        return given

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        settings = self.settings
        for how in settings.spread:
            place = {"spread": how, "world": 1 if how == ALONE else self.team.size}
            asked = settings.asked()
            if how == CP:
                asked = [case for case in asked if case["implementation"] in NAMES]
            for case in asked:
                yield {**case, **place, "sought": False}
            if settings.longest:
                for way in dict.fromkeys(case["implementation"] for case in asked):
                    yield from self.search({"implementation": way, **place}, samples)

    def expected(self) -> int | None:
        return None if self.settings.longest else sum(1 for _ in self.cases(()))

    def search(self, place: Mapping[str, Any], samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Lengths to try at ``place`` until the longest is known; none where no room is known."""
        guess = self.guess(place)
        while guess is not None:
            tried = {row["length"]: row["fits"] for row in at_place(samples, place)}
            # what failed for another reason ends the search
            if None in tried.values():
                return
            length = spread.next_length(tried, guess, self.settings.multiple)
            if length is None:
                return
            yield {**place, "length": length, "sought": True}

    def guess(self, place: Mapping[str, Any]) -> int | None:
        """The most tokens of a sequence that should fit, by an estimate."""
        if self.bench.room() is None:
            return None
        room, step = self.room(), self.settings.multiple

        def fits(multiples: int) -> bool:
            return room.holds(self.fitted(place, multiples * step, room)[1].memory)

        most = 1
        while fits(2 * most):
            most *= 2
        # one by one: lists of plans are rounded up to powers of two
        return step * next((n for n in range(2 * most, most, -1) if fits(n)), most)

    def room(self) -> Room:
        """What this rank has of memory, without end on a CPU."""
        from cab_hf.finetune.meter import GIB, Room, host_bytes

        device = self.bench.room()
        device = float("inf") if device is None else device * GIB
        return Room(device, host_bytes(self.settings.host_gib))

    def fitted(self, place: Mapping[str, Any], length: int, room: Room) -> tuple[int, Fit]:
        """(tokens of a tile or 0, what is offloaded) of a step at ``place`` in so much room."""
        from cab_hf.finetune.meter import fit, plan_bytes
        from cab_hf.finetune.tiles import tile_of

        settings, how = self.settings, spread.weights_in(place["spread"], place["world"])
        cost, tile = trainee(settings).cost, tile_of(length // how["cp"], settings.tile_tokens)
        more = {"itemsize": settings.torch_dtype.itemsize, "tile": tile, **how}
        if place["implementation"] == CAB:
            more["plans"] = plan_bytes(cost, settings.budgeted(length), length, cp=how["cp"])
        return tile, fit(cost, length, room, settings.offload_layers, **more)

    def find(self, sample: dict[str, Any]) -> None:
        if sample["spread"] == ALONE:
            self.alone(lambda: self.step(sample, Team()))
        else:
            self.step(sample, self.team)

    def step(self, sample: dict[str, Any], team: Team) -> None:
        """Write into ``sample`` what a step of ``team`` takes, once it is known to be right."""
        settings, length, way = self.settings, sample["length"], sample["implementation"]
        # what spread an earlier step hooks into gradients until it is gone
        gc.collect()
        how, cost = sample["spread"], trainee(settings).cost
        sample["room_gib"] = self.bench.room()
        tile, fitted = self.fitted(sample, length, self.room())
        shares = sample["world"] if how == CP else 1
        host = save_memory(settings, length // shares, tile, fitted.offloaded)
        sample |= {"tile_tokens": tile, "offloaded": fitted.offloaded, "host_gib": host}
        with training(settings, length, way, how, team) as (call, known):
            team.together(lambda: call(min(length, WARM_UP_TOKENS)))
            known()
            if sample["sought"]:
                sample["peak_gib"] = self.peak(lambda: call(length), team)
                sample |= {"fits": True, **known()}
                return
            result = self.timed(lambda: call(length), team)
            sample |= {"fits": True, **known()}
        flops = useful_flops(cost, length)
        done = flops(sample["density"])
        sample |= {
            "ms": result.ms,
            "peak_gib": result.peak_gib,
            "ceiling": flops(1.0) / done,
            "tflops": done / shares / result.ms / 1e9,
        }

    def timed(self, call: Callable[[], None], team: Team) -> Slowest:
        """What a step takes, on the slowest rank."""
        bench, runs = self.bench, self.settings.runs
        if team.group is None:
            return Slowest(*bench.wall(call, runs, warm_up_calls=0), runs)
        team.together(bench.settle)
        return team.slowest(bench, call, runs, warm_up=0)

    def peak(self, call: Callable[[], None], team: Team) -> float | None:
        """GiB that a step needs on any rank; what comes behind the peak is not computed."""

        def until() -> None:
            with spread.until_peak(layers_of(self.settings)), suppress(spread.Reached):
                call()

        team.together(self.bench.settle)
        return team.slowest(self.bench, until, 1, warm_up=0).peak_gib

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As of the time to the first token, among rows of the same ranks that share alike.

        ``tokens_s`` are those of a rank; ``efficiency`` is that over what one rank alone does at
        the same length by the same way.
        """
        rows = []
        for alike in grouped(samples, "spread", "world"):
            rows += TimeToFirstToken.rows(alike, settings)
        for row in rows:
            row |= {"tokens_s": rate(row), "efficiency": None}
        alone = {
            (row["length"], row["implementation"]): row["tokens_s"]
            for row in rows
            if row["spread"] == ALONE
        }
        for row in rows:
            complete = alone.get((row["length"], row["implementation"]))
            if complete and row["tokens_s"]:
                row["efficiency"] = row["tokens_s"] / complete
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """How a step spreads, where it does, then as of the time to the first token; the longest.

        One rank alone is compared with other ways to attend, ranks with one rank.
        """
        timed = [row for row in rows if not row["sought"]]
        one = [row for row in timed if row["spread"] == ALONE]
        made, many = {}, len(one) < len(timed)
        if many:
            made["Over ranks"] = markdown_table(timed, OVER_RANKS)
        if one:
            tables = TimeToFirstToken.tables(one)
            tables.pop("Remarks", None)
            made |= {f"{name} of one rank" if many else name: x for name, x in tables.items()}
        if any(row["tile_tokens"] or row["offloaded"] for row in timed):
            made["Tiles and offloaded checkpoints"] = markdown_table(timed, SAVED_MEMORY)
        if any(row["sought"] for row in rows):
            shown = [reported_longest(alike) for alike in grouped(rows, *APART)]
            made["The longest sequence of which a step fits"] = markdown_table(shown, LONGEST)
        by = {"way": "implementation"} | ({"ranks": "world", "spread": "spread"} if many else {})
        # what a search says is where it ended
        parts = [row for row in rows if not row["sought"] or row["fits"] is None]
        return made | remarks(parts, by)

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """What CAB gains on one rank, how steps of the longest sequence spread, and what fits."""
        timed = [row for row in rows if not row["sought"]]
        given = TimeToFirstToken.readings([row for row in timed if row["spread"] == ALONE])
        spreading = [r for r in timed if r["spread"] != ALONE and r["efficiency"] is not None]
        for some in grouped(spreading, "implementation"):
            last = max(some, key=itemgetter("world", "length"))
            same = [r for r in some if all(r[n] == last[n] for n in ("world", "length"))]
            shown = ", ".join(f"{row['spread']} {percent(row['efficiency'])}" for row in same)
            given.append(
                f"A rank of {last['world']} does, with {last['implementation']} and "
                f"{last['length']:,} tokens, this share of what one alone does: {shown}."
            )
        ours = [r for r in timed if r["spread"] == CP and r["implementation"] == CAB]
        gained = [row for row in ours if row["over_best"] is not None]
        if gained:
            last = max(gained, key=itemgetter("world", "length"))
            given.append(
                f"Of {last['length']:,} tokens that {last['world']} ranks share, a step by cab is "
                f"{TIMES(last['over_best'])} as fast as one by {last['baseline']}."
            )
        return given + longest_readings(rows)

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        text = (
            f"{described(settings)}\n\nLoRA of rank {settings['rank']} in {', '.join(TARGETS)}, "
            "all else frozen. sdpa is transformers' own; other dense ways take its place. At most: "
            "operations of the dense step over those at the realised density, attended over causal "
            "pairs in all layers; TFLOP/s count what is attended. Operations are those of the "
            "forward and the backward pass, without what is computed a second time. "
            f"{dense.BREAK_EVEN}"
        )
        if settings.get("worlds"):
            text += f"\n\n{SPREADING}"
        return f"{text}\n\n{SEEKING}" if settings.get("longest") else text

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        timed = [row for row in rows if not row["sought"]]
        if all(row["spread"] == ALONE for row in timed):
            drawn(path, timed, "a training step")
        else:
            drawn_over_ranks(path, timed)


EXPERIMENT = LoraStep


class Trainee(NamedTuple):
    """A model that is trained, and with what."""

    objective: Objective
    optimizer: torch.optim.Optimizer
    cost: Cost


@lru_cache(maxsize=1)
def trainee(settings: Settings) -> Trainee:
    """The random model with adapters that are about to be learnt."""
    from cab_hf.finetune.meter import Cost
    from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
    from cab_hf.finetune.objective import Objective

    model = with_lora(random_model(settings), TARGETS, settings.rank, ALPHA)
    enable_gradient_checkpointing(model)
    model.train()
    objective = Objective(model)
    return Trainee(objective, optimizer_of(objective), Cost.of(model))


def save_memory(settings: Settings, tokens: int, tile: int, offloaded: int) -> float:
    """Have the model compute in tiles, with checkpoints offloaded; the GiB that are pinned.

    Args:
        tokens: of a rank.
        tile: tokens of a tile; 0: no tiles.
        offloaded: layers whose checkpoints are.
    """
    from cab_hf.finetune.meter import GIB
    from cab_hf.finetune.offload import Offload
    from cab_hf.finetune.tiles import compute_in_tiles

    model = trainee(settings).objective.model
    # one tile of all tokens, and of the padding of ranks, is none
    compute_in_tiles(model, tile or sys.maxsize)
    offload = Offload(offloaded, torch.device(settings.device))
    # the one before gives its memory back first: the host may have no room for both
    offload.enable(model)
    # what is timed allocates nothing
    offload.reserve(tokens * settings.hidden * settings.torch_dtype.itemsize)
    return offload.host_bytes / GIB


def optimizer_of(objective: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW of what ``objective`` learns."""
    learnt = [p for p in objective.parameters() if p.requires_grad]
    fused = learnt[0].device.type == "cuda"
    return torch.optim.AdamW(learnt, LEARNING_RATE, fused=fused)


def layers_of(settings: Settings) -> Sequence[torch.nn.Module]:
    """The decoder layers of the random model."""
    return random_model(settings).model.layers


@contextmanager
def training(
    settings: Settings, length: int, way: str, how: str = ALONE, team: Team | None = None
) -> Iterator[tuple[Callable[[int], None], Callable[[], dict[str, Any]]]]:
    """(what learns from a text of so many tokens, what is known of it since it was asked last).

    Known are its ``density``, attended over causal pairs in all layers and of all ranks, and what
    CAB ``ran_as``. Of steps that ranks share gradients are checked first.
    """
    team = Team() if team is None else team
    optimizer = trainee(settings).optimizer
    try:
        with sharing(settings, length, way, how, team) as shared:
            if how == FSDP2:
                optimizer = optimizer_of(shared.objective)
            try:
                yield (
                    partial(learn, shared, optimizer),
                    partial(found_in, settings, length, way, how, team),
                )
            finally:
                shared.forget()
    finally:
        if how == FSDP2:
            # this rank has a part of the model left
            random_model.cache_clear()
            trainee.cache_clear()


@contextmanager
def sharing(settings: Settings, length: int, way: str, how: str, team: Team) -> Iterator[Shared]:
    """A step that ``team`` shares, of a model that attends as it does at ``length`` tokens.

    Raises:
        RuntimeError: where gradients are not those of one process.
    """
    from cab_hf.patches import cab

    model, objective = random_model(settings), trainee(settings).objective
    config, sequences = settings.budgeted(length), partial(batch_of, settings)
    made = partial(spread.shared, how, objective, layers_of(settings), team, sequences)
    if how == ALONE:
        with attending(model, way, config), made() as shared:
            yield shared
        return
    dtype = settings.torch_dtype
    check = spread.check_config(config, dtype)

    def of_one_process() -> Tensor:
        alone = objective, how, team.size, tokens, sequences
        return team.together(lambda: spread.of_one_process(*alone))

    with attending(model, way, check):
        tokens = spread.check_length(team, spread.block_of(model))
        spread.draw_adapters([p for p in objective.parameters() if p.requires_grad], settings.seed)
        rounded, exact = of_one_process(), None
    if dtype != torch.float32:
        # every block is kept, which is what transformers computes
        with attending(model, SDPA, config), spread.in_float32(objective):
            exact = of_one_process()
    # not kept: what is timed has the memory to itself
    meant = [spread.meant(rounded, exact)]
    del rounded, exact
    with attending(model, way, check), made() as shared:
        place = f"{how} at {tokens} tokens"
        team.together(lambda: spread.check_gradients(shared.gradients(tokens), meant.pop(), place))
        with cab(model, config) if way == CAB else nullcontext():
            yield shared


def learn(shared: Shared, optimizer: torch.optim.Optimizer, tokens: int) -> None:
    """A step on ``tokens`` a sequence."""
    shared.backward(tokens)
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP)
    optimizer.step()
    optimizer.zero_grad()


def found_in(settings: Settings, length: int, way: str, how: str, team: Team) -> dict[str, Any]:
    """What is known of steps since it was asked last."""
    from cab_hf.patches import stats

    model = random_model(settings)
    # layers that are computed dense attend everything
    layers = [1.0 if x["density"] is None else x["density"] for x in stats(model, reset=True)]
    pairs = spread.causal_pairs(how, length, team, spread.block_of(model))
    density = spread.density_of_all(team, fmean(layers), pairs)
    # ranks that share a sequence are not what is described
    text = layers_as(model, length, training=True) if way == CAB and how != CP else None
    return {"density": density, "ran_as": text}


def batch_of(settings: Settings, tokens: int, number: int = 0) -> Batch:
    """A sequence [1, tokens] of random tokens, each of which is to predict another."""
    generator = torch.Generator(settings.device).manual_seed(settings.seed + number)
    drawn = torch.randint(
        settings.vocab, (1, tokens + 1), generator=generator, device=settings.device
    )
    positions = torch.arange(tokens, device=settings.device)[None]
    return {"input_ids": drawn[:, :-1], "position_ids": positions, "labels": drawn[:, 1:]}


def useful_flops(cost: Cost, length: int) -> Callable[[float], float]:
    """Density -> floating-point operations of a step of one text of ``length`` tokens."""
    pairs = cost.pairs(torch.arange(length)[None])
    attention = sum(cost.attention(pairs))
    return lambda density: cost.products(length) + density * attention


def rate(row: Row) -> float | None:
    """Tokens a second of each rank."""
    if row["ms"] is None:
        return None
    tokens = spread.tokens_of_step(row["spread"], row["world"], row["length"])
    return tokens / row["world"] / row["ms"] * 1e3


def at_place(rows: Sequence[Row], place: Mapping[str, Any]) -> list[Row]:
    """Those of ``rows`` that share what ``place`` says."""
    return [row for row in rows if all(row[name] == value for name, value in place.items())]


def reported_longest(alike: Sequence[Row]) -> dict[str, Any]:
    """Of rows by one way on the same ranks: the longest that fits, and the shortest that does not.

    What is found of the former stands with it.
    """
    fitting = [row for row in alike if row["fits"]]
    last = max(fitting, key=itemgetter("length"), default={})
    over = min((row["length"] for row in alike if row["fits"] is False), default=None)
    place = {name: alike[0][name] for name in (*APART, "room_gib")}
    return {**place, "length": last.get("length"), "peak_gib": last.get("peak_gib"), "over": over}


def longest_readings(rows: Sequence[Row]) -> list[str]:
    """Of ranks that share alike, the longest sequence by each way to attend."""
    parts = []
    for alike in grouped(rows, "spread", "world"):
        if not any(row["sought"] for row in alike):
            continue
        results = [reported_longest(some) for some in grouped(alike, "implementation")]
        shown = ", ".join(
            f"{each['implementation']} {each['length']:,}" for each in results if each["length"]
        )
        on = f"{alike[0]['world']} ranks by {alike[0]['spread']}"
        where = "one rank" if alike[0]["spread"] == ALONE else on
        parts.append(f"Tokens of the longest sequence of which a step fits on {where}: {shown}.")
    return parts


def drawn_over_ranks(path: Path, rows: Sequence[Row]) -> None:
    """Tokens a second of a rank by length, and beside it its share of one rank's alone."""
    lengths = [row["length"] for row in rows]
    with charts.figure(path, 1, 2, figsize=(11, 4.6)) as axes:
        left, right = axes[0]
        for alike in grouped(rows, *APART):
            first = alike[0]
            name = f"{first['implementation']}, {first['spread']} on {first['world']}"
            charts.line(left, alike, itemgetter("tokens_s"), label=name)
            charts.line(right, alike, itemgetter("efficiency"), label=name)
        right.axhline(1, color="grey", linewidth=1)
        charts.over_tokens(left, lengths, "a training step", "tokens/s of a rank")
        shown = ("over one rank alone", "efficiency", "{:.0%}".format)
        charts.over_tokens(right, lengths, *shown, log=False, legend=False)


SPREADING = (
    "Alone is one rank, the others wait. ddp: torch's DistributedDataParallel, a sequence a rank; "
    "fsdp2: torch's fully_shard of each decoder layer and of what is around them, frozen weights "
    "and adapters in their own dtypes, a sequence a rank; cp: one sequence sharded over all "
    "ranks by cab_hf.context_parallel, whose gradients DistributedDataParallel adds up. Efficiency "
    "is tokens a second of a rank over those of one alone by the same way at the same length; "
    "TFLOP/s are a rank's as well. What is compared with one process beforehand are the gradients "
    "of all adapters, CAB keeping every block where that is done below float32."
)
SEEKING = (
    "The longest sequence is sought among whole multiples of a few thousand tokens, from an "
    "estimate of memory on; a try ends once the second-to-last decoder layer has its gradients, "
    "where the peak is reached, and has no time. Room: all that torch can allocate."
)
OVER_RANKS = {
    **TOKENS,
    "ranks": "world",
    "spread": "spread",
    "way": "implementation",
    "s": column(seconds, "ms"),
    "tokens/s a GPU": column("{:,.0f}".format, "tokens_s"),
    "efficiency": column(percent, "efficiency"),
    "over best dense": column(TIMES, "over_best"),
    **DENSITY,
    "peak GiB": column(digits, "peak_gib"),
    "TFLOP/s": column(digits, "tflops"),
}
SAVED_MEMORY = {
    **TOKENS,
    "way": "implementation",
    "tile": column("{:,}".format, "tile_tokens"),
    "offloaded layers": "offloaded",
    "GiB of the host": column(digits, "host_gib"),
    "peak GiB": column(digits, "peak_gib"),
}
LONGEST = {
    "ranks": "world",
    "spread": "spread",
    "way": "implementation",
    **TOKENS,
    "peak GiB": column(digits, "peak_gib"),
    "room": column(digits, "room_gib"),
    "too many": column("{:,}".format, "over"),
}
