"""What ``calibrate`` shows without anchors: what every head loses, and the budgets that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from cab_hf.calibration.budgets import Losses, averaged, budgeted
from cab_hf.calibration.passes import KEYS, losses
from cab_hf.config import CabConfig
from cab_hf.documents import Document
from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.on_model import refusing
from cab_hf.eval.report import grouped, markdown_table
from cab_hf.predictors import make_predictor

DIGITS = 5  # that count, of a recorded loss


def found_in(model: PreTrainedModel, document: Document, config: CabConfig) -> dict[str, Any]:
    """What a sample holds of a document: by layer, [heads][options] of each of `Losses`."""
    found = losses(model, document, config, make_predictor(config).options())
    return {
        "losses": {
            str(layer): {name: _short(x) for name, x in each._asdict().items()}
            for layer, each in found.items()
        }
    }


def config_of(samples: Sequence[Row], settings: Mapping[str, Any], target: float) -> CabConfig:
    """The budgets that the samples tell, for a share of the pairs."""
    return _within(_averaged(samples), samples, settings, target)


def _within(
    found: Mapping[int, Losses], samples: Sequence[Row], settings: Mapping[str, Any], target: float
) -> CabConfig:
    """The budgets by what was ``found`` in the samples on average."""
    config = CabConfig.from_dict(settings["cab_config"])
    with refusing("target_densities"):
        return budgeted(config, settings["options"], found, target, samples[0]["layers"])


def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a (target, layer, head): its option, and what it loses there."""
    options = settings["options"]
    found = _averaged(samples)
    made = []
    for target in settings["target_densities"]:
        chosen = _within(found, samples, settings, target)
        for layer, each in found.items():
            for head in range(each.density.shape[0]):
                own = {field: getattr(chosen, field)[layer][head] for field in options[0]}
                at = options.index(own)
                of_head = {name: float(x[head, at]) for name, x in each._asdict().items()}
                place = {"target": target, "layer": layer, "head": head}
                made.append({**place, **own, **of_head})
    return made


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """A row a target: what heads spend and lose on average, and the most and least they got."""
    made = []
    for some in grouped(rows, "target"):
        means = {name: fmean(row[name] for row in some) for name in MEANS}
        edges = {name: pick(row["density"] for row in some) for name, pick in EDGES.items()}
        made.append({"target": some[0]["target"], "heads": len(some), **means, **edges})
    return {"Spent": markdown_table(made, COLUMNS)}


def notes(settings: Mapping[str, Any]) -> str:
    return (
        f"Of {settings['documents']} documents of {settings['length']} tokens with {KEYS} keys "
        "each. Density: attended over causal pairs, the mean over heads, and of the head that got "
        "the least and the most. Missed: the attention mass a head leaves out, squared, mean over "
        "queries and heads; needle: of the mass on the key that a query looks for, what is left "
        "out."
    )


def draw(path: Path, rows: Sequence[Row]) -> None:
    """What each head attends, a panel a target."""
    panels = {
        f"target {some[0]['target']:g}": {
            (float(row["head"]), float(row["layer"])): row["density"] for row in some
        }
        for some in grouped(rows, "target")
    }
    charts.heatmap(path, panels, "head", "layer")


MEANS = ("density", "missed", "needle")
EDGES = {"least": min, "most": max}
COLUMNS = {
    **{name: name for name in ("target", "heads")},
    **{name: (lambda row, name=name: f"{row[name]:.4f}") for name in (*MEANS, *EDGES)},
}


def _short(x: torch.Tensor) -> list[list[float]]:
    return [[float(f"{value:.{DIGITS}g}") for value in row] for row in x.tolist()]


def _averaged(samples: Sequence[Row]) -> dict[int, Losses]:
    return averaged([_read(sample) for sample in samples])


def _read(sample: Row) -> dict[int, Losses]:
    return {
        int(layer): Losses(*(torch.tensor(each[n], dtype=torch.float64) for n in Losses._fields))
        for layer, each in sample["losses"].items()
    }
