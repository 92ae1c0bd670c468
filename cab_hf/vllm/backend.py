"""An attention backend of vLLM with sparse attention for long prompts.

The backend gathers keys and values of a prompt, or of a chunk, from pages and computes a `Call`.
The parent backend computes all other requests, as a separate batch.
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
from cab_hf.config import blocks_of
from cab_hf.dispatch import dispatch
from cab_hf.engines import TRITON, Workload
from cab_hf.engines import choose as choose_engine
from cab_hf.plan import DENSE_BLOCK_SIZE
from cab_hf.predictors import make_predictor
from cab_hf.vllm import PLAIN_CACHES, backend_name, settings_of
from cab_hf.vllm.layers import Layer
from cab_hf.vllm.metrics import METERS
from cab_hf.vllm.runner import BATCH, watch


class Split(NamedTuple):
    """The requests of a batch, divided into sparse prompts and others.

    Attributes:
        prompts: (rows, pages, mask) of every prompt that is attended sparsely.
        isa: instruction set for which vLLM lays out the KV cache on a CPU; None on a GPU.
        rest: the parent's metadata of the other requests; None if there are none.
        rows: int64 [T], tokens of the other requests in the batch; None if there are none.
    """

    prompts: list[tuple[slice, Tensor, MaskInfo]]
    isa: str | None = None
    rest: Any = None
    rows: Tensor | None = None


class SparseBuilder:
    """A mixin for the parent's metadata builder that selects the sparse prompts of a batch."""

    # only batches that decode are captured whole; other attention runs between graphs
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    # a `Split` contains the pages of one group of layers, so metadata cannot be shared
    supports_update_block_table = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec, dtype = self.kv_cache_spec, self.vllm_config.model_config.dtype
        # vLLM derives a builder for layers whose batches it rewrites. Lengths and pages then
        # differ: Llama 4 has chunks of tokens as requests, other models sinks before each request
        is_rewritten = type(self) is not CabBuilder
        local = ("sliding_window", "attention_chunk_size")
        is_local = any(getattr(spec, name, None) for name in local)
        self.cab = None if is_rewritten or is_local else settings_of(self.vllm_config)
        if self.cab is not None and spec.dtype.itemsize > 1:
            # refuse an unknown layout of the KV cache before the first prompt
            page = torch.empty(1, 1, spec.block_size, 2 * spec.head_size, dtype=spec.dtype)
            gather(page, torch.tensor([0]), getattr(self, "isa", None))
        work = Workload(self.device.type, spec.head_size, dtype, False, *(DENSE_BLOCK_SIZE,) * 2)
        # prompts have many different lengths, and SDPA's fastest kernels need preparation for each
        self.dense_block_size = None if TRITON.unavailable(work) else DENSE_BLOCK_SIZE

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build=False) -> Any:
        """Return the parent's metadata; its ``cab`` is the `Split` of the batch, or None."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)
        metadata.cab = None
        if self.cab is None or common.causal is not True:
            return metadata
        starts, known = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound
        lengths = (common.seq_lens.cpu() if known is None else known).tolist()
        least = max(self.cab.min_length, self.cab.query_block)
        # tokens of an image attend to each other in both directions
        images = getattr(common, "mm_req_doc_ranges", None) or {}
        prompts, rest = [], []
        for at, end in enumerate(BATCH.prompts[: common.num_reqs]):
            rows, length = slice(starts[at], starts[at + 1]), lengths[at]
            count = rows.stop - rows.start
            if count and end >= least and length - count < end and not images.get(at):
                pages = common.block_table_tensor[at, : -(-length // self.kv_cache_spec.block_size)]
                prompts.append((rows, pages.long(), self._mask(at, count, length, end)))
            elif count:
                rest.append(at)
        if prompts:
            others, rows = self._some(common, rest, starts) if rest else (None, None)
            isa = getattr(self, "isa", None)
            metadata.cab = Split(prompts=prompts, isa=isa, rest=others, rows=rows)
        return metadata

    def _mask(self, at: int, count: int, length: int, end: int) -> MaskInfo:
        """Return the mask of the ``count`` latest of ``length`` tokens of request ``at``."""
        key = at, count, length, end, self.dense_block_size
        if key not in BATCH.mask_cache:
            BATCH.mask_cache[key] = MaskInfo(
                batch=1,
                q_length=count,
                kv_length=length,
                q_offset=length - count,
                prompt=Prompt(end),
                details=MaskDetails(dense_block_size=self.dense_block_size),
            )
            if length >= end:
                METERS[self.vllm_config.instance_id].count_prompt()
        return BATCH.mask_cache[key]

    def _some(self, common: Any, requests: list[int], starts: list[int]) -> tuple[Any, Tensor]:
        """Return the parent's metadata of some requests, and their rows in the batch, int64 [T]."""
        there = torch.tensor(requests)
        counts = common.query_start_loc_cpu.diff()[there]
        borders = torch.cat([counts.new_zeros(1), counts.cumsum(0).to(counts.dtype)])
        rows = torch.cat([torch.arange(*starts[at : at + 2]) for at in requests])
        # pinned memory: the host does not wait for the device
        gpu, device = common.seq_lens.is_cuda, common.seq_lens.device
        pinned = (x.pin_memory() if gpu else x for x in (there, borders, rows))
        here, begins, rows = (x.to(device, non_blocking=True) for x in pinned)
        on_host = ("seq_lens_cpu_upper_bound", "is_prefilling")
        cut = {x: getattr(common, x)[there] for x in on_host if getattr(common, x) is not None}
        images = getattr(common, "mm_req_doc_ranges", None)
        if images is not None:
            cut["mm_req_doc_ranges"] = {
                new: images.get(old) or [] for new, old in enumerate(requests)
            }
        some = common.replace(
            query_start_loc=begins,
            query_start_loc_cpu=borders,
            seq_lens=common.seq_lens[here],
            num_reqs=len(requests),
            num_actual_tokens=len(rows),
            max_query_len=int(counts.max()),
            block_table_tensor=common.block_table_tensor[here],
            slot_mapping=common.slot_mapping[rows],
            _num_computed_tokens_cache=None,
            **cut,
        )
        # fast_build: FlashAttention then does not overwrite the buffer of the first build
        return super().build(0, some, True), rows


class SparseImpl:
    """A mixin for the parent's attention of a layer."""

    # set by `learn`, after the model is loaded; a layer of a draft model has none and is dense
    cab_layer: Layer | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        self.model_config, self.cab = vllm_config.model_config, settings_of(vllm_config)
        self.cab_reason = self._why_dense()
        self.is_measured = False
        if self.cab is None:
            return
        watch(vllm_config)
        if self.cab_reason is None:
            make_predictor(self.cab)
            device, dtype = current_platform.device_type, self.model_config.dtype
            work = Workload(device, self.head_size, dtype, False, *blocks_of(self.cab))
            choose_engine(self.cab.engine, work)

    def _why_dense(self) -> str | None:
        """Return why vLLM's own attention computes the layer; None for a layer that is sparse."""
        if self.cab is None:
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
        if self.kv_cache_dtype not in PLAIN_CACHES:
            return f"a cache of {self.kv_cache_dtype}"
        return None

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        """Write the attention of a batch into ``output``; arguments are those of the parent.

        ``key`` and ``value`` are None in a layer that reads the cache of another layer.
        """
        sparse = self.cab_layer is not None and self.cab_reason is None
        sparse = sparse and self.cab_layer.layer_idx not in self.cab.dense_layers
        if sparse and attn_metadata is None and query.is_cuda and not self.is_measured:
            self.is_measured = True
            self.measure(query)
        split = getattr(attn_metadata, "cab", None)
        if split is None or not sparse:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        if split.rest is not None:
            q, k, v = (None if x is None else x[split.rows] for x in (query, key, value))
            out = torch.empty_like(output[: len(split.rows)])
            super().forward(layer, q, k, v, kv_cache, split.rest, out, *args, **kwargs)
            output[split.rows] = out
        for rows, pages, mask in split.prompts:
            k, v = gather(kv_cache, pages, split.isa)
            self.attend(query[rows], k[None], v[None], mask=mask, out=output[rows])
        return output

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskInfo, out: Tensor) -> None:
        """Fill ``out`` [T, H * D_v] for q [T, H, D] over k and v [1, H_kv, N, D] of a prompt."""
        q = q.transpose(0, 1).unsqueeze(0)
        k, v = k[:, :, : mask.kv_length], v[:, :, : mask.kv_length]
        work = Workload.of(q, k, v, blocks_of(self.cab))
        for rows, piece in mask.split_at_prompt_end(steps=False):
            call = Call(
                q=q[:, :, rows],
                k=k,
                v=v,
                scale=self.scale,
                layer=self.cab_layer,
                config=self.cab,
                sparse=True,
                work=work,
                mask=piece,
            )
            out[rows] = dispatch(call)[0].transpose(0, 1).reshape_as(out[rows])

    def measure(self, query: Tensor) -> None:
        """Attend the longest chunk while vLLM measures memory, so that its memory is counted."""
        longest = self.model_config.max_model_len
        q = query[:longest]
        # dummies for the pages, and for the keys and values that are gathered from the pages
        shape = (2, 2, 1, self.num_kv_heads, longest, self.head_size)
        _, (k, v) = query.new_zeros(shape)
        mask = MaskInfo(
            batch=1,
            q_length=len(q),
            kv_length=longest,
            q_offset=longest - len(q),
            prompt=Prompt(longest),
        )
        self.attend(q, k, v, mask=mask, out=torch.empty_like(q))


if current_platform.is_cpu():
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as Parent

    # instruction sets for which a page has keys [D, page] and values [page, D]
    TRANSPOSED = ("vec", "vec16")

    @lru_cache
    def elements_of(isa: str, dtype: torch.dtype, page: int, dim: int) -> tuple[Tensor, Tensor]:
        """Return the places of keys and of values, int64 [page * D] each, in a page of one head.

        vLLM packs the elements of several tokens and channels together for matrix instructions
        (AMX, BFMMLA). Its own function writes the numbers of all tokens and channels into a page,
        which says where each element is.

        Raises:
            NotImplementedError: if an element is not stored unchanged.
        """
        bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        slots = torch.arange(page)
        token = slots.view(-1, 1, 1).expand(-1, 1, dim)
        channel = torch.arange(dim).expand(page, 1, -1)
        elements = []
        for number in (token, channel):
            # [1, H_kv, 2 * page, D], as the cache of one page
            cache = torch.zeros(1, 1, 2 * page, dim, dtype=dtype)
            written = number.to(bits).contiguous().view(dtype)
            ops.cpu_attn_reshape_and_cache(written, written, *cache.chunk(2, dim=2), slots, isa)
            elements.append(cache.view(bits).view(2, -1).long())
        place = elements[0] * dim + elements[1]
        if not torch.equal(place.sort(-1).values, torch.arange(page * dim).expand(2, -1)):
            raise NotImplementedError(
                f"KV cache must have a known layout, got an unknown layout for {isa!r} in {dtype}. "
                "Use dtype float32."
            )
        keys, values = place.argsort(-1)
        return keys, values

    def gather(kv_cache: Tensor, pages: Tensor, isa: str | None) -> tuple[Tensor, Tensor]:
        """Return K and V of these pages, [H_kv, tokens, D] each.

        Args:
            kv_cache: [pages, H_kv, page, 2 * D]; in vLLM 0.22 [2, pages, H_kv, page, D].
            pages: int64 [N], in the order of the tokens.
            isa: instruction set for which vLLM lays out a page.
        """
        if kv_cache.dim() == 5:
            k, v = (x[pages] for x in kv_cache)
        else:
            k, v = kv_cache[pages].unflatten(3, (2, -1)).flatten(2, 3).chunk(2, dim=2)
        page, dim = k.shape[2:]
        if isa in TRANSPOSED:
            k = k.reshape(*k.shape[:2], dim, page).transpose(2, 3)
        else:
            places = elements_of(isa, k.dtype, page, dim)
            k, v = (
                x.flatten(2).index_select(2, place).unflatten(2, (page, dim))
                for x, place in zip((k, v), places, strict=True)
            )
        return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)

else:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as Parent

    def gather(kv_cache: Tensor, pages: Tensor, isa: str | None) -> tuple[Tensor, Tensor]:
        """Return K and V of these pages, [H_kv, tokens, D] each.

        Pages are copied once, as they lie in memory: heads of a token are neighbours.

        Args:
            kv_cache: [pages, H_kv, page, 2 * D]; until vLLM 0.25 with K and V in a dimension of
                their own, the first (0.22) or the second.
            pages: int64 [N], in the order of the tokens.
            isa: None; a GPU has one layout.
        """
        if kv_cache.dim() == 4:
            return kv_cache.transpose(1, 2)[pages].flatten(0, 1).transpose(0, 1).chunk(2, dim=-1)
        k, v = kv_cache.unbind(0 if kv_cache.shape[0] == 2 else 1)
        return k[pages].flatten(0, 1).transpose(0, 1), v[pages].flatten(0, 1).transpose(0, 1)


class CabBuilder(SparseBuilder, Parent.get_builder_cls()):
    """Metadata builder with sparse prompts; the parent builds the rest."""


class CabImpl(SparseImpl, Parent.get_impl_cls()):
    """Attention of a layer with sparse prompts; the parent computes the rest."""


class CabBackend(Parent):
    """The attention backend in vLLM's registry."""

    get_name = staticmethod(backend_name)
    get_impl_cls = staticmethod(lambda: CabImpl)
    get_builder_cls = staticmethod(lambda: CabBuilder)
