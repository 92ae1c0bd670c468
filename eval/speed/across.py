"""A prompt that is sharded over ranks, and read by all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cab_hf import context_parallel
from cab_hf.distributed import shard
from cab_hf.distributed.layout import layout_of
from cab_hf.eval.speed.model import ModelSettings, prefilling, prompt_of, random_model
from cab_hf.eval.speed.spread import CP, block_of, causal_pairs, density_of_all
from cab_hf.eval.speed.team import Team


@contextmanager
def prefilling_across(
    settings: ModelSettings, length: int, way: str, team: Team, mlp_tokens: int, warm_up: int
) -> Iterator[tuple[Callable[[], Any], Callable[[], dict[str, Any]]]]:
    """As `prefilling`, where each rank of ``team`` reads its tokens of the prompt.

    What is known is of all ranks, and asked for by all of them. MLPs read at most ``mlp_tokens``
    at a time. Of a prompt longer than ``warm_up``, so many tokens have been read before.
    """
    from cab_hf.patches import stats

    model = random_model(settings)
    with prefilling(settings, length, way) as (_, known_here):
        block = block_of(model)
        pairs = causal_pairs(CP, length, team, block)

        def known() -> dict[str, Any]:
            return {"density": density_of_all(team, known_here()["density"], pairs)}

        prompt = prompt_of(settings, length)
        with context_parallel(model, team.group, block=block), mlp_in_chunks(model, mlp_tokens):
            if length > warm_up:
                team.together(reading(model, prompt[:, :warm_up], team, block))
                # what that one attended is not of the prompt that is asked for
                stats(model, reset=True)
            yield reading(model, prompt, team, block), known


def reading(model: nn.Module, prompt: Tensor, team: Team, block: int) -> Callable[[], Any]:
    """What reads this rank's tokens of a prompt [1, N] into a cache, with the logits of one of
    them: on the rank that holds it, of the prompt's last."""
    mine = shard({"input_ids": prompt}, team.group, block)
    layout = layout_of((prompt.shape[1],), team.size, block)
    holder, place = divmod(int(layout.holders[-1]), layout.tokens)
    kept = torch.tensor([place if holder == team.rank else 0], device=prompt.device)

    @torch.inference_mode()
    def call() -> Any:
        return model(**mine, use_cache=True, logits_to_keep=kept)

    return call


@contextmanager
def mlp_in_chunks(model: nn.Module, tokens: int) -> Iterator[None]:
    """Inside, the MLPs of ``model`` read at most so many tokens at a time; the same comes out."""
    mlps = [layer.mlp for layer in model.model.layers]

    def chunked(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if x.shape[1] <= tokens:
                return function(x)
            out = torch.empty_like(x)
            for start in range(0, x.shape[1], tokens):
                out[:, start : start + tokens] = function(x[:, start : start + tokens])
            return out

        return forward

    for mlp in mlps:
        mlp.forward = chunked(mlp.forward)
    try:
        yield
    finally:
        for mlp in mlps:
            del mlp.forward
