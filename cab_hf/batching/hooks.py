"""Hooks that let transformers' continuous batching run models with the attention of this package.

transformers reads the name of the attention implementation. If the name does not contain "flash",
transformers switches the model to flash attention, builds a mask of all token pairs, or refuses the
model. This module wraps the functions of transformers that read the name. A wrapped function
behaves as before for other models.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from cab_hf.batching import support
from cab_hf.batching.support import BATCHING_PACKAGE
from cab_hf.config import IMPLEMENTATION_NAMES, SPARSE_IMPLEMENTATIONS

if TYPE_CHECKING:
    # not at run time, because this module is imported while transformers is being imported
    from transformers import PreTrainedModel

# attribute of a model that contains its manager if persistent_manager=True
PERSISTENT_MANAGER_ATTRIBUTE = "_cached_continuous_batching_manager"

# transformers model or submodel -> the managers that have been started for it
_started_managers: WeakKeyDictionary[Any, WeakSet] = WeakKeyDictionary()


def wrap_continuous_batching(api_module: Any) -> None:
    """Wrap the functions of transformers that start and run continuous batching.

    For models on "cab", the wrappers

    * raise an error for unsupported models and settings,
    * prevent transformers from switching the attention implementation or building masks,
    * restrict CUDA graphs to decode steps, and enable block tables only for a kernel that reads
      pages,
    * align the chunks of prompts to query blocks by a scheduler, and
    * pass a `PagedBatch` as the mask to all layers, and leave the cache update to attention.

    Args:
        api_module: module ``continuous_api`` of transformers.
    """
    wrap_function(api_module.ContinuousMixin, "init_continuous_batching", _check_model_then_init)
    wrap_function(api_module.ContinuousBatchingManager, "__init__", _check_model_then_create)
    wrap_function(api_module.ContinuousBatchingManager, "start", _check_model_then_start)
    if not support.transformers_passes_paged_cache():
        return
    initialization_module, cache_module, runner_module = (
        importlib.import_module(f"{BATCHING_PACKAGE}.{module_name}")
        for module_name in ("initialization", "cache", "model_runner")
    )
    for wrapped_module in (api_module, initialization_module, cache_module):
        wrap_function(wrapped_module, "is_flash_attention_requested", _is_flash_or_cab)
    wrap_function(api_module, "resolve_continuous_batching_config", _resolve_config)
    wrap_function(
        initialization_module, "ensure_decode_fast_path_is_available", _enable_block_tables
    )
    wrap_function(
        api_module.ContinuousBatchingManager, "_create_batch_processor", _create_batch_processor
    )
    wrap_function(runner_module.ModelRunner, "compute_batch", _compute_with_paged_batch)
    wrap_function(cache_module.PagedAttentionCache, "update", _defer_cache_update)


def wrap_function(owner: Any, function_name: str, wrapper: Callable[..., Any]) -> None:
    """Wrap a function of a class or module in ``wrapper``.

    Args:
        owner: class or module.
        function_name: name of the function in ``owner``.
        wrapper: wrapper. It receives the old function, followed by the arguments of the call.
    """
    original_function = getattr(owner, function_name)

    @functools.wraps(original_function)
    def call_wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original_function, *args, **kwargs)

    setattr(owner, function_name, call_wrapper)


def require_batching(model: PreTrainedModel) -> None:
    """Raise an error for a model on "cab" that continuous batching does not support.

    Raises:
        NotImplementedError: if the model is not supported. The message contains the reason.
    """
    implementations = (
        submodel.config._attn_implementation for submodel in support.transformers_submodels(model)
    )
    implementation = next(filter(IMPLEMENTATION_NAMES.__contains__, implementations), None)
    if implementation is None:
        return
    from cab_hf.batching.served import find_unbatchable_reason

    unbatchable_reason = find_unbatchable_reason(model)
    if unbatchable_reason is not None:
        raise NotImplementedError(
            f"{type(model).__name__} has attn_implementation={implementation!r}, which continuous "
            f"batching does not serve: {unbatchable_reason}. Load the model with another "
            "attn_implementation, such as 'sdpa'."
        )


def validate_switch_while_batching(model: Any, new_implementation: str | None) -> None:
    """Raise an error for a model that is switched to or from "cab" while a manager serves it.

    The new implementation would receive masks that the manager has built for the old
    implementation.

    Args:
        model: model that is switched.
        new_implementation: name of the new attention implementation, or None.

    Raises:
        NotImplementedError: if a manager of the model is running.
    """
    current_implementation = model.config._attn_implementation
    if (current_implementation in IMPLEMENTATION_NAMES) == (
        new_implementation in IMPLEMENTATION_NAMES
    ):
        return
    if any(manager.is_running() for manager in _started_managers.get(model, ())):
        raise NotImplementedError(
            f"continuous batching runs on {type(model).__name__} with {current_implementation!r}. "
            f"Stop its manager before you switch to {new_implementation!r}."
        )


def _check_model_then_init(
    original_init: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Check that continuous batching supports a model, then start it."""
    require_batching(model)
    cached_manager = vars(model).get(PERSISTENT_MANAGER_ATTRIBUTE)
    if cached_manager is not None:
        _require_same_implementation(cached_manager)
    return original_init(model, *args, **kwargs)


def _check_model_then_create(
    original_init: Callable[..., None], manager: Any, model: Any, *args: Any, **kwargs: Any
) -> None:
    """Check a model, create its manager, and record the attention implementation in the manager."""
    require_batching(model)
    original_init(manager, model, *args, **kwargs)
    manager._cab_implementation = model.config._attn_implementation


def _check_model_then_start(
    original_start: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """Check the model of a manager and its attention implementation, then start the manager."""
    require_batching(manager.model)
    _require_same_implementation(manager)
    for model in support.transformers_submodels(manager.model):
        _started_managers.setdefault(model, WeakSet()).add(manager)
    return original_start(manager, *args, **kwargs)


def _require_same_implementation(manager: Any) -> None:
    """Raise an error for a manager that was created for another attention implementation.

    Raises:
        NotImplementedError: if the model has since been switched to or from "cab".
    """
    model, first_implementation = manager.model, manager._cab_implementation
    current_implementation = model.config._attn_implementation
    if (current_implementation in IMPLEMENTATION_NAMES) == (
        first_implementation in IMPLEMENTATION_NAMES
    ):
        return
    remedy = "Make a new manager"
    if vars(model).get(PERSISTENT_MANAGER_ATTRIBUTE) is manager:
        remedy = "Call model.destroy_cached_continuous_batching_manager() and make a new manager"
    raise NotImplementedError(
        f"the manager of continuous batching was made for {type(model).__name__} with "
        f"{first_implementation!r}, and the model has {current_implementation!r} now. {remedy}."
    )


def _is_flash_or_cab(
    original_function: Callable[..., bool],
    config: Any = None,
    requested_attention_implementation: Any = None,
    **kwargs: Any,
) -> bool:
    """Return True for flash attention and for "cab".

    Both compute attention over packed sequences without a mask tensor. If the result is True,
    transformers neither switches the model nor builds a mask.

    Args:
        original_function: transformers' function.
        config: config of a model.
        requested_attention_implementation: name of an implementation; None to read ``config``.
        kwargs: arguments that ask for a version of flash-attn. The result is then False for "cab".
    """
    implementation = requested_attention_implementation or getattr(
        config, "_attn_implementation", None
    )
    if implementation in IMPLEMENTATION_NAMES:
        return not kwargs
    return original_function(config, requested_attention_implementation, **kwargs)


def _resolve_config(
    original_function: Callable[..., Any], config: Any, cb_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return the resolved config of continuous batching, with CUDA graphs for decode steps only.

    A CUDA graph cannot contain a batch with prompts, because the host reads the lengths of prompts.

    Args:
        original_function: transformers' function.
        config: config of the model.
        cb_config: config of continuous batching.
        args, kwargs: further arguments of ``original_function``.

    Raises:
        NotImplementedError: if the config enables graphs for prompts, or compilation.
    """
    if config._attn_implementation not in IMPLEMENTATION_NAMES:
        return original_function(config, cb_config, *args, **kwargs)
    from cab_hf.batching.served import has_kernel_for_pages

    cb_config = copy.deepcopy(cb_config)
    if cb_config.use_cuda_graph is None:
        cb_config.use_cuda_graph = False, has_kernel_for_pages()
    resolved_config = original_function(config, cb_config, *args, **kwargs)
    if resolved_config.cuda_graph_booleans[0]:
        raise NotImplementedError(
            "use_cuda_graph must not include batches with prompts, whose lengths 'cab' reads on "
            "the host. Set use_cuda_graph=(False, True), or leave it out."
        )
    if resolved_config.varlen_compile_config or resolved_config.decode_compile_config:
        raise NotImplementedError(
            "varlen_compile_config and decode_compile_config must be None: 'cab' is not compiled "
            "in continuous batching. Leave out the compile configs and default_compile_level."
        )
    if config._attn_implementation in SPARSE_IMPLEMENTATIONS:
        _warn_of_unaligned_sizes(config, resolved_config)
    return resolved_config


def _warn_of_unaligned_sizes(config: Any, cb_config: Any) -> None:
    """Warn once per setting if the sizes of batches or pages do not fit query blocks.

    Args:
        config: config of the model.
        cb_config: resolved config of continuous batching.
    """
    from cab_hf.checks import warn_once
    from cab_hf.hf.model_config import cab_config_of

    query_block = cab_config_of(config).query_block
    max_batch_tokens, page_size = cb_config.max_batch_tokens, cb_config.page_size
    if max_batch_tokens is not None and max_batch_tokens < query_block:
        warn_once(
            ("max_batch_tokens", max_batch_tokens, query_block),
            f"max_batch_tokens must be at least query_block={query_block}, got {max_batch_tokens}: "
            "no batch contains a whole query block, so all attention is exact. Set "
            f"max_batch_tokens to several times {query_block}, or leave it out.",
        )
    if cb_config.allow_block_sharing and page_size % query_block:
        warn_once(
            ("page_size", page_size, query_block),
            f"page_size must be a multiple of query_block={query_block}, got {page_size}: the "
            "tokens after a shared prefix may begin inside a query block, which then selects other "
            f"blocks. Set page_size to a multiple of {query_block}, or allow_block_sharing=False.",
        )


def _enable_block_tables(
    original_function: Callable[..., None], config: Any, cb_config: Any, user_requested: bool
) -> None:
    """Enable block tables for batches of decode steps if a kernel of this package can read pages.

    transformers enables block tables only for a fixed list of attention implementations.

    Args:
        original_function: transformers' function.
        config: config of the model.
        cb_config: config of continuous batching, which is changed.
        user_requested: True if the user has enabled block tables.
    """
    if config._attn_implementation not in IMPLEMENTATION_NAMES:
        original_function(config, cb_config, user_requested)
        return
    from cab_hf.batching.served import has_kernel_for_pages

    # without the kernel, block tables give correct but slow decode steps
    if not (user_requested or has_kernel_for_pages()):
        cb_config.max_blocks_per_request = 0


def _create_batch_processor(original_function: Callable[..., Any], self: Any) -> Any:
    """Create the batch processor of a manager; models on "cab" get a block-aligned scheduler.

    Args:
        original_function: transformers' function.
        self: manager.
    """
    uses_cab, cb_config = (
        self._cab_implementation in IMPLEMENTATION_NAMES,
        self.continuous_batching_config,
    )
    user_scheduler_name = cb_config.scheduler_type
    if uses_cab:
        from cab_hf.batching.scheduler import register_block_aligned_scheduler

        cb_config.scheduler_type = register_block_aligned_scheduler(user_scheduler_name)
    try:
        batch_processor = original_function(self)
    finally:
        cb_config.scheduler_type = user_scheduler_name
    if uses_cab:
        batch_processor.scheduler.record_model(self.model)
        if self.model.device.type == "cuda":
            _wait_for_zeroed_buffers(self.model.device)
    # `_compute_with_paged_batch` compares the attribute with the implementation of the model
    batch_processor.model_runner._was_created_for_cab = uses_cab
    return batch_processor


def _wait_for_zeroed_buffers(device: Any) -> None:
    """Wait until transformers has filled the buffers of batches with zeros.

    transformers writes the zeros on the current stream, and writes batches on another stream, which
    does not wait for the current stream. On a busy GPU, the zeros would overwrite the prompts of
    the first batch.
    """
    import torch

    torch.cuda.current_stream(device).synchronize()


def _compute_with_paged_batch(
    original_function: Callable[..., None], self: Any, model: Any, batch_data: dict[str, Any]
) -> None:
    """Run a forward pass of a model on "cab" with a `PagedBatch` as the mask of all layers.

    Args:
        original_function: transformers' function.
        self: model runner.
        model: model that the runner calls.
        batch_data: arguments of the model, by name.

    Raises:
        RuntimeError: if the model was switched to or from "cab" while the manager runs.
    """
    from cab_hf.hf.fit import model_name_of

    implementation = model.config._attn_implementation
    uses_cab = implementation in IMPLEMENTATION_NAMES
    # a runner without a manager has no recorded implementation
    if vars(self).get("_was_created_for_cab", uses_cab) != uses_cab:
        raise RuntimeError(
            f"{model_name_of(model.config)} was switched to {implementation!r} while continuous "
            "batching runs. Stop its manager before you switch."
        )
    paged_batch = None
    if uses_cab:
        from cab_hf.call.placeholder import PagedBatch

        paged_batch = PagedBatch(
            model_name=model_name_of(model.config),
            num_tokens=batch_data["input_ids"].shape[1],
            prompt_lengths=_read_prompt_lengths(self.inputs_and_outputs),
        )
        batch_data["attention_mask"] = paged_batch
    self.cache._batch = paged_batch
    original_function(self, model, batch_data)


def _defer_cache_update(
    original_function: Callable[..., Any],
    self: Any,
    key_states: Any,
    value_states: Any,
    layer_idx: int,
    kwargs: dict[str, Any],
) -> Any:
    """Leave the cache update to `attend_batch` if the forward pass has a `PagedBatch`.

    Since transformers 5.24, layers update a paged cache before they call attention, and receive no
    mask. This function then adds the cache and the `PagedBatch` to the arguments of the attention
    function.

    Args:
        original_function: transformers' function.
        self: paged cache.
        key_states: keys of the new tokens.
        value_states: values of the new tokens.
        layer_idx: index of the layer.
        kwargs: keyword arguments of the attention function, which are changed.
    """
    paged_batch = vars(self).get("_batch")
    if paged_batch is None or "cache" in kwargs:
        return original_function(self, key_states, value_states, layer_idx=layer_idx, kwargs=kwargs)
    kwargs |= {"cache": self, "batch": paged_batch}
    return key_states, value_states


def _read_prompt_lengths(runner_buffers: Any) -> tuple[int, ...]:
    """Return the prompt length of each request of a batch, in tokens, without answers.

    transformers preempts a request if the cache has no free pages. The request then restarts with
    its prompt and its answer as a new prompt.

    Args:
        runner_buffers: buffers of a model runner.
    """
    # asynchronous batching alternates between two sets of buffers
    if hasattr(runner_buffers, "io_pairs"):
        runner_buffers = runner_buffers.io_pairs[runner_buffers.current_pair].host_io
    request_states = (future.state for future in runner_buffers.requests_in_batch)
    return tuple(
        request_state._true_initial_tokens or len(request_state.initial_tokens)
        for request_state in request_states
    )
