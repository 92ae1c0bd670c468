import pytest


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Every case is timed as few times as can be."""
    from cab_hf.eval.speed import timing
    from cab_hf.experiment import provenance

    with pytest.MonkeyPatch.context() as patch:
        for name in ("SECONDS_A_CASE", "WARM_UP_SECONDS"):
            patch.setattr(timing, name, 0.0)
        for name in ("WARM_UP_CALLS", "LEAST_RUNS", "MOST_RUNS"):
            patch.setattr(timing, name, 1)
        # somebody may commit while the tests run
        patch.setattr(provenance, "git_commit", lambda: "0" * 40)
        yield
