"""Estimate the longest prompts of a model that fit on a GPU, from the model's config alone.

The model runs on torch's meta device, where tensors have shapes and no memory. The command counts
the bytes of live tensors: cached keys and values per layer, all tensors at the start of a layer's
attention, and the peak. Estimates for other prompt lengths scale the counts with the number of
tokens, and add the memory for CAB's block selection.
"""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cab_hf.config import CabConfig, num_typical_queries
from cab_hf.eval.experiment import PROG
from cab_hf.eval.kv_cache import read_with_cache
from cab_hf.eval.report import markdown_table
from cab_hf.experiment import models
from cab_hf.experiment.settings import (
    UsageError,
    convert_errors,
    first_line,
    flag,
    option,
    parse_length,
    read_settings,
    require,
)
from cab_hf.finetune.cost_model import GIB
from cab_hf.hf.fit import max_positions
from cab_hf.hf.model_config import cab_config_of
from cab_hf.selection.compact import MAX_LIST_BYTES
from cab_hf.selection.tiles import compute_max_scratch_bytes

DYNAMIC_CACHE, STATIC_CACHE, OFFLOADED_CACHE = CACHE_KINDS = ("dynamic", "static", "offloaded")
# name of an attention function that counts bytes and computes nothing
COUNTING_ATTENTION = "cab_counting"
# tokens of the call whose bytes are counted; the logits of its last token are a negligible part
NUM_COUNTED_TOKENS = 2**13
LENGTH_STEP = 128  # estimated lengths are multiples of this number of tokens
MAX_LENGTH_STEPS = 2**31 // LENGTH_STEP  # largest estimated length, divided by LENGTH_STEP
FRAGMENTATION_NOTE = (
    "Whole prompts need PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment; "
    "without it the longest prompts that ran were a sixth shorter."
)
LIBRARY_BYTES = 2**25  # bytes that cuBLAS reserves on a Hopper GPU
CUDA_GIB = 0.6  # GiB of a GPU that no tensor can use, on an H100 and an H200


@dataclass(frozen=True)
class Settings:
    """Options of ``cab_hf.eval fits``."""

    model: str = option("", "name or folder of the model; only its config is read")
    gpu_gib: float = option(24.0, "GiB of memory of the GPU", float)
    chunk: int = option(8192, "tokens per chunk, for prompts that are read in chunks", parse_length)
    trust_remote_code: bool = flag("run Python code that comes with the model")

    def __post_init__(self) -> None:
        require(self, "model", self.model, "the name or folder of a model")
        require(self, "gpu_gib", self.gpu_gib > 0, "more than 0")
        require(self, "chunk", self.chunk > 0, "at least 1")


class LiveBytesCounter(TorchDispatchMode):
    """A dispatch mode that counts the bytes of live tensors.

    Attributes:
        current_bytes: bytes of tensors that are live at present, without the weights of the model.
        peak_bytes: the largest value of ``current_bytes`` so far.
        attention_start_bytes: the largest value of ``current_bytes`` at the start of a layer's
            attention.
        head_shapes: the distinct (query heads, KV heads, head dim) of all layers.
        output_bytes: bytes of the largest attention output of a layer.
        kv_bytes: bytes of k plus v in the layer where their sum is largest.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.current_bytes = self.peak_bytes = self.attention_start_bytes = self.output_bytes = (
            self.kv_bytes
        ) = 0
        self.head_shapes: set[tuple[int, int, int]] = set()
        # storages that `_add_storage` ignores: those of weights, which views of weights have too,
        # and those of live tensors that are already counted
        weights = (*model.parameters(), *model.buffers())
        self._storages = {tensor.untyped_storage()._cdata for tensor in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result):
            if isinstance(output, Tensor):
                self._add_storage(output.untyped_storage())
        return result

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        """Add the bytes of a new storage to the counts, and subtract them when it is freed."""
        if storage._cdata in self._storages:
            return
        self._storages.add(storage._cdata)
        self.current_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._drop_storage, storage._cdata, storage.nbytes())

    def _drop_storage(self, storage_id: int, num_bytes: int) -> None:
        self._storages.discard(storage_id)
        self.current_bytes -= num_bytes

    def attend(self, _: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> Any:
        """Record the sizes of a layer's attention, and return an output of the right shape.

        The signature is that of transformers' attention functions.
        """
        self.attention_start_bytes = max(self.attention_start_bytes, self.current_bytes)
        self.head_shapes.add((q.shape[1], k.shape[1], q.shape[3]))
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        self.output_bytes, self.kv_bytes = (
            max(self.output_bytes, out.nbytes),
            max(self.kv_bytes, k.nbytes + v.nbytes),
        )
        return out, None


@contextmanager
def count_live_bytes(model: Any) -> Iterator[LiveBytesCounter]:
    """Yield a `LiveBytesCounter` that counts the tensors of calls of ``model`` inside the block.

    `LiveBytesCounter.attend` replaces the attention of ``model``, which is not restored after the
    block.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    live_bytes = LiveBytesCounter(model)
    ALL_ATTENTION_FUNCTIONS[COUNTING_ATTENTION] = live_bytes.attend
    try:
        model.set_attn_implementation(COUNTING_ATTENTION)
        with torch.no_grad(), live_bytes:
            yield live_bytes
    finally:
        del ALL_ATTENTION_FUNCTIONS[COUNTING_ATTENTION]


class PromptMemory(NamedTuple):
    """The memory for reading a prompt.

    Attributes:
        weight_bytes: bytes of weights and buffers, on the GPU.
        cache_bytes: bytes of cached keys and values on the GPU.
        workspace_bytes: bytes of other tensors on the GPU.
        host_bytes: bytes of cached keys and values in host memory.
    """

    weight_bytes: float
    cache_bytes: float
    workspace_bytes: float
    host_bytes: float

    @property
    def total_bytes(self) -> float:
        """All bytes on the GPU."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes


@dataclass(frozen=True)
class MemoryModel:
    """The sizes from which `estimate_memory` computes the memory for a prompt, in bfloat16.

    Attributes:
        weight_bytes: bytes of all weights and buffers.
        cache_layers: (bytes per cached token, tokens of the sliding window) of each layer that
            caches keys and values; the second is None without a window.
        peak_token_bytes: peak bytes of live tensors per token, without weights and cache.
        attention_token_bytes: bytes of live tensors per token at the start of a layer's
            attention, without weights and cache.
        output_token_bytes: bytes per token of the attention output of a layer.
        expanded_token_bytes: bytes per token of the keys and values that a layer computes from a
            smaller cached state, as in latent attention; 0 if the keys and values themselves are
            cached. These bytes are a part of ``attention_token_bytes``.
        head_shapes: the distinct (query heads, KV heads, head dim) of all layers.
        config: the config with which the model attends by CAB.
    """

    weight_bytes: int
    cache_layers: tuple[tuple[int, int | None], ...]
    peak_token_bytes: float
    attention_token_bytes: float
    output_token_bytes: float
    expanded_token_bytes: float
    head_shapes: frozenset[tuple[int, int, int]]
    config: CabConfig

    @classmethod
    def from_config(cls, model_config: Any, trust_remote_code: bool = False) -> MemoryModel:
        """Build the model on the meta device, run it, and return the counted sizes.

        Args:
            model_config: the transformers config of the model.
            trust_remote_code: True to run Python code that comes with the model.

        Raises:
            UsageError: the model does not run on the meta device.
        """
        # copy the config, because `count_live_bytes` changes the attention implementation in it
        config = copy.deepcopy(model_config)
        model = models.build_skeleton(config, trust_remote_code, dtype=torch.bfloat16)
        with convert_errors(partial(_describe_call_error, model.config.model_type)):
            cache_layers = _count_cache_layers(model)
            live_bytes = _count_prompt_bytes(model, NUM_COUNTED_TOKENS)
        max_cache_token_bytes = max((token_bytes for token_bytes, _ in cache_layers), default=0)
        kv_token_bytes = live_bytes.kv_bytes / NUM_COUNTED_TOKENS
        return cls(
            weight_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
            cache_layers=cache_layers,
            peak_token_bytes=live_bytes.peak_bytes / NUM_COUNTED_TOKENS,
            attention_token_bytes=live_bytes.attention_start_bytes / NUM_COUNTED_TOKENS,
            output_token_bytes=live_bytes.output_bytes / NUM_COUNTED_TOKENS,
            expanded_token_bytes=kv_token_bytes if kv_token_bytes > max_cache_token_bytes else 0.0,
            head_shapes=frozenset(live_bytes.head_shapes),
            config=cab_config_of(model.config.get_text_config()),
        )

    def estimate_memory(self, length: int, chunk: int | None, cache_kind: str) -> PromptMemory:
        """Return the memory that reading a prompt needs.

        Args:
            length: tokens of the prompt.
            chunk: tokens per call; None: the whole prompt in one call.
            cache_kind: one of `CACHE_KINDS`.
        """
        layer_bytes = [
            token_bytes * min(length, window or length) for token_bytes, window in self.cache_layers
        ]
        largest_layer_bytes, cache_bytes, host_bytes = (
            max(layer_bytes, default=0),
            sum(layer_bytes),
            0,
        )
        if cache_kind == OFFLOADED_CACHE:
            # keys and values of two layers are on the GPU at a time; sliding windows always are
            host_bytes = sum(
                num_bytes
                for num_bytes, (_, window) in zip(layer_bytes, self.cache_layers, strict=True)
                if not window
            )
            cache_bytes = min(cache_bytes, cache_bytes - host_bytes + 2 * largest_layer_bytes)
        if cache_kind != STATIC_CACHE and chunk is not None:
            # appending a chunk copies the keys of a layer, and then its values: half of the layer's
            # cache exists twice
            cache_bytes += largest_layer_bytes // 2
        last_call_tokens = min(length, chunk or length)
        return PromptMemory(
            weight_bytes=self.weight_bytes,
            cache_bytes=cache_bytes,
            workspace_bytes=self.estimate_workspace_bytes(last_call_tokens, length),
            host_bytes=host_bytes,
        )

    def estimate_workspace_bytes(self, last_call_tokens: int, length: int) -> float:
        """Return the bytes of tensors on the GPU besides weights and cache.

        Args:
            last_call_tokens: number of tokens in the last call, which reads the end of the prompt.
            length: tokens of the prompt.
        """
        selection_bytes = max(
            (
                self.estimate_selection_bytes(
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    num_queries=last_call_tokens,
                    length=length,
                )
                for heads, kv_heads, head_dim in self.head_shapes
            ),
            default=0,
        )
        attention_bytes = (
            self.attention_token_bytes * last_call_tokens
            + self.expanded_token_bytes * (length - last_call_tokens)
        )
        # the attention output may exist twice, in two memory layouts
        attention_bytes += max(selection_bytes, 2 * self.output_token_bytes * last_call_tokens)
        return max(self.peak_token_bytes * last_call_tokens, attention_bytes) + LIBRARY_BYTES

    def estimate_selection_bytes(
        self, heads: int, kv_heads: int, head_dim: int, num_queries: int, length: int
    ) -> float:
        """Return the bytes for selecting blocks in a layer.

        Keys and scored queries have 8 bits, as on GPUs that support 8-bit products.

        Args:
            heads: query heads.
            kv_heads: KV heads.
            head_dim: head dim.
            num_queries: number of queries that select blocks: the last tokens of the prompt.
            length: tokens of the prompt.
        """
        config = self.config
        num_typical_rows = num_typical_queries(config)
        num_scored_rows = config.outlier_queries + num_typical_rows
        num_q_blocks = heads * -(-num_queries // config.query_block)
        num_k_blocks = -(-length // config.key_block)
        # if all queries are in one call, causality excludes half of the pairs of blocks
        scratch_bytes = (
            2 * num_q_blocks * num_scored_rows * num_k_blocks / (2 if num_queries == length else 1)
        )
        list_bytes = min(4 * num_q_blocks * num_k_blocks, MAX_LIST_BYTES)
        # outlier queries are scored by half of the channels; each scored query also has 16 bytes of
        # bounds and scales
        bytes_per_q_block = (
            head_dim * (config.outlier_queries / 2 + num_typical_rows) + 16 * num_scored_rows
        )
        key_bytes = kv_heads * head_dim * length
        return (
            key_bytes
            + num_q_blocks * bytes_per_q_block
            + max(min(scratch_bytes, compute_max_scratch_bytes(num_queries, length)), list_bytes)
        )

    def find_longest_prompt(
        self, available_bytes: float, chunk: int | None, cache_kind: str
    ) -> int:
        """Return the tokens of the longest prompt that fits, or 0; a multiple of `LENGTH_STEP`.

        Args:
            available_bytes: available bytes on the GPU, for weights, cache and workspace.
            chunk, cache_kind: as in `estimate_memory`.
        """

        def estimate_total_bytes(num_steps: int) -> float:
            return self.estimate_memory(LENGTH_STEP * num_steps, chunk, cache_kind).total_bytes

        return LENGTH_STEP * max(
            0, bisect_right(range(MAX_LENGTH_STEPS), available_bytes, key=estimate_total_bytes) - 1
        )


def _describe_call_error(model_type: str, error: Exception) -> str:
    """Return the message for a model that does not run on the meta device."""
    return (
        f"model type {model_type} cannot be called on torch's meta device ({first_line(error)}), "
        "so its memory is unknown. Give another model."
    )


def _count_cache_layers(model: Any) -> tuple[tuple[int, int | None], ...]:
    """Return (bytes per cached token, tokens of the window or None) of each layer with a cache.

    The result is that of `MemoryModel.cache_layers`.

    Args:
        model: a model on the meta device.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config())
    with count_live_bytes(model):
        read_with_cache(model, torch.zeros(1, LENGTH_STEP, dtype=torch.int64, device="meta"), cache)
    # cache layers without keys, such as linear attention, have a state of constant size
    layers = [layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), Tensor)]
    return tuple(
        (
            (layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[2],
            getattr(layer, "sliding_window", None),
        )
        for layer in layers
        if layer.keys.ndim == 4
    )


def _count_prompt_bytes(model: Any, num_tokens: int) -> LiveBytesCounter:
    """Call ``model`` with ``num_tokens`` tokens and no cache, and return the counted bytes."""
    with count_live_bytes(model) as live_bytes:
        ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
        model(ids, use_cache=False, logits_to_keep=1)
    return live_bytes


def make_table(memory_model: MemoryModel, available_bytes: float, chunk: int) -> str:
    """Return a Markdown table of the longest prompts that fit, by chunking and kind of cache.

    Args:
        memory_model: the sizes of the model.
        available_bytes: available bytes on the GPU.
        chunk: tokens per chunk, for prompts that are read in chunks.
    """
    rows = []
    for call_tokens in (None, chunk):
        for cache_kind in CACHE_KINDS:
            length = memory_model.find_longest_prompt(available_bytes, call_tokens, cache_kind)
            memory = memory_model.estimate_memory(length, call_tokens, cache_kind)
            rows.append(
                {
                    "prompt": "whole" if call_tokens is None else f"in chunks of {chunk:,}",
                    "cache": cache_kind,
                    "longest prompt, tokens": f"{length:,}",
                    "KV cache GiB": memory.cache_bytes / GIB,
                    "workspace GiB": memory.workspace_bytes / GIB,
                    "host GiB": memory.host_bytes / GIB,
                }
            )
    return markdown_table(rows, list(rows[0]))


def make_report(
    memory_model: MemoryModel, settings: Settings, max_positions_of_model: int | None
) -> str:
    """Return the text that the command prints.

    Args:
        memory_model: the sizes of the model.
        settings: options of the command.
        max_positions_of_model: largest number of positions of the model; None without a limit.

    Raises:
        UsageError: the weights alone do not fit.
    """
    available_gib, weights_gib = (
        max(0.0, settings.gpu_gib - CUDA_GIB),
        memory_model.weight_bytes / GIB,
    )
    if weights_gib > available_gib:
        raise UsageError(
            f"gpu_gib must be large enough for the weights of {weights_gib:.1f} GiB, got "
            f"{settings.gpu_gib:g}, of which tensors may use {available_gib:.1f}. Use a GPU with "
            "more "
            "memory, or a smaller model."
        )
    paragraphs = [
        f"Weights in bfloat16: {weights_gib:.2f} GiB of {available_gib:.1f} GiB that tensors may "
        "use.",
        make_table(memory_model, available_gib * GIB, settings.chunk),
        FRAGMENTATION_NOTE,
    ]
    if max_positions_of_model is not None:
        paragraphs.append(f"The model has {max_positions_of_model:,} positions.")
    return "\n\n".join(paragraphs)


def main(arguments: Sequence[str]) -> int:
    """Run the command with the options ``arguments``; return the exit status."""
    settings = read_settings(Settings, arguments, f"{PROG} fits", __doc__.partition("\n")[0])
    config = models.load_config(settings.model, settings.trust_remote_code)
    memory_model = MemoryModel.from_config(config, settings.trust_remote_code)
    print(make_report(memory_model, settings, max_positions(config)))
    return 0
