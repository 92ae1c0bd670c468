"""The steps of a quick check in order, and estimates of their time from measured steps.

All functions are pure functions of the measured rows, so that a run continues after an
interruption.
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
    chosen_threshold,
    longest_kl,
    next_threshold,
    points_of,
)

Row = Mapping[str, Any]

PROBE, KERNELS, TTFT, KL = "probe", "kernels", "ttft", "kl"
RECALL, BORDER = "recall", "recall_border"
# fields of a row that identify its step
KEY = ("measure", "length", "method", "threshold", "index")
PROBE_TOKENS = 512  # tokens of the shortest probe; the next probes have 4, 16, ... times as many
PROBE_SECONDS = 0.5  # probes grow until they take this long: shorter probes predict times badly
MARGIN = 1.2  # factor on estimates for a length that was not measured yet
# before FULL was measured, its estimate is the larger one of two products
FULL_OVER_CAB = 1.5  # factor on the time of CAB
FULL_OVER_DENSE = 1.3  # factor on the time of dense attention
MOST_SLOWDOWN = 3.0  # largest factor on estimates while other processes slow the machine down
REPORT_SECONDS = 4.0  # time for writing figure and report


@dataclass(frozen=True)
class Step:
    """One measurement; its fields are the key of its row.

    Attributes:
        measure: one of PROBE, KERNELS, TTFT, KL, RECALL and BORDER.
        length: tokens of the prompt or document.
        method: DENSE, CAB, or FULL (CAB with every block). A step of TTFT times CAB and the dense
            kernel in turn.
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
    """The amount of measurements.

    Attributes:
        lengths: tokens of the prompts, ascending.
        threshold: ``mass_threshold`` to start from.
        kl: the KL that the user accepts, in nats per token.
        documents: number of documents per length.
        kernels: number of dense kernels to compare.
    """

    lengths: Sequence[int]
    threshold: float
    kl: float
    documents: int = 1
    kernels: int = 1


class Cost(NamedTuple):
    """The size of a model, from which the growth of its time with the prompt length follows.

    Attributes:
        parameters: number of weights that multiply each token.
        attention: layers * query heads * head dim.
    """

    parameters: float
    attention: float

    def work(self, length: int) -> float:
        """Return half the operations of a dense pass: ``length * (weights + attention)``."""
        return length * (self.parameters + self.attention * length)


def step_of(row: Row) -> Step:
    """Return the step that measured ``row``."""
    return Step(**{name: row[name] for name in KEY})


def schedule(scope: Scope, rows: Sequence[Row], skipped: Collection[Step] = ()) -> Iterator[Step]:
    """Yield the steps of a run, the most important first.

    The first part searches a threshold at the longest length with a KL. The second part measures
    the threshold that the search has chosen. The iteration ends where later steps depend on results
    that are still missing.

    Args:
        scope: the amount of measurements.
        rows: rows of measured steps, which are yielded too.
        skipped: steps that were not measured for lack of time, which are yielded too.
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
    points = points_of(rows, longest, start)
    next_point = next_threshold(points, scope.kl)
    if next_point is not None:
        steps = [
            Step(measure=KL, length=longest, threshold=next_point, index=index)
            for index in documents
        ]
        yield from steps
        if not any(step in skipped for step in steps):
            # the next threshold depends on the results of these steps
            return
    for length in reversed(scope.lengths):
        yield Step(KL, length, FULL)
    advised = chosen_threshold(points, scope.kl)
    for threshold in dict.fromkeys((advised, start)):
        for length in reversed(scope.lengths):
            yield Step(TTFT, length, CAB, threshold)
        for length, index in ((x, i) for x in reversed(scope.lengths) for i in documents):
            for measure in (RECALL, BORDER):
                yield Step(measure=measure, length=length, method=DENSE, index=index)
                yield Step(measure=measure, length=length, threshold=threshold, index=index)
            yield Step(measure=KL, length=length, threshold=threshold, index=index)


def _probes(scope: Scope, rows: Sequence[Row]) -> Iterator[Step]:
    """Yield passes over short prompts, each 4 times as long as the one before.

    The passes predict the time of longer prompts. They end with the first that takes
    `PROBE_SECONDS`, or with the longest that is shorter than all prompts.
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
    done = {*map(step_of, rows), *skipped}
    return next((step for step in schedule(scope, rows, skipped) if step not in done), None)


def slowdown(ratios: Sequence[float]) -> float:
    """Return the factor on the next estimates, from 1 to `MOST_SLOWDOWN`.

    The factor is the largest ratio of the last two steps, because other processes may slow the
    machine down for a while.

    Args:
        ratios: measured time divided by the estimate, for each measured step.
    """
    return min(max([1.0, *ratios[-2:]]), MOST_SLOWDOWN)


def passes_of(step: Step, runs: int, warm_ups: int, kernels: int, is_cached: bool) -> Row:
    """Return method -> number of forward passes of a step.

    Args:
        step: the step.
        runs: timed runs of a method.
        warm_ups: runs before the timed runs of a method.
        kernels: number of dense kernels that a step of KERNELS compares.
        is_cached: True if the dense predictions of the document are in memory.
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
    """Return the estimated seconds of one forward pass; None without a measured pass.

    The estimate is the slowest pass at the nearest measured length, scaled by the operations of a
    dense pass, and by `MARGIN` if the lengths differ.
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

    Returns None if a method of the step was not measured at any length.

    Args:
        step: the step.
        rows: measured rows.
        passes: method -> number of passes, from `passes_of`.
        cost: size of the model.
    """
    seconds = {method: pass_seconds(rows, method, step.length, cost) for method in passes}
    if None in seconds.values():
        return None
    return sum(count * seconds[method] for method, count in passes.items())


def fits(seconds: float | None, elapsed: float, minutes: float) -> bool:
    """Return True if a step of ``seconds`` ends within the time limit.

    Args:
        seconds: estimated time; None without an estimate, which counts as fitting.
        elapsed: seconds since the start of the command.
        minutes: time limit of the command.
    """
    return seconds is None or elapsed + seconds + REPORT_SECONDS <= 60 * minutes


def reason(seconds: float, elapsed: float, minutes: float) -> str:
    """Return the reason for skipping a step, for the report; arguments as in `fits`."""
    left = max(0.0, 60 * minutes - elapsed - REPORT_SECONDS)
    return f"needs about {seconds:.0f} s, and {left:.0f} s were left"
