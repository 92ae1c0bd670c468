"""Marks that select tests for `make test` and for older versions of transformers."""

import pytest
import transformers
from packaging.version import Version


def is_transformers_before(version):
    """Return True if transformers is older than ``version``."""
    return Version(transformers.__version__) < Version(version)


def skip_before_transformers(version, reason):
    """Return a mark that skips a test if transformers is older than ``version``.

    The reason that pytest shows is "before transformers VERSION", followed by ``reason``.
    """
    return pytest.mark.skipif(
        is_transformers_before(version), reason=f"before transformers {version} {reason}"
    )


NEEDS_SERVING = skip_before_transformers("5.19", "continuous batching is refused")


def mark_slow_except(cases, *fast_indices):
    """Return ``cases`` of a parametrised test, marked as slow except at ``fast_indices``.

    A case is a `pytest.param`, a tuple of arguments, or a single argument.
    """
    params = []
    for index, case in enumerate(cases):
        if not hasattr(case, "marks"):
            case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
        marks = [*case.marks, *([] if index in fast_indices else [pytest.mark.slow])]
        params.append(pytest.param(*case.values, id=case.id, marks=marks))
    return params
