"""Registers "cab", "cab_frc" and "cab_dense" with transformers without making the import slow.

transformers imports torch and its modelling code only when a model class is first used.
Registration waits for that moment, so that importing cab_hf costs next to nothing.

Two functions are registered under three names. Where transformers has no registry its functions are
wrapped, which changes nothing for models with another attention implementation:

* configs have a ``cab_config`` (`_Setting`), and models accept one beside a config;
* the check of an implementation's name, which runs whenever a model is made or switched, validates
  the settings of ours;
* the functions that make masks record the position ids of their call for our mask hook;
* continuous batching (`batching.hooks`) and `transformers serve` accept our names;
* `generate` records where the prompt ends, and indexes the cache of a model that decodes sparsely.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import PurePath
from types import ModuleType
from typing import Any

from cab_hf.batching.hooks import PACKAGE, refuse_while_batching, wrap
from cab_hf.config import NAMES, SPARSE

CONFIGURATION = "transformers.configuration_utils"
MASKING = "transformers.masking_utils"
MODELING = "transformers.modeling_utils"
GENERATION = "transformers.generation.utils"
PROCESSORS = "transformers.generation.logits_process"
CANDIDATES = "transformers.generation.candidate_generator"
CRITERIA = "transformers.generation.stopping_criteria"
BATCHING = f"{PACKAGE}.continuous_api"
SERVING = "transformers.cli.serving.model_manager"
# attribute of a function that `_wrap_preparation` has wrapped
RECORDED = "_cab_recorded"
# from the wrapped function to the forward pass that makes a mask, with a few decorators between
FRAMES = 10


def register() -> None:
    """Register our implementations now."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    from cab_hf.attention import cab_attention, cab_dense_attention
    from cab_hf.call.hook import cab_mask

    for name in NAMES:
        attend = cab_attention if name in SPARSE else cab_dense_attention
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, cab_mask)
    wrap(PreTrainedModel, "get_correct_attn_implementation", _validate)
    for name in ("from_pretrained", "_from_config"):
        setattr(PreTrainedModel, name, _accepting_cab_config(getattr(PreTrainedModel, name)))


def add_setting() -> None:
    """Give transformers' configs their ``cab_config`` now."""
    from transformers.configuration_utils import PreTrainedConfig

    PreTrainedConfig.cab_config = _Setting()


def wrap_masks() -> None:
    """Make transformers record the position ids of a mask, which its mask functions do not get.

    Many models give position ids to the functions that make masks, and not to attention.
    """
    wrap(sys.modules[MASKING], "_preprocess_mask_arguments", _record_positions)


def _record_positions(prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # models call it as well, by names that differ between versions
    config = kwargs["config"] if "config" in kwargs else args[0]
    if config._attn_implementation in NAMES:
        from cab_hf.call.scope import record_positions

        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[4]
        record_positions(_positions_of_caller() if position_ids is None else position_ids)
    return prepare(*args, **kwargs)


def _positions_of_caller() -> Any:
    """Return the position ids of the forward pass that makes a mask; None where it has none.

    GraniteMoeHybrid gives its position ids to no function that makes masks, and to no layer.
    """
    from torch.compiler import is_compiling

    # torch.compile traces no frames
    frame = None if is_compiling() else sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == "forward":
            return frame.f_locals.get("position_ids")
        frame = frame.f_back
    return None


def wrap_generate() -> None:
    """Make `generate` index its caches for models that decode sparsely, and record the prompt.

    No single call of the model shows where the prompt ends: it may be read in chunks, with a draft
    of the answer behind it, or once more with every token of the answer.
    """
    mixin = sys.modules[GENERATION].GenerationMixin
    wrap(mixin, "_prepare_cache_for_generation", _prepare_then_index)
    wrap(mixin, "_update_model_kwargs_for_generation", _update_then_index)
    wrap(mixin, "generate", _generate)
    _wrap_preparation(mixin)


def _generate(generate: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    from cab_hf.call.scope import generating

    with generating(model):
        return generate(model, *args, **kwargs)


def _wrap_preparation(model: type) -> None:
    """Record what `generate` prepares, also where a class of models prepares inputs by itself."""
    name = "prepare_inputs_for_generation"
    for owner in model.__mro__:
        if name in vars(owner) and not hasattr(vars(owner)[name], RECORDED):
            wrap(owner, name, _prepare_inputs)
            setattr(vars(owner)[name], RECORDED, True)


def _prepare_inputs(prepare: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    from cab_hf.call.scope import SCOPE

    generation = SCOPE.get().generation
    if generation is None:
        return prepare(model, *args, **kwargs)
    return generation.prepare(model, lambda: prepare(model, *args, **kwargs))


def _prepare_then_index(
    prepare: Callable[..., Any],
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = _cache_in(model_kwargs)
    result = prepare(model, generation_config, model_kwargs, *args, **kwargs)
    text = model.config.get_text_config()
    if text._attn_implementation not in NAMES or model.config.is_encoder_decoder:
        return result
    from cab_hf.call.scope import SCOPE, prompt_given

    made = _cache_in(model_kwargs)
    generation = SCOPE.get().generation
    if generation is not None:
        _wrap_preparation(type(model))
        is_compiled = getattr(made, "is_compileable", False)
        generation.begin(prompt_given(generation_config, model_kwargs), is_compiled)
    if given is None:
        _index(model, made)
    return result


def _update_then_index(
    update: Callable[..., Any],
    model: Any,
    outputs: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    from cab_hf.call.scope import SCOPE

    generation = SCOPE.get().generation
    if generation is not None:
        generation.forget_inputs()
    given = _cache_in(model_kwargs)
    result = update(model, outputs, model_kwargs, *args, **kwargs)
    # some models make a cache of their own, or another one where a text becomes long
    if (made := _cache_in(result)) is not given:
        _index(model, made)
    return result


def _index(model: Any, cache: Any) -> None:
    if cache is not None:
        from cab_hf.decode.generation import index_made

        index_made(model, cache)


def wrap_early_exit() -> None:
    """Keep a model whole after drafts of its first layers (``assistant_early_exit``)."""
    generator = sys.modules[CANDIDATES].EarlyExitCandidateGenerator
    wrap(generator, "get_candidates", _draft_of_first_layers)


def _draft_of_first_layers(
    draft: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any
) -> Any:
    model = generator.assistant_model
    config = getattr(model, model.base_model_prefix, model).config
    if config.get_text_config()._attn_implementation not in NAMES:
        return draft(generator, *args, **kwargs)
    from cab_hf.hf.model_config import truncated

    with truncated(config):
        return draft(generator, *args, **kwargs)


def wrap_processors() -> None:
    """Keep calls of a model in logits processors apart from the prompt and its answer.

    Classifier-free guidance reads another prompt there.
    """
    wrap(sys.modules[PROCESSORS].LogitsProcessorList, "__call__", _as_foreign)


def wrap_criteria() -> None:
    """Keep calls of a model in stopping criteria apart from the prompt and its answer."""
    wrap(sys.modules[CRITERIA].StoppingCriteriaList, "__call__", _as_foreign)


def _as_foreign(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import torch

    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    from cab_hf.call.scope import foreign

    with foreign():
        return function(*args, **kwargs)


def _cache_in(model_kwargs: dict[str, Any]) -> Any:
    """The cache that `generate` calls a model with; its name has changed in transformers 5.24."""
    return model_kwargs.get("cache", model_kwargs.get("past_key_values"))


def wrap_batching() -> None:
    """Wrap continuous batching before it switches a model or starts a manager."""
    from cab_hf.batching import hooks

    # at this moment its package is still being imported
    hooks.register(sys.modules[BATCHING])


def wrap_serving() -> None:
    """Make `transformers serve` accept our names: its check has a fixed list of others."""
    wrap(sys.modules[SERVING].ModelManager, "_validate_args", _validate_others)


def _validate_others(validate: Callable[..., None], manager: Any) -> None:
    name = manager.attn_implementation
    try:
        manager.attn_implementation = None if name in NAMES else name
        validate(manager)
    finally:
        manager.attn_implementation = name


class _Setting:
    """``config.cab_config``: None until it is set, and always what JSON can hold.

    `from_pretrained` takes a setting only where configs have an attribute of its name, and a
    CabConfig could not be saved. A string is a path for `CabConfig.calibrated`, which reads it at
    once, so that a saved model needs no other file. The value is validated where a model uses it
    already, and else when a model is to use it (`_validate`).
    """

    def __get__(self, config: Any, owner: type) -> Any:
        return None if config is None else vars(config).get("cab_config")

    def __set__(self, config: Any, value: Any) -> None:
        from cab_hf.config import CabConfig

        if isinstance(value, (str, PurePath)):
            try:
                value = CabConfig.calibrated(value)
            except ValueError as error:
                raise ValueError(f"cab_config {error}") from None
        value = value.to_dict() if isinstance(value, CabConfig) else value
        # no config is in use before the code of models is loaded
        if MODELING in sys.modules:
            from cab_hf.hf.model_config import require_setting
            from cab_hf.predictors import make_predictor

            settings = require_setting(config, value)
            if settings is not None:
                make_predictor(settings)
        vars(config)["cab_config"] = value

    def __delete__(self, config: Any) -> None:
        vars(config).pop("cab_config", None)


def _validate(
    check: Callable[..., str], model: Any, requested: str | None, *args: Any, **kwargs: Any
) -> str:
    """transformers' check of an implementation's name for a model, after a check of the settings.

    Settings that do not fit the model are refused here rather than in the first forward pass.
    """
    from cab_hf.hf.fit import warn_if_unused
    from cab_hf.hf.model_config import cab_config_of
    from cab_hf.predictors import make_predictor

    if requested in NAMES:
        refuse_unreachable(type(model))
    if BATCHING in sys.modules:
        refuse_while_batching(model, requested)
    refuse_misplaced(model.config)
    text = model.config.get_text_config()
    if requested in NAMES:
        make_predictor(cab_config_of(text, requested))
    elif requested is None and text._attn_implementation is None:
        warn_if_unused(text)
    return check(model, requested, *args, **kwargs)


def _accepting_cab_config(make: Any) -> classmethod:
    """A class method that makes models and accepts a ``cab_config`` beside a config as well.

    transformers accepts one only where it loads the config itself.
    """
    from transformers import PreTrainedConfig

    @functools.wraps(make.__func__)
    def take_then_make(model: type, *args: Any, **kwargs: Any) -> Any:
        # by name, or alone
        config = kwargs.get("config", args[0] if args else None)
        if isinstance(config, PreTrainedConfig) and "cab_config" in kwargs:
            own = copy.deepcopy(config)
            own.cab_config = kwargs.pop("cab_config")
            if "config" in kwargs:
                kwargs["config"] = own
            else:
                args = own, *args[1:]
        return make.__func__(model, *args, **kwargs)

    return classmethod(take_then_make)


def refuse_unreachable(model: type) -> None:
    """Refuse a model class whose attention no registered function replaces.

    Such a class takes any registered name and does nothing with it, or fails in a dict of its own
    attention classes. What its source does not show is let through.

    Raises:
        ValueError: naming the class, and what works.
    """
    if not _reachable(model):
        works = "sdpa" if model._supports_sdpa else "eager"
        raise ValueError(
            f"{model.__name__} computes no attention through transformers' attention interface, so "
            f"attn_implementation='cab' cannot reach it; load it with {works!r}."
        )


def refuse_misplaced(config: Any) -> None:
    """Refuse a ``cab_config`` beside the text config of a model that is to use it.

    Raises:
        ValueError: naming the config, and where its setting belongs.
    """
    text = config.get_text_config()
    unread = config.cab_config is not None and text.cab_config is None
    if unread and text._attn_implementation in NAMES:
        raise ValueError(
            f"cab_config is set on {type(config).__name__}, whose layers read that of its text "
            "config; set config.get_text_config().cab_config, or call cab_hf.apply_cab(model)."
        )


@functools.cache
def _reachable(model: type) -> bool:
    from transformers import PreTrainedModel

    for base in model.__mro__:
        if not issubclass(base, PreTrainedModel) or base is PreTrainedModel:
            continue
        try:
            source = inspect.getsource(sys.modules[base.__module__])
        except (OSError, TypeError, KeyError):
            # a notebook's own model
            return True
        # a dict of attention classes, where it is not that of a vision tower beside the text
        if re.search(r"\b(?!\w*VISION)\w+_ATTENTION_CLASSES\[", source):
            return False
        # parts that are made by name are checked when they are made
        if "ALL_ATTENTION_FUNCTIONS" in source or "AutoModel" in source:
            return True
    return False


def register_when_imported() -> None:
    """Register and wrap now what transformers has loaded, and the rest as soon as it is loaded."""
    actions = {
        CONFIGURATION: add_setting,
        MASKING: wrap_masks,
        MODELING: register,
        GENERATION: wrap_generate,
        CANDIDATES: wrap_early_exit,
        PROCESSORS: wrap_processors,
        CRITERIA: wrap_criteria,
        BATCHING: wrap_batching,
        SERVING: wrap_serving,
    }
    for name, action in actions.items():
        if name in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, _After(name, action))


class _After(MetaPathFinder):
    """Finds nothing itself: lets the others find a module, and acts once it has run."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then_act(module: ModuleType) -> None:
            run(module)
            self._action()

        spec.loader.exec_module = run_then_act
        return spec
