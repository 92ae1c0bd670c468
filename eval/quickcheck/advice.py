"""Conclusions from the rows of a quick check: a threshold, a length, and one sentence.

Everything here is a pure function of the measured rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, exp, log
from statistics import fmean
from typing import Any, NamedTuple

from cab_hf.config import CabConfig

Row = Mapping[str, Any]

DENSE, CAB, FULL = "dense", "cab", "full"
# speed-up from which CAB pays: smaller gains are within the noise of timing
PAYS = 1.02
# KL grows like threshold ** 0.75: half of the threshold has 0.6 of the KL
SLOPE = 0.75
MOST_POINTS = 5  # thresholds that a search measures, the first one included
FARTHEST = 8.0  # largest factor between a threshold and the next one
LEAST_KL = 1e-9  # a KL of 0, every block selected, has no logarithm
CLOSE = 0.8  # a KL between this share of the target and the target ends the search


class Point(NamedTuple):
    """A measured threshold, and its mean KL over documents in nats per token."""

    threshold: float
    kl: float


class Summary(NamedTuple):
    """The measurements of one configuration at one length; None was not measured.

    Attributes:
        name: "dense", "start" (the first threshold) or "advised".
        threshold: ``mass_threshold``; None for dense attention.
        ms: time to the first token, in ms.
        speedup: time of dense attention divided by time of CAB, from runs in turn.
        kl: KL after the prompt, in nats per token.
        recall: (found keys, all keys) in running text.
        border: (found keys, all keys) with answers at the start of a query block.
        density: mean over layers; dense layers count as 1.
        peak_gib: peak memory during the first token.
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
    """Result of a run.

    Attributes:
        threshold: the advised ``mass_threshold``.
        is_close_enough: True if its KL is at most the target at each measured length; None without
            KL or a target.
        is_searched: False if the search for a threshold has not ended.
        pays_from: tokens from which CAB pays; None if it does not pay at the longest length.
        is_bound: True if CAB pays at the shortest measured length already.
        longest: the longest length with a time; None without times.
    """

    threshold: float
    is_close_enough: bool | None
    is_searched: bool
    pays_from: int | None
    is_bound: bool
    longest: int | None


def select(rows: Sequence[Row], **fields: Any) -> list[Row]:
    """Return the rows with these fields."""
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def mean_kl(rows: Sequence[Row], length: int, threshold: float | None, method: str = CAB) -> float:
    """Return the mean KL per token over documents; NaN without rows.

    Rounding can make the sum slightly negative, which counts as 0.
    """
    some = select(rows, measure="kl", length=length, threshold=threshold, method=method)
    count = sum(row["count"] for row in some)
    return max(0.0, sum(row["kl"] for row in some)) / count if count else float("nan")


def longest_kl(rows: Sequence[Row], threshold: float) -> int | None:
    """Return the longest length with a KL of the first threshold."""
    some = select(rows, measure="kl", threshold=threshold, method=CAB)
    return max((row["length"] for row in some), default=None)


def points_of(rows: Sequence[Row], length: int, start: float) -> list[Point]:
    """Return the thresholds measured on all documents of the first threshold, ascending."""
    some = select(rows, measure="kl", length=length, method=CAB)
    read: dict[float, set[int]] = {}
    for row in some:
        read.setdefault(row["threshold"], set()).add(row["index"])
    complete = sorted(x for x, indices in read.items() if read.get(start, set()) <= indices)
    return [Point(x, mean_kl(rows, length, x)) for x in complete]


def next_threshold(points: Sequence[Point], target: float) -> float | None:
    """Return the threshold to measure next; None if the search has ended, or without a target (0).

    KL is assumed to grow like a power of the threshold. The exponent is that of the two thresholds
    around the target, else of the two nearest to it; `SLOPE` with one threshold.
    """
    close = [p for p in points if CLOSE * target <= p.kl <= target]
    if not target or close or not points or len(points) >= MOST_POINTS:
        return None
    # aim between the two ends of the accepted range
    aim = target * (1 + CLOSE) / 2
    below = max((p for p in points if p.kl <= target), default=None)
    above = min((p for p in points if p.kl > target), default=None)
    base = below or above
    slope = _slope(points, below, above)
    factor = exp(log(aim / max(base.kl, LEAST_KL)) / slope)
    factor = min(max(factor, 1 / FARTHEST), FARTHEST)
    found = float(f"{min(base.threshold * factor, 1.0):.3g}")
    return None if found <= 0 or any(found == p.threshold for p in points) else found


def _slope(points: Sequence[Point], below: Point | None, above: Point | None) -> float:
    """Return the exponent for `next_threshold`."""
    if below and above and below.threshold < above.threshold:
        pair = below, above
    elif len(points) > 1 and not (below and above):
        ascending = sorted(points)
        pair = ascending[-2:] if below else ascending[:2]
    else:
        return SLOPE
    low, high = pair
    ratio = log(max(high.kl, LEAST_KL) / max(low.kl, LEAST_KL))
    # noise can hide or exaggerate the slope
    return min(max(ratio / log(high.threshold / low.threshold), 0.3), 2.0)


def chosen_threshold(points: Sequence[Point], target: float) -> float:
    """Return the largest measured threshold within the target, else that with the least KL."""
    within = [p.threshold for p in points if p.kl <= target]
    return max(within) if within else min(points, key=lambda p: p.kl).threshold


def pays_from(speedups: Sequence[tuple[int, float]], step: int = 1) -> int | None:
    """Return the length from which all speed-ups of (length, speed-up) are at least `PAYS`.

    The length is interpolated between two measured lengths, linearly in its logarithm, and rounded
    up to a multiple of ``step``. Returns None if CAB does not pay at the longest length.
    """
    ascending = sorted(speedups)
    late = [at for at, (_, gain) in enumerate(ascending) if gain < PAYS]
    first = late[-1] + 1 if late else 0
    if first >= len(ascending):
        return None
    length, gain = ascending[first]
    if first == 0:
        return length
    before, loss = ascending[first - 1]
    share = (PAYS - loss) / (gain - loss)
    between = exp(log(before) + share * log(length / before))
    return min(length, ceil(between / step) * step)


def verdict(rows: Sequence[Row], start: float, target: float, query_block: int) -> Verdict:
    """Return what ``rows`` say for the first threshold ``start`` and the KL ``target``."""
    longest, threshold, close, searched = longest_kl(rows, start), start, None, False
    if longest is not None:
        points = points_of(rows, longest, start)
        threshold = chosen_threshold(points, target)
        searched = next_threshold(points, target) is None
        # shorter lengths count too, if they were measured
        lengths = {row["length"] for row in select(rows, measure="kl", threshold=threshold)}
        if target:
            close = all(mean_kl(rows, length, threshold) <= target for length in lengths)
    # a length without a time of the advised threshold has that of the first threshold
    gains = sorted({**dict(speedups(rows, start)), **dict(speedups(rows, threshold))}.items())
    found = pays_from(gains, query_block)
    lengths = [length for length, _ in gains]
    bound = found is not None and found == min(lengths)
    return Verdict(
        threshold=threshold,
        is_close_enough=close,
        is_searched=searched,
        pays_from=found,
        is_bound=bound,
        longest=max(lengths, default=None),
    )


def speedups(rows: Sequence[Row], threshold: float) -> list[tuple[int, float]]:
    """Return (length, speed-up) of a threshold, ascending."""
    some = select(rows, measure="ttft", threshold=threshold)
    return sorted((row["length"], row["dense_ms"] / row["cab_ms"]) for row in some)


def found_keys(
    rows: Sequence[Row], measure: str, length: int, method: str, threshold: float | None
) -> tuple[int, int] | None:
    """Return (found keys, all keys) over documents."""
    some = select(rows, measure=measure, length=length, method=method, threshold=threshold)
    right = [each for row in some for each in row["right"]]
    return (sum(right), len(right)) if right else None


def summaries(rows: Sequence[Row], start: float, advised: float) -> list[Summary]:
    """Return a row of the table per length and configuration."""
    names = {start: "start", advised: "advised"}
    lengths = sorted({r["length"] for r in rows if r["measure"] not in ("probe", "kernels")})
    return [
        each
        for length in lengths
        for each in (
            _dense(rows, length),
            *(_sparse(rows, length, threshold, name) for threshold, name in names.items()),
        )
        if each is not None
    ]


def _dense(rows: Sequence[Row], length: int) -> Summary:
    timed = select(rows, measure="ttft", length=length)
    recall, border = (
        found_keys(rows, measure, length, DENSE, None) for measure in ("recall", "recall_border")
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
    timed = select(rows, measure="ttft", length=length, threshold=threshold)
    kl = mean_kl(rows, length, threshold)
    recall, border = (
        found_keys(rows, measure, length, CAB, threshold) for measure in ("recall", "recall_border")
    )
    densities = densities_of(rows, length, threshold)
    if not timed and kl != kl and recall is None and border is None:
        return None
    return Summary(
        length=length,
        name=name,
        threshold=threshold,
        ms=timed[0]["cab_ms"] if timed else None,
        speedup=timed[0]["dense_ms"] / timed[0]["cab_ms"] if timed else None,
        kl=kl if kl == kl else None,
        recall=recall,
        border=border,
        density=fmean(densities) if densities else None,
        peak_gib=timed[0]["cab_peak_gib"] if timed else None,
    )


def densities_of(rows: Sequence[Row], length: int, threshold: float) -> list[float]:
    """Return the density of each layer; dense layers count as 1; [] if it was not measured."""
    some = select(rows, measure="ttft", length=length, threshold=threshold)
    some = some or select(rows, measure="kl", length=length, threshold=threshold, method=CAB)
    return [1.0 if x is None else x for x in some[0]["densities"]] if some else []


def advised_config(base: CabConfig, found: Verdict) -> CabConfig:
    """Return ``base`` with the advised threshold, and sparse from the length from which CAB pays.

    If CAB does not pay, all measured lengths stay dense.
    """
    least = found.pays_from
    if least is None:
        least = max(base.min_length, 2 * (found.longest or 0))
    return base.changed(mass_threshold=found.threshold, min_length=least)


def sentence(
    rows: Sequence[Row], found: Verdict, table: Sequence[Summary], target: float, device: str
) -> str:
    """Return the advice, one sentence."""
    if found.longest is None:
        return f"On {device}, nothing was timed within the given minutes: raise --minutes."
    at = found.longest
    ours = [x for x in table if x.length == at and x.threshold is not None]
    # the advised threshold first; its time may not be measured
    ours.sort(key=lambda x: x.threshold != found.threshold)
    best, dense = ours[0], next(x for x in table if x.length == at and x.threshold is None)
    kernel = select(rows, measure="ttft", length=at)[0]["kernel"]
    timed = next(x for x in ours if x.speedup is not None)
    by_other = "" if timed is best else f" (with mass_threshold={timed.threshold:g})"
    facts = [
        f"at {at:,} tokens the first token comes {timed.speedup:.2f} times as fast as with "
        f"{kernel}{by_other}"
    ]
    if best.kl is not None:
        compared = [f"target {target:g}"] if target else []
        noise = mean_kl(rows, at, None, FULL)
        compared += [f"noise {noise:.2g}"] if noise == noise else []
        among = f" ({', '.join(compared)})" if compared else ""
        facts.append(f"KL is {best.kl:.3g}{among}")
    if best.recall or best.border:
        facts.append(_recalled(best, dense))
    because = "; ".join(facts)
    threshold = f"mass_threshold={found.threshold:g}"
    if found.is_close_enough is False and not found.is_searched:
        return (
            f"On {device}, raise --minutes and run the same command again, because the search for "
            f"a mass_threshold with a KL of at most {target:g} has not ended ({threshold}: "
            f"{because})."
        )
    if found.is_close_enough is False:
        return (
            f"On {device}, keep dense attention: no measured mass_threshold has a KL of at most "
            f"{target:g} at every length ({threshold}: {because})."
        )
    if found.pays_from is None:
        return (
            f"On {device}, keep dense attention up to {at:,} tokens, because CAB saves no time "
            f"there ({threshold}: {because})."
        )
    start = "all measured lengths, from" if found.is_bound else "prompts from about"
    return (
        f"On {device}, use CAB with {threshold} for {start} {found.pays_from:,} tokens: {because}."
    )


def _recalled(ours: Summary, dense: Summary) -> str:
    """Return a clause on the keys that CAB and dense attention find."""
    named = {"in running text": (ours.recall, dense.recall)}
    named["at block starts"] = (ours.border, dense.border)
    parts = []
    for place, (found, of_dense) in named.items():
        if found:
            other = f" (dense {of_dense[0]})" if of_dense else ""
            parts.append(f"{found[0]}{other} of {found[1]} keys {place}")
    return f"CAB finds {' and '.join(parts)}"
