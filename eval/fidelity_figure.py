"""The figure of `fidelity`: quality over attention time or density, one row of panels per text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from cab_hf.data.tasks import TASKS
from cab_hf.eval import charts, probes
from cab_hf.eval.experiment import Row
from cab_hf.eval.fidelity_report import KL, RATIO
from cab_hf.eval.fidelity_settings import kind_of
from cab_hf.eval.methods import Cab, Dense
from cab_hf.eval.report import grouped

# fields of a value and the edges of its interval
SHARE = ("share", "low", "high")
# probe -> panel title and drawn fields
DRAWN = {
    probes.CONTINUATION: ("KL after the prompt", KL),
    probes.ASKED: ("recall after the prompt", SHARE),
    probes.TURNS: ("KL over turns", KL),
    probes.DECODE: ("KL of decoding", KL),
    probes.DECODE_ASKED: ("recall in decoding", SHARE),
    probes.GREEDY: ("equal continuations", SHARE),
    probes.RECALL: ("recall in the prompt", SHARE),
    probes.RECALL_BORDER: ("recall at block starts", SHARE),
    probes.PASS: ("pass", SHARE),
    probes.PERPLEXITY: ("perplexity / dense", RATIO),
    probes.PERPLEXITY_BORDER: ("block-start perplexity / dense", RATIO),
}
# label of the horizontal axis
ACROSS = {
    "density": "density",
    "over_dense": "attention time / dense",
    "step_share": "share of the text read per step",
}
MARKERS = "osv^DPX*<>p"
SPREAD = 0.38  # offset around the middle of markers drawn side by side; middles are 1 apart
NARROWEST = 0.1  # smallest width of a panel, as a share of dense attention
POINT = {"markersize": 5, "elinewidth": 0.6}
Looks = Mapping[str, Mapping[str, Any]]  # method -> line style in all panels


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw one row of panels per text and length: one panel per probe and one for all tasks."""
    panels = grouped(rows, "text", "length")
    tasks = {name: task.title for name, task in TASKS.items() if any(x.get(name) for x in rows)}
    asked = [probe for probe in DRAWN if any(row.get(probe) for row in rows)]
    columns = {probe: DRAWN[probe] for probe in asked or ([] if tasks else DRAWN)}
    columns |= {probes.ALL_TASKS: ("right answers by task", SHARE)} if tasks else {}
    names = dict.fromkeys(row["method"] for row in rows if row["method"] != Dense.name)
    looks = {
        name: {
            "color": f"C{i % 10}",
            "marker": MARKERS[i % len(MARKERS)],
            # in front of the others
            "zorder": 3 if kind_of(name) is Cab else 2,
        }
        for i, name in enumerate(names)
    }
    # names of tasks are side by side
    widths = [max(1, 0.3 * len(tasks)) if probe == probes.ALL_TASKS else 1 for probe in columns]
    size = (max(7.2, 3.6 * sum(widths)), 0.9 + 2.9 * len(panels))
    grid = {"figsize": size, "width_ratios": widths}
    with charts.figure(path, len(panels), len(columns), **grid) as axes:
        for beside, own in zip(axes, panels, strict=True):
            for axis, (probe, (title, values)) in zip(beside, columns.items(), strict=True):
                if probe == probes.ALL_TASKS:
                    _by_name(axis, own, tasks, looks)
                else:
                    _panel(axis, own, probe, values, looks)
                where = f"{own[0]['text']}, {own[0]['length']:,} tokens"
                axis.set_title(f"{title}\n{where}", fontsize=9, parse_math=False)
        drawn_panels = {}
        for axis in axes.flat:
            handles, labels = axis.get_legend_handles_labels()
            drawn_panels |= dict(zip(labels, handles, strict=True))
        above = {"loc": "outside upper center", "ncols": 6, "fontsize": 8}
        axes[0, 0].figure.legend(drawn_panels.values(), drawn_panels, **above)


def _panel(
    axis: Any, rows: Sequence[Row], probe: str, values: tuple[str, str, str], looks: Looks
) -> None:
    """Draw a probe over time or density, one line per method and a horizontal dense line."""
    value, low, high = values
    results = [row for row in rows if row.get(probe, {}).get(value) is not None]
    level = {"color": "black", "linestyle": "--", "label": Dense.name}
    for row in results:
        if row["method"] == Dense.name and value != "kl":
            axis.axhline(row[probe][value], **level)
    if value == "ratio" and any(row["method"] == Dense.name for row in rows):
        axis.axhline(1, **level)
    drawn_rows = [row for row in results if row["method"] in looks]
    timed = bool(drawn_rows) and all(row.get("over_dense") is not None for row in drawn_rows)
    across = "step_share" if probe in probes.DECODES else "over_dense" if timed else "density"
    for own in grouped(drawn_rows, "method"):
        own = sorted(own, key=itemgetter(across))
        parts, name = [row[probe] for row in own], own[0]["method"]
        # a single document has no interval
        reach = [
            [abs(each.get(edge, each[value]) - each[value]) for each in parts]
            for edge in (low, high)
        ]
        heights = [each[value] for each in parts]
        look = {"label": name, "linewidth": 1.2, **POINT, **looks[name]}
        axis.errorbar([row[across] for row in own], heights, reach, **look)
    if value == "share":
        axis.set_ylim(-0.04, 1.04)
    # differences of methods and of kernels are some powers of ten apart
    if value == "kl" and drawn_rows and all(row[probe][value] > 0 for row in drawn_rows):
        axis.set_yscale("log", nonpositive="clip")
    left, right = axis.get_xlim()
    # matched shares differ by less than is significant
    missing = max(0.0, NARROWEST - (right - left)) / 2
    axis.set_xlim(left - missing, right + missing)
    axis.set_xlabel(ACROSS[across], fontsize=8)
    axis.grid(alpha=0.25)


def _by_name(axis: Any, rows: Sequence[Row], titles: Mapping[str, str], looks: Looks) -> None:
    """Draw shares with intervals by name, one marker per row; dense attention is a level.

    Args:
        titles: field of a row with a `SHARE` -> its title.
    """
    marked = [row for row in rows if row["method"] != Dense.name]
    for place, name in enumerate(titles):
        for row in (row for row in rows if row.get(name) is not None):
            share, low, high = (row[name][field] for field in SHARE)
            if row["method"] == Dense.name:
                edges = place - SPREAD, place + SPREAD
                axis.hlines(share, *edges, "black", "--", label=Dense.name)
                continue
            step = (marked.index(row) + 0.5) / len(marked) - 0.5
            look = {"label": row["method"], "linestyle": "", **POINT, **looks[row["method"]]}
            reach = [[abs(low - share)], [abs(high - share)]]
            axis.errorbar([place + 2 * SPREAD * step], [share], reach, **look)
    axis.set_xticks(range(len(titles)), titles.values(), fontsize=8)
    axis.set_xlim(-0.5, len(titles) - 0.5)
    axis.set_ylim(-0.04, 1.04)
    axis.grid(alpha=0.25, axis="y")
