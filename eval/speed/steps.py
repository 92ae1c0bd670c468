"""Decode steps of a whole model behind a cache of random keys: no prompt is read for them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import counters

from cab_hf.config import CabConfig
from cab_hf.eval.kv_cache import cache_arguments
from cab_hf.eval.speed import model as models
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


@torch.no_grad()
def time_steps(
    settings: models.ModelShape,
    bench: Bench,
    length: int,
    batch: int,
    mode: str,
    config: CabConfig | None,
) -> dict[str, Any]:
    """Steps behind ``length`` tokens of ``batch`` texts, each of which writes its token.

    ``config`` is that of cab; None for transformers' own attention.

    Returns:
        ``ms`` of a step, ``least_ms`` and ``most_ms``; seconds of the first of all, ``first_s``;
        ``peak_gib``, ``cache_gib`` and ``index_gib``; ``ran_as`` and ``without_graph``.

    Raises:
        RuntimeError: when steps are to be compiled and there is no GPU.
    """
    if mode == COMPILED and bench.device.type != "cuda":
        raise RuntimeError("reduce-overhead makes CUDA graphs, which need a GPU")
    model, steps = models.random_model(settings), settings.steps
    slots = -(-(length + WARM_UP_STEPS + steps) // ALIGNED) * ALIGNED if mode != DYNAMIC else 0
    with models.attending(model, "cab" if config else models.SDPA, config):
        cache = models.random_cache(model, length, batch, slots, sparse=config is not None)
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
    return {
        "ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "first_s": first[0] / 1e3,
        "peak_gib": peak and max(peak, later),
        "cache_gib": kept / 2**30,
        "index_gib": sum(index.nbytes for index in indices) / 2**30 if indices else None,
        "ran_as": config and ran_as(config, len(indices), cache.layers[0].keys.shape[2]),
        "without_graph": f"inductor makes none of {skipped} graphs" if skipped else None,
    }


def ran_as(config: CabConfig, layers: int, slots: int) -> str:
    """What so many layers with an index do where their cache has that many slots."""
    from cab_hf.decode.step import decodes_sparsely

    if not decodes_sparsely(config, slots):
        return "dense: few tokens beside those that a step would read"
    return f"{layers} layers choose the keys they read"


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
