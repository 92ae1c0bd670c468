"""A text that many ranks hold, as its layers see it: what `CabMask` and `Frame` are to one process.

Plans are those of one process. A rank summarises its own keys, and what a row's choice depends on
beside them is gathered as the predictor says (`Predictor.gathers`). Which rows end a text
(``dense_tail_blocks``) is known to the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from cab_hf.call.forward_pass import ForwardState
from cab_hf.call.frame import Length, everything
from cab_hf.call.mask import CabMask
from cab_hf.distributed.exchange import gathered
from cab_hf.distributed.kv_gather import KV_HEADS_TOGETHER
from cab_hf.distributed.layout import Layout, Places, Shard
from cab_hf.distributed.zigzag import CPAttention
from cab_hf.engines import Engine
from cab_hf.plan import BlockPlan, named_rows, once_per_spans, rows_grid
from cab_hf.predictors import LayerContext, Predictor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class ShardedFrame:
    """The frame of a text that ranks hold, with the methods of `Frame`.

    Queries stay where they are, in the order of the rank. Keys have places in the frame of one
    process: it is put together for choosing as far as a predictor needs it, and for attention.

    Attributes:
        spans: what this rank's queries see of the frame.
        window: width of a sliding window, for exact attention.
        heads_k_stride, regather_kv: see `KVGather`.
    """

    places: Places
    group: ProcessGroup
    spans: Shard
    window: int | None = None
    heads_k_stride: int = KV_HEADS_TOGETHER
    regather_kv: bool = True

    def queries(self, x: Tensor) -> Tensor:
        """[B, H, n, D], this rank's, as they are."""
        return x

    def keys(self, x: Tensor) -> Tensor:
        """[B, H_kv, n, D], this rank's, as they are."""
        return x

    def restore(self, out: Tensor) -> Tensor:
        """[B, H, n, D], of this rank's queries, as it is."""
        return out

    @torch.no_grad()
    def choose(self, predictor: Predictor, q: Tensor, k: Tensor, call: LayerContext) -> BlockPlan:
        """This rank's rows of what ``predictor`` chooses for the whole text."""
        heads = q.shape[1], k.shape[1]
        needed = predictor.gathers(call, heads)
        if "queries" in needed:
            return self._choose_all(predictor, q, k, call)
        if "summaries" not in needed:
            return predictor.choose(q, k, call)
        real = self.places.layout.real[self.group.rank()].to(k.device).expand(k.shape[0], -1)
        mine = predictor.summary_of(k, real, call)
        summary = predictor.join(mine, call, heads, self)
        if "vectors" not in needed:
            return predictor.choose(q, summary, call)
        vectors = self.blocks(predictor.vectors(q, self.spans), 2, predictor.config.query_block)
        return predictor.choose(q, summary, call, vectors)

    def _choose_all(
        self, predictor: Predictor, q: Tensor, k: Tensor, call: LayerContext
    ) -> BlockPlan:
        complete = replace(call, spans=self.spans.text)
        plan = predictor(self.tokens(q), self.tokens(k), complete)
        places = self.places
        if plan.query_block % places.align and places.align % plan.query_block:
            raise ValueError(
                f"predictor {predictor.config.predictor!r} makes query blocks of "
                f"{plan.query_block}, which the ranks' chunks of {places.layout.block} tokens cut; "
                f"give block={plan.query_block} to what shards and to what attends."
            )
        return self.spans.own(plan)

    def everything(self) -> BlockPlan:
        """The plan that leaves nothing out, of blocks of `Layout.exact_block`."""
        batch = self.spans.first.shape[0]
        spans = self.places.kept_spans(self.group.rank(), batch, window=self.window)
        return everything(spans, self.places.layout.exact_block)

    def attend(
        self, engine: Engine, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float
    ) -> Tensor:
        """[B, H, n, D] of q [B, H, n, D] over all ranks' k and v [B, H_kv, n, D]."""
        how = self.heads_k_stride, self.regather_kv
        turn = CPAttention(self.places, self.group, plan.spans, scale, engine, plan, *how)
        return turn.attention(q, k, v)[0]

    def short(self, queries: int, tokens: int, query_block: int) -> Tensor | None:
        """`Frame.short` of the whole text, as rows of this rank: int64 [B, R], or None for none."""
        short = self.places.frame.short(queries, tokens, query_block)
        return None if short is None else _short_rows(self.spans, short, query_block)

    def blocks(self, x: Tensor, dim: int, size: int) -> Tensor:
        """What all ranks know of their blocks of ``size`` tokens, put together in ``dim``.

        Zeros for a block of the frame that holds no token. No gradient.
        """
        source, filled = self.places.blocks(size)
        everyone = gathered(x.movedim(dim, 0), self.group)[source]
        filled = filled.view(-1, *[1] * (x.ndim - 1))
        return everyone.masked_fill(~filled, 0.0).movedim(0, dim)

    def tokens(self, x: Tensor) -> Tensor:
        """x [B, H, n, C] of all ranks in the order of the frame, [B, H, N', C]. No gradient."""
        everyone = gathered(x.permute(2, 0, 1, 3), self.group)
        return everyone[self.places.source].permute(1, 2, 0, 3)


@dataclass(frozen=True, eq=False)
class ShardedText:
    """The text of one forward pass, of which each rank holds a shard; for layers as a `CabMask` is.

    Attributes:
        mask: of this rank's tokens, with what its layers share.
        heads_k_stride, regather_kv: see `KVGather`.
    """

    # whole texts are read, and nothing behind them
    behind_prompt: ClassVar[bool] = False

    mask: CabMask
    layout: Layout
    group: ProcessGroup
    heads_k_stride: int
    regather_kv: bool

    def frame(
        self, query_block: int, key_block: int, device: torch.device, from_start: bool = True
    ) -> ShardedFrame:
        """As `CabMask.frame`; made once for all layers."""
        places = self.layout.places(max(query_block, key_block), device)

        def build() -> ShardedFrame:
            spans = places.spans(self.group.rank(), self.mask.batch)
            how = self.window, self.heads_k_stride, self.regather_kv
            return ShardedFrame(places, self.group, spans, *how)

        return self.state.once(("frame", places), build)

    @property
    def q_length(self) -> int:
        return self.layout.text

    kv_length = q_length

    @property
    def longest(self) -> Length:
        return Length(*[max(self.layout.lengths)] * 2)

    @property
    def window(self) -> int | None:
        return self.mask.window

    @property
    def exact_block(self) -> int:
        return self.layout.exact_block

    @property
    def state(self) -> ForwardState:
        return self.mask.state

    def tail_from(self, blocks: int, query_block: int) -> None:
        """The prompt ends with the text."""

    def pieces(self, steps: bool) -> list[tuple[slice, ShardedText]]:
        """As `CabMask.pieces`: all of it is the prompt."""
        return [(slice(None), self)]


@once_per_spans
def _short_rows(spans: Shard, short: Tensor, query_block: int) -> Tensor:
    """The rows of this rank, int64 [B, R], of those of the whole text that ``short`` names."""
    rows = spans.taken(rows_grid(spans.text, short, query_block)[:, 0], query_block)
    return named_rows(rows, rows.shape[1]).expand(spans.first.shape[0], -1)
