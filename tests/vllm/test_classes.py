"""``classes.py``: the verdicts on vLLM's model classes, and their table in docs/serving.md."""

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


def test_docs_page_equals_generated_page():
    """Compare the table in the page. ``python tests/vllm/classes.py`` rewrites the table."""
    assert classes.DOCS_PAGE.read_text("utf-8") == classes.render_page()


@pytest.mark.parametrize("name", MODELS)
def test_sparse_model_classes_are_classified_as_sparse(name):
    assert classes.classify_all()[MODELS[name][0]].prompts == "sparse"


def test_layers_built_by_vllm_match_table():
    """Check the verdicts on all classes that `count_layers_by_reason` can build."""
    layers_by_class = {}
    for class_name in classes.classify_all():
        reason_counts = classes.count_layers_by_reason(class_name)
        if reason_counts is not None:
            layers_by_class[class_name] = reason_counts
    assert len(layers_by_class) > 50
    for class_name, reason_counts in layers_by_class.items():
        verdict = classes.classify_all()[class_name]
        allowed_reasons = {
            classes.REASON_OF_KIND.get(kind, kind)
            for kind in classes.KIND_OF_DENSE_NAME.values()
            if kind in verdict.why
        }
        if verdict.prompts != "sparse":
            # on a CPU, latent attention has a backend of its own, and is not refused
            allowed_reasons |= {"another backend", "batches that vLLM rewrites"}
        if verdict.prompts in ("sparse", "sparse or refused"):
            allowed_reasons.add(None)
        assert set(reason_counts) <= allowed_reasons, (class_name, verdict, reason_counts)
