"""A training step of a whole model, by one process or shared by ranks.

Ranks learn a sequence each, or one that is sharded over all of them. Their gradients are compared
with those of one process before they are timed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cab_hf import context_parallel
from cab_hf.config import CabConfig
from cab_hf.distributed.sharding import sharding_of
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.checks import close
from cab_hf.eval.speed.team import Team
from cab_hf.finetune.meter import GIB, Cost
from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Batch, Objective
from cab_hf.finetune.offload import Offload
from cab_hf.finetune.parallel import block_of, sharded
from cab_hf.finetune.tiles import compute_in_tiles
from cab_hf.patches import cab

if TYPE_CHECKING:
    from cab_hf.eval.speed.lora import Settings

ALONE, DDP, FSDP2, CP = SPREADS = ("alone", "ddp", "fsdp2", "cp")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALPHA = 32.0
LEARNING_RATE = 1e-4
CLIP = 1.0
# gradients of float32 differ by the order of sums alone
EXACT_TOLERANCE = 1e-4
# those of lower precision may be off by so many times what one process is off by
MOST_ROUNDING = 1.5


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
    model = with_lora(models.random_model(settings), TARGETS, settings.rank, ALPHA)
    enable_gradient_checkpointing(model)
    model.train()
    return Trainee(Objective(model), Cost.of(model))


def save_memory(settings: Settings, tokens: int, tile: int, offloaded: int) -> float:
    """Have the model compute ``tokens`` a rank in tiles, 0 for none; the GiB that are pinned.

    ``offloaded`` are the layers whose checkpoints are.
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


@dataclass(frozen=True, eq=False)
class Step:
    """A training step as this rank takes part in it.

    Attributes:
        objective: the model and its loss, as it is called.
        learnt: its parameters that are trained.
        batch: tokens of a sequence -> what this rank computes of it.
        scale: of the summed loss over ``tokens``, by which the gradients of all ranks come out as
            those of the mean loss of all their tokens.
    """

    objective: nn.Module
    learnt: Sequence[nn.Parameter]
    batch: Callable[[int], Batch]
    scale: int = 1

    def gradients(self, tokens: int) -> Tensor:
        """Those of a step in a row, float32 and whole; none is left behind."""
        self.backward(tokens)
        results = [p.grad for p in self.learnt]
        self.forget()
        whole = (g.full_tensor() if isinstance(g, DTensor) else g for g in results)
        return torch.cat([g.float().flatten() for g in whole])

    def backward(self, tokens: int) -> None:
        """Make the gradients of a step on ``tokens`` a sequence."""
        (self.objective(self.batch(tokens)) * (self.scale / tokens)).backward()

    def forget(self) -> None:
        """Drop the gradients."""
        for parameter in self.learnt:
            parameter.grad = None


def learn(step: Step, optimizer: torch.optim.Optimizer, tokens: int) -> None:
    """A step on ``tokens`` a sequence."""
    step.backward(tokens)
    torch.nn.utils.clip_grad_norm_(step.learnt, CLIP)
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def shared(settings: Settings, how: str, team: Team) -> Iterator[Step]:
    """A step shared by ``team``, of a model that attends already as it shall.

    `FSDP2` leaves the weights of the model spread.
    """
    objective = wrapped = trainee(settings).objective
    number = team.rank if how in (DDP, FSDP2) else 0
    batch, inside = partial(batch_of, settings, number=number), nullcontext()
    if how == FSDP2:
        # as accelerate does: layers are gathered one by one, what is around them is one more unit
        mesh = DeviceMesh.from_group(team.group, torch.device(settings.device).type)
        for layer in models.random_model(settings).model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(objective, mesh=mesh)
    if how in (DDP, CP):
        wrapped = DistributedDataParallel(objective, process_group=team.group)
    if how == CP:
        block = block_of(objective.model)
        # a layer that is computed again gathers again by itself
        inside = context_parallel(objective.model, team.group, block=block, regather_kv=False)
    with inside:
        # weights that are spread are others by now
        learnt = trainee(settings).learnt
        if how == CP:
            yield Step(wrapped, learnt, lambda n: sharded(batch(n), team.group, block), team.size)
        else:
            yield Step(wrapped, learnt, batch)


@contextmanager
def training(
    settings: Settings, length: int, way: str, how: str = ALONE, team: Team | None = None
) -> Iterator[tuple[Callable[[int], None], Callable[[], dict[str, Any]]]]:
    """(what learns from a text of so many tokens, what is known of it since it was asked last).

    Known are its ``density``, attended over causal pairs in all layers and of all ranks, and what
    CAB ``ran_as``. Of steps that ranks share gradients are checked first.

    Raises:
        RuntimeError: where gradients are not those of one process.
    """
    team = Team() if team is None else team
    model, config = models.random_model(settings), settings.budgeted(length)
    first = config if how == ALONE else check_config(settings, config)
    expected = None if how == ALONE else expected_gradients(settings, way, first, how, team)

    def known() -> dict[str, Any]:
        found = models.attended_by(model, length, way, reset=True)
        density = density_of_all(team, found["density"], how, length, block_of(model))
        # ranks that share a sequence are not what is described
        return {"density": density, "ran_as": None if how == CP else found["ran_as"]}

    try:
        with models.attending(model, way, first), shared(settings, how, team) as step:
            if expected is not None:
                team.together(lambda: check_gradients(step, expected, how))
                # what is timed has the memory to itself
                expected = None
            fused = torch.device(settings.device).type == "cuda"
            optimizer = torch.optim.AdamW(step.learnt, LEARNING_RATE, fused=fused)
            try:
                with cab(model, config) if way in models.CAB else nullcontext():
                    yield partial(learn, step, optimizer), known
            finally:
                step.forget()
    finally:
        if how == FSDP2:
            # this rank has a part of the model left
            models.random_model.cache_clear()
            trainee.cache_clear()


def density_of_all(team: Team, density: float, how: str, length: int, block: int) -> float:
    """What all ranks attend over causal pairs; this one attends ``density`` of its own."""
    pairs = 1
    if how == CP:
        sharding = sharding_of((length,), team.size, block)
        pairs = int((sharding.positions[team.rank] + 1)[sharding.real[team.rank]].sum())
    everyone = team.everyone((density, pairs))
    return sum(share * n for share, n in everyone) / sum(n for _, n in everyone)


# --- what is known to be right


class Expected(NamedTuple):
    """What the gradients of ranks are compared with: those of one process on so many tokens."""

    tokens: int
    gradients: Tensor
    tolerance: float


def check_config(settings: Settings, config: CabConfig) -> CabConfig:
    """``config`` as a small sequence is checked with: sparse, however short it is.

    Below float32 it keeps every block: ranks round hidden states in another order than one process
    does, and blocks on the border of a budget would be others.
    """
    changed: dict[str, Any] = {"min_length": 0}
    if settings.torch_dtype != torch.float32:
        changed |= {"mass_threshold": 0.0, "max_density": 1.0}
    return dataclasses.replace(config, **changed)


def expected_gradients(
    settings: Settings, way: str, config: CabConfig, how: str, team: Team
) -> Expected:
    """The mean gradients of what the ranks of ``team`` learn in a step, one behind the other.

    Adapters are drawn for it, the same on all ranks; half of them are zero when they are new.
    Below float32 the gradients are computed in float32, and ranks may be off by little more than
    one process is in the dtype of the weights.
    """
    model, (objective, _) = models.random_model(settings), trainee(settings)
    learnt = trainee(settings).learnt
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    with torch.no_grad():
        for parameter in learnt:
            parameter.normal_(std=models.INITIAL_STD, generator=generator)
    numbers = range(team.size if how in (DDP, FSDP2) else 1)

    def by_one_process() -> Tensor:
        batches = [partial(batch_of, settings, number=number) for number in numbers]
        return sum(Step(objective, learnt, x).gradients(tokens) for x in batches) / len(numbers)

    with models.attending(model, way, config):
        # chunks of two blocks, the last one not whole
        tokens = 4 * team.size * block_of(model) - 37
        rounded = team.together(by_one_process)
    if settings.torch_dtype == torch.float32:
        return Expected(tokens, rounded, EXACT_TOLERANCE)
    # every block is kept, which is what transformers computes
    with models.attending(model, models.SDPA), in_float32(objective):
        exact = team.together(by_one_process)
    rounding = float((rounded - exact).norm() / exact.norm())
    return Expected(tokens, exact, max(EXACT_TOLERANCE, MOST_ROUNDING * rounding))


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Inside, the weights of ``module`` are float32; outside, the very same as before."""
    kept = [(p, p.data) for p in module.parameters()]
    for parameter, data in kept:
        parameter.data = data.float()
    try:
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def check_gradients(step: Step, expected: Expected, how: str) -> None:
    """ArithmeticError, with the relative error of all together, unless the two agree."""
    place = f"in the gradients of {how} at {expected.tokens} tokens"
    close(step.gradients(expected.tokens), expected.gradients, place, expected.tolerance)
