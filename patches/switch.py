"""`apply_cab`, `remove_cab` and the context manager `cab`.

The former settings are stored in an attribute of the model, so that they stay with the model in
deep copies, under adapters and in pickles. A saved config does not contain them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from cab_hf.batching.hooks import validate_while_batching
from cab_hf.checks import require
from cab_hf.config import CAB_FRC, FRC, CabConfig
from cab_hf.hf.fit import require_layers, require_origin, warn_if_never_sparse
from cab_hf.hf.layers import transformers_model
from cab_hf.hf.model_config import cab_config_of
from cab_hf.predictors import make_predictor

# accepted types of settings
Settings = CabConfig | Mapping[str, Any] | str | Path
FOUND = "_cab_found"  # attribute of a model: list of `_SavedState`, the oldest first


@dataclasses.dataclass
class SavedConfig:
    """One config of a model, and its former settings."""

    config: PreTrainedConfig
    implementation: str
    cab_config: Any


@dataclasses.dataclass(eq=False)
class _SavedState:
    """The former settings of a model's configs; ``scoped`` is True for a block of `cab`."""

    was: list[SavedConfig]
    scoped: bool


def put_back(saved: list[SavedConfig]) -> None:
    """Restore the former settings of configs."""
    for was in saved:
        # not the property, which would set all nested configs too
        was.config._attn_implementation_internal = was.implementation
        if was.cab_config is None:
            del was.config.cab_config
        else:
            was.config.cab_config = was.cab_config


def apply_cab(
    model: PreTrainedModel, config: Settings | None = None, **overrides: Any
) -> PreTrainedModel:
    """Switch a loaded model to CAB attention.

    A second call replaces the settings. The model gets ``attn_implementation="cab"``, or keeps
    ``"cab_frc"`` if the predictor is still "frc". In a vision-language model, only the text model
    is switched. The model gets its own copy of the config, so other models with the same config
    object do not change.

    Args:
        model: a causal language model of transformers, or a PEFT model around one. Pass the whole
            model, because modules outside ``model`` keep their config.
        config: a `CabConfig`, a dict of its fields, or the path of a calibration file (see
            `CabConfig.calibrated`). By default ``model.config.cab_config``, else `CabConfig()`.
        overrides: fields of `CabConfig` to change, e.g. ``mass_threshold=0.004``.

    Returns:
        The same model.

    Raises:
        ValueError: a setting is invalid, a calibration or a table does not fit the model, or the
            model does not use transformers' attention interface.
        NotImplementedError: the call switches a model on which continuous batching runs.
    """
    saved = _SavedState(_turn_on(model, config, overrides), scoped=False)
    states = _saved_states(model)
    if not states:
        states.append(saved)
    return model


def remove_cab(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the settings that the model had before `apply_cab`.

    A model without CAB does not change. Inside a ``with cab(model)`` block, the former settings
    apply until the block ends.

    Args:
        model: the model that `apply_cab` received.

    Returns:
        The same model.

    Raises:
        NotImplementedError: continuous batching runs on the model.
        ValueError: ``model`` is not a model.
    """
    require(isinstance(model, nn.Module), "model", model, "a PyTorch model")
    for module in model.modules():
        result = vars(module).get(FOUND)
        if result:
            _validate_while_batching(module, result[0])
            own_configs(model)
            put_back(result[0].was)
            if not result[-1].scoped:
                result.pop()
    return model


@contextmanager
def cab(
    model: PreTrainedModel, config: Settings | None = None, **overrides: Any
) -> Iterator[PreTrainedModel]:
    """Apply CAB inside a ``with`` block, and restore the former settings afterwards.

    Arguments are those of `apply_cab`. Blocks may overlap and end in any order: the last block to
    end restores the settings from before the first block.

    Yields:
        The same model.

    Raises:
        NotImplementedError: the block ends while continuous batching runs on the model. The model
            then stays switched, as after `apply_cab`: stop the manager and call `remove_cab`.
    """
    own_state = _SavedState(_turn_on(model, config, overrides), scoped=True)
    result = _saved_states(model)
    result.append(own_state)
    try:
        yield model
    except BaseException:
        # this error is more important than a running manager
        _end_block(model, result, own_state)
        raise
    if own_state is result[-1]:
        try:
            _validate_while_batching(transformers_model(model), own_state)
        except NotImplementedError:
            own_state.scoped = False
            if own_state is not result[0]:
                result.remove(own_state)
            raise
    _end_block(model, result, own_state)


def _validate_while_batching(model: nn.Module, saved: _SavedState) -> None:
    for was in saved.was:
        validate_while_batching(model, was.implementation)


def _end_block(model: PreTrainedModel, results: list[_SavedState], mine: _SavedState) -> None:
    """End the ``with`` block of ``mine``."""
    place = results.index(mine)
    if mine is results[-1]:
        own_configs(model)
        put_back(mine.was)
    else:
        # a later block continues, and will restore the settings from before this one
        results[place + 1].was = mine.was
    del results[place]


def _turn_on(
    model: PreTrainedModel, config: Settings | None, overrides: dict[str, Any]
) -> list[SavedConfig]:
    """Switch ``model`` on and return the former settings of each changed config.

    On an error the model stays as it was.
    """
    inner = transformers_model(model)
    text = inner.config.get_text_config()
    given = cab_config_of(text) if config is None else config_of(config)
    config = given.changed(**overrides)
    stays = text._attn_implementation == CAB_FRC and config.predictor == FRC
    name = CAB_FRC if stays else "cab"
    make_predictor(config)
    require_origin(config.origin, text)
    require_layers(config, text)
    saved = own_configs(model)
    text = inner.config.get_text_config()
    # transformers validates it on switching
    text.cab_config = config.to_dict()
    try:
        switch(inner, text, name)
    except BaseException:
        put_back(saved)
        raise
    warn_if_never_sparse(config.min_length, text)
    return [
        each
        for each in saved
        if each.config is text or each.config._attn_implementation != each.implementation
    ]


def config_of(given: Settings) -> CabConfig:
    """Convert settings to a `CabConfig`."""
    if isinstance(given, (str, Path)):
        return CabConfig.calibrated(given)
    if isinstance(given, Mapping):
        return CabConfig.from_dict(given)
    what = "a CabConfig, a dict of its fields, or the path of a calibration file"
    require(isinstance(given, CabConfig), "config", given, what)
    return given


def switch(model: PreTrainedModel, text: PreTrainedConfig, implementation: str) -> None:
    """Set the attention implementation of the layers under the config ``text`` and of no others."""
    if text._attn_implementation != implementation:
        given = _request(model.config, text, implementation) or implementation
        model.set_attn_implementation(given)
    if text._attn_implementation != implementation:
        raise ValueError(
            "model must reach its attention through transformers' attention interface, got "
            f"{type(model).__name__}, which keeps "
            f"attn_implementation={text._attn_implementation!r}. Use a model type that cab_hf "
            "supports."
        )


def _request(config: PreTrainedConfig, text: PreTrainedConfig, implementation: str) -> Any:
    """Return the argument of ``set_attn_implementation``, e.g. ``{"text_config": "cab"}``.

    Returns None if ``config`` does not contain ``text``.
    """
    if config is text:
        return implementation
    inner = ((name, getattr(config, name, None)) for name in config.sub_configs)
    requests = (
        (name, _request(each, text, implementation)) for name, each in inner if each is not None
    )
    return next(({name: request} for name, request in requests if request), None)


def _saved_states(model: nn.Module) -> list[_SavedState]:
    return vars(transformers_model(model)).setdefault(FOUND, [])


def own_configs(model: nn.Module) -> list[SavedConfig]:
    """Give ``model`` its own copies of its configs, and return their settings.

    Every module and every saved state under `FOUND` refers to the copies afterwards.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)
    for module in model.modules():
        for result in vars(module).get(FOUND, ()):
            for was in result.was:
                was.config = copies.get(id(was.config), was.config)
    configs = [x for x in copies.values() if isinstance(x, PreTrainedConfig)]
    return [SavedConfig(x, x._attn_implementation, x.cab_config) for x in configs]
