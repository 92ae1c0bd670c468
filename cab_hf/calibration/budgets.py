"""Budgets a head: what each head of a model loses at each budget it could get, and who gets which.

Heads differ more than texts do. Most look around themselves and need little, a few look anything up
anywhere and need much. `measure` finds for one layer what every head would lose at every option of
its predictor; `allocate` then spends a density over all heads of all layers where it saves most.
Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.config import CabConfig
from cab_hf.plan import Spans
from cab_hf.predictors import LayerContext, Predictor, make_predictor
from cab_hf.predictors.attention_mass import attention_rows, block_sums

# of the loss: what a missed needle weighs beside missed mass squared
NEEDLE_WEIGHT = 3.0
HALVINGS = 100  # of the bracket around the multiplier
# of exact attention held at once, over all heads
SHARES_AT_A_TIME = 1 << 28

# fields of `CabConfig` that take a table -> a head's value
Option = Mapping[str, float]
Make = Callable[[CabConfig], Predictor]


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
    call: LayerContext,
    config: CabConfig,
    options: Sequence[Option],
    needles: Needles,
) -> Losses:
    """What the heads of one layer lose at each of ``options``.

    Args:
        q: [1, H, N, D]. k: [1, H_kv, N, D]. Of one text.
        config: all that is no option.
    """
    spans, kv_blocks = call.spans, -(-k.shape[2] // config.key_block)
    keep = kept_blocks(q, k, call, config, options)
    pairs = _pairs(spans, config)
    density = (pairs[None, :, :, None] * keep).sum((1, 2)) / pairs.sum()

    missed = torch.zeros_like(density)
    a_row = q.shape[1] * spans.kv_length * config.query_block
    step = max(1, SHARES_AT_A_TIME // a_row) * config.query_block
    for start, attention in attention_rows(q, k, spans, call.scale, at_a_time=step):
        shares = block_sums(attention[0], config.key_block, kv_blocks)
        rows = slice(start // config.query_block, -(-(start + step) // config.query_block))
        held = _held(shares, keep[:, rows], config.query_block)
        missed += (shares.sum(-1, keepdim=True) - held).square().sum(1).double()
    missed /= (spans.last >= 0).sum()

    shares = needle_shares(q, k, call, config.key_block, needles)
    left = ~keep[:, needles.queries // config.query_block]
    needle = (shares.unsqueeze(-1) * left).sum((1, 2)).double() / max(1, len(needles.queries))
    return Losses(missed, needle, density)


def needle_shares(
    q: Tensor, k: Tensor, call: LayerContext, key_block: int, needles: Needles
) -> Tensor:
    """float32 [H, n, M_k]: the attention of each needle query on its needle, by key block."""
    first, last = (x[:, needles.queries] for x in (call.spans.first, call.spans.last))
    spans = Spans(first, last, call.spans.key_valid, consecutive=False)
    shares = q.new_zeros(
        q.shape[1], len(needles.queries), -(-k.shape[2] // key_block), dtype=torch.float32
    )
    for start, attention in attention_rows(q[:, :, needles.queries], k, spans, call.scale):
        rows = slice(start, start + attention.shape[2])
        key = torch.arange(attention.shape[-1], device=k.device)
        sought = (key >= needles.starts[rows, None]) & (key < needles.ends[rows, None])
        shares[:, rows] = block_sums(attention[0] * sought, key_block, shares.shape[-1])
    return shares


def least_density(config: CabConfig, option: Option, length: int) -> float:
    """The share of the pairs that heads attend at an option, the cheapest, at so many tokens."""
    keep, call = least_kept(config, option, length)
    pairs = _pairs(call.spans, config)
    return float((pairs * keep).sum() / pairs.sum())


def least_kept(
    config: CabConfig, option: Option, length: int, make: Make = make_predictor
) -> tuple[Tensor, LayerContext]:
    """bool [M_q, M_k]: what a head that looks for nothing keeps, and its turn.

    For options that keep so many blocks, whichever they are; ``make`` as of `kept_blocks`.
    """
    x = torch.zeros(1, 1, length, 16)
    call = LayerContext(Spans.causal(1, length, length, x.device), 1.0, 0)
    # who ranks the blocks does not change how many there are
    cheap = replace(config, exact_queries=0)
    return kept_blocks(x, x, call, cheap, [option], make)[0, ..., 0], call


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


def kept_blocks(
    q: Tensor,
    k: Tensor,
    call: LayerContext,
    config: CabConfig,
    options: Sequence[Option],
    make: Make = make_predictor,
) -> Tensor:
    """bool [H, M_q, M_k, options]: the blocks that each option keeps, given to all heads alike."""
    if isinstance(config.exact_queries, tuple):
        config = replace(config, exact_queries=(config.exact_queries[call.layer],))
    heads = q.shape[1]
    # by itself and as the first layer: tables of one layer fit it
    alone = LayerContext(call.spans, call.scale, 0, channels=call.channels)
    chosen = (
        make(replace(config, **{field: ((value,) * heads,) for field, value in option.items()}))
        for option in options
    )
    plans = (predictor(q, k, alone) for predictor in chosen)
    return torch.stack([plan.to_dense()[0].expand(heads, -1, -1) for plan in plans], dim=-1)


def _pairs(spans: Spans, config: CabConfig) -> Tensor:
    """float64 [M_q, M_k]: (query, key) pairs of each block that the spans of the one text allow."""
    start = torch.arange(0, spans.kv_length, config.key_block, device=spans.first.device)
    first, last = spans.first[0, :, None], spans.last[0, :, None]
    seen = torch.minimum(start + config.key_block - 1, last) - torch.maximum(start, first) + 1
    padding = -spans.q_length % config.query_block
    rows = F.pad(seen.clamp(min=0), (0, 0, 0, padding)).unflatten(0, (-1, config.query_block))
    return rows.sum(1).double()


def _held(shares: Tensor, keep: Tensor, query_block: int) -> Tensor:
    """[H, rows, options]: of the shares [H, rows, M_k], what each option of ``keep`` holds."""
    rows = shares.shape[1]
    blocks = F.pad(shares, (0, 0, 0, -rows % query_block)).unflatten(1, (-1, query_block))
    return (blocks @ keep.to(blocks.dtype)).flatten(1, 2)[:, :rows]


def averaged(measured: Sequence[Mapping[int, Losses]]) -> dict[int, Losses]:
    """The mean over documents, by layer."""
    return {
        layer: Losses(
            *(torch.stack(x).mean(0) for x in zip(*(m[layer] for m in measured), strict=True))
        )
        for layer in measured[0]
    }


def budgeted(
    config: CabConfig,
    options: Sequence[Option],
    result: Mapping[int, Losses],
    target_density: float,
    layers: int,
) -> CabConfig:
    """``config`` with the tables that lose least at ``target_density``.

    Layers without losses are computed exactly, whatever stands in their row.
    """
    if not result:
        raise ValueError("None of the model's layers attends sparsely: there is nothing to share.")
    missed, needle, density = (torch.stack(x) for x in zip(*result.values(), strict=True))
    some = allocate(missed + NEEDLE_WEIGHT * needle, density, target_density)
    choice = torch.zeros(layers, some.shape[1], dtype=torch.int64)
    choice[list(result)] = some
    return CabConfig.from_dict({**config.to_dict(), **tables(options, choice)})
