import pytest


@pytest.fixture
def sparse_step_layers(monkeypatch):
    """Return a list to which every sparse decode step appends the index of its layer."""
    from cab_hf import dispatch

    layer_indices, original_route = [], dispatch.route

    def record_route(mask, config, workload, *, layer, **route_options):
        chosen_route = original_route(mask, config, workload, layer=layer, **route_options)
        if chosen_route.method == "sparse_decode":
            layer_indices.append(layer.layer_idx)
        return chosen_route

    monkeypatch.setattr(dispatch, "route", record_route)
    return layer_indices


@pytest.fixture
def zero_min_length(monkeypatch):
    """Remove the minimum length of sparse decode, so that steps after short prompts are sparse."""
    # modules that import `min_sparse_tokens` must be imported before it is patched
    import cab_hf.patches  # noqa: F401
    from cab_hf.decode import step

    monkeypatch.setattr(step, "min_sparse_tokens", lambda config: 0)
