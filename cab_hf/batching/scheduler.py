"""Schedulers of continuous batching that end chunks of prompts at boundaries of query blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from transformers.generation.continuous_batching.scheduler import (
    SCHEDULER_MAPPING,
    FIFOScheduler,
    Scheduler,
)

from cab_hf.config import IMPLEMENTATION_NAMES, SPARSE_IMPLEMENTATIONS
from cab_hf.hf.fit import model_name_of
from cab_hf.hf.model_config import cab_config_of

# prefix of the names of block-aligned schedulers in the registry of transformers
SCHEDULER_NAME_PREFIX = "cab_"


def register_block_aligned_scheduler(scheduler_name: str) -> str:
    """Register the block-aligned version of a scheduler and return the name of this version.

    Args:
        scheduler_name: name of a scheduler of transformers; an unknown name selects the FIFO
            scheduler.
    """
    scheduler_class = SCHEDULER_MAPPING.get(scheduler_name, FIFOScheduler)
    SCHEDULER_MAPPING[SCHEDULER_NAME_PREFIX + scheduler_name] = _make_block_aligned_class(
        scheduler_class
    )
    return SCHEDULER_NAME_PREFIX + scheduler_name


@cache
def _make_block_aligned_class(scheduler_class: type[Scheduler]) -> type[Scheduler]:
    """Return a subclass of a scheduler whose chunks end at boundaries of query blocks."""

    class CabScheduler(_BlockAlignedMixin, scheduler_class):
        pass

    return CabScheduler


class _BlockAlignedMixin:
    """A mixin for a scheduler of transformers that aligns chunks to query blocks.

    Attributes of a batch that is being scheduled:
        _num_scheduled_tokens: number of scheduled tokens.
        _has_prompt: True if the batch contains a chunk of a prompt.
    """

    def record_model(self, model: Any) -> None:
        """Set the model of the scheduler, and record its settings at the first call."""
        self._model = model
        if not hasattr(self, "_settings"):
            self._settings = _read_settings(model)

    def _process_candidates(
        self, candidates: Iterable[Any], token_budget: int, *args: Any
    ) -> tuple[Any, ...]:
        """Schedule a batch from candidate requests.

        Args:
            candidates: states of requests, in the order of the scheduler.
            token_budget: largest number of tokens of the batch.
            args: further arguments of transformers.
        """
        self._evict_blocks_of_old_settings()
        self._num_scheduled_tokens, self._has_prompt = 0, False
        if self._query_block() is not None:
            candidates = self._skip_small_chunks(candidates, token_budget)
        return super()._process_candidates(candidates, token_budget, *args)

    def _skip_small_chunks(self, candidates: Iterable[Any], token_budget: int) -> Iterator[Any]:
        """Yield the candidates, without prompts that would start with a small chunk.

        A chunk with fewer tokens than a query block would shift all later query blocks of its
        prompt, and would need separate kernel launches. If the batch already contains a prompt, the
        next batch therefore starts the second prompt.

        Args:
            candidates: states of requests.
            token_budget: largest number of tokens of the batch.
        """
        query_block = self._query_block()
        # the caller schedules each candidate before this generator continues, so the attributes are
        # up to date
        for request_state in candidates:
            num_free_tokens = token_budget - self._num_scheduled_tokens
            is_prompt_split = len(request_state.remaining_prefill_tokens) > num_free_tokens
            if not (is_prompt_split and self._has_prompt and num_free_tokens < query_block):
                yield request_state

    def _schedule_request(
        self, request_state: Any, request_tokens: list[int], token_budget: int, *args: Any
    ) -> None:
        """Schedule a request, with a chunk that ends at a boundary of query blocks.

        Args:
            request_state: state of the request.
            request_tokens: tokens of the request that are not computed yet.
            token_budget: number of tokens that the batch can still take.
            args: further arguments of transformers.
        """
        query_block, is_prompt = self._query_block(), bool(request_state.remaining_prefill_tokens)
        if query_block is not None and token_budget < len(request_tokens):
            num_tokens_after_boundary = (request_state.position_offset + token_budget) % query_block
            # a chunk that contains no boundary is not shortened, because nothing would remain
            token_budget -= (
                num_tokens_after_boundary if num_tokens_after_boundary < token_budget else 0
            )
        super()._schedule_request(request_state, request_tokens, token_budget, *args)
        self._num_scheduled_tokens += len(request_state.tokens_to_process)
        self._has_prompt |= is_prompt

    def _query_block(self) -> int | None:
        """Return the query block size of the model in tokens; None without sparse attention."""
        text_config = self._model.config.get_text_config()
        is_sparse = text_config._attn_implementation in SPARSE_IMPLEMENTATIONS
        return cab_config_of(text_config).query_block if is_sparse else None

    def _evict_blocks_of_old_settings(self) -> None:
        """Evict shared cache blocks if the settings of the model have changed.

        Raises:
            RuntimeError: if requests are being computed under the previous settings.
        """
        old_settings, new_settings = self._settings, _read_settings(self._model)
        if new_settings is None or new_settings == old_settings:
            return
        waiting_states = self.waiting_requests.values()
        if self.active_requests or any(
            waiting_state.is_cpu_offloaded for waiting_state in waiting_states
        ):
            change_description = f"was switched from {old_settings[0]!r} to {new_settings[0]!r}"
            if old_settings[0] == new_settings[0]:
                change_description = "received another cab_config"
            raise RuntimeError(
                f"{model_name_of(self._model.config)} {change_description} while continuous "
                "batching computes requests, whose keys and values belong to the previous "
                "settings. Wait for all answers before you change settings."
            )
        self.cache.evict_cached_blocks()
        self._settings = new_settings


def _read_settings(model: Any) -> tuple[str, Any] | None:
    """Return the settings that determine cached keys and values.

    Returns the attention implementation, and its CabConfig or None if it is not sparse. Returns
    None if the attention implementation is not from this package.
    """
    text_config = model.config.get_text_config()
    implementation = text_config._attn_implementation
    if implementation not in IMPLEMENTATION_NAMES:
        return None
    return implementation, cab_config_of(
        text_config
    ) if implementation in SPARSE_IMPLEMENTATIONS else None
