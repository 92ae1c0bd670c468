"""Decode steps of a whole model behind a cache of random keys: no prompt is read for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._dynamo.utils import counters

from cab_hf.config import CabConfig
from cab_hf.eval.kv_cache import cache_arguments
from cab_hf.eval.speed.model import ModelShape, random_model
from cab_hf.eval.speed.timing import Bench

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

DYNAMIC, STATIC, COMPILED = "dynamic", "static", "compiled"
MODES = {
    COMPILED: 'a static cache, torch.compile(mode="reduce-overhead", fullgraph=True)',
    STATIC: "a static cache, eager",
    DYNAMIC: "a dynamic cache, eager",
}
# slots are a multiple of it: kernels under a mask pad what is not aligned
ALIGNED = 128
# compiled: one that compiles, one that records its graph, and replays
WARM_UP_STEPS = 5


class Decoded(NamedTuple):
    """What steps took: ms of each, seconds of the first of all, and GiB.

    ``index_gib`` is None where there is no index, ``peak_gib`` where nobody counts.
    """

    times: list[float]
    first_s: float
    peak_gib: float | None
    cache_gib: float
    index_gib: float | None
    ran_as: str | None
    without_graph: str | None


@torch.no_grad()
def time_steps(
    settings: ModelShape,
    bench: Bench,
    length: int,
    batch: int,
    mode: str,
    config: CabConfig | None,
    steps: int,
) -> Decoded:
    """Steps behind ``length`` tokens of ``batch`` texts, each of which writes its token.

    ``config`` is that of cab; None for transformers' own attention.

    Raises:
        RuntimeError: when steps are to be compiled and there is no GPU.
    """
    if mode == COMPILED and bench.device.type != "cuda":
        raise RuntimeError("reduce-overhead makes CUDA graphs, which need a GPU")
    model = random_model(settings)
    with attending(model, config):
        cache = filled(model, length, batch, WARM_UP_STEPS + steps, mode != DYNAMIC, config)
        bench.settle()
        counters.clear()
        try:
            step = stepping(model, cache, batch, mode == COMPILED)
            first, peak = bench.walls(step, WARM_UP_STEPS)
            times, later = bench.walls(step, steps)
        finally:
            if mode == COMPILED:
                # graphs and what they hold
                torch._dynamo.reset()
    indices = [layer.index for layer in cache.layers if getattr(layer, "index", None) is not None]
    kept = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    skipped = counters["inductor"]["cudagraph_skips"]
    return Decoded(
        times,
        first[0] / 1e3,
        peak and max(peak, later),
        kept / 2**30,
        sum(index.nbytes for index in indices) / 2**30 if indices else None,
        ran_as(config, len(indices), cache.layers[0].keys.shape[2]) if config else None,
        f"inductor makes none of {skipped} graphs" if skipped else None,
    )


@contextmanager
def attending(model: PreTrainedModel, config: CabConfig | None) -> Iterator[None]:
    """Let ``model`` attend by cab for a while, where there is a config."""
    from cab_hf.patches import cab

    with cab(model, config) if config else nullcontext():
        yield


def ran_as(config: CabConfig, layers: int, slots: int) -> str:
    """What so many layers with an index do where their cache has that many slots."""
    from cab_hf.decode.step import decodes_sparsely

    if not decodes_sparsely(config, slots):
        return "dense: few tokens beside those that a step would read"
    return f"{layers} layers choose the keys they read"


def filled(
    model: PreTrainedModel,
    length: int,
    batch: int,
    room: int,
    static: bool,
    config: CabConfig | None,
) -> Cache:
    """A cache of random keys and values of ``length`` tokens, static with ``room`` for more.

    Slots are aligned to `ALIGNED`.
    """
    from transformers import DynamicCache, StaticCache

    from cab_hf import index_cache

    text = model.config
    slots = {"max_cache_len": -(-(length + room) // ALIGNED) * ALIGNED} if static else {}
    cache = (StaticCache if static else DynamicCache)(config=text, **slots)
    cache = index_cache(model, cache) if config else cache
    generator = torch.Generator(model.device).manual_seed(0)
    like = {"device": model.device, "dtype": model.dtype, "generator": generator}
    shape = (batch, text.num_key_value_heads, length, text.head_dim)
    for layer in range(text.num_hidden_layers):
        cache.update(torch.randn(shape, **like), torch.randn(shape, **like), layer)
    return cache


def stepping(model: PreTrainedModel, cache: Cache, batch: int, compiled: bool) -> Callable[[], Any]:
    """What reads a token of each text and takes the likeliest next one."""
    forward = model.__call__
    if compiled:
        forward = torch.compile(forward, mode="reduce-overhead", fullgraph=True)
    # 0 pads, and its embedding is nothing
    tokens = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    cached = cache_arguments(model, cache)

    def step() -> None:
        if compiled:
            # what the last step returned is not needed any more
            torch.compiler.cudagraph_mark_step_begin()
        logits = forward(tokens, **cached).logits
        tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    return step
