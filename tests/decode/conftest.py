import pytest


@pytest.fixture
def steps(monkeypatch):
    """Record the layer index of every sparse decode step in a list."""
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
    """Make decode steps sparse at every length, also if the prompt is too short."""
    # modules that import `decode_from` must be imported before it is patched
    import cab_hf.patches  # noqa: F401
    from cab_hf.decode import step

    monkeypatch.setattr(step, "decode_from", lambda config: 0)
