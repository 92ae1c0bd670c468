"""The picture of README.md: the plan of one head, and seconds to the first token.

``python -m cab_hf.eval.picture --text FILE`` computes the plan and writes it to a file of results.
``python -m cab_hf.eval readme`` draws the picture from that file and from the times of `TIMES`.
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
from cab_hf.experiment.provenance import device_name, file_identity, git_commit, versions
from cab_hf.experiment.settings import option, read_settings

PLAN, PICTURE = "plan.json", "picture.png"
TIMES = "speed-ttft"
LENGTHS = (32_768, 131_072)
DENSE, SPARSE = "0.62", "#1764ab"


@dataclass(frozen=True)
class Settings:
    """The head whose plan is drawn, and the prompt."""

    text: str = option("licences.txt", "the file with the prompt; a short file is repeated")
    model: str = option("smollm2-32k", "the name of the model")
    length: int = option(LENGTHS[0], "tokens of the prompt", int)
    layer: int = option(5, "index of the layer", int)
    head: int = option(2, "index of the query head", int)
    device: str = option("cpu", "device of the model")
    out: str = option(str(Path(__file__).parent / "results" / PLAN), "the file to write")


def measure(settings: Settings) -> dict[str, Any]:
    """Return the plan of one head for a prompt, a hexadecimal number per query block."""
    import numpy
    import torch

    from cab_hf.experiment.loading import load_model
    from cab_hf.patches.plotting import _plan_of

    # before anything is edited during the run
    provenance = {
        "device": device_name(torch.device(settings.device)),
        "commit": git_commit(),
        "versions": versions(),
        "text": file_identity(settings.text),
    }
    model, tokenizer = load_model(settings.model, device=settings.device)
    ids = tokenizer(Path(settings.text).read_text(errors="ignore"), return_tensors="pt").input_ids
    ids = ids.repeat(1, -(-settings.length // ids.shape[1]))[:, : settings.length]
    plan, heads = _plan_of(model, ids, settings.layer)
    plan = plan.select_heads([settings.head // plan.shared_by(heads)])
    listed = numpy.packbits(plan.to_dense()[0, 0].cpu().numpy(), axis=-1)
    chosen = {
        name: value for name, value in asdict(settings).items() if name not in ("out", "text")
    }
    blocks = {"query_block": plan.query_block, "key_block": plan.key_block}
    rows = [row.tobytes().hex() for row in listed]
    return {**chosen, **blocks, "density": plan.density(), "provenance": provenance, "rows": rows}


def draw(results: Path) -> None:
    """Draw the picture from the files in ``results``."""
    import numpy

    plan = json.loads((results / PLAN).read_text())
    packed = numpy.array([list(bytes.fromhex(row)) for row in plan["rows"]], dtype=numpy.uint8)
    listed = numpy.unpackbits(packed, axis=-1).astype(bool)
    times = [
        row
        for row in read_results(results / TIMES).rows
        if row["implementation"] == "cab" and row["length"] in LENGTHS
    ]
    with charts.figure(results / PICTURE, 1, 2, figsize=(10, 4.2)) as ((left, right),):
        _draw_plan(left, listed, plan)
        _draw_times(right, times)


def _draw_plan(axis: Any, listed: Any, plan: dict[str, Any]) -> None:
    """Draw the listed blocks in blue, other causal blocks in grey."""
    import numpy

    rows, columns = listed.shape
    last_key = numpy.arange(1, rows + 1)[:, None] * plan["query_block"]
    causal = numpy.arange(columns) * plan["key_block"] < last_key
    image = numpy.ones((rows, columns, 3))
    image[causal] = (0.88, 0.88, 0.88)
    image[listed] = (0.09, 0.39, 0.67)
    edge = plan["length"]
    axis.imshow(image, extent=(0, edge, edge, 0), interpolation="nearest")
    ticks = range(0, edge + 1, edge // 4)
    axis.set_xticks(ticks, [charts.short(tick) for tick in ticks])
    axis.set_yticks(ticks, [charts.short(tick) for tick in ticks])
    axis.set_xlabel("key position, tokens")
    axis.set_ylabel("query position, tokens")
    axis.set_title(
        f"One head attends to {100 * plan['density']:.0f} % of the causal pairs (blue)",
        fontsize=11,
    )
    axis.spines[["top", "right"]].set_visible(False)


def _draw_times(axis: Any, times: Sequence[dict[str, Any]]) -> None:
    """Draw bars of dense attention and of CAB for each prompt length."""
    width = 0.3
    for place, row in enumerate(times):
        dense, sparse = row["baseline_ms"] / 1000, row["ms"] / 1000
        first = place == 0
        axis.bar(place - width / 2, dense, width, color=DENSE, label="dense" if first else None)
        axis.bar(place + width / 2, sparse, width, color=SPARSE, label="CAB" if first else None)
        at = {"ha": "center", "va": "bottom", "fontsize": 11}
        axis.text(place - width / 2, dense, f"{dense:.1f} s", **at)
        faster = f"{row['over_best']:.1f} × faster\n{sparse:.1f} s"
        aside = {**at, "ha": "left"}
        axis.text(place + 0.02, sparse, faster, color=SPARSE, weight="bold", **aside)
    axis.set_xticks(range(len(times)), [f"{charts.short(row['length'])} tokens" for row in times])
    axis.set_xlim(-0.5, len(times) - 0.5)
    axis.set_ylim(0, 1.1 * max(row["baseline_ms"] for row in times) / 1000)
    axis.set_ylabel("seconds")
    axis.set_title("Time to the first token, shape of LLaMA-3-8B", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left", fontsize=11)


def main(words: Sequence[str]) -> int:
    """Compute the plan of one head and write it to a file; return the exit status."""
    settings = read_settings(Settings, words, "python -m cab_hf.eval.picture")
    write_atomically(settings.out, json.dumps(measure(settings), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
