"""The methods that evaluations compare: one class per method, with the paper of the method.

A method is fitted to a `Cell` (base config, budget, length) and then applied to a model:

    with Streaming.fit(cell).applied(model) as densities:
        model.generate(...)
        densities()     # a density per layer, since the last call; None for a dense layer

Methods that select blocks are predictors. Importing this package registers these predictors.
"""

from cab_hf.eval.methods import last_queries  # noqa: F401  it registers its predictors
from cab_hf.eval.methods.base import (
    Cab,
    Cell,
    Dense,
    Fp8,
    Full,
    Method,
    NoNeedle,
    Published,
    Realised,
    exact_readings,
    known,
    layers_of,
    never_sparse,
    realised_on,
)
from cab_hf.eval.methods.blocks import (
    AsPublished,
    ByShare,
    OfRows,
    Streaming,
    TriangleMix,
    logged_config,
)
from cab_hf.eval.methods.caches import H2O, SnapKV, StreamingCache

__all__ = [
    "CACHES",
    "CONTROLS",
    "METHODS",
    "Cab",
    "Cell",
    "Dense",
    "Full",
    "Method",
    "Published",
    "Realised",
    "exact_readings",
    "known",
    "layers_of",
    "logged_config",
    "never_sparse",
    "realised_on",
]

COMPARED = (
    *(Dense, Cab, Published, Streaming, OfRows.by("random"), OfRows.by("antidiagonal")),
    *(AsPublished.by("xattention"), AsPublished.by("xattention_16")),
    *(ByShare.by("xattention", "xattention_fitted"), OfRows.by("vertical_slash")),
    *(AsPublished.by("flexprefill"), ByShare.by("flexprefill", "flexprefill_fitted")),
    *(ByShare.by("mean_pooled"), TriangleMix, OfRows.by("oracle"), H2O, SnapKV, Fp8),
)
CONTROLS = {method.name: method for method in (Full, NoNeedle)}
METHODS: dict[str, type[Method]] = {method.name: method for method in COMPARED} | CONTROLS
# methods that drop tokens from the cache after a dense prefill; the constructor takes the number of
# tokens that remain
CACHES = {method.name: method for method in (StreamingCache, H2O, SnapKV)}
