"""Schedulers of vLLM that end the chunks of long prompts at borders of query blocks.

vLLM decides how many tokens of a request a step computes. `BlockAlignedMixin` shortens this chunk
so that it ends at the border of a query block. Every query block is then in one chunk and selects
its keys once for all its queries. A chunk keeps vLLM's own end if no border is possible. Attention
over a query block in two chunks is correct, but the two parts of the block select keys separately.

Every request that vLLM would finish is finished, after at most twice as many steps as vLLM needs,
plus one step per request:

* A chunk is shortened only to an end that vLLM itself would select if it had fewer tokens to
  schedule, and never to zero tokens. Summed over a prompt, at least half of the tokens of vLLM's
  chunks remain.
* A prompt waits for another step only if this step computes another request. A prompt waits once,
  and again only if its tokens in this step come from another chunk that was shortened.
* If vLLM dropped a shortened chunk in the last step, the chunk has vLLM's own end in this step.
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

# function of (start, max_end) that returns the end (exclusive) of the chunk that vLLM would compute
# from token ``start`` on, if the end must be at most ``max_end``
ChunkEndFunction = Callable[[int, int], int]


def _vllm_drops_kv_loads() -> bool:
    """Return True if this version of vLLM starts no asynchronous load of KV while aligning chunks.

    A request that loads its KV cache has a chunk of zero tokens. vLLM before 0.23 treats zero
    tokens as a failed alignment, and does not start the load.
    """
    return Version(__version__).release < (0, 23)


class BlockAlignedMixin:
    """A mixin for a scheduler of vLLM, which overrides private methods of the scheduler.

    vLLM has no public hook for the length of a chunk. A step is one call of ``schedule``.

    Attributes:
        cab_settings: settings of the engine.
        has_mamba_alignment: True if vLLM itself aligns chunks to the states of Mamba layers.
        scheduled_tokens: tokens that this step computes, by request id.
        shortened_tokens: tokens by which this step shortened a chunk, by request id.
        allocating_request_ids: ids of requests for which this step asked for blocks of the KV
            cache.
        dropped_request_ids: ids of requests whose shortened chunk the last step dropped before it
            asked for blocks of the KV cache.
        waited_requests: requests that have already waited for a step in which they have more
            tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cab_settings = settings_of(self.vllm_config)
        self.has_mamba_alignment = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split = (
            self.has_mamba_alignment or self.connector is None or not _vllm_drops_kv_loads()
        )
        self.scheduled_tokens: dict[str, int] = {}
        self.shortened_tokens: dict[str, int] = {}
        self.allocating_request_ids: set[str] = set()
        self.dropped_request_ids: set[str] = set()
        self.waited_requests: WeakSet[Any] = WeakSet()
        self._hook_cache_manager()
        max_prompt_tokens = self._find_step_token_limit(num_requests=1)
        if max_prompt_tokens < self.cab_settings.query_block:
            logger.warning(
                "cab_hf: a step computes at most %d tokens of a prompt, fewer than query_block=%d, "
                "so every query block is cut. Raise max_num_batched_tokens or "
                "max_num_scheduled_tokens.",
                max_prompt_tokens,
                self.cab_settings.query_block,
            )

    def _hook_cache_manager(self) -> None:
        """Wrap two methods of the KV cache manager, to record the requests of every step."""
        cache_manager = self.kv_cache_manager
        original_new_step_starts = cache_manager.new_step_starts
        original_allocate_slots = cache_manager.allocate_slots

        def new_step_starts() -> None:
            self.dropped_request_ids = self.shortened_tokens.keys() - self.allocating_request_ids
            self.allocating_request_ids.clear()
            self.scheduled_tokens.clear()
            self.shortened_tokens.clear()
            original_new_step_starts()

        def allocate_slots(request: Any, num_new_tokens: int, **kwargs: Any) -> Any:
            self.allocating_request_ids.add(request.request_id)
            allocated_blocks = original_allocate_slots(request, num_new_tokens, **kwargs)
            # None: the cache has too few free blocks
            if allocated_blocks is not None and num_new_tokens:
                self.scheduled_tokens[request.request_id] = num_new_tokens
            return allocated_blocks

        cache_manager.new_step_starts = new_step_starts
        cache_manager.allocate_slots = allocate_slots

    def _preempt_request(self, request: Any, timestamp: float, **kwargs: Any) -> Any:
        """Preempt a request, and remove its tokens from ``scheduled_tokens``."""
        self.scheduled_tokens.pop(request.request_id, None)
        return super()._preempt_request(request, timestamp, **kwargs)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Return False if a request waits for another step, so that the step tries later requests.

        vLLM 0.26 and older do not call this method, and end the step at the first request that
        waits.
        """
        if not super()._handle_blocked_waiting_request(request):
            return False
        chunk_start = request.num_computed_tokens
        max_tokens = min(request.num_tokens - chunk_start, self._num_free_tokens())
        vllm_chunk_end, aligned_chunk_end = self._find_chunk_ends(
            request, chunk_start, max_tokens, self._make_vllm_chunk_end_function(request)
        )
        return vllm_chunk_end == chunk_start or aligned_chunk_end > chunk_start

    def _mamba_block_aligned_split(
        self,
        request: Any,
        max_tokens: int,
        num_cached_tokens: int = 0,
        num_loaded_tokens: int = 0,
        num_uncached_prefix_tokens: int | None = None,
    ) -> int:
        """Return the number of tokens of a request that this step computes.

        Overrides the method by which vLLM aligns chunks to the states of Mamba layers. Zero lets
        the request wait for another step.

        Args:
            request: the request.
            max_tokens: upper bound of the number of tokens.
            num_cached_tokens: tokens of the request in the prefix cache of this engine.
            num_loaded_tokens: tokens of the request that a KV connector loads.
            num_uncached_prefix_tokens: tokens of a common prefix that is not cached yet; None in
                versions of vLLM that do not pass this number.
        """
        chunk_start = request.num_computed_tokens + num_cached_tokens + num_loaded_tokens
        vllm_chunk_end, aligned_chunk_end = self._find_chunk_ends(
            request,
            chunk_start,
            max_tokens,
            self._make_vllm_chunk_end_function(
                request, num_cached_tokens, num_loaded_tokens, num_uncached_prefix_tokens
            ),
        )
        if chunk_start < aligned_chunk_end < vllm_chunk_end:
            self.shortened_tokens[request.request_id] = vllm_chunk_end - aligned_chunk_end
        return aligned_chunk_end - chunk_start

    def _make_vllm_chunk_end_function(
        self,
        request: Any,
        num_cached_tokens: int = 0,
        num_loaded_tokens: int = 0,
        num_uncached_prefix_tokens: int | None = None,
    ) -> ChunkEndFunction:
        """Return the chunk end function of a request.

        Arguments as in `_mamba_block_aligned_split`.
        """
        original_split = super()._mamba_block_aligned_split
        optional_arguments = {}
        if num_uncached_prefix_tokens is not None:
            optional_arguments["num_uncached_common_prefix_tokens"] = num_uncached_prefix_tokens

        def find_vllm_chunk_end(chunk_start: int, max_chunk_end: int) -> int:
            if not self.has_mamba_alignment:
                return max_chunk_end
            return chunk_start + original_split(
                request,
                max_chunk_end - chunk_start,
                num_cached_tokens,
                num_loaded_tokens,
                **optional_arguments,
            )

        return find_vllm_chunk_end

    def _find_chunk_ends(
        self, request: Any, chunk_start: int, max_tokens: int, find_vllm_chunk_end: ChunkEndFunction
    ) -> tuple[int, int]:
        """Return the ends of the next chunk of a request under vLLM and under this scheduler.

        An end is the index of the first token of the request after the chunk. An end equal to
        ``chunk_start`` lets the request wait.

        Args:
            request: the request.
            chunk_start: first token of the chunk.
            max_tokens: upper bound of the number of tokens.
            find_vllm_chunk_end: function that returns the end that vLLM selects.
        """
        vllm_chunk_end = find_vllm_chunk_end(chunk_start, chunk_start + max_tokens)
        min_prompt_tokens = max(self.cab_settings.min_length, self.cab_settings.query_block)
        is_sparse = request.num_prompt_tokens >= min_prompt_tokens
        is_block_cut = (
            chunk_start < vllm_chunk_end < request.num_prompt_tokens
            and vllm_chunk_end % self.cab_settings.query_block != 0
        )
        if not is_block_cut or not is_sparse or request.request_id in self.dropped_request_ids:
            return vllm_chunk_end, vllm_chunk_end
        block_border = self._find_last_block_border(
            request, chunk_start, vllm_chunk_end, find_vllm_chunk_end
        )
        if block_border is None:
            block_border = (
                chunk_start
                if self._must_wait(request, chunk_start, max_tokens, find_vllm_chunk_end)
                else vllm_chunk_end
            )
        return vllm_chunk_end, block_border

    def _find_last_block_border(
        self, request: Any, chunk_start: int, chunk_end: int, find_vllm_chunk_end: ChunkEndFunction
    ) -> int | None:
        """Return the last border of a query block at which vLLM can end a chunk.

        The border is in (chunk_start, chunk_end]. Returns None if no border is possible. A hybrid
        model caches the state of its Mamba layers at the ends that vLLM selects, so that another
        end would cache a wrong state for later prompts. Images whose tokens attend in both
        directions are not divided.
        """
        query_block = self.cab_settings.query_block
        while (block_border := chunk_end // query_block * query_block) > chunk_start:
            chunk_end = min(
                find_vllm_chunk_end(chunk_start, block_border),
                self._end_before_image(request, block_border),
            )
            if chunk_end == block_border:
                return block_border
        return None

    def _end_before_image(self, request: Any, chunk_end: int) -> int:
        """Return ``chunk_end``, or the start of the image that the chunk would divide."""
        if not self.scheduler_config.disable_chunked_mm_input:
            return chunk_end
        for image_feature in request.mm_features or ():
            image_range = image_feature.mm_position
            if image_range.offset < chunk_end < image_range.offset + image_range.length:
                return image_range.offset
        return chunk_end

    def _must_wait(
        self, request: Any, chunk_start: int, max_tokens: int, find_vllm_chunk_end: ChunkEndFunction
    ) -> bool:
        """Return True if a request must wait, because ``max_tokens`` tokens reach no block border.

        If the request waits for the first time, the method may also add the request to
        ``waited_requests``.
        """
        # do not postpone the request: a later step offers more tokens only if other requests use a
        # part of this step
        if not self.scheduled_tokens or max_tokens < self._num_free_tokens():
            return False
        # a step for this request alone must reach a border, or the end of the prompt
        max_chunk_end = min(
            chunk_start + self._find_step_token_limit(num_requests=1), request.num_prompt_tokens
        )
        if max_chunk_end < request.num_prompt_tokens:
            block_border = self._find_last_block_border(
                request,
                chunk_start,
                find_vllm_chunk_end(chunk_start, max_chunk_end),
                find_vllm_chunk_end,
            )
            if block_border is None:
                return False
        # without shortened chunks, vLLM would have had no tokens for this request
        num_shortened_tokens = sum(
            num_removed_tokens
            for request_id, num_removed_tokens in self.shortened_tokens.items()
            if request_id in self.scheduled_tokens
        )
        if max_tokens > num_shortened_tokens:
            if request in self.waited_requests:
                return False
            self.waited_requests.add(request)
        return True

    def _find_step_token_limit(self, num_requests: int) -> int:
        """Return the largest number of tokens of a step that computes ``num_requests`` requests.

        With speculative decoding, the slots that each request reserves for draft tokens are
        subtracted.
        """
        speculative_config = self.vllm_config.speculative_config
        num_draft_slots = getattr(speculative_config, "max_num_new_slots_for_drafting", 0)
        max_batched_tokens = (
            self.scheduler_config.max_num_batched_tokens - num_draft_slots * num_requests
        )
        return min(self.max_num_scheduled_tokens, max_batched_tokens)

    def _num_free_tokens(self) -> int:
        """Return the number of tokens that this step can compute for one more request."""
        token_limit = self._find_step_token_limit(num_requests=len(self.scheduled_tokens) + 1)
        return token_limit - sum(self.scheduled_tokens.values())


class CabScheduler(BlockAlignedMixin, Scheduler):
    """vLLM's scheduler with chunks that end at borders of query blocks."""


class CabAsyncScheduler(BlockAlignedMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with chunks that end at borders of query blocks."""
