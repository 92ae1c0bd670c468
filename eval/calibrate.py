"""Calibration: what a model attends at every threshold of mass, and the threshold that follows.

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

from cab_hf.calibration.anchors import THRESHOLDS as ANCHOR_THRESHOLDS
from cab_hf.calibration.anchors import Coverage, averaged_kept, cascaded, gains, similarity
from cab_hf.calibration.density import THRESHOLDS, fitted
from cab_hf.calibration.passes import (
    DOCUMENTS,
    KEYS,
    LENGTH,
    densities_of,
    kept_of,
    require_target,
)
from cab_hf.config import CabConfig, Origin
from cab_hf.eval import charts
from cab_hf.eval.experiment import PROG, SAMPLES, Row, read_provenance, run
from cab_hf.eval.haystack import read_sentences, read_text
from cab_hf.eval.methods import known
from cab_hf.eval.on_model import OnModel, OnModelSettings, refusing
from cab_hf.eval.report import grouped, markdown_table
from cab_hf.hf.fit import number
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
from cab_hf.texts.documents import Document, recall_document
from cab_hf.texts.needles import split_sentences

BUILT_IN = "built-in"
HEADS = {"heads": "attention_heads", "kv_heads": "key_value_heads"}


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
        (0.5, 0.4),
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
        """What stays as it is: ``--cab`` over the defaults."""
        return known(CabConfig.from_dict(dict(map(parse_assignment, self.cab))))


class Threshold:
    """What every layer attends at every threshold, by `THRESHOLDS`, and the one that follows.

    Args:
        samples: each with `found_in` of one document.
    """

    NOTES = (
        "Of {documents} documents of {length} tokens with {keys} keys each. Density: attended "
        "over causal pairs, the mean over layers, and of the layer that attends least and most."
    )

    def __init__(self, samples: Sequence[Row], settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.measured = [
            {int(layer): torch.tensor(each) for layer, each in sample["densities"].items()}
            for sample in samples
        ]

    @staticmethod
    def found_in(model: PreTrainedModel, document: Document, config: CabConfig) -> dict[str, Any]:
        """What a sample holds of a document: by layer, the densities of `densities_of`."""
        result = densities_of(model, document, config)
        return {"densities": {str(layer): each.tolist() for layer, each in result.items()}}

    def config(self, target: float) -> CabConfig:
        """The threshold that the samples tell, for a share of the pairs."""
        config = CabConfig.from_dict(self.settings["cab_config"])
        with refusing("target_densities"):
            return fitted(config, self.measured, target)

    def rows(self) -> list[dict[str, Any]]:
        """One row a (target, layer): what it attends at the measured threshold next above."""
        made = []
        for target in self.settings["target_densities"]:
            chosen = self.config(target).mass_threshold
            at = _measured((1.0, *THRESHOLDS), chosen)
            for layer in self.measured[0]:
                spent = fmean(float(each[layer][at]) for each in self.measured)
                place = {"target": target, "mass_threshold": chosen, "layer": layer}
                made.append({**place, "density": spent})
        return made

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """A row a target: its threshold, and what layers attend on average, at least and most."""
        made = []
        for some in grouped(rows, "target"):
            spent = [row["density"] for row in some]
            edges = {"density": fmean(spent), "least": min(spent), "most": max(spent)}
            made.append({**some[0], "layers": len(some)} | edges)
        columns = {name: name for name in ("target", "layers")}
        columns["mass_threshold"] = lambda row: f"{row['mass_threshold']:g}"
        for name in ("density", "least", "most"):
            columns[name] = partial(_four_digits, name)
        return {"Spent": markdown_table(made, columns)}

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """What each layer attends, a column a target."""
        shares = {(row["target"], float(row["layer"])): row["density"] for row in rows}
        charts.heatmap(path, {"density": shares}, "target", "layer")


def _measured(thresholds: Sequence[float], threshold: float) -> int:
    """Which of the falling ``thresholds`` is the last that is not below one."""
    return max(at for at, measured in enumerate(thresholds) if measured >= threshold)


def _four_digits(name: str, row: Row) -> str:
    return "–" if row[name] is None else f"{row[name]:.4f}"


class Cascade:
    """What blocks of every layer keep for every other, and the anchors that follow.

    Args:
        samples: each with `found_in` of one document.
    """

    NOTES = (
        "Of {documents} documents of {length} tokens. Mass is the share of a layer's attention "
        "that its blocks keep, needle the share of what falls on the key that a query looks "
        "for, over all heads. Every head takes the head of its anchor that is worth most; anchors "
        "are those of highest worth, weighed by how much a layer changes its input (1 - cosine). "
        "Rows and figure are of the measured threshold of mass next above that of the target."
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
        """What a sample holds of a document: the measured layers, and `Coverage` by threshold."""
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

        By the measured threshold next above that of the target; of a layer and its anchor, the
        density, too.
        """
        made = []
        for target in self.settings["target_densities"]:
            config = self.config(target)
            some = self.kept[_measured(ANCHOR_THRESHOLDS, config.mass_threshold)]
            mass, needle = similarity(some, gains(some))
            for a, anchor in enumerate(self.measured):
                for b, layer in enumerate(self.measured[a:], start=a):
                    place = {"target": target, "anchor": anchor, "layer": layer}
                    chosen = anchor == max(each for each in config.anchors if each <= layer)
                    density = float(some.density[a, torch.tensor(config.head_map[layer])].mean())
                    place |= {"chosen": chosen, "density": density if chosen else None}
                    place |= {"mass": float(mass[a, b]), "needle": float(needle[a, b])}
                    of_layer = {"importance": some.importance[b], "needed": some.needed[b].mean()}
                    made.append(place | {name: float(x) for name, x in of_layer.items()})
        return made

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
            key: partial(_four_digits, key) for key in made[0] if key not in ("target", "anchors")
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
        needle = sum(row["needle"] * row["needed"] for row in rows)
        result = {
            "density": fmean(row["density"] for row in rows),
            "mass": fmean(row["mass"] for row in rows),
            # of the mass on needles in all layers together
            "needle": needle / needed if needed else None,
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
    """A sample is what layers attend, or keep for each other, on one document."""

    name = "calibrate"
    purpose = "find the threshold, or the cascade, by which a model attends a density"
    title = "What a model attends by threshold"
    caption = "what each layer attends, or keeps for others"
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
            require_target(settings.cab_config, target, settings.length)

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
        given["cab_config"] = settings.cab_config.to_dict()
        if not settings.anchors:
            del given["anchors"]
        return given

    def identity(self) -> dict[str, Any]:
        given = super().identity()
        # any number of anchors follows from the same samples
        some = given.pop("anchors", None) is not None
        return {**given, "thresholds": list(ANCHOR_THRESHOLDS if some else THRESHOLDS)}

    def expected(self) -> int:
        return self.settings.documents

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        yield from ({"document": index} for index in range(self.settings.documents))

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What the document tells, of densities or of anchors."""
        model, document = self.model, self.document(case["document"])
        way = Cascade if self.settings.anchors else Threshold
        with refusing("model"):
            result = way.found_in(model, document, self.settings.cab_config)
        text = model.config.get_text_config()
        counts = {name: number(text, f"num_{given}") for name, given in HEADS.items()}
        return {"layers": text.num_hidden_layers, **counts, **result}

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As `Threshold.rows` or `Cascade.rows`."""
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


def _asked(settings: Mapping[str, Any]) -> type[Threshold | Cascade]:
    """Who knows what to make of samples that were recorded with these settings."""
    return Cascade if "anchors" in settings else Threshold


def _shown(rows: Sequence[Row]) -> type[Threshold | Cascade]:
    """Who has made these rows, and shows them."""
    return Cascade if "anchor" in rows[0] else Threshold
