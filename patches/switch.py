"""`apply_cab`, `remove_cab` and the context manager `cab`, which switch a model to CAB and back.

The settings from before the switch are stored in an attribute of the model, so that deep copies,
pickles and models with adapters contain them too. Saved configs do not contain this attribute.
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

from cab_hf.batching.hooks import validate_switch_while_batching
from cab_hf.checks import require
from cab_hf.config import CAB_FRC, FRC_PREDICTOR, CabConfig
from cab_hf.hf.fit import require_layers, require_origin, warn_if_never_sparse
from cab_hf.hf.layers import transformers_model
from cab_hf.hf.model_config import cab_config_of
from cab_hf.predictors import make_predictor

# accepted types of settings: a config, a dict of its fields, or the path of a calibration file
Settings = CabConfig | Mapping[str, Any] | str | Path
# attribute of a model with a list of `_SavedState`, the oldest first
SAVED_STATES_ATTRIBUTE = "_cab_found"


@dataclasses.dataclass
class SavedConfig:
    """A config of a model, and the values that two of its fields had before a switch.

    Attributes:
        config: the config.
        implementation: former ``attn_implementation``.
        cab_config: former ``cab_config``; None if the config had none.
    """

    config: PreTrainedConfig
    implementation: str
    cab_config: Any


@dataclasses.dataclass(eq=False)
class _SavedState:
    """The settings of a model before `apply_cab`, or before a ``with`` block of `cab`.

    Attributes:
        saved_configs: for each config that the switch changed, the values before the switch.
        is_from_with_block: True for a ``with`` block of `cab`, False for `apply_cab`.
    """

    saved_configs: list[SavedConfig]
    is_from_with_block: bool


def restore_settings(saved_configs: list[SavedConfig]) -> None:
    """Set the two fields of every config in ``saved_configs`` back to the saved values."""
    for saved_config in saved_configs:
        # assigning to the public property would also change all nested configs
        saved_config.config._attn_implementation_internal = saved_config.implementation
        if saved_config.cab_config is None:
            del saved_config.config.cab_config
        else:
            saved_config.config.cab_config = saved_config.cab_config


def apply_cab(
    model: PreTrainedModel, config: Settings | None = None, **overrides: Any
) -> PreTrainedModel:
    """Switch a loaded model to CAB attention.

    A second call replaces the settings of the first call. The model gets
    ``attn_implementation="cab"``, or keeps ``"cab_frc"`` if the predictor is still "frc". In a
    vision-language model, only the text model is switched. The model gets its own copy of the
    config, so other models with the same config object do not change.

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
    saved_state = _SavedState(_switch_to_cab(model, config, overrides), is_from_with_block=False)
    saved_states = _get_saved_states(model)
    # a second call keeps the settings from before the first call
    if not saved_states:
        saved_states.append(saved_state)
    return model


def remove_cab(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the settings that the model had before `apply_cab`.

    A model without CAB does not change. Inside a ``with cab(model)`` block, the restored settings
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
    # the model with the states may be inside an adapter or a wrapper
    for module in model.modules():
        saved_states = vars(module).get(SAVED_STATES_ATTRIBUTE)
        if saved_states:
            _validate_restore_while_batching(module, saved_states[0])
            copy_configs(model)
            restore_settings(saved_states[0].saved_configs)
            if not saved_states[-1].is_from_with_block:
                saved_states.pop()
    return model


@contextmanager
def cab(
    model: PreTrainedModel, config: Settings | None = None, **overrides: Any
) -> Iterator[PreTrainedModel]:
    """Apply CAB inside a ``with`` block, and restore the former settings afterwards.

    Blocks may overlap and end in any order: the last block to end restores the settings from before
    the first block.

    Args:
        model, config, overrides: see `apply_cab`.

    Yields:
        The same model.

    Raises:
        ValueError: as for `apply_cab`.
        NotImplementedError: the block ends while continuous batching runs on the model. The model
            then stays switched, as after `apply_cab`: stop the manager and call `remove_cab`.
    """
    saved_state = _SavedState(_switch_to_cab(model, config, overrides), is_from_with_block=True)
    saved_states = _get_saved_states(model)
    saved_states.append(saved_state)
    try:
        yield model
    except BaseException:
        # not validated, because an error of `_validate_restore_while_batching` would hide this
        # error
        _leave_context(model, saved_states, saved_state)
        raise
    if saved_state is saved_states[-1]:
        try:
            _validate_restore_while_batching(transformers_model(model), saved_state)
        except NotImplementedError:
            saved_state.is_from_with_block = False
            if saved_state is not saved_states[0]:
                saved_states.remove(saved_state)
            raise
    _leave_context(model, saved_states, saved_state)


def _validate_restore_while_batching(model: nn.Module, saved_state: _SavedState) -> None:
    """Raise a NotImplementedError if continuous batching forbids restoring ``saved_state``."""
    for saved_config in saved_state.saved_configs:
        validate_switch_while_batching(model, saved_config.implementation)


def _leave_context(
    model: PreTrainedModel, saved_states: list[_SavedState], saved_state: _SavedState
) -> None:
    """End the ``with`` block of ``saved_state``, and delete it from ``saved_states``."""
    state_index = saved_states.index(saved_state)
    if saved_state is saved_states[-1]:
        copy_configs(model)
        restore_settings(saved_state.saved_configs)
    else:
        # the block that started after this block restores the settings from before both blocks
        saved_states[state_index + 1].saved_configs = saved_state.saved_configs
    del saved_states[state_index]


def _switch_to_cab(
    model: PreTrainedModel, config: Settings | None, overrides: dict[str, Any]
) -> list[SavedConfig]:
    """Switch ``model`` to CAB; arguments as in `apply_cab`.

    An error leaves the model unchanged.

    Returns:
        The former settings of each changed config.
    """
    inner_model = transformers_model(model)
    text_config = inner_model.config.get_text_config()
    settings = cab_config_of(text_config) if config is None else to_cab_config(config)
    settings = settings.changed(**overrides)
    keeps_frc_implementation = (
        text_config._attn_implementation == CAB_FRC and settings.predictor == FRC_PREDICTOR
    )
    # called before the switch, because these functions raise errors for settings that do not fit
    make_predictor(settings)
    require_origin(settings.origin, text_config)
    require_layers(settings, text_config)
    saved_configs = copy_configs(model)
    text_config = inner_model.config.get_text_config()
    # set before `switch_implementation`, during which transformers validates ``cab_config``
    text_config.cab_config = settings.to_dict()
    try:
        switch_implementation(
            inner_model, text_config, CAB_FRC if keeps_frc_implementation else "cab"
        )
    except BaseException:
        restore_settings(saved_configs)
        raise
    warn_if_never_sparse(settings.min_length, text_config)
    return [
        saved_config
        for saved_config in saved_configs
        if saved_config.config is text_config
        or saved_config.config._attn_implementation != saved_config.implementation
    ]


def to_cab_config(settings: Settings) -> CabConfig:
    """Convert settings to a `CabConfig`.

    Args:
        settings: a config, a dict of its fields, or the path of a calibration file.

    Raises:
        ValueError: the settings have another type, or are invalid.
    """
    if isinstance(settings, (str, Path)):
        return CabConfig.calibrated(settings)
    if isinstance(settings, Mapping):
        return CabConfig.from_dict(settings)
    requirement = "a CabConfig, a dict of its fields, or the path of a calibration file"
    require(isinstance(settings, CabConfig), "config", settings, requirement)
    return settings


def switch_implementation(
    model: PreTrainedModel, text_config: PreTrainedConfig, implementation: str
) -> None:
    """Set the attention implementation of those layers whose config is ``text_config``.

    In a vision-language model, layers with other configs keep their implementation.

    Args:
        model: a model of transformers.
        text_config: the config of the model or of its text model.
        implementation: name of the attention implementation.

    Raises:
        ValueError: the model does not use transformers' attention interface.
    """
    if text_config._attn_implementation != implementation:
        implementation_request = (
            _make_implementation_request(model.config, text_config, implementation)
            or implementation
        )
        model.set_attn_implementation(implementation_request)
    if text_config._attn_implementation != implementation:
        raise ValueError(
            "model must reach its attention through transformers' attention interface, got "
            f"{type(model).__name__}, which keeps "
            f"attn_implementation={text_config._attn_implementation!r}. Use a model type that "
            "cab_hf supports."
        )


def _make_implementation_request(
    config: PreTrainedConfig, text_config: PreTrainedConfig, implementation: str
) -> Any:
    """Return the argument of ``set_attn_implementation`` that switches one config only.

    Args:
        config: the config of the model.
        text_config: the config to switch.
        implementation: name of the attention implementation.

    Returns:
        ``implementation`` if ``config`` is ``text_config``, or a nested dict such as
        ``{"text_config": "cab"}``. None if ``config`` does not contain ``text_config``.
    """
    if config is text_config:
        return implementation
    for sub_config_name in config.sub_configs:
        sub_config = getattr(config, sub_config_name, None)
        nested_request = (
            None
            if sub_config is None
            else _make_implementation_request(sub_config, text_config, implementation)
        )
        if nested_request:
            return {sub_config_name: nested_request}
    return None


def _get_saved_states(model: nn.Module) -> list[_SavedState]:
    """Return the list of saved states in an attribute of ``model``; create the list if missing.

    The list itself is returned, so that callers can change it in place.
    """
    return vars(transformers_model(model)).setdefault(SAVED_STATES_ATTRIBUTE, [])


def copy_configs(model: nn.Module) -> list[SavedConfig]:
    """Replace all configs of ``model`` by copies that no other model shares.

    All modules of ``model`` that share a config object share its copy afterwards. Each
    `_SavedState` of the model (`SAVED_STATES_ATTRIBUTE`) also refers to the copies, so that a later
    `restore_settings` changes the configs that the model then has.

    Returns:
        A `SavedConfig` for each copy, with the current values of the two fields.
    """
    deepcopy_memo: dict[int, Any] = {}
    for module in model.modules():
        for attribute_name, attribute_value in vars(module).items():
            if isinstance(attribute_value, PreTrainedConfig):
                vars(module)[attribute_name] = copy.deepcopy(attribute_value, deepcopy_memo)
    for module in model.modules():
        for saved_state in vars(module).get(SAVED_STATES_ATTRIBUTE, ()):
            for saved_config in saved_state.saved_configs:
                saved_config.config = deepcopy_memo.get(
                    id(saved_config.config), saved_config.config
                )
    # ``deepcopy_memo`` is the memo of deepcopy, which contains other objects too
    return [
        SavedConfig(
            config=config,
            implementation=config._attn_implementation,
            cab_config=config.cab_config,
        )
        for config in deepcopy_memo.values()
        if isinstance(config, PreTrainedConfig)
    ]
