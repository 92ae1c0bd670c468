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

from cab_hf.config import NAMES, SPARSE
from cab_hf.hf.fit import name_of
from cab_hf.hf.model_config import cab_config_of

PREFIX = "cab_"  # of the names of our schedulers in the registry of transformers


def scheduler_type(name: str) -> str:
    """Register the block-aligned version of scheduler ``name`` and return its name.

    An unknown ``name`` means the FIFO scheduler.
    """
    SCHEDULER_MAPPING[PREFIX + name] = _at_block_borders(SCHEDULER_MAPPING.get(name, FIFOScheduler))
    return PREFIX + name


@cache
def _at_block_borders(base: type[Scheduler]) -> type[Scheduler]:
    class CabScheduler(_CabScheduler, base):
        pass

    return CabScheduler


class _CabScheduler:
    """A mixin for a scheduler of transformers that aligns chunks to query blocks."""

    def record_model(self, model: Any) -> None:
        """Set the model of the scheduler; its settings may change while no request is computed."""
        self._model = model
        if not hasattr(self, "_settings"):
            self._settings = _settings(model)

    def _process_candidates(
        self, candidates: Iterable[Any], token_budget: int, *args: Any
    ) -> tuple[Any, ...]:
        self._forget_other_settings()
        self._taken, self._reads_prompts = 0, False
        if self._query_block() is not None:
            candidates = self._fitting(candidates, token_budget)
        return super()._process_candidates(candidates, token_budget, *args)

    def _fitting(self, candidates: Iterable[Any], token_budget: int) -> Iterator[Any]:
        """Yield the candidates that fit into the batch.

        A batch that reads a prompt starts no second prompt with less than a query block of tokens.
        Such a small chunk would shift all later query blocks and need separate kernel launches. The
        next batch reads the second prompt instead.
        """
        block = self._query_block()
        # the caller schedules a candidate before it asks for the next one
        for state in candidates:
            room = token_budget - self._taken
            split = len(state.remaining_prefill_tokens) > room
            if not (split and self._reads_prompts and room < block):
                yield state

    def _schedule_request(
        self, state: Any, request_tokens: list[int], token_budget: int, *args: Any
    ) -> None:
        """Schedule a request; a chunk ends at a query block boundary, so no query block is cut."""
        block, prompt = self._query_block(), bool(state.remaining_prefill_tokens)
        if block is not None and token_budget < len(request_tokens):
            behind = (state.position_offset + token_budget) % block
            # a chunk that ends before the first boundary keeps its end
            token_budget -= behind if behind < token_budget else 0
        super()._schedule_request(state, request_tokens, token_budget, *args)
        self._taken += len(state.tokens_to_process)
        self._reads_prompts |= prompt

    def _query_block(self) -> int | None:
        """Return the query block of the model in tokens; None if the model is not on "cab"."""
        config = self._model.config.get_text_config()
        sparse = config._attn_implementation in SPARSE
        return cab_config_of(config).query_block if sparse else None

    def _forget_other_settings(self) -> None:
        """Evict shared cache blocks that were computed under other settings.

        Raises:
            RuntimeError: the settings changed while requests were computed.
        """
        before, now = self._settings, _settings(self._model)
        if now is None or now == before:
            return
        waiting = self.waiting_requests.values()
        if self.active_requests or any(state.is_cpu_offloaded for state in waiting):
            what = f"was switched from {before[0]!r} to {now[0]!r}"
            if before[0] == now[0]:
                what = "received another cab_config"
            raise RuntimeError(
                f"{name_of(self._model.config)} {what} while continuous batching computes "
                "requests, whose keys and values belong to the previous settings. Wait for all "
                "answers before you change settings."
            )
        self.cache.evict_cached_blocks()
        self._settings = now


def _settings(model: Any) -> tuple[str, Any] | None:
    """Return the settings that determine cached keys and values; None for a foreign attention."""
    text = model.config.get_text_config()
    name = text._attn_implementation
    return (name, cab_config_of(text) if name in SPARSE else None) if name in NAMES else None
