"""`apply_cab`, `remove_cab` and the context manager `cab`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from cab_hf.attention import settings
from cab_hf.config import CabConfig, budgets_of, require_layers
from cab_hf.predictors import make_predictor


@dataclasses.dataclass(frozen=True)
class _Before:
    """What `remove_cab` puts back."""

    implementation: str
    cab_config: dict[str, Any] | None


_before: WeakKeyDictionary[PreTrainedModel, _Before] = WeakKeyDictionary()


def apply_cab(
    model: PreTrainedModel, config: CabConfig | None = None, **overrides: Any
) -> PreTrainedModel:
    """Switch a loaded model to ``"cab"``. Applying again only replaces the config.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        config: the settings; by default those in ``model.config.cab_config``, else `CabConfig()`.
        overrides: fields of `CabConfig` to change in it, e.g. ``mass=0.8``.

    Returns:
        The same model.

    Raises:
        ValueError: for a bad setting, a table of budgets that does not fit the model, or a model
            whose attention cannot be replaced by name.
    """
    text = _text_config(model)
    config = CabConfig.from_dict({**(config or settings(text)).to_dict(), **overrides})
    make_predictor(config)
    require_layers(config, text)
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    # some models have other heads in each layer; then a table is looked at where it is used
    if isinstance(heads, int):
        budgets_of(config, layers - 1, heads)
    before = _Before(text._attn_implementation, getattr(text, "cab_config", None))
    _switch(model, "cab")
    text.cab_config = config.to_dict()
    _before.setdefault(model, before)
    return model


def remove_cab(model: PreTrainedModel) -> PreTrainedModel:
    """Put back what the model had before `apply_cab`; a model it was not applied to stays as is."""
    if model in _before:
        _restore(model, _before.pop(model))
    return model


@contextmanager
def cab(
    model: PreTrainedModel, config: CabConfig | None = None, **overrides: Any
) -> Iterator[PreTrainedModel]:
    """`apply_cab` for the length of a ``with`` block; afterwards the model is as it was found."""
    text = _text_config(model)
    found = _Before(text._attn_implementation, getattr(text, "cab_config", None))
    was_applied = model in _before
    try:
        yield apply_cab(model, config, **overrides)
    finally:
        _restore(model, found)
        if not was_applied:
            _before.pop(model, None)


def _restore(model: PreTrainedModel, before: _Before) -> None:
    _switch(model, before.implementation)
    text = _text_config(model)
    if before.cab_config is not None:
        text.cab_config = before.cab_config
    elif hasattr(text, "cab_config"):
        del text.cab_config


def _switch(model: PreTrainedModel, implementation: str) -> None:
    text = _text_config(model)
    if text._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
    if text._attn_implementation != implementation:
        raise ValueError(
            f"{type(model).__name__} keeps attn_implementation={text._attn_implementation!r}: its "
            "attention is not reached through transformers' attention interface, so 'cab' cannot "
            "replace it."
        )


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()
