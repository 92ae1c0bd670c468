"""The advice of a quick check: a threshold, the length from which CAB pays, and one sentence.

All functions depend only on their arguments, which include the measured rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, exp, isnan, log
from statistics import fmean
from typing import Any, NamedTuple

from cab_hf.config import CabConfig

Row = Mapping[str, Any]

DENSE, CAB, FULL = "dense", "cab", "full"
# Smallest speed-up with which CAB pays. Smaller speed-ups are within the noise of timing.
PAYS = 1.02
# exponent in KL ~ threshold ** SLOPE, assumed before two thresholds are measured: half of a
# threshold has 0.6 times the KL
SLOPE = 0.75
MOST_POINTS = 5  # largest number of thresholds that a search measures, including the first
FARTHEST = 8.0  # largest factor by which the search multiplies or divides a measured threshold
LEAST_KL = 1e-9  # replaces smaller KLs, because a KL of 0 has no logarithm
CLOSE = 0.8  # the search ends with a KL from CLOSE * target to target


class Point(NamedTuple):
    """A measured threshold, and its mean KL over documents in nats per token."""

    threshold: float
    kl: float


class Summary(NamedTuple):
    """The results of dense attention or of one threshold at one length.

    Values that were not measured are None.

    Attributes:
        length: tokens of the prompts.
        name: "dense", "start" (the first threshold of the search) or "advised".
        threshold: ``mass_threshold``; None for dense attention.
        ms: time to the first token, in ms.
        speedup: time of dense attention divided by time of CAB, from alternating runs.
        kl: KL(dense || CAB) of the tokens after a prompt, in nats per token.
        recall: (number of right answers, number of keys) for answers at any position.
        border: (number of right answers, number of keys) for answers that start a query block.
        density: mean over layers, with 1 for layers that attend densely.
        peak_gib: peak memory in GiB until the first token.
    """

    length: int
    name: str
    threshold: float | None
    ms: float | None
    speedup: float | None
    kl: float | None
    recall: tuple[int, int] | None
    border: tuple[int, int] | None
    density: float | None
    peak_gib: float | None


class Verdict(NamedTuple):
    """The conclusions from all rows of a run, for the advice.

    Attributes:
        threshold: the advised ``mass_threshold``.
        is_close_enough: True if the KL of ``threshold`` is at most the target at every length at
            which it was measured; None if no KL was measured, or without a target.
        is_searched: True if the search for a threshold has ended.
        pays_from: number of tokens from which CAB pays; None if CAB does not pay at the longest
            timed length.
        is_bound: True if CAB pays at the shortest timed length, so that ``pays_from`` is this
            length and CAB may also pay below.
        longest: the longest timed length in tokens; None if nothing was timed.
    """

    threshold: float
    is_close_enough: bool | None
    is_searched: bool
    pays_from: int | None
    is_bound: bool
    longest: int | None


def select(rows: Sequence[Row], **fields: Any) -> list[Row]:
    """Return the rows that have, in each field of ``fields``, the value of this argument."""
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def mean_kl(rows: Sequence[Row], length: int, threshold: float | None, method: str = CAB) -> float:
    """Return the mean KL per token over documents; NaN without rows.

    Rounding can make the sum slightly negative, which counts as 0.
    """
    kl_rows = select(rows, measure="kl", length=length, threshold=threshold, method=method)
    count = sum(row["count"] for row in kl_rows)
    return max(0.0, sum(row["kl"] for row in kl_rows)) / count if count else float("nan")


def longest_kl(rows: Sequence[Row], threshold: float) -> int | None:
    """Return the longest length with a measured KL of ``threshold``; None if no KL was measured."""
    kl_rows = select(rows, measure="kl", threshold=threshold, method=CAB)
    return max((row["length"] for row in kl_rows), default=None)


def list_points(rows: Sequence[Row], length: int, start: float) -> list[Point]:
    """Return the measured thresholds and their KL at one length, ascending.

    A threshold is left out if a document that was measured with the first threshold is missing.

    Args:
        rows: measured rows.
        length: tokens of the documents.
        start: the first threshold of the search.
    """
    indices: dict[float, set[int]] = {}
    for row in select(rows, measure="kl", length=length, method=CAB):
        indices.setdefault(row["threshold"], set()).add(row["index"])
    expected = indices.get(start, set())
    complete = sorted(threshold for threshold in indices if expected <= indices[threshold])
    return [Point(threshold, mean_kl(rows, length, threshold)) for threshold in complete]


def next_threshold(points: Sequence[Point], target: float) -> float | None:
    """Return the threshold to measure next; None if the search has ended.

    The search assumes that KL is proportional to a power of the threshold (`_estimate_slope`). The
    next threshold is the one whose assumed KL is in the middle of the range that ends the search.

    Args:
        points: measured thresholds with their KL, ascending.
        target: the accepted KL in nats per token; 0 for no search.
    """
    close = [p for p in points if CLOSE * target <= p.kl <= target]
    if not target or close or not points or len(points) >= MOST_POINTS:
        return None
    # middle of the range of KLs that end the search
    aim = target * (1 + CLOSE) / 2
    below = max((p for p in points if p.kl <= target), default=None)
    above = min((p for p in points if p.kl > target), default=None)
    base = below or above
    slope = _estimate_slope(points, below, above)
    factor = exp(log(aim / max(base.kl, LEAST_KL)) / slope)
    factor = min(max(factor, 1 / FARTHEST), FARTHEST)
    threshold = float(f"{min(base.threshold * factor, 1.0):.3g}")
    is_measured = any(threshold == p.threshold for p in points)
    return None if threshold <= 0 or is_measured else threshold


def _estimate_slope(points: Sequence[Point], below: Point | None, above: Point | None) -> float:
    """Return the exponent a in the assumption KL ~ threshold ** a, from 0.3 to 2.

    The exponent follows from the KLs of the two thresholds around the target. If all KLs are within
    the target, or all exceed it, the exponent follows from the two thresholds nearest to the
    target. Otherwise, or with one threshold, it is `SLOPE`.

    Args:
        points: measured thresholds with their KL.
        below: the largest threshold with a KL within the target; None without one.
        above: the smallest threshold with a KL over the target; None without one.
    """
    if below and above and below.threshold < above.threshold:
        pair = below, above
    elif len(points) > 1 and not (below and above):
        ascending = sorted(points)
        pair = ascending[-2:] if below else ascending[:2]
    else:
        return SLOPE
    low, high = pair
    ratio = log(max(high.kl, LEAST_KL) / max(low.kl, LEAST_KL))
    # limit the exponent, which noise in the KLs can make far too small or too large
    return min(max(ratio / log(high.threshold / low.threshold), 0.3), 2.0)


def choose_threshold(points: Sequence[Point], target: float) -> float:
    """Return the largest threshold with a KL within the target.

    If no threshold is within the target, return the threshold with the smallest KL.
    """
    within = [p.threshold for p in points if p.kl <= target]
    return max(within) if within else min(points, key=lambda p: p.kl).threshold


def pays_from(speedups: Sequence[tuple[int, float]], step: int = 1) -> int | None:
    """Return the number of tokens from which CAB pays: all speed-ups are at least `PAYS`.

    The result is interpolated between two measured lengths: the speed-up is assumed to be linear in
    the logarithm of the length. If CAB pays at all lengths, the result is the shortest length.
    Returns None if CAB does not pay at the longest length.

    Args:
        speedups: pairs of (length, time of dense attention / time of CAB).
        step: an interpolated result is rounded up to a multiple of this number.
    """
    ascending = sorted(speedups)
    losses = [i for i, (_, speedup) in enumerate(ascending) if speedup < PAYS]
    first = losses[-1] + 1 if losses else 0
    if first >= len(ascending):
        return None
    length, speedup = ascending[first]
    if first == 0:
        return length
    shorter, lower_speedup = ascending[first - 1]
    share = (PAYS - lower_speedup) / (speedup - lower_speedup)
    interpolated = exp(log(shorter) + share * log(length / shorter))
    return min(length, ceil(interpolated / step) * step)


def verdict(rows: Sequence[Row], start: float, target: float, query_block: int) -> Verdict:
    """Return the conclusions from the rows of a run.

    Args:
        rows: measured rows.
        start: the first threshold of the search.
        target: the accepted KL in nats per token; 0 without a target.
        query_block: tokens per query block; the length from which CAB pays is rounded up to a
            multiple of this number.
    """
    longest, threshold, is_close_enough = longest_kl(rows, start), start, None
    is_searched = False
    if longest is not None:
        points = list_points(rows, longest, start)
        threshold = choose_threshold(points, target)
        is_searched = next_threshold(points, target) is None
        # check the KL of the threshold at every length at which it was measured
        kl_lengths = {row["length"] for row in select(rows, measure="kl", threshold=threshold)}
        if target:
            is_close_enough = all(
                mean_kl(rows, length, threshold) <= target for length in kl_lengths
            )
    # at lengths where the advised threshold was not timed, use the speed-up of the first threshold
    gains = sorted({**dict(speedups(rows, start)), **dict(speedups(rows, threshold))}.items())
    first_gain = pays_from(gains, query_block)
    lengths = [length for length, _ in gains]
    return Verdict(
        threshold=threshold,
        is_close_enough=is_close_enough,
        is_searched=is_searched,
        pays_from=first_gain,
        is_bound=first_gain is not None and first_gain == min(lengths),
        longest=max(lengths, default=None),
    )


def speedups(rows: Sequence[Row], threshold: float) -> list[tuple[int, float]]:
    """Return (length, speed-up over dense attention) at each timed length of a threshold."""
    timed = select(rows, measure="ttft", threshold=threshold)
    return sorted((row["length"], row["dense_ms"] / row["cab_ms"]) for row in timed)


def count_found_keys(
    rows: Sequence[Row], measure: str, length: int, method: str, threshold: float | None
) -> tuple[int, int] | None:
    """Return (number of right answers, number of keys) over all measured documents.

    Returns None if no document was measured.

    Args:
        rows: measured rows.
        measure: "recall" for answers at any position, "recall_border" for answers that start a
            query block.
        length: tokens of the documents.
        method: DENSE, CAB or FULL.
        threshold: ``mass_threshold``; None for DENSE and FULL.
    """
    measured = select(rows, measure=measure, length=length, method=method, threshold=threshold)
    outcomes = [right for row in measured for right in row["right"]]
    return (sum(outcomes), len(outcomes)) if outcomes else None


def summaries(rows: Sequence[Row], start: float, advised: float) -> list[Summary]:
    """Return summaries of dense attention and of two thresholds at every measured length.

    Thresholds that were not measured at a length are left out there.

    Args:
        rows: measured rows.
        start: the first threshold of the search.
        advised: the advised threshold, which may equal ``start``.
    """
    names = {start: "start", advised: "advised"}
    lengths = sorted({r["length"] for r in rows if r["measure"] not in ("probe", "kernels")})
    return [
        summary
        for length in lengths
        for summary in (
            _dense(rows, length),
            *(_sparse(rows, length, threshold, name) for threshold, name in names.items()),
        )
        if summary is not None
    ]


def _dense(rows: Sequence[Row], length: int) -> Summary:
    """Return the summary of dense attention at a length."""
    timed = select(rows, measure="ttft", length=length)
    recall, border = (
        count_found_keys(rows=rows, measure=measure, length=length, method=DENSE, threshold=None)
        for measure in ("recall", "recall_border")
    )
    return Summary(
        length=length,
        name=DENSE,
        threshold=None,
        ms=timed[0]["dense_ms"] if timed else None,
        speedup=1.0,
        kl=0.0,
        recall=recall,
        border=border,
        density=1.0,
        peak_gib=timed[0]["dense_peak_gib"] if timed else None,
    )


def _sparse(rows: Sequence[Row], length: int, threshold: float, name: str) -> Summary | None:
    """Return the summary of a threshold at a length; None if nothing was measured."""
    timed = select(rows, measure="ttft", length=length, threshold=threshold)
    kl = mean_kl(rows, length, threshold)
    recall, border = (
        count_found_keys(rows=rows, measure=measure, length=length, method=CAB, threshold=threshold)
        for measure in ("recall", "recall_border")
    )
    densities = find_densities(rows, length, threshold)
    if not timed and isnan(kl) and recall is None and border is None:
        return None
    return Summary(
        length=length,
        name=name,
        threshold=threshold,
        ms=timed[0]["cab_ms"] if timed else None,
        speedup=timed[0]["dense_ms"] / timed[0]["cab_ms"] if timed else None,
        kl=None if isnan(kl) else kl,
        recall=recall,
        border=border,
        density=fmean(densities) if densities else None,
        peak_gib=timed[0]["cab_peak_gib"] if timed else None,
    )


def find_densities(rows: Sequence[Row], length: int, threshold: float) -> list[float]:
    """Return the density of each layer in the first row with densities; [] without such a row.

    The density of a layer that attends densely is 1.
    """
    measured = select(rows, measure="ttft", length=length, threshold=threshold)
    measured += select(rows, measure="kl", length=length, threshold=threshold, method=CAB)
    return [1.0 if x is None else x for x in measured[0]["densities"]] if measured else []


def make_advised_config(base: CabConfig, conclusions: Verdict) -> CabConfig:
    """Return ``base`` with the advised ``mass_threshold`` and ``min_length``.

    ``min_length`` is the length from which CAB pays. If CAB does not pay, ``min_length`` exceeds
    all measured lengths.
    """
    least = conclusions.pays_from
    if least is None:
        least = max(base.min_length, 2 * (conclusions.longest or 0))
    return base.changed(mass_threshold=conclusions.threshold, min_length=least)


def sentence(
    rows: Sequence[Row], conclusions: Verdict, table: Sequence[Summary], target: float, device: str
) -> str:
    """Return the advice of the report as one sentence.

    Args:
        rows: measured rows.
        conclusions: the conclusions from the rows.
        table: `summaries` of the rows.
        target: the accepted KL in nats per token; 0 without a target.
        device: name of the device.
    """
    if conclusions.longest is None:
        return f"On {device}, nothing was timed within the given minutes: raise --minutes."
    facts = "; ".join(_list_facts(rows, conclusions, table, target))
    threshold = f"mass_threshold={conclusions.threshold:g}"
    if conclusions.is_close_enough is False and not conclusions.is_searched:
        return (
            f"On {device}, raise --minutes and run the same command again, because the search for "
            f"a mass_threshold with a KL of at most {target:g} has not ended ({threshold}: "
            f"{facts})."
        )
    if conclusions.is_close_enough is False:
        return (
            f"On {device}, keep dense attention: no measured mass_threshold has a KL of at most "
            f"{target:g} at every length ({threshold}: {facts})."
        )
    if conclusions.pays_from is None:
        return (
            f"On {device}, keep dense attention up to {conclusions.longest:,} tokens, because CAB "
            f"saves no time there ({threshold}: {facts})."
        )
    start = "all measured lengths, from" if conclusions.is_bound else "prompts from about"
    prompts = f"{start} {conclusions.pays_from:,} tokens"
    return f"On {device}, use CAB with {threshold} for {prompts}: {facts}."


def _list_facts(
    rows: Sequence[Row], conclusions: Verdict, table: Sequence[Summary], target: float
) -> list[str]:
    """Return the clauses of `sentence` on speed-up, KL and recall at the longest timed length."""
    length = conclusions.longest
    sparse = [x for x in table if x.length == length and x.threshold is not None]
    # prefer the advised threshold; its speed-up may be missing at this length
    sparse.sort(key=lambda x: x.threshold != conclusions.threshold)
    best, dense = sparse[0], next(x for x in table if x.length == length and x.threshold is None)
    kernel = select(rows, measure="ttft", length=length)[0]["kernel"]
    timed = next(x for x in sparse if x.speedup is not None)
    other_threshold = "" if timed is best else f" (with mass_threshold={timed.threshold:g})"
    facts = [
        f"at {length:,} tokens the first token comes {timed.speedup:.2f} times as fast as with "
        f"{kernel}{other_threshold}"
    ]
    if best.kl is not None:
        references = [f"target {target:g}"] if target else []
        noise = mean_kl(rows, length, None, FULL)
        references += [] if isnan(noise) else [f"noise {noise:.2g}"]
        note = f" ({', '.join(references)})" if references else ""
        facts.append(f"KL is {best.kl:.3g}{note}")
    if best.recall or best.border:
        facts.append(_describe_recall(best, dense))
    return facts


def _describe_recall(sparse: Summary, dense: Summary) -> str:
    """Return a clause on how many keys CAB and dense attention answer correctly."""
    counts_by_position = {
        "in running text": (sparse.recall, dense.recall),
        "at block starts": (sparse.border, dense.border),
    }
    clauses = []
    for position, (counts, dense_counts) in counts_by_position.items():
        if counts:
            num_found, num_keys = counts
            dense_note = f" (dense {dense_counts[0]})" if dense_counts else ""
            clauses.append(f"{num_found}{dense_note} of {num_keys} keys {position}")
    return f"CAB finds {' and '.join(clauses)}"
