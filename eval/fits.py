"""Estimate the longest prompts of a model that fit on a GPU, from its config alone.

The model is called on torch's meta device, where tensors have shapes and no memory. The estimate
counts live bytes: the keys and values that each layer caches, the bytes when a layer attends, and
the peak. All grow with the number of tokens. The memory for CAB's block selection is added.
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
from cab_hf.eval.kv_cache import read_on
from cab_hf.eval.report import markdown_table
from cab_hf.experiment import models
from cab_hf.experiment.settings import (
    UsageError,
    first_line,
    flag,
    option,
    parse_length,
    read_settings,
    refused_as,
    require,
)
from cab_hf.finetune.cost_model import GIB
from cab_hf.hf.fit import positions
from cab_hf.hf.model_config import cab_config_of
from cab_hf.selection.compact import LIST_BYTES
from cab_hf.selection.tiles import SCRATCH_BYTES

DYNAMIC, STATIC, OFFLOADED = CACHES = ("dynamic", "static", "offloaded")
COUNTING = "cab_counting"  # the attention that computes nothing
TOKENS = 2**13  # tokens of the counted call: so long that the logits of one token are negligible
STEP = 128  # lengths are multiples of it
MOST = 2**31 // STEP
FRAGMENTS = (
    "Whole prompts need PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment; "
    "without it the longest prompts that ran were a sixth shorter."
)
LIBRARIES = 2**25  # bytes that cuBLAS reserves on a Hopper GPU
CUDA_GIB = 0.6  # GiB of a GPU that no tensor can use, on an H100 and an H200


@dataclass(frozen=True)
class Settings:
    """Options of the command. A ValueError contains the name of the option."""

    model: str = option("", "name or folder of the model; only its config is read")
    gpu_gib: float = option(24.0, "GiB of memory of the GPU", float)
    chunk: int = option(8192, "tokens per chunk, for prompts that are read in chunks", parse_length)
    trust_remote_code: bool = flag("run Python code that comes with the model")

    def __post_init__(self) -> None:
        require(self, "model", self.model, "the name or folder of a model")
        require(self, "gpu_gib", self.gpu_gib > 0, "more than 0")
        require(self, "chunk", self.chunk > 0, "at least 1")


class Alive(TorchDispatchMode):
    """A dispatch mode that counts bytes of tensors made inside.

    Attributes:
        now, most: bytes of live tensors, and their peak.
        attending: the peak at the start of a layer's attention.
        heads: (query heads, KV heads, head dim) of each kind of layer that has attended.
        output, pair: the largest bytes of an attention output, and of its keys and values.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.most = self.attending = self.output = self.pair = 0
        self.heads: set[tuple[int, int, int]] = set()
        # weights and their views are counted separately
        kept = (*model.parameters(), *model.buffers())
        self._known = {x.untyped_storage()._cdata for x in kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def attend(self, _: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> Any:
        """Return an attention output of the right shape."""
        self.attending = max(self.attending, self.now)
        self.heads.add((q.shape[1], k.shape[1], q.shape[3]))
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        self.output, self.pair = max(self.output, out.nbytes), max(self.pair, k.nbytes + v.nbytes)
        return out, None


@contextmanager
def counting(model: Any) -> Iterator[Alive]:
    """Make ``model`` attend by `Alive.attend` inside the block."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    counted = Alive(model)
    ALL_ATTENTION_FUNCTIONS[COUNTING] = counted.attend
    try:
        model.set_attn_implementation(COUNTING)
        with torch.no_grad(), counted:
            yield counted
    finally:
        del ALL_ATTENTION_FUNCTIONS[COUNTING]


class Needed(NamedTuple):
    """Bytes while a prompt is read: on the GPU, and on its host."""

    weights: float
    cache: float
    workspace: float
    host: float

    @property
    def total(self) -> float:
        """The total on the GPU."""
        return self.weights + self.cache + self.workspace


@dataclass(frozen=True)
class Prompts:
    """The memory that prompts of a model need, in bfloat16.

    Attributes:
        weights: bytes of all weights and buffers.
        layers: for each layer that caches keys and values, the bytes per token and the tokens of
            its sliding window; None without a window.
        most, attending: bytes per token in addition to the cache, and those at the start of a
            layer's attention.
        output: the part of ``attending`` in attention outputs.
        expanded: the part of ``attending`` in keys and values that a layer expands from a smaller
            cache.
        heads: as in `Alive`.
    """

    weights: int
    layers: tuple[tuple[int, int | None], ...]
    most: float
    attending: float
    output: float
    expanded: float
    heads: frozenset[tuple[int, int, int]]
    config: CabConfig

    @classmethod
    def of(cls, model_config: Any, trust_remote_code: bool = False) -> Prompts:
        """Measure a model's config; UsageError if the model cannot be called on the meta device."""
        # transformers records the attention of a model in its config
        config = copy.deepcopy(model_config)
        model = models.skeleton(config, trust_remote_code, dtype=torch.bfloat16)
        with refused_as(partial(_not_called, model.config.model_type)):
            layers = _cached(model)
            counted = _read(model, TOKENS)
        a_layer = max((size for size, _ in layers), default=0)
        pair = counted.pair / TOKENS
        return cls(
            weights=sum(x.nbytes for x in (*model.parameters(), *model.buffers())),
            layers=layers,
            most=counted.most / TOKENS,
            attending=counted.attending / TOKENS,
            output=counted.output / TOKENS,
            expanded=pair if pair > a_layer else 0.0,
            heads=frozenset(counted.heads),
            config=cab_config_of(model.config.get_text_config()),
        )

    def needed(self, length: int, chunk: int | None, cache: str) -> Needed:
        """Return the memory of a prompt of ``length`` tokens, whole or in chunks of ``chunk``."""
        kept = [size * min(length, window or length) for size, window in self.layers]
        largest, resident, host = max(kept, default=0), sum(kept), 0
        if cache == OFFLOADED:
            # the computing layer and the next one; sliding windows stay on the GPU
            host = sum(n for n, (_, window) in zip(kept, self.layers, strict=True) if not window)
            resident = min(resident, resident - host + 2 * largest)
        if cache != STATIC and chunk is not None:
            # keys, and then values, are copied to append them to those of the chunk before
            resident += largest // 2
        tokens = min(length, chunk or length)
        return Needed(self.weights, resident, self.workspace(tokens, length), host)

    def workspace(self, tokens: int, length: int) -> float:
        """Return bytes of a layer that computes ``tokens`` at once, the last ones of ``length``."""
        chosen = max((self.choosing(*each, tokens, length) for each in self.heads), default=0)
        attending = self.attending * tokens + self.expanded * (length - tokens)
        # an output may exist in two memory orders
        attending += max(chosen, 2 * self.output * tokens)
        return max(self.most * tokens, attending) + LIBRARIES

    def choosing(self, heads: int, kv_heads: int, dim: int, tokens: int, length: int) -> float:
        """Return bytes for selecting blocks for ``tokens`` queries, the last ones of ``length``.

        Keys and rows are scored in 8 bits, as on GPUs that support it.
        """
        config = self.config
        typical = num_typical_queries(config)
        rows = config.outlier_queries + typical
        q_blocks = heads * -(-tokens // config.query_block)
        k_blocks = -(-length // config.key_block)
        # half of the pairs of a whole sequence are never visible
        scratch = 2 * q_blocks * rows * k_blocks / (2 if tokens == length else 1)
        lists = min(4 * q_blocks * k_blocks, LIST_BYTES)
        # outliers use half of the channels; each row has bounds and scales
        scored = dim * (config.outlier_queries / 2 + typical) + 16 * rows
        keys = kv_heads * dim * length
        return keys + q_blocks * scored + max(min(scratch, SCRATCH_BYTES), lists)

    def longest(self, room: float, chunk: int | None, cache: str) -> int:
        """Return the longest prompt that fits into ``room`` bytes, a multiple of `STEP`, or 0."""

        def total(steps: int) -> float:
            return self.needed(STEP * steps, chunk, cache).total

        return STEP * max(0, bisect_right(range(MOST), room, key=total) - 1)


def _not_called(model_type: str, error: Exception) -> str:
    return (
        f"model type {model_type} cannot be called on torch's meta device ({first_line(error)}), "
        "so its memory is unknown. Give another model."
    )


def _cached(model: Any) -> tuple[tuple[int, int | None], ...]:
    """Return `Prompts.layers` of a model on the meta device."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config())
    with counting(model):
        read_on(model, torch.zeros(1, STEP, dtype=torch.int64, device="meta"), cache)
    # other cache layers have a state of constant size
    kept = [x for x in cache.layers if isinstance(getattr(x, "keys", None), Tensor)]
    return tuple(
        ((x.keys.nbytes + x.values.nbytes) // x.keys.shape[2], getattr(x, "sliding_window", None))
        for x in kept
        if x.keys.ndim == 4
    )


def _read(model: Any, tokens: int) -> Alive:
    """Count live bytes while a model on the meta device reads ``tokens`` without a cache."""
    with counting(model) as counted:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        model(ids, use_cache=False, logits_to_keep=1)
    return counted


def table(prompts: Prompts, room: float, chunk: int) -> str:
    """Return a table of the longest prompts that fit into ``room`` bytes, by chunking and cache."""
    rows = []
    for at_a_time in (None, chunk):
        for cache in CACHES:
            length = prompts.longest(room, at_a_time, cache)
            needed = prompts.needed(length, at_a_time, cache)
            rows.append(
                {
                    "prompt": "whole" if at_a_time is None else f"in chunks of {chunk:,}",
                    "cache": cache,
                    "longest prompt, tokens": f"{length:,}",
                    "KV cache GiB": needed.cache / GIB,
                    "workspace GiB": needed.workspace / GIB,
                    "host GiB": needed.host / GIB,
                }
            )
    return markdown_table(rows, list(rows[0]))


def report(prompts: Prompts, settings: Settings, reach: int | None) -> str:
    """Return the printed text; UsageError if the weights alone do not fit."""
    room_gib, weights = max(0.0, settings.gpu_gib - CUDA_GIB), prompts.weights / GIB
    if weights > room_gib:
        raise UsageError(
            f"gpu_gib must be large enough for the weights of {weights:.1f} GiB, got "
            f"{settings.gpu_gib:g}, of which tensors may use {room_gib:.1f}. Use a GPU with more "
            "memory, or a smaller model."
        )
    lines = [
        f"Weights in bfloat16: {weights:.2f} GiB of {room_gib:.1f} GiB that tensors may use.",
        table(prompts, room_gib * GIB, settings.chunk),
        FRAGMENTS,
    ]
    if reach is not None:
        lines.append(f"The model has {reach:,} positions.")
    return "\n\n".join(lines)


def main(words: Sequence[str]) -> int:
    """Print the estimate; return the exit status."""
    settings = read_settings(Settings, words, f"{PROG} fits", __doc__.partition("\n")[0])
    config = models.load_config(settings.model, settings.trust_remote_code)
    prompts = Prompts.of(config, settings.trust_remote_code)
    print(report(prompts, settings, positions(config)))
    return 0
