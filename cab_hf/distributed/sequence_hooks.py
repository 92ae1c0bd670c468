"""Hooks for computations other than attention that depend on the whole sequence.

* Rotary embeddings of the types dynamic and longrope have frequencies that depend on the largest
  position of a call. A hook passes them the largest position of all ranks.
* The auxiliary loss of routers is a product of means over all tokens. A hook computes the loss from
  the router logits of all ranks. Each rank returns the loss divided by the number of ranks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cab_hf.distributed.exchange import all_gather
from cab_hf.distributed.sharding import Sharding, get_sharding, lengths_from_boundaries

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# name of the auxiliary loss function in the module of each transformers model
ROUTER_LOSS_FUNCTION = "load_balancing_loss_func"


@contextmanager
def install_sequence_hooks(model: nn.Module, group: ProcessGroup, block: int) -> Iterator[None]:
    """Install the hooks of this module in ``model``, and remove them after the ``with`` block.

    Args:
        model: the model inside `cab_hf.context_parallel`.
        group: the ranks that share the sequence.
        block: every chunk of a document is a multiple of ``block`` tokens.
    """
    hook_handles = []
    for module in model.modules():
        if _depends_on_longest_position(module):
            append_longest_position = functools.partial(_append_longest_position, group)
            hook_handles.append(
                module.register_forward_pre_hook(append_longest_position, with_kwargs=True)
            )
            hook_handles.append(module.register_forward_hook(_remove_longest_position))
        if isinstance(module, PreTrainedModel) and _has_router_loss(module):
            router_loss = _RouterLoss(group, block)
            hook_handles.append(
                module.register_forward_pre_hook(
                    router_loss.replace_loss_function, with_kwargs=True
                )
            )
            hook_handles.append(
                module.register_forward_hook(router_loss.restore_loss_function, always_call=True)
            )
    try:
        yield
    finally:
        for hook_handle in hook_handles:
            hook_handle.remove()


def _depends_on_longest_position(module: nn.Module) -> bool:
    """Return True for a rotary embedding whose frequencies depend on the largest position."""
    rope_types = getattr(module, "rope_type", None)
    # a dict has the types of several kinds of layers
    rope_types = rope_types.values() if isinstance(rope_types, dict) else [rope_types]
    return any(
        isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")
        for rope_type in rope_types
    )


def _append_longest_position(
    group: ProcessGroup, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Append the largest position of all ranks to the position ids of a rotary embedding.

    The embedding then computes the frequencies of the whole sequence, and
    `_remove_longest_position` removes the appended position from its output. A forward pre-hook,
    which returns the changed arguments (args, kwargs) of the embedding.

    Raises:
        NotImplementedError: the embedding is called without position ids.
    """
    bound_args = inspect.signature(module.forward).bind(*args, **kwargs)
    position_ids = bound_args.arguments.get("position_ids")
    if not isinstance(position_ids, Tensor):
        raise NotImplementedError(
            f"{type(module).__name__} with rope_type {module.rope_type!r} must receive "
            "position_ids inside context_parallel, because its frequencies depend on the longest "
            "position. Use a model with another rope_type, such as 'yarn'."
        )
    longest_position = all_gather(position_ids.max().view(1), group).max()
    appended_position = longest_position.expand(*position_ids.shape[:-1], 1).to(position_ids.dtype)
    bound_args.arguments["position_ids"] = torch.cat((position_ids, appended_position), dim=-1)
    return bound_args.args, bound_args.kwargs


def _remove_longest_position(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Remove the appended position from cosines and sines, [..., n + 1, D] -> [..., n, D].

    A forward hook of a rotary embedding.
    """
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(cos_or_sin[..., :-1, :] for cos_or_sin in output)


def _has_router_loss(model: PreTrainedModel) -> bool:
    """Return True if ``forward`` of the model can compute an auxiliary loss of routers."""
    return "output_router_logits" in inspect.signature(model.forward).parameters


class _RouterLoss:
    """A replacement for the auxiliary loss of a model's routers, installed during forward passes.

    Args:
        group: the ranks that share the sequence.
        block: every chunk of a document is a multiple of ``block`` tokens.
    """

    def __init__(self, group: ProcessGroup, block: int) -> None:
        self.group, self.block = group, block
        # loss function of transformers and the sharding, only while the replacement is installed
        self.original_loss: Callable[..., Any] | None = None
        self.sharding: Sharding | None = None

    def replace_loss_function(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Install `compute_sharded_loss` in place of the loss function of transformers.

        A forward pre-hook. Has no effect if the forward pass does not compute the loss.
        """
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        original_loss = getattr(sys.modules[type(model).__module__], ROUTER_LOSS_FUNCTION, None)
        has_loss = kwargs.get("output_router_logits")
        if has_loss is None:
            has_loss = getattr(model.config, "output_router_logits", False)
        # True if the hook of an outer model, defined in the same Python module, has already
        # installed its replacement
        is_replaced = isinstance(getattr(original_loss, "__self__", None), _RouterLoss)
        # without cu_seq_lens_q, the first attention layer raises an error
        if not has_loss or cu_seqlens is None or original_loss is None or is_replaced:
            return
        self.original_loss = original_loss
        self.sharding = get_sharding(
            lengths_from_boundaries(cu_seqlens), self.group.size(), self.block
        )
        setattr(
            sys.modules[type(model).__module__], ROUTER_LOSS_FUNCTION, self.compute_sharded_loss
        )

    def restore_loss_function(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Restore the loss function of transformers after a forward pass. A forward hook.

        Raises:
            NotImplementedError: the model has computed the loss by another function.
        """
        model_module = sys.modules[type(model).__module__]
        if self.original_loss is not None:
            setattr(model_module, ROUTER_LOSS_FUNCTION, self.original_loss)
        elif (
            not hasattr(model_module, ROUTER_LOSS_FUNCTION)
            and getattr(output, "aux_loss", None) is not None
        ):
            raise NotImplementedError(
                f"{type(model).__name__} computes the auxiliary loss of its routers without "
                f"{ROUTER_LOSS_FUNCTION}, so context_parallel cannot sum it over ranks. Set "
                "output_router_logits=False."
            )
        self.original_loss = self.sharding = None

    def compute_sharded_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the tokens of all ranks, divided by the number of ranks W.

        The gradient flows to the router logits of this rank only, and is not divided by W.
        Arguments as for `load_balancing_loss_func` of transformers.
        """
        bound_args = inspect.signature(self.original_loss).bind(*args, **kwargs)
        router_logits = bound_args.arguments["gate_logits"]
        if not isinstance(router_logits, tuple):
            return self.original_loss(*args, **kwargs)
        bound_args.arguments["gate_logits"] = tuple(
            [self._gather_logits(layer_logits) for layer_logits in router_logits]
        )
        # `shard` refuses batches with padding, and `_gather_logits` removes the padding of shards
        bound_args.arguments["attention_mask"] = None
        loss = self.original_loss(*bound_args.args, **bound_args.kwargs)
        return loss - loss.detach() * (1 - 1 / self.group.size())

    def _gather_logits(self, router_logits: Tensor) -> Tensor:
        """All-gather the logits of one router, and remove the logits of padding tokens.

        The gradient flows to the logits of this rank only.

        Args:
            router_logits: [B * n, E], logits of the n tokens of this rank, including padding, for E
                experts.

        Returns:
            [B * N, E], logits of all N tokens of the whole sequence, in the order of the sequence.
        """
        local_logits = router_logits.reshape(
            -1, self.sharding.tokens_per_rank, router_logits.shape[-1]
        ).transpose(0, 1)
        shards = list(all_gather(local_logits, self.group).chunk(self.group.size()))
        # the gathered tensor has no gradient
        shards[self.group.rank()] = local_logits
        shard_index = self.sharding.shard_index.to(router_logits.device)
        return torch.cat(shards).index_select(0, shard_index).transpose(0, 1).flatten(0, 1)
