"""The base class of predictors, what they receive, and the registry of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cab_hf.checks import require
from cab_hf.config import CabConfig
from cab_hf.ops import HAS_TRITON
from cab_hf.plan import BlockPlan, Spans


@dataclass(frozen=True, eq=False)
class LayerContext:
    """What a predictor receives beside q and k, for one layer in one forward pass.

    Attributes:
        spans: what each query may see at all.
        scale: what logits are multiplied by.
        layer: index of the layer; None where it has none.
        shared_state: one mapping for all layers of the forward pass, in which a layer may leave
            what a later one reads, such as its plan. Gradient checkpointing runs a layer again with
            the same mapping.
        channels: those of q and k that are scored where scores are to be cheap, ascending; () for
            all of them.
        sinks: [H], a logit of each head that no key has; None without.
        softcap: that of `reference.capped`.
    """

    spans: Spans
    scale: float
    layer: int | None = None
    shared_state: dict[Any, Any] = field(default_factory=dict)
    channels: tuple[int, ...] = ()
    sinks: Tensor | None = None
    softcap: float | None = None


def has_kernels(x: Tensor) -> bool:
    """Whether q or k [B, H, N, D] is for the kernels of choosing."""
    # models on the CPU never need Triton
    if not x.is_cuda or not HAS_TRITON:
        return False
    from cab_hf.ops import launch

    return launch.unavailable(x) is None


class Predictor(ABC):
    """Decides which key blocks are attended. Made anew by every layer: it remembers nothing.

    What is known of k and what is decided with q are apart: a cache keeps the first, and processes
    that share a text exchange it.

    Over ranks (`cab_hf.context_parallel`) a predictor works as it is: each rank gathers the q and k
    of all, decides for the whole text and keeps the rows of its own queries. That is always right,
    and as slow as on one process. A predictor that needs less overrides `gathers`.
    """

    def __init__(self, config: CabConfig) -> None:
        self.config = config

    def summarise(self, k: Tensor, valid: Tensor | None = None) -> Any:
        """What `choose` needs of k [B, H_kv, N_k, D], after RoPE; by default k itself.

        ``valid``, bool [B, N_k], is False for padding keys; None where no key is padding.
        """
        return k

    def summary_of(self, k: Tensor, valid: Tensor, call: LayerContext) -> Any:
        """`summarise`, for a predictor whose summary depends on the layer."""
        return self.summarise(k, valid)

    def gathers(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        """What ranks that share a text must gather of each other to choose blocks for a layer.

        * ``"queries"`` and ``"keys"``, both: q and k of every token.
        * ``"summaries"``: what `summarise` makes of the keys of each rank, put together by `join`.
          A block has to be summarised alike wherever it is held: padding shows in ``valid`` alone.
        * ``"vectors"``: what a method ``vectors(q, spans)`` makes of the query blocks of each rank,
          [B, H, M_q, D]. `choose` is given those of the whole text as ``vectors``.
        * nothing: the summary is k itself, this rank's.

        Without ``"queries"`` `choose` is given this rank's q, and ``call.spans`` says what these
        queries see of the whole text; ``call.spans.text`` are the spans of all of it, and
        ``call.spans.own(plan)`` are this rank's rows of a plan of all of it.

        Args:
            heads: query heads and KV heads of the layer.
        """
        return "queries", "keys"

    def join(self, summary: Any, call: LayerContext, heads: tuple[int, int], layout: Any) -> Any:
        """The summary of the whole text, of this rank's: by default [B, H_kv, M_k, ...].

        Args:
            layout: a `cab_hf.distributed.sharded.ShardedLayout`, which puts together what every
                rank has: tensors by block with ``blocks(x, dim, tokens of a block)``, tensors by
                token with ``tokens(x)``.
        """
        return layout.blocks(summary, 2, self.config.key_block)

    @abstractmethod
    def choose(self, q: Tensor, summary: Any, call: LayerContext) -> BlockPlan:
        """The plan for q [B, H, N_q, D], after RoPE, over the keys that ``summary`` is of.

        The same inputs must give the same plan: gradient checkpointing runs a layer twice.
        """

    def refuse_packed(self, spans: Spans) -> None:
        """Refuse packed documents, for a predictor that chooses all rows by one part of the call.

        Raises:
            NotImplementedError: naming the predictor.
        """
        if spans.documents != 1:
            raise NotImplementedError(
                f"predictor {self.config.predictor!r} chooses the blocks of all documents packed "
                "in a call together, so each gets other blocks than alone; pass one document a "
                "row, or use another predictor."
            )

    def __call__(self, q: Tensor, k: Tensor, call: LayerContext) -> BlockPlan:
        """Both in one, without gradient: the plan for q over k."""
        with torch.no_grad():
            return self.choose(q, self.summary_of(k, call.spans.key_valid, call), call)


# a function: torch.compile traces no method of a value that is a constant to it
def sparsity_of(config: CabConfig, layer: int | None, heads: int) -> tuple[float, ...]:
    """The share of a row's blocks that each of the ``heads`` of a layer drops, or all of them.

    Raises:
        ValueError: where a table has no such layer or another number of heads, or there is a table
            and the layer has no index.
    """
    table = config.sparsity
    if not isinstance(table, tuple):
        return (table,)
    if layer is None:
        raise ValueError(
            "CabConfig.sparsity is a table of layers, and this layer has no index; give one number "
            "for all."
        )
    if layer >= len(table) or heads != len(table[0]):
        raise ValueError(
            f"CabConfig.sparsity has {len(table)} layers of {len(table[0])} heads, which do not "
            f"fit layer {layer} of {heads} heads; calibrate this model, or give one number."
        )
    row = table[layer]
    return row[:1] if len(set(row)) == 1 else row


Factory = Callable[[CabConfig], Predictor]
_FACTORIES: dict[str, Factory] = {}


def register_predictor(name: str, factory: Factory) -> None:
    """Make ``CabConfig(predictor=name)`` use ``factory(config)``.

    Raises:
        ValueError: for a name that is taken or no text, or a factory that cannot be called.
    """
    require(isinstance(name, str), "name", name, "the text that CabConfig.predictor is to hold")
    require(callable(factory), "factory", factory, "a Predictor class, or what makes one")
    if _FACTORIES.get(name, factory) is not factory:
        raise ValueError(f"predictor {name!r} is registered already; choose another name.")
    _FACTORIES[name] = factory


def make_predictor(config: CabConfig) -> Predictor:
    """The predictor ``config`` names. Raises ValueError for a name that is not registered."""
    if config.predictor not in _FACTORIES:
        known = ", ".join(sorted(_FACTORIES))
        raise ValueError(
            f"CabConfig.predictor is {config.predictor!r}; registered are {known}. "
            "cab_hf.register_predictor adds one."
        )
    return _FACTORIES[config.predictor](config)
