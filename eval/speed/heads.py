"""Shared parts of speed ops on the heads of one layer: settings, inputs and dense attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import Speed, SpeedSettings, made_of
from cab_hf.eval.speed.timing import Bench, in_a_sentence
from cab_hf.experiment.settings import option
from cab_hf.hf.rotary import llama_channels
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext

# inputs with the structure of text: directions, tokens that share one, its size relative to the
# noise
TOPICS = 64
TOPIC_TOKENS = 512
TOPIC_STRENGTH = 0.8
INPUTS = "random with the block structure of text (runs of tokens that share a direction)"


class RandomHeads:
    """Random heads for settings with batch, heads, kv_heads, seed and a dtype."""

    def random_heads(
        self, length: int, head_dim: int, device: torch.device, names: str, batch: int = 0
    ) -> tuple[Tensor, ...]:
        """Return random q, k or v by letter, [B, H, N, D] views of [B, N, H * D] as at prefill.

        They have the block structure of text: in q and k, runs of `TOPIC_TOKENS` tokens share one
        of `TOPICS` directions. On white noise almost no block could be left out. B is ``batch``, or
        the batch of the settings.
        """
        generator = torch.Generator(device).manual_seed(self.seed)
        like = {"device": device, "dtype": self.torch_dtype, "generator": generator}
        topics = torch.randn(TOPICS, head_dim, **like)
        topics *= TOPIC_STRENGTH * head_dim**0.5 / topics.norm(dim=-1, keepdim=True)
        runs = torch.randint(
            TOPICS, (-(-length // TOPIC_TOKENS),), device=device, generator=generator
        )
        shared = topics[runs.repeat_interleave(TOPIC_TOKENS)[:length]]
        made = []
        for name in names:
            heads = self.heads if name == "q" else self.kv_heads
            x = torch.randn(batch or self.batch, length, heads, head_dim, **like)
            if name != "v":
                x += shared[:, None]
            made.append(x.transpose(1, 2))
        return tuple(made)


def call_of(
    config: CabConfig, ranges: KeyRanges, head_dim: int, sinks: Tensor | None = None
) -> LayerContext:
    """Return the context for the predictor of ``config``; in a cascade that of its first anchor."""
    layer = config.anchors[0] if config.anchors else None
    channels = llama_channels(head_dim)
    return LayerContext(ranges, head_dim**-0.5, layer, channels=channels, sinks=sinks)


@dataclass(frozen=True)
class HeadSettings(RandomHeads, SpeedSettings):
    """Settings of ops on the heads of one layer."""

    POSITIVE = ("batch", "kv_heads")
    FROM_0 = ("dense_up_to",)

    batch: int = option(1, "sequences", int)
    heads: int = option(32, "query heads", int)
    kv_heads: int = option(8, "key and value heads", int)
    dense_up_to: int = option(
        2**17, "longest measured length of dense attention; N² extrapolation beyond", int
    )


class HeadSpeed(Speed):
    """The base class of ops on the heads of one layer, with measured dense attention."""

    SHAPE = ("batch", "heads", "kv_heads", "dtype")
    BY_NAME = dense.MEASURED

    @staticmethod
    def described(settings: Mapping[str, Any]) -> str:
        dims = settings.get("head_dims") or [settings["head_dim"]]
        batch = f"Batch {settings['batch']}, " if "batch" in settings else ""
        made = made_of(
            f"{batch}{settings['heads']} query heads and {settings['kv_heads']} KV heads of "
            f"{', '.join(map(str, dims))} channels, {settings['dtype']}; inputs are {INPUTS}, not "
            "those of a model",
            settings,
        )
        near = settings.get("dense_up_to")
        beyond = f"≈: extrapolated by N² beyond {near:,} tokens. {dense.BREAK_EVEN}" if near else ""
        return f"{made}\n\n{beyond}".rstrip()

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        sample = super().measure(case)
        if case["length"] <= self.settings.dense_up_to:
            backward = sample.get("direction") == "backward"
            heads = (case["length"], sample["head_dim"], backward)
            for field, by_name in time_baselines(self.settings, self.bench, *heads).items():
                sample[field] |= by_name
            self.bench.settle()
        return sample


# cached for all kernels of a case
@lru_cache(maxsize=1)
def time_baselines(
    settings: HeadSettings, bench: Bench, length: int, head_dim: int, backward: bool
) -> dict[str, dict[str, Any]]:
    """Time every dense baseline on random heads, as `dense.measure`; none if memory runs out."""
    try:
        q, k, v = settings.random_heads(length, head_dim, bench.device, "qkv")
    except torch.OutOfMemoryError as error:
        why = in_a_sentence(error)
        return {"not_measured": dict.fromkeys(dense.on(bench.device), why)}
    return dense.measure(q, k, v, head_dim**-0.5, bench, backward)
