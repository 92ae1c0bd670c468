"""Shared parts of speed ops on a whole model: shape, random weights and attention."""

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

from cab_hf.call.scope import set_prompt
from cab_hf.config import CabConfig
from cab_hf.eval.kv_cache import make_cache_arguments
from cab_hf.eval.quantised import to_8_bits
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.dense import CHECK_LENGTH, check_dense
from cab_hf.eval.speed.runner import (
    ALL_BLOCKS_FIELDS,
    SpeedSettings,
    format_run_description,
    make_densities_option,
)
from cab_hf.experiment.settings import by_device, option

# functions import transformers themselves, so that --help is fast
if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig, PreTrainedModel

SDPA = "sdpa"  # the default attention of transformers
# name of the attention implementation in results -> fields of CabConfig that it replaces
CAB_IMPLEMENTATIONS = {"cab": {}, "cab-always": {"min_length": 0}}
INITIAL_WEIGHT_STD = 0.02
ROPE_THETA = 500_000.0
# notes of reports on the attention implementations, and on upper bounds of the speed-up
IMPLEMENTATIONS_NOTE = (
    "sdpa is the implementation of transformers; other dense kernels replace it. cab computes "
    "prompts shorter than min_length densely, cab-always computes none densely. Density: "
    "attended over causal pairs in all layers."
)
UPPER_BOUND_NOTE = (
    "Upper bound: operations of the dense model divided by those at the measured density. TFLOP/s "
    f"count attended pairs. {dense.BREAK_EVEN_NOTE}"
)
# implementations of norms, RoPE and MLPs. A run measures them in this order, because liger-kernel
# replaces the RoPE of transformers until the process ends.
PLAIN_VARIANT, FP8, LIGER = "plain", "fp8", "liger"
VARIANTS = (PLAIN_VARIANT, FP8, LIGER, f"{FP8}+{LIGER}")
RANKS_NOTE = (
    "; all ranks start together; the slowest of each run and the highest peak of any rank count"
)


@dataclass(frozen=True)
class ModelShape(SpeedSettings):
    """The shape of a whole model with random weights, by default that of LLaMA-3-8B.

    With ``experts``, the model is a Qwen3-MoE. Without, the model is a LLaMA.
    """

    POSITIVE = (
        *("layers", "hidden", "intermediate", "kv_heads", "head_dim", "vocab"),
        "experts_per_token",
    )
    NON_NEGATIVE = ("experts",)

    layers: int | None = by_device(32, 2, "number of decoder layers", int)
    hidden: int | None = by_device(4096, 64, "hidden size", int)
    intermediate: int | None = by_device(14336, 128, "channels of the MLP or an expert", int)
    heads: int | None = by_device(32, 4, "query heads", int)
    kv_heads: int | None = by_device(8, 2, "key and value heads", int)
    head_dim: int | None = by_device(128, 16, "head dim", int)
    vocab: int | None = by_device(128_256, 256, "vocabulary size", int)
    experts: int = option(0, "experts per layer of a Qwen3-MoE; 0: a LLaMA with one MLP", int)
    experts_per_token: int = option(8, "experts that a token uses, with --experts", int)

    def __post_init__(self) -> None:
        super().__post_init__()
        accepted_values = f"at most --experts {self.experts}"
        self.require_option(
            "experts_per_token",
            not self.experts or self.experts_per_token <= self.experts,
            accepted_values,
        )

    @property
    def max_positions(self) -> int:
        """The maximum number of positions of the model: the length of the longest sequence."""
        return max(self.lengths)

    def count_flops(self, length: int, density: float = 1.0, num_cached: int = 0) -> float:
        """Return the floating-point operations of the matrix products of a prefill.

        The products include the logits of the last token.

        Args:
            length: tokens of the prompt.
            density: fraction of the causal (query, key) pairs whose attention is computed.
            num_cached: tokens in the KV cache before the prompt.
        """
        projection_channels = 2 * (self.heads + self.kv_heads) * self.head_dim
        num_mlps = self.experts_per_token if self.experts else 1
        mlp_channels = 3 * self.intermediate * num_mlps + self.experts  # projections and router
        num_weights = self.layers * self.hidden * (projection_channels + mlp_channels)
        num_pairs = density * (length * num_cached + length**2 / 2)
        attention_flops = self.layers * self.heads * 4 * self.head_dim * num_pairs
        return 2.0 * (length * num_weights + self.hidden * self.vocab) + attention_flops

    def compute_cache_gib(self, length: int) -> float:
        """Return the GiB of the keys and values of ``length`` tokens in all layers."""
        channels_per_token = 2 * self.layers * self.kv_heads * self.head_dim
        return length * channels_per_token * self.torch_dtype.itemsize / 2**30


@dataclass(frozen=True)
class ModelSettings(ModelShape):
    """Settings of ops that run prompts through a model; adds CAB's option ``max_density``."""

    CONFIG_DEFAULTS = ALL_BLOCKS_FIELDS

    max_density: tuple[str, ...] = make_densities_option("0.1")

    def configs(self) -> list[CabConfig]:
        return [self.make_config_with_density(length) for length in self.lengths]

    def make_config_with_density(self, length: int, implementation: str = "cab") -> CabConfig:
        """Return CAB's config with the ``max_density`` of the settings for a length of prompts.

        Args:
            length: tokens of the prompt.
            implementation: name of the attention implementation. If it is a key of
                `CAB_IMPLEMENTATIONS`, the fields of this variant are set too.
        """
        config = self.make_measured_config(max_density=self.get_density_at_length(length))
        return dataclasses.replace(config, **CAB_IMPLEMENTATIONS.get(implementation, {}))


@dataclass(frozen=True)
class LongestSettings(ModelSettings):
    """Settings of ops that can search for the longest sequence that fits into GPU memory."""

    NON_NEGATIVE = (*ModelSettings.NON_NEGATIVE, "gpu_gib")

    gpu_gib: float = option(
        0.0, "GiB that may be allocated, to simulate a smaller GPU; 0: all", float
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_option("gpu_gib", not self.gpu_gib or self.device != "cpu", "0 on a CPU")


def describe_run(settings: Mapping[str, Any]) -> str:
    """Return a description of the model, CAB's config and the timing method for a report."""
    density_parts = settings.get("max_density")
    num_experts, mlp_phrase = settings.get("experts"), f"{settings['intermediate']} in the MLP"
    if num_experts:
        mlp_phrase = (
            f"{num_experts} experts of {settings['intermediate']}, "
            f"{settings['experts_per_token']} per token"
        )
    model_phrase = "Qwen3-MoE" if num_experts else "LLaMA"
    return format_run_description(
        f"A {model_phrase} with random weights (standard deviation {INITIAL_WEIGHT_STD}): "
        f"{settings['layers']} layers of {settings['hidden']} channels ({mlp_phrase}), "
        f"{settings['heads']} query and {settings['kv_heads']} key heads of "
        f"{settings['head_dim']}, {settings['vocab']:,} tokens, {settings['dtype']}"
        + (f", max_density {', '.join(density_parts)}" if density_parts else ""),
        settings,
    )


def make_model_config(settings: ModelShape) -> PretrainedConfig:
    """Return the transformers config of the model: a `LlamaConfig` or a `Qwen3MoeConfig`."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    expert_fields: dict[str, Any] = {}
    if settings.experts:
        expert_fields = {
            "num_experts": settings.experts,
            "num_experts_per_tok": settings.experts_per_token,
            "moe_intermediate_size": settings.intermediate,
            "norm_topk_prob": True,
        }
    config_class = Qwen3MoeConfig if settings.experts else LlamaConfig
    return config_class(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=INITIAL_WEIGHT_STD,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **expert_fields,
    )


def make_random_model(settings: ModelShape, variant: str = PLAIN_VARIANT) -> PreTrainedModel:
    """Return a model with random weights, created directly on its device and in its dtype.

    The last returned model is cached, so that successive cases with equal arguments share it.

    Args:
        settings: shape, dtype, device and seed.
        variant: one of `VARIANTS`.
    """
    return _make_random_model(settings, variant)


# lru_cache treats an omitted and an explicit default as different keys, so this function has no
# defaults, and `make_random_model` always passes both arguments
@lru_cache(maxsize=1)
def _make_random_model(settings: ModelShape, variant: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(
            make_model_config(settings), dtype=settings.torch_dtype, attn_implementation=SDPA
        )
    for variant_part in () if variant == PLAIN_VARIANT else variant.split("+"):
        MODULE_REPLACERS[variant_part](model)
    return model.eval()


clear_model_cache = _make_random_model.cache_clear


def _replace_by_liger_kernels(model: PreTrainedModel) -> None:
    """Replace the norms, RoPE and MLPs of ``model`` by kernels of liger-kernel, in place."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(
        rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=False, model=model
    )


# part of a variant's name, between plus signs -> function that replaces modules of a model in place
MODULE_REPLACERS = {FP8: to_8_bits, LIGER: _replace_by_liger_kernels}


def draw_random_tokens(settings: ModelShape, length: int, seed_offset: int = 0) -> Tensor:
    """Return random token ids, int64 [1, length]; all ranks get the same ids.

    Args:
        settings: vocabulary, device and seed.
        length: number of tokens.
        seed_offset: number that is added to the seed of the settings.
    """
    generator = torch.Generator(settings.device).manual_seed(settings.seed + seed_offset)
    return torch.randint(settings.vocab, (1, length), generator=generator, device=settings.device)


def make_random_cache(
    model: PreTrainedModel, length: int, batch: int = 1, num_slots: int = 0, has_index: bool = False
) -> Cache:
    """Return a KV cache that contains random keys and values in every layer of ``model``.

    Args:
        model: the model.
        length: number of cached tokens per sequence.
        batch: number of sequences.
        num_slots: capacity of a static cache in tokens; 0: a dynamic cache.
        has_index: True to add the key index of `cab_hf.index_cache` for sparse decode steps.
    """
    from transformers import DynamicCache, StaticCache

    from cab_hf import index_cache

    config = model.config
    if num_slots:
        cache = StaticCache(config=config, max_cache_len=num_slots)
    else:
        cache = DynamicCache(config=config)
    cache = index_cache(model, cache) if has_index else cache
    generator = torch.Generator(model.device).manual_seed(0)
    tensor_options = {"device": model.device, "dtype": model.dtype, "generator": generator}
    kv_shape = (batch, config.num_key_value_heads, length, config.head_dim)
    for layer_index in range(config.num_hidden_layers):
        cache.update(
            torch.randn(kv_shape, **tensor_options),
            torch.randn(kv_shape, **tensor_options),
            layer_index,
        )
    return cache


@contextmanager
def prepare_prefill(
    settings: ModelSettings,
    length: int,
    implementation: str,
    chunk_tokens: int = 0,
    num_cached: int = 0,
    variant: str = PLAIN_VARIANT,
) -> Iterator[tuple[Callable[[], Any], Callable[[], dict[str, Any]], Callable[[], None]]]:
    """Yield functions that run a prefill; inside the block, the model uses ``implementation``.

    Args:
        settings: the settings.
        length: tokens of the prompt.
        implementation: name of the attention implementation, as in `use_attention`.
        chunk_tokens: tokens per call. A prompt in chunks is read into a static cache of its length,
            because a dynamic cache would copy the keys and values of a layer for every chunk. 0:
            the whole prompt in one call.
        num_cached: tokens before the prompt in a `DynamicCache` of random keys and values.
        variant: one of `VARIANTS`.

    Yields:
        A function that runs the model on a random prompt and returns the output of the last token;
        a function that returns `read_attention_fields` for all calls so far; and a function that
        removes the prompt from the `DynamicCache`, for the next call.
    """
    from transformers import StaticCache

    model, prompt = make_random_model(settings, variant), draw_random_tokens(settings, length)
    random_kv_cache = make_random_cache(model, num_cached) if num_cached else None

    @torch.inference_mode()
    def run_prefill() -> Any:
        cache = random_kv_cache
        if chunk_tokens:
            cache = StaticCache(config=model.config, max_cache_len=length)
            # allocate the cache before all other tensors, while free memory is contiguous
            cache.early_initialization(
                batch_size=1,
                num_heads=settings.kv_heads,
                head_dim=settings.head_dim,
                dtype=model.dtype,
                device=model.device,
            )
        with set_prompt(num_cached + length, num_cached_tokens=num_cached):
            for chunk_ids in prompt.split(chunk_tokens or length, dim=1):
                output = model(chunk_ids, **make_cache_arguments(model, cache), logits_to_keep=1)
        return output

    def crop_cache() -> None:
        num_added = random_kv_cache.get_seq_length() - num_cached if num_cached else 0
        # do not crop 0 tokens, because versions of transformers treat crop(0) differently
        if num_added:
            random_kv_cache.crop(-num_added)

    config = settings.make_config_with_density(length, implementation)
    with use_attention(model, implementation, config, has_cache=num_cached > 0):
        yield (
            run_prefill,
            partial(read_attention_fields, model, num_cached + length, implementation),
            crop_cache,
        )


@contextmanager
def use_attention(
    model: PreTrainedModel,
    implementation: str,
    config: CabConfig | None = None,
    has_cache: bool = False,
) -> Iterator[None]:
    """Use another attention implementation in ``model`` inside the block.

    Resets the model's attention statistics (`cab_hf.stats`) first.

    Args:
        model: the model.
        implementation: a key of `CAB_IMPLEMENTATIONS`, the name of a baseline in `dense`, or an
            ``attn_implementation`` of transformers.
        config: the config of CAB; None for other implementations.
        has_cache: True if calls of the model append to a KV cache that already has tokens.

    Raises:
        ImportError: the library of a baseline is not installed.
        RuntimeError: ``has_cache`` is True, and the baseline cannot append to a cache.
        ValueError: ``implementation`` is unknown to transformers.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from cab_hf.patches import cab, stats

    stats(model, reset=True)
    if implementation in CAB_IMPLEMENTATIONS:
        with cab(model, config):
            yield
        return
    function_name, baseline = implementation, dense.get_baselines(model.device).get(implementation)
    if baseline is not None:
        if has_cache and not baseline.aligns_to_last_key:
            raise RuntimeError(
                f"{implementation} cannot continue a cache: it takes queries for the first tokens"
            )
        function_name = f"speed_{implementation.replace(' ', '_')}"
        ALL_ATTENTION_FUNCTIONS[function_name] = _make_attention_function(
            model, implementation, baseline, has_cache
        )
    try:
        model.set_attn_implementation(function_name)
        yield
    finally:
        model.set_attn_implementation(SDPA)
        if baseline is not None:
            del ALL_ATTENTION_FUNCTIONS[function_name]


def _make_attention_function(
    model: PreTrainedModel, baseline_name: str, baseline: dense.Baseline, has_cache: bool
) -> Callable[..., tuple[Tensor, None]]:
    """Return a function with the signature of transformers' attention functions for a baseline.

    Before it returns, compares the kernel with float32 attention on random inputs.

    Args:
        model: the model.
        baseline_name: name of the baseline, for messages.
        baseline: the baseline.
        has_cache: True to check fewer queries than keys, as in a call with a cache.

    Raises:
        ArithmeticError: the kernel is wrong.
    """
    kernel = baseline.load_kernel()

    def attend_matched_heads(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = baseline.match_heads(q, k, v)
        return kernel(q, k, v, scale)

    def compute_attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        if mask is not None:
            raise ValueError(
                f"{baseline_name} must get no mask, because it is causal here, got one from "
                "transformers. Use prompts without padding."
            )
        return attend_matched_heads(q, k, v, scaling).transpose(1, 2), None

    config = model.config
    tensor_options = {"device": model.device, "dtype": model.dtype}
    q_length = CHECK_LENGTH // 2 if has_cache else CHECK_LENGTH
    q = torch.randn((1, config.num_attention_heads, q_length, config.head_dim), **tensor_options)
    kv_shape = (2, 1, config.num_key_value_heads, CHECK_LENGTH, config.head_dim)
    k, v = torch.randn(kv_shape, **tensor_options)
    check_dense(attend_matched_heads, q, k, v, backward=model.training)
    return compute_attention


def read_attention_fields(
    model: PreTrainedModel, length: int, implementation: str, reset: bool = False
) -> dict[str, Any]:
    """Return the density and a description of the attention that ``model`` has computed.

    The density covers all calls of the model since the last reset of its statistics.

    Args:
        model: the model.
        length: tokens per sequence.
        implementation: name of the attention implementation, as in `use_attention`.
        reset: True to reset the statistics afterwards.

    Returns:
        ``density``: the fraction of causal (query, key) pairs that were attended to, mean over
        layers. ``ran_as``: the description by `cab_hf.describe` of how CAB computes sequences of
        ``length`` tokens; None for other implementations.
    """
    from cab_hf.patches import describe, stats

    # dense layers attend to all pairs
    layer_densities = [
        1.0 if layer_stats["density"] is None else layer_stats["density"]
        for layer_stats in stats(model, reset=reset)
    ]
    description_lines = []
    if implementation in CAB_IMPLEMENTATIONS:
        description_lines = describe(model, tokens=length, training=model.training).splitlines()[
            1:-1
        ]
    return {
        "density": fmean(layer_densities),
        "ran_as": "; ".join(map(str.strip, description_lines)) or None,
    }
