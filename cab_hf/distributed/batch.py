"""Functions that shard a batch over ranks and gather the outputs of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.packing import counted_lengths
from cab_hf.distributed.exchange import all_gather, group_of
from cab_hf.distributed.sharding import Sharding, lengths_between, sharding_of
from cab_hf.plan import DENSE_BLOCK_SIZE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

IGNORED = -100
# attribute of a shard's ``cu_seq_lens_q`` with a checksum of the whole batch, to compare batches of
# ranks; attention receives no other tensor of the whole sequence
CHECKSUM = "cab_checksum"
KNOWN = (
    *("input_ids", "labels", "shift_labels"),
    *("position_ids", "attention_mask", "cu_seq_lens_q"),
)


def shard(
    batch: Mapping[str, Tensor], group: ProcessGroup | None = None, block: int = DENSE_BLOCK_SIZE
) -> dict[str, Tensor]:
    """Return this rank's shard of a batch, for a model inside `cab_hf.context_parallel`.

    Args:
        batch: the whole batch, equal on all ranks, with these tensors:

            * ``input_ids``: int [B, N].
            * ``labels``: optional, int [B, N].
            * ``shift_labels``: instead of ``labels``, labels that are already shifted.
            * ``cu_seq_lens_q``: int [documents + 1], boundaries of packed documents.
            * ``position_ids``: instead of ``cu_seq_lens_q``, int [1 or B, N], positions that
              restart at 0.
            * ``attention_mask``: optional, without padding.

            All rows have the same document boundaries.
        group: the ranks that hold one sequence. None means all ranks.
        block: chunks are multiples of ``block`` tokens, as in `cab_hf.context_parallel`.

    Returns:
        A dict of tensors, where n is the same on all ranks:

        * ``input_ids``: [B, n]. Padding has token 0 and does not count in the loss.
        * ``position_ids``: [1, n], positions in the document.
        * ``cu_seq_lens_q``: boundaries of the documents of the whole sequence.
        * ``labels`` and ``shift_labels``, if the batch has labels: [B, n], both shifted before
          sharding.
        * ``num_items_in_batch``, if the batch has labels: number of labels of the whole batch.

    A transformers model then returns the share of its rank in the mean loss. The losses of all
    ranks add up to the mean loss, and so do their gradients. If gradients are averaged over ranks
    (DDP, FSDP), multiply the loss by the number of ranks.

    The first attention layer checks that the batch is equal on all ranks. It reads a checksum that
    is lost if ``cu_seq_lens_q`` is copied, so shard on the device of the model.

    Raises:
        ValueError: the batch has padding, rows with different documents, labels given twice, or a
            tensor that cannot be sharded.
    """
    group = group_of(group)
    for name in batch:
        if name not in KNOWN:
            raise ValueError(
                f"batch must contain only {', '.join(KNOWN)}, got {name!r}. Leave it out, and "
                "shard it yourself with cab_hf.distributed.sharding."
            )
    ids = batch["input_ids"]
    lengths = _documents(batch)
    sharding = sharding_of(lengths, group.size(), block)
    result = {
        "input_ids": _take_shard(ids, sharding, group.rank(), 0),
        "position_ids": sharding.positions[group.rank()].to(ids.device)[None],
        "cu_seq_lens_q": torch.tensor([0, *lengths], dtype=torch.int32, device=ids.device).cumsum(
            0, dtype=torch.int32
        ),
    }
    shifted = _shifted(batch)
    if shifted is not None:
        result["labels"] = result["shift_labels"] = _take_shard(
            shifted, sharding, group.rank(), IGNORED
        )
        result["num_items_in_batch"] = (shifted != IGNORED).sum()
    compared = [ids] if shifted is None else [ids, shifted]
    content = (x.to("cpu", torch.int64).contiguous().numpy() for x in compared)
    setattr(
        result["cu_seq_lens_q"], CHECKSUM, reduce(lambda sum, x: zlib.crc32(x, sum), content, 1)
    )
    return result


def unshard(
    x: Tensor,
    cu_seqlens: Tensor,
    group: ProcessGroup | None = None,
    dim: int = 1,
    block: int = DENSE_BLOCK_SIZE,
) -> Tensor:
    """Gather x from all ranks in the order of the sequence, without padding and without gradient.

    Every rank receives the result.

    Args:
        x: tensor with n tokens in dimension ``dim``, such as logits [B, n, V].
        cu_seqlens: ``cu_seq_lens_q`` from `shard`.
        group: the ranks that hold one sequence. None means all ranks.
        dim: dimension of the tokens.
        block: tokens, as in `shard`.

    Raises:
        ValueError: x has another number of tokens than the shard of a rank.
    """
    group = group_of(group)
    sharding = sharding_of(lengths_between(cu_seqlens), group.size(), block)
    if x.shape[dim] != sharding.tokens:
        raise ValueError(
            f"x must have {sharding.tokens} tokens in dimension {dim}, the shard of each of "
            f"{group.size()} ranks, got {x.shape[dim]}. Give the output of the model for a shard."
        )
    owner = sharding.owner.to(x.device)
    return all_gather(x.movedim(dim, 0), group).index_select(0, owner).movedim(0, dim)


def whole_cache(
    cache: Any,
    cu_seqlens: Tensor,
    group: ProcessGroup | None = None,
    block: int = DENSE_BLOCK_SIZE,
) -> Any:
    """All-gather the KV cache of a sharded prefill, so that every rank can call ``generate``.

    Every rank then holds K and V of the whole sequence: 2 * layers * H_kv * N * D elements, which
    is W times its shard. Layers are gathered one by one, so that at most one layer is held twice.

    Call ``generate`` after the `cab_hf.context_parallel` block; every rank then decodes alone.
    ``generate`` needs a token to start with: call ``cache.crop(-1)`` and pass the whole
    ``input_ids``.

    Args:
        cache: a transformers ``DynamicCache``, ``past_key_values`` of the prefill's output.
        cu_seqlens: ``cu_seq_lens_q`` from `shard`.
        group: the ranks that hold one sequence. None means all ranks.
        block: tokens, as in `shard`.

    Returns:
        The same cache object.

    Raises:
        NotImplementedError: a cache layer does not hold K and V of every token, or the sequence
            has packed documents, which ``generate`` does not support.
    """
    documents = len(lengths_between(cu_seqlens))
    if documents > 1:
        raise NotImplementedError(
            f"cu_seqlens must describe one document to continue with generate, got {documents}. "
            "Prefill the documents separately."
        )
    for layer in cache.layers:
        if type(layer).__name__ != "DynamicLayer":
            raise NotImplementedError(
                f"cache layers must be of type DynamicLayer, got {type(layer).__name__}. Use a "
                "DynamicCache of a model whose layers all keep the keys of every token."
            )
    for layer in cache.layers:
        layer.keys = unshard(layer.keys, cu_seqlens, group, 2, block).contiguous()
        layer.values = unshard(layer.values, cu_seqlens, group, 2, block).contiguous()
    return cache


def _shifted(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the label that each token predicts, [B, N]; None if the batch has no labels."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if labels is not None and shifted is not None:
        raise ValueError(
            "batch must have either labels or shift_labels, got both. Leave out one of them."
        )
    return shifted if labels is None else F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _take_shard(x: Tensor, sharding: Sharding, rank: int, padding: int) -> Tensor:
    """Return the tokens of a rank, [B, n], of x [B, N], with ``padding`` in padding slots."""
    tokens = x.index_select(1, sharding.slots[rank].to(x.device))
    return tokens.masked_fill(~sharding.real[rank].to(x.device), padding)


def _documents(batch: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the lengths of the documents that are packed in every row of a batch."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()):
        raise ValueError(
            f"attention_mask must have no padding, got {int((mask == 0).sum())} padding tokens. "
            "Give rows of one length, or pack the rows."
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
            f"cu_seq_lens_q must end at {tokens}, the number of tokens in input_ids, got "
            f"{sum(lengths)}. Give the boundaries of the whole sequence."
        )
    return lengths
