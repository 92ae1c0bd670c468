"""`apply_cab`, `remove_cab` and the context manager `cab`.

The former settings are kept in an attribute of the model itself, so that they go wherever the model
goes: into a deep copy, under an adapter and out again, into a pickle. A saved config has none.
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

from cab_hf.batching.hooks import refuse_while_batching
from cab_hf.checks import require
from cab_hf.config import CAB_FRC, FRC, CabConfig
from cab_hf.hf.fit import require_layers, require_origin, warn_if_never_sparse
from cab_hf.hf.layers import transformers_model
from cab_hf.hf.model_config import cab_config_of
from cab_hf.predictors import make_predictor

# what settings may be given as
Settings = CabConfig | Mapping[str, Any] | str | Path
FOUND = "_cab_found"  # attribute of a model: list of `_SavedState`, the oldest first


@dataclasses.dataclass
class SavedConfig:
    """One config, and its former settings."""

    config: PreTrainedConfig
    implementation: str
    cab_config: Any


@dataclasses.dataclass(eq=False)
class _SavedState:
    """What a model's configs held before `apply_cab`, or a ``with`` block of `cab` (``scoped``)."""

    was: list[SavedConfig]
    scoped: bool


def put_back(saved: list[SavedConfig]) -> None:
    """Give configs their former settings."""
    for was in saved:
        # not the property, which would set all configs inside too
        was.config._attn_implementation_internal = was.implementation
        if was.cab_config is None:
            del was.config.cab_config
        else:
            was.config.cab_config = was.cab_config


def apply_cab(
    model: PreTrainedModel, config: Settings | None = None, **overrides: Any
) -> PreTrainedModel:
    """Switch a loaded model to ``"cab"``. Applying again only replaces the config.

    One on ``"cab_frc"`` stays there where the predictor stays "frc".

    Only the text model of a vision-language model is switched. The model gets a config of its own:
    another model built from the same config object stays as it is.

    Args:
        model: a transformers causal language model, or a PEFT model around one; the whole of it,
            as modules outside keep the config they had.
        config: the settings: a `CabConfig`, a dict of its fields, or what `CabConfig.calibrated`
            reads, the file of a calibration. By default those in ``model.config.cab_config``,
            else `CabConfig()`.
        overrides: fields of `CabConfig` to change in it, e.g. ``mass_threshold=0.004``.

    Returns:
        The same model.

    Raises:
        ValueError: for a bad setting, a calibration or a table of budgets that does not fit the
            model, or a model whose attention cannot be replaced by name.
    """
    saved = _SavedState(_turn_on(model, config, overrides), scoped=False)
    states = _saved_states(model)
    if not states:
        states.append(saved)
    return model


def remove_cab(model: PreTrainedModel) -> PreTrainedModel:
    """Put back what the model had before `apply_cab`; a model it was not applied to stays as is.

    Inside a ``with cab(model)`` block this holds until the block ends.

    Raises:
        NotImplementedError: while continuous batching runs on the model.
        ValueError: for what is no model.
    """
    require(isinstance(model, nn.Module), "model", model, "a model")
    for module in model.modules():
        result = vars(module).get(FOUND)
        if result:
            _refuse_while_batching(module, result[0])
            own_configs(model)
            put_back(result[0].was)
            if not result[-1].scoped:
                result.pop()
    return model


@contextmanager
def cab(
    model: PreTrainedModel, config: Settings | None = None, **overrides: Any
) -> Iterator[PreTrainedModel]:
    """`apply_cab` for the length of a ``with`` block; afterwards the model is as it was found.

    Blocks may overlap and end in any order: the last one to end leaves what the first one found.

    Raises:
        NotImplementedError: where the block ends while continuous batching runs on the model, which
            stays as `apply_cab` would have left it: stop the manager, and call `remove_cab`.
    """
    mine = _SavedState(_turn_on(model, config, overrides), scoped=True)
    result = _saved_states(model)
    result.append(mine)
    try:
        yield model
    except BaseException:
        # this error matters more than a manager that was left running
        _end(model, result, mine)
        raise
    if mine is result[-1]:
        try:
            _refuse_while_batching(transformers_model(model), mine)
        except NotImplementedError:
            mine.scoped = False
            if mine is not result[0]:
                result.remove(mine)
            raise
    _end(model, result, mine)


def _refuse_while_batching(model: nn.Module, saved: _SavedState) -> None:
    for was in saved.was:
        refuse_while_batching(model, was.implementation)


def _end(model: PreTrainedModel, results: list[_SavedState], mine: _SavedState) -> None:
    """End the ``with`` block that found ``mine``."""
    place = results.index(mine)
    if mine is results[-1]:
        own_configs(model)
        put_back(mine.was)
    else:
        # a block that began later goes on, and will leave what this one found
        results[place + 1].was = mine.was
    del results[place]


def _turn_on(
    model: PreTrainedModel, config: Settings | None, overrides: dict[str, Any]
) -> list[SavedConfig]:
    """Switch ``model`` on and return what each changed config held; on errors it stays as it is."""
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
    # transformers checks it as it switches
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
    """Settings as a `CabConfig`."""
    if isinstance(given, (str, Path)):
        return CabConfig.calibrated(given)
    if isinstance(given, Mapping):
        return CabConfig.from_dict(given)
    what = "a CabConfig, a dict of its fields, or the file of a calibration"
    require(isinstance(given, CabConfig), "config", given, what)
    return given


def switch(model: PreTrainedModel, text: PreTrainedConfig, implementation: str) -> None:
    """Have the layers under the config ``text`` attend by ``implementation``, and no others."""
    if text._attn_implementation != implementation:
        given = _request(model.config, text, implementation) or implementation
        model.set_attn_implementation(given)
    if text._attn_implementation != implementation:
        raise ValueError(
            f"{type(model).__name__} keeps attn_implementation={text._attn_implementation!r}: its "
            "attention is not reached through transformers' attention interface, so 'cab' cannot "
            "replace it."
        )


def _request(config: PreTrainedConfig, text: PreTrainedConfig, implementation: str) -> Any:
    """The argument of ``set_attn_implementation``, e.g. ``{"text_config": "cab"}``.

    None where ``text`` is not in ``config``.
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
    """Give ``model`` copies of its configs that no other model holds, and return their settings.

    Every module that holds one gets the copy, and so does what `FOUND` remembers.
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
