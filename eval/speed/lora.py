"""``speed lora``: time a LoRA step of a whole model, by attention.

Under torchrun it measures scaling over ranks: each rank learns its own sequence, or all ranks share
one.
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
from cab_hf.eval.speed import dense, runner
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.model import SDPA
from cab_hf.eval.speed.rank_group import Ranked, RankGroup, by_torchrun
from cab_hf.eval.speed.runner import CAB_DENSE, Panel
from cab_hf.eval.speed.ttft import GAIN, beside_dense, speed_ups
from cab_hf.experiment.settings import by_device, flag, number_or_auto, option
from cab_hf.finetune.cost_model import GIB, Cost, Fit, Room, fit, host_bytes, plan_bytes
from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Batch, Objective
from cab_hf.finetune.offload import Offload
from cab_hf.finetune.parallel import block_of, sharded
from cab_hf.finetune.tiles import compute_in_tiles, tile_of

ALONE, DDP, FSDP2, CP = SPREADS = ("alone", "ddp", "fsdp2", "cp")
CAB = "cab"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALPHA = 32.0
LEARNING_RATE = 1e-4
CLIP = 1.0
# tokens of the longest step in a search
LONGEST = 2**20
# tokens of the step that compiles all kernels, the default min_length: a timed step may take a
# minute
WARM_UP_TOKENS = 2**15
SPREADING = (
    "Alone is one rank while the others wait. ddp: torch's DistributedDataParallel, a sequence "
    "per rank; fsdp2: torch's fully_shard of each decoder layer and of the remaining modules, a "
    "sequence per rank; cp: one sequence sharded over all ranks by cab_hf.context_parallel. "
    "Efficiency is tokens per second and rank divided by those of one rank alone with the same "
    "attention and length; TFLOP/s are per rank as well."
)


@dataclass(frozen=True)
class Settings(models.LongestSettings):
    """Settings of a run of training steps."""

    KEYS = {"length": "lengths", "implementation": "implementations"}
    # the block size with the fastest gradients
    DEFAULTS = {**runner.KEEPS_ALL, "key_block": 128}
    POSITIVE = (*models.LongestSettings.POSITIVE, "rank", "runs", "multiple")
    FROM_0 = (*models.LongestSettings.FROM_0, "tile_tokens", "offload_layers")
    CHOICES = {"spread": SPREADS}

    lengths: tuple[int, ...] | None = runner.powers(13, 17)
    implementations: tuple[str, ...] | None = runner.listed(
        (SDPA, "cuDNN", "FA4", CAB), (SDPA, "SDPA", CAB), "attention implementations"
    )
    rank: int = option(16, f"rank of the LoRA adapters in {', '.join(TARGETS)}", int)
    runs: int = option(3, "timed steps per row", int)
    spread: tuple[str, ...] = runner.listed(
        (), None, f"how ranks share a step: {', '.join(SPREADS)}; default under torchrun: all"
    )
    tile_tokens: int | None = option(
        None, "tokens per tile of MLPs; 0: no tiles; auto: as in fine-tuning", number_or_auto
    )
    offload_layers: int | None = option(
        None, "layers with inputs on the host; auto: as few as fit", number_or_auto
    )
    qlora: bool = flag("keep weights in 4 bits, as `finetune/lora.py --qlora` does")
    longest: bool = flag("also search for the longest sequence whose step fits")
    multiple: int | None = by_device(
        2**13, 64, "tokens of which the longest sequence is a multiple", int
    )

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
        text = f"some of {ours} if a sequence is sharded ({CP})"
        self.check("implementations", across, text)
        self.check("qlora", not (self.qlora and self.is_spread), "left out if ranks share a step")
        every = not self.longest or any(":" not in part for part in self.max_density)
        self.check("max_density", every, "one share for all lengths with --longest")

    @property
    def is_spread(self) -> bool:
        return self.spread != (ALONE,)

    @property
    def method(self) -> str:
        together = models.TOGETHER if self.is_spread or by_torchrun() else ""
        return (
            f"median of {self.runs} steps by time.perf_counter after one warm-up step of at most "
            f"{WARM_UP_TOKENS:,} tokens; a step is forward and backward of a sequence of random "
            "tokens under gradient checkpointing, clipping and AdamW, in tiles and offloaded as "
            f"in fine-tuning; the peak is all allocated memory{together}"
        )


class LoraStep(Ranked):
    """The experiment; a case is one length, one attention, and one way to share a step."""

    name = "speed lora"
    purpose = "time a step of LoRA fine-tuning of a LLaMA, by attention"
    title = "A step of LoRA fine-tuning"
    caption = "seconds of a training step by length, and the speed-up of CAB"
    Settings = Settings
    CASE = (*Settings.KEYS, "spread", "world")
    ADDED = {"spread": ALONE, "world": 1, "sought": False, "fits": None, "room_gib": None}
    ADDED |= {"tile_tokens": 0, "offloaded": 0, "host_gib": None}
    GROWS = (*Settings.KEYS.values(), "cab", "worlds", "spread", "longest", "multiple")
    GROWS += ("tile_tokens", "offload_layers")
    SHAPE = ("dtype", "rank")
    BY = {"way": "implementation", "ranks": "world", "spread": "spread"}
    PANELS = (
        Panel("training step", "tokens/s per rank", ("tokens_s",)),
        GAIN,
        Panel("relative to one rank alone", "efficiency", ("efficiency",), log=False),
    )
    NOTES = {
        "": f"LoRA in {', '.join(TARGETS)}, all other weights frozen. {models.WAYS} {models.GAINS} "
        "Operations are those of the forward and backward pass, without recomputation. Room: "
        "all memory that torch can allocate.",
        "worlds": SPREADING,
    }
    described = staticmethod(models.described)
    FOUND = ("ms", "peak_gib", "density", "ceiling", "tflops", "ran_as", "fits", "room_gib")
    FOUND += ("tile_tokens", "offloaded", "host_gib")

    @staticmethod
    def needs_ranks(settings: Settings) -> bool:
        return settings.is_spread or by_torchrun()

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        settings = self.settings
        for how in settings.spread:
            place = {"spread": how, "world": 1 if how == ALONE else self.ranks.size}
            asked = [x for x in settings.asked() if how != CP or x["implementation"] in NAMES]
            for case in asked:
                yield {**case, **place, "sought": False}
            if settings.longest:
                for way in dict.fromkeys(case["implementation"] for case in asked):
                    here = {**place, "implementation": way}
                    estimate = self.estimated(here)
                    yield from self.search(here, samples, settings.multiple, estimate)

    def estimated(self, place: Mapping[str, Any]) -> int:
        """Return the estimated longest sequence whose step fits at ``place``; 0 on a CPU."""
        step, room = self.settings.multiple, room_of(self.bench.room())
        lengths = range(step, LONGEST, step) if room.device < inf else range(0)
        # one by one: where tiles start, a longer sequence needs less memory than a shorter one
        for length in reversed(lengths):
            if room.holds(self.fitted(place, length, room)[1].memory):
                return length
        return 0

    def fitted(self, place: Mapping[str, Any], length: int, room: Room) -> tuple[int, Fit]:
        """Return (tokens of a tile or 0, memory and offloaded layers) of a step at ``place``."""
        settings, how, world = self.settings, place["spread"], place["world"]
        cp, cost = world if how == CP else 1, train_state(settings).cost
        tile = tile_of(length // cp, settings.tile_tokens)
        more = {"itemsize": settings.torch_dtype.itemsize, "tile": tile, "cp": cp}
        more["shards"] = world if how == FSDP2 else 1
        if place["implementation"] == CAB:
            more["plans"] = plan_bytes(cost, settings.budgeted(length), length, cp=cp)
        return tile, fit(cost, length, room, settings.offload_layers, **more)

    def find_on_ranks(self, sample: dict[str, Any], ranks: RankGroup) -> None:
        """Add the results of a step of ``ranks`` to ``sample``."""
        settings, length, how = self.settings, sample["length"], sample["spread"]
        # hooks of an earlier distributed step live until it is collected
        gc.collect()
        sample["room_gib"] = self.bench.room()
        tile, (offloaded, _) = self.fitted(sample, length, room_of(sample["room_gib"]))
        sharing = ranks.size if how == CP else 1
        host = save_memory(settings, length // sharing, tile, offloaded)
        sample |= {"tile_tokens": tile, "offloaded": offloaded, "host_gib": host}
        runs = 1 if sample["sought"] else settings.runs
        with training(settings, length, sample["implementation"], how, ranks) as (call, known):
            ranks.together(lambda: call(min(length, WARM_UP_TOKENS)))
            # do not count the attention of the warm-up step
            known()
            ranks.together(self.bench.settle)
            result = ranks.time_slowest(self.bench, lambda: call(length), runs, warm_up=0)
            sample |= {"fits": True, **known()}
        cost, density = train_state(settings).cost, sample["density"]
        done = step_flops(cost, length, density)
        sample |= {
            "ms": result.ms,
            "peak_gib": result.peak_gib,
            "ceiling": step_flops(cost, length) / done,
            "tflops": done / sharing / result.ms / 1e9,
        }

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return rows as for the time to the first token, among rows with equal ranks."""
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
        return [*speed_ups(rows), *runner.longest(rows, cls.BY)]


EXPERIMENT = LoraStep


def step_flops(cost: Cost, length: int, density: float = 1.0) -> float:
    """Return the operations of a step of one sequence, with that share of its pairs attended."""
    attention = sum(cost.attention(cost.pairs(torch.arange(length)[None])))
    return cost.products(length) + density * attention


def room_of(gib: float | None) -> Room:
    """Return the memory of a device with ``gib`` GiB, and of the host; unlimited for a CPU."""
    return Room(inf if gib is None else gib * GIB, host_bytes())


class TrainState(NamedTuple):
    """A model in training with its loss, and the cost of its step."""

    objective: Objective
    cost: Cost

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.objective.parameters() if p.requires_grad]


@lru_cache(maxsize=1)
def train_state(settings: Settings) -> TrainState:
    """Return the random model with trainable adapters."""
    model = models.random_model(settings)
    if settings.qlora:
        to_4_bits(model, settings.dtype)
    model = with_lora(model, TARGETS, settings.rank, ALPHA)
    enable_gradient_checkpointing(model)
    model.train()
    return TrainState(Objective(model), Cost.of(model))


def save_memory(settings: Settings, tokens: int, tile: int, offloaded: int) -> float:
    """Set up tiles for ``tokens`` per rank (0: none) and offloading; return the pinned GiB."""
    model = train_state(settings).objective.model
    # one tile of all tokens, and of the padding of ranks, means no tiles
    compute_in_tiles(model, tile or sys.maxsize)
    offload = Offload(offloaded, torch.device(settings.device))
    # free the earlier pinned memory first: the host may have no room for both
    offload.enable(model)
    # the timed part must not allocate
    offload.reserve(tokens * settings.hidden * settings.torch_dtype.itemsize)
    return offload.host_bytes / GIB


def batch_of(settings: Settings, tokens: int, number: int = 0) -> Batch:
    """Return sequence [1, tokens] of that number: random tokens, each predicting another one."""
    drawn = models.random_tokens(settings, tokens + 1, number)
    positions = torch.arange(tokens, device=settings.device)[None]
    return {"input_ids": drawn[:, :-1], "position_ids": positions, "labels": drawn[:, 1:]}


@contextmanager
def training(
    settings: Settings, length: int, way: str, how: str = ALONE, ranks: RankGroup | None = None
) -> Iterator[tuple[Callable[[int], None], Callable[[], dict[str, Any]]]]:
    """Return a step on ``tokens``, and a function that counts attention since its last call.

    The count is over all ranks.
    """
    ranks = RankGroup() if ranks is None else ranks
    model, config = models.random_model(settings), settings.budgeted(length)

    def known() -> dict[str, Any]:
        found = models.attended_by(model, length, way, reset=True)
        if how != CP:
            return found | {"density": ranks.mean(found["density"])}
        density = ranks.mean(found["density"], ranks.pairs(length, block_of(model)))
        # sharded sequences are not described
        return {"density": density, "ran_as": None}

    if how != ALONE:
        # half of all adapter weights are initially zero
        draw = torch.Generator(settings.device).manual_seed(settings.seed)
        with torch.no_grad():
            for parameter in train_state(settings).trainable:
                parameter.normal_(std=models.INITIAL_STD, generator=draw)
    try:
        with models.attending(model, way, config), shared(settings, how, ranks) as backward:
            # sharding has replaced the weights
            trainable = train_state(settings).trainable
            fused = torch.device(settings.device).type == "cuda"
            optimizer = torch.optim.AdamW(trainable, LEARNING_RATE, fused=fused)
            try:
                yield partial(train_step, backward, trainable, optimizer), known
            finally:
                for parameter in trainable:
                    parameter.grad = None
    finally:
        if how == FSDP2:
            # this rank holds only a part of the model
            models.forget_model()
            train_state.cache_clear()


@contextmanager
def shared(settings: Settings, how: str, ranks: RankGroup) -> Iterator[Callable[[int], None]]:
    """Return a function that computes this rank's gradients; `FSDP2` leaves the weights sharded."""
    objective = wrapped = train_state(settings).objective
    batch, scale, inside = partial(batch_of, settings), 1, nullcontext()
    if how in (DDP, FSDP2):
        batch = partial(batch, number=ranks.rank)
    if how == FSDP2:
        # as in accelerate: layers are gathered one by one, and the other modules form one more unit
        mesh = DeviceMesh.from_group(ranks.group, torch.device(settings.device).type)
        for layer in models.random_model(settings).model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(objective, mesh=mesh)
    if how in (DDP, CP):
        wrapped = DistributedDataParallel(objective, process_group=ranks.group)
    if how == CP:
        block, scale = block_of(objective.model), ranks.size
        # a recomputed layer gathers again by itself
        inside = context_parallel(objective.model, ranks.group, block=block, regather_kv=False)

    def backward(tokens: int) -> None:
        given = batch(tokens)
        if how == CP:
            given = sharded(given, ranks.group, block)
        # each rank divides by the tokens of all ranks that share a sequence
        (wrapped(given) * (scale / tokens)).backward()

    with inside:
        yield backward


def train_step(
    backward: Callable[[int], None],
    trainable: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    tokens: int,
) -> None:
    """Take a step on ``tokens`` per sequence."""
    backward(tokens)
    torch.nn.utils.clip_grad_norm_(trainable, CLIP)
    optimizer.step()
    optimizer.zero_grad()
