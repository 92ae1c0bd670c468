"""Schedulers of vLLM that end the chunks of long prompts at borders of query blocks.

vLLM decides how many tokens of a request a step computes. `BlockAligned` moves the end of such a
chunk back to the border of a query block. No query block is then cut, and each block selects its
keys once for all its queries. The chunk keeps vLLM's own end if no border is possible. Attention
over a cut block is correct, but its two parts select keys separately.

Every request that vLLM would finish is finished, after at most twice as many steps as vLLM needs,
plus one step per request:

* A chunk is never shortened to nothing, and only to an end that vLLM itself would select if it had
  fewer tokens to schedule. At least half of vLLM's chunk remains, over a whole prompt.
* A prompt waits for another step only if another request is computed in this step. It does so once
  in its life, or if vLLM would have spent the step's last tokens on a chunk that was shortened.
* A chunk has vLLM's own end again after a step in which vLLM dropped a shortened chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from packaging.version import Version
from vllm import __version__
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from cab_hf.vllm import settings_of

logger = init_logger("vllm.cab_hf")


def _drops_loads() -> bool:
    """Return True if aligned chunks prevent asynchronous loads of a KV cache in this vLLM.

    The chunk of such a request is empty. vLLM before 0.23 treats an empty chunk as a failed
    alignment, and does not start the load.
    """
    return Version(__version__).release < (0, 23)


class BlockAligned:
    """A mixin for a scheduler of vLLM, which has no public hook for the length of a chunk.

    Attributes:
        cab: settings of the engine.
        aligns_mamba: whether vLLM itself aligns chunks to the states of Mamba layers.
        taken: tokens that this step computes, per request id.
        spared: tokens by which this step's chunk was shortened, per request id.
        tried: ids of requests for which this step asked for blocks of the KV cache.
        refused: ids of requests whose shortened chunk the last step dropped before allocation.
        waited: requests that have waited once for a step with more tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cab = settings_of(self.vllm_config)
        self.aligns_mamba = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split = (
            self.aligns_mamba or self.connector is None or not _drops_loads()
        )
        self.taken: dict[str, int] = {}
        self.spared: dict[str, int] = {}
        self.tried: set[str] = set()
        self.refused: set[str] = set()
        self.waited: WeakSet[Any] = WeakSet()
        self._note_steps()
        limit = self._token_limit(num_requests=1)
        if limit < self.cab.query_block:
            logger.warning(
                "cab_hf: a step computes at most %d tokens of a prompt, fewer than query_block=%d, "
                "so every query block is cut. Raise max_num_batched_tokens or "
                "max_num_scheduled_tokens.",
                limit,
                self.cab.query_block,
            )

    def _note_steps(self) -> None:
        """Note in every step which requests ask for blocks of the KV cache and which get some."""
        manager = self.kv_cache_manager
        begin, allocate = manager.new_step_starts, manager.allocate_slots

        def new_step_starts() -> None:
            self.refused = self.spared.keys() - self.tried
            self.tried.clear()
            self.taken.clear()
            self.spared.clear()
            begin()

        def allocate_slots(request: Any, num_new_tokens: int, **kwargs: Any) -> Any:
            self.tried.add(request.request_id)
            blocks = allocate(request, num_new_tokens, **kwargs)
            if blocks is not None and num_new_tokens:
                self.taken[request.request_id] = num_new_tokens
            return blocks

        manager.new_step_starts, manager.allocate_slots = new_step_starts, allocate_slots

    def _preempt_request(self, request: Any, timestamp: float, **kwargs: Any) -> Any:
        """Preempt a request, whose tokens of this step are free again."""
        self.taken.pop(request.request_id, None)
        return super()._preempt_request(request, timestamp, **kwargs)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Return False, which lets later requests pass, if the request waits for another step.

        In versions of vLLM without this method (0.26 and older), the first request that waits ends
        the step.
        """
        if not super()._handle_blocked_waiting_request(request):
            return False
        start = request.num_computed_tokens
        tokens = min(request.num_tokens - start, self._room())
        vllm_end, end = self._ends(request, start, tokens, self._vllm_end(request))
        return vllm_end == start or end > start

    def _mamba_block_aligned_split(
        self,
        request: Any,
        tokens: int,
        local: int = 0,
        external: int = 0,
        common: int | None = None,
    ) -> int:
        """Return how many of the next tokens of a request this step computes.

        Zero lets the request wait for another step.

        Args:
            request: the request.
            tokens: the largest number of tokens.
            local: tokens before them in the prefix cache of this engine.
            external: tokens before them that a connector loads.
            common: tokens of a prefix that waits to be cached; vLLM 0.24 passes it.
        """
        start = request.num_computed_tokens + local + external
        vllm_end = self._vllm_end(request, local, external, common)
        last, end = self._ends(request, start, tokens, vllm_end)
        if start < end < last:
            self.spared[request.request_id] = last - end
        return end - start

    def _vllm_end(
        self, request: Any, local: int = 0, external: int = 0, common: int | None = None
    ) -> Callable[[int, int], int]:
        """Return ``f(start, limit)``, where vLLM ends a chunk that ends at ``limit`` at most."""
        align = super()._mamba_block_aligned_split
        more = {} if common is None else {"num_uncached_common_prefix_tokens": common}

        def end(start: int, limit: int) -> int:
            if not self.aligns_mamba:
                return limit
            return start + align(request, limit - start, local, external, **more)

        return end

    def _ends(
        self, request: Any, start: int, tokens: int, vllm_end: Callable[[int, int], int]
    ) -> tuple[int, int]:
        """Return where vLLM ends the next chunk of a request, and where this scheduler does."""
        end = vllm_end(start, start + tokens)
        least = max(self.cab.min_length, self.cab.query_block)
        is_sparse = request.num_prompt_tokens >= least
        is_cut = start < end < request.num_prompt_tokens and end % self.cab.query_block != 0
        if not is_cut or not is_sparse or request.request_id in self.refused:
            return end, end
        border = self._border(request, start, end, vllm_end)
        if border is None:
            border = start if self._waits(request, start, tokens, vllm_end) else end
        return end, border

    def _border(
        self, request: Any, start: int, end: int, vllm_end: Callable[[int, int], int]
    ) -> int | None:
        """Return the last block border in (start, end] where vLLM can end a chunk, or None.

        A hybrid model caches the state of its Mamba layers at the ends that vLLM selects. Another
        end would cache a wrong state for later prompts. Images with attention in both directions
        are not divided.
        """
        block = self.cab.query_block
        while (border := end // block * block) > start:
            end = min(vllm_end(start, border), self._before_image(request, border))
            if end == border:
                return border
        return None

    def _before_image(self, request: Any, end: int) -> int:
        """Return ``end``, or the start of the image that a chunk must not divide there."""
        if not self.scheduler_config.disable_chunked_mm_input:
            return end
        for feature in request.mm_features or ():
            place = feature.mm_position
            if place.offset < end < place.offset + place.length:
                return place.offset
        return end

    def _waits(
        self, request: Any, start: int, tokens: int, vllm_end: Callable[[int, int], int]
    ) -> bool:
        """Return whether a request without a block border in reach waits for a later step."""
        if not self.taken or tokens < self._room():
            return False
        limit = min(start + self._token_limit(num_requests=1), request.num_prompt_tokens)
        if limit < request.num_prompt_tokens:
            whole = self._border(request, start, vllm_end(start, limit), vllm_end)
            if whole is None:
                return False
        spared = sum(n for name, n in self.spared.items() if name in self.taken)
        if tokens > spared:
            if request in self.waited:
                return False
            self.waited.add(request)
        return True

    def _token_limit(self, num_requests: int) -> int:
        """Return how many tokens a step computes if it has draft tokens of n requests."""
        speculative = self.vllm_config.speculative_config
        drafts = getattr(speculative, "max_num_new_slots_for_drafting", 0)
        batched = self.scheduler_config.max_num_batched_tokens - drafts * num_requests
        return min(self.max_num_scheduled_tokens, batched)

    def _room(self) -> int:
        """Return how many tokens this step can compute for one more request."""
        return self._token_limit(len(self.taken) + 1) - sum(self.taken.values())


class CabScheduler(BlockAligned, Scheduler):
    """vLLM's scheduler with chunks that end at borders of query blocks."""


class CabAsyncScheduler(BlockAligned, AsyncScheduler):
    """vLLM's asynchronous scheduler with chunks that end at borders of query blocks."""
