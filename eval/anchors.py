"""What ``calibrate --anchors`` shows: which layers choose blocks for which, and what that keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from cab_hf.config import CabConfig
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.on_model import refusing
from cab_hf.eval.report import grouped, markdown_table
from cab_hf.predictors.anchors import Kept, cascaded, gains, similarity

DIGITS = 5  # that count, of what is recorded


def recorded(kept: Kept) -> dict[str, Any]:
    """`Kept` as a sample holds it."""
    return {name: _short(x.tolist()) for name, x in kept._asdict().items()}


def averaged(samples: Sequence[Row], share: float) -> Kept:
    """The mean over documents of what was kept at a share."""
    told = [sample["kept"][f"{share:g}"] for sample in samples]
    return Kept(
        *(
            torch.tensor([each[name] for each in told], dtype=torch.float64).mean(0)
            for name in Kept._fields
        )
    )


def config_of(samples: Sequence[Row], settings: Mapping[str, Any], share: float) -> CabConfig:
    """The cascade that the samples tell, for a share of every row."""
    config, first = CabConfig.from_dict(settings["cab_config"]), samples[0]
    kept = averaged(samples, share)
    with refusing("anchors"):
        return cascaded(
            config, kept, first["measured"], first["layers"], settings["anchors"], share
        )


def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a (target, anchor, layer): what the blocks of one keep of the other's attention."""
    measured, made = samples[0]["measured"], []
    for share in settings["target_densities"]:
        kept = averaged(samples, share)
        mass, needle = similarity(kept, gains(kept))
        anchors = config_of(samples, settings, share).anchors
        for a, anchor in enumerate(measured):
            for b, layer in enumerate(measured[a:], start=a):
                chosen = max(each for each in anchors if each <= layer) == anchor
                found = {"mass": float(mass[a, b]), "needle": float(needle[a, b])}
                place = {"target": share, "anchor": anchor, "layer": layer, "chosen": chosen}
                made.append({**place, **found, "importance": float(kept.importance[b])})
    return made


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """A row a target: the anchors, and what the layers behind them keep."""
    made = []
    for some in grouped(rows, "target"):
        chosen = [row for row in some if row["chosen"]]
        own = [row for row in chosen if row["anchor"] == row["layer"]]
        behind = [row for row in chosen if row["anchor"] != row["layer"]]
        place = {"target": some[0]["target"], "anchors": _listed(own)}
        made.append({**place, **_means("anchors", own), **_means("others", behind)})
    return {"Anchors": markdown_table(made, COLUMNS)}


def notes(settings: Mapping[str, Any]) -> str:
    return (
        f"Of {settings['documents']} documents of {settings['length']} tokens. Every layer chooses "
        "the share `target` of each row; mass is the share of a layer's attention that the blocks "
        "keep, needle the share of what falls on the key that a query looks for, each head by the "
        "head of its anchor that keeps most. Anchors are those of highest total of mass and "
        "needles, weighed by how much a layer changes its input (1 - cosine)."
    )


def draw(path: Path, rows: Sequence[Row]) -> None:
    """What the blocks of each layer keep of those behind it, a panel a target and kind of mass."""
    panels = {
        f"{name} at {some[0]['target']:g}": {
            (float(row["layer"]), float(row["anchor"])): min(1.0, row[name]) for row in some
        }
        for some in grouped(rows, "target")
        for name in ("mass", "needle")
    }
    charts.heatmap(path, panels, "layer", "whose blocks")


def _listed(own: Sequence[Row]) -> str:
    return ", ".join(str(row["anchor"]) for row in own)


def _means(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Of layers that there are; None for none."""
    return {
        f"{kind}, {name}": fmean(row[kind] for row in rows) if rows else None
        for kind in ("mass", "needle")
    }


COLUMNS = {
    "target": "target",
    "anchors": "anchors",
    **{
        name: (lambda row, name=name: "–" if row[name] is None else f"{row[name]:.4f}")
        for name in ("mass, anchors", "mass, others", "needle, anchors", "needle, others")
    },
}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.{DIGITS}g}")
