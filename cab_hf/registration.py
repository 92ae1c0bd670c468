"""Registration of "cab", "cab_frc" and "cab_dense" with transformers, without a slow import.

transformers imports torch and its model code when a model class is first used. Registration waits
for that import, so importing cab_hf is fast.

Two functions are registered under three names. If transformers has no registry for a feature, its
functions are wrapped. Wrapped functions do not change models with other attention implementations:

* configs have a ``cab_config`` (`_Setting`), and models accept ``cab_config`` as an argument;
* the check of the attention implementation's name also validates the ``cab_config``; it runs when a
  model is built or switched;
* the functions that create masks record position ids for `cab_mask`;
* continuous batching (`batching.hooks`) and `transformers serve` accept the three names;
* `generate` records the end of the prompt, and indexes the cache for sparse decode steps.
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

from cab_hf.batching.hooks import validate_while_batching, wrap
from cab_hf.batching.support import PACKAGE
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
# stack frames searched for the forward pass that creates a mask, including decorators
FRAMES = 10


def register() -> None:
    """Register the attention and mask functions of all names."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    from cab_hf.attention import cab_attention, cab_dense_attention
    from cab_hf.batching.batch import accepting_batches
    from cab_hf.call.hook import cab_mask

    for name in NAMES:
        sparse = name in SPARSE
        attend = cab_attention if sparse else cab_dense_attention
        AttentionInterface.register(name, accepting_batches(attend, sparse=sparse))
        AttentionMaskInterface.register(name, cab_mask)
    wrap(PreTrainedModel, "get_correct_attn_implementation", _validate)
    for name in ("from_pretrained", "_from_config"):
        setattr(PreTrainedModel, name, _accepting_cab_config(getattr(PreTrainedModel, name)))


def add_setting() -> None:
    """Add the attribute ``cab_config`` to the configs of transformers."""
    from transformers.configuration_utils import PreTrainedConfig

    PreTrainedConfig.cab_config = _Setting()


def wrap_masks() -> None:
    """Make transformers record the position ids of a mask, which mask functions do not receive.

    Many models pass position ids to the functions that create masks, and not to attention.
    """
    wrap(sys.modules[MASKING], "_preprocess_mask_arguments", _record_positions)


def _record_positions(prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # models also call this function; argument names differ between versions
    config = kwargs["config"] if "config" in kwargs else args[0]
    if config._attn_implementation in NAMES:
        from cab_hf.call.scope import record_positions

        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[4]
        record_positions(_positions_of_caller() if position_ids is None else position_ids)
    return prepare(*args, **kwargs)


def _positions_of_caller() -> Any:
    """Return the position ids of the forward pass that creates a mask; None if it has none.

    GraniteMoeHybrid passes its position ids neither to mask functions nor to layers.
    """
    from torch.compiler import is_compiling

    # torch.compile does not trace stack frames
    frame = None if is_compiling() else sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == "forward":
            return frame.f_locals.get("position_ids")
        frame = frame.f_back
    return None


def wrap_generate() -> None:
    """Make `generate` record the end of the prompt, and index caches for sparse decode steps.

    A single call of the model does not show where the prompt ends. The prompt can come in chunks,
    together with a draft of the answer, or again with every token of the answer.
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
    """Record the inputs that `generate` prepares, also in classes with their own preparation."""
    name = "prepare_inputs_for_generation"
    for owner in model.__mro__:
        if name in vars(owner) and not hasattr(vars(owner)[name], RECORDED):
            wrap(owner, name, _prepare_inputs)
            setattr(vars(owner)[name], RECORDED, True)


def _prepare_inputs(prepare: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    from cab_hf.call.scope import FORWARD_CONTEXT

    generation = FORWARD_CONTEXT.get().generation
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
    user_cache = _cache_in(model_kwargs)
    result = prepare(model, generation_config, model_kwargs, *args, **kwargs)
    text = model.config.get_text_config()
    if text._attn_implementation not in NAMES or model.config.is_encoder_decoder:
        return result
    from cab_hf.call.scope import FORWARD_CONTEXT, prompt_given

    cache = _cache_in(model_kwargs)
    generation = FORWARD_CONTEXT.get().generation
    if generation is not None:
        _wrap_preparation(type(model))
        is_compiled = getattr(cache, "is_compileable", False)
        generation.begin(prompt_given(generation_config, model_kwargs), is_compiled)
    if user_cache is None:
        _index(model, cache)
    return result


def _update_then_index(
    update: Callable[..., Any],
    model: Any,
    outputs: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    from cab_hf.call.scope import FORWARD_CONTEXT

    generation = FORWARD_CONTEXT.get().generation
    if generation is not None:
        generation.forget_inputs()
    given = _cache_in(model_kwargs)
    result = update(model, outputs, model_kwargs, *args, **kwargs)
    # some models create their own cache, or replace the cache when a sequence becomes long
    if (made := _cache_in(result)) is not given:
        _index(model, made)
    return result


def _index(model: Any, cache: Any) -> None:
    if cache is not None:
        from cab_hf.decode.generation import index_cache_of_generate

        index_cache_of_generate(model, cache)


def wrap_early_exit() -> None:
    """Restore the config of a model after drafts of its first layers (``assistant_early_exit``)."""
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
    """Exclude model calls in logits processors from the prompt and its answer.

    Classifier-free guidance calls the model there with another prompt.
    """
    wrap(sys.modules[PROCESSORS].LogitsProcessorList, "__call__", _as_foreign)


def wrap_criteria() -> None:
    """Exclude model calls in stopping criteria from the prompt and its answer."""
    wrap(sys.modules[CRITERIA].StoppingCriteriaList, "__call__", _as_foreign)


def _as_foreign(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import torch

    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    from cab_hf.call.scope import foreign

    with foreign():
        return function(*args, **kwargs)


def _cache_in(model_kwargs: dict[str, Any]) -> Any:
    """Return the cache in the arguments of a model; transformers 5.24 changed its name."""
    return model_kwargs.get("cache", model_kwargs.get("past_key_values"))


def wrap_batching() -> None:
    """Wrap continuous batching before it can switch a model or start a manager."""
    from cab_hf.batching import hooks

    # the package is still being imported at this point
    hooks.register(sys.modules[BATCHING])


def wrap_serving() -> None:
    """Make `transformers serve` accept our names, which are not in its fixed list."""
    wrap(sys.modules[SERVING].ModelManager, "_validate_args", _validate_others)


def _validate_others(validate: Callable[..., None], manager: Any) -> None:
    name = manager.attn_implementation
    try:
        manager.attn_implementation = None if name in NAMES else name
        validate(manager)
    finally:
        manager.attn_implementation = name


class _Setting:
    """The attribute ``config.cab_config``: None until it is set, and always JSON-compatible.

    `from_pretrained` accepts an argument only if configs have an attribute of the same name. A
    CabConfig is stored as a dict, because configs are saved as JSON. A string is a path:
    `CabConfig.calibrated` reads it immediately, so a saved model needs no other file. A model that
    already uses "cab" validates the value immediately. Other models validate it in `_validate`.
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
        # no model can use the config before the model code of transformers is loaded
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
    """Check the settings of a model, then run transformers' check of the implementation's name.

    Settings that do not fit the model raise an error here, before the first forward pass.
    """
    from cab_hf.hf.fit import warn_if_unused
    from cab_hf.hf.model_config import cab_config_of
    from cab_hf.predictors import make_predictor

    if requested in NAMES:
        refuse_unreachable(type(model))
    if BATCHING in sys.modules:
        validate_while_batching(model, requested)
    refuse_misplaced(model.config)
    text = model.config.get_text_config()
    if requested in NAMES:
        make_predictor(cab_config_of(text, requested))
    elif requested is None and text._attn_implementation is None:
        warn_if_unused(text)
    return check(model, requested, *args, **kwargs)


def _accepting_cab_config(make: Any) -> classmethod:
    """Return a class method that builds models and accepts a config together with a ``cab_config``.

    transformers accepts such arguments only if it loads the config itself.
    """
    from transformers import PreTrainedConfig

    @functools.wraps(make.__func__)
    def take_then_make(model: type, *args: Any, **kwargs: Any) -> Any:
        # the config is a keyword or the first argument
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
    """Refuse a model class that does not use transformers' attention interface.

    Such a class ignores registered names, or fails in a dict of its own attention classes. A class
    whose source is not available is accepted.

    Raises:
        ValueError: if registered functions do not reach the class. The message names an attention
            implementation that works.
    """
    if not _reachable(model):
        works = "sdpa" if model._supports_sdpa else "eager"
        raise ValueError(
            f"{model.__name__} computes no attention through transformers' attention interface, so "
            f"attn_implementation='cab' cannot reach it. Load the model with {works!r}."
        )


def refuse_misplaced(config: Any) -> None:
    """Refuse a ``cab_config`` on a composite config whose text config has none.

    Raises:
        ValueError: if layers would ignore the setting. The message says where to set it.
    """
    text = config.get_text_config()
    unread = config.cab_config is not None and text.cab_config is None
    if unread and text._attn_implementation in NAMES:
        raise ValueError(
            f"cab_config is set on {type(config).__name__}, but layers read the cab_config of the "
            "text config. Set config.get_text_config().cab_config, or call cab_hf.apply_cab(model)."
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
            # a model class defined in a notebook
            return True
        # a dict of attention classes, unless it belongs to a vision tower
        if re.search(r"\b(?!\w*VISION)\w+_ATTENTION_CLASSES\[", source):
            return False
        # submodels built by AutoModel are checked when they are built
        if "ALL_ATTENTION_FUNCTIONS" in source or "AutoModel" in source:
            return True
    return False


def register_when_imported() -> None:
    """Run each action when transformers has loaded its module, immediately if loaded already."""
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
    """A finder that delegates to the other finders and runs an action after the module's import."""

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
