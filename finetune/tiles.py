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

from cab_hf.finetune.settings import TILE, TILED_ABOVE

MLPS = ("mlp", "feed_forward")  # names of attributes with an MLP
NORMS = ("RMSNorm", "LayerNorm")  # suffixes of the class names of norms
# Python modules whose classes compute each element, or each token, independently
ELEMENTWISE = (
    "torch.nn.modules.activation",
    "torch.nn.modules.container",
    "torch.nn.modules.dropout",
    "torch.nn.modules.linear",
    "transformers.activations",
)


def tile_of(tokens: int, given: int | None) -> int:
    """Return the number of tokens per tile; 0: no tiles.

    Args:
        tokens: tokens of a micro batch in a process.
        given: requested tokens per tile; None: `TILE` above `TILED_ABOVE` tokens, else no tiles.
    """
    if given is None:
        return TILE if tokens > TILED_ABOVE else 0
    return given


def compute_in_tiles(model: nn.Module, tokens: int) -> None:
    """Make MLPs, norms and adapters of ``model`` compute in tiles.

    A tile of an MLP has ``tokens`` tokens. A tile of a norm or an adapter has the same number of
    elements, and therefore more tokens. Gradients equal the gradients without tiles up to rounding.
    Each tile has its own dropout mask, which the backward pass repeats. The MLPs of `untiled_mlps`
    still compute all tokens at once.
    """
    modules = {}
    for name, module in model.named_modules():
        is_inside_other = name.startswith(tuple(f"{outer}." for outer in modules))
        if not is_inside_other and _is_row_wise(name, module):
            modules[name] = module
    widths = {name: _width(module) for name, module in modules.items()}
    mlp_widths = [width for name, width in widths.items() if _is_mlp(name)]
    elements = tokens * max(mlp_widths or widths.values())
    for name, module in modules.items():
        forward = type(module).forward.__get__(module)
        module.forward = partial(_in_tiles, forward, elements, widths[name])


def untiled_mlps(model: nn.Module) -> list[str]:
    """Return the class names of MLPs that may not compute each token independently.

    Such MLPs are mixtures of experts, and MLPs with parameters outside of linear layers.
    """
    mlps = [module for name, module in model.named_modules() if _is_mlp(name)]
    return list(dict.fromkeys(type(mlp).__name__ for mlp in mlps if not _is_plain(mlp)))


def _is_mlp(name: str) -> bool:
    """Return True if the module with this full name is an MLP."""
    return name.rpartition(".")[2] in MLPS


def _is_row_wise(name: str, module: nn.Module) -> bool:
    """Return True for an MLP, a norm or an adapter that computes each token independently."""
    class_name = type(getattr(module, "original_module", module)).__name__
    # norms of queries may have a 2-D weight, with a row per head
    is_norm = class_name.endswith(NORMS) and all(x.ndim == 1 for x in module.parameters())
    is_adapter = hasattr(module, "lora_A") and isinstance(module.base_layer, nn.Linear)
    return is_norm or is_adapter or (_is_mlp(name) and _is_plain(module))


def _width(module: nn.Module) -> int:
    """Return the largest number of input or output channels of a linear layer in ``module``.

    Returns 0 if ``module`` has no linear layers.
    """
    linear = (each for each in module.modules() if isinstance(each, nn.Linear))
    return max((max(each.in_features, each.out_features) for each in linear), default=0)


def _is_plain(mlp: nn.Module) -> bool:
    """Return True if an MLP consists of linear layers, adapters and activations only."""
    other_modules = [module for module in mlp.modules() if not isinstance(module, nn.Linear)]
    parameters = [
        name for module in other_modules for name, _ in module.named_parameters(recurse=False)
    ]
    leaves = (module for module in other_modules if next(module.children(), None) is None)
    return not parameters and all(type(module).__module__ in ELEMENTWISE for module in leaves)


def _in_tiles(
    forward: Callable[..., Tensor], elements: int, width: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Apply ``forward`` to a tensor x [..., D] in tiles of rows.

    A call with several arguments or keyword arguments is passed to ``forward`` without tiles.

    Args:
        forward: the method of the module.
        elements: largest number of elements of a tile.
        width: largest number of channels of a row inside the module. The rows of a tile are limited
            by max(width, D).
        args, kwargs: arguments of the call.
    """
    if len(args) != 1 or kwargs:
        return forward(*args, **kwargs)
    (x,) = args
    rows = x.reshape(1, -1, x.shape[-1])
    tile_rows = max(1, elements // max(width, x.shape[-1]))
    if rows.shape[1] <= tile_rows:
        return forward(x)
    has_gradients = torch.is_grad_enabled()
    # rows are saved before the first tile: an outer checkpoint stops recomputing after the last
    # saved tensor, and therefore does not compute tiles
    saved = _SavedRows(rows, tile_rows) if has_gradients else None
    outputs = []
    for number, tile in enumerate(rows.split(tile_rows, 1)):
        if not has_gradients:
            outputs.append(forward(tile))
            continue
        # hooks must not refer to a tile, because the autograd graph keeps hooks in memory
        pack = partial(_number_of_tile, number, tile.data_ptr())
        with saved_tensors_hooks(pack, saved.tile):
            outputs.append(checkpoint(forward, tile, use_reentrant=False))
    return torch.cat(outputs, 1).view(*x.shape[:-1], -1)


def _number_of_tile(number: int, address: int, x: Tensor) -> int | Tensor:
    """Return ``number`` if ``x`` is the tile at memory ``address``, else ``x`` detached."""
    return number if x.numel() and x.data_ptr() == address else x.detach()


class _SavedRows:
    """The input rows [1, R, D] of a module, saved once for the backward passes of all tiles.

    Args:
        rows: the input of the module.
        tile_rows: rows of a tile.
    """

    def __init__(self, rows: Tensor, tile_rows: int) -> None:
        # the argument ``anchor`` requires a gradient, so that autograd creates a node that saves
        # ``rows`` and that `_output` references
        self._output = _Save.apply(torch.empty(0, requires_grad=True), rows)
        self._tile_rows = tile_rows
        self._tiles: tuple[Tensor, ...] | None = None

    def tile(self, packed: int | Tensor) -> Tensor:
        """Return the tile with number ``packed``, or ``packed`` itself if it is a tensor."""
        if isinstance(packed, Tensor):
            return packed
        if self._tiles is None:
            # read once for all tiles, because an outer checkpoint returns a saved tensor only once
            (rows,) = self._output.grad_fn.saved_tensors
            self._tiles = rows.detach().split(self._tile_rows, 1)
        return self._tiles[packed]


class _Save(torch.autograd.Function):
    """An autograd function that saves ``x`` in its node, and returns an empty tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None
