"""The table of model classes in docs/serving.md."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")
import classes
from test_models import MODELS
from vllm.model_executor.models import registry

pytestmark = pytest.mark.vllm


def test_docs_have_the_table_of_model_classes():
    """``python tests/vllm/classes.py`` writes it."""
    assert classes.DOCS.read_text("utf-8") == classes.written()


@pytest.mark.parametrize("name", MODELS)
def test_classes_that_are_served_sparsely_are_sorted_so(name):
    models, kind = Path(registry.__file__).parent, MODELS[name][0]
    module, _ = registry._VLLM_MODELS[kind]
    assert classes.verdict(models, module)[0] == "sparse"
