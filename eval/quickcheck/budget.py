"""Steps of a quick check, and the estimate of their time from steps that were measured.

Everything here is a pure function of the measured rows, so that a run continues after a kill.
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
PROBE_TOKENS = 512  # the shortest probe; longer ones have 4, 16, ... times as many tokens
PROBE_SECONDS = 0.5  # a probe that takes longer predicts the time of longer prompts well
MARGIN = 1.2  # factor on estimates for a length that was not measured yet
# time of a pass with every block, before it was measured: the larger of these factors on CAB's time
# and on that of dense attention
FULL_OVER_CAB = 1.5
FULL_OVER_DENSE = 1.3
MOST_SLOWDOWN = 3.0  # largest factor on estimates while other processes slow the machine down
REPORT_SECONDS = 4.0  # figure and report


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
        return asdict(self)

    def __str__(self) -> str:
        at = "" if self.threshold is None else f", mass_threshold={self.threshold:g}"
        return f"{self.measure} of {self.method} at {self.length:,} tokens{at}, text {self.index}"


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
    """The size of a model, for the growth of its time with the length of a prompt.

    Attributes:
        parameters: weights that each token is multiplied with.
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
    """Yield all steps of which ``rows`` and ``skipped`` allow to decide, the most important first.

    The threshold is searched at the longest length with a KL. Later steps measure the threshold
    that the search has found. Steps in ``rows`` and ``skipped`` are yielded too.
    """
    yield from _probes(scope, rows)
    start, documents = scope.threshold, range(scope.documents)
    for length in scope.lengths:
        if scope.kernels > 1:
            yield Step(KERNELS, length, DENSE)
        yield Step(TTFT, length, CAB, start)
    for length in scope.lengths:
        for index in documents:
            yield Step(KL, length, CAB, start, index)
    longest = longest_kl(rows, start)
    if longest is None:
        return
    points = points_of(rows, longest, start)
    searched = next_threshold(points, scope.kl)
    if searched is not None:
        steps = [Step(KL, longest, CAB, searched, index) for index in documents]
        yield from steps
        if not any(step in skipped for step in steps):
            # the result of these steps decides
            return
    for length in reversed(scope.lengths):
        yield Step(KL, length, FULL)
    advised = chosen_threshold(points, scope.kl)
    for threshold in dict.fromkeys((advised, start)):
        for length in reversed(scope.lengths):
            yield Step(TTFT, length, CAB, threshold)
        for length, index in ((x, i) for x in reversed(scope.lengths) for i in documents):
            for measure in (RECALL, BORDER):
                yield Step(measure, length, DENSE, None, index)
                yield Step(measure, length, CAB, threshold, index)
            yield Step(KL, length, CAB, threshold, index)


def _probes(scope: Scope, rows: Sequence[Row]) -> Iterator[Step]:
    """Yield short passes that predict the time of longer ones, until they take long enough."""
    length = min(PROBE_TOKENS, scope.lengths[0])
    while True:
        for method in (DENSE, CAB):
            yield Step(PROBE, length, method, scope.threshold if method == CAB else None)
        took = [row for row in rows if (row["measure"], row["length"]) == (PROBE, length)]
        seconds = [s for row in took for s in row["pass_seconds"].values()]
        if len(seconds) < 2 or max(seconds) > PROBE_SECONDS or 4 * length > scope.lengths[0]:
            return
        length *= 4


def next_step(scope: Scope, rows: Sequence[Row], skipped: Collection[Step] = ()) -> Step | None:
    """Return the first step that is neither measured nor skipped; None at the end."""
    done = {*map(step_of, rows), *skipped}
    return next((step for step in schedule(scope, rows, skipped) if step not in done), None)


def slowdown(ratios: Sequence[float]) -> float:
    """Return the factor on estimates after steps with these ratios of actual to estimated time.

    Other processes can slow a machine down for a while, so the last two steps count.
    """
    return min(max(1.0, *ratios[-2:], 1.0), MOST_SLOWDOWN)


def passes_of(step: Step, runs: int, warm_ups: int, kernels: int, is_cached: bool) -> Row:
    """Return the number of passes of the model by method that a step needs.

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
    """Estimate the seconds of one pass; None without a measured pass of the method.

    The slowest pass of the nearest measured length is scaled with the operations of a dense pass,
    and by `MARGIN` if the length differs.
    """
    measured = [
        (r["length"], r["pass_seconds"][method]) for r in rows if method in r["pass_seconds"]
    ]
    if not measured:
        if method != FULL:
            return None
        by_cab, by_dense = (pass_seconds(rows, each, length, cost) for each in (CAB, DENSE))
        if by_cab is None:
            return None
        return max(FULL_OVER_CAB * by_cab, FULL_OVER_DENSE * (by_dense or 0.0))
    nearest = min((at for at, _ in measured), key=lambda at: abs(log(at / length)))
    slowest = max(seconds for at, seconds in measured if at == nearest)
    if nearest == length:
        return slowest
    return MARGIN * slowest * cost.work(length) / cost.work(nearest)


def estimate(step: Step, rows: Sequence[Row], passes: Row, cost: Cost) -> float | None:
    """Estimate the seconds of a step; None if nothing was measured that predicts them."""
    each = {m: pass_seconds(rows, m, step.length, cost) for m in passes}
    known = [(count, each[method]) for method, count in passes.items()]
    return None if None in each.values() else sum(count * seconds for count, seconds in known)


def fits(seconds: float | None, elapsed: float, minutes: float) -> bool:
    """Return True if a step of ``seconds`` ends in time; a step without an estimate always runs."""
    return seconds is None or elapsed + seconds + REPORT_SECONDS <= 60 * minutes


def reason(seconds: float, elapsed: float, minutes: float) -> str:
    """Return why a step was skipped."""
    left = max(0.0, 60 * minutes - elapsed - REPORT_SECONDS)
    return f"needs about {seconds:.0f} s, and {left:.0f} s were left"
