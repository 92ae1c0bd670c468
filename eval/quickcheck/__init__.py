"""Find out whether CAB pays for a model, on this device and for texts of your own.

The command loads the model once, takes the measurements that fit into ``--minutes``, and writes a
report, a figure and an advised config to a folder. Each measurement is a line of ``rows.jsonl``, so
that the same command continues an interrupted run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from cab_hf.config import CAB_PREDICTORS, CabConfig
from cab_hf.data.documents import count_tokens
from cab_hf.data.needles import split_sentences
from cab_hf.eval.experiment import PROG
from cab_hf.eval.haystack import read_text
from cab_hf.eval.on_model import OnModelSettings, convert_value_errors, refuse_non_finite_logits
from cab_hf.eval.quickcheck import advice, budget, report
from cab_hf.eval.quickcheck.budget import Scope, Step, find_next_step
from cab_hf.eval.quickcheck.measure import (
    Measurements,
    SourceText,
    find_unsupported_reason,
    measure_cost,
)
from cab_hf.experiment.log import Log, convert_write_errors, write_atomically
from cab_hf.experiment.models import load_config, load_model, max_prompt_tokens
from cab_hf.experiment.offline_models import built_in_text
from cab_hf.experiment.provenance import device_name, provenance, utc_now
from cab_hf.experiment.settings import (
    UsageError,
    by_device,
    comma_separated,
    option,
    parse_assignment,
    parse_length,
    read_settings,
    require,
)
from cab_hf.hf.fit import make_origin

BUILT_IN_TEXT_NAME = "built-in"
# Python modules whose source code follows the reference pages in the built-in text; together they
# have about 200,000 tokens
SOURCE_MODULES = (
    "argparse",
    "doctest",
    "inspect",
    "pickle",
    "subprocess",
    "tarfile",
    "turtle",
    "typing",
)
GPU_LENGTHS, CPU_LENGTHS = (8192, 32768, 131072), (1024, 2048)
ROWS_FILE = "rows.jsonl"
REPORT_FILE = "report.md"
FIGURE_FILE = "figure.png"
CONFIG_FILE = "cab_config.json"
# settings that may differ between an interrupted run and the run that continues it
EXTENSIBLE_SETTINGS = ("lengths", "minutes", "kl", "documents", "out")


@dataclass(frozen=True)
class Settings(OnModelSettings):
    """Options of ``cab_hf.eval quickcheck``. None: a default that depends on the device."""

    texts: tuple[str, ...] = option(
        (BUILT_IN_TEXT_NAME,),
        f"comma-separated UTF-8 files like your prompts; {BUILT_IN_TEXT_NAME}: reference pages and "
        "source code of Python",
        comma_separated(str),
    )
    lengths: tuple[int, ...] | None = by_device(
        GPU_LENGTHS, CPU_LENGTHS, "tokens of prompts", comma_separated(parse_length)
    )
    minutes: float = option(
        10.0, "minutes for everything, the loading of the model included", float
    )
    kl: float = option(
        0.02,
        "KL(dense || CAB) that you accept, in nats per token; 0: keep the mass_threshold of --cab",
        float,
    )
    documents: int | None = by_device(2, 1, "documents per length", int)
    runs: int | None = by_device(3, 2, "timed runs of a first token, per attention", int)
    out: str = option("quickcheck", "folder for rows, report, figure and cab_config.json")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "lengths", tuple(sorted(self.lengths)))
        for option_name in ("minutes", "documents", "runs"):
            require(self, option_name, getattr(self, option_name) > 0, "greater than 0")
        require(self, "kl", self.kl >= 0, "at least 0")
        min_length = 4 * self.cab_config.query_block
        are_lengths_valid = self.lengths and self.lengths[0] >= min_length
        require(
            self, "lengths", are_lengths_valid, f"at least {min_length} tokens each, 4 query blocks"
        )
        require(self, "texts", self.texts, f"UTF-8 files or {BUILT_IN_TEXT_NAME}")
        has_threshold = self.cab_config.predictor in CAB_PREDICTORS
        predictor_names = " or ".join(CAB_PREDICTORS)
        require(
            self, "cab", has_threshold, f"a predictor with a mass_threshold ({predictor_names})"
        )
        is_threshold_positive = self.cab_config.mass_threshold > 0
        require(
            self,
            "cab",
            is_threshold_positive,
            "a mass_threshold greater than 0, where the search starts",
        )
        _ = self.text_sentences  # raises an error if a file is not UTF-8 text

    @property
    def cab_fields(self) -> dict[str, Any]:
        """The fields of `CabConfig` in ``--cab``.

        Unlike in other evaluations, the defaults on a CPU are the same as on a GPU.
        """
        return dict(map(parse_assignment, self.cab))

    @cached_property
    def cab_config(self) -> CabConfig:
        """The first config to measure: the default config with the fields of ``--cab``.

        Its ``mass_threshold`` is the first threshold of the search.
        """
        return CabConfig.from_dict(self.cab_fields)

    @cached_property
    def text_sentences(self) -> list[list[str]]:
        """The sentences of each text."""
        sentences_by_text = []
        for text_name in self.texts:
            text_parts = (
                _read_built_in_texts()
                if text_name == BUILT_IN_TEXT_NAME
                else [read_text("texts", text_name)]
            )
            sentences_by_text.append(
                [sentence for text_part in text_parts for sentence in split_sentences(text_part)]
            )
        return sentences_by_text

    @property
    def text_sha256(self) -> str:
        """The SHA-256 of all sentences; a run continues only an earlier run with the same texts."""
        all_sentences = (sentence for text in self.text_sentences for sentence in text)
        return hashlib.sha256("\n".join(all_sentences).encode()).hexdigest()

    def recorded_settings(self) -> dict[str, Any]:
        """Return the settings as results record them: files and the model without their folders."""
        recorded_settings = asdict(self)
        recorded_settings["texts"] = [Path(text_name).name for text_name in self.texts]
        recorded_settings["model"] = (
            Path(self.model).name if Path(self.model).exists() else self.model
        )
        recorded_settings["text_sha256"] = self.text_sha256
        recorded_settings["cab_config"] = self.cab_config.to_dict()
        return recorded_settings


def _read_built_in_texts() -> list[str]:
    """Return Python's reference pages and the source code of `SOURCE_MODULES`."""
    source_codes = (
        Path(importlib.util.find_spec(module_name).origin).read_text("utf-8")
        for module_name in SOURCE_MODULES
    )
    return [built_in_text(), *source_codes]


def main(arguments: Sequence[str]) -> int:
    """Run the command with the options ``arguments``; return the exit status."""
    start_time = time.perf_counter()
    settings = read_settings(Settings, arguments, f"{PROG} quickcheck", __doc__.partition("\n")[0])
    run(settings, start_time)
    return 0


def run(settings: Settings, start_time: float) -> list[dict[str, Any]]:
    """Measure within the time limit, write the results, print the advice, and return the rows.

    Args:
        settings: settings of the run.
        start_time: `time.perf_counter` when the command started; the limit counts from this time.

    Raises:
        UsageError: the model, a length or a text cannot be used.
    """
    settings = limit_lengths(settings)
    # import matplotlib before the measurements: the import for the figure takes seconds, which
    # would exceed the time limit at the end of the run
    importlib.import_module("matplotlib.figure")
    model, tokenizer = _load_model(settings)
    texts = [
        SourceText(sentences, count_tokens(tokenizer, sentences, settings.lengths[-1]))
        for sentences in settings.text_sentences
    ]
    lengths, length_notes = select_fitting_lengths(settings, texts)
    config = settings.cab_config
    measurements = Measurements(
        model=model,
        tokenizer=tokenizer,
        texts=texts,
        config=config,
        seed=settings.seed,
        num_runs=settings.runs,
    )
    scope = Scope(
        lengths=lengths,
        start_threshold=config.mass_threshold,
        target_kl=settings.kl,
        num_documents=settings.documents,
        num_kernels=len(measurements.kernel_names),
    )
    out_folder = Path(settings.out)
    recorded_settings = settings.recorded_settings()
    identity = {
        field_name: field_value
        for field_name, field_value in recorded_settings.items()
        if field_name not in EXTENSIBLE_SETTINGS
    }
    identity = {"experiment": "quickcheck", **identity, "device": device_name(settings.device)}
    with Log(out_folder / ROWS_FILE, identity, key_fields=budget.STEP_FIELDS) as log:
        # read the provenance before the measurements: its commit is then that of the running code
        provenance_record = provenance(recorded_settings, settings.device, log.started)
        skip_reasons = _measure_steps(
            measurements=measurements,
            scope=scope,
            log=log,
            settings=settings,
            start_time=start_time,
        )
        rows = list(log.records)
    provenance_record["finished"] = utc_now()
    command_line = shlex.join([*PROG.split(), "quickcheck", *format_command_options(settings)])
    _write_results(
        settings,
        scope,
        rows=rows,
        length_notes=length_notes,
        skip_reasons=skip_reasons,
        provenance_record=provenance_record,
        command_line=command_line,
        model=model,
    )
    return rows


def _load_model(settings: Settings) -> tuple[Any, Any]:
    """Load the model, check that CAB can compute its attention, and return (model, tokenizer).

    Raises:
        UsageError: no layer of the model can attend sparsely.
    """
    model, tokenizer = load_model(
        settings.model, settings.device, settings.dtype, settings.trust_remote_code
    )
    unsupported_reason = find_unsupported_reason(model)
    if unsupported_reason is not None:
        raise UsageError(
            f"model must be a causal LM with attention that CAB can compute, got "
            f"{settings.model!r}, which has {unsupported_reason}. Give a decoder model."
        )
    refuse_non_finite_logits(model)
    return model, tokenizer


def limit_lengths(settings: Settings) -> Settings:
    """Remove lengths that exceed the number of positions of the model from the default lengths.

    Only `GPU_LENGTHS`, the default lengths on a GPU, are shortened. If all of `GPU_LENGTHS` are too
    long, the number of positions of the model is the only length.

    Raises:
        UsageError: a length exceeds the number of positions, and the lengths are not `GPU_LENGTHS`.
    """
    max_tokens = max_prompt_tokens(load_config(settings.model, settings.trust_remote_code))
    if max_tokens is None or settings.lengths[-1] <= max_tokens:
        return settings
    if settings.lengths == GPU_LENGTHS:
        return replace(
            settings,
            lengths=tuple(length for length in GPU_LENGTHS if length <= max_tokens)
            or (max_tokens,),
        )
    raise UsageError(
        f"lengths must be at most {max_tokens}, the positions of model {settings.model!r}, got "
        f"{settings.lengths[-1]}. Give shorter lengths."
    )


def select_fitting_lengths(
    settings: Settings, texts: Sequence[SourceText]
) -> tuple[list[int], list[str]]:
    """Return the lengths up to the number of tokens of the longest text.

    Returns:
        The lengths, ascending; and a list with one sentence about the lengths that are left out,
        or an empty list.

    Raises:
        UsageError: all texts are shorter than the shortest length.
    """
    longest_text_tokens = max(text.num_tokens for text in texts)
    lengths = [length for length in settings.lengths if length <= longest_text_tokens]
    text_names = ", ".join(settings.texts)
    if not lengths:
        raise UsageError(
            f"texts must contain one text of at least {settings.lengths[0]:,} tokens, the shortest "
            f"of lengths, got at most {longest_text_tokens:,} in {text_names}. Give longer texts "
            "or shorter lengths."
        )
    too_long_lengths = [
        f"{length:,}" for length in settings.lengths if length > longest_text_tokens
    ]
    if not too_long_lengths:
        return lengths, []
    left_out_phrase = f"{' and '.join(too_long_lengths)} tokens are left out"
    return lengths, [
        f"The longest text ({text_names}) has {longest_text_tokens:,} tokens, so that "
        f"{left_out_phrase}."
    ]


def _measure_steps(
    measurements: Measurements, scope: Scope, log: Log, settings: Settings, start_time: float
) -> dict[Step, str]:
    """Measure all steps that fit into the time limit, and append their rows to ``log``.

    Args:
        measurements: the measurements on the model.
        scope: lengths, first threshold and numbers of repetitions, from which the steps follow.
        log: the log, with the rows of an interrupted run.
        settings: options of the command.
        start_time: `time.perf_counter` when the command started.

    Returns:
        Step -> reason, for each step that was not measured.
    """
    model_cost, skip_reasons = measure_cost(measurements.model), {}
    time_ratios = []  # measured time divided by the estimate, for each measured step
    deadline = start_time + 60 * settings.minutes - budget.REPORT_SECONDS
    if log.records:
        _print_progress(f"{len(log.records)} measurements of an earlier run are used again")
    while (step := find_next_step(scope, log.records, skip_reasons)) is not None:
        num_passes_by_method = budget.count_passes(
            step,
            num_runs=settings.runs,
            num_warm_ups=measurements.num_warm_ups,
            num_kernels=len(measurements.list_compared_kernels(log.records, step.length)),
            is_dense_cached=(step.length, step.index) in measurements.dense_log_prob_cache,
        )
        elapsed_s = time.perf_counter() - start_time
        estimated_s = budget.estimate_step_seconds(
            step, log.records, num_passes_by_method, model_cost
        )
        if estimated_s is not None:
            estimated_s *= budget.compute_slowdown(time_ratios)
        if not budget.fits_time_limit(estimated_s, elapsed_s, settings.minutes):
            skip_reasons[step] = budget.describe_missing_time(
                estimated_s, elapsed_s, settings.minutes
            )
            continue
        estimate_phrase = "" if estimated_s is None else f", about {estimated_s:.0f} s"
        _print_progress(f"{elapsed_s:.0f} s: {step}{estimate_phrase}")
        try:
            with convert_value_errors("model"):
                result_fields = measurements.measure_step(step, log.records, deadline)
        except (torch.cuda.OutOfMemoryError, RuntimeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            skip_reasons[step] = str(error).strip().partition("\n")[0][:200]
            if measurements.is_cuda:
                torch.cuda.empty_cache()
            continue
        log.append({**step.row_fields, **result_fields})
        if estimated_s:
            measured_s = time.perf_counter() - start_time - elapsed_s
            time_ratios.append(measured_s * budget.compute_slowdown(time_ratios) / estimated_s)
    return skip_reasons


def _print_progress(progress_sentence: str) -> None:
    print(progress_sentence, file=sys.stderr, flush=True)


def _write_results(
    settings: Settings,
    scope: Scope,
    *,
    rows: Sequence[advice.Row],
    length_notes: Sequence[str],
    skip_reasons: dict[Step, str],
    provenance_record: advice.Row,
    command_line: str,
    model: Any,
) -> None:
    """Write report, figure and config, and print the table and the advice.

    Args:
        settings: options of the command.
        scope: lengths and first threshold of the run.
        rows: all measured rows.
        length_notes: sentences about lengths that were left out.
        skip_reasons: step -> reason, for each step that was not measured.
        provenance_record: provenance of the run.
        command_line: the command line that repeats the run.
        model: the model. The written config records it in the field ``origin``.
    """
    out_folder, config, target_kl = Path(settings.out), settings.cab_config, settings.kl
    verdict = advice.draw_conclusions(rows, scope.start_threshold, target_kl, config.query_block)
    summaries = advice.list_summaries(rows, scope.start_threshold, verdict.threshold)
    advice_sentence = advice.write_advice(
        rows=rows,
        conclusions=verdict,
        summaries=summaries,
        target_kl=target_kl,
        device_name=provenance_record["device"],
    )
    tables = {
        "": report.format_table(rows, summaries),
        "Density by layer": report.format_layer_table(rows, verdict.threshold),
    }
    advised_config = advice.make_advised_config(config, verdict)
    origin = make_origin(model.config, verdict.longest_timed_length or scope.lengths[-1])
    with convert_write_errors(out_folder):
        if summaries:
            report.draw_figure(
                path=out_folder / FIGURE_FILE,
                rows=rows,
                summaries=summaries,
                threshold=verdict.threshold,
                target_kl=target_kl,
            )
        replace(advised_config, origin=origin).save(out_folder / CONFIG_FILE)
        report_text = report.format_report(
            advice_sentence=advice_sentence,
            tables=tables,
            length_notes=length_notes,
            skipped_lines=[f"{step}: {skip_reason}" for step, skip_reason in skip_reasons.items()],
            provenance=provenance_record,
            command_line=command_line,
        )
        write_atomically(out_folder / REPORT_FILE, report_text)
    print("\n\n".join([tables[""], *length_notes, advice_sentence]))
    if skip_reasons:
        print(f"\n{len(skip_reasons)} steps were skipped; {out_folder / REPORT_FILE} lists them.")
    print(f"\nsettings: {out_folder / CONFIG_FILE}\nreport: {out_folder / REPORT_FILE}")


def format_command_options(settings: Settings) -> list[str]:
    """Return the options of a command line that repeats the run, without folders."""
    command_options = ["--model", settings.model]
    if settings.texts != (BUILT_IN_TEXT_NAME,):
        command_options += [
            "--texts",
            ",".join(Path(text_name).name for text_name in settings.texts),
        ]
    for assignment in settings.cab:
        command_options += ["--cab", assignment]
    command_options += ["--lengths", ",".join(map(str, settings.lengths))]
    for option_name in ("minutes", "kl", "documents", "runs", "seed"):
        command_options += [f"--{option_name}", f"{getattr(settings, option_name):g}"]
    return [*command_options, "--device", settings.device, "--dtype", settings.dtype]
