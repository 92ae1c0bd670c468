"""Turns of attention of one layer over ranks, and of one rank that holds the whole text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cab_hf import engines
from cab_hf.call.layout import everything
from cab_hf.config import CabConfig
from cab_hf.distributed import predict, zigzag_attention
from cab_hf.distributed.sharding import Sharding, sharding_of
from cab_hf.engines import REFERENCE, Workload
from cab_hf.eval.speed.checks import CHECK_GRADIENT_TOLERANCE, CHECK_TOLERANCE, close
from cab_hf.eval.speed.schemes import ring_attention
from cab_hf.plan import EXACT_BLOCK, BlockPlan, Spans
from cab_hf.predictors import LayerContext, make_predictor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FORWARD, BOTH = DIRECTIONS = ("forward", "forward+backward")
# so many KV heads are checked: with one more on its way than is attended
CHECKED_KV_HEADS = 2


@dataclass(frozen=True)
class Scheme:
    """How a text is attended.

    Attributes:
        function: `zigzag_attention` or one like it; None for one rank alone.
        sparse: whether CAB chooses blocks first.
    """

    function: Callable[..., tuple[Tensor, Tensor]] | None
    sparse: bool = False

    @property
    def against(self) -> str:
        """The one rank whose rate it is held against."""
        return "alone+cab" if self.sparse else "alone"


ALONE = {"alone": Scheme(None), "alone+cab": Scheme(None, sparse=True)}
OVER_RANKS = {
    "ring": Scheme(ring_attention),
    "grouped": Scheme(zigzag_attention),
    "grouped+cab": Scheme(zigzag_attention, sparse=True),
}
SCHEMES = ALONE | OVER_RANKS


@dataclass(frozen=True, eq=False)
class BenchCase:
    """One scheme on a text of ``length`` tokens, as this rank takes part in it.

    Attributes:
        group: the ranks that hold the text; of no matter to one alone.
        config: what CAB is told, and the engine of all.
    """

    scheme: Scheme
    length: int
    group: ProcessGroup | None
    config: CabConfig

    @cached_property
    def sharding(self) -> Sharding | None:
        if self.scheme.function is None:
            return None
        return sharding_of((self.length,), self.group.size(), EXACT_BLOCK)

    def sharded(self, x: Tensor) -> Tensor:
        """This rank's tokens of [B, H, N, D], laid out as they were; all of them for one alone."""
        if self.sharding is None:
            return x
        slots = self.sharding.slots[self.group.rank()].to(x.device)
        return x.transpose(1, 2).index_select(1, slots).transpose(1, 2)

    def padding(self, x: Tensor) -> Tensor:
        """Bool [n, 1]: which of this rank's tokens of [B, H, n, D] are padding."""
        if self.sharding is None:
            return torch.zeros(x.shape[2], 1, dtype=torch.bool, device=x.device)
        return ~self.sharding.real[self.group.rank()].to(x.device)[:, None]

    @cached_property
    def _kept(self) -> dict[str, Spans]:
        """Spans that all calls share, as the layers of a forward pass do."""
        return {}

    def spans(self, q: Tensor) -> Spans:
        """Of the whole text; the same every time, as is what is made of them."""
        if "whole" not in self._kept:
            self._kept["whole"] = Spans.causal(q.shape[0], self.length, self.length, q.device)
        return self._kept["whole"]

    @torch.no_grad()
    def choose(self, q: Tensor, k: Tensor) -> BlockPlan | None:
        """CAB's plan of this rank's queries; None where everything is attended."""
        if not self.scheme.sparse:
            return None
        if self.sharding is None:
            call = LayerContext(self.spans(q), q.shape[-1] ** -0.5)
            return make_predictor(self.config)(q, k, call)
        fields = {"cu_seqlens": (0, self.length), "block": EXACT_BLOCK, "config": self.config}
        plan = predict(q, k, group=self.group, spans=self._kept.get("mine"), **fields)
        self._kept["mine"] = plan.spans
        return plan

    def workload(self, q: Tensor, k: Tensor, v: Tensor) -> Workload:
        """What the engine is asked for, with the gradients that these need."""
        config = self.config
        blocks = config.query_block, config.key_block
        return Workload.of(q, k, v, blocks if self.scheme.sparse else (EXACT_BLOCK, EXACT_BLOCK))

    def label(self, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> str:
        """What attends, for people."""
        with torch.set_grad_enabled(backward):
            work = self.workload(*(x.detach().requires_grad_(backward) for x in (q, k, v)))
        return engines.choose(self.config.engine, work).label(work)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, n, D] of what `sharded` gave; with a plan, made here."""
        plan = self.choose(q, k)
        if self.sharding is None:
            engine = engines.choose(self.config.engine, self.workload(q, k, v))
            plan = plan or everything(self.spans(q), EXACT_BLOCK)
            return engine.attention(q, k, v, plan, q.shape[-1] ** -0.5, return_lse=True)[0]
        fields = {"cu_seqlens": (0, self.length), "block": EXACT_BLOCK, "check": False}
        fields["engine"] = self.config.engine
        return self.scheme.function(q, k, v, group=self.group, plan=plan, **fields)[0]

    def call(self, *heads: Tensor) -> Callable[[], Any]:
        """What computes attention of q, k and v again and again.

        Their gradients too where a fourth tensor is given, the gradient of the output.
        """
        if len(heads) == 4:
            return lambda: outcome(self.attend, *heads)
        return torch.no_grad()(lambda: (self.attend(*heads),))


@torch.enable_grad()
def outcome(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """(attention, the gradients of q, k and v)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


def check(turn: BenchCase, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> None:
    """Compare a turn with float32 attention of one process over the same text.

    Args:
        q, k, v: of the whole text of ``turn.length`` tokens, the same on every rank.

    Raises:
        ArithmeticError: with the relative error, and of what.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q[:, : CHECKED_KV_HEADS * group], k[:, :CHECKED_KV_HEADS], v[:, :CHECKED_KV_HEADS]
    generator = torch.Generator(q.device).manual_seed(0)
    gradient = torch.randn(q.shape, device=q.device, generator=generator).to(q.dtype)
    complete = replace(turn, scheme=ALONE[turn.scheme.against])
    plan = complete.choose(q, k) or everything(complete.spans(q), EXACT_BLOCK)

    def exactly(*heads: Tensor) -> Tensor:
        return REFERENCE.attention(*heads, plan, q.shape[-1] ** -0.5)

    whole = (q, k, v, gradient)[: 4 if backward else 3]
    held = [turn.sharded(x) for x in whole]
    padding = turn.padding(held[0])
    # the loss of a padding query counts nothing
    held[3:] = [x.masked_fill(padding, 0.0) for x in held[3:]]
    result = turn.call(*held)()
    floats = [x.float() for x in whole]
    exact = outcome(exactly, *floats) if backward else [exactly(*floats)]
    places = ("output", "gradient of q", "gradient of k", "gradient of v")
    for place, ours, theirs in zip(places, result, exact, strict=False):
        tolerance = CHECK_TOLERANCE if place == "output" else CHECK_GRADIENT_TOLERANCE
        pair = (x.masked_fill(padding, 0.0) for x in (ours, turn.sharded(theirs)))
        close(*pair, f"in the {place} at {turn.length} tokens", tolerance)
