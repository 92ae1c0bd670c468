"""Find out whether CAB pays for a model, on this device and for texts of your own.

The command loads the model once, measures what fits into the given minutes, and writes a report, a
figure and settings to a folder. Each measurement is a line of ``rows.jsonl``, so the same command
continues an interrupted run.
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

from cab_hf.config import CAB, CabConfig
from cab_hf.data.documents import count_tokens
from cab_hf.data.needles import split_sentences
from cab_hf.eval.experiment import PROG
from cab_hf.eval.haystack import read_text
from cab_hf.eval.on_model import OnModelSettings, refuse_not_finite, refusing
from cab_hf.eval.quickcheck import advice, budget, report
from cab_hf.eval.quickcheck.budget import Scope, Step, next_step
from cab_hf.eval.quickcheck.measure import Measurements, cost_of, unsupported
from cab_hf.experiment.log import Log, write_atomically, writing
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
# modules of Python whose source follows the reference pages: together they have 200,000 tokens
SOURCES = ("argparse", "doctest", "inspect", "pickle", "subprocess", "tarfile", "turtle", "typing")
GPU_LENGTHS, CPU_LENGTHS = (8192, 32768, 131072), (1024, 4096)
ROWS, REPORT, FIGURE, CONFIG = "rows.jsonl", "report.md", "figure.png", "cab_config.json"
# settings that may differ between runs that continue each other
GROWS = ("lengths", "minutes", "kl", "documents", "out")


@dataclass(frozen=True)
class Settings(OnModelSettings):
    """Settings of a quick check."""

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
        enough = self.lengths and self.lengths[0] >= least
        require(self, "lengths", enough, f"at least {least} tokens each, 4 query blocks")
        require(self, "texts", self.texts, f"UTF-8 files or {BUILT_IN}")
        chooses = self.cab_config.predictor in CAB
        known = " or ".join(CAB)
        require(self, "cab", chooses, f"a predictor with a mass_threshold ({known})")
        searched = self.cab_config.mass_threshold > 0
        require(self, "cab", searched, "a mass_threshold greater than 0, where the search starts")
        _ = self.sentences  # raises an error for a file that is no text

    @property
    def cab_fields(self) -> dict[str, Any]:
        """The fields of `CabConfig` in ``--cab``; on a CPU too, the others have their defaults."""
        return dict(map(parse_assignment, self.cab))

    @cached_property
    def cab_config(self) -> CabConfig:
        """The settings to start from: ``--cab`` over the defaults."""
        return CabConfig.from_dict(self.cab_fields)

    @cached_property
    def sentences(self) -> list[str]:
        """The sentences of all texts."""
        parts = []
        for name in self.texts:
            texts = _built_in() if name == BUILT_IN else [read_text("texts", name)]
            parts += [each for text in texts for each in split_sentences(text)]
        return parts

    @property
    def text_sha256(self) -> str:
        return hashlib.sha256("\n".join(self.sentences).encode()).hexdigest()

    def recorded(self) -> dict[str, Any]:
        """Return the settings as results show them, without folders."""
        given = asdict(self)
        given["texts"] = [Path(name).name for name in self.texts]
        given["model"] = Path(self.model).name if Path(self.model).exists() else self.model
        return {**given, "text_sha256": self.text_sha256, "cab_config": self.cab_config.to_dict()}


def _built_in() -> list[str]:
    """Return texts that every installation of Python contains."""
    sources = (Path(importlib.util.find_spec(name).origin).read_text("utf-8") for name in SOURCES)
    return [built_in_text(), *sources]


def main(words: Sequence[str]) -> int:
    """Measure, write the results and print the table and the advice; return the exit status."""
    started = time.perf_counter()
    settings = read_settings(Settings, words, f"{PROG} quickcheck", __doc__.partition("\n")[0])
    run(settings, started)
    return 0


def run(settings: Settings, started: float) -> list[dict[str, Any]]:
    """Measure what fits into the given minutes after ``started``; return the rows.

    Raises:
        UsageError: the model, a length or a text cannot be used.
    """
    settings = within_positions(settings)
    # needed at the end: imported now, its time counts before the deadline
    importlib.import_module("matplotlib.figure")
    model, tokenizer = load_model(
        settings.model, settings.device, settings.dtype, settings.trust_remote_code
    )
    why = unsupported(model)
    if why is not None:
        raise UsageError(
            f"model must be a causal LM with attention that CAB can compute, got "
            f"{settings.model!r}, which has {why}. Give a decoder model."
        )
    refuse_not_finite(model)
    lengths, notes = fitting(settings, tokenizer)
    config = settings.cab_config
    measurements = Measurements(
        model=model,
        tokenizer=tokenizer,
        sentences=settings.sentences,
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
        # the commit of the code that measures, even if the tree changes meanwhile
        record = provenance(recorded, settings.device, log.started)
        skipped = _measure(measurements, scope, log, settings, started)
        rows = list(log.records)
    record["finished"] = utc_now()
    command = shlex.join([*PROG.split(), "quickcheck", *spelled(settings)])
    _write(
        settings,
        scope,
        rows=rows,
        notes=notes,
        skipped=skipped,
        made=record,
        command=command,
        model=model,
    )
    return rows


def within_positions(settings: Settings) -> Settings:
    """Return the settings with default lengths that fit the positions of the model.

    Raises:
        UsageError: lengths of the user exceed the positions.
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


def fitting(settings: Settings, tokenizer: Any) -> tuple[list[int], list[str]]:
    """Return the lengths that the texts fill, and a sentence about the other lengths.

    Raises:
        UsageError: the texts are shorter than each length.
    """
    tokens = count_tokens(tokenizer, settings.sentences, settings.lengths[-1])
    fit = [length for length in settings.lengths if length <= tokens]
    named = ", ".join(settings.texts)
    if not fit:
        raise UsageError(
            f"texts must have at least {settings.lengths[0]:,} tokens, the shortest of lengths, "
            f"got {tokens:,} in {named}. Give more texts or shorter lengths."
        )
    longer = [f"{length:,}" for length in settings.lengths if length > tokens]
    if not longer:
        return fit, []
    left_out = f"{' and '.join(longer)} tokens are left out"
    return fit, [f"The texts ({named}) have {tokens:,} tokens, so that {left_out}."]


def _measure(
    measurements: Measurements, scope: Scope, log: Log, settings: Settings, started: float
) -> dict[Step, str]:
    """Measure all steps that fit; return the skipped steps with their reasons."""
    cost, skipped, ratios = cost_of(measurements.model), {}, []
    deadline = started + 60 * settings.minutes - budget.REPORT_SECONDS
    if log.records:
        _say(f"{len(log.records)} measurements of an earlier run are used again")
    while (step := next_step(scope, log.records, skipped)) is not None:
        passes = budget.passes_of(
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
        shown = "" if seconds is None else f", about {seconds:.0f} s"
        _say(f"{elapsed:.0f} s: {step}{shown}")
        try:
            with refusing("model"):
                new_rows = measurements.measure(step, log.records, deadline)
        except (torch.cuda.OutOfMemoryError, RuntimeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            skipped[step] = str(error).strip().partition("\n")[0][:200]
            if measurements.is_cuda:
                torch.cuda.empty_cache()
            continue
        log.append({**step.fields, **new_rows})
        if seconds:
            took = time.perf_counter() - started - elapsed
            ratios.append(took * budget.slowdown(ratios) / seconds)
    return skipped


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _write(
    settings: Settings,
    scope: Scope,
    *,
    rows: Sequence[advice.Row],
    notes: Sequence[str],
    skipped: dict[Step, str],
    made: advice.Row,
    command: str,
    model: Any,
) -> None:
    """Write report, figure and config, and print the table and the advice."""
    out, config, target = Path(settings.out), settings.cab_config, settings.kl
    verdict = advice.verdict(rows, scope.threshold, target, config.query_block)
    shown = advice.summaries(rows, scope.threshold, verdict.threshold)
    sentence = advice.sentence(rows, verdict, shown, target, made["device"])
    tables = {
        "": report.table(rows, shown),
        "Density by layer": report.layers(rows, verdict.threshold),
    }
    named = [f"{step}: {why}" for step, why in skipped.items()]
    calibrated = advice.advised_config(config, verdict)
    origin = origin_of(model.config, verdict.longest or scope.lengths[-1])
    with writing(out):
        if shown:
            report.draw(out / FIGURE, rows, shown, verdict.threshold, target)
        replace(calibrated, origin=origin).save(out / CONFIG)
        text = report.report(sentence, tables, notes, named, made, command)
        write_atomically(out / REPORT, text)
    print("\n\n".join([tables[""], *notes, sentence]))
    if skipped:
        print(f"\n{len(skipped)} steps were skipped; {out / REPORT} lists them.")
    print(f"\nsettings: {out / CONFIG}\nreport: {out / REPORT}")


def spelled(settings: Settings) -> list[str]:
    """Return the words of a command line that repeats the run."""
    words = ["--model", settings.model]
    if settings.texts != (BUILT_IN,):
        words += ["--texts", ",".join(Path(name).name for name in settings.texts)]
    for assignment in settings.cab:
        words += ["--cab", assignment]
    words += ["--lengths", ",".join(map(str, settings.lengths))]
    for name in ("minutes", "kl", "documents", "runs", "seed"):
        words += [f"--{name}", f"{getattr(settings, name):g}"]
    return [*words, "--device", settings.device, "--dtype", settings.dtype]
