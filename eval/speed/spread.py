"""How ranks share a training step: a sequence each, or one that is sharded over all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cab_hf import context_parallel
from cab_hf.config import CabConfig
from cab_hf.distributed.layout import layout_of
from cab_hf.eval.speed.checks import close
from cab_hf.eval.speed.model import INITIAL_STD
from cab_hf.eval.speed.team import Team

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from cab_hf.finetune.objective import Batch

ALONE, DDP, FSDP2, CP = SPREADS = ("alone", "ddp", "fsdp2", "cp")
# gradients of float32 differ by the order of sums alone
EXACT_TOLERANCE = 1e-4
# those of lower precision may be off by so many times what one process is off by
MOST_ROUNDING = 1.5

Sequences = Callable[[int, int], "Batch"]  # (tokens, number) -> a sequence of that number


@dataclass(frozen=True, eq=False)
class Shared:
    """A training step as this rank takes part in it.

    Attributes:
        objective: the model and its loss, as it is called.
        batch: tokens of a sequence -> what this rank computes of it.
        scale: of the summed loss over ``tokens``, by which the gradients of all ranks come out as
            those of the mean loss of all their tokens.
    """

    objective: nn.Module
    batch: Callable[[int], Batch]
    scale: int = 1

    @property
    def learnt(self) -> list[nn.Parameter]:
        return [p for p in self.objective.parameters() if p.requires_grad]

    def backward(self, tokens: int) -> None:
        """Make the gradients of a step on ``tokens`` a sequence."""
        loss = self.objective(self.batch(tokens)) * (self.scale / tokens)
        loss.backward()

    def forget(self) -> None:
        """Drop the gradients."""
        for parameter in self.learnt:
            parameter.grad = None

    def gradients(self, tokens: int) -> list[Tensor]:
        """Those of a step, float32 and whole, in order; none is left behind."""
        self.backward(tokens)
        results = [p.grad for p in self.learnt]
        self.forget()
        return [(g.full_tensor() if isinstance(g, DTensor) else g).float() for g in results]


@contextmanager
def shared(
    spread: str, objective: nn.Module, layers: Sequence[nn.Module], team: Team, sequences: Sequences
) -> Iterator[Shared]:
    """A step spread over the ranks of ``team``; `FSDP2` leaves the weights of a model spread.

    Args:
        objective: of a whole model, the same on all ranks, that attends already as it shall.
        layers: decoder layers, which are gathered one by one.
    """
    if spread == ALONE:
        yield Shared(objective, lambda tokens: sequences(tokens, 0))
    elif spread == DDP:
        wrapped = DistributedDataParallel(objective, process_group=team.group)
        yield Shared(wrapped, lambda tokens: sequences(tokens, team.rank))
    elif spread == FSDP2:
        spread_weights(objective, layers, team.group)
        yield Shared(objective, lambda tokens: sequences(tokens, team.rank))
    else:
        from cab_hf.finetune.parallel import sharded

        model, block = objective.model, block_of(objective.model)
        wrapped = DistributedDataParallel(objective, process_group=team.group)
        # a layer that is computed again gathers again by itself
        with context_parallel(model, team.group, block=block, regather_kv=False):
            yield Shared(
                wrapped, lambda tokens: sharded(sequences(tokens, 0), team.group, block), team.size
            )


def spread_weights(objective: nn.Module, layers: Sequence[nn.Module], group: ProcessGroup) -> None:
    """Leave this rank its part of all weights, as accelerate does by FSDP version 2.

    Layers are gathered one by one and given back behind each pass, what is around them is one more
    unit; frozen weights and adapters keep their dtypes.
    """
    mesh = DeviceMesh.from_group(group, next(objective.parameters()).device.type)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(objective, mesh=mesh)


def block_of(model: nn.Module) -> int:
    """Tokens of which the chunks of ranks are whole multiples, as finetuning has it."""
    from cab_hf.finetune import parallel

    return parallel.block_of(model)


def causal_pairs(spread: str, length: int, team: Team, block: int) -> int:
    """(query, key) pairs of a head that causality allows the queries of this rank."""
    if spread != CP:
        return length * (length + 1) // 2
    layout = layout_of((length,), team.size, block)
    return int((layout.positions[team.rank] + 1)[layout.real[team.rank]].sum())


def density_of_all(team: Team, density: float, pairs: int) -> float:
    """What all ranks attend over causal pairs, this one that share of so many."""
    everyone = team.everyone((density, pairs))
    return sum(share * n for share, n in everyone) / sum(n for _, n in everyone)


def tokens_of_step(spread: str, world: int, length: int) -> int:
    """That all ranks learn in a step together."""
    return length * world if spread in (DDP, FSDP2) else length


# --- what is known to be right


def check_length(team: Team, block: int) -> int:
    """Tokens of a small sequence: chunks of two blocks, the last one not whole."""
    return 4 * team.size * block - 37


def check_config(config: CabConfig, dtype: torch.dtype) -> CabConfig:
    """``config`` as a small sequence is checked with: sparse, however short it is.

    Below float32 it keeps every block: ranks round hidden states in another order than one process
    does, and blocks on the border of a budget would be others.
    """
    changed: dict[str, Any] = {"min_length": 0}
    if dtype != torch.float32:
        changed |= {"mass_threshold": 0.0, "max_density": 1.0}
    return dataclasses.replace(config, **changed)


@torch.no_grad()
def draw_adapters(learnt: Sequence[nn.Parameter], seed: int) -> None:
    """Draw what is learnt, the same on all ranks; half of it is zero when it is new."""
    generator = torch.Generator(learnt[0].device).manual_seed(seed)
    for parameter in learnt:
        parameter.normal_(std=INITIAL_STD, generator=generator)


class Meant(NamedTuple):
    """What the gradients of a step are compared with.

    Attributes:
        gradients: of one process, computed in float32.
        rounding: how far one process is from them in the dtype of the weights, relative.
    """

    gradients: Tensor
    rounding: float


def of_one_process(
    objective: nn.Module, spread: str, world: int, tokens: int, sequences: Sequences
) -> Tensor:
    """The gradients of what ``world`` ranks learn in a step, one behind the other."""
    numbers = range(world if spread in (DDP, FSDP2) else 1)
    each = [
        flat(Shared(objective, lambda tokens, n=n: sequences(tokens, n)).gradients(tokens))
        for n in numbers
    ]
    return sum(each) / len(numbers)


def meant(rounded: Tensor, exact: Tensor | None) -> Meant:
    """`Meant` from what one process computes as ranks do, and in float32 where that is more."""
    if exact is None:
        return Meant(rounded, 0.0)
    return Meant(exact, float((rounded - exact).norm() / exact.norm()))


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


def flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in gradients])


def check_gradients(results: Sequence[Tensor], expected: Meant, place: str) -> None:
    """ArithmeticError, with the relative error of all together, unless the two agree."""
    tolerance = max(EXACT_TOLERANCE, MOST_ROUNDING * expected.rounding)
    close(flat(results), expected.gradients, f"in the gradients of {place}", tolerance)


# --- how much fits


class Reached(Exception):  # noqa: N818  it is what one hopes for
    """The peak of a backward pass is behind it."""


@contextmanager
def until_peak(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, a backward pass ends in `Reached` behind the second-to-last of ``layers``.

    What it allocates at most it has allocated then: all layers' inputs are kept, and two layers
    have been computed again.
    """

    def stop(_gradient: Tensor) -> None:
        raise Reached

    def watch(_layer: nn.Module, inputs: tuple, more: dict) -> None:
        hidden = inputs[0] if inputs else more["hidden_states"]
        # nothing is learnt before it
        if hidden.requires_grad:
            hidden.register_hook(stop)

    handle = layers[-2:][0].register_forward_pre_hook(watch, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def next_length(tried: Mapping[int, bool], guess: int, step: int) -> int | None:
    """The length to try next for the longest multiple of ``step`` that fits; None once it is known.

    It begins with ``guess``, goes up or down from there by strides that double, and then halves
    what is left.

    Args:
        tried: lengths, and whether they fit.
    """
    least = max((length // step for length, fit in tried.items() if fit), default=0)
    fails = min((length for length, fit in tried.items() if not fit), default=None)
    stride = max(1, guess // step // 16) * 2 ** len(tried)
    if fails is None:
        first = max(1, guess // step)
        return (first if first > least else least + stride) * step
    # the longest multiple that may fit
    most = (fails - 1) // step
    if most <= least:
        return None
    return max((least + most + 1) // 2, most + 1 - stride) * step


def weights_in(spread: str, world: int) -> dict[str, int]:
    """What `cab_hf.finetune.meter.memory` is told of ``spread``."""
    return {"shards": world if spread == FSDP2 else 1, "cp": world if spread == CP else 1}
