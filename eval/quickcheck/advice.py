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
MIN_PAYING_SPEEDUP = 1.02
# exponent a in KL ~ threshold ** a, assumed before two thresholds are measured: half of a threshold
# has 0.6 times the KL
DEFAULT_KL_EXPONENT = 0.75
MAX_KL_POINTS = 5  # largest number of thresholds that a search measures, including the first
# largest factor by which the search multiplies or divides a measured threshold
MAX_THRESHOLD_FACTOR = 8.0
MIN_KL = 1e-9  # replaces smaller KLs, because a KL of 0 has no logarithm
MIN_TARGET_FRACTION = 0.8  # the search ends with a KL from MIN_TARGET_FRACTION * target to target


class KlPoint(NamedTuple):
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
        first_token_ms: time to the first token, in ms.
        speedup: time of dense attention divided by time of CAB, from alternating runs.
        kl: KL(dense || CAB) of the tokens after a prompt, in nats per token.
        recall: (number of right answers, number of keys) for answers at any position.
        border_recall: (number of right answers, number of keys) for answers that start a query
            block.
        density: mean over layers, with 1 for layers that attend densely.
        peak_gib: peak memory in GiB until the first token.
    """

    length: int
    name: str
    threshold: float | None
    first_token_ms: float | None
    speedup: float | None
    kl: float | None
    recall: tuple[int, int] | None
    border_recall: tuple[int, int] | None
    density: float | None
    peak_gib: float | None


class Verdict(NamedTuple):
    """The conclusions from all rows of a run, for the advice.

    Attributes:
        threshold: the advised ``mass_threshold``.
        is_close_enough: True if the KL of ``threshold`` is at most the target at every length at
            which it was measured; None if no KL was measured, or without a target.
        is_search_complete: True if the search for a threshold has ended.
        pays_from_length: number of tokens from which CAB pays; None if CAB does not pay at the
            longest timed length.
        is_upper_bound: True if CAB pays at the shortest timed length, so that ``pays_from_length``
            is this length and CAB may also pay below.
        longest_timed_length: the longest timed length in tokens; None if nothing was timed.
    """

    threshold: float
    is_close_enough: bool | None
    is_search_complete: bool
    pays_from_length: int | None
    is_upper_bound: bool
    longest_timed_length: int | None


def select_rows(rows: Sequence[Row], **field_values: Any) -> list[Row]:
    """Return the rows that have, in each field of ``field_values``, the value of this argument."""
    return [
        row
        for row in rows
        if all(row[field_name] == field_value for field_name, field_value in field_values.items())
    ]


def compute_mean_kl(
    rows: Sequence[Row], length: int, threshold: float | None, method: str = CAB
) -> float:
    """Return the mean KL per token over documents; NaN without rows.

    Rounding can make the sum slightly negative, which counts as 0.
    """
    kl_rows = select_rows(rows, measure="kl", length=length, threshold=threshold, method=method)
    num_tokens = sum(row["count"] for row in kl_rows)
    return max(0.0, sum(row["kl"] for row in kl_rows)) / num_tokens if num_tokens else float("nan")


def find_longest_kl_length(rows: Sequence[Row], threshold: float) -> int | None:
    """Return the longest length with a measured KL of ``threshold``; None if no KL was measured."""
    kl_rows = select_rows(rows, measure="kl", threshold=threshold, method=CAB)
    return max((row["length"] for row in kl_rows), default=None)


def list_kl_points(rows: Sequence[Row], length: int, start_threshold: float) -> list[KlPoint]:
    """Return the measured thresholds and their KL at one length, ascending.

    A threshold is left out if a document that was measured with the first threshold is missing.

    Args:
        rows: measured rows.
        length: tokens of the documents.
        start_threshold: the first threshold of the search.
    """
    indices_by_threshold: dict[float, set[int]] = {}
    for row in select_rows(rows, measure="kl", length=length, method=CAB):
        indices_by_threshold.setdefault(row["threshold"], set()).add(row["index"])
    required_indices = indices_by_threshold.get(start_threshold, set())
    complete_thresholds = sorted(
        threshold
        for threshold in indices_by_threshold
        if required_indices <= indices_by_threshold[threshold]
    )
    return [
        KlPoint(threshold, compute_mean_kl(rows, length, threshold))
        for threshold in complete_thresholds
    ]


def choose_next_threshold(points: Sequence[KlPoint], target_kl: float) -> float | None:
    """Return the threshold to measure next; None if the search has ended.

    The search assumes that KL is proportional to a power of the threshold
    (`_estimate_kl_exponent`). The next threshold is the one whose assumed KL is in the middle of
    the range that ends the search.

    Args:
        points: measured thresholds with their KL, ascending.
        target_kl: the accepted KL in nats per token; 0 for no search.
    """
    close_points = [
        point for point in points if MIN_TARGET_FRACTION * target_kl <= point.kl <= target_kl
    ]
    if not target_kl or close_points or not points or len(points) >= MAX_KL_POINTS:
        return None
    # middle of the range of KLs that end the search
    aimed_kl = target_kl * (1 + MIN_TARGET_FRACTION) / 2
    point_below = max((point for point in points if point.kl <= target_kl), default=None)
    point_above = min((point for point in points if point.kl > target_kl), default=None)
    base_point = point_below or point_above
    exponent = _estimate_kl_exponent(points, point_below, point_above)
    threshold_factor = exp(log(aimed_kl / max(base_point.kl, MIN_KL)) / exponent)
    threshold_factor = min(max(threshold_factor, 1 / MAX_THRESHOLD_FACTOR), MAX_THRESHOLD_FACTOR)
    threshold = float(f"{min(base_point.threshold * threshold_factor, 1.0):.3g}")
    is_measured = any(threshold == point.threshold for point in points)
    return None if threshold <= 0 or is_measured else threshold


def _estimate_kl_exponent(
    points: Sequence[KlPoint], point_below: KlPoint | None, point_above: KlPoint | None
) -> float:
    """Return the exponent a in the assumption KL ~ threshold ** a, from 0.3 to 2.

    The exponent follows from the KLs of the two thresholds around the target. If all KLs are within
    the target, or all exceed it, the exponent follows from the two thresholds nearest to the
    target. Otherwise, or with one threshold, it is `DEFAULT_KL_EXPONENT`.

    Args:
        points: measured thresholds with their KL.
        point_below: the largest threshold with a KL within the target; None without one.
        point_above: the smallest threshold with a KL over the target; None without one.
    """
    if point_below and point_above and point_below.threshold < point_above.threshold:
        point_pair = point_below, point_above
    elif len(points) > 1 and not (point_below and point_above):
        ascending_points = sorted(points)
        point_pair = ascending_points[-2:] if point_below else ascending_points[:2]
    else:
        return DEFAULT_KL_EXPONENT
    low_point, high_point = point_pair
    log_kl_ratio = log(max(high_point.kl, MIN_KL) / max(low_point.kl, MIN_KL))
    # limit the exponent, which noise in the KLs can make far too small or too large
    return min(max(log_kl_ratio / log(high_point.threshold / low_point.threshold), 0.3), 2.0)


def choose_threshold(points: Sequence[KlPoint], target_kl: float) -> float:
    """Return the largest threshold with a KL within the target.

    If no threshold is within the target, return the threshold with the smallest KL.
    """
    accepted_thresholds = [point.threshold for point in points if point.kl <= target_kl]
    return (
        max(accepted_thresholds)
        if accepted_thresholds
        else min(points, key=lambda point: point.kl).threshold
    )


def find_break_even_length(
    length_speedups: Sequence[tuple[int, float]], multiple_tokens: int = 1
) -> int | None:
    """Return the tokens from which CAB pays: all speed-ups are at least `MIN_PAYING_SPEEDUP`.

    The result is interpolated between two measured lengths: the speed-up is assumed to be linear in
    the logarithm of the length. If CAB pays at all lengths, the result is the shortest length.
    Returns None if CAB does not pay at the longest length.

    Args:
        length_speedups: pairs of (length, time of dense attention / time of CAB).
        multiple_tokens: an interpolated result is rounded up to a multiple of this number.
    """
    ascending_speedups = sorted(length_speedups)
    losing_indices = [
        index
        for index, (_, speedup) in enumerate(ascending_speedups)
        if speedup < MIN_PAYING_SPEEDUP
    ]
    first_paying_index = losing_indices[-1] + 1 if losing_indices else 0
    if first_paying_index >= len(ascending_speedups):
        return None
    length, speedup = ascending_speedups[first_paying_index]
    if first_paying_index == 0:
        return length
    shorter_length, lower_speedup = ascending_speedups[first_paying_index - 1]
    log_fraction = (MIN_PAYING_SPEEDUP - lower_speedup) / (speedup - lower_speedup)
    interpolated_length = exp(log(shorter_length) + log_fraction * log(length / shorter_length))
    return min(length, ceil(interpolated_length / multiple_tokens) * multiple_tokens)


def draw_conclusions(
    rows: Sequence[Row], start_threshold: float, target_kl: float, query_block: int
) -> Verdict:
    """Return the conclusions from the rows of a run.

    Args:
        rows: measured rows.
        start_threshold: the first threshold of the search.
        target_kl: the accepted KL in nats per token; 0 without a target.
        query_block: tokens per query block; the length from which CAB pays is rounded up to a
            multiple of this number.
    """
    longest_length = find_longest_kl_length(rows, start_threshold)
    threshold, is_close_enough, is_search_complete = start_threshold, None, False
    if longest_length is not None:
        points = list_kl_points(rows, longest_length, start_threshold)
        threshold = choose_threshold(points, target_kl)
        is_search_complete = choose_next_threshold(points, target_kl) is None
        # check the KL of the threshold at every length at which it was measured
        kl_lengths = {row["length"] for row in select_rows(rows, measure="kl", threshold=threshold)}
        if target_kl:
            is_close_enough = all(
                compute_mean_kl(rows, length, threshold) <= target_kl for length in kl_lengths
            )
    # at lengths where the advised threshold was not timed, use the speed-up of the first threshold
    length_speedups = sorted(
        {
            **dict(list_speedups(rows, start_threshold)),
            **dict(list_speedups(rows, threshold)),
        }.items()
    )
    pays_from_length = find_break_even_length(length_speedups, query_block)
    timed_lengths = [length for length, _ in length_speedups]
    return Verdict(
        threshold=threshold,
        is_close_enough=is_close_enough,
        is_search_complete=is_search_complete,
        pays_from_length=pays_from_length,
        is_upper_bound=pays_from_length is not None and pays_from_length == min(timed_lengths),
        longest_timed_length=max(timed_lengths, default=None),
    )


def list_speedups(rows: Sequence[Row], threshold: float) -> list[tuple[int, float]]:
    """Return (length, speed-up over dense attention) at each timed length of a threshold."""
    timed_rows = select_rows(rows, measure="ttft", threshold=threshold)
    return sorted((row["length"], row["dense_ms"] / row["cab_ms"]) for row in timed_rows)


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
    recall_rows = select_rows(
        rows, measure=measure, length=length, method=method, threshold=threshold
    )
    is_right_by_key = [is_right for row in recall_rows for is_right in row["right"]]
    return (sum(is_right_by_key), len(is_right_by_key)) if is_right_by_key else None


def list_summaries(
    rows: Sequence[Row], start_threshold: float, advised_threshold: float
) -> list[Summary]:
    """Return summaries of dense attention and of two thresholds at every measured length.

    Thresholds that were not measured at a length are left out there.

    Args:
        rows: measured rows.
        start_threshold: the first threshold of the search.
        advised_threshold: the advised threshold, which may equal ``start_threshold``.
    """
    name_by_threshold = {start_threshold: "start", advised_threshold: "advised"}
    lengths = sorted({row["length"] for row in rows if row["measure"] not in ("probe", "kernels")})
    return [
        summary
        for length in lengths
        for summary in (
            _summarise_dense(rows, length),
            *(
                _summarise_threshold(rows, length, threshold, name)
                for threshold, name in name_by_threshold.items()
            ),
        )
        if summary is not None
    ]


def _summarise_dense(rows: Sequence[Row], length: int) -> Summary:
    """Return the summary of dense attention at a length."""
    timed_rows = select_rows(rows, measure="ttft", length=length)
    recall, border_recall = (
        count_found_keys(rows=rows, measure=measure, length=length, method=DENSE, threshold=None)
        for measure in ("recall", "recall_border")
    )
    return Summary(
        length=length,
        name=DENSE,
        threshold=None,
        first_token_ms=timed_rows[0]["dense_ms"] if timed_rows else None,
        speedup=1.0,
        kl=0.0,
        recall=recall,
        border_recall=border_recall,
        density=1.0,
        peak_gib=timed_rows[0]["dense_peak_gib"] if timed_rows else None,
    )


def _summarise_threshold(
    rows: Sequence[Row], length: int, threshold: float, name: str
) -> Summary | None:
    """Return the summary of a threshold at a length; None if nothing was measured."""
    timed_rows = select_rows(rows, measure="ttft", length=length, threshold=threshold)
    mean_kl = compute_mean_kl(rows, length, threshold)
    recall, border_recall = (
        count_found_keys(rows=rows, measure=measure, length=length, method=CAB, threshold=threshold)
        for measure in ("recall", "recall_border")
    )
    densities = find_densities(rows, length, threshold)
    if not timed_rows and isnan(mean_kl) and recall is None and border_recall is None:
        return None
    return Summary(
        length=length,
        name=name,
        threshold=threshold,
        first_token_ms=timed_rows[0]["cab_ms"] if timed_rows else None,
        speedup=timed_rows[0]["dense_ms"] / timed_rows[0]["cab_ms"] if timed_rows else None,
        kl=None if isnan(mean_kl) else mean_kl,
        recall=recall,
        border_recall=border_recall,
        density=fmean(densities) if densities else None,
        peak_gib=timed_rows[0]["cab_peak_gib"] if timed_rows else None,
    )


def find_densities(rows: Sequence[Row], length: int, threshold: float) -> list[float]:
    """Return the density of each layer in the first row with densities; [] without such a row.

    The density of a layer that attends densely is 1.
    """
    density_rows = select_rows(rows, measure="ttft", length=length, threshold=threshold)
    density_rows += select_rows(rows, measure="kl", length=length, threshold=threshold, method=CAB)
    return (
        [1.0 if density is None else density for density in density_rows[0]["densities"]]
        if density_rows
        else []
    )


def make_advised_config(base_config: CabConfig, conclusions: Verdict) -> CabConfig:
    """Return ``base_config`` with the advised ``mass_threshold`` and ``min_length``.

    ``min_length`` is the length from which CAB pays. If CAB does not pay, ``min_length`` exceeds
    all measured lengths.
    """
    min_length = conclusions.pays_from_length
    if min_length is None:
        min_length = max(base_config.min_length, 2 * (conclusions.longest_timed_length or 0))
    return base_config.changed(mass_threshold=conclusions.threshold, min_length=min_length)


def write_advice(
    rows: Sequence[Row],
    conclusions: Verdict,
    summaries: Sequence[Summary],
    target_kl: float,
    device_name: str,
) -> str:
    """Return the advice of the report as one sentence.

    Args:
        rows: measured rows.
        conclusions: the conclusions from the rows.
        summaries: `list_summaries` of the rows.
        target_kl: the accepted KL in nats per token; 0 without a target.
        device_name: name of the device.
    """
    if conclusions.longest_timed_length is None:
        return f"On {device_name}, nothing was timed within the given minutes: raise --minutes."
    fact_phrases = "; ".join(_list_facts(rows, conclusions, summaries, target_kl))
    threshold_phrase = f"mass_threshold={conclusions.threshold:g}"
    if conclusions.is_close_enough is False and not conclusions.is_search_complete:
        return (
            f"On {device_name}, raise --minutes and run the same command again, because the search "
            f"for a mass_threshold with a KL of at most {target_kl:g} has not ended "
            f"({threshold_phrase}: {fact_phrases})."
        )
    if conclusions.is_close_enough is False:
        return (
            f"On {device_name}, keep dense attention: no measured mass_threshold has a KL of at "
            f"most {target_kl:g} at every length ({threshold_phrase}: {fact_phrases})."
        )
    if conclusions.pays_from_length is None:
        return (
            f"On {device_name}, keep dense attention up to "
            f"{conclusions.longest_timed_length:,} tokens, because CAB saves no time there "
            f"({threshold_phrase}: {fact_phrases})."
        )
    start_phrase = (
        "all measured lengths, from" if conclusions.is_upper_bound else "prompts from about"
    )
    length_phrase = f"{start_phrase} {conclusions.pays_from_length:,} tokens"
    return f"On {device_name}, use CAB with {threshold_phrase} for {length_phrase}: {fact_phrases}."


def _list_facts(
    rows: Sequence[Row], conclusions: Verdict, summaries: Sequence[Summary], target_kl: float
) -> list[str]:
    """Return the clauses of `write_advice` on the longest timed length: speed-up, KL and recall."""
    length = conclusions.longest_timed_length
    threshold_summaries = [
        summary
        for summary in summaries
        if summary.length == length and summary.threshold is not None
    ]
    # prefer the advised threshold; its speed-up may be missing at this length
    threshold_summaries.sort(key=lambda summary: summary.threshold != conclusions.threshold)
    best_summary = threshold_summaries[0]
    dense_summary = next(
        summary for summary in summaries if summary.length == length and summary.threshold is None
    )
    kernel_name = select_rows(rows, measure="ttft", length=length)[0]["kernel"]
    timed_summary = next(summary for summary in threshold_summaries if summary.speedup is not None)
    threshold_note = (
        ""
        if timed_summary is best_summary
        else f" (with mass_threshold={timed_summary.threshold:g})"
    )
    fact_phrases = [
        f"at {length:,} tokens the first token comes {timed_summary.speedup:.2f} times as fast as "
        f"with {kernel_name}{threshold_note}"
    ]
    if best_summary.kl is not None:
        reference_phrases = [f"target {target_kl:g}"] if target_kl else []
        noise_kl = compute_mean_kl(rows, length, None, FULL)
        reference_phrases += [] if isnan(noise_kl) else [f"noise {noise_kl:.2g}"]
        reference_note = f" ({', '.join(reference_phrases)})" if reference_phrases else ""
        fact_phrases.append(f"KL is {best_summary.kl:.3g}{reference_note}")
    if best_summary.recall or best_summary.border_recall:
        fact_phrases.append(_describe_recall(best_summary, dense_summary))
    return fact_phrases


def _describe_recall(sparse_summary: Summary, dense_summary: Summary) -> str:
    """Return a clause on how many keys CAB and dense attention answer correctly."""
    counts_by_position = {
        "in running text": (sparse_summary.recall, dense_summary.recall),
        "at block starts": (sparse_summary.border_recall, dense_summary.border_recall),
    }
    recall_clauses = []
    for position, (key_counts, dense_key_counts) in counts_by_position.items():
        if key_counts:
            num_found, num_keys = key_counts
            dense_note = f" (dense {dense_key_counts[0]})" if dense_key_counts else ""
            recall_clauses.append(f"{num_found}{dense_note} of {num_keys} keys {position}")
    return f"CAB finds {' and '.join(recall_clauses)}"
