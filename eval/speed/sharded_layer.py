"""Turns of attention of one layer over ranks, and of one rank that holds the whole text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cab_hf import engines
from cab_hf.call.frame import everything
from cab_hf.config import CabConfig
from cab_hf.distributed import predict, union, zigzag_attention
from cab_hf.distributed.kv_gather import KV_HEADS_TOGETHER
from cab_hf.distributed.layout import Layout, layout_of
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
        heads_k_stride: KV heads that travel together.
    """

    scheme: Scheme
    length: int
    group: ProcessGroup | None
    config: CabConfig
    heads_k_stride: int = KV_HEADS_TOGETHER

    @cached_property
    def layout(self) -> Layout | None:
        if self.scheme.function is None:
            return None
        return layout_of((self.length,), self.group.size(), EXACT_BLOCK)

    def sharded(self, x: Tensor) -> Tensor:
        """This rank's tokens of [B, H, N, D], laid out as they were; all of them for one alone."""
        if self.layout is None:
            return x
        slots = self.layout.slots[self.group.rank()].to(x.device)
        return x.transpose(1, 2).index_select(1, slots).transpose(1, 2)

    def real(self, x: Tensor) -> Tensor:
        """What this rank holds, padding left out."""
        if self.layout is None:
            return x
        return x[:, :, self.layout.real[self.group.rank()].to(x.device)]

    @cached_property
    def _by_device(self) -> dict[torch.device, Spans]:
        return {}

    def spans(self, q: Tensor) -> Spans:
        """Of the whole text; the same every time, as is what is made of them."""
        if q.device not in self._by_device:
            made = Spans.causal(q.shape[0], self.length, self.length, q.device)
            self._by_device[q.device] = made
        return self._by_device[q.device]

    @torch.no_grad()
    def choose(self, q: Tensor, k: Tensor) -> BlockPlan | None:
        """CAB's plan of this rank's queries; None where everything is attended."""
        if not self.scheme.sparse:
            return None
        if self.layout is None:
            call = LayerContext(self.spans(q), q.shape[-1] ** -0.5)
            return make_predictor(self.config)(q, k, call)
        fields = {"cu_seqlens": (0, self.length), "block": EXACT_BLOCK}
        # as the layers of a forward pass share them
        known = self._by_device.get(q.device)
        plan = predict(q, k, group=self.group, config=self.config, spans=known, **fields)
        self._by_device[q.device] = plan.spans
        return plan

    def workload(self, q: Tensor, k: Tensor, v: Tensor) -> Workload:
        """What the engine is asked for, with the gradients that these need."""
        exact, config = (EXACT_BLOCK, EXACT_BLOCK), self.config
        blocks = (config.query_block, config.key_block) if self.scheme.sparse else exact
        return Workload.of(q, k, v, blocks)

    def label(self, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> str:
        """What attends, for people."""
        with torch.set_grad_enabled(backward):
            leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
            work = self.workload(*leaves)
        return engines.choose(self.config.engine, work).label(work)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, n, D] of what `sharded` gave; with a plan, made here."""
        plan = self.choose(q, k)
        if self.layout is None:
            engine = engines.choose(self.config.engine, self.workload(q, k, v))
            plan = plan or everything(self.spans(q), EXACT_BLOCK)
            return engine.attention(q, k, v, plan, q.shape[-1] ** -0.5, return_lse=True)[0]
        return self.scheme.function(
            *(q, k, v),
            group=self.group,
            plan=plan,
            heads_k_stride=self.heads_k_stride,
            cu_seqlens=(0, self.length),
            engine=self.config.engine,
            block=EXACT_BLOCK,
            check=False,
        )[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """What computes attention again and again."""

        @torch.no_grad()
        def call() -> Tensor:
            return self.attend(q, k, v)

        return call

    def both(
        self, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor
    ) -> Callable[[], tuple[Tensor, ...]]:
        """What computes attention and the gradients of q, k and v, again and again."""
        return lambda: outcome(self.attend, q, k, v, gradient)[1:]


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

    held = [turn.sharded(x) for x in (q, k, v, gradient)]
    if turn.layout is not None:
        # the loss of a padding query counts nothing
        padding = ~turn.layout.real[turn.group.rank()].to(q.device)
        held[3] = held[3].masked_fill(padding[:, None], 0.0)
    if backward:
        result = outcome(turn.attend, *held)
        exact = outcome(exactly, *(x.float() for x in (q, k, v, gradient)))
    else:
        result, exact = [turn.forward(*held[:3])()], [exactly(*(x.float() for x in (q, k, v)))]
    parts = ("", "in the gradient of q", "in the gradient of k", "in the gradient of v")
    for where, ours, theirs in zip(parts, result, exact, strict=False):
        tolerance = CHECK_GRADIENT_TOLERANCE if where else CHECK_TOLERANCE
        place = f"{where or 'in the output'} at {turn.length} tokens"
        close(turn.real(ours), turn.real(turn.sharded(theirs)), place, tolerance)


def needed(plan: BlockPlan, heads: int, kv_heads: int) -> float:
    """The share of the text's key blocks that any query of this rank attends, over KV heads."""
    group = heads // kv_heads
    # one KV head at a time: as a grid, a plan is large
    parts = [
        union(plan.slice_heads(i * group, (i + 1) * group, heads), 1).float().mean()
        for i in range(kv_heads)
    ]
    return float(torch.stack(parts).mean())
