import pytest


@pytest.fixture
def steps(monkeypatch):
    """Record the layer index of every sparse decode step in a list."""
    from cab_hf import dispatch

    made, before = [], dispatch.route

    def counted(*args, **kwargs):
        way = before(*args, **kwargs)
        if way.method == "sparse_decode":
            made.append(kwargs["layer"].layer_idx)
        return way

    monkeypatch.setattr(dispatch, "route", counted)
    return made


@pytest.fixture
def from_anywhere(monkeypatch):
    """Make decode steps sparse at every length, also if the prompt is too short."""
    # import modules that copy the name before it is patched
    import cab_hf.patches  # noqa: F401
    from cab_hf.decode import step

    monkeypatch.setattr(step, "decode_from", lambda config: 0)
