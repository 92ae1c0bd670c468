"""A model whose attention sees a shard of the text: what its layers need to know of the others."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from cab_hf.call.call import Call
from cab_hf.call.forward_pass import SETTINGS_CHANGED
from cab_hf.call.layout import Length
from cab_hf.call.refusals import foreseen
from cab_hf.call.scope import SHARDED, during_calls, is_sharded
from cab_hf.config import NAMES, CabConfig
from cab_hf.distributed.batch import CHECKSUM
from cab_hf.distributed.exchange import (
    RankLost,
    group_of,
    publish_failure,
    require_equal,
    withdraw_failure,
)
from cab_hf.distributed.kv_gather import KV_HEADS_TOGETHER
from cab_hf.distributed.sharded import ShardedText
from cab_hf.distributed.sharding import Sharding, lengths_between, sharding_of
from cab_hf.distributed.whole_text import whole_text_hooks
from cab_hf.distributed.zigzag import rank_facts, require_sizes
from cab_hf.hf.layers import inner_model
from cab_hf.hf.token_mixers import refuse_token_mixers
from cab_hf.plan import EXACT_BLOCK

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(eq=False)
class Parallel:
    """How the attention of one model goes over ranks; the arguments of `context_parallel`.

    Attributes:
        model: what it is called.
        positioned: whether its latest call has set the positions of this rank's tokens.
        closed: whether its `context_parallel` was left.
    """

    group: ProcessGroup
    heads_k_stride: int
    block: int
    regather_kv: bool
    model: str
    positioned: bool = False
    closed: bool = False

    def text(
        self, call: Call, position_ids: Tensor | None, cu_seq_lens: Tensor | None
    ) -> ShardedText:
        """The text of a forward pass, whose sharding all ranks agree on once.

        Args:
            call: with the mask that the layers of one forward pass share, and its replay by
                gradient checkpointing; of the rest that of the first layer counts.

        Raises:
            ValueError: on every rank, where they differ, or hold another's tokens.
            NotImplementedError: for padding, or a cache.
            RuntimeError: for a layer that is computed again behind the block.
        """
        if self.closed:
            raise RuntimeError(SETTINGS_CHANGED)
        _refuse(call)
        mask, parts = call.text, (position_ids, cu_seq_lens)
        sharding = mask.state.once("sharding", lambda: self._agreed(call, *parts))
        return ShardedText(
            *(mask.batch, sharding.text, sharding.text, 0),
            window=mask.window,
            model=mask.model,
            parallel=self,
            exact_block=sharding.exact_block,
            state=mask.state,
            sharding=sharding,
            _lengths=[[Length(length, length) for length in sharding.lengths]],
        )

    def _agreed(
        self, call: Call, position_ids: Tensor | None, cu_seq_lens: Tensor | None
    ) -> Sharding:
        sharding, tokens = None, call.q.shape[2]
        if cu_seq_lens is not None:
            sharding = sharding_of(lengths_between(cu_seq_lens), self.group.size(), self.block)
        wrong = self._misplaced(sharding, tokens, position_ids)
        known = rank_facts(call.q, call.k, call.v, sharding)
        known["tokens whose positions are another rank's"] = wrong
        known["settings (their checksum)"] = _checksum(call.config)
        # 0 where it is not known
        known["tokens or labels (their checksum)"] = getattr(cu_seq_lens, CHECKSUM, 0)
        require_equal(known, self.group, call.q.device)
        if self.positioned and (position_ids is None or cu_seq_lens is None):
            raise NotImplementedError(
                f"{self.model} does not hand position_ids and cu_seq_lens_q on to its attention, "
                "which inside context_parallel cannot know by them where its tokens stand. Read "
                "its texts in one process."
            )
        if wrong:
            raise ValueError(
                f"position_ids and cu_seq_lens_q do not say how {tokens} tokens are held by "
                f"rank {self.group.rank()} of {self.group.size()}, in blocks of {self.block}; give "
                "the model what cab_hf.distributed.shard(batch, group) returns."
            )
        return sharding

    def _misplaced(
        self, sharding: Sharding | None, tokens: int, position_ids: Tensor | None
    ) -> int:
        """How many of the tokens are not known to be this rank's."""
        if sharding is None or position_ids is None or sharding.tokens != tokens:
            return tokens
        expected = sharding.positions[self.group.rank()].to(position_ids.device)
        return int((position_ids != expected).any(0).sum())

    def listen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before the forward pass of the model."""
        self.positioned = kwargs.get("cu_seq_lens_q") is not None


def _refuse(call: Call) -> None:
    """Refuse a call that is not computed inside `context_parallel`.

    Raises:
        NotImplementedError: naming the argument, and what to do.
    """
    cached = call.k.shape[2] - call.q.shape[2]
    if cached:
        raise NotImplementedError(
            f"past_key_values holds {cached} tokens; inside "
            "context_parallel 'cab' reads whole texts. Leave the block first: "
            "cab_hf.distributed.whole_cache gives every rank the cache from which generate goes on."
        )
    if call.text.chunks_from is not None:
        raise NotImplementedError(
            f"{call.text.model} attends in chunks of {call.text.window}; inside context_parallel "
            "'cab' does not compute that. Read its texts in one process."
        )
    # looked at once a forward pass: no layer but the first waits for the device
    call.text.find_documents(None, None)
    if call.text.valid is not None:
        raise NotImplementedError(
            "attention_mask has padding; inside context_parallel a text has none but that of "
            "cab_hf.distributed.shard, which needs no mask. Give rows of one length, or pack them."
        )


@contextmanager
def context_parallel(
    model: nn.Module,
    group: ProcessGroup | None = None,
    *,
    heads_k_stride: int = KV_HEADS_TOGETHER,
    block: int = EXACT_BLOCK,
    regather_kv: bool = True,
) -> Iterator[nn.Module]:
    """Inside the block, the attention of ``model`` is over a text that all ranks of ``group`` hold.

    Each rank gives its model what `cab_hf.distributed.shard` returns for the same batch: shards of
    the tokens, and where they belong. Attention gathers keys. Rotary frequencies that depend on the
    longest position, and the auxiliary loss of routers, are those of the whole text. All else in a
    model is a token's own. Selection is that of one process, bit for bit. A backward pass belongs
    inside the block too: gradients of parameters are those of a rank's own tokens, to be summed
    over the ranks, as losses are.

    Ulysses needs no such block: DeepSpeed exchanges tokens for heads around the registered
    function, and each rank attends some heads over the whole text, as one process would. Name "cab"
    to ``UlyssesSPAttentionHF.register_with_transformers``; or to accelerate, as
    ``handler.sp_attn_implementation`` once there is a handler, which refuses names it does not
    know. Heads limit the ranks, and budgets must be one number for all heads.

    Args:
        model: with ``attn_implementation`` "cab", "cab_frc" or "cab_dense".
        group: the ranks that hold one text; None for all.
        heads_k_stride: KV heads whose K and V travel together; fewer take less memory.
        block: tokens of which chunks are whole multiples; the same as for ``shard``. The blocks of
            the model's CabConfig divide it.
        regather_kv: gather K and V once more for the backward pass; False under gradient
            checkpointing, which does so by itself.

    Raises:
        ValueError: for a model of another implementation, or one that is inside such a block.
        NotImplementedError: for a model with layers that mix tokens without attention, such as
            convolutions and state spaces, or one that does not place tokens by ``position_ids``.
        RankLost: inside, where another rank has stopped.
    """
    group = group_of(group)
    require_sizes(heads_k_stride, block)
    modules = list(model.modules())
    _refuse_model(model, modules)
    name = type(inner_model(model) or model).__name__
    parallel = Parallel(group, heads_k_stride, block, regather_kv, name)
    listening = model.register_forward_pre_hook(parallel.listen, with_kwargs=True)
    withdraw_failure(group)
    configs = _configs_of(modules)
    SHARDED.extend(configs)
    try:
        with during_calls(model, parallel=parallel), whole_text_hooks(model, group, block):
            yield model
    except BaseException as error:
        if not isinstance(error, RankLost):
            publish_failure(group, error)
        raise
    finally:
        listening.remove()
        parallel.closed = True
        SHARDED[:] = [each for each in SHARDED if not any(each is mine for mine in configs)]


def _configs_of(modules: list[nn.Module]) -> list[Any]:
    """The config objects in some modules, each once."""
    configs = [module.config for module in modules if hasattr(module, "config")]
    return list({id(config): config for config in configs}.values())


def _refuse_model(model: nn.Module, modules: list[nn.Module]) -> None:
    configs = _configs_of(modules)
    names = {getattr(config, "_attn_implementation", None) for config in configs}
    if not names.intersection(NAMES):
        result = ", ".join(sorted(map(repr, names))) or "none"
        raise ValueError(
            f"attn_implementation of {type(model).__name__} is {result}; context_parallel is for "
            f"{', '.join(map(repr, NAMES))}: load the model with one of them, or call "
            "cab_hf.apply_cab."
        )
    if any(map(is_sharded, configs)):
        raise ValueError(
            f"{type(model).__name__} is inside context_parallel already; leave that block first."
        )
    for module in modules:
        reason = foreseen(module) if hasattr(module, "config") else None
        if reason is not None:
            raise NotImplementedError(
                f"{type(module).__name__} of {type(model).__name__} is not computed by 'cab' "
                f"({reason}); context_parallel is for models whose attention is."
            )
    _refuse_positions(type(inner_model(model) or model).__name__, modules)
    refuse_token_mixers(
        model,
        "inside context_parallel they would see this rank's shard alone. Read its texts in one "
        "process.",
    )


def _refuse_positions(name: str, modules: list[nn.Module]) -> None:
    """Where a model of this ``name`` does not place tokens by the position_ids of a shard."""
    models = [each for each in modules if isinstance(each, PreTrainedModel)]
    placed = [each for each in models if "position_ids" in signature(each.forward).parameters]
    if models and not placed:
        raise NotImplementedError(
            f"{name} takes no position_ids and counts the tokens that it is given, "
            "which inside context_parallel are this rank's shard. Read its texts in one process."
        )
    # the first position of those is not 0
    if any(hasattr(each, "create_position_ids_from_input_ids") for each in modules):
        raise NotImplementedError(
            f"{name} counts positions from padding_idx + 1 on, and those of "
            "cab_hf.distributed.shard begin at 0. Read its texts in one process."
        )


@lru_cache
def _checksum(config: CabConfig) -> int:
    return zlib.crc32(repr(config).encode())
