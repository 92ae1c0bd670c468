"""A fixture that shortens the timing of all cases."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def time_one_call_per_case():
    """Make timers run one warm-up call and one timed call per case."""
    from cab_hf.eval.speed import timing
    from cab_hf.experiment import provenance

    with pytest.MonkeyPatch.context() as patch_context:
        for constant_name in ("MAX_CASE_SECONDS", "WARM_UP_SECONDS"):
            patch_context.setattr(timing, constant_name, 0.0)
        for constant_name in ("WARM_UP_CALLS", "MIN_RUNS", "MAX_RUNS"):
            patch_context.setattr(timing, constant_name, 1)
        # a commit during the tests must not change the provenance
        patch_context.setattr(provenance, "git_commit", lambda: "0" * 40)
        yield
