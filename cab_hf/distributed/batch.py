"""Functions that shard a batch over ranks and gather the outputs of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.call.packing import read_common_document_lengths
from cab_hf.distributed.exchange import all_gather, resolve_group
from cab_hf.distributed.sharding import Sharding, get_sharding, lengths_from_boundaries
from cab_hf.plan import DENSE_BLOCK_SIZE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# label that the loss of transformers ignores
IGNORED_LABEL = -100
# attribute of the tensor ``cu_seq_lens_q`` with a checksum of the whole batch, by which attention
# layers check that all ranks have the same batch
CHECKSUM_ATTRIBUTE = "cab_checksum"
# tensors of a batch that `shard` accepts
BATCH_KEYS = (
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
            * ``cu_seq_lens_q``: optional, int [documents + 1], boundaries of packed documents.
            * ``position_ids``: instead of ``cu_seq_lens_q``, int [1 or B, N], positions that
              restart at 0 in every document.
            * ``attention_mask``: optional, must not mask any token.

            All rows have the same document boundaries.
        group: the ranks that share the sequence. None means all ranks.
        block: every chunk is a multiple of ``block`` tokens. Use the same value for
            `cab_hf.context_parallel`.

    Returns:
        A dict of tensors. The number n of tokens per rank is equal on all ranks:

        * ``input_ids``: [B, n]. Padding has token 0, and labels that the loss ignores.
        * ``position_ids``: [1, n], positions in the document.
        * ``cu_seq_lens_q``: boundaries of the documents of the whole sequence.
        * ``labels`` and ``shift_labels``, if the batch has labels: [B, n], both shifted before
          sharding.
        * ``num_items_in_batch``, if the batch has labels: number of labels of the whole batch.

    A transformers model then returns the sum of this rank's token losses, divided by the number of
    labels of the whole batch. The losses of all ranks add up to the mean loss of the batch, and the
    gradients of all ranks add up to its gradient. If gradients are averaged over ranks (DDP, FSDP),
    multiply the loss by the number of ranks.

    The first attention layer compares a checksum of the batch between ranks. The checksum is an
    attribute of ``cu_seq_lens_q``, which copies of the tensor do not have. Therefore call `shard`
    with tensors on the device of the model.

    Raises:
        ValueError: the batch has padding, rows with different documents, both ``labels`` and
            ``shift_labels``, or a tensor with another name.
    """
    group = resolve_group(group)
    for tensor_name in batch:
        if tensor_name not in BATCH_KEYS:
            raise ValueError(
                f"batch must contain only {', '.join(BATCH_KEYS)}, got {tensor_name!r}. Leave it "
                "out, and shard it yourself with cab_hf.distributed.sharding."
            )
    input_ids = batch["input_ids"]
    document_lengths = _find_document_lengths(batch)
    sharding = get_sharding(document_lengths, group.size(), block)
    sharded_batch = {
        "input_ids": _take_shard(input_ids, sharding, group.rank(), padding_value=0),
        "position_ids": sharding.positions[group.rank()].to(input_ids.device)[None],
        "cu_seq_lens_q": torch.tensor(
            [0, *document_lengths], dtype=torch.int32, device=input_ids.device
        ).cumsum(0, dtype=torch.int32),
    }
    shifted_labels = _shift_labels(batch)
    if shifted_labels is not None:
        labels = _take_shard(shifted_labels, sharding, group.rank(), padding_value=IGNORED_LABEL)
        sharded_batch["labels"] = sharded_batch["shift_labels"] = labels
        sharded_batch["num_items_in_batch"] = (shifted_labels != IGNORED_LABEL).sum()
    compared_tensors = [input_ids] if shifted_labels is None else [input_ids, shifted_labels]
    setattr(sharded_batch["cu_seq_lens_q"], CHECKSUM_ATTRIBUTE, _compute_checksum(compared_tensors))
    return sharded_batch


def _compute_checksum(tensors: list[Tensor]) -> int:
    """Return one CRC-32 over the values of all ``tensors``, which contain integers."""
    checksum = 1
    for tensor in tensors:
        checksum = zlib.crc32(tensor.to("cpu", torch.int64).contiguous().numpy(), checksum)
    return checksum


def unshard(
    x: Tensor,
    cu_seqlens: Tensor,
    group: ProcessGroup | None = None,
    dim: int = 1,
    block: int = DENSE_BLOCK_SIZE,
) -> Tensor:
    """All-gather x in the order of the sequence, without padding and without gradient.

    Args:
        x: tensor of this rank with n tokens in dimension ``dim``, such as logits [B, n, V].
        cu_seqlens: ``cu_seq_lens_q`` of the result of `shard`.
        group: the ranks that share the sequence. None means all ranks.
        dim: dimension of the tokens.
        block: the value of ``block`` in the call of `shard`.

    Returns:
        The tensor with N tokens in dimension ``dim``, on every rank.

    Raises:
        ValueError: x has another number of tokens than the shard of a rank.
    """
    group = resolve_group(group)
    sharding = get_sharding(lengths_from_boundaries(cu_seqlens), group.size(), block)
    if x.shape[dim] != sharding.tokens_per_rank:
        raise ValueError(
            f"x must have {sharding.tokens_per_rank} tokens in dimension {dim}, the shard of each "
            f"of {group.size()} ranks, got {x.shape[dim]}. Give the output of the model for a "
            "shard."
        )
    shard_index = sharding.shard_index.to(x.device)
    return all_gather(x.movedim(dim, 0), group).index_select(0, shard_index).movedim(0, dim)


def whole_cache(
    cache: Any,
    cu_seqlens: Tensor,
    group: ProcessGroup | None = None,
    block: int = DENSE_BLOCK_SIZE,
) -> Any:
    """All-gather the KV cache of a sharded prefill, so that every rank can call ``generate``.

    Every rank then stores K and V of the whole sequence: 2 * layers * H_kv * N * D elements, about
    W times as many as before, where W is the number of ranks. The function gathers one layer after
    another, and frees the shard of each layer before it gathers the next layer.

    Call ``generate`` after the end of the `cab_hf.context_parallel` block; every rank then decodes
    without communication. ``generate`` needs one token that is not in the cache: call
    ``cache.crop(-1)`` and pass the ``input_ids`` of the whole sequence.

    Args:
        cache: a transformers ``DynamicCache``, ``past_key_values`` of the prefill's output.
        cu_seqlens: ``cu_seq_lens_q`` of the result of `shard`.
        group: the ranks that share the sequence. None means all ranks.
        block: the value of ``block`` in the call of `shard`.

    Returns:
        The same cache object.

    Raises:
        NotImplementedError: a cache layer does not contain K and V of every token, or the sequence
            has packed documents, which ``generate`` does not support.
    """
    num_documents = len(lengths_from_boundaries(cu_seqlens))
    if num_documents > 1:
        raise NotImplementedError(
            "cu_seqlens must describe one document to continue with generate, got "
            f"{num_documents}. Prefill the documents separately."
        )
    for cache_layer in cache.layers:
        if type(cache_layer).__name__ != "DynamicLayer":
            raise NotImplementedError(
                f"cache layers must be of type DynamicLayer, got {type(cache_layer).__name__}. Use "
                "a DynamicCache of a model whose layers all keep the keys of every token."
            )
    for cache_layer in cache.layers:
        unshard_args = {"cu_seqlens": cu_seqlens, "group": group, "block": block}
        cache_layer.keys = unshard(cache_layer.keys, dim=2, **unshard_args).contiguous()
        cache_layer.values = unshard(cache_layer.values, dim=2, **unshard_args).contiguous()
    return cache


def _shift_labels(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the shifted labels of a batch, int [B, N]; None if the batch has no labels.

    The shifted label of a token is the label of the next token. The last token has label
    `IGNORED_LABEL`.

    Raises:
        ValueError: the batch has both ``labels`` and ``shift_labels``.
    """
    labels, shifted_labels = batch.get("labels"), batch.get("shift_labels")
    if labels is not None and shifted_labels is not None:
        raise ValueError(
            "batch must have either labels or shift_labels, got both. Leave out one of them."
        )
    return shifted_labels if labels is None else F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def _take_shard(x: Tensor, sharding: Sharding, rank: int, padding_value: int) -> Tensor:
    """Return the shard [B, n] of x [B, N]; padding tokens have the value ``padding_value``."""
    local_tokens = x.index_select(1, sharding.sequence_index[rank].to(x.device))
    return local_tokens.masked_fill(~sharding.is_real[rank].to(x.device), padding_value)


def _find_document_lengths(batch: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the number of tokens of each packed document of a batch row.

    All rows of a batch have the same document boundaries.

    Raises:
        ValueError: the batch has padding, rows with different documents, or boundaries that do not
            end at the number of tokens.
    """
    input_ids, attention_mask = batch["input_ids"], batch.get("attention_mask")
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        raise ValueError(
            f"attention_mask must have no padding, got {int((attention_mask == 0).sum())} padding "
            "tokens. Give rows of one length, or pack the rows."
        )
    cu_seq_lens, position_ids = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    num_tokens = input_ids.shape[1]
    if cu_seq_lens is not None:
        document_lengths = lengths_from_boundaries(cu_seq_lens)
    elif position_ids is None:
        document_lengths = (num_tokens,)
    else:
        document_lengths = read_common_document_lengths(position_ids)
    if sum(document_lengths) != num_tokens:
        raise ValueError(
            f"cu_seq_lens_q must end at {num_tokens}, the number of tokens in input_ids, got "
            f"{sum(document_lengths)}. Give the boundaries of the whole sequence."
        )
    return document_lengths
