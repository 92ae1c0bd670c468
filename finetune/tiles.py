"""MLPs, norms and adapters computed in tiles of the sequence, because tokens are independent.

An MLP of 524,288 tokens and 14,336 channels allocates tensors of 14 GiB, norms compute in float32,
and adapters add a product. Tiles avoid such tensors: only the input of the module is kept, and each
tile is recomputed in the backward pass. Under gradient checkpointing this adds no third MLP pass,
because the layer's second forward pass stops before the MLP.
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

MLPS = ("mlp", "feed_forward")
NORMS = ("RMSNorm", "LayerNorm")
# classes in these modules compute each number, or each token, independently
ELEMENTWISE = (
    "torch.nn.modules.activation",
    "torch.nn.modules.container",
    "torch.nn.modules.dropout",
    "torch.nn.modules.linear",
    "transformers.activations",
)


def tile_of(tokens: int, given: int | None) -> int:
    """Return the tokens per tile for ``tokens`` of a process; 0: no tiles, None: the default."""
    if given is None:
        return TILE if tokens > TILED_ABOVE else 0
    return given


def compute_in_tiles(model: nn.Module, tokens: int) -> None:
    """Compute MLPs in tiles of ``tokens``, norms and adapters in tiles of as many elements.

    Gradients equal the gradients without tiles up to rounding. Every tile draws its own dropout
    mask, and the backward pass repeats the mask. `untiled_mlps` still compute all tokens at once.
    """
    modules = {}
    for name, module in model.named_modules():
        inside = name.startswith(tuple(f"{outer}." for outer in modules))
        if not inside and _is_row_wise(name, module):
            modules[name] = module
    widths = {name: _width(module) for name, module in modules.items()}
    mlps = [width for name, width in widths.items() if _is_mlp(name)]
    elements = tokens * max(mlps or widths.values())
    for name, module in modules.items():
        forward = type(module).forward.__get__(module)
        module.forward = partial(_in_tiles, forward, elements, widths[name])


def untiled_mlps(model: nn.Module) -> list[str]:
    """Return the class names of MLPs in which tokens may not be independent.

    These are mixtures of experts, and MLPs with parameters outside of linear layers.
    """
    mlps = [module for name, module in model.named_modules() if _is_mlp(name)]
    return list(dict.fromkeys(type(mlp).__name__ for mlp in mlps if not _is_plain(mlp)))


def _is_mlp(name: str) -> bool:
    return name.rpartition(".")[2] in MLPS


def _is_row_wise(name: str, module: nn.Module) -> bool:
    """Return True for an MLP, a norm or an adapter in which tokens are independent."""
    kind = type(getattr(module, "original_module", module)).__name__
    # some norms of queries have a weight per head
    norm = kind.endswith(NORMS) and all(each.ndim == 1 for each in module.parameters())
    adapter = hasattr(module, "lora_A") and isinstance(module.base_layer, nn.Linear)
    return norm or adapter or (_is_mlp(name) and _is_plain(module))


def _width(module: nn.Module) -> int:
    """Return the most channels of a token between linear layers of ``module``; 0 without any."""
    linear = (each for each in module.modules() if isinstance(each, nn.Linear))
    return max((max(each.in_features, each.out_features) for each in linear), default=0)


def _is_plain(mlp: nn.Module) -> bool:
    """Return True if an MLP consists of linear layers, adapters and activations alone."""
    others = [module for module in mlp.modules() if not isinstance(module, nn.Linear)]
    own = [name for module in others for name, _ in module.named_parameters(recurse=False)]
    leaves = (module for module in others if next(module.children(), None) is None)
    return not own and all(type(module).__module__ in ELEMENTWISE for module in leaves)


def _in_tiles(
    forward: Callable[..., Tensor], elements: int, width: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Apply ``forward`` to x [..., D] in tiles of rows with ``elements`` elements.

    Args:
        width: the most channels of a row inside the module; D counts if it is larger.
    """
    if len(args) != 1 or kwargs:
        return forward(*args, **kwargs)
    (x,) = args
    rows = x.reshape(1, -1, x.shape[-1])
    size = max(1, elements // max(width, x.shape[-1]))
    if rows.shape[1] <= size:
        return forward(x)
    learning = torch.is_grad_enabled()
    # saved once and first: a checkpoint around the module then has all tensors it needs
    saved = _Saved(rows, size) if learning else None
    results = []
    for place, tile in enumerate(rows.split(size, 1)):
        if not learning:
            results.append(forward(tile))
            continue
        # hooks stay in the graph, so they must not refer to a tile
        with saved_tensors_hooks(partial(_numbered, place, tile.data_ptr()), saved.tile):
            results.append(checkpoint(forward, tile, use_reentrant=False))
    return torch.cat(results, 1).view(*x.shape[:-1], -1)


def _numbered(place: int, address: int, x: Tensor) -> int | Tensor:
    """Return the ``place`` of the tile at ``address``; any other value unchanged."""
    return place if x.numel() and x.data_ptr() == address else x.detach()


class _Saved:
    """Rows [1, R, D] saved for the backward pass, which reads tiles of ``size`` rows."""

    def __init__(self, rows: Tensor, size: int) -> None:
        # an input with a gradient makes the node that the output keeps alive
        self._output = _Save.apply(torch.empty(0, requires_grad=True), rows)
        self._size = size
        self._tiles: tuple[Tensor, ...] | None = None

    def tile(self, packed: int | Tensor) -> Tensor:
        """Return the tile with that number; any other value unchanged."""
        if isinstance(packed, Tensor):
            return packed
        if self._tiles is None:
            # a checkpoint around it returns recomputed tensors only once
            (rows,) = self._output.grad_fn.saved_tensors
            self._tiles = rows.detach().split(self._size, 1)
        return self._tiles[packed]


class _Save(torch.autograd.Function):
    """An autograd function that saves a tensor and computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None
