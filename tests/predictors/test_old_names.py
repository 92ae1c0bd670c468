"""Old names of classes, attributes and predictor methods work for one version, with a warning."""

import warnings

import pytest
import torch
from selecting import draw_peaked_qk

from cab_hf import CabConfig, plan
from cab_hf.plan import BlockPlan, KeyRanges
from cab_hf.predictors import LayerContext, Predictor, RowsPredictor

CONFIG = CabConfig(32, 16, outlier_queries=4, typical_queries=4, typical_key_stride=1)
RANGES = KeyRanges.causal(1, 64, 64, "cpu")
LAYER_CONTEXT = LayerContext(RANGES, 0.25)


@pytest.mark.parametrize(
    ("read_old_name", "expected", "warning_pattern"),
    [
        (lambda: plan.Spans, KeyRanges, "Spans.*KeyRanges"),
        (lambda: plan.RowSpans, plan.BlockRanges, "RowSpans.*BlockRanges"),
        (lambda: plan.BlockLists, plan.BlockIndices, "BlockLists.*BlockIndices"),
        (lambda: LAYER_CONTEXT.spans, RANGES, "LayerContext.spans.*LayerContext.ranges"),
        (lambda: RANGES.first, RANGES.start, "KeyRanges.first.*KeyRanges.start"),
        (lambda: RANGES.last, RANGES.end, "KeyRanges.last.*KeyRanges.end"),
        (lambda: BlockPlan.causal(RANGES, 1, 32, 16).spans, RANGES, "BlockPlan.spans.*ranges"),
    ],
    ids=["Spans", "RowSpans", "BlockLists", "LayerContext", "first", "last", "plan"],
)
def test_old_name_is_an_alias_with_one_warning(read_old_name, expected, warning_pattern):
    with pytest.warns(FutureWarning, match=warning_pattern) as warnings_record:
        assert read_old_name() is expected
    assert len(warnings_record) == 1 and warnings_record[0].filename == __file__


def test_unknown_name_of_plan_raises_attribute_error():
    with pytest.raises(AttributeError, match="'Spams'"):
        plan.Spams  # noqa: B018


def test_subclass_with_old_method_names_works_with_one_warning():
    with pytest.warns(
        FutureWarning, match=r"ExamplePredictor.summarise, ExamplePredictor.gathers.*encode_keys"
    ) as warnings_record:

        class ExamplePredictor(RowsPredictor):
            num_encoded = 0

            def summarise(self, k, valid=None, channels=()):
                self.num_encoded += 1
                return super().summarise(k, valid, channels)

            def gathers(self, layer_context, heads):
                return (*super().gathers(layer_context, heads), "vectors")

    assert len(warnings_record) == 1 and warnings_record[0].filename == __file__
    predictor = ExamplePredictor(CONFIG)
    q, k = draw_peaked_qk(q_length=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = predictor(q, k, LAYER_CONTEXT)
        assert predictor.required_inputs(LAYER_CONTEXT, (4, 2)) == ("summaries", "vectors")
    assert predictor.num_encoded == 1
    assert torch.equal(actual.to_dense(), RowsPredictor(CONFIG)(q, k, LAYER_CONTEXT).to_dense())


def test_mixin_with_old_method_name_overrides_new_method():
    class OldNameMixin:
        def join(self, summary, layer_context, heads, layout):
            return "joined"

    with pytest.warns(FutureWarning, match="ExamplePredictor.join.*merge"):

        class ExamplePredictor(OldNameMixin, RowsPredictor):
            pass

    assert ExamplePredictor(CONFIG).merge(None, LAYER_CONTEXT, (4, 2), None) == "joined"


def test_subclass_with_new_method_names_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class ExamplePredictor(Predictor):
            def encode_keys(self, k, valid=None):
                return "encoded"

            def choose(self, q, summary, layer_context):
                return summary

        class ExampleSubclass(ExamplePredictor):
            pass

    # the old method name calls the new method
    assert (
        ExampleSubclass(CONFIG).summarise(None)
        == "encoded"
        == ExampleSubclass(CONFIG)(None, None, LAYER_CONTEXT)
    )
