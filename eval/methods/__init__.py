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
    dense_row_sentences,
    layers_of,
    never_sparse,
    realised_on,
    with_known_predictor,
)
from cab_hf.eval.methods.blocks import (
    AuthorsShareMethod,
    MassShareMethod,
    RowShareMethod,
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
    "dense_row_sentences",
    "layers_of",
    "logged_config",
    "never_sparse",
    "realised_on",
    "with_known_predictor",
]

COMPARED = (
    Dense,
    Cab,
    Published,
    Streaming,
    RowShareMethod.by("random"),
    RowShareMethod.by("antidiagonal"),
    AuthorsShareMethod.by("xattention"),
    AuthorsShareMethod.by("xattention_16"),
    MassShareMethod.by("xattention", "xattention_fitted"),
    RowShareMethod.by("vertical_slash"),
    AuthorsShareMethod.by("flexprefill"),
    MassShareMethod.by("flexprefill", "flexprefill_fitted"),
    MassShareMethod.by("mean_pooled"),
    TriangleMix,
    RowShareMethod.by("oracle"),
    H2O,
    SnapKV,
    Fp8,
)
CONTROLS = {method.name: method for method in (Full, NoNeedle)}
METHODS: dict[str, type[Method]] = {method.name: method for method in COMPARED} | CONTROLS
# methods that drop tokens from the cache after a dense prefill; the constructor takes the number of
# tokens that remain
CACHES = {method.name: method for method in (StreamingCache, H2O, SnapKV)}
