"""``classes.py``: the verdicts on vLLM's model classes, and their table in docs/serving.md."""

import classes
import pytest

pytest.importorskip("vllm")
from test_models import MODEL_CASES
from vllm.model_executor.models import registry

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def inspect_in_process():
    """Make vLLM inspect model classes in this process, and not in a new process for each class."""
    with pytest.MonkeyPatch.context() as patch_context:
        patch_context.setattr(
            registry._LazyRegisteredModel,
            "inspect_model_cls",
            lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls()),
        )
        yield


def test_docs_page_equals_generated_page():
    """Compare the table in the page. ``python tests/vllm/classes.py`` rewrites the table."""
    assert classes.DOCS_PAGE.read_text("utf-8") == classes.render_page()


@pytest.mark.parametrize("case_name", MODEL_CASES)
def test_sparse_model_classes_are_classified_as_sparse(case_name):
    assert classes.classify_all_classes()[MODEL_CASES[case_name][0]].prompt_attention == "sparse"


def test_layers_built_by_vllm_match_table():
    """Check the verdicts on all classes that `count_layers_by_reason` can build."""
    reason_counts_by_class = {}
    for class_name in classes.classify_all_classes():
        reason_counts = classes.count_layers_by_reason(class_name)
        if reason_counts is not None:
            reason_counts_by_class[class_name] = reason_counts
    assert len(reason_counts_by_class) > 50
    for class_name, reason_counts in reason_counts_by_class.items():
        verdict = classes.classify_all_classes()[class_name]
        allowed_reasons = {
            classes.REASON_BY_LAYER_KIND.get(layer_kind, layer_kind)
            for layer_kind in classes.LAYER_KIND_BY_DENSE_NAME.values()
            if layer_kind in verdict.dense_reason
        }
        if verdict.prompt_attention != "sparse":
            # on a CPU, latent attention has a backend of its own, and is not refused
            allowed_reasons |= {"another backend", "batches that vLLM rewrites"}
        if verdict.prompt_attention in ("sparse", "sparse or refused"):
            allowed_reasons.add(None)
        assert set(reason_counts) <= allowed_reasons, (class_name, verdict, reason_counts)
