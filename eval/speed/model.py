"""What speed ops on a whole model share: its shape, random weights, and how it attends."""

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

from cab_hf.call.prompt import reading
from cab_hf.config import CabConfig
from cab_hf.eval.kv_cache import cache_arguments
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import KEEPS_ALL, SpeedSettings, densities, made_of
from cab_hf.eval.speed.checks import CHECK_LENGTH, check_dense, repeated
from cab_hf.runs.settings import by_device, option

# transformers is imported where it is used: asking for help needs none of it
if TYPE_CHECKING:
    from transformers import PreTrainedModel

SDPA = "sdpa"  # what transformers attends with unless it is told otherwise
CAB_DENSE = "cab_dense"  # exact, and over ranks as well
# how CAB is run -> what is set beyond the budget
CAB = {"cab": {}, "cab-always": {"min_length": 0}}
INITIAL_STD = 0.02


@dataclass(frozen=True)
class ModelShape(SpeedSettings):
    """Of ops that run a whole LLaMA with random weights; the defaults have LLaMA-3-8B's shape."""

    POSITIVE = ("layers", "hidden", "intermediate", "kv_heads", "head_dim", "vocab")

    layers: int | None = by_device(32, 2, "decoder layers", int)
    hidden: int | None = by_device(4096, 64, "hidden size", int)
    intermediate: int | None = by_device(14336, 128, "hidden size of the MLP", int)
    heads: int | None = by_device(32, 4, "query heads", int)
    kv_heads: int | None = by_device(8, 2, "key and value heads", int)
    head_dim: int | None = by_device(128, 16, "head dim", int)
    vocab: int | None = by_device(128_256, 256, "vocabulary size", int)
    rope_theta: float = option(500_000.0, "base of the rotary frequencies", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads()

    @property
    def positions(self) -> int:
        """Of the longest text that the model reads."""
        return max(self.lengths)

    def model_flops(self, length: int, behind: int = 0) -> dict[str, float]:
        """Floating-point operations of reading a prompt densely: ``linear`` and ``attention``.

        A multiplication and an addition per weight and token, the logits of the last token alone;
        attention counts the causal half of all pairs, and those with the ``behind`` tokens that a
        cache holds before the prompt. Norms, rotary embedding and softmax are not
        counted.
        """
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        weights = self.layers * self.hidden * (heads + 3 * self.intermediate)
        pairs = length * behind + length**2 / 2
        attention = self.layers * self.heads * 4 * self.head_dim * pairs
        linear = 2.0 * (length * weights + self.hidden * self.vocab)
        return {"linear": linear, "attention": attention}

    def attended_flops(self, length: int, density: float, behind: int = 0) -> float:
        """The same in all, where that share of the causal pairs is attended."""
        work = self.model_flops(length, behind)
        return work["linear"] + density * work["attention"]

    def cache_bytes(self, length: int) -> int:
        """Bytes of the keys and values of a prompt."""
        a_token = 2 * self.layers * self.kv_heads * self.head_dim * self.torch_dtype.itemsize
        return length * a_token


@dataclass(frozen=True)
class ModelSettings(ModelShape):
    """Of ops that let the model read prompts, whose density is an option."""

    DEFAULTS = KEEPS_ALL

    max_density: tuple[str, ...] = densities("0.1")

    def __post_init__(self) -> None:
        super().__post_init__()
        for length in self.lengths:
            self.budgeted(length)

    def budgeted(self, length: int, **fields: Any) -> CabConfig:
        """The config at that length, with ``fields`` beyond its budget."""
        return dataclasses.replace(self.configured(max_density=self.density_at(length)), **fields)


def shape_of(settings: Mapping[str, Any]) -> str:
    """The model of a run with these recorded ``settings``."""
    return (
        f"A LLaMA with random weights (standard deviation {INITIAL_STD}): {settings['layers']} "
        f"layers of {settings['hidden']} channels ({settings['intermediate']} in the MLP), "
        f"{settings['heads']} query and {settings['kv_heads']} key heads of "
        f"{settings['head_dim']}, {settings['vocab']:,} tokens, {settings['dtype']}"
    )


def described(settings: Mapping[str, Any]) -> str:
    """The model of a run with these recorded ``settings``, and how it was timed."""
    budget = f"max_density {', '.join(settings['max_density'])}"
    return made_of(f"{shape_of(settings)}, {budget}", settings)


@lru_cache(maxsize=1)
def random_model(settings: ModelShape) -> PreTrainedModel:
    """The model, made where it runs: no weight is ever on another device or of another dtype."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.positions,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        initializer_range=INITIAL_STD,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=settings.torch_dtype, attn_implementation=SDPA
        )
    return model.eval()


def prompt_of(settings: ModelSettings, length: int) -> Tensor:
    """A prompt int64 [1, length] of random tokens, the same on all ranks."""
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    return torch.randint(settings.vocab, (1, length), generator=generator, device=settings.device)


def prefill(settings: ModelSettings, length: int, chunk: int | None = None) -> Callable[[], Any]:
    """What reads a random prompt of that length into a new cache and gives its last logits.

    With ``chunk`` it is read that many tokens at a time into a static cache of exactly its length:
    a dynamic one would copy all of a layer's keys, and then its values, at every chunk, and need
    room for the copy.
    """
    from transformers import StaticCache

    model, prompt = random_model(settings), prompt_of(settings, length)

    @torch.inference_mode()
    def call() -> Any:
        cache = None
        if chunk is not None:
            cache = StaticCache(config=model.config, max_cache_len=length)
            # before anything else, while free memory is whole
            cache.early_initialization(
                1, settings.kv_heads, settings.head_dim, model.dtype, model.device
            )
        cached = cache_arguments(model, cache)
        with reading(length):
            for piece in prompt.split(chunk or length, dim=1):
                read = model(piece, **cached, logits_to_keep=1)
        return read

    return call


@contextmanager
def attending(
    model: PreTrainedModel, name: str, config: CabConfig, continues: bool = False
) -> Iterator[None]:
    """Let ``model`` attend by ``name`` for a while; what it attends is counted anew.

    ``name`` is one of `CAB`, a baseline, or an ``attn_implementation`` of transformers.
    ``continues`` says that calls continue a cache.

    Raises:
        ImportError: for what is not installed.
        RuntimeError: for a baseline that continues no cache, where it is to.
        ValueError: for what transformers does not know.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from cab_hf.patches import cab, stats

    stats(model, reset=True)
    if name in CAB:
        with cab(model, config):
            yield
        return
    way = name
    if name in dense.on(model.device):
        way = f"speed_{name.replace(' ', '_')}"
        ALL_ATTENTION_FUNCTIONS[way] = _function(model, name, continues)
    try:
        model.set_attn_implementation(way)
        yield
    finally:
        model.set_attn_implementation(SDPA)
        if way != name:
            del ALL_ATTENTION_FUNCTIONS[way]


def _function(
    model: PreTrainedModel, name: str, continues: bool
) -> Callable[..., tuple[Tensor, None]]:
    """A dense baseline under the signature of transformers' attention functions, checked."""
    baseline = dense.on(model.device)[name]
    if continues and not baseline.continues:
        raise RuntimeError(f"{name} cannot continue a cache: to it, queries are the first tokens")
    kernel = baseline.load()

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return kernel(q, *(x if baseline.grouped else repeated(x, q) for x in (k, v)), scale)

    def attention(module: Any, *given: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
        *heads, mask = given
        if mask is not None:
            raise ValueError(f"{name} is causal here and takes no mask; transformers made one.")
        return attend(*heads, scaling).transpose(1, 2), None

    text = model.config
    like = {"device": model.device, "dtype": model.dtype}
    queries = CHECK_LENGTH // 2 if continues else CHECK_LENGTH
    q = torch.randn(1, text.num_attention_heads, queries, text.head_dim, **like)
    k, v = torch.randn(2, 1, text.num_key_value_heads, CHECK_LENGTH, text.head_dim, **like)
    check_dense(attend, q, k, v, backward=model.training)
    return attention


def layers_as(model: PreTrainedModel, length: int, training: bool) -> str:
    """What each layer of ``model`` does with a text, and a step of decode, in one line."""
    from cab_hf.patches import describe

    lines = describe(model, tokens=length, training=training).splitlines()[1:-1]
    return "; ".join(map(str.strip, lines))


@contextmanager
def prefilling(
    settings: ModelSettings, length: int, way: str, chunk: int | None = None
) -> Iterator[tuple[Callable[[], Any], Callable[[], dict[str, Any]]]]:
    """(what reads a prompt, what then is known of it) while the model attends that ``way``.

    Known are its ``density``, attended over causal pairs in all layers, and what CAB ``ran_as``.
    """
    model = random_model(settings)
    call = prefill(settings, length, chunk)
    with attending(model, way, settings.budgeted(length, **CAB.get(way, {}))):
        yield call, partial(attended_by, model, length, way)


def attended_by(model: PreTrainedModel, length: int, way: str) -> dict[str, Any]:
    """``density`` since it was counted anew, and what CAB ``ran_as`` at ``length`` tokens."""
    from cab_hf.patches import stats

    # layers that are computed dense attend everything
    layers = [1.0 if layer["density"] is None else layer["density"] for layer in stats(model)]
    text = layers_as(model, length, training=False) if way in CAB else None
    return {"density": fmean(layers), "ran_as": text}
