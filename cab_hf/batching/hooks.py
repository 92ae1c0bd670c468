"""Hooks that let transformers' continuous batching run models with the attention of this package.

transformers recognises implementations by their names. If a name does not contain "flash",
transformers switches the model to flash attention, makes a mask of all token pairs, or refuses the
model. The hooks wrap the functions that decide this, and change nothing for other models.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from cab_hf.batching import support
from cab_hf.batching.support import PACKAGE
from cab_hf.config import NAMES, SPARSE

if TYPE_CHECKING:
    # transformers is still importing itself at this moment
    from transformers import PreTrainedModel

# attribute of a model that holds its manager under persistent_manager=True
KEPT = "_cached_continuous_batching_manager"

# model, or part of one -> the managers that were started for it
_managers: WeakKeyDictionary[Any, WeakSet] = WeakKeyDictionary()


def register(api: Any) -> None:
    """Install the hooks; ``api`` is the module of transformers that starts continuous batching."""
    wrap(api.ContinuousMixin, "init_continuous_batching", _check_model_then_init)
    wrap(api.ContinuousBatchingManager, "__init__", _check_model_then_create)
    wrap(api.ContinuousBatchingManager, "start", _check_model_then_start)
    if not support.reads_a_batch():
        return
    initialization, cache, model_runner = (
        importlib.import_module(f"{PACKAGE}.{name}")
        for name in ("initialization", "cache", "model_runner")
    )
    for module in (api, initialization, cache):
        wrap(module, "is_flash_attention_requested", _is_flash_or_cab)
    wrap(api, "resolve_continuous_batching_config", _resolved)
    wrap(initialization, "ensure_decode_fast_path_is_available", _with_pages)
    wrap(api.ContinuousBatchingManager, "_create_batch_processor", _record_model)
    wrap(model_runner.ModelRunner, "compute_batch", _with_our_mask)
    wrap(cache.PagedAttentionCache, "update", _defer_cache_update)


def wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``function``, whose first argument is the replaced function."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(before, *args, **kwargs)

    setattr(owner, name, wrapped)


def require_batching(model: PreTrainedModel) -> None:
    """Refuse continuous batching of a model on "cab" that cannot be served.

    Raises:
        NotImplementedError: the model cannot be served. The message contains the reason.
    """
    named = (part.config._attn_implementation for part in support.parts(model))
    ours = next(filter(NAMES.__contains__, named), None)
    if ours is None:
        return
    from cab_hf.batching.served import unbatchable_reason

    reason = unbatchable_reason(model)
    if reason is not None:
        raise NotImplementedError(
            f"{type(model).__name__} has attn_implementation={ours!r}, which continuous batching "
            f"does not serve: {reason}. Load the model with another attn_implementation, such as "
            "'sdpa'."
        )


def validate_while_batching(model: Any, requested: str | None) -> None:
    """Refuse to switch a model to "cab", or away from it, while a manager serves the model.

    The new implementation would read masks that the manager prepared for the old implementation.

    Raises:
        NotImplementedError: a manager of the model is running.
    """
    before = model.config._attn_implementation
    if (before in NAMES) == (requested in NAMES):
        return
    if any(manager.is_running() for manager in _managers.get(model, ())):
        raise NotImplementedError(
            f"continuous batching runs on {type(model).__name__} with {before!r}. Stop its manager "
            f"before you switch to {requested!r}."
        )


def _check_model_then_init(begin: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    require_batching(model)
    cached_manager = vars(model).get(KEPT)
    if cached_manager is not None:
        _require_same_implementation(cached_manager)
    return begin(model, *args, **kwargs)


def _check_model_then_create(
    make: Callable[..., None], manager: Any, model: Any, *args: Any, **kwargs: Any
) -> None:
    require_batching(model)
    make(manager, model, *args, **kwargs)
    manager._cab_implementation = model.config._attn_implementation


def _check_model_then_start(
    start: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    require_batching(manager.model)
    _require_same_implementation(manager)
    for part in support.parts(manager.model):
        _managers.setdefault(part, WeakSet()).add(manager)
    return start(manager, *args, **kwargs)


def _require_same_implementation(manager: Any) -> None:
    """Refuse to start a manager that was made for another attention implementation.

    Raises:
        NotImplementedError: the model was switched to "cab", or away from it, since then.
    """
    model, implementation = manager.model, manager._cab_implementation
    name = model.config._attn_implementation
    if (name in NAMES) == (implementation in NAMES):
        return
    what = "Make a new manager"
    if vars(model).get(KEPT) is manager:
        what = "Call model.destroy_cached_continuous_batching_manager() and make a new manager"
    raise NotImplementedError(
        f"the manager of continuous batching was made for {type(model).__name__} with "
        f"{implementation!r}, and the model has {name!r} now. {what}."
    )


def _is_flash_or_cab(
    is_flash: Callable[..., bool],
    config: Any = None,
    requested_attention_implementation: Any = None,
    **kwargs: Any,
) -> bool:
    """Return True for "cab", which reads packed sequences without a mask, as flash attention does.

    transformers then neither switches the model nor makes a mask.
    """
    name = requested_attention_implementation or getattr(config, "_attn_implementation", None)
    # a keyword requests a version of flash-attn
    if name in NAMES:
        return not kwargs
    return is_flash(config, requested_attention_implementation, **kwargs)


def _resolved(
    resolve: Callable[..., Any], config: Any, cb_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Resolve the config with CUDA graphs of decode steps only.

    Batches with prompts cannot be captured, because the host reads the lengths of prompts.

    Raises:
        NotImplementedError: the config asks for graphs of prompts, or for compilation.
    """
    if config._attn_implementation not in NAMES:
        return resolve(config, cb_config, *args, **kwargs)
    from cab_hf.batching.served import reads_pages

    cb_config = copy.deepcopy(cb_config)
    if cb_config.use_cuda_graph is None:
        cb_config.use_cuda_graph = False, reads_pages()
    result = resolve(config, cb_config, *args, **kwargs)
    if result.cuda_graph_booleans[0]:
        raise NotImplementedError(
            "use_cuda_graph must not include batches with prompts, whose lengths 'cab' reads on "
            "the host. Set use_cuda_graph=(False, True), or leave it out."
        )
    if result.varlen_compile_config or result.decode_compile_config:
        raise NotImplementedError(
            "varlen_compile_config and decode_compile_config must be None: 'cab' is not compiled "
            "in continuous batching. Leave out the compile configs and default_compile_level."
        )
    if config._attn_implementation in SPARSE:
        _warn_off_the_grid(config, result)
    return result


def _warn_off_the_grid(config: Any, cb_config: Any) -> None:
    """Warn once per setting if the sizes of batches or pages do not fit query blocks."""
    from cab_hf.checks import warn_once
    from cab_hf.hf.model_config import cab_config_of

    block = cab_config_of(config).query_block
    tokens, page = cb_config.max_batch_tokens, cb_config.page_size
    if tokens is not None and tokens < block:
        warn_once(
            ("max_batch_tokens", tokens, block),
            f"max_batch_tokens must be at least query_block={block}, got {tokens}: no batch "
            "contains a whole query block, so all attention is exact. Set max_batch_tokens to "
            f"several times {block}, or leave it out.",
        )
    if cb_config.allow_block_sharing and page % block:
        warn_once(
            ("page_size", page, block),
            f"page_size must be a multiple of query_block={block}, got {page}: the tokens after a "
            "shared prefix may begin inside a query block, which then selects other blocks. Set "
            f"page_size to a multiple of {block}, or allow_block_sharing=False.",
        )


def _with_pages(
    ensure: Callable[..., None], config: Any, cb_config: Any, user_requested: bool
) -> None:
    """Enable block tables for batches that only decode, because the kernel reads any key list."""
    if config._attn_implementation not in NAMES:
        ensure(config, cb_config, user_requested)
        return
    from cab_hf.batching.served import reads_pages

    # without the kernel, block tables are correct but slow
    if not (user_requested or reads_pages()):
        cb_config.max_blocks_per_request = 0


def _record_model(prepare: Callable[..., Any], self: Any) -> Any:
    """Create the batch processor of a manager, with a scheduler for query blocks on "cab"."""
    ours, config = self._cab_implementation in NAMES, self.continuous_batching_config
    named = config.scheduler_type
    if ours:
        from cab_hf.batching.scheduler import scheduler_type

        config.scheduler_type = scheduler_type(named)
    try:
        processor = prepare(self)
    finally:
        # the config keeps the name that the user gave
        config.scheduler_type = named
    if ours:
        processor.scheduler.record_model(self.model)
        if self.model.device.type == "cuda":
            _wait_for_resets(self.model.device)
    # the masks depend on the implementation that the manager was made for
    processor.model_runner._began_as_ours = ours
    return processor


def _wait_for_resets(device: Any) -> None:
    """Wait until the buffers of batches are zeros, before the first batch is written to them.

    transformers resets the buffers on the stream of the thread and writes batches on another
    stream, which does not wait. If the GPU is busy, zeros overwrite the prompts of the first batch.
    """
    import torch

    torch.cuda.current_stream(device).synchronize()


def _with_our_mask(
    compute: Callable[..., None], self: Any, model: Any, batch_data: dict[str, Any]
) -> None:
    """Run a forward pass with a `PagedBatch` as the mask, which all layers share.

    Raises:
        RuntimeError: the model was switched to "cab", or away from it, while the manager runs.
    """
    from cab_hf.hf.fit import name_of

    name = model.config._attn_implementation
    ours = name in NAMES
    # a runner without a manager has no recorded implementation
    if vars(self).get("_began_as_ours", ours) != ours:
        raise RuntimeError(
            f"{name_of(model.config)} was switched to {name!r} while continuous batching runs. "
            "Stop its manager before you switch."
        )
    batch = None
    if ours:
        from cab_hf.call.placeholder import PagedBatch

        tokens = batch_data["input_ids"].shape[1]
        batch = PagedBatch(name_of(model.config), tokens, _prompts(self.inputs_and_outputs))
        batch_data["attention_mask"] = batch
    self.cache._batch = batch
    compute(self, model, batch_data)


def _defer_cache_update(
    update: Callable[..., Any],
    self: Any,
    key_states: Any,
    value_states: Any,
    layer_idx: int,
    kwargs: dict[str, Any],
) -> Any:
    """Leave the cache update to `attend_batch` if the forward pass has a `PagedBatch`.

    Since transformers 5.24, layers update a paged cache before they call attention, and receive no
    mask. This function therefore adds the cache and the `PagedBatch` to the keywords of attention.
    """
    batch = vars(self).get("_batch")
    if batch is None or "cache" in kwargs:
        return update(self, key_states, value_states, layer_idx, kwargs)
    kwargs |= {"cache": self, "batch": batch}
    return key_states, value_states


def _prompts(inputs: Any) -> tuple[int, ...]:
    """Return the number of prompt tokens of each request of a batch.

    A request that was preempted for lack of pages restarts, and its answer is read again like a
    prompt. The answer does not count here.
    """
    # asynchronous batching has two sets of buffers
    if hasattr(inputs, "io_pairs"):
        inputs = inputs.io_pairs[inputs.current_pair].host_io
    states = (future.state for future in inputs.requests_in_batch)
    return tuple(state._true_initial_tokens or len(state.initial_tokens) for state in states)
