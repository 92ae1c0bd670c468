"""The figure of `fidelity`: scores by attention time or density, one row of panels per text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from cab_hf.data.tasks import TASKS
from cab_hf.eval import charts, probes
from cab_hf.eval.experiment import Row
from cab_hf.eval.fidelity_report import KL_FIELDS, RATIO_FIELDS
from cab_hf.eval.fidelity_settings import find_method_class
from cab_hf.eval.methods import Cab, Dense
from cab_hf.eval.report import group_rows

# fields of a probe's result: the share of right answers, and the ends of its 95 % interval
SHARE_FIELDS = ("share", "low", "high")
# probe -> title of its panel, and the fields of the drawn value and of the ends of its interval
PROBE_PANELS = {
    probes.CONTINUATION: ("KL after the prompt", KL_FIELDS),
    probes.ASKED: ("recall after the prompt", SHARE_FIELDS),
    probes.TURNS: ("KL over turns", KL_FIELDS),
    probes.DECODE: ("KL of decoding", KL_FIELDS),
    probes.DECODE_ASKED: ("recall in decoding", SHARE_FIELDS),
    probes.GREEDY: ("equal continuations", SHARE_FIELDS),
    probes.RECALL: ("recall in the prompt", SHARE_FIELDS),
    probes.RECALL_BORDER: ("recall at block starts", SHARE_FIELDS),
    probes.PASS: ("pass", SHARE_FIELDS),
    probes.PERPLEXITY: ("perplexity / dense", RATIO_FIELDS),
    probes.PERPLEXITY_BORDER: ("block-start perplexity / dense", RATIO_FIELDS),
}
# field of a row on the horizontal axis -> label of the axis
X_LABELS = {
    "density": "density",
    "over_dense": "attention time / dense",
    "step_share": "share of the text read per step",
}
MARKERS = "osv^DPX*<>p"
# largest offset of a marker from the tick of its task; ticks have the distance 1
MAX_TICK_OFFSET = 0.38
MIN_X_RANGE = 0.1  # smallest range of the horizontal axis, where 1 is dense attention
POINT_STYLE = {"markersize": 5, "elinewidth": 0.6}
Styles = Mapping[str, Mapping[str, Any]]  # method -> line style in all panels


def draw_figure(path: Path, rows: Sequence[Row]) -> None:
    """Draw one row of panels for each text and length.

    A row has one panel per measured probe, and one panel that shows all tasks.
    """
    rows_by_text = group_rows(rows, ["text", "length"])
    task_titles = {
        name: task.title for name, task in TASKS.items() if any(row.get(name) for row in rows)
    }
    measured_probes = [probe for probe in PROBE_PANELS if any(row.get(probe) for row in rows)]
    panels = {
        probe: PROBE_PANELS[probe]
        for probe in measured_probes or ([] if task_titles else PROBE_PANELS)
    }
    panels |= {probes.ALL_TASKS: ("right answers by task", SHARE_FIELDS)} if task_titles else {}
    methods = dict.fromkeys(row["method"] for row in rows if row["method"] != Dense.name)
    styles = {
        method: {
            "color": f"C{i % 10}",
            "marker": MARKERS[i % len(MARKERS)],
            # CAB is drawn in front of other methods
            "zorder": 3 if find_method_class(method) is Cab else 2,
        }
        for i, method in enumerate(methods)
    }
    # the panel of tasks is wider, so that their names fit side by side
    panel_widths = [
        max(1, 0.3 * len(task_titles)) if probe == probes.ALL_TASKS else 1 for probe in panels
    ]
    figure_size = (max(7.2, 3.6 * sum(panel_widths)), 0.9 + 2.9 * len(rows_by_text))
    grid_options = {"figsize": figure_size, "width_ratios": panel_widths}
    with charts.figure(path, len(rows_by_text), len(panels), **grid_options) as axes:
        for row_of_axes, rows_of_text in zip(axes, rows_by_text, strict=True):
            for axis, (probe, (probe_title, estimate_fields)) in zip(
                row_of_axes, panels.items(), strict=True
            ):
                if probe == probes.ALL_TASKS:
                    _draw_tasks(axis, rows_of_text, task_titles, styles)
                else:
                    _draw_probe(
                        axis=axis,
                        rows=rows_of_text,
                        probe=probe,
                        fields=estimate_fields,
                        styles=styles,
                    )
                panel_text = f"{rows_of_text[0]['text']}, {rows_of_text[0]['length']:,} tokens"
                axis.set_title(f"{probe_title}\n{panel_text}", fontsize=9, parse_math=False)
        handle_by_label = {}
        for axis in axes.flat:
            handles, labels = axis.get_legend_handles_labels()
            handle_by_label |= dict(zip(labels, handles, strict=True))
        legend_style = {"loc": "outside upper center", "ncols": 6, "fontsize": 8}
        axes[0, 0].figure.legend(handle_by_label.values(), handle_by_label, **legend_style)


def _draw_probe(
    axis: Any, rows: Sequence[Row], probe: str, fields: tuple[str, str, str], styles: Styles
) -> None:
    """Draw a probe over time or density: a line per method, and a horizontal line for dense.

    Args:
        axis: the axes of the panel.
        rows: rows of one text and length.
        probe: the probe.
        fields: the fields of the drawn value and of the ends of its interval, as in `PROBE_PANELS`.
        styles: method -> line style.
    """
    estimate_field, low_field, high_field = fields
    probe_rows = [row for row in rows if row.get(probe, {}).get(estimate_field) is not None]
    dense_line = {"color": "black", "linestyle": "--", "label": Dense.name}
    for row in probe_rows:
        if row["method"] == Dense.name and estimate_field != "kl":
            axis.axhline(row[probe][estimate_field], **dense_line)
    if estimate_field == "ratio" and any(row["method"] == Dense.name for row in rows):
        axis.axhline(1, **dense_line)
    drawn_rows = [row for row in probe_rows if row["method"] in styles]
    is_timed = bool(drawn_rows) and all(row.get("over_dense") is not None for row in drawn_rows)
    x_field = (
        "step_share" if probe in probes.DECODE_PROBES else "over_dense" if is_timed else "density"
    )
    for method_rows in group_rows(drawn_rows, ["method"]):
        method_rows = sorted(method_rows, key=itemgetter(x_field))
        method = method_rows[0]["method"]
        probe_results = [row[probe] for row in method_rows]
        # scores of a single document have no interval
        error_bars = [
            [
                abs(
                    probe_result.get(end_field, probe_result[estimate_field])
                    - probe_result[estimate_field]
                )
                for probe_result in probe_results
            ]
            for end_field in (low_field, high_field)
        ]
        estimates = [probe_result[estimate_field] for probe_result in probe_results]
        style = {"label": method, "linewidth": 1.2, **POINT_STYLE, **styles[method]}
        axis.errorbar([row[x_field] for row in method_rows], estimates, error_bars, **style)
    if estimate_field == "share":
        axis.set_ylim(-0.04, 1.04)
    # KL ranges over powers of ten, from that of two exact kernels to that of sparse methods
    if (
        estimate_field == "kl"
        and drawn_rows
        and all(row[probe][estimate_field] > 0 for row in drawn_rows)
    ):
        axis.set_yscale("log", nonpositive="clip")
    x_min, x_max = axis.get_xlim()
    # if all densities are nearly equal, a narrower axis would exaggerate their differences
    margin = max(0.0, MIN_X_RANGE - (x_max - x_min)) / 2
    axis.set_xlim(x_min - margin, x_max + margin)
    axis.set_xlabel(X_LABELS[x_field], fontsize=8)
    axis.grid(alpha=0.25)


def _draw_tasks(axis: Any, rows: Sequence[Row], titles: Mapping[str, str], styles: Styles) -> None:
    """Draw the share of right answers by task: a marker per row, and a dashed line for dense.

    Args:
        axis: the axes of the panel.
        rows: rows of one text and length.
        titles: task -> label of its tick.
        styles: method -> line style.
    """
    marked_rows = [row for row in rows if row["method"] != Dense.name]
    for tick, task in enumerate(titles):
        for row in (row for row in rows if row.get(task) is not None):
            share, low, high = (row[task][field] for field in SHARE_FIELDS)
            if row["method"] == Dense.name:
                axis.hlines(
                    y=share,
                    xmin=tick - MAX_TICK_OFFSET,
                    xmax=tick + MAX_TICK_OFFSET,
                    colors="black",
                    linestyles="--",
                    label=Dense.name,
                )
                continue
            # position of the row's marker around the tick, from -0.5 to 0.5
            offset = (marked_rows.index(row) + 0.5) / len(marked_rows) - 0.5
            style = {
                "label": row["method"],
                "linestyle": "",
                **POINT_STYLE,
                **styles[row["method"]],
            }
            error_bar = [[abs(low - share)], [abs(high - share)]]
            axis.errorbar([tick + 2 * MAX_TICK_OFFSET * offset], [share], error_bar, **style)
    axis.set_xticks(range(len(titles)), titles.values(), fontsize=8)
    axis.set_xlim(-0.5, len(titles) - 0.5)
    axis.set_ylim(-0.04, 1.04)
    axis.grid(alpha=0.25, axis="y")
