"""The tables, the figure and the text of the report of a quick check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from cab_hf.eval import charts
from cab_hf.eval.quickcheck.advice import (
    CAB,
    FULL,
    Row,
    Summary,
    compute_mean_kl,
    find_densities,
    list_kl_points,
    select_rows,
)
from cab_hf.experiment.figure import figure

TABLE_HEADINGS = (
    *("tokens", "configuration", "density", "first token, ms", "speed-up", "KL"),
    *("keys in text", "keys at block starts", "peak memory, GiB"),
)
NOT_MEASURED_MARK = "–"
METHOD_PARAGRAPHS = """\
* **First token**: median of alternating runs, from the call of the model to the logits of the last
  token of a prompt. Dense attention uses the fastest kernel that ran at the length.
* **KL**: KL(dense || CAB) in nats per token, for the tokens after a prompt. Dense attention reads
  these tokens. The noise is the same KL for CAB's kernels with every block.
* **Keys**: numbers that the first half of a document assigns to names, and the second half repeats.
  *At block starts*, each answer starts a query block, the hardest case.
* **Density**: attended (query, key) pairs divided by causal pairs, mean over all layers.
* **Peak memory**: allocated memory of the GPU, or resident memory of the process on a CPU."""


def format_table(rows: Sequence[Row], summaries: Sequence[Summary]) -> str:
    """Return the Markdown table of the report, with a line for each summary."""
    return format_markdown_table(
        TABLE_HEADINGS, [_format_cells(rows, summary) for summary in summaries]
    )


def _format_cells(rows: Sequence[Row], summary: Summary) -> list[str]:
    """Return the cells of one summary, in the order of `TABLE_HEADINGS`."""
    if summary.threshold is None:
        timed_rows = select_rows(rows, measure="ttft", length=summary.length)
        configuration = f"dense ({timed_rows[0]['kernel']})" if timed_rows else "dense"
        noise_kl = compute_mean_kl(rows, summary.length, None, FULL)
        kl_text = "0" if isnan(noise_kl) else f"0 (noise {noise_kl:.2g})"
    else:
        advised_mark = " (advised)" if summary.name == "advised" else ""
        configuration = f"CAB, mass_threshold={summary.threshold:g}{advised_mark}"
        kl_text = _format_number(summary.kl, "{:.3g}")
    return [
        f"{summary.length:,}",
        configuration,
        _format_number(summary.density, "{:.2f}"),
        _format_number(
            summary.first_token_ms, "{:,.0f}" if (summary.first_token_ms or 0) >= 100 else "{:.1f}"
        ),
        _format_number(summary.speedup, "{:.2f}"),
        kl_text,
        _format_key_counts(summary.recall),
        _format_key_counts(summary.border_recall),
        _format_number(summary.peak_gib, "{:.2f}"),
    ]


def format_markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    Args:
        headings: heading of each column.
        rows: cells of each line.
    """
    table_lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(str, line_cells))} |" for line_cells in table_lines)


def _format_number(number: float | None, template: str) -> str:
    """Format a number by a template of `str.format`; return a dash for None."""
    return NOT_MEASURED_MARK if number is None else template.format(number)


def _format_key_counts(key_counts: tuple[int, int] | None) -> str:
    """Format (number of right answers, number of keys) as ``9 of 16``; return a dash for None."""
    return NOT_MEASURED_MARK if key_counts is None else f"{key_counts[0]} of {key_counts[1]}"


def format_layer_table(rows: Sequence[Row], threshold: float) -> str:
    """Return the Markdown table of the density of each layer at each length.

    Args:
        rows: all measured rows.
        threshold: the ``mass_threshold`` whose densities are shown.

    Returns:
        The table, or "" if no density was measured.
    """
    lengths = sorted({row["length"] for row in rows})
    densities_by_length = {length: find_densities(rows, length, threshold) for length in lengths}
    densities_by_length = {
        length: densities for length, densities in densities_by_length.items() if densities
    }
    if not densities_by_length:
        return ""
    headings = ["layer", *(f"{length:,} tokens" for length in densities_by_length)]
    densities_by_layer = zip(*densities_by_length.values(), strict=True)
    table_rows = [
        [str(layer), *(f"{density:.2f}" for density in layer_densities)]
        for layer, layer_densities in enumerate(densities_by_layer)
    ]
    return format_markdown_table(headings, table_rows)


def draw_figure(
    path: Path,
    rows: Sequence[Row],
    summaries: Sequence[Summary],
    threshold: float,
    target_kl: float,
) -> None:
    """Draw three panels: time by length, KL by threshold, and density by layer.

    Args:
        path: the file to write.
        rows: all measured rows.
        summaries: the summaries that `format_table` shows.
        threshold: the advised ``mass_threshold``.
        target_kl: the KL that the user accepts, in nats per token; 0 without a target.
    """
    lengths = sorted({summary.length for summary in summaries})
    start_threshold = next(
        (summary.threshold for summary in summaries if summary.threshold is not None), threshold
    )
    colour_by_name = {"dense": "black", "start": "tab:blue", "advised": "tab:orange"}
    with figure(path, 1, 3, figsize=(11, 3.2)) as axes:
        time_axis, kl_axis, density_axis = axes[0]
        for name, colour in colour_by_name.items():
            time_rows = [
                {"length": summary.length, "s": summary.first_token_ms / 1000}
                for summary in summaries
                if summary.name == name and summary.first_token_ms
            ]
            charts.draw_line(time_axis, time_rows, lambda row: row["s"], color=colour, label=name)
        charts.format_token_axes(time_axis, lengths, "time to the first token", "seconds")
        for length in lengths:
            # a logarithmic axis cannot show 0
            kl_points = [
                kl_point
                for kl_point in list_kl_points(rows, length, start_threshold)
                if kl_point.kl > 0
            ]
            if kl_points:
                kl_axis.plot(
                    [kl_point.threshold for kl_point in kl_points],
                    [kl_point.kl for kl_point in kl_points],
                    marker="o",
                    label=f"{length:,} tokens",
                )
            layer_densities = find_densities(rows, length, threshold)
            if layer_densities:
                density_axis.plot(layer_densities, label=f"{length:,} tokens")
        kl_thresholds = [row["threshold"] for row in select_rows(rows, measure="kl", method=CAB)]
        _format_kl_axis(
            kl_axis, kl_thresholds, target_kl, compute_mean_kl(rows, lengths[-1], None, FULL)
        )
        density_axis.set_title(f"density, mass_threshold={threshold:g}", fontsize=10)
        density_axis.set_ylim(0, 1.05)
        density_axis.set_xlabel("layer")
        density_axis.grid(alpha=0.3)
        for axis in (kl_axis, density_axis):
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8)


def _format_kl_axis(
    axis: Any, thresholds: Sequence[float], target_kl: float, noise_kl: float
) -> None:
    """Set title, scales and ticks of the panel with the KL, and draw its horizontal lines.

    Args:
        axis: the axes of the panel.
        thresholds: all measured thresholds, for the ticks.
        target_kl: the KL that the user accepts, drawn as a line; 0 without a target.
        noise_kl: the KL of CAB with every block selected, drawn as a line; NaN if not measured.
    """
    if target_kl:
        axis.axhline(target_kl, color="black", linestyle="--", label="target")
    # if the noise is far below the target, its line would only stretch the axis
    if noise_kl > max(target_kl, 1e-6) / 1000:
        axis.axhline(noise_kl, color="grey", linestyle=":", label="noise")
    axis.set_title("KL, nats per token", fontsize=10)
    axis.set_xlabel("mass_threshold")
    axis.set_xscale("log")
    axis.set_yscale("log")
    # remove minor labels, which overlap the labels of thresholds
    axis.xaxis.set_minor_formatter("")
    axis.set_xticks(
        thresholds, [f"{threshold:g}" for threshold in thresholds], rotation=45, fontsize=8
    )
    axis.grid(alpha=0.3)


def format_report(
    advice_sentence: str,
    tables: Mapping[str, str],
    length_notes: Sequence[str],
    skipped_lines: Sequence[str],
    provenance: Row,
    command_line: str,
) -> str:
    """Return the content of report.md.

    Args:
        advice_sentence: the advice, one sentence.
        tables: heading -> Markdown table. The first table is shown without its heading.
        length_notes: sentences about lengths that were left out.
        skipped_lines: for each step that was not measured, a line with the step and the reason.
        provenance: result of `cab_hf.experiment.provenance.provenance`, and ``finished``, the time
            at which the run finished.
        command_line: the command line that repeats the run.
    """
    (_, first_table), *other_tables = tables.items()
    versions_phrase = ", ".join(
        f"{package_name} {version}" for package_name, version in provenance["versions"].items()
    )
    figure_link = "![time, KL and density](figure.png)"
    paragraphs = ["# Does CAB pay?", advice_sentence, first_table, *length_notes, figure_link]
    paragraphs += [
        f"## {heading}\n\n{table_text}" for heading, table_text in other_tables if table_text
    ]
    if skipped_lines:
        skipped_items = "\n".join(f"* {step}" for step in skipped_lines)
        remedy_sentence = "The same command continues with these steps."
        paragraphs.append(f"## Not measured\n\n{skipped_items}\n\n{remedy_sentence}")
    paragraphs += [
        f"## How it was measured\n\n{METHOD_PARAGRAPHS}",
        f"Made on {provenance['device']} with {versions_phrase}, commit "
        f"{provenance['commit'] or 'unknown'}; finished {provenance['finished']}:",
        f"```\n{command_line}\n```",
    ]
    return "\n\n".join(paragraphs) + "\n"
