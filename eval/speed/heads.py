"""What speed ops on the heads of one layer share: settings, inputs and dense attention on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import Speed, SpeedSettings, made_of
from cab_hf.eval.speed.timing import Bench, in_a_sentence
from cab_hf.hf.rotary import llama_channels
from cab_hf.plan import Spans
from cab_hf.predictors import LayerContext
from cab_hf.runs.settings import option

INPUTS = {
    "topics": "random with the block structure of text (runs of tokens that share a direction)",
    "noise": "white noise, where every block matters alike",
}
# of inputs with the structure of text: directions, tokens that share one, its size beside the noise
TOPICS = 64
TOPIC_TOKENS = 512
TOPIC_STRENGTH = 0.8


def inputs_option() -> Any:
    """The option of what q and k are like."""
    return option("topics", "topics (blocks differ, as in text) or noise (they do not)")


class RandomHeads:
    """Of settings that have batch, heads, kv_heads, inputs, seed and a dtype: heads like them."""

    def check_inputs(self) -> None:
        """Refuse inputs that nobody knows."""
        self.check("inputs", self.inputs in INPUTS, " or ".join(INPUTS))

    def random_heads(
        self,
        length: int,
        head_dim: int,
        device: torch.device,
        names: str,
        batch: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Random q, k or v by its letter, laid out as transformers hands them at prefill.

        [B, H, N, D] views of [B, N, H * D]; k and v have the key and value heads. B is ``batch``
        where the settings have several.
        ``inputs="topics"`` has the block structure of text: in q and k, runs of `TOPIC_TOKENS`
        tokens share one of `TOPICS` directions, so that a query has most of its mass on the blocks
        of its topic. ``"noise"`` is white: every block matters alike, and next to nothing can be
        left out.
        """
        generator = torch.Generator(device).manual_seed(self.seed)
        like = {"device": device, "dtype": self.torch_dtype, "generator": generator}
        topics = torch.randn(TOPICS, head_dim, **like)
        topics *= TOPIC_STRENGTH * head_dim**0.5 / topics.norm(dim=-1, keepdim=True)
        runs = torch.randint(
            TOPICS, (-(-length // TOPIC_TOKENS),), device=device, generator=generator
        )
        shared = topics[runs.repeat_interleave(TOPIC_TOKENS)[:length]]
        batch = self.batch if batch is None else batch
        made = []
        for name in names:
            heads = self.heads if name == "q" else self.kv_heads
            x = torch.randn(batch, length, heads, head_dim, **like)
            if self.inputs == "topics" and name != "v":
                x += shared[:, None]
            made.append(x.transpose(1, 2))
        return tuple(made)


def call_of(config: CabConfig, spans: Spans, head_dim: int) -> LayerContext:
    """What the predictor of ``config`` is told: in a cascade of its first anchor, as in a LLaMA."""
    layer = config.anchors[0] if config.anchors else None
    return LayerContext(spans, head_dim**-0.5, layer, channels=llama_channels(head_dim))


@dataclass(frozen=True)
class HeadSettings(RandomHeads, SpeedSettings):
    """Of ops that run on the heads of one layer."""

    POSITIVE = ("batch", "kv_heads")

    batch: int = option(1, "sequences", int)
    heads: int = option(32, "query heads", int)
    kv_heads: int = option(8, "key and value heads", int)
    inputs: str = inputs_option()
    dense_up_to: int = option(
        131_072, "tokens up to which dense attention is run; beyond, it is extrapolated by N²", int
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads()
        self.check_inputs()
        self.check("dense_up_to", self.dense_up_to >= 0, "a number of tokens, 0 for never")


class HeadSpeed(Speed):
    """Base of ops on the heads of one layer: dense attention is measured beside them."""

    SHAPE = ("batch", "heads", "kv_heads", "dtype")
    BY_NAME = dense.MEASURED

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        sample = super().measure(case)
        if case["length"] <= self.settings.dense_up_to:
            backward = sample.get("direction") == "backward"
            heads = (case["length"], sample["head_dim"], backward)
            for field, by_name in time_baselines(self.settings, self.bench, *heads).items():
                sample[field] |= by_name
            self.bench.settle()
        return sample


# once for all that is compared with it
@lru_cache(maxsize=1)
def time_baselines(
    settings: HeadSettings, bench: Bench, length: int, head_dim: int, backward: bool
) -> dict[str, dict[str, Any]]:
    """Every dense baseline on random heads, as `dense.measure`; where they do not fit, none."""
    try:
        q, k, v = settings.random_heads(length, head_dim, bench.device, "qkv")
    except torch.OutOfMemoryError as error:
        why = in_a_sentence(error)
        return {"not_measured": dict.fromkeys(dense.on(bench.device), why)}
    return dense.measure(q, k, v, head_dim**-0.5, bench, backward)


def described(settings: Mapping[str, Any]) -> str:
    """The heads and inputs of a run with these recorded ``settings``, and how it was timed."""
    dims = settings.get("head_dims") or [settings["head_dim"]]
    shape = (
        f"Batch {settings['batch']}, {settings['heads']} query and {settings['kv_heads']} key "
        f"heads of {', '.join(map(str, dims))}, {settings['dtype']}; inputs are "
        f"{INPUTS[settings['inputs']]}, and no model made them"
    )
    return (
        f"{made_of(shape, settings)}\n\n≈: extrapolated by N² beyond {settings['dense_up_to']:,} "
        f"tokens. {dense.BREAK_EVEN}"
    )


def names(rows: Sequence[Row], field: str = "baselines") -> list[str]:
    """The names in ``field`` of any row, each once."""
    return list(dict.fromkeys(name for row in rows for name in row[field]))


def draw_dense(
    axis: Any,
    rows: Sequence[Row],
    kernels: Sequence[str],
    value: Callable[[str, Row], float | None],
) -> None:
    """One grey line for each of the dense ``kernels``, always the same one."""
    for name, grey in zip(kernels, charts.GREYS, strict=False):
        look = {"color": grey, "linewidth": 1.2, "marker": "s", "label": f"{name} dense"}
        charts.line(axis, rows, partial(value, name), **look)
