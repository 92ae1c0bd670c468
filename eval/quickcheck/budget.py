"""The steps of a quick check in order, and estimates of their time from measured steps.

All functions depend only on their arguments, which include the measured rows. An interrupted run
can therefore continue from the logged rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from typing import Any, NamedTuple

from cab_hf.eval.quickcheck.advice import (
    CAB,
    DENSE,
    FULL,
    choose_threshold,
    list_points,
    longest_kl,
    next_threshold,
)

Row = Mapping[str, Any]

PROBE, KERNELS, TTFT, KL = "probe", "kernels", "ttft", "kl"
RECALL, BORDER = "recall", "recall_border"
# fields of a row that identify its step: the fields of `Step`
KEY = ("measure", "length", "method", "threshold", "index")
PROBE_TOKENS = 512  # tokens of the first probe, a short timed pass; later probes have 4 times more
PROBE_SECONDS = 0.5  # a probe that takes longer is the last; shorter passes predict times badly
MARGIN = 1.2  # factor on times that are estimated from another length
# The estimate for FULL, before FULL was measured, is the larger of two products:
FULL_OVER_CAB = 1.5  # factor on the time of CAB
FULL_OVER_DENSE = 1.3  # factor on the time of dense attention
MOST_SLOWDOWN = 3.0  # largest factor on all estimates if recent steps took longer than estimated
REPORT_SECONDS = 4.0  # time for writing figure and report


@dataclass(frozen=True)
class Step:
    """One measurement; its fields identify its row in the log.

    Attributes:
        measure: the kind of measurement. PROBE times a pass over a short prompt, KERNELS compares
            dense kernels, TTFT times the first token. KL compares the predicted distributions with
            those of dense attention. RECALL and BORDER count right answers.
        length: tokens of the prompt or document.
        method: DENSE, CAB, or FULL (CAB with every block selected). A step of TTFT has the method
            CAB and times both CAB and dense attention.
        threshold: ``mass_threshold`` of CAB; None for other methods.
        index: number of the document.
    """

    measure: str
    length: int
    method: str = CAB
    threshold: float | None = None
    index: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the step as the beginning of its row."""
        return asdict(self)

    def __str__(self) -> str:
        threshold = "" if self.threshold is None else f", mass_threshold={self.threshold:g}"
        measured = f"{self.measure} of {self.method} at {self.length:,} tokens{threshold}"
        return f"{measured}, text {self.index}"


class Scope(NamedTuple):
    """The parameters from which the steps of a run follow.

    Attributes:
        lengths: tokens of the prompts, ascending.
        threshold: the first ``mass_threshold`` of the search.
        kl: the KL that the user accepts, in nats per token; 0 for no search.
        documents: number of documents per length.
        kernels: number of dense kernels to compare.
    """

    lengths: Sequence[int]
    threshold: float
    kl: float
    documents: int = 1
    kernels: int = 1


class Cost(NamedTuple):
    """The size of a model, from which times at one prompt length are scaled to another length.

    Attributes:
        parameters: number of weights with which each token is multiplied.
        attention: number of layers * hidden size, the cost of attention per token and key.
    """

    parameters: float
    attention: float

    def work(self, length: int) -> float:
        """Return a number proportional to the operations of a dense pass over ``length`` tokens."""
        return length * (self.parameters + self.attention * length)


def make_step(row: Row) -> Step:
    """Return the step that measured ``row``."""
    return Step(**{name: row[name] for name in KEY})


def schedule(scope: Scope, rows: Sequence[Row], skipped: Collection[Step] = ()) -> Iterator[Step]:
    """Yield the steps of a run, the most important first.

    The first part searches a threshold at the longest length at which the KL of the first threshold
    was measured. The second part measures the threshold that the search has chosen. The iteration
    ends before steps that depend on results that are still missing.

    Args:
        scope: the parameters of the run.
        rows: rows of all measured steps. Steps with a row are yielded too.
        skipped: steps that were not measured, for lack of time or because of an error. These steps
            are yielded too.
    """
    yield from _probes(scope, rows)
    start, documents = scope.threshold, range(scope.documents)
    for length in scope.lengths:
        if scope.kernels > 1:
            yield Step(KERNELS, length, DENSE)
        yield Step(TTFT, length, CAB, start)
    for length in scope.lengths:
        for index in documents:
            yield Step(measure=KL, length=length, threshold=start, index=index)
    longest = longest_kl(rows, start)
    if longest is None:
        return
    points = list_points(rows, longest, start)
    next_point = next_threshold(points, scope.kl)
    if next_point is not None:
        steps = [
            Step(measure=KL, length=longest, threshold=next_point, index=index)
            for index in documents
        ]
        yield from steps
        if not any(step in skipped for step in steps):
            # wait for the results of these steps: the next threshold depends on them
            return
    for length in reversed(scope.lengths):
        yield Step(KL, length, FULL)
    advised = choose_threshold(points, scope.kl)
    for threshold in dict.fromkeys((advised, start)):
        for length in reversed(scope.lengths):
            yield Step(TTFT, length, CAB, threshold)
        for length, index in ((x, i) for x in reversed(scope.lengths) for i in documents):
            for measure in (RECALL, BORDER):
                yield Step(measure=measure, length=length, method=DENSE, index=index)
                yield Step(measure=measure, length=length, threshold=threshold, index=index)
            yield Step(measure=KL, length=length, threshold=threshold, index=index)


def _probes(scope: Scope, rows: Sequence[Row]) -> Iterator[Step]:
    """Yield passes over short prompts, from whose times those of longer prompts are estimated.

    Each prompt is 4 times as long as the prompt before. The last prompt takes `PROBE_SECONDS` or
    longer, or a prompt 4 times as long would be longer than the shortest of ``scope.lengths``.
    """
    length = min(PROBE_TOKENS, scope.lengths[0])
    while True:
        for method in (DENSE, CAB):
            yield Step(PROBE, length, method, scope.threshold if method == CAB else None)
        probes = [row for row in rows if (row["measure"], row["length"]) == (PROBE, length)]
        seconds = [s for row in probes for s in row["pass_seconds"].values()]
        if len(seconds) < 2 or max(seconds) > PROBE_SECONDS or 4 * length > scope.lengths[0]:
            return
        length *= 4


def next_step(scope: Scope, rows: Sequence[Row], skipped: Collection[Step] = ()) -> Step | None:
    """Return the first step that is neither measured nor skipped; None if no step is left."""
    done = {*map(make_step, rows), *skipped}
    return next((step for step in schedule(scope, rows, skipped) if step not in done), None)


def slowdown(ratios: Sequence[float]) -> float:
    """Return the factor by which the next estimates are multiplied, from 1 to `MOST_SLOWDOWN`.

    The factor is the larger ratio of the last two steps, because other processes may slow the
    machine down for a while.

    Args:
        ratios: measured time divided by the estimate, for each measured step.
    """
    return min(max([1.0, *ratios[-2:]]), MOST_SLOWDOWN)


def count_passes(step: Step, runs: int, warm_ups: int, kernels: int, is_cached: bool) -> Row:
    """Return method -> number of its forward passes in a step, from which the time is estimated.

    Args:
        step: the step.
        runs: number of timed runs of each method in a step of TTFT.
        warm_ups: number of runs before the timed runs.
        kernels: number of dense kernels that a step of KERNELS compares.
        is_cached: True if a step of KL needs no dense pass, because the dense predictions for the
            document are in memory.
    """
    if step.measure == PROBE:
        return {step.method: 2}
    if step.measure == KERNELS:
        return {DENSE: 2 * kernels}
    if step.measure == TTFT:
        return {DENSE: runs + warm_ups, step.method: runs + warm_ups}
    if step.measure == KL and not is_cached:
        return {DENSE: 1, step.method: 1}
    return {step.method: 1}


def pass_seconds(rows: Sequence[Row], method: str, length: int, cost: Cost) -> float | None:
    """Return the estimated seconds of one forward pass; None if no pass of the method was measured.

    The estimate is the slowest pass at the measured length nearest to ``length``. If the lengths
    differ, it is scaled by the operations of dense passes at both lengths, and by `MARGIN`. Without
    a pass of FULL, the estimate for FULL follows from those for CAB and for dense attention.
    """
    measured = [
        (r["length"], r["pass_seconds"][method]) for r in rows if method in r["pass_seconds"]
    ]
    if not measured:
        if method != FULL:
            return None
        cab_seconds = pass_seconds(rows, CAB, length, cost)
        dense_seconds = pass_seconds(rows, DENSE, length, cost)
        if cab_seconds is None:
            return None
        return max(FULL_OVER_CAB * cab_seconds, FULL_OVER_DENSE * (dense_seconds or 0.0))
    nearest = min((tokens for tokens, _ in measured), key=lambda n: abs(log(n / length)))
    slowest = max(seconds for tokens, seconds in measured if tokens == nearest)
    if nearest == length:
        return slowest
    return MARGIN * slowest * cost.work(length) / cost.work(nearest)


def estimate(step: Step, rows: Sequence[Row], passes: Row, cost: Cost) -> float | None:
    """Return the estimated seconds of a step.

    Returns None if there is no measured pass of a method of the step.

    Args:
        step: the step.
        rows: measured rows.
        passes: method -> number of passes, from `count_passes`.
        cost: size of the model.
    """
    seconds = {method: pass_seconds(rows, method, step.length, cost) for method in passes}
    if None in seconds.values():
        return None
    return sum(count * seconds[method] for method, count in passes.items())


def fits(seconds: float | None, elapsed: float, minutes: float) -> bool:
    """Return True if a step can end within the time limit, before figure and report are written.

    Args:
        seconds: estimated time of the step; None without an estimate, for which the result is True.
        elapsed: seconds since the start of the command.
        minutes: time limit of the command.
    """
    return seconds is None or elapsed + seconds + REPORT_SECONDS <= 60 * minutes


def reason(seconds: float, elapsed: float, minutes: float) -> str:
    """Return the reason for skipping a step, for the report; arguments as in `fits`."""
    left = max(0.0, 60 * minutes - elapsed - REPORT_SECONDS)
    return f"needs about {seconds:.0f} s, and {left:.0f} s were left"
