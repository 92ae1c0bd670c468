"""Tiles of keys for the sweep, in which the key blocks alternate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import Tiles, described, descriptors, vectors_at

# lanes that share a row of a product, and the neighbouring columns that these lanes hold
LANES, COLUMNS_OF_LANES = 4, 8


def padded_to_blocks(keys: Tensor, key_block: int) -> Tensor:
    """Return keys [B, H_kv, N_k, C] with zeros after the last key, up to whole key blocks."""
    missing = -keys.shape[2] % key_block
    if not missing:
        return keys
    # pad 8-bit floats as bits: PyTorch cannot pad their dtype
    bits = keys.view(torch.uint8) if keys.element_size() == 1 else keys
    return F.pad(bits, (0, 0, 0, missing)).view(keys.dtype)


def alternating(
    keys: Tensor, first: int, key_block: int, tile: int
) -> tuple[list[TensorDescriptor | Tiles], int]:
    """Return tiles of keys [B, H_kv, N_k, C] whose key blocks alternate, and their interleave.

    In a row of a product, each of `LANES` lanes holds every fourth pair of columns. With keys in
    order, a lane would hold some columns of every block, and a maximum per block would need
    exchanges between lanes. With alternating blocks, a lane holds the logits of one block and
    compares registers only. Tensor descriptors or pointers read the keys in this order.

    Returns:
        Two tiles, one of the first channels and one of the others, and the number of adjacent keys
        of the same block.
    """
    blocks = max(1, tile // key_block)
    if blocks == 1:
        # a block is one tile or several tiles
        key_block = together = tile
    else:
        together = min(COLUMNS_OF_LANES // min(LANES, blocks), key_block)
    if not launch.reads_by_descriptor(keys.device):
        parts = keys[..., :first], keys[..., first:] if first < keys.shape[3] else keys
        return descriptors(tile, *parts), together
    keys = padded_to_blocks(keys, key_block)
    # [plane, part of a block, block, key, C]
    x = described(keys).flatten(0, 1).unflatten(1, (-1, key_block // together, together))
    x = x.transpose(1, 2)
    box = [1, key_block // together, blocks, together]
    parts = (x[..., :first], x[..., first:] if first < x.shape[-1] else x)
    made = [TensorDescriptor.from_tensor(part, [*box, part.shape[-1]]) for part in parts]
    return made, together


@triton.jit
def load_keys(
    x, plane, kv_heads, column, key, SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Load the keys ``column + key`` from a tile of `alternating`, [BLOCK_N, CHANNELS]."""
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([plane, 0, column // SIZE, 0, 0]).reshape(BLOCK_N, CHANNELS)
    else:
        at = vectors_at(x, plane // kv_heads, plane % kv_heads, column + key)
        inside = (column + key < x.tokens)[:, None]
        tile = tl.load(at + tl.arange(0, CHANNELS)[None, :], mask=inside, other=0.0)
    return tile
