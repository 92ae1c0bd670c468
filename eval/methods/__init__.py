"""The methods that evaluations compare: one class per method, with the paper of the method.

A method is fitted to a `Cell` (base config, budget, length) and then applied to a model:

    with Streaming.fit(cell).apply_to(model) as densities:
        model.generate(...)
        densities()     # a density per layer, since the last call; None for a dense layer

Methods that select blocks are predictors. Importing this package registers these predictors.
"""

from cab_hf.eval.methods import last_queries  # noqa: F401  it registers its predictors
from cab_hf.eval.methods.base import (
    Cab,
    Cell,
    ConfigMeasure,
    Dense,
    Fp8,
    Full,
    Method,
    NoNeedle,
    Published,
    count_layers,
    dense_row_sentences,
    make_density_measure,
    never_sparse,
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
    "ConfigMeasure",
    "Dense",
    "Full",
    "Method",
    "Published",
    "count_layers",
    "dense_row_sentences",
    "logged_config",
    "make_density_measure",
    "never_sparse",
    "with_known_predictor",
]

COMPARED_METHODS = (
    Dense,
    Cab,
    Published,
    Streaming,
    RowShareMethod.with_predictor("random"),
    RowShareMethod.with_predictor("antidiagonal"),
    AuthorsShareMethod.with_predictor("xattention"),
    AuthorsShareMethod.with_predictor("xattention_16"),
    MassShareMethod.with_predictor("xattention", "xattention_fitted"),
    RowShareMethod.with_predictor("vertical_slash"),
    AuthorsShareMethod.with_predictor("flexprefill"),
    MassShareMethod.with_predictor("flexprefill", "flexprefill_fitted"),
    MassShareMethod.with_predictor("mean_pooled"),
    TriangleMix,
    RowShareMethod.with_predictor("oracle"),
    H2O,
    SnapKV,
    Fp8,
)
CONTROLS = {method.name: method for method in (Full, NoNeedle)}
METHODS: dict[str, type[Method]] = {method.name: method for method in COMPARED_METHODS} | CONTROLS
# methods that drop tokens from the cache after a dense prefill; the constructor takes the number of
# tokens that remain
CACHES = {method.name: method for method in (StreamingCache, H2O, SnapKV)}
