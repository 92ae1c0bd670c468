"""Shared parts of speed ops on a whole model: its shape and weights, and its attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cab_hf.call.scope import reading
from cab_hf.config import CabConfig
from cab_hf.eval.kv_cache import cache_arguments
from cab_hf.eval.quantised import to_8_bits
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.dense import CHECK_LENGTH, check_dense
from cab_hf.eval.speed.runner import KEEPS_ALL, SpeedSettings, densities, made_of
from cab_hf.experiment.settings import by_device, option

# transformers is imported on demand: --help does not need it
if TYPE_CHECKING:
    from transformers import Cache, LlamaConfig, PreTrainedModel

SDPA = "sdpa"  # the default attention of transformers
# variant of CAB -> settings in addition to the budget
CAB = {"cab": {}, "cab-always": {"min_length": 0}}
INITIAL_STD = 0.02
ROPE_THETA = 500_000.0
# notes of reports: the attentions, and their upper bounds
WAYS = (
    "sdpa is the implementation of transformers; other dense kernels replace it. cab computes "
    "prompts shorter than min_length densely, cab-always computes none densely. Density: "
    "attended over causal pairs in all layers."
)
GAINS = (
    "Upper bound: operations of the dense model divided by those at the measured density. TFLOP/s "
    f"count attended pairs. {dense.BREAK_EVEN}"
)
# implementations of the rest of a model, in the order of a run: liger-kernel replaces the RoPE of
# transformers for good
PLAIN, FP8, LIGER = "plain", "fp8", "liger"
VARIANTS = (PLAIN, FP8, LIGER, f"{FP8}+{LIGER}")
TOGETHER = (
    "; all ranks start together; the slowest of each run and the highest peak of any rank count"
)


@dataclass(frozen=True)
class ModelShape(SpeedSettings):
    """The shape of a whole LLaMA with random weights, by default that of LLaMA-3-8B."""

    POSITIVE = ("layers", "hidden", "intermediate", "kv_heads", "head_dim", "vocab")

    layers: int | None = by_device(32, 2, "number of decoder layers", int)
    hidden: int | None = by_device(4096, 64, "hidden size", int)
    intermediate: int | None = by_device(14336, 128, "channels of the MLP", int)
    heads: int | None = by_device(32, 4, "query heads", int)
    kv_heads: int | None = by_device(8, 2, "key and value heads", int)
    head_dim: int | None = by_device(128, 16, "head dim", int)
    vocab: int | None = by_device(128_256, 256, "vocabulary size", int)

    # positions for the longest sequence
    positions = property(lambda self: max(self.lengths))

    def flops(self, length: int, density: float = 1.0, behind: int = 0) -> float:
        """Return the operations of reading a prompt, with that share of the pairs attended.

        They are those of products alone, including the logits of the last token. Pairs are the
        causal half of all pairs, and those with the cached tokens before the prompt.
        """
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        weights = self.layers * self.hidden * (heads + 3 * self.intermediate)
        pairs = density * (length * behind + length**2 / 2)
        attention = self.layers * self.heads * 4 * self.head_dim * pairs
        return 2.0 * (length * weights + self.hidden * self.vocab) + attention

    def cache_gib(self, length: int) -> float:
        """Return the GiB of the keys and values of a prompt."""
        a_token = 2 * self.layers * self.kv_heads * self.head_dim * self.torch_dtype.itemsize
        return length * a_token / 2**30


@dataclass(frozen=True)
class ModelSettings(ModelShape):
    """Settings of ops that let the model read prompts, with density as an option."""

    DEFAULTS = KEEPS_ALL

    max_density: tuple[str, ...] = densities("0.1")

    def configs(self) -> list[CabConfig]:
        return [self.budgeted(length) for length in self.lengths]

    def budgeted(self, length: int, way: str = "cab") -> CabConfig:
        """Return the config at that length; ``way`` is one of `CAB`, or dense without budget."""
        config = self.configured(max_density=self.density_at(length))
        return dataclasses.replace(config, **CAB.get(way, {}))


@dataclass(frozen=True)
class LongestSettings(ModelSettings):
    """Settings of ops that search for the longest length that fits."""

    FROM_0 = ("gpu_gib",)

    gpu_gib: float = option(
        0.0, "GiB that may be allocated, to simulate a smaller GPU; 0: all", float
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("gpu_gib", not self.gpu_gib or self.device != "cpu", "0 on a CPU")


def described(settings: Mapping[str, Any]) -> str:
    """Describe the model, the config and the clock for a report."""
    budgets = settings.get("max_density")
    return made_of(
        f"A LLaMA with random weights (standard deviation {INITIAL_STD}): {settings['layers']} "
        f"layers of {settings['hidden']} channels ({settings['intermediate']} in the MLP), "
        f"{settings['heads']} query and {settings['kv_heads']} key heads of "
        f"{settings['head_dim']}, {settings['vocab']:,} tokens, {settings['dtype']}"
        + (f", max_density {', '.join(budgets)}" if budgets else ""),
        settings,
    )


def llama_config(settings: ModelShape) -> LlamaConfig:
    """Return the transformers config of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.positions,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=INITIAL_STD,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def random_model(settings: ModelShape, variant: str = PLAIN) -> PreTrainedModel:
    """Return the model, made on its device and in its dtype.

    No weight exists on another device or in another dtype. ``variant`` is one of `VARIANTS`. Only
    the last model is cached.
    """
    return _random_model(settings, variant)


@lru_cache(maxsize=1)
def _random_model(settings: ModelShape, variant: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(
            llama_config(settings), dtype=settings.torch_dtype, attn_implementation=SDPA
        )
    for name in () if variant == PLAIN else variant.split("+"):
        HASTENED[name](model)
    return model.eval()


forget_model = _random_model.cache_clear


def _by_liger(model: PreTrainedModel) -> None:
    """Replace norms, RoPE and MLPs by those of liger-kernel."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(
        rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=False, model=model
    )


HASTENED = {FP8: to_8_bits, LIGER: _by_liger}


def random_tokens(settings: ModelShape, length: int, seed: int = 0) -> Tensor:
    """Return random tokens int64 [1, length], equal on all ranks.

    ``seed`` is added to the seed of the run.
    """
    generator = torch.Generator(settings.device).manual_seed(settings.seed + seed)
    return torch.randint(settings.vocab, (1, length), generator=generator, device=settings.device)


def random_cache(
    model: PreTrainedModel, length: int, batch: int = 1, slots: int = 0, sparse: bool = False
) -> Cache:
    """Return random keys and values: static with ``slots``, with an index of keys if ``sparse``."""
    from transformers import DynamicCache, StaticCache

    from cab_hf import index_cache

    text = model.config
    cache = StaticCache(config=text, max_cache_len=slots) if slots else DynamicCache(config=text)
    cache = index_cache(model, cache) if sparse else cache
    generator = torch.Generator(model.device).manual_seed(0)
    like = {"device": model.device, "dtype": model.dtype, "generator": generator}
    shape = (batch, text.num_key_value_heads, length, text.head_dim)
    for layer in range(text.num_hidden_layers):
        cache.update(torch.randn(shape, **like), torch.randn(shape, **like), layer)
    return cache


@contextmanager
def prefilling(
    settings: ModelSettings,
    length: int,
    way: str,
    chunk: int = 0,
    behind: int = 0,
    variant: str = PLAIN,
) -> Iterator[tuple[Callable[[], Any], Callable[[], dict[str, Any]], Callable[[], None]]]:
    """Return functions that read random tokens, count attention, and reset the cache.

    The model attends by ``way``, and computes the logits of the last token. The second function is
    `attended_by`. A `DynamicCache` with random keys and values precedes the prompt if a number of
    cached tokens is given.

    Args:
        settings: the settings.
        length: tokens of the prompt.
        way: the attention.
        chunk: tokens per call into a static cache of exactly their length: a dynamic cache would
            copy all keys and values of a layer at every chunk. 0: all tokens.
        variant: one of `VARIANTS`.
    """
    from transformers import StaticCache

    model, prompt = random_model(settings, variant), random_tokens(settings, length)
    cached = random_cache(model, behind) if behind else None

    @torch.inference_mode()
    def call() -> Any:
        cache = cached
        if chunk:
            cache = StaticCache(config=model.config, max_cache_len=length)
            # before any other allocation, while free memory is contiguous
            cache.early_initialization(
                1, settings.kv_heads, settings.head_dim, model.dtype, model.device
            )
        with reading(behind + length, start=behind):
            for piece in prompt.split(chunk or length, dim=1):
                read = model(piece, **cache_arguments(model, cache), logits_to_keep=1)
        return read

    def crop() -> None:
        asked = cached.get_seq_length() - behind if behind else 0
        # a crop by nothing differs between versions of transformers
        if asked:
            cached.crop(-asked)

    with attending(model, way, settings.budgeted(length, way), continues=behind > 0):
        yield call, partial(attended_by, model, behind + length, way), crop


@contextmanager
def attending(
    model: PreTrainedModel, way: str, config: CabConfig | None = None, continues: bool = False
) -> Iterator[None]:
    """Make ``model`` attend by ``way`` inside the block, and reset its counts.

    ``way`` is one of `CAB`, a baseline, or an ``attn_implementation`` of transformers.
    ``continues`` is True if calls continue a cache.

    Raises:
        ImportError, RuntimeError, ValueError: ``way`` is not installed, cannot continue a cache, or
            is unknown to transformers.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from cab_hf.patches import cab, stats

    stats(model, reset=True)
    if way in CAB:
        with cab(model, config):
            yield
        return
    name, baseline = way, dense.on(model.device).get(way)
    if baseline is not None:
        if continues and not baseline.continues:
            first = "it takes queries for the first tokens"
            raise RuntimeError(f"{way} cannot continue a cache: {first}")
        name = f"speed_{way.replace(' ', '_')}"
        ALL_ATTENTION_FUNCTIONS[name] = _function(model, way, baseline, continues)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(SDPA)
        if baseline is not None:
            del ALL_ATTENTION_FUNCTIONS[name]


def _function(
    model: PreTrainedModel, name: str, baseline: dense.Baseline, continues: bool
) -> Callable[..., tuple[Tensor, None]]:
    """Return a checked dense baseline with the signature of transformers' attention functions."""
    kernel = baseline.load()

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return kernel(*baseline.heads(q, k, v), scale)

    def attention(module: Any, *given: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
        *heads, mask = given
        if mask is not None:
            raise ValueError(
                f"{name} must get no mask, because it is causal here, got one from transformers. "
                "Use prompts without padding."
            )
        return attend(*heads, scaling).transpose(1, 2), None

    text = model.config
    like = {"device": model.device, "dtype": model.dtype}
    queries = CHECK_LENGTH // 2 if continues else CHECK_LENGTH
    q = torch.randn(1, text.num_attention_heads, queries, text.head_dim, **like)
    k, v = torch.randn(2, 1, text.num_key_value_heads, CHECK_LENGTH, text.head_dim, **like)
    check_dense(attend, q, k, v, backward=model.training)
    return attention


def attended_by(
    model: PreTrainedModel, length: int, way: str, reset: bool = False
) -> dict[str, Any]:
    """Return the attention since the last reset.

    ``density`` is attended over causal pairs in all layers, and ``ran_as`` describes CAB on
    sequences of that length.
    """
    from cab_hf.patches import describe, stats

    # dense layers attend to all pairs
    layers = [1.0 if x["density"] is None else x["density"] for x in stats(model, reset=reset)]
    lines = []
    if way in CAB:
        lines = describe(model, tokens=length, training=model.training).splitlines()[1:-1]
    return {"density": fmean(layers), "ran_as": "; ".join(map(str.strip, lines)) or None}
