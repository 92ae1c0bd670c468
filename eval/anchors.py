"""What ``calibrate --anchors`` shows: which layers choose blocks for which, and what that keeps."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from cab_hf.calibration.anchors import (
    Allotment,
    Kept,
    averaged_kept,
    cascaded,
    gains,
    nearest,
    similarity,
    within,
)
from cab_hf.calibration.passes import kept_of
from cab_hf.config import CabConfig
from cab_hf.documents import Document
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.on_model import refusing
from cab_hf.eval.report import grouped, markdown_table


def found_in(model: PreTrainedModel, document: Document, config: CabConfig) -> dict[str, Any]:
    """What a sample holds of a document: the layers that were measured, and `Kept` by `SHARES`."""
    layers, kept = kept_of(model, document, config)
    return {"measured": layers, "kept": list(map(recorded, kept))}


def recorded(kept: Kept) -> dict[str, Any]:
    """`Kept` as a sample holds it; a layer has nothing of those behind it."""
    behind = torch.ones_like(kept.mass[..., 0, 0]).triu()[..., None, None]
    some = kept._replace(mass=kept.mass * behind, needle=kept.needle * behind)
    return {name: _packed(x) for name, x in some._asdict().items()}


def averaged(samples: Sequence[Row]) -> list[Kept]:
    """The mean over documents of what was kept, by `SHARES`."""
    return averaged_kept(
        [
            [Kept(*(_unpacked(of_share[name]) for name in Kept._fields)) for of_share in each]
            for each in (sample["kept"] for sample in samples)
        ]
    )


def config_of(samples: Sequence[Row], settings: Mapping[str, Any], target: float) -> CabConfig:
    """The cascade that the samples tell, for a share of the pairs."""
    config, first = CabConfig.from_dict(settings["cab_config"]), samples[0]
    told = first["measured"], first["layers"], settings["anchors"], target
    with refusing("target_densities"):
        return cascaded(config, averaged(samples), *told)


def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a (target, anchor, layer): what the blocks of one keep of the other's attention.

    By the measured share that is nearest to the target; of a layer and its anchor, what each of its
    heads has by its own share, too.
    """
    kept, measured, made = averaged(samples), samples[0]["measured"], []
    for target in settings["target_densities"]:
        some = kept[nearest(target)]
        mass, needle = similarity(some, gains(some))
        with refusing("target_densities"):
            found = within(kept, settings["anchors"], target)
        shown = _shown(kept, found)
        for a, anchor in enumerate(measured):
            for b, layer in enumerate(measured[a:], start=a):
                place = {"target": target, "anchor": anchor, "layer": layer}
                place["chosen"] = found.of_layer[b] == a
                alike = {"mass": float(mass[a, b]), "needle": float(needle[a, b])}
                told = shown[b] if place["chosen"] else dict.fromkeys(shown[b])
                made.append(place | alike | {"importance": float(some.importance[b])} | told)
    return made


def _shown(kept: Sequence[Kept], found: Allotment) -> list[dict[str, float]]:
    """Of each layer, under the allotment: its density, and what it keeps of what there is."""
    mass, needle, density = (
        found.of(torch.stack([getattr(each, name) for each in kept])).mean(-1)
        for name in ("mass", "needle", "density")
    )
    needed = kept[0].needed.mean(-1)
    told = zip(density, mass, needle, needed, strict=True)
    names = ("density", "kept_mass", "kept_needle", "needed")
    return [dict(zip(names, map(float, each), strict=True)) for each in told]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """A row a target: the anchors, and what these and the layers behind them keep."""
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
        f"Of {settings['documents']} documents of {settings['length']} tokens. Mass is the share "
        "of a layer's attention that its blocks keep, needle the share of what falls on the key "
        "that a query looks for, over all heads. Every head takes the head of its anchor, and "
        "every head of an anchor the share of a row, that are worth most at one price, which makes "
        "the mean density of all layers the target. Anchors are those of highest worth, weighed by "
        "how much a layer changes its input (1 - cosine). The figure is of all layers at the "
        "measured share nearest to the target."
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
    found: dict[str, Any] = dict.fromkeys(("density", "mass", "needle"))
    if rows:
        found = {
            "density": fmean(row["density"] for row in rows),
            "mass": fmean(row["kept_mass"] for row in rows),
            "needle": _of_all(rows),
        }
    return {f"{kind}, {name}": value for kind, value in found.items()}


def _of_all(rows: Sequence[Row]) -> float | None:
    """The share that is kept of the mass on needles in all layers together."""
    needed = sum(row["needed"] for row in rows)
    return sum(row["kept_needle"] for row in rows) / needed if needed else None


COLUMNS = {
    "target": "target",
    "anchors": "anchors",
    **{
        f"{kind}, {name}": (
            lambda row, key=f"{kind}, {name}": "–" if row[key] is None else f"{row[key]:.4f}"
        )
        for name in ("anchors", "others")
        for kind in ("density", "mass", "needle")
    },
}


def _packed(x: torch.Tensor) -> dict[str, Any]:
    """float16, compressed: heads by heads by layers by layers are many."""
    content = zlib.compress(x.half().numpy().tobytes(), 9)
    return {"shape": list(x.shape), "float16": base64.b64encode(content).decode()}


def _unpacked(told: Mapping[str, Any]) -> torch.Tensor:
    content = bytearray(zlib.decompress(base64.b64decode(told["float16"])))
    return torch.frombuffer(content, dtype=torch.float16).view(told["shape"]).double()
