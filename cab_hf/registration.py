"""Registration of "cab", "cab_frc" and "cab_dense" with transformers, without a slow import.

transformers imports torch and its model code at the first use of a model class. Each registration
runs after the import of its module of transformers, so importing cab_hf is fast.

transformers has registries for attention functions and mask functions. For other features, this
module wraps functions of transformers. A wrapped function behaves as before for models with other
attention implementations. The wrapped functions have these effects:

* Configs have a ``cab_config`` (`_CabConfigAttribute`), and models accept ``cab_config`` as an
  argument.
* The check of the attention implementation's name, when a model is built or switched, also
  validates the ``cab_config``.
* The functions that create masks record position ids for `cab_mask`.
* Continuous batching (`batching.hooks`) and `transformers serve` accept the three names.
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

from cab_hf.batching.hooks import validate_switch_while_batching, wrap_function
from cab_hf.batching.support import BATCHING_PACKAGE
from cab_hf.config import IMPLEMENTATION_NAMES, SPARSE_IMPLEMENTATIONS

# modules of transformers whose import triggers a registration
CONFIGURATION_MODULE = "transformers.configuration_utils"
MASKING_MODULE = "transformers.masking_utils"
MODELING_MODULE = "transformers.modeling_utils"
GENERATION_MODULE = "transformers.generation.utils"
PROCESSORS_MODULE = "transformers.generation.logits_process"
CANDIDATES_MODULE = "transformers.generation.candidate_generator"
CRITERIA_MODULE = "transformers.generation.stopping_criteria"
BATCHING_MODULE = f"{BATCHING_PACKAGE}.continuous_api"
SERVING_MODULE = "transformers.cli.serving.model_manager"
# attribute that marks a function that `_wrap_input_preparation` has wrapped
WRAPPED_ATTRIBUTE = "_cab_recorded"
# largest number of stack frames, including decorators, between ``forward`` of a model and the
# creation of its mask
MAX_STACK_FRAMES = 10


def register() -> None:
    """Register the attention function and the mask function of each name with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    from cab_hf.attention import cab_attention, cab_dense_attention
    from cab_hf.batching.batch import accept_batches
    from cab_hf.call.hook import cab_mask

    for implementation in IMPLEMENTATION_NAMES:
        is_sparse = implementation in SPARSE_IMPLEMENTATIONS
        attention_function = cab_attention if is_sparse else cab_dense_attention
        AttentionInterface.register(
            implementation, accept_batches(attention_function, is_sparse=is_sparse)
        )
        AttentionMaskInterface.register(implementation, cab_mask)
    wrap_function(PreTrainedModel, "get_correct_attn_implementation", _validate_settings)
    for constructor_name in ("from_pretrained", "_from_config"):
        setattr(
            PreTrainedModel,
            constructor_name,
            _accept_cab_config(getattr(PreTrainedModel, constructor_name)),
        )


def add_config_attribute() -> None:
    """Add the attribute ``cab_config`` to the configs of transformers."""
    from transformers.configuration_utils import PreTrainedConfig

    PreTrainedConfig.cab_config = _CabConfigAttribute()


def wrap_mask_preprocessing() -> None:
    """Wrap the creation of masks, so that `cab_mask` receives the position ids of the model.

    transformers does not pass position ids to mask functions, and many models do not pass position
    ids to attention functions either.
    """
    wrap_function(sys.modules[MASKING_MODULE], "_preprocess_mask_arguments", _record_positions)


def _record_positions(original_preprocess: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Record position ids, then run transformers' preprocessing of mask arguments."""
    # arguments are keywords or positional: models also call this function, and the names of
    # arguments differ between versions of transformers
    model_config = kwargs["config"] if "config" in kwargs else args[0]
    if model_config._attn_implementation in IMPLEMENTATION_NAMES:
        from cab_hf.call.scope import record_positions

        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[4]
        record_positions(_find_positions_of_caller() if position_ids is None else position_ids)
    return original_preprocess(*args, **kwargs)


def _find_positions_of_caller() -> Any:
    """Return the local variable ``position_ids`` of the forward pass that creates a mask.

    GraniteMoeHybrid passes its position ids neither to mask functions nor to layers. Returns None
    if no forward pass or variable is found.
    """
    from torch.compiler import is_compiling

    # torch.compile does not trace stack frames
    stack_frame = None if is_compiling() else sys._getframe(1)
    for _ in range(MAX_STACK_FRAMES):
        if stack_frame is None:
            return None
        if stack_frame.f_code.co_name == "forward":
            return stack_frame.f_locals.get("position_ids")
        stack_frame = stack_frame.f_back
    return None


def wrap_generate() -> None:
    """Wrap `generate`, to record the end of the prompt and index caches for sparse decode steps.

    The arguments of a model call do not show where the prompt ends: `generate` can pass the prompt
    in chunks, together with a draft of the answer, or again with every token of the answer.
    """
    generation_mixin = sys.modules[GENERATION_MODULE].GenerationMixin
    wrap_function(generation_mixin, "_prepare_cache_for_generation", _prepare_then_index_cache)
    wrap_function(generation_mixin, "_update_model_kwargs_for_generation", _update_then_index_cache)
    wrap_function(generation_mixin, "generate", _run_generate)
    _wrap_input_preparation(generation_mixin)


def _run_generate(
    original_generate: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run `generate` in a new `Generation`, so that nested calls of `generate` have own prompts."""
    from cab_hf.call.scope import set_generation

    with set_generation(model):
        return original_generate(model, *args, **kwargs)


def _wrap_input_preparation(model_class: type) -> None:
    """Wrap ``prepare_inputs_for_generation`` of a model class and its base classes, once each."""
    method_name = "prepare_inputs_for_generation"
    for base_class in model_class.__mro__:
        if method_name in vars(base_class) and not hasattr(
            vars(base_class)[method_name], WRAPPED_ATTRIBUTE
        ):
            wrap_function(base_class, method_name, _prepare_inputs)
            setattr(vars(base_class)[method_name], WRAPPED_ATTRIBUTE, True)


def _prepare_inputs(
    original_prepare_inputs: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Prepare the inputs of a model call, and record that the call processes the prompt."""
    from cab_hf.call.scope import FORWARD_CONTEXT

    prepare_inputs = functools.partial(original_prepare_inputs, model, *args, **kwargs)
    generation = FORWARD_CONTEXT.get().generation
    if generation is None:
        return prepare_inputs()
    return generation.prepare_inputs(model, prepare_inputs)


def _prepare_then_index_cache(
    original_prepare_cache: Callable[..., Any],
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Let `generate` prepare its cache, then record the prompt and add a key index to the cache.

    A cache that the user has passed is not indexed here; see `cab_hf.index_cache`.
    """
    user_cache = _get_cache(model_kwargs)
    preparation_result = original_prepare_cache(
        model, generation_config, model_kwargs, *args, **kwargs
    )
    text_config = model.config.get_text_config()
    if (
        text_config._attn_implementation not in IMPLEMENTATION_NAMES
        or model.config.is_encoder_decoder
    ):
        return preparation_result
    from cab_hf.call.scope import FORWARD_CONTEXT, prompt_of_generate

    cache = _get_cache(model_kwargs)
    generation = FORWARD_CONTEXT.get().generation
    if generation is not None:
        _wrap_input_preparation(type(model))
        is_compiled = getattr(cache, "is_compileable", False)
        generation.begin_generation(
            prompt_of_generate(generation_config, model_kwargs), is_compiled
        )
    if user_cache is None:
        _add_key_index(model, cache)
    return preparation_result


def _update_then_index_cache(
    original_update_kwargs: Callable[..., Any],
    model: Any,
    outputs: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """Let `generate` update its arguments after a model call, then add an index to a new cache."""
    from cab_hf.call.scope import FORWARD_CONTEXT

    generation = FORWARD_CONTEXT.get().generation
    if generation is not None:
        generation.forget_inputs()
    previous_cache = _get_cache(model_kwargs)
    updated_kwargs = original_update_kwargs(model, outputs, model_kwargs, *args, **kwargs)
    # some models create their own cache, or replace the cache when a sequence becomes long
    cache = _get_cache(updated_kwargs)
    if cache is not previous_cache:
        _add_key_index(model, cache)
    return updated_kwargs


def _add_key_index(model: Any, cache: Any) -> None:
    """Add a key index to the layers of ``cache`` if the model reads an index and has a cache."""
    if cache is not None:
        from cab_hf.decode.generation import index_cache_of_generate

        index_cache_of_generate(model, cache)


def wrap_early_exit() -> None:
    """Wrap the generation of drafts by the first layers of a model (``assistant_early_exit``).

    During a draft, the config of the model has fewer layers. The wrapped function accepts this
    number, and restores the number of layers even if the draft fails.
    """
    generator_class = sys.modules[CANDIDATES_MODULE].EarlyExitCandidateGenerator
    wrap_function(generator_class, "get_candidates", _run_draft)


def _run_draft(
    original_get_candidates: Callable[..., Any], draft_generator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compute a draft, and restore the number of layers in the config afterwards."""
    model = draft_generator.assistant_model
    model_config = getattr(model, model.base_model_prefix, model).config
    if model_config.get_text_config()._attn_implementation not in IMPLEMENTATION_NAMES:
        return original_get_candidates(draft_generator, *args, **kwargs)
    from cab_hf.hf.model_config import accept_fewer_layers

    with accept_fewer_layers(model_config):
        return original_get_candidates(draft_generator, *args, **kwargs)


def wrap_logits_processors() -> None:
    """Wrap logits processors, so that the prompt of `generate` does not apply to their model calls.

    For example, classifier-free guidance calls the model with another prompt.
    """
    wrap_function(
        sys.modules[PROCESSORS_MODULE].LogitsProcessorList, "__call__", _run_with_hidden_prompt
    )


def wrap_stopping_criteria() -> None:
    """Wrap stopping criteria, so that the prompt does not apply to their model calls."""
    wrap_function(
        sys.modules[CRITERIA_MODULE].StoppingCriteriaList, "__call__", _run_with_hidden_prompt
    )


def _run_with_hidden_prompt(
    original_function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``original_function``; the prompt of `generate` does not apply to model calls inside."""
    import torch

    if torch.compiler.is_compiling():
        return original_function(*args, **kwargs)
    from cab_hf.call.scope import hide_prompt

    with hide_prompt():
        return original_function(*args, **kwargs)


def _get_cache(model_kwargs: dict[str, Any]) -> Any:
    """Return the cache in the arguments of a model; transformers 5.24 renamed the argument."""
    return model_kwargs.get("cache", model_kwargs.get("past_key_values"))


def wrap_batching() -> None:
    """Wrap continuous batching before it can switch a model or start a manager."""
    from cab_hf.batching import hooks

    # from `sys.modules`, because this function can run while the package is still being imported
    hooks.wrap_continuous_batching(sys.modules[BATCHING_MODULE])


def wrap_serving() -> None:
    """Wrap the argument check of `transformers serve`, which accepts a fixed list of names."""
    wrap_function(
        sys.modules[SERVING_MODULE].ModelManager, "_validate_args", _validate_without_cab_names
    )


def _validate_without_cab_names(original_validate: Callable[..., None], manager: Any) -> None:
    """Run the check without ``attn_implementation`` if its value is in `IMPLEMENTATION_NAMES`."""
    implementation = manager.attn_implementation
    try:
        manager.attn_implementation = (
            None if implementation in IMPLEMENTATION_NAMES else implementation
        )
        original_validate(manager)
    finally:
        manager.attn_implementation = implementation


class _CabConfigAttribute:
    """The attribute ``config.cab_config`` of all configs: None, or a JSON-compatible value.

    `from_pretrained` accepts an argument only if configs have an attribute of the same name.
    Setting the attribute has these effects:

    * A CabConfig is stored as a dict, because configs are saved as JSON.
    * A string or path is the path of a file that `CabConfig.calibrated` reads immediately, so that
      a saved model needs no other file.
    * A model that already uses "cab" validates the value immediately. For other models,
      `_validate_settings` validates the value.
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
        if MODELING_MODULE in sys.modules:
            from cab_hf.hf.model_config import require_valid_settings
            from cab_hf.predictors import make_predictor

            settings = require_valid_settings(config, value)
            if settings is not None:
                make_predictor(settings)
        vars(config)["cab_config"] = value

    def __delete__(self, config: Any) -> None:
        vars(config).pop("cab_config", None)


def _validate_settings(
    original_check_implementation: Callable[..., str],
    model: Any,
    requested_implementation: str | None,
    *args: Any,
    **kwargs: Any,
) -> str:
    """Check the settings of a model, then run transformers' check of the implementation's name.

    Settings that do not fit the model raise an error before the first forward pass.

    Args:
        original_check_implementation: transformers' check.
        model: model that is built or switched.
        requested_implementation: name of the attention implementation; None if the user has given
            no name.
        args, kwargs: further arguments of ``original_check_implementation``.
    """
    from cab_hf.hf.fit import warn_if_unused
    from cab_hf.hf.model_config import cab_config_of
    from cab_hf.predictors import make_predictor

    if requested_implementation in IMPLEMENTATION_NAMES:
        require_attention_interface(type(model))
    if BATCHING_MODULE in sys.modules:
        validate_switch_while_batching(model, requested_implementation)
    refuse_misplaced_settings(model.config)
    text_config = model.config.get_text_config()
    if requested_implementation in IMPLEMENTATION_NAMES:
        # raises the errors of the settings
        make_predictor(cab_config_of(text_config, requested_implementation))
    elif requested_implementation is None and text_config._attn_implementation is None:
        warn_if_unused(text_config)
    return original_check_implementation(model, requested_implementation, *args, **kwargs)


def _accept_cab_config(make_model: Any) -> classmethod:
    """Return a class method that calls ``make_model`` with a config, a ``cab_config`` or both.

    transformers accepts fields of a config as arguments only if the caller passes no config.

    Args:
        make_model: class method of `PreTrainedModel` that builds a model.
    """
    from transformers import PreTrainedConfig

    @functools.wraps(make_model.__func__)
    def set_config_then_make(model_class: type, *args: Any, **kwargs: Any) -> Any:
        # the config is a keyword or the first argument
        model_config = kwargs.get("config", args[0] if args else None)
        if isinstance(model_config, PreTrainedConfig) and "cab_config" in kwargs:
            model_config = copy.deepcopy(model_config)
            model_config.cab_config = kwargs.pop("cab_config")
            if "config" in kwargs:
                kwargs["config"] = model_config
            else:
                args = model_config, *args[1:]
        return make_model.__func__(model_class, *args, **kwargs)

    return classmethod(set_config_then_make)


def require_attention_interface(model_class: type) -> None:
    """Raise an error for a model class that does not call registered attention functions.

    Such a class ignores registered names, or fails in a dict of its own attention classes. A class
    whose source is not available is accepted.

    Raises:
        ValueError: if the class does not use transformers' attention interface. The message names
            an attention implementation that works.
    """
    if not _uses_attention_interface(model_class):
        supported_implementation = "sdpa" if model_class._supports_sdpa else "eager"
        raise ValueError(
            f"{model_class.__name__} computes no attention through transformers' attention "
            "interface, so attn_implementation='cab' cannot reach it. Load the model with "
            f"{supported_implementation!r}."
        )


def refuse_misplaced_settings(model_config: Any) -> None:
    """Raise an error for a ``cab_config`` on a composite config whose text config has none.

    Raises:
        ValueError: if layers would ignore the setting. The message says where to set it.
    """
    text_config = model_config.get_text_config()
    has_ignored_settings = model_config.cab_config is not None and text_config.cab_config is None
    if has_ignored_settings and text_config._attn_implementation in IMPLEMENTATION_NAMES:
        raise ValueError(
            f"cab_config is set on {type(model_config).__name__}, but layers read the cab_config "
            "of the text config. Set config.get_text_config().cab_config, or call "
            "cab_hf.apply_cab(model)."
        )


@functools.cache
def _uses_attention_interface(model_class: type) -> bool:
    """Return True if the source of a model class uses transformers' attention interface."""
    from transformers import PreTrainedModel

    for base_class in model_class.__mro__:
        if not issubclass(base_class, PreTrainedModel) or base_class is PreTrainedModel:
            continue
        try:
            source_code = inspect.getsource(sys.modules[base_class.__module__])
        except (OSError, TypeError, KeyError):
            # no source, for example for a class that is defined in a notebook
            return True
        # the model has its own dict of attention classes; such dicts of vision towers do not count
        if re.search(r"\b(?!\w*VISION)\w+_ATTENTION_CLASSES\[", source_code):
            return False
        # AutoModel builds submodels, which are checked when they are built
        if "ALL_ATTENTION_FUNCTIONS" in source_code or "AutoModel" in source_code:
            return True
    return False


def register_when_imported() -> None:
    """Run each registration after the import of its module of transformers.

    A registration runs immediately if its module is already imported.
    """
    registrations_by_module = {
        CONFIGURATION_MODULE: add_config_attribute,
        MASKING_MODULE: wrap_mask_preprocessing,
        MODELING_MODULE: register,
        GENERATION_MODULE: wrap_generate,
        CANDIDATES_MODULE: wrap_early_exit,
        PROCESSORS_MODULE: wrap_logits_processors,
        CRITERIA_MODULE: wrap_stopping_criteria,
        BATCHING_MODULE: wrap_batching,
        SERVING_MODULE: wrap_serving,
    }
    for module_name, run_registration in registrations_by_module.items():
        if module_name in sys.modules:
            run_registration()
        else:
            sys.meta_path.insert(0, _ImportHook(module_name, run_registration))


class _ImportHook(MetaPathFinder):
    """An import hook that runs an action once, after the import of one module.

    When the module is imported, the hook removes itself and finds the module by the other finders.

    Args:
        module_name: name of the module.
        run_after_import: function that the hook calls after the import.
    """

    def __init__(self, module_name: str, run_after_import: Callable[[], None]) -> None:
        self._module_name, self._run_after_import = module_name, run_after_import

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._module_name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def exec_then_run_action(module: ModuleType) -> None:
            exec_module(module)
            self._run_after_import()

        spec.loader.exec_module = exec_then_run_action
        return spec
