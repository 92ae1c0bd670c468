"""The base class of predictors, the context that they receive, and the registry of names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cab_hf.checks import require, warn_renamed
from cab_hf.config import CabConfig
from cab_hf.plan import BlockPlan, KeyRanges


@dataclass(frozen=True, eq=False)
class LayerContext:
    """The inputs of a predictor in addition to q and k, for one layer in one forward pass.

    Attributes:
        ranges: the interval of keys that each query may attend to.
        scale: factor of the logits.
        layer: index of the layer; None if the layer has no index.
        shared_state: one mapping for all layers of the forward pass. A layer stores values for
            later layers in it, such as its plan. Gradient checkpointing recomputes a layer with the
            same mapping.
        channels: ascending indices of the channels of q and k that cheap scores use; () means all
            channels.
        sinks: [H], one attention-sink logit per head; None if the layer has no sinks.
        softcap: soft cap of the logits, as in `reference.capped`; None means no cap.
    """

    ranges: KeyRanges
    scale: float
    layer: int | None = None
    shared_state: dict[Any, Any] = field(default_factory=dict)
    channels: tuple[int, ...] = ()
    sinks: Tensor | None = None
    softcap: float | None = None

    @property
    def spans(self) -> KeyRanges:
        """Return ``ranges``, whose old name this is."""
        warn_renamed("LayerContext.spans", "LayerContext.ranges")
        return self.ranges


# methods of `Predictor` by the names that they had, which subclasses of users may still override
OLD_METHODS = {"summarise": "encode_keys", "gathers": "required_inputs", "join": "merge"}


class Predictor(ABC):
    """The base class of predictors, which select the key blocks that every query block attends to.

    Each layer makes its own instance, so a predictor has no state between calls. `encode_keys` uses
    k only, so a KV cache can store its result and ranks can exchange it. `choose` uses q and the
    summary.

    Context parallelism (`cab_hf.context_parallel`) needs no changes to a predictor. By default
    every rank gathers q and k of all ranks, selects blocks for the whole sequence and keeps the
    rows of its own queries. The result is exact, but each rank repeats the work of one process.
    Override `required_inputs` to exchange less.
    """

    def __init__(self, config: CabConfig) -> None:
        self.config = config

    def __init_subclass__(cls, **options: Any) -> None:
        """Let old and new names of methods refer to the same method, with one warning per class."""
        super().__init_subclass__(**options)
        overridden = [old for old, new in OLD_METHODS.items() if _share_override(cls, old, new)]
        if overridden:
            old_names = ", ".join(f"{cls.__name__}.{old}" for old in overridden)
            new_names = ", ".join(OLD_METHODS[old] for old in overridden)
            # the caller of the class statement, after this method and ABCMeta
            warn_renamed(old_names, new_names, stacklevel=4)

    def encode_keys(self, k: Tensor, valid: Tensor | None = None) -> Any:
        """Return the summary of k that `choose` needs; by default k itself.

        Args:
            k: [B, H_kv, N_k, D], after RoPE.
            valid: bool [B, N_k], False for padding keys; None if no key is padding.
        """
        return k

    def summary_of(self, k: Tensor, valid: Tensor, call: LayerContext) -> Any:
        """Return `encode_keys(k, valid)`. Override it if the summary depends on the layer."""
        return self.encode_keys(k, valid)

    def required_inputs(self, call: LayerContext, heads: tuple[int, int]) -> Collection[str]:
        """Return the tensors that ranks must gather to select blocks for a layer.

        Return a collection of these names:

        * ``"queries"`` and ``"keys"``, always together: q and k of every token.
        * ``"summaries"``: every rank calls `encode_keys`, and `merge` joins the results. The
          summary of a block must not depend on the rank. Only ``valid`` shows which tokens are
          padding.
        * ``"vectors"``: every rank calls ``vectors(q, ranges)``, a method of the predictor that
          returns [B, H, M_q, D]. `choose` receives the vectors of the whole sequence as
          ``vectors``.

        If the collection is empty, the summary is the k of this rank.

        Without ``"queries"``, `choose` receives the q of this rank. ``call.ranges`` then contains
        the ranges of this rank's queries over the whole sequence, and
        ``call.ranges.sequence_ranges`` the ranges of all queries. ``call.ranges.local_plan(plan)``
        selects the rows of this rank from a plan of the whole sequence.

        Args:
            call: the context of the layer.
            heads: (number of query heads, number of KV heads) of the layer.
        """
        return "queries", "keys"

    def merge(self, summary: Any, call: LayerContext, heads: tuple[int, int], layout: Any) -> Any:
        """Return the summary of the whole sequence from the summaries of all ranks.

        The default joins summaries per key block, [B, H_kv, M_k, ...].

        Args:
            summary: the summary of this rank.
            call: the context of the layer.
            heads: (number of query heads, number of KV heads) of the layer.
            layout: a `cab_hf.distributed.sharded.ShardedLayout`. Its ``blocks(x, dim, tokens of a
                block)`` joins tensors with one entry per block, and ``tokens(x)`` joins tensors
                with one entry per token.
        """
        return layout.blocks(summary, 2, self.config.key_block)

    # an alias, because a method that calls ``merge`` would call the override of a subclass again
    summarise, gathers, join = encode_keys, required_inputs, merge

    @abstractmethod
    def choose(self, q: Tensor, summary: Any, call: LayerContext) -> BlockPlan:
        """Return the plan for q over the keys of ``summary``.

        The same inputs must return the same plan, because gradient checkpointing computes a layer
        twice.

        Args:
            q: [B, H, N_q, D], after RoPE.
            summary: the result of `summary_of`, or of `merge` under context parallelism.
            call: the context of the layer.
        """

    def refuse_packed(self, ranges: KeyRanges) -> None:
        """Raise an error for packed documents, for predictors that select blocks for a whole row.

        Raises:
            NotImplementedError: the call contains several documents. The message names the
                predictor.
        """
        if ranges.documents != 1:
            raise NotImplementedError(
                "predictor must select blocks separately for each packed document, got "
                f"{self.config.predictor!r}, which selects blocks for a whole row. Pass one "
                "document per row, or use another predictor."
            )

    def __call__(self, q: Tensor, k: Tensor, call: LayerContext) -> BlockPlan:
        """Return the plan for q over k, without gradients."""
        with torch.no_grad():
            return self.choose(q, self.summary_of(k, call.ranges.key_valid, call), call)


def _share_override(cls: type[Predictor], old: str, new: str) -> bool:
    """Set ``cls.old`` and ``cls.new`` to the first override of either of them.

    Returns True if only the old name is overridden.
    """
    for each in cls.__mro__:
        has_old, has_new = old in vars(each), new in vars(each)
        if has_old or has_new:
            break
    if has_old and not has_new:
        setattr(cls, new, vars(each)[old])
    elif has_new and not has_old:
        setattr(cls, old, vars(each)[new])
    return has_old and not has_new


# a function, because torch.compile cannot trace methods of constants
def sparsity_of(config: CabConfig, layer: int | None, heads: int) -> tuple[float, ...]:
    """Return the sparsity of each head of a layer, or one value if all are equal.

    The sparsity of a head is the share of a row's blocks that the head drops.

    Raises:
        ValueError: ``config.sparsity`` is a table without this layer or with another number of
            heads, or it is a table and the layer has no index.
    """
    table = config.sparsity
    if not isinstance(table, tuple):
        return (table,)
    if layer is None:
        raise ValueError(
            "CabConfig.sparsity must be one number for a layer that has no index, got a table of "
            "layers. Give one number for all layers."
        )
    if layer >= len(table) or heads != len(table[0]):
        raise ValueError(
            f"CabConfig.sparsity must have a row for layer {layer} with {heads} heads, got a "
            f"table of {len(table)} layers of {len(table[0])} heads. Calibrate this model, or "
            "give one number."
        )
    row = table[layer]
    return row[:1] if len(set(row)) == 1 else row


Factory = Callable[[CabConfig], Predictor]
_FACTORIES: dict[str, Factory] = {}


def register_predictor(name: str, factory: Factory) -> None:
    """Register ``factory`` as the predictor of ``CabConfig(predictor=name)``.

    Args:
        name: the value of ``CabConfig.predictor`` that selects it.
        factory: a `Predictor` class, or a function that takes a `CabConfig` and returns a
            predictor.

    Raises:
        ValueError: ``name`` is not a string or is already registered, or ``factory`` is not
            callable.
    """
    require(
        isinstance(name, str),
        "name",
        name,
        "a string, the value of CabConfig.predictor that selects the predictor",
    )
    require(
        callable(factory),
        "factory",
        factory,
        "a Predictor class, or a function that returns a predictor",
    )
    if _FACTORIES.get(name, factory) is not factory:
        raise ValueError(
            f"name must be unused, got {name!r}, which is already registered. Register the "
            "predictor under another name."
        )
    _FACTORIES[name] = factory


def make_predictor(config: CabConfig) -> Predictor:
    """Return the predictor that ``config`` names.

    Raises:
        ValueError: the name is not registered.
    """
    if config.predictor not in _FACTORIES:
        known = ", ".join(sorted(_FACTORIES))
        raise ValueError(
            f"CabConfig.predictor must be one of {known}, got {config.predictor!r}. Use one of "
            "these, or add a predictor with cab_hf.register_predictor."
        )
    return _FACTORIES[config.predictor](config)
