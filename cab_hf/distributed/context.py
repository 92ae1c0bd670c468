"""`context_parallel`: attention of a model over a sequence that is sharded over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from cab_hf.call.call import Call
from cab_hf.call.forward_state import SETTINGS_CHANGED_ERROR
from cab_hf.call.mask import MaskDetails
from cab_hf.call.packing import DocumentLength
from cab_hf.call.scope import SHARDED_CONFIGS, is_sharded, set_context_during_calls
from cab_hf.call.validate import find_unsupported_feature
from cab_hf.config import IMPLEMENTATION_NAMES, CabConfig
from cab_hf.distributed.batch import CHECKSUM_ATTRIBUTE
from cab_hf.distributed.exchange import (
    RankLost,
    publish_failure,
    require_equal_values,
    resolve_group,
    withdraw_failure,
)
from cab_hf.distributed.kv_gather import KV_HEADS_PER_GATHER
from cab_hf.distributed.sequence_hooks import install_sequence_hooks
from cab_hf.distributed.sharded import SHARDING_KEY, ShardedMask
from cab_hf.distributed.sharding import Sharding, get_sharding, lengths_from_boundaries
from cab_hf.distributed.zigzag import collect_compared_values, require_stride_and_block
from cab_hf.hf.layers import inner_model
from cab_hf.hf.token_mixers import refuse_token_mixers
from cab_hf.plan import DENSE_BLOCK_SIZE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ContextParallelState:
    """The mutable state of one ``with`` block of `context_parallel`.

    Attributes:
        has_cu_seq_lens: True if the latest call of the model passed ``cu_seq_lens_q``.
        is_over: True if the ``with`` block has ended.
    """

    def __init__(self) -> None:
        self.has_cu_seq_lens = False
        self.is_over = False

    def record_cu_seq_lens(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record whether this call of the model passes ``cu_seq_lens_q``. A forward pre-hook."""
        self.has_cu_seq_lens = kwargs.get("cu_seq_lens_q") is not None


@dataclass(frozen=True, eq=False)
class ParallelSettings:
    """Settings of one model inside `context_parallel`.

    Attributes:
        group: the ranks that share the sequence.
        heads_k_stride: number of KV heads per all-gather of K and V.
        block: every chunk of a document is a multiple of ``block`` tokens.
        regather_kv: True to gather K and V again in the backward pass, False to save both.
        model_name: class name of the model, for error messages.
        state: mutable state of the ``with`` block.
    """

    group: ProcessGroup
    heads_k_stride: int
    block: int
    regather_kv: bool
    model_name: str
    state: ContextParallelState = field(default_factory=ContextParallelState)

    def make_sharded_mask(
        self, call: Call, position_ids: Tensor | None, cu_seq_lens: Tensor | None
    ) -> ShardedMask:
        """Return the mask of a layer.

        The first layer of a forward pass also checks that all ranks have the same batch, model and
        settings.

        Args:
            call: the call of one layer. All layers of a forward pass, and their recomputation by
                gradient checkpointing, share ``call.mask.forward_state``.
            position_ids: positions of this rank's tokens, int [1 or B, n]; None if the layer
                receives none.
            cu_seq_lens: boundaries of the documents of the whole sequence, int [documents + 1];
                None if the layer receives none.

        Raises:
            ValueError: ranks have different batches, models or settings, or a rank has tokens of
                another rank. Every rank raises.
            NotImplementedError: the call has padding or a KV cache.
            RuntimeError: a layer is recomputed after the end of the ``with`` block.
        """
        if self.state.is_over:
            raise RuntimeError(SETTINGS_CHANGED_ERROR)
        _validate_call(call)
        mask = call.mask
        sharding = mask.forward_state.get_or_compute(
            SHARDING_KEY, lambda: self._make_checked_sharding(call, position_ids, cu_seq_lens)
        )
        mask_details = MaskDetails(
            model_name=mask.model_name,
            parallel_settings=self,
            dense_block_size=sharding.dense_block_size,
            document_lengths=[
                [
                    DocumentLength(document_length, document_length)
                    for document_length in sharding.document_lengths
                ]
            ],
        )
        return ShardedMask(
            batch=mask.batch,
            q_length=sharding.num_tokens,
            kv_length=sharding.num_tokens,
            q_offset=0,
            window=mask.window,
            details=mask_details,
            forward_state=mask.forward_state,
        )

    def _make_checked_sharding(
        self, call: Call, position_ids: Tensor | None, cu_seq_lens: Tensor | None
    ) -> Sharding:
        """Return the sharding of a forward pass, after checking that it is equal on all ranks.

        The check compares shapes, documents, settings and the checksum of the batch. If a value
        differs, all ranks raise.

        Args:
            call: the call of the first layer.
            position_ids: see `make_sharded_mask`.
            cu_seq_lens: see `make_sharded_mask`.

        Raises:
            ValueError: see `make_sharded_mask`.
            NotImplementedError: the model received ``cu_seq_lens_q``, but does not pass it or the
                position ids to its attention layers.
        """
        sharding, num_tokens = None, call.q.shape[2]
        if cu_seq_lens is not None:
            sharding = get_sharding(
                lengths_from_boundaries(cu_seq_lens), self.group.size(), self.block
            )
        num_misplaced_tokens = self._count_misplaced_tokens(sharding, num_tokens, position_ids)
        compared_values = collect_compared_values(call.q, call.k, call.v, sharding)
        compared_values["tokens at positions of another rank"] = num_misplaced_tokens
        compared_values["settings (checksum)"] = _compute_config_checksum(call.config)
        # 0 if the tensor is a copy of the result of `shard`, because copies lack the attribute
        compared_values["tokens or labels (checksum)"] = getattr(cu_seq_lens, CHECKSUM_ATTRIBUTE, 0)
        require_equal_values(compared_values, self.group, call.q.device)
        if self.state.has_cu_seq_lens and (position_ids is None or cu_seq_lens is None):
            raise NotImplementedError(
                f"{self.model_name} does not pass position_ids and cu_seq_lens_q to its attention, "
                "which needs both inside context_parallel to place the tokens of a shard. Run the "
                "model in one process."
            )
        if num_misplaced_tokens:
            raise ValueError(
                f"position_ids and cu_seq_lens_q must describe the {num_tokens} tokens of rank "
                f"{self.group.rank()} of {self.group.size()}, in blocks of {self.block}, got other "
                "tokens. Call the model with the result of cab_hf.distributed.shard(batch, group)."
            )
        return sharding

    def _count_misplaced_tokens(
        self, sharding: Sharding | None, num_tokens: int, position_ids: Tensor | None
    ) -> int:
        """Return the number of tokens whose positions are unknown or belong to another rank."""
        if sharding is None or position_ids is None or sharding.tokens_per_rank != num_tokens:
            return num_tokens
        expected_positions = sharding.positions[self.group.rank()].to(position_ids.device)
        return int((position_ids != expected_positions).any(0).sum())


def _validate_call(call: Call) -> None:
    """Raise a NotImplementedError for a call with cached keys, chunked attention or padding."""
    num_cached_tokens = call.k.shape[2] - call.q.shape[2]
    if num_cached_tokens:
        raise NotImplementedError(
            f"past_key_values must be empty inside context_parallel, got {num_cached_tokens} "
            "tokens. Leave the block and call cab_hf.distributed.whole_cache, which gathers the "
            "whole cache on every rank for generate."
        )
    if call.mask.details.chunk_starts is not None:
        raise NotImplementedError(
            f"{call.mask.model_name} attends in chunks of {call.mask.window} tokens, which 'cab' "
            "does not compute inside context_parallel. Run the model in one process."
        )
    # the result is cached per forward pass: only the first layer synchronises with the device
    mask, _ = call.mask.with_documents()
    if mask.padding_mask is not None:
        raise NotImplementedError(
            "attention_mask must have no padding inside context_parallel, got padding. Give "
            "cab_hf.distributed.shard rows of one length, or pack the rows."
        )


@contextmanager
def context_parallel(
    model: nn.Module,
    group: ProcessGroup | None = None,
    *,
    heads_k_stride: int = KV_HEADS_PER_GATHER,
    block: int = DENSE_BLOCK_SIZE,
    regather_kv: bool = True,
) -> Iterator[nn.Module]:
    """Compute the attention of ``model`` over a sequence that is sharded over ``group``.

    Inside the ``with`` block, call the model on each rank with the result of
    `cab_hf.distributed.shard` for the same batch:

    * Attention all-gathers keys and values.
    * Each rank selects exactly the blocks that a single process would select for its queries.
    * Rotary frequencies that depend on the largest position use all positions of the sequence.
    * The auxiliary loss of routers covers all tokens of the sequence.

    Run the backward pass inside the ``with`` block too. Each rank computes the gradients of its own
    tokens; sum gradients and losses over the ranks.

    DeepSpeed Ulysses works without `context_parallel`: each rank computes attention of some heads
    over the whole sequence, as a single process would. Pass "cab" to
    ``UlyssesSPAttentionHF.register_with_transformers``. With accelerate, which rejects the name,
    set ``handler.sp_attn_implementation`` on an existing handler. The number of heads limits the
    number of ranks, and budgets must be one number for all heads.

    Args:
        model: a model with ``attn_implementation`` "cab", "cab_frc" or "cab_dense".
        group: the ranks that share the sequence. None means all ranks.
        heads_k_stride: number of KV heads per all-gather of K and V. Fewer heads need less memory.
        block: every chunk is a multiple of ``block`` tokens. Use the same value for ``shard``. The
            block sizes of the model's CabConfig must divide ``block``.
        regather_kv: True to gather K and V again in the backward pass instead of saving both. Set
            False under gradient checkpointing, which gathers K and V again anyway.

    Raises:
        ValueError: the model has another implementation, or is already inside context_parallel.
        NotImplementedError: the model has layers that mix tokens without attention, such as
            convolutions and state spaces, or does not place tokens by ``position_ids``.
        RankLost: another rank stopped inside the ``with`` block.
    """
    group = resolve_group(group)
    require_stride_and_block(heads_k_stride, block)
    modules = list(model.modules())
    _refuse_unsupported_model(model, modules)
    model_name = type(inner_model(model) or model).__name__
    parallel_settings = ParallelSettings(
        group=group,
        heads_k_stride=heads_k_stride,
        block=block,
        regather_kv=regather_kv,
        model_name=model_name,
    )
    hook_handle = model.register_forward_pre_hook(
        parallel_settings.state.record_cu_seq_lens, with_kwargs=True
    )
    withdraw_failure(group)
    configs = _find_configs(modules)
    SHARDED_CONFIGS.extend(configs)
    try:
        with (
            set_context_during_calls(model, parallel_settings=parallel_settings),
            install_sequence_hooks(model, group, block),
        ):
            yield model
    except BaseException as error:
        if not isinstance(error, RankLost):
            publish_failure(group, error)
        raise
    finally:
        hook_handle.remove()
        parallel_settings.state.is_over = True
        # compared by identity, because configs of different models can be equal
        ended_config_ids = set(map(id, configs))
        SHARDED_CONFIGS[:] = [
            config for config in SHARDED_CONFIGS if id(config) not in ended_config_ids
        ]


def _find_configs(modules: list[nn.Module]) -> list[Any]:
    """Return the config objects of ``modules``, each object once.

    Two objects that are equal but not identical are both returned.
    """
    configs = [module.config for module in modules if hasattr(module, "config")]
    return list({id(config): config for config in configs}.values())


def _refuse_unsupported_model(model: nn.Module, modules: list[nn.Module]) -> None:
    """Raise an error if `context_parallel` cannot shard a model.

    Args:
        model: the model.
        modules: all modules of the model.

    Raises:
        ValueError: see `context_parallel`.
        NotImplementedError: see `context_parallel`.
    """
    configs = _find_configs(modules)
    implementations = {getattr(config, "_attn_implementation", None) for config in configs}
    if not implementations.intersection(IMPLEMENTATION_NAMES):
        found_implementations = ", ".join(sorted(map(repr, implementations))) or "none"
        raise ValueError(
            f"attn_implementation of {type(model).__name__} must be one of "
            f"{', '.join(map(repr, IMPLEMENTATION_NAMES))}, got {found_implementations}. "
            "Load the model with one of these, or call cab_hf.apply_cab."
        )
    if any(map(is_sharded, configs)):
        raise ValueError(
            f"{type(model).__name__} is already inside context_parallel. Leave that block first."
        )
    for module in modules:
        unsupported_feature = (
            find_unsupported_feature(module) if hasattr(module, "config") else None
        )
        if unsupported_feature is not None:
            raise NotImplementedError(
                f"{type(module).__name__} of {type(model).__name__} is not computed by 'cab' "
                f"({unsupported_feature}), so context_parallel cannot shard the model. Run "
                "it in one process."
            )
    _refuse_unsupported_positions(type(inner_model(model) or model).__name__, modules)
    refuse_token_mixers(
        model,
        "inside context_parallel they would process only this rank's shard. Run the model in one "
        "process.",
    )


def _refuse_unsupported_positions(model_name: str, modules: list[nn.Module]) -> None:
    """Raise a NotImplementedError if the positions of a model do not follow ``position_ids``.

    Args:
        model_name: class name of the model, for error messages.
        modules: all modules of the model.
    """
    submodels = [module for module in modules if isinstance(module, PreTrainedModel)]
    if submodels and not any(
        "position_ids" in signature(submodel.forward).parameters for submodel in submodels
    ):
        raise NotImplementedError(
            f"{model_name} takes no position_ids and counts its input tokens, which are only this "
            "rank's shard inside context_parallel. Run the model in one process."
        )
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in modules):
        raise NotImplementedError(
            f"{model_name} counts positions from padding_idx + 1, but the positions of "
            "cab_hf.distributed.shard start at 0. Run the model in one process."
        )


@lru_cache
def _compute_config_checksum(config: CabConfig) -> int:
    """Return a CRC-32 of the fields of ``config``, by which ranks compare their settings."""
    return zlib.crc32(repr(config).encode())
