"""Makes transformers' continuous batching run models with our attention.

It knows implementations by their names: one without "flash" in it would be switched to flash
attention, given a mask of all pairs of tokens, or refused. Where it decides such things it calls us
first, and nothing changes for other models.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from cab_hf.config import NAMES, SPARSE

if TYPE_CHECKING:
    # transformers is still importing itself at this moment
    from transformers import PreTrainedModel

PACKAGE = "transformers.generation.continuous_batching"
KEPT = "_cached_continuous_batching_manager"  # attribute of a model: of persistent_manager=True

# model, or part of one -> the managers that were started for it
_managers: WeakKeyDictionary[Any, WeakSet] = WeakKeyDictionary()


def register(api: Any) -> None:
    """Tell continuous batching, of whose package ``api`` is the module that begins it."""
    wrap(api.ContinuousMixin, "init_continuous_batching", _ask_to_begin)
    wrap(api.ContinuousBatchingManager, "__init__", _ask_to_make)
    wrap(api.ContinuousBatchingManager, "start", _ask_to_start)
    if not reads_a_batch():
        return
    initialization, cache, model_runner = (
        importlib.import_module(f"{PACKAGE}.{name}")
        for name in ("initialization", "cache", "model_runner")
    )
    for module in (api, initialization, cache):
        wrap(module, "is_flash_attention_requested", _or_ours)
    wrap(api, "resolve_continuous_batching_config", _resolved)
    wrap(initialization, "ensure_decode_fast_path_is_available", _with_pages)
    wrap(api.ContinuousBatchingManager, "_create_batch_processor", _record_model)
    wrap(model_runner.ModelRunner, "compute_batch", _with_our_mask)
    wrap(cache.PagedAttentionCache, "update", _left_to_the_batch)


def wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Have ``owner.name`` call ``function``, with what is there now before its arguments."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(before, *args, **kwargs)

    setattr(owner, name, wrapped)


def require_batching(model: PreTrainedModel) -> None:
    """Refuse continuous batching of a model, where it attends by our names and cannot be served.

    Raises:
        NotImplementedError: naming the model, why, and what works.
    """
    named = (part.config._attn_implementation for part in parts(model))
    ours = next(filter(NAMES.__contains__, named), None)
    if ours is None:
        return
    from cab_hf.batching.served import unbatchable_reason

    reason = unbatchable_reason(model)
    if reason is not None:
        raise NotImplementedError(
            f"{type(model).__name__} has attn_implementation={ours!r}, which continuous batching "
            f"does not run: {reason}; load it with another attn_implementation, such as 'sdpa'."
        )


def refuse_while_batching(model: Any, requested: str | None) -> None:
    """Refuse to switch a model to our names, or away from them, while a manager serves it.

    What the manager has prepared for one of them, such as masks, the other would take for its own.

    Raises:
        NotImplementedError: naming the model, and what to do.
    """
    before = model.config._attn_implementation
    if (before in NAMES) == (requested in NAMES):
        return
    if any(manager.is_running() for manager in _managers.get(model, ())):
        raise NotImplementedError(
            f"continuous batching runs on {type(model).__name__} with {before!r}; stop its manager "
            f"before you switch to {requested!r}."
        )


def reads_a_batch() -> bool:
    """Whether this version of transformers hands its paged cache to attention functions."""
    return importlib.util.find_spec(f"{PACKAGE}.cache_allocators") is not None


def _ask_to_begin(begin: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    require_batching(model)
    kept = vars(model).get(KEPT)
    if kept is not None:
        _require_as_made(kept)
    return begin(model, *args, **kwargs)


def _ask_to_make(
    make: Callable[..., None], manager: Any, model: Any, *args: Any, **kwargs: Any
) -> None:
    require_batching(model)
    make(manager, model, *args, **kwargs)
    manager._made_for = model.config._attn_implementation


def _ask_to_start(start: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    require_batching(manager.model)
    _require_as_made(manager)
    for part in parts(manager.model):
        _managers.setdefault(part, WeakSet()).add(manager)
    return start(manager, *args, **kwargs)


def _require_as_made(manager: Any) -> None:
    """Refuse to begin with a manager that was made for other attention than its model has now.

    Raises:
        NotImplementedError: naming the model, both names, and what to do.
    """
    model, made_for = manager.model, manager._made_for
    name = model.config._attn_implementation
    if (name in NAMES) == (made_for in NAMES):
        return
    what = "make another"
    if vars(model).get(KEPT) is manager:
        what = "call model.destroy_cached_continuous_batching_manager(), and make another"
    raise NotImplementedError(
        f"the manager of continuous batching was made for {type(model).__name__} with "
        f"{made_for!r}, and the model has {name!r} now; {what}."
    )


def _or_ours(
    is_flash: Callable[..., bool],
    config: Any = None,
    requested_attention_implementation: Any = None,
    **kwargs: Any,
) -> bool:
    """Ours reads packed sequences without a mask too: it is not switched, and given no mask."""
    name = requested_attention_implementation or getattr(config, "_attn_implementation", None)
    # a version is one of flash-attn's kernels
    if name in NAMES:
        return not kwargs
    return is_flash(config, requested_attention_implementation, **kwargs)


def _resolved(
    resolve: Callable[..., Any], config: Any, cb_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """CUDA graphs are for steps of decode: how long prompts are is looked at on the host."""
    if config._attn_implementation not in NAMES:
        return resolve(config, cb_config, *args, **kwargs)
    from cab_hf.batching.served import reads_pages

    cb_config = copy.deepcopy(cb_config)
    if cb_config.use_cuda_graph is None:
        cb_config.use_cuda_graph = False, reads_pages()
    result = resolve(config, cb_config, *args, **kwargs)
    if result.cuda_graph_booleans[0]:
        raise NotImplementedError(
            "use_cuda_graph has graphs of batches with prompts; 'cab' looks at their lengths "
            "on the host. Set use_cuda_graph=(False, True), or leave it out."
        )
    if result.varlen_compile_config or result.decode_compile_config:
        raise NotImplementedError(
            "continuous batching compiles the model; 'cab' is not traced there. Leave out "
            "the compile configs and default_compile_level."
        )
    if config._attn_implementation in SPARSE:
        _warn_off_the_grid(config, result)
    return result


def _warn_off_the_grid(config: Any, cb_config: Any) -> None:
    """Warn, once a process and setting, where batches or pages do not fit query blocks."""
    from cab_hf.checks import warn_once
    from cab_hf.hf.model_config import cab_config_of

    block = cab_config_of(config).query_block
    tokens, page = cb_config.max_batch_tokens, cb_config.page_size
    if tokens is not None and tokens < block:
        warn_once(
            ("max_batch_tokens", tokens, block),
            f"max_batch_tokens is {tokens} and query_block is {block}: no batch has a whole block "
            "of a prompt, so 'cab' computes exact attention only; set max_batch_tokens to several "
            f"times {block}, or leave it out.",
        )
    if cb_config.allow_block_sharing and page % block:
        warn_once(
            ("page_size", page, block),
            f"page_size is {page} and query_block is {block}: what a request reads behind blocks "
            "that it shares may begin inside of a query block, and then chooses otherwise than by "
            f"itself; set page_size to a multiple of {block}, or allow_block_sharing=False.",
        )


def _with_pages(
    ensure: Callable[..., None], config: Any, cb_config: Any, user_requested: bool
) -> None:
    """Batches that only decode are read by tables of pages: our kernel takes any list of keys."""
    if config._attn_implementation not in NAMES:
        ensure(config, cb_config, user_requested)
        return
    from cab_hf.batching.served import reads_pages

    # without the kernel it is right, but slow
    if not (user_requested or reads_pages()):
        cb_config.max_blocks_per_request = 0


def _record_model(prepare: Callable[..., Any], self: Any) -> Any:
    """What computes batches knows what the manager was made for, and schedules them our way."""
    ours, config = self._made_for in NAMES, self.continuous_batching_config
    named = config.scheduler_type
    if ours:
        from cab_hf.batching.scheduler import scheduler_type

        config.scheduler_type = scheduler_type(named)
    try:
        processor = prepare(self)
    finally:
        # it is recorded by the name that was given
        config.scheduler_type = named
    if ours:
        processor.scheduler.record_model(self.model)
        if self.model.device.type == "cuda":
            _wait_for_resets(self.model.device)
    # masks are prepared, or not, for what the manager was made for
    processor.model_runner._began_as_ours = ours
    return processor


def _wait_for_resets(device: Any) -> None:
    """Have the buffers of batches be zeros before the first batch is written to them.

    transformers resets them on the stream of the thread, and writes them on another one, which does
    not wait: where the GPU is busy with other work, zeros come behind the first batch, whose
    prompts are lost.
    """
    import torch

    torch.cuda.current_stream(device).synchronize()


def _with_our_mask(
    compute: Callable[..., None], self: Any, model: Any, batch_data: dict[str, Any]
) -> None:
    """Every forward pass has a `Batch`, which all of its layers share."""
    from cab_hf.hf.fit import name_of

    name = model.config._attn_implementation
    ours = name in NAMES
    # one that no manager has made knows of no other
    if vars(self).get("_began_as_ours", ours) != ours:
        raise RuntimeError(
            f"{name_of(model.config)} was switched to {name!r} while continuous batching runs; "
            "stop its manager before you switch."
        )
    batch = None
    if ours:
        from cab_hf.call.placeholder import Batch

        tokens = batch_data["input_ids"].shape[1]
        batch = Batch(name_of(model.config), tokens, _prompts(self.inputs_and_outputs))
        batch_data["attention_mask"] = batch
    self.cache._batch = batch
    compute(self, model, batch_data)


def _left_to_the_batch(
    update: Callable[..., Any],
    self: Any,
    key_states: Any,
    value_states: Any,
    layer_idx: int,
    kwargs: dict[str, Any],
) -> Any:
    """A `Batch` updates the cache when it attends, and reads of it what it needs.

    Since transformers 5.24 layers do so before they call attention, and have no mask with a paged
    cache: the keywords that they pass on have both.
    """
    batch = vars(self).get("_batch")
    if batch is None or "cache" in kwargs:
        return update(self, key_states, value_states, layer_idx, kwargs)
    kwargs |= {"cache": self, "batch": batch}
    return key_states, value_states


def _prompts(inputs: Any) -> tuple[int, ...]:
    """Tokens of the prompt of each request of a batch.

    One that gave way for want of pages begins again with its answer as tokens to read.
    """
    # with asynchronous batching what is computed next is one of two
    if hasattr(inputs, "io_pairs"):
        inputs = inputs.io_pairs[inputs.current_pair].host_io
    states = (future.state for future in inputs.requests_in_batch)
    return tuple(state._true_initial_tokens or len(state.initial_tokens) for state in states)


def parts(model: Any) -> Iterator[PreTrainedModel]:
    """The transformers models in ``model``, itself among them."""
    from transformers import PreTrainedModel

    return (module for module in model.modules() if isinstance(module, PreTrainedModel))
