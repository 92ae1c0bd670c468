"""The picture of README.md: blocks that one head selects, and seconds to the first token.

``python -m cab_hf.eval.picture --text FILE`` computes the selected blocks (the plan) and writes
them to ``plan.json``. ``python -m cab_hf.eval readme`` draws the picture from ``plan.json`` and
from the times in the result folder `TIMES_FOLDER`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cab_hf.eval import charts
from cab_hf.eval.result_folders import read_results
from cab_hf.experiment.log import write_atomically
from cab_hf.experiment.provenance import device_name, file_identity, git_commit, package_versions
from cab_hf.experiment.settings import option, read_settings

PLAN_FILE, PICTURE_FILE = "plan.json", "picture.png"
TIMES_FOLDER = "speed-ttft"
DRAWN_LENGTHS = (32_768, 131_072)
DENSE_COLOUR, CAB_COLOUR = "0.62", "#1764ab"


@dataclass(frozen=True)
class Settings:
    """Options: the attention head whose selected blocks are drawn, and the prompt."""

    text: str = option("licences.txt", "the file with the prompt; a short file is repeated")
    model: str = option("smollm2-32k", "the name of the model")
    length: int = option(DRAWN_LENGTHS[0], "tokens of the prompt", int)
    layer: int = option(5, "index of the layer", int)
    head: int = option(2, "index of the query head", int)
    device: str = option("cpu", "device of the model")
    out: str = option(str(Path(__file__).parent / "results" / PLAN_FILE), "the file to write")


def compute_plan(settings: Settings) -> dict[str, Any]:
    """Return the content of ``plan.json``: settings, provenance, and the plan of one head.

    ``rows`` contains a hexadecimal string per query block. Its bit j, from the left, is 1 if key
    block j is selected.
    """
    import numpy
    import torch

    from cab_hf.experiment.loading import load_model
    from cab_hf.patches.plotting import _select_plan

    # read the commit first, because the working tree may change during the run
    provenance = {
        "device": device_name(torch.device(settings.device)),
        "commit": git_commit(),
        "versions": package_versions(),
        "text": file_identity(settings.text),
    }
    model, tokenizer = load_model(settings.model, device=settings.device)
    ids = tokenizer(Path(settings.text).read_text(errors="ignore"), return_tensors="pt").input_ids
    ids = ids.repeat(1, -(-settings.length // ids.shape[1]))[:, : settings.length]
    plan, num_heads = _select_plan(model, ids, settings.layer)
    plan = plan.select_heads([settings.head // plan.shared_by(num_heads)])
    packed_rows = numpy.packbits(plan.to_dense()[0, 0].cpu().numpy(), axis=-1)
    recorded_settings = {
        name: value for name, value in asdict(settings).items() if name not in ("out", "text")
    }
    return {
        **recorded_settings,
        "query_block": plan.query_block,
        "key_block": plan.key_block,
        "density": plan.density(),
        "provenance": provenance,
        "rows": [block_row.tobytes().hex() for block_row in packed_rows],
    }


def draw_picture(results: Path) -> None:
    """Draw the picture from the files in ``results``, the folder of all results."""
    import numpy

    plan = json.loads((results / PLAN_FILE).read_text())
    packed_rows = numpy.array([list(bytes.fromhex(row)) for row in plan["rows"]], dtype=numpy.uint8)
    is_selected = numpy.unpackbits(packed_rows, axis=-1).astype(bool)
    time_rows = [
        row
        for row in read_results(results / TIMES_FOLDER).rows
        if row["implementation"] == "cab" and row["length"] in DRAWN_LENGTHS
    ]
    with charts.figure(results / PICTURE_FILE, 1, 2, figsize=(10, 4.2)) as (
        (left_axes, right_axes),
    ):
        _draw_plan(left_axes, is_selected, plan)
        _draw_times(right_axes, time_rows)


def _draw_plan(axis: Any, is_selected: Any, plan: dict[str, Any]) -> None:
    """Draw the selected blocks in blue, and all other causal blocks in grey.

    Args:
        axis: the axes.
        is_selected: bool [query blocks, key blocks].
        plan: the content of ``plan.json``.
    """
    import numpy

    num_query_blocks, num_key_blocks = is_selected.shape
    query_block_ends = numpy.arange(1, num_query_blocks + 1)[:, None] * plan["query_block"]
    is_causal = numpy.arange(num_key_blocks) * plan["key_block"] < query_block_ends
    image = numpy.ones((num_query_blocks, num_key_blocks, 3))
    image[is_causal] = (0.88, 0.88, 0.88)
    image[is_selected] = (0.09, 0.39, 0.67)
    length = plan["length"]
    axis.imshow(image, extent=(0, length, length, 0), interpolation="nearest")
    ticks = range(0, length + 1, length // 4)
    axis.set_xticks(ticks, [charts.format_tokens(tick) for tick in ticks])
    axis.set_yticks(ticks, [charts.format_tokens(tick) for tick in ticks])
    axis.set_xlabel("key position, tokens")
    axis.set_ylabel("query position, tokens")
    axis.set_title(
        f"One head attends to {100 * plan['density']:.0f} % of the causal pairs (blue)",
        fontsize=11,
    )
    axis.spines[["top", "right"]].set_visible(False)


def _draw_times(axis: Any, time_rows: Sequence[dict[str, Any]]) -> None:
    """Draw bars of the seconds of dense attention and of CAB for each prompt length."""
    bar_width = 0.3
    for tick, row in enumerate(time_rows):
        dense_s, cab_s = row["baseline_ms"] / 1000, row["ms"] / 1000
        # label only the first two bars, because each label adds an entry to the legend
        labels = ("dense", "CAB") if tick == 0 else (None, None)
        axis.bar(tick - bar_width / 2, dense_s, bar_width, color=DENSE_COLOUR, label=labels[0])
        axis.bar(tick + bar_width / 2, cab_s, bar_width, color=CAB_COLOUR, label=labels[1])
        text_style = {"va": "bottom", "fontsize": 11}
        axis.text(tick - bar_width / 2, dense_s, f"{dense_s:.1f} s", ha="center", **text_style)
        speedup_text = f"{row['over_best']:.1f} × faster\n{cab_s:.1f} s"
        axis.text(
            tick + 0.02,
            cab_s,
            speedup_text,
            ha="left",
            color=CAB_COLOUR,
            weight="bold",
            **text_style,
        )
    axis.set_xticks(
        range(len(time_rows)),
        [f"{charts.format_tokens(row['length'])} tokens" for row in time_rows],
    )
    axis.set_xlim(-0.5, len(time_rows) - 0.5)
    axis.set_ylim(0, 1.1 * max(row["baseline_ms"] for row in time_rows) / 1000)
    axis.set_ylabel("seconds")
    axis.set_title("Time to the first token, shape of LLaMA-3-8B", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left", fontsize=11)


def main(arguments: Sequence[str]) -> int:
    """Compute the plan of one head and write ``plan.json``; return the exit status."""
    settings = read_settings(Settings, arguments, "python -m cab_hf.eval.picture")
    write_atomically(settings.out, json.dumps(compute_plan(settings), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
