"""``speed lora``: a step of LoRA fine-tuning of a whole model, by what it attends with.

Started by torchrun, it measures how a step spreads over ranks, which learn a sequence each, or one
that is sharded over all of them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cab_hf import context_parallel
from cab_hf.config import NAMES
from cab_hf.eval.experiment import Row
from cab_hf.eval.quantised import to_4_bits
from cab_hf.eval.report import grouped
from cab_hf.eval.speed import base, dense
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.model import SDPA
from cab_hf.eval.speed.reported import CAB_DENSE, Panel
from cab_hf.eval.speed.team import Team, by_torchrun
from cab_hf.eval.speed.ttft import GAIN, TimeToFirstToken, beside_dense
from cab_hf.finetune.meter import GIB, Cost, Fit, Room, fit, host_bytes, plan_bytes
from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Batch, Objective
from cab_hf.finetune.offload import Offload
from cab_hf.finetune.parallel import block_of, sharded
from cab_hf.finetune.tiles import compute_in_tiles, tile_of
from cab_hf.runs.settings import by_device, flag, number_or_auto, option

ALONE, DDP, FSDP2, CP = SPREADS = ("alone", "ddp", "fsdp2", "cp")
CAB = "cab"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALPHA = 32.0
LEARNING_RATE = 1e-4
CLIP = 1.0
# tokens of the longest step that is sought
LONGEST = 2**20
# tokens of the step that compiles all kernels, which is as long as CAB wants a text: one that is
# timed may take a minute
WARM_UP_TOKENS = 2**15
SPREADING = (
    "Alone is one rank, the others wait. ddp: torch's DistributedDataParallel, a sequence a rank; "
    "fsdp2: torch's fully_shard of each decoder layer and of what is around them, a sequence a "
    "rank; cp: one sequence sharded over all ranks by cab_hf.context_parallel. Efficiency is "
    "tokens a second of a rank over those of one alone by the same way at the same length; TFLOP/s "
    "are a rank's as well."
)


@dataclass(frozen=True)
class Settings(models.LongestSettings):
    """What a run of training steps is told."""

    KEYS = {"length": "lengths", "implementation": "implementations"}
    # the blocks whose gradients are fastest
    DEFAULTS = {**base.KEEPS_ALL, "key_block": 128}
    POSITIVE = (*models.LongestSettings.POSITIVE, "rank", "runs", "multiple")
    FROM_0 = (*models.LongestSettings.FROM_0, "tile_tokens", "offload_layers")
    CHOICES = {"spread": SPREADS}

    lengths: tuple[int, ...] | None = base.powers(13, 17)
    implementations: tuple[str, ...] | None = base.listed(
        (SDPA, "cuDNN", "FA4", CAB), (SDPA, "SDPA", CAB), "ways to attend"
    )
    rank: int = option(16, f"rank of the LoRA adapters, in {', '.join(TARGETS)}", int)
    runs: int = option(3, "timed steps of every row", int)
    spread: tuple[str, ...] = base.listed(
        (), None, f"how ranks share a step: {', '.join(SPREADS)}; all by default under torchrun"
    )
    tile_tokens: int | None = option(
        None, "tokens of a tile of MLPs; 0: no tiles; auto: as in fine-tuning", number_or_auto
    )
    offload_layers: int | None = option(
        None, "layers whose inputs the host holds; auto: as few as fit", number_or_auto
    )
    qlora: bool = flag("weights in 4 bits, as `finetune/lora.py --qlora` has them")
    longest: bool = flag("also search for the longest sequence of which a step fits")
    multiple: int | None = by_device(2**13, 64, "tokens that the longest is a multiple of", int)

    def __post_init__(self) -> None:
        asked = self.implementations
        if not self.spread:
            self._set("spread", SPREADS if by_torchrun() else (ALONE,))
        super().__post_init__()
        if self.is_spread and not asked:
            self._set("implementations", (CAB_DENSE, CAB))
        known = (SDPA, CAB_DENSE, CAB, *dense.on(self.device))
        self.check_choice("implementations", known)
        across = CP not in self.spread or set(self.implementations) & set(NAMES)
        ours = ", ".join(name for name in NAMES if name in known)
        text = f"some of {ours} where a sequence is sharded ({CP})"
        self.check("implementations", across, text)
        self.check(
            "qlora", not (self.qlora and self.is_spread), "left out where ranks share a step"
        )
        every = not self.longest or any(":" not in part for part in self.max_density)
        self.check("max_density", every, "a share for all lengths where the longest is sought")

    @property
    def is_spread(self) -> bool:
        return self.spread != (ALONE,)

    @property
    def method(self) -> str:
        together = models.TOGETHER if self.is_spread or by_torchrun() else ""
        return (
            f"median of {self.runs} steps by time.perf_counter after one of at most "
            f"{WARM_UP_TOKENS:,} tokens that warms up; a step is forward and backward of a "
            "sequence of random tokens under gradient checkpointing, clipping and AdamW, in tiles "
            f"and offloaded as in fine-tuning; the peak is all that was allocated{together}"
        )


class LoraStep(TimeToFirstToken):
    """A case is one length, one way to attend, and how so many ranks share a step."""

    name = "speed lora"
    purpose = "a step of LoRA fine-tuning of a LLaMA, by what it attends with"
    title = "A step of LoRA fine-tuning"
    caption = "seconds of a training step by length, and what CAB gains"
    Settings = Settings
    CASE = (*Settings.KEYS, "spread", "world")
    ADDED = {"spread": ALONE, "world": 1, "sought": False, "fits": None, "room_gib": None}
    ADDED |= {"tile_tokens": 0, "offloaded": 0, "host_gib": None}
    GROWS = (*TimeToFirstToken.GROWS, "spread", "longest", "multiple")
    GROWS += ("tile_tokens", "offload_layers")
    SHAPE = ("dtype", "rank")
    BY = {"way": "implementation", "ranks": "world", "spread": "spread"}
    PANELS = (
        Panel("a training step", "tokens/s of a rank", ("tokens_s",)),
        GAIN,
        Panel("over one rank alone", "efficiency", ("efficiency",), log=False),
    )
    NOTES = {
        "": f"LoRA in {', '.join(TARGETS)}, all else frozen. {models.WAYS} {models.GAINS} "
        "Operations are those of the forward and the backward pass, without what is computed a "
        "second time. Room: all that torch can allocate.",
        "worlds": SPREADING,
    }
    FOUND = (*TimeToFirstToken.FOUND, "fits", "room_gib", "tile_tokens", "offloaded", "host_gib")

    @staticmethod
    def needs_ranks(settings: Settings) -> bool:
        return settings.is_spread or by_torchrun()

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        settings = self.settings
        for how in settings.spread:
            place = {"spread": how, "world": 1 if how == ALONE else self.team.size}
            asked = [x for x in settings.asked() if how != CP or x["implementation"] in NAMES]
            for case in asked:
                yield {**case, **place, "sought": False}
            if settings.longest:
                for way in dict.fromkeys(case["implementation"] for case in asked):
                    here = {**place, "implementation": way}
                    estimate = self.estimated(here)
                    yield from self.search(here, samples, settings.multiple, estimate)

    def estimated(self, place: Mapping[str, Any]) -> int:
        """The longest sequence of which a step fits at ``place``, estimated; 0 on a CPU."""
        step, room = self.settings.multiple, room_of(self.bench.room())
        lengths = range(step, LONGEST, step) if room.device < inf else range(0)
        # one by one: where tiles begin, a longer sequence takes less than a shorter one
        for length in reversed(lengths):
            if room.holds(self.fitted(place, length, room)[1].memory):
                return length
        return 0

    def fitted(self, place: Mapping[str, Any], length: int, room: Room) -> tuple[int, Fit]:
        """(tokens of a tile or 0, the memory and the layers offloaded) of a step at ``place``."""
        settings, how, world = self.settings, place["spread"], place["world"]
        cp, cost = world if how == CP else 1, trainee(settings).cost
        tile = tile_of(length // cp, settings.tile_tokens)
        more = {"itemsize": settings.torch_dtype.itemsize, "tile": tile, "cp": cp}
        more["shards"] = world if how == FSDP2 else 1
        if place["implementation"] == CAB:
            more["plans"] = plan_bytes(cost, settings.budgeted(length), length, cp=cp)
        return tile, fit(cost, length, room, settings.offload_layers, **more)

    def find_on(self, sample: dict[str, Any], team: Team) -> None:
        """Write into ``sample`` what a step of ``team`` takes."""
        settings, length, how = self.settings, sample["length"], sample["spread"]
        # what spread an earlier step hooks into gradients until it is gone
        gc.collect()
        sample["room_gib"] = self.bench.room()
        tile, (offloaded, _) = self.fitted(sample, length, room_of(sample["room_gib"]))
        sharing = team.size if how == CP else 1
        host = save_memory(settings, length // sharing, tile, offloaded)
        sample |= {"tile_tokens": tile, "offloaded": offloaded, "host_gib": host}
        runs = 1 if sample["sought"] else settings.runs
        with training(settings, length, sample["implementation"], how, team) as (call, known):
            team.together(lambda: call(min(length, WARM_UP_TOKENS)))
            # what that one attended does not count
            known()
            team.together(self.bench.settle)
            result = team.slowest(self.bench, lambda: call(length), runs, warm_up=0)
            sample |= {"fits": True, **known()}
        cost, density = trainee(settings).cost, sample["density"]
        done = step_flops(cost, length, density)
        sample |= {
            "ms": result.ms,
            "peak_gib": result.peak_gib,
            "ceiling": step_flops(cost, length) / done,
            "tflops": done / sharing / result.ms / 1e9,
        }

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As of the time to the first token, among rows of the same ranks that share alike."""
        rows, alone = [], {}
        for alike in grouped(samples, "spread", "world"):
            rows += beside_dense(alike)
        for row in rows:
            sequences = row["world"] if row["spread"] in (DDP, FSDP2) else 1
            tokens = sequences * row["length"] / row["world"]
            row |= {"tokens_s": row["ms"] and tokens / row["ms"] * 1e3, "efficiency": None}
            if row["spread"] == ALONE:
                alone[row["length"], row["implementation"]] = row["tokens_s"]
        for row in rows:
            complete = alone.get((row["length"], row["implementation"]))
            if complete and row["tokens_s"]:
                row["efficiency"] = row["tokens_s"] / complete
        return rows

    @classmethod
    def readings(cls, rows: Sequence[Row]) -> list[str]:
        return [*super().readings(rows), *base.longest(rows, cls.BY)]


EXPERIMENT = LoraStep


def step_flops(cost: Cost, length: int, density: float = 1.0) -> float:
    """Floating-point operations of a step of one text, that share of its pairs being attended."""
    attention = sum(cost.attention(cost.pairs(torch.arange(length)[None])))
    return cost.products(length) + density * attention


def room_of(gib: float | None) -> Room:
    """What there is on a device with so many GiB, and on the host; a CPU has room without end."""
    return Room(inf if gib is None else gib * GIB, host_bytes())


class Trainee(NamedTuple):
    """A model that is trained, with its loss, and what a step of it costs."""

    objective: Objective
    cost: Cost

    @property
    def learnt(self) -> list[nn.Parameter]:
        return [p for p in self.objective.parameters() if p.requires_grad]


@lru_cache(maxsize=1)
def trainee(settings: Settings) -> Trainee:
    """The random model with adapters that are about to be learnt."""
    model = models.random_model(settings)
    if settings.qlora:
        to_4_bits(model, settings.dtype)
    model = with_lora(model, TARGETS, settings.rank, ALPHA)
    enable_gradient_checkpointing(model)
    model.train()
    return Trainee(Objective(model), Cost.of(model))


def save_memory(settings: Settings, tokens: int, tile: int, offloaded: int) -> float:
    """Have the model compute ``tokens`` a rank in tiles, 0 for none, so many layers being
    offloaded; the GiB that are pinned.
    """
    model = trainee(settings).objective.model
    # one tile of all tokens, and of the padding of ranks, is none
    compute_in_tiles(model, tile or sys.maxsize)
    offload = Offload(offloaded, torch.device(settings.device))
    # the one before gives its memory back first: the host may have no room for both
    offload.enable(model)
    # what is timed allocates nothing
    offload.reserve(tokens * settings.hidden * settings.torch_dtype.itemsize)
    return offload.host_bytes / GIB


def batch_of(settings: Settings, tokens: int, number: int = 0) -> Batch:
    """Sequence [1, tokens] of that number: random tokens, each of which is to predict another."""
    drawn = models.random_tokens(settings, tokens + 1, number)
    positions = torch.arange(tokens, device=settings.device)[None]
    return {"input_ids": drawn[:, :-1], "position_ids": positions, "labels": drawn[:, 1:]}


@contextmanager
def training(
    settings: Settings, length: int, way: str, how: str = ALONE, team: Team | None = None
) -> Iterator[tuple[Callable[[int], None], Callable[[], dict[str, Any]]]]:
    """(a step on so many tokens, what all ranks have attended since it was asked for last)."""
    team = Team() if team is None else team
    model, config = models.random_model(settings), settings.budgeted(length)

    def known() -> dict[str, Any]:
        found = models.attended_by(model, length, way, reset=True)
        if how != CP:
            return found | {"density": team.mean(found["density"])}
        density = team.mean(found["density"], team.pairs(length, block_of(model)))
        # ranks that share a sequence are not what is described
        return {"density": density, "ran_as": None}

    if how != ALONE:
        # half of all adapters are zero when they are new
        draw = torch.Generator(settings.device).manual_seed(settings.seed)
        with torch.no_grad():
            for parameter in trainee(settings).learnt:
                parameter.normal_(std=models.INITIAL_STD, generator=draw)
    try:
        with models.attending(model, way, config), shared(settings, how, team) as backward:
            # weights that are spread are others by now
            learnt = trainee(settings).learnt
            fused = torch.device(settings.device).type == "cuda"
            optimizer = torch.optim.AdamW(learnt, LEARNING_RATE, fused=fused)
            try:
                yield partial(learn, backward, learnt, optimizer), known
            finally:
                for parameter in learnt:
                    parameter.grad = None
    finally:
        if how == FSDP2:
            # this rank has a part of the model left
            models.forget_model()
            trainee.cache_clear()


@contextmanager
def shared(settings: Settings, how: str, team: Team) -> Iterator[Callable[[int], None]]:
    """What makes this rank's gradients on so many tokens; `FSDP2` leaves the weights spread."""
    objective = wrapped = trainee(settings).objective
    batch, scale, inside = partial(batch_of, settings), 1, nullcontext()
    if how in (DDP, FSDP2):
        batch = partial(batch, number=team.rank)
    if how == FSDP2:
        # as accelerate does: layers are gathered one by one, what is around them is one more unit
        mesh = DeviceMesh.from_group(team.group, torch.device(settings.device).type)
        for layer in models.random_model(settings).model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(objective, mesh=mesh)
    if how in (DDP, CP):
        wrapped = DistributedDataParallel(objective, process_group=team.group)
    if how == CP:
        block, scale = block_of(objective.model), team.size
        # a layer that is computed again gathers again by itself
        inside = context_parallel(objective.model, team.group, block=block, regather_kv=False)

    def backward(tokens: int) -> None:
        given = batch(tokens)
        if how == CP:
            given = sharded(given, team.group, block)
        # a rank divides by the tokens of all that share a sequence
        (wrapped(given) * (scale / tokens)).backward()

    with inside:
        yield backward


def learn(
    backward: Callable[[int], None],
    learnt: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    tokens: int,
) -> None:
    """A step on ``tokens`` a sequence."""
    backward(tokens)
    torch.nn.utils.clip_grad_norm_(learnt, CLIP)
    optimizer.step()
    optimizer.zero_grad()
