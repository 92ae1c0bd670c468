"""Passkey retrieval: how often a model finds a number hidden in a long text, by method.

Every method answers the same prompts. A cell is (method, length, keys); a case is (cell, depth,
index).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from cab_hf.config import CabConfig
from cab_hf.data.needles import PERSON_NAMES, Tokens
from cab_hf.decode.step import decodes_sparsely
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.haystack import (
    FILLERS,
    Haystack,
    Prompt,
    is_right_answer,
    parse_depths,
    read_sentences,
)
from cab_hf.eval.intervals import compare_shares
from cab_hf.eval.kv_cache import get_cache_name
from cab_hf.eval.long_run import MATCH_BUDGET, LongRun, LongRunSettings
from cab_hf.eval.methods import (
    CONTROLS,
    METHODS,
    Cab,
    Dense,
    Method,
    dense_row_sentences,
    never_sparse,
    with_known_predictor,
)
from cab_hf.eval.on_model import average_sparse_density
from cab_hf.eval.report import format_difference, format_with_interval, group_rows, markdown_table
from cab_hf.experiment.models import use_greedy_generation
from cab_hf.experiment.provenance import file_identity
from cab_hf.experiment.settings import (
    by_device,
    comma_separated,
    option,
    parse_length,
    require,
    spell_value,
)

MAX_ANSWER_TOKENS = 8  # tokens of an answer: five digits, and some tokens around them
STAGES = {
    "prefill": "Decoding is dense, except that streaming, h2o and snapkv no longer have the keys "
    "that they dropped.",
    "both": "The table shows how answers are decoded; methods without sparse decoding decode "
    "densely.",
}
# decode_tokens of cab in the stage "both" unless --cab sets it, as a fraction of the cached tokens
DECODE_SHARE = 0.125
CELL_FIELDS = ("method", "length", "keys")
# fields of every sample in addition to the fields that identify its case
MEASURED_FIELDS = (
    *("tokens", "needle", "reached", "answer", "expected", "correct"),
    *("density", "sparse_density", "seconds", "budget"),
)
get_cell_key = itemgetter("method", "length", "keys")
# the fields that identify a question; all methods answer the same questions
get_question_key = itemgetter("length", "keys", "depth", "index")


def format_depths_option(depths: Sequence[float]) -> str:
    """Return the value of ``--depths`` from which `parse_depths` reads ``depths``."""
    num_depths = str(len(depths))
    return num_depths if parse_depths(num_depths) == tuple(depths) else spell_value(depths)


@dataclass(frozen=True)
class Settings(LongRunSettings):
    """Settings of a run. None: a default that depends on the device."""

    methods: tuple[str, ...] | None = by_device(
        ("dense", "cab", "published", "streaming", "random", "h2o"),
        ("dense", "cab", "published", "streaming", "random"),
        f"comma-separated methods: {', '.join(METHODS)}",
        comma_separated(str),
    )
    lengths: tuple[int, ...] | None = by_device(
        (8192,), (1536,), "comma-separated prompt lengths in tokens", comma_separated(parse_length)
    )
    depths: tuple[float, ...] | None = by_device(
        parse_depths("5"),
        # at these depths, the key is neither in a local window nor in the first block
        (0.25, 0.5, 0.75),
        "comma-separated depths of the key in the text, 0 to 1; or their number, evenly spaced",
        parse_depths,
        spell=format_depths_option,
    )
    samples: int | None = by_device(20, 1, "samples per length and depth", int)
    controls: int | None = option(
        None,
        "samples that full and no_needle answer too (default: 1 on CPU, all on a GPU)",
        int,
    )
    keys: int = option(1, "number of hidden named keys; one is asked for", int)
    filler: str = option("noise", f"text around the key: {', '.join(FILLERS)}")
    haystack: str | None = option(None, "text file for --filler text")
    stage: str = option(
        "prefill", "prefill: block methods decode densely; both: cab decodes sparsely too"
    )
    budget: str | float = option(
        MATCH_BUDGET,
        "density of the baselines: match (the density of cab), or a number",
        lambda text: MATCH_BUDGET if text == MATCH_BUDGET else float(text),
    )
    out: str = option(
        "passkey_results", "folder for the results; a run in this folder is continued"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.controls is None:
            object.__setattr__(self, "controls", 1 if self.is_on_cpu else self.samples)
        require_setting = partial(require, self)
        self.check_methods()
        require_setting("lengths", self.lengths and min(self.lengths) > 0, "numbers of tokens")
        require_setting(
            "depths",
            self.depths and all(0 <= depth <= 1 for depth in self.depths),
            "shares from 0 to 1",
        )
        require_setting("samples", self.samples > 0, "at least 1")
        require_setting(
            "controls", 0 <= self.controls <= self.samples, "0 to the number of samples"
        )
        require_setting("keys", 1 <= self.keys <= len(PERSON_NAMES), f"1 to {len(PERSON_NAMES)}")
        require_setting("filler", self.filler in FILLERS, f"one of {', '.join(FILLERS)}")
        haystack_file = self.haystack
        is_haystack_valid = (
            haystack_file is None
            if self.filler != "text"
            else haystack_file and Path(haystack_file).is_file()
        )
        requirement = "a text file with --filler text, and left out with another filler"
        require_setting("haystack", is_haystack_valid, requirement)
        if haystack_file is not None:
            read_sentences("haystack", haystack_file)
        require_setting("stage", self.stage in STAGES, f"one of {', '.join(STAGES)}")
        can_match = self.budget != MATCH_BUDGET or Cab.name in self.methods
        self.check_match("budget", Cab.name, can_match)
        is_budget_valid = self.budget == MATCH_BUDGET or 0 < self.budget <= 1
        require_setting("budget", is_budget_valid, f"{MATCH_BUDGET} or a density in (0, 1]")
        # `cab_config` raises an error for fields that CabConfig refuses, before the run starts
        config = self.cab_config
        require_setting(
            "lengths",
            not config.sparse_decode or decodes_sparsely(config, min(self.lengths)),
            f"at least 4 times decode_tokens={config.decode_tokens}; decoding is dense below",
        )

    @cached_property
    def cab_config(self) -> CabConfig:
        """CAB's config: the default with ``min_length=0`` and the fields of ``--cab``.

        In the stage "both" it also decodes sparsely.
        """
        default_fields = {"min_length": 0}
        if self.stage == "both":
            default_fields |= {"sparse_decode": True, "decode_tokens": DECODE_SHARE}
        return with_known_predictor(CabConfig.from_dict({**default_fields, **self.cab_fields}))


class Passkey(LongRun):
    """The experiment that hides a number in a long text and asks for the number.

    A case is one prompt that the model answers with one method, and its sample contains the answer.
    """

    name = "passkey"
    purpose = "find a number hidden in a long text"
    title = "Passkey retrieval"
    caption = "accuracy by depth and length"
    Settings = Settings
    CELL_FIELDS, BUDGET_FIELD = CELL_FIELDS, "budget"
    CASE_FIELDS = (*CELL_FIELDS, "depth", "index")
    EXTENSIBLE_SETTINGS = ("methods", "lengths", "controls", "cab")
    MAX_NEW_TOKENS = MAX_ANSWER_TOKENS

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # cache the prompts of one length, which all methods answer
        self.make_prompt = lru_cache(len(settings.depths) * settings.samples)(self._make_prompt)

    @cached_property
    def haystack(self) -> Haystack:
        """The `Haystack` that builds all prompts."""
        settings = self.settings
        return Haystack(self.tokenizer, settings.filler, settings.keys, settings.haystack)

    def _make_prompt(
        self, length: int, depth: float, index: int, hide_needle: bool = False
    ) -> Prompt:
        return self.haystack.make_prompt(
            length=length,
            depth=depth,
            index=index,
            seed=self.settings.seed,
            hide_needle=hide_needle,
        )

    def get_fitting_tokens(self, text_key: tuple[int]) -> Tokens:
        (length,) = text_key
        return self.make_prompt(length, self.settings.depths[0], 0).tokens

    def check_settings(self) -> None:
        super().check_settings()
        for length in self.settings.lengths:
            self.haystack.check_length(length)

    def sentences_by_file(self) -> dict[str, Sequence[str]]:
        file = self.settings.haystack
        return {Path(file).name: self.haystack.sentences} if file else {}

    def recorded_settings(self) -> dict[str, Any]:
        settings, recorded_settings = self.settings, super().recorded_settings()
        if settings.haystack is not None:
            recorded_settings["haystack"] = file_identity(settings.haystack)
        return {**recorded_settings, "cab_config": settings.cab_config.to_dict()}

    @property
    def num_samples_by_method(self) -> dict[str, int]:
        """Name of each method -> number of prompts per length and depth, in measured order."""
        settings = self.settings
        # methods whose budget may be CAB's density come after CAB
        chosen_methods = sorted(settings.methods, key=lambda name: METHODS[name].is_budget_matched)
        control_methods = [
            name for name in CONTROLS if settings.controls and name not in chosen_methods
        ]
        return dict.fromkeys(chosen_methods, settings.samples) | dict.fromkeys(
            control_methods, settings.controls
        )

    def list_planned_cases(self) -> Iterator[dict[str, Any]]:
        settings = self.settings
        for length, (method, num_samples) in product(
            settings.lengths, self.num_samples_by_method.items()
        ):
            cell = {"method": method, "length": length, "keys": settings.keys}
            for depth, index in product(settings.depths, range(num_samples)):
                yield {**cell, "depth": depth, "index": index}

    def needs_other_samples(self, case: Mapping[str, Any]) -> bool:
        return METHODS[case["method"]].is_budget_matched and self.settings.budget == MATCH_BUDGET

    def find_budget(self, case: Mapping[str, Any], samples: Sequence[Row]) -> float | None:
        """Return the density that a baseline should have in layers that are not dense.

        Returns None for methods without a budget, or while samples of CAB are missing.
        """
        if not METHODS[case["method"]].is_budget_matched:
            return None
        if self.settings.budget != MATCH_BUDGET:
            return self.settings.budget
        cab_cell = (Cab.name, case["length"], self.settings.keys)
        return average_sparse_density([s for s in samples if get_cell_key(s) == cab_cell])

    @staticmethod
    def measured_fields(sample: Row) -> Sequence[str]:
        return MEASURED_FIELDS

    def get_question_key(self, case: Mapping[str, Any]) -> tuple[Any, ...]:
        return get_question_key(case)

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Let the model answer one prompt; return `MEASURED_FIELDS` without the budget."""
        length, method_class = case["length"], METHODS[case["method"]]
        method = self.fit_method(method_class, self.settings.cab_config, case, (length,))
        prompt = self.make_prompt(
            length, case["depth"], case["index"], hide_needle=method.hides_needle
        )
        result = self.measure_with(method, lambda: {"answer": self.generate_answer(prompt, method)})
        needle_span = prompt.needle_span
        return {
            "tokens": len(prompt.tokens),
            "needle": needle_span,
            "reached": needle_span
            and method.can_reach(len(prompt.tokens), prompt.question_start, needle_span),
            **result,
            "expected": prompt.key,
            "correct": is_right_answer(result["answer"], prompt.key),
        }

    @torch.no_grad()
    def generate_answer(self, prompt: Prompt, method: Method) -> str:
        """Return the model's greedy answer to a prompt as text."""
        model = self.model
        ids = torch.tensor([prompt.tokens], device=model.device)
        with use_greedy_generation(model, MAX_ANSWER_TOKENS) as generation_config:
            output_ids = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=generation_config,
                **{get_cache_name(model): method.make_cache(model)},
            )
        return self.tokenizer.decode(output_ids[0, ids.shape[1] :], skip_special_tokens=True)

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return one row per (method, length, keys): accuracy and difference to dense.

        Accuracy has Wilson's interval. The difference has Newcombe's interval, and covers the
        questions that both the method and dense attention answered. For a method whose queries
        reach only some keys, the row also counts the samples whose needle is out of reach.
        """
        dense_by_question = {get_question_key(s): s for s in samples if s["method"] == Dense.name}
        setting_fields = {name: settings[name] for name in ("stage", "filler")}
        cells, method_order = group_rows(samples, ["length", "keys", "method"]), list(METHODS)
        cells.sort(
            key=lambda cell: (
                cell[0]["length"],
                cell[0]["keys"],
                method_order.index(cell[0]["method"]),
            )
        )
        return [
            {
                **{name: cell[0][name] for name in CELL_FIELDS},
                **_make_row(cell, dense_by_question),
                **setting_fields,
            }
            for cell in cells
        ]

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        columns = dict(COLUMNS)
        if any(row.get("stage") == "both" for row in rows):
            decoding_by_method = {
                name: method.decode_description for name, method in METHODS.items()
            }
            decoding_by_method[Cab.name] = "sparsely"
            columns["decoded"] = lambda row: decoding_by_method[row["method"]]
        return {"Accuracy": markdown_table(rows, columns)}

    @staticmethod
    def summary_sentences(rows: Sequence[Row]) -> list[str]:
        """Return a sentence on CAB's accuracy at the largest length, and notes on dense rows."""
        compared_rows = [row for row in rows if row["method"] == Cab.name and "pairs" in row]
        return [
            f"At {row['length']} tokens cab answers {row['correct']} of {row['n']} questions and "
            f"attends {row['density']:.0%} of the pairs. Its difference to dense is "
            f"{format_difference(row)}."
            for row in compared_rows[-1:]
        ] + dense_row_sentences(rows)

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return (
            "Accuracy has Wilson's interval and the paired difference to dense has Newcombe's, "
            "both 95 %. Density: attended over causal (query, key) pairs; for h2o and snapkv, "
            "which prefill densely, the share of keys that they keep. Controls: full keeps every "
            "block and should answer as dense does (below float32, kernels round differently); "
            "no_needle asks for a key that is not in the text; a key outside a method's window "
            f"should not be found. {STAGES[settings['stage']]}"
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Draw accuracy by depth and length, one panel per method."""
        panels = {name: {} for name in METHODS if any(row["method"] == name for row in rows)}
        for row in rows:
            for depth, accuracy in row["by_depth"].items():
                panels[row["method"]][row["length"], float(depth)] = accuracy
        charts.draw_heatmap(path, panels, "prompt length (tokens)", "depth of the key")


EXPERIMENT = Passkey


def _make_row(cell: Sequence[Row], dense_by_question: Mapping[tuple, Row]) -> dict[str, Any]:
    """Return the measurements of one cell as fields of its row in the report.

    Args:
        cell: all samples of the cell.
        dense_by_question: question (`get_question_key`) -> sample of dense attention.
    """
    method = cell[0]["method"]
    pairs = [
        (s, dense_by_question[get_question_key(s)])
        for s in cell
        if get_question_key(s) in dense_by_question
    ]
    pairs = [] if method == Dense.name else pairs
    paired_outcomes = [(s["correct"], dense_sample["correct"]) for s, dense_sample in pairs]
    row = compare_shares([s["correct"] for s in cell], paired_outcomes)
    row["accuracy"] = row.pop("share")
    row |= {"density": fmean(s["density"] for s in cell), "budget": cell[0]["budget"]}
    if all("seconds" in s for s in cell):
        row["seconds"] = round(median(s["seconds"] for s in cell), 2)
    if pairs:
        row["same"] = sum(s["answer"] == dense_sample["answer"] for s, dense_sample in pairs)
    if never_sparse(METHODS[method], cell):
        row["never_sparse"] = True
    if any(s["reached"] is not None for s in cell):
        outcomes_out_of_reach = [s["correct"] for s in cell if not s["reached"]]
        row |= {
            "outside_n": len(outcomes_out_of_reach),
            "outside_correct": sum(outcomes_out_of_reach),
        }
    outcomes_by_depth: dict[str, list[bool]] = {}
    for s in cell:
        outcomes_by_depth.setdefault(f"{s['depth']:g}", []).append(s["correct"])
    accuracy_by_depth = {depth: fmean(outcomes) for depth, outcomes in outcomes_by_depth.items()}
    return {**row, "by_depth": accuracy_by_depth}


def _format_fraction(count_field: str, total_field: str, row: Row) -> str | None:
    """Format two fields of a row as ``9 of 20``; None if the second is missing or 0.

    Args:
        count_field: name of the first field.
        total_field: name of the second field.
        row: the row.
    """
    return f"{row[count_field]} of {row[total_field]}" if row.get(total_field) else None


COLUMNS = {
    "method": "method",
    "length": "length",
    "keys": "keys",
    "correct": partial(_format_fraction, "correct", "n"),
    "accuracy [95 %]": lambda row: format_with_interval(row["accuracy"], row["low"], row["high"]),
    "density": "density",
    "difference to dense [95 %]": format_difference,
    "same words as dense": partial(_format_fraction, "same", "pairs"),
    "found outside the window": partial(_format_fraction, "outside_correct", "outside_n"),
    "seconds per prompt (median)": "seconds",
}
