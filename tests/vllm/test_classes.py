"""The table of model classes in docs/serving.md."""

import classes
import pytest

pytest.importorskip("vllm")
from test_models import MODELS
from vllm.model_executor.models import registry

# warnings are those of vLLM and its libraries
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def inspected_here():
    """Inspect classes in this process; vLLM starts a process for each class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            registry._LazyRegisteredModel,
            "inspect_model_cls",
            lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls()),
        )
        yield


def test_docs_table_lists_model_classes():
    """``python tests/vllm/classes.py`` writes it."""
    assert classes.DOCS.read_text("utf-8") == classes.written()


@pytest.mark.parametrize("name", MODELS)
def test_sparse_model_classes_are_classified_as_sparse(name):
    assert classes.verdicts()[MODELS[name][0]].prompts == "sparse"


def test_layers_built_by_vllm_match_table():
    """Every class with a config in transformers, except for those that need more than a CPU."""
    built = {}
    for name in classes.verdicts():
        layers = classes.layers_of(name)
        if layers is not None:
            built[name] = layers
    assert len(built) > 50
    for name, layers in built.items():
        found = classes.verdicts()[name]
        why = found.why
        allowed = {classes.REASONS.get(x, x) for x in classes.DENSE_LAYERS.values() if x in why}
        if found.prompts != "sparse":
            # a CPU has a backend for latent attention
            allowed |= {"another backend", "batches that vLLM rewrites"}
        if found.prompts in ("sparse", "sparse or refused"):
            allowed.add(None)
        assert set(layers) <= allowed, (name, found, layers)
