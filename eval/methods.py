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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import fmean
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

import cab_hf
from cab_hf.config import CAB, CabConfig
from cab_hf.decode.step import decodes_sparsely
from cab_hf.engines import ENGINES
from cab_hf.eval.kv_cache import read_on
from cab_hf.plan import Spans
from cab_hf.predictors import LayerContext, make_predictor
from cab_hf.predictors.attention_mass import column_sums
from cab_hf.predictors.baselines import columns_and_diagonals

BUDGET_STEPS = 1000  # a share of a row, or of the mass, is fitted to this fraction
LEAST_MASS = 1e-6  # down to it thresholds of the mass are fitted, in so many equal ratios
CLOSE = 0.01  # of a time: where attention takes that much more or less, it is fitted
# fields of CAB's that no other method has: how it chooses and decodes
OWN = ("sparsity", "exact_queries", "typical_queries", "mass_threshold", "share_threshold")
OWN += ("sparse_decode", "decode_tokens")
# of TriangleMix: the share of layers, from the last one back, that have the pattern; its window and
# its dense queries, in tokens
TRIANGLE_SHARE, WINDOW, LAST_QUERIES = 0.5, 512, 128
PROBE_DIM = 16  # head dim of the random q and k that a budget is fitted on
SEED = 0  # of the probe
SNAP_WINDOW, SNAP_KERNEL = 32, 5  # of SnapKV: queries that choose, keys that are averaged
SINKS = 4  # of StreamingLLM

# () -> density per layer since the last call, None for a layer computed dense
LayerDensities = Callable[[], list[float | None]]


# config -> its density in the layers of a model that are sparse, on a text like those of a cell
Realised = Callable[[CabConfig], float]


@dataclass(frozen=True)
class Cell:
    """What a method is fitted to."""

    config: CabConfig  # CAB's; block sizes, engine and dense layers hold for every method
    # to match: the density in the layers that are not dense; where ``took`` is given, ms
    budget: float | None
    length: int  # tokens of the prompts
    device: torch.device | str = "cpu"  # where fitting computes
    # asked by methods whose density depends on the text
    realised: Realised | None = field(default=None, repr=False)
    layers: int | None = None  # of the model, asked by methods that go by them
    # config -> ms that attention takes on a text like those of the cell, choosing included
    took: Realised | None = field(default=None, repr=False)

    @property
    def shared(self) -> CabConfig:
        """What of the config holds for every method: all but what CAB alone has (`OWN`)."""
        return self.config.changed(**{name: getattr(CabConfig, name) for name in OWN})


def layers_of(model: PreTrainedModel) -> int:
    """How many layers the text model of ``model`` has."""
    return model.config.get_text_config().num_hidden_layers


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
    number of blocks a row, whichever these are. Where times are matched, it is their time.
    """
    if cell.took is not None:
        return nearest(candidates, cell, cell.took)
    length, device = cell.length, cell.device
    generator = torch.Generator(device).manual_seed(SEED)
    q, k = torch.randn(2, 1, 1, length, PROBE_DIM, generator=generator, device=device)
    call = LayerContext(Spans.causal(1, length, length, device), PROBE_DIM**-0.5)
    return nearest(candidates, cell, lambda config: make_predictor(config)(q, k, call).density())


def nearest(candidates: Sequence[CabConfig], cell: Cell, density: Realised) -> CabConfig:
    """Of configs in order of rising ``density``, the one nearest to the cell's budget.

    ``density`` may be any measure that rises as they do, such as ms. Of times the first within
    `CLOSE` is taken: they are measured no closer.

    Raises:
        ValueError: the budget is no density, where one is to be matched.
    """
    if cell.budget is None or not (0 < cell.budget <= 1 or cell.took is not None):
        raise ValueError(f"budget must be a density in (0, 1] to match; got {cell.budget!r}")

    @cache
    def beyond(config: CabConfig) -> float:
        return density(config) - cell.budget

    enough = 0.0 if cell.took is None else CLOSE * cell.budget
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if abs(beyond(candidates[middle])) <= enough:
            return candidates[middle]
        low, high = (middle + 1, high) if beyond(candidates[middle]) < 0 else (low, middle)
    neighbours = candidates[max(0, low - 1) : low + 1]
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
    dense_prefill: ClassVar[bool] = False  # whether only its steps differ from dense attention
    decodes: ClassVar[str] = "densely"  # what a step attends behind its prefill

    @classmethod
    def fit(cls, cell: Cell) -> Method:
        """The method set up for ``cell``. Raises ValueError when a budget is needed and missing."""
        return cls()

    @abstractmethod
    def applied(self, model: PreTrainedModel) -> AbstractContextManager[LayerDensities]:
        """The method is on inside; what was there before is back afterwards."""

    def cache(self, model: PreTrainedModel) -> Cache:
        """An empty KV cache for texts that ``model`` reads while the method is on."""
        return DynamicCache(config=model.config)

    def stepping(self) -> AbstractContextManager[Any]:
        """Where the steps of decoding are computed, behind the prompt."""
        return nullcontext()

    def step_tokens(self, model: PreTrainedModel, length: int) -> float:
        """Tokens of a text of ``length`` whose keys and values have the bytes that a step reads."""
        return length

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

    def cache(self, model: PreTrainedModel) -> Cache:
        return cab_hf.index_cache(model) if self.config.sparse_decode else super().cache(model)

    @torch.no_grad()
    def step_tokens(self, model: PreTrainedModel, length: int) -> float:
        """The index of all tokens, and ``decode_tokens`` rows of K and V; the mean over layers.

        In tokens, that is decode_tokens + length * (bytes of a token in the index) / (bytes of its
        K and V). Layers behind an anchor read no index, those that decode densely read all tokens.
        """
        config, wanted = self.config, self.config.decode_tokens
        if not decodes_sparsely(config, length):
            return length
        with self.applied(model):
            cache = self.cache(model)
            ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            read_on(model, ids, cache)
        rows = wanted if isinstance(wanted, int) else wanted * length
        layers = []
        for at, layer in enumerate(cache.layers):
            index = getattr(layer, "index", None)
            if index is not None:
                row = layer.keys[0, 0, 0].nbytes + layer.values[0, 0, 0].nbytes
                layers.append(rows + length * index.nbytes / layer.keys[..., 0].numel() / row)
            else:
                shares = config.anchors and at not in config.dense_layers
                layers.append(rows if shares else length)
        return fmean(layers)


@dataclass(frozen=True)
class Full(Cab):
    """Control: the sparse path told to keep every block. Must answer as dense does.

    Its steps are computed in plain PyTorch: prefill and decode are exact, by other kernels than
    those of `Dense`, and what differs is rounding.
    """

    name = "full"

    @classmethod
    def fit(cls, cell: Cell) -> Full:
        everything = {"mass_threshold": 0.0, "max_density": 1.0}
        return cls(cell.shared.changed(predictor="rows", **everything))

    def stepping(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(SDPBackend.MATH)


@dataclass(frozen=True)
class Published(Cab):
    """The published CAB recipe (`CabConfig.published`, Forman curvature) at the matched budget.

    Block sizes, sinks and local blocks are the recipe's own, which has no dense tail.
    """

    name = "published"
    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> Published:
        kept = ("min_length", "dense_layers", "engine")
        shared = {field: getattr(cell.config, field) for field in kept}
        return cls(fitted_sparsity(CabConfig.published(**shared), cell))


class SinkLayer(DynamicLayer):
    """A layer's cache of the first ``sinks`` tokens and the latest, ``tokens`` in all."""

    def __init__(self, sinks: int, tokens: int) -> None:
        super().__init__()
        self.sinks, self.tokens = sinks, tokens
        self.cumulative_length = 0  # tokens read so far

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        """What was kept and the new [B, H_kv, N, D], of which the latest replace the oldest."""
        keys, values = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        gone = keys.shape[-2] - self.tokens
        if gone > 0:
            self.keys, self.values = (
                torch.cat([x[:, :, : self.sinks], x[:, :, self.sinks + gone :]], dim=2)
                for x in (keys, values)
            )
        return keys, values

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = super().get_seq_length()
        # all that is kept stands before the queries
        return kept + query_length, self.cumulative_length - kept


def sink_cache(model: PreTrainedModel, sinks: int, tokens: int) -> Cache:
    """A cache that keeps in every layer the first ``sinks`` and the latest of ``tokens`` tokens."""
    layers = range(layers_of(model))
    return Cache(layers=[SinkLayer(sinks, max(tokens, sinks + 1)) for _ in layers])


@dataclass(frozen=True)
class Streaming(Cab):
    """StreamingLLM: attention sinks and a recent window (Xiao et al. 2023, arXiv 2309.17453).

    The original keeps 4 sink tokens and numbers positions by place in the cache. Here sinks and
    window are whole key blocks (one sink block, the window sized for the budget), and tokens keep
    the positions they have in the text. What left the window is gone for good, so that the last
    queries of a text have no dense tail, and decoding is limited like prefill whatever the stage.
    """

    name = "streaming"
    matched = True
    decodes = "sinks and window"

    @classmethod
    def fit(cls, cell: Cell) -> Streaming:
        # with a tail the end of a text would see what left the window, which nothing is to find
        base = cell.shared.changed(predictor="streaming", sink_blocks=1, dense_tail_blocks=0)
        windows = range(1, -(-cell.length // base.key_block) + 1)
        return cls(fitted_config([replace(base, local_blocks=w) for w in windows], cell))

    def cache(self, model: PreTrainedModel) -> Cache:
        sinks, window = (
            blocks * self.config.key_block
            for blocks in (self.config.sink_blocks, self.config.local_blocks)
        )
        return sink_cache(model, sinks, sinks + window)

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

    Base of all that keep a share of every row. Forced blocks and the dense tail are those of CAB,
    and count in the budget.
    """

    name = "random"
    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> Random:
        # how many blocks a row keeps does not depend on which, so the cheapest choice is fitted;
        # how long it takes to choose does
        name = Random.name if cell.took is None else cls.name
        fitted = fitted_sparsity(cell.shared.changed(predictor=name), cell)
        return cls(replace(fitted, predictor=cls.name))


@dataclass(frozen=True)
class Antidiagonal(Random):
    """XAttention's strided antidiagonal sums (Xu et al. 2025, arXiv 2503.16428), at stride 8.

    The original keeps blocks up to a share of the mass, not the best of each row.
    """

    name = "antidiagonal"


@dataclass(frozen=True)
class AsPublished(Cab):
    """Base of methods that set their budget themselves, as their authors have it: not matched.

    They have no dense tail, as their authors have none; the last queries of `TriangleMix` are its
    own.
    """

    @classmethod
    def fit(cls, cell: Cell) -> AsPublished:
        return cls(cell.shared.changed(predictor=cls.name, dense_tail_blocks=0))


@dataclass(frozen=True)
class XAttention(AsPublished):
    """XAttention (Xu et al. 2025, arXiv 2503.16428) at stride 8, threshold 0.8 for all heads.

    That is the default of its function; the authors' runs of LLaMA have a threshold for each head.
    `XAttentionPredictor` says where it differs. `Antidiagonal` has the same score at the budget of
    the others.
    """

    name = "xattention"


@dataclass(frozen=True)
class XAttention16(AsPublished):
    """The same at stride 16, the other one of the paper."""

    name = "xattention_16"


@dataclass(frozen=True)
class FlexPrefill(AsPublished):
    """FlexPrefill (Lai et al. 2025, arXiv 2502.20766): gamma 0.95, tau 0.1, 1,024 tokens at least.

    `FlexPrefillPredictor` says where it differs.
    """

    name = "flexprefill"


@dataclass(frozen=True)
class VerticalSlash(Random):
    """Blocks of MInference's vertical-slash score (Jiang et al. 2024, arXiv 2407.02490).

    The last 64 queries' attention ranks columns and diagonals; a row keeps the blocks that the best
    of them touch. Every row's choice depends on the end of the text, whose questions it favours.
    The kernel of MInference gathers single columns, where one costs a whole key block here: at as
    many pairs this loses more of the attention.
    """

    name = "vertical_slash"


@dataclass(frozen=True)
class ByMass(Cab):
    """Base of methods that keep a share of an estimated mass: the one nearest to the budget.

    What density a share has, or what time it takes, is measured on a text of the cell. Forced
    blocks and the dense tail are those of CAB, and count in the budget.
    """

    matched = True
    # how blocks are chosen, but for the share
    chosen: ClassVar[Mapping[str, Any]]

    @classmethod
    def base(cls, cell: Cell) -> CabConfig:
        """The config at no share in particular."""
        return cell.shared.changed(**cls.chosen)

    @classmethod
    def fit(cls, cell: Cell) -> ByMass:
        measured = cell.took or cell.realised
        if measured is None:
            raise ValueError(
                f"{cls.name} needs a cell that tells the density of a config on a text."
            )
        base = cls.base(cell)
        shares = [step / BUDGET_STEPS for step in range(1, BUDGET_STEPS + 1)]
        if base.predictor in CAB:
            masses = (LEAST_MASS**share for share in shares)
            fitting = [replace(base, mass_threshold=mass) for mass in masses]
        else:
            fitting = [replace(base, top_p=share) for share in shares]
        return cls(nearest(fitting, cell, measured))


@dataclass(frozen=True)
class CabAtBudget(ByMass):
    """CAB with the threshold of mass whose density, or time, is the budget; the rest is its own."""

    name = Cab.name
    chosen: ClassVar = {"max_density": 1.0}

    @classmethod
    def base(cls, cell: Cell) -> CabConfig:
        return cell.config.changed(**cls.chosen)

    @staticmethod
    def takes(config: CabConfig) -> bool:
        """Whether a threshold of mass sets the density of ``config``."""
        return config.predictor in CAB


@dataclass(frozen=True)
class XAttentionFitted(ByMass):
    """`XAttention` with the threshold whose density, or time, is that of the others."""

    name = "xattention_fitted"
    chosen: ClassVar = {"predictor": XAttention.name}


@dataclass(frozen=True)
class FlexPrefillFitted(ByMass):
    """`FlexPrefill` with the gamma whose density, or time, is that of the others.

    tau and the minimum are those of `FlexPrefill`: a budget below the minimum cannot be met.
    """

    name = "flexprefill_fitted"
    chosen: ClassVar = {"predictor": FlexPrefill.name}


@dataclass(frozen=True)
class MeanPooled(ByMass):
    """Block scores of mean-pooled queries and keys, a row's best up to a share of their softmax.

    Pooled as in MInference's block-sparse heads (Jiang et al. 2024, arXiv 2407.02490), chosen by
    top-p of each row, where FlexPrefill (Lai et al. 2025, arXiv 2502.20766) has it over all rows
    together.
    """

    name = "mean_pooled"
    chosen: ClassVar = {"predictor": name}


@dataclass(frozen=True)
class TriangleMix(AsPublished):
    """TriangleMix (He et al. 2025, arXiv 2507.21526): a triangle pattern in the deeper layers.

    There a query sees 8 sink tokens and the latest 512, and the last 128 queries see everything;
    the layers before are dense, 16 of 32 for Llama-3.1-8B. These numbers are those of the example
    of its code.

    The paper finds the layers of a model by the gradient that reaches what the pattern leaves out;
    here they are the second half of any model. Sinks, window and last queries are whole blocks:
    one sink block, the key blocks that hold the latest 512 tokens of every query, so that those
    further on in their query block see more, and the query blocks with one of the last 128 tokens.
    """

    name = "trianglemix"

    @classmethod
    def fit(cls, cell: Cell) -> TriangleMix:
        if cell.layers is None:
            raise ValueError("trianglemix needs a cell that tells how many layers the model has.")
        base, dense = cell.shared, cell.layers - round(TRIANGLE_SHARE * cell.layers)
        triangle = {
            "predictor": Streaming.name,
            "sink_blocks": 1,
            # counted back from the last query of a row, whose first one sees the least
            "local_blocks": -(-(WINDOW + base.query_block - 1) // base.key_block),
            "dense_tail_blocks": -(-LAST_QUERIES // base.query_block),
            "dense_layers": tuple(sorted({*range(dense), *base.dense_layers})),
        }
        return cls(base.changed(**triangle))


@dataclass(frozen=True)
class Oracle(Random):
    """The true attention mass of every block: no predictor keeps more of it.

    Costs more than dense attention. Best by mass is not best by accuracy, only close to it.
    """

    name = "oracle"


@dataclass(frozen=True)
class StreamingCache(Dense):
    """StreamingLLM's cache behind a dense prefill: 4 sinks and the latest of ``tokens`` tokens.

    Tokens keep the positions they have in the text, as of `Streaming`.
    """

    name = "streaming"
    decodes = Streaming.decodes
    tokens: int

    def cache(self, model: PreTrainedModel) -> Cache:
        return sink_cache(model, SINKS, self.tokens)

    def step_tokens(self, model: PreTrainedModel, length: int) -> float:
        return min(self.tokens, length)


class Kept(NamedTuple):
    """The tokens that are left to a layer, in the order of the text.

    Attributes:
        k, v: [B, H_kv, M, D].
        received: float32 [B, H_kv, M], attention by which they are judged.
    """

    k: Tensor
    v: Tensor
    received: Tensor

    def evicted(self, tokens: int, recent: int) -> Kept:
        """``tokens`` of them, or all: the ``recent`` latest, and those that received most."""
        length = self.received.shape[-1]
        if length <= tokens:
            return self
        old = length - recent
        heavy = self.received[..., :old].topk(tokens - recent, dim=-1, sorted=False).indices
        latest = torch.arange(old, length, device=heavy.device).expand(*heavy.shape[:2], -1)
        at = torch.cat([heavy.sort(-1).values, latest], dim=-1)
        k, v = (x.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])) for x in self[:2])
        return Kept(k, v, self.received.gather(2, at))


@dataclass(frozen=True)
class KeepsSome(Method):
    """Base of caches that keep some tokens a KV head, by attention, behind a dense prefill.

    Density is the kept share of the prompt's keys, which is not a share of prefill work: there is
    none saved. Requires prompts without padding.
    """

    matched = True
    dense_prefill = True
    tokens: int

    @classmethod
    def fit(cls, cell: Cell) -> KeepsSome:
        if cell.budget is None:
            raise ValueError(
                f"{cls.name} needs a budget: the share of the prompt's keys that is kept."
            )
        return cls(max(2, round(cell.budget * cell.length)))

    @abstractmethod
    def of_prompt(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Kept:
        """What a prompt leaves: q [B, H, N, D], k and v [B, H_kv, N, D]."""

    @abstractmethod
    def of_step(self, kept: Kept, given: Tensor) -> Kept:
        """What a step leaves, whose query has ``given`` this attention [B, H_kv, M]."""

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
        kept: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()
        shares: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
        attention = f"cab_{self.name}"
        AttentionInterface.register(attention, partial(self.attend, kept, shares))
        AttentionMaskInterface.register(attention, sdpa_mask)
        before = model.config.get_text_config()._attn_implementation
        model.set_attn_implementation(attention)
        try:
            yield lambda: list(shares.values())
        finally:
            model.set_attn_implementation(before)

    def step_tokens(self, model: PreTrainedModel, length: int) -> float:
        return min(self.tokens, length)

    @torch.no_grad()
    def attend(
        self,
        kept: MutableMapping[nn.Module, Kept],
        shares: MutableMapping[nn.Module, float],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """What transformers calls: query [B, H, N_q, D] -> ([B, N_q, H, D], None).

        ``kept`` has what is left to each module, ``shares`` how much of the prompt that was.
        """
        q_length, kv_length = query.shape[2], key.shape[2]
        prefill = q_length == kv_length
        if attention_mask is not None or not (prefill or q_length == 1):
            masked = "" if attention_mask is None else " with a mask"
            raise ValueError(
                f"{self.name} takes a whole prompt without padding, then single tokens; got "
                f"{q_length} queries on {kv_length} keys{masked}."
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if prefill:
            spans = Spans.causal(query.shape[0], q_length, kv_length, query.device)
            kept[module] = self.of_prompt(query, key, value, spans, scale)
            shares[module] = min(1.0, self.tokens / kv_length)
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        else:
            k, v, received = kept[module]
            k, v = (torch.cat([x, new[:, :, -1:]], 2) for x, new in ((k, key), (v, value)))
            grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3).float()
            weights = (grouped @ k.float().transpose(-1, -2) * scale).softmax(-1)
            kept[module] = self.of_step(Kept(k, v, F.pad(received, (0, 1))), weights.sum(2))
            out = (weights @ v.float()).to(query.dtype).flatten(1, 2).unsqueeze(2)
        return out.transpose(1, 2).contiguous(), None


def by_kv_head(received: Tensor, k: Tensor) -> Tensor:
    """[B, H, N] -> [B, H_kv, N]: what the query heads of a group give together."""
    return received.unflatten(1, (k.shape[1], -1)).sum(2)


@dataclass(frozen=True)
class H2O(KeepsSome):
    """Heavy-hitter oracle: evict what little attention was paid to (Zhang et al. 2023, 2306.14048).

    Each KV head keeps ``tokens`` tokens, half of them the latest and half those that received most
    attention from all queries so far, of the prompt and of the steps; at every step one is evicted
    for good. The paper has no rule for grouped queries: attention is summed over the query heads of
    a group.
    """

    name = "h2o"
    decodes = "heavy hitters and window"

    def of_prompt(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Kept:
        received = by_kv_head(column_sums(q, k, spans, scale), k)
        return Kept(k, v, received).evicted(self.tokens, self.tokens // 2)

    def of_step(self, kept: Kept, given: Tensor) -> Kept:
        heard = kept._replace(received=kept.received + given)
        return heard.evicted(self.tokens, self.tokens // 2)


@dataclass(frozen=True)
class SnapKV(KeepsSome):
    """SnapKV: what the end of the prompt attends is kept of it (Li et al. 2024, arXiv 2404.14469).

    The attention of the prompt's last 32 queries to each key before them, averaged over 5
    neighbouring keys, picks the best; with those 32 themselves they are ``tokens``, fixed from then
    on. What is decoded is kept as well, so that a step reads more than that: `step_tokens` counts
    the first one. Window, average and kernel are the defaults of its code; the paper's runs on
    LongBench have, as far as we know, the maximum over 7.

    The original picks for every query head, and repeats keys and values for that; here attention is
    summed over the query heads of a group, so that a KV head holds one copy.
    """

    name = "snapkv"
    decodes = "what the end of the prompt attends"

    def of_prompt(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Kept:
        window = min(SNAP_WINDOW, self.tokens, q.shape[2])
        received, _ = columns_and_diagonals(q, k, spans, scale, window)
        before = by_kv_head(received, k)[..., : k.shape[2] - window]
        pooled = F.pad(before, (SNAP_KERNEL // 2, SNAP_KERNEL // 2)).unfold(-1, SNAP_KERNEL, 1)
        return Kept(k, v, F.pad(pooled.mean(-1), (0, window))).evicted(self.tokens, window)

    def of_step(self, kept: Kept, given: Tensor) -> Kept:
        return kept


COMPARED = (
    *(Dense, Cab, Published, Streaming, Random, Antidiagonal, XAttention, XAttention16),
    *(XAttentionFitted, VerticalSlash, FlexPrefill, FlexPrefillFitted, MeanPooled, TriangleMix),
    *(Oracle, H2O, SnapKV),
)
CONTROLS = {method.name: method for method in (Full, NoNeedle)}
METHODS: dict[str, type[Method]] = {method.name: method for method in COMPARED} | CONTROLS
# methods that drop tokens from the cache, behind a dense prefill: made of how many they keep
CACHES = {method.name: method for method in (StreamingCache, H2O, SnapKV)}


def never_sparse(method: type[Method], samples: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a method that chooses blocks has attended none of its samples sparsely.

    A cache that keeps some tokens alone reads prompts densely, and decodes sparsely.
    """
    given = [s for s in samples if "sparse_density" in s]
    dense = all(
        s["sparse_density"] is None and s.get("step_tokens", s.get("tokens")) == s.get("tokens")
        for s in given
    )
    return issubclass(method, Cab) and bool(given) and dense


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
