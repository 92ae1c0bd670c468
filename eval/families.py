"""Results of a test of all causal LM types, which compares CAB with the type's own attention.

`tests/test_families.py` builds a tiny model of every type in transformers' registry. It compares
the outputs with the type's own attention to the outputs with "cab" when every block is selected.
This module computes verdicts, tables and the figure from the outcomes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from cab_hf.config import CabConfig
from cab_hf.eval import charts
from cab_hf.eval.experiment import Experiment, Row
from cab_hf.eval.report import make_cell_formatter, markdown_table

# tokens of a test sequence, and tokens of its padding
NUM_TOKENS, NUM_PADDING_TOKENS = 150, 43
# tokens of each document packed into one sequence; one token tests the shortest document
DOCUMENT_LENGTHS = (70, 1, 79)
ONE_TEXT_INPUT, PACKED_INPUT = "one text", "packed"
# a config that keeps all blocks; blocks are small, so that a short sequence has many blocks
FULL_CONFIG = CabConfig(query_block=32, key_block=16, min_length=0, mass_threshold=0.0)
# Largest accepted differences. ``difference`` is the absolute difference of logits in one process.
# The others compare a training step on several ranks with one process. Each is divided by the
# largest value of the compared tensor.
DIFFERENCE_LIMITS = {"difference": 1e-4, "loss": 1e-5, "logits": 1e-5, "gradients": 1e-5}
# The error of a gradient is divided by the gradient's largest value, or by this fraction of the
# largest value of all gradients if the fraction is larger.
MIN_GRADIENT_SCALE = 1e-6
# environment variable that names the folder for all results of a sweep
RESULTS_FOLDER_VARIABLE = "MODEL_SWEEP"
# Tested variants of a model. In one process, ``by_name`` loads the model with
# attn_implementation="cab" and ``applied`` calls `apply_cab`; over ranks, ``plain`` calls
# `apply_cab`. ``windowed`` also adds sliding windows, and ``dynamic`` adds dynamic RoPE. Types that
# have these by default, or do not support them, lack the variant.
VARIANTS = ("by_name", "applied", "plain", "windowed", "dynamic")
EXACT_VERDICT, REFUSED_VERDICT, PARTLY_REFUSED_VERDICT = "exact", "refused", "refused in part"
NOT_REACHED_VERDICT, WRONG_VERDICT, FAILS_VERDICT, NOT_BUILT_VERDICT = (
    "not reached",
    "WRONG",
    "fails",
    "not built",
)
# all verdicts, the worst first
VERDICTS = (
    WRONG_VERDICT,
    FAILS_VERDICT,
    NOT_REACHED_VERDICT,
    PARTLY_REFUSED_VERDICT,
    REFUSED_VERDICT,
    EXACT_VERDICT,
    NOT_BUILT_VERDICT,
)
# field of a row -> (heading of its column, and the field or function that returns the cell)
DETAIL_COLUMNS = {
    "model_type": ("type", "model_type"),
    "by_name": ("by name", "by_name"),
    "applied": ("apply_cab", "applied"),
    **{name: (name, name) for name in ("plain", "windowed", "dynamic", "dtype", "layers")},
    "sparse": ("sparse", "sparse"),
    "difference": ("largest difference", make_cell_formatter("{:.0e}".format, "difference")),
    **{
        name: (f"{name} difference", make_cell_formatter("{:.0e}".format, name))
        for name in ("loss", "logits", "gradients")
    },
    "reads_padding": ("not compared", lambda row: ", ".join(row["reads_padding"]) or None),
    "said": ("reason", "said"),
}


@dataclass(frozen=True)
class Settings:
    """Settings of a sweep.

    Attributes:
        types: model types of transformers.
        ranks: number of processes over which `cab_hf.context_parallel` shards a sequence.
        timeout: seconds per type.
        memory: GiB of address space per process.
        out: folder for the results; a run in this folder is continued.
    """

    types: tuple[str, ...]
    out: str
    ranks: int = 1
    timeout: int = 300
    memory: int = 24


class Families(Experiment):
    """The test of all model types.

    A case is a model type, and its sample contains the outcome of each variant in `VARIANTS`.
    """

    name = "families"
    title = "Model types that attend as they should"
    caption = "number of model types by verdict"
    Settings = Settings
    CASE_FIELDS = ("model_type",)
    EXTENSIBLE_SETTINGS = ("types", "timeout", "memory")

    @classmethod
    def commands(cls, settings: Mapping[str, Any]) -> list[str]:
        ranks = settings["ranks"]
        test_command = "python -m pytest -m slow tests/test_families.py"
        return [
            f"{RESULTS_FOLDER_VARIABLE}=FOLDER {test_command} "
            f"-k 'attends_exactly and ranks-{ranks}'"
        ]

    @classmethod
    def rows(cls, samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the row of each type (`make_row`), sorted by type."""
        return [make_row(sample) for sample in sorted(samples, key=itemgetter("model_type"))]

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """Return a table of the number of types per verdict, and tables of types by verdict."""
        overview_rows = []
        for verdict in VERDICTS:
            model_types = [row["model_type"] for row in rows if row["verdict"] == verdict]
            if model_types:
                type_names = ", ".join(model_types)
                overview_rows.append(
                    {"verdict": verdict, "types": len(model_types), "which": type_names}
                )
        tables = {"Types": markdown_table(overview_rows, ["verdict", "types", "which"])}
        field_names = {name for row in rows for name in row}
        detail_columns = dict(
            DETAIL_COLUMNS[name] for name in DETAIL_COLUMNS if name in field_names
        )
        for heading, verdicts, columns in (
            (
                "Not as they should",
                (WRONG_VERDICT, FAILS_VERDICT, NOT_REACHED_VERDICT, PARTLY_REFUSED_VERDICT),
                detail_columns,
            ),
            ("Exact", (EXACT_VERDICT,), detail_columns),
            (
                "Refused",
                (REFUSED_VERDICT,),
                {"type": "model_type", "model": "model", "because": "said"},
            ),
            ("Not built", (NOT_BUILT_VERDICT,), {"type": "model_type", "because": "said"}),
        ):
            verdict_rows = [row for row in rows if row["verdict"] in verdicts]
            if verdict_rows:
                tables[heading] = markdown_table(verdict_rows, columns)
        return tables

    @staticmethod
    def summary_sentences(rows: Sequence[Row]) -> list[str]:
        type_counts = Counter(row["verdict"] for row in rows)
        num_built = len(rows) - type_counts[NOT_BUILT_VERDICT]
        num_wrong = num_built - type_counts[EXACT_VERDICT] - type_counts[REFUSED_VERDICT]
        return [
            f"Of {len(rows)} types {num_built} could be built: "
            f"{type_counts[EXACT_VERDICT]} attend exactly, "
            f"{type_counts[REFUSED_VERDICT]} raise an error that gives the reason, "
            f"{num_wrong or 'none'} do anything else."
        ]

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        ranks = settings["ranks"]
        block_settings = (
            f"mass_threshold 0 and blocks of {FULL_CONFIG.query_block} x {FULL_CONFIG.key_block}"
        )
        if ranks == 1:
            method_description = (
                f"is called with {NUM_TOKENS} tokens in float32, plain, with "
                f"{NUM_PADDING_TOKENS} tokens of padding left and right, and packed as documents "
                f"of {', '.join(map(str, DOCUMENT_LENGTHS))} tokens by position_ids: alone, with a "
                "mask of ones and with a cache. Its logits are compared with those of its own "
                f"implementation, whose masks separate the documents, at {block_settings}: "
                "loaded with "
                '`attn_implementation="cab"`, under `apply_cab`, and *windowed*: with sliding '
                "windows too, for a type that supports them and has none by default. "
                f"*{EXACT_VERDICT}*: all differences are at most "
                f"{DIFFERENCE_LIMITS['difference']:g}, and layers "
                "attend through cab (`sparse` of them under a plan, the others in a sliding "
                "window). Inputs whose padding a type reads with its own implementation are left "
                "out."
            )
        else:
            method_description = (
                f"takes a training step of two rows of {NUM_TOKENS} tokens on {ranks} ranks "
                f"(gloo), under `apply_cab` at {block_settings}, inside `cab_hf.context_parallel`, "
                "in float64, or in float32 if its own code needs that. "
                f"*{ONE_TEXT_INPUT}*: one document, compared with the attention of the type in one "
                f"process. *{PACKED_INPUT}*: documents of "
                f"{', '.join(map(str, DOCUMENT_LENGTHS))} tokens, compared with cab in one "
                "process. Routers add their loss if a type has one. The cross-entropy of the "
                "logits replaces a loss that takes other labels. *windowed*: with sliding windows; "
                "*dynamic*: with rotary frequencies that depend on the longest position; both "
                "for a type that supports them and has none by default. "
                f"*{EXACT_VERDICT}*: loss, logits and the summed gradients of all parameters "
                f"differ by at most {DIFFERENCE_LIMITS['loss']:g} "
                "of their largest value, and layers attend through cab. Gradients below "
                f"{MIN_GRADIENT_SCALE:g} of the largest gradient of all count as that much."
            )
        return (
            "Every type of `AutoModelForCausalLM` is built with a few layers and random weights, "
            f"and {method_description} *{NOT_REACHED_VERDICT}*: the numbers agree, but no layer "
            "attends through cab. "
            f"*{PARTLY_REFUSED_VERDICT}*: some inputs or builds raise an error that gives the "
            "reason. "
            f"*{FAILS_VERDICT}*: "
            "any other error."
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Draw the number of types per verdict as bars."""
        type_counts = Counter(row["verdict"] for row in rows)
        verdicts = [verdict for verdict in reversed(VERDICTS) if type_counts[verdict]]
        with charts.figure(path, 1, 1, figsize=(6, 0.6 + 0.4 * len(verdicts))) as axes:
            bars = axes[0, 0].barh(verdicts, [type_counts[verdict] for verdict in verdicts])
            axes[0, 0].bar_label(bars, padding=2)
            axes[0, 0].margins(x=0.1)
            axes[0, 0].set_xlabel("model types")


EXPERIMENT = Families


def make_row(sample: Row) -> dict[str, Any]:
    """Return the row of a model type.

    The row has the verdicts on the type and on its variants (`VARIANTS`), the first error message,
    and the largest differences. ``layers`` counts the attention layers that attended through cab,
    and ``sparse`` the layers that attended under a plan.
    """
    row = {name: sample.get(name) for name in ("model_type", "model")}
    if "not_built" in sample:
        return {**row, "verdict": NOT_BUILT_VERDICT, "said": sample["not_built"]}
    sample_fields = {name: sample[name] for name in ("dtype", "reads_padding") if name in sample}
    outcomes_by_variant, layer_counts_by_field = {}, {"layers": [0], "sparse": []}
    for name in (name for name in VARIANTS if name in sample):
        variant = sample[name]
        # samples of one process count the layers of all inputs together, samples of ranks per input
        outcome_by_input = variant.get("inputs", variant)
        outcomes_by_variant[name] = [
            {"layers": variant.get("layers"), **outcome}
            for input_name, outcome in outcome_by_input.items()
            if input_name not in sample_fields.get("reads_padding", ())
        ]
        for field, layer_counts in layer_counts_by_field.items():
            counted_outcomes = (variant, *outcome_by_input.values())
            layer_counts += [outcome[field] for outcome in counted_outcomes if field in outcome]
    all_outcomes = [
        outcome for variant_outcomes in outcomes_by_variant.values() for outcome in variant_outcomes
    ]
    reasons = (outcome.get("refused") or outcome.get("failed") for outcome in all_outcomes)
    verdicts = {
        name: combine_verdicts(list(map(judge_outcome, variant_outcomes)))
        for name, variant_outcomes in outcomes_by_variant.items()
    }
    is_one_process = "reads_padding" in sample
    limited_fields = [
        name for name in DIFFERENCE_LIMITS if (name == "difference") == is_one_process
    ]
    differences = {
        name: max((outcome[name] for outcome in all_outcomes if name in outcome), default=None)
        for name in limited_fields
    }
    return {
        **row,
        "verdict": combine_verdicts(list(verdicts.values())),
        **verdicts,
        "said": next(filter(None, reasons), None),
        **differences,
        **{
            field: max(layer_counts)
            for field, layer_counts in layer_counts_by_field.items()
            if layer_counts
        },
        **sample_fields,
    }


def judge_outcome(outcome: Row) -> str:
    """Return the verdict on the outcome of one variant of a model for one kind of input."""
    if "refused" in outcome or "failed" in outcome:
        return REFUSED_VERDICT if "refused" in outcome else FAILS_VERDICT
    if not all(
        outcome[name] <= max_difference
        for name, max_difference in DIFFERENCE_LIMITS.items()
        if name in outcome
    ):
        return WRONG_VERDICT
    return EXACT_VERDICT if outcome["layers"] else NOT_REACHED_VERDICT


def combine_verdicts(verdicts: Sequence[str]) -> str:
    """Return the verdict on several outcomes.

    The verdict is `PARTLY_REFUSED_VERDICT` if some outcomes are `EXACT_VERDICT` and all others
    `REFUSED_VERDICT`, or else the first in the order of `VERDICTS`.
    """
    return (
        PARTLY_REFUSED_VERDICT
        if set(verdicts) == {EXACT_VERDICT, REFUSED_VERDICT}
        else min(verdicts, key=VERDICTS.index)
    )
