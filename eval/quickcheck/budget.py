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
    choose_next_threshold,
    choose_threshold,
    find_longest_kl_length,
    list_kl_points,
)

Row = Mapping[str, Any]

PROBE, KERNEL_COMPARISON, TTFT, KL = "probe", "kernels", "ttft", "kl"
RECALL, RECALL_BORDER = "recall", "recall_border"
# fields of a row that identify its step: the fields of `Step`
STEP_FIELDS = ("measure", "length", "method", "threshold", "index")
PROBE_TOKENS = 512  # tokens of the first probe, a short timed pass; later probes have 4 times more
PROBE_SECONDS = 0.5  # a probe that takes longer is the last; shorter passes predict times badly
EXTRAPOLATION_FACTOR = 1.2  # factor on times that are estimated from another length
# The estimate for FULL, before FULL was measured, is the larger of two products:
FULL_CAB_TIME_RATIO = 1.5  # times the measured time of CAB
FULL_DENSE_TIME_RATIO = 1.3  # times the measured time of dense attention
MAX_SLOWDOWN = 3.0  # largest factor on all estimates if recent steps took longer than estimated
REPORT_SECONDS = 4.0  # time for writing figure and report


@dataclass(frozen=True)
class Step:
    """One measurement; its fields identify its row in the log.

    Attributes:
        measure: the kind of measurement. PROBE times a pass over a short prompt, KERNEL_COMPARISON
            compares dense kernels, TTFT times the first token. KL compares the predicted
            distributions with those of dense attention. RECALL and RECALL_BORDER count right
            answers.
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
    def row_fields(self) -> dict[str, Any]:
        """The fields of the step as the beginning of its row."""
        return asdict(self)

    def __str__(self) -> str:
        threshold_phrase = "" if self.threshold is None else f", mass_threshold={self.threshold:g}"
        measure_phrase = (
            f"{self.measure} of {self.method} at {self.length:,} tokens{threshold_phrase}"
        )
        return f"{measure_phrase}, text {self.index}"


class Scope(NamedTuple):
    """The parameters from which the steps of a run follow.

    Attributes:
        lengths: tokens of the prompts, ascending.
        start_threshold: the first ``mass_threshold`` of the search.
        target_kl: the KL that the user accepts, in nats per token; 0 for no search.
        num_documents: number of documents per length.
        num_kernels: number of dense kernels to compare.
    """

    lengths: Sequence[int]
    start_threshold: float
    target_kl: float
    num_documents: int = 1
    num_kernels: int = 1


class Cost(NamedTuple):
    """The size of a model, from which times at one prompt length are scaled to another length.

    Attributes:
        num_parameters: number of weights with which each token is multiplied.
        attention_channels: number of layers * hidden size, the cost of attention per token and key.
    """

    num_parameters: float
    attention_channels: float

    def count_operations(self, length: int) -> float:
        """Return a number proportional to the operations of a dense pass over ``length`` tokens."""
        return length * (self.num_parameters + self.attention_channels * length)


def make_step_of_row(row: Row) -> Step:
    """Return the step that measured ``row``."""
    return Step(**{field_name: row[field_name] for field_name in STEP_FIELDS})


def schedule_steps(
    scope: Scope, rows: Sequence[Row], skipped_steps: Collection[Step] = ()
) -> Iterator[Step]:
    """Yield the steps of a run, the most important first.

    The first part searches a threshold at the longest length at which the KL of the first threshold
    was measured. The second part measures the threshold that the search has chosen. The iteration
    ends before steps that depend on results that are still missing.

    Args:
        scope: the parameters of the run.
        rows: rows of all measured steps. Steps with a row are yielded too.
        skipped_steps: steps that were not measured, for lack of time or because of an error. These
            steps are yielded too.
    """
    yield from _schedule_probes(scope, rows)
    start_threshold, document_indices = scope.start_threshold, range(scope.num_documents)
    for length in scope.lengths:
        if scope.num_kernels > 1:
            yield Step(KERNEL_COMPARISON, length, DENSE)
        yield Step(TTFT, length, CAB, start_threshold)
    for length in scope.lengths:
        for index in document_indices:
            yield Step(measure=KL, length=length, threshold=start_threshold, index=index)
    longest_length = find_longest_kl_length(rows, start_threshold)
    if longest_length is None:
        return
    kl_points = list_kl_points(rows, longest_length, start_threshold)
    threshold_to_measure = choose_next_threshold(kl_points, scope.target_kl)
    if threshold_to_measure is not None:
        kl_steps = [
            Step(measure=KL, length=longest_length, threshold=threshold_to_measure, index=index)
            for index in document_indices
        ]
        yield from kl_steps
        if not any(step in skipped_steps for step in kl_steps):
            # wait for the results of these steps: the next threshold depends on them
            return
    for length in reversed(scope.lengths):
        yield Step(KL, length, FULL)
    advised_threshold = choose_threshold(kl_points, scope.target_kl)
    for threshold in dict.fromkeys((advised_threshold, start_threshold)):
        for length in reversed(scope.lengths):
            yield Step(TTFT, length, CAB, threshold)
        for length, index in ((x, i) for x in reversed(scope.lengths) for i in document_indices):
            for measure in (RECALL, RECALL_BORDER):
                yield Step(measure=measure, length=length, method=DENSE, index=index)
                yield Step(measure=measure, length=length, threshold=threshold, index=index)
            yield Step(measure=KL, length=length, threshold=threshold, index=index)


def _schedule_probes(scope: Scope, rows: Sequence[Row]) -> Iterator[Step]:
    """Yield passes over short prompts, from whose times those of longer prompts are estimated.

    Each prompt is 4 times as long as the prompt before. The last prompt takes `PROBE_SECONDS` or
    longer, or a prompt 4 times as long would be longer than the shortest of ``scope.lengths``.
    """
    length = min(PROBE_TOKENS, scope.lengths[0])
    while True:
        for method in (DENSE, CAB):
            yield Step(PROBE, length, method, scope.start_threshold if method == CAB else None)
        probe_rows = [row for row in rows if (row["measure"], row["length"]) == (PROBE, length)]
        pass_seconds = [seconds for row in probe_rows for seconds in row["pass_seconds"].values()]
        if (
            len(pass_seconds) < 2
            or max(pass_seconds) > PROBE_SECONDS
            or 4 * length > scope.lengths[0]
        ):
            return
        length *= 4


def find_next_step(
    scope: Scope, rows: Sequence[Row], skipped_steps: Collection[Step] = ()
) -> Step | None:
    """Return the first step that is neither measured nor skipped; None if no step is left."""
    finished_steps = {*map(make_step_of_row, rows), *skipped_steps}
    return next(
        (step for step in schedule_steps(scope, rows, skipped_steps) if step not in finished_steps),
        None,
    )


def compute_slowdown(time_ratios: Sequence[float]) -> float:
    """Return the factor by which the next estimates are multiplied, from 1 to `MAX_SLOWDOWN`.

    The factor is the larger ratio of the last two steps, because other processes may slow the
    machine down for a while.

    Args:
        time_ratios: measured time divided by the estimate, for each measured step.
    """
    return min(max([1.0, *time_ratios[-2:]]), MAX_SLOWDOWN)


def count_passes(
    step: Step, num_runs: int, num_warm_ups: int, num_kernels: int, is_dense_cached: bool
) -> Row:
    """Return method -> number of its forward passes in a step, from which the time is estimated.

    Args:
        step: the step.
        num_runs: number of timed runs of each method in a step of TTFT.
        num_warm_ups: number of runs before the timed runs.
        num_kernels: number of dense kernels that a step of KERNEL_COMPARISON compares.
        is_dense_cached: True if a step of KL needs no dense pass, because the dense predictions for
            the document are in memory.
    """
    if step.measure == PROBE:
        return {step.method: 2}
    if step.measure == KERNEL_COMPARISON:
        return {DENSE: 2 * num_kernels}
    if step.measure == TTFT:
        return {DENSE: num_runs + num_warm_ups, step.method: num_runs + num_warm_ups}
    if step.measure == KL and not is_dense_cached:
        return {DENSE: 1, step.method: 1}
    return {step.method: 1}


def estimate_pass_seconds(
    rows: Sequence[Row], method: str, length: int, model_cost: Cost
) -> float | None:
    """Return the estimated seconds of one forward pass; None if no pass of the method was measured.

    The estimate is the slowest pass at the measured length nearest to ``length``. If the lengths
    differ, it is scaled by the operations of dense passes at both lengths, and by
    `EXTRAPOLATION_FACTOR`. Without a pass of FULL, the estimate for FULL follows from those for CAB
    and for dense attention.
    """
    length_seconds = [
        (row["length"], row["pass_seconds"][method])
        for row in rows
        if method in row["pass_seconds"]
    ]
    if not length_seconds:
        if method != FULL:
            return None
        cab_seconds = estimate_pass_seconds(rows, CAB, length, model_cost)
        dense_seconds = estimate_pass_seconds(rows, DENSE, length, model_cost)
        if cab_seconds is None:
            return None
        return max(
            FULL_CAB_TIME_RATIO * cab_seconds, FULL_DENSE_TIME_RATIO * (dense_seconds or 0.0)
        )
    nearest_length = min(
        (measured_length for measured_length, _ in length_seconds),
        key=lambda n: abs(log(n / length)),
    )
    slowest_s = max(
        seconds for measured_length, seconds in length_seconds if measured_length == nearest_length
    )
    if nearest_length == length:
        return slowest_s
    return (
        EXTRAPOLATION_FACTOR
        * slowest_s
        * model_cost.count_operations(length)
        / model_cost.count_operations(nearest_length)
    )


def estimate_step_seconds(
    step: Step, rows: Sequence[Row], num_passes_by_method: Row, model_cost: Cost
) -> float | None:
    """Return the estimated seconds of a step.

    Returns None if there is no measured pass of a method of the step.

    Args:
        step: the step.
        rows: measured rows.
        num_passes_by_method: method -> number of passes, from `count_passes`.
        model_cost: size of the model.
    """
    seconds_by_method = {
        method: estimate_pass_seconds(rows, method, step.length, model_cost)
        for method in num_passes_by_method
    }
    if None in seconds_by_method.values():
        return None
    return sum(
        num_passes * seconds_by_method[method]
        for method, num_passes in num_passes_by_method.items()
    )


def fits_time_limit(estimated_s: float | None, elapsed_s: float, limit_minutes: float) -> bool:
    """Return True if a step can end within the time limit, before figure and report are written.

    Args:
        estimated_s: estimated time of the step; None without an estimate, for which the result is
            True.
        elapsed_s: seconds since the start of the command.
        limit_minutes: time limit of the command.
    """
    return estimated_s is None or elapsed_s + estimated_s + REPORT_SECONDS <= 60 * limit_minutes


def describe_missing_time(estimated_s: float, elapsed_s: float, limit_minutes: float) -> str:
    """Return the reason for skipping a step, for the report; arguments as in `fits_time_limit`."""
    remaining_s = max(0.0, 60 * limit_minutes - elapsed_s - REPORT_SECONDS)
    return f"needs about {estimated_s:.0f} s, and {remaining_s:.0f} s were left"
