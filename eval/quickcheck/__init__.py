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
from cab_hf.eval.on_model import OnModelSettings, refuse_not_finite, refusing
from cab_hf.eval.quickcheck import advice, budget, report
from cab_hf.eval.quickcheck.budget import Scope, Step, next_step
from cab_hf.eval.quickcheck.measure import Measurements, Text, measure_cost, unsupported
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
from cab_hf.hf.fit import origin_of

BUILT_IN = "built-in"
# Python modules whose source code follows the reference pages in the built-in text; together they
# have about 200,000 tokens
SOURCES = ("argparse", "doctest", "inspect", "pickle", "subprocess", "tarfile", "turtle", "typing")
GPU_LENGTHS, CPU_LENGTHS = (8192, 32768, 131072), (1024, 2048)
ROWS, REPORT, FIGURE, CONFIG = "rows.jsonl", "report.md", "figure.png", "cab_config.json"
# settings that may differ between an interrupted run and the run that continues it
GROWS = ("lengths", "minutes", "kl", "documents", "out")


@dataclass(frozen=True)
class Settings(OnModelSettings):
    """Options of ``cab_hf.eval quickcheck``. None: a default that depends on the device."""

    texts: tuple[str, ...] = option(
        (BUILT_IN,),
        f"comma-separated UTF-8 files like your prompts; {BUILT_IN}: reference pages and source "
        "code of Python",
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
        for name in ("minutes", "documents", "runs"):
            require(self, name, getattr(self, name) > 0, "greater than 0")
        require(self, "kl", self.kl >= 0, "at least 0")
        least = 4 * self.cab_config.query_block
        is_valid = self.lengths and self.lengths[0] >= least
        require(self, "lengths", is_valid, f"at least {least} tokens each, 4 query blocks")
        require(self, "texts", self.texts, f"UTF-8 files or {BUILT_IN}")
        has_threshold = self.cab_config.predictor in CAB_PREDICTORS
        predictors = " or ".join(CAB_PREDICTORS)
        require(self, "cab", has_threshold, f"a predictor with a mass_threshold ({predictors})")
        is_positive = self.cab_config.mass_threshold > 0
        require(
            self, "cab", is_positive, "a mass_threshold greater than 0, where the search starts"
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
        text_sentences = []
        for name in self.texts:
            parts = _read_built_in() if name == BUILT_IN else [read_text("texts", name)]
            text_sentences.append([x for part in parts for x in split_sentences(part)])
        return text_sentences

    @property
    def text_sha256(self) -> str:
        """The SHA-256 of all sentences; a run continues only an earlier run with the same texts."""
        sentences = (sentence for text in self.text_sentences for sentence in text)
        return hashlib.sha256("\n".join(sentences).encode()).hexdigest()

    def recorded(self) -> dict[str, Any]:
        """Return the settings as results record them: files and the model without their folders."""
        recorded = asdict(self)
        recorded["texts"] = [Path(name).name for name in self.texts]
        recorded["model"] = Path(self.model).name if Path(self.model).exists() else self.model
        recorded["text_sha256"] = self.text_sha256
        recorded["cab_config"] = self.cab_config.to_dict()
        return recorded


def _read_built_in() -> list[str]:
    """Return Python's reference pages and the source code of `SOURCES`."""
    sources = (Path(importlib.util.find_spec(name).origin).read_text("utf-8") for name in SOURCES)
    return [built_in_text(), *sources]


def main(words: Sequence[str]) -> int:
    """Run the command with the options ``words``; return the exit status."""
    started = time.perf_counter()
    settings = read_settings(Settings, words, f"{PROG} quickcheck", __doc__.partition("\n")[0])
    run(settings, started)
    return 0


def run(settings: Settings, started: float) -> list[dict[str, Any]]:
    """Measure within the time limit, write the results, print the advice, and return the rows.

    Args:
        settings: settings of the run.
        started: `time.perf_counter` when the command started; the limit counts from this time.

    Raises:
        UsageError: the model, a length or a text cannot be used.
    """
    settings = limit_lengths(settings)
    # import matplotlib before the measurements: the import for the figure takes seconds, which
    # would exceed the time limit at the end of the run
    importlib.import_module("matplotlib.figure")
    model, tokenizer = _load_model(settings)
    texts = [
        Text(sentences, count_tokens(tokenizer, sentences, settings.lengths[-1]))
        for sentences in settings.text_sentences
    ]
    lengths, notes = select_fitting_lengths(settings, texts)
    config = settings.cab_config
    measurements = Measurements(
        model=model,
        tokenizer=tokenizer,
        texts=texts,
        config=config,
        seed=settings.seed,
        runs=settings.runs,
    )
    scope = Scope(
        lengths=lengths,
        threshold=config.mass_threshold,
        kl=settings.kl,
        documents=settings.documents,
        kernels=len(measurements.kernels),
    )
    out = Path(settings.out)
    recorded = settings.recorded()
    identity = {name: value for name, value in recorded.items() if name not in GROWS}
    identity = {"experiment": "quickcheck", **identity, "device": device_name(settings.device)}
    with Log(out / ROWS, identity, key=budget.KEY) as log:
        # read the provenance before the measurements: its commit is then that of the running code
        record = provenance(recorded, settings.device, log.started)
        skipped = _measure(
            measurements=measurements, scope=scope, log=log, settings=settings, started=started
        )
        rows = list(log.records)
    record["finished"] = utc_now()
    command = shlex.join([*PROG.split(), "quickcheck", *spell_options(settings)])
    _write(
        settings,
        scope,
        rows=rows,
        notes=notes,
        skipped=skipped,
        provenance_record=record,
        command=command,
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
    reason = unsupported(model)
    if reason is not None:
        raise UsageError(
            f"model must be a causal LM with attention that CAB can compute, got "
            f"{settings.model!r}, which has {reason}. Give a decoder model."
        )
    refuse_not_finite(model)
    return model, tokenizer


def limit_lengths(settings: Settings) -> Settings:
    """Remove lengths that exceed the number of positions of the model from the default lengths.

    Only `GPU_LENGTHS`, the default lengths on a GPU, are shortened. If all of `GPU_LENGTHS` are too
    long, the number of positions of the model is the only length.

    Raises:
        UsageError: a length exceeds the number of positions, and the lengths are not `GPU_LENGTHS`.
    """
    most = max_prompt_tokens(load_config(settings.model, settings.trust_remote_code))
    if most is None or settings.lengths[-1] <= most:
        return settings
    if settings.lengths == GPU_LENGTHS:
        return replace(settings, lengths=tuple(x for x in GPU_LENGTHS if x <= most) or (most,))
    raise UsageError(
        f"lengths must be at most {most}, the positions of model {settings.model!r}, got "
        f"{settings.lengths[-1]}. Give shorter lengths."
    )


def select_fitting_lengths(
    settings: Settings, texts: Sequence[Text]
) -> tuple[list[int], list[str]]:
    """Return the lengths up to the number of tokens of the longest text.

    Returns:
        The lengths, ascending; and a list with one sentence about the lengths that are left out,
        or an empty list.

    Raises:
        UsageError: all texts are shorter than the shortest length.
    """
    tokens = max(text.num_tokens for text in texts)
    lengths = [length for length in settings.lengths if length <= tokens]
    names = ", ".join(settings.texts)
    if not lengths:
        raise UsageError(
            f"texts must contain one text of at least {settings.lengths[0]:,} tokens, the shortest "
            f"of lengths, got at most {tokens:,} in {names}. Give longer texts or shorter lengths."
        )
    longer = [f"{length:,}" for length in settings.lengths if length > tokens]
    if not longer:
        return lengths, []
    left_out = f"{' and '.join(longer)} tokens are left out"
    return lengths, [f"The longest text ({names}) has {tokens:,} tokens, so that {left_out}."]


def _measure(
    measurements: Measurements, scope: Scope, log: Log, settings: Settings, started: float
) -> dict[Step, str]:
    """Measure all steps that fit into the time limit, and append their rows to ``log``.

    Args:
        measurements: the measurements on the model.
        scope: lengths, first threshold and numbers of repetitions, from which the steps follow.
        log: the log, with the rows of an interrupted run.
        settings: options of the command.
        started: `time.perf_counter` when the command started.

    Returns:
        Step -> reason, for each step that was not measured.
    """
    cost, skipped = measure_cost(measurements.model), {}
    ratios = []  # measured time divided by the estimate, for each measured step
    deadline = started + 60 * settings.minutes - budget.REPORT_SECONDS
    if log.records:
        _print_progress(f"{len(log.records)} measurements of an earlier run are used again")
    while (step := next_step(scope, log.records, skipped)) is not None:
        passes = budget.count_passes(
            step,
            runs=settings.runs,
            warm_ups=measurements.warm_ups,
            kernels=len(measurements.compared(log.records, step.length)),
            is_cached=(step.length, step.index) in measurements.dense_cache,
        )
        elapsed = time.perf_counter() - started
        seconds = budget.estimate(step, log.records, passes, cost)
        if seconds is not None:
            seconds *= budget.slowdown(ratios)
        if not budget.fits(seconds, elapsed, settings.minutes):
            skipped[step] = budget.reason(seconds, elapsed, settings.minutes)
            continue
        expected = "" if seconds is None else f", about {seconds:.0f} s"
        _print_progress(f"{elapsed:.0f} s: {step}{expected}")
        try:
            with refusing("model"):
                result = measurements.measure(step, log.records, deadline)
        except (torch.cuda.OutOfMemoryError, RuntimeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            skipped[step] = str(error).strip().partition("\n")[0][:200]
            if measurements.is_cuda:
                torch.cuda.empty_cache()
            continue
        log.append({**step.fields, **result})
        if seconds:
            took = time.perf_counter() - started - elapsed
            ratios.append(took * budget.slowdown(ratios) / seconds)
    return skipped


def _print_progress(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _write(
    settings: Settings,
    scope: Scope,
    *,
    rows: Sequence[advice.Row],
    notes: Sequence[str],
    skipped: dict[Step, str],
    provenance_record: advice.Row,
    command: str,
    model: Any,
) -> None:
    """Write report, figure and config, and print the table and the advice.

    Args:
        settings: options of the command.
        scope: lengths and first threshold of the run.
        rows: all measured rows.
        notes: sentences about lengths that were left out.
        skipped: step -> reason, for each step that was not measured.
        provenance_record: provenance of the run.
        command: the command line that repeats the run.
        model: the model. The written config records it in the field ``origin``.
    """
    out, config, target = Path(settings.out), settings.cab_config, settings.kl
    verdict = advice.verdict(rows, scope.threshold, target, config.query_block)
    summaries = advice.summaries(rows, scope.threshold, verdict.threshold)
    sentence = advice.sentence(
        rows=rows,
        conclusions=verdict,
        table=summaries,
        target=target,
        device=provenance_record["device"],
    )
    tables = {
        "": report.table(rows, summaries),
        "Density by layer": report.layers(rows, verdict.threshold),
    }
    calibrated = advice.make_advised_config(config, verdict)
    origin = origin_of(model.config, verdict.longest or scope.lengths[-1])
    with convert_write_errors(out):
        if summaries:
            report.draw(
                path=out / FIGURE,
                rows=rows,
                summaries=summaries,
                threshold=verdict.threshold,
                target=target,
            )
        replace(calibrated, origin=origin).save(out / CONFIG)
        text = report.report(
            advice=sentence,
            tables=tables,
            notes=notes,
            skipped=[f"{step}: {reason}" for step, reason in skipped.items()],
            provenance=provenance_record,
            command=command,
        )
        write_atomically(out / REPORT, text)
    print("\n\n".join([tables[""], *notes, sentence]))
    if skipped:
        print(f"\n{len(skipped)} steps were skipped; {out / REPORT} lists them.")
    print(f"\nsettings: {out / CONFIG}\nreport: {out / REPORT}")


def spell_options(settings: Settings) -> list[str]:
    """Return the options of a command line that repeats the run, without folders."""
    options = ["--model", settings.model]
    if settings.texts != (BUILT_IN,):
        options += ["--texts", ",".join(Path(name).name for name in settings.texts)]
    for assignment in settings.cab:
        options += ["--cab", assignment]
    options += ["--lengths", ",".join(map(str, settings.lengths))]
    for name in ("minutes", "kl", "documents", "runs", "seed"):
        options += [f"--{name}", f"{getattr(settings, name):g}"]
    return [*options, "--device", settings.device, "--dtype", settings.dtype]
