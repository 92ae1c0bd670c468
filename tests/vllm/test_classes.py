"""The table of model classes in docs/serving.md."""

import classes
import pytest

pytest.importorskip("vllm")
from test_models import MODELS
from vllm.model_executor.models import registry

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def inspect_in_process():
    """Make vLLM inspect model classes in this process, and not in a new process for each class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            registry._LazyRegisteredModel,
            "inspect_model_cls",
            lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls()),
        )
        yield


def test_docs_table_lists_model_classes():
    """Compare the table in the page. ``python tests/vllm/classes.py`` rewrites the table."""
    assert classes.DOCS.read_text("utf-8") == classes.page_with_table()


@pytest.mark.parametrize("name", MODELS)
def test_sparse_model_classes_are_classified_as_sparse(name):
    assert classes.verdicts()[MODELS[name][0]].prompts == "sparse"


def test_layers_built_by_vllm_match_table():
    """Check the verdicts on all classes that `layers_of` can build."""
    layers_by_class = {}
    for name in classes.verdicts():
        layers = classes.layers_of(name)
        if layers is not None:
            layers_by_class[name] = layers
    assert len(layers_by_class) > 50
    for name, layers in layers_by_class.items():
        verdict = classes.verdicts()[name]
        allowed = {
            classes.REASONS.get(kind, kind)
            for kind in classes.DENSE_LAYERS.values()
            if kind in verdict.why
        }
        if verdict.prompts != "sparse":
            # on a CPU, latent attention has a backend of its own, and is not refused
            allowed |= {"another backend", "batches that vLLM rewrites"}
        if verdict.prompts in ("sparse", "sparse or refused"):
            allowed.add(None)
        assert set(layers) <= allowed, (name, verdict, layers)
