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

    def _mamba_block_aligned_split(self, request: Any, tokens: int, local=0, external=0) -> int:
        """How many of the next ``tokens`` are read now; 0 waits for a batch with more room."""
        if self.cuts_for_mamba:
            tokens = super()._mamba_block_aligned_split(request, tokens, local, external)
        prompt, block = request.num_prompt_tokens, self.cab.query_block
        start = request.num_computed_tokens + local + external
        end = start + tokens
        if end >= prompt or prompt < self.cab.min_length:
            return tokens
        return max(end // block * block - start, 0)


class CabScheduler(WholeBlocks, Scheduler):
    """Plain."""


class CabAsyncScheduler(WholeBlocks, AsyncScheduler):
    """Asynchronous."""
