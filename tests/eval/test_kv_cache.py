"""The KV cache is handed over under the name that a model knows, and found in what it returns."""

import warnings

import pytest
import torch
from tiny import tiny_model, tokens

from cab_hf.eval.kv_cache import NAME, NAME_BEFORE, cache_name, cache_of, read_on


class Model:
    """It returns the cache that it is given."""

    def forward(self, ids, cache=None, use_cache=None):
        return {NAME: (cache, use_cache)}

    def __call__(self, *given, **named):
        return self.forward(*given, **named)


class ModelBefore(Model):
    def forward(self, ids, past_key_values=None, use_cache=None):
        return {NAME_BEFORE: (past_key_values, use_cache)}


@pytest.mark.parametrize(("model", "name"), [(Model(), NAME), (ModelBefore(), NAME_BEFORE)])
def test_names(model, name):
    assert cache_name(model) == name
    assert cache_of(read_on(model, torch.zeros(1, 1), "a cache")) == ("a cache", True)


def test_reading_on_is_reading_and_warns_of_nothing():
    model, ids = tiny_model(), tokens(1, 12, seed=3)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        first = read_on(model, ids[:, :8], None)
        second = read_on(model, ids[:, 8:], cache_of(first))
    torch.testing.assert_close(second.logits, model(ids).logits[:, 8:])
