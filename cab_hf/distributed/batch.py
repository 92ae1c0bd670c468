"""Batches sharded to ranks, and what ranks have made of them put together."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.packing import counted_lengths
from cab_hf.distributed.exchange import gathered, group_of
from cab_hf.distributed.sharding import Sharding, lengths_between, sharding_of
from cab_hf.plan import EXACT_BLOCK

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

IGNORED = -100
# attribute of the ``cu_seq_lens_q`` of a shard: what ranks must have in common of all that was
# sharded. Attention gets this tensor, and no other one describes the whole text
CHECKSUM = "cab_checksum"
KNOWN = (
    *("input_ids", "labels", "shift_labels"),
    *("position_ids", "attention_mask", "cu_seq_lens_q"),
)


def shard(
    batch: Mapping[str, Tensor], group: ProcessGroup | None = None, block: int = EXACT_BLOCK
) -> dict[str, Tensor]:
    """This rank's part of a batch, for a model inside `cab_hf.context_parallel`.

    Args:
        batch: the whole of it, the same on every rank: ``input_ids`` int [B, N] and, where there
            are, ``labels`` [B, N], or ``shift_labels`` that are shifted already, and what tells
            packed documents: ``cu_seq_lens_q`` int [documents + 1], or ``position_ids`` [1 or B, N]
            that restart at 0. Rows are packed alike. An ``attention_mask`` must have no padding in
            it.
        group, block: as in `cab_hf.context_parallel`.

    Returns:
        ``input_ids`` [B, n], n the same on all ranks (padding is token 0, and counts in no loss);
        ``position_ids`` [1, n], positions in the document; ``cu_seq_lens_q``, where documents of
        the whole text begin and end. With labels also ``labels`` and ``shift_labels`` [B, n], both
        shifted before they were sharded, and ``num_items_in_batch``, how many labels of the whole
        batch count: by these a transformers model returns its rank's share of the mean loss, which
        the ranks' losses add up to, as their gradients do. Where gradients are averaged over ranks
        (DDP, FSDP), scale the loss by their number.

    Whether the batch is the same on every rank is known here alone. The first layer compares it, by
    a checksum that ``cu_seq_lens_q`` carries until it is copied: shard on the device of the model.

    Raises:
        ValueError: for padding, rows packed differently, labels given twice, or what nobody knows
            how to deal out.
    """
    group = group_of(group)
    for name in batch:
        if name not in KNOWN:
            raise ValueError(
                f"batch has {name!r}, which shard cannot split over ranks; leave "
                "it out, and split it yourself with cab_hf.distributed.sharding."
            )
    ids = batch["input_ids"]
    lengths = _documents(batch)
    sharding = sharding_of(lengths, group.size(), block)
    mine = {
        "input_ids": _dealt(ids, sharding, group.rank(), 0),
        "position_ids": sharding.positions[group.rank()].to(ids.device)[None],
        "cu_seq_lens_q": torch.tensor([0, *lengths], dtype=torch.int32, device=ids.device).cumsum(
            0, dtype=torch.int32
        ),
    }
    shifted = _shifted(batch)
    if shifted is not None:
        mine["labels"] = mine["shift_labels"] = _dealt(shifted, sharding, group.rank(), IGNORED)
        mine["num_items_in_batch"] = (shifted != IGNORED).sum()
    known = [ids] if shifted is None else [ids, shifted]
    content = (x.to("cpu", torch.int64).contiguous().numpy() for x in known)
    setattr(mine["cu_seq_lens_q"], CHECKSUM, reduce(lambda sum, x: zlib.crc32(x, sum), content, 1))
    return mine


def unshard(
    x: Tensor,
    cu_seqlens: Tensor,
    group: ProcessGroup | None = None,
    dim: int = 1,
    block: int = EXACT_BLOCK,
) -> Tensor:
    """The x of all ranks in the order of the text, padding left out; on every rank, no gradient.

    Args:
        x: of n tokens in dimension ``dim``, such as logits [B, n, V].
        cu_seqlens: the ``cu_seq_lens_q`` that `shard` returned.
    """
    group = group_of(group)
    sharding = sharding_of(lengths_between(cu_seqlens), group.size(), block)
    if x.shape[dim] != sharding.tokens:
        raise ValueError(
            f"x has {x.shape[dim]} tokens in dimension {dim}, and a rank of {group.size()} holds "
            f"{sharding.tokens}; give what the model made of a shard."
        )
    holders = sharding.holders.to(x.device)
    return gathered(x.movedim(dim, 0), group).index_select(0, holders).movedim(0, dim)


def whole_cache(
    cache: Any,
    cu_seqlens: Tensor,
    group: ProcessGroup | None = None,
    block: int = EXACT_BLOCK,
) -> Any:
    """The cache of a prefill over ranks, made whole on each of them, so that ``generate`` goes on.

    Every rank then holds K and V of the whole text, W times what it had, and has received all but
    its own part of it: 2 layers H_kv N D elements. Layers take turns, so that one of them is held
    twice at a time. What follows is one process's, each rank for itself, outside of
    `cab_hf.context_parallel`. ``generate`` wants a token to begin with: take the last one out by
    ``cache.crop(-1)``, and give it the whole ``input_ids``.

    Args:
        cache: a transformers ``DynamicCache``, ``past_key_values`` of the prefill's output.
        cu_seqlens: the ``cu_seq_lens_q`` that `shard` returned.

    Returns:
        The same cache.

    Raises:
        NotImplementedError: for layers that hold anything else than the K and V of every token,
            and for packed documents, which generation does not know.
    """
    documents = len(lengths_between(cu_seqlens))
    if documents > 1:
        raise NotImplementedError(
            f"cu_seqlens has {documents} documents; a cache from which generate goes on holds one. "
            "Prefill them apart."
        )
    for layer in cache.layers:
        if type(layer).__name__ != "DynamicLayer":
            raise NotImplementedError(
                f"a layer of the cache is a {type(layer).__name__}; whole_cache knows "
                "DynamicLayer, which holds the keys of every token."
            )
    for layer in cache.layers:
        layer.keys = unshard(layer.keys, cu_seqlens, group, 2, block).contiguous()
        layer.values = unshard(layer.values, cu_seqlens, group, 2, block).contiguous()
    return cache


def _shifted(batch: Mapping[str, Tensor]) -> Tensor | None:
    """[B, N], what each token is to predict; None where no labels are given."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if labels is not None and shifted is not None:
        raise ValueError(
            "batch has labels and shift_labels, which are labels shifted already; give one of them."
        )
    return shifted if labels is None else F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _dealt(x: Tensor, sharding: Sharding, rank: int, padding: int) -> Tensor:
    """[B, n] of [B, N]."""
    mine = x.index_select(1, sharding.slots[rank].to(x.device))
    return mine.masked_fill(~sharding.real[rank].to(x.device), padding)


def _documents(batch: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The lengths of the documents that every row of a batch is packed of."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()):
        raise ValueError(
            f"attention_mask has {int((mask == 0).sum())} padding tokens; a text is sharded to "
            "ranks without: give rows of one length, or pack them."
        )
    cu_seq_lens, positions = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    tokens = ids.shape[1]
    if cu_seq_lens is not None:
        lengths = lengths_between(cu_seq_lens)
    elif positions is None:
        lengths = (tokens,)
    else:
        lengths = counted_lengths(positions)
    if sum(lengths) != tokens:
        raise ValueError(
            f"cu_seq_lens_q must end at {tokens}, the number of tokens in input_ids, got an end "
            f"at {sum(lengths)}."
        )
    return lengths
