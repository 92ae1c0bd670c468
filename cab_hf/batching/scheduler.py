"""Schedulers of continuous batching that cut prompts at the borders of query blocks."""

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

PREFIX = "cab_"  # of the names under which transformers finds them


def scheduler_type(name: str) -> str:
    """The name of the scheduler that does what ``name`` does, at block borders; "fifo" if none."""
    SCHEDULER_MAPPING[PREFIX + name] = _at_block_borders(SCHEDULER_MAPPING.get(name, FIFOScheduler))
    return PREFIX + name


@cache
def _at_block_borders(base: type[Scheduler]) -> type[Scheduler]:
    class CabScheduler(_CabScheduler, base):
        pass

    return CabScheduler


class _CabScheduler:
    """What is put before a scheduler of transformers."""

    def record_model(self, model: Any) -> None:
        """Schedule for ``model``, whose settings may change while nothing is computed."""
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
        """A batch that reads a prompt begins no other one with less than a query block of it.

        What it leaves is read by the next batch: so small a chunk would shift all blocks behind it,
        and take launches of its own.
        """
        block = self._query_block()
        # called for the next one when the one before is scheduled
        for state in candidates:
            room = token_budget - self._taken
            split = len(state.remaining_prefill_tokens) > room
            if not (split and self._reads_prompts and room < block):
                yield state

    def _schedule_request(
        self, state: Any, request_tokens: list[int], token_budget: int, *args: Any
    ) -> None:
        """Chunks end where query blocks do, which then choose by all of their queries."""
        block, prompt = self._query_block(), bool(state.remaining_prefill_tokens)
        if block is not None and token_budget < len(request_tokens):
            behind = (state.position_offset + token_budget) % block
            # what ends before the first border is as it is
            token_budget -= behind if behind < token_budget else 0
        super()._schedule_request(state, request_tokens, token_budget, *args)
        self._taken += len(state.tokens_to_process)
        self._reads_prompts |= prompt

    def _query_block(self) -> int | None:
        """That of the model; None where it is not on "cab"."""
        config = self._model.config.get_text_config()
        sparse = config._attn_implementation in SPARSE
        return cab_config_of(config).query_block if sparse else None

    def _forget_other_settings(self) -> None:
        """Have requests read no blocks that others have left under other settings.

        Raises:
            RuntimeError: some are computed under the settings before.
        """
        before, now = self._settings, _settings(self._model)
        if now is None or now == before:
            return
        waiting = self.waiting_requests.values()
        if self.active_requests or any(state.is_cpu_offloaded for state in waiting):
            what = f"was switched from {before[0]!r} to {now[0]!r}"
            if before[0] == now[0]:
                what = "was given another cab_config"
            raise RuntimeError(
                f"{name_of(self._model.config)} {what} while continuous batching computes "
                "requests, whose keys and values are those of the settings before; wait for all "
                "answers before you change them."
            )
        self.cache.evict_cached_blocks()
        self._settings = now


def _settings(model: Any) -> tuple[str, Any] | None:
    """What keys and values in the pages of a cache depend on; None where they are not ours."""
    text = model.config.get_text_config()
    name = text._attn_implementation
    return (name, cab_config_of(text) if name in SPARSE else None) if name in NAMES else None
