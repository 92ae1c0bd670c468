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
        scale: factor of the dot products, usually 1 / sqrt(D).
        layer: index of the layer; None if the layer has no index.
        shared_state: one mapping for all layers of the forward pass. A layer can store values in
            the mapping for later layers, such as its plan. Gradient checkpointing recomputes a
            layer with the same mapping.
        channels: ascending channels of q and k that predictors use for approximate scores; () for
            all channels.
        sinks: [H], one attention-sink logit per head; None if the layer has no sinks.
        softcap: soft cap of the logits, see `cap_logits` of `cab_hf.ops.reference`; None for no
            cap.
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
        """Return ``ranges`` and warn; ``spans`` is the deprecated name of ``ranges``."""
        warn_renamed("LayerContext.spans", "LayerContext.ranges")
        return self.ranges


# old and new names of methods of `Predictor`. Subclasses of users may still override the old names
METHODS_BY_OLD_NAME = {"summarise": "encode_keys", "gathers": "required_inputs", "join": "merge"}


class Predictor(ABC):
    """The base class of predictors, which select the key blocks that every query block attends to.

    A predictor has two stages. `encode_keys` computes a summary of k, and `choose` selects blocks
    for q with this summary. A summary does not depend on q. Thus a KV cache can store the summary,
    and ranks can exchange their summaries.

    Every call of a layer creates a new instance, so a predictor has no state between calls.

    Context parallelism (`cab_hf.context_parallel`) needs no changes to a predictor. By default
    every rank gathers q and k of all ranks, selects blocks for the whole sequence and returns the
    rows of its own queries. The result is exact, but each rank repeats the work of one process. An
    override of `required_inputs` reduces the exchanged data.
    """

    def __init__(self, config: CabConfig) -> None:
        self.config = config

    def __init_subclass__(cls, **class_options: Any) -> None:
        """Make a subclass that overrides the old name of a method override the new name as well.

        An override of the new name also overrides the old name. Overrides of old names cause one
        warning per class.
        """
        super().__init_subclass__(**class_options)
        overridden_names = [
            old_name
            for old_name, new_name in METHODS_BY_OLD_NAME.items()
            if _mirror_override(cls, old_name, new_name)
        ]
        if overridden_names:
            old_names_text = ", ".join(
                f"{cls.__name__}.{old_name}" for old_name in overridden_names
            )
            new_names_text = ", ".join(
                METHODS_BY_OLD_NAME[old_name] for old_name in overridden_names
            )
            # stacklevel=4: the warning points to the class statement, not to this method, ABCMeta
            # or `warn_renamed`
            warn_renamed(old_names_text, new_names_text, stacklevel=4)

    def encode_keys(self, k: Tensor, valid: Tensor | None = None) -> Any:
        """Return the summary of k that `choose` receives; by default k itself.

        Args:
            k: [B, H_kv, N_k, D], after RoPE.
            valid: bool [B, N_k], False for padding keys; None if no key is padding.
        """
        return k

    def summary_of(self, k: Tensor, valid: Tensor, layer_context: LayerContext) -> Any:
        """Return the summary of k for one layer; by default ``encode_keys(k, valid)``.

        Predictors whose summary depends on the layer override this method.

        Args:
            k: [B, H_kv, N_k, D], after RoPE.
            valid: bool [B, N_k], False for padding keys.
            layer_context: the context of the layer.
        """
        return self.encode_keys(k, valid)

    def required_inputs(
        self, layer_context: LayerContext, heads: tuple[int, int]
    ) -> Collection[str]:
        """Return the names of the tensors that ranks must gather to select blocks for a layer.

        The names are:

        * ``"queries"`` and ``"keys"``, always together: q and k of every token.
        * ``"summaries"``: every rank calls `encode_keys`, and `merge` joins the results. The
          summary of a block must not depend on the rank. `encode_keys` must detect padding by
          ``valid`` only.
        * ``"vectors"``: every rank calls ``vectors(q, ranges)``, a method of the predictor that
          returns [B, H, M_q, D]. `choose` receives the gathered result as its argument ``vectors``.

        If no name is returned, ranks gather nothing, and `choose` receives this rank's k as its
        argument ``summary``.

        Without ``"queries"``, `choose` receives the q of this rank. ``layer_context.ranges`` then
        contains the ranges of this rank's queries over the whole sequence, and
        ``layer_context.ranges.sequence_ranges`` the ranges of all queries.
        ``layer_context.ranges.local_plan(plan)`` selects the rows of this rank from a plan of the
        whole sequence.

        Args:
            layer_context: the context of the layer.
            heads: (number of query heads, number of KV heads) of the layer.
        """
        return "queries", "keys"

    def merge(
        self, summary: Any, layer_context: LayerContext, heads: tuple[int, int], layout: Any
    ) -> Any:
        """Return the summary of the whole sequence from the summaries of all ranks.

        The default implementation joins summaries with one entry per key block.

        Args:
            summary: the summary of this rank; [B, H_kv, M_k, ...] for the default implementation.
            layer_context: the context of the layer.
            heads: (number of query heads, number of KV heads) of the layer.
            layout: a `cab_hf.distributed.sharded.ShardedLayout`. Its method ``blocks(x, dim,
                tokens_per_block)`` joins tensors with one entry per block. Its method ``tokens(x)``
                joins tensors with one entry per token.
        """
        return layout.all_gather_blocks(summary, 2, self.config.key_block)

    # aliases and not methods that call the new names: an override of ``merge`` may call
    # ``super().join``, which must not call the override again
    summarise, gathers, join = encode_keys, required_inputs, merge

    @abstractmethod
    def choose(self, q: Tensor, summary: Any, layer_context: LayerContext) -> BlockPlan:
        """Return the plan for q over the keys of ``summary``.

        The plan must be a function of the inputs, because gradient checkpointing computes a layer
        twice and needs the same plan.

        Args:
            q: [B, H, N_q, D], after RoPE.
            summary: the result of `summary_of`, or of `merge` under context parallelism.
            layer_context: the context of the layer.
        """

    def refuse_packed(self, ranges: KeyRanges) -> None:
        """Raise an error if a batch row contains several packed documents.

        Predictors call this method if they cannot select blocks separately for each document.

        Raises:
            NotImplementedError: a batch row contains several documents, or their number is unknown.
                The message names the predictor.
        """
        if ranges.documents != 1:
            raise NotImplementedError(
                "predictor must select blocks separately for each packed document, got "
                f"{self.config.predictor!r}, which selects blocks for a whole row. Pass one "
                "document per row, or use another predictor."
            )

    def __call__(self, q: Tensor, k: Tensor, layer_context: LayerContext) -> BlockPlan:
        """Return the plan for q over k, without gradients.

        Args:
            q: [B, H, N_q, D], after RoPE.
            k: [B, H_kv, N_k, D], after RoPE.
            layer_context: the context of the layer.
        """
        with torch.no_grad():
            return self.choose(
                q, self.summary_of(k, layer_context.ranges.key_valid, layer_context), layer_context
            )


def _mirror_override(cls: type[Predictor], old_name: str, new_name: str) -> bool:
    """Make both names of a method refer to the override that is first in the MRO.

    Args:
        cls: a subclass of `Predictor`.
        old_name: old name of the method.
        new_name: new name of the method.

    Returns:
        True if the class with the first override defines the old name only.
    """
    for base_class in cls.__mro__:
        has_old_name, has_new_name = old_name in vars(base_class), new_name in vars(base_class)
        if has_old_name or has_new_name:
            break
    if has_old_name and not has_new_name:
        setattr(cls, new_name, vars(base_class)[old_name])
    elif has_new_name and not has_old_name:
        setattr(cls, old_name, vars(base_class)[new_name])
    return has_old_name and not has_new_name


# a function and not a method of `CabConfig`: torch.compile cannot trace methods of constants
def get_head_sparsity(config: CabConfig, layer: int | None, heads: int) -> tuple[float, ...]:
    """Return the sparsity of each head of a layer, or a single number if it is equal for all heads.

    The sparsity of a head is the fraction of its visible blocks that a query block does not select.

    Args:
        config: settings. ``config.sparsity`` is one number, or a table with one row per layer and
            one column per head.
        layer: index of the layer; None if the layer has no index.
        heads: query heads of the layer.

    Raises:
        ValueError: ``config.sparsity`` is a table, and the layer has no index, the table has no row
            for the layer, or the table has another number of heads.
    """
    sparsity_table = config.sparsity
    if not isinstance(sparsity_table, tuple):
        return (sparsity_table,)
    if layer is None:
        raise ValueError(
            "CabConfig.sparsity must be one number for a layer that has no index, got a table of "
            "layers. Give one number for all layers."
        )
    if layer >= len(sparsity_table) or heads != len(sparsity_table[0]):
        raise ValueError(
            f"CabConfig.sparsity must have a row for layer {layer} with {heads} heads, got a "
            f"table of {len(sparsity_table)} layers of {len(sparsity_table[0])} heads. Calibrate "
            "this model, or give one number."
        )
    head_sparsity = sparsity_table[layer]
    return head_sparsity[:1] if len(set(head_sparsity)) == 1 else head_sparsity


PredictorFactory = Callable[[CabConfig], Predictor]
_PREDICTOR_FACTORIES: dict[str, PredictorFactory] = {}


def register_predictor(name: str, factory: PredictorFactory) -> None:
    """Register ``factory`` as the predictor of ``CabConfig(predictor=name)``.

    Args:
        name: the value of ``CabConfig.predictor`` that selects the predictor.
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
    if _PREDICTOR_FACTORIES.get(name, factory) is not factory:
        raise ValueError(
            f"name must be unused, got {name!r}, which is already registered. Register the "
            "predictor under another name."
        )
    _PREDICTOR_FACTORIES[name] = factory


def make_predictor(config: CabConfig) -> Predictor:
    """Build the predictor with the name ``config.predictor``.

    Raises:
        ValueError: the name is not registered.
    """
    if config.predictor not in _PREDICTOR_FACTORIES:
        registered_names = ", ".join(sorted(_PREDICTOR_FACTORIES))
        raise ValueError(
            f"CabConfig.predictor must be one of {registered_names}, got {config.predictor!r}. Use "
            "one of these, or add a predictor with cab_hf.register_predictor."
        )
    return _PREDICTOR_FACTORIES[config.predictor](config)
