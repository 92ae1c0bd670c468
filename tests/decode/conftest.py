import pytest


@pytest.fixture
def steps(monkeypatch):
    """Return a list to which every sparse decode step appends the index of its layer."""
    from cab_hf import dispatch

    layers, route = [], dispatch.route

    def recording_route(mask, config, work, *, layer, **options):
        chosen_route = route(mask, config, work, layer=layer, **options)
        if chosen_route.method == "sparse_decode":
            layers.append(layer.layer_idx)
        return chosen_route

    monkeypatch.setattr(dispatch, "route", recording_route)
    return layers


@pytest.fixture
def from_anywhere(monkeypatch):
    """Remove the minimum length of sparse decode, so that steps after short prompts are sparse."""
    # modules that import `min_sparse_tokens` must be imported before it is patched
    import cab_hf.patches  # noqa: F401
    from cab_hf.decode import step

    monkeypatch.setattr(step, "min_sparse_tokens", lambda config: 0)
