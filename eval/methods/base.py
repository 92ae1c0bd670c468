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
from cab_hf.eval.kv_cache import read_with_cache
from cab_hf.eval.quantised import list_linear_layers, to_8_bits
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

BUDGET_STEPS = 1000  # a fit chooses its parameter among the multiples of 1 / BUDGET_STEPS
# largest relative difference from the budget at which a fit accepts a measured time
TIME_TOLERANCE = 0.01
# fields of CabConfig that only CAB uses, for selecting blocks and for decoding
CAB_FIELDS = ("outlier_queries", "typical_queries", "mass_threshold", "share_threshold")
CAB_FIELDS += ("sparse_decode", "decode_tokens")
RANDOM_HEAD_DIM = 16  # head dim of the random q and k on which densities are fitted
RANDOM_QK_SEED = 0  # seed of the random q and k on which densities are fitted

# function that returns the density of each layer since the last call; None for a dense layer
LayerDensities = Callable[[], list[float | None]]
# function of a config that returns its density in sparse layers, or its attention time in ms
ConfigMeasure = Callable[[CabConfig], float]
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """The conditions to which a method is fitted.

    Attributes:
        config: CAB's config; block sizes, engine and dense layers apply to every method.
        budget: the value to match: the density in layers that are not dense, or ms of attention if
            ``measure_time_ms`` is set. None if no value is matched.
        length: tokens of the prompts.
        device: device of the q and k on which densities are fitted.
        measure_density: function that measures the density of a config while the model reads a
            sequence of the evaluation; None if no method needs it.
        num_layers: number of layers of the model; None if no method needs it.
        measure_time_ms: function that measures a config's ms of attention, including block
            selection; None if densities are matched.
    """

    config: CabConfig
    budget: float | None
    length: int
    device: torch.device | str = "cpu"
    measure_density: ConfigMeasure | None = field(default=None, repr=False)
    num_layers: int | None = None
    measure_time_ms: ConfigMeasure | None = field(default=None, repr=False)

    @property
    def config_without_cab(self) -> CabConfig:
        """The config with the defaults of all fields that only CAB uses (`CAB_FIELDS`)."""
        default_fields = {field_name: getattr(CabConfig, field_name) for field_name in CAB_FIELDS}
        return self.config.changed(predictor="rows", **default_fields)


def count_layers(model: PreTrainedModel) -> int:
    """Return the number of decoder layers of ``model``, without those of a vision encoder."""
    return model.config.get_text_config().num_hidden_layers


def with_known_predictor(config: CabConfig) -> CabConfig:
    """Check that the predictor of ``config`` is registered, and return ``config`` unchanged.

    Raises:
        ValueError: the predictor of the config is not registered.
    """
    make_predictor(config)
    return config


def find_nearest_config(
    candidates: Sequence[T],
    make_config: Callable[[T], CabConfig],
    cell: Cell,
    measure_density: ConfigMeasure,
) -> CabConfig:
    """Return the config whose density, or time, is nearest to the cell's budget.

    The search bisects ``candidates``, so that only a few configs are measured. If times are
    matched, the first config whose time differs by at most `TIME_TOLERANCE` is returned.

    Args:
        candidates: parameters of the configs, by ascending density.
        make_config: function from a parameter to its config.
        cell: the cell. If ``cell.measure_time_ms`` is set, times are matched.
        measure_density: function that measures the density of a config; unused if times are
            matched.

    Raises:
        ValueError: the budget is None, or outside of (0, 1] although densities are matched.
    """
    measure_value = cell.measure_time_ms or measure_density
    if cell.budget is None or not (0 < cell.budget <= 1 or cell.measure_time_ms):
        raise ValueError(
            f"budget must be a density in (0, 1], got {cell.budget!r}. Give the density to match."
        )

    @cache
    def compute_excess(index: int) -> float:
        return measure_value(make_config(candidates[index])) - cell.budget

    tolerance = TIME_TOLERANCE * cell.budget if cell.measure_time_ms else 0.0
    low_index, end_index = 0, len(candidates)
    while low_index < end_index:
        middle_index = (low_index + end_index) // 2
        if abs(compute_excess(middle_index)) <= tolerance:
            return make_config(candidates[middle_index])
        low_index, end_index = (
            (middle_index + 1, end_index)
            if compute_excess(middle_index) < 0
            else (low_index, middle_index)
        )
    neighbour_indices = range(len(candidates))[max(0, low_index - 1) : low_index + 1]
    return make_config(
        candidates[min(neighbour_indices, key=lambda index: abs(compute_excess(index)))]
    )


def find_nearest_config_on_random_qk(
    candidates: Sequence[T], make_config: Callable[[T], CabConfig], cell: Cell
) -> CabConfig:
    """Return the result of `find_nearest_config`, with densities of random q and k of one head.

    This is exact for methods with a fixed number of blocks per row, because their density does not
    depend on q and k.
    """
    length, device = cell.length, cell.device
    generator = torch.Generator(device).manual_seed(RANDOM_QK_SEED)
    qk_shape = (2, 1, 1, length, RANDOM_HEAD_DIM)
    q, k = torch.randn(qk_shape, generator=generator, device=device)
    layer_context = LayerContext(KeyRanges.causal(1, length, length, device), RANDOM_HEAD_DIM**-0.5)

    def measure_density(config: CabConfig) -> float:
        return make_predictor(config)(q, k, layer_context).density()

    return find_nearest_config(candidates, make_config, cell, measure_density)


def fit_sparsity(config: CabConfig, cell: Cell) -> CabConfig:
    """Return ``config`` with the ``sparsity`` that matches the cell's budget.

    The matched density includes forced blocks.
    """
    sparsity_steps = range(BUDGET_STEPS - 1, -1, -1)
    return find_nearest_config_on_random_qk(
        sparsity_steps, lambda step: replace(config, sparsity=step / BUDGET_STEPS), cell
    )


def make_density_measure(model: PreTrainedModel, tokens: Sequence[int]) -> ConfigMeasure:
    """Return a function that measures the density of a config while ``model`` reads ``tokens``.

    The function returns the mean over sparse layers, and 1.0 if there are none.
    """

    @torch.no_grad()
    def measure_density(config: CabConfig) -> float:
        ids = torch.tensor([tokens], device=model.device)
        with Cab(config).apply_to(model) as read_densities:
            model(ids, use_cache=False, logits_to_keep=1)
            sparse_densities = [density for density in read_densities() if density is not None]
        return fmean(sparse_densities) if sparse_densities else 1.0

    return measure_density


@dataclass(frozen=True)
class Method(ABC):
    """The base class of attention methods that are compared: it switches a model to the method.

    Attributes:
        name: name of the method.
        is_budget_matched: True if `fit` matches the density or time of the method to
            ``Cell.budget``.
        hides_needle: True if prompts for the method lack the needle.
        has_dense_prefill: True if prefill is dense, and only decode steps attend to a part of the
            keys.
        decode_description: words that describe the decode steps in reports.
    """

    name: ClassVar[str]
    is_budget_matched: ClassVar[bool] = False
    hides_needle: ClassVar[bool] = False
    has_dense_prefill: ClassVar[bool] = False
    decode_description: ClassVar[str] = "densely"

    @classmethod
    def fit(cls, cell: Cell) -> Method:
        """Return the method fitted to ``cell``.

        Raises:
            ValueError: the method needs a budget and the cell has none.
        """
        return cls()

    @abstractmethod
    def apply_to(self, model: PreTrainedModel) -> AbstractContextManager[LayerDensities]:
        """Apply the method to ``model`` inside the block, and restore the model afterwards.

        The context manager yields a function of the type `LayerDensities`.
        """

    def make_cache(self, model: PreTrainedModel) -> Cache:
        """Return an empty KV cache for a sequence that ``model`` reads with the method applied."""
        return DynamicCache(config=model.config)

    def get_decode_context(self) -> AbstractContextManager[Any]:
        """Return a context manager in which the caller must run decode steps; no-op by default."""
        return nullcontext()

    def count_step_tokens(self, model: PreTrainedModel, length: int) -> float:
        """Return the bytes that a decode step reads, as a number of tokens of keys and values.

        Args:
            model: the model.
            length: cached tokens.
        """
        return length

    def can_reach(
        self, length: int, question_start: int, needle_span: tuple[int, int]
    ) -> bool | None:
        """Return True if a query of the question may attend to a token of the needle.

        Returns None if the answer depends on the tokens of the prompt, not only on positions.

        Args:
            length: tokens of the prompt.
            question_start: position of the first token of the question.
            needle_span: [start, end) of the needle in tokens.
        """
        return None


@dataclass(frozen=True)
class Dense(Method):
    """The model's own dense attention, whose results are the upper bound of all methods."""

    name = "dense"

    @contextmanager
    def apply_to(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
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
    def apply_to(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
        original_weights = {layer: layer.weight for layer in list_linear_layers(model)}
        to_8_bits(model)
        try:
            yield lambda: [None]
        finally:
            for layer, weight in original_weights.items():
                layer.weight = weight


@dataclass(frozen=True)
class NoNeedle(Dense):
    """Control: dense attention on prompts without the needle. Right answers are guesses."""

    name = "no_needle"
    hides_needle = True


@dataclass(frozen=True)
class Cab(Method):
    """Attention by `cab_hf.cab` with a config; subclasses use other predictors.

    Attributes:
        config: the config of `cab_hf.cab`.
    """

    name = "cab"
    config: CabConfig

    @classmethod
    def fit(cls, cell: Cell) -> Cab:
        return cls(cell.config)

    @contextmanager
    def apply_to(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
        with cab_hf.cab(model, config=self.config):
            cab_hf.stats(model, reset=True)
            yield lambda: [layer["density"] for layer in cab_hf.stats(model, reset=True)]

    def make_cache(self, model: PreTrainedModel) -> Cache:
        return cab_hf.index_cache(model) if self.config.sparse_decode else super().make_cache(model)

    @torch.no_grad()
    def count_step_tokens(self, model: PreTrainedModel, length: int) -> float:
        """Return the bytes that a decode step reads, as a number of tokens of keys and values.

        The result is the mean over layers. A layer with an index reads decode_tokens + length *
        (index bytes per token) / (bytes per token in K and V). Layers that reuse the keys selected
        in an anchor layer read decode_tokens and no index. Layers that decode densely read all
        tokens.
        """
        config, decode_tokens = self.config, self.config.decode_tokens
        if not decodes_sparsely(config, length):
            return length
        with self.apply_to(model):
            cache = self.make_cache(model)
            ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            read_with_cache(model, ids, cache)
        num_selected_keys = (
            decode_tokens if isinstance(decode_tokens, int) else decode_tokens * length
        )
        layer_tokens = []
        for layer_index, layer in enumerate(cache.layers):
            key_index = getattr(layer, "index", None)
            if key_index is not None:
                kv_bytes_per_token = layer.keys[0, 0, 0].nbytes + layer.values[0, 0, 0].nbytes
                index_bytes_per_token = key_index.nbytes / layer.keys[..., 0].numel()
                layer_tokens.append(
                    num_selected_keys + length * index_bytes_per_token / kv_bytes_per_token
                )
            else:
                follows_anchor = config.anchors and layer_index not in config.dense_layers
                layer_tokens.append(num_selected_keys if follows_anchor else length)
        return fmean(layer_tokens)


@dataclass(frozen=True)
class Full(Cab):
    """Control: CAB that selects every block, so that its answers must equal those of `Dense`.

    Prefill and decode steps are exact, but use other kernels than `Dense`. All differences from
    `Dense` are therefore rounding errors. Decode steps use the SDPA backend in plain PyTorch.
    """

    name = "full"

    @classmethod
    def fit(cls, cell: Cell) -> Full:
        return cls(cell.config_without_cab.changed(mass_threshold=0.0, max_density=1.0))

    def get_decode_context(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(SDPBackend.MATH)


@dataclass(frozen=True)
class Published(Cab):
    """The published CAB recipe (`CabConfig.published`, Forman curvature) at the matched budget.

    Block sizes, sink blocks and local blocks are those of the recipe, and not those of the cell's
    config. The recipe has no dense tail.
    """

    name = "published"
    is_budget_matched = True

    @classmethod
    def fit(cls, cell: Cell) -> Published:
        copied_field_names = ("min_length", "dense_layers", "engine")
        copied_fields = {
            field_name: getattr(cell.config, field_name) for field_name in copied_field_names
        }
        return cls(fit_sparsity(CabConfig.published(**copied_fields), cell))


def dense_row_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a list with one sentence that names all rows in which ``never_sparse`` is true.

    Returns [] without such rows.
    """
    dense_row_phrases = dict.fromkeys(
        f"{row['method']} at {row['length']} tokens" for row in rows if row.get("never_sparse")
    )
    if not dense_row_phrases:
        return []
    return [
        f"No layer attended sparsely under {', '.join(dense_row_phrases)}: these results are those "
        "of dense attention."
    ]


def never_sparse(method: type[Method], samples: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if ``method`` selects blocks, but attention was dense in all its samples.

    Attention was not dense if a prefill was sparse, or if a decode step read fewer tokens than the
    sequence has. Samples without ``sparse_density`` are ignored.
    """
    samples_with_density = [sample for sample in samples if "sparse_density" in sample]
    is_always_dense = all(
        sample["sparse_density"] is None
        and sample.get("step_tokens", sample.get("tokens")) == sample.get("tokens")
        for sample in samples_with_density
    )
    return issubclass(method, Cab) and bool(samples_with_density) and is_always_dense
