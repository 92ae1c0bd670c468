"""The base class of methods, their cells, and the methods without a predictor of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from statistics import fmean
from typing import Any, ClassVar, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache, PreTrainedModel

import cab_hf
from cab_hf.config import CabConfig
from cab_hf.decode.step import decodes_sparsely
from cab_hf.eval.kv_cache import read_on
from cab_hf.eval.quantised import linear_layers, to_8_bits
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

BUDGET_STEPS = 1000  # resolution of a fitted share of a row, or of the mass
CLOSE = 0.01  # times this close to the budget count as equal: measurements are no more exact
# fields that only CAB uses, for selecting and decoding
OWN = ("outlier_queries", "typical_queries", "mass_threshold", "share_threshold")
OWN += ("sparse_decode", "decode_tokens")
PROBE_DIM = 16  # head dim of the random q and k for fitting a budget
SEED = 0  # seed of the probe

# () -> density per layer since the last call, None for a dense layer
LayerDensities = Callable[[], list[float | None]]
# config -> its density in sparse layers, or ms of attention, on a text of a cell
Realised = Callable[[CabConfig], float]
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """The conditions to which a method is fitted.

    Attributes:
        config: CAB's config; block sizes, engine and dense layers apply to every method.
        budget: the value to match: the density in layers that are not dense, or ms with ``took``.
        length: tokens of the prompts.
        device: device for fitting.
        realised: function that measures the density of a config on a text of the cell.
        layers: number of layers of the model.
        took: function that measures ms of attention, including block selection; None if densities
            are matched.
    """

    config: CabConfig
    budget: float | None
    length: int
    device: torch.device | str = "cpu"
    realised: Realised | None = field(default=None, repr=False)
    layers: int | None = None
    took: Realised | None = field(default=None, repr=False)

    @property
    def shared(self) -> CabConfig:
        """The part of the config for every method: all fields except CAB's own (`OWN`)."""
        usual = {name: getattr(CabConfig, name) for name in OWN}
        return self.config.changed(predictor="rows", **usual)


def layers_of(model: PreTrainedModel) -> int:
    """Return the number of layers in the text model of ``model``."""
    return model.config.get_text_config().num_hidden_layers


def known(config: CabConfig) -> CabConfig:
    """Return ``config``. Raises ValueError if its predictor is not registered."""
    make_predictor(config)
    return config


def nearest(
    choices: Sequence[T], config_of: Callable[[T], CabConfig], cell: Cell, density: Realised
) -> CabConfig:
    """Return the config nearest to the cell's budget, from configs in order of rising ``density``.

    If the cell matches times, times are compared instead, and the first within `CLOSE` is returned.

    Raises:
        ValueError: a density must be matched and the budget is none.
    """
    measure = cell.took or density
    if cell.budget is None or not (0 < cell.budget <= 1 or cell.took):
        raise ValueError(
            f"budget must be a density in (0, 1], got {cell.budget!r}. Give the density to match."
        )

    @cache
    def beyond(place: int) -> float:
        return measure(config_of(choices[place])) - cell.budget

    enough = CLOSE * cell.budget if cell.took else 0.0
    low, high = 0, len(choices)
    while low < high:
        middle = (low + high) // 2
        if abs(beyond(middle)) <= enough:
            return config_of(choices[middle])
        low, high = (middle + 1, high) if beyond(middle) < 0 else (low, middle)
    neighbours = range(len(choices))[max(0, low - 1) : low + 1]
    return config_of(choices[min(neighbours, key=lambda place: abs(beyond(place)))])


def nearest_on_probe(
    choices: Sequence[T], config_of: Callable[[T], CabConfig], cell: Cell
) -> CabConfig:
    """Return `nearest` by the density on random q and k of one head.

    The density is exact for methods with a fixed number of blocks per row.
    """
    length, device = cell.length, cell.device
    generator = torch.Generator(device).manual_seed(SEED)
    q, k = torch.randn(2, 1, 1, length, PROBE_DIM, generator=generator, device=device)
    call = LayerContext(KeyRanges.causal(1, length, length, device), PROBE_DIM**-0.5)
    probe = lambda config: make_predictor(config)(q, k, call).density()  # noqa: E731
    return nearest(choices, config_of, cell, probe)


def fitted_sparsity(config: CabConfig, cell: Cell) -> CabConfig:
    """Return ``config`` with the sparsity that realises the budget, forced blocks included."""
    dropped = range(BUDGET_STEPS - 1, -1, -1)
    return nearest_on_probe(dropped, lambda d: replace(config, sparsity=d / BUDGET_STEPS), cell)


def realised_on(model: PreTrainedModel, tokens: Sequence[int]) -> Realised:
    """Return a function that measures the density of a config while ``model`` reads ``tokens``."""

    @torch.no_grad()
    def realised(config: CabConfig) -> float:
        ids = torch.tensor([tokens], device=model.device)
        with Cab(config).applied(model) as densities:
            model(ids, use_cache=False, logits_to_keep=1)
            sparse = [density for density in densities() if density is not None]
        return fmean(sparse) if sparse else 1.0

    return realised


@dataclass(frozen=True)
class Method(ABC):
    """The base class of all methods."""

    name: ClassVar[str]
    matched: ClassVar[bool] = False  # True if `fit` needs a budget
    hides_needle: ClassVar[bool] = False  # True if its prompts lack the needle
    dense_prefill: ClassVar[bool] = False  # True if only its decode steps are not dense
    decodes: ClassVar[str] = "densely"  # how decode steps are computed

    @classmethod
    def fit(cls, cell: Cell) -> Method:
        """Return the method fitted to ``cell``. Raises ValueError if its budget is missing."""
        return cls()

    @abstractmethod
    def applied(self, model: PreTrainedModel) -> AbstractContextManager[LayerDensities]:
        """Switch the method on inside the block, and restore the former state afterwards."""

    def cache(self, model: PreTrainedModel) -> Cache:
        """Return an empty KV cache for texts that ``model`` reads under the method."""
        return DynamicCache(config=model.config)

    def stepping(self) -> AbstractContextManager[Any]:
        """Return the context in which decode steps are computed."""
        return nullcontext()

    def step_tokens(self, model: PreTrainedModel, length: int) -> float:
        """Return the tokens whose keys and values have as many bytes as a decode step reads."""
        return length

    def reaches(self, length: int, asking: int, needle: tuple[int, int]) -> bool | None:
        """Return True if queries from ``asking`` on may attend to a token of the needle.

        ``needle`` is [start, end). Returns None if this depends on the text.
        """
        return None


@dataclass(frozen=True)
class Dense(Method):
    """The model's own attention: the upper bound."""

    name = "dense"

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
        yield lambda: [None]


@dataclass(frozen=True)
class Fp8(Dense):
    """Dense attention in a model with weights and activations rounded to 8 bits."""

    name = "fp8"

    @classmethod
    def fit(cls, cell: Cell) -> Fp8:
        if find_spec("torchao") is None:
            raise ValueError(
                "torchao is not installed, and method fp8 needs it. Run `pip install torchao`, or "
                "leave fp8 out."
            )
        return cls()

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
        own = {layer: layer.weight for layer in linear_layers(model)}
        to_8_bits(model)
        try:
            yield lambda: [None]
        finally:
            for layer, weight in own.items():
                layer.weight = weight


@dataclass(frozen=True)
class NoNeedle(Dense):
    """Control: dense attention on prompts without the needle, to measure guessing."""

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
        """Return the bytes of the index and of ``decode_tokens`` rows of K and V, in tokens.

        This is decode_tokens + length * (bytes per token in the index) / (bytes per token in K and
        V), the mean over layers. Layers after an anchor read no index, and layers that decode
        densely read all tokens.
        """
        config, tokens = self.config, self.config.decode_tokens
        if not decodes_sparsely(config, length):
            return length
        with self.applied(model):
            cache = self.cache(model)
            ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            read_on(model, ids, cache)
        rows = tokens if isinstance(tokens, int) else tokens * length
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
    """Control: the sparse path with every block kept, which must answer as dense does.

    Its decode steps are plain PyTorch. Prefill and decode are exact with other kernels than those
    of `Dense`, so that all differences are rounding.
    """

    name = "full"

    @classmethod
    def fit(cls, cell: Cell) -> Full:
        return cls(cell.shared.changed(mass_threshold=0.0, max_density=1.0))

    def stepping(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(SDPBackend.MATH)


@dataclass(frozen=True)
class Published(Cab):
    """The published CAB recipe (`CabConfig.published`, Forman curvature) at the matched budget.

    Block sizes, sinks and local blocks are those of the recipe, which has no dense tail.
    """

    name = "published"
    matched = True

    @classmethod
    def fit(cls, cell: Cell) -> Published:
        kept = ("min_length", "dense_layers", "engine")
        shared = {field: getattr(cell.config, field) for field in kept}
        return cls(fitted_sparsity(CabConfig.published(**shared), cell))


def exact_readings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence on the rows whose ``never_sparse`` says that no layer attended sparsely."""
    result = dict.fromkeys(
        f"{row['method']} at {row['length']} tokens" for row in rows if row.get("never_sparse")
    )
    if not result:
        return []
    return [
        f"No layer attended sparsely under {', '.join(result)}: these results are those of dense "
        "attention."
    ]


def never_sparse(method: type[Method], samples: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a method that selects blocks attended none of its samples sparsely.

    A method that only limits the cache reads prompts densely, and decodes sparsely.
    """
    measured_samples = [s for s in samples if "sparse_density" in s]
    dense = all(
        s["sparse_density"] is None and s.get("step_tokens", s.get("tokens")) == s.get("tokens")
        for s in measured_samples
    )
    return issubclass(method, Cab) and bool(measured_samples) and dense
