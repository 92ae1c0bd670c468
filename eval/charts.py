"""Line charts over the number of tokens and heat maps, in the same style in every figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cab_hf.experiment.figure import figure

GREYS = ("black", "dimgrey", "darkgrey", "silver", "gainsboro", "tan", "wheat")
# largest total number of columns of the heat maps that are drawn side by side
MAX_GRID_COLUMNS = 24
# cells of heat maps with more columns show a colour only, without a number
MAX_ANNOTATED_COLUMNS = 20


def draw_line(
    axis: Any,
    rows: Sequence[Mapping[str, Any]],
    get_value: Callable[[Mapping[str, Any]], float | None],
    **style: Any,
) -> None:
    """Draw a line with one point per row, whose x is the field ``length`` of the row.

    Args:
        axis: the axes.
        rows: rows with a ``length``.
        get_value: function from a row to the y of its point; rows with None or 0 have no point.
        style: keyword arguments of matplotlib's `plot`.
    """
    # a logarithmic axis cannot show 0
    drawn_rows = [row for row in rows if get_value(row)]
    if drawn_rows:
        lengths, values = (
            [row["length"] for row in drawn_rows],
            [get_value(row) for row in drawn_rows],
        )
        axis.plot(lengths, values, **{"marker": "o", "markersize": 4, **style})


def format_token_axes(
    axis: Any,
    lengths: Sequence[int],
    title: str,
    y_label: str,
    format_value: Callable[[float], str] = "{:g}".format,
    is_logarithmic: bool = True,
    has_legend: bool = True,
) -> None:
    """Set title, scales, ticks, grid and legend of axes whose x is a number of tokens.

    Args:
        axis: the axes.
        lengths: the x of all points, from which the ticks are chosen.
        title: title of the axes.
        y_label: label of the vertical axis.
        format_value: function that formats the tick labels of the vertical axis.
        is_logarithmic: True for a logarithmic vertical axis.
        has_legend: True for a legend of the labelled lines.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_title(title, fontsize=10)
    axis.set_ylabel(y_label)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tokens")
    axis.set_xticks(choose_ticks(lengths))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda length, _: format_tokens(length)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    if is_logarithmic:
        axis.set_yscale("log")
        y_min, y_max = axis.get_ylim()
        # a narrow range contains too few powers of ten, so it also gets ticks at 2 and 5
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if y_max < 300 * y_min else (1,)))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
    axis.grid(which="major", alpha=0.3)
    if has_legend and axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, handlelength=3)


def choose_ticks(lengths: Iterable[float]) -> list[float]:
    """Return ascending ticks, without each length whose label would overlap the next label."""
    ascending_lengths = sorted(set(lengths))
    next_lengths = [*ascending_lengths[1:], math.inf]
    return [
        tick
        for tick, next_length in zip(ascending_lengths, next_lengths, strict=True)
        if next_length > 1.2 * tick
    ]


def format_tokens(length: float) -> str:
    """Format a number of tokens as 512, 64k or 1M."""
    for unit_tokens, unit_letter in ((2**20, "M"), (2**10, "k")):
        if length >= unit_tokens:
            return f"{length / unit_tokens:g}{unit_letter}"
    return f"{length:g}"


def draw_heatmap(
    path: Path | str,
    panels: Mapping[str, Mapping[tuple[float, float], float]],
    x_label: str,
    y_label: str,
) -> None:
    """Draw one heat map per panel, of values from 0 to 1.

    All panels have the same axes. Cells also show their value as a percentage if a panel has at
    most `MAX_ANNOTATED_COLUMNS` columns.

    Args:
        path: the file to write.
        panels: title of the panel -> {(x, y): value of the cell}.
        x_label: label of the horizontal axes.
        y_label: label of the vertical axes.
    """
    cells = {cell for cell_values in panels.values() for cell in cell_values}
    xs, ys = (sorted({cell[dimension] for cell in cells}) for dimension in (0, 1))
    num_rows = -(-len(panels) // max(2, MAX_GRID_COLUMNS // (len(xs) + 1)))
    num_columns = -(-len(panels) // num_rows)
    is_annotated = len(xs) <= MAX_ANNOTATED_COLUMNS
    cell_width = 0.5 if is_annotated else 0.22
    figure_height = 1.2 + num_rows * (0.4 + 0.22 * len(ys))
    figure_size = (1.6 + num_columns * (0.6 + cell_width * len(xs)), figure_height)
    with figure(path, num_rows, num_columns, figsize=figure_size, sharey=True) as axes:
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, (title, shares) in zip(axes.flat, panels.items(), strict=False):
            cell_values = [[shares.get((x, y), math.nan) for x in xs] for y in ys]
            image = axis.imshow(cell_values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axis.set_title(title, fontsize=9)
            axis.set_xticks(range(len(xs)), [f"{round(x, 2):g}" for x in xs], fontsize=7)
            axis.set_yticks(range(len(ys)), [f"{round(y, 2):g}" for y in ys], fontsize=7)
            for (x, y), share in shares.items() if is_annotated else ():
                cell_indices = (xs.index(x), ys.index(y))
                text_colour = "white" if share < 0.6 else "black"
                text_style = {"ha": "center", "va": "center", "fontsize": 6, "color": text_colour}
                axis.annotate(f"{share:.0%}", cell_indices, **text_style)
        whole_figure = axes[0, 0].figure
        whole_figure.supxlabel(x_label, fontsize=9)
        whole_figure.supylabel(y_label, fontsize=9)
        whole_figure.colorbar(image, ax=axes, label="share")
