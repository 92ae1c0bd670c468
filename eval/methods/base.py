"""The base class of methods, cells to which methods are fitted, and methods without predictor."""

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

BUDGET_STEPS = 1000  # number of values from 0 to 1 among which a fit chooses
CLOSE = 0.01  # relative error of measured times: a fit accepts times this close to the budget
# fields of CabConfig that only CAB uses, for selecting blocks and for decoding
OWN = ("outlier_queries", "typical_queries", "mass_threshold", "share_threshold")
OWN += ("sparse_decode", "decode_tokens")
PROBE_DIM = 16  # head dim of the random q and k on which densities are fitted
SEED = 0  # seed of these q and k

# function that returns the density of each layer since the last call; None for a dense layer
LayerDensities = Callable[[], list[float | None]]
# function of a config that returns its density in sparse layers, or its attention time in ms
Realised = Callable[[CabConfig], float]
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """The conditions to which a method is fitted.

    Attributes:
        config: CAB's config; block sizes, engine and dense layers apply to every method.
        budget: the value to match: the density in layers that are not dense, or ms of attention if
            ``took`` is set. None if no value is matched.
        length: tokens of the prompts.
        device: device of the q and k on which densities are fitted.
        realised: function that measures the density of a config on a text of the cell; None if no
            method needs it.
        layers: number of layers of the model; None if no method needs it.
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
        """The config with the defaults of all fields that only CAB uses (`OWN`)."""
        defaults = {name: getattr(CabConfig, name) for name in OWN}
        return self.config.changed(predictor="rows", **defaults)


def layers_of(model: PreTrainedModel) -> int:
    """Return the number of layers in the text model of ``model``."""
    return model.config.get_text_config().num_hidden_layers


def with_known_predictor(config: CabConfig) -> CabConfig:
    """Return ``config`` unchanged.

    Raises:
        ValueError: the predictor of the config is not registered.
    """
    make_predictor(config)
    return config


def nearest(
    choices: Sequence[T], config_of: Callable[[T], CabConfig], cell: Cell, density: Realised
) -> CabConfig:
    """Return the config whose density, or time, is nearest to the cell's budget.

    The search bisects, and measures few configs. For times, it ends at the first config within
    `CLOSE`.

    Args:
        choices: parameters of the configs, by ascending density.
        config_of: function from a parameter to its config.
        cell: the cell; ``took`` measures times if times are matched.
        density: function that measures the density of a config.

    Raises:
        ValueError: the budget is None, or is no density although densities are matched.
    """
    measure = cell.took or density
    if cell.budget is None or not (0 < cell.budget <= 1 or cell.took):
        raise ValueError(
            f"budget must be a density in (0, 1], got {cell.budget!r}. Give the density to match."
        )

    @cache
    def excess(index: int) -> float:
        return measure(config_of(choices[index])) - cell.budget

    tolerance = CLOSE * cell.budget if cell.took else 0.0
    low, high = 0, len(choices)
    while low < high:
        middle = (low + high) // 2
        if abs(excess(middle)) <= tolerance:
            return config_of(choices[middle])
        low, high = (middle + 1, high) if excess(middle) < 0 else (low, middle)
    neighbours = range(len(choices))[max(0, low - 1) : low + 1]
    return config_of(choices[min(neighbours, key=lambda index: abs(excess(index)))])


def nearest_on_probe(
    choices: Sequence[T], config_of: Callable[[T], CabConfig], cell: Cell
) -> CabConfig:
    """Return the result of `nearest`, with densities on random q and k of one head.

    The density does not depend on q and k for methods with a fixed number of blocks per row.
    """
    length, device = cell.length, cell.device
    generator = torch.Generator(device).manual_seed(SEED)
    shape = (2, 1, 1, length, PROBE_DIM)
    q, k = torch.randn(shape, generator=generator, device=device)
    context = LayerContext(KeyRanges.causal(1, length, length, device), PROBE_DIM**-0.5)

    def density(config: CabConfig) -> float:
        return make_predictor(config)(q, k, context).density()

    return nearest(choices, config_of, cell, density)


def fitted_sparsity(config: CabConfig, cell: Cell) -> CabConfig:
    """Return ``config`` with the ``sparsity`` that matches the cell's budget.

    Forced blocks count in the budget.
    """
    steps = range(BUDGET_STEPS - 1, -1, -1)
    return nearest_on_probe(steps, lambda step: replace(config, sparsity=step / BUDGET_STEPS), cell)


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
    """The base class of all methods.

    Attributes:
        name: name of the method.
        matched: True if `fit` needs a budget.
        hides_needle: True if prompts for the method lack the needle.
        dense_prefill: True if prefill is dense and only decode steps are not.
        decodes: description of decode steps in reports.
    """

    name: ClassVar[str]
    matched: ClassVar[bool] = False
    hides_needle: ClassVar[bool] = False
    dense_prefill: ClassVar[bool] = False
    decodes: ClassVar[str] = "densely"

    @classmethod
    def fit(cls, cell: Cell) -> Method:
        """Return the method fitted to ``cell``.

        Raises:
            ValueError: the method needs a budget and the cell has none.
        """
        return cls()

    @abstractmethod
    def applied(self, model: PreTrainedModel) -> AbstractContextManager[LayerDensities]:
        """Apply the method to ``model`` inside the block, and restore the model afterwards."""

    def cache(self, model: PreTrainedModel) -> Cache:
        """Return an empty KV cache for a text that ``model`` reads while the method is applied."""
        return DynamicCache(config=model.config)

    def stepping(self) -> AbstractContextManager[Any]:
        """Return the context in which decode steps are computed."""
        return nullcontext()

    def step_tokens(self, model: PreTrainedModel, length: int) -> float:
        """Return the bytes that a decode step reads, as a number of tokens of keys and values.

        Args:
            model: the model.
            length: cached tokens.
        """
        return length

    def reaches(self, length: int, asking: int, needle: tuple[int, int]) -> bool | None:
        """Return True if a query of the question may attend to a token of the needle.

        Returns None if this depends on the text.

        Args:
            length: tokens of the prompt.
            asking: position of the first token of the question.
            needle: [start, end) of the needle in tokens.
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
        weights = {layer: layer.weight for layer in linear_layers(model)}
        to_8_bits(model)
        try:
            yield lambda: [None]
        finally:
            for layer, weight in weights.items():
                layer.weight = weight


@dataclass(frozen=True)
class NoNeedle(Dense):
    """Control: dense attention on prompts without the needle, which measures the guess rate."""

    name = "no_needle"
    hides_needle = True


@dataclass(frozen=True)
class Cab(Method):
    """CAB.

    Attributes:
        config: the config.
    """

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
        """Return the bytes that a decode step reads, as a number of tokens of keys and values.

        The result is the mean over layers. A layer with an index reads decode_tokens + length *
        (index bytes per token) / (bytes per token in K and V). Layers that use the selection of an
        anchor read no index, and layers that decode densely read all tokens.
        """
        config, tokens = self.config, self.config.decode_tokens
        if not decodes_sparsely(config, length):
            return length
        with self.applied(model):
            cache = self.cache(model)
            ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            read_on(model, ids, cache)
        num_keys = tokens if isinstance(tokens, int) else tokens * length
        layer_tokens = []
        for number, layer in enumerate(cache.layers):
            index = getattr(layer, "index", None)
            if index is not None:
                token_bytes = layer.keys[0, 0, 0].nbytes + layer.values[0, 0, 0].nbytes
                index_bytes = index.nbytes / layer.keys[..., 0].numel()
                layer_tokens.append(num_keys + length * index_bytes / token_bytes)
            else:
                follows_anchor = config.anchors and number not in config.dense_layers
                layer_tokens.append(num_keys if follows_anchor else length)
        return fmean(layer_tokens)


@dataclass(frozen=True)
class Full(Cab):
    """Control: CAB with every block kept, which must answer as dense does.

    Prefill and decode are exact, but use other kernels than `Dense`; decode steps run in plain
    PyTorch. All differences to `Dense` are therefore rounding.
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
        names = ("min_length", "dense_layers", "engine")
        shared = {name: getattr(cell.config, name) for name in names}
        return cls(fitted_sparsity(CabConfig.published(**shared), cell))


def dense_row_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence that lists the rows with ``never_sparse``; [] without such rows."""
    dense_rows = dict.fromkeys(
        f"{row['method']} at {row['length']} tokens" for row in rows if row.get("never_sparse")
    )
    if not dense_rows:
        return []
    return [
        f"No layer attended sparsely under {', '.join(dense_rows)}: these results are those of "
        "dense attention."
    ]


def never_sparse(method: type[Method], samples: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a method that selects blocks attended densely in all samples.

    A sample is sparse if prefill was sparse, or if a decode step read fewer tokens than the text
    has.
    """
    with_density = [s for s in samples if "sparse_density" in s]
    all_dense = all(
        s["sparse_density"] is None and s.get("step_tokens", s.get("tokens")) == s.get("tokens")
        for s in with_density
    )
    return issubclass(method, Cab) and bool(with_density) and all_dense
