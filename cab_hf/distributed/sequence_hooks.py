"""Hooks for the parts of a model, other than attention, that depend on the whole sequence.

* Rotary embeddings whose frequencies depend on the longest position of a call (dynamic, longrope)
  receive the longest position of all ranks.
* The auxiliary loss of routers is a product of means over all tokens. It is computed from the
  router logits of all ranks, and each rank returns its share, as for the loss of the model.
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
from cab_hf.distributed.sharding import Sharding, lengths_between, sharding_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# name of the auxiliary loss function in the module of each transformers model
ROUTER_LOSS = "load_balancing_loss_func"


@contextmanager
def install_sequence_hooks(model: nn.Module, group: ProcessGroup, block: int) -> Iterator[None]:
    """Install the hooks in ``model`` inside the ``with`` block.

    Args:
        model: the model.
        group: the ranks that hold one sequence.
        block: tokens, as in `cab_hf.context_parallel`.
    """
    handles = []
    for module in model.modules():
        if _depends_on_longest(module):
            append_longest = functools.partial(_append_longest, group)
            handles.append(module.register_forward_pre_hook(append_longest, with_kwargs=True))
            handles.append(module.register_forward_hook(_remove_longest))
        if isinstance(module, PreTrainedModel) and _has_router_loss(module):
            loss = _RouterLoss(group, block)
            handles.append(module.register_forward_pre_hook(loss.replace, with_kwargs=True))
            handles.append(module.register_forward_hook(loss.put_back, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _depends_on_longest(module: nn.Module) -> bool:
    """Return whether the frequencies of a rotary embedding depend on the longest position."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds
    )


def _append_longest(
    group: ProcessGroup, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Append the longest position of all ranks to the position ids of a rotary embedding.

    Raises:
        NotImplementedError: the embedding is called without position ids.
    """
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    positions = bound.arguments.get("position_ids")
    if not isinstance(positions, Tensor):
        raise NotImplementedError(
            f"{type(module).__name__} with rope_type {module.rope_type!r} must receive "
            "position_ids inside context_parallel, because its frequencies depend on the longest "
            "position. Use a model with another rope_type, such as 'yarn'."
        )
    longest = all_gather(positions.max().view(1), group).max()
    appended = longest.expand(*positions.shape[:-1], 1).to(positions.dtype)
    bound.arguments["position_ids"] = torch.cat((positions, appended), dim=-1)
    return bound.args, bound.kwargs


def _remove_longest(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Remove the appended position from the frequencies: [..., n + 1, D] -> [..., n, D]."""
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(x[..., :-1, :] for x in output)


def _has_router_loss(model: PreTrainedModel) -> bool:
    return "output_router_logits" in inspect.signature(model.forward).parameters


class _RouterLoss:
    """A replacement for the auxiliary loss of a model's routers during its forward pass."""

    def __init__(self, group: ProcessGroup, block: int) -> None:
        self.group, self.block = group, block
        self.original: Callable[..., Any] | None = None
        self.sharding: Sharding | None = None

    def replace(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        ends = kwargs.get("cu_seq_lens_q")
        original = getattr(sys.modules[type(model).__module__], ROUTER_LOSS, None)
        wanted = kwargs.get("output_router_logits")
        wanted = getattr(model.config, "output_router_logits", False) if wanted is None else wanted
        # attention refuses a sequence without boundaries; the replacement of an outer model stays
        shared = isinstance(getattr(original, "__self__", None), _RouterLoss)
        if not wanted or ends is None or original is None or shared:
            return
        self.original = original
        self.sharding = sharding_of(lengths_between(ends), self.group.size(), self.block)
        setattr(sys.modules[type(model).__module__], ROUTER_LOSS, self.share)

    def put_back(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        module = sys.modules[type(model).__module__]
        if self.original is not None:
            setattr(module, ROUTER_LOSS, self.original)
        elif not hasattr(module, ROUTER_LOSS) and getattr(output, "aux_loss", None) is not None:
            raise NotImplementedError(
                f"{type(model).__name__} computes the auxiliary loss of its routers without "
                f"{ROUTER_LOSS}, so context_parallel cannot sum it over ranks. Set "
                "output_router_logits=False."
            )
        self.original = self.sharding = None

    def share(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of all tokens divided by the number of ranks.

        The gradient flows to the router logits of this rank only, without this division.
        """
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        logits = bound.arguments["gate_logits"]
        if not isinstance(logits, tuple):
            return self.original(*args, **kwargs)
        bound.arguments["gate_logits"] = tuple([self._gather_logits(x) for x in logits])
        # a sharded sequence has only the padding of ranks, which is left out
        bound.arguments["attention_mask"] = None
        loss = self.original(*bound.args, **bound.kwargs)
        return loss - loss.detach() * (1 - 1 / self.group.size())

    def _gather_logits(self, logits: Tensor) -> Tensor:
        """Gather router logits of all ranks, [B * n, E] -> [B * N, E].

        The gradient flows to the logits of this rank only.
        """
        own_logits = logits.reshape(-1, self.sharding.tokens, logits.shape[-1]).transpose(0, 1)
        shards = list(all_gather(own_logits, self.group).chunk(self.group.size()))
        shards[self.group.rank()] = own_logits
        owner = self.sharding.owner.to(logits.device)
        return torch.cat(shards).index_select(0, owner).transpose(0, 1).flatten(0, 1)
