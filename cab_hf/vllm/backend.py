"""An attention backend of vLLM with sparse attention for long prompts.

For each long prompt, or chunk of a prompt, the backend gathers keys and values from the pages of
the KV cache and computes a `Call`. vLLM's own backend, the parent class, computes the other
requests as a separate batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from cab_hf.call.call import Call
from cab_hf.call.mask import MaskDetails, MaskInfo
from cab_hf.call.scope import Prompt
from cab_hf.config import block_sizes
from cab_hf.dispatch import dispatch
from cab_hf.engines import TRITON, Workload
from cab_hf.engines import choose as choose_engine
from cab_hf.plan import DENSE_BLOCK_SIZE
from cab_hf.predictors import make_predictor
from cab_hf.vllm import UNQUANTISED_CACHE_DTYPES, backend_name, settings_of
from cab_hf.vllm.layers import CabLayer
from cab_hf.vllm.metrics import METER_BY_INSTANCE_ID
from cab_hf.vllm.runner import RUNNER_BATCH, install_hooks


class SparsePrompt(NamedTuple):
    """A prompt, or the chunk of a prompt, that is attended sparsely.

    Attributes:
        token_slice: slice of the batch that contains the tokens of the prompt.
        page_ids: int64 [P], indices of the pages of the KV cache that contain the keys of the
            prompt, in the order of the tokens.
        mask: the keys that each token of the prompt may attend to.
    """

    token_slice: slice
    page_ids: Tensor
    mask: MaskInfo


class SplitBatch(NamedTuple):
    """The requests of a batch, divided into sparse prompts and dense requests.

    Attributes:
        sparse_prompts: the prompts with sparse attention.
        isa: instruction set that determines the layout of pages on a CPU, such as "amx"; None on a
            GPU.
        dense_metadata: metadata of the parent backend for the dense requests; None if all requests
            are sparse.
        dense_token_indices: int64 [T], indices of the dense requests' tokens in the batch; None if
            all requests are sparse.
    """

    sparse_prompts: list[SparsePrompt]
    isa: str | None = None
    dense_metadata: Any = None
    dense_token_indices: Tensor | None = None


class SparseBuilder:
    """A mixin for the metadata builder of vLLM's backend, which finds sparse prompts in a batch.

    Attributes:
        cab_settings: the settings; None if this builder never has sparse prompts.
        dense_block_size: block size in tokens of plans for exact attention; None to compute exact
            attention without a plan.
    """

    # capture attention in CUDA graphs only for uniform batches of decode steps, without prompts
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    # False, because a `SplitBatch` contains pages: the layers of another KV cache group have other
    # pages
    supports_update_block_table = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cache_spec, dtype = self.kv_cache_spec, self.vllm_config.model_config.dtype
        # vLLM derives builders from this class for layers that attend to a rewritten batch: chunks
        # of tokens as separate requests (Llama 4), or sinks before each request
        has_rewritten_batches = type(self) is not CabBuilder
        has_local_attention = any(
            getattr(cache_spec, field_name, None)
            for field_name in ("sliding_window", "attention_chunk_size")
        )
        self.cab_settings = (
            None if has_rewritten_batches or has_local_attention else settings_of(self.vllm_config)
        )
        if self.cab_settings is not None and cache_spec.dtype.itemsize > 1:
            # raise an error for an unknown layout of pages now, not at the first prompt
            test_page = torch.empty(
                1, 1, cache_spec.block_size, 2 * cache_spec.head_size, dtype=cache_spec.dtype
            )
            gather_pages(test_page, torch.tensor([0]), getattr(self, "isa", None))
        workload = Workload(
            device=self.device.type,
            head_dim=cache_spec.head_size,
            dtype=dtype,
            training=False,
            query_block=DENSE_BLOCK_SIZE,
            key_block=DENSE_BLOCK_SIZE,
        )
        # use a plan if Triton is available: without a plan, SDPA would compute exact attention, and
        # its fastest kernels need preparation for every new prompt length
        self.dense_block_size = None if TRITON.unavailable(workload) else DENSE_BLOCK_SIZE

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build=False) -> Any:
        """Return the metadata of the parent class, with an added attribute ``cab_split_batch``.

        ``cab_split_batch`` is the `SplitBatch` of the batch, or None if no prompt is sparse. The
        arguments are those of the parent class.
        """
        common_metadata = common_attn_metadata
        metadata = super().build(common_prefix_len, common_metadata, fast_build)
        metadata.cab_split_batch = None
        if self.cab_settings is None or common_metadata.causal is not True:
            return metadata
        query_starts, kv_length_bounds = (
            common_metadata.query_start_loc_cpu.tolist(),
            common_metadata.seq_lens_cpu_upper_bound,
        )
        kv_lengths = (
            common_metadata.seq_lens.cpu() if kv_length_bounds is None else kv_length_bounds
        ).tolist()
        min_prompt_tokens = max(self.cab_settings.min_length, self.cab_settings.query_block)
        # the tokens of an image attend to each other in both directions
        image_ranges = getattr(common_metadata, "mm_req_doc_ranges", None) or {}
        sparse_prompts, dense_request_indices = [], []
        for request_index, prompt_length in enumerate(
            RUNNER_BATCH.prompt_lengths[: common_metadata.num_reqs]
        ):
            token_slice, kv_length = (
                slice(query_starts[request_index], query_starts[request_index + 1]),
                kv_lengths[request_index],
            )
            q_length = token_slice.stop - token_slice.start
            is_prefill = q_length > 0 and kv_length - q_length < prompt_length
            if (
                is_prefill
                and prompt_length >= min_prompt_tokens
                and not image_ranges.get(request_index)
            ):
                num_pages = -(-kv_length // self.kv_cache_spec.block_size)
                page_ids = common_metadata.block_table_tensor[request_index, :num_pages].long()
                mask = self._cached_mask(request_index, q_length, kv_length, prompt_length)
                sparse_prompts.append(
                    SparsePrompt(token_slice=token_slice, page_ids=page_ids, mask=mask)
                )
            elif q_length:
                dense_request_indices.append(request_index)
        if sparse_prompts:
            dense_metadata = dense_token_indices = None
            if dense_request_indices:
                dense_metadata, dense_token_indices = self._build_for_requests(
                    common_metadata, dense_request_indices, query_starts
                )
            metadata.cab_split_batch = SplitBatch(
                sparse_prompts=sparse_prompts,
                isa=getattr(self, "isa", None),
                dense_metadata=dense_metadata,
                dense_token_indices=dense_token_indices,
            )
        return metadata

    def _cached_mask(
        self, request_index: int, q_length: int, kv_length: int, prompt_length: int
    ) -> MaskInfo:
        """Return the mask of a chunk of a prompt, the same object for all KV cache groups.

        For the first mask of the last chunk of a prompt, the method also counts the prompt.

        Args:
            request_index: index of the request in the batch.
            q_length: tokens of the chunk.
            kv_length: tokens of the request up to the end of the chunk.
            prompt_length: tokens of the whole prompt.
        """
        cache_key = request_index, q_length, kv_length, prompt_length, self.dense_block_size
        if cache_key not in RUNNER_BATCH.mask_cache:
            RUNNER_BATCH.mask_cache[cache_key] = MaskInfo(
                batch=1,
                q_length=q_length,
                kv_length=kv_length,
                q_offset=kv_length - q_length,
                prompt=Prompt(prompt_length),
                details=MaskDetails(dense_block_size=self.dense_block_size),
            )
            if kv_length >= prompt_length:
                METER_BY_INSTANCE_ID[self.vllm_config.instance_id].count_prompt()
        return RUNNER_BATCH.mask_cache[cache_key]

    def _build_for_requests(
        self, common_metadata: Any, request_indices: list[int], query_starts: list[int]
    ) -> tuple[Any, Tensor]:
        """Build metadata of the parent class for a batch that contains only ``request_indices``.

        Args:
            common_metadata: vLLM's CommonAttentionMetadata of the batch.
            request_indices: indices of the requests, ascending.
            query_starts: index of the first token of each request of the batch, and the number of
                tokens.

        Returns:
            (metadata, token_indices). ``token_indices`` are the indices of the requests' tokens in
            the whole batch, int64 [T].
        """
        request_index_tensor = torch.tensor(request_indices)
        num_request_queries = common_metadata.query_start_loc_cpu.diff()[request_index_tensor]
        query_start_loc = torch.cat(
            [
                num_request_queries.new_zeros(1),
                num_request_queries.cumsum(0).to(num_request_queries.dtype),
            ]
        )
        token_indices = torch.cat(
            [
                torch.arange(query_starts[request_index], query_starts[request_index + 1])
                for request_index in request_indices
            ]
        )
        # copies from pinned memory do not synchronise with the GPU
        is_cuda, device = common_metadata.seq_lens.is_cuda, common_metadata.seq_lens.device
        pinned_tensors = (
            index_tensor.pin_memory() if is_cuda else index_tensor
            for index_tensor in (request_index_tensor, query_start_loc, token_indices)
        )
        device_request_indices, device_start_loc, token_indices = (
            index_tensor.to(device, non_blocking=True) for index_tensor in pinned_tensors
        )
        selected_fields = {
            field_name: getattr(common_metadata, field_name)[request_index_tensor]
            for field_name in ("seq_lens_cpu_upper_bound", "is_prefilling")
            if getattr(common_metadata, field_name) is not None
        }
        image_ranges = getattr(common_metadata, "mm_req_doc_ranges", None)
        if image_ranges is not None:
            selected_fields["mm_req_doc_ranges"] = {
                new_request_index: image_ranges.get(old_request_index) or []
                for new_request_index, old_request_index in enumerate(request_indices)
            }
        selected_metadata = common_metadata.replace(
            query_start_loc=device_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=common_metadata.seq_lens[device_request_indices],
            num_reqs=len(request_indices),
            num_actual_tokens=len(token_indices),
            max_query_len=int(num_request_queries.max()),
            block_table_tensor=common_metadata.block_table_tensor[device_request_indices],
            slot_mapping=common_metadata.slot_mapping[token_indices],
            _num_computed_tokens_cache=None,
            **selected_fields,
        )
        # common_prefix_len 0; with fast_build True, FlashAttention does not overwrite the buffer
        # that the metadata of the whole batch uses
        return super().build(0, selected_metadata, True), token_indices


class SparseImpl:
    """A mixin for the attention of one layer in vLLM's backend, which computes prompts sparsely.

    Attributes:
        cab_settings: the settings; None if the plugin is off.
        cab_layer: index, config and slow channels of the layer. `register_layers` sets them after
            the model is loaded. None for a layer of a draft model, which is dense.
        cab_dense_reason: the reason why the layer is dense; None if the layer may be sparse.
        is_memory_measured: True after vLLM has measured the memory of sparse attention in this
            layer.
    """

    cab_layer: CabLayer | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        self.model_config, self.cab_settings = vllm_config.model_config, settings_of(vllm_config)
        self.cab_dense_reason = self._find_dense_reason()
        self.is_memory_measured = False
        if self.cab_settings is None:
            return
        install_hooks(vllm_config)
        if self.cab_dense_reason is None:
            # `make_predictor` and `choose_engine` are called for their errors: both raise for
            # settings that this model or device cannot run
            make_predictor(self.cab_settings)
            workload = Workload(
                device=current_platform.device_type,
                head_dim=self.head_size,
                dtype=self.model_config.dtype,
                training=False,
                query_block=self.cab_settings.query_block,
                key_block=self.cab_settings.key_block,
            )
            choose_engine(self.cab_settings.engine, workload)

    def _find_dense_reason(self) -> str | None:
        """Return the reason why vLLM's own attention computes the layer; None for sparse layers."""
        if self.cab_settings is None:
            return "off"
        if self.attn_type != AttentionType.DECODER:
            return f"attention of type {self.attn_type}"
        if self.sliding_window not in (None, -1, (-1, -1)):
            return "a sliding window"
        if getattr(self, "sinks", None) is not None:
            return "attention sinks"
        if self.alibi_slopes is not None:
            return "ALiBi"
        if self.logits_soft_cap:
            return "soft-capped logits"
        if self.kv_cache_dtype not in UNQUANTISED_CACHE_DTYPES:
            return f"a cache of {self.kv_cache_dtype}"
        return None

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        """Compute the attention of a batch, write the result to ``output`` and return ``output``.

        The arguments are those of the parent class. ``key`` and ``value`` are None in a layer that
        reads the KV cache of another layer.
        """
        is_sparse = self.cab_layer is not None and self.cab_dense_reason is None
        is_sparse = is_sparse and self.cab_layer.layer_idx not in self.cab_settings.dense_layers
        # vLLM calls layers without metadata to measure the memory that they need
        if is_sparse and attn_metadata is None and query.is_cuda and not self.is_memory_measured:
            self.is_memory_measured = True
            self.measure_memory(query)
        split_batch = getattr(attn_metadata, "cab_split_batch", None)
        if split_batch is None or not is_sparse:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        if split_batch.dense_metadata is not None:
            q, k, v = (
                None if x is None else x[split_batch.dense_token_indices]
                for x in (query, key, value)
            )
            out = torch.empty_like(output[: len(split_batch.dense_token_indices)])
            super().forward(
                layer, q, k, v, kv_cache, split_batch.dense_metadata, out, *args, **kwargs
            )
            output[split_batch.dense_token_indices] = out
        for prompt in split_batch.sparse_prompts:
            k, v = gather_pages(kv_cache, prompt.page_ids, split_batch.isa)
            self.attend(
                query[prompt.token_slice],
                k[None],
                v[None],
                mask=prompt.mask,
                out=output[prompt.token_slice],
            )
        return output

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskInfo, out: Tensor) -> None:
        """Compute the sparse attention of one prompt, or of a chunk of a prompt.

        Args:
            q: queries of the chunk, [T, H, D].
            k: keys of whole pages, [1, H_kv, P * page, D]; keys after the chunk are ignored.
            v: values of whole pages, [1, H_kv, P * page, D].
            mask: the keys that each query may attend to.
            out: receives the output, [T, H * D] or [T, H, D].
        """
        q = q.transpose(0, 1).unsqueeze(0)
        k, v = k[:, :, : mask.kv_length], v[:, :, : mask.kv_length]
        workload = Workload.from_tensors(q, k, v, block_sizes(self.cab_settings))
        for query_slice, part_mask in mask.split_at_prompt_end(has_separate_decode_steps=False):
            call = Call(
                q=q[:, :, query_slice],
                k=k,
                v=v,
                scale=self.scale,
                layer=self.cab_layer,
                config=self.cab_settings,
                is_sparse=True,
                workload=workload,
                mask=part_mask,
            )
            out[query_slice] = dispatch(call)[0].transpose(0, 1).reshape_as(out[query_slice])

    def measure_memory(self, query: Tensor) -> None:
        """Compute sparse attention of the last chunk of the longest prompt, and drop the result.

        Called while vLLM measures memory, so that the measurement includes sparse attention.

        Args:
            query: the queries of vLLM's dummy batch, [T, H, D].
        """
        max_prompt_tokens = self.model_config.max_model_len
        q = query[:max_prompt_tokens]
        # two pairs of K and V: the first pair takes as much memory as the pages of the prompt, the
        # second pair represents the gathered keys and values
        shape = (2, 2, 1, self.num_kv_heads, max_prompt_tokens, self.head_size)
        _, (k, v) = query.new_zeros(shape)
        mask = MaskInfo(
            batch=1,
            q_length=len(q),
            kv_length=max_prompt_tokens,
            q_offset=max_prompt_tokens - len(q),
            prompt=Prompt(max_prompt_tokens),
        )
        self.attend(q, k, v, mask=mask, out=torch.empty_like(q))


if current_platform.is_cpu():
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as ParentBackend

    # instruction sets for which a page of one head has keys [D, page] and values [page, D]
    TRANSPOSED_ISAS = ("vec", "vec16")

    @lru_cache
    def page_element_indices(
        isa: str, dtype: torch.dtype, page_size: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Return the index in a page of each element of its keys and of its values.

        vLLM packs the elements of several tokens and channels together for matrix instructions
        (AMX, BFMMLA). `page_element_indices` lets vLLM write a page of token numbers and a page of
        channel numbers, and reads the layout from these pages.

        Args:
            isa: instruction set that determines the layout.
            dtype: dtype of the KV cache, of 2 or 4 bytes.
            page_size: tokens per page.
            head_dim: channels per head.

        Returns:
            (keys, values), int64 [page * D] each: the index of element token * D + channel in the
            flattened page of one head.

        Raises:
            NotImplementedError: a page does not contain every element unchanged.
        """
        integer_dtype = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        page_slots = torch.arange(page_size)
        token_numbers = page_slots.view(-1, 1, 1).expand(-1, 1, head_dim)
        channel_numbers = torch.arange(head_dim).expand(page_size, 1, -1)
        stored_numbers = []
        for numbers_to_store in (token_numbers, channel_numbers):
            # [1, H_kv = 1, 2 * page, D], the cache of one page
            page_cache = torch.zeros(1, 1, 2 * page_size, head_dim, dtype=dtype)
            key_cache, value_cache = page_cache.chunk(2, dim=2)
            written_values = numbers_to_store.to(integer_dtype).contiguous().view(dtype)
            ops.cpu_attn_reshape_and_cache(
                written_values, written_values, key_cache, value_cache, page_slots, isa
            )
            stored_numbers.append(page_cache.view(integer_dtype).view(2, -1).long())
        # element of keys and of values at each index of the page, [2, page * D]
        element_at_index = stored_numbers[0] * head_dim + stored_numbers[1]
        if not torch.equal(
            element_at_index.sort(-1).values, torch.arange(page_size * head_dim).expand(2, -1)
        ):
            raise NotImplementedError(
                f"KV cache must have a known layout, got an unknown layout for {isa!r} in {dtype}. "
                "Use dtype float32."
            )
        key_indices, value_indices = element_at_index.argsort(-1)
        return key_indices, value_indices

    def gather_pages(kv_cache: Tensor, page_ids: Tensor, isa: str | None) -> tuple[Tensor, Tensor]:
        """Copy K and V from pages, [H_kv, P * page, D] each.

        Args:
            kv_cache: [all pages, H_kv, page, 2 * D]; in vLLM 0.22 [2, all pages, H_kv, page, D].
            page_ids: int64 [P], indices of pages in the order of the tokens.
            isa: instruction set that determines the layout of a page.
        """
        if kv_cache.dim() == 5:
            k, v = (x[page_ids] for x in kv_cache)
        else:
            k, v = kv_cache[page_ids].unflatten(3, (2, -1)).flatten(2, 3).chunk(2, dim=2)
        page_size, head_dim = k.shape[2:]
        if isa in TRANSPOSED_ISAS:
            k = k.reshape(*k.shape[:2], head_dim, page_size).transpose(2, 3)
        else:
            element_indices = page_element_indices(isa, k.dtype, page_size, head_dim)
            k, v = (
                x.flatten(2).index_select(2, element_index).unflatten(2, (page_size, head_dim))
                for x, element_index in zip((k, v), element_indices, strict=True)
            )
        return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)

else:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as ParentBackend

    def gather_pages(kv_cache: Tensor, page_ids: Tensor, isa: str | None) -> tuple[Tensor, Tensor]:
        """Copy K and V from pages, [H_kv, P * page, D] each, as views of one copy.

        The copy has the order of the pages in memory, in which the heads of a token are adjacent.

        Args:
            kv_cache: [all pages, H_kv, page, 2 * D]. In vLLM 0.22, K and V are in dimension 0:
                [2, all pages, page, H_kv, D]. In vLLM 0.23 to 0.25, they are in dimension 1.
            page_ids: int64 [P], indices of pages in the order of the tokens.
            isa: not used, because a GPU has one layout.
        """
        if kv_cache.dim() == 4:
            return kv_cache.transpose(1, 2)[page_ids].flatten(0, 1).transpose(0, 1).chunk(2, dim=-1)
        k, v = kv_cache.unbind(0 if kv_cache.shape[0] == 2 else 1)
        return k[page_ids].flatten(0, 1).transpose(0, 1), v[page_ids].flatten(0, 1).transpose(0, 1)


class CabBuilder(SparseBuilder, ParentBackend.get_builder_cls()):
    """The metadata builder of vLLM's backend, extended to find the sparse prompts of a batch."""


class CabImpl(SparseImpl, ParentBackend.get_impl_cls()):
    """The attention of one layer in vLLM's backend, extended to compute prompts sparsely."""


class CabBackend(ParentBackend):
    """The attention backend that `cab_hf.vllm.register` adds to vLLM's registry of backends."""

    get_name = staticmethod(backend_name)
    get_impl_cls = staticmethod(lambda: CabImpl)
    get_builder_cls = staticmethod(lambda: CabBuilder)
