"""`Budgets`: what the heads of one layer get, out of the numbers and tables of a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cab_hf.config import TOP_P_BY_KEYS, CabConfig

# what choosing takes of a CabConfig, with the types that registered ops have for it
FIELDS = {
    **dict.fromkeys(("query_block", "key_block", "sink_blocks", "local_blocks"), "int"),
    **dict.fromkeys(("coarsen", "select", "curvature"), "str"),
    **dict.fromkeys(("redundancy", "max_density"), "float"),
    "dense_tail_blocks": "int",
}
# how registered ops are told what `settings_of_op` understands
OP_SETTINGS = (
    "bool top_p_by_keys, float[] top_p, float[] top_k_share, float[] sparsity,"
    " int[] exact_queries, int[] dense_heads, "
    + ", ".join(f"{kind} {name}" for name, kind in FIELDS.items())
)


class Budgets(NamedTuple):
    """What the heads of one layer get: fields of `CabConfig`, a number for each head or for all.

    Attributes:
        top_p: of rows that see few keys, where it goes by keys.
        dense_heads: heads that attend everything, and so list nothing.
    """

    top_p: tuple[float, ...]
    top_k_share: tuple[float, ...]
    sparsity: tuple[float, ...]
    exact_queries: tuple[int, ...] = (0,)
    dense_heads: tuple[int, ...] = ()

    @property
    def alike(self) -> bool:
        """Whether there is one number for all heads, and none is apart."""
        return not self.dense_heads and all(len(numbers) == 1 for numbers in self[:4])

    def of_head(self, head: int) -> tuple[float, float, float, int]:
        """(top_p, top_k_share, sparsity, exact_queries) of one head."""
        return tuple([numbers[head if len(numbers) > 1 else 0] for numbers in self[:4]])

    def of_heads(self, heads: Sequence[int]) -> Budgets:
        """Those of some heads, as far as they are listed."""
        picked = [
            tuple([numbers[head] for head in heads]) if len(numbers) > 1 else numbers
            for numbers in self[:4]
        ]
        return Budgets(*picked)

    def exact(self, heads: int) -> tuple[int, ...]:
        """Those of ``heads`` that choose by exact scores."""
        if not any(self.exact_queries):
            return ()
        listed = [head for head in range(heads) if head not in self.dense_heads]
        return tuple([head for head in listed if self.of_head(head)[3] > 0])


# functions: torch.compile traces no method of a value that is a constant to it
def budgets_of(config: CabConfig, layer: int | None, heads: int) -> Budgets:
    """What each of the ``heads`` of a layer gets.

    Raises:
        ValueError: where a table has no such layer or another number of heads, or there is a table
            and the layer has no index.
    """
    fields = ("top_p", "top_k_share", "sparsity", "exact_queries")
    top_p, top_k_share, sparsity, exact = [_of_layer(config, name, layer, heads) for name in fields]
    if config.top_p is None:
        top_p = (TOP_P_BY_KEYS[0][1],)
    dense_heads: tuple[int, ...] = ()
    if config.select == "clusters":
        if isinstance(config.top_p, tuple):
            dense_heads = tuple([head for head in range(heads) if top_p[head] == 1])
        elif config.top_p == 1:
            # everything is listed: nothing is to be scored
            exact = (0,)
    numbers = [x[:1] if len(set(x)) == 1 else x for x in (top_p, top_k_share, sparsity, exact)]
    return Budgets(*numbers, dense_heads)


def _of_layer(config: CabConfig, name: str, layer: int | None, heads: int) -> tuple[float, ...]:
    """The row of a field that may be a table, or its one number."""
    table = getattr(config, name)
    if not isinstance(table, tuple):
        return (table,)
    if layer is None:
        raise ValueError(
            f"CabConfig.{name} is a table of layers, and this layer has no index; give one number "
            "for all."
        )
    if layer >= len(table) or heads != len(table[0]):
        raise ValueError(
            f"CabConfig.{name} has {len(table)} layers of {len(table[0])} heads, which do not fit "
            f"layer {layer} of {heads} heads; calibrate this model, or give one number."
        )
    return table[layer]


def op_settings(config: CabConfig, budgets: Budgets) -> tuple:
    """What a registered op is told by the schema `OP_SETTINGS`."""
    return config.top_p is None, *map(list, budgets), *(getattr(config, name) for name in FIELDS)


def settings_of_op(values: tuple) -> tuple[Budgets, CabConfig]:
    """What `op_settings` has told."""
    budgets = Budgets(*map(tuple, values[1:6]))
    settings = dict(zip(FIELDS, values[6:], strict=True))
    # curvature looks whether anything is added, and heads left to rank by it
    top_p = 1 if budgets.top_p == (1,) else (budgets.top_p,)
    settings |= {"top_p": None if values[0] else top_p, "top_k_share": (budgets.top_k_share,)}
    return budgets, CabConfig.reading(settings | {"exact_queries": (budgets.exact_queries,)})
