"""Calibration: what every head of a model loses at every budget, and the budgets that follow.

Or, with ``--anchors``, what the blocks of every layer keep for every other, and a cascade. Measured
a document at a time by the parts of `cab_hf.calibrate`; a case is one document. Beside the files of
every experiment the folder gets a config for each target density, which `CabConfig.calibrated`
reads.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from cab_hf.calibration.anchors import (
    SHARES,
    Assignment,
    Coverage,
    averaged_kept,
    cascaded,
    gains,
    nearest,
    similarity,
    within,
)
from cab_hf.calibration.budgets import Losses, averaged, budgeted
from cab_hf.calibration.passes import (
    DOCUMENTS,
    KEYS,
    LENGTH,
    kept_of,
    losses,
    require_target,
)
from cab_hf.config import CabConfig, Origin
from cab_hf.documents import Document, recall_document
from cab_hf.eval import charts
from cab_hf.eval.experiment import PROG, SAMPLES, Row, read_provenance, run
from cab_hf.eval.haystack import read_sentences, read_text
from cab_hf.eval.methods import known
from cab_hf.eval.on_model import OnModel, OnModelSettings, refusing
from cab_hf.eval.report import grouped, markdown_table
from cab_hf.fit import number
from cab_hf.needles import split_sentences
from cab_hf.predictors import make_predictor
from cab_hf.renamed import renamed
from cab_hf.runs.log import read_log, write_atomically, writing
from cab_hf.runs.models import load_config
from cab_hf.runs.provenance import file_identity
from cab_hf.runs.settings import (
    UsageError,
    by_device,
    comma_separated,
    option,
    parse_assignment,
    parse_length,
    read_settings,
    require,
)
from cab_hf.runs.stand_ins import built_in_text

BUILT_IN = "built-in"
HEADS = {"heads": "attention_heads", "kv_heads": "key_value_heads"}
DIGITS = 5  # that count, of a recorded loss


@dataclass(frozen=True)
class Settings(OnModelSettings):
    """What a run is told."""

    cab: tuple[str, ...] = option(
        (), "field=value of CabConfig, e.g. query_block=64; repeatable", repeatable=True
    )
    texts: tuple[str, ...] = option(
        (BUILT_IN,),
        f"comma-separated UTF-8 files that keys are hidden in; {BUILT_IN}: Python's reference",
        comma_separated(str),
    )
    target_densities: tuple[float, ...] | None = by_device(
        (0.25, 0.15),
        (0.5, 0.35),
        "comma-separated densities to calibrate for",
        comma_separated(float),
    )
    anchors: int = option(
        0, "how many layers choose blocks, for the others as well (a cascade); 0: all layers", int
    )
    length: int | None = by_device(LENGTH, 2048, "tokens of a document", parse_length)
    documents: int | None = by_device(DOCUMENTS, 1, "how many documents are read", int)
    out: str = option("calibration_results", "folder for the results; a run found there goes on")

    def __post_init__(self) -> None:
        super().__post_init__()
        check = partial(require, self)
        for text in self.texts:
            there = text == BUILT_IN or Path(text).is_file()
            check("texts", there, f"UTF-8 files or {BUILT_IN}", text)
            if text != BUILT_IN:
                read_sentences("texts", text)
        check("texts", self.texts, f"UTF-8 files or {BUILT_IN}")
        targets = self.target_densities
        check("target_densities", targets and all(0 < d <= 1 for d in targets), "in (0, 1]")
        check("anchors", self.anchors >= 0, "a number of layers, or 0")
        check("length", self.length > 0, "a number of tokens")
        check("documents", self.documents > 0, "at least 1")
        _ = self.cab_config  # refuses bad fields here rather than in the middle of a run

    @cached_property
    def cab_config(self) -> CabConfig:
        """What every head shares: ``--cab`` over the defaults."""
        return known(CabConfig.from_dict(renamed(dict(map(parse_assignment, self.cab)))))


class Budgets:
    """What every head loses at every budget, on average over samples, and the budgets that follow.

    Args:
        samples: each with `found_in` of one document.
    """

    NOTES = (
        "Of {documents} documents of {length} tokens with {keys} keys each. Density: attended "
        "over causal pairs, the mean over heads, and of the head that got the least and the "
        "most. Missed: the attention mass a head leaves out, squared, mean over queries and "
        "heads; needle: of the mass on the key that a query looks for, what is left out."
    )

    MEANS = ("density", "missed", "needle")
    EDGES = {"least": min, "most": max}

    def __init__(self, samples: Sequence[Row], settings: Mapping[str, Any]) -> None:
        self.settings, self.layers = settings, samples[0]["layers"]
        self.losses = averaged([self._read(sample) for sample in samples])

    @staticmethod
    def found_in(model: PreTrainedModel, document: Document, config: CabConfig) -> dict[str, Any]:
        """What a sample holds of a document: by layer, [heads][options] of each of `Losses`."""
        result = losses(model, document, config, make_predictor(config).options())
        return {
            "losses": {
                str(layer): {name: _short(x) for name, x in each._asdict().items()}
                for layer, each in result.items()
            }
        }

    @staticmethod
    def _read(sample: Row) -> dict[int, Losses]:
        return {
            int(layer): Losses(
                *(torch.tensor(each[name], dtype=torch.float64) for name in Losses._fields)
            )
            for layer, each in sample["losses"].items()
        }

    def config(self, target: float) -> CabConfig:
        """The budgets that the samples tell, for a share of the pairs."""
        config = CabConfig.from_dict(self.settings["cab_config"])
        with refusing("target_densities"):
            return budgeted(config, self.settings["options"], self.losses, target, self.layers)

    def rows(self) -> list[dict[str, Any]]:
        """One row a (target, layer, head): its option, and what it loses there."""
        options, made = self.settings["options"], []
        for target in self.settings["target_densities"]:
            chosen = self.config(target)
            for layer, each in self.losses.items():
                for head in range(each.density.shape[0]):
                    own = {field: getattr(chosen, field)[layer][head] for field in options[0]}
                    at = options.index(own)
                    of_head = {name: float(x[head, at]) for name, x in each._asdict().items()}
                    place = {"target": target, "layer": layer, "head": head}
                    made.append({**place, **own, **of_head})
        return made

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        """A row a target: what heads spend and lose on average, and the most and least they got."""
        made = []
        for some in grouped(rows, "target"):
            means = {name: fmean(row[name] for row in some) for name in cls.MEANS}
            edges = {name: pick(row["density"] for row in some) for name, pick in cls.EDGES.items()}
            made.append({"target": some[0]["target"], "heads": len(some), **means, **edges})
        columns = {name: name for name in ("target", "heads")}
        columns |= {
            name: (lambda row, name=name: f"{row[name]:.4f}") for name in (*cls.MEANS, *cls.EDGES)
        }
        return {"Spent": markdown_table(made, columns)}

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """What each head attends, a panel a target."""
        panels = {
            f"target {some[0]['target']:g}": {
                (float(row["head"]), float(row["layer"])): row["density"] for row in some
            }
            for some in grouped(rows, "target")
        }
        charts.heatmap(path, panels, "head", "layer")


def _short(x: torch.Tensor) -> list[list[float]]:
    return [[float(f"{value:.{DIGITS}g}") for value in row] for row in x.tolist()]


class Cascade:
    """What blocks of every layer keep for every other, by `SHARES`, and the anchors that follow.

    Args:
        samples: each with `found_in` of one document.
    """

    NOTES = (
        "Of {documents} documents of {length} tokens. Mass is the share of a layer's attention "
        "that its blocks keep, needle the share of what falls on the key that a query looks "
        "for, over all heads. Every head takes the head of its anchor, and every head of an "
        "anchor the share of a row, that are worth most at one price, which makes the mean "
        "density of all layers the target. Anchors are those of highest worth, weighed by how "
        "much a layer changes its input (1 - cosine). The figure is of all layers at the "
        "measured share nearest to the target."
    )

    def __init__(self, samples: Sequence[Row], settings: Mapping[str, Any]) -> None:
        self.settings, self.layers = settings, samples[0]["layers"]
        self.measured = samples[0]["measured"]
        self.kept = averaged_kept(
            [
                [
                    Coverage(*(_unpacked(of_share[name]) for name in Coverage._fields))
                    for of_share in each
                ]
                for each in (sample["kept"] for sample in samples)
            ]
        )

    @staticmethod
    def found_in(model: PreTrainedModel, document: Document, config: CabConfig) -> dict[str, Any]:
        """What a sample holds of a document: the measured layers, and `Coverage` by `SHARES`."""
        layers, kept = kept_of(model, document, config)
        return {"measured": layers, "kept": list(map(_recorded, kept))}

    def config(self, target: float) -> CabConfig:
        """The cascade that the samples tell, for a share of the pairs."""
        config = CabConfig.from_dict(self.settings["cab_config"])
        parts = self.measured, self.layers, self.settings["anchors"], target
        with refusing("target_densities"):
            return cascaded(config, self.kept, *parts)

    def rows(self) -> list[dict[str, Any]]:
        """One row a (target, anchor, layer): what one's blocks keep of the other's attention.

        By the measured share that is nearest to the target; of a layer and its anchor, what each of
        its heads has by its own share, too.
        """
        made = []
        for target in self.settings["target_densities"]:
            some = self.kept[nearest(target)]
            mass, needle = similarity(some, gains(some))
            with refusing("target_densities"):
                result = within(self.kept, self.settings["anchors"], target)
            shown = self._shown(result)
            for a, anchor in enumerate(self.measured):
                for b, layer in enumerate(self.measured[a:], start=a):
                    place = {"target": target, "anchor": anchor, "layer": layer}
                    place["chosen"] = result.of_layer[b] == a
                    alike = {"mass": float(mass[a, b]), "needle": float(needle[a, b])}
                    given = shown[b] if place["chosen"] else dict.fromkeys(shown[b])
                    made.append(place | alike | {"importance": float(some.importance[b])} | given)
        return made

    def _shown(self, result: Assignment) -> list[dict[str, float]]:
        """Of each layer, under the allotment: its density, and what it keeps of what there is."""
        mass, needle, density = (
            result.of(torch.stack([getattr(each, name) for each in self.kept])).mean(-1)
            for name in ("mass", "needle", "density")
        )
        needed = self.kept[0].needed.mean(-1)
        parts = zip(density, mass, needle, needed, strict=True)
        names = ("density", "kept_mass", "kept_needle", "needed")
        return [dict(zip(names, map(float, each), strict=True)) for each in parts]

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """A row a target: the anchors, and what these and the layers behind them keep."""
        made = []
        for some in grouped(rows, "target"):
            chosen = [row for row in some if row["chosen"]]
            own = [row for row in chosen if row["anchor"] == row["layer"]]
            behind = [row for row in chosen if row["anchor"] != row["layer"]]
            anchors = ", ".join(str(row["anchor"]) for row in own)
            place = {"target": some[0]["target"], "anchors": anchors}
            made.append({**place, **_means("anchors", own), **_means("others", behind)})
        shown = {
            key: (lambda row, key=key: "–" if row[key] is None else f"{row[key]:.4f}")
            for key in made[0]
            if key not in ("target", "anchors")
        }
        return {
            "Anchors": markdown_table(made, {"target": "target", "anchors": "anchors", **shown})
        }

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """What the blocks of each layer keep of those behind it, by target and kind of mass."""
        panels = {
            f"{name} at {some[0]['target']:g}": {
                (float(row["layer"]), float(row["anchor"])): min(1.0, row[name]) for row in some
            }
            for some in grouped(rows, "target")
            for name in ("mass", "needle")
        }
        charts.heatmap(path, panels, "layer", "whose blocks")


def _means(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Of layers that there are; None for none."""
    result: dict[str, Any] = dict.fromkeys(("density", "mass", "needle"))
    if rows:
        needed = sum(row["needed"] for row in rows)
        result = {
            "density": fmean(row["density"] for row in rows),
            "mass": fmean(row["kept_mass"] for row in rows),
            # of the mass on needles in all layers together
            "needle": sum(row["kept_needle"] for row in rows) / needed if needed else None,
        }
    return {f"{kind}, {name}": value for kind, value in result.items()}


def _recorded(kept: Coverage) -> dict[str, Any]:
    """`Coverage` as a sample holds it; a layer has nothing of those behind it."""
    behind = torch.ones_like(kept.mass[..., 0, 0]).triu()[..., None, None]
    some = kept._replace(mass=kept.mass * behind, needle=kept.needle * behind)
    return {name: _packed(x) for name, x in some._asdict().items()}


def _packed(x: torch.Tensor) -> dict[str, Any]:
    """float16, compressed: heads by heads by layers by layers are many."""
    content = zlib.compress(x.half().numpy().tobytes(), 9)
    return {"shape": list(x.shape), "float16": base64.b64encode(content).decode()}


def _unpacked(fields: Mapping[str, Any]) -> torch.Tensor:
    content = bytearray(zlib.decompress(base64.b64decode(fields["float16"])))
    return torch.frombuffer(content, dtype=torch.float16).view(fields["shape"]).double()


class Calibrate(OnModel):
    """A sample is what all heads lose on one document."""

    name = "calibrate"
    purpose = "give each head of a model the budget it needs"
    title = "Budgets a head"
    caption = "what each head attends, layer by layer"
    Settings = Settings
    CASE = ("document",)
    GROWS = ("documents", "target_densities")
    LENGTHS = "length"

    @cached_property
    def sentences(self) -> list[str]:
        texts = (
            built_in_text() if text == BUILT_IN else read_text("texts", text)
            for text in self.settings.texts
        )
        return split_sentences("\n\n".join(texts))

    def running(self) -> dict[str, Sequence[str]]:
        return {" and ".join(Path(text).name for text in self.settings.texts): self.sentences}

    def check(self) -> None:
        super().check()
        settings = self.settings
        text = load_config(settings.model, settings.trust_remote_code).get_text_config()
        layers = text.num_hidden_layers - len(settings.cab_config.dense_layers)
        if settings.anchors > layers:
            raise UsageError(
                f"anchors must be at most {layers}, the layers of model {settings.model!r} that "
                f"are not dense; got {settings.anchors}."
            )
        self.document(0)
        with refusing("target_densities"):
            target = min(settings.target_densities)
            require_target(settings.cab_config, settings.anchors > 0, target, settings.length)

    def document(self, index: int) -> Document:
        """What is read of that number."""
        settings = self.settings
        with refusing("length"):
            return recall_document(
                self.tokenizer, self.sentences, settings.length, KEYS, index, settings.seed
            )

    def recorded(self) -> dict[str, Any]:
        settings, given = self.settings, super().recorded()
        given["texts"] = [
            text if text == BUILT_IN else file_identity(text) for text in settings.texts
        ]
        config = settings.cab_config
        given["cab_config"] = config.to_dict()
        if settings.anchors:
            return given
        del given["anchors"]
        options = [dict(option) for option in make_predictor(config).options()]
        return {**given, "options": options}

    def identity(self) -> dict[str, Any]:
        given = super().identity()
        if self.settings.anchors:
            # any number of them follows from the same samples
            del given["anchors"]
            given["shares"] = list(SHARES)
        return given

    def expected(self) -> int:
        return self.settings.documents

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        yield from ({"document": index} for index in range(self.settings.documents))

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What the document tells, of budgets or of anchors."""
        model, document = self.model, self.document(case["document"])
        way = Cascade if self.settings.anchors else Budgets
        with refusing("model"):
            result = way.found_in(model, document, self.settings.cab_config)
        text = model.config.get_text_config()
        counts = {name: number(text, f"num_{given}") for name, given in HEADS.items()}
        return {"layers": text.num_hidden_layers, **counts, **result}

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As `Budgets.rows` or `Cascade.rows`."""
        return _asked(settings)(samples, settings).rows()

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        return _shown(rows).tables(rows)

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        return []

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return _asked(settings).NOTES.format(keys=KEYS, **settings)

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        _shown(rows).draw(path, rows)

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        """Run, then write a config for each target."""
        settings = read_settings(Settings, words, f"{PROG} {cls.name}", cls.purpose)
        run(cls(settings))
        for path in write_configs(Path(settings.out)):
            print(f"config: {path}")
        return 0


EXPERIMENT = Calibrate


def write_configs(folder: Path) -> list[Path]:
    """``cab_config-DENSITY.json`` for each target density of the run in ``folder``."""
    settings = read_provenance(folder)["settings"]
    _, samples = read_log(folder / SAMPLES, Calibrate.CASE)
    paths = []
    for target in settings["target_densities"]:
        paths.append(folder / f"cab_config-{target:g}.json")
        config = _asked(settings)(samples, settings).config(target)
        config = replace(config, origin=_origin(settings, samples[0]))
        with writing(paths[-1]):
            write_atomically(paths[-1], json.dumps(config.to_dict()) + "\n")
    return paths


def _origin(settings: Mapping[str, Any], sample: Row) -> Origin:
    """What was measured for; runs from before heads were recorded do not say how many."""
    counts = sample["layers"], sample.get("heads"), sample.get("kv_heads")
    return Origin(Path(settings["model"]).name, *counts, settings["length"])


def _asked(settings: Mapping[str, Any]) -> type[Budgets | Cascade]:
    """Who knows what to make of samples that were recorded with these settings."""
    return Cascade if "anchors" in settings else Budgets


def _shown(rows: Sequence[Row]) -> type[Budgets | Cascade]:
    """Who has made these rows, and shows them."""
    return Cascade if "anchor" in rows[0] else Budgets
