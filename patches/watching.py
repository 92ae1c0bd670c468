"""`watched`: what the layers of a model attend with, seen while all of them attend exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from cab_hf.attention import cab_dense_attention
from cab_hf.call.hook import cab_mask
from cab_hf.hf.layers import transformers_model
from cab_hf.patches.switch import own_configs, put_back, switch

WATCHED = "cab_watched"

# (module, q [B, H, N, D], k and v [B, H_kv, N, D], scale, window) -> nothing
Look = Callable[[nn.Module, Tensor, Tensor, Tensor, float, int | None], None]

# by module: models that are read at a time, in threads of their own, are not mixed up
looks: WeakKeyDictionary[nn.Module, Look] = WeakKeyDictionary()


@contextmanager
def watched(model: PreTrainedModel, look: Look) -> Iterator[None]:
    """Inside, ``model`` attends exactly, and ``look`` sees what each layer attends with, before.

    It is in eval mode meanwhile, and its configs are its own from then on, as after `apply_cab`.
    """
    AttentionInterface.register(WATCHED, _attend)
    AttentionMaskInterface.register(WATCHED, cab_mask)
    was, inner = own_configs(model), transformers_model(model)
    modules = list(model.modules())
    training = [module for module in modules if module.training]
    looks.update(dict.fromkeys(modules, look))
    try:
        switch(inner, inner.config.get_text_config(), WATCHED)
        model.eval()
        yield
    finally:
        put_back(was)
        for module in training:
            module.training = True
        for module in modules:
            looks.pop(module, None)


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    scale = kwargs.get("scaling")
    window = kwargs.get("sliding_window") or getattr(mask, "window", None)
    looks[module](module, q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, window)
    return cab_dense_attention(module, q, k, v, mask, **kwargs)
