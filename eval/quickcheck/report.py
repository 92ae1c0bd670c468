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
    find_densities,
    list_points,
    mean_kl,
    select,
)
from cab_hf.experiment.figure import figure

HEADINGS = (
    *("tokens", "configuration", "density", "first token, ms", "speed-up", "KL"),
    *("keys in text", "keys at block starts", "peak memory, GiB"),
)
NOT_MEASURED = "–"
METHOD = """\
* **First token**: median of alternating runs, from the call of the model to the logits of the last
  token of a prompt. Dense attention uses the fastest kernel that ran at the length.
* **KL**: KL(dense || CAB) in nats per token, for the tokens after a prompt. Dense attention reads
  these tokens. The noise is the same KL for CAB's kernels with every block.
* **Keys**: numbers that the first half of a document assigns to names, and the second half repeats.
  *At block starts*, each answer starts a query block, the hardest case.
* **Density**: attended (query, key) pairs divided by causal pairs, mean over all layers.
* **Peak memory**: allocated memory of the GPU, or resident memory of the process on a CPU."""


def table(rows: Sequence[Row], summaries: Sequence[Summary]) -> str:
    """Return the Markdown table of the report, with a line for each summary."""
    return format_markdown_table(HEADINGS, [_cells(rows, summary) for summary in summaries])


def _cells(rows: Sequence[Row], summary: Summary) -> list[str]:
    """Return the cells of the line of `table` for one summary, in the order of `HEADINGS`."""
    if summary.threshold is None:
        timed = select(rows, measure="ttft", length=summary.length)
        name = f"dense ({timed[0]['kernel']})" if timed else "dense"
        noise = mean_kl(rows, summary.length, None, FULL)
        kl = "0" if isnan(noise) else f"0 (noise {noise:.2g})"
    else:
        mark = " (advised)" if summary.name == "advised" else ""
        name = f"CAB, mass_threshold={summary.threshold:g}{mark}"
        kl = _number(summary.kl, "{:.3g}")
    return [
        f"{summary.length:,}",
        name,
        _number(summary.density, "{:.2f}"),
        _number(summary.ms, "{:,.0f}" if (summary.ms or 0) >= 100 else "{:.1f}"),
        _number(summary.speedup, "{:.2f}"),
        kl,
        _share(summary.recall),
        _share(summary.border),
        _number(summary.peak_gib, "{:.2f}"),
    ]


def format_markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    Args:
        headings: heading of each column.
        rows: cells of each line.
    """
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _number(value: float | None, template: str) -> str:
    """Format a number by a template of `str.format`; return a dash for None."""
    return NOT_MEASURED if value is None else template.format(value)


def _share(keys: tuple[int, int] | None) -> str:
    """Format (number of right answers, number of keys) as ``9 of 16``; return a dash for None."""
    return NOT_MEASURED if keys is None else f"{keys[0]} of {keys[1]}"


def layers(rows: Sequence[Row], threshold: float) -> str:
    """Return the Markdown table of the density of each layer at each length.

    Args:
        rows: all measured rows.
        threshold: the ``mass_threshold`` whose densities are shown.

    Returns:
        The table, or "" if no density was measured.
    """
    lengths = sorted({row["length"] for row in rows})
    densities = {length: find_densities(rows, length, threshold) for length in lengths}
    densities = {length: by_layer for length, by_layer in densities.items() if by_layer}
    if not densities:
        return ""
    headings = ["layer", *(f"{length:,} tokens" for length in densities)]
    by_layer = zip(*densities.values(), strict=True)
    lines = [
        [str(layer), *(f"{density:.2f}" for density in layer_densities)]
        for layer, layer_densities in enumerate(by_layer)
    ]
    return format_markdown_table(headings, lines)


def draw(
    path: Path, rows: Sequence[Row], summaries: Sequence[Summary], threshold: float, target: float
) -> None:
    """Draw three panels: time by length, KL by threshold, and density by layer.

    Args:
        path: the file to write.
        rows: all measured rows.
        summaries: the summaries that `table` shows.
        threshold: the advised ``mass_threshold``.
        target: the KL that the user accepts, in nats per token; 0 without a target.
    """
    lengths = sorted({summary.length for summary in summaries})
    start = next((x.threshold for x in summaries if x.threshold is not None), threshold)
    styles = {"dense": "black", "start": "tab:blue", "advised": "tab:orange"}
    with figure(path, 1, 3, figsize=(11, 3.2)) as axes:
        times, kl, density = axes[0]
        for name, colour in styles.items():
            timed_lengths = [
                {"length": x.length, "s": x.ms / 1000} for x in summaries if x.name == name and x.ms
            ]
            charts.draw_line(times, timed_lengths, lambda row: row["s"], color=colour, label=name)
        charts.format_token_axes(times, lengths, "time to the first token", "seconds")
        for length in lengths:
            # a logarithmic axis cannot show 0
            points = [p for p in list_points(rows, length, start) if p.kl > 0]
            if points:
                kl.plot(
                    [point.threshold for point in points],
                    [point.kl for point in points],
                    marker="o",
                    label=f"{length:,} tokens",
                )
            layer_densities = find_densities(rows, length, threshold)
            if layer_densities:
                density.plot(layer_densities, label=f"{length:,} tokens")
        thresholds = [row["threshold"] for row in select(rows, measure="kl", method=CAB)]
        _kl_axis(kl, thresholds, target, mean_kl(rows, lengths[-1], None, FULL))
        density.set_title(f"density, mass_threshold={threshold:g}", fontsize=10)
        density.set_ylim(0, 1.05)
        density.set_xlabel("layer")
        density.grid(alpha=0.3)
        for axis in (kl, density):
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8)


def _kl_axis(axis: Any, thresholds: Sequence[float], target: float, noise: float) -> None:
    """Set title, scales and ticks of the panel with the KL, and draw its horizontal lines.

    Args:
        axis: the axes of the panel.
        thresholds: all measured thresholds, for the ticks.
        target: the KL that the user accepts, drawn as a line; 0 without a target.
        noise: the KL of CAB with every block selected, drawn as a line; NaN if not measured.
    """
    if target:
        axis.axhline(target, color="black", linestyle="--", label="target")
    # if the noise is far below the target, its line would only stretch the axis
    if noise > max(target, 1e-6) / 1000:
        axis.axhline(noise, color="grey", linestyle=":", label="noise")
    axis.set_title("KL, nats per token", fontsize=10)
    axis.set_xlabel("mass_threshold")
    axis.set_xscale("log")
    axis.set_yscale("log")
    # remove minor labels, which overlap the labels of thresholds
    axis.xaxis.set_minor_formatter("")
    axis.set_xticks(thresholds, [f"{x:g}" for x in thresholds], rotation=45, fontsize=8)
    axis.grid(alpha=0.3)


def report(
    advice: str,
    tables: Mapping[str, str],
    notes: Sequence[str],
    skipped: Sequence[str],
    provenance: Row,
    command: str,
) -> str:
    """Return the content of report.md.

    Args:
        advice: the advice, one sentence.
        tables: heading -> Markdown table. The first table is shown without its heading.
        notes: sentences about lengths that were left out.
        skipped: for each step that was not measured, a line with the step and the reason.
        provenance: result of `cab_hf.experiment.provenance.provenance`, and ``finished``, the time
            at which the run finished.
        command: the command line that repeats the run.
    """
    (_, first), *others = tables.items()
    packages = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    figure_link = "![time, KL and density](figure.png)"
    paragraphs = ["# Does CAB pay?", advice, first, *notes, figure_link]
    paragraphs += [f"## {heading}\n\n{text}" for heading, text in others if text]
    if skipped:
        items = "\n".join(f"* {step}" for step in skipped)
        remedy = "The same command continues with these steps."
        paragraphs.append(f"## Not measured\n\n{items}\n\n{remedy}")
    paragraphs += [
        f"## How it was measured\n\n{METHOD}",
        f"Made on {provenance['device']} with {packages}, commit "
        f"{provenance['commit'] or 'unknown'}; finished {provenance['finished']}:",
        f"```\n{command}\n```",
    ]
    return "\n\n".join(paragraphs) + "\n"
