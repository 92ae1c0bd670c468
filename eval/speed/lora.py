"""``speed lora``: a step of LoRA fine-tuning of a whole model, by what it attends with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from cab_hf.eval.experiment import Row
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import UNREACHED_MASS, listed, powers
from cab_hf.eval.speed.model import SDPA, ModelSettings, attending, described, random_model
from cab_hf.eval.speed.ttft import TimeToFirstToken, drawn
from cab_hf.runs.settings import option

# transformers and PEFT are imported where they are used: asking for help needs none of them
if TYPE_CHECKING:
    from cab_hf.finetune.meter import Cost
    from cab_hf.finetune.objective import Objective

CAB = "cab"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALPHA = 32.0
LEARNING_RATE = 1e-4
CLIP = 1.0
# tokens of the step that compiles all kernels, which is as long as CAB wants a text: one that is
# timed may take a minute
WARM_UP_TOKENS = 2**15


@dataclass(frozen=True)
class Settings(ModelSettings):
    """What a run of training steps is told."""

    KEYS: ClassVar[Mapping[str, str]] = {"length": "lengths", "implementation": "implementations"}
    # the blocks whose gradients are fastest
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**UNREACHED_MASS, "key_block": 128}
    POSITIVE = (*ModelSettings.POSITIVE, "rank", "runs")

    lengths: tuple[int, ...] | None = powers(13, 17)
    implementations: tuple[str, ...] | None = listed(
        (SDPA, "cuDNN", "FA4", CAB), (SDPA, "SDPA", CAB), "ways to attend"
    )
    rank: int = option(16, f"of LoRA's products, in {', '.join(TARGETS)}", int)
    runs: int = option(3, "timed steps of every row", int)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = (SDPA, CAB, *dense.on(self.device))
        named = set(self.implementations) <= set(known)
        self.check("implementations", named, f"out of {', '.join(known)}")
        self.check("budgets", not self.budgets, "none here")

    @property
    def method(self) -> str:
        return (
            f"median of {self.runs} steps by time.perf_counter after one of at most "
            f"{WARM_UP_TOKENS:,} tokens that warms up; a step is the forward and the backward pass "
            "of one sequence of random tokens, every layer being computed again in the latter, the "
            "loss in chunks, clipping and AdamW; the peak is all that was allocated, weights "
            "included"
        )


class LoraStep(TimeToFirstToken):
    """A case is one length and one way to attend."""

    name = "speed lora"
    purpose = "a step of LoRA fine-tuning of a LLaMA, by what it attends with"
    title = "A step of LoRA fine-tuning"
    caption = "seconds of a training step by length, and what CAB gains"
    Settings = Settings
    SHAPE = ("dtype", "rank")

    def find(self, sample: dict[str, Any]) -> None:
        settings, length, name = self.settings, sample["length"], sample["implementation"]
        with training(settings, length, name) as (call, known):
            call(min(length, WARM_UP_TOKENS))
            known()
            ms, peak = self.bench.wall(lambda: call(length), settings.runs, warm_up_calls=0)
            sample |= known()
        flops = useful_flops(trainee(settings).cost, length)
        done = flops(sample["density"])
        sample |= {
            "ms": ms,
            "peak_gib": peak,
            "ceiling": flops(1.0) / done,
            "tflops": done / ms / 1e9,
        }

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return (
            f"{described(settings)}\n\nLoRA of rank {settings['rank']} in {', '.join(TARGETS)}, "
            "all else frozen. sdpa is transformers' own; other dense ways take its place. At most: "
            "operations of the dense step over those at the realised density, attended over causal "
            "pairs in all layers; TFLOP/s count what is attended. Operations are those of the "
            "forward and the backward pass, without what is computed a second time. "
            f"{dense.BREAK_EVEN}"
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        drawn(path, rows, "a training step")


class Trainee(NamedTuple):
    """A model that is trained, and with what."""

    objective: Objective
    optimizer: torch.optim.Optimizer
    cost: Cost


@lru_cache(maxsize=1)
def trainee(settings: Settings) -> Trainee:
    """The random model with adapters that are about to be learnt."""
    from cab_hf.finetune.meter import Cost
    from cab_hf.finetune.models import compute_layers_again, with_lora
    from cab_hf.finetune.objective import Objective

    model = with_lora(random_model(settings), TARGETS, settings.rank, ALPHA)
    compute_layers_again(model)
    model.train()
    learnt = [p for p in model.parameters() if p.requires_grad]
    fused = torch.device(settings.device).type == "cuda"
    optimizer = torch.optim.AdamW(learnt, LEARNING_RATE, fused=fused)
    return Trainee(Objective(model), optimizer, Cost.of(model))


@contextmanager
def training(
    settings: Settings, length: int, way: str
) -> Iterator[tuple[Callable[[int], None], Callable[[], dict[str, Any]]]]:
    """(what learns from a text of so many tokens, what is known of it since it was asked last).

    Known are its ``density``, attended over causal pairs in all layers, and what CAB ``ran_as``.
    """
    from cab_hf.patches import describe, stats

    objective, optimizer, _ = trainee(settings)
    model = random_model(settings)
    learnt = optimizer.param_groups[0]["params"]

    def step(tokens: int) -> None:
        loss = objective(batch_of(settings, tokens)) / tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    def known() -> dict[str, Any]:
        layers = stats(model, reset=True)
        # layers that are computed dense attend everything
        density = fmean(1.0 if x["density"] is None else x["density"] for x in layers)
        lines = describe(model, tokens=length, training=True).splitlines()[1:]
        told = "; ".join(map(str.strip, lines)) if way == CAB else None
        return {"density": density, "ran_as": told}

    with attending(model, way, settings.budgeted(length)):
        yield step, known


def batch_of(settings: Settings, tokens: int) -> dict[str, torch.Tensor]:
    """A sequence [1, tokens] of random tokens, each of which is to predict another."""
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    drawn = torch.randint(
        settings.vocab, (1, tokens + 1), generator=generator, device=settings.device
    )
    positions = torch.arange(tokens, device=settings.device)[None]
    return {"input_ids": drawn[:, :-1], "position_ids": positions, "labels": drawn[:, 1:]}


def useful_flops(cost: Cost, length: int) -> Callable[[float], float]:
    """Density -> floating-point operations of a step of one text of ``length`` tokens."""
    pairs = cost.pairs(torch.arange(length)[None])
    attention = sum(map(cost.attention, pairs))
    return lambda density: cost.products(length) + density * attention


EXPERIMENT = LoraStep
