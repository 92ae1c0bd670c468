"""Attention over a text that many ranks hold: zigzag, and the forms it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from cab_hf import engines
from cab_hf.checks import is_whole, require
from cab_hf.distributed.exchange import agree, finish, group_of, watched
from cab_hf.distributed.flight import KV_HEADS_TOGETHER, Flight, over_slices
from cab_hf.distributed.layout import Layout, Places, layout_of, lengths_between
from cab_hf.engines import Engine, Workload
from cab_hf.plan import EXACT_BLOCK, BlockPlan, Spans, once_per_spans

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Turn:
    """What a rank computes: its own queries over everyone's keys.

    Attributes:
        spans: of this rank's queries, in the frame.
        plan: their plan, in key blocks of the frame; None for all that the spans allow.
        apart: whether early and late chunks are launched one after the other.
        again: see `Flight`.
    """

    places: Places
    group: ProcessGroup
    spans: Spans
    scale: float
    plan: BlockPlan | None = None
    heads_k_stride: int = KV_HEADS_TOGETHER
    engine: str = "auto"
    apart: bool = False
    again: bool = True

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out [B, H, n, D_v], log-sum-exp [B, H, n]) of q [B, H, n, D] over all ranks' k and v."""
        plan = self.plan or everything(self.spans, self.places.layout.exact_block)
        engine = engines.choose(self.engine, Workload.of(q, k, v, plan.blocks))
        group = q.shape[1] // k.shape[1]
        flight = Flight(k, v, self.places, self.group, self.heads_k_stride, self.again)

        def attend(keys: Tensor, values: Tensor, i: int) -> tuple[Tensor, Tensor]:
            heads = slice(flight.slices[i].start * group, flight.slices[i].stop * group)
            part = plan.take_heads(heads.start, heads.stop, q.shape[1])
            return self._launch(engine, q[:, heads], keys, values, part)

        return over_slices(flight, k, v, attend)

    def _launch(
        self, engine: Engine, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan
    ) -> tuple[Tensor, Tensor]:
        if not self.apart:
            return engine.attention(q, k, v, plan, self.scale, return_lse=True)
        halves = _halves(self.spans, self.places)
        found = []
        for tokens, spans in halves:
            part = plan.take_rows(_rows_of(spans, tokens, plan.query_block), spans)
            some = q[:, :, tokens]
            found.append(engine.attention(some, k, v, part, self.scale, return_lse=True))
        back = torch.cat([tokens for tokens, _ in halves]).argsort()
        return tuple([torch.cat(parts, dim=2)[:, :, back] for parts in zip(*found, strict=True)])


@once_per_spans
def _halves(spans: Spans, places: Places) -> list[tuple[Tensor, Spans]]:
    """The queries of the early chunks and their spans, and those of the late ones."""
    late = places.layout.late.to(spans.first.device)
    halves = [which.nonzero().squeeze(1) for which in (~late, late)]
    return [(tokens, _some(spans, tokens)) for tokens in halves]


@once_per_spans
def _rows_of(spans: Spans, tokens: Tensor, query_block: int) -> Tensor:
    """The query blocks that ``tokens`` are whole ones of."""
    return tokens[::query_block] // query_block


def zigzag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    plan: BlockPlan | None = None,
    heads_k_stride: int = KV_HEADS_TOGETHER,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    engine: str = "auto",
    block: int = EXACT_BLOCK,
    again: bool = True,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks of ``group``, exact.

    Every document of the text is padded to 2 W chunks of whole blocks, of which rank r holds chunks
    r and 2 W - 1 - r, one behind the other, document by document; `shard` deals a batch out so.
    K and V travel a slice of KV heads at a time, the next while this one is attended; both chunks
    are one launch. Backward sums the gradients of K and V over the ranks, in their dtype.

    Args:
        q: [B, H, n, D], this rank's queries after RoPE of their positions in the document.
        k, v: [B, H_kv, n, D] and [B, H_kv, n, D_v], this rank's.
        group: the ranks that hold one text; None for all.
        plan: which key blocks are attended, of this rank's query blocks: `predict` makes one. All
            by default.
        heads_k_stride: KV heads that travel together, at least 1: fewer take less memory.
        cu_seqlens: int [documents + 1], where documents of the whole text begin and end, padding
            left out, on every rank. By default one document without padding, of W n tokens.
        causal: whether queries see no key behind them.
        scale: what logits are multiplied by, 1 / sqrt(D) by default.
        engine: as in `CabConfig`.
        block: tokens of which chunks are whole multiples, on every rank.
        again: gather K and V once more for the backward pass, instead of keeping the whole text's
            of every layer; False under gradient checkpointing, which gathers again by itself.
        check: whether ranks compare what they were given first: one small all-gather and a wait.
            False is for loops whose first turn was compared.

    Returns:
        out [B, H, n, D_v], and the log-sum-exp of each query's logits, float32 [B, H, n], through
        which no gradient flows. Padding queries get zeros and -inf.

    Raises:
        ValueError: for shapes that do not fit each other, ``cu_seqlens`` or the plan; on every rank
            where ranks differ.
        RankLost: where another rank has stopped.
    """
    return _turn(q, k, v, "zigzag", **_named(locals())).attention(q, k, v)


def two_launches(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """`zigzag_attention` with the early and the late chunks launched one after the other."""
    return _turn(q, k, v, "zigzag", apart=True, **_filled(settings)).attention(q, k, v)


def contiguous_attention(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """`zigzag_attention` where rank r holds chunks 2 r and 2 r + 1 of every document.

    The last rank then has the most to attend: the scheme of LLaMA-3's training.
    """
    return _turn(q, k, v, "contiguous", **_filled(settings)).attention(q, k, v)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """`zigzag_attention` with K and V passed from rank to rank, and outputs merged by their sums.

    ``heads_k_stride`` and ``again`` change nothing: all heads travel, and what arrives is kept.

    Raises:
        NotImplementedError: for a ``plan``, or gradients by an engine whose log-sum-exp has none.
    """
    turn = _turn(q, k, v, "zigzag", **_filled(settings))
    if turn.plan is not None:
        raise NotImplementedError("plan is set; ring_attention takes none. Use zigzag_attention.")
    size = turn.places.layout.exact_block
    work = Workload.of(q, k, v, (size, size))
    engine = engines.choose(turn.engine, work)
    if work.training and engine is not engines.REFERENCE:
        raise NotImplementedError(
            f"engine is {engine.name!r}, through whose log-sum-exp no gradient flows; "
            "ring_attention is differentiated with engine='reference'."
        )
    return _around(q, k, v, turn, engine)


@once_per_spans
def everything(spans: Spans, size: int) -> BlockPlan:
    """The plan that leaves nothing out of ``spans``, for all heads."""
    return BlockPlan.causal(spans, 1, size, size)


def refuse_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError for tensors that are not q, k and v of one rank."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.dtype not in DTYPES or x.dtype != q.dtype:
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)}; q, k and v must be [B, heads, n, D] of one "
                "floating dtype."
            )
    same = all(x.shape[::2] == q.shape[::2] for x in (k, v)) and k.shape[1] == v.shape[1]
    if not same or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; a rank has queries "
            "and keys of the same tokens, q and k have one D, and the heads of q are a multiple of "
            "those of k and v."
        )


def facts(q: Tensor, k: Tensor, v: Tensor, layout: Layout | None) -> dict[str, int]:
    """What the ranks of one text must have in common."""
    lengths = () if layout is None else layout.lengths
    return {
        "batch rows": q.shape[0],
        "heads": q.shape[1],
        "KV heads": k.shape[1],
        "tokens of a rank": q.shape[2],
        "head dims": q.shape[3],
        "channels of v": v.shape[3],
        "dtypes (by their number)": DTYPES.index(q.dtype) if q.dtype in DTYPES else -1,
        "documents": len(lengths),
        "tokens of the text": sum(lengths),
        # lengths of documents in one number; Python's hash of whole numbers is the same everywhere
        "document lengths (their hash)": hash(lengths),
        "blocks": 0 if layout is None else layout.block,
    }


def _named(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in ("q", "k", "v")}


def _filled(settings: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of `zigzag_attention` for what is not given."""
    return {**zigzag_attention.__kwdefaults__, **settings}


def _turn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: str,
    *,
    group: ProcessGroup | None,
    plan: BlockPlan | None,
    heads_k_stride: int,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    engine: str,
    block: int,
    again: bool,
    check: bool,
    apart: bool = False,
) -> Turn:
    """The arguments of `zigzag_attention`, looked at; raises what it says."""
    group = group_of(group)
    refuse_shapes(q, k, v)
    require(is_whole(heads_k_stride), "heads_k_stride", heads_k_stride, "a whole number >= 1")
    require(is_whole(block) and block % 16 == 0, "block", block, "a multiple of 16")
    world, tokens = group.size(), q.shape[2]
    lengths = (world * tokens,) if cu_seqlens is None else lengths_between(cu_seqlens)
    layout = layout_of(lengths, world, block, order)
    if check:
        agree(facts(q, k, v, layout), group, q.device)
    if layout.tokens != tokens:
        raise ValueError(
            f"q has {tokens} tokens and each of {world} ranks holds {layout.tokens} of documents "
            f"of {list(lengths[:8])} tokens padded to {2 * world} chunks of whole blocks of "
            f"{block}; cab_hf.distributed.shard deals them out so."
        )
    align = layout.exact_block if plan is None else max(plan.blocks)
    places = layout.places(align, q.device)
    if plan is None:
        spans = places.kept_spans(group.rank(), q.shape[0], causal)
    else:
        _refuse_plan(plan, q, places, causal)
        spans = plan.spans
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Turn(places, group, spans, scale, plan, heads_k_stride, engine, apart, again)


def _refuse_plan(plan: BlockPlan, q: Tensor, places: Places, causal: bool) -> None:
    found = plan.batch, plan.q_length, plan.kv_length
    expected = q.shape[0], q.shape[2], places.length
    if found != expected or not causal:
        raise ValueError(
            f"plan is of {found} (batch, queries, keys) with causal={causal}; it must be causal, "
            f"of {expected}: this rank's queries, and the keys of the whole text."
        )


def _some(spans: Spans, tokens: Tensor) -> Spans:
    """The spans of some of the queries."""
    return Spans(
        spans.first[:, tokens],
        spans.last[:, tokens],
        spans.key_valid,
        aligned=spans.aligned,
        consecutive=False,
        documents=spans.documents,
    )


def _around(q: Tensor, k: Tensor, v: Tensor, turn: Turn, engine: Engine) -> tuple[Tensor, Tensor]:
    """W steps around the ring, each over the keys of one rank."""
    rank, world = turn.group.rank(), turn.group.size()
    size = turn.places.layout.exact_block
    out = lse = None
    for step in range(world):
        holder = (rank - step) % world
        if step + 1 < world:
            # on their way while this step computes
            passing = _passed(k, v, turn.group)
        spans = _seen_of(turn.spans, turn.places, holder)
        found = engine.attention(q, k, v, everything(spans, size), turn.scale, return_lse=True)
        # merged at no less than float32, rounded once
        found = found[0].to(found[1].dtype), found[1]
        out, lse = found if out is None else _merged(out, lse, *found)
        if step + 1 < world:
            k, v = passing()
    return out.to(q.dtype), lse.detach()


@once_per_spans
def _seen_of(spans: Spans, places: Places, holder: int) -> Spans:
    """What this rank's queries see of another rank's keys, as that rank holds them.

    A rank holds the keys of the frame in ascending order, so that what a query sees of them is one
    interval too.
    """
    layout, device = places.layout, spans.first.device
    real = layout.real[holder].to(device)
    # padding stands between the last token of its document and the first of the next
    order = 2 * (places.begins + layout.positions[holder].to(device)) + (~real).long()
    first = torch.searchsorted(order, 2 * spans.first.to(order.dtype))
    last = torch.searchsorted(order, 2 * spans.last.to(order.dtype), right=True) - 1
    seen = (spans.last >= 0) & (first <= last)
    return Spans(
        first.where(seen, 0).to(torch.int32),
        last.where(seen, -1).to(torch.int32),
        real.expand(spans.first.shape[0], -1),
        consecutive=False,
    )


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) over two sets of keys, of those over each."""
    total = torch.logaddexp(lse, other_lse)
    # a query that sees neither has nothing to weigh; looking away keeps NaN out of gradients
    blind = total == -torch.inf
    level = total.masked_fill(blind, 0.0)
    mine, others = ((x - level).exp().unsqueeze(-1) for x in (lse, other_lse))
    return out * mine + other * others, total


def _passed(k: Tensor, v: Tensor, group: ProcessGroup) -> Callable[[], tuple[Tensor, Tensor]]:
    """K and V of the rank before, once asked for; ours are on their way to the next one."""
    both = torch.cat((k, v), dim=-1)
    received, works = _hop(both.detach(), group, 1)

    def arrived() -> tuple[Tensor, Tensor]:
        for work in works:
            finish(work, group)
        passed = _Passed.apply(both, received, group)
        return passed[..., : k.shape[-1]], passed[..., k.shape[-1] :]

    return arrived


def _hop(x: Tensor, group: ProcessGroup, step: int) -> tuple[Tensor, list[dist.Work]]:
    rank, world = group.rank(), group.size()
    x = x.contiguous()
    received = torch.empty_like(x)
    with watched(group):
        return received, dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group, group_peer=(rank + step) % world),
                dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - step) % world),
            ]
        )


class _Passed(torch.autograd.Function):
    """What was sent to what was received; gradients go back the way they came."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, received: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        returned, works = _hop(grad, ctx.group, -1)
        for work in works:
            finish(work, ctx.group)
        return returned, None, None
