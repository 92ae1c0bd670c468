"""Compute MLPs, norms and adapters in tiles of the sequence, to save memory.

An MLP with 14,336 channels allocates tensors of 14 GiB for 524,288 tokens, and norms compute in
float32. These modules compute each token independently, so that they can process one tile of tokens
at a time. Only the input of the module is saved, and the backward pass recomputes each tile. Under
gradient checkpointing this adds no third forward pass of the MLP, because the recomputation of the
layer stops before the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cab_hf.finetune.settings import DEFAULT_TILE_TOKENS, MAX_UNTILED_TOKENS

MLP_ATTRIBUTES = ("mlp", "feed_forward")  # names of attributes with an MLP
NORM_CLASS_SUFFIXES = ("RMSNorm", "LayerNorm")  # suffixes of the class names of norms
# Python modules whose classes compute each element, or each token, independently
ELEMENTWISE_MODULES = (
    "torch.nn.modules.activation",
    "torch.nn.modules.container",
    "torch.nn.modules.dropout",
    "torch.nn.modules.linear",
    "transformers.activations",
)


def choose_tile_tokens(num_tokens: int, requested_tile_tokens: int | None) -> int:
    """Return the number of tokens per tile; 0: no tiles.

    Args:
        num_tokens: tokens of a micro batch in a process.
        requested_tile_tokens: tokens per tile; None: `DEFAULT_TILE_TOKENS` above
            `MAX_UNTILED_TOKENS` tokens, else no tiles.
    """
    if requested_tile_tokens is None:
        return DEFAULT_TILE_TOKENS if num_tokens > MAX_UNTILED_TOKENS else 0
    return requested_tile_tokens


def compute_in_tiles(model: nn.Module, tile_tokens: int) -> None:
    """Make MLPs, norms and adapters of ``model`` compute in tiles.

    A tile of an MLP has ``tile_tokens`` tokens. A tile of a norm or an adapter has the same number
    of elements, and therefore more tokens. Gradients equal the gradients without tiles up to
    rounding. Each tile has its own dropout mask, which the backward pass repeats. The MLPs of
    `find_untiled_mlps` still compute all tokens at once.
    """
    tiled_modules = {}
    for module_name, module in model.named_modules():
        is_in_tiled_module = module_name.startswith(
            tuple(f"{tiled_name}." for tiled_name in tiled_modules)
        )
        if not is_in_tiled_module and _is_row_wise(module_name, module):
            tiled_modules[module_name] = module
    max_channels_by_name = {
        module_name: _get_max_channels(module) for module_name, module in tiled_modules.items()
    }
    max_channels_of_mlps = [
        max_channels
        for module_name, max_channels in max_channels_by_name.items()
        if _is_mlp(module_name)
    ]
    max_elements = tile_tokens * max(max_channels_of_mlps or max_channels_by_name.values())
    for module_name, module in tiled_modules.items():
        untiled_forward = type(module).forward.__get__(module)
        module.forward = partial(
            _apply_in_tiles, untiled_forward, max_elements, max_channels_by_name[module_name]
        )


def find_untiled_mlps(model: nn.Module) -> list[str]:
    """Return the class names of MLPs that may not compute each token independently.

    Such MLPs are mixtures of experts, and MLPs with parameters outside of linear layers.
    """
    mlps = [module for module_name, module in model.named_modules() if _is_mlp(module_name)]
    return list(dict.fromkeys(type(mlp).__name__ for mlp in mlps if not _is_plain_mlp(mlp)))


def _is_mlp(module_name: str) -> bool:
    """Return True if the module with this full name is an MLP."""
    return module_name.rpartition(".")[2] in MLP_ATTRIBUTES


def _is_row_wise(module_name: str, module: nn.Module) -> bool:
    """Return True for an MLP, a norm or an adapter that computes each token independently."""
    class_name = type(getattr(module, "original_module", module)).__name__
    # norms of queries may have a 2-D weight, with a row per head
    is_norm = class_name.endswith(NORM_CLASS_SUFFIXES) and all(
        parameter.ndim == 1 for parameter in module.parameters()
    )
    is_adapter = hasattr(module, "lora_A") and isinstance(module.base_layer, nn.Linear)
    return is_norm or is_adapter or (_is_mlp(module_name) and _is_plain_mlp(module))


def _get_max_channels(module: nn.Module) -> int:
    """Return the largest number of input or output channels of a linear layer in ``module``.

    Returns 0 if ``module`` has no linear layers.
    """
    linear_layers = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
    return max((max(layer.in_features, layer.out_features) for layer in linear_layers), default=0)


def _is_plain_mlp(mlp: nn.Module) -> bool:
    """Return True if an MLP consists of linear layers, adapters and activations only."""
    other_modules = [module for module in mlp.modules() if not isinstance(module, nn.Linear)]
    parameter_names = [
        parameter_name
        for module in other_modules
        for parameter_name, _ in module.named_parameters(recurse=False)
    ]
    leaf_modules = (module for module in other_modules if next(module.children(), None) is None)
    return not parameter_names and all(
        type(module).__module__ in ELEMENTWISE_MODULES for module in leaf_modules
    )


def _apply_in_tiles(
    untiled_forward: Callable[..., Tensor],
    max_elements: int,
    max_channels: int,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Apply ``untiled_forward`` to a tensor x [..., D] in tiles of rows.

    A call with several arguments or keyword arguments is passed to ``untiled_forward`` without
    tiles.

    Args:
        untiled_forward: the method of the module.
        max_elements: largest number of elements of a tile.
        max_channels: largest number of channels of a row inside the module. The rows of a tile are
            limited by max(max_channels, D).
        args, kwargs: arguments of the call.
    """
    if len(args) != 1 or kwargs:
        return untiled_forward(*args, **kwargs)
    (module_input,) = args
    input_rows = module_input.reshape(1, -1, module_input.shape[-1])
    rows_per_tile = max(1, max_elements // max(max_channels, module_input.shape[-1]))
    if input_rows.shape[1] <= rows_per_tile:
        return untiled_forward(module_input)
    needs_gradients = torch.is_grad_enabled()
    # rows are saved before the first tile: an outer checkpoint stops recomputing after the last
    # saved tensor, and therefore does not compute tiles
    saved_rows = _SavedRows(input_rows, rows_per_tile) if needs_gradients else None
    outputs = []
    for tile_index, tile in enumerate(input_rows.split(rows_per_tile, 1)):
        if not needs_gradients:
            outputs.append(untiled_forward(tile))
            continue
        # hooks must not refer to a tile, because the autograd graph keeps hooks in memory
        pack_hook = partial(_pack_tile, tile_index, tile.data_ptr())
        with saved_tensors_hooks(pack_hook, saved_rows.unpack_tile):
            outputs.append(checkpoint(untiled_forward, tile, use_reentrant=False))
    return torch.cat(outputs, 1).view(*module_input.shape[:-1], -1)


def _pack_tile(tile_index: int, tile_address: int, tensor: Tensor) -> int | Tensor:
    """Return ``tile_index`` if ``tensor`` is at ``tile_address``, else the detached tensor."""
    return tile_index if tensor.numel() and tensor.data_ptr() == tile_address else tensor.detach()


class _SavedRows:
    """The input rows [1, R, D] of a module, saved once for the backward passes of all tiles.

    Args:
        input_rows: the input of the module.
        rows_per_tile: rows of a tile.
    """

    def __init__(self, input_rows: Tensor, rows_per_tile: int) -> None:
        # the first argument requires a gradient, so that autograd creates a node. The node saves
        # ``input_rows``, and `_output` references the node
        self._output = _SaveRowsFunction.apply(torch.empty(0, requires_grad=True), input_rows)
        self._rows_per_tile = rows_per_tile
        self._tiles: tuple[Tensor, ...] | None = None

    def unpack_tile(self, index_or_tensor: int | Tensor) -> Tensor:
        """Return the tile with this index; return a tensor unchanged."""
        if isinstance(index_or_tensor, Tensor):
            return index_or_tensor
        if self._tiles is None:
            # read once for all tiles, because an outer checkpoint returns a saved tensor only once
            (input_rows,) = self._output.grad_fn.saved_tensors
            self._tiles = input_rows.detach().split(self._rows_per_tile, 1)
        return self._tiles[index_or_tensor]


class _SaveRowsFunction(torch.autograd.Function):
    """An autograd function that saves ``input_rows`` in its node, and returns an empty tensor."""

    @staticmethod
    def forward(ctx: Any, tensor_requiring_grad: Tensor, input_rows: Tensor) -> Tensor:
        ctx.save_for_backward(input_rows)
        return tensor_requiring_grad.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None
