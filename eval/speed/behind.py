"""A question behind tokens that a KV cache holds already, which nothing has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from cab_hf.eval.kv_cache import cache_arguments
from cab_hf.eval.speed.model import (
    CAB,
    ModelSettings,
    attended_by,
    attending,
    prompt_of,
    random_model,
)
from cab_hf.eval.speed.steps import filled


@contextmanager
def asking(
    settings: ModelSettings, length: int, behind: int, way: str
) -> Iterator[tuple[Callable[[], Any], Callable[[], Any], Callable[[], dict[str, Any]]]]:
    """(what reads a question, what takes it off the cache again, what then is known of it).

    The question has ``length`` random tokens, behind ``behind`` tokens of random keys and values in
    a `DynamicCache`; reading it gives the logits of its last token. Known is what `prefilling`
    knows, of pairs with the cached tokens too.
    """
    model, question = random_model(settings), prompt_of(settings, length)
    cache = filled(model, behind, 1, 0, static=False, config=None)
    cached = cache_arguments(model, cache)

    @torch.inference_mode()
    def call() -> Any:
        return model(question, **cached, logits_to_keep=1)

    def crop() -> None:
        asked = cache.get_seq_length() - behind
        # a crop by nothing is not the same in all versions of transformers
        if asked:
            cache.crop(-asked)

    config = settings.budgeted(length, **CAB.get(way, {}))
    with attending(model, way, config, continues=True):
        yield call, crop, partial(attended_by, model, behind + length, way)
