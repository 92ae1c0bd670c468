"""Budgets a head: what each head of a model loses at each budget it could get, and who gets which.

Heads differ more than texts do. Most look around themselves and need little, a few look anything up
anywhere and need much. `measure` finds for one layer what every head would lose at every option of
its predictor; `allocate` then spends a density over all heads of all layers where it saves most.
Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig
from cab_hf.plan import Spans
from cab_hf.predictors.base import Call, make_predictor

# of the loss: what a missed needle weighs beside missed mass squared
NEEDLE_WEIGHT = 3.0
HALVINGS = 100  # of the bracket around the multiplier
# of exact attention held at once, over all heads
SHARES_AT_A_TIME = 1 << 28

# fields of `CabConfig` that take a table -> a head's value
Option = Mapping[str, float]


class Losses(NamedTuple):
    """What the heads of a layer lose at each option, float64 [H, options] each.

    Attributes:
        missed: the mean over queries of the attention mass that is left out, squared.
        needle: the mean over queries that look for a needle of the mass on it that is left out.
        density: attended over causal pairs.
    """

    missed: Tensor
    needle: Tensor
    density: Tensor


class Needles(NamedTuple):
    """Queries that are to find something, and where it stands: int64 [n] each, [start, end)."""

    queries: Tensor
    starts: Tensor
    ends: Tensor


def measure(
    q: Tensor,
    k: Tensor,
    call: Call,
    config: CabConfig,
    options: Sequence[Option],
    needles: Needles,
) -> Losses:
    """What the heads of one layer lose at each of ``options``.

    Args:
        q: [1, H, N, D]. k: [1, H_kv, N, D]. Of one text.
        config: all that is no option.
    """
    spans, heads = call.spans, q.shape[1]
    keep, density = _kept(q, k, call, config, options)

    missed = torch.zeros_like(density)
    a_row = heads * spans.kv_length * config.query_block
    step = max(1, SHARES_AT_A_TIME // a_row) * config.query_block
    for start in range(0, spans.q_length, step):
        shares = block_shares_of(q, k, call, config.key_block, slice(start, start + step))
        rows = slice(start // config.query_block, -(-(start + step) // config.query_block))
        held = _held(shares, keep[:, rows], config.query_block)
        missed += (shares.sum(-1, keepdim=True) - held).square().sum(1).double()
    missed /= (spans.last >= 0).sum()

    # [H, n, M_k]: what falls on the needle of each query
    key = torch.arange(k.shape[2], device=k.device)
    sought = (key >= needles.starts[:, None]) & (key < needles.ends[:, None])
    shares = block_shares_of(q, k, call, config.key_block, needles.queries, sought)
    left = ~keep[:, needles.queries // config.query_block]
    needle = (shares.unsqueeze(-1) * left).sum((1, 2)).double() / max(1, len(needles.queries))
    return Losses(missed, needle, density)


def least_density(config: CabConfig, option: Option, length: int) -> float:
    """The share of the pairs that heads attend at an option, the cheapest, at so many tokens."""
    x, call = unmeasured(length)
    # who ranks the blocks does not change how many there are
    return float(_kept(x, x, call, replace(config, exact_queries=0), [option])[1])


def unmeasured(length: int) -> tuple[Tensor, Call]:
    """q or k of a head that looks for nothing, and its turn: for what depends on length alone."""
    x = torch.zeros(1, 1, length, 16)
    return x, Call(Spans.causal(1, length, length, x.device), 1.0, 0)


def require_reachable(target: float, least: float) -> None:
    """Refuse a target density below what heads take at the least.

    Raises:
        ValueError: naming both.
    """
    if not least <= target:
        # rounded up: what is named is accepted
        named = ceil(1000 * least - 1e-6) / 1000
        raise ValueError(
            f"target_density is {target:g}; it must be at least {named:.3f}, "
            "which blocks that are always kept take at this length (a smaller share of longer "
            "texts)."
        )


def allocate(loss: Tensor, cost: Tensor, target: float) -> Tensor:
    """int64 [L, H]: the option of each head, of least loss at a mean cost of at most ``target``.

    The options on the lower convex hull of each head, walked together by one Lagrange multiplier:
    a head takes the option of least loss + multiplier * cost, the cheaper one of two alike.

    Args:
        loss, cost: [L, H, options].

    Raises:
        ValueError: when the cheapest options already cost more.
    """
    loss, cost = loss.double(), cost.double()
    require_reachable(target, float(cost.amin(-1).mean()))
    low, high = 0.0, 1.0

    def chosen(multiplier: float) -> Tensor:
        return (loss + multiplier * cost).argmin(-1)

    def spent(multiplier: float) -> float:
        return float(cost.gather(-1, chosen(multiplier).unsqueeze(-1)).mean())

    while spent(high) > target:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > target else (low, middle)
    return chosen(high)


def tables(options: Sequence[Option], choice: Tensor) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Fields of `CabConfig` [layers][heads] that give each head its option."""
    rows = choice.tolist()
    return {
        field: tuple(tuple(options[at][field] for at in row) for row in rows)
        for field in options[0]
    }


def _kept(
    q: Tensor, k: Tensor, call: Call, config: CabConfig, options: Sequence[Option]
) -> tuple[Tensor, Tensor]:
    """What each option keeps, bool [H, M_q, M_k, options], and its density, [H, options]."""
    heads = q.shape[1]
    if isinstance(config.exact_queries, tuple):
        config = replace(config, exact_queries=(config.exact_queries[call.layer],))
    plans = (
        make_predictor(replace(config, **_of_all(option, heads)))(q, k, _by_itself(call))
        for option in options
    )
    keep = torch.stack([plan.to_dense()[0].expand(heads, -1, -1) for plan in plans], dim=-1)
    pairs = _pairs(call.spans, config)
    return keep, (pairs[None, :, :, None] * keep).sum((1, 2)) / pairs.sum()


def _by_itself(call: Call) -> Call:
    """The same turn, by itself and of the first layer: tables of one layer fit it."""
    return Call(call.spans, call.scale, 0, channels=call.channels)


def _of_all(option: Option, heads: int) -> dict[str, tuple[tuple[float, ...]]]:
    return {field: ((value,) * heads,) for field, value in option.items()}


def _pairs(spans: Spans, config: CabConfig) -> Tensor:
    """float64 [M_q, M_k]: (query, key) pairs of each block that the spans of the one text allow."""
    start = torch.arange(0, spans.kv_length, config.key_block, device=spans.first.device)
    first, last = spans.first[0, :, None], spans.last[0, :, None]
    seen = torch.minimum(start + config.key_block - 1, last) - torch.maximum(start, first) + 1
    padding = -spans.q_length % config.query_block
    rows = F.pad(seen.clamp(min=0), (0, 0, 0, padding)).unflatten(0, (-1, config.query_block))
    return rows.sum(1).double()


def block_shares_of(
    q: Tensor,
    k: Tensor,
    call: Call,
    key_block: int,
    rows: slice | Tensor,
    counts: Tensor | float = 1.0,
) -> Tensor:
    """float32 [H, rows, M_k]: attention of some queries on each key block, on keys that count."""
    group = q.shape[1] // k.shape[1]
    queries = q[0, :, rows].float().unflatten(0, (k.shape[1], group))
    logits = (queries @ k[0].float().unsqueeze(1).transpose(-1, -2)).flatten(0, 1) * call.scale
    key = torch.arange(k.shape[2], device=k.device)
    first, last = (x[0, rows, None] for x in (call.spans.first, call.spans.last))
    seen = (key >= first) & (key <= last)
    shares = logits.masked_fill_(~seen, -torch.inf).softmax(-1).masked_fill_(~seen, 0.0)
    shares = F.pad(shares * counts, (0, -shares.shape[-1] % key_block))
    return shares.unflatten(-1, (-1, key_block)).sum(-1)


def _held(shares: Tensor, keep: Tensor, query_block: int) -> Tensor:
    """[H, rows, options]: of the shares [H, rows, M_k], what each option of ``keep`` holds."""
    rows = shares.shape[1]
    blocks = F.pad(shares, (0, 0, 0, -rows % query_block)).unflatten(1, (-1, query_block))
    return (blocks @ keep.to(blocks.dtype)).flatten(1, 2)[:, :rows]
