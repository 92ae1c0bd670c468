"""How a layer is computed: `route` is the one place that decides, and says why."""

from __future__ import annotations

from dataclasses import dataclass

from cab_hf import engines
from cab_hf.config import CabConfig
from cab_hf.engines import SDPA, Engine, Workload
from cab_hf.plan import EXACT_BLOCK


@dataclass(frozen=True)
class Route:
    """How a layer is computed.

    Attributes:
        kind: ``"sparse"``, ``"exact"``, or ``"decode"``: exact for so few queries that choosing
            blocks for them does not pay.
        engine: what computes it.
        reason: why it is not sparse, as half a sentence; None where it is, or was not asked to be.
    """

    kind: str
    engine: Engine
    reason: str | None = None


def route(
    config: CabConfig,
    work: Workload,
    *,
    sparse: bool,
    layer: int | None,
    q_length: int,
    kv_length: int | None,
    window: int | None = None,
    plain: bool = True,
    longest: tuple[int, int] | None = None,
) -> Route:
    """The route of one layer in one call.

    Args:
        work: with the blocks of ``config``.
        sparse: whether sparse attention is asked for at all.
        kv_length: keys written so far; None where that is not known without a wait.
        window: width of a sliding window.
        plain: nothing but causality and the window masks.
        longest: the most queries and keys that any document of the call has, padding left out; None
            where that is what the call has.

    Raises:
        ValueError: for an engine asked for by name that cannot run this.
    """
    queries, keys = longest or (q_length, kv_length)
    kind, reason = _kind(config, layer, queries, keys, window) if sparse else ("exact", None)
    if kind == "sparse":
        return Route(kind, engines.choose(config.engine, work))
    if q_length < EXACT_BLOCK or window is not None or kv_length is None:
        return Route(kind, SDPA, reason)
    whole = plain and q_length == kv_length
    return Route(kind, engines.exact(work, q_length if whole else None), reason)


def _kind(
    config: CabConfig, layer: int | None, q_length: int, kv_length: int | None, window: int | None
) -> tuple[str, str | None]:
    if window is not None:
        return "exact", f"sliding window of {window} tokens"
    if layer in config.dense_layers:
        return "exact", "in dense_layers"
    if kv_length is None or (q_length < config.query_block and not config.sparse_decode):
        return "decode", f"fewer than query_block={config.query_block} queries (decode)"
    if kv_length < config.min_length:
        return "exact", f"input shorter than min_length={config.min_length}"
    return "sparse", None
