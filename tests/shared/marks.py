"""Which tests `make test` runs, and which of them with an older transformers."""

import pytest
import transformers
from packaging.version import Version


def before(version):
    """Whether transformers is older."""
    return Version(transformers.__version__) < Version(version)


def since(version, why):
    """A mark of tests that need this version of transformers; ``why`` is the end of a clause."""
    return pytest.mark.skipif(before(version), reason=f"before transformers {version} {why}")


SERVING = since("5.19", "continuous batching is refused")


def slow_but(cases, *fast):
    """``cases`` of a parametrised test, of which all but those at the indices ``fast`` are slow.

    A case is a `pytest.param`, a tuple of several arguments, or the one argument.
    """
    made = []
    for index, case in enumerate(cases):
        if not hasattr(case, "marks"):
            case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
        marks = [*case.marks, *([] if index in fast else [pytest.mark.slow])]
        made.append(pytest.param(*case.values, id=case.id, marks=marks))
    return made
