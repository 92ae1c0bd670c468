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
from cab_hf.finetune.tiles import find_untiled_mlps

GIB = 2**30
# fraction of a device's memory that tensors can use, and of the host's memory that can be pinned
USABLE_DEVICE_MEMORY_SHARE = PINNABLE_HOST_MEMORY_SHARE = 0.9
# file with the memory limit of a container on Linux
CONTAINER_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")
# assumed number of key blocks in the longest list of a plan, divided by the number of key blocks
LONGEST_PLAN_LIST_SHARE = 0.25
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
FLOPS_PER_FROZEN_WEIGHT, FLOPS_PER_TRAINED_WEIGHT = 4, 6
# FLOPs per attended pair and channel: two products in the forward pass and four in the backward
# pass, each with two FLOPs
FLOPS_PER_PAIR_AND_CHANNEL = 12


@dataclass(frozen=True)
class Cost:
    """The sizes of a model that determine the FLOPs and the memory of a training step."""

    num_frozen_weights: int  # number of frozen weights of linear layers
    num_trained_weights: int  # number of trained weights of linear layers
    # per layer: sliding window in tokens; None: full attention
    layer_windows: tuple[int | None, ...]
    layer_channels: tuple[int, ...]  # per layer: query heads times head dim; see `_count_channels`
    layer_kv_channels: tuple[int, ...]  # per layer: KV heads times head dim
    num_heads: int  # largest number of query heads of a layer
    intermediate_size: int  # largest intermediate size of an MLP
    num_parameters: int  # number of all parameters
    num_trained_parameters: int  # number of all trained parameters
    weight_bytes: int  # bytes of frozen parameters and buffers
    # reason why the FLOPs of products with weights are unknown; None: known
    unknown_flops_reason: str | None
    untiled_mlp_classes: tuple[str, ...]  # class names; see `tiles.find_untiled_mlps`
    config: Any = field(repr=False)  # text config of the model

    @classmethod
    def from_model(cls, model: nn.Module) -> Cost:
        """Read the sizes of a causal language model of transformers, or of a PEFT model."""
        config = model.config.get_text_config()
        layer_types = getattr(config, "layer_types", None)
        layer_types = layer_types or ["sliding_attention"] * config.num_hidden_layers
        # if layers differ, the config of the model raises an error for fields that differ
        has_different_layers = getattr(config, "is_heterogeneous", False)
        layer_configs = (
            config.per_layer_config if has_different_layers else [config] * len(layer_types)
        )
        uses_windows = getattr(config, "use_sliding_window", True) is not False
        layer_windows = [
            getattr(layer_config, "sliding_window", None)
            if layer_type == "sliding_attention"
            else None
            for layer_config, layer_type in zip(layer_configs, layer_types, strict=True)
        ]
        layer_num_heads = [layer_config.num_attention_heads for layer_config in layer_configs]
        # configs of old model types have no field for KV heads
        layer_num_kv_heads = [
            getattr(layer_config, "num_key_value_heads", None) or layer_config.num_attention_heads
            for layer_config in layer_configs
        ]
        linear_weights, model_parameters = (
            list(_iterate_linear_weights(model)),
            list(model.parameters()),
        )
        frozen_tensors = [
            tensor for tensor in (*model_parameters, *model.buffers()) if not tensor.requires_grad
        ]
        return cls(
            num_frozen_weights=sum(
                num_weights for num_weights, is_trained in linear_weights if not is_trained
            ),
            num_trained_weights=sum(
                num_weights for num_weights, is_trained in linear_weights if is_trained
            ),
            layer_windows=tuple(layer_windows if uses_windows else [None] * len(layer_types)),
            layer_channels=tuple(map(_count_channels, layer_configs, layer_num_heads)),
            layer_kv_channels=tuple(map(_count_channels, layer_configs, layer_num_kv_heads)),
            num_heads=max(layer_num_heads),
            intermediate_size=max(map(_get_max_intermediate_size, layer_configs)),
            num_parameters=sum(tensor.numel() for tensor in model_parameters),
            num_trained_parameters=sum(
                tensor.numel() for tensor in model_parameters if tensor.requires_grad
            ),
            weight_bytes=sum(tensor.numel() * tensor.element_size() for tensor in frozen_tensors),
            unknown_flops_reason=_find_unknown_flops_reason(model),
            untiled_mlp_classes=tuple(find_untiled_mlps(model)),
            config=config,
        )

    def count_product_flops(self, num_tokens: int) -> float:
        """Return the FLOPs of ``num_tokens`` tokens in linear layers, forward and backward.

        Returns 0 if ``unknown_flops_reason`` is set.
        """
        flops_per_token = (
            0
            if self.unknown_flops_reason
            else FLOPS_PER_FROZEN_WEIGHT * self.num_frozen_weights
            + FLOPS_PER_TRAINED_WEIGHT * self.num_trained_weights
        )
        return float(num_tokens) * flops_per_token

    def count_pairs(self, positions: Tensor) -> tuple[int, ...]:
        """Return for each layer the number of causal (query, key) pairs of a head.

        Args:
            positions: int [B, N], position ids that restart with each document.
        """
        num_keys = positions.to(torch.int64) + 1
        pairs_by_window = {
            window: int(num_keys.clamp(max=window or 2**62).sum())
            for window in {*self.layer_windows}
        }
        return tuple(pairs_by_window[window] for window in self.layer_windows)

    def count_attention_flops(self, pairs_per_layer: Sequence[float]) -> list[float]:
        """Return for each layer the FLOPs of attention, forward and backward.

        ``pairs_per_layer`` has the number of attended pairs in each head of every layer.
        """
        return [
            FLOPS_PER_PAIR_AND_CHANNEL * num_pairs * num_channels
            for num_pairs, num_channels in zip(pairs_per_layer, self.layer_channels, strict=True)
        ]


def _iterate_linear_weights(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield (number of weights, True if trained) for every linear layer."""
    for module_name, module in model.named_modules():
        # count a weight once: a LoRA layer wraps the layer `base_layer`, and PEFT stores a frozen
        # `original_module` next to a trained copy
        is_wrapper = hasattr(module, "base_layer") or ".original_module" in f".{module_name}"
        if not is_wrapper and hasattr(module, "in_features") and hasattr(module, "weight"):
            yield module.in_features * module.out_features, module.weight.requires_grad


def _find_unknown_flops_reason(model: nn.Module) -> str | None:
    """Return why FLOPs per token are unknown; None if every token uses all weights."""
    for module_name, module in model.named_modules():
        if "experts" in module_name or isinstance(getattr(module, "top_k", None), int):
            return f"{module_name} is part of a mixture of experts, of which a token uses only some"
    return None


def _count_channels(layer_config: Any, num_heads: int) -> int:
    """Return ``num_heads`` times the head dim in ``layer_config``, the config of a layer.

    The head dim is the mean of the head dims of keys and values if these differ.
    """
    # multi-head latent attention: channels of a key without RoPE, with RoPE, and of a value
    head_dim_fields = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent_head_dims = [getattr(layer_config, field_name, None) for field_name in head_dim_fields]
    if all(isinstance(dim, int) for dim in latent_head_dims):
        return num_heads * sum(latent_head_dims) // 2
    head_dim = getattr(layer_config, "head_dim", None)
    return num_heads * (head_dim or layer_config.hidden_size // layer_config.num_attention_heads)


def _get_max_intermediate_size(layer_config: Any) -> int:
    """Return the intermediate size in the config of a layer, the largest if there are several."""
    intermediate_sizes = (
        getattr(layer_config, "intermediate_size", None) or 4 * layer_config.hidden_size
    )
    return intermediate_sizes if isinstance(intermediate_sizes, int) else max(intermediate_sizes)


def get_peak_flops(device: torch.device, requested_tflops: float = 0.0) -> float | None:
    """Return the peak bfloat16 FLOP/s of a device; None if unknown.

    ``requested_tflops`` overrides the lookup by the name of the GPU; 0: look up.
    """
    if not requested_tflops and device.type == "cuda":
        gpu_name = torch.cuda.get_device_name(device)
        requested_tflops = next(
            (tflops for gpu_name_part, tflops in PEAK_TFLOPS.items() if gpu_name_part in gpu_name),
            0.0,
        )
    return requested_tflops * 1e12 or None


def pop_peak_memory_gib(device: torch.device) -> float | None:
    """Return the peak of allocated GPU memory in GiB since the last call, and reset the peak.

    Returns None on a CPU.
    """
    if device.type != "cuda":
        return None
    peak_gib = torch.cuda.max_memory_allocated(device) / GIB
    torch.cuda.reset_peak_memory_stats(device)
    return peak_gib


def count_flops(
    cost: Cost, positions: Tensor, stats_by_layer: Iterable[Mapping[str, Any]]
) -> Tensor:
    """Count the tokens and FLOPs of a micro batch.

    Args:
        cost: the cost of the model.
        positions: int [B, N], position ids that restart with each document.
        stats_by_layer: the result of `cab_hf.stats` for this micro batch. A density of None means
            dense attention.

    Returns:
        float64 [4]: tokens, FLOPs of products with weights, FLOPs of attended pairs, and FLOPs of
        all causal pairs.
    """
    causal_flops = cost.count_attention_flops(cost.count_pairs(positions))
    layer_densities = (
        1.0 if layer_stats["density"] is None else layer_stats["density"]
        for layer_stats in stats_by_layer
    )
    attended_flops = sum(
        layer_flops * layer_density
        for layer_flops, layer_density in zip(causal_flops, layer_densities, strict=True)
    )
    num_tokens = positions.numel()
    token_and_flop_counts = [
        num_tokens,
        cost.count_product_flops(num_tokens),
        attended_flops,
        sum(causal_flops),
    ]
    return torch.tensor(token_and_flop_counts, dtype=torch.float64)


def make_step_log_fields(
    token_and_flop_totals: Sequence[float],
    step_seconds: float,
    num_processes: int,
    peak_flops_per_device: float | None,
) -> dict[str, float | None]:
    """Return the fields of a step in the log: throughput, MFU and density.

    Args:
        token_and_flop_totals: sums of `count_flops` over all micro batches and processes.
        step_seconds: duration of the step.
        num_processes: number of processes.
        peak_flops_per_device: peak FLOP/s of a device; None: MFU is unknown.
    """
    num_tokens, product_flops, attended_flops, causal_flops = token_and_flop_totals
    peak_flops_of_step = (
        None
        if peak_flops_per_device is None
        else step_seconds * num_processes * peak_flops_per_device
    )
    dense_flops = product_flops + causal_flops
    return {
        "seconds": step_seconds,
        "tokens_per_second": num_tokens / step_seconds,
        "tokens_per_second_per_gpu": num_tokens / step_seconds / num_processes,
        "mfu": peak_flops_of_step and (product_flops + attended_flops) / peak_flops_of_step,
        "mfu_dense_equivalent": peak_flops_of_step and dense_flops / peak_flops_of_step,
        "density": attended_flops / causal_flops if causal_flops else 1.0,
    }


class StepMemory(NamedTuple):
    """The peak memory of a process in a training step, in bytes.

    The first four fields are memory of the device, the last three are memory of the host.
    """

    weight_bytes: float
    optimizer_bytes: float  # trained parameters, their gradients and the moments of AdamW
    saved_tensor_bytes: float  # tensors that layers save for the backward pass
    temporary_bytes: float  # temporary tensors: the larger of the loss and a layer's backward pass
    offloaded_checkpoint_bytes: float  # offloaded inputs of layers
    plan_bytes: float  # block plans that gradient checkpointing reads again
    offloaded_shard_bytes: float  # weights and optimizer states, if FSDP2 offloads both to the host

    @property
    def device_bytes(self) -> float:
        """Return the bytes on the device."""
        return sum(self[:4])

    @property
    def host_bytes(self) -> float:
        """Return the bytes on the host."""
        return sum(self[4:])


def estimate_memory(
    cost: Cost,
    num_tokens: int,
    *,
    itemsize: int = 2,
    has_checkpointing: bool = True,
    num_shards: int = 1,
    cp: int = 1,
    loss_chunk_tokens: int = 1024,
    bytes_per_quantised_weight: float | None = None,
    tile_tokens: int = 0,
    num_offloaded_layers: int = 0,
    plan_bytes: float = 0.0,
    has_short_documents: bool = False,
    num_mask_pairs: int = 0,
    mask_itemsize: int = 2,
    are_weights_on_host: bool = False,
) -> StepMemory:
    """Estimate the memory of a training step with ``num_tokens`` per micro batch.

    Args:
        cost: the cost of the model.
        num_tokens: tokens of a micro batch.
        itemsize: bytes of an activation.
        has_checkpointing: True for gradient checkpointing, in which layers save only their input.
        num_shards: number of processes over which weights are sharded.
        cp: number of processes over which each sequence is sharded.
        loss_chunk_tokens: tokens whose logits exist at a time.
        bytes_per_quantised_weight: bytes per weight of quantised layers; None: ``cost`` already has
            the bytes of the quantised weights, or no weight is quantised.
        tile_tokens: tokens that MLPs compute at a time; 0: all tokens.
        num_offloaded_layers: number of layers whose checkpoints are on the host.
        plan_bytes: bytes of plans on the host; see `estimate_plan_bytes`.
        has_short_documents: True if documents in a sequence may be shorter than CAB's
            ``min_length``.
        num_mask_pairs: (query, key) pairs of a materialised mask; 0: no mask.
        mask_itemsize: bytes per pair of the mask in each layer.
        are_weights_on_host: True if weights stay on the host until a layer needs them, as in FSDP2
            offloading.
    """
    config, num_layers = cost.config, cost.config.num_hidden_layers
    num_local_tokens = num_tokens / cp
    hidden_bytes = itemsize * config.hidden_size
    activations = _estimate_activations(
        cost,
        num_tokens=num_local_tokens,
        itemsize=itemsize,
        loss_chunk_tokens=loss_chunk_tokens,
        tile_tokens=tile_tokens,
        # documents shorter than min_length take a separate path, which copies queries and outputs
        copies_queries=has_short_documents and not has_checkpointing,
    )
    # temporary: cosines and sines of all positions, and with cp > 1 also the gathered keys and
    # values of the whole sequence
    kv_bytes = 2 * itemsize * max(cost.layer_kv_channels)
    rotary_bytes = 2 * itemsize * max(cost.layer_channels) / cost.num_heads
    temporary_bytes = (kv_bytes * num_tokens if cp > 1 else 0.0) + num_local_tokens * rotary_bytes
    mask_bytes = mask_itemsize * num_mask_pairs
    recomputed_bytes = (
        num_local_tokens * activations.recomputed_bytes + mask_bytes
    ) * has_checkpointing
    backward_bytes = (
        num_local_tokens * activations.gradient_bytes + recomputed_bytes + temporary_bytes
    )
    # the backward pass fetches the checkpoint of a layer while it still uses the next layer's
    num_checkpoints_on_device = (
        max(num_layers - num_offloaded_layers, min(2, num_layers))
        if num_offloaded_layers
        else num_layers
    )
    if has_checkpointing:
        layer_saved_bytes = num_local_tokens * hidden_bytes * num_checkpoints_on_device
    else:
        layer_saved_bytes = (num_local_tokens * activations.saved_bytes + mask_bytes) * num_layers
    # float32: a value, its gradient and two moments
    optimizer_bytes = 16 * cost.num_trained_parameters
    bytes_saved_per_weight = (
        0.0 if bytes_per_quantised_weight is None else itemsize - bytes_per_quantised_weight
    )
    # embeddings and head are not quantised
    num_quantised_weights = cost.num_frozen_weights - config.hidden_size * config.vocab_size
    weight_bytes = cost.weight_bytes - num_quantised_weights * bytes_saved_per_weight
    # FSDP2 gathers the weights of the layer that computes and of the next layer
    gathered_bytes = 2 * weight_bytes / num_layers if num_shards > 1 or are_weights_on_host else 0.0
    weight_share_on_device, weight_share_on_host = (0, 1) if are_weights_on_host else (1, 0)
    return StepMemory(
        weight_bytes=weight_share_on_device * weight_bytes / num_shards + gathered_bytes,
        optimizer_bytes=weight_share_on_device * optimizer_bytes / num_shards,
        saved_tensor_bytes=layer_saved_bytes,
        # tensors of the loss are freed before the backward pass of the last layer
        temporary_bytes=max(activations.loss_bytes, backward_bytes) + num_mask_pairs,
        offloaded_checkpoint_bytes=num_offloaded_layers
        * -(-num_local_tokens * hidden_bytes // CHUNK_BYTES)
        * CHUNK_BYTES,
        plan_bytes=plan_bytes,
        offloaded_shard_bytes=weight_share_on_host * (weight_bytes + optimizer_bytes) / num_shards,
    )


class _Activations(NamedTuple):
    """Bytes of activations, per token except for ``loss_bytes``."""

    saved_bytes: float  # tensors that a layer saves for its backward pass
    recomputed_bytes: float  # tensors that exist after recomputing a layer from its input
    gradient_bytes: float  # tensors of a layer's backward pass in addition to the saved tensors
    loss_bytes: float  # peak memory while the loss of all tokens is computed


def _estimate_activations(
    cost: Cost,
    num_tokens: float,
    itemsize: int,
    loss_chunk_tokens: int,
    tile_tokens: int,
    copies_queries: bool,
) -> _Activations:
    """Estimate the activations of the widest layer, and of the loss of ``num_tokens`` tokens.

    Args:
        cost: the cost of the model.
        num_tokens: tokens of a micro batch in this process.
        itemsize, loss_chunk_tokens, tile_tokens: as in `estimate_memory`.
        copies_queries: True if queries and outputs of attention are saved twice.
    """
    hidden_size, vocabulary_size, is_float32 = (
        cost.config.hidden_size,
        cost.config.vocab_size,
        itemsize >= 4,
    )
    num_channels = max(cost.layer_channels)
    # bytes per token of a hidden state, of queries, and of keys with values
    hidden_bytes, query_bytes, kv_bytes = (
        itemsize * hidden_size,
        itemsize * num_channels,
        2 * itemsize * max(cost.layer_kv_channels),
    )
    logit_bytes = (
        (4 if is_float32 else 4 + itemsize) * min(num_tokens, loss_chunk_tokens) * vocabulary_size
    )
    # input of the layer, its norm, q, k, v, output of attention, residual sum and its norm
    saved_bytes = 4 * hidden_bytes + 2 * query_bytes + kv_bytes
    if 0 < tile_tokens < num_tokens and not cost.untiled_mlp_classes:
        # peak in the MLP: its output and input, and float32 tiles; both norm outputs are freed
        # before
        mlp_bytes = 2 * hidden_bytes + tile_tokens / num_tokens * 6 * 4 * cost.intermediate_size
        # peak in attention: gradients of q, k, v and the output, which some kernels sum in float32,
        # and the norm before attention
        attention_bytes = (
            2 * query_bytes
            + kv_bytes
            - hidden_bytes
            + (0 if is_float32 else query_bytes + 4 * (num_channels + hidden_size))
        )
        return _Activations(
            saved_bytes=saved_bytes,
            recomputed_bytes=saved_bytes - hidden_bytes,
            gradient_bytes=max(mlp_bytes, attention_bytes),
            # four tensors [tokens, hidden]: the output of the last layer, the output of the final
            # norm, and the gradient of this output before and after it is scaled
            loss_bytes=num_tokens * 4 * hidden_bytes + logit_bytes,
        )
    # norms compute in float32
    saved_bytes += itemsize * 3 * cost.intermediate_size + (
        0 if is_float32 else 2 * 4 * hidden_size
    )
    saved_bytes += 2 * query_bytes if copies_queries else 0
    return _Activations(
        saved_bytes=saved_bytes,
        recomputed_bytes=saved_bytes,
        gradient_bytes=hidden_bytes + itemsize * 2 * cost.intermediate_size,
        loss_bytes=num_tokens * hidden_bytes + logit_bytes,
    )


def estimate_plan_bytes(
    cost: Cost, config: CabConfig, length: int, num_rows: int = 1, cp: int = 1
) -> float:
    """Estimate the bytes of host memory for the block plans of all layers.

    A plan has a list of key blocks per head and query block. All lists are padded to the longest
    list, which is assumed to contain a share of at most `LONGEST_PLAN_LIST_SHARE` of the key
    blocks.

    Args:
        cost: the cost of the model.
        config: the config of CAB.
        length: tokens of a sequence.
        num_rows: sequences of a micro batch.
        cp: number of processes over which each sequence is sharded.
    """
    if length < config.min_length:
        return 0.0
    num_key_blocks = -(-length // config.key_block)
    num_blocks_per_list = min(config.max_density, LONGEST_PLAN_LIST_SHARE) * num_key_blocks + 2
    num_blocks_per_list += num_key_blocks / config.sampled_one_in if config.sampled_one_in else 0
    num_list_entries = (
        num_rows * cost.num_heads * length / cp / config.query_block * num_blocks_per_list
    )
    bytes_per_layer = (2 if num_key_blocks < 2**15 else 4) * num_list_entries
    # torch rounds pinned memory up to a power of two
    return cost.config.num_hidden_layers * 2.0 ** math.ceil(math.log2(bytes_per_layer))


class AvailableMemory(NamedTuple):
    """Bytes of memory that a process can use on its device and on its host."""

    device_bytes: float
    host_bytes: float

    def can_hold(self, step_memory: StepMemory) -> bool:
        """Return True if a step with the peak memory ``step_memory`` fits into this memory."""
        return (
            step_memory.device_bytes <= USABLE_DEVICE_MEMORY_SHARE * self.device_bytes
            and step_memory.host_bytes <= PINNABLE_HOST_MEMORY_SHARE * self.host_bytes
        )


def get_host_bytes(requested_gib: float = 0.0) -> float:
    """Return the bytes of host memory divided by the number of processes on this host.

    ``requested_gib`` is the memory of the host in GiB; 0: the memory of this machine or container.
    """
    usable_host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (
        CONTAINER_LIMIT_FILE.exists()
        and (container_limit := CONTAINER_LIMIT_FILE.read_text().strip()).isdigit()
    ):
        usable_host_bytes = min(usable_host_bytes, int(container_limit))
    return (requested_gib * GIB or usable_host_bytes) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class MemoryFit(NamedTuple):
    """A number of layers with offloaded checkpoints, and the memory of a step with this number."""

    num_offloaded_layers: int
    memory: StepMemory


def choose_offloading(
    cost: Cost,
    num_tokens: int,
    available_memory: AvailableMemory,
    num_offloaded_layers: int | None = None,
    **memory_options: Any,
) -> MemoryFit:
    """Return the smallest number of offloaded layers with which a step fits into memory.

    If a step fits with no number, offload as many layers as the memory of the host allows.

    Args:
        cost: the cost of the model.
        num_tokens: tokens of a micro batch.
        available_memory: available memory.
        num_offloaded_layers: number of offloaded layers; None: find the smallest number.
        memory_options: other arguments of `estimate_memory`.
    """
    # two checkpoints are always on the device, so that offloading the last two saves nothing
    max_offloaded = (
        max(0, cost.config.num_hidden_layers - 2)
        if memory_options.get("has_checkpointing", True)
        else 0
    )
    candidate_counts = (
        range(max_offloaded + 1) if num_offloaded_layers is None else [num_offloaded_layers]
    )
    candidate_fits = (
        MemoryFit(
            num_offloaded_candidate,
            estimate_memory(
                cost, num_tokens, num_offloaded_layers=num_offloaded_candidate, **memory_options
            ),
        )
        for num_offloaded_candidate in candidate_counts
    )
    best_fit = next(candidate_fits)
    for candidate_fit in candidate_fits:
        if (
            available_memory.can_hold(best_fit.memory)
            or candidate_fit.memory.host_bytes
            > PINNABLE_HOST_MEMORY_SHARE * available_memory.host_bytes
        ):
            break
        best_fit = candidate_fit
    return best_fit
