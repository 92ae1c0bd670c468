"""What an evaluation compares: one small class a method, each saying whose idea it is.

A method is fitted to a `Cell` (base config, budget, length) and then switched on for a model:

    with Streaming.fit(cell).applied(model) as density:
        model.generate(...)
        density()       # per layer, since the last call; None for a layer computed dense

Methods that choose blocks are predictors (`cab_hf.predictors.baselines`), so they run through the
same plan, the same engine and the same model code as CAB; only the choice differs. A new one costs
a predictor and a class of two lines.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import fmean
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

import cab_hf
from cab_hf.config import CabConfig
from cab_hf.engines import ENGINES
from cab_hf.plan import Spans
from cab_hf.predictors import LayerContext, make_predictor
from cab_hf.predictors.attention_mass import column_sums

BUDGET_STEPS = 1000  # a share of a row, or of the mass, is fitted to this fraction
BUDGETS = ("top_p", "top_k_share", "sparsity", "exact_queries")  # fields that take tables
PROBE_DIM = 16  # head dim of the random q and k that a budget is fitted on
SEED = 0  # of the probe
H2O_ATTENTION = "cab_h2o"

# () -> density per layer since the last call, None for a layer computed dense
LayerDensities = Callable[[], list[float | None]]


# config -> its density in the layers of a model that are sparse, on a text like those of a cell
Realised = Callable[[CabConfig], float]


@dataclass(frozen=True)
class Cell:
    """What a method is fitted to."""

    config: CabConfig  # CAB's; block sizes, engine and dense layers hold for every method
    budget: float | None  # density to match in the layers that are not dense
    length: int  # tokens of the prompts
    device: torch.device | str = "cpu"  # where fitting computes
    # asked by methods whose density depends on the text
    realised: Realised | None = field(default=None, repr=False)

    @property
    def shared(self) -> CabConfig:
        """What of the config holds for every method: all but budgets a head."""
        return self.config.changed(**{name: getattr(CabConfig, name) for name in BUDGETS})


def known(config: CabConfig) -> CabConfig:
    """The config itself; ValueError where its predictor or its engine is a name that nobody has."""
    make_predictor(config)
    if config.engine not in ("auto", *ENGINES):
        names = ", ".join(("auto", *ENGINES))
        raise ValueError(f"CabConfig.engine is {config.engine!r}; it must be one of {names}.")
    return config


def fitted_config(candidates: Sequence[CabConfig], cell: Cell) -> CabConfig:
    """Of configs in order of rising density, the one nearest to the cell's budget.

    Their density is that on random q and k of one head, which is exact for selections that keep a
    number of blocks a row, whichever these are.
    """
    length, device = cell.length, cell.device
    generator = torch.Generator(device).manual_seed(SEED)
    q, k = torch.randn(2, 1, 1, length, PROBE_DIM, generator=generator, device=device)
    call = LayerContext(Spans.causal(1, length, length, device), PROBE_DIM**-0.5)
    return nearest(candidates, cell, lambda config: make_predictor(config)(q, k, call).density())


def nearest(candidates: Sequence[CabConfig], cell: Cell, density: Realised) -> CabConfig:
    """Of configs in order of rising ``density``, the one nearest to the cell's budget.

    Raises:
        ValueError: the budget is no density.
    """
    if cell.budget is None or not 0 < cell.budget <= 1:
        raise ValueError(f"budget must be a density in (0, 1] to match; got {cell.budget!r}")

    @cache
    def beyond(config: CabConfig) -> float:
        return density(config) - cell.budget

    above = bisect.bisect_left(candidates, 0.0, key=beyond)
    neighbours = candidates[max(0, above - 1) : above + 1]
    return min(neighbours, key=lambda config: abs(beyond(config)))


def realised_on(model: PreTrainedModel, tokens: Sequence[int]) -> Realised:
    """What tells how much of ``tokens`` a config attends when ``model`` reads them."""

    @torch.no_grad()
    def realised(config: CabConfig) -> float:
        ids = torch.tensor([tokens], device=model.device)
        with Cab(config).applied(model) as densities:
            model(ids, use_cache=False, logits_to_keep=1)
            sparse = [density for density in densities() if density is not None]
        return fmean(sparse) if sparse else 1.0

    return realised


def fitted_sparsity(config: CabConfig, cell: Cell) -> CabConfig:
    """``config`` with the sparsity that realises the cell's budget, forced blocks counted."""
    dropped = range(BUDGET_STEPS - 1, -1, -1)
    return fitted_config([replace(config, sparsity=d / BUDGET_STEPS) for d in dropped], cell)


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods."""

    name: ClassVar[str]
    matched: ClassVar[bool] = False  # whether `fit` needs a budget
    hides_needle: ClassVar[bool] = False  # whether its prompts lack what they ask for

    @classmethod
    def fit(cls, cell: Cell) -> Method:
        """The method set up for ``cell``. Raises ValueError when a budget is needed and missing."""
        return cls()

    @abstractmethod
    def applied(self, model: PreTrainedModel) -> AbstractContextManager[LayerDensities]:
        """The method is on inside; what was there before is back afterwards."""

    def reaches(self, length: int, asking: int, needle: tuple[int, int]) -> bool | None:
        """Whether the queries from ``asking`` on may see a token of ``needle`` = [start, end).

        None where that is not fixed before the text is seen.
        """
        return None


@dataclass(frozen=True)
class Dense(Method):
    """The model's own attention as it was loaded: the upper bar. Requires nothing."""

    name = "dense"

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
        yield lambda: [None]


@dataclass(frozen=True)
class NoNeedle(Dense):
    """Control: dense attention on prompts without the needle, which gives the rate of guessing."""

    name = "no_needle"
    hides_needle = True


@dataclass(frozen=True)
class Cab(Method):
    """CAB with the config of this evaluation (`cab_hf.CabConfig`)."""

    name = "cab"
    config: CabConfig

    @classmethod
    def fit(cls, cell: Cell) -> Cab:
        return cls(cell.config)

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
        with cab_hf.cab(model, config=self.config):
            cab_hf.stats(model, reset=True)
            yield lambda: [layer["density"] for layer in cab_hf.stats(model, reset=True)]


@dataclass(frozen=True)
class Full(Cab):
    """Control: the sparse path told to keep every block. Must answer as dense does."""

    name = "full"

    @classmethod
    def fit(cls, cell: Cell) -> Full:
        everything = {"select": "clusters", "top_p": 1.0, "max_density": 1.0}
        return cls(cell.shared.changed(predictor="curvature", **everything))


@dataclass(frozen=True)
class Published(Cab):
    """The published CAB recipe (`CabConfig.published`, Forman curvature) at the matched budget.

    Block sizes, sinks and local blocks are the recipe's own.
    """

    name = "published"
    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> Published:
        kept = ("min_length", "dense_layers", "engine", "sparse_decode", "dense_tail_blocks")
        shared = {field: getattr(cell.config, field) for field in kept}
        return cls(fitted_sparsity(CabConfig.published(**shared), cell))


@dataclass(frozen=True)
class Streaming(Cab):
    """StreamingLLM: attention sinks and a recent window (Xiao et al. 2023, arXiv 2309.17453).

    The original keeps 4 sink tokens and numbers positions by place in the cache. Here sinks and
    window are whole key blocks (one sink block, the window sized for the budget), and tokens keep
    the positions they have in the text. What left the window is gone for good, so decoding is
    limited like prefill whatever the stage.
    """

    name = "streaming"
    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> Streaming:
        base = cell.shared.changed(predictor="streaming", sink_blocks=1, sparse_decode=True)
        windows = range(1, -(-cell.length // base.key_block) + 1)
        return cls(fitted_config([replace(base, local_blocks=w) for w in windows], cell))

    def reaches(self, length: int, asking: int, needle: tuple[int, int]) -> bool:
        spans = Spans.causal(1, length, length, "cpu")
        nothing = torch.empty(1, 1, length, 0)
        seen = make_predictor(self.config)(nothing, nothing, LayerContext(spans, 1.0)).to_dense()[
            0, 0
        ]
        first, last = needle[0] // self.config.key_block, (needle[1] - 1) // self.config.key_block
        return bool(seen[asking // self.config.query_block :, first : last + 1].any())


@dataclass(frozen=True)
class Random(Cab):
    """Random blocks over the forced ones, other ones for every head and row: the lower bar.

    Base of all that keep a share of every row.
    """

    name = "random"
    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> Random:
        # how many blocks a row keeps does not depend on which, so the cheapest choice is fitted
        fitted = fitted_sparsity(cell.shared.changed(predictor=Random.name), cell)
        return cls(replace(fitted, predictor=cls.name))


@dataclass(frozen=True)
class Antidiagonal(Random):
    """XAttention's strided antidiagonal sums (Xu et al. 2025, arXiv 2503.16428), at stride 8.

    The original keeps blocks up to a share of the mass, not the best of each row.
    """

    name = "antidiagonal"


@dataclass(frozen=True)
class VerticalSlash(Random):
    """MInference's vertical-slash pattern (Jiang et al. 2024, arXiv 2407.02490), at block grain.

    The last 64 queries' attention ranks columns and diagonals; a row keeps the blocks that the best
    of them touch. Every row's choice depends on the end of the text, whose questions it favours.
    """

    name = "vertical_slash"


@dataclass(frozen=True)
class MeanPooled(Cab):
    """Block scores of mean-pooled queries and keys, a row's best up to a share of their softmax.

    Pooled as in MInference's block-sparse heads (Jiang et al. 2024, arXiv 2407.02490), chosen by
    top-p as in FlexPrefill (Lai et al. 2025, arXiv 2502.20766). The share is the one whose density,
    on a text of the cell, is nearest to the budget.
    """

    name = "mean_pooled"
    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> MeanPooled:
        if cell.realised is None:
            raise ValueError(
                "mean_pooled needs a cell that tells the density of a config on a text."
            )
        pooled = {"coarsen": "mean", "select": "clusters", "curvature": "none", "top_k_share": 0.0}
        # outlier queries are CAB's
        pooled |= {"predictor": "curvature", "max_density": 1.0, "exact_queries": 0}
        base = cell.shared.changed(**pooled)
        shares = (step / BUDGET_STEPS for step in range(1, BUDGET_STEPS + 1))
        return cls(nearest([replace(base, top_p=top_p) for top_p in shares], cell, cell.realised))


@dataclass(frozen=True)
class Oracle(Random):
    """The true attention mass of every block: no predictor keeps more of it.

    Costs more than dense attention. Best by mass is not best by accuracy, only close to it.
    """

    name = "oracle"


def heavy_and_recent(received: Tensor, budget: float) -> Tensor:
    """Which keys H2O keeps, bool [..., N]: half the budget the latest, half the most attended.

    ``received`` is the attention each key received, [..., N]; ``budget`` the share that is kept.
    """
    length = received.shape[-1]
    kept = max(1, round(budget * length))
    recent = kept // 2
    keep = torch.zeros_like(received, dtype=torch.bool)
    keep[..., length - recent :] = True
    heavy = received[..., : length - recent].topk(kept - recent, dim=-1).indices
    return keep.scatter(-1, heavy, True)


@dataclass(frozen=True)
class H2O(Method):
    """Heavy-hitter oracle: evict what little attention was paid to (Zhang et al. 2023, 2306.14048).

    Prefill is dense. Then each KV head keeps the latest keys and those that received most attention
    from all queries, half the budget each, and decoding sees these and the tokens made since. The
    paper evicts at every step and has no rule for grouped queries: here it happens once, behind the
    prompt, and sums over the query heads of a group. Density is the kept share of the prompt's
    keys, which is not a share of prefill work: there is none saved. Requires prompts one at a time.
    """

    name = "h2o"
    matched = True
    budget: float

    @classmethod
    def fit(cls, cell: Cell) -> H2O:
        if cell.budget is None:
            raise ValueError("h2o needs a budget: the share of the prompt's keys that is kept.")
        return cls(cell.budget)

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
        kept: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
        AttentionInterface.register(H2O_ATTENTION, partial(self.attend, kept))
        AttentionMaskInterface.register(H2O_ATTENTION, sdpa_mask)
        before = model.config.get_text_config()._attn_implementation
        model.set_attn_implementation(H2O_ATTENTION)
        try:
            yield lambda: [keys.float().mean().item() for keys in kept.values()]
        finally:
            model.set_attn_implementation(before)

    @torch.no_grad()
    def attend(
        self,
        kept: MutableMapping[nn.Module, Tensor],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """What transformers calls: query [B, H, N_q, D] -> ([B, N_q, H, D], None).

        ``kept`` has the prompt's keys that are left to each module, bool [B, H_kv, N_prompt].
        """
        q_length, kv_length = query.shape[2], key.shape[2]
        prefill = q_length == kv_length
        if attention_mask is not None or not (prefill or q_length == 1):
            masked = "" if attention_mask is None else " with a mask"
            raise ValueError(
                f"h2o takes a whole prompt without padding, then single tokens; got {q_length} "
                f"queries on {kv_length} keys{masked}."
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask = None
        if prefill:
            spans = Spans.causal(query.shape[0], q_length, kv_length, query.device)
            received = column_sums(query, key, spans, scale).unflatten(1, (key.shape[1], -1))
            kept[module] = heavy_and_recent(received.sum(2), self.budget)
        else:
            ours = kept[module]
            seen = F.pad(ours, (0, kv_length - ours.shape[-1]), value=True)
            mask = seen.repeat_interleave(query.shape[1] // key.shape[1], dim=1).unsqueeze(2)
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=prefill, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None


COMPARED = (
    *(Dense, Cab, Published, Streaming, Random, Antidiagonal, VerticalSlash, MeanPooled, Oracle),
    H2O,
)
CONTROLS = {method.name: method for method in (Full, NoNeedle)}
METHODS: dict[str, type[Method]] = {method.name: method for method in COMPARED} | CONTROLS


def never_sparse(method: type[Method], samples: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a method that chooses blocks has attended none of its samples sparsely."""
    parts = [s["sparse_density"] for s in samples if "sparse_density" in s]
    return issubclass(method, Cab) and bool(parts) and all(each is None for each in parts)


def exact_readings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on the rows of which `never_sparse` holds, which say so as ``never_sparse``."""
    result = dict.fromkeys(
        f"{row['method']} at {row['length']} tokens" for row in rows if row.get("never_sparse")
    )
    if not result:
        return []
    return [
        f"No layer attended sparsely under {', '.join(result)}: what stands there is dense "
        "attention's."
    ]
