"""Schedulers of vLLM whose chunks are whole query blocks: a block is chosen for all its queries."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from cab_hf.vllm import settings_of


class WholeBlocks:
    """Mixed into a scheduler; by a private method of vLLM, which has no public one for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cab = settings_of(self.vllm_config)
        self.cuts_for_mamba = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split = True

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, local: int = 0, external: int = 0
    ) -> int:
        """How many of ``num_new_tokens`` are read now; 0 waits for a batch with more room."""
        if self.cuts_for_mamba:
            given = request, num_new_tokens, local, external
            num_new_tokens = super()._mamba_block_aligned_split(*given)
        prompt, block = request.num_prompt_tokens, self.cab.query_block
        start = request.num_computed_tokens + local + external
        end = start + num_new_tokens
        if end >= prompt or prompt < self.cab.min_length:
            return num_new_tokens
        return max(end // block * block - start, 0)


class CabScheduler(WholeBlocks, Scheduler):
    """Of vLLM without asynchronous scheduling."""


class CabAsyncScheduler(WholeBlocks, AsyncScheduler):
    """Of vLLM with it."""
