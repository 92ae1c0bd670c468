"""Which cases of a parametrised test `make test` runs."""

import pytest


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
