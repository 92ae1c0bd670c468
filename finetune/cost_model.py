"""Measurements of a step: FLOPs, MFU, density and memory.

Useful FLOPs count the forward and backward pass over the attended pairs, without recomputation.
Dense-equivalent FLOPs count the same step with every causal pair. Mixtures of experts are not
counted.
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
# usable share of a device's memory for tensors, and of the host's memory for pinning
USABLE = PINNABLE = 0.9
# file with the memory limit of a container on Linux
CONTAINER = Path("/sys/fs/cgroup/memory.max")
# the longest list as a share of a row's blocks, without a bound
WIDEST = 0.25
# bf16 without sparsity, by a part of the GPU's name in torch; from the makers' data sheets
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
# FLOPs per weight and token: two each for the forward product, the gradient of the input, and the
# gradient of the weight
FROZEN, TRAINED = 4, 6
# FLOPs per pair and channel: two products forward and four backward
ATTENTION = 12


@dataclass(frozen=True)
class Cost:
    """The facts that determine the FLOPs and the memory of a model's training step."""

    frozen: int  # weights of linear layers, which multiply every token
    trained: int
    windows: tuple[int | None, ...]  # sliding window of each layer in tokens
    # per layer: heads times head dim, the mean of keys and values if these differ
    channels: tuple[int, ...]
    kv_channels: tuple[int, ...]
    heads: int  # query heads of the layer with the most
    inner: int  # channels inside the widest MLP
    parameters: int
    trained_parameters: int
    weight_bytes: int  # bytes of frozen parameters and buffers
    uncounted: str | None  # why the number of weights per token is unknown
    untiled: tuple[str, ...]  # see `tiles.untiled_mlps`
    config: Any = field(repr=False)

    @classmethod
    def of(cls, model: nn.Module) -> Cost:
        """Return the cost of a causal language model of transformers or PEFT."""
        config = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
        # if layers differ, the model's own config raises errors for the differing fields
        differ = getattr(config, "is_heterogeneous", False)
        layers = config.per_layer_config if differ else [config] * len(kinds)
        slides = getattr(config, "use_sliding_window", True) is not False
        windows = [
            getattr(layer, "sliding_window", None) if kind == "sliding_attention" else None
            for layer, kind in zip(layers, kinds, strict=True)
        ]
        # old model types have no grouped heads
        heads = [layer.num_attention_heads for layer in layers]
        kv_heads = [
            getattr(x, "num_key_value_heads", None) or x.num_attention_heads for x in layers
        ]
        linear, parameters = list(_linear_layers(model)), list(model.parameters())
        frozen = [p for p in (*parameters, *model.buffers()) if not p.requires_grad]
        return cls(
            frozen=sum(size for size, trained in linear if not trained),
            trained=sum(size for size, trained in linear if trained),
            windows=tuple(windows if slides else [None] * len(kinds)),
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
        """Return the FLOPs of products with weights, forward and backward; 0 if ``uncounted``."""
        used = 0 if self.uncounted else FROZEN * self.frozen + TRAINED * self.trained
        return float(tokens) * used

    def pairs(self, positions: Tensor) -> tuple[int, ...]:
        """Return the (query, key) pairs of a head that each layer may attend.

        ``positions``, int [B, N], restart with each document.
        """
        seen = positions.to(torch.int64) + 1
        by_window = {each: int(seen.clamp(max=each or 2**62).sum()) for each in {*self.windows}}
        return tuple(by_window[window] for window in self.windows)

    def attention(self, pairs: Sequence[float]) -> list[float]:
        """Return the FLOPs of each layer, forward and backward, for ``pairs`` in every head."""
        return [ATTENTION * n * own for n, own in zip(pairs, self.channels, strict=True)]


def _linear_layers(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield (weights, True if trained) of every linear layer."""
    for name, module in model.named_modules():
        # an adapter's layer contains the layer it wraps and two others; a trained copy exists in
        # addition to the frozen layer that it is used for
        wraps = hasattr(module, "base_layer") or ".original_module" in f".{name}"
        if not wraps and hasattr(module, "in_features") and hasattr(module, "weight"):
            yield module.in_features * module.out_features, module.weight.requires_grad


def _uncounted(model: nn.Module) -> str | None:
    """Return why the weights per token are unknown; None if every token uses all weights."""
    for name, module in model.named_modules():
        if "experts" in name or isinstance(getattr(module, "top_k", None), int):
            return f"{name} is part of a mixture of experts, of which a token uses only some"
    return None


def _channels(config: Any, heads: int) -> int:
    """Return heads times head dim from the config of a layer."""
    # latent attention: keys without and with positions, and values
    parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = [getattr(config, name, None) for name in parts]
    if all(isinstance(part, int) for part in latent):
        return heads * sum(latent) // 2
    own = getattr(config, "head_dim", None)
    return heads * (own or config.hidden_size // config.num_attention_heads)


def _widest_mlp(config: Any) -> int:
    sizes = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return sizes if isinstance(sizes, int) else max(sizes)


def peak_flops(device: torch.device, given_tflops: float = 0.0) -> float | None:
    """Return the peak FLOP/s of a device in bfloat16; None if unknown."""
    if not given_tflops and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        given_tflops = next((x for part, x in PEAK_TFLOPS.items() if part in name), 0.0)
    return given_tflops * 1e12 or None


def peak_gib(device: torch.device) -> float | None:
    """Return the peak of allocated GiB since the last call; None on a CPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) / GIB
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def count(cost: Cost, positions: Tensor, layers: Iterable[Mapping[str, Any]]) -> Tensor:
    """Count the work of a micro batch, float64 [4].

    The entries are tokens, FLOPs of products with weights, FLOPs of attended pairs, and FLOPs of
    all causal pairs.

    Args:
        cost: the cost of the model.
        positions: int [B, N], restarting with each document.
        layers: the result of `cab_hf.stats`; layers without a density attend to all pairs.
    """
    causal = cost.attention(cost.pairs(positions))
    densities = (1.0 if x["density"] is None else x["density"] for x in layers)
    attended = sum(flops * share for flops, share in zip(causal, densities, strict=True))
    tokens = positions.numel()
    return torch.tensor([tokens, cost.products(tokens), attended, sum(causal)], dtype=torch.float64)


def line(
    totals: Sequence[float], seconds: float, processes: int, peak: float | None
) -> dict[str, float | None]:
    """Return the speed of a step, as recorded in the log.

    Args:
        totals: sums of `count` over all micro batches and processes.
        seconds: duration of the step.
        processes: number of processes.
        peak: peak FLOP/s of a device, or None.
    """
    tokens, products, attended, causal = totals
    reached = None if peak is None else seconds * processes * peak
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_gpu": tokens / seconds / processes,
        "mfu": reached and (products + attended) / reached,
        "mfu_dense_equivalent": reached and (products + causal) / reached,
        "density": attended / causal if causal else 1.0,
    }


class Memory(NamedTuple):
    """The peak memory of a step in bytes, part by part; the last three parts are on the host."""

    weights: float
    optimizer: float
    layers: float  # tensors that layers keep for the backward pass
    working: float  # the larger of the loss and a layer's backward pass
    checkpoints: float  # offloaded inputs of layers
    plans: float
    sharded: float  # weights and optimizer, if they are on the host

    @property
    def total(self) -> float:
        """The total of the device."""
        return sum(self[:4])

    @property
    def host(self) -> float:
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
        checkpointing: True if layers keep only their input.
        shards, cp: number of processes over which weights, and tokens, are sharded.
        loss_tokens: tokens whose logits exist at once.
        quantised: bytes per weight of the layers, if ``cost`` has another dtype.
        tile: tokens that MLPs compute at a time; 0: all of them.
        offloaded: number of layers whose checkpoints are on the host.
        plans: bytes of plans on the host; see `plan_bytes`.
        short_texts: True if packed documents may be shorter than CAB's ``min_length``.
        mask_pairs, mask_itemsize: pairs of tokens in a mask, and bytes per pair in every layer.
        weights_on_host: True if weights stay on the host until a layer needs them, as in FSDP2
            offloading.
    """
    config, layers, wide = cost.config, cost.config.num_hidden_layers, itemsize >= 4
    # the widest layer, which is the peak if layers keep only their input
    hidden, channels = config.hidden_size, max(cost.channels)
    x, size = itemsize * hidden, tokens / cp
    q, kv = itemsize * channels, 2 * itemsize * max(cost.kv_channels)
    # keys and values of the whole sequence while a layer attends; cosines and sines of positions
    temporary = (kv * tokens if cp > 1 else 0.0) + size * 2 * itemsize * channels / cost.heads
    logits = (4 if wide else 4 + itemsize) * min(size, loss_tokens) * config.vocab_size
    # the input of a layer, its norm, q, k, v, the output of attention, their sum and its norm
    kept = 4 * x + 2 * q + kv
    if 0 < tile < size and not cost.untiled:
        # either the MLP's output and input, with equally large tiles of float32 computation; both
        # norms are freed by then
        in_mlp = 2 * x + tile / size * 6 * 4 * cost.inner
        # or the inputs and outputs of attention: their gradients in 16 bits, which some kernels sum
        # in float32, and the norm before attention
        in_attention = 2 * q + kv - x + (0 if wide else q + 4 * (channels + hidden))
        flowing = max(in_mlp, in_attention)
        # the last layer's output, its norm, the gradient of the norm, and the same scaled
        loss = size * 4 * x + logits
        again = kept - x
    else:
        # norms compute in float32
        kept += itemsize * 3 * cost.inner + (0 if wide else 2 * 4 * hidden)
        # short documents are attended separately: their queries and outputs exist twice
        kept += 2 * q if short_texts and not checkpointing else 0
        flowing = x + itemsize * 2 * cost.inner
        loss = size * x + logits
        again = kept
    mask = mask_itemsize * mask_pairs
    # the checkpoint of a layer is fetched while the next layer's is still there
    num_on_device = max(layers - offloaded, min(2, layers)) if offloaded else layers
    optimizer = 16 * cost.trained_parameters  # a value, its gradient and two moments
    saved = 0.0 if quantised is None else itemsize - quantised
    weights = cost.weight_bytes - (cost.frozen - hidden * config.vocab_size) * saved
    # a layer that computes, and the next one
    gathered = 2 * weights / layers if shards > 1 or weights_on_host else 0.0
    here, there = (0, 1) if weights_on_host else (1, 0)
    return Memory(
        weights=here * weights / shards + gathered,
        optimizer=here * optimizer / shards,
        layers=size * x * num_on_device if checkpointing else (size * kept + mask) * layers,
        # the last layers' gradients start where the loss ends
        working=max(loss, size * flowing + (size * again + mask) * checkpointing + temporary)
        + mask_pairs,
        checkpoints=offloaded * -(-size * x // CHUNK_BYTES) * CHUNK_BYTES,
        plans=plans,
        sharded=there * (weights + optimizer) / shards,
    )


def plan_bytes(cost: Cost, config: CabConfig, length: int, rows: int = 1, cp: int = 1) -> float:
    """Estimate the host memory of the plans of all layers, for ``rows`` of ``length`` tokens.

    Lists have the width of the longest list; with a threshold this is at most `WIDEST` of all
    blocks.
    """
    if length < config.min_length:
        return 0.0
    key_blocks = -(-length // config.key_block)
    listed = min(config.max_density, WIDEST) * key_blocks + 2
    listed += key_blocks / config.sampled_one_in if config.sampled_one_in else 0
    entries = rows * cost.heads * length / cp / config.query_block * listed
    size = (2 if key_blocks < 2**15 else 4) * entries
    # torch pins powers of two
    return cost.config.num_hidden_layers * 2.0 ** math.ceil(math.log2(size))


class Room(NamedTuple):
    """Bytes available to a process on its device and on its host."""

    device: float
    host: float

    def holds(self, needed: Memory) -> bool:
        """Return True if a step with that memory fits."""
        return needed.total <= USABLE * self.device and needed.host <= PINNABLE * self.host


def host_bytes(given_gib: float = 0.0) -> float:
    """Return the share of a process in the memory of its host, or in ``given_gib``."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if CONTAINER.exists() and (limit := CONTAINER.read_text().strip()).isdigit():
        machine = min(machine, int(limit))
    return (given_gib * GIB or machine) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class Fit(NamedTuple):
    """The number of layers with offloaded checkpoints, and the memory of a step."""

    offloaded: int
    memory: Memory


def fit(cost: Cost, tokens: int, room: Room, offloaded: int | None = None, **how: Any) -> Fit:
    """Return the step with ``offloaded`` layers, or with the fewest layers that fit into ``room``.

    If no number fits, offload as many layers as the host has memory for: more would end other
    processes there. ``tokens`` and ``how`` are arguments of `memory`.
    """
    # the device holds two at a time, however few it keeps
    most = max(0, cost.config.num_hidden_layers - 2) if how.get("checkpointing", True) else 0
    counts = range(most + 1) if offloaded is None else [offloaded]
    steps = (Fit(count, memory(cost, tokens, offloaded=count, **how)) for count in counts)
    fitted = next(steps)
    for more in steps:
        if room.holds(fitted.memory) or more.memory.host > PINNABLE * room.host:
            break
        fitted = more
    return fitted
