"""Estimates of the FLOPs, MFU, density and memory of a training step.

Useful FLOPs count the forward and backward pass over the attended (query, key) pairs, without
recomputation. Dense-equivalent FLOPs count the same step with every causal pair. FLOPs of mixtures
of experts are unknown.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cab_hf.config import CabConfig
from cab_hf.finetune.offload import CHUNK_BYTES
from cab_hf.finetune.tiles import untiled_mlps

GIB = 2**30
# fraction of a device's memory that tensors can use, and of the host's memory that can be pinned
USABLE = PINNABLE = 0.9
# file with the memory limit of a container on Linux
CONTAINER = Path("/sys/fs/cgroup/memory.max")
# assumed number of key blocks in the longest list of a plan, divided by the number of key blocks
WIDEST = 0.25
# dense bfloat16 TFLOP/s by a part of the GPU's name in torch, from the vendors' data sheets
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}
# FLOPs per weight and token: two each for the forward product, the gradient of the input and, if
# the weight is trained, the gradient of the weight
FROZEN, TRAINED = 4, 6
# FLOPs per attended pair and channel: two products in the forward pass and four in the backward
# pass, each with two FLOPs
ATTENTION = 12


@dataclass(frozen=True)
class Cost:
    """The sizes of a model that determine the FLOPs and the memory of a training step."""

    frozen: int  # number of frozen weights of linear layers
    trained: int  # number of trained weights of linear layers
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens; None: full attention
    channels: tuple[int, ...]  # per layer: query heads times head dim; see `_channels`
    kv_channels: tuple[int, ...]  # per layer: KV heads times head dim
    heads: int  # largest number of query heads of a layer
    inner: int  # largest intermediate size of an MLP
    parameters: int  # number of all parameters
    trained_parameters: int  # number of all trained parameters
    weight_bytes: int  # bytes of frozen parameters and buffers
    uncounted: str | None  # reason why the FLOPs of products with weights are unknown; None: known
    untiled: tuple[str, ...]  # class names; see `tiles.untiled_mlps`
    config: Any = field(repr=False)  # text config of the model

    @classmethod
    def of(cls, model: nn.Module) -> Cost:
        """Read the sizes of a causal language model of transformers, or of a PEFT model."""
        config = model.config.get_text_config()
        layer_types = getattr(config, "layer_types", None)
        layer_types = layer_types or ["sliding_attention"] * config.num_hidden_layers
        # if layers differ, the config of the model raises an error for fields that differ
        has_different_layers = getattr(config, "is_heterogeneous", False)
        layers = config.per_layer_config if has_different_layers else [config] * len(layer_types)
        uses_windows = getattr(config, "use_sliding_window", True) is not False
        windows = [
            getattr(layer, "sliding_window", None) if kind == "sliding_attention" else None
            for layer, kind in zip(layers, layer_types, strict=True)
        ]
        heads = [layer.num_attention_heads for layer in layers]
        # configs of old model types have no field for KV heads
        kv_heads = [
            getattr(x, "num_key_value_heads", None) or x.num_attention_heads for x in layers
        ]
        linear, parameters = list(_linear_layers(model)), list(model.parameters())
        frozen = [p for p in (*parameters, *model.buffers()) if not p.requires_grad]
        return cls(
            frozen=sum(size for size, is_trained in linear if not is_trained),
            trained=sum(size for size, is_trained in linear if is_trained),
            windows=tuple(windows if uses_windows else [None] * len(layer_types)),
            channels=tuple(map(_channels, layers, heads)),
            kv_channels=tuple(map(_channels, layers, kv_heads)),
            heads=max(heads),
            inner=max(map(_widest_mlp, layers)),
            parameters=sum(p.numel() for p in parameters),
            trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            weight_bytes=sum(p.numel() * p.element_size() for p in frozen),
            uncounted=_uncounted(model),
            untiled=tuple(untiled_mlps(model)),
            config=config,
        )

    def products(self, tokens: int) -> float:
        """Return the FLOPs of ``tokens`` tokens in linear layers, forward and backward.

        Returns 0 if ``uncounted`` is set.
        """
        flops_per_token = 0 if self.uncounted else FROZEN * self.frozen + TRAINED * self.trained
        return float(tokens) * flops_per_token

    def pairs(self, positions: Tensor) -> tuple[int, ...]:
        """Return for each layer the number of causal (query, key) pairs of a head.

        Args:
            positions: int [B, N], position ids that restart with each document.
        """
        num_keys = positions.to(torch.int64) + 1
        pairs_of_window = {
            window: int(num_keys.clamp(max=window or 2**62).sum()) for window in {*self.windows}
        }
        return tuple(pairs_of_window[window] for window in self.windows)

    def attention(self, pairs: Sequence[float]) -> list[float]:
        """Return for each layer the FLOPs of attention, forward and backward.

        ``pairs`` has the number of attended pairs in each head of every layer.
        """
        return [
            ATTENTION * num_pairs * num_channels
            for num_pairs, num_channels in zip(pairs, self.channels, strict=True)
        ]


def _linear_layers(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield (number of weights, True if trained) for every linear layer."""
    for name, module in model.named_modules():
        # count a weight once: a LoRA layer wraps the layer `base_layer`, and PEFT stores a frozen
        # `original_module` next to a trained copy
        is_wrapper = hasattr(module, "base_layer") or ".original_module" in f".{name}"
        if not is_wrapper and hasattr(module, "in_features") and hasattr(module, "weight"):
            yield module.in_features * module.out_features, module.weight.requires_grad


def _uncounted(model: nn.Module) -> str | None:
    """Return why FLOPs per token are unknown; None if every token uses all weights."""
    for name, module in model.named_modules():
        if "experts" in name or isinstance(getattr(module, "top_k", None), int):
            return f"{name} is part of a mixture of experts, of which a token uses only some"
    return None


def _channels(config: Any, heads: int) -> int:
    """Return ``heads`` times the head dim in ``config``, the config of a layer.

    The head dim is the mean of the head dims of keys and values if these differ.
    """
    # multi-head latent attention: channels of a key without RoPE, with RoPE, and of a value
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent_dims = [getattr(config, name, None) for name in names]
    if all(isinstance(dim, int) for dim in latent_dims):
        return heads * sum(latent_dims) // 2
    head_dim = getattr(config, "head_dim", None)
    return heads * (head_dim or config.hidden_size // config.num_attention_heads)


def _widest_mlp(config: Any) -> int:
    """Return the intermediate size in the config of a layer, the largest if there are several."""
    sizes = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return sizes if isinstance(sizes, int) else max(sizes)


def peak_flops(device: torch.device, given_tflops: float = 0.0) -> float | None:
    """Return the peak bfloat16 FLOP/s of a device; None if unknown.

    ``given_tflops`` overrides the lookup by the name of the GPU; 0: look up.
    """
    if not given_tflops and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        given_tflops = next((x for part, x in PEAK_TFLOPS.items() if part in name), 0.0)
    return given_tflops * 1e12 or None


def peak_gib(device: torch.device) -> float | None:
    """Return the peak of allocated GPU memory in GiB since the last call, and reset the peak.

    Returns None on a CPU.
    """
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) / GIB
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def count(cost: Cost, positions: Tensor, layers: Iterable[Mapping[str, Any]]) -> Tensor:
    """Count the tokens and FLOPs of a micro batch.

    Args:
        cost: the cost of the model.
        positions: int [B, N], position ids that restart with each document.
        layers: the result of `cab_hf.stats` for this micro batch. A density of None means dense
            attention.

    Returns:
        float64 [4]: tokens, FLOPs of products with weights, FLOPs of attended pairs, and FLOPs of
        all causal pairs.
    """
    causal_flops = cost.attention(cost.pairs(positions))
    densities = (1.0 if x["density"] is None else x["density"] for x in layers)
    attended_flops = sum(
        flops * density for flops, density in zip(causal_flops, densities, strict=True)
    )
    tokens = positions.numel()
    counts = [tokens, cost.products(tokens), attended_flops, sum(causal_flops)]
    return torch.tensor(counts, dtype=torch.float64)


def line(
    totals: Sequence[float], seconds: float, processes: int, peak: float | None
) -> dict[str, float | None]:
    """Return the fields of a step in the log: throughput, MFU and density.

    Args:
        totals: sums of `count` over all micro batches and processes.
        seconds: duration of the step.
        processes: number of processes.
        peak: peak FLOP/s of a device; None: MFU is unknown.
    """
    tokens, products, attended_flops, causal_flops = totals
    peak_flops_of_step = None if peak is None else seconds * processes * peak
    dense_flops = products + causal_flops
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_gpu": tokens / seconds / processes,
        "mfu": peak_flops_of_step and (products + attended_flops) / peak_flops_of_step,
        "mfu_dense_equivalent": peak_flops_of_step and dense_flops / peak_flops_of_step,
        "density": attended_flops / causal_flops if causal_flops else 1.0,
    }


class Memory(NamedTuple):
    """The peak memory of a process in a training step, in bytes.

    The first four fields are memory of the device, the last three are memory of the host.
    """

    weights: float
    optimizer: float  # trained parameters, their gradients and the moments of AdamW
    layers: float  # tensors that layers save for the backward pass
    working: float  # temporary tensors: the larger of the loss and a layer's backward pass
    checkpoints: float  # offloaded inputs of layers
    plans: float  # block plans that gradient checkpointing reads again
    sharded: float  # weights and optimizer states, if FSDP2 offloads both to the host

    @property
    def total(self) -> float:
        """Return the bytes on the device."""
        return sum(self[:4])

    @property
    def host(self) -> float:
        """Return the bytes on the host."""
        return sum(self[4:])


def memory(
    cost: Cost,
    tokens: int,
    *,
    itemsize: int = 2,
    checkpointing: bool = True,
    shards: int = 1,
    cp: int = 1,
    loss_tokens: int = 1024,
    quantised: float | None = None,
    tile: int = 0,
    offloaded: int = 0,
    plans: float = 0.0,
    short_texts: bool = False,
    mask_pairs: int = 0,
    mask_itemsize: int = 2,
    weights_on_host: bool = False,
) -> Memory:
    """Estimate the memory of a training step with ``tokens`` per micro batch.

    Args:
        cost: the cost of the model.
        tokens: tokens of a micro batch.
        itemsize: bytes of an activation.
        checkpointing: True for gradient checkpointing, in which layers save only their input.
        shards: number of processes over which weights are sharded.
        cp: number of processes over which each sequence is sharded.
        loss_tokens: tokens whose logits exist at a time.
        quantised: bytes per weight of quantised layers; None: ``cost`` already has the bytes of the
            quantised weights, or no weight is quantised.
        tile: tokens that MLPs compute at a time; 0: all tokens.
        offloaded: number of layers whose checkpoints are on the host.
        plans: bytes of plans on the host; see `plan_bytes`.
        short_texts: True if documents in a sequence may be shorter than CAB's ``min_length``.
        mask_pairs: (query, key) pairs of a materialised mask; 0: no mask.
        mask_itemsize: bytes per pair of the mask in each layer.
        weights_on_host: True if weights stay on the host until a layer needs them, as in FSDP2
            offloading.
    """
    config, layers = cost.config, cost.config.num_hidden_layers
    own_tokens = tokens / cp
    hidden_bytes = itemsize * config.hidden_size
    activations = _activations(
        cost,
        tokens=own_tokens,
        itemsize=itemsize,
        loss_tokens=loss_tokens,
        tile=tile,
        # documents shorter than min_length take a separate path, which copies queries and outputs
        copies_queries=short_texts and not checkpointing,
    )
    # temporary: cosines and sines of all positions, and with cp > 1 also the gathered keys and
    # values of the whole sequence
    kv_bytes = 2 * itemsize * max(cost.kv_channels)
    rotary_bytes = 2 * itemsize * max(cost.channels) / cost.heads
    temporary = (kv_bytes * tokens if cp > 1 else 0.0) + own_tokens * rotary_bytes
    mask = mask_itemsize * mask_pairs
    recomputed = (own_tokens * activations.recomputed + mask) * checkpointing
    backward = own_tokens * activations.gradients + recomputed + temporary
    # the backward pass fetches the checkpoint of a layer while it still uses the next layer's
    num_on_device = max(layers - offloaded, min(2, layers)) if offloaded else layers
    if checkpointing:
        saved_by_layers = own_tokens * hidden_bytes * num_on_device
    else:
        saved_by_layers = (own_tokens * activations.saved + mask) * layers
    optimizer = 16 * cost.trained_parameters  # float32: a value, its gradient and two moments
    bytes_saved_per_weight = 0.0 if quantised is None else itemsize - quantised
    # embeddings and head are not quantised
    num_quantised = cost.frozen - config.hidden_size * config.vocab_size
    weights = cost.weight_bytes - num_quantised * bytes_saved_per_weight
    # FSDP2 gathers the weights of the layer that computes and of the next layer
    gathered = 2 * weights / layers if shards > 1 or weights_on_host else 0.0
    on_device, on_host = (0, 1) if weights_on_host else (1, 0)
    return Memory(
        weights=on_device * weights / shards + gathered,
        optimizer=on_device * optimizer / shards,
        layers=saved_by_layers,
        # tensors of the loss are freed before the backward pass of the last layer
        working=max(activations.loss, backward) + mask_pairs,
        checkpoints=offloaded * -(-own_tokens * hidden_bytes // CHUNK_BYTES) * CHUNK_BYTES,
        plans=plans,
        sharded=on_host * (weights + optimizer) / shards,
    )


class _Activations(NamedTuple):
    """Bytes of activations, per token except for ``loss``."""

    saved: float  # tensors that a layer saves for its backward pass
    recomputed: float  # tensors that exist after recomputing a layer from its input
    gradients: float  # tensors of a layer's backward pass in addition to the saved tensors
    loss: float  # peak of the loss for all tokens


def _activations(
    cost: Cost, tokens: float, itemsize: int, loss_tokens: int, tile: int, copies_queries: bool
) -> _Activations:
    """Estimate the activations of the widest layer, and of the loss of ``tokens`` tokens.

    Args:
        cost: the cost of the model.
        tokens: tokens of a micro batch in this process.
        itemsize, loss_tokens, tile: as in `memory`.
        copies_queries: True if queries and outputs of attention are saved twice.
    """
    hidden, vocabulary, is_float32 = cost.config.hidden_size, cost.config.vocab_size, itemsize >= 4
    channels = max(cost.channels)
    # bytes per token of a hidden state, of queries, and of keys with values
    x, q, kv = itemsize * hidden, itemsize * channels, 2 * itemsize * max(cost.kv_channels)
    logits = (4 if is_float32 else 4 + itemsize) * min(tokens, loss_tokens) * vocabulary
    # input of the layer, its norm, q, k, v, output of attention, residual sum and its norm
    saved = 4 * x + 2 * q + kv
    if 0 < tile < tokens and not cost.untiled:
        # peak in the MLP: its output and input, and float32 tiles; both norm outputs are freed
        # before
        in_mlp = 2 * x + tile / tokens * 6 * 4 * cost.inner
        # peak in attention: gradients of q, k, v and the output, which some kernels sum in float32,
        # and the norm before attention
        in_attention = 2 * q + kv - x + (0 if is_float32 else q + 4 * (channels + hidden))
        return _Activations(
            saved=saved,
            recomputed=saved - x,
            gradients=max(in_mlp, in_attention),
            # four tensors [tokens, hidden]: the output of the last layer, the output of the final
            # norm, and the gradient of this output before and after it is scaled
            loss=tokens * 4 * x + logits,
        )
    # norms compute in float32
    saved += itemsize * 3 * cost.inner + (0 if is_float32 else 2 * 4 * hidden)
    saved += 2 * q if copies_queries else 0
    return _Activations(
        saved=saved,
        recomputed=saved,
        gradients=x + itemsize * 2 * cost.inner,
        loss=tokens * x + logits,
    )


def plan_bytes(cost: Cost, config: CabConfig, length: int, rows: int = 1, cp: int = 1) -> float:
    """Estimate the bytes of host memory for the block plans of all layers.

    A plan has a list of key blocks per head and query block. All lists are padded to the longest
    list, which is assumed to contain a share of at most `WIDEST` of the key blocks.

    Args:
        cost: the cost of the model.
        config: the config of CAB.
        length: tokens of a sequence.
        rows: sequences of a micro batch.
        cp: number of processes over which each sequence is sharded.
    """
    if length < config.min_length:
        return 0.0
    num_key_blocks = -(-length // config.key_block)
    list_length = min(config.max_density, WIDEST) * num_key_blocks + 2
    list_length += num_key_blocks / config.sampled_one_in if config.sampled_one_in else 0
    num_entries = rows * cost.heads * length / cp / config.query_block * list_length
    bytes_per_layer = (2 if num_key_blocks < 2**15 else 4) * num_entries
    # torch rounds pinned memory up to a power of two
    return cost.config.num_hidden_layers * 2.0 ** math.ceil(math.log2(bytes_per_layer))


class Room(NamedTuple):
    """Bytes of memory that a process can use on its device and on its host."""

    device: float
    host: float

    def holds(self, needed: Memory) -> bool:
        """Return True if a step with the peak memory ``needed`` fits into this memory."""
        return needed.total <= USABLE * self.device and needed.host <= PINNABLE * self.host


def host_bytes(given_gib: float = 0.0) -> float:
    """Return the bytes of host memory divided by the number of processes on this host.

    ``given_gib`` is the memory of the host in GiB; 0: the memory of this machine or container.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if CONTAINER.exists() and (limit := CONTAINER.read_text().strip()).isdigit():
        machine_bytes = min(machine_bytes, int(limit))
    return (given_gib * GIB or machine_bytes) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class Fit(NamedTuple):
    """A number of layers with offloaded checkpoints, and the memory of a step with this number."""

    offloaded: int
    memory: Memory


def fit(cost: Cost, tokens: int, room: Room, offloaded: int | None = None, **how: Any) -> Fit:
    """Return the smallest number of offloaded layers with which a step fits into memory.

    If a step fits with no number, offload as many layers as the memory of the host allows.

    Args:
        cost: the cost of the model.
        tokens: tokens of a micro batch.
        room: available memory.
        offloaded: number of offloaded layers; None: find the smallest number.
        how: other arguments of `memory`.
    """
    # two checkpoints are always on the device, so that offloading the last two saves nothing
    most = max(0, cost.config.num_hidden_layers - 2) if how.get("checkpointing", True) else 0
    counts = range(most + 1) if offloaded is None else [offloaded]
    candidates = (Fit(count, memory(cost, tokens, offloaded=count, **how)) for count in counts)
    fitted = next(candidates)
    for candidate in candidates:
        if room.holds(fitted.memory) or candidate.memory.host > PINNABLE * room.host:
            break
        fitted = candidate
    return fitted
